//! AdEMAMix (Pagliardini et al., 2024): AdamW with a second, much slower average of gradients.
//!
//! ```text
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! w_t = β₃(t) w_{t-1} + (1 - β₃(t)) g
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! x_{t+1} = x_t - η [(m_t/(1 - β₁ᵗ) + α(t) w_t) / (√v_t / √(1 - β₂ᵗ) + ε) + λ x_t]
//!
//! α(t)  = α min(t/T_α, 1)
//! β₃(t) = min(exp(ln β₁ ln β₃ / ((1 - r) ln β₃ + r ln β₁)), β₃),  r = t/T_β₃, until t = T_β₃
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdEmaMix, AdEmaMixConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let config = AdEmaMixConfig { lr: 0.1, alpha: 5.0, alpha_warmup: Some(100), ..Default::default() };
//! let mut optimizer = AdEmaMix::new(vec![x.clone()], config)?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-5);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - The warm-up is the paper's formula. The authors' code adds 1e-8 inside its logarithms, which is 2e-6 away.
//! - α defaults to 2, as in the authors' code (5 in pytorch_optimizer; the paper uses 5 to 8). Without `alpha_warmup` and
//!   `beta3_warmup`, which the authors set to the length of the run, there is no warm-up.
//! - With β₁ = 0 the warm-up of β₃ is its limit, β₃^(1/r).
//!
//! Reference: *The AdEMAMix Optimizer: Better, Faster, Older*, arXiv:2409.03137.
use crate::rule::{
    Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges, require,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdEMAMix.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdEmaMixConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the fast average. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Decay of the slow average. Defaults to 0.9999.
    pub beta3: f64,
    /// Weight of the slow average. Defaults to 2.
    pub alpha: f64,
    /// Steps over which α grows from 0; null for none. Defaults to null.
    pub alpha_warmup: Option<u64>,
    /// Steps over which β₃ grows from β₁; null for none. Defaults to null.
    pub beta3_warmup: Option<u64>,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Decoupled weight decay λ. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdEmaMixConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            beta3: 0.9999,
            alpha: 2.0,
            alpha_warmup: None,
            beta3_warmup: None,
            eps: 1e-8,
            weight_decay: 0.0,
        }
    }
}

impl Config for AdEmaMixConfig {
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
        ranges::fraction("beta3", self.beta3)?;
        ranges::at_least_zero("alpha", self.alpha)?;
        require(self.alpha_warmup != Some(0), "alpha_warmup", "at least 1 step, or null", 0.0)?;
        require(self.beta3_warmup != Some(0), "beta3_warmup", "at least 1 step, or null", 0.0)?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)
    }
}

impl AdEmaMixConfig {
    fn alpha_at(&self, t: u64) -> f64 {
        self.alpha * self.alpha_warmup.map_or(1.0, |steps| (t as f64 / steps as f64).min(1.0))
    }

    fn beta3_at(&self, beta1: f64, t: u64) -> f64 {
        let Some(steps) = self.beta3_warmup.filter(|steps| t < *steps) else { return self.beta3 };
        if self.beta3 == 0.0 {
            return 0.0;
        }
        let (r, slow) = (t as f64 / steps as f64, libm::log(self.beta3));
        let exponent = match beta1 {
            0.0 => slow / r,
            _ => libm::log(beta1) * slow / ((1.0 - r) * slow + r * libm::log(beta1)),
        };
        libm::exp(exponent).min(self.beta3)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdEmaMixScalars {
        /// η / (1 - β₁ᵗ)
        step,
        /// η α(t)
        slow_step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// β₃(t)
        beta3,
        one_minus_beta3,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        /// 1 - ηλ
        keep,
    }
}

/// The arithmetic of AdEMAMix.
#[derive(Debug)]
pub struct AdEmaMixRule;

const ADEMAMIX: Info = Info {
    name: "ademamix",
    about: "AdamW with a fast and a slow average of gradients",
    paper: "Pagliardini, Ablin & Grangier, The AdEMAMix Optimizer: Better, Faster, Older, arXiv:2409.03137",
    year: 2024,
    formula: "m ← β₁m + (1-β₁)g; w ← β₃w + (1-β₃)g; v ← β₂v + (1-β₂)g²; x ← x(1 - ηλ) - η(m̂ + αw)/(√v̂ + ε)",
};

impl Rule for AdEmaMixRule {
    type Config = AdEmaMixConfig;
    type Scalars = AdEmaMixScalars;
    const BUFFERS: (usize, usize) = (3, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdEmaMixScalars>> =
        Some(Observed { name: "denominator", of: |s, state| state[2].sqrt() * s.root_correction + s.eps });

    crate::rule::one_name!(ADEMAMIX);

    fn buffers(_: &AdEmaMixConfig) -> &'static [&'static str] {
        &["m", "slow", "v"]
    }

    fn prepare(config: &AdEmaMixConfig, input: &Input, _: &mut [f64]) -> Result<AdEmaMixScalars, Refusal> {
        let beta1 = input.momentum;
        let beta3 = config.beta3_at(beta1, input.t);
        Ok(AdEmaMixScalars {
            step: input.lr / bias_correction(beta1, input.t),
            slow_step: input.lr * config.alpha_at(input.t),
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            beta3,
            one_minus_beta3: 1.0 - beta3,
            root_correction: 1.0 / bias_correction(config.beta2, input.t).sqrt(),
            eps: config.eps,
            keep: 1.0 - input.lr * config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdEmaMixScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let x = x * s.keep;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let slow = s.beta3 * state[1] + s.one_minus_beta3 * g;
        let v = s.beta2 * state[2] + s.one_minus_beta2 * (g * g);
        (state[0], state[1], state[2]) = (m, slow, v);
        x - (s.step * m + s.slow_step * slow) / (v.sqrt() * s.root_correction + s.eps)
    }
}
