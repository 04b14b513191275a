//! Replays another implementation's record of an optimizer and measures how far ours is from it.
//!
//! A record is a safetensors file with `params[d]`, `grads[T, d]`, `losses[T]`, `lrs[T]` and `expected[T, d]`
//! (the parameters after each step), and in its metadata `optimizer`, `hyperparameters` (JSON) and `lr`. Buffers
//! after the last step may follow as `final.<buffer>[d]`. Gradients are recorded, so rounding is not amplified by
//! the objective.
//!
//! With `format` 2 in its metadata it has several tensors of any shape: `params.<name>`, `grads.<name>[T, …]` and
//! `expected.<name>[T, …]`. Beside them may be `eval.<name>[T, …]`, the weights for evaluation after each step;
//! `grads2.<name>[T, …]` and `perturbed.<name>[T, …]`, a second gradient and where it is taken; and `rates[T]`, the
//! step size that the optimizer has found after each step. A wrapper's hyperparameters name its `base`, and are those of both.
use crate::{Error, Evaluated, Optimizer, Registry, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::HashMap;
use taper_kernels::compare::{largest_difference, relative_difference};

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
    /// Every compared tensor.
    pub compared: Vec<Compared>,
    /// The parameters after each step, [T, d]: all tensors one after another, by name.
    #[serde(skip)]
    pub trajectory: Vec<Vec<f64>>,
}

/// How far one tensor was from its record.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// Its name in the record.
    pub tensor: String,
    /// The largest absolute error.
    pub abs: f64,
    /// The same divided by the largest expected magnitude.
    pub rel: f64,
}

/// Replays the record in `bytes`.
pub fn replay(registry: &Registry, bytes: &[u8], options: &Options) -> Result<Replayed> {
    let record = Record::parse(bytes)?;
    let name = options.optimizer.as_deref().unwrap_or(&record.optimizer);
    let config = record.config(registry, name, &options.overrides)?;
    let dtype = options.dtype.unwrap_or(DType::F64);
    let device = options.device.as_ref().unwrap_or(&Device::Cpu);
    let mut vars = Vec::with_capacity(record.tensors.len());
    for tensor in &record.tensors {
        vars.push(Var::from_tensor(&tensor.start.to_dtype(dtype)?.to_device(device)?)?);
    }
    let named = record.tensors.iter().zip(&vars).map(|(tensor, var)| (tensor.name.clone(), var.clone()));
    let mut optimizer = registry.build(name, named.collect(), &config)?;
    let store = |t: usize, of: &dyn Fn(&Recorded) -> Option<&Tensor>| -> Result<GradStore> {
        let mut grads = GradStore::default();
        for (tensor, var) in record.tensors.iter().zip(&vars) {
            if let Some(all) = of(tensor) {
                grads.insert(var, all.get(t)?.to_dtype(dtype)?.to_device(device)?);
            }
        }
        Ok(grads)
    };

    let mut seen: Vec<Seen> = record.tensors.iter().map(|_| Seen::default()).collect();
    let mut rates = Vec::with_capacity(record.lrs.len());
    for (t, (lr, loss)) in record.lrs.iter().zip(&record.losses).enumerate() {
        let context = StepContext::new().lr(*lr).loss(*loss);
        let grads = store(t, &|tensor| Some(&tensor.grads))?;
        let mut again = || {
            for (seen, var) in seen.iter_mut().zip(&vars) {
                seen.perturbed.extend(values(var)?);
            }
            Ok(Evaluated { grads: store(t, &|tensor| tensor.grads2.as_ref())?, loss: None })
        };
        optimizer.step_twice(&grads, &context, &mut again)?;
        for (seen, var) in seen.iter_mut().zip(&vars) {
            seen.trained.push(values(var)?);
        }
        if record.tensors.iter().any(|tensor| tensor.eval.is_some()) {
            // Without weights of its own an optimizer is evaluated where it is trained.
            optimizer.eval_weights()?;
            for (seen, var) in seen.iter_mut().zip(&vars) {
                seen.evaluated.extend(values(var)?);
            }
            optimizer.train_weights()?;
        }
        if record.rates.is_some() {
            rates.push(rate(&*optimizer, name)?);
        }
    }

    let mut comparison = Comparison::default();
    for (tensor, seen) in record.tensors.iter().zip(&seen) {
        let Seen { trained, evaluated, perturbed } = seen;
        let compared = [
            ("expected", Some(&tensor.expected), &trained.concat()),
            ("eval", tensor.eval.as_ref(), evaluated),
            ("perturbed", tensor.perturbed.as_ref(), perturbed),
        ];
        for (kind, expected, found) in compared {
            let Some(expected) = expected else { continue };
            let label = if record.several { format!("{kind}.{}", tensor.name) } else { kind.to_owned() };
            comparison.add(label, found, &values(expected)?)?;
        }
    }
    if let Some(expected) = &record.rates {
        comparison.add("rates".to_owned(), &rates, expected)?;
    }
    let state = optimizer.state_dict()?.tensors;
    for (buffer, expected) in &record.finals {
        // Records name the running minimum after the paper; without AMS it is v itself.
        let names: &[&str] = if buffer == "v_star" { &["v_min", "v"] } else { &[buffer] };
        let Some(found) = names.iter().find_map(|name| state.get(&format!("x.{name}"))) else {
            return Err(bad(format!("no buffer `{buffer}` in {name} to compare `final.{buffer}` with")));
        };
        comparison.add(format!("final.{buffer}"), &values(found)?, expected)?;
    }
    let trajectory = (0..record.lrs.len()).map(|t| seen.iter().flat_map(|s| s.trained[t].clone()).collect());
    let (trajectory, Comparison(compared)) = (trajectory.collect(), comparison);
    let max_abs_error = compared.iter().map(|c| c.abs).fold(0.0, f64::max);
    let worst = compared.iter().reduce(|a, b| if b.rel > a.rel { b } else { a });
    let (max_rel_error, tensor) = worst.map(|c| (c.rel, c.tensor.clone())).unwrap_or_default();
    Ok(Replayed { name: name.to_owned(), max_abs_error, max_rel_error, tensor, compared, trajectory })
}

/// What a replay saw of one tensor.
#[derive(Default)]
struct Seen {
    trained: Vec<Vec<f64>>,
    evaluated: Vec<f64>,
    perturbed: Vec<f64>,
}

/// The elements of a tensor in f64.
fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_device(&Device::Cpu)?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// The step size that an optimizer has found.
fn rate(optimizer: &dyn Optimizer, name: &str) -> Result<f64> {
    let found = optimizer.state_dict()?.header.shared.get("d").copied();
    found.ok_or_else(|| bad(format!("{name} finds no step size to compare `rates` with")))
}

/// Every compared tensor.
#[derive(Default)]
struct Comparison(Vec<Compared>);

impl Comparison {
    fn add(&mut self, tensor: String, found: &[f64], expected: &[f64]) -> Result<()> {
        if found.len() != expected.len() {
            let (expected, found) = (expected.len(), found.len());
            return Err(bad(format!(
                "`{tensor}`: expected {expected} numbers to compare with, found {found}"
            )));
        }
        let (abs, rel) = (largest_difference(found, expected), relative_difference(found, expected));
        self.0.push(Compared { tensor, abs, rel });
        Ok(())
    }
}

/// One tensor of a record.
struct Recorded {
    name: String,
    start: Tensor,
    grads: Tensor,
    expected: Tensor,
    eval: Option<Tensor>,
    grads2: Option<Tensor>,
    perturbed: Option<Tensor>,
}

struct Record {
    optimizer: String,
    hyperparameters: Map<String, Value>,
    lr: f64,
    losses: Vec<f64>,
    lrs: Vec<f64>,
    tensors: Vec<Recorded>,
    /// Whether it names its tensors: format 2.
    several: bool,
    rates: Option<Vec<f64>>,
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
        let several = match metadata.get("format").map(String::as_str) {
            None | Some("1") => false,
            Some("2") => true,
            Some(other) => return Err(bad(format!("`format`: expected 1 or 2, found `{other}`"))),
        };

        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
        let lrs = vector(&tensors, "lrs", None)?;
        let steps = lrs.len();
        let mut names: Vec<(String, String)> = match several {
            // A name may have dots itself.
            true => tensors
                .keys()
                .filter_map(|key| key.strip_prefix("params."))
                .map(|n| (n.into(), format!(".{n}")))
                .collect(),
            false => vec![("x".into(), String::new())],
        };
        names.sort();
        let mut recorded = Vec::with_capacity(names.len());
        for (name, suffix) in names {
            let start = tensor(&tensors, &format!("params{suffix}"))?.to_dtype(DType::F64)?;
            if !several && start.rank() != 1 {
                return Err(bad(format!("tensor `params`: expected shape [d], found {:?}", start.dims())));
            }
            let shape = [&[steps], start.dims()].concat();
            let trajectory = |kind: &str| -> Result<Option<Tensor>> {
                let key = format!("{kind}{suffix}");
                match tensors.get(&key) {
                    Some(found) if found.dims() == shape => Ok(Some(found.to_dtype(DType::F64)?)),
                    Some(found) => Err(bad(format!(
                        "tensor `{key}`: expected shape {shape:?}, found {:?}",
                        found.dims()
                    ))),
                    None => Ok(None),
                }
            };
            let needed =
                |kind: &str| trajectory(kind)?.ok_or_else(|| bad(format!("no tensor `{kind}{suffix}`")));
            recorded.push(Recorded {
                grads: needed("grads")?,
                expected: needed("expected")?,
                eval: trajectory("eval")?,
                grads2: trajectory("grads2")?,
                perturbed: trajectory("perturbed")?,
                name,
                start,
            });
        }
        let mut finals = Vec::new();
        for name in tensors.keys().filter(|name| !several && name.starts_with("final.")) {
            let d = recorded.first().map(|tensor| tensor.start.elem_count());
            finals.push((name["final.".len()..].to_owned(), vector(&tensors, name, d)?));
        }
        finals.sort_by(|a, b| a.0.cmp(&b.0));
        let rates = (several && tensors.contains_key("rates"))
            .then(|| vector(&tensors, "rates", Some(steps)))
            .transpose()?;
        let losses = vector(&tensors, "losses", Some(steps))?;
        Ok(Self { optimizer, hyperparameters, lr, losses, lrs, tensors: recorded, several, rates, finals })
    }

    /// The hyperparameters for the optimizer `name`.
    fn config(
        &self,
        registry: &Registry,
        name: &str,
        overrides: &Map<String, Value>,
    ) -> Result<Map<String, Value>> {
        let defaults = &registry.get(name)?.defaults;
        let mut config = if name == self.optimizer { self.hyperparameters.clone() } else { Map::new() };
        if let Some(base) = config.remove("base") {
            // Of a wrapper: what is not its own is the inner optimizer's.
            let (own, mut inner): (Map<_, _>, Map<_, _>) =
                config.into_iter().partition(|(key, _)| defaults.contains_key(key));
            inner.extend([("name".to_owned(), base), ("lr".to_owned(), self.lr.into())]);
            config = own;
            config.insert("inner".into(), inner.into());
        }
        // AdaGD has no learning rate to set.
        if defaults.contains_key("lr") {
            config.insert("lr".into(), self.lr.into());
        }
        config.extend(overrides.clone());
        Ok(config)
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
