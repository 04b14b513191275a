//! Four networks small enough to be trained hundreds of times.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// A recipe of a test.
pub struct Net {
    pub name: &'static str,
    recipe: &'static str,
}

/// Classes by a plain network, with a validation set, a plateau schedule and probes.
pub const MLP: Net = Net {
    name: "mlp",
    recipe: "
data: {name: synthetic-images, train: 96, test: 16, classes: 4, batch_size: 8, eval_batch_size: 16, val: 0.25}
model: {name: mlp, hidden: [4]}
optimizer: {name: decgd, lr: 0.01}
schedule: {kind: plateau, factor: 0.5, patience: 0}
train:
  epochs: 10
  log_every: 1
  select: val
  probe: true
  checkpoint: {every_epochs: null, every_steps: 4, keep: 2}
",
};

/// Classes by a residual network: running statistics, random crops, two batches a step, two optimizers.
pub const RESNET: Net = Net {
    name: "resnet",
    recipe: "
data:
  name: synthetic-images
  train: 64
  test: 16
  classes: 4
  batch_size: 8
  eval_batch_size: 16
  augment: {crop_pad: 4, flip: true, mixup: 0.2}
model: {name: resnet, num_blocks: [1, 1], widths: [8, 16]}
optimizer: {name: adam, lr: 0.01, groups: [{match: '*.bias', name: sgdm, lr: 0.01}]}
train:
  epochs: 4
  log_every: 1
  select: test
  accumulate: 2
  checkpoint: {every_epochs: null, every_steps: 3, keep: 2}
",
};

/// Classes in a few epochs: images mirrored in turns and between mirrors, epochs without their last batch, weights pulled back to
/// slow ones, parameters that are trained at first only, evaluations of several views, a microscope.
pub const SHORT: Net = Net {
    name: "short",
    recipe: "
data:
  name: synthetic-images
  train: 70
  test: 16
  classes: 4
  batch_size: 8
  eval_batch_size: 5
  last_batch: drop
  augment: {crop_pad: 2, crop_fill: reflect, flip: alternate}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: nag, lr: 0.02, groups: [{match: '*.bias', lr_scale: 8}]}
schedule: {kind: triangle, per: step, start: 0.2, peak_at: 0.25, end: 0.1}
train:
  epochs: 4
  log_every: 1
  eval_every: 2
  label_smoothing: 0.2
  average: {kind: lookahead, every: 5, decay: 0.7, power: 3}
  freeze: [{match: 'conv1.*', after_steps: 12}]
  eval_augment: {kind: flip_shift, when: last}
  probe: {every: 2, what: [cheap, noise, alpha]}
  checkpoint: {every_epochs: null, every_steps: 3, keep: 2}
",
};

/// The next word: a state carried from window to window, windows of drawn lengths, every dropout.
pub const LSTM: Net = Net {
    name: "lstm",
    recipe: "
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 4, eval_batch_size: 2}
model: {name: lstm, layers: 2, emb: 12, hidden: 16}
optimizer: {name: decgd, lr: 0.05}
train:
  epochs: 4
  log_every: 1
  select: val
  clip_norm: 0.25
  bptt: {length: 20, half: 0.05, std: 3, min: 5}
  scale_lr_by_length: true
  checkpoint: {every_epochs: null, every_steps: 4, keep: 2}
",
};

/// The next word from a context: windows drawn at random, two batches a step, dropout.
pub const GPT: Net = Net {
    name: "gpt",
    recipe: "
data: {name: synthetic-text, vocab: 40, branching: 4, train: 1200, valid: 100, test: 100, batch_size: 4, eval_batch_size: 2}
model: {name: gpt, layers: 2, heads: 2, emb: 16, block: 12, bias: true, dropout: {embedding: 0.1, resid: 0.1, attention: 0.1}}
optimizer: {name: adamw, lr: 0.01, no_decay: [bias, norm]}
schedule: {kind: cosine, warmup: 5, per: step}
train:
  epochs: 4
  log_every: 1
  select: val
  accumulate: 2
  clip_norm: 1.0
  windows: {length: 10}
  checkpoint: {every_epochs: null, every_steps: 4, keep: 2}
",
};

/// Patches of images.
pub const VIT: Net = Net {
    name: "vit",
    recipe: "
data: {name: synthetic-images, train: 48, test: 16, classes: 4, batch_size: 8, augment: {crop_pad: 2, flip: true}}
model: {name: vit, patch: 8, layers: 2, heads: 2, emb: 16, dropout: 0.1}
optimizer: {name: decgdw, lr: 0.05}
train:
  epochs: 4
  log_every: 1
  label_smoothing: 0.1
  checkpoint: {every_epochs: null, every_steps: 4, keep: 2}
",
};

/// A folder of one test, in memory where the system has such a place: these tests sync thousands of files.
pub fn scratch() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

impl Net {
    /// The command that trains it into `runs`; the recipe is written there too.
    pub fn train(&self, runs: &Path) -> Command {
        self.train_elsewhere(runs, runs)
    }

    /// The command that trains a recipe in `home` into `runs`.
    pub fn train_elsewhere(&self, home: &Path, runs: &Path) -> Command {
        std::fs::create_dir_all(home).unwrap();
        // Named from where it stands: its path is in the resolved recipe's comments.
        let recipe = format!("{}.yaml", self.name);
        std::fs::write(home.join(&recipe), self.recipe).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
        command
            .current_dir(home)
            .arg("train")
            .arg(recipe)
            .arg("--runs")
            .arg(runs)
            .arg("--quiet")
            .env("TAPER_OFFLINE", "1");
        command
    }

    /// Trains it with these arguments; the folder that is printed last.
    pub fn trained(&self, runs: &Path, args: &[&str]) -> (PathBuf, String) {
        let output = self.train(runs).args(["--log", "info"]).args(args).output().unwrap();
        assert!(output.status.success(), "{}: {}", self.name, message(&output));
        let printed = String::from_utf8(output.stdout.clone()).unwrap();
        (printed.lines().last().unwrap().into(), message(&output))
    }

    /// Trains it to its end.
    pub fn finish(&self, runs: &Path) -> PathBuf {
        let output = self.train(runs).output().unwrap();
        assert!(output.status.success(), "{}: {}", self.name, message(&output));
        self.folder(runs)
    }

    /// Trains it until the process ends itself at a named point.
    pub fn crash(&self, runs: &Path, point: &str) -> PathBuf {
        use std::os::unix::process::ExitStatusExt;
        let output = self.train(runs).env("TAPER_KILL_AT", point).output().unwrap();
        assert_eq!(
            output.status.signal(),
            Some(libc::SIGABRT),
            "{} has no {point}: {}",
            self.name,
            message(&output)
        );
        self.folder(runs)
    }

    /// The run's folder.
    pub fn folder(&self, runs: &Path) -> PathBuf {
        self.find(runs).unwrap_or_else(|| panic!("{} has no folder in {}", self.name, runs.display()))
    }

    /// The run's folder, once it is there.
    pub fn find(&self, runs: &Path) -> Option<PathBuf> {
        let entries = std::fs::read_dir(runs).ok()?.map(|entry| entry.unwrap().path());
        entries.into_iter().find(|path| path.is_dir())
    }
}

pub fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// All files of a folder, but for those that may differ between equal runs.
pub fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn collect(root: &Path, folder: &Path, out: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                collect(root, &path, out);
            } else if !["manifest.json", "timing.jsonl", ".lock"].contains(&name.as_str()) {
                out.insert(name, std::fs::read(path).unwrap());
            }
        }
    }
    let mut out = BTreeMap::new();
    collect(folder, folder, &mut out);
    out
}

/// Two runs left the same files, to the byte.
#[track_caller]
pub fn assert_equal(found: &Path, expected: &BTreeMap<String, Vec<u8>>, after: &str) {
    let found = files(found);
    let names = |files: &BTreeMap<String, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&found), names(expected), "files after {after}");
    for (name, bytes) in expected {
        assert!(&found[name] == bytes, "{name} is not what it was after {after}");
    }
    // So that the comparison cannot become empty: these are what must be equal.
    for kind in ["model.safetensors", "optimizer.safetensors", "metrics.jsonl", "summary.json", "events.out"]
    {
        assert!(expected.keys().any(|name| name.contains(kind)), "no {kind} among {:?}", names(expected));
    }
}

/// The command as a process whose files may not grow beyond a limit: a full disk that needs no disk.
pub fn within(command: &mut Command, limit: u64) -> &mut Command {
    use std::os::unix::process::CommandExt;
    let limits = libc::rlimit { rlim_cur: limit, rlim_max: limit };
    // SAFETY: between fork and exec only these two calls are made, which are safe there.
    unsafe {
        command.pre_exec(move || {
            // A write beyond the limit is an error, not a signal.
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            match libc::setrlimit(libc::RLIMIT_FSIZE, &limits) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    }
}

/// Limits at which a run that leaves these files stops at different places, later with each.
pub fn sizes_of_a_disk(whole: &BTreeMap<String, Vec<u8>>) -> [u64; 5] {
    let largest = whole.values().map(Vec::len).max().unwrap() as u64;
    let model = whole.iter().find(|(name, _)| name.ends_with("model.safetensors")).unwrap().1.len() as u64;
    let metrics = whole["metrics.jsonl"].len() as u64;
    let mut limits = [0, 500, metrics / 2, model - 1, largest - 1];
    limits.sort_unstable();
    limits
}

/// Copies a folder.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// A seeded generator (SplitMix64).
pub struct Draw(pub u64);

impl Draw {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n
    }
}
