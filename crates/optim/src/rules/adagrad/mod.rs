//! AdaGrad (Duchi, Hazan & Singer, 2011).
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t
//! s_t = s_{t-1} + g²
//! x_{t+1} = x_t - η/(1 + (t - 1) δ) · g / (√s_t + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdaGrad, AdaGradConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = AdaGrad::new(vec![x.clone()], AdaGradConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // g / √g² = 1
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-10);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As PyTorch's `Adagrad`: ε outside the root, and a decay δ of the rate that the paper does not have (0 by default).
//!
//! Reference: *Adaptive Subgradient Methods for Online Learning and Stochastic Optimization*, JMLR 12, 2011.
use crate::rule::{Config, Info, Input, Invalid, MAX_BUFFERS, Observed, Real, Refusal, Rule, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdaGrad.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaGradConfig {
    /// Learning rate η. Defaults to 0.01.
    pub lr: f64,
    /// Decay δ of the learning rate. Defaults to 0.
    pub lr_decay: f64,
    /// What the sum of squares starts at. Defaults to 0.
    pub initial_accumulator: f64,
    /// Added to the denominator. Defaults to 1e-10.
    pub eps: f64,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdaGradConfig {
    fn default() -> Self {
        Self { lr: 0.01, lr_decay: 0.0, initial_accumulator: 0.0, eps: 1e-10, weight_decay: 0.0 }
    }
}

impl Config for AdaGradConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::at_least_zero("lr_decay", self.lr_decay)?;
        ranges::at_least_zero("initial_accumulator", self.initial_accumulator)?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdaGradScalars { lr, eps, weight_decay }
}

/// The arithmetic of AdaGrad.
#[derive(Debug)]
pub struct AdaGradRule;

const ADAGRAD: Info = Info {
    name: "adagrad",
    about: "rates that shrink with the sum of squared gradients",
    paper: "Duchi, Hazan & Singer, Adaptive Subgradient Methods, JMLR 12",
    year: 2011,
    formula: "s ← s + g²; x ← x - η g/(√s + ε)",
};

fn observed(s: &AdaGradScalars, state: &[f64]) -> f64 {
    state[0].sqrt() + s.eps
}

impl Rule for AdaGradRule {
    type Config = AdaGradConfig;
    type Scalars = AdaGradScalars;
    const BUFFERS: (usize, usize) = (1, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdaGradScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(ADAGRAD);

    fn buffers(_: &AdaGradConfig) -> &'static [&'static str] {
        &["sum"]
    }

    fn start(config: &AdaGradConfig, _: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        Ok([config.initial_accumulator, 0.0, 0.0, 0.0])
    }

    fn prepare(config: &AdaGradConfig, input: &Input, _: &mut [f64]) -> Result<AdaGradScalars, Refusal> {
        let lr = input.lr / (1.0 + (input.t - 1) as f64 * config.lr_decay);
        Ok(AdaGradScalars { lr, eps: config.eps, weight_decay: config.weight_decay })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdaGradScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.weight_decay * x;
        state[0] = state[0] + g * g;
        x - s.lr * (g / (state[0].sqrt() + s.eps))
    }
}
