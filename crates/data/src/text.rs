//! Words, characters, bytes or pieces and their numbers.
use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::files::MOST_BYTES;
use super::{Bpe, DataError};
use taper_files::{place, read_regular};

/// The end of a line.
pub const EOS: &str = "<eos>";
/// A word that is not in the vocabulary.
pub const UNK: &str = "<unk>";

/// What a text is a sequence of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, schemars::JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// What stands between white space, and [`EOS`] after every line.
    #[default]
    Word,
    /// Unicode's scalar values, line feeds among them.
    Char,
    /// Bytes, whatever they stand for.
    Byte,
    /// Runs of bytes that occur often, as byte-level BPE finds them.
    Bpe,
}

/// Text as the numbers of its units.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// To train on.
    pub train: Arc<[u32]>,
    /// To choose on.
    pub valid: Arc<[u32]>,
    /// To report on.
    pub test: Arc<[u32]>,
    /// The words; a word's number is its place here.
    pub vocab: Arc<[String]>,
    /// What a number stands for.
    pub unit: Unit,
    /// What text by pieces is cut by.
    pub pieces: Option<Arc<Bpe>>,
}

impl Text {
    /// What numbers stand for: words with spaces between them and [`EOS`] as the end of a line, or characters, or bytes. A number
    /// that is in no vocabulary is [`UNK`].
    pub fn decode(&self, numbers: &[u32]) -> String {
        let unit = |number: &u32| self.vocab.get(*number as usize).map_or(UNK, String::as_str);
        match self.unit {
            Unit::Word => {
                let mut text = String::new();
                for word in numbers.iter().map(unit) {
                    let begins = text.is_empty() || text.ends_with('\n') || word == EOS;
                    text += if begins { "" } else { " " };
                    text += if word == EOS { "\n" } else { word };
                }
                text
            }
            Unit::Char => numbers.iter().map(unit).collect(),
            Unit::Byte => {
                whole_characters(numbers.iter().map(|n| u8::try_from(*n).unwrap_or(b'?')).collect())
            }
            Unit::Bpe => whole_characters(self.bytes(numbers)),
        }
    }

    /// The bytes of pieces.
    fn bytes(&self, numbers: &[u32]) -> Vec<u8> {
        let pieces = self.pieces.iter();
        pieces.flat_map(|pieces| numbers.iter().flat_map(|number| pieces.piece(*number))).copied().collect()
    }

    /// How many characters (of text by characters) or bytes numbers stand for; none for words.
    pub fn measure(&self, numbers: &[u32]) -> Option<u64> {
        match self.unit {
            Unit::Word => None,
            Unit::Char | Unit::Byte => Some(numbers.len() as u64),
            Unit::Bpe => {
                let pieces = self.pieces.iter();
                let length =
                    pieces.flat_map(|pieces| numbers.iter().map(|number| pieces.piece(*number).len()));
                Some(length.map(|length| length as u64).sum())
            }
        }
    }

    /// A text with another that goes on from it: between words there is a space.
    pub fn joined(&self, text: &str, more: &str) -> String {
        let edges = [text.chars().next_back(), more.chars().next()];
        let apart = self.unit != Unit::Word || edges.iter().any(|edge| edge.is_none_or(char::is_whitespace));
        [text, if apart { "" } else { " " }, more].concat()
    }

    /// The numbers of a text. What is not in the vocabulary is [`UNK`], or an error that names it where there is none; ends of
    /// lines are left out where the vocabulary does not have them.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let known: HashMap<&str, u32> = self.vocab.iter().map(String::as_str).zip(0..).collect();
        let number = |unit: &str| {
            let missing = || format!("{unit:?} is not in the vocabulary, which has no {UNK}");
            known.get(unit).or(known.get(UNK)).copied().ok_or_else(missing)
        };
        match self.unit {
            Unit::Word => {
                let has_ends = known.contains_key(EOS);
                words(text).filter(|word| has_ends || *word != EOS).map(number).collect()
            }
            Unit::Char => characters(text).map(number).collect(),
            Unit::Byte => Ok(text.bytes().map(u32::from).collect()),
            Unit::Bpe => self.pieces.as_ref().map_or(Ok(Vec::new()), |pieces| pieces.encode(text)),
        }
    }

    /// The words or characters of a text that are not in the vocabulary, each once, as they come.
    pub fn unknown<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let units: Box<dyn Iterator<Item = &'a str>> = match self.unit {
            Unit::Word => Box::new(words(text).filter(|word| *word != EOS)),
            Unit::Char => Box::new(characters(text)),
            Unit::Byte | Unit::Bpe => return Vec::new(),
        };
        let mut seen: HashSet<&str> = self.vocab.iter().map(String::as_str).collect();
        units.filter(|unit| seen.insert(unit)).collect()
    }

    /// The number of the end of a line, if the vocabulary has it.
    pub fn end(&self) -> Option<u32> {
        let end = match self.unit {
            Unit::Word => EOS,
            Unit::Char => "\n",
            Unit::Byte => return Some(u32::from(b'\n')),
            Unit::Bpe => return self.encode("\n").ok().and_then(|end| end.first().copied()),
        };
        self.vocab.iter().position(|known| known == end).map(|at| at as u32)
    }

    /// Other text under the numbers of this one's vocabulary; the error says why it cannot be.
    pub fn renumber(&self, other: &Self) -> Result<Self, String> {
        if self.unit != other.unit {
            let [expected, found] = [self.unit, other.unit].map(|unit| format!("{unit:?}").to_lowercase());
            return Err(format!("expected text by {expected}, found text by {found}"));
        }
        if self.unit == Unit::Bpe {
            let recut = |numbers: &[u32]| -> Result<Arc<[u32]>, String> {
                let text = String::from_utf8(other.bytes(numbers))
                    .map_err(|_| "expected whole characters, found a part of one".to_owned())?;
                Ok(self.encode(&text)?.into())
            };
            let [train, valid, test] = [&other.train, &other.valid, &other.test].map(|part| recut(part));
            return Ok(Self { train: train?, valid: valid?, test: test?, ..self.clone() });
        }
        let known: HashMap<&str, u32> = self.vocab.iter().map(String::as_str).zip(0..).collect();
        let new: Vec<Option<u32>> =
            other.vocab.iter().map(|unit| known.get(&**unit).or(known.get(UNK)).copied()).collect();
        let renumber = |numbers: &[u32]| -> Result<Arc<[u32]>, String> {
            let number = |old: &u32| {
                let unit = || other.vocab.get(*old as usize).map_or(UNK, String::as_str);
                let missing =
                    || format!("{:?} is not in the vocabulary of the run, which has no {UNK}", unit());
                new.get(*old as usize).copied().flatten().ok_or_else(missing)
            };
            numbers.iter().map(number).collect()
        };
        let [train, valid, test] = [&other.train, &other.valid, &other.test].map(|part| renumber(part));
        Ok(Self { train: train?, valid: valid?, test: test?, ..self.clone() })
    }
}

/// Bytes as text, without a part of a character at the end.
fn whole_characters(mut bytes: Vec<u8>) -> String {
    if let Err(e) = std::str::from_utf8(&bytes)
        && e.error_len().is_none()
    {
        bytes.truncate(e.valid_up_to());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The words of a text, with [`EOS`] for every line feed.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n').flat_map(|line| {
        let end = line.ends_with('\n').then_some(EOS);
        line.split_whitespace().chain(end)
    })
}

/// The characters of a text, each as a text of its own.
pub fn characters(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()])
}

/// The vocabulary of bytes: those that can be shown, as they are, the others by their number.
pub fn bytes_vocabulary() -> Arc<[String]> {
    let name = |byte: u8| match byte {
        b' '..=b'~' => char::from(byte).to_string(),
        _ => format!("<0x{byte:02X}>"),
    };
    (0..=255).map(name).collect()
}

/// Words in a fixed order, found by their text.
#[derive(Clone, Debug, Default)]
pub struct Vocabulary {
    words: Vec<String>,
    // Only looked up, never walked: its order cannot reach a result.
    numbers: HashMap<String, u32>,
}

impl Vocabulary {
    /// Adds a word that is new; its number.
    pub fn add(&mut self, word: &str) -> u32 {
        if let Some(number) = self.numbers.get(word) {
            return *number;
        }
        let number = self.words.len() as u32;
        self.words.push(word.into());
        self.numbers.insert(word.into(), number);
        number
    }

    /// The words of `lines` and [`EOS`], in the order they first appear.
    pub fn by_appearance<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let mut vocabulary = Self::default();
        for line in lines {
            for word in line.split_whitespace().chain([EOS]) {
                vocabulary.add(word);
            }
        }
        vocabulary
    }

    /// [`UNK`] and [`EOS`], then the words of `lines` that occur at least `min_count` times, the most frequent first
    /// (among equals the first to appear), at most `max` words in all.
    pub fn by_frequency<'a>(
        lines: impl Iterator<Item = &'a str>,
        min_count: u64,
        max: Option<usize>,
    ) -> Self {
        Self::ranked(lines.flat_map(str::split_whitespace), &[UNK, EOS], min_count, max)
    }

    /// The same of any units, after `first`.
    pub(crate) fn ranked<'a>(
        units: impl Iterator<Item = &'a str>,
        first: &[&str],
        min_count: u64,
        max: Option<usize>,
    ) -> Self {
        let (mut all, mut counts) = (Self::default(), Vec::new());
        for word in units {
            let number = all.add(word) as usize;
            counts.resize(all.words.len(), 0u64);
            counts[number] += 1;
        }
        let mut order: Vec<usize> = (0..counts.len()).filter(|i| counts[*i] >= min_count).collect();
        // Stable, so that equals stay in the order of appearance.
        order.sort_by_key(|i| std::cmp::Reverse(counts[*i]));
        let mut kept = Self::default();
        for word in first.iter().copied().chain(order.iter().map(|i| all.words[*i].as_str())) {
            if max.is_none_or(|max| kept.words.len() < max) {
                kept.add(word);
            }
        }
        kept
    }

    /// A vocabulary from a file of one word a line.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let mut vocabulary = Self::default();
        for (line, word) in read_lines(path)?.iter().enumerate() {
            if vocabulary.add(word) as usize != line {
                let message = format!("expected each word once, found `{word}` again at line {}", line + 1);
                return Err(DataError::format(path, message));
            }
        }
        Ok(vocabulary)
    }

    /// Saves the words, one a line.
    pub fn write(&self, path: &Path) -> Result<(), DataError> {
        let mut text = self.words.join("\n");
        text.push('\n');
        Ok(place(path, text.as_bytes())?)
    }

    /// The words.
    pub fn words(&self) -> Arc<[String]> {
        self.words.as_slice().into()
    }

    /// The numbers of the words of `lines`, with [`EOS`] after each line. A word that is not in the vocabulary is
    /// [`UNK`], or an error where the vocabulary has none.
    pub fn encode<'a>(
        &self,
        lines: impl Iterator<Item = &'a str>,
        file: &Path,
    ) -> Result<Arc<[u32]>, DataError> {
        self.number(lines.flat_map(|line| line.split_whitespace().chain([EOS])), file)
    }

    /// The numbers of any units.
    pub(crate) fn number<'a>(
        &self,
        units: impl Iterator<Item = &'a str>,
        file: &Path,
    ) -> Result<Arc<[u32]>, DataError> {
        let unknown = self.numbers.get(UNK);
        let mut numbers = Vec::new();
        for word in units {
            let number = self.numbers.get(word).or(unknown);
            let message = || format!("the word `{word}` is not in the vocabulary, which has no `{UNK}`");
            numbers.push(*number.ok_or_else(|| DataError::format(file, message()))?);
        }
        Ok(numbers.into())
    }
}

/// The lines of a UTF-8 file.
pub fn read_lines(path: &Path) -> Result<Vec<String>, DataError> {
    Ok(read_text(path)?.lines().map(String::from).collect())
}

/// The whole of a UTF-8 file.
pub fn read_text(path: &Path) -> Result<String, DataError> {
    let bytes = read_regular(path, MOST_BYTES)?;
    String::from_utf8(bytes).map_err(|e| DataError::format(path, format!("expected UTF-8 text: {e}")))
}
