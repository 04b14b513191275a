//! Dropout in all its forms: one mask type, drawn from a key or given.
use super::{dtype_error, shape_error, slice, tensor, with_slice};
use crate::kernels::Real;
use crate::rng::Rng;
use crate::{Error, Result, op_span};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, WithDType};
use rayon::prelude::*;
use std::sync::Arc;

const OP: &str = "dropout";
/// Elements that are drawn or multiplied in one task.
const CHUNK: usize = 1 << 14;

/// Which elements are kept, and the factor of those that are (1/(1 - p) for a share p of dropped ones).
#[derive(Clone, Debug, PartialEq)]
pub struct Mask {
    keep: Arc<Vec<u8>>,
    scale: f64,
    shape: Shape,
}

impl Mask {
    /// Drops each element with probability `p`. Element `i` depends on the key of `rng` and on `i` alone.
    ///
    /// ```
    /// # fn main() -> taper_models::Result<()> {
    /// use taper_models::{ops::Mask, rng::Rng};
    /// let key = |step| Rng::new(1, "dropout", "input", step);
    /// assert_eq!(Mask::draw(key(7), (2, 3), 0.5)?, Mask::draw(key(7), (2, 3), 0.5)?);
    /// # Ok(()) }
    /// ```
    pub fn draw(rng: Rng, shape: impl Into<Shape>, p: f64) -> Result<Self> {
        Self::draw_from(rng, 0, shape, p)
    }

    /// A part of a larger mask: its elements from number `first` on.
    pub fn draw_from(rng: Rng, first: usize, shape: impl Into<Shape>, p: f64) -> Result<Self> {
        if !(0.0..1.0).contains(&p) {
            return Err(Error::Argument { op: OP, expected: "a probability in 0..1", found: p.to_string() });
        }
        let shape = shape.into();
        let _span = op_span!(OP, "forward", 0, "mask of {}", shape.elem_count());
        let mut keep = vec![0; shape.elem_count()];
        keep.par_chunks_mut(CHUNK)
            .enumerate()
            .for_each(|(i, keep)| draw_keep(&rng, p, first + i * CHUNK, keep));
        Ok(Self { keep: Arc::new(keep), scale: 1.0 / (1.0 - p), shape })
    }

    /// The mask of a tensor whose elements are zero or one common factor.
    pub fn from_tensor(mask: &Tensor) -> Result<Self> {
        // First to the CPU: not every device has f64.
        let mask = mask.to_device(&Device::Cpu)?;
        let values = mask.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?;
        let scale = values.iter().copied().find(|v| *v != 0.0).unwrap_or(1.0);
        if let Some(other) = values.iter().find(|v| **v != 0.0 && **v != scale) {
            let found = format!("{scale} and {other}");
            return Err(Error::Argument { op: OP, expected: "a mask of zeros and one factor", found });
        }
        let keep = Arc::new(values.iter().map(|v| u8::from(*v != 0.0)).collect());
        Ok(Self { keep, scale, shape: mask.shape().clone() })
    }

    /// The factors as a tensor. A byte an element goes to the device, which is not waited for.
    pub fn to_tensor(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let keep = Tensor::from_slice(&self.keep, &self.shape, device)?;
        Ok(keep.to_dtype(dtype)?.affine(self.scale, 0.0)?)
    }

    /// The same elements in another shape of as many.
    pub(crate) fn reshaped(&self, shape: impl Into<Shape>) -> Self {
        Self { shape: shape.into(), ..self.clone() }
    }

    /// The shape it was drawn for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// One byte an element, 1 where it is kept.
    pub(crate) fn keep(&self) -> &[u8] {
        &self.keep
    }

    /// The factor of what is kept.
    pub(crate) fn scale(&self) -> f64 {
        self.scale
    }
}

/// Elements `first`, `first` + 1, … of a mask: 1 where one is kept.
pub(super) fn draw_keep(rng: &Rng, p: f64, first: usize, keep: &mut [u8]) {
    // An element is dropped if its 32 bits lie below p·2³²; half a draw each.
    let below = (p * 2f64.powi(32)).round() as u32;
    let mut rng = rng.clone().at(first as u64 / 2);
    if first % 2 == 1 {
        rng.fill_bytes(&mut [0; 4]);
    }
    let mut bytes = [0; 4096];
    for keep in keep.chunks_mut(bytes.len() / 4) {
        rng.fill_bytes(&mut bytes[..4 * keep.len()]);
        for (keep, word) in keep.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *keep = u8::from(u32::from_le_bytes(*word) >= below);
        }
    }
}

/// `x` times a mask that covers its last dimensions and is repeated over the ones before: the whole of `x` in
/// ordinary dropout, `[batch, features]` of `[steps, batch, features]` in locked dropout.
///
/// In f32 or f64. On devices other than the CPU it is candle's broadcast multiplication.
pub fn masked(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let trimmed: Vec<usize> = mask.shape.dims().iter().copied().skip_while(|d| *d == 1).collect();
    if !x.dims().ends_with(&trimmed) || x.elem_count() == 0 {
        let expected = format!("a tensor that is not empty and ends with {:?}", mask.shape);
        return Err(shape_error(OP, expected, format!("{:?}", x.dims())));
    }
    if !matches!(x.dtype(), DType::F32 | DType::F64) {
        return Err(dtype_error(OP, "f32 or f64", x.dtype()));
    }
    if !x.device().is_cpu() {
        return Ok(x.broadcast_mul(&mask.to_tensor(x.dtype(), x.device())?)?);
    }
    Ok(x.contiguous()?.apply_op1(Masked(mask.clone()))?)
}

/// Ordinary dropout: every element of its own.
pub fn dropout(x: &Tensor, p: f64, rng: Rng) -> Result<Tensor> {
    masked(x, &Mask::draw(rng, x.shape(), p)?)
}

/// Locked dropout of `[steps, batch, features]`: one mask for all steps.
pub fn locked_dropout(x: &Tensor, p: f64, rng: Rng) -> Result<Tensor> {
    match x.dims() {
        [_, batch, features] => masked(x, &Mask::draw(rng, (*batch, *features), p)?),
        found => Err(shape_error("locked_dropout", "[steps, batch, features]", format!("{found:?}"))),
    }
}

struct Masked(Mask);

impl Masked {
    fn apply<T: Real + WithDType>(&self, x: &[T]) -> Vec<T> {
        let (keep, scale) = (&self.0.keep[..], <T as Real>::from_f64(self.0.scale));
        let one = |(x, keep): (&T, &u8)| if *keep != 0 { *x * scale } else { T::ZERO };
        let mut y = vec![T::ZERO; x.len()];
        // Repetitions of a small mask, or parts of a large one.
        let length = if keep.len() > CHUNK { CHUNK } else { keep.len() };
        let tasks = y.par_chunks_mut(keep.len()).zip(x.par_chunks(keep.len()));
        tasks.with_min_len(CHUNK / length).for_each(|(y, x)| {
            let parts = y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).zip(keep.par_chunks(CHUNK));
            parts.for_each(|((y, x), keep)| {
                y.iter_mut().zip(x.iter().zip(keep).map(one)).for_each(|(y, v)| *y = v);
            });
        });
        y
    }
}

impl CustomOp1 for Masked {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let _span = op_span!(OP, "forward", 0);
        let y = match x {
            CpuStorage::F64(_) => CpuStorage::F64(self.apply(slice(x, layout)?)),
            _ => CpuStorage::F32(self.apply(slice(x, layout)?)),
        };
        Ok((y, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let _span = op_span!(OP, "backward", 0);
        let dx = match dy.dtype() {
            DType::F64 => with_slice::<f64, _>(dy, |dy| tensor(self.apply(dy), dy.len()))??,
            _ => with_slice::<f32, _>(dy, |dy| tensor(self.apply(dy), dy.len()))??,
        };
        Ok(Some(dx.reshape(dy.shape())?))
    }
}
