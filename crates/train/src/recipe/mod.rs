//! Recipes: what to train, in YAML.
//!
//! A recipe is layered, lowest first, by the `config` crate: the built-in defaults (`defaults.yaml`), the
//! layers named in `extends` (paths relative to the file that names them, or `taper:configs/…` inside the program), the recipe itself, the environment
//! (`TAPER__TRAIN__EPOCHS=5`) and `--set train.epochs=5`. Every value knows where it came from, every mistake is
//! shown where it is, and a key that nobody reads is a mistake.
//!
//! When a layer names another optimizer (or model, data set, problem, schedule, average) than the layers below it,
//! what those say in that section is dropped, so that no hyperparameter leaks from one optimizer into another.
//!
//! ```
//! use taper_train::recipe::{Recipe, Unchecked};
//!
//! let recipe = Recipe::parse(
//!     "mine.yaml",
//!     "data: {name: mnist}
//! model: {name: mlp, hidden: [100]}
//! optimizer: {name: decgd, lr: 0.01}
//! train: {epochs: 5}
//! sweep: {seeds: [1, 2]}",
//!     &["optimizer.lr=0.02".to_owned()],
//!     &Unchecked,
//! )?;
//! assert_eq!(recipe.runs().len(), 2);
//! assert_eq!(recipe.runs()[1].seed, 2);
//! assert_eq!(recipe.optimizer.lr, 0.02);
//! # Ok::<(), taper_train::recipe::RecipeError>(())
//! ```

mod check;
mod de;
mod error;
mod id;
mod inside;
mod layers;
mod located;
mod path;
mod range;
mod schema;
mod source;
mod sweep;
mod warn;
mod write;
mod yaml;

use std::collections::HashSet;
use std::ops::Deref;
use std::path::Path as FilePath;

use serde_json::Value;

pub(crate) use check::common_range;
pub use check::{SectionError, Sections, Unchecked};
pub(crate) use de::in_words;
pub use error::nearest;
pub use error::{ErrorKind, RecipeError};
pub(crate) use id::changes_no_result;
pub use inside::{inside, named_inside};

/// Something that a recipe says to no effect: it shows like an error, and begins with `warning`.
pub type RecipeWarning = RecipeError;
pub use located::Located;
pub use schema::{
    Augment, Average, Bptt, Budget, Checkpoint, Cluster, Data, Device, Domain, EarlyStop, EvalAugment,
    Freeze, FreezeLater, Group, Holdout, LastBatch, Look, LossForScale, Map, Metric, Model, NoDecay,
    Normalize, OnDivergence, Optimizer, Precision, Probe, Problem, Schedule, Select, Spec, Task, Train,
    Views, What, When, Windows,
};

pub(crate) use layers::built_in;
pub(crate) use range::Range;
pub(crate) use schema::{fixed as fixed_sections, generator};
pub(crate) use sweep::section as sweep_section;
pub(crate) use write::flow;
pub use write::flow as on_one_line;

use layers::Layers;
use path::Path;
use source::{Origin, Source};

/// What a text stands for, read as a recipe's values are; `label` says in errors where the text is from.
pub fn value(label: &str, text: &str) -> Result<Value, RecipeError> {
    Ok(yaml::parse(&Source::new(Origin::Set, label, text))?.value())
}

/// A resolved recipe: its settings (through `Deref`), where each came from, and the runs of its sweep.
///
/// With a sweep, the settings are those of its first run; [`Recipe::runs`] has them all.
#[derive(Debug, Clone)]
pub struct Recipe {
    spec: Spec,
    /// `spec` as a value, in the schema's order, nothing left out.
    resolved: Value,
    layers: Layers,
    varied: Vec<(String, Value)>,
    id: String,
    runs: Vec<Recipe>,
    /// Those of the sweep's seeds that confirm, of which some are chosen.
    confirming: Vec<Recipe>,
}

impl Deref for Recipe {
    type Target = Spec;

    fn deref(&self) -> &Spec {
        &self.spec
    }
}

impl Recipe {
    /// Reads a recipe file with the layers it extends, the `TAPER__` variables of the environment and the `--set`
    /// arguments (`a.b=value`, the value in YAML).
    pub fn load(
        path: impl AsRef<FilePath>,
        set: &[String],
        sections: &dyn Sections,
    ) -> Result<Self, RecipeError> {
        let path = path.as_ref();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or("recipe");
        Self::resolve(layers::file(path)?, stem, &environment()?, set, sections)
    }

    /// Reads a recipe given as text; `label` names it in messages, paths in its `extends` are relative to the working
    /// directory, and the environment has no say.
    pub fn parse(
        label: &str,
        text: &str,
        set: &[String],
        sections: &dyn Sections,
    ) -> Result<Self, RecipeError> {
        Self::parse_with_env(label, text, &[], set, sections)
    }

    /// [`Recipe::parse`] with variables in place of the environment.
    pub fn parse_with_env(
        label: &str,
        text: &str,
        variables: &[(String, String)],
        set: &[String],
        sections: &dyn Sections,
    ) -> Result<Self, RecipeError> {
        let stem = FilePath::new(label).file_stem().and_then(|stem| stem.to_str()).unwrap_or("recipe");
        Self::resolve(layers::text(label, text)?, stem, variables, set, sections)
    }

    fn resolve(
        files: Vec<yaml::Node>,
        stem: &str,
        variables: &[(String, String)],
        set: &[String],
        sections: &dyn Sections,
    ) -> Result<Self, RecipeError> {
        let mut base = Layers::default();
        base.push(layers::defaults()?);
        files.into_iter().for_each(|layer| base.push(layer));
        let mut top = [layers::environment(variables)?, layers::overrides(set)?];
        let with = |mut layers: Layers, top: &[yaml::Node]| {
            top.iter().for_each(|layer| layers.push(layer.clone()));
            layers
        };
        let whole = with(base.clone(), &top);
        let Some(variations) = sweep::expand(&whole, &top)? else {
            return Self::single(whole, stem, Vec::new(), sections);
        };
        // A run knows nothing of the others: each would carry the list of all of them through its merge.
        base.remove("sweep");
        top.iter_mut().for_each(|layer| layer.remove(&["sweep"]));
        let (mut runs, mut confirming): (Vec<Recipe>, Vec<Recipe>) = Default::default();
        let mut ids = HashSet::new();
        for variation in variations {
            let mut layers = base.clone();
            layers.push(variation.layer);
            let run = Self::single(with(layers, &top), stem, variation.varied, sections)?;
            // A sweep is a set: what it holds twice runs once.
            if ids.insert(run.id.clone()) {
                if variation.confirms { &mut confirming } else { &mut runs }.push(run);
            }
        }
        // A sweep has at least one run: `expand` refuses one that varies nothing.
        let first = runs
            .first()
            .cloned()
            .ok_or_else(|| RecipeError::new(ErrorKind::Value, "the sweep has no runs"))?;
        // A problem has one figure of merit, which no data set could spoil.
        let chosen = || first.spec.train.select == Select::Val || first.spec.problem.is_some();
        if !confirming.is_empty() && !chosen() {
            let message = "sweep.confirm chooses on a validation set: give `train.select: val`";
            return Err(RecipeError::new(ErrorKind::Value, message)
                .at_opt(whole.place(&Path::default().key("sweep").key("confirm"))));
        }
        Ok(Self { runs, confirming, varied: Vec::new(), ..first })
    }

    /// One run: the layers without their sweep.
    fn single(
        layers: Layers,
        stem: &str,
        varied: Vec<(String, Value)>,
        sections: &dyn Sections,
    ) -> Result<Self, RecipeError> {
        let mut merged = match layers.merge()? {
            Value::Object(entries) => entries,
            // `merge` makes a map of sections.
            _ => Map::new(),
        };
        merged.shift_remove("sweep");
        merged.retain(|_, value| !value.is_null());
        beside(&mut merged, &layers, sections);
        merged.entry("name").or_insert_with(|| stem.into());
        check::fill(&mut merged, &layers, sections)?;
        let merged = Value::Object(merged);
        let spec: Spec = de::read(&merged, &Path::default(), &layers)?;
        check::in_range(&merged, &layers)?;
        check::check(&spec, &layers, sections)?;
        let resolved = serde_json::to_value(&spec).map_err(|error| {
            RecipeError::new(ErrorKind::Value, format!("the recipe cannot be written: {error}"))
        })?;
        let id = id::id(&resolved);
        Ok(Self { spec, resolved, layers, varied, id, runs: Vec::new(), confirming: Vec::new() })
    }

    /// The runs: those of the sweep in its order, each without a sweep of its own; or just this one.
    pub fn runs(&self) -> &[Recipe] {
        if self.runs.is_empty() { std::slice::from_ref(self) } else { &self.runs }
    }

    /// The sweep's runs on the seeds of `sweep.confirm`: of each configuration, though only the best of each optimizer is trained
    /// on them.
    pub fn confirming(&self) -> &[Recipe] {
        &self.confirming
    }

    /// What the run works on.
    pub fn task(&self) -> Task<'_> {
        match (&self.spec.data, &self.spec.model, &self.spec.problem) {
            (Some(data), Some(model), _) => Task::Network { data, model },
            (_, _, Some(problem)) => Task::Problem(problem),
            _ => unreachable!("`check` lets no recipe pass without data and model or a problem"),
        }
    }

    /// 12 hexadecimal digits that depend on the settings that can change a result: not on the name, on what is logged or kept, nor
    /// on how or where they were written.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The id that this run would have without a seed: runs that differ in nothing else share it.
    pub fn configuration(&self) -> String {
        let mut settings = self.resolved.clone();
        if let Value::Object(entries) = &mut settings {
            entries.shift_remove("seed");
        }
        id::id(&settings)
    }

    /// What this run shares with those that differ from it in their length alone.
    pub(crate) fn series(&self) -> String {
        id::series(&self.resolved)
    }

    /// The name of the run's directory: `<name>-<id>`.
    pub fn directory(&self) -> String {
        format!("{}-{}", self.spec.name, self.id)
    }

    /// What the sweep set for this run, in its order; empty without a sweep.
    pub fn varied(&self) -> &[(String, Value)] {
        &self.varied
    }

    /// The settings as one value, complete.
    pub fn resolved(&self) -> &Value {
        &self.resolved
    }

    /// The settings as YAML whose comments say where each value came from. It reads back as the same run.
    pub fn to_yaml(&self) -> String {
        write::yaml(self)
    }

    /// All settings with where they came from, and the runs with their ids.
    pub fn plan(&self) -> String {
        write::plan(self, &|_| "")
    }

    /// The settings that all runs of the sweep share, as [`Recipe::settings`] has them.
    pub fn shared_settings(&self) -> Vec<(String, String, String)> {
        write::shared(self)
    }

    /// [`Recipe::plan`] with a word for each run.
    pub fn plan_marked(&self, mark: &dyn Fn(&Recipe) -> &'static str) -> String {
        write::plan(self, mark)
    }

    /// Every setting as (path, value, where it came from), in the schema's order.
    pub fn settings(&self) -> Vec<(String, String, String)> {
        let mut out = Vec::new();
        self.walk(&Path::default(), &self.resolved, &mut out);
        out
    }

    fn walk(&self, path: &Path, value: &Value, out: &mut Vec<(String, String, String)>) {
        match value {
            Value::Object(entries) if !entries.is_empty() => {
                entries.iter().for_each(|(key, value)| self.walk(&path.key(key), value, out));
            }
            value => out.push((path.to_string(), write::flow(value), self.provenance(path))),
        }
    }

    /// The setting at a path of [`Recipe::settings`].
    pub fn value(&self, path: &str) -> Option<&Value> {
        path.split('.').try_fold(&self.resolved, |value, key| value.get(key))
    }

    fn text(&self, path: &str) -> Option<String> {
        self.value(path).map(write::flow)
    }

    /// Where the value at a path came from.
    fn provenance(&self, path: &Path) -> String {
        if let Some((_, node)) = self.layers.find(path) {
            return node.span.to_string();
        }
        let tag = |keys: &[&str]| {
            self.layers.find(&Path::parse(&keys.join("."))).and_then(|(_, node)| node.as_str())
        };
        match path.to_string().split('.').next() {
            Some("name") => "file name".to_owned(),
            Some(section @ ("data" | "model" | "problem" | "optimizer" | "schedule")) => {
                let tag = tag(&[section, "name"]).or_else(|| tag(&[section, "kind"]));
                tag.map_or_else(|| "default".to_owned(), |tag| format!("default of {tag}"))
            }
            _ => "default".to_owned(),
        }
    }

    /// A mistake that only shows later (a pattern that matches no parameter, a file that is not there), reported where
    /// the setting at `path` (`optimizer.groups[0].match`) came from.
    pub fn error_at(&self, path: &str, message: impl Into<String>) -> RecipeError {
        RecipeError::said(ErrorKind::Value, &message.into()).at_opt(self.layers.place(&Path::parse(path)))
    }

    /// What a registry refuses only once it is used (a model that does not fit the data), reported as if it had refused the
    /// section at once.
    pub fn refused(&self, section: &str, error: SectionError) -> RecipeError {
        check::refused(error, &Path::parse(section), "name", &[], &self.layers)
    }
}

/// The settings that name files, by section and key. A relative path is from the file that says so.
pub fn files(data: Option<&str>, sections: &dyn Sections) -> Vec<(&'static str, &'static str)> {
    let of_data = data.map_or(&[][..], |name| sections.data_paths(name));
    of_data.iter().map(|key| ("data", *key)).chain([("train", "init_from")]).collect()
}

/// A relative path that a file has is one from that file, where there is something: the run then has the way from here. What is
/// not there may be under a folder of data sets, or is from here already.
fn beside(recipe: &mut Map, layers: &Layers, sections: &dyn Sections) {
    let here = std::env::current_dir().unwrap_or_default();
    let data = recipe.get("data").and_then(|data| data.get("name")).and_then(Value::as_str);
    for (section, key) in files(data, sections) {
        let folder = layers.folder(&Path::parse(&format!("{section}.{key}")));
        let value = recipe.get_mut(section).and_then(|section| section.get_mut(key));
        let (Some(folder), Some(value)) = (folder, value) else { continue };
        let found = |text: &mut String| {
            let path = folder.join(&*text);
            if !text.is_empty() && FilePath::new(text).is_relative() && path.exists() {
                let path = source::tidy(&path);
                // However the recipe is named, its run has one id.
                *text = path.strip_prefix(&here).unwrap_or(&path).display().to_string();
            }
        };
        match value {
            Value::String(text) => found(text),
            Value::Array(items) => items.iter_mut().for_each(|item| {
                if let Value::String(text) = item {
                    found(text);
                }
            }),
            _ => {}
        }
    }
}

/// The `TAPER__` variables of the process.
fn environment() -> Result<Vec<(String, String)>, RecipeError> {
    let mut variables = Vec::new();
    for (name, value) in std::env::vars_os() {
        let Some(name) = name.to_str().filter(|name| name.starts_with("TAPER__")) else { continue };
        let value = value.into_string().map_err(|_| {
            RecipeError::new(ErrorKind::Override, format!("expected UTF-8 text in the variable {name}"))
        })?;
        variables.push((name.to_owned(), value));
    }
    Ok(variables)
}
