//! The network of "94% on CIFAR-10 in 3.29 Seconds on a Single GPU" (Jordan 2024, arXiv:2404.00498), airbench94.
//!
//! A convolution whose fixed filters whiten the images' patches, then groups of two 3×3 convolutions with a max-pool after the
//! first, GELU throughout, and a linear layer on the largest pixel of each channel. Where this differs: the pool before the
//! linear layer takes the whole image, which is the paper's 3×3 for images of 32×32 and permits others.
use crate::cost::{Cost, Count, largest, product};
use crate::init::torch_uniform;
use crate::layers::{Conv, Kernel, Meter, Norm, Style, config_error, images, not_zero, trained};
use crate::ops::{self, Activation, BatchNorm, Conv2d, FeatureMap, Precision, Window};
use crate::registry::{Architecture, Config};
use crate::{Error, Mode, Model, Result, Task, eigen, kernels};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarBuilder;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const NAME: &str = "airbench";
/// Each halves the image: more of them than this no image has.
const MOST_GROUPS: usize = 16;
/// Numbers of a patch: their eigenvectors take time with the third power.
const MOST_INPUTS: usize = 512;
/// The pool inside a group.
const POOL: Kernel = Kernel { size: 2, stride: 2, padding: 0 };

/// Configuration of `airbench`. The defaults are the paper's.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AirbenchConfig {
    /// Channels of each group of two convolutions. Defaults to \[64, 256, 256\]. Every group halves the image.
    pub widths: Vec<usize>,
    /// Rows and columns of the patches that are whitened. Defaults to 2.
    pub whiten_kernel: usize,
    /// The first training images from whose patches the whitening filters are computed; with 0 they stay as they were drawn.
    /// Defaults to 5000.
    pub whiten_images: usize,
    /// Added to the variances that the whitening divides by. Defaults to 5e-4.
    pub whiten_eps: f64,
    /// Share of a batch in the running statistics, PyTorch's momentum. Defaults to 0.4.
    pub bn_momentum: f64,
    /// Added to the variances of the normalisations. Defaults to 1e-12.
    pub bn_eps: f64,
    /// What the logits are multiplied by. Defaults to 1/9.
    pub logit_scale: f64,
    /// Whether convolutions may round more to be faster. Defaults to fast.
    pub conv: Precision,
}

impl Default for AirbenchConfig {
    fn default() -> Self {
        Self {
            widths: vec![64, 256, 256],
            whiten_kernel: 2,
            whiten_images: 5000,
            whiten_eps: 5e-4,
            bn_momentum: 0.4,
            bn_eps: 1e-12,
            logit_scale: 1.0 / 9.0,
            conv: Precision::default(),
        }
    }
}

impl AirbenchConfig {
    fn check(&self) -> Result<()> {
        let refuse = |key: &str, expected: String| Err(config_error(NAME, key, expected));
        let groups = self.widths.len();
        if groups == 0 || groups > MOST_GROUPS {
            return refuse(
                "widths",
                format!("expected channels of 1 to {MOST_GROUPS} groups, found {groups}"),
            );
        }
        not_zero(NAME, "widths", "channels", &self.widths)?;
        if self.whiten_kernel == 0 || self.whiten_kernel > MOST_INPUTS {
            let found = self.whiten_kernel;
            return refuse("whiten_kernel", format!("expected 1 to {MOST_INPUTS}, found {found}"));
        }
        for (key, value) in [("whiten_eps", self.whiten_eps), ("bn_eps", self.bn_eps)] {
            if !(value > 0.0 && value.is_finite()) {
                return refuse(key, format!("expected a number above 0, found {value}"));
            }
        }
        if !(0.0..=1.0).contains(&self.bn_momentum) {
            return refuse("bn_momentum", format!("expected a share in 0..1, found {}", self.bn_momentum));
        }
        if !(self.logit_scale > 0.0 && self.logit_scale.is_finite()) {
            return refuse("logit_scale", format!("expected a number above 0, found {}", self.logit_scale));
        }
        Ok(())
    }

    fn whiten(&self) -> Kernel {
        Kernel { size: self.whiten_kernel, stride: 1, padding: 0 }
    }

    /// Rows and columns that an image needs to be whitened and halved by every group.
    fn least_side(&self) -> usize {
        (1usize << self.widths.len().min(MOST_GROUPS)).saturating_add(self.whiten_kernel.saturating_sub(1))
    }

    /// Rows, columns, channels and classes, and the whitening filters.
    fn sizes(&self, task: Task) -> Result<([usize; 4], usize)> {
        self.check()?;
        let [h, w, channels, classes] = images(NAME, task)?;
        let least = self.least_side();
        if h.min(w) < least {
            let groups = self.widths.len();
            let message =
                format!("expected images of at least {least}×{least} for {groups} groups, found {h}×{w}");
            return Err(config_error(NAME, "widths", message));
        }
        let inputs = product(&[channels, self.whiten_kernel, self.whiten_kernel]);
        if inputs > Count::of(MOST_INPUTS) {
            let message = format!("expected patches of at most {MOST_INPUTS} numbers, found {}", inputs.0);
            return Err(config_error(NAME, "whiten_kernel", message));
        }
        Ok(([h, w, channels, classes], 2 * inputs.0 as usize))
    }

    /// Channels into and out of each group.
    fn groups(&self, filters: usize) -> impl Iterator<Item = (usize, usize)> {
        let inputs = std::iter::once(filters).chain(self.widths.iter().copied());
        inputs.zip(self.widths.iter().copied())
    }
}

impl Config for AirbenchConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Airbench::new(self, task, vb)?))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        let ([h, w, channels, classes], filters) = self.sizes(task)?;
        let mut meter = Meter::new(h, w);
        // The filters are no parameters, the bias is; both the convolution's output and the activation are kept.
        meter.window(self.whiten());
        let size = self.whiten_kernel;
        meter.cost.flops += product(&[2, meter.h, meter.w, filters, channels, size, size]);
        meter.shift(filters);
        meter.keep(filters);
        for (ci, co) in self.groups(filters) {
            // Its output is there until it is pooled.
            meter.conv(ci, co, Kernel::new(3, 1));
            meter.window(POOL);
            meter.keep(co);
            meter.shift(co);
            meter.conv(co, co, Kernel::new(3, 1));
            meter.shift(co);
        }
        let features = self.widths.last().copied().unwrap_or(filters);
        meter.cost.parameters += product(&[features, classes]);
        meter.cost.flops += product(&[2, features, classes]);
        Ok(meter.cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::Airbench(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        let side = self.least_side();
        Some(Task::Images { height: side, width: side, channels: 1, classes: 1 })
    }

    fn heaviest(&self) -> Option<String> {
        Some(largest("widths", &self.widths))
    }
}

/// The network. Names: `whiten.{weight,bias}`, `group<i>.{conv1,norm1,conv2,norm2}`, `head.weight`. The filters `whiten.weight` are
/// not trained, and normalisations have no scale.
///
/// In evaluation nothing is recorded for a backward pass, as under PyTorch's `no_grad`.
#[derive(Debug)]
pub struct Airbench {
    whiten: Whiten,
    groups: Vec<Group>,
    head: Tensor,
    logit_scale: f64,
}

#[derive(Debug)]
struct Whiten {
    weight: Tensor,
    bias: Tensor,
    kernel: usize,
    images: usize,
    eps: f64,
    conv: Precision,
}

#[derive(Debug)]
struct Group {
    conv1: Conv,
    norm1: Norm,
    conv2: Conv,
    norm2: Norm,
}

impl Airbench {
    /// Builds the network for images of a task.
    pub fn new(config: &AirbenchConfig, task: Task, vb: VarBuilder) -> Result<Self> {
        let ([_, _, channels, classes], filters) = config.sizes(task)?;
        let (style, size) = (Style { conv: config.conv, ..Style::default() }, config.whiten_kernel);
        let whiten = vb.pp("whiten");
        let whiten = Whiten {
            weight: whiten.get_with_hints(
                (filters, channels, size, size),
                "weight",
                torch_uniform(filters / 2),
            )?,
            bias: whiten.get_with_hints(filters, "bias", candle_nn::init::ZERO)?,
            kernel: size,
            images: config.whiten_images,
            eps: config.whiten_eps,
            conv: config.conv,
        };
        let norm = |channels: usize, vb: VarBuilder| {
            let mut bn = BatchNorm::without_scale(channels, vb)?;
            (bn.eps, bn.momentum) = (config.bn_eps, config.bn_momentum);
            Ok::<_, Error>(Norm::of_op(bn))
        };
        let mut groups = Vec::new();
        for (i, (ci, co)) in config.groups(filters).enumerate() {
            let vb = vb.pp(format!("group{}", i + 1));
            groups.push(Group {
                conv1: Conv::identity(ci, co, Kernel::new(3, 1), style, vb.pp("conv1"))?,
                norm1: norm(co, vb.pp("norm1"))?,
                conv2: Conv::identity(co, co, Kernel::new(3, 1), style, vb.pp("conv2"))?,
                norm2: norm(co, vb.pp("norm2"))?,
            });
        }
        let features = config.widths.last().copied().unwrap_or(filters);
        let head = vb.pp("head").get_with_hints((classes, features), "weight", torch_uniform(features))?;
        Ok(Self { whiten, groups, head, logit_scale: config.logit_scale })
    }
}

impl Group {
    fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let x = self.conv1.forward(x, mode)?;
        let x = ops::max_pool2d(&x, &Window::square(POOL.size, POOL.stride, POOL.padding))?;
        let x = self.norm1.gelu(&x, mode)?;
        let x = self.conv2.forward(&x, mode)?;
        self.norm2.gelu(&x, mode)
    }
}

impl Model for Airbench {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let Whiten { weight, bias, conv, .. } = &self.whiten;
        let options = Conv2d::square(1, 0, *conv);
        let x = FeatureMap::enter(input)?;
        let mut x = ops::gelu(&ops::conv2d(&x, &weight.detach(), Some(&trained(bias, mode)), &options)?)?;
        for group in &self.groups {
            x = group.forward(&x, mode)?;
        }
        let features = ops::global_max_pool(&x)?;
        let logits = ops::linear(&features, &trained(&self.head, mode), None, Activation::None)?;
        Ok((logits * self.logit_scale)?)
    }

    fn wants_images(&self) -> usize {
        self.whiten.images
    }

    fn see_images(&mut self, images: &Tensor) -> Result<()> {
        let Whiten { weight, kernel, eps, .. } = &self.whiten;
        let filters = whitening(images, weight.dims()[1], *kernel, *eps)?;
        let filters = Tensor::from_vec(filters, weight.shape(), &Device::Cpu)?;
        let filters = filters.to_dtype(weight.dtype())?.to_device(weight.device())?;
        Ok(Var::from_tensor(weight)?.set(&filters)?)
    }
}

/// Filters `[2 d, channels, kernel, kernel]` that whiten patches of `d` numbers: the eigenvectors of the patches' second moments
/// (no mean is subtracted) over the roots of their eigenvalues plus `eps`, largest eigenvalue first, then the same negated.
fn whitening(images: &Tensor, channels: usize, kernel: usize, eps: f64) -> Result<Vec<f64>> {
    const OP: &str = "whiten";
    /// Images that a task sums up.
    const CHUNK: usize = 64;
    let &[n, h, w, c] = images.dims() else {
        let expected = "images [n, height, width, channels]".into();
        return Err(Error::Shape { op: OP, expected, found: format!("{:?}", images.dims()) });
    };
    if n == 0 || c != channels || h < kernel || w < kernel {
        let expected = format!("at least one image of {kernel} by {kernel} or more with {channels} channels");
        return Err(Error::Shape { op: OP, expected, found: format!("{:?}", images.dims()) });
    }
    let pixels = images.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let (isa, d) = (ops::isa()?, c * kernel * kernel);
    let of_chunk = |images: &[f32]| {
        let (mut sums, mut patch) = (vec![0f64; d * d], vec![0f64; d]);
        kernels::vectorize(
            isa,
            #[inline(always)]
            || {
                for image in images.chunks_exact(h * w * c) {
                    for (y, x) in (0..=h - kernel).flat_map(|y| (0..=w - kernel).map(move |x| (y, x))) {
                        for (i, value) in patch.iter_mut().enumerate() {
                            // PyTorch's order: channel, row, column.
                            let (channel, row, column) =
                                (i / (kernel * kernel), i / kernel % kernel, i % kernel);
                            *value = f64::from(image[((y + row) * w + x + column) * c + channel]);
                        }
                        for (sums, a) in sums.chunks_exact_mut(d).zip(&patch) {
                            sums.iter_mut().zip(&patch).for_each(|(sum, b)| *sum += a * b);
                        }
                    }
                }
            },
        );
        sums
    };
    let chunks: Vec<Vec<f64>> = pixels.par_chunks(CHUNK * h * w * c).map(of_chunk).collect();
    let patches = n as f64 * ((h - kernel + 1) * (w - kernel + 1)) as f64;
    let moment = |i: usize| chunks.iter().map(|sums| sums[i]).sum::<f64>() / patches;
    let moments: Vec<f64> = (0..d * d).map(moment).collect();
    if let Some(found) = moments.iter().find(|m| !m.is_finite()) {
        return Err(Error::Argument {
            op: OP,
            expected: "finite pixels",
            found: format!("moments of {found}"),
        });
    }
    let pairs = eigen::symmetric(moments, d);
    let scaled = |sign: f64| {
        let scale = move |value: &f64| sign / (value.max(0.0) + eps).sqrt();
        pairs.iter().flat_map(move |(value, v)| v.iter().map(move |x| x * scale(value)))
    };
    Ok(scaled(1.0).chain(scaled(-1.0)).collect())
}
