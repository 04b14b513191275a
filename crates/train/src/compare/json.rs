//! Differences between two JSON values, leaf by leaf.
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// A key whose value is not the same in both; `None` where a side lacks it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Setting {
    /// The path of the key: `optimizer.lr`.
    pub key: String,
    /// The first one's value.
    pub a: Option<String>,
    /// The second one's value.
    pub b: Option<String>,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: &Option<String>| side.clone().unwrap_or_else(|| "nothing".to_owned());
        write!(f, "{}: {} | {}", self.key, side(&self.a), side(&self.b))
    }
}

/// All leaves that differ: the first value's in its order, then what only the second has.
pub(super) fn differences(a: &Value, b: &Value) -> Vec<Setting> {
    let (a, b) = (leaves(a), leaves(b));
    let find = |leaves: &[(String, String)], key: &str| {
        leaves.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone())
    };
    let mut out = Vec::new();
    for (key, value) in &a {
        let other = find(&b, key);
        if other.as_ref() != Some(value) {
            out.push(Setting { key: key.clone(), a: Some(value.clone()), b: other });
        }
    }
    for (key, value) in b {
        if find(&a, &key).is_none() {
            out.push(Setting { key, a: None, b: Some(value) });
        }
    }
    out
}

fn leaves(value: &Value) -> Vec<(String, String)> {
    fn walk(path: &str, value: &Value, out: &mut Vec<(String, String)>) {
        let child = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                entries.iter().for_each(|(key, value)| walk(&child(key), value, out));
            }
            Value::Null => {}
            leaf => out.push((path.to_owned(), leaf.to_string())),
        }
    }
    let mut out = Vec::new();
    walk("", value, &mut out);
    out
}
