//! Ranges of numbers, as the schema states them: checked, and put into words.

use std::fmt;

use serde_json::{Map, Value};

use super::path::Path;

/// What a number may be.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Range {
    pub min: Option<f64>,
    pub above: Option<f64>,
    pub max: Option<f64>,
    pub below: Option<f64>,
}

/// What JSON Schema calls the ends of a range.
const NAMES: [&str; 4] = ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"];

impl Range {
    /// The range that a schema states.
    pub fn of(schema: &Value) -> Self {
        let [min, above, max, below] = NAMES.map(|name| schema.get(name).and_then(Value::as_f64));
        Self { min, above, max, below }
    }

    /// States it in a schema.
    pub fn state(self, schema: &mut Map<String, Value>) {
        for (name, end) in NAMES.into_iter().zip([self.min, self.above, self.max, self.below]) {
            match end {
                // Whole ends as whole numbers, which is how people write them.
                Some(end) if end.fract() == 0.0 => schema.insert(name.to_owned(), (end as i64).into()),
                Some(end) => schema.insert(name.to_owned(), end.into()),
                None => schema.shift_remove(name),
            };
        }
    }

    pub fn takes(&self, number: f64) -> bool {
        self.min.is_none_or(|end| number >= end)
            && self.above.is_none_or(|end| number > end)
            && self.max.is_none_or(|end| number <= end)
            && self.below.is_none_or(|end| number < end)
    }
}

/// In words: `at least 0 and less than 1`; nothing for all numbers.
impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let (Some(min), Some(max)) = (self.min, self.max) {
            return write!(f, "between {min} and {max}");
        }
        let ends = [
            ("at least", self.min),
            ("greater than", self.above),
            ("at most", self.max),
            ("less than", self.below),
        ];
        let words = ends.iter().filter_map(|(word, end)| end.map(|end| format!("{word} {end}")));
        f.write_str(&words.collect::<Vec<_>>().join(" and "))
    }
}

/// The first number in `value` that is out of the range which `schema` states for it.
pub(super) fn outside<'a>(schema: &Value, value: &'a Value, path: &Path) -> Option<(Path, Range, &'a Value)> {
    match value {
        Value::Number(number) => {
            let range = Range::of(schema);
            let fits = number.as_f64().is_none_or(|number| range.takes(number));
            (!fits).then(|| (path.clone(), range, value))
        }
        Value::Array(items) => {
            let schema = schema.get("items")?;
            items.iter().enumerate().find_map(|(index, item)| outside(schema, item, &path.index(index)))
        }
        Value::Object(entries) => alternatives(schema, value).find_map(|schema| {
            let keys = schema.get("properties")?;
            entries.iter().find_map(|(key, value)| outside(keys.get(key)?, value, &path.key(key)))
        }),
        _ => None,
    }
}

/// A schema and those of its alternatives that a map could mean by its `kind`.
fn alternatives<'a>(schema: &'a Value, value: &'a Value) -> impl Iterator<Item = &'a Value> {
    let lists = ["anyOf", "oneOf"].into_iter().filter_map(move |list| schema.get(list)?.as_array());
    let meant = move |schema: &&Value| {
        let kind = schema.pointer("/properties/kind/const");
        kind.is_none_or(|kind| value.get("kind") == Some(kind))
    };
    std::iter::once(schema).chain(lists.flatten().filter(meant))
}
