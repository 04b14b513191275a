//! Stochastic gradient descent, with momentum (`sgdm`) and Nesterov momentum (`nag`).
//!
//! ```text
//! g     = ∇f(x_t) + λ x_t
//! b_t   = μ b_{t-1} + (1 - τ) g                      b_1 = g
//! x_{t+1} = x_t - η b_t                              Nesterov: x_t - η (g + μ b_t)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Sgd, SgdConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Sgd::new(vec![x.clone()], SgdConfig { lr: 0.1, ..SgdConfig::sgdm() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // gradient 8
//! assert!((x.to_vec1::<f64>()?[0] - 3.2).abs() < 1e-15);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As PyTorch's `SGD`: the first step sets the buffer to the gradient, dampening not applied, and the rate
//! multiplies the buffer, so that a change of rate takes effect at once. Polyak's and Sutskever's forms fold the
//! rate into the buffer.
//!
//! References: Polyak 1964; Nesterov 1983; Sutskever et al., *On the importance of initialization and momentum in
//! deep learning*, ICML 2013.
use crate::rule::{Config, Info, Input, Invalid, Real, Refusal, Rule, ranges, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of SGD.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SgdConfig {
    /// Learning rate η. Defaults to 0.01.
    pub lr: f64,
    /// Momentum μ. Defaults to 0 (`sgdm`, `nag`: 0.9).
    pub momentum: f64,
    /// Dampening τ. Defaults to 0.
    pub dampening: f64,
    /// Look ahead along the momentum; needs momentum and no dampening. Defaults to false (`nag`: true).
    pub nesterov: bool,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 0.01, momentum: 0.0, dampening: 0.0, nesterov: false, weight_decay: 0.0 }
    }
}

impl SgdConfig {
    /// With momentum 0.9.
    pub fn sgdm() -> Self {
        Self { momentum: 0.9, ..Self::default() }
    }
    /// With Nesterov momentum 0.9.
    pub fn nag() -> Self {
        Self { nesterov: true, ..Self::sgdm() }
    }
}

impl Config for SgdConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.momentum
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("momentum", self.momentum)?;
        ranges::fraction("dampening", self.dampening)?;
        ranges::weight_decay(self.weight_decay)?;
        if self.nesterov {
            require(self.momentum > 0.0, "momentum", "a momentum above 0 with nesterov", self.momentum)?;
            require(self.dampening == 0.0, "dampening", "no dampening with nesterov", self.dampening)?;
        }
        Ok(())
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct SgdScalars {
        lr,
        momentum,
        /// What the gradient is multiplied by on its way into the buffer.
        undamped,
        weight_decay,
        /// The step is gradient_share · g + buffer_share · b.
        gradient_share,
        buffer_share,
    }
}

/// The arithmetic of SGD.
#[derive(Debug)]
pub struct SgdRule;

const SGD: Info = Info {
    name: "sgd",
    about: "stochastic gradient descent",
    paper: "Robbins & Monro, A Stochastic Approximation Method",
    year: 1951,
    formula: "x ← x - η(∇f + λx)",
};
const SGDM: Info = Info {
    name: "sgdm",
    about: "stochastic gradient descent with momentum",
    paper: "Polyak, Some methods of speeding up the convergence of iteration methods",
    year: 1964,
    formula: "b ← μb + ∇f + λx; x ← x - ηb",
};
const NAG: Info = Info {
    name: "nag",
    about: "stochastic gradient descent with Nesterov momentum",
    paper: "Nesterov, A method for solving the convex programming problem with convergence rate O(1/k²)",
    year: 1983,
    formula: "g = ∇f + λx; b ← μb + g; x ← x - η(g + μb)",
};

impl Rule for SgdRule {
    type Config = SgdConfig;
    type Scalars = SgdScalars;
    const BUFFERS: (usize, usize) = (0, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));

    fn names() -> Vec<(&'static Info, SgdConfig)> {
        vec![(&SGD, SgdConfig::default()), (&SGDM, SgdConfig::sgdm()), (&NAG, SgdConfig::nag())]
    }

    fn info(config: &SgdConfig) -> &'static Info {
        match config {
            SgdConfig { nesterov: true, .. } => &NAG,
            SgdConfig { momentum, .. } if *momentum > 0.0 => &SGDM,
            _ => &SGD,
        }
    }

    fn buffers(config: &SgdConfig) -> &'static [&'static str] {
        if config.momentum > 0.0 { &["momentum"] } else { &[] }
    }

    fn prepare(config: &SgdConfig, input: &Input, _: &mut [f64]) -> Result<SgdScalars, Refusal> {
        let momentum = input.momentum;
        Ok(SgdScalars {
            lr: input.lr,
            momentum,
            undamped: if input.t == 1 { 1.0 } else { 1.0 - config.dampening },
            weight_decay: config.weight_decay,
            gradient_share: if config.nesterov { 1.0 } else { 0.0 },
            buffer_share: if config.nesterov { momentum } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &SgdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.weight_decay * x;
        match state {
            [buffer] => {
                *buffer = s.momentum * *buffer + s.undamped * g;
                x - s.lr * (s.gradient_share * g + s.buffer_share * *buffer)
            }
            _ => x - s.lr * g,
        }
    }
}
