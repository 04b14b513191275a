//! Direct convolution for any kernel, stride, padding and grouping.
//!
//! Forward and input gradient are one gemm whose rows of A are found through a table of pointers: output pixel
//! and tap give the input pixel to read, or a row of zeros outside the image. No column matrix, no padded copy.
//! The weight gradient sums outer products over runs of pixels that a tap sees without leaving the image.
use super::conv::Geometry;
use super::simd::{Into, Simd, panels_of_transposed, tile_rows, tiles, write};
use super::{Buf, Shared, add_assign, par};
use rayon::prelude::*;

/// Pixels that one task computes: 16 register tiles.
const PIXELS: usize = 96;
/// Products summed in registers before they are added to the result: their rows of B stay in the L1 or L2 cache.
const TERMS: usize = 256;

/// A tile of `MR` pixels and `NV` vectors of channels: c_i (+)= Σ_t a_{t,i} B_t over `taps` rows of `k` terms. Of the last
/// vector `columns` channels count.
///
/// # Safety
/// `a[t * PIXELS + i]` points at `k0 + k` floats, `b[t]` at as many rows of a panel, `c[i]` at `column` and the tile's floats.
#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    (taps, k, k0): (usize, usize, usize),
    a: *const *const f32,
    b: *const *const f32,
    (c, column): (*const *mut f32, usize),
    into: Into,
    columns: usize,
) {
    // SAFETY: the caller's promise covers every address formed here. B's panels are padded to whole vectors.
    unsafe {
        let mut acc = [[s.zero(); NV]; MR];
        for t in 0..taps {
            let mut rows = [std::ptr::null(); MR];
            for i in 0..MR {
                rows[i] = (*a.add(t * PIXELS + i)).add(k0);
            }
            let mut bp = (*b.add(t)).add(k0 * S::PANEL);
            for p in 0..k {
                let mut bv = [s.zero(); NV];
                for j in 0..NV {
                    bv[j] = s.load(bp.add(S::LANES * j));
                }
                for i in 0..MR {
                    let av = s.splat(*rows[i].add(p));
                    for j in 0..NV {
                        acc[i][j] = s.fma(av, bv[j], acc[i][j]);
                    }
                }
                bp = bp.add(S::PANEL);
            }
        }
        for i in 0..MR {
            for j in 0..NV {
                let n = if j + 1 < NV { S::LANES } else { columns };
                write(s, (*c.add(i)).add(column + S::LANES * j), n, acc[i][j], into);
            }
        }
    }
}

/// The pointer tables of one block of pixels.
struct Block {
    a: Vec<*const f32>,
    b: Vec<*const f32>,
    c: Vec<*mut f32>,
}

impl Block {
    /// All tiles of the block: `n` output channels from `k` input channels through `taps` taps. The tables hold
    /// `taps × PIXELS`, `panels × taps` and up to `PIXELS` pointers.
    ///
    /// # Safety
    /// As [`tile`], for every pixel, tap and panel.
    unsafe fn multiply<S: Simd>(&self, s: S, (taps, k, n): (usize, usize, usize), add: bool) {
        s.run(
            #[inline(always)]
            || {
                // SAFETY: the caller's promise.
                unsafe { self.tiles(s, (taps, k, n), add) }
            },
        )
    }

    /// # Safety
    /// As [`Block::multiply`].
    #[inline(always)]
    unsafe fn tiles<S: Simd>(&self, s: S, (taps, k, n): (usize, usize, usize), add: bool) {
        // Either several whole taps or a part of one at a time.
        let (group, part) = if k >= TERMS { (1, TERMS) } else { ((TERMS / k).max(1), k) };
        for panel in 0..n.div_ceil(S::PANEL) {
            let column = panel * S::PANEL;
            let width = (n - column).min(S::PANEL);
            let nv = width.div_ceil(S::LANES);
            let columns = width - S::LANES * (nv - 1);
            for t in (0..taps).step_by(group) {
                for k0 in (0..k).step_by(part) {
                    let terms = (group.min(taps - t), part.min(k - k0), k0);
                    let into = if add || t > 0 || k0 > 0 { Into::Add } else { Into::Set };
                    let mut i = 0;
                    while i < self.c.len() {
                        let mr = tile_rows(self.c.len() - i);
                        // SAFETY: the caller's promise.
                        unsafe {
                            let a = self.a.as_ptr().add(t * PIXELS + i);
                            let b = self.b.as_ptr().add(panel * taps + t);
                            let c = (self.c.as_ptr().add(i), column);
                            tiles!(tile::<S>(mr, nv)(s, terms, a, b, c, into, columns));
                        }
                        i += mr;
                    }
                }
            }
        }
    }
}

/// The weights as right-hand matrices: `[group][panel][tap][row][column]`, padded with zeros. Rows are
/// input and columns output channels of the forward pass, or the reverse.
fn pack<S: Simd>(s: S, g: &Geometry, w: &[f32], transposed: bool) -> Buf<f32> {
    let (ci, co, taps) = (g.cig(), g.cog(), g.taps());
    let (k, n) = if transposed { (co, ci) } else { (ci, co) };
    if taps == 1 && g.groups == 1 && !transposed {
        return panels_of_transposed(s, (n, k), (w, k));
    }
    let panels = n.div_ceil(S::PANEL);
    let mut packed = Buf::dirty(g.groups * panels * taps * k * S::PANEL);
    packed.par_chunks_exact_mut(taps * k * S::PANEL).enumerate().for_each(|(task, out)| {
        let (group, n0) = (task / panels, task % panels * S::PANEL);
        let width = (n - n0).min(S::PANEL);
        let w = &w[group * co * ci * taps..];
        for row in 0..k {
            for tap in 0..taps {
                let out = &mut out[(tap * k + row) * S::PANEL..][..S::PANEL];
                for (j, out) in out[..width].iter_mut().enumerate() {
                    let (o, i) = if transposed { (row, n0 + j) } else { (n0 + j, row) };
                    *out = w[(o * ci + i) * taps + tap];
                }
                out[width..].fill(0.0);
            }
        }
    });
    packed
}

pub fn forward<S: Simd>(s: S, g: &Geometry, (x, w): (&[f32], &[f32]), y: &mut [f32], add: bool) {
    let (k, n, taps, [kh, kw]) = (g.cig(), g.cog(), g.taps(), g.kernel);
    let packed = pack(s, g, w, false);
    let zeros = Buf::<f32>::zeros(k);
    let (oh, ow) = (g.oh(), g.ow());
    let pixels = g.n * oh * ow;
    let blocks = pixels.div_ceil(PIXELS);
    let y = Shared::new(y);
    let panels = n.div_ceil(S::PANEL);
    par(blocks * g.groups, |task| {
        let (group, p0) = (task / blocks, task % blocks * PIXELS);
        let p1 = pixels.min(p0 + PIXELS);
        let mut block =
            Block { a: vec![zeros.as_ptr(); taps * PIXELS], b: Vec::new(), c: Vec::with_capacity(PIXELS) };
        for p in p0..p1 {
            let (image, oy, ox) = (p / (oh * ow), p / ow % oh, p % ow);
            for a in 0..kh {
                let iy = (oy * g.stride[0] + a).wrapping_sub(g.pad[0]);
                if iy >= g.h {
                    continue;
                }
                for b in 0..kw {
                    let ix = (ox * g.stride[1] + b).wrapping_sub(g.pad[1]);
                    if ix < g.w {
                        let at = ((image * g.h + iy) * g.w + ix) * g.ci + group * k;
                        block.a[(a * kw + b) * PIXELS + p - p0] = x[at..].as_ptr();
                    }
                }
            }
            // SAFETY: pixel `p` of y.
            block.c.push(unsafe { y.at(p * g.co + group * n) });
        }
        let tap_of = |i: usize| packed[(group * panels * taps + i) * k * S::PANEL..].as_ptr();
        block.b.extend((0..panels * taps).map(tap_of));
        // SAFETY: tasks have pixels or groups of their own.
        unsafe { block.multiply(s, (taps, k, n), add) };
    });
}

/// For one axis: the taps that reach input positions of residue `r`, and the output position they come from
/// minus `position / stride`, as (tap, offset).
fn taps_of_residue(kernel: usize, stride: usize, pad: usize, r: usize) -> Vec<(usize, isize)> {
    // Position i = r + stride q sees output o through tap a when i + pad = o stride + a.
    (0..kernel)
        .filter(|a| (r + pad) % stride == a % stride)
        .map(|a| (a, (r as isize + pad as isize - a as isize).div_euclid(stride as isize)))
        .collect()
}

pub fn grad_input<S: Simd>(s: S, g: &Geometry, (dy, w): (&[f32], &[f32]), dx: &mut [f32], add: bool) {
    let (k, n, all, kw) = (g.cog(), g.cig(), g.taps(), g.kernel[1]);
    let packed = pack(s, g, w, true);
    let zeros = Buf::<f32>::zeros(k);
    let (oh, ow) = (g.oh(), g.ow());
    let panels = n.div_ceil(S::PANEL);
    let dx = Shared::new(dx);
    // Input positions of equal residue modulo the stride see the same taps: one gemm a residue class.
    for ry in 0..g.stride[0].min(g.h) {
        for rx in 0..g.stride[1].min(g.w) {
            let ys = taps_of_residue(g.kernel[0], g.stride[0], g.pad[0], ry);
            let xs = taps_of_residue(kw, g.stride[1], g.pad[1], rx);
            let taps = ys.len() * xs.len();
            let (rows, columns) = ((g.h - ry).div_ceil(g.stride[0]), (g.w - rx).div_ceil(g.stride[1]));
            let pixels = g.n * rows * columns;
            let blocks = pixels.div_ceil(PIXELS);
            par(blocks * g.groups, |task| {
                let (group, p0) = (task / blocks, task % blocks * PIXELS);
                let p1 = pixels.min(p0 + PIXELS);
                let mut block = Block {
                    a: vec![zeros.as_ptr(); taps * PIXELS],
                    b: Vec::new(),
                    c: Vec::with_capacity(PIXELS),
                };
                for p in p0..p1 {
                    let (image, qy, qx) = (p / (rows * columns), p / columns % rows, p % columns);
                    for (ty, (_, dy0)) in ys.iter().enumerate() {
                        let oy = (qy as isize + dy0) as usize;
                        if oy >= oh {
                            continue;
                        }
                        for (tx, (_, dx0)) in xs.iter().enumerate() {
                            let ox = (qx as isize + dx0) as usize;
                            if ox < ow {
                                let at = ((image * oh + oy) * ow + ox) * g.co + group * k;
                                block.a[(ty * xs.len() + tx) * PIXELS + p - p0] = dy[at..].as_ptr();
                            }
                        }
                    }
                    let (iy, ix) = (ry + qy * g.stride[0], rx + qx * g.stride[1]);
                    // SAFETY: pixel (iy, ix) of dx.
                    block.c.push(unsafe { dx.at(((image * g.h + iy) * g.w + ix) * g.ci + group * n) });
                }
                if taps == 0 {
                    if !add {
                        for c in &block.c {
                            // SAFETY: `n` channels of a pixel that only this task writes.
                            unsafe { c.write_bytes(0, n) };
                        }
                    }
                    return;
                }
                for panel in 0..panels {
                    for (a, _) in &ys {
                        for (b, _) in &xs {
                            let tap = a * kw + b;
                            let at = ((group * panels + panel) * all + tap) * k * S::PANEL;
                            block.b.push(packed[at..].as_ptr());
                        }
                    }
                }
                // SAFETY: tasks have pixels or groups of their own.
                unsafe { block.multiply(s, (taps, k, n), add) };
            });
        }
    }
}

/// A stretch of pixels of one output row that a tap sees inside the image.
#[derive(Clone, Copy)]
struct Run {
    a: *const f32,
    b: *const f32,
    len: usize,
}

/// c += Σ a_i b_j over the pixels of `runs`: `MR` rows, `NV` vectors. Of the last vector `columns` count.
///
/// # Safety
/// The pixels of a run hold `MR` floats at `a + row` and the columns at `b`, steps apart; `c` has room for whole vectors.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn outer<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    runs: &[Run],
    (row, a_step, b_step): (usize, usize, usize),
    (c, ldc): (*mut f32, usize),
    columns: usize,
) {
    // SAFETY: the caller's promise; `wrapping_add` because a pointer's last step may lie beyond the tensor.
    unsafe {
        let mut acc = [[s.zero(); NV]; MR];
        for run in runs {
            let (mut ap, mut bp) = (run.a.add(row), run.b);
            for _ in 0..run.len {
                let mut bv = [s.zero(); NV];
                for j in 0..NV {
                    let p = bp.add(S::LANES * j);
                    bv[j] =
                        if j + 1 < NV || columns == S::LANES { s.load(p) } else { s.load_part(p, columns) };
                }
                for i in 0..MR {
                    let av = s.splat(*ap.add(i));
                    for j in 0..NV {
                        acc[i][j] = s.fma(av, bv[j], acc[i][j]);
                    }
                }
                ap = ap.wrapping_add(a_step);
                bp = bp.wrapping_add(b_step);
            }
        }
        for i in 0..MR {
            for j in 0..NV {
                write(s, c.add(i * ldc + S::LANES * j), S::LANES, acc[i][j], Into::Add);
            }
        }
    }
}

/// Tasks that the weight gradient is cut into at least, whatever the number of threads.
const TASKS: usize = 32;

pub fn grad_weight<S: Simd>(s: S, g: &Geometry, (x, dy): (&[f32], &[f32]), dw: &mut [f32]) {
    let (ci, co, taps, [kh, kw]) = (g.cig(), g.cog(), g.taps(), g.kernel);
    // Vectors run over the side with more channels. A task owns a panel of them and all rows.
    let wide_out = co >= ci;
    let (rows, columns) = if wide_out { (ci, co) } else { (co, ci) };
    let panels = columns.div_ceil(S::PANEL);
    let tasks = g.groups * panels;
    // The batch is cut too, into a number of parts that depends on the shape alone.
    let parts = TASKS.div_ceil(tasks).clamp(1, g.n);
    let per_part = g.n.div_ceil(parts);
    let size = rows * S::PANEL;
    let (oh, ow) = (g.oh(), g.ow());
    // The panel of dy is the same for every tap, and that of x if there is one tap: then it is copied out of its
    // rows, whose strides of whole pages would make it miss every cache, and used for all rows and taps.
    let packed = wide_out || taps == 1;
    let mut sums = Buf::<f32>::zeros(parts * tasks * taps * size);
    sums.par_chunks_exact_mut(taps * size).with_max_len(1).enumerate().for_each(|(task, sums)| {
        let (part, task) = (task / tasks, task % tasks);
        let (group, column) = (task / panels, task % panels * S::PANEL);
        let width = S::PANEL.min(columns - column);
        let (x_from, dy_from) = match wide_out {
            true => (group * ci, group * co + column),
            false => (group * ci + column, group * co),
        };
        let output_rows = (part * per_part).min(g.n) * oh..((part + 1) * per_part).min(g.n) * oh;
        // As many output rows at a time as give about TERMS pixels.
        let step = (TERMS / ow).max(1);
        let mut runs = Vec::with_capacity(step);
        let mut panel = Buf::<f32>::dirty(if packed { step * ow * S::PANEL } else { 0 });
        for first in output_rows.clone().step_by(step) {
            let block = first..output_rows.end.min(first + step);
            if packed {
                let pixels = block.clone().flat_map(|r| (0..ow).map(move |ox| (r, ox)));
                for ((r, ox), to) in pixels.zip(panel.chunks_exact_mut(S::PANEL)) {
                    let from = match wide_out {
                        true => Some(&dy[(r * ow + ox) * g.co + dy_from..]),
                        false => {
                            let iy = (r % oh * g.stride[0]).wrapping_sub(g.pad[0]);
                            let ix = (ox * g.stride[1]).wrapping_sub(g.pad[1]);
                            let inside = iy < g.h && ix < g.w;
                            inside.then(|| &x[((r / oh * g.h + iy) * g.w + ix) * g.ci + x_from..])
                        }
                    };
                    if let Some(from) = from {
                        to[..width].copy_from_slice(&from[..width]);
                    }
                }
            }
            for a in 0..kh {
                for b in 0..kw {
                    // Output columns whose input column ox stride + b - pad lies inside.
                    let ox0 = g.pad[1].saturating_sub(b).div_ceil(g.stride[1]);
                    let ox1 = (g.w + g.pad[1]).saturating_sub(b).div_ceil(g.stride[1]).min(ow);
                    if ox0 >= ox1 {
                        continue;
                    }
                    runs.clear();
                    for r in block.clone() {
                        let (image, oy) = (r / oh, r % oh);
                        let iy = (oy * g.stride[0] + a).wrapping_sub(g.pad[0]);
                        if iy < g.h {
                            let ix = ox0 * g.stride[1] + b - g.pad[1];
                            let xp = x[((image * g.h + iy) * g.w + ix) * g.ci + x_from..].as_ptr();
                            let dyp = dy[(r * ow + ox0) * g.co + dy_from..].as_ptr();
                            let (a, b) = if wide_out { (xp, dyp) } else { (dyp, xp) };
                            let b = match packed {
                                true => panel[((r - first) * ow + ox0) * S::PANEL..].as_ptr(),
                                false => b,
                            };
                            runs.push(Run { a, b, len: ox1 - ox0 });
                        }
                    }
                    let to = sums[(a * kw + b) * size..].as_mut_ptr();
                    let (x_step, dy_step) = (g.stride[1] * g.ci, g.co);
                    let (a_step, b_step) = if wide_out { (x_step, dy_step) } else { (dy_step, x_step) };
                    let b_step = if packed { S::PANEL } else { b_step };
                    // SAFETY: the runs lie inside x, dy and the panel.
                    unsafe { outer_block(s, &runs, (a_step, b_step), to, (rows, width)) };
                }
            }
        }
    });
    let (first, rest) = sums.split_at_mut(tasks * taps * size);
    for part in rest.chunks_exact(tasks * taps * size) {
        add_assign(first, part);
    }
    let first = &*first;
    dw.par_chunks_exact_mut(ci * taps).enumerate().for_each(|(o, dw)| {
        let (group, o) = (o / co, o % co);
        for (i, dw) in dw.chunks_exact_mut(taps).enumerate() {
            let (r, c) = if wide_out { (i, o) } else { (o, i) };
            let task = group * panels + c / S::PANEL;
            for (tap, dw) in dw.iter_mut().enumerate() {
                *dw = first[(task * taps + tap) * size + r * S::PANEL + c % S::PANEL];
            }
        }
    });
}

/// [`outer`] over `rows` rows and one panel of columns; `c` has rows of a panel.
///
/// # Safety
/// As [`outer`].
unsafe fn outer_block<S: Simd>(
    s: S,
    runs: &[Run],
    (a_step, b_step): (usize, usize),
    c: *mut f32,
    (rows, columns): (usize, usize),
) {
    let nv = columns.div_ceil(S::LANES);
    let columns = columns - S::LANES * (nv - 1);
    s.run(
        #[inline(always)]
        || {
            let mut i = 0;
            while i < rows {
                let mr = tile_rows(rows - i);
                // SAFETY: the caller's promise.
                unsafe {
                    let to = (c.add(i * S::PANEL), S::PANEL);
                    tiles!(outer::<S>(mr, nv)(s, runs, (i, a_step, b_step), to, columns));
                }
                i += mr;
            }
        },
    )
}
