//! Signals that ask a training to stop: it ends with a checkpoint, and the command with 128 and the signal's number.
//!
//! An interrupt comes from a person, whose second one ends the process at once. The others (a closed terminal, Slurm's TERM or
//! USR1, Docker) may come several times and mean the same: whoever is in a hurry then kills.
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

/// Who is told.
static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
/// The first signal; 0 before it.
static FIRST: AtomicI32 = AtomicI32::new(0);

/// A flag that is set by the first signal that asks to stop.
pub(super) fn stop_flag() -> Arc<AtomicBool> {
    let stop = STOP.get_or_init(Arc::default).clone();
    #[cfg(unix)]
    unix::listen();
    #[cfg(not(unix))]
    {
        let asked = || {
            if FIRST.swap(INTERRUPT, Ordering::Relaxed) != 0 {
                std::process::exit(130);
            }
            tell();
            eprintln!("stopping after this step; once more to stop at once");
        };
        if let Err(e) = ctrlc::set_handler(asked) {
            eprintln!("warning: interrupts end the process without a checkpoint: {e}");
        }
    }
    stop
}

/// The exit code after a signal asked to stop; `code` where none did.
pub(super) fn exit_code(code: u8) -> u8 {
    match FIRST.load(Ordering::Relaxed) {
        0 => code,
        signal => u8::try_from(128 + signal).unwrap_or(code),
    }
}

const INTERRUPT: i32 = 2;

fn tell() {
    if let Some(stop) = STOP.get() {
        stop.store(true, Ordering::Relaxed);
    }
}

#[cfg(unix)]
mod unix {
    use super::{FIRST, INTERRUPT, Ordering, tell};
    use libc::{SIG_IGN, SIGHUP, SIGINT, SIGTERM, SIGUSR1, c_int};
    use std::mem::MaybeUninit;
    use std::ptr;

    /// Only what may be done in a signal handler: atomics, `write` and `_exit`.
    extern "C" fn asked(signal: c_int) {
        let first = FIRST.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
        if first == Err(INTERRUPT) && signal == SIGINT {
            // SAFETY: ends the process, and may be called in a handler.
            unsafe { libc::_exit(128 + signal) };
        }
        tell();
        if first.is_ok() {
            let text: &[u8] = match signal {
                SIGINT => b"stopping after this step; once more to stop at once\n",
                _ => b"stopping after this step\n",
            };
            // SAFETY: the bytes are there for as long as the program; one that nobody reads is no harm.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        }
    }

    /// Has the handler called, unless the signal was to be ignored: `nohup` says so of a closed terminal.
    pub fn listen() {
        const _: () = assert!(SIGINT == INTERRUPT);
        for signal in [SIGINT, SIGTERM, SIGHUP, SIGUSR1] {
            // SAFETY: both structures are valid; the one that is read was filled by the call before.
            unsafe {
                let mut before = MaybeUninit::<libc::sigaction>::zeroed();
                libc::sigaction(signal, ptr::null(), before.as_mut_ptr());
                if signal == SIGHUP && before.assume_init().sa_sigaction == SIG_IGN {
                    continue;
                }
                let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
                action.sa_sigaction = asked as extern "C" fn(c_int) as usize;
                action.sa_flags = libc::SA_RESTART;
                libc::sigemptyset(&mut action.sa_mask);
                libc::sigaction(signal, &action, ptr::null_mut());
            }
        }
    }
}
