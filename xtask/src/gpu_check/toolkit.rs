//! What stands in for a CUDA toolkit and a driver, and where compilers come from.
use super::text;
use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// NVIDIA's compilers as packages of PyPI: 13.x has nvcc itself. 0.4 GB.
const WHEELS: &[&str] = &[
    "nvidia-cuda-nvcc==13.4.92",
    "nvidia-cuda-nvrtc==13.4.92",
    "nvidia-cuda-runtime==13.4.92",
    "nvidia-cuda-crt==13.4.92",
    "nvidia-nvvm==13.4.92",
    "nvidia-cuda-cccl==13.3.5.0.6",
];

/// The folder of everything that a check makes, beside cargo's own.
pub fn folder() -> PathBuf {
    crate::target().join("gpu-check")
}

/// The folder of NVIDIA's compilers, installed into the user's cache if they are not there. `Err` says why not.
pub fn wheels() -> Result<PathBuf, String> {
    let venv = crate::cache().join("gpu-check-venv");
    let python = venv.join("bin/python");
    let run = |command: &mut Command| match command.output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
        Err(e) => Err(format!("{command:?}: {e}")),
    };
    if !python.exists() {
        run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    // Installing nothing takes a second and finishes an installation that was interrupted.
    run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "--no-deps"]).args(WHEELS))?;
    let script = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
    Ok(PathBuf::from(run(Command::new(&python).args(["-c", script]))?.trim()).join("nvidia/cu13"))
}

/// An executable script.
fn script(path: &Path, text: &str) -> std::io::Result<()> {
    fs::write(path, text)?;
    #[cfg(unix)]
    fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(())
}

/// A folder with an nvcc that makes nothing and a C compiler for other systems that makes nothing: enough to type-check.
pub fn pretend() -> std::io::Result<PathBuf> {
    let bin = folder().join("toolkit/bin");
    fs::create_dir_all(&bin)?;
    script(&bin.join("nvcc"), include_str!("nvcc.sh"))?;
    script(&bin.join("other-cc"), include_str!("cc.sh"))?;
    Ok(bin)
}

/// Points a cargo command at the stand-in toolkit.
pub fn with_toolkit<'a>(command: &'a mut Command, bin: &Path) -> &'a mut Command {
    let root = bin.parent().unwrap_or(bin);
    let path = env::var("PATH").unwrap_or_default();
    for name in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDA_TOOLKIT_ROOT_DIR"] {
        command.env(name, root);
    }
    let target = folder().join("target");
    command
        .env("PATH", format!("{}:{path}", bin.display()))
        .env("CUDA_COMPUTE_CAP", "80")
        .env("CARGO_TARGET_DIR", target)
}

/// Libraries that link and load without a GPU, with NVIDIA's own NVRTC beside the stand-ins. Returns the folders to load them from.
pub fn libraries(bin: &Path, wheels: &Path) -> Result<String, String> {
    let lib = standins(bin)?;
    link(&wheels.join("lib/libnvrtc.so.13"), &lib.join("libnvrtc.so"))?;
    Ok(format!("{}:{}", lib.display(), wheels.join("lib").display()))
}

/// The folder of the stand-in driver, the stand-in NCCL, and of libraries that do nothing.
pub fn standins(bin: &Path) -> Result<PathBuf, String> {
    let said = |e: std::io::Error| e.to_string();
    let lib = bin.parent().unwrap_or(bin).join("lib64");
    fs::create_dir_all(&lib).map_err(said)?;
    let cudarc = source_of("cudarc")?;
    let missing = "#include <stdio.h>\nstatic int missing(const char *name) {\n  fprintf(stderr, \"stand-in: %s is not there\\n\", name);\n  return 801;\n}\n";
    for (module, prefix, library) in [
        ("driver", "cu", "cuda"),
        ("nccl", "nccl", "nccl"),
        ("cublas", "cublas", "cublas"),
        ("cublaslt", "cublasLt", "cublasLt"),
        ("curand", "curand", "curand"),
        ("runtime", "cuda", "cudart"),
    ] {
        let standin = match library {
            "cuda" => Some(include_str!("standin.c")),
            "nccl" => Some(include_str!("nccl.c")),
            _ => None,
        };
        let mut c = String::from(standin.map_or("", |_| missing));
        for name in functions(&cudarc.join("src").join(module).join("sys"), prefix).map_err(said)? {
            // Some have their result's star before the name.
            let defined =
                |text: &str| text.contains(&format!(" {name}(")) || text.contains(&format!("*{name}("));
            match standin {
                Some(text) if defined(text) => {}
                Some(_) => c += &format!("int {name}(void) {{ return missing(\"{name}\"); }}\n"),
                None => c += &format!("int {name}(void) {{ return 0; }}\n"),
            }
        }
        fs::write(lib.join(format!("{library}.c")), c).map_err(said)?;
        let file = if library == "cuda" { "libcuda.so.1".to_owned() } else { format!("lib{library}.so") };
        let mut cc = Command::new("cc");
        cc.current_dir(&lib).args(["-O1", "-w", "-shared", "-fPIC", "-o", &file, &format!("{library}.c")]);
        if let Some(text) = standin {
            let own = format!("standin-{library}.c");
            fs::write(lib.join(&own), text).map_err(said)?;
            cc.args([&own, "-ldl"]);
        }
        text(cc.arg(format!("-Wl,-soname,{file}")))?;
    }
    link(&lib.join("libcuda.so.1"), &lib.join("libcuda.so"))?;
    Ok(lib)
}

fn link(from: &Path, to: &Path) -> Result<(), String> {
    let _ = fs::remove_file(to);
    #[cfg(unix)]
    std::os::unix::fs::symlink(from, to).map_err(|e| format!("{}: {e}", to.display()))?;
    Ok(())
}

/// The sources of a dependency, as cargo has them.
fn source_of(package: &str) -> Result<PathBuf, String> {
    let metadata =
        text(Command::new(crate::cargo()).args(["metadata", "--format-version", "1", "--all-features"]))?;
    let places = metadata.split("\"manifest_path\":\"").skip(1).filter_map(|rest| rest.split('"').next());
    let named = |path: &&str| {
        let folder = Path::new(path).parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
        folder.strip_prefix(package).is_some_and(|rest| rest.starts_with('-'))
    };
    let manifest =
        places.into_iter().find(named).ok_or_else(|| format!("no {package} among the dependencies"))?;
    Ok(Path::new(manifest).parent().unwrap_or(Path::new("")).to_path_buf())
}

/// The names of the functions that bindings in `folder` declare.
fn functions(folder: &Path, prefix: &str) -> std::io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = fs::read_to_string(path)?;
        for rest in text.split("fn ").skip(1) {
            let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            let upper = name
                .strip_prefix(prefix)
                .and_then(|rest| rest.chars().next())
                .is_some_and(|c| c.is_ascii_uppercase());
            if upper {
                names.insert(name);
            }
        }
    }
    Ok(names)
}
