//! The global norm of gradients.
use crate::Result;
use crate::device::gpu;
use crate::driver::cpu::sum_of_squares;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};

/// The Euclidean norm of the gradients of `vars` taken together, in f64 and in a fixed order.
///
/// It is finite exactly when every gradient is: test it before a step. Parameters without a gradient count as 0.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// let x = Var::new(&[3f32, 4.], &Device::Cpu)?;
/// let grads = (x.sqr()?.sum_all()? / 2.)?.backward()?;
/// assert_eq!(taper_optim::global_norm(&grads, [&x])?, 5.0);
/// # Ok(()) }
/// ```
pub fn global_norm<'a>(grads: &GradStore, vars: impl IntoIterator<Item = &'a Var>) -> Result<f64> {
    let norm = global_norm_on_device(grads, vars)?;
    Ok(norm.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?)
}

/// [`global_norm`] as a scalar tensor on the gradients' device, which is not waited for: for
/// [`Deferred`](crate::Deferred). In f64, in the same order and with the same bits on the CPU and on CUDA (gradients of
/// one dtype); in f32 on Metal.
pub fn global_norm_on_device<'a>(
    grads: &GradStore,
    vars: impl IntoIterator<Item = &'a Var>,
) -> Result<Tensor> {
    global_norm_of(vars.into_iter().filter_map(|var| grads.get(var)))
}

/// The norm of gradients, a scalar on their device.
pub(crate) fn global_norm_of<'a>(grads: impl Iterator<Item = &'a Tensor>) -> Result<Tensor> {
    let grads: Vec<&Tensor> = grads.collect();
    if grads.iter().all(|grad| grad.device().is_cpu()) {
        let squares = grads.iter().map(|grad| sum_of_squares(grad));
        let sum = squares.sum::<candle_core::Result<f64>>()?;
        return Ok(Tensor::new(sum.sqrt(), &Device::Cpu)?);
    }
    let mut sum: Option<Tensor> = None;
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let grads = grads.iter().filter(|grad| grad.dtype() == dtype).map(|grad| grad.contiguous());
        let grads = grads.collect::<candle_core::Result<Vec<_>>>()?;
        if grads.is_empty() {
            continue;
        }
        let norm = gpu::norm(&grads)?;
        sum = Some(match sum {
            None => norm,
            Some(other) => (other.sqr()? + norm.sqr()?)?.sqrt()?,
        });
    }
    // Some gradient was on a device.
    Ok(sum.unwrap_or(Tensor::new(0f64, &Device::Cpu)?))
}
