//! A general power that vectorises and rounds alike everywhere.
//!
//! The system's `pow` is a call for every element: it takes six times as long as moving the element's memory, and its last
//! digit differs between systems. This one is straight-line f64 arithmetic, so that the compiler applies it to whole
//! vectors: x^y = 2^(y log₂ x), with log₂ from the series of artanh and 2^f from that of exp.

/// 2/((2k+1) ln 2): log₂ m = Σ LOG[k] z^(2k+1) with z = (m - 1)/(m + 1).
const LOG: [f64; 12] = {
    let mut terms = [0.0; 12];
    let mut k = 0;
    while k < 12 {
        terms[k] = 2.0 * std::f64::consts::LOG2_E / (2 * k + 1) as f64;
        k += 1;
    }
    terms
};

/// (ln 2)^k / k!: 2^f = Σ EXP[k] f^k.
const EXP: [f64; 15] = {
    let mut terms = [1.0; 15];
    let mut k = 1;
    while k < 15 {
        terms[k] = terms[k - 1] * std::f64::consts::LN_2 / k as f64;
        k += 1;
    }
    terms
};

/// Adding it leaves the nearest integer in the lowest bits of the sum.
const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²

/// x to the power y for x ≥ 0 and finite y, with `L` terms of the logarithm and `E` of the exponential. Twelve and
/// fifteen give |y log₂ x| · 2⁻⁵¹ of relative error; six and ten give 2⁻³⁰, enough for a result that is rounded to f32.
#[inline(always)]
pub fn power<const L: usize, const E: usize>(x: f64, y: f64) -> f64 {
    // x = 2^exponent · m with m in [√½, √2). Subnormal numbers are lifted first.
    let lifted = x < f64::MIN_POSITIVE;
    let x1 = if lifted { x * (1u64 << 54) as f64 } else { x };
    // Biased to stay positive: AVX2 shifts 64-bit integers by their magnitude only, and cannot turn them into floats
    // but by the bits of a float.
    let biased =
        x1.to_bits().wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits()).wrapping_add(1024 << 52) >> 52;
    let m = f64::from_bits(x1.to_bits().wrapping_sub(biased << 52).wrapping_add(1024 << 52));
    let exponent = f64::from_bits(biased.wrapping_add(ROUND.to_bits())) - (ROUND + 1024.0);
    let exponent = if lifted { exponent - 54.0 } else { exponent };

    let z = (m - 1.0) / (m + 1.0);
    let z2 = z * z;
    let mut series = LOG[L - 1];
    for k in (0..L - 1).rev() {
        series = series * z2 + LOG[k];
    }
    let log2 = series * z + exponent;

    // Outside ±1100 the result is 0 or infinite anyway.
    let t = y * log2;
    let t = if t > 1100.0 { 1100.0 } else { t };
    let t = if t < -1100.0 { -1100.0 } else { t };
    let rounded = t + ROUND;
    let f = t - (rounded - ROUND);
    let mut result = EXP[E - 1];
    for k in (0..E - 1).rev() {
        result = result * f + EXP[k];
    }
    // 2^n in two factors, so that neither leaves the range of normal numbers; n again biased to stay positive.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(2200);
    let half = n >> 1;
    let two_to = |biased: u64| f64::from_bits(biased.wrapping_sub(1100 - 1023) << 52);
    let result = result * two_to(half) * two_to(n.wrapping_sub(half));

    let result = if x == 0.0 { if y > 0.0 { 0.0 } else { result } } else { result };
    // +∞ and NaN stay what they are.
    if x < f64::INFINITY { result } else { x }
}

#[cfg(test)]
mod tests {
    use super::power;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn agrees_with_the_systems_power(x in prop::num::f64::POSITIVE | prop::num::f64::SUBNORMAL, y in 0.0f64..=2.0) {
            let (x, exact) = (x.abs(), x.abs().powf(y));
            let found = power::<12, 15>(x, y);
            // An ulp for each unit of |y log₂ x|, which is what its rounding amounts to, and two for the series.
            let ulps = (y * x.log2()).abs() + 4.0;
            let subnormal = f64::MIN_POSITIVE * f64::EPSILON;
            prop_assert!((found - exact).abs() <= ulps * f64::EPSILON * exact + subnormal || found == exact, "{found:e} {exact:e}");
        }

        #[test]
        fn the_short_series_is_right_for_f32(x in prop::num::f32::POSITIVE | prop::num::f32::SUBNORMAL, y in 0.0f32..=1.0) {
            let exact = f64::from(x.abs()).powf(f64::from(y));
            let found = power::<6, 10>(f64::from(x.abs()), f64::from(y));
            // 2⁻³⁰ is 1/64 ulp of f32: after rounding at most the last bit differs, and rarely.
            prop_assert!((found / exact - 1.0).abs() < 1.0 / f64::from(1 << 30), "{found:e} {exact:e}");
        }
    }

    #[test]
    fn the_ends_of_the_range_are_exact() {
        let f = power::<12, 15>;
        assert_eq!((f(0.0, 0.5), f(1.0, 0.3), f(4.0, 0.5)), (0.0, 1.0, 2.0));
        assert_eq!(
            (f(f64::INFINITY, 0.5), f(f64::MAX, 2.0), f(f64::MIN_POSITIVE, 2.0)),
            (f64::INFINITY, f64::INFINITY, 0.0)
        );
        assert!(f(f64::NAN, 0.5).is_nan());
    }
}
