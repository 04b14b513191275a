//! Text before it is numbered, and what it is numbered by.
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::digest::Content;
use crate::files::MOST_BYTES;
use crate::text::{EOS, Text, UNK, Unit, Vocabulary, bytes_vocabulary, characters, read_lines, read_text};
use crate::{Bpe, DataError, Search, bpe};
use taper_files::read_regular;

/// A text that is not numbered yet.
pub enum Body {
    Lines(Vec<String>),
    Characters(String),
    Bytes(Vec<u8>),
}

impl Body {
    /// Reads files, each under the key that it stands under in the section of `set`: that is what there is to correct.
    pub fn read(set: &str, files: &[(String, PathBuf)], by: Unit) -> Result<Self, DataError> {
        let mut body = match by {
            Unit::Word => Self::Lines(Vec::new()),
            Unit::Char | Unit::Bpe => Self::Characters(String::new()),
            Unit::Byte => Self::Bytes(Vec::new()),
        };
        for (key, path) in files {
            let at = |e: DataError| DataError::option(set, key, e.to_string());
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

    /// Lines of words, with single spaces between them and a line feed after each where they are not cut at words.
    pub fn of_lines(lines: Vec<String>, by: Unit) -> Self {
        if by == Unit::Word {
            return Self::Lines(lines);
        }
        let mut text = String::new();
        for line in lines {
            for (i, word) in line.split_whitespace().enumerate() {
                text += if i > 0 { " " } else { "" };
                text += word;
            }
            text.push('\n');
        }
        if by == Unit::Byte { Self::Bytes(text.into_bytes()) } else { Self::Characters(text) }
    }

    /// Lines, characters or bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Lines(lines) => lines.len(),
            Self::Characters(text) => text.chars().count(),
            Self::Bytes(bytes) => bytes.len(),
        }
    }

    /// Whether there is nothing to learn from.
    pub fn is_blank(&self) -> bool {
        match self {
            Self::Lines(lines) => lines.iter().all(|line| line.trim().is_empty()),
            Self::Characters(text) => text.is_empty(),
            Self::Bytes(bytes) => bytes.is_empty(),
        }
    }

    /// Takes so many lines, characters or bytes off the end.
    pub fn split_off(&mut self, count: usize) -> Self {
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

    pub fn content(&self, split: &str) -> Content {
        match self {
            Self::Lines(lines) => Content::of_lines(split, lines.iter().map(String::as_str)),
            Self::Characters(text) => Content::of_bytes(split, text.as_bytes(), self.len()),
            Self::Bytes(bytes) => Content::of_bytes(split, bytes, bytes.len()),
        }
    }

    /// Its characters, if it is cut at those or at pieces.
    pub fn characters(&self) -> &str {
        match self {
            Self::Characters(text) => text,
            Self::Lines(_) | Self::Bytes(_) => "",
        }
    }
}

/// What a text is numbered by.
pub enum Numbering {
    /// Words or characters.
    Units(Vocabulary),
    Bytes,
    Pieces(Arc<Bpe>),
}

impl Numbering {
    /// The vocabulary of `set` that the training text makes: of words and characters those that occur at least `min_count` times,
    /// the most frequent first.
    pub fn of(
        set: &str,
        train: &Body,
        by: Unit,
        min_count: u64,
        most: Option<usize>,
    ) -> Result<Self, DataError> {
        Ok(match (by, train) {
            (Unit::Bpe, body) => {
                let size = most.unwrap_or(bpe::SIZE);
                let pieces = Bpe::train([body.characters()].into_iter(), size);
                Self::Pieces(Arc::new(pieces.map_err(|e| DataError::option(set, "by", e))?))
            }
            (_, Body::Lines(lines)) => {
                let lines = lines.iter().map(String::as_str);
                Self::Units(Vocabulary::by_frequency(lines, min_count, most))
            }
            (_, Body::Characters(text)) => {
                Self::Units(Vocabulary::ranked(characters(text), &[UNK], min_count, most))
            }
            (_, Body::Bytes(_)) => Self::Bytes,
        })
    }

    /// The vocabulary of a file that was named: words, one a line, or a `tokenizer.json`. A recipe writes nowhere but into its runs
    /// and the cache, so that none is made there.
    pub fn read(set: &str, path: &Path, by: Unit) -> Result<Self, DataError> {
        let wrong = |message: String| DataError::option(set, "vocab", message);
        if !path.exists() {
            let what = if by == Unit::Bpe { "a tokenizer.json" } else { "a file of one word a line" };
            return Err(wrong(format!(
                "expected {what}, found none at {}: leave the key out to have a vocabulary built from \
                 the training text (it is then kept in the cache, under vocab/)",
                path.display()
            )));
        }
        match by {
            Unit::Bpe => Bpe::read(path).map(|pieces| Self::Pieces(Arc::new(pieces))),
            _ => Vocabulary::read(path).map(Self::Units),
        }
        .map_err(|e| wrong(e.to_string()))
    }

    /// Refuses what would not be read, or not be right, of the keys of `set`.
    pub fn check(
        set: &str,
        by: Unit,
        vocab: Option<&Path>,
        min_count: u64,
        most: Option<usize>,
    ) -> Result<(), DataError> {
        let wrong = |key: &str, message: String| Err(DataError::option(set, key, message));
        if by == Unit::Bpe {
            bpe::available().map_err(|e| DataError::option(set, "by", e))?;
        }
        if !matches!(by, Unit::Word | Unit::Bpe) && vocab.is_some() {
            return wrong("vocab", "expected no file: only words and pieces are numbered by one".into());
        }
        let unread = if most.is_some() { "max_vocab" } else { "min_count" };
        match (by, most) {
            (Unit::Byte, _) if most.is_some() || min_count != 1 => {
                wrong(unread, "expected none: there are 256 bytes, and all are known".into())
            }
            (Unit::Bpe, _) if min_count != 1 => {
                wrong("min_count", "expected none: every text is made of pieces".into())
            }
            (Unit::Bpe, Some(_)) if vocab.is_some() => {
                wrong("max_vocab", "expected none beside `vocab`, which has as many pieces as it has".into())
            }
            (Unit::Bpe, Some(size)) if !(bpe::BYTES..=bpe::MOST).contains(&size) => {
                let (least, most) = (bpe::BYTES, bpe::MOST);
                wrong("max_vocab", format!("expected {least}, for all bytes, to {most} pieces, found {size}"))
            }
            (Unit::Word | Unit::Char, Some(size)) if size < 2 => {
                wrong("max_vocab", format!("expected at least 2, with {UNK} and {EOS}, found {size}"))
            }
            _ => Ok(()),
        }
    }

    /// What of it a run is a function of beside its text: a file that was named, and pieces, which can be found in other ways.
    pub fn content(&self, named: bool) -> Option<Content> {
        match self {
            Self::Units(vocabulary) => {
                named.then(|| Content::of_lines("vocab", vocabulary.words().iter().map(String::as_str)))
            }
            Self::Bytes => None,
            Self::Pieces(pieces) => Some(pieces.content().clone()),
        }
    }

    /// Keeps words or pieces that were built from a text of this digest in the cache. They can be built again: a cache that cannot
    /// be written is no reason to stop.
    pub fn keep(&self, search: &Search, digest: &str, by: Unit, min_count: u64) {
        let Some(folder) = search.keeps().map(|cache| cache.join("vocab")) else { return };
        let key = digest.get(..16).unwrap_or(digest);
        let _ = match self {
            Self::Units(vocabulary) if by == Unit::Word => {
                let name = format!("{key}-{min_count}-{}.txt", vocabulary.words().len());
                vocabulary.write(&folder.join(name))
            }
            Self::Pieces(pieces) => {
                let name = format!("{key}-{}-tokenizer.json", pieces.vocab().len());
                pieces.write(&folder.join(name))
            }
            _ => Ok(()),
        };
    }

    /// The numbers of texts, each with the file to blame.
    pub fn text(&self, splits: [(&Body, &Path); 3], unit: Unit) -> Result<Text, DataError> {
        let [train, valid, test] = splits.map(|(body, file)| self.encode(body, file));
        let vocab = match self {
            Self::Units(vocabulary) => vocabulary.words(),
            Self::Bytes => bytes_vocabulary(),
            Self::Pieces(pieces) => pieces.vocab(),
        };
        let pieces = match self {
            Self::Pieces(pieces) => Some(pieces.clone()),
            _ => None,
        };
        Ok(Text { train: train?, valid: valid?, test: test?, vocab, unit, pieces })
    }

    fn encode(&self, body: &Body, file: &Path) -> Result<Arc<[u32]>, DataError> {
        match (self, body) {
            (Self::Units(vocabulary), Body::Lines(lines)) => {
                vocabulary.encode(lines.iter().map(String::as_str), file)
            }
            (Self::Units(vocabulary), body) => vocabulary.number(characters(body.characters()), file),
            (Self::Pieces(pieces), body) => match pieces.encode(body.characters()) {
                Ok(numbers) => Ok(numbers.into()),
                Err(e) => Err(DataError::format(file, e)),
            },
            (Self::Bytes, Body::Bytes(bytes)) => Ok(bytes.iter().map(|byte| u32::from(*byte)).collect()),
            (Self::Bytes, _) => Ok(Arc::default()),
        }
    }
}
