//! Opening a run: everything is built and checked, and the last checkpoint read, before the first step.
use super::average::Averaging;
use super::checkpoint::{self, Loaded, State};
use super::figure::Pending;
use super::inputs::Inputs;
use super::lock::Lock;
use super::looks::Looks;
use super::manifest::{Manifest, Stretch};
use super::metrics::{Metrics, Split};
use super::microscope::{MICROSCOPE, Microscope};
use super::optimizers::Optimizers;
use super::progress::{Progress, Show};
use super::task::{self, Task};
use super::timing::Timing;
use super::weights::{MODEL, Weights};
use super::writer::Writer;
use super::{AVERAGE, CARRY, Options, Run, RunError, extend, folder, manifest, ranks};
use crate::recipe::{Average, Metric, Select};
use crate::{Recipe, Registries};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tracing::{debug, info, warn};

impl<'a> Run<'a> {
    /// A run at its start, or where its last checkpoint left it.
    pub fn open(
        recipe: &'a Recipe,
        registries: &Registries,
        options: &'a Options,
        folder: PathBuf,
        lock: Option<Lock>,
        until: u64,
    ) -> Result<Self, RunError> {
        let device = device(recipe)?;
        let mut task = task::of(recipe, registries, &options.search, &device, &options.world)?;
        let mut optimizers = Optimizers::new(recipe, registries, task.params().trainable(), &options.world)?;
        let mut microscope = Microscope::new(recipe, &*task, &optimizers, &device)?;
        let mut average = Averaging::new(recipe.train.average.clone(), task.params());
        let weights =
            recipe.train.init_from.as_deref().map(|from| Weights::read(recipe, from)).transpose()?;
        if let Some(weights) = &weights {
            let refused = |e| recipe.error_at("train.init_from", format!("{}: {e}", weights.file.path));
            task.params().set(&weights.tensors).map_err(refused)?;
        }
        let data = task.provenance().content.clone();
        let inputs = Inputs { data, init_from: weights.map(|weights| weights.file) };
        let metric = metric(recipe, &*task)?;
        let select = select(recipe, &*task)?;
        let watched = select.or(task.has(Split::Val).then_some(Split::Val));
        if watched.is_none() {
            let refuse = |key: &str, what: &str| {
                let message = format!("{what} watches a set: give `train.select: val` (or test)");
                Err(recipe.error_at(key, message).into())
            };
            if recipe.schedule.kind == "plateau" {
                return refuse("schedule.kind", "a plateau");
            }
            if matches!(recipe.train.average, Average::Asgd { .. }) {
                return refuse("train.average.kind", "the switch to averaged SGD");
            }
        }

        let now = Stretch::now(&device, recipe.train.precision)?;
        ranks::agree(&options.world, recipe, &inputs, &now)?;
        ranks::connect(&options.world, &device)?;
        let Begun { lock, before, loaded } = match options.world.is_first() {
            true => {
                let ends_epoch = |steps| ends_epoch(recipe, steps, |epoch| task.batches(epoch));
                begin(recipe, registries, options, &folder, lock, (&inputs, &now), ends_epoch)?
            }
            false => Begun::default(),
        };
        let start = ranks::start(&options.world, &folder, loaded)?;
        let mut state = State { recipe: recipe.id().to_owned(), ..State::default() };
        if let Some(loaded) = start.loaded {
            task.params().set(&tensors(&loaded.files, MODEL)?.into_iter().collect())?;
            let carried: Vec<(String, Tensor)> = tensors(&loaded.files, CARRY)?.into_iter().collect();
            task.set_carry(&carried)?;
            average.load(loaded.state.average.clone(), tensors(&loaded.files, AVERAGE)?)?;
            if average.asgd() {
                optimizers.switch_to_averaged();
            }
            optimizers.load(&loaded.files)?;
            if let Some(microscope) = &mut microscope {
                microscope.load(&tensors(&loaded.files, MICROSCOPE)?)?;
            }
            if let Some(plateau) = loaded.state.plateau {
                optimizers.set_plateau(plateau);
            }
            state = loaded.state;
        } else {
            if recipe.train.init_from.is_none() {
                task.introduce()?;
            }
            average.begin()?;
        }
        let mut stretches = manifest::past(before.as_ref(), state.step);
        same_arithmetic(recipe, &folder, &stretches, &now, options)?;
        stretches.push(Stretch { from: state.step, ..now });
        let extends = before.and_then(|before| before.extends).filter(|_| state.step > 0);
        let mut manifest = Manifest::new(recipe, &*task, &inputs, extends, stretches, &device)?;
        let (metrics, looks) = match options.world.is_first() {
            true => {
                manifest.write(&folder)?;
                let seen = (state.probe_bytes, state.probe_sha256.as_str());
                let looks = Looks::open(&folder, seen, microscope.is_some())?;
                (Metrics::open(&folder, state.metrics_bytes)?, looks)
            }
            false => (Metrics::in_memory(&folder, &start.metrics)?, Looks::none(&folder)),
        };
        debug!("{}: kernels for {}, {} threads", recipe.name, manifest.kernels, manifest.threads);

        let (epochs, steps) = length(recipe, |epoch| task.batches(epoch));
        // What only the data's length shows: the recipe alone has told the rest.
        let told: Vec<String> = recipe.warnings().iter().map(ToString::to_string).collect();
        let late = recipe.warnings_for(epochs, steps).into_iter().map(|warning| warning.to_string());
        late.filter(|warning| !told.contains(warning))
            .for_each(|warning| warn!("{}: {}", recipe.name, warning.trim_start_matches("warning: ")));
        let show = if options.world.is_first() { options.show } else { Show::Quiet };
        let progress = Progress::new(&recipe.name, steps, state.step, show);
        let timing = Timing::new(options.world.is_first().then_some(&*folder), state.step);
        Ok(Self {
            recipe,
            options,
            folder,
            writer: Writer::default(),
            _lock: lock,
            until,
            task,
            optimizers,
            average,
            gathered: None,
            metrics,
            microscope,
            looks,
            manifest,
            state,
            pending: Pending::default(),
            seen: None,
            select,
            watched,
            metric,
            progress,
            timing,
            asked: false,
            epochs,
            steps,
        })
    }
}

/// What the first process of a run has from its folder.
#[derive(Default)]
struct Begun {
    lock: Option<Lock>,
    /// What the run, or a shorter one that it goes on from, ran with before.
    before: Option<Manifest>,
    /// The checkpoint it goes on from.
    loaded: Option<Loaded>,
}

/// Takes a run's folder, for a run with these inputs and this arithmetic.
fn begin(
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    folder: &Path,
    lock: Option<Lock>,
    (inputs, now): (&Inputs, &Stretch),
    ends_epoch: impl Fn(u64) -> bool,
) -> Result<Begun, RunError> {
    fs::create_dir_all(folder).map_err(RunError::io(folder))?;
    let lock = lock.map_or_else(|| Lock::acquire(folder, options), Ok)?;
    taper_files::remove_strays(folder)?;
    // A manifest that cannot be read has no say: a new one is written, which says what is not known.
    let before = folder::manifest(folder).ok();
    same_inputs(folder, before.as_ref(), inputs)?;
    folder::write_recipe(recipe, registries, folder)?;
    checkpoint::recover(folder)?;
    let shorter = extend::extend(folder, recipe, registries, options, inputs, now, ends_epoch)?;
    let loaded = checkpoint::newest(folder, recipe)?;
    Ok(Begun { lock: Some(lock), before: shorter.or(before), loaded })
}

/// Refuses to go on with a run on other inputs than it began with.
fn same_inputs(folder: &Path, before: Option<&Manifest>, inputs: &Inputs) -> Result<(), RunError> {
    let Some(before) = before else { return Ok(()) };
    let Some(change) = inputs.differ_from(&Inputs::from(before)) else { return Ok(()) };
    let message = format!(
        "the run began with other data or weights: {change}; put back what there was, or begin anew with --fresh, which keeps the \
         run's folder under another name"
    );
    Err(RunError::Damaged { path: folder.join("manifest.json"), message })
}

/// Refuses to go on with other kernels or on another device than the run began with, unless that is allowed.
fn same_arithmetic(
    recipe: &Recipe,
    folder: &Path,
    past: &[Stretch],
    now: &Stretch,
    options: &Options,
) -> Result<(), RunError> {
    let past = manifest::arithmetics(past);
    let Some(then) = past.iter().find(|then| **then != now.arithmetic()) else { return Ok(()) };
    let both = format!("the run began on {then}, this is {}", now.arithmetic());
    if options.allow_mixed {
        warn!("{}: {both}: the result will say that it is mixed", recipe.name);
        return Ok(());
    }
    let message = format!(
        "{both}: the rest would not have the bits that the whole run has there. Go on where it began (--isa names the \
         kernels: amx, avx512, avx2, neon, portable), begin anew with --fresh, or allow it with --allow-mixed: the result then says so"
    );
    Err(RunError::Damaged { path: folder.join("manifest.json"), message })
}

/// The tensors of a checkpoint's file; none where there is no such file.
pub(crate) fn tensors(
    files: &BTreeMap<String, Vec<u8>>,
    name: &str,
) -> Result<BTreeMap<String, Tensor>, RunError> {
    match files.get(name) {
        Some(bytes) => Ok(candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?.into_iter().collect()),
        None => Ok(BTreeMap::new()),
    }
}

/// The device of a recipe; which one `auto` found is said.
pub(crate) fn device(recipe: &Recipe) -> Result<Device, RunError> {
    let opened = crate::device::open(recipe.device).map_err(|e| recipe.error_at("device", e))?;
    if let Some(choice) = opened.choice {
        info!("{}: {choice}", recipe.name);
    }
    Ok(opened.device)
}

/// The figure of merit: the recipe's if the task knows it, else the task's own.
fn metric(recipe: &Recipe, task: &dyn Task) -> Result<&'static str, RunError> {
    let known = task.metrics();
    let wanted = match recipe.train.metric {
        None => known[0],
        Some(Metric::Accuracy) => "accuracy",
        Some(Metric::Loss) => "loss",
        Some(Metric::Perplexity) => "perplexity",
        Some(Metric::BitsPerChar) => "bits_per_char",
        Some(Metric::BitsPerByte) => "bits_per_byte",
    };
    match known.contains(&wanted) {
        true => Ok(wanted),
        false => {
            let message = format!("expected {}: there is no {wanted} to measure", known.join(" or "));
            Err(recipe.error_at("train.metric", message).into())
        }
    }
}

/// The split that chooses the best epoch.
fn select(recipe: &Recipe, task: &dyn Task) -> Result<Option<Split>, RunError> {
    let (key, split) = match recipe.train.select {
        Select::Last => return Ok(None),
        Select::Test => ("test", Split::Test),
        Select::Val => ("validation", Split::Val),
    };
    match task.has(split) {
        true => Ok(Some(split)),
        false => {
            let message = format!("there is no {key} set: set `data.val`, for example to 0.1");
            Err(recipe.error_at("train.select", message).into())
        }
    }
}

/// Whether so many steps are whole epochs.
fn ends_epoch(recipe: &Recipe, steps: u64, batches: impl Fn(u64) -> u64) -> bool {
    let steps_of = |epoch| batches(epoch).div_ceil(recipe.train.accumulate.max(1)).max(1);
    let mut covered = 0u64;
    (0..COUNTED).any(|epoch| {
        covered = covered.saturating_add(steps_of(epoch));
        covered == steps
    })
}

/// Epochs of text differ in their number of windows, so they are counted; no more of them than this.
const COUNTED: u64 = 10_000;

/// The epochs and steps of a run, for schedules and the progress bar.
pub(crate) fn length(recipe: &Recipe, batches: impl Fn(u64) -> u64) -> (u64, u64) {
    let train = &recipe.train;
    let steps_of = |epoch| batches(epoch).div_ceil(train.accumulate.max(1)).max(1);
    let (epochs, steps) = match (train.epochs, train.steps) {
        (Some(epochs), _) => {
            let counted = (0..epochs.min(COUNTED)).map(steps_of).fold(0, u64::saturating_add);
            let rest = epochs.saturating_sub(COUNTED).saturating_mul(steps_of(0));
            (epochs, counted.saturating_add(rest))
        }
        (None, Some(steps)) => {
            let (mut epochs, mut covered) = (0, 0u64);
            while covered < steps && epochs < COUNTED {
                covered = covered.saturating_add(steps_of(epochs));
                epochs += 1;
            }
            (epochs + steps.saturating_sub(covered).div_ceil(steps_of(0)), steps)
        }
        // The recipe's check asks for one of the two.
        (None, None) => (0, 0),
    };
    (epochs, train.budget.steps.map_or(steps, |budget| steps.min(budget)))
}
