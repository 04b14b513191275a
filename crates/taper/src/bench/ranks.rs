//! What it costs to share a run: measured here with real processes, and a model of many machines made from that.
use super::exchange::NUMBERS;
use super::step::Workload;
use super::{BenchError, Sides, measure, select};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::process::{Command, Stdio};
use taper_figures::plot::{Chart, Picture, Scale, Series, Sheet};
use taper_figures::table::Table;
use taper_kernels::Isa;

/// What was measured; a line of JSON each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ranks", rename_all = "snake_case")]
pub enum Cost {
    /// A step of a run that processes share.
    Step {
        /// The network.
        net: String,
        /// How many share it.
        processes: usize,
        /// Threads of each.
        threads: usize,
        /// Shards of a batch.
        shards: usize,
        /// Cores of the machine.
        cores: usize,
        /// Equal runs at the same time, so that no core is idle; each knows nothing of the others.
        #[serde(default, skip_serializing_if = "is_zero")]
        beside: usize,
        /// Seconds a step, in the best epoch of all rounds.
        seconds: f64,
    },
    /// A step of the optimizer, which every process takes.
    Optimizer {
        /// Parameters.
        numbers: usize,
        /// Seconds, on the whole machine.
        seconds: f64,
    },
    /// The exchange of gradients alone.
    Exchange {
        /// How many take part.
        processes: usize,
        /// Gradients.
        numbers: usize,
        /// Seconds.
        seconds: f64,
        /// Seconds that copying them twice takes.
        copies: f64,
    },
    /// A step on one machine, which the model multiplies.
    Machine {
        /// The network.
        net: String,
        /// Its parameters.
        numbers: usize,
        /// Samples, or sequences.
        batch: usize,
        /// Seconds of a step.
        seconds: f64,
    },
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// A network in a short run.
struct Net {
    name: &'static str,
    recipe: &'static str,
    /// What makes half of every batch of it.
    half: [&'static str; 2],
    parameters: fn() -> usize,
}

/// Four steps an epoch: 48 images each, or 24 sequences of 70 tokens.
const NETS: [Net; 2] = [
    Net {
        name: "resnet18",
        recipe: "
data: {name: synthetic-images, train: 192, test: 8, classes: 10, batch_size: 48}
model: {name: resnet18}
optimizer: {name: adam, lr: 1.0e-6}
train: {epochs: 3, checkpoint: {keep: 1, every_epochs: 100}}
",
        half: ["data.train=96", "data.batch_size=24"],
        parameters: || Workload::conv("resnet18", "fast", 1).parameters(),
    },
    Net {
        name: "lstm1",
        recipe: "
data: {name: synthetic-text, vocab: 10000, train: 6745, valid: 100, test: 100, batch_size: 24, eval_batch_size: 1}
model: {name: lstm, layers: 1, hidden: 1150, emb: 400}
optimizer: {name: adam, lr: 1.0e-6}
train: {epochs: 3, bptt: {length: 70, half: 0, std: 0, min: 5}, checkpoint: {keep: 1, every_epochs: 100}}
",
        half: ["data.train=3373", "data.batch_size=12"],
        parameters: || Workload::lstm(1, 1150, 1, 1).parameters(),
    },
];

/// A way to train a network.
#[derive(Clone, Copy)]
struct Way {
    processes: usize,
    threads: usize,
    shards: usize,
    beside: usize,
}

/// Two ways to use two cores, then what the model is held to: in twelve shards, and half the batch in half of them.
const WAYS: [Way; 9] = [
    way(1, 2, 2, 0),
    way(2, 1, 2, 0),
    way(1, 1, 12, 0),
    way(1, 1, 12, 1),
    way(1, 1, HALF, 1),
    way(2, 1, 12, 0),
    way(3, 1, 12, 0),
    way(4, 1, 12, 0),
    way(6, 1, 12, 0),
];
/// So many shards are of half the batch.
const HALF: usize = 6;

const fn way(processes: usize, threads: usize, shards: usize, beside: usize) -> Way {
    Way { processes, threads, shards, beside }
}

/// Every way once, then again.
const ROUNDS: usize = 3;

/// Measures all whose names have one of `names` in them, or simply all, and tells what it is at.
pub fn measure_all(names: &[String], sides: &Sides, say: &dyn Fn(&str)) -> Result<Vec<Cost>, BenchError> {
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
    let mut costs = Vec::new();
    for case in select(&["exchange".to_owned()])?.into_iter().filter(|case| wanted(&case.name)) {
        say(&case.name);
        let result = measure(&case, sides)?.json();
        let number = |key: &str| result[key].as_f64().unwrap_or(f64::NAN);
        let processes = case.name.rsplit('/').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let (seconds, copies) = (number("ours_s"), number("copying twice_s"));
        costs.push(Cost::Exchange { processes, numbers: NUMBERS, seconds, copies });
    }
    let best = |name: &str| -> Result<f64, BenchError> {
        say(name);
        let mut seconds = f64::INFINITY;
        for case in select(&[name.to_owned()])? {
            seconds = seconds.min(measure(&case, sides)?.seconds());
        }
        Ok(seconds)
    };
    if wanted(OPTIMIZER) {
        costs.push(Cost::Optimizer { numbers: super::optim::ONE, seconds: best(OPTIMIZER)? });
    }
    for (name, workload) in [
        ("resnet34-step/32/fast", Workload::conv("resnet34", "fast", 32)),
        ("lstm3-step", Workload::lstm(3, 1150, 20, 70)),
    ] {
        if wanted(name) {
            let (net, numbers, batch) = (workload.name(), workload.parameters(), workload.batch);
            costs.push(Cost::Machine { net, numbers, batch, seconds: best(name)? });
        }
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for net in &NETS {
        let mut best = [f64::INFINITY; WAYS.len()];
        for round in 0..ROUNDS {
            for (best, way) in best.iter_mut().zip(&WAYS) {
                let name = way.name(net);
                if wanted(&name) {
                    say(&format!("{name}, round {}", round + 1));
                    *best = best.min(way.seconds_a_step(net, sides.isa)?);
                }
            }
        }
        let measured = WAYS.iter().zip(best).filter(|(_, best)| best.is_finite());
        costs.extend(measured.map(|(way, seconds)| Cost::Step {
            net: net.name.to_owned(),
            processes: way.processes,
            threads: way.threads,
            shards: way.shards,
            cores,
            beside: way.beside,
            seconds,
        }));
    }
    Ok(costs)
}

/// The step of an optimizer that is measured.
const OPTIMIZER: &str = "optim/adam/one";

impl Way {
    fn name(self, net: &Net) -> String {
        let Self { processes, threads, shards, beside } = self;
        let twice = if beside > 0 { ", twice at once" } else { "" };
        format!("{}, {processes} x {threads} threads, {shards} shards{twice}", net.name)
    }

    /// Of the slowest of all that run at once.
    fn seconds_a_step(self, net: &Net, isa: Isa) -> Result<f64, BenchError> {
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..=self.beside).map(|_| scope.spawn(move || self.train(net, isa))).collect();
            let failed = || BenchError::Side { side: "a shared run", message: "came to no end".into() };
            let ends = runs.into_iter().map(|run| run.join().unwrap_or_else(|_| Err(failed())));
            Ok(ends.collect::<Result<Vec<f64>, _>>()?.into_iter().fold(0.0, f64::max))
        })
    }

    /// Of the best epoch of a run in a folder of its own, by the command that users have.
    fn train(self, net: &Net, isa: Isa) -> Result<f64, BenchError> {
        let Self { processes, threads, shards, .. } = self;
        let io = |path: &std::path::Path| {
            let path = path.display().to_string();
            move |source| BenchError::Io { path, source }
        };
        let failed = |message: String| BenchError::Side { side: "a shared run", message };
        let folder = taper_files::scratch().map_err(|e| failed(e.to_string()))?;
        let recipe = folder.path().join("net.yaml");
        std::fs::write(&recipe, net.recipe).map_err(io(&recipe))?;
        let program = std::env::current_exe().map_err(io(folder.path()))?;
        let half = if shards == HALF { &net.half[..] } else { &[] };
        let output = Command::new(program)
            .args(["train", "--quiet", "--offline", "--isa", isa.name(), "--ranks", &processes.to_string()])
            .args(["--threads", &threads.to_string(), "--set", &format!("train.shards={shards}")])
            .args(half.iter().flat_map(|half| ["--set", half]))
            .arg("--runs")
            .arg(folder.path().join("runs"))
            .arg(&recipe)
            .stdin(Stdio::null())
            .output()
            .map_err(io(&recipe))?;
        if !output.status.success() {
            return Err(failed(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let runs = folder.path().join("runs");
        let run = std::fs::read_dir(&runs).map_err(io(&runs))?.flatten().map(|entry| entry.path());
        let timing = run.map(|run| run.join("timing.jsonl")).find(|timing| timing.exists());
        let timing = timing.ok_or_else(|| failed("left no timing.jsonl".into()))?;
        let text = std::fs::read_to_string(&timing).map_err(io(&timing))?;
        // The first epoch warms up.
        let rates = text.lines().skip(1).filter_map(|line| {
            serde_json::from_str::<Value>(line).ok()?["steps_per_second"].as_f64().filter(|rate| *rate > 0.0)
        });
        let best = rates.reduce(f64::max);
        best.map(f64::recip).ok_or_else(|| failed(format!("{}: no epoch but the first", timing.display())))
    }
}

/// What connects machines, by its bytes a second and seconds a message.
struct Link {
    name: &'static str,
    bandwidth: f64,
    latency: f64,
}

/// Round figures of such links, not measurements.
const LINKS: [Link; 3] = [
    Link { name: "10 Gb/s, 30 µs", bandwidth: 1.25e9, latency: 30e-6 },
    Link { name: "100 Gb/s, 3 µs", bandwidth: 12.5e9, latency: 3e-6 },
    Link { name: "300 GB/s, 2 µs", bandwidth: 300e9, latency: 2e-6 },
];

/// The most workers of the model.
const WORKERS: usize = 1024;
/// The batch that workers share where it does not grow with them.
const SHARED_BATCH: f64 = 1024.0;

/// Seconds that the optimizer takes for a number.
fn optimizer(costs: &[Cost]) -> Option<f64> {
    costs.iter().find_map(|cost| match cost {
        Cost::Optimizer { numbers, seconds } => Some(seconds / *numbers as f64),
        _ => None,
    })
}

/// One network on many machines like the one that was measured.
struct Model {
    net: String,
    numbers: f64,
    batch: f64,
    /// Seconds of the optimizer's step, which does not grow with the batch and is not divided.
    fixed: f64,
    /// Seconds a sample beside that.
    sample: f64,
    /// Bytes that the memory of a machine moves a second.
    memory: f64,
}

impl Model {
    fn all(costs: &[Cost]) -> Vec<Self> {
        let copied = costs.iter().find_map(|cost| match cost {
            Cost::Exchange { numbers, copies, .. } => Some(16.0 * *numbers as f64 / copies),
            _ => None,
        });
        let optimizer = optimizer(costs).unwrap_or_default();
        let of = |cost: &Cost| match (cost, copied) {
            (Cost::Machine { net, numbers, batch, seconds }, Some(memory)) => {
                let fixed = optimizer * *numbers as f64;
                Some(Self {
                    net: net.clone(),
                    numbers: *numbers as f64,
                    batch: *batch as f64,
                    fixed,
                    sample: (seconds - fixed) / *batch as f64,
                    memory,
                })
            }
            _ => None,
        };
        costs.iter().filter_map(of).collect()
    }

    /// Seconds of the exchange among so many: each sends a slice to each other one and adds up its own, then sends that to all.
    fn exchange(&self, workers: f64, link: &Link) -> f64 {
        let others = workers - 1.0;
        let share = others / workers * self.numbers;
        2.0 * (others * link.latency + 4.0 * share / link.bandwidth) + 12.0 * share / self.memory
    }

    /// Seconds of a step of so many, with `batch` samples each.
    fn step(&self, workers: f64, batch: f64, link: &Link) -> f64 {
        self.fixed + self.sample * batch + self.exchange(workers, link)
    }

    /// How much faster so many are with one batch between them.
    fn speedup(&self, workers: f64, link: &Link) -> f64 {
        (self.fixed + self.sample * SHARED_BATCH) / self.step(workers, SHARED_BATCH / workers, link)
    }

    /// The part of the time that is work where each has a batch of its own.
    fn efficiency(&self, workers: f64, link: &Link) -> f64 {
        (self.fixed + self.sample * self.batch) / self.step(workers, self.batch, link)
    }
}

fn workers() -> impl Iterator<Item = f64> {
    std::iter::successors(Some(1), |n| Some(2 * n)).take_while(|n| *n <= WORKERS).map(|n| n as f64)
}

/// The largest number of workers of which at least half the time is work.
fn worth(efficiency: impl Fn(f64) -> f64) -> f64 {
    workers().filter(|n| efficiency(*n) >= 0.5).last().unwrap_or(1.0)
}

/// All that was measured beside what the model says.
pub fn table(costs: &[Cost]) -> String {
    let mut steps =
        Table::new(["network", "processes x threads", "shards", "ms a step", "expected", "of the speed"]);
    let mut exchanges = Table::new(["processes", "numbers", "exchange ms", "copying twice ms", "ratio"]);
    let exchange_of = |wanted: usize| {
        costs.iter().find_map(|cost| match cost {
            Cost::Exchange { processes, numbers, seconds, .. } if *processes == wanted => {
                Some(seconds / *numbers as f64)
            }
            _ => None,
        })
    };
    let step_of = |wanted: (&str, Way)| {
        costs.iter().find_map(|cost| match cost {
            Cost::Step { net, processes, threads, shards, beside, seconds, .. }
                if (net.as_str(), *processes, *threads, *shards, *beside)
                    == (wanted.0, wanted.1.processes, wanted.1.threads, wanted.1.shards, wanted.1.beside) =>
            {
                Some(*seconds)
            }
            _ => None,
        })
    };
    for cost in costs {
        match cost {
            Cost::Step { net, processes, threads, shards, cores, beside, seconds } => {
                let numbers = NETS.iter().find(|known| known.name == net).map(|known| (known.parameters)());
                // A process alone, with every core at work: what it does for each shard, and what it does once a step, as every
                // process does that shares the run.
                let alone = step_of((net, way(1, *threads, *shards, 1)));
                let alone = alone.zip(step_of((net, way(1, *threads, HALF, 1))));
                let exchange = exchange_of(*processes).zip(numbers).map(|(each, n)| each * n as f64);
                let expected = alone.zip(exchange).map(|((whole, half), exchange)| {
                    let once = (2.0 * half - whole).max(0.0);
                    let crowd = (*processes as f64 / *cores as f64).max(1.0);
                    (whole - once) / (*processes).min(*cores) as f64 + once * crowd + exchange
                });
                let expected = expected.filter(|_| *processes > 1 && *shards > HALF);
                let whole =
                    step_of((net, way(1, processes * threads, *shards, 0))).filter(|_| *processes > 1);
                steps.row([
                    net.clone(),
                    format!("{processes} x {threads}{}", if *beside > 0 { ", twice at once" } else { "" }),
                    shards.to_string(),
                    format!("{:.1}", seconds * 1e3),
                    expected.map(|expected| format!("{:.1}", expected * 1e3)).unwrap_or_default(),
                    whole
                        .map(|whole| format!("{:.2} of 1 x {}", whole / seconds, processes * threads))
                        .unwrap_or_default(),
                ]);
            }
            Cost::Exchange { processes, numbers, seconds, copies } => exchanges.row([
                processes.to_string(),
                numbers.to_string(),
                format!("{:.1}", seconds * 1e3),
                format!("{:.1}", copies * 1e3),
                format!("{:.2}", seconds / copies),
            ]),
            Cost::Machine { .. } | Cost::Optimizer { .. } => {}
        }
    }
    let mut model = Table::new([
        "network",
        "link",
        "1,024 share a batch of 1,024",
        "half is work up to",
        "1,024 with a batch each",
        "half is work up to",
    ]);
    for net in Model::all(costs) {
        for link in &LINKS {
            let (most, shared) = (WORKERS as f64, |n: f64| net.speedup(n, link) / n);
            model.row([
                net.net.clone(),
                link.name.to_owned(),
                format!("{:.0} times as fast", net.speedup(most, link)),
                format!("{:.0}", worth(shared)),
                format!("{:.0} % of the time is work", 100.0 * net.efficiency(most, link)),
                format!("{:.0}", worth(|n| net.efficiency(n, link))),
            ]);
        }
    }
    [steps.markdown(), exchanges.markdown(), model.markdown()].join("\n")
}

/// The model as SVG: speed with one batch between all, and the part of the time that is work with a batch each.
pub fn picture(costs: &[Cost]) -> String {
    let mut rows = Vec::new();
    for net in Model::all(costs) {
        let seconds = net.fixed + net.sample * net.batch;
        let chart = |title: &str, y: &str, of: &dyn Fn(f64, &Link) -> f64| {
            let text = format!(
                "A model, not a measurement: machines like the measured one, which takes {seconds:.2} s for {} samples.",
                net.batch
            );
            let mut chart = Chart::new(&format!("{}: {title}", net.net), &text, "machines", y);
            chart.x_scale = Scale::Log;
            for (i, link) in LINKS.iter().enumerate() {
                chart.series.push(Series::line(link.name, i, workers().map(|n| (n, of(n, link))).collect()));
            }
            chart
        };
        let mut shared =
            chart("a batch of 1,024 between all", "times as fast", &|n, link| net.speedup(n, link));
        shared.y_scale = Scale::Log;
        let own = chart("a batch each", "work / time", &|n, link| net.efficiency(n, link));
        rows.push(vec![Picture::Chart(shared), Picture::Chart(own)]);
    }
    Sheet { title: "One run on many machines: a model from steps measured on one".into(), rows }.svg()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Vec<Cost> {
        let step = |Way { processes, threads, shards, beside }, seconds| Cost::Step {
            net: "resnet18".into(),
            processes,
            threads,
            shards,
            cores: 2,
            beside,
            seconds,
        };
        vec![
            Cost::Exchange { processes: 2, numbers: 1_000_000, seconds: 0.004, copies: 0.002 },
            Cost::Machine { net: "net".into(), numbers: 1_000_000, batch: 10, seconds: 0.1 },
            Cost::Optimizer { numbers: 2_000_000, seconds: 0.04 },
            step(way(1, 2, 2, 0), 0.5),
            step(way(2, 1, 2, 0), 0.625),
            step(way(1, 1, 12, 0), 0.9),
            step(way(1, 1, 12, 1), 1.0),
            step(way(1, 1, 6, 1), 0.6),
            step(way(2, 1, 12, 0), 0.7),
        ]
    }

    #[test]
    fn the_model_is_the_sum_of_its_parts() {
        let costs = costs();
        let [model] = &Model::all(&costs)[..] else { panic!("one network") };
        let link = Link { name: "", bandwidth: 1e9, latency: 1e-3 };
        // Each of four sends three quarters of a million numbers twice, in three messages each time, and adds as many.
        let expected = 2.0 * (3e-3 + 4.0 * 0.75e6 / 1e9) + 12.0 * 0.75e6 / 8e9;
        // Four roundings of numbers near 0.01.
        assert!((model.exchange(4.0, &link) - expected).abs() < 1e-16, "{}", model.exchange(4.0, &link));
        // Of 0.1 s a fifth is the optimizer's, whatever the batch.
        assert!((model.step(1.0, 5.0, &link) - 0.06).abs() < 1e-16, "{}", model.step(1.0, 5.0, &link));
        assert_eq!(model.efficiency(1.0, &link), 1.0);
        assert_eq!(model.speedup(1.0, &link), 1.0);
        assert!(model.speedup(64.0, &link) < 64.0);
    }

    #[test]
    fn what_was_measured_stands_beside_what_was_expected() {
        let lines: Vec<String> = costs().iter().map(|cost| serde_json::to_string(cost).unwrap()).collect();
        let costs: Vec<Cost> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let table = table(&costs).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(table.contains("| resnet18 | 2 x 1 | 2 | 625.0 | | 0.80 of 1 x 2 |"), "{table}");
        // Half of 0.8 s that is work of shards, 0.2 s that is not, and 11 million numbers at 4 ns each.
        assert!(table.contains("| resnet18 | 2 x 1 | 12 | 700.0 | 644.7 |"), "{table}");
        assert!(table.contains("| 2 | 1000000 | 4.0 | 2.0 | 2.00 |"), "{table}");
        let svg = picture(&costs);
        assert!(svg.contains("net: a batch each") && svg.contains("not a measurement"), "{svg}");
    }
}
