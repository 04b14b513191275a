//! What a recipe comes to before it is trained: its parameters by group, its runs, and what they will cost by a short
//! probe of the real thing.
mod curve;
mod probe;
mod stand_in;
mod text;

pub use curve::{Curve, picture};
pub use probe::Probe;

use serde::Serialize;
use serde_json::{Map, Value};
use stand_in::StandIn;
use taper_data::DataError;
use taper_train::recipe::RecipeError;
use taper_train::run::{Inspection, Options, RunError, Status, check_ranks, inspect};
use taper_train::sweep::lint::{self, Finding};
use taper_train::sweep::{State, Sweep};
use taper_train::{Recipe, Registries};
use taper_world::Tree;

/// A plan: serialised it is the output of `plan --json`, shown it is the listing.
#[derive(Debug, Serialize)]
pub struct Plan {
    #[serde(skip)]
    recipe: Recipe,
    /// What all runs share.
    pub settings: Vec<Setting>,
    /// The runs, in the order of the sweep.
    pub runs: Vec<Planned>,
    /// The different networks and optimizers among them.
    pub kinds: Vec<Kind>,
    /// How rates and momenta move, those that move alike once.
    pub schedules: Vec<Curve>,
    /// What the recipe says to no effect, shown where it says so.
    pub warnings: Vec<String>,
    /// Reasons to doubt a comparison of these runs.
    pub findings: Vec<Finding>,
    /// What it will take; `None` without a probe.
    pub estimate: Option<Estimate>,
    /// How processes would share a run of each kind, if that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Vec<Shared>>,
}

/// A run that several processes share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shared {
    /// Processes.
    pub ranks: usize,
    /// Shards of a batch.
    pub shards: usize,
    /// Shards of one process.
    pub shards_each: usize,
    /// Bytes that the process which sends most sends in a step.
    pub sent_bytes: u64,
    /// Bytes of the optimizers' state in one process.
    pub state_bytes: u64,
    /// Memory of one process in MB at the peak, where it was measured: that of a process which is alone, and the exchange.
    pub peak_mb: Option<u64>,
}

/// A setting and where its value came from.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Dotted key.
    pub path: String,
    /// The value.
    pub value: Value,
    /// File, line and column, `--set`, `environment` or a default.
    pub from: String,
}

/// One run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Planned {
    /// Its id.
    pub id: String,
    /// Its folder's name.
    pub folder: String,
    /// What the sweep set.
    pub settings: Map<String, Value>,
    /// `done`, `diverged` or `missing`.
    pub status: &'static str,
    /// Its place in [`Plan::kinds`].
    pub kind: usize,
}

/// Runs that train the same parameters in the same way: they differ in numbers only.
#[derive(Clone, Debug, Serialize)]
pub struct Kind {
    /// The network or problem.
    pub model: String,
    /// The optimizer.
    pub optimizer: String,
    /// Trained numbers.
    pub parameters: usize,
    /// Bytes of the optimizers' state: buffers as large as the parameters.
    pub state_bytes: u64,
    /// The groups of parameters as they matched.
    pub groups: Vec<Group>,
    /// Epochs of a run.
    pub epochs: u64,
    /// Optimizer steps of a run.
    pub steps: u64,
    /// The data set that stands in for one that is not here.
    pub stand_in: Option<String>,
    /// What a few steps took.
    pub probe: Option<Probe>,
}

/// Parameters with the same hyperparameters.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Group {
    /// The optimizer; `None` for what is frozen.
    pub optimizer: Option<String>,
    /// The pattern; `None` for all that no pattern claims.
    pub pattern: Option<String>,
    /// All hyperparameters of a default group, what differs of another.
    pub settings: Map<String, Value>,
    /// The names.
    pub names: Vec<String>,
    /// Numbers in them.
    pub elements: usize,
}

/// What the runs will take on this machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Estimate {
    /// Seconds of all runs, one at a time.
    pub seconds: f64,
    /// Seconds of those that are missing.
    pub missing_seconds: f64,
    /// Largest resident size of a training process in MB, where the system tells it.
    pub peak_mb: Option<u64>,
    /// Bytes on disk of all runs.
    pub disk_bytes: u64,
    /// Threads it was made with.
    pub threads: usize,
}

impl Plan {
    /// Plans a recipe: builds each kind of run, and with `probe` trains a few steps of it.
    pub fn new(
        recipe: &Recipe,
        registries: &Registries,
        options: &Options,
        probe: bool,
    ) -> Result<Self, RunError> {
        let sweep = Sweep::open(std::slice::from_ref(recipe), registries, options)?;
        let mut keys: Vec<Value> = Vec::new();
        let (mut runs, mut kinds): (_, Vec<Kind>) = (Vec::new(), Vec::new());
        let mut warnings: Vec<String> = Vec::new();
        for run in sweep.runs() {
            let key = kind_key(&run.recipe);
            let kind = match keys.iter().position(|known| *known == key) {
                Some(kind) => kind,
                None => {
                    keys.push(key);
                    kinds.push(kind(&run.recipe, registries, options, probe)?);
                    kinds.len() - 1
                }
            };
            let Kind { epochs, steps, .. } = kinds[kind];
            let new = run.recipe.warnings_for(epochs, steps).into_iter().map(|warning| warning.to_string());
            for warning in new {
                if !warnings.contains(&warning) {
                    warnings.push(warning);
                }
            }
            let status = match &run.state {
                State::Done(summary) if summary.status == Status::Diverged => "diverged",
                State::Done(_) => "done",
                State::Missing | State::Failed(_) => "missing",
            };
            runs.push(Planned {
                id: run.recipe.id().to_owned(),
                folder: run.recipe.directory(),
                settings: run.recipe.varied().iter().cloned().collect(),
                status,
                kind,
            });
        }
        let value =
            |path: &str| recipe.runs().first().and_then(|run| run.value(path)).cloned().unwrap_or_default();
        let setting = |(path, _, from): (String, _, _)| Setting { value: value(&path), path, from };
        let lengths = sweep.runs().iter().zip(&runs).map(|(run, planned): (_, &Planned)| {
            let Kind { epochs, steps, .. } = kinds[planned.kind];
            (&run.recipe, epochs, steps)
        });
        let schedules = curve::curves(lengths);
        let mut findings = lint::recipes(std::slice::from_ref(recipe));
        findings.extend(lint::results(&sweep.cells()));
        Ok(Self {
            settings: recipe.shared_settings().into_iter().map(setting).collect(),
            estimate: estimate(&runs, &kinds),
            recipe: recipe.clone(),
            runs,
            kinds,
            schedules,
            warnings,
            findings,
            shared: None,
        })
    }

    /// The same with how so many processes would share each run, or why they cannot.
    pub fn shared_by(mut self, ranks: usize) -> Result<Self, RecipeError> {
        let mut shared = Vec::new();
        for (index, kind) in self.kinds.iter().enumerate() {
            let is_of_kind =
                |recipe: &&Recipe| self.runs.iter().any(|run| run.kind == index && run.id == recipe.id());
            let (mut shards, mut divided) = (1, false);
            for recipe in self.recipe.runs().iter().filter(is_of_kind) {
                check_ranks(recipe, ranks)?;
                (shards, divided) = (recipe.train.shards, recipe.train.shard_state && ranks > 1);
            }
            let (numbers, tree) = (kind.parameters as u64 * 4, Tree::full(shards));
            let parts =
                (0..shards).step_by(shards / ranks).map(|at| tree.spans(at..at + shards / ranks).len());
            let parts = parts.max().unwrap_or(1) as u64;
            // Of each part a slice to every other, of the sum the own slice to every other, and so the new weights if state is divided.
            let slices = parts + 1 + u64::from(divided);
            let sent_bytes = slices * numbers / ranks as u64 * (ranks as u64 - 1);
            let state_bytes =
                if divided { kind.state_bytes.div_ceil(ranks as u64) } else { kind.state_bytes };
            // The parts and the sum, and a bucket of 8 MB on its way out and in.
            let more = (((parts + 1) * numbers) >> 20) + if ranks > 1 { 16 } else { 0 };
            let less = (kind.state_bytes - state_bytes) >> 20;
            let peak_mb = kind.probe.as_ref().and_then(|probe| probe.peak_mb);
            let peak_mb = peak_mb.map(|mb| (mb + more).saturating_sub(less));
            let shards_each = shards / ranks;
            shared.push(Shared { ranks, shards, shards_each, sent_bytes, state_bytes, peak_mb });
        }
        self.shared = Some(shared);
        Ok(self)
    }
}

/// Everything but the seed, the name and numbers that change neither shapes nor cost.
fn kind_key(recipe: &Recipe) -> Value {
    let mut settings = recipe.resolved().clone();
    let optimizer = &recipe.optimizer;
    settings["seed"] = Value::Null;
    settings["name"] = Value::Null;
    settings["schedule"] = Value::Null;
    let switches = optimizer.hyper.iter().filter(|(_, value)| !value.is_f64());
    settings["optimizer"] = serde_json::json!({
        "name": optimizer.name,
        "switches": switches.collect::<Vec<_>>(),
        "groups": optimizer.groups.iter().map(|group| (&group.pattern, &group.name)).collect::<Vec<_>>(),
        "no_decay": optimizer.no_decay,
    });
    settings
}

fn kind(recipe: &Recipe, registries: &Registries, options: &Options, probe: bool) -> Result<Kind, RunError> {
    let (inspection, stand_in) = match inspect(recipe, registries, &options.search) {
        Err(RunError::Data(missing @ DataError::Missing { .. })) => {
            let Some(stand_in) = StandIn::new(recipe, registries)? else {
                return Err(RunError::Data(missing));
            };
            let inspection = inspect(&stand_in.recipe, registries, &options.search)?;
            (stand_in.sized(recipe, inspection), Some(stand_in))
        }
        inspection => (inspection?, None),
    };
    let probe = match probe {
        true => Some(probe::probe(recipe, stand_in.as_ref(), registries, options, &inspection)?),
        false => None,
    };
    let groups = groups(recipe, &inspection);
    let model = match recipe.task() {
        taper_train::recipe::Task::Network { model, .. } => &model.name,
        taper_train::recipe::Task::Problem(problem) => &problem.name,
    };
    Ok(Kind {
        model: model.clone(),
        optimizer: recipe.optimizer.name.clone(),
        parameters: groups.iter().filter(|g| g.optimizer.is_some()).map(|group| group.elements).sum(),
        state_bytes: state_bytes(&inspection, registries),
        groups,
        epochs: inspection.epochs,
        steps: inspection.steps,
        stand_in: stand_in.map(|stand_in| stand_in.name.to_owned()),
        probe,
    })
}

fn state_bytes(inspection: &Inspection, registries: &Registries) -> u64 {
    let of = |part: &taper_train::run::Part| {
        let config = part.config.as_object().cloned().unwrap_or_default();
        let named = registries.optimizers.get(&part.optimizer);
        let buffers = named.and_then(|named| named.buffers(&config)).map_or(0, |buffers| buffers.len());
        let elements: usize = part.params.iter().map(|param| param.elements).sum();
        (4 * buffers * elements) as u64
    };
    inspection.parts.iter().map(of).sum()
}

/// The groups in the order of the optimizers, the default one of each first, what is frozen last.
fn groups(recipe: &Recipe, inspection: &Inspection) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for part in &inspection.parts {
        let first = groups.len();
        for param in &part.params {
            let place = groups[first..].iter().position(|group| group.pattern == param.group);
            let place = place.map_or(groups.len(), |place| first + place);
            if place == groups.len() {
                let settings = match &param.group {
                    None => part.config.as_object().cloned().unwrap_or_default(),
                    Some(pattern) => overrides(recipe, pattern),
                };
                let (optimizer, pattern) = (Some(part.optimizer.clone()), param.group.clone());
                groups.push(Group { optimizer, pattern, settings, names: Vec::new(), elements: 0 });
            }
            groups[place].names.push(param.name.clone());
            groups[place].elements += param.elements;
        }
        groups[first..].sort_by_key(|group| group.pattern.is_some());
    }
    if !inspection.frozen.is_empty() {
        groups.push(Group {
            optimizer: None,
            pattern: None,
            settings: Map::new(),
            names: inspection.frozen.iter().map(|(name, _)| name.clone()).collect(),
            elements: inspection.frozen.iter().map(|(_, elements)| elements).sum(),
        });
    }
    groups
}

/// What a group's hyperparameters are besides those of its optimizer.
fn overrides(recipe: &Recipe, pattern: &str) -> Map<String, Value> {
    let named = recipe.optimizer.groups.iter().find(|group| group.pattern == pattern);
    // The one group without a pattern in the recipe is that of `no_decay`.
    named.map_or_else(|| Map::from_iter([("weight_decay".into(), 0.0.into())]), |group| group.hyper.clone())
}

fn estimate(runs: &[Planned], kinds: &[Kind]) -> Option<Estimate> {
    let mut total = Estimate {
        seconds: 0.0,
        missing_seconds: 0.0,
        peak_mb: None,
        disk_bytes: 0,
        threads: rayon::current_num_threads(),
    };
    for run in runs {
        let probe = kinds.get(run.kind)?.probe.as_ref()?;
        total.seconds += probe.run_seconds;
        total.missing_seconds += if run.status == "missing" { probe.run_seconds } else { 0.0 };
        total.peak_mb = total.peak_mb.max(probe.peak_mb);
        total.disk_bytes += probe.run_bytes;
    }
    Some(total)
}
