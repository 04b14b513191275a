//! A run in shards has the same bytes whoever computes them: one process or several.
//!
//! The processes are threads here, each with a world of its own; crates/taper/tests/reliability/ranks.rs has real ones.
#![cfg(unix)]
use candle_core::Tensor;
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use taper_data::{DataError, DataRegistry, Dataset, Description, Loaded, Search};
use taper_models::registry::Cost;
use taper_models::{Loss, Mode, Model, Task};
use taper_optim::rule::{Config, Invalid, ranges};
use taper_optim::{Info, Second, TensorRule, TensorStep};
use taper_train::run::{self, Options, Outcome, RunError, Show, Watch};
use taper_train::{Recipe, Registries};
use taper_world::{World, sockets};

/// Empty shards at the end of every epoch (33 + 33 + 6 samples), a validation set, a plateau, statistics of the optimizer.
const MLP: &str = "
data: {name: synthetic-images, train: 96, test: 20, classes: 4, batch_size: 33, eval_batch_size: 7, val: 0.25}
model: {name: mlp, hidden: [4]}
optimizer: {name: decgd, lr: 0.01}
schedule: {kind: plateau, factor: 0.5, patience: 0}
train: {epochs: 3, shards: 12, log_every: 1, select: val, probe: true}
";

/// Batch statistics, random crops, mixed pairs, an average of the weights, two batches a step, two optimizers.
const RESNET: &str = "
data:
  name: synthetic-images
  train: 52
  test: 16
  classes: 4
  batch_size: 13
  eval_batch_size: 5
  augment: {crop_pad: 4, flip: true, mixup: 0.2}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: adam, lr: 0.01, groups: [{match: '*.bias', name: sgdm, lr: 0.01}]}
train: {epochs: 2, shards: 12, log_every: 1, select: test, accumulate: 2, average: {kind: ema, decay: 0.5}}
";

/// Images mirrored in turns and between mirrors, epochs without their last batch, weights pulled back to slow ones, parameters that
/// are trained at first only, evaluations of several views.
const SHORT: &str = "
data:
  name: synthetic-images
  train: 56
  test: 16
  classes: 4
  batch_size: 13
  eval_batch_size: 5
  last_batch: drop
  augment: {crop_pad: 2, crop_fill: reflect, flip: alternate}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: nag, lr: 0.02, groups: [{match: '*.bias', lr_scale: 8}]}
schedule: {kind: triangle, per: step, start: 0.2, peak_at: 0.25, end: 0.1}
train:
  steps: 11
  shards: 12
  log_every: 1
  label_smoothing: 0.2
  average: {kind: lookahead, every: 2, decay: 0.7, power: 1}
  freeze: [{match: 'conv1.*', after_steps: 5}]
  eval_augment: {kind: flip_shift, when: last}
";

/// A state carried from window to window, windows of drawn lengths, every dropout, clipping.
const LSTM: &str = "
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 14, eval_batch_size: 2}
model: {name: lstm, layers: 2, emb: 12, hidden: 16}
optimizer: {name: decgd, lr: 0.05}
train:
  epochs: 2
  shards: 12
  log_every: 1
  select: val
  clip_norm: 0.25
  bptt: {length: 20, half: 0.05, std: 3, min: 5}
  scale_lr_by_length: true
  checkpoint: {every_epochs: null, every_steps: 3, keep: 9}
";

/// Windows that stand alone, drawn at random, in two batches a step.
const WINDOWS: &str = "
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 14, eval_batch_size: 2}
model: {name: lstm, layers: 1, emb: 12, hidden: 16}
optimizer: {name: decgd, lr: 0.05}
train: {epochs: 2, shards: 12, accumulate: 2, log_every: 1, select: val, windows: {length: 11}}
";

/// Attention over windows of text, with dropout, a tied head and a decay that spares norms.
const GPT: &str = "
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 14, eval_batch_size: 2}
model: {name: gpt, layers: 2, heads: 2, emb: 16, block: 12, bias: true, dropout: {embedding: 0.1, resid: 0.1, attention: 0.1}}
optimizer: {name: adamw, lr: 0.01, no_decay: [bias, norm]}
train: {steps: 7, shards: 12, accumulate: 2, log_every: 1, clip_norm: 1.0, windows: {length: 11}}
";

/// Attention over patches of images.
const VIT: &str = "
data: {name: synthetic-images, train: 48, test: 16, classes: 4, batch_size: 13, augment: {crop_pad: 2, flip: true}}
model: {name: vit, patch: 8, layers: 2, heads: 2, emb: 16, dropout: 0.1}
optimizer: {name: decgdw, lr: 0.05}
train: {epochs: 2, shards: 12, log_every: 1, label_smoothing: 0.1}
";

/// Sums over all parameters of an optimizer.
const ADAGD: &str = "
data: {name: synthetic-images, train: 48, test: 16, classes: 4, batch_size: 24}
model: {name: mlp, hidden: [5]}
optimizer: {name: sgd, lr: 0.05, groups: [{match: '*.weight', name: adagd}]}
train: {epochs: 3, shards: 12, log_every: 1}
";

/// Statistics that are gathered anew for averaged weights, and an early stop.
const SWA: &str = "
data: {name: synthetic-images, train: 40, test: 16, classes: 4, batch_size: 13, val: 0.25}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: sgdm, lr: 0.1}
train: {epochs: 6, shards: 12, select: val, early_stop: {patience: 2}, average: {kind: swa, start: 1}}
";

/// A second gradient a step.
const SAM: &str = "
data: {name: synthetic-images, train: 40, test: 16, classes: 4, batch_size: 13}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: looking, lr: 0.05}
train: {epochs: 2, shards: 12, log_every: 1}
";

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rate {
    lr: f64,
}

impl Config for Rate {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)
    }
}

/// Descends by the gradient a step uphill.
#[derive(Debug)]
struct Looking;

static LOOKING: Info = Info { name: "looking", about: "of the tests", paper: "", year: 2024, formula: "" };

impl TensorRule for Looking {
    type Config = Rate;
    const SECOND: Option<Second<Rate>> =
        Some(|step| step.params.iter().map(|p| Ok((&p.x + (&p.g * 0.1)?)?)).collect());
    fn names() -> Vec<(&'static Info, Rate)> {
        vec![(&LOOKING, Rate { lr: 0.1 })]
    }
    fn info(_: &Rate) -> &'static Info {
        &LOOKING
    }
    fn buffers(_: &Rate) -> &'static [&'static str] {
        &[]
    }
    fn step(step: &mut TensorStep<Rate>) -> taper_optim::Result<()> {
        for p in &mut step.params {
            p.set((&p.x - (&p.g * p.lr)?)?);
        }
        Ok(())
    }
}

fn registries() -> Registries {
    let mut registries = Registries::default();
    registries.optimizers.register_tensor::<Looking>().unwrap();
    registries
}

fn parse(text: &str, set: &[&str]) -> Recipe {
    let set: Vec<String> = set.iter().map(|set| (*set).to_owned()).collect();
    Recipe::parse("net.yaml", text, &set, &registries()).unwrap_or_else(|e| panic!("{e}"))
}

fn options(runs: &Path, world: World) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, world, ..Default::default() }
}

/// What each of so many ranks comes to.
fn ranks(
    size: usize,
    work: impl Fn(World) -> Result<Outcome, RunError> + Sync,
) -> Vec<Result<Outcome, RunError>> {
    let worlds = sockets::within(size, Duration::from_secs(60)).unwrap();
    thread::scope(|scope| {
        let spawn = |world| {
            // candle walks its graph by recursion.
            thread::Builder::new().stack_size(64 << 20).spawn_scoped(scope, || work(world)).unwrap()
        };
        let ranks: Vec<_> = worlds.into_iter().map(spawn).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Trains a recipe by so many ranks; the files of the run that are promised to be the same.
fn train(recipe: &Recipe, runs: &Path, size: usize) -> BTreeMap<String, Vec<u8>> {
    let outcomes = ranks(size, |world| run::run(recipe, &registries(), &options(runs, world)));
    let outcomes: Vec<Outcome> = outcomes.into_iter().map(|outcome| outcome.unwrap()).collect();
    assert!(outcomes.iter().all(|outcome| outcome.summary == outcomes[0].summary));
    let mut files = BTreeMap::new();
    collect(&outcomes[0].folder, &outcomes[0].folder, &mut files);
    assert!(files.keys().any(|name| name.ends_with("model.safetensors")), "{:?}", files.keys());
    files
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            collect(root, &path, files);
        } else if !["manifest.json", "timing.jsonl", ".lock"].contains(&name.as_str()) {
            files.insert(name, std::fs::read(path).unwrap());
        }
    }
}

#[track_caller]
fn assert_equal(found: &BTreeMap<String, Vec<u8>>, expected: &BTreeMap<String, Vec<u8>>, what: &str) {
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(found), names(expected), "{what}");
    for (name, bytes) in expected {
        assert!(&found[name] == bytes, "{name} differs: {what}");
    }
}

/// The run by 1 process and by each of `sizes` is the same.
fn same_for(text: &str, sizes: &[usize]) {
    let (folder, recipe) = (tempfile::tempdir().unwrap(), parse(text, &[]));
    let alone = train(&recipe, &folder.path().join("1"), 1);
    for size in sizes {
        let files = train(&recipe, &folder.path().join(size.to_string()), *size);
        assert_equal(&files, &alone, &format!("{size} ranks"));
    }
}

/// The same, and also where the processes divide the optimizer's state.
fn same_also_divided(text: &str, sizes: &[usize]) {
    same_for(text, sizes);
    divided_as_whole(text, sizes);
}

/// Processes that divide the optimizer's state train what one process trains that does not.
fn divided_as_whole(text: &str, sizes: &[usize]) {
    let folder = tempfile::tempdir().unwrap();
    let mut alone = train(&parse(text, &[]), &folder.path().join("1"), 1);
    let recipe = alone.remove("recipe.yaml").unwrap();
    for size in sizes {
        let runs = folder.path().join(size.to_string());
        let mut files = train(&parse(text, &["train.shard_state=true"]), &runs, *size);
        assert_ne!(files.remove("recipe.yaml").unwrap(), recipe);
        assert_equal(&files, &alone, &format!("{size} ranks, state divided, {text}"));
    }
}

#[test]
fn an_mlp_is_the_same_for_any_number_of_ranks() {
    same_also_divided(MLP, &[2, 3, 4, 6, 12]);
}

#[test]
fn a_resnet_is_the_same_for_any_number_of_ranks() {
    same_also_divided(RESNET, &[2, 3, 4, 6]);
}

#[test]
fn transformers_are_the_same_for_any_number_of_ranks() {
    same_also_divided(GPT, &[2, 4]);
    same_also_divided(VIT, &[2, 3]);
}

#[test]
fn windows_are_the_same_for_any_number_of_ranks() {
    same_also_divided(WINDOWS, &[2, 3]);
}

#[test]
fn a_short_run_is_the_same_for_any_number_of_ranks() {
    same_also_divided(SHORT, &[2, 3, 4]);
}

#[test]
fn an_lstm_is_the_same_for_any_number_of_ranks() {
    same_also_divided(LSTM, &[2, 3, 4, 6]);
}

/// One part of one stream or several, several parts, and ends of streams that are no whole window.
#[test]
fn the_evaluation_of_text_is_the_same_for_any_number_of_ranks() {
    for (streams, tokens) in [(1, 66), (9, 200), (17, 900)] {
        let sizes = format!("valid: {tokens}, test: 100, batch_size: 14, eval_batch_size: {streams}");
        let text = LSTM.replace("valid: 100, test: 100, batch_size: 14, eval_batch_size: 2", &sizes);
        assert_ne!(text, LSTM);
        same_for(&text, &[2, 3, 4, 6, 12]);
    }
}

thread_local! {
    /// Tokens of evaluations that this rank has judged, and that it has read over.
    static JUDGED: Cell<[usize; 2]> = const { Cell::new([0; 2]) };
}

/// An LSTM that counts.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Counting {}

struct Counted(Box<dyn Model>);

impl taper_models::registry::Config for Counting {
    fn build(&self, task: Task, vb: VarBuilder) -> taper_models::Result<Box<dyn Model>> {
        let config = serde_json::json!({"layers": 1, "emb": 6});
        Ok(Box::new(Counted(taper_models::Registry::builtin().get("lstm")?.build(&config, task, vb)?)))
    }
    fn cost(&self, _: Task) -> taper_models::Result<Cost> {
        Ok(Cost { parameters: 1, flops: 1, activation_bytes: 1 })
    }
}

impl Model for Counted {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> taper_models::Result<Tensor> {
        self.0.logits(input, mode)
    }
    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> taper_models::Result<Loss> {
        let [judged, read] = JUDGED.get();
        JUDGED.set([judged + if mode == Mode::Eval { input.elem_count() } else { 0 }, read]);
        self.0.loss(input, target, mode)
    }
    fn advance(&mut self, input: &Tensor, mode: Mode) -> taper_models::Result<()> {
        let [judged, read] = JUDGED.get();
        JUDGED.set([judged, read + input.elem_count()]);
        self.0.advance(input, mode)
    }
    fn carry(&self) -> Vec<(String, Tensor)> {
        self.0.carry()
    }
    fn set_place(&mut self, first: usize) {
        self.0.set_place(first);
    }
    fn set_carry(&mut self, carry: &[(String, Tensor)]) -> taper_models::Result<()> {
        self.0.set_carry(carry)
    }
}

/// Every token is judged by one rank; a rank reads over no more than the start of one part.
#[test]
fn the_evaluation_of_text_is_shared_out() {
    let mut registries = registries();
    registries.models.register("counting", "of the tests", Counting::default()).unwrap();
    let text = LSTM.replace("{name: lstm, layers: 2, emb: 12, hidden: 16}", "{name: counting}");
    let text = text.replace("valid: 100", "valid: 4000").replace("epochs: 2", "epochs: 1");
    let counts = |size: usize, streams: usize| -> Vec<[usize; 2]> {
        let set = [format!("data.eval_batch_size={streams}")];
        let recipe = Recipe::parse("net.yaml", &text, &set, &registries).unwrap();
        let (folder, counts) = (tempfile::tempdir().unwrap(), Mutex::new(vec![[0; 2]; size]));
        for end in ranks(size, |world| {
            let (rank, options) = (world.rank(), options(folder.path(), world));
            let end = run::run(&recipe, &registries, &options);
            counts.lock().unwrap()[rank] = JUDGED.take();
            end
        }) {
            end.unwrap();
        }
        counts.into_inner().unwrap()
    };
    for (streams, parts) in [(1, 1), (8, 2), (16, 4)] {
        let [[all, 0]] = counts(1, streams)[..] else { panic!("one process reads over nothing") };
        for size in [2, 3, 4] {
            let found = counts(size, streams);
            assert_eq!(found.iter().map(|[judged, _]| judged).sum::<usize>(), all, "{found:?}");
            for [judged, read] in &found {
                // Two sets are evaluated, in windows of up to 20 steps; of each a rank may have one more or less, and shorter ones.
                assert!(
                    judged.abs_diff(all / size) <= 4 * 20 * streams / parts,
                    "{streams} streams: {found:?}"
                );
                assert!(*read < all / parts, "{streams} streams: {found:?}");
            }
            let whole = parts % size == 0;
            assert_eq!(whole, found.iter().all(|[_, read]| *read == 0), "{streams} streams: {found:?}");
        }
    }
}

#[test]
fn an_optimizer_that_sums_over_all_parameters_is_the_same_for_any_number_of_ranks() {
    same_also_divided(ADAGD, &[2, 3, 4, 6]);
}

#[test]
fn statistics_of_an_average_and_early_stops_are_the_same_for_any_number_of_ranks() {
    same_also_divided(SWA, &[3]);
}

#[test]
fn second_gradients_are_the_same_for_any_number_of_ranks() {
    same_for(SAM, &[4]);
}

/// Arithmetic of elements, of whole parameters, with sums over all, with weights for evaluation, and one inside another; with and
/// without a probe, which looks at whole parameters.
#[test]
fn the_state_of_every_kind_of_optimizer_can_be_divided() {
    for optimizer in [
        "aegd, lr: 0.05",
        "sf_adamw, lr: 0.01, no_decay: [bias]",
        "lars, lr: 0.1",
        "adafactor, lr: 0.01",
        "soap, lr: 0.01, max_precond_dim: 16",
        "muon, lr: 0.01, rest: {name: adagd}",
        "lookahead, k: 2, inner: {name: adagd}, groups: [{match: '*.bias', name: soap, max_precond_dim: 16}]",
        "lookahead, k: 3, pullback_momentum: reset, inner: {name: sgdm, lr: 0.05}",
    ] {
        let text = format!(
            "
data: {{name: synthetic-images, train: 48, test: 16, classes: 4, batch_size: 24}}
model: {{name: mlp, hidden: [5]}}
optimizer: {{name: {optimizer}}}
train: {{epochs: 3, shards: 12, log_every: 1, probe: {}}}
",
            optimizer.contains("l")
        );
        divided_as_whole(&text, &[4]);
        divided_as_whole(&text.replace("probe: true", "probe: false"), &[3]);
    }
}

/// Parameters that are not trained, and averaged SGD in the place of SGD.
#[test]
fn what_is_frozen_and_what_is_switched_can_be_divided() {
    let frozen = MLP.replace("probe: true", "freeze: ['*.bias'], clip_value: 0.01");
    divided_as_whole(&frozen, &[4]);
    let asgd = MLP.replace("decgd", "sgd").replace("probe: true", "average: {kind: asgd, window: 1}");
    divided_as_whole(&asgd, &[3]);
}

#[test]
fn an_optimizer_that_looks_at_all_parameters_is_not_divided() {
    for optimizer in ["lbfgs", "sam", "prodigy", "lamb", "looking"] {
        let text = ADAGD.replace("name: adagd", &format!("name: {optimizer}"));
        let recipe = parse(&text, &["train.shard_state=true"]);
        let folder = tempfile::tempdir().unwrap();
        let ended = run::run(&recipe, &registries(), &options(folder.path(), World::alone()));
        let error = ended.unwrap_err().to_string();
        for part in ["train.shard_state", optimizer, "cannot be divided"] {
            assert!(error.contains(part), "{error}");
        }
    }
}

#[test]
fn a_rank_that_would_divide_alone_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, other) = (parse(MLP, &[]), parse(MLP, &["train.shard_state=true"]));
    assert_eq!(recipe.id(), other.id());
    let ended = ranks(2, |world| {
        let recipe = if world.rank() == 1 { &other } else { &recipe };
        run::run(recipe, &registries(), &options(folder.path(), world))
    });
    for end in ended {
        let error = end.unwrap_err().to_string();
        assert!(error.starts_with("rank 1: has another section `train`: "), "{error}");
    }
}

/// Without batch statistics a sharded step is the whole one, up to the order of additions; with one shard it is that one.
#[test]
fn shards_change_nothing_but_the_order_of_additions() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |shards: &str| {
        let recipe = parse(MLP, &[shards, "train.probe=false"]);
        let world = World::alone();
        run::run(&recipe, &Registries::default(), &options(folder.path(), world)).unwrap().records
    };
    let (whole, cut) = (lines("train.shards=1"), lines("train.shards=12"));
    assert_eq!(whole.len(), cut.len());
    for (whole, cut) in whole.iter().zip(&cut) {
        for (name, value) in &whole.values {
            // Nine steps of a small net in f32: some thousand roundings of 6e-8 each, most of which cancel.
            let bound = 1e-4 * (1.0 + value.abs());
            assert!(
                (cut.values[name] - value).abs() < bound,
                "step {}: {name} {value} {}",
                whole.step,
                cut.values[name]
            );
        }
    }
}

#[test]
fn numbers_of_ranks_that_do_not_divide_the_shards_are_refused_with_those_that_do() {
    let recipe = parse(MLP, &[]);
    let error = run::check_ranks(&recipe, 5).unwrap_err().to_string();
    for part in ["12 shards", "net.yaml:6:28", "by 5 processes", "1, 2, 3, 4, 6, 12"] {
        assert!(error.contains(part), "{error}");
    }
    let error = run::check_ranks(&parse(MLP, &["train.shards=1"]), 2).unwrap_err().to_string();
    assert!(error.contains("it takes 1; a larger `train.shards`"), "{error}");
}

#[test]
fn a_problem_has_no_shards() {
    let text = "problem: {name: powell}\noptimizer: {name: adam}\ntrain: {steps: 3, shards: 2}";
    let error = Recipe::parse("net.yaml", text, &[], &Registries::default()).unwrap_err().to_string();
    assert!(error.contains("net.yaml:3") && error.contains("a problem has none"), "{error}");
    let alone = parse(text, &["train.shards=1"]);
    assert!(run::check_ranks(&alone, 1).is_ok());
    let error = run::check_ranks(&alone, 2).unwrap_err().to_string();
    assert!(error.contains("net.yaml:1") && error.contains("that 2 processes could share"), "{error}");
}

/// Stopped by one rank, gone on with by others, the run has the bytes of one that was left alone.
#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    for (text, set) in [(RESNET, "train.epochs=3"), (LSTM, "train.epochs=3"), (SHORT, "train.steps=12")] {
        let (folder, recipe) = (tempfile::tempdir().unwrap(), parse(text, &[set]));
        let alone = train(&recipe, &folder.path().join("alone"), 1);
        let runs = folder.path().join("pieces");
        let mut at = 0;
        let divided = parse(text, &["train.epochs=3", "train.shard_state=true"]);
        for (size, by) in [(4, 2), (1, 0), (3, 0), (6, 5)] {
            at += 1;
            // By turns with state divided and not.
            let recipe = if at % 2 == 0 { &recipe } else { &divided };
            let ended = ranks(size, |world| {
                let stop = Arc::new(AtomicBool::new(false));
                let (told, rank) = (stop.clone(), world.rank());
                // One of them is asked to stop after a step; all do.
                let watch =
                    Watch::new(move |tick| told.store(rank == by && tick.step >= at, Ordering::Relaxed));
                run::run(recipe, &Registries::default(), &Options { stop, watch, ..options(&runs, world) })
            });
            for end in ended {
                assert!(matches!(end, Err(RunError::Interrupted { step }) if step == at), "{end:?}");
            }
        }
        let mut files = train(&recipe, &runs, 2);
        // Interruptions leave checkpoints of their own.
        files.retain(|name, _| alone.contains_key(name));
        assert_equal(&files, &alone, "five sessions");
    }
}

/// What is at fault is known to all, and the first says it.
#[test]
fn a_rank_with_another_recipe_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (recipe, other) = (parse(MLP, &[]), parse(MLP, &["optimizer.lr=0.02"]));
    let ended = ranks(3, |world| {
        let recipe = if world.rank() == 2 { &other } else { &recipe };
        run::run(recipe, &Registries::default(), &options(folder.path(), world))
    });
    for end in ended {
        let error = end.unwrap_err().to_string();
        assert!(error.starts_with("rank 2: has another recipe: "), "{error}");
        assert!(error.contains(recipe.id()) && error.contains(other.id()), "{error}");
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing was written");
}

/// Other pictures under the name of the ones that are generated.
struct Other(Arc<dyn Dataset>);

impl Dataset for Other {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn describe(&self) -> Description {
        self.0.describe()
    }
    fn load(&self, options: &Value, search: &Search) -> Result<Loaded, DataError> {
        let mut options = options.clone();
        options["seed"] = 77.into();
        self.0.load(&options, search)
    }
}

#[test]
fn a_rank_with_other_data_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = parse(MLP, &[]);
    let ended = ranks(2, |world| {
        let mut registries = Registries::default();
        if world.rank() == 1 {
            let other = Other(registries.data.get("synthetic-images").unwrap().clone());
            registries.data = DataRegistry::default();
            registries.data.register(Arc::new(other)).unwrap();
        }
        run::run(&recipe, &registries, &options(folder.path(), world))
    });
    for end in ended {
        let error = end.unwrap_err().to_string();
        assert!(error.starts_with("rank 1: has another data or first weights: "), "{error}");
    }
}

/// A rank that fails alone tells the others why.
#[test]
fn the_first_rank_that_cannot_write_ends_all_with_its_reason() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("file");
    std::fs::write(&runs, "no folder").unwrap();
    let recipe = parse(MLP, &[]);
    let ended = ranks(3, |world| run::run(&recipe, &Registries::default(), &options(&runs, world)));
    for (rank, end) in ended.into_iter().enumerate() {
        let error = end.unwrap_err();
        assert_eq!(matches!(error, RunError::World(_)), rank > 0, "{error}");
        assert!(error.to_string().contains(runs.to_str().unwrap()), "{error}");
        assert!(rank == 0 || error.to_string().starts_with("rank 0: "), "{error}");
    }
}

#[test]
fn a_finished_run_is_known_to_all() {
    let (folder, recipe) = (tempfile::tempdir().unwrap(), parse(ADAGD, &[]));
    let before = train(&recipe, folder.path(), 2);
    assert_equal(&train(&recipe, folder.path(), 3), &before, "trained before");
}

/// Wrappers and rules for whole tensors, whose state is whole in every process; frozen parameters; and averaged SGD.
#[test]
fn every_kind_of_optimizer_is_the_same_for_any_number_of_ranks() {
    let with = |optimizer: &str, train: &str| {
        format!(
            "
data: {{name: synthetic-images, train: 36, test: 12, classes: 4, batch_size: 18, val: 0.25}}
model: {{name: mlp, hidden: [5]}}
optimizer: {{name: {optimizer}}}
train: {{epochs: 3, shards: 12, select: val, log_every: 1{train}}}
"
        )
    };
    for optimizer in [
        "aegd, lr: 0.05",
        "lbfgs, lr: 0.1",
        "lookahead, k: 2, inner: {name: decgd, lr: 0.05}",
        "muon, lr: 0.01, rest: {name: lion, lr: 0.001}",
        "prodigy",
        "sam, inner: {name: sgdm, lr: 0.05}",
        "lookahead, k: 2, inner: {name: sam, adaptive: true, inner: {name: adam, lr: 0.01}}",
    ] {
        same_for(&with(optimizer, ""), &[3]);
    }
    same_for(&with("sam, inner: {name: muon, lr: 0.01}", ", freeze: ['*.bias']"), &[4]);
    same_for(&with("sgd, lr: 0.5", ", average: {kind: asgd, window: 1}"), &[3]);
}
