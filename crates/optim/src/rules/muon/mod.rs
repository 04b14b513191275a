//! Muon (Jordan et al., 2024): momentum whose singular values are all moved towards 1.
//!
//! For parameters of two axes or more, as matrices of n rows and m columns:
//!
//! ```text
//! b_t = μ b_{t-1} + (1 - μ) g
//! U   = (1 - μ) g + μ b_t                             without nesterov: b_t
//! X   = U / max(|U|, ε)
//! ns_steps times:  A = X Xᵀ,  X ← a X + (b A + c A A) X
//! x_{t+1} = x_t (1 - ηλ) - η q X                      q = √max(1, n/m), or 0.2 √max(n, m)
//! ```
//!
//! All others (biases, norms) are the `rest`'s, an optimizer of its own: `rest: {name: adamw, lr: 3e-4}`.
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Var};
//! use taper_optim::{Registry, StepContext};
//!
//! let (w, b) = (Var::ones((3, 2), DType::F32, &Device::Cpu)?, Var::ones(3, DType::F32, &Device::Cpu)?);
//! let params = vec![("w".to_owned(), w.clone()), ("b".to_owned(), b.clone())];
//! let config = serde_json::json!({"lr": 0.02, "rest": {"name": "adamw", "lr": 1e-3}});
//! let mut optimizer = Registry::builtin().build("muon", params, config.as_object().unwrap())?;
//! let loss = (w.sqr()?.sum_all()? + b.sqr()?.sum_all()?)?;
//! optimizer.step(&loss.backward()?, &StepContext::new())?;
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch's Muon, with the iteration in the precision of the parameters (halves in f32). PyTorch rounds X to bf16, which
//!   is up to 7e-3 away at a rate of 0.02.
//! - Convolutions [out, in, h, w] are matrices of `out` rows and in·h·w columns, for q too. PyTorch takes matrices only; the
//!   author's code flattens alike but takes q from h and w.
//! - Embeddings and the last layer, for which the author takes AdamW, are matrices too: name them in
//!   `except: ["*embed*", "head.*"]` to leave them to the rest.
//! - A schedule and [`StepContext::lr`](crate::StepContext::lr) move both rates, keeping their ratio. A group's keys act on its
//!   matrices, and on its other parameters where the rest has a key of that name (`weight_decay`); `lr` keeps its ratio to
//!   Muon's, and `rest: {…}` in a group is for the rest alone.
//! - Decay uses η, not ηq. With the default coefficients singular values end between 0.7 and 1.2, not at 1.
//!
//! References: *Muon: An optimizer for hidden layers in neural networks*, kellerjordan.github.io/posts/muon;
//! *Muon is Scalable for LLM Training*, arXiv:2502.16982 (`match_rms_adamw`).
use crate::clip::global_norm_of;
use crate::driver::groups::claim;
use crate::driver::{Group, compile, fields};
use crate::inner::{Inner, leftovers};
use crate::matrix::newton_schulz;
use crate::pairs::{Blend, Descend, paired};
use crate::rule::{Config, Info, Invalid, Reach, ranges, require};
use crate::sums::squares;
use crate::{
    Error, Factory, Load, Optimizer, Others, ParamInfo, Probe, Registry, Result, Setup, StateDict,
    StepContext, TensorOptim, TensorRule, TensorStep,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Var};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// What a step is multiplied by beside the rate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdjustLr {
    /// √max(1, n/m), as the author.
    #[default]
    Original,
    /// 0.2 √max(n, m): steps as large as AdamW's, whose rates then fit.
    MatchRmsAdamw,
}

/// Hyperparameters of Muon.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MuonConfig {
    /// Learning rate η of matrices. Defaults to 1e-3.
    pub lr: f64,
    /// Decoupled weight decay λ of matrices. Defaults to 0.1.
    pub weight_decay: f64,
    /// Momentum μ. Defaults to 0.95.
    pub momentum: f64,
    /// Nesterov's momentum. Defaults to true.
    pub nesterov: bool,
    /// a, b and c of the iteration. Defaults to [3.4445, -4.775, 2.0315].
    pub ns_coefficients: [f64; 3],
    /// Iterations. Defaults to 5.
    pub ns_steps: usize,
    /// The least norm that U is divided by. Defaults to 1e-7.
    pub eps: f64,
    /// How the rate follows the shape: `original` or `match_rms_adamw`. Defaults to `original`.
    pub adjust_lr: AdjustLr,
    /// The optimizer of all other parameters. Defaults to `{name: adamw}`.
    pub rest: Map<String, Value>,
    /// Patterns of matrices that are left to the rest. Defaults to none.
    pub except: Vec<String>,
}

impl Default for MuonConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: [3.4445, -4.775, 2.0315],
            ns_steps: 5,
            eps: 1e-7,
            adjust_lr: AdjustLr::Original,
            rest: Map::from_iter([("name".to_owned(), json!("adamw"))]),
            except: Vec::new(),
        }
    }
}

impl Config for MuonConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.momentum
    }
    fn check(&self) -> Result<(), Invalid> {
        /// More iterations than anybody has use for, and few enough to end.
        const MOST: usize = 100;
        ranges::lr(self.lr)?;
        ranges::weight_decay(self.weight_decay)?;
        ranges::fraction("momentum", self.momentum)?;
        for coefficient in self.ns_coefficients {
            require(coefficient.is_finite(), "ns_coefficients", "finite numbers", coefficient)?;
        }
        require(self.ns_steps < MOST, "ns_steps", "fewer than 100 iterations", self.ns_steps as f64)?;
        require(self.eps > 0.0 && self.eps.is_finite(), "eps", "a finite number above 0", self.eps)?;
        for pattern in &self.except {
            compile(pattern).map_err(|e| Invalid { key: "except", message: format!("`{pattern}`: {e}") })?;
        }
        Ok(())
    }
}

/// The arithmetic of Muon on matrices.
#[derive(Debug)]
pub struct MuonRule;

pub(crate) static MUON: Info = Info {
    name: "muon",
    about: "momentum of matrices, made nearly orthogonal; another optimizer for the rest",
    paper: "Jordan et al., Muon: An optimizer for hidden layers in neural networks",
    year: 2024,
    formula: "b ← μb + (1-μ)g; X = Newton–Schulz((1-μ)g + μb); x ← x(1 - ηλ) - η √max(1, n/m) X",
};

impl TensorRule for MuonRule {
    type Config = MuonConfig;

    crate::rule::one_name!(MUON);

    fn buffers(_: &MuonConfig) -> &'static [&'static str] {
        &["momentum"]
    }

    fn step(step: &mut TensorStep<MuonConfig>) -> Result<()> {
        for p in &mut step.params {
            let (c, mu) = (p.config, p.momentum);
            let Some(rows) = p.x.dims().first().copied().filter(|_| p.x.elem_count() > 0) else { continue };
            let columns = p.x.elem_count() / rows;
            let average = Blend { keep: mu, share: 1.0 - mu };
            let b = paired(average, &p.memory.tensor("momentum", &p.x)?, &p.g)?;
            let u = if c.nesterov { paired(average, &b, &p.g)? } else { b.clone() };
            let norm = squares(&u)?.sqrt().max(c.eps);
            let x = (u.reshape((rows, columns))? / norm)?;
            let x = newton_schulz(&x, c.ns_coefficients, c.ns_steps)?.reshape(p.x.shape())?;
            let (n, m) = (rows as f64, columns as f64);
            let q = match c.adjust_lr {
                AdjustLr::Original => (n / m).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamw => 0.2 * n.max(m).sqrt(),
            };
            let step = Descend { keep: 1.0 - p.lr * c.weight_decay, rate: p.lr * q };
            p.set(paired(step, &p.x, &x)?);
            p.memory.tensors.insert("momentum", b);
        }
        Ok(())
    }
}

/// How Muon is made.
pub(crate) struct MuonFactory;

fn rest(config: &MuonConfig) -> Result<Inner> {
    Inner::parse(MUON.name, "rest", &config.rest)
}

impl Factory for MuonFactory {
    type Config = MuonConfig;

    fn resolve(&self, registry: &Registry, config: MuonConfig) -> Result<MuonConfig> {
        let inner = rest(&config)?;
        let rest = inner.resolve(registry)?;
        inner.one_gradient(registry)?;
        Ok(MuonConfig { rest, ..config })
    }

    fn needs_loss(&self, registry: &Registry, config: &MuonConfig) -> Result<bool> {
        rest(config)?.needs_loss(registry)
    }

    fn buffers(&self, _: &Registry, config: &MuonConfig) -> Result<Vec<&'static str>> {
        Ok(MuonRule::buffers(config).to_vec())
    }

    fn reach(&self, registry: &Registry, config: &MuonConfig) -> Result<Reach> {
        Ok(rest(config)?.reach(registry)?.max(Reach::Parameter))
    }

    fn build(&self, setup: Setup<'_, MuonConfig>) -> Result<Box<dyn Optimizer>> {
        let Setup { registry, params, config, groups } = setup;
        claim(&params, groups)?;
        let mut except = Vec::with_capacity(config.except.len());
        for pattern in &config.except {
            except.push(Group::new(pattern).pattern()?);
        }
        let names = params.iter().map(|(name, _)| name.clone()).collect();
        let vars = params.iter().map(|(_, var)| var.clone()).collect();
        let is_matrix = |(name, var): &(String, Var)| {
            var.rank() >= 2 && !except.iter().any(|pattern| pattern.is_match(name, var.rank()))
        };
        let (matrices, others): (Vec<_>, Vec<_>) = params.into_iter().partition(is_matrix);
        let inner = rest(&config)?;
        let rest_lr = inner.build(registry, Vec::new(), &[])?.lr();
        let ratio = Ratio { matrices: config.lr, rest: rest_lr };
        let (mut of_matrices, mut of_rest) = (Vec::new(), Vec::new());
        for group in groups {
            let pattern = group.pattern()?;
            let claims = |params: &[(String, Var)]| {
                params.iter().any(|(name, var)| pattern.is_match(name, var.rank()))
            };
            if claims(&matrices) {
                let mut overrides = group.overrides.clone();
                overrides.remove("rest");
                of_matrices.push(Group { overrides, ..group.clone() });
            }
            if claims(&others) {
                of_rest.push(group_of_rest(registry, &inner, group, &ratio, claims(&matrices))?);
            }
        }
        let matrices = TensorOptim::with_groups(matrices, config, &of_matrices)?;
        let rest = inner.build(registry, others, &of_rest)?;
        Ok(Box::new(Muon { names, vars, matrices, rest, ratio, probe: None }))
    }
}

/// A group as the rest sees it.
fn group_of_rest(
    registry: &Registry,
    inner: &Inner,
    group: &Group,
    ratio: &Ratio,
    has_matrices: bool,
) -> Result<Group> {
    let known = fields(&MuonConfig::default());
    let mut own = Group::new(&group.pattern);
    for (key, value) in &group.overrides {
        match (key.as_str(), value.as_f64()) {
            ("rest", _) => own.overrides.extend(inner.overrides(&group.pattern, value)?),
            ("lr", Some(lr)) => drop(own.overrides.insert("lr".into(), ratio.of_rest(lr).into())),
            _ if inner.has(registry, key) => drop(own.overrides.insert(key.clone(), value.clone())),
            // For the matrices of the group alone.
            _ if known.contains_key(key) && has_matrices => {}
            _ => {
                let message = format!("none of its parameters is a matrix, and the rest has no `{key}`");
                return Err(Error::Group { pattern: group.pattern.clone(), message });
            }
        }
    }
    Ok(own)
}

/// The configured rates of both parts, whose ratio is kept.
struct Ratio {
    matrices: f64,
    rest: f64,
}

impl Ratio {
    /// The rest's rate when that of matrices is `lr`.
    fn of_rest(&self, lr: f64) -> f64 {
        if self.matrices == 0.0 { self.rest } else { self.rest * (lr / self.matrices) }
    }
}

/// Muon for matrices and another optimizer for the rest, as one.
struct Muon {
    /// All parameters, in the order given.
    names: Vec<String>,
    vars: Vec<Var>,
    matrices: TensorOptim<MuonRule>,
    rest: Box<dyn Optimizer>,
    ratio: Ratio,
    probe: Option<Probe>,
}

const MATRICES: &str = "matrices";
const REST: &str = "rest";

impl Muon {
    /// `of` each parameter, in the order given.
    fn in_order<T>(&self, mut all: Vec<T>, name: impl Fn(&T) -> &str) -> Vec<T> {
        let place = |name: &str| self.names.iter().position(|known| known == name);
        all.sort_by_key(|item| place(name(item)));
        all
    }
}

impl Optimizer for Muon {
    fn step(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        let mut context = *context;
        // One norm over both parts.
        if let Some(max) = context.max_norm.take() {
            context.check(MUON.name, self.matrices.lr())?;
            StepContext { max_norm: Some(max), ..context }.check(MUON.name, self.matrices.lr())?;
            let norm = global_norm_of(self.vars.iter().filter_map(|var| grads.get(var)))?;
            let norm: f64 = norm.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.to_scalar()?;
            context = context.clip_norm(norm * context.grad_scale.abs(), max);
        }
        let of_rest = StepContext { lr: context.lr.map(|lr| self.ratio.of_rest(lr)), ..context };
        let proposal = self.matrices.propose(grads, &context, None)?;
        self.rest.step(grads, &of_rest)?;
        self.matrices.accept(proposal)?;
        if context.probe {
            let probes = [self.matrices.probe(), self.rest.probe()];
            let params = probes.into_iter().flatten().flat_map(|probe| probe.params.clone()).collect();
            self.probe = Some(Probe { params: self.in_order(params, |p| &p.name) });
        }
        Ok(())
    }
    fn eval_weights(&mut self) -> Result<bool> {
        self.rest.eval_weights()
    }
    fn train_weights(&mut self) -> Result<()> {
        self.rest.train_weights()
    }
    fn settle(&mut self) -> Result<()> {
        self.rest.settle()
    }
    fn share_sums(&mut self, others: Others) -> Result<()> {
        self.rest.share_sums(others)
    }
    fn info(&self) -> &'static Info {
        &MUON
    }
    fn needs_loss(&self) -> bool {
        self.rest.needs_loss()
    }
    fn config(&self) -> Value {
        self.matrices.config()
    }
    fn lr(&self) -> f64 {
        self.matrices.lr()
    }
    fn set_lr(&mut self, lr: f64) {
        self.matrices.set_lr(lr);
        self.rest.set_lr(self.ratio.of_rest(lr));
    }
    fn params(&self) -> Vec<ParamInfo> {
        self.in_order([self.matrices.params(), self.rest.params()].concat(), |p| &p.name)
    }
    fn state_dict(&self) -> Result<StateDict> {
        let (matrices, rest) = (self.matrices.state_dict()?, self.rest.state_dict()?);
        let mut state = StateDict::default();
        state.header.optimizer = MUON.name.to_owned();
        state.header.params =
            matrices.header.params.clone().into_iter().chain(rest.header.params.clone()).collect();
        state.insert_part(MATRICES, matrices);
        state.insert_part(REST, rest);
        Ok(state)
    }
    fn load_state_dict_with(&mut self, state: &StateDict, load: Load) -> Result<()> {
        if state.header.optimizer != MUON.name {
            let found = &state.header.optimizer;
            return Err(Error::State(vec![format!("optimizer: expected {}, found {found}", MUON.name)]));
        }
        let mut state = state.clone();
        let (matrices, rest) = (state.take_part(MATRICES)?, state.take_part(REST)?);
        match leftovers(&state) {
            none if none.is_empty() => {}
            others => return Err(Error::State(others)),
        }
        let before = self.matrices.state_dict()?;
        self.matrices.load_state_dict_with(&matrices, load)?;
        self.rest.load_state_dict_with(&rest, load).inspect_err(|_| {
            // What it said itself a moment ago.
            drop(self.matrices.load_state_dict_with(&before, Load::strict().same_order()));
        })
    }
    fn probe(&self) -> Option<&Probe> {
        self.probe.as_ref()
    }
}
