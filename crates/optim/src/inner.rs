//! An optimizer inside another: `{name: adam, lr: 1e-3}` as a hyperparameter.
use crate::driver::Group;
use crate::rule::Reach;
use crate::{Error, Load, Optimizer, Registry, Result, StateDict};
use candle_core::Var;
use serde_json::{Map, Value};

/// Name and hyperparameters of an optimizer inside another.
pub(crate) struct Inner {
    /// The optimizer around it.
    of: &'static str,
    /// The hyperparameter that it is given by.
    key: &'static str,
    name: String,
    hyper: Map<String, Value>,
}

impl Inner {
    /// From the hyperparameter `key` of the optimizer `of`.
    pub fn parse(of: &'static str, key: &'static str, map: &Map<String, Value>) -> Result<Self> {
        let mut hyper = map.clone();
        match hyper.remove("name") {
            Some(Value::String(name)) => Ok(Self { of, key, name, hyper }),
            found => {
                let found = found.map_or("none".to_owned(), |value| value.to_string());
                let message = format!(
                    "expected the name of an optimizer, as in `{key}: {{name: adam}}`, found {found}"
                );
                Err(Error::Hyperparameter { optimizer: of.to_owned(), key: format!("{key}.name"), message })
            }
        }
    }

    /// Its hyperparameters, complete and checked, with its name.
    pub fn resolve(&self, registry: &Registry) -> Result<Map<String, Value>> {
        let named = registry.get(&self.name).map_err(|e| self.located(e))?;
        let full = named.check(&self.hyper).map_err(|e| self.located(e))?;
        Ok([("name".to_owned(), Value::from(named.info.name))].into_iter().chain(full).collect())
    }

    /// Whether it needs the loss.
    pub fn needs_loss(&self, registry: &Registry) -> Result<bool> {
        registry.get(&self.name)?.needs_loss_with(&self.hyper)
    }

    /// How many gradients a step of it takes.
    pub fn gradients(&self, registry: &Registry) -> Result<usize> {
        registry.get(&self.name)?.gradients(&self.hyper)
    }

    /// Refuses it if its steps take a second gradient.
    pub fn one_gradient(&self, registry: &Registry) -> Result<()> {
        if self.gradients(registry)? == 1 {
            return Ok(());
        }
        let message = "expected an optimizer that takes one gradient a step".to_owned();
        let (optimizer, key) = (self.of.to_owned(), format!("{}.name", self.key));
        Err(Error::Hyperparameter { optimizer, key, message })
    }

    /// How far it looks.
    pub fn reach(&self, registry: &Registry) -> Result<Reach> {
        registry.get(&self.name)?.reach(&self.hyper)
    }

    /// Its state buffers.
    pub fn buffers(&self, registry: &Registry) -> Result<Vec<&'static str>> {
        registry.get(&self.name)?.buffers(&self.hyper)
    }

    /// Whether it has a hyperparameter.
    pub fn has(&self, registry: &Registry, key: &str) -> bool {
        registry.get(&self.name).is_ok_and(|named| named.defaults.contains_key(key))
    }

    /// The optimizer.
    pub fn build(
        &self,
        registry: &Registry,
        params: Vec<(String, Var)>,
        groups: &[Group],
    ) -> Result<Box<dyn Optimizer>> {
        registry.get(&self.name)?.build(params, &self.hyper, groups).map_err(|e| self.located(e))
    }

    /// What a group that gives the hyperparameter again changes in it.
    pub fn overrides(&self, pattern: &str, value: &Value) -> Result<Map<String, Value>> {
        let refuse = |message: String| Err(Error::Group { pattern: pattern.to_owned(), message });
        let Value::Object(map) = value else {
            return refuse(format!("`{}`: expected hyperparameters, found {value}", self.key));
        };
        match map.get("name") {
            Some(name) if name.as_str() != Some(&self.name) => refuse(format!(
                "`{}.name`: expected {} as for all parameters, found {name}",
                self.key, self.name
            )),
            _ => {
                let own =
                    map.iter().filter(|(key, value)| *key != "name" && self.hyper.get(*key) != Some(value));
                Ok(own.map(|(key, value)| (key.clone(), value.clone())).collect())
            }
        }
    }

    /// Groups of a wrapper as its inner optimizer sees them: all that is not the wrapper's own is meant for the inner one.
    pub fn groups(&self, groups: &[Group], own: &[&str]) -> Result<Vec<Group>> {
        let mut all = Vec::with_capacity(groups.len());
        for Group { pattern, overrides } in groups {
            let mut group = Group::new(pattern);
            for (key, value) in overrides {
                if key == self.key {
                    group.overrides.extend(self.overrides(pattern, value)?);
                } else if own.contains(&key.as_str()) {
                    let message = format!("`{key}` of {} is one for all parameters", self.of);
                    return Err(Error::Group { pattern: pattern.clone(), message });
                } else {
                    group.overrides.insert(key.clone(), value.clone());
                }
            }
            all.push(group);
        }
        Ok(all)
    }

    /// An error of the inner optimizer, with the place of its hyperparameter.
    fn located(&self, error: Error) -> Error {
        match error {
            Error::UnknownOptimizer { .. } => {
                let (optimizer, key) = (self.of.to_owned(), format!("{}.name", self.key));
                Error::Hyperparameter { optimizer, key, message: error.to_string() }
            }
            Error::UnknownHyperparameter { optimizer, key, known } => {
                Error::UnknownHyperparameter { optimizer, key: format!("{}.{key}", self.key), known }
            }
            Error::Hyperparameter { optimizer, key, message } => {
                Error::Hyperparameter { optimizer, key: format!("{}.{key}", self.key), message }
            }
            other => other,
        }
    }
}

/// What of a wrapper's saved state differs from it: `own` are its hyperparameters but the inner optimizer's.
pub(crate) fn differences(
    name: &str,
    own: &Map<String, Value>,
    state: &StateDict,
    load: Load,
) -> Vec<String> {
    let mut differences = Vec::new();
    if state.header.optimizer != name {
        differences.push(format!("optimizer: expected {name}, found {}", state.header.optimizer));
    }
    if !load.keep_hyperparameters {
        let saved = state.header.groups.first().map(|group| group.config.clone()).unwrap_or_default();
        for (key, ours) in own.iter().filter(|(key, ours)| saved.get(*key) != Some(ours)) {
            let found = saved.get(key).map_or("nothing".to_owned(), Value::to_string);
            differences.push(format!("{key}: expected {ours}, found {found}"));
        }
    }
    differences
}

/// What of a wrapper's saved state is nobody's.
pub(crate) fn leftovers(state: &StateDict) -> Vec<String> {
    let parts = state.header.parts.keys().map(|name| format!("part `{name}` is not one of this optimizer's"));
    let tensors = state.tensors.keys().map(|name| format!("buffer `{name}` is not one of this optimizer's"));
    parts.chain(tensors).collect()
}
