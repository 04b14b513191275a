//! An optimizer of your own: one file with its configuration, its arithmetic of one element and its record. Groups,
//! state, threads, dtypes, clipping and saving come from the driver.
//!
//!   cargo run --release --workspace --example custom_optimizer
use candle_core::{DType, Device, Tensor, Var};
use serde::{Deserialize, Serialize};
use serde_json::json;
use taper_optim::rule::{Config, Input, Invalid, Real, Refusal, Rule, ranges};
use taper_optim::{Group, Info, Registry, StepContext, scalars};

/// Lion (Chen et al., 2023): steps of one size, in the direction of the sign of the momentum. The crate has it as `lion`: this is
/// how it would be written elsewhere.
#[derive(Debug)]
struct Lion;

/// The hyperparameters: recipes and groups may set each by its name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct LionConfig {
    lr: f64,
    beta1: f64,
    beta2: f64,
    weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
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
        ranges::fraction("beta2", self.beta2)?;
        ranges::weight_decay(self.weight_decay)
    }
}

scalars! {
    /// What the kernel needs, computed once a step in f64.
    struct LionScalars { lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay }
}

const LION: Info = Info {
    name: "my_lion",
    about: "steps of one size along the sign of the momentum",
    paper: "Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675",
    year: 2023,
    formula: "x ← x - η(sign(β₁m + (1-β₁)g) + λx); m ← β₂m + (1-β₂)g",
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
        Ok(LionScalars {
            lr: input.lr,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            decay: input.lr * config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &LionScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let zero = F::from_f64(0.0);
        let direction = s.beta1 * state[0] + s.one_minus_beta1 * g;
        state[0] = s.beta2 * state[0] + s.one_minus_beta2 * g;
        let step = if direction > zero { s.lr } else { -s.lr };
        x - if direction == zero { zero } else { step } - s.decay * x
    }
}

/// Registers Lion and takes a hundred steps down (x - 1)² with it, by name and with a group, as a recipe would.
pub fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut registry = Registry::builtin();
    registry.register::<Lion>()?;

    let weight = Var::zeros(8, DType::F32, &Device::Cpu)?;
    let bias = Var::zeros(8, DType::F32, &Device::Cpu)?;
    let params = vec![("fc.weight".to_owned(), weight.clone()), ("fc.bias".to_owned(), bias.clone())];
    let config = json!({"lr": 0.02}).as_object().cloned().unwrap_or_default();
    let groups = [Group::new("*.bias").set("lr", 0.01)];
    let mut optimizer = registry.get("my_lion")?.build(params, &config, &groups)?;

    let distance = |x: &Tensor| -> candle_core::Result<Tensor> { (x - 1.0)?.sqr()?.sum_all() };
    for _ in 0..100 {
        let loss = (distance(&weight)? + distance(&bias)?)?;
        optimizer.step(&loss.backward()?, &StepContext::new())?;
    }
    // The steps never shrink, so that x ends within a few of them of the minimum.
    let left = |x: &Var, lr: f32| -> candle_core::Result<bool> {
        Ok(x.to_vec1::<f32>()?.iter().all(|x| (x - 1.0).abs() < 12.0 * lr))
    };
    assert!(left(&weight, 0.02)? && left(&bias, 0.01)?);
    println!("{}: {}", optimizer.info().name, optimizer.info().about);
    Ok(())
}
