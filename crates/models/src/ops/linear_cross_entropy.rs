//! The last layer of a classifier and its loss in one op.
use super::cross_entropy::{CrossEntropy, cross_entropy, in_place, target_rows};
use super::{Activation, arithmetic, dtype_error, linear, shape_error, slice, with_slice};
use crate::backward::deliver;
use crate::kernels::gemm::{Mat, gemm, product};
use crate::kernels::softmax::Row;
use crate::kernels::sums::column_sums;
use crate::kernels::{Arithmetic, Buf, Real};
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor, WithDType};
use std::sync::{Mutex, PoisonError};

const OP: &str = "linear_cross_entropy";

/// [`cross_entropy`] of [`linear`]: `x` `[…, in]`, `w` `[classes, in]`, `b` `[classes]`, `targets` `[…]`.
///
/// Where the number of classes is large, the logits are the largest tensor of the model. Nobody sees them here, so
/// their gradient is written over them, and they are neither kept, copied nor passed through candle's gradient
/// store. On devices other than the CPU it is the composition of the two ops.
pub fn linear_cross_entropy(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    targets: &Tensor,
    options: &CrossEntropy,
) -> Result<Tensor> {
    let fits = match (x.dims(), w.dims(), b.dims(), targets.dims()) {
        ([n @ .., k], [c, kw], [cb], m) => {
            n == m && !n.is_empty() && k == kw && c == cb && x.elem_count() * c > 0
        }
        _ => false,
    };
    if !fits {
        let found = [x, w, b, targets].map(|t| format!("{:?}", t.dims())).join(", ");
        let expected = "x [..., in], w [classes, in], b [classes] and targets [...] without empty dimensions";
        return Err(shape_error(OP, expected, found));
    }
    for operand in [x, w, b] {
        if !matches!(operand.dtype(), DType::F32 | DType::F64) {
            return Err(dtype_error(OP, "f32 or f64", operand.dtype()));
        }
        if operand.dtype() != x.dtype() {
            return Err(dtype_error(OP, "the same for x, w and b", operand.dtype()));
        }
    }
    if !x.device().is_cpu() {
        let logits = linear(&x.flatten_to(x.rank() - 2)?, w, Some(b), Activation::None)?;
        return cross_entropy(&logits, &targets.flatten_all()?, options);
    }
    let rows = target_rows(OP, targets, w.dim(0)?, options)?;
    let (by, wanted) = (arithmetic()?, [x, w, b].map(Tensor::track_op));
    let (x, w, b) = (x.contiguous()?, w.contiguous()?, b.contiguous()?);
    Ok(match x.dtype() {
        DType::F64 => x.apply_op3(&w, &b, Op::<f64> { by, rows, wanted, gradient: Mutex::default() })?,
        _ => x.apply_op3(&w, &b, Op::<f32> { by, rows, wanted, gradient: Mutex::default() })?,
    })
}

struct Op<T: Real> {
    by: Arithmetic,
    rows: Vec<Option<Row>>,
    wanted: [bool; 3],
    /// Of the logits; freed by the backward pass.
    gradient: Mutex<Option<Buf<T>>>,
}

impl<T: Real> Op<T> {
    /// The loss and the gradient of the logits.
    fn compute(&self, x: &[T], w: &[T], b: &[T]) -> (f64, Buf<T>) {
        let (n, c) = (self.rows.len(), b.len());
        let mut logits = Buf::dirty(n * c);
        let (x, w) = (Mat::new(x, n, x.len() / n), Mat::new(w, c, w.len() / c));
        gemm(self.by, x, w.t(), &mut logits, c, false);
        (in_place(self.by.isa, &mut logits, Some(b), &self.rows), logits)
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
        let (n, (c, k)) = (self.rows.len(), lw.shape().dims2()?);
        let _span = op_span!(OP, "forward", 2 * n * c * k, "{k}-{c}");
        let (loss, gradient) = self.compute(slice::<T>(x, lx)?, slice::<T>(w, lw)?, slice::<T>(b, lb)?);
        if self.wanted != [false; 3] {
            *self.gradient.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
        }
        Ok((T::to_cpu_storage_owned(vec![<T as Real>::from_f64(loss)]), ().into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        node: &Tensor,
        upstream: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (n, (c, k)) = (self.rows.len(), w.dims2()?);
        let _span = op_span!(OP, "backward", 4 * n * c * k, "{k}-{c}");
        let by = self.by;
        let gradient = match self.gradient.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(gradient) => gradient,
            // The graph's second backward pass.
            None => with_slice(x, |x| with_slice(w, |w| with_slice(b, |b| self.compute(x, w, b).1)))???,
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
        let db = want_b.then(|| deliver(node, b, scaled(column_sums(&gradient, c))));
        Ok((dx.transpose()?.flatten(), dw.transpose()?.flatten(), db.transpose()?.flatten()))
    }
}
