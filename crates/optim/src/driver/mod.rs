//! The driver: everything an optimizer does besides its arithmetic, once for all rules.
pub(crate) mod cpu;
mod groups;
mod slot;

pub use groups::Group;
pub(crate) use groups::{compile, configure};
pub(crate) use slot::Buffers;

use crate::device::Source;
use crate::device::gpu::Engine;
use crate::device::table::{Head, Item};
use crate::probe::{Distribution, ParamProbe, Probe};
use crate::rule::{Config, Input, Loss, MAX_BUFFERS, Refusal, Rule, SUMS, Scalars};
use crate::state::StateDict;
use crate::{Deferred, Error, Info, Optimizer, ParamInfo, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
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
    /// What takes the steps, unless it is the CPU.
    engine: Option<Engine>,
    lr: f64,
    probe: Option<Probe>,
}

/// What a step of one parameter takes, before anything has changed.
struct Prepared<R: Rule> {
    scalars: R::Scalars,
    memory: Vec<f64>,
    start: Option<[f64; MAX_BUFFERS]>,
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
        let engine = slot::engine(&params)?;
        if engine.is_some() && R::UPDATE.is_none() {
            return Err(Error::CpuOnly { optimizer: R::info(&config).name.to_owned() });
        }
        let mut slots = Vec::with_capacity(params.len());
        for ((name, var), group) in params.into_iter().zip(claimed) {
            let names = R::buffers(&all[group].1);
            if names.len() < R::BUFFERS.0 || names.len() > R::BUFFERS.1 {
                let message = format!("expected {:?} state buffers, found {}", R::BUFFERS, names.len());
                let optimizer = R::info(&config).name.to_owned();
                return Err(Error::Hyperparameter { optimizer, key: "BUFFERS".into(), message });
            }
            slots.push(Slot::new(name, var, group, R::MEMORY.len(), names, engine.as_ref())?);
        }
        Ok(Self { lr: config.lr(), groups: all, slots, engine, probe: None })
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

    fn take_step(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        // On the CPU there is nothing to wait for, and a rule that reduces waits in any case.
        let (context, deferred) = match self.engine {
            Some(_) if !R::REDUCES => (context, deferred),
            _ => (&deferred.read_into(*context)?, &Deferred::default()),
        };
        context.check(context.lr.unwrap_or(self.lr))?;
        let clip = Clip { scale: context.grad_scale, limit: context.grad_limit };
        let gradients = slot::gradients(&self.slots, grads)?;
        let loss = match (&deferred.loss, context.loss) {
            (Some(_), _) => Some(Loss::OnDevice),
            (None, loss) => loss.map(Loss::Known),
        };
        if R::NEEDS_LOSS && loss.is_none() {
            return Err(self.refused(Refusal::MissingLoss));
        }
        let sums = if R::REDUCES { self.reduce(&gradients, clip)? } else { [0.0; SUMS] };
        if let Some(found) = sums.into_iter().find(|sum| !sum.is_finite()) {
            return Err(Error::Context {
                what: "norm over all gradients",
                expected: "a finite number",
                found,
            });
        }
        // Everything that can be refused is refused before anything changes.
        let prepared = self.prepare(&gradients, context, loss, sums)?;
        let before = match context.probe {
            true => gradients.iter().map(|g| slot::values(&self.slots[g.slot].var)).collect::<Result<_>>()?,
            false => Vec::new(),
        };
        let scalars: Vec<R::Scalars> = prepared.iter().map(|p| p.scalars).collect();
        match self.engine {
            Some(_) => self.step_on_device(&gradients, &prepared, clip, deferred)?,
            None => self.step_on_cpu(&gradients, &prepared, &scalars, clip)?,
        }
        for (gradient, Prepared { memory, .. }) in gradients.iter().zip(prepared) {
            let slot = &mut self.slots[gradient.slot];
            slot.memory = memory;
            slot.t = slot.t.saturating_add(1);
        }
        if context.probe {
            self.probe = Some(self.measure(&gradients, &scalars, &before)?);
        }
        Ok(())
    }

    fn prepare(
        &self,
        gradients: &[Gradient],
        context: &StepContext,
        loss: Option<Loss>,
        sums: [f64; SUMS],
    ) -> Result<Vec<Prepared<R>>> {
        let base_lr = context.lr.unwrap_or(self.lr);
        let factor = base_lr / self.groups[0].1.lr();
        let mut prepared = Vec::with_capacity(gradients.len());
        for gradient in gradients {
            let slot = &self.slots[gradient.slot];
            let config = &self.groups[slot.group].1;
            // The default group takes the rate as it is; 0 / 0 would be no ratio.
            let lr = match slot.group {
                0 => base_lr,
                _ if factor.is_finite() => config.lr() * factor,
                _ => config.lr(),
            };
            let t = slot.t.saturating_add(1);
            let input = Input { t, lr, momentum: context.momentum, loss, sums };
            let mut memory = slot.memory.clone();
            let scalars = R::prepare(config, &input, &mut memory).map_err(|r| self.refused(r))?;
            let start = match slot.t {
                0 => Some(R::start(config, &input).map_err(|r| self.refused(r))?),
                _ => None,
            };
            prepared.push(Prepared { scalars, memory, start });
        }
        Ok(prepared)
    }

    fn step_on_cpu(
        &mut self,
        gradients: &[Gradient],
        prepared: &[Prepared<R>],
        scalars: &[R::Scalars],
        clip: Clip,
    ) -> Result<()> {
        for (gradient, Prepared { start, .. }) in gradients.iter().zip(prepared) {
            if let Some(start) = start.filter(|s| s.iter().any(|v| *v != 0.0)) {
                self.slots[gradient.slot].buffers.fill(&start);
            }
        }
        let (single, double): (Vec<_>, Vec<_>) =
            scalars.iter().map(|s| (s.round::<f32>(), s.round::<f64>())).unzip();
        Ok(cpu::step(
            &mut self.slots,
            gradients,
            &|i, x, g, state| cpu::kernel::<R, f32>(&single[i], clip, x, g, state),
            &|i, x, g, state| cpu::kernel::<R, f64>(&double[i], clip, x, g, state),
        )?)
    }

    fn step_on_device(
        &mut self,
        gradients: &[Gradient],
        prepared: &[Prepared<R>],
        clip: Clip,
        deferred: &Deferred,
    ) -> Result<()> {
        let Some(engine) = &mut self.engine else { return Ok(()) };
        let head = Head { scale: clip.scale, limit: clip.limit };
        let numbers = |i: usize| (prepared[i].scalars.values(), prepared[i].start);
        for (source, mut items) in items::<R>(&self.groups, &mut self.slots, gradients, numbers) {
            engine.step(&source, &mut items, &head, deferred)?;
        }
        Ok(())
    }

    /// The sums of [`Rule::reduce`]. A device is waited for.
    fn reduce(&mut self, gradients: &[Gradient], clip: Clip) -> Result<[f64; SUMS]> {
        let Some(engine) = &mut self.engine else {
            return Ok(cpu::reduce::<R>(&self.slots, gradients, clip)?);
        };
        let head = Head { scale: clip.scale, limit: clip.limit };
        let with_past = |g: &&Gradient| self.slots[g.slot].t > 0;
        let gradients: Vec<Gradient> = gradients.iter().filter(with_past).cloned().collect();
        let numbers = |_| (vec![0.0; R::Scalars::NAMES.len()], None);
        let items = items::<R>(&self.groups, &mut self.slots, &gradients, numbers);
        let sums = items.into_iter().map(|(source, mut items)| engine.reduce(&source, &mut items, &head));
        Ok(cpu::total(sums.collect::<Result<Vec<_>>>()?))
    }

    fn measure(&self, gradients: &[Gradient], scalars: &[R::Scalars], before: &[Vec<f64>]) -> Result<Probe> {
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let mut params = Vec::with_capacity(gradients.len());
        for ((gradient, scalars), before) in gradients.iter().zip(scalars).zip(before) {
            let slot = &self.slots[gradient.slot];
            let after = slot::values(&slot.var)?;
            let change = norm(&mut after.iter().zip(before).map(|(a, b)| a - b));
            let size = norm(&mut before.iter().copied());
            let buffers = slot.buffers.widened()?;
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

/// The parameters of `gradients` as kernels see them, by program: dtype and number of buffers. `numbers` tells scalars and
/// start of the parameter of the `usize`-th gradient.
fn items<'a, R: Rule>(
    groups: &[(Option<String>, R::Config)],
    slots: &'a mut [Slot],
    gradients: &'a [Gradient],
    numbers: impl Fn(usize) -> (Vec<f64>, Option<[f64; MAX_BUFFERS]>),
) -> Vec<(Source, Vec<Item<'a>>)> {
    let mut programs: Vec<(Source, Vec<Item>)> = Vec::new();
    // Gradients name ascending, distinct slots: each is lent once.
    let mut lent = slots.iter_mut().enumerate();
    for (i, gradient) in gradients.iter().enumerate() {
        let Some((_, slot)) = lent.find(|(index, _)| *index == gradient.slot) else { continue };
        let (buffers, dtype) = (slot.names.len(), slot.var.dtype());
        let Buffers::Device(state) = &mut slot.buffers else { continue };
        let (scalars, start) = numbers(i);
        let offset = R::loss_offset(&groups[slot.group].1);
        let param = slot.var.as_tensor().clone();
        let item = Item { param, grad: &gradient.tensor, state, scalars, start, offset };
        let source =
            Source { rule: R::info(&groups[0].1).name, update: R::UPDATE.unwrap_or(""), buffers, dtype };
        match programs.iter_mut().find(|(known, _)| *known == source) {
            Some((_, items)) => items.push(item),
            None => programs.push((source, vec![item])),
        }
    }
    programs
}

impl<R: Rule> Optimizer for Optim<R> {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.take_step(grads, context, &Deferred::default())
    }

    fn step_deferred(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        self.take_step(grads, context, deferred)
    }

    fn settle(&mut self) -> Result<()> {
        let Some(engine) = &self.engine else { return Ok(()) };
        let what = match engine.faults()? {
            (true, _) => "the loss was not finite, or f + c was not positive",
            (_, true) => "the norm of the gradient was not finite",
            (false, false) => return Ok(()),
        };
        Err(Error::Refused { optimizer: self.info().name.to_owned(), what })
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
        slot::load(&mut self.slots, self.engine.as_ref(), state, name, R::MEMORY)
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
        Ok(self.take_step(grads, &StepContext::new(), &Deferred::default())?)
    }

    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        let deferred = if R::NEEDS_LOSS { Deferred::default().loss(loss) } else { Deferred::default() };
        Ok(self.take_step(&loss.backward()?, &StepContext::new(), &deferred)?)
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}
