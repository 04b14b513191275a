//! The names a recipe can use: optimizers, models, data sets, numeric problems, schedules.
use crate::numeric::Problems;
use crate::recipe::{Map, SectionError, Sections, in_words};
use serde_json::Value;
use taper_data::{DataError, DataRegistry, Kind};
use taper_optim::{Schedule, Scheduler};

/// All registries. A program of its own adds to them before it loads recipes.
pub struct Registries {
    /// Optimizers.
    pub optimizers: taper_optim::Registry,
    /// Models.
    pub models: taper_models::Registry,
    /// Data sets.
    pub data: DataRegistry,
    /// Numeric problems.
    pub problems: Problems,
}

impl Default for Registries {
    fn default() -> Self {
        Self {
            optimizers: taper_optim::Registry::builtin(),
            models: taper_models::Registry::builtin(),
            data: DataRegistry::builtin(),
            problems: Problems::builtin(),
        }
    }
}

/// How the rate and the momentum of a run move.
#[derive(Clone, Debug)]
pub struct Schedules {
    /// What their time counts.
    pub per: taper_optim::Per,
    /// The factor of the learning rate.
    pub rate: Scheduler,
    /// The factor of the momentum, if it moves.
    pub momentum: Option<Schedule>,
}

impl Schedules {
    /// From a recipe's `schedule` section: `per` and `momentum` are its own keys, the rest is the rate's schedule.
    pub fn new(kind: &str, config: &Map) -> Result<Self, SectionError> {
        let mut rate = config.clone();
        let per = match rate.shift_remove("per") {
            None => taper_optim::Per::default(),
            Some(per) => serde_json::from_value(per).map_err(|e| SectionError {
                key: Some("per".into()),
                message: in_words(&e.to_string()),
                known: Vec::new(),
            })?,
        };
        let momentum = match rate.shift_remove("momentum") {
            None => None,
            Some(Value::Object(map)) => Some(parse(&map, "momentum.")?),
            Some(other) => {
                let message = format!("expected a schedule (a map with `kind`), found {other}");
                return Err(SectionError { key: Some("momentum".into()), message, known: Vec::new() });
            }
        };
        rate.insert("kind".into(), kind.into());
        Ok(Self { per, rate: Scheduler::new(parse(&rate, "")?), momentum })
    }
}

fn parse(map: &Map, prefix: &str) -> Result<Schedule, SectionError> {
    Schedule::from_map(map).map_err(|e| {
        let mut error = optimizer_error(e);
        let key = error.key.unwrap_or_default();
        if key.ends_with("kind") {
            error.message = "unknown schedule".into();
            error.known = Schedule::KINDS.map(str::to_owned).to_vec();
        } else if prefix.is_empty() && !error.known.is_empty() && !key.contains('.') {
            error.known.extend(["per", "momentum"].map(str::to_owned));
        }
        // serde names the list, not the one of its items that does not fit.
        let misfit = match map.get(&key) {
            Some(Value::Array(times)) if key == "at" => times.iter().position(|time| !time.is_u64()),
            _ => None,
        };
        error.key = Some(misfit.map_or(format!("{prefix}{key}"), |i| format!("{prefix}{key}[{i}]")));
        error
    })
}

/// All keys with the values that `section` is resolved to.
fn complete(value: Result<Value, serde_json::Error>) -> Map {
    match value {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn optimizer_error(e: taper_optim::Error) -> SectionError {
    use taper_optim::Error as E;
    let message = e.to_string();
    match e {
        E::UnknownOptimizer { name, known } => {
            SectionError { key: Some("name".into()), message: format!("unknown optimizer `{name}`"), known }
        }
        E::UnknownHyperparameter { optimizer, key, known } => {
            let message = format!("unknown key `{}` of {optimizer}", last(&key));
            SectionError { key: Some(key), message, known }
        }
        E::Hyperparameter { key, message, .. } => {
            SectionError { key: Some(key), message: in_words(&message), known: Vec::new() }
        }
        _ => SectionError { key: None, message, known: Vec::new() },
    }
}

/// The last key of a path.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// A refusal of the model in terms of the recipe's `model` section.
pub(crate) fn model_error(e: taper_models::Error) -> SectionError {
    use taper_models::Error as E;
    let message = e.to_string();
    match e {
        E::UnknownModel { name, known } => {
            SectionError { key: Some("name".into()), message: format!("unknown model `{name}`"), known }
        }
        E::UnknownKey { model, key, known } => {
            let message = format!("unknown key `{}` of {model}", last(&key));
            SectionError { key: Some(key), message, known }
        }
        // The name stands for what the model is made for.
        E::Config { key: Some(key), message, model } if key == "name" => {
            let message = format!("{model} does not fit the data: {message}");
            SectionError { key: Some(key), message, known: Vec::new() }
        }
        E::Config { key: Some(key), message, .. } => {
            SectionError { key: Some(key), message, known: Vec::new() }
        }
        _ => SectionError { key: None, message, known: Vec::new() },
    }
}

/// A refusal of the data set in terms of the recipe's `data` section.
pub(crate) fn data_error(e: DataError) -> SectionError {
    match e {
        DataError::Option { key, message, .. } => {
            SectionError { key, message: in_words(&message), known: Vec::new() }
        }
        e => SectionError { key: None, message: e.to_string(), known: Vec::new() },
    }
}

impl Sections for Registries {
    fn data_kind(&self, name: &str) -> Option<Kind> {
        self.data.get(name).ok()?.kind()
    }

    fn data_paths(&self, name: &str) -> &'static [&'static str] {
        self.data.get(name).map_or(&[], |set| set.paths())
    }

    fn check_optimizer(&self, name: &str, hyper: &Map) -> Result<Map, SectionError> {
        self.optimizers.get(name).and_then(|entry| entry.check(hyper)).map_err(optimizer_error)
    }

    fn check_model(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        let entry = self.models.get(name).map_err(model_error)?;
        let checked = entry.check(&Value::Object(config.clone()));
        checked.map(|value| complete(Ok(value))).map_err(model_error)
    }

    fn check_data(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        let set = self.data.get(name).map_err(|e| match e {
            DataError::Unknown { name, known, .. } => SectionError {
                key: Some("name".into()),
                message: format!("unknown data set `{name}`"),
                known,
            },
            e => data_error(e),
        })?;
        let options = set.describe().options;
        let known: Vec<String> = options.iter().map(|o| o.name.to_owned()).collect();
        match config.keys().find(|key| !known.contains(key)) {
            Some(key) => {
                let message = format!("unknown key `{key}` of data set {name}");
                Err(SectionError { key: Some(key.clone()), message, known })
            }
            None => {
                set.check(&Value::Object(config.clone())).map_err(data_error)?;
                // A default that is spelled out is no other run: the recipe goes on without it.
                let said = |key: &String, value: &Value| {
                    let default =
                        options.iter().find(|option| option.name == key).map(|option| option.default);
                    default.is_some_and(|default| is_written(value, default))
                };
                let own = config.iter().filter(|(key, value)| !said(key, value));
                Ok(own.map(|(key, value)| (key.clone(), value.clone())).collect())
            }
        }
    }

    fn check_problem(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        self.problems.check(name, config)
    }

    fn check_schedule(&self, kind: &str, config: &Map) -> Result<Map, SectionError> {
        Schedules::new(kind, config)?;
        Ok(config.clone())
    }
}

/// Whether a value is what a text in a recipe says.
fn is_written(value: &Value, text: &str) -> bool {
    match (value, serde_json::from_str::<Value>(text)) {
        (Value::String(value), _) => value == text,
        (Value::Number(a), Ok(Value::Number(b))) => a.as_f64() == b.as_f64(),
        (value, parsed) => parsed.is_ok_and(|parsed| parsed == *value),
    }
}
