//! Rounds: every side once, then again, until times repeat.
use super::side::Side;
use super::{BenchError, Case};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use taper_train::recipe::Device;

/// Who takes part.
#[derive(Clone, Debug)]
pub struct Sides {
    /// Threads of each side.
    pub threads: usize,
    /// Where our side looks for data first.
    pub data: Option<PathBuf>,
    /// Whether PyTorch is measured too.
    pub peer: bool,
    /// Where both compute.
    pub device: Device,
}

/// Processor time that runs used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    seconds: f64,
    calls: f64,
}

impl Used {
    /// Runs `side` once and adds what that used.
    fn run(&mut self, side: &mut Side, repeat: u32) -> Result<f64, BenchError> {
        let before = side.processor_seconds();
        let seconds = side.run()?;
        if let Some((before, after)) = before.zip(side.processor_seconds()) {
            self.seconds += after - before;
            self.calls += f64::from(repeat);
        }
        Ok(seconds)
    }

    /// Of one call, on average.
    fn each(self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.seconds / self.calls)
    }
}

/// What was measured; see [`Measured::json`].
#[derive(Clone, Debug)]
pub struct Measured {
    /// The case.
    pub name: String,
    /// The unit of all rates.
    pub unit: &'static str,
    /// What one call did.
    pub amount: f64,
    /// Our times, one a round, in seconds.
    pub ours: Vec<f64>,
    /// PyTorch's times of the same rounds.
    pub peer: Vec<f64>,
    /// Processor time of one of our calls, on average over all threads and rounds.
    pub processor: Option<f64>,
    /// PyTorch's.
    pub peer_processor: Option<f64>,
    /// Yardsticks: name, best time, amount.
    pub beside: Vec<(String, f64, f64)>,
    /// The most memory our process held.
    pub peak_mb: Option<u64>,
    /// The most memory PyTorch's process held.
    pub peer_peak_mb: Option<u64>,
    /// Threads of each side.
    pub threads: usize,
}

fn best(times: &[f64]) -> Option<f64> {
    times.iter().copied().reduce(f64::min)
}

impl Measured {
    /// Our best time.
    pub fn seconds(&self) -> f64 {
        best(&self.ours).unwrap_or(f64::NAN)
    }

    /// PyTorch's best time.
    pub fn peer_seconds(&self) -> Option<f64> {
        best(&self.peer)
    }

    /// Our rate.
    pub fn rate(&self) -> f64 {
        self.amount / self.seconds()
    }

    /// How often faster than PyTorch: its best time over ours.
    pub fn ratio(&self) -> Option<f64> {
        Some(self.peer_seconds()? / self.seconds())
    }

    /// The quartiles of the ratios of single rounds: half of them lie between.
    pub fn spread(&self) -> Option<(f64, f64)> {
        let mut ratios: Vec<f64> = self.peer.iter().zip(&self.ours).map(|(peer, ours)| peer / ours).collect();
        ratios.sort_by(f64::total_cmp);
        let last = ratios.len().checked_sub(1)?;
        let quantile = |q: f64| ratios[(q * last as f64).round() as usize];
        Some((quantile(0.25), quantile(0.75)))
    }

    /// Our rate divided by each yardstick's.
    pub fn shares(&self) -> impl Iterator<Item = (&str, f64)> {
        self.beside.iter().map(|(name, seconds, amount)| (&**name, self.rate() / (amount / seconds)))
    }

    /// The ratio of processor times. With one thread on each side, programs beside this one hardly change it; with more,
    /// threads that spin while they wait count as work.
    pub fn processor_ratio(&self) -> Option<f64> {
        Some(self.peer_processor? / self.processor?)
    }

    /// One object: times in seconds, `ratio` = `peer_s` / `ours_s`, `ratio_low` and `ratio_high` its quartiles over the
    /// rounds, rates in `unit`, and for each yardstick `<yardstick>_s` and `of_<yardstick>`, our share of its rate.
    pub fn json(&self) -> Value {
        let mut map = Map::new();
        let object = json!({
            "name": self.name, "threads": self.threads, "rounds": self.ours.len(),
            "ours_s": self.seconds(), "peer_s": self.peer_seconds(), "ratio": self.ratio(),
            "ratio_low": self.spread().map(|s| s.0), "ratio_high": self.spread().map(|s| s.1),
            "ours_cpu_s": self.processor, "peer_cpu_s": self.peer_processor, "cpu_ratio": self.processor_ratio(),
            "unit": self.unit, "rate": self.rate(), "peer_rate": self.peer_seconds().map(|s| self.amount / s),
            "peak_mb": self.peak_mb, "peer_peak_mb": self.peer_peak_mb,
        });
        map.extend(object.as_object().cloned().unwrap_or_default());
        for ((name, seconds, _), (_, share)) in self.beside.iter().zip(self.shares()) {
            map.insert(format!("{name}_s"), (*seconds).into());
            map.insert(format!("of_{name}"), share.into());
        }
        Value::Object(map)
    }
}

/// Rounds that every case gets, and the time after which it gets no more of them.
const ROUNDS: (u32, u32) = (5, 60);
const BUDGET: Duration = Duration::from_secs(4);
/// For the other side's idle threads to stop spinning.
const PAUSE: Duration = Duration::from_millis(5);

/// Measures one case, with PyTorch's time where it can do the same.
pub fn measure(case: &Case, sides: &Sides) -> Result<Measured, BenchError> {
    let mut ours = Side::ours(&case.name, sides)?;
    let mut peer = match case.peer.as_ref().filter(|_| sides.peer) {
        Some(task) => Some(Side::peer(task, case.repeat, sides)?),
        None => None,
    };
    let mut yardsticks = vec![(f64::INFINITY, Duration::ZERO); ours.ready.beside.len()];
    let (mut our_times, mut peer_times) = (Vec::new(), Vec::new());
    let (mut used, mut peer_used) = (Used::default(), Used::default());
    let started = Instant::now();
    for round in 0..ROUNDS.1 {
        for (i, (best, spent)) in yardsticks.iter_mut().enumerate() {
            // A yardstick that is much slower than what it is held to would take all the time.
            if *spent < BUDGET {
                let started = Instant::now();
                *best = best.min(ours.run_beside(i)?);
                *spent += started.elapsed();
            }
        }
        our_times.push(used.run(&mut ours, case.repeat)?);
        if let Some(peer) = &mut peer {
            peer_times.push(peer_used.run(peer, case.repeat)?);
            std::thread::sleep(PAUSE);
        }
        if round + 1 >= ROUNDS.0 && started.elapsed() > BUDGET {
            break;
        }
    }
    let beside = ours.ready.beside.iter().zip(yardsticks);
    Ok(Measured {
        name: case.name.clone(),
        unit: case.unit,
        amount: case.amount,
        ours: our_times,
        peer: peer_times,
        processor: used.each(),
        peer_processor: peer_used.each(),
        beside: beside.map(|((name, amount), (seconds, _))| (name.clone(), seconds, *amount)).collect(),
        peak_mb: ours.ready.peak_mb,
        peer_peak_mb: peer.as_ref().and_then(|peer| peer.ready.peak_mb),
        threads: sides.threads,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_ratios_and_their_spread_come_from_the_rounds() {
        let measured = Measured {
            name: "x".into(),
            unit: "GB/s",
            amount: 8.0,
            ours: vec![4.0, 2.0, 4.0, 2.0, 2.0],
            peer: vec![3.0, 4.0, 4.0, 4.0, 6.0],
            processor: Some(1.0),
            peer_processor: Some(2.0),
            beside: vec![("copy".into(), 1.0, 16.0)],
            peak_mb: None,
            peer_peak_mb: None,
            threads: 2,
        };
        assert_eq!((measured.seconds(), measured.rate(), measured.ratio()), (2.0, 4.0, Some(1.5)));
        // Of 0.75, 1, 2, 2, 3 the second and the fourth.
        assert_eq!(measured.spread(), Some((1.0, 2.0)));
        assert_eq!(measured.processor_ratio(), Some(2.0));
        let json = measured.json();
        assert_eq!((json["of_copy"].as_f64(), json["ratio"].as_f64()), (Some(0.25), Some(1.5)));
        let alone = Measured { peer: Vec::new(), ..measured };
        assert!(alone.json()["ratio"].is_null() && alone.spread().is_none());
    }
}
