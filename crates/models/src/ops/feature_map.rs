//! Activations: images `[n, h, w, channels]` on their way through a network.
use super::graph::{Slot, record};
use super::with_slice;
use crate::backward::deliver;
use crate::kernels::{Buf, Real};
use crate::{Error, Result};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, WithDType};
use std::sync::{Arc, Mutex, PoisonError};

/// A batch of images between two ops, with the channels of a pixel side by side; or of sequences, which are images of one row:
/// `[batch, 1, time, features]`.
///
/// On the CPU its values live beside candle's graph (see the module `graph`); on other devices it is a
/// plain tensor and every op on it is composed of candle's own.
#[derive(Clone, Debug)]
pub enum FeatureMap {
    /// On the CPU, in f32.
    F32(Host<f32>),
    /// On the CPU, in f64.
    F64(Host<f64>),
    /// A tensor whose ops are composed of candle's: for devices other than the CPU.
    Composed(Tensor),
}

/// An activation on the CPU.
#[derive(Clone, Debug)]
pub struct Host<T: Real> {
    pub(crate) dims: [usize; 4],
    pub(crate) data: Arc<Buf<T>>,
    pub(crate) grad: Arc<Slot<T>>,
    pub(crate) handle: Tensor,
}

/// Element types that activations have.
pub(crate) trait Element: Real + WithDType {
    fn wrap(map: Host<Self>) -> FeatureMap;
    fn store(values: Vec<Self>) -> CpuStorage;
}

impl Element for f32 {
    fn wrap(map: Host<f32>) -> FeatureMap {
        FeatureMap::F32(map)
    }
    fn store(values: Vec<f32>) -> CpuStorage {
        CpuStorage::F32(values)
    }
}

impl Element for f64 {
    fn wrap(map: Host<f64>) -> FeatureMap {
        FeatureMap::F64(map)
    }
    fn store(values: Vec<f64>) -> CpuStorage {
        CpuStorage::F64(values)
    }
}

impl<T: Real> Host<T> {
    /// Whether a gradient has to be computed for it.
    pub(crate) fn tracked(&self) -> bool {
        self.handle.track_op()
    }

    /// A result: `backward` gets its gradient, and returns those of `params` that it has.
    pub(crate) fn record(
        name: &'static str,
        (dims, data): ([usize; 4], Arc<Buf<T>>),
        input: &Tensor,
        params: &[&Tensor],
        backward: impl FnOnce(Buf<T>) -> Result<[Option<Vec<T>>; 2]> + Send + 'static,
    ) -> Result<Self>
    where
        T: WithDType,
    {
        let grad = Slot::new();
        let gathered = grad.clone();
        let owned: Vec<Tensor> = params.iter().map(|&param| param.clone()).collect();
        let handle = record(name, input, params, move |node| {
            // candle visits a node only after a node that used it, and every use adds a gradient.
            let dy = gathered.take().ok_or(Error::BackwardTwice { op: name })?;
            let mut told = [None, None];
            for ((told, param), grad) in told.iter_mut().zip(&owned).zip(backward(dy)?) {
                *told = grad.map(|grad| deliver(node, param, grad)).transpose()?.flatten();
            }
            Ok(told)
        })?;
        if handle.track_op() {
            crate::trace::keep(std::mem::size_of_val(&data[..]));
        }
        Ok(Self { dims, data, grad, handle })
    }
}

impl FeatureMap {
    /// From a tensor `[n, h, w, channels]`, which is copied.
    pub fn enter(x: &Tensor) -> Result<Self> {
        let dims = match *x.dims() {
            [n, h, w, c] if n * h * w * c > 0 => [n, h, w, c],
            _ => {
                let expected = "a non-empty [n, h, w, channels]".into();
                return Err(Error::Shape { op: "enter", expected, found: format!("{:?}", x.dims()) });
            }
        };
        match (x.device(), x.dtype()) {
            (Device::Cpu, DType::F32) => enter::<f32>(x, dims),
            (Device::Cpu, DType::F64) => enter::<f64>(x, dims),
            (Device::Cpu, found) => Err(Error::DType { op: "enter", expected: "f32 or f64", found }),
            _ => Ok(FeatureMap::Composed(x.clone())),
        }
    }

    /// Into a tensor `[n, h, w, channels]`.
    pub fn leave(&self) -> Result<Tensor> {
        match self {
            FeatureMap::F32(x) => leave(x),
            FeatureMap::F64(x) => leave(x),
            FeatureMap::Composed(x) => Ok(x.clone()),
        }
    }

    /// Images, rows, columns, channels.
    pub fn dims(&self) -> Result<[usize; 4]> {
        Ok(match self {
            FeatureMap::F32(x) => x.dims,
            FeatureMap::F64(x) => x.dims,
            FeatureMap::Composed(x) => x.dims4().map(|(n, h, w, c)| [n, h, w, c])?,
        })
    }
}

fn enter<T: Element>(x: &Tensor, dims: [usize; 4]) -> Result<FeatureMap> {
    let data = Arc::new(with_slice(x, |x: &[T]| Buf::copy_of(x))?);
    let grad = Slot::new();
    let handle = if x.track_op() {
        x.apply_op1(Enter { grad: grad.clone() })?
    } else {
        Tensor::zeros((), DType::F32, &Device::Cpu)?
    };
    Ok(T::wrap(Host { dims, data, grad, handle }))
}

fn leave<T: Element>(x: &Host<T>) -> Result<Tensor> {
    let leave = Leave { dims: x.dims, data: Mutex::new(Some(x.data.clone())), grad: x.grad.clone() };
    Ok(x.handle.apply_op1(leave)?)
}

/// From a tensor to a handle.
struct Enter<T: Real> {
    grad: Arc<Slot<T>>,
}

impl<T: Element> CustomOp1 for Enter<T> {
    fn name(&self) -> &'static str {
        "enter"
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }
    fn bwd(&self, x: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let grad = self.grad.take().ok_or(Error::BackwardTwice { op: "enter" })?;
        Ok(Some(Tensor::from_slice(&grad, x.shape(), &Device::Cpu)?))
    }
}

/// From a handle to a tensor.
struct Leave<T: Real> {
    dims: [usize; 4],
    /// Taken by the forward pass.
    data: Mutex<Option<Arc<Buf<T>>>>,
    grad: Arc<Slot<T>>,
}

impl<T: Element> CustomOp1 for Leave<T> {
    fn name(&self) -> &'static str {
        "leave"
    }
    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let data = self.data.lock().unwrap_or_else(PoisonError::into_inner).take();
        let values = data.map(|data| data.to_vec()).unwrap_or_default();
        let [n, h, w, c] = self.dims;
        Ok((T::store(values), Shape::from((n, h, w, c))))
    }
    fn bwd(&self, handle: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        self.grad.add(with_slice(grad, |grad: &[T]| Buf::copy_of(grad))?);
        Ok(Some(handle.zeros_like()?))
    }
}

/// Runs `$body` with the activation's element type at hand, or `$composed` on a tensor.
macro_rules! dispatch {
    ($map:expr, $x:ident => $body:expr, $t:ident => $composed:expr) => {
        match $map {
            $crate::ops::feature_map::FeatureMap::F32($x) => $body,
            $crate::ops::feature_map::FeatureMap::F64($x) => $body,
            $crate::ops::feature_map::FeatureMap::Composed($t) => $composed,
        }
    };
}
pub(crate) use dispatch;

/// Checks that a parameter has the given dtype and shape.
pub(crate) fn check_param(
    op: &'static str,
    what: &str,
    p: &Tensor,
    dtype: DType,
    dims: &[usize],
) -> Result<()> {
    if p.dtype() != dtype {
        return Err(Error::DType { op, expected: dtype.as_str(), found: p.dtype() });
    }
    if p.dims() != dims {
        return Err(Error::Shape {
            op,
            expected: format!("{what} {dims:?}"),
            found: format!("{:?}", p.dims()),
        });
    }
    Ok(())
}
