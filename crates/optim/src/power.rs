//! A general power that vectorises and rounds alike everywhere.
//!
//! The system's `pow` is a call for every element: it takes several times as long as moving the element's memory, and
//! its last digit differs between systems. These are straight-line arithmetic, so that the compiler applies them to whole
//! vectors: x^y = 2^(y log₂ x), with log₂ m = Σ LOG[k] z^(2k+1) for z = (m - 1)/(m + 1), and 2^f = Σ EXP[k] f^k.

/// 2/((2k+1) ln 2).
const LOG: [f64; 12] = {
    let mut terms = [0.0; 12];
    let mut k = 0;
    while k < terms.len() {
        terms[k] = 2.0 * std::f64::consts::LOG2_E / (2 * k + 1) as f64;
        k += 1;
    }
    terms
};

/// (ln 2)^k / k!.
const EXP: [f64; 15] = {
    let mut terms = [1.0; 15];
    let mut k = 1;
    while k < terms.len() {
        terms[k] = terms[k - 1] * std::f64::consts::LN_2 / k as f64;
        k += 1;
    }
    terms
};

/// βᵗ, to the last bit or next to it, and the same bits on every system: once a step, on the host.
pub fn of_step(beta: f64, t: u64) -> f64 {
    libm::pow(beta, t as f64)
}

/// x to the power y for x ≥ 0 and finite y, to |y log₂ x| · 2⁻⁵² of itself.
#[inline(always)]
pub fn power64(x: f64, y: f64) -> f64 {
    /// Adding it leaves the nearest integer in the lowest bits of the sum.
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 · 2⁵²

    // x = 2^exponent · m with m in [√½, √2). Subnormal numbers are lifted first. Integers are biased to stay positive:
    // AVX2 shifts 64-bit integers by their magnitude only, and cannot turn them into floats but by the bits of a float.
    let lifted = x < f64::MIN_POSITIVE;
    let x1 = if lifted { x * (1u64 << 54) as f64 } else { x };
    let bits = x1.to_bits();
    let biased = bits.wrapping_sub(std::f64::consts::FRAC_1_SQRT_2.to_bits()).wrapping_add(1024 << 52) >> 52;
    let m = f64::from_bits(bits.wrapping_sub(biased << 52).wrapping_add(1024 << 52));
    let exponent = f64::from_bits(biased.wrapping_add(ROUND.to_bits())) - (ROUND + 1024.0);
    let exponent = if lifted { exponent - 54.0 } else { exponent };

    let z = (m - 1.0) / (m + 1.0);
    let z2 = z * z;
    let mut series = LOG[11];
    for k in (0..11).rev() {
        series = series * z2 + LOG[k];
    }
    let t = y * (series * z + exponent);

    let within = if t > 1100.0 { 1100.0 } else { t };
    let within = if within < -1100.0 { -1100.0 } else { within };
    let rounded = within + ROUND;
    let f = within - (rounded - ROUND);
    let mut result = EXP[14];
    for k in (0..14).rev() {
        result = result * f + EXP[k];
    }
    // 2^n in two factors, so that neither leaves the range of normal numbers.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(2200);
    let half = n >> 1;
    let two_to = |biased: u64| f64::from_bits(biased.wrapping_sub(1100 - 1023) << 52);
    let result = result * two_to(half) * two_to(n.wrapping_sub(half));
    let of_zero = if y > 0.0 { 0.0 } else { result };
    let result = if x == 0.0 { of_zero } else { result };
    // +∞ and NaN stay what they are.
    if x < f64::INFINITY { result } else { x }
}

/// x to the power y for x ≥ 0 and finite y, within 2 ulp for |y| ≤ 1.
#[inline(always)]
pub fn power32(x: f32, y: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 · 2²³

    let lifted = x < f32::MIN_POSITIVE;
    let x1 = if lifted { x * (1u32 << 24) as f32 } else { x };
    let bits = x1.to_bits() as i32;
    let e = bits.wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i32) >> 23;
    let m = f32::from_bits(bits.wrapping_sub(e << 23) as u32);
    let exponent = if lifted { e - 24 } else { e } as f32;

    let z = (m - 1.0) / (m + 1.0);
    let z2 = z * z;
    let mut series = LOG[4] as f32;
    for k in (0..4).rev() {
        series = series * z2 + LOG[k] as f32;
    }
    // The exponent has eight bits: with sixteen of y's their product is exact, and no digit of the fraction is lost
    // behind a large integer.
    let y_high = f32::from_bits(y.to_bits() & !0xff);
    let (high, low) = (y_high * exponent, (y - y_high) * exponent + y * (series * z));
    let t = high + low;

    let within = if t > 252.0 { 252.0 } else { t };
    let within = if within < -252.0 { -252.0 } else { within };
    let rounded = within + ROUND;
    let f = (high - (rounded - ROUND)) + low;
    let mut result = EXP[7] as f32;
    for k in (0..7).rev() {
        result = result * f + EXP[k] as f32;
    }
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let two_to = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let result = result * two_to(half) * two_to(n - half);
    // Beyond ±252 the series was not that of a fraction.
    let result = if t > 252.0 { f32::INFINITY } else { result };
    let result = if t < -252.0 { 0.0 } else { result };
    let of_zero = if y > 0.0 { 0.0 } else { result };
    let result = if x == 0.0 { of_zero } else { result };
    if x < f32::INFINITY { result } else { x }
}

#[cfg(test)]
mod tests {
    use super::{of_step, power32, power64};
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        #[test]
        fn f64_agrees_with_the_systems_power(x in prop::num::f64::POSITIVE | prop::num::f64::SUBNORMAL, y in 0.0f64..=2.0) {
            let (x, exact) = (x.abs(), x.abs().powf(y));
            let found = power64(x, y);
            // An ulp for each unit of |y log₂ x|, which is what its rounding amounts to, and four for the series.
            let ulps = (y * x.log2()).abs() + 4.0;
            let smallest = f64::MIN_POSITIVE * f64::EPSILON;
            prop_assert!((found - exact).abs() <= ulps * f64::EPSILON * exact + smallest || found == exact, "{found:e} {exact:e}");
        }

        #[test]
        fn f32_is_within_two_ulp(x in prop::num::f32::POSITIVE | prop::num::f32::SUBNORMAL, y in 0.0f32..=1.0) {
            let exact = f64::from(x.abs()).powf(f64::from(y));
            let found = power32(x.abs(), y);
            let ulp = f64::from((exact as f32).next_up()) - f64::from(exact as f32);
            prop_assert!((f64::from(found) - exact).abs() <= 2.0 * ulp, "{found:e} {exact:e}");
        }
    }

    #[test]
    fn powers_of_steps_are_the_systems_or_next_to_them() {
        let (mut differ, mut all) = (0, 0);
        for beta in [0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999] {
            for t in 1..20_000 {
                let (ours, system) = (of_step(beta, t), beta.powf(t as f64));
                assert!(ours.to_bits().abs_diff(system.to_bits()) <= 1, "{beta}^{t}: {ours:e} {system:e}");
                (differ, all) = (differ + u32::from(ours != system), all + 1);
            }
        }
        println!("{differ} of {all} differ in the last bit");
        assert_eq!((of_step(0.9, 1), of_step(0.999, 0)), (0.9, 1.0));
    }

    #[test]
    fn the_ends_of_the_range_are_exact() {
        assert_eq!((power64(0.0, 0.5), power64(1.0, 0.3), power64(4.0, 0.5)), (0.0, 1.0, 2.0));
        assert_eq!((power64(f64::MAX, 2.0), power64(f64::MIN_POSITIVE, 2.0)), (f64::INFINITY, 0.0));
        assert_eq!((power32(0.0, 0.5), power32(1.0, 0.3), power32(4.0, 0.5)), (0.0, 1.0, 2.0));
        assert_eq!((power32(f32::MAX, 9.0), power32(f32::MIN_POSITIVE, 9.0)), (f32::INFINITY, 0.0));
        assert_eq!(
            (power64(f64::INFINITY, 0.5), power32(f32::INFINITY, 0.5)),
            (f64::INFINITY, f32::INFINITY)
        );
        assert!(power64(f64::NAN, 0.5).is_nan() && power32(f32::NAN, 0.5).is_nan());
    }
}
