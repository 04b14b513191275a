//! The AVX-512 building blocks: one register-tiled multiply-add kernel and a 16 × 16 transpose.
//!
//! A is broadcast from memory, element by element, so it needs no packing while its lines stay in the L1 cache,
//! and a transposed A is only a change of strides. B must have contiguous rows of at least the tile's width.
//! Everything here requires AVX-512F: safe functions take the proof of it, [`Avx512`].
use super::{Buf, Shared, par};
use std::arch::x86_64::*;

/// Proof that this CPU has AVX-512F, from [`Isa::avx512`](super::Isa::avx512).
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU has AVX-512F, and AVX2 and FMA with it.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// Columns of a full register tile: four vectors.
pub const PANEL: usize = 64;

/// What to do with the old value of C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// C = A B.
    Set,
    /// C += A B.
    Add,
}

/// The lanes below `n`, of 16.
#[inline(always)]
pub fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

/// A tile of `MR` rows and `16 NV` columns: C (+)= A B over `k` terms.
///
/// 6 × 4 vectors are 24 accumulators; with 4 vectors of B and one broadcast that is 29 of 32 registers, and 10
/// loads serve 24 multiply-adds. A ragged last vector (`TAIL`) is an instance of its own: masks in the common
/// case cost a third of the speed at 64 channels.
///
/// # Safety
/// AVX-512F is there; `a(i, p)` at `a + i rsa + p csa`, rows of `b` `ldb` apart and rows of `c` `ldc` apart are
/// valid for the tile (its last vector only in the lanes of `mask`).
#[inline]
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn tile<const MR: usize, const NV: usize, const TAIL: bool>(
    k: usize,
    (a, rsa, csa): (*const f32, usize, usize),
    (b, ldb): (*const f32, usize),
    (c, ldc): (*mut f32, usize),
    into: Into,
    mask: __mmask16,
) {
    let mut acc = [[_mm512_setzero_ps(); NV]; MR];
    let (mut ap, mut bp) = (a, b);
    // SAFETY: the caller's promise covers every address formed here; `wrapping_add` because the last step of a
    // pointer may lie beyond the matrix.
    unsafe {
        for _ in 0..k {
            let mut bv = [_mm512_setzero_ps(); NV];
            for j in 0..NV {
                bv[j] = if !TAIL || j + 1 < NV {
                    _mm512_loadu_ps(bp.add(16 * j))
                } else {
                    _mm512_maskz_loadu_ps(mask, bp.add(16 * j))
                };
            }
            for i in 0..MR {
                let av = _mm512_set1_ps(*ap.add(i * rsa));
                for j in 0..NV {
                    acc[i][j] = _mm512_fmadd_ps(av, bv[j], acc[i][j]);
                }
            }
            ap = ap.wrapping_add(csa);
            bp = bp.wrapping_add(ldb);
        }
        for i in 0..MR {
            for j in 0..NV {
                let cp = c.add(i * ldc + 16 * j);
                let m = if !TAIL || j + 1 < NV { 0xffff } else { mask };
                let v = match into {
                    Into::Set => acc[i][j],
                    Into::Add => _mm512_add_ps(_mm512_maskz_loadu_ps(m, cp), acc[i][j]),
                };
                _mm512_mask_storeu_ps(cp, m, v);
            }
        }
    }
}

/// Terms summed in registers before they are added to C: keeps 64 KB of B in use, and the rounding error of a
/// long sum low.
const KC: usize = 256;

/// C (+)= A B on one thread, without packing: `m` × `k` by `k` × `n`.
///
/// `a(i, p)` lies at `a + i rsa + p csa`. Row `p` of the 64-column panel `j` of B lies at
/// `b + j panel + p ldb` (`panel` = 64 for a plain row-major matrix).
///
/// # Safety
/// AVX-512F is there, the three matrices are valid for those strides, and C overlaps neither A nor B.
#[target_feature(enable = "avx512f")]
#[allow(clippy::too_many_arguments)]
pub unsafe fn sgemm(
    (m, n, k): (usize, usize, usize),
    (a, rsa, csa): (*const f32, usize, usize),
    (b, ldb, panel): (*const f32, usize, usize),
    (c, ldc): (*mut f32, usize),
    into: Into,
) {
    macro_rules! rows {
        ($mr:expr, $nv:literal, $tail:literal, $($args:tt)*) => {
            match $mr {
                1 => tile::<1, $nv, $tail>($($args)*),
                2 => tile::<2, $nv, $tail>($($args)*),
                3 => tile::<3, $nv, $tail>($($args)*),
                4 => tile::<4, $nv, $tail>($($args)*),
                5 => tile::<5, $nv, $tail>($($args)*),
                _ => tile::<6, $nv, $tail>($($args)*),
            }
        };
    }
    let mut p0 = 0;
    // A product over no terms is zero and still has to be written.
    while p0 < k || (k == 0 && p0 == 0) {
        let left = k - p0;
        // The last two blocks share what is left, so that none is tiny.
        let kc = if left > KC && left < 2 * KC { left.div_ceil(2) } else { left.min(KC) };
        let into = if p0 > 0 { Into::Add } else { into };
        for j in (0..n).step_by(PANEL) {
            let width = (n - j).min(PANEL);
            let nv = width.div_ceil(16);
            let mask = lanes(width - 16 * (nv - 1));
            let mut i = 0;
            while i < m {
                // 32 rows go as 6 6 6 6 4 4 rather than 6 6 6 6 6 2.
                let mr = match m - i {
                    left @ 0..=6 => left,
                    left @ 7..=11 => left.div_ceil(2),
                    _ => 6,
                };
                // SAFETY: the tile lies within the matrices of the caller's promise.
                unsafe {
                    let av = (a.add(i * rsa + p0 * csa), rsa, csa);
                    let bv = (b.add(j / PANEL * panel + p0 * ldb), ldb);
                    let cv = (c.add(i * ldc + j), ldc);
                    match (nv, mask == 0xffff) {
                        (4, true) => rows!(mr, 4, false, kc, av, bv, cv, into, mask),
                        (3, true) => rows!(mr, 3, false, kc, av, bv, cv, into, mask),
                        (2, true) => rows!(mr, 2, false, kc, av, bv, cv, into, mask),
                        (_, true) => rows!(mr, 1, false, kc, av, bv, cv, into, mask),
                        (4, false) => rows!(mr, 4, true, kc, av, bv, cv, into, mask),
                        (3, false) => rows!(mr, 3, true, kc, av, bv, cv, into, mask),
                        (2, false) => rows!(mr, 2, true, kc, av, bv, cv, into, mask),
                        (_, false) => rows!(mr, 1, true, kc, av, bv, cv, into, mask),
                    }
                }
                i += mr;
            }
        }
        p0 += kc.max(1);
    }
}

/// The panels of B for [`sgemm`] from its transpose: `n` rows of `k` numbers, rows `stride` apart. Row `p` of panel `j`
/// lies at `(j k + p) 64`; of columns beyond `n` those in the same 16 are zero, the others are not written.
pub fn panels_of_transposed(_: Avx512, (n, k): (usize, usize), (rows, stride): (&[f32], usize)) -> Buf<f32> {
    assert!(n == 0 || k == 0 || rows.len() >= (n - 1) * stride + k, "matrix beyond its slice");
    let mut packed = Buf::dirty(n.div_ceil(PANEL) * k * PANEL);
    let out = Shared::new(&mut packed);
    // A task turns 16 columns of the panels; vectors of a panel that begin beyond `n` are never read.
    par(n.div_ceil(16), |task| {
        let n0 = task * 16;
        let to = n0 / PANEL * k * PANEL + n0 % PANEL;
        let height = (n - n0).min(16);
        for p in (0..k).step_by(16) {
            let width = (k - p).min(16);
            // SAFETY: AVX-512F is proved; the block lies inside both matrices; tasks write columns of their own.
            unsafe {
                if height == 16 && width == 16 {
                    transpose16(rows.as_ptr().add(n0 * stride + p), stride, out.at(to + p * PANEL), PANEL);
                    continue;
                }
                let (mut block, mut turned) = ([[0.0; 16]; 16], [[0.0; 16]; 16]);
                for (i, row) in block.iter_mut().take(height).enumerate() {
                    let at = (n0 + i) * stride + p;
                    row[..width].copy_from_slice(&rows[at..at + width]);
                }
                transpose16(block.as_ptr().cast(), 16, turned.as_mut_ptr().cast(), 16);
                for (q, row) in turned.iter().take(width).enumerate() {
                    out.slice(to + (p + q) * PANEL, 16).copy_from_slice(row);
                }
            }
        }
    });
    packed
}

/// Transposes a 16 × 16 block.
///
/// # Safety
/// AVX-512F is there; 16 rows of 16 floats are valid at `src` (`lds` apart) and `dst` (`ldd` apart).
#[inline]
#[target_feature(enable = "avx512f")]
pub unsafe fn transpose16(src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
    let zero = _mm512_setzero_ps();
    let mut r = [zero; 16];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: row `i` of the source.
        *r = unsafe { _mm512_loadu_ps(src.add(i * lds)) };
    }
    // Four stages that swap ever larger blocks: 1, 2, 4 and 8 columns.
    let mut t = [zero; 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let pd = |x| _mm512_castps_pd(x);
    for i in 0..4 {
        let (a, b, c, d) = (t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(a), pd(c)));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(a), pd(c)));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b), pd(d)));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b), pd(d)));
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_f32x4::<0x88>(r[i], r[4 + i]);
        t[4 + i] = _mm512_shuffle_f32x4::<0xdd>(r[i], r[4 + i]);
        t[8 + i] = _mm512_shuffle_f32x4::<0x88>(r[8 + i], r[12 + i]);
        t[12 + i] = _mm512_shuffle_f32x4::<0xdd>(r[8 + i], r[12 + i]);
    }
    for i in 0..4 {
        let (a, b, c, d) = (t[i], t[4 + i], t[8 + i], t[12 + i]);
        // SAFETY: rows `i`, `4 + i`, `8 + i` and `12 + i` of the destination.
        unsafe {
            _mm512_storeu_ps(dst.add(i * ldd), _mm512_shuffle_f32x4::<0x88>(a, c));
            _mm512_storeu_ps(dst.add((4 + i) * ldd), _mm512_shuffle_f32x4::<0x88>(b, d));
            _mm512_storeu_ps(dst.add((8 + i) * ldd), _mm512_shuffle_f32x4::<0xdd>(a, c));
            _mm512_storeu_ps(dst.add((12 + i) * ldd), _mm512_shuffle_f32x4::<0xdd>(b, d));
        }
    }
}
