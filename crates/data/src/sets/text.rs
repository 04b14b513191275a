//! Any text files, as words, characters or bytes.
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use tracing::debug;

use crate::digest::Content;
use crate::files::MOST_BYTES;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::text::{EOS, Text, UNK, Unit, Vocabulary, bytes_vocabulary, characters, read_lines, read_text};
use crate::{Data, DataError, FileRecord, Loaded, Provenance, Search};
use taper_files::{read_regular, sha256_file};

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
        if chosen.by != Unit::Word && chosen.vocab.is_some() {
            return wrong("vocab", "expected no file: only words are numbered by one".into());
        }
        if chosen.by == Unit::Byte && (chosen.max_vocab.is_some() || chosen.min_count != 1) {
            let key = if chosen.max_vocab.is_some() { "max_vocab" } else { "min_count" };
            return wrong(key, "expected none: there are 256 bytes, and all are known".into());
        }
        if let Some(found) = chosen.max_vocab.filter(|most| *most < 2) {
            return wrong("max_vocab", format!("expected at least 2, with {UNK} and {EOS}, found {found}"));
        }
        Ok(chosen)
    }

    /// The vocabulary that the training text makes.
    fn vocabulary(&self, train: &Body) -> Vocabulary {
        match train {
            Body::Lines(lines) => {
                Vocabulary::by_frequency(lines.iter().map(String::as_str), self.min_count, self.max_vocab)
            }
            Body::Characters(text) => {
                Vocabulary::ranked(characters(text), &[UNK], self.min_count, self.max_vocab)
            }
            // Every byte is known beforehand.
            Body::Bytes(_) => Vocabulary::default(),
        }
    }
}

/// A text that is not numbered yet.
enum Body {
    Lines(Vec<String>),
    Characters(String),
    Bytes(Vec<u8>),
}

impl Body {
    fn read(files: &[(String, PathBuf)], by: Unit) -> Result<Self, DataError> {
        let mut body = match by {
            Unit::Word => Self::Lines(Vec::new()),
            Unit::Char => Self::Characters(String::new()),
            Unit::Byte => Self::Bytes(Vec::new()),
        };
        for (key, path) in files {
            // A file is named by the key it stands under: that is what there is to correct.
            let at = |e: DataError| DataError::option(NAME, key, e.to_string());
            match &mut body {
                Self::Lines(lines) => lines.extend(read_lines(path).map_err(at)?),
                Self::Characters(text) => text.push_str(&read_text(path).map_err(at)?),
                Self::Bytes(bytes) => {
                    bytes.extend(read_regular(path, MOST_BYTES).map_err(DataError::from).map_err(at)?);
                }
            }
        }
        Ok(body)
    }

    /// Lines, characters or bytes.
    fn len(&self) -> usize {
        match self {
            Self::Lines(lines) => lines.len(),
            Self::Characters(text) => text.chars().count(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether there is nothing to learn from.
    fn is_blank(&self) -> bool {
        match self {
            Self::Lines(lines) => lines.iter().all(|line| line.trim().is_empty()),
            Self::Characters(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.is_empty(),
        }
    }

    /// Takes so many lines, characters or bytes off the end.
    fn split_off(&mut self, count: usize) -> Self {
        let at = self.len().saturating_sub(count);
        match self {
            Self::Lines(lines) => Self::Lines(lines.split_off(at)),
            Self::Characters(text) => {
                let at = text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
                Self::Characters(text.split_off(at))
            }
            Self::Bytes(bytes) => Self::Bytes(bytes.split_off(at)),
        }
    }

    fn content(&self, split: &str) -> Content {
        match self {
            Self::Lines(lines) => Content::of_lines(split, lines.iter().map(String::as_str)),
            Self::Characters(text) => Content::of_bytes(split, text.as_bytes(), self.len()),
            Self::Bytes(bytes) => Content::of_bytes(split, bytes, bytes.len()),
        }
    }

    fn encode(&self, vocabulary: &Vocabulary, file: &Path) -> Result<std::sync::Arc<[u32]>, DataError> {
        match self {
            Self::Lines(lines) => vocabulary.encode(lines.iter().map(String::as_str), file),
            Self::Characters(text) => vocabulary.number(characters(text), file),
            Self::Bytes(bytes) => Ok(bytes.iter().map(|byte| u32::from(*byte)).collect()),
        }
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
        Ok((first, Body::read(&files, chosen.by)?))
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
            summary: "your text: any files, as words (one sentence a line), characters or bytes".into(),
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
                option("by", "word", "`word`, `char` or `byte`: what is predicted"),
                option(
                    "vocab",
                    "null",
                    "the vocabulary's file, one word a line; built from the training text unless given",
                ),
                option("min_count", "1", "rarer words or characters of the training text become <unk>"),
                option(
                    "max_vocab",
                    "null",
                    "at most this many words, with <unk> and <eos>, or characters, with <unk>",
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
        let vocabulary = match &chosen.vocab {
            Some(path) => read_vocabulary(&search.resolve(path))?,
            None => chosen.vocabulary(&splits[0].1),
        };
        if chosen.vocab.is_some() {
            // What words are numbered by is an input like the text.
            content.push(Content::of_lines("vocab", vocabulary.words().iter().map(String::as_str)));
        } else if let Some(cache) = search.keeps().filter(|_| chosen.by == Unit::Word) {
            let key = &content[0].sha256[..16];
            let name = format!("{key}-{}-{}.txt", chosen.min_count, vocabulary.words().len());
            // It can be built again from the same text; a cache that cannot be written is no reason to stop.
            let _ = vocabulary.write(&cache.join("vocab").join(name));
        }
        let encode = |(path, body): &(PathBuf, Body)| {
            body.encode(&vocabulary, path).map_err(|e| DataError::option(NAME, "vocab", e.to_string()))
        };
        let [train, valid, test] = [encode(&splits[0])?, encode(&splits[1])?, encode(&splits[2])?];
        let vocab = if chosen.by == Unit::Byte { bytes_vocabulary() } else { vocabulary.words() };
        debug!("text of {} + {} + {} units of {}", train.len(), valid.len(), test.len(), vocab.len());
        let text = Text { train, valid, test, vocab, unit: chosen.by };
        let source = splits[0].0.parent().unwrap_or(Path::new(".")).display().to_string();
        let provenance = Provenance { source, files, ..Provenance::generated(NAME, content) };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}

/// The words of a file that was named. A recipe writes nowhere but into its runs and the cache, so that none is made there.
fn read_vocabulary(path: &Path) -> Result<Vocabulary, DataError> {
    let wrong = |message: String| DataError::option(NAME, "vocab", message);
    if !path.exists() {
        return Err(wrong(format!(
            "expected a file of one word a line, found none at {}: leave the key out to have a vocabulary built from \
             the training text (it is then kept in the cache, under vocab/)",
            path.display()
        )));
    }
    Vocabulary::read(path).map_err(|e| wrong(e.to_string()))
}
