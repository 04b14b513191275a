//! The driver: everything an optimizer does besides its arithmetic, once for all rules.
pub(crate) mod cpu;
mod groups;

pub use groups::Group;
pub(crate) use groups::{compile, configure};

use crate::probe::{Distribution, ParamProbe, Probe};
use crate::rule::{Config, Input, Refusal, Rule, SUMS};
use crate::state::{Header, ParamScalars, StateDict};
use crate::{Error, Info, Optimizer, ParamInfo, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Storage, Tensor, Var};
use cpu::{Clip, Update};
use half::{bf16, f16};
use serde_json::Value;
use std::collections::BTreeSet;

/// State buffers of one parameter: f64 for f64 parameters, f32 for all others.
#[derive(Debug)]
pub(crate) enum Buffers {
    F32(Vec<Vec<f32>>),
    F64(Vec<Vec<f64>>),
}

impl Buffers {
    fn zeros(dtype: DType, buffers: usize, elements: usize) -> Self {
        match dtype {
            DType::F64 => Self::F64(vec![vec![0.0; elements]; buffers]),
            _ => Self::F32(vec![vec![0.0; elements]; buffers]),
        }
    }

    fn fill(&mut self, values: &[f64]) {
        match self {
            Self::F32(b) => b.iter_mut().zip(values).for_each(|(b, v)| b.fill(*v as f32)),
            Self::F64(b) => b.iter_mut().zip(values).for_each(|(b, v)| b.fill(*v)),
        }
    }

    /// All buffers, one after another, in f64.
    fn widened(&self) -> Vec<Vec<f64>> {
        match self {
            Self::F32(b) => b.iter().map(|b| b.iter().map(|v| f64::from(*v)).collect()).collect(),
            Self::F64(b) => b.clone(),
        }
    }

    fn tensors(&self, var: &Var) -> candle_core::Result<Vec<Tensor>> {
        match self {
            Self::F32(b) => b.iter().map(|b| Tensor::from_slice(b, var.shape(), &Device::Cpu)).collect(),
            Self::F64(b) => b.iter().map(|b| Tensor::from_slice(b, var.shape(), &Device::Cpu)).collect(),
        }
    }
}

/// A parameter with its state.
#[derive(Debug)]
pub(crate) struct Slot {
    name: String,
    var: Var,
    group: usize,
    t: u64,
    memory: Vec<f64>,
    buffers: Buffers,
}

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
        let mut all = vec![(None, config.clone())];
        let mut claimed: Vec<Option<usize>> = vec![None; params.len()];
        for group in groups {
            let pattern = group.pattern()?;
            let refuse = |message| Error::Group { pattern: group.pattern.clone(), message };
            let mut matched = false;
            for (claim, (name, _)) in claimed.iter_mut().zip(&params) {
                if pattern.is_match(name) {
                    if let Some(other) = claim {
                        let other: &Group = &groups[*other - 1];
                        let message = format!("parameter `{name}` also belongs to group `{}`", other.pattern);
                        return Err(refuse(message));
                    }
                    *claim = Some(all.len());
                    matched = true;
                }
            }
            if !matched {
                let names: Vec<_> = params.iter().take(8).map(|(n, _)| n.as_str()).collect();
                return Err(refuse(format!(
                    "matches none of the {} parameters ({}, …)",
                    params.len(),
                    names.join(", ")
                )));
            }
            all.push((Some(group.pattern.clone()), configure::<R>(&config, &group.overrides)?));
        }
        let (mut names, mut ids) = (BTreeSet::new(), Vec::new());
        let mut slots = Vec::with_capacity(params.len());
        for ((name, var), claim) in params.into_iter().zip(claimed) {
            if !names.insert(name.clone()) || ids.contains(&var.id()) {
                return Err(Error::DuplicateParameter(name));
            }
            ids.push(var.id());
            if !matches!(var.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
                return Err(Error::DType { name, found: var.dtype() });
            }
            if !var.device().is_cpu() {
                return Err(Error::Device { name, device: format!("{:?}", var.device().location()) });
            }
            let group = claim.unwrap_or(0);
            let count = R::buffers(&all[group].1).len();
            if count < R::BUFFERS.0 || count > R::BUFFERS.1 {
                let message = format!("expected {:?} state buffers, found {count}", R::BUFFERS);
                let optimizer = R::info(&config).name.to_owned();
                return Err(Error::Hyperparameter { optimizer, key: "BUFFERS".into(), message });
            }
            let buffers = Buffers::zeros(var.dtype(), count, var.elem_count());
            slots.push(Slot { name, var, group, t: 0, memory: vec![0.0; R::MEMORY.len()], buffers });
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

    /// The gradients of this step by slot: contiguous, checked, sharing storage with no parameter.
    fn gradients(&self, grads: &GradStore) -> Result<Vec<Update<()>>> {
        let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0) as usize;
        let params: BTreeSet<usize> = self.slots.iter().map(|slot| address(&slot.var)).collect();
        let mut updates = Vec::with_capacity(self.slots.len());
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(grad) = grads.get(&slot.var) else { continue };
            if grad.shape() != slot.var.shape() || grad.dtype() != slot.var.dtype() {
                let describe = |t: &Tensor| format!("{:?} {:?}", t.dims(), t.dtype());
                let (expected, found) = (describe(&slot.var), describe(grad));
                return Err(Error::Gradient { name: slot.name.clone(), expected, found });
            }
            let mut grad = grad.contiguous()?;
            if params.contains(&address(&grad)) {
                grad = grad.copy()?;
            }
            updates.push(Update { slot: index, grad, scalars: () });
        }
        Ok(updates)
    }

    fn take_step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        let base_lr = context.lr.unwrap_or(self.lr);
        context.check(base_lr)?;
        let clip = Clip { scale: context.grad_scale, limit: context.grad_limit };
        let updates = self.gradients(grads)?;
        if R::NEEDS_LOSS && context.loss.is_none() {
            return Err(self.refused(Refusal::MissingLoss));
        }
        let sums = if R::REDUCES { self.sums(&updates, clip)? } else { [0.0; SUMS] };
        if let Some(found) = sums.into_iter().find(|sum| !sum.is_finite()) {
            return Err(Error::Context {
                what: "norm over all gradients",
                expected: "a finite number",
                found,
            });
        }
        // Everything that can be refused is refused before anything changes.
        let factor = base_lr / self.groups[0].1.lr();
        let mut prepared = Vec::with_capacity(updates.len());
        for Update { slot: index, grad, .. } in updates {
            let slot = &self.slots[index];
            let config = &self.groups[slot.group].1;
            // The default group takes the rate as it is; 0 / 0 would be no ratio.
            let lr = match slot.group {
                0 => base_lr,
                _ if factor.is_finite() => config.lr() * factor,
                _ => config.lr(),
            };
            let input = Input {
                t: slot.t.saturating_add(1),
                lr,
                momentum: context.momentum,
                loss: context.loss,
                sums,
            };
            let mut memory = slot.memory.clone();
            let scalars = R::prepare(config, &input, &mut memory).map_err(|r| self.refused(r))?;
            let start = match slot.t {
                0 => Some(R::start(config, &input).map_err(|r| self.refused(r))?),
                _ => None,
            };
            prepared.push((Update { slot: index, grad, scalars }, memory, start));
        }
        let before =
            if context.probe { self.snapshot(prepared.iter().map(|(u, ..)| u.slot))? } else { Vec::new() };
        let mut updates = Vec::with_capacity(prepared.len());
        for (update, memory, start) in prepared {
            let slot = &mut self.slots[update.slot];
            if let Some(start) = start.filter(|s| s.iter().any(|v| *v != 0.0)) {
                slot.buffers.fill(&start);
            }
            slot.memory = memory;
            slot.t = slot.t.saturating_add(1);
            updates.push(update);
        }
        self.launch(&updates, clip)?;
        if context.probe {
            self.probe = Some(self.measure(&updates, &before)?);
        }
        Ok(())
    }

    /// Runs the kernel of each dtype over its parameters; as a rule there is one dtype.
    fn launch(&mut self, updates: &[Update<R::Scalars>], clip: Clip) -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let updates: Vec<_> = updates.iter().filter(|u| u.grad.dtype() == dtype).collect();
            match dtype {
                _ if updates.is_empty() => (),
                DType::F32 => cpu::step::<f32, R>(&mut self.slots, &updates, clip)?,
                DType::F64 => cpu::step::<f64, R>(&mut self.slots, &updates, clip)?,
                DType::F16 => cpu::step::<f16, R>(&mut self.slots, &updates, clip)?,
                _ => cpu::step::<bf16, R>(&mut self.slots, &updates, clip)?,
            }
        }
        Ok(())
    }

    /// The sums of [`Rule::reduce`], dtype by dtype. A parameter at its first step has no past to compare with.
    fn sums(&self, updates: &[Update<()>], clip: Clip) -> Result<[f64; SUMS]> {
        let mut total = [0.0; SUMS];
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let moved = |u: &&Update<()>| u.grad.dtype() == dtype && self.slots[u.slot].t > 0;
            let updates: Vec<_> = updates.iter().filter(moved).collect();
            let sums = match dtype {
                _ if updates.is_empty() => continue,
                DType::F32 => cpu::reduce::<f32, R>(&self.slots, &updates, clip)?,
                DType::F64 => cpu::reduce::<f64, R>(&self.slots, &updates, clip)?,
                DType::F16 => cpu::reduce::<f16, R>(&self.slots, &updates, clip)?,
                _ => cpu::reduce::<bf16, R>(&self.slots, &updates, clip)?,
            };
            total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
        }
        Ok(total)
    }

    fn snapshot(&self, slots: impl Iterator<Item = usize>) -> Result<Vec<Vec<f64>>> {
        slots.map(|slot| values(&self.slots[slot].var)).collect()
    }

    fn measure(&self, updates: &[Update<R::Scalars>], before: &[Vec<f64>]) -> Result<Probe> {
        let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
        let mut params = Vec::with_capacity(updates.len());
        for (update, before) in updates.iter().zip(before) {
            let slot = &self.slots[update.slot];
            let after = values(&slot.var)?;
            let change = norm(&mut after.iter().zip(before).map(|(a, b)| a - b));
            let size = norm(&mut before.iter().copied());
            let buffers = slot.buffers.widened();
            let means: Vec<f64> =
                buffers.iter().map(|b| b.iter().sum::<f64>() / b.len().max(1) as f64).collect();
            let mut state = vec![0.0; buffers.len()];
            let mut observe = |i: usize| {
                state.iter_mut().zip(&buffers).for_each(|(s, buffer)| *s = buffer[i]);
                R::observe(&update.scalars, &state)
            };
            let observed = R::OBSERVED.and_then(|name| {
                Some((name, Distribution::of((0..after.len()).map(&mut observe).collect())?))
            });
            params.push(ParamProbe {
                name: slot.name.clone(),
                update_ratio: if change == 0.0 { 0.0 } else { change / size },
                observed,
                numbers: R::report(&update.scalars, &means),
            });
        }
        Ok(Probe { params })
    }
}

fn values(var: &Var) -> Result<Vec<f64>> {
    Ok(var.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
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
        let mut state = StateDict::default();
        state.header.optimizer = self.info().name.to_owned();
        for slot in &self.slots {
            let memory = R::MEMORY.iter().zip(&slot.memory).map(|(name, value)| (name.to_string(), *value));
            let scalars = ParamScalars { t: slot.t, memory: memory.collect() };
            state.header.params.insert(slot.name.clone(), scalars);
            let names = R::buffers(&self.groups[slot.group].1);
            for (name, tensor) in names.iter().zip(slot.buffers.tensors(&slot.var)?) {
                state.tensors.insert(format!("{}.{name}", slot.name), tensor);
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let mut differences = Vec::new();
        let Header { optimizer, params, .. } = &state.header;
        if optimizer != self.info().name {
            differences.push(format!("optimizer: expected {}, found {optimizer}", self.info().name));
        }
        let mut known = BTreeSet::new();
        let mut loaded = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let Some(scalars) = params.get(&slot.name) else {
                differences.push(format!("parameter `{}` is missing", slot.name));
                continue;
            };
            let memory = R::MEMORY.iter().map(|name| scalars.memory.get(*name).copied());
            let memory: Option<Vec<f64>> = memory.collect();
            if memory.is_none() {
                differences.push(format!("parameter `{}`: expected the scalars {:?}", slot.name, R::MEMORY));
            }
            let dtype = if slot.var.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            let mut tensors = Vec::new();
            for name in R::buffers(&self.groups[slot.group].1) {
                let name = format!("{}.{name}", slot.name);
                match state.tensors.get(&name) {
                    None => differences.push(format!("buffer `{name}` is missing")),
                    Some(t) if t.shape() != slot.var.shape() || t.dtype() != dtype => {
                        differences.push(format!(
                            "buffer `{name}`: expected {:?} {dtype:?}, found {:?} {:?}",
                            slot.var.dims(),
                            t.dims(),
                            t.dtype()
                        ))
                    }
                    Some(t) => tensors.push(t.flatten_all()?),
                }
                known.insert(name);
            }
            loaded.push((scalars.t, memory.unwrap_or_default(), tensors));
        }
        for name in params.keys().filter(|name| !self.slots.iter().any(|s| s.name == **name)) {
            differences.push(format!("parameter `{name}` is not one of this optimizer's"));
        }
        for name in state.tensors.keys().filter(|name| !known.contains(*name)) {
            differences.push(format!("buffer `{name}` is not one of this optimizer's"));
        }
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        let read = |dtype, tensors: &[Tensor]| -> candle_core::Result<Buffers> {
            Ok(match dtype {
                DType::F64 => Buffers::F64(tensors.iter().map(Tensor::to_vec1).collect::<Result<_, _>>()?),
                _ => Buffers::F32(tensors.iter().map(Tensor::to_vec1).collect::<Result<_, _>>()?),
            })
        };
        let buffers =
            self.slots.iter().zip(&loaded).map(|(slot, (.., tensors))| read(slot.var.dtype(), tensors));
        let buffers = buffers.collect::<candle_core::Result<Vec<_>>>()?;
        for ((slot, (t, memory, _)), buffers) in self.slots.iter_mut().zip(loaded).zip(buffers) {
            (slot.t, slot.memory, slot.buffers) = (t, memory, buffers);
        }
        Ok(())
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
