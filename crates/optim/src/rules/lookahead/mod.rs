//! Lookahead (Zhang et al., 2019): weights that follow those of another optimizer every k steps.
//!
//! ```text
//! a step of the inner optimizer on x; every k-th:  slow ← slow + α (x - slow),  x ← slow
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Var};
//! use taper_optim::{Registry, StepContext};
//!
//! let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! let config = serde_json::json!({"k": 5, "alpha": 0.5, "inner": {"name": "adam", "lr": 1e-3}});
//! let params = vec![("x".to_owned(), x.clone())];
//! let mut optimizer = Registry::builtin().build("lookahead", params, config.as_object().unwrap())?;
//! optimizer.step(&x.sqr()?.sum_all()?.backward()?, &StepContext::new())?;
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - The weights for evaluation ([`Optimizer::eval_weights`]) are the slow ones, as the paper has it.
//! - α is 0.5 by default; the authors' code has 0.8, the paper both.
//! - The inner optimizer is any, with its rates, schedules, loss and groups; it keeps its state and its count of steps when
//!   weights are synchronised. `pullback_momentum: reset` sets its buffers called `momentum` to 0 (those of `sgdm`, `nag`, `lars`,
//!   `rmsprop`, …); Adam has none. The `pullback` of the authors' code, whose average is lost after its first use, is not there.
//! - Steps are counted for each parameter, as everywhere: one without a gradient does not count.
//! - Keys of a group are the inner optimizer's.
//! - Slow weights of halves are kept in f32. Master weights would not see a synchronisation and are refused.
//!
//! Reference: *Lookahead Optimizer: k steps forward, 1 step back*, arXiv:1907.08610.
use crate::pairs::{Toward, paired};
use crate::rule::{Config, Info, Invalid, require};
use crate::state::ParamScalars;
use crate::tensor::wide;
use crate::wrapper::{Again, Wrapper};
use crate::{Displaced, Error, Load, Optimizer, Precision, Result, StateDict, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What happens to the inner optimizer's momentum when weights are synchronised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pullback {
    /// Nothing.
    #[default]
    None,
    /// It starts again from 0.
    Reset,
}

/// Hyperparameters of Lookahead.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LookaheadConfig {
    /// Steps between synchronisations. Defaults to 5.
    pub k: u64,
    /// How far the slow weights go. Defaults to 0.5.
    pub alpha: f64,
    /// `none` or `reset`. Defaults to `none`.
    pub pullback_momentum: Pullback,
    /// The optimizer whose weights they follow. Defaults to `{name: sgdm}`.
    pub inner: Map<String, Value>,
}

impl Default for LookaheadConfig {
    fn default() -> Self {
        let inner = Map::from_iter([("name".to_owned(), json!("sgdm"))]);
        Self { k: 5, alpha: 0.5, pullback_momentum: Pullback::None, inner }
    }
}

impl Config for LookaheadConfig {
    fn lr(&self) -> f64 {
        0.0
    }
    fn check(&self) -> Result<(), Invalid> {
        require(self.k > 0, "k", "at least 1 step", 0.0)?;
        require((0.0..=1.0).contains(&self.alpha), "alpha", "a number in [0, 1]", self.alpha)
    }
}

pub(crate) static LOOKAHEAD: Info = Info {
    name: "lookahead",
    about: "slow weights that follow another optimizer's",
    paper: "Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, arXiv:1907.08610",
    year: 2019,
    formula: "x: k steps of the inner optimizer; slow ← slow + α(x - slow); x ← slow",
};

pub(crate) struct Lookahead {
    config: LookaheadConfig,
    slots: Vec<Slot>,
    /// The weights that are trained, while the slow ones are in place.
    trained: Option<Vec<Tensor>>,
}

struct Slot {
    name: String,
    var: Var,
    slow: Tensor,
    t: u64,
}

impl Lookahead {
    fn refuse_while_evaluating(&self) -> Result<()> {
        match self.trained {
            Some(_) => Err(Error::Evaluating(LOOKAHEAD.name.to_owned())),
            None => Ok(()),
        }
    }

    /// Slow weights start where a parameter is at its first step, which may not be where it was when this was made: weights are
    /// often loaded in between.
    fn start(&mut self, grads: &GradStore) -> Result<()> {
        for slot in self.slots.iter_mut().filter(|slot| slot.t == 0 && grads.get(&slot.var).is_some()) {
            slot.slow = slot.var.copy()?.to_dtype(wide(slot.var.dtype()))?;
        }
        Ok(())
    }

    /// After a step of the inner optimizer on `stepped`.
    fn follow(&mut self, inner: &mut dyn Optimizer, stepped: &[usize]) -> Result<()> {
        let (alpha, k) = (self.config.alpha, self.config.k);
        let mut news = Vec::new();
        for index in stepped {
            let slot = &mut self.slots[*index];
            slot.t = slot.t.saturating_add(1);
            if slot.t.is_multiple_of(k) {
                let x = slot.var.copy()?.to_dtype(wide(slot.var.dtype()))?;
                // At its end the way is no sum, which would round.
                let slow = if alpha == 1.0 { x } else { paired(Toward { share: alpha }, &slot.slow, &x)? };
                news.push((*index, slow.to_dtype(slot.var.dtype())?, slow));
            }
        }
        if !news.is_empty() && self.config.pullback_momentum == Pullback::Reset {
            let names: Vec<String> =
                news.iter().map(|(index, ..)| format!("{}.momentum", self.slots[*index].name)).collect();
            forget(inner, &names)?;
        }
        for (index, x, slow) in news {
            let slot = &mut self.slots[index];
            slot.var.set(&x)?;
            slot.slow = if x.dtype() == slow.dtype() { slow.copy()? } else { slow };
        }
        Ok(())
    }

    fn stepped(&self, grads: &GradStore) -> Vec<usize> {
        (0..self.slots.len()).filter(|i| grads.get(&self.slots[*i].var).is_some()).collect()
    }
}

/// Sets buffers of the inner optimizer to 0.
fn forget(inner: &mut dyn Optimizer, names: &[String]) -> Result<()> {
    let mut state = inner.state_dict()?;
    for (key, tensor) in &mut state.tensors {
        // Also of an optimizer inside the inner one.
        if names.iter().any(|name| key.rsplit('/').next() == Some(name)) {
            *tensor = tensor.zeros_like()?;
        }
    }
    inner.load_state_dict_with(&state, Load::strict().same_order())
}

impl Wrapper for Lookahead {
    type Config = LookaheadConfig;
    /// Counts and slow weights.
    type Loaded = Vec<(u64, Tensor)>;
    const INFO: &'static Info = &LOOKAHEAD;
    const BUFFERS: &'static [&'static str] = &["slow"];

    fn new(config: LookaheadConfig, params: Vec<(String, Var)>) -> Result<Self> {
        let mut slots = Vec::with_capacity(params.len());
        for (name, var) in params {
            slots.push(Slot { slow: var.copy()?.to_dtype(wide(var.dtype()))?, name, var, t: 0 });
        }
        Ok(Self { config, slots, trained: None })
    }
    fn config(&self) -> &LookaheadConfig {
        &self.config
    }
    fn inner(config: &mut LookaheadConfig) -> &mut Map<String, Value> {
        &mut config.inner
    }
    fn step(
        &mut self,
        inner: &mut dyn Optimizer,
        grads: &GradStore,
        context: &StepContext,
        again: Option<Again>,
    ) -> Result<()> {
        self.refuse_while_evaluating()?;
        self.start(grads)?;
        match again {
            Some(again) => inner.step_twice(grads, context, again)?,
            None => inner.step(grads, context)?,
        }
        self.follow(inner, &self.stepped(grads))
    }
    fn eval_weights(&mut self, _: &mut dyn Optimizer) -> Result<bool> {
        if self.trained.is_none() {
            // Before its first step a parameter is its own average.
            let slow = |slot: &Slot| {
                let slow =
                    if slot.t == 0 { slot.var.copy()? } else { slot.slow.to_dtype(slot.var.dtype())? };
                Ok((slot.var.clone(), slow))
            };
            let places = self.slots.iter().map(slow).collect::<Result<Vec<_>>>()?;
            self.trained = Some(Displaced::put(places)?.stay());
        }
        Ok(true)
    }
    fn train_weights(&mut self, _: &mut dyn Optimizer) -> Result<()> {
        if let Some(trained) = &self.trained {
            self.slots.iter().zip(trained).try_for_each(|(slot, trained)| slot.var.set(trained))?;
        }
        self.trained = None;
        Ok(())
    }
    fn set_precision(&mut self, _: &mut dyn Optimizer, precision: Precision) -> Result<()> {
        precision.only_default(&LOOKAHEAD)
    }
    fn save(&self, state: &mut StateDict) -> Result<()> {
        self.refuse_while_evaluating()?;
        for slot in &self.slots {
            let scalars = ParamScalars { t: slot.t, ..Default::default() };
            state.header.params.insert(slot.name.clone(), scalars);
            state.tensors.insert(format!("{}.slow", slot.name), slot.slow.to_device(&Device::Cpu)?);
        }
        Ok(())
    }
    fn load(&self, state: &mut StateDict, differences: &mut Vec<String>) -> Result<Vec<(u64, Tensor)>> {
        let mut loaded = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let key = format!("{}.slow", slot.name);
            match (state.header.params.get(&slot.name), state.tensors.remove(&key)) {
                (Some(scalars), Some(slow))
                    if slow.shape() == slot.slow.shape() && slow.dtype() == slot.slow.dtype() =>
                {
                    loaded.push((scalars.t, slow.to_device(slot.var.device())?));
                }
                (Some(_), Some(slow)) => {
                    let (expected, found) = (&slot.slow, &slow);
                    let describe = |t: &Tensor| format!("{:?} {:?}", t.dims(), t.dtype());
                    let (expected, found) = (describe(expected), describe(found));
                    differences.push(format!("buffer `{key}`: expected {expected}, found {found}"));
                }
                (None, _) => differences.push(format!("parameter `{}` is missing", slot.name)),
                (_, None) => differences.push(format!("buffer `{key}` is missing")),
            }
        }
        Ok(loaded)
    }
    fn accept(&mut self, loaded: Vec<(u64, Tensor)>) {
        for (slot, (t, slow)) in self.slots.iter_mut().zip(loaded) {
            (slot.t, slot.slow) = (t, slow);
        }
        self.trained = None;
    }
}
