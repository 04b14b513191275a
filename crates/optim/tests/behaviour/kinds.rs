//! One small optimizer of every kind beyond the element-wise: each with groups, rates, state and saving.
use crate::common::{bits, map, noise, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use taper_optim::rule::{Config, Input, Invalid, Real, Reduce, Refusal, Rule, ranges};
use taper_optim::{
    Displaced, Error, Evaluated, Evaluation, Factory, Group, Info, Load, Optimizer, ParamInfo, Probe,
    Registry, Result, Second, Setup, StateDict, StepContext, TensorParam, TensorRule, TensorStep, scalars,
};

const fn info(name: &'static str) -> Info {
    Info { name, about: "of the tests", paper: "", year: 2024, formula: "" }
}

macro_rules! config {
    ($name:ident { $($field:ident = $default:expr),* }) => {
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        struct $name { $($field: f64),* }
        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default),* }
            }
        }
        impl Config for $name {
            fn lr(&self) -> f64 {
                self.lr
            }
            fn check(&self) -> Result<(), Invalid> {
                ranges::lr(self.lr)
            }
        }
    };
}

// A norm of each parameter, fused: LARS without momentum.

config!(LarsConfig { lr = 1.0, trust = 0.1, weight_decay = 0.5 });
scalars! { struct LarsScalars { step, weight_decay } }

#[derive(Debug)]
struct Lars;
static LARS: Info = info("small_lars");

impl Rule for Lars {
    type Config = LarsConfig;
    type Scalars = LarsScalars;
    const BUFFERS: (usize, usize) = (0, 0);
    const REDUCE: Option<Reduce> = Some(Reduce::Each(|x, g, _| [x * x, g * g]));
    fn names() -> Vec<(&'static Info, LarsConfig)> {
        vec![(&LARS, LarsConfig::default())]
    }
    fn info(_: &LarsConfig) -> &'static Info {
        &LARS
    }
    fn buffers(_: &LarsConfig) -> &'static [&'static str] {
        &[]
    }
    fn prepare(c: &LarsConfig, input: &Input, _: &mut [f64]) -> Result<LarsScalars, Refusal> {
        let [x, g] = input.sums.map(f64::sqrt);
        let ratio = if x > 0.0 && g > 0.0 { c.trust * x / (g + c.weight_decay * x) } else { 1.0 };
        Ok(LarsScalars { step: input.lr * ratio, weight_decay: c.weight_decay })
    }
    #[inline(always)]
    fn update<F: Real>(s: &LarsScalars<F>, x: F, g: F, _: &mut [F]) -> F {
        x - s.step * (g + s.weight_decay * x)
    }
}

// A whole matrix: the momentum divided by the root of its Gram matrix' trace, rows and columns kept apart.

config!(MatrixConfig { lr = 0.1, beta = 0.5 });

#[derive(Debug)]
struct Matrix;
static MATRIX: Info = info("small_matrix");

impl TensorRule for Matrix {
    type Config = MatrixConfig;
    fn names() -> Vec<(&'static Info, MatrixConfig)> {
        vec![(&MATRIX, MatrixConfig::default())]
    }
    fn info(_: &MatrixConfig) -> &'static Info {
        &MATRIX
    }
    fn buffers(_: &MatrixConfig) -> &'static [&'static str] {
        &["momentum"]
    }
    fn step(step: &mut TensorStep<MatrixConfig>) -> Result<()> {
        for p in &mut step.params {
            let momentum = ((p.memory.tensor("momentum", &p.g)? * p.config.beta)? + &p.g)?;
            let update = match p.x.rank() {
                2 => {
                    let gram = momentum.matmul(&momentum.t()?)?;
                    let trace = (gram * Tensor::eye(p.x.dim(0)?, p.x.dtype(), p.x.device())?)?.sum_all()?;
                    momentum.broadcast_div(&trace.sqrt()?)?
                }
                _ => momentum.clone(),
            };
            p.memory.tensors.insert("momentum", momentum);
            p.set((&p.x - (update * p.lr)?)?);
        }
        Ok(())
    }
}

// Other weights for evaluation: Schedule-Free SGD, which stores y (trained) and z.

config!(FreeConfig { lr = 0.5, beta = 0.9 });

#[derive(Debug)]
struct Free;
static FREE: Info = info("small_free");

impl TensorRule for Free {
    type Config = FreeConfig;
    const EVALUATION: Option<Evaluation<FreeConfig>> = Some(|p| {
        let z = &p.memory.tensors["z"];
        Ok((((&p.x - (z * (1.0 - p.config.beta))?)?) / p.config.beta)?)
    });
    fn names() -> Vec<(&'static Info, FreeConfig)> {
        vec![(&FREE, FreeConfig::default())]
    }
    fn info(_: &FreeConfig) -> &'static Info {
        &FREE
    }
    fn buffers(_: &FreeConfig) -> &'static [&'static str] {
        &["z", "weight"]
    }
    fn step(step: &mut TensorStep<FreeConfig>) -> Result<()> {
        for p in &mut step.params {
            let z = p.memory.tensors.get("z").unwrap_or(&p.x).clone();
            let sum = p.memory.number("weight") + p.lr * p.lr;
            let c = p.lr * p.lr / sum;
            let y = ((&p.x * (1.0 - c))? + (&z * c)?)?;
            let y = (y + (&p.g * (p.lr * (p.config.beta * (1.0 - c) - 1.0)))?)?;
            p.memory.tensors.insert("z", (z - (&p.g * p.lr)?)?);
            p.memory.numbers.insert("weight", sum);
            p.set(y);
        }
        Ok(())
    }
}

// A second gradient: SAM over plain descent.

config!(SharpConfig { lr = 0.1, rho = 0.05 });

#[derive(Debug)]
struct Sharp;
static SHARP: Info = info("small_sharp");

impl TensorRule for Sharp {
    type Config = SharpConfig;
    const SECOND: Option<Second<SharpConfig>> = Some(|step| {
        let mut squares = 0.0;
        for p in &step.params {
            squares += p.g.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?;
        }
        step.params
            .iter()
            .map(|p| Ok((&p.x + (&p.g * (p.config.rho / (squares.sqrt() + 1e-12)))?)?))
            .collect()
    });
    fn names() -> Vec<(&'static Info, SharpConfig)> {
        vec![(&SHARP, SharpConfig::default())]
    }
    fn info(_: &SharpConfig) -> &'static Info {
        &SHARP
    }
    fn buffers(_: &SharpConfig) -> &'static [&'static str] {
        &[]
    }
    fn step(step: &mut TensorStep<SharpConfig>) -> Result<()> {
        for p in &mut step.params {
            p.set((&p.x - (&p.g * p.lr)?)?);
        }
        Ok(())
    }
}

// History over all parameters: the step of Barzilai and Borwein, from the difference to the last point and gradient.

config!(HistoryConfig { lr = 0.01 });

#[derive(Debug)]
struct History;
static HISTORY: Info = info("small_history");

impl TensorRule for History {
    type Config = HistoryConfig;
    const SHARED: &'static [&'static str] = &["x", "g", "steps"];
    fn names() -> Vec<(&'static Info, HistoryConfig)> {
        vec![(&HISTORY, HistoryConfig::default())]
    }
    fn info(_: &HistoryConfig) -> &'static Info {
        &HISTORY
    }
    fn buffers(_: &HistoryConfig) -> &'static [&'static str] {
        &[]
    }
    fn step(step: &mut TensorStep<HistoryConfig>) -> Result<()> {
        let flat = |of: fn(&TensorParam<HistoryConfig>) -> Tensor| -> Result<Tensor> {
            let parts =
                step.params.iter().map(|p| of(p).flatten_all()).collect::<candle_core::Result<Vec<_>>>()?;
            Ok(Tensor::cat(&parts, 0)?)
        };
        let (x, g) = (flat(|p| p.x.clone())?, flat(|p| p.g.clone())?);
        let rate = match (step.shared.tensors.get("x"), step.shared.tensors.get("g")) {
            (Some(old_x), Some(old_g)) => {
                let (s, y) = ((&x - old_x)?, (&g - old_g)?);
                let dot =
                    |a: &Tensor, b: &Tensor| (a * b)?.sum_all()?.to_dtype(DType::F64)?.to_scalar::<f64>();
                Some(dot(&s, &s)? / dot(&s, &y)?).filter(|r| r.is_finite() && *r > 0.0)
            }
            _ => None,
        };
        step.shared.tensors.extend([("x", x), ("g", g)]);
        let steps = step.shared.number("steps") + 1.0;
        step.shared.numbers.insert("steps", steps);
        for p in &mut step.params {
            p.set((&p.x - (&p.g * rate.unwrap_or(p.lr))?)?);
        }
        Ok(())
    }
}

// A wrapper around any other: Lookahead.

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct AheadConfig {
    k: u64,
    alpha: f64,
    inner: Map<String, Value>,
}

impl Default for AheadConfig {
    fn default() -> Self {
        Self { k: 3, alpha: 0.5, inner: map(json!({"name": "sgdm"})) }
    }
}

impl Config for AheadConfig {
    fn lr(&self) -> f64 {
        0.0
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::fraction("alpha", self.alpha)
    }
}

static AHEAD: Info = info("small_ahead");

struct AheadFactory;

/// The name of the inner optimizer and its hyperparameters.
fn inner(config: &AheadConfig) -> (String, Map<String, Value>) {
    let mut hyper = config.inner.clone();
    let name = hyper.remove("name").and_then(|name| name.as_str().map(str::to_owned));
    (name.unwrap_or_default(), hyper)
}

impl Factory for AheadFactory {
    type Config = AheadConfig;
    fn check(&self, registry: &Registry, config: &AheadConfig) -> Result<()> {
        let (name, hyper) = inner(config);
        registry.get(&name)?.check(&hyper).map(drop)
    }
    fn needs_loss(&self, registry: &Registry, config: &AheadConfig) -> Result<bool> {
        let (name, hyper) = inner(config);
        registry.get(&name)?.needs_loss_with(&hyper)
    }
    fn buffers(&self, registry: &Registry, config: &AheadConfig) -> Result<Vec<&'static str>> {
        let (name, hyper) = inner(config);
        Ok([registry.get(&name)?.buffers(&hyper)?, vec!["slow"]].concat())
    }
    fn build(&self, setup: Setup<'_, AheadConfig>) -> Result<Box<dyn Optimizer>> {
        let (name, hyper) = inner(&setup.config);
        let slow = setup.params.iter().map(|(_, var)| var.copy()).collect::<candle_core::Result<_>>()?;
        let inner = setup.registry.get(&name)?.build(setup.params.clone(), &hyper, setup.groups)?;
        Ok(Box::new(Ahead { config: setup.config, params: setup.params, slow, t: 0, inner, held: None }))
    }
}

struct Ahead {
    config: AheadConfig,
    params: Vec<(String, Var)>,
    slow: Vec<Tensor>,
    t: u64,
    inner: Box<dyn Optimizer>,
    held: Option<Vec<Tensor>>,
}

impl Optimizer for Ahead {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.inner.step(grads, context)?;
        self.t += 1;
        if self.t.is_multiple_of(self.config.k) {
            for ((_, var), slow) in self.params.iter().zip(&mut self.slow) {
                *slow = (&*slow + ((var.as_tensor() - &*slow)? * self.config.alpha)?)?;
                var.set(slow)?;
            }
        }
        Ok(())
    }
    fn eval_weights(&mut self) -> Result<bool> {
        let vars = self.params.iter().map(|(_, var)| var);
        self.held = Some(vars.clone().map(|var| var.copy()).collect::<candle_core::Result<_>>()?);
        vars.zip(&self.slow).try_for_each(|(var, slow)| var.set(slow))?;
        Ok(true)
    }
    fn train_weights(&mut self) -> Result<()> {
        for ((_, var), held) in self.params.iter().zip(self.held.take().iter().flatten()) {
            var.set(held)?;
        }
        Ok(())
    }
    fn info(&self) -> &'static Info {
        &AHEAD
    }
    fn needs_loss(&self) -> bool {
        self.inner.needs_loss()
    }
    fn config(&self) -> Value {
        serde_json::to_value(&self.config).unwrap()
    }
    fn lr(&self) -> f64 {
        self.inner.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.inner.set_lr(lr);
    }
    fn params(&self) -> Vec<ParamInfo> {
        self.inner.params()
    }
    fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::default();
        state.header.optimizer = AHEAD.name.to_owned();
        state.header.shared.insert("t".into(), self.t as f64);
        for ((name, _), slow) in self.params.iter().zip(&self.slow) {
            state.tensors.insert(format!("{name}.slow"), slow.clone());
        }
        state.insert_part("inner", self.inner.state_dict()?);
        Ok(state)
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        let mut state = state.clone();
        self.inner.load_state_dict_with(&state.take_part("inner")?, load)?;
        self.t = state.header.shared["t"] as u64;
        self.slow =
            self.params.iter().map(|(name, _)| state.tensors[&format!("{name}.slow")].clone()).collect();
        Ok(())
    }
    fn probe(&self) -> Option<&Probe> {
        self.inner.probe()
    }
}

fn registry() -> Registry {
    let mut registry = Registry::builtin();
    registry.register::<Lars>().unwrap();
    registry.register_tensor::<Matrix>().unwrap();
    registry.register_tensor::<Free>().unwrap();
    registry.register_tensor::<Sharp>().unwrap();
    registry.register_tensor::<History>().unwrap();
    registry.register_factory(&AHEAD, AheadFactory).unwrap();
    registry
}

const KINDS: [&str; 6] =
    ["small_lars", "small_matrix", "small_free", "small_sharp", "small_history", "small_ahead"];

/// A matrix and a vector with an optimizer over them, on the quadratic whose gradient is x plus noise.
struct Trial {
    vars: [Var; 2],
    optimizer: Box<dyn Optimizer>,
}

impl Trial {
    fn new(name: &str, dtype: DType) -> Self {
        let matrix: Vec<f64> = (0..6).map(|i| noise(1, 0, i)).collect();
        let w = Var::from_tensor(&tensor(&matrix, dtype).reshape((2, 3)).unwrap()).unwrap();
        let vars = [w, var(&[0.5, -1.0], dtype)];
        let params = vec![("w".into(), vars[0].clone()), ("b".into(), vars[1].clone())];
        let optimizer = registry().get(name).unwrap().build(params, &Map::new(), &[]).unwrap();
        Self { vars, optimizer }
    }

    fn grads(vars: &[Var; 2], t: usize) -> GradStore {
        let mut grads = GradStore::default();
        for (v, var) in vars.iter().enumerate() {
            let noise: Vec<f64> = (0..var.elem_count()).map(|i| 0.1 * noise(2 + v as u64, t, i)).collect();
            let noise = tensor(&noise, var.dtype()).reshape(var.shape()).unwrap();
            grads.insert(var, (var.as_tensor() + noise).unwrap());
        }
        grads
    }

    fn step(&mut self, t: usize, context: &StepContext) -> Result<()> {
        let grads = Self::grads(&self.vars, t);
        let vars = self.vars.clone();
        let mut again = || Ok(Evaluated { grads: Self::grads(&vars, t), loss: None });
        self.optimizer.step_twice(&grads, context, &mut again)
    }

    fn bits(&self) -> Vec<u64> {
        self.vars.iter().flat_map(|var| bits(var)).collect()
    }
}

#[test]
fn every_kind_descends_in_every_dtype() {
    for name in KINDS {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let mut trial = Trial::new(name, dtype);
            let size = |trial: &Trial| trial.vars.iter().flat_map(|v| values(v)).map(|x| x * x).sum::<f64>();
            let before = size(&trial);
            (1..=10).for_each(|t| trial.step(t, &StepContext::new()).unwrap());
            assert!(size(&trial) < 0.8 * before, "{name} {dtype:?}: {before} → {}", size(&trial));
            assert_eq!(trial.vars[0].dtype(), dtype);
        }
    }
}

#[test]
fn every_kind_continues_to_the_bit() {
    for name in KINDS {
        for stop in 0..5 {
            let mut straight = Trial::new(name, DType::F32);
            (1..=6).for_each(|t| straight.step(t, &StepContext::new()).unwrap());
            let mut first = Trial::new(name, DType::F32);
            (1..=stop).for_each(|t| first.step(t, &StepContext::new()).unwrap());
            let mut second = Trial::new(name, DType::F32);
            second.vars.iter().zip(&first.vars).for_each(|(to, from)| to.set(from).unwrap());
            let saved =
                StateDict::from_bytes(&first.optimizer.state_dict().unwrap().to_bytes().unwrap()).unwrap();
            second.optimizer.load_state_dict(&saved).unwrap();
            (stop + 1..=6).for_each(|t| second.step(t, &StepContext::new()).unwrap());
            assert_eq!(straight.bits(), second.bits(), "{name} at {stop}");
            let states = [&straight, &second].map(|t| t.optimizer.state_dict().unwrap().to_bytes().unwrap());
            assert!(states[0] == states[1], "{name} at {stop}");
        }
    }
}

#[test]
fn a_refused_step_of_any_kind_leaves_no_trace() {
    for name in KINDS {
        let mut trial = Trial::new(name, DType::F32);
        trial.step(1, &StepContext::new()).unwrap();
        let before = (trial.bits(), trial.optimizer.state_dict().unwrap().to_bytes().unwrap());
        let mut grads = Trial::grads(&trial.vars, 2);
        grads.insert(&trial.vars[1], tensor(&[1.0, f64::NAN], DType::F32));
        let mut again = || panic!("no second gradient without a first");
        let error = trial.optimizer.step_twice(&grads, &StepContext::new(), &mut again).unwrap_err();
        assert!(matches!(&error, Error::GradientNotFinite(name) if name == "b"), "{name}: {error}");
        let after = (trial.bits(), trial.optimizer.state_dict().unwrap().to_bytes().unwrap());
        assert!(before == after, "{name}");
    }
}

#[test]
fn groups_and_schedules_reach_tensor_rules() {
    let x = [var(&[1.0], DType::F64), var(&[1.0], DType::F64)];
    let params = vec![("x".into(), x[0].clone()), ("y".into(), x[1].clone())];
    let groups = [Group::new("y").set("lr", 0.05)];
    let registry = registry();
    let mut optimizer = registry.get("small_matrix").unwrap().build(params, &Map::new(), &groups).unwrap();
    let mut grads = GradStore::default();
    x.iter().for_each(|x| drop(grads.insert(x, tensor(&[4.0], DType::F64))));
    optimizer.step(&grads, &StepContext::new().factor(0.5).max_norm(32f64.sqrt() / 2.0).probe(true)).unwrap();
    // Gradients of norm √32 clipped to half of it (and 1e-6 less): rates of 0.05 and 0.025 times 2.
    let moved = x.each_ref().map(|x| 1.0 - values(x)[0]);
    assert!((moved[0] - 0.1).abs() < 1e-7 && (moved[1] - 0.05).abs() < 1e-7, "{moved:?}");
    assert_eq!(optimizer.probe().unwrap().params.len(), 2);
    assert_eq!(optimizer.params()[1].group.as_deref(), Some("y"));
}

#[test]
fn a_fused_rule_has_each_parameters_norms() {
    let mut trial = Trial::new("small_lars", DType::F64);
    let before: Vec<Vec<f64>> = trial.vars.iter().map(|v| values(v)).collect();
    let grads = Trial::grads(&trial.vars, 1);
    let grads: Vec<Vec<f64>> = trial.vars.iter().map(|v| values(grads.get(v).unwrap())).collect();
    trial.step(1, &StepContext::new()).unwrap();
    let norm = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    for ((x, g), var) in before.iter().zip(&grads).zip(&trial.vars) {
        let ratio = 0.1 * norm(x) / (norm(g) + 0.5 * norm(x));
        for ((x, g), new) in x.iter().zip(g).zip(values(var)) {
            // A few roundings of numbers below 2.
            assert!((x - ratio * (g + 0.5 * x) - new).abs() < 1e-15);
        }
    }
}

#[test]
fn evaluation_weights_come_and_go_to_the_bit() {
    for name in ["small_free", "small_ahead"] {
        let mut trial = Trial::new(name, DType::BF16);
        (1..=4).for_each(|t| trial.step(t, &StepContext::new()).unwrap());
        let trained = trial.bits();
        assert!(trial.optimizer.eval_weights().unwrap());
        assert_ne!(trial.bits(), trained, "{name}");
        trial.optimizer.train_weights().unwrap();
        assert_eq!(trial.bits(), trained, "{name}");
    }
    let mut trial = Trial::new("small_free", DType::F32);
    trial.step(1, &StepContext::new()).unwrap();
    trial.optimizer.eval_weights().unwrap();
    let evaluated = trial.bits();
    assert!(matches!(trial.step(2, &StepContext::new()), Err(Error::Evaluating(_))));
    assert!(matches!(trial.optimizer.state_dict(), Err(Error::Evaluating(_))));
    // Whoever exports the evaluation weights may be done with the optimizer.
    let vars = trial.vars.clone();
    drop(trial);
    assert_eq!(vars.iter().flat_map(|v| bits(v)).collect::<Vec<_>>(), evaluated);
    // Others have none.
    assert!(!Trial::new("small_matrix", DType::F32).optimizer.eval_weights().unwrap());
}

#[test]
fn a_second_gradient_is_taken_where_the_rule_says_and_the_step_from_where_it_was() {
    let x = var(&[3.0, 4.0], DType::F64);
    let mut sharp = registry()
        .get("small_sharp")
        .unwrap()
        .build(vec![("x".into(), x.clone())], &Map::new(), &[])
        .unwrap();
    assert_eq!(sharp.gradients(), 2);
    let gradient = |v: &[f64]| {
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(v, DType::F64));
        grads
    };
    let error = sharp.step(&gradient(&[3.0, 4.0]), &StepContext::new()).unwrap_err();
    assert!(error.to_string().contains("step_twice"), "{error}");
    let mut seen = Vec::new();
    let mut again = || {
        seen = values(&x);
        Ok(Evaluated { grads: gradient(&[1.0, 0.0]), loss: None })
    };
    sharp.step_twice(&gradient(&[3.0, 4.0]), &StepContext::new(), &mut again).unwrap();
    // 0.05 along the gradient of norm 5.
    assert!((seen[0] - 3.03).abs() < 1e-12 && (seen[1] - 4.04).abs() < 1e-12, "{seen:?}");
    assert_eq!(values(&x), [2.9, 4.0]);
    // An error on the way leaves everything where it was.
    let before = (bits(&x), sharp.state_dict().unwrap().to_bytes().unwrap());
    let mut fails = || Err(Error::MissingLoss("the closure".into()));
    assert!(sharp.step_twice(&gradient(&[3.0, 4.0]), &StepContext::new(), &mut fails).is_err());
    assert!(before == (bits(&x), sharp.state_dict().unwrap().to_bytes().unwrap()));
    // And so does a panic.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut panics = || panic!("in the forward pass");
        sharp.step_twice(&gradient(&[3.0, 4.0]), &StepContext::new(), &mut panics)
    }));
    assert!(result.is_err());
    assert_eq!(bits(&x), before.0);
}

#[test]
fn displaced_variables_come_back() {
    let x = var(&[1.0, 2.0], DType::F32);
    let there = tensor(&[5.0, 6.0], DType::F32);
    let displaced = Displaced::put([(x.clone(), there.clone())]).unwrap();
    assert_eq!(values(&x), [5.0, 6.0]);
    displaced.restore().unwrap();
    assert_eq!(values(&x), [1.0, 2.0]);
    // The second does not fit: the first is where it was.
    let other = var(&[1.0], DType::F32);
    assert!(Displaced::put([(x.clone(), there.clone()), (other, there)]).is_err());
    assert_eq!(values(&x), [1.0, 2.0]);
}

#[test]
fn what_a_rule_keeps_does_not_change_with_the_parameter() {
    // `z` of the first step is the parameter itself; the history is a copy of it.
    let mut trial = Trial::new("small_history", DType::F32);
    let before: Vec<u64> = trial.bits();
    trial.step(1, &StepContext::new()).unwrap();
    assert_eq!(bits(&trial.optimizer.state_dict().unwrap().tensors["<shared>.x"]), before);
}

#[test]
fn wrappers_are_checked_and_built_through_the_registry() {
    let registry = registry();
    let entry = registry.get("small_ahead").unwrap();
    assert!(!entry.needs_loss);
    assert!(entry.needs_loss_with(&map(json!({"inner": {"name": "decgd"}}))).unwrap());
    assert_eq!(entry.buffers(&map(json!({"inner": {"name": "adam"}}))).unwrap(), ["m", "v", "slow"]);
    let error = entry.check(&map(json!({"inner": {"name": "adamm"}}))).unwrap_err().to_string();
    assert!(error.contains("did you mean `adam`?"), "{error}");
    let error = entry.check(&map(json!({"inner": {"name": "adam", "beta3": 1}}))).unwrap_err().to_string();
    assert!(error.contains("unknown hyperparameter `beta3`"), "{error}");
    let error = entry.check(&map(json!({"kk": 1}))).unwrap_err().to_string();
    assert!(error.contains("small_ahead: unknown hyperparameter `kk`"), "{error}");
    // State of another inner optimizer is refused by it.
    let build = |inner: Value| {
        let params = vec![("x".to_owned(), Var::zeros(2, DType::F32, &Device::Cpu).unwrap())];
        entry.build(params, &map(json!({"inner": inner})), &[]).unwrap()
    };
    let saved = build(json!({"name": "adam"})).state_dict().unwrap();
    assert!(build(json!({"name": "sgdm"})).load_state_dict(&saved).is_err());
    build(json!({"name": "adam"})).load_state_dict(&saved).unwrap();
}
