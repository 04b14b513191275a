//! What a run is a function of besides its recipe, by content: its data and the weights it starts from. A recipe only names
//! them, and what a name stands for can change.
use super::manifest::Manifest;
use super::{RunError, checkpoint, network};
use crate::Registries;
use crate::recipe::{Recipe, Task};
use candle_core::{Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};
use taper_data::{Content, FileRecord, Search};
use taper_files::sha256;
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

/// The weights that a run starts from.
pub(crate) struct Weights {
    pub tensors: HashMap<String, Tensor>,
    pub file: FileRecord,
}

impl Weights {
    /// From a safetensors file, a checkpoint's folder, or a run's folder, whose newest checkpoint it is.
    pub fn read(recipe: &Recipe, from: &str) -> Result<Self, RunError> {
        let refuse = |message: String| RunError::from(recipe.error_at("train.init_from", message));
        let path = Path::new(from);
        let place = place(path).map_err(refuse)?;
        let bytes = match place.parent().filter(|_| path.is_dir()) {
            // A checkpoint vouches for its files.
            Some(folder) => {
                let mut loaded = checkpoint::read(folder).map_err(|e| refuse(e.to_string()))?;
                let missing = || refuse(format!("{}: has no {MODEL}", folder.display()));
                loaded.files.remove(MODEL).ok_or_else(missing)?
            }
            None => fs::read(&place).map_err(|e| refuse(format!("{}: {e}", place.display())))?,
        };
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
            .map_err(|e| refuse(format!("{}: expected a safetensors file: {e}", place.display())))?;
        let file = FileRecord {
            path: place.display().to_string(),
            bytes: bytes.len() as u64,
            sha256: sha256(&bytes),
        };
        Ok(Self { tensors, file })
    }
}

const MODEL: &str = "model.safetensors";

/// The file of weights that a path stands for.
fn place(path: &Path) -> Result<PathBuf, String> {
    let found = fs::metadata(path).map_err(|e| format!("{}: {e}", path.display()))?;
    if found.is_file() {
        return Ok(path.to_path_buf());
    }
    let expected = "expected a safetensors file, the folder of a checkpoint or the folder of a run";
    if !found.is_dir() {
        return Err(format!("{}: {expected}", path.display()));
    }
    if path.join("state.json").is_file() {
        return Ok(path.join(MODEL));
    }
    match checkpoint::steps(path).map_err(|e| e.to_string())?.first() {
        Some(step) => Ok(checkpoint::path(path, *step).join(MODEL)),
        None => Err(format!("{}: {expected}; it has no checkpoint", path.display())),
    }
}
