//! Labelled images of one size, as bytes.
use std::path::Path;
use std::sync::Arc;

use super::DataError;

/// Labelled images of one size: u8, row by row, channels interleaved (NHWC), one allocation. Clones share it.
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
    // `Arc<Vec>`, not `Arc<[u8]>`: the latter would copy 150 MB of CIFAR when it is made.
    pub(super) pixels: Arc<Vec<u8>>,
    pub(super) labels: Arc<Vec<u8>>,
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
    /// Bytes of one image.
    pub fn image_bytes(&self) -> usize {
        self.height * self.width * self.channels
    }
}

impl Images {
    /// Images from their bytes. `file` is named when the lengths disagree or a label is out of range.
    pub fn new(shape: Shape, pixels: Vec<u8>, labels: Vec<u8>, file: &Path) -> Result<Self, DataError> {
        if shape.image_bytes() == 0 {
            let Shape { height, width, channels, .. } = shape;
            let message = format!(
                "expected images with pixels, found {height} rows, {width} columns and {channels} channels"
            );
            return Err(DataError::format(file, message));
        }
        if pixels.len() != labels.len() * shape.image_bytes() {
            let bytes = shape.image_bytes();
            let (found, samples) = (pixels.len(), labels.len());
            return Err(DataError::format(
                file,
                format!("expected {samples} images of {bytes} bytes, one a label, found {found} bytes"),
            ));
        }
        check_labels(&labels, shape.classes, file)?;
        let Shape { height, width, channels, classes } = shape;
        Ok(Self { height, width, channels, classes, pixels: Arc::new(pixels), labels: Arc::new(labels) })
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

    /// The bytes of image `i`. Panics when `i` is not below [`len`](Self::len).
    pub fn image(&self, i: usize) -> &[u8] {
        let bytes = self.shape().image_bytes();
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

    /// Mean and standard deviation of each channel over all pixels, scaled to [0, 1]. Exact integer sums.
    pub fn statistics(&self) -> (Vec<f64>, Vec<f64>) {
        let channels = self.channels;
        let (mut sum, mut squares) = (vec![0u64; channels], vec![0u64; channels]);
        for pixel in self.pixels.chunks_exact(channels) {
            for (c, value) in pixel.iter().enumerate() {
                sum[c] += u64::from(*value);
                squares[c] += u64::from(*value).pow(2);
            }
        }
        let n = (self.len() * self.height * self.width).max(1) as f64;
        let mean: Vec<f64> = sum.iter().map(|s| *s as f64 / n / 255.0).collect();
        let std = squares
            .iter()
            .zip(&mean)
            .map(|(s, m)| (*s as f64 / n / 65025.0 - m * m).max(0.0).sqrt())
            .collect();
        (mean, std)
    }
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
