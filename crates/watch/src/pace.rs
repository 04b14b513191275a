//! How fast a run goes, by what it writes down: `timing.jsonl` has a line an epoch, and between them the metrics' own growth tells.
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Instant, SystemTime};

/// A run's last line of timing.
#[derive(Debug, Default)]
pub struct Pace {
    seen: Option<(u64, SystemTime)>,
    rate: Option<f64>,
    megabytes: Option<u64>,
    steps_an_epoch: Option<f64>,
    /// When it was first seen and when it last moved, with its steps then.
    first: Option<(Instant, u64)>,
    last: Option<(Instant, u64)>,
    version: u64,
}

/// The end of the file in which its last lines are.
const END: u64 = 4096;
/// An observation of fewer seconds says little.
const OBSERVED: f64 = 2.0;

impl Pace {
    /// Reads the file's end, if it changed.
    pub fn look(&mut self, folder: &Path) {
        let path = folder.join("timing.jsonl");
        let about = fs::metadata(&path).ok().and_then(|about| Some((about.len(), about.modified().ok()?)));
        if about == self.seen {
            return;
        }
        self.seen = about;
        self.version += 1;
        let lines = last_lines(&path);
        let Some(line) = lines.last() else { return };
        self.rate = line["steps_per_second"].as_f64().filter(|rate| *rate > 0.0);
        self.megabytes = line["peak_mb"].as_u64();
        // A session that ended within an epoch has a line with fewer steps.
        let steps = lines.iter().filter_map(|line| Some(line["step"].as_f64()? / line["epoch"].as_f64()?));
        self.steps_an_epoch = steps.filter(|steps| steps.is_finite()).reduce(f64::max);
    }

    /// Takes note of how far the run is now.
    pub fn observe(&mut self, step: u64) {
        let now = Instant::now();
        match self.first {
            Some((_, first)) if step >= first => {
                if self.last.is_none_or(|(_, last)| last != step) {
                    self.last = Some((now, step));
                }
            }
            _ => (self.first, self.last) = (Some((now, step)), None),
        }
    }

    /// Grows when something is new.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Steps a second: of the last epoch, or in the first one as it was observed.
    pub fn rate(&self) -> Option<f64> {
        let observed = || {
            let ((since, first), (until, last)) = (self.first?, self.last?);
            let seconds = until.duration_since(since).as_secs_f64();
            (seconds >= OBSERVED).then(|| (last - first) as f64 / seconds)
        };
        self.rate.or_else(observed).filter(|rate| *rate > 0.0)
    }

    /// The most memory that its process took.
    pub fn megabytes(&self) -> Option<u64> {
        self.megabytes
    }

    /// Steps an epoch.
    pub fn steps_an_epoch(&self) -> Option<f64> {
        self.steps_an_epoch
    }
}

/// The last lines of a file, as far as they can be read.
fn last_lines(path: &Path) -> Vec<serde_json::Value> {
    let end = || {
        let mut file = fs::File::open(path).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(END))).ok()?;
        let mut end = Vec::new();
        file.take(END).read_to_end(&mut end).ok()?;
        Some(end)
    };
    let text = end().unwrap_or_default();
    String::from_utf8_lossy(&text).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}
