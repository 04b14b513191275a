//! AdaGD, adaptive gradient descent without descent (Malitsky & Mishchenko, 2020), the deterministic form.
//!
//! ```text
//! L_t = ‖g_t - g_{t-1}‖ / ‖x_t - x_{t-1}‖              over all parameters together
//! λ_t = min(√(1 + θ_{t-1}) λ_{t-1}, 1 / (2 L_t))       λ_1 = lambda0, θ_1 = ∞
//! θ_t = λ_t / λ_{t-1}
//! x_{t+1} = x_t - λ_t g_t
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{AdaGd, AdaGdConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = AdaGd::new(vec![x.clone()], AdaGdConfig::default())?;
//! for _ in 0..10 {
//!     optimizer.backward_step(&x.sqr()?.sum_all()?)?; // L = 2 is found at the second step: λ = 1/4
//! }
//! assert!(x.to_vec1::<f64>()?[0] < 0.1);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - The method chooses its own step size: a learning-rate schedule has no effect.
//! - The paper's stochastic form takes both gradients on the same batch, at the cost of a second backward pass. This
//!   form compares gradients of successive batches and is meant for full batches.
//! - Equal successive gradients, or a step too small to move x, leave no L: the step then grows by the first bound, or
//!   stays when there is none yet.
//! - The previous iterate is stored: ‖x_t - x_{t-1}‖ from the step itself loses six digits after a first step of 1e-10.
//!
//! Reference: *Adaptive Gradient Descent without Descent*, arXiv:1910.09529.
use crate::rule::{Config, Info, Input, Invalid, Real, Reduce, Refusal, Rule, SUMS, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AdaGD.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaGdConfig {
    /// The first step size. Defaults to 1e-10.
    pub lambda0: f64,
}

impl Default for AdaGdConfig {
    fn default() -> Self {
        Self { lambda0: 1e-10 }
    }
}

impl Config for AdaGdConfig {
    fn lr(&self) -> f64 {
        self.lambda0
    }
    fn check(&self) -> Result<(), Invalid> {
        let ok = self.lambda0 > 0.0 && self.lambda0.is_finite();
        require(ok, "lambda0", "a finite number above 0", self.lambda0)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AdaGdScalars { lambda }
}

/// The arithmetic of AdaGD.
#[derive(Debug)]
pub struct AdaGdRule;

const ADAGD: Info = Info {
    name: "adagd",
    about: "gradient descent whose step size follows the local curvature",
    paper: "Malitsky & Mishchenko, Adaptive Gradient Descent without Descent, arXiv:1910.09529",
    year: 2020,
    formula: "λ = min(√(1+θ)λ, ‖Δx‖/(2‖Δg‖)); x ← x - λg",
};

/// ‖x_t - x_{t-1}‖² and ‖g_t - g_{t-1}‖².
#[inline(always)]
fn moved_and_turned(x: f64, g: f64, state: &[f64]) -> [f64; SUMS] {
    [(x - state[0]).powi(2), (g - state[1]).powi(2)]
}

impl Rule for AdaGdRule {
    type Config = AdaGdConfig;
    type Scalars = AdaGdScalars;
    const BUFFERS: (usize, usize) = (2, 2);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const MEMORY: &'static [&'static str] = &["lambda", "theta"];
    const REDUCE: Option<Reduce> = Some(Reduce::Together(moved_and_turned));

    crate::rule::one_name!(ADAGD);

    fn buffers(_: &AdaGdConfig) -> &'static [&'static str] {
        &["x_prev", "g_prev"]
    }

    fn prepare(config: &AdaGdConfig, input: &Input, memory: &mut [f64]) -> Result<AdaGdScalars, Refusal> {
        let [moved, turned] = input.sums.map(f64::sqrt);
        let previous = memory[0];
        // Where nothing moved or nothing turned there is no curvature to read.
        let curvature_bound =
            if moved > 0.0 && turned > 0.0 { moved / (2.0 * turned) } else { f64::INFINITY };
        // θ is infinite after the first step: no bound from growth yet.
        let growth_bound = if input.t == 2 { f64::INFINITY } else { (1.0 + memory[1]).sqrt() * previous };
        let lambda = match (input.t, growth_bound.min(curvature_bound)) {
            (1, _) => config.lambda0,
            (_, bound) if bound.is_finite() => bound,
            _ => previous,
        };
        memory[0] = lambda;
        memory[1] = if input.t == 1 { 0.0 } else { lambda / previous };
        Ok(AdaGdScalars { lambda })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AdaGdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        (state[0], state[1]) = (x, g);
        x - s.lambda * g
    }

    fn report(s: &AdaGdScalars, _: &[f64]) -> Vec<(&'static str, f64)> {
        vec![("step_size", s.lambda)]
    }
}
