//! Labelled images of one size, as bytes or as floats.
use std::path::Path;
use std::sync::Arc;

use super::{DataError, Normalize};

/// Labelled images of one size, row by row, channels interleaved (NHWC), one allocation. Clones share it.
#[derive(Clone, PartialEq, Eq)]
pub struct Images {
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// 1 for grey, 3 for RGB.
    pub channels: usize,
    /// Labels are below this.
    pub classes: usize,
    /// What a number of an image is stored as.
    pub depth: Depth,
    // `Arc<Vec>`, not `Arc<[u8]>`: the latter would copy 150 MB of CIFAR when it is made.
    pub(super) pixels: Arc<Vec<u8>>,
    pub(super) labels: Arc<Vec<u8>>,
}

/// What the numbers of images are stored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Depth {
    /// A byte, which stands for a 255th of it.
    #[default]
    Byte,
    /// A float that stands for itself: four bytes, the lowest first.
    Float,
}

impl Depth {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Float => 4,
        }
    }
}

/// The size of an image and the number of classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub height: usize,
    /// Columns.
    pub width: usize,
    /// Channels.
    pub channels: usize,
    /// Classes.
    pub classes: usize,
}

impl Shape {
    /// Numbers of one image, which are as many bytes unless they are floats.
    pub fn image_bytes(&self) -> usize {
        self.height * self.width * self.channels
    }
}

impl Images {
    /// Images from their bytes. `file` is named when the lengths disagree or a label is out of range.
    pub fn new(shape: Shape, pixels: Vec<u8>, labels: Vec<u8>, file: &Path) -> Result<Self, DataError> {
        check_sizes(shape, pixels.len(), labels.len(), file)?;
        check_labels(&labels, shape.classes, file)?;
        Ok(Self::stored(shape, Depth::Byte, pixels, labels))
    }

    /// Images from numbers that stand for themselves. One that is not finite is an error.
    pub fn from_floats(
        shape: Shape,
        numbers: &[f32],
        labels: Vec<u8>,
        file: &Path,
    ) -> Result<Self, DataError> {
        check_sizes(shape, numbers.len(), labels.len(), file)?;
        check_labels(&labels, shape.classes, file)?;
        if let Some(at) = numbers.iter().position(|x| !x.is_finite()) {
            let (sample, found) = (at / shape.image_bytes(), numbers[at]);
            let message = format!("expected finite numbers, found {found} in sample {sample}");
            return Err(DataError::format(file, message));
        }
        let pixels = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Ok(Self::stored(shape, Depth::Float, pixels, labels))
    }

    fn stored(shape: Shape, depth: Depth, pixels: Vec<u8>, labels: Vec<u8>) -> Self {
        let Shape { height, width, channels, classes } = shape;
        let (pixels, labels) = (Arc::new(pixels), Arc::new(labels));
        Self { height, width, channels, classes, depth, pixels, labels }
    }

    /// The same images under other labels.
    pub fn relabelled(self, labels: Vec<u8>, classes: usize, file: &Path) -> Result<Self, DataError> {
        check_labels(&labels, classes, file)?;
        if labels.len() != self.len() {
            let message = format!("expected {} labels, one an image, found {}", self.len(), labels.len());
            return Err(DataError::format(file, message));
        }
        Ok(Self { classes, labels: Arc::new(labels), ..self })
    }

    /// How many images there are.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Size and classes.
    pub fn shape(&self) -> Shape {
        Shape { height: self.height, width: self.width, channels: self.channels, classes: self.classes }
    }

    /// Bytes of one image as it is stored.
    pub(super) fn stored_bytes(&self) -> usize {
        self.shape().image_bytes() * self.depth.bytes()
    }

    /// The bytes of image `i`, as its [`depth`](Self::depth) says. Panics when `i` is not below [`len`](Self::len).
    pub fn image(&self, i: usize) -> &[u8] {
        let bytes = self.stored_bytes();
        &self.pixels[i * bytes..][..bytes]
    }

    /// The label of image `i`. Panics when `i` is not below [`len`](Self::len).
    pub fn label(&self, i: usize) -> u8 {
        self.labels[i]
    }

    /// All labels.
    pub fn labels(&self) -> &[u8] {
        &self.labels
    }

    /// Mean and standard deviation of each channel over all pixels; those of bytes scaled to [0, 1], from exact integer sums.
    pub fn statistics(&self) -> (Vec<f64>, Vec<f64>) {
        let n = (self.len() * self.height * self.width).max(1) as f64;
        match self.depth {
            Depth::Byte => self.byte_statistics(n),
            Depth::Float => self.float_statistics(n),
        }
    }

    fn byte_statistics(&self, n: f64) -> (Vec<f64>, Vec<f64>) {
        let channels = self.channels;
        let (mut sum, mut squares) = (vec![0u64; channels], vec![0u64; channels]);
        for pixel in self.pixels.chunks_exact(channels) {
            for (c, value) in pixel.iter().enumerate() {
                sum[c] += u64::from(*value);
                squares[c] += u64::from(*value).pow(2);
            }
        }
        let mean: Vec<f64> = sum.iter().map(|s| *s as f64 / n / 255.0).collect();
        let std = squares
            .iter()
            .zip(&mean)
            .map(|(s, m)| (*s as f64 / n / 65025.0 - m * m).max(0.0).sqrt())
            .collect();
        (mean, std)
    }

    /// Sums in the order of the pixels; the deviations from the mean, so that large means cost no digits.
    fn float_statistics(&self, n: f64) -> (Vec<f64>, Vec<f64>) {
        let channels = self.channels;
        let mean_of = |of: &dyn Fn(usize, f64) -> f64| -> Vec<f64> {
            let mut sums = vec![0.0; channels];
            for (i, bytes) in self.pixels.as_chunks::<4>().0.iter().enumerate() {
                let c = i % channels;
                sums[c] += of(c, f64::from(f32::from_le_bytes(*bytes)));
            }
            sums.iter().map(|sum| sum / n).collect()
        };
        let mean = mean_of(&|_, x| x);
        let variance = mean_of(&|c, x| (x - mean[c]) * (x - mean[c]));
        (mean, variance.into_iter().map(f64::sqrt).collect())
    }

    /// The constants that give the training images mean 0 and deviation 1. A channel that never changes is only shifted.
    pub(super) fn standardised(&self) -> Normalize {
        let (mean, std) = self.statistics();
        let narrow = |numbers: Vec<f64>| numbers.into_iter().map(|x| x as f32).collect::<Vec<_>>();
        let std = narrow(std).into_iter().map(|s| if s > 0.0 { s } else { 1.0 }).collect();
        Normalize { mean: narrow(mean), std }
    }

    /// The samples at some places, in that order.
    pub(super) fn select(&self, places: &[u32]) -> Self {
        let pixels = places.iter().flat_map(|i| self.image(*i as usize)).copied().collect();
        let labels = places.iter().map(|i| self.label(*i as usize)).collect();
        Self { pixels: Arc::new(pixels), labels: Arc::new(labels), ..self.clone() }
    }
}

/// Refuses images without pixels, and another number of them than of labels.
fn check_sizes(shape: Shape, numbers: usize, samples: usize, file: &Path) -> Result<(), DataError> {
    let Shape { height, width, channels, .. } = shape;
    let image = shape.image_bytes();
    let message = if image == 0 {
        format!("expected images with pixels, found {height} rows, {width} columns and {channels} channels")
    } else if samples.checked_mul(image) != Some(numbers) {
        format!("expected {samples} images of {image} numbers, one a label, found {numbers} numbers")
    } else {
        return Ok(());
    };
    Err(DataError::format(file, message))
}

fn check_labels(labels: &[u8], classes: usize, file: &Path) -> Result<(), DataError> {
    match labels.iter().enumerate().find(|(_, label)| usize::from(**label) >= classes) {
        Some((at, label)) => Err(DataError::format(
            file,
            format!("expected labels below {classes}, found {label} at sample {at}"),
        )),
        None => Ok(()),
    }
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { height, width, channels, classes, .. } = self;
        write!(f, "Images({} of {height}x{width}x{channels}, {classes} classes)", self.len())
    }
}
