//! MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100.
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;

use crate::cifar::{self, Records};
use crate::digest::{self, Content};
use crate::hub::Repo;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::search::{Form, Found, Layout, Search, Spec, find};
use crate::{Data, DataError, Images, Loaded, Normalize, Provenance, Shape, Source, idx, parquet};

/// An image set that lives in files.
pub struct Vision {
    spec: Spec,
    shape: Shape,
    normalize: fn() -> Normalize,
    summary: &'static str,
    licence: &'static str,
    /// The hub's parquet column of images.
    image_column: &'static str,
    /// The hub's parquet columns of labels: the labels, and coarse ones where there are any.
    label_columns: &'static [&'static str],
    /// The binary records, for CIFAR.
    records: Option<Records>,
}

/// CIFAR-100's coarse classes.
const COARSE: usize = 20;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    verify: bool,
    revision: Option<String>,
    labels: Labels,
}

#[derive(Clone, Copy, Debug, PartialEq, JsonSchema, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Labels {
    Fine,
    Coarse,
}

impl Default for Options {
    fn default() -> Self {
        Self { verify: true, revision: None, labels: Labels::Fine }
    }
}

const GREY: Shape = Shape { height: 28, width: 28, channels: 1, classes: 10 };

macro_rules! idx_files {
    ($prefix:literal) => {
        &[
            &[concat!($prefix, "train-images-idx3-ubyte"), concat!($prefix, "train-images-idx3-ubyte.gz")],
            &[concat!($prefix, "train-labels-idx1-ubyte"), concat!($prefix, "train-labels-idx1-ubyte.gz")],
            &[concat!($prefix, "t10k-images-idx3-ubyte"), concat!($prefix, "t10k-images-idx3-ubyte.gz")],
            &[concat!($prefix, "t10k-labels-idx1-ubyte"), concat!($prefix, "t10k-labels-idx1-ubyte.gz")],
        ]
    };
}

#[cfg(embedded_mnist)]
macro_rules! embedded {
    ($($name:literal),*) => {
        &[$(($name, include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/mnist/", $name)))),*]
    };
}

pub static MNIST: Vision = Vision {
    spec: Spec {
        name: "mnist",
        layouts: &[
            Layout { form: Form::Idx, files: idx_files!("") },
            Layout { form: Form::Idx, files: idx_files!("MNIST/raw/") },
            Layout {
                form: Form::Parquet,
                files: &[
                    &["mnist/train-00000-of-00001.parquet", "mnist/train/0000.parquet"],
                    &["mnist/test-00000-of-00001.parquet", "mnist/test/0000.parquet"],
                ],
            },
        ],
        hub: Repo {
            id: "ylecun/mnist",
            revision: "77f3279092a1c1579b2250db8eafed0ad422088c",
            files: &["mnist/train-00000-of-00001.parquet", "mnist/test-00000-of-00001.parquet"],
        },
        #[cfg(embedded_mnist)]
        embedded: embedded!(
            "train-images-idx3-ubyte.gz",
            "train-labels-idx1-ubyte.gz",
            "t10k-images-idx3-ubyte.gz",
            "t10k-labels-idx1-ubyte.gz"
        ),
        #[cfg(not(embedded_mnist))]
        embedded: &[],
    },
    shape: GREY,
    normalize: Normalize::mnist,
    summary: "handwritten digits, 60,000 + 10,000 grey images of 28x28 in 10 classes",
    licence: "CC BY-SA 3.0 (LeCun, Cortes, Burges), as its mirrors state it; derived from NIST's",
    image_column: "image",
    label_columns: &["label"],
    records: None,
};

pub static FASHION_MNIST: Vision = Vision {
    spec: Spec {
        name: "fashion-mnist",
        layouts: &[
            Layout { form: Form::Idx, files: idx_files!("") },
            Layout { form: Form::Idx, files: idx_files!("FashionMNIST/raw/") },
            Layout {
                form: Form::Parquet,
                files: &[
                    &["fashion_mnist/train-00000-of-00001.parquet", "fashion_mnist/train/0000.parquet"],
                    &["fashion_mnist/test-00000-of-00001.parquet", "fashion_mnist/test/0000.parquet"],
                ],
            },
        ],
        hub: Repo {
            id: "zalando-datasets/fashion_mnist",
            revision: "531be5e2ccc9dba0c201ad3ae567a4f3d16ecdd2",
            files: &[
                "fashion_mnist/train-00000-of-00001.parquet",
                "fashion_mnist/test-00000-of-00001.parquet",
            ],
        },
        embedded: &[],
    },
    shape: GREY,
    normalize: || Normalize { mean: vec![0.2860], std: vec![0.3530] },
    summary: "articles of clothing, 60,000 + 10,000 grey images of 28x28 in 10 classes",
    licence: "MIT (Zalando SE)",
    image_column: "image",
    label_columns: &["label"],
    records: None,
};

const COLOUR: Shape = Shape { height: 32, width: 32, channels: 3, classes: 10 };

macro_rules! cifar10_batches {
    ($prefix:literal) => {
        &[
            &[concat!($prefix, "data_batch_1.bin")],
            &[concat!($prefix, "data_batch_2.bin")],
            &[concat!($prefix, "data_batch_3.bin")],
            &[concat!($prefix, "data_batch_4.bin")],
            &[concat!($prefix, "data_batch_5.bin")],
            &[concat!($prefix, "test_batch.bin")],
        ]
    };
}

pub static CIFAR10: Vision = Vision {
    spec: Spec {
        name: "cifar10",
        layouts: &[
            Layout { form: Form::CifarBinary, files: cifar10_batches!("cifar-10-batches-bin/") },
            Layout { form: Form::CifarBinary, files: cifar10_batches!("") },
            Layout { form: Form::CifarArchive, files: &[&["cifar-10-binary.tar.gz"]] },
            Layout {
                form: Form::Parquet,
                files: &[
                    &["plain_text/train-00000-of-00001.parquet", "plain_text/train/0000.parquet"],
                    &["plain_text/test-00000-of-00001.parquet", "plain_text/test/0000.parquet"],
                ],
            },
        ],
        hub: Repo {
            id: "uoft-cs/cifar10",
            revision: "0b2714987fa478483af9968de7c934580d0bb9a2",
            files: &["plain_text/train-00000-of-00001.parquet", "plain_text/test-00000-of-00001.parquet"],
        },
        embedded: &[],
    },
    shape: COLOUR,
    normalize: Normalize::cifar,
    summary: "photographs, 50,000 + 10,000 colour images of 32x32 in 10 classes",
    licence: "none stated by its publishers; they ask to cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    image_column: "img",
    label_columns: &["label"],
    records: Some(Records {
        labels: 1,
        train: &[
            "data_batch_1.bin",
            "data_batch_2.bin",
            "data_batch_3.bin",
            "data_batch_4.bin",
            "data_batch_5.bin",
        ],
        test: "test_batch.bin",
    }),
};

pub static CIFAR100: Vision = Vision {
    spec: Spec {
        name: "cifar100",
        layouts: &[
            Layout {
                form: Form::CifarBinary,
                files: &[&["cifar-100-binary/train.bin"], &["cifar-100-binary/test.bin"]],
            },
            Layout { form: Form::CifarBinary, files: &[&["train.bin"], &["test.bin"]] },
            Layout { form: Form::CifarArchive, files: &[&["cifar-100-binary.tar.gz"]] },
            Layout {
                form: Form::Parquet,
                files: &[
                    &["cifar100/train-00000-of-00001.parquet", "cifar100/train/0000.parquet"],
                    &["cifar100/test-00000-of-00001.parquet", "cifar100/test/0000.parquet"],
                ],
            },
        ],
        hub: Repo {
            id: "uoft-cs/cifar100",
            revision: "aadb3af77e9048adbea6b47c21a81e47dd092ae5",
            files: &["cifar100/train-00000-of-00001.parquet", "cifar100/test-00000-of-00001.parquet"],
        },
        embedded: &[],
    },
    shape: Shape { classes: 100, ..COLOUR },
    normalize: Normalize::cifar,
    summary: "photographs, 50,000 + 10,000 colour images of 32x32 in 100 fine or 20 coarse classes",
    licence: "none stated by its publishers; they ask to cite Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
    image_column: "img",
    label_columns: &["fine_label", "coarse_label"],
    records: Some(Records { labels: 2, train: &["train.bin"], test: "test.bin" }),
};

impl Dataset for &'static Vision {
    fn name(&self) -> &str {
        self.spec.name
    }

    fn describe(&self) -> Description {
        let mut docs = vec![
            OptionDoc {
                name: "verify",
                default: "true",
                doc: "refuse content that is not the published set's",
            },
            OptionDoc {
                name: "revision",
                default: self.spec.hub.revision,
                doc: "the hub revision to download",
            },
        ];
        if self.is_hierarchical() {
            docs.push(OptionDoc {
                name: "labels",
                default: "fine",
                doc: "`fine` (100) or `coarse` (20) classes",
            });
        }
        Description { summary: self.summary.into(), options: docs }
    }

    fn licence(&self) -> Option<&'static str> {
        Some(self.licence)
    }

    fn files(&self) -> Option<&'static Spec> {
        Some(&self.spec)
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

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        let name = self.spec.name;
        let Options { verify, revision, labels } = self.options(given)?;
        let found = find(&self.spec, search, revision.as_deref())?;
        let (files, splits) = rayon::join(|| found.hash(name), || self.decode(&found));
        let (files, (mut train, mut test)) = (files?, splits?);
        let hashes: Vec<String> = files.iter().map(|f| f.sha256.clone()).collect();
        let mut content = digest::remembered(search, name, &hashes, || {
            vec![Content::of_images("train", &train.images), Content::of_images("test", &test.images)]
        });
        let verdict = digest::compare(name, &found.place, &content, verify)?;
        if labels == Labels::Coarse {
            for (content, split) in content.iter_mut().zip([&mut train, &mut test]) {
                content.label_with(split.coarse.as_deref().unwrap_or_default());
                split.relabel()?;
            }
        }
        let (train, test) = (train.images, test.images);
        let provenance = Provenance {
            name: name.into(),
            source: found.place,
            revision: found.download.map(|d| d.commit),
            files,
            content,
            verified: verdict.verified,
            subset: verdict.subset,
            classes: Vec::new(),
            entropy_rate: None,
        };
        Ok(Loaded { data: Data::Images { train, test }, normalize: Some((self.normalize)()), provenance })
    }
}

/// One split as its files have it.
struct Split {
    /// Under their fine labels, which the content digest wants.
    images: Images,
    coarse: Option<Vec<u8>>,
    path: PathBuf,
}

impl Split {
    /// Puts the coarse labels in the place of the fine ones.
    fn relabel(&mut self) -> Result<(), DataError> {
        let coarse = self.coarse.take().unwrap_or_default();
        self.images = self.images.clone().relabelled(coarse, COARSE, &self.path)?;
        Ok(())
    }
}

impl Vision {
    fn options(&self, given: &Value) -> Result<Options, DataError> {
        let name = self.spec.name;
        let chosen: Options = options(name, given)?;
        if chosen.labels == Labels::Coarse && !self.is_hierarchical() {
            return Err(DataError::option(name, "labels", "expected `fine`: the set has one kind of labels"));
        }
        Ok(chosen)
    }

    /// Whether there are coarse labels beside the fine ones.
    fn is_hierarchical(&self) -> bool {
        self.label_columns.len() > 1
    }

    fn decode(&self, found: &Found) -> Result<(Split, Split), DataError> {
        let split = |(images, coarse), path: &Path| Split { images, coarse, path: path.to_path_buf() };
        match (found.form, found.files.as_slice(), &self.records) {
            (Form::Idx, [train_images, train_labels, test_images, test_labels], _) => {
                let read = |images: &Source, labels: &Source| -> Result<Split, DataError> {
                    Ok(split((idx::read(images, labels, self.shape)?, None), images.path()))
                };
                let (train, test) =
                    rayon::join(|| read(train_images, train_labels), || read(test_images, test_labels));
                Ok((train?, test?))
            }
            (Form::Parquet, [train, test], _) => {
                let read = |file: &Source| -> Result<Split, DataError> {
                    let found =
                        parquet::images(file.path(), self.image_column, self.label_columns, self.shape)?;
                    let mut labels = found.labels.into_iter();
                    let fine = labels.next().unwrap_or_default();
                    Ok(split(
                        (Images::new(self.shape, found.pixels, fine, file.path())?, labels.next()),
                        file.path(),
                    ))
                };
                let (train, test) = rayon::join(|| read(train), || read(test));
                Ok((train?, test?))
            }
            (Form::CifarBinary | Form::CifarArchive, [first, ..], Some(records)) => {
                let (train, test) = match found.form {
                    Form::CifarArchive => cifar::archive(first.path(), records)?,
                    _ => cifar::folder(&found.files, records)?,
                };
                let last = found.files.last().unwrap_or(first).path();
                Ok((
                    split(train.finish(self.shape, first.path())?, first.path()),
                    split(test.finish(self.shape, last)?, last),
                ))
            }
            (form, ..) => {
                let message = format!("{} is not read from {form}", self.spec.name);
                Err(DataError::format(&found.place, message))
            }
        }
    }
}
