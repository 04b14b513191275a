//! The IDX format of MNIST, plain or gzipped.
//!
//! A big-endian magic number `00 00 08 <rank>` (08: unsigned bytes), one u32 a dimension, then the bytes.
use std::io::{Cursor, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;

use super::images::{Images, Shape};
use super::{DataError, files};

/// Samples that a file of a set in this form may have: the largest of them (EMNIST) has seven in ten of that. A gzipped file
/// can claim a thousand times its own size.
const MOST: u64 = 1_000_000;

/// The images and labels of one split from two IDX files.
pub fn read(images: &files::Source, labels: &files::Source, shape: Shape) -> Result<Images, DataError> {
    let pixels = array(images, &[None, Some(shape.height), Some(shape.width)])?;
    let labels_found = array(labels, &[None])?;
    if labels_found.len() * shape.image_bytes() != pixels.len() {
        let (count, expected) = (labels_found.len(), pixels.len() / shape.image_bytes());
        let message =
            format!("expected {expected} labels, one an image of {}, found {count}", images.path().display());
        return Err(DataError::format(labels.path(), message));
    }
    Images::new(shape, pixels, labels_found, labels.path())
}

/// The bytes of an IDX array whose dimensions are `dims` (`None`: any).
fn array(file: &files::Source, dims: &[Option<usize>]) -> Result<Vec<u8>, DataError> {
    let bytes = file.read()?;
    let path = file.path();
    if bytes.starts_with(&[0x1f, 0x8b]) {
        // Deflate cannot expand more than 1032 times, so a claim beyond that is false before anything is allocated.
        parse(path, &mut MultiGzDecoder::new(Cursor::new(&bytes)), bytes.len() as u64 * 1032, dims)
    } else {
        parse(path, &mut Cursor::new(&bytes), bytes.len() as u64, dims)
    }
}

fn parse(
    path: &Path,
    reader: &mut impl Read,
    most: u64,
    dims: &[Option<usize>],
) -> Result<Vec<u8>, DataError> {
    let mut word = |what: &str| {
        let mut bytes = [0; 4];
        reader
            .read_exact(&mut bytes)
            .map_err(|e| DataError::format(path, format!("{what} could not be read: {e}")))?;
        Ok::<_, DataError>(u32::from_be_bytes(bytes))
    };
    let (expected, magic) = (0x0800 + dims.len() as u32, word("the magic number")?);
    if magic != expected {
        let message =
            format!("expected an IDX file of bytes with magic number {expected:#010x}, found {magic:#010x}");
        return Err(DataError::format(path, message));
    }
    let mut claimed = 1u64;
    for (axis, dim) in dims.iter().enumerate() {
        let found = word("the dimensions")?;
        if let Some(expected) = dim
            && found as usize != *expected
        {
            return Err(DataError::format(
                path,
                format!("expected dimension {axis} to be {expected}, found {found}"),
            ));
        }
        claimed = claimed.saturating_mul(u64::from(found));
    }
    let too_long =
        || DataError::format(path, format!("the header claims {claimed} bytes, the file cannot hold them"));
    if claimed > most {
        return Err(too_long());
    }
    let sample: u64 = dims.iter().flatten().map(|dim| *dim as u64).product();
    if claimed > MOST.saturating_mul(sample) {
        let samples = claimed / sample.max(1);
        return Err(DataError::format(path, format!("expected at most {MOST} samples, found {samples}")));
    }
    let mut data = Vec::new();
    let claim = usize::try_from(claimed).map_err(|_| too_long())?;
    data.try_reserve_exact(claim).map_err(|e| DataError::format(path, format!("{claimed} bytes: {e}")))?;
    reader.take(claimed + 1).read_to_end(&mut data).map_err(|e| DataError::format(path, e.to_string()))?;
    if data.len() as u64 != claimed {
        let found = if data.len() as u64 > claimed { "more".to_string() } else { data.len().to_string() };
        return Err(DataError::format(
            path,
            format!("expected {claimed} bytes after the header, found {found}"),
        ));
    }
    Ok(data)
}
