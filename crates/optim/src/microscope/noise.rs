//! Gradient noise from two halves of a batch.
use crate::Result;
use crate::sums::dot;
use candle_core::Var;
use candle_core::backprop::GradStore;

/// Products of the gradients a and b of two halves of a batch of `samples` samples, of one parameter or of many.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Halves {
    /// |a|².
    pub aa: f64,
    /// a · b.
    pub ab: f64,
    /// |b|².
    pub bb: f64,
    /// Samples of both halves together.
    pub samples: f64,
}

/// What two halves tell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// The trace of the covariance of a sample's gradient, unbiased: n |a - b|² / 4.
    pub trace: f64,
    /// The squared norm of the true gradient, unbiased: a · b. It can be negative.
    pub square: f64,
}

impl Halves {
    /// Of one parameter, where both halves have a gradient.
    pub fn of(a: &GradStore, b: &GradStore, var: &Var, samples: f64) -> Result<Option<Self>> {
        let Some((a, b)) = a.get(var).zip(b.get(var)) else { return Ok(None) };
        Ok(Some(Self { aa: dot(a, a)?, ab: dot(a, b)?, bb: dot(b, b)?, samples }))
    }

    /// Of several parameters together.
    pub fn plus(self, other: Self) -> Self {
        Self {
            aa: self.aa + other.aa,
            ab: self.ab + other.ab,
            bb: self.bb + other.bb,
            samples: self.samples.max(other.samples),
        }
    }

    /// |a - b|² / 4: an estimate of the noise in the mean of both.
    fn apart(&self) -> f64 {
        (0.25 * (self.aa - 2.0 * self.ab + self.bb)).max(0.0)
    }

    /// Noise and signal.
    pub fn noise(&self) -> Noise {
        Noise { trace: self.samples * self.apart(), square: self.ab }
    }

    /// |g|² of the mean gradient over what noise alone would make of it: 1 on average where there is no signal.
    pub fn excess(&self) -> Option<f64> {
        let mean = 0.25 * (self.aa + 2.0 * self.ab + self.bb);
        (self.apart() > 0.0).then(|| mean / self.apart())
    }
}

impl Noise {
    /// The simple noise scale tr Σ / |G|²: the batch at which noise and signal are equal. `None` where the halves show no signal.
    pub fn scale(&self) -> Option<f64> {
        (self.square > 0.0).then(|| self.trace / self.square)
    }

    /// Signal to noise in the mean over `samples`: |G|² / (tr Σ / n).
    pub fn ratio(&self, samples: f64) -> Option<f64> {
        (self.trace > 0.0).then(|| self.square * samples / self.trace)
    }
}

/// The criterion for an early stop: 1 - the mean over all elements of [`Halves::excess`], where the variance is pooled over each
/// tensor. Above 0, gradients are no larger than noise makes them. Of (elements, halves) of each parameter.
pub fn early_stop(params: impl IntoIterator<Item = (usize, Halves)>) -> Option<f64> {
    let (mut sum, mut all) = (0.0, 0.0);
    for (elements, halves) in params {
        if let Some(excess) = halves.excess() {
            sum += elements as f64 * excess;
            all += elements as f64;
        }
    }
    (all > 0.0).then(|| 1.0 - sum / all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uniform noise of a known variance, from a generator of a line.
    struct Draws(u64);

    impl Draws {
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1u64 << 53) as f64 - 0.5
        }
    }

    #[test]
    fn noise_of_a_known_variance_is_measured() {
        // Samples whose gradient is G + noise, of variance 1/12 in each of 2000 elements; halves of 16 samples each.
        let (elements, half, signal) = (2000usize, 16, 0.1);
        let (mut draws, mut all, mut excess) = (Draws(7), Vec::new(), Vec::new());
        for _ in 0..200 {
            let mut mean = || -> Vec<f64> {
                let sum = |_| (0..half).map(|_| signal + draws.next()).sum::<f64>() / half as f64;
                (0..elements).map(sum).collect()
            };
            let (a, b) = (mean(), mean());
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum();
            let halves =
                Halves { aa: dot(&a, &a), ab: dot(&a, &b), bb: dot(&b, &b), samples: 2.0 * half as f64 };
            all.push(halves.noise());
            let still = |v: Vec<f64>| v.into_iter().map(|v| v - signal).collect::<Vec<f64>>();
            let (a, b) = (still(a), still(b));
            let noise = Halves { aa: dot(&a, &a), ab: dot(&a, &b), bb: dot(&b, &b), samples: 32.0 };
            excess.push((elements, noise));
        }
        let mean = |of: fn(&Noise) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        let (trace, square) = (mean(|n| n.trace), mean(|n| n.square));
        // 200 estimates of 2000 elements each: a standard error of 0.2 % of the trace.
        let (true_trace, true_square) = (elements as f64 / 12.0, elements as f64 * signal * signal);
        assert!((trace / true_trace - 1.0).abs() < 0.01, "{trace}, not {true_trace}");
        assert!((square / true_square - 1.0).abs() < 0.01, "{square}, not {true_square}");
        let scale = Noise { trace, square }.scale().unwrap();
        assert!((scale / (true_trace / true_square) - 1.0).abs() < 0.02);
        let ratio = Noise { trace, square }.ratio(32.0).unwrap();
        assert!((ratio * scale / 32.0 - 1.0).abs() < 1e-12);
        // Of noise alone the criterion is 0 on average.
        let criterion = early_stop(excess).unwrap();
        assert!(criterion.abs() < 0.02, "{criterion}");
    }

    #[test]
    fn halves_that_agree_have_no_noise_and_halves_that_oppose_no_signal() {
        let same = Halves { aa: 2.0, ab: 2.0, bb: 2.0, samples: 8.0 };
        assert_eq!(same.noise(), Noise { trace: 0.0, square: 2.0 });
        assert_eq!((same.noise().scale(), same.noise().ratio(8.0), same.excess()), (Some(0.0), None, None));
        let opposed = Halves { ab: -2.0, ..same };
        assert_eq!((opposed.noise().scale(), opposed.excess()), (None, Some(0.0)));
        assert_eq!(early_stop([(3, opposed)]), Some(1.0));
        assert_eq!(early_stop([(3, same)]), None);
    }
}
