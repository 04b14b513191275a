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

/// The largest element of each window, and which input pixel of its image it is (the first of equals; NaN wins).
pub fn max_forward<T: Real>(isa: Isa, g: &Geometry, x: &[T], y: &mut [T], at: &mut [u32]) {
    /// Takes over what is larger, or all that is `first`.
    #[inline(always)]
    fn raise<T: Real>(x: &[T], q: u32, first: bool, y: &mut [T], at: &mut [u32]) {
        for ((y, at), x) in y.iter_mut().zip(at).zip(x) {
            let is_nan = x.partial_cmp(x).is_none();
            let take = first || *x > *y || is_nan;
            *y = if take { *x } else { *y };
            *at = if take { q } else { *at };
        }
    }
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let images = y.par_chunks_exact_mut(pixels * c).zip(at.par_chunks_exact_mut(pixels * c));
    images.zip(x.par_chunks_exact(g.h * g.w * c)).for_each(|((y, at), x)| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (p, (y, at)) in y.chunks_exact_mut(c).zip(at.chunks_exact_mut(c)).enumerate() {
                    for (i, q) in window(g, p).enumerate() {
                        raise(&x[q * c..][..c], q as u32, i == 0, y, at);
                    }
                }
            },
        );
    });
}

/// dx += dy at the maxima.
pub fn max_backward<T: Real>(g: &Geometry, dy: &[T], at: &[u32], dx: &mut [T]) {
    let (c, pixels) = (g.ci, g.oh() * g.ow());
    let outputs = dy.par_chunks_exact(pixels * c).zip(at.par_chunks_exact(pixels * c));
    dx.par_chunks_exact_mut(g.h * g.w * c).zip(outputs).for_each(|(dx, (dy, at))| {
        for (dy, at) in dy.chunks_exact(c).zip(at.chunks_exact(c)) {
            for (channel, (d, q)) in dy.iter().zip(at).enumerate() {
                dx[*q as usize * c + channel] += *d;
            }
        }
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

    /// All results of both kinds of pooling, as f64.
    fn run(isa: Isa) -> Vec<f64> {
        let g = Geometry {
            n: 5,
            h: 9,
            w: 7,
            ci: 19,
            co: 19,
            kernel: [3, 2],
            stride: [2, 1],
            pad: [1, 0],
            groups: 1,
        };
        let numbers = |n: usize, salt: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 7919 + salt * 104_729) % 211) as f32 / 105.5 - 1.0).collect()
        };
        let (mut x, dy) = (numbers(g.x_len(), 1), numbers(g.y_len(), 2));
        x[40] = f32::NAN;
        let (mut largest, mut mean, mut at) =
            (vec![9.0; g.y_len()], vec![9.0; g.y_len()], vec![0; g.y_len()]);
        max_forward(isa, &g, &x, &mut largest, &mut at);
        avg_forward(isa, &g, &x, &mut mean);
        let (mut of_largest, mut of_mean) = (numbers(g.x_len(), 3), numbers(g.x_len(), 4));
        max_backward(&g, &dy, &at, &mut of_largest);
        avg_backward(isa, &g, &dy, &mut of_mean);
        assert!(largest.iter().filter(|v| v.is_nan()).count() >= 2, "NaN wins");
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
