//! Gradient accumulation: one step from several micro-batches.
use crate::driver::slot::order;
use crate::state::ParamScalars;
use crate::{Error, Load, Result, StateDict};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

/// The weighted mean of the gradients and losses of micro-batches.
///
/// Weights are the numbers of samples: then the result equals that of the whole batch at once, up to rounding. What is kept is the
/// mean so far and not a sum, so that it is never larger than the gradients; of half precision ones it is kept, and given, in f32.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f64], &Device::Cpu)?;
/// let mut mean = taper_optim::Accumulator::new(vec![x.clone()]);
/// for scale in [1.0, 3.0] {
///     let loss = (x.sum_all()? * scale)?;
///     mean.add(&loss.backward()?, loss.to_scalar()?, 1.0)?;
/// }
/// let (grads, loss) = mean.take()?.unwrap();
/// assert_eq!((grads.get(&x).unwrap().to_vec1::<f64>()?[0], loss), (2.0, 2.0));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Accumulator {
    params: Vec<(String, Var)>,
    by_position: bool,
    /// The mean gradients so far; none where none has come.
    means: Vec<Option<Tensor>>,
    /// The mean loss so far.
    loss: f64,
    weight: f64,
}

/// What saved state calls itself, and its two numbers.
const NAME: &str = "accumulator";
const LOSS: &str = "loss";
const WEIGHT: &str = "weight";

impl Accumulator {
    /// For the gradients of `vars`. Its state is not loaded again without [`Load::same_order`].
    pub fn new(vars: Vec<Var>) -> Self {
        let params = vars.into_iter().enumerate().map(|(i, var)| (i.to_string(), var)).collect();
        Self { by_position: true, ..Self::with_params(params) }
    }

    /// For the gradients of named variables.
    pub fn with_params(params: Vec<(String, Var)>) -> Self {
        let means = vec![None; params.len()];
        Self { params, by_position: false, means, loss: 0.0, weight: 0.0 }
    }

    /// Adds a micro-batch whose mean loss and gradients weigh `weight`. After an error nothing has changed.
    pub fn add(&mut self, grads: &GradStore, loss: f64, weight: f64) -> Result<()> {
        let total = self.weight + weight;
        if !(weight >= 0.0 && total.is_finite()) {
            let (what, expected) = ("weight", "a finite number of at least 0");
            return Err(Error::Context { what, expected, found: weight });
        }
        if total == 0.0 {
            return Ok(());
        }
        let (old, new) = (self.weight / total, weight / total);
        let mut means = self.means.clone();
        for ((_, var), mean) in self.params.iter().zip(&mut means) {
            let before = mean.take().map(|mean| mean * old).transpose()?;
            // Detached: a kept gradient may hold on to the whole graph of its batch.
            let share = match grads.get(var) {
                Some(grad) => Some((grad.detach().to_dtype(wide(grad.dtype()))? * new)?),
                None => None,
            };
            *mean = match (before, share) {
                (Some(before), Some(share)) => Some((before + share)?),
                (before, share) => before.or(share),
            };
        }
        self.means = means;
        self.loss = self.loss * old + loss * new;
        self.weight = total;
        Ok(())
    }

    /// The means, and an empty accumulator again; `None` when nothing was added.
    pub fn take(&mut self) -> Result<Option<(GradStore, f64)>> {
        if self.weight == 0.0 {
            return Ok(None);
        }
        let mut grads = GradStore::default();
        for ((_, var), mean) in self.params.iter().zip(&mut self.means) {
            if let Some(mean) = mean.take() {
                grads.insert(var, mean);
            }
        }
        let loss = self.loss;
        (self.loss, self.weight) = (0.0, 0.0);
        Ok(Some((grads, loss)))
    }

    /// What was added so far.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::default();
        state.header.optimizer = NAME.to_owned();
        state.header.by_position = Some(self.by_position);
        state.header.shared.extend([(LOSS.to_owned(), self.loss), (WEIGHT.to_owned(), self.weight)]);
        for ((name, _), mean) in self.params.iter().zip(&self.means) {
            state.header.params.insert(name.clone(), ParamScalars::default());
            if let Some(mean) = mean {
                state.tensors.insert(name.clone(), mean.to_device(&candle_core::Device::Cpu)?);
            }
        }
        Ok(state)
    }

    /// Replaces what was added, or nothing and lists every difference.
    pub fn load_state_dict(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let header = &state.header;
        let mut differences: Vec<String> = order(self.by_position, header, load).into_iter().collect();
        if header.optimizer != NAME {
            differences.push(format!("expected the state of an {NAME}, found {}", header.optimizer));
        }
        let number = |name: &str| header.shared.get(name).copied();
        let (Some(loss), Some(weight)) = (number(LOSS), number(WEIGHT)) else {
            return Err(Error::State(vec![format!("expected the scalars {LOSS} and {WEIGHT}")]));
        };
        let mut means = Vec::with_capacity(self.params.len());
        for (name, var) in &self.params {
            let mean = state.tensors.get(name);
            let dtype = wide(var.dtype());
            if !header.params.contains_key(name) {
                differences.push(format!("parameter `{name}` is missing"));
            } else if let Some(mean) =
                mean.filter(|mean| mean.shape() != var.shape() || mean.dtype() != dtype)
            {
                let (expected, found, found_dtype) = (var.dims(), mean.dims(), mean.dtype());
                differences.push(format!(
                    "`{name}`: expected {expected:?} {dtype:?}, found {found:?} {found_dtype:?}"
                ));
            }
            means.push(mean.map(|mean| mean.to_device(var.device())).transpose()?);
        }
        for name in header.params.keys().filter(|name| !self.params.iter().any(|(own, _)| own == *name)) {
            differences.push(format!("parameter `{name}` is not one of this accumulator's"));
        }
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        (self.means, self.loss, self.weight) = (means, loss, weight);
        Ok(())
    }
}

/// What the mean of gradients of a dtype is kept in.
fn wide(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}
