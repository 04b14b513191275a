//! More than three operands for an op.
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
use std::sync::{Arc, Mutex, PoisonError};

/// Gradients on their way to three operands.
pub(super) type Gradients = [Option<Tensor>; 3];

/// Three operands as one node of the graph.
///
/// candle's custom ops take at most three tensors. An op with more passes three of them as the `node` of a bundle:
/// a single zero that carries no data, only the edges. In its backward pass the op leaves their gradients with
/// [`Bundle::leave`] and returns [`Bundle::token`] as the node's own; candle, going on from the node to the three,
/// finds them there. Nothing is copied.
#[derive(Clone)]
pub(super) struct Bundle(Arc<Mutex<Gradients>>);

impl Bundle {
    pub(super) fn new(operands: [&Tensor; 3]) -> Result<(Self, Tensor)> {
        let bundle = Self(Arc::default());
        let [a, b, c] = operands;
        let node = a.apply_op3(b, c, bundle.clone())?;
        Ok((bundle, node))
    }

    pub(super) fn leave(&self, gradients: Gradients) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = gradients;
    }

    pub(super) fn token() -> Result<Tensor> {
        Tensor::zeros((), DType::F32, &Device::Cpu)
    }
}

impl CustomOp3 for Bundle {
    fn name(&self) -> &'static str {
        "bundle"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), ().into()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b, c] = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        Ok((a, b, c))
    }
}
