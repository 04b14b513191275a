//! Direct convolution for any kernel, stride, padding, grouping and element type.
//!
//! A task copies what its pixels see, tap by tap, into a block that stays in the L2 cache, and multiplies the block by the
//! weights; where every pixel sees itself alone there is nothing to copy. No column matrix, no padded image.
use super::conv::{Geometry, Pass};
use super::simd::{Into, Simd, sgemm};
use super::{Buf, Real, Shared, par};
use rayon::prelude::*;
use std::ops::Range;

/// Pixels that one task of the forward pass or the input gradient computes: 16 register tiles.
const PIXELS: usize = 96;
/// Terms of a sum in one product: the block of `PIXELS` rows of them stays in the L2 cache.
const TERMS: usize = 256;
/// Columns of a task, where columns are cut, and of a task of the weight gradient.
const COLUMNS: usize = 256;
/// Rows of a block of the weight gradient's left-hand side, how far apart its columns lie (a power of two would put them into
/// few sets of the L1 cache), and the blocks of a task.
const ROWS: usize = 128;
const STRIDE: usize = ROWS + 16;
const BLOCKS: usize = 2;
/// Tasks that a pass is cut into at least, if its shape permits, whatever the number of threads.
pub const TASKS: usize = 64;

/// What multiplies blocks: the vectors of a CPU, or [`Plain`] loops.
pub trait Product<T>: Copy + Send + Sync {
    /// Columns of a panel of B.
    const PANEL: usize;

    /// C (+)= A B on one thread; see [`sgemm`].
    ///
    /// # Safety
    /// The three matrices are valid for those strides, and C overlaps neither A nor B.
    unsafe fn multiply(
        self,
        sizes: (usize, usize, usize),
        a: (*const T, usize, usize),
        b: (*const T, usize, usize),
        c: (*mut T, usize),
        into: Into,
    );
}

impl<S: Simd> Product<f32> for S {
    const PANEL: usize = S::PANEL;

    unsafe fn multiply(
        self,
        sizes: (usize, usize, usize),
        a: (*const f32, usize, usize),
        b: (*const f32, usize, usize),
        c: (*mut f32, usize),
        into: Into,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match S::TERMS {
                1 => sgemm(self, sizes, a, b, c, into),
                _ => multiply_pairs(self, sizes, a, b, c, into),
            }
        }
    }
}

/// [`Product::multiply`] of operands in pairs of terms, made of each block: a block of A serves all columns, one of B all pixels.
///
/// # Safety
/// As there.
unsafe fn multiply_pairs<S: Simd>(
    s: S,
    (m, n, k): (usize, usize, usize),
    (a, rsa, csa): (*const f32, usize, usize),
    (b, ldb, panel): (*const f32, usize, usize),
    c: (*mut f32, usize),
    into: Into,
) {
    let pairs = k.div_ceil(2);
    let mut a_pairs = Buf::<f32>::dirty(m * pairs);
    let mut b_pairs = Buf::<f32>::dirty(n.div_ceil(S::PANEL) * pairs * S::PANEL);
    // SAFETY: the caller's promise, for each row of terms or of columns.
    let a_row = |at: usize, len: usize| unsafe { std::slice::from_raw_parts(a.add(at), len) };
    // SAFETY: as above.
    let b_row = |at: usize, len: usize| unsafe { std::slice::from_raw_parts(b.add(at), len) };
    s.run(
        #[inline(always)]
        || {
            if csa == 1 {
                for (i, to) in a_pairs.chunks_exact_mut(pairs.max(1)).enumerate() {
                    s.pair_terms(to, a_row(i * rsa, k));
                }
            } else {
                for (q, to) in a_pairs.chunks_exact_mut(m.max(1)).enumerate() {
                    let second = (2 * q + 1 < k).then(|| a_row((2 * q + 1) * csa, m));
                    s.pair_rows(to, a_row(2 * q * csa, m), second);
                }
            }
            for (j, to) in b_pairs.chunks_exact_mut((pairs * S::PANEL).max(1)).enumerate() {
                let width = S::PANEL.min(n - j * S::PANEL);
                for (q, to) in to.chunks_exact_mut(S::PANEL).enumerate() {
                    let row = |p: usize| b_row(j * panel + p * ldb, width);
                    s.pair_rows(&mut to[..width], row(2 * q), (2 * q + 1 < k).then(|| row(2 * q + 1)));
                }
            }
        },
    );
    let a = if csa == 1 { (a_pairs.as_ptr(), pairs, 1) } else { (a_pairs.as_ptr(), 1, m) };
    // SAFETY: the pairs lie in their buffers, C is the caller's.
    unsafe { sgemm(s, (m, n, pairs), a, (b_pairs.as_ptr(), S::PANEL, pairs * S::PANEL), c, into) }
}

/// Loops that the compiler vectorises: for f64, in which gradients are checked.
#[derive(Clone, Copy)]
pub struct Plain;

impl<T: Real> Product<T> for Plain {
    const PANEL: usize = 8;

    unsafe fn multiply(
        self,
        (m, n, k): (usize, usize, usize),
        (a, rsa, csa): (*const T, usize, usize),
        (b, ldb, panel): (*const T, usize, usize),
        (c, ldc): (*mut T, usize),
        into: Into,
    ) {
        for j in (0..n).step_by(8) {
            for i in 0..m {
                let mut sums = [T::ZERO; 8];
                for p in 0..k {
                    // SAFETY: the caller's promise; rows of B are padded to whole panels.
                    let (a, b) = unsafe {
                        (*a.add(i * rsa + p * csa), &*b.add(j / 8 * panel + p * ldb).cast::<[T; 8]>())
                    };
                    for (sum, b) in sums.iter_mut().zip(b) {
                        *sum += a * *b;
                    }
                }
                for (q, sum) in sums.into_iter().enumerate().take(n - j) {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let c = c.add(i * ldc + j + q);
                        *c = if into == Into::Add { *c + sum } else { sum };
                    }
                }
            }
        }
    }
}

/// Pixels of a target that all see their source through the same taps: `count` of them along each axis, whose nearest lies at
/// `first + step q` for pixel `q`.
struct Sight {
    /// Rows and columns of pixels in an image, and where they lie in the target: `origin + spacing q`.
    pixels: [usize; 2],
    origin: [usize; 2],
    spacing: [usize; 2],
    first: [isize; 2],
    step: [usize; 2],
    count: [usize; 2],
    /// Rows, columns and channels of the source, and the channels of a group.
    source: [usize; 3],
    k: usize,
    /// The taps in the weights, in the order in which they are seen.
    taps: Vec<usize>,
    /// Whether the source is the gradient of the output.
    backward: bool,
}

impl Sight {
    /// Output pixels and the inputs they see.
    fn forward(g: &Geometry) -> Self {
        Self {
            pixels: [g.oh(), g.ow()],
            origin: [0; 2],
            spacing: [1; 2],
            first: g.pad.map(|pad| -(pad as isize)),
            step: g.stride,
            count: g.kernel,
            source: [g.h, g.w, g.ci],
            k: g.cig(),
            taps: (0..g.taps()).collect(),
            backward: false,
        }
    }

    /// Input pixels and the outputs that saw them. Those of equal residue modulo the stride were seen through the same taps.
    fn backward(g: &Geometry, residue: [usize; 2]) -> Self {
        // Position i = r + stride q is seen by output o through tap a when i + pad = o stride + a: from the last tap
        // to the first, so that the outputs come in order.
        let taps = |axis: usize| -> Vec<usize> {
            let fits = |a: &usize| (residue[axis] + g.pad[axis]) % g.stride[axis] == a % g.stride[axis];
            (0..g.kernel[axis]).rev().filter(fits).collect()
        };
        let (rows, columns) = (taps(0), taps(1));
        let first = |axis: usize, taps: &[usize]| {
            let tap = taps.first().copied().unwrap_or(0) as isize;
            ((residue[axis] + g.pad[axis]) as isize - tap).div_euclid(g.stride[axis] as isize)
        };
        let extent = |axis: usize, size: usize| (size - residue[axis]).div_ceil(g.stride[axis]);
        Self {
            pixels: [extent(0, g.h), extent(1, g.w)],
            origin: residue,
            spacing: g.stride,
            first: [first(0, &rows), first(1, &columns)],
            step: [1; 2],
            count: [rows.len(), columns.len()],
            source: [g.oh(), g.ow(), g.co],
            k: g.cog(),
            taps: rows.iter().flat_map(|a| columns.iter().map(move |b| a * g.kernel[1] + b)).collect(),
            backward: true,
        }
    }

    /// Terms of a pixel's sum.
    fn terms(&self) -> usize {
        self.taps.len() * self.k
    }

    /// Whether the rows of the product are the pixels of the source, as they lie.
    fn is_plain(&self) -> bool {
        let [h, w, _] = self.source;
        self.taps.len() == 1 && self.step == [1; 2] && self.first == [0; 2] && self.pixels == [h, w]
    }

    /// Image, row and column of pixel `p`.
    fn at(&self, p: usize) -> (usize, usize, usize) {
        let [rows, columns] = self.pixels;
        (p / (rows * columns), p / columns % rows, p % columns)
    }

    /// Copies `terms` of what `pixels` see into rows of `to`, `ld` apart. `channel` is the first of the group.
    fn gather<T: Real>(
        &self,
        (x, channel): (&[T], usize),
        pixels: Range<usize>,
        terms: Range<usize>,
        (to, ld): (&mut [T], usize),
    ) {
        let [h, w, c] = self.source;
        let width = self.count[1] * self.k;
        // The taps of a row lie side by side, unless the channels of other groups lie between them.
        let run = if self.k == c { width } else { self.k };
        let (mut image, mut qy, mut qx) = self.at(pixels.start);
        for to in to.chunks_mut(ld).take(pixels.len()) {
            let y0 = (self.step[0] * qy) as isize + self.first[0];
            let x0 = (self.step[1] * qx) as isize + self.first[1];
            let mut t = terms.start;
            while t < terms.end {
                // The run that term `t` lies in, and its end.
                let (row, column) = (t / width, t % width / run);
                let start = row * width + column * run;
                let end = terms.end.min(start + run);
                let y = y0 + row as isize;
                // Where term 0 would lie in the row of the source, which has w c elements.
                let from = (x0 + column as isize) * c as isize + channel as isize - start as isize;
                let inside = |at: isize| (at - from).clamp(t as isize, end as isize) as usize;
                let (lo, hi) = match y >= 0 && y < h as isize {
                    true => (inside(0), inside((w * c) as isize)),
                    false => (end, end),
                };
                let at = |t: usize| t - terms.start;
                if lo < hi {
                    let from = ((image * h + y as usize) * w * c) as isize + from + lo as isize;
                    to[at(lo)..at(hi)].copy_from_slice(&x[from as usize..][..hi - lo]);
                }
                if hi - lo < end - t {
                    to[at(t)..at(lo)].fill(T::ZERO);
                    to[at(hi)..at(end)].fill(T::ZERO);
                }
                t = end;
            }
            qx += 1;
            if qx == self.pixels[1] {
                (qx, qy) = (0, qy + 1);
            }
            if qy == self.pixels[0] {
                (qy, image) = (0, image + 1);
            }
        }
    }
}

/// The weights as right-hand matrices: `[group][panel][term][column]`, padded with zeros. Terms are input channels and columns
/// output channels of the forward pass, or the reverse.
fn pack<T: Real, P: Product<T>>(_: P, g: &Geometry, w: &[T], sight: &Sight) -> Buf<T> {
    let (ci, co, all, taps) = (g.cig(), g.cog(), g.taps(), &sight.taps);
    // Steps in the weights between terms of neighbouring channels and between columns.
    let (k, n, row, column) = match sight.backward {
        true => (co, ci, ci * all, all),
        false => (ci, co, all, ci * all),
    };
    let panels = n.div_ceil(P::PANEL);
    let mut packed = Buf::dirty(g.groups * panels * taps.len() * k * P::PANEL);
    let chunks = packed.par_chunks_exact_mut((taps.len() * k * P::PANEL).max(1));
    chunks.enumerate().for_each(|(task, out)| {
        let (group, n0) = (task / panels, task % panels * P::PANEL);
        let width = (n - n0).min(P::PANEL);
        for i in 0..k {
            let w = &w[group * co * ci * all + i * row + n0 * column..];
            for (t, tap) in taps.iter().enumerate() {
                let out = &mut out[(t * k + i) * P::PANEL..][..P::PANEL];
                for (out, w) in out[..width].iter_mut().zip(w[*tap..].iter().step_by(column)) {
                    *out = *w;
                }
                out[width..].fill(T::ZERO);
            }
        }
    });
    packed
}

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
pub fn conv<T: Real, P: Product<T>>(
    p: P,
    g: &Geometry,
    pass: Pass,
    (x, w): (&[T], &[T]),
    y: &mut [T],
    add: bool,
) {
    let sights = match pass {
        Pass::Forward => vec![Sight::forward(g)],
        Pass::GradInput => {
            let residues = |axis: usize, size: usize| 0..g.stride[axis].min(size);
            let row = |y: usize| residues(1, g.w).map(move |x| Sight::backward(g, [y, x]));
            residues(0, g.h).flat_map(row).collect()
        }
    };
    let ([h_out, w_out, c_out], n) = match pass {
        Pass::Forward => ([g.oh(), g.ow(), g.co], g.cog()),
        Pass::GradInput => ([g.h, g.w, g.ci], g.cig()),
    };
    let pixels = |sight: &Sight| g.n * sight.pixels[0] * sight.pixels[1];
    let packed: Vec<_> = sights.iter().map(|sight| pack(p, g, w, sight)).collect();
    let blocks: Vec<(usize, usize)> = (0..sights.len())
        .flat_map(|s| (0..pixels(&sights[s])).step_by(PIXELS).map(move |p0| (s, p0)))
        .collect();
    // Few pixels: columns are cut too.
    let parts = TASKS.div_ceil(blocks.len() * g.groups).clamp(1, n.div_ceil(64));
    let columns = n.div_ceil(parts).next_multiple_of(P::PANEL);
    let parts = n.div_ceil(columns);
    let y = Shared::new(y);
    par(blocks.len() * g.groups * parts, |task| {
        let ((s, p0), group, n0) =
            (blocks[task / parts % blocks.len()], task / parts / blocks.len(), task % parts * columns);
        let (sight, packed) = (&sights[s], &packed[s]);
        let (block, columns, terms) =
            (p0..pixels(sight).min(p0 + PIXELS), columns.min(n - n0), sight.terms());
        // Pixels that are not neighbours in the target are computed aside.
        let aside = sight.spacing != [1; 2];
        let mut sums = Buf::<T>::dirty(if aside { PIXELS * columns } else { 0 });
        let c = match aside {
            true => (sums.as_mut_ptr(), columns),
            // SAFETY: pixel `p0` of the target.
            false => (unsafe { y.at(p0 * c_out + group * n + n0) }, c_out),
        };
        let step = terms.div_ceil(terms.div_ceil(TERMS).max(1)).max(1);
        let mut gathered = Buf::<T>::dirty(if sight.is_plain() { 0 } else { PIXELS * step });
        for t0 in (0..terms).step_by(step) {
            let t1 = terms.min(t0 + step);
            let channel = group * sight.k;
            let a = if sight.is_plain() {
                (x[p0 * sight.source[2] + channel + t0..].as_ptr(), sight.source[2], 1)
            } else {
                sight.gather((x, channel), block.clone(), t0..t1, (&mut gathered, step));
                (gathered.as_ptr(), step, 1)
            };
            let panels = n.div_ceil(P::PANEL) * group + n0 / P::PANEL;
            let b = (packed[(panels * terms + t0) * P::PANEL..].as_ptr(), P::PANEL, terms * P::PANEL);
            let into = if t0 > 0 || add && !aside { Into::Add } else { Into::Set };
            // SAFETY: the block lies in its buffers; tasks have pixels, groups or columns of their own.
            unsafe { p.multiply((block.len(), columns, t1 - t0), a, b, c, into) };
        }
        if !aside {
            return;
        }
        if terms == 0 {
            sums.fill(T::ZERO);
        }
        for (p, sums) in block.zip(sums.chunks_exact(columns)) {
            let (image, qy, qx) = sight.at(p);
            let [row, column] = [(0, qy), (1, qx)].map(|(a, q)| sight.origin[a] + sight.spacing[a] * q);
            let at = ((image * h_out + row) * w_out + column) * c_out + group * n + n0;
            // SAFETY: as above.
            let to = unsafe { y.slice(at, columns) };
            match add {
                true => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += *sum),
                false => to.copy_from_slice(sums),
            }
        }
    });
}

/// dw = the gradient of the weights: for each group, what the pixels see, transposed, by the gradient of the output.
pub fn grad_weight<T: Real, P: Product<T>>(p: P, g: &Geometry, (x, dy): (&[T], &[T]), dw: &mut [T]) {
    let sight = Sight::forward(g);
    let (terms, n, k, taps) = (sight.terms(), g.cog(), g.cig(), g.taps());
    let pixels = g.n * g.oh() * g.ow();
    let (across, down) = (n.div_ceil(COLUMNS), terms.div_ceil(ROWS * BLOCKS));
    let tasks = g.groups * across * down;
    // The pixels are cut too, into a number of parts that depends on the shape alone.
    let per_part = pixels.div_ceil(TASKS.div_ceil(tasks)).next_multiple_of(TERMS);
    let parts = pixels.div_ceil(per_part);
    // Sums of a part: [group][term][column], columns padded to whole panels.
    let ld = n.next_multiple_of(P::PANEL);
    let size = g.groups * terms * ld;
    let mut sums = Buf::<T>::dirty(parts * size);
    let out = Shared::new(&mut sums);
    par(parts * tasks, |task| {
        let (part, task) = (task / tasks, task % tasks);
        let (group, task) = (task / (across * down), task % (across * down));
        let (n0, r0) = (task % across * COLUMNS, task / across * ROWS * BLOCKS);
        let (columns, r1) = ((n - n0).min(COLUMNS), terms.min(r0 + ROWS * BLOCKS));
        let mut rows = Buf::<T>::dirty(TERMS * STRIDE);
        let mut panels = Buf::<T>::dirty(TERMS * COLUMNS);
        let all = part * per_part..pixels.min((part + 1) * per_part);
        for p0 in all.clone().step_by(TERMS) {
            let block = p0..all.end.min(p0 + TERMS);
            for j in (0..columns).step_by(P::PANEL) {
                let width = (columns - j).min(P::PANEL);
                for (p, to) in block.clone().zip(panels[j * TERMS..].chunks_exact_mut(P::PANEL)) {
                    to[..width].copy_from_slice(&dy[p * g.co + group * n + n0 + j..][..width]);
                    to[width..].fill(T::ZERO);
                }
            }
            for r in (r0..r1).step_by(ROWS) {
                let seen = r..r1.min(r + ROWS);
                let height = seen.len();
                sight.gather((x, group * k), block.clone(), seen, (&mut rows, STRIDE));
                let into = if p0 > all.start { Into::Add } else { Into::Set };
                // SAFETY: the blocks lie in their buffers; tasks have parts, groups, rows or columns of their own.
                unsafe {
                    let c = (out.at(part * size + (group * terms + r) * ld + n0), ld);
                    let b = (panels.as_ptr(), P::PANEL, TERMS * P::PANEL);
                    p.multiply((height, columns, block.len()), (rows.as_ptr(), 1, STRIDE), b, c, into);
                }
            }
        }
    });
    add_parts(&mut sums, size);
    // From [term][column] to [out][in][tap], a few output channels at a time.
    let (sums, dw) = (&*sums, Shared::new(dw));
    let across = n.div_ceil(16);
    par(g.groups * across, |task| {
        let (group, o0) = (task / across, task % across * 16);
        let width = (n - o0).min(16);
        for c in 0..k {
            for tap in 0..taps {
                let from = &sums[(group * terms + tap * k + c) * ld + o0..][..width];
                for (o, sum) in from.iter().enumerate() {
                    // SAFETY: every task writes output channels of its own.
                    unsafe { *dw.at(((group * n + o0 + o) * k + c) * taps + tap) = *sum };
                }
            }
        }
    });
}

/// Adds all further parts of `size` elements to the first, in their order.
pub fn add_parts<T: Real>(sums: &mut [T], size: usize) {
    let (first, rest) = sums.split_at_mut(size);
    let rest = &*rest;
    first.par_chunks_mut(1 << 12).enumerate().for_each(|(i, first)| {
        for part in rest.chunks_exact(size) {
            for (sum, more) in first.iter_mut().zip(&part[i << 12..]) {
                *sum += *more;
            }
        }
    });
}
