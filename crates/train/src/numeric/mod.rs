//! Numeric test functions that a recipe can name in place of data and a model.
//!
//! A function is a serde configuration that knows its starting point, its value and its gradient, all in f64, and a
//! name in [`Problems`]. A program of its own can [`register`](Problems::register) more.
//!
//! ```
//! use taper_train::numeric::Problems;
//! let powell = Problems::builtin().build("powell", &serde_json::Map::new()).unwrap();
//! let x = powell.start();
//! let mut gradient = vec![0.0; x.len()];
//! assert_eq!(powell.evaluate(&x, &mut gradient), 5375.0);
//! assert_eq!(gradient[..4], [306.0, -144.0, -2.0, -310.0]);
//! ```
//!
//! Most show the same function at every step. Those of [online optimization](Online) show another each time, and are judged by
//! their [regret](crate::theory).
mod functions;
mod online;

pub use functions::{Powell, Quadratic, Rosenbrock, Variant};
pub use online::{Draw, Linear, Noise, Reddi, Targets, Wells};

use crate::recipe::{Map, SectionError, in_words};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeMap;
use taper_optim::Domain;

/// A function of many numbers.
pub trait Function: Send + Sync {
    /// Where the search starts; its length is the number of variables.
    fn start(&self) -> Vec<f64>;
    /// The value at `x`. The gradient is written to `gradient`, which is as long.
    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64;
    /// The value that step `t`, from 0, of a run with this seed is shown, with its gradient: the same as [`Function::evaluate`] unless
    /// the function is another at every step, whose mean that is.
    fn at(&self, seed: u64, t: u64, x: &[f64], gradient: &mut [f64]) -> f64 {
        match self.online() {
            Some(online) => online.value(seed, t, x, gradient),
            None => self.evaluate(x, gradient),
        }
    }
    /// How the functions of all steps are told apart, where their sum has a minimum that is known.
    fn online(&self) -> Option<&dyn Online> {
        None
    }
}

/// A function for every step: ½ a ‖x‖² + ⟨b, x⟩ + k, where b and k are the step's own.
pub trait Online: Send + Sync {
    /// a, at least 0.
    fn curvature(&self) -> f64;
    /// b, written to `out`, and k of step `t`, from 0, of a run with this seed.
    fn slope(&self, seed: u64, t: u64, out: &mut [f64]) -> f64;
    /// The value of step `t`. The gradient is written to `gradient`.
    fn value(&self, seed: u64, t: u64, x: &[f64], gradient: &mut [f64]) -> f64 {
        let mut f = self.slope(seed, t, gradient);
        let a = self.curvature();
        for (x, out) in x.iter().zip(gradient) {
            f += *out * x + 0.5 * a * x * x;
            *out += a * x;
        }
        f
    }
}

/// The sum of the functions of some steps: what the best fixed point would have paid.
#[derive(Clone, Debug)]
pub struct Hindsight {
    curvature: f64,
    slope: Vec<f64>,
    constant: f64,
    /// Of one step.
    one: Vec<f64>,
}

impl Hindsight {
    /// Of no steps, in `n` dimensions.
    pub fn new(n: usize) -> Self {
        Self { curvature: 0.0, slope: vec![0.0; n], constant: 0.0, one: vec![0.0; n] }
    }

    /// One step more.
    pub fn add(&mut self, online: &dyn Online, seed: u64, t: u64) {
        self.constant += online.slope(seed, t, &mut self.one);
        self.curvature += online.curvature();
        self.slope.iter_mut().zip(&self.one).for_each(|(sum, b)| *sum += b);
    }

    /// The least value of the sum over a set, and where it is.
    pub fn least(&self, domain: &Domain) -> (f64, Vec<f64>) {
        let a = self.curvature;
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let x: Vec<f64> = match *domain {
            Domain::Box { low, high } => {
                let one = |b: &f64| match (a > 0.0, *b > 0.0) {
                    (true, _) => (-b / a).clamp(low, high),
                    (false, true) => low,
                    (false, false) => high,
                };
                self.slope.iter().map(one).collect()
            }
            Domain::Ball { radius } => {
                let length = norm(&self.slope);
                // Along -b as far as the bowl or the ball goes.
                let far = if a > 0.0 { (length / a).min(radius) } else { radius };
                let unit = |b: &f64| if length > 0.0 { -b / length * far } else { 0.0 };
                self.slope.iter().map(unit).collect()
            }
        };
        let linear: f64 = x.iter().zip(&self.slope).map(|(x, b)| x * b).sum();
        (0.5 * a * x.iter().map(|x| x * x).sum::<f64>() + linear + self.constant, x)
    }
}

/// A function's configuration: serde fields with defaults, unknown keys refused (`deny_unknown_fields`).
pub trait Config: Function + Serialize + DeserializeOwned + Default + 'static {
    /// Refuses values that make no function: the key and what was expected and found.
    fn check(&self) -> Result<(), (&'static str, String)>;
}

/// One registered function.
#[derive(Clone, Copy)]
pub struct Problem {
    /// Its name in recipes.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// What documents its keys, if anything does.
    pub schema: Option<fn(&mut SchemaGenerator) -> Schema>,
    build: fn(&str, &Map) -> Result<Built, SectionError>,
}

/// A function with all the keys it was built from, defaults filled in.
type Built = (Map, Box<dyn Function>);

/// The functions a recipe can name.
#[derive(Clone, Default)]
pub struct Problems(BTreeMap<&'static str, Problem>);

impl Problems {
    /// The functions that come with Taper.
    pub fn builtin() -> Self {
        let mut all = Self::default();
        all.add_described::<Powell>(
            "powell",
            "extended Powell singular function: convex, its Hessian singular at the minimum",
        );
        all.add_described::<Rosenbrock>(
            "rosenbrock",
            "extended Rosenbrock function: a curved valley in every pair of variables",
        );
        all.add_described::<Quadratic>(
            "quadratic",
            "½ Σ λ x² with λ spread evenly, on a log scale, from 1 to `condition`",
        );
        all.add_described::<Targets>(
            "targets",
            "½ ‖x - z‖² with another target z at every step: online, convex",
        );
        all.add_described::<Linear>(
            "linear",
            "⟨b, x⟩ with another slope b at every step: online, not bounded by 0",
        );
        all.add_described::<Reddi>("reddi", "the online functions of one variable that Adam fails on");
        all.add_described::<Wells>("wells", "Σ u²/(1 + u²), u = x - z: smooth, not convex, with noise");
        all
    }

    fn add<C: Config>(&mut self, name: &'static str, about: &'static str) {
        self.0.insert(name, Problem { name, about, schema: None, build: build::<C> });
    }

    fn add_described<C: Config + JsonSchema>(&mut self, name: &'static str, about: &'static str) {
        self.0.insert(name, Problem { name, about, schema: Some(C::json_schema), build: build::<C> });
    }

    /// Adds a function under a new name; a taken one is an error.
    pub fn register<C: Config>(
        &mut self,
        name: &'static str,
        about: &'static str,
    ) -> Result<(), SectionError> {
        if self.0.contains_key(name) {
            let message = format!("a problem `{name}` is registered already");
            return Err(SectionError { key: Some("name".into()), message, known: Vec::new() });
        }
        self.add::<C>(name, about);
        Ok(())
    }

    /// The function of that name with the keys of a recipe's `problem` section.
    pub fn build(&self, name: &str, config: &Map) -> Result<Box<dyn Function>, SectionError> {
        Ok(self.resolve(name, config)?.1)
    }

    /// All keys with their values, defaults filled in.
    pub fn check(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        Ok(self.resolve(name, config)?.0)
    }

    fn resolve(&self, name: &str, config: &Map) -> Result<Built, SectionError> {
        let problem = self.0.get(name).ok_or_else(|| SectionError {
            key: Some("name".into()),
            message: format!("unknown problem `{name}`"),
            known: self.0.keys().map(|name| (*name).to_owned()).collect(),
        })?;
        (problem.build)(name, config)
    }

    /// All functions, by name.
    pub fn list(&self) -> impl Iterator<Item = &Problem> {
        self.0.values()
    }
}

fn build<C: Config>(name: &str, config: &Map) -> Result<Built, SectionError> {
    let wrong = |key: &str, message: String, known: &Map| SectionError {
        key: Some(key.to_owned()),
        message,
        known: known.keys().cloned().collect(),
    };
    let mut full = object(&C::default());
    for (key, value) in config {
        if !full.contains_key(key) {
            return Err(wrong(key, format!("unknown key `{key}` of problem {name}"), &full));
        }
        full.insert(key.clone(), value.clone());
        // Key by key: serde does not say which one it stumbled over.
        C::deserialize(Value::Object(full.clone()))
            .map_err(|e| wrong(key, in_words(&e.to_string()), &full))?;
    }
    let function = C::deserialize(Value::Object(full.clone()))
        .map_err(|e| wrong("name", in_words(&e.to_string()), &full))?;
    function.check().map_err(|(key, message)| wrong(key, message, &full))?;
    Ok((object(&function), Box::new(function)))
}

fn object(config: &impl Serialize) -> Map {
    match serde_json::to_value(config) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}
