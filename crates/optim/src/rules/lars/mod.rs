//! LARS (You, Gitman & Ginsburg, 2017): SGD with momentum whose rate follows each layer's norm.
//!
//! ```text
//! λ ≠ 0 or always_adapt:
//!     r = τ |x| / (|g| + λ |x| + ε)                   1 where |x| or |g| is 0; trust_clip: min(r/η, 1)
//!     g ← r (g + λ x)
//! b_t = μ b_{t-1} + (1 - dampening) g                 b_1 = g
//! x_{t+1} = x_t - η b_t                               nesterov: η (g + μ b_t)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Lars, LarsConfig};
//!
//! let x = Var::new(&[3f64, 4.0], &Device::Cpu)?;
//! let config = LarsConfig { trust_coeff: 0.1, always_adapt: true, eps: 0.0, ..Default::default() };
//! let mut optimizer = Lars::new(vec![x.clone()], config)?;
//! optimizer.backward_step(&x.sum_all()?)?;
//! // A tenth of |x| = 5 along the gradient.
//! assert!((x.to_vec1::<f64>()?[0] - (3.0 - 0.5 / 2f64.sqrt())).abs() < 1e-15);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As timm: a layer without decay (λ = 0) takes plain SGD steps unless `always_adapt`, and so does every layer by default.
//! - The rate multiplies the buffer, as in PyTorch's SGD; the paper folds it into the buffer.
//! - |x| = 0 leaves the full rate: a bias that starts at 0 moves far with the rates that suit the others. Give such parameters a
//!   group with a rate of their own.
//!
//! Reference: *Large Batch Training of Convolutional Networks*, arXiv:1708.03888.
use crate::rule::{Config, Info, Input, Invalid, Real, Reduce, Refusal, Rule, ranges, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of LARS.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LarsConfig {
    /// Learning rate η. Defaults to 1.
    pub lr: f64,
    /// Momentum μ. Defaults to 0.
    pub momentum: f64,
    /// What of a gradient does not enter the buffer. Defaults to 0.
    pub dampening: f64,
    /// Weight decay λ. Defaults to 0.
    pub weight_decay: f64,
    /// Nesterov's momentum. Defaults to false.
    pub nesterov: bool,
    /// Trust coefficient τ. Defaults to 1e-3.
    pub trust_coeff: f64,
    /// Added to the denominator of the ratio. Defaults to 1e-8.
    pub eps: f64,
    /// Limit the ratio, so that no layer moves faster than with SGD at the rate η. Defaults to false.
    pub trust_clip: bool,
    /// Adapt layers without decay too. Defaults to false.
    pub always_adapt: bool,
}

impl Default for LarsConfig {
    fn default() -> Self {
        Self {
            lr: 1.0,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            trust_coeff: 1e-3,
            eps: 1e-8,
            trust_clip: false,
            always_adapt: false,
        }
    }
}

impl Config for LarsConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.momentum
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("momentum", self.momentum)?;
        ranges::fraction("dampening", self.dampening)?;
        ranges::weight_decay(self.weight_decay)?;
        ranges::at_least_zero("trust_coeff", self.trust_coeff)?;
        ranges::at_least_zero("eps", self.eps)?;
        if self.nesterov {
            require(self.momentum > 0.0, "momentum", "a momentum above 0 with nesterov", self.momentum)?;
            require(self.dampening == 0.0, "dampening", "no dampening with nesterov", self.dampening)?;
        }
        Ok(())
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct LarsScalars {
        lr,
        momentum,
        /// What the gradient is multiplied by on its way into the buffer.
        undamped,
        weight_decay,
        /// r, or 1
        ratio,
        /// The step is gradient_share · g + buffer_share · b.
        gradient_share,
        buffer_share,
    }
}

/// The arithmetic of LARS.
#[derive(Debug)]
pub struct LarsRule;

const LARS: Info = Info {
    name: "lars",
    about: "SGD with momentum at a rate that follows each layer's norm",
    paper: "You, Gitman & Ginsburg, Large Batch Training of Convolutional Networks, arXiv:1708.03888",
    year: 2017,
    formula: "r = τ|x|/(|g| + λ|x| + ε); b ← μb + r(g + λx); x ← x - ηb",
};

impl Rule for LarsRule {
    type Config = LarsConfig;
    type Scalars = LarsScalars;
    const BUFFERS: (usize, usize) = (0, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const REDUCE: Option<Reduce> = Some(Reduce::Each(|x, g, _| [x * x, g * g]));

    crate::rule::one_name!(LARS);

    fn buffers(config: &LarsConfig) -> &'static [&'static str] {
        if config.momentum > 0.0 { &["momentum"] } else { &[] }
    }

    fn prepare(config: &LarsConfig, input: &Input, _: &mut [f64]) -> Result<LarsScalars, Refusal> {
        let (momentum, decay) = (input.momentum, config.weight_decay);
        let [x, g] = input.sums.map(f64::sqrt);
        let adapts = decay != 0.0 || config.always_adapt;
        let mut ratio = 1.0;
        if adapts && x > 0.0 && g > 0.0 {
            ratio = config.trust_coeff * x / (g + decay * x + config.eps);
        }
        if adapts && config.trust_clip {
            // At a rate of 0 nothing moves, whatever the ratio.
            ratio = (ratio / input.lr).min(1.0);
        }
        Ok(LarsScalars {
            lr: input.lr,
            momentum,
            undamped: if input.t == 1 { 1.0 } else { 1.0 - config.dampening },
            weight_decay: decay,
            ratio,
            gradient_share: if config.nesterov { 1.0 } else { 0.0 },
            buffer_share: if config.nesterov { momentum } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &LarsScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let g = s.ratio * (g + s.weight_decay * x);
        match state {
            [buffer] => {
                *buffer = s.momentum * *buffer + s.undamped * g;
                x - s.lr * (s.gradient_share * g + s.buffer_share * *buffer)
            }
            _ => x - s.lr * g,
        }
    }

    fn report(s: &LarsScalars, _: &[f64]) -> Vec<(&'static str, f64)> {
        vec![("trust_ratio", s.ratio)]
    }
}
