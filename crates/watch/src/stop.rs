//! Asks a run to stop, as a person at its terminal does: an interrupt to its process, which ends with a checkpoint.
use std::path::Path;
use taper_train::run::{AtWork, at_work};

/// Asks the process that is at work on a run to stop after its step. Says what it did, or why it did nothing.
pub fn stop(folder: &Path) -> Result<String, String> {
    let Some(holder) = at_work(folder) else {
        return Err("nobody is at work on it".into());
    };
    if !holder.here {
        return Err(format!(
            "{holder} is at work on it, which is another machine: stop it there (kill -INT {})",
            holder.process()
        ));
    }
    interrupt(&holder)?;
    Ok(format!("{holder} was asked to stop: it leaves a checkpoint, and the same command goes on from there"))
}

/// Signals the process by a handle that stays the same process's, whatever becomes of its number meanwhile.
#[cfg(target_os = "linux")]
fn interrupt(holder: &AtWork) -> Result<(), String> {
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    let number = libc::pid_t::try_from(holder.process()).map_err(|e| e.to_string())?;
    let failed = |what: &str| Err(format!("{what} {holder}: {}", std::io::Error::last_os_error()));
    // SAFETY: the call takes two numbers and gives a new file descriptor or -1.
    let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, number, 0) };
    let Some(handle) = i32::try_from(handle).ok().filter(|handle| *handle >= 0) else {
        return failed("no handle of");
    };
    // SAFETY: the descriptor was opened above and belongs to nobody else.
    let handle = unsafe { OwnedFd::from_raw_fd(handle) };
    // From here on the handle is of one process: if that is the holder, the signal reaches the holder.
    if !holder.is_same() {
        return Err(format!("{holder} has ended, and another process has its number"));
    }
    // SAFETY: the descriptor is open, and no information goes with the signal.
    let sent = unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            handle.as_raw_fd(),
            libc::SIGINT,
            std::ptr::null::<()>(),
            0,
        )
    };
    if sent == 0 { Ok(()) } else { failed("no signal to") }
}

#[cfg(not(target_os = "linux"))]
fn interrupt(holder: &AtWork) -> Result<(), String> {
    Err(format!(
        "this system does not tell one process from a later one of its number: stop {holder} at its terminal"
    ))
}
