//! Softmax cross-entropy.
use super::{dtype_error, index_dtype, indices, isa, shape_error, slice, tensor};
use crate::kernels::softmax::{Row, row};
use crate::kernels::{Isa, Real};
use crate::{Error, Result, op_span};
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Shape, Tensor, WithDType};
use rayon::prelude::*;
use std::sync::Mutex;

const OP: &str = "cross_entropy";

/// Options of [`cross_entropy`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CrossEntropy {
    /// Rows with this target count neither in the loss nor in its mean. Defaults to none.
    pub ignore_index: Option<i64>,
    /// Share of the target spread evenly over all classes, in 0..=1. Defaults to 0.
    pub label_smoothing: f64,
}

/// The mean negative log-likelihood of `targets` (`[n]`, u32 or i64) under the softmax of `logits` (`[n, classes]`,
/// f32 or f64), as PyTorch's `cross_entropy`: a scalar.
///
/// On the CPU the gradient is made in the forward pass, while a row is in cache, and handed out in the backward
/// pass; its entries below 1e-30 are zero. Losses are summed in f64 in the order of the rows. On other devices it
/// is composed of candle's log-softmax and gather, and the targets are not looked at, because that would wait for the
/// device: candle's kernels stop at one that is no class, and where all are ignored the loss is not a number.
///
/// ```
/// # fn main() -> taper_models::Result<()> {
/// use candle_core::{Device, Tensor};
/// use taper_models::ops::cross_entropy;
/// let logits = Tensor::new(&[[0f64, 0.0], [0.0, 3f64.ln()]], &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, 1], &Device::Cpu)?;
/// let loss = cross_entropy(&logits, &targets, &Default::default())?.to_scalar::<f64>()?;
/// assert!((loss - (2f64.ln() + (4f64 / 3.0).ln()) / 2.0).abs() < 1e-15);
/// # Ok(()) }
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor, options: &CrossEntropy) -> Result<Tensor> {
    let classes = match (logits.dims(), targets.dims()) {
        ([n, classes], [m]) if n == m && n * classes > 0 => *classes,
        _ => {
            return Err(shape_error(
                OP,
                "logits [n, classes] without empty dimensions and targets [n]",
                format!("logits {:?}, targets {:?}", logits.dims(), targets.dims()),
            ));
        }
    };
    if !matches!(logits.dtype(), DType::F32 | DType::F64) {
        return Err(dtype_error(OP, "f32 or f64 for logits", logits.dtype()));
    }
    check(OP, options)?;
    if !logits.device().is_cpu() {
        index_dtype(OP, targets)?;
        return Ok(composed(logits, targets, options)?);
    }
    let rows = target_rows(OP, targets, classes, options)?;
    Ok(logits.contiguous()?.apply_op1(Op { rows, gradient: Mutex::new(None), wanted: logits.track_op() })?)
}

/// Refuses options outside their ranges.
fn check(op: &'static str, options: &CrossEntropy) -> Result<()> {
    let smoothing = options.label_smoothing;
    match (0.0..=1.0).contains(&smoothing) {
        true => Ok(()),
        false => {
            let found = smoothing.to_string();
            Err(Error::Argument { op, expected: "label_smoothing in 0..=1", found })
        }
    }
}

/// What each row is compared with; `None` for a row that is ignored.
pub(super) fn target_rows(
    op: &'static str,
    targets: &Tensor,
    classes: usize,
    options: &CrossEntropy,
) -> Result<Vec<Option<Row>>> {
    check(op, options)?;
    let smoothing = options.label_smoothing;
    let classes = indices(op, targets, classes, options.ignore_index)?;
    let counted = classes.iter().flatten().count();
    if counted == 0 {
        return Err(shape_error(
            op,
            "at least one target that is not ignored",
            format!("{} targets, all ignored", classes.len()),
        ));
    }
    let scale = 1.0 / counted as f64;
    Ok(classes.into_iter().map(|c| c.map(|class| Row { class, scale, smoothing })).collect())
}

/// Replaces logits (plus `bias`, if there is one) by the gradient of their mean loss, which is returned.
pub(super) fn in_place<T: Real>(isa: Isa, logits: &mut [T], bias: Option<&[T]>, rows: &[Option<Row>]) -> f64 {
    let classes = (logits.len() / rows.len().max(1)).max(1);
    let one = |(logits, target): (&mut [T], &Option<Row>)| match target {
        Some(target) => row(isa, logits, bias, *target) * target.scale,
        None => {
            logits.fill(T::ZERO);
            0.0
        }
    };
    // About 16,000 entries a task: a few microseconds of exponentials.
    let grain = (16_384 / classes).max(1);
    let tasks = logits.par_chunks_mut(classes).zip(rows).with_min_len(grain);
    let losses: Vec<f64> = tasks.map(one).collect();
    losses.iter().sum()
}

struct Op {
    rows: Vec<Option<Row>>,
    gradient: Mutex<Option<Tensor>>,
    wanted: bool,
}

impl Op {
    fn forward<T: Real + WithDType>(
        &self,
        logits: &CpuStorage,
        layout: &Layout,
    ) -> candle_core::Result<CpuStorage> {
        let mut gradient = slice::<T>(logits, layout)?.to_vec();
        let loss = in_place(isa()?, &mut gradient, None, &self.rows);
        if self.wanted {
            let gradient = tensor(gradient, layout.shape())?;
            *self.gradient.lock().unwrap_or_else(|e| e.into_inner()) = Some(gradient);
        }
        Ok(T::to_cpu_storage_owned(vec![<T as Real>::from_f64(loss)]))
    }
}

impl CustomOp1 for Op {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let _span = op_span!(OP, "forward", 0);
        let loss = match logits {
            CpuStorage::F64(_) => self.forward::<f64>(logits, layout)?,
            _ => self.forward::<f32>(logits, layout)?,
        };
        Ok((loss, ().into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, upstream: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let gradient = self.gradient.lock().unwrap_or_else(|e| e.into_inner()).clone();
        let factor = upstream.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        match gradient {
            Some(gradient) if factor != 1.0 => Ok(Some(gradient.affine(factor, 0.0)?)),
            gradient => Ok(gradient),
        }
    }
}

/// The same of candle's ops, for devices without ours. Waits for nothing.
fn composed(logits: &Tensor, targets: &Tensor, options: &CrossEntropy) -> candle_core::Result<Tensor> {
    let likelihoods = candle_nn::ops::log_softmax(logits, D::Minus1)?;
    let counted = match options.ignore_index {
        Some(ignored) => Some(counted(targets, ignored)?),
        None => None,
    };
    // An ignored row may hold a class that there is not: it looks at class 0, with no weight.
    let classes = match &counted {
        Some(counted) => counted.where_cond(targets, &targets.zeros_like()?)?,
        None => targets.clone(),
    };
    let right = likelihoods.gather(&classes.unsqueeze(1)?, 1)?.squeeze(1)?;
    let smoothing = options.label_smoothing;
    let rows = ((right * (1.0 - smoothing))? + (likelihoods.mean(1)? * smoothing)?)?;
    match counted {
        Some(counted) => {
            let weight = counted.to_dtype(logits.dtype())?;
            (rows * &weight)?.sum_all()?.div(&weight.sum_all()?)?.neg()
        }
        None => rows.mean_all()?.neg(),
    }
}

/// Which targets are not ignored.
fn counted(targets: &Tensor, ignored: i64) -> candle_core::Result<Tensor> {
    match (targets.dtype(), u32::try_from(ignored)) {
        (DType::U32, Ok(ignored)) => targets.ne(ignored),
        // No u32 is negative, or larger than the largest.
        (DType::U32, Err(_)) => targets.ones_like()?.to_dtype(DType::U8),
        _ => targets.ne(ignored),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn composition_of_candle_ops_agrees() -> Result<()> {
        let values: Vec<f64> = (0..35).map(|i| ((i * 37 + 11) % 101) as f64 / 20.0 - 2.0).collect();
        let logits = Var::from_tensor(&Tensor::from_vec(values, (5, 7), &Device::Cpu)?)?;
        let targets = Tensor::new(&[3i64, -100, 0, 6, 2], &Device::Cpu)?;
        for label_smoothing in [0.0, 0.1, 1.0] {
            let options = CrossEntropy { ignore_index: Some(-100), label_smoothing };
            let (ours, theirs) =
                (cross_entropy(&logits, &targets, &options)?, composed(&logits, &targets, &options)?);
            let (ga, gb) = (ours.backward()?, theirs.backward()?);
            let difference = |a: &Tensor, b: &Tensor| -> candle_core::Result<f64> {
                (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
            };
            // A handful of f64 roundings of numbers near 1.
            assert!(difference(&ours.flatten_all()?, &theirs.flatten_all()?)? < 1e-14);
            assert!(difference(ga.get(&logits).unwrap(), gb.get(&logits).unwrap())? < 1e-14);
        }
        Ok(())
    }

    #[test]
    fn an_ignored_batch_is_refused() {
        let logits = Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap();
        let targets = Tensor::new(&[7i64, 7], &Device::Cpu).unwrap();
        let options = CrossEntropy { ignore_index: Some(7), label_smoothing: 0.0 };
        assert!(matches!(cross_entropy(&logits, &targets, &options), Err(Error::Shape { .. })));
    }
}
