//! The `taper` command.
use std::process::ExitCode;
use taper_train::Registries;

/// glibc's allocator returns large blocks to the system after every step and pays for them again at the next.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Milliseconds for which mimalloc keeps what was freed, and ten times as many for whole arenas, before it is the system's again: longer than a step
/// of training, or each step pays for a fault in every page.
const KEEP: std::ffi::c_long = 2000;
/// `mi_option_purge_delay`.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// How often a thread of candle's own pool looks for more work before it sleeps. candle's own number comes to 0.3 ms after each of its
/// larger ops, on a core that our pool needs.
const CANDLE_LOOKS: (&str, &str) = ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "1");

/// candle walks its graph by recursion: a long chain of ops needs a deep stack.
const STACK: usize = 256 << 20;

fn main() -> ExitCode {
    // SAFETY: an option of the allocator in use, which takes any number.
    unsafe { libmimalloc_sys::mi_option_set(PURGE_DELAY, KEEP) };
    if std::env::var_os(CANDLE_LOOKS.0).is_none() {
        // SAFETY: nobody reads the environment meanwhile: there is no other thread yet.
        unsafe { std::env::set_var(CANDLE_LOOKS.0, CANDLE_LOOKS.1) };
    }
    if let Some(revision) = option_env!("TAPER_REVISION") {
        taper_train::run::set_revision(revision);
    }
    let work = std::thread::Builder::new()
        .name("taper".into())
        .stack_size(STACK)
        .spawn(|| taper::main(&Registries::default()));
    match work.map(|thread| thread.join()) {
        Ok(Ok(code)) => code,
        // The panic has been printed.
        Ok(Err(_)) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: no thread to work on: {e}");
            ExitCode::FAILURE
        }
    }
}
