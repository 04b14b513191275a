//! Numbers in JSON that may be no numbers: a perplexity can be infinite, and JSON has no word for it.
use serde::de::{Deserialize, Deserializer, Error};
use serde::ser::{Serialize, Serializer};

/// Written as a number where it is finite, else as the text `inf`, `-inf` or `NaN`, which reads back.
#[derive(Clone, Copy, Debug)]
struct Number(f64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.is_finite() {
            true => serializer.serialize_f64(self.0),
            false => serializer.collect_str(&self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged, expecting = "expected a number, `inf`, `-inf` or `NaN`")]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(Self(value)),
            Written::Text(text) => match text.as_str() {
                "inf" => Ok(Self(f64::INFINITY)),
                "-inf" => Ok(Self(f64::NEG_INFINITY)),
                "NaN" => Ok(Self(f64::NAN)),
                _ => Err(D::Error::custom(format!("expected a number, found the text `{text}`"))),
            },
        }
    }
}

/// For one number.
pub(crate) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    Number(*value).serialize(serializer)
}

/// For one number.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Number::deserialize(deserializer)?.0)
}

/// For numbers by name.
pub(crate) mod map {
    use super::{Deserialize, Deserializer, Number, Serializer};
    use std::collections::BTreeMap;

    pub fn serialize<S: Serializer>(map: &BTreeMap<String, f64>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(map.iter().map(|(name, value)| (name, Number(*value))))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, f64>, D::Error> {
        let map = BTreeMap::<String, Number>::deserialize(deserializer)?;
        Ok(map.into_iter().map(|(name, value)| (name, value.0)).collect())
    }
}
