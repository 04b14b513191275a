//! Pooling over windows of `[n, h, w, channels]`.
use super::{Real, conv::Geometry};
use rayon::prelude::*;

/// The input pixels of the window of output pixel (oy, ox), in row-major order; padding is left out.
fn window(g: &Geometry, oy: usize, ox: usize) -> impl Iterator<Item = usize> + Clone + use<> {
    let range = |o: usize, axis: usize, size: usize| {
        let start = o * g.stride[axis];
        start.saturating_sub(g.pad[axis])..(start + g.kernel[axis]).saturating_sub(g.pad[axis]).min(size)
    };
    let (rows, columns, w) = (range(oy, 0, g.h), range(ox, 1, g.w), g.w);
    rows.flat_map(move |y| columns.clone().map(move |x| y * w + x))
}

/// The largest element of each window, and which input pixel of its image it is (the first of equals; NaN wins).
pub fn max_forward<T: Real>(g: &Geometry, x: &[T], y: &mut [T], at: &mut [u32]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let images = y.par_chunks_exact_mut(pixels * c).zip(at.par_chunks_exact_mut(pixels * c));
    images.zip(x.par_chunks_exact(g.h * g.w * c)).for_each(|((y, at), x)| {
        let outputs = y.chunks_exact_mut(c).zip(at.chunks_exact_mut(c)).enumerate();
        for (p, (y, at)) in outputs {
            let mut first = true;
            for q in window(g, p / g.ow(), p % g.ow()) {
                for ((y, at), x) in y.iter_mut().zip(&mut *at).zip(&x[q * c..][..c]) {
                    let is_nan = x.partial_cmp(x).is_none();
                    if first || *x > *y || is_nan {
                        (*y, *at) = (*x, q as u32);
                    }
                }
                first = false;
            }
        }
    });
}

/// dx += dy at the maxima.
pub fn max_backward<T: Real>(g: &Geometry, dy: &[T], at: &[u32], dx: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let outputs = dy.par_chunks_exact(pixels * c).zip(at.par_chunks_exact(pixels * c));
    dx.par_chunks_exact_mut(g.h * g.w * c).zip(outputs).for_each(|(dx, (dy, at))| {
        for (i, (d, q)) in dy.iter().zip(at).enumerate() {
            dx[*q as usize * c + i % c] += *d;
        }
    });
}

/// The mean of each window; padding counts as zeros.
pub fn avg_forward<T: Real>(g: &Geometry, x: &[T], y: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let weight = T::from_f64(1.0 / g.taps() as f64);
    y.par_chunks_exact_mut(pixels * c).zip(x.par_chunks_exact(g.h * g.w * c)).for_each(|(y, x)| {
        for (p, y) in y.chunks_exact_mut(c).enumerate() {
            y.fill(T::ZERO);
            for q in window(g, p / g.ow(), p % g.ow()) {
                for (y, x) in y.iter_mut().zip(&x[q * c..][..c]) {
                    *y += *x;
                }
            }
            for y in y {
                *y = *y * weight;
            }
        }
    });
}

/// dx += the share of dy of each pixel.
pub fn avg_backward<T: Real>(g: &Geometry, dy: &[T], dx: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let weight = T::from_f64(1.0 / g.taps() as f64);
    dx.par_chunks_exact_mut(g.h * g.w * c).zip(dy.par_chunks_exact(pixels * c)).for_each(|(dx, dy)| {
        for (p, dy) in dy.chunks_exact(c).enumerate() {
            for q in window(g, p / g.ow(), p % g.ow()) {
                for (dx, dy) in dx[q * c..][..c].iter_mut().zip(dy) {
                    *dx += *dy * weight;
                }
            }
        }
    });
}
