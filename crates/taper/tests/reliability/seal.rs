//! A finished run is believed as far as its seals go, and they go everywhere.
use crate::common::{LSTM, MLP, copy, files, message, scratch};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn taper(args: &[&str], run: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_taper")).args(args).arg(run).output().unwrap()
}

#[test]
fn no_byte_can_be_changed_unseen() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    let mut all = files(&run);
    for name in ["manifest.json", "timing.jsonl"] {
        all.insert(name.into(), fs::read(run.join(name)).unwrap());
    }
    // It is drawn from the metrics, again and again.
    all.remove("curves.svg");
    let steps = |name: &str| name.split('/').nth(1)?.strip_prefix("step-")?.parse::<u64>().ok();
    let last = all.keys().filter_map(|name| steps(name)).max();
    for (name, bytes) in &all {
        for at in [0, bytes.len() / 3, bytes.len() / 2, bytes.len() - 1] {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            fs::write(run.join(name), changed).unwrap();
            let verified = taper(&["verify", "--quiet", "--steps", "4"], &run);
            let said = message(&verified) + &String::from_utf8_lossy(&verified.stdout);
            assert!(!verified.status.success(), "byte {at} of {name} was verified: {said}");
            // `train` names it as well, and refuses where the result stands on it.
            let code = i32::from(steps(name).is_none_or(|step| Some(step) == last));
            let output = MLP.train(folder.path()).output().unwrap();
            assert_eq!(output.status.code(), Some(code), "byte {at} of {name}: {}", message(&output));
            assert!(message(&output).contains(name.rsplit('/').next().unwrap()), "{}", message(&output));
            fs::write(run.join(name), bytes).unwrap();
        }
    }
    assert!(MLP.train(folder.path()).output().unwrap().status.success());
}

#[test]
fn a_report_says_what_was_changed() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    let path = run.join("metrics.jsonl");
    let text = fs::read_to_string(&path).unwrap();
    let at = text.find("\"loss\":").unwrap() + "\"loss\":".len();
    let mut changed = text.clone().into_bytes();
    changed[at] ^= 1;
    fs::write(&path, changed).unwrap();
    let report = taper(&["report"], &run);
    assert!(message(&report).contains("metrics.jsonl: sha256 was"), "{}", message(&report));
}

#[test]
fn a_sweep_takes_no_other_runs_result() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    let other = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command.current_dir(folder.path()).arg("sweep").arg("mlp.yaml").arg("--runs").arg(folder.path());
        command.args(["--set", "seed=2"]).args(args).output().unwrap()
    };
    let name = String::from_utf8(other(&["--dry-run"]).stdout).unwrap();
    let name = name.split_whitespace().next().unwrap().to_owned();
    copy(&run, &folder.path().join(&name));
    let swept = other(&["--dry-run"]);
    assert!(String::from_utf8_lossy(&swept.stdout).contains(&name), "the result of seed 1 counts for seed 2");
    let swept = other(&[]);
    assert_eq!(swept.status.code(), Some(1), "{}", message(&swept));
    assert!(message(&swept).contains("belongs to the recipe"), "{}", message(&swept));
}

#[test]
fn a_run_whose_files_went_away_is_no_success() {
    let folder = scratch();
    let mut child = LSTM
        .train(folder.path())
        .args(["--set", "train.epochs=60"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let lines =
        |run: &Path| fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count();
    let run = loop {
        match LSTM.find(folder.path()) {
            Some(run) if lines(&run) > 0 && run.join("checkpoints").exists() => break run,
            _ => assert!(child.try_wait().unwrap().is_none(), "it ended too soon"),
        }
        std::thread::yield_now();
    };
    let aside = scratch();
    fs::rename(&run, aside.path().join("run")).or_else(|_| fs::remove_dir_all(&run)).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", message(&output));
    assert!(!run.join("summary.json").exists());
}
