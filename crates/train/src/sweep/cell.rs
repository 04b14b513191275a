//! The results of a sweep by configuration, and their table.
use super::settings::{settings, unequal};
use super::{Run, State};
use crate::recipe::Select;
use crate::run::{Status, Summary};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap, HashSet};
use taper_figures::stats::{Better, Interval, student};
use taper_figures::table::{Table, mean_text, unit};

/// A configuration and its runs, one a seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The recipe's id without its seed.
    pub configuration: String,
    /// The recipe's name.
    pub name: String,
    /// The optimizer's name.
    pub optimizer: String,
    /// What the sweep set besides the seed, by dotted key, in its order.
    pub settings: Map<String, Value>,
    /// All settings that decide a result, by dotted key: what [`table`] says of rows that differ in more than was varied.
    #[serde(skip)]
    pub resolved: BTreeMap<String, String>,
    /// What chose the epoch of `selected`: `val`, `test` or `last`.
    pub select: String,
    /// What is measured, with its split: `test.accuracy`. `None` before the first result.
    pub metric: Option<String>,
    /// The runs, in the order of the recipes.
    pub runs: Vec<Trial>,
    /// Runs that finished. The three means below are over these.
    pub finished: usize,
    /// Runs with a loss or gradient that was not finite.
    pub diverged: usize,
    /// Runs that failed.
    pub failed: usize,
    /// Runs without a result.
    pub missing: usize,
    /// The best epoch's value, whatever chose: with 95 % interval over seeds.
    pub best: Option<Interval>,
    /// The last epoch's value.
    pub last: Option<Interval>,
    /// The selected epoch's value.
    pub selected: Option<Interval>,
}

/// One run of a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Its seed.
    pub seed: u64,
    /// Its id.
    pub id: String,
    /// `finished`, `diverged`, `failed` or `missing`.
    pub status: &'static str,
    /// The best epoch's value.
    pub best: Option<f64>,
    /// The last epoch's value.
    pub last: Option<f64>,
    /// The selected epoch's value.
    pub selected: Option<f64>,
}

impl Cell {
    /// (seed, value) of every finished run: `value` picks one of a trial's three.
    pub fn values(&self, value: impl Fn(&Trial) -> Option<f64>) -> Vec<(u64, f64)> {
        let finished = self.runs.iter().filter(|trial| trial.status == "finished");
        finished.filter_map(|trial| Some((trial.seed, value(trial)?))).collect()
    }

    /// Which values of its metric are good.
    pub fn better(&self) -> Better {
        Better::of(self.metric.as_deref().unwrap_or_default())
    }
}

/// Groups runs by configuration, in order of first appearance.
pub(super) fn cells(runs: &[Run]) -> Vec<Cell> {
    let mut groups: Vec<(String, Vec<&Run>)> = Vec::new();
    let mut places = HashMap::new();
    for run in runs {
        let configuration = run.recipe.configuration();
        let place = *places.entry(configuration.clone()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some((_, group)) => group.push(run),
            None => groups.push((configuration, vec![run])),
        }
    }
    groups.into_iter().filter_map(|(configuration, group)| cell(configuration, &group)).collect()
}

fn cell(configuration: String, runs: &[&Run]) -> Option<Cell> {
    let recipe = &runs.first()?.recipe;
    let metric = runs.iter().find_map(|run| metric(run.summary()?));
    let trials: Vec<Trial> = runs.iter().map(|run| trial(run, metric.as_deref())).collect();
    let count = |status: &str| trials.iter().filter(|trial| trial.status == status).count();
    let interval = |value: &dyn Fn(&Trial) -> Option<f64>| {
        let finished = trials.iter().filter(|trial| trial.status == "finished");
        student(&finished.filter_map(value).collect::<Vec<f64>>(), 0.95)
    };
    let varied = recipe.varied().iter().filter(|(key, _)| key != "seed").cloned().collect();
    let select = match recipe.train.select {
        Select::Val => "val",
        Select::Test => "test",
        Select::Last => "last",
    };
    Some(Cell {
        configuration,
        name: recipe.name.clone(),
        optimizer: recipe.optimizer.name.clone(),
        settings: varied,
        resolved: settings(recipe),
        select: select.to_owned(),
        finished: count("finished"),
        diverged: count("diverged"),
        failed: count("failed"),
        missing: count("missing"),
        best: interval(&|trial| trial.best),
        last: interval(&|trial| trial.last),
        selected: interval(&|trial| trial.selected),
        metric,
        runs: trials,
    })
}

/// The key of what a run is judged by: on the test set, or the nearest thing to one that it has.
fn metric(summary: &Summary) -> Option<String> {
    let keys = ["test", "val", "train"].map(|split| format!("{split}.{}", summary.metric));
    keys.into_iter().find(|key| summary.last.contains_key(key))
}

fn trial(run: &Run, metric: Option<&str>) -> Trial {
    let status = match &run.state {
        State::Missing => "missing",
        State::Failed(_) => "failed",
        State::Done(summary) if summary.status == Status::Diverged => "diverged",
        State::Done(_) => "finished",
    };
    let summary = run.summary().zip(metric);
    let value = |of: &dyn Fn(&Summary, &str) -> Option<f64>| {
        summary.and_then(|(summary, metric)| of(summary, metric)).filter(|value| value.is_finite())
    };
    Trial {
        seed: run.recipe.seed,
        id: run.recipe.id().to_owned(),
        status,
        best: value(&|summary, metric| Some(summary.best.get(metric)?.value)),
        last: value(&|summary, metric| summary.last.get(metric).copied()),
        selected: value(&|summary, metric| summary.selected.get(metric).copied()),
    }
}

/// A setting's value for people.
pub fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The cells as a Markdown table with what one must know to read it. Its bytes depend on the cells alone.
pub fn table(cells: &[Cell]) -> String {
    let keys = columns(cells);
    let metric = cells.iter().find_map(|cell| cell.metric.clone()).unwrap_or_else(|| "metric".to_owned());
    let percent = if unit(&metric).is_empty() { "" } else { ", %" };
    let readable = metric.replace('.', " ");
    let head = keys.iter().map(|key| key.strip_prefix("optimizer.").unwrap_or(key).to_owned());
    let head = head.map(|key| if key == "name" { "recipe".to_owned() } else { key });
    let results =
        ["runs".to_owned(), format!("best {readable}{percent}"), format!("last {readable}{percent}")];
    let chosen =
        cells.iter().any(|cell| cell.select == "val").then(|| format!("{readable} at best val{percent}"));
    type Count = fn(&Cell) -> usize;
    let troubles: [(&str, Count); 2] = [("diverged", |c| c.diverged), ("failed", |c| c.failed)];
    let troubles: Vec<_> = troubles.into_iter().filter(|(_, of)| cells.iter().any(|c| of(c) > 0)).collect();
    let mut table = Table::new(
        head.chain(results).chain(chosen.clone()).chain(troubles.iter().map(|(name, _)| (*name).to_owned())),
    );
    for cell in cells {
        let value = |interval: Option<Interval>| match (interval, &cell.metric) {
            (Some(interval), Some(metric)) => mean_text(metric, &interval),
            _ => "-".to_owned(),
        };
        let settings = keys.iter().map(|key| match key.as_str() {
            "name" => cell.name.clone(),
            "optimizer.name" => cell.optimizer.clone(),
            // What the sweep set for other rows only is what the recipe says here.
            key => match cell.settings.get(key) {
                Some(value) => text(value),
                None => cell.resolved.get(key).cloned().unwrap_or_default(),
            },
        });
        let count = format!("{}/{}", cell.finished, cell.runs.len());
        let selected = chosen.is_some().then(|| value(cell.selected));
        let results = [count, value(cell.best), value(cell.last)].into_iter().chain(selected);
        table.row(settings.chain(results).chain(troubles.iter().map(|(_, of)| of(cell).to_string())));
    }
    let mut out = table.markdown();
    if cells.iter().any(|cell| cell.runs.len() > 1) {
        out +=
            "Means over the seeds that finished, ± half the width of Student's 95 % confidence interval.\n";
    }
    for unequal in unequal(cells.iter().map(|cell| (cell.optimizer.as_str(), &cell.resolved))) {
        out += &format!("Not equal between optimizers: {unequal}.\n");
    }
    if cells.iter().any(|cell| cell.select == "test") {
        out += "The best epoch was chosen on the test set, as in the paper: an optimistic figure.\n";
    } else if cells.iter().any(|cell| cell.metric.as_deref().is_some_and(|m| m.starts_with("test."))) {
        out += "The column of best epochs looks at the test set to choose: an optimistic figure.\n";
    }
    out
}

/// The keys that tell the cells apart, in the order of their sweep.
fn columns(cells: &[Cell]) -> Vec<String> {
    let mut keys: Vec<String> = Vec::new();
    let differ = |of: &dyn Fn(&Cell) -> &str| cells.iter().any(|cell| of(cell) != of(&cells[0]));
    if differ(&|cell| &cell.optimizer) {
        keys.push("optimizer.name".to_owned());
    }
    for key in cells.iter().flat_map(|cell| cell.settings.keys()) {
        if !keys.contains(key) && !matches!(key.as_str(), "optimizer.name" | "name") {
            keys.push(key.clone());
        }
    }
    let row = |cell: &Cell| {
        let values = keys.iter().map(|key| cell.settings.get(key).map(text)).collect::<Vec<_>>();
        (cell.optimizer.clone(), values)
    };
    let rows: HashSet<_> = cells.iter().map(row).collect();
    if rows.len() < cells.len() || keys.is_empty() {
        keys.insert(0, "name".to_owned());
    }
    keys
}
