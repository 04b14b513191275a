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
//! # Rates that fall with the loss
//! The paper's idea is that v falls with the loss and takes the rate with it. But the sum over all coordinates of what v changes
//! by is about what √(f + c) changes by, so that with many coordinates each v stays near v_0, and the rate on ∇f, which is
//! η v/√(f + c), *rises* as the loss falls. `bound` lets a step see the loss as it is now, s = √(f(x_t) + c), and bounds the factor
//! v* that it uses; v itself follows the path as ever:
//!
//! | `bound` | v* | rate on ∇f, η v*/s | name |
//! | --- | --- | --- | --- |
//! | none | v | η v/s: rises to η √((f₁+c)/(f+c)) | `decgd` |
//! | `now` | min(v, s) | η min(v/s, 1): never above η | `decgd_now` |
//! | `falling` | v where v ≤ s, else s²/v | η min(v/s, s/v): falls to η √((f+c)/(f₁+c)) | `decgd_falling` |
//!
//! The last column but one says what becomes of it where v ≈ v_0. With AMS, v* is the running minimum of what the table says. Both
//! keep v* of the last step beside v (`v_used`), which costs a third buffer. They are experiments of this repository, not the
//! paper's.
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
//!   the more accurate form. Where something else moves parameters between steps (a [projection](crate::Domain)), the two differ:
//!   `previous: stored` keeps x_{t-1}, and v*, in buffers and takes the difference as it is printed.
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

impl Decay {
    /// λ where this is one of `wanted`, else 0.
    pub(crate) fn lambda(self, weight_decay: f64, wanted: &[Self]) -> f64 {
        if wanted.contains(&self) { weight_decay } else { 0.0 }
    }
}

/// Refuses a decay that has no effect, or that leaves nothing of the parameter.
pub(crate) fn check_decay(lr: f64, weight_decay: f64, decay: Decay) -> Result<(), Invalid> {
    if weight_decay != 0.0 && decay == Decay::None {
        let message =
            "has no effect with `decay: none`; set `decay` to paper, coupled_q, decoupled or l2".to_owned();
        return Err(Invalid { key: "weight_decay", message });
    }
    let shrink = lr * decay.lambda(weight_decay, &[Decay::Paper, Decay::Decoupled]);
    require(shrink < 1.0, "weight_decay", "lr · weight_decay below 1", shrink)
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

/// What bounds the factor v* of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// At most √(f + c) of this step: the rate on ∇f is never above η.
    Now,
    /// Where v is above s = √(f + c), s²/v: the rate on ∇f falls with s.
    Falling,
}

/// Where x_{t-1} is had from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Previous {
    /// From a buffer of its own.
    Stored,
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
    /// Bound the factor of a step by the loss as it is now, so that the rate does not rise as the loss falls. Defaults to none
    /// (`decgd_now`: now, `decgd_falling`: falling).
    pub bound: Option<Bound>,
    /// Keep the previous iterate in a buffer, for parameters that something else moves between steps. Defaults to none: it follows
    /// from the state.
    pub previous: Option<Previous>,
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
            bound: None,
            previous: None,
        }
    }
}

impl DecGdConfig {
    /// Algorithm 2 with its default λ.
    pub fn decgdw() -> Self {
        Self { decay: Decay::Paper, weight_decay: 1e-4, ..Self::default() }
    }

    /// With a factor of at most √(f + c) now.
    pub fn decgd_now() -> Self {
        Self { bound: Some(Bound::Now), ..Self::default() }
    }

    /// With a rate that falls with the loss.
    pub fn decgd_falling() -> Self {
        Self { bound: Some(Bound::Falling), ..Self::default() }
    }

    fn lambda(&self, wanted: &[Decay]) -> f64 {
        self.decay.lambda(self.weight_decay, wanted)
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
        check_decay(self.lr, self.weight_decay, self.decay)
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
        /// +∞ without a bound, else 0: what is added to √(f + c) is where v* is bounded
        unbounded,
        /// 1 if v* is s²/v there, 0 if it is s
        falling,
        /// 0 with AMS, else 1: whether v* of the last step has no say in this one
        forgets,
        /// 1 if v takes part of x_t - x_{t-1} with x_{t-1} from its buffer, else 0
        stored,
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

const DECGD_NOW: Info = Info {
    name: "decgd_now",
    about: "DecGD with v* at most √(f + c) now: its rate on ∇f does not rise (an experiment)",
    formula: "q, m, v as DecGD; v* = min(v, √(f+c)); x ← x - 2ηv*m",
    ..DECGD
};
const DECGD_FALLING: Info = Info {
    name: "decgd_falling",
    about: "DecGD whose rate on ∇f falls with √(f + c) (an experiment)",
    formula: "q, m, v as DecGD; s = √(f+c); v* = v if v ≤ s, else s²/v; x ← x - 2ηv*m",
    ..DECGD
};

fn observed(_: &DecGdScalars, state: &[f64]) -> f64 {
    state[1]
}

impl Rule for DecGdRule {
    type Config = DecGdConfig;
    type Scalars = DecGdScalars;
    const BUFFERS: (usize, usize) = (2, 4);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const LOSS: Option<fn(&Self::Config) -> f64> = Some(|config| config.c);
    const MEMORY: &'static [&'static str] = &["prev_lr"];
    const FOLLOWS: Option<&'static str> = Some("v");
    const OBSERVE: Option<Observed<DecGdScalars>> = Some(Observed { name: "v", of: observed });

    fn names() -> Vec<(&'static Info, DecGdConfig)> {
        vec![
            (&DECGD, DecGdConfig::default()),
            (&DECGDW, DecGdConfig::decgdw()),
            (&DECGD_NOW, DecGdConfig::decgd_now()),
            (&DECGD_FALLING, DecGdConfig::decgd_falling()),
        ]
    }

    fn info(config: &DecGdConfig) -> &'static Info {
        match (config.decay, config.bound) {
            (Decay::Paper, _) => &DECGDW,
            (_, None) => &DECGD,
            (_, Some(Bound::Now)) => &DECGD_NOW,
            (_, Some(Bound::Falling)) => &DECGD_FALLING,
        }
    }

    fn buffers(config: &DecGdConfig) -> &'static [&'static str] {
        match (config.previous, config.ams, config.bound) {
            (Some(Previous::Stored), true, _) => &["m", "v", "v_min", "x_previous"],
            (Some(Previous::Stored), false, _) => &["m", "v", "v_used", "x_previous"],
            (None, true, _) => &["m", "v", "v_min"],
            (None, false, Some(_)) => &["m", "v", "v_used"],
            (None, false, None) => &["m", "v"],
        }
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
        let still = config.freeze_v || input.t == 1 && config.x0 == X0::FirstIterate;
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
            unbounded: if config.bound.is_some() { 0.0 } else { f64::INFINITY },
            falling: if config.bound == Some(Bound::Falling) { 1.0 } else { 0.0 },
            forgets: if config.ams { 0.0 } else { 1.0 },
            stored: if still { 0.0 } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &DecGdScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let (keeps_used, keeps_x) = (state.len() >= 3, state.len() == 4);
        let (m, v) = (state[0], state[1]);
        let scale = if keeps_used { state[2] } else { v };
        let d = if keeps_x { s.stored * (x - state[3]) } else { s.moved * (scale * m) + s.shrunk * x };
        let q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
        let m = s.momentum * m + q;
        let v = (v + m * d).at_least(s.v_floor);
        (state[0], state[1]) = (m, v);
        let mut used = v;
        if keeps_used {
            let zero = F::from_f64(0.0);
            if used > s.root + s.unbounded {
                used = if s.falling > zero { s.root * (s.root / used) } else { s.root };
            }
            used = if s.forgets > zero { used } else { scale.at_most(used) };
            state[2] = used;
        }
        if keeps_x {
            state[3] = x;
        }
        x - (s.twice_lr * (used * m) + s.decoupled * x)
    }

    fn report(s: &DecGdScalars, means: &[f64]) -> Vec<(&'static str, f64)> {
        // The rate of plain momentum descent that the step amounts to on average: 2 η v* · ∇f/(2 √(f + c)).
        let scale = means.get(2).or(means.get(1)).copied().unwrap_or(0.0);
        vec![("sqrt_f_plus_c", s.root), ("effective_lr", 0.5 * s.twice_lr * scale / s.root)]
    }
}
