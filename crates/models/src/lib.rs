//! The networks of the DecGD paper, one that is fast on CIFAR-10, small transformers, and the training ops they need, for candle.
//!
//! Models are built through [`candle_nn::VarBuilder`] on a seeded backend ([`Params`]): the initial value of a
//! parameter depends on the seed and its name and on nothing else. Names and layouts equal PyTorch's, so
//! safetensors weights move both ways. The ops in [`ops`] have forward and backward passes of their own where
//! candle's are wrong or slow on the CPU. It knows nothing of optimizers, recipes or data sets.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use candle_core::{DType, Device, Tensor};
//! use taper_models::{Mode, Params, Registry, Task};
//! let (params, device) = (Params::new(1), Device::Cpu);
//! let task = Task::Images { height: 8, width: 8, channels: 3, classes: 10 };
//! let config = serde_json::json!({"num_blocks": [1, 1], "widths": [8, 16]});
//! let registry = Registry::builtin();
//! let mut model = registry.get("resnet")?.build(&config, task, params.builder(DType::F32, &device))?;
//! let (images, labels) = (Tensor::ones((4, 8, 8, 3), DType::F32, &device)?, Tensor::new(&[1u32, 2, 3, 4], &device)?);
//! let loss = model.loss(&images, &labels, Mode::Train { seed: 1, step: 1 })?;
//! let gradients = taper_models::backward(&loss.total)?;
//! assert!(params.trainable().iter().all(|(_, var)| gradients.get(var).is_some()));
//! # Ok(()) }
//! ```

pub mod airbench;
mod backward;
mod cost;
pub mod densenet;
mod eigen;
mod error;
pub mod gpt;
pub mod init;
pub mod layers;
pub mod lstm;
pub mod mlp;
pub mod model;
pub mod ops;
pub mod registry;
pub mod replay;
pub mod resnet;
pub mod trace;
mod transformer;
pub mod vit;

/// The instruction set that kernels for products of such operands are chosen by: results are equal bit for bit where it is. The best one
/// of this CPU, or the one that the variable `TAPER_ISA` names; an error if the CPU has it not.
pub fn instruction_set(operands: ops::Operands) -> Result<&'static str> {
    Ok(kernels::Arithmetic { isa: kernels::Isa::detect()?, operands }.name())
}

/// Fills memory that kernels have not written yet with NaN from now on: for tests, which then notice whoever reads it.
#[doc(hidden)]
pub fn poison_uncleared_memory() {
    kernels::buffer::poison();
}

pub use backward::backward;
pub use error::{Error, Result};
pub use init::Params;
pub use model::{Loss, Mode, Model, Task, WithOperands};
pub use registry::Registry;
use taper_kernels as kernels;
pub use taper_random as rng;
