//! DecGD: gradient descent by gradient decomposition (Shao & Lin, 2021).
//!
//! With g(x) = √(f(x) + c) the gradient splits into ∇f = 2·g·∇g. DecGD runs momentum on the second factor and
//! replaces the first by a vector v that starts at g and follows its linear expansion along the path, coordinate by
//! coordinate:
//!
//! ```text
//! q_t     = ∇f(x_t) / (2 √(f(x_t) + c))
//! m_t     = γ m_{t-1} + q_t
//! v_t     = v_{t-1} + m_t (x_t - x_{t-1})            v_0 = √(f(x_1) + c)
//! v*_t    = min(v*_{t-1}, v_t) with AMS, else v_t
//! x_{t+1} = x_t - 2 η v*_t m_t
//! ```
//!
//! `decgdw` is the paper's Algorithm 2: λx is added to q and ηλx subtracted from x (`decay: paper`).
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{DecGd, DecGdConfig};
//!
//! let x = Var::new(&[1f64, -0.5], &Device::Cpu)?;
//! let scale = candle_core::Tensor::new(&[0.5f64, 5.0], &Device::Cpu)?;
//! let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig { lr: 0.1, ..Default::default() })?;
//! for _ in 0..20 {
//!     let loss = (x.sqr()? * &scale)?.sum_all()?; // (x² + 10 y²) / 2
//!     optimizer.backward_step(&loss)?;
//! }
//! let loss = (x.sqr()? * &scale)?.sum_all()?.to_scalar::<f64>()?;
//! assert!(loss < 0.1);
//! # Ok(()) }
//! ```
//!
//! # Where this differs from the paper, and why
//! - No copy of the previous iterate is kept. x_t - x_{t-1} follows from the update that made x_t:
//!   -(e / (1 - eλ)) (2 v*_{t-1} m_{t-1} + λ x_t), with e the *previous* learning rate and λ the decoupled decay.
//!   State is m, v (and v* with AMS) plus e for each parameter: the footprint of Adam. In low precision this is also
//!   the more accurate form.
//! - The paper starts at x_0 = 0, which makes the first v depend on where the origin lies (`x0: zero`, the
//!   default, is that). `x0: first_iterate` takes x_0 = x_1, so that v_1 = v_0.
//! - The start of v* is not stated: v_0 here (`ams_init: v0`), or +∞ (`inf`).
//! - "Decoupled" decay in Algorithm 2 decays twice. `decay` offers each reading by itself.
//! - Nothing in the paper keeps v positive: a coordinate with v < 0 ascends. `v_floor` bounds it; the probe counts
//!   such coordinates.
//!
//! Reference: Zhou Shao, Tong Lin. *A New Adaptive Gradient Method with Gradient Decomposition.* arXiv:2107.08377.
use crate::rule::{
    Config, Info, Input, Invalid, MAX_BUFFERS, Observed, Real, Refusal, Rule, ranges, require, root_of_loss,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How weight decay enters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// No decay.
    #[default]
    None,
    /// As Algorithm 2 is printed: `coupled_q` and `decoupled` together.
    Paper,
    /// λx is added to the scaled gradient q.
    CoupledQ,
    /// ηλx is subtracted from x.
    Decoupled,
    /// λx is added to ∇f before it is scaled, as in SGD with weight decay.
    L2,
}

/// What x_0 is, which decides the first step of v.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum X0 {
    /// x_0 = 0, as printed.
    #[default]
    Zero,
    /// x_0 = x_1: v_1 = v_0.
    FirstIterate,
}

/// Where the running minimum v* starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AmsInit {
    /// At v_0.
    #[default]
    V0,
    /// At +∞: the first v.
    Inf,
}

/// Hyperparameters of DecGD.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DecGdConfig {
    /// Learning rate η. Defaults to 0.01.
    pub lr: f64,
    /// Constant c added to the loss; f + c must stay positive. Defaults to 1.
    pub c: f64,
    /// Momentum γ. Defaults to 0.9.
    pub momentum: f64,
    /// Keep v from increasing. Defaults to false.
    pub ams: bool,
    /// Weight decay λ, used as `decay` says. Defaults to 0 (`decgdw`: 1e-4).
    pub weight_decay: f64,
    /// How weight decay enters. Defaults to none (`decgdw`: paper).
    pub decay: Decay,
    /// What x_0 is. Defaults to zero.
    pub x0: X0,
    /// Where v* starts. Defaults to v0.
    pub ams_init: AmsInit,
    /// A lower bound for v. Defaults to none.
    pub v_floor: Option<f64>,
    /// Keep v at v_0: momentum on ∇√(f + c) with a scalar step, the control experiment. Defaults to false.
    pub freeze_v: bool,
}

impl Default for DecGdConfig {
    fn default() -> Self {
        Self {
            lr: 0.01,
            c: 1.0,
            momentum: 0.9,
            ams: false,
            weight_decay: 0.0,
            decay: Decay::None,
            x0: X0::Zero,
            ams_init: AmsInit::V0,
            v_floor: None,
            freeze_v: false,
        }
    }
}

impl DecGdConfig {
    /// Algorithm 2 with its default λ.
    pub fn decgdw() -> Self {
        Self { decay: Decay::Paper, weight_decay: 1e-4, ..Self::default() }
    }

    /// λ where `wanted` decays, else 0.
    fn lambda(&self, wanted: &[Decay]) -> f64 {
        if wanted.contains(&self.decay) { self.weight_decay } else { 0.0 }
    }
}

impl Config for DecGdConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.momentum
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("momentum", self.momentum)?;
        ranges::weight_decay(self.weight_decay)?;
        require(self.c.is_finite(), "c", "a finite number", self.c)?;
        let floor = self.v_floor.unwrap_or(0.0);
        require(floor.is_finite(), "v_floor", "a finite number", floor)?;
        if self.weight_decay != 0.0 && self.decay == Decay::None {
            let message =
                "has no effect with `decay: none`; set `decay` to paper, coupled_q, decoupled or l2"
                    .to_owned();
            return Err(Invalid { key: "weight_decay", message });
        }
        let shrink = self.lr * self.lambda(&[Decay::Paper, Decay::Decoupled]);
        require(shrink < 1.0, "weight_decay", "lr · weight_decay below 1", shrink)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct DecGdScalars {
        /// √(f + c)
        root,
        /// 1 / (2 √(f + c))
        half_inverse_root,
        momentum,
        /// 2η
        twice_lr,
        /// x_t - x_{t-1} = moved · v*_{t-1} m_{t-1} + shrunk · x_t
        moved,
        shrunk,
        l2,
        coupled_q,
        /// η times the decoupled λ
        decoupled,
        v_floor,
    }
}

/// The arithmetic of DecGD.
#[derive(Debug)]
pub struct DecGdRule;

const DECGD: Info = Info {
    name: "decgd",
    about: "momentum on the gradient of √(f + c), steps scaled by a vector that follows √(f + c)",
    paper: "Shao & Lin, A New Adaptive Gradient Method with Gradient Decomposition, arXiv:2107.08377",
    year: 2021,
    formula: "q = ∇f/(2√(f+c)); m ← γm + q; v ← v + m(x - x_prev); x ← x - 2ηvm",
};
const DECGDW: Info = Info {
    name: "decgdw",
    about: "DecGD with the paper's decoupled weight decay (Algorithm 2)",
    formula: "q = ∇f/(2√(f+c)) + λx; m ← γm + q; v ← v + m(x - x_prev); x ← x - η(2vm + λx)",
    ..DECGD
};

fn observed(_: &DecGdScalars, state: &[f64]) -> f64 {
    state[1]
}

impl Rule for DecGdRule {
    type Config = DecGdConfig;
    type Scalars = DecGdScalars;
    const BUFFERS: (usize, usize) = (2, 3);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const LOSS: Option<fn(&Self::Config) -> f64> = Some(|config| config.c);
    const MEMORY: &'static [&'static str] = &["prev_lr"];
    const FOLLOWS: Option<&'static str> = Some("v");
    const OBSERVE: Option<Observed<DecGdScalars>> = Some(Observed { name: "v", of: observed });

    fn names() -> Vec<(&'static Info, DecGdConfig)> {
        vec![(&DECGD, DecGdConfig::default()), (&DECGDW, DecGdConfig::decgdw())]
    }

    fn info(config: &DecGdConfig) -> &'static Info {
        if config.decay == Decay::Paper { &DECGDW } else { &DECGD }
    }

    fn buffers(config: &DecGdConfig) -> &'static [&'static str] {
        if config.ams { &["m", "v", "v_min"] } else { &["m", "v"] }
    }

    fn start(config: &DecGdConfig, input: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        let v0 = root_of_loss(input.loss, config.c)?;
        // As good as +∞, and finite in f32 too: the first step multiplies it by m_0 = 0.
        let v_min = if config.ams_init == AmsInit::V0 { v0 } else { f64::from(f32::MAX) };
        Ok([0.0, v0, v_min, 0.0])
    }

    fn prepare(config: &DecGdConfig, input: &Input, memory: &mut [f64]) -> Result<DecGdScalars, Refusal> {
        let root = root_of_loss(input.loss, config.c)?;
        let decoupled = config.lambda(&[Decay::Paper, Decay::Decoupled]);
        let prev_lr = std::mem::replace(&mut memory[0], input.lr);
        // Without a rest of x_{t-1} in x_t, or with its sign turned, x_t - x_{t-1} cannot be had from x_t.
        if let Some(lr) = [input.lr, prev_lr].into_iter().find(|lr| lr * decoupled >= 1.0) {
            return Err(Refusal::Decay { lr, weight_decay: decoupled });
        }
        let (moved, shrunk) = match (config.freeze_v, input.t, config.x0) {
            (true, ..) | (_, 1, X0::FirstIterate) => (0.0, 0.0),
            (_, 1, X0::Zero) => (0.0, 1.0),
            _ => {
                let e = prev_lr / (1.0 - prev_lr * decoupled);
                (-2.0 * e, -e * decoupled)
            }
        };
        Ok(DecGdScalars {
            root,
            half_inverse_root: 0.5 / root,
            momentum: input.momentum,
            twice_lr: 2.0 * input.lr,
            moved,
            shrunk,
            l2: config.lambda(&[Decay::L2]),
            coupled_q: config.lambda(&[Decay::Paper, Decay::CoupledQ]),
            decoupled: input.lr * decoupled,
            v_floor: config.v_floor.unwrap_or(f64::NEG_INFINITY),
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &DecGdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let ams = state.len() == 3;
        let (m, v) = (state[0], state[1]);
        let scale = if ams { state[2] } else { v };
        let d = s.moved * (scale * m) + s.shrunk * x;
        let q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
        let m = s.momentum * m + q;
        let v = (v + m * d).at_least(s.v_floor);
        let scale = if ams { scale.at_most(v) } else { v };
        (state[0], state[1]) = (m, v);
        if ams {
            state[2] = scale;
        }
        x - (s.twice_lr * (scale * m) + s.decoupled * x)
    }

    fn report(s: &DecGdScalars, means: &[f64]) -> Vec<(&'static str, f64)> {
        // The rate of plain momentum descent that the step amounts to on average: 2 η v* · ∇f/(2 √(f + c)).
        let scale = means.last().copied().unwrap_or(0.0);
        vec![("sqrt_f_plus_c", s.root), ("effective_lr", 0.5 * s.twice_lr * scale / s.root)]
    }
}
