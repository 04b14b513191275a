//! Numeric problems from recipe to record.
use candle_core::Device;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use taper_train::run::{self, Options, Outcome, RunError, Show, Split, Status};
use taper_train::{Recipe, Registries, sweep, theory};

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

/// Another function at every step, from a start that the seed chooses, in a ball.
const ONLINE: &str = "
seed: 3
problem: {name: targets, n: 6, jitter: 0.2, domain: {ball: 0.5}}
optimizer: {name: decgd, lr: 0.3, ams: true, previous: stored}
schedule: {kind: inverse_sqrt, per: step, momentum: {kind: geometric, ratio: 0.9}}
train: {steps: 40, log_every: 1, eval_every: 10, checkpoint: {every_steps: 15, keep: 2}}
";

#[test]
fn a_minimisation_is_a_run_like_any_other() {
    let registries = Registries::default();
    let recipe = Recipe::parse("powell.yaml", POWELL, &[], &registries).unwrap();
    let whole = tempfile::tempdir().unwrap();
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
    in_pieces(&recipe, &outcome);

    let recipe = Recipe::parse("online.yaml", ONLINE, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
    let outcome = run::run(&recipe, &registries, &options(whole.path())).unwrap();
    in_pieces(&recipe, &outcome);
    // The steps see different functions, and the ball is kept to.
    let train = losses(&outcome, Split::Train);
    assert!(train.windows(2).all(|pair| pair[0].1 != pair[1].1));
    let norm = weights(&outcome, 40).iter().map(|x| x * x).sum::<f64>().sqrt();
    assert!(norm <= 0.5 + 1e-15, "{norm}");
    // Followed without a folder it ends at the same point, to the bit.
    assert_eq!(theory::trace(&recipe, &registries).unwrap().x, weights(&outcome, 40));
    let other = Recipe::parse("online.yaml", ONLINE, &["seed=4".to_owned()], &registries).unwrap();
    assert_ne!(theory::trace(&other, &registries).unwrap().x, weights(&outcome, 40));
}

/// Stopped after every single step, a run of forty leaves the same bytes.
fn in_pieces(recipe: &Recipe, outcome: &Outcome) {
    let (registries, pieces) = (Registries::default(), tempfile::tempdir().unwrap());
    let stopping = Options { stop: Arc::new(AtomicBool::new(true)), ..options(pieces.path()) };
    let mut interruptions = 0;
    let folder = loop {
        match run::run(recipe, &registries, &stopping) {
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
    refused("{name: powell, domain: {}}", &["problem.domain", "one of `box: [-1, 1]` and `ball: 1`"]);
    refused("{name: powell, domain: {box: [-1, 1], ball: 1}}", &["one of"]);
    refused("{name: powell, domain: {box: [1, -1]}}", &["the least first", "[1, -1]"]);
    refused("{name: powell, domain: {ball: 0}}", &["problem.domain.ball", "found 0"]);
    refused("{name: powell, domain: {radius: 1}}", &["radius"]);
    refused("{name: powell, jitter: -1}", &["problem.jitter", "found -1"]);
    refused("{name: targets, share: 1.5}", &["share", "between 0 and 1"]);
    refused("{name: reddi, period: 0}", &["period", "at least 1"]);
    refused("{name: wells, noise: loud}", &["noise", "loud"]);
    let metric = POWELL.replace("probe: true", "metric: accuracy");
    let recipe = Recipe::parse("powell.yaml", &metric, &[], &Registries::default()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let error = run::run(&recipe, &Registries::default(), &options(folder.path())).unwrap_err().to_string();
    assert!(error.contains("there is no accuracy"), "{error}");
}

#[test]
fn regret_is_what_was_paid_beyond_the_best_fixed_point() {
    let recipe = "
problem: {name: reddi, steep: 3, period: 3, start: 0.5, domain: {box: [-1, 1]}}
optimizer: {name: sgd, lr: 0.1}
train: {steps: 6}
";
    let registries = Registries::default();
    let recipe = Recipe::parse("reddi.yaml", recipe, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
    let trace = theory::trace(&recipe, &registries).unwrap();
    // x = 0.5, 0.2, 0.3, 0.4, 0.1, 0.2: paid 1.5 - 0.2 - 0.3 + 1.2 - 0.1 - 0.2; the best, -1, pays -3 + 1 + 1 - 3 + 1 + 1.
    let last = trace.points.last().unwrap();
    assert_eq!(last.t, 6);
    // Sums of a handful of tenths.
    assert!((last.regret.unwrap() - (1.9 + 2.0)).abs() < 1e-14, "{last:?}");
    assert_eq!((last.inverse_v, last.root, trace.diameter), (None, None, Some(2.0)));
    // The worst is that of the steps since the point before, of which here every one has its own.
    assert!(trace.points.iter().all(|point| point.worst == point.regret));
}

#[test]
fn a_lower_loss_with_a_higher_c_is_the_same_problem() {
    let folder = tempfile::tempdir().unwrap();
    let run = |shift: f64, c: f64| {
        let recipe = json!({
            "problem": {"name": "powell"},
            "optimizer": {"name": "decgd", "lr": 1e-5, "c": c},
            "train": {"steps": 50, "loss_shift": shift, "log_every": 1},
        });
        (weights(&train(&recipe, folder.path()), 50), recipe)
    };
    let (here, _) = run(0.0, 1.0);
    let (there, _) = run(16.0, 17.0);
    // f - 16 + 17 rounds to an ulp of f, 1e-12 of 5375; fifty steps.
    assert!(here.iter().zip(&there).all(|(a, b)| (a - b).abs() < 1e-11), "{here:?} {there:?}");
    // The loss that is shown is the function's.
    let (.., recipe) = run(16.0, 17.0);
    assert_eq!(losses(&train(&recipe, folder.path()), Split::Train)[0].1, 5375.0);

    // Where f - a + c is not above 0, the run says so at the key to change.
    let refused = json!({
        "problem": {"name": "quadratic", "n": 4, "condition": 1},
        "optimizer": {"name": "decgd", "lr": 0.1, "c": 1.5},
        "train": {"steps": 50, "loss_shift": 4.0},
    });
    let recipe = Recipe::parse("shift.yaml", &refused.to_string(), &[], &Registries::default()).unwrap();
    let error = run::run(&recipe, &Registries::default(), &options(folder.path())).unwrap_err().to_string();
    assert!(error.contains("f + c must be positive") && error.contains("shift.yaml"), "{error}");
}

#[test]
fn a_problem_is_confirmed_from_other_starting_points() {
    let recipe = "
problem: {name: quadratic, n: 5, condition: 10, jitter: 0.5}
train: {steps: 20, on_divergence: record}
sweep:
  list:
    - {optimizer: {name: sgd, lr: 1.0e-6}}
    - {optimizer: {name: sgd, lr: 0.05}}
    - {optimizer: {name: sgd, lr: 1.0e+3}}
  seeds: [1, 2]
  confirm: [5, 6]
";
    let (folder, registries) = (tempfile::tempdir().unwrap(), Registries::default());
    let recipe = Recipe::parse("fair.yaml", recipe, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
    let mut all =
        sweep::Sweep::open(std::slice::from_ref(&recipe), &registries, &options(folder.path())).unwrap();
    all.run(&registries, &sweep::Workers::Here).unwrap();
    let chosen = all.confirmation(&recipe).unwrap().recipes;
    let chosen: Vec<_> = chosen.iter().map(|recipe| (recipe.optimizer.lr, recipe.seed)).collect();
    assert_eq!(chosen, [(0.05, 5), (0.05, 6)]);
}
