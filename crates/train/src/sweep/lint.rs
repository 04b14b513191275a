//! What makes a comparison less fair than it looks. Findings, not errors: each says what to do.
use super::Cell;
use super::settings::{Unequal, settings, unequal};
use crate::Recipe;
use crate::recipe::Select;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use taper_figures::stats::least_pairs;

/// One reason for doubt.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "finding", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Finding {
    /// Optimizers were tried at different numbers of settings.
    UnequalBudgets {
        /// Configurations by optimizer.
        configurations: BTreeMap<String, usize>,
    },
    /// Optimizers were not given the same: longer training, other data, another schedule.
    UnequalSettings(Unequal),
    /// The best of a grid lies at its end: a better one may lie beyond.
    EdgeOfGrid {
        /// The optimizer.
        optimizer: String,
        /// The setting.
        key: String,
        /// Its best value.
        value: f64,
        /// Whether that is the largest; if not, the smallest.
        largest: bool,
    },
    /// The settings of an optimizer would be chosen and reported on the same seeds.
    SameSeeds {
        /// The optimizer with most configurations.
        optimizer: String,
        /// How many it has.
        configurations: usize,
    },
    /// The test set chooses the epoch.
    SelectedOnTest {
        /// How many of the runs.
        runs: usize,
        /// Of how many.
        of: usize,
    },
    /// With so few paired seeds no difference can be shown.
    TooFewSeeds {
        /// Seeds that all configurations share.
        seeds: usize,
        /// Seeds that could show one.
        need: usize,
        /// Comparisons they are needed for.
        comparisons: usize,
    },
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnequalBudgets { configurations } => {
                let counts: Vec<String> =
                    configurations.iter().map(|(name, count)| format!("{name} {count}")).collect();
                write!(
                    f,
                    "unequal tuning budgets: configurations by optimizer are {}; the one with more tries finds more. Give \
                     each as many, or compare the expected best of as many tries",
                    counts.join(", ")
                )
            }
            Self::UnequalSettings(unequal) => {
                write!(
                    f,
                    "{unequal}: what differs then is not the optimizer's alone. Give all the same, or say it beside the result"
                )
            }
            Self::EdgeOfGrid { optimizer, key, value, largest } => {
                let (which, beyond) = if *largest { ("largest", "above") } else { ("smallest", "below") };
                write!(
                    f,
                    "{optimizer}: the best {key} is {value}, the {which} of its grid: a better one may lie beyond. Add values \
                     {beyond} it to the sweep; what is there already is not run again"
                )
            }
            Self::SameSeeds { optimizer, configurations } => write!(
                f,
                "tuning and reporting on the same seeds: the best of {configurations} configurations of {optimizer} looks better \
                 than it is on the seeds that chose it. Run the winner again on fresh ones (`sweep.confirm: […]`) and report those"
            ),
            Self::SelectedOnTest { runs, of } => write!(
                f,
                "the test set chooses the epoch in {runs} of {of} runs, as in the paper: optimistic. Set `data.val: 5000` and \
                 `train.select: val` for a figure that will hold"
            ),
            Self::TooFewSeeds { seeds, need, comparisons } => {
                let s = if *comparisons == 1 { "" } else { "s" };
                write!(
                    f,
                    "{seeds} paired seeds cannot show a difference at the 5 % level, whatever the results: {comparisons} \
                     comparison{s} need at least {need}. Give that many, or claim none"
                )
            }
        }
    }
}

/// The level at which differences are to be shown.
const ALPHA: f64 = 0.05;

/// What the recipes alone show, before anything was trained.
pub fn recipes(recipes: &[Recipe]) -> Vec<Finding> {
    let runs: Vec<&Recipe> = recipes.iter().flat_map(Recipe::runs).collect();
    // Seeds by configuration, configurations by optimizer.
    let mut optimizers: BTreeMap<&str, BTreeMap<String, BTreeSet<u64>>> = BTreeMap::new();
    for run in &runs {
        let configurations = optimizers.entry(&run.optimizer.name).or_default();
        configurations.entry(run.configuration()).or_default().insert(run.seed);
    }
    let mut findings = Vec::new();
    let counts: BTreeMap<String, usize> =
        optimizers.iter().map(|(name, of)| ((*name).to_owned(), of.len())).collect();
    if counts.values().collect::<BTreeSet<_>>().len() > 1 {
        findings.push(Finding::UnequalBudgets { configurations: counts.clone() });
    }
    let given: Vec<_> = runs.iter().map(|run| (run.optimizer.name.as_str(), settings(run))).collect();
    let given = unequal(given.iter().map(|(optimizer, settings)| (*optimizer, settings)));
    findings.extend(given.into_iter().map(Finding::UnequalSettings));
    // Where fresh seeds confirm, what is reported is on these.
    let fresh: BTreeSet<u64> = recipes.iter().flat_map(Recipe::confirming).map(|run| run.seed).collect();
    let reused =
        optimizers.iter().filter(|(_, configurations)| fresh.is_empty() && same_seeds(configurations));
    if let Some((name, configurations)) = reused.max_by_key(|(_, configurations)| configurations.len()) {
        let (optimizer, configurations) = ((*name).to_owned(), configurations.len());
        findings.push(Finding::SameSeeds { optimizer, configurations });
    }
    let on_test = runs.iter().filter(|run| run.train.select == Select::Test).count();
    if on_test > 0 {
        findings.push(Finding::SelectedOnTest { runs: on_test, of: runs.len() });
    }
    let all: usize = counts.values().sum();
    // Optimizers are compared with one of them; the settings of a single one likewise.
    let comparisons = if counts.len() > 1 { counts.len() - 1 } else { all.saturating_sub(1) };
    let shared = optimizers.values().flat_map(BTreeMap::values).cloned().reduce(|a, b| &a & &b);
    let seeds = if fresh.is_empty() { shared.map_or(0, |seeds| seeds.len()) } else { fresh.len() };
    let need = least_pairs(ALPHA, comparisons);
    if comparisons > 0 && seeds < need {
        findings.push(Finding::TooFewSeeds { seeds, need, comparisons });
    }
    findings
}

/// Whether an optimizer has several configurations and none of them a seed that the choice among them does not use.
fn same_seeds(configurations: &BTreeMap<String, BTreeSet<u64>>) -> bool {
    let mut uses: BTreeMap<u64, usize> = BTreeMap::new();
    for seed in configurations.values().flatten() {
        *uses.entry(*seed).or_default() += 1;
    }
    configurations.len() > 1 && uses.values().all(|configurations| *configurations > 1)
}

/// What the results show: the best configuration of each optimizer at the end of its grid. An end is one only among at
/// least three numbers.
pub fn results(cells: &[Cell]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let optimizers: BTreeSet<&str> = cells.iter().map(|cell| cell.optimizer.as_str()).collect();
    for optimizer in optimizers {
        let cells: Vec<&Cell> = cells.iter().filter(|cell| cell.optimizer == optimizer).collect();
        let score = |cell: &Cell| cell.selected.or(cell.last).map(|interval| interval.mean);
        let best = cells
            .iter()
            .filter_map(|cell| Some((*cell, score(cell)?)))
            .reduce(|a, b| if a.0.better().than(b.1, a.1) { b } else { a });
        let Some((best, _)) = best else { continue };
        for (key, value) in &best.settings {
            let Some(value) = value.as_f64() else { continue };
            let mut grid: Vec<f64> =
                cells.iter().filter_map(|cell| cell.settings.get(key).and_then(Value::as_f64)).collect();
            grid.sort_unstable_by(f64::total_cmp);
            grid.dedup();
            let [smallest, _, .., largest] = grid[..] else { continue };
            if value == smallest || value == largest {
                let (optimizer, key, largest) = (optimizer.to_owned(), key.clone(), value == largest);
                findings.push(Finding::EdgeOfGrid { optimizer, key, value, largest });
            }
        }
    }
    findings
}
