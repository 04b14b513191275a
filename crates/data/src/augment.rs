//! From stored images to normalised floats, with augmentation on the way: a pure function of (seed, epoch, sample).
use schemars::JsonSchema;
use serde::de::{self, Deserializer, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};
use taper_random::Rng;

use super::{Depth, Shape};

/// Changes made to training images, in this order. The default makes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Augment {
    /// Pads this many pixels on each side and crops a random window of the image's size. Defaults to 0.
    pub crop_pad: usize,
    /// What the pixels around the image are. Defaults to black ones.
    pub crop_fill: Fill,
    /// Whether images are mirrored left and right. Defaults to false.
    pub flip: Flip,
    /// Blanks a square of this many pixels a side, centred anywhere, to the mean (DeVries & Taylor 2017). Defaults to 0.
    pub cutout: usize,
    /// Mixes each image with another of its batch, in parts from Beta(a, a) drawn once a batch (Zhang et al. 2018).
    /// Defaults to 0, which is off.
    pub mixup: f64,
}

/// What stands around an image that is cropped anew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fill {
    /// Black pixels.
    #[default]
    Zero,
    /// The image mirrored at its edges, which are not repeated (PyTorch's `reflect`).
    Reflect,
}

impl Fill {
    /// Whether it is the default.
    pub fn is_zero(&self) -> bool {
        *self == Self::Zero
    }
}

/// Which images are mirrored left and right: none, half of them by draws of every epoch, or each in every other epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema)]
#[schemars(untagged)]
pub enum Flip {
    /// Whether each image is mirrored with probability one half.
    Drawn(bool),
    /// As drawn in the first epoch, and the other way round in every epoch after.
    Alternating(Alternate),
}

/// The word for a [`Flip`] that alternates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Alternate {
    /// Drawn in the first epoch, and inverted in every epoch after (Jordan 2024).
    Alternate,
}

impl Flip {
    /// None.
    pub const NEVER: Self = Self::Drawn(false);
    /// Half of the images, drawn anew every epoch.
    pub const RANDOM: Self = Self::Drawn(true);
    /// Each image in every other epoch.
    pub const ALTERNATE: Self = Self::Alternating(Alternate::Alternate);

    /// Whether an image may be mirrored.
    pub fn is_on(self) -> bool {
        self != Self::NEVER
    }
}

impl Default for Flip {
    fn default() -> Self {
        Self::NEVER
    }
}

impl Serialize for Flip {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Drawn(on) => serializer.serialize_bool(*on),
            Self::Alternating(word) => word.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Flip {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FlipVisitor;
        impl Visitor<'_> for FlipVisitor {
            type Value = Flip;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("true, false or `alternate`")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Flip, E> {
                Ok(Flip::Drawn(on))
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Flip, E> {
                match word {
                    "alternate" => Ok(Flip::ALTERNATE),
                    _ => Err(E::invalid_value(de::Unexpected::Str(word), &self)),
                }
            }
        }
        deserializer.deserialize_any(FlipVisitor)
    }
}

/// The partner of each image of a mixed batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Mix {
    /// The label of each image's partner.
    pub labels: Vec<u32>,
    /// The image's own part; its partner's is `1 - part`. The loss is mixed in the same parts.
    pub part: f32,
}

/// Per-channel constants: a byte `x` becomes `(x / 255 - mean) / std`, a float `x` becomes `(x - mean) / std`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Normalize {
    /// One mean a channel.
    pub mean: Vec<f32>,
    /// One standard deviation a channel.
    pub std: Vec<f32>,
}

impl Normalize {
    /// Scaling to [0, 1] and no more.
    pub fn unit(channels: usize) -> Self {
        Self { mean: vec![0.0; channels], std: vec![1.0; channels] }
    }

    /// The constants of the AdaBound and AdaBelief CIFAR code (protocol of the DecGD paper's tables).
    pub fn cifar() -> Self {
        Self { mean: vec![0.4914, 0.4822, 0.4465], std: vec![0.2023, 0.1994, 0.2010] }
    }

    /// The customary constants of MNIST: its training pixels' mean and standard deviation.
    pub fn mnist() -> Self {
        Self { mean: vec![0.1307], std: vec![0.3081] }
    }
}

/// What an image's augmentation is, drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Draw {
    /// The crop window's top-left corner in the padded image.
    top: usize,
    left: usize,
    flip: bool,
    /// The centre of the blanked square.
    centre: (usize, usize),
}

/// Draws reserved for one image: a draw never depends on which other augmentations are on.
const DRAWS: u64 = 8;

/// The random numbers of an epoch.
pub struct Stream {
    own: Rng,
    /// Those of the first epoch, for what goes on from it.
    first: Rng,
    /// Whether the epoch's number, from 0, is odd.
    odd: bool,
}

impl Augment {
    fn draw(&self, stream: &Stream, sample: usize, shape: Shape) -> Draw {
        let shifts = 2 * self.crop_pad as u64 + 1;
        let draw = |rng: &Rng| {
            let mut rng = rng.clone().at(sample as u64 * DRAWS);
            Draw {
                top: rng.below(shifts) as usize,
                left: rng.below(shifts) as usize,
                flip: rng.below(2) == 1,
                centre: (rng.below(shape.height as u64) as usize, rng.below(shape.width as u64) as usize),
            }
        };
        let drawn = draw(&stream.own);
        let flip = match self.flip {
            Flip::Drawn(on) => on && drawn.flip,
            Flip::Alternating(_) => draw(&stream.first).flip != stream.odd,
        };
        Draw { flip, ..drawn }
    }
}

/// Turns stored images into normalised, augmented floats.
pub struct Transform {
    shape: Shape,
    depth: Depth,
    normalize: Normalize,
    augment: Augment,
    /// The normalised value of each byte, by channel. Looking a byte up costs less than converting, subtracting and
    /// dividing, and each entry is the f32 arithmetic of the usual pipeline (divide by 255, subtract, divide).
    table: Vec<[f32; 256]>,
}

impl Transform {
    pub fn new(shape: Shape, depth: Depth, augment: Augment, normalize: &Normalize) -> Self {
        let entry = |mean: f32, std: f32| std::array::from_fn(|x| (x as f32 / 255.0 - mean) / std);
        let constants = normalize.mean.iter().zip(&normalize.std);
        let table = constants.map(|(mean, std)| entry(*mean, *std)).collect();
        Self { shape, depth, normalize: normalize.clone(), augment, table }
    }

    /// The random stream of an epoch.
    pub fn stream(seed: u64, epoch: u64) -> Stream {
        let of = |epoch| Rng::new(seed, "augment", "", epoch);
        Stream { own: of(epoch), first: of(0), odd: epoch % 2 == 1 }
    }

    /// The normalised value of byte `x` of channel `c`, at `256 * c + x`.
    pub fn table(&self) -> Vec<f32> {
        self.table.concat()
    }

    /// Whether some pixels of an image are blanked to the mean, which is no byte.
    pub fn blanks(&self) -> bool {
        self.augment.cutout > 0
    }

    /// One image into `out`. `stream` is the epoch's.
    pub fn apply(&self, image: &[u8], sample: usize, stream: &Stream, out: &mut [f32]) {
        let draw = match self.depth {
            Depth::Byte => {
                self.arrange(image, sample, stream, out, |b, out| self.look_up(b, out), |b| self.blank(b))
            }
            Depth::Float => {
                self.arrange(image, sample, stream, out, |b, out| self.convert(b, out), |b| self.blank(b))
            }
        };
        if let Some(draw) = draw.filter(|_| self.blanks()) {
            // To the mean, which is 0 once normalised.
            self.cut(draw.centre, self.shape.channels, out);
        }
    }

    /// One image of bytes into `out` as bytes, to be looked up in [`Transform::table`] later. `kept` has a byte a pixel, 0 where the
    /// image is blanked to the mean; it is empty where nothing is.
    pub fn apply_bytes(
        &self,
        image: &[u8],
        sample: usize,
        stream: &Stream,
        (out, kept): (&mut [u8], &mut [u8]),
    ) {
        let copy = |bytes: &[u8], out: &mut [u8]| out.copy_from_slice(bytes);
        let draw = self.arrange(image, sample, stream, out, copy, |out| out.fill(0));
        if let Some(draw) = draw.filter(|_| self.blanks()) {
            kept.fill(1);
            self.cut(draw.centre, 1, kept);
        }
    }

    /// Puts the pixels of an image where its draw wants them; `copy` makes pixels of bytes, `blank` black ones. `None` where
    /// nothing is drawn.
    #[inline]
    fn arrange<P>(
        &self,
        image: &[u8],
        sample: usize,
        stream: &Stream,
        out: &mut [P],
        copy: impl Fn(&[u8], &mut [P]),
        blank: impl Fn(&mut [P]),
    ) -> Option<Draw> {
        if self.augment.crop_pad == 0 && !self.augment.flip.is_on() && self.augment.cutout == 0 {
            copy(image, out);
            return None;
        }
        let draw = self.augment.draw(stream, sample, self.shape);
        let Shape { height, width, channels, .. } = self.shape;
        let (pad, pixel) = (self.augment.crop_pad, channels * self.depth.bytes());
        let reflects = self.augment.crop_fill == Fill::Reflect;
        // The columns of the window that fall on the image, in the image's coordinates; the rest is padding.
        let (from, to) =
            (draw.left.saturating_sub(pad).min(width), (draw.left + width).saturating_sub(pad).min(width));
        let before = pad.saturating_sub(draw.left).min(width);
        for (y, row) in out.chunks_exact_mut(width * channels).enumerate() {
            let source = match reflects {
                true => Some(reflected(draw.top + y, pad, height)),
                false => (draw.top + y).checked_sub(pad).filter(|y| *y < height),
            };
            let Some(source) = source else {
                blank(row);
                continue;
            };
            let pixels = &image[source * width * pixel..][..width * pixel];
            let (left, rest) = row.split_at_mut(before * channels);
            let (middle, right) = rest.split_at_mut((to - from) * channels);
            copy(&pixels[from * pixel..to * pixel], middle);
            if !reflects {
                blank(left);
                blank(right);
                continue;
            }
            for (first, side) in [(0, left), (before + to - from, right)] {
                for (x, out) in side.chunks_exact_mut(channels).enumerate() {
                    let source = reflected(draw.left + first + x, pad, width);
                    copy(&pixels[source * pixel..][..pixel], out);
                }
            }
        }
        if draw.flip {
            mirror(out, width, channels);
        }
        Some(draw)
    }

    fn look_up(&self, bytes: &[u8], out: &mut [f32]) {
        match self.table.as_slice() {
            [table] => {
                let (eights, rest) = bytes.as_chunks::<8>();
                let (out, last) = out.split_at_mut((8 * eights.len()).min(out.len()));
                for (out, eight) in out.as_chunks_mut::<8>().0.iter_mut().zip(eights) {
                    // Most of a drawing is background: eight such pixels are one store.
                    *out = match u64::from_ne_bytes(*eight) {
                        0 => [table[0]; 8],
                        _ => eight.map(|byte| table[usize::from(byte)]),
                    };
                }
                for (out, byte) in last.iter_mut().zip(rest) {
                    *out = table[usize::from(*byte)];
                }
            }
            [red, green, blue] => {
                for (out, pixel) in out.as_chunks_mut::<3>().0.iter_mut().zip(bytes.as_chunks::<3>().0) {
                    *out = [
                        red[usize::from(pixel[0])],
                        green[usize::from(pixel[1])],
                        blue[usize::from(pixel[2])],
                    ];
                }
            }
            tables => {
                for (i, (out, byte)) in out.iter_mut().zip(bytes).enumerate() {
                    *out = tables[i % tables.len()][usize::from(*byte)];
                }
            }
        }
    }

    /// Floats, each by the constants of its channel; `bytes` and `out` begin with a pixel.
    fn convert(&self, bytes: &[u8], out: &mut [f32]) {
        let Normalize { mean, std } = &self.normalize;
        for (i, (out, bytes)) in out.iter_mut().zip(bytes.as_chunks::<4>().0).enumerate() {
            let c = i % mean.len();
            *out = (f32::from_le_bytes(*bytes) - mean[c]) / std[c];
        }
    }

    /// Black pixels: zeros before they are normalised.
    fn blank(&self, out: &mut [f32]) {
        for pixel in out.chunks_exact_mut(self.shape.channels) {
            for (out, table) in pixel.iter_mut().zip(&self.table) {
                *out = table[0];
            }
        }
    }

    /// Zeros in the square around `centre`.
    fn cut<P: Default + Clone>(&self, (y, x): (usize, usize), channels: usize, out: &mut [P]) {
        let Shape { height, width, .. } = self.shape;
        let half = self.augment.cutout / 2;
        let range = |centre: usize, size: usize| {
            centre.saturating_sub(half)..(centre + self.augment.cutout - half).min(size)
        };
        let columns = range(x, width);
        for row in range(y, height) {
            out[(row * width + columns.start) * channels..(row * width + columns.end) * channels]
                .fill(P::default());
        }
    }
}

/// The place in an axis of `size` that place `at` of the axis padded by `pad` on each side shows, where both ends are mirrors.
/// `pad` is below `size`.
fn reflected(at: usize, pad: usize, size: usize) -> usize {
    let inside = at.abs_diff(pad);
    if inside < size { inside } else { (2 * size).saturating_sub(2 + inside) }
}

fn mirror<P>(image: &mut [P], width: usize, channels: usize) {
    for row in image.chunks_exact_mut(width * channels) {
        for x in 0..width / 2 {
            let (left, right) = row.split_at_mut((width - 1 - x) * channels);
            left[x * channels..][..channels].swap_with_slice(&mut right[..channels]);
        }
    }
}

/// Who is mixed with whom, and how, in batch number `batch` of an epoch.
pub fn partners(alpha: f64, seed: u64, epoch: u64, batch: usize, labels: &[u32]) -> (Mix, Vec<u32>) {
    let mut rng = Rng::new(seed, "mixup", &batch.to_string(), epoch);
    let part = beta(&mut rng, alpha) as f32;
    let mut partner: Vec<u32> = (0..labels.len() as u32).collect();
    rng.shuffle(&mut partner);
    (Mix { labels: partner.iter().map(|p| labels[*p as usize]).collect(), part }, partner)
}

/// Mixes a batch in place with a permutation of itself. `batch` is its number in the epoch.
pub fn mix(alpha: f64, seed: u64, epoch: u64, batch: usize, pixels: &mut [f32], labels: &[u32]) -> Mix {
    let (mix, partner) = partners(alpha, seed, epoch, batch, labels);
    let part = mix.part;
    let original = pixels.to_vec();
    let size = pixels.len() / labels.len().max(1);
    for (image, other) in pixels.chunks_exact_mut(size.max(1)).zip(&partner) {
        for (a, b) in image.iter_mut().zip(&original[*other as usize * size..]) {
            *a = part * *a + (1.0 - part) * b;
        }
    }
    mix
}

/// A draw from Beta(alpha, alpha), as the share of one of two equal Gamma draws.
fn beta(rng: &mut Rng, alpha: f64) -> f64 {
    let (a, b) = (log_gamma_draw(rng, alpha), log_gamma_draw(rng, alpha));
    if a == b && a.is_infinite() {
        // Both draws vanished: towards an alpha of 0 the share is all or nothing.
        return if rng.uniform() < 0.5 { 0.0 } else { 1.0 };
    }
    1.0 / (1.0 + (b - a).exp())
}

/// The logarithm of a draw from Gamma(alpha, 1) (Marsaglia & Tsang 2000); for a small alpha the draw itself would be 0.
fn log_gamma_draw(rng: &mut Rng, alpha: f64) -> f64 {
    if alpha < 1.0 {
        let raised = log_gamma_draw(rng, alpha + 1.0);
        return raised + (1.0 - rng.uniform()).ln() / alpha;
    }
    let d = alpha - 1.0 / 3.0;
    let c = (9.0 * d).sqrt().recip();
    loop {
        let x = rng.normal();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - rng.uniform()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d.ln() + v.ln();
        }
    }
}
