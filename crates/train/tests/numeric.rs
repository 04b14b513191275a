//! Numeric problems from recipe to record.
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use taper_train::run::{self, Options, Outcome, RunError, Show, Split, Status};
use taper_train::{Recipe, Registries};

fn options(runs: &Path) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, ..Default::default() }
}

fn train(recipe: &Value, runs: &Path) -> Outcome {
    // YAML takes JSON as it is.
    let recipe = Recipe::parse("numeric.yaml", &recipe.to_string(), &[], &Registries::default())
        .unwrap_or_else(|e| panic!("{e}"));
    run::run(&recipe, &Registries::default(), &options(runs)).unwrap_or_else(|e| panic!("{e}"))
}

/// The losses of a split by step.
fn losses(run: &Outcome, split: Split) -> Vec<(u64, f64)> {
    run.records.iter().filter(|r| r.split == split).map(|r| (r.step, r.values["loss"])).collect()
}

fn weights(run: &Outcome, step: u64) -> Vec<f64> {
    let path = run.folder.join(format!("checkpoints/step-{step}/model.safetensors"));
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()["x"].to_vec1().unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn golden() -> Value {
    serde_json::from_str(include_str!("../../optim/tests/golden/numeric.json")).unwrap()
}

/// The record itself is within 6.1e-14 of a run in extended precision.
fn assert_relative(found: f64, expected: f64, what: &str) {
    let error = (found - expected).abs() / expected.abs().max(1e-3);
    assert!(error < 1e-11, "{what}: {found} instead of {expected}");
}

#[test]
fn recipes_follow_the_record_of_powell_and_rosenbrock() {
    let folder = tempfile::tempdir().unwrap();
    for case in golden()["cases"].as_array().unwrap() {
        let function = case["function"].as_str().unwrap();
        let mut problem = match function.split_once('_') {
            Some((name, variant)) => json!({"name": name, "variant": variant}),
            None => json!({"name": function}),
        };
        problem["n"] = case["n"].clone();
        if case["start"].is_array() {
            problem["start"] = case["start"].clone();
        }
        let mut optimizer = case["hyperparameters"].clone();
        optimizer["name"] = case["optimizer"].clone();
        optimizer["lr"] = case["lr"].clone();
        // The t-th training line is f(x_t); what is left after the last step but one is x of the last iteration.
        let iterations: Vec<u64> = numbers(&case["iterations"]).into_iter().map(|t| t as u64).collect();
        let last = iterations[iterations.len() - 1];
        let recipe = json!({
            "problem": problem, "optimizer": optimizer, "train": {"steps": last - 1, "log_every": 1},
        });
        let run = train(&recipe, folder.path());
        let mut found = losses(&run, Split::Train);
        found.extend(losses(&run, Split::Test).into_iter().map(|(step, loss)| (step + 1, loss)));
        for (t, f) in iterations.iter().zip(numbers(&case["f"])) {
            let (step, loss) = found[*t as usize - 1];
            assert_eq!(step, *t);
            assert_relative(loss, f, &format!("{recipe}: f(x_{t})"));
        }
        for (found, x) in
            weights(&run, last - 1).iter().zip(numbers(&case["x_first_four"][iterations.len() - 1]))
        {
            assert_relative(*found, x, &format!("{recipe}: x_{last}"));
        }
    }
}

#[test]
fn recipes_follow_the_toy_table() {
    let folder = tempfile::tempdir().unwrap();
    for case in golden()["toy"].as_array().unwrap() {
        assert_eq!((&case["a"], &case["b"]), (&json!(1.0), &json!(10.0)));
        assert_eq!(case["lrs"], json!([0.1, 0.1, 0.1, 0.01, 0.01]));
        let mut optimizer = case["hyperparameters"].clone();
        (optimizer["name"], optimizer["lr"]) = ("decgd".into(), 0.1.into());
        let run = train(
            &json!({
                "problem": {"name": "quadratic", "n": 2, "condition": 10, "start": case["x"][0]},
                "optimizer": optimizer,
                "schedule": {"kind": "milestones", "per": "step", "at": [3], "factor": 0.1},
                "train": {"steps": 5, "log_every": 1},
            }),
            folder.path(),
        );
        // A handful of operations on numbers of the order of 1, five times; 0.1 · 0.1 is not 0.01 by 2e-18.
        let close = |(found, expected): (&f64, &f64)| (found - expected).abs() < 1e-14;
        let found: Vec<f64> = losses(&run, Split::Train).into_iter().map(|(_, loss)| loss).collect();
        assert!(found.iter().zip(&numbers(&case["losses"])).all(close), "{case}: {found:?}");
        assert!(weights(&run, 5).iter().zip(&numbers(&case["x"][5])).all(close), "{case}");
    }
}

const POWELL: &str = "
problem: {name: powell}
optimizer: {name: decgd, lr: 1e-5}
train: {steps: 40, log_every: 1, eval_every: 10, probe: true, checkpoint: {every_steps: 15, keep: 2}}
";

#[test]
fn a_minimisation_is_a_run_like_any_other() {
    let registries = Registries::default();
    let recipe = Recipe::parse("powell.yaml", POWELL, &[], &registries).unwrap();
    let (whole, pieces) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let outcome = run::run(&recipe, &registries, &options(whole.path())).unwrap();
    assert_eq!((outcome.summary.status, outcome.summary.steps), (Status::Finished, 40));
    let train = losses(&outcome, Split::Train);
    assert_eq!((train.len(), train[0]), (40, (1, 5375.0)));
    assert_eq!(outcome.summary.best["train.loss"].value, train[39].1, "Powell's loss falls with every step");
    let test: Vec<u64> = losses(&outcome, Split::Test).into_iter().map(|(step, _)| step).collect();
    assert_eq!(test, [10, 20, 30, 40]);
    let probes: Vec<_> = outcome.records.iter().filter(|r| r.split == Split::Probe).collect();
    assert_eq!(probes.len(), 4);
    assert!(probes[0].values["v_min/x"] <= probes[0].values["v_mean/x"], "{probes:?}");

    // Stopped after every single step, it leaves the same bytes.
    let stopping = Options { stop: Arc::new(AtomicBool::new(true)), ..options(pieces.path()) };
    let mut interruptions = 0;
    let folder = loop {
        match run::run(&recipe, &registries, &stopping) {
            Ok(outcome) => break outcome.folder,
            Err(RunError::Interrupted { step }) => {
                interruptions += 1;
                assert_eq!(step, interruptions);
            }
            Err(e) => panic!("{e}"),
        }
    };
    assert_eq!(interruptions, 39);
    for file in [
        "metrics.jsonl",
        "summary.json",
        "events.out.tfevents.0.taper",
        "checkpoints/step-40/model.safetensors",
        "checkpoints/step-40/optimizer.safetensors",
    ] {
        let read = |folder: &Path| std::fs::read(folder.join(file)).unwrap();
        assert!(read(&outcome.folder) == read(&folder), "{file} differs after interruptions");
    }
}

#[test]
fn mistakes_are_named() {
    let refused = |problem: &str, parts: &[&str]| {
        let text = POWELL.replace("{name: powell}", problem);
        let error = Recipe::parse("powell.yaml", &text, &[], &Registries::default()).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{problem}: expected `{part}` in {error}");
        }
    };
    refused("{name: powel}", &["powell.yaml:2", "did you mean `powell`?"]);
    refused("{name: rosenbrock, varaint: paper}", &["unknown key `varaint`", "did you mean `variant`?"]);
    refused("{name: rosenbrock, variant: printed}", &["variant", "printed"]);
    refused("{name: powell, n: 10}", &["multiple of 4", "found 10"]);
    refused("{name: powell, n: ten}", &["n:", "ten"]);
    refused("{name: powell, n: 0}", &["found 0"]);
    refused("{name: powell, n: 1000000000000}", &["found 1000000000000"]);
    refused("{name: powell, start: []}", &["start"]);
    refused("{name: quadratic, condition: 0.5}", &["at least 1", "0.5"]);
    let metric = POWELL.replace("probe: true", "metric: accuracy");
    let recipe = Recipe::parse("powell.yaml", &metric, &[], &Registries::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = run::run(&recipe, &Registries::default(), &options(folder.path())).unwrap_err().to_string();
    assert!(error.contains("there is no accuracy"), "{error}");
}
