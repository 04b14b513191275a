//! A sweep as a list of layers, one a run.
//!
//! Runs are crossed in this order, the last turning fastest: entries of `list`, keys of `grid` as written, points of
//! `random` and `halton`, `seeds`. A run's layer lies above the recipe and below the environment and `--set`; a
//! `--set` of a key that the sweep varies is refused, because one of the two would be ignored.

use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Number, Value};
use taper_models::rng::Rng;

use super::de;
use super::error::{ErrorKind, RecipeError};
use super::layers::{Layers, leaves, undotted};
use super::path::Path;
use super::schema::{Map, generator};
use super::source::{Origin, Span};
use super::yaml::{Entry, Kind, Node};

/// Beyond this a sweep is a mistake in a grid.
const MAX_RUNS: usize = 10_000;

/// The section as written.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
struct Sweep {
    /// Dotted keys and the values each takes; every combination is a run.
    #[serde(default)]
    grid: Option<Map>,
    /// Partial recipes, one a run.
    #[serde(default)]
    list: Option<Vec<Map>>,
    /// Points drawn at random.
    #[serde(default)]
    random: Option<Points>,
    /// Points of the Halton sequence, which fill the space evenly.
    #[serde(default)]
    halton: Option<Points>,
    /// Values of `seed`.
    #[serde(default)]
    seeds: Option<Vec<u64>>,
    /// Values of `seed` on which the best configuration of each optimizer is trained afterwards: none that chose it.
    #[serde(default)]
    confirm: Option<Vec<u64>>,
}

/// Points in a space of hyperparameters.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
struct Points {
    /// How many.
    #[schemars(extend("minimum" = 1, "maximum" = MAX_RUNS))]
    count: usize,
    /// Which ones.
    #[serde(default)]
    seed: u64,
    /// Dotted keys and the range of each.
    space: Map,
}

/// The values of one key: exactly one of these.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a range (`{log: [1e-4, 1]}`, `{uniform: [0, 1]}` or `{choice: [1, 2]}`)"
)]
struct Range {
    /// Between two bounds, evenly.
    #[serde(default)]
    uniform: Option<(f64, f64)>,
    /// Between two positive bounds, evenly in the logarithm.
    #[serde(default)]
    log: Option<(f64, f64)>,
    /// One of these.
    #[serde(default)]
    choice: Option<Vec<Value>>,
}

/// The section as a JSON Schema without references.
pub(crate) fn section() -> Value {
    let mut section = generator().into_root_schema_for::<Sweep>().to_value();
    let range = generator().into_root_schema_for::<Range>().to_value();
    for points in ["random", "halton"] {
        section["properties"][points]["properties"]["space"]["additionalProperties"] = range.clone();
    }
    section
}

/// One run of a sweep.
pub(super) struct Variation {
    /// The layer to put above the recipe.
    pub layer: Node,
    /// What it sets, in order.
    pub varied: Vec<(String, Value)>,
    /// Whether its seed has no say in what is chosen.
    pub confirms: bool,
}

/// The runs of a recipe whose layers are `layers`; `None` without a sweep.
pub(super) fn expand(layers: &Layers, top: &[Node]) -> Result<Option<Vec<Variation>>, RecipeError> {
    let merged = layers.merge()?;
    let root = Path::default().key("sweep");
    let section = match merged.get("sweep") {
        None | Some(Value::Null) => return Ok(None),
        Some(section) => section,
    };
    let sweep: Sweep = de::read(section, &root, layers)?;
    let mut axes: Vec<Vec<Vec<Entry>>> = Vec::new();
    let reader = Reader { layers, root };
    if let Some(list) = &sweep.list {
        axes.push(reader.list(list.len())?);
    }
    for key in sweep.grid.iter().flat_map(Map::keys) {
        axes.push(reader.values(reader.root.key("grid").key(key), key)?);
    }
    for (name, points) in [("random", &sweep.random), ("halton", &sweep.halton)] {
        if let Some(points) = points {
            axes.push(reader.points(name, points)?);
        }
    }
    let mut choosing = usize::MAX;
    if sweep.seeds.is_some() {
        axes.push(reader.values(reader.root.key("seeds"), "seed")?);
    }
    if let Some(confirm) = &sweep.confirm {
        choosing = reader.confirm(confirm, &sweep, &mut axes)?;
    }
    let count = axes.iter().try_fold(1usize, |count, axis| count.checked_mul(axis.len()));
    match count.filter(|&count| count <= MAX_RUNS) {
        None => Err(reader.fail(&reader.root, format!("the sweep has more than {MAX_RUNS} runs"))),
        Some(_) if axes.is_empty() => Err(reader
            .fail(&reader.root, "the sweep varies nothing".to_owned())
            .help("give `grid`, `list`, `random`, `halton` or `seeds`")),
        Some(count) => {
            let seeds = axes.last().map_or(1, Vec::len);
            let variation = |index| {
                let variation = reader.variation(&axes, index, top)?;
                Ok(Variation { confirms: index % seeds >= choosing, ..variation })
            };
            (0..count).map(variation).collect::<Result<_, _>>().map(Some)
        }
    }
}

struct Reader<'a> {
    layers: &'a Layers,
    root: Path,
}

impl Reader<'_> {
    fn fail(&self, path: &Path, message: String) -> RecipeError {
        RecipeError::new(ErrorKind::Value, message).at_opt(self.layers.place(path))
    }

    /// Adds the seeds that confirm to those that choose; the number of the latter.
    fn confirm(
        &self,
        confirm: &[u64],
        sweep: &Sweep,
        axes: &mut [Vec<Vec<Entry>>],
    ) -> Result<usize, RecipeError> {
        let path = self.root.key("confirm");
        let (Some(seeds), Some(axis)) = (&sweep.seeds, axes.last_mut()) else {
            let message = "sweep.confirm trains on other seeds than those that chose: give `sweep.seeds` too";
            return Err(self.fail(&path, message.to_owned()));
        };
        if let Some(both) = confirm.iter().find(|seed| seeds.contains(seed)) {
            let message = format!("seed {both} chose, and cannot confirm: it is one of `sweep.seeds`");
            return Err(self.fail(&path, message));
        }
        axis.extend(self.values(path, "seed")?);
        Ok(seeds.len())
    }

    /// Partial recipes, each one position of the axis.
    fn list(&self, count: usize) -> Result<Vec<Vec<Entry>>, RecipeError> {
        let path = self.root.key("list");
        if count == 0 {
            return Err(self.fail(&path, "the sweep's list is empty".to_owned()));
        }
        let entries = (0..count).map(|index| {
            let path = path.index(index);
            let (_, node) = self.layers.find(&path).ok_or_else(|| de::missing(&path, self.layers))?;
            match node.entry("sweep").or(node.entry("extends")).or(node.entry("cluster")) {
                Some(entry) => {
                    Err(RecipeError::new(ErrorKind::Value, format!("`{}` cannot be varied", entry.key))
                        .at(&entry.key_span))
                }
                None => Ok(node.entries().to_vec()),
            }
        });
        entries.collect()
    }

    /// The values of one key.
    fn values(&self, path: Path, key: &str) -> Result<Vec<Vec<Entry>>, RecipeError> {
        let Some((key_span, node)) = self.layers.find(&path) else {
            return Err(de::missing(&path, self.layers));
        };
        let key_span = key_span.unwrap_or(&node.span);
        let items = match &node.kind {
            Kind::List(items) if !items.is_empty() => items,
            _ => {
                let message = format!("`{key}` in the sweep: expected a list of values");
                return Err(RecipeError::new(ErrorKind::Type, message).at(&node.span));
            }
        };
        if key.split('.').next().is_some_and(|section| matches!(section, "sweep" | "extends" | "cluster")) {
            return Err(RecipeError::new(ErrorKind::Value, format!("`{key}` cannot be varied")).at(key_span));
        }
        let entry =
            |item: &Node| vec![Entry { key: key.to_owned(), key_span: key_span.clone(), node: item.clone() }];
        Ok(items.iter().map(entry).collect())
    }

    /// Points of a space, each one position of the axis.
    fn points(&self, name: &str, points: &Points) -> Result<Vec<Vec<Entry>>, RecipeError> {
        let path = self.root.key(name);
        if !(1..=MAX_RUNS).contains(&points.count) {
            return Err(self.fail(
                &path.key("count"),
                format!("sweep.{name}.count must be between 1 and {MAX_RUNS}, found {}", points.count),
            ));
        }
        let space = path.key("space");
        let mut ranges = Vec::new();
        for (key, range) in &points.space {
            let at = space.key(key);
            let range: Range = de::read(range, &at, self.layers)?;
            self.range(&at, &range)?;
            let (key_span, node) = self.layers.find(&at).ok_or_else(|| de::missing(&at, self.layers))?;
            ranges.push((key, range, key_span.unwrap_or(&node.span), &node.span));
        }
        if ranges.is_empty() {
            return Err(self.fail(&space, format!("sweep.{name}.space is empty")));
        }
        if name == "halton" && ranges.len() > PRIMES.len() {
            return Err(self.fail(
                &space,
                format!("halton fills at most {} dimensions, found {}", PRIMES.len(), ranges.len()),
            ));
        }
        let point = |index: usize| {
            let entry =
                |(dimension, (key, range, key_span, span)): (usize, &(&String, Range, &Span, &Span))| {
                    let unit = match name {
                        "halton" => halton(points.seed.saturating_add(index as u64 + 1), PRIMES[dimension]),
                        // Depends on (seed, key, index) only: a key added to the space moves no other.
                        _ => Rng::new(points.seed, "sweep", key, index as u64).uniform(),
                    };
                    let node = Node { span: (*span).clone(), kind: Kind::Leaf(range.at(unit)) };
                    Entry { key: (*key).clone(), key_span: (*key_span).clone(), node }
                };
            ranges.iter().enumerate().map(entry).collect()
        };
        Ok((0..points.count).map(point).collect())
    }

    fn range(&self, path: &Path, range: &Range) -> Result<(), RecipeError> {
        let fits = match range {
            Range { uniform: Some((low, high)), log: None, choice: None } => {
                if low < high && !(high - low).is_finite() {
                    let message = format!(
                        "expected bounds whose difference is a finite number, found [{low:e}, {high:e}]"
                    );
                    return Err(self.fail(&path.key("uniform"), message));
                }
                low < high
            }
            Range { uniform: None, log: Some((low, high)), choice: None } => 0.0 < *low && low < high,
            Range { uniform: None, log: None, choice: Some(values) } => {
                !values.is_empty() && !values.iter().any(|value| value.is_array() || value.is_object())
            }
            _ => false,
        };
        let message = "expected `{log: [low, high]}`, `{uniform: [low, high]}` or `{choice: [values]}`, the lower bound \
                       first and, for `log`, above 0"
            .to_owned();
        if fits { Ok(()) } else { Err(self.fail(path, message)) }
    }

    /// The run at a position of the crossed axes.
    fn variation(
        &self,
        axes: &[Vec<Vec<Entry>>],
        mut index: usize,
        top: &[Node],
    ) -> Result<Variation, RecipeError> {
        let mut chosen = Vec::new();
        for axis in axes.iter().rev() {
            chosen.push(&axis[index % axis.len()]);
            index /= axis.len();
        }
        let entries: Vec<Entry> = chosen.into_iter().rev().flatten().cloned().collect();
        let span = self.layers.place(&self.root).cloned();
        let span = span.or_else(|| entries.first().map(|entry| entry.node.span.clone()));
        // `expand` checked that there is an axis, and `place` finds the section that it read.
        let span = span.ok_or_else(|| self.fail(&self.root, "the sweep varies nothing".to_owned()))?;
        let layer = undotted(&entries, &span)?;
        let mut varied = Vec::new();
        for path in leaves(&layer) {
            conflict(&path, &layer, top)?;
            if let Some((_, node)) = layer.get(&path.0) {
                varied.push((path.to_string(), node.value()));
            }
        }
        varied.retain(|(key, _)| key != "name");
        Ok(Variation { layer, varied, confirms: false })
    }
}

/// Refuses a `--set` or a variable that says something else about a key that the sweep varies.
fn conflict(path: &Path, layer: &Node, top: &[Node]) -> Result<(), RecipeError> {
    let Some((_, varied)) = layer.get(&path.0) else { return Ok(()) };
    for above in top {
        // The setting may be the key itself, or a whole section around it.
        let set = (1..=path.0.len()).rev().find_map(|length| {
            above
                .get(&path.0[..length])
                .filter(|(_, node)| length == path.0.len() || !matches!(node.kind, Kind::Map(_)))
        });
        if let Some((key, node)) = set
            && node.value() != varied.value()
        {
            let how = match node.span.source.origin {
                Origin::Environment => "the environment",
                _ => "`--set`",
            };
            let message = format!("`{path}` is set by {how} and varied by the sweep");
            return Err(RecipeError::new(ErrorKind::Override, message)
                .at(key.unwrap_or(&node.span))
                .note(format!("varied at {}", varied.span))
                .help("override the sweep instead, or leave it out with `--set sweep=null`"));
        }
    }
    Ok(())
}

impl Range {
    /// The value at `unit` in [0, 1); `Reader::range` has checked that one of the three is there.
    fn at(&self, unit: f64) -> Value {
        // Six digits are finer than any search, and the same on machines whose `exp` rounds differently.
        let rounded = |value: f64| format!("{value:.5e}").parse().unwrap_or(value);
        // `Reader::range` has checked that all values between the bounds are finite.
        let number = |value: f64| Number::from_f64(rounded(value)).map_or(Value::Null, Value::Number);
        match self {
            Range { uniform: Some((low, high)), .. } => number(low + (high - low) * unit),
            Range { log: Some((low, high)), .. } => number((low.ln() + (high.ln() - low.ln()) * unit).exp()),
            Range { choice: Some(values), .. } => {
                let index = (unit * values.len() as f64) as usize;
                values.get(index.min(values.len().saturating_sub(1))).cloned().unwrap_or_default()
            }
            _ => Value::Null,
        }
    }
}

/// Bases of the Halton sequence; beyond these dimensions its points line up.
const PRIMES: [u64; 10] = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29];

/// Element `index` of the van der Corput sequence: the digits of the index in `base`, mirrored at the point.
fn halton(mut index: u64, base: u64) -> f64 {
    let (mut value, mut weight) = (0.0, 1.0 / base as f64);
    while index > 0 {
        value += (index % base) as f64 * weight;
        index /= base;
        weight /= base as f64;
    }
    value
}
