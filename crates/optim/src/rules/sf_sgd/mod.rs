//! Schedule-Free SGD (Defazio et al., 2024): an average of the iterates in place of a schedule.
//!
//! As [`sf_adamw`](super::sf_adamw), which explains y, z, x and c, with
//!
//! ```text
//! u = g + λ y_t
//! y_{t+1} = (1 - c) y_t + c z_t + η_t (β (1 - c) - 1) u
//! z_{t+1} = z_t - η_t u
//! x_{t+1} = (y_{t+1} - (1 - β) z_{t+1}) / β
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Optimizer, SfSgd, SfSgdConfig};
//!
//! let y = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = SfSgd::new(vec![y.clone()], SfSgdConfig { lr: 0.5, ..Default::default() })?;
//! for _ in 0..20 {
//!     optimizer.backward_step(&y.sqr()?.sum_all()?)?;
//! }
//! optimizer.eval_weights()?;
//! assert!(y.to_vec1::<f64>()?[0].abs() < 0.5);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the package `schedulefree`. The best rates are 10 to 50 times those of SGD with momentum: the default is 1.
//! - `momentum` is no momentum that a schedule could change, but β above.
//!
//! Reference: *The Road Less Scheduled*, arXiv:2405.15682.
use super::sf_adamw::{Averaging, MEMORY};
use crate::rule::{Config, ElementEvaluation, Info, Input, Invalid, Real, Refusal, Rule, ranges, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Schedule-Free SGD.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SfSgdConfig {
    /// Learning rate η. Defaults to 1.
    pub lr: f64,
    /// Where between z (0) and the average x (1) gradients are taken, β. Defaults to 0.9.
    pub momentum: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Steps over which the rate grows from 0. Defaults to 0.
    pub warmup_steps: u64,
    /// Power of the step's number in its weight. Defaults to 0.
    pub r: f64,
    /// Power of the largest rate in a step's weight. Defaults to 2.
    pub weight_lr_power: f64,
}

impl Default for SfSgdConfig {
    fn default() -> Self {
        Self { lr: 1.0, momentum: 0.9, weight_decay: 0.0, warmup_steps: 0, r: 0.0, weight_lr_power: 2.0 }
    }
}

impl Config for SfSgdConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        let within = self.momentum > 0.0 && self.momentum < 1.0;
        require(within, "momentum", "a number above 0 and below 1", self.momentum)?;
        ranges::weight_decay(self.weight_decay)?;
        ranges::at_least_zero("r", self.r)?;
        ranges::at_least_zero("weight_lr_power", self.weight_lr_power)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct SfSgdScalars {
        /// η_t
        lr,
        /// 1 - c
        keep,
        /// c
        pull,
        /// η_t (β (1 - c) - 1)
        step,
        weight_decay,
        /// 1 at the first step, where z = y, else 0
        first,
    }
}

/// The arithmetic of Schedule-Free SGD.
#[derive(Debug)]
pub struct SfSgdRule;

const SF_SGD: Info = Info {
    name: "sf_sgd",
    about: "Schedule-Free SGD: evaluates an average of its iterates",
    paper: "Defazio et al., The Road Less Scheduled, arXiv:2405.15682",
    year: 2024,
    formula: "u = g + λy; z ← z - ηu; x ← (1-c)x + cz; y = βx + (1-β)z",
};

impl Rule for SfSgdRule {
    type Config = SfSgdConfig;
    type Scalars = SfSgdScalars;
    const BUFFERS: (usize, usize) = (1, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const MEMORY: &'static [&'static str] = MEMORY;
    const EVALUATION: Option<ElementEvaluation<SfSgdConfig>> =
        Some(|config, y, state| (y - (1.0 - config.momentum) * state[0]) / config.momentum);

    crate::rule::one_name!(SF_SGD);

    fn buffers(_: &SfSgdConfig) -> &'static [&'static str] {
        &["z"]
    }

    fn prepare(config: &SfSgdConfig, input: &Input, memory: &mut [f64]) -> Result<SfSgdScalars, Refusal> {
        let powers = (config.warmup_steps, config.r, config.weight_lr_power);
        let Averaging { lr, keep, pull, step } = Averaging::of(input, powers, config.momentum, memory);
        let first = if input.t == 1 { 1.0 } else { 0.0 };
        Ok(SfSgdScalars { lr, keep, pull, step, weight_decay: config.weight_decay, first })
    }

    #[inline(always)]
    fn update<F: Real>(s: &SfSgdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let z = if s.first > F::from_f64(0.0) { x } else { state[0] };
        let u = g + s.weight_decay * x;
        state[0] = z - s.lr * u;
        s.keep * x + s.pull * z + s.step * u
    }
}
