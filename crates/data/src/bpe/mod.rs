//! Byte-level BPE: text as pieces of words, each a run of bytes.
//!
//! A vocabulary is trained here ([`train`]), by counting in whole numbers with ties broken by the pieces' numbers, so that the same
//! text gives the same pieces everywhere; or it is read from a `tokenizer.json` ([`file`]). The crate `tokenizers` cuts a text into
//! words and merges their bytes. It is given what was checked here, not the file: its reader takes a damaged one apart with panics.
//!
//! A text is numbered line by line, each with its line feed: what a line becomes does not depend on the lines around it.
mod file;
mod train;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use rayon::prelude::*;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{AddedToken, Tokenizer};

use crate::{Content, DataError};

/// The least size of a vocabulary: all bytes.
pub const BYTES: usize = 256;

/// The size of a vocabulary where nobody says it.
pub const SIZE: usize = 4096;

/// The most pieces of a vocabulary.
pub const MOST: usize = 1 << 20;

/// Lines that a task of the pool numbers.
const LINES: usize = 256;

/// Whether this build has it.
pub fn available() -> Result<(), String> {
    Ok(())
}

/// Pieces of words.
pub struct Bpe {
    tokenizer: Tokenizer,
    parts: Parts,
    /// What each piece stands for.
    bytes: Vec<Vec<u8>>,
    vocab: Arc<[String]>,
    /// What tells it from others: the digest of its file.
    content: Content,
}

/// What a tokenizer is made of, checked.
#[derive(Clone, Debug)]
struct Parts {
    /// Pieces in the order of their numbers, in the alphabet of [`letter`].
    pieces: Vec<String>,
    /// Which two pieces become one, the first before the others.
    merges: Vec<(String, String)>,
    /// Texts that are one token wherever they stand, in the order of their numbers.
    added: Vec<AddedToken>,
    /// How a text is cut into words.
    words: PreTokenizerWrapper,
    /// Whether characters are composed first.
    composed: bool,
    /// Whether a word that is a piece is that piece, whatever the merges make of it.
    whole_words: bool,
}

impl Bpe {
    /// The pieces that texts are made of: all bytes, then the pairs that occur most often in the words of `texts`, up to `size`
    /// pieces in all or until no pair occurs twice.
    pub fn train<'a>(texts: impl Iterator<Item = &'a str>, size: usize) -> Result<Self, String> {
        let (pieces, merges) = train::learn(texts, size)?;
        let spelled = |piece: &u32| spell(&pieces[*piece as usize]);
        let merges = merges.iter().map(|(a, b)| (spelled(a), spelled(b))).collect();
        let parts = Parts {
            pieces: pieces.iter().map(|piece| spell(piece)).collect(),
            merges,
            added: Vec::new(),
            words: train::words(),
            composed: false,
            whole_words: false,
        };
        let text = file::text(&parts)?;
        Self::new(parts, text.as_bytes())
    }

    /// Reads a `tokenizer.json`.
    pub fn read(path: &Path) -> Result<Self, DataError> {
        let (parts, bytes) = file::read(path)?;
        Self::new(parts, &bytes).map_err(|message| DataError::format(path, message))
    }

    /// Saves it as a `tokenizer.json`.
    pub fn write(&self, path: &Path) -> Result<(), DataError> {
        let text = file::text(&self.parts).map_err(|message| DataError::format(path, message))?;
        Ok(taper_files::place(path, text.as_bytes())?)
    }

    fn new(parts: Parts, file: &[u8]) -> Result<Self, String> {
        let said = |e: tokenizers::Error| e.to_string();
        let numbers: Vocab = parts.pieces.iter().cloned().zip(0..).collect();
        let model =
            BPE::builder().vocab_and_merges(numbers, parts.merges.clone()).ignore_merges(parts.whole_words);
        let mut tokenizer = Tokenizer::new(model.build().map_err(said)?);
        tokenizer.with_pre_tokenizer(Some(parts.words.clone()));
        if parts.composed {
            tokenizer.with_normalizer(Some(NFC)).map_err(said)?;
        }
        tokenizer.add_tokens(parts.added.clone()).map_err(said)?;
        let mut bytes: Vec<Vec<u8>> = parts.pieces.iter().map(|piece| bytes_of(piece)).collect();
        let mut vocab = parts.pieces.clone();
        for (number, token) in
            parts.added.iter().enumerate().map(|(i, token)| (parts.pieces.len() + i, token))
        {
            let found = tokenizer.token_to_id(&token.content);
            if found != u32::try_from(number).ok() {
                let found = found.map_or("none".to_owned(), |found| found.to_string());
                return Err(format!(
                    "expected the number {number} for the added token {:?}, found {found}",
                    token.content
                ));
            }
            bytes.push(token.content.clone().into_bytes());
            vocab.push(token.content.clone());
        }
        let content = Content::of_bytes("vocab", file, vocab.len());
        Ok(Self { tokenizer, parts, bytes, vocab: vocab.into(), content })
    }

    /// All pieces, in the order of their numbers; bytes that are no printable ASCII are spelled with other letters, as in a
    /// `tokenizer.json`.
    pub fn vocab(&self) -> Arc<[String]> {
        self.vocab.clone()
    }

    /// What tells it from others.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The numbers of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        let block = |lines: &[&str]| -> Result<Vec<u32>, String> {
            let mut numbers = Vec::new();
            for line in lines {
                let encoding = self.tokenizer.encode_fast(*line, false).map_err(|e| e.to_string())?;
                numbers.extend_from_slice(encoding.get_ids());
            }
            Ok(numbers)
        };
        let blocks: Vec<Vec<u32>> = lines.par_chunks(LINES).map(block).collect::<Result<_, String>>()?;
        Ok(blocks.concat())
    }

    /// What a number stands for; nothing where there is no such piece.
    pub fn piece(&self, number: u32) -> &[u8] {
        self.bytes.get(number as usize).map_or(&[], Vec::as_slice)
    }
}

impl fmt::Debug for Bpe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bpe").field("content", &self.content).finish_non_exhaustive()
    }
}

impl PartialEq for Bpe {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

/// The letters that bytes are spelled with in a `tokenizer.json`: those that can be seen in Latin-1 stand for themselves, the others
/// for letters after those.
static LETTERS: LazyLock<[char; BYTES]> = LazyLock::new(|| {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut others = '\u{100}'..='\u{143}';
    std::array::from_fn(|byte| match u8::try_from(byte) {
        Ok(byte) if seen(byte) => char::from(byte),
        // There are 68 others.
        _ => others.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
});

static READ: LazyLock<HashMap<char, u8>> =
    LazyLock::new(|| (0..=u8::MAX).map(|byte| (letter(byte), byte)).collect());

fn letter(byte: u8) -> char {
    LETTERS[usize::from(byte)]
}

fn spell(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| letter(*byte)).collect()
}

/// The byte that a letter spells.
fn byte_of(letter: char) -> Option<u8> {
    READ.get(&letter).copied()
}

fn bytes_of(piece: &str) -> Vec<u8> {
    piece.chars().filter_map(byte_of).collect()
}
