//! Replays another implementation's record of an optimizer and measures how far ours is from it.
//!
//! A record is a safetensors file with `params[d]`, `grads[T, d]`, `losses[T]`, `lrs[T]` and `expected[T, d]`
//! (the parameters after each step), and in its metadata `optimizer`, `hyperparameters` (JSON) and `lr`. Buffers
//! after the last step may follow as `final.<buffer>[d]`. Gradients are recorded, so rounding is not amplified by
//! the objective.
use crate::{Error, Registry, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// What to change about a record before it is replayed.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Another optimizer than the recorded one.
    pub optimizer: Option<String>,
    /// Hyperparameters on top of the recorded ones.
    pub overrides: Map<String, Value>,
    /// The precision to compute in; f64 unless set.
    pub dtype: Option<DType>,
    /// The device to compute on; the CPU unless set.
    pub device: Option<Device>,
}

/// How far a replay was from its record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replayed {
    /// The optimizer.
    pub name: String,
    /// The largest absolute error over all compared tensors.
    pub max_abs_error: f64,
    /// The largest of each tensor's absolute error divided by its largest expected magnitude.
    pub max_rel_error: f64,
    /// The tensor that the largest relative error is in.
    pub tensor: String,
    /// The parameters after each step, [T, d].
    #[serde(skip)]
    pub trajectory: Vec<Vec<f64>>,
}

/// Replays the record in `bytes`.
pub fn replay(registry: &Registry, bytes: &[u8], options: &Options) -> Result<Replayed> {
    let record = Record::parse(bytes)?;
    let name = options.optimizer.as_deref().unwrap_or(&record.optimizer);
    let mut config = if name == record.optimizer { record.hyperparameters.clone() } else { Map::new() };
    // AdaGD has no learning rate to set.
    if registry.get(name)?.defaults.contains_key("lr") {
        config.insert("lr".into(), record.lr.into());
    }
    config.extend(options.overrides.clone());
    let dtype = options.dtype.unwrap_or(DType::F64);
    let device = options.device.as_ref().unwrap_or(&Device::Cpu);
    let tensor = |values: &[f64]| {
        Tensor::from_slice(values, values.len(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
    };
    let var = Var::from_tensor(&tensor(&record.params)?)?;
    let mut optimizer = registry.build(name, vec![("x".into(), var.clone())], &config)?;

    let mut comparison = Comparison::default();
    let mut trajectory = Vec::with_capacity(record.lrs.len());
    for (t, (lr, loss)) in record.lrs.iter().zip(&record.losses).enumerate() {
        let mut grads = GradStore::default();
        grads.insert(&var, tensor(&record.grads[t])?);
        optimizer.step(&grads, &StepContext::new().lr(*lr).loss(*loss))?;
        trajectory.push(var.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_vec1()?);
    }
    comparison.add("expected", trajectory.iter().flatten(), record.expected.iter().flatten());
    let state = optimizer.state_dict()?.tensors;
    for (buffer, expected) in &record.finals {
        // Records name the running minimum after the paper; without AMS it is v itself.
        let names: &[&str] = if buffer == "v_star" { &["v_min", "v"] } else { &[buffer] };
        let Some(found) = names.iter().find_map(|name| state.get(&format!("x.{name}"))) else {
            return Err(bad(format!("no buffer `{buffer}` in {name} to compare `final.{buffer}` with")));
        };
        let found: Vec<f64> = found.to_dtype(DType::F64)?.to_vec1()?;
        comparison.add(&format!("final.{buffer}"), found.iter(), expected.iter());
    }
    let Comparison { max_abs_error, max_rel_error, tensor } = comparison;
    Ok(Replayed { name: name.to_owned(), max_abs_error, max_rel_error, tensor, trajectory })
}

#[derive(Default)]
struct Comparison {
    max_abs_error: f64,
    max_rel_error: f64,
    tensor: String,
}

impl Comparison {
    fn add<'a>(
        &mut self,
        name: &str,
        found: impl Iterator<Item = &'a f64>,
        expected: impl Iterator<Item = &'a f64>,
    ) {
        let (mut error, mut size) = (0f64, 0f64);
        for (found, expected) in found.zip(expected) {
            let difference = (found - expected).abs();
            // A NaN never compares larger: it must not pass for agreement.
            error = if difference.is_nan() { f64::INFINITY } else { error.max(difference) };
            size = size.max(expected.abs());
        }
        let relative = if error == 0.0 { 0.0 } else { error / size };
        self.max_abs_error = self.max_abs_error.max(error);
        if relative > self.max_rel_error || self.tensor.is_empty() {
            self.max_rel_error = relative;
            self.tensor = name.to_owned();
        }
    }
}

struct Record {
    optimizer: String,
    hyperparameters: Map<String, Value>,
    lr: f64,
    params: Vec<f64>,
    grads: Vec<Vec<f64>>,
    losses: Vec<f64>,
    lrs: Vec<f64>,
    expected: Vec<Vec<f64>>,
    finals: Vec<(String, Vec<f64>)>,
}

fn bad(message: String) -> Error {
    Error::Record(message)
}

impl Record {
    fn parse(bytes: &[u8]) -> Result<Self> {
        let (_, metadata) = safetensors::SafeTensors::read_metadata(bytes).map_err(|e| bad(e.to_string()))?;
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let entry = |key: &str| metadata.get(key).ok_or_else(|| bad(format!("no `{key}` in the metadata")));
        let number =
            |text: &str| text.parse().map_err(|_| bad(format!("`lr`: expected a number, found `{text}`")));
        let hyperparameters = serde_json::from_str(entry("hyperparameters")?)
            .map_err(|e| bad(format!("`hyperparameters`: expected a JSON object: {e}")))?;
        let (optimizer, lr) = (entry("optimizer")?.clone(), number(entry("lr")?)?);

        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
        let params = vector(&tensors, "params", None)?;
        let d = params.len();
        let lrs = vector(&tensors, "lrs", None)?;
        let steps = lrs.len();
        let mut finals = Vec::new();
        for name in tensors.keys().filter(|name| name.starts_with("final.")) {
            finals.push((name["final.".len()..].to_owned(), vector(&tensors, name, Some(d))?));
        }
        finals.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self {
            losses: vector(&tensors, "losses", Some(steps))?,
            grads: matrix(&tensors, "grads", (steps, d))?,
            expected: matrix(&tensors, "expected", (steps, d))?,
            optimizer,
            hyperparameters,
            lr,
            params,
            lrs,
            finals,
        })
    }
}

fn tensor<'a>(tensors: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor> {
    tensors.get(name).ok_or_else(|| bad(format!("no tensor `{name}`")))
}

fn vector(tensors: &HashMap<String, Tensor>, name: &str, len: Option<usize>) -> Result<Vec<f64>> {
    let tensor = tensor(tensors, name)?;
    match tensor.dims() {
        [n] if len.is_none_or(|len| len == *n) => Ok(tensor.to_dtype(DType::F64)?.to_vec1()?),
        dims => Err(bad(format!(
            "tensor `{name}`: expected shape [{}], found {dims:?}",
            len.map_or("d".into(), |n| n.to_string())
        ))),
    }
}

fn matrix(tensors: &HashMap<String, Tensor>, name: &str, shape: (usize, usize)) -> Result<Vec<Vec<f64>>> {
    let tensor = tensor(tensors, name)?;
    if tensor.dims() != [shape.0, shape.1] {
        return Err(bad(format!("tensor `{name}`: expected shape {shape:?}, found {:?}", tensor.dims())));
    }
    Ok(tensor.to_dtype(DType::F64)?.to_vec2()?)
}
