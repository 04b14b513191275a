//! What a set of run folders shows: tables and pictures as one page of HTML, Markdown, LaTeX, CSV, SVG or PNG, and
//! [reproductions](reproduce) of published tables with a verdict on every number.
//!
//! It reads folders through [`taper_train::run`] and never trains, and it draws through [`taper_figures`].
//!
//! ```
//! use taper_report::Form;
//! let runs = taper_report::Runs::default();
//! let page = taper_report::document("Nothing yet", &runs).render(Form::Markdown)?;
//! assert!(page.starts_with(b"# Nothing yet"));
//! // taper_report::load(&["runs".into()])? reads folders.
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Runs that differ only in their seed are one row and one line; means are over the runs that finished, with Student's
//! 95 % interval, the only one with a meaning for two or three seeds. Runs that diverged or were interrupted are counted
//! and drawn, not dropped. A report depends on the runs alone: no dates, no paths, no order of folders.
mod curves;
mod document;
pub mod explain;
mod group;
mod html;
mod load;
mod probe;
pub mod reproduce;
mod sensitivity;
mod statistics;
mod subject;

pub use document::{Block, Document, Figure, Form, Panel, Section, View};
pub use group::{Choice, Group, Task, tasks};
pub use html::{SCRIPT, STYLE};
pub use load::{Clock, Extent, ReportError, Run, Runs, about, load, once, read};

use taper_figures::stats::Interval;
use taper_figures::table::{Table, amount, mean_text};
use taper_train::recipe::Select;
use taper_train::run::Status;

/// A report on runs.
pub fn document(title: &str, runs: &Runs) -> Document {
    let tasks = tasks(&runs.runs);
    let mut document = Document { title: title.into(), data: data(&tasks), ..Document::default() };
    document.lead.push(lead(runs, &tasks));
    let results = results(&tasks);
    if !results.is_empty() {
        document.sections.push(Section::new("Results", results.into_iter().map(Block::Table).collect()));
    }
    document.sections.extend(sections(&tasks, runs));
    document
}

/// Everything of a report but its tables of results: statistics, figures, runs, recipes, and what could not be read.
pub fn sections(tasks: &[Task], runs: &Runs) -> Vec<Section> {
    let statistics = statistics::tables(tasks).into_iter().map(Block::Table).collect();
    let mut sections = vec![Section::new("What the runs can show", statistics)];
    sections.extend(figures(tasks));
    sections.push(Section::new("Runs and recipes", recipes(tasks)));
    if !runs.problems.is_empty() {
        let lines = runs.problems.iter().cloned().map(Block::Text).collect();
        sections.push(Section::new("What was left out or could not be read", lines));
    }
    sections.retain(|section| !section.blocks.is_empty());
    sections
}

/// The figures of a report.
pub fn figures(tasks: &[Task]) -> Vec<Section> {
    let figures = |title: &str, figures: Vec<Figure>| {
        Section::new(title, figures.into_iter().map(Block::Figure).collect())
    };
    vec![
        figures("Learning curves", curves::figures(tasks)),
        figures("Sensitivity", sensitivity::figures(tasks)),
        figures(&format!("Inside {}", subject::SUBJECT.title), probe::figures(tasks)),
    ]
}

/// Figures of runs that go on: what was logged step by step, and how much every layer's steps change it.
pub fn under_way(tasks: &[Task]) -> Vec<Section> {
    let figures = |title: &str, figures: Vec<Figure>| {
        Section::new(title, figures.into_iter().map(Block::Figure).collect())
    };
    vec![
        figures("Step by step", curves::by_step(tasks)),
        figures("Update-to-weight ratio", probe::ratios(tasks)),
    ]
}

fn lead(runs: &Runs, tasks: &[Task]) -> String {
    let count = |status: Status| runs.runs.iter().filter(|run| run.status == status).count();
    let mut parts = vec![format!("{} finished", count(Status::Finished))];
    for (status, what) in [(Status::Diverged, "diverged"), (Status::Interrupted, "interrupted or under way")]
    {
        parts.extend(Some(count(status)).filter(|n| *n > 0).map(|n| format!("{n} {what}")));
    }
    let titles: Vec<String> = tasks.iter().map(Task::title).collect();
    let plural = if runs.runs.len() == 1 { "run" } else { "runs" };
    format!("{} {plural} ({}): {}.", runs.runs.len(), parts.join(", "), titles.join(", "))
}

/// The tables of results: for every data set one of all groups, and one of optimizers by networks if it has several.
pub fn results(tasks: &[Task]) -> Vec<Table> {
    let mut tables = Vec::new();
    let mut rest = tasks;
    while let Some(first) = rest.first() {
        let same = rest.iter().take_while(|t| t.data == first.data && t.metric == first.metric).count();
        let (here, after) = rest.split_at(same);
        rest = after;
        tables.push(rows(here));
        if here.len() > 1 {
            tables.push(crossed(here));
        }
    }
    tables
}

fn rows(tasks: &[Task]) -> Table {
    let Some(first) = tasks.first() else { return Table::default() };
    let problem = first.is_problem();
    // Networks on one data set may count apart: then every cell says in what.
    let one_clock = tasks.iter().all(|task| task.time() == first.time());
    let time = match first.time() {
        _ if !one_clock => "at",
        Clock::Epoch => "at epoch",
        Clock::Step | Clock::Iteration => "at step",
    };
    let best = if problem { "best" } else { "best on test" };
    let mut head =
        vec!["network", "optimizer", "runs", best, time, "last", "chosen on validation", "remarks"];
    if problem {
        head.retain(|column| !matches!(*column, "network" | "chosen on validation"));
    }
    let mut table =
        Table::new(head).text(&["optimizer", "remarks"]).caption(format!("{}: {}", first.data, first.unit()));
    for task in tasks {
        for group in &task.groups {
            let estimate = |choice: Choice| match group.estimate(choice) {
                Some(estimate) => mean_text(&task.metric, &estimate),
                None => "–".into(),
            };
            let times: Vec<u64> =
                group.finished().filter_map(|r| Choice::BestOnTest.of(r)).map(|v| v.1).collect();
            let at = match (times.iter().min(), times.iter().max()) {
                (Some(low), Some(high)) if low == high => low.to_string(),
                (Some(low), Some(high)) => format!("{low}–{high}"),
                _ => "–".into(),
            };
            let at = if one_clock || times.is_empty() { at } else { format!("{} {at}", task.clock()) };
            let mut cells = vec![
                task.model.clone(),
                group.label.clone(),
                format!("{}/{}", group.finished().count(), group.runs.len()),
                estimate(Choice::BestOnTest),
                at,
                estimate(Choice::Last),
                estimate(Choice::Validated),
                group.losses(),
            ];
            if problem {
                cells.remove(6);
                cells.remove(0);
            }
            table.row(cells);
        }
    }
    notes(&mut table, tasks);
    table.without_empty("remarks")
}

/// What to know to read a table of results.
fn notes(table: &mut Table, tasks: &[Task]) {
    let groups = || tasks.iter().flat_map(|task| &task.groups);
    table.note("Means over the seeds that finished; runs: finished of all.");
    if groups().any(|g| g.finished().count() > 1) {
        table.note("±: half the width of Student's 95 % confidence interval of the mean.");
    }
    if !tasks.iter().any(Task::is_problem) {
        let what = if tasks.iter().any(|task| task.time() == Clock::Step) { "evaluation" } else { "epoch" };
        table.note(format!(
            "Best on test: the {what} was chosen by the test set itself, as in the paper, which makes it an optimistic figure."
        ));
    }
    let by_test = |group: &Group| group.recipe().is_some_and(|recipe| recipe.train.select == Select::Test);
    if groups().any(by_test) {
        table.note(
            "The recipes say select: test, so that their best checkpoints were chosen by the test set too.",
        );
    }
    if groups().any(|g| g.finished().count() == 1) {
        table.note("A row of one run has no interval, and does not tell how another seed would do.");
    }
    if !tasks.iter().any(Task::is_problem) && groups().any(|g| g.estimate(Choice::Validated).is_none()) {
        table.note("– under chosen on validation: no validation set was put aside, or no run finished.");
    }
    for unequal in tasks.iter().flat_map(Task::unequal) {
        table.note(format!("Not equal between optimizers: {unequal}."));
    }
    extents(table, groups().flat_map(|g| &g.runs));
}

/// What to know of the data of some runs: what was left out, and of which runs nobody knows.
pub(crate) fn extents<'a>(table: &mut Table, runs: impl Iterator<Item = &'a Run>) {
    let mut unknown: Vec<String> = Vec::new();
    for run in runs {
        match &run.extent {
            Extent::Whole => {}
            Extent::Part(part) => table.note(format!("Not the whole data set: {part}.")),
            Extent::Unknown(why) => unknown.push(format!("{}: {why}", run.folder)),
        }
    }
    if let [first, others @ ..] = &unknown[..] {
        let more = if others.is_empty() { String::new() } else { format!(", and {} more", others.len()) };
        table.note(format!("Whether these are the whole data sets is not known: {first}{more}."));
    }
}

/// Optimizers by networks, as in the paper's tables: the best on test.
fn crossed(tasks: &[Task]) -> Table {
    let mut labels: Vec<&str> = Vec::new();
    for group in tasks.iter().flat_map(|task| &task.groups) {
        if !labels.contains(&group.label.as_str()) {
            labels.push(&group.label);
        }
    }
    let head = std::iter::once("optimizer").chain(tasks.iter().map(|task| task.model.as_str()));
    let first = tasks.first();
    let caption = first.map_or(String::new(), |t| format!("{}: best {} (chosen on test)", t.data, t.unit()));
    let mut table = Table::new(head).caption(caption);
    for label in labels {
        let cell = |task: &Task| {
            let group = task.groups.iter().find(|group| group.label == label)?;
            let estimate = group.estimate(Choice::BestOnTest);
            Some(estimate.map_or_else(|| group.losses(), |estimate| mean_text(&task.metric, &estimate)))
        };
        let cells = tasks.iter().map(|task| cell(task).unwrap_or_else(|| "–".into()));
        table.row(std::iter::once(label.to_owned()).chain(cells));
    }
    table
}

/// Every mean, one a row, unrounded.
fn data(tasks: &[Task]) -> Table {
    let head =
        "data,network,optimizer,metric,choice,runs,finished,diverged,interrupted,mean,std,low,high,ids";
    let mut table = Table::new(head.split(','));
    for task in tasks {
        for group in &task.groups {
            let count =
                |status: Status| group.runs.iter().filter(|run| run.status == status).count().to_string();
            for choice in Choice::ALL {
                let estimate = group.estimate(choice);
                let number = |of: fn(&Interval) -> f64| {
                    let value = estimate.as_ref().map(of).filter(|value| value.is_finite());
                    value.map_or(String::new(), |value| value.to_string())
                };
                let ids: Vec<&str> = group.runs.iter().map(|run| run.recipe.id()).collect();
                table.row([
                    task.data.clone(),
                    task.model.clone(),
                    group.label.clone(),
                    task.metric.clone(),
                    choice.name().into(),
                    group.runs.len().to_string(),
                    count(Status::Finished),
                    count(Status::Diverged),
                    count(Status::Interrupted),
                    number(|e| e.mean),
                    number(|e| e.std),
                    number(|e| e.low),
                    number(|e| e.high),
                    ids.join(" "),
                ]);
            }
        }
    }
    table
}

/// All runs, and the recipe of every group.
pub fn recipes(tasks: &[Task]) -> Vec<Block> {
    let validated = "chosen on validation";
    let head = ["run", "seed", "ended", "steps", "best on test", "last", validated];
    let mut table = Table::new(head).text(&["ended"]);
    let mut blocks = Vec::new();
    for task in tasks {
        for group in &task.groups {
            for run in &group.runs {
                let value = |choice: Choice| {
                    choice.of(run).map_or_else(String::new, |(value, _)| amount(&task.metric, value, None))
                };
                let ended = match (run.status, &run.reason) {
                    (Status::Finished, _) => "finished".to_owned(),
                    (Status::Diverged, Some(reason)) => format!("diverged: {reason}"),
                    (Status::Diverged, None) => "diverged".to_owned(),
                    (Status::Interrupted, _) => "interrupted or under way".to_owned(),
                };
                table.row([
                    run.folder.clone(),
                    run.recipe.seed.to_string(),
                    ended,
                    run.steps().to_string(),
                    value(Choice::BestOnTest),
                    value(Choice::Last),
                    value(Choice::Validated),
                ]);
            }
            if let Some(run) = group.runs.first() {
                let title = format!("{}, {}: {}", task.title(), group.label, run.recipe.id());
                blocks.push(Block::Code { title, text: run.recipe_text.clone() });
            }
        }
    }
    if !table.is_empty() {
        blocks.insert(0, Block::Table(table.without_empty(validated)));
    }
    blocks
}
