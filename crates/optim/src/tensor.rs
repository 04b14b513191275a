//! Rules that need whole tensors: matrices, norms after the update, other weights for evaluation, a second gradient, history.
use crate::clip::global_norm_of;
use crate::driver::cpu::not_finite;
use crate::driver::groups::claim;
use crate::driver::measure::update_ratio;
use crate::driver::slot::{order, values};
use crate::driver::{Group, Hyper, fields};
use crate::optimizer::{Evaluated, one_element};
use crate::probe::{ParamProbe, Probe};
use crate::rule::{Config, Info, Reach};
use crate::state::{Load, ParamScalars, StateDict};
use crate::{Error, Optimizer, ParamInfo, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Storage, Tensor, Var};
use candle_nn::VarMap;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

/// What a rule keeps between steps, by name: for a parameter, or for the optimizer as a whole.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Tensors of any shape. Names have no dot.
    pub tensors: BTreeMap<&'static str, Tensor>,
    /// Tensors of one shape, the oldest first: a history that need not be copied to grow. Saved as one tensor.
    pub lists: BTreeMap<&'static str, Vec<Tensor>>,
    /// Numbers.
    pub numbers: BTreeMap<&'static str, f64>,
}

impl Memory {
    /// A number, 0 at first.
    pub fn number(&self, name: &str) -> f64 {
        self.numbers.get(name).copied().unwrap_or(0.0)
    }

    /// A tensor, or zeros like `like` at first.
    pub fn tensor(&self, name: &str, like: &Tensor) -> Result<Tensor> {
        Ok(match self.tensors.get(name) {
            Some(tensor) => tensor.clone(),
            None => like.zeros_like()?,
        })
    }
}

/// A parameter in a step of a [`TensorRule`].
#[derive(Debug)]
pub struct TensorParam<'a, C> {
    /// Its name.
    pub name: &'a str,
    /// The hyperparameters of its group.
    pub config: &'a C,
    /// The number of this step, from 1, counted for this parameter.
    pub t: u64,
    /// The learning rate of this step.
    pub lr: f64,
    /// The momentum of this step.
    pub momentum: f64,
    /// Its value; in f32 for a parameter of half precision.
    pub x: Tensor,
    /// Its gradient, scaled and clipped, in the dtype of `x`.
    pub g: Tensor,
    /// What the rule keeps for it. Changes count if the step succeeds.
    pub memory: Memory,
    pub(crate) new: Option<Tensor>,
}

impl<C> TensorParam<'_, C> {
    /// What the parameter is to be after the step.
    pub fn set(&mut self, x: Tensor) {
        self.new = Some(x);
    }
}

/// A step of a [`TensorRule`]: all parameters that have a gradient.
#[derive(Debug)]
pub struct TensorStep<'a, C> {
    /// The parameters.
    pub params: Vec<TensorParam<'a, C>>,
    /// What the rule keeps for all of them together.
    pub shared: Memory,
    /// The loss of the batch, if it was given.
    pub loss: Option<f64>,
}

/// The weights for evaluation of a parameter.
pub type Evaluation<C> = fn(&TensorParam<C>) -> Result<Tensor>;
/// A point for each parameter of a step.
pub type Second<C> = fn(&TensorStep<C>) -> Result<Vec<Tensor>>;

/// An optimizer's arithmetic on whole tensors, in candle's ops or ops of your own. Groups, rates, clipping, state and saving are
/// [`TensorOptim`]'s.
///
/// Nothing a rule does has an effect before it returns `Ok`: it works on copies of its memory and on tensors that nobody
/// else changes.
pub trait TensorRule: Debug + Send + Sync + 'static {
    /// The hyperparameters.
    type Config: Config;
    /// Whether [`TensorStep::loss`] must be there.
    const NEEDS_LOSS: bool = false;
    /// Where the weights for evaluation are, if they are not those that are trained: from a parameter after its step, whose `g`
    /// is zero.
    const EVALUATION: Option<Evaluation<Self::Config>> = None;
    /// Where a second gradient of the batch is taken, for rules that step with it instead of the first: a point for each parameter.
    const SECOND: Option<Second<Self::Config>> = None;
    /// How far it looks: [`Reach::Parameter`] for a rule that steps every parameter by itself.
    const REACH: Reach = Reach::All;
    /// Names of what it keeps in [`TensorStep::shared`].
    const SHARED: &'static [&'static str] = &[];
    /// Those of all its names that are [`Memory::lists`].
    const LISTS: &'static [&'static str] = &[];

    /// The names this rule is registered under, each with its defaults.
    fn names() -> Vec<(&'static Info, Self::Config)>;
    /// The record that fits a configuration.
    fn info(config: &Self::Config) -> &'static Info;
    /// Names of what it keeps in [`TensorParam::memory`].
    fn buffers(config: &Self::Config) -> &'static [&'static str];
    /// Those of them that are as large as the parameter: all, unless said otherwise.
    fn sized(config: &Self::Config) -> &'static [&'static str] {
        Self::buffers(config)
    }
    /// One step: changes memory and calls [`TensorParam::set`]. A parameter that is not set stays.
    fn step(step: &mut TensorStep<Self::Config>) -> Result<()>;
}

/// An optimizer: a [`TensorRule`] applied to named parameters, on any device.
#[derive(Debug)]
pub struct TensorOptim<R: TensorRule> {
    hyper: Hyper<R::Config>,
    slots: Vec<Slot>,
    shared: Memory,
    by_position: bool,
    /// The weights that are trained, while those for evaluation are in place.
    trained: Option<Vec<Tensor>>,
    probe: Option<Probe>,
}

#[derive(Debug)]
struct Slot {
    name: String,
    var: Var,
    group: usize,
    t: u64,
    memory: Memory,
}

/// What a step makes of parameters and memory.
#[derive(Debug)]
pub(crate) struct Proposal {
    /// Slot, value and memory; `None` for a parameter that stays.
    news: Vec<(usize, Option<Tensor>, Memory)>,
    shared: Memory,
    /// The parameters before, for a probe.
    before: Option<Vec<Vec<f64>>>,
}

/// What shared tensors are saved under.
const SHARED: &str = "<shared>";

impl<R: TensorRule> TensorOptim<R> {
    /// An optimizer over all floating-point variables of a map, by their names.
    pub fn from_varmap(vars: &VarMap, config: R::Config) -> Result<Self> {
        let named = vars.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let floats = named.iter().filter(|(_, var)| var.dtype().is_float());
        let mut params: Vec<_> = floats.map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(named);
        params.sort_by(|a, b| a.0.cmp(&b.0));
        Self::with_groups(params, config, &[])
    }

    /// An optimizer over `params` with one group.
    pub fn with_params(params: Vec<(String, Var)>, config: R::Config) -> Result<Self> {
        Self::with_groups(params, config, &[])
    }

    /// An optimizer over variables without names; see [`Optim::new`](crate::Optim::new).
    pub fn new(vars: Vec<Var>, config: R::Config) -> Result<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        let params = floats.enumerate().map(|(i, var)| (i.to_string(), var)).collect();
        Ok(Self { by_position: true, ..Self::with_params(params, config)? })
    }

    /// An optimizer over `params`, where `groups` differ from `config`.
    pub fn with_groups(params: Vec<(String, Var)>, config: R::Config, groups: &[Group]) -> Result<Self> {
        let hyper = Hyper::new(R::info(&config).name, config, groups)?;
        let claimed = claim(&params, groups)?;
        let mut slots = Vec::with_capacity(params.len());
        for ((name, var), group) in params.into_iter().zip(claimed) {
            if !matches!(var.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
                return Err(Error::DType { name, found: var.dtype() });
            }
            slots.push(Slot { name, var, group, t: 0, memory: Memory::default() });
        }
        let (shared, by_position, trained, probe) = (Memory::default(), false, None, None);
        Ok(Self { hyper, slots, shared, by_position, trained, probe })
    }

    /// The hyperparameters of the default group.
    pub fn hyperparameters(&self) -> &R::Config {
        self.hyper.default()
    }

    /// The backward pass of a loss, and a step that knows it.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_step_with(loss, &StepContext::new())
    }

    /// As [`TensorOptim::backward_step`], with a schedule's factor, clipping, …
    pub fn backward_step_with(&mut self, loss: &Tensor, context: &StepContext) -> Result<()> {
        let loss = one_element(loss)?;
        let context = crate::Deferred::default().loss(&loss).read_into(*context)?;
        self.take_step(&loss.backward()?, &context, None)
    }

    /// Updates every parameter that has a gradient. After an error nothing has changed.
    pub fn step_with(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.take_step(grads, context, None)
    }

    fn name(&self) -> &'static str {
        R::info(self.hyperparameters()).name
    }

    /// The step as the rule sees it, and the slots of its parameters.
    fn prepare(
        &self,
        grads: &GradStore,
        context: &StepContext,
    ) -> Result<(Vec<usize>, TensorStep<'_, R::Config>)> {
        let name = self.name();
        context.check(name, self.hyper.base(context))?;
        if self.trained.is_some() {
            return Err(Error::Evaluating(name.to_owned()));
        }
        if R::NEEDS_LOSS && context.loss.is_none() {
            return Err(Error::MissingLoss(name.to_owned()));
        }
        let (mut indices, mut tensors) = (Vec::new(), Vec::new());
        for (index, slot) in self.slots.iter().enumerate() {
            let Some(grad) = grads.get(&slot.var) else { continue };
            indices.push(index);
            tensors.push(fitting(&slot.name, &slot.var, grad)?);
        }
        let context = self.look_through(&indices, &tensors, *context)?;
        let mut params = Vec::with_capacity(indices.len());
        for (index, grad) in indices.iter().zip(tensors) {
            let slot = &self.slots[*index];
            let wide = wide(slot.var.dtype());
            let mut g = grad.to_dtype(wide)?;
            if context.grad_scale != 1.0 {
                g = (g * context.grad_scale)?;
            }
            if context.grad_limit.is_finite() {
                g = g.clamp(-context.grad_limit, context.grad_limit)?;
            }
            params.push(TensorParam {
                name: &slot.name,
                config: &self.hyper.groups[slot.group].1,
                t: slot.t.saturating_add(1),
                lr: self.hyper.rate(slot.group, &context),
                momentum: self.hyper.momentum(slot.group, &context)?,
                x: slot.var.as_detached_tensor().to_dtype(wide)?,
                g,
                memory: slot.memory.clone(),
                new: None,
            });
        }
        Ok((indices, TensorStep { params, shared: self.shared.clone(), loss: context.loss }))
    }

    /// Refuses gradients that are not finite, and clips their norm.
    fn look_through(&self, indices: &[usize], grads: &[Tensor], context: StepContext) -> Result<StepContext> {
        let on_cpu = grads.iter().all(|grad| grad.device().is_cpu());
        if context.max_norm.is_some() || context.check && !on_cpu {
            let norm = global_norm_of(grads.iter())?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
            let norm = norm.to_scalar::<f64>()? * context.grad_scale.abs();
            let context = context.clip_norm(norm, context.max_norm.unwrap_or(f64::INFINITY));
            context.check(self.name(), self.hyper.base(&context))?;
            return Ok(context);
        }
        match context.check.then(|| not_finite(grads, context.grad_scale)).transpose()?.flatten() {
            Some(i) => Err(Error::GradientNotFinite(self.slots[indices[i]].name.clone())),
            None => Ok(context),
        }
    }

    fn take_step(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        again: Option<&mut dyn FnMut() -> Result<Evaluated>>,
    ) -> Result<()> {
        let proposal = self.propose(grads, context, again)?;
        self.accept(proposal)
    }

    /// A step that has changed nothing yet: all that can be refused is refused here.
    pub(crate) fn propose(
        &self,
        grads: &GradStore,
        context: &StepContext,
        again: Option<&mut dyn FnMut() -> Result<Evaluated>>,
    ) -> Result<Proposal> {
        let (indices, mut step) = self.prepare(grads, context)?;
        if let Some(points) = R::SECOND {
            let again = again.ok_or_else(|| Error::SecondGradient(self.name().to_owned()))?;
            let points = points(&step)?;
            if points.len() != indices.len() {
                let (expected, found) = (indices.len(), points.len());
                return Err(wrong(format!(
                    "expected {expected} points for a second gradient, found {found}"
                )));
            }
            let vars = indices.iter().zip(points).map(|(i, point)| (self.slots[*i].var.clone(), point));
            let displaced = Displaced::put(vars)?;
            let second = again();
            displaced.restore()?;
            let second = second?;
            (_, step) =
                self.prepare(&second.grads, &StepContext { loss: second.loss.or(context.loss), ..*context })?;
            if step.params.len() != indices.len() {
                let (expected, found) = (indices.len(), step.params.len());
                return Err(wrong(format!(
                    "expected {expected} second gradients, as first ones, found {found}"
                )));
            }
        }
        if !step.params.is_empty() {
            R::step(&mut step)?;
        }
        let TensorStep { params, shared, .. } = step;
        let mut news = Vec::with_capacity(params.len());
        for (index, param) in indices.iter().zip(params) {
            let var = &self.slots[*index].var;
            let new = match param.new {
                Some(new) if new.shape() != var.shape() => {
                    let (expected, found) = (format!("{:?}", var.dims()), format!("{:?}", new.dims()));
                    return Err(Error::Parameter { name: param.name.to_owned(), expected, found });
                }
                // A copy if the rule gives back what it got.
                Some(new) => Some(apart(&self.slots, new.detach().to_dtype(var.dtype())?)?),
                None => None,
            };
            news.push((*index, new, self.own(param.memory)?));
        }
        let shared = self.own(shared)?;
        let before = match context.probe {
            true => Some(news.iter().map(|(i, ..)| values(&self.slots[*i].var)).collect::<Result<Vec<_>>>()?),
            false => None,
        };
        Ok(Proposal { news, shared, before })
    }

    /// Takes the step.
    pub(crate) fn accept(&mut self, proposal: Proposal) -> Result<()> {
        let Proposal { news, shared, before } = proposal;
        let indices: Vec<usize> = news.iter().map(|(index, ..)| *index).collect();
        for (index, new, memory) in news {
            let slot = &mut self.slots[index];
            if let Some(new) = new {
                slot.var.set(&new)?;
            }
            slot.memory = memory;
            slot.t = slot.t.saturating_add(1);
        }
        self.shared = shared;
        if let Some(before) = before {
            // The step has been taken: a probe that cannot be read is no error of it.
            self.probe = self.measure(&indices, &before).ok();
        }
        Ok(())
    }

    /// Memory that shares no storage with a parameter, whose change would change it.
    fn own(&self, mut memory: Memory) -> Result<Memory> {
        let lists = memory.lists.iter_mut().flat_map(|(name, list)| list.iter_mut().map(move |t| (name, t)));
        for (name, tensor) in memory.tensors.iter_mut().chain(lists) {
            if name.contains('.') {
                return Err(wrong(format!(
                    "expected a name without a dot for what a rule keeps, found `{name}`"
                )));
            }
            *tensor = apart(&self.slots, tensor.detach().contiguous()?)?;
        }
        Ok(memory)
    }

    fn measure(&self, indices: &[usize], before: &[Vec<f64>]) -> Result<Probe> {
        let mut params = Vec::with_capacity(indices.len());
        for (index, before) in indices.iter().zip(before) {
            let slot = &self.slots[*index];
            let update_ratio = update_ratio(before, &values(&slot.var)?);
            params.push(ParamProbe {
                name: slot.name.clone(),
                update_ratio,
                observed: None,
                numbers: Vec::new(),
            });
        }
        Ok(Probe { params })
    }
}

/// A mistake of a rule or of a closure.
fn wrong(what: String) -> Error {
    Error::Candle(candle_core::Error::Msg(what))
}

/// A gradient, if it fits its parameter.
pub(crate) fn fitting(name: &str, var: &Var, grad: &Tensor) -> Result<Tensor> {
    // The gradient of a half may be wider than it.
    let wider = wide(var.dtype()) == DType::F32 && grad.dtype() == DType::F32;
    let fits = grad.shape() == var.shape() && (grad.dtype() == var.dtype() || wider);
    if fits && grad.device().same_device(var.device()) {
        return Ok(grad.detach().contiguous()?);
    }
    let describe = |t: &Tensor| match fits {
        true => format!("a tensor on {:?}", t.device().location()),
        false => format!("{:?} {:?}", t.dims(), t.dtype()),
    };
    Err(Error::Gradient { name: name.to_owned(), expected: describe(var), found: describe(grad) })
}

/// The dtype that a parameter's updates are computed in.
pub(crate) fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// A tensor that shares no storage with a parameter.
fn apart(slots: &[Slot], tensor: Tensor) -> Result<Tensor> {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0) as usize;
    let at = address(&tensor);
    Ok(if slots.iter().any(|slot| address(&slot.var) == at) { tensor.copy()? } else { tensor })
}

/// Parameters that are somewhere else for a while. They come back when this is dropped, whatever happened.
#[derive(Debug)]
pub struct Displaced(Vec<(Var, Tensor)>);

impl Displaced {
    /// Puts each variable where it is to be. After an error all are where they were.
    pub fn put(vars: impl IntoIterator<Item = (Var, Tensor)>) -> Result<Self> {
        let mut displaced = Self(Vec::new());
        for (var, to) in vars {
            let to = apart_from(&var, to.detach().to_dtype(var.dtype())?)?;
            let was = var.copy()?;
            displaced.0.push((var.clone(), was));
            var.set(&to)?;
        }
        Ok(displaced)
    }

    /// Leaves them where they are, and tells where they were.
    pub(crate) fn stay(mut self) -> Vec<Tensor> {
        std::mem::take(&mut self.0).into_iter().map(|(_, was)| was).collect()
    }

    /// Puts them back.
    pub fn restore(mut self) -> Result<()> {
        let places = std::mem::take(&mut self.0);
        Ok(places.iter().try_for_each(|(var, was)| var.set(was))?)
    }
}

impl Drop for Displaced {
    fn drop(&mut self) {
        // It has been there before: shape, dtype and device fit.
        self.0.drain(..).for_each(|(var, was)| drop(var.set(&was)));
    }
}

fn apart_from(var: &Var, tensor: Tensor) -> Result<Tensor> {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0) as usize;
    Ok(if address(var) == address(&tensor) { tensor.copy()? } else { tensor })
}

impl<R: TensorRule> Optimizer for TensorOptim<R> {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.take_step(grads, context, None)
    }
    fn gradients(&self) -> usize {
        if R::SECOND.is_some() { 2 } else { 1 }
    }
    fn step_twice(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        again: &mut dyn FnMut() -> Result<Evaluated>,
    ) -> Result<()> {
        self.take_step(grads, context, Some(again))
    }
    fn eval_weights(&mut self) -> Result<bool> {
        let Some(evaluation) = R::EVALUATION else { return Ok(false) };
        if self.trained.is_some() {
            return Ok(true);
        }
        let mut weights = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let x = slot.var.as_detached_tensor().to_dtype(wide(slot.var.dtype()))?;
            // Before its first step a parameter is its own average.
            let weight = match slot.t {
                0 => slot.var.copy()?,
                t => evaluation(&TensorParam {
                    name: &slot.name,
                    config: &self.hyper.groups[slot.group].1,
                    t,
                    lr: self.hyper.rate(slot.group, &StepContext::new()),
                    momentum: self.hyper.momentum(slot.group, &StepContext::new())?,
                    g: x.zeros_like()?,
                    x,
                    memory: slot.memory.clone(),
                    new: None,
                })?,
            };
            weights.push(weight);
        }
        let vars = self.slots.iter().map(|slot| slot.var.clone());
        // They stay there: not even the end of the optimizer puts them back.
        self.trained = Some(Displaced::put(vars.zip(weights))?.stay());
        Ok(true)
    }
    fn train_weights(&mut self) -> Result<()> {
        if let Some(trained) = &self.trained {
            self.slots.iter().zip(trained).try_for_each(|(slot, trained)| slot.var.set(trained))?;
        }
        self.trained = None;
        Ok(())
    }
    fn info(&self) -> &'static Info {
        R::info(self.hyperparameters())
    }
    fn needs_loss(&self) -> bool {
        R::NEEDS_LOSS
    }
    fn config(&self) -> Value {
        Value::Object(fields(self.hyperparameters()))
    }
    fn lr(&self) -> f64 {
        self.hyper.lr
    }
    fn set_lr(&mut self, lr: f64) {
        self.hyper.lr = lr;
    }
    fn params(&self) -> Vec<ParamInfo> {
        let info = |slot: &Slot| ParamInfo {
            name: slot.name.clone(),
            elements: slot.var.elem_count(),
            group: self.hyper.groups[slot.group].0.clone(),
        };
        self.slots.iter().map(info).collect()
    }

    fn state_dict(&self) -> Result<StateDict> {
        if self.trained.is_some() {
            return Err(Error::Evaluating(self.name().to_owned()));
        }
        let mut state = StateDict::default();
        self.hyper.save(self.name(), &mut state.header)?;
        state.header.by_position = Some(self.by_position);
        let numbers =
            |memory: &Memory| memory.numbers.iter().map(|(name, v)| (name.to_string(), *v)).collect();
        state.header.shared = numbers(&self.shared);
        let mut tensors = |of: &str, memory: &Memory| -> Result<()> {
            for (name, tensor) in &memory.tensors {
                state.tensors.insert(format!("{of}.{name}"), tensor.to_device(&Device::Cpu)?);
            }
            for (name, list) in memory.lists.iter().filter(|(_, list)| !list.is_empty()) {
                state
                    .tensors
                    .insert(format!("{of}.{name}"), Tensor::stack(list, 0)?.to_device(&Device::Cpu)?);
            }
            Ok(())
        };
        tensors(SHARED, &self.shared)?;
        for slot in &self.slots {
            tensors(&slot.name, &slot.memory)?;
            let scalars = ParamScalars { t: slot.t, group: slot.group, memory: numbers(&slot.memory) };
            state.header.params.insert(slot.name.clone(), scalars);
        }
        Ok(state)
    }

    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let (header, name) = (&state.header, self.name());
        let mut differences = Vec::new();
        differences.extend(order(self.by_position, header, load));
        if header.optimizer != name {
            // Of another optimizer also the hyperparameters are others.
            differences.push(format!("optimizer: expected {name}, found {}", header.optimizer));
        } else if !load.keep_hyperparameters {
            let params = self.slots.iter().map(|slot| (slot.name.as_str(), slot.group));
            differences.extend(self.hyper.differences(header, params));
        }
        let mut known = BTreeSet::new();
        // A rule's names are those it declares: only they are read.
        let mut read = |of: &str,
                        names: &'static [&'static str],
                        numbers: &BTreeMap<String, f64>,
                        device: &Device|
         -> Result<Memory> {
            let mut memory = Memory::default();
            for name in names {
                let key = format!("{of}.{name}");
                if let Some(tensor) = state.tensors.get(&key) {
                    let tensor = tensor.to_device(device)?;
                    if R::LISTS.contains(name) && tensor.rank() > 0 {
                        // Copies: one that is forgotten is to leave memory.
                        let list = (0..tensor.dim(0)?).map(|i| tensor.get(i)?.copy());
                        memory.lists.insert(name, list.collect::<candle_core::Result<_>>()?);
                    } else {
                        memory.tensors.insert(name, tensor);
                    }
                    known.insert(key);
                }
                if let Some(number) = numbers.get(*name) {
                    memory.numbers.insert(name, *number);
                }
            }
            Ok(memory)
        };
        let first = self.slots.first().map_or(Device::Cpu, |slot| slot.var.device().clone());
        let shared = read(SHARED, R::SHARED, &header.shared, &first)?;
        let mut loaded = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            let Some(scalars) = header.params.get(&slot.name) else {
                differences.push(format!("parameter `{}` is missing", slot.name));
                continue;
            };
            let names = R::buffers(&self.hyper.groups[slot.group].1);
            let memory = read(&slot.name, names, &scalars.memory, slot.var.device())?;
            let unknown = scalars.memory.keys().filter(|key| !names.contains(&key.as_str()));
            differences.extend(unknown.map(|key| format!("`{}`: unknown scalar `{key}`", slot.name)));
            loaded.push((scalars.t, memory));
        }
        for name in header.params.keys().filter(|name| !self.slots.iter().any(|s| s.name == **name)) {
            differences.push(format!("parameter `{name}` is not one of this optimizer's"));
        }
        for name in state.tensors.keys().filter(|name| !known.contains(*name)) {
            differences.push(format!("buffer `{name}` is not one of this optimizer's"));
        }
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        for (slot, (t, memory)) in self.slots.iter_mut().zip(loaded) {
            (slot.t, slot.memory) = (t, memory);
        }
        (self.shared, self.trained) = (shared, None);
        if let Some(lr) = header.lr.filter(|_| !load.keep_hyperparameters) {
            self.hyper.lr = lr;
        }
        Ok(())
    }

    fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }
}

/// Existing candle loops work unchanged: parameters are named by their position.
impl<R: TensorRule> candle_nn::Optimizer for TensorOptim<R> {
    type Config = R::Config;

    fn new(vars: Vec<Var>, config: R::Config) -> candle_core::Result<Self> {
        Ok(Self::new(vars, config)?)
    }
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(self.step_with(grads, &StepContext::new())?)
    }
    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ok(self.backward_step(loss)?)
    }
    fn learning_rate(&self) -> f64 {
        self.hyper.lr
    }
    fn set_learning_rate(&mut self, lr: f64) {
        self.hyper.lr = lr;
    }
}
