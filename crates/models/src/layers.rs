//! What the convolutional networks are made of, and what it costs.
use crate::cost::{Cost, Count, product};
use crate::ops::{self, BatchNorm, Conv2d, FeatureMap, Precision, ScaleInit, Statistics};
use crate::{Error, Mode, Result, Task, init};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

/// The settings that every layer of a convolutional network shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Style {
    pub conv: Precision,
    pub bn_scale_init: ScaleInit,
}

/// A convolution without bias.
#[derive(Clone, Debug)]
pub(crate) struct Conv {
    weight: Tensor,
    options: Conv2d,
}

/// Kernel size, stride and padding, the same for both axes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kernel {
    pub size: usize,
    pub stride: usize,
    pub padding: usize,
}

impl Kernel {
    pub fn new(size: usize, stride: usize) -> Self {
        Self { size, stride, padding: size / 2 }
    }
}

impl Conv {
    pub fn new(ci: usize, co: usize, kernel: Kernel, style: Style, vb: VarBuilder) -> Result<Self> {
        let Kernel { size, stride, padding } = kernel;
        let init = init::torch_uniform(ci * size * size);
        let weight = vb.get_with_hints((co, ci, size, size), "weight", init)?;
        Ok(Self { weight, options: Conv2d::square(stride, padding, style.conv) })
    }

    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        if mode.is_train() {
            return ops::conv2d(x, &self.weight, None, &self.options);
        }
        ops::conv2d(x, &self.weight.detach(), None, &self.options)
    }
}

/// A batch normalisation that knows its mode.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    train: BatchNorm,
    eval: BatchNorm,
}

impl Norm {
    pub fn new(channels: usize, style: Style, vb: VarBuilder) -> Result<Self> {
        let train = BatchNorm::new(channels, style.bn_scale_init, vb)?;
        Ok(Self { eval: train.detach(), train })
    }

    /// The parameters for a mode, and where the statistics come from.
    pub fn of(&self, mode: Mode) -> (&BatchNorm, Statistics) {
        match mode {
            Mode::Train { .. } => (&self.train, Statistics::Batch),
            Mode::Statistics { .. } => (&self.eval, Statistics::Cumulative),
            Mode::Eval => (&self.eval, Statistics::Running),
        }
    }

    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let (bn, statistics) = self.of(mode);
        ops::batch_norm(x, bn, None, false, statistics)
    }

    pub fn relu(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let (bn, statistics) = self.of(mode);
        ops::batch_norm(x, bn, None, true, statistics)
    }

    pub fn add_relu(&self, x: &FeatureMap, residual: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let (bn, statistics) = self.of(mode);
        ops::batch_norm(x, bn, Some(residual), true, statistics)
    }
}

/// The classifier at the end: logits of the mean of each image's pixels.
#[derive(Clone, Debug)]
pub(crate) struct Head {
    weight: Tensor,
    bias: Tensor,
}

impl Head {
    pub fn new(features: usize, classes: usize, vb: VarBuilder) -> Result<Self> {
        let init = init::torch_uniform(features);
        Ok(Self {
            weight: vb.get_with_hints((classes, features), "weight", init)?,
            bias: vb.get_with_hints(classes, "bias", init)?,
        })
    }

    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<Tensor> {
        let pooled = ops::global_avg_pool(x)?;
        let (weight, bias) = match mode.is_train() {
            true => (self.weight.clone(), self.bias.clone()),
            false => (self.weight.detach(), self.bias.detach()),
        };
        ops::linear(&pooled, &weight, Some(&bias), ops::Activation::None)
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

    pub fn head(&mut self, features: usize, classes: usize) {
        self.cost.parameters += product(&[features, classes]) + Count::of(classes);
        self.cost.flops += product(&[2, features, classes]);
    }
}
