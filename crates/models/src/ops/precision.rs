//! The precision of what products multiply.
use crate::Result;
use crate::kernels::{Arithmetic, Isa};
use std::cell::Cell;

pub use crate::kernels::Operands;

thread_local! {
    static OPERANDS: Cell<Operands> = const { Cell::new(Operands::Full) };
}

/// Calls `f`, in which the products of [`linear`], [`conv2d`], [`lstm`] and [`linear_cross_entropy`] on the CPU multiply such
/// operands, in f32 networks. An op remembers it for its backward pass, wherever that is made. Weights, activations, gradients and
/// all sums stay f32; depthwise convolutions, normalisation, losses and everything else are as they were.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor};
/// use taper_models::ops::{Activation, Operands, linear, with_operands};
/// let x = Tensor::new(&[[1.001f32]], &Device::Cpu)?;
/// let y = with_operands(Operands::Bf16, || linear(&x, &x, None, Activation::None))?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.0]]);
/// # Ok(()) }
/// ```
///
/// [`linear`]: super::linear
/// [`conv2d`]: super::conv2d
/// [`lstm`]: super::lstm
/// [`linear_cross_entropy`]: super::linear_cross_entropy
pub fn with_operands<R>(operands: Operands, f: impl FnOnce() -> R) -> R {
    /// Puts back what was there, also when `f` panics.
    struct Before(Operands);
    impl Drop for Before {
        fn drop(&mut self) {
            OPERANDS.set(self.0);
        }
    }
    let _before = Before(OPERANDS.replace(operands));
    f()
}

/// Whether products of bf16 have an instruction of their own on this CPU; elsewhere they are slower than those of f32.
pub fn multiplies_bf16() -> Result<bool> {
    Ok(crate::kernels::multiplies_bf16(Isa::detect()?))
}

/// How the products of an op that is called now are computed.
pub(crate) fn arithmetic() -> Result<Arithmetic> {
    Ok(Arithmetic { isa: Isa::detect()?, operands: OPERANDS.get() })
}
