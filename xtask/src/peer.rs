//! The Python with PyTorch that `bench --peer` measures against: a virtual environment in the user's cache.
use std::env;
use std::process::Command;

/// What our figures were measured against.
const TORCH: &str = "torch==2.15.0";

/// Points `TAPER_PEER_PYTHON` at the environment's Python in `command`, making the environment if it is not there.
pub fn provide(command: &mut Command) -> bool {
    if env::var_os("TAPER_PEER_PYTHON").is_some() {
        return true;
    }
    let folder = crate::cache().join("peer-venv");
    let python = folder.join("bin/python");
    command.env("TAPER_PEER_PYTHON", &python);
    // Installing nothing takes a second and finishes an installation that was interrupted.
    (python.exists() || crate::run(Command::new("python3").args(["-m", "venv"]).arg(&folder)))
        && crate::run(Command::new(&python).args(["-m", "pip", "install", "--quiet", TORCH]))
}
