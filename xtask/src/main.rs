//! `cargo xtask <command>`: builds `taper` once in release and runs it. `test`, `ci` and `gpu-check` are its own.
//!
//! It has no dependencies, so that it costs nothing to build, and parses nothing but its own name.
mod gpu_check;
mod peer;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let ok = match args.first().map(String::as_str) {
        Some("test") => test(&args[1..]),
        Some("gpu-check") => return gpu_check::run(&args[1..]),
        Some("ci") => run(Command::new("bash").arg(".ci/run")),
        _ => return taper(&args),
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All tests, with nextest where it is installed: the workspace, the examples in the documentation, and the downloads, whose
/// feature builds candle a second time. With arguments, the workspace's tests that match them.
fn test(args: &[String]) -> bool {
    let nextest =
        Command::new(cargo()).args(["nextest", "--version"]).output().is_ok_and(|o| o.status.success());
    let tests = |targets: &[&str]| {
        let mut command = Command::new(cargo());
        command.args(if nextest { &["nextest", "run"][..] } else { &["test"] });
        command.args(["--release", "--workspace"]).args(targets);
        command
    };
    run(tests(&["--lib", "--bins", "--tests", "--examples"]).args(args))
        && (!args.is_empty()
            || run(Command::new(cargo()).args(["test", "--release", "--workspace", "--doc"]))
                && run(&mut tests(&["--features", "taper-train/hub", "--test", "data_hub"])))
}

/// Builds `taper` and becomes it, as far as a process can: same arguments, same exit code.
fn taper(args: &[String]) -> ExitCode {
    let mut build = vec!["build", "--release", "--workspace", "--bin", "taper"];
    // Which GPU to build for: `TAPER_FEATURES=cuda cargo xtask train …`.
    let wanted = env::var("TAPER_FEATURES").unwrap_or_default();
    let wanted: Vec<String> =
        wanted.split(',').filter(|name| !name.is_empty()).map(|name| format!("taper-train/{name}")).collect();
    build.extend(wanted.iter().flat_map(|feature| ["--features", feature]));
    // Only downloads need the hub's client, which takes longer to build than all the rest.
    if args.starts_with(&["data".to_owned(), "fetch".to_owned()]) {
        build.extend(["--features", "taper-train/hub"]);
    }
    if !run(Command::new(cargo()).args(build)) {
        return ExitCode::FAILURE;
    }
    let path = target().join("release/taper");
    let mut command = Command::new(&path);
    // Where a recipe's data is missing, this program builds a `taper` that can download and has it fetched.
    if let Ok(xtask) = env::current_exe() {
        command.env("TAPER_FETCH", xtask);
    }
    let wants_peer = args.first().is_some_and(|arg| arg == "bench") && args.iter().any(|arg| arg == "--peer");
    if wants_peer && !peer::provide(&mut command) {
        return ExitCode::FAILURE;
    }
    match command.args(args).status() {
        // What a loader ends with that finds no library: nothing of ours has run yet that could say why.
        Ok(status) if status.code() == Some(127) && !wanted.is_empty() => {
            eprintln!(
                "error: taper was built with {} and a library it needs is not on this machine: with `cuda` that is NVIDIA's \
                 driver (libcuda.so.1). Install it, or unset TAPER_FEATURES to compute on the CPU",
                wanted.join(", ")
            );
            ExitCode::FAILURE
        }
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
        Err(e) => {
            eprintln!("error: {}: {e}", path.display());
            ExitCode::FAILURE
        }
    }
}

/// Cargo's folder for what it builds.
fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from)
}

/// Our folder in the user's cache.
fn cache() -> PathBuf {
    let home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
    env::var_os("XDG_CACHE_HOME").map_or(home.join(".cache"), PathBuf::from).join("taper")
}

fn cargo() -> String {
    env::var("CARGO").unwrap_or_else(|_| "cargo".into())
}

fn run(command: &mut Command) -> bool {
    match command.status() {
        Ok(status) => status.success(),
        Err(e) => {
            eprintln!("error: {command:?}: {e}");
            false
        }
    }
}
