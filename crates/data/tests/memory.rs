//! What loading CIFAR-10 from parquet costs. Alone in its process, so that the peak is its own.
use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;
use taper_data::{DataRegistry, Search};

#[test]
fn cifar10_fits_in_400_megabytes_while_it_is_read() {
    let dir = std::env::var_os("TAPER_DATA").map(PathBuf::from).filter(|dir| dir.join("cifar10").exists());
    let Some(dir) = dir else {
        println!("skipped: TAPER_DATA has no cifar10");
        return;
    };
    let search = Search { dir: Some(dir), offline: true, ..Search::default() };
    let start = Instant::now();
    let loaded = DataRegistry::builtin().get("cifar10").unwrap().load(&json!({}), &search).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak =
        status.lines().find_map(|l| l.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<u64>().ok());
    println!("read and proved in {seconds:.2} s, peak {peak:?} kB");
    assert!(loaded.provenance.verified);
    assert!(peak.is_none_or(|kilobytes| kilobytes < 400_000), "{peak:?}");
}
