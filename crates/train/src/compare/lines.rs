//! The first difference between two records of metrics.
use super::Shown;
use crate::run::Record;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;

/// A line of `metrics.jsonl` that is not the same in both runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LineDifference {
    /// Its number, from 1.
    pub line: usize,
    /// Its step (in the first run, where the steps differ).
    pub step: u64,
    /// What it was measured on.
    pub split: &'static str,
    /// The key whose values differ; `None` where one run has no such line.
    pub key: Option<String>,
    /// The first run's value; `None` where it has none.
    pub a: Option<Shown>,
    /// The second run's value; `None` where it has none.
    pub b: Option<Shown>,
}

impl fmt::Display for LineDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { line, step, split, key, a, b } = self;
        write!(f, "line {line}, step {step}, {split}")?;
        let side = |side: &Option<Shown>| side.as_ref().map_or("nothing".to_owned(), Shown::to_string);
        match key {
            Some(key) => write!(f, " {key}: {} | {}", side(a), side(b)),
            None => write!(f, ": only in the {} run", if a.is_some() { "first" } else { "second" }),
        }
    }
}

/// The number of equal lines, and what comes after them. Lines come as they stand in the file and as records.
pub(crate) fn first_difference(
    a: &[(String, Record)],
    b: &[(String, Record)],
) -> (usize, Option<LineDifference>) {
    let equal = a.iter().zip(b).take_while(|((a, _), (b, _))| a == b).count();
    let line = |record: &Record, key, a, b| {
        Some(LineDifference { line: equal + 1, step: record.step, split: record.split.name(), key, a, b })
    };
    let there = || Some(Shown::from("a line".to_owned()));
    let difference = match (a.get(equal), b.get(equal)) {
        (None, None) => None,
        (Some((_, record)), None) => line(record, None, there(), None),
        (None, Some((_, record))) => line(record, None, None, there()),
        (Some((text_a, a)), Some((text_b, b))) => {
            let (key, shown_a, shown_b) = key_difference(a, b).unwrap_or_else(|| {
                // The same values in another spelling: no run of ours writes that.
                let text = |text: &String| Some(text.clone().into());
                ("spelling".to_owned(), text(text_a), text(text_b))
            });
            line(a, Some(key), shown_a, shown_b)
        }
    };
    (equal, difference)
}

fn key_difference(a: &Record, b: &Record) -> Option<(String, Option<Shown>, Option<Shown>)> {
    let place = |r: &Record| [r.step.to_string(), r.epoch.to_string(), r.split.name().to_owned()];
    let places = place(a).into_iter().zip(place(b)).zip(["step", "epoch", "split"]);
    for ((a, b), key) in places {
        if a != b {
            return Some((key.to_owned(), Some(a.into()), Some(b.into())));
        }
    }
    let keys: BTreeSet<&String> = a.values.keys().chain(b.values.keys()).collect();
    keys.into_iter().find_map(|key| {
        let shown = |record: &Record| record.values.get(key).map(|value| Shown::f64(*value));
        let (a, b) = (shown(a), shown(b));
        (a != b).then(|| (key.clone(), a, b))
    })
}
