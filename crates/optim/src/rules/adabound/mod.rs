//! AdaBound and AMSBound (Luo et al., 2019).
//!
//! ```text
//! m, v as Adam on g = ∇f(x_t) + λ x_t;   AMSBound: v ← max of all v so far
//! r = η √(1 - β₂ᵗ)/(1 - β₁ᵗ) / (√v + ε), clamped to [F (1 - 1/(γt + 1)), F (1 + 1/(γt))]
//! x_{t+1} = x_t - r m_t                                F = final_lr · η / base_lr
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdaBound, AdaBoundConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = AdaBound::new(vec![x.clone()], AdaBoundConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // wide bounds: Adam's first step
//! assert!((x.to_vec1::<f64>()?[0] - 3.999).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As the authors' package: the bounds move with a learning-rate schedule, by η / base_lr, with base_lr the rate at
//! construction unless given; ε is added before bias correction. Because m is an average, the method ends as momentum
//! descent with rate F (1 - β₁).
//!
//! Reference: *Adaptive Gradient Methods with Dynamic Bound of Learning Rate*, arXiv:1902.09843.
use crate::rule::{
    Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges, require,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdaBound and AMSBound.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaBoundConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// The rate of SGD that the bounds close in on. Defaults to 0.1.
    pub final_lr: f64,
    /// How fast they close in. Defaults to 1e-3.
    pub gamma: f64,
    /// The rate that `final_lr` belongs to. Defaults to `lr`.
    pub base_lr: Option<f64>,
    /// Use the running maximum of the second moment. Defaults to false (`amsbound`: true).
    pub amsbound: bool,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdaBoundConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            final_lr: 0.1,
            gamma: 1e-3,
            base_lr: None,
            amsbound: false,
            weight_decay: 0.0,
        }
    }
}

impl AdaBoundConfig {
    /// AMSBound.
    pub fn amsbound() -> Self {
        Self { amsbound: true, ..Self::default() }
    }
}

impl Config for AdaBoundConfig {
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
        ranges::at_least_zero("final_lr", self.final_lr)?;
        require(self.gamma > 0.0 && self.gamma < 1.0, "gamma", "a number in (0, 1)", self.gamma)?;
        let base = self.base_lr.unwrap_or(self.lr);
        let key = if self.base_lr.is_some() { "base_lr" } else { "lr" };
        require(base > 0.0 && base.is_finite(), key, "a number above 0", base)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdaBoundScalars {
        /// η √(1 - β₂ᵗ) / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
        lower,
        upper,
        weight_decay,
    }
}

/// The arithmetic of AdaBound.
#[derive(Debug)]
pub struct AdaBoundRule;

const ADABOUND: Info = Info {
    name: "adabound",
    about: "Adam whose rates are clamped to bounds that close in on SGD",
    paper: "Luo et al., Adaptive Gradient Methods with Dynamic Bound of Learning Rate, arXiv:1902.09843",
    year: 2019,
    formula: "m, v as Adam; x ← x - clamp(η̂/(√v + ε), F(1 - 1/(γt+1)), F(1 + 1/(γt))) m",
};
const AMSBOUND: Info = Info {
    name: "amsbound",
    about: "AdaBound with the running maximum of the second moment",
    formula: "m, v as Adam; v* ← max(v*, v); x ← x - clamp(η̂/(√v* + ε), …) m",
    ..ADABOUND
};

fn observed(s: &AdaBoundScalars, state: &[f64]) -> f64 {
    (s.step / (state.last().copied().unwrap_or(0.0).sqrt() + s.eps)).max(s.lower).min(s.upper)
}

impl Rule for AdaBoundRule {
    type Config = AdaBoundConfig;
    type Scalars = AdaBoundScalars;
    const BUFFERS: (usize, usize) = (2, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdaBoundScalars>> = Some(Observed { name: "rate", of: observed });

    fn names() -> Vec<(&'static Info, AdaBoundConfig)> {
        vec![(&ADABOUND, AdaBoundConfig::default()), (&AMSBOUND, AdaBoundConfig::amsbound())]
    }

    fn info(config: &AdaBoundConfig) -> &'static Info {
        if config.amsbound { &AMSBOUND } else { &ADABOUND }
    }

    fn buffers(config: &AdaBoundConfig) -> &'static [&'static str] {
        if config.amsbound { &["m", "v", "v_max"] } else { &["m", "v"] }
    }

    fn prepare(config: &AdaBoundConfig, input: &Input, _: &mut [f64]) -> Result<AdaBoundScalars, Refusal> {
        let beta1 = input.momentum;
        let t = input.t as f64;
        let final_lr = config.final_lr * input.lr / config.base_lr.unwrap_or(config.lr);
        Ok(AdaBoundScalars {
            step: input.lr * bias_correction(config.beta2, input.t).sqrt() / bias_correction(beta1, input.t),
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            eps: config.eps,
            lower: final_lr * (1.0 - 1.0 / (config.gamma * t + 1.0)),
            upper: final_lr * (1.0 + 1.0 / (config.gamma * t)),
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdaBoundScalars<F>, x: F, g: F, state: &mut [F]) -> F {
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
        let rate = (s.step / (v.sqrt() + s.eps)).at_least(s.lower).at_most(s.upper);
        x - rate * m
    }
}
