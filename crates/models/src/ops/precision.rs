//! The precision of what products multiply.
use crate::Result;
use crate::kernels::{Arithmetic, Isa};
use std::cell::Cell;
use std::thread::LocalKey;

pub use crate::kernels::Operands;

thread_local! {
    static OPERANDS: Cell<Operands> = const { Cell::new(Operands::Full) };
    static ISA: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// Calls `f`, in which the products of [`linear`], [`linear_features`], [`linear_residual`], [`conv2d`], [`lstm`] and
/// [`linear_cross_entropy`] on the CPU multiply such operands, in f32 networks. An op remembers it for its backward pass, wherever that
/// is made. Weights, activations, gradients and all sums stay f32; depthwise convolutions, attention, normalisation, losses and
/// everything else are as they were.
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
/// [`linear_features`]: super::linear_features
/// [`linear_residual`]: super::linear_residual
/// [`conv2d`]: super::conv2d
/// [`lstm`]: super::lstm
/// [`linear_cross_entropy`]: super::linear_cross_entropy
pub fn with_operands<R>(operands: Operands, f: impl FnOnce() -> R) -> R {
    with(&OPERANDS, operands, f)
}

/// Calls `f`, in which ops that this thread calls are computed with these instructions rather than those of the process: for tests, which
/// try all that the CPU has.
#[doc(hidden)]
pub fn with_isa<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    with(&ISA, Some(isa), f)
}

/// Calls `f` with another value in a cell, and puts back what was there, also when `f` panics.
fn with<T: Copy, R>(cell: &'static LocalKey<Cell<T>>, value: T, f: impl FnOnce() -> R) -> R {
    struct Before<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);
    impl<T: Copy> Drop for Before<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _before = Before(cell, cell.replace(value));
    f()
}

/// The instruction set that kernels are chosen by.
pub(crate) fn isa() -> Result<Isa> {
    match ISA.get() {
        Some(isa) => Ok(isa),
        None => Ok(Isa::detect()?),
    }
}

/// Whether products of bf16 have an instruction of their own on this CPU; elsewhere they are slower than those of f32.
pub fn multiplies_bf16() -> Result<bool> {
    Ok(crate::kernels::multiplies_bf16(isa()?))
}

/// How the products of an op that is called now are computed.
pub(crate) fn arithmetic() -> Result<Arithmetic> {
    Ok(Arithmetic { isa: isa()?, operands: OPERANDS.get() })
}
