//! Adan (Xie et al., 2022): Nesterov's momentum from differences of gradients.
//!
//! ```text
//! q   = g_t - g_{t-1}                                 0 at the first step
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! d_t = β₂ d_{t-1} + (1 - β₂) q
//! n_t = β₃ n_{t-1} + (1 - β₃) (g + β₂ q)²
//! u   = [m_t/(1 - β₁ᵗ) + β₂ d_t/(1 - β₂ᵗ)] / (√n_t / √(1 - β₃ᵗ) + ε)
//! x_{t+1} = (x_t - η u)/(1 + ηλ)                      no_prox: x_t (1 - ηλ) - η u
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adan, AdanConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Adan::new(vec![x.clone()], AdanConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the authors' code; their paper writes 1 - β for these β.
//! - The restart of the paper and the gradient clipping of the authors' code are not part of it: clip with
//!   [`StepContext::max_norm`](crate::StepContext::max_norm).
//!
//! Reference: *Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models*, arXiv:2208.06677.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Adan.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdanConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the gradients' average. Defaults to 0.98.
    pub beta1: f64,
    /// Decay of the differences' average. Defaults to 0.92.
    pub beta2: f64,
    /// Decay of the second moment. Defaults to 0.99.
    pub beta3: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Shrink the parameter before the step, as AdamW, instead of dividing by 1 + ηλ after it. Defaults to false.
    pub no_prox: bool,
}

impl Default for AdanConfig {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.98, beta2: 0.92, beta3: 0.99, eps: 1e-8, weight_decay: 0.0, no_prox: false }
    }
}

impl Config for AdanConfig {
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
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdanScalars {
        lr,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        beta3,
        one_minus_beta3,
        /// 1 / (1 - β₁ᵗ)
        correction1,
        /// β₂ / (1 - β₂ᵗ)
        correction2,
        /// 1 / √(1 - β₃ᵗ)
        root_correction,
        eps,
        /// 1 - ηλ with `no_prox`, else 1
        keep,
        /// 1 / (1 + ηλ) without it, else 1
        shrink,
        /// 1 at the first step, which has no gradient before it, else 0
        first,
    }
}

/// The arithmetic of Adan.
#[derive(Debug)]
pub struct AdanRule;

const ADAN: Info = Info {
    name: "adan",
    about: "Nesterov's momentum from differences of gradients",
    paper: "Xie et al., Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, arXiv:2208.06677",
    year: 2022,
    formula: "q = g - g'; m ← β₁m + (1-β₁)g; d ← β₂d + (1-β₂)q; n ← β₃n + (1-β₃)(g + β₂q)²; x ← (x - η(m̂ + β₂d̂)/(√n̂ + ε))/(1 + ηλ)",
};

impl Rule for AdanRule {
    type Config = AdanConfig;
    type Scalars = AdanScalars;
    const BUFFERS: (usize, usize) = (4, 4);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdanScalars>> =
        Some(Observed { name: "denominator", of: |s, state| state[2].sqrt() * s.root_correction + s.eps });

    crate::rule::one_name!(ADAN);

    fn buffers(_: &AdanConfig) -> &'static [&'static str] {
        &["m", "d", "n", "g_prev"]
    }

    fn prepare(config: &AdanConfig, input: &Input, _: &mut [f64]) -> Result<AdanScalars, Refusal> {
        let (beta1, decay) = (input.momentum, input.lr * config.weight_decay);
        Ok(AdanScalars {
            lr: input.lr,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            beta3: config.beta3,
            one_minus_beta3: 1.0 - config.beta3,
            correction1: 1.0 / bias_correction(beta1, input.t),
            correction2: config.beta2 / bias_correction(config.beta2, input.t),
            root_correction: 1.0 / bias_correction(config.beta3, input.t).sqrt(),
            eps: config.eps,
            keep: if config.no_prox { 1.0 - decay } else { 1.0 },
            shrink: if config.no_prox { 1.0 } else { 1.0 / (1.0 + decay) },
            first: if input.t == 1 { 1.0 } else { 0.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdanScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let zero = F::from_f64(0.0);
        let turn = if s.first > zero { zero } else { g - state[3] };
        let ahead = g + s.beta2 * turn;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let d = s.beta2 * state[1] + s.one_minus_beta2 * turn;
        let n = s.beta3 * state[2] + s.one_minus_beta3 * (ahead * ahead);
        (state[0], state[1], state[2], state[3]) = (m, d, n, g);
        let u = (s.correction1 * m + s.correction2 * d) / (n.sqrt() * s.root_correction + s.eps);
        (x * s.keep - s.lr * u) * s.shrink
    }
}
