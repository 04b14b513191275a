//! Regularisers of activations: AR and TAR of the language model.
use super::{dtype_error, shape_error, slice, tensor, with_slice};
use crate::kernels::Real;
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, WithDType};
use rayon::prelude::*;

const OP: &str = "activity";
/// Elements of a partial sum.
const CHUNK: usize = 1 << 13;

/// The mean of the squares of all elements (activation regularisation, AR): a scalar, in f32 or f64.
///
/// Summed in f64 in a fixed order. On devices other than the CPU it is composed of candle's ops.
pub fn mean_square(x: &Tensor) -> Result<Tensor> {
    check(x)?;
    if !x.device().is_cpu() {
        return Ok(x.sqr()?.mean_all()?);
    }
    Ok(x.contiguous()?.apply_op1(MeanSquare { step: 0 })?)
}

/// The mean of the squares of the differences of successive steps of `[steps, …]` (temporal activation
/// regularisation, TAR): a scalar, in f32 or f64; 0 for a single step.
///
/// Summed in f64 in a fixed order. On devices other than the CPU it is composed of candle's ops.
pub fn mean_square_change(x: &Tensor) -> Result<Tensor> {
    check(x)?;
    let steps = x.dim(0)?;
    if steps == 1 {
        return Ok(Tensor::zeros((), x.dtype(), x.device())?);
    }
    if !x.device().is_cpu() {
        return Ok((x.narrow(0, 1, steps - 1)? - x.narrow(0, 0, steps - 1)?)?.sqr()?.mean_all()?);
    }
    Ok(x.contiguous()?.apply_op1(MeanSquare { step: x.elem_count() / steps })?)
}

fn check(x: &Tensor) -> Result<()> {
    if x.elem_count() == 0 || x.rank() == 0 {
        return Err(shape_error(OP, "[steps, ...] without empty dimensions", format!("{:?}", x.dims())));
    }
    if !matches!(x.dtype(), DType::F32 | DType::F64) {
        return Err(dtype_error(OP, "f32 or f64", x.dtype()));
    }
    Ok(())
}

/// Mean of (x[i + step] - x[i])², or of x[i]² if `step` is 0.
struct MeanSquare {
    step: usize,
}

impl MeanSquare {
    fn mean<T: Real>(&self, x: &[T]) -> f64 {
        let (x, later) = (&x[..x.len() - self.step], &x[self.step..]);
        let minus = if self.step == 0 { 0.0 } else { 1.0 };
        let part = |(x, later): (&[T], &[T])| {
            // Independent sums, so that they become vector code.
            let mut sums = [0.0; 8];
            for (x, later) in x.chunks(8).zip(later.chunks(8)) {
                for ((sum, x), later) in sums.iter_mut().zip(x).zip(later) {
                    let d = later.to_f64() - minus * x.to_f64();
                    *sum += d * d;
                }
            }
            sums.iter().sum::<f64>()
        };
        let parts: Vec<f64> = x.par_chunks(CHUNK).zip(later.par_chunks(CHUNK)).map(part).collect();
        parts.iter().sum::<f64>() / x.len() as f64
    }

    fn gradient<T: Real + WithDType>(&self, x: &[T], upstream: f64) -> Vec<T> {
        let (n, step) = (x.len(), self.step);
        let factor = <T as Real>::from_f64(2.0 * upstream / (n - step) as f64);
        if step == 0 {
            return x.par_iter().with_min_len(CHUNK).map(|x| *x * factor).collect();
        }
        let mut dx = vec![T::ZERO; n];
        dx.par_chunks_mut(step).enumerate().for_each(|(t, dx)| {
            let now = &x[t * step..(t + 1) * step];
            let mut add = |other: &[T]| {
                for ((dx, now), other) in dx.iter_mut().zip(now).zip(other) {
                    *dx += (*now - *other) * factor;
                }
            };
            if t > 0 {
                add(&x[(t - 1) * step..t * step]);
            }
            if (t + 1) * step < n {
                add(&x[(t + 1) * step..(t + 2) * step]);
            }
        });
        dx
    }
}

impl CustomOp1 for MeanSquare {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let _span = op_span!(OP, "forward", 0);
        let mean = match x {
            CpuStorage::F64(_) => CpuStorage::F64(vec![self.mean::<f64>(slice(x, layout)?)]),
            _ => CpuStorage::F32(vec![self.mean::<f32>(slice(x, layout)?) as f32]),
        };
        Ok((mean, ().into()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, upstream: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let _span = op_span!(OP, "backward", 0);
        let upstream = upstream.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        Ok(Some(match x.dtype() {
            DType::F64 => tensor(with_slice(x, |v| self.gradient::<f64>(v, upstream))?, x.shape())?,
            _ => tensor(with_slice(x, |v| self.gradient::<f32>(v, upstream))?, x.shape())?,
        }))
    }
}
