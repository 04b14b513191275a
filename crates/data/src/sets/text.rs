//! Any text files, as words, characters, bytes or pieces.
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use tracing::debug;

use crate::body::{Body, Numbering};
use crate::digest::Content;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::text::{Text, Unit};
use crate::{Data, DataError, FileRecord, Loaded, Provenance, Search};
use taper_files::sha256_file;

/// Text files of the user's own.
pub struct TextFiles;

const NAME: &str = "text";

/// What is put aside of one text where the recipe does not say.
const SHARE: f64 = 0.1;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    path: Paths,
    train: Paths,
    valid: Part,
    test: Part,
    by: Unit,
    vocab: Option<PathBuf>,
    min_count: u64,
    max_vocab: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        let none = || Paths::Many(Vec::new());
        let (path, train) = (none(), none());
        let (valid, test) = (Part::Files(none()), Part::Files(none()));
        Self { path, train, valid, test, by: Unit::Word, vocab: None, min_count: 1, max_vocab: None }
    }
}

#[derive(Clone, Debug, JsonSchema, Deserialize)]
#[serde(untagged, expecting = "expected a path or a list of paths")]
enum Paths {
    One(PathBuf),
    Many(Vec<PathBuf>),
}

/// Files of their own, or a part of the end of those to train on.
#[derive(Clone, Debug, JsonSchema, Deserialize)]
#[serde(untagged, expecting = "expected a path, a list of paths or a fraction between 0 and 1")]
enum Part {
    Share(f64),
    Files(Paths),
}

impl Paths {
    fn list(&self) -> &[PathBuf] {
        match self {
            Self::One(path) => std::slice::from_ref(path),
            Self::Many(paths) => paths,
        }
    }

    /// The files under the keys to blame for them; those of a folder by name.
    fn resolve(&self, key: &str, search: &Search) -> Result<Vec<(String, PathBuf)>, DataError> {
        let mut files = Vec::new();
        for (i, path) in self.list().iter().enumerate() {
            let key = if matches!(self, Self::One(_)) { key.into() } else { format!("{key}[{i}]") };
            let path = search.resolve(path);
            if path.is_dir() {
                let found = texts(&path).map_err(|e| DataError::option(NAME, &key, e.to_string()))?;
                files.extend(found.into_iter().map(|file| (key.clone(), file)));
            } else {
                files.push((key, path));
            }
        }
        Ok(files)
    }
}

/// The files of a folder that end in `.txt`, by name.
fn texts(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let path = entry.map_err(|e| DataError::io(folder, e))?.path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            files.push(path);
        }
    }
    if files.is_empty() {
        return Err(DataError::format(folder, "expected a file or a folder of .txt files, found none in it"));
    }
    files.sort();
    Ok(files)
}

impl Options {
    fn read(given: &Value) -> Result<Self, DataError> {
        let mut chosen: Self = options(NAME, given)?;
        let wrong = |key: &str, message: String| Err(DataError::option(NAME, key, message));
        let whole = !chosen.path.list().is_empty();
        if whole && !chosen.train.list().is_empty() {
            return wrong("train", "expected `path` or `train`, found both".into());
        }
        if whole {
            chosen.train = chosen.path.clone();
        }
        if chosen.train.list().is_empty() {
            return wrong("train", "expected a path or a list of paths, found none".into());
        }
        for (key, part) in [("valid", &mut chosen.valid), ("test", &mut chosen.test)] {
            match part {
                Part::Files(files) if files.list().is_empty() && whole => *part = Part::Share(SHARE),
                Part::Files(files) if files.list().is_empty() => {
                    return wrong(key, "expected a path or a list of paths, found none".into());
                }
                Part::Share(share) if !(*share > 0.0 && *share < 1.0) => {
                    return wrong(key, format!("expected a fraction between 0 and 1, found {share}"));
                }
                _ => {}
            }
        }
        let Self { by, vocab, min_count, max_vocab, .. } = &chosen;
        Numbering::check(NAME, *by, vocab.as_deref(), *min_count, *max_vocab)?;
        Ok(chosen)
    }
}

/// The three texts, each with its first file.
type Splits = [(PathBuf, Body); 3];

/// Reads the texts and cuts off the end of that to train on what has no files of its own: first what to report on.
fn read(chosen: &Options, search: &Search) -> Result<(Splits, Vec<FileRecord>), DataError> {
    let mut records = Vec::new();
    let mut open = |key: &str, paths: &Paths| -> Result<(PathBuf, Body), DataError> {
        let files = paths.resolve(key, search)?;
        for (key, path) in &files {
            let (bytes, sha256) =
                sha256_file(path).map_err(|e| DataError::option(NAME, key, e.to_string()))?;
            records.push(FileRecord { path: path.display().to_string(), bytes, sha256 });
        }
        // `Options::read` saw to it that there is a file.
        let first = files.first().map(|(_, path)| path.clone()).unwrap_or_default();
        Ok((first, Body::read(NAME, &files, chosen.by)?))
    };
    let key = if chosen.path.list().is_empty() { "train" } else { "path" };
    let words = |key: &str, (path, body): (PathBuf, Body)| match body.is_blank() {
        true => Err(DataError::option(NAME, key, format!("{}: expected words, found none", path.display()))),
        false => Ok((path, body)),
    };
    let mut train = words(key, open(key, &chosen.train)?)?;
    // Files of their own, or how much to cut off.
    let mut own = |key: &str, part: &Part| match part {
        Part::Files(files) => Ok(Ok(words(key, open(key, files)?)?)),
        Part::Share(share) => Ok::<_, DataError>(Err(*share)),
    };
    let (valid, test) = (own("valid", &chosen.valid)?, own("test", &chosen.test)?);
    let whole = train.1.len();
    let mut cut = |key: &str, own: Result<(PathBuf, Body), f64>| match own {
        Ok(own) => Ok(own),
        Err(share) => {
            // Of all that there was, so that the order of the parts makes no difference.
            let count = ((whole as f64 * share).round() as usize).max(1);
            words(key, (train.0.clone(), train.1.split_off(count)))
        }
    };
    let test = cut("test", test)?;
    let valid = cut("valid", valid)?;
    let train = words(key, train)?;
    Ok(([train, valid, test], records))
}

impl Dataset for TextFiles {
    fn name(&self) -> &str {
        NAME
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary:
                "your text: any files, as words (one sentence a line), characters, bytes or pieces (BPE)"
                    .into(),
            options: vec![
                option(
                    "path",
                    "[]",
                    "a file, a folder of .txt files or a list; the end of it is put aside. This or train",
                ),
                option("train", "[]", "a file or a list of files to train on"),
                option(
                    "valid",
                    "[]",
                    "a file or a list of files to choose on, or the part of the end of the others to put aside: 0.1 with path",
                ),
                option(
                    "test",
                    "[]",
                    "a file or a list of files to report on, or the part of the end: 0.1 with path",
                ),
                option("by", "word", "`word`, `char`, `byte` or `bpe`: what is predicted"),
                option(
                    "vocab",
                    "null",
                    "the vocabulary's file: one word a line, or with `bpe` a tokenizer.json; built from the training text unless given",
                ),
                option("min_count", "1", "rarer words or characters of the training text become <unk>"),
                option(
                    "max_vocab",
                    "null",
                    "at most this many words, with <unk> and <eos>, characters, with <unk>, or pieces, with all bytes (4096 unless given)",
                ),
            ],
        }
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Text)
    }

    fn paths(&self) -> &'static [&'static str] {
        &["path", "train", "valid", "test", "vocab"]
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        Options::read(given).map(drop)
    }

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        let chosen = Options::read(given)?;
        let (splits, files) = read(&chosen, search)?;
        let names = ["train", "valid", "test"].into_iter();
        let mut content: Vec<Content> =
            names.zip(&splits).map(|(name, (_, body))| body.content(name)).collect();
        let numbering = match &chosen.vocab {
            Some(path) => Numbering::read(NAME, &search.resolve(path), chosen.by)?,
            None => Numbering::of(NAME, &splits[0].1, chosen.by, chosen.min_count, chosen.max_vocab)?,
        };
        if chosen.vocab.is_none() {
            numbering.keep(search, &content[0].sha256, chosen.by, chosen.min_count);
        }
        content.extend(numbering.content(chosen.vocab.is_some()));
        let text = numbering
            .text(splits.each_ref().map(|(path, body)| (body, path.as_path())), chosen.by)
            .map_err(|e| DataError::option(NAME, "vocab", e.to_string()))?;
        let Text { train, valid, test, vocab, .. } = &text;
        debug!("text of {} + {} + {} units of {}", train.len(), valid.len(), test.len(), vocab.len());
        let source = splits[0].0.parent().unwrap_or(Path::new(".")).display().to_string();
        let provenance = Provenance { source, files, ..Provenance::generated(NAME, content) };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}
