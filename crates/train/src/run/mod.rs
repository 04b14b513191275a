//! A run: a pure function of its resolved recipe, from which it can be interrupted and resumed at any moment.
//!
//! ```text
//! runs/<name>-<id>/
//!   recipe.yaml      the resolved recipe; comments say where each value came from
//!   manifest.json    what it ran with: code, device, threads, data
//!   metrics.jsonl    one line a measurement; no times
//!   events.out.*     the same for TensorBoard
//!   checkpoints/     step-<n>/{model,optimizer}.safetensors, state.json
//!   summary.json     best and last of every metric, and how it ended; no times
//!   timing.jsonl     seconds, rates, memory: all that may differ between two equal runs
//! ```
pub(crate) mod checkpoint;
mod error;
mod files;
pub(crate) mod folder;
mod kill;
mod lock;
mod metrics;
mod number;
mod optimizers;
mod progress;
mod summary;
mod task;
pub(crate) mod tensorboard;

pub use error::RunError;
pub use metrics::{Record, Split};
pub use progress::Show;
pub use summary::{Best, Status, Summary};

use crate::data::Search;
use crate::recipe::{Average, EarlyStop, LossForScale, Metric, OnDivergence, Select};
use crate::{Recipe, Registries};
use candle_core::{Device, Tensor};
use checkpoint::{State, Sums};
use lock::Lock;
use metrics::Metrics;
use optimizers::{Optimizers, Time};
use progress::Progress;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use taper_optim::{Accumulator, StepContext, global_norm};
use task::{Task, scalar};

/// How to run, as opposed to what: nothing here can change a result.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder of all runs.
    pub runs: PathBuf,
    /// Where data is looked for.
    pub search: Search,
    /// What the user sees meanwhile.
    pub show: Show,
    /// Set it to stop after the current step, with a checkpoint.
    pub stop: Arc<AtomicBool>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            runs: "runs".into(),
            search: Search::from_env(None, false),
            show: Show::Auto,
            stop: Arc::default(),
        }
    }
}

/// What a run left.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Its folder.
    pub folder: PathBuf,
    /// How it ended.
    pub summary: Summary,
    /// All its measurements.
    pub records: Vec<Record>,
    /// Seconds of training and evaluation, over all its interruptions.
    pub seconds: f64,
}

/// Trains a recipe without a sweep, or goes on with it where it was interrupted, or returns what it left when it is
/// finished.
pub fn run(recipe: &Recipe, registries: &Registries, options: &Options) -> Result<Outcome, RunError> {
    run_until(recipe, registries, options, u64::MAX)
}

/// [`run`], interrupted once `until` steps are taken.
pub(crate) fn run_until(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    until: u64,
) -> Result<Outcome, RunError> {
    let folder = options.runs.join(recipe.directory());
    if let Some(outcome) = folder::finished(&folder, recipe)? {
        let Summary { status, steps, reason, .. } = &outcome.summary;
        if *status == Status::Diverged && recipe.train.on_divergence == OnDivergence::Stop {
            // It would diverge again: a run is a function of its recipe.
            return Err(RunError::Diverged { what: reason.clone().unwrap_or_default(), step: steps + 1 });
        }
        if options.show != Show::Quiet {
            eprintln!("{}: finished before, nothing to do", recipe.name);
        }
        return Ok(outcome);
    }
    Run::open(recipe, registries, options, folder, until)?.train()
}

/// A run under way.
struct Run<'a> {
    recipe: &'a Recipe,
    options: &'a Options,
    folder: PathBuf,
    /// Released when the run ends.
    _lock: Lock,
    /// The step after which it is interrupted.
    until: u64,
    task: Task,
    optimizers: Optimizers,
    metrics: Metrics,
    state: State,
    /// The split that chooses, and the metric it chooses by.
    select: Option<Split>,
    metric: &'static str,
    progress: Progress,
    epochs: u64,
    steps: u64,
}

impl<'a> Run<'a> {
    fn open(
        recipe: &'a Recipe,
        registries: &Registries,
        options: &'a Options,
        folder: PathBuf,
        until: u64,
    ) -> Result<Self, RunError> {
        let lock = Lock::early(&folder)?;
        let opened = crate::device::open(recipe.device).map_err(|e| recipe.error_at("device", e))?;
        if let Some(choice) = opened.choice.filter(|_| options.show != Show::Quiet) {
            eprintln!("{}: {choice}", recipe.name);
        }
        let device = opened.device;
        if recipe.train.average != Average::None {
            return Err(recipe
                .error_at("train.average", "this version of taper does not average weights")
                .into());
        }
        let mut task = Task::new(recipe, registries, &options.search, &device)?;
        let mut optimizers = Optimizers::new(recipe, registries, task.params.trainable())?;
        if let Some(file) = &recipe.train.init_from {
            task.params
                .load(Path::new(file))
                .map_err(|e| recipe.error_at("train.init_from", e.to_string()))?;
        }
        let metric = match recipe.train.metric {
            Some(Metric::Accuracy) if !task.is_classification() => {
                return Err(recipe
                    .error_at("train.metric", "text has no accuracy: perplexity or loss")
                    .into());
            }
            Some(Metric::Accuracy) => "accuracy",
            Some(Metric::Loss) => "loss",
            Some(Metric::Perplexity) => "perplexity",
            None if task.is_classification() => "accuracy",
            None => "perplexity",
        };
        let select = match recipe.train.select {
            Select::Last => None,
            Select::Test => Some(Split::Test),
            Select::Val if task.has(Split::Val) => Some(Split::Val),
            Select::Val => {
                let message = "there is no validation set: set `data.val`, for example to 0.1";
                return Err(recipe.error_at("train.select", message).into());
            }
        };

        fs::create_dir_all(&folder).map_err(RunError::io(&folder))?;
        let lock = lock.map_or_else(|| Lock::acquire(&folder), Ok)?;
        files::remove_strays(&folder)?;
        files::replace(&folder.join("recipe.yaml"), recipe.to_yaml().as_bytes())?;
        files::replace(&folder.join("manifest.json"), &manifest(recipe, &task, &device))?;
        checkpoint::recover(&folder)?;
        let warn = |warning| eprintln!("{}: {warning}", recipe.name);
        let loaded = checkpoint::newest(&folder, recipe.id(), warn)?;
        let mut state = State { recipe: recipe.id().to_owned(), ..State::default() };
        if let Some(loaded) = loaded {
            let bytes = loaded.files.get("model.safetensors").map_or(&[][..], Vec::as_slice);
            let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
            let (carried, weights): (BTreeMap<_, _>, BTreeMap<_, _>) =
                tensors.into_iter().partition(|(name, _)| name.starts_with(CARRY));
            task.params.set(&weights.into_iter().collect())?;
            let carried: Vec<(String, Tensor)> =
                carried.into_iter().map(|(name, t)| (name[CARRY.len()..].to_owned(), t)).collect();
            task.model.set_carry(&carried)?;
            optimizers.load(&loaded.files)?;
            if let Some(plateau) = loaded.state.plateau {
                optimizers.set_plateau(plateau);
            }
            state = loaded.state;
        }
        let metrics = Metrics::open(&folder, state.metrics_bytes)?;

        let per_epoch = task.batches(0).div_ceil(recipe.train.accumulate).max(1);
        let (epochs, steps) = match (recipe.train.epochs, recipe.train.steps) {
            (Some(epochs), _) => (epochs, epochs.saturating_mul(per_epoch)),
            (None, Some(steps)) => (steps.div_ceil(per_epoch), steps),
            // The recipe's check asks for one of the two.
            (None, None) => (0, 0),
        };
        let steps = recipe.train.budget.steps.map_or(steps, |budget| steps.min(budget));
        let progress = Progress::new(&recipe.name, steps, state.step, options.show);
        Ok(Self {
            recipe,
            options,
            folder,
            _lock: lock,
            until,
            task,
            optimizers,
            metrics,
            state,
            select,
            metric,
            progress,
            epochs,
            steps,
        })
    }

    /// The loop.
    fn train(mut self) -> Result<Outcome, RunError> {
        let started = Instant::now();
        let result = self.epochs();
        self.progress.finish();
        let status = match result {
            Ok(status) => status,
            Err(RunError::Diverged { what, step }) => {
                self.write_timing(&started)?;
                let summary = self.write_summary(Status::Diverged, Some(what.clone()))?;
                return match self.recipe.train.on_divergence {
                    OnDivergence::Stop => Err(RunError::Diverged { what, step }),
                    OnDivergence::Record => Ok(self.outcome(summary)),
                };
            }
            Err(e) => return Err(e),
        };
        self.write_timing(&started)?;
        let summary = self.write_summary(status, None)?;
        match status {
            Status::Interrupted => Err(RunError::Interrupted { step: self.state.step }),
            _ => Ok(self.outcome(summary)),
        }
    }

    fn outcome(self, summary: Summary) -> Outcome {
        let seconds = folder::seconds(&self.folder);
        Outcome { folder: self.folder, summary, records: self.metrics.records, seconds }
    }

    fn epochs(&mut self) -> Result<Status, RunError> {
        let started = Instant::now();
        let train = &self.recipe.train;
        while self.state.epoch < self.epochs && self.state.step < self.steps {
            // Before an epoch, not after the last: a run that was killed in between stops here too.
            let stale = |stop: &EarlyStop| self.state.batch == 0 && self.state.stale >= stop.patience;
            if train.early_stop.as_ref().is_some_and(stale) {
                self.progress
                    .line(&format!("no improvement for {} evaluations: stopping early", self.state.stale));
                break;
            }
            if self.state.batch == 0 {
                self.task.start_epoch()?;
            }
            let mut accumulator = Accumulator::new(self.optimizers.vars.clone());
            let mut gathered = 0;
            let mut batches = self.task.epoch(self.state.epoch, self.state.batch).peekable();
            while let Some(batch) = batches.next() {
                let batch = batch?;
                let time = Time {
                    step: self.state.step,
                    steps: self.steps,
                    epoch: self.state.epoch,
                    epochs: self.epochs,
                };
                let (loss, correct) = self.task.loss(&batch, self.state.step)?;
                let total = scalar(&loss.total)?;
                let raw = scalar(&loss.nll)?;
                if !total.is_finite() {
                    let what = format!("the loss is {total}");
                    return Err(RunError::Diverged { what, step: self.state.step + 1 });
                }
                let for_scale = match train.loss_for_scale {
                    LossForScale::Total => total,
                    LossForScale::Raw => raw,
                };
                let mut grads = taper_models::backward(&loss.total)?;
                drop(loss);
                let sums = &mut self.state.sums;
                sums.loss += raw * batch.samples as f64;
                sums.correct += correct.unwrap_or(0);
                sums.samples += batch.samples;
                self.state.batch += 1;

                let mut scale_loss = for_scale;
                if train.accumulate > 1 {
                    accumulator.add(&grads, for_scale, batch.samples as f64)?;
                    gathered += 1;
                    if gathered < train.accumulate && batches.peek().is_some() {
                        continue;
                    }
                    gathered = 0;
                    // Something was added just now.
                    if let Some((mean, loss)) = accumulator.take()? {
                        (grads, scale_loss) = (mean, loss);
                    }
                }
                let norm = global_norm(&grads, &self.optimizers.vars)?;
                if !norm.is_finite() {
                    let what = format!("the norm of the gradient is {norm}");
                    return Err(RunError::Diverged { what, step: self.state.step + 1 });
                }
                let epoch_ends = batches.peek().is_none();
                let mut context = StepContext::new().loss(scale_loss).probe(train.probe && epoch_ends);
                if let Some(max) = train.clip_norm {
                    context = context.clip_norm(norm, max);
                }
                if let Some(limit) = train.clip_value {
                    context = context.clip_value(limit);
                }
                let rate_scale = if train.scale_lr_by_length { batch.rate_scale } else { 1.0 };
                self.optimizers.step(&grads, context, &time, rate_scale).map_err(|e| self.place(e))?;
                self.state.step += 1;

                let (step, epoch) = (self.state.step, self.state.epoch + 1);
                let (epochs, lr) = (self.epochs, self.optimizers.lr(&time));
                self.progress
                    .step(step, self.steps, || format!("epoch {epoch}/{epochs}  loss {raw:.4}  lr {lr:.3e}"));
                if train.log_every > 0 && step.is_multiple_of(train.log_every) {
                    let values = [("loss", raw), ("lr", lr), ("grad_norm", norm)];
                    self.record(Split::Train, epoch, values)?;
                }
                let due = train.steps.and(train.eval_every).is_some_and(|every| step.is_multiple_of(every));
                if due && step < self.steps {
                    self.evaluate(epoch)?;
                }
                if train.checkpoint.every_steps.is_some_and(|every| step.is_multiple_of(every)) && !epoch_ends
                {
                    self.checkpoint()?;
                }
                let late = train.budget.seconds.is_some_and(|limit| started.elapsed().as_secs_f64() > limit);
                let asked = self.options.stop.load(Ordering::Relaxed) || step >= self.until;
                if (asked || late) && !epoch_ends {
                    self.checkpoint()?;
                    return Ok(Status::Interrupted);
                }
                if step >= self.steps {
                    break;
                }
            }
            drop(batches);
            self.end_epoch()?;
            let done = self.state.epoch >= self.epochs || self.state.step >= self.steps;
            let late = train.budget.seconds.is_some_and(|limit| started.elapsed().as_secs_f64() > limit);
            let asked = self.options.stop.load(Ordering::Relaxed) || self.state.step >= self.until;
            if !done && (asked || late) {
                self.checkpoint()?;
                return Ok(Status::Interrupted);
            }
        }
        self.checkpoint()?;
        Ok(Status::Finished)
    }

    /// The measurements and the checkpoint after an epoch.
    fn end_epoch(&mut self) -> Result<(), RunError> {
        let train = &self.recipe.train;
        let time =
            Time { step: self.state.step, steps: self.steps, epoch: self.state.epoch, epochs: self.epochs };
        let lr = self.optimizers.lr(&time);
        let Sums { loss, correct, samples } = std::mem::take(&mut self.state.sums);
        self.state.epoch += 1;
        self.state.batch = 0;
        let epoch = self.state.epoch;
        let mean = loss / samples as f64;
        let mut values = vec![("loss", mean), ("lr", lr)];
        match self.task.is_classification() {
            true => values.push(("accuracy", correct as f64 / samples as f64)),
            false => values.push(("perplexity", mean.exp())),
        }
        self.record(Split::Train, epoch, values)?;
        if train.probe {
            self.record_probe(epoch)?;
        }
        let last = epoch >= self.epochs || self.state.step >= self.steps;
        let due = match (train.steps, train.eval_every) {
            (None, Some(every)) => epoch.is_multiple_of(every),
            // Counted in steps, evaluations come inside the epoch.
            (Some(_), Some(_)) => false,
            (_, None) => true,
        };
        if last || due {
            self.evaluate(epoch)?;
        }
        let measured: Vec<String> = [Split::Val, Split::Test]
            .iter()
            .filter_map(|split| {
                let record = self.metrics.records.iter().rev().find(|r| r.split == *split)?;
                let value = record.values.get(self.metric)?;
                Some(match self.metric {
                    "accuracy" => format!("{} accuracy {:.2} %", split.name(), 100.0 * value),
                    metric => format!("{} {metric} {value:.4}", split.name()),
                })
            })
            .collect();
        let epochs = self.epochs;
        self.progress.line(&format!("epoch {epoch}/{epochs}  train loss {mean:.4}  {}", measured.join("  ")));
        if train.checkpoint.every_epochs.is_some_and(|every| epoch.is_multiple_of(every)) && !last {
            self.checkpoint()?;
        }
        Ok(())
    }

    fn record<'v>(
        &mut self,
        split: Split,
        epoch: u64,
        values: impl IntoIterator<Item = (&'v str, f64)>,
    ) -> Result<(), RunError> {
        let values = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.metrics.add(Record { step: self.state.step, epoch, split, values })
    }

    /// The optimizer's statistics over all parameters.
    fn record_probe(&mut self, epoch: u64) -> Result<(), RunError> {
        let Some(probe) = self.optimizers.main().probe() else { return Ok(()) };
        let mut values: BTreeMap<String, f64> = BTreeMap::new();
        for param in &probe.params {
            values.insert(format!("update_ratio/{}", param.name), param.update_ratio);
            for (name, value) in &param.numbers {
                values.insert((*name).to_owned(), *value);
            }
            if let Some((name, d)) = &param.observed {
                let quantiles = ["p01", "p25", "p50", "p75", "p99"].into_iter().zip(d.quantiles);
                let moments =
                    [("min", d.min), ("mean", d.mean), ("max", d.max), ("negative", d.negative as f64)];
                for (which, value) in moments.into_iter().chain(quantiles) {
                    values.insert(format!("{name}_{which}/{}", param.name), value);
                }
            }
        }
        self.metrics.add(Record { step: self.state.step, epoch, split: Split::Probe, values })
    }

    /// Measures the validation and test sets and takes note of the best.
    fn evaluate(&mut self, epoch: u64) -> Result<(), RunError> {
        for split in [Split::Val, Split::Test] {
            if !self.task.has(split) {
                continue;
            }
            let evaluation = self.task.evaluate(split)?;
            let mut values = vec![("loss", evaluation.loss)];
            match evaluation.accuracy {
                Some(accuracy) => values.push(("accuracy", accuracy)),
                None => values.push(("perplexity", evaluation.loss.exp())),
            }
            let value = values.iter().find(|(name, _)| *name == self.metric).map(|(_, value)| *value);
            self.record(split, epoch, values)?;
            let watched =
                self.select.unwrap_or(if self.task.has(Split::Val) { Split::Val } else { Split::Test });
            if let (Some(value), true) = (value, split == watched) {
                self.take_note(value);
            }
        }
        Ok(())
    }

    /// The best so far, how long ago it was, and the plateau schedule's look at it.
    fn take_note(&mut self, value: f64) {
        let higher = summary::higher_is_better(self.metric);
        self.optimizers.observe(if higher { -value } else { value });
        let delta = self.recipe.train.early_stop.as_ref().map_or(0.0, |stop| stop.min_delta);
        let better = |old: f64| if higher { value > old + delta } else { value < old - delta };
        if value.is_finite() && self.state.best.is_none_or(|(old, _)| better(old)) {
            self.state.best = Some((value, self.state.step));
            self.state.stale = 0;
        } else {
            self.state.stale += 1;
        }
    }

    fn checkpoint(&mut self) -> Result<(), RunError> {
        let mut weights: BTreeMap<String, Tensor> =
            self.task.params.vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
        for (name, tensor) in self.task.model.carry() {
            weights.insert(format!("{CARRY}{name}"), tensor.contiguous()?);
        }
        let bytes = safetensors::serialize(&weights, None).map_err(candle_core::Error::wrap)?;
        let mut files = self.optimizers.save()?;
        files.insert("model.safetensors".into(), bytes);
        self.metrics.sync()?;
        (self.state.metrics_bytes, self.state.metrics_sha256) = self.metrics.vouch();
        self.state.plateau = Some(self.optimizers.plateau());
        checkpoint::write(&self.folder, &self.state, &files)?;
        let keep = usize::try_from(self.recipe.train.checkpoint.keep).unwrap_or(usize::MAX).max(1);
        checkpoint::prune(&self.folder, self.state.step, keep, self.state.best.map(|(_, step)| step))
    }

    fn write_summary(&self, status: Status, reason: Option<String>) -> Result<Summary, RunError> {
        let (last, best) = summary::extremes(&self.metrics.records);
        let chosen = match (self.select, self.state.best) {
            (Some(_), Some((_, step))) => Some(step),
            _ => self.metrics.records.iter().rev().find(|r| r.split == Split::Test).map(|r| r.step),
        };
        let at_choice = self.metrics.records.iter().filter(|r| Some(r.step) == chosen);
        let selected = at_choice
            .filter(|r| matches!(r.split, Split::Val | Split::Test))
            .flat_map(|r| r.values.iter().map(|(k, v)| (format!("{}.{k}", r.split.name()), *v)))
            .collect();
        let summary = Summary {
            id: self.recipe.id().to_owned(),
            name: self.recipe.name.clone(),
            status,
            steps: self.state.step,
            epochs: self.state.epoch,
            select: self.select.map_or("last", Split::name).to_owned(),
            metric: self.metric.to_owned(),
            last,
            best,
            selected,
            reason,
            sha256: String::new(),
        };
        let path = self.folder.join("summary.json");
        let (summary, json) =
            summary.seal().map_err(|e| RunError::Damaged { path: path.clone(), message: e.to_string() })?;
        files::replace(&path, &json)?;
        Ok(summary)
    }

    /// One line for this session of the run.
    fn write_timing(&self, started: &Instant) -> Result<(), RunError> {
        let path = self.folder.join("timing.jsonl");
        let seconds = started.elapsed().as_secs_f64();
        let line = json!({
            "step": self.state.step,
            "epoch": self.state.epoch,
            "seconds": seconds,
            "threads": rayon::current_num_threads(),
            "peak_mb": peak_megabytes(),
        });
        let mut options = fs::OpenOptions::new();
        let mut file = options.append(true).create(true).open(&path).map_err(RunError::io(&path))?;
        writeln!(file, "{line}").map_err(RunError::io(&path))
    }

    /// Points at the recipe where the optimizer's refusal came from it.
    fn place(&self, error: RunError) -> RunError {
        match error {
            RunError::Optimizer(e @ taper_optim::Error::Loss { .. }) => {
                self.recipe.error_at("optimizer.c", e.to_string()).into()
            }
            error => error,
        }
    }
}

/// What the model carries between batches is saved beside the weights under this prefix.
const CARRY: &str = "carry/";

fn manifest(recipe: &Recipe, task: &Task, device: &Device) -> Vec<u8> {
    let manifest = json!({
        "recipe": recipe.id(),
        "taper": env!("CARGO_PKG_VERSION"),
        "features": features(),
        "device": format!("{:?}", device.location()).to_lowercase(),
        "cpu_features": cpu_features(),
        "threads": rayon::current_num_threads(),
        "parameters": task.params.count(),
        "data": task.provenance,
    });
    let mut bytes = manifest.to_string().into_bytes();
    if let Ok(pretty) = serde_json::to_vec_pretty(&manifest) {
        bytes = pretty;
    }
    bytes.push(b'\n');
    bytes
}

/// The features of this build that are off by default.
fn features() -> Vec<&'static str> {
    let all = [
        ("hub", cfg!(feature = "hub")),
        ("cuda", cfg!(feature = "cuda")),
        ("cudnn", cfg!(feature = "cudnn")),
        ("metal", cfg!(feature = "metal")),
        ("nccl", cfg!(feature = "nccl")),
    ];
    all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name).collect()
}

/// The instruction sets that decide which kernels ran: results are equal bit for bit where these are.
fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let found = [
            ("avx2", is_x86_feature_detected!("avx2")),
            ("fma", is_x86_feature_detected!("fma")),
            ("avx512f", is_x86_feature_detected!("avx512f")),
        ];
        found.into_iter().filter(|(_, has)| *has).map(|(name, _)| name).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    Vec::new()
}

/// The largest resident size of this process so far, where the system tells it.
pub(crate) fn peak_megabytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb / 1024)
}
