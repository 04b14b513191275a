//! Rounds: every side once, then again, until times repeat.
use super::side::Side;
use super::{BenchError, Case};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use taper_kernels::Isa;
use taper_train::recipe::Device;

/// Who takes part.
#[derive(Clone, Debug)]
pub struct Sides {
    /// Threads of each side.
    pub threads: usize,
    /// Our side once more, with that many threads: what more of them than cores cost.
    pub more_threads: Option<usize>,
    /// What both sides may compute with.
    pub isa: Isa,
    /// Where our side looks for data first.
    pub data: Option<PathBuf>,
    /// Whether PyTorch is measured too.
    pub peer: bool,
    /// Whether PyTorch is measured once more, under bf16 autocast.
    pub bf16: bool,
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

/// One side's times.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// What ran, in words.
    pub who: String,
    /// One a round, in seconds.
    pub times: Vec<f64>,
    /// Processor time of one call, on average over all threads and rounds.
    pub processor: Option<f64>,
    /// The most memory its process held.
    pub peak_mb: Option<u64>,
}

impl Taken {
    /// The best time.
    pub fn seconds(&self) -> f64 {
        self.times.iter().copied().reduce(f64::min).unwrap_or(f64::NAN)
    }

    /// How often slower than `ours`: best time over best time.
    fn ratio(&self, ours: &Self) -> f64 {
        self.seconds() / ours.seconds()
    }

    /// The quartiles of the ratios of single rounds: half of them lie between.
    fn spread(&self, ours: &Self) -> Option<(f64, f64)> {
        let mut ratios: Vec<f64> =
            self.times.iter().zip(&ours.times).map(|(other, ours)| other / ours).collect();
        ratios.sort_by(f64::total_cmp);
        let last = ratios.len().checked_sub(1)?;
        let quantile = |q: f64| ratios[(q * last as f64).round() as usize];
        Some((quantile(0.25), quantile(0.75)))
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
    /// Ours.
    pub ours: Taken,
    /// PyTorch's.
    pub peer: Option<Taken>,
    /// PyTorch's under bf16 autocast.
    pub peer_bf16: Option<Taken>,
    /// Ours with more threads, and how many.
    pub more_threads: Option<(usize, Taken)>,
    /// Yardsticks: name, best time, amount.
    pub beside: Vec<(String, f64, f64)>,
    /// Threads of each side.
    pub threads: usize,
    /// What both sides were allowed to compute with.
    pub isa: &'static str,
}

impl Measured {
    /// Our best time.
    pub fn seconds(&self) -> f64 {
        self.ours.seconds()
    }

    /// Our rate.
    pub fn rate(&self) -> f64 {
        self.amount / self.seconds()
    }

    /// Our rate divided by each yardstick's.
    pub fn shares(&self) -> impl Iterator<Item = (&str, f64)> {
        self.beside.iter().map(|(name, seconds, amount)| (&**name, self.rate() / (amount / seconds)))
    }

    /// One object: times in seconds, `ratio` = `peer_s` / `ours_s`, `ratio_low` and `ratio_high` its quartiles over the
    /// rounds, rates in `unit`, and for each yardstick `<yardstick>_s` and `of_<yardstick>`, our share of its rate. `cpu_ratio`
    /// is the ratio of processor times: with one thread on each side, programs beside this one hardly change it; with more,
    /// threads that spin while they wait count as work.
    pub fn json(&self) -> Value {
        let (ours, peer) = (&self.ours, self.peer.as_ref());
        let spread = peer.and_then(|peer| peer.spread(ours));
        let processor_ratio = peer.and_then(|peer| Some(peer.processor? / ours.processor?));
        let mut map = Map::new();
        let mut put = |object: Value| map.extend(object.as_object().cloned().unwrap_or_default());
        put(json!({
            "name": self.name, "threads": self.threads, "isa": self.isa, "rounds": ours.times.len(),
            "peer": peer.map(|peer| &peer.who),
            "ours_s": self.seconds(), "peer_s": peer.map(Taken::seconds), "ratio": peer.map(|peer| peer.ratio(ours)),
            "ratio_low": spread.map(|s| s.0), "ratio_high": spread.map(|s| s.1),
            "ours_cpu_s": ours.processor, "peer_cpu_s": peer.and_then(|peer| peer.processor), "cpu_ratio": processor_ratio,
            "unit": self.unit, "rate": self.rate(), "peer_rate": peer.map(|peer| self.amount / peer.seconds()),
            "peak_mb": ours.peak_mb, "peer_peak_mb": peer.and_then(|peer| peer.peak_mb),
        }));
        if let Some(bf16) = &self.peer_bf16 {
            put(json!({
                "peer_bf16_s": bf16.seconds(), "ratio_bf16": bf16.ratio(ours), "peer_bf16_peak_mb": bf16.peak_mb,
            }));
        }
        if let Some((threads, more)) = &self.more_threads {
            put(json!({
                "more_threads": threads, "more_threads_s": more.seconds(), "more_threads_ratio": more.ratio(ours),
            }));
        }
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
/// For the other side's idle threads to stop spinning: PyTorch's do so for nine milliseconds after its last op.
const PAUSE: Duration = Duration::from_millis(20);

/// A running side and what it has shown so far.
struct Runner {
    side: Side,
    used: Used,
    times: Vec<f64>,
}

impl Runner {
    fn new(side: Side) -> Self {
        Self { side, used: Used::default(), times: Vec::new() }
    }

    fn run(&mut self, repeat: u32) -> Result<(), BenchError> {
        self.times.push(self.used.run(&mut self.side, repeat)?);
        Ok(())
    }

    fn taken(&self) -> Taken {
        let ready = &self.side.ready;
        Taken {
            who: ready.who.clone(),
            times: self.times.clone(),
            processor: self.used.each(),
            peak_mb: ready.peak_mb,
        }
    }
}

/// Measures one case, with PyTorch's time where it can do the same.
pub fn measure(case: &Case, sides: &Sides) -> Result<Measured, BenchError> {
    let mut ours = Runner::new(Side::ours(&case.name, sides.threads, sides)?);
    let start = |bf16: bool| {
        let task = case.peer.as_ref().filter(|_| sides.peer && (!bf16 || sides.bf16 && case.has_products()));
        let side = task.map(|task| Side::peer(task, bf16, case.repeat, sides)).transpose()?;
        Ok::<_, BenchError>(side.map(Runner::new))
    };
    let (mut peer, mut peer_bf16) = (start(false)?, start(true)?);
    let more = sides.more_threads.map(|threads| Side::ours(&case.name, threads, sides)).transpose()?;
    let mut more = more.map(Runner::new);
    let mut yardsticks = vec![(f64::INFINITY, Duration::ZERO); ours.side.ready.beside.len()];
    let started = Instant::now();
    for round in 0..ROUNDS.1 {
        for (i, (best, spent)) in yardsticks.iter_mut().enumerate() {
            // A yardstick that is much slower than what it is held to would take all the time.
            if *spent < BUDGET {
                let started = Instant::now();
                *best = best.min(ours.side.run_beside(i)?);
                *spent += started.elapsed();
            }
        }
        for side in [Some(&mut ours), more.as_mut(), peer.as_mut(), peer_bf16.as_mut()].into_iter().flatten()
        {
            side.run(case.repeat)?;
            std::thread::sleep(PAUSE);
        }
        if round + 1 >= ROUNDS.0 && started.elapsed() > BUDGET {
            break;
        }
    }
    let beside = ours.side.ready.beside.iter().zip(yardsticks);
    Ok(Measured {
        name: case.name.clone(),
        unit: case.unit,
        amount: case.amount,
        ours: ours.taken(),
        peer: peer.as_ref().map(Runner::taken),
        peer_bf16: peer_bf16.as_ref().map(Runner::taken),
        more_threads: sides.more_threads.zip(more.as_ref().map(Runner::taken)),
        beside: beside.map(|((name, amount), (seconds, _))| (name.clone(), seconds, *amount)).collect(),
        threads: sides.threads,
        isa: sides.isa.name(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(times: &[f64], processor: f64) -> Taken {
        Taken { times: times.to_vec(), processor: Some(processor), ..Taken::default() }
    }

    #[test]
    fn rates_ratios_and_their_spread_come_from_the_rounds() {
        let measured = Measured {
            name: "x".into(),
            unit: "GB/s",
            amount: 8.0,
            ours: taken(&[4.0, 2.0, 4.0, 2.0, 2.0], 1.0),
            peer: Some(taken(&[3.0, 4.0, 4.0, 4.0, 6.0], 2.0)),
            peer_bf16: Some(taken(&[1.0, 1.5], 2.0)),
            more_threads: Some((64, taken(&[2.5, 2.25], 1.0))),
            beside: vec![("copy".into(), 1.0, 16.0)],
            threads: 2,
            isa: "avx2",
        };
        assert_eq!((measured.seconds(), measured.rate()), (2.0, 4.0));
        let json = measured.json();
        let number = |key: &str| json[key].as_f64().unwrap();
        assert_eq!((number("of_copy"), number("ratio"), number("cpu_ratio")), (0.25, 1.5, 2.0));
        // Of 0.75, 1, 2, 2, 3 the second and the fourth.
        assert_eq!((number("ratio_low"), number("ratio_high")), (1.0, 2.0));
        assert_eq!((number("peer_bf16_s"), number("ratio_bf16")), (1.0, 0.5));
        assert_eq!((number("more_threads"), number("more_threads_ratio")), (64.0, 1.125));
        let alone = Measured { peer: None, peer_bf16: None, more_threads: None, ..measured }.json();
        assert!(alone["ratio"].is_null() && alone["ratio_low"].is_null());
        assert!(alone.get("ratio_bf16").is_none() && alone.get("more_threads").is_none());
    }
}
