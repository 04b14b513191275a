//! A sweep of tiny runs in a folder of its own.
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// Twelve runs of a dozen steps.
pub const SWEEP: &str = "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16, eval_batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 3, checkpoint: {every_epochs: null, every_steps: 2}}
sweep:
  grid: {optimizer.c: [10, 1, 1e-3, 1e-8]}
  seeds: [1, 2, 3]
";

pub struct Place {
    folder: TempDir,
    pub recipe: PathBuf,
}

impl Place {
    pub fn new(recipe: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.yaml");
        std::fs::write(&path, recipe).unwrap();
        Self { folder, recipe: path }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// `taper COMMAND tiny.yaml --runs RUNS ARGS…`, as a process group of its own.
    pub fn taper(&self, command: &str, runs: &str, args: &[&str]) -> Command {
        let mut taper = Command::new(env!("CARGO_BIN_EXE_taper"));
        taper.arg(command).arg(&self.recipe).arg("--runs").arg(self.path(runs)).args(args);
        taper.args(["--threads", "2"]).current_dir(self.folder.path());
        taper.env_remove("TAPER_DATA").env("TAPER_OFFLINE", "1").env("TAPER_CACHE", self.path("cache"));
        taper.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut taper, 0);
        taper
    }

    pub fn sweep(&self, runs: &str, args: &[&str]) -> Output {
        self.taper("sweep", runs, args).output().unwrap()
    }

    /// What a sweep that succeeds prints.
    pub fn table(&self, runs: &str, args: &[&str]) -> String {
        let output = self.sweep(runs, args);
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The folders of all runs.
    pub fn runs(&self, runs: &str) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.path(runs)).into_iter().flatten();
        let mut folders: Vec<PathBuf> =
            entries.map(|entry| entry.unwrap().path()).filter(|p| p.is_dir()).collect();
        folders.sort();
        folders
    }
}

/// How often a run was begun.
pub fn sessions(run: &Path) -> usize {
    let text = std::fs::read_to_string(run.join("timing.jsonl")).unwrap();
    let epoch = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["epoch"].clone();
    text.lines().filter(|line| epoch(line) == 1).count()
}

pub fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
