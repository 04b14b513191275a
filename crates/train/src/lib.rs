//! Recipes in, reproducible training runs out.
//!
//! A [`Recipe`] says what to train; [`run::run`] trains it and leaves a folder that depends on the resolved recipe alone:
//! the same recipe gives the same bytes, for any number of threads, with or without interruptions.
//!
//! ```no_run
//! use taper_train::{Registries, Recipe, run};
//! let registries = Registries::default();
//! let recipe = Recipe::load("recipes/mnist/mlp-decgd.yaml", &["train.epochs=1".into()], &registries)?;
//! let outcome = run::run(&recipe, &registries, &run::Options::default())?;
//! println!("{}: {:?}", outcome.folder.display(), outcome.summary.last);
//! # Ok::<(), run::RunError>(())
//! ```

pub mod bench;
pub mod compare;
pub mod data;
pub mod device;
pub mod plot;
pub mod recipe;
mod registries;
pub mod run;
pub mod table;
pub mod verify;

pub use recipe::Recipe;
pub use registries::{Registries, Schedules};
