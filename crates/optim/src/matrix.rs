//! Matrices for rules that need them: products, the Newton–Schulz iteration, eigenvectors, orthonormal bases.
//!
//! On the CPU all have the same bits for any number of threads: products are those of `taper-kernels`, and the factorisations are
//! ours, in f64.
use crate::Result;
use candle_core::{CpuStorage, DType, Device, Storage, Tensor, WithDType};
use rayon::prelude::*;
use taper_kernels::gemm::{Mat, Start, gram, product_from};
use taper_kernels::{Isa, Real};

/// Work of fewer operations is not worth a second thread.
const SERIAL: usize = 200_000;

/// A transposed or not, times B transposed or not: both of rank 2 and of one dtype.
pub(crate) fn product((a, at): (&Tensor, bool), (b, bt): (&Tensor, bool)) -> Result<Tensor> {
    let turned = |t: &Tensor, turn: bool| if turn { t.t() } else { Ok(t.clone()) };
    if !a.device().is_cpu() {
        return Ok(turned(a, at)?.contiguous()?.matmul(&turned(b, bt)?.contiguous()?)?);
    }
    fn typed<F: Real + WithDType>(
        (a, at): (&Tensor, bool),
        (b, bt): (&Tensor, bool),
    ) -> Result<Option<Tensor>> {
        let (a, b) = (a.contiguous()?, b.contiguous()?);
        let ((rows_a, cols_a), (rows_b, cols_b)) = (a.dims2()?, b.dims2()?);
        let ((inner, rows), (other, columns)) = (
            if at { (rows_a, cols_a) } else { (cols_a, rows_a) },
            if bt { (cols_b, rows_b) } else { (rows_b, cols_b) },
        );
        let ((a_storage, a_layout), (b_storage, b_layout)) = (a.storage_and_layout(), b.storage_and_layout());
        let (Some(a), Some(b)) = (slice::<F>(&a_storage, a_layout)?, slice::<F>(&b_storage, b_layout)?)
        else {
            return Ok(None);
        };
        // What does not fit is left to candle, which says so.
        if inner != other {
            return Ok(None);
        }
        let (a, b) = (Mat::new(a, rows_a, cols_a), Mat::new(b, rows_b, cols_b));
        let (a, b) = (if at { a.t() } else { a }, if bt { b.t() } else { b });
        let c = product_from(Isa::detect()?, a, b, Start::Zero);
        Ok(Some(Tensor::from_vec(c, (rows, columns), &Device::Cpu)?))
    }
    let ours = match a.dtype() {
        DType::F64 => typed::<f64>((a, at), (b, bt))?,
        _ => typed::<f32>((a, at), (b, bt))?,
    };
    match ours {
        Some(product) => Ok(product),
        None => Ok(turned(a, at)?.contiguous()?.matmul(&turned(b, bt)?.contiguous()?)?),
    }
}

fn slice<'a, F: WithDType>(storage: &'a Storage, layout: &candle_core::Layout) -> Result<Option<&'a [F]>> {
    Ok(match (storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Some(&CpuStorage::as_slice::<F>(storage)?[start..end]),
        _ => None,
    })
}

/// `steps` times X ← a X + (b A + c A A) X with A = X Xᵀ, from a matrix whose norm is at most 1.
pub(crate) fn newton_schulz(x: &Tensor, [a, b, c]: [f64; 3], steps: usize) -> Result<Tensor> {
    let (rows, cols) = x.dims2()?;
    // The smaller Gram matrix: singular values are the same.
    if rows > cols {
        return Ok(newton_schulz(&x.t()?.contiguous()?, [a, b, c], steps)?.t()?.contiguous()?);
    }
    fn typed<F: Real + WithDType>(x: &Tensor, [a, b, c]: [f64; 3], steps: usize) -> Result<Tensor> {
        let (isa, (n, m)) = (Isa::detect()?, x.dims2()?);
        let [a, b, c] = [a, b, c].map(<F as Real>::from_f64);
        let mut x = x.flatten_all()?.to_vec1::<F>()?;
        for _ in 0..steps {
            let old = Mat::new(&x, n, m);
            let squares = gram(isa, old);
            let scaled: Vec<F> = squares.iter().map(|g| c * *g).collect();
            let squares = Mat::new(&squares, n, n);
            // b A + c A A is symmetric too, but its product is a tenth of the work.
            let poly = product_from(isa, Mat::new(&scaled, n, n), squares, Start::Times(b, squares));
            x = product_from(isa, Mat::new(&poly, n, n), old, Start::Times(a, old));
        }
        Ok(Tensor::from_vec(x, (n, m), &Device::Cpu)?)
    }
    match (x.device().is_cpu(), x.dtype()) {
        (true, DType::F64) => typed::<f64>(x, [a, b, c], steps),
        (true, DType::F32) => typed::<f32>(x, [a, b, c], steps),
        _ => {
            let mut x = x.clone();
            for _ in 0..steps {
                let gram = x.matmul(&x.t()?.contiguous()?)?;
                let poly = ((&gram * b)? + (gram.matmul(&gram)? * c)?)?;
                x = ((&x * a)? + poly.matmul(&x)?)?;
            }
            Ok(x)
        }
    }
}

/// The elements of a matrix in f64, row by row.
fn read(matrix: &Tensor) -> Result<Vec<f64>> {
    Ok(matrix.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// Columns as a matrix like `like`.
fn write(columns: Vec<f64>, n: usize, like: &Tensor) -> Result<Tensor> {
    let rows = Tensor::from_vec(columns, (n, n), &Device::Cpu)?.t()?.contiguous()?;
    Ok(rows.to_dtype(like.dtype())?.to_device(like.device())?)
}

/// The eigenvectors of a symmetric matrix as columns, that of the largest eigenvalue first.
pub(crate) fn eigenvectors(matrix: &Tensor) -> Result<Tensor> {
    let n = matrix.dims2()?.0;
    let (values, vectors) = symmetric_eigen(read(matrix)?, n);
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|i, j| values[*j].total_cmp(&values[*i]));
    let columns = order.into_iter().flat_map(|k| vectors[k * n..(k + 1) * n].iter().copied()).collect();
    write(columns, n, matrix)
}

/// The orthonormal factor of a square matrix: the Q of its QR decomposition.
pub(crate) fn orthonormal(matrix: &Tensor) -> Result<Tensor> {
    let n = matrix.dims2()?.0;
    let columns = read(&matrix.t()?.contiguous()?)?;
    write(qr(columns, n), n, matrix)
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0f64; 8];
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    let tail: f64 = a_tail.iter().zip(b_tail).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + tail
}

/// Reflects `column` by the unit vector `v`: column - 2 v (v · column).
fn reflect(v: &[f64], column: &mut [f64]) {
    let twice = 2.0 * dot(v, column);
    column.iter_mut().zip(v).for_each(|(c, v)| *c -= twice * v);
}

/// Turns `v` into the unit vector whose reflection puts it onto its first axis, and tells what of it is left there. Of a
/// vector without length nothing need be reflected: then it is zero.
fn householder(v: &mut [f64]) -> f64 {
    // Against overflow and underflow of squares.
    let largest = v.iter().fold(0f64, |max, x| max.max(x.abs()));
    if largest == 0.0 || !largest.is_finite() {
        v.fill(0.0);
        return 0.0;
    }
    v.iter_mut().for_each(|x| *x /= largest);
    let norm = dot(v, v).sqrt();
    let onto = if v[0] > 0.0 { -norm } else { norm };
    v[0] -= onto;
    let length = dot(v, v).sqrt();
    if length > 0.0 {
        v.iter_mut().for_each(|x| *x /= length);
    }
    onto * largest
}

/// Applies a reflection to the columns' elements from `from` on.
fn reflect_all(v: &[f64], columns: &mut [f64], n: usize, from: usize) {
    let each = |column: &mut [f64]| reflect(v, &mut column[from..]);
    match columns.len() * 2 > SERIAL {
        true => columns.par_chunks_mut(n).for_each(each),
        false => columns.chunks_mut(n).for_each(each),
    }
}

/// Q of the QR decomposition by Householder's reflections; both by columns.
fn qr(mut columns: Vec<f64>, n: usize) -> Vec<f64> {
    let mut reflections: Vec<Vec<f64>> = Vec::with_capacity(n);
    for k in 0..n {
        let (done, rest) = columns.split_at_mut((k + 1) * n);
        let mut v = done[k * n + k..].to_vec();
        householder(&mut v);
        reflect_all(&v, rest, n, k);
        reflections.push(v);
    }
    let mut q = identity(n);
    // The columns before k are still those of the identity, which the reflection leaves alone.
    for (k, v) in reflections.iter().enumerate().rev() {
        reflect_all(v, &mut q[k * n..], n, k);
    }
    q
}

fn identity(n: usize) -> Vec<f64> {
    let mut identity = vec![0.0; n * n];
    identity.iter_mut().step_by(n + 1).for_each(|x| *x = 1.0);
    identity
}

/// Eigenvalues and eigenvectors of a symmetric matrix, one vector after another: reflections to a tridiagonal matrix, then
/// implicitly shifted QL rotations.
pub(crate) fn symmetric_eigen(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut diagonal, mut beside) = (vec![0.0; n], vec![0.0; n]);
    let mut reflections: Vec<Vec<f64>> = Vec::with_capacity(n);
    for k in 0..n.saturating_sub(1) {
        // Column k below the diagonal goes onto its first element: H A H for the rest of the matrix.
        let mut v = a[k * n + k + 1..(k + 1) * n].to_vec();
        diagonal[k] = a[k * n + k];
        beside[k] = match v[1..].iter().all(|x| *x == 0.0) {
            true => {
                let left = v[0];
                v.fill(0.0);
                left
            }
            false => householder(&mut v),
        };
        let rest = &mut a[(k + 1) * n..];
        // A v, then A - 2 v wᵀ - 2 w vᵀ with w = A v - (vᵀ A v) v.
        let times: Vec<f64> = match rest.len() * 2 > SERIAL {
            true => rest.par_chunks(n).map(|row| dot(&row[k + 1..], &v)).collect(),
            false => rest.chunks(n).map(|row| dot(&row[k + 1..], &v)).collect(),
        };
        let along = dot(&times, &v);
        let w: Vec<f64> = times.iter().zip(&v).map(|(t, v)| t - along * v).collect();
        let update = |(i, row): (usize, &mut [f64])| {
            let (vi, wi) = (2.0 * v[i], 2.0 * w[i]);
            for ((x, v), w) in row[k + 1..].iter_mut().zip(&v).zip(&w) {
                *x -= vi * w + wi * v;
            }
        };
        match rest.len() * 2 > SERIAL {
            true => rest.par_chunks_mut(n).enumerate().for_each(update),
            false => rest.chunks_mut(n).enumerate().for_each(update),
        }
        reflections.push(v);
    }
    if n > 0 {
        diagonal[n - 1] = a[n * n - 1];
    }
    drop(a);
    // The product of all reflections, whose columns are rotated below.
    let mut vectors = identity(n);
    for (k, v) in reflections.iter().enumerate().rev() {
        reflect_all(v, &mut vectors[(k + 1) * n..], n, k + 1);
    }
    tridiagonal(&mut diagonal, &mut beside, &mut |rotations| rotate(&mut vectors, n, rotations));
    (diagonal, vectors)
}

/// A rotation of the columns k and k + 1.
struct Rotation {
    k: usize,
    cos: f64,
    sin: f64,
}

/// Makes a symmetric tridiagonal matrix diagonal, and hands the rotations that do so to `apply`, many at a time.
fn tridiagonal(d: &mut [f64], e: &mut [f64], apply: &mut dyn FnMut(&[Rotation])) {
    /// Rotations kept before they are applied.
    const MANY: usize = 1 << 20;
    /// Sweeps for an eigenvalue; two or three are usual.
    const SWEEPS: usize = 60;
    let n = d.len();
    let mut rotations = Vec::new();
    for l in 0..n {
        for _ in 0..SWEEPS {
            // The first element beside the diagonal from l on that is negligible ends a block.
            let small = |k: usize| e[k].abs() <= f64::EPSILON * (d[k].abs() + d[k + 1].abs());
            let m = (l..n - 1).find(|k| small(*k)).unwrap_or(n - 1);
            if m == l {
                break;
            }
            // Wilkinson's shift, from the block's upper corner.
            let half = (d[l + 1] - d[l]) / (2.0 * e[l]);
            let root = libm::hypot(half, 1.0);
            let shift = d[l] - e[l] / (half + if half < 0.0 { -root } else { root });
            let (mut g, mut sin, mut cos, mut less) = (d[m] - shift, 1.0, 1.0, 0.0);
            let mut whole = true;
            for k in (l..m).rev() {
                let (f, b) = (sin * e[k], cos * e[k]);
                let r = libm::hypot(f, g);
                e[k + 1] = r;
                if r == 0.0 {
                    // The block falls apart here.
                    d[k + 1] -= less;
                    e[m] = 0.0;
                    whole = false;
                    break;
                }
                (sin, cos) = (f / r, g / r);
                let upper = d[k + 1] - less;
                let t = (d[k] - upper) * sin + 2.0 * cos * b;
                less = sin * t;
                d[k + 1] = upper + less;
                g = cos * t - b;
                rotations.push(Rotation { k, cos, sin });
            }
            if whole {
                d[l] -= less;
                e[l] = g;
                e[m] = 0.0;
            }
        }
        if rotations.len() >= MANY {
            apply(&rotations);
            rotations.clear();
        }
    }
    apply(&rotations);
}

/// Applies rotations to columns: rows are independent of each other, so that each thread takes some of them.
fn rotate(columns: &mut [f64], n: usize, rotations: &[Rotation]) {
    if n == 0 {
        return;
    }
    /// Rows that a thread rotates at a time.
    const ROWS: usize = 32;
    let strip = |first: usize| {
        let rows = ROWS.min(n - first);
        let mut strip: Vec<f64> =
            (0..n).flat_map(|k| columns[k * n + first..k * n + first + rows].to_vec()).collect();
        for Rotation { k, cos, sin } in rotations {
            let (left, right) = strip[k * rows..(k + 2) * rows].split_at_mut(rows);
            for (a, b) in left.iter_mut().zip(right) {
                (*a, *b) = (cos * *a - sin * *b, sin * *a + cos * *b);
            }
        }
        strip
    };
    let firsts: Vec<usize> = (0..n).step_by(ROWS).collect();
    let strips: Vec<Vec<f64>> = match n * rotations.len() > SERIAL {
        true => firsts.par_iter().map(|first| strip(*first)).collect(),
        false => firsts.iter().map(|first| strip(*first)).collect(),
    };
    for (first, strip) in firsts.into_iter().zip(strips) {
        let rows = strip.len() / n;
        for (k, part) in strip.chunks(rows).enumerate() {
            columns[k * n + first..k * n + first + rows].copy_from_slice(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number in [-1, 1) that depends on its arguments only (splitmix64).
    fn noise(seed: u64, index: usize) -> f64 {
        let mut z = seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }

    fn matrix(seed: u64, n: usize, m: usize, dtype: DType) -> Tensor {
        let values: Vec<f64> = (0..n * m).map(|i| noise(seed, i)).collect();
        Tensor::from_vec(values, (n, m), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn furthest(a: &Tensor, b: &Tensor) -> f64 {
        crate::sums::largest(&(a - b).unwrap()).unwrap()
    }

    #[test]
    fn eigenvectors_are_orthonormal_and_diagonalise() {
        // Full rank, rank 2 of 9 (a null space of dimension 7), zero, one element, and none.
        for (n, m) in [(1, 1), (2, 2), (5, 8), (9, 2), (64, 100), (150, 40)] {
            let g = matrix(n as u64, n, m, DType::F64);
            let a = product((&g, false), (&g, true)).unwrap();
            for a in [&a, &a.zeros_like().unwrap()] {
                let q = eigenvectors(a).unwrap();
                let one = product((&q, true), (&q, false)).unwrap();
                let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
                // n roundings of numbers up to 1 in each sum.
                assert!(furthest(&one, &eye) < 1e-14 * n as f64, "{n}");
                let aq = product((a, false), (&q, false)).unwrap();
                let d = product((&q, true), (&aq, false)).unwrap().to_vec2::<f64>().unwrap();
                let size = d[0][0].abs().max(1e-300);
                for (i, row) in d.iter().enumerate() {
                    for (j, x) in row.iter().enumerate().filter(|(j, _)| *j != i) {
                        assert!(x.abs() <= 1e-14 * n as f64 * size, "{n}: ({i}, {j}) {x}");
                    }
                    assert!(i == 0 || row[i] <= d[i - 1][i - 1] + 1e-14 * n as f64 * size);
                }
            }
        }
        assert_eq!(
            eigenvectors(&Tensor::zeros((0, 0), DType::F64, &Device::Cpu).unwrap()).unwrap().dims(),
            [0, 0]
        );
    }

    #[test]
    fn a_basis_is_orthonormal_and_spans_the_leading_columns() {
        for n in [1, 2, 7, 40] {
            let a = matrix(3, n, n, DType::F64);
            // Also of a matrix without full rank.
            let flat =
                product((&a, false), (&matrix(4, n, n, DType::F64).zeros_like().unwrap(), false)).unwrap();
            for a in [&a, &flat] {
                let q = orthonormal(a).unwrap();
                let one = product((&q, true), (&q, false)).unwrap();
                let eye = Tensor::eye(n, DType::F64, &Device::Cpu).unwrap();
                assert!(furthest(&one, &eye) < 1e-14 * n as f64, "{n}");
                let r = product((&q, true), (a, false)).unwrap().to_vec2::<f64>().unwrap();
                for (i, row) in r.iter().enumerate() {
                    assert!(row[..i].iter().all(|x| x.abs() < 1e-14 * n as f64), "{n}: row {i} of R");
                }
            }
        }
    }

    #[test]
    fn newton_schulz_applies_its_polynomial_to_singular_values() {
        let coefficients = [3.4445, -4.775, 2.0315];
        let p = |s: f64| (0..5).fold(s, |s, _| 3.4445 * s - 4.775 * s.powi(3) + 2.0315 * s.powi(5));
        for (n, m) in [(3, 5), (5, 3), (4, 4)] {
            // U diag(s) Vᵀ with bases of our own.
            let (u, v) = (
                orthonormal(&matrix(1, n, n, DType::F64)).unwrap(),
                orthonormal(&matrix(2, m, m, DType::F64)).unwrap(),
            );
            let with = |of: &dyn Fn(f64) -> f64| {
                let s: Vec<f64> = (0..n * m)
                    .map(|i| if i / m == i % m { of(0.9 / (1 + i / m) as f64) } else { 0.0 })
                    .collect();
                let s = Tensor::from_vec(s, (n, m), &Device::Cpu).unwrap();
                product((&product((&u, false), (&s, false)).unwrap(), false), (&v, true)).unwrap()
            };
            let found = newton_schulz(&with(&|s| s), coefficients, 5).unwrap();
            assert!(furthest(&found, &with(&p)) < 1e-13, "{n} {m}");
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        for dtype in [DType::F32, DType::F64] {
            let x = (matrix(5, 200, 333, dtype) * 0.01).unwrap();
            let gram = product((&x, false), (&x, true)).unwrap();
            let with = |threads: usize| {
                taper_kernels::oversubscribe();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    [
                        product((&x, true), (&x, false)).unwrap(),
                        newton_schulz(&x, [3.4445, -4.775, 2.0315], 3).unwrap(),
                        eigenvectors(&gram).unwrap(),
                        orthonormal(&gram).unwrap(),
                    ]
                    .map(|t| read(&t).unwrap().into_iter().map(f64::to_bits).collect::<Vec<_>>())
                })
            };
            let one = with(1);
            assert!([2, 3, 7].into_iter().all(|threads| with(threads) == one), "{dtype:?}");
        }
    }
}
