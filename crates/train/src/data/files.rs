//! Files a data set is read from: on disk, or compiled in.
use std::borrow::Cow;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::DataError;

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
            Self::Disk(path) => Ok(Cow::Owned(std::fs::read(path).map_err(|e| DataError::io(path, e))?)),
            Self::Embedded(_, bytes) => Ok(Cow::Borrowed(*bytes)),
        }
    }

    /// Length and sha256 of the content, in constant memory.
    pub fn sha256(&self) -> Result<(u64, String), DataError> {
        match self {
            Self::Disk(path) => sha256_file(path),
            Self::Embedded(_, bytes) => Ok((bytes.len() as u64, hex(&Sha256::digest(bytes)))),
        }
    }
}

/// Length and sha256 of a file, in constant memory.
pub fn sha256_file(path: &Path) -> Result<(u64, String), DataError> {
    let io = |e| DataError::io(path, e);
    let mut file = File::open(path).map_err(io)?;
    let (mut hasher, mut buffer, mut length) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        let n = file.read(&mut buffer).map_err(io)?;
        if n == 0 {
            return Ok((length, hex(&hasher.finalize())));
        }
        hasher.update(&buffer[..n]);
        length += n as u64;
    }
}

/// Bytes as lowercase hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
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

/// Writes `bytes` so that a reader sees the old file or the new one, never a part.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let parent = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent)?;
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    let written = File::create(&temporary).and_then(|mut file| {
        std::io::Write::write_all(&mut file, bytes)?;
        file.sync_all()
    });
    let placed = written.and_then(|()| std::fs::rename(&temporary, path));
    if placed.is_err() {
        // The first error is the one to report; a stray temporary file does no harm.
        let _ = std::fs::remove_file(&temporary);
    }
    placed
}
