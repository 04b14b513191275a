//! Statements of the text, checked on the cells they are about.
use super::Target;
use super::outcome::{Outcome, in_unit};
use super::published::{Published, Shown};
use super::verdict::Verdict;
use crate::Choice;
use taper_figures::stats::{self, Better};

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
                Shown::AtLeast { .. } | Shown::Within { .. } => all_of(&cells),
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
            let (verdict, reason) = difference(better, worse, margin.margin, tolerance);
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
fn all_of(cells: &[&Outcome]) -> (Verdict, String) {
    if let Some(obstacle) = obstacle(cells) {
        return obstacle;
    }
    let against: Vec<&str> =
        cells.iter().filter(|o| o.verdict == Verdict::Differs).map(|o| o.cell.column.as_str()).collect();
    match against.is_empty() {
        true => (Verdict::Reproduced, format!("all {} cells", cells.len())),
        false => (Verdict::Differs, format!("not for {}", against.join(", "))),
    }
}

/// A claim that some columns are ahead of all others: shown when the least of them is ahead of the best of the rest. At
/// reduced scale the order is told, not judged.
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
    if let Some((verdict, reason)) = obstacle(cells) {
        return (verdict, if order.is_empty() { reason } else { format!("{reason}; our order: {order}") });
    }
    let first = means.iter().take(ahead.len()).all(|(name, ..)| ahead.iter().any(|a| a == name));
    (if first { Verdict::Reproduced } else { Verdict::Differs }, format!("our order: {order}"))
}

/// A margin between two cells, over the seeds that both have. Two numbers that each may be off by the tolerance differ
/// by up to √2 of it.
fn difference(better: &Outcome, worse: &Outcome, margin: f64, tolerance: f64) -> (Verdict, String) {
    let values = |outcome: &Outcome| outcome.runs.values(Choice::BestOnTest);
    let sign = if Better::of(better.metric()) == Better::Higher { 1.0 } else { -1.0 };
    let factor = if better.metric() == "accuracy" { 100.0 } else { 1.0 };
    let differences: Vec<f64> =
        stats::paired(&values(better), &values(worse)).iter().map(|d| sign * factor * d).collect();
    let ours = stats::student(&differences, 0.95);
    let text = ours.as_ref().map(|found| match found.half_width() {
        Some(half) => format!("ours {:+.2} ± {half:.2}", found.mean),
        None => format!("ours {:+.2}", found.mean),
    });
    if let Some((verdict, reason)) = obstacle(&[better, worse]) {
        return (verdict, text.map_or(reason.clone(), |text| format!("{reason}; {text}")));
    }
    let Some(found) = ours else { return (Verdict::NotRun, "no seed that both have".into()) };
    let allowed = std::f64::consts::SQRT_2 * tolerance;
    let holds = (found.mean - margin).abs() <= allowed;
    let verdict = if holds { Verdict::Reproduced } else { Verdict::Differs };
    (verdict, format!("{}, up to ±{allowed:.2} counts as the same", text.unwrap_or_default()))
}
