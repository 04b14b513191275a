//! Coming from `candle_nn::AdamW` or PyTorch: names and differences.
//!
//! | candle-nn | here |
//! | --- | --- |
//! | `AdamW::new(varmap.all_vars(), ParamsAdamW { lr, beta1, beta2, eps, weight_decay })` | `Adam::from_varmap(&varmap, AdamConfig { lr, beta1, beta2, eps, weight_decay, ..AdamConfig::adamw() })` |
//! | `SGD::new(vars, lr)` | `Sgd::from_varmap(&varmap, SgdConfig { lr, ..Default::default() })` |
//! | `use candle_nn::Optimizer` | not needed; implemented all the same, for functions that take any `O: Optimizer` |
//! | `step(&grads)`, `backward_step(&loss)` | the same; `step_with` and `backward_step_with` take a [`StepContext`](crate::StepContext) |
//! | `learning_rate()`, `set_learning_rate(lr)` | `lr()`, `set_lr(lr)`; or a schedule's factor in the context |
//! | a NaN in a gradient reaches the weights | the step is refused: [`Error::GradientNotFinite`](crate::Error::GradientNotFinite) |
//! | no state to save | `state_dict()`, `load_state_dict()` |
//!
//! | PyTorch | here |
//! | --- | --- |
//! | `Adam(…)`, `AdamW(…)`, `Adam(amsgrad=True)` | `AdamConfig::default()`, `::adamw()`, `::amsgrad()` |
//! | `SGD(momentum=0.9, nesterov=True)` | `SgdConfig { momentum: 0.9, nesterov: true, ..Default::default() }`, `nag` by name |
//! | parameter groups as a list of dictionaries | [`Group`](crate::Group)s: patterns of names, or `rank <= 1` |
//! | timm's `weight_decay` for matrices only | [`Group::no_decay`](crate::Group::no_decay) |
//! | `clip_grad_norm_(params, max)` before `step` | `StepContext::new().max_norm(max)` |
//! | `clip_grad_value_(params, v)` | `StepContext::new().clip_value(v)` |
//! | `lr_scheduler.CosineAnnealingLR` | [`Schedule::Cosine`](crate::Schedule::Cosine) and `StepContext::new().factor(…)` |
//! | `optimizer.state_dict()`, by position | by name; positions are refused unless you vouch for them ([`Load`](crate::Load)) |
//! | loading replaces the hyperparameters | differences are errors; [`Load::keep_hyperparameters`](crate::Load::keep_hyperparameters) keeps those of the optimizer |
//! | `GradScaler` | [`LossScaler`](crate::LossScaler) |
//! | gradients summed in `.grad` over several `backward()` | [`Accumulator`](crate::Accumulator), a mean weighted by samples |
//! | `zero_grad()` | nothing: candle's gradients belong to one backward pass |
//! | `fused=True`, `foreach=True` | always |
//!
//! Defaults are PyTorch's where PyTorch has the optimizer; each rule's page says where it differs.
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Var};
//! use taper_optim::{Adam, AdamConfig};
//!
//! // The same trajectory as candle's, to the rounding of f64.
//! let start = || Var::new(&[1f64, -2., 3.], &Device::Cpu);
//! let (ours, theirs) = (start()?, start()?);
//! let config = AdamConfig { lr: 0.1, weight_decay: 0.01, ..AdamConfig::adamw() };
//! let mut a = Adam::in_order(vec![ours.clone()], config)?;
//! let config = candle_nn::ParamsAdamW { lr: 0.1, weight_decay: 0.01, ..Default::default() };
//! let mut b = <candle_nn::AdamW as candle_nn::Optimizer>::new(vec![theirs.clone()], config)?;
//! for _ in 0..20 {
//!     a.backward_step(&ours.sqr()?.sum_all()?)?;
//!     candle_nn::Optimizer::backward_step(&mut b, &theirs.sqr()?.sum_all()?)?;
//! }
//! let apart = (ours.as_tensor() - theirs.as_tensor())?.abs()?.max_all()?.to_scalar::<f64>()?;
//! assert!(apart < 1e-13, "{apart}");
//! # Ok(()) }
//! ```
