//! What the trainer asks of a model.
use crate::Result;
use candle_core::Tensor;

/// Why a forward pass is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Training: batch statistics, dropout drawn from (seed, step).
    Train {
        /// The run's seed.
        seed: u64,
        /// The step whose masks are drawn.
        step: u64,
    },
    /// As training, but nothing is recorded for a backward pass, and running statistics become the mean over the batches
    /// counted in `num_batches_tracked`, all alike (PyTorch's `momentum=None`): how those of averaged weights are gathered.
    Statistics {
        /// The run's seed.
        seed: u64,
        /// The step whose masks are drawn.
        step: u64,
    },
    /// Evaluation: running statistics, no dropout.
    Eval,
}

impl Mode {
    /// Whether this is a training pass, which a backward pass may follow.
    pub fn is_train(self) -> bool {
        matches!(self, Mode::Train { .. })
    }
}

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Images `[n, height, width, channels]` into classes.
    Images {
        /// Rows of a picture.
        height: usize,
        /// Columns of a picture.
        width: usize,
        /// Colour channels, interleaved.
        channels: usize,
        /// Number of classes.
        classes: usize,
    },
    /// The next token of a sequence `[length, batch]`.
    Tokens {
        /// Number of different tokens.
        vocab: usize,
    },
}

/// The loss of one batch.
#[derive(Debug)]
pub struct Loss {
    /// What is differentiated: the mean loss with every regulariser that belongs to the model.
    pub total: Tensor,
    /// The mean negative log-likelihood alone.
    pub nll: Tensor,
    /// The logits it was computed from, `[n, classes]`, if the model made them in one piece.
    pub logits: Option<Tensor>,
}

/// A network that maps a batch to logits and a loss.
pub trait Model: Send {
    /// Logits `[n, classes]` of a batch.
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor>;

    /// The loss of a batch against class indices (u32).
    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> Result<Loss> {
        let logits = self.logits(input, mode)?;
        let nll = crate::ops::cross_entropy(&logits, target, &Default::default())?;
        Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
    }

    /// What is carried from one batch to the next (an LSTM's state), by name, for checkpoints.
    fn carry(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Sets what [`Model::carry`] returned; an empty list forgets it.
    fn set_carry(&mut self, _carry: &[(String, Tensor)]) -> Result<()> {
        Ok(())
    }
}
