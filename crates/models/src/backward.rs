//! A backward pass that does not copy parameter gradients.
//!
//! candle adds every gradient to a tensor of zeros. For activations that cannot be helped; for parameters, whose
//! gradients are large and have one source, it costs a pass over memory that a training step can do without. While
//! [`backward`] runs, our ops put gradients of variables aside and hand candle none; they join the store at the end.
//!
//! Walks nest on a thread: an op's backward pass may start one, and so may a task that the thread takes from rayon's pool
//! while it waits for its own. Each has a [`Walk`] of its own, and a gradient is put aside only by a node of that walk's
//! graph: a plain `loss.backward()` inside another walk keeps what is its own.
use crate::Result;
use crate::kernels::{Real, add_assign};
use crate::ops::tensor;
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, Tensor, TensorId, WithDType};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// One call of [`backward`].
struct Walk {
    nodes: HashSet<TensorId>,
    /// Parameters with the gradients put aside for them.
    aside: HashMap<TensorId, (Tensor, CpuStorage)>,
}

thread_local! {
    /// The walks under way on this thread, innermost last.
    static WALKS: RefCell<Vec<Walk>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with the innermost walk, if `node` is one of its nodes.
fn with_walk<R>(node: &Tensor, f: impl FnOnce(&mut Walk) -> R) -> Option<R> {
    WALKS.with_borrow_mut(|walks| walks.last_mut().filter(|walk| walk.nodes.contains(&node.id())).map(f))
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
    /// Ends the walk also when candle returns early with an error, or panics.
    struct Stop;
    impl Drop for Stop {
        fn drop(&mut self) {
            WALKS.with_borrow_mut(Vec::pop);
        }
    }
    let nodes = loss.sorted_nodes().into_iter().map(Tensor::id).collect();
    WALKS.with_borrow_mut(|walks| walks.push(Walk { nodes, aside: HashMap::new() }));
    let stop = Stop;
    let mut grads = loss.backward()?;
    let aside = WALKS.with_borrow_mut(|walks| walks.last_mut().map(|walk| std::mem::take(&mut walk.aside)));
    drop(stop);
    for (parameter, storage) in aside.unwrap_or_default().into_values() {
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

/// What the `bwd` of the op that made `node` returns for an operand: the gradient, unless it was put aside.
pub(crate) fn deliver<T: Real + WithDType>(
    node: &Tensor,
    operand: &Tensor,
    grad: Vec<T>,
) -> candle_core::Result<Option<Tensor>> {
    if !operand.is_variable() {
        return tensor(grad, operand.shape()).map(Some);
    }
    // Added up outside the walk: the parallel sum may wait, and the thread start another walk meanwhile.
    let mut sum = Some(match reclaim::<T>(node, operand)? {
        Some(mut earlier) => {
            add_assign(&mut earlier, &grad);
            earlier
        }
        None => grad,
    });
    with_walk(node, |walk| {
        let storage = sum.take().map(T::to_cpu_storage_owned);
        walk.aside.extend(storage.map(|storage| (operand.id(), (operand.clone(), storage))));
    });
    sum.map(|sum| tensor(sum, operand.shape())).transpose()
}

/// Takes back what was put aside for an operand, to be added to in place and delivered again.
pub(crate) fn reclaim<T: WithDType>(node: &Tensor, operand: &Tensor) -> candle_core::Result<Option<Vec<T>>> {
    let found = with_walk(node, |walk| walk.aside.remove(&operand.id())).flatten();
    found.map(|(_, storage)| T::cpu_storage_data(storage)).transpose()
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
