//! Adafactor (Shazeer & Stern, 2018): a second moment kept as the product of its row and column means.
//!
//! ```text
//! w   = tᵇ,  a = max(ε₂, RMS(x)) min(η, 1/√t)
//! x   ← x_t (1 - ηλ)
//! R_t = (1 - w) R_{t-1} + w mean_columns(g²)
//! C_t = (1 - w) C_{t-1} + w mean_rows(g²)
//! v   = R_t C_t / max(mean(R_t), ε₁)                  of rank ≤ 1: v_t = (1 - w) v_{t-1} + w g²
//! u   = g / max(√v, ε₁)
//! x_{t+1} = x - a u / max(1, RMS(u)/d)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adafactor, AdafactorConfig, Optimizer};
//!
//! let x = Var::ones((64, 32), candle_core::DType::F32, &Device::Cpu)?;
//! let params = vec![("w".to_owned(), x.clone())];
//! let mut optimizer = Adafactor::with_params(params, AdafactorConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // 96 numbers for 2048 parameters.
//! let kept: usize = optimizer.state_dict()?.tensors.values().map(|t| t.elem_count()).sum();
//! assert_eq!(kept, 64 + 32);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch: every tensor of two axes or more is factored over its last two, whatever their sizes, with the others as a
//!   batch. Other versions want 16 or 128 elements a side; timm factors convolutions over the first two axes.
//! - ε₁ is by default the machine epsilon of the arithmetic: 2.2e-16 for parameters of f64, 1.2e-7 for all others, which are
//!   computed in f32. PyTorch takes that of the parameter, also of halves.
//! - No first moment.
//!
//! Reference: *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost*, arXiv:1804.04235.
use crate::rule::{Config, Info, Invalid, Reach, ranges, require};
use crate::sums::squares;
use crate::{Result, TensorRule, TensorStep};
use candle_core::{D, DType, Tensor};
use serde::{Deserialize, Serialize};

/// Hyperparameters of Adafactor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdafactorConfig {
    /// Learning rate η, an upper bound of the relative step. Defaults to 1e-2.
    pub lr: f64,
    /// The power b of the step's number in a new square's weight, at most 0. Defaults to -0.8.
    pub beta2_decay: f64,
    /// The least denominator; null for the machine epsilon. Defaults to null.
    pub eps1: Option<f64>,
    /// The least scale of a parameter. Defaults to 1e-3.
    pub eps2: f64,
    /// What the root mean square of an update is limited to, at least 1. Defaults to 1.
    pub d: f64,
    /// Decoupled weight decay λ. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self { lr: 1e-2, beta2_decay: -0.8, eps1: None, eps2: 1e-3, d: 1.0, weight_decay: 0.0 }
    }
}

impl Config for AdafactorConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        let falls = self.beta2_decay <= 0.0 && self.beta2_decay.is_finite();
        require(falls, "beta2_decay", "a finite number of at most 0", self.beta2_decay)?;
        self.eps1.map_or(Ok(()), |eps| ranges::at_least_zero("eps1", eps))?;
        ranges::at_least_zero("eps2", self.eps2)?;
        require(self.d >= 1.0 && self.d.is_finite(), "d", "a finite number of at least 1", self.d)?;
        ranges::weight_decay(self.weight_decay)
    }
}

/// The arithmetic of Adafactor.
#[derive(Debug)]
pub struct AdafactorRule;

const ADAFACTOR: Info = Info {
    name: "adafactor",
    about: "second moments as the product of row and column means",
    paper: "Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv:1804.04235",
    year: 2018,
    formula: "R, C ← means of g² by row and column; u = g/√(RC/R̄); x ← x - max(ε₂, RMS x) min(η, 1/√t) u/max(1, RMS(u)/d)",
};

/// The root of the mean square of all elements; 0 of none.
fn rms(t: &Tensor) -> Result<f64> {
    Ok((squares(t)? / t.elem_count().max(1) as f64).sqrt())
}

impl TensorRule for AdafactorRule {
    type Config = AdafactorConfig;
    const REACH: Reach = Reach::Parameter;

    fn names() -> Vec<(&'static Info, AdafactorConfig)> {
        vec![(&ADAFACTOR, AdafactorConfig::default())]
    }

    fn info(_: &AdafactorConfig) -> &'static Info {
        &ADAFACTOR
    }

    fn buffers(_: &AdafactorConfig) -> &'static [&'static str] {
        &["row", "column", "v"]
    }

    fn sized(_: &AdafactorConfig) -> &'static [&'static str] {
        &[]
    }

    fn step(step: &mut TensorStep<AdafactorConfig>) -> Result<()> {
        for p in &mut step.params {
            let c = p.config;
            if p.x.elem_count() == 0 {
                continue;
            }
            let machine = if p.x.dtype() == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
            let eps1 = c.eps1.unwrap_or(machine);
            let t = p.t as f64;
            let w = libm::pow(t, c.beta2_decay);
            let rate = rms(&p.x)?.max(c.eps2) * p.lr.min(1.0 / t.sqrt());
            let x = (&p.x * (1.0 - p.lr * c.weight_decay))?;
            let square = p.g.sqr()?;
            let mut average = |name, new: Tensor| -> Result<Tensor> {
                let kept = ((p.memory.tensor(name, &new)? * (1.0 - w))? + (new * w)?)?;
                p.memory.tensors.insert(name, kept.clone());
                Ok(kept)
            };
            let v = if p.x.rank() < 2 {
                average("v", square)?
            } else {
                let row = average("row", square.mean_keepdim(D::Minus1)?)?;
                let column = average("column", square.mean_keepdim(D::Minus2)?)?;
                let scale = row.mean_keepdim(D::Minus2)?.maximum(eps1)?;
                row.broadcast_mul(&column)?.broadcast_div(&scale)?
            };
            let u = (&p.g / v.sqrt()?.maximum(eps1)?)?;
            let limit = (rms(&u)? / c.d).max(1.0);
            p.set((x - (u * (rate / limit))?)?);
        }
        Ok(())
    }
}
