//! Recipes in, reproducible training runs out.
//!
//! A [`Recipe`] says what to train; [`Recipe::run`] trains it and leaves a folder that depends on the resolved recipe
//! alone: the same recipe gives the same bytes, for any number of threads, with or without interruptions.
//!
//! ```no_run
//! use taper_train::{Recipe, Registries};
//! let outcome = Recipe::load("recipes/mnist/mlp-decgd.yaml", &[], &Registries::default())?.run()?;
//! println!("{}: {:?}", outcome.folder.display(), outcome.summary.last);
//! # Ok::<(), taper_train::run::RunError>(())
//! ```
//!
//! A program with optimizers, models, data sets or problems of its own adds them to the [`Registries`], loads recipes
//! with those and says where runs go: see [`run::run`] and `examples/own_model.rs`.

pub mod compare;
pub mod device;
pub mod numeric;
pub mod recipe;
mod registries;
pub mod run;
pub mod sweep;
pub mod verify;

pub use recipe::Recipe;
pub use registries::{Registries, Schedules};
