//! The driver: everything an optimizer does besides its arithmetic, once for all rules.
pub(crate) mod cpu;
pub(crate) mod groups;
pub(crate) mod measure;
pub(crate) mod slot;
pub(crate) mod team;

pub use groups::{Group, Pattern};
pub(crate) use groups::{Hyper, compile, configure, fields};
pub(crate) use slot::Buffers;

use crate::clip::global_norm_of;
use crate::device::Source;
use crate::device::gpu::Engine;
use crate::device::table::{Head, Item};
use crate::optimizer::one_element;
use crate::probe::Probe;
use crate::rule::{Input, Loss, MAX_BUFFERS, Reduce, Refusal, Rule, SUMS, Scalars};
use crate::state::{Load, StateDict};
use crate::{
    Deferred, Displaced, Error, Info, Optimizer, Others, ParamInfo, Precision, Result, Rounding, StepContext,
    Values,
};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use candle_nn::VarMap;
use cpu::{Clip, Gradient};
use serde_json::Value;
use slot::Slot;

/// Steps on a device after which the host asks whether they were taken, if nobody else has.
const UNSETTLED: usize = 4096;

/// An optimizer: a [`Rule`] applied to named parameters.
///
/// All that a loop needs are methods of its own; [`Optimizer`] and [`candle_nn::Optimizer`] have the same for code that takes any
/// optimizer.
#[derive(Debug)]
pub struct Optim<R: Rule> {
    hyper: Hyper<R::Config>,
    slots: Vec<Slot>,
    /// Whether names are places in a list that nobody vouched for.
    by_position: bool,
    precision: Precision,
    /// What takes the steps, unless it is the CPU.
    engine: Option<Engine>,
    /// Counters before each step that a device has not confirmed.
    unsettled: Vec<Vec<Before>>,
    /// The weights that are trained, while those for evaluation are in place.
    trained: Option<Vec<Tensor>>,
    /// Who steps the other parameters, if these are a part of all.
    others: Option<Others>,
    probe: Option<Probe>,
}

/// The counters of a parameter before a step.
#[derive(Debug)]
struct Before {
    slot: usize,
    t: u64,
    memory: Vec<f64>,
}

/// What a step of one parameter takes, before anything has changed.
struct Prepared<R: Rule> {
    scalars: R::Scalars,
    memory: Vec<f64>,
    start: Option<[f64; MAX_BUFFERS]>,
}

impl<R: Rule> Optim<R> {
    /// Fails to compile for a rule with more buffers than there are kernels for.
    const BUFFERS_FIT: () =
        assert!(R::BUFFERS.0 <= R::BUFFERS.1 && R::BUFFERS.1 <= MAX_BUFFERS, "Rule::BUFFERS is out of range");

    /// An optimizer over all floating-point variables of a map, by their names.
    pub fn from_varmap(vars: &VarMap, config: R::Config) -> Result<Self> {
        Self::from_varmap_with_groups(vars, config, &[])
    }

    /// As [`Optim::from_varmap`], where `groups` differ from `config`.
    pub fn from_varmap_with_groups(vars: &VarMap, config: R::Config, groups: &[Group]) -> Result<Self> {
        let named = vars.data().lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let floats = named.iter().filter(|(_, var)| var.dtype().is_float());
        let mut params: Vec<_> = floats.map(|(name, var)| (name.clone(), var.clone())).collect();
        drop(named);
        params.sort_by(|a, b| a.0.cmp(&b.0));
        Self::with_groups(params, config, groups)
    }

    /// An optimizer over `params` with one group.
    pub fn with_params(params: Vec<(String, Var)>, config: R::Config) -> Result<Self> {
        Self::with_groups(params, config, &[])
    }

    /// An optimizer over variables that are given in the same order every time: their places are their names.
    pub fn in_order(vars: Vec<Var>, config: R::Config) -> Result<Self> {
        let floats = vars.into_iter().filter(|var| var.dtype().is_float());
        Self::with_params(floats.enumerate().map(|(i, var)| (i.to_string(), var)).collect(), config)
    }

    /// An optimizer over variables without names, as candle's are made. Its state is not loaded again without
    /// [`Load::same_order`]: `VarMap::all_vars` gives another order every time. Prefer [`Optim::from_varmap`].
    pub fn new(vars: Vec<Var>, config: R::Config) -> Result<Self> {
        Ok(Self { by_position: true, ..Self::in_order(vars, config)? })
    }

    /// An optimizer over `params`, where `groups` differ from `config`. A pattern that matches no parameter and a
    /// parameter that two patterns claim are errors.
    pub fn with_groups(params: Vec<(String, Var)>, config: R::Config, groups: &[Group]) -> Result<Self> {
        let () = Self::BUFFERS_FIT;
        let optimizer = R::info(&config).name;
        let hyper = Hyper::new(optimizer, config, groups)?;
        let claimed = groups::claim(&params, groups)?;
        let engine = slot::engine(&params)?;
        if engine.is_some() && R::UPDATE.is_none() {
            return Err(Error::CpuOnly { optimizer: optimizer.to_owned() });
        }
        let mut slots = Vec::with_capacity(params.len());
        for ((name, var), group) in params.into_iter().zip(claimed) {
            let names = R::buffers(&hyper.groups[group].1);
            if names.len() < R::BUFFERS.0 || names.len() > R::BUFFERS.1 {
                let message = format!("expected {:?} state buffers, found {}", R::BUFFERS, names.len());
                return Err(groups::invalid(optimizer, "BUFFERS", message));
            }
            slots.push(Slot::new(name, var, group, R::MEMORY.len(), names, engine.as_ref())?);
        }
        let (by_position, precision, unsettled) = (false, Precision::default(), Vec::new());
        let (trained, others, probe) = (None, None, None);
        Ok(Self { hyper, slots, by_position, precision, engine, unsettled, trained, others, probe })
    }

    /// With another way to train parameters of half precision.
    pub fn precision(mut self, precision: Precision) -> Result<Self> {
        self.choose_precision(precision)?;
        Ok(self)
    }

    /// The hyperparameters of the default group.
    pub fn hyperparameters(&self) -> &R::Config {
        self.hyper.default()
    }

    /// What the registry knows about it.
    pub fn info(&self) -> &'static Info {
        R::info(self.hyperparameters())
    }

    /// Updates every parameter that has a gradient. After an error nothing has changed.
    pub fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.step_with(grads, &StepContext::new())
    }

    /// As [`Optim::step`], with a loss, a schedule's factor, clipping, …
    pub fn step_with(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.settle_earlier()?;
        self.take_step(grads, context, &Deferred::default())
    }

    /// The backward pass of a loss, and a step that knows it. A loss that is not finite is refused.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_step_with(loss, &StepContext::new())
    }

    /// As [`Optim::backward_step`], with a schedule's factor, clipping, …
    pub fn backward_step_with(&mut self, loss: &Tensor, context: &StepContext) -> Result<()> {
        let loss = one_element(loss)?;
        self.settle_earlier()?;
        self.take_step(&loss.backward()?, context, &Deferred::default().loss(&loss))
    }

    /// The learning rate of the default group.
    pub fn lr(&self) -> f64 {
        self.hyper.lr
    }

    /// Replaces the learning rate of the default group; groups with their own keep their ratio to it.
    pub fn set_lr(&mut self, lr: f64) {
        self.hyper.lr = lr;
    }

    /// The parameters with their groups.
    pub fn params(&self) -> Vec<ParamInfo> {
        let info = |slot: &Slot| ParamInfo {
            name: slot.name.clone(),
            elements: slot.var.elem_count(),
            group: self.hyper.groups[slot.group].0.clone(),
        };
        self.slots.iter().map(info).collect()
    }

    /// All state, with learning rate, hyperparameters and groups: with it, training continues to the bit.
    pub fn state_dict(&self) -> Result<StateDict> {
        self.refuse_while_evaluating()?;
        let mut state = StateDict::default();
        self.hyper.save(self.info().name, &mut state.header)?;
        (state.header.by_position, state.header.precision) = (Some(self.by_position), self.precision);
        slot::save(&self.slots, R::MEMORY, &mut state)?;
        Ok(state)
    }

    /// Replaces all state and the learning rate; what does not fit is refused with every difference.
    pub fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.load_state_dict_with(state, Load::strict())
    }

    /// As [`Optim::load_state_dict`], with differences that are meant.
    pub fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let (header, name) = (&state.header, self.info().name);
        let mut differences = Vec::new();
        let keep = load.keep_hyperparameters;
        differences.extend(slot::order(self.by_position, header, load));
        if header.optimizer != name {
            // Of another optimizer also the hyperparameters are others.
            differences.push(format!("optimizer: expected {name}, found {}", header.optimizer));
        } else if !keep {
            let params = self.slots.iter().map(|slot| (slot.name.as_str(), slot.group));
            differences.extend(self.hyper.differences(header, params));
        }
        if header.precision.master != self.precision.master
            || header.precision.rounding != self.precision.rounding && !keep
        {
            let (ours, saved) = (self.precision, header.precision);
            differences.push(format!("precision: expected {ours:?}, found {saved:?}"));
        }
        // A fault is cleared last: with one, the device leaves everything as it is.
        slot::load(&mut self.slots, self.engine.as_ref(), state, R::MEMORY, differences)?;
        if let Some(lr) = header.lr.filter(|_| !keep) {
            self.hyper.lr = lr;
        }
        self.unsettled.clear();
        self.trained = None;
        match &mut self.engine {
            Some(engine) => engine.clear_faults(),
            None => Ok(()),
        }
    }

    /// The statistics of the last step whose context asked for them; `None` too if they could not be had.
    pub fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }

    /// Waits for the device and returns an error if it refused a step, which then has left no trace.
    pub fn settle(&mut self) -> Result<()> {
        let Some(engine) = &self.engine else { return Ok(()) };
        let (loss, norm) = engine.faults()?;
        let (first, what) = match (loss, norm) {
            (0, 0) => {
                self.unsettled.clear();
                return Ok(());
            }
            (0, norm) => (norm, "a gradient was not finite"),
            (loss, 0) => (loss, "the loss was not finite, or f + c was not positive"),
            (loss, norm) => (loss.min(norm), "a loss or a gradient was not finite"),
        };
        // Of the refused steps, counted from 1, only the counters know on the host.
        let refused = self.unsettled.drain((first as usize - 1).min(self.unsettled.len())..);
        for before in refused.rev().flatten() {
            let slot = &mut self.slots[before.slot];
            (slot.t, slot.memory) = (before.t, before.memory);
        }
        Err(Error::Refused { optimizer: self.info().name.to_owned(), what })
    }

    /// Reports what a device refused in an earlier call.
    fn settle_earlier(&mut self) -> Result<()> {
        if self.unsettled.is_empty() { Ok(()) } else { self.settle() }
    }

    /// Puts the weights for evaluation into the parameters, if the rule has others than those that are trained. True if so.
    pub fn eval_weights(&mut self) -> Result<bool> {
        let Some(evaluation) = R::EVALUATION else { return Ok(false) };
        self.settle_earlier()?;
        if self.trained.is_some() {
            return Ok(true);
        }
        let mut weights = Vec::with_capacity(self.slots.len());
        for slot in &self.slots {
            // Before its first step a parameter is its own average.
            if slot.t == 0 {
                weights.push(slot.var.copy()?);
                continue;
            }
            let config = &self.hyper.groups[slot.group].1;
            let (mut values, buffers) = (slot.values()?, slot.buffers.widened()?);
            let mut state = vec![0.0; buffers.len()];
            for (i, value) in values.iter_mut().enumerate() {
                state.iter_mut().zip(&buffers).for_each(|(s, buffer)| *s = buffer[i]);
                *value = evaluation(config, *value, &state);
            }
            let weight = Tensor::from_vec(values, slot.var.shape(), &Device::Cpu)?;
            weights.push(weight.to_dtype(slot.var.dtype())?.to_device(slot.var.device())?);
        }
        self.trained = Some(Displaced::put(self.slots.iter().map(|s| s.var.clone()).zip(weights))?.stay());
        Ok(true)
    }

    /// Puts the weights that are trained back, to the bit.
    pub fn train_weights(&mut self) -> Result<()> {
        if let Some(trained) = &self.trained {
            self.slots.iter().zip(trained).try_for_each(|(slot, trained)| slot.var.set(trained))?;
        }
        self.trained = None;
        Ok(())
    }

    fn refuse_while_evaluating(&self) -> Result<()> {
        match self.trained {
            Some(_) => Err(Error::Evaluating(self.info().name.to_owned())),
            None => Ok(()),
        }
    }

    fn choose_precision(&mut self, precision: Precision) -> Result<()> {
        let refuse = |what: &str| {
            Err(Error::Unsupported { optimizer: self.info().name.to_owned(), what: what.to_owned() })
        };
        if precision != Precision::default() {
            if self.engine.is_some() {
                return refuse("master weights and stochastic rounding are there on the CPU only");
            }
            if R::REDUCE.is_some() {
                return refuse("has no master weights and no stochastic rounding");
            }
        }
        if self.slots.iter().any(|slot| slot.t > 0) {
            return refuse("the precision is chosen before the first step");
        }
        self.slots.iter_mut().try_for_each(|slot| slot.keep_master(precision.master))?;
        self.precision = precision;
        Ok(())
    }

    fn refused(&self, refusal: Refusal) -> Error {
        let optimizer = self.info().name.to_owned();
        match refusal {
            Refusal::MissingLoss => Error::MissingLoss(optimizer),
            Refusal::Loss { loss, .. } if !loss.is_finite() => Error::LossNotFinite { optimizer, loss },
            Refusal::Loss { loss, c } => Error::Loss { optimizer, loss, c },
            Refusal::Decay { lr, weight_decay } => Error::Decay { optimizer, lr, weight_decay },
        }
    }

    fn take_step(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        // On the CPU there is nothing to wait for; a rule that reduces waits in any case, and a probe needs the loss.
        let first = |slot: &Slot| slot.t == 0 && grads.get(&slot.var).is_some();
        let waits = self.engine.is_none()
            || R::REDUCE.is_some()
            || context.probe
            || R::KNOWS_FIRST_LOSS && self.slots.iter().any(first);
        let (context, deferred) = match waits {
            true => {
                let read = deferred.read_into(*context)?;
                // The norm has told a GPU whether the gradients are finite, here as where it stays on the device.
                let known = self.engine.is_some() && deferred.clip_norm.is_some();
                (if known { read.finite() } else { read }, Deferred::default())
            }
            false => (*context, deferred.clone()),
        };
        deferred.loss.as_ref().map(one_element).transpose()?;
        self.refuse_while_evaluating()?;
        context.check(self.info().name, self.hyper.base(&context))?;
        let gradients = slot::gradients(&self.slots, grads)?;
        let loss = match (&deferred.loss, context.loss) {
            (Some(_), _) => Some(Loss::OnDevice),
            (None, loss) => loss.map(Loss::Known),
        };
        if R::LOSS.is_some() && loss.is_none() {
            return Err(self.refused(Refusal::MissingLoss));
        }
        let (context, deferred) = self.look_through(&gradients, context, deferred)?;
        let clip = Clip { scale: context.grad_scale, limit: context.grad_limit };
        let sums = self.reduce(&gradients, clip)?;
        if let Some(found) = sums.iter().flatten().find(|sum| !sum.is_finite()) {
            let (what, expected) = ("norm over all gradients", "a finite number");
            return Err(Error::Context { what, expected, found: *found });
        }
        // Everything that can be refused is refused before anything changes.
        let prepared = self.prepare(&gradients, &context, loss, &sums)?;
        let before = if context.probe { Some(measure::before(&self.slots, &gradients)?) } else { None };
        if self.engine.is_some() && self.unsettled.len() >= UNSETTLED {
            self.settle()?;
        }
        let scalars: Vec<R::Scalars> = prepared.iter().map(|p| p.scalars).collect();
        match self.engine {
            Some(_) => self.step_on_device(&gradients, &prepared, clip, &deferred)?,
            None => self.step_on_cpu(&gradients, &prepared, &scalars, clip)?,
        }
        let mut counters = Vec::new();
        for (gradient, Prepared { memory, .. }) in gradients.iter().zip(prepared) {
            let slot = &mut self.slots[gradient.slot];
            let memory = std::mem::replace(&mut slot.memory, memory);
            counters.push(Before { slot: gradient.slot, t: slot.t, memory });
            slot.t = slot.t.saturating_add(1);
        }
        if self.engine.is_some() {
            self.unsettled.push(counters);
        }
        if let Some(before) = before {
            // The step has been taken: a probe that cannot be read is no error of it.
            self.probe = measure::measure::<R>(&self.slots, &gradients, &scalars, &before).ok();
        }
        Ok(())
    }

    /// Refuses gradients that are not finite, and clips their norm: both from one pass over them.
    fn look_through(
        &self,
        gradients: &[Gradient],
        context: StepContext,
        deferred: Deferred,
    ) -> Result<(StepContext, Deferred)> {
        let tensors = || gradients.iter().map(|g| &g.tensor);
        if self.engine.is_some() {
            let wanted = context.max_norm.or(context.check.then_some(f64::INFINITY));
            return match wanted.filter(|_| deferred.clip_norm.is_none() && !gradients.is_empty()) {
                Some(max) => {
                    let norm = global_norm_of(tensors())?;
                    // Whether it is finite does not depend on the scale, which would be one more launch.
                    let norm = match context.grad_scale.abs() {
                        scale if scale != 1.0 && max.is_finite() => (norm * scale)?,
                        _ => norm,
                    };
                    let deferred = deferred.clip_norm(&norm, max);
                    match R::REDUCE {
                        // Its sums are read in any case.
                        Some(_) => Ok((deferred.read_into(context)?, Deferred::default())),
                        None => Ok((context, deferred)),
                    }
                }
                None => Ok((context, deferred)),
            };
        }
        let find = || -> Result<()> {
            match cpu::not_finite(tensors(), context.grad_scale)? {
                Some(i) => Err(Error::GradientNotFinite(self.slots[gradients[i].slot].name.clone())),
                None => Ok(()),
            }
        };
        match context.max_norm {
            Some(max) => {
                let norm: f64 = global_norm_of(tensors())?.to_scalar()?;
                let norm = norm * context.grad_scale.abs();
                if !norm.is_finite() {
                    find()?;
                }
                let context = context.clip_norm(norm, max);
                context.check(self.info().name, self.hyper.base(&context))?;
                Ok((context, deferred))
            }
            None if context.check => find().map(|()| (context, deferred)),
            None => Ok((context, deferred)),
        }
    }

    fn prepare(
        &self,
        gradients: &[Gradient],
        context: &StepContext,
        loss: Option<Loss>,
        sums: &[[f64; SUMS]],
    ) -> Result<Vec<Prepared<R>>> {
        let mut prepared = Vec::with_capacity(gradients.len());
        for (gradient, sums) in gradients.iter().zip(sums) {
            let slot = &self.slots[gradient.slot];
            let config = &self.hyper.groups[slot.group].1;
            let lr = self.hyper.rate(slot.group, context);
            let momentum = self.hyper.momentum(slot.group, context)?;
            let input = Input { t: slot.t.saturating_add(1), lr, momentum, loss, sums: *sums };
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
        let mut rounding = Vec::with_capacity(gradients.len());
        for (gradient, Prepared { start, .. }) in gradients.iter().zip(prepared) {
            let slot = &mut self.slots[gradient.slot];
            if let Some(start) = start.filter(|s| s.iter().any(|v| *v != 0.0)) {
                slot.buffers.fill(&start);
            }
            rounding.push(self.precision.rounding.of_step(&slot.name, slot.t));
        }
        let (single, double): (Vec<_>, Vec<_>) =
            scalars.iter().map(|s| (s.round::<f32>(), s.round::<f64>())).unzip();
        Ok(cpu::step(
            &mut self.slots,
            gradients,
            &|i| -> Rounding { rounding[i] },
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
        let head = Head { scale: clip.scale, limit: clip.limit, step: self.unsettled.len() as u32 + 1 };
        let numbers = |i: usize| (prepared[i].scalars.values(), prepared[i].start);
        for (source, mut items) in items::<R>(&self.hyper, &mut self.slots, gradients, numbers) {
            engine.step(&source, &mut items, &head, deferred)?;
        }
        Ok(())
    }

    /// The sums of [`Rule::REDUCE`] for each gradient. A device is waited for.
    fn reduce(&mut self, gradients: &[Gradient], clip: Clip) -> Result<Vec<[f64; SUMS]>> {
        let Some(reduce) = R::REDUCE else { return Ok(vec![[0.0; SUMS]; gradients.len()]) };
        let has_past = |slot: &Slot| slot.t > 0 || matches!(reduce, Reduce::Each(_));
        let Some(engine) = &mut self.engine else {
            let each = cpu::reduce::<R>(&self.slots, gradients, clip, &has_past)?;
            return Ok(match reduce {
                Reduce::Together(_) => {
                    let terms: Vec<_> = gradients.iter().map(|g| g.tensor.dtype()).zip(each).collect();
                    let terms = match &mut self.others {
                        Some(others) => cpu::all_terms(others, &terms)?,
                        None => terms,
                    };
                    vec![cpu::together(&terms); gradients.len()]
                }
                Reduce::Each(_) => each.into_iter().map(Option::unwrap_or_default).collect(),
            });
        };
        let past = |g: &&Gradient| self.slots[g.slot].t > 0;
        let with_past: Vec<Gradient> = gradients.iter().filter(past).cloned().collect();
        let head = Head { scale: clip.scale, limit: clip.limit, step: 0 };
        let numbers = |_| (vec![0.0; R::Scalars::NAMES.len()], None);
        let mut sums_of = |gradients: &[Gradient]| {
            let items = items::<R>(&self.hyper, &mut self.slots, gradients, numbers);
            let sums = items.into_iter().map(|(source, mut items)| engine.reduce(&source, &mut items, &head));
            Ok(cpu::total(sums.collect::<Result<Vec<_>>>()?))
        };
        match reduce {
            Reduce::Each(_) => gradients.iter().map(|g| sums_of(std::slice::from_ref(g))).collect(),
            Reduce::Together(_) => Ok(vec![sums_of(&with_past)?; gradients.len()]),
        }
    }
}

/// The parameters of `gradients` as kernels see them, by program: dtype and number of buffers. `numbers` tells scalars and
/// start of the parameter of the `usize`-th gradient.
fn items<'a, R: Rule>(
    hyper: &Hyper<R::Config>,
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
        let offset = R::LOSS.map_or(0.0, |c| c(&hyper.groups[slot.group].1));
        let param = slot.var.as_tensor().clone();
        let item = Item { param, grad: &gradient.tensor, state, scalars, start, offset };
        let Some(source) = Source::of::<R>(R::info(hyper.default()).name, buffers, dtype) else { continue };
        match programs.iter_mut().find(|(known, _)| *known == source) {
            Some((_, items)) => items.push(item),
            None => programs.push((source, vec![item])),
        }
    }
    programs
}

impl<R: Rule> Optimizer for Optim<R> {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.step_with(grads, context)
    }
    fn step_deferred(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        self.take_step(grads, context, deferred)
    }
    fn eval_weights(&mut self) -> Result<bool> {
        self.eval_weights()
    }
    fn train_weights(&mut self) -> Result<()> {
        self.train_weights()
    }
    fn settle(&mut self) -> Result<()> {
        self.settle()
    }
    fn set_precision(&mut self, precision: Precision) -> Result<()> {
        self.choose_precision(precision)
    }
    fn share_sums(&mut self, others: Others) -> Result<()> {
        let what = match (R::REDUCE, &self.engine) {
            (Some(Reduce::Together(_)), None) => {
                self.others = Some(others);
                return Ok(());
            }
            (Some(Reduce::Together(_)), Some(_)) => "shares its sums with other processes on the CPU only",
            _ => "has no sums to share with other processes",
        };
        Err(Error::Unsupported { optimizer: self.info().name.to_owned(), what: what.to_owned() })
    }
    fn info(&self) -> &'static Info {
        self.info()
    }
    fn needs_loss(&self) -> bool {
        R::LOSS.is_some()
    }
    fn config(&self) -> Value {
        Value::Object(fields(self.hyperparameters()))
    }
    fn lr(&self) -> f64 {
        self.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.set_lr(lr);
    }
    fn params(&self) -> Vec<ParamInfo> {
        self.params()
    }
    fn state_dict(&self) -> Result<StateDict> {
        self.state_dict()
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        self.load_state_dict_with(state, load)
    }
    fn probe(&self) -> Option<&Probe> {
        self.probe()
    }
    fn followers(&self) -> Vec<(&str, Values<'_>)> {
        fn of<R: Rule>(slot: &Slot) -> Option<Values<'_>> {
            let place = slot.names.iter().position(|name| Some(*name) == R::FOLLOWS)?;
            match &slot.buffers {
                Buffers::F32(buffers) => Some(Values::F32(buffers.get(place)?)),
                Buffers::F64(buffers) => Some(Values::F64(buffers.get(place)?)),
                Buffers::Device(_) => None,
            }
        }
        let started = self.slots.iter().filter(|slot| slot.t > 0);
        started.filter_map(|slot| Some((slot.name.as_str(), of::<R>(slot)?))).collect()
    }
}

/// Existing candle loops work unchanged: parameters are named by their position.
impl<R: Rule> candle_nn::Optimizer for Optim<R> {
    type Config = R::Config;

    fn new(vars: Vec<Var>, config: R::Config) -> candle_core::Result<Self> {
        Ok(Self::new(vars, config)?)
    }
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        Ok(self.step(grads)?)
    }
    fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        Ok(self.backward_step(loss)?)
    }
    fn learning_rate(&self) -> f64 {
        self.lr()
    }
    fn set_learning_rate(&mut self, lr: f64) {
        self.set_lr(lr);
    }
}
