//! Prodigy (Mishchenko & Defazio, 2023): Adam that estimates its own step size from the distance to its start.
//!
//! ```text
//! k   = d η                                           use_bias_correction: · √(1 - β₂ᵗ)/(1 - β₁ᵗ)
//! n   ← β₃ n + (d/d₀) k ⟨g, x_0 - x_t⟩                over all parameters together
//! m_t = β₁ m_{t-1} + (1 - β₁) d g
//! v_t = β₂ v_{t-1} + (1 - β₂) d² g²
//! s_t = β₃ s_{t-1} + (d/d₀) k g                       safeguard_warmup: (d/d₀) d g
//! d̂   = d_coef n / Σ|s|;  d' = min(max of all d̂, d growth_rate), never below d
//! x_{t+1} = x_t (1 - λk) - k m_t / (√v_t + d' ε)      without decouple: g = ∇f(x_t) + λ x_t
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Prodigy, ProdigyConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Prodigy::new(vec![x.clone()], ProdigyConfig::default())?; // no rate to choose
//! for _ in 0..150 {
//!     optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! }
//! assert!(x.to_vec1::<f64>()?[0].abs() < 1.0);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the package `prodigyopt`; without its slices (`slice_p`) and its factorisation.
//! - d is one for all parameters: `d0`, `d_coef`, `growth_rate` and `beta3` cannot differ between groups, and a step of any
//!   parameter counts for all. `lr` is a factor of d, and its schedule one of d's.
//! - The first estimate may jump beyond `growth_rate`: the limit holds from then on.
//! - While all gradients so far are 0 nothing moves. In f32, d₀ = 1e-6 is near the rounding of x, from which d is estimated;
//!   sums are taken in f64.
//!
//! Reference: *Prodigy: An Expeditiously Adaptive Parameter-Free Learner*, arXiv:2306.06101.
use crate::pairs::{Blend, Descend, Direction, Square, paired};
use crate::rule::{Config, Info, Invalid, bias_correction, ranges, require};
use crate::sums::{dot, magnitudes};
use crate::{Error, Result, TensorRule, TensorStep};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of Prodigy.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProdigyConfig {
    /// A factor η of the estimated step size. Defaults to 1.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Decay of the estimate's sums; null for √β₂. Defaults to null.
    pub beta3: Option<f64>,
    /// Added to the denominator, times d. Defaults to 1e-8.
    pub eps: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Shrink the parameter instead of adding λx to the gradient. Defaults to true.
    pub decouple: bool,
    /// Correct the step size for averages that start at 0. Defaults to false.
    pub use_bias_correction: bool,
    /// Leave the rate out of the estimate's denominator, for schedules that warm up. Defaults to false.
    pub safeguard_warmup: bool,
    /// The first estimate of d. Defaults to 1e-6.
    pub d0: f64,
    /// A factor of the estimate. Defaults to 1.
    pub d_coef: f64,
    /// The most that d grows by in a step; null for no limit. Defaults to null.
    pub growth_rate: Option<f64>,
}

impl Default for ProdigyConfig {
    fn default() -> Self {
        Self {
            lr: 1.0,
            beta1: 0.9,
            beta2: 0.999,
            beta3: None,
            eps: 1e-8,
            weight_decay: 0.0,
            decouple: true,
            use_bias_correction: false,
            safeguard_warmup: false,
            d0: 1e-6,
            d_coef: 1.0,
            growth_rate: None,
        }
    }
}

impl Config for ProdigyConfig {
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
        self.beta3.map_or(Ok(()), |beta3| ranges::fraction("beta3", beta3))?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)?;
        require(self.d0 > 0.0 && self.d0.is_finite(), "d0", "a finite number above 0", self.d0)?;
        ranges::at_least_zero("d_coef", self.d_coef)?;
        let growth = self.growth_rate.unwrap_or(1.0);
        require(
            growth >= 1.0 && growth.is_finite(),
            "growth_rate",
            "a finite number of at least 1, or null",
            growth,
        )
    }
}

/// The arithmetic of Prodigy.
#[derive(Debug)]
pub struct ProdigyRule;

const PRODIGY: Info = Info {
    name: "prodigy",
    about: "Adam that finds its own step size",
    paper: "Mishchenko & Defazio, Prodigy: An Expeditiously Adaptive Parameter-Free Learner, arXiv:2306.06101",
    year: 2023,
    formula: "n ← β₃n + (d/d₀)dη⟨g, x₀-x⟩; s ← β₃s + (d/d₀)dηg; d ← max(d, n/Σ|s|); x ← x - dη m/(√v + dε), m, v of dg",
};

impl TensorRule for ProdigyRule {
    type Config = ProdigyConfig;
    const SHARED: &'static [&'static str] = &["d", "d_max", "numerator", "steps"];

    crate::rule::one_name!(PRODIGY);

    fn buffers(_: &ProdigyConfig) -> &'static [&'static str] {
        &["m", "v", "s", "start"]
    }

    fn step(step: &mut TensorStep<ProdigyConfig>) -> Result<()> {
        let Some(first) = step.params.first().map(|p| p.config) else { return Ok(()) };
        let beta3 = |c: &ProdigyConfig| c.beta3.unwrap_or(c.beta2.sqrt());
        let one = |c: &ProdigyConfig| (c.d0, c.d_coef, c.growth_rate, beta3(c));
        if let Some(p) = step.params.iter().find(|p| one(p.config) != one(first)) {
            let what = format!(
                "d0, d_coef, growth_rate and beta3 are one for all parameters, and `{}` has others",
                p.name
            );
            return Err(Error::Unsupported { optimizer: PRODIGY.name.to_owned(), what });
        }
        let (d0, beta3) = (first.d0, beta3(first));
        let fresh = step.shared.number("steps") == 0.0 && !step.shared.numbers.contains_key("d");
        let (d, d_max) = match fresh {
            true => (d0, d0),
            false => (step.shared.number("d"), step.shared.number("d_max")),
        };
        let t = step.shared.number("steps") as u64 + 1;
        let mut numerator = beta3 * step.shared.number("numerator");
        let (mut denominator, mut fastest) = (0.0, 0f64);
        let mut rates = Vec::with_capacity(step.params.len());
        for p in &mut step.params {
            let (c, beta1) = (p.config, p.momentum);
            let mut k = d * p.lr;
            if c.use_bias_correction {
                k *= bias_correction(c.beta2, t).sqrt() / bias_correction(beta1, t);
            }
            let g = if c.decouple || c.weight_decay == 0.0 {
                p.g.clone()
            } else {
                paired(Blend { keep: 1.0, share: c.weight_decay }, &p.g, &p.x)?
            };
            let start = p.memory.tensors.get("start").unwrap_or(&p.x).clone();
            numerator += d / d0 * k * dot(&g, &(&start - &p.x)?)?;
            let kept = |name: &str| p.memory.tensor(name, &p.x);
            let m = paired(Blend { keep: beta1, share: (1.0 - beta1) * d }, &kept("m")?, &g)?;
            let v = paired(Square { keep: c.beta2, share: (1.0 - c.beta2) * d * d }, &kept("v")?, &g)?;
            let share = d / d0 * if c.safeguard_warmup { d } else { k };
            let s = paired(Blend { keep: beta3, share }, &kept("s")?, &g)?;
            denominator += magnitudes(&s)?;
            p.memory.tensors.extend([("m", m), ("v", v), ("s", s), ("start", start)]);
            fastest = fastest.max(p.lr);
            rates.push(k);
        }
        step.shared.numbers.extend([
            ("d", d),
            ("d_max", d_max),
            ("numerator", numerator),
            ("steps", t as f64),
        ]);
        if denominator == 0.0 {
            step.shared.numbers.insert("steps", (t - 1) as f64);
            return Ok(());
        }
        let mut next = d;
        if fastest > 0.0 {
            let estimate = first.d_coef * numerator / denominator;
            if next == d0 {
                next = next.max(estimate);
            }
            let d_max = d_max.max(estimate);
            next = d_max.min(first.growth_rate.map_or(f64::INFINITY, |rate| next * rate));
            step.shared.numbers.extend([("d", next), ("d_max", d_max)]);
        }
        if !next.is_finite() {
            let (what, expected) = ("prodigy's step size d", "a finite number");
            return Err(Error::Context { what, expected, found: next });
        }
        for (p, k) in step.params.iter_mut().zip(rates) {
            let (c, decay) = (p.config, if p.config.decouple { p.config.weight_decay * k } else { 0.0 });
            let (Some(m), Some(v)) = (p.memory.tensors.get("m"), p.memory.tensors.get("v")) else { continue };
            let u = paired(Direction { first: 1.0, second: 1.0, eps: next * c.eps }, m, v)?;
            let x = paired(Descend { keep: 1.0 - decay, rate: k }, &p.x, &u)?;
            p.set(x);
        }
        Ok(())
    }
}
