//! Yogi (Zaheer et al., 2018).
//!
//! ```text
//! g   = ∇f(x_t) + λ x_t
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! v_t = v_{t-1} - (1 - β₂) sign(v_{t-1} - g²) g²
//! x_{t+1} = x_t - η/(1 - β₁ᵗ) · m_t / (√v_t / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Yogi, YogiConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Yogi::new(vec![x.clone()], YogiConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // about η
//! assert!((x.to_vec1::<f64>()?[0] - 3.99).abs() < 1e-5);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As the common PyTorch ports and AdaBelief's copy: `initial_accumulator` fills both moments (TensorFlow Addons fills
//! v only), decay is L2 (the paper's code: proximal). ε is 1e-3, as in the paper.
//!
//! Reference: *Adaptive Methods for Nonconvex Optimization*, NeurIPS 2018.
use crate::rule::{
    Config, Info, Input, Invalid, MAX_BUFFERS, Observed, Real, Refusal, Rule, bias_correction, ranges,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Yogi.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct YogiConfig {
    /// Learning rate η. Defaults to 0.01.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-3.
    pub eps: f64,
    /// What both moments start at. Defaults to 1e-6.
    pub initial_accumulator: f64,
    /// Weight decay λ, added to the gradient. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for YogiConfig {
    fn default() -> Self {
        Self { lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-3, initial_accumulator: 1e-6, weight_decay: 0.0 }
    }
}

impl Config for YogiConfig {
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
        ranges::at_least_zero("initial_accumulator", self.initial_accumulator)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct YogiScalars {
        /// η / (1 - β₁ᵗ)
        step,
        beta1,
        one_minus_beta1,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        weight_decay,
    }
}

/// The arithmetic of Yogi.
#[derive(Debug)]
pub struct YogiRule;

const YOGI: Info = Info {
    name: "yogi",
    about: "Adam whose second moment changes by at most a share of g²",
    paper: "Zaheer et al., Adaptive Methods for Nonconvex Optimization, NeurIPS 2018",
    year: 2018,
    formula: "m as Adam; v ← v - (1-β₂) sign(v - g²) g²; x ← x - η m̂/(√v̂ + ε)",
};

fn observed(s: &YogiScalars, state: &[f64]) -> f64 {
    state[1].sqrt() * s.root_correction + s.eps
}

impl Rule for YogiRule {
    type Config = YogiConfig;
    type Scalars = YogiScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<YogiScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(YOGI);

    fn buffers(_: &YogiConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn start(config: &YogiConfig, _: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        Ok([config.initial_accumulator, config.initial_accumulator, 0.0, 0.0])
    }

    fn prepare(config: &YogiConfig, input: &Input, _: &mut [f64]) -> Result<YogiScalars, Refusal> {
        let beta1 = input.momentum;
        let correction1 = bias_correction(beta1, input.t);
        let correction2 = bias_correction(config.beta2, input.t);
        Ok(YogiScalars {
            step: input.lr / correction1,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: 1.0 / correction2.sqrt(),
            eps: config.eps,
            weight_decay: config.weight_decay,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &YogiScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let zero = F::from_f64(0.0);
        let g = g + s.weight_decay * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let square = g * g;
        let share = s.one_minus_beta2 * square;
        let v = state[1];
        let signed = if v > square { share } else { -share };
        let v = v - if v == square { zero } else { signed };
        (state[0], state[1]) = (m, v);
        x - s.step * (m / (v.sqrt() * s.root_correction + s.eps))
    }
}
