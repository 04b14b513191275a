//! What an optimizer did in a run, or in two, from what the microscope saw: sentences by stated rules, each with its numbers,
//! tables by stage and by layer, and pictures.
//!
//! It depends on `probe.jsonl`, the recipe and how the run ended alone.
mod figures;
mod rules;
mod trace;

pub use rules::{Already, First, Instability, Sentence, differences, instability, sentences};
pub use trace::{Explained, Nearest, Noise, Stage};

use crate::{Block, Document, ReportError, Section};
use rules::{digits, not_momentum, title};
use std::path::{Path, PathBuf};
use taper_figures::plot::short;
use taper_figures::table::Table;
use taper_train::run::folder;
use taper_train::sweep::settings::{settings, shown};

/// Reads runs' folders; what is damaged is added to `problems`. A run that nobody looked at is an error that says how to.
pub fn load(folders: &[PathBuf], problems: &mut Vec<String>) -> Result<Vec<Explained>, ReportError> {
    let mut runs = folders.iter().map(|folder| one(folder, problems)).collect::<Result<Vec<_>, _>>()?;
    // One optimizer at one rate twice: the folders tell them apart.
    if runs.iter().skip(1).any(|run| run.label == runs[0].label) {
        runs.iter_mut().for_each(|run| run.label = run.run.folder.clone());
    }
    Ok(runs)
}

fn one(folder: &Path, problems: &mut Vec<String>) -> Result<Explained, ReportError> {
    if !folder.join("recipe.yaml").is_file() {
        return Err(ReportError::Empty(vec![folder.display().to_string()]));
    }
    let run = crate::read(folder, problems).map_err(ReportError::Unreadable)?;
    let (sights, damage) = folder::sights(folder);
    problems.extend(damage.map(|damage| format!("{}: {damage}", run.folder)));
    if sights.is_empty() {
        return Err(ReportError::Unseen { run: folder.display().to_string() });
    }
    Ok(Explained::new(run, sights))
}

/// A page about some runs: what each did, and of a pair what differed.
pub fn document(runs: &[Explained]) -> Document {
    let labels: Vec<String> = runs.iter().map(|run| run.label.clone()).collect();
    let mut document = Document { title: labels.join(" and ") + ", explained", ..Document::default() };
    for run in runs {
        let (looks, last) = (run.sights.len(), run.sights.last().map_or(0, |sight| sight.step));
        document.lead.push(format!(
            "{}: {} looks at steps up to {last} of {} ({}). Sentences are chosen by the rules of docs/microscope.md; their numbers \
             are medians over a stage, a third of the looks, unless they say otherwise; those of noise are quotients of means.",
            run.label,
            looks,
            run.run.folder,
            run.run.recipe.id(),
        ));
    }
    if let [a, b] = runs {
        let mut blocks = text(&differences(a, b));
        blocks.extend(changed(a, b).map(Block::Table));
        document.sections.push(Section::new("What differed", blocks));
    }
    for run in runs {
        let heading = |what: &str| match runs.len() {
            1 => what.to_owned(),
            _ => format!("{}: {}", run.label, lower(what)),
        };
        document.sections.push(Section::new(heading("What it did"), text(&sentences(run))));
        let tables = [close_table(run), landing_table(run), vector_table(run)];
        let mut blocks: Vec<Block> = tables.into_iter().filter(|t| !t.is_empty()).map(Block::Table).collect();
        blocks.extend(figures::figures(run).into_iter().map(Block::Figure));
        document.sections.push(Section::new(heading("Stage by stage"), blocks));
        document.sections.push(Section::new(heading("Layer by layer"), vec![Block::Table(layer_table(run))]));
    }
    document.data = data(runs);
    document
}

fn lower(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or(String::new(), |first| first.to_lowercase().chain(chars).collect())
}

fn text(sentences: &[Sentence]) -> Vec<Block> {
    sentences.iter().map(|sentence| Block::Text(sentence.shown())).collect()
}

/// The settings that two runs do not share.
fn changed(a: &Explained, b: &Explained) -> Option<Table> {
    let (x, y) = (settings(&a.run.recipe), settings(&b.run.recipe));
    let mut paths: Vec<&String> = x.keys().chain(y.keys()).collect();
    paths.sort();
    paths.dedup();
    let mut table =
        Table::new(["setting".to_owned(), a.label.clone(), b.label.clone()]).caption("Settings that differ");
    // By what is shown: one that is not set and one that the other optimizer does not have are both none.
    for path in paths {
        let (x, y) = (shown(&x, path), shown(&y, path));
        if x != y {
            table.row([path.clone(), x, y]);
        }
    }
    (!table.is_empty()).then_some(table)
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(String::new, short)
}

fn share(value: Option<f64>) -> String {
    value.map_or_else(String::new, digits)
}

fn steps(stage: &Stage) -> String {
    match stage.steps() {
        (from, to) if from == to => from.to_string(),
        (from, to) => format!("{from}–{to}"),
    }
}

/// What steps were close to.
fn close_table(run: &Explained) -> Table {
    let head = [
        "steps",
        "learning rate",
        "loss",
        "nearest",
        "R²",
        "rate",
        "R² of SGDM",
        "rate of SGDM",
        "R² of Adam",
        "cos(u, -g)",
        "‖u‖/‖w‖",
        "rates of elements, 1 %",
        "50 %",
        "99 %",
    ];
    let mut table =
        Table::new(head).text(&["nearest"]).caption(format!("{}: what its steps are close to", run.label));
    let first = run.sights.get(..1).map(Stage).filter(|_| run.sights.len() > 1);
    for stage in first.into_iter().chain(run.stages()) {
        let near = stage.nearest();
        table.row([
            steps(&stage),
            number(stage.median("lr")),
            number(stage.median("loss")),
            near.map_or_else(String::new, |near| title(near.name).to_owned()),
            share(near.map(|near| near.r2)),
            number(near.map(|near| near.rate)),
            share(stage.median("r2/sgdm")),
            number(stage.median("rate/sgdm")),
            share(stage.median("r2/adam")),
            number(stage.median("cos/gd")),
            number(stage.median("update_ratio")),
            number(stage.median("rate_p01")),
            number(stage.median("rate_p50")),
            number(stage.median("rate_p99")),
        ]);
    }
    head.iter().fold(table, |table, title| table.without_empty(title))
}

/// Signal to noise in a step's gradient, by means as the noise scale beside it.
fn signal_to_noise(run: &Explained, stage: &Stage) -> Option<f64> {
    stage.noise()?.ratio(run.samples()?)
}

/// How steps land.
fn landing_table(run: &Explained) -> Table {
    let head = [
        "steps",
        "α",
        "no minimum ahead",
        "sharpness",
        "stability ratio",
        "its largest",
        "noise scale",
        "signal to noise",
        "early stop",
    ];
    let mut table = Table::new(head).caption(format!("{}: how its steps land", run.label));
    let mut any = false;
    for stage in run.stages() {
        let cells = [
            number(stage.median("alpha")),
            stage.no_minimum().map_or_else(String::new, |part| format!("{:.0} %", 100.0 * part)),
            number(stage.median("sharpness")),
            number(stage.median("stability")),
            stage
                .largest("stability")
                .map_or_else(String::new, |(step, v)| format!("{} at {step}", short(v))),
            number(stage.noise().and_then(|noise| noise.scale())),
            number(signal_to_noise(run, &stage)),
            number(stage.median("early_stop")),
        ];
        any |= cells.iter().any(|cell| !cell.is_empty());
        table.row(std::iter::once(steps(&stage)).chain(cells));
        if let Some(r2) = stage.median("stability").and(not_momentum(&stage)) {
            table.note(format!(
                "Steps {}: the stability ratio is that of the momentum descent that fits best, and it fits poorly (R² {r2}).",
                steps(&stage)
            ));
        }
    }
    if !any {
        return Table::default();
    }
    head.iter().fold(table, |table, title| table.without_empty(title))
}

/// The vector of an optimizer that follows the loss.
fn vector_table(run: &Explained) -> Table {
    let head = [
        "steps",
        "least v",
        "1 %",
        "50 %",
        "99 %",
        "largest v",
        "below 0",
        "√(f + c)",
        "rms error",
        "largest error",
    ];
    let mut table = Table::new(head).caption(format!("{}: its vector, over all elements", run.label));
    if run.whole().median("v_p50").is_none() {
        return Table::default();
    }
    for stage in run.stages() {
        table.row([
            steps(&stage),
            number(stage.median("v_min")),
            number(stage.median("v_p01")),
            number(stage.median("v_p50")),
            number(stage.median("v_p99")),
            number(stage.median("v_max")),
            stage.median("v_negative").map_or_else(String::new, |part| format!("{} %", short(100.0 * part))),
            number(stage.median("root")),
            number(stage.median("v_error_rms")),
            number(stage.median("v_error_max")),
        ]);
    }
    table
}

/// Every layer, from the first stage to the last.
fn layer_table(run: &Explained) -> Table {
    let stages = run.stages();
    let mut head = vec!["layer".to_owned()];
    head.extend(stages.iter().map(|stage| format!("‖u‖/‖w‖ {}", steps(stage))));
    let fixed = ["‖g‖ at first", "‖g‖ at last", "nearest at last", "R²", "rate", "v at last", "noise scale"];
    head.extend(fixed.map(str::to_owned));
    let mut table = Table::new(head).text(&["nearest at last"]).caption(format!("{}: its layers", run.label));
    let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return table };
    for layer in run.layers() {
        let near = last.nearest_of_layer(layer);
        let mut cells = vec![layer.to_owned()];
        cells.extend(stages.iter().map(|stage| number(stage.of_layer(layer, "update_ratio"))));
        cells.extend([
            number(first.of_layer(layer, "grad_norm")),
            number(last.of_layer(layer, "grad_norm")),
            near.map_or_else(String::new, |near| title(near.name).to_owned()),
            share(near.map(|near| near.r2)),
            number(near.map(|near| near.rate)),
            number(last.of_layer(layer, "v_mean")),
            number(last.noise_of_layer(layer).and_then(|noise| noise.scale())),
        ]);
        table.row(cells);
    }
    fixed.iter().fold(table, |table, title| table.without_empty(title))
}

/// Every median, one a row, unrounded; of noise scale and signal to noise the quotients of means that the page has.
fn data(runs: &[Explained]) -> Table {
    let mut table = Table::new(["run", "id", "from", "to", "quantity", "value"]);
    for run in runs {
        let mut names: Vec<&String> = run.sights.iter().flat_map(|sight| sight.all.keys()).collect();
        names.sort();
        names.dedup();
        for stage in run.stages() {
            let (from, to) = stage.steps();
            for name in &names {
                let value = match name.as_str() {
                    "noise_scale" => stage.noise().and_then(|noise| noise.scale()),
                    "snr" => signal_to_noise(run, &stage),
                    name => stage.median(name),
                };
                let Some(value) = value else { continue };
                table.row([
                    run.label.clone(),
                    run.run.recipe.id().to_owned(),
                    from.to_string(),
                    to.to_string(),
                    (*name).clone(),
                    value.to_string(),
                ]);
            }
        }
    }
    table
}
