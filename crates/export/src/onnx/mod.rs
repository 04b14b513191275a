//! ONNX: the network in evaluation mode as a graph of standard operators, in one file.
//!
//! | network | inputs | outputs |
//! | --- | --- | --- |
//! | for images | `images`: float \[n, channels, rows, columns\], normalised | `logits`: \[n, classes\] |
//! | LSTM | `tokens`: int64 \[steps, batch\]; `h.<l>`, `c.<l>`: \[1, batch, units\] of each layer | `logits`: \[steps, batch, vocabulary\]; `h.<l>.after`, `c.<l>.after` |
//!
//! | GPT | `tokens`: int64 \[batch, tokens\] | `logits`: \[batch, tokens, vocabulary\] |
//!
//! Parameters keep their names, but for those of an LSTM, whose gates stand in another order in ONNX.
mod graph;
mod nets;
mod proto;
mod transformers;

use crate::{Error, Network, Result};
use proto::Message;

/// The opsets that can be written: `Squeeze` takes its axes as an input from 13 on, and nothing that is used here changed its
/// meaning up to 21.
pub const OPSETS: std::ops::RangeInclusive<u16> = 13..=21;

/// The opset that is written unless another is asked for: read by every runtime since 2021.
pub const DEFAULT_OPSET: u16 = 17;

/// A protobuf message has less than 2³¹ bytes; so much is left for what is not numbers.
pub(crate) const MOST_BYTES: usize = (1 << 31) - (1 << 24);

/// The bytes of an ONNX file of this opset, with text about it.
pub fn onnx(network: &Network, opset: u16, metadata: &[(String, String)]) -> Result<Vec<u8>> {
    if !OPSETS.contains(&opset) {
        return Err(Error::Opset { least: *OPSETS.start(), most: *OPSETS.end(), found: opset });
    }
    let bytes: usize = network.tensors.values().map(|t| t.elem_count().saturating_mul(4)).sum();
    if bytes > MOST_BYTES {
        let reason = format!(
            "its {bytes} bytes of weights do not fit into one protobuf message of 2 GB; safetensors has no limit"
        );
        return Err(Error::Unsupported { form: "ONNX", reason });
    }
    // ModelProto: ir_version = 1, producer_name = 2, producer_version = 3, graph = 7, opset_import = 8, metadata_props = 14;
    // OperatorSetIdProto: domain = 1, version = 2; StringStringEntryProto: key = 1, value = 2.
    let opsets = Message::default().text(1, "").int(2, opset.into());
    let model = Message::default()
        .int(1, format_version(opset))
        .text(2, "taper")
        .text(3, env!("CARGO_PKG_VERSION"))
        .message(7, &nets::graph(network)?)
        .message(8, &opsets)
        .each(metadata, |model, (key, value)| {
            model.message(14, &Message::default().text(1, key).text(2, value))
        });
    Ok(model.finish())
}

/// The version of the file format that came with an opset.
fn format_version(opset: u16) -> i64 {
    match opset {
        ..=13 => 7,
        14..=18 => 8,
        19..=20 => 9,
        _ => 10,
    }
}
