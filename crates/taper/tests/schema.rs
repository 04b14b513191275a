//! One schema, many uses: the files made from it are current, an independent validator takes our recipes and refuses wrong ones
//! as `plan` does, and the terminal explains keys.
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn taper(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    // The files in the repository are those that `cargo xtask` makes.
    command.env("TAPER_STARTED_BY", "cargo xtask").env("TAPER_OFFLINE", "1").env_remove("TAPER_DATA");
    command.current_dir(root()).args(args).output().unwrap()
}

fn stdout(args: &[&str]) -> String {
    let output = taper(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// All recipes of the repository, by path.
fn recipes() -> Vec<PathBuf> {
    fn walk(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.extension().and_then(|ending| ending.to_str()) {
                _ if path.is_dir() => walk(&path, out),
                Some("yaml") if !path.ends_with("published.yaml") => out.push(path),
                _ => {}
            }
        }
    }
    let mut out = Vec::new();
    walk(&root().join("recipes"), &mut out);
    out.sort();
    out
}

fn yaml(text: &str) -> Value {
    serde_saphyr::from_str(text).unwrap_or_else(|e| panic!("{e}\n{text}"))
}

/// What Python's `jsonschema` refuses of these recipes, by name; `None` where it is not installed, which is said.
fn refused_by_python(recipes: &Map<String, Value>) -> Option<Map<String, Value>> {
    let mut pythons = std::env::var("TAPER_PEER_PYTHON").into_iter().chain(["python3".to_owned()]);
    let can = |python: &String| {
        let output = Command::new(python).args(["-c", "import jsonschema"]).output();
        output.is_ok_and(|output| output.status.success())
    };
    let Some(python) = pythons.find(can) else {
        let line =
            "skipped: no Python here has the package jsonschema (pip install jsonschema; TAPER_PEER_PYTHON)";
        assert!(!required(), "{line}");
        eprintln!("{line}");
        return None;
    };
    let mut child = Command::new(&python)
        .args(["tools/validate_recipes.py", "docs/schema.json"])
        .current_dir(root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(json!(recipes).to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

fn required() -> bool {
    std::env::var("TAPER_REQUIRE_TOOLS").is_ok_and(|value| value == "1")
}

/// Where a file in the repository is not what a command prints.
fn current(file: &str, args: &[&str]) {
    let (kept, printed) = (std::fs::read_to_string(root().join(file)).unwrap_or_default(), stdout(args));
    let differ = kept.lines().zip(printed.lines()).position(|(kept, printed)| kept != printed);
    let command = format!("cargo xtask {} > {file}", args.join(" "));
    assert!(kept == printed, "{file} is old from line {differ:?} on: `{command}` makes it anew");
}

#[test]
fn the_schema_in_the_repository_is_current() {
    current("docs/schema.json", &["schema"]);
}

#[test]
fn the_reference_of_recipes_is_current() {
    current("docs/recipes.md", &["keys", "--markdown"]);
}

#[test]
fn every_recipe_is_valid_to_another_validator_and_names_the_schema() {
    let mut all = Map::new();
    for path in recipes() {
        let text = std::fs::read_to_string(&path).unwrap();
        let named =
            text.lines().next().and_then(|line| line.strip_prefix("# yaml-language-server: $schema="));
        let schema = path.parent().unwrap().join(named.unwrap_or_else(|| panic!("{}", path.display())));
        assert!(schema.is_file(), "{}", path.display());
        all.insert(path.display().to_string(), yaml(&text));
    }
    assert!(all.len() > 90);
    if let Some(refused) = refused_by_python(&all) {
        assert_eq!(refused, Map::new());
    }
}

/// Whether a number is in a range that a schema, or one that it offers in its place, states.
fn takes(schema: &Value, number: f64) -> bool {
    let of = |name: &str| schema.get(name).and_then(Value::as_f64);
    let own = of("minimum").is_none_or(|end| number >= end)
        && of("exclusiveMinimum").is_none_or(|end| number > end)
        && of("maximum").is_none_or(|end| number <= end)
        && of("exclusiveMaximum").is_none_or(|end| number < end);
    let others = ["anyOf", "oneOf"].into_iter().filter_map(|list| schema.get(list)?.as_array());
    own && others.into_iter().all(|list| list.iter().any(|one| takes(one, number)))
}

/// What a run's folder keeps, with every default written out.
#[test]
fn every_resolved_recipe_is_valid_to_another_validator() {
    let registries = taper_train::Registries::default();
    let mut all = Map::new();
    for path in recipes() {
        let recipe = taper_train::Recipe::load(&path, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
        for run in recipe.runs().iter().take(1) {
            all.insert(path.display().to_string(), run.resolved().clone());
        }
    }
    let default = |name: &str| {
        let text = format!(
            "data: {{name: synthetic-text}}\nmodel: {{name: {name}}}\noptimizer: {{name: sgd}}\n\
             train: {{epochs: 1, windows: {{length: 8}}}}"
        );
        taper_train::Recipe::parse("default.yaml", &text, &[], &registries).unwrap().resolved().clone()
    };
    all.extend(["gpt", "llama"].map(|name| (name.to_owned(), default(name))));
    assert!(all.len() > 90);
    if let Some(refused) = refused_by_python(&all) {
        assert_eq!(refused, Map::new());
    }
}

#[test]
fn every_default_is_in_its_own_range() {
    fn walk(place: &str, schema: &Value, seen: &mut usize, wrong: &mut Vec<String>) {
        if let Some(default) = schema.get("default").and_then(Value::as_f64) {
            *seen += 1;
            if !takes(schema, default) {
                wrong.push(format!("{place}: {default}"));
            }
        }
        match schema {
            Value::Object(keys) => {
                keys.iter().for_each(|(key, value)| walk(&format!("{place}/{key}"), value, seen, wrong));
            }
            Value::Array(items) => items.iter().for_each(|value| walk(place, value, seen, wrong)),
            _ => {}
        }
    }
    let schema: Value = serde_json::from_str(&stdout(&["schema"])).unwrap();
    let (mut seen, mut wrong) = (0, Vec::new());
    walk("", &schema, &mut seen, &mut wrong);
    assert!(seen > 100, "{seen}");
    assert_eq!(wrong, Vec::<String>::new());
}

const BASE: &str = "data: {name: synthetic-images, train: 64, test: 32}\nmodel: {name: mlp}\n";

/// Recipes with one mistake each.
const WRONG: [(&str, &str); 27] = [
    ("unknown section", "optimizer: {name: sgd}\ntrain: {epochs: 1}\nsead: 3"),
    ("unknown key of a section", "optimizer: {name: sgd}\ntrain: {epochs: 1, epoks: 2}"),
    ("unknown key of an optimizer", "optimizer: {name: sgd, c: 1}\ntrain: {epochs: 1}"),
    ("unknown optimizer", "optimizer: {name: sdg}\ntrain: {epochs: 1}"),
    ("no optimizer", "train: {epochs: 1}"),
    ("no length", "optimizer: {name: sgd}\ntrain: {log_every: 1}"),
    ("two lengths", "optimizer: {name: sgd}\ntrain: {epochs: 1, steps: 2}"),
    ("zero epochs", "optimizer: {name: sgd}\ntrain: {epochs: 0}"),
    ("half an epoch", "optimizer: {name: sgd}\ntrain: {epochs: 0.5}"),
    ("negative rate", "optimizer: {name: sgd, lr: -1}\ntrain: {epochs: 1}"),
    ("a rate in words", "optimizer: {name: sgd, lr: fast}\ntrain: {epochs: 1}"),
    ("momentum of 1", "optimizer: {name: sgdm, momentum: 1}\ntrain: {epochs: 1}"),
    (
        "beta2 of 1.5 in a group",
        "optimizer: {name: adam, groups: [{match: '*', beta2: 1.5}]}\ntrain: {epochs: 1}",
    ),
    ("a group without a pattern", "optimizer: {name: adam, groups: [{lr: 0.1}]}\ntrain: {epochs: 1}"),
    ("a word that is no choice", "optimizer: {name: decgd, decay: some}\ntrain: {epochs: 1}"),
    ("inner optimizer of no name", "optimizer: {name: lookahead, inner: {name: adm}}\ntrain: {epochs: 1}"),
    ("unknown schedule", "optimizer: {name: sgd}\nschedule: {kind: cosin}\ntrain: {epochs: 1}"),
    (
        "key of another schedule",
        "optimizer: {name: sgd}\nschedule: {kind: cosine, at: [3]}\ntrain: {epochs: 1}",
    ),
    ("warm-up of nothing", "optimizer: {name: sgd}\nschedule: {kind: cosine, warmup: 0}\ntrain: {epochs: 1}"),
    (
        "warm-up before a plateau",
        "optimizer: {name: sgd}\nschedule: {kind: plateau, warmup: 2}\ntrain: {epochs: 1}",
    ),
    ("per what", "optimizer: {name: sgd}\nschedule: {kind: cosine, per: batch}\ntrain: {epochs: 1}"),
    ("average of no kind", "optimizer: {name: sgd}\ntrain: {epochs: 1, average: mean}"),
    ("ema of 1", "optimizer: {name: sgd}\ntrain: {epochs: 1, average: {kind: ema, decay: 1.0}}"),
    ("label smoothing of 1", "optimizer: {name: sgd}\ntrain: {epochs: 1, label_smoothing: 1}"),
    (
        "early stop without patience",
        "optimizer: {name: sgd}\ntrain: {epochs: 1, select: test, early_stop: {min_delta: 1}}",
    ),
    ("problem beside data", "optimizer: {name: sgd}\nproblem: {name: powell}\ntrain: {steps: 1}"),
    ("device of no kind", "optimizer: {name: sgd}\ndevice: tpu\ntrain: {epochs: 1}"),
];

#[test]
fn wrong_recipes_are_refused_by_the_schema_and_by_plan_alike() {
    let folder = tempfile::tempdir().unwrap();
    let plan = |name: &str, text: &str| {
        let path = folder.path().join("wrong.yaml");
        std::fs::write(&path, text).unwrap();
        let output = taper(&["plan", path.to_str().unwrap(), "--no-probe", "--quiet"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!said.contains("panicked"), "{name}: {said}");
        (output.status.code(), said)
    };
    let right = format!("{BASE}optimizer: {{name: sgd}}\ntrain: {{epochs: 1}}");
    assert_eq!(plan("right", &right).0, Some(0));
    let mut all = Map::from_iter([("right".to_owned(), yaml(&right))]);
    for (name, text) in WRONG {
        let text = format!("{BASE}{text}");
        let (code, said) = plan(name, &text);
        assert_eq!(code, Some(2), "{name}: {said}");
        all.insert(name.to_owned(), yaml(&text));
    }
    if let Some(refused) = refused_by_python(&all) {
        let names: Vec<&str> = refused.keys().map(String::as_str).collect();
        assert_eq!(names, WRONG.map(|(name, _)| name));
    }
}

#[test]
fn keys_are_explained_in_the_terminal() {
    let text = stdout(&["keys", "optimizer.decgd.c"]);
    assert_eq!(
        text,
        "optimizer.decgd.c  number, default 1.0\n    Constant c added to the loss; f + c must stay positive.\n"
    );
    // As a recipe has it: of every optimizer with such a key.
    let text = stdout(&["keys", "optimizer.c"]);
    assert!(text.contains("optimizer.decgd.c ") && text.contains("optimizer.aegd.c "), "{text}");
    let text = stdout(&["keys", "optimizer.adam.beta1"]);
    assert!(
        text.starts_with("optimizer.adam.beta1  number, at least 0 and less than 1, default 0.9\n"),
        "{text}"
    );
    let text = stdout(&["keys", "train.select"]);
    assert!(
        text.contains("val | test | last, default last") && text.contains("\n      test  The test set."),
        "{text}"
    );
    let text = stdout(&["keys", "warmup"]);
    assert!(text.contains("schedule.warmup  whole number, at least 1, default none"), "{text}");
    let line: Value = serde_json::from_str(stdout(&["keys", "train.epochs", "--json"]).trim()).unwrap();
    assert_eq!((&line["kind"], &line["range"]), (&"whole number".into(), &"at least 1".into()));
    let output = taper(&["keys", "optimizer.decgd.momentom"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("did you mean `optimizer.decgd.momentum`?"), "{said}");
}

/// Every key of the schema has a description, and every open one a default: whoever adds one documents it.
#[test]
fn every_key_is_documented() {
    let lines = stdout(&["keys", "--json"]);
    let silent: Vec<String> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|key| key["about"].as_str().is_none_or(str::is_empty) || key["kind"].as_str() == Some(""))
        .map(|key| key["path"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(silent, Vec::<String>::new());
}
