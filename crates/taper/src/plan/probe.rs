//! A few steps and evaluated batches of the real thing, in a folder of its own that goes afterwards.
use super::stand_in::StandIn;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use taper_data::{Data, SplitSize};
use taper_train::recipe::{Holdout, Task, When};
use taper_train::run::{self, Inspection, Options, RunError, Show, Watch};
use taper_train::{Recipe, Registries};

/// What a few steps took, and what a whole run will take by them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Steps measured; those before are warm-up.
    pub steps: usize,
    /// Median seconds of a step.
    pub step_seconds: f64,
    /// Batches of evaluation measured.
    pub evaluation_batches: usize,
    /// Samples, or tokens, of one evaluation.
    pub evaluation_samples: usize,
    /// Seconds of one evaluation of the validation and test sets, by these batches.
    pub evaluation_seconds: f64,
    /// Seconds of a whole run: its steps and its evaluations.
    pub run_seconds: f64,
    /// Bytes of one checkpoint.
    pub checkpoint_bytes: u64,
    /// Bytes a whole run leaves on disk.
    pub run_bytes: u64,
    /// Largest resident size in MB so far.
    pub peak_mb: Option<u64>,
}

/// The first steps find caches cold and buffers missing.
const WARM_UP: usize = 2;
const STEPS: usize = 20;
const SECONDS: Duration = Duration::from_secs(4);

/// The same for evaluation.
const EVALUATED: usize = 8;
const EVALUATION_SECONDS: Duration = Duration::from_secs(2);
/// Images of a batch below which a batch is mostly overhead.
const LEAST: usize = 64;

/// Trains until enough steps were seen, and looks at what that left.
pub(super) fn probe(
    recipe: &Recipe,
    stand_in: Option<&StandIn>,
    registries: &Registries,
    options: &Options,
    inspection: &Inspection,
) -> Result<Probe, RunError> {
    let folder = taper_files::scratch()?;
    let stop = Arc::new(AtomicBool::new(false));
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let watch = {
        let (stop, times, user) = (stop.clone(), times.clone(), options.stop.clone());
        Watch::new(move |_| {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            times.push(Instant::now());
            let slow = times.len() > 1 && times[0].elapsed() > SECONDS;
            if slow || times.len() > WARM_UP + STEPS || user.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
            }
        })
    };
    let quiet = Options { runs: folder.path().into(), show: Show::Quiet, stop, watch, ..options.clone() };
    let trained = stand_in.map_or(recipe, |stand_in| &stand_in.recipe);
    match run::run(trained, registries, &quiet) {
        // A run can be over, or have diverged, before enough was seen.
        Ok(_) | Err(RunError::Interrupted { .. } | RunError::Diverged { .. }) => {}
        Err(e) => return Err(e),
    }
    if options.stop.load(Ordering::Relaxed) {
        return Err(RunError::Interrupted { step: 0 });
    }
    let times = times.lock().unwrap_or_else(PoisonError::into_inner);
    let mut steps: Vec<f64> = times
        .windows(2)
        .skip(WARM_UP.min(times.len().saturating_sub(1) / 2))
        .map(|t| (t[1] - t[0]).as_secs_f64())
        .collect();
    steps.sort_unstable_by(f64::total_cmp);
    let step_seconds = steps.get(steps.len() / 2).copied().unwrap_or(0.0);

    let checkpoint_bytes = newest_checkpoint(&folder.path().join(trained.directory()));
    let train = &recipe.train;
    // The newest ones and the best; another exists while it is written.
    let checkpoints = (train.checkpoint.keep + 1).min(inspection.epochs.max(2));
    let evaluations = evaluations(recipe, inspection);
    let samples = match stand_in.and_then(|stand_in| stand_in.images) {
        Some((train, test)) => {
            let (train, test) = kept(recipe, train, test);
            evaluated_images(recipe, train, test)
        }
        None => evaluated(trained, registries, options)?,
    };
    let (evaluation_batches, pace) = evaluation_pace(trained, registries, options)?;
    let evaluation_seconds = samples as f64 * pace;
    // What was measured shows each image once where only the last evaluation shows it more often.
    let at_end = train.eval_augment.filter(|augment| augment.when == When::Last);
    let more = at_end.map_or(0, |augment| augment.kind.count() - 1);
    let tensors: u64 = inspection.parts.iter().map(|part| part.params.len() as u64).sum();
    // A line has about 200 bytes, a probe's 400 a tensor, and TensorBoard's file as much again.
    let lines = 400 * (inspection.epochs + 2 * evaluations)
        + if train.probe.statistics() { 800 * tensors * inspection.epochs } else { 0 }
        // A look of the microscope has about a thousand bytes a tensor.
        + train.probe.microscope().map_or(0, |look| 1000 * (tensors + 1) * (inspection.steps / look.every.max(1) + 1));
    Ok(Probe {
        steps: steps.len(),
        step_seconds,
        evaluation_batches,
        evaluation_samples: samples,
        evaluation_seconds,
        run_seconds: step_seconds * inspection.steps as f64
            + evaluation_seconds * (evaluations + more) as f64,
        checkpoint_bytes,
        run_bytes: checkpoint_bytes * checkpoints + lines,
        peak_mb: run::peak_megabytes(),
    })
}

/// How often a run evaluates.
fn evaluations(recipe: &Recipe, inspection: &Inspection) -> u64 {
    let train = &recipe.train;
    match (train.steps, train.eval_every) {
        (None, Some(every)) => inspection.epochs.div_ceil(every),
        (Some(_), Some(every)) => inspection.steps.div_ceil(every),
        (_, None) => inspection.epochs,
    }
}

/// Batches of evaluation that were measured, and the seconds a sample took in them.
fn evaluation_pace(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
) -> Result<(usize, f64), RunError> {
    let Task::Network { data, .. } = recipe.task() else { return Ok((0, 0.0)) };
    // A batch as training has them costs about as much a sample as a large one, which could take minutes; a smaller one costs
    // more.
    let mut settings = recipe.resolved().clone();
    // Streams are read side by side, however many: fewer of them would be another evaluation.
    if recipe.train.bptt.is_none() {
        settings["data"]["eval_batch_size"] = data.eval_batch_size.min(data.batch_size.max(LEAST)).into();
    }
    // JSON is YAML.
    let recipe = Recipe::parse("probe", &settings.to_string(), &[], registries)?;
    let mut times: Vec<(Instant, u64)> = Vec::new();
    let begin = run::evaluate_start(&recipe, registries, &options.search, &mut |samples| {
        times.push((Instant::now(), samples));
        let slow = times[0].0.elapsed() > EVALUATION_SECONDS;
        !slow && times.len() <= EVALUATED && !options.stop.load(Ordering::Relaxed)
    })?;
    // The first batch is warm-up, unless it is all there was time for.
    let (start, measured) = match &times[..] {
        [] => return Ok((0, 0.0)),
        [only] => (begin, std::slice::from_ref(only)),
        [first, rest @ ..] => (first.0, rest),
    };
    let samples: u64 = measured.iter().map(|(_, samples)| samples).sum();
    let seconds = measured.last().map_or(0.0, |(end, _)| (*end - start).as_secs_f64());
    Ok((measured.len(), seconds / samples.max(1) as f64))
}

/// Samples, or tokens, of an evaluation.
fn evaluated(recipe: &Recipe, registries: &Registries, options: &Options) -> Result<usize, RunError> {
    let Task::Network { data, .. } = recipe.task() else { return Ok(0) };
    let loaded =
        registries.data.get(&data.name)?.load(&Value::Object(data.config.clone()), &options.search)?;
    let loaded = data.subset.iter().fold(loaded, |loaded, subset| loaded.head(subset));
    Ok(match loaded.data {
        Data::Images { train, test } => evaluated_images(recipe, train.len(), test.len()),
        Data::Text(text) => text.valid.len() + text.test.len(),
    })
}

/// What the recipe's subset leaves of so many images to train and to test on.
pub(super) fn kept(recipe: &Recipe, train: usize, test: usize) -> (usize, usize) {
    let subset = recipe.data.as_ref().and_then(|data| data.subset).unwrap_or_default();
    (train.min(subset.train.unwrap_or(train)), test.min(subset.test.unwrap_or(test)))
}

/// The same for so many images to train and to test on.
fn evaluated_images(recipe: &Recipe, train: usize, test: usize) -> usize {
    recipe.data.as_ref().map_or(0, |data| test + held_out(data, train))
}

/// Images put aside for validation.
pub(super) fn held_out(data: &taper_train::recipe::Data, train: usize) -> usize {
    match data.val {
        None => 0,
        Some(Holdout::Count(n)) => SplitSize::Count(n).of(train),
        Some(Holdout::Fraction(part)) => SplitSize::Fraction(part).of(train),
    }
}

/// Bytes of the files of the only or last checkpoint.
fn newest_checkpoint(run: &Path) -> u64 {
    let size = |folder: PathBuf| -> u64 {
        let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
        files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum()
    };
    let all = std::fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
    all.map(|checkpoint| size(checkpoint.path())).max().unwrap_or(0)
}
