//! How our ops take part in candle's graph without its costs.
//!
//! candle sums every gradient into a fresh tensor of zeros, on one thread, and frees no activation before the
//! whole graph is dropped: for a ResNet that is a third of the step and more memory than PyTorch needs. So the
//! tensors between our ops never enter candle's graph. What enters is one scalar an activation, a *handle*:
//! candle orders the backward pass and finds the parameters through the handles, while the real values and their
//! gradients pass from op to op beside it ([`Slot`]) in buffers that are reused, summed in place and given back
//! as soon as the last reader is done.
//!
//! As in PyTorch, a graph can be walked backwards once.
use crate::kernels::{Buf, Real, add_assign};
use crate::{Error, Result};
use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Shape, Tensor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where the gradient of an activation gathers until the op that made it asks for it.
#[derive(Debug)]
pub(crate) struct Slot<T: Real>(Mutex<Option<Buf<T>>>);

impl<T: Real> Slot<T> {
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(None)))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Buf<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has gathered, if anything.
    pub fn take(&self) -> Option<Buf<T>> {
        self.lock().take()
    }

    /// Adds a gradient.
    pub fn add(&self, gradient: Buf<T>) {
        let mut slot = self.lock();
        match &mut *slot {
            Some(sum) => add_assign(sum, &gradient),
            None => *slot = Some(gradient),
        }
    }

    /// Adds a gradient of `len` elements that `f` computes: `f(out, true)` adds to `out`, `f(out, false)`
    /// overwrites whatever `out` holds.
    pub fn add_with(&self, len: usize, f: impl FnOnce(&mut [T], bool)) {
        let (mut sum, old) = match self.take() {
            Some(sum) => (sum, true),
            None => (Buf::dirty(len), false),
        };
        f(&mut sum, old);
        self.lock().replace(sum);
    }
}

/// What candle is told of an op's parameters' gradients, in the order they were recorded in.
pub(crate) type ParameterGrads = [Option<Tensor>; 2];
/// Gets the node it belongs to.
type Backward = dyn FnOnce(&Tensor) -> Result<ParameterGrads> + Send;

/// An op in candle's graph: from handles and parameters to a handle.
struct Node {
    name: &'static str,
    backward: Mutex<Option<Box<Backward>>>,
}

impl Node {
    fn forward(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    /// Runs the backward pass; what it held is freed when it returns.
    fn backward(&self, node: &Tensor) -> candle_core::Result<ParameterGrads> {
        let backward = self.backward.lock().unwrap_or_else(PoisonError::into_inner).take();
        let backward = backward.ok_or(Error::BackwardTwice { op: self.name })?;
        Ok(backward(node)?)
    }
}

/// A gradient for candle's bookkeeping that keeps an argument's node alive; nobody reads its value.
fn token(handle: &Tensor, grad: &Tensor) -> Option<Tensor> {
    handle.track_op().then(|| grad.clone())
}

impl CustomOp1 for Node {
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.forward()
    }
    fn bwd(&self, handle: &Tensor, node: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.backward(node)?;
        Ok(token(handle, grad))
    }
}

impl CustomOp2 for Node {
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.forward()
    }
    fn bwd(
        &self,
        handle: &Tensor,
        _: &Tensor,
        node: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [a, _] = self.backward(node)?;
        Ok((token(handle, grad), a))
    }
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        self.name
    }
    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.forward()
    }
    fn bwd(
        &self,
        handle: &Tensor,
        _: &Tensor,
        _: &Tensor,
        node: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [a, b] = self.backward(node)?;
        Ok((token(handle, grad), a, b))
    }
}

/// The handle of an op's result. `backward` returns the gradients of `params` (none, one or two) and is dropped
/// at once, with all it holds, if neither the input nor a parameter needs a gradient.
pub(crate) fn record(
    name: &'static str,
    handle: &Tensor,
    params: &[&Tensor],
    backward: impl FnOnce(&Tensor) -> Result<ParameterGrads> + Send + 'static,
) -> Result<Tensor> {
    let node = Node { name, backward: Mutex::new(Some(Box::new(backward))) };
    Ok(match params {
        [] => handle.apply_op1(node)?,
        [a] => handle.apply_op2(a, node)?,
        [a, b, ..] => handle.apply_op3(a, b, node)?,
    })
}
