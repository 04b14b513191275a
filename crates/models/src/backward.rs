//! A backward pass that does not copy parameter gradients.
//!
//! candle adds every gradient to a tensor of zeros. For activations that cannot be helped; for parameters, whose
//! gradients are large and have one source, it costs a pass over memory that a training step can do without. While
//! [`backward`] runs, our ops put gradients of variables aside and hand candle none; they join the store at the end.
use crate::Result;
use crate::kernels::{Real, add_assign};
use crate::ops::tensor;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Tensor, WithDType};
use std::cell::RefCell;

/// Gradients put aside, in the order in which their parameters first appeared.
type Aside = Vec<(Tensor, CpuStorage)>;

thread_local! {
    static ASIDE: RefCell<Option<Aside>> = const { RefCell::new(None) };
}

/// `loss.backward()` with the same result and less copying.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor, Var};
/// use taper_models::ops::{Activation, linear};
/// let w = Var::new(&[[2f32, 3.0]], &Device::Cpu)?;
/// let x = Tensor::new(&[[5f32, 7.0]], &Device::Cpu)?;
/// let grads = taper_models::backward(&linear(&x, &w, None, Activation::None)?.sum_all()?)?;
/// assert_eq!(grads.get(&w).unwrap().to_vec2::<f32>()?, [[5.0, 7.0]]);
/// # Ok(()) }
/// ```
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    /// Stops the collection also when candle returns early with an error.
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            ASIDE.set(None);
        }
    }
    ASIDE.set(Some(Vec::new()));
    let stop = Stop;
    let mut grads = loss.backward()?;
    let aside = ASIDE.take().unwrap_or_default();
    drop(stop);
    for (parameter, storage) in aside {
        let grad = match storage {
            CpuStorage::F64(grad) => tensor(grad, parameter.shape())?,
            storage => tensor(f32::cpu_storage_data(storage)?, parameter.shape())?,
        };
        // candle's own ops may have used the parameter too.
        let grad = match grads.remove(&parameter) {
            Some(other) => (other + grad)?,
            None => grad,
        };
        grads.insert(&parameter, grad);
    }
    Ok(grads)
}

/// What an op's `bwd` returns for an operand: the gradient, unless it was put aside.
pub(crate) fn deliver<T: Real + WithDType>(
    operand: &Tensor,
    grad: Vec<T>,
) -> candle_core::Result<Option<Tensor>> {
    let rest = ASIDE.with_borrow_mut(|aside| match aside {
        Some(aside) if operand.is_variable() => {
            match aside.iter_mut().find(|(parameter, _)| parameter.id() == operand.id()) {
                None => aside.push((operand.clone(), T::to_cpu_storage_owned(grad))),
                Some((_, storage)) => {
                    // Emptied for a moment: candle lends slices of a storage only immutably.
                    let mut sum =
                        T::cpu_storage_data(std::mem::replace(storage, CpuStorage::U8(Vec::new())))?;
                    add_assign(&mut sum, &grad);
                    *storage = T::to_cpu_storage_owned(sum);
                }
            }
            Ok::<_, candle_core::Error>(None)
        }
        _ => Ok(Some(grad)),
    })?;
    rest.map(|grad| tensor(grad, operand.shape())).transpose()
}

/// Takes back what was put aside for an operand, to be added to in place and delivered again.
pub(crate) fn reclaim<T: WithDType>(operand: &Tensor) -> candle_core::Result<Option<Vec<T>>> {
    let found = ASIDE.with_borrow_mut(|aside| {
        let aside = aside.as_mut()?;
        let at = aside.iter().position(|(parameter, _)| parameter.id() == operand.id())?;
        Some(aside.swap_remove(at).1)
    });
    found.map(T::cpu_storage_data).transpose()
}

#[cfg(test)]
mod tests {
    use crate::ops::{Activation, linear};
    use candle_core::{Device, Tensor, Var};

    #[test]
    fn gradients_of_our_ops_and_candles_add_up() -> crate::Result<()> {
        let w = Var::new(&[[2f64, 3.0], [5.0, 7.0]], &Device::Cpu)?;
        let x = Tensor::new(&[[1f64, 4.0]], &Device::Cpu)?;
        let twice = linear(&linear(&x, &w, None, Activation::None)?, &w, None, Activation::Relu)?;
        let loss = (twice.sqr()?.sum_all()? + w.sqr()?.sum_all()?)?;
        let (ours, candles) = (super::backward(&loss)?, loss.backward()?);
        let (a, b) = (ours.get(&w).unwrap().to_vec2::<f64>()?, candles.get(&w).unwrap().to_vec2::<f64>()?);
        assert_eq!(a, b); // whole numbers
        assert!(super::backward(&Tensor::new(1f64, &Device::Cpu)?)?.get(&w).is_none());
        Ok(())
    }
}
