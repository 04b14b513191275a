//! Penn Treebank: words, or its lines by characters, bytes or pieces.
use std::path::PathBuf;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;

use crate::body::{Body, Numbering};
use crate::digest::{self, Content};
use crate::hub::Repo;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::search::{Form, Layout, Search, Spec, find};
use crate::text::{Unit, Vocabulary, characters, read_lines};
use crate::{Data, DataError, Loaded, Provenance, Source, parquet};

/// Penn Treebank in Mikolov's preprocessing.
pub struct Ptb;

static SPEC: Spec = Spec {
    name: "ptb",
    layouts: &[
        Layout { form: Form::Lines, files: &[&["ptb.train.txt"], &["ptb.valid.txt"], &["ptb.test.txt"]] },
        Layout {
            form: Form::Parquet,
            files: &[
                &["penn_treebank/train/0000.parquet"],
                &["penn_treebank/validation/0000.parquet"],
                &["penn_treebank/test/0000.parquet"],
            ],
        },
    ],
    hub: Repo {
        id: "ptb-text-only/ptb_text_only",
        // The hub's own conversion, which has no fixed commit: the one of the first fetch is recorded and kept.
        revision: "refs/convert/parquet",
        files: &[
            "penn_treebank/train/0000.parquet",
            "penn_treebank/validation/0000.parquet",
            "penn_treebank/test/0000.parquet",
        ],
    },
    embedded: &[],
};

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    verify: bool,
    revision: Option<String>,
    by: Unit,
    vocab: Option<PathBuf>,
    max_vocab: Option<usize>,
}

impl Default for Options {
    fn default() -> Self {
        Self { verify: true, revision: None, by: Unit::Word, vocab: None, max_vocab: None }
    }
}

impl Options {
    fn read(given: &Value) -> Result<Self, DataError> {
        let chosen: Self = options(SPEC.name, given)?;
        let Self { by, vocab, max_vocab, .. } = &chosen;
        Numbering::check(SPEC.name, *by, vocab.as_deref(), 1, *max_vocab)?;
        let given = [("vocab", vocab.is_some()), ("max_vocab", max_vocab.is_some())];
        match given.into_iter().find(|(_, given)| *given && *by != Unit::Bpe) {
            None => Ok(chosen),
            Some((key, _)) => {
                let message = "expected none without `by: bpe`: words and characters are those of the set";
                Err(DataError::option(SPEC.name, key, message))
            }
        }
    }
}

impl Dataset for Ptb {
    fn name(&self) -> &str {
        SPEC.name
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary: "Penn Treebank, 929,589 + 73,760 + 82,430 words of 10,000 with <eos> (LDC text; see its licence)".into(),
            options: vec![
                option("verify", "true", "refuse content that is not the published set's"),
                option("revision", SPEC.hub.revision, "the hub revision to download"),
                option("by", "word", "`word`, `char`, `byte` or `bpe`: what is predicted"),
                option("vocab", "null", "with `bpe`, a tokenizer.json; built from the training text unless given"),
                option("max_vocab", "null", "with `bpe`, at most this many pieces, with all bytes (4096 unless given)"),
            ],
        }
    }

    fn licence(&self) -> Option<&'static str> {
        Some("LDC User Agreement (Treebank-3, LDC99T42); in Mikolov's preprocessing")
    }

    fn files(&self) -> Option<&'static Spec> {
        Some(&SPEC)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Text)
    }

    fn paths(&self) -> &'static [&'static str] {
        &["vocab"]
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        Options::read(given).map(drop)
    }

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        let Options { verify, revision, by, vocab, max_vocab } = Options::read(given)?;
        let found = find(&SPEC, search, revision.as_deref())?;
        let files = found.hash(SPEC.name)?;
        let read = |file: &Source| match found.form {
            Form::Parquet => parquet::sentences(file.path(), "sentence"),
            _ => read_lines(file.path()),
        };
        let splits = found.files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        for (lines, file) in splits.iter().zip(&found.files) {
            if lines.iter().all(|line| line.trim().is_empty()) {
                return Err(DataError::format(file.path(), "expected sentences, found none"));
            }
        }
        let lines = |split: usize| splits[split].iter().map(String::as_str);
        let mut content: Vec<Content> = ["train", "valid", "test"]
            .iter()
            .enumerate()
            .map(|(i, name)| Content::of_lines(name, lines(i)))
            .collect();
        let verdict = digest::compare(SPEC.name, &found.place, &content, verify)?;
        // The published protocol numbers the words of all three files by their first appearance; characters alike.
        let words = (by == Unit::Word).then(|| Vocabulary::by_appearance((0..3).flat_map(lines)));
        let bodies: Vec<Body> = splits.into_iter().map(|lines| Body::of_lines(lines, by)).collect();
        let numbering = match (by, words, &vocab) {
            (Unit::Bpe, _, Some(path)) => Numbering::read(SPEC.name, &search.resolve(path), by)?,
            (_, Some(words), _) => Numbering::Units(words),
            (Unit::Char, ..) => {
                let mut vocabulary = Vocabulary::default();
                for character in bodies.iter().flat_map(|body| characters(body.characters())) {
                    vocabulary.add(character);
                }
                Numbering::Units(vocabulary)
            }
            _ => Numbering::of(SPEC.name, &bodies[0], by, 1, max_vocab)?,
        };
        if vocab.is_none() && by == Unit::Bpe {
            numbering.keep(search, &content[0].sha256, by, 1);
        }
        content.extend(numbering.content(vocab.is_some()));
        let text = numbering.text([0, 1, 2].map(|i| (&bodies[i], found.files[i].path())), by)?;
        let provenance = Provenance {
            name: SPEC.name.into(),
            source: found.place,
            revision: found.download.map(|d| d.commit),
            files,
            content,
            verified: verdict.verified,
            subset: verdict.subset,
            classes: Vec::new(),
            entropy_rate: None,
        };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}
