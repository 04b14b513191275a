//! Trains a model of your own, written with candle-nn, with an optimizer of your own, from a recipe.
//!
//!   cargo run --release --workspace --example own_model
//!
//! A model is a serde configuration that builds it through a `VarBuilder`, and a name. An optimizer is a rule: a serde
//! configuration, the scalars of a step and the update of one element. Groups, schedules, checkpoints and resuming come
//! with the framework.
use candle_core::{Module, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use serde::{Deserialize, Serialize};
use std::path::Path;
use taper_models::registry::Cost;
use taper_models::{Mode, Model, Task};
use taper_optim::rule::{Config, Input, Invalid, Real, Refusal, Rule, ranges};
use taper_optim::{Info, scalars};
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

impl taper_models::registry::Config for GeluNet {
    fn build(&self, task: Task, vb: VarBuilder) -> taper_models::Result<Box<dyn Model>> {
        let (inputs, classes) = Self::sizes(task);
        let first = linear(inputs, self.width, vb.pp("first"))?;
        Ok(Box::new(Net { first, second: linear(self.width, classes, vb.pp("second"))? }))
    }

    fn cost(&self, task: Task) -> taper_models::Result<Cost> {
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
    fn logits(&mut self, input: &Tensor, _: Mode) -> taper_models::Result<Tensor> {
        let hidden = self.first.forward(&input.flatten_from(1)?)?.gelu()?;
        Ok(self.second.forward(&hidden)?)
    }
}

/// Lion: steps of one size against the sign of a blend of momentum and gradient.
#[derive(Debug)]
struct Lion;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LionConfig {
    lr: f64,
    beta1: f64,
    beta2: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99 }
    }
}

impl Config for LionConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("beta1", self.beta1)?;
        ranges::fraction("beta2", self.beta2)
    }
}

scalars! {
    struct LionScalars { lr, beta1, beta2 }
}

const LION: Info = Info {
    name: "my_lion",
    about: "steps of one size against the sign of a blend of momentum and gradient",
    paper: "Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675",
    year: 2023,
    formula: "x ← x - η sign(β₁m + (1-β₁)∇f); m ← β₂m + (1-β₂)∇f",
};

impl Rule for Lion {
    type Config = LionConfig;
    type Scalars = LionScalars;
    const BUFFERS: (usize, usize) = (1, 1);

    fn names() -> Vec<(&'static Info, LionConfig)> {
        vec![(&LION, LionConfig::default())]
    }
    fn info(_: &LionConfig) -> &'static Info {
        &LION
    }
    fn buffers(_: &LionConfig) -> &'static [&'static str] {
        &["m"]
    }
    fn prepare(config: &LionConfig, input: &Input, _: &mut [f64]) -> Result<LionScalars, Refusal> {
        let beta1 = input.momentum;
        Ok(LionScalars { lr: input.lr, beta1, beta2: config.beta2 })
    }
    fn update<F: Real>(s: &LionScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let (zero, one) = (F::from_f64(0.0), F::from_f64(1.0));
        let blend = s.beta1 * state[0] + (one - s.beta1) * g;
        state[0] = s.beta2 * state[0] + (one - s.beta2) * g;
        let down = if blend > zero { s.lr } else { zero };
        if blend < zero { x + s.lr } else { x - down }
    }
}

/// Trains it on MNIST for 100 steps.
pub fn train(runs: &Path) -> Result<Outcome, RunError> {
    let mut registries = Registries::default();
    registries.models.register("gelu-net", "an example", GeluNet::default())?;
    registries.optimizers.register::<Lion>()?;
    let text = "
data: {name: mnist}
model: {name: gelu-net, width: 64}
optimizer: {name: my_lion, lr: 0.001}
schedule: {kind: cosine, per: step}
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
