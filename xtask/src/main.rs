//! `cargo xtask <command>`: builds `taper` once in release and becomes it. `test`, `ci`, `gpu-check`, `mpi-check` and
//! `isa-check` are its own.
//!
//! It has no dependencies, so that it costs nothing to build, and parses nothing but its own name.
mod gpu_check;
mod isa_check;
mod mpi;
mod peer;
#[cfg(test)]
mod tidy;

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let ok = match args.first().map(String::as_str) {
        Some("test") => test(&args[1..]),
        Some("gpu-check") => return gpu_check::run(&args[1..]),
        Some("mpi-check") => mpi::check(),
        Some("isa-check") => isa_check::check(&args[1..]),
        Some("ci") => run(Command::new("bash").arg(root().join(".ci/run"))),
        _ => return taper(&args),
    };
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All tests, with nextest where it is installed: the workspace, the examples in the documentation, the downloads, whose
/// crate does without candle, some on emulated CPUs, processes under MPI and sweeps on a real Slurm, which say what is missing
/// where there is none. With arguments, the workspace's tests that match them.
fn test(args: &[String]) -> bool {
    let nextest =
        Command::new(cargo()).args(["nextest", "--version"]).output().is_ok_and(|o| o.status.success());
    let tests = |targets: &[&str]| {
        let mut command = Command::new(cargo());
        command.args(if nextest { &["nextest", "run"][..] } else { &["test"] });
        command.arg("--release").args(manifest()).args(targets);
        command
    };
    run(tests(&["--workspace", "--lib", "--bins", "--tests", "--examples"]).args(args))
        && (!args.is_empty()
            || run(Command::new(cargo())
                .args(["test", "--release", "--workspace", "--doc"])
                .args(manifest()))
                && run(&mut tests(&["--package", "taper-data", "--features", "hub", "--test", "hub"]))
                && isa_check::check(&[])
                && mpi::check()
                && slurm(&mut tests(&["--workspace", "--test", "slurm", "--", "--ignored", "--nocapture"])))
}

/// The tests on a real Slurm, some of them with the `taper` that was checked under MPI. Their output is shown: it says why they
/// were skipped.
fn slurm(tests: &mut Command) -> bool {
    let with_mpi = mpi::program();
    if with_mpi.is_file() {
        tests.env("TAPER_WITH_MPI", with_mpi);
    }
    run(tests)
}

/// The commit that is checked out, and whether files differ from it; `None` without git.
fn revision() -> Option<String> {
    let mut git = Command::new("git");
    let described =
        git.current_dir(root()).args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let output = described.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned())
}

/// Builds `taper` and becomes it: signals, the terminal and the exit code are its own.
fn taper(args: &[String]) -> ExitCode {
    let mut build = vec!["build", "--release", "--workspace", "--bin", "taper"];
    // Which GPU to build for: `TAPER_FEATURES=cuda cargo xtask train …`.
    let wanted = env::var("TAPER_FEATURES").unwrap_or_default();
    let wanted: Vec<String> =
        wanted.split(',').filter(|name| !name.is_empty()).map(|name| format!("taper/{name}")).collect();
    build.extend(wanted.iter().flat_map(|feature| ["--features", feature]));
    // Only downloads need the hub's client, which takes longer to build than all the rest.
    if args.starts_with(&["data".to_owned(), "fetch".to_owned()]) {
        build.extend(["--features", "taper/hub"]);
    }
    let mut cargo = Command::new(cargo());
    // For the manifests of runs. Only the few lines of `main.rs` look at it: a new commit links again and compiles nothing else.
    if let Some(revision) = revision() {
        cargo.env("TAPER_REVISION", revision);
    }
    if !run(cargo.args(build).args(manifest())) {
        return ExitCode::FAILURE;
    }
    let path = target().join("release/taper");
    // What a loader ends with that finds no library: nothing of ours has run yet that could say why.
    let loads = || Command::new(&path).arg("--version").output().map(|output| output.status.code());
    if !wanted.is_empty() && loads().is_ok_and(|code| code == Some(127)) {
        eprintln!(
            "error: taper was built with {} and a library it needs is not on this machine: with `cuda` that is NVIDIA's \
             driver (libcuda.so.1). Install it, or unset TAPER_FEATURES to compute on the CPU",
            wanted.join(", ")
        );
        return ExitCode::FAILURE;
    }
    let mut command = Command::new(&path);
    // Help and messages then say what can be typed here.
    command.env("TAPER_STARTED_BY", "cargo xtask");
    // Where a recipe's data is missing, this program builds a `taper` that can download and has it fetched.
    if let Ok(xtask) = env::current_exe() {
        command.env("TAPER_FETCH", xtask);
    }
    let wants_peer = args.first().is_some_and(|arg| arg == "bench") && args.iter().any(|arg| arg == "--peer");
    if wants_peer && !peer::provide(&mut command) {
        return ExitCode::FAILURE;
    }
    let e = become_it(command.args(args));
    eprintln!("error: {}: {e}", path.display());
    ExitCode::FAILURE
}

/// Returns only if the program cannot be started.
#[cfg(unix)]
fn become_it(command: &mut Command) -> std::io::Error {
    std::os::unix::process::CommandExt::exec(command)
}

/// As near as a process can come to being another.
#[cfg(not(unix))]
fn become_it(command: &mut Command) -> std::io::Error {
    match command.status() {
        Ok(status) => std::process::exit(status.code().unwrap_or(1)),
        Err(e) => e,
    }
}

/// The repository of this process, not of the build: a checkout may have been copied or moved since. Cargo says it; a
/// process that cargo did not start (`TAPER_FETCH`) asks where its own program lies.
fn root() -> PathBuf {
    let cargo = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let own = env::current_exe().ok();
    let ancestors = |path: &Path| {
        let holds = |folder: &&Path| folder.join("xtask/Cargo.toml").is_file();
        path.ancestors().find(holds).map(Path::to_path_buf)
    };
    cargo.as_deref().and_then(ancestors).or(own.as_deref().and_then(ancestors)).unwrap_or_default()
}

/// What every call of cargo names: the workspace, and in CI that the lock file stays as it is.
fn manifest() -> Vec<std::ffi::OsString> {
    let mut args = vec!["--manifest-path".into(), root().join("Cargo.toml").into()];
    args.extend(env::var_os("CI").map(|_| "--locked".into()));
    args
}

/// Cargo's folder for what it builds, which holds this program in `debug/`, wherever cargo was told to put it.
fn target() -> PathBuf {
    let own = env::current_exe().unwrap_or_default();
    own.parent().and_then(Path::parent).map_or_else(|| root().join("target"), Path::to_path_buf)
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
