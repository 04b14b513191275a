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
        /// Seconds a step, in the best epoch of all rounds.
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

/// A network in a short run.
struct Net {
    name: &'static str,
    recipe: &'static str,
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
        parameters: || Workload::lstm(1, 1150, 1, 1).parameters(),
    },
];

/// Processes, threads of each and shards: two ways to use two cores, then what the model is held to.
const WAYS: [(usize, usize, usize); 7] =
    [(1, 2, 2), (2, 1, 2), (1, 1, 12), (2, 1, 12), (3, 1, 12), (4, 1, 12), (6, 1, 12)];

/// Every way once, then again.
const ROUNDS: usize = 3;

/// Measures all, and tells what it is at.
pub fn measure_all(sides: &Sides, say: &dyn Fn(&str)) -> Result<Vec<Cost>, BenchError> {
    let mut costs = Vec::new();
    for case in select(&["exchange".to_owned()])? {
        say(&case.name);
        let result = measure(&case, sides)?.json();
        let number = |key: &str| result[key].as_f64().unwrap_or(f64::NAN);
        let processes = case.name.rsplit('/').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        let (seconds, copies) = (number("ours_s"), number("copying twice_s"));
        costs.push(Cost::Exchange { processes, numbers: NUMBERS, seconds, copies });
    }
    let machine = |name: &str, workload: Workload| -> Result<Cost, BenchError> {
        say(name);
        let mut seconds = f64::INFINITY;
        for case in select(&[name.to_owned()])? {
            seconds = seconds.min(measure(&case, sides)?.seconds());
        }
        let (net, numbers, batch) = (workload.name(), workload.parameters(), workload.batch);
        Ok(Cost::Machine { net, numbers, batch, seconds })
    };
    costs.push(machine("resnet34-step/32/fast", Workload::conv("resnet34", "fast", 32))?);
    costs.push(machine("lstm3-step", Workload::lstm(3, 1150, 20, 70))?);
    for net in &NETS {
        let mut best = [f64::INFINITY; WAYS.len()];
        for round in 0..ROUNDS {
            for (best, way) in best.iter_mut().zip(WAYS) {
                let (processes, threads, _) = way;
                say(&format!("{}, {processes} x {threads} threads, round {}", net.name, round + 1));
                *best = best.min(seconds_a_step(net, way, sides.isa)?);
            }
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        costs.extend(WAYS.into_iter().zip(best).map(|((processes, threads, shards), seconds)| Cost::Step {
            net: net.name.to_owned(),
            processes,
            threads,
            shards,
            cores,
            seconds,
        }));
    }
    Ok(costs)
}

/// Of the best epoch of a run in a folder of its own, by the command that users have.
fn seconds_a_step(
    net: &Net,
    (processes, threads, shards): (usize, usize, usize),
    isa: Isa,
) -> Result<f64, BenchError> {
    let io = |path: &std::path::Path| {
        let path = path.display().to_string();
        move |source| BenchError::Io { path, source }
    };
    let failed = |message: String| BenchError::Side { side: "a shared run", message };
    let folder = taper_files::scratch().map_err(|e| failed(e.to_string()))?;
    let recipe = folder.path().join("net.yaml");
    std::fs::write(&recipe, net.recipe).map_err(io(&recipe))?;
    let program = std::env::current_exe().map_err(io(folder.path()))?;
    let output = Command::new(program)
        .args(["train", "--quiet", "--offline", "--isa", isa.name(), "--ranks", &processes.to_string()])
        .args(["--threads", &threads.to_string(), "--set", &format!("train.shards={shards}")])
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

/// One network on many machines like the one that was measured.
struct Model {
    net: String,
    numbers: f64,
    batch: f64,
    /// Seconds a sample.
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
        let of = |cost: &Cost| match (cost, copied) {
            (Cost::Machine { net, numbers, batch, seconds }, Some(memory)) => Some(Self {
                net: net.clone(),
                numbers: *numbers as f64,
                batch: *batch as f64,
                sample: seconds / *batch as f64,
                memory,
            }),
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
        self.sample * batch + self.exchange(workers, link)
    }

    /// How much faster so many are with one batch between them.
    fn speedup(&self, workers: f64, link: &Link) -> f64 {
        self.sample * SHARED_BATCH / self.step(workers, SHARED_BATCH / workers, link)
    }

    /// The part of the time that is work where each has a batch of its own.
    fn efficiency(&self, workers: f64, link: &Link) -> f64 {
        self.sample * self.batch / self.step(workers, self.batch, link)
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
    let step_of = |wanted: (&str, usize, usize, usize)| {
        costs.iter().find_map(|cost| match cost {
            Cost::Step { net, processes, threads, shards, seconds, .. }
                if (net.as_str(), *processes, *threads, *shards) == wanted =>
            {
                Some(*seconds)
            }
            _ => None,
        })
    };
    for cost in costs {
        match cost {
            Cost::Step { net, processes, threads, shards, cores, seconds } => {
                let numbers = NETS.iter().find(|known| known.name == net).map(|known| (known.parameters)());
                // The work of one process shared by as many cores as there are, and the exchange.
                let alone = step_of((net, 1, *threads, *shards)).filter(|_| *processes > 1 && *shards > 2);
                let expected =
                    alone.zip(exchange_of(*processes)).zip(numbers).map(|((alone, each), numbers)| {
                        alone / (*processes).min(*cores) as f64 + each * numbers as f64
                    });
                let whole = step_of((net, 1, processes * threads, *shards)).filter(|_| *processes > 1);
                steps.row([
                    net.clone(),
                    format!("{processes} x {threads}"),
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
            Cost::Machine { .. } => {}
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
        let seconds = net.sample * net.batch;
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
        let step = |processes, threads, shards, seconds| Cost::Step {
            net: "resnet18".into(),
            processes,
            threads,
            shards,
            cores: 2,
            seconds,
        };
        vec![
            Cost::Exchange { processes: 2, numbers: 1_000_000, seconds: 0.004, copies: 0.002 },
            Cost::Machine { net: "net".into(), numbers: 1_000_000, batch: 10, seconds: 0.1 },
            step(1, 2, 2, 0.5),
            step(2, 1, 2, 0.625),
            step(1, 1, 12, 1.0),
            step(2, 1, 12, 0.7),
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
        // Half of a second, and 11 million numbers at 4 ns each.
        assert!(table.contains("| resnet18 | 2 x 1 | 12 | 700.0 | 544.7 |"), "{table}");
        assert!(table.contains("| 2 | 1000000 | 4.0 | 2.0 | 2.00 |"), "{table}");
        let svg = picture(&costs);
        assert!(svg.contains("net: a batch each") && svg.contains("not a measurement"), "{svg}");
    }
}
