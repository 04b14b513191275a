//! Statements of the text, checked on the cells they are about.
use super::Target;
use super::outcome::{Outcome, difference, in_unit, parts};
use super::published::{Published, Shown};
use super::verdict::{Part, Range, Verdict, all};
use crate::Choice;
use taper_figures::stats::Better;

/// A claim and what became of it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Checked {
    /// The target that checked it.
    pub target: Target,
    /// Its name.
    pub claim: String,
    /// The statement.
    pub says: String,
    /// The verdict.
    pub verdict: Verdict,
    /// Why.
    pub reason: String,
}

/// Checks all claims and margins that the outcomes are about.
pub fn check(published: &Published, outcomes: &[Outcome]) -> Vec<Checked> {
    let mut out = Vec::new();
    for target in Target::ALL {
        let cells: Vec<&Outcome> = outcomes.iter().filter(|o| o.cell.target == target).collect();
        if cells.is_empty() {
            continue;
        }
        for claim in published.claims_of(target) {
            let (verdict, reason) = match &claim.shown_by {
                Shown::AtLeast { .. } | Shown::Within { .. } => all_of(&cells, outcomes),
                Shown::Ahead { columns } => ahead_of(&cells, columns),
                Shown::Faster {} => continue,
            };
            let (claim, says) = (claim.id.clone(), claim.says.clone());
            out.push(Checked { target, claim, says, verdict, reason });
        }
        for margin in published.margins.iter().filter(|margin| margin.table == target.name()) {
            let cell = |column: &str| {
                cells.iter().find(|o| o.cell.row == margin.row && o.cell.column == column).copied()
            };
            let (Some(better), Some(worse)) = (cell(&margin.better), cell(&margin.worse)) else { continue };
            let tolerance = published.tables.get(&margin.table).map_or(0.0, |table| table.tolerance);
            let (verdict, reason) = by_margin(better, worse, Range::margin(margin.margin, tolerance));
            let contradicted = if margin.contradicted { " (its own table says the opposite)" } else { "" };
            let says = format!(
                "{}: {} is ahead of {} by {:.2}{contradicted}",
                margin.row, margin.better, margin.worse, margin.margin
            );
            let claim = format!("{}-{}-{}-{}", margin.table, margin.row, margin.better, margin.worse);
            out.push(Checked { target, claim, says, verdict, reason });
        }
    }
    out
}

/// What stands in the way of a verdict on several cells, if anything does.
fn obstacle(cells: &[&Outcome]) -> Option<(Verdict, String)> {
    let missing: Vec<&str> =
        cells.iter().filter(|o| o.verdict == Verdict::NotRun).map(|o| o.cell.column.as_str()).collect();
    if !missing.is_empty() {
        return Some((Verdict::NotRun, format!("not run: {}", missing.join(", "))));
    }
    let reduced = cells.iter().any(|o| o.verdict == Verdict::NotComparable);
    reduced.then(|| (Verdict::NotComparable, "reduced scale or data".into()))
}

/// A claim on every cell alone: shown when each cell is.
fn all_of(cells: &[&Outcome], outcomes: &[Outcome]) -> (Verdict, String) {
    obstacle(cells).unwrap_or_else(|| {
        let parts: Vec<Part> = cells.iter().flat_map(|cell| parts(cell, outcomes)).collect();
        all(&parts)
    })
}

/// A claim that some columns are ahead of all others of their row: shown when each of them is ahead of each of the rest, on
/// shared seeds. The order of the means is told, not judged.
fn ahead_of(cells: &[&Outcome], ahead: &[String]) -> (Verdict, String) {
    let mut means: Vec<(&str, f64, Better)> = Vec::new();
    for outcome in cells {
        if let Some(estimate) = outcome.estimate(Choice::BestOnTest) {
            let mean = in_unit(estimate, outcome.metric()).mean;
            means.push((&outcome.cell.column, mean, Better::of(outcome.metric())));
        }
    }
    means.sort_by(|a, b| if a.2 == Better::Higher { b.1.total_cmp(&a.1) } else { a.1.total_cmp(&b.1) });
    let order =
        means.iter().map(|(name, mean, _)| format!("{name} {mean:.2}")).collect::<Vec<_>>().join(", ");
    let named = |outcome: &Outcome| ahead.contains(&outcome.cell.column);
    let (verdict, reason) = obstacle(cells).unwrap_or_else(|| {
        let absent = |column: &&String| !cells.iter().any(|o| o.cell.column == **column);
        if let Some(column) = ahead.iter().find(absent) {
            return (Verdict::NotRun, format!("no cell is called {column}"));
        }
        let mut parts = Vec::new();
        for first in cells.iter().filter(|o| named(o)) {
            let rest = cells.iter().filter(|o| !named(o) && o.cell.row == first.cell.row);
            parts.extend(rest.map(|other| difference(first, other, Range::ahead())));
        }
        all(&parts)
    });
    (verdict, if order.is_empty() { reason } else { format!("{reason}; our order: {order}") })
}

/// A margin between two cells: its sign and its size, over the seeds that both have.
fn by_margin(better: &Outcome, worse: &Outcome, claimed: Range) -> (Verdict, String) {
    let part = difference(better, worse, claimed);
    let (verdict, reason) = all(std::slice::from_ref(&part));
    match obstacle(&[better, worse]) {
        Some((Verdict::NotComparable, obstacle)) => {
            (Verdict::NotComparable, format!("{obstacle}; ours: {reason}"))
        }
        Some(obstacle) => obstacle,
        None => (verdict, reason),
    }
}
