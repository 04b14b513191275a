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
//! Channels are innermost, so the transforms are plain vector additions over 16 channels at a time, and weights
//! are gathered from and scattered to PyTorch's order inside their own transforms. Work is cut by shape only.
use super::conv::Geometry;
use super::simd::{Avx512, Into, PANEL, lanes, sgemm};
use super::{Buf, Shared, par};
use std::arch::x86_64::*;

type V = __m512;

/// Which of the two convolutions of the forward shape is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Input to output.
    Forward,
    /// Gradient of the output to gradient of the input.
    GradInput,
}

/// Sixteen floats of padding between the planes of positions ξ: without it their T² store streams would fall
/// into one set of the cache.
const SKEW: usize = 16;

/// Tiles that one task transforms.
const TILES: usize = 4;

/// y = Bᵀ x (T to T).
#[inline]
#[target_feature(enable = "avx512f")]
fn bt<const T: usize>(x: &[V; T]) -> [V; T] {
    let (add, sub) = (|a, b| _mm512_add_ps(a, b), |a, b| _mm512_sub_ps(a, b));
    let fma = |s: f32, a, b| _mm512_fmadd_ps(_mm512_set1_ps(s), a, b);
    let mut y = [_mm512_setzero_ps(); T];
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
#[inline]
#[target_feature(enable = "avx512f")]
fn at<const T: usize, const M: usize>(x: &[V; T]) -> [V; M] {
    let (add, sub) = (|a, b| _mm512_add_ps(a, b), |a, b| _mm512_sub_ps(a, b));
    let fma = |s: f32, a, b| _mm512_fmadd_ps(_mm512_set1_ps(s), a, b);
    let mut y = [_mm512_setzero_ps(); M];
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
#[inline]
#[target_feature(enable = "avx512f")]
fn a_adjoint<const T: usize, const M: usize>(x: &[V; M]) -> [V; T] {
    let (add, sub) = (|a, b| _mm512_add_ps(a, b), |a, b| _mm512_sub_ps(a, b));
    let fma = |s: f32, a, b| _mm512_fmadd_ps(_mm512_set1_ps(s), a, b);
    let mut y = [_mm512_setzero_ps(); T];
    y[0] = x[0];
    if T == 4 {
        y[1] = add(x[0], x[1]);
        y[2] = sub(x[0], x[1]);
        y[3] = sub(_mm512_setzero_ps(), x[1]);
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
#[inline]
#[target_feature(enable = "avx512f")]
fn g<const T: usize>(x: &[V; 3]) -> [V; T] {
    let (add, sub) = (|a, b| _mm512_add_ps(a, b), |a, b| _mm512_sub_ps(a, b));
    let mul = |s: f32, a| _mm512_mul_ps(_mm512_set1_ps(s), a);
    let mut y = [_mm512_setzero_ps(); T];
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
#[inline]
#[target_feature(enable = "avx512f")]
fn gt<const T: usize>(x: &[V; T]) -> [V; 3] {
    let (add, sub) = (|a, b| _mm512_add_ps(a, b), |a, b| _mm512_sub_ps(a, b));
    let mul = |s: f32, a| _mm512_mul_ps(_mm512_set1_ps(s), a);
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

/// Applies a 1-D map to the columns, then to the rows of an R × R patch of vectors, giving S × S.
macro_rules! map2 {
    ($f:expr, $d:expr, $r:expr, $s:expr) => {{
        let zero = _mm512_setzero_ps();
        let mut half = [[zero; $r]; $s];
        for c in 0..$r {
            let mut column = [zero; $r];
            for r in 0..$r {
                column[r] = $d[r][c];
            }
            let mapped = $f(&column);
            for r in 0..$s {
                half[r][c] = mapped[r];
            }
        }
        let mut out = [[zero; $s]; $s];
        for r in 0..$s {
            out[r] = $f(&half[r]);
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

/// Where a transformed tile goes: channel `c` of position ξ lies at
/// `data + ξ plane + c / 64 panel + c % 64`, with the channels of a tile padded to whole vectors.
#[derive(Clone, Copy)]
struct Planes {
    data: *mut f32,
    plane: usize,
    panel: usize,
}

/// Loads an R × R patch of 16 channels whose first pixel is (y, x); zeros outside the image.
///
/// # Safety
/// AVX-512F is there and `image` holds `h w c` floats.
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn load_patch<const R: usize>(
    s: &Tiling,
    image: *const f32,
    (y, x): (isize, isize),
    channel: usize,
) -> [[V; R]; R] {
    let mut d = [[_mm512_setzero_ps(); R]; R];
    let inside = y >= 0 && x >= 0 && y + R as isize <= s.h as isize && x + R as isize <= s.w as isize;
    let whole = channel + 16 <= s.c;
    let mask = lanes(s.c - channel);
    for r in 0..R {
        for q in 0..R {
            let (yy, xx) = (y + r as isize, x + q as isize);
            if inside || (yy >= 0 && xx >= 0 && yy < s.h as isize && xx < s.w as isize) {
                // SAFETY: the pixel is inside the image, and so are the lanes of the mask.
                d[r][q] = unsafe {
                    let p = image.offset((yy * s.w as isize + xx) * s.c as isize).add(channel);
                    if whole { _mm512_loadu_ps(p) } else { _mm512_maskz_loadu_ps(mask, p) }
                };
            }
        }
    }
    d
}

/// V = Bᵀ x B of one tile.
///
/// # Safety
/// AVX-512F is there, `x` holds the images of the tiling and `to` has room.
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn transform_input<const T: usize>(s: &Tiling, x: *const f32, t: usize, to: Planes) {
    let (image, y0, x0) = s.at(t);
    for c in (0..s.c).step_by(16) {
        // SAFETY: the caller's promise.
        unsafe {
            let d = load_patch::<T>(s, x.add(image * s.h * s.w * s.c), (y0, x0), c);
            let o = map2!(bt::<T>, d, T, T);
            let to_c = to.data.add(c / PANEL * to.panel + c % PANEL);
            for r in 0..T {
                for q in 0..T {
                    _mm512_storeu_ps(to_c.add((r * T + q) * to.plane), o[r][q]);
                }
            }
        }
    }
}

/// D = A dy Aᵀ of one tile.
///
/// # Safety
/// As [`transform_input`].
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn transform_gradient<const T: usize, const M: usize>(
    s: &Tiling,
    dy: *const f32,
    t: usize,
    to: Planes,
) {
    let (image, y0, x0) = s.at(t);
    for c in (0..s.c).step_by(16) {
        // SAFETY: the caller's promise.
        unsafe {
            let d = load_patch::<M>(s, dy.add(image * s.h * s.w * s.c), (y0, x0), c);
            let f = |a: &[V; M]| a_adjoint::<T, M>(a);
            let o = map2!(f, d, M, T);
            let to_c = to.data.add(c / PANEL * to.panel + c % PANEL);
            for r in 0..T {
                for q in 0..T {
                    _mm512_storeu_ps(to_c.add((r * T + q) * to.plane), o[r][q]);
                }
            }
        }
    }
}

/// y = Aᵀ M A of one tile, for channels `c0..c1` whose products start at `from`.
///
/// # Safety
/// AVX-512F is there, `y` holds the images of the tiling, `from` the products; no other task has this tile and
/// these channels.
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn transform_output<const T: usize, const M: usize>(
    s: &Tiling,
    (from, plane): (*const f32, usize),
    t: usize,
    (c0, c1): (usize, usize),
    y: *mut f32,
    add: bool,
) {
    let (image, y0, x0) = s.at(t);
    // Output tiles start inside the image: only their far ends may stick out.
    let (y0, x0) = (y0 as usize, x0 as usize);
    for c in (c0..c1).step_by(16) {
        let mask = lanes(c1 - c);
        let mut d = [[_mm512_setzero_ps(); T]; T];
        for r in 0..T {
            for q in 0..T {
                // SAFETY: the products of a tile are padded to whole vectors.
                d[r][q] = unsafe { _mm512_loadu_ps(from.add((r * T + q) * plane + c - c0)) };
            }
        }
        let f = |a: &[V; T]| at::<T, M>(a);
        let o = map2!(f, d, T, M);
        for r in 0..M {
            for q in 0..M {
                let (yy, xx) = (y0 + r, x0 + q);
                if yy < s.h && xx < s.w {
                    // SAFETY: the pixel is inside the image, and so are the lanes of the mask.
                    unsafe {
                        let p = y.add(((image * s.h + yy) * s.w + xx) * s.c + c);
                        let old = if add { _mm512_maskz_loadu_ps(mask, p) } else { _mm512_setzero_ps() };
                        _mm512_mask_storeu_ps(p, mask, _mm512_add_ps(o[r][q], old));
                    }
                }
            }
        }
    }
}

/// The weights of a convolution, seen as the right-hand matrices of the gemms: rows `k`, columns `n`.
#[derive(Clone, Copy)]
struct Weights<'a> {
    w: &'a [f32],
    k: usize,
    n: usize,
    pass: Pass,
}

impl Weights<'_> {
    /// U = G w Gᵀ for rows `k0..k1` and the columns from `n0` to the end of their panel, stored at
    /// `u + ξ plane + (k - k0) 64 + (n - n0)`.
    ///
    /// # Safety
    /// AVX-512F is there and `u` has room for T² planes.
    #[target_feature(enable = "avx512f")]
    #[allow(clippy::needless_range_loop)]
    unsafe fn transform<const T: usize>(
        &self,
        (k0, k1): (usize, usize),
        n0: usize,
        u: *mut f32,
        plane: usize,
    ) {
        // Steps between the taps of neighbouring rows and columns in [out, in, 3, 3].
        let (row, column) = match self.pass {
            Pass::Forward => (9, 9 * self.k),
            Pass::GradInput => (9 * self.n, 9),
        };
        let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let index = _mm512_mullo_epi32(iota, _mm512_set1_epi32(column as i32));
        for n in (n0..self.n.min(n0 + PANEL)).step_by(16) {
            let mask = lanes(self.n - n);
            for k in k0..k1 {
                let base = self.w[k * row + n * column..].as_ptr();
                let mut d = [[_mm512_setzero_ps(); 3]; 3];
                for tap in 0..9 {
                    let source = if self.pass == Pass::Forward { tap } else { 8 - tap };
                    // SAFETY: the lanes of the mask are columns that exist, so the gather stays in `w`.
                    d[tap / 3][tap % 3] = unsafe {
                        let zero = _mm512_setzero_ps();
                        _mm512_mask_i32gather_ps::<4>(zero, mask, index, base.add(source))
                    };
                }
                let o = map2!(g::<T>, d, 3, T);
                for a in 0..T {
                    for b in 0..T {
                        // SAFETY: the caller's promise.
                        unsafe {
                            let to = u.add((a * T + b) * plane + (k - k0) * PANEL + n - n0);
                            _mm512_storeu_ps(to, o[a][b]);
                        }
                    }
                }
            }
        }
    }

    /// All of U in panels: column panel `j` of position ξ starts at `ξ plane + j k 64`. Returns U and `plane`.
    fn transform_all<const T: usize>(&self, _: Avx512) -> (Buf<f32>, usize) {
        let (k, panels) = (self.k, self.n.div_ceil(PANEL));
        let plane = panels * k * PANEL + SKEW;
        let mut u = Buf::dirty(T * T * plane);
        let out = Shared::new(&mut u);
        let blocks = k.div_ceil(PANEL);
        par(blocks * panels, |task| {
            let (kb, j) = (task % blocks * PANEL, task / blocks);
            // SAFETY: AVX-512F is proved; every task writes rows and a panel of its own.
            unsafe {
                let to = out.at((j * k + kb) * PANEL);
                self.transform::<T>((kb, k.min(kb + PANEL)), j * PANEL, to, plane);
            }
        });
        (u, plane)
    }
}

/// Bytes of U up to which it stays in the L2 cache beside the tiles of a block.
const U_IN_L2: usize = 3 << 20;

/// y = x ∗ w, or the input gradient (then `x` is dy and `y` is dx); with `add`, y += it.
pub fn conv<const T: usize, const M: usize>(
    proof: Avx512,
    shape: &Geometry,
    pass: Pass,
    x: &[f32],
    w: &[f32],
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
    let weights = Weights { w, k, n, pass };
    let tiles = shape.n * th * tw;
    let y = Shared::new(y);
    let job = Job { proof, input, output, weights, tiles, x, y, add };
    if T * T * k * n * 4 <= U_IN_L2 {
        job.blocks_of_tiles::<T, M>();
    } else if tiles > 128 {
        job.positions::<T, M>();
    } else {
        job.panels::<T, M>();
    }
}

struct Job<'a> {
    proof: Avx512,
    input: Tiling,
    output: Tiling,
    weights: Weights<'a>,
    tiles: usize,
    x: &'a [f32],
    y: Shared<f32>,
    add: bool,
}

impl Job<'_> {
    /// U fits into L2: a task takes a block of tiles through all three stages, V and M never leave L2.
    fn blocks_of_tiles<const T: usize, const M: usize>(&self) {
        let (k, n, xi) = (self.weights.k, self.weights.n, T * T);
        let (kp, np) = (k.next_multiple_of(16), n.next_multiple_of(16));
        let (u, u_plane) = self.weights.transform_all::<T>(self.proof);
        // V and M of a block together fill half of L2; whole register tiles of 12 rows. Few tiles make smaller blocks, so
        // that every thread gets some.
        let block = (700_000 / (xi * (kp + np) * 4)).max(12) / 12 * 12;
        let block = block.min(self.tiles.div_ceil(8).next_multiple_of(6));
        let (v_plane, m_plane) = (block * kp + SKEW, block * np + SKEW);
        par(self.tiles.div_ceil(block), |b| {
            let (t0, t1) = (b * block, self.tiles.min((b + 1) * block));
            let mut v = Buf::<f32>::dirty(xi * v_plane);
            let mut m = Buf::<f32>::dirty(xi * m_plane);
            // SAFETY: buffers have the sizes of their planes; blocks have disjoint tiles, so outputs are disjoint.
            unsafe {
                for t in t0..t1 {
                    let data = v.as_mut_ptr().add((t - t0) * kp);
                    let to = Planes { data, plane: v_plane, panel: PANEL };
                    transform_input::<T>(&self.input, self.x.as_ptr(), t, to);
                }
                for e in 0..xi {
                    sgemm(
                        (t1 - t0, np, k),
                        (v.as_ptr().add(e * v_plane), kp, 1),
                        (u.as_ptr().add(e * u_plane), PANEL, k * PANEL),
                        (m.as_mut_ptr().add(e * m_plane), np),
                        Into::Set,
                    );
                }
                for t in t0..t1 {
                    let from = (m.as_ptr().add((t - t0) * np), m_plane);
                    transform_output::<T, M>(&self.output, from, t, (0, n), self.y.at(0), self.add);
                }
            }
        });
    }

    /// U lives in L3 and is read once per sweep of tiles: transform, then one task per position, then transform.
    fn positions<const T: usize, const M: usize>(&self) {
        let (k, n, xi) = (self.weights.k, self.weights.n, T * T);
        let (kp, np) = (k.next_multiple_of(16), n.next_multiple_of(16));
        let (u, u_plane) = self.weights.transform_all::<T>(self.proof);
        let sweep = 512.min(self.tiles);
        let (v_plane, m_plane) = (sweep * kp + SKEW, sweep * np + SKEW);
        let (mut v, mut m) = (Buf::<f32>::dirty(xi * v_plane), Buf::<f32>::dirty(xi * m_plane));
        let (v, m) = (Shared::new(&mut v), Shared::new(&mut m));
        for t0 in (0..self.tiles).step_by(sweep) {
            let t1 = self.tiles.min(t0 + sweep);
            par((t1 - t0).div_ceil(TILES), |q| {
                for t in t0 + q * TILES..t1.min(t0 + (q + 1) * TILES) {
                    // SAFETY: every task writes tiles of its own, within the planes.
                    unsafe {
                        let to = Planes { data: v.at((t - t0) * kp), plane: v_plane, panel: PANEL };
                        transform_input::<T>(&self.input, self.x.as_ptr(), t, to);
                    }
                }
            });
            // SAFETY: every task writes a position of its own, and V is complete.
            par(xi, |e| unsafe {
                sgemm(
                    (t1 - t0, np, k),
                    (v.at(e * v_plane), kp, 1),
                    (u.as_ptr().add(e * u_plane), PANEL, k * PANEL),
                    (m.at(e * m_plane), np),
                    Into::Set,
                );
            });
            par((t1 - t0).div_ceil(TILES), |q| {
                for t in t0 + q * TILES..t1.min(t0 + (q + 1) * TILES) {
                    // SAFETY: every task writes tiles of its own, and M is complete.
                    unsafe {
                        let from = (m.at((t - t0) * np).cast_const(), m_plane);
                        transform_output::<T, M>(&self.output, from, t, (0, n), self.y.at(0), self.add);
                    }
                }
            });
        }
    }

    /// Few tiles and many channels: U would be larger than all other data, so it never exists as a whole. A task
    /// owns 64 output channels, transforms 64 × 64 weights at a time into L2 and adds their products to M.
    /// V is stored in panels of 64 channels: rows of 2 KB would fall into few sets of the L1 cache.
    fn panels<const T: usize, const M: usize>(&self) {
        let (k, n, xi, tiles) = (self.weights.k, self.weights.n, T * T, self.tiles);
        let v_plane = k.div_ceil(PANEL) * tiles * PANEL + SKEW;
        let mut v = Buf::<f32>::dirty(xi * v_plane);
        let v = Shared::new(&mut v);
        par(tiles.div_ceil(TILES), |q| {
            for t in q * TILES..tiles.min((q + 1) * TILES) {
                // SAFETY: every task writes tiles of its own, within the planes.
                unsafe {
                    let to = Planes { data: v.at(t * PANEL), plane: v_plane, panel: tiles * PANEL };
                    transform_input::<T>(&self.input, self.x.as_ptr(), t, to);
                }
            }
        });
        par(n.div_ceil(PANEL), |j| {
            let (n0, n1) = (j * PANEL, n.min((j + 1) * PANEL));
            let (u_plane, m_plane) = (PANEL * PANEL + SKEW, tiles * PANEL + SKEW);
            let (mut u, mut m) = (Buf::<f32>::dirty(xi * u_plane), Buf::<f32>::dirty(xi * m_plane));
            // SAFETY: buffers have the sizes of their planes; tasks write output channels of their own.
            unsafe {
                for k0 in (0..k).step_by(PANEL) {
                    let k1 = k.min(k0 + PANEL);
                    self.weights.transform::<T>((k0, k1), n0, u.as_mut_ptr(), u_plane);
                    for e in 0..xi {
                        sgemm(
                            (tiles, (n1 - n0).next_multiple_of(16), k1 - k0),
                            (v.at(e * v_plane + k0 * tiles), PANEL, 1),
                            (u.as_ptr().add(e * u_plane), PANEL, 0),
                            (m.as_mut_ptr().add(e * m_plane), PANEL),
                            if k0 > 0 { Into::Add } else { Into::Set },
                        );
                    }
                }
                for t in 0..tiles {
                    let from = (m.as_ptr().add(t * PANEL), m_plane);
                    transform_output::<T, M>(&self.output, from, t, (n0, n1), self.y.at(0), self.add);
                }
            }
        });
    }
}

/// dw = the gradient of the weights.
pub fn grad_weight<const T: usize, const M: usize>(
    _: Avx512,
    shape: &Geometry,
    x: &[f32],
    dy: &[f32],
    dw: &mut [f32],
) {
    let (k, n, xi) = (shape.ci, shape.co, T * T);
    let (th, tw) = (shape.oh().div_ceil(M), shape.ow().div_ceil(M));
    let tiles = shape.n * th * tw;
    let pad = |axis: usize| -(shape.pad[axis] as isize);
    let input = Tiling { h: shape.h, w: shape.w, c: k, y0: pad(0), x0: pad(1), th, tw, m: M };
    let gradient = Tiling { h: shape.oh(), w: shape.ow(), c: n, y0: 0, x0: 0, th, tw, m: M };
    let (k_panels, n_panels) = (k.div_ceil(PANEL), n.div_ceil(PANEL));
    // Many channels: one task per block of 64 × 64 weights, its dU in L2, all tiles at once. Few channels: sweeps
    // whose V and D fit into the L2 caches, one task per position, dU summed over the sweeps.
    let by_block = k * n >= 256 * 256;
    let sweep = if by_block { tiles } else { (3_000_000 / (xi * (k + n) * 4)).clamp(64, 512).min(tiles) };
    let (v_plane, d_plane) = (k_panels * sweep * PANEL + SKEW, n_panels * sweep * PANEL + SKEW);
    let (mut v, mut d) = (Buf::<f32>::dirty(xi * v_plane), Buf::<f32>::dirty(xi * d_plane));
    let (v, d) = (Shared::new(&mut v), Shared::new(&mut d));
    let transform = |t0: usize, t1: usize| {
        par((t1 - t0).div_ceil(TILES), |q| {
            for t in t0 + q * TILES..t1.min(t0 + (q + 1) * TILES) {
                // SAFETY: every task writes tiles of its own, within the planes.
                unsafe {
                    let to = Planes { data: v.at((t - t0) * PANEL), plane: v_plane, panel: sweep * PANEL };
                    transform_input::<T>(&input, x.as_ptr(), t, to);
                    let to = Planes { data: d.at((t - t0) * PANEL), plane: d_plane, panel: sweep * PANEL };
                    transform_gradient::<T, M>(&gradient, dy.as_ptr(), t, to);
                }
            }
        });
    };
    // dU of a block: rows are output channels from `n0`, columns input channels from `k0`; with C = Dᵀ V the
    // result of a row is nine contiguous floats a channel in [out, in, 3, 3].
    let block = |e: usize, n0: usize, k0: usize, count: usize, (u, ldu): (*mut f32, usize), into: Into| {
        let (rows, columns) = ((n - n0).min(PANEL), (k - k0).min(PANEL).next_multiple_of(16));
        // SAFETY: V and D are complete; `u` has `rows` rows of `columns` floats.
        unsafe {
            sgemm(
                (rows, columns, count),
                (d.at(e * d_plane + n0 * sweep), 1, PANEL),
                (v.at(e * v_plane + k0 * sweep), PANEL, 0),
                (u, ldu),
                into,
            );
        }
    };
    let dw = Shared::new(dw);
    if by_block {
        transform(0, tiles);
        par(n_panels * k_panels, |task| {
            let (n0, k0) = (task / k_panels * PANEL, task % k_panels * PANEL);
            let plane = PANEL * PANEL + SKEW;
            let mut u = Buf::<f32>::dirty(xi * plane);
            for e in 0..xi {
                // SAFETY: position `e` of a buffer of T² planes.
                block(e, n0, k0, tiles, (unsafe { u.as_mut_ptr().add(e * plane) }, PANEL), Into::Set);
            }
            for r in 0..(n - n0).min(PANEL) {
                // SAFETY: every task writes weights of its own.
                unsafe {
                    let to = dw.at(((n0 + r) * k + k0) * 9);
                    fold_row::<T>(u.as_ptr().add(r * PANEL), plane, (k - k0).min(PANEL), to);
                }
            }
        });
        return;
    }
    let ldu = k_panels * PANEL;
    let plane = n * ldu + SKEW;
    let mut u = Buf::<f32>::dirty(xi * plane);
    let u = Shared::new(&mut u);
    for t0 in (0..tiles).step_by(sweep) {
        let t1 = tiles.min(t0 + sweep);
        transform(t0, t1);
        par(xi, |e| {
            let into = if t0 > 0 { Into::Add } else { Into::Set };
            for n0 in (0..n).step_by(PANEL) {
                for k0 in (0..k).step_by(PANEL) {
                    // SAFETY: every task writes a position of its own.
                    block(e, n0, k0, t1 - t0, (unsafe { u.at(e * plane + n0 * ldu + k0) }, ldu), into);
                }
            }
        });
    }
    // SAFETY: every task writes the weights of an output channel of its own.
    par(n, |o| unsafe { fold_row::<T>(u.at(o * ldu), plane, k, dw.at(o * k * 9)) });
}

/// dw = Gᵀ dU G for `count` input channels of one output channel.
///
/// # Safety
/// AVX-512F is there; `u` holds T² planes of `count` floats rounded up to whole vectors, `dw` 9 `count` floats.
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn fold_row<const T: usize>(u: *const f32, plane: usize, count: usize, dw: *mut f32) {
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let index = _mm512_mullo_epi32(iota, _mm512_set1_epi32(9));
    for c in (0..count).step_by(16) {
        let mut d = [[_mm512_setzero_ps(); T]; T];
        for a in 0..T {
            for b in 0..T {
                // SAFETY: the caller's promise.
                d[a][b] = unsafe { _mm512_loadu_ps(u.add((a * T + b) * plane + c)) };
            }
        }
        let o = map2!(gt::<T>, d, T, 3);
        for tap in 0..9 {
            // SAFETY: the lanes of the mask are channels that exist.
            unsafe {
                let to = dw.add(c * 9 + tap);
                _mm512_mask_i32scatter_ps::<4>(to, lanes(count - c), index, o[tap / 3][tap % 3]);
            }
        }
    }
}
