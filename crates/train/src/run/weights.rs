//! Weights that a recipe names, and statistics that are put back.
use super::{EVALUATION_WEIGHTS, RunError, checkpoint};
use crate::Recipe;
use candle_core::{Device, Tensor, Var};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use taper_data::FileRecord;
use taper_files::sha256;
use taper_models::Params;
use taper_models::init::is_buffer;

/// A file of weights may have this many bytes: what the largest network takes that can be built.
const MOST_BYTES: u64 = 4 * taper_models::registry::MOST_PARAMETERS;

/// The weights that a run starts from.
pub(crate) struct Weights {
    pub tensors: HashMap<String, Tensor>,
    pub file: FileRecord,
}

impl Weights {
    /// From a safetensors file, a checkpoint's folder, or a run's folder, whose newest checkpoint it is. Of a checkpoint, the
    /// weights that its optimizer evaluates with, where it has such.
    pub fn read(recipe: &Recipe, from: &str) -> Result<Self, RunError> {
        let refuse = |message: String| RunError::from(recipe.error_at("train.init_from", message));
        let path = Path::new(from);
        let place = place(path).map_err(refuse)?;
        let bytes = match place.parent().filter(|_| path.is_dir()) {
            // A checkpoint vouches for its files.
            Some(folder) => {
                let mut loaded = checkpoint::read(folder).map_err(|e| refuse(e.to_string()))?;
                let missing = || refuse(format!("{}: has no {MODEL}", folder.display()));
                let evaluation = loaded.files.remove(EVALUATION_WEIGHTS);
                evaluation.or_else(|| loaded.files.remove(MODEL)).ok_or_else(missing)?
            }
            None => taper_files::read_regular(&place, MOST_BYTES).map_err(|e| refuse(e.to_string()))?,
        };
        let tensors = tensors(&bytes).map_err(|e| refuse(format!("{}: {e}", place.display())))?;
        let file = FileRecord {
            path: place.display().to_string(),
            bytes: bytes.len() as u64,
            sha256: sha256(&bytes),
        };
        Ok(Self { tensors, file })
    }
}

/// The weights as they are trained.
pub(crate) const MODEL: &str = "model.safetensors";

/// The file of weights that a path stands for.
fn place(path: &Path) -> Result<PathBuf, String> {
    let found = fs::metadata(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => format!("{}: there is no such file", path.display()),
        _ => format!("{}: {e}", path.display()),
    })?;
    if found.is_file() {
        return Ok(path.to_path_buf());
    }
    let expected = "expected a safetensors file, the folder of a checkpoint or the folder of a run";
    if !found.is_dir() {
        // A pipe or a device, which says so itself.
        return taper_files::open_regular(path).map(|_| path.to_path_buf()).map_err(|e| e.to_string());
    }
    if path.join("state.json").is_file() {
        return Ok(path.join(MODEL));
    }
    match checkpoint::steps(path).map_err(|e| e.to_string())?.first() {
        Some(step) => Ok(checkpoint::path(path, *step).join(MODEL)),
        None => Err(format!("{}: {expected}; it has no checkpoint", path.display())),
    }
}

/// The tensors of a safetensors file. The error is a sentence about the file.
fn tensors(bytes: &[u8]) -> Result<HashMap<String, Tensor>, String> {
    // The length of the header in eight bytes, then the header, a JSON object.
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    if length.is_none_or(|length| length > bytes.len() as u64 - 8 || bytes.get(8) != Some(&b'{')) {
        return Err("expected a safetensors file, found one that does not begin like one".into());
    }
    candle_core::safetensors::load_buffer(bytes, &Device::Cpu)
        .map_err(|e| format!("not a readable safetensors file: {e}"))
}

/// The running statistics of a model at one moment.
pub(super) struct Buffers(Vec<(Var, Tensor)>);

impl Buffers {
    pub fn of(params: &Params) -> Result<Self, RunError> {
        let buffers = params.vars().into_iter().filter(|(name, _)| is_buffer(name));
        let copies = buffers.map(|(_, var)| Ok((var.clone(), var.as_tensor().copy()?)));
        Ok(Self(copies.collect::<candle_core::Result<_>>()?))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn restore(&self) -> Result<(), RunError> {
        Ok(self.0.iter().try_for_each(|(var, was)| var.set(was))?)
    }
}
