//! Lion (Chen et al., 2023): steps of one size in the direction of an interpolated momentum's sign.
//!
//! ```text
//! x   ← x_t (1 - ηλ)
//! x_{t+1} = x - η sign(β₁ m_{t-1} + (1 - β₁) g)
//! m_t = β₂ m_{t-1} + (1 - β₂) g                       after the step, with β₂
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Lion, LionConfig};
//!
//! let x = Var::new(&[4f64, 0.0], &Device::Cpu)?;
//! let mut optimizer = Lion::new(vec![x.clone()], LionConfig { lr: 0.125, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert_eq!(x.to_vec1::<f64>()?, [3.875, 0.0]); // sign(0) = 0
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - Nowhere from the authors' formulas. The default decay is 0, as in lion-pytorch; the authors use 3 to 10 times AdamW's
//!   decay with a third to a tenth of its rate.
//!
//! Reference: *Symbolic Discovery of Optimization Algorithms*, arXiv:2302.06675.
use crate::rule::{Config, Info, Input, Invalid, Real, Refusal, Rule, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Lion.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LionConfig {
    /// Learning rate η. Defaults to 1e-4.
    pub lr: f64,
    /// Share of the momentum in the direction. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the momentum. Defaults to 0.99.
    pub beta2: f64,
    /// Decoupled weight decay λ. Defaults to 0.
    pub weight_decay: f64,
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

crate::scalars! {
    /// The scalars of one step.
    pub struct LionScalars {
        lr,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// 1 - ηλ
        keep,
    }
}

/// The arithmetic of Lion.
#[derive(Debug)]
pub struct LionRule;

const LION: Info = Info {
    name: "lion",
    about: "the sign of a momentum",
    paper: "Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv:2302.06675",
    year: 2023,
    formula: "x ← x(1 - ηλ) - η sign(β₁m + (1-β₁)g); m ← β₂m + (1-β₂)g",
};

impl Rule for LionRule {
    type Config = LionConfig;
    type Scalars = LionScalars;
    const BUFFERS: (usize, usize) = (1, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));

    crate::rule::one_name!(LION);

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
            keep: 1.0 - input.lr * config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &LionScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let (x, zero) = (x * s.keep, F::from_f64(0.0));
        let direction = s.beta1 * state[0] + s.one_minus_beta1 * g;
        state[0] = s.beta2 * state[0] + s.one_minus_beta2 * g;
        let backward = if direction < zero { -s.lr } else { zero };
        x - if direction > zero { s.lr } else { backward }
    }
}
