//! `tokenizer.json`: byte-level BPE as the crate `tokenizers` writes it, read with suspicion.
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};
use taper_files::read_regular;
use tokenizers::AddedToken;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::{BYTES, MOST, Parts, byte_of, letter};
use crate::DataError;

/// No vocabulary is longer.
const MOST_BYTES: u64 = 256 << 20;

/// What a file says, as far as it matters here.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f64>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    ignore_merges: bool,
    vocab: BTreeMap<String, u32>,
    merges: Vec<Merge>,
}

/// Two pieces, or both in one text with a space between them.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Line(String),
}

/// A file's parts, and its bytes.
pub fn read(path: &Path) -> Result<(Parts, Vec<u8>), DataError> {
    let bytes = read_regular(path, MOST_BYTES)?;
    let file: File = serde_json::from_slice(&bytes).map_err(|e| {
        DataError::format(path, format!("expected a tokenizer.json with the `model` BPE, found: {e}"))
    })?;
    let parts = file.parts().map_err(|message| DataError::format(path, message))?;
    Ok((parts, bytes))
}

impl File {
    fn parts(self) -> Result<Parts, String> {
        let composed = match kind(&self.normalizer) {
            None if self.normalizer.is_null() => false,
            Some("NFC") => true,
            other => return Err(wrong("normalizer", "none or NFC", other)),
        };
        words_are_bytes(&self.pre_tokenizer)?;
        let words: PreTokenizerWrapper = serde_json::from_value(self.pre_tokenizer)
            .map_err(|e| format!("pre_tokenizer: expected one that is known, found: {e}"))?;
        let Model {
            kind,
            dropout,
            continuing_subword_prefix,
            end_of_word_suffix,
            ignore_merges,
            vocab,
            merges,
        } = self.model;
        if kind.as_deref().is_some_and(|kind| kind != "BPE") {
            return Err(wrong("model.type", "BPE", kind.as_deref()));
        }
        if dropout.is_some_and(|dropout| dropout != 0.0) {
            return Err("model.dropout: expected none, for a text has one reading".into());
        }
        let affixes = [&continuing_subword_prefix, &end_of_word_suffix];
        if let Some(affix) = affixes.into_iter().flatten().find(|affix| !affix.is_empty()) {
            return Err(format!("model: expected no prefix or suffix of pieces, found {affix:?}"));
        }
        // Tokens that are added stand after all pieces, but for those that are in the vocabulary too.
        let mut added: BTreeMap<u32, Added> = BTreeMap::new();
        for token in self.added_tokens {
            if token.content.is_empty() {
                return Err(format!("added_tokens: expected a text for the number {}, found none", token.id));
            }
            if token.lstrip || token.rstrip {
                return Err(format!(
                    "added_tokens: expected lstrip and rstrip to be false, found {:?} with one of them, which would swallow the \
                     spaces beside it",
                    token.content
                ));
            }
            if let Some(twice) = added.insert(token.id, token) {
                return Err(format!("added_tokens: expected each number once, found {} twice", twice.id));
            }
        }
        let inside = |number: &u32, piece: &String| added.get(number).is_some_and(|a| a.content == *piece);
        let special: BTreeSet<u32> =
            vocab.iter().filter(|(piece, number)| inside(number, piece)).map(|(_, number)| *number).collect();
        let pieces = numbered(vocab, &special)?;
        for (number, id) in (pieces.len() as u32..).zip(added.keys()) {
            if *id != number {
                return Err(format!(
                    "added_tokens: expected the numbers from {} on, after all pieces, found {id}",
                    pieces.len()
                ));
            }
        }
        let merges = merges.into_iter().map(Merge::pair).collect::<Result<Vec<_>, String>>()?;
        let known: HashSet<&str> = pieces.iter().map(String::as_str).collect();
        for (a, b) in &merges {
            let joined = [a.as_str(), b].concat();
            if let Some(missing) = [a, b, &joined].into_iter().find(|piece| !known.contains(piece.as_str())) {
                return Err(format!(
                    "model.merges: {a:?} + {b:?}: expected pieces of the vocabulary, found {missing:?}"
                ));
            }
        }
        let added = added.into_values().map(|a| {
            AddedToken::from(a.content, a.special).single_word(a.single_word).normalized(a.normalized)
        });
        Ok(Parts { pieces, merges, added: added.collect(), words, composed, whole_words: ignore_merges })
    }
}

/// Pieces in the order of their numbers: 0, 1, 2 and so on, with all bytes among them, and nothing but bytes. The `last` are not
/// pieces but texts that were added, and only at the end.
fn numbered(vocab: BTreeMap<String, u32>, last: &BTreeSet<u32>) -> Result<Vec<String>, String> {
    if vocab.len() > MOST {
        return Err(format!("model.vocab: expected at most {MOST} pieces, found {}", vocab.len()));
    }
    let count = vocab.len().saturating_sub(last.len());
    let mut pieces = vec![None; count];
    for (piece, number) in vocab {
        if last.contains(&number) {
            continue;
        }
        if piece.is_empty() || piece.chars().any(|c| byte_of(c).is_none()) {
            return Err(format!("model.vocab: expected bytes as GPT-2 spells them, found {piece:?}"));
        }
        match pieces.get_mut(number as usize) {
            Some(place @ None) => *place = Some(piece),
            Some(Some(other)) => {
                return Err(format!(
                    "model.vocab: expected each number once, found {number} for {piece:?} and {other:?}"
                ));
            }
            None => {
                return Err(format!(
                    "model.vocab: expected numbers below {count}, one a piece, found {number} for {piece:?}"
                ));
            }
        }
    }
    // As many places as pieces, and none was taken twice: all are filled.
    let pieces: Vec<String> = pieces.into_iter().flatten().collect();
    let known: HashSet<&str> = pieces.iter().map(String::as_str).collect();
    match (0..=u8::MAX).find(|byte| !known.contains(letter(*byte).to_string().as_str())) {
        None => Ok(pieces),
        Some(byte) => {
            Err(format!("model.vocab: expected all {BYTES} bytes, found no piece for 0x{byte:02X}"))
        }
    }
}

impl Merge {
    fn pair(self) -> Result<(String, String), String> {
        match self {
            Self::Pair(a, b) => Ok((a, b)),
            Self::Line(line) => match line.split_once(' ') {
                Some((a, b)) if !b.contains(' ') => Ok((a.to_owned(), b.to_owned())),
                _ => Err(format!(
                    "model.merges: expected two pieces with a space between them, found {line:?}"
                )),
            },
        }
    }
}

fn kind(part: &Value) -> Option<&str> {
    part.get("type").and_then(Value::as_str)
}

fn wrong(key: &str, expected: &str, found: Option<&str>) -> String {
    let found = found.map_or("none".to_owned(), |found| format!("`{found}`"));
    format!("{key}: expected {expected}, found {found} (byte-level BPE, as GPT-2's, is what is read)")
}

/// How a text may be cut: nothing of it is lost.
const KEEPING: [&str; 4] = ["Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"];

/// Whether words are cut by known means and spelled as bytes, once, at the end, without a space that was not there.
fn words_are_bytes(part: &Value) -> Result<(), String> {
    const KEY: &str = "pre_tokenizer";
    let list = match (kind(part), part.get("pretokenizers").and_then(Value::as_array)) {
        (Some("Sequence"), Some(list)) => list.as_slice(),
        _ => std::slice::from_ref(part),
    };
    let Some((last, before)) = list.split_last() else { return Err(wrong(KEY, "ByteLevel", None)) };
    if kind(last) != Some("ByteLevel") {
        return Err(wrong(KEY, "ByteLevel, or a Sequence that ends in it", kind(last)));
    }
    if last.get("add_prefix_space").and_then(Value::as_bool) != Some(false) {
        return Err(format!("{KEY}.add_prefix_space: expected false, for a text is read as it is"));
    }
    for part in before {
        match kind(part) {
            Some("Digits") => {}
            Some("Split") => {
                // What is removed would be in no piece, and a text would not come back.
                let behavior = part.get("behavior").and_then(Value::as_str);
                if !behavior.is_some_and(|behavior| KEEPING.contains(&behavior)) {
                    let expected = format!("one of {}, which keep all of a text", KEEPING.join(", "));
                    return Err(wrong(&format!("{KEY}: Split.behavior"), &expected, behavior));
                }
            }
            other => return Err(wrong(KEY, "Split or Digits before ByteLevel", other)),
        }
    }
    Ok(())
}

/// The file of a tokenizer.
pub fn text(parts: &Parts) -> Result<String, String> {
    let said = |e: serde_json::Error| e.to_string();
    let vocab: serde_json::Map<String, Value> =
        parts.pieces.iter().enumerate().map(|(number, piece)| (piece.clone(), number.into())).collect();
    let added = parts.added.iter().enumerate().map(|(i, token)| {
        json!({
            "id": parts.pieces.len() + i,
            "content": token.content,
            "single_word": token.single_word,
            "lstrip": token.lstrip,
            "rstrip": token.rstrip,
            "normalized": token.normalized,
            "special": token.special,
        })
    });
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": parts.composed.then(|| json!({"type": "NFC"})),
        "pre_tokenizer": serde_json::to_value(&parts.words).map_err(said)?,
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": parts.whole_words,
            "vocab": vocab,
            "merges": parts.merges,
        },
    });
    serde_json::to_string(&file).map_err(said)
}
