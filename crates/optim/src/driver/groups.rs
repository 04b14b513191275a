//! Parameter groups: hyperparameters by name pattern.
use crate::rule::{Config, Rule};
use crate::{Error, Result};
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Hyperparameters for the parameters whose names match a pattern.
///
/// A pattern is a glob (`*` for any characters, `?` for one) over the whole name, or a regular expression between
/// slashes that may match anywhere in it.
///
/// ```
/// use taper_optim::Group;
/// let group = Group::new("*.bias").set("weight_decay", 0.0);
/// assert!(group.pattern()?.is_match("layer1.0.bias"));
/// # Ok::<(), taper_optim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The pattern.
    #[serde(rename = "match")]
    pub pattern: String,
    /// The hyperparameters that differ from the optimizer's.
    #[serde(flatten)]
    pub overrides: Map<String, Value>,
}

impl Group {
    /// A group without differences yet.
    pub fn new(pattern: &str) -> Self {
        Self { pattern: pattern.to_owned(), overrides: Map::new() }
    }

    /// Sets a hyperparameter of the group.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.overrides.insert(key.to_owned(), value.into());
        self
    }

    /// Biases and the scales and shifts of norm layers without weight decay: parameters whose last name is `bias`,
    /// or that belong to a layer called `bn…`, `norm…` or a ResNet shortcut's `shortcut.1`.
    pub fn no_decay() -> Self {
        Self::new(r"/(^|\.)bias(_[a-z]+)?(_l\d+)?$|(^|\.)(bn|norm)\d*\.weight$|\.shortcut\.1\.weight$/")
            .set("weight_decay", 0.0)
    }

    /// The compiled pattern.
    pub fn pattern(&self) -> Result<Regex> {
        compile(&self.pattern)
            .map_err(|e| Error::Group { pattern: self.pattern.clone(), message: e.to_string() })
    }
}

/// A glob, or a regular expression between slashes.
pub(crate) fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    match pattern.strip_prefix('/').and_then(|p| p.strip_suffix('/')) {
        Some(regex) => Regex::new(regex),
        None => {
            let body = regex::escape(pattern).replace(r"\*", ".*").replace(r"\?", ".");
            Regex::new(&format!("^(?s:{body})$"))
        }
    }
}

/// A configuration from `base` with `overrides` on top. Unknown keys, wrong types and bad values are refused.
pub(crate) fn configure<R: Rule>(base: &R::Config, overrides: &Map<String, Value>) -> Result<R::Config> {
    let optimizer = R::info(base).name;
    let parse = |map: Map<String, Value>| serde_json::from_value::<R::Config>(Value::Object(map));
    let merged = merge(optimizer, serde_json::to_value(base), overrides, &|map| parse(map).map(drop))?;
    let config = parse(merged).map_err(|e| invalid(optimizer, "config", e.to_string()))?;
    config.check().map_err(|e| invalid(optimizer, e.key, e.message))?;
    Ok(config)
}

fn invalid(optimizer: &str, key: &str, message: String) -> Error {
    Error::Hyperparameter { optimizer: optimizer.to_owned(), key: key.to_owned(), message }
}

/// The hyperparameters in `base` with `overrides` on top, where `parse` takes them.
fn merge(
    optimizer: &str,
    base: serde_json::Result<Value>,
    overrides: &Map<String, Value>,
    parse: &dyn Fn(Map<String, Value>) -> serde_json::Result<()>,
) -> Result<Map<String, Value>> {
    let Ok(Value::Object(mut merged)) = base else {
        let message = "expected a configuration that serializes to a map";
        return Err(invalid(optimizer, "config", message.into()));
    };
    for (key, value) in overrides {
        let Some(slot) = merged.get_mut(key) else {
            let known = merged.keys().cloned().collect();
            let (optimizer, key) = (optimizer.to_owned(), key.clone());
            return Err(Error::UnknownHyperparameter { optimizer, key, known });
        };
        let before = std::mem::replace(slot, value.clone());
        // Serde does not say which field a value of the wrong type was meant for: try one at a time.
        if let Err(e) = parse(merged.clone()) {
            return Err(invalid(optimizer, key, format!("{e} (the default is {before})")));
        }
    }
    Ok(merged)
}
