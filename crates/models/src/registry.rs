//! Models by name.
use crate::{Error, Model, Result, Task};
use candle_nn::VarBuilder;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;

/// What a forward pass costs for one sample, for estimates before training starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Trainable numbers.
    pub parameters: u64,
    /// Multiply-adds of a forward pass, counted as two operations each.
    pub flops: u64,
    /// Bytes of activations kept for the backward pass.
    pub activation_bytes: u64,
}

/// A model's configuration: serde fields with defaults, unknown keys refused (`deny_unknown_fields`).
pub trait Config: Serialize + DeserializeOwned + Default + 'static {
    /// Creates the model's parameters through `vb`.
    fn build(&self, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>>;
    /// What one sample costs.
    fn cost(&self, task: Task) -> Result<Cost>;
}

type Build = dyn Fn(&Value, Task, VarBuilder) -> Result<Box<dyn Model>> + Send + Sync;
type CostOf = dyn Fn(&Value, Task) -> Result<Cost> + Send + Sync;
type Check = dyn Fn(&Value) -> Result<Value> + Send + Sync;

/// One registered model.
pub struct Entry {
    /// Its name in recipes.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    check: Box<Check>,
    build: Box<Build>,
    cost: Box<CostOf>,
}

impl Entry {
    /// The configuration with every default filled in; unknown keys and wrong types are errors.
    pub fn check(&self, config: &Value) -> Result<Value> {
        (self.check)(config)
    }
    /// Builds the model.
    pub fn build(&self, config: &Value, task: Task, vb: VarBuilder) -> Result<Box<dyn Model>> {
        (self.build)(config, task, vb)
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
            registry.register("mlp", about, crate::mlp::MlpConfig::default())?;
            let about = "LSTM language model with tied embedding (AWD-LSTM)";
            registry.register("lstm", about, crate::lstm::LstmConfig::default())?;
            crate::resnet::register(&mut registry)?;
            crate::densenet::register(&mut registry)
        };
        add().expect("the names above are distinct, which `builtin_names_are_distinct` tests");
        registry
    }

    /// Adds a model under a new name. Values missing from a recipe come from `base`.
    pub fn register<C: Config>(&mut self, name: &'static str, about: &'static str, base: C) -> Result<()> {
        if self.0.contains_key(name) {
            return Err(Error::Duplicate(name.into()));
        }
        let base = serde_json::to_value(base).map_err(|e| config_error(name, &e))?;
        let parse = move |config: &Value| -> Result<C> {
            let mut merged = base.clone();
            if let (Some(merged), Some(config)) = (merged.as_object_mut(), config.as_object()) {
                merged.extend(config.iter().map(|(k, v)| (k.clone(), v.clone())));
            }
            serde_json::from_value(merged).map_err(|e| config_error(name, &e))
        };
        let (p1, p2) = (parse.clone(), parse.clone());
        let entry = Entry {
            name,
            about,
            check: Box::new(move |c| serde_json::to_value(p1(c)?).map_err(|e| config_error(name, &e))),
            build: Box::new(move |c, task, vb| p2(c)?.build(task, vb)),
            cost: Box::new(move |c, task| parse(c)?.cost(task)),
        };
        self.0.insert(name, entry);
        Ok(())
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

/// Serde says which key it stumbled over only inside its message: the first word in backquotes.
fn config_error(model: &str, e: &serde_json::Error) -> Error {
    let message = e.to_string();
    let key =
        message.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next()).map(str::to_owned);
    Error::Config { model: model.into(), key, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_names_are_distinct() {
        assert!(Registry::builtin().get("mlp").is_ok());
    }

    #[test]
    fn mistakes_are_named() {
        let registry = Registry::builtin();
        let message = registry.get("mpl").map(|_| ()).unwrap_err().to_string();
        assert!(message.contains("did you mean `mlp`?"), "{message}");
        let wrong = serde_json::json!({"hiden": [3]});
        let Err(Error::Config { key, .. }) = registry.get("mlp").unwrap().check(&wrong) else {
            panic!("an unknown key passed")
        };
        assert_eq!(key.as_deref(), Some("hiden"));
    }
}
