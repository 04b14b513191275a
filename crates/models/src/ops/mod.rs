//! Training ops with forward and backward passes of their own.
//!
//! On the CPU each is one candle `CustomOp` over contiguous slices, cut by shape and never by thread count, so
//! that results are equal bit for bit for any number of threads. On other devices an op is composed of candle's
//! own where those are right; each op's documentation says so.
mod cross_entropy;

pub use cross_entropy::{CrossEntropy, cross_entropy};

use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};

/// The elements of a contiguous CPU operand.
pub(crate) fn slice<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let data = storage.as_slice::<T>()?;
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
        None => candle_core::bail!("expected a contiguous operand, found strides {:?}", layout.stride()),
    }
}

/// Calls `f` with the elements of a CPU tensor, which is made contiguous first if it is not.
pub(crate) fn with_slice<T: WithDType, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(slice(storage, layout)?)),
        _ => {
            candle_core::bail!("expected a tensor on the CPU, found one on {:?}", tensor.device().location())
        }
    }
}
