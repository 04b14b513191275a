//! `cargo xtask isa-check [--full|--avx512]`: our tests on CPUs that are not here, under qemu and Bochs.
//!
//! What is cheap is a stage of the tests: the kernels, without the tests that take minutes under emulation. `--full` leaves nothing
//! out, adds models and golden records, builds all for ARM too, which takes candle once more, and trains the quickstart for
//! an epoch everywhere. `--avx512` runs the kernels' tests on a CPU that has it.
mod bochs;

use super::{cargo, manifest, root, run, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ARM: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
/// Where Debian puts ARM's C library.
const SYSROOT: &str = "/usr/aarch64-linux-gnu";

/// A CPU that qemu plays.
struct Machine {
    name: &'static str,
    /// The program that plays it, with its arguments.
    emulator: &'static [&'static str],
    /// The kernels that it must choose.
    isa: &'static str,
}

const NEON: Machine = Machine { name: "ARM", emulator: &["qemu-aarch64-static", "-L", SYSROOT], isa: "neon" };
const X86: [Machine; 2] = [
    Machine { name: "Haswell", emulator: &["qemu-x86_64-static", "-cpu", "Haswell"], isa: "avx2" },
    Machine { name: "Nehalem", emulator: &["qemu-x86_64-static", "-cpu", "Nehalem"], isa: "portable" },
];

/// The crate whose tests are run without `--full`.
const KERNELS: &str = "kernels";

/// A test program.
#[derive(Clone, Copy)]
struct Test {
    name: &'static str,
    krate: &'static str,
    /// What emulation makes slow in it.
    slow: &'static [&'static str],
}

const fn test(name: &'static str, krate: &'static str) -> Test {
    Test { name, krate, slow: &[] }
}

/// The tests of kernels, models and golden records.
const TESTS: [Test; 9] = [
    Test {
        name: "taper_kernels",
        krate: KERNELS,
        slow: &[
            "any_number_of_threads",
            "large_shapes",
            "every_cut",
            "every_shape",
            "gradients_are_those_of_small_steps",
        ],
    },
    test("taper_models", "models"),
    test("conv", "models"),
    test("batch_norm", "models"),
    test("pool", "models"),
    test("sequence", "models"),
    test("transformers", "models"),
    test("vision_golden", "models"),
    test("golden", "optim"),
];

/// True also where the tools are missing, which is said; `TAPER_REQUIRE_TOOLS` wants them.
pub fn check(args: &[String]) -> bool {
    let (full, wide) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (false, false),
        ["--full"] => (true, false),
        ["--avx512"] => (false, true),
        _ => {
            eprintln!("error: isa-check: expected nothing, --full or --avx512, found {}", args.join(" "));
            return false;
        }
    };
    type Part<'a> = (&'a str, Option<String>, &'a dyn Fn() -> bool);
    let parts: &[Part] = match wide {
        false => {
            &[("ARM", missing_for_arm(), &|| arm(full)), ("older x86", missing_for_x86(), &|| x86(full))]
        }
        true => &[("AVX-512", missing_linux().or_else(bochs::missing), &avx512)],
    };
    parts.iter().all(|(name, missing, check)| match missing {
        None => check(),
        Some(missing) => {
            let required = std::env::var_os("TAPER_REQUIRE_TOOLS").is_some();
            eprintln!("{}: {name}: {missing}", if required { "error" } else { "skipped" });
            !required
        }
    })
}

fn missing_for_arm() -> Option<String> {
    let tools = [
        ("qemu-aarch64-static", "qemu-user-static"),
        (LINKER, "gcc-aarch64-linux-gnu libc6-dev-arm64-cross"),
    ];
    let tool = tools.iter().find(|(tool, _)| !answers(tool));
    tool.map(|(tool, package)| format!("no {tool}; on Debian: apt-get install {package}")).or_else(|| {
        let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
        let printed =
            Command::new(rustc).args(["--print", "target-libdir", "--target", ARM]).output().ok()?;
        let there = Path::new(String::from_utf8_lossy(&printed.stdout).trim()).is_dir();
        (!there).then(|| format!("no standard library for it; rustup target add {ARM}"))
    })
}

fn missing_for_x86() -> Option<String> {
    missing_linux().or_else(|| {
        (!answers("qemu-x86_64-static"))
            .then(|| "no qemu-x86_64-static; on Debian: apt-get install qemu-user-static".into())
    })
}

/// Emulators of x86 are given the test programs of this machine.
fn missing_linux() -> Option<String> {
    (!cfg!(all(target_arch = "x86_64", target_os = "linux")))
        .then(|| "the test programs of this machine are no x86-64 Linux's".into())
}

fn answers(tool: &str) -> bool {
    let mut version = Command::new(tool);
    version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|s| s.success())
}

/// Cargo, told how to link for ARM and to compile the C parts of dependencies for it.
fn cargo_for_arm(command: &str) -> Command {
    let mut cargo = Command::new(cargo());
    cargo.args([command, "--release", "--target", ARM]).args(manifest());
    cargo.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    cargo.env("CC_aarch64_unknown_linux_gnu", LINKER);
    cargo
}

fn arm(full: bool) -> bool {
    // Without candle, so that it costs little.
    let kernels =
        tests_on(&NEON, programs(cargo_for_arm("test").args(["--package", "taper-kernels", "--lib"])), full);
    kernels
        && (!full
            || run(cargo_for_arm("build").args(["--workspace", "--bin", "taper"]))
                && tests_on(&NEON, programs(select(&mut cargo_for_arm("test"))), full)
                && trained_on(&NEON, &target().join(ARM).join("release/taper")))
}

fn x86(full: bool) -> bool {
    let build = || {
        let mut build = Command::new(cargo());
        build.args(["test", "--release"]).args(manifest());
        // All of these were built for the tests here.
        programs(select(&mut build).arg("--lib"))
    };
    let taper = target().join("release/taper");
    X86.iter().all(|machine| tests_on(machine, build(), full))
        && (!full
            || run(Command::new(cargo())
                .args(["build", "--release", "--workspace", "--bin", "taper"])
                .args(manifest()))
                && X86.iter().all(|machine| trained_on(machine, &taper)))
}

fn avx512() -> bool {
    let mut build = Command::new(cargo());
    build.args(["test", "--release", "--package", "taper-kernels", "--lib"]).args(manifest());
    let Some(programs) = programs(&mut build) else { return false };
    let known = |(name, path): (String, PathBuf)| Some((*TESTS.iter().find(|test| test.name == name)?, path));
    bochs::passes(&programs.into_iter().filter_map(known).collect::<Vec<_>>())
}

/// The test programs of [`TESTS`] that are not a library's own.
fn select(cargo: &mut Command) -> &mut Command {
    cargo.arg("--workspace");
    for test in TESTS.iter().filter(|test| !test.name.starts_with("taper_")) {
        cargo.args(["--test", test.name]);
    }
    cargo
}

/// What a call of `cargo test` would run: the programs, by name. `None` if it does not build.
fn programs(cargo: &mut Command) -> Option<Vec<(String, PathBuf)>> {
    cargo.args(["--no-run", "--message-format", "json-render-diagnostics"]).stderr(Stdio::inherit());
    let output = cargo.output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8_lossy(&output.stdout).lines().filter_map(program).collect())
}

/// The program that a line of cargo's messages names: its name without the hash that cargo adds, and its path.
fn program(line: &str) -> Option<(String, PathBuf)> {
    let (path, _) = line.split_once("\"executable\":\"")?.1.split_once('"')?;
    let (name, _) = Path::new(path).file_name()?.to_str()?.rsplit_once('-')?;
    Some((name.to_owned(), path.into()))
}

impl Machine {
    fn start(&self, program: &Path) -> Command {
        let mut command = Command::new(self.emulator[0]);
        command.args(&self.emulator[1..]).arg(program);
        command
    }
}

fn tests_on(machine: &Machine, programs: Option<Vec<(String, PathBuf)>>, full: bool) -> bool {
    let Some(programs) = programs else { return false };
    for Test { name, krate, slow } in TESTS.into_iter().filter(|test| full || test.krate == KERNELS) {
        for (_, path) in programs.iter().filter(|(found, _)| found == name) {
            println!("{}: tests of {name}", machine.name);
            let mut command = machine.start(path);
            let slow = if full { &[] } else { slow };
            command.arg("--quiet").args(slow.iter().flat_map(|slow| ["--skip", slow]));
            if !run(command.current_dir(root().join("crates").join(krate))) {
                eprintln!("error: {}: tests of {name} fail", machine.name);
                return false;
            }
        }
    }
    true
}

/// Whether an epoch of the quickstart ends on the machine as it does here: with the bytes of the same kernels where this CPU
/// has them, else with nearly the same accuracy.
fn trained_on(machine: &Machine, taper: &Path) -> bool {
    /// Half a percent of the test images: what kernels that round otherwise may change in an epoch.
    const NEAR: f64 = 0.005;
    let here = target().join("release/taper");
    let folder = target().join("isa-check").join(machine.name);
    let _ = fs::remove_dir_all(&folder);
    let Some(there) = quickstart(machine.start(taper), &folder.join("there")) else { return false };
    let mut same = Command::new(&here);
    same.args(["--isa", machine.isa]);
    let has = Command::new(&here)
        .args(["--isa", machine.isa, "data", "list"])
        .output()
        .is_ok_and(|o| o.status.success());
    let native = quickstart(if has { same } else { Command::new(&here) }, &folder.join("here"));
    let Some(native) = native else { return false };
    let mut holds = true;
    for (there, native) in there.iter().zip(&native) {
        let right = there.kernels == machine.isa
            && match has {
                true => there.summary == native.summary,
                false => (there.accuracy - native.accuracy).abs() <= NEAR,
            };
        println!(
            "{}: {}: {:.2} % with {} kernels; here {:.2} % with {} kernels{}",
            machine.name,
            there.name,
            100.0 * there.accuracy,
            there.kernels,
            100.0 * native.accuracy,
            native.kernels,
            if has && right { ", the same bytes" } else { "" }
        );
        holds &= right;
    }
    if !holds {
        eprintln!("error: {}: trained otherwise than here; see {}", machine.name, folder.display());
    }
    holds && !there.is_empty() && there.len() == native.len()
}

/// What a run ended with.
struct Ended {
    name: String,
    kernels: String,
    accuracy: f64,
    summary: String,
}

/// Trains an epoch of the quickstart.
fn quickstart(mut taper: Command, runs: &Path) -> Option<Vec<Ended>> {
    taper.args(["train", "--quiet", "--offline", "--set", "train.epochs=1", "--runs"]).arg(runs);
    taper.arg(root().join("recipes/quickstart.yaml"));
    let output = taper.stderr(Stdio::inherit()).output().ok()?;
    if !output.status.success() {
        eprintln!("error: {taper:?}: {}", output.status);
        return None;
    }
    String::from_utf8_lossy(&output.stdout).lines().map(|folder| ended(Path::new(folder))).collect()
}

fn ended(folder: &Path) -> Option<Ended> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let (summary, manifest) = (read("summary.json")?, read("manifest.json")?);
    let last = &summary[summary.find("\"last\"")?..];
    Some(Ended {
        name: folder.file_name()?.to_str()?.rsplit_once('-')?.0.to_owned(),
        kernels: value(&manifest, "kernels")?.trim_matches('"').to_owned(),
        accuracy: value(last, "test.accuracy")?.parse().ok()?,
        summary,
    })
}

/// The first value of a key in JSON that is laid out a line a key.
fn value<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    let rest = json.split_once(&format!("\"{key}\": "))?.1;
    rest.lines().next().map(|line| line.trim_end_matches(','))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let line = r#"{"reason":"compiler-artifact","target":{"name":"conv"},"executable":"/t/release/deps/batch_norm-0a1b","fresh":true}"#;
        assert_eq!(program(line), Some(("batch_norm".into(), "/t/release/deps/batch_norm-0a1b".into())));
        assert_eq!(program(r#"{"reason":"compiler-artifact","executable":null}"#), None);
        assert_eq!(program("not JSON"), None);
    }

    #[test]
    fn values_are_found_by_their_key() {
        let json = "{\n  \"kernels\": \"avx2\",\n  \"last\": {\n    \"test.accuracy\": 0.9712\n  }\n}";
        assert_eq!(value(json, "kernels"), Some("\"avx2\""));
        assert_eq!(value(json, "test.accuracy").and_then(|v| v.parse::<f64>().ok()), Some(0.9712));
        assert_eq!(value(json, "none"), None);
    }

    #[test]
    fn another_argument_is_refused() {
        assert!(!check(&["--ful".to_owned()]));
    }
}
