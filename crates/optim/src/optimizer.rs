//! The face every optimizer shows: an object-safe trait and the context of a step.
use crate::{Error, Info, Probe, Result, StateDict};
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
    /// The learning rate of this step instead of the configured one. Groups with a rate of their own keep
    /// their ratio to it.
    pub lr: Option<f64>,
    /// The momentum (β₁ for the Adam family) of this step instead of the configured one.
    pub momentum: Option<f64>,
    /// Gradients are multiplied by this inside the kernel.
    pub grad_scale: f64,
    /// Gradients are clamped to ± this after scaling.
    pub grad_limit: f64,
    /// Whether to collect statistics for [`Optimizer::probe`].
    pub probe: bool,
}

impl Default for StepContext {
    fn default() -> Self {
        let (grad_scale, grad_limit) = (1.0, f64::INFINITY);
        Self { loss: None, lr: None, momentum: None, grad_scale, grad_limit, probe: false }
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
    /// With a learning rate.
    pub fn lr(self, lr: f64) -> Self {
        Self { lr: Some(lr), ..self }
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
    /// Clamps every gradient entry to ± `limit`.
    pub fn clip_value(self, limit: f64) -> Self {
        Self { grad_limit: limit, ..self }
    }
    /// Refuses what would carry a number into the weights that is none.
    pub(crate) fn check(&self, lr: f64) -> Result<()> {
        let refuse = |what, expected, found| Err(Error::Context { what, expected, found });
        match self {
            _ if !(lr >= 0.0 && lr.is_finite()) => refuse("lr", "a finite number of at least 0", lr),
            Self { momentum: Some(momentum), .. } if !(0.0..1.0).contains(momentum) => {
                refuse("momentum", "a number in [0, 1)", *momentum)
            }
            Self { grad_scale, .. } if !grad_scale.is_finite() => {
                refuse("grad_scale", "a finite number (is the gradient's norm finite?)", *grad_scale)
            }
            Self { grad_limit, .. } if grad_limit.is_nan() || *grad_limit < 0.0 => {
                refuse("grad_limit", "a number of at least 0", *grad_limit)
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
    /// With the loss of the batch, a scalar tensor.
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
        let read = |t: &Tensor| t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar::<f64>();
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

/// An optimizer over named parameters, whatever its rule.
pub trait Optimizer: Send {
    /// Updates every parameter that has a gradient. After an error nothing has changed.
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()>;
    /// As [`Optimizer::step`], with numbers that are still on the device. On the CPU it is the same step.
    fn step_deferred(&mut self, grads: &GradStore, context: &StepContext, deferred: &Deferred) -> Result<()> {
        self.step(grads, &deferred.read_into(*context)?)
    }
    /// Waits for the device and returns an error if it refused a deferred step. Call it before trusting what came after,
    /// for example where metrics are written.
    fn settle(&mut self) -> Result<()> {
        Ok(())
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
    /// All state: with it, training continues to the bit.
    fn state_dict(&self) -> Result<StateDict>;
    /// Replaces all state. State of another optimizer or of other parameters is refused with every difference.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;
    /// The statistics of the last step whose context asked for them.
    fn probe(&self) -> Option<&Probe>;
}
