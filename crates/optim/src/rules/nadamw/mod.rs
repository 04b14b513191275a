//! NAdamW: AdamW with Nesterov's momentum and a constant β₁, the form of AlgoPerf's target-setting runs.
//!
//! ```text
//! x   ← x_t (1 - ηλ)
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! x_{t+1} = x - η/(1 - β₁ᵗ) · (β₁ m_t + (1 - β₁) g) / (√v_t / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{NAdamW, NAdamWConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = NAdamW::new(vec![x.clone()], NAdamWConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // (β₁(1 - β₁) + 1 - β₁)/(1 - β₁) = 1.9: a first step of almost twice the rate, after decay to 3.996.
//! assert!((x.to_vec1::<f64>()?[0] - 3.806).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As timm and AlgoPerf's PyTorch code: both parts of the update are divided by 1 - β₁ᵗ of this step; optax corrects m with
//!   t + 1.
//! - PyTorch's NAdam with decoupled decay is another method ([`nadam`](super::nadam)), with any `momentum_decay`.
//!
//! References: Dozat 2016; Dahl et al., *Benchmarking Neural Network Training Algorithms*, arXiv:2306.07179.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of NAdamW.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NAdamWConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Decoupled weight decay λ. Defaults to 0.01.
    pub weight_decay: f64,
}

impl Default for NAdamWConfig {
    fn default() -> Self {
        Self { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 1e-2 }
    }
}

impl Config for NAdamWConfig {
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
    pub struct NAdamWScalars {
        /// η / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        /// 1 - ηλ
        keep,
    }
}

/// The arithmetic of NAdamW.
#[derive(Debug)]
pub struct NAdamWRule;

const NADAMW: Info = Info {
    name: "nadamw",
    about: "AdamW with Nesterov's momentum",
    paper: "Dahl et al., Benchmarking Neural Network Training Algorithms, arXiv:2306.07179",
    year: 2023,
    formula: "x ← x(1 - ηλ); m, v as Adam; x ← x - η (β₁m + (1-β₁)g)/(1-β₁ᵗ)/(√v̂ + ε)",
};

impl Rule for NAdamWRule {
    type Config = NAdamWConfig;
    type Scalars = NAdamWScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<NAdamWScalars>> =
        Some(Observed { name: "denominator", of: |s, state| state[1].sqrt() * s.root_correction + s.eps });

    crate::rule::one_name!(NADAMW);

    fn buffers(_: &NAdamWConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn prepare(config: &NAdamWConfig, input: &Input, _: &mut [f64]) -> Result<NAdamWScalars, Refusal> {
        let beta1 = input.momentum;
        Ok(NAdamWScalars {
            step: input.lr / bias_correction(beta1, input.t),
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: 1.0 / bias_correction(config.beta2, input.t).sqrt(),
            eps: config.eps,
            keep: 1.0 - input.lr * config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &NAdamWScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let x = x * s.keep;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        (state[0], state[1]) = (m, v);
        let ahead = s.beta1 * m + s.one_minus_beta1 * g;
        x - s.step * (ahead / (v.sqrt() * s.root_correction + s.eps))
    }
}
