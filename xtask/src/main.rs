//! `cargo xtask <command>`: builds `taper` once in release and runs it. Three commands are its own.
//!
//! It has no dependencies, so that it costs nothing to build, and parses nothing but its own name.
mod peer;

use std::env;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let ok = match args.first().map(String::as_str) {
        Some("test") => test(&args[1..]),
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
    // Only downloads need the hub's client, which takes longer to build than all the rest.
    if args.starts_with(&["data".to_owned(), "fetch".to_owned()]) {
        build.extend(["--features", "taper-train/hub"]);
    }
    if !run(Command::new(cargo()).args(build)) {
        return ExitCode::FAILURE;
    }
    let target =
        env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| format!("{}/../target", env!("CARGO_MANIFEST_DIR")));
    let mut command = Command::new(format!("{target}/release/taper"));
    // Where a recipe's data is missing, this program builds a `taper` that can download and has it fetched.
    if let Ok(xtask) = env::current_exe() {
        command.env("TAPER_FETCH", xtask);
    }
    let wants_peer = args.first().is_some_and(|arg| arg == "bench") && args.iter().any(|arg| arg == "--peer");
    if wants_peer && !peer::provide(&mut command) {
        return ExitCode::FAILURE;
    }
    match command.args(args).status() {
        Ok(status) => ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)),
        Err(e) => {
            eprintln!("error: {target}/release/taper: {e}");
            ExitCode::FAILURE
        }
    }
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
