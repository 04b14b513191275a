//! What of a recipe decides a result, and where configurations that stand side by side differ.
use crate::Recipe;
use crate::recipe::{built_in, changes_no_result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::OnceLock;
use taper_figures::plot::exact;

/// Settings that change only the draw, or where it is computed.
const NEUTRAL: [&str; 2] = ["seed", "device"];

/// Settings that belong to a method as its optimizer does, and may differ between methods that are compared. What else
/// differs is another task or another budget.
const METHOD: [&str; 9] = [
    "optimizer.",
    "schedule.",
    "train.average.",
    "train.clip_norm",
    "train.clip_value",
    "train.eval_every",
    "train.loss_for_scale",
    "train.scale_lr_by_length",
    "train.select",
];

fn listed(list: &[&str], path: &str) -> bool {
    list.iter().any(|known| match known.strip_suffix('.') {
        Some(section) => path == section || path.starts_with(known),
        None => path == *known,
    })
}

/// All settings that can change a result, but for the seed, as texts that are equal only if the settings are.
pub fn settings(recipe: &Recipe) -> BTreeMap<String, String> {
    let text = |value: String| match (value.parse::<i64>(), value.parse::<f64>()) {
        (Err(_), Ok(number)) if number.is_finite() => exact(number),
        _ => value,
    };
    let all = recipe.settings().into_iter().map(|(path, value, _)| (path, text(value)));
    all.filter(|(path, value)| !changes_no_result(path) && !listed(&NEUTRAL, path) && value != "null")
        .collect()
}

/// A setting of [`settings`], for people: one that a recipe leaves out has its default, or is none.
pub fn shown(settings: &BTreeMap<String, String>, path: &str) -> String {
    static DEFAULTS: OnceLock<serde_json::Value> = OnceLock::new();
    settings.get(path).cloned().unwrap_or_else(|| {
        let default = DEFAULTS.get_or_init(built_in).pointer(&format!("/{}", path.replace('.', "/")));
        match default {
            Some(serde_json::Value::String(word)) => word.clone(),
            Some(value @ (serde_json::Value::Number(_) | serde_json::Value::Bool(_))) => value.to_string(),
            _ => "none".into(),
        }
    })
}

/// A setting outside of `optimizer` that not all optimizers of a comparison share.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Unequal {
    /// Its path.
    pub key: String,
    /// Its values by optimizer.
    pub values: BTreeMap<String, BTreeSet<String>>,
}

impl fmt::Display for Unequal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = self.values.iter().map(|(optimizer, values)| {
            format!("{} for {optimizer}", values.iter().map(String::as_str).collect::<Vec<_>>().join(" and "))
        });
        write!(f, "{} is {}", self.key, whose.collect::<Vec<_>>().join(", "))
    }
}

/// Where configurations, each an optimizer's name with its [`settings`], differ between optimizers: what one optimizer was
/// given and another was not.
pub fn unequal<'a>(
    all: impl Iterator<Item = (&'a str, &'a BTreeMap<String, String>)> + Clone,
) -> Vec<Unequal> {
    let keys: BTreeSet<&String> = all.clone().flat_map(|(_, settings)| settings.keys()).collect();
    let outside = keys.into_iter().filter(|key| !key.starts_with("optimizer."));
    let found = outside.map(|key| {
        let mut values: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for (optimizer, settings) in all.clone() {
            values.entry(optimizer.to_owned()).or_default().insert(shown(settings, key));
        }
        Unequal { key: key.clone(), values }
    });
    found.filter(|unequal| unequal.values.values().collect::<BTreeSet<_>>().len() > 1).collect()
}

/// What keeps two configurations from being compared as methods: settings of the task or the budget in which they differ,
/// as `train.epochs is 5 against 3`.
pub fn obstacles(one: &BTreeMap<String, String>, other: &BTreeMap<String, String>) -> Vec<String> {
    let keys: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let differ = keys.into_iter().filter(|key| !listed(&METHOD, key) && one.get(*key) != other.get(*key));
    differ.map(|key| format!("{key} is {} against {}", shown(one, key), shown(other, key))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_recipe_leaves_out_has_its_default() {
        let said = BTreeMap::from([("train.precision".to_owned(), "bf16".to_owned())]);
        assert_eq!(shown(&said, "train.precision"), "bf16");
        for (path, text) in [
            ("train.precision", "f32"),
            ("train.shards", "1"),
            ("train.shard_state", "false"),
            ("train.clip_norm", "none"),
            ("optimizer.c", "none"),
        ] {
            assert_eq!(shown(&BTreeMap::new(), path), text, "{path}");
        }
    }
}
