//! 2-D convolution.
use super::feature_map::{Element, FeatureMap, Host, check_param, dispatch};
use super::{arithmetic, with_slice};
use crate::kernels::Buf;
use crate::kernels::conv::{self, Algorithm, Geometry};
use crate::kernels::sums::tall_column_sums;
use crate::{Error, Result, op_span};
use candle_core::Tensor;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

const OP: &str = "conv2d";

/// How closely a convolution follows the sum that defines it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As close as a plain sum in the element type: Winograd F(2×2, 3×3) or a gemm.
    Exact,
    /// About ten times the rounding error, faster: Winograd F(4×4, 3×3). The networks' default.
    #[default]
    Fast,
}

/// Options of [`conv2d`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2d {
    /// Steps between output rows and columns. Defaults to 1.
    pub stride: [usize; 2],
    /// Rows and columns of zeros around the input. Defaults to 0.
    pub padding: [usize; 2],
    /// Groups of channels that see only each other. Defaults to 1.
    pub groups: usize,
    /// Defaults to [`Precision::Exact`]: who calls the op itself asks for speed by name.
    pub precision: Precision,
    /// How the sums are formed; `None`, the default, chooses by shape and CPU.
    pub algorithm: Option<Algorithm>,
}

impl Default for Conv2d {
    fn default() -> Self {
        Self { stride: [1, 1], padding: [0, 0], groups: 1, precision: Precision::Exact, algorithm: None }
    }
}

impl Conv2d {
    /// Square strides and paddings.
    pub fn square(stride: usize, padding: usize, precision: Precision) -> Self {
        Self { stride: [stride; 2], padding: [padding; 2], precision, ..Self::default() }
    }

    /// The extents for an input and a weight, or what is wrong with them.
    fn geometry(&self, [n, h, w, ci]: [usize; 4], weight: &Tensor) -> Result<Geometry> {
        let refuse = |expected: String, found: String| Err(Error::Shape { op: OP, expected, found });
        let &[co, per_group, kh, kw] = weight.dims() else {
            return refuse(
                "a weight [out, in / groups, rows, columns]".into(),
                format!("{:?}", weight.dims()),
            );
        };
        let (groups, pad) = (self.groups, self.padding);
        if groups == 0 || self.stride.contains(&0) || co == 0 || kh * kw == 0 {
            let expected = "groups, strides and extents of at least 1".into();
            return refuse(expected, format!("{self:?} with weight {:?}", weight.dims()));
        }
        if per_group * groups != ci || co % groups != 0 {
            let expected =
                format!("a weight [out, {ci} / {groups}, rows, columns] with out divisible by {groups}");
            return refuse(expected, format!("{:?}", weight.dims()));
        }
        if h + 2 * pad[0] < kh || w + 2 * pad[1] < kw {
            let expected = format!("an image of at least {kh} by {kw} with its padding");
            return refuse(expected, format!("{h} by {w} padded by {} and {}", pad[0], pad[1]));
        }
        Ok(Geometry { n, h, w, ci, co, kernel: [kh, kw], stride: self.stride, pad, groups })
    }

    fn algorithm<T: Element>(&self, g: &Geometry) -> Result<Algorithm> {
        let Some(asked) = self.algorithm else {
            return Ok(Algorithm::choose::<T>(g, self.precision == Precision::Fast));
        };
        let found = || format!("{asked:?} for {g} in {}", T::DTYPE.as_str());
        let expected = || "an algorithm for this shape and dtype".into();
        let refused = || Error::Shape { op: OP, expected: expected(), found: found() };
        asked.fits::<T>(g).then_some(asked).ok_or_else(refused)
    }
}

/// The convolution (cross-correlation, as everywhere in deep learning) of `x` with `weight`
/// `[out, in / groups, rows, columns]`, plus `bias` `[out]`.
///
/// Gradients that nobody needs are not computed. On devices other than the CPU this is candle's own
/// `conv2d` between two permutations; it takes equal strides and paddings for both axes only, and its backward
/// pass fails where the stride leaves unequal remainders on the two axes.
pub fn conv2d(
    x: &FeatureMap,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &Conv2d,
) -> Result<FeatureMap> {
    let geometry = options.geometry(x.dims()?, weight)?;
    dispatch!(x, x => forward(x, weight, bias, options, geometry), t => composed(t, weight, bias, options))
}

fn forward<T: Element>(
    x: &Host<T>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &Conv2d,
    g: Geometry,
) -> Result<FeatureMap> {
    let (by, algorithm) = (arithmetic()?, options.algorithm::<T>(&g)?);
    check_param(OP, "a weight", weight, T::DTYPE, weight.dims())?;
    let mut y = Buf::dirty(g.y_len());
    let bias_values = match bias {
        Some(bias) => {
            check_param(OP, "a bias", bias, T::DTYPE, &[g.co])?;
            Some(with_slice(bias, |b: &[T]| b.to_vec())?)
        }
        None => None,
    };
    let span = op_span!(OP, "forward", g.flops(), "{g}");
    with_slice(weight, |w: &[T]| {
        conv::forward(by, algorithm, &g, (&x.data, w, bias_values.as_deref()), &mut y)
    })?;
    drop(span);

    let (input, dx) = (x.data.clone(), x.tracked().then(|| x.grad.clone()));
    let (weight_, bias_) = (weight.clone(), bias.cloned());
    let params: Vec<&Tensor> = std::iter::once(weight).chain(bias).collect();
    let dims = [g.n, g.oh(), g.ow(), g.co];
    let y = Host::record(OP, (dims, Arc::new(y)), &x.handle, &params, move |dy| {
        let dw = match weight_.track_op() {
            true => {
                let _span = op_span!(OP, "backward", g.flops(), "{g}");
                let mut dw = vec![T::ZERO; g.w_len()];
                conv::grad_weight(by, algorithm, &g, (&input, &dy), &mut dw);
                Some(dw)
            }
            false => None,
        };
        // If nobody else reads the input any more, its buffer becomes that of its gradient.
        drop(input);
        if let Some(dx) = dx {
            let _span = op_span!(OP, "backward", g.flops(), "{g}");
            with_slice(&weight_, |w: &[T]| {
                dx.add_with(g.x_len(), |dx, add| conv::grad_input(by, algorithm, &g, (&dy, w), dx, add));
            })?;
        }
        let db = match bias_ {
            Some(bias) if bias.track_op() => Some(tall_column_sums(by.isa, &dy, g.co)),
            _ => None,
        };
        Ok([dw, db])
    })?;
    Ok(T::wrap(y))
}

/// The same from candle's ops, for other devices.
fn composed(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, options: &Conv2d) -> Result<FeatureMap> {
    let ([sh, sw], [ph, pw]) = (options.stride, options.padding);
    if sh != sw || ph != pw {
        return Err(Error::Shape {
            op: OP,
            expected: "equal strides and paddings of both axes on this device".into(),
            found: format!("{:?} and {:?}", options.stride, options.padding),
        });
    }
    let y = x.permute((0, 3, 1, 2))?.contiguous()?.conv2d(weight, ph, sh, 1, options.groups)?;
    let y = y.permute((0, 2, 3, 1))?.contiguous()?;
    Ok(FeatureMap::Composed(match bias {
        Some(bias) => y.broadcast_add(bias)?,
        None => y,
    }))
}
