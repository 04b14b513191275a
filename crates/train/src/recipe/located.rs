//! A YAML file that is no recipe, read with the same care: typed, and every mistake shown where it is.

use std::ops::Deref;
use std::path::Path as FilePath;

use serde::de::DeserializeOwned;

use super::de;
use super::error::{ErrorKind, RecipeError};
use super::layers::Layers;
use super::path::Path;
use super::source::Source;
use super::yaml;

/// A value (through `Deref`) that remembers the file it came from.
#[derive(Debug, Clone)]
pub struct Located<T> {
    value: T,
    layers: Layers,
}

impl<T> Deref for Located<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: DeserializeOwned> Located<T> {
    /// Reads a file.
    pub fn load(path: impl AsRef<FilePath>) -> Result<Self, RecipeError> {
        let root = yaml::parse(&Source::read(path.as_ref())?)?;
        let value = root.value();
        let mut layers = Layers::default();
        layers.push(root);
        Ok(Self { value: de::read(&value, &Path::default(), &layers)?, layers })
    }

    /// A mistake that only shows later, reported where the value at `path` stands.
    pub fn error_at(&self, path: &str, message: impl Into<String>) -> RecipeError {
        RecipeError::new(ErrorKind::Value, message).at_opt(self.layers.place(&Path::parse(path)))
    }
}
