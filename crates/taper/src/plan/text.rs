//! The plan as a listing.
use super::{Estimate, Group, Kind, Plan, Shared};
use std::collections::HashMap;
use std::fmt;
use taper_train::sweep::setting_text;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = self.runs.iter().filter(|run| run.status != "missing");
        let marks: HashMap<&str, &'static str> = done.map(|run| (run.id.as_str(), run.status)).collect();
        let mark = |run: &taper_train::Recipe| marks.get(run.id()).copied().unwrap_or("");
        f.write_str(&self.recipe.plan_marked(&mark))?;
        if !marks.is_empty() {
            writeln!(f, "  {} done, {} to do", marks.len(), self.runs.len() - marks.len())?;
        }
        for (index, kind) in self.kinds.iter().enumerate() {
            let runs = self.runs.iter().filter(|run| run.kind == index).count();
            writeln!(f)?;
            write_kind(f, kind, runs)?;
            if let Some(shared) = self.shared.as_ref().and_then(|shared| shared.get(index)) {
                write_shared(f, shared)?;
            }
        }
        if !self.schedules.is_empty() {
            writeln!(f)?;
        }
        for curve in self.schedules.iter().take(DRAWN) {
            write!(f, "{curve}")?;
        }
        if let more @ 1.. = self.schedules.len().saturating_sub(DRAWN) {
            writeln!(f, "  … and {more} more schedules; --out FILE.svg draws them all")?;
        }
        match &self.estimate {
            Some(estimate) => write_estimate(f, self, estimate),
            None => Ok(()),
        }
    }
}

/// So many schedules are drawn.
const DRAWN: usize = 3;

fn write_kind(f: &mut fmt::Formatter<'_>, kind: &Kind, runs: usize) -> fmt::Result {
    let Kind { model, optimizer, .. } = kind;
    let (epochs, steps) = (counted(kind.epochs, "epoch"), counted(kind.steps, "step"));
    writeln!(f, "{model} by {optimizer}: {} of {epochs}, {steps}", counted(runs as u64, "run"))?;
    writeln!(f, "  {} parameters", grouped(kind.parameters as u64))?;
    for group in &kind.groups {
        write_group(f, group)?;
    }
    if let Some(stand_in) = &kind.stand_in {
        let program = taper_files::program();
        writeln!(f, "  the data is not here (`{program} data fetch` gets it): {stand_in} in its place")?;
    }
    if let Some(probe) = &kind.probe {
        let (step, run) = (duration(probe.step_seconds), duration(probe.run_seconds));
        let (checkpoint, disk) = (bytes(probe.checkpoint_bytes), bytes(probe.run_bytes));
        let (steps, batches) = (probe.steps as u64, probe.evaluation_batches as u64);
        write!(f, "  {step} a step ({} measured), ", counted(steps, "step"))?;
        if batches > 0 {
            let evaluation = duration(probe.evaluation_seconds);
            let batches = if batches == 1 { "1 batch".into() } else { format!("{batches} batches") };
            write!(f, "{evaluation} an evaluation ({batches} measured), ")?;
        }
        writeln!(f, "{run} a run")?;
        writeln!(f, "  {checkpoint} a checkpoint: {disk} a run")?;
    }
    Ok(())
}

fn write_shared(f: &mut fmt::Formatter<'_>, shared: &Shared) -> fmt::Result {
    let Shared { ranks, shards, shards_each, sent_bytes, state_bytes, peak_mb } = shared;
    write!(
        f,
        "  {}: {shards_each} of {} each",
        counted(*ranks as u64, "process"),
        counted(*shards as u64, "shard")
    )?;
    write!(f, ", at most {} sent a step, {} of optimizer state", bytes(*sent_bytes), bytes(*state_bytes))?;
    match peak_mb {
        Some(mb) => writeln!(f, ", about {mb} MB of memory each"),
        None => writeln!(f),
    }
}

/// So many names are listed of a group.
const NAMES: usize = 6;

fn write_group(f: &mut fmt::Formatter<'_>, group: &Group) -> fmt::Result {
    let what = match (&group.optimizer, &group.pattern) {
        (None, _) => "frozen".to_owned(),
        (Some(optimizer), None) => optimizer.clone(),
        // The pattern that `no_decay` makes is the list of its names.
        (Some(optimizer), Some(pattern)) if pattern.len() > 60 => format!("{optimizer}, no_decay"),
        (Some(optimizer), Some(pattern)) => format!("{optimizer}, {pattern}"),
    };
    let settings: Vec<String> =
        group.settings.iter().map(|(key, value)| format!("{key}: {}", setting_text(value))).collect();
    let tensors = group.names.len();
    writeln!(f, "  {what}: {} in {}", grouped(group.elements as u64), counted(tensors as u64, "tensor"))?;
    if !settings.is_empty() {
        writeln!(f, "    {{{}}}", settings.join(", "))?;
    }
    let more = tensors.saturating_sub(NAMES);
    let listed = group.names.iter().take(NAMES).cloned().collect::<Vec<_>>().join(", ");
    match more {
        0 => writeln!(f, "    {listed}"),
        more => writeln!(f, "    {listed}, … and {more} more"),
    }
}

fn write_estimate(f: &mut fmt::Formatter<'_>, plan: &Plan, estimate: &Estimate) -> fmt::Result {
    let threads = counted(estimate.threads as u64, "thread");
    writeln!(f, "\nestimate for this machine with {threads}, one run at a time")?;
    let all = duration(estimate.seconds);
    match plan.runs.iter().any(|run| run.status != "missing") {
        true => writeln!(
            f,
            "  time    {} for what is missing, {all} for all",
            duration(estimate.missing_seconds)
        )?,
        false => writeln!(f, "  time    {all}")?,
    }
    match estimate.peak_mb {
        Some(mb) => writeln!(f, "  memory  {mb} MB at the peak of the steps measured")?,
        None => writeln!(f, "  memory  not told by this system")?,
    }
    writeln!(f, "  disk    {}", bytes(estimate.disk_bytes))
}

/// A number of things.
fn counted(number: u64, thing: &str) -> String {
    let more = if thing.ends_with('s') { "es" } else { "s" };
    format!("{} {thing}{}", grouped(number), if number == 1 { "" } else { more })
}

/// Digits in threes.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

fn bytes(n: u64) -> String {
    let n = n as f64;
    match n {
        n if n < 1e6 => format!("{:.0} kB", n / 1e3),
        n if n < 1e9 => format!("{:.1} MB", n / 1e6),
        n => format!("{:.1} GB", n / 1e9),
    }
}

fn duration(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    match seconds {
        s if s < 1.0 => format!("{:.2} ms", 1e3 * s),
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{} min {:02} s", s as u64 / 60, s as u64 % 60),
        s if s < 48.0 * 3600.0 => format!("{} h {:02} min", minutes / 60, minutes % 60),
        s => format!("{:.1} days", s / 86400.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_read_well() {
        assert_eq!([grouped(7), grouped(79_510), grouped(1_000_000)], ["7", "79,510", "1,000,000"]);
        assert_eq!([bytes(999), bytes(1_500_000), bytes(3_000_000_000)], ["1 kB", "1.5 MB", "3.0 GB"]);
        let times = [0.0021, 12.0, 61.0, 3725.0, 200_000.0].map(duration);
        assert_eq!(times, ["2.10 ms", "12.0 s", "1 min 01 s", "1 h 02 min", "2.3 days"]);
    }
}
