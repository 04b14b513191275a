//! Gradient accumulation: one step from several micro-batches.
use crate::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

/// The weighted mean of the gradients and losses of micro-batches.
///
/// Weights are the numbers of samples: then the result equals that of the whole batch at once, up to rounding.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f64], &Device::Cpu)?;
/// let mut sum = taper_optim::Accumulator::new(vec![x.clone()]);
/// for scale in [1.0, 3.0] {
///     let loss = (x.sum_all()? * scale)?;
///     sum.add(&loss.backward()?, loss.to_scalar()?, 1.0)?;
/// }
/// let (grads, loss) = sum.take()?.unwrap();
/// assert_eq!((grads.get(&x).unwrap().to_vec1::<f64>()?[0], loss), (2.0, 2.0));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Accumulator {
    vars: Vec<Var>,
    sums: Vec<Option<Tensor>>,
    loss: f64,
    weight: f64,
}

impl Accumulator {
    /// For the gradients of `vars`.
    pub fn new(vars: Vec<Var>) -> Self {
        let sums = vec![None; vars.len()];
        Self { vars, sums, loss: 0.0, weight: 0.0 }
    }

    /// Adds a micro-batch whose mean loss and gradients weigh `weight`.
    pub fn add(&mut self, grads: &GradStore, loss: f64, weight: f64) -> Result<()> {
        for (var, sum) in self.vars.iter().zip(&mut self.sums) {
            let Some(grad) = grads.get(var) else { continue };
            // Detached: a kept gradient may hold on to the whole graph of its batch.
            let share = (grad.detach() * weight)?;
            *sum = Some(match sum.take() {
                Some(sum) => (sum + share)?,
                None => share,
            });
        }
        self.loss += loss * weight;
        self.weight += weight;
        Ok(())
    }

    /// The means, and an empty accumulator again; `None` when nothing was added.
    pub fn take(&mut self) -> Result<Option<(GradStore, f64)>> {
        if self.weight == 0.0 {
            return Ok(None);
        }
        let mut grads = GradStore::default();
        for (var, sum) in self.vars.iter().zip(&mut self.sums) {
            if let Some(sum) = sum.take() {
                grads.insert(var, (sum / self.weight)?);
            }
        }
        let loss = self.loss / self.weight;
        (self.loss, self.weight) = (0.0, 0.0);
        Ok(Some((grads, loss)))
    }
}
