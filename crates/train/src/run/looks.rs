//! `probe.jsonl`: what the microscope saw, one line a look, the same bytes for the same recipe.
//!
//! A checkpoint vouches for its past as it does for `metrics.jsonl`, the summary for the whole. A run that goes on cuts it there,
//! and stops where its past is not what it was.
use super::RunError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use taper_files::hex;

/// The file's name.
pub const FILE: &str = "probe.jsonl";

/// Numbers by name.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Figures(#[serde(with = "super::number::map")] pub BTreeMap<String, f64>);

impl Deref for Figures {
    type Target = BTreeMap<String, f64>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// What the microscope saw of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sight {
    /// The step, from 1.
    pub step: u64,
    /// The epoch it belongs to, from 1.
    pub epoch: u64,
    /// Of all parameters together.
    pub all: Figures,
    /// Of each parameter.
    pub params: BTreeMap<String, Figures>,
}

impl Figures {
    /// The simple optimizer whose step is nearest, with its R² and rate.
    pub fn nearest(&self) -> Option<(&'static str, f64, f64)> {
        taper_optim::nearest(|name| {
            Some((*self.get(&format!("r2/{name}"))?, *self.get(&format!("rate/{name}"))?))
        })
    }
}

/// The open file.
pub(crate) struct Looks {
    path: PathBuf,
    /// Nothing where there is no microscope, or another process writes the lines.
    file: Option<BufWriter<File>>,
    bytes: u64,
    hash: Sha256,
    /// When a reader could last see all lines.
    flushed: Instant,
}

/// Who follows the file sees a line at the latest when the first one after so long is written.
const LATEST: Duration = Duration::from_secs(1);

impl Looks {
    /// Without a file.
    pub fn none(folder: &Path) -> Self {
        let path = folder.join(FILE);
        Self { path, file: None, bytes: 0, hash: Sha256::new(), flushed: Instant::now() }
    }

    /// Opens the file and cuts it to the `bytes` that a checkpoint vouches for by their checksum. Where there are none, and
    /// nobody will write any, there is no file.
    pub fn open(folder: &Path, (bytes, sha256): (u64, &str), wanted: bool) -> Result<Self, RunError> {
        let none = Self::none(folder);
        if bytes == 0 && !wanted {
            return match std::fs::remove_file(&none.path) {
                Err(e) if e.kind() != ErrorKind::NotFound => Err(RunError::io(&none.path)(e)),
                _ => Ok(none),
            };
        }
        let path = none.path.clone();
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(RunError::io(&path))?;
        let mut past = Vec::new();
        (&mut file).take(bytes).read_to_end(&mut past).map_err(RunError::io(&path))?;
        let hash = Sha256::new_with_prefix(&past);
        if past.len() as u64 != bytes || bytes > 0 && hex(&hash.clone().finalize()) != sha256 {
            let message = format!(
                "the first {bytes} bytes are not those that the checkpoint was written with: put the file back, or begin \
                 anew with --fresh, which keeps the run's folder under another name"
            );
            return Err(RunError::Damaged { path, message });
        }
        file.set_len(bytes).map_err(RunError::io(&path))?;
        file.seek(SeekFrom::End(0)).map_err(RunError::io(&path))?;
        Ok(Self { file: Some(BufWriter::new(file)), bytes, hash, ..none })
    }

    /// Appends a line.
    pub fn add(&mut self, sight: &Sight) -> Result<(), RunError> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let mut line = serde_json::to_vec(sight).map_err(|e| RunError::Damaged {
            path: self.path.clone(),
            message: format!("a line cannot be written: {e}"),
        })?;
        line.push(b'\n');
        file.write_all(&line).map_err(RunError::io(&self.path))?;
        if self.flushed.elapsed() > LATEST {
            file.flush().map_err(RunError::io(&self.path))?;
            self.flushed = Instant::now();
        }
        self.bytes += line.len() as u64;
        self.hash.update(&line);
        Ok(())
    }

    /// Makes all lines durable.
    pub fn sync(&mut self) -> Result<(), RunError> {
        self.flush()?()
    }

    /// Lets readers see all lines. What is returned makes them durable, on any thread.
    pub fn flush(&mut self) -> Result<impl FnOnce() -> Result<(), RunError> + Send + use<>, RunError> {
        let path = self.path.clone();
        let mut written = None;
        if let Some(file) = &mut self.file {
            file.flush().map_err(RunError::io(&path))?;
            written = Some(file.get_ref().try_clone().map_err(RunError::io(&path))?);
        }
        Ok(move || written.iter().try_for_each(File::sync_all).map_err(RunError::io(&path)))
    }

    /// The length and the SHA-256 of the file; of none, nothing.
    pub fn vouch(&self) -> (u64, String) {
        match self.bytes {
            0 => (0, String::new()),
            bytes => (bytes, hex(&self.hash.clone().finalize())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sight(step: u64) -> Sight {
        let figures = |value: f64| Figures(BTreeMap::from([("x".to_owned(), value)]));
        let params = BTreeMap::from([("a.weight".to_owned(), figures(f64::INFINITY))]);
        Sight { step, epoch: 1, all: figures(0.1 + step as f64), params }
    }

    #[test]
    fn a_file_is_cut_to_what_a_checkpoint_vouches_for_and_goes_on_with_the_same_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let mut looks = Looks::open(folder.path(), (0, ""), true).unwrap();
        looks.add(&sight(1)).unwrap();
        let vouched = looks.vouch();
        looks.add(&sight(2)).unwrap();
        looks.sync().unwrap();
        let whole = std::fs::read(folder.path().join(FILE)).unwrap();
        // A crash in the middle of a line.
        std::fs::write(folder.path().join(FILE), [&whole[..], b"{\"st"].concat()).unwrap();
        let mut looks = Looks::open(folder.path(), (vouched.0, &vouched.1), true).unwrap();
        looks.add(&sight(2)).unwrap();
        looks.sync().unwrap();
        assert_eq!(std::fs::read(folder.path().join(FILE)).unwrap(), whole);
        let line = String::from_utf8(whole).unwrap();
        let read: Sight = serde_json::from_str(line.lines().next().unwrap()).unwrap();
        assert_eq!(read, sight(1));
    }

    #[test]
    fn a_past_that_was_changed_or_cut_is_an_error_and_an_unwanted_file_goes() {
        let folder = tempfile::tempdir().unwrap();
        let mut looks = Looks::open(folder.path(), (0, ""), true).unwrap();
        looks.add(&sight(1)).unwrap();
        looks.sync().unwrap();
        let (bytes, sha256) = looks.vouch();
        let path = folder.path().join(FILE);
        let whole = std::fs::read(&path).unwrap();
        let mut changed = whole.clone();
        changed[3] ^= 1;
        for damaged in [&changed[..], &whole[..5], &[]] {
            std::fs::write(&path, damaged).unwrap();
            let error = Looks::open(folder.path(), (bytes, &sha256), true).err().unwrap().to_string();
            assert!(error.contains("probe.jsonl") && error.contains("--fresh"), "{error}");
        }
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(Looks::open(folder.path(), (0, ""), false).unwrap().vouch(), (0, String::new()));
        assert!(!path.exists());
    }
}
