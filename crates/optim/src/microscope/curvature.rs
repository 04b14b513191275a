//! Curvature: the largest eigenvalue of the Hessian, and the parabola that a step goes along.
use crate::Result;
use crate::matrix::symmetric_eigen;
use crate::sums::dot;
use candle_core::Tensor;

/// The most times that a vector is multiplied.
const PRODUCTS: usize = 12;
/// An eigenvalue whose residual is below this part of it is known well enough.
const ENOUGH: f64 = 0.01;

/// An estimate of the largest eigenvalue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Eigenvalue {
    /// The largest Ritz value.
    pub value: f64,
    /// An eigenvalue lies this near to it: the norm of the residual.
    pub error: f64,
    /// Products with a vector that it took.
    pub products: usize,
}

/// The largest eigenvalue of a symmetric matrix by Lanczos' iteration from `start`, a vector in parts. `None` where the start or
/// a product is zero or not finite.
///
/// Without reorthogonalisation: lost orthogonality brings copies of eigenvalues that were found, none that are larger.
pub(super) fn largest_eigenvalue(
    start: Vec<Tensor>,
    product: &mut dyn FnMut(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Option<Eigenvalue>> {
    let inner = |a: &[Tensor], b: &[Tensor]| a.iter().zip(b).map(|(a, b)| dot(a, b)).sum::<Result<f64>>();
    let combine = |a: &[Tensor], factor: f64, b: &[Tensor]| -> Result<Vec<Tensor>> {
        a.iter().zip(b).map(|(a, b)| Ok((a + b.affine(factor, 0.0)?)?)).collect()
    };
    let scaled = |a: &[Tensor], factor: f64| -> Result<Vec<Tensor>> {
        a.iter().map(|a| Ok(a.affine(factor, 0.0)?)).collect()
    };
    let norm = inner(&start, &start)?.sqrt();
    if !(norm > 0.0 && norm.is_finite()) {
        return Ok(None);
    }
    let (mut v, mut before): (Vec<Tensor>, Option<Vec<Tensor>>) = (scaled(&start, 1.0 / norm)?, None);
    let (mut diagonal, mut beside) = (Vec::new(), Vec::<f64>::new());
    let mut found = None;
    for products in 1..=PRODUCTS {
        let mut w = product(&v)?;
        let alpha = inner(&w, &v)?;
        w = combine(&w, -alpha, &v)?;
        if let Some((before, beta)) = before.as_ref().zip(beside.last()) {
            w = combine(&w, -beta, before)?;
        }
        let beta = inner(&w, &w)?.sqrt();
        if !(alpha.is_finite() && beta.is_finite()) {
            return Ok(None);
        }
        diagonal.push(alpha);
        let (value, last) = largest_ritz(&diagonal, &beside);
        let error = beta * last.abs();
        found = Some(Eigenvalue { value, error, products });
        if error <= ENOUGH * value.abs() || beta <= f64::EPSILON * value.abs() {
            break;
        }
        beside.push(beta);
        before = Some(std::mem::replace(&mut v, scaled(&w, 1.0 / beta)?));
    }
    Ok(found.filter(|found| found.value != 0.0))
}

/// The largest eigenvalue of a symmetric tridiagonal matrix, and the last element of its eigenvector.
fn largest_ritz(diagonal: &[f64], beside: &[f64]) -> (f64, f64) {
    let n = diagonal.len();
    let mut matrix = vec![0.0; n * n];
    for (i, d) in diagonal.iter().enumerate() {
        matrix[i * n + i] = *d;
    }
    for (i, b) in beside.iter().enumerate().take(n.saturating_sub(1)) {
        (matrix[i * n + i + 1], matrix[(i + 1) * n + i]) = (*b, *b);
    }
    let (values, vectors) = symmetric_eigen(matrix, n);
    let best = (0..n).max_by(|i, j| values[*i].total_cmp(&values[*j])).unwrap_or(0);
    (
        values.get(best).copied().unwrap_or(f64::NAN),
        vectors.get((best + 1) * n - 1).copied().unwrap_or(f64::NAN),
    )
}

/// The loss along a step, on one batch: at both ends, with its slopes there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Along {
    /// The loss where the step begins and where it ends.
    pub losses: [f64; 2],
    /// The derivatives along the whole step, there: ∇f · u.
    pub slopes: [f64; 2],
}

/// What a parabola along a step says of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parabola {
    /// The slope at the start.
    pub slope: f64,
    /// The second derivative along the whole step.
    pub curvature: f64,
}

impl Along {
    /// The parabola that fits both losses and both slopes best (least squares, all weighing the same).
    pub fn parabola(&self) -> Parabola {
        let ([f0, f1], [d0, d1]) = (self.losses, self.slopes);
        let curvature = d1 - d0;
        Parabola { slope: (f1 - f0 + 2.0 * (d0 + d1)) / 5.0 - 0.5 * curvature, curvature }
    }

    /// Where the step lands: -1 at its start, 0 at the minimum of the parabola, 1 as far beyond it as the start is before it.
    /// `None` where there is no minimum ahead: the parabola bends down, or the step begins uphill.
    pub fn alpha(&self) -> Option<f64> {
        let Parabola { slope, curvature } = self.parabola();
        let alpha = -curvature / slope - 1.0;
        (slope < 0.0 && curvature > 0.0 && alpha.is_finite()).then_some(alpha)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn alpha_tells_how_far_a_step_on_a_parabola_goes() {
        // f(x) = 2 (x - 3)² + 1 from 0, whose minimum is 3 away.
        let f = |x: f64| 2.0 * (x - 3.0) * (x - 3.0) + 1.0;
        let along = |step: f64| Along {
            losses: [f(0.0), f(step)],
            slopes: [4.0 * -3.0 * step, 4.0 * (step - 3.0) * step],
        };
        for (step, want) in [(3.0, 0.0), (6.0, 1.0), (1.5, -0.5), (0.3, -0.9), (9.0, 2.0)] {
            let alpha = along(step).alpha().unwrap();
            assert!((alpha - want).abs() < 1e-13, "{step}: {alpha}, not {want}");
        }
        assert_eq!(along(-1.0).alpha(), None, "uphill");
        let concave = Along { losses: [0.0, -2.0], slopes: [-1.0, -3.0] };
        assert_eq!(concave.alpha(), None);
        assert_eq!(Along { losses: [1.0, 1.0], slopes: [0.0, 0.0] }.alpha(), None);
        assert_eq!(Along { losses: [1.0, f64::NAN], slopes: [-1.0, 0.0] }.alpha(), None);
    }

    #[test]
    fn the_largest_eigenvalue_of_a_known_spectrum_is_found() {
        let tensor = |v: Vec<f64>| Tensor::from_vec(v, 40, &Device::Cpu).unwrap();
        let start = || vec![tensor((0..40).map(|i| 1.0 + (i as f64 * 0.7).sin()).collect())];
        // Far from the rest, near it, and with negative ones of larger magnitude.
        let spectra: [fn(usize) -> f64; 3] = [
            |i| if i == 7 { 50.0 } else { i as f64 / 40.0 },
            |i| i as f64,
            |i| if i == 3 { -100.0 } else { i as f64 },
        ];
        for (which, spectrum) in spectra.into_iter().enumerate() {
            let values: Vec<f64> = (0..40).map(spectrum).collect();
            let largest = values.iter().copied().fold(f64::MIN, f64::max);
            let diagonal = tensor(values);
            let mut products = 0;
            let found = largest_eigenvalue(start(), &mut |v| {
                products += 1;
                Ok(vec![(&v[0] * &diagonal)?])
            });
            let found = found.unwrap().unwrap();
            assert!((found.value - largest).abs() <= found.error.max(ENOUGH * largest), "{which}: {found:?}");
            assert!(found.value <= largest * (1.0 + 1e-12), "a Ritz value is never above the largest");
            assert_eq!(found.products, products);
            assert!(found.error < 0.05 * largest, "{which}: {found:?}");
        }
        let none = largest_eigenvalue(start(), &mut |v| Ok(vec![v[0].zeros_like()?])).unwrap();
        assert_eq!(none, None);
        let zero = vec![tensor(vec![0.0; 40])];
        assert_eq!(largest_eigenvalue(zero, &mut |v| Ok(v.to_vec())).unwrap(), None);
    }
}
