//! Densely connected networks (kuangliu's names, CIFAR stem).
use crate::cost::{Cost, Count, check_layers, largest, product};
use crate::layers::{Conv, Head, Kernel, Meter, Norm, Style, config_error, images, not_zero};
use crate::ops::{self, FeatureMap, Features, Precision, ScaleInit, Window};
use crate::registry::{Architecture, Config, Registry};
use crate::{Mode, Model, Result, Task};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Configuration of a densely connected network.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DenseNetConfig {
    /// Layers of each dense block. Defaults to \[6, 12, 24, 16\] (DenseNet-121).
    pub num_blocks: Vec<usize>,
    /// Channels that each layer adds. Defaults to 32.
    pub growth: usize,
    /// Share of the channels that a transition keeps. Defaults to 0.5.
    pub reduction: f64,
    /// Whether convolutions may round more to be faster. Defaults to fast.
    pub conv: Precision,
    /// Initial scales of the normalisations. Defaults to ones.
    pub bn_scale_init: ScaleInit,
}

impl Default for DenseNetConfig {
    fn default() -> Self {
        let style = Style::default();
        Self {
            num_blocks: vec![6, 12, 24, 16],
            growth: 32,
            reduction: 0.5,
            conv: style.conv,
            bn_scale_init: style.bn_scale_init,
        }
    }
}

/// A dense block: channels that enter, its layers, and the channels after its transition (none for the last).
#[derive(Clone, Copy, Debug)]
struct Stage {
    ci: usize,
    layers: usize,
    transition: Option<usize>,
}

impl Stage {
    /// Channels that layer `i` sees; those after the block for `i` = its layers.
    fn seen_by(&self, i: usize, growth: usize) -> usize {
        self.ci.saturating_add(growth.saturating_mul(i))
    }
}

/// The 2×2 average pool of a transition.
const POOL: Kernel = Kernel { size: 2, stride: 2, padding: 0 };

impl DenseNetConfig {
    fn style(&self) -> Style {
        Style { conv: self.conv, bn_scale_init: self.bn_scale_init }
    }

    fn check(&self) -> Result<()> {
        let refuse = |key: &str, message: String| Err(config_error("densenet", key, message));
        if self.num_blocks.is_empty() {
            return refuse("num_blocks", "expected layers of at least one block, found none".into());
        }
        not_zero("densenet", "num_blocks", "layers", &self.num_blocks)?;
        // Two convolutions a layer, one a transition, and the two ends.
        let layers = self.num_blocks.iter().fold(Count(2), |sum, n| sum + product(&[2, *n]) + Count(1));
        check_layers("densenet", &largest("num_blocks", &self.num_blocks), layers)?;
        if self.growth == 0 {
            return refuse("growth", "expected at least 1, found 0".into());
        }
        let kept = |stage: &Stage| stage.transition != Some(0);
        if !(self.reduction > 0.0 && self.reduction <= 1.0 && self.stages().iter().all(kept)) {
            let expected = "expected a share in (0, 1] that leaves a channel";
            return refuse("reduction", format!("{expected}, found {}", self.reduction));
        }
        Ok(())
    }

    fn stages(&self) -> Vec<Stage> {
        let mut ci = self.growth.saturating_mul(2);
        let last = self.num_blocks.len() - 1;
        let stage = |(i, &layers): (usize, &usize)| {
            let after = Stage { ci, layers, transition: None }.seen_by(layers, self.growth);
            let transition = (i < last).then(|| (after as f64 * self.reduction).floor() as usize);
            let stage = Stage { ci, layers, transition };
            ci = transition.unwrap_or(after);
            stage
        };
        self.num_blocks.iter().enumerate().map(stage).collect()
    }

    fn features(&self) -> usize {
        self.stages().last().map_or(0, |stage| stage.seen_by(stage.layers, self.growth))
    }
}

/// Adds the densely connected networks to a registry.
pub(crate) fn register(registry: &mut Registry) -> Result<()> {
    let about = "densely connected network of any blocks and growth";
    registry.add("densenet", about, DenseNetConfig::default())?;
    registry.add("densenet121", "DenseNet-121 with the CIFAR stem", DenseNetConfig::default())
}

impl Config for DenseNetConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(DenseNet::new(self, task, vb)?))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        self.check()?;
        let [h, w, channels, classes] = images("densenet", task)?;
        let (k, [twice, four]) = (self.growth, [2, 4].map(|n| self.growth.saturating_mul(n)));
        let mut meter = Meter::new(h, w);
        meter.conv(channels, twice, Kernel::new(3, 1));
        for stage in self.stages() {
            for i in 0..stage.layers {
                let seen = stage.seen_by(i, k);
                meter.norm(seen);
                meter.conv(seen, four, Kernel::new(1, 1));
                meter.norm(four);
                meter.conv(four, k, Kernel::new(3, 1));
            }
            let after = stage.seen_by(stage.layers, k);
            if let Some(kept) = stage.transition {
                meter.norm(after);
                meter.conv(after, kept, Kernel::new(1, 1));
                meter.window(POOL);
                meter.keep(kept);
            }
        }
        meter.norm(self.features());
        meter.head(self.features(), classes);
        Ok(meter.cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::DenseNet(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        Some(Task::LEAST_IMAGES)
    }

    fn heaviest(&self) -> Option<String> {
        Some("growth".into())
    }
}

/// A densely connected network. Names are those of kuangliu's PyTorch code: `conv1`,
/// `dense<i>.<j>.{bn1,conv1,bn2,conv2}`, `trans<i>.{bn,conv}`, `bn`, `linear`.
///
/// The concatenations of a dense block are never made: normalisations read their input from the parts
/// ([`Features`]), so memory grows with the number of layers and not with its square, as far as concatenation
/// goes. In evaluation nothing is recorded for a backward pass, as under PyTorch's `no_grad`.
#[derive(Debug)]
pub struct DenseNet {
    conv1: Conv,
    blocks: Vec<Block>,
    bn: Norm,
    head: Head,
}

/// The layers of a dense block and the transition after it.
#[derive(Debug)]
struct Block {
    layers: Vec<Layer>,
    transition: Option<(Norm, Conv)>,
}

#[derive(Debug)]
struct Layer {
    bn1: Norm,
    conv1: Conv,
    bn2: Norm,
    conv2: Conv,
}

impl DenseNet {
    /// Builds the network for images of a task.
    pub fn new(config: &DenseNetConfig, task: Task, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let [h, w, channels, classes] = images("densenet", task)?;
        // Every transition halves the image.
        let most = h.min(w).max(1).ilog2() as usize + 1;
        if config.num_blocks.len() > most {
            let found = config.num_blocks.len();
            let message = format!(
                "expected at most {most} blocks for images of {h} by {w}, found {found}: each but the last halves the image"
            );
            return Err(config_error("densenet", format!("num_blocks[{most}]"), message));
        }
        let (k, style) = (config.growth, config.style());
        let mut blocks = Vec::new();
        for (number, stage) in config.stages().into_iter().enumerate() {
            let layer = |i: usize| {
                let vb = vb.pp(format!("dense{}.{i}", number + 1));
                let seen = stage.seen_by(i, k);
                Ok(Layer {
                    bn1: Norm::new(seen, style, vb.pp("bn1"))?,
                    conv1: Conv::new(seen, 4 * k, Kernel::new(1, 1), style, vb.pp("conv1"))?,
                    bn2: Norm::new(4 * k, style, vb.pp("bn2"))?,
                    conv2: Conv::new(4 * k, k, Kernel::new(3, 1), style, vb.pp("conv2"))?,
                })
            };
            let layers = (0..stage.layers).map(layer).collect::<Result<_>>()?;
            let transition = match stage.transition {
                Some(kept) => {
                    let vb = vb.pp(format!("trans{}", number + 1));
                    let after = stage.seen_by(stage.layers, k);
                    let conv = Conv::new(after, kept, Kernel::new(1, 1), style, vb.pp("conv"))?;
                    Some((Norm::new(after, style, vb.pp("bn"))?, conv))
                }
                None => None,
            };
            blocks.push(Block { layers, transition });
        }
        Ok(Self {
            conv1: Conv::new(channels, 2 * k, Kernel::new(3, 1), style, vb.pp("conv1"))?,
            blocks,
            bn: Norm::new(config.features(), style, vb.pp("bn"))?,
            head: Head::new(config.features(), classes, vb.pp("linear"))?,
        })
    }
}

fn norm_relu(norm: &Norm, features: &Features, mode: Mode) -> Result<FeatureMap> {
    let (bn, statistics) = norm.of(mode);
    ops::batch_norm_features(features, bn, statistics)
}

impl Model for DenseNet {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let mut features = Features::new(self.conv1.forward(&FeatureMap::enter(input)?, mode)?);
        for Block { layers, transition } in &self.blocks {
            for Layer { bn1, conv1, bn2, conv2 } in layers {
                let x = conv1.forward(&norm_relu(bn1, &features, mode)?, mode)?;
                features.prepend(conv2.forward(&bn2.relu(&x, mode)?, mode)?)?;
            }
            if let Some((norm, conv)) = transition {
                let x = conv.forward(&norm_relu(norm, &features, mode)?, mode)?;
                let window = Window::square(POOL.size, POOL.stride, POOL.padding);
                features = Features::new(ops::avg_pool2d(&x, &window)?);
            }
        }
        self.head.forward(&norm_relu(&self.bn, &features, mode)?, mode)
    }
}
