//! The loop with optimizers of other kinds: with weights of their own for evaluation, and with a second gradient.
//!
//! Each is plain descent in one disguise. What the loop does for the disguise must not be seen in the weights.
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use taper_optim::rule::{Config, Invalid, ranges};
use taper_optim::{Evaluation, Info, Result, Second, TensorRule, TensorStep};
use taper_train::run::{self, Options, Outcome, RunError, Show, Split, Watch};
use taper_train::{Recipe, Registries};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rate {
    lr: f64,
}

impl Default for Rate {
    fn default() -> Self {
        Self { lr: 0.1 }
    }
}

impl Config for Rate {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> std::result::Result<(), Invalid> {
        ranges::lr(self.lr)
    }
}

macro_rules! descent {
    ($rule:ident, $info:ident, $name:literal, $evaluation:expr, $second:expr) => {
        #[derive(Debug)]
        struct $rule;
        static $info: Info = Info { name: $name, about: "of the tests", paper: "", year: 2024, formula: "" };
        impl TensorRule for $rule {
            type Config = Rate;
            const EVALUATION: Option<Evaluation<Rate>> = $evaluation;
            const SECOND: Option<Second<Rate>> = $second;
            fn names() -> Vec<(&'static Info, Rate)> {
                vec![(&$info, Rate::default())]
            }
            fn info(_: &Rate) -> &'static Info {
                &$info
            }
            fn buffers(_: &Rate) -> &'static [&'static str] {
                &[]
            }
            fn step(step: &mut TensorStep<Rate>) -> Result<()> {
                for p in &mut step.params {
                    p.set((&p.x - (&p.g * p.lr)?)?);
                }
                Ok(())
            }
        }
    };
}

descent!(Plain, PLAIN, "plain", None, None);
// Judged where all weights are zero.
descent!(Zero, ZERO, "zero", Some(|p| Ok(p.x.zeros_like()?)), None);
// Judged where it is.
descent!(Here, HERE, "here", Some(|p| Ok(p.x.copy()?)), None);
// The second point is the first.
descent!(Twice, TWICE, "twice", None, Some(|step| step.params.iter().map(|p| Ok(p.x.copy()?)).collect()));
// The second point is where everything is infinite.
descent!(
    Cliff,
    CLIFF,
    "cliff",
    None,
    Some(|step| step.params.iter().map(|p| Ok(((&p.x * 0.0)? + f64::INFINITY)?)).collect())
);

fn registries() -> Registries {
    let mut registries = Registries::default();
    registries.optimizers.register_tensor::<Plain>().unwrap();
    registries.optimizers.register_tensor::<Zero>().unwrap();
    registries.optimizers.register_tensor::<Here>().unwrap();
    registries.optimizers.register_tensor::<Twice>().unwrap();
    registries.optimizers.register_tensor::<Cliff>().unwrap();
    registries
}

/// Ten steps an epoch.
const MLP: &str = "
data: {name: synthetic-images, batch_size: 32, train: 320, test: 64}
model: {name: mlp, hidden: [8]}
optimizer: {name: plain, lr: 0.1}
train: {epochs: 2, log_every: 1}
";

const RESNET: &str = "
data: {name: synthetic-images, batch_size: 32, train: 320, test: 64, augment: {mixup: 0.2}}
model: {name: resnet, num_blocks: [1, 1], widths: [4, 8]}
optimizer: {name: plain, lr: 0.05}
train: {epochs: 2, log_every: 1}
";

const LSTM: &str = "
data: {name: synthetic-text, vocab: 50, train: 3000, valid: 300, test: 300, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, emb: 8, hidden: 12, layers: 2, dropout: {embedding: 0.1, hidden: 0.2, output: 0.3, weight: 0.2}}
optimizer: {name: plain, lr: 0.5}
train: {epochs: 2, log_every: 1, bptt: {length: 35, half: 0.3, std: 5, min: 5}}
";

fn attempt(
    text: &str,
    name: &str,
    set: &[&str],
    options: &Options,
) -> std::result::Result<Outcome, RunError> {
    let registries = registries();
    let text = &text.replace("name: plain", &format!("name: {name}"));
    let set: Vec<String> = set.iter().copied().map(str::to_owned).collect();
    run::run(&Recipe::parse("kinds.yaml", text, &set, &registries)?, &registries, options)
}

fn quiet(runs: &std::path::Path) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, ..Default::default() }
}

fn train(text: &str, name: &str, set: &[&str]) -> (Outcome, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let outcome =
        attempt(text, name, set, &quiet(folder.path())).unwrap_or_else(|e| panic!("{name} {set:?}: {e}"));
    (outcome, folder)
}

/// A file of the last checkpoint, tensor by tensor to the bit.
fn tensors(run: &Outcome, file: &str) -> BTreeMap<String, Vec<u8>> {
    let path = run.folder.join(format!("checkpoints/step-{}/{file}", run.summary.steps));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    read.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect()
}

/// The names of tensors that are not the same.
fn differing(a: &BTreeMap<String, Vec<u8>>, b: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    let names: std::collections::BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    names.into_iter().filter(|name| a.get(*name) != b.get(*name)).cloned().collect()
}

fn same(a: &Outcome, b: &Outcome, file: &str) {
    let names = differing(&tensors(a, file), &tensors(b, file));
    assert!(
        names.is_empty(),
        "{file}: {names:?} differ between {} and {}",
        a.folder.display(),
        b.folder.display()
    );
}

fn last(run: &Outcome, split: Split, name: &str) -> f64 {
    run.records.iter().rev().filter(|r| r.split == split).find_map(|r| r.values.get(name).copied()).unwrap()
}

fn training_lines(run: &Outcome) -> Vec<&run::Record> {
    run.records.iter().filter(|r| r.split == Split::Train).collect()
}

#[test]
fn evaluations_and_checkpoints_use_the_evaluation_weights_and_training_never_sees_them() {
    let ((plain, _a), (zero, _b)) = (train(MLP, "plain", &[]), train(MLP, "zero", &[]));
    same(&plain, &zero, "model.safetensors");
    assert_eq!(training_lines(&plain), training_lines(&zero));
    // Of ten classes, with equal logits.
    let loss = last(&zero, Split::Test, "loss");
    assert!((loss - 10f64.ln()).abs() < 1e-6, "{loss}");
    assert!(last(&plain, Split::Test, "loss") < loss);
    let judged = tensors(&zero, "evaluation.safetensors");
    assert!(judged.values().flatten().all(|byte| *byte == 0));
    assert_eq!(
        judged.keys().collect::<Vec<_>>(),
        tensors(&plain, "model.safetensors").keys().collect::<Vec<_>>()
    );
    let path = plain.folder.join(format!("checkpoints/step-{}/evaluation.safetensors", plain.summary.steps));
    assert!(!path.exists(), "the weights are the same: once is enough");
}

#[test]
fn batch_statistics_are_gathered_for_the_evaluation_weights_and_those_of_training_put_back() {
    let ((plain, _a), (here, _b)) = (train(RESNET, "plain", &[]), train(RESNET, "here", &[]));
    let (trained, judged) = (tensors(&here, "model.safetensors"), tensors(&here, "evaluation.safetensors"));
    same(&plain, &here, "model.safetensors");
    assert_eq!(training_lines(&plain), training_lines(&here));
    let is_statistic = |name: &str| name.contains("running_") || name.contains("num_batches");
    for (name, bytes) in &trained {
        assert_eq!(is_statistic(name), judged[name] != *bytes, "{name}");
    }
    // All ten batches of an epoch, once.
    let counts: Vec<_> = judged.iter().filter(|(name, _)| name.contains("num_batches")).collect();
    assert!(!counts.is_empty() && counts.iter().all(|(_, count)| count[..] == 10i64.to_le_bytes()));
    assert_ne!(last(&plain, Split::Test, "loss"), last(&here, Split::Test, "loss"));
}

#[test]
fn a_run_from_a_checkpoint_starts_at_its_evaluation_weights() {
    let (zero, folder) = train(MLP, "zero", &[]);
    let from = format!("train.init_from={}", zero.folder.display());
    let outcome = attempt(MLP, "plain", &[&from, "train.epochs=1"], &quiet(folder.path())).unwrap();
    let first = training_lines(&outcome)[0].values["loss"];
    assert!((first - 10f64.ln()).abs() < 1e-6, "{first}");
}

#[test]
fn a_second_gradient_at_the_same_point_is_the_first_to_the_bit() {
    for (text, set) in [
        (MLP, &[][..]),
        (RESNET, &[]),
        (RESNET, &["train.accumulate=3"]),
        (LSTM, &[]),
        (LSTM, &["train.accumulate=2"]),
    ] {
        let ((plain, _a), (twice, _b)) = (train(text, "plain", set), train(text, "twice", set));
        same(&plain, &twice, "model.safetensors");
        assert_eq!(plain.records, twice.records, "{set:?} {text}");
    }
}

#[test]
fn clipping_goes_by_the_norm_of_each_gradient() {
    // Far below any norm here: what is left of a gradient is its direction, at both points the same.
    let set = ["train.clip_norm=0.001"];
    let ((plain, _a), (twice, _b)) = (train(MLP, "plain", &set), train(MLP, "twice", &set));
    let loss = |run| last(run, Split::Test, "loss");
    assert!((loss(&plain) - loss(&twice)).abs() < 1e-6 * loss(&plain), "{} {}", loss(&plain), loss(&twice));
    assert!(loss(&train(MLP, "plain", &[]).0) < 0.99 * loss(&plain), "the limit did nothing");
}

#[test]
fn a_second_point_that_is_not_finite_ends_the_run_and_leaves_the_weights() {
    let folder = tempfile::tempdir().unwrap();
    let refused = attempt(MLP, "cliff", &[], &quiet(folder.path())).unwrap_err();
    assert!(matches!(refused, RunError::Diverged { step: 1, .. }), "{refused}");
    assert!(refused.to_string().contains("second point"), "{refused}");
    let kept = attempt(MLP, "cliff", &["train.on_divergence=record"], &quiet(folder.path())).unwrap();
    assert_eq!(kept.summary.steps, 0);
}

#[test]
fn interrupted_anywhere_it_ends_with_the_same_bytes() {
    // One of each kind that comes with Taper: a matrix, a basis, weights for evaluation, a wrapper, a second gradient, history,
    // and a wrapper around one that needs the loss.
    let real = [
        "{name: muon, lr: 0.02, rest: {name: adamw, lr: 0.001}}",
        "{name: soap, lr: 0.003, precondition_frequency: 3}",
        "{name: sf_adamw, lr: 0.003, warmup_steps: 5}",
        "{name: lookahead, k: 3, inner: {name: adam, lr: 0.001}}",
        "{name: sam, rho: 0.05, inner: {name: sgdm, lr: 0.05}}",
        "{name: lbfgs, lr: 0.05, history_size: 3}",
        "{name: lookahead, k: 4, inner: {name: decgd, lr: 0.01}}",
    ];
    let real = real.map(|own| (RESNET.replace("{name: plain, lr: 0.05}", own), own));
    let own = [(RESNET, "here"), (RESNET, "twice"), (LSTM, "twice")];
    let own = own.map(|(text, name)| (text.to_owned(), name));
    for (text, name) in own.into_iter().chain(real) {
        let (text, set) = (&text, ["train.checkpoint.every_steps=7"]);
        let (whole, _a) = train(text, name, &set);
        let folder = tempfile::tempdir().unwrap();
        let outcome = loop {
            let stop = Arc::new(AtomicBool::new(false));
            let steps = std::sync::atomic::AtomicU64::new(0);
            let flag = stop.clone();
            let watch = Watch::new(move |_| {
                if steps.fetch_add(1, Ordering::Relaxed) == 4 {
                    flag.store(true, Ordering::Relaxed);
                }
            });
            match attempt(text, name, &set, &Options { stop, watch, ..quiet(folder.path()) }) {
                Err(RunError::Interrupted { .. }) => {}
                outcome => break outcome.unwrap(),
            }
        };
        assert_eq!(outcome.records, whole.records, "{name}");
        for file in ["model.safetensors", "optimizer.safetensors"] {
            same(&outcome, &whole, file);
        }
        let judged = |run: &Outcome| {
            run.folder.join(format!("checkpoints/step-{}/evaluation.safetensors", run.summary.steps))
        };
        let elsewhere = name == "here" || name.contains("sf_") || name.contains("lookahead");
        assert_eq!((judged(&outcome).exists(), judged(&whole).exists()), (elsewhere, elsewhere), "{name}");
        if elsewhere {
            same(&outcome, &whole, "evaluation.safetensors");
        }
    }
}

#[test]
fn an_average_beside_evaluation_weights_is_refused_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let set = ["train.average.kind=ema"];
    let refused = attempt(MLP, "here", &set, &quiet(folder.path())).unwrap_err().to_string();
    assert!(refused.contains("train.average.kind") && refused.contains("weights of its own"), "{refused}");
}

#[test]
fn shapes_say_what_does_not_decay() {
    // A run of one step with all decay and nothing else: what decays is smaller, what does not is the same.
    let shrunk = |set: &[&str]| {
        let set = [
            &["optimizer.lr=0.1", "optimizer.weight_decay=5", "train.clip_value=1e-30", "train.epochs=1"],
            set,
        ]
        .concat();
        let (run, folder) = train(
            RESNET,
            "sgd",
            &[&set[..], &["train.checkpoint.keep=100", "train.checkpoint.every_steps=1"]].concat(),
        );
        let read = |step| {
            let path = run.folder.join(format!("checkpoints/step-{step}/model.safetensors"));
            candle_core::safetensors::load(path, &Device::Cpu).unwrap()
        };
        let (before, after) = (read(1), read(2));
        let bits = |t: &Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let names =
            before.keys().filter(|name| before[*name].dtype().is_float() && !name.contains("running"));
        let mut still: Vec<String> = names
            .filter(|name| {
                bits(&before[*name]) == bits(&after[*name]) && bits(&before[*name]).iter().any(|x| *x != 0.0)
            })
            .cloned()
            .collect();
        still.sort();
        drop(folder);
        still
    };
    assert_eq!(shrunk(&[]), Vec::<String>::new());
    let norms = shrunk(&["optimizer.no_decay=[norm]"]);
    // Their biases start at zero, which decay would not move.
    assert!(!norms.is_empty() && norms.iter().all(|name| name.ends_with("weight")), "{norms:?}");
    assert!(
        !norms.iter().any(|name| name.contains("conv") || name.contains("linear") || name.contains("fc")),
        "{norms:?}"
    );
}
