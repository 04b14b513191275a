//! `recipe.yaml` of a run.
use super::{RunError, files, folder};
use crate::{Recipe, Registries};
use std::fs;
use std::path::Path;

/// Writes `recipe.yaml`. One that holds this run already stays: its comments say where the values came from when the run
/// was first started, and whoever goes on with it may only have that file.
pub(crate) fn write_recipe(recipe: &Recipe, registries: &Registries, run: &Path) -> Result<(), RunError> {
    let there = || {
        folder::recipe(run, registries).is_ok_and(|same| same.id() == recipe.id() && same.name == recipe.name)
    };
    if there() {
        return Ok(());
    }
    fs::create_dir_all(run).map_err(RunError::io(run))?;
    match files::replace(&run.join("recipe.yaml"), recipe.to_yaml().as_bytes()) {
        // Another process may have placed it meanwhile and cleared away what it took for strays.
        Err(_) if there() => Ok(()),
        written => written,
    }
}
