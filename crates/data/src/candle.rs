//! The data sets of [candle-datasets](candle_datasets) as ours: registered, proved by digest and fed by the pipeline like any other.
//!
//! ```no_run
//! use std::sync::Arc;
//! use taper_data::DataRegistry;
//! use taper_data::candle::{Axes, Vision};
//! let theirs = candle_datasets::vision::cifar::load()?;
//! let mut registry = DataRegistry::builtin();
//! registry.register(Arc::new(Vision::new("their-cifar", &theirs, Axes::Swapped)?))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use candle_datasets::nlp::tinystories;
use serde_json::Value;
use taper_files::{scratch, sha256_file};

use super::digest::Content;
use super::registry::{Dataset, Description, Kind};
use super::{Data, DataError, FileRecord, Images, Loaded, Provenance, Search, Shape, Text, Unit};

/// How a tensor of images has its pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axes {
    /// `[N, rows · columns]`, grey, as candle-datasets has MNIST and Fashion-MNIST.
    Flat {
        /// Rows of an image.
        height: usize,
        /// Columns.
        width: usize,
    },
    /// `[N, channels, rows, columns]`, as `cifar::load_dir` has CIFAR-10.
    Planes,
    /// `[N, channels, columns, rows]`: what `cifar::load` of candle-datasets 0.11.1 returns. It takes the decoded images, whose
    /// rows come first, for columns first and permutes (0, 3, 2, 1) where (0, 3, 1, 2) is meant, so that every image is
    /// mirrored at its diagonal. Here that is undone.
    Swapped,
}

/// A vision set of candle's that is in memory.
pub struct Vision {
    name: String,
    train: Images,
    test: Images,
}

impl Vision {
    /// Adapts `set` under a name of your choice. Pixels in 255ths become bytes, others stay floats.
    pub fn new(name: &str, set: &candle_datasets::vision::Dataset, axes: Axes) -> Result<Self, DataError> {
        let read = |images: &Tensor, labels: &Tensor| -> Result<Images, DataError> {
            let split = adapt(images, labels, axes, set.labels, Path::new(name));
            split.map_err(|e| DataError::format(name, e.to_string()))?
        };
        let train = read(&set.train_images, &set.train_labels)?;
        let test = read(&set.test_images, &set.test_labels)?;
        Ok(Self { name: name.into(), train, test })
    }
}

/// One split. The outer error is candle's.
fn adapt(
    images: &Tensor,
    labels: &Tensor,
    axes: Axes,
    classes: usize,
    name: &Path,
) -> candle_core::Result<Result<Images, DataError>> {
    let images = match axes {
        Axes::Flat { height, width } => images.reshape((images.dim(0)?, height, width, 1))?,
        Axes::Planes => images.permute((0, 2, 3, 1))?,
        Axes::Swapped => images.permute((0, 3, 2, 1))?,
    };
    let (_, height, width, channels) = images.dims4()?;
    let shape = Shape { height, width, channels, classes };
    let numbers = images.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let labels = labels.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    let labels: Vec<u8> = match labels.iter().map(|label| u8::try_from(*label)).collect() {
        Ok(labels) => labels,
        Err(_) => return Ok(Err(DataError::format(name, "expected labels from 0 to 255, found others"))),
    };
    Ok(match bytes(&numbers) {
        Some(pixels) => Images::new(shape, pixels, labels, name),
        None => Images::from_floats(shape, &numbers, labels, name),
    })
}

/// The bytes that numbers are 255ths of, if all are. Candle multiplies by a rounded 1/255, an ulp from the quotient.
fn bytes(numbers: &[f32]) -> Option<Vec<u8>> {
    let byte = |x: &f32| {
        let scaled = x * 255.0;
        let whole = scaled.round();
        ((0.0..=255.0).contains(&whole) && (scaled - whole).abs() <= 1e-4).then_some(whole as u8)
    };
    numbers.iter().map(byte).collect()
}

impl Dataset for Vision {
    fn name(&self) -> &str {
        &self.name
    }

    fn describe(&self) -> Description {
        let summary = format!("{:?} + {:?} of candle-datasets", self.train, self.test);
        Description { summary, options: Vec::new() }
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Images)
    }

    fn load(&self, _: &Value, _: &Search) -> Result<Loaded, DataError> {
        let (train, test) = (self.train.clone(), self.test.clone());
        let content = vec![Content::of_images("train", &train), Content::of_images("test", &test)];
        let provenance =
            Provenance { source: "candle-datasets".into(), ..Provenance::generated(&self.name, content) };
        let normalize = Some(train.standardised());
        Ok(Loaded { data: Data::Images { train, test }, normalize, provenance })
    }
}

/// TinyStories as llama2.c tokenizes it: a folder of `.bin` files of 16-bit numbers, the first by name to choose and report on.
pub struct TinyStories {
    /// The folder.
    pub folder: PathBuf,
    /// Words of the tokenizer: numbers are below it.
    pub vocab: usize,
}

impl TinyStories {
    /// The files by name.
    fn files(&self) -> Result<Vec<PathBuf>, DataError> {
        let at = |e| DataError::io(&self.folder, e);
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(at)? {
            let path = entry.map_err(at)?.path();
            if path.extension().is_some_and(|extension| extension == "bin") {
                files.push(path);
            }
        }
        if files.len() < 2 {
            let message = format!("expected at least two .bin files, found {}", files.len());
            return Err(DataError::format(&self.folder, message));
        }
        files.sort();
        Ok(files)
    }

    /// The numbers of a file as candle's reader has them. It shuffles windows, with a generator that cannot be seeded, so it is asked
    /// for one window as long as the file, in a folder where there is no other to train on.
    fn tokens(&self, first: &Path, file: &Path, bytes: u64) -> Result<Vec<u32>, DataError> {
        let message = |message: String| DataError::format(file, message);
        // It would subtract below zero, and reads past an odd end.
        if bytes < 4 || bytes % 2 != 0 {
            return Err(message(format!("expected 16-bit numbers, at least two, found {bytes} bytes")));
        }
        let alone = scratch()?;
        let link = |path: &Path, name: &str| {
            let to = alone.path().join(name);
            let linked = std::fs::hard_link(path, &to).or_else(|_| std::fs::copy(path, &to).map(drop));
            linked.map_err(|e| DataError::io(path, e))
        };
        link(first, "0.bin")?;
        link(file, "1.bin")?;
        let theirs = tinystories::Dataset::new(alone.path()).map_err(|e| message(e.to_string()))?;
        let length = bytes as usize / 2 - 1;
        let mut windows = tinystories::DatasetRandomIter::new(&theirs, false, length, Device::Cpu);
        let window = windows.next().unwrap_or_else(|| candle_core::bail!("no window"));
        let (input, target) = window.map_err(|e| message(e.to_string()))?;
        let read = || -> candle_core::Result<Vec<u32>> {
            let last = target.to_vec1::<u32>()?.last().copied();
            Ok(input.to_vec1::<u32>()?.into_iter().chain(last).collect())
        };
        let numbers = read().map_err(|e| message(e.to_string()))?;
        match numbers.iter().find(|number| **number as usize >= self.vocab) {
            Some(number) => Err(message(format!("expected numbers below {}, found {number}", self.vocab))),
            None => Ok(numbers),
        }
    }
}

impl Dataset for TinyStories {
    fn name(&self) -> &str {
        "tinystories"
    }

    fn describe(&self) -> Description {
        let summary =
            "TinyStories, tokenized, through candle-datasets; its validation set is also reported on";
        Description { summary: summary.into(), options: Vec::new() }
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Text)
    }

    fn load(&self, _: &Value, _: &Search) -> Result<Loaded, DataError> {
        let paths = self.files()?;
        let (mut files, mut train, mut valid) = (Vec::new(), Vec::new(), Vec::new());
        for (place, path) in paths.iter().enumerate() {
            let (bytes, sha256) = sha256_file(path)?;
            let numbers = self.tokens(&paths[0], path, bytes)?;
            let part = if place == 0 { &mut valid } else { &mut train };
            part.extend(numbers);
            files.push(FileRecord { path: path.display().to_string(), bytes, sha256 });
        }
        let content = |split: &str, numbers: &[u32]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            Content::of_bytes(split, &bytes, numbers.len())
        };
        let content = vec![content("train", &train), content("valid", &valid), content("test", &valid)];
        let vocab = (0..self.vocab).map(|number| format!("<{number}>")).collect();
        let text = Text {
            train: train.into(),
            valid: valid.clone().into(),
            test: valid.into(),
            vocab,
            unit: Unit::Word,
            pieces: None,
        };
        let source = self.folder.display().to_string();
        let provenance = Provenance { source, files, ..Provenance::generated(self.name(), content) };
        Ok(Loaded { data: Data::Text(text), normalize: None, provenance })
    }
}
