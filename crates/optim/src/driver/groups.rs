//! Parameter groups: hyperparameters by name pattern or rank, and the rates that follow from them.
use crate::rule::Config;
use crate::state::{Header, SavedGroup};
use crate::{Error, Result, StepContext};
use candle_core::Var;
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};

/// Hyperparameters for the parameters that match a pattern.
///
/// A pattern is a glob (`*` for any characters, `?` for one) over the whole name, a regular expression between
/// slashes that may match anywhere in it, or `rank <= N` for parameters of at most N axes.
///
/// ```
/// use taper_optim::Group;
/// let group = Group::new("*.bias").set("weight_decay", 0.0);
/// assert!(group.pattern()?.is_match("layer1.0.bias", 1));
/// assert!(Group::no_decay().pattern()?.is_match("ln_f.weight", 1));
/// # Ok::<(), taper_optim::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// The pattern.
    #[serde(rename = "match")]
    pub pattern: String,
    /// The hyperparameters that differ from the optimizer's.
    #[serde(flatten)]
    pub overrides: Map<String, Value>,
}

impl Group {
    /// A group without differences yet.
    pub fn new(pattern: &str) -> Self {
        Self { pattern: pattern.to_owned(), overrides: Map::new() }
    }

    /// Sets a hyperparameter of the group.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.overrides.insert(key.to_owned(), value.into());
        self
    }

    /// Whatever is not a matrix without weight decay, as timm has it: biases, and the scales and shifts of norm layers, by
    /// whatever name. A model without any is no error.
    pub fn no_decay() -> Self {
        Self::new("rank <= 1").set("weight_decay", 0.0)
    }

    /// The same by name, for models whose biases or norms have more axes: what is called `bias`, and what belongs to a layer
    /// called `bn`, `ln` or `…norm` (`bn1`, `ln_f`, `input_layernorm`, `LayerNorm`, `rms_norm`, `q_norm`, `norm_1`, …) or is the
    /// norm of a ResNet's shortcut (`shortcut.1`, `downsample.1`).
    pub fn no_decay_by_name() -> Self {
        let pattern = concat!(
            r"/(^|\.)bias(_[a-z]+)?(_l\d+)?$",
            r"|(?i)(^|\.)([a-z0-9_]*norm|bn|ln)(_?[0-9]+|_[a-z0-9]+)?\.(weight|bias|scale|gamma|beta)$",
            r"|(^|\.)(shortcut|downsample)\.1\.(weight|bias)$/",
        );
        Self::new(pattern).set("weight_decay", 0.0)
    }

    /// The compiled pattern.
    pub fn pattern(&self) -> Result<Pattern> {
        let rank = self.pattern.strip_prefix("rank").and_then(|p| p.trim_start().strip_prefix("<="));
        if let Some(rank) = rank {
            let message = format!("expected `rank <= N`, found `{}`", self.pattern);
            let refused = |_| Error::Group { pattern: self.pattern.clone(), message };
            return rank.trim().parse().map(Pattern::Rank).map_err(refused);
        }
        let refused =
            |e: regex::Error| Error::Group { pattern: self.pattern.clone(), message: e.to_string() };
        compile(&self.pattern).map(Pattern::Name).map_err(refused)
    }
}

/// A compiled [`Group::pattern`].
#[derive(Clone, Debug)]
pub enum Pattern {
    /// By name.
    Name(Regex),
    /// At most that many axes.
    Rank(usize),
}

impl Pattern {
    /// Whether a parameter of that name and that many axes matches.
    pub fn is_match(&self, name: &str, rank: usize) -> bool {
        match self {
            Self::Name(regex) => regex.is_match(name),
            Self::Rank(most) => rank <= *most,
        }
    }
}

/// A glob, or a regular expression between slashes.
pub(crate) fn compile(pattern: &str) -> Result<Regex, regex::Error> {
    match pattern.strip_prefix('/').and_then(|p| p.strip_suffix('/')) {
        Some(regex) => Regex::new(regex),
        None => {
            let body = regex::escape(pattern).replace(r"\*", ".*").replace(r"\?", ".");
            Regex::new(&format!("^(?s:{body})$"))
        }
    }
}

/// The group of each parameter. A pattern of names that matches nothing, a parameter that two patterns claim and a parameter
/// given twice are errors.
pub(crate) fn claim(params: &[(String, Var)], groups: &[Group]) -> Result<Vec<usize>> {
    let mut claimed: Vec<Option<usize>> = vec![None; params.len()];
    for (index, group) in groups.iter().enumerate() {
        let pattern = group.pattern()?;
        let refuse = |message| Err(Error::Group { pattern: group.pattern.clone(), message });
        // A misspelt name would silently do nothing; a rank cannot be misspelt.
        let mut matched = matches!(pattern, Pattern::Rank(_));
        for (claim, (name, var)) in claimed.iter_mut().zip(params) {
            if !pattern.is_match(name, var.rank()) {
                continue;
            }
            if let Some(other) = claim.replace(index) {
                let other = &groups[other].pattern;
                return refuse(format!("parameter `{name}` also belongs to group `{other}`"));
            }
            matched = true;
        }
        if !matched {
            let names: Vec<_> = params.iter().take(8).map(|(n, _)| n.as_str()).collect();
            let (count, names) = (params.len(), names.join(", "));
            return refuse(format!("matches none of the {count} parameters ({names}, …)"));
        }
    }
    let (mut names, mut ids) = (BTreeSet::new(), Vec::with_capacity(params.len()));
    for (name, var) in params {
        if !names.insert(name) || ids.contains(&var.id()) {
            return Err(Error::DuplicateParameter(name.clone()));
        }
        ids.push(var.id());
    }
    Ok(claimed.into_iter().map(|claim| claim.map_or(0, |index| index + 1)).collect())
}

/// The hyperparameters of all groups, and the learning rate that is set.
#[derive(Debug)]
pub(crate) struct Hyper<C> {
    /// The default group first; the others with their patterns.
    pub groups: Vec<(Option<String>, C)>,
    pub lr: f64,
}

impl<C: Config> Hyper<C> {
    /// `config`, from which `groups` differ. `optimizer` names it in errors.
    pub fn new(optimizer: &str, config: C, groups: &[Group]) -> Result<Self> {
        checked(optimizer, &config)?;
        let mut all = vec![(None, config.clone())];
        for group in groups {
            all.push((Some(group.pattern.clone()), configure(optimizer, &config, &group.overrides)?));
        }
        Ok(Self { lr: config.lr(), groups: all })
    }

    /// The hyperparameters of the default group.
    pub fn default(&self) -> &C {
        &self.groups[0].1
    }

    /// The learning rate of the default group in a step.
    pub fn base(&self, context: &StepContext) -> f64 {
        context.lr.unwrap_or(self.lr) * context.factor
    }

    /// The learning rate of a group in a step.
    pub fn rate(&self, group: usize, context: &StepContext) -> f64 {
        let (own, default, base) = (self.groups[group].1.lr(), self.default().lr(), self.base(context));
        match group {
            0 => base,
            // No ratio can be kept to a rate of 0: what is left is the schedule.
            _ if default == 0.0 => own * context.factor,
            _ => own * (base / default),
        }
    }

    /// The momentum of a group in a step.
    pub fn momentum(&self, group: usize, context: &StepContext) -> Result<f64> {
        let (own, default) = (self.groups[group].1.momentum(), self.default().momentum());
        let base = context.momentum.filter(|_| group == 0 || own == default).unwrap_or(own);
        let found = base * context.momentum_factor;
        if (0.0..1.0).contains(&found) {
            return Ok(found);
        }
        Err(Error::Context { what: "momentum", expected: "a number in [0, 1)", found })
    }

    /// What of them is saved.
    pub fn save(&self, optimizer: &str, header: &mut Header) -> Result<()> {
        if !self.lr.is_finite() {
            let message = format!("expected a finite number, found {}", self.lr);
            return Err(invalid(optimizer, "lr", message));
        }
        header.optimizer = optimizer.to_owned();
        header.lr = Some(self.lr);
        header.groups = self.saved();
        Ok(())
    }

    fn saved(&self) -> Vec<SavedGroup> {
        let groups = self.groups.iter();
        groups
            .map(|(pattern, config)| SavedGroup { pattern: pattern.clone(), config: fields(config) })
            .collect()
    }

    /// What of a header differs in what parameters of these names and groups would be trained with.
    pub fn differences<'a>(
        &self,
        header: &Header,
        params: impl Iterator<Item = (&'a str, usize)>,
    ) -> Vec<String> {
        // Files of before have none.
        if header.groups.is_empty() {
            return Vec::new();
        }
        let ours = self.saved();
        // A null is a key that is not set: what a later version adds is not in the files of an earlier one.
        let set = |map: &Map<String, Value>, key: &String| map.get(key).filter(|v| !v.is_null()).cloned();
        let same = |a: &Map<String, Value>, b: &Map<String, Value>| {
            a.keys().chain(b.keys()).all(|key| set(a, key) == set(b, key))
        };
        let mut found: BTreeMap<(usize, usize), Vec<&str>> = BTreeMap::new();
        for (name, group) in params {
            let Some(scalars) = header.params.get(name) else { continue };
            if header.groups.get(scalars.group).is_none_or(|saved| !same(&saved.config, &ours[group].config))
            {
                found.entry((group, scalars.group)).or_default().push(name);
            }
        }
        let mut differences = Vec::new();
        for ((group, saved), names) in found {
            let (ours, none) = (&ours[group], Map::new());
            let saved = header.groups.get(saved).map_or(&none, |saved| &saved.config);
            let keys: BTreeSet<&String> = ours.config.keys().chain(saved.keys()).collect();
            for key in keys.into_iter().filter(|key| set(&ours.config, key) != set(saved, key)) {
                let show = |map: &Map<String, Value>| map.get(key).map_or("nothing".into(), number);
                let (expected, found) = (show(&ours.config), show(saved));
                let more = if names.len() > 3 { ", …" } else { "" };
                let of = names[..names.len().min(3)].join(", ");
                differences.push(format!("{key}: expected {expected}, found {found} (of {of}{more})"));
            }
        }
        differences
    }
}

/// A value as people write it: 1e-8, not 0.00000001.
fn number(value: &Value) -> String {
    match value.as_f64() {
        Some(v) if v != 0.0 && !(1e-4..1e6).contains(&v.abs()) => format!("{v:e}"),
        Some(v) => format!("{v}"),
        None => value.to_string(),
    }
}

/// All hyperparameters by name.
pub(crate) fn fields<C: Config>(config: &C) -> Map<String, Value> {
    match serde_json::to_value(config) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}

fn checked<C: Config>(optimizer: &str, config: &C) -> Result<()> {
    config.check().map_err(|e| invalid(optimizer, e.key, e.message))
}

/// A configuration from `base` with `overrides` on top. Unknown keys, wrong types and bad values are refused.
pub(crate) fn configure<C: Config>(optimizer: &str, base: &C, overrides: &Map<String, Value>) -> Result<C> {
    let parse = |map: Map<String, Value>| serde_json::from_value::<C>(Value::Object(map));
    let config = if overrides.is_empty() {
        base.clone()
    } else {
        let merged = merge(optimizer, serde_json::to_value(base), overrides, &|map| parse(map).map(drop))?;
        parse(merged).map_err(|e| invalid(optimizer, "config", e.to_string()))?
    };
    checked(optimizer, &config)?;
    Ok(config)
}

pub(crate) fn invalid(optimizer: &str, key: &str, message: String) -> Error {
    Error::Hyperparameter { optimizer: optimizer.to_owned(), key: key.to_owned(), message }
}

/// The hyperparameters in `base` with `overrides` on top, where `parse` takes them.
fn merge(
    optimizer: &str,
    base: serde_json::Result<Value>,
    overrides: &Map<String, Value>,
    parse: &dyn Fn(Map<String, Value>) -> serde_json::Result<()>,
) -> Result<Map<String, Value>> {
    let Ok(Value::Object(mut merged)) = base else {
        let message = "expected a configuration that serializes to a map";
        return Err(invalid(optimizer, "config", message.into()));
    };
    for (key, value) in overrides {
        let Some(slot) = merged.get_mut(key) else {
            let known = merged.keys().cloned().collect();
            let (optimizer, key) = (optimizer.to_owned(), key.clone());
            return Err(Error::UnknownHyperparameter { optimizer, key, known });
        };
        let before = std::mem::replace(slot, value.clone());
        // Serde does not say which field a value of the wrong type was meant for: try one at a time.
        if let Err(e) = parse(merged.clone()) {
            return Err(invalid(optimizer, key, format!("{e} (the default is {before})")));
        }
    }
    Ok(merged)
}
