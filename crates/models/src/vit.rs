//! Vision transformers: images as sequences of patches.
//!
//! The network and the names of its parameters are those of timm's `vision_transformer`: `cls_token`, `pos_embed`,
//! `patch_embed.proj`, `blocks.<i>.{norm1, attn.qkv, attn.proj, norm2, mlp.fc1, mlp.fc2}`, `norm` or `fc_norm`, and `head`. Weights
//! start from N(0, 0.02²), the class token from N(0, (10⁻⁶)²), biases as 0, norms as 1; the patches' convolution as PyTorch's.
use crate::cost::{Cost, Count, check_layers, product};
use crate::init::torch_uniform;
use crate::layers::{config_error, images, trained};
use crate::ops::{
    Activation, Conv2d, FeatureMap, Precision, assemble, conv2d, linear, masked, mean_of_tokens,
};
use crate::registry::{Architecture, Config};
use crate::transformer::{
    Block, Curve, Dropout, Linear, Masks, Names, Norm, NormKind, SPREAD, Style, View, check_heads,
    check_positive, check_share, check_sizes, draw_mask,
};
use crate::{Mode, Model, Result, Task};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const MODEL: &str = "vit";

/// What the head looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pool {
    /// The class token.
    Token,
    /// The mean over the patches.
    Avg,
}

/// Which GELU a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VitCurve {
    /// x Φ(x): timm's.
    GeluExact,
    /// Its approximation by tanh.
    GeluTanh,
}

/// Configuration of `vit`. The defaults are timm's, for small images.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VitConfig {
    /// Rows and columns of a patch, a divisor of those of the images. Defaults to 4.
    pub patch: usize,
    /// Blocks. Defaults to 6.
    pub layers: usize,
    /// Heads, a divisor of `emb`. Defaults to 3.
    pub heads: usize,
    /// Features of a patch. Defaults to 192.
    pub emb: usize,
    /// Features between the linear layers of a block. Defaults to null, four times `emb`.
    pub hidden: Option<usize>,
    /// Whether queries, keys and values have biases; all other layers have. Defaults to true.
    pub qkv_bias: bool,
    /// Whether a class token comes before the patches. Defaults to true.
    pub class_token: bool,
    /// What the head looks at: `token`, the class token, or `avg`, the mean over the patches. Defaults to token.
    pub global_pool: Pool,
    /// Whether the last norm comes after the mean, and is called `fc_norm`. Defaults to null, with `avg`.
    pub fc_norm: Option<bool>,
    /// What is added under the root of a norm. Defaults to 1e-6.
    pub norm_eps: f64,
    /// Which GELU lies between the linear layers of a block. Defaults to gelu_exact.
    pub activation: VitCurve,
    /// The share of what enters the first block, and of what attention and linear layers add to it, that is dropped in training.
    /// Defaults to 0.
    pub dropout: f64,
    /// The share of what enters the first block that is dropped in training, as timm calls it. Defaults to null, `dropout`.
    pub pos_drop_rate: Option<f64>,
    /// The share of what attention and linear layers add to the stream, and of what lies between the linear layers, that is dropped in
    /// training. Defaults to null: `dropout` of what is added, and nothing between.
    pub proj_drop_rate: Option<f64>,
    /// The share of the shares of attention that is dropped in training. Defaults to null, none.
    pub attn_drop_rate: Option<f64>,
    /// The share of what the head looks at that is dropped in training. Defaults to null, none.
    pub drop_rate: Option<f64>,
}

impl Default for VitConfig {
    fn default() -> Self {
        Self {
            patch: 4,
            layers: 6,
            heads: 3,
            emb: 192,
            hidden: None,
            qkv_bias: true,
            class_token: true,
            global_pool: Pool::Token,
            fc_norm: None,
            norm_eps: 1e-6,
            activation: VitCurve::GeluExact,
            dropout: 0.0,
            pos_drop_rate: None,
            proj_drop_rate: None,
            attn_drop_rate: None,
            drop_rate: None,
        }
    }
}

impl VitConfig {
    /// Features between the linear layers of a block.
    pub fn width(&self) -> usize {
        self.hidden.unwrap_or(self.emb.saturating_mul(4))
    }

    /// Whether the last norm comes after the mean.
    pub fn norm_comes_last(&self) -> bool {
        self.fc_norm.unwrap_or(self.global_pool == Pool::Avg)
    }

    fn style(&self) -> Style {
        Style {
            layers: self.layers,
            emb: self.emb,
            hidden: self.width(),
            heads: self.heads,
            kv_heads: self.heads,
            norm: NormKind::LayerNorm,
            eps: self.norm_eps,
            curve: match self.activation {
                VitCurve::GeluExact => Curve::GeluExact,
                VitCurve::GeluTanh => Curve::GeluTanh,
            },
            bias: true,
            qkv_bias: self.qkv_bias,
            scaled: false,
        }
    }

    /// Rows and columns of patches.
    fn patches(&self, [height, width]: [usize; 2]) -> Result<[usize; 2]> {
        for (what, size) in [("rows", height), ("columns", width)] {
            if size == 0 || !size.is_multiple_of(self.patch) {
                let message =
                    format!("expected a divisor of the images' {size} {what}, found {}", self.patch);
                return Err(config_error(MODEL, "patch", message));
            }
        }
        Ok([height / self.patch, width / self.patch])
    }

    fn check(&self) -> Result<()> {
        check_sizes(
            MODEL,
            &[
                ("patch", self.patch),
                ("layers", self.layers),
                ("heads", self.heads),
                ("emb", self.emb),
                ("hidden", self.width()),
            ],
        )?;
        check_heads(MODEL, self.emb, self.heads)?;
        if self.global_pool == Pool::Token && !self.class_token {
            let message = "expected `avg` without a class token, found `token`";
            return Err(config_error(MODEL, "global_pool", message));
        }
        check_positive(MODEL, "norm_eps", self.norm_eps)?;
        for (key, share) in [
            ("dropout", Some(self.dropout)),
            ("pos_drop_rate", self.pos_drop_rate),
            ("proj_drop_rate", self.proj_drop_rate),
            ("attn_drop_rate", self.attn_drop_rate),
            ("drop_rate", self.drop_rate),
        ] {
            check_share(MODEL, key, share.unwrap_or(0.0))?;
        }
        check_layers(MODEL, "layers", Count(6) * Count::of(self.layers) + Count(3))
    }
}

impl Config for VitConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Vit::new(self.clone(), task, vb)?))
    }

    fn cost(&self, task: Task) -> Result<Cost> {
        self.check()?;
        let [height, width, channels, classes] = images(MODEL, task)?;
        let [rows, columns] = self.patches([height, width])?;
        let patches = product(&[rows, columns]);
        let tokens = patches + Count(u64::from(self.class_token));
        let (style, n) = (self.style(), Count::of(self.emb));
        let of_blocks = style.cost(usize::try_from(tokens.0).unwrap_or(usize::MAX));
        let of_patch = product(&[self.patch, self.patch, channels]) * n;
        let own = if self.class_token { n } else { Count(0) };
        let of_head = product(&[self.emb, classes]);
        let parameters = Count(of_blocks.parameters) + of_patch + n + own + tokens * n;
        // Patches, what enters the first block, and the last norm.
        let kept = Count(of_blocks.activation_bytes) * tokens + Count(4) * n * (patches + tokens + tokens);
        Ok(Cost {
            parameters: (parameters + style.norm_parameters() + of_head + Count::of(classes)).0,
            flops: (Count(of_blocks.flops) * tokens + Count(2) * (patches * of_patch + of_head)).0,
            activation_bytes: kept.0,
        })
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::Vit(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        let side = self.patch.max(1);
        Some(Task::Images { height: side, width: side, channels: 1, classes: 1 })
    }

    fn heaviest(&self) -> Option<String> {
        let key = match () {
            () if self.hidden.is_some_and(|hidden| hidden > self.emb.saturating_mul(4)) => "hidden",
            () if self.patch.saturating_mul(self.patch) > self.width().saturating_mul(self.layers) => "patch",
            () => "emb",
        };
        Some(key.into())
    }
}

/// The model. See the [module](self).
#[derive(Debug)]
pub struct Vit {
    config: VitConfig,
    patches: [Tensor; 2],
    class: Option<Tensor>,
    positions: Tensor,
    blocks: Vec<Block>,
    norm: Norm,
    head: Linear,
    /// The place of the next inputs' first image in the batch.
    place: usize,
}

impl Vit {
    /// Creates the parameters through `vb`.
    pub fn new(config: VitConfig, task: Task, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let [height, width, channels, classes] = images(MODEL, task)?;
        let [rows, columns] = config.patches([height, width])?;
        let (style, emb, patch) = (config.style(), config.emb, config.patch);
        let names = Names {
            norms: ["norm1", "norm2"],
            qkv: &["attn.qkv"],
            out: "attn.proj",
            gate: "mlp.gate",
            up: "mlp.fc1",
            down: "mlp.fc2",
        };
        let normal = |stdev: f64| Init::Randn { mean: 0.0, stdev };
        let (proj, init) = (vb.pp("patch_embed.proj"), torch_uniform(channels * patch * patch));
        let class = || vb.get_with_hints((1, 1, emb), "cls_token", normal(1e-6));
        let tokens = rows * columns + usize::from(config.class_token);
        Ok(Self {
            patches: [
                proj.get_with_hints((emb, channels, patch, patch), "weight", init)?,
                proj.get_with_hints(emb, "bias", init)?,
            ],
            class: config.class_token.then(class).transpose()?,
            positions: vb.get_with_hints((1, tokens, emb), "pos_embed", normal(SPREAD))?,
            blocks: style.blocks(&names, &vb.pp("blocks"))?,
            norm: style.norm(vb.pp(if config.norm_comes_last() { "fc_norm" } else { "norm" }))?,
            head: Linear::new(vb.pp("head"), classes, emb, SPREAD, true)?,
            place: 0,
            config,
        })
    }

    /// Logits `[n, classes]` of images `[n, height, width, channels]`.
    pub fn forward(&self, input: &Tensor, masks: &Masks, mode: Mode) -> Result<Tensor> {
        let [weight, bias] = self.patches.each_ref().map(|t| trained(t, mode));
        let options = Conv2d::square(self.config.patch, 0, Precision::Exact);
        let x = conv2d(&FeatureMap::enter(input)?, &weight, Some(&bias), &options)?;
        let class = self.class.as_ref().map(|class| trained(class, mode));
        let mut x = assemble(&x, class.as_ref(), &trained(&self.positions, mode), masks.embedding.as_ref())?;
        for (i, block) in self.blocks.iter().enumerate() {
            // Masks are of all tokens.
            let last = i + 1 == self.blocks.len() && masks.leave_alone(i);
            let only = (last && self.config.global_pool == Pool::Token).then_some(0);
            let view = View { causal: false, rotary: None, only, mode };
            x = block.forward(&x, &view, masks, i, None)?;
        }
        let [_, _, tokens, _] = x.dims()?;
        // The norm of a single token is the same before and after it is taken.
        let seen = match self.config.global_pool {
            Pool::Token => 0..1,
            Pool::Avg => usize::from(self.class.is_some())..tokens,
        };
        let x = match self.config.global_pool == Pool::Token || self.config.norm_comes_last() {
            true => self.norm.forward(&mean_of_tokens(&x, seen)?, mode)?,
            false => mean_of_tokens(&self.norm.forward(&x, mode)?, seen)?,
        };
        let mut x = x.leave()?.flatten_from(1)?;
        if let Some(mask) = &masks.head {
            x = masked(&x, mask)?;
        }
        let bias = self.head.bias.as_ref().map(|bias| trained(bias, mode));
        linear(&x, &trained(&self.head.weight, mode), bias.as_ref(), Activation::None)
    }
}

impl Model for Vit {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let (images, tokens) = (input.dims().first().copied().unwrap_or_default(), self.positions.dim(1)?);
        let config = &self.config;
        let shares = Dropout {
            embedding: config.pos_drop_rate.unwrap_or(config.dropout),
            resid: config.proj_drop_rate.unwrap_or(config.dropout),
            attention: config.attn_drop_rate.unwrap_or(0.0),
        };
        let draw = |name: &str, p: Option<f64>, shape: &[usize]| {
            draw_mask(name, p.unwrap_or(0.0), shape, self.place, mode)
        };
        let inner = [images, tokens, config.width()];
        let hidden = (0..config.layers).map(|i| draw(&format!("hidden.{i}"), config.proj_drop_rate, &inner));
        let masks = Masks {
            hidden: hidden.collect::<Result<_>>()?,
            head: draw("head", config.drop_rate, &[images, config.emb])?,
            ..shares.draw(config.layers, [images, tokens, config.emb], self.place, mode)?
        };
        self.forward(input, &masks, mode)
    }

    fn set_place(&mut self, first: usize) {
        self.place = first;
    }
}
