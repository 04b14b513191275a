//! Runs that differ only in their seed form a group; groups that learn the same with the same network form a task.
use super::load::{Clock, Run};
use super::subject::SUBJECT;
use serde_json::Value;
use std::collections::BTreeMap;
use taper_figures::plot::told_apart;
use taper_figures::stats::{self, Better, Interval};
use taper_train::recipe::Recipe;
use taper_train::run::{Split, Status};
use taper_train::sweep::settings::{Unequal, settings, shown, unequal};

/// Runs of one recipe but for the seed.
#[derive(Clone, Debug)]
pub struct Group {
    /// What tells it from the others of its task: the optimizer, and as much else as it takes.
    pub label: String,
    /// The optimizer.
    pub optimizer: String,
    /// Its look in all pictures.
    pub style: usize,
    /// By seed.
    pub runs: Vec<Run>,
}

/// What was learnt, by what: the groups that can be compared.
#[derive(Clone, Debug)]
pub struct Task {
    /// The data set, or the function.
    pub data: String,
    /// The network; empty for a function.
    pub model: String,
    /// What it is judged by.
    pub metric: String,
    /// The groups, baselines as in the paper's tables first.
    pub groups: Vec<Group>,
}

/// Which value of a run counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The best on the test set itself, as in the paper: an optimistic figure.
    BestOnTest,
    /// The last.
    Last,
    /// The test value of the evaluation that was best on the validation set.
    Validated,
}

impl Choice {
    /// All, as the columns of a table have them.
    pub const ALL: [Self; 3] = [Self::BestOnTest, Self::Last, Self::Validated];

    /// Its name in data.
    pub fn name(self) -> &'static str {
        match self {
            Self::BestOnTest => "best_on_test",
            Self::Last => "last",
            Self::Validated => "validation",
        }
    }

    /// The value of a run, and the time it is of, by the run's clock.
    pub fn of(self, run: &Run) -> Option<(f64, u64)> {
        let better = Better::of(&run.metric);
        let mut values = run.values(run.split(), &run.metric);
        let (value, at) = match self {
            Self::BestOnTest => values.reduce(|old, new| if better.than(new.1, old.1) { new } else { old }),
            Self::Last => values.next_back(),
            Self::Validated => {
                let best = run.values(Split::Val, &run.metric);
                let (chosen, _) =
                    best.reduce(|old, new| if better.than(new.1, old.1) { new } else { old })?;
                values.find(|(record, _)| record.step == chosen.step)
            }
        }
        .map(|(record, value)| (value, run.time(record)))?;
        Some((value, at))
    }
}

impl Group {
    /// Runs that came to their end, which the means are over.
    pub fn finished(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(|run| run.status == Status::Finished)
    }

    /// The values of the finished runs, by seed.
    pub fn values(&self, choice: Choice) -> Vec<(u64, f64)> {
        let value = |run: &Run| Some((run.recipe.seed, choice.of(run)?.0));
        self.finished().filter_map(value).filter(|(_, value)| value.is_finite()).collect()
    }

    /// Their mean with its 95 % interval (Student's t).
    pub fn estimate(&self, choice: Choice) -> Option<Interval> {
        let values: Vec<f64> = self.values(choice).into_iter().map(|(_, value)| value).collect();
        stats::student(&values, 0.95)
    }

    /// What became of the runs that did not finish, for the eye: `1 of 3 diverged`.
    pub fn losses(&self) -> String {
        let count = |status: Status| self.runs.iter().filter(|run| run.status == status).count();
        let all = self.runs.len();
        let part = |status: Status, what: &str| match count(status) {
            0 => None,
            n if n == all => Some(what.to_owned()),
            n => Some(format!("{n} of {all} {what}")),
        };
        let without = self.finished().count() - self.values(Choice::Last).len();
        let without = (without > 0).then(|| format!("{without} of {all} without a value"));
        let parts = [part(Status::Diverged, "diverged"), part(Status::Interrupted, "interrupted"), without];
        parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// The settings of its first run.
    pub fn recipe(&self) -> Option<&Recipe> {
        self.runs.first().map(|run| &run.recipe)
    }
}

impl Task {
    /// Its name.
    pub fn title(&self) -> String {
        if self.model.is_empty() { self.data.clone() } else { format!("{} on {}", self.model, self.data) }
    }

    /// What its metric is multiplied by for the eye.
    pub fn factor(&self) -> f64 {
        if self.metric == "accuracy" { 100.0 } else { 1.0 }
    }

    /// The metric with its unit.
    pub fn unit(&self) -> String {
        match (self.metric.as_str(), self.model.is_empty()) {
            ("accuracy", _) => "test accuracy, %".into(),
            (metric, true) => metric.to_owned(),
            (metric, false) => format!("test {metric}"),
        }
    }

    /// What its curves count in, one for all of its runs.
    pub fn clock(&self) -> &'static str {
        self.time().name()
    }

    /// The same as its runs have it: steps as soon as one of them was evaluated by steps, since all records have a step.
    pub(crate) fn time(&self) -> Clock {
        self.groups.iter().flat_map(|g| &g.runs).map(|run| run.clock).max().unwrap_or(Clock::Epoch)
    }

    /// Where its optimizers were not given the same.
    pub fn unequal(&self) -> Vec<Unequal> {
        let of = |group: &Group| Some((group.optimizer.clone(), settings(group.recipe()?)));
        let all: Vec<(String, BTreeMap<String, String>)> = self.groups.iter().filter_map(of).collect();
        unequal(all.iter().map(|(optimizer, settings)| (optimizer.as_str(), settings)))
    }

    /// Whether it is a function's.
    pub fn is_problem(&self) -> bool {
        self.groups.iter().flat_map(|g| &g.runs).any(Run::is_problem)
    }
}

/// Sorts runs, each seed of a configuration once, into tasks and groups.
pub fn tasks(runs: &[Run]) -> Vec<Task> {
    let mut sorted: BTreeMap<(String, String, String), BTreeMap<String, Vec<Run>>> = BTreeMap::new();
    for run in runs {
        let (data, model) = names(&run.recipe);
        let groups = sorted.entry((data, model, run.metric.clone())).or_default();
        let key = settings(&run.recipe).into_iter().map(|(k, v)| format!("{k}={v}\n")).collect::<String>();
        groups.entry(key).or_default().push(run.clone());
    }
    let mut tasks: Vec<Task> = sorted
        .into_iter()
        .map(|((data, model, metric), groups)| Task { data, model, metric, groups: labelled(groups) })
        .collect();
    for task in &mut tasks {
        let clock = task.time();
        task.groups.iter_mut().flat_map(|group| &mut group.runs).for_each(|run| run.clock = clock);
    }
    // One look a label on the whole page.
    let mut labels: Vec<String> = Vec::new();
    for group in tasks.iter_mut().flat_map(|task| &mut task.groups) {
        if !labels.contains(&group.label) {
            labels.push(group.label.clone());
        }
    }
    // The subject has the first look; the others follow in their order.
    labels.sort_by_key(|label| !SUBJECT.names(label));
    for group in tasks.iter_mut().flat_map(|task| &mut task.groups) {
        group.style = labels.iter().position(|label| *label == group.label).unwrap_or(0);
    }
    tasks
}

/// The data set and the network, or the function and nothing.
fn names(recipe: &Recipe) -> (String, String) {
    match (&recipe.problem, &recipe.data, &recipe.model) {
        (Some(problem), ..) => {
            let variant = problem.config.get("variant").and_then(Value::as_str).filter(|v| *v != "paper");
            (
                variant.map_or(problem.name.clone(), |variant| format!("{} ({variant})", problem.name)),
                String::new(),
            )
        }
        (_, Some(data), model) => {
            (data.name.clone(), model.as_ref().map_or(String::new(), |m| m.name.clone()))
        }
        _ => ("unknown".into(), String::new()),
    }
}

/// The numbers that some configurations have for a key, by their exact text: rounded for people, but told apart.
fn texts(peers: &[&BTreeMap<String, String>], key: &str) -> BTreeMap<String, String> {
    let exact: Vec<&String> = peers.iter().filter_map(|peer| peer.get(key)).collect();
    let numbers: Option<Vec<f64>> = exact.iter().map(|text| text.parse().ok()).collect();
    let numbers = numbers.unwrap_or_default();
    exact.into_iter().cloned().zip(told_apart(&numbers)).collect()
}

/// Groups with labels, in order: by optimizer, then by what else differs.
fn labelled(groups: BTreeMap<String, Vec<Run>>) -> Vec<Group> {
    let mut out: Vec<Group> = Vec::new();
    for (_, mut runs) in groups {
        runs.sort_by_key(|run| run.recipe.seed);
        let optimizer = runs.first().map_or(String::new(), |run| run.recipe.optimizer.name.clone());
        out.push(Group { label: String::new(), optimizer, style: 0, runs });
    }
    let all: Vec<(String, BTreeMap<String, String>)> = out
        .iter()
        .map(|group| (group.optimizer.clone(), group.recipe().map(settings).unwrap_or_default()))
        .collect();
    for (group, (optimizer, own)) in out.iter_mut().zip(&all) {
        let peers: Vec<_> = all.iter().filter(|(other, _)| other == optimizer).map(|(_, s)| s).collect();
        let differs = |key: &str| peers.iter().any(|peer| peer.get(key) != own.get(key));
        // Keys that only a peer has count as well: `freeze_v` may be a default that one of two recipes leaves out.
        let keys: std::collections::BTreeSet<&String> = peers.iter().flat_map(|peer| peer.keys()).collect();
        let mut parts: Vec<(u8, String)> = Vec::new();
        for key in keys.into_iter().filter(|key| differs(key)) {
            let short = key.strip_prefix("optimizer.").unwrap_or(key);
            let texts = texts(&peers, key);
            let exact = shown(own, key);
            let text = match texts.get(&exact).unwrap_or(&exact).as_str() {
                // What is off needs no word.
                "false" => continue,
                "true" => short.to_owned(),
                value => format!("{short}={value}"),
            };
            // The optimizer's own settings first.
            parts.push((u8::from(short.len() == key.len()), text));
        }
        parts.sort();
        let parts: String = parts.into_iter().map(|(_, part)| format!(" {part}")).collect();
        group.label = format!("{optimizer}{parts}");
    }
    let number = |label: &str| {
        let value = label.split('=').next_back().and_then(|v| v.parse::<f64>().ok());
        value.unwrap_or(f64::NAN)
    };
    let rank = |name: &str| SUBJECT.rank(name);
    out.sort_by(|a, b| {
        (rank(&a.optimizer), &a.optimizer)
            .cmp(&(rank(&b.optimizer), &b.optimizer))
            .then(number(&a.label).total_cmp(&number(&b.label)))
            .then_with(|| a.label.cmp(&b.label))
    });
    out
}
