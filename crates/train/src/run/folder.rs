//! A run's folder read back, changing nothing in it. Whoever reads a run reads it through here: what its seals do not vouch for
//! is an error.
//!
//! `summary.json` vouches for itself and for all that is a function of the recipe: the metrics, the events, the last
//! checkpoint unless all of them were removed. `manifest.json` vouches for itself and for what may differ between equal runs: the recipe with its comments, the
//! times. Every checkpoint vouches for itself.
use super::checkpoint;
use super::inputs::Inputs;
use super::looks::{self, Sight};
pub use super::manifest::{Host, Manifest, Stretch};
use super::metrics::Record;
use super::summary::{Status, Summary, extremes};
use super::{Outcome, RunError, timing};
use crate::recipe::{Sections, Unchecked};
use crate::{Recipe, Registries};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use taper_files::{sha256, sha256_file};

fn bytes(path: &Path) -> Result<Vec<u8>, RunError> {
    fs::read(path).map_err(RunError::io(path))
}

pub(super) fn damaged(path: &Path, message: impl Into<String>) -> RunError {
    RunError::Damaged { path: path.to_path_buf(), message: message.into() }
}

/// What to do about a damaged file of a run that came to its end.
const ADVICE: &str =
    "remove summary.json, and the run goes on from its last checkpoint, or train it again with --fresh";

/// A file that carries its own checksum: `clear` and `sum` give access to it. Sealed again, what was read must be the same bytes:
/// not even a space was changed.
pub(super) fn unseal<T: Serialize + DeserializeOwned>(
    bytes: &[u8],
    sum: impl Fn(&mut T) -> &mut String,
) -> Result<T, String> {
    let mut value: T = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let found = std::mem::take(sum(&mut value));
    let text = |value: &T| serde_json::to_vec_pretty(value).map_err(|e| e.to_string());
    let expected = sha256(&text(&value)?);
    sum(&mut value).clone_from(&expected);
    if found != expected {
        return Err(format!("sha256 was {found} when it was written, is {expected}"));
    }
    match bytes.strip_suffix(b"\n").unwrap_or(bytes) == text(&value)? {
        true => Ok(value),
        false => Err("is not as it was written".into()),
    }
}

/// The runs in a folder of runs, by name. What `--fresh` and changed inputs set aside is not among them.
pub fn runs_in(folder: &Path) -> Result<Vec<PathBuf>, RunError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(RunError::io(folder))? {
        let path = entry.map_err(RunError::io(folder))?.path();
        if path.join("recipe.yaml").is_file() && !is_aside(&path) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

const ASIDE: &str = ".before-";

fn is_aside(run: &Path) -> bool {
    run.file_name().is_some_and(|name| name.to_string_lossy().contains(ASIDE))
}

/// Renames a run's folder to one that nobody goes on with, which is returned.
pub(super) fn set_aside(run: &Path) -> Result<PathBuf, RunError> {
    let name = run.file_name().unwrap_or_default();
    for number in 1u64.. {
        let mut other = name.to_owned();
        other.push(format!("{ASIDE}{number}"));
        let other = run.with_file_name(other);
        if !other.try_exists().map_err(RunError::io(&other))? {
            fs::rename(run, &other).map_err(RunError::io(&other))?;
            taper_files::sync_folder(other.parent().unwrap_or(&other))?;
            return Ok(other);
        }
    }
    Err(damaged(run, "cannot be set aside"))
}

/// `recipe.yaml`. It is resolved, so that neither other files nor the environment have a say.
pub fn recipe(folder: &Path, sections: &dyn Sections) -> Result<Recipe, RunError> {
    let path = folder.join("recipe.yaml");
    let text = String::from_utf8(bytes(&path)?).map_err(|e| damaged(&path, e.to_string()))?;
    Ok(Recipe::parse(&path.display().to_string(), &text, &[], sections)?)
}

/// Writes `recipe.yaml`. One that holds these settings already stays: its comments say where the values came from.
pub(crate) fn write_recipe(recipe: &Recipe, registries: &Registries, folder: &Path) -> Result<(), RunError> {
    let there = || self::recipe(folder, registries).is_ok_and(|there| there.resolved() == recipe.resolved());
    if there() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(RunError::io(folder))?;
    match taper_files::replace(&folder.join("recipe.yaml"), recipe.to_yaml().as_bytes()) {
        // A sweep writes it before its worker has the lock: another may have placed it and cleared away strays meanwhile.
        Err(_) if there() => Ok(()),
        written => Ok(written?),
    }
}

/// `manifest.json`.
pub fn manifest(folder: &Path) -> Result<Manifest, RunError> {
    let path = folder.join("manifest.json");
    unseal(&bytes(&path)?, |manifest: &mut Manifest| &mut manifest.sha256).map_err(|e| damaged(&path, e))
}

/// `summary.json`, once there is one.
pub fn summary(folder: &Path) -> Result<Option<Summary>, RunError> {
    let path = folder.join("summary.json");
    let text = match fs::read(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(RunError::io(&path))?,
    };
    let advice = "remove it, and the run goes on from its last checkpoint";
    let unsealed = unseal(&text, |summary: &mut Summary| &mut summary.sha256);
    unsealed.map(Some).map_err(|e| damaged(&path, format!("{e}: {advice}")))
}

/// `metrics.jsonl`.
pub fn records(folder: &Path) -> Result<Vec<Record>, RunError> {
    Ok(lines(folder)?.into_iter().map(|(_, record)| record).collect())
}

/// `metrics.jsonl`: its lines as they stand and as records. A last line without its end is one that a crash cut off.
pub(crate) fn lines(folder: &Path) -> Result<Vec<(String, Record)>, RunError> {
    let path = folder.join("metrics.jsonl");
    let text = bytes(&path)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&text[..whole]).map_err(|e| damaged(&path, e.to_string()))?;
    let parse = |(i, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(record) => Ok((line.to_owned(), record)),
        Err(e) => Err(damaged(&path, format!("line {}: {e}", i + 1))),
    };
    text.lines().enumerate().map(parse).collect()
}

/// `probe.jsonl`: what the microscope saw, up to the first line that cannot be read; nothing where there was none. What is
/// damaged is told.
pub fn sights(folder: &Path) -> (Vec<Sight>, Option<String>) {
    let bytes = match fs::read(folder.join(looks::FILE)) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return (Vec::new(), None),
        Err(e) => return (Vec::new(), Some(format!("{}: {e}", looks::FILE))),
    };
    let text = String::from_utf8_lossy(&bytes);
    let mut sights = Vec::new();
    for (number, line) in text[..text.rfind('\n').map_or(0, |end| end + 1)].lines().enumerate() {
        match serde_json::from_str(line) {
            Ok(sight) => sights.push(sight),
            Err(e) => {
                let line = number + 1;
                return (
                    sights,
                    Some(format!("{}, line {line}: {e}: what follows is left out", looks::FILE)),
                );
            }
        }
    }
    (sights, None)
}

/// A checkpoint of a run, whole and of this run.
pub(crate) struct Found {
    /// The run's folder.
    pub run: PathBuf,
    pub recipe: Recipe,
    pub loaded: checkpoint::Loaded,
}

/// The checkpoint that a path stands for: the folder of one inside its run, or the folder of a run, whose newest it is, or its
/// best where that is asked for.
pub(crate) fn checkpoint(path: &Path, best: bool, sections: &dyn Sections) -> Result<Found, RunError> {
    let refuse = |message: &str| Err(RunError::unusable(path, message));
    if !path.try_exists().map_err(RunError::io(path))? {
        return refuse("there is no such folder");
    }
    let is_checkpoint = path.join("state.json").is_file();
    let inside =
        if is_checkpoint { path.canonicalize().map_err(RunError::io(path))? } else { PathBuf::new() };
    let run = match is_checkpoint {
        true => inside.ancestors().nth(2).unwrap_or(path),
        false => path,
    };
    if !run.join("recipe.yaml").is_file() {
        return match is_checkpoint {
            true => refuse(
                "the checkpoint is not in its run: expected RUN/checkpoints/step-<n> with RUN/recipe.yaml",
            ),
            false => {
                refuse("expected the folder of a run, which holds recipe.yaml, or of one of its checkpoints")
            }
        };
    }
    let recipe = recipe(run, sections)?;
    let metrics = bytes(&run.join("metrics.jsonl"))?;
    let load = |step: u64| {
        let loaded = checkpoint::read(&checkpoint::path(run, step))?;
        loaded.belongs_to(run, step, recipe.id(), &metrics).map(|()| loaded)
    };
    let steps = checkpoint::steps(run)?;
    let named = |step: &u64| inside.file_name() == checkpoint::path(run, *step).file_name();
    let chosen = if is_checkpoint { steps.iter().find(|step| named(step)) } else { steps.first() };
    let Some(step) = chosen else {
        let ended = summary(run)?.is_some_and(|summary| summary.status != Status::Interrupted);
        return refuse(match ended {
            true => {
                "has its results and no weights, its checkpoints were removed: `train --fresh` makes them again"
            }
            false => "has no checkpoint: train the run first (`train` goes on where it was)",
        });
    };
    let mut loaded = load(*step)?;
    if best && !is_checkpoint {
        let Some((_, step)) = loaded.state.best else {
            return refuse(
                "knows no best checkpoint: `train.select` is `last` and there is no validation set",
            );
        };
        loaded = load(step)?;
    }
    Ok(Found { run: run.to_path_buf(), recipe, loaded })
}

/// A run as far as its folder has it, for whoever looks at runs and goes on with none: finished, diverged, interrupted, under
/// way or damaged.
#[derive(Debug)]
#[non_exhaustive]
pub struct Reading {
    /// The recipe, checked against no registry: optimizers and models of other programs are read too.
    pub recipe: Recipe,
    /// The recipe's file.
    pub recipe_text: String,
    /// The measurements, up to the first that cannot be read.
    pub records: Vec<Record>,
    /// How it ended, if it did.
    pub summary: Option<Summary>,
    /// The part of the data it was given, `None` for all of it; an error where the manifest does not say.
    pub subset: Result<Option<String>, String>,
    /// What is damaged or missing, in sentences that begin with a file's name.
    pub problems: Vec<String>,
}

/// What a run is and how it ended, without its measurements and without a look at what its seals vouch for: for whoever follows
/// `metrics.jsonl` as it grows. An error only where there is no recipe to read.
pub fn about(folder: &Path) -> Result<Reading, String> {
    let recipe_text =
        fs::read_to_string(folder.join("recipe.yaml")).map_err(|e| format!("recipe.yaml: {e}"))?;
    // No registry and no environment: neither is needed to read what a run was.
    let recipe = Recipe::parse("recipe.yaml", &recipe_text, &[], &Unchecked)
        .map_err(|e| format!("recipe.yaml cannot be read: {}", e.message()))?;
    let mut problems = Vec::new();
    let summary: Option<Summary> = match fs::read(folder.join("summary.json")) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|e| problems.push(format!("summary.json: {e}"))).ok()
        }
        Err(_) => None,
    };
    if let Some(summary) = summary.as_ref().filter(|s| s.id != recipe.id()) {
        problems.push(format!("recipe.yaml is of the run {}, summary.json of {}", recipe.id(), summary.id));
    }
    let subset = subset(folder);
    Ok(Reading { recipe, recipe_text, records: Vec::new(), summary, subset, problems })
}

/// Reads a run's folder as far as it goes; an error only where there is no recipe to read.
pub fn read(folder: &Path) -> Result<Reading, String> {
    let mut reading = about(folder)?;
    let (mut problems, mut records) = (damage(folder), Vec::new());
    match fs::read(folder.join("metrics.jsonl")) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            // A run under way may be in the middle of its last line.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            for (number, line) in whole.lines().enumerate() {
                match serde_json::from_str(line) {
                    Ok(record) => records.push(record),
                    Err(e) => {
                        let line = number + 1;
                        problems.push(format!("metrics.jsonl, line {line}: {e}: what follows is left out"));
                        break;
                    }
                }
            }
        }
        Err(e) => problems.push(format!("metrics.jsonl: {e}: nothing was measured")),
    }
    problems.append(&mut reading.problems);
    Ok(Reading { records, problems, ..reading })
}

/// What the manifest says of the part of the data that was used. Of a manifest of any version, damaged elsewhere or not.
fn subset(folder: &Path) -> Result<Option<String>, String> {
    let bytes = fs::read(folder.join("manifest.json")).map_err(|e| e.to_string())?;
    let manifest: serde_json::Value = serde_json::from_slice(&bytes).map_err(|e| e.to_string())?;
    match manifest.pointer("/data/subset") {
        Some(serde_json::Value::Null) => Ok(None),
        Some(serde_json::Value::String(part)) => Ok(Some(part.clone())),
        _ => Err("no data.subset in it".into()),
    }
}

/// What is wrong with the files that a report reads, by their names in the folder; nothing where they are as they were sealed. A
/// run that has not come to its end changes its files, and is sealed in part. A file that is missing or is no JSON is for its
/// reader to report.
fn damage(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let summary = fs::read(folder.join("summary.json")).unwrap_or_default();
    if let Ok(Summary { sha256, .. }) = serde_json::from_slice(&summary) {
        if sha256.is_empty() {
            found.push(
                "summary.json: carries no checksum: nobody vouches for it nor for metrics.jsonl".into(),
            );
            return found;
        }
        match unseal(&summary, |summary: &mut Summary| &mut summary.sha256) {
            Ok(summary) if summary.status == Status::Interrupted => {}
            Ok(summary) => {
                let files = ["metrics.jsonl", looks::FILE];
                found.extend(files.into_iter().filter_map(|name| changed(folder, name, &summary.files)));
            }
            Err(e) => found.push(format!("summary.json: {e}")),
        }
    }
    if let Ok(manifest) = fs::read(folder.join("manifest.json")) {
        match unseal(&manifest, |manifest: &mut Manifest| &mut manifest.sha256) {
            Ok(manifest) => found.extend(changed(folder, "recipe.yaml", &manifest.files)),
            Err(e) => found.push(format!("manifest.json: {e}")),
        }
    }
    found
}

/// Whether a file that is there is not what was vouched for.
fn changed(folder: &Path, name: &str, files: &BTreeMap<String, String>) -> Option<String> {
    let (expected, (_, found)) = (files.get(name)?, sha256_file(&folder.join(name)).ok()?);
    (found != *expected).then(|| format!("{name}: sha256 was {expected} when the run ended, is {found}"))
}

/// All files that the summary and the manifest vouch for, against what they say. Where the folder of checkpoints is gone as a whole,
/// somebody needed the room: the result is vouched for without them.
pub(crate) fn sealed(folder: &Path, summary: &Summary, manifest: &Manifest) -> Vec<RunError> {
    let weightless = checkpoint::removed(folder);
    let asked = |name: &str| !(weightless && checkpoint::is_in_one(name));
    let files = summary.files.iter().chain(&manifest.files).filter(|(name, _)| asked(name));
    let mut found = differences(folder, files);
    for name in summary.files.keys().filter(|name| name.ends_with("/state.json") && asked(name)) {
        let checkpoint = folder.join(name);
        found.extend(checkpoint.parent().and_then(|checkpoint| checkpoint::read(checkpoint).err()));
    }
    found
}

fn differences<'a>(folder: &Path, files: impl Iterator<Item = (&'a String, &'a String)>) -> Vec<RunError> {
    let check = |(name, expected): (&String, &String)| {
        let path = folder.join(name);
        match sha256_file(&path) {
            Err(e) => Some(RunError::from(e)),
            Ok((_, found)) if found != *expected => Some(damaged(
                &path,
                format!("sha256 was {expected} when the run ended, is {found}: {ADVICE}"),
            )),
            Ok(_) => None,
        }
    };
    files.filter_map(check).collect()
}

/// The checksums of the files in a run's folder that are functions of its recipe, with the checkpoint of its `last` step.
pub(super) fn seal(folder: &Path, last: Option<u64>) -> Result<BTreeMap<String, String>, RunError> {
    let mut names = vec!["metrics.jsonl".to_owned(), super::tensorboard::FILE.to_owned()];
    let there = |name: &&str| folder.join(name).exists();
    names.extend(Some(looks::FILE).filter(there).map(str::to_owned));
    names.extend(last.map(checkpoint::state_name));
    let sum = |name: String| {
        let (_, sum) = sha256_file(&folder.join(&name))?;
        Ok((name, sum))
    };
    names.into_iter().map(sum).collect()
}

/// The outcome of a run that came to its end, `None` where it has not.
pub(crate) fn finished(folder: &Path, recipe: &Recipe) -> Result<Option<(Outcome, Inputs)>, RunError> {
    let Some(summary) = summary(folder)?.filter(|summary| summary.status != Status::Interrupted) else {
        return Ok(None);
    };
    let path = folder.join("summary.json");
    if summary.id != recipe.id() {
        let message = format!("belongs to the recipe {}, this run is {}", summary.id, recipe.id());
        return Err(damaged(&path, message));
    }
    let records = records(folder)?;
    follows(&summary, &records).map_err(|message| damaged(&path, message))?;
    let manifest = manifest(folder)?;
    if let Some(damage) = sealed(folder, &summary, &manifest).into_iter().next() {
        return Err(damage);
    }
    let (inputs, seconds) = (Inputs::from(&manifest), timing::total(folder));
    let outcome = Outcome { folder: folder.to_path_buf(), summary, records, data: manifest.data, seconds };
    Ok(Some((outcome, inputs)))
}

/// Whether the summary is the one of these records.
pub(crate) fn follows(summary: &Summary, records: &[Record]) -> Result<(), String> {
    let (last, best) = extremes(records);
    let again = Summary { last, best, ..summary.clone() };
    // As text, where NaN equals itself.
    match (serde_json::to_string(&again), serde_json::to_string(summary)) {
        (Ok(again), Ok(found)) if again == found => Ok(()),
        _ => Err("is not the summary of metrics.jsonl, one of them was changed: \
                  remove summary.json, and the run goes on from its last checkpoint"
            .into()),
    }
}
