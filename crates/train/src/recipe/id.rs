//! A run's id: equal settings have equal ids, however they were written, and what cannot change a result has no say.

use std::fmt::Write;

use serde_json::{Map, Number, Value};
use sha2::{Digest, Sha256};
use taper_optim::Schedule;

/// Hexadecimal digits of an id.
const DIGITS: usize = 12;

/// Settings that change no weight and no result, only what is called, kept, logged, checked or waited for.
const NO_RESULT: [&str; 10] = [
    "name",
    "extends",
    "sweep",
    "data.verify",
    "train.log_every",
    "train.probe",
    "train.checkpoint",
    "train.budget.seconds",
    "train.on_divergence",
    "train.shard_state",
];

/// Whether a setting, by its path, changes no result.
pub(crate) fn changes_no_result(path: &str) -> bool {
    let within =
        |key: &&str| path.strip_prefix(*key).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    NO_RESULT.iter().any(within)
}

/// The length of a run.
const LENGTH: [&str; 2] = ["train.epochs", "train.steps"];

/// The id of a resolved recipe.
pub(super) fn id(recipe: &Value) -> String {
    digits(&canonical(recipe))
}

/// What runs share that differ in their length alone.
pub(super) fn series(recipe: &Value) -> String {
    let mut settings = settings(recipe);
    let unit = LENGTH.iter().find(|key| at(&settings, key).is_some_and(|value| !value.is_null()));
    LENGTH.iter().for_each(|key| remove(&mut settings, key));
    let mut text = canonical_value(&settings);
    text.push_str(unit.unwrap_or(&""));
    digits(&text)
}

fn digits(text: &str) -> String {
    let digest = Sha256::digest(text);
    digest.iter().take(DIGITS / 2).fold(String::with_capacity(DIGITS), |mut id, byte| {
        // Writing to a String cannot fail.
        let _ = write!(id, "{byte:02x}");
        id
    })
}

/// The settings that a result depends on, as JSON with sorted keys, without spaces and nulls; `1` and `1.0` are both `1`.
pub(super) fn canonical(recipe: &Value) -> String {
    canonical_value(&settings(recipe))
}

fn canonical_value(value: &Value) -> String {
    let mut out = String::new();
    write_value(value, &mut out);
    out
}

/// What of a recipe its results depend on, defaults filled in where the recipe leaves them open.
fn settings(recipe: &Value) -> Value {
    let mut settings = recipe.clone();
    NO_RESULT.iter().for_each(|key| remove(&mut settings, key));
    if let Some(schedule) = recipe.get("schedule").and_then(schedule) {
        settings["schedule"] = schedule;
    }
    // Every epoch is what no number means.
    let every_epoch = at(&settings, "train.epochs").is_some_and(Value::is_u64)
        && at(&settings, "train.eval_every").and_then(Value::as_u64) == Some(1);
    if every_epoch {
        remove(&mut settings, "train.eval_every");
    }
    settings
}

/// A schedule with all its keys; `None` for one that cannot be read, which has the id it was written with.
fn schedule(section: &Value) -> Option<Value> {
    let mut own = section.as_object()?.clone();
    let (per, momentum) = (own.remove("per"), own.remove("momentum"));
    let complete = |map: &Map<String, Value>| serde_json::to_value(Schedule::from_map(map).ok()?).ok();
    let mut full = complete(&own)?;
    full["per"] = per.filter(|per| !per.is_null()).unwrap_or_else(|| "epoch".into());
    if let Some(momentum) = momentum.filter(|momentum| !momentum.is_null()) {
        full["momentum"] = complete(momentum.as_object()?)?;
    }
    Some(full)
}

fn at<'a>(value: &'a Value, key: &str) -> Option<&'a Value> {
    key.split('.').try_fold(value, |value, key| value.get(key))
}

fn remove(value: &mut Value, key: &str) {
    let (section, last) = key.rsplit_once('.').map_or((None, key), |(section, last)| (Some(section), last));
    let section = match section {
        Some(section) => section.split('.').try_fold(value, |value, key| value.get_mut(key)),
        None => Some(value),
    };
    if let Some(Value::Object(entries)) = section {
        entries.shift_remove(last);
    }
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
