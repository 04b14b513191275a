//! In the place of `bpe`, in a build without the feature `tokenizers`.
use std::path::Path;
use std::sync::Arc;

use crate::{Content, DataError};

/// The least size of a vocabulary: all bytes.
pub const BYTES: usize = 256;

/// The size of a vocabulary where nobody says it.
pub const SIZE: usize = 4096;

/// The most pieces of a vocabulary.
pub const MOST: usize = 1 << 20;

const MISSING: &str = "this build cannot cut text into pieces (BPE): build it with the feature `tokenizers`, or give `by: word`, `char` or `byte`";

/// Whether this build has it.
pub fn available() -> Result<(), String> {
    Err(MISSING.into())
}

/// Pieces of words, of which there are none in this build.
#[derive(Debug, PartialEq)]
pub enum Bpe {}

impl Bpe {
    /// Says what is missing.
    pub fn train<'a>(_: impl Iterator<Item = &'a str>, _: usize) -> Result<Self, String> {
        Err(MISSING.into())
    }

    /// Says what is missing.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        Err(DataError::format(path, MISSING))
    }

    /// Saves it.
    pub fn write(&self, _: &Path) -> Result<(), DataError> {
        match *self {}
    }

    /// All pieces.
    pub fn vocab(&self) -> Arc<[String]> {
        match *self {}
    }

    /// What tells it from others.
    pub fn content(&self) -> &Content {
        match *self {}
    }

    /// The numbers of a text.
    pub fn encode(&self, _: &str) -> Result<Vec<u32>, String> {
        match *self {}
    }

    /// What a number stands for.
    pub fn piece(&self, _: u32) -> &[u8] {
        match *self {}
    }
}
