//! What transformers are made of: blocks of attention and two linear layers, each added to what it came from.
use crate::cost::{Cost, Count, product};
use crate::layers::{config_error, trained};
use crate::ops::{
    self, Angles, Attention, FeatureMap, Gelu, Mask, Qkv, ShareDropout, linear_features, linear_residual,
    mean_of_tokens, rotary, swiglu,
};
use crate::rng::Rng;
use crate::{Mode, Result};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spread of the initial weights, of nanoGPT, Llama and timm alike.
pub(crate) const SPREAD: f64 = 0.02;

/// How rows of features are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NormKind {
    /// The mean is subtracted, and the rest divided by its standard deviation.
    LayerNorm,
    /// Divided by the root of the mean square.
    RmsNorm,
}

/// What lies between the linear layers of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Curve {
    /// x Φ(x): nanoGPT's, timm's and PyTorch's default.
    GeluExact,
    /// Its approximation by tanh: GPT-2's.
    GeluTanh,
    /// silu(gate) · up, with a third linear layer: Llama's.
    Swiglu,
}

impl Curve {
    fn gelu(self) -> Option<Gelu> {
        match self {
            Curve::GeluExact => Some(Gelu::Exact),
            Curve::GeluTanh => Some(Gelu::Tanh),
            Curve::Swiglu => None,
        }
    }
}

/// The masks of one forward pass; what is `None` is not dropped.
#[derive(Clone, Debug, Default)]
pub struct Masks {
    /// `[batch, time, emb]`, of what enters the first block.
    pub embedding: Option<Mask>,
    /// `[batch, time, emb]`, of what each block's attention adds, and of what its linear layers add.
    pub resid: Vec<[Option<Mask>; 2]>,
    /// Of each block's shares of attention.
    pub attention: Vec<Option<ShareDropout>>,
    /// `[batch, time, hidden]`, of what lies between each block's linear layers.
    pub hidden: Vec<Option<Mask>>,
    /// `[batch, emb]`, of what the head of a network for images looks at.
    pub head: Option<Mask>,
}

impl Masks {
    /// Whether nothing of what block `i` adds to its stream is dropped.
    pub(crate) fn leave_alone(&self, i: usize) -> bool {
        self.resid.get(i).is_none_or(|masks| masks.iter().all(Option::is_none))
            && self.hidden.get(i).is_none_or(Option::is_none)
    }
}

/// Shares of what is dropped in training. A share that is not given is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dropout {
    /// Of the sum of token and position.
    pub embedding: f64,
    /// Of what attention and linear layers add to the stream.
    pub resid: f64,
    /// Of the shares of attention.
    pub attention: f64,
}

impl Dropout {
    /// Refuses what is no share; the message is about the key under `prefix`.
    pub(crate) fn check(&self, model: &str) -> Result<()> {
        let Self { embedding, resid, attention } = *self;
        for (key, share) in [("embedding", embedding), ("resid", resid), ("attention", attention)] {
            check_share(model, &format!("dropout.{key}"), share)?;
        }
        Ok(())
    }

    /// The masks of a training step: each depends on the seed, its name and the step, and on a sequence's place in the batch.
    pub(crate) fn draw(
        &self,
        layers: usize,
        [batch, time, emb]: [usize; 3],
        place: usize,
        mode: Mode,
    ) -> Result<Masks> {
        let (Mode::Train { seed, step } | Mode::Statistics { seed, step }) = mode else {
            return Ok(Masks::default());
        };
        let mask = |name: &str, p: f64| draw_mask(name, p, &[batch, time, emb], place, mode);
        let of_block = |i: usize| {
            Ok([mask(&format!("resid.{i}.attn"), self.resid)?, mask(&format!("resid.{i}.mlp"), self.resid)?])
        };
        let shares = |i: usize| {
            let rng = Rng::new(seed, "dropout", &format!("attention.{i}"), step);
            (self.attention > 0.0).then_some(ShareDropout { p: self.attention, rng, first: place })
        };
        Ok(Masks {
            embedding: mask("embedding", self.embedding)?,
            resid: (0..layers).map(of_block).collect::<Result<_>>()?,
            attention: (0..layers).map(shares).collect(),
            ..Default::default()
        })
    }
}

/// A mask of a training step for samples `shape[0]`, the first of which has this place in the batch; none where nothing is dropped. It
/// depends on the seed, its name and the step, and on a sample's place.
pub(crate) fn draw_mask(
    name: &str,
    p: f64,
    shape: &[usize],
    place: usize,
    mode: Mode,
) -> Result<Option<Mask>> {
    let (Mode::Train { seed, step } | Mode::Statistics { seed, step }) = mode else { return Ok(None) };
    let first = place * shape.iter().skip(1).product::<usize>();
    let draw = || Mask::draw_from(Rng::new(seed, "dropout", name, step), first, shape, p);
    (p > 0.0).then(draw).transpose()
}

/// Refuses what is no share.
pub(crate) fn check_share(model: &str, key: &str, share: f64) -> Result<()> {
    match (0.0..1.0).contains(&share) {
        true => Ok(()),
        false => Err(config_error(model, key, format!("expected a share in 0..1, found {share}"))),
    }
}

/// Refuses a number that is not above 0.
pub(crate) fn check_positive(model: &str, key: &str, value: f64) -> Result<()> {
    match value > 0.0 && value.is_finite() {
        true => Ok(()),
        false => Err(config_error(model, key, format!("expected a finite number above 0, found {value}"))),
    }
}

/// Refuses a size of 0.
pub(crate) fn check_sizes(model: &str, sizes: &[(&str, usize)]) -> Result<()> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        Some((key, _)) => Err(config_error(model, *key, "expected at least 1, found 0")),
        None => Ok(()),
    }
}

/// Refuses heads that do not share out the features evenly.
pub(crate) fn check_heads(model: &str, emb: usize, heads: usize) -> Result<()> {
    match emb.is_multiple_of(heads) {
        true => Ok(()),
        false => {
            let message = format!("expected a divisor of emb = {emb}, found {heads}");
            Err(config_error(model, "heads", message))
        }
    }
}

/// The extents and the style of a network's blocks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Style {
    pub layers: usize,
    pub emb: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub norm: NormKind,
    pub eps: f64,
    pub curve: Curve,
    /// Biases of the linear layers and of layer norms; of queries, keys and values on their own.
    pub bias: bool,
    pub qkv_bias: bool,
    /// Whether what is added to the stream starts smaller, by √(2 · layers).
    pub scaled: bool,
}

/// What the parts of a block are called.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    pub norms: [&'static str; 2],
    /// Of queries, keys and values: one name, or three.
    pub qkv: &'static [&'static str],
    pub out: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

impl Style {
    fn head(&self) -> usize {
        self.emb / self.heads.max(1)
    }

    /// Features of queries, keys and values.
    fn widths(&self) -> [usize; 3] {
        let kv = self.kv_heads * self.head();
        [self.heads * self.head(), kv, kv]
    }

    fn residual(&self) -> f64 {
        if self.scaled { SPREAD / (2.0 * self.layers as f64).sqrt() } else { SPREAD }
    }

    /// A norm of the network's style.
    pub fn norm(&self, vb: VarBuilder) -> Result<Norm> {
        let weight = vb.get_with_hints(self.emb, "weight", Init::Const(1.0))?;
        let centred = self.norm == NormKind::LayerNorm;
        let bias = (self.bias && centred).then(|| vb.get_with_hints(self.emb, "bias", Init::Const(0.0)));
        Ok(Norm { weight, bias: bias.transpose()?, eps: self.eps, centred })
    }

    fn block(&self, names: &Names, vb: &VarBuilder) -> Result<Block> {
        let (emb, hidden, widths) = (self.emb, self.hidden, self.widths());
        let linear = |name: &str, out: usize, inputs: usize, stdev: f64, bias: bool| {
            Linear::new(vb.pp(name), out, inputs, stdev, bias)
        };
        let qkv = match names.qkv {
            [q, k, v] => {
                let part = |name: &str, width: usize| linear(name, width, emb, SPREAD, self.qkv_bias);
                Projections::Apart([part(q, widths[0])?, part(k, widths[1])?, part(v, widths[2])?])
            }
            all => {
                let name = all.first().copied().unwrap_or("qkv");
                Projections::Together(linear(name, widths.iter().sum(), emb, SPREAD, self.qkv_bias)?)
            }
        };
        let gate = (self.curve == Curve::Swiglu).then(|| linear(names.gate, hidden, emb, SPREAD, self.bias));
        Ok(Block {
            norms: [self.norm(vb.pp(names.norms[0]))?, self.norm(vb.pp(names.norms[1]))?],
            qkv,
            out: linear(names.out, emb, widths[0], self.residual(), self.bias)?,
            gate: gate.transpose()?,
            up: linear(names.up, hidden, emb, SPREAD, self.bias)?,
            down: linear(names.down, emb, hidden, self.residual(), self.bias)?,
            curve: self.curve,
            heads: [self.heads, self.kv_heads],
            widths,
        })
    }

    /// All blocks, under their numbers.
    pub fn blocks(&self, names: &Names, vb: &VarBuilder) -> Result<Vec<Block>> {
        (0..self.layers).map(|i| self.block(names, &vb.pp(i))).collect()
    }

    /// What the blocks cost for one token of `time`.
    pub fn cost(&self, time: usize) -> Cost {
        let c = Count::of;
        let (n, hidden, layers) = (c(self.emb), c(self.hidden), c(self.layers));
        let [q, kv, _] = self.widths().map(c);
        let qkv = q + Count(2) * kv;
        let uppers = Count(if self.curve == Curve::Swiglu { 2 } else { 1 });
        let matrices = n * qkv + q * n + (uppers + Count(1)) * n * hidden;
        let vectors = match (self.bias, self.qkv_bias) {
            (true, with) => n + n + uppers * hidden + if with { qkv } else { Count(0) },
            (false, true) => qkv,
            (false, false) => Count(0),
        };
        let of_norms = Count(if self.bias && self.norm == NormKind::LayerNorm { 4 } else { 2 });
        // Two norms with their moments, queries to values, what is attended to with its logarithms, two streams, and of the linear
        // layers what comes before and after the curve.
        let kept = Count(4) * n + Count(4) + qkv + q + c(self.heads) + (uppers + Count(1)) * hidden;
        Cost {
            parameters: (layers * (matrices + vectors + of_norms * n)).0,
            flops: (layers * (Count(2) * matrices + Count(4) * c(time) * q)).0,
            activation_bytes: (Count(4) * layers * kept).0,
        }
    }

    /// The parameters of a norm.
    pub fn norm_parameters(&self) -> Count {
        product(&[if self.bias && self.norm == NormKind::LayerNorm { 2 } else { 1 }, self.emb])
    }
}

/// A linear layer.
#[derive(Debug)]
pub(crate) struct Linear {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
}

impl Linear {
    pub fn new(vb: VarBuilder, out: usize, inputs: usize, stdev: f64, bias: bool) -> Result<Self> {
        let weight = vb.get_with_hints((out, inputs), "weight", Init::Randn { mean: 0.0, stdev })?;
        let bias = bias.then(|| vb.get_with_hints(out, "bias", Init::Const(0.0))).transpose()?;
        Ok(Self { weight, bias })
    }

    fn forward(&self, x: &FeatureMap, gelu: Option<Gelu>, mode: Mode) -> Result<FeatureMap> {
        let (weight, bias) = (trained(&self.weight, mode), self.bias.as_ref().map(|b| trained(b, mode)));
        linear_features(x, &weight, bias.as_ref(), gelu)
    }

    /// Added to a stream.
    fn onto(
        &self,
        stream: &FeatureMap,
        x: &FeatureMap,
        mask: Option<&Mask>,
        mode: Mode,
    ) -> Result<FeatureMap> {
        let (weight, bias) = (trained(&self.weight, mode), self.bias.as_ref().map(|b| trained(b, mode)));
        linear_residual(stream, x, &weight, bias.as_ref(), mask)
    }
}

/// A normalisation of rows.
#[derive(Debug)]
pub(crate) struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
    centred: bool,
}

impl Norm {
    pub fn forward(&self, x: &FeatureMap, mode: Mode) -> Result<FeatureMap> {
        let (weight, bias) = (trained(&self.weight, mode), self.bias.as_ref().map(|b| trained(b, mode)));
        let (eps, centred) = (self.eps, self.centred);
        ops::norm(x, &ops::Norm { weight: &weight, bias: bias.as_ref(), eps, centred })
    }
}

#[derive(Debug)]
enum Projections {
    Together(Linear),
    Apart([Linear; 3]),
}

/// What a token is seen by.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub causal: bool,
    /// The angles of positions, and the first one.
    pub rotary: Option<(&'a Angles, usize)>,
    /// The one token of each sequence that is asked for after the block. Nothing is computed for the others once this one has seen them.
    pub only: Option<usize>,
    pub mode: Mode,
}

/// Keys and values of earlier tokens, `[batch, 1, time, features]`.
pub(crate) type Past = Option<[Tensor; 2]>;

/// Features times a mask of all of them.
fn dropped(x: &FeatureMap, mask: &Mask) -> Result<FeatureMap> {
    let x = x.leave()?;
    let y = ops::masked(&x.flatten_all()?, &mask.reshaped(mask.shape().elem_count()))?;
    FeatureMap::enter(&y.reshape(x.shape())?)
}

/// A block.
#[derive(Debug)]
pub(crate) struct Block {
    norms: [Norm; 2],
    qkv: Projections,
    out: Linear,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
    curve: Curve,
    heads: [usize; 2],
    widths: [usize; 3],
}

impl Block {
    /// The stream after the block, of which number `i` has its masks. With a past, tokens see it too, and join it.
    pub fn forward(
        &self,
        x: &FeatureMap,
        view: &View,
        masks: &Masks,
        i: usize,
        past: Option<&mut Past>,
    ) -> Result<FeatureMap> {
        let mode = view.mode;
        let [of_attention, of_mlp] =
            masks.resid.get(i).map_or([None, None], |[a, b]| [a.as_ref(), b.as_ref()]);
        let dropout = masks.attention.get(i).cloned().flatten();
        let mut y = self.attend(&self.norms[0].forward(x, mode)?, view, dropout, past)?;
        let mut x = x.clone();
        if let Some(token) = view.only {
            (x, y) = (mean_of_tokens(&x, token..token + 1)?, mean_of_tokens(&y, token..token + 1)?);
        }
        let x = self.out.onto(&x, &y, of_attention, mode)?;
        let y = self.norms[1].forward(&x, mode)?;
        let y = match &self.gate {
            Some(gate) => swiglu(&gate.forward(&y, None, mode)?, &self.up.forward(&y, None, mode)?)?,
            None => self.up.forward(&y, self.curve.gelu(), mode)?,
        };
        let y = match masks.hidden.get(i).and_then(Option::as_ref) {
            Some(mask) => dropped(&y, mask)?,
            None => y,
        };
        self.down.onto(&x, &y, of_mlp, mode)
    }

    fn attend(
        &self,
        x: &FeatureMap,
        view: &View,
        dropout: Option<ShareDropout>,
        past: Option<&mut Past>,
    ) -> Result<FeatureMap> {
        let [heads, kv_heads] = self.heads;
        let options = Attention { heads, kv_heads, causal: view.causal, dropout };
        let all = match &self.qkv {
            Projections::Together(all) => {
                let all = all.forward(x, None, view.mode)?;
                if view.rotary.is_none() && past.is_none() {
                    return ops::attention(Qkv::Together(&all), &options);
                }
                self.parts(&all)?
            }
            Projections::Apart(parts) => {
                let part = |part: &Linear| part.forward(x, None, view.mode);
                [part(&parts[0])?, part(&parts[1])?, part(&parts[2])?]
            }
        };
        let [mut q, mut k, mut v] = all;
        if let Some((angles, first)) = view.rotary {
            (q, k) = (rotary(q, angles, first)?, rotary(k, angles, first)?);
        }
        if let Some(past) = past {
            let [keys, values] = [k.leave()?, v.leave()?];
            let joined = match past.take() {
                Some([before, earlier]) => {
                    [Tensor::cat(&[&before, &keys], 2)?, Tensor::cat(&[&earlier, &values], 2)?]
                }
                None => [keys, values],
            };
            (k, v) = (FeatureMap::enter(&joined[0])?, FeatureMap::enter(&joined[1])?);
            *past = Some(joined);
        }
        ops::attention(Qkv::Apart([&q, &k, &v]), &options)
    }

    /// Queries, keys and values of what was computed together.
    fn parts(&self, all: &FeatureMap) -> Result<[FeatureMap; 3]> {
        let all = all.leave()?;
        let [q, k, v] = self.widths;
        let part =
            |first: usize, width: usize| FeatureMap::enter(&all.narrow(3, first, width)?.contiguous()?);
        Ok([part(0, q)?, part(q, k)?, part(q + k, v)?])
    }
}
