//! What a run is a function of besides its recipe, by content: its data and the weights it starts from. A recipe only names
//! them, and what a name stands for can change.
use super::manifest::Manifest;
use super::network;
use super::weights::Weights;
use crate::Registries;
use crate::recipe::{Recipe, Task};
use std::collections::BTreeMap;
use taper_data::{Content, FileRecord, Search};
use tracing::warn;

/// The inputs of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Inputs {
    /// The digests of its data.
    pub data: Vec<Content>,
    /// The file of its first weights.
    pub init_from: Option<FileRecord>,
}

impl From<&Manifest> for Inputs {
    fn from(manifest: &Manifest) -> Self {
        Self { data: manifest.data.content.clone(), init_from: manifest.init_from.clone() }
    }
}

impl Inputs {
    /// What is not what it was; `None` where all is.
    pub fn differ_from(&self, before: &Self) -> Option<String> {
        let splits =
            |inputs: &Self| inputs.data.iter().map(|content| content.split.clone()).collect::<Vec<_>>();
        if splits(self) != splits(before) {
            let list = |inputs: &Self| splits(inputs).join(", ");
            return Some(format!("the data was {}, is {}", list(before), list(self)));
        }
        if let Some(change) =
            self.data.iter().zip(&before.data).find_map(|(now, then)| now.differs_from(then))
        {
            return Some(format!("the data: {change}"));
        }
        let weights = |inputs: &Self| inputs.init_from.as_ref().map(|file| file.sha256.clone());
        let (now, then) = (weights(self), weights(before));
        (now != then).then(|| {
            let path = self.init_from.as_ref().or(before.init_from.as_ref()).map_or("", |file| &file.path);
            let short = |sum: Option<String>| sum.map_or("none".into(), |sum| format!("{}…", &sum[..12]));
            format!("the first weights, {path}: sha256 was {}, is {}", short(then), short(now))
        })
    }
}

/// Looks inputs up, each data set once, however many runs name it, and without the network.
pub(crate) struct Look<'a> {
    registries: &'a Registries,
    search: Search,
    known: BTreeMap<String, Result<Vec<Content>, String>>,
}

impl<'a> Look<'a> {
    pub fn new(registries: &'a Registries, search: &Search) -> Self {
        Self { registries, search: Search { offline: true, ..search.clone() }, known: BTreeMap::new() }
    }

    /// The inputs of a recipe as they are now.
    fn inputs(&mut self, recipe: &Recipe) -> Result<Inputs, String> {
        let data = match recipe.task() {
            Task::Problem(_) => Vec::new(),
            Task::Network { data, .. } => {
                let key = format!("{} {} {:?}", data.name, data.verify, data.config);
                let load = || {
                    let loaded = network::load(data, self.registries, &self.search);
                    loaded.map(|loaded| loaded.provenance.content).map_err(|e| {
                        warn!("{}: finished before; its data cannot be compared: {e}", recipe.name);
                        e.to_string()
                    })
                };
                self.known.entry(key).or_insert_with(load).clone()?
            }
        };
        let weights = |from: &str| Weights::read(recipe, from).map_err(|e| e.to_string());
        let init_from = recipe.train.init_from.as_deref().map(weights).transpose().map_err(|e| {
            warn!("{}: finished before; its first weights cannot be compared: {e}", recipe.name);
            e
        })?;
        Ok(Inputs { data, init_from: init_from.map(|weights| weights.file) })
    }

    /// What of a finished run's inputs is not what it was; `None` where all is, and where that cannot be told, which is said.
    pub fn change(&mut self, recipe: &Recipe, before: &Inputs) -> Option<String> {
        self.inputs(recipe).ok()?.differ_from(before)
    }
}
