//! The microscope over whole runs: what it sees of known problems, and that nothing else notices it.
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use taper_train::recipe::RecipeError;
use taper_train::run::{self, Options, Outcome, PROBE, RunError, Show, Sight, folder};
use taper_train::{Recipe, Registries};

/// Batch normalisation, two batches a step, mixed images, weights that are no longer trained.
const RESNET: &str = "
data: {name: synthetic-images, batch_size: 6, train: 40, test: 8, classes: 4, augment: {mixup: 0.2}}
model: {name: resnet, num_blocks: [1], widths: [4]}
optimizer: {name: decgd, lr: 0.05, decay: paper, weight_decay: 0.01}
train: {epochs: 3, accumulate: 2, log_every: 1, clip_norm: 1.0, freeze: [{match: 'conv1.*', after_steps: 7}],
  checkpoint: {every_epochs: null, every_steps: 3, keep: 9}}
";

/// A state carried from window to window, and every dropout.
const LSTM: &str = "
data: {name: synthetic-text, vocab: 20, branching: 4, train: 400, valid: 40, test: 40, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, layers: 1, emb: 6, hidden: 8}
optimizer: {name: adam, lr: 0.01}
train: {epochs: 2, log_every: 1, bptt: {length: 10, half: 0.05, std: 2, min: 5}, checkpoint: {every_epochs: null, every_steps: 4, keep: 9}}
";

/// Attention over windows that stand alone, with dropout, two batches a step.
const GPT: &str = "
data: {name: synthetic-text, vocab: 20, branching: 4, train: 900, valid: 60, test: 60, batch_size: 6, eval_batch_size: 2}
model: {name: gpt, layers: 1, heads: 2, emb: 8, block: 12, dropout: {embedding: 0.1, resid: 0.1, attention: 0.1}}
optimizer: {name: adamw, lr: 0.01}
train: {steps: 6, accumulate: 2, log_every: 1, windows: {length: 11}}
";

const ALL: &str = "train.probe={every: 2, what: [all]}";

fn parse(text: &str, set: &[&str]) -> Result<Recipe, RecipeError> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Recipe::parse("microscope.yaml", text, &set, &Registries::default())
}

fn recipe(text: &str, set: &[&str]) -> Recipe {
    parse(text, set).unwrap_or_else(|e| panic!("{e}"))
}

fn train(recipe: &Recipe, runs: &Path) -> Outcome {
    let options = Options { runs: runs.into(), show: Show::Quiet, ..Default::default() };
    run::run(recipe, &Registries::default(), &options).unwrap_or_else(|e| panic!("{e}"))
}

fn sights(run: &Outcome) -> Vec<Sight> {
    let (sights, damage) = folder::sights(&run.folder);
    assert_eq!(damage, None);
    sights
}

/// A function that is minimised.
fn minimise(problem: Value, optimizer: Value, steps: u64, runs: &Path) -> Vec<Sight> {
    let text = json!({
        "problem": problem, "optimizer": optimizer,
        "train": {"steps": steps, "probe": {"every": 1, "what": ["all"]}, "checkpoint": {"every_epochs": null}},
    });
    sights(&train(&recipe(&text.to_string(), &[]), runs))
}

/// All files of a run but for those that may differ between equal runs.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                folders.push(path);
            } else if !["manifest.json", "timing.jsonl", ".lock"].contains(&name.as_str()) {
                found.insert(name, fs::read(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn training_has_the_same_bits_with_the_microscope_and_without() {
    for text in [RESNET, LSTM] {
        let (with, without) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let seen = train(&recipe(text, &[ALL]), with.path());
        let plain = train(&recipe(text, &[]), without.path());
        assert_eq!(seen.folder.file_name(), plain.folder.file_name(), "the same run");
        let (seen_files, plain_files) = (files(&seen.folder), files(&plain.folder));
        assert!(seen_files.contains_key(PROBE) && !plain_files.contains_key(PROBE));
        let mut compared = 0;
        for (name, bytes) in &plain_files {
            // What lists the files of the microscope, and the recipe that asks for it.
            if !name.ends_with("state.json") && name != "summary.json" && name != "recipe.yaml" {
                assert!(&seen_files[name] == bytes, "{name} is another");
                compared += 1;
            }
        }
        assert!(compared > 8, "{compared} files");
        let comparison =
            taper_train::compare::compare(&seen.folder, &plain.folder, &Registries::default()).unwrap();
        assert!(comparison.equal, "{comparison}");
        assert!(!sights(&seen).is_empty());
    }
}

#[test]
fn an_interrupted_run_has_seen_the_same_in_the_end() {
    for text in [RESNET, LSTM] {
        let recipe = recipe(text, &[ALL]);
        let whole = tempfile::tempdir().unwrap();
        let expected = files(&train(&recipe, whole.path()).folder);
        let parts = tempfile::tempdir().unwrap();
        // Told to stop before it begins, it takes a step each time.
        let options = Options {
            runs: parts.path().into(),
            show: Show::Quiet,
            stop: Arc::new(AtomicBool::new(true)),
            ..Default::default()
        };
        let mut stops = 0;
        let outcome = loop {
            match run::run(&recipe, &Registries::default(), &options) {
                Err(RunError::Interrupted { .. }) => stops += 1,
                ended => break ended.unwrap(),
            }
        };
        assert!(stops > 5, "{stops}");
        let found = files(&outcome.folder);
        for name in [PROBE, "metrics.jsonl"] {
            assert!(found[name] == expected[name], "{name}");
        }
        let last = |files: &BTreeMap<String, Vec<u8>>| -> BTreeMap<String, Vec<u8>> {
            let step = format!("step-{}/", outcome.summary.steps);
            files
                .iter()
                .filter(|(name, _)| name.contains(&step))
                .map(|(n, b)| (n.clone(), b.clone()))
                .collect()
        };
        assert!(last(&found).keys().any(|name| name.ends_with("microscope.safetensors")));
        assert!(last(&found) == last(&expected));
    }
}

#[test]
fn what_is_seen_does_not_depend_on_threads() {
    let seen = |threads: usize| {
        let runs = tempfile::tempdir().unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let run = pool.install(|| train(&recipe(RESNET, &[ALL]), runs.path()));
        fs::read(run.folder.join(PROBE)).unwrap()
    };
    assert!(seen(1) == seen(2));
}

#[test]
fn shards_and_processes_do_not_keep_it_from_looking() {
    let runs = tempfile::tempdir().unwrap();
    let run = train(&recipe(RESNET, &[ALL, "train.shards=2"]), runs.path());
    let last = sights(&run).pop().unwrap();
    assert!(last.all.contains_key("sharpness") && last.all.contains_key("r2/sgdm"));
    assert!(!last.all.contains_key("noise_trace"), "halves are of whole batches");
}

#[test]
fn a_quadratic_is_as_sharp_as_its_condition_and_steps_land_where_arithmetic_says() {
    let folder = tempfile::tempdir().unwrap();
    let quadratic = json!({"name": "quadratic", "n": 12, "condition": 20.0});
    for sight in minimise(quadratic, json!({"name": "sgd", "lr": 0.04}), 5, folder.path()) {
        let all = &sight.all;
        assert!((all["sharpness"] / 20.0 - 1.0).abs() < 0.01, "{}", all["sharpness"]);
        // Plain descent has no momentum: ηλ/2 of a threshold of 2, with λ as exact as Lanczos has it.
        assert!((all["rate/gd"] / 0.04 - 1.0).abs() < 1e-9 && all["r2/gd"] > 1.0 - 1e-9);
        assert_eq!(all["momentum"], 0.0);
        assert!((all["stability"] / 0.4 - 1.0).abs() < 0.01, "{}", all["stability"]);
        assert!((all["stability"] / (0.04 * all["sharpness"] / 2.0) - 1.0).abs() < 1e-9);
        assert!(!all.contains_key("noise_trace"), "a function has no noise");
    }
    // With momentum β the threshold is 2(1 + β).
    let quadratic = || json!({"name": "quadratic", "n": 12, "condition": 20.0});
    let momentum = json!({"name": "sgdm", "lr": 0.04, "momentum": 0.9});
    for sight in minimise(quadratic(), momentum, 5, folder.path()) {
        let all = &sight.all;
        assert!((all["stability"] / (0.8 / 3.8) - 1.0).abs() < 0.01, "{}", all["stability"]);
    }
    // Optimizers that have none are not given any: the rate is that of plain descent, the threshold 2.
    for optimizer in [
        json!({"name": "adagrad", "lr": 0.04}),
        json!({"name": "aegd", "lr": 0.04}),
        json!({"name": "adam", "beta1": 0.0, "lr": 0.01}),
    ] {
        for sight in minimise(quadratic(), optimizer, 3, folder.path()) {
            let all = &sight.all;
            assert_eq!(all["momentum"], 0.0);
            assert!((all["stability"] - all["rate/gd"] * all["sharpness"] / 2.0).abs() < 1e-9);
        }
    }
    // With one eigenvalue λ = 1 a step at rate η goes to 1 - η of the way: α = η - 1.
    let round = json!({"name": "quadratic", "n": 5, "condition": 1.0});
    for (lr, alpha) in [(1.0, 0.0), (0.25, -0.75), (1.75, 0.75)] {
        let first = minimise(round.clone(), json!({"name": "sgd", "lr": lr}), 1, folder.path()).remove(0);
        assert!((first.all["alpha"] - alpha).abs() < 1e-9, "{lr}: {}", first.all["alpha"]);
        assert!((first.all["sharpness"] - 1.0).abs() < 1e-6);
    }
}

#[test]
fn runs_of_known_optimizers_are_nearest_to_themselves() {
    let folder = tempfile::tempdir().unwrap();
    let rosenbrock = || json!({"name": "rosenbrock", "n": 20});
    let cases = [
        (json!({"name": "sgdm", "lr": 1e-4, "momentum": 0.8}), "sgdm", 1e-4),
        (json!({"name": "adam", "lr": 0.05}), "adam", 0.05),
    ];
    for (optimizer, expected, lr) in cases {
        let seen = minimise(rosenbrock(), optimizer, 30, folder.path());
        for sight in &seen {
            let (r2, rate) = (sight.all[&format!("r2/{expected}")], sight.all[&format!("rate/{expected}")]);
            assert!(1.0 - r2 < 1e-9 && (rate / lr - 1.0).abs() < 1e-6, "step {}: {r2} {rate}", sight.step);
        }
        // At first simpler ones are as near: a first step of Adam is one by signs.
        let (name, ..) = seen[29].all.nearest().unwrap();
        assert_eq!(name, expected);
    }
    let frozen = json!({"name": "decgd", "lr": 1e-5, "freeze_v": true});
    let seen = minimise(rosenbrock(), frozen, 30, folder.path());
    for sight in &seen {
        let v = seen[0].all["root"];
        let all = &sight.all;
        assert!(1.0 - all["r2/root"] < 1e-9, "step {}: {}", sight.step, all["r2/root"]);
        assert!((all["rate/root"] / (2e-5 * v) - 1.0).abs() < 1e-6);
        assert_eq!((all["v_min"], all["v_p50"], all["v_max"], all["v_negative"]), (v, v, v, 0.0));
        assert!((all["v_error_rms"] - (v - all["root"]).abs()).abs() < 1e-9 * v);
    }
}

#[test]
fn descent_diverges_where_the_stability_ratio_passes_one() {
    let folder = tempfile::tempdir().unwrap();
    let quadratic = || json!({"name": "quadratic", "n": 12, "condition": 20.0});
    // 2/λ = 0.1 without momentum, 2(1 + β)/λ = 0.19 with β = 0.9, 2(1 + β)/(1 + 2β)/λ = 0.0679 where it looks ahead.
    let cases = [
        (json!({"name": "sgd", "lr": 0.098}), false),
        (json!({"name": "sgd", "lr": 0.104}), true),
        (json!({"name": "sgdm", "momentum": 0.9, "lr": 0.185}), false),
        (json!({"name": "sgdm", "momentum": 0.9, "lr": 0.195}), true),
        (json!({"name": "nag", "momentum": 0.9, "lr": 0.066}), false),
        (json!({"name": "nag", "momentum": 0.9, "lr": 0.070}), true),
    ];
    for (optimizer, diverges) in cases {
        let seen = minimise(quadratic(), optimizer.clone(), 300, folder.path());
        let (first, last) = (seen[0].all["loss"], seen[299].all["loss"]);
        assert_eq!(last > first, diverges, "{optimizer}: {first} to {last}");
        assert_eq!(seen[0].all["stability"] > 1.0, diverges, "{optimizer}: {}", seen[0].all["stability"]);
    }
}

#[test]
fn products_of_bf16_leave_alpha_as_it_is_and_no_sharpness() {
    const MLP: &str = "
data: {name: synthetic-images, batch_size: 64, train: 64, test: 8, classes: 4}
model: {name: mlp, hidden: [64]}
optimizer: {name: sgdm, lr: 0.05}
train: {steps: 4, probe: {every: 1, what: [all]}}
";
    let seen = |precision: &str| {
        let runs = tempfile::tempdir().unwrap();
        sights(&train(&recipe(MLP, &[&format!("train.precision={precision}")]), runs.path()))
    };
    for (exact, rounded) in seen("f32").iter().zip(&seen("bf16")) {
        let (exact, rounded, step) = (&exact.all, &rounded.all, exact.step);
        assert!((exact["alpha"] - rounded["alpha"]).abs() < 0.05, "step {step}: α {}", rounded["alpha"]);
        assert!(exact.contains_key("sharpness") && exact.contains_key("stability"), "step {step}");
        assert!(!rounded.contains_key("sharpness") && !rounded.contains_key("stability"), "step {step}");
    }
    let asked = recipe(MLP, &["train.precision=bf16", "train.probe={every: 1, what: [sharpness]}"]);
    let runs = tempfile::tempdir().unwrap();
    let options = Options { runs: runs.path().into(), show: Show::Quiet, ..Default::default() };
    let error = run::run(&asked, &Registries::default(), &options).unwrap_err().to_string();
    assert!(error.contains("train.precision: f32") && error.contains("sharpness"), "{error}");
}

#[test]
fn a_shifted_loss_is_looked_at_as_the_optimizer_gets_it() {
    let seen = |shift: f64, c: f64, name: &str, lr: f64| {
        let folder = tempfile::tempdir().unwrap();
        let text = json!({
            "problem": {"name": "powell"}, "optimizer": {"name": name, "lr": lr, "c": c},
            "train": {"steps": 20, "loss_shift": shift, "probe": {"every": 1}, "checkpoint": {"every_epochs": null}},
        });
        sights(&train(&recipe(&text.to_string(), &[]), folder.path()))
    };
    for (name, lr) in [("decgd", 1e-5), ("aegd", 1e-4), ("decadam", 1e-3)] {
        let (here, there) = (seen(0.0, 1.0, name, lr), seen(16.0, 17.0, name, lr));
        for (a, b) in here.iter().zip(&there) {
            for figure in ["root", "v_p50", "v_error_rms", "v_error_max", "r2/root", "rate/root"] {
                let (x, y) = (a.all[figure], b.all[figure]);
                // f - 16 + 17 rounds to an ulp of f, 1e-12 of 5375; an error of v begins at 0.
                assert!((x - y).abs() < 1e-9 * (1.0 + x.abs()), "{name} {figure}, step {}: {x} {y}", a.step);
            }
            // The loss that is shown is the function's.
            assert!((a.all["loss"] - b.all["loss"]).abs() < 1e-6, "{name}");
            assert!((b.all["root"] - (b.all["loss"] + 1.0).sqrt()).abs() < 1e-9, "{name}");
        }
        assert_eq!(here[0].all["loss"], 5375.0);
    }
}

#[test]
fn noise_of_windows_that_stand_alone_is_that_of_windows() {
    let runs = tempfile::tempdir().unwrap();
    let run = train(&recipe(GPT, &["train.probe={every: 1, what: [noise, sharpness]}"]), runs.path());
    for sight in sights(&run) {
        let all = &sight.all;
        assert!(all["noise_trace"] > 0.0, "step {}", sight.step);
        // Two batches of six windows a step.
        assert!((all["snr"] / (all["grad_square"] * 12.0 / all["noise_trace"]) - 1.0).abs() < 1e-9);
        // What the ratio goes by is beside it, also where nobody asked for what is nearest.
        assert!(all.contains_key("stability") && all.contains_key("r2/sgdm") && !all.contains_key("r2/gd"));
    }
    // Nothing else notices.
    let plain = tempfile::tempdir().unwrap();
    let without = train(&recipe(GPT, &[]), plain.path());
    let read = |run: &Outcome| fs::read(run.folder.join("metrics.jsonl")).unwrap();
    assert!(read(&run) == read(&without));
}

#[test]
fn looks_come_when_they_are_asked_for_and_show_what_they_are_asked_for() {
    let runs = tempfile::tempdir().unwrap();
    let run = train(&recipe(RESNET, &["train.probe={every: 4, what: [norms, noise]}"]), runs.path());
    let seen = sights(&run);
    assert_eq!(seen.iter().map(|sight| sight.step).collect::<Vec<_>>(), [1, 4, 8, 12]);
    let names: Vec<&str> = seen[0].all.keys().map(String::as_str).collect();
    let expected = [
        "early_stop",
        "momentum",
        "grad_norm",
        "grad_square",
        "loss",
        "lr",
        "noise_scale",
        "noise_trace",
        "snr",
        "update_norm",
        "update_ratio",
        "weight_norm",
    ];
    assert!(names.iter().all(|name| expected.contains(name)), "{names:?}");
    assert!(names.contains(&"noise_trace") && names.contains(&"update_ratio"), "{names:?}");
    // Two batches of six a step: halves of three each.
    let noise = &seen[0].all;
    assert!((noise["snr"] - noise["grad_square"] * 12.0 / noise["noise_trace"]).abs() < 1e-9);
    // What is no longer trained is not looked at.
    assert!(seen[0].params.contains_key("conv1.weight") && !seen[3].params.contains_key("conv1.weight"));
}

#[test]
fn damage_to_what_was_seen_is_found_by_who_reads_and_who_goes_on() {
    let runs = tempfile::tempdir().unwrap();
    let run = train(&recipe(RESNET, &[ALL]), runs.path());
    let options = Options { runs: runs.path().into(), show: Show::Quiet, ..Default::default() };
    let verified =
        || taper_train::verify::verify(&run.folder, None, &Registries::default(), &options).unwrap();
    assert!(verified().verified, "{}", verified());
    let path = run.folder.join(PROBE);
    let whole = fs::read(&path).unwrap();
    let mut changed = whole.clone();
    let digit = whole.iter().rposition(u8::is_ascii_digit).unwrap();
    changed[digit] = if changed[digit] == b'1' { b'2' } else { b'1' };
    fs::write(&path, &changed).unwrap();
    assert!(!verified().verified && verified().to_string().contains("probe.jsonl"), "{}", verified());
    let reading = folder::read(&run.folder).unwrap();
    assert!(reading.problems.iter().any(|problem| problem.contains("probe.jsonl")), "{:?}", reading.problems);
    // A run that is to go on stops at a past that is not its own.
    fs::remove_file(run.folder.join("summary.json")).unwrap();
    let error = run::run(&recipe(RESNET, &[ALL]), &Registries::default(), &options).unwrap_err().to_string();
    assert!(error.contains("probe.jsonl") && error.contains("--fresh"), "{error}");
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let (sights, damage) = folder::sights(&run.folder);
    assert!(damage.is_none() && !sights.is_empty(), "a last line without its end is no damage");
    fs::write(&path, b"{]\n").unwrap();
    assert!(folder::sights(&run.folder).1.unwrap().contains("line 1"));
}

#[test]
fn a_longer_run_goes_on_with_what_a_shorter_one_saw() {
    let (runs, alone) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    train(&recipe(RESNET, &[ALL, "train.epochs=2"]), runs.path());
    let longer = train(&recipe(RESNET, &[ALL]), runs.path());
    let expected = train(&recipe(RESNET, &[ALL]), alone.path());
    assert!(fs::read(longer.folder.join(PROBE)).unwrap() == fs::read(expected.folder.join(PROBE)).unwrap());
    let manifest = fs::read_to_string(longer.folder.join("manifest.json")).unwrap();
    assert!(manifest.contains("\"extends\": \""), "{manifest}");
}

#[test]
fn what_cannot_be_looked_at_is_refused_at_its_key() {
    let cases = [
        (RESNET, "train.probe={every: 0}", "every"),
        (RESNET, "train.probe={what: [all]}", "every"),
        (RESNET, "train.probe={every: 2, what: [sharpnes]}", "sharpness"),
        (RESNET, "train.probe={every: 2, how: 1}", "how"),
        (RESNET, "train.probe=5", "expected `true`, `false`, or a map with `every` and `what`"),
        (
            RESNET,
            "train.probe={every: 2, what: []}",
            "train.probe.what: expected something to look at, found an empty list",
        ),
        (LSTM, "train.probe={every: 2, what: [noise]}", "streams carry state"),
    ];
    for (text, set, expected) in cases {
        let error = parse(text, &[set]).unwrap_err().to_string();
        assert!(error.contains(expected), "{set}: {error}");
    }
    let divided = parse(RESNET, &[ALL, "train.shard_state=true"]).unwrap_err().to_string();
    assert!(divided.contains("train.shard_state"), "{divided}");
    let gpu = parse(RESNET, &[ALL, "device=cuda"]).unwrap_err().to_string();
    assert!(gpu.contains("device: cpu"), "{gpu}");
    let single = parse(RESNET, &["train.probe={every: 2, what: [norms, noise]}", "data.batch_size=1"]);
    let single = single.unwrap_err().to_string();
    assert!(
        single.contains("train.probe.what[1]: `noise`") && single.contains("`data.batch_size` 2"),
        "{single}"
    );
    assert!(parse(RESNET, &[ALL, "data.batch_size=1"]).is_ok(), "`all` is what the run can have");
    let sharded =
        parse(RESNET, &["train.probe={every: 2, what: [noise]}", "train.shards=2"]).unwrap_err().to_string();
    assert!(sharded.contains("leave `train.shards` out"), "{sharded}");
}
