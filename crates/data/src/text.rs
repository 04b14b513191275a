//! Words and their numbers.
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::DataError;
use super::files::MOST_BYTES;
use taper_files::{place, read_regular};

/// The end of a line.
pub const EOS: &str = "<eos>";
/// A word that is not in the vocabulary.
pub const UNK: &str = "<unk>";

/// Text as word numbers.
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
        let (mut all, mut counts) = (Self::default(), Vec::new());
        for word in lines.flat_map(str::split_whitespace) {
            let number = all.add(word) as usize;
            counts.resize(all.words.len(), 0u64);
            counts[number] += 1;
        }
        let mut order: Vec<usize> = (0..counts.len()).filter(|i| counts[*i] >= min_count).collect();
        // Stable, so that equals stay in the order of appearance.
        order.sort_by_key(|i| std::cmp::Reverse(counts[*i]));
        let mut kept = Self::default();
        for word in [UNK, EOS].into_iter().chain(order.iter().map(|i| all.words[*i].as_str())) {
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
        let unknown = self.numbers.get(UNK);
        let mut numbers = Vec::new();
        for word in lines.flat_map(|line| line.split_whitespace().chain([EOS])) {
            let number = self.numbers.get(word).or(unknown);
            let message = || format!("the word `{word}` is not in the vocabulary, which has no `{UNK}`");
            numbers.push(*number.ok_or_else(|| DataError::format(file, message()))?);
        }
        Ok(numbers.into())
    }
}

/// The lines of a UTF-8 file.
pub fn read_lines(path: &Path) -> Result<Vec<String>, DataError> {
    let bytes = read_regular(path, MOST_BYTES)?;
    let text =
        String::from_utf8(bytes).map_err(|e| DataError::format(path, format!("expected UTF-8 text: {e}")))?;
    Ok(text.lines().map(String::from).collect())
}
