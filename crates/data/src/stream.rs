//! Text as parallel contiguous streams, cut into windows.
//!
//! The protocol of AWD-LSTM: the tokens are cut into `batch` streams of equal length (the rest is dropped), read side by
//! side; a window is some steps of all streams, and its targets are one step later.
use std::sync::Arc;

use taper_random::Rng;

use super::DataError;

/// Tokens as parallel streams.
#[derive(Clone, Debug)]
pub struct TextStream {
    tokens: Arc<[u32]>,
    batch: usize,
    steps: usize,
}

/// How long training windows are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    /// The usual length.
    pub base: usize,
    /// The share of windows around half of it.
    pub half: f64,
    /// The standard deviation of a drawn length.
    pub deviation: f64,
    /// The least length.
    pub least: usize,
}

impl Lengths {
    /// AWD-LSTM's: 5 % around half the base, deviation 5, no less than 5.
    pub fn awd(base: usize) -> Self {
        Self { base, half: 0.05, deviation: 5.0, least: 5 }
    }
}

/// Some steps of all streams.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window {
    /// The first step.
    pub start: usize,
    /// How many steps.
    pub len: usize,
    /// The factor of this window's learning rate: its drawn length over the base length.
    pub rate_scale: f64,
}

/// The tokens of a window, time-major: step by step, all streams of a step together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextBatch {
    /// What the model reads.
    pub input: Vec<u32>,
    /// What it should predict: the same, one step later.
    pub target: Vec<u32>,
    /// Steps.
    pub len: usize,
    /// Streams.
    pub batch: usize,
}

impl TextStream {
    /// `batch` streams of equal length, of at least three tokens: fewer leave nothing to train on.
    pub fn new(tokens: Arc<[u32]>, batch: usize) -> Result<Self, DataError> {
        let steps = tokens.len().checked_div(batch).unwrap_or(0);
        if steps < 3 {
            let message =
                format!("expected at least 3 tokens for each of {batch} streams, found {}", tokens.len());
            return Err(DataError::option("text", "batch_size", message));
        }
        Ok(Self { tokens, batch, steps })
    }

    /// The same tokens in another number of streams.
    pub fn in_streams(&self, batch: usize) -> Result<Self, DataError> {
        Self::new(self.tokens.clone(), batch)
    }

    /// Streams.
    pub fn streams(&self) -> usize {
        self.batch
    }

    /// Tokens of a stream.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The training windows of an epoch.
    ///
    /// As in the published code, the rate follows the length that was drawn, also where the stream ends before it, and a
    /// single token left at the end is not used.
    pub fn windows(&self, seed: u64, epoch: u64, lengths: Lengths) -> impl Iterator<Item = Window> + use<> {
        let (mut rng, steps, mut start) = (Rng::new(seed, "windows", "", epoch), self.steps, 0);
        let base = lengths.base as f64;
        std::iter::from_fn(move || {
            if start + 2 >= steps {
                return None;
            }
            let around = if rng.uniform() < lengths.half { base / 2.0 } else { base };
            let drawn = ((around + lengths.deviation * rng.normal()) as usize).max(lengths.least).max(1);
            let window = Window { start, len: drawn.min(steps - 1 - start), rate_scale: drawn as f64 / base };
            start += window.len;
            Some(window)
        })
    }

    /// Windows of `base` steps that cover every token, for evaluation.
    pub fn fixed_windows(&self, base: usize) -> impl Iterator<Item = Window> + use<> {
        let targets = self.steps - 1;
        let base = base.max(1);
        (0..targets).step_by(base).map(move |start| Window {
            start,
            len: base.min(targets - start),
            rate_scale: 1.0,
        })
    }

    /// The tokens of `len` steps from `start`. Panics when they reach beyond the stream.
    pub fn batch(&self, start: usize, len: usize) -> TextBatch {
        assert!(start + len < self.steps, "window {start}+{len} reaches beyond {} steps", self.steps);
        let at = |step: usize| (0..self.batch).map(move |stream| self.tokens[stream * self.steps + step]);
        TextBatch {
            input: (start..start + len).flat_map(at).collect(),
            target: (start + 1..=start + len).flat_map(at).collect(),
            len,
            batch: self.batch,
        }
    }
}
