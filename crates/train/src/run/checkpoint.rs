//! Checkpoints: whole or not there, and known to be intact.
//!
//! A checkpoint is made in a folder of its own beside `checkpoints/`, its files and that folder are synced, then it is
//! renamed into place and the folders around it are synced. `state.json` carries the SHA-256 of the other files, of the
//! metrics it vouches for, and of itself. A damaged checkpoint is skipped with a message and the one before it is used.
//!
//! `checkpoints/` itself comes into being by the rename of its first checkpoint: where it is, there was one.
use super::{RunError, average, folder, metrics};
use crate::Recipe;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use taper_files::kill::kill_point;
use taper_files::{remove_folder, sha256, sync_folder, write_synced};
use taper_optim::PlateauState;
use tracing::{debug, warn};

/// The running means of the current epoch's training line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    /// Σ loss · samples
    pub loss: f64,
    /// Right answers.
    pub correct: u64,
    /// Samples; of text the tokens that count.
    pub samples: u64,
}

impl Sums {
    /// Adds a batch of `samples` with the mean loss `loss` and `correct` right answers.
    pub fn add(&mut self, loss: f64, correct: f64, samples: u64) {
        self.loss += loss * samples as f64;
        self.correct += correct as u64;
        self.samples += samples;
    }

    /// Both together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            loss: self.loss + other.loss,
            correct: self.correct + other.correct,
            samples: self.samples + other.samples,
        }
    }
}

/// What a run knows besides tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The id of the recipe it belongs to.
    pub recipe: String,
    /// Optimizer steps taken.
    pub step: u64,
    /// Finished epochs.
    pub epoch: u64,
    /// Batches consumed of the epoch after those.
    pub batch: u64,
    /// Bytes of `metrics.jsonl` that belong to it.
    pub metrics_bytes: u64,
    /// SHA-256 of those bytes.
    pub metrics_sha256: String,
    /// Bytes of `probe.jsonl` that belong to it.
    #[serde(default, skip_serializing_if = "is_none")]
    pub probe_bytes: u64,
    /// SHA-256 of those bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub probe_sha256: String,
    /// The training line under way.
    pub sums: Sums,
    /// The best value of the selected metric, and the step it was seen at.
    pub best: Option<(f64, u64)>,
    /// The last value that an early stop took for an improvement.
    #[serde(default)]
    pub improved: Option<f64>,
    /// Evaluations since.
    pub stale: u64,
    /// The plateau schedule's memory.
    pub plateau: Option<PlateauState>,
    /// The average of the weights.
    #[serde(default)]
    pub average: average::State,
    /// SHA-256 of the files beside this one.
    pub files: BTreeMap<String, String>,
    /// SHA-256 of this file with nothing here.
    pub sha256: String,
}

/// Without a microscope a checkpoint has the bytes that it had before there was one.
fn is_none(bytes: &u64) -> bool {
    *bytes == 0
}

impl State {
    /// The file, its own checksum filled in.
    fn seal(mut self) -> serde_json::Result<Vec<u8>> {
        self.sha256.clear();
        self.sha256 = sha256(&serde_json::to_vec_pretty(&self)?);
        serde_json::to_vec_pretty(&self)
    }
}

/// A checkpoint read back.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub state: State,
    pub files: BTreeMap<String, Vec<u8>>,
}

const STATE: &str = "state.json";
const PLACE: &str = "checkpoints";

fn place_of(run: &Path) -> PathBuf {
    run.join(PLACE)
}

/// Whether a run has no folder of checkpoints, not even an empty one.
pub(crate) fn removed(run: &Path) -> bool {
    matches!(place_of(run).try_exists(), Ok(false))
}

/// Whether a file, by its name in a run's folder, is one of a checkpoint.
pub(crate) fn is_in_one(name: &str) -> bool {
    name.strip_prefix(PLACE).is_some_and(|rest| rest.starts_with('/'))
}

/// The name in a run's folder of what vouches for a checkpoint.
pub(crate) fn state_name(step: u64) -> String {
    format!("{PLACE}/{}/{STATE}", name(step))
}

/// Where a checkpoint is made.
fn workshop_of(run: &Path) -> PathBuf {
    run.join(".checkpoints.tmp")
}

/// The folder of a checkpoint.
pub(crate) fn path(run: &Path, step: u64) -> PathBuf {
    place_of(run).join(name(step))
}

fn name(step: u64) -> String {
    format!("step-{step}")
}

/// Writes `step-<n>`.
pub(crate) fn write(run: &Path, state: &State, files: &BTreeMap<String, Vec<u8>>) -> Result<(), RunError> {
    let workshop = workshop_of(run);
    remove_folder(&workshop)?;
    let folder = workshop.join(name(state.step));
    fs::create_dir_all(&folder).map_err(RunError::io(&folder))?;
    let point = "checkpoint-before-sync";
    for (name, bytes) in files {
        write_synced(&folder.join(name), bytes, point)?;
    }
    let sums = files.iter().map(|(name, bytes)| (name.clone(), sha256(bytes)));
    let state = State { files: sums.collect(), ..state.clone() };
    let step = state.step;
    let sealed = state.seal().map_err(|e| RunError::Damaged {
        path: folder.join(STATE),
        message: format!("cannot be written: {e}"),
    })?;
    write_synced(&folder.join(STATE), &sealed, point)?;
    sync_folder(&folder)?;
    sync_folder(&workshop)?;
    // Also the entries of the metrics files, which the checkpoint vouches for.
    sync_folder(run)?;
    kill_point("checkpoint-before-rename");
    put_in_place(run, step)
}

/// Moves a finished checkpoint from the workshop to its place.
fn put_in_place(run: &Path, step: u64) -> Result<(), RunError> {
    let (workshop, place) = (workshop_of(run), place_of(run));
    let first = !place.try_exists().map_err(RunError::io(&place))?;
    let (from, to) = match first {
        true => (workshop.clone(), place.clone()),
        false => (workshop.join(name(step)), place.join(name(step))),
    };
    // One of the same step, left by an interrupted run. A crash after this is no loss: the new one is whole and synced,
    // and `recover` finds it in the workshop.
    remove_folder(&to)?;
    kill_point("checkpoint-after-remove");
    fs::rename(&from, &to).map_err(RunError::io(&to))?;
    kill_point("checkpoint-after-rename");
    sync_folder(&place)?;
    sync_folder(run)?;
    debug!("{}: written", path(run, step).display());
    if first { Ok(()) } else { Ok(remove_folder(&workshop)?) }
}

/// Puts a checkpoint in place that a crash left finished in the workshop, and removes an unfinished one.
pub(crate) fn recover(run: &Path) -> Result<(), RunError> {
    let workshop = workshop_of(run);
    for step in steps_in(&workshop)?.unwrap_or_default() {
        if read(&workshop.join(name(step))).is_ok() {
            put_in_place(run, step)?;
        }
    }
    Ok(remove_folder(&workshop)?)
}

/// The steps of all checkpoints, newest first.
pub(crate) fn steps(run: &Path) -> Result<Vec<u64>, RunError> {
    Ok(steps_in(&place_of(run))?.unwrap_or_default())
}

/// `None` where there is no such folder.
fn steps_in(folder: &Path) -> Result<Option<Vec<u64>>, RunError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(RunError::io(folder)(e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let found = entry.map_err(RunError::io(folder))?.file_name();
        let step = found.to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok());
        // `step-007` is nobody's.
        steps.extend(step.filter(|step| found.to_str() == Some(&name(*step))));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(Some(steps))
}

/// After the checkpoint of step `newest`, removes all but the `keep` newest and the best.
pub(crate) fn prune(run: &Path, newest: u64, keep: usize, best: Option<u64>) -> Result<(), RunError> {
    kill_point("checkpoint-before-prune");
    // What comes after it could not be used, or the run would have gone on from there.
    let (later, sooner): (Vec<u64>, Vec<u64>) = steps(run)?.into_iter().partition(|step| *step > newest);
    let old = sooner.into_iter().skip(keep).filter(|step| Some(*step) != best);
    later.into_iter().chain(old).try_for_each(|step| {
        debug!("{}: removed", path(run, step).display());
        Ok(remove_folder(&path(run, step))?)
    })
}

/// The newest intact checkpoint of a recipe, or `None` when the run has none yet. Where there were some and none can
/// be used, that is an error: a run never starts again from zero in silence.
pub(crate) fn newest(run: &Path, recipe: &Recipe) -> Result<Option<Loaded>, RunError> {
    let name = &recipe.name;
    let read_metrics = |file: &str| match fs::read(run.join(file)) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(RunError::io(run.join(file))(e)),
        read => Ok(read.unwrap_or_default()),
    };
    let (metrics, copy) = (read_metrics("metrics.jsonl")?, read_metrics(metrics::COPY).unwrap_or_default());
    let steps = steps_in(&place_of(run))?;
    let lost = |message: &str| {
        let message = format!("{message}: put it back, or remove the run's folder to start again");
        Err(RunError::Damaged { path: place_of(run), message })
    };
    match &steps {
        None if run.join("summary.json").exists() => return lost("is gone, though the run had a checkpoint"),
        Some(steps) if steps.is_empty() && !metrics.is_empty() => {
            return lost("is empty, though the run had a checkpoint");
        }
        None if !metrics.is_empty() => {
            warn!("{name}: was killed before its first checkpoint: starting again")
        }
        _ => {}
    }
    let steps = steps.unwrap_or_default();
    for step in &steps {
        let loaded = match read(&path(run, *step)) {
            Ok(loaded) => loaded,
            Err(e) => {
                warn!("{name}: skipping a checkpoint that cannot be used: {e}");
                continue;
            }
        };
        let usable = match loaded.belongs_to(run, *step, recipe.id(), &metrics) {
            Err(e) if loaded.belongs_to(run, *step, recipe.id(), &copy).is_ok() => {
                warn!("{name}: metrics.jsonl is damaged, its copy is not: written again from that: {e}");
                let length = usize::try_from(loaded.state.metrics_bytes).unwrap_or(usize::MAX);
                let past = copy.get(..length).unwrap_or_default();
                taper_files::replace(&run.join("metrics.jsonl"), past).map_err(RunError::from)
            }
            usable => usable,
        };
        match usable {
            Ok(()) => {
                debug!("{}: loaded", path(run, *step).display());
                return Ok(Some(loaded));
            }
            Err(e) => warn!("{name}: skipping a checkpoint that cannot be used: {e}"),
        }
    }
    if steps.is_empty() { Ok(None) } else { lost("holds no checkpoint that can be used") }
}

/// Reads one checkpoint and proves it whole.
pub(crate) fn read(folder: &Path) -> Result<Loaded, RunError> {
    let damaged = |file: &str, message: String| RunError::Damaged { path: folder.join(file), message };
    let load = |file: &str| fs::read(folder.join(file)).map_err(RunError::io(folder.join(file)));
    let state = folder::unseal(&load(STATE)?, |state: &mut State| &mut state.sha256)
        .map_err(|message| damaged(STATE, message))?;
    let mut files = BTreeMap::new();
    for (name, expected) in &state.files {
        let bytes = load(name)?;
        let found = sha256(&bytes);
        if &found != expected {
            return Err(damaged(name, format!("sha256 was {expected} when it was written, is {found}")));
        }
        files.insert(name.clone(), bytes);
    }
    Ok(Loaded { state, files })
}

impl Loaded {
    /// Refuses what is whole but of another step, recipe or past.
    pub fn belongs_to(&self, run: &Path, step: u64, recipe: &str, metrics: &[u8]) -> Result<(), RunError> {
        let refuse = |message: String| Err(RunError::Damaged { path: path(run, step), message });
        let State { step: found, recipe: own, metrics_bytes, metrics_sha256, .. } = &self.state;
        if *found != step {
            return refuse(format!("is the checkpoint of step {found}"));
        }
        if own != recipe {
            return refuse(format!("belongs to the recipe {own}, this run is {recipe}"));
        }
        let length = usize::try_from(*metrics_bytes).unwrap_or(usize::MAX);
        let Some(past) = metrics.get(..length) else {
            return refuse(format!("expects {length} bytes of metrics.jsonl, found {}", metrics.len()));
        };
        if sha256(past) != *metrics_sha256 {
            return refuse(format!(
                "the first {length} bytes of metrics.jsonl are not those it was written with"
            ));
        }
        Ok(())
    }

    /// Refuses another past of `probe.jsonl`, of which these are the bytes.
    pub fn saw(&self, run: &Path, seen: &[u8]) -> Result<(), RunError> {
        let State { probe_bytes, probe_sha256, step, .. } = &self.state;
        let past = usize::try_from(*probe_bytes).ok().and_then(|length| seen.get(..length));
        match past {
            Some(past) if *probe_bytes == 0 || sha256(past) == *probe_sha256 => Ok(()),
            _ => {
                let message =
                    format!("the first {probe_bytes} bytes of probe.jsonl are not those it was written with");
                Err(RunError::Damaged { path: path(run, *step), message })
            }
        }
    }
}
