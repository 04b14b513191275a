//! `metrics.jsonl`: one line a measurement, the same bytes for the same recipe.
//!
//! While a run goes on, a second file has the same lines: a checkpoint knows the checksum of its past, and with one of the two
//! intact no flipped byte stops the run.
use super::RunError;
use super::{progress, tensorboard};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use taper_files::hex;
use taper_files::kill::kill_after;
use taper_optim::Probe;

/// Figures by name.
pub(crate) type Values = Vec<(&'static str, f64)>;

/// What a measurement was made on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// The training batches, in training mode.
    Train,
    /// What was put aside of the training set.
    Val,
    /// The test set; of a numeric problem, the function after the step.
    Test,
    /// The optimizer's own statistics.
    Probe,
}

impl Split {
    /// Its name in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Val => "val",
            Self::Test => "test",
            Self::Probe => "probe",
        }
    }
}

/// One line: where, what, and the values by name. No time of day, so that equal runs have equal lines.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Optimizer steps taken.
    pub step: u64,
    /// Epochs finished, the current one counted in.
    pub epoch: u64,
    /// On what.
    pub split: Split,
    /// The values.
    #[serde(flatten, with = "super::number::map")]
    pub values: BTreeMap<String, f64>,
}

/// The second file's name.
pub(crate) const COPY: &str = ".metrics.copy";

/// The open metrics files of a run.
pub(crate) struct Metrics {
    path: PathBuf,
    /// Nothing where another process writes the lines.
    files: Option<Files>,
    bytes: u64,
    hash: Sha256,
    /// All records so far.
    pub records: Vec<Record>,
}

struct Files {
    file: BufWriter<File>,
    copy: BufWriter<File>,
    events: BufWriter<File>,
    /// When a reader could last see all lines.
    flushed: Instant,
    /// Whether all lines were given to be made durable.
    synced: bool,
}

impl Files {
    fn flush(&mut self) -> std::io::Result<()> {
        self.flushed = Instant::now();
        [&mut self.file, &mut self.copy, &mut self.events].into_iter().try_for_each(BufWriter::flush)
    }
}

/// The records that the text of `metrics.jsonl` holds.
fn parse(path: &Path, text: &str) -> Result<Vec<Record>, RunError> {
    let parse = |(i, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|e| RunError::Damaged {
            path: path.to_path_buf(),
            message: format!("line {}: {e}: remove the run's folder to start again", i + 1),
        })
    };
    text.lines().enumerate().map(parse).collect()
}

impl Metrics {
    /// The same without files: another process writes them. `text` is what they hold already.
    pub fn in_memory(folder: &Path, text: &str) -> Result<Self, RunError> {
        let path = folder.join("metrics.jsonl");
        let records = parse(&path, text)?;
        Ok(Self { path, files: None, bytes: text.len() as u64, hash: Sha256::new_with_prefix(text), records })
    }

    /// Opens the files and cuts `metrics.jsonl` to the `bytes` that a checkpoint vouches for; the TensorBoard file is
    /// a function of it and written anew.
    pub fn open(folder: &Path, bytes: u64) -> Result<Self, RunError> {
        let path = folder.join("metrics.jsonl");
        let open = |path: &Path| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false).open(path).map_err(RunError::io(path))
        };
        let mut file = open(&path)?;
        let length = file.metadata().map_err(RunError::io(&path))?.len();
        if length < bytes {
            let message = format!(
                "has {length} bytes where the checkpoint expects {bytes}: remove the run's folder to start again"
            );
            return Err(RunError::Damaged { path, message });
        }
        file.set_len(bytes).map_err(RunError::io(&path))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(RunError::io(&path))?;
        file.seek(SeekFrom::End(0)).map_err(RunError::io(&path))?;
        let records = parse(&path, &text)?;

        let copy_path = folder.join(COPY);
        let mut copy = BufWriter::new(open(&copy_path)?);
        let write = |copy: &mut BufWriter<File>| {
            copy.get_ref().set_len(0)?;
            copy.write_all(text.as_bytes())?;
            copy.flush()
        };
        write(&mut copy).map_err(RunError::io(&copy_path))?;
        let events_path = folder.join(tensorboard::FILE);
        let mut events = BufWriter::new(open(&events_path)?);
        let write = |events: &mut BufWriter<File>| {
            events.get_ref().set_len(0)?;
            events.write_all(&tensorboard::file(&records))?;
            events.flush()
        };
        write(&mut events).map_err(RunError::io(&events_path))?;
        let files =
            Files { file: BufWriter::new(file), copy, events, flushed: Instant::now(), synced: false };
        Ok(Self { path, files: Some(files), bytes, hash: Sha256::new_with_prefix(&text), records })
    }

    /// Appends a line.
    pub fn add(&mut self, record: Record) -> Result<(), RunError> {
        let mut line = serde_json::to_vec(&record).map_err(|e| RunError::Damaged {
            path: self.path.clone(),
            message: format!("a record cannot be written: {e}"),
        })?;
        line.push(b'\n');
        if let Some(files) = &mut self.files {
            let io = |e| RunError::io(&self.path)(e);
            files.synced = false;
            let file = &mut files.file;
            kill_after("metrics-half-line", || {
                drop(file.write_all(&line[..line.len() / 2]).and_then(|()| file.flush()))
            });
            file.write_all(&line).map_err(io)?;
            kill_after("metrics-line", || drop(file.flush()));
            files.copy.write_all(&line).map_err(io)?;
            files.events.write_all(&tensorboard::event(&record, record.step as f64)).map_err(io)?;
            if files.flushed.elapsed() > LATEST {
                files.flush().map_err(io)?;
            }
        }
        self.bytes += line.len() as u64;
        self.hash.update(&line);
        self.records.push(record);
        Ok(())
    }

    /// The last value of a figure, and the step it was measured after.
    pub fn last(&self, split: Split, metric: &str) -> Option<(f64, u64)> {
        let record = self.records.iter().rev().find(|record| record.split == split)?;
        Some((*record.values.get(metric)?, record.step))
    }

    /// The last value of a figure for a line of progress; nothing where it was not measured yet.
    pub fn shown(&self, split: Split, metric: &str) -> String {
        let shown = |value| format!("  {} {metric} {}", split.name(), progress::short(metric, value));
        self.last(split, metric).map(|(value, _)| shown(value)).unwrap_or_default()
    }

    /// Makes all lines durable.
    pub fn sync(&mut self) -> Result<(), RunError> {
        self.flush()?()
    }

    /// Lets readers see all lines. What is returned makes them durable, on any thread.
    pub fn flush(&mut self) -> Result<impl FnOnce() -> Result<(), RunError> + Send + use<>, RunError> {
        let path = self.path.clone();
        let mut written = Vec::new();
        if let Some(files) = self.files.as_mut().filter(|files| !files.synced) {
            let mut flush = || -> std::io::Result<Vec<File>> {
                files.flush()?;
                files.synced = true;
                [&files.file, &files.copy, &files.events]
                    .into_iter()
                    .map(|f| f.get_ref().try_clone())
                    .collect()
            };
            written = flush().map_err(RunError::io(&path))?;
        }
        Ok(move || written.iter().try_for_each(File::sync_all).map_err(RunError::io(&path)))
    }

    /// Removes the second file: the run has come to its end, and its summary will vouch for the first.
    pub fn seal(&self) -> Result<(), RunError> {
        let copy = self.path.with_file_name(COPY);
        match std::fs::remove_file(&copy) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(RunError::io(&copy)(e)),
            _ => Ok(()),
        }
    }

    /// The length and the SHA-256 of `metrics.jsonl`.
    pub fn vouch(&self) -> (u64, String) {
        (self.bytes, hex(&self.hash.clone().finalize()))
    }
}

/// Who follows the file sees a line at the latest when the first one after so long is written.
const LATEST: Duration = Duration::from_secs(1);

/// The optimizer's statistics of a step by name.
pub(super) fn of_probe(probe: &Probe) -> BTreeMap<String, f64> {
    let mut values = BTreeMap::new();
    for param in &probe.params {
        values.insert(format!("update_ratio/{}", param.name), param.update_ratio);
        for (name, value) in &param.numbers {
            values.insert((*name).to_owned(), *value);
        }
        if let Some((name, d)) = &param.observed {
            let quantiles = ["p01", "p25", "p50", "p75", "p99"].into_iter().zip(d.quantiles);
            let moments = [("min", d.min), ("mean", d.mean), ("max", d.max), ("negative", d.negative as f64)];
            for (which, value) in moments.into_iter().chain(quantiles) {
                values.insert(format!("{name}_{which}/{}", param.name), value);
            }
        }
    }
    values
}
