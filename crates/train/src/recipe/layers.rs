//! Layers of settings, lowest first: built-in defaults, what `extends` names, the recipe, the environment, `--set`,
//! and for one run of a sweep what the sweep sets. The `config` crate merges them, key by key; a list replaces a list.
//!
//! Two things a merge by keys would get wrong are settled before it:
//!
//! - **A section with a tag** (`optimizer.name`, `model.name`, `data.name`, `problem.name`, `schedule.kind`,
//!   `train.average.kind`): a layer that sets another tag than the layers below it starts the section anew, so the
//!   hyperparameters of one optimizer never leak into another. The built-in defaults, which hold only what every
//!   data set or optimizer takes, stay.
//! - **Keys of which one is meant** (`train.epochs` or `train.steps`; `data` and `model` or `problem`; a checkpoint
//!   every so many epochs or steps; `train.bptt` or `train.windows`): a layer that sets one takes the others out of the layers below it.

use std::collections::HashSet;
use std::path::{Path as FilePath, PathBuf};
use std::sync::Arc;

use config::{Config, Map as ConfigMap, Source as ConfigSource, Value as ConfigValue, ValueKind};
use serde_json::{Number, Value};

use super::error::{ErrorKind, RecipeError};
use super::inside;
use super::path::{Path, Step};
use super::schema::SECTIONS;
use super::source::{Origin, Source, Span};
use super::yaml::{self, Entry, Kind, Node};

/// Sections that start anew when their tag changes.
const TAGGED: [(&[&str], &str); 6] = [
    (&["data"], "name"),
    (&["model"], "name"),
    (&["problem"], "name"),
    (&["optimizer"], "name"),
    (&["schedule"], "kind"),
    (&["train", "average"], "kind"),
];

/// Alternatives, each a set of paths; a layer that sets one takes the others out of the layers below.
const ALTERNATIVES: [&[&[&[&str]]]; 4] = [
    &[&[&["train", "epochs"]], &[&["train", "steps"]]],
    &[&[&["train", "checkpoint", "every_epochs"]], &[&["train", "checkpoint", "every_steps"]]],
    &[&[&["train", "bptt"]], &[&["train", "windows"]]],
    &[&[&["problem"]], &[&["data"], &["model"]]],
];

/// Beyond this a chain of `extends` is a mistake.
const MAX_FILES: usize = 64;

/// Keys on the way to a setting; the schema needs half as many.
const MAX_DEPTH: usize = 8;

/// Layers, lowest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Layers(Vec<Arc<Node>>);

impl Layers {
    /// Puts a layer on top.
    pub fn push(&mut self, layer: Node) {
        for (section, tag) in TAGGED {
            let path = [section, &[tag]].concat();
            let (new, old) = (leaf(&layer, &path), self.0.iter().rev().find_map(|below| leaf(below, &path)));
            if new.is_some() && old.is_some() && new != old {
                // The lowest layer is the built-in defaults.
                self.0.iter_mut().skip(1).for_each(|below| Arc::make_mut(below).remove(section));
            }
        }
        for alternatives in ALTERNATIVES {
            let set: Vec<bool> = alternatives
                .iter()
                .map(|paths| paths.iter().any(|path| at(&layer, path).is_some_and(|node| !node.is_null())))
                .collect();
            if set.iter().filter(|&&set| set).count() == 1 {
                let others = alternatives.iter().zip(&set).filter(|(_, set)| !**set);
                for path in others.flat_map(|(paths, _)| paths.iter()) {
                    self.0.iter_mut().for_each(|below| Arc::make_mut(below).remove(path));
                }
            }
        }
        self.0.push(Arc::new(layer));
    }

    /// Takes a section out of all layers.
    pub fn remove(&mut self, section: &str) {
        for layer in self.0.iter_mut().filter(|layer| layer.entry(section).is_some()) {
            Arc::make_mut(layer).remove(&[section]);
        }
    }

    /// The place of the value that the merge keeps: the topmost layer that has the path. With the place of its key.
    pub fn find(&self, path: &Path) -> Option<(Option<&Span>, &Node)> {
        self.0.iter().rev().find_map(|layer| layer.get(&path.0))
    }

    /// The place to show for a mistake at `path`: its value, or else the nearest thing around it.
    pub fn place(&self, path: &Path) -> Option<&Span> {
        (1..=path.0.len()).rev().find_map(|length| {
            let (key, node) = self.find(&Path(path.0[..length].to_vec()))?;
            // A section is shown by its key, a value by itself.
            Some(match node.kind {
                Kind::Map(_) => key.unwrap_or(&node.span),
                _ => &node.span,
            })
        })
    }

    /// The folder of the file that a value came from; none for what no file says.
    pub fn folder(&self, path: &Path) -> Option<&FilePath> {
        let (_, node) = self.find(path)?;
        let source = &node.span.source;
        let label = FilePath::new(&source.label);
        (source.origin == Origin::File && inside::read(label).is_none()).then(|| label.parent()).flatten()
    }

    /// The place of the key at `path`.
    pub fn key_place(&self, path: &Path) -> Option<&Span> {
        match self.find(path) {
            Some((Some(key), _)) => Some(key),
            _ => self.place(path),
        }
    }

    /// The name of the recipe: the topmost layer that is a file.
    pub fn recipe(&self) -> &str {
        let files = self.0.iter().rev().map(|layer| &layer.span.source);
        files
            .filter(|source| source.origin == Origin::File)
            .map(|source| source.label.as_str())
            .next()
            .unwrap_or("recipe")
    }

    /// All layers as one value.
    pub fn merge(&self) -> Result<Value, RecipeError> {
        let mut builder = Config::builder();
        for layer in &self.0 {
            // Keys of the root are read by `config` as paths; only known names may pass.
            for entry in layer.entries() {
                if !SECTIONS.contains(&entry.key.as_str()) {
                    return Err(RecipeError::new(
                        ErrorKind::UnknownKey,
                        format!("unknown key `{}`", entry.key),
                    )
                    .at(&entry.key_span)
                    .known(&entry.key, &SECTIONS));
                }
            }
            builder = builder.add_source(Layer(layer.clone()));
        }
        let merged = builder
            .build()
            .map_err(|error| RecipeError::new(ErrorKind::Value, format!("layers do not merge: {error}")))?;
        let nodes: Vec<&Node> = self.0.iter().map(Arc::as_ref).collect();
        Ok(from_config(merged.cache, &nodes))
    }
}

fn at<'a>(layer: &'a Node, path: &[&str]) -> Option<&'a Node> {
    path.iter().try_fold(layer, |node, key| node.entry(key).map(|entry| &entry.node))
}

fn leaf<'a>(layer: &'a Node, path: &[&str]) -> Option<&'a str> {
    at(layer, path)?.as_str()
}

/// One layer as the `config` crate wants it.
#[derive(Debug, Clone)]
struct Layer(Arc<Node>);

impl ConfigSource for Layer {
    fn clone_into_box(&self) -> Box<dyn ConfigSource + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<ConfigMap<String, ConfigValue>, config::ConfigError> {
        Ok(self.0.entries().iter().map(|entry| (entry.key.clone(), to_config(&entry.node))).collect())
    }
}

fn to_config(node: &Node) -> ConfigValue {
    let kind = match &node.kind {
        Kind::Leaf(Value::Bool(value)) => ValueKind::Boolean(*value),
        Kind::Leaf(Value::String(value)) => ValueKind::String(value.clone()),
        Kind::Leaf(Value::Number(value)) => match (value.as_i64(), value.as_u64(), value.as_f64()) {
            (Some(value), _, _) => ValueKind::I64(value),
            (_, Some(value), _) => ValueKind::U64(value),
            (_, _, value) => value.map_or(ValueKind::Nil, ValueKind::Float),
        },
        Kind::Leaf(_) => ValueKind::Nil,
        Kind::List(items) => ValueKind::Array(items.iter().map(to_config).collect()),
        Kind::Map(entries) => ValueKind::Table(
            entries.iter().map(|entry| (entry.key.clone(), to_config(&entry.node))).collect(),
        ),
    };
    ConfigValue::new(None, kind)
}

/// Back from the `config` crate, whose tables have no order: keys come as the layers (`nodes`, lowest first) have them.
fn from_config(value: ConfigValue, nodes: &[&Node]) -> Value {
    match value.kind {
        ValueKind::Nil => Value::Null,
        ValueKind::Boolean(value) => value.into(),
        ValueKind::I64(value) => value.into(),
        ValueKind::U64(value) => value.into(),
        ValueKind::Float(value) => Number::from_f64(value).map_or(Value::Null, Value::Number),
        ValueKind::String(value) => value.into(),
        ValueKind::Array(items) => {
            // A list is the topmost layer's, whole.
            let list = nodes.iter().rev().find_map(|node| match &node.kind {
                Kind::List(items) => Some(items.as_slice()),
                _ => None,
            });
            let node = |index| list.and_then(|list| list.get(index));
            let item = |(index, item)| from_config(item, node(index).as_slice());
            items.into_iter().enumerate().map(item).collect()
        }
        ValueKind::Table(mut table) => {
            let mut out = serde_json::Map::new();
            for entry in nodes.iter().flat_map(|node| node.entries()) {
                if let Some(value) = table.remove(&entry.key) {
                    let inner =
                        nodes.iter().filter_map(|node| node.entry(&entry.key)).map(|entry| &entry.node);
                    out.insert(entry.key.clone(), from_config(value, &inner.collect::<Vec<_>>()));
                }
            }
            Value::Object(out)
        }
        // `to_config` makes neither.
        ValueKind::I128(_) | ValueKind::U128(_) => Value::Null,
    }
}

/// The built-in defaults.
pub(super) fn defaults() -> Result<Node, RecipeError> {
    let text = include_str!("defaults.yaml");
    yaml::parse(&Source::new(Origin::Defaults, "built-in defaults", text))
}

/// The built-in defaults as a value.
pub(crate) fn built_in() -> Value {
    // They can be read, or no recipe could.
    defaults().map(|layer| layer.value()).unwrap_or_default()
}

/// A recipe given as text; paths in its `extends` are relative to the working directory.
pub(super) fn text(label: &str, text: &str) -> Result<Vec<Node>, RecipeError> {
    let mut reader = Reader::default();
    reader.add(&Source::new(Origin::File, label, text), FilePath::new(""))?;
    Ok(reader.layers)
}

/// The layers of a recipe file: what it extends, depth first, then itself.
pub(super) fn file(path: &FilePath) -> Result<Vec<Node>, RecipeError> {
    let mut reader = Reader::default();
    reader.open(path, &Source::read(path)?)?;
    Ok(reader.layers)
}

#[derive(Default)]
struct Reader {
    layers: Vec<Node>,
    /// Files being read, outermost first.
    open: Vec<(PathBuf, String)>,
    /// Files read: one that two layers extend is applied once, below both.
    done: HashSet<PathBuf>,
}

impl Reader {
    fn open(&mut self, path: &FilePath, source: &Arc<Source>) -> Result<(), RecipeError> {
        let real = real(path).unwrap_or_else(|_| path.to_owned());
        self.open.push((real.clone(), source.label.clone()));
        self.add(source, path.parent().unwrap_or(FilePath::new("")))?;
        self.open.pop();
        self.done.insert(real);
        Ok(())
    }

    fn add(&mut self, source: &Arc<Source>, folder: &FilePath) -> Result<(), RecipeError> {
        let mut root = yaml::parse(source)?;
        if root.is_null() {
            root.kind = Kind::Map(Vec::new());
        }
        if !matches!(root.kind, Kind::Map(_)) {
            return Err(
                RecipeError::new(ErrorKind::Type, "expected a recipe (a map of sections)").at(&root.span)
            );
        }
        for layer in extends(&root)? {
            self.extend(layer, folder)?;
        }
        root.remove(&["extends"]);
        self.layers.push(root);
        Ok(())
    }

    fn extend(&mut self, (span, name): (Span, String), folder: &FilePath) -> Result<(), RecipeError> {
        let path = inside::join(folder, &name);
        let report = |message: String| {
            let report = RecipeError::new(ErrorKind::Extends, message).at(&span);
            self.open
                .iter()
                .rev()
                .skip(1)
                .fold(report, |report, (_, label)| report.note(format!("extended by {label}")))
        };
        let real = real(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => report(format!("layer `{}` does not exist", path.display())),
            _ => report(format!("cannot read layer `{}`: {error}", path.display())),
        })?;
        if let Some(first) = self.open.iter().position(|(open, _)| *open == real) {
            let circle: Vec<&str> = self.open[first..].iter().map(|(_, label)| label.as_str()).collect();
            return Err(report(format!(
                "layers extend each other: {} -> {}",
                circle.join(" -> "),
                path.display()
            )));
        }
        if self.done.contains(&real) {
            return Ok(());
        }
        if self.done.len() + self.open.len() >= MAX_FILES {
            return Err(report(format!("a recipe of more than {MAX_FILES} files")));
        }
        let source = Source::read(&path).map_err(|error| report(error.message().to_owned()))?;
        self.open(&path, &source)
    }
}

/// By what a file is known that several paths lead to.
fn real(path: &FilePath) -> std::io::Result<PathBuf> {
    match inside::read(path) {
        Some(Some(_)) => Ok(path.to_owned()),
        Some(None) => Err(std::io::ErrorKind::NotFound.into()),
        None => path.canonicalize(),
    }
}

/// The entries of `extends`: a path or a list of paths.
fn extends(root: &Node) -> Result<Vec<(Span, String)>, RecipeError> {
    let Some(entry) = root.entry("extends") else { return Ok(Vec::new()) };
    let items = match &entry.node.kind {
        Kind::List(items) => items.as_slice(),
        Kind::Leaf(Value::Null) => &[],
        _ => std::slice::from_ref(&entry.node),
    };
    let path = |item: &Node| match item.as_str() {
        Some(path) => Ok((item.span.clone(), path.to_owned())),
        None => {
            Err(RecipeError::new(ErrorKind::Type, "extends: expected the path of a layer").at(&item.span))
        }
    };
    items.iter().map(path).collect()
}

/// The layer of `TAPER__A__B=value` variables; names are taken in lower case.
pub(super) fn environment(variables: &[(String, String)]) -> Result<Node, RecipeError> {
    const PREFIX: &str = "TAPER__";
    let mut variables: Vec<_> = variables.iter().filter(|(name, _)| name.starts_with(PREFIX)).collect();
    // The order of the environment is arbitrary; of two that say the same, the result must not depend on it.
    variables.sort();
    let mut layer =
        Node::map(Span::new(Source::new(Origin::Environment, "environment", ""), 0..0), Vec::new());
    for (name, value) in variables {
        let source = Source::new(Origin::Environment, "environment", format!("{name}={value}"));
        let key = name[PREFIX.len()..].to_lowercase();
        setting(&mut layer, &source, &key.split("__").collect::<Vec<_>>(), PREFIX.len()..name.len())?;
    }
    Ok(layer)
}

/// The layer of `--set a.b=value` arguments; of two for one key the later wins.
pub(super) fn overrides(arguments: &[String]) -> Result<Node, RecipeError> {
    let mut layer = Node::map(Span::new(Source::new(Origin::Set, "--set", ""), 0..0), Vec::new());
    for argument in arguments {
        let source = Source::new(Origin::Set, "--set", argument.as_str());
        let Some((key, _)) = argument.split_once('=') else {
            return Err(RecipeError::new(ErrorKind::Override, "expected `--set key=value`")
                .at(&Span::new(source, 0..argument.len()))
                .help("for example --set optimizer.lr=0.01"));
        };
        setting(&mut layer, &source, &key.split('.').collect::<Vec<_>>(), 0..key.len())?;
    }
    Ok(layer)
}

/// Adds one `key=value` text to a layer; the value is YAML, so `[1, 2]`, `true` and `1e-3` mean what they do in a file.
fn setting(
    layer: &mut Node,
    source: &Arc<Source>,
    path: &[&str],
    key: std::ops::Range<usize>,
) -> Result<(), RecipeError> {
    let key_span = Span::new(source.clone(), key.clone());
    let plain =
        |part: &&str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || "_-".contains(c));
    if !path.iter().all(plain) || path.len() > MAX_DEPTH {
        let report =
            RecipeError::new(ErrorKind::Override, "expected a key like `train.epochs`").at(&key_span);
        return Err(match path.iter().any(|part| part.contains('[')) {
            true => report.help("a list is set as a whole: --set 'train.freeze=[\"*.bias\"]'"),
            false => report,
        });
    }
    if path == ["extends"] {
        return Err(RecipeError::new(ErrorKind::Override, "`extends` belongs in a recipe file").at(&key_span));
    }
    let value = yaml::parse_part(source, key.end + 1..source.text.len())?;
    let text = &source.text[key.end + 1..];
    if value.is_null() && !matches!(text.trim(), "null" | "Null" | "NULL" | "~") {
        return Err(RecipeError::new(
            ErrorKind::Override,
            format!("expected a value for `{}`, found none", path.join(".")),
        )
        .at(&key_span)
        .help("`null` takes a setting back to its default, `\"\"` is an empty text"));
    }
    layer.insert(path, &key_span, value);
    Ok(())
}

/// A layer with one run of a sweep: nested maps, dotted keys, or both.
pub(super) fn undotted(entries: &[Entry], span: &Span) -> Result<Node, RecipeError> {
    let mut layer = Node::map(span.clone(), Vec::new());
    spread(&mut layer, &mut Vec::new(), entries)?;
    Ok(layer)
}

fn spread(layer: &mut Node, above: &mut Vec<String>, entries: &[Entry]) -> Result<(), RecipeError> {
    for entry in entries {
        let depth = above.len();
        above.extend(entry.key.split('.').take(MAX_DEPTH + 1).map(str::to_owned));
        if above.len() > MAX_DEPTH || above.iter().any(String::is_empty) {
            let message = "expected a key like `train.epochs`";
            return Err(RecipeError::new(ErrorKind::Value, message).at(&entry.key_span));
        }
        match &entry.node.kind {
            Kind::Map(inner) if !inner.is_empty() => spread(layer, above, inner)?,
            _ => {
                let path: Vec<&str> = above.iter().map(String::as_str).collect();
                if at(layer, &path).is_some() {
                    let message = format!("`{}` is varied twice", above.join("."));
                    return Err(RecipeError::new(ErrorKind::Value, message).at(&entry.key_span));
                }
                layer.insert(&path, &entry.key_span, entry.node.clone());
            }
        }
        above.truncate(depth);
    }
    Ok(())
}

/// The paths of all leaves of a layer, in order.
pub(super) fn leaves(node: &Node) -> Vec<Path> {
    fn walk(node: &Node, path: &mut Vec<Step>, out: &mut Vec<Path>) {
        match &node.kind {
            Kind::Map(entries) => entries.iter().for_each(|entry| {
                path.push(Step::Key(entry.key.clone()));
                walk(&entry.node, path, out);
                path.pop();
            }),
            _ => out.push(Path(path.clone())),
        }
    }
    let mut out = Vec::new();
    walk(node, &mut Vec::new(), &mut out);
    out
}
