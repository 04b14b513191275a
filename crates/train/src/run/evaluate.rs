//! Evaluations, and what follows from them: the best so far, early stops, plateaus, the switch to averaged SGD.
use super::task::Task;
use super::weights::Buffers;
use super::{Run, RunError, Split, summary};
use taper_models::op_span;
use tracing::debug;

/// The span of an evaluation, for profilers: what happens inside is no part of a step.
pub const EVALUATION: &str = "evaluation";

/// Over how many batches statistics are gathered for weights that only evaluations use: at every evaluation, so not over all
/// of them. Fifty is what the authors of Schedule-Free advise.
const STATISTICS_BATCHES: usize = 50;

impl Run<'_> {
    /// Measures the validation and test sets: with the average of the weights where there is one, with the optimizer's own
    /// weights for evaluation where it has such. True when it was the best so far.
    pub fn evaluate(&mut self) -> Result<bool, RunError> {
        let _span = op_span!(EVALUATION, "forward", 0);
        self.settle()?;
        self.task.set_last(self.state.step >= self.steps);
        let mut best = false;
        for split in [Split::Val, Split::Test] {
            if !self.task.has(split) {
                continue;
            }
            let values = match self.average.in_use() {
                true => self.with_average(|task| task.evaluate(split))?,
                false => match self.with_evaluation_weights(|task| task.evaluate(split))? {
                    Some(values) => values,
                    None => self.task.evaluate(split)?,
                },
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

    /// Works with the weights that the optimizer has for evaluation and with batch statistics of theirs, and puts back what is
    /// trained, to the bit. `None`, with nothing done, where the weights are the same.
    pub fn with_evaluation_weights<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Task) -> Result<T, RunError>,
    ) -> Result<Option<T>, RunError> {
        if !self.optimizers.eval_weights()? {
            return Ok(None);
        }
        let result = self.with_gathered_statistics(work);
        self.optimizers.train_weights()?;
        result.map(Some)
    }

    /// Works with batch statistics gathered for the weights as they are; once a step is enough, as they are a function of it.
    fn with_gathered_statistics<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Task) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let trained = Buffers::of(self.task.params())?;
        if trained.is_empty() {
            return work(&mut *self.task);
        }
        match &self.gathered {
            Some((step, gathered)) if *step == self.state.step => gathered.restore()?,
            _ => {
                self.task.gather_statistics(0, STATISTICS_BATCHES)?;
                self.gathered = Some((self.state.step, Buffers::of(self.task.params())?));
            }
        }
        let result = work(&mut *self.task);
        trained.restore()?;
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
