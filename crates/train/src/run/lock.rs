//! One process a run: a lock of the operating system, which ends with its process, however that ends.
use super::RunError;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::path::Path;

/// Held while a run is trained. Its file stays, empty, when it is released.
pub(crate) struct Lock(File);

impl Lock {
    /// Locks a run's folder if it is there: who must wait hears of it before long preparations.
    pub fn early(folder: &Path) -> Result<Option<Self>, RunError> {
        folder.is_dir().then(|| Self::acquire(folder)).transpose()
    }

    /// Locks a run's folder, or says who is at work in it.
    pub fn acquire(folder: &Path) -> Result<Self, RunError> {
        let path = folder.join(".lock");
        let io = |e| RunError::io(&path)(e);
        let mut options = OpenOptions::new();
        let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                // Whoever has just taken the lock may not have written its name yet.
                let known = file.take(200).read_to_string(&mut holder).is_ok() && !holder.is_empty();
                let holder = if known { holder } else { "another process".to_owned() };
                return Err(RunError::Busy { folder: folder.to_path_buf(), holder });
            }
            Err(TryLockError::Error(e)) if e.kind() == ErrorKind::Unsupported => {
                eprintln!(
                    "warning: {}: this file system has no locks: train the run once at a time",
                    path.display()
                );
            }
            Err(TryLockError::Error(e)) => return Err(io(e)),
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.is_empty() { String::new() } else { format!(" on {}", host.trim()) };
        let name = format!("process {}{host}", std::process::id());
        file.set_len(0).and_then(|()| file.write_all(name.as_bytes())).map_err(io)?;
        Ok(Self(file))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The lock goes with the file's handle; the name in it is only for messages.
        let _ = self.0.set_len(0);
    }
}
