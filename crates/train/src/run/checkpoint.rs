//! Checkpoints: whole or not there, and known to be intact.
//!
//! A checkpoint is written to a temporary folder, its files synced, the folder renamed to `step-<n>` and its parent
//! synced. `state.json` carries the SHA-256 of the other files. A damaged checkpoint is skipped with a message and the
//! one before it is used.
use super::RunError;
use super::average;
use super::files::{sha256, sync_folder, write_synced};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use taper_optim::PlateauState;
use tracing::{debug, warn};

/// The running means of the current epoch's training line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sums {
    /// Σ loss · samples
    pub loss: f64,
    /// Right answers.
    pub correct: u64,
    /// Samples.
    pub samples: u64,
}

/// What a run knows besides tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Optimizer steps taken.
    pub step: u64,
    /// Finished epochs.
    pub epoch: u64,
    /// Batches consumed of the epoch after those.
    pub batch: u64,
    /// Bytes of `metrics.jsonl` that belong to it.
    pub metrics_bytes: u64,
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
    #[serde(default)]
    pub files: BTreeMap<String, String>,
}

/// A checkpoint read back.
pub(crate) struct Loaded {
    pub state: State,
    pub files: BTreeMap<String, Vec<u8>>,
}

/// Stops the process at a named point when `TAPER_KILL_AT` names it: how the tests crash a run where it hurts most.
/// `name` kills at the first visit, `name:3` at the third.
pub(crate) fn kill_point(name: &str) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static VISITS: AtomicU64 = AtomicU64::new(0);
    let Ok(wanted) = std::env::var("TAPER_KILL_AT") else { return };
    let (point, visit) = wanted.split_once(':').unwrap_or((&wanted, "1"));
    if point == name && VISITS.fetch_add(1, Ordering::Relaxed) + 1 == visit.parse().unwrap_or(1) {
        std::process::abort();
    }
}

fn folder_of(run: &Path) -> PathBuf {
    run.join("checkpoints")
}

/// Writes `step-<n>`.
pub(crate) fn write(run: &Path, state: &State, files: &BTreeMap<String, Vec<u8>>) -> Result<(), RunError> {
    let folder = folder_of(run);
    fs::create_dir_all(&folder).map_err(RunError::io(&folder))?;
    let place = folder.join(format!("step-{}", state.step));
    let temporary = folder.join(format!(".step-{}.tmp", state.step));
    if temporary.exists() {
        fs::remove_dir_all(&temporary).map_err(RunError::io(&temporary))?;
    }
    fs::create_dir(&temporary).map_err(RunError::io(&temporary))?;
    let mut state = state.clone();
    for (name, bytes) in files {
        state.files.insert(name.clone(), sha256(bytes));
        write_synced(&temporary.join(name), bytes)?;
    }
    kill_point("checkpoint-before-sync");
    let json = serde_json::to_vec_pretty(&state)
        .map_err(|e| RunError::Damaged { path: temporary.clone(), message: e.to_string() })?;
    write_synced(&temporary.join("state.json"), &json)?;
    sync_folder(&temporary)?;
    kill_point("checkpoint-before-rename");
    if place.exists() {
        // Left by an interrupted run at the same step; the new one is as good and known to be whole.
        fs::remove_dir_all(&place).map_err(RunError::io(&place))?;
    }
    fs::rename(&temporary, &place).map_err(RunError::io(&place))?;
    kill_point("checkpoint-after-rename");
    debug!("{}: written", place.display());
    sync_folder(&folder)
}

/// The steps of all complete checkpoints, newest first.
pub(crate) fn steps(run: &Path) -> Result<Vec<u64>, RunError> {
    let folder = folder_of(run);
    let entries = match fs::read_dir(&folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(RunError::io(&folder)(e)),
    };
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.map_err(RunError::io(&folder))?.file_name();
        steps.extend(name.to_str().and_then(|n| n.strip_prefix("step-")).and_then(|n| n.parse::<u64>().ok()));
    }
    steps.sort_unstable_by(|a, b| b.cmp(a));
    Ok(steps)
}

/// Removes all but the `keep` newest and the best.
pub(crate) fn prune(run: &Path, keep: usize, best: Option<u64>) -> Result<(), RunError> {
    for step in steps(run)?.into_iter().skip(keep).filter(|step| Some(*step) != best) {
        let path = folder_of(run).join(format!("step-{step}"));
        fs::remove_dir_all(&path).map_err(RunError::io(&path))?;
        debug!("{}: removed", path.display());
    }
    Ok(())
}

/// The newest intact checkpoint, or `None` when there is no checkpoint at all. When there are only damaged ones, that
/// is an error: a run never starts from zero in silence.
pub(crate) fn newest(run: &Path) -> Result<Option<Loaded>, RunError> {
    let steps = steps(run)?;
    for step in &steps {
        let path = folder_of(run).join(format!("step-{step}"));
        match read(&path) {
            Ok(loaded) => {
                debug!("{}: loaded", path.display());
                return Ok(Some(loaded));
            }
            Err(e) => warn!("skipping a damaged checkpoint: {e}"),
        }
    }
    if steps.is_empty() {
        return Ok(None);
    }
    let message = "no checkpoint in it is intact: remove the run's folder to start again".to_owned();
    Err(RunError::Damaged { path: folder_of(run), message })
}

/// Reads one checkpoint and proves it whole.
pub(crate) fn read(path: &Path) -> Result<Loaded, RunError> {
    let damaged = |file: &str, message: String| RunError::Damaged { path: path.join(file), message };
    let load = |file: &str| fs::read(path.join(file)).map_err(RunError::io(path.join(file)));
    let state: State =
        serde_json::from_slice(&load("state.json")?).map_err(|e| damaged("state.json", e.to_string()))?;
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
