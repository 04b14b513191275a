//! NAdam (Dozat, 2016): Adam with Nesterov's momentum and a schedule for it, as PyTorch has it.
//!
//! ```text
//! μ_t = β₁ (1 - ½ · 0.96^(tψ)),  Π_t = Π_{t-1} μ_t
//! g   = ∇f(x_t) + λ x_t                               decoupled: x ← x (1 - ηλ), g = ∇f(x_t)
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! v_t = β₂ v_{t-1} + (1 - β₂) g²
//! x_{t+1} = x_t - η [(1 - μ_t)/(1 - Π_t) g + μ_{t+1}/(1 - Π_t μ_{t+1}) m_t] / (√(v_t / (1 - β₂ᵗ)) + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{NAdam, NAdamConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = NAdam::new(vec![x.clone()], NAdamConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! assert!(x.to_vec1::<f64>()?[0] < 3.9);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - The factors use μ, the average m uses β₁: with `momentum_decay: 0` the factor μ is β₁/2, not β₁. A constant β₁ is
//!   [`nadamw`](super::nadamw).
//! - The product of all μ is kept in f64; PyTorch keeps it in f32, which is 1e-9 away.
//!
//! Reference: *Incorporating Nesterov Momentum into Adam*, ICLR workshop 2016.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of NAdam.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NAdamConfig {
    /// Learning rate η. Defaults to 2e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// How fast the momentum's factor grows to β₁, ψ. Defaults to 4e-3.
    pub momentum_decay: f64,
    /// Shrink the parameter instead of adding λx to the gradient. Defaults to false.
    pub decoupled_weight_decay: bool,
}

impl Default for NAdamConfig {
    fn default() -> Self {
        Self {
            lr: 2e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            momentum_decay: 4e-3,
            decoupled_weight_decay: false,
        }
    }
}

impl Config for NAdamConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        ranges::at_least_zero("momentum_decay", self.momentum_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct NAdamScalars {
        /// η (1 - μ_t)/(1 - Π_t)
        gradient_share,
        /// η μ_{t+1}/(1 - Π_t μ_{t+1})
        momentum_share,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        l2,
        /// 1 - ηλ with decoupled decay, else 1
        keep,
    }
}

/// The arithmetic of NAdam.
#[derive(Debug)]
pub struct NAdamRule;

const NADAM: Info = Info {
    name: "nadam",
    about: "Adam with Nesterov's momentum on a schedule",
    paper: "Dozat, Incorporating Nesterov Momentum into Adam, ICLR workshop",
    year: 2016,
    formula: "m, v as Adam; x ← x - η[(1-μ)/(1-Π) g + μ'/(1-Πμ') m]/(√v̂ + ε)",
};

impl Rule for NAdamRule {
    type Config = NAdamConfig;
    type Scalars = NAdamScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const MEMORY: &'static [&'static str] = &["mu_product"];
    const OBSERVE: Option<Observed<NAdamScalars>> =
        Some(Observed { name: "denominator", of: |s, state| state[1].sqrt() * s.root_correction + s.eps });

    crate::rule::one_name!(NADAM);

    fn buffers(_: &NAdamConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn prepare(config: &NAdamConfig, input: &Input, memory: &mut [f64]) -> Result<NAdamScalars, Refusal> {
        let beta1 = input.momentum;
        let mu = |t: f64| beta1 * (1.0 - 0.5 * libm::pow(0.96, t * config.momentum_decay));
        let (mu, next) = (mu(input.t as f64), mu(input.t as f64 + 1.0));
        let product = if input.t == 1 { mu } else { memory[0] * mu };
        memory[0] = product;
        let decay = config.weight_decay;
        let (l2, shrink) = if config.decoupled_weight_decay { (0.0, input.lr * decay) } else { (decay, 0.0) };
        Ok(NAdamScalars {
            gradient_share: input.lr * (1.0 - mu) / (1.0 - product),
            momentum_share: input.lr * next / (1.0 - product * next),
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: 1.0 / bias_correction(config.beta2, input.t).sqrt(),
            eps: config.eps,
            l2,
            keep: 1.0 - shrink,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &NAdamScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let x = x * s.keep;
        let g = g + s.l2 * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let v = s.beta2 * state[1] + s.one_minus_beta2 * (g * g);
        (state[0], state[1]) = (m, v);
        x - (s.gradient_share * g + s.momentum_share * m) / (v.sqrt() * s.root_correction + s.eps)
    }
}
