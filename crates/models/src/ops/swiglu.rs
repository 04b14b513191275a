//! The gate of SwiGLU.
use super::feature_map::{Element, FeatureMap, Host};
use super::{isa, shape_error};
use crate::kernels::{Buf, swiglu as kernel};
use crate::{Result, op_span};
use candle_core::Tensor;
use std::sync::Arc;

const OP: &str = "swiglu";

/// silu(gate) · up, with silu(x) = x/(1 + e⁻ˣ).
///
/// On devices other than the CPU it is composed of candle's silu, whose gradient is finite also where e⁻ˣ is not.
pub fn swiglu(gate: &FeatureMap, up: &FeatureMap) -> Result<FeatureMap> {
    if gate.dims()? != up.dims()? {
        let (expected, found) = (format!("two of shape {:?}", gate.dims()?), format!("{:?}", up.dims()?));
        return Err(shape_error(OP, expected, found));
    }
    match (gate, up) {
        (FeatureMap::F32(gate), FeatureMap::F32(up)) => forward(gate, up),
        (FeatureMap::F64(gate), FeatureMap::F64(up)) => forward(gate, up),
        (gate, up) => Ok(FeatureMap::Composed(composed(&gate.leave()?, &up.leave()?)?)),
    }
}

fn forward<T: Element>(gate: &Host<T>, up: &Host<T>) -> Result<FeatureMap> {
    let isa = isa()?;
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::dirty(gate.data.len());
    kernel::forward(isa, &gate.data, &up.data, &mut y);
    drop(span);
    let handle = (&gate.handle + &up.handle)?;
    let (gates, ups) = (gate.data.clone(), up.data.clone());
    let slots = [gate, up].map(|x| x.tracked().then(|| x.grad.clone()));
    let y = Host::record(OP, (gate.dims, Arc::new(y)), &handle, &[], move |mut dy| {
        let _span = op_span!(OP, "backward", 0);
        let mut dgate = Buf::dirty(dy.len());
        kernel::backward(isa, &gates, &ups, &mut dy, &mut dgate);
        for (slot, gradient) in slots.into_iter().zip([dgate, dy]) {
            if let Some(slot) = slot {
                slot.add(gradient);
            }
        }
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

/// The same of candle's ops.
fn composed(gate: &Tensor, up: &Tensor) -> candle_core::Result<Tensor> {
    gate.silu()? * up
}
