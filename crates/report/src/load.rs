//! Runs as their folders have them: finished, diverged, interrupted or damaged, all are read as far as they go.
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use taper_train::Recipe;
use taper_train::recipe::Unchecked;
use taper_train::run::{Record, Split, Status, Summary};
use taper_train::run::{RunError, folder};

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
    /// What its data lacks to be the whole set.
    pub subset: Option<String>,
}

impl Run {
    /// Where it stopped, for a run that did not finish.
    pub fn steps(&self) -> u64 {
        self.records.last().map_or(0, |record| record.step)
    }

    /// The split it is judged on: the test set, or the function itself.
    pub fn split(&self) -> Split {
        if self.is_problem() { Split::Train } else { Split::Test }
    }

    /// Whether a test function was minimised rather than a network trained.
    pub fn is_problem(&self) -> bool {
        self.recipe.problem.is_some()
    }

    /// When a record was made, as its curves count: in epochs, or in steps for a function.
    pub fn time(&self, record: &Record) -> u64 {
        if self.is_problem() { record.step } else { record.epoch }
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
    }
    let mut out = Runs::default();
    for folder in &found {
        match read(folder, &mut out.problems) {
            Ok(run) => out.runs.push(run),
            Err(problem) => out.problems.push(problem),
        }
    }
    // By name, not by path: the order must not depend on where the runs lie, nor on how often they were named.
    out.runs.sort_by(|a, b| a.folder.cmp(&b.folder));
    out.runs.dedup_by(|a, b| a.recipe.id() == b.recipe.id() && a.folder == b.folder);
    out.problems.sort();
    match out.runs.is_empty() {
        true if out.problems.is_empty() => {
            Err(ReportError::Empty(folders.iter().map(|f| f.display().to_string()).collect()))
        }
        _ => Ok(out),
    }
}

/// Reads one run; what is damaged beyond use is an error, what is damaged at its end is noted.
pub fn read(folder: &Path, problems: &mut Vec<String>) -> Result<Run, String> {
    let name =
        folder.canonicalize().ok().and_then(|f| f.file_name().map(|n| n.to_string_lossy().into_owned()));
    let name = name.unwrap_or_else(|| folder.display().to_string());
    let left_out = |what: &str| format!("{name}: {what}: the run is left out");
    let text =
        fs::read_to_string(folder.join("recipe.yaml")).map_err(|e| left_out(&format!("recipe.yaml: {e}")))?;
    // No registry and no environment: a report needs neither to read what a run was.
    let recipe = Recipe::parse("recipe.yaml", &text, &[], &Unchecked)
        .map_err(|e| left_out(&format!("recipe.yaml cannot be read: {}", e.message())))?;
    let mut note = |what: String| problems.push(format!("{name}: {what}"));
    folder::damage(folder).into_iter().for_each(&mut note);

    let mut records: Vec<Record> = Vec::new();
    match fs::read(folder.join("metrics.jsonl")) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            // A run under way may be in the middle of its last line.
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            for (number, line) in whole.lines().enumerate() {
                match serde_json::from_str(line) {
                    Ok(record) => records.push(record),
                    Err(e) => {
                        note(format!("metrics.jsonl, line {}: {e}: what follows is left out", number + 1));
                        break;
                    }
                }
            }
        }
        Err(e) => note(format!("metrics.jsonl: {e}: nothing was measured")),
    }
    let summary: Option<Summary> = match fs::read(folder.join("summary.json")) {
        Ok(bytes) => serde_json::from_slice(&bytes).map_err(|e| note(format!("summary.json: {e}"))).ok(),
        Err(_) => None,
    };
    if let Some(summary) = summary.as_ref().filter(|s| s.id != recipe.id()) {
        note(format!("recipe.yaml is of the run {}, summary.json of {}", recipe.id(), summary.id));
    }
    let subset = fs::read(folder.join("manifest.json")).ok();
    let subset = subset.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    let subset = subset.and_then(|manifest| manifest["data"]["subset"].as_str().map(str::to_owned));
    let metric = summary.as_ref().map(|s| s.metric.clone()).unwrap_or_else(|| metric(&recipe, &records));
    let (status, reason) = summary.map_or((Status::Interrupted, None), |s| (s.status, s.reason));
    Ok(Run { folder: name, recipe, recipe_text: text, status, reason, metric, records, subset })
}

/// The metric of a run that left no summary: the recipe's, or the task's own.
fn metric(recipe: &Recipe, records: &[Record]) -> String {
    if let Some(metric) = recipe.train.metric.and_then(|m| serde_json::to_value(m).ok()) {
        return metric.as_str().unwrap_or("loss").to_owned();
    }
    let measured = |name: &&str| records.iter().any(|record| record.values.contains_key(*name));
    ["accuracy", "perplexity"].into_iter().find(measured).unwrap_or("loss").to_owned()
}
