//! The face every optimizer shows: an object-safe trait and the context of a step.
use crate::{Error, Info, Load, Precision, Probe, Result, StateDict, Values};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use serde_json::Value;

/// What a step knows beside the gradients.
///
/// ```
/// use taper_optim::StepContext;
/// let context = StepContext::new().loss(2.3).lr(0.01).clip_norm(5.0, 0.25);
/// assert_eq!(context.loss, Some(2.3));
/// assert!((context.grad_scale - 0.05).abs() < 1e-7);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepContext {
    /// The loss of the batch the gradients belong to. DecGD and AEGD need it.
    pub loss: Option<f64>,
    /// What all rates are multiplied by: what a [`Schedule`](crate::Schedule) says.
    pub factor: f64,
    /// The learning rate of the default group instead of the one that is set. Groups with a rate of their own keep
    /// their ratio to it.
    pub lr: Option<f64>,
    /// What all momenta (β₁ for the Adam family) are multiplied by.
    pub momentum_factor: f64,
    /// The momentum of the default group instead of the configured one. Groups with a momentum of their own keep it.
    pub momentum: Option<f64>,
    /// Gradients are multiplied by this inside the kernel.
    pub grad_scale: f64,
    /// Gradients are clamped to ± this after scaling.
    pub grad_limit: f64,
    /// What the norm of all gradients together is clipped to, computed by the step itself.
    pub max_norm: Option<f64>,
    /// Whether to refuse gradients that are infinite or no numbers: one more pass over them, unless `max_norm` takes it anyway.
    /// It cannot be part of the step's own pass, which must not have begun when the last gradient is found to be bad: a step that
    /// moves little memory beside the gradients (SGD) is longer by a third and more, one of Adam by less.
    pub check: bool,
    /// Whether to collect statistics for [`Optimizer::probe`].
    pub probe: bool,
}

impl Default for StepContext {
    fn default() -> Self {
        Self {
            loss: None,
            factor: 1.0,
            lr: None,
            momentum_factor: 1.0,
            momentum: None,
            grad_scale: 1.0,
            grad_limit: f64::INFINITY,
            max_norm: None,
            check: true,
            probe: false,
        }
    }
}

impl StepContext {
    /// No loss, the configured rate, no clipping.
    pub fn new() -> Self {
        Self::default()
    }
    /// With the loss of the batch.
    pub fn loss(self, loss: f64) -> Self {
        Self { loss: Some(loss), ..self }
    }
    /// With all rates times a schedule's factor.
    pub fn factor(self, factor: f64) -> Self {
        Self { factor, ..self }
    }
    /// With a learning rate.
    pub fn lr(self, lr: f64) -> Self {
        Self { lr: Some(lr), ..self }
    }
    /// With all momenta times a schedule's factor.
    pub fn momentum_factor(self, momentum_factor: f64) -> Self {
        Self { momentum_factor, ..self }
    }
    /// With a momentum.
    pub fn momentum(self, momentum: f64) -> Self {
        Self { momentum: Some(momentum), ..self }
    }
    /// Scales gradients of global norm `norm` down to `max`, as PyTorch's `clip_grad_norm_` does: by
    /// max / (norm + 1e-6) where that is below 1. A norm that is not finite leaves no scale to take a step with: the
    /// step is refused.
    pub fn clip_norm(self, norm: f64, max: f64) -> Self {
        let factor = max / (norm + 1e-6);
        let usable = norm.is_finite() && !factor.is_nan();
        let factor = if usable { factor.min(1.0) } else { f64::NAN };
        Self { grad_scale: self.grad_scale * factor, ..self }
    }
    /// As [`StepContext::clip_norm`], with the norm that the step itself computes: in the pass that also finds gradients that are
    /// not finite.
    pub fn max_norm(self, max: f64) -> Self {
        Self { max_norm: Some(max), ..self }
    }
    /// Gradients are multiplied by `scale` first: the inverse of what a loss was multiplied by.
    pub fn scale(self, scale: f64) -> Self {
        Self { grad_scale: self.grad_scale * scale, ..self }
    }
    /// Vouches that all gradients are finite, because their norm is known to be: they are not looked through again.
    pub fn finite(self) -> Self {
        Self { check: false, ..self }
    }
    /// Clamps every gradient entry to ± `limit`.
    pub fn clip_value(self, limit: f64) -> Self {
        Self { grad_limit: limit, ..self }
    }
    /// Refuses what would carry a number into the weights that is none.
    pub(crate) fn check(&self, optimizer: &str, lr: f64) -> Result<()> {
        let refuse = |what, expected, found| Err(Error::Context { what, expected, found });
        match *self {
            _ if !(lr >= 0.0 && lr.is_finite()) => refuse("lr", "a finite number of at least 0", lr),
            Self { loss: Some(loss), .. } if !loss.is_finite() => {
                Err(Error::LossNotFinite { optimizer: optimizer.to_owned(), loss })
            }
            Self { factor, .. } if !(factor >= 0.0 && factor.is_finite()) => {
                refuse("factor", "a finite number of at least 0", factor)
            }
            Self { grad_scale, .. } if !grad_scale.is_finite() => {
                refuse("grad_scale", "a finite number (is the gradient's norm finite?)", grad_scale)
            }
            Self { grad_limit, .. } if grad_limit.is_nan() || grad_limit < 0.0 => {
                refuse("grad_limit", "a number of at least 0", grad_limit)
            }
            Self { max_norm: Some(max), .. } if max.is_nan() || max < 0.0 => {
                refuse("max_norm", "a number of at least 0", max)
            }
            _ => Ok(()),
        }
    }
    /// With statistics.
    pub fn probe(self, on: bool) -> Self {
        Self { probe: on, ..self }
    }
}

/// Numbers of a step that a device has computed and the host has not seen: a step with them does not wait for the device.
///
/// A loss f with f + c ≤ 0 and a loss or norm that is not finite are then refused on the device: it keeps parameters and
/// state as they were before that step, for that and every later step, and [`Optimizer::settle`] reports it.
#[derive(Clone, Debug, Default)]
pub struct Deferred {
    /// The loss of the batch, instead of [`StepContext::loss`].
    pub loss: Option<Tensor>,
    /// The norm of all gradients and what to clip it to, instead of [`StepContext::clip_norm`].
    pub clip_norm: Option<(Tensor, f64)>,
}

impl Deferred {
    /// With the loss of the batch, a tensor of one element.
    pub fn loss(self, loss: &Tensor) -> Self {
        Self { loss: Some(loss.detach()), ..self }
    }
    /// With gradients of norm `norm`, a scalar tensor, scaled down to `max`.
    pub fn clip_norm(self, norm: &Tensor, max: f64) -> Self {
        Self { clip_norm: Some((norm.detach(), max)), ..self }
    }
    /// The same numbers on the host, in `context`. Waits for the device they are on.
    pub fn read_into(&self, context: StepContext) -> Result<StepContext> {
        // First to the CPU: not every device has f64.
        let read = |t: &Tensor| -> Result<f64> {
            Ok(one_element(t)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?)
        };
        let context = match &self.loss {
            Some(loss) => context.loss(read(loss)?),
            None => context,
        };
        Ok(match &self.clip_norm {
            Some((norm, max)) => context.clip_norm(read(norm)?, *max),
            None => context,
        })
    }
}

/// A loss as a scalar, whatever the shape of its one element.
pub(crate) fn one_element(loss: &Tensor) -> Result<Tensor> {
    if loss.elem_count() != 1 {
        return Err(Error::LossShape(loss.dims().to_vec()));
    }
    Ok(loss.reshape(())?)
}

/// A parameter as the optimizer sees it: for plans and logs.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamInfo {
    /// Its name.
    pub name: String,
    /// How many numbers it holds.
    pub elements: usize,
    /// The pattern of its group; `None` for the default group.
    pub group: Option<String>,
}

/// A gradient with the loss at which it was taken.
#[derive(Debug)]
pub struct Evaluated {
    /// The gradients.
    pub grads: GradStore,
    /// The loss of the batch.
    pub loss: Option<f64>,
}

/// How an optimizer of a part of all parameters hears from the others: it says some bytes, and gets what every part says, its own
/// among them, in the order of the parameters.
pub struct Others(Box<Ask>);

type Ask = dyn FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send + Sync;

impl Others {
    /// By a closure that moves the bytes.
    pub fn new(ask: impl FnMut(&[u8]) -> Result<Vec<Vec<u8>>> + Send + Sync + 'static) -> Self {
        Self(Box::new(ask))
    }

    /// What all parts say.
    pub fn ask(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        (self.0)(mine)
    }
}

impl std::fmt::Debug for Others {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Others")
    }
}

/// An optimizer over named parameters, whatever its kind.
///
/// Most are an [`Optim`](crate::Optim) of a [`Rule`](crate::rule::Rule) or a [`TensorOptim`](crate::TensorOptim) of a
/// [`TensorRule`](crate::TensorRule); a wrapper around others implements it by itself and is registered with
/// [`Registry::register_factory`](crate::Registry::register_factory).
pub trait Optimizer: Send {
    /// Updates every parameter that has a gradient. After an error nothing has changed.
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()>;
    /// As [`Optimizer::step`], with numbers that are still on the device. On the CPU it is the same step.
    fn step_deferred(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        self.step(grads, &deferred.read_into(*context)?)
    }
    /// How many gradients a step takes: 2 for those that must be called by [`Optimizer::step_twice`].
    fn gradients(&self) -> usize {
        1
    }
    /// As [`Optimizer::step`] for optimizers that want the gradient of the same batch at a second point: they put the parameters
    /// there and call `again`. Others take a plain step. After an error, also one of `again`, nothing has changed.
    fn step_twice(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        again: &mut dyn FnMut() -> Result<Evaluated>,
    ) -> Result<()> {
        let _ = again;
        self.step(grads, context)
    }
    /// Puts the weights for evaluation into the parameters, if they are others than those that are trained. True if so.
    fn eval_weights(&mut self) -> Result<bool> {
        Ok(false)
    }
    /// Puts the weights that are trained back, to the bit.
    fn train_weights(&mut self) -> Result<()> {
        Ok(())
    }
    /// Waits for the device and returns an error if it refused a deferred step. Call it before trusting what came after,
    /// for example where metrics are written.
    fn settle(&mut self) -> Result<()> {
        Ok(())
    }
    /// Chooses how parameters of half precision are trained; before the first step.
    fn set_precision(&mut self, precision: Precision) -> Result<()> {
        precision.only_default(self.info())
    }
    /// Hears of the parameters that other processes step: what this one steps is then a part of all. For optimizers of
    /// [`Reach::Sums`](crate::rule::Reach), before the first step.
    fn share_sums(&mut self, _others: Others) -> Result<()> {
        let what = "has no sums to share with other processes".to_owned();
        Err(Error::Unsupported { optimizer: self.info().name.to_owned(), what })
    }
    /// What the registry knows about it.
    fn info(&self) -> &'static Info;
    /// Whether a step needs the loss.
    fn needs_loss(&self) -> bool;
    /// The hyperparameters of the default group.
    fn config(&self) -> Value;
    /// The learning rate of the default group.
    fn lr(&self) -> f64;
    /// Replaces the learning rate of the default group; groups with their own keep their ratio to it.
    fn set_lr(&mut self, lr: f64);
    /// The parameters with their groups.
    fn params(&self) -> Vec<ParamInfo>;
    /// All state, with learning rate, hyperparameters and groups: with it, training continues to the bit.
    fn state_dict(&self) -> Result<StateDict>;
    /// Replaces all state, and the learning rate. State of another optimizer, of other parameters or of other hyperparameters is
    /// refused with every difference.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        self.load_state_dict_with(state, Load::strict())
    }
    /// As [`Optimizer::load_state_dict`], with differences that are meant.
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()>;
    /// The statistics of the last step whose context asked for them; `None` too if they could not be had.
    fn probe(&self) -> Option<&Probe>;
    /// The values that follow √(f + c) (DecGD: v, AEGD: r) of each parameter that has had a step, on the host; none of other
    /// optimizers.
    fn followers(&self) -> Vec<(&str, Values<'_>)> {
        Vec::new()
    }
}
