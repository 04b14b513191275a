//! A run's folder read back, changing nothing in it.
use super::metrics::Record;
use super::summary::{Status, Summary, extremes};
use super::{Outcome, RunError, timing};
use crate::recipe::Sections;
use crate::{Recipe, Registries};
use serde::Deserialize;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use taper_data as data;

/// What a run ran with, as far as it decides whether results can be equal.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Manifest {
    pub recipe: String,
    pub taper: String,
    pub device: String,
    pub cpu_features: Vec<String>,
    /// Empty where an earlier version did not say.
    #[serde(default)]
    pub kernels: String,
    pub data: data::Provenance,
}

fn read(path: &Path) -> Result<Vec<u8>, RunError> {
    fs::read(path).map_err(RunError::io(path))
}

fn damaged(path: &Path, message: impl Into<String>) -> RunError {
    RunError::Damaged { path: path.to_path_buf(), message: message.into() }
}

/// `recipe.yaml`. It is resolved, so that neither other files nor the environment have a say.
pub(crate) fn recipe(folder: &Path, sections: &dyn Sections) -> Result<Recipe, RunError> {
    let path = folder.join("recipe.yaml");
    let text = String::from_utf8(read(&path)?).map_err(|e| damaged(&path, e.to_string()))?;
    Ok(Recipe::parse(&path.display().to_string(), &text, &[], sections)?)
}

/// Writes `recipe.yaml`. One that holds this run already stays: its comments say where the values came from.
pub(crate) fn write_recipe(recipe: &Recipe, registries: &Registries, folder: &Path) -> Result<(), RunError> {
    let there =
        || self::recipe(folder, registries).is_ok_and(|r| r.id() == recipe.id() && r.name == recipe.name);
    if there() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(RunError::io(folder))?;
    match taper_files::replace(&folder.join("recipe.yaml"), recipe.to_yaml().as_bytes()) {
        // A sweep writes it before its worker has the lock: another may have placed it and cleared away strays meanwhile.
        Err(_) if there() => Ok(()),
        written => Ok(written?),
    }
}

/// `manifest.json`.
pub(crate) fn manifest(folder: &Path) -> Result<Manifest, RunError> {
    let path = folder.join("manifest.json");
    serde_json::from_slice(&read(&path)?).map_err(|e| damaged(&path, e.to_string()))
}

/// `summary.json`, once there is one.
pub(crate) fn summary(folder: &Path) -> Result<Option<Summary>, RunError> {
    let path = folder.join("summary.json");
    let text = match fs::read(&path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        text => text.map_err(RunError::io(&path))?,
    };
    let advice = "remove it, and the run goes on from its last checkpoint";
    let unread = |e: serde_json::Error| damaged(&path, format!("{e}: {advice}"));
    let summary: Summary = serde_json::from_slice(&text).map_err(unread)?;
    let sealed = summary.clone().sealed().map_err(unread)?;
    if sealed.sha256 != summary.sha256 {
        let sums = format!("sha256 was {} when it was written, is {}", summary.sha256, sealed.sha256);
        return Err(damaged(&path, format!("{sums}: {advice}")));
    }
    Ok(Some(summary))
}

/// `metrics.jsonl`: its lines as they stand and as records. A last line without its end is one that a crash cut off.
pub(crate) fn records(folder: &Path) -> Result<Vec<(String, Record)>, RunError> {
    let path = folder.join("metrics.jsonl");
    let text = read(&path)?;
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&text[..whole]).map_err(|e| damaged(&path, e.to_string()))?;
    let parse = |(i, line): (usize, &str)| match serde_json::from_str(line) {
        Ok(record) => Ok((line.to_owned(), record)),
        Err(e) => Err(damaged(&path, format!("line {}: {e}", i + 1))),
    };
    text.lines().enumerate().map(parse).collect()
}

/// The outcome of a run that came to its end, `None` where it has not.
pub(crate) fn finished(folder: &Path, recipe: &Recipe) -> Result<Option<Outcome>, RunError> {
    let Some(summary) = summary(folder)?.filter(|summary| summary.status != Status::Interrupted) else {
        return Ok(None);
    };
    let path = folder.join("summary.json");
    if summary.id != recipe.id() {
        let message = format!("belongs to the recipe {}, this run is {}", summary.id, recipe.id());
        return Err(damaged(&path, message));
    }
    let records: Vec<Record> = records(folder)?.into_iter().map(|(_, record)| record).collect();
    follows(&summary, &records).map_err(|message| damaged(&path, message))?;
    let (data, seconds) = (manifest(folder)?.data, timing::total(folder));
    Ok(Some(Outcome { folder: folder.to_path_buf(), summary, records, data, seconds }))
}

/// Whether the summary is the one of these records.
pub(crate) fn follows(summary: &Summary, records: &[Record]) -> Result<(), String> {
    let (last, best) = extremes(records);
    let again = Summary { last, best, ..summary.clone() };
    // As text, where NaN equals itself.
    match (serde_json::to_string(&again), serde_json::to_string(summary)) {
        (Ok(again), Ok(found)) if again == found => Ok(()),
        _ => Err("is not the summary of metrics.jsonl, one of them was changed: \
                  remove summary.json, and the run goes on from its last checkpoint"
            .into()),
    }
}
