//! The part that needs a GPU: everything again on the real device, and a report to send back.
use super::text;
use std::fs;
use std::process::Command;
use std::time::Instant;

/// What the report is called.
const REPORT: &str = "gpu-report.txt";

pub fn run(device: &str) -> bool {
    let mut report = String::new();
    let mut ok = true;
    for (title, program, args) in [
        ("system", "uname", &["-a"][..]),
        ("compiler", "rustc", &["--version"]),
        ("commit", "git", &["rev-parse", "HEAD"]),
        ("driver", if device == "cuda" { "nvidia-smi" } else { "sw_vers" }, &[]),
    ] {
        let said = text(Command::new(program).args(args)).unwrap_or_else(|e| e);
        report += &format!("== {title}\n{said}\n");
    }
    let feature = format!("taper-train/{device}");
    let cargo = |args: &[&str]| {
        let mut command = Command::new(crate::cargo());
        command.args(args).env("TAPER_REQUIRE_TOOLS", "1");
        command
    };
    let taper = |args: &[&str]| {
        let path = crate::target().join("release/taper");
        let mut command = Command::new(path);
        command.args(args);
        command
    };
    let place = format!("device={device}");
    let mut steps = vec![(
        "build",
        cargo(&["build", "--release", "--workspace", "--bin", "taper", "--features", &feature]),
    )];
    if device == "cuda" {
        let test = [
            "test",
            "--release",
            "--workspace",
            "--features",
            &feature,
            "--test",
            "cuda",
            "--",
            "--test-threads=1",
        ];
        steps.push(("optimizers: the bits of the CPU", cargo(&test)));
    }
    for (title, folder, dtype) in [
        ("optimizers: records of other implementations", "crates/optim/tests/golden", "f32"),
        ("networks: records of PyTorch", "crates/models/tests/golden", "f32"),
    ] {
        let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut files: Vec<_> = files.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).collect();
        files.sort();
        let mut replay = taper(&["replay", "--device", device, "--dtype", dtype]);
        replay.args(files);
        steps.push((title, replay));
    }
    let train = |recipe: &str, overrides: &[&str]| {
        let mut train = taper(&["train", recipe, "--runs", "runs/gpu-check", "--set", &place]);
        for set in overrides.iter().chain(&["train.epochs=1"]) {
            train.args(["--set", set]);
        }
        train
    };
    steps.push(("MNIST, one epoch", train("recipes/quickstart.yaml", &[])));
    let resnet = ["model.name=resnet18", "data.name=synthetic-images", "data.train=50000"];
    let title = "ResNet-18, one epoch of 50,000 images";
    steps.push((title, train("recipes/cifar10/resnet34-decgd.yaml", &resnet)));
    for (title, mut command) in steps {
        eprintln!("== {title}");
        let started = Instant::now();
        let (passed, said) = match command.output() {
            Ok(output) => (output.status.success(), [output.stdout, output.stderr].concat()),
            Err(e) => (false, e.to_string().into_bytes()),
        };
        ok &= passed;
        let verdict = if passed { "passed" } else { "FAILED" };
        let line = format!("== {title}: {verdict} in {:.1} s", started.elapsed().as_secs_f64());
        eprintln!("{line}");
        report += &format!("{line}\n{command:?}\n{}\n", String::from_utf8_lossy(&said));
    }
    match fs::write(REPORT, report) {
        Ok(()) => eprintln!("wrote {REPORT}"),
        Err(e) => {
            eprintln!("error: {REPORT}: {e}");
            ok = false;
        }
    }
    ok
}
