//! A network with the data it learns from, as a task.
mod judge;
mod views;

use super::RunError;
use super::checkpoint::Sums;
use super::feed::Feed;
use super::figure::Figure;
use super::metrics::{Split, Values};
use super::shards::{Contribution, Numbers, Shards};
use super::task::{Gradient, Seen, Task};
use super::weights::Buffers;
use crate::Registries;
use crate::recipe::{
    self, Bptt, EvalAugment, Freeze, Holdout, LastBatch, Map, Metric, Precision, Recipe, Views,
};
use candle_core::{D, DType, Device, Tensor};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter::Peekable;
use std::ops::Range;
use std::sync::Arc;
use taper_data::{
    Data, DataError, Depth, ImagePipeline, Images, Lengths, Loaded, Order, PipelineConfig, Provenance,
    Search, SplitSize, Text, TextBatch, TextStream, TextWindows, Unit,
};
use taper_models::init::is_buffer;
use taper_models::op_span;
use taper_models::{Loss, Mode, Model, Params, Task as Shape, WithOperands, ops};
use taper_optim::{Group, Pattern};
use taper_world::World;
use tracing::debug;

/// A model, its data and where in it the training is.
pub(crate) struct Network {
    params: Params,
    model: Box<dyn Model>,
    /// The same network on the same parameters as it is after some steps, when more of them are frozen; those to come.
    later: VecDeque<(u64, Box<dyn Model>)>,
    provenance: Provenance,
    device: Device,
    seed: u64,
    /// What becomes of labels in training.
    labels: ops::CrossEntropy,
    source: Source,
    /// How images come to a GPU.
    feed: Option<Arc<Feed>>,
    batches: Peekable<Batches>,
    /// The batches of the step under way, where it is to have a second gradient.
    kept: Option<Vec<Kept>>,
    shards: Shards,
    numbers: Numbers,
    /// How images are shown to evaluations, if not once and as they are.
    eval_augment: Option<EvalAugment>,
    /// Whether evaluations come after the last step.
    last: bool,
    /// What each shard carries; nothing where batches stay whole, and the model itself has it.
    carries: Vec<Carry>,
}

/// What a model carries from one batch to the next, by name.
type Carry = Vec<(String, Tensor)>;

/// A batch with all that its gradient is a function of, beside the weights.
struct Kept {
    batch: Batch,
    draw: u64,
    carries: Vec<Carry>,
}

#[allow(clippy::large_enum_variant, reason = "there is one of them a run")]
enum Source {
    /// `seen` is the training set as it is, in its order, for evaluations.
    Images {
        train: ImagePipeline,
        seen: ImagePipeline,
        val: Option<ImagePipeline>,
        test: ImagePipeline,
        classes: usize,
    },
    Text {
        reading: Reading,
        words: Text,
        /// What losses are given in beside perplexity, if in anything.
        bits: Option<Bits>,
    },
}

/// How text is read.
enum Reading {
    /// In windows that go on from each other, side by side.
    Streams { train: TextStream, val: TextStream, test: TextStream, lengths: Lengths },
    /// In windows that stand alone.
    Windows { train: TextWindows, val: TextWindows, test: TextWindows, order: Order },
}

/// Losses in bits a character or byte.
struct Bits {
    name: &'static str,
    /// Characters or bytes a token, of each set.
    train: f64,
    val: f64,
    test: f64,
}

impl Bits {
    /// Of a text whose unit has such a measure, where windows or the recipe's metric ask for it: what runs measured before there was
    /// one they measure still.
    fn of(recipe: &Recipe, text: &Text) -> Option<Self> {
        let (name, metric) = match text.unit {
            Unit::Word => return None,
            Unit::Char => ("bits_per_char", Metric::BitsPerChar),
            Unit::Byte | Unit::Bpe => ("bits_per_byte", Metric::BitsPerByte),
        };
        let asked = recipe.train.windows.is_some() || recipe.train.metric == Some(metric);
        asked.then(|| Self::over(name, text, None))
    }

    /// Over the tokens that count.
    fn over(name: &'static str, text: &Text, ignored: Option<i64>) -> Self {
        // The first token is read and not predicted.
        let mean = |tokens: &[u32]| {
            let predicted = tokens.iter().skip(1).copied();
            let counted: Vec<u32> = predicted.filter(|token| ignored != Some((*token).into())).collect();
            text.measure(&counted).unwrap_or(0) as f64 / counted.len() as f64
        };
        Self { name, train: mean(&text.train), val: mean(&text.valid), test: mean(&text.test) }
    }

    /// A mean loss of a token of a set, in nats.
    fn value(&self, loss: f64, split: Split) -> (&'static str, f64) {
        let length = match split {
            Split::Val => self.val,
            Split::Test => self.test,
            Split::Train | Split::Probe => self.train,
        };
        (self.name, loss / std::f64::consts::LN_2 / length)
    }
}

type Batches = Box<dyn Iterator<Item = Result<Batch, RunError>>>;

/// One batch on the device.
struct Batch {
    input: Tensor,
    target: Tensor,
    /// The labels of the partners that a mixed batch was mixed with, and the batch's own part.
    mixed: Option<(Tensor, f64)>,
    /// Samples, or tokens.
    samples: u64,
    /// The factor of this batch's learning rate.
    rate_scale: f64,
}

impl Batch {
    /// The samples at some places along an axis.
    fn part(&self, axis: usize, place: &Range<usize>) -> Result<Self, RunError> {
        let cut = |t: &Tensor| t.narrow(axis, place.start, place.len())?.contiguous();
        let mixed = match &self.mixed {
            Some((partners, part)) => Some((cut(partners)?, *part)),
            None => None,
        };
        Ok(Self {
            input: cut(&self.input)?,
            target: cut(&self.target)?,
            mixed,
            samples: self.samples / self.input.dim(axis)?.max(1) as u64 * place.len() as u64,
            rate_scale: self.rate_scale,
        })
    }
}

/// What is frozen after some steps.
fn frozen(recipe: &Recipe, taken: u64) -> Result<Vec<Pattern>, RunError> {
    let frozen = recipe.train.freeze.iter().filter(|freeze| taken >= freeze.after_steps().unwrap_or(0));
    frozen.map(|freeze| Ok(Group::new(freeze.pattern()).pattern()?)).collect()
}

/// The data set that a section names.
pub(super) fn load(
    section: &recipe::Data,
    registries: &Registries,
    search: &Search,
) -> Result<Loaded, RunError> {
    let set = registries.data.get(&section.name)?;
    let mut options: Map = section.config.clone();
    if set.describe().options.iter().any(|option| option.name == "verify") {
        options.insert("verify".into(), section.verify.into());
    }
    Ok(set.load(&Value::Object(options), search)?)
}

impl Network {
    pub fn new(
        recipe: &Recipe,
        section: &recipe::Data,
        model: &recipe::Model,
        registries: &Registries,
        search: &Search,
        device: &Device,
        world: &World,
    ) -> Result<Self, RunError> {
        let loaded = load(section, registries, search)?;
        let loaded = section.subset.iter().fold(loaded, |loaded, subset| loaded.head(subset));
        debug!("{}: data {} from {}", recipe.name, section.name, loaded.provenance.source);
        let (shape, provenance) = (shape(&loaded), loaded.provenance.clone());
        let mut source = Source::new(recipe, section, loaded)?;

        let params = Params::new(recipe.seed);
        let config = Value::Object(model.config.clone());
        let entry = registries.models.get(&model.name)?;
        // With all parameters to be trained, or as after some steps.
        let build = |taken: Option<u64>| -> Result<Box<dyn Model>, RunError> {
            let vb = match taken.map(|taken| frozen(recipe, taken)).transpose()? {
                Some(held) => params.builder_holding(DType::F32, device, move |name, rank| {
                    held.iter().any(|held| held.is_match(name, rank))
                }),
                None => params.builder(DType::F32, device),
            };
            let model = entry.build(&config, shape, vb)?;
            match recipe.train.precision {
                Precision::F32 => Ok(model),
                rounded @ Precision::Bf16 if device.is_cpu() => {
                    Ok(Box::new(WithOperands { model, operands: rounded.operands() }))
                }
                Precision::Bf16 => {
                    let message = "train.precision: expected `f32` on a GPU, found `bf16`, which is the CPU's: give `device: cpu`";
                    Err(recipe.error_at("train.precision", message).into())
                }
            }
        };
        let first = build(None)?;
        let model = if recipe.train.freeze.is_empty() { first } else { build(Some(0))? };
        if let (Source::Text { bits: Some(bits), words, .. }, ignored @ Some(_)) =
            (&mut source, model.ignored())
        {
            *bits = Bits::over(bits.name, words, ignored);
        }
        let changes: BTreeSet<u64> = recipe.train.freeze.iter().filter_map(Freeze::after_steps).collect();
        let later = changes.into_iter().map(|taken| Ok((taken, build(Some(taken))?)));
        let later = later.collect::<Result<_, RunError>>()?;
        let feed = match &source {
            Source::Images { train, .. } if !device.is_cpu() && train.is_bytes() => {
                Some(Arc::new(Feed::new(train, device)?))
            }
            _ => None,
        };
        let (device, seed) = (device.clone(), recipe.seed);
        let batches = (Box::new(std::iter::empty()) as Batches).peekable();
        let shards = Shards::new(recipe.train.shards, world, &device);
        let numbers = Numbers::new(&params, &device);
        let (kept, carries) = (None, vec![Carry::new(); shards.count()]);
        Ok(Self {
            params,
            model,
            later,
            provenance,
            device,
            seed,
            labels: ops::CrossEntropy { label_smoothing: recipe.train.label_smoothing, ..Default::default() },
            source,
            feed,
            batches,
            kept,
            shards,
            numbers,
            eval_augment: recipe.train.eval_augment,
            last: false,
            carries,
        })
    }

    /// What the network was built for.
    pub fn shape(&self) -> Shape {
        match &self.source {
            Source::Images { classes, test, .. } => {
                let (height, width, channels) = test.shape();
                Shape::Images { height, width, channels, classes: *classes }
            }
            Source::Text { words, .. } => Shape::Tokens { vocab: words.vocab.len() },
        }
    }

    /// How images are normalised.
    pub fn normalize(&self) -> Option<&taper_data::Normalize> {
        match &self.source {
            Source::Images { test, .. } => Some(test.normalize()),
            Source::Text { .. } => None,
        }
    }

    /// The words of a text.
    pub fn words(&self) -> Option<&Text> {
        match &self.source {
            Source::Images { .. } => None,
            Source::Text { words, .. } => Some(words),
        }
    }

    /// The logits of images, in their order: normalised and cut into batches as those of an evaluation.
    pub fn classify(&mut self, images: Images) -> Result<Vec<Vec<f32>>, RunError> {
        let Source::Images { test, .. } = &self.source else { return Ok(Vec::new()) };
        let batches = self.image_batches(&test.over(images)?, 0, 0);
        let mut rows = Vec::new();
        for batch in batches {
            rows.extend(self.model.logits(&batch?.input, Mode::Eval)?.to_vec2::<f32>()?);
        }
        Ok(rows)
    }

    /// Whether images are bytes, as pictures are.
    pub fn takes_pictures(&self) -> bool {
        matches!(&self.source, Source::Images { test, .. } if test.is_bytes())
    }

    /// Evaluates on other data from here on, as it is and normalised as the run's own: images of the same size, whose classes go
    /// by name where both have names, or text under the same numbers. The error says what does not fit; then nothing is changed.
    pub fn evaluate_on(&mut self, loaded: Loaded) -> Result<(), String> {
        let (expected, found, ignored) = (self.shape(), shape(&loaded), self.model.ignored());
        let failed = |e: DataError| e.to_string();
        match (&mut self.source, loaded.data) {
            (
                Source::Images { seen, val, test, classes, .. },
                Data::Images { train: images, test: others },
            ) => {
                if test.shape() != (others.height, others.width, others.channels)
                    || test.is_bytes() != (others.depth == Depth::Byte)
                {
                    let depth = |bytes| if bytes { "bytes" } else { "floats" };
                    let [of, are] = [test.is_bytes(), others.depth == Depth::Byte].map(depth);
                    return Err(format!("expected {expected} of {of}, found {found} of {are}"));
                }
                let [ours, theirs] = [&self.provenance.classes, &loaded.provenance.classes];
                let named = |images: Images| match ours.is_empty() || theirs.is_empty() {
                    true => same_classes(images, *classes),
                    false => by_name(images, theirs, ours),
                };
                let (all, others) = (named(images)?, named(others)?);
                (*seen, *test) = (test.over(all).map_err(failed)?, test.over(others).map_err(failed)?);
                *val = None;
            }
            (Source::Text { reading, words, bits }, Data::Text(text)) => {
                let text = words.renumber(&text)?;
                match reading {
                    Reading::Streams { train, val, test, .. } => {
                        let streams = test.streams();
                        let stream =
                            |part: &Arc<[u32]>| TextStream::new(part.clone(), streams).map_err(failed);
                        (*train, *val, *test) =
                            (stream(&text.train)?, stream(&text.valid)?, stream(&text.test)?);
                    }
                    Reading::Windows { train, val, test, .. } => {
                        let over = |part: &Arc<[u32]>| test.over(part.clone()).map_err(failed);
                        (*train, *val, *test) = (over(&text.train)?, over(&text.valid)?, over(&text.test)?);
                    }
                }
                *bits = bits.as_ref().map(|bits| Bits::over(bits.name, &text, ignored));
            }
            _ => return Err(format!("expected {expected}, found {found}")),
        }
        self.provenance = loaded.provenance;
        Ok(())
    }

    /// Carries nothing any more.
    pub fn forget(&mut self) -> Result<(), RunError> {
        self.set_carried(Vec::new())
    }

    /// The logits of the token after these, which go on from the ones before.
    pub fn continue_with(&mut self, tokens: &[u32]) -> Result<Vec<f32>, RunError> {
        let input = Tensor::from_slice(tokens, (tokens.len(), 1), &self.device)?;
        Ok(self.model.next_logits(&input)?.get(0)?.to_vec1()?)
    }

    /// Whether answers can be right or wrong; text is judged by perplexity.
    fn is_classification(&self) -> bool {
        matches!(self.source, Source::Images { .. })
    }

    /// The batches of an epoch from number `start` on; each is a function of (seed, epoch, number).
    fn epoch(&self, epoch: u64, start: u64) -> Batches {
        let device = self.device.clone();
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        match &self.source {
            Source::Images { train, .. } => self.image_batches(train, epoch, start),
            Source::Text { reading: Reading::Streams { train, lengths, .. }, .. } => {
                let stream = train.clone();
                let windows = train.windows(self.seed, epoch, *lengths).skip(start);
                Box::new(windows.map(move |w| tokens(&stream, w, &device)))
            }
            Source::Text { reading: Reading::Windows { train, order, .. }, .. } => {
                let (windows, order, seed) = (train.clone(), *order, self.seed);
                let numbers = start..windows.batches();
                Box::new(numbers.map(move |n| read(windows.batch(order, seed, epoch, n), 1.0, &device)))
            }
        }
    }

    /// Whether batches stand alone, whatever the network carries from one to the next.
    fn stands_alone(&self) -> bool {
        matches!(self.source, Source::Text { reading: Reading::Windows { .. }, .. })
    }

    /// Forgets what is carried where batches stand alone.
    fn part_batches(&mut self) -> Result<(), RunError> {
        if self.stands_alone() { self.set_carried(Vec::new()) } else { Ok(()) }
    }

    fn image_batches(&self, set: &ImagePipeline, epoch: u64, start: usize) -> Batches {
        let (dims, device) = (set.shape(), self.device.clone());
        match self.feed.clone() {
            Some(feed) => {
                let batches = set.byte_epoch(epoch, start);
                Box::new(batches.map(move |batch| fed(batch, &feed, &device)))
            }
            None => Box::new(set.epoch(epoch, start).map(move |batch| images(batch, dims, &device))),
        }
    }

    /// The loss of a training batch.
    fn loss(&mut self, batch: &Batch, mode: Mode) -> Result<Loss, RunError> {
        // A model may know a better way to its loss than by logits.
        if batch.mixed.is_none() && self.labels.label_smoothing == 0.0 {
            return Ok(self.model.loss(&batch.input, &batch.target, mode)?);
        }
        let logits = self.model.logits(&batch.input, mode)?;
        let own = ops::cross_entropy(&logits, &batch.target, &self.labels)?;
        let nll = match &batch.mixed {
            Some((partners, part)) => {
                let other = ops::cross_entropy(&logits, partners, &self.labels)?;
                ((own * *part)? + (other * (1.0 - part))?)?
            }
            None => own,
        };
        Ok(Loss { total: nll.clone(), nll, logits: Some(logits) })
    }

    /// The loss and gradient of a training batch; everything random comes from `draw`.
    fn gradient(&mut self, batch: &Batch, draw: u64) -> Result<Gradient, RunError> {
        let _span = op_span!("graph", "forward", 0);
        let mode = Mode::Train { seed: self.seed, step: draw };
        if !self.shards.is_one() {
            return self.sharded_gradient(batch, mode);
        }
        let loss = self.loss(batch, mode)?;
        Ok(Gradient {
            total: Figure::of(&loss.total)?,
            raw: Figure::of(&loss.nll)?,
            correct: self.correct(&loss, batch)?,
            samples: self.counted(batch)?,
            rate_scale: batch.rate_scale,
            grads: taper_models::backward(&loss.total)?,
            last: self.batches.peek().is_none(),
            batches: 1,
        })
    }

    /// The same, shard by shard.
    fn sharded_gradient(&mut self, batch: &Batch, mode: Mode) -> Result<Gradient, RunError> {
        let sum = self.over_shards(batch, self.numbers.len(), |network, part, weight| {
            let loss = network.loss(part, mode)?;
            let correct = network.correct(&loss, part)?.read()?;
            let [total, raw] = [Figure::of(&loss.total)?.read()?, Figure::of(&loss.nll)?.read()?];
            let grads = taper_models::backward(&loss.total)?;
            network.numbers.contribution(&grads, [total * weight, raw * weight, correct], weight)
        })?;
        let [total, raw, correct] = sum.figures.map(Figure::Known);
        Ok(Gradient {
            grads: self.numbers.take(&sum)?,
            total,
            raw,
            correct,
            samples: batch.samples,
            rate_scale: batch.rate_scale,
            last: self.batches.peek().is_none(),
            batches: 1,
        })
    }

    /// Adds up what `work` has to say of the shards of a batch, each alone with what it carries, its place and the running
    /// statistics that the batch found.
    fn over_shards(
        &mut self,
        batch: &Batch,
        length: usize,
        mut work: impl FnMut(&mut Self, &Batch, f64) -> Result<Contribution, RunError>,
    ) -> Result<Contribution, RunError> {
        let axis = if self.is_classification() { 0 } else { 1 };
        let (found, shards) = (self.numbers.statistics().copy()?, self.shards.clone());
        let sum = shards.sum(batch.input.dim(axis)?, length, |shard, place, weight| {
            self.numbers.statistics().set(&found)?;
            self.model.set_carry(&self.carries[shard])?;
            self.model.set_place(place.start);
            let contribution = work(self, &batch.part(axis, &place)?, weight)?;
            self.carries[shard] = self.model.carry();
            Ok(contribution)
        });
        self.model.set_place(0);
        sum
    }

    /// Works on a batch of the step that was kept: with what was carried to it, and with running statistics put back.
    fn once_more<T>(
        &mut self,
        number: u64,
        work: impl FnOnce(&mut Self, &Kept) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        let kept = self.kept.take().unwrap_or_default();
        let result = match usize::try_from(number).ok().and_then(|number| kept.get(number)) {
            Some(batch) => {
                let carried = self.carried();
                self.set_carried(batch.carries.clone())?;
                let statistics = Buffers::of(&self.params)?;
                let result = work(self, batch);
                statistics.restore()?;
                self.set_carried(carried)?;
                result
            }
            None => Err(candle_core::Error::msg(format!("batch {number} of the step was not kept")).into()),
        };
        self.kept = Some(kept);
        result
    }

    /// What is carried, by shard.
    fn carried(&self) -> Vec<Carry> {
        if self.shards.is_one() { vec![self.model.carry()] } else { self.carries.clone() }
    }

    /// Sets what [`Network::carried`] returned; an empty list forgets it.
    fn set_carried(&mut self, mut carries: Vec<Carry>) -> Result<(), RunError> {
        carries.resize(self.shards.count(), Carry::new());
        if self.shards.is_one() {
            return Ok(self.model.set_carry(&carries[0])?);
        }
        self.carries = carries;
        Ok(self.model.set_carry(&[])?)
    }

    /// How many answers were right, for classes.
    fn correct(&self, loss: &Loss, batch: &Batch) -> Result<Figure, RunError> {
        match (&loss.logits, self.is_classification()) {
            (Some(logits), true) => correct(logits, &batch.target),
            _ => Ok(Figure::Known(0.0)),
        }
    }

    /// How many samples of a batch its loss is the mean of: all, but for targets that the model ignores.
    fn counted(&self, batch: &Batch) -> Result<u64, RunError> {
        let Some(ignored) = self.model.ignored() else { return Ok(batch.samples) };
        let targets = batch.target.flatten_all()?.to_vec1::<u32>()?;
        Ok(targets.into_iter().filter(|target| i64::from(*target) != ignored).count() as u64)
    }

    /// Works with nothing carried, and leaves what is carried as it was.
    fn afresh<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T, RunError>) -> Result<T, RunError> {
        let carries = self.carried();
        self.set_carried(Vec::new())?;
        let result = work(self);
        self.set_carried(carries)?;
        result
    }

    /// Mean loss, and accuracy or perplexity and bits.
    fn values(&self, sums: &Sums, split: Split) -> Values {
        let mean = sums.loss / sums.samples as f64;
        match &self.source {
            Source::Images { .. } => {
                vec![("loss", mean), ("accuracy", sums.correct as f64 / sums.samples as f64)]
            }
            Source::Text { bits, .. } => {
                let bits = bits.as_ref().map(|bits| bits.value(mean, split));
                [("loss", mean), ("perplexity", mean.exp())].into_iter().chain(bits).collect()
            }
        }
    }
}

impl Task for Network {
    fn params(&self) -> &Params {
        &self.params
    }

    fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    fn metrics(&self) -> &'static [&'static str] {
        match &self.source {
            Source::Images { .. } => &["accuracy", "loss"],
            Source::Text { bits: None, .. } => &["perplexity", "loss"],
            Source::Text { bits: Some(Bits { name: "bits_per_char", .. }), .. } => {
                &["bits_per_char", "perplexity", "loss"]
            }
            Source::Text { .. } => &["bits_per_byte", "perplexity", "loss"],
        }
    }

    fn has(&self, split: Split) -> bool {
        match (split, &self.source) {
            (Split::Val, Source::Images { val, .. }) => val.is_some(),
            (Split::Probe | Split::Train, _) => false,
            _ => true,
        }
    }

    fn batches(&self, epoch: u64) -> u64 {
        match &self.source {
            Source::Images { train, .. } => train.batches() as u64,
            Source::Text { reading: Reading::Streams { train, lengths, .. }, .. } => {
                train.windows(self.seed, epoch, *lengths).count() as u64
            }
            Source::Text { reading: Reading::Windows { train, .. }, .. } => train.batches() as u64,
        }
    }

    fn introduce(&mut self) -> Result<(), RunError> {
        let Source::Images { seen, .. } = &self.source else { return Ok(()) };
        let wanted = self.model.wants_images().min(seen.samples());
        if wanted == 0 {
            return Ok(());
        }
        let (mut inputs, mut count) = (Vec::new(), 0);
        let mut batches = self.image_batches(seen, 0, 0);
        while count < wanted
            && let Some(batch) = batches.next().transpose()?
        {
            count += batch.input.dim(0)?;
            inputs.push(batch.input);
        }
        Ok(self.model.see_images(&Tensor::cat(&inputs, 0)?.narrow(0, 0, wanted)?.contiguous()?)?)
    }

    fn set_last(&mut self, last: bool) {
        self.last = last;
    }

    fn go_to(&mut self, epoch: u64, batch: u64) -> Result<(), RunError> {
        if batch == 0 {
            self.set_carried(Vec::new())?;
        }
        self.batches = self.epoch(epoch, batch).peekable();
        Ok(())
    }

    fn next(&mut self, draw: u64) -> Result<Option<Gradient>, RunError> {
        let waiting = op_span!("input", "forward", 0);
        let Some(batch) = self.batches.next().transpose()? else { return Ok(None) };
        drop(waiting);
        self.part_batches()?;
        let carries = if self.kept.is_some() { self.carried() } else { Vec::new() };
        let gradient = self.gradient(&batch, draw)?;
        if let Some(kept) = &mut self.kept {
            kept.push(Kept { batch, draw, carries });
        }
        Ok(Some(gradient))
    }

    fn begin_step(&mut self, taken: u64, twice: bool) -> Result<(), RunError> {
        while self.later.front().is_some_and(|(after, _)| taken >= *after) {
            let Some((_, mut model)) = self.later.pop_front() else { break };
            model.set_carry(&self.model.carry())?;
            self.model = model;
        }
        self.kept = twice.then(Vec::new);
        Ok(())
    }

    fn again(&mut self, number: u64) -> Result<Gradient, RunError> {
        self.once_more(number, |network, Kept { batch, draw, .. }| network.gradient(batch, *draw))
    }

    fn half(&mut self, number: u64, half: usize) -> Result<Option<Gradient>, RunError> {
        let axis = if self.is_classification() { 0 } else { 1 };
        // Streams of text carry state from batch to batch; windows stand alone.
        if axis == 1 && !self.stands_alone() || !self.shards.is_one() {
            return Ok(None);
        }
        self.once_more(number, |network, Kept { batch, draw, .. }| {
            let samples = batch.input.dim(axis)? / 2;
            if samples == 0 {
                return Ok(None);
            }
            let place = half * samples..(half + 1) * samples;
            let part = batch.part(axis, &place)?;
            // Draws go by the place of a sample in its batch.
            network.model.set_place(place.start);
            let gradient = network.gradient(&part, *draw);
            network.model.set_place(0);
            // A window is one sample: its tokens are not drawn one by one.
            Ok(Some(Gradient { samples: samples as u64, ..gradient? }))
        })
    }

    fn epoch_values(&self, sums: &Sums) -> Values {
        self.values(sums, Split::Train)
    }

    /// In evaluation mode. What the model carries is the same before and after.
    fn evaluate_while(
        &mut self,
        split: Split,
        more: &mut dyn FnMut(&Seen) -> Result<bool, RunError>,
    ) -> Result<Values, RunError> {
        let mut whole = true;
        let mut more = |seen: &Seen| more(seen).inspect(|go_on| whole &= go_on);
        let sums = self.afresh(|network| network.judge(split, &mut more))?;
        if whole && sums.samples == 0 && self.model.ignored().is_some() {
            let found = format!("none in the {} set", split.name());
            let expected = "at least one target that is not ignored (`model.ignore_index`)".into();
            return Err(taper_models::Error::Shape { op: "evaluation", expected, found }.into());
        }
        Ok(self.values(&sums, split))
    }

    fn gather_statistics(&mut self, epoch: u64, batches: usize) -> Result<(), RunError> {
        for (name, var) in self.params.vars().into_iter().filter(|(name, _)| is_buffer(name)) {
            let start = if name.ends_with("running_var") { var.ones_like()? } else { var.zeros_like()? };
            var.set(&start)?;
        }
        let seed = self.seed;
        self.afresh(|network| {
            for (number, batch) in network.epoch(epoch, 0).take(batches).enumerate() {
                let (batch, mode) = (batch?, Mode::Statistics { seed, step: number as u64 });
                network.part_batches()?;
                if network.shards.is_one() {
                    network.model.logits(&batch.input, mode)?;
                    continue;
                }
                let length = network.numbers.statistics().len();
                let sum = network.over_shards(&batch, length, |network, part, weight| {
                    network.model.logits(&part.input, mode)?;
                    network.numbers.statistics().contribution(weight)
                })?;
                network.numbers.statistics().take(&sum)?;
            }
            Ok(())
        })
    }

    fn carry(&self) -> Result<Carry, RunError> {
        if self.stands_alone() {
            return Ok(Carry::new());
        }
        if self.shards.is_one() {
            return Ok(self.model.carry());
        }
        let mut own = BTreeMap::new();
        for shard in self.shards.own() {
            let named =
                self.carries[shard].iter().map(|(name, t)| Ok((of_shard(shard, name), t.contiguous()?)));
            own.extend(named.collect::<candle_core::Result<Vec<_>>>()?);
        }
        let own = safetensors::serialize(&own, None).map_err(candle_core::Error::wrap)?;
        let mut all = Carry::new();
        for of_rank in self.shards.world().gather(&own)? {
            all.extend(candle_core::safetensors::load_buffer(&of_rank, &Device::Cpu)?);
        }
        Ok(all)
    }

    fn set_carry(&mut self, carry: &[(String, Tensor)]) -> Result<(), RunError> {
        if self.shards.is_one() {
            return Ok(self.model.set_carry(carry)?);
        }
        let of = |shard: usize| {
            let own = carry.iter().filter_map(|(name, t)| {
                Some((name.strip_prefix(&of_shard(shard, ""))?.to_owned(), t.clone()))
            });
            own.collect()
        };
        self.set_carried((0..self.shards.count()).map(of).collect())
    }
}

/// The name of what a shard carries in a file.
fn of_shard(shard: usize, name: &str) -> String {
    format!("shard.{shard}.{name}")
}

fn shape(loaded: &Loaded) -> Shape {
    match &loaded.data {
        Data::Images { train, .. } => {
            let Images { height, width, channels, classes, .. } = *train;
            Shape::Images { height, width, channels, classes }
        }
        Data::Text(text) => Shape::Tokens { vocab: text.vocab.len() },
    }
}

impl Source {
    fn new(recipe: &Recipe, section: &recipe::Data, loaded: Loaded) -> Result<Self, RunError> {
        match loaded.data {
            Data::Images { train, test } => {
                let classes = train.classes;
                let normalize = match &section.augment.normalize {
                    Some(n) => taper_data::Normalize {
                        mean: n.mean.iter().map(|v| *v as f32).collect(),
                        std: n.std.iter().map(|v| *v as f32).collect(),
                    },
                    None => loaded.normalize.unwrap_or_else(|| taper_data::Normalize::unit(train.channels)),
                };
                let augment = taper_data::Augment {
                    crop_pad: section.augment.crop_pad,
                    crop_fill: section.augment.crop_fill,
                    flip: section.augment.flip,
                    cutout: section.augment.cutout,
                    mixup: section.augment.mixup,
                };
                let still = |indices: Option<Arc<[u32]>>| PipelineConfig {
                    batch_size: section.eval_batch_size,
                    shuffle: false,
                    augment: taper_data::Augment::default(),
                    normalize: normalize.clone(),
                    drop_last: false,
                    indices,
                };
                let parts = section.val.map(|val| {
                    let size = match val {
                        Holdout::Fraction(part) => SplitSize::Fraction(part),
                        Holdout::Count(n) => SplitSize::Count(n),
                    };
                    taper_data::split(train.len(), size, recipe.seed)
                });
                let (rest, held): (Option<Vec<u32>>, Option<Vec<u32>>) = parts.unzip();
                let (rest, held) = (rest.map(Arc::from), held.map(Arc::from));
                let val = match held {
                    Some(held) => Some(ImagePipeline::new(train.clone(), still(Some(held)), recipe.seed)?),
                    None => None,
                };
                let moving = PipelineConfig {
                    batch_size: section.batch_size,
                    shuffle: true,
                    augment,
                    drop_last: section.last_batch == LastBatch::Drop,
                    ..still(rest.clone())
                };
                let seen = ImagePipeline::new(train.clone(), still(rest), recipe.seed)?;
                let train = ImagePipeline::new(train, moving, recipe.seed)?;
                if train.samples() == 0 {
                    return Err(recipe.error_at("data.val", "data.val leaves no sample to train on").into());
                }
                if train.batches() == 0 {
                    let message = format!(
                        "data.last_batch: an epoch has {} images and no batch of {}: give `keep`, or a smaller `data.batch_size`",
                        train.samples(),
                        section.batch_size
                    );
                    return Err(recipe.error_at("data.last_batch", message).into());
                }
                let (height, width, _) = train.shape();
                if recipe.train.eval_augment.is_some_and(|augment| augment.kind == Views::FlipShift)
                    && height.min(width) < 2
                {
                    let message = format!(
                        "train.eval_augment.kind: expected images of at least 2×2 pixels to shift, found {height}×{width}"
                    );
                    return Err(recipe.error_at("train.eval_augment.kind", message).into());
                }
                let test = ImagePipeline::new(test, still(None), recipe.seed)?;
                Ok(Self::Images { train, seen, val, test, classes })
            }
            Data::Text(text) => {
                let reading = Reading::new(recipe, section, &text)?;
                Ok(Self::Text { reading, bits: Bits::of(recipe, &text), words: text })
            }
        }
    }
}

impl Reading {
    fn new(recipe: &Recipe, section: &recipe::Data, text: &Text) -> Result<Self, RunError> {
        let [train, val, test] = [&text.train, &text.valid, &text.test].map(Arc::clone);
        if let Some(recipe::Windows { length, order }) = recipe.train.windows {
            let judged = |tokens| TextWindows::new(tokens, section.eval_batch_size, length);
            let windows = TextWindows::new(train, section.batch_size, length)?;
            if windows.batches() == 0 {
                let message = format!(
                    "train.windows.length: expected a text of more than data.batch_size ({}) windows of {length} tokens, found one of {} \
                     tokens: give shorter windows or fewer of them",
                    section.batch_size,
                    text.train.len()
                );
                return Err(recipe.error_at("train.windows.length", message).into());
            }
            return Ok(Self::Windows { train: windows, val: judged(val)?, test: judged(test)?, order });
        }
        let Some(bptt) = &recipe.train.bptt else {
            let message = "text needs `bptt: {length: 70}` or `windows: {length: 64}`";
            return Err(recipe.error_at("train", message).into());
        };
        let Bptt { length, half, std, min } = *bptt;
        let lengths = Lengths { base: length, half, deviation: std, least: min };
        let judged = |words| {
            TextStream::new(words, section.eval_batch_size).map_err(|e| match e {
                DataError::Option { dataset, message, .. } => {
                    DataError::option(&dataset, "eval_batch_size", message)
                }
                e => e,
            })
        };
        let train = TextStream::new(train, section.batch_size)?;
        Ok(Self::Streams { train, val: judged(val)?, test: judged(test)?, lengths })
    }
}

fn images(
    batch: taper_data::ImageBatch,
    (h, w, c): (usize, usize, usize),
    device: &Device,
) -> Result<Batch, RunError> {
    let input = Tensor::from_vec(batch.pixels, (batch.n, h, w, c), device)?;
    labelled(input, batch.labels, batch.mix, device)
}

/// A batch that a GPU makes of bytes.
fn fed(batch: taper_data::ByteBatch, feed: &Feed, device: &Device) -> Result<Batch, RunError> {
    let input = feed.images(&batch)?;
    labelled(input, batch.labels, batch.mix.map(|(mix, _)| mix), device)
}

fn labelled(
    input: Tensor,
    labels: Vec<u32>,
    mix: Option<taper_data::Mix>,
    device: &Device,
) -> Result<Batch, RunError> {
    let n = labels.len();
    let mixed = match mix {
        Some(mix) => Some((Tensor::from_vec(mix.labels, n, device)?, f64::from(mix.part))),
        None => None,
    };
    let target = Tensor::from_vec(labels, n, device)?;
    Ok(Batch { input, target, mixed, samples: n as u64, rate_scale: 1.0 })
}

fn tokens(stream: &TextStream, window: taper_data::Window, device: &Device) -> Result<Batch, RunError> {
    read(stream.batch(window.start, window.len), window.rate_scale, device)
}

fn read(batch: TextBatch, rate_scale: f64, device: &Device) -> Result<Batch, RunError> {
    let shape = (batch.len, batch.batch);
    Ok(Batch {
        input: Tensor::from_vec(batch.input, shape, device)?,
        target: Tensor::from_vec(batch.target, shape, device)?,
        mixed: None,
        samples: (shape.0 * shape.1) as u64,
        rate_scale,
    })
}

/// Images as they are, if they are of so many classes.
fn same_classes(images: Images, classes: usize) -> Result<Images, String> {
    match images.classes == classes {
        true => Ok(images),
        false => Err(format!("expected {classes} classes, found {}", images.classes)),
    }
}

/// Images under the labels that their classes have elsewhere.
fn by_name(images: Images, names: &[String], elsewhere: &[String]) -> Result<Images, String> {
    let place = |name: &String| {
        let missing = || format!("expected the classes {}, found {name}", elsewhere.join(", "));
        // A label is a byte, and there is a label for each name.
        elsewhere.iter().position(|known| known == name).map(|at| at as u8).ok_or_else(missing)
    };
    let places = names.iter().map(place).collect::<Result<Vec<u8>, String>>()?;
    let label = |label: &u8| places.get(usize::from(*label)).copied().unwrap_or(u8::MAX);
    let labels = images.labels().iter().map(label).collect();
    images.relabelled(labels, elsewhere.len(), "data".as_ref()).map_err(|e| e.to_string())
}

/// The place of the largest logit, the first of equals.
pub(crate) fn largest(row: &[f32]) -> usize {
    (1..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best })
}

/// How many rows have their largest logit (the first of equals) at the target. A GPU counts them itself.
fn correct(logits: &Tensor, target: &Tensor) -> Result<Figure, RunError> {
    if !logits.device().is_cpu() {
        let right = logits.detach().argmax(D::Minus1)?.eq(target)?;
        return Figure::of(&right.to_dtype(DType::F32)?.sum_all()?);
    }
    let classes = logits.dim(D::Minus1)?.max(1);
    let (logits, target) = (logits.detach().flatten_all()?.to_vec1::<f32>()?, target.to_vec1::<u32>()?);
    let rows = logits.chunks_exact(classes);
    let right = rows.zip(target).filter(|(row, target)| largest(row) == *target as usize);
    Ok(Figure::Known(right.count() as f64))
}
