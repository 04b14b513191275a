//! Recipes in, reproducible training runs out.
//!
//! A [`Recipe`] says what to train; [`Recipe::run`] trains it and leaves a folder that depends on the resolved recipe
//! alone: the same recipe gives the same bytes, for any number of threads, with or without interruptions. It knows nothing of
//! command lines, and of what others make of run folders only how to read them back.
//!
//! ```
//! use taper_train::run::{self, Options, Show};
//! use taper_train::{Recipe, Registries};
//! let registries = Registries::default();
//! let recipe = "
//!   data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16}
//!   model: {name: mlp, hidden: [8]}
//!   optimizer: {name: decgd, lr: 0.01}
//!   train: {epochs: 2}
//! ";
//! let recipe = Recipe::parse("recipe.yaml", recipe, &[], &registries)?;
//! let folder = tempfile::tempdir().unwrap();
//! let options = Options { runs: folder.path().into(), show: Show::Quiet, ..Options::default() };
//! let outcome = run::run(&recipe, &registries, &options)?;
//! assert_eq!(outcome.summary.steps, 8);
//! assert!(outcome.folder.join("metrics.jsonl").is_file());
//! # Ok::<(), taper_train::run::RunError>(())
//! ```
//!
//! `Recipe::load("recipe.yaml", &[], &registries)?.run()?` is all that a program with nothing of its own needs.
//!
//! A program with optimizers, models, data sets or problems of its own adds them to the [`Registries`], loads recipes
//! with those and says where runs go: see [`run::run`] and `examples/own_model.rs`.

pub mod compare;
pub mod device;
pub mod keys;
pub mod numeric;
pub mod recipe;
mod registries;
pub mod run;
pub mod sweep;
pub mod theory;
pub mod trained;
pub mod verify;

pub use recipe::Recipe;
pub use registries::{Registries, Schedules};
