//! Eigenvectors of small symmetric matrices, with the same bits on every machine.

/// The eigenvalues of a symmetric matrix of `n` rows, largest first, and the eigenvector of each, of length one, whose first
/// component of the largest magnitude is positive.
///
/// Cyclic Jacobi rotations: sums, products, quotients and roots alone, in one order.
pub(crate) fn symmetric(mut a: Vec<f64>, n: usize) -> Vec<(f64, Vec<f64>)> {
    /// More than any matrix needs: the rest shrinks quadratically, and matrices of hundreds of rows take about ten.
    const SWEEPS: usize = 60;
    assert_eq!(a.len(), n * n);
    // Rows are the vectors.
    let mut v = vec![0.0; n * n];
    (0..n).for_each(|i| v[i * n + i] = 1.0);
    let total: f64 = a.iter().map(|x| x * x).sum();
    for _ in 0..SWEEPS {
        let rest: f64 =
            (0..n).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| a[i * n + j] * a[i * n + j]).sum();
        // Below the rounding of what is there; also the end where the matrix is zero or not finite.
        if rest.partial_cmp(&(1e-34 * total)) != Some(std::cmp::Ordering::Greater) {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                rotate(&mut a, &mut v, n, p, q);
            }
        }
    }
    let mut pairs: Vec<(f64, Vec<f64>)> =
        v.chunks_exact(n.max(1)).enumerate().map(|(i, v)| (a[i * n + i], v.to_vec())).collect();
    for (_, v) in &mut pairs {
        let largest = v.iter().fold(0.0, |most: f64, x| if x.abs() > most.abs() { *x } else { most });
        if largest < 0.0 {
            v.iter_mut().for_each(|x| *x = -*x);
        }
    }
    // Stable: equal values stay in the order of their places.
    pairs.sort_by(|(x, _), (y, _)| y.total_cmp(x));
    pairs
}

/// Makes element (p, q) zero.
fn rotate(a: &mut [f64], v: &mut [f64], n: usize, p: usize, q: usize) {
    let off = a[p * n + q];
    if off == 0.0 {
        return;
    }
    let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * off);
    // The smaller of the two angles; t is zero where theta is beyond all bounds.
    let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
    let c = 1.0 / (t * t + 1.0).sqrt();
    let s = t * c;
    for k in 0..n {
        let (x, y) = (a[k * n + p], a[k * n + q]);
        (a[k * n + p], a[k * n + q]) = (c * x - s * y, s * x + c * y);
    }
    for k in 0..n {
        let (x, y) = (a[p * n + k], a[q * n + k]);
        (a[p * n + k], a[q * n + k]) = (c * x - s * y, s * x + c * y);
        let (x, y) = (v[p * n + k], v[q * n + k]);
        (v[p * n + k], v[q * n + k]) = (c * x - s * y, s * x + c * y);
    }
    (a[p * n + q], a[q * n + p]) = (0.0, 0.0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn pairs_are_those_of_the_matrix() {
        for n in [0, 1, 2, 12, 40] {
            let mut rng = Rng::new(3, "test", "eigen", n as u64);
            let mut a = vec![0.0; n * n];
            for i in 0..n {
                for j in 0..=i {
                    let x = rng.normal();
                    (a[i * n + j], a[j * n + i]) = (x, x);
                }
            }
            let pairs = symmetric(a.clone(), n);
            assert!(pairs.is_sorted_by(|x, y| x.0 >= y.0));
            for (i, (value, v)) in pairs.iter().enumerate() {
                for row in 0..n {
                    let product: f64 = (0..n).map(|k| a[row * n + k] * v[k]).sum();
                    assert!((product - value * v[row]).abs() < 1e-12, "{n}: pair {i}");
                }
                for (j, (_, w)) in pairs.iter().enumerate() {
                    let dot: f64 = v.iter().zip(w).map(|(x, y)| x * y).sum();
                    assert!((dot - f64::from(u8::from(i == j))).abs() < 1e-13, "{n}: {i} and {j}");
                }
                let largest = v.iter().fold(0.0f64, |most, x| if x.abs() > most.abs() { *x } else { most });
                assert!(largest > 0.0);
            }
        }
    }

    #[test]
    fn what_is_not_finite_or_nothing_comes_to_an_end() {
        assert_eq!(symmetric(vec![0.0; 4], 2), [(0.0, vec![1.0, 0.0]), (0.0, vec![0.0, 1.0])]);
        for bad in [f64::NAN, f64::INFINITY] {
            assert_eq!(symmetric(vec![bad; 9], 3).len(), 3);
        }
        assert!(symmetric(vec![1e300, 1e-300, 1e-300, -1e300], 2).iter().all(|(value, _)| value.is_finite()));
    }
}
