//! The LSTM language model: tied embedding, dropout everywhere, regularised activations.
//!
//! The network and the names of its parameters are those of awd-lstm-lm: `encoder.weight` (also the decoder's
//! weight), `rnns.<l>.{weight_ih_l0, weight_hh_l0, bias_ih_l0, bias_hh_l0}` and `decoder.bias`. All layers but the
//! last have `hidden` units, the last has `emb`, as many as the embedding has features.
use crate::cost::{Cost, Count, check_layers};
use crate::layers::config_error;
use crate::ops::{
    Activation, LstmState, LstmWeights, Mask, embedding, linear, linear_cross_entropy, lstm, masked,
    mean_square, mean_square_change,
};
use crate::registry::{Architecture, Config};
use crate::rng::Rng;
use crate::{Error, Loss, Mode, Model, Result, Task};
use candle_core::Tensor;
use candle_nn::{Init, VarBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Shares of what is dropped in training. A share that is not given is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Dropout {
    /// Of the vocabulary's rows, in the lookup only.
    pub embedding: f64,
    /// Of the first layer's input; one mask for all steps.
    pub input: f64,
    /// Of the output of every layer but the last; one mask for all steps.
    pub hidden: f64,
    /// Of the last layer's output; one mask for all steps.
    pub output: f64,
    /// Of every layer's recurrent weights.
    pub weight: f64,
}

/// Configuration of `lstm`. The defaults are the ones of the PTB experiments.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LstmConfig {
    /// Number of layers. Defaults to 1.
    pub layers: usize,
    /// Features of the embedding and units of the last layer. Defaults to 400.
    pub emb: usize,
    /// Units of every layer but the last. Defaults to 1150.
    pub hidden: usize,
    /// Factor of the mean square of the last layer's dropped output in the loss (AR). Defaults to 2.
    pub alpha: f64,
    /// Factor of the mean square of the changes of its undropped output from step to step (TAR). Defaults to 1.
    pub beta: f64,
    /// Shares that are dropped in training. Defaults to embedding 0.1, input 0.4, hidden 0.25, output 0.4, weight 0.5.
    pub dropout: Dropout,
    /// Whether the recurrent weights stay as they were drawn, as they did in the code behind the published
    /// tables. Defaults to false.
    pub freeze_recurrent: bool,
}

impl Default for LstmConfig {
    fn default() -> Self {
        let dropout = Dropout { embedding: 0.1, input: 0.4, hidden: 0.25, output: 0.4, weight: 0.5 };
        Self { layers: 1, emb: 400, hidden: 1150, alpha: 2.0, beta: 1.0, dropout, freeze_recurrent: false }
    }
}

impl LstmConfig {
    /// Input and hidden size of layer `l`.
    fn sizes(&self, l: usize) -> (usize, usize) {
        let input = if l == 0 { self.emb } else { self.hidden };
        (input, if l + 1 == self.layers { self.emb } else { self.hidden })
    }

    fn check(&self) -> Result<()> {
        let error = |key: &str, message: String| Err(config_error("lstm", key, message));
        for (key, value) in [("layers", self.layers), ("emb", self.emb), ("hidden", self.hidden)] {
            if value == 0 {
                return error(key, "expected at least 1, found 0".into());
            }
        }
        for (key, value) in [("alpha", self.alpha), ("beta", self.beta)] {
            if !(value >= 0.0 && value.is_finite()) {
                return error(key, format!("expected a finite number of at least 0, found {value}"));
            }
        }
        let Dropout { embedding, input, hidden, output, weight } = self.dropout;
        let shares = [
            ("embedding", embedding),
            ("input", input),
            ("hidden", hidden),
            ("output", output),
            ("weight", weight),
        ];
        for (key, value) in shares {
            if !(0.0..1.0).contains(&value) {
                return error(&format!("dropout.{key}"), format!("expected a share in 0..1, found {value}"));
            }
        }
        check_layers("lstm", "layers", Count::of(self.layers))
    }
}

impl Config for LstmConfig {
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        Ok(Box::new(LanguageModel::new(self.clone(), vocabulary(task)?, vb)?))
    }

    /// Of one token.
    fn cost(&self, task: Task) -> Result<Cost> {
        self.check()?;
        let (vocab, emb) = (Count::of(vocabulary(task)?), Count::of(self.emb));
        let mut cost = Cost {
            parameters: (vocab * emb + vocab).0,
            flops: (Count(2) * vocab * emb).0,
            // The embedding's rows, dropped and not; the last output dropped; the logits' gradient.
            activation_bytes: (Count(4) * (Count(3) * emb + vocab)).0,
        };
        for l in 0..self.layers {
            let (input, hidden) = self.sizes(l);
            let (input, hidden) = (Count::of(input), Count::of(hidden));
            cost.parameters += Count(4) * hidden * (input + hidden + Count(2));
            cost.flops += Count(8) * hidden * (input + hidden);
            // Gates, cells, outputs, and outputs dropped.
            cost.activation_bytes += Count(4 * 7) * hidden;
        }
        Ok(cost)
    }

    fn architecture(&self) -> Option<Architecture> {
        Some(Architecture::Lstm(self.clone()))
    }

    fn smallest_task(&self) -> Option<Task> {
        Some(Task::LEAST_TOKENS)
    }

    fn heaviest(&self) -> Option<String> {
        // A single layer has as many units as the embedding has features.
        Some(if self.layers > 1 && self.hidden > self.emb { "hidden" } else { "emb" }.into())
    }
}

fn vocabulary(task: Task) -> Result<usize> {
    match task {
        Task::Tokens { vocab } if vocab > 0 => Ok(vocab),
        task => Err(config_error("lstm", "name", format!("expected text, found {task}"))),
    }
}

/// The masks of one forward pass; what is `None` is not dropped.
#[derive(Clone, Debug, Default)]
pub struct Masks {
    /// `[vocabulary]`.
    pub embedding: Option<Mask>,
    /// `[batch, emb]`.
    pub input: Option<Mask>,
    /// `[batch, hidden]`, after each layer but the last.
    pub hidden: Vec<Option<Mask>>,
    /// `[batch, emb]`.
    pub output: Option<Mask>,
    /// `[4·units, units]` for each layer.
    pub weight_hh: Vec<Option<Mask>>,
}

/// The model. See the [module](self).
#[derive(Debug)]
pub struct LanguageModel {
    config: LstmConfig,
    encoder: Tensor,
    layers: Vec<LstmWeights>,
    bias: Tensor,
    /// A state per layer, or nothing before the first batch.
    carry: Vec<LstmState>,
    /// The place of the next inputs' first column in the batch.
    place: usize,
}

/// What the last layer says, `[steps, batch, emb]`.
#[derive(Debug)]
pub struct Hidden {
    /// After the output mask.
    pub dropped: Tensor,
    /// Before it.
    pub undropped: Tensor,
}

impl LanguageModel {
    /// Creates the parameters through `vb`.
    pub fn new(config: LstmConfig, vocab: usize, vb: VarBuilder) -> Result<Self> {
        config.check()?;
        let uniform = |bound: f64| Init::Uniform { lo: -bound, up: bound };
        let encoder = vb.get_with_hints((vocab, config.emb), "encoder.weight", uniform(0.1))?;
        let bias = vb.get_with_hints(vocab, "decoder.bias", Init::Const(0.0))?;
        let mut layers = Vec::with_capacity(config.layers);
        for l in 0..config.layers {
            let ((input, hidden), vb) = (config.sizes(l), vb.pp("rnns").pp(l));
            let init = uniform(1.0 / (hidden as f64).sqrt());
            let w_hh = vb.get_with_hints((4 * hidden, hidden), "weight_hh_l0", init)?;
            layers.push(LstmWeights {
                w_ih: vb.get_with_hints((4 * hidden, input), "weight_ih_l0", init)?,
                w_hh: if config.freeze_recurrent { w_hh.detach() } else { w_hh },
                b_ih: vb.get_with_hints(4 * hidden, "bias_ih_l0", init)?,
                b_hh: vb.get_with_hints(4 * hidden, "bias_hh_l0", init)?,
            });
        }
        Ok(Self { config, encoder, layers, bias, carry: Vec::new(), place: 0 })
    }

    /// The masks of a training step: each depends on the seed, its name and the step. Of those that differ from column to column,
    /// the part from the place of the first column on.
    pub fn draw_masks(&self, batch: usize, seed: u64, step: u64) -> Result<Masks> {
        let LstmConfig { emb, layers, dropout, .. } = self.config;
        let part = |name: &str, first: usize, shape: &[usize], p: f64| {
            let draw = || Mask::draw_from(Rng::new(seed, "dropout", name, step), first, shape, p);
            (p > 0.0).then(draw).transpose()
        };
        let mask = |name: &str, shape: &[usize], p: f64| part(name, 0, shape, p);
        let columns = |name: &str, size: usize, p: f64| part(name, self.place * size, &[batch, size], p);
        let size = |l| self.config.sizes(l).1;
        let hidden = |l| columns(&format!("hidden.{l}"), size(l), dropout.hidden);
        let weight = |l| mask(&format!("weight_hh.{l}"), &[4 * size(l), size(l)], dropout.weight);
        Ok(Masks {
            embedding: mask("embedding", &[self.encoder.dim(0)?], dropout.embedding)?,
            input: columns("input", emb, dropout.input)?,
            hidden: (0..layers - 1).map(hidden).collect::<Result<_>>()?,
            output: columns("output", emb, dropout.output)?,
            weight_hh: (0..layers).map(weight).collect::<Result<_>>()?,
        })
    }

    /// The layers over `tokens` (`[steps, batch]`, u32 or i64), from the carried state, which moves on.
    pub fn hidden(&mut self, tokens: &Tensor, masks: &Masks) -> Result<Hidden> {
        if tokens.rank() != 2 {
            let found = format!("{:?}", tokens.dims());
            return Err(Error::Shape { op: "lstm", expected: "tokens [steps, batch]".into(), found });
        }
        let drop = |x: Tensor, mask: Option<&Mask>| match mask {
            Some(mask) => masked(&x, mask),
            None => Ok(x),
        };
        let nth = |masks: &[Option<Mask>], l: usize| masks.get(l).cloned().flatten();
        let mut x = drop(embedding(&self.encoder, tokens, masks.embedding.as_ref())?, masks.input.as_ref())?;
        let mut after = Vec::with_capacity(self.layers.len());
        for (l, weights) in self.layers.iter().enumerate() {
            let (y, state) = lstm(&x, weights, self.carry.get(l), nth(&masks.weight_hh, l).as_ref())?;
            after.push(state);
            x = if l + 1 < self.layers.len() { drop(y, nth(&masks.hidden, l).as_ref())? } else { y };
        }
        self.carry = after;
        Ok(Hidden { dropped: drop(x.clone(), masks.output.as_ref())?, undropped: x })
    }

    /// Logits `[steps, batch, vocabulary]`.
    pub fn decode(&self, dropped: &Tensor) -> Result<Tensor> {
        linear(dropped, &self.encoder, Some(&self.bias), Activation::None)
    }

    /// The loss of what [`LanguageModel::hidden`] returned; with AR and TAR if `regularised`.
    pub fn loss_of(&self, hidden: &Hidden, target: &Tensor, regularised: bool) -> Result<Loss> {
        let options = Default::default();
        let nll = linear_cross_entropy(&hidden.dropped, &self.encoder, Some(&self.bias), target, &options)?;
        let mut total = nll.clone();
        if regularised && self.config.alpha > 0.0 {
            total = (total + (mean_square(&hidden.dropped)? * self.config.alpha)?)?;
        }
        if regularised && self.config.beta > 0.0 {
            total = (total + (mean_square_change(&hidden.undropped)? * self.config.beta)?)?;
        }
        Ok(Loss { total, nll, logits: None })
    }

    fn masks(&self, tokens: &Tensor, mode: Mode) -> Result<Masks> {
        match mode {
            Mode::Eval => Ok(Masks::default()),
            Mode::Train { seed, step } | Mode::Statistics { seed, step } => {
                self.draw_masks(tokens.dims().get(1).copied().unwrap_or_default(), seed, step)
            }
        }
    }
}

impl Model for LanguageModel {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> Result<Tensor> {
        let masks = self.masks(input, mode)?;
        let hidden = self.hidden(input, &masks)?;
        Ok(self.decode(&hidden.dropped)?.flatten_to(1)?)
    }

    fn loss(&mut self, input: &Tensor, target: &Tensor, mode: Mode) -> Result<Loss> {
        let masks = self.masks(input, mode)?;
        let hidden = self.hidden(input, &masks)?;
        self.loss_of(&hidden, target, mode.is_train())
    }

    fn advance(&mut self, input: &Tensor, mode: Mode) -> Result<()> {
        let masks = self.masks(input, mode)?;
        self.hidden(input, &masks).map(drop)
    }

    fn carry(&self) -> Vec<(String, Tensor)> {
        let pair = |(l, state): (usize, &LstmState)| {
            [(format!("h.{l}"), state.h.clone()), (format!("c.{l}"), state.c.clone())]
        };
        self.carry.iter().enumerate().flat_map(pair).collect()
    }

    fn set_place(&mut self, first: usize) {
        self.place = first;
    }

    fn set_carry(&mut self, carry: &[(String, Tensor)]) -> Result<()> {
        if carry.is_empty() {
            self.carry.clear();
            return Ok(());
        }
        let device = self.encoder.device();
        let place = |(_, t): &(String, Tensor)| t.detach().to_device(device);
        let find = |name: String| carry.iter().find(|(n, _)| *n == name).ok_or(name);
        let (mut states, mut missing) = (Vec::new(), Vec::new());
        for l in 0..self.layers.len() {
            match (find(format!("h.{l}")), find(format!("c.{l}"))) {
                (Ok(h), Ok(c)) => states.push(LstmState { h: place(h)?, c: place(c)? }),
                (h, c) => missing.extend([h.err(), c.err()].into_iter().flatten()),
            }
        }
        if !missing.is_empty() {
            return Err(Error::Weights { missing, extra: Vec::new(), misshapen: Vec::new() });
        }
        self.carry = states;
        Ok(())
    }
}
