//! A shorter run that has come to its end as the beginning of a longer one.
//!
//! Two runs that differ in their length alone are the same up to where the shorter one ends, unless something looks ahead: a
//! schedule that is stretched over the whole run, or the evaluation that every end brings. Where nothing does, the longer run
//! goes on from the shorter one's last checkpoint, with the bytes that it would have had from the start.
use super::inputs::Inputs;
use super::manifest::{Manifest, Stretch};
use super::summary::{Status, Summary};
use super::{Options, RunError, checkpoint, folder, looks};
use crate::recipe::{Average, Map, Train, When};
use crate::{Recipe, Registries};
use std::path::{Path, PathBuf};
use taper_optim::Schedule;
use tracing::{debug, info};

/// A run to go on from.
struct Shorter {
    folder: PathBuf,
    recipe: Recipe,
    summary: Summary,
    manifest: Manifest,
}

/// Puts the beginning of a run that has none yet into its folder, where a shorter one has it, and returns what that ran with.
/// `ends_epoch` says whether so many steps are whole epochs.
pub(super) fn extend(
    run: &Path,
    recipe: &Recipe,
    registries: &Registries,
    options: &Options,
    inputs: &Inputs,
    now: &Stretch,
    ends_epoch: impl Fn(u64) -> bool,
) -> Result<Option<Manifest>, RunError> {
    let begun = run.join("checkpoints").exists() || run.join("metrics.jsonl").exists();
    let Some(shorter) = (!begun).then(|| longest(run, recipe, registries, options)).flatten() else {
        return Ok(None);
    };
    let place = shorter.folder.display();
    let steps = shorter.summary.steps;
    let refuse = |why: String| {
        info!(
            "{}: {place} is the same run with {steps} steps, but {why}: starting from the first step",
            recipe.name
        );
        Ok(None)
    };
    if let Some(kind) = looks_ahead(recipe) {
        return refuse(format!("the {kind} schedule is stretched over the length of the run"));
    }
    if matches!(recipe.train.average, Average::Lookahead { power, .. } if power != 0.0) {
        return refuse("the share of the slow weights grows over the length of the run".into());
    }
    if recipe.train.eval_augment.is_some_and(|augment| augment.when == When::Last) {
        return refuse("its last evaluation is like no other (`train.eval_augment`)".into());
    }
    let logged = |train: &Train| (train.log_every, train.probe.clone());
    if logged(&shorter.recipe.train) != logged(&recipe.train) {
        return refuse("it has other lines of metrics (`train.log_every`, `train.probe`)".into());
    }
    if let Some(change) = inputs.differ_from(&Inputs::from(&shorter.manifest)) {
        return refuse(format!("it had other inputs ({change})"));
    }
    let other = shorter.manifest.stretches.iter().find(|stretch| stretch.arithmetic() != now.arithmetic());
    if let Some(other) = other.filter(|_| !options.allow_mixed) {
        return refuse(format!("it computed on {}, this is {}", other.arithmetic(), now.arithmetic()));
    }
    let metrics = shorter.folder.join("metrics.jsonl");
    let metrics = std::fs::read(&metrics).map_err(RunError::io(&metrics))?;
    let mut past = Vec::new();
    for step in checkpoint::steps(&shorter.folder)?.into_iter().rev() {
        if step == steps && !shorter.ends_like_an_epoch(&ends_epoch) {
            continue;
        }
        let loaded = checkpoint::read(&checkpoint::path(&shorter.folder, step));
        match loaded
            .and_then(|l| l.belongs_to(&shorter.folder, step, shorter.recipe.id(), &metrics).map(|()| l))
        {
            Ok(loaded) => past.push(loaded),
            Err(e) => debug!("{}: not gone on from: {e}", recipe.name),
        }
    }
    let Some(last) = past.last().map(|loaded| loaded.state.clone()) else {
        return refuse(
            "it has no checkpoint from before its end, where it did what a longer run does not".into(),
        );
    };
    // In this order a crash leaves the beginning of the run, or less of it.
    let stretches = super::manifest::past(Some(&shorter.manifest), last.step);
    let extends = Some(shorter.recipe.directory());
    let mut manifest = Manifest { recipe: recipe.id().to_owned(), extends, stretches, ..shorter.manifest };
    manifest.files.clear();
    manifest.write(run)?;
    let length = usize::try_from(last.metrics_bytes).unwrap_or(usize::MAX);
    taper_files::replace(&run.join("metrics.jsonl"), metrics.get(..length).unwrap_or_default())?;
    if last.probe_bytes > 0 {
        let seen = shorter.folder.join(looks::FILE);
        let seen = std::fs::read(&seen).map_err(RunError::io(&seen))?;
        let length = usize::try_from(last.probe_bytes).unwrap_or(usize::MAX);
        taper_files::replace(&run.join(looks::FILE), seen.get(..length).unwrap_or_default())?;
    }
    for mut loaded in past {
        loaded.state.recipe = recipe.id().to_owned();
        checkpoint::write(run, &loaded.state, &loaded.files)?;
    }
    info!("{}: going on after step {} of {place}, which is the same run but shorter", recipe.name, last.step);
    Ok(Some(manifest))
}

/// The longest of the finished runs that are shorter and otherwise the same.
fn longest(run: &Path, recipe: &Recipe, registries: &Registries, options: &Options) -> Option<Shorter> {
    let series = recipe.series();
    let prefix = format!("{}-", recipe.name);
    let named =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix));
    let read = |folder: PathBuf| {
        let summary = folder::summary(&folder).ok()??;
        if summary.series != series || summary.status != Status::Finished {
            return None;
        }
        let (other, manifest) = (folder::recipe(&folder, registries).ok()?, folder::manifest(&folder).ok()?);
        let shorter = match (other.train.epochs, recipe.train.epochs, other.train.steps, recipe.train.steps) {
            (Some(other), Some(own), _, _) => other < own,
            (_, _, Some(other), Some(own)) => other < own,
            _ => false,
        };
        let whole = summary.id == other.id() && folder::sealed(&folder, &summary, &manifest).is_empty();
        let whole = whole && !checkpoint::removed(&folder);
        (shorter && whole).then_some(Shorter { folder, recipe: other, summary, manifest })
    };
    let all = folder::runs_in(&options.runs).unwrap_or_default().into_iter();
    let all = all.filter(|path| path != run).filter(named).filter_map(read);
    all.max_by_key(|shorter| shorter.summary.steps)
}

impl Shorter {
    /// Whether its end is what the end of that epoch is to a longer run: the same evaluation, the same lines in the same order.
    fn ends_like_an_epoch(&self, ends_epoch: impl Fn(u64) -> bool) -> bool {
        let (train, summary) = (&self.recipe.train, &self.summary);
        match (train.epochs, train.steps) {
            // An early stop or a budget would end the longer one there too.
            (Some(epochs), _) if summary.epochs < epochs => true,
            (Some(epochs), _) => {
                train.eval_every.is_none_or(|every| every > 0 && epochs.is_multiple_of(every))
            }
            (_, Some(steps)) if summary.steps < steps => true,
            _ => train.eval_every.is_none() && ends_epoch(summary.steps),
        }
    }
}

/// The kind of a schedule that goes by the length of the whole run.
fn looks_ahead(recipe: &Recipe) -> Option<&'static str> {
    fn ahead(schedule: &Schedule) -> Option<&'static str> {
        match schedule {
            Schedule::Cosine { length: None, .. } => Some("cosine"),
            Schedule::Polynomial { length: None, .. } => Some("polynomial"),
            Schedule::Triangle { .. } => Some("triangle"),
            Schedule::Sequence { parts } => parts.last().and_then(|part| ahead(&part.schedule)),
            _ => None,
        }
    }
    let mut rate: Map = recipe.schedule.config.clone();
    rate.shift_remove("per");
    let momentum = rate.shift_remove("momentum");
    rate.insert("kind".into(), recipe.schedule.kind.as_str().into());
    let both = [Some(&rate), momentum.as_ref().and_then(|momentum| momentum.as_object())];
    // One that cannot be read was refused before.
    both.into_iter().flatten().find_map(|map| ahead(&Schedule::from_map(map).ok()?))
}
