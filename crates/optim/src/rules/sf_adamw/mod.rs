//! Schedule-Free AdamW (Defazio et al., 2024): an average of the iterates in place of a schedule.
//!
//! ```text
//! η_t = η min(t/T_w, 1),  L_t = max(L_{t-1}, η_t),  w = tʳ L_tᵖ,  c = w / (sum of all w so far)
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! u   = g / (√(v_t / (1 - β₂ᵗ)) + ε) + λ y_t
//! y_{t+1} = (1 - c) y_t + c z_t + η_t (β₁ (1 - c) - 1) u
//! z_{t+1} = z_t - η_t u
//! x_{t+1} = (y_{t+1} - (1 - β₁) z_{t+1}) / β₁
//! ```
//!
//! The parameters are y: gradients are taken there. The weights to evaluate, to share and to gather batch statistics for are x,
//! which [`Optimizer::eval_weights`](crate::Optimizer::eval_weights) puts in their place until
//! [`Optimizer::train_weights`](crate::Optimizer::train_weights).
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Optimizer, SfAdamW, SfAdamWConfig};
//!
//! let y = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = SfAdamW::new(vec![y.clone()], SfAdamWConfig { lr: 0.1, ..Default::default() })?;
//! for _ in 0..3 {
//!     optimizer.backward_step(&y.sqr()?.sum_all()?)?;
//! }
//! let trained = y.to_vec1::<f64>()?;
//! assert!(optimizer.eval_weights()?);
//! assert_ne!(y.to_vec1::<f64>()?, trained);
//! optimizer.train_weights()?;
//! assert_eq!(y.to_vec1::<f64>()?, trained);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the package `schedulefree`, without its `decay_at_z`. Decay is taken at y, beside the normalised gradient.
//! - L is the largest rate so far, after warm-up: a schedule that falls does not change the weights of the average. With a
//!   rate of 0 there is nothing to average yet, and c = 0.
//! - β₁ is no momentum: schedules of the momentum do not change it.
//!
//! Reference: *The Road Less Scheduled*, arXiv:2405.15682.
use crate::rule::{
    Config, ElementEvaluation, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges,
    require,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Schedule-Free AdamW.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SfAdamWConfig {
    /// Learning rate η. Defaults to 2.5e-3.
    pub lr: f64,
    /// Where between z (0) and the average x (1) gradients are taken. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Steps over which the rate grows from 0. Defaults to 0.
    pub warmup_steps: u64,
    /// Power r of the step's number in its weight. Defaults to 0.
    pub r: f64,
    /// Power p of the largest rate in a step's weight. Defaults to 2.
    pub weight_lr_power: f64,
}

impl Default for SfAdamWConfig {
    fn default() -> Self {
        Self {
            lr: 2.5e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            warmup_steps: 0,
            r: 0.0,
            weight_lr_power: 2.0,
        }
    }
}

impl Config for SfAdamWConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        let within = self.beta1 > 0.0 && self.beta1 < 1.0;
        require(within, "beta1", "a number above 0 and below 1", self.beta1)?;
        ranges::fraction("beta2", self.beta2)?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)?;
        ranges::at_least_zero("r", self.r)?;
        ranges::at_least_zero("weight_lr_power", self.weight_lr_power)
    }
}

/// What both Schedule-Free rules keep beside their buffers.
pub(crate) const MEMORY: &[&str] = &["largest_lr", "weight_sum"];

/// The average's part of a step: the warmed-up rate η_t and the coefficients of y, z and u.
pub(crate) struct Averaging {
    pub lr: f64,
    pub keep: f64,
    pub pull: f64,
    pub step: f64,
}

impl Averaging {
    /// Of a step, from (T_w, r, p) and β; `memory` as in [`MEMORY`].
    pub fn of(input: &Input, (warmup, r, power): (u64, f64, f64), beta: f64, memory: &mut [f64]) -> Self {
        let t = input.t as f64;
        let lr = if warmup == 0 { input.lr } else { input.lr * (t / warmup as f64).min(1.0) };
        let largest = memory[0].max(lr);
        let weight = libm::pow(t, r) * libm::pow(largest, power);
        let sum = memory[1] + weight;
        (memory[0], memory[1]) = (largest, sum);
        let c = if sum > 0.0 { weight / sum } else { 0.0 };
        Self { lr, keep: 1.0 - c, pull: c, step: lr * (beta * (1.0 - c) - 1.0) }
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct SfAdamWScalars {
        /// η_t
        lr,
        /// 1 - c
        keep,
        /// c
        pull,
        /// η_t (β₁ (1 - c) - 1)
        step,
        beta2,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        weight_decay,
        /// 1 at the first step, where z = y, else 0
        first,
    }
}

/// The arithmetic of Schedule-Free AdamW.
#[derive(Debug)]
pub struct SfAdamWRule;

const SF_ADAMW: Info = Info {
    name: "sf_adamw",
    about: "Schedule-Free AdamW: evaluates an average of its iterates",
    paper: "Defazio et al., The Road Less Scheduled, arXiv:2405.15682",
    year: 2024,
    formula: "u = g/(√v̂ + ε) + λy; z ← z - ηu; x ← (1-c)x + cz; y = β₁x + (1-β₁)z",
};

impl Rule for SfAdamWRule {
    type Config = SfAdamWConfig;
    type Scalars = SfAdamWScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const MEMORY: &'static [&'static str] = MEMORY;
    const OBSERVE: Option<Observed<SfAdamWScalars>> =
        Some(Observed { name: "denominator", of: |s, state| state[1].sqrt() * s.root_correction + s.eps });
    const EVALUATION: Option<ElementEvaluation<SfAdamWConfig>> =
        Some(|config, y, state| (y - (1.0 - config.beta1) * state[0]) / config.beta1);

    crate::rule::one_name!(SF_ADAMW);

    fn buffers(_: &SfAdamWConfig) -> &'static [&'static str] {
        &["z", "v"]
    }

    fn prepare(config: &SfAdamWConfig, input: &Input, memory: &mut [f64]) -> Result<SfAdamWScalars, Refusal> {
        let powers = (config.warmup_steps, config.r, config.weight_lr_power);
        let Averaging { lr, keep, pull, step } = Averaging::of(input, powers, config.beta1, memory);
        Ok(SfAdamWScalars {
            lr,
            keep,
            pull,
            step,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: 1.0 / bias_correction(config.beta2, input.t).sqrt(),
            eps: config.eps,
            weight_decay: config.weight_decay,
            first: if input.t == 1 { 1.0 } else { 0.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &SfAdamWScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let z = if s.first > F::from_f64(0.0) { x } else { state[0] };
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        let u = g / (v.sqrt() * s.root_correction + s.eps) + s.weight_decay * x;
        (state[0], state[1]) = (z - s.lr * u, v);
        s.keep * x + s.pull * z + s.step * u
    }
}
