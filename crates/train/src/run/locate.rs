//! Refusals that come after the recipe was read, shown where the recipe gives rise to them.
use super::RunError;
use crate::recipe::Recipe;
use crate::registries::{data_error, model_error};
use taper_data::DataError;
use taper_models::Error as ModelError;

/// The same error, at its place in the recipe where it is about a key of `data` or `model`.
pub(super) fn locate(recipe: &Recipe, error: RunError) -> RunError {
    match error {
        RunError::Model(e @ (ModelError::Config { .. } | ModelError::UnknownKey { .. })) => {
            recipe.refused("model", model_error(e)).into()
        }
        RunError::Data(e @ DataError::Option { .. }) => recipe.refused("data", data_error(e)).into(),
        e => e,
    }
}
