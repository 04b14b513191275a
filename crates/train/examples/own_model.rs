//! Trains a model of your own, written with candle-nn, from a recipe.
//!
//!   cargo run --release --workspace --example own_model
//!
//! All it takes is a serde configuration that builds the model through a `VarBuilder`, and a name.
use candle_core::{Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use serde::{Deserialize, Serialize};
use std::path::Path;
use taper_models::registry::{Config, Cost};
use taper_models::{Mode, Model, Result, Task};
use taper_train::run::{self, Options, Outcome, RunError};
use taper_train::{Recipe, Registries};

/// Two candle-nn layers with a GELU between them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct GeluNet {
    width: usize,
}

impl Default for GeluNet {
    fn default() -> Self {
        Self { width: 32 }
    }
}

impl GeluNet {
    fn sizes(task: Task) -> (usize, usize) {
        match task {
            Task::Images { height, width, channels, classes } => (height * width * channels, classes),
            Task::Tokens { vocab } => (1, vocab),
        }
    }
}

impl Config for GeluNet {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        let (inputs, classes) = Self::sizes(task);
        let first = linear(inputs, self.width, vb.pp("first"))?;
        Ok(Box::new(Net { first, second: linear(self.width, classes, vb.pp("second"))? }))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        let (inputs, classes) = Self::sizes(task);
        let parameters = ((inputs + 1) * self.width + (self.width + 1) * classes) as u64;
        Ok(Cost { parameters, flops: 2 * parameters, activation_bytes: 8 * self.width as u64 })
    }
}

struct Net {
    first: Linear,
    second: Linear,
}

impl Model for Net {
    fn logits(&mut self, input: &Tensor, _: Mode) -> Result<Tensor> {
        let hidden = self.first.forward(&input.flatten_from(1)?)?.gelu()?;
        Ok(self.second.forward(&hidden)?)
    }
}

/// Trains it on MNIST for 100 steps of DecGD.
pub fn train(runs: &Path) -> Result<Outcome, RunError> {
    let mut registries = Registries::default();
    registries.models.register("gelu-net", "an example", GeluNet::default())?;
    let text = "
data: {name: mnist}
model: {name: gelu-net, width: 64}
optimizer: {name: decgd, lr: 0.05}
train: {steps: 100}
";
    let recipe = Recipe::parse("own_model.yaml", text, &[], &registries)?;
    run::run(&recipe, &registries, &Options { runs: runs.into(), ..Default::default() })
}

#[allow(dead_code)] // a test includes this file and has a `main` of its own
fn main() -> Result<(), RunError> {
    let outcome = train(Path::new("runs"))?;
    println!("{:.2} % of the test images are right", 100.0 * outcome.summary.last["test.accuracy"]);
    Ok(())
}
