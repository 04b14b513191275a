//! Numbers of batches and steps: known at once on the CPU, read some steps later where a GPU computes them.
//!
//! To read a number from a GPU is to wait until it has done all it was asked for. So the loop keeps numbers as tensors and
//! reads those of many steps at a time.
use super::RunError;
use candle_core::{DType, Device, Tensor};

/// A number of a batch or a step.
#[derive(Clone, Debug)]
pub(crate) enum Figure {
    /// Its value.
    Known(f64),
    /// A scalar tensor on a GPU.
    Coming(Tensor),
}

impl Figure {
    /// The number in a scalar tensor.
    pub fn of(scalar: &Tensor) -> Result<Self, RunError> {
        match scalar.device().is_cpu() {
            true => Ok(Self::Known(scalar.to_dtype(DType::F64)?.to_scalar()?)),
            // Detached: the graph of its batch is not kept.
            false => Ok(Self::Coming(scalar.detach())),
        }
    }

    /// Its value, unless a GPU has it.
    pub fn known(&self) -> Option<f64> {
        match self {
            Self::Known(value) => Some(*value),
            Self::Coming(_) => None,
        }
    }

    /// Its value. Waits for the GPU.
    pub fn read(&self) -> Result<f64, RunError> {
        Ok(read_all(std::slice::from_ref(self))?[0])
    }

    /// `self + other * weight`.
    pub fn plus(&self, other: &Self, weight: f64) -> Result<Self, RunError> {
        Ok(match (self, other) {
            (Self::Known(a), Self::Known(b)) => Self::Known(a + b * weight),
            (Self::Known(a), Self::Coming(b)) => Self::Coming(b.affine(weight, *a)?),
            (Self::Coming(a), Self::Known(b)) => Self::Coming(a.affine(1.0, b * weight)?),
            (Self::Coming(a), Self::Coming(b)) => Self::Coming((a + b.affine(weight, 0.0)?)?),
        })
    }

    /// `self / divisor`.
    pub fn over(&self, divisor: f64) -> Result<Self, RunError> {
        Ok(match self {
            Self::Known(a) => Self::Known(a / divisor),
            Self::Coming(a) => Self::Coming(a.affine(1.0 / divisor, 0.0)?),
        })
    }
}

/// The values of all figures, in their order: one copy from the GPU for each dtype among them.
pub(crate) fn read_all(figures: &[Figure]) -> Result<Vec<f64>, RunError> {
    let mut values: Vec<f64> = figures.iter().map(|figure| figure.known().unwrap_or(f64::NAN)).collect();
    for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
        let of_dtype = figures.iter().enumerate().filter_map(|(i, figure)| match figure {
            Figure::Coming(tensor) if tensor.dtype() == dtype => Some((i, tensor.clone())),
            _ => None,
        });
        let (places, tensors): (Vec<usize>, Vec<Tensor>) = of_dtype.unzip();
        if tensors.is_empty() {
            continue;
        }
        // First to the CPU: not every device has f64.
        let read = Tensor::stack(&tensors, 0)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
        for (place, value) in places.into_iter().zip(read.flatten_all()?.to_vec1::<f64>()?) {
            values[place] = value;
        }
    }
    Ok(values)
}

/// What was measured on the way to a step and is not looked at yet.
#[derive(Clone, Debug)]
pub(crate) enum Measured<N> {
    /// A batch.
    Batch {
        /// The loss that was differentiated.
        total: N,
        /// The likelihood alone.
        raw: N,
        /// Right answers.
        correct: N,
        /// Samples, or tokens.
        samples: u64,
    },
    /// The norm of the gradient.
    Norm(N),
}

/// What the loop has not looked at yet, with the step it belongs to. On the CPU it looks at once.
#[derive(Debug, Default)]
pub(crate) struct Pending(Vec<(u64, Measured<Figure>)>);

impl Pending {
    /// The most that is kept, where a run logs seldom.
    const MOST: usize = 1000;

    pub fn add(&mut self, step: u64, measured: Measured<Figure>) {
        self.0.push((step, measured));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.0.len() >= Self::MOST
    }

    /// All of it, known and in its order. Waits for the GPU.
    pub fn take(&mut self) -> Result<Vec<(u64, Measured<f64>)>, RunError> {
        let taken = std::mem::take(&mut self.0);
        let figures: Vec<Figure> = taken
            .iter()
            .flat_map(|(_, measured)| match measured {
                Measured::Batch { total, raw, correct, .. } => {
                    vec![total.clone(), raw.clone(), correct.clone()]
                }
                Measured::Norm(norm) => vec![norm.clone()],
            })
            .collect();
        let mut values = read_all(&figures)?.into_iter();
        // As many values as figures, in the same order.
        let mut next = || values.next().unwrap_or(f64::NAN);
        let known = |(step, measured)| {
            let measured = match measured {
                Measured::Batch { samples, .. } => {
                    Measured::Batch { total: next(), raw: next(), correct: next(), samples }
                }
                Measured::Norm(_) => Measured::Norm(next()),
            };
            (step, measured)
        };
        Ok(taken.into_iter().map(known).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tensor on the CPU stands for one on a GPU: the same code reads it.
    fn coming(value: f64, dtype: DType) -> Figure {
        Figure::Coming(Tensor::new(value, &Device::Cpu).unwrap().to_dtype(dtype).unwrap())
    }

    #[test]
    fn figures_are_read_in_their_order_whatever_their_dtypes() {
        let figures =
            [coming(1.5, DType::F32), Figure::Known(2.0), coming(3.0, DType::F64), coming(4.5, DType::F32)];
        assert_eq!(read_all(&figures).unwrap(), [1.5, 2.0, 3.0, 4.5]);
        assert_eq!(read_all(&[]).unwrap(), [0.0; 0]);
    }

    #[test]
    fn means_of_figures_are_those_of_their_values() {
        for [a, b] in [
            [Figure::Known(2.0), Figure::Known(5.0)],
            [coming(2.0, DType::F64), coming(5.0, DType::F64)],
            [Figure::Known(2.0), coming(5.0, DType::F64)],
            [coming(2.0, DType::F64), Figure::Known(5.0)],
        ] {
            let sum = Figure::Known(0.0).plus(&a, 1.0).unwrap().plus(&b, 3.0).unwrap();
            assert_eq!(sum.over(4.0).unwrap().read().unwrap(), 4.25);
        }
    }

    #[test]
    fn what_is_pending_comes_back_known_and_in_order() {
        let mut pending = Pending::default();
        let [total, raw, correct] = [3.0, 2.0, 7.0].map(|value| coming(value, DType::F32));
        pending.add(1, Measured::Batch { total, raw, correct, samples: 8 });
        pending.add(1, Measured::Norm(coming(0.5, DType::F64)));
        pending.add(2, Measured::Norm(Figure::Known(f64::INFINITY)));
        let taken = pending.take().unwrap();
        assert!(pending.is_empty());
        let [(1, first), (1, Measured::Norm(0.5)), (2, Measured::Norm(f64::INFINITY))] = &taken[..] else {
            panic!("{taken:?}")
        };
        assert!(matches!(first, Measured::Batch { total: 3.0, raw: 2.0, correct: 7.0, samples: 8 }));
    }
}
