//! The kernels' texts through the compilers of their languages, where they are there.
use crate::cases;
use crate::host::{Dialect, folder, tool};
use candle_core::DType;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};
use taper_optim::device::{CUDA_DIALECT, CUDA_OPTIONS, METAL_DIALECT, Source};
use taper_optim::pairs;

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

fn sources(dtypes: &[DType]) -> Vec<Source> {
    let norm = |dtype: &DType| Source::norm(*dtype);
    let of_rules = cases::all();
    let of_rules = of_rules.iter().flat_map(|case| dtypes.iter().map(|dtype| case.source(*dtype)));
    let wide = dtypes.iter().filter(|dtype| matches!(dtype, DType::F32 | DType::F64));
    let of_pairs = wide.flat_map(|dtype| pairs::examples().into_iter().map(|pair| (pair.source)(*dtype)));
    of_rules.chain(dtypes.iter().map(norm)).chain(of_pairs).collect()
}

fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let said = [output.stdout.clone(), output.stderr.clone()].concat();
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&said));
    output
}

/// How many fused multiply-adds a PTX file has.
fn fused(path: &Path) -> usize {
    std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .filter(|line| line.trim_start().starts_with("fma.rn.f"))
        .count()
}

/// Every kernel compiles for three generations of GPUs, without spills and without a fused multiply-add.
#[test]
fn nvcc_compiles_every_kernel_without_spills_or_fused_multiply_adds() {
    let Some(nvcc) = tool("TAPER_NVCC", &["nvcc"], "CUDA kernels through nvcc") else { return };
    let folder = folder("nvcc");
    let text = [CUDA_DIALECT, &Dialect::Cuda.file(&sources(&DTYPES), "", |_, text| text)].concat();
    std::fs::write(folder.join("kernels.cu"), text).unwrap();
    let command = |arch: &str, options: &[&str]| {
        let mut command = Command::new(&nvcc);
        command.current_dir(&folder).args(CUDA_OPTIONS).arg(format!("-arch={arch}")).args(options);
        command
    };
    for arch in ["sm_75", "sm_80", "sm_90"] {
        let cubin = ["--cubin", "-Xptxas", "-v", "kernels.cu", "-o", "kernels.cubin"];
        let output = run(&mut command(arch, &cubin));
        let mut registers: BTreeMap<String, u32> = BTreeMap::new();
        let mut kernel = String::new();
        for line in String::from_utf8_lossy(&output.stderr).lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            }
            if line.contains("spill stores") {
                let spills = "0 bytes spill stores, 0 bytes spill loads";
                assert!(line.contains(spills), "{arch} {kernel}: {line}");
            }
            if let Some((_, rest)) = line.split_once("Used ") {
                let used = rest.split(' ').next().and_then(|n| n.parse().ok()).unwrap();
                registers.insert(kernel.clone(), used);
            }
        }
        assert!(registers.len() > 100, "{registers:?}");
        let count = registers.len();
        // The norm has no step to speak of.
        registers.retain(|name, _| name.ends_with("_step") && !name.starts_with("norm"));
        for dtype in DTYPES.map(|dtype| format!("_{}_step", dtype.as_str())) {
            let of_dtype = registers.iter().filter(|(name, _)| name.ends_with(&dtype));
            let (Some((_, least)), Some((name, most))) =
                (of_dtype.clone().min_by_key(|(_, n)| **n), of_dtype.max_by_key(|(_, n)| **n))
            else {
                panic!("no kernels {dtype}")
            };
            eprintln!(
                "{arch}: {count} kernels without spills; registers of *{dtype}: {least} to {most} ({name})"
            );
        }
    }
    run(&mut command("compute_80", &["--ptx", "kernels.cu", "-o", "kernels.ptx"]));
    assert_eq!(fused(&folder.join("kernels.ptx")), 0);
    // The option is what does it.
    run(&mut command("compute_80", &["--fmad=true", "--ptx", "kernels.cu", "-o", "fused.ptx"]));
    assert!(fused(&folder.join("fused.ptx")) > 100);
    let _ = std::fs::remove_dir_all(&folder);
}

/// What C++ for OpenCL says about a Metal program.
fn check_metal(clang: &Path, folder: &Path, text: &str) -> Output {
    std::fs::write(folder.join("kernels.cl"), text).unwrap();
    let options =
        ["-x", "clcpp", "-cl-std=clc++2021", "-target", "spir64", "-fsyntax-only", "-Wno-unknown-attributes"];
    Command::new(clang).args(options).arg("kernels.cl").current_dir(folder).output().unwrap()
}

/// Metal's texts are sound C++ with address spaces; faults in them are not.
#[test]
fn clang_accepts_every_metal_kernel_and_no_sown_fault() {
    let names = ["clang++-19", "clang++-20", "clang++-21", "clang++"];
    let Some(clang) = tool("TAPER_CLANG", &names, "Metal kernels through clang") else { return };
    let folder = folder("clang");
    let head = [include_str!("metal_host.h"), METAL_DIALECT].concat();
    let programs = Dialect::Metal.file(&sources(&[DType::F32, DType::F16, DType::BF16]), "", |_, text| text);
    let output = check_metal(&clang, &folder, &[&*head, &programs].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    for (from, to) in [
        ("device ELEMENT *x", "ELEMENT *x"),
        ("device Row *row = rows + r;", "thread Row *row = rows + r;"),
        ("row->n;", "row->count;"),
        ("if (!(given & 1u)) return;", "given = 0; // in the address space `constant`"),
        (
            "device const Head *head [[buffer(0)]], device const Row *row",
            "device const Head *head [[buffer(0)]], device Head *row",
        ),
        ("const float of_loss", "const double of_loss"),
    ] {
        let source =
            cases::all().iter().find(|case| case.name().starts_with("decgd")).unwrap().source(DType::F32);
        let text = source.metal_program();
        assert!(text.contains(from), "the text no longer has `{from}`");
        let text = text.replace(from, to);
        assert!(
            !check_metal(&clang, &folder, &[&*head, &text].concat()).status.success(),
            "`{to}` was accepted"
        );
    }
    let _ = std::fs::remove_dir_all(&folder);
}
