//! Which keys a recipe may have: one schema from the types and the registries, for editors ([`schema`]), for the terminal and
//! for `docs/recipes.md` ([`list`]).
//!
//! ```
//! use taper_train::{Registries, keys};
//! let all = keys::list(&Registries::default());
//! let found = keys::find(&all, "optimizer.decgd.c").unwrap();
//! assert_eq!((found[0].kind.as_str(), &found[0].default), ("number", &Some(1.0.into())));
//! assert!(keys::find(&all, "optimzer.decgd.c").unwrap_err().contains("did you mean `optimizer.decgd.c`?"));
//! ```
mod document;
mod open;
mod probe;

pub use document::schema;

use serde::Serialize;
use serde_json::Value;

use crate::Registries;
use crate::recipe::{Range, flow, nearest};

/// One key of a recipe.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Key {
    /// Where it stands, with the name or kind that has it where it belongs to one: `optimizer.decgd.c`, `train.epochs`.
    pub path: String,
    /// The same as a recipe has it: `optimizer.c`.
    pub written: String,
    /// What its values are, in words.
    pub kind: String,
    /// What it is unless given; none for a key that must be there.
    pub default: Option<Value>,
    /// Which numbers it takes, in words; empty for all.
    pub range: String,
    /// Which words it takes, each with what it means.
    pub choices: Vec<(String, String)>,
    /// What it does.
    pub about: String,
}

/// All keys, in the order of a recipe.
pub fn list(registries: &Registries) -> Vec<Key> {
    of(&schema(registries))
}

/// The keys that a schema of [`schema`] has.
pub fn of(schema: &Value) -> Vec<Key> {
    let mut keys = Vec::new();
    walk(schema, schema, ("", ""), &mut keys);
    keys
}

/// The keys that a pattern means: a glob (`train.*`), the path of a key or of a section, or one word of a path (`warmup`).
pub fn find<'a>(keys: &'a [Key], pattern: &str) -> Result<Vec<&'a Key>, String> {
    let words = |path: &str| path.split('.').map(str::to_owned).collect::<Vec<_>>();
    let found: Vec<&Key> = if pattern.contains(['*', '?', '/']) {
        let glob = glob(pattern)?;
        keys.iter().filter(|key| glob.is_match(&key.path, 0) || glob.is_match(&key.written, 0)).collect()
    } else {
        let below = |path: &str| {
            path.strip_prefix(pattern).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        let exact: Vec<&Key> = keys.iter().filter(|key| below(&key.path) || below(&key.written)).collect();
        match exact.is_empty() {
            true => keys.iter().filter(|key| words(&key.path).iter().any(|word| word == pattern)).collect(),
            false => exact,
        }
    };
    if !found.is_empty() {
        return Ok(found);
    }
    let mut known: Vec<String> =
        keys.iter().flat_map(|key| [key.path.clone(), key.written.clone()]).collect();
    known.extend(keys.iter().flat_map(|key| words(&key.path)));
    let near = nearest(pattern, &known).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
    Err(format!("no key matches `{pattern}`{near}"))
}

/// What a glob, or a regular expression between slashes, matches.
pub fn glob(pattern: &str) -> Result<taper_optim::Pattern, String> {
    let named = |e: taper_optim::Error| e.to_string().replacen("parameter group", "pattern", 1);
    taper_optim::Group::new(pattern).pattern().map_err(named)
}

/// Adds the keys of a section. A path is how it is listed and how it is written.
fn walk(root: &Value, section: &Value, path: (&str, &str), out: &mut Vec<Key>) {
    let below = |key: &str| {
        let join = |path: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        (join(path.0), join(path.1))
    };
    for (key, schema) in section.get("properties").and_then(Value::as_object).into_iter().flatten() {
        let (listed, written) = below(key);
        let inner = alternatives(schema).find(|one| one.get("properties").is_some());
        // A section has its place in its keys; one with a default of its own can also be left out as a whole.
        match inner {
            Some(inner) => {
                if schema.get("default").is_some() || !path.0.is_empty() {
                    out.push(key_of(schema, listed.clone(), written.clone()));
                }
                walk(root, inner, (&listed, &written), out);
            }
            None => out.push(key_of(schema, listed, written)),
        }
    }
    for rule in section.get("allOf").and_then(Value::as_array).into_iter().flatten() {
        let Some(tag) = rule.pointer("/if/properties").and_then(Value::as_object) else { continue };
        let Some(said) = tag.values().next() else { continue };
        let Some(name) = said["const"].as_str().or_else(|| said["enum"][0].as_str()) else { continue };
        let own = match rule.pointer("/then/$ref").and_then(Value::as_str) {
            Some(place) => root.pointer(place.trim_start_matches('#')),
            None => rule.get("then"),
        };
        if let Some(own) = own {
            walk(root, own, (&below(name).0, path.1), out);
        }
    }
}

/// A schema and all that it offers in its place.
fn alternatives(schema: &Value) -> impl Iterator<Item = &Value> {
    let lists = ["anyOf", "oneOf"].into_iter().filter_map(|list| schema.get(list)?.as_array());
    let inner: Vec<&Value> = lists.flatten().flat_map(|one| alternatives(one).collect::<Vec<_>>()).collect();
    std::iter::once(schema).chain(inner)
}

fn key_of(schema: &Value, path: String, written: String) -> Key {
    let range = alternatives(schema).map(|one| Range::of(one).to_string()).filter(|range| !range.is_empty());
    Key {
        path,
        written,
        kind: kind(schema),
        default: schema.get("default").cloned(),
        range: range.collect::<Vec<_>>().join(", or "),
        choices: choices(schema),
        about: schema["description"].as_str().unwrap_or_default().to_owned(),
    }
}

/// What values a schema takes, in words.
fn kind(schema: &Value) -> String {
    let of_type = |name: &str, one: &Value| match name {
        "integer" => "whole number".to_owned(),
        "number" => "number".to_owned(),
        "string" if one.get("enum").is_some() || one.get("const").is_some() => "word".to_owned(),
        "string" => "text".to_owned(),
        "boolean" => "true or false".to_owned(),
        "array" => {
            match one.get("items").map(kind).filter(|items| !["map", "any value"].contains(&items.as_str())) {
                Some(items) => format!("list of {items}s").replace("true or falses", "truth values"),
                None => "list".to_owned(),
            }
        }
        "object" => "map".to_owned(),
        other => other.to_owned(),
    };
    let mut kinds: Vec<String> = Vec::new();
    for one in alternatives(schema) {
        let names: Vec<&str> = match &one["type"] {
            Value::String(name) => vec![name],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ if one.get("const").is_some_and(Value::is_string) => vec!["word"],
            _ if one.get("enum").is_some() => vec!["word"],
            _ if one.get("$ref").is_some() => vec!["object"],
            _ => Vec::new(),
        };
        for name in names.into_iter().filter(|name| *name != "null") {
            let kind = of_type(name, one);
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
    }
    if kinds.is_empty() { "any value".to_owned() } else { kinds.join(" or ") }
}

fn choices(schema: &Value) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for one in alternatives(schema) {
        let about = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if let Some(word) = one.get("const").and_then(Value::as_str) {
            out.push((word.to_owned(), about(&one["description"])));
        }
        for (index, word) in one.get("enum").and_then(Value::as_array).into_iter().flatten().enumerate() {
            if let Some(word) = word.as_str() {
                out.push((word.to_owned(), about(&one["enumDescriptions"][index])));
            }
        }
    }
    out
}

impl Key {
    /// The default as a recipe would have it; `needed` for a key without one, and nothing for a map, whose keys have theirs.
    pub fn default_text(&self) -> String {
        match &self.default {
            Some(Value::Null) => "none".to_owned(),
            Some(default) => flow(default),
            None if self.kind == "map" => String::new(),
            None => "needed".to_owned(),
        }
    }

    /// What it takes: its kind with its range or its words.
    pub fn takes(&self) -> String {
        let mut words: Vec<&str> = self.choices.iter().map(|(word, _)| word.as_str()).collect();
        if !words.is_empty() && self.kind.starts_with("true or false") {
            words.splice(0..0, ["true", "false"]);
        }
        match (self.range.is_empty(), words.is_empty()) {
            (false, _) => format!("{}, {}", self.kind, self.range),
            (true, false) if words.len() <= 12 => words.join(" | "),
            _ => self.kind.clone(),
        }
    }
}
