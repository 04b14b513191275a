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

impl std::fmt::Display for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Task::Images { height, width, channels, classes } => {
                let s = if *channels == 1 { "" } else { "s" };
                write!(f, "images of {height}×{width} with {channels} channel{s} in {classes} classes")
            }
            Task::Tokens { vocab } => write!(f, "text of {vocab} different tokens"),
        }
    }
}

impl Task {
    /// A picture of one pixel in one class.
    pub(crate) const LEAST_IMAGES: Self = Task::Images { height: 1, width: 1, channels: 1, classes: 1 };
    /// Text of one token.
    pub(crate) const LEAST_TOKENS: Self = Task::Tokens { vocab: 1 };
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

/// A network whose products multiply other operands: see [`with_operands`](crate::ops::with_operands).
pub struct WithOperands {
    /// The network.
    pub model: Box<dyn Model>,
    /// What its products multiply.
    pub operands: crate::ops::Operands,
}

impl Model for WithOperands {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        crate::ops::with_operands(self.operands, || self.model.logits(input, mode))
    }

    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> Result<Loss> {
        crate::ops::with_operands(self.operands, || self.model.loss(input, target, mode))
    }

    fn advance(&mut self, input: &Tensor, mode: Mode) -> Result<()> {
        crate::ops::with_operands(self.operands, || self.model.advance(input, mode))
    }

    fn next_logits(&mut self, tokens: &Tensor) -> Result<Tensor> {
        crate::ops::with_operands(self.operands, || self.model.next_logits(tokens))
    }

    fn carry(&self) -> Vec<(String, Tensor)> {
        self.model.carry()
    }

    fn set_place(&mut self, first: usize) {
        self.model.set_place(first);
    }

    fn set_carry(&mut self, carry: &[(String, Tensor)]) -> Result<()> {
        self.model.set_carry(carry)
    }

    fn ignored(&self) -> Option<i64> {
        self.model.ignored()
    }

    fn wants_images(&self) -> usize {
        self.model.wants_images()
    }

    fn see_images(&mut self, images: &Tensor) -> Result<()> {
        self.model.see_images(images)
    }
}

/// A network that maps a batch to logits and a loss.
pub trait Model: Send {
    /// Logits `[n, classes]` of a batch; for text, of each token in turn.
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor>;

    /// The loss of a batch against class indices (u32), one for each row of the logits: `[n]`, or `[length, batch]` for text.
    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> Result<Loss> {
        let logits = self.logits(input, mode)?;
        let nll = crate::ops::cross_entropy(&logits, &target.flatten_all()?, &Default::default())?;
        Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
    }

    /// The target that does not count in [`Model::loss`], whose mean is over the others; none by default. Means of several batches are
    /// weighted by the targets that count.
    fn ignored(&self) -> Option<i64> {
        None
    }

    /// How many of the first training images it wants to see before the first step; none by default.
    fn wants_images(&self) -> usize {
        0
    }

    /// Shows it the first training images `[n, height, width, channels]`, normalised and not augmented: as many as
    /// [`Model::wants_images`] says, or all if there are fewer. Before the first step of a run and never after it: what it
    /// computes from them is saved with the weights.
    fn see_images(&mut self, _images: &Tensor) -> Result<()> {
        Ok(())
    }

    /// Moves on what is carried as [`Model::logits`] does, where nobody asks for the logits.
    fn advance(&mut self, input: &Tensor, mode: Mode) -> Result<()> {
        self.logits(input, mode).map(drop)
    }

    /// The logits `[batch, vocabulary]` of what comes after `tokens` `[length, batch]`, which go on from those of the calls before:
    /// how text is continued. [`Model::set_carry`] with an empty list begins anew.
    ///
    /// By default those of [`Model::logits`], for a network that carries its state. One that sees a number of tokens keeps what it
    /// needs of them; when they are more than it sees, the oldest ones fall out.
    fn next_logits(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let batch = match *tokens.dims() {
            [length, batch] if length * batch > 0 => batch,
            ref dims => {
                let found = format!("{dims:?}");
                return Err(crate::Error::Shape {
                    op: "next_logits",
                    expected: "tokens [length, batch]".into(),
                    found,
                });
            }
        };
        let logits = self.logits(tokens, Mode::Eval)?;
        Ok(logits.narrow(0, logits.dim(0)? - batch, batch)?)
    }

    /// What is carried from one batch to the next (an LSTM's state), by name, for checkpoints.
    fn carry(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Says where in the batch of a step the next inputs begin, which are a part of it: what is drawn for each sample is drawn by
    /// its place there. 0 at first.
    fn set_place(&mut self, _first: usize) {}

    /// Sets what [`Model::carry`] returned; an empty list forgets it.
    fn set_carry(&mut self, _carry: &[(String, Tensor)]) -> Result<()> {
        Ok(())
    }
}
