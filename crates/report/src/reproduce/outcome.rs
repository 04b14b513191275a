//! What became of the cells, as tables.
use super::cell::{Cell, Reduction, Scale};
use super::claim::{Checked, check};
use super::numeric::Numeric;
use super::verdict::{Expected, Found, Measured, Part, Range, Verdict, judge};
use super::{Published, Target};
use crate::subject::SUBJECT;
use crate::{Block, Choice, Document, Extent, Group, Run, Runs, Section};
use serde_json::{Value, json};
use taper_figures::stats::{self, Better, Interval};
use taper_figures::table::{Table, mean_text};
use taper_train::Recipe;
use taper_train::run::Status;
use taper_train::sweep::{State, Sweep};

/// A cell with its results.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The cell.
    pub cell: Cell,
    /// Its runs that left something to read.
    pub runs: Group,
    /// Its runs with a validation set; empty where `runs` have one.
    pub validated: Group,
    /// The verdict.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
    /// What the data lacks, or why that is not known.
    pub subset: Option<String>,
}

impl Outcome {
    /// A mean over its seeds.
    pub fn estimate(&self, choice: Choice) -> Option<Interval> {
        match choice {
            Choice::Validated if !self.validated.runs.is_empty() => self.validated.estimate(choice),
            choice => self.runs.estimate(choice),
        }
    }

    /// The metric.
    pub fn metric(&self) -> &str {
        self.runs.runs.first().map_or("accuracy", |run| run.metric.as_str())
    }

    /// What seeds that diverged say: the published run did not.
    pub(super) fn divergence(&self) -> Option<Measured> {
        let diverged = self.runs.runs.iter().filter(|run| run.status == Status::Diverged).count();
        match (diverged, self.cell.runs.len()) {
            (0, _) => None,
            (n, seeds) if n == seeds => Some(Measured::Against(format!("all {n} diverged"))),
            (n, seeds) => Some(Measured::Open(format!("{n} of {seeds} diverged"))),
        }
    }

    /// The cell as one JSON object.
    pub fn json(&self, scale: Scale) -> Value {
        let estimate = |choice: Choice| {
            let found = self.estimate(choice)?;
            let finite = |value: f64| Some(value).filter(|value| value.is_finite());
            Some(
                json!({"mean": found.mean, "low": finite(found.low), "high": finite(found.high), "n": found.n}),
            )
        };
        let published = match self.cell.expected {
            Expected::Value { published, .. } => Some(published),
            Expected::AtLeast(_) | Expected::Near { .. } => None,
        };
        json!({
            "target": self.cell.target,
            "row": self.cell.row,
            "column": self.cell.column,
            "scale": scale,
            "metric": self.metric(),
            "published": published,
            "seeds": self.cell.runs.iter().map(|run| run.seed).collect::<Vec<_>>(),
            "best_on_test": estimate(Choice::BestOnTest),
            "last": estimate(Choice::Last),
            "validation": estimate(Choice::Validated),
            "verdict": self.verdict,
            "reason": self.reason,
            "reductions": self.cell.reductions,
            "subset": self.subset,
            "runs": self.cell.runs.iter().map(Recipe::id).collect::<Vec<_>>(),
        })
    }
}

/// What the runs of some recipes left, and why some left nothing.
pub(super) fn read(recipes: &[Recipe], sweep: &Sweep, problems: &mut Vec<String>) -> (Vec<Run>, Vec<String>) {
    let (mut runs, mut failures) = (Vec::new(), Vec::new());
    for recipe in recipes {
        let Some(tried) = sweep.runs().iter().find(|run| run.recipe.id() == recipe.id()) else { continue };
        if let State::Failed(message) = &tried.state {
            let message = brief(message, recipe);
            if !failures.contains(&message) {
                failures.push(message);
            }
        }
        if tried.folder.join("metrics.jsonl").is_file() {
            match crate::read(&tried.folder, problems) {
                Ok(run) => runs.push(run),
                Err(problem) => problems.push(problem),
            }
        }
    }
    (runs, failures)
}

/// The first line of a failure, for a cell of a table; for missing data, what to do about it.
fn brief(message: &str, recipe: &Recipe) -> String {
    let line = message.lines().next().unwrap_or_default().trim_start_matches("error: ");
    match &recipe.data {
        Some(data) if line.contains("was not found") => {
            format!("no data: `data fetch {0}` gets it, or --data with a folder that holds {0}", data.name)
        }
        _ => line.to_owned(),
    }
}

/// Reads the runs of the cells and judges them.
pub fn outcomes(cells: Vec<Cell>, sweep: &Sweep, problems: &mut Vec<String>) -> Vec<Outcome> {
    let mut out: Vec<Outcome> = Vec::new();
    for cell in cells {
        let mut group = |recipes: &[Recipe]| {
            let (runs, failures) = read(recipes, sweep, problems);
            let optimizer = recipes.first().map_or(String::new(), |recipe| recipe.optimizer.name.clone());
            (Group { label: cell.column.clone(), optimizer, style: 0, runs }, failures.join("; "))
        };
        let ((runs, reason), (validated, _)) = (group(&cell.runs), group(&cell.validated));
        let subset = runs.runs.iter().find_map(|run| match &run.extent {
            Extent::Whole => None,
            Extent::Part(part) => Some(part.clone()),
            Extent::Unknown(why) => Some(format!("not known: {why}")),
        });
        out.push(Outcome { cell, runs, validated, verdict: Verdict::NotRun, reason, subset });
    }
    let judged: Vec<(Verdict, String)> = out.iter().map(|o| judge(&found(o), &parts(o, &out))).collect();
    for (outcome, (verdict, reason)) in out.iter_mut().zip(judged) {
        (outcome.verdict, outcome.reason) = (verdict, reason);
    }
    out
}

/// What a cell is held against, as statements on means.
pub(super) fn parts(outcome: &Outcome, all: &[Outcome]) -> Vec<Part> {
    let own = |claimed: Range| {
        let found = match (outcome.divergence(), outcome.estimate(Choice::BestOnTest)) {
            (Some(divergence), _) => divergence,
            (None, Some(mean)) => Measured::Mean(in_unit(mean, outcome.metric())),
            (None, None) => Measured::Open("no seed finished".into()),
        };
        vec![Part { name: outcome.cell.column.clone(), found, claimed }]
    };
    match outcome.cell.expected {
        Expected::Value { published, tolerance } => own(Range::around(published, tolerance)),
        Expected::AtLeast(bound) => own(Range::at_least(bound)),
        // Within so much of the best is at most so much behind any: no matter which of them is the best.
        Expected::Near { within } => {
            let cell = &outcome.cell;
            let same = all.iter().filter(|o| o.cell.target == cell.target && o.cell.row == cell.row);
            let others = same.filter(|other| other.cell.column != cell.column);
            others.map(|other| difference(other, outcome, Range::at_most(within))).collect()
        }
    }
}

/// By how much one cell is ahead of another, on the seeds that both have.
pub(super) fn difference(one: &Outcome, other: &Outcome, claimed: Range) -> Part {
    let sign = if Better::of(one.metric()) == Better::Higher { 1.0 } else { -1.0 };
    let factor = sign * if one.metric() == "accuracy" { 100.0 } else { 1.0 };
    let values = |outcome: &Outcome| outcome.runs.values(Choice::BestOnTest);
    let differences: Vec<f64> =
        stats::paired(&values(one), &values(other)).iter().map(|d| factor * d).collect();
    let diverged = one.divergence().or_else(|| other.divergence());
    let found = match (diverged, stats::student(&differences, 0.95)) {
        // Whatever diverged, the difference of those that did not is not the whole of it.
        (Some(Measured::Against(why) | Measured::Open(why)), _) => Measured::Open(why),
        (_, Some(mean)) => Measured::Mean(mean),
        (_, None) => Measured::Open("no seed that both have".into()),
    };
    Part { name: format!("{} − {}", one.cell.column, other.cell.column), found, claimed }
}

/// A value in the unit of the paper's tables.
pub(super) fn in_unit(estimate: Interval, metric: &str) -> Interval {
    let factor = if metric == "accuracy" { 100.0 } else { 1.0 };
    let Interval { n, mean, std, low, high } = estimate;
    Interval { n, mean: factor * mean, std: factor * std, low: factor * low, high: factor * high }
}

fn found(outcome: &Outcome) -> Found {
    let count = |status: Status| outcome.runs.runs.iter().filter(|run| run.status == status).count();
    let interrupted = count(Status::Interrupted);
    let unfinished =
        (interrupted > 0).then(|| format!("{interrupted} of {} interrupted", outcome.cell.runs.len()));
    let subset = outcome.subset.as_ref().map(|subset| match subset.strip_prefix("not known: ") {
        Some(why) => format!("not known whether it is the whole data set: {why}"),
        None => "not the whole data set".into(),
    });
    Found {
        finished: outcome.runs.values(Choice::BestOnTest).len(),
        seeds: outcome.cell.runs.len(),
        diverged: count(Status::Diverged),
        failure: Some(outcome.reason.clone()).filter(|text| !text.is_empty()).or(unfinished),
        reduced: !outcome.cell.reductions.is_empty(),
        data: subset,
    }
}

/// The runs of the controls, as far as they left something.
pub fn controls(recipes: &[Recipe], sweep: &Sweep, problems: &mut Vec<String>) -> Vec<Run> {
    read(recipes, sweep, problems).0
}

/// The report: for every target its table and claims, then curves and recipes of all runs.
pub fn document(
    scale: Scale,
    published: &Published,
    outcomes: &[Outcome],
    numeric: Option<&Numeric>,
    controls: &[Run],
    problems: &[String],
) -> Document {
    let title = match scale {
        Scale::Paper => format!("{}'s experiments, as published and as rerun", SUBJECT.title),
        Scale::Cpu => format!("{}'s experiments at reduced scale", SUBJECT.title),
    };
    let mut document = Document { title, data: data(outcomes, scale), ..Document::default() };
    if let Some(numeric) = numeric {
        let mut blocks = numeric.blocks.clone();
        blocks.insert(0, Block::Table(claims_table(&numeric.checked.iter().collect::<Vec<_>>())));
        document.sections.push(Section::new(section_title(Target::Numeric), blocks));
    }
    let checked = check(published, outcomes);
    for target in Target::ALL {
        let of: Vec<&Outcome> = outcomes.iter().filter(|o| o.cell.target == target).collect();
        if of.is_empty() {
            continue;
        }
        let mut blocks = vec![Block::Table(cells_table(target, published, &of))];
        let claims: Vec<&Checked> = checked.iter().filter(|c| c.target == target).collect();
        if !claims.is_empty() {
            blocks.push(Block::Table(claims_table(&claims)));
        }
        document.sections.push(Section::new(section_title(target), blocks));
    }
    // Runs with a validation set serve one column of the tables; beside the others they would only double every line.
    let (own, validated) = (outcomes.iter().map(|o| &o.runs), outcomes.iter().map(|o| &o.validated));
    let mut problems = problems.to_vec();
    let all = numeric.iter().flat_map(|n| &n.runs).chain(own.flat_map(|g| &g.runs)).chain(controls);
    // A control may be a cell's own run: that is one run, not one left out.
    let mut all: Vec<Run> = all.cloned().collect();
    let mut seen = std::collections::BTreeSet::new();
    all.retain(|run| seen.insert((run.folder.clone(), run.recipe.id().to_owned())));
    let runs = Runs { runs: crate::once(all, &mut problems), problems };
    document.sections.extend(crate::sections(&crate::tasks(&runs.runs), &runs));
    let validated: Vec<Run> = validated.flat_map(|g| &g.runs).cloned().collect();
    if !validated.is_empty() {
        let recipes = crate::recipes(&crate::tasks(&validated));
        document.sections.push(Section::new("Runs with a validation set", recipes));
    }
    document
}

fn section_title(target: Target) -> &'static str {
    match target {
        Target::Numeric => "Numeric experiments",
        Target::Mnist => "MLP on MNIST",
        Target::Cifar10 => "CIFAR-10",
        Target::Cifar100 => "CIFAR-100",
        Target::CRobustness => "Robustness to c",
        Target::Ptb => "Penn Treebank",
    }
}

fn cells_table(target: Target, published: &Published, outcomes: &[&Outcome]) -> Table {
    let caption = match published.tables.get(target.name()) {
        Some(table) => table.title.clone(),
        None => published.claims_of(target).next().map_or(String::new(), |claim| claim.says.clone()),
    };
    let head = [
        "network",
        "optimizer",
        "runs",
        "best on test",
        "last",
        "chosen on validation",
        "published",
        "verdict",
        "because",
    ];
    let mut table = Table::new(head).text(&["optimizer", "verdict", "because"]).caption(caption);
    for outcome in outcomes {
        let estimate =
            |choice| outcome.estimate(choice).map_or("–".into(), |e| mean_text(outcome.metric(), &e));
        let expected = match outcome.cell.expected {
            Expected::Value { published, .. } => format!("{published:.2}"),
            Expected::AtLeast(bound) => format!("≥ {bound:.2}"),
            Expected::Near { within } => format!("within {within:.2} of the best"),
        };
        table.row([
            outcome.cell.row.clone(),
            outcome.cell.column.clone(),
            format!("{}/{}", outcome.runs.finished().count(), outcome.cell.runs.len()),
            estimate(Choice::BestOnTest),
            estimate(Choice::Last),
            estimate(Choice::Validated),
            expected,
            outcome.verdict.to_string(),
            outcome.reason.clone(),
        ]);
    }
    table.note(
        "Means over the seeds that finished, ± half the width of Student's 95 % confidence interval; runs: finished of all.",
    );
    table.note(
        "Best on test is what the paper publishes: the epoch was chosen by the test set itself, which makes it an \
         optimistic figure. The verdict is on it.",
    );
    if outcomes.iter().any(|o| o.estimate(Choice::Validated).is_none() && o.estimate(Choice::Last).is_some())
    {
        table.note("–: the paper's recipe has no validation set, and the runs with one were left out (--bare) or did not finish.");
    }
    if outcomes.iter().any(|o| !o.validated.runs.is_empty()) {
        table.note("Chosen on validation: other runs of the same recipe, with a tenth of the training set put aside.");
    }
    table.note("How verdicts are given: docs/verdicts.md.");
    crate::extents(&mut table, outcomes.iter().flat_map(|o| &o.runs.runs));
    reduction_notes(&mut table, outcomes);
    table
}

/// The reductions, each once: those of all cells without a name, the others with the rows they concern.
fn reduction_notes(table: &mut Table, outcomes: &[&Outcome]) {
    let mut seen: Vec<(&Reduction, Vec<&str>)> = Vec::new();
    for outcome in outcomes {
        for reduction in &outcome.cell.reductions {
            match seen.iter_mut().find(|(other, _)| *other == reduction) {
                Some((_, rows)) => rows.push(&outcome.cell.row),
                None => seen.push((reduction, vec![&outcome.cell.row])),
            }
        }
    }
    for (Reduction { setting, paper, ours }, rows) in seen {
        let mut names = rows.clone();
        names.dedup();
        let whose =
            if rows.len() == outcomes.len() { String::new() } else { format!(" ({})", names.join(", ")) };
        table.note(format!("Reduced{whose}: {setting} is {ours}, in the paper {paper}."));
    }
}

pub(super) fn claims_table(claims: &[&Checked]) -> Table {
    let mut table = Table::new(["claim", "verdict", "because"])
        .text(&["verdict", "because"])
        .caption("Claims of the text");
    for claim in claims {
        table.row([claim.says.clone(), claim.verdict.to_string(), claim.reason.clone()]);
    }
    table
}

/// Every cell, unrounded.
fn data(outcomes: &[Outcome], scale: Scale) -> Table {
    let head =
        "target,network,optimizer,scale,choice,seeds,finished,mean,low,high,published,verdict,reason,ids";
    let mut table = Table::new(head.split(','));
    for outcome in outcomes {
        for choice in Choice::ALL {
            let estimate = outcome.estimate(choice);
            let number = |of: fn(&Interval) -> f64| {
                let value = estimate.as_ref().map(of).filter(|value| value.is_finite());
                value.map_or(String::new(), |value| value.to_string())
            };
            let published = match outcome.cell.expected {
                Expected::Value { published, .. } => published.to_string(),
                _ => String::new(),
            };
            let ids: Vec<&str> = outcome.cell.runs.iter().map(Recipe::id).collect();
            table.row([
                outcome.cell.target.name().into(),
                outcome.cell.row.clone(),
                outcome.cell.column.clone(),
                scale.name().into(),
                choice.name().into(),
                outcome.cell.runs.len().to_string(),
                outcome.runs.finished().count().to_string(),
                number(|e| e.mean),
                number(|e| e.low),
                number(|e| e.high),
                published,
                outcome.verdict.to_string(),
                outcome.reason.clone(),
                ids.join(" "),
            ]);
        }
    }
    table
}
