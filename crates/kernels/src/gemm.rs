//! Matrix products on slices, in parallel, with the same bits for any number of threads.
use super::simd::{Into, Simd, panels_of_transposed, sgemm};
use super::{Isa, Real, Shared, as_f32, par, with_simd};

/// A matrix in a slice: element (i, j) lies at `i rs + j cs`.
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
        assert!(
            rows == 0 || cols == 0 || data.len() >= (rows - 1) * stride + cols,
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
}

/// C = A B (`add` false) or C += A B, with C row-major, rows `ldc` apart.
///
/// # Panics
/// If the shapes do not fit or `c` is too short.
pub fn gemm<T: Real>(isa: Isa, a: Mat<T>, b: Mat<T>, c: &mut [T], ldc: usize, add: bool) {
    let (m, n) = (a.rows, b.cols);
    assert!(ldc >= n && (m == 0 || n == 0 || c.len() >= (m - 1) * ldc + n), "result beyond its slice");
    // SAFETY: the extent of `c` has been checked, and it is borrowed mutably, so it overlaps neither operand.
    unsafe { multiply(isa, a, b, (c.as_mut_ptr(), ldc), add) }
}

/// A B as a new row-major matrix.
///
/// It is written into memory that was never cleared: zeroing a gradient of megabytes first costs as much as one more pass
/// of the optimizer over it.
///
/// # Panics
/// If the shapes do not fit.
pub fn product<T: Real>(isa: Isa, a: Mat<T>, b: Mat<T>) -> Vec<T> {
    let len = a.rows * b.cols;
    let mut c: Vec<T> = Vec::with_capacity(len);
    if super::buffer::poisoned() {
        c.resize(len, T::from_f64(f64::NAN));
    }
    // SAFETY: `c` has room for `len` elements, every one of which is written and none of which is read before.
    unsafe {
        multiply(isa, a, b, (c.as_mut_ptr(), b.cols), false);
        c.set_len(len);
    }
    c
}

/// C = A B, which does not read C, or C += A B.
///
/// # Panics
/// If the shapes do not fit.
///
/// # Safety
/// Rows of `b.cols` elements, `ldc` apart, are valid at `c` and overlap neither operand.
unsafe fn multiply<T: Real>(isa: Isa, a: Mat<T>, b: Mat<T>, (c, ldc): (*mut T, usize), add: bool) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    assert_eq!(k, b.rows, "inner dimensions");
    if m == 0 || n == 0 {
        return;
    }
    // The crate takes the best instructions of the CPU: where poorer ones are asked for, every product is ours.
    let forced = isa < Isa::best();
    if T::IS_F32 && (forced || isa != Isa::PORTABLE && fits(m, n, k)) {
        let (am, bm) = ((as_f32(a.data), a.rs, a.cs), as_f32(b.data));
        let cm = (c.cast::<f32>(), ldc);
        // SAFETY: the constructors of `Mat` have checked A and B, the caller promises C, and T is f32.
        let done = with_simd!(isa, s => unsafe { own(s, (m, n, k), am, (bm, b.rs, b.cs), cm, add, forced) });
        if done {
            return;
        }
    }
    let parallelism = if m * n * k < 200_000 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(0) };
    // SAFETY: the constructors of `Mat` have checked every extent of A and B, and the caller promises C's. Without `add`
    // C is not read.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            ldc as isize,
            add,
            a.data.as_ptr(),
            a.cs as isize,
            a.rs as isize,
            b.data.as_ptr(),
            b.cs as isize,
            b.rs as isize,
            if add { T::ONE } else { T::ZERO },
            T::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Whether our kernel, which does not pack, beats the `gemm` crate: while B stays in the cache.
fn fits(m: usize, n: usize, k: usize) -> bool {
    n * k <= 1 << 19 && m * k <= 1 << 21
}

/// C (+)= A B by our own kernel, if B lies by rows, or by columns and is worth turning or has to be.
///
/// # Safety
/// The three matrices are valid for those strides, and C overlaps neither A nor B.
#[allow(clippy::too_many_arguments)]
unsafe fn own<S: Simd>(
    s: S,
    (m, n, k): (usize, usize, usize),
    a: (&[f32], usize, usize),
    (b, rsb, csb): (&[f32], usize, usize),
    c: (*mut f32, usize),
    add: bool,
    always: bool,
) -> bool {
    if csb == 1 {
        // SAFETY: the caller's promise.
        unsafe { blocked(s, (m, n, k), a, (b, rsb, S::PANEL), c, add) };
        return true;
    }
    // Turning B costs as much as a few rows of the product.
    if rsb == 1 && (always || m >= 16) {
        let packed = panels_of_transposed(s, (n, k), (b, csb));
        // SAFETY: as above.
        unsafe { blocked(s, (m, n, k), a, (&packed, S::PANEL, k * S::PANEL), c, add) };
        return true;
    }
    false
}

/// The kernel over blocks of rows and of 64 columns.
///
/// # Safety
/// The three matrices are valid for those strides, and C overlaps neither A nor B.
unsafe fn blocked<S: Simd>(
    s: S,
    (m, n, k): (usize, usize, usize),
    (a, rsa, csa): (&[f32], usize, usize),
    (b, ldb, panel): (&[f32], usize, usize),
    (c, ldc): (*mut f32, usize),
    add: bool,
) {
    /// Columns of a task.
    const COLUMNS: usize = 64;
    let into = if add { Into::Add } else { Into::Set };
    if m * n * k < 200_000 {
        // SAFETY: the caller's promise.
        return unsafe {
            sgemm(s, (m, n, k), (a.as_ptr(), rsa, csa), (b.as_ptr(), ldb, panel), (c, ldc), into)
        };
    }
    // About two blocks of rows when there are few.
    let block = if m >= 192 { 96 } else { m.div_ceil(12) * 6 };
    let (blocks, panels) = (m.div_ceil(block), n.div_ceil(COLUMNS));
    let c = Shared::at_address(c);
    par(blocks * panels, |task| {
        let (i, j) = (task % blocks * block, task / blocks * COLUMNS);
        // SAFETY: as above; every task writes a block of C of its own.
        unsafe {
            sgemm(
                s,
                (block.min(m - i), COLUMNS.min(n - j), k),
                (a.as_ptr().add(i * rsa), rsa, csa),
                (b.as_ptr().add(j / S::PANEL * panel), ldb, panel),
                (c.at(i * ldc + j), ldc),
                into,
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers<T: Real>(n: usize, salt: usize) -> Vec<T> {
        (0..n).map(|i| T::from_f64(((i * 7919 + salt * 104_729) % 1009) as f64 / 1009.0 - 0.5)).collect()
    }

    fn check<T: Real>(isa: Isa, (m, n, k): (usize, usize, usize), ta: bool, tb: bool, add: bool) {
        let (a, b): (Vec<T>, Vec<T>) = (numbers(m * k, 1), numbers(k * n, 2));
        let ldc = n + 3;
        let start: Vec<T> = numbers(m * ldc, 3);
        let mut c = start.clone();
        let am = if ta { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
        let bm = if tb { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
        gemm(isa, am, bm, &mut c, ldc, add);
        let eps = if T::IS_F32 { f32::EPSILON as f64 } else { f64::EPSILON };
        for i in 0..m {
            for j in 0..ldc {
                let old = start[i * ldc + j].to_f64();
                let got = c[i * ldc + j].to_f64();
                if j >= n {
                    assert_eq!(got, old, "a gap was written");
                    continue;
                }
                let term = |p: usize| {
                    let x = if ta { a[p * m + i] } else { a[i * k + p] }.to_f64();
                    let y = if tb { b[j * k + p] } else { b[p * n + j] }.to_f64();
                    x * y
                };
                let want = (0..k).map(term).sum::<f64>() + if add { old } else { 0.0 };
                // The worst case of a sum of k products of numbers below one half.
                let limit = eps * (k as f64 + 2.0) * 0.25 * (k as f64 + 2.0).max(2.0);
                assert!((got - want).abs() <= limit, "{m}x{n}x{k} {i},{j}: {got} {want}");
            }
        }
    }

    #[test]
    fn a_new_matrix_holds_the_same() {
        for (m, n, k) in [(3, 5, 2), (700, 450, 3), (700, 450, 0)] {
            let (a, b): (Vec<f32>, Vec<f32>) = (numbers(m * k, 1), numbers(k * n, 2));
            let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, n, k).t());
            let mut c = vec![1.0; m * n];
            gemm(Isa::detect().unwrap(), a, b, &mut c, n, false);
            assert_eq!(product(Isa::detect().unwrap(), a, b), c);
        }
    }

    #[test]
    fn products_match_a_double_sum_for_every_shape_path_and_transpose() {
        let shapes = [
            (1, 1, 1),
            (5, 17, 3),
            (7, 64, 300),
            (13, 65, 64),
            (100, 100, 100),
            (193, 130, 70),
            (33, 90, 150),
            (3, 5, 0),
        ];
        for shape in shapes {
            for flags in 0..8 {
                let (ta, tb, add) = (flags & 1 > 0, flags & 2 > 0, flags & 4 > 0);
                for isa in Isa::available() {
                    check::<f32>(isa, shape, ta, tb, add);
                    check::<f64>(isa, shape, ta, tb, add);
                }
            }
        }
    }
}
