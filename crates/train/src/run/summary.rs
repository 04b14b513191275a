//! `summary.json`: how a run ended and the best and last of everything it measured.
use super::files::sha256;
use super::metrics::{Record, Split};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

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
    /// SHA-256 of the file with nothing here.
    pub sha256: String,
}

impl Summary {
    /// Itself and its file, the checksum filled in.
    pub(crate) fn seal(mut self) -> serde_json::Result<(Self, Vec<u8>)> {
        self.sha256.clear();
        self.sha256 = sha256(&serde_json::to_vec_pretty(&self)?);
        let mut file = serde_json::to_vec_pretty(&self)?;
        file.push(b'\n');
        Ok((self, file))
    }
}

/// Whether more of it is better.
pub(crate) fn higher_is_better(metric: &str) -> bool {
    metric == "accuracy"
}

/// The best and last values of all records, by `<split>.<metric>`.
pub(crate) fn extremes(records: &[Record]) -> (BTreeMap<String, f64>, BTreeMap<String, Best>) {
    let (mut last, mut best) = (BTreeMap::new(), BTreeMap::<String, Best>::new());
    for record in records.iter().filter(|r| r.split != Split::Probe) {
        for (metric, value) in &record.values {
            let key = format!("{}.{metric}", record.split.name());
            last.insert(key.clone(), *value);
            let found = Best { value: *value, epoch: record.epoch, step: record.step };
            let better = |old: &Best| {
                old.value.is_nan()
                    || if higher_is_better(metric) {
                        found.value > old.value
                    } else {
                        found.value < old.value
                    }
            };
            // The first of equals stays.
            if best.get(&key).is_none_or(better) {
                best.insert(key, found);
            }
        }
    }
    for measure in ["lr", "grad_norm"] {
        best.retain(|key, _| key.rsplit('.').next() != Some(measure));
    }
    (last, best)
}
