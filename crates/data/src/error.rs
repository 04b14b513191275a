//! What can go wrong between a data set's name and its samples.
use std::path::{Path, PathBuf};

/// An error of the data layer. Every message names the file or the option, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// No data set has this name.
    #[error("unknown data set `{name}`{}; known: {}", nearest.as_ref().map(|n| format!(", did you mean `{n}`?")).unwrap_or_default(), known.join(", "))]
    Unknown {
        /// The name asked for.
        name: String,
        /// The known name closest to it, when one is close.
        nearest: Option<String>,
        /// All known names.
        known: Vec<String>,
    },
    /// A data set of this name is registered already.
    #[error("a data set named `{name}` is already registered")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// An option of the recipe's `data:` section is unknown or has a wrong value.
    #[error("data.{}: {message} (data set `{dataset}`)", key.as_deref().unwrap_or("*"))]
    Option {
        /// The data set.
        dataset: String,
        /// The key under `data:`; `None` when no single key is to blame.
        key: Option<String>,
        /// What was expected and found.
        message: String,
    },
    /// A text, whatever set it is of, has no token to predict.
    #[error("expected a text of at least 2 tokens, to read and to predict, found {found}")]
    Short {
        /// Its tokens.
        found: usize,
    },
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// A file's content is not what its format demands.
    #[error("{}: {message}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What was expected and found.
        message: String,
    },
    /// The data set was found nowhere.
    #[error("data set `{name}` was not found; looked in:\n  {}\n{supply}", looked.join("\n  "))]
    Missing {
        /// The data set.
        name: String,
        /// The places searched, each with what it lacked.
        looked: Vec<String>,
        /// Which command or file would supply it.
        supply: String,
    },
    /// The samples were read, but they are not the data set they claim to be.
    #[error(transparent)]
    Mismatch(Box<Mismatch>),
    /// A cached file changed after its download.
    #[error("{}: damaged since its download: sha256 was {expected}, is {found}; `{} data fetch {name}` replaces it", path.display(), taper_files::program())]
    Damaged {
        /// The data set.
        name: String,
        /// The file.
        path: PathBuf,
        /// The sha256 recorded at download.
        expected: String,
        /// The sha256 now.
        found: String,
    },
    /// The hub could not supply a file.
    #[error("{url}: {message}")]
    Hub {
        /// Repository and file on the hub.
        url: String,
        /// What happened, and what can be done.
        message: String,
    },
}

impl From<taper_files::Error> for DataError {
    fn from(e: taper_files::Error) -> Self {
        Self::Io { path: e.path, source: e.source }
    }
}

impl DataError {
    pub(crate) fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { path: path.as_ref().to_path_buf(), source }
    }

    pub(crate) fn format(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Format { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// A mistake in an option of a data set.
    pub fn option(dataset: &str, key: &str, message: impl Into<String>) -> Self {
        Self::Option { dataset: dataset.into(), key: Some(key.into()), message: message.into() }
    }
}

/// Samples that are not the data set they claim to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place}: this is not {name} ({split}): expected {expected_samples} samples with content digest {expected}, found \
     {found_samples} with {found}{}; `data.verify: false` trains on it regardless",
    known_as.as_ref().map(|n| format!(" (which is {n})")).unwrap_or_default()
)]
pub struct Mismatch {
    /// The data set.
    pub name: String,
    /// `train`, `valid` or `test`.
    pub split: String,
    /// Where the data came from.
    pub place: String,
    /// How many samples the split has.
    pub expected_samples: usize,
    /// The split's content digest.
    pub expected: String,
    /// How many samples were read.
    pub found_samples: usize,
    /// The content digest of what was read.
    pub found: String,
    /// The set and split this digest belongs to, when it is a known one.
    pub known_as: Option<String>,
}
