//! Embedding lookup.
use super::{Mask, dtype_error, index_dtype, indices, shape_error, slice, with_slice};
use crate::backward::{deliver, reclaim};
use crate::kernels::Real;
use crate::{Result, op_span};
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, WithDType};
use rayon::prelude::*;

const OP: &str = "embedding";

/// Rows of `weight` (`[vocabulary, features]`, f32 or f64) for `tokens` (u32 or i64, any shape): `[…, features]`.
///
/// `rows` drops whole rows of the vocabulary (embedding dropout). The gradient is accumulated row by row in the
/// order of the tokens. On devices other than the CPU it is composed of candle's index_select and multiplication, and
/// the tokens are not looked at, because that would wait for the device: candle's kernels stop at one that is none.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor};
/// let weight = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let tokens = Tensor::new(&[[1u32], [0]], &Device::Cpu)?;
/// let y = taper_models::ops::embedding(&weight, &tokens, None)?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[3.0, 4.0]], [[1.0, 2.0]]]);
/// # Ok(()) }
/// ```
pub fn embedding(weight: &Tensor, tokens: &Tensor, rows: Option<&Mask>) -> Result<Tensor> {
    let (vocabulary, features) = match weight.dims() {
        [v, f] if v * f > 0 && tokens.elem_count() > 0 => (*v, *f),
        found => {
            let found = format!("weight {found:?}, tokens {:?}", tokens.dims());
            return Err(shape_error(OP, "weight [vocabulary, features] and tokens, neither empty", found));
        }
    };
    if !matches!(weight.dtype(), DType::F32 | DType::F64) {
        return Err(dtype_error(OP, "f32 or f64 for weight", weight.dtype()));
    }
    if let Some(rows) = rows
        && rows.keep().len() != vocabulary
    {
        let (expected, found) = (format!("a mask of {vocabulary} rows"), format!("{:?}", rows.shape()));
        return Err(shape_error(OP, expected, found));
    }
    let shape: Vec<usize> = tokens.dims().iter().copied().chain([features]).collect();
    if !weight.device().is_cpu() {
        index_dtype(OP, tokens)?;
        return Ok(composed(weight, tokens, rows, shape)?);
    }
    let ids: Vec<usize> = indices(OP, tokens, vocabulary, None)?.into_iter().flatten().collect();
    let op = Embedding { ids, rows: rows.cloned(), shape: shape.into() };
    Ok(weight.contiguous()?.apply_op1(op)?)
}

/// The same of candle's ops, for devices without ours.
fn composed(
    weight: &Tensor,
    tokens: &Tensor,
    rows: Option<&Mask>,
    shape: Vec<usize>,
) -> candle_core::Result<Tensor> {
    let ids = tokens.flatten_all()?;
    let mut y = weight.index_select(&ids, 0)?;
    if let Some(rows) = rows {
        let factors = rows.to_tensor(weight.dtype(), weight.device())?.flatten_all()?;
        y = y.broadcast_mul(&factors.index_select(&ids, 0)?.unsqueeze(1)?)?;
    }
    y.reshape(shape)
}

struct Embedding {
    ids: Vec<usize>,
    rows: Option<Mask>,
    shape: Shape,
}

impl Embedding {
    fn factor<T: Real>(&self, id: usize) -> T {
        match &self.rows {
            None => T::ONE,
            Some(rows) if rows.keep()[id] != 0 => T::from_f64(rows.scale()),
            Some(_) => T::ZERO,
        }
    }

    fn forward<T: Real + WithDType>(&self, weight: &[T]) -> CpuStorage {
        let features = self.shape.elem_count() / self.ids.len();
        let mut y = Vec::with_capacity(self.shape.elem_count());
        for id in &self.ids {
            let (row, factor) = (&weight[id * features..(id + 1) * features], self.factor::<T>(*id));
            y.extend(row.iter().map(|w| *w * factor));
        }
        T::to_cpu_storage_owned(y)
    }

    fn backward<T: Real + WithDType>(
        &self,
        node: &Tensor,
        weight: &Tensor,
        dy: &[T],
    ) -> candle_core::Result<Option<Tensor>> {
        let (vocabulary, features) = weight.dims2()?;
        // A tied decoder has left its part of the gradient: the rows are added to it in place.
        let mut dw = reclaim::<T>(node, weight)?.unwrap_or_else(|| vec![T::ZERO; vocabulary * features]);
        // A task owns a range of the vocabulary and passes over all tokens in order.
        let range = vocabulary.div_ceil(64);
        dw.par_chunks_mut(range * features).enumerate().for_each(|(i, dw)| {
            let first = i * range;
            for (id, dy) in self.ids.iter().zip(dy.chunks_exact(features)) {
                if let Some(row) = id.checked_sub(first)
                    && let Some(dw) = dw.get_mut(row * features..(row + 1) * features)
                {
                    let factor = self.factor::<T>(*id);
                    dw.iter_mut().zip(dy).for_each(|(dw, dy)| *dw += *dy * factor);
                }
            }
        });
        deliver(node, weight, dw)
    }
}

impl CustomOp1 for Embedding {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, weight: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let _span = op_span!(OP, "forward", 0);
        let y = match weight {
            CpuStorage::F64(_) => self.forward::<f64>(slice(weight, layout)?),
            _ => self.forward::<f32>(slice(weight, layout)?),
        };
        Ok((y, self.shape.clone()))
    }

    fn bwd(&self, weight: &Tensor, y: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let _span = op_span!(OP, "backward", 0);
        match dy.dtype() {
            DType::F64 => with_slice(dy, |dy| self.backward::<f64>(y, weight, dy))?,
            _ => with_slice(dy, |dy| self.backward::<f32>(y, weight, dy))?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn composition_of_candle_ops_agrees() -> Result<()> {
        let values: Vec<f64> = (0..21).map(f64::from).collect();
        let weight = Var::from_tensor(&Tensor::from_vec(values, (7, 3), &Device::Cpu)?)?;
        let tokens = Tensor::new(&[[3u32, 1], [3, 6]], &Device::Cpu)?;
        let mask = Mask::from_tensor(&Tensor::new(&[0f64, 2.0, 2.0, 2.0, 0.0, 2.0, 0.0], &Device::Cpu)?)?;
        for rows in [None, Some(&mask)] {
            let ours = embedding(&weight, &tokens, rows)?;
            let theirs = composed(&weight, &tokens, rows, vec![2, 2, 3])?;
            assert_eq!(ours.to_vec3::<f64>()?, theirs.to_vec3::<f64>()?);
            let grad = |y: Tensor| -> Result<_> {
                Ok(y.sqr()?.sum_all()?.backward()?.get(&weight).unwrap().to_vec2::<f64>()?)
            };
            assert_eq!(grad(ours)?, grad(theirs)?);
        }
        Ok(())
    }
}
