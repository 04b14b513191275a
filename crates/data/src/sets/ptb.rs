//! Penn Treebank, words.
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;

use crate::digest::{self, Content};
use crate::hub::Repo;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::search::{Form, Layout, Search, Spec, find};
use crate::text::{Text, Unit, Vocabulary, read_lines};
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
}

impl Default for Options {
    fn default() -> Self {
        Self { verify: true, revision: None }
    }
}

impl Dataset for Ptb {
    fn name(&self) -> &str {
        SPEC.name
    }

    fn describe(&self) -> Description {
        Description {
            summary: "Penn Treebank, 929,589 + 73,760 + 82,430 words of 10,000 with <eos> (LDC text; see its licence)".into(),
            options: vec![
                OptionDoc { name: "verify", default: "true", doc: "refuse content that is not the published set's" },
                OptionDoc { name: "revision", default: SPEC.hub.revision, doc: "the hub revision to download" },
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

    fn check(&self, given: &Value) -> Result<(), DataError> {
        options::<Options>(SPEC.name, given).map(drop)
    }

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        let Options { verify, revision } = options(SPEC.name, given)?;
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
        let content: Vec<Content> = ["train", "valid", "test"]
            .iter()
            .enumerate()
            .map(|(i, name)| Content::of_lines(name, lines(i)))
            .collect();
        let verdict = digest::compare(SPEC.name, &found.place, &content, verify)?;
        // The published protocol numbers the words of all three files by their first appearance.
        let vocabulary = Vocabulary::by_appearance((0..3).flat_map(lines));
        let encode = |split: usize| vocabulary.encode(lines(split), found.files[split].path());
        let (train, valid, test) = (encode(0)?, encode(1)?, encode(2)?);
        let text = Text { train, valid, test, vocab: vocabulary.words(), unit: Unit::Word };
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
