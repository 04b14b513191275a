//! One process at a time works on a run.
use super::RunError;
use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Holds a run's folder; the system lets go of it when the process ends, however it ends.
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits until no other process holds `folder`. `None` when `stop` was set meanwhile.
    pub fn take(folder: &Path, stop: &AtomicBool, say: impl FnOnce()) -> Result<Option<Self>, RunError> {
        fs::create_dir_all(folder).map_err(RunError::io(folder))?;
        let path = folder.join(".lock");
        let file = File::create(&path).map_err(RunError::io(&path))?;
        let mut say = Some(say);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(Self { _file: file })),
                Err(TryLockError::Error(e)) => return Err(RunError::io(&path)(e)),
                Err(TryLockError::WouldBlock) if stop.load(Ordering::Relaxed) => return Ok(None),
                Err(TryLockError::WouldBlock) => {
                    if let Some(say) = say.take() {
                        say();
                    }
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        }
    }
}
