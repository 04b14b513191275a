//! Adamax (Kingma & Ba, 2015): Adam with the infinity norm of past gradients in place of their second moment.
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! u_t = max(β₂ u_{t-1}, |g| + ε)
//! x_{t+1} = x_t - η/(1 - β₁ᵗ) · m_t / u_t
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adamax, AdamaxConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Adamax::new(vec![x.clone()], AdamaxConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // A first step of almost exactly the learning rate.
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch: ε sits inside the maximum beside |g|, and so enters the state. The paper has none; Keras adds it to u
//!   in the denominator.
//!
//! Reference: arXiv:1412.6980, section 7.1.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Adamax.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamaxConfig {
    /// Learning rate η. Defaults to 2e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the norm. Defaults to 0.999.
    pub beta2: f64,
    /// Added to |g| before the maximum. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdamaxConfig {
    fn default() -> Self {
        Self { lr: 2e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

impl Config for AdamaxConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdamaxScalars {
        /// η / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        beta2,
        eps,
        weight_decay,
    }
}

/// The arithmetic of Adamax.
#[derive(Debug)]
pub struct AdamaxRule;

const ADAMAX: Info = Info {
    name: "adamax",
    about: "Adam with the infinity norm of past gradients",
    paper: "Kingma & Ba, Adam: A Method for Stochastic Optimization, arXiv:1412.6980",
    year: 2015,
    formula: "m ← β₁m + (1-β₁)g; u ← max(β₂u, |g| + ε); x ← x - η m̂/u",
};

impl Rule for AdamaxRule {
    type Config = AdamaxConfig;
    type Scalars = AdamaxScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdamaxScalars>> =
        Some(Observed { name: "denominator", of: |_, state| state[1] });

    crate::rule::one_name!(ADAMAX);

    fn buffers(_: &AdamaxConfig) -> &'static [&'static str] {
        &["m", "u"]
    }

    fn prepare(config: &AdamaxConfig, input: &Input, _: &mut [f64]) -> Result<AdamaxScalars, Refusal> {
        let beta1 = input.momentum;
        Ok(AdamaxScalars {
            step: input.lr / bias_correction(beta1, input.t),
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            eps: config.eps,
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdamaxScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.weight_decay * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let u = (s.beta2 * state[1]).at_least(g.abs() + s.eps);
        (state[0], state[1]) = (m, u);
        x - s.step * (m / u)
    }
}
