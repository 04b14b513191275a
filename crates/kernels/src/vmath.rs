//! `exp`, `sigmoid` and `tanh` in f32 as straight-line arithmetic.
//!
//! There is no branch and no table, so a loop over these functions becomes vector code in whatever instruction
//! set its caller is compiled for. `FMA` says whether that caller has fused multiply-add; without one,
//! `f32::mul_add` would be a library call. The results of the two differ by about one unit in the last place.

/// Largest argument whose exponential is flushed to zero: below it the result would be a denormal, and
/// denormals make the matrix products that follow some fifty times slower.
const FLUSH: f32 = -87.33;
/// From here on 2ⁿ has no f32 exponent any more and the result is infinite (f32's own limit is 88.72).
const OVERFLOW: f32 = 88.02;

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// eˣ with a relative error below 1.2e-7; 0 below -87.33, infinite above 88.02, NaN of NaN.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    // Adding 1.5·2²³ rounds to an integer n, which then stands in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // x - n·ln 2, with ln 2 in two parts of which n times the first is exact.
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    p = fma::<FMA>(p, r, 1.398_199_9e-3);
    p = fma::<FMA>(p, r, 8.333_452e-3);
    p = fma::<FMA>(p, r, 4.166_579_6e-2);
    p = fma::<FMA>(p, r, 1.666_666_5e-1);
    p = fma::<FMA>(p, r, 0.5);
    let y = fma::<FMA>(p, r * r, r) + 1.0;
    let two_to_n = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    // Written so that NaN passes through both comparisons.
    let y = if x > OVERFLOW { f32::INFINITY } else { y * two_to_n };
    if x < FLUSH { 0.0 } else { y }
}

/// 1/(1 + e⁻ˣ) with a relative error below 3e-7.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<FMA>(-x))
}

/// tanh with a relative error below 6e-7, also near 0: an odd polynomial of degree 13 over an even one of
/// degree 6.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    // Beyond it the quotient would pass 1. Written so that NaN passes through.
    const LIMIT: f32 = 7.905_311;
    let x = if x > LIMIT { LIMIT } else { x };
    let x = if x < -LIMIT { -LIMIT } else { x };
    let s = x * x;
    let mut p = -2.760_768_5e-16;
    p = fma::<FMA>(p, s, 2.000_188e-13);
    p = fma::<FMA>(p, s, -8.604_672e-11);
    p = fma::<FMA>(p, s, 5.122_297_1e-8);
    p = fma::<FMA>(p, s, 1.485_722_4e-5);
    p = fma::<FMA>(p, s, 6.372_619_3e-4);
    p = fma::<FMA>(p, s, 4.893_524_6e-3);
    let mut q = 1.198_258_4e-6;
    q = fma::<FMA>(q, s, 1.185_347_1e-4);
    q = fma::<FMA>(q, s, 2.268_434_6e-3);
    q = fma::<FMA>(q, s, 4.893_525e-3);
    x * p / q
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest relative error over 1.6 million points of ±`range`.
    fn worst(range: f64, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> f64 {
        let points = (-800_000..800_000).map(|i| (range * (f64::from(i) + 0.5) / 8e5) as f32);
        let shares: Vec<f64> = points.map(|x| f64::from(f(x)) / exact(f64::from(x))).collect();
        crate::compare::largest_difference(&shares, &vec![1.0; shares.len()])
    }

    #[test]
    fn errors_stay_at_rounding_level() {
        let sigmoid_exact = |x: f64| 1.0 / (1.0 + (-x).exp());
        let table = [
            ("exp", worst(87.0, exp::<true>, f64::exp), worst(87.0, exp::<false>, f64::exp), 1.2e-7, 1.8e-7),
            (
                "sigmoid",
                worst(87.0, sigmoid::<true>, sigmoid_exact),
                worst(87.0, sigmoid::<false>, sigmoid_exact),
                3e-7,
                3e-7,
            ),
            ("tanh", worst(12.0, tanh::<true>, f64::tanh), worst(12.0, tanh::<false>, f64::tanh), 6e-7, 6e-7),
        ];
        for (name, fused, plain, fused_limit, plain_limit) in table {
            println!("{name}: largest relative error {fused:.2e} with fma, {plain:.2e} without");
            assert!(fused < fused_limit && plain < plain_limit, "{name}: {fused:e}, {plain:e}");
        }
    }

    #[test]
    fn ends_of_the_range_are_zero_infinite_or_nan() {
        for exp in [exp::<true>, exp::<false>] {
            assert_eq!([exp(f32::NEG_INFINITY), exp(-1e4), exp(-87.4)], [0.0; 3]);
            assert_eq!([exp(f32::INFINITY), exp(1e4), exp(88.1)], [f32::INFINITY; 3]);
            assert!(exp(f32::NAN).is_nan() && exp(-87.3).is_normal() && exp(88.0).is_finite());
            assert_eq!(exp(0.0), 1.0);
        }
        assert_eq!([sigmoid::<true>(-1e4), sigmoid::<true>(0.0), sigmoid::<true>(1e4)], [0.0, 0.5, 1.0]);
        assert!((tanh::<true>(f32::INFINITY) - 1.0).abs() < 2e-7 && (tanh::<true>(-50.0) + 1.0).abs() < 2e-7);
        assert!(sigmoid::<true>(f32::NAN).is_nan() && tanh::<true>(f32::NAN).is_nan());
    }
}
