//! Benchmarks: what a piece of work costs here, beside a yardstick and beside a peer, all in one call.
//!
//! A busy or throttled machine changes its speed from one second to the next, so that times of different calls say
//! little. Everything that is compared runs in turn, round after round, and the best of each is kept.
mod optim;
mod peer;

pub use peer::Peer;

use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

/// What can go wrong in a benchmark.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No benchmark of that name.
    #[error("unknown benchmark `{name}`; known: {}", .known.join(", "))]
    Unknown {
        /// The name or glob asked for.
        name: String,
        /// The suites.
        known: Vec<&'static str>,
    },
    /// The peer did not start or did not answer.
    #[error("peer: {0}")]
    Peer(String),
    /// The work failed.
    #[error(transparent)]
    Optimizer(#[from] taper_optim::Error),
    /// The work failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

/// Something that can be timed again and again.
pub type Work = Box<dyn FnMut() -> Result<(), BenchError>>;

/// One benchmark.
pub struct Case {
    /// Its name, `suite/what/how`.
    pub name: String,
    /// What its rate is counted in.
    pub unit: &'static str,
    /// How many of these one run does.
    pub amount: f64,
    /// Makes the work and what it is measured beside; called when its turn comes, so that memory is used once.
    pub prepare: Box<dyn FnOnce() -> Result<Prepared, BenchError>>,
    /// What the peer is asked to do, if it can do the same.
    pub peer: Option<Value>,
}

/// A benchmark ready to run.
pub struct Prepared {
    /// The work.
    pub ours: Work,
    /// Yardsticks: a name, the amount of one run in the case's unit, and the work.
    pub beside: Vec<(&'static str, f64, Work)>,
}

/// What was measured; see [`Measured::json`].
#[derive(Clone, Debug)]
pub struct Measured {
    /// The case.
    pub name: String,
    /// The unit of all rates.
    pub unit: &'static str,
    /// Our best time, in seconds.
    pub ours: f64,
    /// What one run did.
    pub amount: f64,
    /// The peer's best time.
    pub peer: Option<f64>,
    /// Yardsticks: name, best time, amount.
    pub beside: Vec<(&'static str, f64, f64)>,
    /// The most memory the process held during the case, its yardsticks counted in.
    pub peak_mb: Option<u64>,
}

impl Measured {
    /// Our rate.
    pub fn rate(&self) -> f64 {
        self.amount / self.ours
    }

    /// How often faster than the peer.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.peer? / self.ours)
    }

    /// Our rate divided by each yardstick's.
    pub fn shares(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.beside.iter().map(|(name, seconds, amount)| (*name, self.rate() / (amount / seconds)))
    }

    /// One object: `ratio` = `peer_s` / `ours_s`, `rate` in `unit`, `of_<yardstick>` our share of its rate.
    pub fn json(&self) -> Value {
        let mut map = Map::new();
        let object = json!({
            "name": self.name, "ours_s": self.ours, "peer_s": self.peer, "ratio": self.ratio(),
            "unit": self.unit, "rate": self.rate(), "peak_mb": self.peak_mb,
        });
        map.extend(object.as_object().cloned().unwrap_or_default());
        map.extend(self.shares().map(|(name, share)| (format!("of_{name}"), share.into())));
        Value::Object(map)
    }
}

/// A name and the benchmarks under it.
type Suite = (&'static str, fn() -> Vec<Case>);

/// A suite: its name and its cases. A new workload is a new file and a line here.
const SUITES: &[Suite] = &[("optim", optim::cases)];

/// The cases that `names` ask for: a suite, a case, or a glob over cases; all without any.
pub fn select(names: &[String]) -> Result<Vec<Case>, BenchError> {
    let mut cases: Vec<(Case, bool)> =
        SUITES.iter().flat_map(|(_, cases)| cases()).map(|case| (case, names.is_empty())).collect();
    for name in names {
        let pattern = regex::escape(name).replace(r"\*", ".*");
        let pattern = regex::Regex::new(&format!("^(?:{pattern})(?:/.*)?$"));
        let mut found = false;
        for (case, wanted) in &mut cases {
            if pattern.as_ref().is_ok_and(|pattern| pattern.is_match(&case.name)) {
                (found, *wanted) = (true, true);
            }
        }
        if !found {
            let known = SUITES.iter().map(|(name, _)| *name).collect();
            return Err(BenchError::Unknown { name: name.clone(), known });
        }
    }
    Ok(cases.into_iter().filter(|(_, wanted)| *wanted).map(|(case, _)| case).collect())
}

/// Rounds that every case gets, and the time after which it gets no more of them.
const ROUNDS: (u32, u32) = (5, 100);
const BUDGET: Duration = Duration::from_secs(3);
/// For the other side's idle threads to stop spinning.
const PAUSE: Duration = Duration::from_millis(5);

/// Measures one case, with the peer's time where there is one.
pub fn measure(case: Case, peer: Option<&mut Peer>) -> Result<Measured, BenchError> {
    let Case { name, unit, amount, prepare, peer: task } = case;
    // Where the system allows it, the peak is counted from here.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    let Prepared { mut ours, mut beside } = prepare()?;
    let mut peer = peer.zip(task.as_ref());
    if let Some((peer, task)) = &mut peer {
        peer.prepare(task)?;
    }
    let mut best = (f64::INFINITY, f64::INFINITY, vec![f64::INFINITY; beside.len()]);
    let started = Instant::now();
    for round in 0..ROUNDS.1 {
        for ((_, _, work), best) in beside.iter_mut().zip(&mut best.2) {
            *best = best.min(time(work)?);
        }
        best.0 = best.0.min(time(&mut ours)?);
        if let Some((peer, _)) = &mut peer {
            best.1 = best.1.min(peer.time()?);
            std::thread::sleep(PAUSE);
        }
        if round + 1 >= ROUNDS.0 && started.elapsed() > BUDGET {
            break;
        }
    }
    let beside =
        beside.iter().zip(best.2).map(|((name, amount, _), seconds)| (*name, seconds, *amount)).collect();
    let peer = peer.map(|_| best.1);
    Ok(Measured { name, unit, ours: best.0, amount, peer, beside, peak_mb: crate::run::peak_megabytes() })
}

fn time(work: &mut Work) -> Result<f64, BenchError> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_suites_cases_and_globs() {
        let count = |names: &[&str]| {
            select(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).map(|cases| cases.len())
        };
        let all = count(&[]).unwrap();
        assert_eq!(count(&["optim"]).unwrap(), all);
        assert_eq!(count(&["optim/decgd"]).unwrap(), 2);
        assert_eq!(count(&["*/one"]).unwrap() * 2, all);
        assert_eq!(count(&["optim/adam", "optim/adam/one"]).unwrap(), 2);
        let error = count(&["optm"]).unwrap_err().to_string();
        assert_eq!(error, "unknown benchmark `optm`; known: optim");
    }

    #[test]
    fn rates_and_ratios_come_from_the_best_times() {
        let case = Case {
            name: "x".into(),
            unit: "GB/s",
            amount: 8.0,
            prepare: Box::new(|| Ok(Prepared { ours: Box::new(|| Ok(())), beside: Vec::new() })),
            peer: None,
        };
        let measured = measure(case, None).unwrap();
        assert!(measured.ours > 0.0 && measured.peer.is_none());
        let measured = Measured { ours: 2.0, peer: Some(3.0), beside: vec![("copy", 1.0, 16.0)], ..measured };
        assert_eq!((measured.rate(), measured.ratio()), (4.0, Some(1.5)));
        let json = measured.json();
        assert_eq!((json["of_copy"].as_f64(), json["ratio"].as_f64()), (Some(0.25), Some(1.5)));
    }
}
