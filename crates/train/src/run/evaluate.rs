//! Evaluations, and what follows from them: the best so far, early stops, plateaus, the switch to averaged SGD.
use super::task::Task;
use super::{Run, RunError, Split, summary};
use taper_models::op_span;
use tracing::debug;

/// The span of an evaluation, for profilers: what happens inside is no part of a step.
pub const EVALUATION: &str = "evaluation";

impl Run<'_> {
    /// Measures the validation and test sets, with the average of the weights where there is one. True when it was the
    /// best so far.
    pub fn evaluate(&mut self) -> Result<bool, RunError> {
        let _span = op_span!(EVALUATION, "forward", 0);
        self.settle()?;
        let mut best = false;
        for split in [Split::Val, Split::Test] {
            if !self.task.has(split) {
                continue;
            }
            let values = match self.average.in_use() {
                true => self.with_average(|task| task.evaluate(split))?,
                false => self.task.evaluate(split)?,
            };
            let find = |name: &str| values.iter().find(|(n, _)| *n == name).map(|(_, value)| *value);
            let (value, loss) = (find(self.metric), find("loss"));
            self.record(split, values)?;
            if Some(split) == self.watched {
                best = value.is_some_and(|value| self.take_note(value));
                if loss.is_some_and(|loss| self.average.observe(loss, self.last_factor())) {
                    self.progress.line(&format!("switching to averaged SGD after step {}", self.state.step));
                    self.optimizers.switch_to_averaged();
                }
            }
        }
        Ok(best)
    }

    /// Works with the average in the place of the weights, and puts them back.
    pub fn with_average<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Task) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        self.average.exchange()?;
        let result = work(&mut *self.task);
        self.average.exchange()?;
        result
    }

    /// The best so far, how long ago something improved, and the plateau schedule's look at it. True for a new best.
    fn take_note(&mut self, value: f64) -> bool {
        let before = self.optimizers.plateau();
        self.optimizers.observe(if summary::higher_is_better(self.metric) { -value } else { value });
        let after = self.optimizers.plateau();
        if before.factor != after.factor {
            debug!("{}: a plateau: the rate is multiplied by {}", self.recipe.name, after.factor);
        }
        let state = &mut self.state;
        let delta = self.recipe.train.early_stop.as_ref().map_or(0.0, |stop| stop.min_delta);
        if summary::beats(self.metric, value, state.improved, delta) {
            (state.improved, state.stale) = (Some(value), 0);
        } else {
            state.stale += 1;
        }
        if self.recipe.train.early_stop.as_ref().is_some_and(|stop| stop.patience == state.stale) {
            self.progress.line(&format!("no improvement for {} evaluations: stopping early", state.stale));
        }
        let best = summary::beats(self.metric, value, state.best.map(|(best, _)| best), 0.0);
        if best {
            state.best = Some((value, state.step));
        }
        best
    }
}
