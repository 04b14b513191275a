//! Images of the user's own as arrays: a `.npz` of numpy's or a safetensors file.
use std::path::{Path, PathBuf};

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use taper_files::sha256_file;

use super::folder::{MOST_CLASSES, check_share};
use crate::npz::{Array, Arrays, Element};
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::{
    Content, Data, DataError, FileRecord, Images, Loaded, Provenance, Search, Shape, SplitSize, split,
};

/// Arrays of images and labels.
pub struct ArrayFile;

const NAME: &str = "arrays";

/// Channels that images may have.
const MOST_CHANNELS: usize = 4;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    path: PathBuf,
    images: Option<String>,
    labels: Option<String>,
    test_images: Option<String>,
    test_labels: Option<String>,
    layout: Layout,
    classes: Option<Classes>,
    test: Option<SplitSize>,
    seed: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            images: None,
            labels: None,
            test_images: None,
            test_labels: None,
            layout: Layout::Auto,
            classes: None,
            test: None,
            seed: 1,
        }
    }
}

/// The order of the axes of images in colour.
#[derive(Clone, Copy, Debug, PartialEq, JsonSchema, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Layout {
    Auto,
    Nhwc,
    Nchw,
}

/// How many classes, or what they are called.
#[derive(Clone, Debug, PartialEq, JsonSchema, Deserialize)]
#[serde(untagged, expecting = "expected a number of classes or a list of their names")]
enum Classes {
    Count(usize),
    Names(Vec<String>),
}

impl Options {
    fn read(given: &Value) -> Result<Self, DataError> {
        let chosen: Self = options(NAME, given)?;
        if chosen.path.as_os_str().is_empty() {
            let message = "expected the path of a .npz or safetensors file, found none";
            return Err(DataError::option(NAME, "path", message));
        }
        let classes = chosen.classes.as_ref().map(Classes::count);
        if let Some(found) = classes.filter(|count| !(2..=MOST_CLASSES).contains(count)) {
            let message = format!("expected 2 to {MOST_CLASSES} classes, found {found}");
            return Err(DataError::option(NAME, "classes", message));
        }
        if chosen.test.is_some() && (chosen.test_images.is_some() || chosen.test_labels.is_some()) {
            let message = "expected a part of the images or arrays of their own to report on, found both";
            return Err(DataError::option(NAME, "test", message));
        }
        check_share(NAME, "test", chosen.test)?;
        Ok(chosen)
    }
}

impl Classes {
    fn count(&self) -> usize {
        match self {
            Self::Count(count) => *count,
            Self::Names(names) => names.len(),
        }
    }
}

impl Dataset for ArrayFile {
    fn name(&self) -> &str {
        NAME
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary: "your images as arrays of a .npz or safetensors file: bytes or floats, with labels"
                .into(),
            options: vec![
                option("path", "", "the file; needed"),
                option(
                    "images",
                    "null",
                    "the array to train on: [N,H,W], [N,H,W,C] or [N,C,H,W]; train_images, x_train, images or x unless given",
                ),
                option(
                    "labels",
                    "null",
                    "its classes, whole numbers from 0: [N] or [N,1]; train_labels, y_train, labels or y unless given",
                ),
                option("test_images", "null", "the array to report on; test_images or x_test unless given"),
                option("test_labels", "null", "its classes; test_labels or y_test unless given"),
                option("layout", "auto", "`nhwc` or `nchw` where the shape of an array does not tell"),
                option(
                    "classes",
                    "null",
                    "how many classes, or a list of their names; the largest label and one unless given",
                ),
                option(
                    "test",
                    "null",
                    "the part of the images, or so many, to report on where the file has no arrays for it",
                ),
                option("seed", "1", "which images `test` takes"),
            ],
        }
    }

    fn kind(&self) -> Option<Kind> {
        Some(Kind::Images)
    }

    fn schema(&self, generator: &mut SchemaGenerator) -> Option<Schema> {
        Some(Options::json_schema(generator))
    }

    fn paths(&self) -> &'static [&'static str] {
        &["path"]
    }

    fn check(&self, given: &Value) -> Result<(), DataError> {
        Options::read(given).map(drop)
    }

    fn load(&self, given: &Value, search: &Search) -> Result<Loaded, DataError> {
        let chosen = Options::read(given)?;
        let path = search.resolve(&chosen.path);
        let at = |key: &'static str| move |e: DataError| DataError::option(NAME, key, e.to_string());
        let (bytes, sha256) = sha256_file(&path).map_err(DataError::from).map_err(at("path"))?;
        let file = File { arrays: Arrays::open(&path)?, path: &path, layout: chosen.layout };
        let names = ["train_images", "x_train", "images", "x"];
        let train = file.images(("images", chosen.images.as_deref()), &names)?;
        let names = ["train_labels", "y_train", "labels", "y"];
        let labels = file.labels(("labels", chosen.labels.as_deref()), &names)?;
        let tested = match chosen.test {
            Some(_) => None,
            None => Some((
                file.images(("test_images", chosen.test_images.as_deref()), &["test_images", "x_test"])?,
                file.labels(("test_labels", chosen.test_labels.as_deref()), &["test_labels", "y_test"])?,
            )),
        };
        let seen = labels.iter().max().map_or(0, |largest| usize::from(*largest) + 1);
        let classes = chosen.classes.as_ref().map_or(seen, Classes::count);
        if classes < 2 {
            let message = "expected labels of at least two classes, found one";
            return Err(DataError::format(&path, message));
        }
        let all = train.with(labels, classes, &path)?;
        let (train, test) = match (chosen.test, tested) {
            (None, Some((images, labels))) => (all, images.with(labels, classes, &path)?),
            (share, _) => {
                let share = share.unwrap_or(SplitSize::Count(1));
                let (kept, aside) = split(all.len(), share, chosen.seed);
                if kept.is_empty() || aside.is_empty() {
                    let message = format!(
                        "expected images on both sides, found {} to train on and {} to report on",
                        kept.len(),
                        aside.len()
                    );
                    return Err(DataError::option(NAME, "test", message));
                }
                (all.select(&kept), all.select(&aside))
            }
        };
        if (test.height, test.width, test.channels, test.depth)
            != (train.height, train.width, train.channels, train.depth)
        {
            let message = format!("expected test images like those to train on, {train:?}, found {test:?}");
            return Err(DataError::format(&path, message));
        }
        let content = vec![Content::of_images("train", &train), Content::of_images("test", &test)];
        let provenance = Provenance {
            source: path.display().to_string(),
            files: vec![FileRecord { path: path.display().to_string(), bytes, sha256 }],
            classes: match chosen.classes {
                Some(Classes::Names(names)) => names,
                _ => Vec::new(),
            },
            ..Provenance::generated(NAME, content)
        };
        let normalize = Some(train.standardised());
        Ok(Loaded { data: Data::Images { train, test }, normalize, provenance })
    }
}

struct File<'a> {
    arrays: Arrays<'a>,
    path: &'a Path,
    layout: Layout,
}

/// Numbers of images, channels last.
struct Numbers {
    dims: [usize; 4],
    values: Values,
}

enum Values {
    Bytes(Vec<u8>),
    Floats(Vec<f32>),
}

impl Numbers {
    fn with(self, labels: Vec<u8>, classes: usize, path: &Path) -> Result<Images, DataError> {
        let [n, height, width, channels] = self.dims;
        if n != labels.len() {
            let message = format!("expected a label an image, found {n} images and {} labels", labels.len());
            return Err(DataError::format(path, message));
        }
        let shape = Shape { height, width, channels, classes };
        match self.values {
            Values::Bytes(pixels) => Images::new(shape, pixels, labels, path),
            Values::Floats(numbers) => Images::from_floats(shape, &numbers, labels, path),
        }
    }
}

impl File<'_> {
    /// The array of an option: of the name that was given, else of the first of `names` that is there.
    fn find(&self, (key, given): (&str, Option<&str>), names: &[&str]) -> Result<(String, Array), DataError> {
        let there = self.arrays.names();
        let wanted = given.map_or(names.to_vec(), |name| vec![name]);
        let Some(name) = wanted.iter().find(|name| there.iter().any(|has| has == **name)) else {
            let mut message = format!(
                "expected an array {} in {}, found {}",
                wanted.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(" or "),
                self.path.display(),
                if there.is_empty() { "none".into() } else { there.join(", ") }
            );
            if key == "test_images" && given.is_none() {
                message.push_str(": name one, or say how many images to put aside, for example `test: 0.2`");
            }
            return Err(DataError::option(NAME, key, message));
        };
        Ok(((*name).to_owned(), self.arrays.get(name)?))
    }

    fn images(&self, option: (&str, Option<&str>), names: &[&str]) -> Result<Numbers, DataError> {
        let (name, array) = self.find(option, names)?;
        let wrong = |message: String| DataError::format(self.path, format!("array `{name}`: {message}"));
        let (dims, first) = axes(&array.dims, self.layout).map_err(wrong)?;
        let values = match array.element {
            Element::Unsigned(1) => Values::Bytes(channels_last(array.into_bytes(), dims, first)),
            Element::Float(_) => Values::Floats(channels_last(array.floats(), dims, first)),
            other => {
                let message = format!("expected images of uint8, float32 or float64, found {other}");
                return Err(wrong(message));
            }
        };
        Ok(Numbers { dims, values })
    }

    fn labels(&self, option: (&str, Option<&str>), names: &[&str]) -> Result<Vec<u8>, DataError> {
        let (name, array) = self.find(option, names)?;
        let wrong = |message: String| DataError::format(self.path, format!("array `{name}`: {message}"));
        if !matches!(array.dims[..], [_] | [_, 1]) {
            return Err(wrong(format!("expected labels [N] or [N, 1], found {:?}", array.dims)));
        }
        if matches!(array.element, Element::Float(_)) {
            return Err(wrong(format!(
                "expected whole numbers, found {}: convert it with .astype('uint8')",
                array.element
            )));
        }
        let byte = |(at, label): (usize, &i64)| {
            let message = || {
                wrong(format!("expected labels from 0 to {}, found {label} at sample {at}", MOST_CLASSES - 1))
            };
            u8::try_from(*label).map_err(|_| message())
        };
        array.integers().iter().enumerate().map(byte).collect()
    }
}

/// Images, rows, columns and channels of an array, and whether its channels come first.
fn axes(dims: &[usize], layout: Layout) -> Result<([usize; 4], bool), String> {
    let colours = |channels: usize| (1..=MOST_CHANNELS).contains(&channels);
    if dims.contains(&0) {
        return Err(format!("expected images with pixels, found {dims:?}"));
    }
    match (dims, layout) {
        ([n, h, w], _) => Ok(([*n, *h, *w, 1], false)),
        ([n, h, w, c], Layout::Nhwc) if colours(*c) => Ok(([*n, *h, *w, *c], false)),
        ([n, c, h, w], Layout::Nchw) if colours(*c) => Ok(([*n, *h, *w, *c], true)),
        ([n, a, b, c], Layout::Auto) => match (colours(*a), colours(*c)) {
            (false, true) => Ok(([*n, *a, *b, *c], false)),
            (true, false) => Ok(([*n, *b, *c, *a], true)),
            (true, true) => {
                Err(format!("{dims:?} may have its channels first or last: say `layout: nchw` or `nhwc`"))
            }
            (false, false) => Err(format!(
                "expected 1 to {MOST_CHANNELS} channels as the second or last axis, found {dims:?}"
            )),
        },
        _ => Err(format!(
            "expected images [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 to {MOST_CHANNELS} channels, found {dims:?}"
        )),
    }
}

/// The numbers with the channels of a pixel side by side.
fn channels_last<T: Copy>(numbers: Vec<T>, [_, height, width, channels]: [usize; 4], first: bool) -> Vec<T> {
    let plane = height * width;
    if !first || channels == 1 {
        return numbers;
    }
    let mut last = Vec::with_capacity(numbers.len());
    for image in numbers.chunks_exact(plane * channels) {
        for at in 0..plane {
            last.extend((0..channels).map(|channel| image[channel * plane + at]));
        }
    }
    last
}
