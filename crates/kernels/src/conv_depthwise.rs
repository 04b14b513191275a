//! Depthwise convolution, every channel by itself: there is nothing to multiply as matrices, so vectors run over channels.
use super::conv::{Geometry, Pass};
use super::conv_direct::{TASKS, add_parts};
use super::simd::{Into, Simd, write};
use super::{Buf, Shared, par};

/// For every position of the target along one axis, the taps through which it sees the source, and where.
fn seen(g: &Geometry, pass: Pass, axis: usize) -> Vec<Vec<(usize, usize)>> {
    let (size, out) = [(g.h, g.oh()), (g.w, g.ow())][axis];
    let (mut forward, mut backward) = (vec![Vec::new(); out], vec![Vec::new(); size]);
    for (o, forward) in forward.iter_mut().enumerate() {
        for tap in 0..g.kernel[axis] {
            let i = (o * g.stride[axis] + tap).wrapping_sub(g.pad[axis]);
            if i < size {
                forward.push((tap, i));
                backward[i].push((tap, o));
            }
        }
    }
    if pass == Pass::Forward { forward } else { backward }
}

/// The first `n` lanes.
///
/// # Safety
/// They are valid.
#[inline(always)]
unsafe fn load<S: Simd>(s: S, from: *const f32, n: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if n >= S::LANES { s.load(from) } else { s.load_part(from, n) } }
}

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
pub fn conv<S: Simd>(s: S, g: &Geometry, pass: Pass, (x, w): (&[f32], &[f32]), y: &mut [f32], add: bool) {
    let (channels, taps, into) = (g.ci, g.taps(), if add { Into::Add } else { Into::Set });
    let (rows, columns) = (seen(g, pass, 0), seen(g, pass, 1));
    let (h, width) = if pass == Pass::Forward { (g.h, g.w) } else { (g.oh(), g.ow()) };
    let mut turned = Buf::<f32>::dirty(w.len());
    for (i, w) in w.iter().enumerate() {
        turned[i % taps * channels + i / taps] = *w;
    }
    let (w, y) = (&*turned, Shared::new(y));
    par(g.n * rows.len(), |task| {
        let (image, row) = (task / rows.len(), &rows[task % rows.len()]);
        s.run(
            #[inline(always)]
            || {
                for (q, column) in columns.iter().enumerate() {
                    for c in (0..channels).step_by(S::LANES) {
                        let n = channels - c;
                        let mut sum = s.zero();
                        // SAFETY: pixels and taps that exist, and the channels that are left; a task has a row of its own.
                        unsafe {
                            for (a, sy) in row {
                                for (b, sx) in column {
                                    let at = ((image * h + sy) * width + sx) * channels + c;
                                    let tap = w.as_ptr().add((a * g.kernel[1] + b) * channels + c);
                                    sum = s.fma(load(s, x.as_ptr().add(at), n), load(s, tap, n), sum);
                                }
                            }
                            let to = y.at((task * columns.len() + q) * channels + c);
                            write(s, to, n.min(S::LANES), sum, into);
                        }
                    }
                }
            },
        )
    });
}

/// dw = the gradient of the weights.
pub fn grad_weight<S: Simd>(s: S, g: &Geometry, (x, dy): (&[f32], &[f32]), dw: &mut [f32]) {
    let (channels, taps, oh, ow) = (g.ci, g.taps(), g.oh(), g.ow());
    let rows = seen(g, Pass::Forward, 0);
    // Output rows are cut into a number of parts that depends on the shape alone.
    let per_part = (g.n * oh).div_ceil(TASKS);
    let parts = (g.n * oh).div_ceil(per_part);
    let mut sums = Buf::<f32>::dirty(parts * taps * channels);
    let out = Shared::new(&mut sums);
    par(parts, |part| {
        // SAFETY: a task has a part of its own.
        let sums = unsafe { out.slice(part * taps * channels, taps * channels) };
        sums.fill(0.0);
        s.run(
            #[inline(always)]
            || {
                for r in part * per_part..(g.n * oh).min((part + 1) * per_part) {
                    for (a, iy) in &rows[r % oh] {
                        for b in 0..g.kernel[1] {
                            // Output columns whose input column ox stride + b - pad lies inside.
                            let ox0 = g.pad[1].saturating_sub(b).div_ceil(g.stride[1]);
                            let ox1 = (g.w + g.pad[1]).saturating_sub(b).div_ceil(g.stride[1]).min(ow);
                            if ox0 >= ox1 {
                                continue;
                            }
                            let ix = ox0 * g.stride[1] + b - g.pad[1];
                            let x = &x[((r / oh * g.h + iy) * g.w + ix) * channels..];
                            let dy = &dy[(r * ow + ox0) * channels..];
                            let sums = &mut sums[(a * g.kernel[1] + b) * channels..];
                            for c in (0..channels).step_by(S::LANES) {
                                let n = channels - c;
                                let mut sum = s.zero();
                                // SAFETY: pixels inside both images and the channels that are left.
                                unsafe {
                                    for i in 0..ox1 - ox0 {
                                        let x = x.as_ptr().add(i * g.stride[1] * channels + c);
                                        let dy = dy.as_ptr().add(i * channels + c);
                                        sum = s.fma(load(s, x, n), load(s, dy, n), sum);
                                    }
                                    write(s, sums.as_mut_ptr().add(c), n.min(S::LANES), sum, Into::Add);
                                }
                            }
                        }
                    }
                }
            },
        )
    });
    add_parts(&mut sums, taps * channels);
    for (i, dw) in dw.iter_mut().enumerate() {
        *dw = sums[i % taps * channels + i / taps];
    }
}
