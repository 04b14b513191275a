//! What a run would train, without a step of it.
use super::open::{device, length};
use super::optimizers::Optimizers;
use super::{RunError, Split, task};
use crate::{Recipe, Registries};
use serde_json::Value;
use std::time::Instant;
use taper_data::Search;
use taper_optim::ParamInfo;
use taper_world::World;

/// A run as it would start.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// Epochs.
    pub epochs: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// The optimizers with their parameters, the recipe's own first.
    pub parts: Vec<Part>,
    /// Parameters that are not trained: name and size.
    pub frozen: Vec<(String, usize)>,
}

/// An optimizer and the parameters it has.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its name.
    pub optimizer: String,
    /// The hyperparameters of its default group.
    pub config: Value,
    /// Its parameters with their groups.
    pub params: Vec<ParamInfo>,
}

impl Inspection {
    /// The same with so many batches an epoch.
    pub fn with_batches(self, recipe: &Recipe, batches: u64) -> Self {
        let (epochs, steps) = length(recipe, |_| batches);
        Self { epochs, steps, ..self }
    }
}

/// Evaluates the start of the test set of a run that has not begun, for as long as `more`, told the samples of each batch,
/// asks for another. Returns when the evaluation began, the data read and the model built.
pub fn evaluate_start(
    recipe: &Recipe,
    registries: &Registries,
    search: &Search,
    more: &mut dyn FnMut(u64) -> bool,
) -> Result<Instant, RunError> {
    let mut task = task::of(recipe, registries, search, &device(recipe)?, &World::alone())?;
    let begin = Instant::now();
    task.evaluate_while(Split::Test, &mut |seen| Ok(more(seen.samples)))?;
    Ok(begin)
}

/// Builds the model and its optimizers as a run would, with all their refusals: a pattern that matches no parameter is an
/// error here as there.
pub fn inspect(recipe: &Recipe, registries: &Registries, search: &Search) -> Result<Inspection, RunError> {
    let task = task::of(recipe, registries, search, &device(recipe)?, &World::alone())?;
    let params = task.params().trainable();
    let optimizers = Optimizers::new(recipe, registries, params.clone(), &World::alone())?;
    let (epochs, steps) = length(recipe, |epoch| task.batches(epoch));
    // The first is called as in the recipe: `decgd` with a decay has the rule of `decgdw`.
    let part = |(place, optimizer): (usize, &dyn taper_optim::Optimizer)| Part {
        optimizer: if place == 0 { &recipe.optimizer.name } else { optimizer.info().name }.to_owned(),
        config: optimizer.config(),
        params: optimizer.params(),
    };
    let parts: Vec<Part> = optimizers.each().enumerate().map(part).collect();
    let trained = |name: &str| parts.iter().any(|part| part.params.iter().any(|param| param.name == name));
    let frozen = params.iter().filter(|(name, _)| !trained(name));
    let frozen = frozen.map(|(name, var)| (name.clone(), var.elem_count())).collect();
    Ok(Inspection { epochs, steps, parts, frozen })
}
