//! Runs as their folders have them: finished, diverged, interrupted or damaged, all are read as far as they go.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use taper_train::Recipe;
use taper_train::run::{Record, RunError, Split, Status, folder};
use taper_train::sweep::settings::settings;

/// Why there is no report.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A folder or file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The folder or file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// No folder holds a run.
    #[error("no run in {}: a run is a folder with a recipe.yaml, as `train` and `sweep` leave it", .0.join(", "))]
    Empty(Vec<String>),
    /// A run whose folder cannot be read.
    #[error("{0}")]
    Unreadable(String),
    /// A run that no microscope looked at.
    #[error(
        "{run}: nobody looked at its steps: there is no line in probe.jsonl. Train it with the microscope: `{program} train {run}/recipe.yaml \
         --fresh --set train.probe='{{every: 10, what: [all]}}'` (--fresh keeps the run there is under another name)",
        program = taper_files::program()
    )]
    Unseen {
        /// Its folder.
        run: String,
    },
    /// The pictures cannot be drawn as PNG.
    #[error("{0}")]
    Png(String),
}

/// One run.
#[derive(Clone, Debug)]
pub struct Run {
    /// The name of its folder.
    pub folder: String,
    /// What was run.
    pub recipe: Recipe,
    /// The same as its file has it, with where each value came from.
    pub recipe_text: String,
    /// How it ended; a run without a summary was interrupted, or is still under way.
    pub status: Status,
    /// What went wrong, for a diverged run.
    pub reason: Option<String>,
    /// The metric it is judged by.
    pub metric: String,
    /// Its measurements, in order.
    pub records: Vec<Record>,
    /// How much of its data set it was given.
    pub extent: Extent,
    /// What its curves count in: its own, or steps where another run of its task counts so.
    pub clock: Clock,
}

/// What the curves of a run count in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Clock {
    /// Epochs: it was evaluated after some of them.
    Epoch,
    /// Steps: it was evaluated after some of them, maybe several times within an epoch.
    Step,
    /// Steps of a function.
    Iteration,
}

impl Clock {
    /// A run's own, by its recipe: evaluations are where `run` makes them.
    fn of(recipe: &Recipe) -> Self {
        match recipe.problem {
            Some(_) => Self::Iteration,
            None if recipe.train.steps.is_some() && recipe.train.eval_every.is_some() => Self::Step,
            None => Self::Epoch,
        }
    }

    /// One of what it counts.
    pub fn name(self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::Step => "step",
            Self::Iteration => "iteration",
        }
    }
}

/// How much of a data set a run was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All of it.
    Whole,
    /// Not all; this is what to declare beside the result.
    Part(String),
    /// Not known, and why.
    Unknown(String),
}

impl Run {
    /// Where it stopped, for a run that did not finish.
    pub fn steps(&self) -> u64 {
        self.records.last().map_or(0, |record| record.step)
    }

    /// Finds out anew by which metric it is judged, where it left no summary to say so: its measurements have changed.
    pub fn judge(&mut self) {
        if self.status == Status::Interrupted {
            self.metric = metric(&self.recipe, &self.records);
        }
    }

    /// The split it is judged on: the test set, or the function itself.
    pub fn split(&self) -> Split {
        if self.is_problem() { Split::Train } else { Split::Test }
    }

    /// Whether a test function was minimised rather than a network trained.
    pub fn is_problem(&self) -> bool {
        self.recipe.problem.is_some()
    }

    /// When a record was made, as its curves count.
    pub fn time(&self, record: &Record) -> u64 {
        match self.clock {
            Clock::Epoch => record.epoch,
            Clock::Step | Clock::Iteration => record.step,
        }
    }

    /// The values of a metric on a split, with their records.
    pub fn values<'a>(
        &'a self,
        split: Split,
        metric: &'a str,
    ) -> impl DoubleEndedIterator<Item = (&'a Record, f64)> {
        let of = self.records.iter().filter(move |record| record.split == split);
        of.filter_map(move |record| Some((record, *record.values.get(metric)?)))
    }
}

/// The runs in some folders, and what could not be read of them.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// The runs, each once, by name.
    pub runs: Vec<Run>,
    /// What is damaged, and what was done about it.
    pub problems: Vec<String>,
}

/// Reads run folders and folders of runs.
pub fn load(folders: &[PathBuf]) -> Result<Runs, ReportError> {
    let mut found = BTreeSet::new();
    let mut out = Runs::default();
    for folder in folders {
        if folder.join("recipe.yaml").is_file() {
            found.insert(folder.clone());
            continue;
        }
        let io = |source| ReportError::Io { path: folder.clone(), source };
        match folder::runs_in(folder) {
            Ok(runs) => found.extend(runs),
            Err(RunError::Io { source, .. }) => return Err(io(source)),
            Err(e) => return Err(io(std::io::Error::other(e.to_string()))),
        }
        for entry in fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.join("metrics.jsonl").is_file() && !path.join("recipe.yaml").is_file() {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                out.problems.push(format!("{name}: no recipe.yaml: left out"));
            }
        }
    }
    // A folder that was named twice, by whatever path, is one run.
    let real = |folder: &PathBuf| folder.canonicalize().unwrap_or_else(|_| folder.clone());
    let found: BTreeSet<PathBuf> = found.iter().map(real).collect();
    for folder in &found {
        match read(folder, &mut out.problems) {
            Ok(run) => out.runs.push(run),
            Err(problem) => out.problems.push(problem),
        }
    }
    out.runs = once(out.runs, &mut out.problems);
    out.problems.sort();
    out.problems.dedup();
    match out.runs.is_empty() {
        true if out.problems.is_empty() => {
            Err(ReportError::Empty(folders.iter().map(|f| f.display().to_string()).collect()))
        }
        _ => Ok(out),
    }
}

/// Every seed of a configuration once, however many folders have it: one that finished before one that did not, then by
/// name, not by path, since the order must not depend on where the runs lie. What does not count is named.
pub fn once(mut runs: Vec<Run>, problems: &mut Vec<String>) -> Vec<Run> {
    runs.sort_by(|a, b| a.folder.cmp(&b.folder));
    let mut place: BTreeMap<(BTreeMap<String, String>, u64), usize> = BTreeMap::new();
    let mut kept: Vec<Run> = Vec::new();
    for mut run in runs {
        let key = (settings(&run.recipe), run.recipe.seed);
        let Some(place) = place.get(&key) else {
            place.insert(key, kept.len());
            kept.push(run);
            continue;
        };
        let first = &mut kept[*place];
        if first.status != Status::Finished && run.status == Status::Finished {
            std::mem::swap(first, &mut run);
        }
        let (name, other) = (&run.folder, &first.folder);
        problems.push(match run.status {
            Status::Finished if run.records == first.records => {
                format!("{name}: a copy of {other}, which counts: left out")
            }
            Status::Finished => {
                format!("{name}: other numbers than {other}, which has its settings and its seed: left out")
            }
            Status::Diverged => {
                format!("{name}: diverged, and {other} has its settings and its seed: left out")
            }
            Status::Interrupted => {
                format!("{name}: interrupted, and {other} has its settings and its seed: left out")
            }
        });
    }
    kept.sort_by(|a, b| a.folder.cmp(&b.folder));
    kept
}

/// How much of its data a run was given, by its manifest.
fn extent(reading: &folder::Reading) -> Extent {
    match &reading.subset {
        _ if reading.recipe.problem.is_some() => Extent::Whole,
        Ok(None) => Extent::Whole,
        Ok(Some(part)) => Extent::Part(part.clone()),
        Err(e) => Extent::Unknown(format!("manifest.json: {e}")),
    }
}

/// Reads one run; what is damaged beyond use is an error, what is damaged at its end is noted.
pub fn read(folder: &Path, problems: &mut Vec<String>) -> Result<Run, String> {
    named(folder, folder::read(folder), problems)
}

/// What a run is and how it ended, without its measurements: for whoever follows them as they are made, and says
/// [`Run::judge`] when there are some.
pub fn about(folder: &Path, problems: &mut Vec<String>) -> Result<Run, String> {
    named(folder, folder::about(folder), problems)
}

fn named(
    folder: &Path,
    reading: Result<folder::Reading, String>,
    problems: &mut Vec<String>,
) -> Result<Run, String> {
    let name =
        folder.canonicalize().ok().and_then(|f| f.file_name().map(|n| n.to_string_lossy().into_owned()));
    let name = name.unwrap_or_else(|| folder.display().to_string());
    let reading = reading.map_err(|what| format!("{name}: {what}: the run is left out"))?;
    problems.extend(reading.problems.iter().map(|what| format!("{name}: {what}")));
    let extent = extent(&reading);
    let folder::Reading { recipe, recipe_text, records, summary, .. } = reading;
    let metric = summary.as_ref().map(|s| s.metric.clone()).unwrap_or_else(|| metric(&recipe, &records));
    let (status, reason) = summary.map_or((Status::Interrupted, None), |s| (s.status, s.reason));
    let clock = Clock::of(&recipe);
    Ok(Run { folder: name, recipe, recipe_text, status, reason, metric, records, extent, clock })
}

/// The metric of a run that left no summary: the recipe's, or the task's own.
fn metric(recipe: &Recipe, records: &[Record]) -> String {
    if let Some(metric) = recipe.train.metric.and_then(|m| serde_json::to_value(m).ok()) {
        return metric.as_str().unwrap_or("loss").to_owned();
    }
    let measured = |name: &&str| records.iter().any(|record| record.values.contains_key(*name));
    let own = ["accuracy", "bits_per_char", "bits_per_byte", "perplexity"];
    own.into_iter().find(measured).unwrap_or("loss").to_owned()
}
