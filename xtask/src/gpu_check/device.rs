//! The part that needs a GPU: everything again on the real device, and a report to send back.
use super::text;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// What the report is called.
const REPORT: &str = "gpu-report.md";

/// What is measured: the optimizers with a counterpart in PyTorch, and whole training steps.
const BENCHMARKS: &[&str] = &[
    "optim/adam",
    "optim/adamw",
    "optim/decgd",
    "optim/aegd",
    "mlp-step",
    "resnet18-step/128",
    "densenet121-step",
    "lstm1-step",
];

/// The report so far.
struct Report {
    /// A line for each part.
    summary: String,
    /// What each part said.
    details: String,
    ok: bool,
}

impl Report {
    fn add(&mut self, title: &str, verdict: &str, said: &str) {
        eprintln!("== {title}: {verdict}");
        self.ok &= !verdict.starts_with("FAILED");
        // Writing to a string cannot fail.
        let _ = writeln!(self.summary, "| {title} | {verdict} |");
        let _ = writeln!(self.details, "\n## {title}\n\n{verdict}\n\n```text\n{}\n```", said.trim_end());
    }

    /// Runs a command to its end. True when it succeeded.
    fn run(&mut self, title: &str, command: &mut Command) -> bool {
        eprintln!("== {title}");
        let started = Instant::now();
        let (passed, said) = match command.output() {
            Ok(output) => {
                let said = [output.stdout, output.stderr].concat();
                (output.status.success(), String::from_utf8_lossy(&said).into_owned())
            }
            Err(e) => (false, e.to_string()),
        };
        let verdict = format!(
            "{} in {:.1} s",
            if passed { "passed" } else { "FAILED" },
            started.elapsed().as_secs_f64()
        );
        self.add(title, &verdict, &format!("{command:?}\n{said}"));
        passed
    }
}

pub fn run(device: &str) -> bool {
    if let Err(why) = present(device) {
        eprintln!(
            "error: gpu-check --device {device}: {why}\n\
             This part builds Taper for the device and runs everything on it. What can be known without a GPU is\n\
             checked by `cargo xtask gpu-check`; docs/gpu.md says which is which."
        );
        return false;
    }
    let mut report = Report { summary: String::new(), details: String::new(), ok: true };
    let mut machine = String::new();
    for (program, args) in [
        ("uname", &["-a"][..]),
        ("rustc", &["--version"]),
        ("git", &["rev-parse", "HEAD"]),
        (if device == "cuda" { "nvidia-smi" } else { "sw_vers" }, &[]),
    ] {
        machine += &text(Command::new(program).args(args)).unwrap_or_else(|e| e + "\n");
    }
    let feature = format!("taper/{device}");
    let mut build = Command::new(crate::cargo());
    build.args(["build", "--release", "--workspace", "--bin", "taper", "--features", &feature]);
    if report.run("build", &mut build) {
        on_device(device, &feature, &mut report);
    }
    let Report { summary, details, ok } = &report;
    let all = format!(
        "# Taper on {device}\n\n```text\n{}\n```\n\n| part | verdict |\n| --- | --- |\n{summary}{details}",
        machine.trim_end()
    );
    match fs::write(REPORT, all) {
        Ok(()) => eprintln!("wrote {REPORT}: please send it"),
        Err(e) => {
            eprintln!("error: {REPORT}: {e}");
            return false;
        }
    }
    *ok
}

/// Why there is nothing to run on.
fn present(device: &str) -> Result<(), String> {
    let needs = |program: &str, args: &[&str], why: &str| match text(Command::new(program).args(args)) {
        Ok(_) => Ok(()),
        Err(said) => Err(format!("{why} ({said})")),
    };
    match device {
        "cuda" => {
            needs("nvidia-smi", &["-L"], "no NVIDIA GPU with a driver was found")?;
            needs(
                "nvcc",
                &["--version"],
                "the CUDA toolkit, with which candle's kernels are built, was not found",
            )
        }
        _ if cfg!(target_os = "macos") => Ok(()),
        _ => Err(format!("Metal is a part of macOS, and this is {}", std::env::consts::OS)),
    }
}

fn taper(args: &[&str]) -> Command {
    let mut command = Command::new(crate::target().join("release/taper"));
    command.args(args);
    command
}

fn on_device(device: &str, feature: &str, report: &mut Report) {
    if device == "cuda" {
        let mut test = Command::new(crate::cargo());
        test.args(["test", "--release", "--workspace", "--features", feature, "--test", "cuda"]);
        test.args(["--", "--test-threads=1"]).env("TAPER_REQUIRE_TOOLS", "1");
        report.run("optimizers have the bits of the CPU, and the loop trains", &mut test);
    }
    for (title, folder) in [
        ("optimizers against the records of other implementations", "crates/optim/tests/golden"),
        (
            "modern optimizers against the records of other implementations",
            "crates/optim/tests/golden/modern",
        ),
        ("networks against the records of PyTorch", "crates/models/tests/golden"),
    ] {
        golden(title, Path::new(folder), device, report);
    }
    bench(device, report);
    let place = format!("device={device}");
    let train = |recipe: &str, overrides: &[&str]| {
        let mut train = taper(&["train", recipe, "--runs", "runs/gpu-check", "--set", &place]);
        for set in overrides.iter().chain(&["train.epochs=1"]) {
            train.args(["--set", set]);
        }
        train
    };
    report.run("MLP on MNIST, one epoch", &mut train("recipes/quickstart.yaml", &[]));
    let recipe = "recipes/cifar10/resnet34-decgd.yaml";
    match has_cifar10(device) {
        true => {
            let mut train = train(recipe, &["model.name=resnet18"]);
            report.run("ResNet-18 on CIFAR-10, one epoch", &mut train);
        }
        false => {
            let synthetic = ["model.name=resnet18", "data.name=synthetic-images", "data.train=50000"];
            let title = "ResNet-18, one epoch of 50,000 synthetic images (CIFAR-10 could not be had)";
            report.run(title, &mut train(recipe, &synthetic));
        }
    }
}

/// Whether CIFAR-10 is here, or could be fetched.
fn has_cifar10(device: &str) -> bool {
    let here = || text(&mut taper(&["data", "check", "cifar10"])).is_ok();
    let fetch = || {
        let Ok(xtask) = std::env::current_exe() else { return false };
        // With the device's feature, so that the program which can fetch can also go on with it.
        crate::run(Command::new(xtask).args(["data", "fetch", "cifar10"]).env("TAPER_FEATURES", device))
    };
    here() || (fetch() && here())
}

/// Replays all records in a folder on the device and on the CPU, in f32. The device may be ten times as far from the record
/// as the CPU is, or 1e-4: sums there have another order.
fn golden(title: &str, folder: &Path, device: &str, report: &mut Report) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    files.sort();
    let (mut table, mut bad) = (String::from("error relative to the record: CPU, device\n"), 0);
    for file in &files {
        let error = |device: &str| {
            let mut replay = taper(&["replay", "--json", "--dtype", "f32", "--device", device]);
            let said = text(replay.arg(file))?;
            number(&said, "max_rel_error").ok_or_else(|| format!("no error in {said}"))
        };
        let name = file.file_stem().unwrap_or_default().to_string_lossy();
        let line = match (error("cpu"), error(device)) {
            (Ok(cpu), Ok(found)) => {
                let far = !(found <= 1e-4 || found <= 10.0 * cpu);
                bad += usize::from(far);
                format!("{name:<40} {cpu:8.1e} {found:8.1e}{}", if far { "  TOO FAR" } else { "" })
            }
            (cpu, found) => {
                bad += 1;
                let why = [cpu.err(), found.err()].into_iter().flatten().collect::<Vec<_>>().join("; ");
                format!("{name:<40} FAILED: {why}")
            }
        };
        table += &line;
        table.push('\n');
    }
    let count = files.len();
    let verdict = match bad {
        _ if count == 0 => format!("FAILED: no records in {}", folder.display()),
        0 => format!("passed: {count} records"),
        bad => format!("FAILED: {bad} of {count} records"),
    };
    report.add(title, &verdict, &table);
}

/// The number under a key in a line of JSON.
fn number(json: &str, key: &str) -> Option<f64> {
    let (_, rest) = json.split_once(&format!("\"{key}\":"))?;
    rest.trim_start().split([',', '}']).next()?.trim().parse().ok()
}

/// The benchmarks on the device, beside PyTorch where there is one that can use it.
fn bench(device: &str, report: &mut Report) {
    let python = std::env::var_os("TAPER_PEER_PYTHON")
        .map_or_else(|| crate::cache().join("peer-venv/bin/python"), PathBuf::from);
    let available = match device {
        "cuda" => "import torch; assert torch.cuda.is_available()",
        _ => "import torch; assert torch.backends.mps.is_available()",
    };
    let mut bench = taper(&["bench", "--device", device]);
    bench.args(BENCHMARKS).env("TAPER_PEER_PYTHON", &python);
    let title = match text(Command::new(&python).args(["-c", available])) {
        Ok(_) => {
            bench.arg("--peer");
            "benchmarks beside PyTorch"
        }
        Err(_) => {
            eprintln!(
                "no PyTorch that can use the device: benchmarks run alone. Set TAPER_PEER_PYTHON to a Python that has one"
            );
            "benchmarks alone: no PyTorch that can use the device"
        }
    };
    report.run(title, &mut bench);
}
