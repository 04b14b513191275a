//! AEGD, adaptive gradient descent with energy (Liu & Tian, 2020), and AEGDW with decoupled weight decay.
//!
//! ```text
//! q_t = ∇f(x_t) / (2 √(f(x_t) + c)) + λ x_t           AEGDW: x ← x (1 - ηλ) instead
//! r_t = r_{t-1} / (1 + 2 η q_t²)                       r_0 = √(f(x_1) + c)
//! x_{t+1} = x_t - 2 η r_t q_t
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Aegd, AegdConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = Aegd::new(vec![x.clone()], AegdConfig::default())?;
//! for _ in 0..100 {
//!     optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! }
//! assert!(x.to_vec1::<f64>()?[0].abs() < 1e-3);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! As the authors' code: in AEGD the decay is added to q, not to the gradient; in AEGDW it shrinks x before the step,
//! and r is computed from q without decay.
//!
//! Reference: *AEGD: Adaptive Gradient Descent with Energy*, arXiv:2010.05109.
use crate::rule::{
    Config, Info, Input, Invalid, MAX_BUFFERS, Observed, Real, Refusal, Rule, ranges, require, root_of_loss,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of AEGD and AEGDW.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AegdConfig {
    /// Learning rate η. Defaults to 0.1.
    pub lr: f64,
    /// Constant c added to the loss; f + c must stay positive. Defaults to 1.
    pub c: f64,
    /// Weight decay λ. Defaults to 0 (`aegdw`: 1e-4).
    pub weight_decay: f64,
    /// Shrink the parameter instead of adding λx to q. Defaults to false (`aegdw`: true).
    pub decoupled: bool,
}

impl Default for AegdConfig {
    fn default() -> Self {
        Self { lr: 0.1, c: 1.0, weight_decay: 0.0, decoupled: false }
    }
}

impl AegdConfig {
    /// AEGDW.
    pub fn aegdw() -> Self {
        Self { decoupled: true, weight_decay: 1e-4, ..Self::default() }
    }
}

impl Config for AegdConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        require(self.c.is_finite(), "c", "a finite number", self.c)?;
        ranges::weight_decay(self.weight_decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct AegdScalars {
        /// √(f + c)
        root,
        /// 1 / (2 √(f + c))
        half_inverse_root,
        /// 2η
        twice_lr,
        coupled_q,
        /// What decoupled decay leaves of the parameter
        keep,
    }
}

/// The arithmetic of AEGD.
#[derive(Debug)]
pub struct AegdRule;

const AEGD: Info = Info {
    name: "aegd",
    about: "gradient descent whose steps are scaled by an energy that only decreases",
    paper: "Liu & Tian, AEGD: Adaptive Gradient Descent with Energy, arXiv:2010.05109",
    year: 2020,
    formula: "q = ∇f/(2√(f+c)) + λx; r ← r/(1 + 2ηq²); x ← x - 2ηrq",
};
const AEGDW: Info = Info {
    name: "aegdw",
    about: "AEGD with decoupled weight decay",
    formula: "x ← x(1 - ηλ); q = ∇f/(2√(f+c)); r ← r/(1 + 2ηq²); x ← x - 2ηrq",
    ..AEGD
};

fn observed(_: &AegdScalars, state: &[f64]) -> f64 {
    state[0]
}

impl Rule for AegdRule {
    type Config = AegdConfig;
    type Scalars = AegdScalars;
    const BUFFERS: (usize, usize) = (1, 1);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const LOSS: Option<fn(&Self::Config) -> f64> = Some(|config| config.c);
    const FOLLOWS: Option<&'static str> = Some("r");
    const OBSERVE: Option<Observed<AegdScalars>> = Some(Observed { name: "energy", of: observed });

    fn names() -> Vec<(&'static Info, AegdConfig)> {
        vec![(&AEGD, AegdConfig::default()), (&AEGDW, AegdConfig::aegdw())]
    }

    fn info(config: &AegdConfig) -> &'static Info {
        if config.decoupled { &AEGDW } else { &AEGD }
    }

    fn buffers(_: &AegdConfig) -> &'static [&'static str] {
        &["r"]
    }

    fn start(config: &AegdConfig, input: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        Ok([root_of_loss(input.loss, config.c)?, 0.0, 0.0, 0.0])
    }

    fn prepare(config: &AegdConfig, input: &Input, _: &mut [f64]) -> Result<AegdScalars, Refusal> {
        let root = root_of_loss(input.loss, config.c)?;
        Ok(AegdScalars {
            root,
            half_inverse_root: 0.5 / root,
            twice_lr: 2.0 * input.lr,
            coupled_q: if config.decoupled { 0.0 } else { config.weight_decay },
            keep: if config.decoupled { 1.0 - input.lr * config.weight_decay } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &AegdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let q = g * s.half_inverse_root + s.coupled_q * x;
        let r = state[0] / (F::from_f64(1.0) + s.twice_lr * (q * q));
        state[0] = r;
        x * s.keep - s.twice_lr * (r * q)
    }

    fn report(s: &AegdScalars, _: &[f64]) -> Vec<(&'static str, f64)> {
        vec![("sqrt_f_plus_c", s.root)]
    }
}
