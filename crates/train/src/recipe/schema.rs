//! What a recipe may say. Every key of the fixed sections is a field here, in reading order, with its range; defaults are in
//! `defaults.yaml`. The open keys of `data`, `model`, `problem`, `optimizer` and `schedule` belong to the
//! registries (see [`Sections`](super::Sections)).

use std::fmt;
use std::sync::OnceLock;

use schemars::JsonSchema;
use schemars::generate::{SchemaGenerator, SchemaSettings};
use serde::de::{self, Deserializer, Visitor};
use serde::ser::{SerializeMap, Serializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use taper_data::{Fill, Flip, Order, Subset};
use taper_models::ops::Operands;

/// Hyperparameters by name, in the order of the file or of the registry.
pub type Map = serde_json::Map<String, serde_json::Value>;

/// The keys of a recipe's root.
pub(super) const SECTIONS: [&str; 12] = [
    "extends",
    "name",
    "seed",
    "device",
    "data",
    "model",
    "problem",
    "optimizer",
    "schedule",
    "train",
    "sweep",
    "cluster",
];

/// The fixed sections as a JSON Schema without references: what the types, their documentation and their ranges say.
pub(crate) fn fixed() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| generator().into_root_schema_for::<Spec>().to_value())
}

/// Makes schemas without references.
pub(crate) fn generator() -> SchemaGenerator {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    settings.into_generator()
}

/// The settings of one run.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a recipe (a map of sections)")]
pub struct Spec {
    /// What the run is called, if not as its file; no part of its id.
    #[schemars(extend("pattern" = "^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"))]
    pub name: String,
    /// Everything random comes from it.
    pub seed: u64,
    /// Where to compute.
    #[schemars(extend("pattern" = "^(auto|cpu|metal|cuda(:[0-9]+)?)$"))]
    pub device: Device,
    /// What to learn from; with `model`, unless there is a `problem`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Data>,
    /// The network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Model>,
    /// A numeric test function, in place of `data` and `model`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// The optimizer and its parameter groups.
    pub optimizer: Optimizer,
    /// How the learning rate (and momentum) moves.
    pub schedule: Schedule,
    /// The loop.
    pub train: Train,
    /// What a sweep asks of a cluster. It is no part of a run: neither of its id nor of the recipe in its folder.
    #[serde(default, skip_serializing)]
    pub cluster: Cluster,
}

/// What a run works on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Task<'a> {
    /// A network learns from data.
    Network {
        /// The data set.
        data: &'a Data,
        /// The network.
        model: &'a Model,
    },
    /// An optimizer minimises a test function.
    Problem(&'a Problem),
}

/// Where to compute: `auto`, `cpu`, `cuda`, `cuda:1`, `metal`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// The first GPU that the build can use, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// An NVIDIA GPU by its number.
    Cuda(usize),
    /// An Apple GPU.
    Metal,
}

impl TryFrom<String> for Device {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let unknown = || format!("expected auto, cpu, cuda, cuda:<number> or metal, found `{text}`");
        Ok(match text.as_str() {
            "auto" => Self::Auto,
            "cpu" => Self::Cpu,
            "cuda" => Self::Cuda(0),
            "metal" => Self::Metal,
            other => Self::Cuda(
                other.strip_prefix("cuda:").and_then(|number| number.parse().ok()).ok_or_else(unknown)?,
            ),
        })
    }
}

impl From<Device> for String {
    fn from(device: Device) -> Self {
        device.to_string()
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
            Self::Metal => f.write_str("metal"),
        }
    }
}

/// The data set and how it is cut into batches.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a section (a map of keys)")]
pub struct Data {
    /// Registry name.
    pub name: String,
    /// Examples (or parallel streams or windows of text) a training step.
    #[schemars(range(min = 1))]
    pub batch_size: usize,
    /// The same for evaluation.
    #[schemars(range(min = 1))]
    pub eval_batch_size: usize,
    /// What becomes of the last batch of an epoch of images where it is smaller than the others.
    #[serde(default, skip_serializing_if = "LastBatch::is_keep")]
    pub last_batch: LastBatch,
    /// What is carved out of the training set for validation.
    pub val: Option<Holdout>,
    /// Keeps only the first samples; every result then says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subset: Option<Subset>,
    /// What happens to an image before the network sees it.
    pub augment: Augment,
    /// Whether files are checked against their known sha256 before use.
    pub verify: bool,
    /// The data set's own keys.
    #[serde(flatten)]
    pub config: Map,
}

impl Data {
    pub(super) const KEYS: [&str; 8] =
        ["name", "batch_size", "eval_batch_size", "last_batch", "val", "subset", "augment", "verify"];
}

/// What becomes of a last batch that is not full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastBatch {
    /// A step is taken with it.
    #[default]
    Keep,
    /// The epoch ends before it; other samples are in it in the next one.
    Drop,
}

impl LastBatch {
    /// What is not said leaves a recipe's text and id as they were before it could be.
    fn is_keep(&self) -> bool {
        *self == Self::Keep
    }
}

/// A part of the training set: a fraction below 1, or a number of examples.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema)]
#[schemars(untagged)]
pub enum Holdout {
    /// This share of the examples.
    Fraction(#[schemars(extend("exclusiveMinimum" = 0, "exclusiveMaximum" = 1))] f64),
    /// This many examples.
    Count(#[schemars(range(min = 1))] usize),
}

impl Serialize for Holdout {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match *self {
            Self::Fraction(share) => serializer.serialize_f64(share),
            Self::Count(count) => serializer.serialize_u64(count as u64),
        }
    }
}

impl<'de> Deserialize<'de> for Holdout {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HoldoutVisitor;
        impl Visitor<'_> for HoldoutVisitor {
            type Value = Holdout;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a fraction between 0 and 1 or a whole number of examples of at least 1")
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Holdout, E> {
                match usize::try_from(value) {
                    Ok(count) if count > 0 => Ok(Holdout::Count(count)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(value), &self)),
                }
            }

            fn visit_f64<E: de::Error>(self, value: f64) -> Result<Holdout, E> {
                if value > 0.0 && value < 1.0 {
                    Ok(Holdout::Fraction(value))
                } else {
                    Err(E::invalid_value(de::Unexpected::Float(value), &self))
                }
            }
        }
        deserializer.deserialize_any(HoldoutVisitor)
    }
}

/// Augmentation of images; a pure function of (seed, epoch, index).
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Augment {
    /// Padding on each side before a random crop to the old size; 0 for none.
    pub crop_pad: usize,
    /// What the padding is.
    #[serde(default, skip_serializing_if = "Fill::is_zero")]
    pub crop_fill: Fill,
    /// Mirrors half of the images, drawn anew every epoch; with `alternate`, drawn in the first epoch and the other half in every
    /// next one, so that two epochs show each image both ways.
    pub flip: Flip,
    /// Side of a square that is blanked; 0 for none.
    pub cutout: usize,
    /// Parameter of the beta distribution that mixes pairs of images; 0 for none.
    #[schemars(range(min = 0))]
    pub mixup: f64,
    /// Per-channel standardisation of pixels scaled to [0, 1]; also at evaluation.
    pub normalize: Option<Normalize>,
}

/// `(pixel - mean) / std`, per channel.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Normalize {
    /// One mean a channel.
    #[schemars(length(min = 1))]
    pub mean: Vec<f64>,
    /// One standard deviation a channel.
    #[schemars(length(min = 1), extend("items" = {"type": "number", "exclusiveMinimum": 0}))]
    pub std: Vec<f64>,
}

/// The network.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a section (a map of keys)")]
pub struct Model {
    /// Registry name.
    pub name: String,
    /// The network's own keys.
    #[serde(flatten)]
    pub config: Map,
}

/// A numeric test function.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a section (a map of keys)")]
pub struct Problem {
    /// `powell`, `rosenbrock`, `quadratic`, `targets`, `linear`, `reddi` or `wells`.
    pub name: String,
    /// The set that the variables are put back into after every step; none unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = null))]
    pub domain: Option<Domain>,
    /// How far the seed moves every variable of the starting point: the deviation of normal draws.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0), extend("default" = 0))]
    pub jitter: f64,
    /// The function's own keys.
    #[serde(flatten)]
    pub config: Map,
}

impl Problem {
    pub(super) const KEYS: [&str; 3] = ["name", "domain", "jitter"];

    /// Where a run with this seed starts, if the function says `start`.
    pub(crate) fn start(&self, mut start: Vec<f64>, seed: u64) -> Vec<f64> {
        if self.jitter != 0.0 {
            let mut draws = taper_random::Rng::new(seed, "problem", "start", 0);
            start.iter_mut().for_each(|x| *x += self.jitter * draws.normal());
        }
        start
    }
}

/// A set that all variables together are projected onto: one of a box and a ball.
#[derive(Debug, Clone, Copy, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Domain {
    /// The least and the greatest value of every variable: `[-1, 1]`.
    #[serde(rename = "box", default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = null))]
    pub bounds: Option<[f64; 2]>,
    /// The radius of a Euclidean ball around the origin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0, "default" = null))]
    pub ball: Option<f64>,
}

impl Domain {
    /// The set; what is wrong with it, if there is none.
    pub fn set(&self) -> Result<taper_optim::Domain, String> {
        let set = match *self {
            Self { bounds: Some([low, high]), ball: None } => taper_optim::Domain::Box { low, high },
            Self { bounds: None, ball: Some(radius) } => taper_optim::Domain::Ball { radius },
            _ => return Err("expected one of `box: [-1, 1]` and `ball: 1`".to_owned()),
        };
        set.check().map(|()| set)
    }
}

/// The optimizer.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a section (a map of keys)")]
pub struct Optimizer {
    /// Registry name.
    pub name: String,
    /// Base learning rate; the schedule scales it. 0 for an optimizer that has none of its own: AdaGD, or one around another.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lr: f64,
    /// The optimizer's own hyperparameters, complete with the registry's defaults.
    #[serde(flatten)]
    pub hyper: Map,
    /// Parameters with settings of their own; the first group that matches a name has it.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Kinds of parameters that are not decayed.
    #[serde(default)]
    pub no_decay: Vec<NoDecay>,
}

fn is_zero(number: &f64) -> bool {
    *number == 0.0
}

impl Optimizer {
    /// Keys of the section that are no hyperparameters.
    pub(super) const KEYS: [&str; 3] = ["name", "groups", "no_decay"];
}

/// Parameters that a pattern picks, and what is different for them.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a group (a map of keys)")]
pub struct Group {
    /// A glob on parameter names (`*.bias`), or a regular expression between slashes (`/^layer[12]\./`).
    #[serde(rename = "match")]
    pub pattern: String,
    /// Another optimizer for these parameters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The rate as a multiple of the optimizer's `lr`, whatever that is: a sweep over `lr` keeps the ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub lr_scale: Option<f64>,
    /// What differs from the optimizer's settings; with `name`, all settings of that optimizer.
    #[serde(flatten)]
    pub hyper: Map,
}

impl Group {
    pub(super) const KEYS: [&str; 3] = ["match", "name", "lr_scale"];
}

/// A kind of parameter that weight decay leaves alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoDecay {
    /// Biases.
    Bias,
    /// Scales and shifts of normalisation layers.
    Norm,
}

/// How the learning rate moves.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(expecting = "a section (a map of keys)")]
pub struct Schedule {
    /// `constant`, `milestones`, `cosine`, `warmup`, `triangle`, `polynomial`, `inverse_sqrt`, `geometric`, `plateau` or `sequence`.
    pub kind: String,
    /// The schedule's own keys, what its time counts (`per`), and how momentum moves (`momentum`).
    #[serde(flatten)]
    pub config: Map,
}

/// The loop. Exactly one of `epochs` and `steps` is set.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Train {
    /// Passes over the training set.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub epochs: Option<u64>,
    /// Optimizer steps.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub steps: Option<u64>,
    /// Evaluates after every so many epochs (with `epochs`) or steps (with `steps`), and at the end; every epoch unless
    /// given.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub eval_every: Option<u64>,
    /// Shows each image of an evaluation several times, changed a little, and takes the mean of the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_augment: Option<EvalAugment>,
    /// Writes a training line to the metrics every so many steps; 0: one an epoch.
    pub log_every: u64,
    /// Largest global norm of the gradient.
    #[serde(default)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub clip_norm: Option<f64>,
    /// Largest magnitude of a gradient element.
    #[serde(default)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub clip_value: Option<f64>,
    /// Share of every label that is spread evenly over all classes, in training; for images.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
    pub label_smoothing: f64,
    /// Batches a step.
    #[schemars(range(min = 1))]
    pub accumulate: u64,
    /// Parts that every batch is cut into, by position: each has a forward and backward pass and batch statistics of its own. As
    /// many processes as divide it can share a run, with the same result.
    #[serde(default = "Train::one_shard", skip_serializing_if = "Train::is_one_shard")]
    #[schemars(range(min = 1))]
    pub shards: usize,
    /// Whether the processes that share a run divide the optimizer's state among them, with the same result: each keeps a part.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shard_state: bool,
    /// What products multiply: the numbers as they are, or rounded to bf16, with sums, weights, activations and the optimizer's
    /// state in f32. On the CPU, for networks.
    #[serde(default, skip_serializing_if = "Precision::is_f32")]
    pub precision: Precision,
    /// What chooses the best epoch; `test` is what the paper did, and every table built so says it.
    pub select: Select,
    /// The figure of merit; without one, the task's own: accuracy for classes, perplexity for text, bits for `windows` of text that
    /// is not by words, loss for problems.
    #[serde(default)]
    pub metric: Option<Metric>,
    /// Stops when the metric no longer improves.
    #[serde(default)]
    pub early_stop: Option<EarlyStop>,
    /// Averages the weights.
    pub average: Average,
    /// Patterns of parameters that are not trained, or no longer after some steps.
    pub freeze: Vec<Freeze>,
    /// A safetensors file of starting weights.
    #[serde(default)]
    pub init_from: Option<String>,
    /// What a loss or gradient that is not finite does.
    pub on_divergence: OnDivergence,
    /// Ends the run early.
    pub budget: Budget,
    /// When checkpoints are written and how many stay.
    pub checkpoint: Checkpoint,
    /// Logs the optimizer's inner statistics every epoch, and with every evaluation inside one; or what a microscope sees of its
    /// steps (docs/microscope.md).
    pub probe: Probe,
    /// Which loss an optimizer that scales by the loss is given, when terms are added to it.
    pub loss_for_scale: LossForScale,
    /// What is subtracted from the loss before such an optimizer sees it: with a, a loss of at least 0 becomes one of at least -a, and
    /// its `c` must be above a. Figures and gradients stay as they are.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub loss_shift: f64,
    /// How text is cut into windows that go on from each other, for networks that carry a state.
    #[serde(default)]
    pub bptt: Option<Bptt>,
    /// How text is cut into windows that stand alone; in place of `bptt`. What a network carries is forgotten before each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// Multiplies the rate of a step by its window's length over `bptt.length`.
    pub scale_lr_by_length: bool,
}

impl Train {
    fn one_shard() -> usize {
        1
    }

    /// A recipe that is not cut has the text and the id that it had before there were shards.
    fn is_one_shard(shards: &usize) -> bool {
        *shards == 1
    }
}

/// What products multiply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    /// The numbers as they are.
    #[default]
    F32,
    /// The numbers rounded to bf16: faster where the CPU has instructions for it (AMX, whose sums round in their own order, or
    /// AVX512-BF16), slower elsewhere.
    Bf16,
}

impl Precision {
    /// The operands of products.
    pub fn operands(self) -> Operands {
        match self {
            Self::F32 => Operands::Full,
            Self::Bf16 => Operands::Bf16,
        }
    }

    /// A recipe that says nothing of it has the text and the id that it had before there was a choice.
    fn is_f32(&self) -> bool {
        *self == Self::F32
    }
}

/// Parameters that are not trained: a pattern, or one with the step that they are trained up to.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
#[schemars(untagged)]
pub enum Freeze {
    /// Those that match are never trained.
    Always(String),
    /// Those that match are trained at first.
    Later(FreezeLater),
}

/// Parameters that are no longer trained after some steps. What their optimizer knows of them stays as it is then.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `match` and `after_steps`")]
pub struct FreezeLater {
    /// A glob on parameter names (`*.bias`), or a regular expression between slashes.
    #[serde(rename = "match")]
    pub pattern: String,
    /// The steps that they are trained in.
    #[schemars(range(min = 1))]
    pub after_steps: u64,
}

impl Freeze {
    /// The steps that they are trained in before, if any.
    pub fn after_steps(&self) -> Option<u64> {
        match self {
            Self::Always(_) => None,
            Self::Later(later) => Some(later.after_steps),
        }
    }

    /// Which parameters.
    pub fn pattern(&self) -> &str {
        match self {
            Self::Always(pattern) => pattern,
            Self::Later(later) => &later.pattern,
        }
    }
}

impl Serialize for Freeze {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Always(pattern) => serializer.serialize_str(pattern),
            Self::Later(later) => later.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Freeze {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FreezeVisitor;
        impl<'de> Visitor<'de> for FreezeVisitor {
            type Value = Freeze;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a pattern, or a map with `match` and `after_steps`")
            }

            fn visit_str<E: de::Error>(self, pattern: &str) -> Result<Freeze, E> {
                Ok(Freeze::Always(pattern.to_owned()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Freeze, A::Error> {
                FreezeLater::deserialize(de::value::MapAccessDeserializer::new(map)).map(Freeze::Later)
            }
        }
        deserializer.deserialize_any(FreezeVisitor)
    }
}

/// What is logged of the optimizer's steps.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema)]
#[schemars(untagged)]
pub enum Probe {
    /// Whether the optimizer's inner statistics are logged every epoch.
    Statistics(bool),
    /// What a microscope sees every so many steps, in `probe.jsonl`.
    Microscope(Look),
}

/// When the microscope looks at a step, and at what.
#[derive(Debug, Clone, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `every` and `what`")]
pub struct Look {
    /// Looks at the first step and after every so many steps.
    #[schemars(range(min = 1))]
    pub every: u64,
    /// At what.
    #[serde(default = "Look::cheap")]
    pub what: Vec<What>,
}

/// What the microscope looks at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// `norms`, `rates`, `nearest` and `vector`: all that takes no further gradient.
    Cheap,
    /// Everything that the run can have.
    All,
    /// Norms of gradients, updates and weights, and the update-to-weight ratio.
    Norms,
    /// The rates of momentum descent that the steps of single elements amount to.
    Rates,
    /// Cosines with the steps of simple optimizers, and which of them is nearest at which rate.
    Nearest,
    /// The vector by which DecGD, DecAdam and AEGD follow √(f + c).
    Vector,
    /// The cosine with orthogonalised momentum, as Muon's; products of matrices.
    Orthogonal,
    /// Gradient noise from two halves of the batch; as long as another gradient.
    Noise,
    /// Where in the local parabola the step lands; another gradient.
    Alpha,
    /// The largest eigenvalue of the Hessian, and how near it is to where steps become unstable; up to 24 gradients.
    Sharpness,
}

impl Look {
    fn cheap() -> Vec<What> {
        vec![What::Cheap]
    }

    /// Whether it looks at something, as a part of a group or by its name.
    pub fn wants(&self, what: What) -> bool {
        let cheap = matches!(what, What::Norms | What::Rates | What::Nearest | What::Vector);
        self.names(what) || self.names(What::All) || cheap && self.names(What::Cheap)
    }

    /// Whether it says so by name.
    pub fn names(&self, what: What) -> bool {
        self.what.contains(&what)
    }
}

impl Probe {
    /// Whether the optimizer's inner statistics are logged.
    pub fn statistics(&self) -> bool {
        *self == Self::Statistics(true)
    }

    /// When the microscope looks, if there is one.
    pub fn microscope(&self) -> Option<&Look> {
        match self {
            Self::Statistics(_) => None,
            Self::Microscope(look) => Some(look),
        }
    }
}

impl Serialize for Probe {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Statistics(on) => serializer.serialize_bool(*on),
            Self::Microscope(look) => look.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Probe {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ProbeVisitor;
        impl<'de> Visitor<'de> for ProbeVisitor {
            type Value = Probe;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`true`, `false`, or a map with `every` and `what`")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Probe, E> {
                Ok(Probe::Statistics(on))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Probe, A::Error> {
                Look::deserialize(de::value::MapAccessDeserializer::new(map)).map(Probe::Microscope)
            }
        }
        deserializer.deserialize_any(ProbeVisitor)
    }
}

/// Several views of an image at evaluation, whose logits are averaged. Training is as without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct EvalAugment {
    /// Which views.
    pub kind: Views,
    /// In which evaluations.
    #[serde(default)]
    pub when: When,
}

/// Views of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Views {
    /// The image and its mirror image: an evaluation takes twice as long.
    Flip,
    /// Both, with half of the weight, and both moved by a pixel along the diagonal, one way and the other, with the edges
    /// mirrored: six times as long.
    FlipShift,
}

impl Views {
    /// How many they are.
    pub fn count(self) -> u64 {
        match self {
            Self::Flip => 2,
            Self::FlipShift => 6,
        }
    }
}

/// In which evaluations of a run something is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum When {
    /// In all of them.
    #[default]
    Always,
    /// In the one after the last step.
    Last,
}

/// What chooses the best epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// The validation set; needs `data.val`, unless the data set brings one.
    Val,
    /// The test set.
    Test,
    /// Nothing: the last epoch counts.
    Last,
}

/// A figure of merit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Share of right answers; higher is better.
    Accuracy,
    /// Mean loss; lower is better.
    Loss,
    /// Its exponential; lower is better.
    Perplexity,
    /// Mean loss a character in bits, for text by characters; lower is better.
    BitsPerChar,
    /// Mean loss a byte in bits, for text by bytes or pieces; lower is better.
    BitsPerByte,
}

/// When to give up hope.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct EarlyStop {
    /// Evaluations without improvement before the run ends.
    #[schemars(range(min = 1))]
    pub patience: u64,
    /// Improvements up to this size do not count.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub min_delta: f64,
}

/// Averages of the weights over time.
#[derive(Debug, Clone, PartialEq, JsonSchema, Deserialize)]
#[serde(rename_all = "snake_case", rename_all_fields = "snake_case", deny_unknown_fields)]
#[schemars(tag = "kind")]
pub enum Average {
    /// The last weights only.
    None,
    /// Exponential moving average, every step.
    Ema {
        /// Share of the old average that stays.
        #[serde(default = "Average::ema_decay")]
        #[schemars(range(min = 0), extend("exclusiveMaximum" = 1))]
        decay: f64,
        /// First epoch that counts, from 0.
        #[serde(default)]
        start: u64,
    },
    /// Mean of the weights at the ends of epochs.
    Swa {
        /// First epoch that counts, from 0.
        start: u64,
        /// Epochs between two samples.
        #[serde(default = "Average::swa_every")]
        #[schemars(range(min = 1))]
        every: u64,
    },
    /// Slow weights that the weights are pulled back to: every so many steps they move towards the weights, which are then set to
    /// them. Evaluations use the slow ones. Running statistics are treated as weights are; optimizers notice nothing.
    Lookahead {
        /// Steps between two moves.
        #[serde(default = "Average::lookahead_every")]
        #[schemars(range(min = 1))]
        every: u64,
        /// Share of the slow weights that stays at the last step: after t of T steps it is `decay`·(t/T)^`power`.
        #[serde(default = "Average::lookahead_decay")]
        #[schemars(range(min = 0, max = 1))]
        decay: f64,
        /// How the share grows; 0: it is the same at all steps.
        #[serde(default)]
        #[schemars(range(min = 0))]
        power: f64,
    },
    /// Switches from SGD to averaged SGD, at the base rate, once the loss of the set that chooses stops falling.
    Asgd {
        /// The switch comes when the loss exceeds the least of all values but this many last ones.
        #[serde(default = "Average::asgd_window")]
        #[schemars(range(min = 1))]
        window: u64,
        /// λ of the step η / (1 + λ η t)^α, which also decays the weights.
        #[serde(default)]
        #[schemars(range(min = 0))]
        lambd: f64,
        /// α of the step.
        #[serde(default = "Average::asgd_alpha")]
        #[schemars(range(min = 0))]
        alpha: f64,
        /// Step after the switch from which the average is kept.
        #[serde(default)]
        t0: u64,
        /// Whether evaluation uses the average; if not, the iterate.
        #[serde(default = "Average::asgd_swap")]
        swap: bool,
    },
}

impl Average {
    fn ema_decay() -> f64 {
        0.999
    }

    fn swa_every() -> u64 {
        1
    }

    fn lookahead_every() -> u64 {
        5
    }

    /// As in Zhang et al. 2019.
    fn lookahead_decay() -> f64 {
        0.5
    }

    fn asgd_window() -> u64 {
        5
    }

    fn asgd_alpha() -> f64 {
        0.75
    }

    fn asgd_swap() -> bool {
        true
    }
}

impl Serialize for Average {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        match self {
            Self::None => map.serialize_entry("kind", "none")?,
            Self::Ema { decay, start } => {
                map.serialize_entry("kind", "ema")?;
                map.serialize_entry("decay", decay)?;
                map.serialize_entry("start", start)?;
            }
            Self::Swa { start, every } => {
                map.serialize_entry("kind", "swa")?;
                map.serialize_entry("start", start)?;
                map.serialize_entry("every", every)?;
            }
            Self::Lookahead { every, decay, power } => {
                map.serialize_entry("kind", "lookahead")?;
                map.serialize_entry("every", every)?;
                map.serialize_entry("decay", decay)?;
                map.serialize_entry("power", power)?;
            }
            Self::Asgd { window, lambd, alpha, t0, swap } => {
                map.serialize_entry("kind", "asgd")?;
                map.serialize_entry("window", window)?;
                map.serialize_entry("lambd", lambd)?;
                map.serialize_entry("alpha", alpha)?;
                map.serialize_entry("t0", t0)?;
                map.serialize_entry("swap", swap)?;
            }
        }
        map.end()
    }
}

/// What a loss or gradient that is not finite does; the weights never see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDivergence {
    /// The command fails.
    Stop,
    /// The run ends with status `diverged`, and a sweep goes on.
    Record,
}

/// Limits that end a run early.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Budget {
    /// Seconds of one session: the run is interrupted then, and the same command goes on with it.
    #[serde(default)]
    #[schemars(extend("exclusiveMinimum" = 0))]
    pub seconds: Option<f64>,
    /// Optimizer steps.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub steps: Option<u64>,
}

/// When checkpoints are written and how many stay. At most one of `every_epochs` and `every_steps` is set; with
/// neither there is only the one at the end.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Checkpoint {
    /// After every so many epochs.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub every_epochs: Option<u64>,
    /// After every so many steps.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub every_steps: Option<u64>,
    /// How many of the latest stay. The best one stays anyway: an evaluation that is the best so far writes one.
    #[schemars(range(min = 1))]
    pub keep: u64,
}

/// Which loss an optimizer that scales by the loss is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossForScale {
    /// The one that is differentiated, regularisation terms included.
    Total,
    /// The likelihood alone.
    Raw,
}

/// Windows of text: most have about `length` tokens, some about half; all lengths are drawn.
#[derive(Debug, Clone, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Bptt {
    /// Usual length.
    #[schemars(range(min = 1))]
    pub length: usize,
    /// Share of windows whose usual length is half of it.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1))]
    pub half: f64,
    /// Standard deviation of the length; 0: no draw.
    #[serde(default)]
    #[schemars(range(min = 0))]
    pub std: f64,
    /// Least length.
    #[serde(default = "Bptt::least")]
    #[schemars(range(min = 1))]
    pub min: usize,
}

impl Bptt {
    fn least() -> usize {
        1
    }
}

/// Windows of text that stand alone: `data.batch_size` of them a batch, all of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Windows {
    /// Tokens of a window: the context.
    #[schemars(range(min = 1))]
    pub length: usize,
    /// Which windows a training batch has. An epoch has as many batches as would read the text once.
    #[serde(default)]
    pub order: Order,
}

/// What `sweep --launcher slurm` asks Slurm for, for each run. What is not given is the cluster's default.
#[derive(Debug, Clone, Default, PartialEq, Eq, JsonSchema, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a section (a map of keys)")]
pub struct Cluster {
    /// The partition, or several with commas between them.
    #[serde(default)]
    pub partition: Option<String>,
    /// The longest time of a task, as Slurm has it: minutes, `12:00:00`, `2-00:00:00`. A task that needs more goes on in a next one.
    #[serde(default, deserialize_with = "word")]
    #[schemars(with = "Option<Word>")]
    pub time: Option<String>,
    /// Memory a node: `16G`, or megabytes.
    #[serde(default, deserialize_with = "word")]
    #[schemars(with = "Option<Word>")]
    pub memory: Option<String>,
    /// GPUs a rank, with their type if it matters: `1`, `a100:2`.
    #[serde(default, deserialize_with = "word")]
    #[schemars(with = "Option<Word>")]
    pub gpus: Option<String>,
    /// Processors a rank; `--threads` has the last word.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub cpus: Option<u64>,
    /// Processes a run, started by `srun`.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub ranks: Option<u64>,
    /// How `srun` tells them of each other, its `--mpi`: `pmix` with Open MPI, `pmi2` with MPICH. Slurm's own choice if not given.
    #[serde(default)]
    pub mpi: Option<String>,
    /// More options of `sbatch`: `--account=physics`.
    #[serde(default)]
    pub extra: Vec<String>,
}

/// What [`word`] reads, to the schema.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[allow(dead_code)]
enum Word {
    Text(String),
    Number(u64),
}

/// A text, or a whole number as one.
fn word<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    struct WordVisitor;
    impl<'de> Visitor<'de> for WordVisitor {
        type Value = Option<String>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a whole number")
        }

        fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_u64<E: de::Error>(self, value: u64) -> Result<Self::Value, E> {
            Ok(Some(value.to_string()))
        }

        fn visit_str<E: de::Error>(self, value: &str) -> Result<Self::Value, E> {
            Ok(Some(value.to_owned()))
        }
    }
    deserializer.deserialize_any(WordVisitor)
}
