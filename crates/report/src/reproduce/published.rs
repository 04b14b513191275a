//! `recipes/published.yaml`: what the paper publishes.
use super::Target;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use taper_train::recipe::{Located, Metric, RecipeError, Select};

/// A map in the order of its file.
#[derive(Clone, Debug, PartialEq)]
pub struct Ordered<T>(pub Vec<(String, T)>);

impl<T> Default for Ordered<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T> Ordered<T> {
    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&T> {
        self.0.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Ordered<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OrderedVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OrderedVisitor<T> {
            type Value = Ordered<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of keys")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = access.next_entry()? {
                    entries.push(entry);
                }
                Ok(Ordered(entries))
            }
        }
        deserializer.deserialize_map(OrderedVisitor(PhantomData))
    }
}

/// The file.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of sections")]
pub struct Published {
    /// The tables by target.
    pub tables: Ordered<PublishedTable>,
    /// Statements without a table.
    pub claims: Vec<Claim>,
    /// Differences that the text names.
    pub margins: Vec<Margin>,
    /// What stands beside DecGD in the figures, by target.
    pub controls: Ordered<Control>,
    /// The layers of each scale, by target; a value is a path or a map of paths by row.
    scales: Ordered<Ordered<Value>>,
    /// What is trained at the scale of a laptop, by target.
    #[serde(default)]
    pub laptop: Ordered<Laptop>,
}

/// What two cores train in place of a table, and what it can show of the text.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map of keys")]
pub struct Laptop {
    /// A sweep over optimizers whose best are confirmed on fresh seeds, from the folder of recipes.
    pub optimizers: String,
    /// A sweep over DecGD's c.
    pub c: String,
    /// DecGD at its default rate, on the fresh seeds.
    pub default: String,
    /// The paper's column for one of ours, where it is called otherwise.
    #[serde(default)]
    pub columns: Ordered<String>,
    /// As good as another is what is at most so much behind it, in the unit of the paper's tables.
    pub tolerance: f64,
    /// What is claimed.
    pub claims: Vec<LaptopClaim>,
}

/// A statement that any network can test.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a claim (a map of keys)")]
pub struct LaptopClaim {
    /// Its name.
    pub id: String,
    /// The statement.
    pub says: String,
    /// What would show it.
    pub shown_by: Tested,
}

/// What would show a claim on a network of ours.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(rename_all = "snake_case", rename_all_fields = "snake_case", deny_unknown_fields)]
pub enum Tested {
    /// Some columns are as good as some others.
    AsGood {
        /// These.
        columns: Vec<String>,
        /// As each of these.
        than: Vec<String>,
    },
    /// The same after some epochs.
    AsFast {
        /// These.
        columns: Vec<String>,
        /// As each of these.
        than: Vec<String>,
        /// After so many.
        epochs: u64,
    },
    /// Every c is near the best one.
    Robust {
        /// At most so far from it.
        points: f64,
    },
    /// The default rate is as good as the one that was chosen.
    Untuned {
        /// For these.
        columns: Vec<String>,
    },
}

/// One table.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a table (a map of keys)")]
pub struct PublishedTable {
    /// Its caption.
    pub title: String,
    /// What its numbers are.
    pub metric: Metric,
    /// What chose the epoch they are of.
    pub select: Select,
    /// How far a mean may be from a number and still be the same result.
    pub tolerance: f64,
    /// Numbers by network and optimizer.
    pub rows: Ordered<Ordered<f64>>,
}

/// A statement without a table.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a claim (a map of keys)")]
pub struct Claim {
    /// Its name.
    pub id: String,
    /// The target that checks it.
    pub target: Target,
    /// The statement.
    pub says: String,
    /// The recipes that it is about, from the folder of recipes.
    pub recipes: Vec<String>,
    /// What would show it.
    pub shown_by: Shown,
}

/// What would show a claim.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(rename_all = "snake_case", rename_all_fields = "snake_case", deny_unknown_fields)]
pub enum Shown {
    /// Every cell's metric is at least this, in per cent for accuracy.
    AtLeast {
        /// The bound.
        value: f64,
    },
    /// Every cell is near the best one.
    Within {
        /// At most so far from it, in the unit of the paper's tables.
        points: f64,
    },
    /// Some columns are ahead of all others.
    Ahead {
        /// These.
        columns: Vec<String>,
    },
    /// DecGD's value is below Adam's; checked on the numeric problems.
    Faster {},
}

/// Runs that no number is held against.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a control (a map of keys)")]
pub struct Control {
    /// The recipe, from the folder of recipes.
    pub recipe: String,
    /// The row whose scale it takes.
    pub row: String,
}

/// A difference that the text names.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(deny_unknown_fields, expecting = "a margin (a map of keys)")]
pub struct Margin {
    /// The table.
    pub table: String,
    /// The network.
    pub row: String,
    /// The optimizer that the text has ahead.
    pub better: String,
    /// The other.
    pub worse: String,
    /// By how much.
    pub margin: f64,
    /// The paper's own table says otherwise.
    #[serde(default)]
    pub contradicted: bool,
}

impl Published {
    /// Reads and checks `published.yaml` in a folder of recipes.
    pub fn load(recipes: &Path) -> Result<Located<Self>, RecipeError> {
        let file: Located<Self> = Located::load(recipes.join("published.yaml"))?;
        for (name, table) in &file.tables.0 {
            let at = |key: &str| format!("tables.{name}.{key}");
            if Target::of(name).is_none() {
                return Err(file.error_at(&format!("tables.{name}"), format!("no target is called `{name}`")));
            }
            if !(table.tolerance > 0.0 && table.tolerance.is_finite()) {
                let message = format!("expected a tolerance above 0, found {}", table.tolerance);
                return Err(file.error_at(&at("tolerance"), message));
            }
            for (row, cells) in &table.rows.0 {
                if let Some((column, value)) = cells.0.iter().find(|(_, value)| *value <= 0.0) {
                    let message = format!("expected a number above 0, found {value}");
                    return Err(file.error_at(&at(&format!("rows.{row}.{column}")), message));
                }
            }
        }
        for (index, margin) in file.margins.iter().enumerate() {
            let rows = file.tables.get(&margin.table).map(|table| &table.rows);
            let cells = rows.and_then(|rows| rows.get(&margin.row));
            if cells.is_none_or(|c| c.get(&margin.better).is_none() || c.get(&margin.worse).is_none()) {
                let message = "expected cells of a table above, found none";
                return Err(file.error_at(&format!("margins[{index}]"), message));
            }
        }
        for (name, laptop) in &file.laptop.0 {
            if Target::of(name).is_none() {
                return Err(file.error_at(&format!("laptop.{name}"), format!("no target is called `{name}`")));
            }
            if !(laptop.tolerance > 0.0 && laptop.tolerance.is_finite()) {
                let message = format!("expected a tolerance above 0, found {}", laptop.tolerance);
                return Err(file.error_at(&format!("laptop.{name}.tolerance"), message));
            }
        }
        for (scale, targets) in &file.scales.0 {
            for (target, layer) in &targets.0 {
                let texts = match layer {
                    Value::Object(rows) => rows.values().all(Value::is_string),
                    layer => layer.is_string(),
                };
                if !texts {
                    let message = "expected the path of a layer, or paths by row";
                    return Err(file.error_at(&format!("scales.{scale}.{target}"), message));
                }
            }
        }
        Ok(file)
    }

    /// The layer that a scale puts over a recipe; paths are relative to the folder of recipes.
    pub fn layer(&self, scale: &str, target: Target, row: &str, recipes: &Path) -> Option<PathBuf> {
        let path = match self.scales.get(scale)?.get(target.name())? {
            Value::Object(rows) => rows.get(row)?.as_str()?,
            layer => layer.as_str()?,
        };
        Some(recipes.join(path))
    }

    /// The claims that a target checks.
    pub fn claims_of(&self, target: Target) -> impl Iterator<Item = &Claim> {
        self.claims.iter().filter(move |claim| claim.target == target)
    }
}
