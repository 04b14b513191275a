//! Intervals for the mean of a few runs.
use super::distribution::{normal_cdf, normal_quantile, student_quantile};
use serde::Serialize;
use taper_random::Rng;

/// A mean with an interval around it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// How many values it is the mean of.
    pub n: usize,
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation with n - 1; 0 for a single value.
    pub std: f64,
    /// Lower end; −∞ for a single value, of which nothing more is known (JSON: null).
    pub low: f64,
    /// Upper end; ∞ for a single value.
    pub high: f64,
}

impl Interval {
    /// Half its width, if it has one: the number after ±.
    pub fn half_width(&self) -> Option<f64> {
        Some((self.high - self.low) / 2.0).filter(|width| width.is_finite())
    }
}

/// Mean and standard deviation; `None` without values or with one that is not finite.
fn moments(values: &[f64]) -> Option<(f64, f64)> {
    if values.is_empty() || !values.iter().all(|value| value.is_finite()) {
        return None;
    }
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((mean, if values.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 }))
}

/// Student's t interval of the mean at `level` (0.95): right for values that scatter normally, and the only one with a
/// meaning for two or three. Equal values have an interval of width 0. `None` without values or with one that is not
/// finite.
pub fn student(values: &[f64], level: f64) -> Option<Interval> {
    let (mean, std) = moments(values)?;
    let n = values.len();
    let half = match n {
        1 => f64::INFINITY,
        _ => student_quantile(0.5 + level / 2.0, n as f64 - 1.0) * std / (n as f64).sqrt(),
    };
    Some(Interval { n, mean, std, low: mean - half, high: mean + half })
}

/// Up to so many values all nⁿ resamples are taken in place of random ones.
const EXACT: usize = 6;

/// Random resamples beyond that. The ends move by about a hundredth of the interval's width between two generators.
const RESAMPLES: usize = 10_000;

/// The bias-corrected and accelerated bootstrap interval of the mean at `level` (Efron 1987): it follows the values'
/// skew. Up to six values it is exact; beyond that its generator is counter-based, so that equal values have equal
/// intervals. It needs about five values to be worth its name. Equal values have an interval of width 0. `None` without
/// values or with one that is not finite.
pub fn bca(values: &[f64], level: f64) -> Option<Interval> {
    let (mean, std) = moments(values)?;
    let n = values.len();
    if n == 1 || std == 0.0 {
        return student(values, level);
    }
    let mut means = resampled_means(values);
    means.sort_unstable_by(f64::total_cmp);

    // A resample that is a permutation of the values has their mean, up to the order of its sum.
    let slack = 1e-12 * values.iter().map(|value| value.abs()).sum::<f64>() / n as f64;
    let below = means.partition_point(|m| *m < mean - slack);
    let up_to = means.partition_point(|m| *m <= mean + slack);
    let bias = normal_quantile((below + up_to) as f64 / (2 * means.len()) as f64);

    // The jackknife's means differ from their own mean by (mean - value) / (n - 1): the factor cancels.
    let (squares, cubes) = values.iter().fold((0.0, 0.0), |(squares, cubes), value| {
        let d: f64 = value - mean;
        (squares + d * d, cubes + d * d * d)
    });
    let acceleration = cubes / (6.0 * squares.powf(1.5));

    let end = |p: f64| {
        let z = bias + normal_quantile(p);
        quantile(&means, normal_cdf(bias + z / (1.0 - acceleration * z)))
    };
    let tail = (1.0 - level) / 2.0;
    Some(Interval { n, mean, std, low: end(tail), high: end(1.0 - tail) })
}

/// The means of all resamples of few values, or of many resamples of many.
fn resampled_means(values: &[f64]) -> Vec<f64> {
    let n = values.len();
    if n <= EXACT {
        let all = n.pow(n as u32);
        let resample =
            |index: usize| (0..n).fold((index, 0.0), |(rest, sum), _| (rest / n, sum + values[rest % n])).1;
        return (0..all).map(|index| resample(index) / n as f64).collect();
    }
    let mut rng = Rng::new(0, "bootstrap", "mean", 0);
    let mut draw = || values[rng.below(n as u64) as usize];
    (0..RESAMPLES).map(|_| (0..n).map(|_| draw()).sum::<f64>() / n as f64).collect()
}

/// The quantile of sorted values, linear between them.
fn quantile(sorted: &[f64], p: f64) -> f64 {
    let place = p.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, part) = (place.floor() as usize, place.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + part * (sorted[high] - sorted[low])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1e-12 relative: a few rounding errors on top of the quantiles' own.
    fn close(found: Option<Interval>, (mean, low, high): (f64, f64, f64)) {
        let found = found.unwrap();
        for (found, expected) in [(found.mean, mean), (found.low, low), (found.high, high)] {
            assert!((found - expected).abs() <= 1e-12 * expected.abs(), "{found} for {expected}");
        }
    }

    // from scipy.stats import t; t.interval(0.95, n - 1, mean, sem), scipy 1.17.1
    #[test]
    fn student_is_scipys() {
        close(student(&[1.0, 2.0], 0.95), (1.5, -4.853102368087347, 7.853102368087347));
        close(
            student(&[0.9742, 0.9731, 0.976], 0.95),
            (0.9744333333333333, 0.9707965240495816, 0.9780701426170849),
        );
        close(student(&[1.0, 4.0, 2.5, -3.0, 0.25], 0.95), (0.95, -2.3233805029091457, 4.223380502909145));
    }

    // All nⁿ resamples by itertools.product, then scipy 1.17.1's own formula: z0 = ndtri((#< + #<=) / 2B), the jackknife's
    // acceleration, numpy.percentile at ndtr(z0 + (z0 + z) / (1 - a (z0 + z))).
    #[test]
    fn the_exact_bootstrap_is_scipys_formula_on_all_resamples() {
        close(bca(&[1.0, 2.0, 4.0], 0.95), (2.3333333333333335, 1.3333333333333333, 3.7665896523166538));
        close(bca(&[0.5, 0.75, 0.625, 3.0], 0.95), (1.21875, 0.59375, 2.4375));
        close(bca(&[1.0, 2.5, -0.5, 8.0, 1.25], 0.95), (2.45, 0.7, 6.3));
        close(bca(&[-1.0, 0.5, 0.25, 0.75, 0.125, -0.25], 0.95), (0.0625, -0.5, 0.4375));
    }

    // scipy.stats.bootstrap((values,), numpy.mean, n_resamples=1_000_000, method="BCa"), scipy 1.17.1: 1.2812 to 3.1458.
    #[test]
    fn the_random_bootstrap_agrees_with_scipys_to_its_own_noise() {
        let found = bca(&MANY, 0.95).unwrap();
        let width = 3.1458 - 1.2812;
        // An end of the interval is a quantile of 10,000 means: its standard error is about 1.3 % of the width.
        assert!(
            (found.low - 1.2812).abs() < 0.04 * width && (found.high - 3.1458).abs() < 0.04 * width,
            "{found:?}"
        );
        assert_eq!(bca(&MANY, 0.95), Some(found), "the same values give the same interval");
    }

    const MANY: [f64; 12] = [1.0, 1.25, 0.5, 3.5, 1.75, 0.875, 2.25, 1.5, 6.0, 1.125, 0.75, 2.0];

    #[test]
    fn few_equal_and_broken_values_have_an_answer() {
        for interval in [student, bca] {
            assert_eq!(interval(&[], 0.95), None);
            assert_eq!(interval(&[1.0, f64::NAN], 0.95), None);
            assert_eq!(interval(&[1.0, f64::INFINITY, 2.0], 0.95), None);
            let one = interval(&[3.0], 0.95).unwrap();
            assert_eq!((one.mean, one.std, one.low, one.high), (3.0, 0.0, f64::NEG_INFINITY, f64::INFINITY));
            assert_eq!(one.half_width(), None);
            let equal = interval(&[0.5; 4], 0.95).unwrap();
            assert_eq!((equal.low, equal.high, equal.half_width()), (0.5, 0.5, Some(0.0)));
            let two = interval(&[1.0, 2.0], 0.95).unwrap();
            assert!(two.low < 1.5 && 1.5 < two.high);
        }
    }
}
