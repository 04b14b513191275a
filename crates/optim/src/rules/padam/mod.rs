//! PAdam, partially adaptive momentum estimation (Chen et al., 2018).
//!
//! ```text
//! m, v as Adam on g = ∇f(x_t) + λ x_t;   v* = max(v*, v_t) unless switched off
//! x_{t+1} = x_t - η √(1 - β₂ᵗ)/(1 - β₁ᵗ) · m_t / (√v* + ε)^(2p)
//! ```
//!
//! p = 1/2 is AMSGrad (with ε before bias correction), p → 0 is SGD with momentum.
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{PAdam, PAdamConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = PAdam::new(vec![x.clone()], PAdamConfig { p: 0.5, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // p = 1/2: a first step of η
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-6);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As the authors' code: AMSGrad's maximum is on, of the uncorrected v, and the power is taken after ε was added. For
//! p = 1/2, 1/4, 1/8 the power is taken by square roots, which is faster than a general power and rounds better.
//!
//! Reference: *Closing the Generalization Gap of Adaptive Gradient Methods in Training Deep Neural Networks*,
//! arXiv:1806.06763.
use crate::rule::{
    Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges, require,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of PAdam.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PAdamConfig {
    /// Learning rate η. Defaults to 0.1.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment. Defaults to 1e-8.
    pub eps: f64,
    /// How adaptive: the denominator is raised to 2p, with p in (0, 1/2]. Defaults to 1/4.
    pub p: f64,
    /// Use the running maximum of the second moment. Defaults to true.
    pub amsgrad: bool,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for PAdamConfig {
    fn default() -> Self {
        Self { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, p: 0.25, amsgrad: true, weight_decay: 0.0 }
    }
}

impl Config for PAdamConfig {
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
        ranges::at_least_zero("eps", self.eps)?;
        require(self.p > 0.0 && self.p <= 0.5, "p", "a number in (0, 1/2]", self.p)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct PAdamScalars {
        /// η √(1 - β₂ᵗ) / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
        /// 2p
        exponent,
        weight_decay,
    }
}

/// The arithmetic of PAdam.
#[derive(Debug)]
pub struct PAdamRule;

const PADAM: Info = Info {
    name: "padam",
    about: "between SGD with momentum and AMSGrad, by the power of the denominator",
    paper: "Chen et al., Closing the Generalization Gap of Adaptive Gradient Methods, arXiv:1806.06763",
    year: 2018,
    formula: "m, v* as AMSGrad; x ← x - η m̂/(√v̂* + ε)^(2p)",
};

fn observed(s: &PAdamScalars, state: &[f64]) -> f64 {
    power(state.last().copied().unwrap_or(0.0).sqrt() + s.eps, s.exponent)
}

impl Rule for PAdamRule {
    type Config = PAdamConfig;
    type Scalars = PAdamScalars;
    const BUFFERS: (usize, usize) = (2, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<PAdamScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(PADAM);

    fn buffers(config: &PAdamConfig) -> &'static [&'static str] {
        if config.amsgrad { &["m", "v", "v_max"] } else { &["m", "v"] }
    }

    fn prepare(config: &PAdamConfig, input: &Input, _: &mut [f64]) -> Result<PAdamScalars, Refusal> {
        let beta1 = input.momentum;
        let correction1 = bias_correction(beta1, input.t);
        let correction2 = bias_correction(config.beta2, input.t);
        Ok(PAdamScalars {
            step: input.lr * correction2.sqrt() / correction1,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            eps: config.eps,
            exponent: 2.0 * config.p,
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &PAdamScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.weight_decay * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        (state[0], state[1]) = (m, v);
        let v = match state {
            [_, _, v_max] => {
                *v_max = v_max.at_least(v);
                *v_max
            }
            _ => v,
        };
        x - s.step * (m / power(v.sqrt() + s.eps, s.exponent))
    }
}

#[inline(always)]
fn power<F: Real>(base: F, exponent: F) -> F {
    if exponent == F::from_f64(0.5) {
        base.sqrt()
    } else if exponent == F::from_f64(0.25) {
        base.sqrt().sqrt()
    } else if exponent == F::from_f64(1.0) {
        base
    } else {
        base.pow(exponent)
    }
}
