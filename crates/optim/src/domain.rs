//! Sets that parameters are kept in: projections after a step.
use crate::clip::global_norm_of;
use crate::{Error, Result};
use candle_core::{DType, Device, Var};

/// A closed convex set around the origin or not, and the projection onto it: what online optimization asks of an iterate.
///
/// Call [`Domain::project`] after a step, of whichever optimizer. It sees parameters alone: an optimizer that follows its own way
/// (DecGD's v) follows the steps as it took them, unless it keeps the iterate before (`previous: stored`).
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// use taper_optim::{Domain, Sgd, SgdConfig};
///
/// let x = Var::new(&[3f64, 4.0], &Device::Cpu)?;
/// let mut optimizer = Sgd::new(vec![x.clone()], SgdConfig { lr: 0.0, ..Default::default() })?;
/// optimizer.backward_step(&x.sqr()?.sum_all()?)?;
/// Domain::Ball { radius: 1.0 }.project([&x])?;
/// assert_eq!(x.to_vec1::<f64>()?, [0.6000000000000001, 0.8]);
/// Domain::Box { low: -0.5, high: 0.7 }.project([&x])?;
/// assert_eq!(x.to_vec1::<f64>()?, [0.6000000000000001, 0.7]);
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Domain {
    /// Every number between two others.
    Box {
        /// The least.
        low: f64,
        /// The greatest.
        high: f64,
    },
    /// All parameters together in a Euclidean ball around the origin.
    Ball {
        /// Its radius.
        radius: f64,
    },
}

impl Domain {
    /// Refuses a set that is empty or unbounded: what is wrong, in words.
    pub fn check(&self) -> std::result::Result<(), String> {
        match *self {
            Self::Box { low, high } if !(low.is_finite() && high.is_finite() && low <= high) => {
                Err(format!("expected two finite numbers, the least first, found [{low}, {high}]"))
            }
            Self::Ball { radius } if !(radius > 0.0 && radius.is_finite()) => {
                Err(format!("expected a finite radius above 0, found {radius}"))
            }
            _ => Ok(()),
        }
    }

    /// Puts parameters, taken together, at the nearest point of the set; what is inside stays as it is, to the bit. The norm is taken
    /// in f64 and in a fixed order. On a GPU both are candle's ops on the device, and a ball waits for it: the host reads the
    /// norm.
    pub fn project<'a>(&self, vars: impl IntoIterator<Item = &'a Var>) -> Result<()> {
        self.check().map_err(|message| Error::Hyperparameter {
            optimizer: "projection".into(),
            key: "domain".into(),
            message,
        })?;
        let vars: Vec<&Var> = vars.into_iter().collect();
        match *self {
            Self::Box { low, high } => {
                for var in vars {
                    var.set(&var.as_tensor().clamp(low, high)?)?;
                }
            }
            Self::Ball { radius } => {
                let norm = global_norm_of(vars.iter().map(|var| var.as_tensor()))?;
                let norm: f64 = norm.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?;
                if norm > radius {
                    for var in vars {
                        var.set(&(var.as_tensor() * (radius / norm))?)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The largest distance between two of its points, in `n` dimensions.
    pub fn diameter(&self, n: usize) -> f64 {
        match *self {
            Self::Box { low, high } => (high - low) * (n as f64).sqrt(),
            Self::Ball { radius } => 2.0 * radius,
        }
    }
}
