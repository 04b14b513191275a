//! Optimizers over deterministic noise.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Map, Value};
use taper_optim::{Evaluated, Group, Optimizer, Registry, StepContext};

/// Every registered name.
pub fn names() -> Vec<&'static str> {
    let registry = Registry::builtin();
    registry.list("*").unwrap().map(|entry| entry.info.name).collect()
}

/// Those with a quantity over all parameters: what one does depends on the others, and sums on their order.
pub const TOGETHER: [&str; 5] = ["adagd", "lamb", "lbfgs", "prodigy", "sam"];
/// Those with a quantity of each tensor: where a tensor ends matters.
pub const BY_TENSOR: [&str; 3] = ["adafactor", "lamb", "lars"];
/// Those around another: keys of a group are the other's.
pub const AROUND: [&str; 3] = ["lookahead", "muon", "sam"];

/// Every registered name that treats each parameter alone.
pub fn apart() -> impl Iterator<Item = &'static str> {
    names().into_iter().filter(|name| !TOGETHER.contains(name))
}

/// A step with the same gradients for optimizers that want a second one.
pub fn step(
    optimizer: &mut dyn Optimizer,
    params: &[(String, Var)],
    grads: &GradStore,
    context: &StepContext,
) -> taper_optim::Result<()> {
    let mut again = || {
        let mut second = GradStore::default();
        for (_, var) in params {
            if let Some(grad) = grads.get(var) {
                second.insert(var, grad.copy()?);
            }
        }
        Ok(Evaluated { grads: second, loss: None })
    };
    optimizer.step_twice(grads, context, &mut again)
}

/// A JSON object as hyperparameters.
pub fn map(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

/// A number in [-1, 1) that depends on its arguments only (splitmix64).
pub fn noise(seed: u64, step: usize, index: usize) -> f64 {
    let mut z = seed ^ ((step as u64) << 40) ^ (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// The context of step `t`: a rate and a loss that change every time.
pub fn context(seed: u64, t: usize) -> StepContext {
    let wobble = 1.0 + 0.7 * noise(seed, t, usize::MAX);
    StepContext::new().lr(0.01 * wobble).loss(1.0 + wobble)
}

pub fn tensor(values: &[f64], dtype: DType) -> Tensor {
    Tensor::from_slice(values, values.len(), &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

pub fn var(values: &[f64], dtype: DType) -> Var {
    Var::from_tensor(&tensor(values, dtype)).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// Bits of all elements. Widening loses nothing, so equal bits here are equal bits there.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(f64::to_bits).collect()
}

/// Named parameters with an optimizer over them. Element `i` of parameter `p` starts at, and has the gradients of,
/// noise at index `offset(p) + i`.
pub struct Bench {
    pub params: Vec<(String, Var)>,
    pub offsets: Vec<usize>,
    pub optimizer: Box<dyn Optimizer>,
    pub seed: u64,
    pub dtype: DType,
}

impl Bench {
    /// Parameters `p0`, `p1`, … of the given lengths, laid out one after another.
    pub fn new(name: &str, lengths: &[usize], dtype: DType, seed: u64) -> Self {
        let mut offset = 0;
        let places: Vec<_> = (lengths.iter().enumerate())
            .map(|(i, length)| {
                let place = (format!("p{i}"), offset, *length);
                offset += length;
                place
            })
            .collect();
        Self::placed(name, &Map::new(), &[], &places, dtype, seed)
    }

    /// Parameters by (name, offset, length).
    pub fn placed(
        name: &str,
        config: &Map<String, Value>,
        groups: &[Group],
        places: &[(String, usize, usize)],
        dtype: DType,
        seed: u64,
    ) -> Self {
        let params: Vec<_> = places
            .iter()
            .map(|(name, offset, length)| {
                let start: Vec<f64> = (0..*length).map(|i| noise(seed, 0, offset + i)).collect();
                (name.clone(), var(&start, dtype))
            })
            .collect();
        let registry = Registry::builtin();
        let optimizer = registry.get(name).unwrap().build(params.clone(), config, groups).unwrap();
        let offsets = places.iter().map(|(_, offset, _)| *offset).collect();
        Self { params, offsets, optimizer, seed, dtype }
    }

    pub fn gradient(&self, param: usize, t: usize) -> Tensor {
        let length = self.params[param].1.elem_count();
        let gradient: Vec<f64> = (0..length).map(|i| noise(self.seed, t, self.offsets[param] + i)).collect();
        tensor(&gradient, self.dtype)
    }

    /// The gradients of step `t` for the parameters that `with` lets pass.
    pub fn gradients(&self, t: usize, with: impl Fn(usize) -> bool) -> GradStore {
        let mut grads = GradStore::default();
        for (i, (_, var)) in self.params.iter().enumerate().filter(|(i, _)| with(*i)) {
            grads.insert(var, self.gradient(i, t));
        }
        grads
    }

    /// Steps `from..=to`, counted from 1.
    pub fn steps(&mut self, from: usize, to: usize) {
        for t in from..=to {
            let grads = self.gradients(t, |_| true);
            self.step(&grads, &context(self.seed, t)).unwrap();
        }
    }

    pub fn step(&mut self, grads: &GradStore, context: &StepContext) -> taper_optim::Result<()> {
        step(&mut *self.optimizer, &self.params, grads, context)
    }

    /// All elements in order of their offsets.
    pub fn flat(&self) -> Vec<f64> {
        let mut order: Vec<usize> = (0..self.params.len()).collect();
        order.sort_by_key(|i| self.offsets[*i]);
        order.into_iter().flat_map(|i| values(&self.params[i].1)).collect()
    }

    pub fn flat_bits(&self) -> Vec<u64> {
        self.flat().into_iter().map(f64::to_bits).collect()
    }

    pub fn state_bytes(&self) -> Vec<u8> {
        self.optimizer.state_dict().unwrap().to_bytes().unwrap()
    }
}
