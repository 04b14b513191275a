//! As much of the protobuf encoding as ONNX takes: numbers, bytes and messages inside messages.
//!
//! A field is a tag (its number and how it is encoded) and a value; see <https://protobuf.dev/programming-guides/encoding>. Fields
//! stand in the order in which they are written, so that equal graphs are equal bytes.

/// A message under way.
#[derive(Clone, Debug, Default)]
pub struct Message(Vec<u8>);

const VARINT: u64 = 0;
const LENGTH: u64 = 2;
const FOUR_BYTES: u64 = 5;

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn tag(&mut self, field: u64, encoding: u64) {
        self.varint(field << 3 | encoding);
    }

    pub fn int(mut self, field: u64, value: i64) -> Self {
        self.tag(field, VARINT);
        self.varint(value as u64);
        self
    }

    pub fn float(mut self, field: u64, value: f32) -> Self {
        self.tag(field, FOUR_BYTES);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.tag(field, LENGTH);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    pub fn message(self, field: u64, value: &Message) -> Self {
        self.bytes(field, &value.0)
    }

    /// A field that is there once for each of some values.
    pub fn each<T>(self, values: impl IntoIterator<Item = T>, add: impl Fn(Self, T) -> Self) -> Self {
        values.into_iter().fold(self, add)
    }

    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::Message;

    #[test]
    fn fields_are_encoded_as_in_the_specification() {
        // The examples of the protobuf documentation: field 1 of 150, field 2 of "testing", the first inside field 3.
        let number = Message::default().int(1, 150);
        assert_eq!(number.clone().finish(), [0x08, 0x96, 0x01]);
        let text = Message::default().text(2, "testing").finish();
        assert_eq!(text, [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        assert_eq!(Message::default().message(3, &number).finish(), [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(Message::default().int(1, -1).finish().len(), 11);
        assert_eq!(Message::default().float(2, 1.0).finish(), [0x15, 0, 0, 0x80, 0x3f]);
    }
}
