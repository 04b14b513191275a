//! Files that are whole or not there: written beside their place, synced, renamed, and the folder synced.
use super::RunError;
use super::kill::kill_point;
use crate::data::hex;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// The SHA-256 of some bytes in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Writes and syncs a file that nobody knows yet; `point` is where a test may end the process before the sync.
pub(crate) fn write_synced(path: &Path, bytes: &[u8], point: &str) -> Result<(), RunError> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        kill_point(point);
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
    let placed = write_synced(&temporary, bytes, "file-before-sync").and_then(|()| {
        kill_point("file-before-rename");
        fs::rename(&temporary, path).map_err(RunError::io(path))
    });
    if placed.is_err() {
        // The first error is the one to report; a stray temporary file does no harm.
        let _ = fs::remove_file(&temporary);
    }
    placed?;
    kill_point("file-after-rename");
    sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Removes what killed processes left of [`replace`] in a folder that nobody else writes to.
pub(crate) fn remove_strays(folder: &Path) -> Result<(), RunError> {
    for entry in fs::read_dir(folder).map_err(RunError::io(folder))? {
        let entry = entry.map_err(RunError::io(folder))?;
        let (name, path) = (entry.file_name(), entry.path());
        let stray = name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(".tmp"));
        if stray && path.is_file() {
            fs::remove_file(&path).map_err(RunError::io(&path))?;
        }
    }
    Ok(())
}

/// Removes a folder that may not be there, or a file in its place.
pub(crate) fn remove_folder(folder: &Path) -> Result<(), RunError> {
    let removed = match fs::remove_dir_all(folder) {
        Err(e) if e.kind() == ErrorKind::NotADirectory => fs::remove_file(folder),
        removed => removed,
    };
    match removed {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(RunError::io(folder)(e)),
        _ => Ok(()),
    }
}
