//! Training ops with forward and backward passes of their own.
//!
//! On the CPU each is one candle `CustomOp` over contiguous slices, cut by shape and never by thread count, so
//! that results are equal bit for bit for any number of threads. On other devices an op is composed of candle's
//! own where those are right; each op's documentation says so.
mod activity;
mod add;
mod attention;
mod batch_norm;
mod bundle;
mod conv2d;
mod cross_entropy;
mod dropout;
mod embedding;
mod feature_map;
mod gelu;
mod graph;
mod linear;
mod linear_cross_entropy;
mod linear_features;
mod lstm;
mod norm;
mod pool;
mod precision;
mod relu;
mod rotary;
mod swiglu;
mod tokens;

pub use crate::kernels::Activation;
pub use crate::kernels::conv::Algorithm;
pub use crate::kernels::gelu::Gelu;
pub use activity::{mean_square, mean_square_change};
pub use add::add;
pub use attention::{Attention, Qkv, ShareDropout, attention};
pub use batch_norm::{BatchNorm, Features, Joined, ScaleInit, Statistics, batch_norm, batch_norm_features};
pub use conv2d::{Conv2d, Precision, conv2d};
pub use cross_entropy::{CrossEntropy, cross_entropy};
pub use dropout::{Mask, dropout, locked_dropout, masked};
pub use embedding::embedding;
pub use feature_map::{FeatureMap, Host};
pub use gelu::{gelu, gelu_tensor};
pub use linear::linear;
pub use linear_cross_entropy::linear_cross_entropy;
pub use linear_features::{linear_features, linear_residual};
pub use lstm::{LstmState, LstmWeights, lstm};
pub use norm::{Norm, norm};
pub use pool::{Window, avg_pool2d, global_avg_pool, global_max_pool, max_pool2d};
pub use precision::{Operands, multiplies_bf16, with_operands};
pub use relu::relu;
pub use rotary::{Angles, rotary};
pub use swiglu::swiglu;
pub use tokens::{assemble, embed, mean_of_tokens};

#[doc(hidden)]
pub use precision::with_isa;
pub(crate) use precision::{arithmetic, isa};

use crate::Error;
use candle_core::{CpuStorage, DType, Device, Layout, Result, Shape, Storage, Tensor, WithDType};

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

/// A CPU tensor of these elements.
pub(crate) fn tensor<T: WithDType>(data: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(data, shape.into(), &Device::Cpu)
}

/// [`Error::Shape`].
pub(crate) fn shape_error(op: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Error {
    Error::Shape { op, expected: expected.into(), found: found.into() }
}

/// [`Error::DType`].
pub(crate) fn dtype_error(op: &'static str, expected: &'static str, found: DType) -> Error {
    Error::DType { op, expected, found }
}

/// Refuses a tensor that holds no indices.
pub(crate) fn index_dtype(op: &'static str, tensor: &Tensor) -> crate::Result<()> {
    match tensor.dtype() {
        DType::U32 | DType::I64 => Ok(()),
        found => Err(dtype_error(op, "u32 or i64 for indices", found)),
    }
}

/// The flattened indices of a u32 or i64 tensor, all inside `0..bound`; `None` where one equals `ignore`.
pub(crate) fn indices(
    op: &'static str,
    tensor: &Tensor,
    bound: usize,
    ignore: Option<i64>,
) -> crate::Result<Vec<Option<usize>>> {
    index_dtype(op, tensor)?;
    let values = match tensor.dtype() {
        DType::U32 => tensor.flatten_all()?.to_vec1::<u32>()?.into_iter().map(i64::from).collect(),
        _ => tensor.flatten_all()?.to_vec1::<i64>()?,
    };
    let check = |(position, index): (usize, i64)| match usize::try_from(index) {
        _ if ignore == Some(index) => Ok(None),
        Ok(inside) if inside < bound => Ok(Some(inside)),
        _ => Err(Error::Index { op, index, position, bound }),
    };
    values.into_iter().enumerate().map(check).collect()
}
