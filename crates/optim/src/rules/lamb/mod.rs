//! LAMB (You et al., 2020): AdamW whose step is as long as a share of each layer's norm.
//!
//! ```text
//! g   ← g / max(|all gradients| / max_grad_norm, 1)
//! m_t = β₁ m_{t-1} + (1 - β₁) g                       without grad_averaging: + g
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! u   = m_t/(1 - β₁ᵗ) / (√v_t / √(1 - β₂ᵗ) + ε) + λ x_t
//! r   = |x_t| / |u|                                   1 where either is 0
//! x_{t+1} = x_t - η r u
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Lamb, LambConfig};
//!
//! let x = Var::new(&[3f64, 4.0], &Device::Cpu)?;
//! let mut optimizer = Lamb::new(vec![x.clone()], LambConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sum_all()?)?;
//! let moved: f64 = x.to_vec1::<f64>()?.iter().zip([3.0, 4.0]).map(|(a, b)| (a - b) * (a - b)).sum();
//! assert!((moved.sqrt() - 0.5).abs() < 1e-12); // a tenth of |x| = 5
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As timm: the clip of the global norm is part of the method and on by default (its factor has no 1e-6, unlike
//!   [`StepContext::max_norm`](crate::StepContext::max_norm)); without decay (λ = 0) there is no ratio at all unless
//!   `always_adapt`, so that biases in a group without decay take Adam's steps.
//! - |u| includes the decay. Other versions limit |x| to 10, as the paper's φ may, or add ε to |u|.
//!
//! Reference: *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*, arXiv:1904.00962.
use crate::pairs::{Blend, Descend, Direction, Square, paired};
use crate::rule::{Config, Info, Invalid, bias_correction, ranges, require};
use crate::sums::squares;
use crate::{Result, TensorRule, TensorStep};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of LAMB.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LambConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-6.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.01.
    pub weight_decay: f64,
    /// Correct the averages for their start at 0. Defaults to true.
    pub bias_correction: bool,
    /// Whether a gradient enters the first moment times 1 - β₁. Defaults to true.
    pub grad_averaging: bool,
    /// What the norm of all gradients together is clipped to; null for no clip. Defaults to 1.
    pub max_grad_norm: Option<f64>,
    /// Limit the ratio to 1. Defaults to false.
    pub trust_clip: bool,
    /// Adapt layers without decay too. Defaults to false.
    pub always_adapt: bool,
    /// Shrink the parameter before the step instead of adding λx to it. Defaults to false.
    pub decoupled_decay: bool,
}

impl Default for LambConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: 1e-2,
            bias_correction: true,
            grad_averaging: true,
            max_grad_norm: Some(1.0),
            trust_clip: false,
            always_adapt: false,
            decoupled_decay: false,
        }
    }
}

impl Config for LambConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        let max = self.max_grad_norm.unwrap_or(1.0);
        require(max > 0.0 && max.is_finite(), "max_grad_norm", "a finite number above 0, or null", max)
    }
}

/// The arithmetic of LAMB.
#[derive(Debug)]
pub struct LambRule;

const LAMB: Info = Info {
    name: "lamb",
    about: "AdamW at a rate that follows each layer's norm",
    paper: "You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, arXiv:1904.00962",
    year: 2020,
    formula: "m, v as Adam of clipped g; u = m̂/(√v̂ + ε) + λx; x ← x - η |x|/|u| u",
};

impl TensorRule for LambRule {
    type Config = LambConfig;

    crate::rule::one_name!(LAMB);

    fn buffers(_: &LambConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn step(step: &mut TensorStep<LambConfig>) -> Result<()> {
        let mut norm = 0.0;
        for p in &step.params {
            norm += squares(&p.g)?;
        }
        let norm = norm.sqrt();
        for p in &mut step.params {
            let (c, beta1) = (p.config, p.momentum);
            let scale = c.max_grad_norm.map_or(1.0, |max| (norm / max).max(1.0));
            let g = if scale == 1.0 { p.g.clone() } else { (&p.g / scale)? };
            let share = if c.grad_averaging { 1.0 - beta1 } else { 1.0 };
            let m = paired(Blend { keep: beta1, share }, &p.memory.tensor("m", &p.x)?, &g)?;
            let squares_of = Square { keep: c.beta2, share: 1.0 - c.beta2 };
            let v = paired(squares_of, &p.memory.tensor("v", &p.x)?, &g)?;
            let correct = |beta: f64| if c.bias_correction { bias_correction(beta, p.t) } else { 1.0 };
            let (first, second) = (correct(beta1), correct(c.beta2).sqrt());
            let mut u = paired(Direction { first: 1.0 / first, second: 1.0 / second, eps: c.eps }, &m, &v)?;
            let mut x = p.x.clone();
            if c.decoupled_decay {
                x = (x * (1.0 - p.lr * c.weight_decay))?;
            } else if c.weight_decay != 0.0 {
                u = paired(Blend { keep: 1.0, share: c.weight_decay }, &u, &x)?;
            }
            let mut rate = p.lr;
            if c.weight_decay != 0.0 || c.always_adapt {
                let (length, step) = (squares(&x)?.sqrt(), squares(&u)?.sqrt());
                let ratio = if length > 0.0 && step > 0.0 { length / step } else { 1.0 };
                rate *= if c.trust_clip { ratio.min(1.0) } else { ratio };
            }
            p.set(paired(Descend { keep: 1.0, rate }, &x, &u)?);
            p.memory.tensors.extend([("m", m), ("v", v)]);
        }
        Ok(())
    }
}
