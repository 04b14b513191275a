//! One small vector abstraction ([`Simd`]), what every kernel over it is built from, and its instances: AVX-512, AVX2 with
//! FMA, NEON, and plain Rust; and AMX, which multiplies matrices.
//!
//! A value of such a type is the proof that the CPU has the instructions; there is one way to come by it, [`Isa`]'s. Kernels
//! are `#[inline(always)]` functions of it, called inside [`Simd::run`], which is compiled for the instruction set.
//!
//! The product is one register tile of six rows. A is broadcast from memory, element by element, so it needs no packing while
//! its lines stay in the L1 cache, and a transposed A is only a change of strides. B must have contiguous rows of at least the
//! tile's width.
//!
//! [`Isa`]: super::Isa
#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
pub mod amx;
#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod pairs;
pub mod portable;

use super::{Buf, Shared, par};
use std::fmt::Debug;

/// The most lanes a vector has.
pub(crate) const MOST_LANES: usize = 16;

/// Vectors of f32, and the proof that this CPU has them.
pub trait Simd: Copy + Debug + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// Its lanes.
    const LANES: usize;
    /// Vectors in a row of a register tile of six rows: as many as the registers hold beside a row of B and a broadcast.
    const VECTORS: usize;
    /// Columns of a full register tile.
    const PANEL: usize = Self::LANES * Self::VECTORS;
    /// Rows and vectors of the tile of products with packed operands: as square as it can be, so that a panel of B stays in
    /// the L1 cache.
    const SQUARE: (usize, usize) = (6, Self::VECTORS);
    /// Terms of a sum that a lane of packed operands holds: one, or a pair of bf16 ([`pairs::Pairs`]).
    const TERMS: usize = 1;

    /// Calls `f`, compiled for these vectors. Mark the closure `#[inline(always)]`, or it is compiled on its own.
    fn run<R>(self, f: impl FnOnce() -> R) -> R;

    /// All lanes zero.
    fn zero(self) -> Self::V;
    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// a + b.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a − b.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c, rounded once where the CPU can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// c and the products of the terms that the lanes of a and b hold, added one after another.
    #[inline(always)]
    fn accumulate(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        self.fma(a, b, c)
    }
    /// The upper halves of all lanes, and the lower ones, as the bf16 that they are.
    fn halves(self, v: Self::V) -> (Self::V, Self::V);
    /// c + the upper halves of a and b multiplied, rounded, + the lower ones multiplied, rounded. A product of two bf16 is exact
    /// in f32, so that every CPU has the same bits, fused or not (but for numbers below the least normal one, which the instruction
    /// for it takes for zero).
    #[inline(always)]
    fn dot(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        let ((a0, a1), (b0, b1)) = (self.halves(a), self.halves(b));
        self.fma(a1, b1, self.fma(a0, b0, c))
    }

    /// [`pairs::pair_rows`].
    #[inline(always)]
    fn pair_rows(self, to: &mut [f32], first: &[f32], second: Option<&[f32]>) {
        pairs::pair_rows(to, first, second);
    }
    /// [`pairs::pair_terms`].
    #[inline(always)]
    fn pair_terms(self, to: &mut [f32], terms: &[f32]) {
        pairs::pair_terms(to, terms);
    }

    /// a / b.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `yes` in the lanes where a < b, `no` in the others and where one of the two is NaN.
    fn where_below(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// 2ⁿ of each lane 1.5·2²³ + n, for −127 < n < 128: n stands in the low bits of such a sum.
    fn power_of_two(self, sum: Self::V) -> Self::V;
    /// Asks for the cache line at `line`, which need not be valid, ahead of its use.
    #[inline(always)]
    fn prefetch(self, _line: *const f32) {}
    /// The same, but only into the L2 cache.
    #[inline(always)]
    fn prefetch_far(self, _line: *const f32) {}

    /// A whole vector.
    ///
    /// # Safety
    /// `LANES` floats are valid at `from`.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// A whole vector.
    ///
    /// # Safety
    /// `LANES` floats are valid at `to`.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// The first `n` lanes, at least one; all of them if `n` is larger. The others are zero.
    ///
    /// # Safety
    /// As many floats are valid at `from`.
    unsafe fn load_part(self, from: *const f32, n: usize) -> Self::V;
    /// The first `n` lanes, at least one; all of them if `n` is larger.
    ///
    /// # Safety
    /// As many floats are valid at `to`.
    unsafe fn store_part(self, to: *mut f32, n: usize, v: Self::V);

    /// The first `n` lanes, `stride` floats apart; the others are zero.
    ///
    /// # Safety
    /// Those floats are valid.
    #[inline(always)]
    unsafe fn gather(self, from: *const f32, stride: usize, n: usize) -> Self::V {
        let mut lanes = [0.0; MOST_LANES];
        if n >= Self::LANES {
            // A case of its own: without a variable number of rounds it never leaves the registers.
            for (i, lane) in lanes[..Self::LANES].iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                *lane = unsafe { *from.add(i * stride) };
            }
        } else {
            for (i, lane) in lanes[..n].iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                *lane = unsafe { *from.add(i * stride) };
            }
        }
        // SAFETY: the array holds every vector.
        unsafe { self.load(lanes.as_ptr()) }
    }

    /// The first `n` lanes, `stride` floats apart.
    ///
    /// # Safety
    /// Those floats are valid.
    #[inline(always)]
    unsafe fn scatter(self, to: *mut f32, stride: usize, n: usize, v: Self::V) {
        let mut lanes = [0.0; MOST_LANES];
        // SAFETY: the array holds every vector; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr(), v);
            for (i, lane) in lanes[..n.min(Self::LANES)].iter().enumerate() {
                *to.add(i * stride) = *lane;
            }
        }
    }

    /// Transposes a block of `LANES` × `LANES`: all is read, then written row by row from the first on, for rows may overlap.
    ///
    /// # Safety
    /// `LANES` rows of as many floats are valid at `src` (`lds` apart) and at `dst` (`ldd` apart).
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        for i in 0..Self::LANES {
            for j in 0..Self::LANES {
                // SAFETY: the caller's promise.
                unsafe { *dst.add(i * ldd + j) = *src.add(j * lds + i) };
            }
        }
    }
}

/// What to do with the old value of C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// C = A B.
    Set,
    /// C += A B.
    Add,
}

/// Calls `$f::<S, rows, vectors>` for a tile of up to six rows and up to `S::VECTORS` vectors: a constant instance of each.
macro_rules! tiles {
    ($f:ident::<$s:ident>($rows:expr, $vectors:expr)($($args:expr),* $(,)?)) => {
        match ($rows, $vectors) {
            (1, 1) => $f::<$s, 1, 1>($($args),*),
            (2, 1) => $f::<$s, 2, 1>($($args),*),
            (3, 1) => $f::<$s, 3, 1>($($args),*),
            (4, 1) => $f::<$s, 4, 1>($($args),*),
            (5, 1) => $f::<$s, 5, 1>($($args),*),
            (6, 1) => $f::<$s, 6, 1>($($args),*),
            (1, 2) => $f::<$s, 1, 2>($($args),*),
            (2, 2) => $f::<$s, 2, 2>($($args),*),
            (3, 2) => $f::<$s, 3, 2>($($args),*),
            (4, 2) => $f::<$s, 4, 2>($($args),*),
            (5, 2) => $f::<$s, 5, 2>($($args),*),
            (6, 2) => $f::<$s, 6, 2>($($args),*),
            // Never reached, and not even compiled, where a tile has two vectors.
            (rows, vectors) => {
                if $s::VECTORS > 2 {
                    match (rows, vectors) {
                        (1, 3) => $f::<$s, 1, 3>($($args),*),
                        (2, 3) => $f::<$s, 2, 3>($($args),*),
                        (3, 3) => $f::<$s, 3, 3>($($args),*),
                        (4, 3) => $f::<$s, 4, 3>($($args),*),
                        (5, 3) => $f::<$s, 5, 3>($($args),*),
                        (6, 3) => $f::<$s, 6, 3>($($args),*),
                        (1, _) => $f::<$s, 1, 4>($($args),*),
                        (2, _) => $f::<$s, 2, 4>($($args),*),
                        (3, _) => $f::<$s, 3, 4>($($args),*),
                        (4, _) => $f::<$s, 4, 4>($($args),*),
                        (5, _) => $f::<$s, 5, 4>($($args),*),
                        (_, _) => $f::<$s, 6, 4>($($args),*),
                    }
                }
            }
        }
    };
}

/// [`tiles`] for tiles of up to twelve rows, which have up to two vectors.
macro_rules! square_tiles {
    ($f:ident::<$s:ident>($rows:expr, $vectors:expr)($($args:tt)*)) => {
        match ($rows, $vectors) {
            // Never reached, and not even compiled, where tiles have six rows.
            (rows @ 7.., vectors) => {
                if $s::SQUARE.0 > 6 {
                    match (rows, vectors) {
                        (7, 1) => $f::<$s, 7, 1>($($args)*),
                        (8, 1) => $f::<$s, 8, 1>($($args)*),
                        (9, 1) => $f::<$s, 9, 1>($($args)*),
                        (10, 1) => $f::<$s, 10, 1>($($args)*),
                        (11, 1) => $f::<$s, 11, 1>($($args)*),
                        (_, 1) => $f::<$s, 12, 1>($($args)*),
                        (7, _) => $f::<$s, 7, 2>($($args)*),
                        (8, _) => $f::<$s, 8, 2>($($args)*),
                        (9, _) => $f::<$s, 9, 2>($($args)*),
                        (10, _) => $f::<$s, 10, 2>($($args)*),
                        (11, _) => $f::<$s, 11, 2>($($args)*),
                        (_, _) => $f::<$s, 12, 2>($($args)*),
                    }
                }
            }
            (rows, vectors) => $crate::simd::tiles!($f::<$s>(rows, vectors)($($args)*)),
        }
    };
}
pub(crate) use square_tiles;
pub(crate) use tiles;

/// Rows of the next tile when `left` are left: 32 go as 6 6 6 6 4 4 rather than 6 6 6 6 6 2.
#[inline(always)]
pub fn tile_rows(left: usize) -> usize {
    match left {
        0..=6 => left,
        7..=11 => left.div_ceil(2),
        _ => 6,
    }
}

/// A tile of `MR` rows and `NV` vectors of columns: C (+)= A B over `k` terms. `columns` of the last vector count; a ragged
/// one is an instance of its own, for masks in the common case cost a third of the speed at 64 channels.
///
/// # Safety
/// `a(i, p)` at `a + i rsa + p csa`, rows of `b` `ldb` apart and rows of `c` `ldc` apart are valid for the tile (its last
/// vector only in `columns`).
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    k: usize,
    a: (*const f32, usize, usize),
    b: (*const f32, usize),
    c: (*mut f32, usize),
    into: Into,
    columns: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { tile_ahead::<S, MR, NV, 0>(s, k, a, b, c, into, columns) }
}

/// Elements of a packed A between the term that a tile multiplies and the one that it asks for: a tile of A comes from the L2 cache
/// for every panel, and the CPU by itself is late where that cache is busy.
const AHEAD: usize = 128;

/// [`tile`] of packed operands, `a(i, p)` at `a + p MR + i` and rows of `b` one after another: strides that the compiler knows
/// leave only loads and multiply-adds in its loop.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
pub(super) unsafe fn packed_tile<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    k: usize,
    a: *const f32,
    b: *const f32,
    c: (*mut f32, usize),
    into: Into,
    columns: usize,
) {
    let b = (b, S::LANES * S::SQUARE.1);
    // SAFETY: the caller's promise.
    unsafe { tile_ahead::<S, MR, NV, AHEAD>(s, k, (a, 1, MR), b, c, into, columns) }
}

/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn tile_ahead<S: Simd, const MR: usize, const NV: usize, const AHEAD: usize>(
    s: S,
    k: usize,
    a: (*const f32, usize, usize),
    b: (*const f32, usize),
    c: (*mut f32, usize),
    into: Into,
    columns: usize,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match columns == S::LANES {
            true => masked_tile::<S, MR, NV, AHEAD, false>(s, k, a, b, c, into, columns),
            false => masked_tile::<S, MR, NV, AHEAD, true>(s, k, a, b, c, into, columns),
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn masked_tile<S: Simd, const MR: usize, const NV: usize, const AHEAD: usize, const TAIL: bool>(
    s: S,
    k: usize,
    (a, rsa, csa): (*const f32, usize, usize),
    (b, ldb): (*const f32, usize),
    (c, ldc): (*mut f32, usize),
    into: Into,
    columns: usize,
) {
    let mut acc = [[s.zero(); NV]; MR];
    // A pointer for each row and one offset for all: stepping from row to row would be a chain as long as the multiply-adds.
    let rows: [*const f32; MR] = std::array::from_fn(|i| a.wrapping_add(i * rsa));
    let (mut offset, mut bp) = (0, b);
    // They arrive while the terms are summed.
    for i in 0..MR {
        s.prefetch(c.wrapping_add(i * ldc));
        s.prefetch(c.wrapping_add(i * ldc + S::LANES * NV - 1));
    }
    // SAFETY: the caller's promise covers every address formed here; `wrapping_add` because the last step of a
    // pointer may lie beyond the matrix.
    unsafe {
        for _ in 0..k {
            if AHEAD > 0 {
                s.prefetch(rows[0].wrapping_add(offset + AHEAD));
            }
            let mut bv = [s.zero(); NV];
            for j in 0..NV {
                let p = bp.add(S::LANES * j);
                bv[j] = if TAIL && j + 1 == NV { s.load_part(p, columns) } else { s.load(p) };
            }
            for i in 0..MR {
                let av = s.splat(*rows[i].add(offset));
                for j in 0..NV {
                    acc[i][j] = s.accumulate(av, bv[j], acc[i][j]);
                }
            }
            offset += csa;
            bp = bp.wrapping_add(ldb);
        }
        for i in 0..MR {
            for j in 0..NV {
                let p = c.add(i * ldc + S::LANES * j);
                let n = if TAIL && j + 1 == NV { columns } else { S::LANES };
                write(s, p, n, acc[i][j], into);
            }
        }
    }
}

/// The first `n` lanes, at least one; the others are zero.
///
/// # Safety
/// As many floats are valid at `from`.
#[inline(always)]
pub unsafe fn read<S: Simd>(s: S, from: *const f32, n: usize) -> S::V {
    // SAFETY: the caller's promise.
    unsafe { if n == S::LANES { s.load(from) } else { s.load_part(from, n) } }
}

/// Sets `n` floats at `to`, or adds to them.
///
/// # Safety
/// They are valid.
#[inline(always)]
pub unsafe fn write<S: Simd>(s: S, to: *mut f32, n: usize, v: S::V, into: Into) {
    // SAFETY: the caller's promise.
    unsafe {
        match (into, n == S::LANES) {
            (Into::Set, true) => s.store(to, v),
            (Into::Add, true) => s.store(to, s.add(s.load(to), v)),
            (Into::Set, false) => s.store_part(to, n, v),
            (Into::Add, false) => s.store_part(to, n, s.add(s.load_part(to, n), v)),
        }
    }
}

/// Terms summed in registers before they are added to C: keeps the rows of B in use in the L1 or L2 cache, and the rounding
/// error of a long sum low.
const KC: usize = 256;

/// C (+)= A B on one thread, without packing: `m` × `k` by `k` × `n`.
///
/// `a(i, p)` lies at `a + i rsa + p csa`. Row `p` of panel `j` of B, `S::PANEL` columns, lies at `b + j panel + p ldb`
/// (`panel` = `S::PANEL` for a plain row-major matrix).
///
/// # Safety
/// The three matrices are valid for those strides, and C overlaps neither A nor B.
pub unsafe fn sgemm<S: Simd>(
    s: S,
    sizes: (usize, usize, usize),
    a: (*const f32, usize, usize),
    b: (*const f32, usize, usize),
    c: (*mut f32, usize),
    into: Into,
) {
    s.run(
        #[inline(always)]
        || {
            // SAFETY: the caller's promise.
            unsafe { sgemm_blocks(s, sizes, a, b, c, into) }
        },
    )
}

/// # Safety
/// As [`sgemm`].
#[inline(always)]
unsafe fn sgemm_blocks<S: Simd>(
    s: S,
    (m, n, k): (usize, usize, usize),
    (a, rsa, csa): (*const f32, usize, usize),
    (b, ldb, panel): (*const f32, usize, usize),
    (c, ldc): (*mut f32, usize),
    into: Into,
) {
    let mut p0 = 0;
    // A product over no terms is zero and still has to be written.
    while p0 < k || (k == 0 && p0 == 0) {
        let left = k - p0;
        // The last two blocks share what is left, so that none is tiny.
        let kc = if left > KC && left < 2 * KC { left.div_ceil(2) } else { left.min(KC) };
        let into = if p0 > 0 { Into::Add } else { into };
        for j in (0..n).step_by(S::PANEL) {
            let width = (n - j).min(S::PANEL);
            let nv = width.div_ceil(S::LANES);
            let columns = width - S::LANES * (nv - 1);
            let mut i = 0;
            while i < m {
                let mr = tile_rows(m - i);
                // SAFETY: the tile lies within the matrices of the caller's promise.
                unsafe {
                    let av = (a.add(i * rsa + p0 * csa), rsa, csa);
                    let bv = (b.add(j / S::PANEL * panel + p0 * ldb), ldb);
                    let cv = (c.add(i * ldc + j), ldc);
                    tiles!(tile::<S>(mr, nv)(s, kc, av, bv, cv, into, columns));
                }
                i += mr;
            }
        }
        p0 += kc.max(1);
    }
}

/// The panels of B for [`sgemm`] from its transpose: `n` rows of `k` numbers, rows `stride` apart. Row `p` of panel `j`
/// lies at `(j k + p) PANEL`; of columns beyond `n` those in the same vector are zero, the others are not written.
pub fn panels_of_transposed<S: Simd>(
    s: S,
    (n, k): (usize, usize),
    (rows, stride): (&[f32], usize),
) -> Buf<f32> {
    assert!(n == 0 || k == 0 || rows.len() >= (n - 1) * stride + k, "matrix beyond its slice");
    let lanes = S::LANES;
    let mut packed = Buf::dirty(n.div_ceil(S::PANEL) * k * S::PANEL);
    let out = Shared::new(&mut packed);
    // A task turns one vector of columns; vectors of a panel that begin beyond `n` are never read.
    let turn = |task: usize| {
        let n0 = task * lanes;
        let to = n0 / S::PANEL * k * S::PANEL + n0 % S::PANEL;
        let height = (n - n0).min(lanes);
        for p in (0..k).step_by(lanes) {
            let width = (k - p).min(lanes);
            // SAFETY: the block lies inside both matrices; tasks write columns of their own.
            unsafe {
                if height == lanes && width == lanes {
                    let from = rows.as_ptr().add(n0 * stride + p);
                    s.transpose(from, stride, out.at(to + p * S::PANEL), S::PANEL);
                    continue;
                }
                let (mut block, mut turned) =
                    ([0.0; MOST_LANES * MOST_LANES], [0.0; MOST_LANES * MOST_LANES]);
                for (i, row) in block.chunks_exact_mut(lanes).take(height).enumerate() {
                    let at = (n0 + i) * stride + p;
                    row[..width].copy_from_slice(&rows[at..at + width]);
                }
                s.transpose(block.as_ptr(), lanes, turned.as_mut_ptr(), lanes);
                for (q, row) in turned.chunks_exact(lanes).take(width).enumerate() {
                    out.slice(to + (p + q) * S::PANEL, lanes).copy_from_slice(row);
                }
            }
        }
    };
    par(n.div_ceil(lanes), |task| {
        s.run(
            #[inline(always)]
            || turn(task),
        )
    });
    packed
}
