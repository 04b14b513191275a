//! Who listens, and whether a picture can be drawn, is nothing to a training.
use crate::common::{MLP, message, scratch};
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// The command with all it has to say.
fn talkative(runs: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    drop(MLP.train(runs));
    command.current_dir(runs).args(["train", "mlp.yaml", "--runs"]).arg(runs).args(["--log", "debug"]);
    command
}

fn is_finished(runs: &Path) -> bool {
    let summary = fs::read_to_string(MLP.folder(runs).join("summary.json")).unwrap_or_default();
    summary.contains("\"status\": \"finished\"")
}

#[test]
fn a_full_or_closed_output_ends_no_training() {
    let full = || Stdio::from(OpenOptions::new().write(true).open("/dev/full").unwrap());
    let folder = scratch();
    let runs = folder.path().join("full");
    fs::create_dir(&runs).unwrap();
    let status = talkative(&runs).stderr(full()).stdout(Stdio::null()).status().unwrap();
    assert!(is_finished(&runs) && status.success(), "{status}");

    let runs = folder.path().join("closed");
    fs::create_dir(&runs).unwrap();
    let mut child = talkative(&runs).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    drop((child.stderr.take(), child.stdout.take()));
    let status = child.wait().unwrap();
    assert!(is_finished(&runs) && status.success(), "{status}");
}

#[test]
fn a_picture_that_cannot_be_drawn_is_no_failure() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    fs::remove_file(run.join("curves.svg")).unwrap();
    fs::create_dir(run.join("curves.svg")).unwrap();
    let output = MLP.train(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", message(&output));
    assert!(message(&output).contains("curves.svg"), "{}", message(&output));
}

#[test]
fn a_folder_that_is_no_utf8_is_printed_as_it_is() {
    let folder = scratch();
    let runs = folder.path().join(OsStr::from_bytes(b"runs-\xff"));
    let output = MLP.train_elsewhere(folder.path(), &runs).output().unwrap();
    assert!(output.status.success(), "{}", message(&output));
    let printed = output.stdout.strip_suffix(b"\n").unwrap();
    assert!(Path::new(OsStr::from_bytes(printed)).join("summary.json").is_file(), "{printed:?}");
}
