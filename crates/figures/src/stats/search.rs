//! What a search over hyperparameters says: about its budget, about sensitivity, about speed.
use super::Better;

/// The best value to expect from `k` trials drawn without replacement from the trials made: what a smaller budget would
/// have found. The unbiased estimator (Tang et al. 2020) of what Dodge et al. (2019) estimate.
///
/// A trial that diverged is `None` and worse than all others. `None` when there are fewer than `k` trials, when `k` is 0,
/// and when so many diverged that all `k` might have.
pub fn expected_best(trials: &[Option<f64>], k: usize, better: Better) -> Option<f64> {
    let n = trials.len();
    let mut values: Vec<f64> = trials.iter().flatten().copied().filter(|value| value.is_finite()).collect();
    let diverged = n - values.len();
    if k == 0 || k > n || k <= diverged {
        return None;
    }
    values.sort_unstable_by(|a, b| better.rising(*a).total_cmp(&better.rising(*b)));
    // P(the best of k is number i of n, from the worst) = C(i - 1, k - 1) / C(n, k); from i = n downwards each is the
    // one before times (i - k) / (i - 1), i counted before the step.
    let mut share = k as f64 / n as f64;
    let mut expectation = 0.0;
    for (i, value) in (1..=n).rev().zip(values.iter().rev()) {
        expectation += share * value;
        if i == k {
            break;
        }
        share *= (i - k) as f64 / (i - 1) as f64;
    }
    Some(expectation)
}

/// The share of all trials within `x` of the best one: how much of a grid one can land on and do well. Trials that
/// diverged are `None` and not within anything. `None` when no trial has a value.
pub fn share_within(trials: &[Option<f64>], x: f64, better: Better) -> Option<f64> {
    let values = || trials.iter().flatten().copied().filter(|value| value.is_finite());
    let best = values().reduce(|a, b| if better.than(b, a) { b } else { a })?;
    let within = values().filter(|value| (value - best).abs() <= x).count();
    Some(within as f64 / trials.len() as f64)
}

/// The first time (a step, an epoch, seconds) at which a curve of (time, value) reaches `target`. `None` if it never does;
/// a value that is not a number does not.
pub fn time_to_target<T: Copy>(
    curve: impl IntoIterator<Item = (T, f64)>,
    target: f64,
    better: Better,
) -> Option<T> {
    let reaches = |value: f64| value == target || better.than(value, target);
    curve.into_iter().find(|(_, value)| reaches(*value)).map(|(time, _)| time)
}

/// P(a run of `a` beats a run of `b`), ties counted half; a value that is not finite loses. `None` when either is empty.
pub fn superiority(a: &[f64], b: &[f64], better: Better) -> Option<f64> {
    if a.is_empty() || b.is_empty() {
        return None;
    }
    let worst = |value: f64| if value.is_finite() { better.rising(value) } else { f64::NEG_INFINITY };
    let points: f64 = a
        .iter()
        .flat_map(|a| b.iter().map(move |b| (worst(*a), worst(*b))))
        .map(|(a, b)| {
            if a > b {
                1.0
            } else if a == b {
                0.5
            } else {
                0.0
            }
        })
        .sum();
    Some(points / (a.len() * b.len()) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(values: &[f64]) -> Vec<Option<f64>> {
        values.iter().copied().map(Some).collect()
    }

    #[test]
    fn expected_best_is_the_mean_over_all_subsets() {
        let trials = [0.3, 0.9, 0.1, 0.7, 0.7, 0.5];
        for better in [Better::Higher, Better::Lower] {
            for k in 1..=trials.len() {
                let subsets = (0u32..1 << trials.len()).filter(|s| s.count_ones() as usize == k);
                let bests: Vec<f64> = subsets
                    .map(|s| {
                        let chosen =
                            trials.iter().enumerate().filter(|(i, _)| s >> i & 1 == 1).map(|(_, v)| *v);
                        chosen.reduce(|a, b| if better.than(b, a) { b } else { a }).unwrap()
                    })
                    .collect();
                let mean = bests.iter().sum::<f64>() / bests.len() as f64;
                let found = expected_best(&all(&trials), k, better).unwrap();
                // Sums of at most 20 terms below 1, each with an ulp of error.
                assert!((found - mean).abs() < 1e-14, "{found} {mean}");
            }
        }
    }

    #[test]
    fn expected_best_by_hand() {
        // Of 1, 2, 4 two are drawn: 2, 4, 4.
        let found = expected_best(&all(&[4.0, 1.0, 2.0]), 2, Better::Higher).unwrap();
        assert!((found - 10.0 / 3.0).abs() < 1e-15, "{found}: an ulp, for thirds");
        assert_eq!(expected_best(&all(&[4.0, 1.0, 2.0]), 3, Better::Lower), Some(1.0));
    }

    #[test]
    fn diverged_trials_cost_budget() {
        let trials = [Some(1.0), None, Some(3.0), Some(f64::NAN)];
        assert_eq!(expected_best(&trials, 2, Better::Higher), None, "both draws might have diverged");
        // Three of four: {1, x, x'} twice over {1 or 3 with both diverged} and {1, 3, x} twice: 1, 3, 3, 3.
        assert_eq!(expected_best(&trials, 3, Better::Higher), Some(2.5));
        assert_eq!(expected_best(&trials, 4, Better::Lower), Some(1.0));
        assert_eq!(share_within(&trials, 2.0, Better::Higher), Some(0.5));
    }

    #[test]
    fn budgets_that_cannot_be_have_no_answer() {
        for (trials, k) in [(&[][..], 1), (&[Some(1.0)], 0), (&[Some(1.0)], 2), (&[None, None], 1)] {
            assert_eq!(expected_best(trials, k, Better::Higher), None);
        }
    }

    #[test]
    fn shares_are_of_the_whole_grid() {
        let grid = all(&[0.90, 0.95, 0.96, 0.10]);
        assert_eq!(share_within(&grid, 0.0, Better::Higher), Some(0.25));
        assert_eq!(share_within(&grid, 0.0625, Better::Higher), Some(0.75));
        assert_eq!(share_within(&grid, 0.0, Better::Lower), Some(0.25));
        assert_eq!(share_within(&[None], 1.0, Better::Higher), None);
        assert_eq!(share_within(&[], 1.0, Better::Higher), None);
    }

    #[test]
    fn the_target_is_reached_the_first_time() {
        let curve = [(1, 0.5), (2, f64::NAN), (3, 0.9), (4, 0.7), (5, 0.95)];
        assert_eq!(time_to_target(curve, 0.9, Better::Higher), Some(3));
        assert_eq!(time_to_target(curve, 0.91, Better::Higher), Some(5));
        assert_eq!(time_to_target(curve, 0.99, Better::Higher), None);
        assert_eq!(time_to_target(curve, 0.6, Better::Lower), Some(1));
        assert_eq!(time_to_target::<u64>([], 0.0, Better::Higher), None);
    }

    #[test]
    fn superiority_counts_pairs() {
        assert_eq!(superiority(&[3.0, 1.0], &[2.0, 1.0], Better::Higher), Some(0.625));
        assert_eq!(superiority(&[3.0, 1.0], &[2.0, 1.0], Better::Lower), Some(0.375));
        assert_eq!(superiority(&[f64::NAN], &[2.0], Better::Lower), Some(0.0));
        assert_eq!(superiority(&[], &[2.0], Better::Lower), None);
    }
}
