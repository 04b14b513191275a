//! The driver: everything an optimizer does besides its arithmetic, once for all rules.
pub(crate) mod cpu;
mod groups;
mod slot;

pub use groups::Group;
pub(crate) use groups::{compile, configure};

use crate::probe::{Distribution, ParamProbe, Probe};
use crate::rule::{Config, Input, Refusal, Rule, SUMS, Scalars};
use crate::state::StateDict;
use crate::{Error, Info, Optimizer, ParamInfo, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use cpu::{Clip, Gradient};
use serde_json::Value;
use slot::Slot;

/// An optimizer: a [`Rule`] applied to named parameters.
///
/// Use it through the [`Optimizer`] trait, or as a [`candle_nn::Optimizer`] in an existing loop.
#[derive(Debug)]
pub struct Optim<R: Rule> {
    /// The default group first; the others with their patterns.
    groups: Vec<(Option<String>, R::Config)>,
    slots: Vec<Slot>,
    lr: f64,
    probe: Option<Probe>,
}

impl<R: Rule> Optim<R> {
    /// An optimizer over `params` with one group.
    pub fn with_params(params: Vec<(String, Var)>, config: R::Config) -> Result<Self> {
        Self::with_groups(params, config, &[])
    }

    /// An optimizer over `params`, where `groups` differ from `config`. A pattern that matches no parameter and a
    /// parameter that two patterns claim are errors.
    pub fn with_groups(params: Vec<(String, Var)>, config: R::Config, groups: &[Group]) -> Result<Self> {
        let config = configure::<R>(&config, &Default::default())?;
        let claimed = slot::claim(&params, groups)?;
        let mut all = vec![(None, config.clone())];
        for group in groups {
            all.push((Some(group.pattern.clone()), configure::<R>(&config, &group.overrides)?));
        }
        let mut slots = Vec::with_capacity(params.len());
        for ((name, var), group) in params.into_iter().zip(claimed) {
            let names = R::buffers(&all[group].1);
            if names.len() < R::BUFFERS.0 || names.len() > R::BUFFERS.1 {
                let message = format!("expected {:?} state buffers, found {}", R::BUFFERS, names.len());
                let optimizer = R::info(&config).name.to_owned();
                return Err(Error::Hyperparameter { optimizer, key: "BUFFERS".into(), message });
            }
            slots.push(Slot::new(name, var, group, R::MEMORY.len(), names)?);
        }
        Ok(Self { lr: config.lr(), groups: all, slots, probe: None })
    }

    /// The hyperparameters of the default group.
    pub fn hyperparameters(&self) -> &R::Config {
        &self.groups[0].1
    }

    fn refused(&self, refusal: Refusal) -> Error {
        let optimizer = R::info(self.hyperparameters()).name.to_owned();
        match refusal {
            Refusal::MissingLoss => Error::MissingLoss(optimizer),
            Refusal::Loss { loss, c } => Error::Loss { optimizer, loss, c },
            Refusal::Decay { lr, weight_decay } => Error::Decay { optimizer, lr, weight_decay },
        }
    }

    fn take_step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        let base_lr = context.lr.unwrap_or(self.lr);
        context.check(base_lr)?;
        let clip = Clip { scale: context.grad_scale, limit: context.grad_limit };
        let gradients = slot::gradients(&self.slots, grads)?;
        if R::NEEDS_LOSS && context.loss.is_none() {
            return Err(self.refused(Refusal::MissingLoss));
        }
        let sums = if R::REDUCES { cpu::reduce::<R>(&self.slots, &gradients, clip)? } else { [0.0; SUMS] };
        if let Some(found) = sums.into_iter().find(|sum| !sum.is_finite()) {
            return Err(Error::Context {
                what: "norm over all gradients",
                expected: "a finite number",
                found,
            });
        }
        // Everything that can be refused is refused before anything changes.
        let factor = base_lr / self.groups[0].1.lr();
        let mut prepared = Vec::with_capacity(gradients.len());
        for gradient in &gradients {
            let slot = &self.slots[gradient.slot];
            let config = &self.groups[slot.group].1;
            // The default group takes the rate as it is; 0 / 0 would be no ratio.
            let lr = match slot.group {
                0 => base_lr,
                _ if factor.is_finite() => config.lr() * factor,
                _ => config.lr(),
            };
            let t = slot.t.saturating_add(1);
            let input = Input { t, lr, momentum: context.momentum, loss: context.loss, sums };
            let mut memory = slot.memory.clone();
            let scalars = R::prepare(config, &input, &mut memory).map_err(|r| self.refused(r))?;
            let start = match slot.t {
                0 => Some(R::start(config, &input).map_err(|r| self.refused(r))?),
                _ => None,
            };
            prepared.push((scalars, memory, start));
        }
        let before = match context.probe {
            true => gradients.iter().map(|g| slot::values(&self.slots[g.slot].var)).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let mut scalars = Vec::with_capacity(gradients.len());
        for (gradient, (prepared, memory, start)) in gradients.iter().zip(prepared) {
            let slot = &mut self.slots[gradient.slot];
            if let Some(start) = start.filter(|s| s.iter().any(|v| *v != 0.0)) {
                slot.buffers.fill(&start);
            }
            slot.memory = memory;
            slot.t = slot.t.saturating_add(1);
            scalars.push(prepared);
        }
        let (single, double): (Vec<_>, Vec<_>) =
            scalars.iter().map(|s| (s.round::<f32>(), s.round::<f64>())).unzip();
        cpu::step(
            &mut self.slots,
            &gradients,
            &|i, x, g, state| cpu::kernel::<R, f32>(&single[i], clip, x, g, state),
            &|i, x, g, state| cpu::kernel::<R, f64>(&double[i], clip, x, g, state),
        )?;
        if context.probe {
            self.probe = Some(self.measure(&gradients, &scalars, &before)?);
        }
        Ok(())
    }

    fn measure(&self, gradients: &[Gradient], scalars: &[R::Scalars], before: &[Vec<f64>]) -> Result<Probe> {
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let mut params = Vec::with_capacity(gradients.len());
        for ((gradient, scalars), before) in gradients.iter().zip(scalars).zip(before) {
            let slot = &self.slots[gradient.slot];
            let after = slot::values(&slot.var)?;
            let change = norm(&mut after.iter().zip(before).map(|(a, b)| a - b));
            let size = norm(&mut before.iter().copied());
            let buffers = slot.buffers.widened();
            let mean = |b: &Vec<f64>| b.iter().sum::<f64>() / b.len().max(1) as f64;
            let means: Vec<f64> = buffers.iter().map(mean).collect();
            let mut state = vec![0.0; buffers.len()];
            let mut observe = |i: usize| {
                state.iter_mut().zip(&buffers).for_each(|(s, buffer)| *s = buffer[i]);
                R::observe(scalars, &state)
            };
            let observed = R::OBSERVED.and_then(|name| {
                Some((name, Distribution::of((0..after.len()).map(&mut observe).collect())?))
            });
            params.push(ParamProbe {
                name: slot.name.clone(),
                update_ratio: if change == 0.0 { 0.0 } else { change / size },
                observed,
                numbers: R::report(scalars, &means),
            });
        }
        Ok(Probe { params })
    }
}

impl<R: Rule> Optimizer for Optim<R> {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.take_step(grads, context)
    }

    fn info(&self) -> &'static Info {
        R::info(self.hyperparameters())
    }

    fn needs_loss(&self) -> bool {
        R::NEEDS_LOSS
    }

    fn config(&self) -> Value {
        serde_json::to_value(self.hyperparameters()).unwrap_or(Value::Null)
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn set_lr(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn params(&self) -> Vec<ParamInfo> {
        let info = |slot: &Slot| ParamInfo {
            name: slot.name.clone(),
            elements: slot.var.elem_count(),
            group: self.groups[slot.group].0.clone(),
        };
        self.slots.iter().map(info).collect()
    }

    fn state_dict(&self) -> Result<StateDict> {
        slot::save(&self.slots, self.info().name, R::MEMORY)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let name = self.info().name;
        slot::load(&mut self.slots, state, name, R::MEMORY)
    }

    fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }
}

/// Existing candle loops work unchanged: parameters are named by their position.
impl<R: Rule> candle_nn::Optimizer for Optim<R> {
    type Config = R::Config;

    fn new(vars: Vec<Var>, config: R::Config) -> candle_core::Result<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        let params = floats.enumerate().map(|(i, var)| (i.to_string(), var)).collect();
        Ok(Self::with_params(params, config)?)
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(self.take_step(grads, &StepContext::new())?)
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        let context = if R::NEEDS_LOSS {
            StepContext::new().loss(loss.to_dtype(DType::F64)?.to_scalar()?)
        } else {
            StepContext::new()
        };
        Ok(self.take_step(&loss.backward()?, &context)?)
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}
