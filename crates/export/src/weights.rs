//! Safetensors.
use crate::Result;
use candle_core::Tensor;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use taper_models::gpt::{HEAD, tied_table};

/// A safetensors file with metadata in its header, in the order given. (The library would put it in the order of a hash, another
/// in every process.)
///
/// A language model whose head is its embedding has it under both names, as the state of nanoGPT's and of Hugging Face's modules has:
/// a strict `load_state_dict` asks for both.
pub fn weights(tensors: &BTreeMap<String, Tensor>, metadata: &[(String, String)]) -> Result<Vec<u8>> {
    let head = HEAD.to_owned();
    let contiguous = tensors.iter().map(|(name, tensor)| Ok((name, tensor.contiguous()?)));
    let mut contiguous = contiguous.collect::<Result<BTreeMap<_, _>>>()?;
    if let Some(table) = tied_table(|name| tensors.contains_key(name)).and_then(|table| tensors.get(table)) {
        contiguous.insert(&head, table.contiguous()?);
    }
    let plain = safetensors::serialize(&contiguous, None)?;
    // Eight bytes that say how long the header is, the header, the numbers: places in the header count from there.
    let (length, rest) = plain.split_first_chunk().unwrap_or((&[0; 8], &[]));
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX).min(rest.len());
    let (header, numbers) = rest.split_at(length);
    let text = metadata.iter().map(|(key, value)| (key.clone(), Value::String(value.clone())));
    let mut whole = Map::from_iter([("__metadata__".to_owned(), Value::Object(text.collect()))]);
    whole.extend(serde_json::from_slice::<Map<String, Value>>(header)?);
    let mut header = serde_json::to_vec(&whole)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    Ok([&(header.len() as u64).to_le_bytes()[..], &header, numbers].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_file_reads_back_with_its_metadata_in_order() {
        let tensor = Tensor::new(&[[1f32, 2.0], [3.0, f32::NAN]], &Device::Cpu).unwrap();
        let count = Tensor::new(7i64, &Device::Cpu).unwrap();
        let tensors = BTreeMap::from([("w".to_owned(), tensor.t().unwrap()), ("n".to_owned(), count)]);
        let metadata = [("z", "last \"quoted\""), ("a", "ö\n")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let bytes = weights(&tensors, &metadata).unwrap();
        let back = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        assert_eq!(back["w"].to_vec2::<f32>().unwrap()[0], [1.0, 3.0]);
        assert!(back["w"].to_vec2::<f32>().unwrap()[1][1].is_nan());
        assert_eq!(back["n"].to_scalar::<i64>().unwrap(), 7);
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["z"], "last \"quoted\"");
        let text = String::from_utf8_lossy(&bytes);
        assert!(text.find("\"z\"") < text.find("\"a\""));
    }
}
