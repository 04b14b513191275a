//! Data that is always here in place of data that is not: a step costs the same on any content of the same shape.
use super::probe::{held_out, kept};
use serde_json::{Value, json};
use taper_train::recipe::{LastBatch, Task};
use taper_train::run::{Inspection, RunError};
use taper_train::{Recipe, Registries};

/// A recipe on other data.
pub(super) struct StandIn {
    /// The recipe.
    pub recipe: Recipe,
    /// Its data set.
    pub name: &'static str,
    /// How many images the missing set has to train and to test on; the stand-in has few, for they take time to make.
    /// `None` where it has as many as the missing set.
    pub images: Option<(usize, usize)>,
}

/// As many words as Penn Treebank has units, of as many kinds; of pieces about as many as 4096 kinds of them are.
fn penn_treebank(config: &serde_json::Map<String, Value>) -> Value {
    let [train, valid, test] = [5_017_482, 393_042, 442_423];
    match config.get("by").and_then(Value::as_str) {
        Some("char") => json!({"vocab": 50, "train": train, "valid": valid, "test": test}),
        Some("byte") => json!({"vocab": 256, "train": train, "valid": valid, "test": test}),
        Some("bpe") => {
            let kinds = config.get("max_vocab").and_then(Value::as_u64).unwrap_or(4096);
            json!({"vocab": kinds, "train": train / 4, "valid": valid / 4, "test": test / 4})
        }
        _ => json!({"vocab": 10_000, "train": 929_589, "valid": 73_760, "test": 82_430}),
    }
}

impl StandIn {
    /// `None` when no data of the same shape is known.
    pub fn new(recipe: &Recipe, registries: &Registries) -> Result<Option<Self>, RunError> {
        let Task::Network { data, .. } = recipe.task() else { return Ok(None) };
        let coarse = data.config.get("labels").and_then(Value::as_str) == Some("coarse");
        let few =
            |classes: usize| json!({"classes": classes, "train": 24 * data.batch_size + 64, "test": 64});
        let cifar = Some((50_000, 10_000));
        let (name, config, images) = match data.name.as_str() {
            "fashion-mnist" => ("mnist", json!({}), None),
            "cifar10" => ("synthetic-images", few(10), cifar),
            "cifar100" => ("synthetic-images", few(if coarse { 20 } else { 100 }), cifar),
            "ptb" => ("synthetic-text", penn_treebank(&data.config), None),
            _ => return Ok(None),
        };
        let mut settings = recipe.resolved().clone();
        if let Some(section) = settings.get_mut("data").and_then(Value::as_object_mut) {
            data.config.keys().for_each(|key| drop(section.shift_remove(key)));
            section.insert("name".into(), name.into());
            section.extend(config.as_object().cloned().unwrap_or_default());
            if images.is_some() && data.val.is_some() {
                section.insert("val".into(), 64.into());
            }
        }
        // What stands in for characters is words.
        if name == "synthetic-text" {
            settings["train"]["metric"] = Value::Null;
        }
        // JSON is YAML.
        let recipe = Recipe::parse("stand-in", &settings.to_string(), &[], registries)?;
        Ok(Some(Self { recipe, name, images }))
    }

    /// An inspection of the stand-in with the length that `recipe` has on its own data.
    pub fn sized(&self, recipe: &Recipe, inspection: Inspection) -> Inspection {
        match (self.images, &recipe.data) {
            (Some((train, test)), Some(data)) => {
                let (train, _) = kept(recipe, train, test);
                let images = train.saturating_sub(held_out(data, train));
                let batches = match data.last_batch {
                    LastBatch::Keep => images.div_ceil(data.batch_size),
                    LastBatch::Drop => images / data.batch_size,
                };
                inspection.with_batches(recipe, batches as u64)
            }
            _ => inspection,
        }
    }
}
