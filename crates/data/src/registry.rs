//! The trait of a data set and the registry that finds one by name.
use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::{Schema, SchemaGenerator};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::{DataError, Loaded, Search, sets};

/// A data set a recipe can name.
pub trait Dataset: Send + Sync {
    /// The name in recipes.
    fn name(&self) -> &str;

    /// What it is, and its options.
    fn describe(&self) -> Description;

    /// Whether its samples are images or text, where that is known before it is read.
    fn kind(&self) -> Option<Kind> {
        None
    }

    /// The types of its options, as their struct derives them; what they mean and default to is [`describe`](Self::describe)'s.
    fn schema(&self, _generator: &mut SchemaGenerator) -> Option<Schema> {
        None
    }

    /// The options that are paths of the user's own files; [`Search::resolve`] says where one that is not absolute begins.
    fn paths(&self) -> &'static [&'static str] {
        &[]
    }

    /// Refuses options that [`load`](Self::load) would refuse whatever it finds.
    fn check(&self, _options: &Value) -> Result<(), DataError> {
        Ok(())
    }

    /// Finds, reads and verifies it. `options` is the recipe's `data:` section without the trainer's own keys; see
    /// [`options`] for reading it.
    fn load(&self, options: &Value, search: &Search) -> Result<Loaded, DataError>;

    /// On what terms it may be used, as far as its publishers say; `None` where there is nobody to ask.
    fn licence(&self) -> Option<&'static str> {
        None
    }

    /// The files it is read from; `None` for a set that is made, not found.
    fn files(&self) -> Option<&'static super::Spec> {
        None
    }
}

/// What samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Labelled images.
    Images,
    /// Words in their order.
    Text,
}

/// What a data set is, for `taper data list`.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    /// One sentence.
    pub summary: String,
    /// Its options in a recipe's `data:` section.
    pub options: Vec<OptionDoc>,
}

/// One option of a data set.
#[derive(Clone, Debug, Serialize)]
pub struct OptionDoc {
    /// The key.
    pub name: &'static str,
    /// The default, as in a recipe. A recipe that gives an option this value is one that leaves it out.
    pub default: &'static str,
    /// What it does.
    pub doc: &'static str,
}

/// Reads a data set's options into a serde struct with `#[serde(default, deny_unknown_fields)]`. The error names the
/// key to blame.
pub fn options<T: DeserializeOwned>(dataset: &str, options: &Value) -> Result<T, DataError> {
    let empty = Value::Object(Map::new());
    let options = if options.is_null() { &empty } else { options };
    T::deserialize(options).map_err(|whole| {
        // serde does not say which key it was at; every field has a default, so a key alone fails like in company.
        let blamed = options.as_object().into_iter().flatten().find_map(|(key, value)| {
            let alone = Value::Object(Map::from_iter([(key.clone(), value.clone())]));
            T::deserialize(&alone).err().map(|e| (key.clone(), e.to_string()))
        });
        let (key, message) = blamed.map_or((None, whole.to_string()), |(key, message)| (Some(key), message));
        DataError::Option { dataset: dataset.into(), key, message }
    })
}

/// Data sets by name.
#[derive(Clone, Default)]
pub struct DataRegistry {
    sets: BTreeMap<String, Arc<dyn Dataset>>,
}

impl DataRegistry {
    /// The data sets that come with Taper.
    pub fn builtin() -> Self {
        let sets = sets::all().into_iter().map(|set| (set.name().to_string(), set)).collect();
        Self { sets }
    }

    /// Adds a data set. A taken name is an error.
    pub fn register(&mut self, set: Arc<dyn Dataset>) -> Result<(), DataError> {
        let name = set.name().to_string();
        if self.sets.contains_key(&name) {
            return Err(DataError::Duplicate { name });
        }
        self.sets.insert(name, set);
        Ok(())
    }

    /// The data set of this name; the error of an unknown one carries the nearest known name.
    pub fn get(&self, name: &str) -> Result<&Arc<dyn Dataset>, DataError> {
        self.sets.get(name).ok_or_else(|| {
            let known: Vec<String> = self.sets.keys().cloned().collect();
            let near = |k: &&String| strsim::damerau_levenshtein(k, name) <= 1 + name.chars().count() / 3;
            let nearest =
                known.iter().filter(near).min_by_key(|k| strsim::damerau_levenshtein(k, name)).cloned();
            DataError::Unknown { name: name.into(), nearest, known }
        })
    }

    /// All data sets, by name.
    pub fn list(&self) -> impl Iterator<Item = &Arc<dyn Dataset>> {
        self.sets.values()
    }
}
