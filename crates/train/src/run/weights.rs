//! Weights that a recipe names.
use candle_core::{Device, Tensor};
use std::collections::HashMap;
use std::path::Path;

/// A file of weights may have this many bytes: what the largest network takes that can be built.
const MOST_BYTES: u64 = 4 * taper_models::registry::MOST_PARAMETERS;

/// The tensors of a safetensors file. The error is a sentence about the file.
pub(super) fn read(path: &Path) -> Result<HashMap<String, Tensor>, String> {
    let bytes = taper_files::read_regular(path, MOST_BYTES).map_err(|e| match e.source.kind() {
        std::io::ErrorKind::NotFound => format!("{}: there is no such file", path.display()),
        _ => e.to_string(),
    })?;
    let place = path.display();
    // The length of the header in eight bytes, then the header, a JSON object.
    let length = bytes.first_chunk().map(|length| u64::from_le_bytes(*length));
    if length.is_none_or(|length| length > bytes.len() as u64 - 8 || bytes.get(8) != Some(&b'{')) {
        return Err(format!("{place}: expected a safetensors file, found one that does not begin like one"));
    }
    candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
        .map_err(|e| format!("{place}: not a readable safetensors file: {e}"))
}
