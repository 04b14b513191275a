//! Time and peak memory of a training step (forward and backward, no optimizer).
//!
//! ```text
//! cargo run --release -p taper-models --example step_time -- resnet18 128 fast 5
//! ```
//! prints the best and the median of the steps in milliseconds, and the peak resident memory of the process.
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::time::Instant;
use taper_models::{Mode, Params, Registry, Task};

fn main() -> taper_models::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).map_or(default.to_owned(), Clone::clone);
    let (model, precision) = (arg(0, "resnet18"), arg(2, "fast"));
    let number = |i: usize, default: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (batch, steps) = (number(1, 32), number(3, 5));

    let task = Task::Images { height: 32, width: 32, channels: 3, classes: 10 };
    let (registry, params) = (Registry::builtin(), Params::new(1));
    let entry = registry.get(&model)?;
    let config = json!({ "conv": precision });
    let mut net = entry.build(&config, task, params.builder(DType::F32, &Device::Cpu))?;
    let pixels: Vec<f32> = (0..batch * 3072).map(|i| ((i * 7919) % 1009) as f32 / 505.0 - 1.0).collect();
    let input = Tensor::from_vec(pixels, (batch, 32, 32, 3), &Device::Cpu)?;
    let target = Tensor::from_vec((0..batch as u32).map(|i| i % 10).collect(), batch, &Device::Cpu)?;

    cpu_milliseconds();
    let mut times = Vec::new();
    for step in 0..steps as u64 + 1 {
        let start = Instant::now();
        let loss = net.loss(&input, &target, Mode::Train { seed: 1, step })?.total;
        let forward = start.elapsed();
        let grads = taper_models::backward(&loss)?;
        times.push((start.elapsed().as_secs_f64() * 1e3, forward.as_secs_f64() * 1e3));
        drop(grads);
    }
    // The first step allocates what the others use again.
    times.remove(0);
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (best, forward) = times[0];
    let flops = 3.0 * entry.cost(&config, task)?.flops as f64 * batch as f64;
    let cpu = cpu_milliseconds() / (steps as f64 + 1.0);
    println!(
        "{model} batch {batch} {precision}: best {best:.0} ms (forward {forward:.0}), median {:.0} ms, {:.0} GFLOP/s of the plain count, processor time {cpu:.0} ms a step, peak {} MB",
        times[times.len() / 2].0,
        flops / best / 1e6,
        peak_megabytes()
    );
    Ok(())
}

/// Processor time of this process since it was first asked, in steps of 10 ms where the system tells it; else 0.
fn cpu_milliseconds() -> f64 {
    static START: std::sync::OnceLock<f64> = std::sync::OnceLock::new();
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // Fields 14 and 15, counted from the one after the name in parentheses.
    let fields = stat.rsplit(')').next().unwrap_or("").split_whitespace();
    let ticks: f64 = fields.skip(11).take(2).filter_map(|f| f.parse::<f64>().ok()).sum();
    ticks * 10.0 - START.get_or_init(|| ticks * 10.0)
}

/// The largest resident size of this process so far, where the system tells it; else 0.
fn peak_megabytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}
