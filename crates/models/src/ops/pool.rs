//! Pooling.
use super::feature_map::{Element, FeatureMap, Host, dispatch};
use super::isa;
use crate::kernels::Buf;
use crate::kernels::conv::Geometry;
use crate::kernels::pool::{self, Tap};
use crate::{Error, Result, op_span};
use candle_core::Tensor;
use std::sync::Arc;

const MAX: &str = "max_pool2d";
const AVERAGE: &str = "avg_pool2d";

/// The windows of a pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Rows and columns of a window.
    pub kernel: [usize; 2],
    /// Steps between windows.
    pub stride: [usize; 2],
    /// Rows and columns around the input, at most half a window.
    pub padding: [usize; 2],
}

impl Window {
    /// Square windows.
    pub fn square(kernel: usize, stride: usize, padding: usize) -> Self {
        Self { kernel: [kernel; 2], stride: [stride; 2], padding: [padding; 2] }
    }

    fn geometry(&self, op: &'static str, [n, h, w, c]: [usize; 4]) -> Result<Geometry> {
        let [kh, kw] = self.kernel;
        let pad = self.padding;
        let extents = kh * kw > 0 && !self.stride.contains(&0) && 2 * pad[0] <= kh && 2 * pad[1] <= kw;
        if !extents || h + 2 * pad[0] < kh || w + 2 * pad[1] < kw {
            return Err(Error::Shape {
                op,
                expected: "a window inside the padded image, padded by at most half of itself".into(),
                found: format!("{self:?} on {h} by {w}"),
            });
        }
        // Positions in a window are kept as u32.
        if u32::try_from(h * w).is_err() {
            let expected = "fewer than 2^32 pixels an image".into();
            return Err(Error::Shape { op, expected, found: format!("{h} by {w}") });
        }
        Ok(Geometry { n, h, w, ci: c, co: c, kernel: self.kernel, stride: self.stride, pad, groups: 1 })
    }
}

/// The largest element of each window. The gradient goes to the first maximum in row-major order, as in PyTorch.
///
/// candle's own gradient is wrong for every window and missing for overlapping ones, so on devices other than the CPU this
/// is composed of its selections and comparisons, whose gradients are right.
pub fn max_pool2d(x: &FeatureMap, window: &Window) -> Result<FeatureMap> {
    let g = window.geometry(MAX, x.dims()?)?;
    dispatch!(x, x => max(x, g), t => composed_max(t, &g))
}

fn max<T: Element>(x: &Host<T>, g: Geometry) -> Result<FeatureMap> {
    match g.taps() <= u8::COUNT {
        true => max_with::<T, u8>(x, g),
        false => max_with::<T, u32>(x, g),
    }
}

fn max_with<T: Element, P: Tap>(x: &Host<T>, g: Geometry) -> Result<FeatureMap> {
    let (mut y, mut at, isa) = (Buf::dirty(g.y_len()), vec![P::default(); g.y_len()], isa()?);
    let span = op_span!(MAX, "forward", 0, "{} {}x{}", g.ci, g.h, g.w);
    pool::max_forward(isa, &g, &x.data, &mut y, &mut at);
    drop(span);
    let dx = x.grad.clone();
    let result = ([g.n, g.oh(), g.ow(), g.co], Arc::new(y));
    let y = Host::record(MAX, result, &x.handle, &[], move |dy| {
        let _span = op_span!(MAX, "backward", 0, "{} {}x{}", g.ci, g.h, g.w);
        dx.add_with(g.x_len(), |dx, add| pool::max_backward(isa, &g, (&dy, &at), dx, add));
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

/// The mean of each window; padding counts as zeros (PyTorch's `count_include_pad`, its default).
///
/// On devices other than the CPU this is candle's own op where its gradient is right (windows that tile the image), else
/// composed of its selections and additions.
pub fn avg_pool2d(x: &FeatureMap, window: &Window) -> Result<FeatureMap> {
    let g = window.geometry(AVERAGE, x.dims()?)?;
    dispatch!(x, x => average(x, g), t => {
        let tiles = g.kernel == g.stride && g.pad == [0, 0] && g.h % g.kernel[0] == 0 && g.w % g.kernel[1] == 0;
        if !tiles {
            return composed_average(t, &g);
        }
        let y = t.permute((0, 3, 1, 2))?.contiguous()?.avg_pool2d((g.kernel[0], g.kernel[1]))?;
        Ok(FeatureMap::Composed(y.permute((0, 2, 3, 1))?.contiguous()?))
    })
}

fn average<T: Element>(x: &Host<T>, g: Geometry) -> Result<FeatureMap> {
    let (mut y, isa) = (Buf::dirty(g.y_len()), isa()?);
    let span = op_span!(AVERAGE, "forward", 0, "{} {}x{}", g.ci, g.h, g.w);
    pool::avg_forward(isa, &g, &x.data, &mut y);
    drop(span);
    let dx = x.grad.clone();
    let result = ([g.n, g.oh(), g.ow(), g.co], Arc::new(y));
    let y = Host::record(AVERAGE, result, &x.handle, &[], move |dy| {
        let _span = op_span!(AVERAGE, "backward", 0, "{} {}x{}", g.ci, g.h, g.w);
        dx.add_with(g.x_len(), |dx, add| {
            if !add {
                dx.fill(T::ZERO);
            }
            pool::avg_backward(isa, &g, &dy, dx);
        });
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

/// The mean over each whole image: a tensor `[n, channels]`.
pub fn global_avg_pool(x: &FeatureMap) -> Result<Tensor> {
    let [n, h, w, c] = x.dims()?;
    let window = Window { kernel: [h, w], stride: [1, 1], padding: [0, 0] };
    match x {
        FeatureMap::Composed(x) => Ok(x.mean((1, 2))?),
        x => Ok(avg_pool2d(x, &window)?.leave()?.reshape((n, c))?),
    }
}

/// The largest element of each whole image: a tensor `[n, channels]`.
pub fn global_max_pool(x: &FeatureMap) -> Result<Tensor> {
    let [n, h, w, c] = x.dims()?;
    let window = Window { kernel: [h, w], stride: [1, 1], padding: [0, 0] };
    Ok(max_pool2d(x, &window)?.leave()?.reshape((n, c))?)
}

/// The pixels that are number (dy, dx) of their windows, one for each window. What lies outside the image is the pixel of
/// the image nearest to it, which is in the same window.
fn tap(x: &Tensor, g: &Geometry, dy: usize, dx: usize) -> candle_core::Result<Tensor> {
    let along = |outputs: usize, axis: usize, offset: usize, size: usize| {
        let at = |o: usize| (o * g.stride[axis] + offset).saturating_sub(g.pad[axis]).min(size - 1) as u32;
        Tensor::from_iter((0..outputs).map(at), x.device())
    };
    x.index_select(&along(g.oh(), 0, dy, g.h)?, 1)?.index_select(&along(g.ow(), 1, dx, g.w)?, 2)
}

fn taps(g: &Geometry) -> impl Iterator<Item = (usize, usize)> + use<> {
    let [kh, kw] = g.kernel;
    (0..kh).flat_map(move |dy| (0..kw).map(move |dx| (dy, dx)))
}

/// The maximum as our kernel takes it: the first of equals, NaN wins.
fn composed_max(x: &Tensor, g: &Geometry) -> Result<FeatureMap> {
    let x = x.contiguous()?;
    let mut largest = tap(&x, g, 0, 0)?;
    for (dy, dx) in taps(g).skip(1) {
        let next = tap(&x, g, dy, dx)?;
        let larger = next.gt(&largest)?.where_cond(&next, &largest)?;
        largest = next.ne(&next)?.where_cond(&next, &larger)?;
    }
    Ok(FeatureMap::Composed(largest))
}

fn composed_average(x: &Tensor, g: &Geometry) -> Result<FeatureMap> {
    let padded =
        x.pad_with_zeros(1, g.pad[0], g.pad[0])?.pad_with_zeros(2, g.pad[1], g.pad[1])?.contiguous()?;
    let inner = Geometry { h: g.h + 2 * g.pad[0], w: g.w + 2 * g.pad[1], pad: [0, 0], ..*g };
    let mut sum = tap(&padded, &inner, 0, 0)?;
    for (dy, dx) in taps(g).skip(1) {
        sum = (sum + tap(&padded, &inner, dy, dx)?)?;
    }
    Ok(FeatureMap::Composed((sum * (1.0 / g.taps() as f64))?))
}
