//! What the machine is busy with, where the system tells it.
use serde::Serialize;
use std::fs;

/// Load and memory of this machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Machine {
    /// Processors.
    pub cores: usize,
    /// Processes that run or wait for a processor, over the last minute.
    pub load: Option<f64>,
    /// Memory that is taken, in bytes; what the system would give back is not counted.
    pub used: Option<u64>,
    /// All memory, in bytes.
    pub memory: Option<u64>,
}

impl Machine {
    /// This machine now.
    pub fn now() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let memory = read("/proc/meminfo");
        let field = |name: &str| {
            let line = memory.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| 1024 * kb)
        };
        let (all, free) = (field("MemTotal:"), field("MemAvailable:"));
        Self {
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            load: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()),
            used: all.zip(free).map(|(all, free)| all.saturating_sub(free)),
            memory: all,
        }
    }

    /// For people: what is not known is left out.
    pub fn text(&self) -> String {
        let giga = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let load = self.load.map(|load| format!("load {load:.1} of {} cores", self.cores));
        let memory = self.used.zip(self.memory);
        let memory = memory.map(|(used, all)| format!("memory {:.1} of {:.1} GiB", giga(used), giga(all)));
        load.into_iter().chain(memory).collect::<Vec<_>>().join(", ")
    }
}
