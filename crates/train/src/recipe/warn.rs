//! What a recipe says to no effect, though nothing is wrong with it: a milestone that a shortened run does not reach.

use serde_json::Value;
use taper_optim::{Per, Schedule};

use super::error::{ErrorKind, RecipeError};
use super::path::Path;
use super::schema::{Average, Freeze, Precision, Spec};
use super::{Recipe, RecipeWarning};
use crate::Schedules;

/// How long a run is, as far as it is known: epochs and steps.
type Length = (Option<u64>, Option<u64>);

impl Recipe {
    /// What the recipe says to no effect, as far as that can be told without its data, each where it says so. Of a sweep,
    /// what any of its runs does.
    pub fn warnings(&self) -> Vec<RecipeWarning> {
        let all = self.runs().iter().flat_map(|run| run.warnings_over(run.length()));
        let mut seen = std::collections::HashSet::new();
        all.filter(|warning| seen.insert(warning.to_string())).collect()
    }

    /// The same for one run whose epochs and steps are known.
    pub fn warnings_for(&self, epochs: u64, steps: u64) -> Vec<RecipeWarning> {
        self.warnings_over((Some(epochs), Some(steps)))
    }

    fn length(&self) -> Length {
        let train = &self.spec.train;
        let steps = train.steps.map(|steps| steps.min(train.budget.steps.unwrap_or(steps)));
        (train.epochs, steps)
    }

    fn warnings_over(&self, (epochs, steps): Length) -> Vec<RecipeWarning> {
        let Spec { schedule, train, .. } = &self.spec;
        let mut found = Vec::new();
        // The section was checked; of what cannot be read there is nothing to say here.
        if let Ok(Schedules { per, rate, momentum }) = Schedules::new(&schedule.kind, &schedule.config) {
            let (total, unit) = match per {
                Per::Epoch => (epochs, "epochs"),
                Per::Step => (steps, "steps"),
            };
            if let Some(total) = total {
                let warmup = |config: Option<&Value>| config.and_then(Value::as_u64).unwrap_or(0);
                let own = warmup(schedule.config.get("warmup"));
                if own == 1 {
                    let message =
                        format!("a warm-up of 1 is none: the rate is full in the first of the {unit}");
                    found.push(("schedule.warmup".to_owned(), message));
                }
                let mut beyond = Beyond { total, unit, warmup: own, found: Vec::new() };
                beyond.look(rate.schedule(), (0, total), "schedule");
                if let Some(momentum) = &momentum {
                    let config = schedule.config.get("momentum");
                    beyond.warmup = warmup(config.and_then(|config| config.get("warmup")));
                    beyond.look(momentum, (0, total), "schedule.momentum");
                }
                found.extend(beyond.found);
            }
        }
        if let (Average::Ema { start, .. } | Average::Swa { start, .. }, Some(epochs)) =
            (&train.average, epochs)
            && *start >= epochs
        {
            let message = format!(
                "the average would begin at epoch {start}, of a run of {epochs} epochs: there is none"
            );
            found.push(("train.average.start".to_owned(), message));
        }
        if train.precision == Precision::Bf16
            && taper_models::ops::multiplies_bf16().is_ok_and(|native| !native)
        {
            let message = "this CPU has no instruction for products of bf16: they are made of f32's, with the same result, and \
                           take longer than those of `precision: f32`";
            found.push(("train.precision".to_owned(), message.to_owned()));
        }
        if let Some(steps) = steps {
            for (i, freeze) in train.freeze.iter().enumerate() {
                if let Freeze::Later(later) = freeze
                    && later.after_steps >= steps
                {
                    let message =
                        format!("the run of {steps} steps is over before `{}` is frozen", later.pattern);
                    found.push((format!("train.freeze[{i}].after_steps"), message));
                }
            }
            if let Average::Lookahead { every, .. } = train.average
                && every > steps
            {
                let message = format!("the slow weights would move every {every} steps, of a run of {steps}");
                found.push(("train.average.every".to_owned(), message));
            }
        }
        let warning = |(path, message): (String, String)| {
            let place = self.layers.place(&Path::parse(&path));
            RecipeError::new(ErrorKind::Value, message).at_opt(place).warning()
        };
        found.into_iter().map(warning).collect()
    }
}

/// What of a schedule lies beyond the end.
struct Beyond {
    total: u64,
    unit: &'static str,
    /// The length of a warm-up that the schedule has by its key `warmup`; 0 for none.
    warmup: u64,
    found: Vec<(String, String)>,
}

impl Beyond {
    /// Looks at a schedule that runs from `start` to `end`.
    fn look(&mut self, schedule: &Schedule, (start, end): (u64, u64), path: &str) {
        let (total, unit, span) = (self.total, self.unit, end.saturating_sub(start));
        // Milestones after such a warm-up have the times of the run.
        let shift = if start == self.warmup { self.warmup } else { 0 };
        let mut note = |key: &str, message: String| {
            let path = if key.is_empty() { path.to_owned() } else { format!("{path}.{key}") };
            self.found.push((path, message));
        };
        match schedule {
            Schedule::Milestones { at, .. } => {
                for (i, at) in at.iter().enumerate().filter(|(_, at)| **at >= span) {
                    let message = format!(
                        "the milestone at {} is never reached: the schedule ends after {} {unit}",
                        at + shift,
                        span + shift
                    );
                    note(&format!("at[{i}]"), message);
                }
            }
            Schedule::Cosine { length: Some(length), .. }
            | Schedule::Polynomial { length: Some(length), .. }
                if *length > span =>
            {
                let factor = schedule.factor(span, span);
                let message = format!(
                    "the schedule is cut short: it takes {length} {unit} and has {span}, so that it ends at a factor of {factor:.3}"
                );
                note("length", message);
            }
            Schedule::Warmup { length, .. } if *length > span => {
                let message = format!(
                    "the warm-up takes {length} {unit} and has {span}: the full rate is never reached"
                );
                note(if self.warmup > 0 { "" } else { "length" }, message);
            }
            Schedule::Sequence { parts } => {
                let mut from = start;
                for (i, part) in parts.iter().enumerate() {
                    let path = match (self.warmup, i) {
                        (0, _) => format!("{path}.parts[{i}].schedule"),
                        // It is written as one schedule with a number before it.
                        (_, 0) => format!("{path}.warmup"),
                        _ => path.to_owned(),
                    };
                    if from >= total {
                        let message =
                            format!("this part begins after {from} {unit}, when the run of {total} is over");
                        self.found.push((path, message));
                        break;
                    }
                    let end = if i + 1 == parts.len() { end } else { part.until.min(end) };
                    self.look(&part.schedule, (from, end), &path);
                    from = part.until;
                }
            }
            _ => {}
        }
    }
}
