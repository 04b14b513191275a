//! The device under test: a real one, or the stand-in driver of `cargo xtask gpu-check`, whose launches run host builds of
//! the kernels and which counts what it is asked for.
use crate::host::{self, Dialect};
use candle_core::{DType, Device};
use serde_json::{Map, Value};
use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::process::Command;
use taper_optim::device::{CUDA_DIALECT, Source};
use taper_optim::{Registry, rules};

/// What the stand-in counts.
#[derive(Clone, Copy)]
pub enum Counter {
    Launches = 0,
    /// Synchronisations, copies to the host, and frees that are not in the order of a stream.
    Waits = 1,
    /// Waits for one event.
    Events = 2,
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A function of the stand-in; a real driver has none of that name.
fn function(name: &CStr) -> Option<*mut c_void> {
    // SAFETY: a null handle asks for the first symbol of that name in the process; the name ends with a nul.
    let at = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

impl Counter {
    /// All counts so far, on the stand-in.
    pub fn all() -> Option<[u64; 3]> {
        let at = function(c"standin_count")?;
        // SAFETY: the stand-in declares `unsigned long long standin_count(int)`.
        let count: extern "C" fn(c_int) -> u64 = unsafe { std::mem::transmute(at) };
        Some([count(0), count(1), count(2)])
    }
}

/// The first CUDA device; without one a line that says so, or a failure where one is required.
pub fn device(cases: &[(&'static str, Map<String, Value>)], dtypes: &[DType]) -> Option<Device> {
    if let Some(at) = function(c"standin_kernels") {
        let library = kernels(cases, dtypes)?;
        // SAFETY: the stand-in declares `void standin_kernels(const char *)` and copies the path.
        let open: extern "C" fn(*const c_char) = unsafe { std::mem::transmute(at) };
        open(std::ffi::CString::new(library).ok()?.as_ptr());
    }
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(e) => {
            let line =
                format!("skipped: no CUDA device: {}", e.to_string().lines().next().unwrap_or_default());
            assert!(env::var_os("TAPER_REQUIRE_TOOLS").is_none(), "{line}");
            eprintln!("{line}");
            None
        }
    }
}

/// The program of the rule behind a name.
fn program(name: &'static str, buffers: usize, dtype: DType) -> Source {
    use taper_optim::rule::Rule;
    let asked = (name, buffers, dtype);
    fn of<R: Rule>((name, buffers, dtype): (&'static str, usize, DType)) -> Option<Source> {
        R::names().iter().any(|(info, _)| info.name == name).then(|| Source::of::<R>(name, buffers, dtype))?
    }
    of::<rules::adabelief::AdaBeliefRule>(asked)
        .or_else(|| of::<rules::adabound::AdaBoundRule>(asked))
        .or_else(|| of::<rules::adadelta::AdaDeltaRule>(asked))
        .or_else(|| of::<rules::adagd::AdaGdRule>(asked))
        .or_else(|| of::<rules::adagrad::AdaGradRule>(asked))
        .or_else(|| of::<rules::adam::AdamRule>(asked))
        .or_else(|| of::<rules::adamax::AdamaxRule>(asked))
        .or_else(|| of::<rules::adan::AdanRule>(asked))
        .or_else(|| of::<rules::ademamix::AdEmaMixRule>(asked))
        .or_else(|| of::<rules::adopt::AdoptRule>(asked))
        .or_else(|| of::<rules::aegd::AegdRule>(asked))
        .or_else(|| of::<rules::decadam::DecAdamRule>(asked))
        .or_else(|| of::<rules::decgd::DecGdRule>(asked))
        .or_else(|| of::<rules::lars::LarsRule>(asked))
        .or_else(|| of::<rules::lion::LionRule>(asked))
        .or_else(|| of::<rules::nadam::NAdamRule>(asked))
        .or_else(|| of::<rules::nadamw::NAdamWRule>(asked))
        .or_else(|| of::<rules::padam::PAdamRule>(asked))
        .or_else(|| of::<rules::radam::RAdamRule>(asked))
        .or_else(|| of::<rules::rmsprop::RmsPropRule>(asked))
        .or_else(|| of::<rules::sf_adamw::SfAdamWRule>(asked))
        .or_else(|| of::<rules::sf_sgd::SfSgdRule>(asked))
        .or_else(|| of::<rules::sgd::SgdRule>(asked))
        .or_else(|| of::<rules::yogi::YogiRule>(asked))
        .unwrap()
}

/// A library with a host build of every kernel that the tests launch, to be called with the arguments of a launch.
fn kernels(cases: &[(&'static str, Map<String, Value>)], dtypes: &[DType]) -> Option<String> {
    let compiler = host::tool("CXX", &["c++", "g++", "clang++"], "the stand-in's kernels")?;
    let registry = Registry::builtin();
    let mut sources = Vec::new();
    for dtype in dtypes {
        sources.push(Source::norm(*dtype));
        for (name, config) in cases {
            let buffers = registry.get(name).unwrap().buffers(config).unwrap().len();
            sources.push(program(name, buffers, *dtype));
        }
    }
    let folder = host::folder(&format!("standin-{}", dtypes.len()));
    let text = [
        include_str!("../device/cuda_host.h"),
        include_str!("standin_call.h"),
        CUDA_DIALECT,
        &Dialect::Cuda.file(&sources, "CALLABLE(begin) CALLABLE(step)\n#ifdef REDUCES\nCALLABLE(lanes) CALLABLE(chunks) CALLABLE(total)\n#endif", |_, text| text),
    ];
    std::fs::write(folder.join("kernels.cpp"), text.concat()).unwrap();
    let flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC"];
    let output = Command::new(compiler)
        .args(flags)
        .args(["kernels.cpp", "-o", "kernels.so"])
        .current_dir(&folder)
        .output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(folder.join("kernels.so").display().to_string())
}
