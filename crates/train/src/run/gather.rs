//! The gradient of a step: of one batch, or the mean over `accumulate` of them; and once more for optimizers that look at a
//! second point.
use super::figure::Figure;
use super::task::{Gradient, Task};
use super::{Measured, Run, RunError};
use candle_core::Var;
use candle_core::backprop::GradStore;
use taper_optim::{Accumulator, global_norm_on_device};

/// The mean over the batches of a step, by their samples.
struct Mean {
    grads: Accumulator,
    total: Figure,
    raw: Figure,
    samples: u64,
    rate_scale: f64,
    batches: u64,
}

impl Mean {
    fn new(vars: &[Var]) -> Self {
        let zero = Figure::Known(0.0);
        let grads = Accumulator::new(vars.to_vec());
        Self { grads, total: zero.clone(), raw: zero, samples: 0, rate_scale: 0.0, batches: 0 }
    }

    fn add(&mut self, batch: &Gradient) -> Result<(), RunError> {
        let weight = batch.samples as f64;
        self.total = self.total.plus(&batch.total, weight)?;
        self.raw = self.raw.plus(&batch.raw, weight)?;
        self.samples += batch.samples;
        self.rate_scale += batch.rate_scale;
        self.batches += 1;
        // The losses, which may be on a GPU, have their mean here.
        Ok(self.grads.add(&batch.grads, 0.0, weight)?)
    }

    /// The step's gradient, where `last` was its last batch. `None` without a batch.
    fn take(mut self, last: Gradient) -> Result<Option<Gradient>, RunError> {
        let Some((grads, _)) = self.grads.take()? else { return Ok(None) };
        let (total, raw) = (self.total.over(self.samples as f64)?, self.raw.over(self.samples as f64)?);
        // Windows of text have their rates by their lengths: the step has that of their mean length.
        let rate_scale = self.rate_scale / self.batches as f64;
        let (samples, batches) = (self.samples, self.batches);
        Ok(Some(Gradient { grads, total, raw, samples, rate_scale, batches, ..last }))
    }
}

impl Run<'_> {
    /// The gradient of the next step. `None` at the end of the epoch.
    pub(super) fn gather(&mut self) -> Result<Option<Gradient>, RunError> {
        let accumulate = self.recipe.train.accumulate;
        let mut mean = (accumulate > 1).then(|| Mean::new(&self.optimizers.vars));
        let looks = self.microscope.as_ref().is_some_and(|m| m.wants_batch(self.state.step + 1));
        self.task.begin_step(self.state.step, self.optimizers.gradients() > 1 || looks)?;
        for number in 0.. {
            let draw = self.state.step.wrapping_mul(accumulate).wrapping_add(number);
            let Some(batch) = self.task.next(draw)? else { break };
            self.measure(Measured::Batch {
                total: batch.total.clone(),
                raw: batch.raw.clone(),
                correct: batch.correct.clone(),
                samples: batch.samples,
            })?;
            self.state.batch += 1;
            let Some(so_far) = &mut mean else { return Ok(Some(batch)) };
            so_far.add(&batch)?;
            if number + 1 == accumulate || batch.last {
                return mean.map_or(Ok(None), |mean| mean.take(batch));
            }
        }
        Ok(None)
    }
}

/// The gradient of the same batches with the parameters where they are now; one that is not finite is refused.
pub(super) fn again(
    task: &mut dyn Task,
    vars: &[Var],
    first: &Gradient,
    step: u64,
) -> Result<Gradient, RunError> {
    checked(once_more(task, vars, first)?, vars, step)
}

/// The gradient of the same batches with the parameters where they are now, whatever it is.
pub(super) fn once_more(task: &mut dyn Task, vars: &[Var], first: &Gradient) -> Result<Gradient, RunError> {
    let mut mean = (first.batches > 1).then(|| Mean::new(vars));
    for number in 0..first.batches {
        let batch = task.again(number)?;
        let Some(so_far) = &mut mean else { return Ok(batch) };
        so_far.add(&batch)?;
        if number + 1 == first.batches
            && let Some(gradient) = mean.take().map_or(Ok(None), |mean| mean.take(batch))?
        {
            return Ok(gradient);
        }
    }
    Err(candle_core::Error::msg("a second gradient of a step without a batch").into())
}

/// The gradients of both halves of the same batches, with the samples of both together; `None` where batches have no halves.
pub(super) fn halves(
    task: &mut dyn Task,
    vars: &[Var],
    first: &Gradient,
) -> Result<Option<([GradStore; 2], f64)>, RunError> {
    let mut means = [0, 1].map(|_| Accumulator::new(vars.to_vec()));
    let mut samples = 0.0;
    for number in 0..first.batches {
        for (half, mean) in means.iter_mut().enumerate() {
            let Some(gradient) = task.half(number, half)? else { return Ok(None) };
            samples += gradient.samples as f64;
            mean.add(&gradient.grads, 0.0, gradient.samples as f64)?;
        }
    }
    let [mut a, mut b] = means;
    Ok(a.take()?.zip(b.take()?).map(|((a, _), (b, _))| ([a, b], samples)))
}

/// Refuses a second gradient that is not finite: the weights are where the step found them.
fn checked(gradient: Gradient, vars: &[Var], step: u64) -> Result<Gradient, RunError> {
    let norm = Figure::of(&global_norm_on_device(&gradient.grads, vars)?)?;
    for (what, value) in [("the loss", gradient.total.read()?), ("the norm of the gradient", norm.read()?)] {
        if !value.is_finite() {
            let what = format!("{what} at the step's second point is {value}");
            return Err(RunError::Diverged { what, step });
        }
    }
    Ok(gradient)
}
