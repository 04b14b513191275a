//! AdaDelta (Zeiler, 2012).
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t
//! s_t = ρ s_{t-1} + (1 - ρ) g²
//! δ   = g · √(d_{t-1} + ε) / √(s_t + ε)
//! d_t = ρ d_{t-1} + (1 - ρ) δ²
//! x_{t+1} = x_t - η δ
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdaDelta, AdaDeltaConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = AdaDelta::new(vec![x.clone()], AdaDeltaConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // √ε / √0.1, nearly
//! assert!((x.to_vec1::<f64>()?[0] - (4.0 - 1e-3 / 0.1f64.sqrt())).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As PyTorch's `Adadelta`: a rate η on top (1 by default, which is the paper), ε inside both roots.
//!
//! Reference: *ADADELTA: An Adaptive Learning Rate Method*, arXiv:1212.5701.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdaDelta.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaDeltaConfig {
    /// Learning rate η. Defaults to 1.
    pub lr: f64,
    /// Decay ρ of both averages. Defaults to 0.9.
    pub rho: f64,
    /// Added inside both roots. Defaults to 1e-6.
    pub eps: f64,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdaDeltaConfig {
    fn default() -> Self {
        Self { lr: 1.0, rho: 0.9, eps: 1e-6, weight_decay: 0.0 }
    }
}

impl Config for AdaDeltaConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("rho", self.rho)?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdaDeltaScalars { lr, rho, one_minus_rho, eps, weight_decay }
}

/// The arithmetic of AdaDelta.
#[derive(Debug)]
pub struct AdaDeltaRule;

const ADADELTA: Info = Info {
    name: "adadelta",
    about: "steps in the units of past steps, without a rate to choose",
    paper: "Zeiler, ADADELTA: An Adaptive Learning Rate Method, arXiv:1212.5701",
    year: 2012,
    formula: "s ← ρs + (1-ρ)g²; δ = g√(d+ε)/√(s+ε); d ← ρd + (1-ρ)δ²; x ← x - ηδ",
};

fn observed(s: &AdaDeltaScalars, state: &[f64]) -> f64 {
    (state[0] + s.eps).sqrt()
}

impl Rule for AdaDeltaRule {
    type Config = AdaDeltaConfig;
    type Scalars = AdaDeltaScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdaDeltaScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(ADADELTA);

    fn buffers(_: &AdaDeltaConfig) -> &'static [&'static str] {
        &["square_avg", "delta_avg"]
    }

    fn prepare(config: &AdaDeltaConfig, input: &Input, _: &mut [f64]) -> Result<AdaDeltaScalars, Refusal> {
        Ok(AdaDeltaScalars {
            lr: input.lr,
            rho: config.rho,
            one_minus_rho: 1.0 - config.rho,
            eps: config.eps,
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdaDeltaScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.weight_decay * x;
        let square = s.rho * state[0] + s.one_minus_rho * (g * g);
        let delta = (state[1] + s.eps).sqrt() / (square + s.eps).sqrt() * g;
        state[0] = square;
        state[1] = s.rho * state[1] + s.one_minus_rho * (delta * delta);
        x - s.lr * delta
    }
}
