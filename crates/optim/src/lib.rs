//! DecGD, the optimizers its paper compares it to and those of today, fused, by name, for candle.
//!
//! # Drop-in
//! Change one line of an existing candle loop; no trait need be imported:
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, VarBuilder, VarMap, linear, loss};
//! use taper_optim::{DecGd, DecGdConfig};
//!
//! let vars = VarMap::new();
//! let model = linear(4, 3, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let x = Tensor::randn(0f32, 1., (16, 4), &Device::Cpu)?;
//! let y = Tensor::from_vec((0..16).map(|i| i % 3).collect::<Vec<u32>>(), 16, &Device::Cpu)?;
//!
//! let mut optimizer = DecGd::from_varmap(&vars, DecGdConfig::default())?; // was: AdamW::new(…)
//! for _ in 0..10 {
//!     let loss = loss::cross_entropy(&model.forward(&x)?, &y)?;
//!     optimizer.backward_step(&loss)?;
//! }
//! # Ok(()) }
//! ```
//!
//! A loss or a gradient that is not finite is refused, with an error and without a trace. Coming from `candle_nn::AdamW` or
//! PyTorch: [`coming_from`].
//!
//! # By name
//! The [`Registry`] builds optimizers from names and hyperparameters, as a recipe gives them, and says what is wrong with either:
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! use taper_optim::{Registry, StepContext};
//! let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! let config = serde_json::json!({"lr": 0.1, "momentum": 0.5});
//! let params = vec![("x".to_owned(), x.clone())];
//! let mut optimizer = Registry::builtin().build("sgdm", params, config.as_object().unwrap())?;
//! let loss = x.sqr()?.sum_all()?;
//! optimizer.step(&loss.backward()?, &StepContext::new().loss(loss.to_scalar::<f32>()?.into()))?;
//! # Ok(()) }
//! ```
//!
//! # Groups
//! Any hyperparameter by name pattern or rank ([`Group`]):
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device};
//! # let vars = candle_nn::VarMap::new();
//! # candle_nn::linear(4, 3, candle_nn::VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("head"))?;
//! use taper_optim::{Adam, AdamConfig, Group};
//! let groups = [Group::no_decay(), Group::new("head.weight").set("lr", 1e-4)];
//! let optimizer = Adam::from_varmap_with_groups(&vars, AdamConfig::adamw(), &groups)?;
//! assert_eq!(optimizer.params()[0].group.as_deref(), Some("rank <= 1")); // head.bias
//! # Ok(()) }
//! ```
//!
//! # Schedule
//! A [`Schedule`] is a factor of time, and a factor is what a step takes: all groups follow it.
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! # use taper_optim::{Schedule, Sgd, SgdConfig, StepContext};
//! # let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! # let mut optimizer = Sgd::with_params(vec![("x".into(), x.clone())], SgdConfig::default())?;
//! let schedule = Schedule::Cosine { length: None, end: 0.0 };
//! for t in 0..100 {
//!     let context = StepContext::new().factor(schedule.factor(t, 100));
//!     optimizer.backward_step_with(&x.sqr()?.sum_all()?, &context)?;
//! }
//! # Ok(()) }
//! ```
//!
//! # Save and load
//! State holds buffers, counters, the learning rate, hyperparameters and groups: training continues to the bit. What does not
//! fit is refused with every difference; [`Load`] says which are meant. Parameters need names: `all_vars` has no order.
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! use taper_optim::{Adam, AdamConfig, Load, StateDict};
//! # let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! # let path = std::env::temp_dir().join(format!("taper-optim-front-page-{}.safetensors", std::process::id()));
//! let build = |lr| Adam::with_params(vec![("x".into(), x.clone())], AdamConfig { lr, ..Default::default() });
//! let mut optimizer = build(1e-3)?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! optimizer.state_dict()?.save(&path)?;
//!
//! let state = StateDict::load(&path)?;
//! build(1e-3)?.load_state_dict(&state)?;
//! let error = build(3e-4)?.load_state_dict(&state).unwrap_err();
//! assert!(error.to_string().contains("lr: expected 0.0003, found 0.001"));
//! build(3e-4)?.load_state_dict_with(&state, Load::strict().keep_hyperparameters())?;
//! # std::fs::remove_file(&path)?;
//! # Ok(()) }
//! ```
//!
//! # Accumulation
//! One step from several micro-batches: [`Accumulator`].
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! # use taper_optim::{Accumulator, Sgd, SgdConfig, StepContext};
//! # let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! # let mut optimizer = Sgd::with_params(vec![("x".into(), x.clone())], SgdConfig::default())?;
//! let mut mean = Accumulator::with_params(vec![("x".into(), x.clone())]);
//! for samples in [32.0, 16.0] {
//!     let loss = x.sqr()?.mean_all()?;
//!     mean.add(&loss.backward()?, loss.to_scalar::<f32>()?.into(), samples)?;
//! }
//! if let Some((grads, loss)) = mean.take()? {
//!     optimizer.step_with(&grads, &StepContext::new().loss(loss))?;
//! }
//! # Ok(()) }
//! ```
//!
//! # Clipping
//! By value or by the norm of all gradients, inside the update's own pass over memory:
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! # use taper_optim::{Sgd, SgdConfig, StepContext};
//! # let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! # let mut optimizer = Sgd::with_params(vec![("x".into(), x.clone())], SgdConfig::default())?;
//! let context = StepContext::new().max_norm(0.25).clip_value(0.1);
//! optimizer.backward_step_with(&x.sqr()?.sum_all()?, &context)?;
//! # Ok(()) }
//! ```
//!
//! # An optimizer of your own
//! The arithmetic of one element is a [`Rule`](rule::Rule): the example `custom_optimizer` is one in a hundred lines, with groups, state,
//! dtypes, threads and saving. Arithmetic of whole tensors is a [`TensorRule`]; a wrapper implements [`Optimizer`]. All
//! are registered by name ([`Registry::register`], [`Registry::register_tensor`], [`Registry::register_with`]).
//!
//! ```
//! use taper_optim::rule::{Config, Input, Invalid, Real, Refusal, Rule, ranges};
//! use taper_optim::{Info, Registry, scalars};
//!
//! #[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
//! #[serde(default, deny_unknown_fields)]
//! struct SignConfig { lr: f64 }
//! impl Config for SignConfig {
//!     fn lr(&self) -> f64 { self.lr }
//!     fn check(&self) -> Result<(), Invalid> { ranges::lr(self.lr) }
//! }
//! scalars! { struct SignScalars { lr } }
//! static SIGN: Info = Info { name: "sign", about: "steps of one size", paper: "", year: 1993, formula: "x ← x - η sign(g)" };
//!
//! #[derive(Debug)]
//! struct Sign;
//! impl Rule for Sign {
//!     type Config = SignConfig;
//!     type Scalars = SignScalars;
//!     const BUFFERS: (usize, usize) = (0, 0);
//!     fn names() -> Vec<(&'static Info, SignConfig)> { vec![(&SIGN, SignConfig { lr: 1e-3 })] }
//!     fn info(_: &SignConfig) -> &'static Info { &SIGN }
//!     fn buffers(_: &SignConfig) -> &'static [&'static str] { &[] }
//!     fn prepare(_: &SignConfig, input: &Input, _: &mut [f64]) -> Result<SignScalars, Refusal> {
//!         Ok(SignScalars { lr: input.lr })
//!     }
//!     fn update<F: Real>(s: &SignScalars<F>, x: F, g: F, _: &mut [F]) -> F {
//!         let zero = F::from_f64(0.0);
//!         if g > zero { x - s.lr } else if g < zero { x + s.lr } else { x }
//!     }
//! }
//! Registry::builtin().register::<Sign>()?;
//! # Ok::<(), taper_optim::Error>(())
//! ```
//!
//! # Probe
//! What a step did to each parameter:
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! # use candle_core::{DType, Device, Var};
//! # use taper_optim::{DecGd, DecGdConfig, StepContext};
//! # let x = Var::ones(3, DType::F32, &Device::Cpu)?;
//! # let mut optimizer = DecGd::with_params(vec![("x".into(), x.clone())], DecGdConfig::default())?;
//! optimizer.backward_step_with(&x.sqr()?.sum_all()?, &StepContext::new().probe(true))?;
//! let probe = &optimizer.probe().unwrap().params[0];
//! assert!(probe.update_ratio > 0.0);
//! assert_eq!(probe.observed.as_ref().unwrap().0, "v");
//! # Ok(()) }
//! ```
//!
//! # Half precision
//! Parameters of f16 and bf16, with f32 master weights or stochastic rounding: [`Precision`]; with f16, [`LossScaler`].
//!
//! # Threads
//! A step computes on rayon's pool, with the same bits for any number of threads. It holds the lock of one variable at a time and
//! waits for nobody else: other threads may read the variables meanwhile, in the pool too.

mod accumulate;
mod clip;
pub mod coming_from;
pub mod device;
mod domain;
mod driver;
mod error;
mod inner;
mod matrix;
mod microscope;
mod optimizer;
#[doc(hidden)]
pub mod pairs;
mod passes;
mod power;
mod precision;
mod probe;
mod registry;
pub mod replay;
pub mod rule;
pub mod rules;
mod scaler;
mod schedule;
mod state;
mod sums;
mod tensor;
mod wrapper;

pub use accumulate::Accumulator;
pub use clip::{global_norm, global_norm_on_device};
pub use domain::Domain;
pub use driver::{Group, Optim, Pattern};
pub use error::{Error, Result};
pub use microscope::{
    Along, Eigenvalue, Figures, Halves, Microscope, Noise, Parabola, REFERENCES, Reached, Seen, Shadow,
    Spread, Values, early_stop, nearest,
};
pub use optimizer::{Deferred, Evaluated, Optimizer, Others, ParamInfo, StepContext};
pub use precision::{Precision, Rounding};
pub use probe::{Distribution, ParamProbe, Probe};
pub use registry::{Entry, Factory, Family, Named, Registry, Setup};
pub use rule::Info;
pub use rules::adabelief::AdaBeliefConfig;
pub use rules::adabound::AdaBoundConfig;
pub use rules::adadelta::AdaDeltaConfig;
pub use rules::adafactor::AdafactorConfig;
pub use rules::adagd::AdaGdConfig;
pub use rules::adagrad::AdaGradConfig;
pub use rules::adam::AdamConfig;
pub use rules::adamax::AdamaxConfig;
pub use rules::adan::AdanConfig;
pub use rules::ademamix::AdEmaMixConfig;
pub use rules::adopt::AdoptConfig;
pub use rules::aegd::AegdConfig;
pub use rules::decadam::DecAdamConfig;
pub use rules::decgd::{AmsInit, Bound, DecGdConfig, Decay, Previous, X0};
pub use rules::lamb::LambConfig;
pub use rules::lars::LarsConfig;
pub use rules::lbfgs::LbfgsConfig;
pub use rules::lion::LionConfig;
pub use rules::lookahead::{LookaheadConfig, Pullback};
pub use rules::muon::{AdjustLr, MuonConfig};
pub use rules::nadam::NAdamConfig;
pub use rules::nadamw::NAdamWConfig;
pub use rules::padam::PAdamConfig;
pub use rules::prodigy::ProdigyConfig;
pub use rules::radam::{RAdamConfig, RAdamVariant};
pub use rules::rmsprop::RmsPropConfig;
pub use rules::sam::SamConfig;
pub use rules::sf_adamw::SfAdamWConfig;
pub use rules::sf_sgd::SfSgdConfig;
pub use rules::sgd::SgdConfig;
pub use rules::soap::SoapConfig;
pub use rules::yogi::YogiConfig;
pub use scaler::LossScaler;
pub use schedule::{Part, Per, PlateauState, Schedule, Scheduler};
pub use state::{Header, Load, ParamScalars, SavedGroup, StateDict};
pub use tensor::{Displaced, Evaluation, Memory, Second, TensorOptim, TensorParam, TensorRule, TensorStep};

/// AdaBelief; see [`rules::adabelief`].
pub type AdaBelief = Optim<rules::adabelief::AdaBeliefRule>;
/// AdaBound and AMSBound; see [`rules::adabound`].
pub type AdaBound = Optim<rules::adabound::AdaBoundRule>;
/// AdaDelta; see [`rules::adadelta`].
pub type AdaDelta = Optim<rules::adadelta::AdaDeltaRule>;
/// AdaGD; see [`rules::adagd`].
pub type AdaGd = Optim<rules::adagd::AdaGdRule>;
/// AdaGrad; see [`rules::adagrad`].
pub type AdaGrad = Optim<rules::adagrad::AdaGradRule>;
/// Adam, AMSGrad and AdamW; see [`rules::adam`].
pub type Adam = Optim<rules::adam::AdamRule>;
/// AEGD and AEGDW; see [`rules::aegd`].
pub type Aegd = Optim<rules::aegd::AegdRule>;
/// DecAdam, an experiment; see [`rules::decadam`].
pub type DecAdam = Optim<rules::decadam::DecAdamRule>;
/// DecGD and its variants with weight decay and with a bound; see [`rules::decgd`].
pub type DecGd = Optim<rules::decgd::DecGdRule>;
/// PAdam; see [`rules::padam`].
pub type PAdam = Optim<rules::padam::PAdamRule>;
/// RAdam; see [`rules::radam`].
pub type RAdam = Optim<rules::radam::RAdamRule>;
/// RMSprop; see [`rules::rmsprop`].
pub type RmsProp = Optim<rules::rmsprop::RmsPropRule>;
/// SGD, with or without momentum; see [`rules::sgd`].
pub type Sgd = Optim<rules::sgd::SgdRule>;
/// Yogi; see [`rules::yogi`].
pub type Yogi = Optim<rules::yogi::YogiRule>;
/// Adafactor; see [`rules::adafactor`].
pub type Adafactor = TensorOptim<rules::adafactor::AdafactorRule>;
/// Adamax; see [`rules::adamax`].
pub type Adamax = Optim<rules::adamax::AdamaxRule>;
/// Adan; see [`rules::adan`].
pub type Adan = Optim<rules::adan::AdanRule>;
/// AdEMAMix; see [`rules::ademamix`].
pub type AdEmaMix = Optim<rules::ademamix::AdEmaMixRule>;
/// ADOPT; see [`rules::adopt`].
pub type Adopt = Optim<rules::adopt::AdoptRule>;
/// LAMB; see [`rules::lamb`].
pub type Lamb = TensorOptim<rules::lamb::LambRule>;
/// LARS; see [`rules::lars`].
pub type Lars = Optim<rules::lars::LarsRule>;
/// L-BFGS; see [`rules::lbfgs`].
pub type Lbfgs = TensorOptim<rules::lbfgs::LbfgsRule>;
/// Lion; see [`rules::lion`].
pub type Lion = Optim<rules::lion::LionRule>;
/// NAdam; see [`rules::nadam`].
pub type NAdam = Optim<rules::nadam::NAdamRule>;
/// NAdamW; see [`rules::nadamw`].
pub type NAdamW = Optim<rules::nadamw::NAdamWRule>;
/// Prodigy; see [`rules::prodigy`].
pub type Prodigy = TensorOptim<rules::prodigy::ProdigyRule>;
/// Schedule-Free AdamW; see [`rules::sf_adamw`].
pub type SfAdamW = Optim<rules::sf_adamw::SfAdamWRule>;
/// Schedule-Free SGD; see [`rules::sf_sgd`].
pub type SfSgd = Optim<rules::sf_sgd::SfSgdRule>;
/// SOAP; see [`rules::soap`].
pub type Soap = TensorOptim<rules::soap::SoapRule>;
