//! A fully connected layer with its bias and ReLU in one op.
use super::{Activation, dtype_error, isa, shape_error, slice, with_slice};
use crate::backward::deliver;
use crate::kernels::gemm::{Mat, Start, product, product_from};
use crate::kernels::sums::column_sums;
use crate::kernels::{Buf, Real};
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Tensor, WithDType};
use rayon::prelude::*;

const OP: &str = "linear";
/// Elements below which a pass over a buffer is not worth a second thread.
const PARALLEL: usize = 1 << 15;

/// `act(x·wᵀ + b)` for `x` of shape `[…, in]`, `w` `[out, in]` and `b` `[out]`, in f32 or f64.
///
/// One op on the CPU: no transposed weight gradient, no separate passes for bias and activation, and no gradient
/// of an operand that does not ask for one; GELU is an op of its own that follows. On other devices it is composed of candle's matmul, add and (for
/// ReLU) a multiplication by `y > 0`.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor};
/// use taper_models::ops::{Activation, linear};
/// let x = Tensor::new(&[[1f32, 2.0]], &Device::Cpu)?;
/// let w = Tensor::new(&[[1f32, 1.0], [1.0, -1.0]], &Device::Cpu)?;
/// assert_eq!(linear(&x, &w, None, Activation::Relu)?.to_vec2::<f32>()?, [[3.0, 0.0]]);
/// # Ok(()) }
/// ```
pub fn linear(x: &Tensor, w: &Tensor, b: Option<&Tensor>, act: Activation) -> Result<Tensor> {
    let expected = || match x.dims() {
        [.., k] => format!("x [..., in] without empty dimensions, w [out, {k}], b [out]"),
        [] => "x [..., in], w [out, in], b [out]".into(),
    };
    let fits = match (x.dims(), w.dims()) {
        ([.., k], [n, kw]) => {
            x.rank() >= 2 && k == kw && x.elem_count() * n > 0 && b.is_none_or(|b| b.dims() == [*n])
        }
        _ => false,
    };
    if !fits {
        let b = b.map_or("none".into(), |b| format!("{:?}", b.dims()));
        return Err(shape_error(OP, expected(), format!("x {:?}, w {:?}, b {b}", x.dims(), w.dims())));
    }
    if act == Activation::Gelu {
        return super::gelu_tensor(&linear(x, w, b, Activation::None)?);
    }
    let operands = [Some(x), Some(w), b];
    for t in operands.into_iter().flatten() {
        if !matches!(t.dtype(), DType::F32 | DType::F64) {
            return Err(dtype_error(OP, "f32 or f64", t.dtype()));
        }
        if t.dtype() != x.dtype() {
            return Err(dtype_error(OP, "the same for x, w and b", t.dtype()));
        }
    }
    if !x.device().is_cpu() {
        return Ok(composed(x, w, b, act)?);
    }
    let op = Linear { act, wanted: operands.map(|t| t.is_some_and(Tensor::track_op)) };
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    Ok(match b {
        Some(b) => x.apply_op3(&w, &b.contiguous()?, op)?,
        None => x.apply_op2(&w, op)?,
    })
}

/// The same of candle's ops, for devices without ours. candle's own relu has gradient 1 at 0.
fn composed(x: &Tensor, w: &Tensor, b: Option<&Tensor>, act: Activation) -> candle_core::Result<Tensor> {
    let (rows, mut shape) = (x.flatten_to(x.rank() - 2)?, x.dims().to_vec());
    let mut y = rows.matmul(&w.t()?)?;
    if let Some(b) = b {
        y = y.broadcast_add(b)?;
    }
    if act == Activation::Relu {
        y = (&y * y.gt(0.0)?.to_dtype(y.dtype())?)?;
    }
    shape[x.rank() - 1] = w.dim(0)?;
    y.reshape(shape)
}

struct Linear {
    act: Activation,
    /// Which of x, w, b have somebody waiting for their gradient.
    wanted: [bool; 3],
}

/// Rows, outputs and inputs.
fn sizes(x: &Shape, w: &Shape) -> candle_core::Result<(usize, usize, usize)> {
    let (n, k) = w.dims2()?;
    Ok((x.elem_count() / k, n, k))
}

impl Linear {
    fn fwd(
        &self,
        x: (&CpuStorage, &Layout),
        w: (&CpuStorage, &Layout),
        b: Option<(&CpuStorage, &Layout)>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (m, n, k) = sizes(x.1.shape(), w.1.shape())?;
        let _span = op_span!(OP, "forward", 2 * m * n * k, "{k}-{n}");
        let mut shape = x.1.dims().to_vec();
        // `linear` has checked that the rank is at least 2.
        *shape.last_mut().ok_or_else(|| candle_core::Error::msg("rank 0"))? = n;
        let y = match x.0 {
            CpuStorage::F64(_) => self.forward::<f64>(x, w, b, (m, n, k))?,
            _ => self.forward::<f32>(x, w, b, (m, n, k))?,
        };
        Ok((y, shape.into()))
    }

    fn forward<T: Real + WithDType>(
        &self,
        x: (&CpuStorage, &Layout),
        w: (&CpuStorage, &Layout),
        b: Option<(&CpuStorage, &Layout)>,
        (m, n, k): (usize, usize, usize),
    ) -> candle_core::Result<CpuStorage> {
        let (x, w, isa) = (slice::<T>(x.0, x.1)?, slice::<T>(w.0, w.1)?, isa()?);
        let start = match b {
            Some((b, lb)) => Start::Row(slice::<T>(b, lb)?),
            None => Start::Zero,
        };
        let mut y = product_from(isa, Mat::new(x, m, k), Mat::new(w, n, k).t(), start);
        if self.act == Activation::Relu {
            y.par_chunks_mut(PARALLEL).for_each(|y| {
                // Written so that NaN stays.
                y.iter_mut().for_each(|v| *v = if *v < T::ZERO { T::ZERO } else { *v });
            });
        }
        Ok(T::to_cpu_storage_owned(y))
    }

    fn backward<T: Real + WithDType>(
        &self,
        (x, w, b): (&Tensor, &Tensor, Option<&Tensor>),
        y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let (m, n, k) = sizes(x.shape(), w.shape())?;
        let ([want_x, want_w, want_b], isa) = (self.wanted, isa()?);
        let products = usize::from(want_x) + usize::from(want_w);
        let _span = op_span!(OP, "backward", 2 * products * m * n * k, "{k}-{n}");
        let from = |g: &[T]| {
            let gm = Mat::new(g, m, n);
            let dx = want_x.then(|| deliver(y, x, with_slice(w, |w| product(isa, gm, Mat::new(w, n, k)))?));
            let dw =
                want_w.then(|| deliver(y, w, with_slice(x, |x| product(isa, gm.t(), Mat::new(x, m, k)))?));
            let db = b.filter(|_| want_b).map(|b| deliver(y, b, column_sums(g, n)));
            Ok([dx.transpose()?.flatten(), dw.transpose()?.flatten(), db.transpose()?.flatten()])
        };
        match self.act {
            Activation::None | Activation::Gelu => with_slice(dy, from)?,
            Activation::Relu => from(&with_slice(y, |y| with_slice(dy, |dy| masked(dy, y)))??),
        }
    }

    fn bwd_any(
        &self,
        operands: (&Tensor, &Tensor, Option<&Tensor>),
        y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        match dy.dtype() {
            DType::F64 => self.backward::<f64>(operands, y, dy),
            _ => self.backward::<f32>(operands, y, dy),
        }
    }
}

/// `dy` where `y` is positive, else 0.
fn masked<T: Real>(dy: &[T], y: &[T]) -> Buf<T> {
    let mut g = Buf::dirty(dy.len());
    let parts = g.par_chunks_mut(PARALLEL).zip(dy.par_chunks(PARALLEL)).zip(y.par_chunks(PARALLEL));
    parts.for_each(|((g, dy), y)| {
        // In two passes, since a gradient that is only read where it is needed does not become vector code.
        g.copy_from_slice(dy);
        for (g, y) in g.iter_mut().zip(y) {
            *g = if *y > T::ZERO { *g } else { T::ZERO };
        }
    });
    g
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.fwd((x, lx), (w, lw), None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, _] = self.bwd_any((x, w, None), y, dy)?;
        Ok((dx, dw))
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.fwd((x, lx), (w, lw), Some((b, lb)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, db] = self.bwd_any((x, w, Some(b)), y, dy)?;
        Ok((dx, dw, db))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use candle_core::{Device, Var};

    #[test]
    fn composition_of_candle_ops_agrees() -> Result<()> {
        let draw = |n: usize, s: &[usize]| {
            let v: Vec<f64> = (0..n).map(|i| ((i * 37 + 11) % 101) as f64 / 50.0 - 1.0).collect();
            Var::from_tensor(&Tensor::from_vec(v, s, &Device::Cpu)?)
        };
        let (x, w, b) = (draw(24, &[2, 3, 4])?, draw(20, &[5, 4])?, draw(5, &[5])?);
        for act in [Activation::None, Activation::Relu] {
            for b in [None, Some(b.as_tensor())] {
                let (ours, theirs) = (linear(&x, &w, b, act)?, composed(&x, &w, b, act)?);
                assert_eq!(ours.shape(), theirs.shape());
                let (ga, gb) = (ours.sqr()?.sum_all()?.backward()?, theirs.sqr()?.sum_all()?.backward()?);
                let mut pairs = vec![(ours.clone(), theirs.clone())];
                for v in [x.as_tensor(), w.as_tensor()].into_iter().chain(b) {
                    pairs.push((ga.get(v).unwrap().clone(), gb.get(v).unwrap().clone()));
                }
                for (a, b) in pairs {
                    let d = (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                    assert!(d < 1e-12, "{act:?}: {d:e}"); // sums of at most 6 products in f64
                }
            }
        }
        Ok(())
    }

    #[test]
    fn an_error_is_the_crates_own() {
        let t = |s: &[usize]| Tensor::zeros(s, DType::F32, &Device::Cpu).unwrap();
        let e = linear(&t(&[2, 3]), &t(&[4, 5]), None, Activation::None).unwrap_err();
        assert!(matches!(e, Error::Shape { op: OP, .. }));
    }
}
