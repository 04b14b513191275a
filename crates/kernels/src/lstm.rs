//! One LSTM layer over a whole sequence, forward and backward through time (PyTorch's equations, gates i f g o).
//!
//! Only h·W_hhᵀ is sequential: x·W_ihᵀ for all steps is one product beforehand, and dW_ih, dW_hh and dX are one
//! product each afterwards. Gates stay in PyTorch's order `[step, batch, 4·hidden]`, so that no operand of these
//! products is rearranged; the backward pass writes the gates' gradients over the gates.
//!
//! The sequential product has few rows (the batch) and weights that are read again in every step. With AVX-512
//! they are packed once a call into the order in which they are read: forward in panels of 16 units × 4 gates, so
//! that the task which has summed a panel applies the nonlinearities at once; backward in panels of units.
use super::gemm::{Mat, gemm, product};
use super::multiversion::multiversion;
use super::{Buf, Isa, Real, as_f32, as_f32_mut, vmath};
use rayon::prelude::*;

/// Sizes of a layer's call.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    /// Steps in time.
    pub steps: usize,
    /// Sequences.
    pub batch: usize,
    /// Numbers a step takes in.
    pub input: usize,
    /// Units.
    pub hidden: usize,
}

impl Dims {
    /// Operations of a forward pass by the plain count.
    pub fn flops(&self) -> usize {
        8 * self.steps * self.batch * self.hidden * (self.input + self.hidden)
    }
}

/// Which entries of the recurrent weights are kept (one byte each, 0 or 1), and the factor of those that are.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// One byte a weight: 0 or 1.
    pub keep: &'a [u8],
    /// The factor of what is kept.
    pub scale: f64,
}

/// What a layer computes from. Lengths follow from `dims`; [`forward`] checks them.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a, T> {
    /// Sizes.
    pub dims: Dims,
    /// `[steps, batch, input]`.
    pub x: &'a [T],
    /// `[4·hidden, input]`.
    pub w_ih: &'a [T],
    /// `[4·hidden, hidden]`.
    pub w_hh: &'a [T],
    /// Weight drop of `w_hh`.
    pub kept: Option<Kept<'a>>,
    /// Sum of both biases, `[4·hidden]`.
    pub bias: &'a [T],
    /// State before the first step, `[batch, hidden]` each.
    pub h0: &'a [T],
    /// The first cells.
    pub c0: &'a [T],
}

/// What the backward pass needs of the forward pass.
#[derive(Debug)]
pub struct Saved<T: Real> {
    /// Activated gates, `[steps, batch, 4·hidden]`.
    gates: Buf<T>,
    /// Cell states, `[steps, batch, hidden]`.
    cells: Buf<T>,
}

impl<T: Real> Saved<T> {
    /// The cell states, `[steps, batch, hidden]`.
    pub fn cells(&self) -> &[T] {
        &self.cells
    }
}

/// The gradients that were asked for.
#[derive(Debug)]
pub struct Grads<T> {
    /// Of the input.
    pub x: Option<Vec<T>>,
    /// Of the weights of the input.
    pub w_ih: Option<Vec<T>>,
    /// Of the weights of the state.
    pub w_hh: Option<Vec<T>>,
    /// Of the bias.
    pub bias: Option<Vec<T>>,
}

/// Which gradients are asked for.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Of the input.
    pub x: bool,
    /// Of the weights of the input.
    pub w_ih: bool,
    /// Of the weights of the state.
    pub w_hh: bool,
    /// Of the bias.
    pub bias: bool,
}

/// Writes the hidden states `[steps, batch, hidden]` to `y`.
///
/// # Panics
/// If a slice has not the length that `dims` says.
pub fn forward<T: Real>(isa: Isa, layer: &Layer<T>, y: &mut [T]) -> Saved<T> {
    let Dims { steps, batch, input, hidden } = layer.dims;
    let (rows, width) = (steps * batch, 4 * hidden);
    let lengths = [layer.x, layer.w_ih, layer.w_hh, layer.bias, layer.h0, layer.c0, y].map(<[T]>::len);
    let state = batch * hidden;
    let expected = [rows * input, width * input, width * hidden, width, state, state, rows * hidden];
    assert_eq!(lengths, expected);
    assert!(layer.kept.is_none_or(|kept| kept.keep.len() == width * hidden));
    let mut saved = Saved { gates: Buf::dirty(rows * width), cells: Buf::dirty(rows * hidden) };
    let (x, w) = (Mat::new(layer.x, rows, input), Mat::new(layer.w_ih, width, input));
    gemm(isa, x, w.t(), &mut saved.gates, width, false);
    #[cfg(target_arch = "x86_64")]
    if let Some(proof) = isa.avx512::<T>() {
        avx512::forward(proof, layer, &mut saved, y);
        return saved;
    }
    let dropped = dropped(layer);
    let w = Mat::new(dropped.as_deref().unwrap_or(layer.w_hh), width, hidden);
    for step in 0..steps {
        let (now, before) = (step * state, step.saturating_sub(1) * state);
        let gates = &mut saved.gates[4 * now..][..4 * state];
        let (earlier, cells) = saved.cells.split_at_mut(now);
        let (done, h) = y.split_at_mut(now);
        let (h_before, c_before) =
            if step == 0 { (layer.h0, layer.c0) } else { (&done[before..], &earlier[before..]) };
        gemm(isa, Mat::new(h_before, batch, hidden), w.t(), gates, width, true);
        let rows = gates.par_chunks_mut(width).zip(c_before.par_chunks(hidden));
        let rows = rows.zip(cells[..state].par_chunks_mut(hidden)).zip(h[..state].par_chunks_mut(hidden));
        rows.with_min_len(8192usize.div_ceil(hidden)).for_each(|(((g, c_before), c), h)| {
            activate(isa, g, layer.bias, c_before, c, h);
        });
    }
    saved
}

/// The gradients of everything that is `wanted`, from the gradient `dy` of the hidden states `y`.
pub fn backward<T: Real>(
    isa: Isa,
    layer: &Layer<T>,
    y: &[T],
    mut saved: Saved<T>,
    dy: &[T],
    wanted: Wanted,
) -> Grads<T> {
    let Dims { steps, batch, input, hidden } = layer.dims;
    let (rows, width, state) = (steps * batch, 4 * hidden, batch * hidden);
    assert_eq!([y.len(), dy.len(), saved.cells.len()], [rows * hidden; 3]);
    #[cfg(target_arch = "x86_64")]
    let done = isa.avx512::<T>().map(|proof| avx512::backward(proof, layer, &mut saved, dy)).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    let done = false;
    if !done {
        let dropped = dropped(layer);
        let w = Mat::new(dropped.as_deref().unwrap_or(layer.w_hh), width, hidden);
        let (mut dh, mut dc) = (Buf::dirty(state), Buf::zeros(state));
        for step in (0..steps).rev() {
            let now = step * state;
            let (gates, later) = saved.gates[4 * now..].split_at_mut(4 * state);
            dh.copy_from_slice(&dy[now..now + state]);
            if step + 1 < steps {
                gemm(isa, Mat::new(&later[..4 * state], batch, width), w, &mut dh, hidden, true);
            }
            let c_before = if step == 0 { layer.c0 } else { &saved.cells[now - state..now] };
            let rows = gates.par_chunks_mut(width).zip(c_before.par_chunks(hidden));
            let rows = rows.zip(saved.cells[now..now + state].par_chunks(hidden));
            let rows = rows.zip(dh.par_chunks(hidden)).zip(dc.par_chunks_mut(hidden));
            rows.with_min_len(8192usize.div_ceil(hidden)).for_each(|((((g, c_before), c), dh), dc)| {
                differentiate(isa, g, c_before, c, dh, dc);
            });
        }
    }
    // From here on `gates` holds the gradients of the gates before their nonlinearities.
    let dg = Mat::new(&saved.gates, rows, width);
    let w_hh = wanted.w_hh.then(|| {
        // The hidden state that each step started from: h0, then y without its last step.
        let mut before = Buf::dirty(rows * hidden);
        before[..state].copy_from_slice(layer.h0);
        before[state..].copy_from_slice(&y[..(rows - batch) * hidden]);
        let mut dw = product(isa, dg.t(), Mat::new(&before, rows, hidden));
        if let Some(kept) = layer.kept {
            let scale = T::from_f64(kept.scale);
            let pairs = dw.par_iter_mut().zip(kept.keep).with_min_len(1 << 15);
            pairs.for_each(|(dw, keep)| *dw = if *keep != 0 { *dw * scale } else { T::ZERO });
        }
        dw
    });
    Grads {
        w_hh,
        w_ih: wanted.w_ih.then(|| product(isa, dg.t(), Mat::new(layer.x, rows, input))),
        x: wanted.x.then(|| product(isa, dg, Mat::new(layer.w_ih, width, input))),
        bias: wanted.bias.then(|| super::sums::column_sums(&saved.gates, width)),
    }
}

/// The recurrent weights with their mask applied, if there is one.
fn dropped<T: Real>(layer: &Layer<T>) -> Option<Buf<T>> {
    layer.kept.map(|kept| {
        let mut dropped = Buf::copy_of(layer.w_hh);
        let scale = T::from_f64(kept.scale);
        let pairs = dropped.iter_mut().zip(kept.keep);
        pairs.for_each(|(w, keep)| *w = if *keep != 0 { *w * scale } else { T::ZERO });
        dropped
    })
}

/// One row of one step: gate sums in `g` become gates, `c` and `h` the new state.
fn activate<T: Real>(isa: Isa, g: &mut [T], bias: &[T], c_before: &[T], c: &mut [T], h: &mut [T]) {
    if T::IS_F32 {
        let (c, h) = (as_f32_mut(c), as_f32_mut(h));
        return activate_f32(isa, as_f32_mut(g), as_f32(bias), as_f32(c_before), c, h);
    }
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

multiversion! {
    fn activate_f32(g: &mut [f32], bias: &[f32], c_before: &[f32], c: &mut [f32], h: &mut [f32]) = activate_row
}

#[inline(always)]
fn activate_row<const FMA: bool>(
    g: &mut [f32],
    bias: &[f32],
    c_before: &[f32],
    c: &mut [f32],
    h: &mut [f32],
) {
    let n = h.len();
    let [gi, gf, ga, go] = quarters_mut(g, n);
    let [bi, bf, ba, bo] = quarters(bias, n);
    activate_units::<FMA>([gi, gf, ga, go], [bi, bf, ba, bo], c_before, c, h);
}

/// The cell of consecutive units of one row; all slices have the length of `h`.
///
/// Sixteen units at a time, in loops of known length: that is what the compiler turns into whole vectors. The rest
/// goes through arrays padded with zeros.
#[inline(always)]
fn activate_units<const FMA: bool>(
    mut gates: [&mut [f32]; 4],
    bias: [&[f32]; 4],
    c_before: &[f32],
    c: &mut [f32],
    h: &mut [f32],
) {
    for at in (0..h.len()).step_by(LANES) {
        let n = LANES.min(h.len() - at);
        let [i, f, a, o] = [0, 1, 2, 3].map(|q| load(&gates[q][at..at + n]));
        let [bi, bf, ba, bo] = bias.map(|bias| load(&bias[at..at + n]));
        let before = load(&c_before[at..at + n]);
        let i = array(|j| vmath::sigmoid::<FMA>(i[j] + bi[j]));
        let f = array(|j| vmath::sigmoid::<FMA>(f[j] + bf[j]));
        let a = array(|j| vmath::tanh::<FMA>(a[j] + ba[j]));
        let o = array(|j| vmath::sigmoid::<FMA>(o[j] + bo[j]));
        let cell = array(|j| f[j] * before[j] + i[j] * a[j]);
        let hidden = array(|j| o[j] * vmath::tanh::<FMA>(cell[j]));
        store(&mut c[at..at + n], &cell);
        store(&mut h[at..at + n], &hidden);
        for (gates, values) in gates.iter_mut().zip([&i, &f, &a, &o]) {
            store(&mut gates[at..at + n], values);
        }
    }
}

/// Lanes of the widest vector.
const LANES: usize = 16;

/// Up to 16 numbers, padded with zeros.
#[inline(always)]
fn load(from: &[f32]) -> [f32; LANES] {
    match from.try_into() {
        Ok(full) => full,
        Err(_) => {
            let mut padded = [0.0; LANES];
            padded[..from.len()].copy_from_slice(from);
            padded
        }
    }
}

/// The first of 16 numbers, as many as there is room for.
#[inline(always)]
fn store(to: &mut [f32], values: &[f32; LANES]) {
    match to.as_chunks_mut() {
        ([full], []) => *full = *values,
        _ => to.copy_from_slice(&values[..to.len()]),
    }
}

#[inline(always)]
fn array(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for (j, out) in out.iter_mut().enumerate() {
        *out = f(j);
    }
    out
}

/// One row of one step backwards: gates in `g` become the gradients of their sums; `dc`, the gradient of the cell
/// state, goes from this step's to the one before.
fn differentiate<T: Real>(isa: Isa, g: &mut [T], c_before: &[T], c: &[T], dh: &[T], dc: &mut [T]) {
    if T::IS_F32 {
        let (c_before, c, dh) = (as_f32(c_before), as_f32(c), as_f32(dh));
        return differentiate_f32(isa, as_f32_mut(g), c_before, c, dh, as_f32_mut(dc));
    }
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

multiversion! {
    fn differentiate_f32(g: &mut [f32], c_before: &[f32], c: &[f32], dh: &[f32], dc: &mut [f32]) = differentiate_row
}

#[inline(always)]
fn differentiate_row<const FMA: bool>(
    g: &mut [f32],
    c_before: &[f32],
    c: &[f32],
    dh: &[f32],
    dc: &mut [f32],
) {
    let n = dh.len();
    differentiate_units::<FMA>(quarters_mut(g, n), c_before, c, dh, dc);
}

/// The cell backwards for consecutive units of one row; all slices have the length of `dh`.
#[inline(always)]
fn differentiate_units<const FMA: bool>(
    mut gates: [&mut [f32]; 4],
    c_before: &[f32],
    c: &[f32],
    dh: &[f32],
    dc: &mut [f32],
) {
    for at in (0..dh.len()).step_by(LANES) {
        let n = LANES.min(dh.len() - at);
        let [i, f, a, o] = [0, 1, 2, 3].map(|q| load(&gates[q][at..at + n]));
        let (before, c) = (load(&c_before[at..at + n]), load(&c[at..at + n]));
        let (dh, after) = (load(&dh[at..at + n]), load(&dc[at..at + n]));
        let tanh_c = array(|j| vmath::tanh::<FMA>(c[j]));
        let d = array(|j| after[j] + dh[j] * o[j] * (1.0 - tanh_c[j] * tanh_c[j]));
        let di = array(|j| d[j] * a[j] * (i[j] * (1.0 - i[j])));
        let df = array(|j| d[j] * before[j] * (f[j] * (1.0 - f[j])));
        let da = array(|j| d[j] * i[j] * (1.0 - a[j] * a[j]));
        let do_ = array(|j| dh[j] * tanh_c[j] * (o[j] * (1.0 - o[j])));
        store(&mut dc[at..at + n], &array(|j| d[j] * f[j]));
        for (gates, values) in gates.iter_mut().zip([&di, &df, &da, &do_]) {
            store(&mut gates[at..at + n], values);
        }
    }
}

/// Four consecutive slices of `n`.
#[inline(always)]
fn quarters(all: &[f32], n: usize) -> [&[f32]; 4] {
    [&all[..n], &all[n..2 * n], &all[2 * n..3 * n], &all[3 * n..4 * n]]
}

/// Four consecutive mutable slices of `n`.
#[inline(always)]
fn quarters_mut(all: &mut [f32], n: usize) -> [&mut [f32]; 4] {
    let (first, rest) = all.split_at_mut(n);
    let (second, rest) = rest.split_at_mut(n);
    let (third, fourth) = rest.split_at_mut(n);
    [first, second, third, fourth]
}

#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(test)]
mod tests;
