//! When a published number counts as reproduced.
//!
//! In this order:
//!
//! 1. **not run**: no seed of the cell came to an end (its data is missing, it failed, it was interrupted).
//! 2. **not comparable**: the recipe is a reduced one, or its data is not the whole set.
//! 3. **differs**: a seed diverged; the published run did not.
//! 4. **reproduced**: the published number p is no further from our mean than the tolerance τ of its table and the
//!    nearer half of the mean's 95 % interval, of which no more than τ counts: noise is no proof. Formally
//!    mean − τ − min(mean − low, τ) ≤ p ≤ mean + τ + min(high − mean, τ). One seed alone has no interval: only τ counts.
//! 5. **differs** otherwise, to either side.
//!
//! A bound ("at least 98 %") is reproduced when the mean is beyond it; "within w of the best" when the mean is.
use serde::Serialize;
use std::fmt;
use taper_figures::stats::Interval;

/// What became of a published number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is ours, too.
    Reproduced,
    /// Ours is another.
    Differs,
    /// There is no result of ours.
    NotRun,
    /// Ours is of something smaller.
    NotComparable,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Reproduced => "reproduced",
            Self::Differs => "differs",
            Self::NotRun => "not run",
            Self::NotComparable => "not comparable",
        })
    }
}

/// What a cell is held against, in the unit of the paper's tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Expected {
    /// A number of a table.
    Value {
        /// The number.
        published: f64,
        /// How far from it is still the same.
        tolerance: f64,
    },
    /// A bound from below.
    AtLeast(f64),
    /// At most so far from the best cell.
    Near {
        /// The best cell's mean, if there is one.
        best: Option<f64>,
        /// How far.
        within: f64,
    },
}

/// What there is of a cell, in the unit of the paper's tables.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The mean over the seeds that finished.
    pub estimate: Option<Interval>,
    /// Seeds that were to run.
    pub seeds: usize,
    /// Seeds that diverged.
    pub diverged: usize,
    /// Why seeds did not come to an end.
    pub failure: Option<String>,
    /// The recipe is a reduced one.
    pub reduced: bool,
    /// What the data lacks.
    pub subset: Option<String>,
}

/// The verdict and why.
pub fn judge(expected: &Expected, found: &Found) -> (Verdict, String) {
    if found.estimate.is_none() && found.diverged == 0 {
        return (Verdict::NotRun, found.failure.clone().unwrap_or_else(|| "no run of it".into()));
    }
    if found.reduced {
        return (Verdict::NotComparable, "reduced scale".into());
    }
    if found.subset.is_some() {
        return (Verdict::NotComparable, "not the whole data set".into());
    }
    let Some(estimate) = found.estimate.as_ref().filter(|_| found.diverged == 0) else {
        return (Verdict::Differs, format!("{} of {} diverged", found.diverged, found.seeds));
    };
    let few = match estimate.n < found.seeds {
        true => format!(", {} of {} seeds", estimate.n, found.seeds),
        false => String::new(),
    };
    let (holds, why) = match *expected {
        Expected::Value { published, tolerance } => {
            let half = estimate.half_width().unwrap_or(0.0).min(tolerance);
            let away = estimate.mean - published;
            (
                away.abs() <= tolerance + half,
                format!("{away:+.2}, up to ±{:.2} counts as the same", tolerance + half),
            )
        }
        Expected::AtLeast(bound) => {
            (estimate.mean >= bound, format!("{:+.2} from the bound", estimate.mean - bound))
        }
        Expected::Near { best: Some(best), within } => {
            let away = (estimate.mean - best).abs();
            (away <= within, format!("{away:.2} from the best, {within:.2} allowed"))
        }
        Expected::Near { best: None, .. } => return (Verdict::NotRun, "nothing to compare with".into()),
    };
    (if holds { Verdict::Reproduced } else { Verdict::Differs }, why + &few)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate(mean: f64, half: f64, n: usize) -> Option<Interval> {
        let half = if n == 1 { f64::INFINITY } else { half };
        Some(Interval { n, mean, std: 0.1, low: mean - half, high: mean + half })
    }

    #[test]
    fn every_rule_in_its_order() {
        let value = Expected::Value { published: 95.0, tolerance: 0.25 };
        let found = |estimate| Found { estimate, seeds: 3, ..Found::default() };
        let full = |mean, half| found(estimate(mean, half, 3));
        let cases = [
            // No result, whatever the reason.
            (value, found(None), Verdict::NotRun),
            (value, Found { failure: Some("no data".into()), reduced: true, ..found(None) }, Verdict::NotRun),
            // Reduced comes before the value, and before a divergence.
            (value, Found { reduced: true, ..full(95.0, 0.1) }, Verdict::NotComparable),
            (value, Found { reduced: true, diverged: 3, ..found(None) }, Verdict::NotComparable),
            (value, Found { subset: Some("half".into()), ..full(95.0, 0.1) }, Verdict::NotComparable),
            // A divergence is a difference, even if the other seeds agree.
            (value, Found { diverged: 3, ..found(None) }, Verdict::Differs),
            (value, Found { diverged: 1, ..found(estimate(95.0, 0.1, 2)) }, Verdict::Differs),
            // The tolerance alone, on both sides, for one seed.
            (value, found(estimate(95.25, 0.0, 1)), Verdict::Reproduced),
            (value, found(estimate(94.75, 0.0, 1)), Verdict::Reproduced),
            (value, found(estimate(95.375, 0.0, 1)), Verdict::Differs),
            // The interval counts on top, but not more than the tolerance.
            (value, full(95.375, 0.125), Verdict::Reproduced),
            (value, full(95.5, 0.125), Verdict::Differs),
            (value, full(95.5, 3.0), Verdict::Reproduced),
            (value, full(95.625, 3.0), Verdict::Differs),
            (value, full(94.25, 3.0), Verdict::Differs),
            // Some seeds missing: judged by those that are there.
            (value, found(estimate(95.0, 0.1, 2)), Verdict::Reproduced),
            (Expected::AtLeast(98.0), full(98.0, 0.5), Verdict::Reproduced),
            (Expected::AtLeast(98.0), full(97.99, 0.5), Verdict::Differs),
            (Expected::AtLeast(98.0), Found { reduced: true, ..full(99.0, 0.5) }, Verdict::NotComparable),
            (Expected::Near { best: Some(94.0), within: 1.0 }, full(93.0, 0.1), Verdict::Reproduced),
            (Expected::Near { best: Some(94.5), within: 1.0 }, full(93.0, 0.1), Verdict::Differs),
            (Expected::Near { best: None, within: 1.0 }, full(93.0, 0.1), Verdict::NotRun),
        ];
        for (number, (expected, found, verdict)) in cases.iter().enumerate() {
            assert_eq!(judge(expected, found).0, *verdict, "case {number}: {found:?}");
        }
    }

    #[test]
    fn the_reason_says_what_is_missing() {
        let value = Expected::Value { published: 95.0, tolerance: 0.25 };
        let found = Found { estimate: estimate(94.5, 0.1, 2), seeds: 3, ..Found::default() };
        assert_eq!(judge(&value, &found).1, "-0.50, up to ±0.35 counts as the same, 2 of 3 seeds");
        let found = Found { failure: Some("cifar10 is not there".into()), ..Found::default() };
        assert_eq!(judge(&value, &found), (Verdict::NotRun, "cifar10 is not there".into()));
    }
}
