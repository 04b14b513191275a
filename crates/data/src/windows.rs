//! Text as windows of one length that stand alone, for networks that read a context at once and carry nothing.
//!
//! Texts follow each other without a gap: every position of a window is read and predicted, whatever ends inside it.
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_random::Rng;

use super::{DataError, TextBatch};

/// Which windows a training batch has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Drawn anywhere in the text, each alone.
    #[default]
    Random,
    /// One after another through the text, every epoch alike.
    Sequential,
}

/// Tokens as windows of `length`, `batch` of them at a time.
#[derive(Clone, Debug)]
pub struct TextWindows {
    tokens: Arc<[u32]>,
    batch: usize,
    length: usize,
}

impl TextWindows {
    /// Windows of a text of at least two tokens: one to read, one to predict.
    pub fn new(tokens: Arc<[u32]>, batch: usize, length: usize) -> Result<Self, DataError> {
        if tokens.len() < 2 {
            return Err(DataError::Short { found: tokens.len() });
        }
        Ok(Self { tokens, batch: batch.max(1), length: length.max(1) })
    }

    /// The same windows, so many at a time.
    pub fn in_batches(&self, batch: usize) -> Self {
        Self { batch: batch.max(1), ..self.clone() }
    }

    /// Windows of another text, as long and as many at a time.
    pub fn over(&self, tokens: Arc<[u32]>) -> Result<Self, DataError> {
        Self::new(tokens, self.batch, self.length)
    }

    /// Windows of a batch.
    pub fn at_a_time(&self) -> usize {
        self.batch
    }

    /// Tokens that can be predicted: all but the first.
    fn targets(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Training batches of an epoch: as many as the text has room for without a token twice, all full. 0 where it is too short for
    /// one.
    pub fn batches(&self) -> usize {
        self.targets() / self.batch.saturating_mul(self.length)
    }

    /// Batch `number` of an epoch, a function of (seed, epoch, number). The text must have room for a window.
    pub fn batch(&self, order: Order, seed: u64, epoch: u64, number: usize) -> TextBatch {
        let first = number * self.batch;
        let starts: Vec<usize> = match order {
            Order::Sequential => (first..first + self.batch).map(|window| window * self.length).collect(),
            Order::Random => {
                let mut rng = Rng::new(seed, "windows", "random", epoch).at(first as u64);
                let places = self.tokens.len().saturating_sub(self.length) as u64;
                (0..self.batch).map(|_| rng.below(places) as usize).collect()
            }
        };
        self.gather(&starts, self.length)
    }

    /// Whole windows from the start of the text on, and the tokens that are left at its end.
    fn whole(&self) -> (usize, usize) {
        (self.targets() / self.length, self.targets() % self.length)
    }

    /// Batches that predict every token but the first once: all windows from the start on, then what is left, which is shorter and
    /// alone.
    pub fn cover(&self) -> usize {
        let (windows, rest) = self.whole();
        windows.div_ceil(self.batch) + usize::from(rest > 0)
    }

    /// Batch `number` of those. Panics when there are fewer.
    pub fn covering(&self, number: usize) -> TextBatch {
        assert!(number < self.cover(), "batch {number} of {}", self.cover());
        let (windows, rest) = self.whole();
        let first = number * self.batch;
        if first >= windows {
            return self.gather(&[windows * self.length], rest);
        }
        let starts: Vec<usize> =
            (first..windows.min(first + self.batch)).map(|window| window * self.length).collect();
        self.gather(&starts, self.length)
    }

    /// Windows side by side, step by step.
    fn gather(&self, starts: &[usize], len: usize) -> TextBatch {
        let at = |step: usize| starts.iter().map(move |start| self.tokens[start + step]);
        TextBatch {
            input: (0..len).flat_map(at).collect(),
            target: (1..=len).flat_map(at).collect(),
            len,
            batch: starts.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(tokens: u32, batch: usize, length: usize) -> TextWindows {
        TextWindows::new((0..tokens).collect(), batch, length).unwrap()
    }

    /// The streams of a batch.
    fn streams(batch: &TextBatch) -> Vec<Vec<u32>> {
        (0..batch.batch).map(|s| batch.input.iter().skip(s).step_by(batch.batch).copied().collect()).collect()
    }

    #[test]
    fn a_text_without_a_token_to_predict_is_refused_whosever_it_is() {
        for found in [0, 1] {
            let refused = TextWindows::new((0..found).collect(), 1, 1).unwrap_err();
            let expected =
                format!("expected a text of at least 2 tokens, to read and to predict, found {found}");
            assert_eq!(refused.to_string(), expected);
        }
        assert!(TextWindows::new([1, 2].into(), 1, 1).is_ok());
    }

    #[test]
    fn batches_in_order_go_through_the_text_and_predict_the_next_token() {
        let text = windows(25, 2, 4);
        assert_eq!(text.batches(), 3);
        let batch = text.batch(Order::Sequential, 1, 7, 1);
        assert_eq!(streams(&batch), [[8, 9, 10, 11], [12, 13, 14, 15]]);
        assert!(batch.input.iter().zip(&batch.target).all(|(input, target)| input + 1 == *target));
        assert_eq!(windows(24, 2, 4).batches(), 2);
        assert_eq!(windows(8, 2, 4).batches(), 0);
    }

    #[test]
    fn drawn_windows_are_functions_of_seed_epoch_and_number_and_reach_every_place() {
        let text = windows(40, 3, 8);
        let drawn = |seed, epoch, number| text.batch(Order::Random, seed, epoch, number);
        assert_eq!(drawn(1, 2, 3), drawn(1, 2, 3));
        for other in [drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4)] {
            assert_ne!(other, drawn(1, 2, 3));
        }
        // A larger batch begins with the same windows: a place is drawn by its number.
        let wide = text.in_batches(6).batch(Order::Random, 1, 2, 0);
        let (first, second) = (drawn(1, 2, 0), drawn(1, 2, 1));
        assert_eq!(streams(&wide), [streams(&first), streams(&second)].concat());
        let mut starts: Vec<u32> =
            (0..400).flat_map(|number| streams(&drawn(1, 0, number))).map(|s| s[0]).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts, (0..32).collect::<Vec<u32>>());
    }

    #[test]
    fn an_evaluation_predicts_every_token_but_the_first_once() {
        for (tokens, batch, length) in [(2, 5, 4), (5, 1, 4), (25, 2, 4), (26, 2, 4), (100, 7, 9), (3, 1, 1)]
        {
            let text = windows(tokens, batch, length);
            let mut predicted: Vec<u32> =
                (0..text.cover()).flat_map(|number| text.covering(number).target).collect();
            predicted.sort_unstable();
            assert_eq!(predicted, (1..tokens).collect::<Vec<u32>>(), "{tokens} {batch} {length}");
        }
    }
}
