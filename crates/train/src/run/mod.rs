//! A run: a pure function of its resolved recipe, from which it can be interrupted and resumed at any moment.
//!
//! ```text
//! runs/<name>-<id>/
//!   recipe.yaml      the resolved recipe; comments say where each value came from
//!   manifest.json    what it ran with, stretch by stretch: code, device, kernels, threads; its inputs by content
//!   metrics.jsonl    one line a measurement; no times
//!   probe.jsonl      what a microscope saw, if there is one; no times
//!   events.out.*     the same for TensorBoard
//!   checkpoints/     step-<n>/{model,optimizer,average,evaluation,carry,microscope}.safetensors, state.json
//!   summary.json     best and last of every metric, and how it ended; no times
//!   timing.jsonl     seconds, rates, memory: all that may differ between two equal runs
//! ```
pub(crate) mod average;
mod bulk;
pub(crate) mod checkpoint;
mod divide;
mod error;
mod evaluate;
mod extend;
mod feed;
mod figure;
pub mod folder;
mod gather;
pub(crate) mod inputs;
mod inspect;
mod locate;
pub(crate) mod lock;
pub(crate) mod looks;
pub(crate) mod manifest;
pub(crate) mod metrics;
pub(crate) mod microscope;
#[cfg(feature = "nccl")]
mod nccl;
pub(crate) mod network;
pub(crate) mod number;
pub(crate) mod open;
mod optimizers;
mod problem;
pub(crate) mod progress;
mod ranks;
mod shards;
pub(crate) mod summary;
pub(crate) mod task;
pub mod tensorboard;
mod timing;
mod watch;
pub(crate) mod weights;
mod writer;

pub use error::RunError;
pub use inspect::{Inspection, Part, inspect};
pub use lock::{AtWork, at_work};
pub use looks::{FILE as PROBE, Figures, Sight};
pub use manifest::set_revision;
pub use metrics::{Record, Split};
pub use progress::Show;
pub use ranks::check_ranks;
pub use summary::{Best, Status, Summary};
pub use watch::{Tick, Watch};

pub use evaluate::EVALUATION;
pub use inspect::evaluate_start;
pub use progress::print;
pub use taper_optim::REFERENCES;
pub use timing::peak_megabytes;

pub(crate) use folder::write_recipe;
pub(crate) use inputs::{Inputs, Look};

use crate::recipe::{LossForScale, OnDivergence};
use crate::{Recipe, Registries};
use average::Averaging;
use candle_core::Tensor;
use checkpoint::State;
use figure::{Figure, Measured, Pending};
use lock::Lock;
use looks::Looks;
use manifest::Manifest;
use metrics::{Metrics, Values};
use microscope::{MICROSCOPE, Microscope, Taken};
use optimizers::{Optimizers, Time};
use progress::Progress;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use taper_data::{Provenance, Search};
use taper_models::op_span;
use taper_optim::{Deferred, Evaluated, StepContext, global_norm_on_device};
use taper_world::World;
use task::{Gradient, Task};
use timing::Timing;
use tracing::{debug, info, warn};
use weights::{Buffers, MODEL};
use writer::Writer;

/// How to run, as opposed to what: nothing here can change a result, unless mixing is allowed, which the result then says.
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
    /// Whether to wait for another process that is at work on the same run; otherwise that is an error.
    pub wait: bool,
    /// Whether to begin anew where there is a run already; its folder is kept under another name.
    pub fresh: bool,
    /// Whether a run may go on with other kernels or on another device than it began with.
    pub allow_mixed: bool,
    /// Who is told of every step.
    pub watch: Watch,
    /// The processes that share the run.
    pub world: World,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            runs: "runs".into(),
            search: Search::from_env(None, false),
            show: Show::Auto,
            stop: Arc::default(),
            wait: false,
            fresh: false,
            allow_mixed: false,
            watch: Watch::default(),
            world: World::alone(),
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
    /// What it was trained on.
    pub data: Provenance,
    /// Seconds of training and evaluation, over all its interruptions.
    pub seconds: f64,
}

/// Trains a recipe without a sweep, or goes on with it where it was interrupted, or returns what it left when it is
/// finished.
pub fn run(recipe: &Recipe, registries: &Registries, options: &Options) -> Result<Outcome, RunError> {
    if let n @ 2.. = recipe.runs().len() {
        let message = format!("the recipe has a sweep of {n} runs: train each of `Recipe::runs`");
        return Err(recipe.error_at("sweep", message).into());
    }
    check_ranks(recipe, options.world.size())?;
    let result = run_until(recipe, registries, options, u64::MAX);
    if let Err(e) = &result {
        ranks::part(&options.world, e);
    }
    result
}

/// What a run's folder is found to hold.
enum Claim {
    /// A run that came to its end before.
    Finished(Box<Outcome>),
    /// One to be trained; locked, if the folder was there.
    Open(Option<Lock>),
}

/// [`run`], interrupted once `until` steps are taken.
pub(crate) fn run_until(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    until: u64,
) -> Result<Outcome, RunError> {
    let folder = options.runs.join(recipe.directory());
    let claim = match options.world.is_first() {
        true => claim(recipe, registries, options, &folder)?,
        false => Claim::Open(None),
    };
    match ranks::claimed(&options.world, &folder, claim)? {
        Claim::Finished(outcome) => answer(recipe, *outcome),
        Claim::Open(lock) => Run::open(recipe, registries, options, folder, lock, until)?.train(),
    }
}

/// Looks at a run's folder, and takes it if there is something to do.
fn claim(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    folder: &Path,
) -> Result<Claim, RunError> {
    if options.fresh {
        set_aside(recipe, folder, options, "is kept as")?;
    } else if let Some(outcome) = finished(recipe, registries, options, folder)? {
        return Ok(Claim::Finished(Box::new(outcome)));
    }
    let lock = Lock::early(folder, options)?;
    // While this one waited, another process may have finished it.
    if lock.is_some()
        && let Some((outcome, _)) = folder::finished(folder, recipe)?
    {
        return Ok(Claim::Finished(Box::new(outcome)));
    }
    Ok(Claim::Open(lock))
}

/// Puts the folder of an earlier run out of the way, if there is one.
fn set_aside(recipe: &Recipe, folder: &Path, options: &Options, why: &str) -> Result<(), RunError> {
    // Nobody is at work on it while it is renamed; the lock goes with it.
    let Some(_lock) = Lock::early(folder, options)? else { return Ok(()) };
    let aside = folder::set_aside(folder)?;
    warn!("{}: the run before {why} {}", recipe.name, aside.display());
    Ok(())
}

impl Recipe {
    /// Trains it with what comes with Taper, into the folder `runs`. [`run`](fn@run) says how and with what.
    pub fn run(&self) -> Result<Outcome, RunError> {
        run(self, &Registries::default(), &Options::default())
    }
}

/// The outcome of a run that came to its end before, with the inputs that there are now.
fn finished(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    folder: &Path,
) -> Result<Option<Outcome>, RunError> {
    let Some((outcome, before)) = folder::finished(folder, recipe)? else { return Ok(None) };
    if let Some(change) = Look::new(registries, &options.search).change(recipe, &before) {
        let why = format!("had other inputs ({change}): training anew; its folder is kept as");
        set_aside(recipe, folder, options, &why)?;
        return Ok(None);
    }
    for step in checkpoint::steps(folder)?.into_iter().filter(|step| *step != outcome.summary.steps) {
        if let Err(e) = checkpoint::read(&checkpoint::path(folder, step)) {
            warn!("{}: a checkpoint from before its end is damaged, its result is not: {e}", recipe.name);
        }
    }
    Ok(Some(outcome))
}

/// What a run that came to its end before is worth now.
fn answer(recipe: &Recipe, outcome: Outcome) -> Result<Outcome, RunError> {
    let Summary { status, steps, reason, .. } = &outcome.summary;
    if *status == Status::Diverged && recipe.train.on_divergence == OnDivergence::Stop {
        // It would diverge again: a run is a function of its recipe.
        return Err(RunError::Diverged { what: reason.clone().unwrap_or_default(), step: steps + 1 });
    }
    info!("{}: finished before, nothing to do", recipe.name);
    Ok(outcome)
}

/// A run under way.
struct Run<'a> {
    recipe: &'a Recipe,
    options: &'a Options,
    folder: PathBuf,
    /// Writes checkpoints meanwhile; before the lock, which is released after the last write.
    writer: Writer,
    /// Released when the run ends; the first process has it.
    _lock: Option<Lock>,
    /// The step after which it is interrupted.
    until: u64,
    task: Box<dyn Task>,
    optimizers: Optimizers,
    average: Averaging,
    /// The batch statistics that go with the evaluation weights of a step.
    gathered: Option<(u64, Buffers)>,
    metrics: Metrics,
    /// What looks at steps, if the recipe asks for it, and where it writes.
    microscope: Option<Microscope>,
    looks: Looks,
    manifest: Manifest,
    state: State,
    /// What a GPU has not told yet.
    pending: Pending,
    /// The last loss that is known.
    seen: Option<f64>,
    /// The split that chooses the best epoch.
    select: Option<Split>,
    /// The split that plateaus, early stops, averaged SGD and the best checkpoint go by: never the test set unless it
    /// is to choose.
    watched: Option<Split>,
    /// The figure of merit.
    metric: &'static str,
    progress: Progress,
    timing: Timing,
    /// Whether the user asked for an interruption.
    asked: bool,
    epochs: u64,
    steps: u64,
}

/// What the model carries between batches: a file of its own, so that the weights are the model's and nothing else.
const CARRY: &str = "carry.safetensors";

/// The average of the weights.
pub(crate) const AVERAGE: &str = "average.safetensors";

/// The weights that evaluations use, where the optimizer has others for them than it trains.
pub(crate) const EVALUATION_WEIGHTS: &str = "evaluation.safetensors";

/// All parameters and buffers as they are.
fn tensors_of(task: &dyn Task) -> BTreeMap<String, Tensor> {
    task.params().vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect()
}

impl Run<'_> {
    /// Trains to the end, and writes down how it ended.
    fn train(mut self) -> Result<Outcome, RunError> {
        let result = self.epochs();
        let written = self.writer.finish();
        self.progress.finish();
        let (status, failure) = match result {
            Ok(status) => (status, None),
            Err(e @ RunError::Diverged { .. }) => (Status::Diverged, Some(e)),
            Err(e) => return Err(e),
        };
        written?;
        self.timing.finish(self.state.epoch + 1, self.state.step)?;
        self.metrics.sync()?;
        self.looks.sync()?;
        let world = &self.options.world;
        let summary = ranks::told(world, || self.seal(status, failure.as_ref()))?;
        if let Some(failure) = failure
            && self.recipe.train.on_divergence == OnDivergence::Stop
        {
            return Err(failure);
        }
        if status == Status::Interrupted && self.asked {
            return Err(RunError::Interrupted { step: self.state.step });
        }
        let (data, seconds) = (self.task.provenance().clone(), timing::total(&self.folder));
        Ok(Outcome { folder: self.folder, summary, records: self.metrics.records, data, seconds })
    }

    /// The loop.
    fn epochs(&mut self) -> Result<Status, RunError> {
        let checkpoints = &self.recipe.train.checkpoint;
        while !self.done() {
            let State { epoch, batch, .. } = self.state;
            debug!("{}: epoch {} from batch {batch} on, lr {:e}", self.recipe.name, epoch + 1, self.lr());
            self.task.go_to(epoch, batch)?;
            let mut best = false;
            while let Some(mut gradient) = self.gather()? {
                self.optimizers.hold(&mut gradient.grads, self.state.step);
                self.update(&gradient)?;
                best = self.evaluates_after(self.state.step) && self.evaluate()?;
                // Nothing is saved between the last step and what the end of its epoch has to say.
                if gradient.last || self.done() {
                    break;
                }
                if self.pause(best || is_due(checkpoints.every_steps, self.state.step))? {
                    return Ok(Status::Interrupted);
                }
            }
            best |= self.end_epoch()?;
            if self.done() {
                break;
            }
            let due = is_due(checkpoints.every_epochs, self.state.epoch)
                || is_due(checkpoints.every_steps, self.state.step);
            if self.pause(best || due)? {
                return Ok(Status::Interrupted);
            }
        }
        self.checkpoint()?;
        Ok(Status::Finished)
    }

    /// Between two steps: a checkpoint if one is due, or if the run is to stop here, which is returned.
    fn pause(&mut self, due: bool) -> Result<bool, RunError> {
        self.writer.look()?;
        let stop = self.must_stop()?;
        if stop || due {
            self.checkpoint()?;
        }
        Ok(stop)
    }

    fn done(&self) -> bool {
        self.over(self.state.epoch)
    }

    /// Whether all is done after so many epochs: the epochs or steps, or the hope of an improvement.
    fn over(&self, epochs: u64) -> bool {
        let train = &self.recipe.train;
        let limits = [train.steps, train.budget.steps];
        train.epochs.is_some_and(|all| epochs >= all)
            || limits.into_iter().flatten().any(|limit| self.state.step >= limit)
            || train.early_stop.as_ref().is_some_and(|stop| self.state.stale >= stop.patience)
    }

    /// Whether an evaluation comes after a step within an epoch: where they are counted in steps. At the end there is one
    /// anyway.
    fn evaluates_after(&self, step: u64) -> bool {
        let train = &self.recipe.train;
        train.steps.is_some() && is_due(train.eval_every, step) && step < self.steps
    }

    /// Whether the user, of any process, or the time, of the first, asks for an interruption: all processes hear the same.
    fn must_stop(&mut self) -> Result<bool, RunError> {
        const ASKED: u8 = 1;
        const LATE: u8 = 2;
        let asked = self.options.stop.load(Ordering::Relaxed) || self.state.step >= self.until;
        let limit = self.recipe.train.budget.seconds.filter(|_| self.options.world.is_first());
        let late = limit.is_some_and(|limit| self.timing.seconds() > limit);
        let said = self.options.world.or((ASKED * u8::from(asked)) | (LATE * u8::from(late)))?;
        self.asked = said & ASKED != 0;
        Ok(said != 0)
    }

    /// Takes note of what was measured on the way to the next step: at once if it is known.
    fn measure(&mut self, measured: Measured<Figure>) -> Result<(), RunError> {
        let (Measured::Batch { total: first, .. } | Measured::Norm(first)) = &measured;
        let known = first.known().is_some();
        self.pending.add(self.state.step + 1, measured);
        if known { self.settle() } else { Ok(()) }
    }

    /// Looks at all that was measured: the sums of the epoch, and whether a loss or a gradient is not finite. Waits for a
    /// GPU, which has taken no step since one that it refused.
    fn settle(&mut self) -> Result<(), RunError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        for (step, measured) in self.pending.take()? {
            let (what, value) = match measured {
                Measured::Batch { total, .. } => ("the loss", total),
                Measured::Norm(norm) => ("the norm of the gradient", norm),
            };
            if !value.is_finite() {
                // The steps after it are as if they had not been taken.
                self.state.step = step - 1;
                return Err(RunError::Diverged { what: format!("{what} is {value}"), step });
            }
            if let Measured::Batch { raw, correct, samples, .. } = measured {
                self.state.sums.add(raw, correct, samples);
                self.seen = Some(raw);
            }
        }
        self.optimizers.settle().map_err(|e| self.place(e))
    }

    /// One step of the optimizers.
    fn update(&mut self, batch: &Gradient) -> Result<(), RunError> {
        let _span = op_span!("step", "update", 0);
        let train = &self.recipe.train;
        let norm = Figure::of(&global_norm_on_device(&batch.grads, &self.optimizers.vars)?)?;
        self.measure(Measured::Norm(norm.clone()))?;
        let (step, epoch) = (self.state.step + 1, self.state.epoch + 1);
        let probe =
            train.probe.statistics() && (batch.last || self.evaluates_after(step) || step == self.steps);
        let loss = match train.loss_for_scale {
            LossForScale::Total => &batch.total,
            LossForScale::Raw => &batch.raw,
        };
        // Finite, because its norm is: `measure` has looked, or the device will.
        let (mut context, mut deferred) = (StepContext::new().finite().probe(probe), Deferred::default());
        match loss {
            Figure::Known(loss) => context = context.loss(*loss),
            Figure::Coming(loss) => deferred = deferred.loss(loss),
        }
        match (&norm, train.clip_norm) {
            (Figure::Known(_), None) => {}
            (Figure::Known(norm), Some(max)) => context = context.clip_norm(*norm, max),
            // Also where nothing is clipped: the GPU takes no step with a gradient that is not finite.
            (Figure::Coming(norm), max) => deferred = deferred.clip_norm(norm, max.unwrap_or(f64::INFINITY)),
        }
        if let Some(limit) = train.clip_value {
            context = context.clip_value(limit);
        }
        let time = self.time(self.state.step);
        let scheduled = self.average.schedule(self.optimizers.factor(&time));
        let rate_scale = if train.scale_lr_by_length { batch.rate_scale } else { 1.0 };
        let factor = self.average.factor(scheduled * rate_scale, self.optimizers.lr());
        let halves = match &mut self.microscope {
            Some(microscope) => microscope.before(&mut *self.task, &self.optimizers.vars, batch, step)?,
            None => None,
        };
        let optimizer = op_span!("optimizer", "update", 0);
        let (task, vars, mut failure) = (&mut *self.task, self.optimizers.vars.clone(), None);
        let (held, taken) = (self.optimizers.held.clone(), self.state.step);
        let mut again = || {
            let second = gather::again(task, &vars, batch, step).and_then(|mut second| {
                held.remove_from(&mut second.grads, taken);
                let loss = match train.loss_for_scale {
                    LossForScale::Total => second.total,
                    LossForScale::Raw => second.raw,
                };
                Ok(Evaluated { loss: Some(loss.read()?), grads: second.grads })
            });
            second.map_err(|e| candle_core::Error::msg(failure.insert(e).to_string()).into())
        };
        let stepped = self.optimizers.step(
            &batch.grads,
            (context, &deferred),
            &time,
            factor,
            (train.clip_norm, &mut again),
        );
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let Err(e) = stepped {
            // What a GPU has not told yet may be the reason.
            self.settle()?;
            return Err(self.place(e));
        }
        drop(optimizer);
        let lr = self.optimizers.lr() * factor;
        let seen = self.optimizers.shifted(context);
        self.look(&Taken { batch, context: &seen, loss: context.loss, halves, lr, step, epoch })?;
        self.average.after_step(self.state.epoch, step, self.steps)?;
        self.state.step = step;

        let logs = is_due(Some(train.log_every), step);
        if logs || self.pending.is_full() || self.seen.is_none() {
            self.settle()?;
        }
        let logged = if logs { Some((batch.raw.read()?, norm.read()?)) } else { None };
        let raw = batch.raw.known().or(self.seen).unwrap_or(f64::NAN);
        let (lr, epochs) = (self.optimizers.lr() * scheduled, self.epochs);
        let (metrics, metric) = (&self.metrics, self.metric);
        self.progress.step(step, self.steps, || {
            let last = |split: Split| Some((split.name(), metric, metrics.last(split, metric)?.0));
            let measured = [Split::Test, Split::Val].into_iter().find_map(last);
            progress::Now { epoch, epochs, loss: raw, lr, measured }
        });
        self.options.watch.tick(Tick { step, steps: self.steps, epoch, epochs, loss: raw });
        if let Some((loss, norm)) = logged {
            self.record(Split::Train, vec![("loss", loss), ("lr", lr), ("grad_norm", norm)])?;
        }
        if probe && let Some(values) = self.optimizers.probed()? {
            self.metrics.add(Record { step, epoch, split: Split::Probe, values })?;
        }
        Ok(())
    }

    /// The measurements after an epoch. True when an evaluation was the best so far.
    fn end_epoch(&mut self) -> Result<bool, RunError> {
        self.settle()?;
        let train = &self.recipe.train;
        let (epoch, step) = (self.state.epoch + 1, self.state.step);
        let sums = std::mem::take(&mut self.state.sums);
        let mut values = self.task.epoch_values(&sums);
        if !values.is_empty() {
            values.push(("lr", self.lr()));
            self.record(Split::Train, values)?;
        }
        if self.average.after_epoch(self.state.epoch)? {
            debug!("{}: gathering the running statistics of the average", self.recipe.name);
            let epoch = self.state.epoch;
            self.with_average(|task| task.gather_statistics(epoch, usize::MAX))?;
        }
        // Counted in steps, evaluations come inside the epoch.
        let due = train.eval_every.is_none() || train.steps.is_none() && is_due(train.eval_every, epoch);
        let measured = self.metrics.last(Split::Test, "loss").is_some_and(|(_, at)| at == step);
        let best = (due || self.over(epoch)) && !measured && self.evaluate()?;
        self.state.epoch = epoch;
        self.state.batch = 0;

        let mut line = format!("epoch {epoch}/{}", self.epochs);
        line += &self.metrics.shown(Split::Train, "loss");
        line += &[Split::Val, Split::Test].map(|split| self.metrics.shown(split, self.metric)).concat();
        self.progress.line(&line);
        self.timing.line(epoch, step)?;
        Ok(best)
    }

    fn checkpoint(&mut self) -> Result<(), RunError> {
        self.settle()?;
        let _span = op_span!("checkpoint", "forward", 0);
        // Before there is a second copy of everything.
        self.writer.finish()?;
        let weights = tensors_of(&*self.task);
        let carry = self.task.carry()?.into_iter().map(|(name, tensor)| Ok((name, tensor.contiguous()?)));
        let carry = carry.collect::<Result<BTreeMap<String, Tensor>, RunError>>()?;
        let bytes = |tensors: &BTreeMap<String, Tensor>| {
            safetensors::serialize(tensors, None).map_err(candle_core::Error::wrap)
        };
        let evaluation = self.with_evaluation_weights(|task| Ok(bytes(&tensors_of(task))?))?;
        // All that takes all processes is done with this.
        let Some(mut files) = self.optimizers.save(&self.options.world)? else { return Ok(()) };
        files.insert(MODEL.into(), bytes(&weights)?);
        if !carry.is_empty() {
            files.insert(CARRY.into(), bytes(&carry)?);
        }
        if let Some(average) = self.average.tensors() {
            files.insert(AVERAGE.into(), bytes(&average)?);
        }
        if let Some(evaluation) = evaluation {
            files.insert(EVALUATION_WEIGHTS.into(), evaluation);
        }
        if let Some(microscope) = &self.microscope {
            files.insert(MICROSCOPE.into(), bytes(&microscope.state()?)?);
        }
        let (sync_metrics, sync_looks) = (self.metrics.flush()?, self.looks.flush()?);
        (self.state.metrics_bytes, self.state.metrics_sha256) = self.metrics.vouch();
        (self.state.probe_bytes, self.state.probe_sha256) = self.looks.vouch();
        self.state.plateau = Some(self.optimizers.plateau());
        self.state.average = self.average.state.clone();
        let keep = usize::try_from(self.recipe.train.checkpoint.keep).unwrap_or(usize::MAX).max(1);
        let (folder, state) = (self.folder.clone(), self.state.clone());
        self.writer.begin(move || {
            // It vouches for the metrics up to it, and for what was seen.
            sync_metrics()?;
            sync_looks()?;
            checkpoint::write(&folder, &state, &files)?;
            checkpoint::prune(&folder, state.step, keep, state.best.map(|(_, step)| step))
        })
    }

    /// A line of metrics in the epoch under way.
    fn record(&mut self, split: Split, values: Values) -> Result<(), RunError> {
        let values = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        self.metrics.add(Record { step: self.state.step, epoch: self.state.epoch + 1, split, values })
    }

    /// The time of the step after `step` others.
    fn time(&self, step: u64) -> Time {
        Time { step, steps: self.steps, epoch: self.state.epoch, epochs: self.epochs }
    }

    /// The schedule's factor at the last step.
    fn last_factor(&self) -> f64 {
        self.optimizers.factor(&self.time(self.state.step.saturating_sub(1)))
    }

    /// The rate of the last step, or of the first.
    fn lr(&self) -> f64 {
        self.optimizers.lr() * self.average.schedule(self.last_factor())
    }

    /// Points at the recipe where the optimizer's refusal came from it.
    fn place(&self, error: RunError) -> RunError {
        match error {
            RunError::Optimizer(
                e @ (taper_optim::Error::Loss { .. } | taper_optim::Error::Refused { .. }),
            ) => self.recipe.error_at("optimizer.c", e.to_string()).into(),
            error => error,
        }
    }
}

/// Whether something that is done every so many steps or epochs is due after `n` of them; never where it is done every 0.
fn is_due(every: Option<u64>, n: u64) -> bool {
    every.is_some_and(|every| every > 0 && n.is_multiple_of(every))
}
