//! Softmax cross-entropy.
use crate::Result;
use candle_core::Tensor;

/// Options of [`cross_entropy`].
#[derive(Clone, Copy, Debug, Default)]
pub struct CrossEntropy {}

/// The mean negative log-likelihood of `targets` under softmax of `logits`.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, _: &CrossEntropy) -> Result<Tensor> {
    Ok(candle_nn::loss::cross_entropy(logits, targets)?)
}
