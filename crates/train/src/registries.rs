//! The names a recipe can use: optimizers, models, data sets, numeric problems, schedules.
use crate::numeric::Problems;
use crate::recipe::{Map, SectionError, Sections};
use serde_json::Value;
use taper_data::{DataError, DataRegistry};
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
                message: e.to_string(),
                known: vec!["step".into(), "epoch".into()],
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
        error.key = error.key.map(|key| format!("{prefix}{key}"));
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
            let message = format!("unknown key `{key}` of {optimizer}");
            SectionError { key: Some(key), message, known }
        }
        E::Hyperparameter { key, .. } => SectionError { key: Some(key), message, known: Vec::new() },
        _ => SectionError { key: None, message, known: Vec::new() },
    }
}

fn model_error(e: taper_models::Error) -> SectionError {
    use taper_models::Error as E;
    let message = e.to_string();
    match e {
        E::UnknownModel { name, known } => {
            SectionError { key: Some("name".into()), message: format!("unknown model `{name}`"), known }
        }
        E::UnknownKey { model, key, known } => {
            let message = format!("unknown key `{key}` of {model}");
            SectionError { key: Some(key), message, known }
        }
        E::Config { key, .. } => SectionError { key, message, known: Vec::new() },
        _ => SectionError { key: None, message, known: Vec::new() },
    }
}

impl Sections for Registries {
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
            e => SectionError { key: None, message: e.to_string(), known: Vec::new() },
        })?;
        let known: Vec<String> = set.describe().options.iter().map(|o| o.name.to_owned()).collect();
        match config.keys().find(|key| !known.contains(key)) {
            Some(key) => {
                let message = format!("unknown key `{key}` of data set {name}");
                Err(SectionError { key: Some(key.clone()), message, known })
            }
            None => Ok(config.clone()),
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
