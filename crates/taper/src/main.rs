//! The `taper` command.
use std::process::ExitCode;
use taper_train::Registries;

/// glibc's allocator returns large blocks to the system after every step and pays for them again at the next.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// candle walks its graph by recursion: a long chain of ops needs a deep stack.
const STACK: usize = 256 << 20;

fn main() -> ExitCode {
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
