//! Adam (Kingma & Ba, 2015), AMSGrad (Reddi et al., 2018) and AdamW (Loshchilov & Hutter, 2019).
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t                               AdamW: x ← x (1 - ηλ), g = ∇f(x_t)
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! v*  = max(v*, v_t) with AMSGrad, else v_t
//! x_{t+1} = x_t - η/(1 - β₁ᵗ) · m_t / (√v* / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adam, AdamConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Adam::new(vec![x.clone()], AdamConfig { lr: 0.1, ..AdamConfig::adamw() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // Decay to 4 (1 - 0.1 · 0.01), then a first step of almost exactly the learning rate.
//! assert!((x.to_vec1::<f64>()?[0] - 3.896).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch since 1.3: ε is added after the bias correction of √v. `legacy_eps` adds it before, as PyTorch up
//!   to 1.1 and the paper's algorithm in its efficient order do.
//! - AMSGrad takes the maximum of the *uncorrected* v, as PyTorch's code (its formula page says otherwise);
//!   `max_after_bias_correction` takes it of the corrected one. The paper has no bias correction at all.
//!
//! References: arXiv:1412.6980, arXiv:1904.09237, arXiv:1711.05101.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Adam, AMSGrad and AdamW.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0 (`adamw`: 0.01).
    pub weight_decay: f64,
    /// Shrink the parameter instead of adding λx to the gradient. Defaults to false (`adamw`: true).
    pub decoupled: bool,
    /// Divide by the running maximum of the second moment. Defaults to false (`amsgrad`: true).
    pub amsgrad: bool,
    /// Take that maximum after bias correction. Defaults to false.
    pub max_after_bias_correction: bool,
    /// Add ε before bias correction. Defaults to false.
    pub legacy_eps: bool,
}

impl Default for AdamConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            decoupled: false,
            amsgrad: false,
            max_after_bias_correction: false,
            legacy_eps: false,
        }
    }
}

impl AdamConfig {
    /// AMSGrad.
    pub fn amsgrad() -> Self {
        Self { amsgrad: true, ..Self::default() }
    }
    /// AdamW.
    pub fn adamw() -> Self {
        Self { decoupled: true, weight_decay: 1e-2, ..Self::default() }
    }
}

impl Config for AdamConfig {
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
    pub struct AdamScalars {
        /// η / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ), unless the maximum is corrected already
        root_correction,
        /// What v is multiplied by before the maximum is taken
        max_correction,
        eps,
        l2,
        /// 1 - ηλ with decoupled decay, else 1
        keep,
    }
}

/// The arithmetic of Adam.
#[derive(Debug)]
pub struct AdamRule;

const ADAM: Info = Info {
    name: "adam",
    about: "adaptive moment estimation",
    paper: "Kingma & Ba, Adam: A Method for Stochastic Optimization, arXiv:1412.6980",
    year: 2015,
    formula: "m ← β₁m + (1-β₁)g; v ← β₂v + (1-β₂)g²; x ← x - η m̂/(√v̂ + ε)",
};
const AMSGRAD: Info = Info {
    name: "amsgrad",
    about: "Adam with the running maximum of the second moment",
    paper: "Reddi, Kale & Kumar, On the Convergence of Adam and Beyond, arXiv:1904.09237",
    year: 2018,
    formula: "m, v as Adam; v* ← max(v*, v); x ← x - η m̂/(√v̂* + ε)",
};
const ADAMW: Info = Info {
    name: "adamw",
    about: "Adam with decoupled weight decay",
    paper: "Loshchilov & Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101",
    year: 2019,
    formula: "x ← x(1 - ηλ); then Adam without λ",
};

fn observed(s: &AdamScalars, state: &[f64]) -> f64 {
    state.last().copied().unwrap_or(0.0).sqrt() * s.root_correction + s.eps
}

impl Rule for AdamRule {
    type Config = AdamConfig;
    type Scalars = AdamScalars;
    const BUFFERS: (usize, usize) = (2, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdamScalars>> = Some(Observed { name: "denominator", of: observed });

    fn names() -> Vec<(&'static Info, AdamConfig)> {
        vec![(&ADAM, AdamConfig::default()), (&AMSGRAD, AdamConfig::amsgrad()), (&ADAMW, AdamConfig::adamw())]
    }

    fn info(config: &AdamConfig) -> &'static Info {
        match config {
            AdamConfig { decoupled: true, .. } => &ADAMW,
            AdamConfig { amsgrad: true, .. } => &AMSGRAD,
            _ => &ADAM,
        }
    }

    fn buffers(config: &AdamConfig) -> &'static [&'static str] {
        if config.amsgrad { &["m", "v", "v_max"] } else { &["m", "v"] }
    }

    fn prepare(config: &AdamConfig, input: &Input, _: &mut [f64]) -> Result<AdamScalars, Refusal> {
        let beta1 = input.momentum;
        let correction1 = bias_correction(beta1, input.t);
        let correction2 = bias_correction(config.beta2, input.t);
        let after = config.amsgrad && config.max_after_bias_correction;
        let (l2, shrink) =
            if config.decoupled { (0.0, input.lr * config.weight_decay) } else { (config.weight_decay, 0.0) };
        Ok(AdamScalars {
            step: input.lr / correction1,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: if after { 1.0 } else { 1.0 / correction2.sqrt() },
            max_correction: if after { 1.0 / correction2 } else { 1.0 },
            eps: if config.legacy_eps { config.eps / correction2.sqrt() } else { config.eps },
            l2,
            keep: 1.0 - shrink,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdamScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let x = x * s.keep;
        let g = g + s.l2 * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        (state[0], state[1]) = (m, v);
        let v = match state {
            [_, _, v_max] => {
                *v_max = v_max.at_least(v * s.max_correction);
                *v_max
            }
            _ => v,
        };
        x - s.step * (m / (v.sqrt() * s.root_correction + s.eps))
    }
}
