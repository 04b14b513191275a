//! Direct convolution for any kernel, stride, padding and grouping, with AVX-512.
//!
//! Forward and input gradient are one gemm whose rows of A are found through a table of pointers: output pixel
//! and tap give the input pixel to read, or a row of zeros outside the image. No column matrix, no padded copy.
//! The weight gradient sums outer products over runs of pixels that a tap sees without leaving the image.
use super::conv::Geometry;
use super::simd::{Avx512, Into, PANEL, lanes, panels_of_transposed};
use super::{Buf, Shared, add_assign, par};
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Pixels that one task computes: 16 register tiles.
const PIXELS: usize = 96;
/// Products summed in registers before they are added to the result: their 64 columns of B are 64 KB.
const TERMS: usize = 256;

/// A tile of `MR` pixels and `16 NV` channels: c_i (+)= Σ_t a_{t,i} B_t over `taps` rows of `k` terms.
///
/// # Safety
/// AVX-512F is there. `a[t * stride + i]` points at `k` floats, `b[t]` at `k` rows of 64, `c[i]` at `16 NV`
/// floats (the last vector only in the lanes of `mask`).
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn tile<const MR: usize, const NV: usize>(
    (taps, k): (usize, usize),
    (a, stride): (*const *const f32, usize),
    b: *const *const f32,
    k0: usize,
    c: *const *mut f32,
    column: usize,
    into: Into,
    mask: __mmask16,
) {
    // SAFETY: the caller's promise covers every address formed here. B's panels are padded to whole vectors.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NV]; MR];
        for t in 0..taps {
            let mut rows = [std::ptr::null(); MR];
            for i in 0..MR {
                rows[i] = (*a.add(t * stride + i)).add(k0);
            }
            let mut bp = (*b.add(t)).add(k0 * PANEL);
            for p in 0..k {
                let mut bv = [_mm512_setzero_ps(); NV];
                for j in 0..NV {
                    bv[j] = _mm512_loadu_ps(bp.add(16 * j));
                }
                for i in 0..MR {
                    let av = _mm512_set1_ps(*rows[i].add(p));
                    for j in 0..NV {
                        acc[i][j] = _mm512_fmadd_ps(av, bv[j], acc[i][j]);
                    }
                }
                bp = bp.add(PANEL);
            }
        }
        for i in 0..MR {
            for j in 0..NV {
                let cp = (*c.add(i)).add(column + 16 * j);
                let m = if j + 1 < NV { 0xffff } else { mask };
                let v = match into {
                    Into::Set => acc[i][j],
                    Into::Add => _mm512_add_ps(_mm512_maskz_loadu_ps(m, cp), acc[i][j]),
                };
                _mm512_mask_storeu_ps(cp, m, v);
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
    #[target_feature(enable = "avx512f")]
    unsafe fn multiply(&self, taps: usize, k: usize, n: usize, add: bool) {
        macro_rules! rows {
            ($mr:expr, $nv:literal, $($args:tt)*) => {
                match $mr {
                    1 => tile::<1, $nv>($($args)*),
                    2 => tile::<2, $nv>($($args)*),
                    3 => tile::<3, $nv>($($args)*),
                    4 => tile::<4, $nv>($($args)*),
                    5 => tile::<5, $nv>($($args)*),
                    _ => tile::<6, $nv>($($args)*),
                }
            };
        }
        // Either several whole taps or a part of one at a time.
        let (group, part) = if k >= TERMS { (1, TERMS) } else { ((TERMS / k).max(1), k) };
        for panel in 0..n.div_ceil(PANEL) {
            let column = panel * PANEL;
            let width = (n - column).min(PANEL);
            let nv = width.div_ceil(16);
            let mask = lanes(width - 16 * (nv - 1));
            for t in (0..taps).step_by(group) {
                for k0 in (0..k).step_by(part) {
                    let terms = (group.min(taps - t), part.min(k - k0));
                    let into = if add || t > 0 || k0 > 0 { Into::Add } else { Into::Set };
                    let mut i = 0;
                    while i < self.c.len() {
                        let mr = match self.c.len() - i {
                            left @ 0..=6 => left,
                            left @ 7..=11 => left.div_ceil(2),
                            _ => 6,
                        };
                        // SAFETY: the caller's promise.
                        unsafe {
                            let a = (self.a.as_ptr().add(t * PIXELS + i), PIXELS);
                            let b = self.b.as_ptr().add(panel * taps + t);
                            let c = self.c.as_ptr().add(i);
                            match nv {
                                4 => rows!(mr, 4, terms, a, b, k0, c, column, into, mask),
                                3 => rows!(mr, 3, terms, a, b, k0, c, column, into, mask),
                                2 => rows!(mr, 2, terms, a, b, k0, c, column, into, mask),
                                _ => rows!(mr, 1, terms, a, b, k0, c, column, into, mask),
                            }
                        }
                        i += mr;
                    }
                }
            }
        }
    }
}

/// The weights as right-hand matrices: `[group][panel of 64 columns][tap][row][64]`, padded with zeros. Rows are
/// input and columns output channels of the forward pass, or the reverse.
fn pack(proof: Avx512, g: &Geometry, w: &[f32], transposed: bool) -> Buf<f32> {
    let (ci, co, taps) = (g.cig(), g.cog(), g.taps());
    let (k, n) = if transposed { (co, ci) } else { (ci, co) };
    if taps == 1 && g.groups == 1 && !transposed {
        return panels_of_transposed(proof, (n, k), (w, k));
    }
    let panels = n.div_ceil(PANEL);
    let mut packed = Buf::dirty(g.groups * panels * taps * k * PANEL);
    packed.par_chunks_exact_mut(taps * k * PANEL).enumerate().for_each(|(task, out)| {
        let (group, n0) = (task / panels, task % panels * PANEL);
        let width = (n - n0).min(PANEL);
        let w = &w[group * co * ci * taps..];
        for row in 0..k {
            for tap in 0..taps {
                let out = &mut out[(tap * k + row) * PANEL..][..PANEL];
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

pub fn forward(proof: Avx512, g: &Geometry, x: &[f32], w: &[f32], y: &mut [f32], add: bool) {
    let (k, n, taps, [kh, kw]) = (g.cig(), g.cog(), g.taps(), g.kernel);
    let packed = pack(proof, g, w, false);
    let zeros = Buf::<f32>::zeros(k);
    let (oh, ow) = (g.oh(), g.ow());
    let pixels = g.n * oh * ow;
    let blocks = pixels.div_ceil(PIXELS);
    let y = Shared::new(y);
    let panels = n.div_ceil(PANEL);
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
        let tap_of = |i: usize| packed[(group * panels * taps + i) * k * PANEL..].as_ptr();
        block.b.extend((0..panels * taps).map(tap_of));
        // SAFETY: AVX-512F is proved; tasks have pixels or groups of their own.
        unsafe { block.multiply(taps, k, n, add) };
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

pub fn grad_input(proof: Avx512, g: &Geometry, dy: &[f32], w: &[f32], dx: &mut [f32], add: bool) {
    let (k, n, all, kw) = (g.cog(), g.cig(), g.taps(), g.kernel[1]);
    let packed = pack(proof, g, w, true);
    let zeros = Buf::<f32>::zeros(k);
    let (oh, ow) = (g.oh(), g.ow());
    let panels = n.div_ceil(PANEL);
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
                            let at = ((group * panels + panel) * all + tap) * k * PANEL;
                            block.b.push(packed[at..].as_ptr());
                        }
                    }
                }
                // SAFETY: AVX-512F is proved; tasks have pixels or groups of their own.
                unsafe { block.multiply(taps, k, n, add) };
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

/// c += Σ a_i b_j over the pixels of `runs`: `MR` rows, `16 NV` columns.
///
/// # Safety
/// AVX-512F is there; the pixels of a run hold `MR` floats at `a + row` and `16 NV` (the last vector only in the
/// lanes of `mask`) at `b`, steps apart; `c` has room.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn outer<const MR: usize, const NV: usize>(
    runs: &[Run],
    (row, a_step, b_step): (usize, usize, usize),
    (c, ldc): (*mut f32, usize),
    mask: __mmask16,
) {
    // SAFETY: the caller's promise; `wrapping_add` because a pointer's last step may lie beyond the tensor.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); NV]; MR];
        for run in runs {
            let (mut ap, mut bp) = (run.a.add(row), run.b);
            for _ in 0..run.len {
                let mut bv = [_mm512_setzero_ps(); NV];
                for j in 0..NV {
                    bv[j] = if j + 1 < NV {
                        _mm512_loadu_ps(bp.add(16 * j))
                    } else {
                        _mm512_maskz_loadu_ps(mask, bp.add(16 * j))
                    };
                }
                for i in 0..MR {
                    let av = _mm512_set1_ps(*ap.add(i));
                    for j in 0..NV {
                        acc[i][j] = _mm512_fmadd_ps(av, bv[j], acc[i][j]);
                    }
                }
                ap = ap.wrapping_add(a_step);
                bp = bp.wrapping_add(b_step);
            }
        }
        for i in 0..MR {
            for j in 0..NV {
                let cp = c.add(i * ldc + 16 * j);
                _mm512_storeu_ps(cp, _mm512_add_ps(_mm512_loadu_ps(cp), acc[i][j]));
            }
        }
    }
}

/// Tasks that the weight gradient is cut into at least, whatever the number of threads.
const TASKS: usize = 32;

pub fn grad_weight(_: Avx512, g: &Geometry, x: &[f32], dy: &[f32], dw: &mut [f32]) {
    let (ci, co, taps, [kh, kw]) = (g.cig(), g.cog(), g.taps(), g.kernel);
    // Vectors run over the side with more channels. A task owns a panel of 64 of them and all rows.
    let wide_out = co >= ci;
    let (rows, columns) = if wide_out { (ci, co) } else { (co, ci) };
    let panels = columns.div_ceil(PANEL);
    let tasks = g.groups * panels;
    // The batch is cut too, into a number of parts that depends on the shape alone.
    let parts = TASKS.div_ceil(tasks).clamp(1, g.n);
    let per_part = g.n.div_ceil(parts);
    let size = rows * PANEL;
    let (oh, ow) = (g.oh(), g.ow());
    // The panel of dy is the same for every tap, and that of x if there is one tap: then it is copied out of its
    // rows, whose strides of whole pages would make it miss every cache, and used for all rows and taps.
    let packed = wide_out || taps == 1;
    let mut sums = Buf::<f32>::zeros(parts * tasks * taps * size);
    sums.par_chunks_exact_mut(taps * size).with_max_len(1).enumerate().for_each(|(task, sums)| {
        let (part, task) = (task / tasks, task % tasks);
        let (group, column) = (task / panels, task % panels * PANEL);
        let width = PANEL.min(columns - column);
        let (x_from, dy_from) = match wide_out {
            true => (group * ci, group * co + column),
            false => (group * ci + column, group * co),
        };
        let output_rows = (part * per_part).min(g.n) * oh..((part + 1) * per_part).min(g.n) * oh;
        // As many output rows at a time as give about TERMS pixels.
        let step = (TERMS / ow).max(1);
        let mut runs = Vec::with_capacity(step);
        let mut panel = Buf::<f32>::dirty(if packed { step * ow * PANEL } else { 0 });
        for first in output_rows.clone().step_by(step) {
            let block = first..output_rows.end.min(first + step);
            if packed {
                let pixels = block.clone().flat_map(|r| (0..ow).map(move |ox| (r, ox)));
                for ((r, ox), to) in pixels.zip(panel.chunks_exact_mut(PANEL)) {
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
                                true => panel[((r - first) * ow + ox0) * PANEL..].as_ptr(),
                                false => b,
                            };
                            runs.push(Run { a, b, len: ox1 - ox0 });
                        }
                    }
                    let to = sums[(a * kw + b) * size..].as_mut_ptr();
                    let (x_step, dy_step) = (g.stride[1] * g.ci, g.co);
                    let (a_step, b_step) = if wide_out { (x_step, dy_step) } else { (dy_step, x_step) };
                    let b_step = if packed { PANEL } else { b_step };
                    // SAFETY: AVX-512F is proved; the runs lie inside x, dy and the panel.
                    unsafe { outer_block(&runs, (a_step, b_step), to, (rows, width)) };
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
            let task = group * panels + c / PANEL;
            for (tap, dw) in dw.iter_mut().enumerate() {
                *dw = first[(task * taps + tap) * size + r * PANEL + c % PANEL];
            }
        }
    });
}

/// [`outer`] over `rows` rows and one panel of columns; `c` has rows of [`PANEL`] floats.
///
/// # Safety
/// As [`outer`].
#[target_feature(enable = "avx512f")]
unsafe fn outer_block(
    runs: &[Run],
    (a_step, b_step): (usize, usize),
    c: *mut f32,
    (rows, columns): (usize, usize),
) {
    macro_rules! rows {
        ($mr:expr, $nv:literal, $($args:tt)*) => {
            match $mr {
                1 => outer::<1, $nv>($($args)*),
                2 => outer::<2, $nv>($($args)*),
                3 => outer::<3, $nv>($($args)*),
                4 => outer::<4, $nv>($($args)*),
                5 => outer::<5, $nv>($($args)*),
                _ => outer::<6, $nv>($($args)*),
            }
        };
    }
    let nv = columns.div_ceil(16);
    let mask = lanes(columns - 16 * (nv - 1));
    let mut i = 0;
    while i < rows {
        let mr = match rows - i {
            left @ 0..=6 => left,
            left @ 7..=11 => left.div_ceil(2),
            _ => 6,
        };
        // SAFETY: the caller's promise.
        unsafe {
            let to = (c.add(i * PANEL), PANEL);
            let steps = (i, a_step, b_step);
            match nv {
                4 => rows!(mr, 4, runs, steps, to, mask),
                3 => rows!(mr, 3, runs, steps, to, mask),
                2 => rows!(mr, 2, runs, steps, to, mask),
                _ => rows!(mr, 1, runs, steps, to, mask),
            }
        }
        i += mr;
    }
}
