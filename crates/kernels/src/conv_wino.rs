//! Winograd convolution for 3×3 kernels of stride 1: F(2×2, 3×3) as `<4, 2>` and F(4×4, 3×3) as `<6, 4>`.
//!
//! An output tile of M × M comes from an input tile of T × T, T = M + 2, by T² products per channel pair
//! instead of 9 M²:
//!
//! - forward: V = Bᵀ x B per tile, then for each of the T² positions ξ one small gemm over channels
//!   M\[ξ\] = V\[ξ\] U\[ξ\] with U = G w Gᵀ, then y = Aᵀ M A;
//! - input gradient: the same with the kernel rotated and its channels swapped;
//! - weight gradient: D = A dy Aᵀ, dU\[ξ\] = D\[ξ\]ᵀ V\[ξ\] summed over tiles, dw = Gᵀ dU G.
//!
//! Channels are innermost, so the transforms are plain vector additions over as many channels as a vector has, and weights
//! are gathered from and scattered to PyTorch's order inside their own transforms. Work is cut by shape only.
use super::conv::{Geometry, Pass};
use super::conv_direct::TASKS;
use super::simd::{Into, Simd, sgemm, write};
use super::{Buf, Shared, par};

/// Sixteen floats of padding between the planes of positions ξ: without it their T² store streams would fall
/// into one set of the cache.
const SKEW: usize = 16;

/// Tiles that one task transforms.
const TILES: usize = 4;

/// Channels of a block, where channels are cut.
const BLOCK: usize = 64;
/// Output channels of a task of the weight gradient.
const ROWS: usize = 32;

/// y = Bᵀ x (T to T).
#[inline(always)]
fn bt<S: Simd, const T: usize>(v: S, x: &[S::V; T]) -> [S::V; T] {
    let (add, sub) = (|a, b| v.add(a, b), |a, b| v.sub(a, b));
    let fma = |s: f32, a, b| v.fma(v.splat(s), a, b);
    let mut y = [v.zero(); T];
    if T == 4 {
        y[0] = sub(x[0], x[2]);
        y[1] = add(x[1], x[2]);
        y[2] = sub(x[2], x[1]);
        y[3] = sub(x[1], x[3]);
    } else {
        y[0] = fma(4., x[0], fma(-5., x[2], x[4]));
        let (p, q) = (fma(-4., x[2], x[4]), fma(-4., x[1], x[3]));
        y[1] = add(p, q);
        y[2] = sub(p, q);
        let (r, s) = (sub(x[4], x[2]), sub(x[3], x[1]));
        y[3] = fma(2., s, r);
        y[4] = fma(-2., s, r);
        y[5] = fma(4., x[1], fma(-5., x[3], x[5]));
    }
    y
}

/// y = Aᵀ x (T to M).
#[inline(always)]
fn at<S: Simd, const T: usize, const M: usize>(v: S, x: &[S::V; T]) -> [S::V; M] {
    let (add, sub) = (|a, b| v.add(a, b), |a, b| v.sub(a, b));
    let fma = |s: f32, a, b| v.fma(v.splat(s), a, b);
    let mut y = [v.zero(); M];
    if T == 4 {
        y[0] = add(add(x[0], x[1]), x[2]);
        y[1] = sub(sub(x[1], x[2]), x[3]);
    } else {
        let (a, b, c, d) = (add(x[1], x[2]), sub(x[1], x[2]), add(x[3], x[4]), sub(x[3], x[4]));
        y[0] = add(add(x[0], a), c);
        y[1] = fma(2., d, b);
        y[2] = fma(4., c, a);
        y[3] = add(fma(8., d, b), x[5]);
    }
    y
}

/// y = A x (M to T), the adjoint of [`at`].
#[inline(always)]
fn a_adjoint<S: Simd, const T: usize, const M: usize>(v: S, x: &[S::V; M]) -> [S::V; T] {
    let (add, sub) = (|a, b| v.add(a, b), |a, b| v.sub(a, b));
    let fma = |s: f32, a, b| v.fma(v.splat(s), a, b);
    let mut y = [v.zero(); T];
    y[0] = x[0];
    if T == 4 {
        y[1] = add(x[0], x[1]);
        y[2] = sub(x[0], x[1]);
        y[3] = sub(v.zero(), x[1]);
    } else {
        let (e, o) = (add(x[0], x[2]), add(x[1], x[3]));
        y[1] = add(e, o);
        y[2] = sub(e, o);
        let (e, o) = (fma(4., x[2], x[0]), fma(4., x[3], x[1]));
        y[3] = fma(2., o, e);
        y[4] = fma(-2., o, e);
        y[5] = x[3];
    }
    y
}

/// y = G x (3 to T).
#[inline(always)]
fn g<S: Simd, const T: usize>(v: S, x: &[S::V; 3]) -> [S::V; T] {
    let (add, sub) = (|a, b| v.add(a, b), |a, b| v.sub(a, b));
    let mul = |s: f32, a| v.mul(v.splat(s), a);
    let mut y = [v.zero(); T];
    if T == 4 {
        let s = add(x[0], x[2]);
        y[0] = x[0];
        y[1] = mul(0.5, add(s, x[1]));
        y[2] = mul(0.5, sub(s, x[1]));
        y[3] = x[2];
    } else {
        y[0] = mul(0.25, x[0]);
        let (s, o) = (mul(-1. / 6., add(x[0], x[2])), mul(-1. / 6., x[1]));
        y[1] = add(s, o);
        y[2] = sub(s, o);
        let (s, o) = (add(mul(1. / 24., x[0]), mul(1. / 6., x[2])), mul(1. / 12., x[1]));
        y[3] = add(s, o);
        y[4] = sub(s, o);
        y[5] = x[2];
    }
    y
}

/// y = Gᵀ x (T to 3).
#[inline(always)]
fn gt<S: Simd, const T: usize>(v: S, x: &[S::V; T]) -> [S::V; 3] {
    let (add, sub) = (|a, b| v.add(a, b), |a, b| v.sub(a, b));
    let mul = |s: f32, a| v.mul(v.splat(s), a);
    if T == 4 {
        let (s, d) = (mul(0.5, add(x[1], x[2])), mul(0.5, sub(x[1], x[2])));
        [add(x[0], s), d, add(s, x[3])]
    } else {
        let (s, d) = (mul(-1. / 6., add(x[1], x[2])), mul(-1. / 6., sub(x[1], x[2])));
        let (p, q) = (add(x[3], x[4]), sub(x[3], x[4]));
        [
            add(add(mul(0.25, x[0]), s), mul(1. / 24., p)),
            add(d, mul(1. / 12., q)),
            add(add(s, mul(1. / 6., p)), x[5]),
        ]
    }
}

/// Applies a 1-D map to the columns, then to the rows of an R × R patch of vectors, giving S × S. The patch is a function of row and
/// column, so that it is loaded as it is needed: no CPU has registers for all of it.
macro_rules! map2 {
    ($v:expr, $f:expr, $d:expr, $r:expr, $s:expr) => {{
        let zero = $v.zero();
        let mut half = [[zero; $r]; $s];
        for c in 0..$r {
            let mut column = [zero; $r];
            for r in 0..$r {
                column[r] = $d(r, c);
            }
            let mapped = $f($v, &column);
            for r in 0..$s {
                half[r][c] = mapped[r];
            }
        }
        let mut out = [[zero; $s]; $s];
        for r in 0..$s {
            out[r] = $f($v, &half[r]);
        }
        out
    }};
}

/// The images that are cut into tiles, and where each tile lies.
#[derive(Clone, Copy)]
struct Tiling {
    /// Rows, columns and channels of the image that is read or written.
    h: usize,
    w: usize,
    c: usize,
    /// Where tile (0, 0) starts relative to the image: minus the padding.
    y0: isize,
    x0: isize,
    /// Tiles in a column and in a row.
    th: usize,
    tw: usize,
    /// Output pixels of a tile along one side.
    m: usize,
}

impl Tiling {
    /// Image, first row and first column of tile `t`.
    fn at(&self, t: usize) -> (usize, isize, isize) {
        let (image, ty, tx) = (t / (self.th * self.tw), t / self.tw % self.th, t % self.tw);
        (image, (ty * self.m) as isize + self.y0, (tx * self.m) as isize + self.x0)
    }
}

/// Where a transformed tile goes: channel `c` of position ξ lies at `data + ξ plane + c / width panel + c % width`, with the
/// channels of a tile padded to whole vectors.
#[derive(Clone, Copy)]
struct Planes {
    data: *mut f32,
    plane: usize,
    panel: usize,
    width: usize,
}

impl Planes {
    /// Stores the T × T vectors of channels `c..`.
    ///
    /// # Safety
    /// There is room for them.
    #[inline(always)]
    unsafe fn store<S: Simd, const T: usize>(&self, v: S, c: usize, values: [[S::V; T]; T]) {
        // SAFETY: the caller's promise.
        unsafe {
            let to = self.data.add(c / self.width * self.panel + c % self.width);
            for (r, row) in values.iter().enumerate() {
                for (q, value) in row.iter().enumerate() {
                    v.store(to.add((r * T + q) * self.plane), *value);
                }
            }
        }
    }
}

/// Where the pixels of the next tile lie; they need not be there. Each is asked for when its like in this tile is read or written: all
/// at once they would wait for each other.
#[derive(Clone, Copy)]
struct Next {
    first: *const f32,
    row: usize,
    pixel: usize,
}

impl Next {
    /// After tile `t` of the images at `images`.
    fn after(s: &Tiling, images: *const f32, t: usize) -> Self {
        let (image, y, x) = s.at(t + 1);
        let at = ((image * s.h) as isize + y) * s.w as isize + x;
        Self { first: images.wrapping_offset(at * s.c as isize), row: s.w * s.c, pixel: s.c }
    }

    /// Asks for the channels from `c` on of pixel (r, q).
    #[inline(always)]
    fn prefetch<S: Simd>(&self, v: S, r: usize, q: usize, c: usize) {
        v.prefetch(self.first.wrapping_add(r * self.row + q * self.pixel + c));
    }
}

/// An R × R patch of an image whose first pixel is (y, x).
#[derive(Clone, Copy)]
struct Patch<'a, const R: usize> {
    s: &'a Tiling,
    image: *const f32,
    y: isize,
    x: isize,
    next: Next,
}

impl<'a, const R: usize> Patch<'a, R> {
    /// That of tile `t` of the images at `images`.
    fn of(s: &'a Tiling, images: *const f32, t: usize) -> Self {
        let (image, y, x) = s.at(t);
        let next = Next::after(s, images, t);
        Self { s, image: images.wrapping_add(image * s.h * s.w * s.c), y, x, next }
    }

    fn is_inside(&self) -> bool {
        let (h, w, r) = (self.s.h as isize, self.s.w as isize, R as isize);
        self.y >= 0 && self.x >= 0 && self.y + r <= h && self.x + r <= w
    }

    #[inline(always)]
    fn pixel(&self, r: usize, q: usize) -> *const f32 {
        let (y, x) = (self.y + r as isize, self.x + q as isize);
        self.image.wrapping_offset((y * self.s.w as isize + x) * self.s.c as isize)
    }

    /// A vector of the channels from `c` on of pixel (r, q): with `WHOLE` there are as many, inside the image; else what is beyond
    /// is zero. Asks for its like in the next tile.
    ///
    /// # Safety
    /// `image` holds `h w c` floats, and `WHOLE` is true.
    #[inline(always)]
    unsafe fn load<S: Simd, const WHOLE: bool>(&self, v: S, r: usize, q: usize, c: usize) -> S::V {
        self.next.prefetch(v, r, q, c);
        let (y, x) = (self.y + r as isize, self.x + q as isize);
        let inside = y >= 0 && x >= 0 && y < self.s.h as isize && x < self.s.w as isize;
        // SAFETY: the pixel is inside the image, and so are the channels that are left.
        unsafe {
            match WHOLE {
                true => v.load(self.pixel(r, q).add(c)),
                false if inside => v.load_part(self.pixel(r, q).add(c), self.s.c - c),
                false => v.zero(),
            }
        }
    }
}

/// V = Bᵀ x B of one tile, for channels `c0..c1`.
///
/// # Safety
/// `x` holds the images of the tiling and `to` has room.
#[allow(clippy::needless_range_loop)]
unsafe fn transform_input<S: Simd, const T: usize>(
    v: S,
    s: &Tiling,
    x: *const f32,
    t: usize,
    (c0, c1): (usize, usize),
    to: Planes,
) {
    let patch = Patch::<T>::of(s, x, t);
    let inside = patch.is_inside();
    v.run(
        #[inline(always)]
        || {
            for c in (c0..c1).step_by(S::LANES) {
                // SAFETY: the caller's promise.
                unsafe {
                    let out = if inside && c + S::LANES <= s.c {
                        map2!(v, bt::<S, T>, |r, q| patch.load::<S, true>(v, r, q, c), T, T)
                    } else {
                        map2!(v, bt::<S, T>, |r, q| patch.load::<S, false>(v, r, q, c), T, T)
                    };
                    to.store::<S, T>(v, c - c0, out);
                }
            }
        },
    )
}

/// D = A dy Aᵀ of one tile, for channels `c0..c1`.
///
/// # Safety
/// As [`transform_input`].
#[allow(clippy::needless_range_loop)]
unsafe fn transform_gradient<S: Simd, const T: usize, const M: usize>(
    v: S,
    s: &Tiling,
    dy: *const f32,
    t: usize,
    (c0, c1): (usize, usize),
    to: Planes,
) {
    let patch = Patch::<M>::of(s, dy, t);
    let inside = patch.is_inside();
    v.run(
        #[inline(always)]
        || {
            for c in (c0..c1).step_by(S::LANES) {
                // SAFETY: the caller's promise.
                unsafe {
                    let out = if inside && c + S::LANES <= s.c {
                        map2!(v, a_adjoint::<S, T, M>, |r, q| patch.load::<S, true>(v, r, q, c), M, T)
                    } else {
                        map2!(v, a_adjoint::<S, T, M>, |r, q| patch.load::<S, false>(v, r, q, c), M, T)
                    };
                    to.store::<S, T>(v, c - c0, out);
                }
            }
        },
    )
}

/// y = Aᵀ M A of one tile, whose products start at `from`.
///
/// # Safety
/// `y` holds the images of the tiling, `from` the products; no other task has this tile.
#[allow(clippy::needless_range_loop)]
unsafe fn transform_output<S: Simd, const T: usize, const M: usize>(
    v: S,
    s: &Tiling,
    (from, plane): (*const f32, usize),
    t: usize,
    (y, into): (*mut f32, Into),
) {
    let (image, y0, x0) = s.at(t);
    let next = Next::after(s, y, t);
    // Output tiles start inside the image: only their far ends may stick out.
    let (y0, x0) = (y0 as usize, x0 as usize);
    v.run(
        #[inline(always)]
        || {
            for c in (0..s.c).step_by(S::LANES) {
                // SAFETY: the products of a tile are padded to whole vectors.
                let product = |r, q| unsafe { v.load(from.add((r * T + q) * plane + c)) };
                let o: [[S::V; M]; M] = map2!(v, at::<S, T, M>, product, T, M);
                for r in 0..M {
                    for q in 0..M {
                        next.prefetch(v, r, q, c);
                        let (yy, xx) = (y0 + r, x0 + q);
                        if yy < s.h && xx < s.w {
                            // SAFETY: the pixel is inside the image, and so are the channels that are left.
                            unsafe {
                                let p = y.add(((image * s.h + yy) * s.w + xx) * s.c + c);
                                write(v, p, S::LANES.min(s.c - c), o[r][q], into);
                            }
                        }
                    }
                }
            }
        },
    )
}

/// The weights of a convolution, seen as the right-hand matrices of the gemms: rows `k`, columns `n`.
#[derive(Clone, Copy)]
struct Weights<'a, S> {
    v: S,
    w: &'a [f32],
    k: usize,
    n: usize,
    pass: Pass,
}

impl<S: Simd> Weights<'_, S> {
    /// U = G w Gᵀ for rows `k0..k1` and the columns from `n0` to the end of their panel, stored at
    /// `u + ξ plane + (k - k0) PANEL + (n - n0)`.
    ///
    /// # Safety
    /// `u` has room for T² planes.
    #[allow(clippy::needless_range_loop)]
    unsafe fn transform<const T: usize>(
        &self,
        (k0, k1): (usize, usize),
        n0: usize,
        u: *mut f32,
        plane: usize,
    ) {
        let v = self.v;
        // Steps between the taps of neighbouring rows and columns in [out, in, 3, 3].
        let (row, column) = match self.pass {
            Pass::Forward => (9, 9 * self.k),
            Pass::GradInput => (9 * self.n, 9),
        };
        v.run(
            #[inline(always)]
            || {
                for n in (n0..self.n.min(n0 + S::PANEL)).step_by(S::LANES) {
                    for k in k0..k1 {
                        let base = self.w[k * row + n * column..].as_ptr();
                        let tap = |r: usize, q: usize| {
                            let tap = 3 * r + q;
                            let source = if self.pass == Pass::Forward { tap } else { 8 - tap };
                            // SAFETY: the columns that are left exist, so the gather stays in `w`.
                            unsafe { v.gather(base.add(source), column, S::LANES.min(self.n - n)) }
                        };
                        let o: [[S::V; T]; T] = map2!(v, g::<S, T>, tap, 3, T);
                        for a in 0..T {
                            for b in 0..T {
                                // SAFETY: the caller's promise.
                                unsafe {
                                    let to = u.add((a * T + b) * plane + (k - k0) * S::PANEL + n - n0);
                                    v.store(to, o[a][b]);
                                }
                            }
                        }
                    }
                }
            },
        )
    }

    /// The tasks that [`Weights::transform_rows`] has for `rows` rows.
    fn tasks(&self, rows: usize) -> usize {
        rows.div_ceil(BLOCK) * self.n.div_ceil(S::PANEL)
    }

    /// U for rows `k0..k1` in panels, one task of many: column panel `j` of position ξ starts at `ξ plane + j (k1 - k0) PANEL`.
    ///
    /// # Safety
    /// `u` has room, and nobody else has this task.
    unsafe fn transform_rows<const T: usize>(
        &self,
        task: usize,
        (k0, k1): (usize, usize),
        u: *mut f32,
        plane: usize,
    ) {
        let blocks = (k1 - k0).div_ceil(BLOCK);
        let (row, j) = (k0 + task % blocks * BLOCK, task / blocks);
        // SAFETY: the caller's promise; every task writes rows and a panel of its own.
        unsafe {
            let to = u.add((j * (k1 - k0) + row - k0) * S::PANEL);
            self.transform::<T>((row, k1.min(row + BLOCK)), j * S::PANEL, to, plane);
        }
    }
}

/// Bytes of U up to which a task takes its tiles through all three stages: beside them it stays in the L2 cache, or nearly.
const U_IN_L2: usize = 3 << 20;
/// Bytes of V and M of such a block of tiles: what an L2 cache of 512 KB holds beside a part of U.
const TILES_IN_L2: usize = 300_000;
/// Bytes of dU that stay there beside V and D.
const DU_IN_L2: usize = 300_000;
/// Bytes of U, and of V and M (or D) together, that are worked on at a time where they live in the L3 cache.
const U_IN_L3: usize = 10 << 20;
const TILES_IN_L3: usize = 8 << 20;
/// The most tiles at a time: products of so many rows (or terms) read their other side from memory at no cost.
const MOST_TILES: usize = 512;

/// Cuts `n` into parts of equal size, at most `most` each: the size, a multiple of `unit`.
fn even(n: usize, most: usize, unit: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(1))).next_multiple_of(unit)
}

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
pub fn conv<S: Simd, const T: usize, const M: usize>(
    v: S,
    shape: &Geometry,
    pass: Pass,
    (x, w): (&[f32], &[f32]),
    y: &mut [f32],
    add: bool,
) {
    let pad = |axis: usize| shape.pad[axis] as isize;
    let small = (shape.oh(), shape.ow(), shape.co);
    let large = (shape.h, shape.w, shape.ci);
    let ((hi, wi, k), (ho, wo, n), y0, x0) = match pass {
        Pass::Forward => (large, small, -pad(0), -pad(1)),
        Pass::GradInput => (small, large, pad(0) - 2, pad(1) - 2),
    };
    let (th, tw) = (ho.div_ceil(M), wo.div_ceil(M));
    let input = Tiling { h: hi, w: wi, c: k, y0, x0, th, tw, m: M };
    let output = Tiling { h: ho, w: wo, c: n, y0: 0, x0: 0, th, tw, m: M };
    let weights = Weights { v, w, k, n, pass };
    let tiles = shape.n * th * tw;
    let y = Shared::new(y);
    let into = if add { Into::Add } else { Into::Set };
    let job = Job { v, input, output, weights, tiles, x, y, into };
    if T * T * k * n * 4 <= U_IN_L2 {
        job.blocks_of_tiles::<T, M>();
    } else {
        job.positions::<T, M>();
    }
}

struct Job<'a, S> {
    v: S,
    input: Tiling,
    output: Tiling,
    weights: Weights<'a, S>,
    tiles: usize,
    x: &'a [f32],
    y: Shared<f32>,
    into: Into,
}

impl<S: Simd> Job<'_, S> {
    /// Channels `channels` of V of tile `t`, side by side.
    ///
    /// # Safety
    /// `data` has room for a tile.
    unsafe fn input<const T: usize>(
        &self,
        t: usize,
        channels: (usize, usize),
        (data, plane): (*mut f32, usize),
    ) {
        let to = Planes { data, plane, panel: 0, width: usize::MAX };
        // SAFETY: the caller's promise; `x` holds the images.
        unsafe { transform_input::<S, T>(self.v, &self.input, self.x.as_ptr(), t, channels, to) }
    }

    /// The output tile `t` from its products.
    ///
    /// # Safety
    /// As [`transform_output`].
    unsafe fn output<const T: usize, const M: usize>(&self, from: (*const f32, usize), t: usize) {
        // SAFETY: the caller's promise; `y` holds the images.
        unsafe {
            let y = (self.y.at(0), self.into);
            transform_output::<S, T, M>(self.v, &self.output, from, t, y);
        }
    }

    /// U fits into L2: a task takes a block of tiles through all three stages, V and M never leave L2.
    fn blocks_of_tiles<const T: usize, const M: usize>(&self) {
        let (k, n, xi) = (self.weights.k, self.weights.n, T * T);
        let (kp, np) = (k.next_multiple_of(S::LANES), n.next_multiple_of(S::LANES));
        let u_plane = n.div_ceil(S::PANEL) * k * S::PANEL + SKEW;
        let mut u = Buf::<f32>::dirty(xi * u_plane);
        let to = Shared::new(&mut u);
        // SAFETY: U has room for all rows.
        par(self.weights.tasks(k), |task| unsafe {
            self.weights.transform_rows::<T>(task, (0, k), to.at(0), u_plane);
        });
        // V and M of a block together fill half of L2; whole register tiles of 12 rows. Few tiles make smaller blocks, so
        // that every thread gets some.
        let block = (TILES_IN_L2 / (xi * (kp + np) * 4)).max(12) / 12 * 12;
        let block = block.min(self.tiles.div_ceil(TASKS).next_multiple_of(12));
        let (v_plane, m_plane) = (block * kp + SKEW, block * np + SKEW);
        par(self.tiles.div_ceil(block), |b| {
            let (t0, t1) = (b * block, self.tiles.min((b + 1) * block));
            let mut v = Buf::<f32>::dirty(xi * v_plane);
            let mut m = Buf::<f32>::dirty(xi * m_plane);
            // SAFETY: buffers have the sizes of their planes; blocks have disjoint tiles, so outputs are disjoint.
            unsafe {
                for t in t0..t1 {
                    self.input::<T>(t, (0, k), (v.as_mut_ptr().add((t - t0) * kp), v_plane));
                }
                for e in 0..xi {
                    sgemm(
                        self.v,
                        (t1 - t0, np, k),
                        (v.as_ptr().add(e * v_plane), kp, 1),
                        (u.as_ptr().add(e * u_plane), S::PANEL, k * S::PANEL),
                        (m.as_mut_ptr().add(e * m_plane), np),
                        Into::Set,
                    );
                }
                for t in t0..t1 {
                    self.output::<T, M>((m.as_ptr().add((t - t0) * np), m_plane), t);
                }
            }
        });
    }

    /// U, V and M live in L3, as much of them at a time as fits: a sweep over some tiles and some rows of U transforms both,
    /// then a task multiplies one position of them into some columns of M. U is transformed once if all of it fits.
    fn positions<const T: usize, const M: usize>(&self) {
        let (k, n, xi) = (self.weights.k, self.weights.n, T * T);
        let np = n.next_multiple_of(S::LANES);
        let depth = even(k, U_IN_L3 / (xi * n * 4), BLOCK);
        let tiles_in_l3 = if depth >= k { TILES_IN_L3 / (xi * (k + n) * 4) } else { MOST_TILES };
        let sweep = even(self.tiles, tiles_in_l3.clamp(48, MOST_TILES), 12);
        let (v_plane, m_plane) = (sweep * depth + SKEW, sweep * np + SKEW);
        let u_plane = n.div_ceil(S::PANEL) * depth * S::PANEL + SKEW;
        let (mut v, mut m) = (Buf::<f32>::dirty(xi * v_plane), Buf::<f32>::dirty(xi * m_plane));
        let mut u = Buf::<f32>::dirty(xi * u_plane);
        let (u, v, m) = (Shared::new(&mut u), Shared::new(&mut v), Shared::new(&mut m));
        for t0 in (0..self.tiles).step_by(sweep) {
            let t1 = self.tiles.min(t0 + sweep);
            for k0 in (0..k).step_by(depth) {
                let k1 = k.min(k0 + depth);
                let weights = if depth < k || t0 == 0 { self.weights.tasks(k1 - k0) } else { 0 };
                // SAFETY: every task writes rows of U or tiles of V of its own.
                par(weights + (t1 - t0).div_ceil(TILES), |q| unsafe {
                    if q < weights {
                        return self.weights.transform_rows::<T>(q, (k0, k1), u.at(0), u_plane);
                    }
                    let first = t0 + (q - weights) * TILES;
                    for t in first..t1.min(first + TILES) {
                        self.input::<T>(t, (k0, k1), (v.at((t - t0) * depth), v_plane));
                    }
                });
                let into = if k0 > 0 { Into::Add } else { Into::Set };
                let across = np.div_ceil(BLOCK);
                par(xi * across, |task| {
                    let (e, n0) = (task / across, task % across * BLOCK);
                    // SAFETY: every task writes a position and columns of its own; U and V are complete.
                    unsafe {
                        sgemm(
                            self.v,
                            (t1 - t0, BLOCK.min(np - n0), k1 - k0),
                            (v.at(e * v_plane), depth, 1),
                            (u.at(e * u_plane + n0 * (k1 - k0)), S::PANEL, (k1 - k0) * S::PANEL),
                            (m.at(e * m_plane + n0), np),
                            into,
                        );
                    }
                });
            }
            par((t1 - t0).div_ceil(TILES), |q| {
                for t in t0 + q * TILES..t1.min(t0 + (q + 1) * TILES) {
                    // SAFETY: every task writes tiles of its own, and M is complete.
                    unsafe { self.output::<T, M>((m.at((t - t0) * np).cast_const(), m_plane), t) };
                }
            });
        }
    }
}

/// dw = the gradient of the weights.
pub fn grad_weight<S: Simd, const T: usize, const M: usize>(
    simd: S,
    shape: &Geometry,
    (x, dy): (&[f32], &[f32]),
    dw: &mut [f32],
) {
    let (k, n) = (shape.ci, shape.co);
    let (th, tw) = (shape.oh().div_ceil(M), shape.ow().div_ceil(M));
    let tiles = shape.n * th * tw;
    let pad = |axis: usize| -(shape.pad[axis] as isize);
    let input = Tiling { h: shape.h, w: shape.w, c: k, y0: pad(0), x0: pad(1), th, tw, m: M };
    let gradient = Tiling { h: shape.oh(), w: shape.ow(), c: n, y0: 0, x0: 0, th, tw, m: M };
    let job = WeightJob { simd, input, gradient, tiles, x, dy, dw: Shared::new(dw) };
    match Parts::of(T * T, S::LANES, [k, n], tiles) {
        Some(parts) => job.parts::<T, M>(&parts),
        None => job.positions::<T, M>(),
    }
}

/// How the tiles are cut where dU has few channels.
struct Parts {
    /// Input and output channels, whole vectors of them.
    channels: [usize; 2],
    /// Tiles that are transformed and multiplied at a time.
    lot: usize,
    /// Such lots in a part.
    lots: usize,
    /// Parts.
    count: usize,
}

impl Parts {
    /// `None` where dU is too large, or the tiles are too few for many tasks.
    fn of(xi: usize, lanes: usize, channels: [usize; 2], tiles: usize) -> Option<Self> {
        let channels = channels.map(|channels| channels.next_multiple_of(lanes));
        if xi * channels[0] * channels[1] * 4 > DU_IN_L2 {
            return None;
        }
        let lot = (TILES_IN_L2 / (xi * (channels[0] + channels[1]) * 4)).max(1);
        let lots = tiles.div_ceil(lot).div_ceil(TASKS).max(2);
        let count = tiles.div_ceil(lot * lots);
        (count >= TASKS / 4).then_some(Self { channels, lot, lots, count })
    }
}

struct WeightJob<'a, S> {
    simd: S,
    input: Tiling,
    gradient: Tiling,
    tiles: usize,
    x: &'a [f32],
    dy: &'a [f32],
    dw: Shared<f32>,
}

impl<S: Simd> WeightJob<'_, S> {
    /// V and D of tile `t`, those channels of each.
    ///
    /// # Safety
    /// Both have room.
    unsafe fn transform<const T: usize, const M: usize>(
        &self,
        t: usize,
        input: Option<((usize, usize), Planes)>,
        (channels, to): ((usize, usize), Planes),
    ) {
        // SAFETY: the caller's promise; `x` and `dy` hold the images.
        unsafe {
            if let Some((channels, to)) = input {
                transform_input::<S, T>(self.simd, &self.input, self.x.as_ptr(), t, channels, to);
            }
            transform_gradient::<S, T, M>(self.simd, &self.gradient, self.dy.as_ptr(), t, channels, to);
        }
    }

    /// dU fits into L2 beside V and D of some tiles: a task sums it up over its part of the tiles, and the parts are added in
    /// their order.
    fn parts<const T: usize, const M: usize>(&self, cut: &Parts) {
        let (xi, [kp, np], [k, n]) = (T * T, cut.channels, [self.input.c, self.gradient.c]);
        let (v_plane, d_plane, u_plane) = (cut.lot * kp + SKEW, cut.lot * np + SKEW, np * kp + SKEW);
        let mut sums = Buf::<f32>::dirty(cut.count * xi * u_plane);
        let u = Shared::new(&mut sums);
        par(cut.count, |part| {
            let first = part * cut.lots * cut.lot;
            let end = self.tiles.min(first + cut.lots * cut.lot);
            let (mut v, mut d) = (Buf::<f32>::dirty(xi * v_plane), Buf::<f32>::dirty(xi * d_plane));
            for t0 in (first..end).step_by(cut.lot) {
                let t1 = end.min(t0 + cut.lot);
                let into = if t0 > first { Into::Add } else { Into::Set };
                let planes = |data, plane| Planes { data, plane, panel: 0, width: usize::MAX };
                // SAFETY: the buffers have the sizes of their planes, and every task has a dU of its own.
                unsafe {
                    for t in t0..t1 {
                        let v = planes(v.as_mut_ptr().add((t - t0) * kp), v_plane);
                        let d = planes(d.as_mut_ptr().add((t - t0) * np), d_plane);
                        self.transform::<T, M>(t, Some(((0, k), v)), ((0, n), d));
                    }
                    for e in 0..xi {
                        sgemm(
                            self.simd,
                            (n, kp, t1 - t0),
                            (d.as_ptr().add(e * d_plane), 1, np),
                            (v.as_ptr().add(e * v_plane), kp, S::PANEL),
                            (u.at((part * xi + e) * u_plane), kp),
                            into,
                        );
                    }
                }
            }
        });
        // SAFETY: every task adds up the rows of an output channel of its own, and writes its weights.
        par(n, |o| unsafe {
            let row = |part: usize, e: usize| u.slice((part * xi + e) * u_plane + o * kp, kp);
            for e in 0..xi {
                let sum = row(0, e);
                for part in 1..cut.count {
                    sum.iter_mut().zip(&*row(part, e)).for_each(|(sum, more)| *sum += *more);
                }
            }
            fold_row::<S, T>(self.simd, u.at(o * kp), u_plane, k, self.dw.at(o * k * 9));
        });
    }

    /// V, D and dU live in L3, as much of them at a time as fits: for some output channels, a sweep over some tiles transforms
    /// both sides, then a task multiplies one position of some channels into dU.
    fn positions<const T: usize, const M: usize>(&self) {
        let (simd, tiles, xi) = (self.simd, self.tiles, T * T);
        let (k, n) = (self.input.c, self.gradient.c);
        let kp = k.next_multiple_of(S::PANEL);
        let chunk = even(n, U_IN_L3 / (xi * kp * 4), ROWS).min(n.next_multiple_of(ROWS));
        let sweep = even(tiles, (TILES_IN_L3 / (xi * (kp + chunk) * 4)).clamp(64, MOST_TILES), 1);
        // D is the left-hand side, in blocks of channels; V the right-hand side, in panels; rows of dU are output channels and
        // columns input channels, so that a row's result is nine contiguous floats a channel in [out, in, 3, 3].
        let (v_plane, d_plane, u_plane) = (sweep * kp + SKEW, sweep * chunk + SKEW, chunk * kp + SKEW);
        let (mut v, mut d) = (Buf::<f32>::dirty(xi * v_plane), Buf::<f32>::dirty(xi * d_plane));
        let mut u = Buf::<f32>::dirty(xi * u_plane);
        let (v, d, u) = (Shared::new(&mut v), Shared::new(&mut d), Shared::new(&mut u));
        for c0 in (0..n).step_by(chunk) {
            let c1 = n.min(c0 + chunk);
            for t0 in (0..tiles).step_by(sweep) {
                let t1 = tiles.min(t0 + sweep);
                // One sweep: V is that of the chunk before.
                let with_input = c0 == 0 || sweep < tiles;
                par((t1 - t0).div_ceil(TILES), |q| {
                    for t in t0 + q * TILES..t1.min(t0 + (q + 1) * TILES) {
                        let planes = |data, plane, width| Planes { data, plane, panel: sweep * width, width };
                        // SAFETY: every task writes tiles of its own, within the planes.
                        unsafe {
                            let v = planes(v.at((t - t0) * S::PANEL), v_plane, S::PANEL);
                            let d = planes(d.at((t - t0) * ROWS), d_plane, ROWS);
                            self.transform::<T, M>(t, with_input.then_some(((0, k), v)), ((c0, c1), d));
                        }
                    }
                });
                let down = (c1 - c0).div_ceil(ROWS);
                par(xi * down, |task| {
                    let (e, r0) = (task / down, task % down * ROWS);
                    let into = if t0 > 0 { Into::Add } else { Into::Set };
                    // SAFETY: V and D are complete; every task writes a position and rows of its own.
                    unsafe {
                        sgemm(
                            simd,
                            ((c1 - c0 - r0).min(ROWS), k.next_multiple_of(S::LANES), t1 - t0),
                            (d.at(e * d_plane + r0 * sweep), 1, ROWS),
                            (v.at(e * v_plane), S::PANEL, sweep * S::PANEL),
                            (u.at(e * u_plane + r0 * kp), kp),
                            into,
                        );
                    }
                });
            }
            // SAFETY: every task writes the weights of an output channel of its own.
            par(c1 - c0, |o| unsafe {
                fold_row::<S, T>(simd, u.at(o * kp), u_plane, k, self.dw.at((c0 + o) * k * 9));
            });
        }
    }
}

/// dw = Gᵀ dU G for `count` input channels of one output channel.
///
/// # Safety
/// `u` holds T² planes of `count` floats rounded up to whole vectors, `dw` 9 `count` floats.
#[allow(clippy::needless_range_loop)]
unsafe fn fold_row<S: Simd, const T: usize>(v: S, u: *const f32, plane: usize, count: usize, dw: *mut f32) {
    v.run(
        #[inline(always)]
        || {
            for c in (0..count).step_by(S::LANES) {
                // SAFETY: the caller's promise.
                let sum = |a, b| unsafe { v.load(u.add((a * T + b) * plane + c)) };
                let o: [[S::V; 3]; 3] = map2!(v, gt::<S, T>, sum, T, 3);
                for tap in 0..9 {
                    // SAFETY: the channels that are left exist.
                    unsafe {
                        v.scatter(dw.add(c * 9 + tap), 9, S::LANES.min(count - c), o[tap / 3][tap % 3])
                    };
                }
            }
        },
    )
}
