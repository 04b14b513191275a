//! What short runs on images need, feature by feature: networks that look at the data first, whole batches alone, parameters that are
//! trained at first only, rates in proportion, evaluations of several views.
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use taper_data::{Augment, Data, DataRegistry, ImagePipeline, Normalize, PipelineConfig, Search, SplitSize};
use taper_models::registry::{Config, Cost};
use taper_models::{Mode, Model, Task};
use taper_train::run::{self, Options, Outcome, RunError, Show, Split};
use taper_train::trained::{Choice, Trained};
use taper_train::{Recipe, Registries};

thread_local! {
    /// How many images the network of this thread was shown before its first step, time after time.
    static SHOWN: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// One layer behind the mean of the images that it was shown.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Centring {
    wants: usize,
}

impl Default for Centring {
    fn default() -> Self {
        Self { wants: 20 }
    }
}

struct Centred {
    wants: usize,
    /// As long as an image.
    centre: Tensor,
    weight: Tensor,
}

impl Config for Centring {
    fn build(&self, task: Task, vb: VarBuilder) -> taper_models::Result<Box<dyn Model>> {
        let Task::Images { height, width, channels, classes } = task else { panic!("images") };
        let size = height * width * channels;
        let centre = vb.get_with_hints(size, "centre", candle_nn::init::ZERO)?;
        let weight =
            vb.get_with_hints((classes, size), "weight", candle_nn::Init::Uniform { lo: -0.01, up: 0.01 })?;
        Ok(Box::new(Centred { wants: self.wants, centre, weight }))
    }
    fn cost(&self, _: Task) -> taper_models::Result<Cost> {
        Ok(Cost { parameters: 1, flops: 1, activation_bytes: 1 })
    }
}

impl Model for Centred {
    fn logits(&mut self, input: &Tensor, _: Mode) -> taper_models::Result<Tensor> {
        let centred = input.flatten_from(1)?.broadcast_sub(&self.centre.detach())?;
        Ok(centred.matmul(&self.weight.t()?)?)
    }
    fn wants_images(&self) -> usize {
        self.wants
    }
    fn see_images(&mut self, images: &Tensor) -> taper_models::Result<()> {
        SHOWN.with_borrow_mut(|shown| shown.push(images.dims()[0]));
        Ok(self.centre.slice_set(&images.flatten_from(1)?.mean(0)?, 0, 0)?)
    }
}

fn registries() -> Registries {
    let mut registries = Registries::default();
    registries.models.register("centred", "of the tests", Centring::default()).unwrap();
    registries
}

/// Six batches of 13 and one of 2 an epoch; 28 of 108 images are put aside.
const CENTRED: &str = "
data:
  name: synthetic-images
  train: 108
  test: 30
  classes: 4
  batch_size: 13
  eval_batch_size: 7
  val: 28
  augment: {crop_pad: 2, flip: true, normalize: {mean: [0.4, 0.5, 0.6], std: [0.2, 0.3, 0.25]}}
model: {name: centred}
optimizer: {name: sgd, lr: 0.01}
train: {steps: 9, checkpoint: {every_epochs: null, every_steps: 1, keep: 1000}}
";

fn parse(text: &str, set: &[&str]) -> Recipe {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    Recipe::parse("short.yaml", text, &set, &registries()).unwrap_or_else(|e| panic!("{e}"))
}

fn options(runs: &Path) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, ..Default::default() }
}

fn train(text: &str, set: &[&str], runs: &Path) -> Outcome {
    run::run(&parse(text, set), &registries(), &options(runs)).unwrap_or_else(|e| panic!("{set:?}: {e}"))
}

/// Trains with an interruption after every step; how many there were.
fn in_pieces(recipe: &Recipe, runs: &Path) -> (Outcome, usize) {
    let stopping = Options { stop: Arc::new(AtomicBool::new(true)), ..options(runs) };
    let mut interruptions = 0;
    loop {
        match run::run(recipe, &registries(), &stopping) {
            Ok(outcome) => return (outcome, interruptions),
            Err(RunError::Interrupted { .. }) => interruptions += 1,
            Err(e) => panic!("{e}"),
        }
    }
}

fn tensors(run: &Outcome, step: u64, file: &str) -> BTreeMap<String, Vec<f32>> {
    let path = run.folder.join(format!("checkpoints/step-{step}/{file}.safetensors"));
    let loaded: HashMap<String, Tensor> = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let flat = |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F32).unwrap().to_vec1().unwrap();
    loaded.iter().map(|(name, t)| (name.clone(), flat(t))).collect()
}

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

#[track_caller]
fn assert_same(found: &Outcome, expected: &Outcome) {
    let (found, expected) = (bytes(&found.folder), bytes(&expected.folder));
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, content) in &expected {
        assert!(content == &found[name], "{name} differs");
    }
}

/// The mean of the first images of the training set that is left when a part is put aside.
fn mean_of_first(n: usize) -> Vec<f64> {
    let set = DataRegistry::builtin();
    let options = serde_json::json!({"train": 108, "test": 30, "classes": 4});
    let set = set.get("synthetic-images").unwrap();
    let loaded = set.load(&options, &Search::from_env(None, true)).unwrap();
    let Data::Images { train, .. } = loaded.data else { panic!("no images") };
    let (rest, _) = taper_data::split(train.len(), SplitSize::Count(28), 1);
    let config = PipelineConfig {
        batch_size: n,
        shuffle: false,
        augment: Augment::default(),
        normalize: Normalize { mean: vec![0.4, 0.5, 0.6], std: vec![0.2, 0.3, 0.25] },
        drop_last: false,
        indices: Some(rest.into()),
    };
    let batch = ImagePipeline::new(train, config, 1).unwrap().epoch(0, 0).next().unwrap();
    let size = batch.pixels.len() / n;
    let mean = |i: usize| batch.pixels.iter().skip(i).step_by(size).map(|x| f64::from(*x)).sum::<f64>();
    (0..size).map(|i| mean(i) / n as f64).collect()
}

#[test]
fn a_network_is_shown_the_first_training_images_before_the_first_step_alone() {
    let folder = tempfile::tempdir().unwrap();
    let whole = train(CENTRED, &[], &folder.path().join("whole"));
    assert_eq!(SHOWN.take(), [20]);
    let centre = &tensors(&whole, 1, "model")["centre"];
    for (found, expected) in centre.iter().zip(mean_of_first(20)) {
        // Twenty numbers below 4 added in f32.
        assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} instead of {expected}");
    }
    assert_eq!(centre, &tensors(&whole, 9, "model")["centre"]);

    // One that goes on has seen them.
    let (pieces, interruptions) = in_pieces(&parse(CENTRED, &[]), &folder.path().join("pieces"));
    assert_eq!((SHOWN.take(), interruptions), (vec![20], 8));
    assert_same(&pieces, &whole);
    // So has one that begins with weights of another, which are what it has.
    let from = format!("train.init_from={}", whole.folder.display());
    train(CENTRED, &[&from, "seed=2"], &folder.path().join("from"));
    let mut trained =
        Trained::open(&whole.folder, Choice::default(), &registries(), &Search::default()).unwrap();
    assert_eq!(trained.evaluate(Split::Test).unwrap().as_recorded, Some(true));
    assert!(SHOWN.take().is_empty());

    // All there are, where it wants more; none, where it wants none.
    train(CENTRED, &["model.wants=1000"], &folder.path().join("more"));
    assert_eq!(SHOWN.take(), [80]);
    train(CENTRED, &["model.wants=0"], &folder.path().join("none"));
    assert!(SHOWN.take().is_empty());
}

#[test]
fn an_epoch_can_end_before_its_last_batch() {
    let folder = tempfile::tempdir().unwrap();
    let set = ["train={epochs: 2, log_every: 1}", "data.last_batch=drop"];
    let run = train(CENTRED, &set, folder.path());
    assert_eq!(run.summary.steps, 12);
    let kept = train(CENTRED, &set[..1], folder.path());
    assert_eq!(kept.summary.steps, 14);
    // Up to the end of the first epoch they are the same.
    let losses = |run: &Outcome| -> Vec<f64> {
        let logged =
            run.records.iter().filter(|r| r.split == Split::Train && r.values.contains_key("grad_norm"));
        logged.map(|r| r.values["loss"]).collect()
    };
    assert_eq!(losses(&run)[..6], losses(&kept)[..6]);
    assert_ne!(losses(&run)[6], losses(&kept)[6]);

    let recipe = parse(CENTRED, &["data.last_batch=drop", "data.batch_size=81"]);
    let error = run::run(&recipe, &registries(), &options(folder.path())).unwrap_err().to_string();
    for part in ["data.last_batch", "80 images", "no batch of 81"] {
        assert!(error.contains(part), "{error}");
    }
}

const MLP: &str = "
data: {name: synthetic-images, batch_size: 16, train: 80, test: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: adam, lr: 0.01}
train: {steps: 9, checkpoint: {every_epochs: null, every_steps: 1, keep: 1000}}
";

#[test]
fn what_is_frozen_later_is_trained_until_then_and_its_state_stays() {
    let folder = tempfile::tempdir().unwrap();
    for set in [
        vec![],
        vec!["optimizer={name: sam, inner: {name: sgdm, lr: 0.05}}"],
        vec!["optimizer={name: lookahead, k: 2, inner: {name: adam, lr: 0.01}}", "train.accumulate=2"],
        vec!["optimizer={name: decgd, lr: 0.01, groups: [{match: '*.bias', name: nag, lr: 0.01}]}"],
    ] {
        let runs = folder.path().join(set.len().to_string() + &set.concat().replace(['{', '}', '*'], ""));
        let freeze = "train.freeze=[{match: '*.bias', after_steps: 4}]";
        let (plain, all) = (train(MLP, &set, &runs), [set.clone(), vec![freeze]].concat());
        let frozen = train(MLP, &all, &runs);
        for step in 1..=9 {
            let (plain, frozen) = (tensors(&plain, step, "model"), tensors(&frozen, step, "model"));
            // The gradient of the step after the last common one is the same for what is still trained, but for SAM, whose second
            // point is as far away as the norm of the whole gradient says.
            let sam = set.concat().contains("sam");
            for (name, value) in
                frozen.iter().filter(|(name, _)| step <= 5 && !(sam && name.contains("weight")))
            {
                let same = step <= 4 || !name.ends_with("bias");
                assert_eq!(value == &plain[name], same, "{set:?}: {name} after step {step}");
            }
        }
        for file in ["model", "optimizer"] {
            let (then, end) = (tensors(&frozen, 4, file), tensors(&frozen, 9, file));
            for (name, value) in then.iter().filter(|(name, _)| name.contains(".bias")) {
                assert_eq!(value, &end[name], "{set:?}: {name} in {file}");
            }
        }
        let (pieces, interruptions) = in_pieces(&parse(MLP, &all), &runs.join("pieces"));
        assert_eq!(interruptions, 8);
        assert_same(&pieces, &frozen);
    }
}

#[test]
fn a_rate_in_proportion_is_the_rate_that_it_amounts_to() {
    let folder = tempfile::tempdir().unwrap();
    let with =
        |group: &str| format!("optimizer={{name: nag, lr: 0.25, groups: [{{match: '*.bias', {group}}}]}}");
    let scaled = train(MLP, &[&with("lr_scale: 0.5, weight_decay: 0.1")], folder.path());
    let said = train(MLP, &[&with("lr: 0.125, weight_decay: 0.1")], folder.path());
    assert_eq!(tensors(&scaled, 9, "model"), tensors(&said, 9, "model"));
    assert_ne!(scaled.summary.id, said.summary.id);
    // It follows the rate.
    let with = |group: &str, lr: &str| {
        format!("optimizer={{name: nag, lr: {lr}, groups: [{{match: '*.bias', {group}}}]}}")
    };
    let scaled = train(MLP, &[&with("lr_scale: 64", "0.001")], folder.path());
    let said = train(MLP, &[&with("lr: 0.064", "0.001")], folder.path());
    assert_eq!(tensors(&scaled, 9, "model"), tensors(&said, 9, "model"));
}

/// The logits of a linear layer are those of the mean of the views, which is made here pixel by pixel.
#[test]
fn evaluations_of_several_views_have_the_mean_of_their_logits() {
    let folder = tempfile::tempdir().unwrap();
    let last = |run: &Outcome| run.records.iter().rfind(|r| r.split == Split::Test).unwrap().values["loss"];
    let plain = train(CENTRED, &[], folder.path());
    for (kind, views) in [("flip", 2), ("flip_shift", 6)] {
        let always = format!("train.eval_augment={{kind: {kind}}}");
        let run = train(CENTRED, &[&always], folder.path());
        assert_eq!(tensors(&run, 9, "model"), tensors(&plain, 9, "model"), "training is as without");
        let found = last(&run);
        assert_ne!(found, last(&plain));
        let expected = by_hand(&tensors(&run, 9, "model"), views);
        // A mean of thirty losses of f32 logits.
        assert!((found - expected).abs() < 1e-5, "{kind}: {found} instead of {expected}");
        let mut trained =
            Trained::open(&run.folder, Choice::default(), &registries(), &Search::default()).unwrap();
        assert_eq!(trained.evaluate(Split::Test).unwrap().as_recorded, Some(true), "{kind}");

        // At the end alone.
        let set = format!("train.eval_augment={{kind: {kind}, when: last}}");
        let at_end = train(CENTRED, &[&set, "train.eval_every=3"], folder.path());
        let losses = |run: &Outcome| -> Vec<f64> {
            run.records.iter().filter(|r| r.split == Split::Test).map(|r| r.values["loss"]).collect()
        };
        let often = train(CENTRED, &["train.eval_every=3"], folder.path());
        assert_eq!(losses(&at_end)[..2], losses(&often)[..2]);
        assert_eq!(losses(&at_end)[2], found);
        for (step, expected) in [(3, losses(&often)[0]), (9, found)] {
            let checkpoint = at_end.folder.join(format!("checkpoints/step-{step}"));
            let mut trained =
                Trained::open(&checkpoint, Choice::default(), &registries(), &Search::default()).unwrap();
            let evaluation = trained.evaluate(Split::Test).unwrap();
            assert_eq!((evaluation.values["test.loss"], evaluation.as_recorded), (expected, Some(true)));
        }
    }
}

/// The mean loss of the test set, in f64, from the weights of the linear network and the mean view of every image.
fn by_hand(weights: &BTreeMap<String, Vec<f32>>, views: usize) -> f64 {
    let set = DataRegistry::builtin();
    let options = serde_json::json!({"train": 108, "test": 30, "classes": 4});
    let set = set.get("synthetic-images").unwrap();
    let loaded = set.load(&options, &Search::from_env(None, true)).unwrap();
    let Data::Images { test, .. } = loaded.data else { panic!("no images") };
    let (h, w, c) = (test.height as i64, test.width as i64, test.channels as i64);
    let (mean, std) = ([0.4, 0.5, 0.6], [0.2, 0.3, 0.25]);
    let mirror = |at: i64, size: i64| {
        if at < 0 {
            -at
        } else if at >= size {
            2 * size - 2 - at
        } else {
            at
        }
    };
    let mut sum = 0.0;
    for i in 0..test.len() {
        let image = test.image(i);
        let at = |y: i64, x: i64, k: i64| {
            let byte = image[((mirror(y, h) * w + mirror(x, w)) * c + k) as usize];
            (f64::from(byte) / 255.0 - mean[k as usize]) / std[k as usize]
        };
        let places = (0..h).flat_map(|y| (0..w).flat_map(move |x| (0..c).map(move |k| (y, x, k))));
        let view: Vec<f64> = places
            .map(|(y, x, k)| {
                // The window at `by` of the image padded by a pixel shows this place; mirrored, the window's.
                let both = |by: i64| (at(y + by, x + by, k) + at(y + by, w - 1 - x + by, k)) / 2.0;
                if views == 2 { both(0) } else { both(0) / 2.0 + (both(-1) + both(1)) / 4.0 }
            })
            .collect();
        let logit = |class: usize| -> f64 {
            let row = &weights["weight"][class * view.len()..][..view.len()];
            view.iter()
                .zip(&weights["centre"])
                .zip(row)
                .map(|((x, m), w)| (x - f64::from(*m)) * f64::from(*w))
                .sum()
        };
        let logits: Vec<f64> = (0..4).map(logit).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let all = logits.iter().map(|l| (l - most).exp()).sum::<f64>().ln() + most;
        sum += all - logits[usize::from(test.label(i))];
    }
    sum / test.len() as f64
}

#[test]
fn a_shorter_run_whose_end_is_like_no_other_is_not_gone_on_from() {
    let folder = tempfile::tempdir().unwrap();
    for (set, long) in [
        (vec!["train.average={kind: lookahead, power: 2}"], false),
        (vec!["train.average={kind: lookahead}"], true),
        (vec!["train.eval_augment={kind: flip, when: last}"], false),
        (vec!["train.eval_augment={kind: flip}"], true),
        (vec!["schedule={kind: triangle, per: step}"], false),
    ] {
        let runs = folder.path().join(set.concat().replace(['{', '}'], ""));
        let with = |epochs: &'static str| [vec![epochs], set.clone()].concat();
        let alone = train(MLP, &with("train={epochs: 3}"), &runs.join("alone"));
        train(MLP, &with("train={epochs: 2}"), &runs);
        let after = train(MLP, &with("train={epochs: 3}"), &runs);
        let manifest = std::fs::read_to_string(after.folder.join("manifest.json")).unwrap();
        assert_eq!(manifest.contains("\"extends\": \"short"), long, "{set:?}: {manifest}");
        assert_same(&after, &alone);
    }
}
