//! Pooling over windows of `[n, h, w, channels]`.
use super::conv::Geometry;
use super::{Isa, Real, vectorize};
use rayon::prelude::*;

/// The input pixels of the window of output pixel `p`, in row-major order; padding is left out.
fn window(g: &Geometry, p: usize) -> impl Iterator<Item = usize> + Clone + use<> {
    let range = |o: usize, axis: usize, size: usize| {
        let start = o * g.stride[axis];
        start.saturating_sub(g.pad[axis])..(start + g.kernel[axis]).saturating_sub(g.pad[axis]).min(size)
    };
    let (rows, columns, w) = (range(p / g.ow(), 0, g.h), range(p % g.ow(), 1, g.w), g.w);
    rows.flat_map(move |y| columns.clone().map(move |x| y * w + x))
}

/// The number of a window's pixel, among those that are no padding: a byte where windows are small.
pub trait Tap: Copy + Default + PartialEq + Send + Sync + 'static {
    /// Numbers that there are.
    const COUNT: usize;
    /// Number `i`, which is below `COUNT`.
    fn of(i: u32) -> Self;
}

impl Tap for u8 {
    const COUNT: usize = 1 << 8;
    #[inline(always)]
    fn of(i: u32) -> Self {
        i as u8
    }
}

impl Tap for u32 {
    const COUNT: usize = 1 << 32;
    #[inline(always)]
    fn of(i: u32) -> Self {
        i
    }
}

/// The largest element of each window, and which of the window's pixels it is (the first of equals; NaN wins).
pub fn max_forward<T: Real, P: Tap>(isa: Isa, g: &Geometry, x: &[T], y: &mut [T], at: &mut [P]) {
    assert!(g.taps() <= P::COUNT);
    /// Takes over what is larger. Numbers of taps are as wide as f32 here: compilers take both with one mask.
    #[inline(always)]
    fn raise<T: Real>(x: &[T], tap: u32, y: &mut [T], taps: &mut [u32]) {
        for ((y, at), x) in y.iter_mut().zip(taps).zip(x) {
            let is_nan = x.partial_cmp(x).is_none();
            let take = *x > *y || is_nan;
            *y = if take { *x } else { *y };
            *at = if take { tap } else { *at };
        }
    }
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let images = y.par_chunks_exact_mut(pixels * c).zip(at.par_chunks_exact_mut(pixels * c));
    images.zip(x.par_chunks_exact(g.h * g.w * c)).for_each(|((y, at), x)| {
        let mut taps = vec![0u32; c];
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (p, (y, at)) in y.chunks_exact_mut(c).zip(at.chunks_exact_mut(c)).enumerate() {
                    for (i, q) in window(g, p).enumerate() {
                        let x = &x[q * c..][..c];
                        if i == 0 {
                            y.copy_from_slice(x);
                            taps.fill(0);
                        } else {
                            raise(x, i as u32, y, &mut taps);
                        }
                    }
                    at.iter_mut().zip(&taps).for_each(|(at, tap)| *at = P::of(*tap));
                }
            },
        );
    });
}

/// dx = dy at the maxima and zero elsewhere, or dx += that.
pub fn max_backward<T: Real, P: Tap>(
    isa: Isa,
    g: &Geometry,
    (dy, at): (&[T], &[P]),
    dx: &mut [T],
    add: bool,
) {
    /// What one pixel of a window gets.
    #[inline(always)]
    fn share<T: Real, P: Tap, const ADD: bool>(dy: &[T], at: &[P], tap: P, dx: &mut [T]) {
        for ((dx, dy), at) in dx.iter_mut().zip(dy).zip(at) {
            let (old, sum) = if ADD { (*dx, *dx + *dy) } else { (T::ZERO, *dy) };
            *dx = if *at == tap { sum } else { old };
        }
    }
    let (c, pixels, ow) = (g.ci, g.oh() * g.ow(), g.ow());
    // Windows that tile the image write every pixel once, but for what is left of it at its far sides.
    let tiles = !add && g.kernel == g.stride && g.pad == [0, 0];
    let outputs = dy.par_chunks_exact(pixels * c).zip(at.par_chunks_exact(pixels * c));
    dx.par_chunks_exact_mut(g.h * g.w * c).zip(outputs).for_each(|(dx, (dy, at))| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                if tiles {
                    let (rows, columns) = (g.oh() * g.kernel[0], ow * g.kernel[1]);
                    dx[rows * g.w * c..].fill(T::ZERO);
                    if columns < g.w {
                        let rows = dx[..rows * g.w * c].chunks_exact_mut(g.w * c);
                        rows.for_each(|row| row[columns * c..].fill(T::ZERO));
                    }
                } else if !add {
                    dx.fill(T::ZERO);
                }
                for (p, (dy, at)) in dy.chunks_exact(c).zip(at.chunks_exact(c)).enumerate() {
                    for (i, q) in window(g, p).enumerate() {
                        let dx = &mut dx[q * c..][..c];
                        match tiles {
                            true => share::<T, P, false>(dy, at, P::of(i as u32), dx),
                            false => share::<T, P, true>(dy, at, P::of(i as u32), dx),
                        }
                    }
                }
            },
        );
    });
}

/// a += b weight.
#[inline(always)]
fn add_scaled<T: Real>(a: &mut [T], b: &[T], weight: T) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += *b * weight;
    }
}

/// The mean of each window; padding counts as zeros.
pub fn avg_forward<T: Real>(isa: Isa, g: &Geometry, x: &[T], y: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let weight = T::from_f64(1.0 / g.taps() as f64);
    y.par_chunks_exact_mut(pixels * c).zip(x.par_chunks_exact(g.h * g.w * c)).for_each(|(y, x)| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (p, y) in y.chunks_exact_mut(c).enumerate() {
                    y.fill(T::ZERO);
                    window(g, p).for_each(|q| add_scaled(y, &x[q * c..][..c], T::ONE));
                    y.iter_mut().for_each(|y| *y = *y * weight);
                }
            },
        );
    });
}

/// dx += the share of dy of each pixel.
pub fn avg_backward<T: Real>(isa: Isa, g: &Geometry, dy: &[T], dx: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let weight = T::from_f64(1.0 / g.taps() as f64);
    dx.par_chunks_exact_mut(g.h * g.w * c).zip(dy.par_chunks_exact(pixels * c)).for_each(|(dx, dy)| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (p, dy) in dy.chunks_exact(c).enumerate() {
                    window(g, p).for_each(|q| add_scaled(&mut dx[q * c..][..c], dy, weight));
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows that overlap with padding, and windows that tile but for a row and a column.
    const SHAPES: [[[usize; 2]; 3]; 3] =
        [[[3, 2], [2, 1], [1, 0]], [[2, 2], [2, 2], [0, 0]], [[2, 3], [2, 3], [0, 0]]];

    /// All results of both kinds of pooling, as f64.
    fn run(isa: Isa) -> Vec<f64> {
        SHAPES.into_iter().flat_map(|shape| of_shape(isa, shape)).collect()
    }

    fn of_shape(isa: Isa, [kernel, stride, pad]: [[usize; 2]; 3]) -> Vec<f64> {
        let g = Geometry { n: 5, h: 9, w: 7, ci: 19, co: 19, kernel, stride, pad, groups: 1 };
        let numbers = |n: usize, salt: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 7919 + salt * 104_729) % 211) as f32 / 105.5 - 1.0).collect()
        };
        let (mut x, dy) = (numbers(g.x_len(), 1), numbers(g.y_len(), 2));
        x[40] = f32::NAN;
        let (mut largest, mut mean) = (vec![9.0; g.y_len()], vec![9.0; g.y_len()]);
        let (mut at, mut wide) = (vec![0u8; g.y_len()], vec![0u32; g.y_len()]);
        max_forward(isa, &g, &x, &mut largest, &mut wide);
        max_forward(isa, &g, &x, &mut largest, &mut at);
        assert!(at.iter().zip(&wide).all(|(at, wide)| u32::from(*at) == *wide));
        avg_forward(isa, &g, &x, &mut mean);
        let (mut of_largest, mut of_mean) = (numbers(g.x_len(), 3), numbers(g.x_len(), 4));
        max_backward(isa, &g, (&dy, &at), &mut of_largest, true);
        avg_backward(isa, &g, &dy, &mut of_mean);
        assert!(largest.iter().any(|v| v.is_nan()), "NaN wins");
        // Every pixel is written, and added to zeros it is the same.
        let (mut alone, mut added) = (vec![f32::NAN; g.x_len()], vec![0.0; g.x_len()]);
        max_backward(isa, &g, (&dy, &at), &mut alone, false);
        max_backward(isa, &g, (&dy, &at), &mut added, true);
        assert_eq!(alone, added);
        assert!(alone.iter().any(|d| *d != 0.0));
        [largest, mean, of_largest, of_mean].concat().into_iter().map(f64::from).collect()
    }

    #[test]
    fn any_instruction_set_and_number_of_threads_gives_the_same_bits() {
        let bits = |v: Vec<f64>| v.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        let portable = bits(run(Isa::PORTABLE));
        for isa in Isa::available() {
            assert!(bits(run(isa)) == portable, "{isa:?}");
            crate::threads::same_bits(|| run(isa));
        }
    }
}
