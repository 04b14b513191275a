//! Residual networks: the CIFAR ones of the paper (kuangliu's names), and ImageNet's.
use crate::cost::{Cost, Count, check_layers, largest, product};
use crate::layers::{Conv, Head, Kernel, Meter, Norm, Style, config_error, images, not_zero};
use crate::ops::{self, FeatureMap, Precision, ScaleInit, Window};
use crate::registry::{Architecture, Config, Registry};
use crate::{Mode, Model, Result, Task};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a residual block transforms its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BlockKind {
    /// Two 3×3 convolutions.
    #[default]
    Basic,
    /// 1×1 to the width, 3×3, 1×1 to four times the width.
    Bottleneck,
}

/// How an image enters the network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stem {
    /// A 3×3 convolution of stride 1, for images of 32×32.
    #[default]
    Cifar,
    /// A 7×7 convolution of stride 2 and a 3×3 max-pool of stride 2.
    Imagenet,
}

/// Configuration of a residual network.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResNetConfig {
    /// Blocks of each stage. Defaults to \[2, 2, 2, 2\] (ResNet-18).
    pub num_blocks: Vec<usize>,
    /// Channels of each stage. Defaults to \[64, 128, 256, 512\]. Every stage but the first halves the image.
    pub widths: Vec<usize>,
    /// What a block is made of. Defaults to basic.
    pub block: BlockKind,
    /// How an image enters. Defaults to cifar.
    pub stem: Stem,
    /// Whether convolutions may round more to be faster. Defaults to fast.
    pub conv: Precision,
    /// Initial scales of the normalisations. Defaults to ones.
    pub bn_scale_init: ScaleInit,
}

impl Default for ResNetConfig {
    fn default() -> Self {
        Self::new([2, 2, 2, 2], BlockKind::Basic, Stem::Cifar)
    }
}

impl ResNetConfig {
    /// Four stages of the usual widths.
    pub fn new(num_blocks: [usize; 4], block: BlockKind, stem: Stem) -> Self {
        let style = Style::default();
        Self {
            num_blocks: num_blocks.to_vec(),
            widths: vec![64, 128, 256, 512],
            block,
            stem,
            conv: style.conv,
            bn_scale_init: style.bn_scale_init,
        }
    }

    fn style(&self) -> Style {
        Style { conv: self.conv, bn_scale_init: self.bn_scale_init }
    }

    fn stem_kernel(&self) -> Kernel {
        match self.stem {
            Stem::Cifar => Kernel::new(3, 1),
            Stem::Imagenet => Kernel::new(7, 2),
        }
    }

    fn check(&self) -> Result<()> {
        if self.widths.is_empty() {
            return Err(config_error(
                "resnet",
                "widths",
                "expected channels of at least one stage, found none",
            ));
        }
        not_zero("resnet", "widths", "channels", &self.widths)?;
        if self.num_blocks.len() != self.widths.len() {
            let expected =
                format!("expected a number of blocks for each of the {} widths", self.widths.len());
            let message = format!("{expected}, found {:?}", self.num_blocks);
            return Err(config_error("resnet", "num_blocks", message));
        }
        not_zero("resnet", "num_blocks", "blocks", &self.num_blocks)?;
        let convs = if self.block == BlockKind::Basic { 2 } else { 3 };
        let layers = self.num_blocks.iter().fold(Count(2), |sum, n| sum + product(&[convs, *n]));
        check_layers("resnet", &largest("num_blocks", &self.num_blocks), layers)
    }

    /// Every block in order: stage, number in its stage, and extents.
    fn blocks(&self) -> Vec<(usize, usize, Extent)> {
        let mut ci = self.widths[0];
        let mut blocks = Vec::new();
        for (stage, (&count, &width)) in self.num_blocks.iter().zip(&self.widths).enumerate() {
            for number in 0..count {
                let stride = if stage > 0 && number == 0 { 2 } else { 1 };
                let co = if self.block == BlockKind::Basic { width } else { width.saturating_mul(4) };
                blocks.push((stage, number, Extent { ci, width, co, stride }));
                ci = co;
            }
        }
        blocks
    }

    fn features(&self) -> usize {
        self.blocks().last().map_or(0, |(_, _, extent)| extent.co)
    }
}

/// The max-pool of the ImageNet stem.
const STEM_POOL: Kernel = Kernel { size: 3, stride: 2, padding: 1 };

/// Channels in, inside and out of a block, and its stride.
#[derive(Clone, Copy, Debug)]
struct Extent {
    ci: usize,
    width: usize,
    co: usize,
    stride: usize,
}

impl Extent {
    /// The convolutions of the main path.
    fn convs(&self, kind: BlockKind) -> Vec<(usize, usize, Kernel)> {
        let Extent { ci, width, co, stride } = *self;
        match kind {
            BlockKind::Basic => vec![(ci, width, Kernel::new(3, stride)), (width, co, Kernel::new(3, 1))],
            BlockKind::Bottleneck => vec![
                (ci, width, Kernel::new(1, 1)),
                (width, width, Kernel::new(3, stride)),
                (width, co, Kernel::new(1, 1)),
            ],
        }
    }

    /// The convolution of the shortcut, where it is not the identity.
    fn shortcut(&self) -> Option<(usize, usize, Kernel)> {
        (self.stride != 1 || self.ci != self.co).then(|| (self.ci, self.co, Kernel::new(1, self.stride)))
    }
}

/// Adds the residual networks to a registry.
pub(crate) fn register(registry: &mut Registry) -> Result<()> {
    use BlockKind::{Basic, Bottleneck};
    use Stem::{Cifar, Imagenet};
    let new = ResNetConfig::new;
    registry.add("resnet", "residual network of any blocks and widths", ResNetConfig::default())?;
    registry.add("resnet18", "ResNet-18 with the CIFAR stem", new([2, 2, 2, 2], Basic, Cifar))?;
    registry.add("resnet34", "ResNet-34 with the CIFAR stem", new([3, 4, 6, 3], Basic, Cifar))?;
    registry.add("resnet50", "ResNet-50 with the ImageNet stem", new([3, 4, 6, 3], Bottleneck, Imagenet))?;
    registry.add(
        "resnet101",
        "ResNet-101 with the ImageNet stem",
        new([3, 4, 23, 3], Bottleneck, Imagenet),
    )?;
    registry.add("resnet152", "ResNet-152 with the ImageNet stem", new([3, 8, 36, 3], Bottleneck, Imagenet))
}

impl Config for ResNetConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(ResNet::new(self, task, vb)?))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        self.check()?;
        let [h, w, channels, classes] = images("resnet", task)?;
        let mut meter = Meter::new(h, w);
        meter.conv(channels, self.widths[0], self.stem_kernel());
        meter.norm(self.widths[0]);
        if self.stem == Stem::Imagenet {
            meter.window(STEM_POOL);
            meter.keep(self.widths[0].saturating_mul(2));
        }
        for (_, _, extent) in self.blocks() {
            let before = (meter.h, meter.w);
            for (ci, co, kernel) in extent.convs(self.block) {
                meter.conv(ci, co, kernel);
                meter.norm(co);
            }
            if let Some((ci, co, kernel)) = extent.shortcut() {
                (meter.h, meter.w) = before;
                // The normalised shortcut itself is not kept: only what it is added to.
                meter.conv(ci, co, kernel);
                meter.cost.parameters += product(&[2, co]);
            }
        }
        meter.head(self.features(), classes);
        Ok(meter.cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::ResNet(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        Some(Task::LEAST_IMAGES)
    }

    fn heaviest(&self) -> Option<String> {
        Some(largest("widths", &self.widths))
    }
}

/// A residual network. Names are those of kuangliu's PyTorch code: `conv1`, `bn1`,
/// `layer<i>.<j>.{conv1,bn1,conv2,bn2,shortcut.0,shortcut.1}`, `linear`.
///
/// In evaluation nothing is recorded for a backward pass, as under PyTorch's `no_grad`.
#[derive(Debug)]
pub struct ResNet {
    stem: (Conv, Norm),
    pool: bool,
    blocks: Vec<Block>,
    head: Head,
}

#[derive(Debug)]
struct Block {
    convs: Vec<(Conv, Norm)>,
    shortcut: Option<(Conv, Norm)>,
}

impl ResNet {
    /// Builds the network for images of a task.
    pub fn new(config: &ResNetConfig, task: Task, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let [_, _, channels, classes] = images("resnet", task)?;
        let style = config.style();
        let stem = config.widths[0];
        let pair = |(ci, co, kernel): (usize, usize, Kernel), conv: VarBuilder, norm: VarBuilder| {
            Ok::<_, crate::Error>((Conv::new(ci, co, kernel, style, conv)?, Norm::new(co, style, norm)?))
        };
        let mut blocks = Vec::new();
        for (stage, number, extent) in config.blocks() {
            let vb = vb.pp(format!("layer{}.{number}", stage + 1));
            let convs = extent.convs(config.block).into_iter().enumerate();
            let convs = convs
                .map(|(i, conv)| pair(conv, vb.pp(format!("conv{}", i + 1)), vb.pp(format!("bn{}", i + 1))));
            let convs = convs.collect::<Result<_>>()?;
            let shortcut = extent.shortcut();
            let shortcut =
                shortcut.map(|conv| pair(conv, vb.pp("shortcut.0"), vb.pp("shortcut.1"))).transpose()?;
            blocks.push(Block { convs, shortcut });
        }
        Ok(Self {
            stem: pair((channels, stem, config.stem_kernel()), vb.pp("conv1"), vb.pp("bn1"))?,
            pool: config.stem == Stem::Imagenet,
            blocks,
            head: Head::new(config.features(), classes, vb.pp("linear"))?,
        })
    }
}

impl Block {
    fn forward(&self, x: FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let residual = match &self.shortcut {
            Some((conv, norm)) => norm.forward(&conv.forward(&x, mode)?, mode)?,
            None => x.clone(),
        };
        let mut x = x;
        for (i, (conv, norm)) in self.convs.iter().enumerate() {
            let y = conv.forward(&x, mode)?;
            x = if i + 1 < self.convs.len() {
                norm.relu(&y, mode)?
            } else {
                norm.add_relu(&y, &residual, mode)?
            };
        }
        Ok(x)
    }
}

impl Model for ResNet {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let (conv, norm) = &self.stem;
        let mut x = norm.relu(&conv.forward(&FeatureMap::enter(input)?, mode)?, mode)?;
        if self.pool {
            x = ops::max_pool2d(&x, &Window::square(STEM_POOL.size, STEM_POOL.stride, STEM_POOL.padding))?;
        }
        for block in &self.blocks {
            x = block.forward(x, mode)?;
        }
        self.head.forward(&x, mode)
    }
}
