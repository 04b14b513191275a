//! Carving a validation split out of the training samples.
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_random::Rng;

/// How many samples to put aside: a count, or a fraction of all (in a recipe: `5000` or `0.1`).
#[derive(Clone, Copy, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SplitSize {
    /// This many.
    Count(usize),
    /// This part, rounded to the nearest sample.
    Fraction(f64),
}

impl SplitSize {
    /// The number of samples out of `n`, at most `n`.
    pub fn of(self, n: usize) -> usize {
        match self {
            Self::Count(count) => count.min(n),
            // A negative or not-a-number fraction becomes 0 in the cast.
            Self::Fraction(fraction) => ((n as f64 * fraction).round() as usize).min(n),
        }
    }
}

/// The samples `0..n` in two parts, (train, validation), each in ascending order: which sample goes where depends on
/// the seed alone.
pub fn split(n: usize, validation: SplitSize, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..n as u32).collect();
    Rng::new(seed, "split", "", 0).shuffle(&mut order);
    let mut train = order.split_off(validation.of(n));
    train.sort_unstable();
    order.sort_unstable();
    (train, order)
}
