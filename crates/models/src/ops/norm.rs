//! Layer norm and RMS norm.
use super::feature_map::{Element, FeatureMap, Host, check_param, dispatch};
use super::{isa, with_slice};
use crate::kernels::Buf;
use crate::kernels::norm::{self, Norm as Kernel};
use crate::{Result, op_span};
use candle_core::{D, Tensor};
use std::sync::Arc;

const OP: &str = "norm";

/// Which numbers a row is divided by.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// The factor of each feature.
    pub weight: &'a Tensor,
    /// What is added to each feature, if anything.
    pub bias: Option<&'a Tensor>,
    /// What is added to the variance, or the mean square.
    pub eps: f64,
    /// Whether the mean is subtracted first: layer norm, with a bias or without; else it is RMS norm.
    pub centred: bool,
}

/// Each row of features on its own: (x − mean)/√(variance + eps) · weight + bias, with the variance divided by the number of
/// features; or, not centred, x/√(mean square + eps) · weight.
///
/// Weight and bias get their gradients in a fixed order. On devices other than the CPU it is composed of candle's means and
/// quotients: candle-nn's own `LayerNorm` and `RmsNorm` have no gradient on contiguous inputs.
pub fn norm(x: &FeatureMap, norm: &Norm) -> Result<FeatureMap> {
    dispatch!(x, x => forward(x, norm), t => Ok(FeatureMap::Composed(composed(t, norm)?)))
}

fn forward<T: Element>(x: &Host<T>, options: &Norm) -> Result<FeatureMap> {
    let (isa, [.., n]) = (isa()?, x.dims);
    let Norm { weight, bias, eps, centred } = *options;
    check_param(OP, "a weight", weight, T::DTYPE, &[n])?;
    if let Some(bias) = bias {
        check_param(OP, "a bias", bias, T::DTYPE, &[n])?;
    }
    let span = op_span!(OP, "forward", 0);
    let rows = x.data.len() / n;
    let (mut y, mut moments) = (Buf::dirty(x.data.len()), vec![[T::ZERO; 2]; rows]);
    let mut run = |bias: Option<&[T]>| {
        with_slice(weight, |weight| {
            norm::forward(isa, &Kernel { weight, bias, eps, centred }, &x.data, &mut y, &mut moments);
        })
    };
    match bias {
        Some(bias) => with_slice(bias, |bias| run(Some(bias)))??,
        None => run(None)?,
    }
    drop(span);
    let (input, tracked, slot, weights) = (x.data.clone(), x.tracked(), x.grad.clone(), weight.clone());
    let (want_weight, want_bias) = (weight.track_op(), bias.is_some_and(Tensor::track_op));
    let params: Vec<&Tensor> = [weight].into_iter().chain(bias).collect();
    let y = Host::record(OP, (x.dims, Arc::new(y)), &x.handle, &params, move |dy| {
        let _span = op_span!(OP, "backward", 0);
        let back = |dx: Option<(&mut [T], bool)>| {
            with_slice(&weights, |weight| {
                let kernel = Kernel { weight, bias: None, eps, centred };
                norm::backward(isa, &kernel, (&input, &moments), &dy, dx)
            })
        };
        let mut sums = None;
        match tracked {
            true => slot.add_with(dy.len(), |dx, add| sums = Some(back(Some((dx, add))))),
            false => sums = Some(back(None)),
        }
        Ok(match sums.transpose()? {
            Some([dw, db]) => [want_weight.then_some(dw), want_bias.then_some(db)],
            None => [None, None],
        })
    })?;
    if y.tracked() {
        crate::trace::keep(rows * 2 * size_of::<T>());
    }
    Ok(T::wrap(y))
}

/// The same of candle's ops.
fn composed(x: &Tensor, norm: &Norm) -> candle_core::Result<Tensor> {
    let x = match norm.centred {
        true => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
        false => x.clone(),
    };
    let variance = x.sqr()?.mean_keepdim(D::Minus1)?;
    let y = x.broadcast_div(&(variance + norm.eps)?.sqrt()?)?.broadcast_mul(norm.weight)?;
    match norm.bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}
