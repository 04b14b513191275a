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

    /// Puts parameters, taken together, at the nearest point of the set; what is inside stays as it is, to the bit. What is no number
    /// has no nearest point, and in a ball neither has what is infinite: then it is an error, and nothing has changed. The norm is
    /// taken in f64 and in a fixed order. On a GPU all is done by candle's ops on the device, and the host waits for the norm.
    pub fn project<'a>(&self, vars: impl IntoIterator<Item = &'a Var>) -> Result<()> {
        self.check().map_err(|message| Error::Hyperparameter {
            optimizer: "projection".into(),
            key: "domain".into(),
            message,
        })?;
        let vars: Vec<&Var> = vars.into_iter().collect();
        let norm = global_norm_of(vars.iter().map(|var| var.as_tensor()))?;
        let norm: f64 = norm.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?;
        // A box takes what is infinite: its nearest point is a corner.
        if norm.is_nan() || norm.is_infinite() && matches!(self, Self::Ball { .. }) {
            return Err(Error::Unsupported {
                optimizer: "projection".into(),
                what: format!("the norm of the parameters is {norm}: no point of the domain is the nearest"),
            });
        }
        match *self {
            Self::Box { low, high } => {
                for var in vars {
                    var.set(&var.as_tensor().clamp(low, high)?)?;
                }
            }
            Self::Ball { radius } => {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_nearest_point_is_refused_and_nothing_has_changed() {
        let (ball, square) = (Domain::Ball { radius: 1.0 }, Domain::Box { low: -1.0, high: 1.0 });
        for (domain, bad) in [(ball, f64::NAN), (ball, f64::INFINITY), (square, f64::NAN)] {
            let far = Var::new(&[3f64, -4.0], &Device::Cpu).unwrap();
            let x = Var::new(&[2f64, bad], &Device::Cpu).unwrap();
            let error = domain.project([&far, &x]).unwrap_err().to_string();
            assert!(error.contains("the norm of the parameters is"), "{error}");
            assert_eq!(far.to_vec1::<f64>().unwrap(), [3.0, -4.0]);
            assert_eq!(x.to_vec1::<f64>().unwrap()[0], 2.0);
        }
        let far = Var::new(&[f64::INFINITY, 0.5], &Device::Cpu).unwrap();
        square.project([&far]).unwrap();
        assert_eq!(far.to_vec1::<f64>().unwrap(), [1.0, 0.5]);
    }
}
