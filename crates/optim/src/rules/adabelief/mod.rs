//! AdaBelief (Zhuang et al., 2020), as its package 0.0.5 that made the published results.
//!
//! ```text
//! m_t = β₁ m_{t-1} + (1 - β₁) g
//! s_t = β₂ s_{t-1} + (1 - β₂) (g - m_t)² + ε
//! x_{t+1} = x_t - η/(1 - β₁ᵗ) · m_t / (√s_t / √(1 - β₂ᵗ) + ε)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdaBelief, AdaBeliefConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = AdaBelief::new(vec![x.clone()], AdaBeliefConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?; // η g / |g - m|, with m = 0.1 g
//! assert!((x.to_vec1::<f64>()?[0] - (4.0 - 1e-3 / 0.9)).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! From the paper, as the package does: ε is added into the *stored* s on every step, so that s has a floor of
//! ε/(1 - β₂) and the method tends to momentum descent where gradients are small; with `amsgrad` it is added into the
//! maximum instead, which creeps. From later packages (0.1.0 on): no decoupling and no rectification by default, ε
//! 1e-8, and the rectified step uses the threshold N > 4 with plain m below it.
//!
//! Reference: *AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients*, arXiv:2010.07468.
use crate::rule::{Config, Info, Input, Invalid, Observed, Real, Refusal, Rule, bias_correction, ranges};
use crate::rules::radam::{average_length, rectification};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdaBelief.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaBeliefConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the second moment and to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ, added to the gradient unless `weight_decouple`. Defaults to 0.
    pub weight_decay: f64,
    /// Shrink the parameter by ηλ instead. Defaults to false.
    pub weight_decouple: bool,
    /// With `weight_decouple`, shrink by λ whatever the rate. Defaults to false.
    pub fixed_decay: bool,
    /// Use the running maximum of the second moment. Defaults to false.
    pub amsgrad: bool,
    /// Rectify the early rates as RAdam does. Defaults to false.
    pub rectify: bool,
}

impl Default for AdaBeliefConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            weight_decouple: false,
            fixed_decay: false,
            amsgrad: false,
            rectify: false,
        }
    }
}

impl Config for AdaBeliefConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        if self.fixed_decay && !self.weight_decouple {
            let message = "has no effect without `weight_decouple: true`".to_owned();
            return Err(Invalid { key: "fixed_decay", message });
        }
        Ok(())
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdaBeliefScalars {
        step,
        beta1,
        one_minus_beta1,
        beta2,
        one_minus_beta2,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        eps,
        /// 1 when the step has a denominator, else 0
        adaptive,
        l2,
        /// What decoupled decay leaves of the parameter
        keep,
    }
}

/// The arithmetic of AdaBelief.
#[derive(Debug)]
pub struct AdaBeliefRule;

const ADABELIEF: Info = Info {
    name: "adabelief",
    about: "Adam that divides by the deviation of the gradient from its average",
    paper: "Zhuang et al., AdaBelief Optimizer, arXiv:2010.07468",
    year: 2020,
    formula: "m as Adam; s ← β₂s + (1-β₂)(g - m)² + ε; x ← x - η m̂/(√ŝ + ε)",
};

fn observed(s: &AdaBeliefScalars, state: &[f64]) -> f64 {
    state.last().copied().unwrap_or(0.0).sqrt() * s.root_correction + s.eps
}

impl Rule for AdaBeliefRule {
    type Config = AdaBeliefConfig;
    type Scalars = AdaBeliefScalars;
    const BUFFERS: (usize, usize) = (2, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const OBSERVE: Option<Observed<AdaBeliefScalars>> = Some(Observed { name: "denominator", of: observed });

    crate::rule::one_name!(ADABELIEF);

    fn buffers(config: &AdaBeliefConfig) -> &'static [&'static str] {
        if config.amsgrad { &["m", "s", "s_max"] } else { &["m", "s"] }
    }

    fn prepare(config: &AdaBeliefConfig, input: &Input, _: &mut [f64]) -> Result<AdaBeliefScalars, Refusal> {
        let beta1 = input.momentum;
        let correction1 = bias_correction(beta1, input.t);
        let correction2 = bias_correction(config.beta2, input.t);
        let (limit, n) = average_length(config.beta2, input.t);
        let (step, adaptive) = match (config.rectify, n > 4.0) {
            (false, _) => (input.lr / correction1, true),
            (true, true) => (rectification(limit, n) * input.lr / correction1, true),
            (true, false) => (input.lr, false),
        };
        let shrink = match (config.weight_decouple, config.fixed_decay) {
            (false, _) => 0.0,
            (true, false) => input.lr * config.weight_decay,
            (true, true) => config.weight_decay,
        };
        Ok(AdaBeliefScalars {
            step,
            beta1,
            one_minus_beta1: 1.0 - beta1,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            root_correction: 1.0 / correction2.sqrt(),
            eps: config.eps,
            adaptive: f64::from(adaptive),
            l2: if config.weight_decouple { 0.0 } else { config.weight_decay },
            keep: 1.0 - shrink,
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdaBeliefScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let x = x * s.keep;
        let g = g + s.l2 * x;
        let m = s.beta1 * state[0] + s.one_minus_beta1 * g;
        let belief = s.beta2 * state[1] + s.one_minus_beta2 * ((g - m) * (g - m));
        state[0] = m;
        let belief = match state {
            [_, kept, max] => {
                *kept = belief;
                *max = max.at_least(belief) + s.eps;
                *max
            }
            _ => {
                state[1] = belief + s.eps;
                state[1]
            }
        };
        let one = F::from_f64(1.0);
        let denominator = if s.adaptive == one { belief.sqrt() * s.root_correction + s.eps } else { one };
        x - s.step * (m / denominator)
    }
}
