//! Saved optimizer state: tensors and exact scalars in one safetensors file.
use crate::{Error, Precision, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The scalars of one parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamScalars {
    /// Steps taken.
    pub t: u64,
    /// Its group, a place in [`Header::groups`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub group: usize,
    /// The rule's numbers by name (DecGD: `prev_lr`).
    #[serde(with = "exact")]
    pub memory: BTreeMap<String, f64>,
}

/// The hyperparameters of one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedGroup {
    /// The pattern; `None` for the default group.
    #[serde(rename = "match", default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// All hyperparameters.
    pub config: Map<String, Value>,
}

/// What is not a tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The registry name of the optimizer.
    pub optimizer: String,
    /// Whether parameters are named by their place in a list whose order nobody vouched for. Missing in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_position: Option<bool>,
    /// The learning rate of the default group. Missing in older files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// The hyperparameters, the default group first. Missing in older files.
    #[serde(default, skip_serializing_if = "is_default")]
    pub groups: Vec<SavedGroup>,
    /// How parameters of half precision are trained.
    #[serde(default, skip_serializing_if = "is_default")]
    pub precision: Precision,
    /// Scalars by parameter.
    pub params: BTreeMap<String, ParamScalars>,
    /// Scalars of the optimizer as a whole.
    #[serde(default, skip_serializing_if = "is_default", with = "exact")]
    pub shared: BTreeMap<String, f64>,
    /// The headers of the optimizers it is made of.
    #[serde(default, skip_serializing_if = "is_default")]
    pub parts: BTreeMap<String, Header>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Numbers by name that come back to the bit: JSON has no word for those that are not finite, so they are written as text.
mod exact {
    use super::BTreeMap;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Number {
        Finite(f64),
        Word(String),
    }

    pub fn serialize<S: Serializer>(map: &BTreeMap<String, f64>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(map.iter().map(|(name, value)| {
            (name, if value.is_finite() { Number::Finite(*value) } else { Number::Word(value.to_string()) })
        }))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, f64>, D::Error> {
        let map = BTreeMap::<String, Number>::deserialize(deserializer)?;
        map.into_iter()
            .map(|(name, number)| match number {
                Number::Finite(value) => Ok((name, value)),
                Number::Word(word) => match word.as_str() {
                    "NaN" => Ok((name, f64::NAN)),
                    "inf" => Ok((name, f64::INFINITY)),
                    "-inf" => Ok((name, f64::NEG_INFINITY)),
                    _ => Err(D::Error::custom(format!("expected a number, found `{word}`"))),
                },
            })
            .collect()
    }
}

/// What may differ between an optimizer and the state it loads. By default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    pub(crate) same_order: bool,
    pub(crate) keep_hyperparameters: bool,
}

impl Load {
    /// Nothing may differ.
    pub fn strict() -> Self {
        Self::default()
    }
    /// Vouches that parameters named by position have the order they had when the state was saved.
    pub fn same_order(self) -> Self {
        Self { same_order: true, ..self }
    }
    /// The optimizer's own hyperparameters, groups and learning rate stay, whatever those of the state are.
    pub fn keep_hyperparameters(self) -> Self {
        Self { keep_hyperparameters: true, ..self }
    }
}

/// All state of an optimizer: buffers `<parameter>.<buffer>` and a header.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// The header, saved in the file's metadata as JSON.
    pub header: Header,
    /// The buffers.
    pub tensors: BTreeMap<String, Tensor>,
}

const KEY: &str = "taper";

impl StateDict {
    /// Puts the state of an optimizer that this one is made of beside it, under a name.
    pub fn insert_part(&mut self, name: &str, part: StateDict) {
        self.header.parts.insert(name.to_owned(), part.header);
        let tensors = part.tensors.into_iter();
        self.tensors.extend(tensors.map(|(key, tensor)| (format!("{name}/{key}"), tensor)));
    }

    /// Takes out what [`StateDict::insert_part`] put in.
    pub fn take_part(&mut self, name: &str) -> Result<StateDict> {
        let missing = || Error::State(vec![format!("part `{name}` is missing")]);
        let header = self.header.parts.remove(name).ok_or_else(missing)?;
        let prefix = format!("{name}/");
        let own = std::mem::take(&mut self.tensors);
        let (part, own): (BTreeMap<_, _>, _) = own.into_iter().partition(|(key, _)| key.starts_with(&prefix));
        self.tensors = own;
        let tensors =
            part.into_iter().map(|(key, tensor)| (key[prefix.len()..].to_owned(), tensor)).collect();
        Ok(StateDict { header, tensors })
    }

    /// The bytes of a safetensors file; equal state gives equal bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let header = serde_json::to_string(&self.header).map_err(candle_core::Error::wrap)?;
        let metadata = HashMap::from([(KEY.to_owned(), header)]);
        Ok(safetensors::serialize(&self.tensors, Some(metadata)).map_err(candle_core::Error::wrap)?)
    }

    /// Reads what [`StateDict::to_bytes`] wrote.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let damaged = |what: String| Error::State(vec![what]);
        let (_, metadata) =
            safetensors::SafeTensors::read_metadata(bytes).map_err(|e| damaged(e.to_string()))?;
        let header = metadata.metadata().as_ref().and_then(|m| m.get(KEY));
        let header = header.ok_or_else(|| damaged(format!("no `{KEY}` entry in the metadata")))?;
        let header = serde_json::from_str(header).map_err(|e| damaged(format!("`{KEY}` entry: {e}")))?;
        let tensors = candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?;
        Ok(Self { header, tensors: tensors.into_iter().collect() })
    }

    /// Writes a safetensors file: beside its place, synced, then renamed, so that an interruption leaves the old file or the
    /// new one.
    pub fn save(&self, path: &Path) -> Result<()> {
        let bytes = self.to_bytes()?;
        let mut beside = path.as_os_str().to_owned();
        beside.push(format!(".{}.new", std::process::id()));
        let beside = Path::new(&beside);
        let write = || {
            let mut file = std::fs::File::create(beside)?;
            std::io::Write::write_all(&mut file, &bytes)?;
            file.sync_all()?;
            std::fs::rename(beside, path)?;
            // The name is in the folder, which has to reach the disk too. Not every system opens folders.
            let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            if let Ok(folder) = std::fs::File::open(folder) {
                folder.sync_all()?;
            }
            Ok(())
        };
        write().map_err(|source| {
            let _ = std::fs::remove_file(beside);
            Error::Io { path: path.display().to_string(), source }
        })
    }

    /// Reads a safetensors file.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes =
            std::fs::read(path).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
        Self::from_bytes(&bytes)
    }
}
