//! Images of the user's own, a folder a class.
//!
//! ```text
//! photos/train/cat/*.png    or    photos/cat/*.jpg    with `test: 0.2`
//! photos/train/dog/*.jpg          photos/dog/*.png
//! photos/test/cat/…
//! ```
//! A sample's place follows from its file's content, so that neither names nor the order of a folder can change a run. Pixels are
//! decoded once and kept in the cache under a digest of all the files; the files are hashed at every start, so that one that
//! changed is noticed.
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;

use rayon::prelude::*;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use taper_files::{hex, place, read_regular};
use taper_random::Rng;
use tracing::{debug, warn};

use crate::photo::{MOST_FILE, MOST_PIXELS, MOST_SIDE, Photo};
use crate::progress::Progress;
use crate::registry::{Dataset, Description, Kind, OptionDoc, options};
use crate::{Content, Data, DataError, FileRecord, Images, Loaded, Provenance, Search, Shape, SplitSize};

/// Folders of PNG and JPEG files.
pub struct Folder;

const NAME: &str = "folder";

/// Classes that labels of a byte can tell apart.
pub const MOST_CLASSES: usize = 256;

/// Images that a split may have.
const MOST_IMAGES: usize = 10_000_000;

/// Bytes that the pixels of a split may come to.
const MOST_BYTES: usize = 1 << 34;

/// Folders inside each other.
const MOST_DEPTH: usize = 32;

#[derive(Debug, JsonSchema, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    path: PathBuf,
    size: Option<Size>,
    channels: usize,
    test: Option<SplitSize>,
    seed: u64,
    duplicates: Duplicates,
}

/// Rows and columns.
#[derive(Clone, Copy, Debug, PartialEq, JsonSchema, Deserialize)]
#[serde(untagged, expecting = "expected a number of pixels, or two: [rows, columns]")]
enum Size {
    Square(usize),
    Sides([usize; 2]),
}

/// What to do with the same image in two classes, or in the training and the test set.
#[derive(Clone, Copy, Debug, PartialEq, JsonSchema, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Duplicates {
    Refuse,
    Keep,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            size: None,
            channels: 3,
            test: None,
            seed: 1,
            duplicates: Duplicates::Refuse,
        }
    }
}

impl Options {
    fn read(given: &Value) -> Result<Self, DataError> {
        let chosen: Self = options(NAME, given)?;
        let wrong = |key: &str, message: String| Err(DataError::option(NAME, key, message));
        if chosen.path.as_os_str().is_empty() {
            return wrong("path", "expected the path of a folder, found none".into());
        }
        if let Some([height, width]) = chosen.sides()
            && (height.min(width) == 0
                || height.max(width) > MOST_SIDE
                || height.saturating_mul(width) > MOST_PIXELS)
        {
            let message = format!("expected 1 to {MOST_SIDE} pixels a side, found {height}x{width}");
            return wrong("size", message);
        }
        if ![1, 3].contains(&chosen.channels) {
            return wrong("channels", format!("expected 1 (grey) or 3 (colour), found {}", chosen.channels));
        }
        check_share(NAME, "test", chosen.test)?;
        Ok(chosen)
    }

    fn sides(&self) -> Option<[usize; 2]> {
        self.size.map(|size| match size {
            Size::Square(side) => [side, side],
            Size::Sides(sides) => sides,
        })
    }
}

/// Refuses a part that leaves nothing on one side, whatever it is a part of.
pub fn check_share(set: &str, key: &str, share: Option<SplitSize>) -> Result<(), DataError> {
    let found = match share {
        Some(SplitSize::Count(0)) => "0".into(),
        Some(SplitSize::Fraction(part)) if !(part > 0.0 && part < 1.0) => part.to_string(),
        _ => return Ok(()),
    };
    let message =
        format!("expected a fraction between 0 and 1 or a number of samples of at least 1, found {found}");
    Err(DataError::option(set, key, message))
}

impl Dataset for Folder {
    fn name(&self) -> &str {
        NAME
    }

    fn describe(&self) -> Description {
        let option = |name, default, doc| OptionDoc { name, default, doc };
        Description {
            summary:
                "your images: PNG and JPEG files, a folder a class, under train/ and test/ or split here"
                    .into(),
            options: vec![
                option("path", "", "the folder; needed"),
                option(
                    "size",
                    "null",
                    "pixels a side, or [rows, columns]; all images have one size unless given",
                ),
                option("channels", "3", "3 for colour, 1 for grey"),
                option(
                    "test",
                    "null",
                    "the part of every class, or so many of it, to report on; without it, path has train/ and test/",
                ),
                option("seed", "1", "which images `test` takes"),
                option("duplicates", "refuse", "`keep` allows one image in two classes or in train and test"),
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
        let root = search.resolve(&chosen.path);
        if !root.is_dir() {
            let message = format!("{}: there is no such folder", root.display());
            return Err(DataError::option(NAME, "path", message));
        }
        let (classes, [train, test]) = match chosen.test {
            None => two_folders(&root)?,
            Some(share) => one_folder(&root, share, chosen.seed)?,
        };
        if chosen.duplicates == Duplicates::Refuse {
            refuse_duplicates(&train, &test)?;
        }
        let sides = match chosen.sides() {
            Some(sides) => sides,
            None => first_size(&train)?,
        };
        let shape =
            Shape { height: sides[0], width: sides[1], channels: chosen.channels, classes: classes.len() };
        let exact = chosen.size.is_none();
        let read = |samples: &[Sample]| -> Result<Images, DataError> {
            let pixels = cached(samples, shape, exact, search)?;
            Images::new(shape, pixels, samples.iter().map(|sample| sample.class).collect(), &root)
        };
        let (images, test_images) = (read(&train)?, read(&test)?);
        let normalize = images.standardised();
        let content = vec![Content::of_images("train", &images), Content::of_images("test", &test_images)];
        let record = |split: &str, samples: &[Sample]| FileRecord {
            path: root.join(split).display().to_string(),
            bytes: samples.iter().map(|sample| sample.bytes).sum(),
            sha256: hex(&listing(samples)),
        };
        let files = match chosen.test {
            None => vec![record("train", &train), record("test", &test)],
            Some(_) => vec![record("", &[train, test].concat())],
        };
        let provenance = Provenance {
            source: root.display().to_string(),
            files,
            classes,
            ..Provenance::generated(NAME, content)
        };
        let data = Data::Images { train: images, test: test_images };
        Ok(Loaded { data, normalize: Some(normalize), provenance })
    }
}

/// One image file.
#[derive(Clone)]
struct Sample {
    class: u8,
    path: PathBuf,
    bytes: u64,
    sha256: [u8; 32],
}

/// The digest of the files of a split: of their contents, whatever they are called.
fn listing(samples: &[Sample]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    for Sample { class, sha256, .. } in samples {
        hasher.update([*class]);
        hasher.update(sha256);
    }
    hasher.finalize().into()
}

/// Classes in the order of their names, with the samples to train on and to report on.
type Split = (Vec<String>, [Vec<Sample>; 2]);

/// `train/` and `test/`, with a folder a class each.
fn two_folders(root: &Path) -> Result<Split, DataError> {
    let (train, test) = (root.join("train"), root.join("test"));
    for part in [&train, &test] {
        if !part.is_dir() {
            let message = format!(
                "expected the folders train and test in {}, found no {}: for one folder of classes say how much to put \
                 aside, for example `test: 0.2`",
                root.display(),
                part.file_name().unwrap_or_default().display()
            );
            return Err(DataError::option(NAME, "path", message));
        }
    }
    let classes = class_folders(&train)?;
    let names: Vec<String> = classes.iter().map(|(name, _)| name.clone()).collect();
    let mut tested = Vec::new();
    for (name, folder) in class_folders(&test)? {
        let Ok(class) = names.binary_search(&name) else {
            let message = format!("expected a class of {}, found `{name}`", train.display());
            return Err(DataError::format(folder, message));
        };
        tested.push((class, folder));
    }
    let trained = classes.into_iter().enumerate().map(|(class, (_, folder))| (class, folder)).collect();
    Ok((names, [samples(trained)?, samples(tested)?]))
}

/// A folder a class; `share` of each is put aside.
fn one_folder(root: &Path, share: SplitSize, seed: u64) -> Result<Split, DataError> {
    let classes = class_folders(root)?;
    let names: Vec<String> = classes.iter().map(|(name, _)| name.clone()).collect();
    if names == ["test", "train"] {
        let message =
            format!("expected classes, found train and test in {}: leave the key out", root.display());
        return Err(DataError::option(NAME, "test", message));
    }
    let folders: Vec<PathBuf> = classes.iter().map(|(_, folder)| folder.clone()).collect();
    let all = samples(folders.iter().cloned().enumerate().collect())?;
    let mut aside: HashSet<(u8, [u8; 32])> = HashSet::new();
    for (class, name) in names.iter().enumerate() {
        // Copies of an image stay together. The samples are in the order of their contents.
        let mut contents: Vec<[u8; 32]> =
            all.iter().filter(|s| usize::from(s.class) == class).map(|s| s.sha256).collect();
        contents.dedup();
        let count = share.of(contents.len()).max(1);
        if count >= contents.len() {
            let message = format!(
                "expected more than {count} different images, to put {count} aside to report on, found {}",
                contents.len()
            );
            return Err(DataError::format(&folders[class], message));
        }
        Rng::new(seed, "split", name, 0).shuffle(&mut contents);
        // A class is a byte: `class_folders` counted them.
        aside.extend(contents[..count].iter().map(|sha256| (class as u8, *sha256)));
    }
    let (test, train) = all.into_iter().partition(|s| aside.contains(&(s.class, s.sha256)));
    Ok((names, [train, test]))
}

/// The folders of a folder, which are classes, by name.
fn class_folders(root: &Path) -> Result<Vec<(String, PathBuf)>, DataError> {
    let mut classes = BTreeMap::new();
    for (path, is_folder) in entries(root)? {
        let name = path.file_name().unwrap_or_default();
        let Some(name) = name.to_str() else {
            let message = "expected a class's name in UTF-8, found other bytes: rename the folder";
            return Err(DataError::format(path, message));
        };
        if !is_folder {
            let message = "expected a folder a class, found a file among them: move it away (what begins with a dot is passed over)";
            return Err(DataError::format(path, message));
        }
        classes.insert(name.to_owned(), path);
    }
    if !(2..=MOST_CLASSES).contains(&classes.len()) {
        let message = format!("expected 2 to {MOST_CLASSES} folders, a class each, found {}", classes.len());
        return Err(DataError::format(root, message));
    }
    Ok(classes.into_iter().collect())
}

/// What is in a folder, by name and whether it is a folder itself, links followed. What begins with a dot is passed over.
fn entries(folder: &Path) -> Result<Vec<(PathBuf, bool)>, DataError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| DataError::io(folder, e))? {
        let path = entry.map_err(|e| DataError::io(folder, e))?.path();
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")) {
            continue;
        }
        let about = std::fs::metadata(&path).map_err(|e| DataError::io(&path, e))?;
        found.push((path, about.is_dir()));
    }
    // So that of several mistakes the same one is shown each time.
    found.sort();
    Ok(found)
}

/// All files of a class, in its folder and those below.
fn files(class: &Path) -> Result<Vec<PathBuf>, DataError> {
    let (mut found, mut open) = (Vec::new(), vec![(class.to_path_buf(), 0)]);
    let mut seen: HashMap<PathBuf, PathBuf> = HashMap::new();
    while let Some((folder, depth)) = open.pop() {
        let real = folder.canonicalize().map_err(|e| DataError::io(&folder, e))?;
        if let Some(before) = seen.insert(real, folder.clone()) {
            let message = format!(
                "expected every folder once, found it again as {}: links must not lead in circles",
                before.display()
            );
            return Err(DataError::format(folder, message));
        }
        if depth > MOST_DEPTH {
            let message = format!("expected at most {MOST_DEPTH} folders inside each other, found more");
            return Err(DataError::format(folder, message));
        }
        for (path, is_folder) in entries(&folder)? {
            if is_folder {
                open.push((path, depth + 1));
            } else {
                found.push(path);
            }
        }
        if found.len() > MOST_IMAGES {
            let message = format!("expected at most {MOST_IMAGES} images, found more");
            return Err(DataError::format(class, message));
        }
    }
    if found.is_empty() {
        return Err(DataError::format(class, "expected images, found an empty class"));
    }
    Ok(found)
}

/// The samples of classes in the order of their contents.
fn samples(classes: Vec<(usize, PathBuf)>) -> Result<Vec<Sample>, DataError> {
    let mut listed = Vec::new();
    for (class, folder) in classes {
        listed.extend(files(&folder)?.into_iter().map(|path| (class as u8, path)));
    }
    let hash = |(class, path): (u8, PathBuf)| -> Result<Sample, DataError> {
        let content = read_regular(&path, MOST_FILE)?;
        Ok(Sample { class, path, bytes: content.len() as u64, sha256: Sha256::digest(&content).into() })
    };
    let mut samples = first_error(listed.into_par_iter().map(hash).collect())?;
    // By path only among copies: which of them is read makes no difference.
    samples.sort_unstable_by(|a, b| (a.sha256, a.class, &a.path).cmp(&(b.sha256, b.class, &b.path)));
    Ok(samples)
}

/// All values, or the first error in the order of the files: which one a thread met first is chance.
fn first_error<T>(results: Vec<Result<T, DataError>>) -> Result<Vec<T>, DataError> {
    results.into_iter().collect()
}

/// The same image under two labels teaches nothing, and one that is trained on proves nothing.
fn refuse_duplicates(train: &[Sample], test: &[Sample]) -> Result<(), DataError> {
    let mut first: HashMap<[u8; 32], (&Sample, bool)> = HashMap::new();
    let mut copies = 0;
    for (sample, tested) in train.iter().map(|s| (s, false)).chain(test.iter().map(|s| (s, true))) {
        let Some((before, was_tested)) = first.insert(sample.sha256, (sample, tested)) else { continue };
        copies += 1;
        let (expected, found) = match (before.class == sample.class, was_tested == tested) {
            (true, true) => continue,
            (false, _) => ("in one class", "in two classes"),
            (true, false) => ("on one side", "to train on and to report on"),
        };
        let message = format!(
            "expected every image {expected}, found the content of {} {found}: remove one of them, or allow it with \
             `duplicates: keep`",
            before.path.display()
        );
        return Err(DataError::format(&sample.path, message));
    }
    if copies > 0 {
        warn!("{copies} images are copies of another of their class");
    }
    Ok(())
}

/// Rows and columns of the first image.
fn first_size(samples: &[Sample]) -> Result<[usize; 2], DataError> {
    // A class has an image, or `files` would have refused it.
    let Some(first) = samples.first() else { return Ok([0, 0]) };
    let photo = decode(first)?;
    Ok([photo.height, photo.width])
}

fn decode(sample: &Sample) -> Result<Photo, DataError> {
    let Sample { path, sha256, .. } = sample;
    let content = read_regular(path, MOST_FILE)?;
    if Sha256::digest(&content)[..] != sha256[..] {
        return Err(DataError::format(path, "the file changed while it was read: start again"));
    }
    Photo::decode(&content).map_err(|message| DataError::format(path, message))
}

/// The pixels of samples: from the cache where they are there intact, else from the files.
fn cached(samples: &[Sample], shape: Shape, exact: bool, search: &Search) -> Result<Vec<u8>, DataError> {
    let Shape { height, width, channels, .. } = shape;
    // The first word says how pixels are made: another way needs another word.
    let mut key = Sha256::new_with_prefix(format!("bilinear-1 {height}x{width}x{channels} {exact}\n"));
    samples.iter().for_each(|sample| key.update(sample.sha256));
    let place_of = |cache: &PathBuf| cache.join("images").join(hex(&key.finalize()));
    let kept = search.cache.as_ref().map(place_of);
    if let Some(kept) = kept.as_ref().filter(|kept| !search.fresh && kept.exists()) {
        match read_cache(kept, samples.len() * shape.image_bytes()) {
            Ok(pixels) => return Ok(pixels),
            Err(e) => warn!("{e}; the images are read again"),
        }
    }
    let start = Instant::now();
    let pixels = read_all(samples, shape, exact, search.hub.progress)?;
    debug!("read {} images in {:.2} s", samples.len(), start.elapsed().as_secs_f64());
    if let Some(kept) = kept.filter(|_| search.keeps().is_some()) {
        let sealed = [&Sha256::digest(&pixels)[..], &pixels].concat();
        // A cache that cannot be written costs the next run the time that this one took; it is not an error.
        let _ = place(&kept, &sealed);
    }
    Ok(pixels)
}

/// The pixels that a file of the cache holds after their digest.
fn read_cache(path: &Path, bytes: usize) -> Result<Vec<u8>, DataError> {
    let mut content = read_regular(path, (MOST_BYTES + 32) as u64)?;
    let pixels = content.split_off(content.len().min(32));
    if pixels.len() != bytes || Sha256::digest(&pixels)[..] != content[..] {
        return Err(DataError::format(path, "damaged since it was written"));
    }
    Ok(pixels)
}

/// Decodes all samples into their places. With `exact`, one of another size is an error.
fn read_all(samples: &[Sample], shape: Shape, exact: bool, show: bool) -> Result<Vec<u8>, DataError> {
    let Shape { height, width, channels, .. } = shape;
    let size = shape.image_bytes();
    let bytes = samples.len().checked_mul(size).filter(|bytes| *bytes <= MOST_BYTES);
    let Some(bytes) = bytes else {
        let message = format!(
            "expected images of at most {} GiB in all, found {} of {height}x{width}x{channels}: choose a smaller size",
            MOST_BYTES >> 30,
            samples.len()
        );
        return Err(DataError::option(NAME, "size", message));
    };
    let mut pixels = Vec::new();
    let short = |e| DataError::option(NAME, "size", format!("no memory for {bytes} bytes of images: {e}"));
    pixels.try_reserve_exact(bytes).map_err(short)?;
    pixels.resize(bytes, 0);
    let progress = Mutex::new(Progress::new("images", samples.len() as u64, show));
    let read = |(out, sample): (&mut [u8], &Sample)| -> Result<(), DataError> {
        let photo = decode(sample)?;
        if exact && (photo.height, photo.width) != (height, width) {
            let message = format!(
                "expected {height} rows and {width} columns like the others, found {} and {}: choose a `size` for all",
                photo.height, photo.width
            );
            return Err(DataError::format(&sample.path, message));
        }
        out.copy_from_slice(&photo.fitted(height, width, channels));
        if let Ok(mut progress) = progress.lock() {
            progress.one_more();
        }
        Ok(())
    };
    // The first in the order of the samples, not of the threads.
    match pixels.par_chunks_exact_mut(size).zip(samples).find_map_first(|pair| read(pair).err()) {
        Some(error) => Err(error),
        None => Ok(pixels),
    }
}
