//! Host builds of the kernels' own texts, with the address sanitizer.
use crate::job::Job;
use std::collections::BTreeSet;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use taper_optim::device::{CUDA_DIALECT, METAL_DIALECT, Source};
use taper_optim::rule::SUMS;

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Dialect {
    Cuda,
    Metal,
}

impl Dialect {
    pub fn program(self, source: &Source) -> String {
        match self {
            Self::Cuda => source.cuda_program(),
            Self::Metal => source.metal_program(),
        }
    }

    /// One file with all programs, each in a namespace with what `after` adds to it.
    pub fn file(self, sources: &[Source], after: &str, change: impl Fn(&Source, String) -> String) -> String {
        const MACROS: &[&str] = &[
            "NAME",
            "REAL",
            "REAL_IS_DOUBLE",
            "ELEMENT",
            "WIDEN",
            "NARROW",
            "BUFFERS",
            "SLOTS",
            "SUMS",
            "PART",
            "PARTS",
            "LANES",
            "FOLLOWS_LOSS",
            "REDUCES",
        ];
        let undefine: String = MACROS.iter().map(|name| format!("#undef {name}\n")).collect();
        let mut text = String::new();
        let mut seen = BTreeSet::new();
        for source in sources.iter().filter(|source| seen.insert(source.prefix())) {
            let program = change(source, self.program(source));
            text += &format!("namespace {} {{\n{program}\n{after}\n}}\n{undefine}", source.prefix());
        }
        text
    }
}

/// A folder of this test's own.
pub fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("device-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// The first of `names` that runs; without one, a line that says so, or a failure where tools are required.
pub fn tool(variable: &str, names: &[&str], for_what: &str) -> Option<PathBuf> {
    let given = env::var_os(variable).map(PathBuf::from);
    let found = given.into_iter().chain(names.iter().map(PathBuf::from)).find(|name| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    });
    if found.is_none() {
        let line = format!("skipped: {for_what}: none of {names:?} runs, and {variable} is not set");
        assert!(env::var_os("TAPER_REQUIRE_TOOLS").is_none(), "{line}");
        eprintln!("{line}");
    }
    found
}

/// A host build: an executable that runs jobs.
pub struct Build {
    folder: PathBuf,
}

/// What a job ended with.
#[derive(Debug, PartialEq)]
pub enum Ended {
    /// The bytes it wrote.
    With(Vec<u8>),
    /// What the sanitizer or the runner said.
    Aborted(String),
}

impl Build {
    /// Of all `sources`, `change` applied to each program. `None` where no C++ compiler is there.
    pub fn new(
        name: &str,
        dialect: Dialect,
        sources: &[Source],
        change: impl Fn(&Source, String) -> String,
    ) -> Option<Self> {
        let compiler = tool("CXX", &["c++", "g++", "clang++"], "host builds of the kernels")?;
        let folder = folder(name);
        let (shim, words, runner) = match dialect {
            Dialect::Cuda => (include_str!("cuda_host.h"), CUDA_DIALECT, include_str!("cuda_runner.h")),
            Dialect::Metal => (include_str!("metal_host.h"), METAL_DIALECT, include_str!("metal_runner.h")),
        };
        let mut text = [include_str!("files.h"), shim, words].concat();
        text += &dialect.file(sources, runner, change);
        text += "int main(int, char **argv) {\n  input = std::fopen(argv[1], \"rb\"), output = std::fopen(argv[2], \"wb\");\n";
        let names: BTreeSet<String> = sources.iter().map(Source::prefix).collect();
        for name in names {
            text += &format!("  if (!std::strcmp(argv[3], \"{name}\")) {name}::run();\n");
        }
        text += "  return std::fclose(output);\n}\n";
        std::fs::write(folder.join("kernels.cpp"), text).unwrap();
        let flags = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fsanitize=address", "-w"];
        let output = Command::new(compiler)
            .args(flags)
            .args(["kernels.cpp", "-o", "kernels"])
            .current_dir(&folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(Self { folder })
    }

    pub fn run(&self, source: &Source, job: &Job) -> Ended {
        self.execute(source, job, false)
    }

    /// The sums of a reduction.
    pub fn sums(&self, source: &Source, job: &Job) -> [f64; SUMS] {
        let Ended::With(bytes) = self.execute(source, job, true) else { panic!("the reduction was aborted") };
        let (sums, _) = bytes.as_chunks::<8>();
        [f64::from_le_bytes(sums[0]), f64::from_le_bytes(sums[1])]
    }

    fn execute(&self, source: &Source, job: &Job, only_reduce: bool) -> Ended {
        let path = |name: &str| self.folder.join(name);
        std::fs::write(path("in"), job.bytes(only_reduce, source.buffers)).unwrap();
        let output = Command::new(path("kernels"))
            .args([path("in"), path("out"), PathBuf::from(source.prefix())])
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .output()
            .unwrap();
        match output.status.success() {
            true => Ended::With(std::fs::read(path("out")).unwrap()),
            false => Ended::Aborted(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
}

impl Drop for Build {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}
