//! Parameters with their state, whatever the rule: what is here is compiled once, not once a rule.
use super::cpu::Gradient;
use crate::device::gpu::{Engine, State};
use crate::state::{Header, Load, ParamScalars, StateDict};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Storage, Tensor, Var};
use std::collections::BTreeSet;

/// State buffers of one parameter: f64 for f64 parameters, f32 for all others.
#[derive(Debug)]
pub(crate) enum Buffers {
    /// On the host.
    F32(Vec<Vec<f32>>),
    /// On the host.
    F64(Vec<Vec<f64>>),
    /// On a GPU.
    Device(State),
}

impl Buffers {
    fn zeros(engine: Option<&Engine>, dtype: DType, buffers: usize, elements: usize) -> Result<Self> {
        Ok(match (engine, dtype) {
            (Some(engine), dtype) => Self::Device(engine.zeros(dtype, buffers, elements)?),
            (None, DType::F64) => Self::F64(vec![vec![0.0; elements]; buffers]),
            _ => Self::F32(vec![vec![0.0; elements]; buffers]),
        })
    }

    /// Fills buffers on the host; a device's kernel starts its own.
    pub(super) fn fill(&mut self, values: &[f64]) {
        match self {
            Self::F32(b) => b.iter_mut().zip(values).for_each(|(b, v)| b.fill(*v as f32)),
            Self::F64(b) => b.iter_mut().zip(values).for_each(|(b, v)| b.fill(*v)),
            Self::Device(_) => {}
        }
    }

    /// All buffers, one after another, in f64.
    pub(super) fn widened(&self) -> Result<Vec<Vec<f64>>> {
        Ok(match self {
            Self::F32(b) => b.iter().map(|b| b.iter().map(|v| f64::from(*v)).collect()).collect(),
            Self::F64(b) => b.clone(),
            Self::Device(state) => state.download()?.widened()?,
        })
    }

    fn tensors(&self, var: &Var) -> Result<Vec<Tensor>> {
        let tensors: candle_core::Result<_> = match self {
            Self::F32(b) => b.iter().map(|b| Tensor::from_slice(b, var.shape(), &Device::Cpu)).collect(),
            Self::F64(b) => b.iter().map(|b| Tensor::from_slice(b, var.shape(), &Device::Cpu)).collect(),
            Self::Device(state) => return state.download()?.tensors(var),
        };
        Ok(tensors?)
    }

    fn read(engine: Option<&Engine>, dtype: DType, tensors: &[Tensor]) -> Result<Self> {
        let host = match dtype {
            DType::F64 => Self::F64(tensors.iter().map(Tensor::to_vec1).collect::<candle_core::Result<_>>()?),
            _ => Self::F32(tensors.iter().map(Tensor::to_vec1).collect::<candle_core::Result<_>>()?),
        };
        Ok(match engine {
            Some(engine) => Self::Device(engine.upload(&host)?),
            None => host,
        })
    }
}

/// A parameter with its state.
#[derive(Debug)]
pub(super) struct Slot {
    pub name: String,
    pub var: Var,
    /// Its group; 0 is the default group.
    pub group: usize,
    /// Steps taken.
    pub t: u64,
    /// The rule's numbers.
    pub memory: Vec<f64>,
    /// What its buffers are called.
    pub names: &'static [&'static str],
    pub buffers: Buffers,
    /// The parameter in f32, if one of half precision keeps it: a single buffer.
    pub master: Option<Buffers>,
}

/// What [`Slot::master`] is called in saved state.
const MASTER: &str = "master";

impl Slot {
    /// A parameter that no step has been taken of, if there is a kernel for it.
    pub(super) fn new(
        name: String,
        var: Var,
        group: usize,
        memory: usize,
        names: &'static [&'static str],
        engine: Option<&Engine>,
    ) -> Result<Self> {
        if !matches!(var.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            return Err(Error::DType { name, found: var.dtype() });
        }
        if !var.is_contiguous() {
            let (expected, found) = ("contiguous memory".into(), format!("strides {:?}", var.stride()));
            return Err(Error::Parameter { name, expected, found });
        }
        let buffers = Buffers::zeros(engine, var.dtype(), names.len(), var.elem_count())?;
        Ok(Self { name, var, group, t: 0, memory: vec![0.0; memory], names, buffers, master: None })
    }
}

impl Slot {
    /// Whether updates are rounded into it.
    pub(super) fn is_half(&self) -> bool {
        matches!(self.var.dtype(), DType::F16 | DType::BF16)
    }

    /// Keeps the parameter in f32 beside it, or no longer.
    pub(super) fn keep_master(&mut self, keep: bool) -> Result<()> {
        self.master = match keep && self.is_half() {
            true => {
                let wide = self.var.to_dtype(DType::F32)?.flatten_all()?;
                Some(Buffers::read(None, DType::F32, &[wide])?)
            }
            false => None,
        };
        Ok(())
    }

    /// The parameter in f64: its master weights where it keeps them.
    pub(super) fn values(&self) -> Result<Vec<f64>> {
        match &self.master {
            Some(master) => Ok(master.widened()?.concat()),
            None => values(&self.var),
        }
    }

    /// All buffers with their names.
    fn named(&self) -> Result<Vec<(&'static str, Tensor)>> {
        let mut named: Vec<_> = self.names.iter().copied().zip(self.buffers.tensors(&self.var)?).collect();
        if let Some(master) = &self.master {
            named.extend(std::iter::once(MASTER).zip(master.tensors(&self.var)?));
        }
        Ok(named)
    }
}

/// What takes the steps of `params`: nothing but the CPU, or the engine of the one device they are on.
pub(super) fn engine(params: &[(String, Var)]) -> Result<Option<Engine>> {
    let Some((_, first)) = params.first() else { return Ok(None) };
    if let Some((name, var)) = params.iter().find(|(_, var)| !var.device().same_device(first.device())) {
        let place = |var: &Var| format!("{:?}", var.device().location());
        return Err(Error::Device { name: name.clone(), device: place(var), expected: place(first) });
    }
    if first.device().is_cpu() { Ok(None) } else { Engine::new(first.device()).map(Some) }
}

/// The gradients of a step in the order of the slots: contiguous, checked, sharing storage with no parameter.
pub(super) fn gradients(slots: &[Slot], grads: &GradStore) -> Result<Vec<Gradient>> {
    let address = |t: &Tensor| std::ptr::from_ref::<Storage>(&t.storage_and_layout().0) as usize;
    let params: BTreeSet<usize> = slots.iter().map(|slot| address(&slot.var)).collect();
    let mut found = Vec::with_capacity(slots.len());
    for (index, slot) in slots.iter().enumerate() {
        let Some(grad) = grads.get(&slot.var) else { continue };
        // On the CPU the gradient of a half may be wider than it: a mean of several, or that of its master weights.
        let wide = slot.is_half() && grad.dtype() == DType::F32 && grad.device().is_cpu();
        if grad.shape() != slot.var.shape() || grad.dtype() != slot.var.dtype() && !wide {
            let describe = |t: &Tensor| format!("{:?} {:?}", t.dims(), t.dtype());
            let (expected, found) = (describe(&slot.var), describe(grad));
            return Err(Error::Gradient { name: slot.name.clone(), expected, found });
        }
        if !grad.device().same_device(slot.var.device()) {
            let describe = |t: &Tensor| format!("a tensor on {:?}", t.device().location());
            let (expected, found) = (describe(&slot.var), describe(grad));
            return Err(Error::Gradient { name: slot.name.clone(), expected, found });
        }
        let mut tensor = grad.contiguous()?;
        if params.contains(&address(&tensor)) {
            tensor = tensor.copy()?;
        }
        found.push(Gradient { slot: index, tensor });
    }
    Ok(found)
}

/// The state of all parameters.
pub(super) fn save(slots: &[Slot], memory: &[&str], state: &mut StateDict) -> Result<()> {
    for slot in slots {
        let memory = memory.iter().zip(&slot.memory).map(|(name, value)| (name.to_string(), *value));
        let scalars = ParamScalars { t: slot.t, group: slot.group, memory: memory.collect() };
        state.header.params.insert(slot.name.clone(), scalars);
        for (name, tensor) in slot.named()? {
            state.tensors.insert(format!("{}.{name}", slot.name), tensor);
        }
    }
    Ok(())
}

/// What parameters named by position need: somebody who vouches for their order.
pub(crate) fn order(by_position: bool, header: &Header, load: Load) -> Option<String> {
    // Older files do not say; names that count from 0 are positions.
    let counted = || (0..header.params.len()).all(|i| header.params.contains_key(&i.to_string()));
    let saved = header.by_position.unwrap_or_else(|| !header.params.is_empty() && counted());
    ((by_position || saved) && !load.same_order).then(|| {
        "parameters are named by position, and nothing says that their order is the same (`VarMap::all_vars` has none): \
         build the optimizer by `from_varmap`, `with_params` or, for a list of fixed order, `in_order`, or vouch for the \
         order with `Load::strict().same_order()`"
            .to_owned()
    })
}

/// Replaces the state of all parameters, or nothing and lists every difference after those in `differences`.
pub(super) fn load(
    slots: &mut [Slot],
    engine: Option<&Engine>,
    state: &StateDict,
    memory: &[&str],
    mut differences: Vec<String>,
) -> Result<()> {
    let params = &state.header.params;
    let mut known = BTreeSet::new();
    let mut loaded = Vec::with_capacity(slots.len());
    for slot in &*slots {
        let Some(scalars) = params.get(&slot.name) else {
            differences.push(format!("parameter `{}` is missing", slot.name));
            continue;
        };
        let numbers: Option<Vec<f64>> =
            memory.iter().map(|name| scalars.memory.get(*name).copied()).collect();
        if numbers.is_none() {
            differences.push(format!("parameter `{}`: expected the scalars {memory:?}", slot.name));
        }
        let dtype = if slot.var.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let mut tensors = Vec::new();
        for name in slot.names.iter().copied().chain(slot.master.is_some().then_some(MASTER)) {
            let name = format!("{}.{name}", slot.name);
            match state.tensors.get(&name) {
                None => differences.push(format!("buffer `{name}` is missing")),
                Some(t) if t.shape() != slot.var.shape() || t.dtype() != dtype => {
                    let (expected, found) = (slot.var.dims(), t.dims());
                    let found_dtype = t.dtype();
                    differences.push(format!(
                        "buffer `{name}`: expected {expected:?} {dtype:?}, found {found:?} {found_dtype:?}"
                    ));
                }
                Some(t) => tensors.push(t.flatten_all()?),
            }
            known.insert(name);
        }
        loaded.push((scalars.t, numbers.unwrap_or_default(), tensors));
    }
    for name in params.keys().filter(|name| !slots.iter().any(|s| s.name == **name)) {
        differences.push(format!("parameter `{name}` is not one of this optimizer's"));
    }
    for name in state.tensors.keys().filter(|name| !known.contains(*name)) {
        differences.push(format!("buffer `{name}` is not one of this optimizer's"));
    }
    if !differences.is_empty() {
        return Err(Error::State(differences));
    }
    let read = |(slot, (.., tensors)): (&Slot, &(u64, Vec<f64>, Vec<Tensor>))| {
        let (own, master) = tensors.split_at(slot.names.len());
        let master = match master {
            [] => None,
            master => Some(Buffers::read(None, DType::F32, master)?),
        };
        Ok((Buffers::read(engine, slot.var.dtype(), own)?, master))
    };
    let buffers = slots.iter().zip(&loaded).map(read).collect::<Result<Vec<_>>>()?;
    for ((slot, (t, memory, _)), (buffers, master)) in slots.iter_mut().zip(loaded).zip(buffers) {
        (slot.t, slot.memory, slot.buffers, slot.master) = (t, memory, buffers, master);
    }
    Ok(())
}

/// The elements of a parameter in f64.
pub(crate) fn values(var: &Var) -> Result<Vec<f64>> {
    // First to the CPU: not every device has f64.
    Ok(var.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}
