//! Saved optimizer state: tensors and exact scalars in one safetensors file.
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The scalars of one parameter.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParamScalars {
    /// Steps taken.
    pub t: u64,
    /// The rule's numbers by name (DecGD: `prev_lr`).
    pub memory: BTreeMap<String, f64>,
}

/// What is not a tensor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The registry name of the optimizer.
    pub optimizer: String,
    /// Scalars by parameter.
    pub params: BTreeMap<String, ParamScalars>,
}

/// All state of an optimizer: buffers `<parameter>.<buffer>` and a header.
#[derive(Clone, Debug, Default)]
pub struct StateDict {
    /// The header, saved in the file's metadata as JSON.
    pub header: Header,
    /// The buffers, shaped as their parameters.
    pub tensors: BTreeMap<String, Tensor>,
}

const KEY: &str = "taper";

impl StateDict {
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

    /// Writes a safetensors file.
    pub fn save(&self, path: &Path) -> Result<()> {
        std::fs::write(path, self.to_bytes()?)
            .map_err(|source| Error::Io { path: path.display().to_string(), source })
    }

    /// Reads a safetensors file.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes =
            std::fs::read(path).map_err(|source| Error::Io { path: path.display().to_string(), source })?;
        Self::from_bytes(&bytes)
    }
}
