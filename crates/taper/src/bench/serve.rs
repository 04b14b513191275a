//! Our side of a comparison: one case, run on demand.
use super::side::Ready;
use super::{BenchError, Case, Work, device, select};
use crate::profile::Profile;
use std::io::{BufRead, Write};
use std::time::Instant;

/// Prepares the case of exactly that name and runs it whenever a line of `input` asks for it.
pub fn serve(name: &str, input: impl BufRead, mut output: impl Write) -> Result<(), BenchError> {
    let Case { prepare, repeat, .. } = named(name)?;
    let prepared = prepare()?;
    let mut ours = prepared.ours;
    // Two runs, so that everything is there that the work ever needs; the yardsticks' memory is not counted.
    ours()?;
    ours()?;
    let who = format!("taper {}", env!("CARGO_PKG_VERSION"));
    let beside = prepared.beside.iter().map(|(name, amount, _)| ((*name).to_owned(), *amount)).collect();
    let ready = Ready { who, peak_mb: taper_train::run::peak_megabytes(), beside };
    let mut yardsticks =
        prepared.beside.into_iter().map(|(_, _, make)| make()).collect::<Result<Vec<_>, _>>()?;
    let mut say = |value: serde_json::Value| {
        writeln!(output, "{value}")
            .and_then(|()| output.flush())
            .map_err(|source| BenchError::Io { path: "output".into(), source })
    };
    say(serde_json::json!(ready))?;
    for line in input.lines() {
        let line = line.map_err(|source| BenchError::Io { path: "input".into(), source })?;
        let seconds = match line.trim().parse::<usize>().ok().and_then(|i| yardsticks.get_mut(i)) {
            Some(yardstick) => time(yardstick, 1)?,
            None => time(&mut ours, repeat)?,
        };
        say(seconds.into())?;
    }
    Ok(())
}

/// Runs a case for some seconds under a profiler.
pub fn watch(case: Case, profile: &Profile) -> Result<(), BenchError> {
    let mut ours = (case.prepare)()?.ours;
    // The first call allocates what the others use again.
    ours()?;
    profile.reset();
    let started = Instant::now();
    let mut calls = 0;
    while calls < 3 || started.elapsed().as_secs_f64() < 2.0 {
        ours()?;
        calls += 1;
    }
    Ok(())
}

/// What this machine can do at most, in GFLOP/s: the best of some large matrix products.
pub fn peak() -> Result<f64, BenchError> {
    let case = named("gemm/2048")?;
    let mut work = (case.prepare)()?.ours;
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        best = best.min(time(&mut work, 1)?);
    }
    Ok(case.amount / best)
}

fn named(name: &str) -> Result<Case, BenchError> {
    let unknown = || BenchError::Unknown { name: name.to_owned(), known: Vec::new() };
    select(&[name.to_owned()])?.into_iter().find(|case| case.name == name).ok_or_else(unknown)
}

/// Seconds of one call, until the device is done.
fn time(work: &mut Work, repeat: u32) -> Result<f64, BenchError> {
    device().synchronize()?;
    let started = Instant::now();
    for _ in 0..repeat {
        work()?;
    }
    device().synchronize()?;
    Ok(started.elapsed().as_secs_f64() / f64::from(repeat))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_served_case_answers_line_by_line() {
        let mut output = Vec::new();
        serve("gemm/256", "\"run\"\n\"run\"\n".as_bytes(), &mut output).unwrap();
        let lines: Vec<&str> = std::str::from_utf8(&output).unwrap().lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].contains("taper") && lines[1..].iter().all(|l| l.parse::<f64>().unwrap() > 0.0));
        assert!(matches!(named("gemm"), Err(BenchError::Unknown { .. })));
    }
}
