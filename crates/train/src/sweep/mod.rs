//! A sweep: a set of runs addressed by content. Running it twice does nothing the second time; extending, resuming and
//! sharing runs between tables are the same operation.
//!
//! ```no_run
//! use taper_train::{Recipe, Registries, run};
//! use taper_train::sweep::{Sweep, Workers, table};
//! let registries = Registries::default();
//! let recipe = Recipe::load("recipes/sweeps/c-robustness-mnist.yaml", &[], &registries)?;
//! let mut sweep = Sweep::open(&[recipe], &registries, &run::Options::default())?;
//! sweep.run(&registries, &Workers::Here)?;
//! print!("{}", table(&sweep.cells()));
//! # Ok::<(), run::RunError>(())
//! ```
mod cell;
mod confirm;
pub mod lint;
mod planned;
mod processes;
mod queue;
pub mod settings;
pub mod slurm;
mod view;

pub use cell::text as setting_text;
pub use cell::{Cell, Trial, table};
pub use confirm::Confirmation;
pub use planned::planned;
pub use processes::{BUSY, Processes};

use crate::run::{self, Inputs, Look, Options, RunError, Status, Summary};
use crate::{Recipe, Registries};
use queue::{Next, Queue};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use tracing::{info, warn};
use view::View;

/// A set of runs and what is known of each.
#[derive(Debug)]
pub struct Sweep {
    runs: Vec<Run>,
    options: Options,
}

/// One run of a sweep.
#[derive(Clone, Debug)]
pub struct Run {
    /// What to train.
    pub recipe: Recipe,
    /// Its folder: its own, or one of the same content under another name that has a result.
    pub folder: PathBuf,
    /// What is known of it.
    pub state: State,
}

/// What is known of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum State {
    /// It has no result yet; it may have a checkpoint.
    Missing,
    /// It came to its end: finished or diverged.
    Done(Box<Summary>),
    /// It was tried and failed, with this message; the next sweep tries again.
    Failed(String),
}

impl Run {
    /// Its summary, if it came to its end.
    pub fn summary(&self) -> Option<&Summary> {
        match &self.state {
            State::Done(summary) => Some(summary),
            _ => None,
        }
    }

    /// What tells it from the other runs: what its sweep varied, or else its name.
    pub fn label(&self) -> String {
        let short = |key: &str| key.strip_prefix("optimizer.").unwrap_or(key).to_owned();
        let setting = |(key, value): &(String, Value)| match (key.as_str(), value) {
            ("optimizer.name", Value::String(name)) => name.clone(),
            (key, value) => format!("{}={}", short(key), cell::text(value)),
        };
        match self.recipe.varied() {
            [] => self.recipe.name.clone(),
            varied => varied.iter().map(setting).collect::<Vec<_>>().join(" "),
        }
    }
}

/// Who does the runs.
#[derive(Clone, Debug)]
pub enum Workers {
    /// This process, one after the other.
    Here,
    /// Child processes, several at a time.
    Processes(Processes),
}

/// How [`Sweep::run`] came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Every run was tried.
    All,
    /// It was asked to stop; what was under way has a checkpoint.
    Interrupted,
}

impl Sweep {
    /// The runs of `recipes`, those with a sweep expanded, each content once, and what `options.runs` has of them.
    /// A result counts while its files are as they were sealed and its inputs are what they were.
    pub fn open(recipes: &[Recipe], registries: &Registries, options: &Options) -> Result<Self, RunError> {
        let folders = folders(&options.runs)?;
        let mut look = Look::new(registries, &options.search);
        let mut seen = HashSet::new();
        let all = recipes.iter().flat_map(Recipe::runs).filter(|recipe| seen.insert(recipe.id().to_owned()));
        let runs = all.map(|recipe| {
            let own = options.runs.join(recipe.directory());
            let others = folders.get(recipe.id()).into_iter().flatten();
            let found = std::iter::once(&own)
                .chain(others)
                .find_map(|folder| found(folder, recipe, &mut look).map(|summary| (folder, summary)));
            let (folder, state) = match found {
                Some((folder, summary)) => (folder.clone(), State::Done(Box::new(summary))),
                None => (own, State::Missing),
            };
            Run { recipe: recipe.clone(), folder, state }
        });
        let runs = runs.collect();
        Ok(Self { runs, options: options.clone() })
    }

    /// All runs, in the order of the recipes.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// The runs without a result, in order.
    pub fn missing(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(|run| !matches!(run.state, State::Done(_)))
    }

    /// Does what is missing. A run that fails or diverges is noted and stops no other; an error is only what concerns
    /// them all.
    pub fn run(&mut self, registries: &Registries, workers: &Workers) -> Result<Ended, RunError> {
        if self.missing().next().is_none() {
            return Ok(Ended::All);
        }
        planned::say(self);
        let ended = match workers {
            Workers::Here => self.run_here(registries),
            Workers::Processes(processes) => {
                let mut view = View::new(self);
                processes::run(self, registries, processes, &mut view)
            }
        };
        if matches!(ended, Ok(Ended::All)) {
            planned::done(self);
        }
        ended
    }

    fn run_here(&mut self, registries: &Registries) -> Result<Ended, RunError> {
        let mut queue = Queue::new(self, registries);
        let options = Options { wait: false, ..self.options.clone() };
        let stopped = || options.stop.load(Ordering::Relaxed);
        loop {
            match queue.next(self) {
                Next::Start(index) => match run::run(&self.runs[index].recipe, registries, &options) {
                    Err(RunError::Interrupted { .. }) if stopped() => return Ok(Ended::Interrupted),
                    Err(RunError::Busy { .. }) => queue.put_off(index),
                    ended => self.note(index, ended.err().map(|e| e.to_string()).unwrap_or_default()),
                },
                Next::Wait if stopped() => return Ok(Ended::Interrupted),
                Next::Wait => std::thread::sleep(queue::LOOK),
                Next::Later(index, holder) => {
                    info!("{}: {holder} is at work on it: later", self.runs[index].folder.display());
                }
                Next::Done(_) => {}
                Next::Nothing => return Ok(Ended::All),
            }
        }
    }

    /// Why this sweep and one on another machine could both train a run of its folder; `None` where locks keep them apart, as
    /// far as this machine knows.
    pub fn unshared(&self) -> Result<Option<String>, RunError> {
        run::lock::unshared(&self.options.runs)
    }

    /// Takes note of a run that ended: by its result, or by `message` if it left none.
    fn note(&mut self, index: usize, message: String) {
        let run = &mut self.runs[index];
        run.state = match result(&run.folder, &run.recipe) {
            Some(summary) => State::Done(Box::new(summary)),
            None => State::Failed(message),
        };
    }

    /// The results by configuration: runs that differ in nothing but their seed are one cell. Cells are in the order of
    /// the recipes.
    pub fn cells(&self) -> Vec<Cell> {
        cell::cells(&self.runs)
    }
}

/// The summary of a run that came to its end; a damaged one, or one of another recipe, is for the run itself to report.
fn result(folder: &Path, recipe: &Recipe) -> Option<Summary> {
    let summary = run::folder::summary(folder).ok().flatten()?;
    (summary.status != Status::Interrupted && summary.id == recipe.id()).then_some(summary)
}

/// A run's result, if it is one of the inputs that there are now.
fn found(folder: &Path, recipe: &Recipe, look: &mut Look) -> Option<Summary> {
    result(folder, recipe).filter(|_| same_inputs(folder, recipe, look))
}

/// Whether a result is one of the inputs that there are now.
fn same_inputs(folder: &Path, recipe: &Recipe, look: &mut Look) -> bool {
    let Ok(manifest) = run::folder::manifest(folder) else { return false };
    let change = look.change(recipe, &Inputs::from(&manifest));
    if let Some(change) = &change {
        warn!("{}: had other inputs ({change}): it is missing now", folder.display());
    }
    change.is_none()
}

/// The folders of runs by id: `<name>-<id>`.
fn folders(runs: &Path) -> Result<BTreeMap<String, Vec<PathBuf>>, RunError> {
    let mut folders: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    let entries = match fs::read_dir(runs) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(folders),
        Err(e) => return Err(RunError::io(runs)(e)),
    };
    for entry in entries {
        let path = entry.map_err(RunError::io(runs))?.path();
        let id = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.rsplit('-').next());
        if let Some(id) = id {
            folders.entry(id.to_owned()).or_default().push(path);
        }
    }
    // The order of a folder's entries is the file system's.
    folders.values_mut().for_each(|same| same.sort());
    Ok(folders)
}
