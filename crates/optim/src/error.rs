//! What can go wrong, in words that say what to do.
use candle_core::DType;

/// What can go wrong when an optimizer is built, stepped, saved or loaded.
///
/// Whenever a call returns one of these, parameters and optimizer state are as they were before the call.
///
/// In a function that returns candle's `Result` the `?` turns it into candle's error, from which [`Error::in_candle`] has it
/// back:
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// use taper_optim::{DecGd, DecGdConfig, Error};
///
/// fn step(x: &Var) -> candle_core::Result<()> {
///     let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig::default())?;
///     Ok(optimizer.backward_step(&x.sum_all()?)?)
/// }
/// let error = step(&Var::new(&[-3f32], &Device::Cpu)?).unwrap_err();
/// assert!(matches!(Error::in_candle(&error), Some(Error::Loss { loss: -3.0, .. })));
/// # Ok(()) }
/// ```
#[non_exhaustive]
#[derive(thiserror::Error)]
pub enum Error {
    /// An optimizer name nobody registered.
    #[error("unknown optimizer `{name}`{}; known: {}", nearest(.name, .known), .known.join(", "))]
    UnknownOptimizer {
        /// The name asked for.
        name: String,
        /// All registered names.
        known: Vec<String>,
    },
    /// A name or alias registered twice.
    #[error("optimizer `{0}` is already registered")]
    Duplicate(String),
    /// A hyperparameter the optimizer does not have.
    #[error("{optimizer}: unknown hyperparameter `{key}`{}; known: {}", nearest(.key, .known), .known.join(", "))]
    UnknownHyperparameter {
        /// The optimizer.
        optimizer: String,
        /// The key asked for.
        key: String,
        /// All keys it has.
        known: Vec<String>,
    },
    /// A hyperparameter of the wrong type or outside its range.
    #[error("{optimizer}: {key}: {message}")]
    Hyperparameter {
        /// The optimizer.
        optimizer: String,
        /// The key.
        key: String,
        /// What was expected and what was found.
        message: String,
    },
    /// A parameter group whose pattern is malformed or matches no parameter.
    #[error("parameter group `{pattern}`: {message}")]
    Group {
        /// The pattern as written.
        pattern: String,
        /// What is wrong with it.
        message: String,
    },
    /// Two parameters of one name, or one variable given twice.
    #[error("parameter `{0}` is given twice")]
    DuplicateParameter(String),
    /// A parameter or gradient of a dtype without a kernel.
    #[error("parameter `{name}`: expected dtype f32, f64, f16 or bf16, found {found:?}")]
    DType {
        /// The parameter.
        name: String,
        /// Its dtype.
        found: DType,
    },
    /// A parameter that cannot be stepped.
    #[error("parameter `{name}`: expected {expected}, found {found}")]
    Parameter {
        /// The parameter.
        name: String,
        /// What was expected.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A gradient that does not fit its parameter.
    #[error("gradient of `{name}`: expected {expected}, found {found}")]
    Gradient {
        /// The parameter.
        name: String,
        /// Shape and dtype, or device, of the parameter.
        expected: String,
        /// Shape and dtype, or device, of the gradient.
        found: String,
    },
    /// Parameters of one optimizer on several devices.
    #[error("parameter `{name}` is on {device}: expected all parameters on {expected}")]
    Device {
        /// The parameter.
        name: String,
        /// Where it is.
        device: String,
        /// Where the first parameter is.
        expected: String,
    },
    /// A device that this build has no kernels for.
    #[error("no kernels for {0} in this build: build with the feature `cuda` or `metal`")]
    NoKernels(String),
    /// A rule without an `update.h`.
    #[error("{optimizer} has no kernel for GPUs: keep its parameters on the CPU")]
    CpuOnly {
        /// The optimizer.
        optimizer: String,
    },
    /// A device refused a loss or a norm that the host had not seen, and kept parameters and state as they were.
    #[error("{optimizer}: the device refused a step, and all after it: {what}")]
    Refused {
        /// The optimizer.
        optimizer: String,
        /// Why.
        what: &'static str,
    },
    /// The optimizer follows the loss and got none.
    #[error(
        "{0} needs the loss of the batch: call `backward_step(&loss)`, or `step` with `StepContext::new().loss(value)`"
    )]
    MissingLoss(String),
    /// A loss of more than one element, or of none.
    #[error("expected a loss of one element, found shape {0:?}: take its mean (`mean_all`) or its sum")]
    LossShape(Vec<usize>),
    /// A loss that is infinite or no number.
    #[error("{optimizer}: the loss is {loss}: no step was taken")]
    LossNotFinite {
        /// The optimizer.
        optimizer: String,
        /// The loss given.
        loss: f64,
    },
    /// A gradient with an element that is infinite or no number.
    #[error("gradient of `{0}` is not finite: no step was taken")]
    GradientNotFinite(String),
    /// An optimizer that takes two gradients a step, called with one.
    #[error("{0} needs a second gradient: call `step_twice` with a closure that computes it")]
    SecondGradient(String),
    /// A step, or a saved state, while the weights for evaluation are in place.
    #[error("{0} has put its evaluation weights in place: call `train_weights` first")]
    Evaluating(String),
    /// Something that this optimizer, or this device, cannot do.
    #[error("{optimizer}: {what}")]
    Unsupported {
        /// The optimizer.
        optimizer: String,
        /// What it cannot do, and what to do instead.
        what: String,
    },
    /// A loss f with f + c ≤ 0: √(f + c) does not exist.
    #[error("{optimizer}: loss {loss} with c = {c}: f + c must be positive; choose a c above {}", -.loss)]
    Loss {
        /// The optimizer.
        optimizer: String,
        /// The loss given.
        loss: f64,
        /// The constant added to it.
        c: f64,
    },
    /// A rate η and decoupled decay λ with ηλ ≥ 1: nothing of the parameter would be left.
    #[error("{optimizer}: lr {lr} with weight_decay {weight_decay}: lr · weight_decay must be below 1")]
    Decay {
        /// The optimizer.
        optimizer: String,
        /// The rate of this step or of the one before.
        lr: f64,
        /// The decay.
        weight_decay: f64,
    },
    /// A number in a [`StepContext`](crate::StepContext) with which no step can be taken.
    #[error("step: {what}: expected {expected}, found {found}")]
    Context {
        /// The field.
        what: &'static str,
        /// Its range.
        expected: &'static str,
        /// What it was.
        found: f64,
    },
    /// Saved state that does not belong to this optimizer and these parameters; lists every difference.
    #[error("saved optimizer state does not fit:{}", .0.iter().map(|d| format!("\n  {d}")).collect::<String>())]
    State(Vec<String>),
    /// A record to replay that lacks something or has it in the wrong shape.
    #[error("not an optimizer record: {0}")]
    Record(String),
    /// The variable `TAPER_ISA` names an instruction set that this CPU has not, or none.
    #[error(transparent)]
    InstructionSet(#[from] taper_kernels::UnknownIsa),
    /// An error of candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A file that cannot be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl From<Error> for candle_core::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Candle(e) => e,
            // Not `Error::wrap`, which keeps no more than the message.
            e => Self::WrappedContext { wrapped: Box::new(e), context: "taper-optim".to_owned() },
        }
    }
}

impl Error {
    /// The error of this crate that a candle error was made of.
    pub fn in_candle(error: &candle_core::Error) -> Option<&Self> {
        use candle_core::Error as Candle;
        match error {
            Candle::WrappedContext { wrapped, .. } => wrapped.downcast_ref(),
            Candle::Context { inner, .. }
            | Candle::WithPath { inner, .. }
            | Candle::WithBacktrace { inner, .. } => Self::in_candle(inner),
            _ => None,
        }
    }
}

/// As it is displayed: candle shows what it wraps by its `Debug`.
impl std::fmt::Debug for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

/// ` (did you mean ‘x’?)` when a known name is close to `name`, else nothing.
fn nearest(name: &str, known: &[String]) -> String {
    known
        .iter()
        .map(|k| (strsim::damerau_levenshtein(name, k), k))
        .min()
        .filter(|(d, _)| *d <= 2 + name.len() / 4)
        .map(|(_, k)| format!(" (did you mean `{k}`?)"))
        .unwrap_or_default()
}
