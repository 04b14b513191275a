//! Every mistake in a recipe is reported where it is, with what was expected there.

use taper_train::recipe::{ErrorKind, Map, Recipe, RecipeError, SectionError, Sections};

/// A registry with two optimizers and one model, that fills in defaults and refuses what it does not know.
struct Registry;

impl Registry {
    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn known(section: &str, name: &str, names: &[&str]) -> Result<(), SectionError> {
        if names.contains(&name) {
            return Ok(());
        }
        let message = format!("unknown {section} `{name}`");
        Err(SectionError { key: Some("name".to_owned()), message, known: Self::names(names) })
    }
}

impl Sections for Registry {
    fn check_optimizer(&self, name: &str, hyper: &Map) -> Result<Map, SectionError> {
        Self::known("optimizer", name, &["decgd", "adam"])?;
        let keys: &[&str] =
            if name == "decgd" { &["lr", "c", "momentum"] } else { &["lr", "beta1", "beta2"] };
        if let Some(key) = hyper.keys().find(|key| !keys.contains(&key.as_str())) {
            let message = format!("unknown hyperparameter `{key}` of {name}");
            return Err(SectionError { key: Some(key.clone()), message, known: Self::names(keys) });
        }
        if hyper.get("c").and_then(|c| c.as_f64()).is_some_and(|c| c < 0.0) {
            let message = format!("c must be at least 0, found {}", hyper["c"]);
            return Err(SectionError { key: Some("c".to_owned()), message, known: Vec::new() });
        }
        let mut full = Map::new();
        full.insert("lr".to_owned(), 0.01.into());
        if name == "decgd" {
            full.insert("c".to_owned(), 1.0.into());
        }
        full.extend(hyper.clone());
        Ok(full)
    }

    fn check_model(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        Self::known("model", name, &["mlp"])?;
        Ok(config.clone())
    }

    fn check_schedule(&self, kind: &str, config: &Map) -> Result<Map, SectionError> {
        match config.get("stages") {
            Some(_) => Err(SectionError {
                key: Some("stages[1].stpes".to_owned()),
                message: format!("unknown key `stpes` of {kind}"),
                known: Self::names(&["kind", "steps"]),
            }),
            None => Ok(config.clone()),
        }
    }
}

fn load(text: &str, set: &[&str]) -> Result<Recipe, RecipeError> {
    let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
    Recipe::parse("bad.yaml", text, &set, &Registry)
}

/// A recipe with nothing wrong; cases replace one of its lines.
const GOOD: [&str; 4] =
    ["data: {name: mnist}", "model: {name: mlp}", "optimizer: {name: decgd}", "train: {epochs: 5}"];

fn with(line: &str) -> String {
    let section = line.split(':').next().unwrap_or_default();
    let mut lines: Vec<&str> =
        GOOD.into_iter().filter(|good| !good.starts_with(&format!("{section}:"))).collect();
    lines.push(line);
    lines.join("\n") + "\n"
}

#[test]
fn a_good_recipe_loads() {
    let recipe = load(&GOOD.join("\n"), &[]).unwrap();
    assert_eq!(recipe.optimizer.lr, 0.01);
    assert_eq!(recipe.optimizer.hyper["c"], 1.0);
    assert_eq!(recipe.runs().len(), 1);
}

#[test]
fn mistakes_are_shown_at_the_text_that_is_wrong() {
    use ErrorKind::*;
    // The line, the text that the caret is under, the kind, and parts of the report.
    let cases: &[(&str, &str, ErrorKind, &[&str])] = &[
        (
            "train: {epocks: 5}",
            "epocks",
            UnknownKey,
            &["unknown key `epocks` in `train`", "did you mean `epochs`?", "known here: epochs, steps,"],
        ),
        (
            "optimiser: {name: decgd}",
            "optimiser",
            UnknownKey,
            &["did you mean `optimizer`?", "known here: extends, name, seed"],
        ),
        (
            "train: {epochs: many}",
            "many",
            Type,
            &["train.epochs: expected a whole number of at least 0, found the text `many`"],
        ),
        ("train: {epochs: 2.5}", "2.5", Type, &["expected a whole number of at least 0, found `2.5`"]),
        ("train: {epochs: -3}", "-3", Type, &["found `-3`"]),
        ("train: {epochs: 0}", "0", Value, &["train.epochs must be at least 1, found 0"]),
        ("train: [1]", "[", Type, &["train: expected a section (a map of keys), found a list"]),
        ("train: {epochs: 1, steps: 2}", "2", Value, &["found both"]),
        ("train: {select: test}", "train", Missing, &["`train.epochs` is missing", "or give `train.steps`"]),
        (
            "train: {epochs: 1, select: tset}",
            "tset",
            Type,
            &["expected one of val, test, last", "did you mean `test`?"],
        ),
        ("train: {epochs: 1, shards: 0}", "0", Value, &["train.shards must be at least 1, found 0"]),
        (
            "train: {epochs: 1, shards: 200}",
            "200",
            Value,
            &["train.shards must be at most data.batch_size (128), found 200"],
        ),
        ("train: {epochs: 1, clip_norm: 0}", "0", Value, &["train.clip_norm must be greater than 0"]),
        (
            "train: {epochs: 1, probe: yes}",
            "yes",
            Type,
            &[
                "train.probe: expected `true`, `false`, or a map with `every` and `what`, found the text `yes`",
            ],
        ),
        (
            "train: {epochs: 1, probe: {every: 5, what: []}}",
            "[",
            Value,
            &["train.probe.what: expected something to look at, found an empty list", "what: [cheap]"],
        ),
        ("train: {epochs: 1, early_stop: {patience: 2}}", "early_stop", Value, &["train.select: val"]),
        ("train: {epochs: 1, scale_lr_by_length: true}", "true", Value, &["needs `train.bptt`"]),
        ("train: {epochs: 1, freeze: ['*.bias', '/x']}", "'/x'", Value, &["train.freeze[1] must be a glob"]),
        (
            "train: {epochs: 1, average: {kind: emma}}",
            "emma",
            Type,
            &["expected one of none, ema, swa, lookahead, asgd", "did you mean `ema`?"],
        ),
        (
            "train: {epochs: 1, average: {kind: ema, decoy: 1}}",
            "decoy",
            UnknownKey,
            &["did you mean `decay`?"],
        ),
        ("train: {epochs: 1, average: {kind: ema, decay: 2}}", "2", Value, &["at least 0 and less than 1"]),
        (
            "train: {epochs: 1, average: {kind: swa}}",
            "average",
            Missing,
            &["`train.average.start` is missing"],
        ),
        ("train: {epochs: 1, checkpoint: {every_steps: 0}}", "0", Value, &["must be at least 1"]),
        ("optimizer: {name: decgd, lr: -1}", "-1", Value, &["optimizer.lr must be greater than 0, found -1"]),
        (
            "optimizer: {name: decgd, lr: fast}",
            "fast",
            Type,
            &["optimizer.lr: expected a number, found the text `fast`"],
        ),
        ("optimizer: {name: decgd, momentum: 1}", "1", Value, &["at least 0 and less than 1"]),
        (
            "optimizer: {name: decgd, momentun: 0.9}",
            "momentun",
            Section,
            &["did you mean `momentum`?", "known here: lr, c, momentum, name, groups, no_decay"],
        ),
        ("optimizer: {name: decgd, c: -2}", "-2", Section, &["c must be at least 0, found -2"]),
        (
            "optimizer: {name: decgb}",
            "decgb",
            Section,
            &["unknown optimizer `decgb`", "did you mean `decgd`?", "known here: decgd, adam"],
        ),
        ("optimizer: {lr: 0.1}", "optimizer", Missing, &["`optimizer.name` is missing"]),
        (
            "optimizer: {name: decgd, groups: [{lr: 0.1}]}",
            "{",
            Missing,
            &["`optimizer.groups[0].match` is missing"],
        ),
        (
            "optimizer: {name: decgd, groups: [{match: x}, {match: y, lr: 0}]}",
            "0",
            Value,
            &["optimizer.groups[1].lr must be greater than 0"],
        ),
        (
            "optimizer: {name: decgd, groups: [{match: y, beta1: 0}]}",
            "beta1",
            Section,
            &["unknown hyperparameter `beta1` of decgd"],
        ),
        (
            "optimizer: {name: decgd, groups: [{match: y, name: adan}]}",
            "adan",
            Section,
            &["did you mean `adam`?"],
        ),
        (
            "optimizer: {name: decgd, no_decay: [biases]}",
            "biases",
            Type,
            &["expected one of bias, norm", "did you mean `bias`?"],
        ),
        ("model: {name: mpl}", "mpl", Section, &["unknown model `mpl`", "known here: mlp"]),
        ("model: mlp", "mlp", Type, &["model: expected a section (a map of keys), found the text `mlp`"]),
        (
            "schedule: {kind: sequence, stages: [{kind: a}, {stpes: 1}]}",
            "stpes",
            Section,
            &["did you mean `steps`?"],
        ),
        ("data: {name: mnist, batch_size: 0}", "0", Value, &["data.batch_size must be at least 1"]),
        ("data: {name: mnist, val: 1.5}", "1.5", Type, &["a fraction between 0 and 1 or a whole number"]),
        (
            "data: {name: mnist, augment: {crop: 4}}",
            "crop",
            UnknownKey,
            &["unknown key `crop` in `data.augment`"],
        ),
        (
            "data: {name: mnist, augment: {normalize: {mean: [0], std: [1, 2]}}}",
            "[",
            Value,
            &["as long as mean (1), found 2"],
        ),
        (
            "data: {name: mnist, augment: {normalize: {mean: [0], std: [0]}}}",
            "0",
            Value,
            &["std[0] must be greater than 0"],
        ),
        ("problem: {name: powell}", "problem", Value, &["in place of `data` and `model`"]),
        ("device: tpu", "tpu", Value, &["expected auto, cpu, cuda, cuda:<number> or metal, found `tpu`"]),
        ("seed: -1", "-1", Type, &["seed: expected a whole number"]),
        ("name: ../up", "../up", Value, &["name must be 1 to 100 letters"]),
        ("name: [", "[", Syntax, &["unclosed bracket"]),
        ("seed: 1\nseed: 2", "seed", Syntax, &["key `seed` is given twice"]),
        ("seed: .inf", ".inf", Syntax, &["expected a finite number"]),
        ("seed: *nope", "*", Syntax, &["expected an alias of an anchor above"]),
        ("extends: none.yaml", "none.yaml", Extends, &["layer `none.yaml` does not exist"]),
        ("extends: [1]", "1", Type, &["expected the path of a layer"]),
        ("sweep: {gird: {}}", "gird", UnknownKey, &["did you mean `grid`?"]),
        ("sweep: {grid: {}}", "sweep", Value, &["varies nothing"]),
        ("sweep: {grid: {optimizer.c: 1}}", "1", Type, &["expected a list of values"]),
        ("sweep: {grid: {optimizer.c: [1, -2]}}", "-2", Section, &["c must be at least 0"]),
        (
            "sweep: {grid: {optimizer.d: [1]}}",
            "optimizer.d",
            Section,
            &["unknown hyperparameter `d` of decgd"],
        ),
        ("sweep: {grid: {extends: [a]}}", "extends", Value, &["cannot be varied"]),
        ("sweep: {list: [{train: {epochs: x}}]}", "x", Type, &["train.epochs"]),
        ("sweep: {list: [{sweep: {seeds: [1]}}]}", "sweep", Value, &["cannot be varied"]),
        ("sweep: {seeds: [a]}", "a", Type, &["sweep.seeds[0]: expected a whole number"]),
        (
            "sweep: {halton: {count: 2, space: {optimizer.lr: {log: [0, 1]}}}}",
            "optimizer.lr",
            Value,
            &["{log: [low, high]}"],
        ),
        (
            "sweep: {random: {count: 0, space: {optimizer.lr: {log: [1, 2]}}}}",
            "0",
            Value,
            &["between 1 and 10000"],
        ),
    ];
    for (line, caret, kind, parts) in cases {
        let text = with(line);
        let error = load(&text, &[]).map(|recipe| recipe.plan()).expect_err(line);
        let report = error.to_string();
        assert_eq!(error.kind(), *kind, "{line}\n{report}");
        let (file, row, column) = error.location().unwrap_or_else(|| panic!("no place: {line}\n{report}"));
        assert_eq!(file, "bad.yaml", "{report}");
        let shown = text.lines().nth(row - 1).unwrap();
        assert!(shown[column - 1..].starts_with(caret), "{line}: caret at {row}:{column}\n{report}");
        assert!(report.contains(&format!("bad.yaml:{row}:{column}")) && report.contains('^'), "{report}");
        for part in *parts {
            assert!(report.contains(part), "no `{part}` in\n{report}");
        }
    }
}

#[test]
fn overrides_are_shown_as_they_were_typed() {
    use ErrorKind::*;
    let good = GOOD.join("\n");
    let cases: &[(&str, usize, ErrorKind, &str)] = &[
        ("optimizer.lr=-1", 14, Value, "optimizer.lr must be greater than 0"),
        ("optimzer.lr=1", 1, UnknownKey, "did you mean `optimizer`?"),
        ("train.epcohs=1", 1, UnknownKey, "did you mean `epochs`?"),
        ("train.epochs=[1", 14, Syntax, "unclosed bracket"),
        ("train.epochs", 1, Override, "expected `--set key=value`"),
        ("train..epochs=1", 1, Override, "expected a key like `train.epochs`"),
        ("optimizer.groups[0].lr=1", 1, Override, "expected a key like `train.epochs`"),
        ("=1", 1, Override, "expected a key like `train.epochs`"),
        ("extends=x.yaml", 1, Override, "belongs in a recipe file"),
    ];
    for (set, column, kind, part) in cases {
        let error = load(&good, &[set]).map(|recipe| recipe.plan()).expect_err(set);
        assert_eq!(error.kind(), *kind, "{error}");
        assert_eq!(error.location(), Some(("--set", 1, *column)), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let variables = [("TAPER__OPTIMIZER__LR".to_owned(), "-1".to_owned())];
    let error = Recipe::parse_with_env("bad.yaml", &good, &variables, &[], &Registry).unwrap_err();
    assert_eq!(error.location(), Some(("environment", 1, 22)), "{error}");
    assert!(error.to_string().contains("TAPER__OPTIMIZER__LR=-1"), "{error}");
}

#[test]
fn a_missing_section_names_the_recipe() {
    let error = load("optimizer: {name: decgd}\ntrain: {epochs: 1}\nmodel: {name: mlp}", &[]).unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Missing, "`data.name` is missing"));
    assert!(error.to_string().contains("in bad.yaml"), "{error}");
    let error = load("", &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Missing, "{error}");
}

#[test]
fn the_whole_report_reads_well() {
    let error = load(&with("train: {epocks: 5}"), &[]).unwrap_err();
    let expected = "\
error: unknown key `epocks` in `train`
 --> bad.yaml:4:9
  |
4 | train: {epocks: 5}
  |         ^^^^^^
  |
  = help: did you mean `epochs`?
  = help: known here: epochs, steps, eval_every, eval_augment, log_every, clip_norm, clip_value, label_smoothing, accumulate, shards, shard_state, precision, select, metric, early_stop, average, freeze, init_from, on_divergence, budget, checkpoint, probe, loss_for_scale, loss_shift, bptt, windows, scale_lr_by_length";
    assert_eq!(error.to_string(), expected);
    assert!(!error.to_string().contains('\u{1b}'));
    assert!(error.render(true).contains('\u{1b}'));
}

#[test]
fn a_fault_found_later_is_shown_where_the_setting_is() {
    let text = with("optimizer: {name: decgd, groups: [{match: 'nothing.*', lr: 0.1}]}");
    let recipe = load(&text, &[]).unwrap();
    let error = recipe.error_at("optimizer.groups[0].match", "`nothing.*` matches no parameter");
    assert_eq!(error.location(), Some(("bad.yaml", 4, 43)));
    assert!(error.to_string().starts_with("error: `nothing.*` matches no parameter"));
}
