//! Trained networks for other programs: pure functions from a network and its tensors to the bytes of files.
//!
//! - [`weights`]: safetensors with metadata in the header, under PyTorch's names.
//! - [`pytorch`]: a module file for people to read, which loads those weights strictly.
//! - [`onnx`]: a graph of the network in evaluation mode.
//!
//! Networks are taken as they are evaluated: dropout, augmentation and what else belongs to training stays behind. Equal networks
//! give equal bytes.
mod network;
pub mod onnx;
pub mod pytorch;
mod weights;

pub use network::{Network, Normalize};
pub use weights::weights;

/// Why a network cannot be written in a form.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The form cannot carry it.
    #[error("{form} cannot carry this network: {reason}")]
    Unsupported {
        /// The form.
        form: &'static str,
        /// Why not, and what can.
        reason: String,
    },
    /// An opset that is not written.
    #[error("expected an ONNX opset from {least} to {most}, found {found}")]
    Opset {
        /// The oldest.
        least: u16,
        /// The newest.
        most: u16,
        /// What was asked for.
        found: u16,
    },
    /// The tensors are not those of the network.
    #[error("the weights are not those of the network: {0}")]
    Weights(String),
    /// A tensor cannot be read.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A file cannot be put together.
    #[error("safetensors: {0}")]
    Safetensors(#[from] safetensors::SafeTensorError),
    /// The same.
    #[error("safetensors: {0}")]
    Header(#[from] serde_json::Error),
}

/// What most functions here return.
pub type Result<T> = std::result::Result<T, Error>;
