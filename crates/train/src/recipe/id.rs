//! A run's id: equal settings have equal ids, however they were written.

use std::fmt::Write;

use serde_json::{Number, Value};
use sha2::{Digest, Sha256};

/// Hexadecimal digits of an id.
const DIGITS: usize = 12;

/// The id of a resolved recipe.
pub(super) fn id(recipe: &Value) -> String {
    let digest = Sha256::digest(canonical(recipe));
    digest.iter().take(DIGITS / 2).fold(String::with_capacity(DIGITS), |mut id, byte| {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    })
}

/// JSON with sorted keys, without spaces, nulls, and the root's `name`; `1` and `1.0` are both `1`.
pub(super) fn canonical(recipe: &Value) -> String {
    let mut out = String::new();
    match recipe {
        Value::Object(entries) => {
            let settings =
                entries.iter().filter(|(key, _)| !matches!(key.as_str(), "name" | "extends" | "sweep"));
            write_map(settings, &mut out);
        }
        other => write_value(other, &mut out),
    }
    out
}

fn write_map<'a>(entries: impl Iterator<Item = (&'a String, &'a Value)>, out: &mut String) {
    // A null is a key that is not set; a key that a later version adds leaves old ids alone.
    let mut entries: Vec<_> = entries.filter(|(_, value)| !value.is_null()).collect();
    entries.sort_by_key(|(key, _)| *key);
    out.push('{');
    for (position, (key, value)) in entries.into_iter().enumerate() {
        if position > 0 {
            out.push(',');
        }
        out.push_str(&Value::from(key.as_str()).to_string());
        out.push(':');
        write_value(value, out);
    }
    out.push('}');
}

fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Object(entries) => write_map(entries.iter(), out),
        Value::Array(items) => {
            out.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                write_value(item, out);
            }
            out.push(']');
        }
        Value::Number(number) => out.push_str(&number_text(number)),
        other => out.push_str(&other.to_string()),
    }
}

/// Whole floats as integers, other floats in their shortest form that reads back the same.
fn number_text(number: &Number) -> String {
    /// Up to here an f64 holds every integer.
    const EXACT: f64 = (1u64 << 53) as f64;
    match number.as_f64() {
        Some(float) if number.is_f64() && float.fract() == 0.0 && float.abs() <= EXACT => {
            format!("{}", float as i64)
        }
        _ => number.to_string(),
    }
}
