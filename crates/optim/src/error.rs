use candle_core::DType;

/// What can go wrong when an optimizer is built, stepped, saved or loaded.
///
/// Whenever a call returns one of these, parameters and optimizer state are as they were before the call.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
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
    /// A gradient that does not fit its parameter.
    #[error("gradient of `{name}`: expected {expected}, found {found}")]
    Gradient {
        /// The parameter.
        name: String,
        /// Shape and dtype of the parameter.
        expected: String,
        /// Shape and dtype of the gradient.
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
    /// A loss f with f + c ≤ 0, or one that is not finite: √(f + c) does not exist.
    #[error("{optimizer}: loss {loss} with c = {c}: f + c must be positive and finite; choose a larger c")]
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
            e => candle_core::Error::wrap(e),
        }
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
