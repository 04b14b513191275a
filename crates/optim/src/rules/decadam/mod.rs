//! DecAdam: DecGD's loss-based vector with Adam's second moment. An experiment of this repository.
//!
//! The authors of [DecGD](super::decgd) leave open how it combines with Adam. This is one answer: DecGD's momentum m and its vector
//! v are kept as they are, and the step divides by the root of the second moment u of the *surrogate* gradient q = ∇√(f + c), as
//! Adam would when it minimises √(f + c):
//!
//! ```text
//! q_t     = ∇f(x_t) / (2 √(f(x_t) + c))
//! m_t     = β₁ m_{t-1} + q_t
//! v_t     = v_{t-1} + m_t (x_t - x_{t-1})             v_0 = √(f(x_1) + c), v_1 = v_0
//! v*_t    = min(v*_{t-1}, v_t) with AMS, else v_t
//! u_t     = β₂ u_{t-1} + (1 - β₂) q_t²
//! x_{t+1} = x_t - η (v*_t/v_0) (1 - β₁)/(1 - β₁ᵗ) m_t / (√u_t/√(1 - β₂ᵗ) + ε)
//! ```
//!
//! # Why so
//! - u is of q and not of ∇f, because v already stands for the factor 2√(f + c) that ∇f has more. With v/v_0 = 1 what is left
//!   is Adam, with nothing counted twice.
//! - v is divided by its start. Adam's step has no unit of the loss in it, v has; v/v_0 has none and starts at 1, so that η means what it
//!   means in Adam.
//!
//! # Scaling of the loss
//! - (f, c) → (af, ac) with a > 0: q, m, v, v_0 and √u are multiplied by √a, and the step stays as it is but for ε. DecGD's step is
//!   multiplied by a, so that its rate must be divided by it.
//! - f → af with c as it was: √(af + c) is no multiple of √(f + c), and the steps differ. What is invariant is the pair. With c = 0, and
//!   f > 0, f alone is.
//! - f → f + b: the same as c → c + b.
//! - x → Dx with a diagonal D: as for Adam, steps are those of the new coordinates; not invariant.
//!
//! # Limits
//! - `freeze_v: true`: Adam with gradients ∇√(f + c), rate η and the same β₁, β₂ and ε (but for rounding: m is a sum here and a
//!   mean there). Where v hardly moves, this is what it amounts to.
//! - `second_moment: false`: DecGD with `x0: first_iterate` and the same rate, to the bit: x ← x - 2 η v* m.
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{DecAdam, DecAdamConfig};
//!
//! let x = Var::new(&[4f64], &Device::Cpu)?;
//! let mut optimizer = DecAdam::new(vec![x.clone()], DecAdamConfig { lr: 0.1, ..Default::default() })?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // A first step of almost exactly the learning rate, as Adam's.
//! assert!((x.to_vec1::<f64>()?[0] - 3.9).abs() < 1e-8);
//! # Ok(()) }
//! ```
//!
//! # How it is computed
//! As in DecGD no previous iterate is kept: x_t - x_{t-1} follows from the step that made x_t, whose denominator follows from u_{t-1}.
//! Where something else moves parameters between steps (a [projection](crate::Domain)), v would follow the steps as they were taken:
//! `previous: stored` keeps x_{t-1} in a buffer. It takes the one of AMS, and the two together are refused.
//! v_0 is a number kept for each parameter; on a GPU the host waits for the loss of the first step to know it, and for none after.
//! Weight decay enters as in DecGD (`decay`). Nothing keeps v positive unless `v_floor` does.
//!
//! Reference: the open question of arXiv:2107.08377; there is no paper of this rule.
use crate::rule::{
    Config, Info, Input, Invalid, MAX_BUFFERS, Observed, Real, Refusal, Rule, bias_correction, ranges,
    require, root_of_loss,
};
use crate::rules::decgd::{Decay, Previous, check_decay};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of DecAdam.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DecAdamConfig {
    /// Learning rate η. Defaults to 1e-3.
    pub lr: f64,
    /// Constant c added to the loss; f + c must stay positive. Defaults to 1.
    pub c: f64,
    /// Decay of the first moment. Defaults to 0.9.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.999.
    pub beta2: f64,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Divide by the root of the second moment. Defaults to true; false is DecGD.
    pub second_moment: bool,
    /// Keep v from increasing. Defaults to false.
    pub ams: bool,
    /// Weight decay λ, used as `decay` says. Defaults to 0.
    pub weight_decay: f64,
    /// How weight decay enters. Defaults to none.
    pub decay: Decay,
    /// A lower bound for v. Defaults to none.
    pub v_floor: Option<f64>,
    /// Keep v at v_0: Adam on √(f + c), the control experiment. Defaults to false.
    pub freeze_v: bool,
    /// Keep the previous iterate in a buffer, for parameters that something else moves between steps; without `ams`. Defaults to
    /// none: it follows from the state.
    pub previous: Option<Previous>,
}

impl Default for DecAdamConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            c: 1.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            second_moment: true,
            ams: false,
            weight_decay: 0.0,
            decay: Decay::None,
            v_floor: None,
            freeze_v: false,
            previous: None,
        }
    }
}

impl Config for DecAdamConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::moments(self.lr, [self.beta1, self.beta2], self.eps, self.weight_decay)?;
        require(self.c.is_finite(), "c", "a finite number", self.c)?;
        let floor = self.v_floor.unwrap_or(0.0);
        require(floor.is_finite(), "v_floor", "a finite number", floor)?;
        if self.ams && self.previous.is_some() {
            let message =
                "expected none with `ams: true`: both take the fourth buffer, and there are four".to_owned();
            return Err(Invalid { key: "previous", message });
        }
        check_decay(self.lr, self.weight_decay, self.decay)
    }
}

crate::scalars! {
    /// The scalars of one step.
    pub struct DecAdamScalars {
        /// √(f + c)
        root,
        /// 1 / (2 √(f + c))
        half_inverse_root,
        momentum,
        beta2,
        one_minus_beta2,
        /// 1 if steps are divided by the root of the second moment, else 0
        divides,
        /// 1 / √(1 - β₂ᵗ)
        root_correction,
        /// The same of the step before
        last_correction,
        eps,
        /// x_{t+1} = x_t - step · v* m / denominator - decoupled · x_t
        step,
        /// x_t - x_{t-1} = moved · v*_{t-1} m_{t-1} / denominator_{t-1} + shrunk · x_t
        moved,
        shrunk,
        l2,
        coupled_q,
        /// η times the decoupled λ
        decoupled,
        v_floor,
        /// 1 if the fourth buffer is x_{t-1}, 0 if it is the least v
        keeps_x,
        /// 1 if v takes part of x_t - x_{t-1} with x_{t-1} from its buffer, else 0
        stored,
    }
}

/// The arithmetic of DecAdam.
#[derive(Debug)]
pub struct DecAdamRule;

const DECADAM: Info = Info {
    name: "decadam",
    about: "DecGD's vector that follows √(f + c) times Adam's step on √(f + c) (an experiment)",
    paper: "none; an open question of Shao & Lin, arXiv:2107.08377",
    year: 2021,
    formula: "q = ∇f/(2√(f+c)); m ← β₁m + q; v ← v + m(x - x_prev); u ← β₂u + (1-β₂)q²; x ← x - η (v/v₀) m̂/(√û + ε)",
};

fn observed(_: &DecAdamScalars, state: &[f64]) -> f64 {
    state[1]
}

impl Rule for DecAdamRule {
    type Config = DecAdamConfig;
    type Scalars = DecAdamScalars;
    const BUFFERS: (usize, usize) = (3, 4);
    const UPDATE: Option<&'static str> = Some(include_str!("update.h"));
    const LOSS: Option<fn(&Self::Config) -> f64> = Some(|config| config.c);
    const KNOWS_FIRST_LOSS: bool = true;
    const MEMORY: &'static [&'static str] = &["prev_lr", "prev_step", "first_root"];
    const FOLLOWS: Option<&'static str> = Some("v");
    const OBSERVE: Option<Observed<DecAdamScalars>> = Some(Observed { name: "v", of: observed });

    crate::rule::one_name!(DECADAM);

    fn buffers(config: &DecAdamConfig) -> &'static [&'static str] {
        match (config.previous, config.ams) {
            (Some(Previous::Stored), _) => &["m", "v", "u", "x_previous"],
            (None, true) => &["m", "v", "u", "v_min"],
            (None, false) => &["m", "v", "u"],
        }
    }

    fn start(config: &DecAdamConfig, input: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        let v0 = root_of_loss(input.loss, config.c)?;
        Ok([0.0, v0, 0.0, v0])
    }

    fn prepare(config: &DecAdamConfig, input: &Input, memory: &mut [f64]) -> Result<DecAdamScalars, Refusal> {
        let root = root_of_loss(input.loss, config.c)?;
        let decoupled = config.decay.lambda(config.weight_decay, &[Decay::Paper, Decay::Decoupled]);
        if input.t == 1 {
            memory[2] = root;
        }
        let step = match config.second_moment {
            true => {
                let mean = (1.0 - input.momentum) / bias_correction(input.momentum, input.t);
                input.lr * mean / memory[2]
            }
            false => 2.0 * input.lr,
        };
        let prev_lr = std::mem::replace(&mut memory[0], input.lr);
        let prev_step = std::mem::replace(&mut memory[1], step);
        // Without a rest of x_{t-1} in x_t, or with its sign turned, x_t - x_{t-1} cannot be had from x_t.
        if let Some(lr) = [input.lr, prev_lr].into_iter().find(|lr| lr * decoupled >= 1.0) {
            return Err(Refusal::Decay { lr, weight_decay: decoupled });
        }
        let still = config.freeze_v || input.t == 1;
        let (moved, shrunk) = match still {
            true => (0.0, 0.0),
            false => {
                let rest = 1.0 - prev_lr * decoupled;
                (-prev_step / rest, -(prev_lr / rest) * decoupled)
            }
        };
        let correction = |t: u64| 1.0 / bias_correction(config.beta2, t).sqrt();
        Ok(DecAdamScalars {
            root,
            half_inverse_root: 0.5 / root,
            momentum: input.momentum,
            beta2: config.beta2,
            one_minus_beta2: 1.0 - config.beta2,
            divides: if config.second_moment { 1.0 } else { 0.0 },
            root_correction: correction(input.t),
            // Before the first step u is 0, and nothing has moved.
            last_correction: correction(input.t.saturating_sub(1).max(1)),
            eps: config.eps,
            step,
            moved,
            shrunk,
            l2: config.decay.lambda(config.weight_decay, &[Decay::L2]),
            coupled_q: config.decay.lambda(config.weight_decay, &[Decay::Paper, Decay::CoupledQ]),
            decoupled: input.lr * decoupled,
            v_floor: config.v_floor.unwrap_or(f64::NEG_INFINITY),
            keeps_x: if config.previous.is_some() { 1.0 } else { 0.0 },
            stored: if still { 0.0 } else { 1.0 },
        })
    }

    #[inline(always)]
    fn update<F: Real>(s: &DecAdamScalars<F>, x: F, g: F, state: &mut [F]) -> F {
        let (zero, one) = (F::from_f64(0.0), F::from_f64(1.0));
        let keeps_x = state.len() == 4 && s.keeps_x > zero;
        let ams = state.len() == 4 && !keeps_x;
        let divides = s.divides > zero;
        let (m, v, u) = (state[0], state[1], state[2]);
        let scale = if ams { state[3] } else { v };
        // Nothing has moved where nothing was divided by: 0/0 without an ε.
        let last = if divides { u.sqrt() * s.last_correction + s.eps } else { one };
        let before = if last > zero { scale * m / last } else { zero };
        let d = if keeps_x { s.stored * (x - state[3]) } else { s.moved * before + s.shrunk * x };
        let q = (g + s.l2 * x) * s.half_inverse_root + s.coupled_q * x;
        let m = s.momentum * m + q;
        let v = (v + m * d).at_least(s.v_floor);
        let scale = if ams { scale.at_most(v) } else { v };
        let u = if divides { s.beta2 * u + s.one_minus_beta2 * (q * q) } else { u };
        (state[0], state[1], state[2]) = (m, v, u);
        if state.len() == 4 {
            state[3] = if ams { scale } else { x };
        }
        let now = if divides { u.sqrt() * s.root_correction + s.eps } else { one };
        let moves = if now > zero { scale * m / now } else { zero };
        x - (s.step * moves + s.decoupled * x)
    }

    fn report(s: &DecAdamScalars, _: &[f64]) -> Vec<(&'static str, f64)> {
        vec![("sqrt_f_plus_c", s.root)]
    }
}
