//! Dynamic loss scaling: f16 gradients that neither vanish nor overflow.
use crate::optimizer::one_element;
use crate::{Error, Optimizer, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

/// Multiplies losses by a factor before the backward pass, and gradients by its inverse inside the step. A step whose gradients
/// overflowed is skipped without a trace in parameters, state or counters, and the factor is halved; it is doubled after many
/// good steps.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{DType, Device, Var};
/// use taper_optim::{Adam, AdamConfig, LossScaler, StepContext};
///
/// let x = Var::ones(4, DType::F16, &Device::Cpu)?;
/// let mut optimizer = Adam::with_params(vec![("x".into(), x.clone())], AdamConfig::default())?;
/// let mut scaler = LossScaler::default();
/// for _ in 0..10 {
///     let loss = (x.sqr()? * 40.)?.mean_all()?;
///     let taken = scaler.backward_step(&mut optimizer, &loss, &StepContext::new())?;
///     assert_eq!(taken, scaler.skipped == 0 || scaler.good > 0);
/// }
/// assert!(scaler.skipped > 0 && scaler.scale < 65536.0); // 20 · 65536 is no f16
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LossScaler {
    /// What losses are multiplied by now. Starts at 65536.
    pub scale: f64,
    /// What the scale is multiplied by after `interval` good steps. Defaults to 2.
    pub growth: f64,
    /// What it is multiplied by after a step that was skipped. Defaults to 0.5.
    pub backoff: f64,
    /// Good steps before it grows. Defaults to 2000.
    pub interval: u64,
    /// Good steps since it last changed.
    pub good: u64,
    /// Steps skipped so far.
    pub skipped: u64,
}

impl Default for LossScaler {
    fn default() -> Self {
        Self { scale: 65536.0, growth: 2.0, backoff: 0.5, interval: 2000, good: 0, skipped: 0 }
    }
}

impl LossScaler {
    /// The loss to take the backward pass of, in f32 so that the scale does not overflow before the gradient can.
    pub fn scaled(&self, loss: &Tensor) -> Result<Tensor> {
        let loss = one_element(loss)?;
        let wide = if loss.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        Ok((loss.to_dtype(wide)? * self.scale)?)
    }

    /// A step with gradients of a scaled loss. False if it was skipped. `context` has the loss before it was scaled.
    pub fn step(
        &mut self,
        optimizer: &mut dyn Optimizer,
        grads: &GradStore,
        context: &StepContext,
    ) -> Result<bool> {
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return Err(Error::Context {
                what: "scale",
                expected: "a finite number above 0",
                found: self.scale,
            });
        }
        // Overflow is looked for whatever the context says: it is how the scale is found.
        let context = StepContext { check: true, ..context.scale(1.0 / self.scale) };
        let result = optimizer.step(grads, &context).and_then(|()| optimizer.settle());
        match result {
            Ok(()) => {
                self.good += 1;
                if self.good >= self.interval {
                    (self.scale, self.good) = ((self.scale * self.growth).min(f64::from(f32::MAX)), 0);
                }
                Ok(true)
            }
            Err(Error::GradientNotFinite(_) | Error::Context { what: "grad_scale", .. }) => {
                (self.scale, self.good) = ((self.scale * self.backoff).max(f64::MIN_POSITIVE), 0);
                self.skipped += 1;
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// The backward pass of a loss, scaled, and a step that knows the loss itself. False if it was skipped.
    pub fn backward_step(
        &mut self,
        optimizer: &mut dyn Optimizer,
        loss: &Tensor,
        context: &StepContext,
    ) -> Result<bool> {
        let value = one_element(loss)?.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?;
        let grads = self.scaled(loss)?.backward()?;
        self.step(optimizer, &grads, &context.loss(value))
    }
}
