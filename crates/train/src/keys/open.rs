//! The open sections: what each registered name has for keys of its own.

use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::probe;
use crate::recipe::{Range, SectionError, Sections, common_range, generator};
use crate::{Registries, Schedules};
use taper_optim::Schedule;

/// A name that a section can have in its tag.
pub(super) struct Named {
    pub name: String,
    pub aliases: Vec<String>,
    pub about: String,
    /// Its own keys, each as a schema.
    pub keys: Map<String, Value>,
}

/// What a registry says to the keys of a section: why it refuses them, if it does.
type Judge<'a> = &'a dyn Fn(&Map<String, Value>) -> Option<SectionError>;

pub(super) fn optimizers(registries: &Registries) -> Vec<Named> {
    // `*` is a pattern that can be read.
    let all = registries.optimizers.list("*").into_iter().flatten();
    let named = all.map(|entry| {
        let name = entry.info.name;
        let judge = |keys: &Map<String, Value>| {
            let common = keys.iter().find(|(key, value)| {
                common_range(key).zip(value.as_f64()).is_some_and(|(range, number)| !range.takes(number))
            });
            match common {
                Some((key, _)) => {
                    let key = Some(key.clone());
                    Some(SectionError { key, message: "expected another".into(), known: Vec::new() })
                }
                None => registries.check_optimizer(name, keys).err(),
            }
        };
        let mut keys = keys(entry.schema, &entry.defaults, &judge);
        // A map in an optimizer's configuration is another optimizer.
        for schema in keys.values_mut().filter(|schema| schema["type"] == "object") {
            if let Value::Object(schema) = schema {
                schema.retain(|key, _| matches!(key.as_str(), "description" | "default"));
                schema.insert("$ref".into(), "#/$defs/inner-optimizer".into());
            }
        }
        let paper =
            if entry.info.paper.is_empty() { String::new() } else { format!(". {}", entry.info.paper) };
        Named {
            name: name.to_owned(),
            aliases: entry.aliases.clone(),
            about: format!("{}{paper}", entry.info.about),
            keys,
        }
    });
    named.collect()
}

pub(super) fn models(registries: &Registries) -> Vec<Named> {
    let named = registries.models.list().map(|entry| {
        let judge = |keys: &Map<String, Value>| registries.check_model(entry.name, keys).err();
        let defaults = match entry.check(&Value::Null) {
            Ok(Value::Object(defaults)) => defaults,
            _ => Map::new(),
        };
        let keys = keys(entry.schema, &defaults, &judge);
        Named { name: entry.name.to_owned(), aliases: Vec::new(), about: entry.about.to_owned(), keys }
    });
    named.collect()
}

pub(super) fn problems(registries: &Registries) -> Vec<Named> {
    let named = registries.problems.list().map(|problem| {
        let judge = |keys: &Map<String, Value>| registries.check_problem(problem.name, keys).err();
        let defaults = registries.check_problem(problem.name, &Map::new()).unwrap_or_default();
        let keys = keys(problem.schema, &defaults, &judge);
        Named { name: problem.name.to_owned(), aliases: Vec::new(), about: problem.about.to_owned(), keys }
    });
    named.collect()
}

/// The data sets with their options; those that every data set has are the recipe's.
pub(super) fn data(registries: &Registries, fixed: &Map<String, Value>) -> Vec<Named> {
    let named = registries.data.list().map(|set| {
        let (name, description) = (set.name(), set.describe());
        let types = set.schema(&mut generator()).map(properties).unwrap_or_default();
        let judge = |keys: &Map<String, Value>| registries.check_data(name, keys).err();
        let own = description.options.iter().filter(|option| !fixed.contains_key(option.name));
        let keys = own.map(|option| {
            let default = serde_json::from_str(option.default).unwrap_or_else(|_| option.default.into());
            let mut schema = types.get(option.name).cloned().unwrap_or_else(|| json!({}));
            finish(&mut schema, option.name, &default, &judge);
            schema["description"] = option.doc.into();
            (option.name.to_owned(), schema)
        });
        Named { name: name.to_owned(), aliases: Vec::new(), about: description.summary, keys: keys.collect() }
    });
    named.collect()
}

/// The kinds of schedules, each with the keys that all have.
pub(super) fn schedules() -> Vec<Named> {
    let schema = generator().into_root_schema_for::<Schedule>().to_value();
    let variants = schema["oneOf"].as_array().cloned().unwrap_or_default();
    let named = Schedule::KINDS.iter().map(|kind| {
        let variant = variants.iter().find(|variant| variant["properties"]["kind"]["const"] == *kind);
        let judge = |keys: &Map<String, Value>| Schedules::new(kind, keys).err();
        let described = variant.and_then(|variant| variant["properties"].as_object());
        let mut keys = Map::new();
        for (key, default) in Schedule::defaults(kind).unwrap_or_default() {
            let mut schema = described.and_then(|keys| keys.get(&key)).cloned().unwrap_or_else(|| json!({}));
            if key == "parts" {
                let about = schema["description"].take();
                schema = json!({
                    "description": about,
                    "type": "array",
                    "minItems": 1,
                    "items": { "$ref": "#/$defs/part-of-a-sequence" },
                });
            } else {
                finish(&mut schema, &key, &default, &judge);
            }
            keys.insert(key, schema);
        }
        let about = variant.and_then(|variant| variant["description"].as_str()).unwrap_or_default();
        Named { name: (*kind).to_owned(), aliases: Vec::new(), about: about.to_owned(), keys }
    });
    named.collect()
}

/// All keys that have a default, with what is known of each.
fn keys(
    describe: Option<fn(&mut SchemaGenerator) -> Schema>,
    defaults: &Map<String, Value>,
    judge: Judge<'_>,
) -> Map<String, Value> {
    let types = describe.map(|describe| properties(describe(&mut generator()))).unwrap_or_default();
    let keys = defaults.iter().map(|(key, default)| {
        let mut schema = types.get(key).cloned().unwrap_or_else(|| like(default));
        finish(&mut schema, key, default, judge);
        (key.clone(), schema)
    });
    keys.collect()
}

fn properties(schema: Schema) -> Map<String, Value> {
    match schema.to_value().get_mut("properties").map(Value::take) {
        Some(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// The type of a key that nothing documents: its default's.
fn like(default: &Value) -> Value {
    match default {
        Value::Bool(_) => json!({ "type": "boolean" }),
        Value::Number(number) if number.is_u64() => json!({ "type": "integer" }),
        Value::Number(_) => json!({ "type": "number" }),
        Value::String(_) => json!({ "type": "string" }),
        Value::Array(_) => json!({ "type": "array" }),
        Value::Object(_) => json!({ "type": "object" }),
        Value::Null => json!({}),
    }
}

/// Puts in the default and the ranges that `judge` has, of lists and of maps inside too.
fn finish(schema: &mut Value, key: &str, default: &Value, judge: Judge<'_>) {
    schema["default"] = default.clone();
    ask(schema, default, &|value| {
        let refused = judge(&Map::from_iter([(key.to_owned(), value)]));
        // A value that is refused for the sake of another key is in its range.
        refused.is_none_or(|error| {
            let blamed = error.key.as_deref().is_some_and(|blamed| within(blamed, key));
            !(blamed && error.message.contains("expected"))
        })
    });
}

/// Whether a path is a key, or leads into it.
fn within(path: &str, key: &str) -> bool {
    path.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

fn ask(schema: &mut Value, default: &Value, takes: &dyn Fn(Value) -> bool) {
    let is = |name: &str| match &schema["type"] {
        Value::String(kind) => kind == name,
        Value::Array(kinds) => kinds.iter().any(|kind| kind == name),
        _ => false,
    };
    let (whole, real) = (is("integer"), is("number"));
    if whole || real {
        let range = probe::range(whole, default.as_f64(), takes);
        if let (Value::Object(schema), true) = (schema, range != Range::default()) {
            range.state(schema);
        }
        return;
    }
    if let (Some(item), Value::Array(items)) = (schema.get_mut("items"), default) {
        // The first of as many as by default.
        let first = items.first().cloned().unwrap_or(Value::Null);
        ask(item, &first, &|value| {
            let rest = items.iter().skip(1).cloned();
            takes(std::iter::once(value).chain(rest).collect())
        });
    }
    if let (Some(Value::Object(keys)), Value::Object(defaults)) = (schema.get_mut("properties"), default) {
        for (key, schema) in keys {
            let default = defaults.get(key).cloned().unwrap_or(Value::Null);
            ask(schema, &default, &|value| {
                let mut whole = defaults.clone();
                whole.insert(key.clone(), value);
                takes(Value::Object(whole))
            });
            schema["default"] = default;
        }
    }
}
