//! Optimizers by name.
use crate::driver::{Group, compile, configure};
use crate::rule::{Info, Rule};
use crate::{Error, Optim, Optimizer, Result};
use candle_core::Var;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

type Build =
    dyn Fn(Vec<(String, Var)>, &Map<String, Value>, &[Group]) -> Result<Box<dyn Optimizer>> + Send + Sync;
type Check = dyn Fn(&Map<String, Value>) -> Result<Map<String, Value>> + Send + Sync;
type Buffers = dyn Fn(&Map<String, Value>) -> Result<&'static [&'static str]> + Send + Sync;

/// One registered optimizer.
pub struct Entry {
    /// Its record.
    pub info: &'static Info,
    /// Whether a step needs the loss of the batch.
    pub needs_loss: bool,
    /// All hyperparameters with their defaults.
    pub defaults: Map<String, Value>,
    /// Other names.
    pub aliases: Vec<String>,
    check: Box<Check>,
    buffers: Box<Buffers>,
    build: Box<Build>,
}

impl Entry {
    /// The complete hyperparameters; unknown keys, wrong types and bad values are errors.
    pub fn check(&self, config: &Map<String, Value>) -> Result<Map<String, Value>> {
        (self.check)(config)
    }

    /// The names of the state buffers under a configuration.
    pub fn buffers(&self, config: &Map<String, Value>) -> Result<&'static [&'static str]> {
        (self.buffers)(config)
    }

    /// Bytes of state an f32 parameter costs by default.
    pub fn state_bytes(&self) -> usize {
        4 * self.buffers(&Map::new()).map_or(0, <[_]>::len)
    }

    /// An optimizer over `params`.
    pub fn build(
        &self,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
        groups: &[Group],
    ) -> Result<Box<dyn Optimizer>> {
        (self.build)(params, config, groups)
    }
}

/// The optimizers a recipe can name.
///
/// ```
/// use taper_optim::Registry;
/// let registry = Registry::builtin();
/// assert!(registry.get("decgd")?.needs_loss);
/// let names: Vec<_> = registry.list("sgd*")?.map(|entry| entry.info.name).collect();
/// assert_eq!(names, ["sgd", "sgdm"]);
/// let error = registry.get("decdg").err().map(|e| e.to_string()).unwrap_or_default();
/// assert!(error.contains("did you mean `decgd`?"));
/// # Ok::<(), taper_optim::Error>(())
/// ```
#[derive(Default)]
pub struct Registry {
    entries: BTreeMap<&'static str, Entry>,
    aliases: BTreeMap<String, &'static str>,
}

impl Registry {
    /// No optimizers.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Adds a rule under each of its names. A taken name is an error, and then none is added.
    pub fn register<R: Rule>(&mut self) -> Result<()> {
        let names = R::names();
        if let Some((info, _)) = names.iter().find(|(info, _)| self.is_taken(info.name)) {
            return Err(Error::Duplicate(info.name.to_owned()));
        }
        for (info, base) in names {
            let defaults = match serde_json::to_value(&base) {
                Ok(Value::Object(map)) => map,
                _ => Map::new(),
            };
            let (b1, b2, b3) = (base.clone(), base.clone(), base);
            let complete =
                move |config: &Map<String, Value>| match serde_json::to_value(configure::<R>(&b1, config)?) {
                    Ok(Value::Object(map)) => Ok(map),
                    _ => Ok(Map::new()),
                };
            let entry = Entry {
                info,
                needs_loss: R::NEEDS_LOSS,
                defaults,
                aliases: Vec::new(),
                check: Box::new(complete),
                buffers: Box::new(move |config| Ok(R::buffers(&configure::<R>(&b2, config)?))),
                build: Box::new(move |params, config, groups| {
                    Ok(Box::new(Optim::<R>::with_groups(params, configure::<R>(&b3, config)?, groups)?))
                }),
            };
            self.entries.insert(info.name, entry);
        }
        Ok(())
    }

    /// Lets `alias` stand for `name`.
    pub fn alias(&mut self, alias: &str, name: &str) -> Result<()> {
        if self.is_taken(alias) {
            return Err(Error::Duplicate(alias.to_owned()));
        }
        let name = self.get(name)?.info.name;
        if let Some(entry) = self.entries.get_mut(name) {
            entry.aliases.push(alias.to_owned());
        }
        self.aliases.insert(alias.to_owned(), name);
        Ok(())
    }

    fn is_taken(&self, name: &str) -> bool {
        self.entries.contains_key(name) || self.aliases.contains_key(name)
    }

    /// The optimizer of that name or alias, or an error with the nearest known name.
    pub fn get(&self, name: &str) -> Result<&Entry> {
        let name = self.aliases.get(name).copied().unwrap_or(name);
        self.entries.get(name).ok_or_else(|| {
            let known = self.entries.keys().map(ToString::to_string).collect();
            Error::UnknownOptimizer { name: name.to_owned(), known }
        })
    }

    /// The optimizers whose names match a glob, by name.
    pub fn list(&self, glob: &str) -> Result<impl Iterator<Item = &Entry>> {
        let pattern =
            compile(glob).map_err(|e| Error::Group { pattern: glob.to_owned(), message: e.to_string() })?;
        Ok(self.entries.values().filter(move |entry| pattern.is_match(entry.info.name)))
    }

    /// Builds an optimizer by name.
    pub fn build(
        &self,
        name: &str,
        params: Vec<(String, Var)>,
        config: &Map<String, Value>,
    ) -> Result<Box<dyn Optimizer>> {
        self.get(name)?.build(params, config, &[])
    }

    /// All optimizers of this crate.
    pub fn builtin() -> Self {
        let mut registry = Self::empty();
        let mut add = || -> Result<()> {
            use crate::rules::*;
            registry.register::<adabelief::AdaBeliefRule>()?;
            registry.register::<adabound::AdaBoundRule>()?;
            registry.register::<adadelta::AdaDeltaRule>()?;
            registry.register::<adagd::AdaGdRule>()?;
            registry.register::<adagrad::AdaGradRule>()?;
            registry.register::<adam::AdamRule>()?;
            registry.register::<aegd::AegdRule>()?;
            registry.register::<decgd::DecGdRule>()?;
            registry.register::<padam::PAdamRule>()?;
            registry.register::<radam::RAdamRule>()?;
            registry.register::<rmsprop::RmsPropRule>()?;
            registry.register::<sgd::SgdRule>()?;
            registry.register::<yogi::YogiRule>()?;
            registry.alias("momentum", "sgdm")?;
            registry.alias("nesterov", "nag")
        };
        add().expect("the names above are distinct, which `builtin_names_are_distinct` tests");
        registry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builtin_names_are_distinct() {
        assert!(Registry::builtin().get("decgd").is_ok());
    }

    #[test]
    fn a_taken_name_is_refused() {
        let mut registry = Registry::builtin();
        let error = registry.register::<crate::rules::sgd::SgdRule>().unwrap_err();
        assert_eq!(error.to_string(), "optimizer `sgd` is already registered");
        assert!(registry.alias("sgdm", "adam").is_err());
    }
}
