//! One LSTM layer over a whole sequence, forward and backward through time (PyTorch's equations, gates i f g o).
//!
//! Only h·W_hhᵀ is sequential: x·W_ihᵀ for all steps is one product beforehand, and dW_ih, dW_hh and dX are one
//! product each afterwards. Gates stay in PyTorch's order `[step, batch, 4·hidden]`, so that no operand of these
//! products is rearranged; the backward pass writes the gates' gradients over the gates.
//!
//! The sequential product has few rows (the batch) and weights that are read again in every step: in f32 it has kernels
//! of its own (`recurrence`), in f64, for checks, it is plain Rust (`exact`).
mod exact;
mod recurrence;

use super::gemm::{Mat, gemm, product};
use super::{Arithmetic, Buf, Real, as_f32, as_f32_mut, with_products};
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

impl<T: Real> Layer<'_, T> {
    /// The same layer, for `T` = f32.
    fn as_f32(&self) -> Layer<'_, f32> {
        Layer {
            dims: self.dims,
            x: as_f32(self.x),
            w_ih: as_f32(self.w_ih),
            w_hh: as_f32(self.w_hh),
            kept: self.kept,
            bias: as_f32(self.bias),
            h0: as_f32(self.h0),
            c0: as_f32(self.c0),
        }
    }
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
pub fn forward<T: Real>(by: impl Into<Arithmetic>, layer: &Layer<T>, y: &mut [T]) -> Saved<T> {
    let (Dims { steps, batch, input, hidden }, by) = (layer.dims, by.into());
    let (rows, width) = (steps * batch, 4 * hidden);
    let lengths = [layer.x, layer.w_ih, layer.w_hh, layer.bias, layer.h0, layer.c0, y].map(<[T]>::len);
    let state = batch * hidden;
    let expected = [rows * input, width * input, width * hidden, width, state, state, rows * hidden];
    assert_eq!(lengths, expected);
    assert!(layer.kept.is_none_or(|kept| kept.keep.len() == width * hidden));
    let mut saved = Saved { gates: Buf::dirty(rows * width), cells: Buf::dirty(rows * hidden) };
    let (x, w) = (Mat::new(layer.x, rows, input), Mat::new(layer.w_ih, width, input));
    gemm(by, x, w.t(), &mut saved.gates, width, false);
    if T::IS_F32 {
        let out = [as_f32_mut(&mut saved.gates), as_f32_mut(&mut saved.cells), as_f32_mut(y)];
        forward_f32(by, &layer.as_f32(), out);
    } else {
        exact::forward(layer, &mut saved, y);
    }
    saved
}

/// The gradients of everything that is `wanted`, from the gradient `dy` of the hidden states `y`.
pub fn backward<T: Real>(
    by: impl Into<Arithmetic>,
    layer: &Layer<T>,
    y: &[T],
    mut saved: Saved<T>,
    dy: &[T],
    wanted: Wanted,
) -> Grads<T> {
    let (Dims { steps, batch, input, hidden }, by) = (layer.dims, by.into());
    let (rows, width, state) = (steps * batch, 4 * hidden, batch * hidden);
    assert_eq!([y.len(), dy.len(), saved.cells.len()], [rows * hidden; 3]);
    if T::IS_F32 {
        let (gates, cells) = (as_f32_mut(&mut saved.gates), as_f32(&saved.cells));
        backward_f32(by, &layer.as_f32(), gates, cells, as_f32(dy));
    } else {
        exact::backward(layer, &mut saved, dy);
    }
    // From here on `gates` holds the gradients of the gates before their nonlinearities.
    let dg = Mat::new(&saved.gates, rows, width);
    let w_hh = wanted.w_hh.then(|| {
        // The hidden state that each step started from: h0, then y without its last step.
        let mut before = Buf::dirty(rows * hidden);
        before[..state].copy_from_slice(layer.h0);
        before[state..].copy_from_slice(&y[..(rows - batch) * hidden]);
        let mut dw = product(by, dg.t(), Mat::new(&before, rows, hidden));
        if let Some(kept) = layer.kept {
            let scale = T::from_f64(kept.scale);
            let pairs = dw.par_iter_mut().zip(kept.keep).with_min_len(1 << 15);
            pairs.for_each(|(dw, keep)| *dw = if *keep != 0 { *dw * scale } else { T::ZERO });
        }
        dw
    });
    Grads {
        w_hh,
        w_ih: wanted.w_ih.then(|| product(by, dg.t(), Mat::new(layer.x, rows, input))),
        x: wanted.x.then(|| product(by, dg, Mat::new(layer.w_ih, width, input))),
        bias: wanted.bias.then(|| super::sums::column_sums(&saved.gates, width)),
    }
}

/// The steps in f32; not generic, so that they are compiled once.
fn forward_f32(by: Arithmetic, layer: &Layer<f32>, out: [&mut [f32]; 3]) {
    with_products!(by, s => recurrence::forward(s, by.amx(), layer, out));
}

fn backward_f32(by: Arithmetic, layer: &Layer<f32>, gates: &mut [f32], cells: &[f32], dy: &[f32]) {
    with_products!(by, s => recurrence::backward(s, by.amx(), layer, gates, cells, dy));
}

#[cfg(test)]
mod tests;
