//! Trackers: a run's folder brought to where a team looks, while it grows or afterwards.
//!
//! Each reads the folder alone and can be stopped and begun again at any time: what is there already is not sent twice. Training
//! never waits for one.
mod client;
mod csv;
mod mlflow;
mod tensorboard;
mod wall;
mod wandb;

pub use mlflow::Mlflow;

use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use taper_train::Recipe;
use taper_train::run::{Record, RunError, Status, Summary, at_work, folder};

/// Why a tracker could not do its work; what it has done stays, and the next call goes on from there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder is no run.
    #[error("{}: {message}", path.display())]
    Run {
        /// The folder.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// An address that cannot be spoken to.
    #[error("{0}")]
    Address(String),
    /// A server did not do what it was asked.
    #[error("{server}: {message}")]
    Server {
        /// Its address.
        server: String,
        /// What it said, or did not.
        message: String,
    },
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> TrackError {
    let path = path.to_path_buf();
    move |source| TrackError::Io { path, source }
}

/// A run to be tracked.
#[derive(Debug)]
struct Tracked {
    folder: PathBuf,
    recipe: Recipe,
    summary: Option<Summary>,
    running: bool,
}

impl Tracked {
    fn open(folder: &Path) -> Result<Self, TrackError> {
        let reading = folder::about(folder)
            .map_err(|message| TrackError::Run { path: folder.to_path_buf(), message })?;
        let running = at_work(folder).is_some();
        Ok(Self { folder: folder.to_path_buf(), recipe: reading.recipe, summary: reading.summary, running })
    }

    /// Its folder's name.
    fn name(&self) -> String {
        let name = self.folder.canonicalize().ok();
        let name = name.as_deref().unwrap_or(&self.folder).file_name();
        name.map_or_else(|| self.recipe.directory(), |name| name.to_string_lossy().into_owned())
    }

    /// How it ended; `None` while it goes on.
    fn status(&self) -> Option<Status> {
        match &self.summary {
            _ if self.running => None,
            Some(summary) => Some(summary.status),
            None => Some(Status::Interrupted),
        }
    }

    /// All settings by their keys, as text: `optimizer.lr`.
    fn settings(&self) -> Vec<(String, Value)> {
        let mut out = Vec::new();
        flatten("", self.recipe.resolved(), &mut out);
        out
    }

    /// Calls `with` for every whole line of `metrics.jsonl` from `offset` on: the record and the offset after it.
    fn records(
        &self,
        offset: u64,
        mut with: impl FnMut(Record, u64) -> Result<(), TrackError>,
    ) -> Result<(), TrackError> {
        let path = self.folder.join("metrics.jsonl");
        let mut file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io(&path)(e)),
        };
        let length = file.metadata().map_err(io(&path))?.len();
        if length < offset {
            // It was begun anew and has not come so far: what follows will be the same.
            return Ok(());
        }
        file.seek(SeekFrom::Start(offset)).map_err(io(&path))?;
        let (mut reader, mut line, mut at) = (BufReader::new(file), Vec::new(), offset);
        loop {
            line.clear();
            let read = reader.read_until(b'\n', &mut line).map_err(io(&path))?;
            // A line without its end is one that is being written.
            if read == 0 || line.last() != Some(&b'\n') {
                return Ok(());
            }
            at += read as u64;
            let record = serde_json::from_slice(&line).map_err(|e| TrackError::Run {
                path: path.clone(),
                message: format!("the line that ends at byte {at}: {e}"),
            })?;
            with(record, at)?;
        }
    }
}

/// Settings as pairs; a list is one setting.
fn flatten(prefix: &str, value: &Value, out: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&key, value, out);
            }
        }
        Value::Null => {}
        value => out.push((prefix.to_owned(), value.clone())),
    }
}

/// A setting for people and programs.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Where runs are brought.
#[derive(Debug)]
pub enum Tracker {
    /// A file of comma-separated values a run, in this folder.
    Csv(PathBuf),
    /// A folder of TensorBoard's, with true times.
    TensorBoard(PathBuf),
    /// A folder a run inside this one, as the `wandb` package leaves them without a network.
    Wandb(PathBuf),
    /// A server of MLflow.
    Mlflow(Mlflow),
}

/// What a look at some runs came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Runs that were looked at.
    pub runs: usize,
    /// Numbers that were brought there.
    pub added: u64,
    /// Runs that go on.
    pub running: usize,
}

impl Tracker {
    /// Brings what is new of runs and of folders of runs.
    pub fn track(&mut self, folders: &[PathBuf]) -> Result<Progress, TrackError> {
        let mut runs = Vec::new();
        for folder in folders {
            if folder.join("recipe.yaml").is_file() {
                runs.push(Tracked::open(folder)?);
                continue;
            }
            let found = folder::runs_in(folder).map_err(|e| match e {
                RunError::Io { path, source } => TrackError::Run { path, message: source.to_string() },
                e => TrackError::Run { path: folder.clone(), message: e.to_string() },
            })?;
            if found.is_empty() {
                let message = "no run is in it: a run is a folder with a recipe.yaml".to_owned();
                return Err(TrackError::Run { path: folder.clone(), message });
            }
            for run in &found {
                runs.push(Tracked::open(run)?);
            }
        }
        let mut progress =
            Progress { runs: runs.len(), added: 0, running: runs.iter().filter(|run| run.running).count() };
        match self {
            Self::Csv(out) => {
                for run in &runs {
                    progress.added += csv::write(run, out)?;
                }
            }
            Self::TensorBoard(out) => {
                for run in &runs {
                    progress.added += tensorboard::write(run, out)?;
                }
            }
            Self::Wandb(out) => {
                for run in &runs {
                    progress.added += wandb::write(run, out)?;
                }
            }
            Self::Mlflow(server) => progress.added = server.track(&runs)?,
        }
        Ok(progress)
    }
}
