//! `summary.json`: how a run ended and the best and last of everything it measured.
use super::metrics::{Record, Split};
use super::{Run, RunError, checkpoint, folder, looks, manifest};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// All epochs or steps were done, or an early stop or a budget of steps ended it.
    Finished,
    /// A loss or gradient was not finite.
    Diverged,
    /// The user or a budget of time stopped it.
    Interrupted,
}

/// The best value of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// The value.
    #[serde(with = "super::number")]
    pub value: f64,
    /// The epoch it was measured after.
    pub epoch: u64,
    /// The step it was measured after.
    pub step: u64,
}

/// What a run came to. No time of day and no durations: equal runs have equal summaries.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The recipe's id.
    pub id: String,
    /// The recipe's name.
    pub name: String,
    /// What runs share that differ in their length alone.
    #[serde(default)]
    pub series: String,
    /// How it ended.
    pub status: Status,
    /// Optimizer steps taken.
    pub steps: u64,
    /// Epochs finished.
    pub epochs: u64,
    /// What chose the best epoch: `val`, `test` (as many papers do; the choice is then part of what is reported) or `last`.
    pub select: String,
    /// The metric it chose by.
    pub metric: String,
    /// The last value of `<split>.<metric>`.
    #[serde(with = "super::number::map")]
    pub last: BTreeMap<String, f64>,
    /// The best value of `<split>.<metric>`: highest accuracy, lowest of all else.
    pub best: BTreeMap<String, Best>,
    /// The values of all evaluations at the selected epoch.
    #[serde(with = "super::number::map")]
    pub selected: BTreeMap<String, f64>,
    /// What went wrong, for a diverged run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The processors, devices and kernels that took part, where they were more than one: such a result is nobody's to repeat.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mixed: Vec<String>,
    /// SHA-256 of the files that are functions of the recipe; [`folder`](super::folder) says who vouches for the others.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    /// SHA-256 of the file with nothing here.
    pub sha256: String,
}

impl Summary {
    /// Itself with its checksum filled in.
    pub(crate) fn sealed(mut self) -> serde_json::Result<Self> {
        self.sha256.clear();
        self.sha256 = taper_files::sha256(&serde_json::to_vec_pretty(&self)?);
        Ok(self)
    }

    /// Writes it into a run's folder, sealed.
    pub(crate) fn write(self, folder: &Path) -> Result<Self, RunError> {
        let path = folder.join("summary.json");
        let file = self.sealed().and_then(|sealed| Ok((serde_json::to_vec_pretty(&sealed)?, sealed)));
        let (mut file, sealed) =
            file.map_err(|e| RunError::Damaged { path: path.clone(), message: e.to_string() })?;
        file.push(b'\n');
        taper_files::replace(&path, &file)?;
        Ok(sealed)
    }
}

impl Run<'_> {
    /// What the run came to.
    fn summary(&self, status: Status, failure: Option<&RunError>) -> Summary {
        let (last, best) = extremes(&self.metrics.records);
        let chosen = match (self.select, self.state.best) {
            (Some(_), Some((_, step))) => Some(step),
            _ => self.metrics.last(Split::Test, "loss").map(|(_, step)| step),
        };
        Summary {
            id: self.recipe.id().to_owned(),
            name: self.recipe.name.clone(),
            series: self.recipe.series(),
            status,
            steps: self.state.step,
            epochs: self.state.epoch,
            select: self.select.map_or("last", Split::name).to_owned(),
            metric: self.metric.to_owned(),
            last,
            best,
            selected: chosen.map(|step| evaluations_at(&self.metrics.records, step)).unwrap_or_default(),
            reason: match failure {
                Some(RunError::Diverged { what, .. }) => Some(what.clone()),
                _ => None,
            },
            mixed: match manifest::arithmetics(&self.manifest.stretches) {
                one if one.len() < 2 => Vec::new(),
                mixed => mixed,
            },
            files: BTreeMap::new(),
            sha256: String::new(),
        }
    }

    /// Vouches for all files of the run, as they are in its folder, and writes down how it ended. Who removed or changed one of
    /// them meanwhile hears of it.
    pub fn seal(&mut self, status: Status, failure: Option<&RunError>) -> Result<Summary, RunError> {
        let gone = |e: RunError| match e {
            RunError::Io { path, source } if source.kind() == ErrorKind::NotFound => RunError::Damaged {
                path,
                message: "is gone: somebody removed or renamed files of the run while it was trained; \
                          the same command trains what is missing"
                    .into(),
            },
            e => e,
        };
        let last = self.manifest.stretches.last_mut();
        last.into_iter().for_each(|stretch| stretch.to = Some(self.state.step));
        self.manifest.write(&self.folder).map_err(gone)?;
        // Which other checkpoints there are depends on interruptions; each vouches for itself.
        let last = (status == Status::Finished).then_some(self.state.step);
        if let Some(step) = last {
            checkpoint::read(&checkpoint::path(&self.folder, step)).map_err(gone)?;
        }
        let files = folder::seal(&self.folder, last).map_err(gone)?;
        if files.get("metrics.jsonl") != Some(&self.metrics.vouch().1) {
            let message = "is not what the run wrote: somebody changed it while the run was trained".into();
            return Err(RunError::Damaged { path: self.folder.join("metrics.jsonl"), message });
        }
        let (bytes, seen) = self.looks.vouch();
        if bytes > 0 && files.get(looks::FILE) != Some(&seen) {
            let message = "is not what the run wrote: somebody changed it while the run was trained".into();
            return Err(RunError::Damaged { path: self.folder.join(looks::FILE), message });
        }
        if status != Status::Interrupted {
            self.metrics.seal()?;
        }
        Summary { files, ..self.summary(status, failure) }.write(&self.folder).map_err(gone)
    }
}

/// Whether more of it is better.
pub(crate) fn higher_is_better(metric: &str) -> bool {
    metric == "accuracy"
}

/// Whether a value of `metric` beats an old one by more than `delta`. No number beats nothing.
pub(crate) fn beats(metric: &str, value: f64, old: Option<f64>, delta: f64) -> bool {
    match old {
        None => value.is_finite(),
        Some(old) if higher_is_better(metric) => value > old + delta,
        Some(old) => value < old - delta,
    }
}

/// The values of all evaluations after a step, by `<split>.<metric>`.
pub(crate) fn evaluations_at(records: &[Record], step: u64) -> BTreeMap<String, f64> {
    let there = records.iter().filter(|r| r.step == step && matches!(r.split, Split::Val | Split::Test));
    there.flat_map(|r| r.values.iter().map(|(k, v)| (format!("{}.{k}", r.split.name()), *v))).collect()
}

/// The best and last values of all records, by `<split>.<metric>`.
pub(crate) fn extremes(records: &[Record]) -> (BTreeMap<String, f64>, BTreeMap<String, Best>) {
    let (mut last, mut best) = (BTreeMap::new(), BTreeMap::<String, Best>::new());
    for record in records.iter().filter(|r| r.split != Split::Probe) {
        for (metric, value) in &record.values {
            let key = format!("{}.{metric}", record.split.name());
            last.insert(key.clone(), *value);
            let found = Best { value: *value, epoch: record.epoch, step: record.step };
            // The first of equals stays.
            if beats(metric, *value, best.get(&key).map(|old| old.value), 0.0) {
                best.insert(key, found);
            }
        }
    }
    for measure in ["lr", "grad_norm"] {
        best.retain(|key, _| key.rsplit('.').next() != Some(measure));
    }
    (last, best)
}
