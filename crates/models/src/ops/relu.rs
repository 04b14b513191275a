//! Rectified linear units.
use super::feature_map::{Element, FeatureMap, Host, dispatch};
use crate::kernels::{Buf, map_pairs};
use crate::{Result, op_span};
use candle_core::Tensor;
use std::sync::Arc;

const OP: &str = "relu";

/// max(x, 0), with gradient 0 at 0 as in PyTorch (candle's is 1 there).
///
/// On devices other than the CPU: x · \[x > 0\], composed of candle's ops.
pub fn relu(x: &FeatureMap) -> Result<FeatureMap> {
    dispatch!(x, x => forward(x), t => composed(t))
}

fn forward<T: Element>(x: &Host<T>) -> Result<FeatureMap> {
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::dirty(x.data.len());
    // NaN fails the comparison and stays NaN.
    map_pairs(&mut y, &x.data, |y, x| *y = if x <= T::ZERO { T::ZERO } else { x });
    drop(span);
    let y = Arc::new(y);
    let (gate, dx) = (y.clone(), x.grad.clone());
    let y = Host::record(OP, (x.dims, y), &x.handle, &[], move |mut dy| {
        let _span = op_span!(OP, "backward", 0);
        map_pairs(&mut dy, &gate, |dy, y| *dy = if y > T::ZERO { *dy } else { T::ZERO });
        dx.add(dy);
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}

fn composed(x: &Tensor) -> Result<FeatureMap> {
    let open = x.gt(&x.zeros_like()?)?.to_dtype(x.dtype())?;
    Ok(FeatureMap::Composed((x * open)?))
}
