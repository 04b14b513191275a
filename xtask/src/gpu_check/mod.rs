//! `cargo xtask gpu-check [--require] [--device cuda|metal]`: what can be known about the GPU code without a GPU and, with
//! `--device`, the rest. Each part prints what it proves and what it does not.
mod device;
mod toolkit;

use std::env;
use std::process::{Command, ExitCode};

/// A part of the check.
struct Part {
    name: &'static str,
    proves: &'static str,
    not: &'static str,
    run: fn() -> Outcome,
}

enum Outcome {
    Passed,
    Failed,
    /// Why.
    Skipped(String),
}

const PARTS: &[Part] = &[
    Part {
        name: "types-cuda",
        proves: "the whole workspace type-checks with the features `cuda` and `nccl`",
        not: "that candle's own kernels compile: nvcc is a stand-in here",
        run: types_cuda,
    },
    Part {
        name: "types-metal",
        proves: "the whole workspace type-checks with the feature `metal` for macOS on Apple silicon",
        not: "that it links there",
        run: types_metal,
    },
    Part {
        name: "nvcc",
        proves: "NVIDIA's compiler accepts every optimizer kernel for sm_75, sm_80 and sm_90, without spills and without a fused multiply-add",
        not: "that a GPU runs them",
        run: nvcc,
    },
    Part {
        name: "metal-text",
        proves: "every Metal kernel is sound C++ with address spaces and, run on the host, has the bits of the CPU's kernels",
        not: "that Apple's compiler accepts it, and that buffer indices are those of the launch",
        run: || tests(&["clang_accepts", "the_metal_texts", "refused_on_the_device"], &[]),
    },
    Part {
        name: "cuda-text",
        proves: "the text of every CUDA kernel, run on the host under the address sanitizer, has the bits of the CPU's kernels; sown faults are caught",
        not: "parallel execution; the kernels have no barriers, shared memory or atomics, so that order cannot matter",
        run: || tests(&["the_cuda_texts", "every_sown_fault", "the_norm", "texts::"], &[]),
    },
    Part {
        name: "launch",
        proves: "the way from candle's tensors over NVRTC to the arguments of every launch, on a stand-in driver; faults sown into launches are caught; no optimizer waits before it settles, and no step of the loop but those that log",
        not: "a real driver, real memory and real streams; the PTX is made by NVRTC but not run, and candle's own kernels are not there: of networks it shows only what is asked of the driver",
        run: launch,
    },
    Part {
        name: "nccl",
        proves: "what ranks send each other over NCCL from device memory arrives where it should, and who is gone is named, on stand-ins for the driver and for NCCL",
        not: "a real NCCL, several devices, or anything asynchronous: the stand-in moves files",
        run: nccl,
    },
];

/// All that taper can do with NVIDIA's GPUs: `nccl` has `cuda` in it.
const GPU: &str = "taper/nccl";

pub fn run(args: &[String]) -> ExitCode {
    let mut require = false;
    let mut on_device = None;
    let mut only = Vec::new();
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match (arg.as_str(), PARTS.iter().any(|part| part.name == arg)) {
            ("--require", _) => require = true,
            ("--device", _) => match rest.next().map(String::as_str) {
                Some(name @ ("cuda" | "metal")) => on_device = Some(name.to_owned()),
                other => return refuse(&format!("--device: expected cuda or metal, found {other:?}")),
            },
            (name, true) => only.push(name),
            (other, _) => {
                let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
                return refuse(&format!(
                    "expected --require, --device or a part ({}), found `{other}`",
                    names.join(", ")
                ));
            }
        }
    }
    if let Some(device) = on_device {
        return exit(device::run(&device));
    }
    let mut lines = Vec::new();
    let mut ok = true;
    for part in PARTS.iter().filter(|part| only.is_empty() || only.contains(&part.name)) {
        eprintln!("== {}\n   proves: {}\n   does not: {}", part.name, part.proves, part.not);
        let line = match (part.run)() {
            Outcome::Passed => "passed".to_owned(),
            Outcome::Failed => {
                ok = false;
                "FAILED".to_owned()
            }
            Outcome::Skipped(why) => {
                ok &= !require;
                format!("{}skipped: {why}", if require { "FAILED, " } else { "" })
            }
        };
        eprintln!("== {}: {line}", part.name);
        lines.push(format!("{:<12} {line}", part.name));
    }
    eprintln!("\n{}", lines.join("\n"));
    exit(ok)
}

fn exit(ok: bool) -> ExitCode {
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn refuse(message: &str) -> ExitCode {
    eprintln!("error: gpu-check: {message}");
    ExitCode::from(2)
}

/// What a command that must succeed writes to its standard output.
fn text(command: &mut Command) -> Result<String, String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}

fn passed(ok: bool) -> Outcome {
    if ok { Outcome::Passed } else { Outcome::Failed }
}

fn types_cuda() -> Outcome {
    let bin = match toolkit::pretend() {
        Ok(bin) => bin,
        Err(e) => return Outcome::Skipped(e.to_string()),
    };
    let mut check = Command::new(crate::cargo());
    check.args(["check", "--workspace", "--all-targets", "--features", GPU]);
    passed(crate::run(toolkit::with_toolkit(&mut check, &bin)))
}

fn types_metal() -> Outcome {
    const TARGET: &str = "aarch64-apple-darwin";
    let installed = text(Command::new("rustup").args(["target", "list", "--installed"])).unwrap_or_default();
    if !installed.lines().any(|line| line == TARGET) {
        return Outcome::Skipped(format!("no standard library for {TARGET}: rustup target add {TARGET}"));
    }
    let bin = match toolkit::pretend() {
        Ok(bin) => bin,
        Err(e) => return Outcome::Skipped(e.to_string()),
    };
    let mut check = Command::new(crate::cargo());
    check.args(["check", "--workspace", "--features", "taper/metal", "--target", TARGET]);
    for name in ["CC_aarch64_apple_darwin", "CXX_aarch64_apple_darwin", "AR_aarch64_apple_darwin"] {
        check.env(name, bin.join("other-cc"));
    }
    // An SDK that is asked for and never looked into.
    check.env("SDKROOT", "/").env("CRATE_CC_NO_DEFAULTS", "1");
    passed(crate::run(toolkit::with_toolkit(&mut check, &bin)))
}

/// The tests in `crates/optim/tests/device` that match; they skip by themselves unless tools are required.
fn tests(names: &[&str], variables: &[(&str, &std::path::Path)]) -> Outcome {
    let runs = |names: &[&str]| names.iter().any(|name| text(Command::new(name).arg("--version")).is_ok());
    if names.contains(&"clang_accepts") && !runs(&["clang++-19", "clang++-20", "clang++-21", "clang++"]) {
        return Outcome::Skipped("no clang++: install clang-19".into());
    }
    if env::var_os("CXX").is_none() && !runs(&["c++", "g++", "clang++"]) {
        return Outcome::Skipped("no C++ compiler".into());
    }
    let mut test = Command::new(crate::cargo());
    test.args([
        "test",
        "--quiet",
        "--release",
        "--workspace",
        "--test",
        "device",
        "--",
        "--nocapture",
        "--test-threads=1",
    ]);
    test.args(names).env("TAPER_REQUIRE_TOOLS", "1").envs(variables.iter().copied());
    passed(crate::run(&mut test))
}

fn nvcc() -> Outcome {
    match toolkit::wheels() {
        Ok(wheels) => tests(&["nvcc_compiles"], &[("TAPER_NVCC", &wheels.join("bin/nvcc"))]),
        Err(why) => Outcome::Skipped(why),
    }
}

fn nccl() -> Outcome {
    let made =
        toolkit::pretend().map_err(|e| e.to_string()).and_then(|bin| Ok((toolkit::standins(&bin)?, bin)));
    let (libraries, bin) = match made {
        Ok(made) => made,
        Err(why) => return Outcome::Skipped(why),
    };
    let mut test = Command::new(crate::cargo());
    test.args(["test", "--quiet", "--package", "taper-world", "--features", "nccl", "--test", "nccl"]);
    test.env("LD_LIBRARY_PATH", &libraries).env("LIBRARY_PATH", &libraries);
    passed(crate::run(toolkit::with_toolkit(&mut test, &bin)))
}

fn launch() -> Outcome {
    let made = toolkit::wheels().and_then(|wheels| {
        let bin = toolkit::pretend().map_err(|e| e.to_string())?;
        Ok((toolkit::libraries(&bin, &wheels)?, bin))
    });
    let (libraries, bin) = match made {
        Ok(made) => made,
        Err(why) => return Outcome::Skipped(why),
    };
    let test = |filter: &str, fault: Option<&str>| {
        let mut test = Command::new(crate::cargo());
        test.args(["test", "--quiet", "--workspace", "--features", GPU, "--test", "cuda", "--"]);
        test.args([filter, "--test-threads=1"])
            .env("TAPER_REQUIRE_TOOLS", "1")
            .env("LD_LIBRARY_PATH", &libraries)
            // For the linker: a build script that ran for a type check, without libraries, is not run again.
            .env("LIBRARY_PATH", &libraries);
        toolkit::with_toolkit(&mut test, &bin);
        match fault {
            // Caught by a test, not by a build that fails.
            Some(fault) => test.env("STANDIN_FAULT", fault).output().is_ok_and(|output| {
                output.status.success() || !String::from_utf8_lossy(&output.stdout).contains("running ")
            }),
            None => crate::run(&mut test),
        }
    };
    let mut ok = test("", None);
    if !ok {
        return Outcome::Failed;
    }
    for fault in ["swapped-arguments", "swapped-pointers", "wrong-stride", "off-by-one"] {
        let caught = !test("state_moves", Some(fault));
        eprintln!("   sown fault {fault}: {}", if caught { "caught" } else { "NOT CAUGHT" });
        ok &= caught;
    }
    passed(ok)
}
