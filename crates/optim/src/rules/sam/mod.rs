//! SAM (Foret et al., 2021): steps with the gradient of a point a little uphill, towards flat minima.
//!
//! ```text
//! n  = |all gradients together|                       adaptive: of |x| g
//! at = x + ρ/(n + 1e-12) g                            adaptive: x² g
//! a step of the inner optimizer from x with ∇f(at), of the same batch
//! ```
//!
//! A step takes two gradients: call [`Optimizer::step_twice`] with a closure that computes the second.
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Var};
//! use taper_optim::{Evaluated, Registry, StepContext};
//!
//! let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! let config = serde_json::json!({"rho": 0.05, "inner": {"name": "sgdm", "lr": 0.01}});
//! let params = vec![("x".to_owned(), x.clone())];
//! let mut optimizer = Registry::builtin().build("sam", params, config.as_object().unwrap())?;
//! let loss = || x.sqr()?.sum_all();
//! let mut again = || Ok(Evaluated { grads: loss()?.backward()?, loss: None });
//! optimizer.step_twice(&loss()?.backward()?, &StepContext::new(), &mut again)?;
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - Nowhere from the formulas; pytorch_optimizer computes n in f32. The inner optimizer is any that takes one gradient, with its
//!   rates, schedules and groups (whose keys are its own).
//! - An inner optimizer that follows the loss (DecGD) gets gradient and loss of the same point, `at`; without a loss of that
//!   point, the loss of x.
//! - Clipping is that of the second gradient. The first is only scaled, by
//!   [`StepContext::scale`](crate::StepContext::scale), before its norm is taken.
//! - ρ is one for all parameters, as is n. A step whose first gradient is 0 is taken at x itself.
//!
//! References: *Sharpness-Aware Minimization for Efficiently Improving Generalization*, arXiv:2010.01412; *ASAM*,
//! arXiv:2102.11600.
use crate::driver::fields;
use crate::inner::{Inner, differences, leftovers};
use crate::rule::{Config, Info, Invalid, ranges};
use crate::state::SavedGroup;
use crate::sums::squares;
use crate::tensor::{fitting, wide};
use crate::{
    Displaced, Error, Evaluated, Factory, Load, Optimizer, ParamInfo, Precision, Probe, Registry, Result,
    Setup, StateDict, StepContext,
};
use candle_core::Var;
use candle_core::backprop::GradStore;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Hyperparameters of SAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamConfig {
    /// How far uphill the second gradient is taken, ρ. Defaults to 0.05.
    pub rho: f64,
    /// Measure the way relative to each weight (ASAM). Defaults to false.
    pub adaptive: bool,
    /// The optimizer that takes the step. Defaults to `{name: sgdm}`.
    pub inner: Map<String, Value>,
}

impl Default for SamConfig {
    fn default() -> Self {
        let inner = Map::from_iter([("name".to_owned(), json!("sgdm"))]);
        Self { rho: 0.05, adaptive: false, inner }
    }
}

impl Config for SamConfig {
    fn lr(&self) -> f64 {
        0.0
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::at_least_zero("rho", self.rho)
    }
}

pub(crate) static SAM: Info = Info {
    name: "sam",
    about: "another optimizer's steps with the gradient of a point uphill",
    paper: "Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, arXiv:2010.01412",
    year: 2021,
    formula: "at = x + ρ g/|g|; x: a step of the inner optimizer with ∇f(at)",
};

/// How SAM is made.
pub(crate) struct SamFactory;

fn inner(config: &SamConfig) -> Result<Inner> {
    Inner::parse(SAM.name, "inner", &config.inner)
}

impl Factory for SamFactory {
    type Config = SamConfig;

    fn resolve(&self, registry: &Registry, config: SamConfig) -> Result<SamConfig> {
        let inside = inner(&config)?;
        let full = inside.resolve(registry)?;
        if inside.gradients(registry)? > 1 {
            let message = "expected an optimizer that takes one gradient a step".to_owned();
            return Err(Error::Hyperparameter {
                optimizer: SAM.name.into(),
                key: "inner.name".into(),
                message,
            });
        }
        Ok(SamConfig { inner: full, ..config })
    }

    fn needs_loss(&self, registry: &Registry, config: &SamConfig) -> Result<bool> {
        inner(config)?.needs_loss(registry)
    }

    fn gradients(&self, _: &Registry, _: &SamConfig) -> Result<usize> {
        Ok(2)
    }

    fn buffers(&self, registry: &Registry, config: &SamConfig) -> Result<Vec<&'static str>> {
        inner(config)?.buffers(registry)
    }

    fn build(&self, setup: Setup<'_, SamConfig>) -> Result<Box<dyn Optimizer>> {
        let Setup { registry, params, config, groups } = setup;
        let inside = inner(&config)?;
        let groups = inside.groups(groups, &["rho", "adaptive"])?;
        let inner = inside.build(registry, params.clone(), &groups)?;
        Ok(Box::new(Sam { config, params, inner }))
    }
}

struct Sam {
    config: SamConfig,
    params: Vec<(String, Var)>,
    inner: Box<dyn Optimizer>,
}

const INNER: &str = "inner";

impl Optimizer for Sam {
    fn step(&mut self, _: &GradStore, _: &StepContext) -> Result<()> {
        Err(Error::SecondGradient(SAM.name.to_owned()))
    }
    fn gradients(&self) -> usize {
        2
    }
    fn step_twice(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        again: &mut dyn FnMut() -> Result<Evaluated>,
    ) -> Result<()> {
        let (rho, adaptive) = (self.config.rho, self.config.adaptive);
        context.check(SAM.name, context.lr.unwrap_or(self.inner.lr()) * context.factor)?;
        let (mut uphill, mut norm) = (Vec::new(), 0.0);
        for (name, var) in &self.params {
            let Some(grad) = grads.get(var) else { continue };
            let wide = wide(var.dtype());
            let g = (fitting(name, var, grad)?.to_dtype(wide)? * context.grad_scale)?;
            let x = var.copy()?.to_dtype(wide)?;
            let part = squares(&if adaptive { (x.abs()? * &g)? } else { g.clone() })?;
            if !part.is_finite() {
                return Err(Error::GradientNotFinite(name.clone()));
            }
            norm += part;
            uphill.push((var.clone(), if adaptive { (x.sqr()? * g)? } else { g }, x));
        }
        if uphill.is_empty() {
            return self.inner.step(grads, context);
        }
        let scale = rho / (norm.sqrt() + 1e-12);
        let points = uphill.into_iter().map(|(var, way, x)| Ok((var, (x + (way * scale)?)?)));
        let displaced = Displaced::put(points.collect::<Result<Vec<_>>>()?)?;
        let second = again();
        displaced.restore()?;
        let second = second?;
        self.inner.step(&second.grads, &StepContext { loss: second.loss.or(context.loss), ..*context })
    }
    fn eval_weights(&mut self) -> Result<bool> {
        self.inner.eval_weights()
    }
    fn train_weights(&mut self) -> Result<()> {
        self.inner.train_weights()
    }
    fn settle(&mut self) -> Result<()> {
        self.inner.settle()
    }
    fn set_precision(&mut self, precision: Precision) -> Result<()> {
        self.inner.set_precision(precision)
    }
    fn info(&self) -> &'static Info {
        &SAM
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
        let inner = self.inner.state_dict()?;
        let mut state = StateDict::default();
        state.header.optimizer = SAM.name.to_owned();
        state.header.groups = vec![SavedGroup { pattern: None, config: own(&self.config) }];
        state.header.params = inner.header.params.clone();
        state.insert_part(INNER, inner);
        Ok(state)
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let mut state = state.clone();
        let mut differences = differences(SAM.name, &own(&self.config), &state, load);
        let inner = state.take_part(INNER)?;
        differences.extend(leftovers(&state));
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        self.inner.load_state_dict_with(&inner, load)
    }
    fn probe(&self) -> Option<&Probe> {
        self.inner.probe()
    }
}

/// The hyperparameters that the inner optimizer does not check by itself.
fn own(config: &SamConfig) -> Map<String, Value> {
    let mut own = fields(config);
    own.remove("inner");
    own
}
