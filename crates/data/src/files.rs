//! Files a data set is read from: on disk, or compiled in.
use std::borrow::Cow;
use std::path::{Path, PathBuf};

use taper_files::{read_regular, sha256, sha256_file};

use super::DataError;

/// A file of a data set that is read whole may have this many bytes.
pub const MOST_BYTES: u64 = 1 << 32;

/// One file of a data set.
#[derive(Clone, Debug)]
pub enum Source {
    /// A file on disk.
    Disk(PathBuf),
    /// Bytes compiled into the binary, with the name to show.
    Embedded(PathBuf, &'static [u8]),
}

impl Source {
    /// The path, for reading or for messages.
    pub fn path(&self) -> &Path {
        match self {
            Self::Disk(path) | Self::Embedded(path, _) => path,
        }
    }

    /// The whole content.
    pub fn read(&self) -> Result<Cow<'static, [u8]>, DataError> {
        match self {
            Self::Disk(path) => Ok(Cow::Owned(read_regular(path, MOST_BYTES)?)),
            Self::Embedded(_, bytes) => Ok(Cow::Borrowed(*bytes)),
        }
    }

    /// Length and sha256 of the content, in constant memory.
    pub fn sha256(&self) -> Result<(u64, String), DataError> {
        match self {
            Self::Disk(path) => Ok(sha256_file(path)?),
            Self::Embedded(_, bytes) => Ok((bytes.len() as u64, sha256(bytes))),
        }
    }
}

/// Whether `path` is a file: `false` when there is nothing, an error when there is something else or it can't be told
/// (a loop of symbolic links, a directory we may not enter).
pub fn is_file(path: &Path) -> Result<bool, DataError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(_) => Err(DataError::format(path, "expected a file, found a directory or device")),
        Err(e) if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) => {
            Ok(false)
        }
        Err(e) => Err(DataError::io(path, e)),
    }
}
