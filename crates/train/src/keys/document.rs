//! The JSON Schema of recipes (draft 2020-12), from the typed schema and the registries.
//!
//! A recipe is layers, so that a file need not be complete: a section without its tag (`optimizer: {lr: 0.1}` above another file)
//! may have any key that some name has, and what must be there must be there only in a file that neither extends another nor
//! is a sweep. In the open sections `null` stands for "not set here".

use serde_json::{Map, Value, json};

use super::open::{self, Named};
use crate::Registries;
use crate::recipe::{built_in, fixed_sections, sweep_section};
use taper_optim::Schedule;

/// The schema of a recipe file.
pub fn schema(registries: &Registries) -> Value {
    let mut root = fixed_sections().clone();
    tidy(&mut root);
    let mut sections = take_properties(&mut root);
    let defaults = built_in();
    for (key, default) in defaults.as_object().into_iter().flatten() {
        match sections.get_mut(key) {
            Some(section) if default.is_object() => set_defaults(section, default),
            Some(single) => single["default"] = default.clone(),
            None => {}
        }
    }
    let mut defs = Map::new();
    let mut open = |key: &str, tag: &str, named: fn(&Registries, &Map<String, Value>) -> Vec<Named>| {
        let section = sections.get_mut(key).map(Value::take).unwrap_or_default();
        let (about, mut fixed) = (section["description"].clone(), keys_of(section));
        let named = named(registries, &fixed);
        if key == "optimizer" {
            // Not all have a rate, and those that do document it.
            fixed.shift_remove("lr");
            fixed.insert("groups".into(), groups(&fixed, &named));
            defs.insert("inner-optimizer".into(), inner(&named));
        }
        if key == "schedule" {
            let part = json!({
                "type": "object",
                "properties": {
                    "until": { "type": "integer", "minimum": 0, "description": "When the next part takes over." },
                    "schedule": { "$ref": "#/$defs/schedule", "description": "What runs." },
                },
                "required": ["until", "schedule"],
                "additionalProperties": false,
            });
            defs.insert("part-of-a-sequence".into(), part);
            fixed.insert("warmup".into(), warmup());
            defs.insert("schedule".into(), tagged("schedule", tag, &fixed, &named, &mut Map::new(), true));
            fixed.insert("per".into(), per());
            let momentum = json!({ "$ref": "#/$defs/schedule", "description": "How momentum moves; a plateau cannot.", "default": null });
            fixed.insert("momentum".into(), nullable(momentum));
        }
        let mut schema = tagged(key, tag, &fixed, &named, &mut defs, false);
        if key == "schedule"
            && let Some(Value::Array(rules)) = schema.get_mut("allOf")
        {
            let kinds = json!({ "kind": { "enum": Schedule::WITHOUT_WARMUP } });
            let warmup =
                json!({ "required": ["kind", "warmup"], "properties": { "warmup": { "type": "integer" } } });
            rules.push(json!({ "not": { "allOf": [{ "properties": kinds }, warmup] } }));
        }
        schema["description"] = about;
        sections.insert(key.to_owned(), schema);
    };
    open("data", "name", open::data);
    open("model", "name", |registries, _| open::models(registries));
    open("problem", "name", |registries, _| open::problems(registries));
    open("optimizer", "name", |registries, _| open::optimizers(registries));
    open("schedule", "kind", |_, _| open::schedules());
    for optional in ["data", "model", "problem"] {
        sections[optional]["type"] = json!(["object", "null"]);
    }
    let average = sections["train"]["properties"]["average"].take();
    sections["train"]["properties"]["average"] = average_of(average, &mut defs);
    sections.insert("sweep".into(), sweep());
    nullable_at(&mut sections, "name");
    sections["name"]["default"] = Value::Null;
    let cluster = sections.shift_remove("cluster").unwrap_or_default();
    sections.insert("cluster".into(), nullable(cluster));
    let extends = json!({
        "description": "Files that lie below this one, each relative to it; `taper:configs/…` is one inside the program.",
        "anyOf": [
            { "type": ["string", "null"] },
            { "type": "array", "items": { "type": "string" } },
        ],
        "default": null,
    });
    sections.shift_insert(0, "extends".into(), extends);
    sections["train"]["allOf"] = json!([contradiction("epochs", &["steps"])]);
    sections["train"]["properties"]["checkpoint"]["allOf"] =
        json!([contradiction("every_epochs", &["every_steps"])]);
    let needed = needed(&mut sections, &defaults);
    sections.values_mut().chain(defs.values_mut()).for_each(tidy);
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of Taper",
        "description": "What to train, in YAML. Made by `taper schema`.",
        "type": "object",
        "properties": sections,
        "additionalProperties": false,
        "allOf": [
            contradiction("problem", &["data", "model"]),
            { "if": { "anyOf": [{ "required": ["extends"] }, { "required": ["sweep"] }] }, "else": needed },
        ],
        "$defs": defs,
    })
}

fn per() -> Value {
    json!({
        "description": "What a schedule's time counts.",
        "default": "epoch",
        "oneOf": [
            { "const": "epoch", "description": "Epochs." },
            { "const": "step", "description": "Optimizer steps." },
            { "const": null },
        ],
    })
}

fn warmup() -> Value {
    json!({
        "description": "The rate rises along a line and is full at the end of so many epochs or steps, where the schedule begins; milestones keep their times.",
        "type": ["integer", "null"],
        "minimum": 1,
        "default": null,
    })
}

/// Takes out what says nothing to a reader.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(entries) => {
            for noise in ["format", "title", "$schema", "writeOnly"] {
                if entries.get(noise).is_some_and(|said| said.is_string() || said.is_boolean()) {
                    entries.shift_remove(noise);
                }
            }
            if let Some(Value::String(text)) = entries.get_mut("description") {
                *text = described(text);
            }
            entries.retain(|key, value| !(key == "description" && value.as_str() == Some("")));
            entries.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// A doc comment on one line, without the default, which has a place of its own, and without marks of Markdown.
fn described(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ").replace("\\[", "[").replace("\\]", "]");
    let Some(start) = text.find("Defaults to ") else { return text };
    let rest = &text[start..];
    let sentence = |(end, _): &(usize, &str)| {
        let after = rest[end + 1..].trim_start();
        after.is_empty() || after.starts_with(char::is_uppercase)
    };
    let end = rest.match_indices('.').find(sentence).map_or(rest.len(), |(end, _)| end + 1);
    format!("{} {}", text[..start].trim_end(), rest[end..].trim_start()).trim().to_owned()
}

fn take_properties(schema: &mut Value) -> Map<String, Value> {
    match schema.get_mut("properties").map(Value::take) {
        Some(Value::Object(keys)) => keys,
        _ => Map::new(),
    }
}

/// The keys of a section, which may be one that need not be there.
fn keys_of(mut section: Value) -> Map<String, Value> {
    if section.get("properties").is_some() {
        return take_properties(&mut section);
    }
    let some = section.get_mut("anyOf").and_then(Value::as_array_mut);
    some.into_iter()
        .flatten()
        .find(|one| one.get("properties").is_some())
        .map(take_properties)
        .unwrap_or_default()
}

/// States the built-in defaults.
fn set_defaults(schema: &mut Value, defaults: &Value) {
    let (Value::Object(defaults), Some(keys)) = (defaults, map_in(schema)) else { return };
    for (key, default) in defaults {
        let Some(schema) = keys.get_mut(key) else { continue };
        match default {
            Value::Object(_) if map_in(schema).is_some() => set_defaults(schema, default),
            default => schema["default"] = default.clone(),
        }
    }
}

/// The properties of a schema, or of the alternative in it that has some.
fn map_in(schema: &mut Value) -> Option<&mut Map<String, Value>> {
    if schema.get("properties").is_some() {
        return schema["properties"].as_object_mut();
    }
    let alternatives = schema.get_mut("anyOf")?.as_array_mut()?;
    alternatives.iter_mut().find(|one| one.get("properties").is_some())?["properties"].as_object_mut()
}

/// The same schema, or nothing.
fn nullable(mut schema: Value) -> Value {
    match &mut schema["type"] {
        Value::String(kind) => {
            let kind = std::mem::take(kind);
            schema["type"] = json!([kind, "null"]);
            if let Some(Value::Array(choices)) = schema.get_mut("enum") {
                choices.push(Value::Null);
            }
            return schema;
        }
        Value::Array(kinds) => {
            if !kinds.iter().any(|kind| kind == "null") {
                kinds.push("null".into());
            }
            return schema;
        }
        _ => {}
    }
    let Value::Object(mut entries) = schema else { return schema };
    entries.shift_remove("type");
    for list in ["oneOf", "anyOf"] {
        if let Some(Value::Array(items)) = entries.get_mut(list) {
            let null = |item: &Value| item["type"] == "null" || (item.get("const") == Some(&Value::Null));
            if !items.iter().any(null) {
                items.push(json!({ "type": "null" }));
            }
            return Value::Object(entries);
        }
    }
    if entries.contains_key("$ref") {
        let mut out = Map::new();
        for said in ["description", "default"] {
            out.extend(entries.shift_remove_entry(said));
        }
        out.insert("anyOf".into(), json!([entries, { "type": "null" }]));
        return Value::Object(out);
    }
    Value::Object(entries)
}

fn nullable_at(sections: &mut Map<String, Value>, key: &str) {
    if let Some(schema) = sections.get_mut(key) {
        *schema = nullable(schema.take());
    }
}

/// A section whose tag decides which keys it has.
fn tagged(
    section: &str,
    tag: &str,
    fixed: &Map<String, Value>,
    named: &[Named],
    defs: &mut Map<String, Value>,
    inline: bool,
) -> Value {
    let names =
        |one: &Named| std::iter::once(one.name.clone()).chain(one.aliases.clone()).collect::<Vec<_>>();
    let all: Vec<String> = named.iter().flat_map(names).collect();
    let about: Vec<&str> =
        named.iter().flat_map(|one| std::iter::repeat_n(one.about.as_str(), 1 + one.aliases.len())).collect();
    let mut keys = fixed.clone();
    let said = keys.get(tag).and_then(|tag| tag["description"].as_str()).unwrap_or_default().to_owned();
    let said = if said.is_empty() || said.contains('`') { "Which one.".to_owned() } else { said };
    let default = keys.get(tag).and_then(|tag| tag.get("default")).cloned();
    keys.insert(
        tag.into(),
        json!({ "description": said, "type": "string", "enum": all, "enumDescriptions": about }),
    );
    if let Some(default) = default {
        keys[tag]["default"] = default;
    }
    let closed = |own: &Map<String, Value>| -> Vec<String> {
        let mut names: Vec<String> = own.keys().chain(fixed.keys()).cloned().collect();
        names.push(tag.to_owned());
        names.sort();
        names.dedup();
        names
    };
    let mut rules = Vec::new();
    for one in named {
        let own: Map<String, Value> =
            one.keys.iter().map(|(key, schema)| (key.clone(), nullable(schema.clone()))).collect();
        let allowed = closed(&own);
        let mut then = json!({ "description": one.about, "properties": own });
        if !inline {
            let def = format!("{section}.{}", one.name);
            defs.insert(def.clone(), then);
            then = json!({ "$ref": format!("#/$defs/{def}") });
        }
        then["propertyNames"] = json!({ "enum": allowed });
        let names = names(one);
        let said = if names.len() == 1 { json!({ "const": names[0] }) } else { json!({ "enum": names }) };
        let is = json!({ "properties": { tag: said }, "required": [tag] });
        rules.push(json!({ "if": is, "then": then }));
    }
    let any = any_of(named);
    let allowed = closed(&any);
    let untagged = json!({ "properties": any, "propertyNames": { "enum": allowed } });
    rules.push(json!({ "if": { "required": [tag] }, "else": untagged }));
    json!({ "type": "object", "properties": keys, "allOf": rules })
}

/// The keys that some name has.
fn any_of(named: &[Named]) -> Map<String, Value> {
    let mut all: Map<String, Value> = Map::new();
    for (key, schema) in named.iter().flat_map(|one| &one.keys) {
        let mut schema = nullable(schema.clone());
        if let Value::Object(schema) = &mut schema {
            schema.shift_remove("default");
            schema.shift_remove("description");
        }
        let known = all.entry(key.clone()).or_insert_with(|| json!({ "anyOf": [] }));
        if let Some(Value::Array(known)) = known.get_mut("anyOf")
            && !known.contains(&schema)
        {
            known.push(schema);
        }
    }
    for schema in all.values_mut() {
        if let Some([one]) = schema["anyOf"].as_array().map(Vec::as_slice) {
            *schema = one.clone();
        }
    }
    all
}

/// The list of groups: a pattern, and keys of the section's optimizer or of another that the group names.
fn groups(fixed: &Map<String, Value>, named: &[Named]) -> Value {
    let mut groups = fixed.get("groups").cloned().unwrap_or_else(|| json!({ "type": "array" }));
    let own = keys_of(groups["items"].take());
    let of_group = |key: &str| (key.to_owned(), own.get(key).cloned().unwrap_or_default());
    let fixed = Map::from_iter(["match", "lr_scale"].map(of_group));
    let mut item = tagged("optimizer", "name", &fixed, named, &mut Map::new(), false);
    item["required"] = json!(["match"]);
    groups["items"] = item;
    groups
}

/// An optimizer inside another.
fn inner(named: &[Named]) -> Value {
    tagged("optimizer", "name", &Map::new(), named, &mut Map::new(), false)
}

/// `train.average`: a word, or a map whose `kind` is the word.
fn average_of(schema: Value, defs: &mut Map<String, Value>) -> Value {
    let variants = schema["oneOf"].as_array().cloned().unwrap_or_default();
    let named: Vec<Named> = variants
        .iter()
        .map(|variant| Named {
            name: variant["properties"]["kind"]["const"].as_str().unwrap_or_default().to_owned(),
            aliases: Vec::new(),
            about: variant["description"].as_str().unwrap_or_default().to_owned(),
            keys: variant["properties"]
                .as_object()
                .into_iter()
                .flatten()
                .filter(|(key, _)| *key != "kind")
                .map(|(key, schema)| (key.clone(), schema.clone()))
                .collect(),
        })
        .collect();
    let alone = |variant: &&Value| variant["required"].as_array().is_none_or(|needed| needed.len() <= 1);
    let words: Vec<&Value> =
        variants.iter().filter(alone).map(|variant| &variant["properties"]["kind"]["const"]).collect();
    let map = tagged("average", "kind", &Map::new(), &named, defs, false);
    json!({ "description": schema["description"], "default": "none", "anyOf": [{ "enum": words }, map] })
}

fn sweep() -> Value {
    let mut sweep = sweep_section();
    tidy(&mut sweep);
    sweep["properties"]["grid"]["additionalProperties"] = json!({ "type": "array", "minItems": 1 });
    sweep["description"] = "Runs that differ: every combination of what it lists.".into();
    nullable(sweep)
}

/// Two things of which a file has one.
fn contradiction(one: &str, others: &[&str]) -> Value {
    let given =
        |key: &str| json!({ "required": [key], "properties": { key: { "not": { "type": "null" } } } });
    let others: Vec<Value> = others.iter().map(|key| given(key)).collect();
    json!({ "not": { "allOf": [given(one), { "anyOf": others }] } })
}

/// What a complete recipe must have: the keys without a default. They are taken out of the sections, which need not be complete.
fn needed(sections: &mut Map<String, Value>, defaults: &Value) -> Value {
    let mut keys = Map::new();
    for (key, section) in sections.iter_mut() {
        let inner = lift(section, &defaults[key.as_str()]);
        if let Some(inner) = inner {
            keys.insert(key.clone(), inner);
        }
    }
    let tags = [("data", "name"), ("model", "name"), ("problem", "name"), ("optimizer", "name")];
    for (section, tag) in tags {
        keys.insert(section.into(), json!({ "required": [tag] }));
    }
    for inner in ["inner", "rest"] {
        keys["optimizer"]["properties"][inner] = json!({ "required": ["name"] });
    }
    if let Some(train) = keys.get_mut("train") {
        train["anyOf"] = json!([{ "required": ["epochs"] }, { "required": ["steps"] }]);
    } else {
        keys.insert(
            "train".into(),
            json!({ "anyOf": [{ "required": ["epochs"] }, { "required": ["steps"] }] }),
        );
    }
    json!({
        "required": ["optimizer", "train"],
        "anyOf": [{ "required": ["data", "model"] }, { "required": ["problem"] }],
        "properties": keys,
    })
}

fn lift(schema: &mut Value, defaults: &Value) -> Option<Value> {
    let mut out = Map::new();
    let object = match schema.get("properties") {
        Some(_) => schema,
        None => {
            schema.get_mut("anyOf")?.as_array_mut()?.iter_mut().find(|one| one.get("properties").is_some())?
        }
    };
    let entries = object.as_object_mut()?;
    if let Some(Value::Array(mut required)) = entries.shift_remove("required") {
        required.retain(|key| key.as_str().is_none_or(|key| defaults.get(key).is_none()));
        if !required.is_empty() {
            out.insert("required".into(), required.into());
        }
    }
    let mut keys = Map::new();
    for (key, schema) in entries.get_mut("properties")?.as_object_mut()? {
        let below = defaults.get(key).cloned().unwrap_or(Value::Null);
        keys.extend(lift(schema, &below).map(|inner| (key.clone(), inner)));
    }
    if !keys.is_empty() {
        out.insert("properties".into(), keys.into());
    }
    (!out.is_empty()).then_some(Value::Object(out))
}
