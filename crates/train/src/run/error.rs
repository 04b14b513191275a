use crate::recipe::RecipeError;
use std::path::{Path, PathBuf};
use taper_data::DataError;

/// Why a run could not be made or finished.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The recipe cannot be used.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] taper_models::Error),
    /// The optimizer refused.
    #[error(transparent)]
    Optimizer(#[from] taper_optim::Error),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Processes that share the run cannot go on together.
    #[error(
        "{0}; all processes of the run have ended. Its last checkpoint is whole: the same command goes on from there, with as \
         many processes as divide `train.shards`"
    )]
    World(#[from] taper_world::Error),
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A loss or gradient that is not finite.
    #[error(
        "{what} at step {step}: the weights were left as they were; a smaller `optimizer.lr` or `train.clip_norm` may help \
         (`train.on_divergence: record` keeps such a run and goes on with the next)"
    )]
    Diverged {
        /// What was not finite.
        what: String,
        /// The step that was not taken.
        step: u64,
    },
    /// Files in the run's folder that do not fit together.
    #[error("{}: {message}", path.display())]
    Damaged {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        message: String,
    },
    /// What a path names is whole and cannot be used as it was asked for.
    #[error("{}: {message}", path.display())]
    Unusable {
        /// The file or folder.
        path: PathBuf,
        /// What was expected and found.
        message: String,
    },
    /// Another process trains the same run.
    #[error("{}: {holder} is at work on this run: wait for it, or stop it first", folder.display())]
    Busy {
        /// The run's folder.
        folder: PathBuf,
        /// Which process, as far as it is known.
        holder: String,
    },
    /// The user stopped the run; a checkpoint was written.
    #[error("interrupted at step {step}; the same command goes on from there")]
    Interrupted {
        /// The last step taken.
        step: u64,
    },
}

impl From<taper_files::Error> for RunError {
    fn from(e: taper_files::Error) -> Self {
        Self::Io { path: e.path, source: e.source }
    }
}

impl RunError {
    pub(crate) fn io(path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { path, source }
    }

    pub(crate) fn unusable(path: impl AsRef<Path>, message: impl Into<String>) -> Self {
        Self::Unusable { path: path.as_ref().to_path_buf(), message: message.into() }
    }

    /// The exit code of the command: 2 for bad input, 130 after an interrupt, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Recipe(_) | Self::Data(_) | Self::Unusable { .. } => 2,
            Self::Interrupted { .. } => 130,
            _ => 1,
        }
    }
}
