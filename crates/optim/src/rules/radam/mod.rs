//! RAdam, rectified Adam (Liu et al., 2020).
//!
//! ```text
//! m, v as Adam;   N_∞ = 2/(1 - β₂) - 1;   N = N_∞ - 2 t β₂ᵗ/(1 - β₂ᵗ)
//! N ≥ 5: x ← x - η r √(1 - β₂ᵗ)/(1 - β₁ᵗ) · m / (√v + ε),   r² = (N-4)(N-2)N_∞ / ((N_∞-4)(N_∞-2)N)
//! else:  x ← x - η/(1 - β₁ᵗ) · m, or nothing
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{RAdam, RAdamConfig, RAdamVariant};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let config = RAdamConfig { variant: RAdamVariant::Pytorch, lr: 0.1, ..Default::default() };
//! let mut optimizer = RAdam::new(vec![x.clone()], config)?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // the first steps are momentum SGD: 4 - 0.1 · 8
//! assert!((x.to_vec1::<f64>()?[0] - 3.2).abs() < 1e-14);
//! # Ok(()) }
//! ```
//!
//! # Variants
//! - `authors` (default): the authors' code. Decay is decoupled; while N < 5 nothing moves, not even by decay, unless
//!   `degenerate_to_sgd` is set; the moments advance all the same.
//! - `pytorch`: the threshold is N > 5, below it always the step without denominator; decay is L2, or decoupled with
//!   `decoupled_weight_decay` and then on every step.
//!
//! Reference: *On the Variance of the Adaptive Learning Rate and Beyond*, arXiv:1908.03265.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whose RAdam.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RAdamVariant {
    /// The authors' code.
    #[default]
    Authors,
    /// PyTorch's `RAdam`.
    Pytorch,
}

/// Hyperparameters of RAdam.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RAdamConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Whose RAdam. Defaults to authors.
    pub variant: RAdamVariant,
    /// Authors' variant: take momentum steps while N < 5 instead of none. Defaults to false.
    pub degenerate_to_sgd: bool,
    /// PyTorch's variant: shrink the parameter instead of adding λx to the gradient. Defaults to false.
    pub decoupled_weight_decay: bool,
}

impl Default for RAdamConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            variant: RAdamVariant::Authors,
            degenerate_to_sgd: false,
            decoupled_weight_decay: false,
        }
    }
}

impl Config for RAdamConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        let refuse = |key, variant| {
            Err(Invalid { key, message: format!("has no effect with `variant: {variant}`; leave it out") })
        };
        match self.variant {
            RAdamVariant::Authors if self.decoupled_weight_decay => {
                refuse("decoupled_weight_decay", "authors")
            }
            RAdamVariant::Pytorch if self.degenerate_to_sgd => refuse("degenerate_to_sgd", "pytorch"),
            _ => Ok(()),
        }
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct RAdamScalars {
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        eps,
        /// 1 when the step has a denominator, else 0
        adaptive,
        l2,
        /// What decoupled decay leaves of the parameter
        keep,
    }
}

/// The arithmetic of RAdam.
#[derive(Debug)]
pub struct RAdamRule;

const RADAM: Info = Info {
    name: "radam",
    about: "Adam with the variance of its early rates rectified",
    paper: "Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, arXiv:1908.03265",
    year: 2020,
    formula: "m, v as Adam; x ← x - η r m̂/(√v̂ + ε) once N ≥ 5",
};

/// N_∞ and N_t, the length of the approximated simple moving average.
pub(crate) fn average_length(beta2: f64, t: u64) -> (f64, f64) {
    let power = crate::power::of_step(beta2, t);
    let limit = 2.0 / (1.0 - beta2) - 1.0;
    (limit, limit - 2.0 * t as f64 * power / (1.0 - power))
}

/// The rectification r.
pub(crate) fn rectification(limit: f64, n: f64) -> f64 {
    ((n - 4.0) / (limit - 4.0) * (n - 2.0) / n * limit / (limit - 2.0)).sqrt()
}

fn observed(s: &RAdamScalars, state: &[f64]) -> f64 {
    if s.adaptive == 1.0 { state[1].sqrt() + s.eps } else { 1.0 }
}

impl Rule for RAdamRule {
    type Config = RAdamConfig;
    type Scalars = RAdamScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<RAdamScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(RADAM);

    fn buffers(_: &RAdamConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn prepare(config: &RAdamConfig, input: &Input, _: &mut [f64]) -> Result<RAdamScalars, Refusal> {
        let beta1 = input.momentum;
        let correction1 = bias_correction(beta1, input.t);
        let correction2 = bias_correction(config.beta2, input.t);
        let (limit, n) = average_length(config.beta2, input.t);
        let authors = config.variant == RAdamVariant::Authors;
        let adaptive = if authors { n >= 5.0 } else { n > 5.0 };
        let moves = adaptive || !authors || config.degenerate_to_sgd;
        let decoupled = authors || config.decoupled_weight_decay;
        Ok(RAdamScalars {
            step: match (moves, adaptive) {
                (false, _) => 0.0,
                (_, false) => input.lr / correction1,
                (_, true) => input.lr * rectification(limit, n) * correction2.sqrt() / correction1,
            },
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            eps: config.eps,
            adaptive: f64::from(adaptive),
            l2: if decoupled { 0.0 } else { config.weight_decay },
            keep: if decoupled && moves { 1.0 - input.lr * config.weight_decay } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &RAdamScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = g + s.l2 * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        (state[0], state[1]) = (m, v);
        let one = F::from_f64(1.0);
        let denominator = if s.adaptive == one { v.sqrt() + s.eps } else { one };
        x * s.keep - s.step * (m / denominator)
    }
}
