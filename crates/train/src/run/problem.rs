//! A numeric function as a task: one endless epoch whose every batch is the whole function, or that of a step.
use super::RunError;
use super::checkpoint::Sums;
use super::figure::Figure;
use super::metrics::{Split, Values};
use super::task::{Gradient, Seen, Task};
use crate::Registries;
use crate::numeric::Function;
use crate::recipe::{Problem, Recipe};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use std::collections::HashMap;
use taper_data::Provenance;
use taper_models::Params;

/// An optimizer minimises a function of the one parameter `x`, in f64.
pub(crate) struct Minimisation {
    provenance: Provenance,
    function: Box<dyn Function>,
    params: Params,
    x: Var,
    seed: u64,
    /// The draw of every batch of the step.
    draws: Vec<u64>,
}

impl Minimisation {
    pub fn new(recipe: &Recipe, problem: &Problem, registries: &Registries) -> Result<Self, RunError> {
        let function = registries
            .problems
            .build(&problem.name, &problem.config)
            .map_err(|e| recipe.error_at("problem", e.message))?;
        let start = problem.start(function.start(), recipe.seed);
        let params = Params::new(recipe.seed);
        let vb = params.builder(DType::F64, &Device::Cpu);
        vb.get_with_hints(start.len(), "x", candle_nn::init::ZERO)?;
        let start = Tensor::new(start, &Device::Cpu)?;
        params.set(&HashMap::from([("x".to_owned(), start)]))?;
        // The builder above made the one variable.
        let x = params.vars().swap_remove(0).1;
        let provenance =
            Provenance { source: "computed".into(), ..Provenance::generated(&problem.name, Vec::new()) };
        Ok(Self { provenance, function, params, x, seed: recipe.seed, draws: Vec::new() })
    }

    fn gradient(&self, draw: u64) -> Result<Gradient, RunError> {
        let x = self.x.to_vec1::<f64>()?;
        let mut gradient = vec![0.0; x.len()];
        let f = self.function.at(self.seed, draw, &x, &mut gradient);
        let mut grads = GradStore::default();
        let gradient = Tensor::from_vec(gradient, self.x.shape(), self.x.device())?;
        grads.insert(&self.x, gradient);
        let (samples, rate_scale, last, batches) = (1, 1.0, false, 1);
        let [total, raw, correct] = [f, f, 0.0].map(Figure::Known);
        Ok(Gradient { grads, total, raw, correct, samples, rate_scale, last, batches })
    }
}

impl Task for Minimisation {
    fn params(&self) -> &Params {
        &self.params
    }

    fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    fn metrics(&self) -> &'static [&'static str] {
        &["loss"]
    }

    /// The value after a step is its test: there is nothing else to judge by.
    fn has(&self, split: Split) -> bool {
        split == Split::Test
    }

    fn batches(&self, _: u64) -> u64 {
        u64::MAX
    }

    fn go_to(&mut self, _: u64, _: u64) -> Result<(), RunError> {
        Ok(())
    }

    fn next(&mut self, draw: u64) -> Result<Option<Gradient>, RunError> {
        self.draws.push(draw);
        self.gradient(draw).map(Some)
    }

    fn begin_step(&mut self, _: u64, _: bool) -> Result<(), RunError> {
        self.draws.clear();
        Ok(())
    }

    fn again(&mut self, number: u64) -> Result<Gradient, RunError> {
        // Of a batch that was not drawn nobody asks.
        let draw = usize::try_from(number).ok().and_then(|number| self.draws.get(number));
        self.gradient(draw.copied().unwrap_or_default())
    }

    /// The mean of f over all steps says nothing: `log_every` writes the steps themselves.
    fn epoch_values(&self, _: &Sums) -> Values {
        Values::new()
    }

    fn evaluate_while(
        &mut self,
        _: Split,
        _: &mut dyn FnMut(&Seen) -> Result<bool, RunError>,
    ) -> Result<Values, RunError> {
        let x = self.x.to_vec1::<f64>()?;
        Ok(vec![("loss", self.function.evaluate(&x, &mut vec![0.0; x.len()]))])
    }

    fn gather_statistics(&mut self, _: u64, _: usize) -> Result<(), RunError> {
        Ok(())
    }

    fn carry(&self) -> Result<Vec<(String, Tensor)>, RunError> {
        Ok(Vec::new())
    }

    fn set_carry(&mut self, _: &[(String, Tensor)]) -> Result<(), RunError> {
        Ok(())
    }
}
