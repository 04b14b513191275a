//! Gaussian error linear units.
use super::feature_map::{Element, FeatureMap, Host, dispatch};
use super::{Gelu, dtype_error, isa, slice, tensor, with_slice};
use crate::kernels::{Buf, gelu as kernel};
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use std::sync::Arc;

const OP: &str = "gelu";

/// x Φ(x) with the normal distribution's Φ, not its approximation by tanh: PyTorch's default.
///
/// On devices other than the CPU it is composed of candle's erf; candle's own op has six digits of the density in its gradient.
pub fn gelu(x: &FeatureMap) -> Result<FeatureMap> {
    dispatch!(x, x => forward(x), t => Ok(FeatureMap::Composed(composed(t, Gelu::Exact)?)))
}

/// The same of a tensor of any shape, in f32 or f64.
pub fn gelu_tensor(x: &Tensor) -> Result<Tensor> {
    gelu_of(x, Gelu::Exact)
}

/// The same, or its approximation by tanh.
pub(super) fn gelu_of(x: &Tensor, which: Gelu) -> Result<Tensor> {
    match (x.device().is_cpu(), x.dtype()) {
        (true, DType::F32 | DType::F64) => Ok(x.contiguous()?.apply_op1(OnTensor(which))?),
        (true, found) => Err(dtype_error(OP, "f32 or f64", found)),
        (false, _) => Ok(composed(x, which)?),
    }
}

fn forward<T: Element>(x: &Host<T>) -> Result<FeatureMap> {
    let isa = isa()?;
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::dirty(x.data.len());
    kernel::forward(isa, Gelu::Exact, &x.data, &mut y);
    drop(span);
    let (input, dx) = (x.data.clone(), x.grad.clone());
    let y = Host::record(OP, (x.dims, Arc::new(y)), &x.handle, &[], move |mut dy| {
        let _span = op_span!(OP, "backward", 0);
        kernel::backward(isa, Gelu::Exact, &input, &mut dy);
        dx.add(dy);
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

/// On tensors of the CPU.
struct OnTensor(Gelu);

impl CustomOp1 for OnTensor {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        fn run<T: Element>(which: Gelu, x: &CpuStorage, layout: &Layout) -> candle_core::Result<CpuStorage> {
            let (x, isa) = (slice::<T>(x, layout)?, isa()?);
            let mut y = vec![T::ZERO; x.len()];
            kernel::forward(isa, which, x, &mut y);
            Ok(T::store(y))
        }
        let _span = op_span!(OP, "forward", 0);
        let y = match x {
            CpuStorage::F64(_) => run::<f64>(self.0, x, layout),
            _ => run::<f32>(self.0, x, layout),
        };
        Ok((y?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        fn run<T: Element>(which: Gelu, x: &Tensor, dy: &Tensor) -> candle_core::Result<Tensor> {
            let (mut dx, isa) = (with_slice(dy, |dy: &[T]| dy.to_vec())?, isa()?);
            with_slice(x, |x: &[T]| kernel::backward(isa, which, x, &mut dx))?;
            tensor(dx, x.shape())
        }
        let _span = op_span!(OP, "backward", 0);
        match x.dtype() {
            DType::F64 => run::<f64>(self.0, x, dy),
            _ => run::<f32>(self.0, x, dy),
        }
        .map(Some)
    }
}

/// The same from candle's ops, for other devices.
fn composed(x: &Tensor, which: Gelu) -> candle_core::Result<Tensor> {
    let twice = match which {
        Gelu::Exact => ((x * std::f64::consts::FRAC_1_SQRT_2)?.erf()? + 1.0)?,
        Gelu::Tanh => {
            let u = ((x + ((x.sqr()? * x)? * 0.044_715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            (u.tanh()? + 1.0)?
        }
    };
    (x * twice)? * 0.5
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn composition_of_candle_ops_agrees() -> Result<()> {
        // Both tails too, where the kernels are 0 and x.
        let values: Vec<f64> =
            (-60..=60).map(|i| f64::from(i) / 4.0).chain([-1e3, -0.0, 1e-300, 1e3]).collect();
        let x = Var::from_vec(values, 125, &Device::Cpu)?;
        for which in [Gelu::Exact, Gelu::Tanh] {
            let (ours, theirs) = (gelu_of(&x, which)?, composed(&x, which)?);
            let grad =
                |y: &Tensor| -> Result<Vec<f64>> { Ok(y.sum_all()?.backward()?.get(&x).unwrap().to_vec1()?) };
            let pairs = [(ours.to_vec1()?, theirs.to_vec1()?), (grad(&ours)?, grad(&theirs)?)];
            for (ours, theirs) in pairs {
                for (a, b) in ours.into_iter().zip(theirs) {
                    // In units of the argument's, which the tails are cut from.
                    assert!((a - b).abs() <= 1e-13 * a.abs().max(1.0), "{which:?}: {a} {b}");
                }
            }
        }
        Ok(())
    }
}
