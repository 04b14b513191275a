//! CIFAR's binary records, as a folder of `.bin` files or the original `.tar.gz`.
//!
//! A record is the label bytes (CIFAR-10: one; CIFAR-100: coarse, fine), then three planes of 32x32: red, green, blue.
use std::io::{BufReader, Read};
use std::path::{Component, Path};

use flate2::read::MultiGzDecoder;
use taper_files::open_regular;

use super::images::{Images, Shape};
use super::{DataError, Source};

/// What the records of a set look like and which files hold them.
#[derive(Debug)]
pub struct Records {
    /// Label bytes of a record; the last is the fine label.
    pub labels: usize,
    /// The files of the training split, in order.
    pub train: &'static [&'static str],
    /// The file of the test split.
    pub test: &'static str,
}

/// Records that a file may have, twice what the sets have: a compressed one can claim a thousand times its own size.
const MOST: u64 = 100_000;

/// Bytes that an archive may come to: the sets have a third of it.
const MOST_BYTES: u64 = 1 << 29;

/// One split, read.
#[derive(Default)]
pub struct Split {
    pixels: Vec<u8>,
    labels: Vec<u8>,
    coarse: Vec<u8>,
}

impl Split {
    /// The images under their fine labels, and their coarse labels if there are any.
    pub fn finish(self, shape: Shape, path: &Path) -> Result<(Images, Option<Vec<u8>>), DataError> {
        let images = Images::new(shape, self.pixels, self.labels, path)?;
        Ok((images, (!self.coarse.is_empty()).then_some(self.coarse)))
    }

    /// Appends the records of `reader`, which should hold `bytes` bytes.
    fn append(
        &mut self,
        path: &Path,
        reader: &mut impl Read,
        bytes: u64,
        format: &Records,
    ) -> Result<(), DataError> {
        const PLANE: usize = 32 * 32;
        let size = format.labels + 3 * PLANE;
        if bytes == 0 || !bytes.is_multiple_of(size as u64) {
            let message = format!("expected records of {size} bytes, found a length of {bytes}");
            return Err(DataError::format(path, message));
        }
        if bytes / size as u64 > MOST {
            let message =
                format!("expected at most {MOST} records of {size} bytes, found a length of {bytes}");
            return Err(DataError::format(path, message));
        }
        let mut record = vec![0; size];
        for at in 0..bytes / size as u64 {
            let damaged = |e| DataError::format(path, format!("record {at} could not be read: {e}"));
            reader.read_exact(&mut record).map_err(damaged)?;
            let (labels, planes) = record.split_at(format.labels);
            self.labels.extend(labels.last());
            self.coarse.extend(labels.split_last().map(|(_, coarse)| coarse).unwrap_or_default());
            let (red, rest) = planes.split_at(PLANE);
            let (green, blue) = rest.split_at(PLANE);
            self.pixels.extend(red.iter().zip(green).zip(blue).flat_map(|((r, g), b)| [*r, *g, *b]));
        }
        Ok(())
    }
}

/// Train and test from a folder's files: those of [`Records::train`], then [`Records::test`].
pub fn folder(files: &[Source], format: &Records) -> Result<(Split, Split), DataError> {
    let (mut train, mut test) = (Split::default(), Split::default());
    for (i, file) in files.iter().enumerate() {
        let path = file.path();
        let open = open_regular(path)?;
        let bytes = open.metadata().map_err(|e| DataError::io(path, e))?.len();
        let split = if i < format.train.len() { &mut train } else { &mut test };
        split.append(path, &mut BufReader::new(open), bytes, format)?;
    }
    Ok((train, test))
}

/// Train and test from the `.tar.gz`. Nothing is written to disk.
pub fn archive(path: &Path, format: &Records) -> Result<(Split, Split), DataError> {
    let file = open_regular(path)?;
    let mut archive = tar::Archive::new(MultiGzDecoder::new(BufReader::new(file)).take(MOST_BYTES));
    let unpacked = unpack(&mut archive, path, format);
    // What was cut off there cannot be told from what is missing or damaged.
    if archive.into_inner().limit() == 0 {
        let message = format!("unpacks to more than {} MiB, twice what the set has", MOST_BYTES >> 20);
        return Err(DataError::format(path, message));
    }
    unpacked
}

fn unpack(
    archive: &mut tar::Archive<impl Read>,
    path: &Path,
    format: &Records,
) -> Result<(Split, Split), DataError> {
    let damaged = |e: std::io::Error| DataError::format(path, format!("not a readable .tar.gz: {e}"));
    // In the order the archive has them; train batches are put in their own order afterwards.
    let mut train: Vec<Option<Split>> = format.train.iter().map(|_| None).collect();
    let mut test = None;
    for entry in archive.entries().map_err(damaged)? {
        let mut entry = entry.map_err(damaged)?;
        let name = entry.path().map_err(damaged)?.into_owned();
        let inside = |c: Component| matches!(c, Component::Normal(_) | Component::CurDir);
        if !name.components().all(inside) {
            let message = format!("entry `{}` points outside the archive", name.display());
            return Err(DataError::format(path, message));
        }
        let of_file = |wanted: &&str| name.file_name().is_some_and(|found| found == *wanted);
        let slot = match format.train.iter().position(&of_file) {
            Some(batch) => &mut train[batch],
            None if of_file(&format.test) => &mut test,
            None => continue,
        };
        let bytes = entry.size();
        let mut split = Split::default();
        split.append(&path.join(&name), &mut entry, bytes, format)?;
        if slot.replace(split).is_some() {
            return Err(DataError::format(path, format!("entry `{}` occurs twice", name.display())));
        }
    }
    let absent = |name: &str| DataError::format(path, format!("the archive has no `{name}`"));
    let mut whole = Split::default();
    for (batch, name) in train.into_iter().zip(format.train) {
        let mut batch = batch.ok_or_else(|| absent(name))?;
        whole.pixels.append(&mut batch.pixels);
        whole.labels.append(&mut batch.labels);
        whole.coarse.append(&mut batch.coarse);
    }
    Ok((whole, test.ok_or_else(|| absent(format.test))?))
}
