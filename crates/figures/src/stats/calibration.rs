//! Whether probabilities mean what they say.
//!
//! Answers are sorted by the probability that was given to them (their confidence) into bins of equal width, (0, 1/m], (1/m,
//! 2/m], …; in each, the mean confidence is compared with the share of right answers. The expected calibration error is the mean of
//! the distances, weighted by the answers in a bin (Guo et al., On Calibration of Modern Neural Networks, 2017).

/// The answers of one bin.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Reliability {
    /// Answers.
    pub samples: u64,
    /// Right ones.
    pub right: u64,
    /// The sum of their confidences.
    pub confidence: f64,
}

impl Reliability {
    /// Mean confidence and share of right answers; `None` without an answer.
    pub fn means(&self) -> Option<(f64, f64)> {
        let n = self.samples as f64;
        (self.samples > 0).then(|| (self.confidence / n, self.right as f64 / n))
    }
}

/// Answers by confidence.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// The bins, from 0 to 1.
    pub bins: Vec<Reliability>,
}

impl Calibration {
    /// No answers yet, in so many bins, at least one.
    pub fn new(bins: usize) -> Self {
        Self { bins: vec![Reliability::default(); bins.max(1)] }
    }

    /// An answer that was given a probability. One that is no number goes into the first bin and makes it no number.
    pub fn add(&mut self, confidence: f64, right: bool) {
        let count = self.bins.len();
        // A cast takes what is no number to 0.
        let place = ((confidence * count as f64).ceil() as usize).saturating_sub(1).min(count - 1);
        let bin = &mut self.bins[place];
        bin.samples += 1;
        bin.right += u64::from(right);
        bin.confidence += confidence;
    }

    /// The expected calibration error; `None` without an answer.
    pub fn expected_error(&self) -> Option<f64> {
        let all: u64 = self.bins.iter().map(|bin| bin.samples).sum();
        let part = |bin: &Reliability| {
            let (confidence, accuracy) = bin.means()?;
            Some((confidence - accuracy).abs() * bin.samples as f64)
        };
        (all > 0).then(|| self.bins.iter().filter_map(part).sum::<f64>() / all as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_the_weighted_distance_of_confidence_and_accuracy() {
        let mut found = Calibration::new(2);
        assert_eq!(found.expected_error(), None);
        // Two answers of (0.25, 0.5], one right; two of 1, both right: 2/4·|0.375 - 0.5| + 0.
        for (confidence, right) in [(0.25, true), (0.5, false), (1.0, true), (1.0, true)] {
            found.add(confidence, right);
        }
        assert_eq!(found.bins[0], Reliability { samples: 2, right: 1, confidence: 0.75 });
        assert_eq!(found.expected_error(), Some(0.0625));
    }

    #[test]
    fn a_confidence_at_an_edge_belongs_below_and_no_number_is_not_lost() {
        let mut found = Calibration::new(4);
        [0.0, 0.25, 0.26, 0.5, 1.0, 1.5].into_iter().for_each(|confidence| found.add(confidence, true));
        assert_eq!(found.bins.iter().map(|bin| bin.samples).collect::<Vec<_>>(), [2, 2, 0, 2]);
        found.add(f64::NAN, false);
        assert!(found.expected_error().unwrap().is_nan());
    }
}
