//! Tests that assume nothing but that, without a difference, either sign of a paired difference is as likely.
use taper_random::Rng;

/// The result of a sign-flip test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SignFlip {
    /// Two-sided: the share of sign patterns with a sum at least as far from zero.
    pub p: f64,
    /// All patterns were tried; if not, a large sample of them.
    pub exact: bool,
}

/// Up to so many pairs all 2ⁿ patterns are tried.
const EXACT: usize = 20;

/// Random patterns beyond that.
const PATTERNS: u64 = 100_000;

/// The sign-flip permutation test of paired differences against a mean of zero, two-sided. Without differences, or with
/// one that is not finite, p is 1: nothing is shown.
pub fn sign_flip(differences: &[f64]) -> SignFlip {
    let size: f64 = differences.iter().map(|d| d.abs()).sum();
    let observed = differences.iter().sum::<f64>().abs();
    if !size.is_finite() || size == 0.0 {
        return SignFlip { p: 1.0, exact: true };
    }
    // A pattern whose sum is the observed one up to the order of adding is as extreme.
    let threshold = observed - 1e-12 * size;
    let extreme = |signs: &mut dyn FnMut() -> bool| {
        let sum: f64 = differences.iter().map(|d| if signs() { *d } else { -d }).sum();
        sum.abs() >= threshold
    };
    if differences.len() <= EXACT {
        // A pattern and its opposite are equally extreme: the first sign may stay.
        let patterns = 1u32 << (differences.len() - 1);
        let count = (0..patterns).filter(|pattern| {
            let mut bits = pattern << 1;
            extreme(&mut || {
                let sign = bits & 1 == 0;
                bits >>= 1;
                sign
            })
        });
        return SignFlip { p: count.count() as f64 / f64::from(patterns), exact: true };
    }
    let mut rng = Rng::new(0, "sign-flip", "", 0);
    let count = (0..PATTERNS).filter(|_| extreme(&mut || rng.next_u64() >> 63 == 0)).count();
    // The observed pattern is one of them, so that p is never 0.
    SignFlip { p: (count + 1) as f64 / (PATTERNS + 1) as f64, exact: false }
}

/// Holm's step-down correction: p-values that hold for the family as a whole, in the order given. A p-value that is not a
/// number counts as 1.
pub fn holm(ps: &[f64]) -> Vec<f64> {
    let p = |i: usize| if ps[i].is_nan() { 1.0 } else { ps[i] };
    let mut order: Vec<usize> = (0..ps.len()).collect();
    order.sort_by(|a, b| p(*a).total_cmp(&p(*b)));
    let mut adjusted = vec![0.0; ps.len()];
    let mut largest: f64 = 0.0;
    for (rank, i) in order.into_iter().enumerate() {
        largest = largest.max((p(i) * (ps.len() - rank) as f64).min(1.0));
        adjusted[i] = largest;
    }
    adjusted
}

/// The smallest number of pairs with which comparison `index` of a family with these `pairs` can come out significant at
/// level `alpha` after Holm's correction, when every test of the family comes out as clearly as its pairs allow: beside
/// others with more pairs, which are stepped over first, it takes fewer. A level that is not above 0 is never reached:
/// `usize::MAX`.
pub fn pairs_needed(pairs: &[usize], index: usize, alpha: f64) -> usize {
    // 2 of 2ⁿ patterns, however clear the result; one pair or none shows nothing.
    let floor = |n: usize| if n == 0 { 1.0 } else { 2f64.powi(1 - n.min(1100) as i32) };
    let mut ps: Vec<f64> = pairs.iter().map(|n| floor(*n)).collect();
    // Alone at the head of the family it would take this many: more are never needed.
    let most = least_pairs(alpha, pairs.len());
    let enough = |n: &usize| {
        let Some(own) = ps.get_mut(index) else { return false };
        *own = floor(*n);
        holm(&ps)[index] <= alpha
    };
    match most {
        usize::MAX => most,
        most => (1..most).find(enough).unwrap_or(most),
    }
}

/// The smallest number of pairs with which a sign-flip test can come out significant at level `alpha` after Holm's
/// correction over `comparisons` with as many pairs each: its smallest p-value, 2 of 2ⁿ patterns, must not exceed
/// alpha / comparisons. A level that is not above 0 is never reached: `usize::MAX`.
pub fn least_pairs(alpha: f64, comparisons: usize) -> usize {
    let limit = alpha / comparisons.max(1) as f64;
    if limit > 0.0 {
        (1..1100).find(|n| 2f64.powi(1 - n) <= limit).map_or(usize::MAX, |n| n as usize)
    } else {
        usize::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p_values_are_counts_of_patterns() {
        // By hand: (1, 2, 3) sums to 6, reached or passed by the patterns +++ and --- of 8.
        assert_eq!(sign_flip(&[1.0, 2.0, 3.0]), SignFlip { p: 0.25, exact: true });
        // By hand: (3, -1) sums to 2; |±3 ± 1| is 4 or 2, always at least 2.
        assert_eq!(sign_flip(&[3.0, -1.0]).p, 1.0);
        // Five pairs that agree: 2 of 32 patterns, which is why five seeds cannot reach 5 %.
        assert_eq!(sign_flip(&[0.1; 5]).p, 0.0625);
        assert_eq!(sign_flip(&[0.1; 6]).p, 0.03125);
        assert_eq!(sign_flip(&[-0.1; 6]).p, 0.03125);
    }

    // from scipy.stats import permutation_test; permutation_test((d,), sum, permutation_type="samples",
    // n_resamples=inf).pvalue, scipy 1.17.1
    #[test]
    fn p_values_are_scipys() {
        for (differences, p) in [
            (vec![0.5, -0.25, 1.0, 0.75, 0.125, -0.5], 0.34375),
            (vec![1.0, 2.0, -3.0, 4.0, 5.0, 6.0, 7.0, -1.0], 0.09375),
            (vec![0.31, 0.12, -0.05, 0.22, 0.4, 0.18, 0.09], 0.03125),
        ] {
            // A count over a power of two: no rounding at all.
            assert_eq!(sign_flip(&differences).p, p);
        }
    }

    #[test]
    fn many_pairs_are_sampled_and_agree_with_the_normal_limit() {
        // 25 pairs, 17 of them +1: P(|sum| >= 9) for 25 fair coins is 2 · P(Bin(25, 1/2) >= 17), in Python
        // 2 * sum(math.comb(25, k) for k in range(17, 26)) / 2**25.
        let differences: Vec<f64> = (0..25).map(|i| if i < 17 { 1.0 } else { -1.0 }).collect();
        let found = sign_flip(&differences);
        assert!(!found.exact);
        // Five standard errors of a share of about 0.11 among 100,000 patterns.
        assert!((found.p - 0.10775214433670044).abs() < 5.0 * (0.108f64 * 0.892 / 1e5).sqrt(), "{}", found.p);
        assert_eq!(sign_flip(&differences), found);
    }

    #[test]
    fn nothing_is_shown_by_nothing() {
        for differences in [&[][..], &[0.0; 7], &[1.0, f64::NAN], &[f64::INFINITY]] {
            assert_eq!(sign_flip(differences).p, 1.0);
        }
        assert_eq!(sign_flip(&[1.0]).p, 1.0);
    }

    #[test]
    fn holm_steps_down() {
        // By hand: 0.01 · 4, 0.02 · 3, 0.03 · 2 (not below the one before), 0.5 · 1.
        assert_eq!(holm(&[0.03, 0.5, 0.01, 0.02]), [0.06, 0.5, 0.04, 0.06]);
        assert_eq!(holm(&[0.4, 0.6]), [0.8, 0.8]);
        assert_eq!(holm(&[f64::NAN, 0.01]), [1.0, 0.02]);
        assert_eq!(holm(&[]), Vec::<f64>::new());
    }

    #[test]
    fn beside_comparisons_with_more_pairs_fewer_are_needed() {
        // By hand, at 5 %: alone 2/2⁶; last of three 2/2⁶ · 1; with one of the others as poor, 2/2⁷ · 2.
        for (pairs, index, need) in [
            (&[3][..], 0, 6),
            (&[10, 6, 10], 1, 6),
            (&[10, 6, 6], 1, 7),
            (&[6, 6, 6], 0, 7),
            (&[0, 10], 0, 6),
        ] {
            assert_eq!(pairs_needed(pairs, index, 0.05), need, "{pairs:?}");
        }
        assert_eq!(pairs_needed(&[6, 6], 0, 0.0), usize::MAX);
        assert_eq!(pairs_needed(&[], 0, 0.05), 6);
    }

    #[test]
    fn the_least_number_of_pairs_is_where_two_patterns_are_rare_enough() {
        for (alpha, comparisons, n) in
            [(0.05, 1, 6), (0.05, 2, 7), (0.05, 3, 7), (0.05, 6, 8), (0.01, 1, 8), (1.0, 1, 1)]
        {
            assert_eq!(least_pairs(alpha, comparisons), n);
            // Pairs that all agree reach it, one pair fewer does not.
            let adjusted = |n: usize| sign_flip(&vec![1.0; n]).p * comparisons as f64;
            assert!(adjusted(n) <= alpha && (n == 1 || adjusted(n - 1) > alpha));
        }
        assert_eq!(least_pairs(0.05, 0), 6);
        assert_eq!(least_pairs(0.0, 1), usize::MAX);
        assert_eq!(least_pairs(f64::NAN, 1), usize::MAX);
    }
}
