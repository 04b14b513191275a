//! Parameters in half precision: how an update is rounded into them, and what is kept beside them.
use crate::{Error, Info, Result};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// How f16 and bf16 parameters are trained. Updates are computed, and state is kept, in f32 in any case.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device, Var};
/// use taper_optim::{Precision, Rounding, Sgd, SgdConfig};
///
/// // bf16 has eight bits: from 1 a step of 1e-3 is lost, unless the parameter is kept in f32 beside it.
/// let after = |precision| -> candle_core::Result<f32> {
///     let x = Var::ones(1, DType::BF16, &Device::Cpu)?;
///     let config = SgdConfig { lr: 1e-3, ..Default::default() };
///     let mut sgd = Sgd::with_params(vec![("x".into(), x.clone())], config)?.precision(precision)?;
///     for _ in 0..100 {
///         sgd.backward_step(&x.sum_all()?)?;
///     }
///     Ok(x.to_dtype(DType::F32)?.to_vec1::<f32>()?[0])
/// };
/// assert_eq!(after(Precision::default())?, 1.0);
/// assert_eq!(after(Precision::default().master_weights())?, 0.8984375);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Precision {
    /// Whether an f32 copy of each parameter is kept, stepped and rounded into it. Defaults to false.
    pub master: bool,
    /// How the update is rounded into the parameter. Defaults to the nearest.
    pub rounding: Rounding,
}

impl Precision {
    /// With f32 copies of the parameters.
    pub fn master_weights(self) -> Self {
        Self { master: true, ..self }
    }
    /// With updates rounded up or down by chance.
    pub fn stochastic(self, seed: u64) -> Self {
        Self { rounding: Rounding::Stochastic { seed }, ..self }
    }
    /// Refuses all but the default, for an optimizer that knows nothing else.
    pub(crate) fn only_default(self, of: &Info) -> Result<()> {
        if self == Self::default() {
            return Ok(());
        }
        let what = "has no master weights and no stochastic rounding".to_owned();
        Err(Error::Unsupported { optimizer: of.name.to_owned(), what })
    }
}

/// How a number is rounded to half precision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// To the nearest, ties to even.
    #[default]
    Nearest,
    /// Up or down with a probability that makes the mean exact. What chance does depends on the seed, the parameter's name, its
    /// step and the element alone.
    Stochastic {
        /// The seed.
        seed: u64,
    },
}

impl Rounding {
    /// For step `t` of a parameter.
    pub(crate) fn of_step(self, name: &str, t: u64) -> Self {
        match self {
            Self::Nearest => self,
            Self::Stochastic { seed } => {
                let name = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
                    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
                });
                Self::Stochastic { seed: mix(mix(name) ^ t) }
            }
        }
    }
}

/// Bits that depend on every bit of the argument (the finalizer of splitmix64).
#[inline(always)]
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A dtype that f32 is rounded to.
pub(crate) trait Narrow: Sized {
    /// One number, with 32 random bits.
    fn stochastic(wide: f32, random: u32) -> Self;

    /// Numbers from the `first`-th element of a parameter on.
    fn round_stochastically(wide: &[f32], narrow: &mut [Self], seed: u64, first: u64) {
        for (i, (wide, narrow)) in wide.iter().zip(narrow).enumerate() {
            *narrow = Self::stochastic(*wide, (mix(seed ^ (first + i as u64)) >> 32) as u32);
        }
    }
}

impl Narrow for bf16 {
    fn stochastic(wide: f32, random: u32) -> Self {
        // Above the largest number the nearest decides, so that a finite one is never carried into infinity.
        if wide.abs() < f32::from(Self::MAX) {
            Self::from_bits((wide.to_bits().wrapping_add(random >> 16) >> 16) as u16)
        } else {
            Self::from_f32(wide)
        }
    }
}

impl Narrow for f16 {
    fn stochastic(wide: f32, random: u32) -> Self {
        const SMALLEST: f64 = 1.0 / (1 << 24) as f64;
        let magnitude = wide.abs();
        if magnitude.is_nan() || magnitude >= f32::from(Self::MAX) {
            return Self::from_f32(wide);
        }
        let rounded = if magnitude >= f32::from(Self::MIN_POSITIVE) {
            // Thirteen bits more than f16 has.
            f32::from_bits(magnitude.to_bits().wrapping_add(random >> 19) & !0x1fff)
        } else {
            // Subnormal: multiples of the smallest number, in f64, where no sum is rounded up to the next of them.
            let chance = f64::from(random) / 2f64.powi(32);
            ((f64::from(magnitude) / SMALLEST + chance).floor() * SMALLEST) as f32
        };
        Self::from_f32(rounded.copysign(wide))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean of many roundings of one number, and whether each was one of its two neighbours.
    fn mean<T: Narrow + Copy + Into<f64>>(wide: f32) -> (f64, bool) {
        let numbers = vec![wide; 1 << 16];
        let mut narrow = vec![T::stochastic(0.0, 0); numbers.len()];
        T::round_stochastically(&numbers, &mut narrow, 5, 1000);
        let values: Vec<f64> = narrow.into_iter().map(Into::into).collect();
        let (down, up) = values.iter().fold((f64::MAX, f64::MIN), |(d, u), v| (d.min(*v), u.max(*v)));
        let ok =
            values.iter().all(|v| *v == down || *v == up) && down <= f64::from(wide) && f64::from(wide) <= up;
        (values.iter().sum::<f64>() / values.len() as f64, ok)
    }

    #[test]
    fn the_mean_of_stochastic_roundings_is_the_number() {
        for wide in [1.001f32, -3.3, 1e-5, 3e-7, 100.3, -2e-8, 0.0, 1.0] {
            for ((mean, neighbours), unit) in
                [(mean::<bf16>(wide), 2f64.powi(-7)), (mean::<f16>(wide), 2f64.powi(-10))]
            {
                assert!(neighbours, "{wide}");
                // Four standard deviations of the mean of 65536 draws within a unit in the last place.
                let unit = (f64::from(wide.abs()) * unit).max(2f64.powi(-24));
                assert!((mean - f64::from(wide)).abs() <= 4.0 * 0.5 * unit / 256.0, "{wide}: {mean}");
            }
        }
    }

    #[test]
    fn what_is_exact_stays_and_what_is_too_large_is_never_made_infinite_by_chance() {
        for random in [0, 1, u32::MAX / 2, u32::MAX] {
            for exact in [0.0f32, -0.0, 1.0, -1.5, 65504.0, 6.1035156e-5, 5.9604645e-8] {
                assert_eq!(f32::from(f16::stochastic(exact, random)).to_bits(), exact.to_bits(), "{exact}");
            }
            assert_eq!(f32::from(bf16::stochastic(1.5, random)), 1.5);
            assert!(f16::stochastic(65503.9, random).is_finite());
            assert!(bf16::stochastic(f32::from(bf16::MAX) * 0.9999, random).is_finite());
            assert!(
                f16::stochastic(f32::NAN, random).is_nan() && bf16::stochastic(f32::NAN, random).is_nan()
            );
        }
    }
}
