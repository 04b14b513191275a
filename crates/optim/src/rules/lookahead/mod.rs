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
use crate::driver::fields;
use crate::inner::{Inner, differences, leftovers};
use crate::rule::{Config, Info, Invalid, Reach, require};
use crate::state::{ParamScalars, SavedGroup};
use crate::tensor::wide;
use crate::{
    Displaced, Error, Evaluated, Factory, Load, Optimizer, Others, ParamInfo, Probe, Registry, Result, Setup,
    StateDict, StepContext,
};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What happens to the inner optimizer's momentum when weights are synchronised.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pullback {
    /// Nothing.
    #[default]
    None,
    /// It starts again from 0.
    Reset,
}

/// Hyperparameters of Lookahead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// How Lookahead is made.
pub(crate) struct LookaheadFactory;

fn inner(config: &LookaheadConfig) -> Result<Inner> {
    Inner::parse(LOOKAHEAD.name, "inner", &config.inner)
}

impl Factory for LookaheadFactory {
    type Config = LookaheadConfig;

    fn resolve(&self, registry: &Registry, config: LookaheadConfig) -> Result<LookaheadConfig> {
        Ok(LookaheadConfig { inner: inner(&config)?.resolve(registry)?, ..config })
    }

    fn needs_loss(&self, registry: &Registry, config: &LookaheadConfig) -> Result<bool> {
        inner(config)?.needs_loss(registry)
    }

    fn gradients(&self, registry: &Registry, config: &LookaheadConfig) -> Result<usize> {
        inner(config)?.gradients(registry)
    }

    fn buffers(&self, registry: &Registry, config: &LookaheadConfig) -> Result<Vec<&'static str>> {
        Ok([inner(config)?.buffers(registry)?, vec!["slow"]].concat())
    }

    fn reach(&self, registry: &Registry, config: &LookaheadConfig) -> Result<Reach> {
        inner(config)?.reach(registry)
    }

    fn build(&self, setup: Setup<'_, LookaheadConfig>) -> Result<Box<dyn Optimizer>> {
        let Setup { registry, params, config, groups } = setup;
        let inside = inner(&config)?;
        let groups = inside.groups(groups, &["k", "alpha", "pullback_momentum"])?;
        let inner = inside.build(registry, params.clone(), &groups)?;
        let mut slots = Vec::with_capacity(params.len());
        for (name, var) in params {
            slots.push(Slot { slow: var.copy()?.to_dtype(wide(var.dtype()))?, name, var, t: 0 });
        }
        Ok(Box::new(Lookahead { config, slots, inner, trained: None }))
    }
}

struct Lookahead {
    config: LookaheadConfig,
    slots: Vec<Slot>,
    inner: Box<dyn Optimizer>,
    /// The weights that are trained, while the slow ones are in place.
    trained: Option<Vec<Tensor>>,
}

struct Slot {
    name: String,
    var: Var,
    slow: Tensor,
    t: u64,
}

const INNER: &str = "inner";

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
    fn follow(&mut self, stepped: &[usize]) -> Result<()> {
        let (alpha, k) = (self.config.alpha, self.config.k);
        let mut news = Vec::new();
        for index in stepped {
            let slot = &mut self.slots[*index];
            slot.t = slot.t.saturating_add(1);
            if slot.t.is_multiple_of(k) {
                let x = slot.var.copy()?.to_dtype(wide(slot.var.dtype()))?;
                // At its end the way is no sum, which would round.
                let slow = if alpha == 1.0 { x } else { (&slot.slow + ((x - &slot.slow)? * alpha)?)? };
                news.push((*index, slow.to_dtype(slot.var.dtype())?, slow));
            }
        }
        if !news.is_empty() && self.config.pullback_momentum == Pullback::Reset {
            let names: Vec<String> =
                news.iter().map(|(index, ..)| format!("{}.momentum", self.slots[*index].name)).collect();
            self.forget(&names)?;
        }
        for (index, x, slow) in news {
            let slot = &mut self.slots[index];
            slot.var.set(&x)?;
            slot.slow = if x.dtype() == slow.dtype() { slow.copy()? } else { slow };
        }
        Ok(())
    }

    /// Sets buffers of the inner optimizer to 0.
    fn forget(&mut self, names: &[String]) -> Result<()> {
        let mut state = self.inner.state_dict()?;
        for (key, tensor) in &mut state.tensors {
            // Also of an optimizer inside the inner one.
            if names.iter().any(|name| key.rsplit('/').next() == Some(name)) {
                *tensor = tensor.zeros_like()?;
            }
        }
        self.inner.load_state_dict_with(&state, Load::strict().same_order())
    }

    fn stepped(&self, grads: &GradStore) -> Vec<usize> {
        (0..self.slots.len()).filter(|i| grads.get(&self.slots[*i].var).is_some()).collect()
    }
}

impl Optimizer for Lookahead {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.refuse_while_evaluating()?;
        self.start(grads)?;
        self.inner.step(grads, context)?;
        self.follow(&self.stepped(grads))
    }
    fn gradients(&self) -> usize {
        self.inner.gradients()
    }
    fn step_twice(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        again: &mut dyn FnMut() -> Result<Evaluated>,
    ) -> Result<()> {
        self.refuse_while_evaluating()?;
        self.start(grads)?;
        self.inner.step_twice(grads, context, again)?;
        self.follow(&self.stepped(grads))
    }
    fn eval_weights(&mut self) -> Result<bool> {
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
    fn train_weights(&mut self) -> Result<()> {
        if let Some(trained) = &self.trained {
            self.slots.iter().zip(trained).try_for_each(|(slot, trained)| slot.var.set(trained))?;
        }
        self.trained = None;
        Ok(())
    }
    fn settle(&mut self) -> Result<()> {
        self.inner.settle()
    }
    fn share_sums(&mut self, others: Others) -> Result<()> {
        self.inner.share_sums(others)
    }
    fn info(&self) -> &'static Info {
        &LOOKAHEAD
    }
    fn needs_loss(&self) -> bool {
        self.inner.needs_loss()
    }
    fn config(&self) -> Value {
        Value::Object(fields(&self.config))
    }
    fn lr(&self) -> f64 {
        self.inner.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }
    fn params(&self) -> Vec<ParamInfo> {
        self.inner.params()
    }
    fn state_dict(&self) -> Result<StateDict> {
        self.refuse_while_evaluating()?;
        let mut state = StateDict::default();
        state.header.optimizer = LOOKAHEAD.name.to_owned();
        state.header.groups = vec![SavedGroup { pattern: None, config: own(&self.config) }];
        for slot in &self.slots {
            let scalars = ParamScalars { t: slot.t, ..Default::default() };
            state.header.params.insert(slot.name.clone(), scalars);
            state.tensors.insert(format!("{}.slow", slot.name), slot.slow.to_device(&Device::Cpu)?);
        }
        state.insert_part(INNER, self.inner.state_dict()?);
        Ok(state)
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let mut state = state.clone();
        let mut differences = differences(LOOKAHEAD.name, &own(&self.config), &state, load);
        let inner = state.take_part(INNER)?;
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
        differences.extend(leftovers(&state));
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        self.inner.load_state_dict_with(&inner, load)?;
        for (slot, (t, slow)) in self.slots.iter_mut().zip(loaded) {
            (slot.t, slot.slow) = (t, slow);
        }
        self.trained = None;
        Ok(())
    }
    fn probe(&self) -> Option<&Probe> {
        self.inner.probe()
    }
}

/// The hyperparameters that the inner optimizer does not check by itself.
fn own(config: &LookaheadConfig) -> Map<String, Value> {
    let mut own = fields(config);
    own.remove("inner");
    own
}
