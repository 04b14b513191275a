//! Every error and warning that a recipe can cause, in the words that people read.
//!
//! `errors.txt` has them all. `TAPER_UPDATE_TEXTS=1 cargo test -p taper-train --test recipe_texts` writes it anew: read
//! what changed.
use std::fmt::Write;
use std::path::Path;
use taper_data::Search;
use taper_train::run::{self, Options, Show};
use taper_train::{Recipe, Registries};

/// A recipe that trains in a moment; the lines of a case take the place of those that begin with the same key.
const BASE: &str = "\
data: {name: synthetic-images, train: 64, test: 32, batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 2}
";

/// The same for text.
const TEXT: &str = "\
data: {name: synthetic-text, vocab: 8, branching: 2, train: 400, valid: 90, test: 90, batch_size: 2, eval_batch_size: 2}
model: {name: lstm, emb: 4, hidden: 4}
optimizer: {name: adam, lr: 0.01}
train: {epochs: 1, bptt: {length: 10}}
";

/// The same for a function.
const PROBLEM: &str = "\
problem: {name: quadratic}
optimizer: {name: sgdm, lr: 0.01}
train: {steps: 2}
";

/// A heading, the recipe it changes, the lines that differ, and `--set` arguments.
type Case<'a> = (&'a str, &'a str, &'a str, &'a [&'a str]);

include!("cases.rs");

/// The base with the lines of a case.
fn recipe(base: &str, lines: &str) -> String {
    let key = |line: &str| line.split(':').next().unwrap_or_default().to_owned();
    let keys: Vec<String> = lines.lines().map(key).collect();
    let kept = base.lines().filter(|line| !keys.contains(&key(line)));
    kept.chain(lines.lines()).map(|line| format!("{line}\n")).collect()
}

/// What people see of a recipe that is read, built and trained for a moment, with the warnings before it.
fn seen(text: &str, set: &[&str], runs: &Path) -> String {
    let registries = Registries::default();
    let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
    let search = Search { offline: true, ..Search::default() };
    let recipe = match Recipe::parse("r.yaml", text, &set, &registries) {
        Ok(recipe) => recipe,
        Err(error) => return error.to_string(),
    };
    let mut out: Vec<String> = recipe.warnings().iter().map(ToString::to_string).collect();
    let options =
        Options { runs: runs.to_owned(), search, show: Show::Quiet, wait: false, ..Options::default() };
    for one in recipe.runs() {
        if let Err(error) = run::run(one, &registries, &options) {
            out.push(match &error {
                run::RunError::Recipe(error) => error.to_string(),
                other => format!("error: {other}"),
            });
            break;
        }
    }
    out.join("\n")
}

#[test]
fn errors_read_as_they_are_kept() {
    let runs = tempfile::tempdir().unwrap();
    let mut found = String::new();
    // The last digits of a measured number are the processor's.
    let digits = regex::Regex::new(r"(\d\.\d{2})\d{6,}").unwrap();
    for (index, (title, base, lines, set)) in CASES.iter().enumerate() {
        writeln!(found, "## {title}").unwrap();
        let seen = seen(&recipe(base, lines), set, &runs.path().join(index.to_string()));
        assert!(!seen.is_empty(), "nothing is said about: {title}");
        let seen = seen.replace(runs.path().to_str().unwrap(), "RUNS");
        writeln!(found, "{}\n", digits.replace_all(&seen, "$1…")).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recipe_texts/errors.txt");
    if std::env::var_os("TAPER_UPDATE_TEXTS").is_some() {
        std::fs::write(path, found).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    for (kept, found) in kept.split("## ").zip(found.split("## ")) {
        assert_eq!(kept, found, "TAPER_UPDATE_TEXTS=1 takes it over");
    }
    assert_eq!(kept, found);
}

#[test]
fn every_error_has_its_place_and_is_in_a_users_words() {
    let kept = include_str!("errors.txt");
    for error in kept.split("## ").skip(1) {
        let (title, text) = error.split_once('\n').unwrap();
        for rust in ["struct ", "Some(", "invalid type", "\\n", "usize", "f64", "{ ", "u64"] {
            let shown =
                text.lines().filter(|line| !line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
            let said: Vec<&str> = shown.filter(|line| !line.contains(" | ")).collect();
            assert!(!said.join("\n").contains(rust), "`{rust}` in {title}\n{text}");
        }
        let placed = text.contains(" --> ") || text.contains("note: in r.yaml");
        assert!(placed || title.contains("(no place)"), "{title}\n{text}");
    }
}
