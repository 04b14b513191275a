//! The last layer of a classifier and its loss in one op.
use super::cross_entropy::{CrossEntropy, cross_entropy, in_place, target_rows};
use super::{Activation, arithmetic, dtype_error, linear, shape_error, slice, with_slice};
use crate::backward::deliver;
use crate::kernels::gemm::{Mat, gemm, product};
use crate::kernels::softmax::Row;
use crate::kernels::sums::column_sums;
use crate::kernels::{Arithmetic, Buf, Real};
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Shape, Tensor, WithDType};
use std::sync::{Mutex, PoisonError};

const OP: &str = "linear_cross_entropy";

/// [`cross_entropy`] of [`linear`]: `x` `[…, in]`, `w` `[classes, in]`, `b` `[classes]` if there is one, `targets` `[…]`.
///
/// Where the number of classes is large, the logits are the largest tensor of the model. Nobody sees them here, so
/// their gradient is written over them, and they are neither kept, copied nor passed through candle's gradient
/// store. On devices other than the CPU it is the composition of the two ops.
pub fn linear_cross_entropy(
    x: &Tensor,
    w: &Tensor,
    b: Option<&Tensor>,
    targets: &Tensor,
    options: &CrossEntropy,
) -> Result<Tensor> {
    let fits = match (x.dims(), w.dims(), targets.dims()) {
        ([n @ .., k], [c, kw], m) => {
            let bias = b.is_none_or(|b| b.dims() == [*c]);
            n == m && !n.is_empty() && k == kw && bias && x.elem_count() * c > 0
        }
        _ => false,
    };
    if !fits {
        let operands = [x, w].into_iter().chain(b).chain([targets]);
        let found = operands.map(|t| format!("{:?}", t.dims())).collect::<Vec<_>>().join(", ");
        let expected = "x [..., in], w [classes, in], b [classes] and targets [...] without empty dimensions";
        return Err(shape_error(OP, expected, found));
    }
    for operand in [x, w].into_iter().chain(b) {
        if !matches!(operand.dtype(), DType::F32 | DType::F64) {
            return Err(dtype_error(OP, "f32 or f64", operand.dtype()));
        }
        if operand.dtype() != x.dtype() {
            return Err(dtype_error(OP, "the same for x, w and b", operand.dtype()));
        }
    }
    if !x.device().is_cpu() {
        let logits = linear(&x.flatten_to(x.rank() - 2)?, w, b, Activation::None)?;
        return cross_entropy(&logits, &targets.flatten_all()?, options);
    }
    let rows = target_rows(OP, targets, w.dim(0)?, options)?;
    let (by, wanted) = (arithmetic()?, [Some(x), Some(w), b].map(|t| t.is_some_and(Tensor::track_op)));
    match x.dtype() {
        DType::F64 => apply(x, w, b, Op::<f64> { by, rows, wanted, gradient: Mutex::default() }),
        _ => apply(x, w, b, Op::<f32> { by, rows, wanted, gradient: Mutex::default() }),
    }
}

fn apply<T: Real + WithDType>(x: &Tensor, w: &Tensor, b: Option<&Tensor>, op: Op<T>) -> Result<Tensor> {
    let (x, w) = (x.contiguous()?, w.contiguous()?);
    Ok(match b {
        Some(b) => x.apply_op3(&w, &b.contiguous()?, op)?,
        None => x.apply_op2(&w, op)?,
    })
}

struct Op<T: Real> {
    by: Arithmetic,
    rows: Vec<Option<Row>>,
    wanted: [bool; 3],
    /// Of the logits; freed by the backward pass.
    gradient: Mutex<Option<Buf<T>>>,
}

/// An operand in memory.
type Operand<'a> = (&'a CpuStorage, &'a Layout);

impl<T: Real + WithDType> Op<T> {
    /// The loss and the gradient of the logits.
    fn compute(&self, x: &[T], w: &[T], b: Option<&[T]>, c: usize) -> (f64, Buf<T>) {
        let n = self.rows.len();
        let mut logits = Buf::dirty(n * c);
        let (x, w) = (Mat::new(x, n, x.len() / n), Mat::new(w, c, w.len() / c));
        gemm(self.by, x, w.t(), &mut logits, c, false);
        (in_place(self.by.isa, &mut logits, b, &self.rows), logits)
    }

    fn forward(
        &self,
        (x, lx): Operand,
        (w, lw): Operand,
        b: Option<Operand>,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (n, (c, k)) = (self.rows.len(), lw.shape().dims2()?);
        let _span = op_span!(OP, "forward", 2 * n * c * k, "{k}-{c}");
        let b = b.map(|(b, lb)| slice::<T>(b, lb)).transpose()?;
        let (loss, gradient) = self.compute(slice::<T>(x, lx)?, slice::<T>(w, lw)?, b, c);
        if self.wanted != [false; 3] {
            *self.gradient.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
        }
        Ok((T::to_cpu_storage_owned(vec![<T as Real>::from_f64(loss)]), ().into()))
    }

    fn backward(
        &self,
        (x, w, b): (&Tensor, &Tensor, Option<&Tensor>),
        node: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let (n, (c, k)) = (self.rows.len(), w.dims2()?);
        let _span = op_span!(OP, "backward", 4 * n * c * k, "{k}-{c}");
        let by = self.by;
        let gradient = match self.gradient.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(gradient) => gradient,
            // The graph's second backward pass.
            None => with_slice(x, |x| {
                with_slice(w, |w| match b {
                    Some(b) => with_slice(b, |b| self.compute(x, w, Some(b), c).1),
                    None => Ok(self.compute(x, w, None, c).1),
                })
            })???,
        };
        let [want_x, want_w, want_b] = self.wanted;
        let g = Mat::new(&gradient, n, c);
        let factor = upstream.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        // On the three results rather than on the logits' gradient, which is the largest of all.
        let scaled = |mut v: Vec<T>| {
            if factor != 1.0 {
                v.iter_mut().for_each(|v| *v *= <T as Real>::from_f64(factor));
            }
            v
        };
        let dx =
            want_x.then(|| deliver(node, x, scaled(with_slice(w, |w| product(by, g, Mat::new(w, c, k)))?)));
        let dw = want_w
            .then(|| deliver(node, w, scaled(with_slice(x, |x| product(by, g.t(), Mat::new(x, n, k)))?)));
        let db = b.filter(|_| want_b).map(|b| deliver(node, b, scaled(column_sums(&gradient, c))));
        Ok([dx.transpose()?.flatten(), dw.transpose()?.flatten(), db.transpose()?.flatten()])
    }
}

impl<T: Real + WithDType> CustomOp2 for Op<T> {
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
        self.forward((x, lx), (w, lw), None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        node: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, _] = self.backward((x, w, None), node, upstream)?;
        Ok((dx, dw))
    }
}

impl<T: Real + WithDType> CustomOp3 for Op<T> {
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
        self.forward((x, lx), (w, lw), Some((b, lb)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        node: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dw, db] = self.backward((x, w, Some(b)), node, upstream)?;
        Ok((dx, dw, db))
    }
}
