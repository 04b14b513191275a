//! What the types cannot say: ranges, values that belong together, and the open keys, which the registries judge.

use serde_json::Value;

use super::de;
use super::error::{ErrorKind, RecipeError};
use super::layers::Layers;
use super::path::Path;
use super::range::{self, Range};
use super::schema::{
    self, Augment, Cluster, Data, Device, Freeze, Group, LastBatch, Map, Optimizer, Precision, Problem,
    Select, Spec, What, When,
};
use taper_data::Kind;

/// The registries behind a recipe's open sections.
///
/// Each method is given a name and the keys that the recipe sets (never `null` ones), and returns all keys of that
/// section with their defaults filled in, or says which key is wrong. What it returns goes into the resolved recipe
/// and so into the run's id. A registry that knows a name by other names too returns the tag with the one to keep.
/// Methods that are not implemented accept everything and fill in nothing.
pub trait Sections {
    /// `optimizer`, and each of its groups. `hyper` holds `lr` if the recipe does.
    fn check_optimizer(&self, name: &str, hyper: &Map) -> Result<Map, SectionError> {
        let _ = name;
        Ok(hyper.clone())
    }

    /// `model`.
    fn check_model(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        let _ = name;
        Ok(config.clone())
    }

    /// The data set's own keys of `data`.
    fn check_data(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        let _ = name;
        Ok(config.clone())
    }

    /// Whether a data set has images or text, where that is known.
    fn data_kind(&self, name: &str) -> Option<Kind> {
        let _ = name;
        None
    }

    /// The keys of a data set that name files of the user's.
    fn data_paths(&self, name: &str) -> &'static [&'static str] {
        let _ = name;
        &[]
    }

    /// `schedule`.
    fn check_schedule(&self, kind: &str, config: &Map) -> Result<Map, SectionError> {
        let _ = kind;
        Ok(config.clone())
    }

    /// `problem`.
    fn check_problem(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        let _ = name;
        Ok(config.clone())
    }
}

/// Accepts everything: for reading a recipe without the registries.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unchecked;

impl Sections for Unchecked {}

/// Why a registry refuses a section.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SectionError {
    /// The key at fault, `name` or `kind` for an unknown one, a path (`stages[1].steps`) for a nested one; `None` for the section as
    /// a whole.
    pub key: Option<String>,
    /// What is wrong: `unknown hyperparameter `lrr` of decgd`.
    pub message: String,
    /// The names that would be right in that place; the nearest is suggested.
    pub known: Vec<String>,
}

/// Hands the open keys of every section to the registries and takes back the complete sections.
pub(super) fn fill(recipe: &mut Map, layers: &Layers, sections: &dyn Sections) -> Result<(), RecipeError> {
    let open: [(&str, &str, &[&str], Check<'_>); 5] = [
        ("data", "name", &Data::KEYS, &|name, keys| sections.check_data(name, keys)),
        ("model", "name", &["name"], &|name, keys| sections.check_model(name, keys)),
        ("problem", "name", &Problem::KEYS, &|name, keys| sections.check_problem(name, keys)),
        ("optimizer", "name", &Optimizer::KEYS, &|name, keys| sections.check_optimizer(name, keys)),
        ("schedule", "kind", &["kind"], &|kind, keys| sections.check_schedule(kind, keys)),
    ];
    for (section, tag, fixed, check) in open {
        // A section of another type, or without its tag, is for the typed reading to report.
        let Some(Value::Object(keys)) = recipe.get_mut(section) else { continue };
        let Some(Value::String(name)) = keys.get(tag) else { continue };
        let at = Path::parse(section);
        if section == "optimizer" {
            ranges(keys, &at, layers)?;
        }
        let full =
            check(name, &open_keys(keys, fixed)).map_err(|error| refused(error, &at, tag, fixed, layers))?;
        keys.retain(|key, _| fixed.contains(&key.as_str()));
        keys.extend(full);
    }
    groups(recipe, layers, sections)
}

type Check<'a> = &'a dyn Fn(&str, &Map) -> Result<Map, SectionError>;

/// The keys a registry judges: `null` stands for "not set here", whatever a lower layer says.
fn open_keys(keys: &Map, fixed: &[&str]) -> Map {
    let open = keys.iter().filter(|(key, value)| !fixed.contains(&key.as_str()) && !value.is_null());
    open.map(|(key, value)| (key.clone(), value.clone())).collect()
}

pub(super) fn refused(
    error: SectionError,
    section: &Path,
    tag: &str,
    fixed: &[&str],
    layers: &Layers,
) -> RecipeError {
    let SectionError { key, message, mut known } = error;
    let report = |text: &str| RecipeError::said(ErrorKind::Section, text);
    let Some(key) = key else { return report(&message).at_opt(layers.place(section)) };
    let inner = Path::parse(&key).0;
    let path = Path([section.0.as_slice(), &inner].concat());
    let last = key.rsplit('.').next().unwrap_or_default();
    let value = || report(&format!("{path}: {message}"));
    if last == tag {
        let given = layers.find(&path).and_then(|(_, node)| node.as_str()).unwrap_or_default();
        let report = match message.contains(given) {
            true => report(&message),
            false => report(&format!("{message} `{given}`")),
        };
        return report.at_opt(layers.place(&path)).known(given, &known);
    }
    if known.is_empty() || known.iter().any(|name| name == last) {
        let (choices, given) = choices(&message);
        return value().at_opt(layers.place(&path)).nearest(given, &choices);
    }
    let report = report(&message);
    if inner.len() == 1 {
        let more: Vec<String> = fixed.iter().map(|key| (*key).to_owned()).collect();
        known.extend(more.into_iter().filter(|key| !known.contains(key)).collect::<Vec<_>>());
    }
    report.at_opt(layers.key_place(&path)).known(last, &known)
}

/// The words in backquotes of ``expected `fine` or `coarse`, found `corse` ``, and what was found.
fn choices(message: &str) -> (Vec<&str>, &str) {
    let (before, after) = message.split_once(", found `").unwrap_or_default();
    (before.split('`').skip(1).step_by(2).collect(), after.split('`').next().unwrap_or_default())
}

/// Each group against the optimizer that its parameters get.
fn groups(recipe: &mut Map, layers: &Layers, sections: &dyn Sections) -> Result<(), RecipeError> {
    let Some(Value::Object(optimizer)) = recipe.get_mut("optimizer") else { return Ok(()) };
    let Some(Value::String(name)) = optimizer.get("name").cloned() else { return Ok(()) };
    let base = open_keys(optimizer, &Optimizer::KEYS);
    let Some(Value::Array(groups)) = optimizer.get_mut("groups") else { return Ok(()) };
    for (index, group) in groups.iter_mut().enumerate() {
        let path = Path::parse("optimizer.groups").index(index);
        let Value::Object(group) = group else { continue };
        ranges(group, &path, layers)?;
        let own = open_keys(group, &Group::KEYS);
        let other = group.get("name").and_then(Value::as_str);
        if group.get("lr_scale").is_some_and(|scale| !scale.is_null()) {
            let clash = match (other, own.contains_key("lr"), base.contains_key("lr")) {
                (Some(_), ..) => {
                    "is a multiple of the rate of the recipe's own optimizer: give `lr` with `name`"
                }
                (_, true, _) => "and `lr` both say the rate of the group: give one of them",
                (_, _, false) => "is a multiple of `optimizer.lr`, and there is none",
                _ => "",
            };
            if !clash.is_empty() {
                let path = path.key("lr_scale");
                return Err(
                    RecipeError::new(ErrorKind::Value, format!("{path} {clash}")).at_opt(layers.place(&path))
                );
            }
        }
        let start = if other.is_some() { Map::new() } else { base.clone() };
        let all = start.into_iter().chain(own.clone()).collect();
        let full = sections
            .check_optimizer(other.unwrap_or(&name), &all)
            .map_err(|error| refused(error, &path, "name", &Group::KEYS, layers))?;
        let kept: Map = match other {
            Some(_) => full,
            // Only what differs, in the registry's form.
            None => full.into_iter().filter(|(key, _)| own.contains_key(key)).collect(),
        };
        group.retain(|key, _| Group::KEYS.contains(&key.as_str()));
        group.extend(kept);
    }
    Ok(())
}

/// The range of a hyperparameter whose meaning is the same for all optimizers.
pub(crate) fn common_range(key: &str) -> Option<Range> {
    let zero = Some(0.0);
    Some(match key {
        "lr" => Range { above: zero, ..Range::default() },
        "momentum" | "beta1" | "beta2" => Range { min: zero, below: Some(1.0), ..Range::default() },
        "weight_decay" | "eps" => Range { min: zero, ..Range::default() },
        _ => return None,
    })
}

fn ranges(hyper: &Map, path: &Path, layers: &Layers) -> Result<(), RecipeError> {
    for (key, value) in hyper {
        let Some(range) = common_range(key) else { continue };
        let path = path.key(key);
        let Some(number) = value.as_f64() else {
            if value.is_null() {
                continue;
            }
            let found = match value {
                Value::String(text) => format!("the text `{text}`"),
                other => format!("`{other}`"),
            };
            return Err(RecipeError::new(
                ErrorKind::Type,
                format!("{path}: expected a number, found {found}"),
            )
            .at_opt(layers.place(&path)));
        };
        if !range.takes(number) {
            return Err(RecipeError::new(ErrorKind::Value, format!("{path} must be {range}, found {value}"))
                .at_opt(layers.place(&path)));
        }
    }
    Ok(())
}

/// The numbers of the fixed sections against the ranges that the schema states.
pub(super) fn in_range(recipe: &Value, layers: &Layers) -> Result<(), RecipeError> {
    match range::outside(schema::fixed(), recipe, &Path::default()) {
        Some((path, range, found)) => {
            Err(Checks { layers }.fail(&path, format!("{path} must be {range}, found {found}")))
        }
        None => Ok(()),
    }
}

/// Values that contradict each other, and texts.
pub(super) fn check(spec: &Spec, layers: &Layers, sections: &dyn Sections) -> Result<(), RecipeError> {
    let checks = Checks { layers };
    checks.name(&spec.name)?;
    checks.task(spec)?;
    if let Some(data) = &spec.data {
        checks.data(data)?;
        match sections.data_kind(&data.name) {
            Some(Kind::Images) => checks.images(spec, data)?,
            Some(Kind::Text) => checks.text(spec, data)?,
            None => {}
        }
    }
    checks.schedule(spec)?;
    for (index, group) in spec.optimizer.groups.iter().enumerate() {
        checks.pattern(&Path::parse("optimizer.groups").index(index).key("match"), &group.pattern)?;
    }
    checks.cluster(&spec.cluster)?;
    checks.train(spec)
}

/// A text with its line breaks shown.
fn on_one_line(text: &str) -> String {
    format!("`{}`", text.replace('\n', "↵").replace(char::is_control, " "))
}

/// Options of `sbatch` that a sweep writes, and what sets them.
const TAKEN: [(&str, &str); 16] = [
    ("array", ""),
    ("job-name", "`name`"),
    ("ntasks", "`cluster.ranks`"),
    ("cpus-per-task", "`cluster.cpus`"),
    ("partition", "`cluster.partition`"),
    ("time", "`cluster.time`"),
    ("mem", "`cluster.memory`"),
    ("gpus-per-task", "`cluster.gpus`"),
    ("requeue", ""),
    ("no-requeue", ""),
    ("signal", ""),
    ("output", ""),
    ("open-mode", ""),
    ("parsable", ""),
    ("test-only", ""),
    ("wrap", ""),
];

struct Checks<'a> {
    layers: &'a Layers,
}

impl Checks<'_> {
    fn fail(&self, path: &Path, message: String) -> RecipeError {
        RecipeError::new(ErrorKind::Value, message).at_opt(self.layers.place(path))
    }

    fn demand(
        &self,
        fits: bool,
        path: &str,
        range: &str,
        found: impl std::fmt::Display,
    ) -> Result<(), RecipeError> {
        if fits {
            Ok(())
        } else {
            Err(self.fail(&Path::parse(path), format!("{path} must be {range}, found {found}")))
        }
    }

    /// These become lines of a script: each is one word of the kind that is meant, or one option.
    fn cluster(&self, cluster: &Cluster) -> Result<(), RecipeError> {
        let letters = |text: &str, more: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
        };
        let number = |text: &str| !text.is_empty() && text.bytes().all(|c| c.is_ascii_digit());
        let memory = |text: &str| number(text.strip_suffix(['K', 'M', 'G', 'T']).unwrap_or(text));
        let gpus = |text: &str| match text.split_once(':') {
            Some((kind, count)) => letters(kind, "._-") && number(count),
            None => number(text),
        };
        let time = |text: &str| {
            let (days, rest) = text.split_once('-').map_or((None, text), |(days, rest)| (Some(days), rest));
            days.is_none_or(number) && rest.split(':').count() <= 3 && rest.split(':').all(number)
        };
        let partition = |text: &str| letters(text, "._,-");
        let word = |key: &str, value: &Option<String>, fits: &dyn Fn(&str) -> bool, range: &str| {
            let Some(value) = value else { return Ok(()) };
            self.demand(fits(value), &format!("cluster.{key}"), range, on_one_line(value))
        };
        word("partition", &cluster.partition, &partition, "a name, or several with commas between them")?;
        let times = "minutes, `hours:minutes:seconds` or `days-hours:minutes:seconds`";
        word("time", &cluster.time, &time, times)?;
        word("memory", &cluster.memory, &memory, "a number of megabytes, or one with K, M, G or T")?;
        word("gpus", &cluster.gpus, &gpus, "a number, or `type:number`")?;
        word("mpi", &cluster.mpi, &|text| letters(text, "_"), "a name that `srun --mpi=list` shows")?;
        for (index, option) in cluster.extra.iter().enumerate() {
            let path = Path::parse("cluster.extra").index(index);
            let key = option.strip_prefix("--").and_then(|rest| rest.split('=').next()).unwrap_or_default();
            if !letters(key, "-") || option.chars().any(|c| c.is_control() || "\"'\\".contains(c)) {
                let message = format!(
                    "{path} must be one option of sbatch (`--account=physics`) without quotes, backslashes and line \
                     breaks, found {}",
                    on_one_line(option)
                );
                return Err(self.fail(&path, message));
            }
            // Slurm takes an option's beginning for the option.
            if let Some((known, instead)) = TAKEN.iter().find(|(known, _)| known.starts_with(key)) {
                let message = match *instead {
                    "" => format!("{path}: a sweep sets --{known} itself"),
                    instead => format!("{path}: --{known} is set by {instead}"),
                };
                return Err(self.fail(&path, message));
            }
        }
        Ok(())
    }

    /// The name is the first part of the run directory's.
    fn name(&self, name: &str) -> Result<(), RecipeError> {
        let fits = (1..=100).contains(&name.len())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
            && !name.starts_with(['.', '-']);
        self.demand(
            fits,
            "name",
            "1 to 100 letters, digits, `.`, `_` or `-`, the first a letter or digit",
            format!("`{name}`"),
        )
    }

    fn task(&self, spec: &Spec) -> Result<(), RecipeError> {
        let missing = |key: &str| Err(de::missing(&Path::parse(key), self.layers));
        match (&spec.data, &spec.model, &spec.problem) {
            (None, None, Some(Problem { domain: Some(domain), .. })) => match domain.set() {
                Ok(_) => Ok(()),
                Err(message) => {
                    Err(self.fail(&Path::parse("problem.domain"), format!("problem.domain: {message}")))
                }
            },
            (None, None, Some(_)) => Ok(()),
            (_, _, Some(_)) => Err(self
                .fail(&Path::parse("problem"), "`problem` stands in place of `data` and `model`".to_owned())),
            (Some(_), Some(_), None) => Ok(()),
            (_, None, None) => missing("model"),
            (None, _, None) => missing("data"),
        }
    }

    fn data(&self, data: &Data) -> Result<(), RecipeError> {
        let augment = &data.augment;
        if !augment.crop_fill.is_zero() && augment.crop_pad == 0 {
            return Err(self.unused("data.augment.crop_fill", "without `crop_pad` there is nothing to fill"));
        }
        let Some(normalize) = &augment.normalize else { return Ok(()) };
        self.demand(
            !normalize.mean.is_empty(),
            "data.augment.normalize.mean",
            "one number a channel",
            "none",
        )?;
        self.demand(
            normalize.std.len() == normalize.mean.len(),
            "data.augment.normalize.std",
            &format!("as long as mean ({})", normalize.mean.len()),
            normalize.std.len(),
        )?;
        Ok(())
    }

    /// What is for text only.
    fn images(&self, spec: &Spec, data: &Data) -> Result<(), RecipeError> {
        let cuts =
            [("train.bptt", spec.train.bptt.is_some()), ("train.windows", spec.train.windows.is_some())];
        if let Some((key, _)) = cuts.iter().find(|(_, set)| *set) {
            return Err(self.unused(key, "images are not cut into windows"));
        }
        if data.subset.is_some_and(|subset| subset.val.is_some()) {
            let why = "images bring no validation set; `data.val` carves one out";
            return Err(self.unused("data.subset.val", why));
        }
        Ok(())
    }

    /// What is for images only, and what text needs.
    fn text(&self, spec: &Spec, data: &Data) -> Result<(), RecipeError> {
        let Augment { crop_pad, crop_fill, flip, cutout, mixup, normalize } = &data.augment;
        let images_only = [
            ("crop_pad", *crop_pad > 0),
            ("crop_fill", !crop_fill.is_zero()),
            ("flip", flip.is_on()),
            ("cutout", *cutout > 0),
            ("mixup", *mixup > 0.0),
            ("normalize", normalize.is_some()),
        ];
        if data.last_batch == LastBatch::Drop {
            return Err(self.unused("data.last_batch", "it is for images"));
        }
        if spec.train.eval_augment.is_some() {
            return Err(self.unused("train.eval_augment", "it is for images"));
        }
        if let Some((key, _)) = images_only.iter().find(|(_, set)| *set) {
            return Err(self.unused(&format!("data.augment.{key}"), "text is not augmented"));
        }
        if spec.train.label_smoothing > 0.0 {
            return Err(self.unused("train.label_smoothing", "it is for classes of images"));
        }
        if data.val.is_some() {
            return Err(self.unused("data.val", "text brings a validation set of its own"));
        }
        match (&spec.train.bptt, spec.train.windows) {
            (None, None) => Err(de::missing(&Path::parse("train.bptt"), self.layers).help(
                "text is cut into windows: for example `bptt: {length: 70}`, or `windows: {length: 64}` for a network that carries \
                 nothing",
            )),
            (Some(_), Some(_)) => {
                let message = "expected `train.bptt` or `train.windows`, found both".to_owned();
                Err(self.fail(&Path::parse("train.windows"), message))
            }
            _ => self.context(spec),
        }
    }

    /// Windows that a network cannot read: one with a key `block` sees so many tokens at most, and carries nothing.
    fn context(&self, spec: &Spec) -> Result<(), RecipeError> {
        let Some(model) = &spec.model else { return Ok(()) };
        let Some(block) = model.config.get("block").and_then(Value::as_u64) else { return Ok(()) };
        let name = &model.name;
        match spec.train.windows {
            Some(windows) if windows.length as u64 > block => self.demand(
                false,
                "train.windows.length",
                &format!("at most model.block ({block}), which is what {name} sees"),
                windows.length,
            ),
            Some(_) => Ok(()),
            None => {
                let message =
                    format!("train.bptt is for networks that carry a state, and {name} carries none");
                let help = format!("give `windows: {{length: {block}}}` in its place");
                Err(self.fail(&Path::parse("train.bptt"), message).help(help))
            }
        }
    }

    /// A setting that nothing would read.
    fn unused(&self, path: &str, why: &str) -> RecipeError {
        self.fail(&Path::parse(path), format!("{path} would be ignored: {why}"))
            .help("leave it out, or set it to `null`")
    }

    fn schedule(&self, spec: &Spec) -> Result<(), RecipeError> {
        let schedule = &spec.schedule;
        let per_epoch = schedule.config.get("per").is_none_or(|per| per == "epoch");
        let moves = |kind: &str| !matches!(kind, "constant" | "plateau");
        let more = ["momentum", "warmup"].iter().any(|key| schedule.config.contains_key(*key));
        if spec.problem.is_some() && per_epoch && (moves(&schedule.kind) || more) {
            let message = "a problem has no epochs: a schedule of them would stand still";
            return Err(self
                .fail(&Path::parse("schedule.kind"), message.to_owned())
                .help("give `per: step`"));
        }
        Ok(())
    }

    fn train(&self, spec: &Spec) -> Result<(), RecipeError> {
        let train = &spec.train;
        match (train.epochs, train.steps) {
            (None, None) => {
                return Err(
                    de::missing(&Path::parse("train.epochs"), self.layers).help("or give `train.steps`")
                );
            }
            (Some(_), Some(_)) => {
                return Err(self.fail(
                    &Path::parse("train.steps"),
                    "expected `train.epochs` or `train.steps`, found both".to_owned(),
                ));
            }
            _ if spec.problem.is_some() && train.label_smoothing > 0.0 => {
                return Err(self.unused("train.label_smoothing", "a problem has no labels"));
            }
            (Some(_), None) if spec.problem.is_some() => {
                return Err(self.fail(
                    &Path::parse("train.epochs"),
                    "a problem has no epochs: give `train.steps`".to_owned(),
                ));
            }
            _ => {}
        }
        self.shards(spec)?;
        let ignored = spec.model.as_ref().and_then(|model| model.config.get("ignore_index"));
        if ignored.is_some_and(|index| !index.is_null()) && (train.shards > 1 || train.accumulate > 1) {
            let message = "model.ignore_index: the loss is the mean over the targets that count, and parts of a batch \
                           (`train.shards`, `train.accumulate`) would each have a mean of its own: leave one of them out";
            return Err(self.fail(&Path::parse("model.ignore_index"), message.to_owned()));
        }
        self.precision(spec)?;
        let checkpoint = &train.checkpoint;
        if checkpoint.every_epochs.is_some() && checkpoint.every_steps.is_some() {
            let path = Path::parse("train.checkpoint.every_steps");
            return Err(self.fail(&path, "expected `every_epochs` or `every_steps`, found both".to_owned()));
        }
        if train.early_stop.is_some() && train.select == Select::Last {
            let message = "early_stop watches a set: give `train.select: val` (or test)".to_owned();
            return Err(self.fail(&Path::parse("train.early_stop"), message));
        }
        for (index, freeze) in train.freeze.iter().enumerate() {
            let path = Path::parse("train.freeze").index(index);
            let path = if let Freeze::Later(_) = freeze { path.key("match") } else { path };
            self.pattern(&path, freeze.pattern())?;
        }
        self.eval_augment(spec)?;
        if spec.problem.is_some() && train.windows.is_some() {
            return Err(self.unused("train.windows", "a problem has no text"));
        }
        self.microscope(spec)?;
        if train.bptt.is_none() && train.scale_lr_by_length {
            let message = "scale_lr_by_length needs `train.bptt`".to_owned();
            return Err(self.fail(&Path::parse("train.scale_lr_by_length"), message));
        }
        Ok(())
    }

    /// What evaluations show.
    fn eval_augment(&self, spec: &Spec) -> Result<(), RecipeError> {
        let train = &spec.train;
        let Some(augment) = train.eval_augment else { return Ok(()) };
        if spec.problem.is_some() {
            return Err(self.unused("train.eval_augment", "a problem has no images"));
        }
        if augment.when == When::Last && train.select != Select::Last {
            let message = "train.eval_augment.when: evaluations choose the best epoch, and the last one would not be like the others"
                .to_owned();
            return Err(self
                .fail(&Path::parse("train.eval_augment.when"), message)
                .help("give `when: always`, or `train.select: last`"));
        }
        Ok(())
    }

    /// What the microscope is asked for and no run of this kind can have.
    fn microscope(&self, spec: &Spec) -> Result<(), RecipeError> {
        let train = &spec.train;
        let Some(look) = train.probe.microscope() else { return Ok(()) };
        let path = Path::parse("train.probe");
        if matches!(spec.device, Device::Cuda(_) | Device::Metal) {
            let message = "the microscope is the CPU's: give `device: cpu`, or `train.probe: true`, which any device has";
            return Err(self.fail(&path, message.to_owned()));
        }
        if train.shard_state {
            let message =
                "the microscope looks at the whole state of the optimizer: leave `train.shard_state` out";
            return Err(self.fail(&path, message.to_owned()));
        }
        if look.what.is_empty() {
            let path = path.key("what");
            let message = format!("{path}: expected something to look at, found an empty list");
            return Err(self
                .fail(&path, message)
                .help("give `what: [cheap]`, or leave `what` out, which is the same"));
        }
        let why = match () {
            () if !look.names(What::Noise) => return Ok(()),
            () if spec.problem.is_some() => "a function has no samples, whose gradients would differ",
            () if train.shards > 1 => {
                "noise is measured on halves of whole batches: leave `train.shards` out"
            }
            () if train.bptt.is_some() => "a text's streams carry state, and cannot be cut into halves",
            () if spec.data.as_ref().is_some_and(|data| data.batch_size < 2) => {
                "noise is measured on the two halves of a batch: give `data.batch_size` 2 or more"
            }
            () => return Ok(()),
        };
        let place = look.what.iter().position(|what| *what == What::Noise).unwrap_or(0);
        let (path, other) = (path.key("what").index(place), "; `all` is all that the run can have");
        Err(self.fail(&path, format!("{path}: `noise`: {why}{other}")))
    }

    fn shards(&self, spec: &Spec) -> Result<(), RecipeError> {
        let shards = spec.train.shards;
        let path = Path::parse("train.shards");
        match &spec.data {
            _ if shards == 1 => Ok(()),
            None => Err(self.fail(&path, "train.shards cuts batches, and a problem has none".to_owned())),
            Some(data) if data.batch_size < shards => {
                let message = format!(
                    "train.shards must be at most data.batch_size ({}), found {shards}",
                    data.batch_size
                );
                Err(self.fail(&path, message))
            }
            Some(_) => Ok(()),
        }
    }

    fn precision(&self, spec: &Spec) -> Result<(), RecipeError> {
        let why = match spec.device {
            _ if spec.train.precision == Precision::F32 => return Ok(()),
            _ if spec.problem.is_some() => "a problem has no network that multiplies",
            Device::Cuda(_) | Device::Metal => "products of bf16 are the CPU's: give `device: cpu`",
            Device::Auto | Device::Cpu => return Ok(()),
        };
        Err(self.fail(
            &Path::parse("train.precision"),
            format!("train.precision: expected `f32`, found `bf16`: {why}"),
        ))
    }

    fn pattern(&self, path: &Path, pattern: &str) -> Result<(), RecipeError> {
        let open_regex = pattern.starts_with('/') && (pattern.len() < 2 || !pattern.ends_with('/'));
        if pattern.is_empty() || open_regex {
            let message = format!(
                "{path} must be a glob (`*.bias`) or a regular expression (`/bias$/`), found `{pattern}`"
            );
            return Err(self.fail(path, message));
        }
        taper_optim::Group::new(pattern).pattern().map(drop).map_err(|error| {
            // The last line says what is wrong; those before draw it, as the report does.
            let said = error.to_string();
            let what = said.lines().last().unwrap_or_default().trim_start_matches("error: ");
            self.fail(path, format!("{path}: `{pattern}` is no regular expression: {what}"))
        })
    }
}
