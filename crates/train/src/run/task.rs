//! What a run trains: something with parameters, a loss to descend and figures to be judged by.
//!
//! A network with its data ([`network`](super::network)) and a numeric function ([`problem`](super::problem)) are both
//! that; the loop does not tell them apart.
use super::RunError;
use super::checkpoint::Sums;
use super::figure::Figure;
use super::locate::locate;
use super::metrics::{Split, Values};
use super::network::Network;
use super::problem::Minimisation;
use crate::Registries;
use crate::recipe::{self, Recipe};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use taper_data::{Provenance, Search};
use taper_models::Params;
use taper_world::World;

/// The gradient of one batch, and what came to light on the way to it.
pub(crate) struct Gradient {
    pub grads: GradStore,
    /// The loss that was differentiated, regularisation terms included.
    pub total: Figure,
    /// The likelihood alone.
    pub raw: Figure,
    /// Right answers.
    pub correct: Figure,
    /// Samples, or tokens.
    pub samples: u64,
    /// The factor of this batch's learning rate.
    pub rate_scale: f64,
    /// Whether it was the last batch of its epoch.
    pub last: bool,
    /// How many batches it is of.
    pub batches: u64,
}

/// A batch that an evaluation has come through.
pub(crate) struct Seen<'a> {
    /// Samples, or tokens.
    pub samples: u64,
    /// The logits, `[n, classes]`, if the model made them in one piece.
    pub logits: Option<&'a Tensor>,
    /// The class of each sample, or the next tokens.
    pub target: &'a Tensor,
}

/// What a run trains.
pub(crate) trait Task {
    /// All parameters and buffers.
    fn params(&self) -> &Params;
    /// Where the data came from, for the manifest.
    fn provenance(&self) -> &Provenance;
    /// The figures of merit it knows, its own first.
    fn metrics(&self) -> &'static [&'static str];
    /// Whether there is such a split to evaluate on.
    fn has(&self, split: Split) -> bool;
    /// Batches of an epoch, from 0.
    fn batches(&self, epoch: u64) -> u64;
    /// Shows the data to what wants to see some of it before the first step of a run from nothing.
    fn introduce(&mut self) -> Result<(), RunError> {
        Ok(())
    }
    /// Says whether the evaluations from here on come after the last step of the run.
    fn set_last(&mut self, _last: bool) {}
    /// Goes to a batch of an epoch, both from 0. The first starts afresh; what is carried from batch to batch stays
    /// as it is before the others.
    fn go_to(&mut self, epoch: u64, batch: u64) -> Result<(), RunError>;
    /// The next batch's loss and gradient; everything random comes from `draw`. `None` at the end of the epoch.
    fn next(&mut self, draw: u64) -> Result<Option<Gradient>, RunError>;
    /// The batches from here on are those of the step after `taken` ones. They are kept for [`Task::again`] if the step is to have a second
    /// gradient.
    fn begin_step(&mut self, taken: u64, twice: bool) -> Result<(), RunError>;
    /// The loss and gradient of a batch of this step, from 0, once more with the parameters as they are: the same draws, the
    /// same that was carried, and running statistics as if it had not been.
    fn again(&mut self, number: u64) -> Result<Gradient, RunError>;
    /// The same of one half of the batch, 0 or 1: halves of as many samples each, where a window of text is one. `None` where it
    /// has none.
    fn half(&mut self, _number: u64, _half: usize) -> Result<Option<Gradient>, RunError> {
        Ok(None)
    }
    /// What a training line says of an epoch; nothing where a mean over the epoch means nothing.
    fn epoch_values(&self, sums: &Sums) -> Values;
    /// The figures of a split for the parameters as they are.
    fn evaluate(&mut self, split: Split) -> Result<Values, RunError> {
        self.evaluate_while(split, &mut |_| Ok(true))
    }
    /// The same over as many batches as `more`, shown each, asks for.
    fn evaluate_while(
        &mut self,
        split: Split,
        more: &mut dyn FnMut(&Seen) -> Result<bool, RunError>,
    ) -> Result<Values, RunError>;
    /// Gathers the running statistics anew: the mean over the first batches of an epoch, at most `batches`, as they are
    /// trained on.
    fn gather_statistics(&mut self, epoch: u64, batches: usize) -> Result<(), RunError>;
    /// What is carried from one batch to the next, by name.
    fn carry(&self) -> Result<Vec<(String, Tensor)>, RunError>;
    /// Sets what [`Task::carry`] returned.
    fn set_carry(&mut self, carry: &[(String, Tensor)]) -> Result<(), RunError>;
}

/// The task of a recipe.
pub(crate) fn of(
    recipe: &Recipe,
    registries: &Registries,
    search: &Search,
    device: &Device,
    world: &World,
) -> Result<Box<dyn Task>, RunError> {
    Ok(match recipe.task() {
        recipe::Task::Network { data, model } => Box::new(
            Network::new(recipe, data, model, registries, search, device, world)
                .map_err(|e| locate(recipe, e))?,
        ),
        recipe::Task::Problem(problem) => Box::new(Minimisation::new(recipe, problem, registries)?),
    })
}
