//! Sums of activations.
use super::feature_map::{Element, FeatureMap, Host};
use crate::kernels::{Buf, add_assign};
use crate::{Error, Result, op_span};
use std::sync::Arc;

const OP: &str = "add";

/// a + b, of one shape: two paths through a network that meet.
///
/// On devices other than the CPU this is candle's own sum.
pub fn add(a: &FeatureMap, b: &FeatureMap) -> Result<FeatureMap> {
    if a.dims()? != b.dims()? {
        let (expected, found) = (format!("two of shape {:?}", a.dims()?), format!("{:?}", b.dims()?));
        return Err(Error::Shape { op: OP, expected, found });
    }
    match (a, b) {
        (FeatureMap::F32(a), FeatureMap::F32(b)) => forward(a, b),
        (FeatureMap::F64(a), FeatureMap::F64(b)) => forward(a, b),
        (a, b) => Ok(FeatureMap::Composed((a.leave()? + b.leave()?)?)),
    }
}

fn forward<T: Element>(a: &Host<T>, b: &Host<T>) -> Result<FeatureMap> {
    let span = op_span!(OP, "forward", 0);
    let mut y = Buf::copy_of(&a.data);
    add_assign(&mut y, &b.data);
    drop(span);
    let slots: Vec<_> = [a, b].into_iter().filter(|x| x.tracked()).map(|x| x.grad.clone()).collect();
    let handle = (&a.handle + &b.handle)?;
    let y = Host::record(OP, (a.dims, Arc::new(y)), &handle, &[], move |dy| {
        let _span = op_span!(OP, "backward", 0);
        if let [first, second] = &slots[..] {
            first.add(Buf::copy_of(&dy));
            second.add(dy);
        } else if let [only] = &slots[..] {
            only.add(dy);
        }
        Ok([None, None])
    })?;
    Ok(T::wrap(y))
}
