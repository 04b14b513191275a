//! Convolution by im2col and the `gemm` crate, which chooses its kernels by CPU: for any element type and CPU.
use super::conv::Geometry;
use super::gemm::{Mat, gemm};
use super::{Buf, Isa, Real, Shared};
use rayon::prelude::*;

/// Bytes of the column matrix of one chunk of images: it stays in the last-level cache.
const COLUMN_BYTES: usize = 8 << 20;

/// Images per chunk, and elements of an image's column matrix for one group.
fn chunk<T>(g: &Geometry) -> (usize, usize) {
    let per_image = g.oh() * g.ow() * g.taps() * g.cig();
    ((COLUMN_BYTES / (per_image * size_of::<T>()).max(1)).clamp(1, g.n), per_image)
}

/// Calls `f` with (output pixel, tap, input pixel if it is inside) for one image.
fn visit(g: &Geometry, mut f: impl FnMut(usize, usize, Option<usize>)) {
    let [kh, kw] = g.kernel;
    for oy in 0..g.oh() {
        for ox in 0..g.ow() {
            for a in 0..kh {
                for b in 0..kw {
                    let iy = (oy * g.stride[0] + a).wrapping_sub(g.pad[0]);
                    let ix = (ox * g.stride[1] + b).wrapping_sub(g.pad[1]);
                    let inside = iy < g.h && ix < g.w;
                    f(oy * g.ow() + ox, a * kw + b, inside.then(|| iy * g.w + ix));
                }
            }
        }
    }
}

/// Rows of output pixels, columns (tap, channel) of `group`.
fn im2col<T: Real>(g: &Geometry, x: &[T], group: usize, col: &mut [T]) {
    let (k, per_image) = (g.cig(), g.oh() * g.ow() * g.taps() * g.cig());
    let images = x.par_chunks_exact(g.h * g.w * g.ci);
    col.par_chunks_exact_mut(per_image).zip(images).for_each(|(col, x)| {
        visit(g, |pixel, tap, source| {
            let to = &mut col[(pixel * g.taps() + tap) * k..][..k];
            match source {
                Some(q) => to.copy_from_slice(&x[q * g.ci + group * k..][..k]),
                None => to.fill(T::ZERO),
            }
        });
    });
}

/// The weights of `group` as `[taps × in, out]`.
fn columns_of_weights<T: Real>(g: &Geometry, w: &[T], group: usize, out: &mut [T]) {
    let (k, n, taps) = (g.cig(), g.cog(), g.taps());
    for o in 0..n {
        for i in 0..k {
            for tap in 0..taps {
                out[(tap * k + i) * n + o] = w[((group * n + o) * k + i) * taps + tap];
            }
        }
    }
}

pub fn forward<T: Real>(g: &Geometry, x: &[T], w: &[T], y: &mut [T], add: bool) {
    let (images, per_image) = chunk::<T>(g);
    let (pixels, kk, n) = (g.oh() * g.ow(), g.taps() * g.cig(), g.cog());
    let mut wt = Buf::dirty(kk * n);
    let mut col = Buf::dirty(images * per_image);
    for group in 0..g.groups {
        columns_of_weights(g, w, group, &mut wt);
        let xs = x.chunks(images * g.h * g.w * g.ci);
        for (x, y) in xs.zip(y.chunks_mut(images * pixels * g.co)) {
            let rows = y.len() / g.co;
            im2col(g, x, group, &mut col[..rows * kk]);
            let (a, b) = (Mat::new(&col, rows, kk), Mat::new(&wt, kk, n));
            gemm(Isa::PORTABLE, a, b, &mut y[group * n..], g.co, add);
        }
    }
}

pub fn grad_weight<T: Real>(g: &Geometry, x: &[T], dy: &[T], dw: &mut [T]) {
    let (images, per_image) = chunk::<T>(g);
    let (pixels, k, taps, n) = (g.oh() * g.ow(), g.cig(), g.taps(), g.cog());
    let kk = taps * k;
    let mut dwt = Buf::dirty(kk * n);
    let mut col = Buf::dirty(images * per_image);
    for group in 0..g.groups {
        let xs = x.chunks(images * g.h * g.w * g.ci);
        for (i, (x, dy)) in xs.zip(dy.chunks(images * pixels * g.co)).enumerate() {
            let rows = dy.len() / g.co;
            im2col(g, x, group, &mut col[..rows * kk]);
            let b = Mat::strided(&dy[group * n..], rows, n, g.co);
            gemm(Isa::PORTABLE, Mat::new(&col, rows, kk).t(), b, &mut dwt, n, i > 0);
        }
        for o in 0..n {
            for i in 0..k {
                for tap in 0..taps {
                    dw[((group * n + o) * k + i) * taps + tap] = dwt[(tap * k + i) * n + o];
                }
            }
        }
    }
}

pub fn grad_input<T: Real>(g: &Geometry, dy: &[T], w: &[T], dx: &mut [T], add: bool) {
    let (images, per_image) = chunk::<T>(g);
    let (pixels, k, n) = (g.oh() * g.ow(), g.cig(), g.cog());
    let kk = g.taps() * k;
    if !add {
        dx.fill(T::ZERO);
    }
    let mut wt = Buf::dirty(kk * n);
    let mut col = Buf::dirty(images * per_image);
    for group in 0..g.groups {
        columns_of_weights(g, w, group, &mut wt);
        let dys = dy.chunks(images * pixels * g.co);
        for (dy, dx) in dys.zip(dx.chunks_mut(images * g.h * g.w * g.ci)) {
            let rows = dy.len() / g.co;
            let a = Mat::strided(&dy[group * n..], rows, n, g.co);
            gemm(Isa::PORTABLE, a, Mat::new(&wt, kk, n).t(), &mut col[..rows * kk], kk, false);
            let out = Shared::new(dx);
            (0..rows / pixels).into_par_iter().for_each(|image| {
                let len = g.h * g.w * g.ci;
                // SAFETY: every task has an image of its own.
                let dx = unsafe { out.slice(image * len, len) };
                visit(g, |pixel, tap, target| {
                    if let Some(q) = target {
                        let from = &col[image * per_image + pixel * kk + tap * k..][..k];
                        for (d, v) in dx[q * g.ci + group * k..][..k].iter_mut().zip(from) {
                            *d += *v;
                        }
                    }
                });
            });
        }
    }
}
