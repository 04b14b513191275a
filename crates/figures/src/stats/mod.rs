//! Statistics for comparing runs fairly: small samples, paired by seed, nothing assumed that a few seeds cannot show.
//!
//! Two configurations are compared on the seeds they share: equal seeds mean equal initial weights, equal batches and
//! equal augmentation, so that the difference is the configuration's. A difference is claimed only when both the
//! [bootstrap interval](bca) of its mean leaves out zero and the [permutation test](sign_flip), corrected for the number
//! of comparisons, calls it significant.
//!
//! ```
//! use taper_figures::stats::{self, Better, Claim};
//! let adam = [(1, 0.952), (2, 0.950), (3, 0.951), (4, 0.949), (5, 0.953), (6, 0.950)];
//! let decgd = [(1, 0.957), (2, 0.953), (3, 0.955), (4, 0.953), (5, 0.958), (6, 0.956)];
//! let differences = stats::paired(&decgd, &adam);
//! let [comparison] = stats::compare(&[differences], Better::Higher, 0.05)[..] else { unreachable!() };
//! assert_eq!(comparison.claim, Claim::Better);
//! // Five seeds could not have shown it: half of 2⁵ sign patterns are as extreme in either direction at best.
//! assert_eq!(stats::least_pairs(0.05, 1), 6);
//! ```
//!
//! Values that are not finite are the caller's to count: a run that diverged has no value, and every function here says
//! what it does with one.
mod calibration;
mod distribution;
mod interval;
mod permutation;
mod search;

pub use calibration::{Calibration, Reliability};
pub use distribution::{normal_cdf, normal_quantile, student_quantile};
pub use interval::{Interval, bca, student};
pub use permutation::{SignFlip, holm, least_pairs, pairs_needed, sign_flip};
pub use search::{expected_best, share_within, superiority, time_to_target};

/// Which values of a metric are the good ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// Accuracy.
    Higher,
    /// Loss, perplexity, seconds.
    Lower,
}

impl Better {
    /// By the metric's name in `metrics.jsonl` or a summary, with or without its split (`test.accuracy`).
    pub fn of(metric: &str) -> Self {
        match metric.rsplit('.').next() {
            Some("accuracy") => Self::Higher,
            _ => Self::Lower,
        }
    }

    /// Whether `a` is better than `b`; what is not a number is better than nothing.
    pub fn than(self, a: f64, b: f64) -> bool {
        match self {
            Self::Higher => a > b,
            Self::Lower => a < b,
        }
    }

    /// `value` with its sign such that more is better.
    fn rising(self, value: f64) -> f64 {
        match self {
            Self::Higher => value,
            Self::Lower => -value,
        }
    }
}

/// The differences `a - b` on the seeds that both have, in the order of `a`. A pair with a value that is not finite is
/// left out: report how many runs diverged beside the comparison.
pub fn paired(a: &[(u64, f64)], b: &[(u64, f64)]) -> Vec<f64> {
    let partner = |seed: u64| b.iter().find(|(other, _)| *other == seed).map(|(_, value)| *value);
    let differences = a.iter().filter_map(|(seed, value)| Some(value - partner(*seed)?));
    differences.filter(|difference| difference.is_finite()).collect()
}

/// What a comparison on paired seeds allows to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Better, beyond chance.
    Better,
    /// Worse, beyond chance.
    Worse,
    /// No difference was shown, which does not show that there is none.
    None,
    /// So few pairs that no result could have supported a claim; this many could.
    TooFew {
        /// The smallest number of pairs with which one is possible.
        need: usize,
    },
}

/// One comparison of a family.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Pairs.
    pub pairs: usize,
    /// The mean difference with its BCa interval at level 1 - α; `None` without pairs.
    pub difference: Option<Interval>,
    /// The p-value of the sign-flip test.
    pub p: f64,
    /// The p-value after Holm's correction over the family.
    pub adjusted_p: f64,
    /// The verdict.
    pub claim: Claim,
}

/// Judges a family of comparisons, each given by its paired differences, at family-wise level `alpha`.
pub fn compare(family: &[Vec<f64>], better: Better, alpha: f64) -> Vec<Comparison> {
    let ps: Vec<f64> = family.iter().map(|differences| sign_flip(differences).p).collect();
    let pairs: Vec<usize> = family.iter().map(Vec::len).collect();
    let judge = |(index, (differences, (p, adjusted_p))): (usize, (&Vec<f64>, (&f64, f64)))| {
        let difference = bca(differences, 1.0 - alpha);
        let need = pairs_needed(&pairs, index, alpha);
        let claim = match difference {
            _ if differences.len() < need => Claim::TooFew { need },
            Some(found) if adjusted_p <= alpha && !(found.low <= 0.0 && 0.0 <= found.high) => {
                if better.than(found.mean, 0.0) { Claim::Better } else { Claim::Worse }
            }
            _ => Claim::None,
        };
        Comparison { pairs: differences.len(), difference, p: *p, adjusted_p, claim }
    };
    family.iter().zip(ps.iter().zip(holm(&ps))).enumerate().map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_seeds_with_two_values_make_a_pair() {
        let a = [(1, 3.0), (2, f64::NAN), (4, 5.0), (7, 1.0)];
        let b = [(7, 2.0), (2, 1.0), (1, 1.0), (9, 0.0)];
        assert_eq!(paired(&a, &b), [2.0, -1.0]);
        assert!(paired(&[], &b).is_empty());
    }

    #[test]
    fn a_claim_needs_enough_pairs_and_both_tests() {
        let clear = vec![1.0, 2.0, 1.5, 1.2, 0.8, 1.1];
        let claim = |family: &[Vec<f64>], better| -> Vec<Claim> {
            compare(family, better, 0.05).iter().map(|c| c.claim).collect()
        };
        let one = std::slice::from_ref(&clear);
        assert_eq!(claim(one, Better::Higher), [Claim::Better]);
        assert_eq!(claim(one, Better::Lower), [Claim::Worse]);
        assert_eq!(claim(&[clear[..5].to_vec()], Better::Higher), [Claim::TooFew { need: 6 }]);
        // The same six pairs among three comparisons: 3 · 2/64 is more than 0.05.
        let family = [clear.clone(), clear.clone(), clear.clone()];
        assert_eq!(claim(&family, Better::Higher), [Claim::TooFew { need: 7 }; 3]);
        // Beside two with ten pairs, six are enough: Holm steps down to them with their p as it is.
        let many: Vec<f64> = clear.iter().chain(&clear[..4]).copied().collect();
        let steps = [many.clone(), clear.clone(), many.clone()];
        assert_eq!(claim(&steps, Better::Higher), [Claim::Better; 3]);
        assert_eq!(
            claim(&[many.clone(), clear[..5].to_vec()], Better::Higher),
            [Claim::Better, Claim::TooFew { need: 6 }]
        );
        let mixed = vec![1.0, -1.0, 0.5, -0.7, 0.2, 0.1];
        assert_eq!(claim(&[mixed], Better::Higher), [Claim::None]);
        assert_eq!(claim(&[vec![0.0; 8]], Better::Higher), [Claim::None]);
        assert_eq!(claim(&[vec![]], Better::Higher), [Claim::TooFew { need: 6 }]);
        assert!(compare(&[], Better::Higher, 0.05).is_empty());
    }
}
