//! Fully connected layers between activations.
use super::feature_map::{Element, FeatureMap, Host, check_param};
use super::gelu::gelu_of;
use super::{Activation, Gelu, Mask, arithmetic, linear, masked, shape_error, with_slice};
use crate::kernels::gemm::{Mat, Start, gemm, gemm_from, product};
use crate::kernels::sums::row_sums;
use crate::kernels::{Arithmetic, Buf, Shared, gelu as curve, par};
use crate::{Result, op_span};
use candle_core::Tensor;
use std::sync::Arc;

const OP: &str = "linear";

/// `x·wᵀ + b` for every row of features, with `w` `[out, in]` and `b` `[out]`, and a GELU after it if asked for.
///
/// What [`linear`] is between tensors: one op on the CPU, with no gradient of an operand that does not ask for one. On other
/// devices it is composed of candle's.
pub fn linear_features(
    x: &FeatureMap,
    w: &Tensor,
    b: Option<&Tensor>,
    gelu: Option<Gelu>,
) -> Result<FeatureMap> {
    match x {
        FeatureMap::F32(x) => forward(x, w, b, gelu),
        FeatureMap::F64(x) => forward(x, w, b, gelu),
        FeatureMap::Composed(x) => {
            let y = linear(x, w, b, Activation::None)?;
            Ok(FeatureMap::Composed(match gelu {
                Some(gelu) => gelu_of(&y, gelu)?,
                None => y,
            }))
        }
    }
}

/// `residual + mask · (x·wᵀ + b)`: the end of a branch that is added to what it came from, after dropout if there is a mask.
///
/// Without a mask the sum is the product's own start. On devices other than the CPU it is composed of candle's ops.
pub fn linear_residual(
    residual: &FeatureMap,
    x: &FeatureMap,
    w: &Tensor,
    b: Option<&Tensor>,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    let ([n, h, width, _], [rn, rh, rw, out]) = (x.dims()?, residual.dims()?);
    let elements = n * h * width * out;
    if [n, h, width] != [rn, rh, rw] || mask.is_some_and(|mask| mask.keep().len() != elements) {
        let expected = format!("a residual and a mask for {:?}", [n, h, width, out]);
        let mask = mask.map_or("none".into(), |mask| format!("{:?}", mask.shape()));
        return Err(shape_error(OP, expected, format!("{:?} and {mask}", residual.dims()?)));
    }
    match (residual, x) {
        (FeatureMap::F32(residual), FeatureMap::F32(x)) => joined(residual, x, w, b, mask),
        (FeatureMap::F64(residual), FeatureMap::F64(x)) => joined(residual, x, w, b, mask),
        (residual, x) => {
            let mut y = linear(&x.leave()?, w, b, Activation::None)?;
            if let Some(mask) = mask {
                y = masked(&y.flatten_all()?, &mask.reshaped(elements))?.reshape(y.shape())?;
            }
            Ok(FeatureMap::Composed((residual.leave()? + y)?))
        }
    }
}

/// Rows, outputs and inputs.
fn sizes<T: Element>(x: &Host<T>, w: &Tensor, b: Option<&Tensor>) -> Result<[usize; 3]> {
    let [.., k] = x.dims;
    let out = match *w.dims() {
        [out, inputs] if inputs == k && out > 0 => out,
        _ => return Err(shape_error(OP, format!("a weight [out, {k}]"), format!("{:?}", w.dims()))),
    };
    check_param(OP, "a weight", w, T::DTYPE, &[out, k])?;
    if let Some(b) = b {
        check_param(OP, "a bias", b, T::DTYPE, &[out])?;
    }
    Ok([x.data.len() / k, out, k])
}

/// Calls `f` with the elements of a bias, if there is one.
fn with_bias<T: Element, R>(b: Option<&Tensor>, f: impl FnOnce(Option<&[T]>) -> R) -> candle_core::Result<R> {
    match b {
        Some(b) => with_slice(b, |b| f(Some(b))),
        None => Ok(f(None)),
    }
}

/// What the backward pass of a layer needs.
struct Layer<T: Element> {
    by: Arithmetic,
    x: Host<T>,
    w: Tensor,
    /// Whether somebody waits for the gradient of the bias: it may be trained where the weight is not.
    wants_bias: bool,
}

impl<T: Element> Layer<T> {
    /// Adds the gradient of the inputs where somebody waits for it, and returns those of weight and bias.
    fn backward(&self, dy: &[T]) -> Result<[Option<Vec<T>>; 2]> {
        let (by, x) = (self.by, &self.x);
        let [.., k] = x.dims;
        let (m, n) = (x.data.len() / k, self.w.dim(0)?);
        let (inputs, weights) = (x.tracked(), self.w.track_op());
        let products = usize::from(inputs) + usize::from(weights);
        let _span = op_span!(OP, "backward", 2 * products * m * n * k, "{k}-{n}");
        let g = Mat::new(dy, m, n);
        if inputs {
            with_slice(&self.w, |w| {
                x.grad.add_with(x.data.len(), |dx, add| gemm(by, g, Mat::new(w, n, k), dx, k, add));
            })?;
        }
        let dw = weights.then(|| product(by, g.t(), Mat::new(&x.data, m, k)));
        let db = self.wants_bias.then(|| row_sums(by.isa, dy, n));
        Ok([dw, db])
    }
}

fn forward<T: Element>(
    x: &Host<T>,
    w: &Tensor,
    b: Option<&Tensor>,
    gelu: Option<Gelu>,
) -> Result<FeatureMap> {
    let ([m, n, k], by) = (sizes(x, w, b)?, arithmetic()?);
    let span = op_span!(OP, "forward", 2 * m * n * k, "{k}-{n}");
    let mut y = Buf::dirty(m * n);
    with_slice(w, |w: &[T]| {
        with_bias(b, |b| {
            let start = b.map_or(Start::Zero, Start::Row);
            gemm_from(by, Mat::new(&x.data, m, k), Mat::new(w, n, k).t(), &mut y, n, start);
        })
    })??;
    let mut before = None;
    if let Some(which) = gelu {
        let mut z = Buf::dirty(m * n);
        curve::forward(by.isa, which, &y, &mut z);
        before = Some((std::mem::replace(&mut y, z), which));
    }
    drop(span);
    let kept = before.as_ref().map_or(0, |(before, _)| std::mem::size_of_val(&before[..]));
    let layer = Layer { by, x: x.clone(), w: w.clone(), wants_bias: b.is_some_and(Tensor::track_op) };
    let params: Vec<&Tensor> = [w].into_iter().chain(b).collect();
    let [a, c, d, _] = x.dims;
    let y = Host::record(OP, ([a, c, d, n], Arc::new(y)), &x.handle, &params, move |mut dy| {
        if let Some((before, which)) = before {
            let _span = op_span!("gelu", "backward", 0);
            curve::backward(by.isa, which, &before, &mut dy);
        }
        layer.backward(&dy)
    })?;
    if y.tracked() {
        crate::trace::keep(kept);
    }
    Ok(T::wrap(y))
}

fn joined<T: Element>(
    residual: &Host<T>,
    x: &Host<T>,
    w: &Tensor,
    b: Option<&Tensor>,
    mask: Option<&Mask>,
) -> Result<FeatureMap> {
    let ([m, n, k], by) = (sizes(x, w, b)?, arithmetic()?);
    if n != residual.dims[3] {
        return Err(shape_error(
            OP,
            format!("a weight [{}, {k}]", residual.dims[3]),
            format!("{:?}", w.dims()),
        ));
    }
    let span = op_span!(OP, "forward", 2 * m * n * k, "{k}-{n}");
    let mut y = Buf::dirty(m * n);
    with_slice(w, |w: &[T]| {
        with_bias(b, |b| {
            let other = Mat::new(&residual.data, m, n);
            let start = match (mask, b) {
                (None, Some(b)) => Start::Plus(other, b),
                (None, None) => Start::Times(T::ONE, other),
                (Some(_), b) => b.map_or(Start::Zero, Start::Row),
            };
            gemm_from(by, Mat::new(&x.data, m, k), Mat::new(w, n, k).t(), &mut y, n, start);
        })
    })??;
    if let Some(mask) = mask {
        dropped(&mut y, mask, Some(&residual.data));
    }
    drop(span);
    let handle = (&x.handle + &residual.handle)?;
    let layer = Layer { by, x: x.clone(), w: w.clone(), wants_bias: b.is_some_and(Tensor::track_op) };
    let params: Vec<&Tensor> = [w].into_iter().chain(b).collect();
    let (slot, mask) = (residual.tracked().then(|| residual.grad.clone()), mask.cloned());
    let kept = mask.as_ref().map_or(0, |mask| mask.keep().len());
    let y = Host::record(OP, (residual.dims, Arc::new(y)), &handle, &params, move |dy| {
        let gradients = match &mask {
            Some(mask) => {
                let mut masked = Buf::copy_of(&dy);
                dropped(&mut masked, mask, None);
                layer.backward(&masked)?
            }
            None => layer.backward(&dy)?,
        };
        if let Some(slot) = slot {
            slot.add(dy);
        }
        Ok(gradients)
    })?;
    if y.tracked() {
        crate::trace::keep(kept);
    }
    Ok(T::wrap(y))
}

/// y times a mask, and something added to it.
fn dropped<T: Element>(y: &mut [T], mask: &Mask, plus: Option<&[T]>) {
    const GRAIN: usize = 1 << 14;
    let (n, keep, scale) = (y.len(), mask.keep(), <T as crate::kernels::Real>::from_f64(mask.scale()));
    let y = Shared::new(y);
    par(n.div_ceil(GRAIN), |task| {
        let (first, count) = (task * GRAIN, GRAIN.min(n - task * GRAIN));
        // SAFETY: each task has elements of its own.
        let y = unsafe { y.slice(first, count) };
        let keep = &keep[first..first + count];
        for (y, keep) in y.iter_mut().zip(keep) {
            *y = if *keep != 0 { *y * scale } else { T::ZERO };
        }
        if let Some(plus) = plus {
            y.iter_mut().zip(&plus[first..]).for_each(|(y, plus)| *y += *plus);
        }
    });
}
