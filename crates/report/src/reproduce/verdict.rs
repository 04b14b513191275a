//! When a published statement counts as reproduced. The rule is explained in `docs/verdicts.md`.
//!
//! Every statement comes down to [parts](Part), each that a mean lies in a [range](Range): a cell within the tolerance of
//! its published number, an accuracy of at least a bound, a difference above 0. A part is shown when the mean's 95 %
//! interval lies in the range and refuted when it lies outside of it; else it is open.
use serde::Serialize;
use std::fmt;
use taper_figures::stats::{Interval, student_quantile};

/// What became of a published statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Our runs show it.
    Reproduced,
    /// Our runs show the opposite.
    Differs,
    /// Our runs show neither.
    Undecided,
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
            Self::Undecided => "undecided",
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
    /// No other cell of its row is further ahead than this.
    Near {
        /// How far.
        within: f64,
    },
}

/// From where to where a mean is claimed to be, ends included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// From here; −∞ for no bound.
    pub low: f64,
    /// To here; ∞ for no bound.
    pub high: f64,
}

/// The least number that is above 0: where "ahead" begins.
const AHEAD: f64 = f64::MIN_POSITIVE;

impl Range {
    /// As near to a number as its tolerance.
    pub fn around(published: f64, tolerance: f64) -> Self {
        Self { low: published - tolerance, high: published + tolerance }
    }

    /// At least a bound.
    pub fn at_least(bound: f64) -> Self {
        Self { low: bound, high: f64::INFINITY }
    }

    /// At most a bound.
    pub fn at_most(bound: f64) -> Self {
        Self { low: f64::NEG_INFINITY, high: bound }
    }

    /// A difference above 0.
    pub fn ahead() -> Self {
        Self::at_least(AHEAD)
    }

    /// A difference above 0 that is as near to a margin as two numbers can be that each may be off by the tolerance.
    pub fn margin(margin: f64, tolerance: f64) -> Self {
        let Self { low, high } = Self::around(margin, std::f64::consts::SQRT_2 * tolerance);
        Self { low: low.max(AHEAD), high }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.low == AHEAD, self.low.is_finite(), self.high.is_finite()) {
            (true, _, true) => write!(f, "above 0, at most {:.2}", self.high),
            (true, ..) => f.write_str("above 0"),
            (_, true, true) => write!(f, "{:.2} to {:.2}", self.low, self.high),
            (_, true, false) => write!(f, "at least {:.2}", self.low),
            _ => write!(f, "at most {:.2}", self.high),
        }
    }
}

/// One statement on one mean.
#[derive(Clone, Debug)]
pub struct Part {
    /// What it is about: a column, or a difference of two.
    pub name: String,
    /// What was measured.
    pub found: Measured,
    /// What is claimed.
    pub claimed: Range,
}

/// What was measured for a part.
#[derive(Clone, Debug)]
pub enum Measured {
    /// A mean over seeds.
    Mean(Interval),
    /// Something that refutes the part whatever the mean: every seed diverged.
    Against(String),
    /// Something that leaves it open whatever the mean: a seed diverged, or there is no seed.
    Open(String),
}

/// The share of intervals that miss their mean.
const ALPHA: f64 = 0.05;

/// The tables have two digits: seeds that agree to the last of them, which a few do by chance, still scatter by its half.
const LEAST_SPREAD: f64 = 0.005;

/// More seeds than this are no advice.
const MOST_SEEDS: usize = 1000;

#[derive(Clone, Copy, PartialEq)]
enum Shown {
    Yes,
    No,
    Open,
}

/// Half the width of Student's interval that so many seeds with this spread would have.
fn half_width(std: f64, seeds: usize, alpha: f64) -> f64 {
    match seeds {
        0 | 1 => f64::INFINITY,
        n => student_quantile(1.0 - alpha / 2.0, n as f64 - 1.0) * std.max(LEAST_SPREAD) / (n as f64).sqrt(),
    }
}

impl Part {
    /// What so many seeds show, with the mean and the spread as they are. A part among `parts` is refuted at a level that
    /// is corrected for them: of many that hold, one would be refuted by chance. To show them all needs no correction.
    fn shown(&self, seeds: impl Fn(&Interval) -> usize, parts: usize) -> Shown {
        let mean = match &self.found {
            Measured::Mean(mean) => mean,
            Measured::Against(_) => return Shown::No,
            Measured::Open(_) => return Shown::Open,
        };
        let half = half_width(mean.std, seeds(mean), ALPHA);
        let wide = half_width(mean.std, seeds(mean), ALPHA / parts.max(1) as f64);
        if mean.mean - half >= self.claimed.low && mean.mean + half <= self.claimed.high {
            Shown::Yes
        } else if mean.mean + wide < self.claimed.low || mean.mean - wide > self.claimed.high {
            Shown::No
        } else {
            Shown::Open
        }
    }

    /// How many seeds would decide it if their mean and spread stayed as they are.
    fn seeds_needed(&self, parts: usize) -> Option<usize> {
        let Measured::Mean(mean) = &self.found else { return None };
        if mean.n < 2 {
            return None;
        }
        (mean.n..=MOST_SEEDS).find(|n| self.shown(|_| *n, parts) != Shown::Open)
    }

    /// What was measured.
    fn text(&self) -> String {
        match &self.found {
            Measured::Mean(mean) => match half_width(mean.std, mean.n, ALPHA) {
                half if half.is_finite() => format!("{:.2} ± {half:.2}", mean.mean),
                _ => format!("{:.2}, one seed", mean.mean),
            },
            Measured::Against(why) | Measured::Open(why) => why.clone(),
        }
    }
}

/// The verdict on a statement that holds when all of its parts do: reproduced when each is shown, differs when one is
/// refuted, else undecided, with the seeds that it would take.
pub fn all(parts: &[Part]) -> (Verdict, String) {
    let which = |shown: Shown| -> Vec<&Part> {
        parts.iter().filter(|part| part.shown(|mean| mean.n, parts.len()) == shown).collect()
    };
    let (against, open) = (which(Shown::No), which(Shown::Open));
    let list = |of: &[&Part]| match (parts, of) {
        ([only], _) => format!("{}, claimed: {}", only.text(), only.claimed),
        (_, of) => {
            const LISTED: usize = 4;
            let text = |part: &&Part| format!("{} ({})", part.name, part.text());
            let more = match of.len().saturating_sub(LISTED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            of.iter().take(LISTED).map(text).collect::<Vec<_>>().join(", ") + &more
        }
    };
    let single = parts.len() == 1;
    match (parts, &against[..], &open[..]) {
        ([], ..) => (Verdict::NotRun, "nothing to compare".into()),
        (_, [], []) if single => (Verdict::Reproduced, list(&[])),
        (_, [], []) => (Verdict::Reproduced, format!("shown for all {}", parts.len())),
        (_, [], open) => {
            let needed: Vec<Option<usize>> = open.iter().map(|part| part.seeds_needed(parts.len())).collect();
            let one = |part: &&Part| matches!(&part.found, Measured::Mean(mean) if mean.n < 2);
            let fixed = |part: &&Part| matches!(part.found, Measured::Open(_));
            let advice =
                match needed.iter().copied().collect::<Option<Vec<usize>>>().map(|n| n.into_iter().max()) {
                    Some(Some(most)) => format!("; about {most} seeds would decide it"),
                    _ if open.iter().any(one) => "; one seed shows no spread, run at least 3".into(),
                    _ if open.iter().any(fixed) => String::new(),
                    _ => format!("; more than {MOST_SEEDS} seeds would be needed"),
                };
            let open = if single { list(open) } else { format!("open: {}", list(open)) };
            (Verdict::Undecided, open + &advice)
        }
        (_, against, _) if single => (Verdict::Differs, list(against)),
        (_, against, _) => (Verdict::Differs, format!("against it: {}", list(against))),
    }
}

/// What there is of a cell.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Seeds that finished.
    pub finished: usize,
    /// Seeds that were to run.
    pub seeds: usize,
    /// Seeds that diverged.
    pub diverged: usize,
    /// Why seeds did not come to an end.
    pub failure: Option<String>,
    /// The recipe is a reduced one.
    pub reduced: bool,
    /// Why its data is not, or not known to be, the whole set.
    pub data: Option<String>,
}

/// The verdict on a cell and why.
pub fn judge(found: &Found, parts: &[Part]) -> (Verdict, String) {
    if found.finished == 0 && found.diverged == 0 {
        return (Verdict::NotRun, found.failure.clone().unwrap_or_else(|| "no run of it".into()));
    }
    if found.reduced {
        return (Verdict::NotComparable, "reduced scale".into());
    }
    if let Some(data) = &found.data {
        return (Verdict::NotComparable, data.clone());
    }
    let (verdict, why) = all(parts);
    match found.finished + found.diverged < found.seeds {
        true => (verdict, format!("{why}, {} of {} seeds", found.finished, found.seeds)),
        false => (verdict, why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mean of so many seeds whose 95 % interval is ± `half`.
    fn mean(mean: f64, half: f64, n: usize) -> Measured {
        let unit = half_width(1.0, n, ALPHA);
        let std = if n > 1 { half / unit } else { 0.0 };
        let half = if n > 1 { half } else { f64::INFINITY };
        Measured::Mean(Interval { n, mean, std, low: mean - half, high: mean + half })
    }

    fn part(found: Measured, claimed: Range) -> Part {
        Part { name: "a".into(), found, claimed }
    }

    fn verdict(found: Measured, claimed: Range) -> Verdict {
        all(&[part(found, claimed)]).0
    }

    #[test]
    fn a_number_is_the_same_only_if_the_whole_interval_is_within_its_tolerance() {
        let cell = Range::around(95.0, 0.25);
        for sign in [1.0, -1.0] {
            let at = |away: f64, half: f64, n: usize| verdict(mean(95.0 + sign * away, half, n), cell);
            assert_eq!(at(0.0, 0.2, 3), Verdict::Reproduced);
            assert_eq!(at(0.125, 0.1, 3), Verdict::Reproduced);
            assert_eq!(at(0.125, 0.2, 3), Verdict::Undecided, "it reaches out");
            assert_eq!(at(0.0, 0.3, 3), Verdict::Undecided, "as wide as the tolerance");
            assert_eq!(at(0.5, 3.0, 3), Verdict::Undecided, "noise is no proof");
            assert_eq!(at(0.5, 0.2, 3), Verdict::Differs);
            assert_eq!(at(0.5, 0.3, 3), Verdict::Undecided, "it reaches in");
            assert_eq!(at(0.0, 0.0, 1), Verdict::Undecided, "one seed has no interval");
            assert_eq!(at(40.0, 0.0, 1), Verdict::Undecided, "one seed has no interval");
        }
    }

    #[test]
    fn a_bound_is_kept_or_broken_by_the_whole_interval() {
        let bound = Range::at_least(98.0);
        assert_eq!(verdict(mean(98.2, 0.1, 3), bound), Verdict::Reproduced);
        assert_eq!(verdict(mean(97.8, 0.1, 3), bound), Verdict::Differs);
        // The example that came out wrong: three seeds of AMSGrad and AdaBelief on MNIST, and eight fresh ones.
        assert_eq!(verdict(mean(97.94, 0.27, 3), bound), Verdict::Undecided);
        assert_eq!(verdict(mean(97.96, 0.06, 3), bound), Verdict::Undecided);
        assert_eq!(verdict(mean(98.08, 0.05, 8), bound), Verdict::Reproduced);
        assert_eq!(verdict(mean(98.11, 0.05, 8), bound), Verdict::Reproduced);
        assert_eq!(verdict(mean(97.99, 0.08, 8), bound), Verdict::Undecided);
        // The other way round: at most a point behind.
        let near = Range::at_most(1.0);
        assert_eq!(verdict(mean(0.5, 0.4, 3), near), Verdict::Reproduced);
        assert_eq!(verdict(mean(-3.0, 0.4, 3), near), Verdict::Reproduced);
        assert_eq!(verdict(mean(0.5, 0.6, 3), near), Verdict::Undecided);
        assert_eq!(verdict(mean(1.5, 0.6, 3), near), Verdict::Undecided);
        assert_eq!(verdict(mean(1.5, 0.4, 3), near), Verdict::Differs);
    }

    #[test]
    fn ahead_and_margins_have_a_sign() {
        let at = |claimed: Range| move |value: f64, half: f64| verdict(mean(value, half, 3), claimed);
        let ahead = at(Range::ahead());
        assert_eq!(ahead(0.2, 0.1), Verdict::Reproduced);
        assert_eq!(ahead(-0.2, 0.1), Verdict::Differs);
        assert_eq!((ahead(0.1, 0.2), ahead(-0.1, 0.2)), (Verdict::Undecided, Verdict::Undecided));
        // 0.13 with a tolerance of 0.3 reaches from 0 to 0.554: √2 · 0.3 below it would be the wrong sign.
        let margin = at(Range::margin(0.13, 0.3));
        assert_eq!(margin(0.2, 0.1), Verdict::Reproduced);
        assert_eq!(margin(-0.2, 0.1), Verdict::Differs, "the wrong sign, within √2 τ");
        assert_eq!(margin(0.8, 0.1), Verdict::Differs, "the right sign, and too much");
        assert_eq!((margin(0.1, 0.2), margin(-0.1, 0.2)), (Verdict::Undecided, Verdict::Undecided));
        assert_eq!(margin(0.5, 0.1), Verdict::Undecided);
        // A large margin is one of its size, not of its sign alone.
        let large = at(Range::margin(1.79, 0.6));
        assert_eq!(large(1.5, 0.2), Verdict::Reproduced);
        assert_eq!((large(0.5, 0.2), large(-1.79, 0.2)), (Verdict::Differs, Verdict::Differs));
        assert_eq!(large(1.0, 0.2), Verdict::Undecided);
    }

    #[test]
    fn seeds_that_agree_by_chance_are_no_proof() {
        // By hand: t(0.975, 1) · 0.005 / √2 = 0.0449.
        assert_eq!(verdict(mean(98.04, 0.0, 2), Range::at_least(98.0)), Verdict::Undecided);
        assert_eq!(verdict(mean(98.05, 0.0, 2), Range::at_least(98.0)), Verdict::Reproduced);
        assert_eq!(verdict(mean(0.0, 0.0, 3), Range::ahead()), Verdict::Undecided);
        assert_eq!(verdict(mean(0.0, 0.0, 3), Range::at_most(1.0)), Verdict::Reproduced);
    }

    #[test]
    fn of_many_parts_all_are_to_be_shown_and_one_refutes_beyond_chance() {
        let bound = Range::at_least(98.0);
        let good = || part(mean(98.2, 0.1, 3), bound);
        assert_eq!(all(&[good(), good()]), (Verdict::Reproduced, "shown for all 2".into()));
        let open = part(mean(98.05, 0.1, 3), bound);
        assert_eq!(all(&[good(), open.clone()]).0, Verdict::Undecided);
        // Refuted alone, but among seven parts one in a third of all tables would be: t(1 − 0.025/7, 2) is 2.7 times t(0.975, 2).
        let bad = part(mean(97.87, 0.1, 3), bound);
        assert_eq!(all(std::slice::from_ref(&bad)).0, Verdict::Differs);
        let among: Vec<Part> = std::iter::once(bad).chain((0..6).map(|_| good())).collect();
        assert_eq!(all(&among).0, Verdict::Undecided);
        let worse = part(mean(97.7, 0.1, 3), bound);
        let among: Vec<Part> = std::iter::once(worse).chain((0..6).map(|_| good())).collect();
        assert_eq!(all(&among), (Verdict::Differs, "against it: a (97.70 ± 0.10)".into()));
        assert_eq!(all(&[]).0, Verdict::NotRun);
        // Divergences: all seeds refute, some leave it open.
        let against = part(Measured::Against("all 3 diverged".into()), bound);
        let some = part(Measured::Open("1 of 3 diverged".into()), bound);
        assert_eq!(all(&[good(), against]).0, Verdict::Differs);
        assert_eq!(all(&[good(), some]), (Verdict::Undecided, "open: a (1 of 3 diverged)".into()));
    }

    #[test]
    fn an_open_part_says_how_many_seeds_it_would_take() {
        // A spread of 0.2 and a mean 0.15 above the bound: 9 seeds have ± 0.1537, 10 have ± 0.1431 (t(0.975, 9) = 2.262).
        let spread = Measured::Mean(Interval { n: 3, mean: 98.15, std: 0.2, low: 97.65, high: 98.65 });
        let (verdict, why) = all(&[part(spread, Range::at_least(98.0))]);
        assert_eq!(verdict, Verdict::Undecided);
        assert_eq!(why, "98.15 ± 0.50, claimed: at least 98.00; about 10 seeds would decide it");
        let edge = all(&[part(mean(98.0, 0.1, 3), Range::at_least(98.0))]).1;
        assert!(edge.ends_with("more than 1000 seeds would be needed"), "{edge}");
        let one = all(&[part(mean(98.5, 0.0, 1), Range::at_least(98.0))]).1;
        assert_eq!(one, "98.50, one seed, claimed: at least 98.00; one seed shows no spread, run at least 3");
    }

    #[test]
    fn what_stands_in_the_way_comes_first() {
        let parts = [part(mean(95.0, 0.1, 3), Range::around(95.0, 0.25))];
        let full = Found { finished: 3, seeds: 3, ..Found::default() };
        let none = Found { finished: 0, ..full.clone() };
        let cases = [
            (full.clone(), Verdict::Reproduced),
            (none.clone(), Verdict::NotRun),
            (Found { failure: Some("no data".into()), reduced: true, ..none.clone() }, Verdict::NotRun),
            (Found { reduced: true, ..full.clone() }, Verdict::NotComparable),
            (Found { reduced: true, diverged: 3, ..none }, Verdict::NotComparable),
            (Found { data: Some("not the whole data set".into()), ..full.clone() }, Verdict::NotComparable),
        ];
        for (found, expected) in cases {
            assert_eq!(judge(&found, &parts).0, expected, "{found:?}");
        }
        let two = Found { finished: 2, ..full };
        assert!(judge(&two, &parts).1.ends_with(", 2 of 3 seeds"));
    }
}
