//! The register tile of an element type.
use super::pack::{pack, pack_pairs};
use crate::Real;
use crate::simd::{Into, Simd, packed_tile, square_tiles, tile};
use std::fmt::Debug;

/// What a product asks of an element type and an instruction set.
pub trait Kernel: Copy + Debug + Send + Sync + 'static {
    /// The element type.
    type E: Real;
    /// The most rows of a tile.
    const ROWS: usize;
    /// The most columns of a tile.
    const PANEL: usize;
    /// Rows and columns of the blocks that are transposed at once; `PANEL` is a multiple of it.
    const LANES: usize;
    /// Terms of a sum in an element of the packed operands. With more than one, both are packed always.
    const TERMS: usize = 1;
    /// Terms that packed operands have a multiple of, the last ones zero.
    const STEP: usize = Self::TERMS;
    /// Rows of a tile that take as long as one.
    const ROUND: usize = 1;

    /// Terms summed in registers before they are added to C, at most: so many that C is seldom written, and no more, so that the
    /// rounding error stays low.
    const DEPTH: usize;

    /// Calls `f`, compiled for the instruction set. Mark the closure `#[inline(always)]`, or it is compiled on its own.
    fn run<R>(self, f: impl FnOnce() -> R) -> R;

    /// C (+)= A B over `k` terms, for a tile of rows and columns, at least one of each: `a(i, p)` lies at `a + i rsa + p csa`,
    /// rows of `b` are `ldb` apart, rows of `c` `ldc`. Each sum is in the order of its terms.
    ///
    /// # Safety
    /// All of these are valid, and C overlaps neither A nor B.
    unsafe fn tile(
        self,
        size: (usize, usize),
        k: usize,
        a: (*const Self::E, usize, usize),
        b: (*const Self::E, usize),
        c: (*mut Self::E, usize),
        into: Into,
    );

    /// Transposes a block of `LANES` × `LANES`, written row by row from the first on: rows may overlap.
    ///
    /// # Safety
    /// `LANES` rows of as many elements are valid at `src` (`lds` apart) and at `dst` (`ldd` apart).
    unsafe fn transpose(self, src: *const Self::E, lds: usize, dst: *mut Self::E, ldd: usize);

    /// Writes a panel of packed operands: element (i, p) of width × terms lies at `from.0 + i from.1 + p from.2`, one of the two
    /// strides is 1, and row q of the panel, at `to.0 + q to.1`, has [`Kernel::TERMS`] terms of each i.
    ///
    /// # Safety
    /// Those elements are valid, and so are those with i below `from.3`; all rows of `to.1`, at least the width, may be written.
    unsafe fn pack(
        self,
        size: (usize, usize),
        from: (*const Self::E, usize, usize, usize),
        to: (*mut Self::E, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe { pack(self, size, from, to) }
    }

    /// The same for a tile of rows of A, which are at most [`Kernel::ROWS`] and lie so far apart.
    ///
    /// # Safety
    /// As [`Kernel::pack`].
    unsafe fn pack_rows(
        self,
        size: (usize, usize),
        from: (*const Self::E, usize, usize, usize),
        to: (*mut Self::E, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe { self.pack(size, from, to) }
    }

    /// Asks for a cache line of f32 ahead of its use, which need not be valid.
    #[inline(always)]
    fn prefetch(self, _line: *const Self::E) {}
}

impl<S: Simd> Kernel for S {
    type E = f32;
    const ROWS: usize = S::SQUARE.0;
    const PANEL: usize = <S as Simd>::LANES * S::SQUARE.1;
    const LANES: usize = <S as Simd>::LANES;
    const TERMS: usize = <S as Simd>::TERMS;
    // A panel is 64 KB of f32 with AVX-512, which come from the L2 cache in time, and 32 KB with AVX2. The same with every set, so that
    // products of pairs have the same bits.
    const DEPTH: usize = 512;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        Simd::run(self, f)
    }

    #[inline(always)]
    unsafe fn tile(
        self,
        (rows, columns): (usize, usize),
        k: usize,
        a: (*const f32, usize, usize),
        b: (*const f32, usize),
        c: (*mut f32, usize),
        into: Into,
    ) {
        let vectors = columns.div_ceil(<S as Simd>::LANES);
        let last = columns - <S as Simd>::LANES * (vectors - 1);
        // SAFETY: the caller's promise.
        unsafe {
            if (a.1, a.2, b.1) == (1, rows, <Self as Kernel>::PANEL) {
                square_tiles!(packed_tile::<S>(rows, vectors)(self, k, a.0, b.0, c, into, last));
            } else {
                square_tiles!(tile::<S>(rows, vectors)(self, k, a, b, c, into, last));
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: the caller's promise.
        unsafe { Simd::transpose(self, src, lds, dst, ldd) }
    }

    unsafe fn pack(
        self,
        size: (usize, usize),
        from: (*const f32, usize, usize, usize),
        to: (*mut f32, usize),
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match <S as Simd>::TERMS {
                1 => pack(self, size, from, to),
                _ => pack_pairs(self, size, from, to),
            }
        }
    }

    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        self.prefetch_far(line);
    }
}

/// f64, for checks and for optimizers that ask for it: plain loops, compiled for the instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Doubles<S>(pub S);

impl<S: Simd> Kernel for Doubles<S> {
    type E = f64;
    const ROWS: usize = 4;
    const PANEL: usize = 8;
    const LANES: usize = 4;
    const DEPTH: usize = 256;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        Simd::run(self.0, f)
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    unsafe fn tile(
        self,
        (rows, columns): (usize, usize),
        k: usize,
        (a, rsa, csa): (*const f64, usize, usize),
        (b, ldb): (*const f64, usize),
        (c, ldc): (*mut f64, usize),
        into: Into,
    ) {
        let mut acc = [[0f64; 8]; 4];
        // SAFETY: the caller's promise; a whole tile, whose bounds the compiler knows, or a part of one.
        unsafe {
            if (rows, columns) == (4, 8) {
                for p in 0..k {
                    let row = b.add(p * ldb).cast::<[f64; 8]>().read_unaligned();
                    for i in 0..4 {
                        let x = *a.add(i * rsa + p * csa);
                        for j in 0..8 {
                            acc[i][j] += x * row[j];
                        }
                    }
                }
            } else {
                for p in 0..k {
                    for i in 0..rows {
                        for j in 0..columns {
                            acc[i][j] += *a.add(i * rsa + p * csa) * *b.add(p * ldb + j);
                        }
                    }
                }
            }
            for i in 0..rows {
                for j in 0..columns {
                    let to = c.add(i * ldc + j);
                    *to = if into == Into::Add { *to + acc[i][j] } else { acc[i][j] };
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose(self, src: *const f64, lds: usize, dst: *mut f64, ldd: usize) {
        for i in 0..4 {
            for j in 0..4 {
                // SAFETY: the caller's promise.
                unsafe { *dst.add(i * ldd + j) = *src.add(j * lds + i) };
            }
        }
    }
}
