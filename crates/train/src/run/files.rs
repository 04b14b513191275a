//! Files that are whole or not there: written beside their place, synced, renamed, and the folder synced.
use super::RunError;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

/// The SHA-256 of some bytes in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// Writes and syncs a file that nobody knows yet.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(RunError::io(path))
}

/// Makes renames and new files in `folder` durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), RunError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(RunError::io(folder))
}

/// Replaces a file in one step: a reader finds the old or the new content, also after a crash.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), RunError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", std::process::id()));
    write_synced(&temporary, bytes)?;
    fs::rename(&temporary, path).map_err(RunError::io(path))?;
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}
