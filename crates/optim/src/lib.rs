//! DecGD and the optimizers it is compared to, fused, by name, for candle.
//!
//! Change one line of an existing candle loop:
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, VarBuilder, VarMap, linear, loss};
//! use taper_optim::{DecGd, DecGdConfig};
//!
//! let vars = VarMap::new();
//! let model = linear(4, 3, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
//! let x = Tensor::randn(0f32, 1., (16, 4), &Device::Cpu)?;
//! let y = Tensor::from_vec((0..16).map(|i| i % 3).collect::<Vec<u32>>(), 16, &Device::Cpu)?;
//!
//! let mut optimizer = DecGd::new(vars.all_vars(), DecGdConfig::default())?; // was: AdamW::new(…)
//! for _ in 0..10 {
//!     let loss = loss::cross_entropy(&model.forward(&x)?, &y)?;
//!     optimizer.backward_step(&loss)?;
//! }
//! # Ok(()) }
//! ```
//!
//! An optimizer is a [`Rule`](rule::Rule), the arithmetic of one element, driven by [`Optim`], which owns all the
//! rest: parameter groups, state, clipping, threads, saving. The [`Registry`] builds optimizers by name.

mod accumulate;
mod clip;
pub mod device;
mod driver;
mod error;
mod optimizer;
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
mod tensor;

pub use accumulate::Accumulator;
pub use clip::{global_norm, global_norm_on_device};
pub use driver::{Group, Optim, Pattern};
pub use error::{Error, Result};
pub use optimizer::{Deferred, Evaluated, Optimizer, ParamInfo, StepContext};
pub use precision::{Precision, Rounding};
pub use probe::{Distribution, ParamProbe, Probe};
pub use registry::{Entry, Factory, Named, Registry, Setup};
pub use rule::Info;
pub use rules::adabelief::AdaBeliefConfig;
pub use rules::adabound::AdaBoundConfig;
pub use rules::adadelta::AdaDeltaConfig;
pub use rules::adagd::AdaGdConfig;
pub use rules::adagrad::AdaGradConfig;
pub use rules::adam::AdamConfig;
pub use rules::aegd::AegdConfig;
pub use rules::decgd::{AmsInit, DecGdConfig, Decay, X0};
pub use rules::padam::PAdamConfig;
pub use rules::radam::{RAdamConfig, RAdamVariant};
pub use rules::rmsprop::RmsPropConfig;
pub use rules::sgd::SgdConfig;
pub use rules::yogi::YogiConfig;
pub use scaler::LossScaler;
pub use schedule::{Part, Per, PlateauState, Schedule, Scheduler};
pub use state::{Header, Load, ParamScalars, SavedGroup, StateDict};
pub use tensor::{Displaced, Memory, TensorOptim, TensorParam, TensorRule, TensorStep};

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
/// DecGD and its variant with weight decay; see [`rules::decgd`].
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
