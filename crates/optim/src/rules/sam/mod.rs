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
use crate::pairs::{Blend, paired};
use crate::rule::{Config, Info, Invalid, ranges};
use crate::sums::squares;
use crate::tensor::{fitting, wide};
use crate::wrapper::{Again, Wrapper};
use crate::{Displaced, Error, Optimizer, Result, StateDict, StepContext};
use candle_core::Var;
use candle_core::backprop::GradStore;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Hyperparameters of SAM.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
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

pub(crate) struct Sam {
    config: SamConfig,
    params: Vec<(String, Var)>,
}

impl Wrapper for Sam {
    type Config = SamConfig;
    type Loaded = ();
    const INFO: &'static Info = &SAM;
    const TWICE: bool = true;

    fn new(config: SamConfig, params: Vec<(String, Var)>) -> Result<Self> {
        Ok(Self { config, params })
    }
    fn config(&self) -> &SamConfig {
        &self.config
    }
    fn inner(config: &mut SamConfig) -> &mut Map<String, Value> {
        &mut config.inner
    }
    fn step(
        &mut self,
        inner: &mut dyn Optimizer,
        grads: &GradStore,
        context: &StepContext,
        again: Option<Again>,
    ) -> Result<()> {
        let again = again.ok_or_else(|| Error::SecondGradient(SAM.name.to_owned()))?;
        let (rho, adaptive) = (self.config.rho, self.config.adaptive);
        context.check(SAM.name, context.lr.unwrap_or(inner.lr()) * context.factor)?;
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
            return inner.step(grads, context);
        }
        let scale = rho / (norm.sqrt() + 1e-12);
        let points = uphill
            .into_iter()
            .map(|(var, way, x)| Ok((var, paired(Blend { keep: 1.0, share: scale }, &x, &way)?)));
        let displaced = Displaced::put(points.collect::<Result<Vec<_>>>()?)?;
        let second = again();
        displaced.restore()?;
        let second = second?;
        inner.step(&second.grads, &StepContext { loss: second.loss.or(context.loss), ..*context })
    }
    fn load(&self, _: &mut StateDict, _: &mut Vec<String>) -> Result<()> {
        Ok(())
    }
    fn accept(&mut self, (): ()) {}
}
