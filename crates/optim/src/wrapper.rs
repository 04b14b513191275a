//! An optimizer around another: what all wrappers have in common.
use crate::driver::fields;
use crate::inner::{Inner, differences, leftovers};
use crate::rule::{Config, Reach};
use crate::state::SavedGroup;
use crate::{
    Error, Evaluated, Factory, Info, Load, Optimizer, Others, ParamInfo, Precision, Probe, Registry, Result,
    Setup, StateDict, StepContext, Values,
};
use candle_core::Var;
use candle_core::backprop::GradStore;
use serde_json::{Map, Value};
use std::marker::PhantomData;

/// The hyperparameter of the inner optimizer, and the part of the state that is its own.
const INNER: &str = "inner";

/// Computes the gradient of a batch again.
pub(crate) type Again<'a> = &'a mut dyn FnMut() -> Result<Evaluated>;

/// What a wrapper adds. All that it does not say is as the inner optimizer has it.
pub(crate) trait Wrapper: Send + Sized + 'static {
    /// The hyperparameters.
    type Config: Config;
    /// What [`Wrapper::load`] reads and [`Wrapper::accept`] takes.
    type Loaded;
    const INFO: &'static Info;
    /// Whether it takes a second gradient itself. The inner optimizer must then take one.
    const TWICE: bool = false;
    /// What it keeps for every parameter.
    const BUFFERS: &'static [&'static str] = &[];

    fn new(config: Self::Config, params: Vec<(String, Var)>) -> Result<Self>;
    fn config(&self) -> &Self::Config;
    /// Name and hyperparameters of the inner optimizer.
    fn inner(config: &mut Self::Config) -> &mut Map<String, Value>;
    /// `again` is there when it is called by [`Optimizer::step_twice`], and whenever this is [`Wrapper::TWICE`].
    fn step(
        &mut self,
        inner: &mut dyn Optimizer,
        grads: &GradStore,
        context: &StepContext,
        again: Option<Again>,
    ) -> Result<()>;
    fn eval_weights(&mut self, inner: &mut dyn Optimizer) -> Result<bool> {
        inner.eval_weights()
    }
    fn train_weights(&mut self, inner: &mut dyn Optimizer) -> Result<()> {
        inner.train_weights()
    }
    fn set_precision(&mut self, inner: &mut dyn Optimizer, precision: Precision) -> Result<()> {
        inner.set_precision(precision)
    }
    /// Adds its own state to a state that has the inner optimizer's counts.
    fn save(&self, _state: &mut StateDict) -> Result<()> {
        Ok(())
    }
    /// Takes its own tensors out of a state, and says what of them does not fit.
    fn load(&self, state: &mut StateDict, differences: &mut Vec<String>) -> Result<Self::Loaded>;
    fn accept(&mut self, loaded: Self::Loaded);
}

/// How a wrapper is made.
pub(crate) struct Wrap<W>(PhantomData<fn() -> W>);

impl<W> Default for Wrap<W> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<W: Wrapper> Wrap<W> {
    fn inner(config: &W::Config) -> Result<Inner> {
        Inner::parse(W::INFO.name, INNER, W::inner(&mut config.clone()))
    }
}

impl<W: Wrapper> Factory for Wrap<W> {
    type Config = W::Config;

    fn resolve(&self, registry: &Registry, mut config: W::Config) -> Result<W::Config> {
        let inner = Self::inner(&config)?;
        *W::inner(&mut config) = inner.resolve(registry)?;
        if W::TWICE {
            inner.one_gradient(registry)?;
        }
        Ok(config)
    }

    fn needs_loss(&self, registry: &Registry, config: &W::Config) -> Result<bool> {
        Self::inner(config)?.needs_loss(registry)
    }

    fn gradients(&self, registry: &Registry, config: &W::Config) -> Result<usize> {
        if W::TWICE { Ok(2) } else { Self::inner(config)?.gradients(registry) }
    }

    fn buffers(&self, registry: &Registry, config: &W::Config) -> Result<Vec<&'static str>> {
        Ok([Self::inner(config)?.buffers(registry)?, W::BUFFERS.to_vec()].concat())
    }

    fn reach(&self, registry: &Registry, config: &W::Config) -> Result<Reach> {
        // Where the second gradient is taken depends on all parameters.
        if W::TWICE { Ok(Reach::All) } else { Self::inner(config)?.reach(registry) }
    }

    fn build(&self, setup: Setup<'_, W::Config>) -> Result<Box<dyn Optimizer>> {
        let Setup { registry, params, config, groups } = setup;
        let inner = Self::inner(&config)?;
        let own = own(&config);
        let groups = inner.groups(groups, &own.keys().map(String::as_str).collect::<Vec<_>>())?;
        let inner = inner.build(registry, params.clone(), &groups)?;
        Ok(Box::new(Wrapped { wrapper: W::new(config, params)?, inner }))
    }
}

/// The hyperparameters that the inner optimizer does not check by itself.
fn own(config: &impl Config) -> Map<String, Value> {
    let mut own = fields(config);
    own.remove(INNER);
    own
}

/// A wrapper around an optimizer.
struct Wrapped<W> {
    wrapper: W,
    inner: Box<dyn Optimizer>,
}

impl<W: Wrapper> Optimizer for Wrapped<W> {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        if W::TWICE {
            return Err(Error::SecondGradient(W::INFO.name.to_owned()));
        }
        self.wrapper.step(&mut *self.inner, grads, context, None)
    }
    fn gradients(&self) -> usize {
        if W::TWICE { 2 } else { self.inner.gradients() }
    }
    fn step_twice(&mut self, grads: &GradStore, context: &StepContext, again: Again) -> Result<()> {
        self.wrapper.step(&mut *self.inner, grads, context, Some(again))
    }
    fn eval_weights(&mut self) -> Result<bool> {
        self.wrapper.eval_weights(&mut *self.inner)
    }
    fn train_weights(&mut self) -> Result<()> {
        self.wrapper.train_weights(&mut *self.inner)
    }
    fn settle(&mut self) -> Result<()> {
        self.inner.settle()
    }
    fn set_precision(&mut self, precision: Precision) -> Result<()> {
        self.wrapper.set_precision(&mut *self.inner, precision)
    }
    fn share_sums(&mut self, others: Others) -> Result<()> {
        self.inner.share_sums(others)
    }
    fn info(&self) -> &'static Info {
        W::INFO
    }
    fn needs_loss(&self) -> bool {
        self.inner.needs_loss()
    }
    fn config(&self) -> Value {
        Value::Object(fields(self.wrapper.config()))
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
        let inner = self.inner.state_dict()?;
        let mut state = StateDict::default();
        state.header.optimizer = W::INFO.name.to_owned();
        state.header.groups = vec![SavedGroup { pattern: None, config: own(self.wrapper.config()) }];
        state.header.params = inner.header.params.clone();
        self.wrapper.save(&mut state)?;
        state.insert_part(INNER, inner);
        Ok(state)
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let mut state = state.clone();
        let mut differences = differences(W::INFO.name, &own(self.wrapper.config()), &state, load);
        let inner = state.take_part(INNER)?;
        let loaded = self.wrapper.load(&mut state, &mut differences)?;
        differences.extend(leftovers(&state));
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        self.inner.load_state_dict_with(&inner, load)?;
        self.wrapper.accept(loaded);
        Ok(())
    }
    fn probe(&self) -> Option<&Probe> {
        self.inner.probe()
    }
    fn followers(&self) -> Vec<(&str, Values<'_>)> {
        self.inner.followers()
    }
}
