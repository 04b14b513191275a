//! Language models that see what came before: GPT as nanoGPT has it, and Llama.
//!
//! One network with two sets of names. Under nanoGPT's, parameters are `transformer.wte.weight`, `transformer.wpe.weight`,
//! `transformer.h.<i>.{ln_1, attn.c_attn, attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj}` and `transformer.ln_f`; under Llama's
//! `model.embed_tokens.weight`, `model.layers.<i>.{input_layernorm, self_attn.{q,k,v,o}_proj, post_attention_layernorm,
//! mlp.{gate,up,down}_proj}` and `model.norm`; a head of its own is `lm_head.weight` under both. What one of them has not goes by the
//! nearest name: a gate under nanoGPT's is `mlp.c_gate`, a table of positions under Llama's `model.embed_positions.weight`.
//!
//! Weights start from N(0, 0.02²), norms as 1, biases as 0; under nanoGPT's names the layers that add to the stream from
//! N(0, (0.02/√(2 · layers))²).
use crate::cost::{Cost, Count, check_layers, product};
use crate::layers::{config_error, trained};
use crate::ops::{self, Activation, Angles, FeatureMap, embed, linear, linear_cross_entropy};
use crate::registry::{Architecture, Config};
use crate::transformer::{
    Block, Linear, Names as Parts, Norm, Past, SPREAD, Style, View, check_heads, check_positive, check_sizes,
};
use crate::{Error, Loss, Mode, Model, Result, Task};
use candle_core::{DType, Tensor};
use candle_nn::{Init, VarBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::transformer::{Curve, Dropout, Masks, NormKind};

/// Whose names the parameters have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Names {
    /// nanoGPT's: queries, keys and values in one matrix; layers that add to the stream start smaller.
    NanoGpt,
    /// Those of Llama in Hugging Face's transformers.
    Llama,
}

/// How a token knows its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Positions {
    /// A row of a table for each place, added to the token's.
    Learned,
    /// Queries and keys turned by angles that grow with the place.
    Rotary,
}

/// Configuration of `gpt` and `llama`, which differ in their defaults.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GptConfig {
    /// Whose names the parameters have, and whose initial values. Defaults to nanogpt; of `llama` to llama.
    pub names: Names,
    /// Blocks. Defaults to 4.
    pub layers: usize,
    /// Heads of queries, a divisor of `emb`. Defaults to 4.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: neighbouring heads of queries share one. Defaults to null, as many as `heads`.
    pub kv_heads: Option<usize>,
    /// Features of a token. Defaults to 128.
    pub emb: usize,
    /// Features between the linear layers of a block. Defaults to null, four times `emb`; with `swiglu` 8/3 of it, rounded up to a
    /// multiple of 32.
    pub hidden: Option<usize>,
    /// Tokens that it sees at most: what it is trained on may be shorter, not longer. Defaults to 64.
    pub block: usize,
    /// Whether linear layers and layer norms have biases; the head never has one. Defaults to false.
    pub bias: bool,
    /// How features are normalised. Defaults to layernorm; of `llama` to rmsnorm.
    pub norm: NormKind,
    /// What is added under the root of a norm. Defaults to 1e-5.
    pub norm_eps: f64,
    /// How a token knows its place. Defaults to learned; of `llama` to rotary.
    pub positions: Positions,
    /// The base of rotary angles. Defaults to 10000.
    pub rope_theta: f64,
    /// What lies between the linear layers of a block. Defaults to gelu_exact; of `llama` to swiglu.
    pub activation: Curve,
    /// Whether the head is the embedding. Defaults to true; of `llama` to false.
    pub tied: bool,
    /// Targets that do not count. The loss of a batch is the mean over the others, and so is that of a set; with `train.shards` or
    /// `train.accumulate`, whose parts would each have a mean of its own, it is refused. Defaults to null, none.
    pub ignore_index: Option<i64>,
    /// Shares that are dropped in training. Defaults to none.
    pub dropout: Dropout,
}

impl Default for GptConfig {
    fn default() -> Self {
        Self {
            names: Names::NanoGpt,
            layers: 4,
            heads: 4,
            kv_heads: None,
            emb: 128,
            hidden: None,
            block: 64,
            bias: false,
            norm: NormKind::LayerNorm,
            norm_eps: 1e-5,
            positions: Positions::Learned,
            rope_theta: 10_000.0,
            activation: Curve::GeluExact,
            tied: true,
            ignore_index: None,
            dropout: Dropout::default(),
        }
    }
}

/// The parameter of a head of its own, under both sets of names. Where the head is the embedding there is none here, and one beside
/// it in the files of nanoGPT and of Hugging Face's transformers.
pub const HEAD: &str = "lm_head.weight";

/// The embedding that is the head too, by what parameters there are.
pub fn tied_table(has: impl Fn(&str) -> bool) -> Option<&'static str> {
    let tables = ["transformer.wte.weight", "model.embed_tokens.weight"];
    tables.into_iter().find(|table| has(table) && !has(HEAD))
}

/// Tokens that a network may see. The angles of those that it does see, in f32 and in f64, are 12 bytes for each feature of a head: of
/// so many 400 MB with heads of 32 features, 1.6 GB with heads of 128.
const MOST_TOKENS: usize = 1 << 20;

impl GptConfig {
    /// The defaults of `llama`.
    pub fn llama() -> Self {
        Self {
            names: Names::Llama,
            norm: NormKind::RmsNorm,
            positions: Positions::Rotary,
            activation: Curve::Swiglu,
            tied: false,
            ..Self::default()
        }
    }

    /// Features between the linear layers of a block.
    pub fn width(&self) -> usize {
        let default = match self.activation {
            Curve::Swiglu => {
                self.emb.saturating_mul(8).div_ceil(3).checked_next_multiple_of(32).unwrap_or(usize::MAX)
            }
            _ => self.emb.saturating_mul(4),
        };
        self.hidden.unwrap_or(default)
    }

    fn style(&self) -> Style {
        Style {
            layers: self.layers,
            emb: self.emb,
            hidden: self.width(),
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            norm: self.norm,
            eps: self.norm_eps,
            curve: self.activation,
            bias: self.bias,
            qkv_bias: self.bias,
            scaled: self.names == Names::NanoGpt,
        }
    }

    fn check(&self) -> Result<()> {
        const MODEL: &str = "gpt";
        let kv_heads = self.kv_heads.unwrap_or(self.heads);
        check_sizes(
            MODEL,
            &[
                ("layers", self.layers),
                ("heads", self.heads),
                ("kv_heads", kv_heads),
                ("emb", self.emb),
                ("hidden", self.width()),
                ("block", self.block),
            ],
        )?;
        check_heads(MODEL, self.emb, self.heads)?;
        if !self.heads.is_multiple_of(kv_heads) {
            let message = format!("expected a divisor of heads = {}, found {kv_heads}", self.heads);
            return Err(config_error(MODEL, "kv_heads", message));
        }
        if self.block > MOST_TOKENS {
            let message = format!("expected at most {MOST_TOKENS} tokens, found {}", self.block);
            return Err(config_error(MODEL, "block", message));
        }
        let head = self.emb / self.heads;
        if self.positions == Positions::Rotary && !head.is_multiple_of(2) {
            let message = format!(
                "expected heads of an even size for rotary positions, found {} heads of {head}",
                self.heads
            );
            return Err(config_error(MODEL, "heads", message));
        }
        check_positive(MODEL, "norm_eps", self.norm_eps)?;
        check_positive(MODEL, "rope_theta", self.rope_theta)?;
        self.dropout.check(MODEL)?;
        check_layers(MODEL, "layers", Count(7) * Count::of(self.layers) + Count(2))
    }
}

impl Config for GptConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(Gpt::new(self.clone(), vocabulary(task)?, vb)?))
    }

    /// Of one token of a sequence as long as it may be.
    fn cost(&self, task: Task) -> Result<Cost> {
        self.check()?;
        let (vocab, style) = (vocabulary(task)?, self.style());
        let mut cost = style.cost(self.block);
        let (rows, n) = (product(&[vocab, self.emb]), Count::of(self.emb));
        cost.parameters += rows + style.norm_parameters();
        if !self.tied {
            cost.parameters += rows;
        }
        if self.positions == Positions::Learned {
            cost.parameters += product(&[self.block, self.emb]);
        }
        cost.flops += Count(2) * rows;
        // What enters the first block and what leaves the last one, normalised, and the logits' gradient.
        cost.activation_bytes += Count(4) * (Count(3) * n + Count(2) + Count::of(vocab));
        Ok(cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::Gpt(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        Some(Task::LEAST_TOKENS)
    }

    fn heaviest(&self) -> Option<String> {
        let key = match () {
            () if self.positions == Positions::Learned
                && self.block > self.width().saturating_mul(self.layers) =>
            {
                "block"
            }
            () if self.hidden.is_some_and(|hidden| hidden > self.emb.saturating_mul(4)) => "hidden",
            () => "emb",
        };
        Some(key.into())
    }
}

fn vocabulary(task: Task) -> Result<usize> {
    match task {
        Task::Tokens { vocab } if vocab > 0 => Ok(vocab),
        task => Err(config_error("gpt", "name", format!("expected text, found {task}"))),
    }
}

/// The model. See the [module](self).
#[derive(Debug)]
pub struct Gpt {
    config: GptConfig,
    tokens: Tensor,
    places: Option<Tensor>,
    angles: Option<Angles>,
    blocks: Vec<Block>,
    norm: Norm,
    /// The head, if it is not the embedding.
    head: Option<Linear>,
    /// The place of the next inputs' first sequence in the batch.
    place: usize,
    /// What a continuation has seen.
    past: Option<Seen>,
}

/// What [`Model::next_logits`] has seen.
#[derive(Debug)]
struct Seen {
    /// `[batch, time]`.
    tokens: Tensor,
    blocks: Vec<Past>,
}

impl Gpt {
    /// Creates the parameters through `vb`.
    pub fn new(config: GptConfig, vocab: usize, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let (names, prefix, [table, places, blocks, norm]) = match config.names {
            Names::NanoGpt => (
                Parts {
                    norms: ["ln_1", "ln_2"],
                    qkv: &["attn.c_attn"],
                    out: "attn.c_proj",
                    gate: "mlp.c_gate",
                    up: "mlp.c_fc",
                    down: "mlp.c_proj",
                },
                "transformer",
                ["wte", "wpe", "h", "ln_f"],
            ),
            Names::Llama => (
                Parts {
                    norms: ["input_layernorm", "post_attention_layernorm"],
                    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
                    out: "self_attn.o_proj",
                    gate: "mlp.gate_proj",
                    up: "mlp.up_proj",
                    down: "mlp.down_proj",
                },
                "model",
                ["embed_tokens", "embed_positions", "layers", "norm"],
            ),
        };
        let (style, inner) = (config.style(), vb.pp(prefix));
        let rows = |count: usize, name: &str| {
            let init = Init::Randn { mean: 0.0, stdev: SPREAD };
            inner.pp(name).get_with_hints((count, config.emb), "weight", init)
        };
        let learned = config.positions == Positions::Learned;
        let angles = || Angles::new(config.emb / config.heads, config.rope_theta);
        Ok(Self {
            tokens: rows(vocab, table)?,
            places: learned.then(|| rows(config.block, places)).transpose()?,
            angles: (!learned).then(angles),
            blocks: style.blocks(&names, &inner.pp(blocks))?,
            norm: style.norm(inner.pp(norm))?,
            head: match config.tied {
                true => None,
                false => Some(Linear::new(vb.pp("lm_head"), vocab, config.emb, SPREAD, false)?),
            },
            place: 0,
            past: None,
            config,
        })
    }

    /// What the last norm says of `tokens` `[batch, time]` (u32 or i64): `[batch, 1, time, emb]`.
    pub fn hidden(&mut self, tokens: &Tensor, masks: &Masks, mode: Mode) -> Result<FeatureMap> {
        self.pass(tokens, masks, mode, 0, None)
    }

    /// The same, from position `first` on, with what came before.
    fn pass(
        &mut self,
        tokens: &Tensor,
        masks: &Masks,
        mode: Mode,
        first: usize,
        mut past: Option<&mut Vec<Past>>,
    ) -> Result<FeatureMap> {
        let block = self.config.block;
        let end = match *tokens.dims() {
            [batch, time] if batch > 0 && (1..=block).contains(&(first + time)) && time > 0 => first + time,
            ref dims => {
                let expected = format!("sequences of 1 to {block} tokens (`model.block`)");
                let found = format!("{dims:?} [sequences, tokens] after {first} others");
                return Err(Error::Shape { op: "gpt", expected, found });
            }
        };
        if let Some(angles) = &mut self.angles {
            angles.cover(end.checked_next_power_of_two().unwrap_or(end).min(block));
        }
        let table = trained(&self.tokens, mode);
        let places = self.places.as_ref().map(|places| trained(places, mode));
        let mut x = embed(&table, places.as_ref(), tokens, first, masks.embedding.as_ref())?;
        let view = View {
            causal: true,
            rotary: self.angles.as_ref().map(|angles| (angles, first)),
            only: None,
            mode,
        };
        for (i, of_block) in self.blocks.iter().enumerate() {
            let past = past.as_mut().and_then(|past| past.get_mut(i));
            x = of_block.forward(&x, &view, masks, i, past)?;
        }
        self.norm.forward(&x, mode)
    }

    /// `[vocabulary, emb]`.
    fn decoder(&self, mode: Mode) -> Tensor {
        trained(self.head.as_ref().map_or(&self.tokens, |head| &head.weight), mode)
    }

    /// Logits `[batch, time, vocabulary]` of what [`Gpt::hidden`] returned.
    pub fn decode(&self, hidden: &FeatureMap, mode: Mode) -> Result<Tensor> {
        linear(&hidden.leave()?.squeeze(1)?, &self.decoder(mode), None, Activation::None)
    }

    /// The loss of what [`Gpt::hidden`] returned against `targets` `[batch, time]`.
    pub fn loss_of(&self, hidden: &FeatureMap, targets: &Tensor, mode: Mode) -> Result<Loss> {
        let options = ops::CrossEntropy { ignore_index: self.config.ignore_index, ..Default::default() };
        let x = hidden.leave()?.squeeze(1)?;
        let nll = linear_cross_entropy(&x, &self.decoder(mode), None, targets, &options)?;
        Ok(Loss { total: nll.clone(), nll, logits: None })
    }

    /// The masks for sequences of `tokens` `[batch, time]`.
    fn masks(&self, tokens: &Tensor, mode: Mode) -> Result<Masks> {
        let &[batch, time] = tokens.dims() else { return Ok(Masks::default()) };
        self.config.dropout.draw(self.config.layers, [batch, time, self.config.emb], self.place, mode)
    }
}

/// `[length, batch]` as `[batch, length]`, or what is wrong with it.
fn sequences(tokens: &Tensor) -> Result<Tensor> {
    match tokens.rank() {
        2 => Ok(tokens.t()?.contiguous()?),
        _ => {
            let found = format!("{:?}", tokens.dims());
            Err(Error::Shape { op: "gpt", expected: "tokens [length, batch]".into(), found })
        }
    }
}

impl Model for Gpt {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let tokens = sequences(input)?;
        let masks = self.masks(&tokens, mode)?;
        let hidden = self.hidden(&tokens, &masks, mode)?;
        Ok(self.decode(&hidden, mode)?.transpose(0, 1)?.contiguous()?.flatten_to(1)?)
    }

    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> Result<Loss> {
        let (tokens, targets) = (sequences(input)?, sequences(target)?);
        let masks = self.masks(&tokens, mode)?;
        let hidden = self.hidden(&tokens, &masks, mode)?;
        self.loss_of(&hidden, &targets, mode)
    }

    fn ignored(&self) -> Option<i64> {
        self.config.ignore_index
    }

    /// Nothing is carried from one window to the next.
    fn advance(&mut self, _: &Tensor, _: Mode) -> Result<()> {
        Ok(())
    }

    /// From the keys and values of earlier tokens. Once there are more than `block`, the oldest ones fall out: each answer is then that
    /// of a pass over the last `block` tokens, whose places, and with them all keys, have changed.
    fn next_logits(&mut self, tokens: &Tensor) -> Result<Tensor> {
        let (block, mode) = (self.config.block, Mode::Eval);
        let mut new = sequences(tokens)?.to_dtype(DType::U32)?;
        let before = self.past.take().filter(|seen| seen.tokens.dims()[0] == new.dims()[0]);
        let (mut all, mut seen) = match before {
            Some(seen) => (Tensor::cat(&[&seen.tokens, &new], 1)?, seen.blocks),
            None => (new.clone(), vec![None; self.blocks.len()]),
        };
        let length = all.dim(1)?;
        let mut first = length - new.dim(1)?;
        if length > block {
            all = all.narrow(1, length - block, block)?.contiguous()?;
            seen = vec![None; self.blocks.len()];
            (new, first) = (all.clone(), 0);
        }
        let hidden = self.pass(&new, &Masks::default(), mode, first, Some(&mut seen))?;
        self.past = Some(Seen { tokens: all, blocks: seen });
        let last = hidden.leave()?.squeeze(1)?;
        let last = last.narrow(1, last.dim(1)? - 1, 1)?.contiguous()?;
        Ok(linear(&last, &self.decoder(mode), None, Activation::None)?.squeeze(1)?)
    }

    fn set_place(&mut self, first: usize) {
        self.place = first;
    }

    fn set_carry(&mut self, _: &[(String, Tensor)]) -> Result<()> {
        self.past = None;
        Ok(())
    }
}
