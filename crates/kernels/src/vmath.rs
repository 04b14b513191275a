//! `exp`, `sigmoid` and `tanh` of vectors, as straight-line arithmetic: no branch, no table.
use super::simd::Simd;

/// Largest argument whose exponential is flushed to zero: below it the result would be a denormal, and
/// denormals make the matrix products that follow some fifty times slower.
const FLUSH: f32 = -87.33;
/// From here on 2ⁿ has no f32 exponent any more and the result is infinite (f32's own limit is 88.72).
const OVERFLOW: f32 = 88.02;

/// c₀ xⁿ + c₁ xⁿ⁻¹ + … + cₙ.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::V, coefficients: [f32; N]) -> S::V {
    let mut sum = s.splat(coefficients[0]);
    for c in &coefficients[1..] {
        sum = s.fma(sum, x, s.splat(*c));
    }
    sum
}

/// eˣ with a relative error below 1.2e-7 (1.8e-7 without fused multiply-add); 0 below -87.33, infinite above 88.02, NaN of
/// NaN.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // Adding 1.5·2²³ rounds to an integer n.
    let round = s.splat(12_582_912.0);
    let shifted = s.fma(x, s.splat(std::f32::consts::LOG2_E), round);
    let n = s.sub(shifted, round);
    // x - n·ln 2, with ln 2 in two parts of which n times the first is exact.
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let p =
        polynomial(s, r, [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5]);
    let y = s.add(s.fma(p, s.mul(r, r), r), s.splat(1.0));
    let y = s.mul(y, s.power_of_two(shifted));
    // NaN passes through both comparisons.
    let y = s.where_below(s.splat(OVERFLOW), x, s.splat(f32::INFINITY), y);
    s.where_below(x, s.splat(FLUSH), s.zero(), y)
}

/// 1/(1 + e⁻ˣ) with a relative error below 3e-7.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.zero(), x))))
}

/// tanh with a relative error below 6e-7, also near 0: an odd polynomial of degree 13 over an even one of
/// degree 6.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    // Beyond it the quotient would pass 1. NaN passes through both comparisons.
    let (most, least) = (s.splat(7.905_311), s.splat(-7.905_311));
    let x = s.where_below(most, x, most, x);
    let x = s.where_below(x, least, least, x);
    let square = s.mul(x, x);
    let p = polynomial(
        s,
        square,
        [
            -2.760_768_5e-16,
            2.000_188e-13,
            -8.604_672e-11,
            5.122_297_1e-8,
            1.485_722_4e-5,
            6.372_619_3e-4,
            4.893_524_6e-3,
        ],
    );
    let q = polynomial(s, square, [1.198_258_4e-6, 1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3]);
    s.div(s.mul(x, p), q)
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, with_simd};
    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Function {
        Exp,
        Sigmoid,
        Tanh,
    }
    use Function::*;

    /// `f` of all of `xs`, a multiple of the widest vector.
    fn of(isa: Isa, f: Function, xs: &[f32]) -> Vec<f32> {
        fn all<S: Simd>(s: S, f: Function, xs: &[f32], out: &mut [f32]) {
            for (x, out) in xs.chunks_exact(S::LANES).zip(out.chunks_exact_mut(S::LANES)) {
                // SAFETY: both are as long as a vector.
                unsafe {
                    let x = s.load(x.as_ptr());
                    let y = match f {
                        Exp => exp(s, x),
                        Sigmoid => sigmoid(s, x),
                        Tanh => tanh(s, x),
                    };
                    s.store(out.as_mut_ptr(), y);
                }
            }
        }
        let mut out = vec![0.0; xs.len()];
        with_simd!(isa, s => s.run(#[inline(always)] || all(s, f, xs, &mut out)));
        out
    }

    #[test]
    fn errors_stay_at_rounding_level() {
        for isa in Isa::available() {
            let exp_limit = if isa == Isa::PORTABLE { 1.8e-7 } else { 1.2e-7 };
            for (f, range, limit) in [(Exp, 87.0, exp_limit), (Sigmoid, 87.0, 3e-7), (Tanh, 12.0, 6e-7)] {
                let exact = |x: f64| match f {
                    Exp => x.exp(),
                    Sigmoid => 1.0 / (1.0 + (-x).exp()),
                    Tanh => x.tanh(),
                };
                let points: Vec<f32> =
                    (-800_000..800_000).map(|i| (range * (f64::from(i) + 0.5) / 8e5) as f32).collect();
                let found = of(isa, f, &points);
                let share = |(y, x): (&f32, &f32)| f64::from(*y) / exact(f64::from(*x));
                let shares: Vec<f64> = found.iter().zip(&points).map(share).collect();
                let worst = crate::compare::largest_difference(&shares, &vec![1.0; shares.len()]);
                println!("{isa:?} {f:?}: largest relative error {worst:.2e}");
                assert!(worst < limit, "{isa:?} {f:?}: {worst:e}");
            }
        }
    }

    #[test]
    fn ends_of_the_range_are_zero_infinite_or_nan() {
        for isa in Isa::available() {
            let at = |f, x: f32| of(isa, f, &[x; 16])[15];
            assert_eq!([f32::NEG_INFINITY, -1e4, -87.4].map(|x| at(Exp, x)), [0.0; 3]);
            assert_eq!([f32::INFINITY, 1e4, 88.1].map(|x| at(Exp, x)), [f32::INFINITY; 3]);
            assert!(at(Exp, -87.3).is_normal() && at(Exp, 88.0).is_finite() && at(Exp, 0.0) == 1.0);
            assert_eq!([-1e4, 0.0, 1e4].map(|x| at(Sigmoid, x)), [0.0, 0.5, 1.0]);
            assert!((at(Tanh, f32::INFINITY) - 1.0).abs() < 2e-7 && (at(Tanh, -50.0) + 1.0).abs() < 2e-7);
            assert!([Exp, Sigmoid, Tanh].into_iter().all(|f| at(f, f32::NAN).is_nan()));
        }
    }
}
