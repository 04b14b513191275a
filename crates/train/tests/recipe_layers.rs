//! How layers become one recipe.

use std::fs;
use std::path::Path;

use taper_train::recipe::{
    Average, Device, ErrorKind, Holdout, Map, Recipe, SectionError, Sections, Task, Unchecked,
};

fn write(folder: &Path, files: &[(&str, &str)]) {
    for (name, text) in files {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
}

fn parse(text: &str, set: &[&str]) -> Recipe {
    let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
    Recipe::parse("a.yaml", text, &set, &Unchecked).unwrap_or_else(|error| panic!("{error}"))
}

const BASE: &str = "data: {name: mnist}
model: {name: mlp, hidden: [100]}
optimizer: {name: decgd, lr: 0.01, c: 1.0, momentum: 0.9}
train: {epochs: 100}
";

/// The value of a setting and where it came from.
fn setting(recipe: &Recipe, key: &str) -> (String, String) {
    let found = recipe.settings().into_iter().find(|(path, _, _)| path == key);
    let (_, value, origin) = found.unwrap_or_else(|| panic!("no setting {key}"));
    (value, origin)
}

#[test]
fn later_layers_win_and_every_value_knows_its_origin() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[
            ("configs/low.yaml", BASE),
            ("configs/high.yaml", "extends: low.yaml\ntrain: {epochs: 50, clip_norm: 1}\nseed: 7\n"),
            ("recipes/r.yaml", "extends: [../configs/high.yaml]\nseed: 8\n"),
        ],
    );
    let path = folder.path().join("recipes/r.yaml");
    let recipe = Recipe::load(&path, &["optimizer.lr=0.5".to_owned()], &Unchecked).unwrap();
    let root = folder.path().display();
    let expect = |key: &str, value: &str, origin: String| {
        assert_eq!(setting(&recipe, key), (value.to_owned(), origin), "{key}");
    };
    expect("name", "r", "file name".to_owned());
    expect("seed", "8", format!("{root}/recipes/r.yaml:2:7"));
    expect("train.epochs", "50", format!("{root}/configs/high.yaml:2:17"));
    expect("train.clip_norm", "1.0", format!("{root}/configs/high.yaml:2:32"));
    expect("optimizer.c", "1.0", format!("{root}/configs/low.yaml:3:39"));
    expect("optimizer.lr", "0.5", "--set optimizer.lr".to_owned());
    expect("data.batch_size", "128", "built-in default".to_owned());
}

#[test]
fn the_environment_lies_between_the_recipe_and_set() {
    let variables = [
        ("TAPER__TRAIN__EPOCHS".to_owned(), "3".to_owned()),
        ("TAPER__OPTIMIZER__LR".to_owned(), "1e-3".to_owned()),
        ("TAPER_DATA".to_owned(), "/elsewhere".to_owned()),
        ("PATH".to_owned(), "/bin".to_owned()),
    ];
    let set = ["train.epochs=4".to_owned()];
    let recipe = Recipe::parse_with_env("a.yaml", BASE, &variables, &set, &Unchecked).unwrap();
    assert_eq!((recipe.train.epochs, recipe.optimizer.lr), (Some(4), 1e-3));
    assert_eq!(setting(&recipe, "optimizer.lr").1, "environment TAPER__OPTIMIZER__LR");
}

#[test]
fn set_takes_yaml_values_and_the_last_of_two_wins() {
    let recipe = parse(
        BASE,
        &[
            "model.hidden=[300, 100]",
            "train.probe=true",
            "optimizer.c=1e-8",
            "seed=1",
            "seed=2",
            "data.val=0.1",
        ],
    );
    assert_eq!(recipe.model.as_ref().unwrap().config["hidden"], serde_json::json!([300, 100]));
    assert_eq!(recipe.train.probe, taper_train::recipe::Probe::Statistics(true));
    assert_eq!(recipe.optimizer.hyper["c"], 1e-8);
    assert_eq!(recipe.seed, 2);
    assert_eq!(recipe.data.as_ref().unwrap().val, Some(Holdout::Fraction(0.1)));
    assert_eq!(parse(BASE, &["train.clip_norm=1", "train.clip_norm=null"]).train.clip_norm, None);
    assert_eq!(parse(BASE, &["device=cuda:1"]).device, Device::Cuda(1));
    assert_eq!(parse(BASE, &["name=\"a=b\"".replace("a=b", "ab").as_str()]).name, "ab");
}

#[test]
fn another_optimizer_starts_from_nothing() {
    let recipe = parse(BASE, &["optimizer.name=adam", "optimizer.lr=0.001"]);
    assert_eq!(recipe.optimizer.hyper, Map::new());
    assert_eq!(recipe.optimizer.lr, 0.001);
    // The same name again changes nothing, and neither does the order of two --set.
    assert_eq!(parse(BASE, &["optimizer.name=decgd"]).optimizer.hyper["c"], 1.0);
    assert_eq!(parse(BASE, &["optimizer.lr=0.001", "optimizer.name=adam"]).optimizer.lr, 0.001);
}

#[test]
fn other_tagged_sections_start_anew_too() {
    let text = format!("{BASE}schedule: {{kind: cosine, min: 0.1}}\n");
    let text = text.replace("{epochs: 100}", "{epochs: 9, average: {kind: swa, start: 3}}");
    let recipe = parse(&text, &["schedule.kind=constant", "train.average.kind=ema", "model.name=resnet18"]);
    assert!(recipe.schedule.config.is_empty());
    assert_eq!(recipe.train.average, Average::Ema { decay: 0.999, start: 0 });
    assert!(recipe.model.as_ref().unwrap().config.is_empty());
    // What every data set takes is a built-in default and stays.
    let recipe =
        parse(&text.replace("{name: mnist}", "{name: mnist, batch_size: 5, pixels: 3}"), &["data.name=ptb"]);
    let data = recipe.data.as_ref().unwrap();
    assert_eq!((data.batch_size, data.config.len()), (128, 0));
}

#[test]
fn of_keys_that_exclude_each_other_the_upper_layer_decides() {
    let recipe = parse(BASE, &["train.steps=50"]);
    assert_eq!((recipe.train.epochs, recipe.train.steps), (None, Some(50)));
    let recipe = parse(BASE, &["train.checkpoint.every_steps=7"]);
    assert_eq!((recipe.train.checkpoint.every_epochs, recipe.train.checkpoint.every_steps), (None, Some(7)));
    let recipe = parse(BASE, &["problem.name=powell", "train.steps=10"]);
    assert!(matches!(recipe.task(), Task::Problem(problem) if problem.name == "powell"));
    assert!(recipe.data.is_none() && recipe.model.is_none());
    assert!(matches!(parse(BASE, &[]).task(), Task::Network { data, .. } if data.name == "mnist"));
}

#[test]
fn a_layer_that_two_layers_extend_lies_below_both() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[
            ("common.yaml", BASE),
            ("left.yaml", "extends: common.yaml\ntrain: {epochs: 1}\n"),
            ("right.yaml", "extends: ./common.yaml\nseed: 5\n"),
            ("r.yaml", "extends: [left.yaml, right.yaml]\n"),
        ],
    );
    let recipe = Recipe::load(folder.path().join("r.yaml"), &[], &Unchecked).unwrap();
    assert_eq!((recipe.train.epochs, recipe.seed), (Some(1), 5));
}

#[test]
fn layers_in_a_circle_are_reported_with_the_way_around() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[
            ("a.yaml", "extends: b.yaml\n"),
            ("b.yaml", "extends: c.yaml\n"),
            ("c.yaml", "seed: 1\nextends: [b.yaml]\n"),
        ],
    );
    let error = Recipe::load(folder.path().join("a.yaml"), &[], &Unchecked).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Extends);
    let root = folder.path().display();
    let circle = format!("layers extend each other: {root}/b.yaml -> {root}/c.yaml -> {root}/b.yaml");
    assert_eq!(error.message(), circle);
    assert_eq!(error.location(), Some((format!("{root}/c.yaml").as_str(), 2, 11)));
    assert!(error.to_string().contains(&format!("extended by {root}/a.yaml")), "{error}");
    write(folder.path(), &[("self.yaml", "extends: self.yaml\n")]);
    let error = Recipe::load(folder.path().join("self.yaml"), &[], &Unchecked).unwrap_err();
    assert!(error.message().starts_with("layers extend each other"), "{error}");
}

#[test]
fn a_missing_layer_is_reported_with_who_wants_it() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[("a.yaml", "extends: b.yaml\n"), ("b.yaml", "extends: [gone/c.yaml]\n")]);
    let error = Recipe::load(folder.path().join("a.yaml"), &[], &Unchecked).unwrap_err();
    let root = folder.path().display();
    assert_eq!(error.kind(), ErrorKind::Extends);
    assert_eq!(error.message(), format!("layer `{root}/gone/c.yaml` does not exist"));
    assert_eq!(error.location(), Some((format!("{root}/b.yaml").as_str(), 1, 11)));
    assert!(error.to_string().contains(&format!("extended by {root}/a.yaml")), "{error}");
}

#[test]
fn an_endless_chain_of_layers_ends() {
    let folder = tempfile::tempdir().unwrap();
    for index in 0..100 {
        let text = format!("extends: {}.yaml\n", index + 1);
        fs::write(folder.path().join(format!("{index}.yaml")), text).unwrap();
    }
    let error = Recipe::load(folder.path().join("0.yaml"), &[], &Unchecked).unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Extends, "a recipe of more than 64 files"));
}

#[test]
fn a_key_in_a_layer_is_reported_in_that_layer() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &[("low.yaml", "seed: 1\ntrian: {epochs: 1}\n"), ("r.yaml", "extends: low.yaml\nseed: 2\n")],
    );
    let error = Recipe::load(folder.path().join("r.yaml"), &[], &Unchecked).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownKey);
    assert_eq!(error.location(), Some((format!("{}/low.yaml", folder.path().display()).as_str(), 2, 1)));
}

#[test]
fn anchors_and_merge_keys_work_inside_a_file() {
    let text = format!("{BASE}sweep:\n  list:\n    - &a {{optimizer.c: 1}}\n    - {{<<: *a, seed: 4}}\n");
    let recipe = parse(&text, &[]);
    assert_eq!(recipe.runs()[1].seed, 4);
    assert_eq!(recipe.runs()[1].optimizer.hyper["c"], 1);
}

#[test]
fn a_registry_completes_its_section_and_null_means_its_default() {
    struct Defaults;
    impl Sections for Defaults {
        fn check_optimizer(&self, name: &str, hyper: &Map) -> Result<Map, SectionError> {
            assert!(!hyper.values().any(|value| value.is_null()));
            let mut full = Map::new();
            full.insert("lr".to_owned(), 0.5.into());
            full.insert("eps".to_owned(), 1e-8.into());
            full.insert("amsgrad".to_owned(), (name == "amsgrad").into());
            full.extend(hyper.clone());
            Ok(full)
        }
        fn check_problem(&self, _: &str, config: &Map) -> Result<Map, SectionError> {
            let mut full = config.clone();
            full.entry("n").or_insert(100.into());
            Ok(full)
        }
    }
    let text = "problem: {name: powell}
optimizer:
  name: adam
  eps: null
  groups: [{match: a, lr: 1}, {match: b, name: amsgrad}]
train: {steps: 5}
";
    let recipe = Recipe::parse("a.yaml", text, &[], &Defaults).unwrap();
    assert_eq!(recipe.optimizer.lr, 0.5);
    assert_eq!(setting(&recipe, "optimizer.lr"), ("0.5".to_owned(), "default of adam".to_owned()));
    assert_eq!(setting(&recipe, "problem.n"), ("100".to_owned(), "default of powell".to_owned()));
    assert_eq!(recipe.optimizer.hyper["eps"], 1e-8);
    // A group keeps what differs; one with another optimizer has all of that one's settings.
    let [first, second] = recipe.optimizer.groups.as_slice() else { panic!("two groups") };
    assert_eq!(serde_json::to_value(&first.hyper).unwrap(), serde_json::json!({"lr": 1}));
    assert_eq!(second.hyper["amsgrad"], true);
    assert_eq!(second.hyper["lr"], 0.5);
}
