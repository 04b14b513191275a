use candle_core::DType;

/// What can go wrong when a model is built, run, loaded or saved.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Operands whose shapes do not fit together.
    #[error("{op}: expected {expected}, found {found}")]
    Shape {
        /// The op that refused.
        op: &'static str,
        /// What would have fitted.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A dtype the op does not compute in.
    #[error("{op}: expected dtype {expected}, found {}", .found.as_str())]
    DType {
        /// The op that refused.
        op: &'static str,
        /// The dtypes it takes.
        expected: &'static str,
        /// What was given.
        found: DType,
    },
    /// A class or token index outside its range.
    #[error("{op}: index {index} at position {position} is outside 0..{bound}")]
    Index {
        /// The op that refused.
        op: &'static str,
        /// The offending index.
        index: i64,
        /// Where it stands in the flattened index tensor.
        position: usize,
        /// The number of classes or rows.
        bound: usize,
    },
    /// An argument outside its range.
    #[error("{op}: expected {expected}, found {found}")]
    Argument {
        /// The op that refused.
        op: &'static str,
        /// What it takes.
        expected: &'static str,
        /// What was given.
        found: String,
    },
    /// A second walk back through a graph: the first one has freed what the op had kept for it.
    #[error("{op}: the backward pass has already run")]
    BackwardTwice {
        /// The op.
        op: &'static str,
    },
    /// The variable `TAPER_ISA` names an instruction set that this CPU has not, or none.
    #[error(transparent)]
    InstructionSet(#[from] taper_kernels::UnknownIsa),
    /// A model name nobody registered.
    #[error("unknown model `{name}`{}; known: {}", nearest(.name, .known), .known.join(", "))]
    UnknownModel {
        /// The name asked for.
        name: String,
        /// All registered names.
        known: Vec<String>,
    },
    /// A model name registered twice.
    #[error("model `{0}` is already registered")]
    Duplicate(String),
    /// A model configuration that does not parse or makes no sense.
    #[error("model `{model}`: {message}")]
    Config {
        /// The model.
        model: String,
        /// The key the message is about, as a path (`hidden[1]`, `dropout.input`), if it is about one.
        key: Option<String>,
        /// What is wrong.
        message: String,
    },
    /// A key that the model's configuration has not.
    #[error("model `{model}`: unknown key `{key}`{}; known: {}", nearest(last(.key), .known), .known.join(", "))]
    UnknownKey {
        /// The model.
        model: String,
        /// The key, as a path (`dropout.inptu`).
        key: String,
        /// The keys that would be right in that place.
        known: Vec<String>,
    },
    /// Weights that do not fit the model; lists every difference.
    #[error("weights do not fit the model:{}", list(.missing, .extra, .misshapen))]
    Weights {
        /// Tensors the model has and the file lacks.
        missing: Vec<String>,
        /// Tensors the file has and the model lacks.
        extra: Vec<String>,
        /// `name: expected …, found …`: another shape, or other numbers where two names stand for one tensor.
        misshapen: Vec<String>,
    },
    /// An error of candle's.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
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

/// The last key of a path.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// ` (did you mean ‘x’?)` when a known name is close to `name`, else nothing.
pub(crate) fn nearest(name: &str, known: &[String]) -> String {
    known
        .iter()
        .map(|k| (strsim::damerau_levenshtein(name, k), k))
        .min()
        .filter(|(d, _)| *d <= 2 + name.len() / 4)
        .map(|(_, k)| format!(" (did you mean `{k}`?)"))
        .unwrap_or_default()
}

fn list(missing: &[String], extra: &[String], misshapen: &[String]) -> String {
    let part = |title: &str, names: &[String]| match names {
        [] => String::new(),
        names => format!("\n  {title}: {}", names.join(", ")),
    };
    part("missing", missing) + &part("not in the model", extra) + &part("wrong shape", misshapen)
}
