//! Averages of the weights over whole runs, against averages computed by hand from what the runs left.
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use taper_train::run::{self, Options, Outcome, RunError, Show, Split};
use taper_train::{Recipe, Registries};

/// Every step of it leaves a checkpoint.
const MLP: &str = "
data: {name: synthetic-images, batch_size: 32, train: 160, test: 64}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.05}
train: {epochs: 3, checkpoint: {every_epochs: null, every_steps: 1, keep: 1000}}
";

/// Batch normalisation and an epoch whose last batch is small.
const RESNET: &str = "
data: {name: synthetic-images, batch_size: 32, train: 80, test: 32}
model: {name: resnet, num_blocks: [1, 1], widths: [4, 8]}
optimizer: {name: sgdm, lr: 0.05}
train: {epochs: 4, checkpoint: {every_epochs: 1, keep: 1000}}
";

fn recipe(text: &str, set: &[&str]) -> Recipe {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Recipe::parse("average.yaml", text, &set, &Registries::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn options(runs: &Path) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, ..Default::default() }
}

fn train(recipe: &Recipe, runs: &Path) -> Outcome {
    run::run(recipe, &Registries::default(), &options(runs)).unwrap_or_else(|e| panic!("{e}"))
}

/// The tensors of a checkpoint in f64.
fn tensors(run: &Outcome, step: u64, file: &str) -> BTreeMap<String, Vec<f64>> {
    let path = run.folder.join(format!("checkpoints/step-{step}/{file}.safetensors"));
    let loaded: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let widen = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
    loaded.iter().map(|(name, t)| (name.clone(), widen(t))).collect()
}

/// Weights are below 1 in size, and an average of n of them in f32 takes n roundings of half an ulp, 6e-8.
fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{what}: {found} instead of {expected}");
    }
}

#[test]
fn ema_follows_every_step_and_leaves_the_iterates_alone() {
    let folder = tempfile::tempdir().unwrap();
    let plain = train(&recipe(MLP, &[]), folder.path());
    let ema = train(&recipe(MLP, &["train.average={kind: ema, decay: 0.8, start: 1}"]), folder.path());
    assert!(!ema.folder.join("checkpoints/step-5/average.safetensors").exists(), "epoch 0 does not count");
    for step in 1..=15 {
        let read = |run: &Outcome, file| {
            std::fs::read(run.folder.join(format!("checkpoints/step-{step}/{file}.safetensors"))).unwrap()
        };
        for file in ["model", "optimizer"] {
            assert_eq!(
                read(&plain, file),
                read(&ema, file),
                "step {step}: {file} is no longer that of DecGD"
            );
        }
    }
    let mut expected = tensors(&plain, 6, "model");
    for step in 6..=15 {
        for (name, x) in tensors(&plain, step, "model") {
            let average = expected.get_mut(&name).unwrap();
            average.iter_mut().zip(&x).for_each(|(a, x)| *a += (1.0 - 0.8) * (x - *a));
        }
        for (name, found) in tensors(&ema, step, "average") {
            assert_close(&found, &expected[&name], &format!("{name} after step {step}"));
        }
    }
    // Epoch 1 was evaluated with the weights, the others with the average.
    let test = |run: &Outcome| -> Vec<f64> {
        run.records.iter().filter(|r| r.split == Split::Test).map(|r| r.values["loss"]).collect()
    };
    let (plain, ema) = (test(&plain), test(&ema));
    assert_eq!(plain[0], ema[0]);
    assert!(plain[1] != ema[1] && plain[2] != ema[2], "{plain:?} {ema:?}");
}

#[test]
fn swa_is_a_mean_of_epochs_with_statistics_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let swa = train(&recipe(RESNET, &["train.average={kind: swa, start: 1, every: 2}"]), folder.path());
    // Three steps an epoch; epochs 1 and 3, counted from 0, end after steps 6 and 12.
    let (one, three) = (tensors(&swa, 6, "model"), tensors(&swa, 12, "model"));
    let average = tensors(&swa, 12, "average");
    for (name, found) in
        average.iter().filter(|(name, _)| !name.contains("running") && !name.contains("tracked"))
    {
        let mean: Vec<f64> = one[name].iter().zip(&three[name]).map(|(a, b)| (a + b) / 2.0).collect();
        assert_close(found, &mean, name);
    }

    // Its statistics are the mean s of those it has on the three batches of epoch 3. A run that starts from the average
    // and goes to that epoch at a rate that changes no weight sees the same batches, and r ← 0.9 r + 0.1 s gives the s
    // of each.
    assert_eq!(average["bn1.num_batches_tracked"], [3.0]);
    let name = "bn1.running_mean";
    assert_ne!(average[name], three[name], "gathered anew");
    let start = swa.folder.join("checkpoints/step-12/average.safetensors");
    let still = ["optimizer.lr=1e-30", "train.checkpoint={every_epochs: null, every_steps: 1, keep: 1000}"];
    let from = format!("train.init_from={}", start.display());
    let still = train(&recipe(RESNET, &[still[0], still[1], &from]), folder.path());
    let running: Vec<Vec<f64>> = (9..=12).map(|step| tensors(&still, step, "model")[name].clone()).collect();
    let statistics = |k: usize, i: usize| (running[k + 1][i] - 0.9 * running[k][i]) / 0.1;
    let expected: Vec<f64> =
        (0..average[name].len()).map(|i| (0..3).map(|k| statistics(k, i)).sum::<f64>() / 3.0).collect();
    // Dividing by 0.1 makes ten ulps of one.
    assert_close(&average[name], &expected, name);
}

/// Slow weights, statistics among them, by hand from the iterates: the weights of every second checkpoint are the slow ones, and
/// the evaluations are theirs.
#[test]
fn lookahead_sets_weights_and_statistics_to_the_slow_ones() {
    let folder = tempfile::tempdir().unwrap();
    let every = "train.checkpoint={every_epochs: null, every_steps: 1, keep: 1000}";
    let run = train(
        &recipe(RESNET, &["train.average={kind: lookahead, every: 2, decay: 0.75, power: 1}", every]),
        folder.path(),
    );
    let mut slow = tensors(&run, 1, "average");
    let start = tensors(&train(&recipe(RESNET, &["optimizer.lr=1e-30", every]), folder.path()), 1, "model");
    assert_eq!(slow["conv1.weight"], start["conv1.weight"], "from the first weights on");
    // Of the step before the slow weights moved only they are left: at rate 0 the weights would still be the slow ones.
    for step in (2..=12).step_by(2) {
        let (model, average) = (tensors(&run, step, "model"), tensors(&run, step, "average"));
        assert_eq!(model, average, "step {step}");
        assert_ne!(average["bn1.running_mean"], slow["bn1.running_mean"]);
        let (between, before) = (tensors(&run, step - 1, "model"), tensors(&run, step - 1, "average"));
        assert_eq!(before, slow, "step {step}: slow weights stay between two moves");
        assert_ne!(between["conv1.weight"], before["conv1.weight"]);
        slow = average;
    }
    for (set, said) in [
        ("train.average={kind: lookahead, every: 0}", "train.average.every must be at least 1"),
        ("train.average={kind: lookahead, decay: 1.5}", "between 0 and 1"),
        ("train.average={kind: lookahead, power: -1}", "at least 0"),
    ] {
        let error = Recipe::parse("a.yaml", RESNET, &[set.to_owned()], &Registries::default()).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// A bowl that SGD at this rate climbs out of, along its second axis: curvatures 1 and 10, and 10 · 0.21 > 2. The first
/// axis makes the loss fall at first.
const BOWL: &str = "
problem: {name: quadratic, n: 2, condition: 10, start: [1, -0.1]}
optimizer: {name: sgd, lr: 0.21, weight_decay: 0.01}
schedule: {kind: milestones, per: step, at: [4, 20, 25], factor: 0.96}
train: {steps: 30, eval_every: 2, log_every: 1, select: test, checkpoint: {every_steps: 1, keep: 1000}}
";

/// SGD and then ASGD as published, in plain f64: the losses of the evaluations, the last iterate and the average.
fn asgd_by_hand(
    swap: bool,
    (lambd, alpha, t0): (f64, f64, u64),
    window: usize,
) -> (Vec<f64>, [f64; 2], [f64; 2]) {
    let curvature = [1.0, 10.0];
    let f = |x: &[f64; 2]| 0.5 * (curvature[0] * x[0] * x[0] + curvature[1] * x[1] * x[1]);
    let (base, decay) = (0.21, 0.01);
    let mut lr = base;
    let (mut x, mut ax, mut past) = ([1.0, -0.1], [0.0; 2], Vec::new());
    // (steps, eta, mu) of ASGD.
    let mut asgd: Option<(u64, f64, f64)> = None;
    let mut begun = false;
    for t in 0..30u64 {
        if [4, 20, 25].contains(&t) {
            lr *= 0.96;
        }
        let gradient = [0, 1].map(|i| curvature[i] * x[i] + decay * x[i]);
        match &mut asgd {
            None => (0..2).for_each(|i| x[i] -= lr * gradient[i]),
            Some((steps, eta, mu)) => {
                if !begun {
                    (*eta, begun) = (lr, true);
                }
                *steps += 1;
                for i in 0..2 {
                    x[i] *= 1.0 - lambd * *eta;
                    x[i] -= *eta * gradient[i];
                    ax[i] = if *mu == 1.0 { x[i] } else { ax[i] + *mu * (x[i] - ax[i]) };
                }
                *eta = lr / (1.0 + lambd * lr * *steps as f64).powf(alpha);
                *mu = 1.0 / steps.saturating_sub(t0).max(1) as f64;
            }
        }
        if (t + 1) % 2 == 0 {
            let loss = f(if swap && begun { &ax } else { &x });
            if asgd.is_none() && past.len() > window {
                let best = past[..past.len() - window].iter().copied().fold(f64::INFINITY, f64::min);
                if loss > best {
                    (asgd, lr) = (Some((0, 0.0, 1.0)), base);
                }
            }
            past.push(loss);
        }
    }
    (past, x, ax)
}

#[test]
fn asgd_switches_steps_and_averages_as_published() {
    let folder = tempfile::tempdir().unwrap();
    for (swap, with, window) in
        [(false, (0.0, 0.75, 0), 2), (true, (0.0, 0.75, 0), 2), (true, (0.02, 0.5, 3), 1)]
    {
        let (lambd, alpha, t0) = with;
        let average = format!(
            "train.average={{kind: asgd, window: {window}, lambd: {lambd}, alpha: {alpha}, t0: {t0}, swap: {swap}}}"
        );
        let run = train(&recipe(BOWL, &[&average]), folder.path());
        let (losses, x, ax) = asgd_by_hand(swap, with, window);
        let found: Vec<f64> =
            run.records.iter().filter(|r| r.split == Split::Test).map(|r| r.values["loss"]).collect();
        assert_eq!(found.len(), losses.len());
        // Some hundred roundings, and an unstable direction that doubles them a few times.
        let close =
            |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12 * b.abs().max(1.0));
        assert!(close(&found, &losses), "{average}: {found:?} instead of {losses:?}");
        assert!(close(&tensors(&run, 30, "model")["x"], &x), "{average}");
        assert!(close(&tensors(&run, 30, "average")["x"], &ax), "{average}");
    }
}

#[test]
fn asgd_is_for_plain_sgd_and_needs_a_set_to_watch() {
    let folder = tempfile::tempdir().unwrap();
    let average = "train.average={kind: asgd}";
    for (set, expected) in [
        ("optimizer={name: adam, lr: 0.1}", "goes on from plain SGD"),
        ("train.select=last", "watches a set"),
    ] {
        let recipe = recipe(BOWL, &[average, set]);
        let error = run::run(&recipe, &Registries::default(), &options(folder.path())).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Carries its state from window to window, and has a rate at which the loss goes up as well as down.
const LSTM: &str = "
data: {name: synthetic-text, vocab: 50, train: 1200, valid: 300, test: 300, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, emb: 8, hidden: 12, layers: 2}
optimizer: {name: sgd, lr: 10, weight_decay: 1.2e-6}
train:
  steps: 24
  eval_every: 3
  select: test
  clip_norm: 0.25
  bptt: {length: 35, half: 0.05, std: 5, min: 5}
  scale_lr_by_length: true
";

/// All files that must be equal for equal runs.
fn bytes(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(folder).unwrap().display().to_string();
            if path.is_dir() {
                folders.push(path);
            } else if !["manifest.json", "timing.jsonl"].contains(&name.as_str()) {
                all.insert(name, std::fs::read(path).unwrap());
            }
        }
    }
    all
}

#[test]
fn runs_with_an_average_resume_to_the_bit_after_every_step() {
    let asgd = "train.average={kind: asgd, window: 1, t0: 2, lambd: 0.01}";
    for (text, set) in [
        (MLP, "train.average={kind: ema, decay: 0.9}"),
        (RESNET, "train.average={kind: swa, start: 1}"),
        (RESNET, "train.average={kind: ema, decay: 0.9, start: 1}"),
        (MLP, "train.average={kind: lookahead, every: 4, decay: 0.8, power: 2}"),
        (RESNET, "train.average={kind: lookahead, every: 2}"),
        (BOWL, "train.average={kind: lookahead, every: 3, power: 1}"),
        (BOWL, asgd),
        (LSTM, "train.average={kind: asgd, window: 1}"),
    ] {
        // Few checkpoints of their own: those of the interruptions are pruned the same way.
        let recipe = recipe(text, &[set, "train.checkpoint={every_epochs: null, every_steps: 1, keep: 2}"]);
        let (whole, pieces) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let whole = train(&recipe, whole.path());
        let stopping = Options { stop: Arc::new(AtomicBool::new(true)), ..options(pieces.path()) };
        let mut interruptions = 0;
        let folder = loop {
            match run::run(&recipe, &Registries::default(), &stopping) {
                Ok(outcome) => break outcome.folder,
                Err(RunError::Interrupted { .. }) => interruptions += 1,
                Err(e) => panic!("{e}"),
            }
        };
        assert!(interruptions >= 9, "{set}: only {interruptions} interruptions");
        let (whole, pieces) = (bytes(&whole.folder), bytes(&folder));
        assert_eq!(whole.keys().collect::<Vec<_>>(), pieces.keys().collect::<Vec<_>>(), "{set}");
        assert!(whole.keys().any(|name| name.ends_with("average.safetensors")), "{set}");
        for (name, content) in &whole {
            assert!(content == &pieces[name], "{set}: {name} differs after interruptions");
        }
    }
}
