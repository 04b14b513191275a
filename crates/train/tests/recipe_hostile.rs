//! Whatever is in the file, the answer is a recipe or a report: no panic, no stack overflow, no endless memory.
//!
//! `PROPTEST_CASES=1000000 cargo test --release -p taper-train --test recipe_hostile` fuzzes for longer.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use taper_train::recipe::{ErrorKind, Recipe, RecipeError, Unchecked};

fn parse(text: &str, set: &[String]) -> Result<Recipe, RecipeError> {
    Recipe::parse("hostile.yaml", text, set, &Unchecked)
}

/// Loads and exercises everything that can be asked of the outcome; reports stay short and without control characters.
fn exercise(result: Result<Recipe, RecipeError>) {
    match result {
        Ok(recipe) => {
            for run in recipe.runs().iter().take(3) {
                let again = parse(&run.to_yaml(), &[]).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(again.id(), run.id());
            }
            let _ = recipe.plan();
        }
        Err(error) => {
            let report = error.to_string();
            assert!(report.starts_with("error: ") && report.len() < 20_000, "{report}");
            assert!(!report.chars().any(|c| c.is_control() && c != '\n'), "{report:?}");
            assert!(error.location().is_none_or(|(_, line, column)| line > 0 && column > 0));
            let _ = error.render(true);
        }
    }
}

fn file(bytes: &[u8]) -> Result<Recipe, RecipeError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("hostile.yaml");
    fs::write(&path, bytes).unwrap();
    Recipe::load(&path, &[], &Unchecked)
}

/// The report of a recipe that must be refused.
fn refused(text: &str) -> RecipeError {
    let result = parse(text, &[]);
    exercise(result.clone());
    result.map(|recipe| recipe.plan()).unwrap_err()
}

#[test]
fn files_that_are_no_recipes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Recipe::load(folder.path().join("gone.yaml"), &[], &Unchecked).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File);
    assert!(error.message().contains("gone.yaml` does not exist"), "{error}");
    let error = Recipe::load(folder.path(), &[], &Unchecked).unwrap_err();
    assert!(error.message().ends_with("expected a regular file, found a folder"), "{error}");
    let error = Recipe::load("", &[], &Unchecked).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::File, "{error}");
    let error = file(&vec![b'#'; 2 << 20]).unwrap_err();
    assert!(error.message().ends_with("at most 1048576 bytes, found 2097152"), "{error}");
}

#[cfg(unix)]
#[test]
fn devices_are_not_read() {
    let error = Recipe::load("/dev/zero", &[], &Unchecked).unwrap_err();
    assert!(error.message().ends_with("expected a regular file, found a device"), "{error}");
}

#[test]
fn bytes_that_are_no_text_are_located() {
    let error = file(b"seed: 1\nname: caf\xe9\n").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Syntax);
    assert_eq!(error.message(), "expected UTF-8 text, found the byte 0xe9");
    assert_eq!(error.location().map(|(_, line, column)| (line, column)), Some((2, 10)));
    exercise(Err(error));
    for bytes in [b"\x00\x01\x02\xff".as_slice(), b"\x89PNG\r\n\x1a\n", b"PK\x03\x04", b"\xff\xfea\x00:\x00"]
    {
        exercise(Err(file(bytes).unwrap_err()));
    }
}

#[test]
fn deep_nesting_is_refused() {
    for depth in [40, 1_000, 100_000] {
        assert_eq!(refused(&format!("train: {}", "[".repeat(depth))).kind(), ErrorKind::Syntax);
        assert_eq!(refused(&format!("train: {}", "{a: ".repeat(depth))).kind(), ErrorKind::Syntax);
        let closed = format!("train: {}{}", "[".repeat(depth), "]".repeat(depth));
        assert_eq!(refused(&closed).kind(), ErrorKind::Syntax);
    }
    let block: String = (0..1_000).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
    assert_eq!(refused(&block).kind(), ErrorKind::Syntax);
    let keys = vec!["a"; 1_000].join(".");
    exercise(parse("", &[format!("{keys}=1")]));
    assert_eq!(parse("", &[format!("{keys}=1")]).unwrap_err().kind(), ErrorKind::Override);
}

#[test]
fn dotted_keys_of_a_sweep_cannot_nest_without_end() {
    let keys = vec!["a"; 100_000].join(".");
    let error = refused(&format!("train: {{epochs: 1}}\nsweep: {{list: [{{? \"{keys}\" : 1}}]}}"));
    exercise(Err(error));
}

#[test]
fn alias_bombs_are_refused() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        text += &format!("a{level}: &a{level} [{items}]\n");
    }
    assert_eq!(refused(&text).kind(), ErrorKind::Syntax);
    assert_eq!(refused("a: &a [*a]").kind(), ErrorKind::Syntax);
    assert_eq!(refused("a: &a {b: *a}").kind(), ErrorKind::Syntax);
}

#[test]
fn long_lines_are_shown_in_part() {
    let error = refused(&format!("name: {}", "a".repeat(500_000)));
    assert_eq!(error.kind(), ErrorKind::Missing);
    let error = refused(&format!("{}: 1", "k".repeat(1_000)));
    assert_eq!(error.kind(), ErrorKind::UnknownKey);
    let error = refused(&format!("# {}\nseed: [{}, x", "é".repeat(100_000), "1, ".repeat(10_000)));
    assert!(error.to_string().len() < 5_000, "{}", error.to_string().len());
    assert_eq!(error.location(), Some(("hostile.yaml", 2, 30_008)), "{error}");
    let error = refused(&format!("train: {{{}: 1}}", "a, ".repeat(50_000)));
    assert!(error.to_string().len() < 5_000, "{}", error.to_string().len());
    // The column in the report is that of the file, however far to the right.
    let error = refused(&format!("train: [{}\"\\q\"]", "1, ".repeat(30_000)));
    assert!(error.to_string().contains("hostile.yaml:1:90009"), "{error}");
}

#[test]
fn terminal_escapes_do_not_reach_the_terminal() {
    for text in
        ["name: \"\\e[31mred\"", "\"\\e]0;title\\a\": 1", "device: \"\\u0007\\r\\n\"", "name: \u{202e}txt"]
    {
        exercise(Err(refused(&format!(
            "problem: {{name: p}}\noptimizer: {{name: a, lr: 1}}\ntrain: {{steps: 1}}\n{text}"
        ))));
    }
}

#[test]
fn carriage_returns_and_byte_order_marks_are_harmless() {
    let text =
        "\u{feff}problem: {name: p}\r\noptimizer: {name: adam, lr: 1}\r\ntrain: {steps: 1}\r\nsed: 1\r\n";
    let error = refused(text);
    assert_eq!(error.location(), Some(("hostile.yaml", 4, 1)), "{error}");
    let error = refused("\u{feff}sed: 1");
    assert_eq!(error.location(), Some(("hostile.yaml", 1, 1)), "{error}");
}

fn collect(folder: &Path, out: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, out);
        } else if path.extension().is_some_and(|ending| ending == "yaml") {
            out.push(fs::read_to_string(path).unwrap());
        }
    }
}

/// The real recipes and layers, without `extends`, which depends on where the text stands.
fn real() -> Vec<String> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut texts = Vec::new();
    collect(&root.join("recipes"), &mut texts);
    collect(&root.join("configs"), &mut texts);
    texts.sort();
    let kept = |text: &String| {
        text.lines().filter(|line| !line.starts_with("extends")).collect::<Vec<_>>().join("\n")
    };
    texts.iter().map(kept).collect()
}

/// A recipe made of real ones, then damaged: pieces cut, doubled, swapped, replaced by what means something to YAML.
fn damaged() -> impl Strategy<Value = String> {
    let texts = real();
    let count = texts.len();
    let piece = prop::sample::select(vec![
        ":",
        ": ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        ", ",
        "&a ",
        "*a",
        "|\n",
        ">\n",
        "'",
        "\"",
        "#",
        "\n",
        "\t",
        "  ",
        "? ",
        "!!int ",
        "<<: ",
        "---\n",
        "...\n",
        "%YAML 1.2\n",
        "null",
        "-1",
        "1e999",
        "18446744073709551616",
        "true",
        "é",
        "\u{feff}",
        "\0",
        "\\u0000",
        "optimizer",
        "sweep",
        "grid",
        "list",
        "seeds",
        "halton",
        "kind",
        "name",
        ".",
        "[0]",
        "extends: /dev/null\n",
    ]);
    let edit = (any::<prop::sample::Index>(), 0usize..40, 0u8..4, piece);
    (prop::collection::vec(0..count, 1..4), prop::collection::vec(edit, 0..12)).prop_map(
        move |(picked, edits)| {
            let mut chars: Vec<char> =
                picked.iter().flat_map(|&index| texts[index].chars().chain(['\n'])).collect();
            for (at, length, action, piece) in edits {
                let at = at.index(chars.len().max(1)).min(chars.len());
                let end = (at + length).min(chars.len());
                match action {
                    0 => drop(chars.drain(at..end)),
                    1 => drop(chars.splice(at..at, piece.chars())),
                    2 => drop(chars.splice(at..end, piece.chars())),
                    _ => {
                        let copy = chars[at..end].to_vec();
                        chars.splice(at..at, copy);
                    }
                }
            }
            chars.into_iter().collect()
        },
    )
}

/// What the tests below once found.
#[test]
fn old_finds_stay_found() {
    for text in [
        "Σ:",
        "\u{80}",
        "\u{9b}31m: 1",
        "sweep: {list: [{'a.': 1}]}",
        "sweep: {grid: {.: [1]}}",
        "train: [1]",
        "a: |\n\n",
    ] {
        exercise(parse(text, &[]));
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        exercise(file(&bytes));
    }

    #[test]
    fn arbitrary_text_is_answered(text in "\\PC{0,200}|[ -~\n\t]{0,200}|([a-c]{1,2}: ?[\\[{&*a-c,\\]}]{0,4}\n?){0,20}") {
        exercise(parse(&text, &[]));
    }

    #[test]
    fn damaged_recipes_are_answered(text in damaged(), set in prop::collection::vec("[a-z_.]{0,12}=?[ -~]{0,12}", 0..3)) {
        exercise(parse(&text, &[]));
        exercise(parse(&text, &set));
    }

    #[test]
    fn arbitrary_overrides_are_answered(
        key in "\\PC{0,20}|(train|optimizer|data|sweep|seed)(\\.[a-z_]{1,8}){0,3}",
        value in "\\PC{0,40}|[\\[{1:, \"'}\\]&*!|>-]{0,12}",
    ) {
        let good = "problem: {name: p}\noptimizer: {name: a, lr: 1}\ntrain: {steps: 1}\n";
        exercise(parse(good, &[format!("{key}={value}")]));
        let variables = [(format!("TAPER__{key}"), value)];
        exercise(Recipe::parse_with_env("hostile.yaml", good, &variables, &[], &Unchecked));
    }
}
