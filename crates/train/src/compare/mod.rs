//! Where two runs part: the first line of metrics, then the first tensor and element of their checkpoints.
mod json;
mod lines;
mod tensors;

pub use json::Setting;
pub use lines::LineDifference;
pub use tensors::CheckpointDifference;

use crate::Registries;
use crate::run::{RunError, checkpoint, folder};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// What was found. Two runs are equal when their metrics, the checkpoints that both have and their summaries are.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Whether nothing differs but settings.
    pub equal: bool,
    /// The settings that differ. They need not change a result (`name`, `train.checkpoint.keep`).
    pub settings: Vec<Setting>,
    /// Lines of `metrics.jsonl` that are equal, up to the first difference.
    pub equal_lines: usize,
    /// The first difference in `metrics.jsonl`.
    pub metrics: Option<LineDifference>,
    /// The steps of checkpoints that are equal, up to the first difference.
    pub equal_checkpoints: Vec<u64>,
    /// The first difference in a checkpoint that both runs have.
    pub checkpoint: Option<CheckpointDifference>,
    /// The first difference in `summary.json`.
    pub summary: Option<Setting>,
}

/// A value as people read it and to the bit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shown {
    /// The shortest text that reads back as the value.
    pub value: String,
    /// Its bits in hexadecimal, for a floating-point number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bits: Option<String>,
}

impl Shown {
    fn f64(value: f64) -> Self {
        Self { value: format!("{value:?}"), bits: Some(format!("{:#018x}", value.to_bits())) }
    }
}

impl From<String> for Shown {
    fn from(value: String) -> Self {
        Self { value, bits: None }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.bits {
            Some(bits) => write!(f, "{} ({bits})", self.value),
            None => f.write_str(&self.value),
        }
    }
}

/// Compares the folders of two runs.
pub fn compare(a: &Path, b: &Path, registries: &Registries) -> Result<Comparison, RunError> {
    let settings = json::differences(
        folder::recipe(a, registries)?.resolved(),
        folder::recipe(b, registries)?.resolved(),
    );
    let (lines_a, lines_b) = (folder::lines(a)?, folder::lines(b)?);
    let (equal_lines, metrics) = lines::first_difference(&lines_a, &lines_b);
    let (steps_a, steps_b) = (checkpoint::steps(a)?, checkpoint::steps(b)?);
    let mut common: Vec<u64> = steps_a.into_iter().filter(|step| steps_b.contains(step)).collect();
    common.sort_unstable();
    let (mut equal_checkpoints, mut difference) = (Vec::new(), None);
    for step in common {
        difference = checkpoint_difference(a, b, step)?;
        if difference.is_some() {
            break;
        }
        equal_checkpoints.push(step);
    }
    let written = |folder: &Path| {
        Ok::<_, RunError>(folder::summary(folder)?.and_then(|summary| serde_json::to_value(summary).ok()))
    };
    // They follow the settings, which are listed, and the files, which are compared.
    let ignored = ["name", "id", "series", "sha256"];
    let summary = match (written(a)?, written(b)?) {
        (None, None) => None,
        (a, b) => {
            let value = |summary: Option<_>| summary.unwrap_or(serde_json::Value::Null);
            let mut all = json::differences(&value(a), &value(b)).into_iter();
            all.find(|difference| {
                !ignored.contains(&difference.key.as_str()) && !difference.key.starts_with("files")
            })
        }
    };
    let equal = metrics.is_none() && difference.is_none() && summary.is_none();
    Ok(Comparison {
        equal,
        settings,
        equal_lines,
        metrics,
        equal_checkpoints,
        checkpoint: difference,
        summary,
    })
}

/// The first difference between the checkpoints of a step, which both runs have.
pub(crate) fn checkpoint_difference(
    a: &Path,
    b: &Path,
    step: u64,
) -> Result<Option<CheckpointDifference>, RunError> {
    let read = |run: &Path| checkpoint::read(&checkpoint::path(run, step));
    tensors::first_difference(step, &read(a)?, &read(b)?)
}

/// The first difference between two records of metrics, and the number of equal lines before it.
pub(crate) use lines::first_difference as line_difference;

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for setting in &self.settings {
            writeln!(f, "recipe: {setting}")?;
        }
        match &self.metrics {
            Some(difference) => writeln!(f, "metrics: {difference}")?,
            None => writeln!(f, "metrics: {} lines, all equal", self.equal_lines)?,
        }
        let steps: Vec<String> = self.equal_checkpoints.iter().map(u64::to_string).collect();
        let equal = if steps.is_empty() { "none".to_owned() } else { format!("step {}", steps.join(", ")) };
        match &self.checkpoint {
            Some(difference) => writeln!(f, "checkpoints: equal: {equal}; then {difference}")?,
            None => writeln!(f, "checkpoints in both: {equal}, bit for bit equal")?,
        }
        if let Some(difference) = &self.summary {
            writeln!(f, "summary: {difference}")?;
        }
        f.write_str(if self.equal { "the runs are equal\n" } else { "the runs differ\n" })
    }
}
