//! Batches of images, made ahead of the training step on a thread of their own.
//!
//! A batch is a pure function of (seed, epoch, number): the thread only decides when it is made, never what is in it.
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;

use taper_random::Rng;

use super::augment::{Augment, Fill, Mix, Normalize, Transform, mix, partners};
use super::{DataError, Depth, Images};

/// How batches are made.
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// Images a batch.
    pub batch_size: usize,
    /// A new order each epoch, by the seed; otherwise the order of the set.
    pub shuffle: bool,
    /// Changes made to the images.
    pub augment: Augment,
    /// Constants by channel.
    pub normalize: Normalize,
    /// Drops a last batch that is not full.
    pub drop_last: bool,
    /// The samples to use, such as one side of a [`split`](super::split); `None` is all.
    pub indices: Option<Arc<[u32]>>,
}

/// A batch of normalised images.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageBatch {
    /// `n` images: rows, columns, channels (NHWC).
    pub pixels: Vec<f32>,
    /// `n` labels.
    pub labels: Vec<u32>,
    /// Images in this batch; the last may have fewer than the others.
    pub n: usize,
    /// The partners of a mixed batch.
    pub mix: Option<Mix>,
}

/// A batch of augmented images that are still bytes: for a device that normalises, blanks and mixes them itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ByteBatch {
    /// `n` images: rows, columns, channels (NHWC).
    pub pixels: Vec<u8>,
    /// A byte a pixel, 0 where it is blanked to the mean; empty where nothing is.
    pub kept: Vec<u8>,
    /// `n` labels.
    pub labels: Vec<u32>,
    /// Images in this batch.
    pub n: usize,
    /// How to mix it, and the number of each image's partner in the batch.
    pub mix: Option<(Mix, Vec<u32>)>,
}

/// Batches of an image set.
#[derive(Clone)]
pub struct ImagePipeline(Arc<Inner>);

struct Inner {
    images: Images,
    config: PipelineConfig,
    transform: Transform,
    seed: u64,
}

/// Batches waiting beyond the one in use: enough to hide a slow batch, little memory (1.5 MB each for CIFAR at 128).
const AHEAD: usize = 4;

impl ImagePipeline {
    /// A pipeline over `images`. The configuration is checked here, so that making batches cannot fail.
    pub fn new(images: Images, config: PipelineConfig, seed: u64) -> Result<Self, DataError> {
        let wrong = |key: &str, message: String| Err(DataError::option("images", key, message));
        let Normalize { mean, std } = &config.normalize;
        if config.batch_size == 0 {
            return wrong("batch_size", "expected at least 1, found 0".into());
        }
        if mean.len() != images.channels || std.len() != images.channels {
            let message = format!(
                "expected one mean and std for each of {} channels, found {} and {}",
                images.channels,
                mean.len(),
                std.len()
            );
            return wrong("augment.normalize", message);
        }
        if let Some(bad) = std.iter().chain(mean).find(|v| !v.is_finite()).or(std.iter().find(|s| **s <= 0.0))
        {
            return wrong(
                "augment.normalize",
                format!("expected finite means and positive standard deviations, found {bad}"),
            );
        }
        if !(config.augment.mixup >= 0.0 && config.augment.mixup.is_finite()) {
            return wrong(
                "augment.mixup",
                format!("expected 0 or a positive number, found {}", config.augment.mixup),
            );
        }
        let longest = images.height.max(images.width);
        for (key, value) in
            [("augment.crop_pad", config.augment.crop_pad), ("augment.cutout", config.augment.cutout)]
        {
            if value > longest {
                return wrong(key, format!("expected at most the image's {longest} pixels, found {value}"));
            }
        }
        let (shortest, pad) = (images.height.min(images.width), config.augment.crop_pad);
        if config.augment.crop_fill == Fill::Reflect && pad > 0 && pad >= shortest {
            let message = format!(
                "expected less than the image's {shortest} pixels with `crop_fill: reflect`, found {pad}"
            );
            return wrong("augment.crop_pad", message);
        }
        let beyond = config.indices.iter().flat_map(|i| i.iter()).find(|i| **i as usize >= images.len());
        if let Some(index) = beyond {
            return wrong("indices", format!("expected samples below {}, found {index}", images.len()));
        }
        let transform = Transform::new(images.shape(), images.depth, config.augment, &config.normalize);
        Ok(Self(Arc::new(Inner { images, config, transform, seed })))
    }

    /// The same over all of other images.
    pub fn over(&self, images: Images) -> Result<Self, DataError> {
        Self::new(images, PipelineConfig { indices: None, ..self.0.config.clone() }, self.0.seed)
    }

    /// Constants by channel.
    pub fn normalize(&self) -> &Normalize {
        &self.0.config.normalize
    }

    /// Rows, columns and channels of an image.
    pub fn shape(&self) -> (usize, usize, usize) {
        let images = &self.0.images;
        (images.height, images.width, images.channels)
    }

    /// Samples of an epoch.
    pub fn samples(&self) -> usize {
        self.0.samples()
    }

    /// Batches of an epoch.
    pub fn batches(&self) -> usize {
        let (samples, size) = (self.samples(), self.0.config.batch_size);
        if self.0.config.drop_last { samples / size } else { samples.div_ceil(size) }
    }

    /// The batches of an epoch from number `start_batch` on.
    pub fn epoch(&self, epoch: u64, start_batch: usize) -> ImageEpoch {
        self.made_by(Maker::batch, epoch, start_batch)
    }

    /// Whether images are stored as bytes, and [`byte_epoch`](Self::byte_epoch) can be had.
    pub fn is_bytes(&self) -> bool {
        self.0.images.depth == Depth::Byte
    }

    /// The same batches as bytes, of images that are stored so.
    pub fn byte_epoch(&self, epoch: u64, start_batch: usize) -> ImageEpoch<ByteBatch> {
        self.made_by(Maker::byte_batch, epoch, start_batch)
    }

    /// The normalised value of byte `x` of channel `c`, at `256 * c + x`.
    pub fn table(&self) -> Vec<f32> {
        self.0.transform.table()
    }

    fn made_by<B: Send + 'static>(&self, make: Make<B>, epoch: u64, start_batch: usize) -> ImageEpoch<B> {
        let maker = Maker { inner: self.0.clone(), order: self.0.order(epoch).into(), epoch };
        let (end, background) = (self.batches(), maker.clone());
        let (sender, receiver) = sync_channel(AHEAD);
        let thread = std::thread::Builder::new().name("taper-data".into()).spawn(move || {
            // A send fails when the epoch was dropped: nobody wants the rest.
            (start_batch..end).all(|number| sender.send(make(&background, number)).is_ok());
        });
        // Where no thread can be had, batches are made when they are asked for.
        let ahead = thread.ok().map(|thread| (receiver, thread));
        ImageEpoch { maker, make, next: start_batch, end, ahead }
    }
}

impl Inner {
    fn samples(&self) -> usize {
        self.config.indices.as_ref().map_or(self.images.len(), |indices| indices.len())
    }

    /// The samples of an epoch in their order.
    fn order(&self, epoch: u64) -> Vec<u32> {
        let mut order = match &self.config.indices {
            Some(indices) => indices.to_vec(),
            None => (0..self.images.len() as u32).collect(),
        };
        if self.config.shuffle {
            Rng::new(self.seed, "shuffle", "", epoch).shuffle(&mut order);
        }
        order
    }
}

/// Makes the batches of one epoch.
#[derive(Clone)]
struct Maker {
    inner: Arc<Inner>,
    order: Arc<[u32]>,
    epoch: u64,
}

/// How a batch is made.
type Make<B> = fn(&Maker, usize) -> B;

impl Maker {
    /// The samples of a batch.
    fn samples(&self, number: usize) -> &[u32] {
        let size = self.inner.config.batch_size;
        let start = (number * size).min(self.order.len());
        &self.order[start..(start + size).min(self.order.len())]
    }

    fn labels(&self, samples: &[u32]) -> Vec<u32> {
        samples.iter().map(|s| u32::from(self.inner.images.label(*s as usize))).collect()
    }

    fn batch(&self, number: usize) -> ImageBatch {
        let Inner { images, config, transform, seed } = &*self.inner;
        let samples = self.samples(number);
        let size = images.shape().image_bytes();
        let stream = Transform::stream(*seed, self.epoch);
        let mut pixels = Vec::with_capacity(samples.len() * size);
        for sample in samples.iter().map(|sample| *sample as usize) {
            // Image by image: what is cleared is still in the cache when it is written.
            let start = pixels.len();
            pixels.resize(start + size, 0.0);
            transform.apply(images.image(sample), sample, &stream, &mut pixels[start..]);
        }
        let labels = self.labels(samples);
        let alpha = config.augment.mixup;
        let mix = (alpha > 0.0).then(|| mix(alpha, *seed, self.epoch, number, &mut pixels, &labels));
        ImageBatch { n: labels.len(), pixels, labels, mix }
    }

    fn byte_batch(&self, number: usize) -> ByteBatch {
        let Inner { images, config, transform, seed } = &*self.inner;
        let samples = self.samples(number);
        let size = images.shape().image_bytes();
        // No byte a pixel where nothing is blanked.
        let area = if transform.blanks() { images.height * images.width } else { 0 };
        let stream = Transform::stream(*seed, self.epoch);
        let (mut pixels, mut kept) = (vec![0; samples.len() * size], vec![1; samples.len() * area]);
        for (i, (sample, out)) in samples.iter().zip(pixels.chunks_exact_mut(size)).enumerate() {
            let kept = &mut kept[i * area..][..area];
            transform.apply_bytes(images.image(*sample as usize), *sample as usize, &stream, (out, kept));
        }
        let labels = self.labels(samples);
        let alpha = config.augment.mixup;
        let mix = (alpha > 0.0).then(|| partners(alpha, *seed, self.epoch, number, &labels));
        ByteBatch { n: labels.len(), pixels, kept, labels, mix }
    }
}

/// The batches of one epoch. Dropping it early stops the thread that makes them.
pub struct ImageEpoch<B = ImageBatch> {
    maker: Maker,
    make: Make<B>,
    next: usize,
    end: usize,
    ahead: Option<(Receiver<B>, JoinHandle<()>)>,
}

impl<B> Iterator for ImageEpoch<B> {
    type Item = B;

    fn next(&mut self) -> Option<B> {
        if self.next >= self.end {
            return None;
        }
        let made = self.ahead.as_ref().and_then(|(receiver, _)| receiver.recv().ok());
        let batch = made.unwrap_or_else(|| (self.make)(&self.maker, self.next));
        self.next += 1;
        Some(batch)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end.saturating_sub(self.next);
        (left, Some(left))
    }
}

impl<B> ExactSizeIterator for ImageEpoch<B> {}

impl<B> Drop for ImageEpoch<B> {
    fn drop(&mut self) {
        if let Some((receiver, thread)) = self.ahead.take() {
            // First the receiver, so that a send in progress fails and the thread ends.
            drop(receiver);
            // A panic of the thread was visible as a missing batch; there is nothing to add while dropping.
            let _ = thread.join();
        }
    }
}
