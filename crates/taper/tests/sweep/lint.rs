//! Every reason for doubt, and its absence.
use super::support::{Place, said};
use std::collections::BTreeMap;
use taper_figures::stats::student;
use taper_train::Recipe;
use taper_train::recipe::Unchecked;
use taper_train::sweep::Cell;
use taper_train::sweep::lint::{self, Finding};

fn recipe(rest: &str) -> Recipe {
    let text = format!(
        "data: {{name: mnist, val: 100}}\nmodel: {{name: mlp}}\noptimizer: {{name: sgd, lr: 1}}\n{rest}"
    );
    Recipe::parse("lint.yaml", &text, &[], &Unchecked).unwrap_or_else(|e| panic!("{e}"))
}

fn findings(rest: &str) -> Vec<Finding> {
    lint::recipes(&[recipe(rest)])
}

const VAL: &str = "train: {epochs: 1, select: val}\n";

#[test]
fn one_run_or_a_fair_comparison_gives_no_reason_for_doubt() {
    assert_eq!(findings(VAL), []);
    assert_eq!(findings(&format!("{VAL}sweep: {{seeds: [1, 2]}}")), []);
    let fair =
        "sweep: {list: [{optimizer.name: sgd}, {optimizer: {name: adam, lr: 1}}], seeds: [1, 2, 3, 4, 5, 6]}";
    assert_eq!(findings(&format!("{VAL}{fair}")), []);
}

#[test]
fn doubts_are_found_before_training() {
    let seeds = "seeds: [1, 2, 3, 4, 5, 6, 7, 8]";
    assert_eq!(
        findings("train: {epochs: 1, select: test}\nsweep: {seeds: [1, 2]}"),
        [Finding::SelectedOnTest { runs: 2, of: 2 }]
    );
    let unequal = format!(
        "{VAL}sweep: {{list: [{{optimizer.name: sgd}}, {{optimizer: {{name: adam, lr: 1}}}}, {{optimizer: {{name: adam, lr: 2}}}}], {seeds}}}"
    );
    let configurations = BTreeMap::from([("adam".to_owned(), 2), ("sgd".to_owned(), 1)]);
    let same = Finding::SameSeeds { optimizer: "adam".into(), configurations: 2 };
    assert_eq!(findings(&unequal), [Finding::UnequalBudgets { configurations }, same]);
    assert_eq!(
        findings(&format!("{VAL}sweep: {{grid: {{optimizer.lr: [1, 2, 3, 4]}}, seeds: [1, 2, 3]}}")),
        [
            Finding::SameSeeds { optimizer: "sgd".into(), configurations: 4 },
            Finding::TooFewSeeds { seeds: 3, need: 7, comparisons: 3 },
        ]
    );
}

#[test]
fn a_winner_with_fresh_seeds_settles_the_doubt_about_seeds() {
    let tuning = recipe(&format!("{VAL}sweep: {{grid: {{optimizer.lr: [1, 2]}}, seeds: [1]}}"));
    let reporting = recipe(&format!("{VAL}sweep: {{list: [{{optimizer.lr: 2}}], seeds: [11, 12]}}"));
    let same = |findings: &[Finding]| findings.iter().any(|f| matches!(f, Finding::SameSeeds { .. }));
    assert!(same(&lint::recipes(std::slice::from_ref(&tuning))));
    assert!(!same(&lint::recipes(&[tuning, reporting])));
}

/// A cell of three runs with this mean.
fn cell(settings: serde_json::Value, mean: f64) -> Cell {
    let serde_json::Value::Object(settings) = settings else { panic!("a map") };
    let interval = student(&[mean, mean], 0.95);
    Cell {
        configuration: settings.values().map(|v| v.to_string()).collect(),
        name: "x".into(),
        optimizer: "sgd".into(),
        settings,
        resolved: BTreeMap::new(),
        select: "val".into(),
        metric: Some("test.accuracy".into()),
        runs: Vec::new(),
        finished: 2,
        diverged: 0,
        failed: 0,
        missing: 0,
        best: interval,
        last: interval,
        selected: interval,
    }
}

#[test]
fn an_optimum_at_the_end_of_its_grid_is_found_in_the_results() {
    let grid = |scores: &[f64]| -> Vec<Cell> {
        let cell = |(lr, score): (f64, &f64)| {
            cell(serde_json::json!({"lr": lr, "nesterov": true, "momentum": 0.9}), *score)
        };
        [0.1, 1.0, 0.01].into_iter().zip(scores).map(cell).collect()
    };
    let edge = |value: f64, largest: bool| {
        vec![Finding::EdgeOfGrid { optimizer: "sgd".into(), key: "lr".into(), value, largest }]
    };
    assert_eq!(lint::results(&grid(&[0.9, 0.8, 0.7])), []);
    assert_eq!(lint::results(&grid(&[0.7, 0.8, 0.7])), edge(1.0, true));
    assert_eq!(lint::results(&grid(&[0.7, 0.7, 0.9])), edge(0.01, false));
    // Lower is better for a loss.
    let mut losses = grid(&[0.5, 0.8, 0.7]);
    losses.iter_mut().for_each(|cell| cell.metric = Some("test.loss".into()));
    assert_eq!(lint::results(&losses), []);
    // Two values have no inside; without results there is no best.
    assert_eq!(lint::results(&grid(&[0.7, 0.8])), []);
    let mut empty = grid(&[0.0, 0.0, 0.0]);
    empty.iter_mut().for_each(|cell| (cell.selected, cell.last) = (None, None));
    assert_eq!(lint::results(&empty), []);
}

#[test]
fn plan_and_sweep_print_them_with_what_to_do() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 32, test: 16, classes: 2, batch_size: 16}
model: {name: mlp, hidden: [4]}
optimizer: {name: sgd}
train: {epochs: 1, select: test, metric: loss}
sweep: {grid: {optimizer.lr: [1e-12, 1e-9, 1e-6]}}
",
    );
    let before = place.taper("plan", "runs", &["--no-probe"]).output().unwrap();
    let sweep = place.sweep("runs", &[]);
    let after = place.taper("plan", "runs", &["--no-probe"]).output().unwrap();
    for (output, edge) in [(before, false), (sweep, true), (after, true)] {
        let message = said(&output);
        assert!(output.status.success(), "{message}");
        for note in [
            "note: tuning and reporting on the same seeds",
            "note: the test set chooses",
            "note: 1 paired seeds",
        ] {
            assert!(message.contains(note), "{message}");
        }
        // Such small steps lower the loss, the largest most.
        let beyond =
            message.contains("note: sgd: the best optimizer.lr is 0.000001, the largest of its grid");
        assert_eq!(beyond, edge, "{message}");
        assert!(!edge || message.contains("Add values above it"), "{message}");
    }
}
