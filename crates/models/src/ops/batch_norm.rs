//! Batch normalisation, with what usually follows it.
use super::feature_map::{Element, FeatureMap, Host, check_param};
use super::{isa, with_slice};
use crate::kernels::batch_norm::{Affine, Gate, Gradient, Moments, Normalized, Rows, apply, moments};
use crate::kernels::{Activation, Buf, Real};
use crate::{Error, Result, op_span};
use candle_core::{DType, Tensor, Var};
use candle_nn::{Init, VarBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, OnceLock};

const OP: &str = "batch_norm";
const JOINED: &str = "batch_norm_features";

/// Initial scales of a batch normalisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaleInit {
    /// Ones: PyTorch 1.2 and later.
    #[default]
    Ones,
    /// U(0, 1): PyTorch up to 1.1, with which the baselines of many papers were run.
    Uniform01,
}

/// The parameters and running statistics of a batch normalisation, under PyTorch's names.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    /// Ones without a gradient, where the scale is no parameter.
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    /// Added to the variance. 1e-5.
    pub eps: f64,
    /// Share of a batch in the running statistics. 0.1.
    pub momentum: f64,
}

/// Where the statistics come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistics {
    /// The batch, which also moves the running ones by a share of `momentum`: training.
    Batch,
    /// The batch, which also moves the running ones to their mean over all batches that were counted.
    Cumulative,
    /// The running ones: evaluation.
    Running,
}

impl BatchNorm {
    /// For `channels` channels.
    pub fn new(channels: usize, scale: ScaleInit, vb: VarBuilder) -> Result<Self> {
        let scale = match scale {
            ScaleInit::Ones => Init::Const(1.0),
            ScaleInit::Uniform01 => Init::Uniform { lo: 0.0, up: 1.0 },
        };
        let weight = vb.get_with_hints(channels, "weight", scale)?;
        Self::scaled_by(weight, channels, vb)
    }

    /// For `channels` channels whose scale is one and no parameter: there is no `weight`.
    pub fn without_scale(channels: usize, vb: VarBuilder) -> Result<Self> {
        Self::scaled_by(Tensor::ones(channels, vb.dtype(), vb.device())?, channels, vb)
    }

    fn scaled_by(weight: Tensor, channels: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            weight,
            bias: vb.get_with_hints(channels, "bias", Init::Const(0.0))?,
            running_mean: vb.get_with_hints(channels, "running_mean", Init::Const(0.0))?,
            running_var: vb.get_with_hints(channels, "running_var", Init::Const(1.0))?,
            num_batches_tracked: vb.get_with_hints_dtype(
                (),
                "num_batches_tracked",
                Init::Const(0.0),
                DType::I64,
            )?,
            eps: 1e-5,
            momentum: 0.1,
        })
    }

    /// The same without gradients for its parameters.
    pub fn detach(&self) -> Self {
        Self { weight: self.weight.detach(), bias: self.bias.detach(), ..self.clone() }
    }

    /// Moves the running statistics towards those of a batch of `count` pixels (unbiased variance).
    fn track(&self, batch: &Moments, count: usize, statistics: Statistics) -> Result<()> {
        let unbiased = count as f64 / (count as f64 - 1.0);
        let share = self.share(statistics)?;
        let update = |running: &Tensor, batch: &[f64], factor: f64| -> Result<()> {
            let old = running.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let blend = |(old, new): (&f64, &f64)| (1.0 - share) * old + share * factor * new;
            let new: Vec<f64> = old.iter().zip(batch).map(blend).collect();
            let new = Tensor::from_vec(new, running.shape(), running.device())?.to_dtype(running.dtype())?;
            Ok(Var::from_tensor(running)?.set(&new)?)
        };
        update(&self.running_mean, &batch.mean, 1.0)?;
        update(&self.running_var, &batch.var, unbiased)?;
        self.count_batch()
    }

    /// The share of the next batch in the running statistics.
    fn share(&self, statistics: Statistics) -> Result<f64> {
        match statistics {
            Statistics::Cumulative => Ok(1.0 / (self.num_batches_tracked.to_scalar::<i64>()? as f64 + 1.0)),
            _ => Ok(self.momentum),
        }
    }

    fn count_batch(&self) -> Result<()> {
        let next = self.num_batches_tracked.to_scalar::<i64>()? + 1;
        let next = Tensor::new(next, self.num_batches_tracked.device())?;
        Ok(Var::from_tensor(&self.num_batches_tracked)?.set(&next)?)
    }

    fn running(&self) -> Result<Moments> {
        let values = |t: &Tensor| t.to_dtype(DType::F64)?.to_vec1::<f64>();
        Ok(Moments { mean: values(&self.running_mean)?, var: values(&self.running_var)? })
    }

    fn check(&self, dtype: DType, channels: usize, pixels: usize, statistics: Statistics) -> Result<()> {
        check_param(OP, "a scale", &self.weight, dtype, &[channels])?;
        check_param(OP, "a shift", &self.bias, dtype, &[channels])?;
        if statistics != Statistics::Running && pixels < 2 {
            return Err(Error::Shape {
                op: OP,
                expected: "more than one value a channel to train".into(),
                found: format!("{pixels}: batches of at least 2, or larger images, have more"),
            });
        }
        Ok(())
    }
}

/// (x − mean) / σ · scale + shift, plus `residual`, then the activation: one op, two passes over memory each way.
///
/// On devices other than the CPU this is composed of
/// candle's ops.
pub fn batch_norm(
    x: &FeatureMap,
    bn: &BatchNorm,
    residual: Option<&FeatureMap>,
    activation: Activation,
    statistics: Statistics,
) -> Result<FeatureMap> {
    if let Some(residual) = residual
        && residual.dims()? != x.dims()?
    {
        let found = format!("{:?}", residual.dims()?);
        return Err(Error::Shape { op: OP, expected: format!("a residual {:?}", x.dims()?), found });
    }
    match (x, residual) {
        (FeatureMap::F32(x), None) => single(x, bn, None, activation, statistics),
        (FeatureMap::F64(x), None) => single(x, bn, None, activation, statistics),
        (FeatureMap::F32(x), Some(FeatureMap::F32(r))) => single(x, bn, Some(r), activation, statistics),
        (FeatureMap::F64(x), Some(FeatureMap::F64(r))) => single(x, bn, Some(r), activation, statistics),
        (x, r) => {
            let residual = r.map(FeatureMap::leave).transpose()?;
            composed(&x.leave()?, bn, residual.as_ref(), activation, statistics)
        }
    }
}

fn single<T: Element>(
    x: &Host<T>,
    bn: &BatchNorm,
    residual: Option<&Host<T>>,
    activation: Activation,
    statistics: Statistics,
) -> Result<FeatureMap> {
    let isa = isa()?;
    let [n, h, w, c] = x.dims;
    bn.check(T::DTYPE, c, n * h * w, statistics)?;
    let _span = op_span!(OP, "forward", 0, "{c} {h}x{w}");
    let moments = match statistics {
        Statistics::Batch | Statistics::Cumulative => {
            let batch = moments(isa, Rows::new(&x.data, c));
            bn.track(&batch, n * h * w, statistics)?;
            batch
        }
        Statistics::Running => bn.running()?,
    };
    let gamma = with_slice(&bn.weight, |g: &[T]| g.to_vec())?;
    let affine = with_slice(&bn.bias, |beta: &[T]| Affine::new(&moments, &gamma, beta, bn.eps))?;
    let mut y = Buf::dirty(x.data.len());
    apply(isa, &[Rows::new(&x.data, c)], &affine, residual.map(|r| &r.data[..]), activation, &mut y);
    let y = Arc::new(y);

    let handle = match residual {
        Some(residual) => (&x.handle + &residual.handle)?,
        None => x.handle.clone(),
    };
    let input = x.data.clone();
    // With a residual the gate cannot be computed from x alone: that of a ReLU is seen by its output, that of a GELU is not.
    let beside = match (activation, residual) {
        (Activation::Relu, Some(_)) => Some(y.clone()),
        (Activation::Gelu, Some(residual)) => Some(residual.data.clone()),
        _ => None,
    };
    let scale_wanted = bn.weight.track_op();
    let dx_slot = x.grad.clone();
    let residual_slot = residual.filter(|r| r.tracked()).map(|r| r.grad.clone());
    let (eps, of_batch) = (bn.eps, statistics != Statistics::Running);
    let y = Host::record(OP, (x.dims, y), &handle, &[&bn.weight, &bn.bias], move |mut dy| {
        let _span = op_span!(OP, "backward", 0, "{c} {h}x{w}");
        let rows = Rows::new(&input, c);
        let gate = match (activation, &beside) {
            (Activation::None, _) => Gate::None,
            (Activation::Relu, None) => Gate::Affine(&affine),
            (Activation::Relu, Some(output)) => Gate::Output(output),
            (Activation::Gelu, None) => Gate::Gelu(&affine),
            (Activation::Gelu, Some(residual)) => Gate::GeluOfSum(&affine, residual),
        };
        let with = Normalized { moments: &moments, gamma: &gamma, eps, of_batch };
        let grads = Gradient::new(isa, &[rows], &dy, gate, with);
        match residual_slot {
            Some(slot) => {
                let mut dx = Buf::dirty(dy.len());
                grads.input_and_residual(isa, rows, &mut dy, gate, &mut dx);
                dx_slot.add(dx);
                slot.add(dy);
            }
            None => {
                grads.input_in_place(isa, rows, &mut dy, gate);
                dx_slot.add(dy);
            }
        }
        Ok([scale_wanted.then_some(grads.gamma), Some(grads.beta)])
    })?;
    Ok(T::wrap(y))
}

/// Activations whose channels stand side by side, newest first, without being copied together: what a layer of a
/// dense block sees. The statistics of each part are computed once, whatever number of layers normalises it.
#[derive(Clone, Debug)]
pub enum Features {
    /// On the CPU, in f32.
    F32(Joined<f32>),
    /// On the CPU, in f64.
    F64(Joined<f64>),
    /// Concatenated, on other devices.
    Composed(Tensor),
}

/// The parts of [`Features`], oldest first.
#[derive(Clone, Debug)]
pub struct Joined<T: Real> {
    parts: Vec<(Host<T>, Arc<OnceLock<Moments>>)>,
    /// Follows from the handles of all parts.
    handle: Tensor,
}

impl Features {
    /// Of one activation.
    pub fn new(x: FeatureMap) -> Self {
        match x {
            FeatureMap::F32(x) => Features::F32(Joined::new(x)),
            FeatureMap::F64(x) => Features::F64(Joined::new(x)),
            FeatureMap::Composed(x) => Features::Composed(x),
        }
    }

    /// With the channels of `x` before those that are there.
    pub fn prepend(&mut self, x: FeatureMap) -> Result<()> {
        match (&mut *self, x) {
            (Features::F32(parts), FeatureMap::F32(x)) => parts.prepend(x),
            (Features::F64(parts), FeatureMap::F64(x)) => parts.prepend(x),
            (Features::Composed(old), FeatureMap::Composed(x)) => {
                *old = Tensor::cat(&[&x, &*old], 3)?;
                Ok(())
            }
            _ => Err(Error::Shape {
                op: "features",
                expected: "parts of one dtype and device".into(),
                found: "two".into(),
            }),
        }
    }
}

impl<T: Real> Joined<T> {
    fn new(x: Host<T>) -> Self {
        Self { handle: x.handle.clone(), parts: vec![(x, Arc::default())] }
    }

    fn prepend(&mut self, x: Host<T>) -> Result<()> {
        let images = |dims: [usize; 4]| [dims[0], dims[1], dims[2]];
        let expected = images(self.parts[0].0.dims);
        if images(x.dims) != expected {
            return Err(Error::Shape {
                op: "features",
                expected: format!("images {expected:?}"),
                found: format!("{:?}", images(x.dims)),
            });
        }
        self.handle = (&self.handle + &x.handle)?;
        self.parts.push((x, Arc::default()));
        Ok(())
    }

    /// The values of each part, newest first, with its channels.
    fn values(&self) -> Vec<(Arc<Buf<T>>, usize)> {
        self.parts.iter().rev().map(|(x, _)| (x.data.clone(), x.dims[3])).collect()
    }
}

/// [`batch_norm`] of the concatenation of `xs`, which is never made, followed by ReLU.
///
/// On devices other than the CPU the features are concatenated and this is composed of candle's ops.
pub fn batch_norm_features(xs: &Features, bn: &BatchNorm, statistics: Statistics) -> Result<FeatureMap> {
    match xs {
        Features::F32(xs) => joined(xs, bn, statistics),
        Features::F64(xs) => joined(xs, bn, statistics),
        Features::Composed(x) => composed(x, bn, None, Activation::Relu, statistics),
    }
}

fn joined<T: Element>(xs: &Joined<T>, bn: &BatchNorm, statistics: Statistics) -> Result<FeatureMap> {
    let isa = isa()?;
    let [n, h, w, _] = xs.parts[0].0.dims;
    let channels = xs.parts.iter().map(|(x, _)| x.dims[3]).sum();
    bn.check(T::DTYPE, channels, n * h * w, statistics)?;
    let _span = op_span!(JOINED, "forward", 0, "{channels} {h}x{w}");
    let moments = match statistics {
        Statistics::Batch | Statistics::Cumulative => {
            let (mut mean, mut var) = (Vec::with_capacity(channels), Vec::with_capacity(channels));
            for (x, known) in xs.parts.iter().rev() {
                let part = known.get_or_init(|| moments(isa, Rows::new(&x.data, x.dims[3])));
                mean.extend_from_slice(&part.mean);
                var.extend_from_slice(&part.var);
            }
            let batch = Moments { mean, var };
            bn.track(&batch, n * h * w, statistics)?;
            batch
        }
        Statistics::Running => bn.running()?,
    };
    let gamma = with_slice(&bn.weight, |g: &[T]| g.to_vec())?;
    let affine = with_slice(&bn.bias, |beta: &[T]| Affine::new(&moments, &gamma, beta, bn.eps))?;
    let values = xs.values();
    let rows: Vec<_> = values.iter().map(|(data, c)| Rows::new(data, *c)).collect();
    let mut y = Buf::dirty(n * h * w * channels);
    apply(isa, &rows, &affine, None, Activation::Relu, &mut y);
    drop(rows);

    let slots: Vec<_> = xs.parts.iter().rev().map(|(x, _)| x.tracked().then(|| x.grad.clone())).collect();
    let (eps, of_batch) = (bn.eps, statistics != Statistics::Running);
    let dims = [n, h, w, channels];
    let y = Host::record(JOINED, (dims, Arc::new(y)), &xs.handle, &[&bn.weight, &bn.bias], move |dy| {
        let _span = op_span!(JOINED, "backward", 0, "{channels} {h}x{w}");
        let rows: Vec<_> = values.iter().map(|(data, c)| Rows::new(data, *c)).collect();
        let gate = Gate::Affine(&affine);
        let with = Normalized { moments: &moments, gamma: &gamma, eps, of_batch };
        let grads = Gradient::new(isa, &rows, &dy, gate, with);
        let mut dxs = Vec::with_capacity(values.len());
        for (slot, (data, _)) in slots.iter().zip(&values) {
            let old = slot.as_ref().and_then(|slot| slot.take());
            let add = old.is_some();
            dxs.push((old.unwrap_or_else(|| Buf::dirty(data.len())), add));
        }
        let mut outs: Vec<(&mut [T], bool)> = dxs.iter_mut().map(|(dx, add)| (&mut dx[..], *add)).collect();
        grads.add_inputs(isa, &rows, &dy, gate, &mut outs);
        for (slot, (dx, _)) in slots.into_iter().zip(dxs) {
            if let Some(slot) = slot {
                slot.add(dx);
            }
        }
        Ok([Some(grads.gamma), Some(grads.beta)])
    })?;
    Ok(T::wrap(y))
}

/// The same from candle's ops, for other devices.
fn composed(
    x: &Tensor,
    bn: &BatchNorm,
    residual: Option<&Tensor>,
    activation: Activation,
    statistics: Statistics,
) -> Result<FeatureMap> {
    let (n, h, w, c) = x.dims4()?;
    bn.check(x.dtype(), c, n * h * w, statistics)?;
    let rows = x.reshape((n * h * w, c))?;
    let (mean, var) = match statistics {
        Statistics::Batch | Statistics::Cumulative => {
            let mean = rows.mean(0)?;
            let var = rows.broadcast_sub(&mean)?.sqr()?.mean(0)?;
            let unbiased = (n * h * w) as f64 / ((n * h * w) as f64 - 1.0);
            let share = bn.share(statistics)?;
            for (running, batch, factor) in
                [(&bn.running_mean, &mean, 1.0), (&bn.running_var, &var, unbiased)]
            {
                let kept = (running.detach() * (1.0 - share))?;
                let new = (kept + (batch.detach() * (share * factor))?)?;
                Var::from_tensor(running)?.set(&new)?;
            }
            // Added on the device, which is not waited for.
            let count = &bn.num_batches_tracked;
            let one = Tensor::new(1i64, count.device())?;
            Var::from_tensor(count)?.set(&(count.detach() + one)?)?;
            (mean, var)
        }
        Statistics::Running => (bn.running_mean.detach(), bn.running_var.detach()),
    };
    let scale = (&bn.weight / (var + bn.eps)?.sqrt()?)?;
    let y = rows.broadcast_sub(&mean)?.broadcast_mul(&scale)?.broadcast_add(&bn.bias)?;
    let y = y.reshape((n, h, w, c))?;
    let y = match residual {
        Some(residual) => (y + residual)?,
        None => y,
    };
    let y = FeatureMap::Composed(y);
    match activation {
        Activation::None => Ok(y),
        Activation::Relu => super::relu(&y),
        Activation::Gelu => super::gelu(&y),
    }
}
