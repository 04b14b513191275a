//! The sequential part of an LSTM layer in f64 and in the plainest way: what the kernels in f32 and all gradients are
//! checked against.
use super::super::gemm::{Mat, gemm};
use super::super::{Buf, Isa, Real};
use super::{Dims, Layer, Saved};

/// The recurrent weights with their mask applied.
fn dropped<T: Real>(layer: &Layer<T>) -> Buf<T> {
    let mut dropped = Buf::copy_of(layer.w_hh);
    if let Some(kept) = layer.kept {
        let scale = T::from_f64(kept.scale);
        let pairs = dropped.iter_mut().zip(kept.keep);
        pairs.for_each(|(w, keep)| *w = if *keep != 0 { *w * scale } else { T::ZERO });
    }
    dropped
}

/// The steps of [`super::forward`]; `saved.gates` already holds x·W_ihᵀ.
pub(super) fn forward<T: Real>(layer: &Layer<T>, saved: &mut Saved<T>, y: &mut [T]) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    let (state, width, w) = (batch * hidden, 4 * hidden, dropped(layer));
    let w = Mat::new(&w, width, hidden);
    for step in 0..steps {
        let (now, before) = (step * state, step.saturating_sub(1) * state);
        let gates = &mut saved.gates[4 * now..][..4 * state];
        let (earlier, cells) = saved.cells.split_at_mut(now);
        let (done, h) = y.split_at_mut(now);
        let (h_before, c_before) =
            if step == 0 { (layer.h0, layer.c0) } else { (&done[before..], &earlier[before..]) };
        gemm(Isa::PORTABLE, Mat::new(h_before, batch, hidden), w.t(), gates, width, true);
        for (row, g) in gates.chunks_exact_mut(width).enumerate() {
            let row = row * hidden..(row + 1) * hidden;
            activate(g, layer.bias, &c_before[row.clone()], &mut cells[row.clone()], &mut h[row]);
        }
    }
}

/// One row of one step: gate sums in `g` become gates, `c` and `h` the new state.
fn activate<T: Real>(g: &mut [T], bias: &[T], c_before: &[T], c: &mut [T], h: &mut [T]) {
    let n = h.len();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for j in 0..n {
        let sum = |q: usize| (g[q * n + j] + bias[q * n + j]).to_f64();
        let [i, f, a, o] = [sigmoid(sum(0)), sigmoid(sum(1)), sum(2).tanh(), sigmoid(sum(3))];
        let cell = f * c_before[j].to_f64() + i * a;
        c[j] = T::from_f64(cell);
        h[j] = T::from_f64(o * cell.tanh());
        [i, f, a, o].into_iter().enumerate().for_each(|(q, v)| g[q * n + j] = T::from_f64(v));
    }
}

/// The steps of [`super::backward`]: gates become the gradients of their sums.
pub(super) fn backward<T: Real>(layer: &Layer<T>, saved: &mut Saved<T>, dy: &[T]) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    let (state, width, w) = (batch * hidden, 4 * hidden, dropped(layer));
    let w = Mat::new(&w, width, hidden);
    let (mut dh, mut dc) = (Buf::dirty(state), Buf::zeros(state));
    for step in (0..steps).rev() {
        let now = step * state;
        let (gates, later) = saved.gates[4 * now..].split_at_mut(4 * state);
        dh.copy_from_slice(&dy[now..now + state]);
        if step + 1 < steps {
            gemm(Isa::PORTABLE, Mat::new(&later[..4 * state], batch, width), w, &mut dh, hidden, true);
        }
        let c_before = if step == 0 { layer.c0 } else { &saved.cells[now - state..now] };
        for (row, g) in gates.chunks_exact_mut(width).enumerate() {
            let row = row * hidden..(row + 1) * hidden;
            let c = &saved.cells[now..][row.clone()];
            differentiate(g, &c_before[row.clone()], c, &dh[row.clone()], &mut dc[row]);
        }
    }
}

/// One row of one step backwards: gates in `g` become the gradients of their sums; `dc`, the gradient of the cell
/// state, goes from this step's to the one before.
fn differentiate<T: Real>(g: &mut [T], c_before: &[T], c: &[T], dh: &[T], dc: &mut [T]) {
    let n = dh.len();
    for j in 0..n {
        let [i, f, a, o] = [0, 1, 2, 3].map(|q| g[q * n + j].to_f64());
        let (dh, tanh_c) = (dh[j].to_f64(), c[j].to_f64().tanh());
        let d = dc[j].to_f64() + dh * o * (1.0 - tanh_c * tanh_c);
        let before = c_before[j].to_f64();
        let grads = [
            d * a * i * (1.0 - i),
            d * before * f * (1.0 - f),
            d * i * (1.0 - a * a),
            dh * tanh_c * o * (1.0 - o),
        ];
        grads.into_iter().enumerate().for_each(|(q, v)| g[q * n + j] = T::from_f64(v));
        dc[j] = T::from_f64(d * f);
    }
}
