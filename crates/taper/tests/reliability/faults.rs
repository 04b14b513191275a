//! Damaged files and disks that do not take more: the previous checkpoint or a clear message, never a silent restart
//! from zero, never success without a file.
use crate::common::{
    LSTM, MLP, RESNET, assert_equal, copy, files, message, scratch, sizes_of_a_disk, within,
};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A run that was killed with three checkpoints, and what it must come to.
struct Killed {
    folder: TempDir,
    whole: BTreeMap<String, Vec<u8>>,
    /// Newest first.
    steps: Vec<u64>,
    copies: std::cell::Cell<usize>,
}

impl Killed {
    fn new() -> Self {
        let folder = scratch();
        let whole = files(&MLP.finish(&folder.path().join("whole")));
        let run = MLP.crash(&folder.path().join("killed"), "checkpoint-before-prune:5");
        let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
        let entries = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| name(entry.unwrap()));
        let mut steps: Vec<u64> = entries.map(|name| name["step-".len()..].parse().unwrap()).collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        assert!(steps.len() >= 3, "{steps:?}");
        Self { folder, whole, steps, copies: 0.into() }
    }

    /// A copy of it, damaged: the folder of runs and the run's own.
    fn damaged(&self, damage: impl FnOnce(&Path)) -> (PathBuf, PathBuf) {
        self.copies.set(self.copies.get() + 1);
        let runs = self.folder.path().join(self.copies.get().to_string());
        copy(&self.folder.path().join("killed"), &runs);
        let run = MLP.folder(&runs);
        damage(&run);
        (runs, run)
    }

    /// Goes on from another checkpoint, says why, and comes to the same end.
    #[track_caller]
    fn recovers(&self, what: &str, said: &[&str], damage: impl FnOnce(&Path)) {
        let (runs, run) = self.damaged(damage);
        let output = MLP.train(&runs).output().unwrap();
        let message = message(&output);
        assert!(output.status.success(), "{what}: {message}");
        said.iter().for_each(|part| assert!(message.contains(part), "{what}: no `{part}` in {message}"));
        assert_equal(&run, &self.whole, what);
    }

    /// Stops with a message and leaves the metrics as they are.
    #[track_caller]
    fn refuses(&self, what: &str, said: &[&str], damage: impl FnOnce(&Path)) {
        let (runs, run) = self.damaged(damage);
        let before = fs::read(run.join("metrics.jsonl")).ok();
        let output = MLP.train(&runs).output().unwrap();
        let message = message(&output);
        assert_eq!(output.status.code(), Some(1), "{what}: {message}");
        assert!(output.stdout.is_empty(), "{what}: it printed a folder as if it had trained");
        said.iter().for_each(|part| assert!(message.contains(part), "{what}: no `{part}` in {message}"));
        assert_eq!(fs::read(run.join("metrics.jsonl")).ok(), before, "{what}: it cut the metrics");
    }

    fn newest(&self, run: &Path) -> PathBuf {
        self.checkpoint(run, 0)
    }

    fn checkpoint(&self, run: &Path, at: usize) -> PathBuf {
        run.join(format!("checkpoints/step-{}", self.steps[at]))
    }
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Bytes of `metrics.jsonl` that a checkpoint vouches for.
fn vouched(checkpoint: &Path) -> usize {
    let state: serde_json::Value =
        serde_json::from_slice(&fs::read(checkpoint.join("state.json")).unwrap()).unwrap();
    state["metrics_bytes"].as_u64().unwrap() as usize
}

/// The summary that an interrupt would have left.
fn interrupted(summary: &[u8]) -> Vec<u8> {
    let mut summary: serde_json::Value = serde_json::from_slice(summary).unwrap();
    summary["status"] = "interrupted".into();
    reseal(summary)
}

/// A file with the checksum that belongs to what it says.
pub fn reseal(mut value: serde_json::Value) -> Vec<u8> {
    value["sha256"] = "".into();
    let sum = Sha256::digest(serde_json::to_vec_pretty(&value).unwrap());
    value["sha256"] = sum.iter().map(|b| format!("{b:02x}")).collect::<String>().into();
    serde_json::to_vec_pretty(&value).unwrap()
}

#[test]
fn a_damaged_checkpoint_is_skipped() {
    let killed = Killed::new();
    for file in ["model.safetensors", "optimizer.safetensors", "state.json"] {
        let skipped = ["skipping a checkpoint", file];
        let length =
            fs::metadata(killed.newest(&MLP.folder(&killed.folder.path().join("killed"))).join(file));
        let length = length.unwrap().len() as usize;
        let alter = |change: &dyn Fn(&mut Vec<u8>)| {
            let what = format!("damage to {file}");
            killed.recovers(&what, &skipped, |run| edit(&killed.newest(run).join(file), change));
        };
        alter(&|bytes| bytes.truncate(length / 2));
        alter(&|bytes| bytes.clear());
        // One bit, at the start, in the middle and at the end.
        for at in [1, length / 3, length / 2, length - 3] {
            alter(&move |bytes| bytes[at] ^= 1);
        }
        killed.recovers(&format!("{file} gone"), &skipped, |run| {
            fs::remove_file(killed.newest(run).join(file)).unwrap();
        });
    }
    killed.recovers("an empty folder of a checkpoint", &["skipping a checkpoint", "state.json"], |run| {
        fs::create_dir(run.join("checkpoints/step-99999")).unwrap();
    });
    killed.recovers("a file in place of a checkpoint", &["skipping a checkpoint"], |run| {
        fs::remove_dir_all(killed.newest(run)).unwrap();
        fs::write(killed.newest(run), "").unwrap();
    });
    killed.recovers("a checkpoint under another's name", &["is the checkpoint of step"], |run| {
        fs::remove_dir_all(killed.newest(run)).unwrap();
        copy(&killed.checkpoint(run, 1), &killed.newest(run));
    });
    killed.recovers("the newest two damaged", &["skipping a checkpoint"], |run| {
        (0..2).for_each(|at| {
            edit(&killed.checkpoint(run, at).join("model.safetensors"), |bytes| bytes[999] ^= 8)
        });
    });
    killed.recovers("what a crash left", &[], |run| {
        fs::create_dir_all(run.join(".checkpoints.tmp/step-30")).unwrap();
        fs::write(run.join(".checkpoints.tmp/step-30/model.safetensors"), "half").unwrap();
        fs::write(run.join(".summary.json.1.tmp"), "half").unwrap();
    });
}

#[test]
fn without_a_checkpoint_a_run_does_not_start_again_in_silence() {
    let killed = Killed::new();
    killed.refuses("all damaged", &["holds no checkpoint that can be used", "start again"], |run| {
        let all = 0..killed.steps.len();
        all.for_each(|at| {
            edit(&killed.checkpoint(run, at).join("model.safetensors"), |bytes| bytes[999] ^= 8)
        });
    });
    killed.refuses("an empty folder", &["is empty, though the run had a checkpoint"], |run| {
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        fs::create_dir(run.join("checkpoints")).unwrap();
    });
    killed.refuses("no folder after an interrupt", &["is gone, though the run had a checkpoint"], |run| {
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        fs::write(run.join("summary.json"), interrupted(&killed.whole["summary.json"])).unwrap();
    });
    killed.refuses("a file in place of the folder", &["checkpoints"], |run| {
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        fs::write(run.join("checkpoints"), "").unwrap();
    });
    // Nobody can tell this from a run that was killed before its first checkpoint.
    killed.recovers(
        "no folder after a kill",
        &["killed before its first checkpoint: starting again"],
        |run| {
            fs::remove_dir_all(run.join("checkpoints")).unwrap();
        },
    );
    // Whole, but of a run with another rate.
    let other = killed.folder.path().join("other");
    MLP.train(&other).args(["--set", "optimizer.lr=0.02"]).status().unwrap();
    let other = MLP.folder(&other);
    killed.refuses("the checkpoints of another recipe", &["belongs to the recipe", "this run is"], |run| {
        fs::remove_dir_all(run.join("checkpoints")).unwrap();
        copy(&other.join("checkpoints"), &run.join("checkpoints"));
        fs::copy(other.join("metrics.jsonl"), run.join("metrics.jsonl")).unwrap();
    });
}

#[test]
fn metrics_that_are_not_those_of_the_checkpoint_are_noticed() {
    let killed = Killed::new();
    let original = MLP.folder(&killed.folder.path().join("killed"));
    let newest = vouched(&killed.newest(&original));
    let previous = vouched(&killed.checkpoint(&original, 1));
    let oldest = vouched(&killed.checkpoint(&original, killed.steps.len() - 1));
    assert!(oldest < previous && previous < newest);
    // One flipped byte, wherever it is: the other file has the line.
    for at in [9, oldest / 2, previous + 12, newest - 2] {
        killed.recovers(&format!("byte {at} changed"), &["its copy is not"], |run| {
            edit(&run.join("metrics.jsonl"), |bytes| bytes[at] ^= 1)
        });
        killed.recovers(&format!("byte {at} of the copy changed"), &[], |run| {
            edit(&run.join(".metrics.copy"), |bytes| bytes[at] ^= 1)
        });
    }
    killed.recovers("no metrics but the copy", &["its copy is not"], |run| {
        fs::remove_file(run.join("metrics.jsonl")).unwrap();
    });
    // From here on there is no copy.
    fs::remove_file(original.join(".metrics.copy")).unwrap();
    let longer = |bytes: &mut Vec<u8>| bytes.extend(b"{\"step\": 999, half a line");
    killed.recovers("longer", &[], |run| edit(&run.join("metrics.jsonl"), longer));
    let shorter = |bytes: &mut Vec<u8>| bytes.truncate(newest - 1);
    killed.recovers("shorter", &["skipping", "bytes of metrics.jsonl, found"], |run| {
        edit(&run.join("metrics.jsonl"), shorter)
    });
    let changed = |bytes: &mut Vec<u8>| bytes[previous + 12] ^= 1;
    killed.recovers("changed", &["skipping", "not those it was written with"], |run| {
        edit(&run.join("metrics.jsonl"), changed)
    });
    let gone = |bytes: &mut Vec<u8>| bytes.truncate(oldest / 2);
    killed.refuses("much shorter", &["bytes of metrics.jsonl, found", "start again"], |run| {
        edit(&run.join("metrics.jsonl"), gone)
    });
    let first = |bytes: &mut Vec<u8>| bytes[9] ^= 1;
    killed.refuses("changed at its start", &["not those it was written with"], |run| {
        edit(&run.join("metrics.jsonl"), first)
    });
    killed.refuses("no file", &["bytes of metrics.jsonl, found 0"], |run| {
        fs::remove_file(run.join("metrics.jsonl")).unwrap();
    });
    killed.refuses("a folder", &["metrics.jsonl"], |run| {
        fs::remove_file(run.join("metrics.jsonl")).unwrap();
        fs::create_dir(run.join("metrics.jsonl")).unwrap();
    });
    killed.recovers("events damaged", &[], |run| {
        fs::write(run.join("events.out.tfevents.0.taper"), "x").unwrap()
    });
    // The recipe comes from the command line: what is in the folder is a copy.
    killed.recovers("recipe.yaml edited", &[], |run| {
        let path = run.join("recipe.yaml");
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("lr: 0.01"), "{text}");
        fs::write(path, text.replace("lr: 0.01", "lr: 0.02")).unwrap();
    });
}

#[test]
fn a_finished_run_is_believed_only_while_its_files_agree() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    let whole = files(&run);
    let check = |what: &str, file: &str, said: &str, change: &dyn Fn(&mut Vec<u8>)| {
        edit(&run.join(file), change);
        let output = MLP.train(folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{what}: {}", message(&output));
        assert!(message(&output).contains(said), "{what}: no `{said}` in {}", message(&output));
        fs::write(run.join(file), &whole[file]).unwrap();
    };
    check("cut", "summary.json", "remove it, and the run goes on", &|bytes| bytes.truncate(100));
    check("empty", "summary.json", "remove it, and the run goes on", &|bytes| bytes.clear());
    check("one bit", "summary.json", "sha256 was", &|bytes| {
        let digit =
            bytes.windows(5).position(|part| part == b": 0.5" || part == b": 0.2" || part == b": 0.3");
        bytes[digit.unwrap() + 4] ^= 1;
    });
    let alter = |key: &'static str| {
        move |bytes: &mut Vec<u8>| {
            let mut summary: serde_json::Value = serde_json::from_slice(bytes).unwrap();
            summary[key] = if key == "id" { "0123456789ab".into() } else { serde_json::json!({}) };
            *bytes = reseal(summary);
        }
    };
    check("other values", "summary.json", "is not the summary of metrics.jsonl", &alter("last"));
    check("another id", "summary.json", "belongs to the recipe", &alter("id"));
    check("metrics cut", "metrics.jsonl", "is not the summary of metrics.jsonl", &|bytes| {
        bytes.truncate(bytes.len() / 2);
    });
    check("metrics damaged", "metrics.jsonl", "line 1", &|bytes| bytes[0] = b'[');
    fs::remove_file(run.join("summary.json")).unwrap();
    assert_equal(&MLP.finish(folder.path()), &whole, "the loss of its summary");
}

#[test]
fn a_full_disk_stops_a_run_with_a_message_and_loses_nothing() {
    for net in [&MLP, &RESNET, &LSTM] {
        let folder = scratch();
        let whole = files(&net.finish(&folder.path().join("whole")));
        let runs = folder.path().join("full");
        for limit in sizes_of_a_disk(&whole) {
            let output = within(&mut net.train(&runs), limit).output().unwrap();
            let said = message(&output);
            assert_eq!(output.status.code(), Some(1), "{} within {limit} bytes: {said}", net.name);
            assert!(said.contains("File too large") && said.contains('/'), "{said}");
            assert!(!net.folder(&runs).join("summary.json").exists(), "{limit}");
        }
        assert_equal(&net.finish(&runs), &whole, &format!("{} on a full disk", net.name));
    }
}

#[test]
fn folders_that_cannot_be_written_are_named() {
    let folder = scratch();
    let fails = |runs: &Path, part: &str| {
        let output = MLP.train_elsewhere(folder.path(), runs).output().unwrap();
        let said = message(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(output.stdout.is_empty() && said.contains(part) && !said.contains("panicked"), "{said}");
    };
    let file = folder.path().join("a-file");
    fs::write(&file, "").unwrap();
    fails(&file, "a-file");
    fails(&file.join("below"), "a-file");
    // Nobody can make folders there, root neither.
    fails(Path::new("/proc/taper-runs"), "/proc/taper-runs");
    let closed = folder.path().join("read-only");
    fs::create_dir(&closed).unwrap();
    let mut permissions = fs::metadata(&closed).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(&closed, permissions).unwrap();
    if fs::create_dir(closed.join("as-root")).is_err() {
        fails(&closed, "read-only");
    }
}
