//! ADOPT (Taniguchi et al., 2024): Adam whose gradient is divided by the second moment of the steps before, and only then
//! averaged.
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t                               decoupled: x ← x (1 - ηλ), g = ∇f(x_t)
//! t = 1:  v_1 = g²; no step, no decay
//! t > 1:  n   = clip(g / max(√v_{t-1}, ε), ±(t-1)^p)
//!         m_t = β₁ m_{t-1} + (1 - β₁) n
//!         x_{t+1} = x_t - η m_t
//!         v_t = β₂ v_{t-1} + (1 - β₂) g²
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adopt, AdoptConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Adopt::new(vec![x.clone()], AdoptConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert_eq!(x.to_vec1::<f64>()?, [4.0]); // the first gradient only starts v
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert!((x.to_vec1::<f64>()?[0] - 3.99).abs() < 1e-12);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the authors' package: the clip's power is ¼, and it counts from the first step that is taken. timm has ⅓,
//!   pytorch_optimizer counts one more. The paper's first version has no clip (`clip_exponent: null`).
//! - No bias correction: both averages start with a gradient.
//!
//! Reference: *ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal Rate*, arXiv:2411.02853.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of ADOPT.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdoptConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.9999.
    pub beta2: f64,
    /// The least that a gradient is divided by. Defaults to 1e-6.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Shrink the parameter instead of adding λx to the gradient. Defaults to false.
    pub decoupled_weight_decay: bool,
    /// The power p of the limit; null for no limit. Defaults to 0.25.
    pub clip_exponent: Option<f64>,
}

impl Default for AdoptConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.9999,
            eps: 1e-6,
            weight_decay: 0.0,
            decoupled_weight_decay: false,
            clip_exponent: Some(0.25),
        }
    }
}

impl Config for AdoptConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        self.clip_exponent.map_or(Ok(()), |p| ranges::at_least_zero("clip_exponent", p))
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdoptScalars {
        lr,
        beta1,
        one_minus_beta1,
        /// 0 at the first step
        beta2,
        /// 1 at the first step
        one_minus_beta2,
        eps,
        /// (t - 1)^p
        limit,
        l2,
        /// 1 - ηλ with decoupled decay, else 1
        keep,
        /// 1 at the first step, which moves nothing, else 0
        first,
    }
}

/// The arithmetic of ADOPT.
#[derive(Debug)]
pub struct AdoptRule;

const ADOPT: Info = Info {
    name: "adopt",
    about: "Adam that divides by the second moment of the steps before",
    paper: "Taniguchi et al., ADOPT: Modified Adam Can Converge with Any β₂ with the Optimal Rate, arXiv:2411.02853",
    year: 2024,
    formula: "n = clip(g/max(√v, ε)); m ← β₁m + (1-β₁)n; x ← x - ηm; v ← β₂v + (1-β₂)g²",
};

impl Rule for AdoptRule {
    type Config = AdoptConfig;
    type Scalars = AdoptScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdoptScalars>> =
        Some(Observed { name: "next denominator", of: |s, state| state[1].sqrt().max(s.eps) });

    crate::rule::one_name!(ADOPT);

    fn buffers(_: &AdoptConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn prepare(config: &AdoptConfig, input: &Input, _: &mut [f64]) -> Result<AdoptScalars, Refusal> {
        let (beta1, decay, first) = (input.momentum, config.weight_decay, input.t == 1);
        let (l2, shrink) = if config.decoupled_weight_decay { (0.0, input.lr * decay) } else { (decay, 0.0) };
        let before = input.t.saturating_sub(1) as f64;
        Ok(AdoptScalars {
            lr: input.lr,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: if first { 0.0 } else { config.beta2 },
            one_minus_beta2: if first { 1.0 } else { 1.0 - config.beta2 },
            eps: config.eps,
            limit: config.clip_exponent.map_or(f64::INFINITY, |p| libm::pow(before, p)),
            l2,
            keep: if first { 1.0 } else { 1.0 - shrink },
            first: if first { 1.0 } else { 0.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdoptScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let (x, zero) = (x * s.keep, F::from_f64(0.0));
        let g = g + s.l2 * x;
        let v = state[1];
        state[1] = s.beta2 * v + s.one_minus_beta2 * (g * g);
        let ratio = (g / v.sqrt().at_least(s.eps)).at_most(s.limit).at_least(-s.limit);
        let m = s.beta1 * state[0] + s.one_minus_beta1 * ratio;
        let m = if s.first > zero { zero } else { m };
        state[0] = m;
        x - s.lr * m
    }
}
