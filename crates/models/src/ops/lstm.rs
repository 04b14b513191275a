//! An LSTM layer over a whole sequence.
use super::bundle::Bundle;
use super::{Mask, arithmetic, dtype_error, shape_error, slice, tensor, with_slice};
use crate::backward::deliver;
use crate::kernels::lstm::{Dims, Kept, Layer, Saved, Wanted, backward, forward};
use crate::kernels::{Arithmetic, Real};
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Shape, Tensor, WithDType};
use std::sync::{Arc, Mutex, PoisonError};

const OP: &str = "lstm";

/// The parameters of one layer, in PyTorch's layout: gates in the order i, f, g, o.
#[derive(Clone, Debug)]
pub struct LstmWeights {
    /// `[4·hidden, input]`.
    pub w_ih: Tensor,
    /// `[4·hidden, hidden]`. Its gradient costs a quarter of the layer's time; detach it to freeze it.
    pub w_hh: Tensor,
    /// `[4·hidden]`.
    pub b_ih: Tensor,
    /// `[4·hidden]`.
    pub b_hh: Tensor,
}

/// A hidden and a cell state, `[batch, hidden]` each.
#[derive(Clone, Debug)]
pub struct LstmState {
    /// The hidden state.
    pub h: Tensor,
    /// The cell state.
    pub c: Tensor,
}

/// The layer over `x` (`[steps, batch, input]`, f32 or f64) from `state` (zeros if there is none): the hidden
/// states `[steps, batch, hidden]`, and the state after the last step.
///
/// `drop` masks `w_hh` (weight drop); the gradient is that of the unmasked matrix. States are carried, not
/// differentiated: no gradient passes through `state` or through the state that is returned, which is what
/// truncated backpropagation through time wants.
///
/// On the CPU the whole sequence is one op, in the backward pass too. On other devices it is composed of candle's
/// matmul, sigmoid and tanh step by step.
pub fn lstm(
    x: &Tensor,
    weights: &LstmWeights,
    state: Option<&LstmState>,
    drop: Option<&Mask>,
) -> Result<(Tensor, LstmState)> {
    let dims = check(x, weights, state, drop)?;
    if !x.device().is_cpu() {
        return composed(x, weights, state, drop, dims);
    }
    match x.dtype() {
        DType::F64 => run::<f64>(x, weights, state, drop, dims),
        _ => run::<f32>(x, weights, state, drop, dims),
    }
}

fn check(x: &Tensor, w: &LstmWeights, state: Option<&LstmState>, drop: Option<&Mask>) -> Result<Dims> {
    let dims = match (x.dims(), w.w_hh.dims()) {
        ([steps, batch, input], [_, hidden]) if x.elem_count() * hidden > 0 => {
            Dims { steps: *steps, batch: *batch, input: *input, hidden: *hidden }
        }
        (found, w_hh) => {
            let found = format!("x {found:?}, w_hh {w_hh:?}");
            return Err(shape_error(
                OP,
                "x [steps, batch, input] and w_hh [4·hidden, hidden], neither empty",
                found,
            ));
        }
    };
    let Dims { batch, input, hidden, .. } = dims;
    let fits = |name: &str, found: &[usize], expected: &[usize]| {
        let describe = |dims: &[usize]| format!("{name} {dims:?}");
        if found == expected { Ok(()) } else { Err(shape_error(OP, describe(expected), describe(found))) }
    };
    fits("w_ih", w.w_ih.dims(), &[4 * hidden, input])?;
    fits("w_hh", w.w_hh.dims(), &[4 * hidden, hidden])?;
    fits("b_ih", w.b_ih.dims(), &[4 * hidden])?;
    fits("b_hh", w.b_hh.dims(), &[4 * hidden])?;
    if let Some(state) = state {
        fits("h", state.h.dims(), &[batch, hidden])?;
        fits("c", state.c.dims(), &[batch, hidden])?;
    }
    if let Some(drop) = drop {
        fits("mask of w_hh", drop.shape().dims(), &[4 * hidden, hidden])?;
    }
    let operands = [x, &w.w_ih, &w.w_hh, &w.b_ih, &w.b_hh];
    for operand in operands.into_iter().chain(state.into_iter().flat_map(|s| [&s.h, &s.c])) {
        if !matches!(operand.dtype(), DType::F32 | DType::F64) {
            return Err(dtype_error(OP, "f32 or f64", operand.dtype()));
        }
        if operand.dtype() != x.dtype() {
            return Err(dtype_error(OP, "the same for all operands", operand.dtype()));
        }
    }
    Ok(dims)
}

fn run<T: Real + WithDType>(
    x: &Tensor,
    w: &LstmWeights,
    state: Option<&LstmState>,
    drop: Option<&Mask>,
    dims: Dims,
) -> Result<(Tensor, LstmState)> {
    let (rows, hidden) = (dims.batch * dims.hidden, dims.hidden);
    let values = |t: &Tensor| with_slice::<T, _>(t, <[T]>::to_vec);
    let (h0, c0) = match state {
        Some(state) => (values(&state.h)?, values(&state.c)?),
        None => (vec![T::ZERO; rows], vec![T::ZERO; rows]),
    };
    let w_hh = w.w_hh.contiguous()?;
    let (bundle, node) = Bundle::new([&w_hh, &w.b_ih, &w.b_hh])?;
    let bias = values(&w.b_ih)?.into_iter().zip(values(&w.b_hh)?).map(|(a, b)| a + b).collect();
    let wanted = Wanted {
        x: x.track_op(),
        w_ih: w.w_ih.track_op(),
        w_hh: w.w_hh.track_op(),
        bias: w.b_ih.track_op() || w.b_hh.track_op(),
    };
    let saved = Arc::new(Mutex::new(None));
    let (b_ih, b_hh) = (w.b_ih.clone(), w.b_hh.clone());
    let op = Lstm {
        by: arithmetic()?,
        dims,
        w_hh,
        b_ih,
        b_hh,
        bias,
        h0,
        c0,
        drop: drop.cloned(),
        wanted,
        bundle,
        saved: saved.clone(),
    };
    let y = x.contiguous()?.apply_op3(&w.w_ih.contiguous()?, &node, op)?;
    // Copies: a view would keep the whole sequence alive until the next batch.
    let last = (dims.steps - 1) * rows;
    let h = with_slice::<T, _>(&y, |y| tensor(y[last..].to_vec(), (dims.batch, hidden)))??;
    let saved = saved.lock().unwrap_or_else(PoisonError::into_inner);
    let cells = saved.as_ref().map(|s: &Saved<T>| s.cells()[last..].to_vec()).unwrap_or_default();
    Ok((y, LstmState { h, c: tensor(cells, (dims.batch, hidden))? }))
}

struct Lstm<T: Real> {
    by: Arithmetic,
    dims: Dims,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    bias: Vec<T>,
    h0: Vec<T>,
    c0: Vec<T>,
    drop: Option<Mask>,
    wanted: Wanted,
    bundle: Bundle,
    saved: Arc<Mutex<Option<Saved<T>>>>,
}

impl<T: Real + WithDType> Lstm<T> {
    fn layer<'a>(&'a self, x: &'a [T], w_ih: &'a [T], w_hh: &'a [T]) -> Layer<'a, T> {
        let kept = self.drop.as_ref().map(|mask| Kept { keep: mask.keep(), scale: mask.scale() });
        Layer { dims: self.dims, x, w_ih, w_hh, kept, bias: &self.bias, h0: &self.h0, c0: &self.c0 }
    }

    fn output(&self) -> Vec<T> {
        vec![T::ZERO; self.dims.steps * self.dims.batch * self.dims.hidden]
    }
}

impl<T: Real + WithDType> CustomOp3 for Lstm<T> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w_ih: &CpuStorage,
        lw: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let Dims { input, hidden, .. } = self.dims;
        let _span = op_span!(OP, "forward", self.dims.flops(), "{input}-{hidden}");
        let (x, w_ih, mut y) = (slice::<T>(x, lx)?, slice::<T>(w_ih, lw)?, self.output());
        let saved =
            with_slice::<T, _>(&self.w_hh, |w_hh| forward(self.by, &self.layer(x, w_ih, w_hh), &mut y))?;
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
        let Dims { steps, batch, hidden, .. } = self.dims;
        Ok((T::to_cpu_storage_owned(y), (steps, batch, hidden).into()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w_ih: &Tensor,
        _: &Tensor,
        y: &Tensor,
        dy: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Dims { input, hidden, .. } = self.dims;
        let _span = op_span!(OP, "backward", 2 * self.dims.flops(), "{input}-{hidden}");
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let compute = |xs: &[T], w_ih: &[T], w_hh: &[T], y: &[T], dy: &[T]| {
            let layer = self.layer(xs, w_ih, w_hh);
            // The gates were overwritten if this is the graph's second backward pass: make them again.
            let saved = saved.unwrap_or_else(|| forward(self.by, &layer, &mut self.output()));
            backward(self.by, &layer, y, saved, dy, self.wanted)
        };
        let grads = with_slice(x, |xs| {
            with_slice(w_ih, |w_ih| {
                with_slice(&self.w_hh, |w_hh| {
                    with_slice(y, |y| with_slice(dy, |dy| compute(xs, w_ih, w_hh, y, dy)))
                })
            })
        })?????;
        let dbias = |bias: &Tensor| match &grads.bias {
            Some(grad) if bias.track_op() => deliver(y, bias, grad.clone()),
            _ => Ok(None),
        };
        let (db_ih, db_hh) = (dbias(&self.b_ih)?, dbias(&self.b_hh)?);
        let dw_hh = grads.w_hh.map(|grad| deliver(y, &self.w_hh, grad)).transpose()?.flatten();
        self.bundle.leave([dw_hh, db_ih, db_hh]);
        let dx = grads.x.map(|grad| deliver(y, x, grad)).transpose()?.flatten();
        let dw_ih = grads.w_ih.map(|grad| deliver(y, w_ih, grad)).transpose()?.flatten();
        Ok((dx, dw_ih, Some(Bundle::token()?)))
    }
}

/// The same of candle's ops, for devices without ours.
fn composed(
    x: &Tensor,
    w: &LstmWeights,
    state: Option<&LstmState>,
    drop: Option<&Mask>,
    dims: Dims,
) -> Result<(Tensor, LstmState)> {
    let Dims { steps, batch, hidden, .. } = dims;
    let zeros = || Tensor::zeros((batch, hidden), x.dtype(), x.device());
    let (mut h, mut c) = match state {
        Some(state) => (state.h.detach(), state.c.detach()),
        None => (zeros()?, zeros()?),
    };
    let w_hh = match drop {
        Some(mask) => (&w.w_hh * mask.to_tensor(x.dtype(), x.device())?)?,
        None => w.w_hh.clone(),
    };
    let (w_ih, w_hh, bias) = (w.w_ih.t()?, w_hh.t()?, (&w.b_ih + &w.b_hh)?);
    let mut outputs = Vec::with_capacity(steps);
    for step in 0..steps {
        let sums = x.get(step)?.matmul(&w_ih)?.add(&h.matmul(&w_hh)?)?.broadcast_add(&bias)?;
        let gate = |q: usize| sums.narrow(D::Minus1, q * hidden, hidden);
        let sigmoid = candle_nn::ops::sigmoid;
        let (i, f, a, o) = (sigmoid(&gate(0)?)?, sigmoid(&gate(1)?)?, gate(2)?.tanh()?, sigmoid(&gate(3)?)?);
        c = ((f * &c)? + (i * a)?)?;
        h = (o * c.tanh()?)?;
        outputs.push(h.clone());
    }
    Ok((Tensor::stack(&outputs, 0)?, LstmState { h: h.detach(), c: c.detach() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use candle_core::{Device, Var};

    #[test]
    fn composition_of_candle_ops_agrees_and_a_second_backward_too() -> Result<()> {
        let draw = |salt: usize, shape: &[usize]| {
            let n = shape.iter().product::<usize>();
            let v: Vec<f64> = (0..n).map(|i| ((i * 37 + salt * 11) % 101) as f64 / 70.0 - 0.7).collect();
            Var::from_tensor(&Tensor::from_vec(v, shape, &Device::Cpu)?)
        };
        let (x, w_ih, w_hh) = (draw(1, &[4, 3, 5])?, draw(2, &[24, 5])?, draw(3, &[24, 6])?);
        let (b_ih, b_hh) = (draw(4, &[24])?, draw(5, &[24])?);
        let state =
            LstmState { h: draw(6, &[3, 6])?.as_tensor().clone(), c: draw(7, &[3, 6])?.as_tensor().clone() };
        let vars = [&x, &w_ih, &w_hh, &b_ih, &b_hh];
        let [_, w_ih, w_hh, b_ih, b_hh] = vars.map(|v| v.as_tensor().clone());
        let weights = LstmWeights { w_ih, w_hh, b_ih, b_hh };
        let mask = Mask::draw(Rng::new(1, "test", "w", 0), (24, 6), 0.5)?;
        for (state, mask) in [(None, None), (Some(&state), Some(&mask))] {
            let dims = check(&x, &weights, state, mask)?;
            let (ours, end) = lstm(&x, &weights, state, mask)?;
            let (theirs, their_end) = composed(&x, &weights, state, mask, dims)?;
            let (loss, their_loss) = (ours.sqr()?.sum_all()?, theirs.sqr()?.sum_all()?);
            let (first, second, reference) = (loss.backward()?, loss.backward()?, their_loss.backward()?);
            let aside = crate::backward(&loss)?;
            let mut pairs = vec![(ours, theirs), (end.h, their_end.h), (end.c, their_end.c)];
            for grads in [&first, &second, &aside] {
                pairs
                    .extend(vars.map(|v| (grads.get(v).unwrap().clone(), reference.get(v).unwrap().clone())));
            }
            for (i, (a, b)) in pairs.into_iter().enumerate() {
                let d = (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
                assert!(d < 1e-13, "pair {i}: {d:e}"); // some dozens of f64 roundings of numbers near 1
            }
        }
        Ok(())
    }
}
