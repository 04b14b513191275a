//! Checks a run's record: its files against each other, and its beginning against a second training.
use crate::compare::{CheckpointDifference, LineDifference, checkpoint_difference, line_difference};
use crate::run::folder::{Manifest, Stretch};
use crate::run::{
    Inputs, Options, Outcome, Record, RunError, Status, Summary, checkpoint, folder, tensorboard,
};
use crate::{Recipe, Registries, run};
use serde::Serialize;
use std::fmt;
use std::path::Path;

/// What was checked and found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Verification {
    /// Whether nothing was found wrong.
    pub verified: bool,
    /// The steps of the checkpoints that are intact and vouch for the metrics there are.
    pub intact: Vec<u64>,
    /// What does not fit together in the run's own files.
    pub damage: Vec<String>,
    /// Steps that were trained again.
    pub steps: u64,
    /// Lines of metrics that came out the same.
    pub equal_lines: usize,
    /// The steps of checkpoints that came out the same.
    pub equal_checkpoints: Vec<u64>,
    /// Whether the run was trained again to its end, and its summary is the same.
    pub equal_summary: bool,
    /// The first line that came out otherwise.
    pub metrics: Option<LineDifference>,
    /// The first checkpoint that came out otherwise.
    pub checkpoint: Option<CheckpointDifference>,
    /// What was not the same to begin with: the data, the processor, the version.
    pub notes: Vec<String>,
}

/// Checks the run in `folder` and trains its first steps again: as many as `steps`, else as far as its first line of
/// metrics. Of `options`, the folder of all runs is not used.
pub fn verify(
    folder: &Path,
    steps: Option<u64>,
    registries: &Registries,
    options: &Options,
) -> Result<Verification, RunError> {
    let recipe = folder::recipe(folder, registries)?;
    let lines = folder::lines(folder)?;
    let mut found = Verification::default();
    check_files(folder, &recipe, &lines, &mut found)?;

    let known = || lines.iter().map(|(_, record)| record.step).chain(found.intact.iter().copied());
    let (Some(first), Some(last)) = (known().min(), known().max()) else {
        let message = "has neither metrics nor a checkpoint yet: there is nothing to verify".to_owned();
        return Err(RunError::Damaged { path: folder.to_path_buf(), message });
    };
    let steps = steps.unwrap_or(first).min(last);
    if steps < first {
        let message =
            format!("records nothing before step {first}: verify at least so many steps, found {steps}");
        return Err(RunError::Damaged { path: folder.to_path_buf(), message });
    }
    let scratch = taper_files::scratch()?;
    let options = Options { runs: scratch.path().into(), ..options.clone() };
    train_again(folder, &recipe, &lines, steps, registries, &options, &mut found)?;
    found.steps = steps;
    found.verified = found.damage.is_empty() && found.metrics.is_none() && found.checkpoint.is_none();
    Ok(found)
}

/// The run's files against each other.
fn check_files(
    folder: &Path,
    recipe: &Recipe,
    lines: &[(String, Record)],
    found: &mut Verification,
) -> Result<(), RunError> {
    let manifest = folder::manifest(folder).map_err(|e| found.damage.push(e.to_string())).ok();
    if let Some(manifest) = manifest.as_ref().filter(|manifest| manifest.recipe != recipe.id()) {
        let ids = format!("recipe.yaml has the id {}, manifest.json {}", recipe.id(), manifest.recipe);
        found.damage.push(format!("{ids}: one of them was changed"));
    }
    let records: Vec<Record> = lines.iter().map(|(_, record)| record.clone()).collect();
    if let Some(summary) = folder::summary(folder)? {
        if summary.id != recipe.id() {
            let ids = format!("recipe.yaml has the id {}, summary.json {}", recipe.id(), summary.id);
            found.damage.push(format!("{ids}: one of them was changed"));
        }
        if summary.status != Status::Interrupted {
            if let Err(message) = folder::follows(&summary, &records) {
                found.damage.push(format!("summary.json {message}"));
            }
            if checkpoint::removed(folder) {
                found.notes.push("its checkpoints were removed: there are metrics alone to compare".into());
            }
            let seals = manifest.as_ref().map(|manifest| folder::sealed(folder, &summary, manifest));
            found.damage.extend(seals.unwrap_or_default().iter().map(RunError::to_string));
        }
    }
    let path = folder.join("metrics.jsonl");
    let metrics = std::fs::read(&path).map_err(RunError::io(&path))?;
    let seen = seen(folder)?;
    for step in checkpoint::steps(folder)?.into_iter().rev() {
        let read = checkpoint::read(&checkpoint::path(folder, step));
        let fits = read.and_then(|loaded| {
            loaded.belongs_to(folder, step, recipe.id(), &metrics)?;
            loaded.saw(folder, &seen)
        });
        match fits {
            Ok(()) => found.intact.push(step),
            Err(e) => found.damage.push(e.to_string()),
        }
    }
    let path = folder.join(tensorboard::FILE);
    let events = std::fs::read(&path).map_err(RunError::io(&path))?;
    if events != tensorboard::file(&records) {
        found.damage.push(format!("{}: is not what metrics.jsonl comes to", path.display()));
    }
    Ok(())
}

/// The bytes of `probe.jsonl`; none where there was no microscope.
fn seen(folder: &Path) -> Result<Vec<u8>, RunError> {
    let path = folder.join(run::PROBE);
    match std::fs::read(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read.map_err(RunError::io(&path)),
    }
}

/// The first line of `probe.jsonl` up to a step that came out otherwise, of what was seen then and now.
fn sight_difference(then: &[u8], now: &[u8], stop: u64) -> Option<usize> {
    let step = |line: &[u8]| {
        let sight: Option<run::Sight> = serde_json::from_slice(line).ok();
        sight.is_none_or(|sight| sight.step <= stop)
    };
    let whole = |bytes: &[u8]| bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let lines = |bytes: &[u8]| -> Vec<Vec<u8>> {
        let lines = bytes[..whole(bytes)].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(<[u8]>::to_vec).take_while(|line| step(line)).collect()
    };
    let (then, now) = (lines(then), lines(now));
    (0..then.len().max(now.len())).find(|line| then.get(*line) != now.get(*line)).map(|line| line + 1)
}

/// The beginning of the run, trained again, against its record.
fn train_again(
    folder: &Path,
    recipe: &Recipe,
    lines: &[(String, Record)],
    steps: u64,
    registries: &Registries,
    options: &Options,
    found: &mut Verification,
) -> Result<(), RunError> {
    let again = options.runs.join(recipe.directory());
    // Old checkpoints go while a run is trained: it stops at each that there is something to compare with.
    let mut stops: Vec<u64> = found.intact.iter().copied().filter(|step| *step < steps).collect();
    stops.push(steps);
    for stop in stops {
        let ended = reach(stop, recipe, registries, options)?;
        if found.notes.is_empty() {
            found.notes = notes(folder, &again)?;
        }
        let record = folder::lines(&again)?;
        let theirs: Vec<_> = lines.iter().filter(|(_, record)| record.step <= stop).cloned().collect();
        (found.equal_lines, found.metrics) = line_difference(&theirs, &record);
        if let Some(line) = sight_difference(&seen(folder)?, &seen(&again)?, stop) {
            let path = folder.join(run::PROBE);
            found.damage.push(format!("{}: line {line} came out otherwise", path.display()));
            return Ok(());
        }
        if found.intact.contains(&stop) {
            found.checkpoint = checkpoint_difference(folder, &again, stop)?;
            found.equal_checkpoints.extend(found.checkpoint.is_none().then_some(stop));
        }
        if found.metrics.is_some() || found.checkpoint.is_some() {
            return Ok(());
        }
        if ended && let (Some(theirs), Some(ours)) = (folder::summary(folder)?, folder::summary(&again)?) {
            found.equal_summary = theirs == ours;
            if !found.equal_summary && theirs.status != Status::Interrupted {
                found.damage.push("summary.json came out otherwise".into());
            }
        }
    }
    Ok(())
}

/// Trains up to a step, and says whether the run has come to its end.
fn reach(stop: u64, recipe: &Recipe, registries: &Registries, options: &Options) -> Result<bool, RunError> {
    let mut reached = None;
    loop {
        match run::run_until(recipe, registries, options, stop) {
            // A budget of time ends a session, not the run; one without a step would do so for ever.
            Ok(Outcome { summary: Summary { status: Status::Interrupted, steps, .. }, .. })
                if reached < Some(steps) =>
            {
                reached = Some(steps);
            }
            Ok(_) | Err(RunError::Diverged { .. }) => return Ok(true),
            Err(RunError::Interrupted { step }) if step >= stop => return Ok(false),
            Err(e) => return Err(e),
        }
    }
}

/// What the two trainings did not have in common.
fn notes(folder: &Path, again: &Path) -> Result<Vec<String>, RunError> {
    // One that cannot be read is damage, which is told.
    let Ok(then) = folder::manifest(folder) else { return Ok(Vec::new()) };
    let now = folder::manifest(again)?;
    let mut notes = Vec::new();
    if let Some(change) = Inputs::from(&now).differ_from(&Inputs::from(&then)) {
        notes.push(format!(
            "the inputs are not those of the run: nothing can be expected to be equal: {change}"
        ));
    }
    let distinct = |manifest: &Manifest, of: &dyn Fn(&Stretch) -> String| {
        let mut all: Vec<String> = manifest.stretches.iter().map(of).collect();
        all.dedup();
        all
    };
    let arithmetic = |manifest: &Manifest| distinct(manifest, &Stretch::arithmetic);
    if arithmetic(&then).len() > 1 {
        let all = arithmetic(&then).join(", then ");
        notes.push(format!("the run is mixed: trained on {all}; only its start can be repeated here"));
    }
    if arithmetic(&then).first() != arithmetic(&now).first() {
        let name = |manifest: &Manifest| arithmetic(manifest).first().cloned().unwrap_or_default();
        let (then, now) = (name(&then), name(&now));
        notes.push(format!("trained on {then}, verified on {now}: other kernels, so bits may differ"));
    }
    let version = |stretch: &Stretch| match &stretch.revision {
        Some(revision) => format!("{} ({revision})", stretch.taper),
        None => stretch.taper.clone(),
    };
    let versions = |manifest: &Manifest| distinct(manifest, &version).join(", ");
    if versions(&then) != versions(&now) {
        let (then, now) = (versions(&then), versions(&now));
        notes.push(format!("trained by version {then}, verified by {now}: bits may differ"));
    }
    Ok(notes)
}

impl fmt::Display for Verification {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |steps: &[u64]| match steps {
            [] => "none".to_owned(),
            steps => format!("step {}", steps.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
        };
        writeln!(f, "intact checkpoints: {}", list(&self.intact))?;
        self.damage.iter().try_for_each(|damage| writeln!(f, "damaged: {damage}"))?;
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))?;
        let trained = format!("{} steps trained again", self.steps);
        let lines = self.equal_lines;
        match &self.metrics {
            Some(difference) => {
                writeln!(f, "{trained}; {lines} lines equal, then | trained again: {difference}")?
            }
            None => writeln!(f, "{trained}: {lines} lines of metrics equal bit for bit")?,
        }
        match &self.checkpoint {
            Some(difference) => writeln!(f, "checkpoint | trained again: {difference}")?,
            None => writeln!(f, "checkpoints equal bit for bit: {}", list(&self.equal_checkpoints))?,
        }
        if self.equal_summary {
            writeln!(f, "trained to its end, with the same summary")?;
        }
        f.write_str(if self.verified { "verified\n" } else { "not verified\n" })
    }
}
