//! A few steps of the real thing, in a folder of its own that goes afterwards.
use crate::data::Data;
use crate::recipe::{Holdout, Task};
use crate::run::{self, Inspection, Options, RunError, Show, Watch};
use crate::{Recipe, Registries};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a few steps took, and what a whole run will take by them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Probe {
    /// Steps measured; those before are warm-up.
    pub steps: usize,
    /// Median seconds of a step.
    pub step_seconds: f64,
    /// Seconds of a whole run, with evaluations at a third of a training step's price a sample.
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

/// A forward pass is a third of a training step: the backward pass takes about two of it.
const FORWARD: f64 = 1.0 / 3.0;

/// Trains until enough steps were seen, and looks at what that left.
pub(super) fn probe(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    inspection: &Inspection,
) -> Result<Probe, RunError> {
    let folder = Folder::new()?;
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
    let quiet = Options { runs: folder.0.clone(), show: Show::Quiet, stop, watch, ..options.clone() };
    match run::run(recipe, registries, &quiet) {
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

    let checkpoint_bytes = newest_checkpoint(&folder.0.join(recipe.directory()));
    let train = &recipe.train;
    // The newest ones and the best; another exists while it is written.
    let checkpoints = (train.checkpoint.keep + 1).min(inspection.epochs.max(2));
    let evaluations = evaluations(recipe, inspection);
    let evaluated = evaluated(recipe, registries, options)?;
    let tensors: u64 = inspection.parts.iter().map(|part| part.params.len() as u64).sum();
    // A line has about 200 bytes, a probe's 400 a tensor, and TensorBoard's file as much again.
    let lines = 400 * (inspection.epochs + 2 * evaluations)
        + if train.probe { 800 * tensors * inspection.epochs } else { 0 };
    Ok(Probe {
        steps: steps.len(),
        step_seconds,
        run_seconds: step_seconds * (inspection.steps as f64 + FORWARD * evaluations as f64 * evaluated),
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

/// An evaluation's work in training steps' worth of forward passes.
fn evaluated(recipe: &Recipe, registries: &Registries, options: &Options) -> Result<f64, RunError> {
    let Task::Network { data, .. } = recipe.task() else { return Ok(0.0) };
    let loaded =
        registries.data.get(&data.name)?.load(&Value::Object(data.config.clone()), &options.search)?;
    Ok(match loaded.data {
        Data::Images { train, test } => {
            let held = match data.val {
                None => 0,
                Some(Holdout::Count(n)) => n,
                Some(Holdout::Fraction(part)) => (part * train.len() as f64) as usize,
            };
            (test.len() + held) as f64 / data.batch_size as f64
        }
        // A window costs about as much with few streams as with many.
        Data::Text(text) => {
            let window = recipe.train.bptt.as_ref().map_or(1, |bptt| bptt.length) * data.eval_batch_size;
            (text.valid.len() + text.test.len()) as f64 / window as f64
        }
    })
}

/// A recipe like this one on data that is always here, and the name of that: images or words of the same shape and
/// number, whose content does not change what a step costs. `None` when no such data is known.
pub(super) fn stand_in(
    recipe: &Recipe,
    registries: &Registries,
) -> Result<Option<(Recipe, String)>, RunError> {
    let Task::Network { data, .. } = recipe.task() else { return Ok(None) };
    let coarse = data.config.get("labels").and_then(Value::as_str) == Some("coarse");
    let images = |classes: usize| json!({"classes": classes, "train": 50_000, "test": 10_000});
    let (name, config) = match data.name.as_str() {
        "fashion-mnist" => ("mnist", json!({})),
        "cifar10" => ("synthetic-images", images(10)),
        "cifar100" => ("synthetic-images", images(if coarse { 20 } else { 100 })),
        "ptb" => {
            ("synthetic-text", json!({"vocab": 10_000, "train": 929_589, "valid": 73_760, "test": 82_430}))
        }
        _ => return Ok(None),
    };
    let mut settings = recipe.resolved().clone();
    if let Some(section) = settings.get_mut("data").and_then(Value::as_object_mut) {
        data.config.keys().for_each(|key| drop(section.shift_remove(key)));
        section.insert("name".into(), name.into());
        section.extend(config.as_object().cloned().unwrap_or_default());
    }
    // JSON is YAML.
    let other = Recipe::parse("stand-in", &settings.to_string(), &[], registries)?;
    Ok(Some((other, name.to_owned())))
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

/// A temporary folder that goes with the value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, RunError> {
        let path = std::env::temp_dir().join(format!("taper-probe-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(RunError::io(&path))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A folder left in the system's temporary place does no harm.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
