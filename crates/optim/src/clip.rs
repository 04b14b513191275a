//! The global norm of gradients.
use crate::Result;
use crate::driver::cpu::sum_of_squares;
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Var};

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
    let mut sum = 0.0;
    for grad in vars.into_iter().filter_map(|var| grads.get(var)) {
        sum += match grad.device() {
            Device::Cpu => sum_of_squares(grad)?,
            _ => grad.to_dtype(DType::F32)?.sqr()?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?,
        };
    }
    Ok(sum.sqrt())
}
