//! The normal and Student's distribution. `libm` in place of the system's functions: the same digits everywhere.
use libm::{erfc, exp, fabs, lgamma, log, log1p, sqrt};
use std::f64::consts::{PI, SQRT_2};

/// Φ(z).
pub fn normal_cdf(z: f64) -> f64 {
    0.5 * erfc(-z / SQRT_2)
}

/// The z with Φ(z) = p; ∓∞ at 0 and 1, NaN outside.
pub fn normal_quantile(p: f64) -> f64 {
    if p > 0.5 {
        // The lower tail has the digits.
        return -normal_quantile(1.0 - p);
    }
    if p <= 0.0 || p.is_nan() {
        return if p == 0.0 { f64::NEG_INFINITY } else { f64::NAN };
    }
    // A start from the tail's asymptote, then Halley's iteration on Φ: three rounds reach the last digits from anywhere.
    let mut z =
        if p < 0.02 { -sqrt(-2.0 * log(p * sqrt(-4.0 * PI * log(p)))) } else { (p - 0.5) * sqrt(2.0 * PI) };
    for _ in 0..60 {
        let error = (normal_cdf(z) - p) * sqrt(2.0 * PI) * exp(z * z / 2.0);
        let step = error / (1.0 + z * error / 2.0);
        z -= step;
        if fabs(step) <= 1e-16 * fabs(z) {
            break;
        }
    }
    z
}

/// P(T ≤ t) for Student's t with `degrees` of freedom.
fn student_cdf(t: f64, degrees: f64) -> f64 {
    let tail = 0.5 * incomplete_beta(degrees / 2.0, 0.5, degrees / (degrees + t * t));
    if t > 0.0 { 1.0 - tail } else { tail }
}

/// The t with P(T ≤ t) = p for Student's t with `degrees` of freedom; NaN for p outside (0, 1) or no degrees.
pub fn student_quantile(p: f64, degrees: f64) -> f64 {
    if !(p > 0.0 && p < 1.0 && degrees > 0.0) {
        return f64::NAN;
    }
    if p < 0.5 {
        return -student_quantile(1.0 - p, degrees);
    }
    // Bisection: the function is monotone and this is called once a table cell.
    let (mut low, mut high) = (0.0, 1.0);
    while student_cdf(high, degrees) < p && high < 1e300 {
        high *= 2.0;
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if middle <= low || middle >= high {
            break;
        }
        if student_cdf(middle, degrees) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// The regularised incomplete beta function I_x(a, b), by its continued fraction (Abramowitz & Stegun 26.5.8) in the
/// half where that converges fast.
fn incomplete_beta(a: f64, b: f64, x: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return if x <= 0.0 { 0.0 } else { 1.0 };
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - incomplete_beta(b, a, 1.0 - x);
    }
    let front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a;
    // Lentz's evaluation, which keeps numerator and denominator away from zero.
    let away = |value: f64| if fabs(value) < 1e-300 { 1e-300 } else { value };
    let mut denominator = 1.0 / away(1.0 - (a + b) * x / (a + 1.0));
    let (mut numerator, mut fraction) = (1.0, denominator);
    for i in 1..500 {
        let m = f64::from(i);
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let mut change = 1.0;
        for term in [even, odd] {
            denominator = 1.0 / away(1.0 + term * denominator);
            numerator = away(1.0 + term / numerator);
            change = denominator * numerator;
            fraction *= change;
        }
        if fabs(change - 1.0) < 1e-16 {
            break;
        }
    }
    front * fraction
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1e-13 relative: the functions are sums of tens of terms, each right to an ulp or two.
    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() <= 1e-13 * expected.abs().max(1e-3), "{found} for {expected}");
    }

    // python -c "from scipy.stats import norm; print([norm.ppf(p) for p in (…)])", scipy 1.17.1
    #[test]
    fn normal_quantiles_are_scipys() {
        for (p, z) in [
            (1e-10, -6.361340902404056),
            (0.001, -3.090232306167813),
            (0.025, -1.9599639845400545),
            (0.2, -0.8416212335729142),
            (0.5, 0.0),
            (0.84, 0.994457883209753),
            (0.975, 1.959963984540054),
        ] {
            close(normal_quantile(p), z);
            close(normal_cdf(z), p);
        }
        assert_eq!(normal_quantile(0.0), f64::NEG_INFINITY);
        assert_eq!(normal_quantile(1.0), f64::INFINITY);
        assert!(normal_quantile(-0.1).is_nan() && normal_quantile(f64::NAN).is_nan());
    }

    // python -c "from scipy.stats import t; print([t.ppf(p, n) for p, n in (…)])", scipy 1.17.1
    #[test]
    fn student_quantiles_are_scipys() {
        for (p, degrees, t) in [
            (0.975, 1.0, 12.706204736174694),
            (0.975, 2.0, 4.302652729749462),
            (0.975, 4.0, 2.7764451051977934),
            (0.975, 9.0, 2.262157162798205),
            (0.995, 5.0, 4.032142983555228),
            (0.9, 30.0, 1.3104150253913955),
            (0.025, 2.0, -4.302652729749464),
            (0.975, 1000.0, 1.9623390808264083),
            (0.5, 3.0, 0.0),
        ] {
            close(student_quantile(p, degrees), t);
        }
        for (p, degrees) in [(0.0, 3.0), (1.0, 3.0), (0.5, 0.0), (f64::NAN, 3.0)] {
            assert!(student_quantile(p, degrees).is_nan());
        }
    }
}
