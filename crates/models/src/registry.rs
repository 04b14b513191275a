//! Models by name.
use crate::cost::memory;
use crate::{Error, Model, Result, Task};
use candle_nn::VarBuilder;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

pub use crate::cost::{Cost, MOST_LAYERS, MOST_PARAMETERS};

/// A model's configuration: serde fields with defaults, unknown keys refused (`deny_unknown_fields`).
pub trait Config: Serialize + DeserializeOwned + Default + 'static {
    /// Creates the model's parameters through `vb`.
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>>;
    /// What one sample costs, or what is wrong with the configuration. Nothing is built that has no cost.
    ///
    /// By default the network is built to find out: once on parameters without memory, which are counted, and, if there are not
    /// too many of them, once more for a forward pass of two samples in training, in which the ops of this crate count their
    /// operations and the activations they keep. What candle's own ops do is not counted.
    fn cost(&self, task: Task) -> Result<Cost> {
        crate::cost::by_building(task, |task, vb| self.build(task, vb))
    }
    /// The smallest task it could be built for: what it costs there it costs at least, so that sizes can be judged before
    /// there is data. Defaults to none.
    fn smallest_task(&self) -> Option<Task> {
        None
    }
    /// What the network is made of, for those who write it down in another form. Defaults to nothing: only its code knows.
    fn architecture(&self) -> Option<Architecture> {
        None
    }
    /// The key that most of the cost goes with, as a path (`hidden[1]`): where to point when it is too much.
    fn heaviest(&self) -> Option<String> {
        None
    }
}

/// A network that is known by its configuration.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Architecture {
    /// Linear layers with ReLU between them.
    Mlp(crate::mlp::MlpConfig),
    /// A residual network.
    ResNet(crate::resnet::ResNetConfig),
    /// A densely connected network.
    DenseNet(crate::densenet::DenseNetConfig),
    /// An LSTM language model.
    Lstm(crate::lstm::LstmConfig),
    /// Convolutions on whitened images.
    Airbench(crate::airbench::AirbenchConfig),
    /// A transformer for text.
    Gpt(crate::gpt::GptConfig),
    /// A transformer for images.
    Vit(crate::vit::VitConfig),
}

type Describe = dyn Fn(&Value) -> Result<Option<Architecture>> + Send + Sync;
type Build = dyn Fn(&Value, Task, VarBuilder) -> Result<Box<dyn Model>> + Send + Sync;
type CostOf = dyn Fn(&Value, Task) -> Result<Cost> + Send + Sync;
type Check = dyn Fn(&Value) -> Result<Value> + Send + Sync;

/// One registered model.
pub struct Entry {
    /// Its name in recipes.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// What documents its keys, if anything does: see [`Registry::describe`].
    pub schema: Option<fn(&mut SchemaGenerator) -> Schema>,
    check: Box<Check>,
    build: Box<Build>,
    cost: Box<CostOf>,
    describe: Box<Describe>,
}

impl Entry {
    /// The configuration with every default filled in; unknown keys, wrong types and values that no task permits are errors.
    pub fn check(&self, config: &Value) -> Result<Value> {
        (self.check)(config)
    }
    /// Builds the model, unless it is larger than [`MOST_PARAMETERS`] or the machine's memory.
    pub fn build(&self, config: &Value, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        (self.build)(config, task, vb)
    }
    /// What it is made of, where more than its code knows that.
    pub fn architecture(&self, config: &Value) -> Result<Option<Architecture>> {
        (self.describe)(config)
    }
    /// What one sample costs.
    pub fn cost(&self, config: &Value, task: Task) -> Result<Cost> {
        (self.cost)(config, task)
    }
}

/// The models a recipe can name.
#[derive(Default)]
pub struct Registry(BTreeMap<&'static str, Entry>);

impl Registry {
    /// All models of this crate.
    pub fn builtin() -> Self {
        let mut registry = Self::default();
        let mut add = || -> Result<()> {
            let about = "linear layers with ReLU between them";
            registry.add("mlp", about, crate::mlp::MlpConfig::default())?;
            let about = "LSTM language model with tied embedding (AWD-LSTM)";
            registry.add("lstm", about, crate::lstm::LstmConfig::default())?;
            crate::resnet::register(&mut registry)?;
            crate::densenet::register(&mut registry)?;
            let about = "six convolutions on whitened images, for CIFAR-10 in minutes (airbench94)";
            registry.add("airbench", about, crate::airbench::AirbenchConfig::default())?;
            let about = "transformer language model (nanoGPT)";
            registry.add("gpt", about, crate::gpt::GptConfig::default())?;
            let about = "transformer language model with RMS norm, rotary positions and SwiGLU (Llama)";
            registry.add("llama", about, crate::gpt::GptConfig::llama())?;
            let about = "vision transformer (timm's ViT)";
            registry.add("vit", about, crate::vit::VitConfig::default())
        };
        add().expect("the names above are distinct, which `builtin_names_are_distinct` tests");
        registry
    }

    /// Adds a model under a new name. Values missing from a recipe come from `base`.
    pub fn register<C: Config>(&mut self, name: &'static str, about: &'static str, base: C) -> Result<()> {
        if self.0.contains_key(name) {
            return Err(Error::Duplicate(name.into()));
        }
        let base = serde_json::to_value(base).map_err(|e| refused(name, None, e.to_string()))?;
        let parse = move |config: &Value| read::<C>(name, &base, config);
        let judged = move |config: &C, task: Task, memory: Option<u64>| -> Result<Cost> {
            let cost = config.cost(task)?;
            let key = config.heaviest().unwrap_or_else(|| "name".into());
            cost.check(name, &key, memory).map(|()| cost)
        };
        let (parse_to_check, parse_to_build, parse_to_describe) =
            (parse.clone(), parse.clone(), parse.clone());
        // The configuration's own errors name the kind of network, not what it is called here.
        let named = move |e| match e {
            Error::Config { key, message, .. } => Error::Config { model: name.into(), key, message },
            e => e,
        };
        let entry = Entry {
            name,
            about,
            schema: None,
            check: Box::new(move |given| {
                let config = parse_to_check(given)?;
                if let Some(task) = config.smallest_task() {
                    judged(&config, task, None).map_err(named)?;
                }
                serde_json::to_value(config).map_err(|e| refused(name, None, e.to_string()))
            }),
            build: Box::new(move |given, task, vb| {
                let config = parse_to_build(given)?;
                let memory = vb.device().is_cpu().then(memory).flatten();
                judged(&config, task, memory).and_then(|_| config.build(task, vb)).map_err(named)
            }),
            cost: Box::new(move |given, task| parse(given)?.cost(task).map_err(named)),
            describe: Box::new(move |given| Ok(parse_to_describe(given)?.architecture())),
        };
        self.0.insert(name, entry);
        Ok(())
    }

    /// Says what the keys of `name` are, by the doc comments of their type: for editors and `taper keys`. A model without this is
    /// used as any other; its keys are then known by their defaults alone.
    pub fn describe<C: JsonSchema>(&mut self, name: &str) -> Result<()> {
        self.get(name)?;
        if let Some(entry) = self.0.get_mut(name) {
            entry.schema = Some(C::json_schema);
        }
        Ok(())
    }

    pub(crate) fn add<C: Config + JsonSchema>(
        &mut self,
        name: &'static str,
        about: &'static str,
        base: C,
    ) -> Result<()> {
        self.register(name, about, base)?;
        self.describe::<C>(name)
    }

    /// The model of that name, or an error with the nearest known one.
    pub fn get(&self, name: &str) -> Result<&Entry> {
        let known = || self.0.keys().map(|k| k.to_string()).collect();
        self.0.get(name).ok_or_else(|| Error::UnknownModel { name: name.into(), known: known() })
    }

    /// All models, by name.
    pub fn list(&self) -> impl Iterator<Item = &Entry> {
        self.0.values()
    }
}

fn refused(model: &str, key: Option<String>, message: String) -> Error {
    Error::Config { model: model.into(), key, message }
}

/// The configuration that `given` makes of `base`, in which every key stands.
fn read<C: Config>(model: &str, base: &Value, given: &Value) -> Result<C> {
    let mut merged = base.clone();
    match (merged.as_object_mut(), given) {
        (Some(merged), Value::Object(given)) => {
            unknown_key(model, base, given, "")?;
            merged.extend(given.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        (_, Value::Null) => {}
        _ => return Err(refused(model, None, format!("expected {}, found {given}", kind(base)))),
    }
    let error = match serde_json::from_value(merged) {
        Ok(config) => return Ok(config),
        Err(error) => error,
    };
    // Serde does not say which key it stumbled over: the one that it does not take alone either.
    let takes = |base: &Value| serde_json::from_value::<C>(base.clone()).map(|_| ());
    Err(misfit(model, base, given, &takes).unwrap_or_else(|| refused(model, None, error.to_string())))
}

/// Refuses a key that has no counterpart in `base`, at any depth; `prefix` is the path of the map.
fn unknown_key(model: &str, base: &Value, given: &Map<String, Value>, prefix: &str) -> Result<()> {
    let Value::Object(base) = base else { return Ok(()) };
    for (key, value) in given {
        match (base.get(key), value) {
            (Some(base), Value::Object(given)) => {
                unknown_key(model, base, given, &format!("{prefix}{key}."))?
            }
            (Some(_), _) => {}
            (None, _) => {
                let (key, known) = (format!("{prefix}{key}"), base.keys().cloned().collect());
                return Err(Error::UnknownKey { model: model.into(), key, known });
            }
        }
    }
    Ok(())
}

/// The first value in `given` that `takes` refuses in its place in `base`.
fn misfit(
    model: &str,
    base: &Value,
    given: &Value,
    takes: &dyn Fn(&Value) -> serde_json::Result<()>,
) -> Option<Error> {
    let (Value::Object(defaults), Value::Object(given)) = (base, given) else { return None };
    for (key, value) in given {
        let default = defaults.get(key)?;
        let takes = |value: &Value| {
            let mut whole = base.clone();
            whole[key] = value.clone();
            takes(&whole)
        };
        let Err(error) = takes(value) else { continue };
        let inner = misfit(model, default, value, &takes);
        return Some(match inner {
            Some(Error::Config { model, key: inner, message }) => {
                let path = inner.iter().fold(key.clone(), |path, inner| format!("{path}.{inner}"));
                Error::Config { model, key: Some(path), message }
            }
            _ => {
                // Of a word serde says which ones it takes.
                let said = error.to_string();
                let choices = said.split_once(", expected ").filter(|_| default.is_string());
                let expected = choices.map_or_else(|| kind(default), |(_, choices)| choices.to_owned());
                refused(model, Some(key.clone()), format!("expected {expected}, found {value}"))
            }
        });
    }
    None
}

/// What values like `default` are, for people.
fn kind(default: &Value) -> String {
    match default {
        Value::Object(keys) => {
            let keys: Vec<&str> = keys.keys().map(String::as_str).collect();
            format!("a map with any of {}", keys.join(", "))
        }
        Value::Array(_) => format!("a list like {default}"),
        Value::Number(n) if n.is_u64() => "a whole number that is not negative".into(),
        Value::Number(_) => "a number".into(),
        Value::Bool(_) => "true or false".into(),
        default => format!("a value like {default}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn builtin_names_are_distinct() {
        assert!(Registry::builtin().get("mlp").is_ok());
    }

    #[test]
    fn mistakes_are_named() {
        let registry = Registry::builtin();
        let message = registry.get("mpl").map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("did you mean `mlp`?"), "{message}");
        let check = |model: &str, config: Value| {
            let error = registry.get(model).unwrap().check(&config).unwrap_err();
            let key = match &error {
                Error::Config { key, .. } => key.clone(),
                Error::UnknownKey { key, .. } => Some(key.clone()),
                other => panic!("{other}"),
            };
            (key.unwrap_or_default(), error.to_string())
        };
        let table = [
            (
                "mlp",
                json!({"hiden": [3]}),
                "hiden",
                "model `mlp`: unknown key `hiden` (did you mean `hidden`?); known: hidden",
            ),
            (
                "lstm",
                json!({"dropout": {"inptu": 0.5}}),
                "dropout.inptu",
                "model `lstm`: unknown key `dropout.inptu` (did you mean `input`?); known: embedding, input, hidden, \
                 output, weight",
            ),
            (
                "lstm",
                json!({"emb": 3, "dropout": 0.5}),
                "dropout",
                "model `lstm`: expected a map with any of embedding, input, hidden, output, weight, found 0.5",
            ),
            (
                "lstm",
                json!({"dropout": {"output": "much"}}),
                "dropout.output",
                "model `lstm`: expected a number, found \"much\"",
            ),
            (
                "lstm",
                json!({"dropout": {"output": 1.5}}),
                "dropout.output",
                "model `lstm`: expected a share in 0..1, found 1.5",
            ),
            (
                "lstm",
                json!({"layers": -1}),
                "layers",
                "model `lstm`: expected a whole number that is not negative, found -1",
            ),
            ("lstm", json!({"layers": 0}), "layers", "model `lstm`: expected at least 1, found 0"),
            (
                "lstm",
                json!({"freeze_recurrent": 1}),
                "freeze_recurrent",
                "model `lstm`: expected true or false, found 1",
            ),
            ("mlp", json!({"hidden": 100}), "hidden", "model `mlp`: expected a list like [100], found 100"),
            (
                "mlp",
                json!({"hidden": [5, 0]}),
                "hidden[1]",
                "model `mlp`: expected widths of at least 1, found 0",
            ),
            (
                "resnet18",
                json!({"conv": "quick"}),
                "conv",
                "model `resnet18`: expected `exact` or `fast`, found \"quick\"",
            ),
            (
                "resnet18",
                json!({"widths": [8, 8]}),
                "num_blocks",
                "model `resnet18`: expected a number of blocks for each of the 2 widths, found [2, 2, 2, 2]",
            ),
            (
                "resnet",
                json!(3),
                "",
                "model `resnet`: expected a map with any of num_blocks, widths, block, stem, conv, \
             bn_scale_init, found 3",
            ),
        ];
        for (model, config, key, message) in table {
            assert_eq!(check(model, config), (key.to_owned(), message.to_owned()));
        }
    }

    #[test]
    fn sizes_that_nothing_holds_are_refused_before_anything_is_built() {
        let registry = Registry::builtin();
        let big = 10u64.pow(18);
        let many = |n: usize| Value::from(vec![1; n]);
        let table = [
            ("mlp", json!({"hidden": [big]}), "hidden[0]"),
            ("mlp", json!({"hidden": [10, u64::MAX, 10]}), "hidden[1]"),
            ("mlp", json!({"hidden": [1_000_000, 1_000_000]}), "hidden[1]"),
            ("mlp", json!({"hidden": many(50_000)}), "hidden"),
            ("resnet", json!({"widths": [big, 1, 1, 1]}), "widths[0]"),
            ("resnet", json!({"num_blocks": [1], "widths": [1_000_000_000]}), "widths[0]"),
            ("resnet50", json!({"num_blocks": [100_000, 1, 1, 1]}), "num_blocks[0]"),
            ("resnet", json!({"num_blocks": [1, 1, 1, big]}), "num_blocks[3]"),
            ("densenet", json!({"num_blocks": [1, u64::MAX]}), "num_blocks[1]"),
            ("densenet", json!({"growth": big}), "growth"),
            ("densenet", json!({"growth": 1_000_000_000}), "growth"),
            ("lstm", json!({"layers": 100_000}), "layers"),
            ("lstm", json!({"layers": u64::MAX}), "layers"),
            ("lstm", json!({"emb": big}), "emb"),
            ("lstm", json!({"layers": 3, "hidden": 10_000_000_000u64}), "hidden"),
        ];
        let images = Task::Images { height: 28, width: 28, channels: 1, classes: 10 };
        let tokens = Task::Tokens { vocab: 10_000 };
        for (model, config, key) in table {
            let task = if model == "lstm" { tokens } else { images };
            let entry = registry.get(model).unwrap();
            let params = crate::Params::new(0);
            let vb = params.builder(candle_core::DType::F32, &candle_core::Device::Cpu);
            let checked = entry.check(&config).map(|_| ());
            for refused in [checked, entry.build(&config, task, vb).map(|_| ())] {
                match refused {
                    Err(Error::Config { key: Some(found), .. }) => assert_eq!(found, key, "{model} {config}"),
                    other => panic!("{model} {config}: {other:?}"),
                }
            }
            assert!(params.vars().is_empty(), "{model} {config}");
            // An estimate is a number or an error, whatever the sizes.
            let _ = entry.cost(&config, task);
        }
    }

    #[test]
    fn the_wrong_kind_of_data_is_named() {
        let registry = Registry::builtin();
        let images = Task::Images { height: 28, width: 28, channels: 1, classes: 10 };
        for (model, task, found) in [
            ("lstm", images, "expected text, found images of 28×28 with 1 channel in 10 classes"),
            ("mlp", Task::Tokens { vocab: 50 }, "expected images, found text of 50 different tokens"),
            ("resnet18", Task::Tokens { vocab: 50 }, "expected images, found text of 50 different tokens"),
        ] {
            let error = registry.get(model).unwrap().cost(&json!({}), task).unwrap_err();
            assert_eq!(error.to_string(), format!("model `{model}`: {found}"));
            assert!(matches!(error, Error::Config { key: Some(key), .. } if key == "name"));
        }
    }
}
