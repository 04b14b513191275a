//! What convolutional networks are made of: layers with parameters, which know whether they are trained.
//!
//! Between them go [`FeatureMap`]s, through the ops of [`crate::ops`]: [`ops::max_pool2d`], [`ops::gelu`], [`ops::add`] and
//! others. A layer asks its [`VarBuilder`] for parameters under PyTorch's names; outside of training it records nothing for a
//! backward pass. A whole network of such layers is `examples/own_network.rs` of `taper-train`.
use crate::cost::{Cost, Count, product};
use crate::ops::{self, Activation, BatchNorm, Conv2d, FeatureMap, Precision, ScaleInit, Statistics};
use crate::{Error, Mode, Result, Task, init};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

/// The settings that every layer of a convolutional network shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Style {
    /// How closely convolutions follow the sum that defines them. Defaults to fast.
    pub conv: Precision,
    /// Initial scales of the normalisations. Defaults to ones.
    pub bn_scale_init: ScaleInit,
}

/// Kernel size, stride and padding, the same for both axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Rows and columns.
    pub size: usize,
    /// Steps between windows.
    pub stride: usize,
    /// Rows and columns of zeros around the image.
    pub padding: usize,
}

impl Kernel {
    /// Padded by half its size, so that an odd kernel of stride 1 keeps the size of the image.
    pub fn new(size: usize, stride: usize) -> Self {
        Self { size, stride, padding: size / 2 }
    }
}

/// A convolution: `weight` `[out, in, rows, columns]` and, if asked for, `bias` `[out]`.
#[derive(Clone, Debug)]
pub struct Conv {
    weight: Tensor,
    bias: Option<Tensor>,
    options: Conv2d,
}

impl Conv {
    /// Without bias, with PyTorch's initial values, from `ci` to `co` channels.
    pub fn new(ci: usize, co: usize, kernel: Kernel, style: Style, vb: VarBuilder) -> Result<Self> {
        let Kernel { size, stride, padding } = kernel;
        let init = init::torch_uniform(ci * size * size);
        let weight = vb.get_with_hints((co, ci, size, size), "weight", init)?;
        Ok(Self { weight, bias: None, options: Conv2d::square(stride, padding, style.conv) })
    }

    /// With bias.
    pub fn with_bias(ci: usize, co: usize, kernel: Kernel, style: Style, vb: VarBuilder) -> Result<Self> {
        let init = init::torch_uniform(ci * kernel.size * kernel.size);
        let bias = vb.get_with_hints(co, "bias", init)?;
        Ok(Self { bias: Some(bias), ..Self::new(ci, co, kernel, style, vb)? })
    }

    /// Without bias; the first channels begin as those of the input (`torch.nn.init.dirac_` on `weight[:in]`), the others with
    /// PyTorch's initial values.
    pub fn identity(ci: usize, co: usize, kernel: Kernel, style: Style, vb: VarBuilder) -> Result<Self> {
        let is_new = !vb.contains_tensor("weight");
        let conv = Self::new(ci, co, kernel, style, vb)?;
        if is_new && conv.weight.is_variable() {
            let (weight, taps) = (&conv.weight, kernel.size * kernel.size);
            // First to the CPU: not every device has f64.
            let values = weight.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?;
            let mut values = values.to_vec1::<f64>()?;
            for (o, filter) in values.chunks_exact_mut((ci * taps).max(1)).enumerate().take(ci) {
                filter.fill(0.0);
                filter[o * taps + kernel.size / 2 * kernel.size + kernel.size / 2] = 1.0;
            }
            let values = Tensor::from_vec(values, weight.shape(), &Device::Cpu)?.to_dtype(weight.dtype())?;
            Var::from_tensor(weight)?.set(&values.to_device(weight.device())?)?;
        }
        Ok(conv)
    }

    /// The convolution of `x`.
    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let (weight, bias) = (trained(&self.weight, mode), self.bias.as_ref().map(|b| trained(b, mode)));
        ops::conv2d(x, &weight, bias.as_ref(), &self.options)
    }
}

/// A parameter as a mode sees it: outside of training without a gradient.
pub(crate) fn trained(parameter: &Tensor, mode: Mode) -> Tensor {
    if mode.is_train() { parameter.clone() } else { parameter.detach() }
}

/// A batch normalisation that knows its mode, with what follows it in the same pass over memory.
#[derive(Clone, Debug)]
pub struct Norm {
    train: BatchNorm,
    eval: BatchNorm,
}

impl Norm {
    /// With a trained scale and shift.
    pub fn new(channels: usize, style: Style, vb: VarBuilder) -> Result<Self> {
        Ok(Self::of_op(BatchNorm::new(channels, style.bn_scale_init, vb)?))
    }

    /// Of a normalisation with settings of its own: [`BatchNorm::without_scale`], its `eps` and `momentum`.
    pub fn of_op(train: BatchNorm) -> Self {
        Self { eval: train.detach(), train }
    }

    /// The parameters for a mode, and where the statistics come from.
    pub fn of(&self, mode: Mode) -> (&BatchNorm, Statistics) {
        match mode {
            Mode::Train { .. } => (&self.train, Statistics::Batch),
            Mode::Statistics { .. } => (&self.eval, Statistics::Cumulative),
            Mode::Eval => (&self.eval, Statistics::Running),
        }
    }

    fn run(
        &self,
        x: &FeatureMap,
        residual: Option<&FeatureMap>,
        activation: Activation,
        mode: Mode,
    ) -> Result<FeatureMap> {
        let (bn, statistics) = self.of(mode);
        ops::batch_norm(x, bn, residual, activation, statistics)
    }

    /// Followed by nothing.
    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        self.run(x, None, Activation::None, mode)
    }

    /// Followed by ReLU.
    pub fn relu(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        self.run(x, None, Activation::Relu, mode)
    }

    /// Followed by GELU.
    pub fn gelu(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        self.run(x, None, Activation::Gelu, mode)
    }

    /// Followed by the addition of `residual` and ReLU.
    pub fn add_relu(&self, x: &FeatureMap, residual: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        self.run(x, Some(residual), Activation::Relu, mode)
    }
}

/// The classifier at the end: logits of the mean of each image's pixels.
#[derive(Clone, Debug)]
pub struct Head {
    weight: Tensor,
    bias: Tensor,
}

impl Head {
    /// From `features` channels to `classes` logits.
    pub fn new(features: usize, classes: usize, vb: VarBuilder) -> Result<Self> {
        let init = init::torch_uniform(features);
        Ok(Self {
            weight: vb.get_with_hints((classes, features), "weight", init)?,
            bias: vb.get_with_hints(classes, "bias", init)?,
        })
    }

    /// Logits `[n, classes]`.
    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<Tensor> {
        let pooled = ops::global_avg_pool(x)?;
        let (weight, bias) = (trained(&self.weight, mode), trained(&self.bias, mode));
        ops::linear(&pooled, &weight, Some(&bias), Activation::None)
    }
}

/// The images of a task: rows, columns, channels, classes.
pub(crate) fn images(model: &str, task: Task) -> Result<[usize; 4]> {
    match task {
        Task::Images { height, width, channels, classes }
            if ![height, width, channels, classes].contains(&0) =>
        {
            Ok([height, width, channels, classes])
        }
        task => Err(config_error(model, "name", format!("expected images, found {task}"))),
    }
}

pub(crate) fn config_error(model: &str, key: impl Into<String>, message: impl Into<String>) -> Error {
    Error::Config { model: model.into(), key: Some(key.into()), message: message.into() }
}

/// Refuses a zero in the list under `key`.
pub(crate) fn not_zero(model: &str, key: &str, what: &str, sizes: &[usize]) -> Result<()> {
    match sizes.iter().position(|size| *size == 0) {
        Some(i) => {
            Err(config_error(model, format!("{key}[{i}]"), format!("expected {what} of at least 1, found 0")))
        }
        None => Ok(()),
    }
}

/// Adds up what a network costs while its layers are walked through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meter {
    /// Rows and columns of the image at this point.
    pub h: usize,
    pub w: usize,
    pub cost: Cost,
}

impl Meter {
    pub fn new(h: usize, w: usize) -> Self {
        Self { h, w, cost: Cost::default() }
    }

    /// An activation of `c` channels is kept.
    pub fn keep(&mut self, c: usize) {
        self.cost.activation_bytes += product(&[4, self.h, self.w, c]);
    }

    /// A window moves over the image.
    pub fn window(&mut self, kernel: Kernel) {
        let out = |size: usize| (size + 2 * kernel.padding).saturating_sub(kernel.size) / kernel.stride + 1;
        (self.h, self.w) = (out(self.h), out(self.w));
    }

    /// A convolution whose output is kept (by the normalisation that follows).
    pub fn conv(&mut self, ci: usize, co: usize, kernel: Kernel) {
        self.window(kernel);
        let weights = product(&[ci, co, kernel.size, kernel.size]);
        self.cost.parameters += weights;
        self.cost.flops += weights * product(&[2, self.h, self.w]);
        self.keep(co);
    }

    /// A normalisation, its output kept (by the convolution that follows).
    pub fn norm(&mut self, c: usize) {
        self.cost.parameters += product(&[2, c]);
        self.keep(c);
    }

    /// The same without a scale.
    pub fn shift(&mut self, c: usize) {
        self.cost.parameters += Count::of(c);
        self.keep(c);
    }

    pub fn head(&mut self, features: usize, classes: usize) {
        self.cost.parameters += product(&[features, classes]) + Count::of(classes);
        self.cost.flops += product(&[2, features, classes]);
    }
}
