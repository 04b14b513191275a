//! Files that are whole or not there: written beside their place, synced, renamed, and the folder synced.
//!
//! This is all that Taper's crates share about files: how one is replaced, what its digest is, and where the tests crash
//! a process inside a write; and how the program was started, for messages. It knows nothing of what the files hold.
//!
//! ```
//! let folder = tempfile::tempdir()?;
//! let path = folder.path().join("summary.json");
//! taper_files::replace(&path, b"{}")?;
//! assert_eq!(taper_files::sha256_file(&path)?, (2, taper_files::sha256(b"{}")));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
pub mod kill;
mod program;

use kill::kill_point;
pub use program::{built_with, program, set_program};
use sha2::{Digest, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
pub use tempfile::TempDir;

/// What a file or folder refused.
#[derive(Debug)]
pub struct Error {
    /// The file or folder.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

impl Error {
    /// Says of an error of the system which file it is about.
    pub fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self { path, source }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// What most functions here return.
pub type Result<T> = std::result::Result<T, Error>;

/// The SHA-256 of some bytes in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Opens a regular file to read it. Pipes, sockets and devices, which may never begin or never end, and folders are refused.
pub fn open_regular(path: &Path) -> Result<File> {
    let refuse = |about: &Metadata| match kind(about) {
        None => Ok(()),
        Some(kind) => {
            let message = format!("expected a regular file, found a {kind}");
            Err(Error::at(path)(io::Error::new(ErrorKind::InvalidInput, message)))
        }
    };
    // Before it is opened, because opening a pipe waits for its other end.
    refuse(&fs::metadata(path).map_err(Error::at(path))?)?;
    let file = File::open(path).map_err(Error::at(path))?;
    refuse(&file.metadata().map_err(Error::at(path))?)?;
    Ok(file)
}

/// The whole of a regular file of at most `limit` bytes; see [`open_regular`].
///
/// No more is read than the file's length promises: some files of `/proc` call themselves regular and empty, and wait.
pub fn read_regular(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let file = open_regular(path)?;
    let length = file.metadata().map_err(Error::at(path))?.len();
    if length > limit {
        let message = format!("expected a file of at most {limit} bytes, found {length}");
        return Err(Error::at(path)(io::Error::new(ErrorKind::FileTooLarge, message)));
    }
    let mut bytes = Vec::new();
    // `length` is at most `limit`, which a caller chooses to fit into memory.
    bytes.try_reserve_exact(length as usize).map_err(|e| Error::at(path)(io::Error::other(e)))?;
    file.take(length).read_to_end(&mut bytes).map_err(Error::at(path))?;
    Ok(bytes)
}

/// What something is that is no regular file.
fn kind(about: &Metadata) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = about.file_type();
        if kind.is_fifo() {
            return Some("pipe");
        }
        if kind.is_socket() {
            return Some("socket");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return Some("device");
        }
    }
    match (about.is_dir(), about.is_file()) {
        (true, _) => Some("folder"),
        (_, true) => None,
        _ => Some("special file"),
    }
}

/// Length and SHA-256 of a regular file, in constant memory.
pub fn sha256_file(path: &Path) -> Result<(u64, String)> {
    let mut file = open_regular(path)?;
    let (mut hasher, mut buffer, mut length) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        let n = file.read(&mut buffer).map_err(Error::at(path))?;
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

/// Writes and syncs a file that nobody knows yet; `point` is where a test may end the process before the sync.
pub fn write_synced(path: &Path, bytes: &[u8], point: &str) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        kill_point(point);
        file.sync_all()
    };
    write().map_err(Error::at(path))
}

/// Makes renames and new files in `folder` durable.
pub fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(Error::at(folder))
}

/// Replaces a file in one step: a reader finds the old or the new content, also after a crash.
pub fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    let placed = write_synced(&temporary, bytes, "file-before-sync").and_then(|()| {
        kill_point("file-before-rename");
        fs::rename(&temporary, path).map_err(Error::at(path))
    });
    if placed.is_err() {
        // The first error is the one to report; a stray temporary file does no harm.
        let _ = fs::remove_file(&temporary);
    }
    placed?;
    kill_point("file-after-rename");
    // The parent of a bare file name is the empty path, which cannot be opened.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    sync_folder(folder.unwrap_or(Path::new(".")))
}

/// [`replace`], in a folder that is made where it is missing.
pub fn place(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(Error::at(folder))?;
    }
    replace(path, bytes)
}

/// Checks that a file of these bytes can be placed: there is nothing yet, or the very same. Whatever else is there is an error.
pub fn is_free(path: &Path, bytes: &[u8]) -> Result<bool> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(true),
        Err(e) => return Err(Error::at(path)(e)),
        Ok(there) if there.is_file() && there.len() == bytes.len() as u64 => {
            if read_regular(path, there.len())? == bytes {
                return Ok(false);
            }
        }
        Ok(_) => {}
    }
    let message = "is there already: remove it, or write to another place";
    Err(Error::at(path)(io::Error::new(ErrorKind::AlreadyExists, message)))
}

/// [`place`], where nothing is lost by it: see [`is_free`].
pub fn create(path: &Path, bytes: &[u8]) -> Result<()> {
    if is_free(path, bytes)? { place(path, bytes) } else { Ok(()) }
}

/// A new folder among the system's temporary ones, with a name nobody can guess, that goes with the value.
pub fn scratch() -> Result<TempDir> {
    tempfile::Builder::new().prefix("taper-").tempdir().map_err(Error::at(std::env::temp_dir()))
}

/// Removes what killed processes left of [`replace`] in a folder that nobody else writes to.
pub fn remove_strays(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::at(folder))? {
        let entry = entry.map_err(Error::at(folder))?;
        let (name, path) = (entry.file_name(), entry.path());
        let stray = name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(".tmp"));
        if stray && path.is_file() {
            fs::remove_file(&path).map_err(Error::at(&path))?;
        }
    }
    Ok(())
}

/// Removes a folder that may not be there, or a file in its place.
pub fn remove_folder(folder: &Path) -> Result<()> {
    let removed = match fs::remove_dir_all(folder) {
        Err(e) if e.kind() == ErrorKind::NotADirectory => fs::remove_file(folder),
        removed => removed,
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(Error::at(folder)(e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_leaves_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/file");
        assert!(replace(&path, b"one").is_err(), "a missing folder is the caller's mistake");
        place(&path, b"one").unwrap();
        place(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_replaced_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"bytes").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file stays");
    }

    #[test]
    fn strays_go_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".summary.json.7.tmp", "summary.json", ".hidden", "notes.tmp"] {
            fs::write(folder.path().join(name), b"").unwrap();
        }
        remove_strays(folder.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".hidden", "notes.tmp", "summary.json"]);
    }
}
