//! RMSprop (Hinton, 2012), plain, centered and with momentum.
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t
//! s_t = α s_{t-1} + (1 - α) g²
//! e_t = α e_{t-1} + (1 - α) g                         centered: s_t - e_t² instead of s_t below
//! b_t = μ b_{t-1} + g / (√s_t + ε)
//! x_{t+1} = x_t - η b_t
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{RmsProp, RmsPropConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = RmsProp::new(vec![x.clone()], RmsPropConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // η / √(1 - α)
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As PyTorch's `RMSprop`: ε outside the root (TensorFlow puts it inside), no bias correction. A centered variance
//! that rounding makes negative counts as 0, where PyTorch returns NaN.
//!
//! Reference: Hinton, *Neural Networks for Machine Learning*, lecture 6e, 2012; centered: Graves, arXiv:1308.0850.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of RMSprop.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RmsPropConfig {
    /// Learning rate η. Defaults to 0.01.
    pub lr: f64,
    /// Decay α of the averages. Defaults to 0.99.
    pub alpha: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Momentum μ. Defaults to 0.
    pub momentum: f64,
    /// Divide by the standard deviation instead of the root mean square. Defaults to false.
    pub centered: bool,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for RmsPropConfig {
    fn default() -> Self {
        Self { lr: 0.01, alpha: 0.99, eps: 1e-8, momentum: 0.0, centered: false, weight_decay: 0.0 }
    }
}

impl Config for RmsPropConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.momentum
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("alpha", self.alpha)?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::fraction("momentum", self.momentum)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct RmsPropScalars {
        lr,
        alpha,
        one_minus_alpha,
        eps,
        momentum,
        /// 1 when centered, else 0: tells two buffers apart
        centered,
        weight_decay,
    }
}

/// The arithmetic of RMSprop.
#[derive(Debug)]
pub struct RmsPropRule;

const RMSPROP: Info = Info {
    name: "rmsprop",
    about: "gradients divided by a running root mean square",
    paper: "Hinton, Neural Networks for Machine Learning, lecture 6e",
    year: 2012,
    formula: "s ← αs + (1-α)g²; b ← μb + g/(√s + ε); x ← x - ηb",
};

fn observed(s: &RmsPropScalars, state: &[f64]) -> f64 {
    let mean = if s.centered > 0.0 { state[1] } else { 0.0 };
    (state[0] - mean * mean).max(0.0).sqrt() + s.eps
}

impl Rule for RmsPropRule {
    type Config = RmsPropConfig;
    type Scalars = RmsPropScalars;
    const BUFFERS: (usize, usize) = (1, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<RmsPropScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(RMSPROP);

    fn buffers(config: &RmsPropConfig) -> &'static [&'static str] {
        match (config.centered, config.momentum > 0.0) {
            (false, false) => &["square_avg"],
            (false, true) => &["square_avg", "momentum"],
            (true, false) => &["square_avg", "grad_avg"],
            (true, true) => &["square_avg", "grad_avg", "momentum"],
        }
    }

    fn prepare(config: &RmsPropConfig, input: &Input, _: &mut [f64]) -> Result<RmsPropScalars, Refusal> {
        Ok(RmsPropScalars {
            lr: input.lr,
            alpha: config.alpha,
            one_minus_alpha: 1.0 - config.alpha,
            eps: config.eps,
            momentum: input.momentum,
            centered: f64::from(config.centered),
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &RmsPropScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let zero = F::from_f64(0.0);
        let centered = s.centered > zero;
        let g = g + s.weight_decay * x;
        let square = s.alpha * state[0] + s.one_minus_alpha * (g * g);
        state[0] = square;
        let variance = if centered {
            let mean = s.alpha * state[1] + s.one_minus_alpha * g;
            state[1] = mean;
            (square - mean * mean).at_least(zero)
        } else {
            square
        };
        let step = g / (variance.sqrt() + s.eps);
        match state {
            [_, buffer] if !centered => {
                *buffer = s.momentum * *buffer + step;
                x - s.lr * *buffer
            }
            [_, _, buffer] => {
                *buffer = s.momentum * *buffer + step;
                x - s.lr * *buffer
            }
            _ => x - s.lr * step,
        }
    }
}
