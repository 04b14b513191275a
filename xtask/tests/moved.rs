//! `cargo xtask` in a checkout that was copied or moved after it was built: its own sources, its own target folder, and on Unix
//! the process becomes `taper`.
#![cfg(unix)]
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

fn program(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn a_moved_checkout_builds_and_becomes_its_own_taper() {
    let folder = tempfile::tempdir().unwrap();
    let checkout = folder.path().canonicalize().unwrap().join("moved");
    let xtask = checkout.join("target/debug/xtask");
    fs::create_dir_all(xtask.parent().unwrap()).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_xtask"), &xtask).unwrap();
    fs::create_dir_all(checkout.join("xtask")).unwrap();
    fs::write(checkout.join("xtask/Cargo.toml"), "").unwrap();
    // What cargo was asked, and a `taper` that says who it is.
    let cargo = checkout.join("cargo");
    program(&cargo, "#!/bin/sh\necho \"$@\" > \"$0.asked\"\n");
    program(&checkout.join("target/release/taper"), "#!/bin/sh\necho $$ \"$@\"\nexit 7\n");

    let mut command = Command::new(&xtask);
    command.args(["train", "recipe.yaml"]).env("CARGO", &cargo).current_dir(folder.path());
    let by_cargo = checkout.join("xtask");
    for manifest_dir in [None, Some(by_cargo.as_path())] {
        match manifest_dir {
            None => command.env_remove("CARGO_MANIFEST_DIR"),
            Some(path) => command.env("CARGO_MANIFEST_DIR", path),
        };
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let id = child.id();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(7), "the exit code is taper's");
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(said, format!("{id} train recipe.yaml\n"), "the process became the checkout's own taper");
        let asked = fs::read_to_string(checkout.join("cargo.asked")).unwrap();
        let manifest = format!("--manifest-path {}", checkout.join("Cargo.toml").display());
        assert!(asked.contains(&manifest), "{asked}");
    }
}
