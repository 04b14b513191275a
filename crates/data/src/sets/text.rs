//! Any UTF-8 text files, as words.
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;

use crate::digest::Content;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::text::{Text, Vocabulary, read_lines};
use crate::{Data, DataError, FileRecord, Loaded, Provenance, Search};
use taper_files::sha256_file;

/// Text files of the user's own.
pub struct TextFiles;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    train: Paths,
    valid: Paths,
    test: Paths,
    vocab: Option<PathBuf>,
    min_count: u64,
    max_vocab: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        let none = || Paths::Many(Vec::new());
        Self { train: none(), valid: none(), test: none(), vocab: None, min_count: 1, max_vocab: None }
    }
}

impl Options {
    fn splits(&self) -> [(&'static str, &Paths); 3] {
        [("train", &self.train), ("valid", &self.valid), ("test", &self.test)]
    }
}

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
enum Paths {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

impl Paths {
    fn list(&self) -> &[PathBuf] {
        match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Many(paths) => paths,
        }
    }

    /// The files, those that are not absolute under the directory the user named, when they are there.
    fn resolve(&self, search: &Search) -> Vec<PathBuf> {
        let roots = || search.dir.iter().chain(&search.env_dir);
        let resolve =
            |path: &PathBuf| roots().map(|r| r.join(path)).find(|p| p.exists()).unwrap_or(path.clone());
        self.list().iter().map(resolve).collect()
    }
}

impl Dataset for TextFiles {
    fn name(&self) -> &str {
        "text"
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary: "any UTF-8 text files, one sentence a line, as words".into(),
            options: vec![
                option("train", "[]", "a file or a list of files to train on; needed"),
                option("valid", "[]", "a file or a list of files to choose on; needed"),
                option("test", "[]", "a file or a list of files to report on; needed"),
                option(
                    "vocab",
                    "null",
                    "the vocabulary's file, one word a line; built from the training text unless given",
                ),
                option("min_count", "1", "rarer words of the training files become <unk>"),
                option("max_vocab", "null", "at most this many words, with <unk> and <eos>"),
            ],
        }
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Text)
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        let chosen: Options = options(self.name(), given)?;
        for (split, paths) in chosen.splits() {
            if paths.list().is_empty() {
                let message = "expected a path or a list of paths, found none";
                return Err(DataError::option(self.name(), split, message));
            }
        }
        Ok(())
    }

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        self.check(given)?;
        let chosen: Options = options(self.name(), given)?;
        // A file is named by the key it stands under: that is what there is to correct.
        let at = |key: String| move |e: DataError| DataError::option("text", &key, e.to_string());
        let (mut splits, mut files, mut content) = (Vec::new(), Vec::new(), Vec::new());
        for (split, paths) in chosen.splits() {
            let resolved = paths.resolve(search);
            let mut lines = Vec::new();
            for (i, path) in resolved.iter().enumerate() {
                let key = if matches!(paths, Paths::One(_)) { split.into() } else { format!("{split}[{i}]") };
                let (bytes, sha256) = sha256_file(path).map_err(DataError::from).map_err(at(key.clone()))?;
                files.push(FileRecord { path: path.display().to_string(), bytes, sha256 });
                lines.extend(read_lines(path).map_err(at(key))?);
            }
            // `check` saw to it that there is a file.
            let first = resolved.into_iter().next().unwrap_or_default();
            if lines.iter().all(|line| line.trim().is_empty()) {
                let message = format!("{}: expected words, found none", first.display());
                return Err(DataError::option(self.name(), split, message));
            }
            content.push(Content::of_lines(split, lines.iter().map(String::as_str)));
            splits.push((first, lines));
        }
        let train = || splits[0].1.iter().map(String::as_str);
        let build = || Vocabulary::by_frequency(train(), chosen.min_count, chosen.max_vocab);
        let vocabulary = match &chosen.vocab {
            Some(path) if path.exists() => Vocabulary::read(path).map_err(at("vocab".into()))?,
            // A recipe writes nowhere but into its runs and the cache.
            Some(path) => {
                let message = format!(
                    "expected a file of one word a line, found none at {}: leave the key out to have a vocabulary built from \
                     the training text (it is then kept in the cache, under vocab/)",
                    path.display()
                );
                return Err(DataError::option(self.name(), "vocab", message));
            }
            None => {
                let vocabulary = build();
                let key = &content[0].sha256[..16];
                let name = format!("{key}-{}-{}.txt", chosen.min_count, vocabulary.words().len());
                if let Some(cache) = search.keeps() {
                    // It can be built again from the same text; a cache that cannot be written is no reason to stop.
                    let _ = vocabulary.write(&cache.join("vocab").join(name));
                }
                vocabulary
            }
        };
        if chosen.vocab.is_some() {
            // What words are numbered by is an input like the text.
            content.push(Content::of_lines("vocab", vocabulary.words().iter().map(String::as_str)));
        }
        let encode = |i: usize| {
            let words = vocabulary.encode(splits[i].1.iter().map(String::as_str), &splits[i].0);
            words.map_err(at("vocab".into()))
        };
        let (train, valid, test) = (encode(0)?, encode(1)?, encode(2)?);
        let text = Text { train, valid, test, vocab: vocabulary.words() };
        let source = splits[0].0.parent().unwrap_or(Path::new(".")).display().to_string();
        let provenance = Provenance { source, files, ..Provenance::generated(self.name(), content) };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}
