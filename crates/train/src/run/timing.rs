//! `timing.jsonl`: how long everything took. All that may differ between two equal runs is here.
use super::RunError;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The clock of one session of a run.
pub(crate) struct Timing {
    /// Nothing where another process writes the times down.
    path: Option<PathBuf>,
    started: Instant,
    /// Where the last line was written: when, and after which step.
    since: (Instant, u64),
}

impl Timing {
    /// Starts now, before the step after `step`.
    pub fn new(folder: Option<&Path>, step: u64) -> Self {
        let now = Instant::now();
        Self { path: folder.map(|folder| folder.join("timing.jsonl")), started: now, since: (now, step) }
    }

    /// Seconds of this session.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// A line for the steps since the last one: after each epoch, and when a session ends within one.
    pub fn line(&mut self, epoch: u64, step: u64) -> Result<(), RunError> {
        let (seconds, steps) = (self.since.0.elapsed().as_secs_f64(), step - self.since.1);
        self.since = (Instant::now(), step);
        let Some(path) = &self.path else { return Ok(()) };
        let line = json!({
            "epoch": epoch,
            "step": step,
            "seconds": seconds,
            "steps_per_second": steps as f64 / seconds,
            "threads": rayon::current_num_threads(),
            "peak_mb": peak_megabytes(),
            "ended": SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        });
        let mut options = fs::OpenOptions::new();
        let mut file = options.append(true).create(true).open(path).map_err(RunError::io(path))?;
        writeln!(file, "{line}").map_err(RunError::io(path))
    }

    /// The last line of a session, unless an epoch has just ended.
    pub fn finish(&mut self, epoch: u64, step: u64) -> Result<(), RunError> {
        if step > self.since.1 { self.line(epoch, step) } else { Ok(()) }
    }
}

/// The seconds that a run's lines add up to, over all its sessions.
pub(crate) fn total(folder: &Path) -> f64 {
    let text = fs::read_to_string(folder.join("timing.jsonl")).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter_map(|line| line["seconds"].as_f64()).sum()
}

/// The largest resident size of this process so far, where the system tells it.
pub fn peak_megabytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb / 1024)
}
