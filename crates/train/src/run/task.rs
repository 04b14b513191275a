//! What a run trains: batches in, losses and evaluations out.
use super::RunError;
use super::metrics::Split;
use crate::Registries;
use crate::data::{
    self, Data, ImagePipeline, Images, Lengths, Loaded, PipelineConfig, Provenance, Search, SplitSize,
    TextStream,
};
use crate::recipe::{Bptt, Holdout, Map, Recipe, Task as Section};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::sync::Arc;
use taper_models::{Loss, Mode, Model, Params, Task as Shape, ops};

/// One batch on the device.
pub(crate) struct Batch {
    input: Tensor,
    target: Tensor,
    /// The labels of the partners that a mixed batch was mixed with, and the batch's own part.
    mixed: Option<(Tensor, f64)>,
    /// Samples, or tokens.
    pub samples: u64,
    /// The factor of this batch's learning rate.
    pub rate_scale: f64,
}

/// The mean loss of an evaluation and, for classes, the share of right answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Evaluation {
    pub loss: f64,
    pub accuracy: Option<f64>,
}

/// A model with the data it learns from.
pub(crate) struct Task {
    pub params: Params,
    pub model: Box<dyn Model>,
    pub provenance: Provenance,
    device: Device,
    seed: u64,
    source: Source,
}

enum Source {
    Images { train: ImagePipeline, val: Option<ImagePipeline>, test: ImagePipeline },
    Text { train: TextStream, val: TextStream, test: TextStream, lengths: Lengths },
}

impl Task {
    pub fn new(
        recipe: &Recipe,
        registries: &Registries,
        search: &Search,
        device: &Device,
    ) -> Result<Self, RunError> {
        let Section::Network { data: section, model } = recipe.task() else {
            return Err(recipe
                .error_at("problem", "numeric problems are not trained by this version")
                .into());
        };
        let set = registries.data.get(&section.name)?;
        let mut options: Map = section.config.clone();
        if set.describe().options.iter().any(|option| option.name == "verify") {
            options.insert("verify".into(), section.verify.into());
        }
        let loaded = set.load(&Value::Object(options), search)?;
        let loaded = section.subset.iter().fold(loaded, |loaded, subset| loaded.head(subset));
        let (shape, provenance) = (shape(&loaded), loaded.provenance.clone());
        let source = Source::new(recipe, section, loaded)?;

        let params = Params::new(recipe.seed);
        let config = Value::Object(model.config.clone());
        let entry = registries.models.get(&model.name)?;
        let model = entry.build(&config, shape, params.builder(DType::F32, device))?;
        Ok(Self { params, model, provenance, device: device.clone(), seed: recipe.seed, source })
    }

    /// Whether there is such a split to evaluate on.
    pub fn has(&self, split: Split) -> bool {
        match (split, &self.source) {
            (Split::Val, Source::Images { val, .. }) => val.is_some(),
            (Split::Probe | Split::Train, _) => false,
            _ => true,
        }
    }

    /// Whether answers can be right or wrong; text is judged by perplexity.
    pub fn is_classification(&self) -> bool {
        matches!(self.source, Source::Images { .. })
    }

    /// Batches of an epoch.
    pub fn batches(&self, epoch: u64) -> u64 {
        match &self.source {
            Source::Images { train, .. } => train.batches() as u64,
            Source::Text { train, lengths, .. } => train.windows(self.seed, epoch, *lengths).count() as u64,
        }
    }

    /// The batches of an epoch from number `start` on; each is a function of (seed, epoch, number).
    pub fn epoch(&self, epoch: u64, start: u64) -> Box<dyn Iterator<Item = Result<Batch, RunError>>> {
        let device = self.device.clone();
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        match &self.source {
            Source::Images { train, .. } => {
                let dims = train.shape();
                Box::new(train.epoch(epoch, start).map(move |batch| images(batch, dims, &device)))
            }
            Source::Text { train, lengths, .. } => {
                let stream = train.clone();
                let windows = train.windows(self.seed, epoch, *lengths).skip(start);
                Box::new(windows.map(move |w| tokens(&stream, w, &device)))
            }
        }
    }

    /// Forgets what the model carried from the batch before: an epoch starts afresh.
    pub fn start_epoch(&mut self) -> Result<(), RunError> {
        Ok(self.model.set_carry(&[])?)
    }

    /// The loss of a training batch and, for classes, how many answers were right.
    pub fn loss(&mut self, batch: &Batch, step: u64) -> Result<(Loss, Option<u64>), RunError> {
        let mode = Mode::Train { seed: self.seed, step };
        let loss = match &batch.mixed {
            None => self.model.loss(&batch.input, &batch.target, mode)?,
            Some((partners, part)) => {
                let logits = self.model.logits(&batch.input, mode)?;
                let own = ops::cross_entropy(&logits, &batch.target, &Default::default())?;
                let other = ops::cross_entropy(&logits, partners, &Default::default())?;
                let nll = ((own * *part)? + (other * (1.0 - part))?)?;
                Loss { total: nll.clone(), nll, logits: Some(logits) }
            }
        };
        let correct = match (&loss.logits, self.is_classification()) {
            (Some(logits), true) => Some(correct(logits, &batch.target)?),
            _ => None,
        };
        Ok((loss, correct))
    }

    /// The mean loss over a split, in evaluation mode. What the model carries is the same before and after.
    pub fn evaluate(&mut self, split: Split) -> Result<Evaluation, RunError> {
        let carry = self.model.carry();
        self.model.set_carry(&[])?;
        let evaluation = self.evaluate_fresh(split);
        self.model.set_carry(&carry)?;
        evaluation
    }

    fn evaluate_fresh(&mut self, split: Split) -> Result<Evaluation, RunError> {
        let device = self.device.clone();
        let batches: Box<dyn Iterator<Item = Result<Batch, RunError>>> = match (&self.source, split) {
            (Source::Images { val: Some(set), .. }, Split::Val) | (Source::Images { test: set, .. }, _) => {
                let dims = set.shape();
                Box::new(set.epoch(0, 0).map(move |batch| images(batch, dims, &device)))
            }
            (Source::Text { val, test, lengths, .. }, _) => {
                let stream = if split == Split::Val { val.clone() } else { test.clone() };
                let windows = stream.fixed_windows(lengths.base);
                Box::new(windows.map(move |w| tokens(&stream, w, &device)))
            }
        };
        let (mut sum, mut right, mut samples) = (0.0, 0, 0);
        for batch in batches {
            let batch = batch?;
            let loss = self.model.loss(&batch.input, &batch.target, Mode::Eval)?;
            sum += scalar(&loss.nll)? * batch.samples as f64;
            samples += batch.samples;
            if let (Some(logits), true) = (&loss.logits, self.is_classification()) {
                right += correct(logits, &batch.target)?;
            }
        }
        let mean = |x: f64| x / samples as f64;
        let accuracy = self.is_classification().then(|| mean(right as f64));
        Ok(Evaluation { loss: mean(sum), accuracy })
    }
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
    fn new(recipe: &Recipe, section: &crate::recipe::Data, loaded: Loaded) -> Result<Self, RunError> {
        match loaded.data {
            Data::Images { train, test } => {
                let normalize = match &section.augment.normalize {
                    Some(n) => data::Normalize {
                        mean: n.mean.iter().map(|v| *v as f32).collect(),
                        std: n.std.iter().map(|v| *v as f32).collect(),
                    },
                    None => loaded.normalize.unwrap_or_else(|| data::Normalize::unit(train.channels)),
                };
                let augment = data::Augment {
                    crop_pad: section.augment.crop_pad,
                    flip: section.augment.flip,
                    cutout: section.augment.cutout,
                    mixup: section.augment.mixup,
                };
                let still = |indices: Option<Arc<[u32]>>| PipelineConfig {
                    batch_size: section.eval_batch_size,
                    shuffle: false,
                    augment: data::Augment::default(),
                    normalize: normalize.clone(),
                    drop_last: false,
                    indices,
                };
                let parts = section.val.map(|val| {
                    let size = match val {
                        Holdout::Fraction(part) => SplitSize::Fraction(part),
                        Holdout::Count(n) => SplitSize::Count(n),
                    };
                    data::split(train.len(), size, recipe.seed)
                });
                let (rest, held): (Option<Vec<u32>>, Option<Vec<u32>>) = parts.unzip();
                let (rest, held) = (rest.map(Arc::from), held.map(Arc::from));
                let val = match held {
                    Some(held) => Some(ImagePipeline::new(train.clone(), still(Some(held)), recipe.seed)?),
                    None => None,
                };
                let moving =
                    PipelineConfig { batch_size: section.batch_size, shuffle: true, augment, ..still(rest) };
                let train = ImagePipeline::new(train, moving, recipe.seed)?;
                if train.samples() == 0 {
                    return Err(recipe.error_at("data.val", "leaves no sample to train on").into());
                }
                Ok(Self::Images { train, val, test: ImagePipeline::new(test, still(None), recipe.seed)? })
            }
            Data::Text(text) => {
                let Some(bptt) = &recipe.train.bptt else {
                    return Err(recipe.error_at("train", "text needs `bptt: {length: 70}`").into());
                };
                let Bptt { length, half, std, min } = *bptt;
                let lengths = Lengths { base: length, half, deviation: std, least: min };
                let eval = section.eval_batch_size;
                Ok(Self::Text {
                    train: TextStream::new(text.train, section.batch_size)?,
                    val: TextStream::new(text.valid, eval)?,
                    test: TextStream::new(text.test, eval)?,
                    lengths,
                })
            }
        }
    }
}

fn images(
    batch: data::ImageBatch,
    (h, w, c): (usize, usize, usize),
    device: &Device,
) -> Result<Batch, RunError> {
    let n = batch.n;
    let mixed = match batch.mix {
        Some(mix) => Some((Tensor::from_vec(mix.labels, n, device)?, f64::from(mix.part))),
        None => None,
    };
    Ok(Batch {
        input: Tensor::from_vec(batch.pixels, (n, h, w, c), device)?,
        target: Tensor::from_vec(batch.labels, n, device)?,
        mixed,
        samples: n as u64,
        rate_scale: 1.0,
    })
}

fn tokens(stream: &TextStream, window: data::Window, device: &Device) -> Result<Batch, RunError> {
    let batch = stream.batch(window.start, window.len);
    let shape = (batch.len, batch.batch);
    Ok(Batch {
        input: Tensor::from_vec(batch.input, shape, device)?,
        target: Tensor::from_vec(batch.target, shape, device)?,
        mixed: None,
        samples: (shape.0 * shape.1) as u64,
        rate_scale: window.rate_scale,
    })
}

/// A scalar tensor as f64.
pub(crate) fn scalar(tensor: &Tensor) -> Result<f64, RunError> {
    Ok(tensor.to_dtype(DType::F64)?.to_scalar()?)
}

/// How many rows have their largest logit (the first of equals) at the target.
fn correct(logits: &Tensor, target: &Tensor) -> Result<u64, RunError> {
    let (logits, target) = (logits.detach().to_vec2::<f32>()?, target.to_vec1::<u32>()?);
    let largest = |row: &[f32]| (1..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    Ok(logits.iter().zip(target).filter(|(row, target)| largest(row) == *target as usize).count() as u64)
}
