//! Gradient accumulation: one step from several micro-batches.
use crate::driver::slot::order;
use crate::state::ParamScalars;
use crate::{Error, Load, Result, StateDict};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};

/// The weighted mean of the gradients and losses of micro-batches.
///
/// Weights are the numbers of samples: then the result equals that of the whole batch at once, up to rounding. Gradients of half
/// precision are summed, and their mean is given, in f32: an f16 above 512 times 128 samples would be infinite.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device, Var};
/// let x = Var::new(&[1f64], &Device::Cpu)?;
/// let mut sum = taper_optim::Accumulator::new(vec![x.clone()]);
/// for scale in [1.0, 3.0] {
///     let loss = (x.sum_all()? * scale)?;
///     sum.add(&loss.backward()?, loss.to_scalar()?, 1.0)?;
/// }
/// let (grads, loss) = sum.take()?.unwrap();
/// assert_eq!((grads.get(&x).unwrap().to_vec1::<f64>()?[0], loss), (2.0, 2.0));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Accumulator {
    params: Vec<(String, Var)>,
    by_position: bool,
    sums: Vec<Option<Tensor>>,
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
        let sums = vec![None; params.len()];
        Self { params, by_position: false, sums, loss: 0.0, weight: 0.0 }
    }

    /// Adds a micro-batch whose mean loss and gradients weigh `weight`. After an error nothing has changed.
    pub fn add(&mut self, grads: &GradStore, loss: f64, weight: f64) -> Result<()> {
        let mut sums = self.sums.clone();
        for ((_, var), sum) in self.params.iter().zip(&mut sums) {
            let Some(grad) = grads.get(var) else { continue };
            // Detached: a kept gradient may hold on to the whole graph of its batch.
            let share = (grad.detach().to_dtype(wide(grad.dtype()))? * weight)?;
            *sum = Some(match sum.take() {
                Some(sum) => (sum + share)?,
                None => share,
            });
        }
        self.sums = sums;
        self.loss += loss * weight;
        self.weight += weight;
        Ok(())
    }

    /// The means, and an empty accumulator again; `None` when nothing was added.
    pub fn take(&mut self) -> Result<Option<(GradStore, f64)>> {
        if self.weight == 0.0 {
            return Ok(None);
        }
        let mut grads = GradStore::default();
        for ((_, var), sum) in self.params.iter().zip(&self.sums) {
            if let Some(sum) = sum {
                grads.insert(var, (sum / self.weight)?);
            }
        }
        let loss = self.loss / self.weight;
        self.sums.fill(None);
        (self.loss, self.weight) = (0.0, 0.0);
        Ok(Some((grads, loss)))
    }

    /// What was added so far.
    pub fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::default();
        state.header.optimizer = NAME.to_owned();
        state.header.by_position = Some(self.by_position);
        state.header.shared.extend([(LOSS.to_owned(), self.loss), (WEIGHT.to_owned(), self.weight)]);
        for ((name, _), sum) in self.params.iter().zip(&self.sums) {
            state.header.params.insert(name.clone(), ParamScalars::default());
            if let Some(sum) = sum {
                state.tensors.insert(name.clone(), sum.to_device(&candle_core::Device::Cpu)?);
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
        let mut sums = Vec::with_capacity(self.params.len());
        for (name, var) in &self.params {
            let sum = state.tensors.get(name);
            let dtype = wide(var.dtype());
            if !header.params.contains_key(name) {
                differences.push(format!("parameter `{name}` is missing"));
            } else if let Some(sum) = sum.filter(|sum| sum.shape() != var.shape() || sum.dtype() != dtype) {
                let (expected, found, found_dtype) = (var.dims(), sum.dims(), sum.dtype());
                differences.push(format!(
                    "`{name}`: expected {expected:?} {dtype:?}, found {found:?} {found_dtype:?}"
                ));
            }
            sums.push(sum.map(|sum| sum.to_device(var.device())).transpose()?);
        }
        for name in header.params.keys().filter(|name| !self.params.iter().any(|(own, _)| own == *name)) {
            differences.push(format!("parameter `{name}` is not one of this accumulator's"));
        }
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        (self.sums, self.loss, self.weight) = (sums, loss, weight);
        Ok(())
    }
}

/// What gradients of a dtype are summed in.
fn wide(dtype: DType) -> DType {
    if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype }
}
