//! A run's folder with one file damaged: it comes to the same end or it is refused.
use crate::fuzz;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use taper_train::run::{self, Options, RunError, Show};
use taper_train::{Recipe, Registries};

const RECIPE: &str = "
data: {name: synthetic-text, vocab: 9, branching: 2, train: 120, valid: 20, test: 20, batch_size: 2, eval_batch_size: 2}
model: {name: lstm, emb: 4, hidden: 4}
optimizer: {name: decgd, lr: 0.05}
schedule: {kind: plateau, factor: 0.5, patience: 0}
train: {epochs: 2, select: val, log_every: 1, bptt: {length: 10}, checkpoint: {every_epochs: null, every_steps: 3, keep: 2}}
";

/// The files that a run reads when it goes on.
const FILES: [&str; 6] = ["metrics.jsonl", "summary.json", "recipe.yaml", "manifest.json", "state", "model"];

fn options(runs: &Path) -> Options {
    Options { runs: runs.into(), show: Show::Quiet, ..Options::default() }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() { copy(&path, &target) } else { std::fs::copy(&path, &target).map(|_| ()).unwrap() }
    }
}

/// The path of one of [`FILES`]: those of a checkpoint are in its newest.
fn place(run: &Path, file: &str) -> PathBuf {
    let inner = match file {
        "state" => "state.json",
        "model" => "model.safetensors",
        file => return run.join(file),
    };
    let steps = std::fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let number = |path: &PathBuf| path.to_str().unwrap().rsplit('-').next().unwrap().parse::<u64>().unwrap();
    steps.max_by_key(number).unwrap().join(inner)
}

/// The same state with the checksum that belongs to it, where it is still JSON: as another version might have left it.
fn seal(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut state: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    *state.get_mut("sha256")? = "".into();
    let sum = Sha256::digest(serde_json::to_vec_pretty(&state).ok()?);
    *state.get_mut("sha256")? = sum.iter().map(|b| format!("{b:02x}")).collect::<String>().into();
    serde_json::to_vec_pretty(&state).ok()
}

#[test]
fn fuzz_run_folders() {
    let registries = Registries::default();
    let recipe = Recipe::parse("small.yaml", RECIPE, &[], &registries).unwrap();
    let folder = crate::scratch();
    let whole = run::run(&recipe, &registries, &options(&folder.path().join("whole"))).unwrap().folder;
    let end = |run: &Path| {
        let files = [place(run, "model"), run.join("metrics.jsonl"), run.join("summary.json")];
        files.map(|path| std::fs::read(path).unwrap())
    };
    let expected = end(&whole);
    // The first byte of an input says which file it is.
    let seeds: Vec<Vec<u8>> = FILES
        .iter()
        .enumerate()
        .map(|(i, file)| [vec![i as u8], std::fs::read(place(&whole, file)).unwrap()].concat())
        .collect();
    fuzz("runs", &seeds, |bytes| {
        let Some((which, bytes)) = bytes.split_first() else { return };
        let file = FILES[usize::from(*which) % FILES.len()];
        let runs = folder.path().join("damaged");
        let _ = std::fs::remove_dir_all(&runs);
        let damaged = runs.join(recipe.directory());
        copy(&whole, &damaged);
        std::fs::write(place(&damaged, file), bytes).unwrap();
        let _ = taper_train::compare::compare(&whole, &damaged, &registries);
        // With its summary gone, a run goes on from its last checkpoint.
        if file != "summary.json" {
            std::fs::remove_file(damaged.join("summary.json")).unwrap();
        }
        match run::run(&recipe, &registries, &options(&runs)) {
            Ok(_) => assert!(end(&damaged) == expected, "another end after damage to {file}"),
            Err(RunError::Damaged { .. } | RunError::Io { .. } | RunError::Interrupted { .. }) => {}
            Err(RunError::Diverged { .. }) if file == "summary.json" => {}
            Err(e) => panic!("{file}: {e}"),
        }
        if let Some(sealed) = seal(bytes).filter(|_| file == "state") {
            copy(&whole, &damaged);
            std::fs::write(place(&damaged, file), sealed).unwrap();
            std::fs::remove_file(damaged.join("summary.json")).unwrap();
            let _ = run::run(&recipe, &registries, &options(&runs));
        }
    });
}
