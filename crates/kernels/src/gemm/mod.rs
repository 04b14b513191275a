//! Matrix products on slices, in parallel, with the same bits for any number of threads.
//!
//! `kernel.rs`: the register tile of an element type; `pack.rs`: operands in the order in which tiles read them; `blocks.rs`:
//! how a product is cut into tasks.
mod blocks;
mod kernel;
mod pack;
#[cfg(test)]
mod tests;

use super::{Arithmetic, Isa, Real, Shared, par, with_products, with_simd};
pub use kernel::{Doubles, Kernel};

/// A matrix in a slice: element (i, j) lies at `i rs + j cs`, and one of the two steps is 1.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    rs: usize,
    cs: usize,
}

impl<'a, T> Mat<'a, T> {
    /// A row-major matrix whose rows lie `stride` apart.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, stride: usize) -> Self {
        let needed = || rows.checked_sub(1)?.checked_mul(stride)?.checked_add(cols);
        assert!(
            rows == 0 || cols == 0 || needed().is_some_and(|needed| data.len() >= needed),
            "matrix beyond its slice"
        );
        Self { data, rows, cols, rs: stride, cs: 1 }
    }

    /// A row-major matrix without gaps.
    ///
    /// # Panics
    /// If the slice is too short.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// The transposed matrix, at no cost.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, rs: self.cs, cs: self.rs, ..self }
    }

    /// Some of its columns.
    fn columns(self, range: &std::ops::Range<usize>) -> Self {
        let first = (range.start * self.cs).min(self.data.len());
        Self { data: &self.data[first..], cols: range.len(), ..self }
    }

    /// The address of element (i, j), or of where a range of none begins.
    #[inline(always)]
    fn at(&self, i: usize, j: usize) -> *const T {
        self.data.as_ptr().wrapping_add(i * self.rs + j * self.cs)
    }
}

/// What A B is added to.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a, T> {
    /// Nothing: the result is not read.
    Zero,
    /// The result's old value.
    Old,
    /// This row, for every row of the result: a bias.
    Row(&'a [T]),
    /// A factor times a matrix.
    Times(T, Mat<'a, T>),
    /// A matrix and, for every row of it, this one: a residual and a bias.
    Plus(Mat<'a, T>, &'a [T]),
}

/// C = A B (`add` false) or C += A B, with C row-major, rows `ldc` apart.
///
/// # Panics
/// If the shapes do not fit or `c` is too short.
pub fn gemm<T: Real>(by: impl Into<Arithmetic>, a: Mat<T>, b: Mat<T>, c: &mut [T], ldc: usize, add: bool) {
    gemm_from(by, a, b, c, ldc, if add { Start::Old } else { Start::Zero });
}

/// C = A B and what it is added to, with C row-major, rows `ldc` apart.
///
/// # Panics
/// If the shapes do not fit or `c` is too short.
pub fn gemm_from<T: Real>(
    by: impl Into<Arithmetic>,
    a: Mat<T>,
    b: Mat<T>,
    c: &mut [T],
    ldc: usize,
    start: Start<T>,
) {
    let (m, n) = (a.rows, b.cols);
    assert!(ldc >= n && (m == 0 || n == 0 || c.len() >= (m - 1) * ldc + n), "result beyond its slice");
    // SAFETY: the extent of `c` has been checked, and it is borrowed mutably, so it overlaps neither operand.
    unsafe { multiply(by.into(), a, b, (c.as_mut_ptr(), ldc), start, Part::All) }
}

/// A B as a new row-major matrix.
///
/// # Panics
/// If the shapes do not fit.
pub fn product<T: Real>(by: impl Into<Arithmetic>, a: Mat<T>, b: Mat<T>) -> Vec<T> {
    product_from(by, a, b, Start::Zero)
}

/// A B and what it is added to, as a new row-major matrix.
///
/// # Panics
/// If the shapes do not fit, or for [`Start::Old`]: there is none.
pub fn product_from<T: Real>(by: impl Into<Arithmetic>, a: Mat<T>, b: Mat<T>, start: Start<T>) -> Vec<T> {
    assert!(!matches!(start, Start::Old), "a new matrix has no old value");
    let by = by.into();
    // SAFETY: without `Old` every element is written and none is read before.
    unsafe { new(a.rows, b.cols, |c| multiply(by, a, b, (c, b.cols), start, Part::All)) }
}

/// X Xᵀ as a new matrix: half of it is computed, the other half mirrored.
pub fn gram<T: Real>(by: impl Into<Arithmetic>, x: Mat<T>) -> Vec<T> {
    let (n, by) = (x.rows, by.into());
    let fill = |c: *mut T| {
        // SAFETY: `new` gives an n × n matrix; what lies on and below the diagonal is written first.
        unsafe { multiply(by, x, x.t(), (c, n), Start::Zero, Part::Lower) };
        mirror(Shared::at_address(c), n);
    };
    // SAFETY: every element is written, and read only afterwards.
    unsafe { new(n, n, fill) }
}

/// Copies what lies below the diagonal of an n × n matrix to above it.
fn mirror<T: Real>(c: Shared<T>, n: usize) {
    /// Rows and columns of a block: the lines of both stay in the cache.
    const BLOCK: usize = 32;
    let blocks = n.div_ceil(BLOCK);
    par(blocks, |block| {
        let rows = block * BLOCK..n.min((block + 1) * BLOCK);
        for left in (rows.start..n).step_by(BLOCK) {
            for i in rows.clone() {
                for j in left.max(i + 1)..n.min(left + BLOCK) {
                    // SAFETY: within the matrix; tasks write rows of their own, above the diagonal, and read below it.
                    unsafe { *c.at(i * n + j) = *c.at(j * n + i) };
                }
            }
        }
    });
}

/// A matrix that `fill` writes into memory that was never cleared: zeroing a gradient of megabytes first costs as much as one
/// more pass of the optimizer over it.
///
/// # Safety
/// `fill` writes all of the `rows` × `cols` elements and reads none of them before.
unsafe fn new<T: Real>(rows: usize, cols: usize, fill: impl FnOnce(*mut T)) -> Vec<T> {
    let len = rows * cols;
    let mut c: Vec<T> = Vec::with_capacity(len);
    if super::buffer::poisoned() {
        c.resize(len, T::from_f64(f64::NAN));
    }
    fill(c.as_mut_ptr());
    // SAFETY: `c` has room for `len` elements, all of which the caller's function has written.
    unsafe { c.set_len(len) };
    c
}

/// Which elements of the result are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All.
    All,
    /// Those on and below the diagonal; others may be written too.
    Lower,
}

/// C = A B and what it is added to.
///
/// # Panics
/// If the shapes do not fit.
///
/// # Safety
/// Rows of `b.cols` elements, `ldc` apart, are valid at `c` and overlap neither operand nor the start.
unsafe fn multiply<T: Real>(
    by: Arithmetic,
    a: Mat<T>,
    b: Mat<T>,
    c: (*mut T, usize),
    start: Start<T>,
    part: Part,
) {
    assert_eq!(a.cols, b.rows, "inner dimensions");
    match start {
        Start::Row(row) => assert_eq!(row.len(), b.cols, "length of the row to start from"),
        Start::Times(_, d) => assert_eq!((d.rows, d.cols), (a.rows, b.cols), "matrix to start from"),
        Start::Plus(d, row) => {
            assert_eq!((d.rows, d.cols, row.len()), (a.rows, b.cols, b.cols), "matrix to start from");
        }
        Start::Zero | Start::Old => {}
    }
    if a.rows == 0 || b.cols == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { T::multiply(by, a, b, c, start, part) }
}

/// [`Real::multiply`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn multiply_f32(
    by: Arithmetic,
    a: Mat<f32>,
    b: Mat<f32>,
    c: (*mut f32, usize),
    start: Start<f32>,
    part: Part,
) {
    if let Some(amx) = by.amx() {
        // SAFETY: the caller's promise.
        return unsafe { blocks::multiply(amx, &blocks::FAST, a, b, c, start, part) };
    }
    // SAFETY: the caller's promise.
    with_products!(by, s => unsafe {
        blocks::multiply(s, &blocks::limits(by.isa.lanes()), a, b, c, start, part)
    })
}

/// [`Real::multiply`].
///
/// # Safety
/// As there.
pub(crate) unsafe fn multiply_f64(
    by: Arithmetic,
    a: Mat<f64>,
    b: Mat<f64>,
    c: (*mut f64, usize),
    start: Start<f64>,
    part: Part,
) {
    // f64 has the same bits with every set: callers need not know which one serves it.
    let isa = Isa::detect().unwrap_or(by.isa);
    // SAFETY: the caller's promise.
    with_simd!(isa, s => unsafe { blocks::multiply(Doubles(s), &blocks::LIMITS, a, b, c, start, part) })
}
