//! The binary alone in an empty folder: nothing of the repository is near.
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn taper(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    command.current_dir(folder).args(args).env_remove("TAPER_DATA").env("TAPER_OFFLINE", "1");
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

fn done(folder: &Path, args: &[&str]) -> String {
    let output = taper(folder, args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn recipes_are_listed_copied_and_trained() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let list = done(folder, &["recipes", "cookbook/*"]);
    assert!(
        list.lines().any(|line| line.starts_with("cookbook/ema ") && line.contains("moving average")),
        "{list}"
    );
    assert_eq!(done(folder, &["recipes", "copy", "mnist/mlp-adam", "sub"]), "sub/mlp-adam.yaml\n");
    let text = std::fs::read_to_string(folder.join("sub/mlp-adam.yaml")).unwrap();
    assert!(text.contains("\nextends: taper:configs/mnist-mlp.yaml\n"), "{text}");
    assert!(text.contains("#   taper train sub/mlp-adam.yaml\n"), "{text}");
    assert!(text.starts_with("# yaml-language-server: $schema=taper.schema.json\n"), "{text}");
    assert!(folder.join("sub/taper.schema.json").is_file());
    // It is the run that the repository's recipe is.
    let short = ["--set", "train.epochs=1", "--set", "data.subset={train: 256, test: 100}", "--quiet"];
    let train = |recipe: &str| done(folder, &[&["train", recipe, "--json"], &short[..]].concat());
    let line: Value = serde_json::from_str(&train("sub/mlp-adam.yaml")).unwrap();
    assert_eq!(line["summary"]["status"], "finished");
    let again: Value = serde_json::from_str(&train("taper:recipes/mnist/mlp-adam.yaml")).unwrap();
    assert_eq!(line["id"], again["id"]);
    // Nothing is overwritten, and a mistake is answered.
    let output = taper(folder, &["recipes", "copy", "mnist/mlp-adam", "sub"]);
    assert!(
        output.status.code() == Some(2) && said(&output).contains("is there already"),
        "{}",
        said(&output)
    );
    let output = taper(folder, &["recipes", "copy", "mnist/mlp-adm"]);
    assert!(said(&output).contains("did you mean `mnist/mlp-adam`?"), "{}", said(&output));
    let output = taper(folder, &["train", "recipes/quickstart.yaml"]);
    assert!(said(&output).contains("taper:recipes/quickstart.yaml"), "{}", said(&output));
    // Text that a recipe trains on comes with it.
    done(folder, &["recipes", "copy", "cookbook/own-text", "text"]);
    done(folder, &["train", "text/own-text.yaml", "--set", "train.epochs=1", "--quiet"]);
    // The numbers of the runs, typed.
    let numbers = done(folder, &["report", "runs", "--json"]);
    let number: Value = serde_json::from_str(numbers.lines().next().unwrap()).unwrap();
    assert!(number["mean"].is_number() && number["optimizer"] == "adam", "{number}");
}

#[test]
fn a_layer_inside_can_be_extended() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("mine.yaml"),
        "extends: taper:configs/mnist-mlp.yaml\noptimizer: {name: sgd}\n",
    )
    .unwrap();
    let plan = done(folder.path(), &["plan", "mine.yaml", "--no-probe", "--quiet"]);
    assert!(plan.contains("taper:configs/mnist-mlp.yaml:"), "{plan}");
    std::fs::write(folder.path().join("mine.yaml"), "extends: taper:configs/mnist.yaml\n").unwrap();
    let output = taper(folder.path(), &["plan", "mine.yaml", "--no-probe"]);
    assert!(said(&output).contains("mine.yaml:1:10"), "{}", said(&output));
}

#[test]
fn a_recipe_of_ones_own_is_begun_without_a_question() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    assert_eq!(done(folder, &["init", "--optimizer", "adamw", "--set", "train.epochs=1"]), "recipe.yaml\n");
    let text = std::fs::read_to_string(folder.join("recipe.yaml")).unwrap();
    assert!(text.contains("\nmodel: {name: mlp}\n") && text.contains("epochs: 1"), "{text}");
    let plan: Value =
        serde_json::from_str(&done(folder, &["plan", "recipe.yaml", "--no-probe", "--json"])).unwrap();
    let setting = |path: &str| {
        let settings = plan["settings"].as_array().unwrap();
        settings.iter().find(|setting| setting["path"] == path).unwrap()["value"].clone()
    };
    assert_eq!((setting("train.epochs"), setting("model.hidden")), (1.into(), vec![100].into()));
    assert_eq!(plan["schedules"][0]["per"], "step");
    for (args, expected) in [
        (&["init"][..], "recipe.yaml is there already"),
        (&["init", "b.yaml", "--model", "mpl"], "did you mean `mlp`?"),
        (&["init", "b.yaml", "--dataset", "text"], "data.train"),
        (&["init", "b.yaml", "--set", "train.epocks=1"], "did you mean `epochs`?"),
        (&["init", "b.yaml", "--set", "sweep.seeds=[1, 2]"], "init writes one run"),
        (&["plan", "recipe.yaml", "--out", "curve.png"], "ends in .svg"),
    ] {
        let output = taper(folder, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", said(&output));
        assert!(said(&output).contains(expected), "{args:?}: {}", said(&output));
    }
    assert!(!folder.join("b.yaml").exists());
}

#[test]
fn paths_in_a_recipe_are_from_the_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let sub = folder.path().join("sub/data");
    std::fs::create_dir_all(&sub).unwrap();
    for split in ["train", "valid", "test"] {
        std::fs::write(sub.join(format!("{split}.txt")), "a b c d e f g h\n".repeat(20)).unwrap();
    }
    let text = "data: {name: text, train: [data/train.txt], valid: data/valid.txt, test: data/test.txt, batch_size: 2, eval_batch_size: 2}\n\
                model: {name: lstm, emb: 4, hidden: 4}\noptimizer: {name: sgd, lr: 0.1}\ntrain: {steps: 2, bptt: {length: 5}}\n";
    std::fs::write(folder.path().join("sub/mine.yaml"), text).unwrap();
    let plan: Value =
        serde_json::from_str(&done(folder.path(), &["plan", "sub/mine.yaml", "--no-probe", "--json"]))
            .unwrap();
    let settings = plan["settings"].as_array().unwrap();
    let train = settings.iter().find(|setting| setting["path"] == "data.train").unwrap();
    assert_eq!(train["value"][0], "sub/data/train.txt");
    // However the recipe is named, it is the same run.
    let whole = folder.path().canonicalize().unwrap().join("sub/mine.yaml");
    let again = done(folder.path(), &["plan", whole.to_str().unwrap(), "--no-probe", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&again).unwrap()["runs"][0]["id"], plan["runs"][0]["id"]);
    assert!(plan["runs"][0]["id"].is_string());
    done(folder.path(), &["train", "sub/mine.yaml", "--quiet"]);
    // A setting of the command line is from where it is typed.
    let output =
        taper(folder.path(), &["train", "sub/mine.yaml", "--quiet", "--set", "data.valid=data/valid.txt"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn the_paper_is_reproduced_from_what_is_inside() {
    let folder = tempfile::tempdir().unwrap();
    let output = taper(folder.path(), &["reproduce", "all", "--scale", "cpu", "--dry-run"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("mnist: 7 cells"), "{}", said(&output));
}

#[test]
fn the_plan_draws_the_schedule() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "taper:recipes/cookbook/warmup-cosine.yaml";
    let long = [
        "--set",
        "train.epochs=40",
        "--set",
        "schedule.warmup=10",
        "--set",
        "schedule.per=epoch",
        "--set",
        "schedule.momentum={kind: geometric, ratio: 0.9}",
    ];
    let args = [&["plan", recipe, "--no-probe", "--quiet", "--out", "curve.svg"], &long[..]].concat();
    let plan = done(folder.path(), &args);
    assert!(plan.contains("schedule: cosine per epoch, 40 of them"), "{plan}");
    let drawn: Vec<&str> = plan.lines().filter(|line| line.contains('│')).collect();
    assert_eq!(drawn.len(), 10, "{plan}");
    // The rate is at its top after a quarter of the run, at its bottom at both ends.
    assert!(drawn[0].contains("rate 0.002 │") && drawn[4].contains("0 │"), "{plan}");
    let svg = std::fs::read_to_string(folder.path().join("curve.svg")).unwrap();
    assert!(svg.contains("learning rate: adamw, cosine") && svg.contains("momentum: adamw, cosine"));
    let args = [&["plan", recipe, "--no-probe", "--json"], &long[..]].concat();
    let plan: Value = serde_json::from_str(&done(folder.path(), &args)).unwrap();
    let rate = plan["schedules"][0]["rate"].as_array().unwrap();
    assert_eq!((rate.len(), rate[9][1].as_f64(), rate[0][1].as_f64()), (40, Some(0.002), Some(0.0002)));
}

#[test]
fn help_says_what_was_typed() {
    let folder = tempfile::tempdir().unwrap();
    for command in ["train", "plan", "recipes"] {
        let help = done(folder.path(), &[command, "--help"]);
        assert!(!help.contains("cargo xtask") && help.contains(&format!("taper {command}")), "{help}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_taper"))
        .args(["train", "--help"])
        .env("TAPER_STARTED_BY", "cargo xtask")
        .output()
        .unwrap();
    assert!(said(&output).contains("Usage: cargo xtask train"), "{}", said(&output));
}
