//! Schedules: what the learning rate or the momentum is multiplied by over time.
use crate::{Error, Result};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A factor as a function of time, counted in steps or epochs from 0.
///
/// ```
/// use taper_optim::Schedule;
/// let schedule = Schedule::Milestones { at: vec![150], factor: 0.1 };
/// assert_eq!(schedule.factor(149, 200), 1.0);
/// assert_eq!(schedule.factor(150, 200), 0.1);
/// ```
#[derive(Clone, Debug, Default, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// Always 1.
    #[default]
    Constant,
    /// Multiplied by `factor` at each of the times `at`.
    Milestones {
        /// When, ascending.
        at: Vec<u64>,
        /// By what.
        factor: f64,
    },
    /// From 1 along half a cosine to `end` after `length`, then constant.
    Cosine {
        /// How long; the whole run unless given.
        length: Option<u64>,
        /// The last factor.
        end: f64,
    },
    /// From `start` linearly to 1, reached at the `length`-th step or epoch, then constant.
    Warmup {
        /// How long.
        length: u64,
        /// The factor the line starts from (one unit of time before the first).
        start: f64,
    },
    /// From `start` along a line to 1, reached at the share `peak_at` of the whole run, and along a line to `end` at its end.
    Triangle {
        /// The first factor.
        start: f64,
        /// When the factor is 1, as a share of the run.
        peak_at: f64,
        /// The factor after the last step or epoch.
        end: f64,
    },
    /// (1 - t/length)^power from 1 to `end`, then constant.
    Polynomial {
        /// How long; the whole run unless given.
        length: Option<u64>,
        /// The exponent; 1 is a straight line.
        power: f64,
        /// The last factor.
        end: f64,
    },
    /// 1/√t with t from 1: the η/√t and γ/√t of the DecGD paper's theorems.
    InverseSqrt,
    /// ratio^(t-1) with t from 1: the γλ^(t-1) of the paper's corollary.
    Geometric {
        /// The ratio.
        ratio: f64,
    },
    /// Multiplied by `factor` whenever the metric has not improved by `min_delta` for more than `patience`
    /// evaluations.
    Plateau {
        /// By what.
        factor: f64,
        /// Evaluations without improvement that are borne.
        patience: u64,
        /// What counts as an improvement.
        min_delta: f64,
        /// The smallest factor.
        end: f64,
    },
    /// One schedule after another, each starting at its own time 0.
    Sequence {
        /// The parts; the last runs to the end.
        parts: Vec<Part>,
    },
}

/// A part of a [`Schedule::Sequence`].
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// How long it runs before the next takes over.
    pub until: u64,
    /// What runs.
    pub schedule: Schedule,
}

impl Schedule {
    /// The factor at time `t` (from 0) of a run that lasts `total`. A plateau's factor is its [`Scheduler`]'s.
    pub fn factor(&self, t: u64, total: u64) -> f64 {
        let progress = |length: &Option<u64>| {
            let length = length.unwrap_or(total).max(1);
            t.min(length) as f64 / length as f64
        };
        match self {
            Self::Constant | Self::Plateau { .. } => 1.0,
            Self::Milestones { at, factor } => {
                // Repeated multiplication, as a rate that is divided by ten at each milestone.
                at.iter().filter(|at| **at <= t).fold(1.0, |f, _| f * factor)
            }
            Self::Cosine { length, end } => {
                end + (1.0 - end) * 0.5 * (1.0 + (std::f64::consts::PI * progress(length)).cos())
            }
            Self::Warmup { length, start } => {
                start + (1.0 - start) * ((t + 1) as f64 / (*length).max(1) as f64).min(1.0)
            }
            Self::Triangle { start, peak_at, end } => {
                let at = progress(&None);
                match at < *peak_at {
                    true => start + (1.0 - start) * (at / peak_at),
                    false if *peak_at < 1.0 => end + (1.0 - end) * ((1.0 - at) / (1.0 - peak_at)),
                    false => 1.0,
                }
            }
            Self::Polynomial { length, power, end } => {
                end + (1.0 - end) * (1.0 - progress(length)).powf(*power)
            }
            Self::InverseSqrt => 1.0 / ((t + 1) as f64).sqrt(),
            Self::Geometric { ratio } => ratio.powf(t as f64),
            Self::Sequence { parts } => {
                let mut start = 0;
                for (i, part) in parts.iter().enumerate() {
                    if t < part.until || i + 1 == parts.len() {
                        let end = if i + 1 == parts.len() { total } else { part.until };
                        return part.schedule.factor(t - start, end.saturating_sub(start));
                    }
                    start = part.until;
                }
                1.0
            }
        }
    }

    /// A schedule of the given kind with its defaults; `None` for an unknown kind.
    fn of_kind(kind: &str) -> Option<Self> {
        Some(match kind {
            "constant" => Self::Constant,
            "milestones" => Self::Milestones { at: Vec::new(), factor: 0.1 },
            "cosine" => Self::Cosine { length: None, end: 0.0 },
            "warmup" => Self::Warmup { length: 1, start: 0.0 },
            "triangle" => Self::Triangle { start: 0.0, peak_at: 0.5, end: 0.0 },
            "polynomial" => Self::Polynomial { length: None, power: 1.0, end: 0.0 },
            "inverse_sqrt" => Self::InverseSqrt,
            "geometric" => Self::Geometric { ratio: 1.0 },
            "plateau" => Self::Plateau { factor: 0.1, patience: 10, min_delta: 0.0, end: 0.0 },
            "sequence" => Self::Sequence { parts: Vec::new() },
            _ => return None,
        })
    }

    /// The keys of a kind with their defaults; `None` for an unknown kind.
    pub fn defaults(kind: &str) -> Option<Map<String, Value>> {
        let Ok(Value::Object(mut keys)) = serde_json::to_value(Self::of_kind(kind)?) else { return None };
        keys.shift_remove("kind");
        Some(keys)
    }

    /// The kinds a recipe can name.
    pub const KINDS: [&'static str; 10] = [
        "constant",
        "milestones",
        "cosine",
        "warmup",
        "triangle",
        "polynomial",
        "inverse_sqrt",
        "geometric",
        "plateau",
        "sequence",
    ];

    /// Those that cannot begin after a warm-up: they have a length of their own, begin with one, or have no time.
    pub const WITHOUT_WARMUP: [&'static str; 4] = ["warmup", "triangle", "sequence", "plateau"];

    /// A schedule from a recipe's map; missing values take their defaults, unknown keys are errors. Beside the keys of its kind a
    /// map may have `warmup`: see [`Schedule::after_warmup`].
    ///
    /// ```
    /// use taper_optim::Schedule;
    /// let map = serde_json::json!({"kind": "cosine", "warmup": 5});
    /// let schedule = Schedule::from_map(map.as_object().unwrap())?;
    /// assert_eq!([0, 4, 5, 100].map(|t| schedule.factor(t, 100)), [0.2, 1.0, 1.0, 0.0]);
    /// # Ok::<(), taper_optim::Error>(())
    /// ```
    pub fn from_map(map: &Map<String, Value>) -> Result<Self> {
        let mut own = map.clone();
        let Some(warmup) = own.shift_remove("warmup").filter(|warmup| !warmup.is_null()) else {
            return Self::without_warmup(&own);
        };
        let invalid = |key: &str, message: String| Error::Hyperparameter {
            optimizer: "schedule".into(),
            key: key.into(),
            message,
        };
        let Some(length) = warmup.as_u64().filter(|length| *length > 0) else {
            let message = format!("expected a whole number of at least 1, found {warmup}");
            return Err(invalid("warmup", message));
        };
        Self::without_warmup(&own)?.after_warmup(length).map_err(|(key, message)| invalid(key, message))
    }

    /// The same after a rise from 0 along a line, which reaches 1 at the `length`-th step or epoch. What takes a length or the whole
    /// run then takes what is left of it; milestones keep their times. Where that makes no sense, the key at fault and why.
    pub fn after_warmup(self, length: u64) -> Result<Self, (&'static str, String)> {
        let next = match self {
            Self::Warmup { .. } => {
                return Err(("warmup", "is for other kinds: this one has a `length`".to_owned()));
            }
            Self::Triangle { .. } => {
                return Err(("warmup", "is for other kinds: this one begins with a rise".to_owned()));
            }
            Self::Sequence { .. } => {
                let message = "is for other kinds: begin the sequence with a part of kind `warmup`";
                return Err(("warmup", message.to_owned()));
            }
            Self::Plateau { .. } => {
                let message = "expected a schedule of time after it; a plateau follows a metric";
                return Err(("warmup", message.to_owned()));
            }
            Self::Milestones { at, factor } => {
                if let Some(early) = at.iter().find(|at| **at < length) {
                    let message = format!("expected times after the warm-up of {length}, found {early}");
                    return Err(("at", message));
                }
                Self::Milestones { at: at.iter().map(|at| at - length).collect(), factor }
            }
            other => other,
        };
        let rise = Part { until: length, schedule: Self::Warmup { length, start: 0.0 } };
        // The last part runs to the end, whatever its time says.
        Ok(Self::Sequence { parts: vec![rise, Part { until: u64::MAX, schedule: next }] })
    }

    fn without_warmup(map: &Map<String, Value>) -> Result<Self> {
        let invalid = |key: &str, message: String| Error::Hyperparameter {
            optimizer: "schedule".into(),
            key: key.into(),
            message,
        };
        let kind = map.get("kind").map_or(Some("constant"), Value::as_str).unwrap_or("");
        let Some(base) = Self::of_kind(kind) else {
            let known = Self::KINDS.join(", ");
            return Err(invalid("kind", format!("expected one of {known}, found {}", map["kind"])));
        };
        let Ok(Value::Object(mut merged)) = serde_json::to_value(base) else { return Ok(Self::Constant) };
        for (key, value) in map {
            let more = (!Self::WITHOUT_WARMUP.contains(&kind)).then(|| "warmup".to_owned());
            let known = merged.keys().cloned().chain(more).collect();
            let Some(slot) = merged.get_mut(key) else {
                let optimizer = format!("schedule {kind}");
                return Err(Error::UnknownHyperparameter { optimizer, key: key.clone(), known });
            };
            *slot = match (key.as_str(), value) {
                ("parts", Value::Array(parts)) => {
                    parts.iter().enumerate().map(|(i, value)| part(i, value)).collect::<Result<_>>()?
                }
                _ => value.clone(),
            };
            if let Err(e) = serde_json::from_value::<Self>(Value::Object(merged.clone())) {
                return Err(invalid(key, e.to_string()));
            }
        }
        let schedule: Self =
            serde_json::from_value(Value::Object(merged)).map_err(|e| invalid("kind", e.to_string()))?;
        schedule.check().map_err(|(key, message)| invalid(key, message))?;
        Ok(schedule)
    }

    fn check(&self) -> Result<(), (&'static str, String)> {
        let finite = |key, value: f64| match value >= 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err((key, format!("expected a finite number of at least 0, found {value}"))),
        };
        let ascending = |key, times: &[u64]| match times.windows(2).all(|w| w[0] < w[1]) {
            true => Ok(()),
            false => Err((key, format!("expected ascending times, found {times:?}"))),
        };
        let some = |length: Option<u64>| match length {
            Some(0) => {
                Err(("length", "expected at least 1, found 0; leave the schedule out instead".to_owned()))
            }
            _ => Ok(()),
        };
        match self {
            Self::Constant | Self::InverseSqrt => Ok(()),
            Self::Milestones { at, factor } => ascending("at", at).and(finite("factor", *factor)),
            Self::Cosine { length, end } => some(*length).and(finite("end", *end)),
            Self::Warmup { length, start } => some(Some(*length)).and(finite("start", *start)),
            Self::Triangle { start, peak_at, end } => {
                let share = match (0.0..=1.0).contains(peak_at) {
                    true => Ok(()),
                    false => Err((
                        "peak_at",
                        format!("expected a share of the run between 0 and 1, found {peak_at}"),
                    )),
                };
                finite("start", *start).and(share).and(finite("end", *end))
            }
            Self::Polynomial { length, power, end } => {
                some(*length).and(finite("power", *power)).and(finite("end", *end))
            }
            Self::Geometric { ratio } => finite("ratio", *ratio),
            Self::Plateau { factor, min_delta, end, .. } => {
                finite("factor", *factor).and(finite("min_delta", *min_delta)).and(finite("end", *end))
            }
            Self::Sequence { parts } => {
                let times: Vec<u64> = parts.iter().map(|p| p.until).collect();
                if parts.is_empty() {
                    return Err(("parts", "expected at least one part".to_owned()));
                }
                if parts.iter().any(|p| matches!(p.schedule, Self::Plateau { .. })) {
                    return Err((
                        "parts",
                        "expected schedules of time; a plateau follows a metric".to_owned(),
                    ));
                }
                ascending("parts", &times)?;
                parts.iter().try_for_each(|p| p.schedule.check())
            }
        }
    }
}

/// Part `i` with the defaults of its inner schedule filled in; a mistake in it is named by its path.
fn part(i: usize, value: &Value) -> Result<Value> {
    let mut value = value.clone();
    let known = ["until", "schedule"];
    let lacks = known.into_iter().find(|key| value.get(key).is_none());
    let keys = value.as_object().into_iter().flat_map(Map::keys);
    if let Some(key) = keys.into_iter().find(|key| !known.contains(&key.as_str())) {
        let (optimizer, key) = ("a part of a sequence".to_owned(), format!("parts[{i}].{key}"));
        return Err(Error::UnknownHyperparameter {
            optimizer,
            key,
            known: known.map(str::to_owned).to_vec(),
        });
    }
    if let Some(lacks) = lacks {
        let message = format!("expected a map with `until` and `schedule`, found no `{lacks}`");
        return Err(Error::Hyperparameter {
            optimizer: "schedule".into(),
            key: format!("parts[{i}]"),
            message,
        });
    }
    if let Some(Value::Object(inner)) = value.get("schedule") {
        let inner = Schedule::from_map(inner).map_err(|e| match e {
            Error::Hyperparameter { optimizer, key, message } => {
                Error::Hyperparameter { optimizer, key: format!("parts[{i}].schedule.{key}"), message }
            }
            Error::UnknownHyperparameter { optimizer, key, known } => {
                Error::UnknownHyperparameter { optimizer, key: format!("parts[{i}].schedule.{key}"), known }
            }
            e => e,
        })?;
        value["schedule"] = serde_json::to_value(inner).unwrap_or(Value::Null);
    }
    Ok(value)
}

/// What a schedule's time counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// Optimizer steps.
    Step,
    /// Epochs.
    #[default]
    Epoch,
}

/// The memory of a plateau; part of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlateauState {
    /// The best metric so far (lower is better).
    pub best: Option<f64>,
    /// Evaluations since.
    pub bad: u64,
    /// The factor now.
    pub factor: f64,
}

/// A schedule in use: pure for all kinds but the plateau, whose state it keeps.
#[derive(Clone, Debug)]
pub struct Scheduler {
    schedule: Schedule,
    /// The plateau's memory; unused by other kinds.
    pub state: PlateauState,
}

impl Scheduler {
    /// At the start.
    pub fn new(schedule: Schedule) -> Self {
        Self { schedule, state: PlateauState { best: None, bad: 0, factor: 1.0 } }
    }

    /// What is in use.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The factor at time `t` of `total`.
    pub fn factor(&self, t: u64, total: u64) -> f64 {
        match self.schedule {
            Schedule::Plateau { .. } => self.state.factor,
            _ => self.schedule.factor(t, total),
        }
    }

    /// Takes note of an evaluation; lower is better.
    pub fn observe(&mut self, metric: f64) {
        let Schedule::Plateau { factor, patience, min_delta, end } = self.schedule else { return };
        let state = &mut self.state;
        // Neither NaN nor infinity is an improvement.
        if state.best.is_none_or(|best| metric < best - min_delta) && metric.is_finite() {
            (state.best, state.bad) = (Some(metric), 0);
        } else {
            state.bad += 1;
            if state.bad > patience {
                (state.factor, state.bad) = ((state.factor * factor).max(end), 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<Schedule> {
        Schedule::from_map(value.as_object().unwrap())
    }

    #[test]
    fn factors_follow_their_formulas() {
        let cases = [
            (json!({"kind": "milestones", "at": [100, 145]}), 145, 0.1 * 0.1),
            (json!({"kind": "cosine"}), 0, 1.0),
            (json!({"kind": "cosine", "end": 0.2}), 100, 0.6),
            (json!({"kind": "cosine"}), 200, 0.0),
            (json!({"kind": "warmup", "length": 4}), 0, 0.25),
            (json!({"kind": "warmup", "length": 4}), 9, 1.0),
            (json!({"kind": "triangle", "start": 0.2, "peak_at": 0.25, "end": 0.1}), 0, 0.2),
            (json!({"kind": "triangle", "start": 0.2, "peak_at": 0.25, "end": 0.1}), 25, 0.6),
            (json!({"kind": "triangle", "start": 0.2, "peak_at": 0.25, "end": 0.1}), 50, 1.0),
            (json!({"kind": "triangle", "start": 0.2, "peak_at": 0.25, "end": 0.1}), 125, 0.55),
            (json!({"kind": "triangle", "start": 0.2, "peak_at": 0.25, "end": 0.1}), 200, 0.1),
            (json!({"kind": "triangle", "start": 0.5, "peak_at": 0}), 0, 1.0),
            (json!({"kind": "triangle", "peak_at": 1, "end": 0.5}), 200, 1.0),
            (json!({"kind": "polynomial", "power": 2.0}), 100, 0.25),
            (json!({"kind": "inverse_sqrt"}), 3, 0.5),
            (json!({"kind": "geometric", "ratio": 0.5}), 3, 0.125),
            (
                json!({"kind": "sequence", "parts": [
                    {"until": 10, "schedule": {"kind": "warmup", "length": 10}},
                    {"until": 200, "schedule": {"kind": "cosine"}},
                ]}),
                105,
                0.5,
            ),
            (json!({"kind": "cosine", "warmup": 10}), 4, 0.5),
            (json!({"kind": "cosine", "warmup": 10}), 105, 0.5),
            (json!({"kind": "constant", "warmup": 4}), 150, 1.0),
            (json!({"kind": "milestones", "at": [100], "warmup": 4}), 1, 0.5),
            (json!({"kind": "milestones", "at": [100], "warmup": 4}), 99, 1.0),
            (json!({"kind": "milestones", "at": [100], "warmup": 4}), 100, 0.1),
            (json!({"kind": "cosine", "warmup": null}), 100, 0.5),
        ];
        for (map, t, expected) in cases {
            let factor = parse(map.clone()).unwrap().factor(t, 200);
            // One rounding of a cosine or a power.
            assert!((factor - expected).abs() < 1e-15, "{map}: {factor}");
        }
    }

    #[test]
    fn plateau_drops_after_patience_and_keeps_its_floor() {
        let mut s = Scheduler::new(parse(json!({"kind": "plateau", "patience": 1, "end": 0.05})).unwrap());
        let mut factors = Vec::new();
        for metric in [1.0, 1.0, 1.0, 0.5, f64::NAN, 0.6, 0.7, 0.8] {
            s.observe(metric);
            factors.push(s.factor(0, 0));
        }
        assert_eq!(factors, [1.0, 1.0, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05]);
    }

    #[test]
    fn mistakes_are_named() {
        let message = |v| parse(v).unwrap_err().to_string();
        assert!(message(json!({"kind": "cosin"})).contains("expected one of constant"));
        assert!(message(json!({"kind": "cosine", "ned": 1})).contains("did you mean `end`?"));
        assert!(message(json!({"kind": "milestones", "at": [3, 2]})).contains("ascending"));
        assert!(message(json!({"kind": "milestones", "at": "x"})).contains("at:"));
        assert!(message(json!({"kind": "warmup", "start": -1.0})).contains("at least 0"));
        assert!(
            message(json!({"kind": "cosine", "warmup": 0}))
                .contains("warmup: expected a whole number of at least 1")
        );
        assert!(message(json!({"kind": "warmup", "warmup": 3})).contains("other kinds"));
        assert!(
            message(json!({"kind": "milestones", "at": [3], "warmup": 5}))
                .contains("after the warm-up of 5, found 3")
        );
        assert!(message(json!({"kind": "triangle", "warmup": 5})).contains("begins with a rise"));
        assert!(message(json!({"kind": "triangle", "peak_at": 1.5})).contains("peak_at: expected a share"));
        assert!(message(json!({"kind": "triangle", "end": -1.0})).contains("end: expected a finite number"));
        assert!(message(json!({"kind": "plateau", "warmup": 5})).contains("follows a metric"));
    }
}
