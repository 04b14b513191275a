//! How far two results are apart.

/// The largest |a − b| of two slices: infinite where they differ in length or one of a pair is no number, which must never
/// pass for agreement.
///
/// ```
/// use taper_kernels::compare::largest_difference;
/// assert_eq!(largest_difference(&[1.0, 2.5], &[1.0, 2.0]), 0.5);
/// assert_eq!(largest_difference(&[f64::NAN], &[1.0]), f64::INFINITY);
/// ```
pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    // Equal infinities agree, although their difference is no number.
    let apart = |(a, b): (&f64, &f64)| if a == b { 0.0 } else { (a - b).abs() };
    let worst = |m: f64, d: f64| if d.is_nan() { f64::INFINITY } else { m.max(d) };
    if a.len() == b.len() { a.iter().zip(b).map(apart).fold(0.0, worst) } else { f64::INFINITY }
}

/// The same as a share of the largest finite magnitude in `expected`: an infinite one would hide what is wrong beside it.
///
/// ```
/// use taper_kernels::compare::relative_difference;
/// assert_eq!(relative_difference(&[3.0, 1.0], &[4.0, 1.0]), 0.25);
/// assert_eq!(relative_difference(&[1.0, f64::INFINITY], &[2.0, f64::INFINITY]), 0.5);
/// assert_eq!(relative_difference(&[f64::NAN], &[f64::INFINITY]), f64::INFINITY);
/// ```
pub fn relative_difference(found: &[f64], expected: &[f64]) -> f64 {
    match largest_difference(found, expected) {
        0.0 => 0.0,
        worst => worst / expected.iter().filter(|v| v.is_finite()).fold(0f64, |m, v| m.max(v.abs())),
    }
}
