//! Colour images made by a formula, so that image models can be trained with no download.
//!
//! A class is a direction of stripes and a pair of colours. A sample draws phase, width and contrast of its stripes.
//! With `difficulty` the stripes turn, the colours become the sample's own and noise covers the picture: an easy set can
//! be told by its colours, a hard one only by the direction of what is under the noise.
use rayon::prelude::*;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use taper_random::Rng;

use crate::digest::Content;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::{Data, DataError, Images, Loaded, Normalize, Provenance, Search, Shape};

/// Striped images of adjustable difficulty.
pub struct SyntheticImages;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    seed: u64,
    classes: usize,
    difficulty: f64,
    train: usize,
    test: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { seed: 1, classes: 10, difficulty: 0.5, train: 10_000, test: 2_000 }
    }
}

const SIDE: usize = 32;

impl Dataset for SyntheticImages {
    fn name(&self) -> &str {
        "synthetic-images"
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary: "procedural 32x32 colour images in any number of classes, easy to hard".into(),
            options: vec![
                option("seed", "1", "which classes, and which samples of them"),
                option("classes", "10", "classes, 2 to 256"),
                option(
                    "difficulty",
                    "0.5",
                    "0: no noise, classes far apart; 1: mostly noise, classes overlap",
                ),
                option("train", "10000", "images to train on"),
                option("test", "2000", "images to report on"),
            ],
        }
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Images)
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        self.options(given).map(drop)
    }

    fn load(&self, given: &Value, _: &Search) -> Result<Loaded, DataError> {
        let chosen = self.options(given)?;
        let (train, test) = (make(&chosen, "train", chosen.train)?, make(&chosen, "test", chosen.test)?);
        let content = vec![Content::of_images("train", &train), Content::of_images("test", &test)];
        let (mean, std) = train.statistics();
        let to_f32 = |values: Vec<f64>| values.into_iter().map(|v| v as f32).collect();
        let normalize = Some(Normalize { mean: to_f32(mean), std: to_f32(std) });
        let provenance = Provenance::generated(self.name(), content);
        Ok(Loaded { data: Data::Images { train, test }, normalize, provenance })
    }
}

impl SyntheticImages {
    fn options(&self, given: &Value) -> Result<Options, DataError> {
        let chosen: Options = options(self.name(), given)?;
        let wrong = |key: &str, message: String| Err(DataError::option(self.name(), key, message));
        if !(2..=256).contains(&chosen.classes) {
            return wrong("classes", format!("expected 2 to 256, found {}", chosen.classes));
        }
        if !(0.0..=1.0).contains(&chosen.difficulty) {
            return wrong("difficulty", format!("expected 0 to 1, found {}", chosen.difficulty));
        }
        for (key, images) in [("train", chosen.train), ("test", chosen.test)] {
            if !(1..=1_000_000).contains(&images) {
                return wrong(key, format!("expected 1 to 1000000 images, found {images}"));
            }
        }
        Ok(chosen)
    }
}

fn make(options: &Options, split: &str, count: usize) -> Result<Images, DataError> {
    let shape = Shape { height: SIDE, width: SIDE, channels: 3, classes: options.classes };
    let classes: Vec<Class> = (0..options.classes).map(|class| Class::new(options, class)).collect();
    // Classes take turns, so that any prefix is balanced; the pipeline shuffles.
    let labels: Vec<u8> = (0..count).map(|i| (i % options.classes) as u8).collect();
    let mut pixels = vec![0; count * shape.image_bytes()];
    pixels.par_chunks_exact_mut(shape.image_bytes()).zip(&labels).enumerate().for_each(
        |(i, (out, label))| {
            let rng = Rng::new(options.seed, "synthetic-images", split, i as u64);
            classes[usize::from(*label)].paint(options.difficulty, rng, out);
        },
    );
    Images::new(shape, pixels, labels, std::path::Path::new("synthetic-images"))
}

struct Class {
    angle: f64,
    /// Half the angle to the next class.
    apart: f64,
    colours: [[f64; 3]; 2],
}

impl Class {
    fn new(options: &Options, class: usize) -> Self {
        let mut rng = Rng::new(options.seed, "synthetic-images", "class", class as u64);
        let apart = std::f64::consts::PI / options.classes as f64 / 2.0;
        let mut colour = || std::array::from_fn(|_| rng.uniform());
        Self { angle: 2.0 * apart * class as f64, apart, colours: [colour(), colour()] }
    }

    fn paint(&self, difficulty: f64, mut rng: Rng, out: &mut [u8]) {
        let angle = self.angle + self.apart * difficulty * (2.0 * rng.uniform() - 1.0);
        let (along, across) = angle.sin_cos();
        let period = 6.0 + 6.0 * rng.uniform();
        let phase = rng.uniform();
        let contrast = (1.0 - 0.5 * difficulty) * (0.7 + 0.3 * rng.uniform());
        let noise = 0.25 * difficulty;
        let [first, second] =
            self.colours.map(|colour| colour.map(|own| own + difficulty * (rng.uniform() - own)));
        for (i, pixel) in out.chunks_exact_mut(3).enumerate() {
            let (x, y) = ((i % SIDE) as f64, (i / SIDE) as f64);
            // A triangle wave between 0 and 1 across the stripes.
            let wave = ((x * across + y * along) / period + phase).rem_euclid(1.0);
            let wave = (2.0 * wave - 1.0).abs();
            for (c, byte) in pixel.iter_mut().enumerate() {
                let colour = wave * first[c] + (1.0 - wave) * second[c];
                let value = 0.5 + contrast * (colour - 0.5) + noise * rng.normal();
                *byte = (255.0 * value).round().clamp(0.0, 255.0) as u8;
            }
        }
    }
}
