//! Replays another implementation's record of a model and measures how far ours is from it.
//!
//! A record is a safetensors file with `state.<name>` (weights and buffers under PyTorch's names), `input`, `target` and the
//! results to compare: `train.logits`, `train.loss`, `train.loss_total`, `grad.<name>`, `after.<name>` (running statistics
//! after the pass), `eval.logits`, `eval.loss`, for an LSTM `initial.*`, `mask.*`, `hidden.*` and `eval.hidden.*`, and for a
//! transformer `mask.*`. Its metadata say which `model` with which `config` (JSON).
use crate::cost::memory;
use crate::gpt::{Gpt, GptConfig};
use crate::lstm::{LanguageModel, LstmConfig, Masks};
use crate::ops::{Mask, cross_entropy};
use crate::registry::Config;
use crate::transformer;
use crate::vit::{Vit, VitConfig};
use crate::{Error, Loss, Mode, Model, Params, Registry, Result, Task, backward};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};

/// How far a replay was from its record.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The model.
    pub name: String,
    /// The largest absolute error over all compared tensors.
    pub max_abs_error: f64,
    /// The largest of the relative errors.
    pub max_rel_error: f64,
    /// The tensor that the largest relative error is in.
    pub tensor: String,
    /// Of every tensor its absolute error divided by its largest expected magnitude. A gradient that is zero in exact arithmetic (of
    /// queries and keys where there is one token) is rounding in the record and here: it is divided by the record's largest one.
    pub errors: BTreeMap<String, f64>,
    /// The absolute error of every tensor.
    pub differences: BTreeMap<String, f64>,
    /// How far it may be.
    pub limits: Limits,
}

/// How far results may be from a record, as the descriptions of the records suggest it: some ten times what PyTorch's own f32 is
/// from them, or in f64 the rounding of the record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Of logits, absolute.
    pub logits: f64,
    /// Of losses, absolute.
    pub loss: f64,
    /// Of gradients, relative.
    pub gradients: f64,
    /// Of running statistics and carried states, absolute.
    pub states: f64,
}

impl Limits {
    fn of(record: &Record, dtype: DType) -> Self {
        let transformer = matches!(record.model.as_str(), "gpt" | "vit");
        // Published initial values are small, and so are the logits.
        let small = record.sizes.get("init").is_some_and(|init| init != "spread");
        match dtype {
            DType::F64 => Self { logits: 5e-7, loss: 5e-7, gradients: 1e-7, states: 5e-7 },
            _ => {
                let logits = if !transformer {
                    1e-5
                } else if small {
                    1e-6
                } else {
                    3e-5
                };
                Self { logits, loss: 5e-6, gradients: 5e-5, states: 1e-5 }
            }
        }
    }
}

impl Replayed {
    /// The tensors that are farther from the record than they may be: how far, and how far they may be.
    pub fn beyond(&self) -> Vec<(&str, f64, f64)> {
        let off = |name: &String| {
            let (absolute, limits) = (self.differences[name], &self.limits);
            match name.split('.').collect::<Vec<_>>()[..] {
                ["grad", ..] => (self.errors[name], limits.gradients),
                [_, "logits"] => (absolute, limits.logits),
                ["train" | "eval", "loss" | "loss_total"] => (absolute, limits.loss),
                _ => (absolute, limits.states),
            }
        };
        let all = self.errors.keys().map(|name| (name.as_str(), off(name)));
        // An error that is no number is one.
        all.filter(|(_, (off, limit))| off.is_nan() || off > limit)
            .map(|(name, (off, limit))| (name, off, limit))
            .collect()
    }
}

/// As a share of the largest gradient in a record, what is rounding alone: f32 has no more digits.
const ROUNDING: f64 = 1e-7;

/// Whether a safetensors file is a record of a model.
pub fn is_record(bytes: &[u8]) -> bool {
    metadata(bytes).is_ok_and(|m| m.contains_key("model"))
}

/// Replays the record in `bytes` with `overrides` on top of its configuration, computing in `dtype`.
pub fn replay(bytes: &[u8], overrides: &Map<String, Value>, dtype: DType) -> Result<Replayed> {
    replay_on(bytes, overrides, dtype, &Device::Cpu)
}

/// The same on `device`.
pub fn replay_on(
    bytes: &[u8],
    overrides: &Map<String, Value>,
    dtype: DType,
    device: &Device,
) -> Result<Replayed> {
    let record = Record::parse(bytes, overrides, dtype, device)?;
    let params = Params::new(0);
    let vb = params.builder(dtype, device);
    let weights = record.under("state.").map(|(name, t)| (name.to_owned(), t.clone())).collect();
    let mut found: BTreeMap<String, Tensor> = BTreeMap::new();

    let train = Mode::Train { seed: 0, step: 0 };
    let (loss, eval) = match record.model.as_str() {
        "lstm" => {
            let vocab = record.size("vocab")?;
            let mut model = LanguageModel::new(record.read::<LstmConfig>()?, vocab, vb)?;
            params.set(&weights)?;
            let initial: Vec<_> =
                record.under("initial.").map(|(name, t)| (name.to_owned(), t.clone())).collect();
            model.set_carry(&initial)?;
            let hidden = model.hidden(record.get("input")?, &record.masks()?)?;
            found.insert("train.logits".into(), model.decode(&hidden.dropped)?);
            found.extend(model.carry().into_iter().map(|(name, t)| (format!("hidden.{name}"), t)));
            let loss = model.loss_of(&hidden, record.get("target")?, true)?;
            model.set_carry(&initial)?;
            let hidden = model.hidden(record.get("input")?, &Masks::default())?;
            found.extend(model.carry().into_iter().map(|(name, t)| (format!("eval.hidden.{name}"), t)));
            let eval = Loss {
                logits: Some(model.decode(&hidden.dropped)?),
                ..model.loss_of(&hidden, record.get("target")?, false)?
            };
            (loss, eval)
        }
        "gpt" => {
            let vocab = record.size("vocab")?;
            let config = record.read::<GptConfig>()?;
            config.cost(Task::Tokens { vocab })?.check("gpt", "emb", memory())?;
            let mut model = Gpt::new(config, vocab, vb)?;
            params.set(&weights)?;
            let mut pass = |masks: &transformer::Masks, mode| -> Result<Loss> {
                let hidden = model.hidden(record.get("input")?, masks, mode)?;
                let logits = Some(model.decode(&hidden, mode)?);
                Ok(Loss { logits, ..model.loss_of(&hidden, record.get("target")?, mode)? })
            };
            let loss = pass(&record.residual_masks()?, train)?;
            found.extend(loss.logits.clone().map(|logits| ("train.logits".into(), logits)));
            (loss, pass(&transformer::Masks::default(), Mode::Eval)?)
        }
        "vit" => {
            let (config, task) = (record.read::<VitConfig>()?, record.task()?);
            config.cost(task)?.check("vit", "emb", memory())?;
            let model = Vit::new(config, task, vb)?;
            params.set(&weights)?;
            let input = record.images()?;
            let pass = |masks: &transformer::Masks, mode| -> Result<Loss> {
                let logits = model.forward(&input, masks, mode)?;
                let nll = cross_entropy(&logits, record.get("target")?, &Default::default())?;
                Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
            };
            let loss = pass(&record.residual_masks()?, train)?;
            found.extend(loss.logits.clone().map(|logits| ("train.logits".into(), logits)));
            (loss, pass(&transformer::Masks::default(), Mode::Eval)?)
        }
        name => {
            let registry = Registry::builtin();
            let entry = registry.get(name)?;
            let mut model = entry.build(&Value::Object(record.config.clone()), record.task()?, vb)?;
            params.set(&weights)?;
            let input = record.images()?;
            let mut pass = |mode| -> Result<Loss> {
                let logits = model.logits(&input, mode)?;
                let nll = cross_entropy(&logits, record.get("target")?, &Default::default())?;
                Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
            };
            let loss = pass(train)?;
            found.extend(loss.logits.clone().map(|logits| ("train.logits".into(), logits)));
            let after =
                params.vars().into_iter().map(|(name, var)| Ok((format!("after.{name}"), var.copy()?)));
            found.extend(after.collect::<Result<Vec<_>>>()?);
            (loss, pass(Mode::Eval)?)
        }
    };

    let grads = backward(&loss.total)?;
    for (name, var) in params.trainable() {
        if let Some(grad) = grads.get(&var) {
            found.insert(format!("grad.{name}"), grad.clone());
        }
    }
    found.insert("train.loss".into(), loss.nll);
    found.insert("train.loss_total".into(), loss.total);
    found.insert("eval.loss".into(), eval.nll);
    found.extend(eval.logits.map(|logits| ("eval.logits".into(), logits)));
    record.compare(&found, Limits::of(&record, dtype))
}

pub use taper_kernels::compare::{largest_difference, relative_difference};

struct Record {
    model: String,
    config: Map<String, Value>,
    /// What the configuration says about the data rather than the model.
    sizes: Map<String, Value>,
    tensors: HashMap<String, Tensor>,
}

/// Keys of a record's configuration that are no hyperparameters of the model.
fn of_the_data(model: &str) -> &'static [&'static str] {
    match model {
        "gpt" => &["batch", "time", "vocab", "head_dim", "init", "rope_pairing"],
        "vit" => &["batch", "image", "in_channels", "num_classes", "head_dim", "init", "names", "norm"],
        _ => {
            &["batch", "image", "in_channels", "num_classes", "seq", "vocab", "carry", "sizes", "activation"]
        }
    }
}

fn metadata(bytes: &[u8]) -> Result<HashMap<String, String>> {
    let damaged = |message: String| Error::Config { model: "record".into(), key: None, message };
    let (_, header) = safetensors::SafeTensors::read_metadata(bytes).map_err(|e| damaged(e.to_string()))?;
    header.metadata().clone().ok_or_else(|| damaged("no metadata".into()))
}

impl Record {
    fn parse(bytes: &[u8], overrides: &Map<String, Value>, dtype: DType, device: &Device) -> Result<Self> {
        let metadata = metadata(bytes)?;
        let refuse = |message: String| Error::Config { model: "record".into(), key: None, message };
        let entry =
            |key: &str| metadata.get(key).ok_or_else(|| refuse(format!("no `{key}` in the metadata")));
        let model = entry("model")?.clone();
        let all: Map<String, Value> = serde_json::from_str(entry("config")?)
            .map_err(|e| refuse(format!("`config`: expected a JSON object: {e}")))?;
        let (sizes, mut config): (Map<_, _>, Map<_, _>) =
            all.into_iter().partition(|(key, _)| of_the_data(&model).contains(&key.as_str()));
        if matches!(model.as_str(), "gpt" | "vit") {
            // What a network has not is null there.
            config.retain(|_, value| !value.is_null());
            for (key, known) in [("rope_pairing", "half_split"), ("names", "timm"), ("norm", "layernorm")] {
                if let Some(found) = sizes.get(key).filter(|value| !value.is_null() && *value != known) {
                    return Err(refuse(format!("`{key}`: expected `{known}`, found {found}")));
                }
            }
            let number = |map: &Map<String, Value>, key: &str| map.get(key).and_then(Value::as_u64);
            if let (Some(emb), Some(heads), Some(size)) =
                (number(&config, "emb"), number(&config, "heads"), number(&sizes, "head_dim"))
                && heads.checked_mul(size) != Some(emb)
            {
                return Err(refuse(format!("`head_dim`: expected emb / heads, found {size}")));
            }
        }
        if let ("mlp", Some([_, hidden @ .., _])) =
            (model.as_str(), sizes.get("sizes").and_then(Value::as_array).map(Vec::as_slice))
        {
            config.insert("hidden".into(), hidden.into());
        }
        config.extend(overrides.clone());
        let mut tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
        for tensor in tensors.values_mut() {
            let dtype = if tensor.dtype().is_float() { dtype } else { tensor.dtype() };
            *tensor = tensor.to_dtype(dtype)?.to_device(device)?;
        }
        Ok(Self { model, config, sizes, tensors })
    }

    /// The configuration of a network that is built by its own type.
    fn read<C: serde::de::DeserializeOwned>(&self) -> Result<C> {
        serde_json::from_value(Value::Object(self.config.clone())).map_err(|e| self.refuse(e.to_string()))
    }

    /// The input, with the channels of a pixel side by side.
    fn images(&self) -> Result<Tensor> {
        let input = self.get("input")?;
        Ok(if input.rank() == 4 { input.permute((0, 2, 3, 1))?.contiguous()? } else { input.clone() })
    }

    /// The masks of a transformer.
    fn residual_masks(&self) -> Result<transformer::Masks> {
        let mask = |name: String| self.tensors.get(&name).map(Mask::from_tensor).transpose();
        let layers = self.config.get("layers").and_then(Value::as_u64).unwrap_or_default();
        let of_block = |i| Ok([mask(format!("mask.resid.{i}.attn"))?, mask(format!("mask.resid.{i}.mlp"))?]);
        Ok(transformer::Masks {
            embedding: mask("mask.embedding".into())?,
            resid: (0..layers).map(of_block).collect::<Result<_>>()?,
            ..Default::default()
        })
    }

    fn refuse(&self, message: String) -> Error {
        Error::Config { model: self.model.clone(), key: None, message }
    }

    fn get(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| self.refuse(format!("no tensor `{name}` in the record")))
    }

    /// The tensors under a prefix, by the rest of their names, in order.
    fn under<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a Tensor)> {
        let mut found: Vec<_> =
            self.tensors.iter().filter_map(|(name, t)| Some((name.strip_prefix(prefix)?, t))).collect();
        found.sort_by_key(|(name, _)| *name);
        found.into_iter()
    }

    fn size(&self, key: &str) -> Result<usize> {
        let size = self.sizes.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        size.ok_or_else(|| self.refuse(format!("`config` has no size `{key}`")))
    }

    fn task(&self) -> Result<Task> {
        if self.model == "mlp" {
            let sizes: Vec<usize> = self
                .sizes
                .get("sizes")
                .cloned()
                .map(serde_json::from_value)
                .transpose()
                .map_err(|e| self.refuse(format!("`sizes`: {e}")))?
                .unwrap_or_default();
            let [inputs, .., classes] = sizes[..] else {
                return Err(self.refuse("`sizes`: expected at least two widths".into()));
            };
            return Ok(Task::Images { height: 1, width: inputs, channels: 1, classes });
        }
        let side = self.size("image")?;
        let (channels, classes) = (self.size("in_channels")?, self.size("num_classes")?);
        Ok(Task::Images { height: side, width: side, channels, classes })
    }

    /// The masks of the record; `[1, batch, n]` there is `[batch, n]` here, `[vocab, 1]` is `[vocab]`.
    fn masks(&self) -> Result<Masks> {
        let mask = |name: &str| -> Result<Option<Mask>> {
            let Some(t) = self.tensors.get(&format!("mask.{name}")) else { return Ok(None) };
            let t = match t.dims() {
                [1, _, _] => t.squeeze(0)?,
                [_, 1] => t.squeeze(1)?,
                _ => t.clone(),
            };
            Ok(Some(Mask::from_tensor(&t)?))
        };
        let layers = self.config.get("layers").and_then(Value::as_u64).unwrap_or(1);
        Ok(Masks {
            embedding: mask("embedding")?,
            input: mask("input")?,
            hidden: (0..layers).map(|l| mask(&format!("hidden.{l}"))).collect::<Result<_>>()?,
            output: mask("output")?,
            weight_hh: (0..layers).map(|l| mask(&format!("weight_hh.{l}"))).collect::<Result<_>>()?,
        })
    }

    /// Compares every result in the record with what was found; a result that was not found is an error.
    fn compare(&self, found: &BTreeMap<String, Tensor>, limits: Limits) -> Result<Replayed> {
        let results = ["train.", "grad.", "after.", "eval.", "hidden."];
        let mut names: Vec<&String> =
            self.tensors.keys().filter(|name| results.iter().any(|r| name.starts_with(r))).collect();
        names.sort_unstable();
        // First to the CPU: not every device has f64.
        let values =
            |t: &Tensor| t.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let largest = |v: &[f64]| v.iter().filter(|v| v.is_finite()).fold(0f64, |m, v| m.max(v.abs()));
        let mut top = 0f64;
        for (_, gradient) in self.under("grad.") {
            top = top.max(largest(&values(gradient)?));
        }
        let (mut errors, mut differences) = (BTreeMap::new(), BTreeMap::new());
        let (mut max_abs_error, mut max_rel_error, mut tensor) = (0f64, -1f64, String::new());
        for name in names {
            let expected = self.get(name)?;
            let Some(found) = found.get(name) else {
                return Err(
                    self.refuse(format!("the record has `{name}`, which this model does not compute"))
                );
            };
            if found.elem_count() != expected.elem_count() {
                let message = format!("`{name}`: expected {:?}, found {:?}", expected.dims(), found.dims());
                return Err(self.refuse(message));
            }
            let (found, expected) = (values(found)?, values(expected)?);
            let error = largest_difference(&found, &expected);
            let size = match largest(&expected) {
                size if name.starts_with("grad.") && size < ROUNDING * top => top,
                size => size,
            };
            let relative = if error == 0.0 { 0.0 } else { error / size };
            max_abs_error = max_abs_error.max(error);
            if relative > max_rel_error {
                (max_rel_error, tensor) = (relative, name.clone());
            }
            errors.insert(name.clone(), relative);
            differences.insert(name.clone(), error);
        }
        if errors.is_empty() {
            return Err(self.refuse("the record has no results to compare with".into()));
        }
        let name = self.model.clone();
        Ok(Replayed { name, max_abs_error, max_rel_error, tensor, errors, differences, limits })
    }
}
