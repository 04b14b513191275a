//! TensorBoard's event file: length-framed protobuf records with masked CRC-32C checksums.
//!
//! Scalars need three small messages, so they are encoded here: a protobuf crate would bring a code generator.
//! The time of an event is its step in seconds, so that equal runs have equal bytes; `taper track --to tensorboard` makes a file
//! with true times of it, of the same pieces.
use super::metrics::Record;

/// The file's name in a run's folder.
pub(crate) const FILE: &str = "events.out.tfevents.0.taper";

/// The first record: which version of the format follows, and when it begins.
pub fn header(time: f64) -> Vec<u8> {
    let mut event = double(1, time);
    event.extend(bytes(3, b"brain.Event:2"));
    frame(&event)
}

/// The whole file of these records.
pub(crate) fn file(records: &[Record]) -> Vec<u8> {
    records.iter().fold(header(0.0), |mut file, record| {
        file.extend(event(record, record.step as f64));
        file
    })
}

/// A record of metrics as one event, at a time.
pub fn event(record: &Record, time: f64) -> Vec<u8> {
    let mut summary = Vec::new();
    for (name, value) in &record.values {
        let mut scalar = bytes(1, format!("{name}/{}", record.split.name()).as_bytes());
        scalar.push(2 << 3 | 5); // simple_value, a 32-bit float
        scalar.extend((*value as f32).to_le_bytes());
        summary.extend(bytes(1, &scalar));
    }
    summary_event(&summary, record.step, time)
}

/// An event that holds a `Summary`.
pub fn summary_event(summary: &[u8], step: u64, time: f64) -> Vec<u8> {
    let mut event = double(1, time);
    event.push(2 << 3); // step, a varint
    event.extend(varint(step));
    event.extend(bytes(5, summary));
    frame(&event)
}

/// A record of the file: its length, the data, and their checksums.
pub fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked_crc(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked_crc(data).to_le_bytes());
    out
}

/// A field of 64 bits.
pub fn double(field: u8, value: f64) -> Vec<u8> {
    let mut out = vec![field << 3 | 1];
    out.extend(value.to_le_bytes());
    out
}

/// A field of bytes: a text, or another message.
pub fn bytes(field: u64, data: &[u8]) -> Vec<u8> {
    let mut out = varint(field << 3 | 2);
    out.extend(varint(data.len() as u64));
    out.extend(data);
    out
}

/// A number in as few bytes as it takes.
pub fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// A CRC of 32 bits by its polynomial, the lowest bit first.
pub fn crc(polynomial: u32, data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { crc >> 1 ^ polynomial } else { crc >> 1 },
        )
    })
}

/// CRC-32C (Castagnoli), rotated and offset as TFRecord asks.
fn masked_crc(data: &[u8]) -> u32 {
    let crc = crc(0x82f6_3b78, data);
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnoli() {
        // The check value of CRC-32C for "123456789" is e3069283.
        let mask = |crc: u32| crc.rotate_right(15).wrapping_add(0xa282_ead8);
        assert_eq!(masked_crc(b"123456789"), mask(0xe306_9283));
    }
}
