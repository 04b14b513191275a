//! Text by pieces: byte-level BPE, trained and loaded, and what becomes of files that are none.
#![cfg(feature = "tokenizers")]
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use taper_data::{Bpe, Data, DataError, DataRegistry, Loaded, Search, Text};

const TEXT: &str =
    "the cat sat on the mat\nthe dog sat on the log\n\nDie Katze saß auf der Matte, 1989 – naïve 猫\n";

fn trained() -> Bpe {
    Bpe::train([TEXT.repeat(3).as_str()].into_iter(), 300).unwrap()
}

fn decoded(pieces: &Bpe, numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| pieces.piece(*number)).copied().collect()
}

fn load(name: &str, options: &Value, search: &Search) -> Result<Loaded, DataError> {
    DataRegistry::builtin().get(name)?.load(options, search)
}

fn text(loaded: Loaded) -> Text {
    match loaded.data {
        Data::Text(text) => text,
        Data::Images { .. } => panic!("expected text"),
    }
}

/// A folder with a file, and its search.
fn folder(name: &str, content: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, content).unwrap();
    (dir, path)
}

proptest! {
    #[test]
    fn any_text_comes_back_from_its_pieces(text in any::<String>(), known in "[a-z \n]{0,80}") {
        let pieces = trained();
        for text in [text, known] {
            let numbers = pieces.encode(&text).unwrap();
            prop_assert_eq!(decoded(&pieces, &numbers), text.into_bytes());
        }
    }
}

#[test]
fn frequent_words_are_one_piece_and_all_bytes_are_known() {
    let pieces = trained();
    assert_eq!(pieces.encode(" the the").unwrap().len(), 2);
    let sat = pieces.encode(" sat").unwrap();
    assert_eq!((sat.len(), decoded(&pieces, &sat)), (1, b" sat".to_vec()));
    assert!((0..=255).all(|byte| pieces.piece(u32::from(byte)) == [byte]));
    assert_eq!(pieces.piece(u32::MAX), b"");
    assert!(pieces.vocab().len() <= 300);
}

#[test]
fn pieces_are_the_same_whatever_the_threads_and_forever() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let all = |threads| {
        pool(threads).install(|| {
            let pieces = trained();
            let numbers = pieces.encode(&TEXT.repeat(700)).unwrap();
            (pieces.content().clone(), numbers)
        })
    };
    let (one, many) = (all(1), all(5));
    assert!(one == many);
    // Runs are functions of it.
    assert_eq!(one.0.sha256, "6f4170308a38db0a5b71ca87e9681995491d422491f48f18415137ff7d3e78d0");
}

#[test]
fn what_a_line_becomes_does_not_depend_on_those_around_it() {
    let pieces = trained();
    let lines: Vec<u32> = TEXT.split_inclusive('\n').flat_map(|line| pieces.encode(line).unwrap()).collect();
    assert_eq!(pieces.encode(TEXT).unwrap(), lines);
}

#[test]
fn a_text_by_pieces_keeps_its_vocabulary_and_reads_it_again() {
    let (dir, path) = folder("mine.txt", TEXT.repeat(20).as_bytes());
    let search = Search { cache: Some(dir.path().join("cache")), ..Search::default() };
    let built = load("text", &json!({"path": path, "by": "bpe", "max_vocab": 290}), &search).unwrap();
    let splits: Vec<&str> = built.provenance.content.iter().map(|c| c.split.as_str()).collect();
    assert_eq!(splits, ["train", "valid", "test", "vocab"]);
    let kept: Vec<PathBuf> =
        std::fs::read_dir(dir.path().join("cache/vocab")).unwrap().map(|e| e.unwrap().path()).collect();
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    assert!(kept.display().to_string().ends_with("-290-tokenizer.json"), "{kept:?}");
    let read = load("text", &json!({"path": path, "by": "bpe", "vocab": kept}), &search).unwrap();
    assert_eq!(read.provenance.content, built.provenance.content);
    let (read, built) = (text(read), text(built));
    assert_eq!(read, built);
    assert_eq!(built.vocab.len(), 290);
    // Cut at characters, all parts together are the text.
    let whole = [&built.train, &built.valid, &built.test].map(|part| built.decode(part)).concat();
    assert_eq!(whole, TEXT.repeat(20));
    assert_eq!(built.measure(&built.test), Some(built.decode(&built.test).len() as u64));
    assert_eq!(built.decode(&[built.end().unwrap()]), "\n");
    // A part of a character at the end is left out, one inside is shown.
    assert_eq!(built.decode(&[u32::from(b'a'), 0xC3]), "a");
    assert_eq!(built.decode(&[0xC3, u32::from(b'a')]), "\u{FFFD}a");
}

#[test]
fn another_text_is_cut_by_the_pieces_of_a_run() {
    let (_one, path) = folder("mine.txt", TEXT.repeat(20).as_bytes());
    let (_two, other) = folder("other.txt", "quite another text\n".repeat(40).as_bytes());
    let read = |path: &Path, size: usize| {
        let options = json!({"path": path, "by": "bpe", "max_vocab": size});
        text(load("text", &options, &Search::default()).unwrap())
    };
    let (mine, other) = (read(&path, 290), read(&other, 270));
    let renumbered = mine.renumber(&other).unwrap();
    assert_eq!(renumbered.pieces, mine.pieces);
    assert_eq!(renumbered.decode(&renumbered.test), other.decode(&other.test));
}

/// The saved file of a vocabulary, changed.
fn file(change: impl FnOnce(&mut Value)) -> Vec<u8> {
    let (_dir, path) = folder("t.json", b"");
    trained().write(&path).unwrap();
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut file);
    file.to_string().into_bytes()
}

#[test]
fn files_of_others_are_read_as_they_are_meant() {
    // As GPT-2's: merges as lines, and a special token that is in the vocabulary too, with the last number.
    let bytes = file(|file| {
        let merges = file["model"]["merges"].as_array().unwrap().clone();
        let line =
            |pair: &Value| json!(format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
        file["model"]["merges"] = merges.iter().map(line).collect();
        let last = file["model"]["vocab"].as_object().unwrap().len();
        file["model"]["vocab"]["<|end|>"] = json!(last);
        file["added_tokens"] = json!([{"id": last, "content": "<|end|>", "special": true}]);
    });
    let (_dir, path) = folder("tokenizer.json", &bytes);
    let (read, own) = (Bpe::read(&path).unwrap(), trained());
    let last = own.vocab().len() as u32;
    let numbers = [own.encode("the cat").unwrap(), vec![last], own.encode(" sat").unwrap()].concat();
    assert_eq!(read.encode("the cat<|end|> sat").unwrap(), numbers);
    assert_eq!(decoded(&read, &numbers), b"the cat<|end|> sat");
    // As Llama 3's: words cut by a pattern of the file, and composed characters.
    let bytes = file(|file| {
        let split = json!({"type": "Split", "pattern": {"Regex": "\\p{N}{1,2}"}, "behavior": "Isolated", "invert": false});
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [split, bytes]});
        file["normalizer"] = json!({"type": "NFC"});
    });
    let (_dir, path) = folder("tokenizer.json", &bytes);
    let read = Bpe::read(&path).unwrap();
    assert_eq!(decoded(&read, &read.encode("1989 e\u{301}").unwrap()), "1989 é".as_bytes());
}

#[test]
fn every_way_to_cut_that_is_read_keeps_all_of_a_text() {
    for behavior in ["Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"] {
        for invert in [false, true] {
            let bytes = file(|file| {
                file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "[ a]+"}, "behavior": behavior, "invert": invert},
                    {"type": "Digits", "individual_digits": true},
                    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
                ]});
            });
            let (_dir, path) = folder("tokenizer.json", &bytes);
            let read = Bpe::read(&path).unwrap();
            let text = "  the cat  sat, 1989 aa\n a";
            assert_eq!(decoded(&read, &read.encode(text).unwrap()), text.as_bytes(), "{behavior} {invert}");
        }
    }
}

#[test]
fn hostile_files_are_refused_with_what_is_wrong() {
    type Change = Box<dyn FnOnce(&mut Value)>;
    let set = |path: &'static str, value: Value| -> Change {
        Box::new(move |file| *file.pointer_mut(path).unwrap() = value)
    };
    let piece = |piece: &'static str, number: u64| -> Change {
        Box::new(move |file| file["model"]["vocab"][piece] = json!(number))
    };
    let split = |behavior: &'static str| -> Change {
        set(
            "/pre_tokenizer",
            json!({"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"String": " "}, "behavior": behavior, "invert": false},
                {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
            ]}),
        )
    };
    let cases: Vec<(Change, &str)> = vec![
        (set("/model", json!({"type": "Unigram", "vocab": [["a", 0.1]]})), "expected a tokenizer.json"),
        (set("/model/type", json!("WordPiece")), "model.type: expected BPE, found `WordPiece`"),
        (set("/model/dropout", json!(0.1)), "model.dropout: expected none"),
        (set("/model/end_of_word_suffix", json!("</w>")), "expected no prefix or suffix"),
        (
            set("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
            "normalizer: expected none or NFC",
        ),
        (set("/pre_tokenizer", Value::Null), "pre_tokenizer: expected ByteLevel"),
        (
            set("/pre_tokenizer", json!({"type": "Sequence", "pretokenizers": []})),
            "pre_tokenizer: expected ByteLevel",
        ),
        (set("/pre_tokenizer/add_prefix_space", json!(true)), "add_prefix_space: expected false"),
        (
            set(
                "/pre_tokenizer",
                json!({"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "(((((("}, "behavior": "Isolated", "invert": false},
                    {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true},
                ]}),
            ),
            "pre_tokenizer: expected one that is known",
        ),
        // What would lose some of a text.
        (split("Removed"), "Split.behavior: expected one of Isolated, "),
        (split("removed"), "Split.behavior: expected one of Isolated, "),
        (
            set("/added_tokens", json!([{"id": 299, "content": "<mask>", "lstrip": true}])),
            "added_tokens: expected lstrip and rstrip to be false, found \"<mask>\"",
        ),
        (
            set("/added_tokens", json!([{"id": 299, "content": "<mask>", "rstrip": true}])),
            "added_tokens: expected lstrip and rstrip to be false",
        ),
        // What the crate's own reader would take apart with a panic: a pair longer than every piece.
        (set("/model/merges", json!([["the", "Ġthe"]])), "expected pieces of the vocabulary"),
        (set("/model/merges", json!([["a", "b", "c"]])), "expected a tokenizer.json"),
        (set("/model/merges", json!(["abc"])), "two pieces with a space between them"),
        (set("/model/merges", json!([["", "a"]])), "expected pieces of the vocabulary"),
        (piece("new", u64::from(u32::MAX)), "expected numbers below"),
        (piece("new", 3), "expected each number once"),
        (piece("a new", 299), "expected bytes as GPT-2 spells them"),
        (piece("", 299), "expected bytes as GPT-2 spells them"),
        (piece("neg", 1 << 40), "expected a tokenizer.json"),
        (
            Box::new(|file| drop(file["model"]["vocab"].as_object_mut().unwrap().remove("a"))),
            "expected numbers below",
        ),
        (
            set("/added_tokens", json!([{"id": 7, "content": "<x>"}])),
            "added_tokens: expected the numbers from",
        ),
        (
            set("/added_tokens", json!([{"id": 4_000_000_000u32, "content": "<x>"}])),
            "added_tokens: expected the numbers from",
        ),
        (set("/added_tokens", json!([{"id": 299, "content": ""}])), "added_tokens: expected a text"),
        (set("/model/vocab", json!({"a": 0})), "expected all 256 bytes"),
    ];
    for (change, expected) in cases {
        let (_dir, path) = folder("tokenizer.json", &file(change));
        let message = Bpe::read(&path).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains(expected), "{message:?}\ndoes not say: {expected}");
        assert!(message.contains("tokenizer.json"), "{message}");
    }
    // Cut off anywhere, it is refused and nothing else happens.
    let whole = file(|_| ());
    for end in (0..whole.len()).step_by(97) {
        let (_dir, path) = folder("tokenizer.json", &whole[..end]);
        assert!(Bpe::read(&path).is_err(), "{end}");
    }
}

#[test]
fn keys_that_would_not_be_read_are_refused() {
    let cases = [
        (
            "text",
            json!({"path": "a", "by": "bpe", "max_vocab": 255}),
            "data.max_vocab: expected 256, for all bytes",
        ),
        (
            "text",
            json!({"path": "a", "by": "bpe", "max_vocab": 1u64 << 40}),
            "data.max_vocab: expected 256, for all bytes",
        ),
        ("text", json!({"path": "a", "by": "bpe", "min_count": 2}), "data.min_count: expected none"),
        (
            "text",
            json!({"path": "a", "by": "bpe", "vocab": "v", "max_vocab": 300}),
            "data.max_vocab: expected none beside",
        ),
        ("text", json!({"path": "a", "by": "char", "vocab": "v"}), "data.vocab: expected no file"),
        ("text", json!({"path": "a", "by": "piece"}), "data.by: unknown variant `piece`"),
        ("ptb", json!({"max_vocab": 300}), "data.max_vocab: expected none without `by: bpe`"),
        ("ptb", json!({"by": "char", "vocab": "v"}), "data.vocab: expected no file"),
    ];
    for (name, options, expected) in cases {
        let message = DataRegistry::builtin().get(name).unwrap().check(&options).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    }
    let (dir, path) = folder("mine.txt", TEXT.as_bytes());
    let search = Search { dir: Some(dir.path().to_owned()), ..Search::default() };
    let options = json!({"path": path, "by": "bpe", "vocab": path.with_file_name("none.json")});
    let message = load("text", &options, &search).unwrap_err().to_string();
    assert!(message.starts_with("data.vocab: expected a tokenizer.json, found none at"), "{message}");
}

#[test]
fn penn_treebank_is_read_by_characters_bytes_and_pieces_whatever_its_spaces() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("ptb")).unwrap();
    for (split, content) in [("train", " no <unk>  N \n a b\n"), ("valid", "b z\n"), ("test", "N\n")] {
        std::fs::write(dir.path().join(format!("ptb/ptb.{split}.txt")), content).unwrap();
    }
    let search = Search { dir: Some(dir.path().to_owned()), ..Search::default() };
    let read = |by: &str| load("ptb", &json!({"verify": false, "by": by}), &search).unwrap();
    let content = read("word").provenance.content;
    for by in ["char", "byte", "bpe"] {
        let loaded = read(by);
        assert_eq!(loaded.provenance.content[..3], content);
        let text = text(loaded);
        assert_eq!(text.decode(&text.train), "no <unk> N\na b\n", "{by}");
        assert_eq!(text.decode(&text.valid), "b z\n", "{by}");
        assert_eq!(text.measure(&text.test), Some(2), "{by}");
    }
    // Numbered by their appearance in all three.
    let text = text(read("char"));
    assert_eq!(text.vocab.concat(), "no <unk>N\nabz".replace("<unk>", "<uk>"));
    assert_eq!(*text.test, [7, 8]);
}
