//! GELU, x Φ(x) with the normal distribution's Φ, and its approximation by tanh.
//!
//! In f32 it is straight-line arithmetic that the compiler turns into vectors, without fused multiply-adds: every instruction
//! set gives the same bits. In f64, in which gradients are checked, it is libm's.
use super::{Isa, Real, vectorize};
use rayon::prelude::*;

/// Elements that a task takes.
const GRAIN: usize = 1 << 14;
/// Beyond it Φ(−x) is below 4e-36 and flushed to zero: products with denormals are slow.
const FLUSH: f32 = 12.5;
const DENSITY: f32 = 0.398_942_3; // 1/√(2π)

/// Φ(x) and φ(x), with a relative error below 4e-7 of each; NaN of NaN.
#[inline(always)]
pub(crate) fn normal_f32(x: f32) -> [f32; 2] {
    let a = x.abs();
    // −a²/2 in two parts, of which the first is exact: s has twelve bits. In one, a tail would lose as many as a² has.
    let s = f32::from_bits(a.to_bits() & 0xffff_f000);
    let (high, low) = (-0.5 * (s * s), -0.5 * ((a - s) * (a + s)));
    // e to that power; see `vmath::exp`.
    let round = 12_582_912.0;
    let shifted = (high + low) * std::f32::consts::LOG2_E + round;
    let n = shifted - round;
    let r = (high + n * -0.693_359_4) + (low + n * 2.121_944_4e-4);
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let e = ((p * (r * r) + r) + 1.0) * power;
    // Φ(−a) e^(a²/2) / t, a polynomial in t = 1/(1 + 0.35 a) with a relative error of 3.2e-8.
    let t = 1.0 / (1.0 + 0.35 * a);
    let q = -2.906_061e-2;
    let q = q * t + 1.435_481_7e-1;
    let q = q * t - 2.548_199_2e-1;
    let q = q * t + 1.581_277_8e-1;
    let q = q * t - 2.237_017_9e-2;
    let q = q * t + 1.051_856_1e-1;
    let q = q * t + 1.199_172e-1;
    let q = q * t + 1.398_498_1e-1;
    let q = q * t + 1.396_221_2e-1;
    // NaN fails the comparison and stays.
    let e = if a > FLUSH { 0.0 } else { e };
    let below = e * (t * q);
    [if x < 0.0 { below } else { 1.0 - below }, DENSITY * e]
}

/// 1/(1 + e⁻ˣ) with a relative error below 3.5e-7; zero below −86; NaN of NaN.
#[inline(always)]
pub(crate) fn sigmoid_f32(x: f32) -> f32 {
    // e⁻ˣ; see `vmath::exp`. NaN passes through both comparisons.
    let y = if x > 87.0 { -87.0 } else { -x };
    let y = if y > 86.0 { 86.0 } else { y };
    let round = 12_582_912.0;
    let shifted = y * std::f32::consts::LOG2_E + round;
    let n = shifted - round;
    let r = (y + n * -0.693_359_4) + n * 2.121_944_4e-4;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000));
    let e = ((p * (r * r) + r) + 1.0) * power;
    let s = 1.0 / (1.0 + e);
    if x < -86.0 { 0.0 } else { s }
}

/// 1/(1 + e⁻ˣ).
pub(crate) fn sigmoid_f64(x: f64) -> f64 {
    1.0 / (1.0 + libm::exp(-x))
}

/// Which GELU is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gelu {
    /// x Φ(x).
    Exact,
    /// x (1 + tanh(√(2/π) (x + 0.044715 x³)))/2.
    Tanh,
}

/// 2√(2/π), and 0.044715 times it: x (1 + tanh u)/2 is x/(1 + e^(−2u)).
const LINEAR: f64 = 1.595_769_121_605_730_7;
const CUBIC: f64 = 0.071_354_816_272_600_24;

/// [`Gelu::Tanh`].
#[inline(always)]
pub fn gelu_tanh<T: Real>(x: T) -> T {
    let near = clamped(x);
    x * (near * (T::from_f64(LINEAR) + T::from_f64(CUBIC) * near * near)).sigmoid()
}

/// Its derivative.
#[inline(always)]
pub fn slope_tanh<T: Real>(x: T) -> T {
    let near = clamped(x);
    let square = T::from_f64(CUBIC) * near * near;
    let s = (near * (T::from_f64(LINEAR) + square)).sigmoid();
    s + near * s * (T::ONE - s) * (T::from_f64(LINEAR) + square + square + square)
}

/// Beyond 12 the curve is 0 or x, and the cube of a large number is infinite. NaN stays.
#[inline(always)]
fn clamped<T: Real>(x: T) -> T {
    let (least, most) = (T::from_f64(-12.0), T::from_f64(12.0));
    let x = if x > most { most } else { x };
    if x < least { least } else { x }
}

/// Φ(x) and φ(x).
pub(crate) fn normal_f64(x: f64) -> [f64; 2] {
    let below = 0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2);
    [below, libm::exp(-0.5 * x * x) / (2.0 * std::f64::consts::PI).sqrt()]
}

/// x Φ(x).
#[inline(always)]
pub fn gelu<T: Real>(x: T) -> T {
    x * x.normal()[0]
}

/// Its derivative, Φ(x) + x φ(x).
#[inline(always)]
pub fn slope<T: Real>(x: T) -> T {
    let [below, density] = x.normal();
    below + x * density
}

/// y = GELU of x.
pub fn forward<T: Real>(isa: Isa, which: Gelu, x: &[T], y: &mut [T]) {
    assert_eq!(x.len(), y.len());
    y.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(y, x)| {
        vectorize(
            isa,
            #[inline(always)]
            || match which {
                Gelu::Exact => y.iter_mut().zip(x).for_each(|(y, x)| *y = gelu(*x)),
                Gelu::Tanh => y.iter_mut().zip(x).for_each(|(y, x)| *y = gelu_tanh(*x)),
            },
        );
    });
}

/// Turns the gradient `dy` of the output into that of the input `x`.
pub fn backward<T: Real>(isa: Isa, which: Gelu, x: &[T], dy: &mut [T]) {
    assert_eq!(x.len(), dy.len());
    dy.par_chunks_mut(GRAIN).zip(x.par_chunks(GRAIN)).for_each(|(dy, x)| {
        vectorize(
            isa,
            #[inline(always)]
            || match which {
                Gelu::Exact => dy.iter_mut().zip(x).for_each(|(dy, x)| *dy = *dy * slope(*x)),
                Gelu::Tanh => dy.iter_mut().zip(x).for_each(|(dy, x)| *dy = *dy * slope_tanh(*x)),
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From −13 to 13, thin and thick, and numbers near zero.
    fn points() -> Vec<f32> {
        let wide = (-400_000..=400_000).map(|i| (f64::from(i) * 12.5 / 4e5) as f32);
        let small = (0..=120).flat_map(|i| [1.0, -1.0].map(|sign| sign * 2f32.powi(-i)));
        wide.chain(small).collect()
    }

    #[test]
    fn values_and_slopes_are_those_of_the_normal_distribution() {
        let (mut worst, mut steepest) = (0f64, 0f64);
        for x in points() {
            let ([below, density], exact) = (normal_f32(x), f64::from(x));
            let [share, height] = normal_f64(exact);
            let off = |found: f32, wanted: f64| (f64::from(found) - wanted).abs() / wanted;
            worst = worst.max(off(below, share)).max(off(density, height));
            let error = (f64::from(gelu(x)) - exact * share).abs();
            // Below the least normal number there are no relative errors.
            assert!(error <= 4.5e-7 * (exact * share).abs() + 1.2e-38, "gelu({x}): off by {error:e}");
            steepest = steepest.max((f64::from(slope(x)) - (share + exact * height)).abs());
        }
        println!("largest relative error of Φ and φ {worst:.2e}, largest error of the slope {steepest:.2e}");
        assert!(worst < 4e-7, "{worst:e}");
        assert!(steepest < 2.5e-7, "{steepest:e}");
    }

    #[test]
    fn ends_are_zero_the_number_itself_or_nan() {
        assert_eq!([-13.0f32, -1e4, -1e30].map(gelu), [0.0; 3]);
        assert_eq!([13.0f32, 1e4, f32::INFINITY].map(gelu), [13.0, 1e4, f32::INFINITY]);
        assert_eq!([0.0f32, -0.0].map(gelu).map(f32::to_bits), [0.0f32, -0.0].map(f32::to_bits));
        assert_eq!([13.0f32, -13.0, 0.0].map(slope), [1.0, 0.0, 0.5]);
        // As PyTorch's: −∞ times nothing.
        assert!(gelu(f32::NEG_INFINITY).is_nan() && gelu(f32::NAN).is_nan() && slope(f32::NAN).is_nan());
    }

    #[test]
    fn the_approximation_is_the_one_by_tanh() {
        let exact = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        };
        for x in points() {
            let (at, h) = (f64::from(x), 1e-5);
            // One exponential's and a few other roundings; the tails are below 1e-30.
            assert!((f64::from(gelu_tanh(x)) - exact(at)).abs() <= 5e-7 * at.abs(), "{x}");
            assert!((gelu_tanh(at) - exact(at)).abs() <= 1e-15 * (1.0 + at.abs()), "{x}");
            let slope = (exact(at + h) - exact(at - h)) / (2.0 * h);
            assert!((f64::from(slope_tanh(x)) - slope).abs() < 2e-6, "{x}");
        }
        assert_eq!([-13.0f32, -1e30, 13.0, 1e30].map(gelu_tanh), [0.0, 0.0, 13.0, 1e30]);
        assert_eq!([f32::INFINITY, 13.0, -13.0, 0.0].map(slope_tanh), [1.0, 1.0, 0.0, 0.5]);
        assert!(gelu_tanh(f32::NAN).is_nan() && slope_tanh(f32::NAN).is_nan());
    }

    #[test]
    fn any_instruction_set_and_number_of_threads_gives_the_same_bits() {
        let x = points();
        let run = |isa: Isa| -> Vec<f64> {
            let of = |which: Gelu| {
                let (mut y, mut dy) = (vec![f32::NAN; x.len()], x.clone());
                forward(isa, which, &x, &mut y);
                backward(isa, which, &x, &mut dy);
                [y, dy].concat()
            };
            [Gelu::Exact, Gelu::Tanh].map(of).concat().into_iter().map(f64::from).collect()
        };
        let bits = |v: Vec<f64>| v.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        let portable = bits(run(Isa::PORTABLE));
        for isa in Isa::available() {
            assert!(bits(run(isa)) == portable, "{isa:?}");
            crate::threads::same_bits(|| run(isa));
        }
    }
}
