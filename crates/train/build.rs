//! Puts the repository's recipes and layers into the library, where it is built from its repository: a package has none.
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).unwrap_or_default();
    // Asked for now: a build folder may have come from another checkout.
    let root = variable("CARGO_MANIFEST_DIR").join("../..");
    let mut files = Vec::new();
    for folder in ["configs", "recipes"] {
        println!("cargo::rerun-if-changed={}", root.join(folder).display());
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut code = String::from("&[\n");
    for file in files {
        let name = file.strip_prefix(&root).unwrap_or(&file).to_string_lossy().replace('\\', "/");
        code += &format!("    ({name:?}, include_str!({:?})),\n", file.canonicalize()?);
    }
    code += "]\n";
    fs::write(variable("OUT_DIR").join("inside.rs"), code)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|ending| ending == "yaml" || ending == "txt") {
            files.push(path);
        }
    }
    Ok(())
}
