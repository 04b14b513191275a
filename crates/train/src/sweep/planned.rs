//! What sweeps have before them, for those who watch: a file in the folder of runs that names the runs of a sweep that had no result
//! when it began. Nobody else reads it, and nothing depends on it. It goes when every run was tried; a sweep that was interrupted
//! leaves it, for the runs are still to be done.
use super::Sweep;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use tracing::warn;

const BEFORE: &str = ".planned-";
const AFTER: &str = ".json";
/// A longer file is none of ours.
const LONGEST: u64 = 16 << 20;

/// The file of a sweep: a later one of the same name replaces it.
fn path(sweep: &Sweep) -> Option<PathBuf> {
    let name = &sweep.runs.first()?.recipe.name;
    Some(sweep.options.runs.join(format!("{BEFORE}{name}{AFTER}")))
}

/// Says what is missing. A sweep that cannot say it is done all the same.
pub(super) fn say(sweep: &Sweep) {
    let Some(path) = path(sweep) else { return };
    let missing: Vec<(String, String)> = sweep
        .missing()
        .filter_map(|run| Some((run.folder.file_name()?.to_string_lossy().into_owned(), run.label())))
        .collect();
    let text = serde_json::to_string_pretty(&missing).unwrap_or_default();
    if let Err(e) = taper_files::place(&path, text.as_bytes()) {
        warn!("{e}: what is planned is not shown");
    }
}

/// Nothing is before it any more.
pub(super) fn done(sweep: &Sweep) {
    if let Some(path) = path(sweep) {
        // Another process that did the same sweep may have been first.
        let _ = fs::remove_file(path);
    }
}

/// The runs that sweeps in a folder of runs had before them when they began, in their order: the names of their folders, and what
/// tells them from the others. A file that cannot be read says nothing.
pub fn planned(runs: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(runs).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with(BEFORE) && name.ends_with(AFTER) && path.is_file()
    };
    let mut files: Vec<PathBuf> = entries.filter(is_ours).collect();
    files.sort();
    let mut planned = Vec::new();
    for path in files {
        let mut text = String::new();
        let is_read = fs::File::open(path).and_then(|file| file.take(LONGEST).read_to_string(&mut text));
        if is_read.is_ok()
            && let Ok(of_one) = serde_json::from_str::<Vec<(String, String)>>(&text)
        {
            planned.extend(of_one);
        }
    }
    planned
}
