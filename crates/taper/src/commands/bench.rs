use super::{Common, Failure};
#[cfg(unix)]
use crate::bench::ranks;
use crate::bench::scaling::{self, Growth, SERIES};
use crate::bench::{self, BenchError, Case, Sides, measure, select};
use crate::profile::Profile;
use serde_json::Value;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use taper_figures::table::Table;
use taper_kernels::Isa;
use taper_train::device::open;
use taper_train::recipe::Device;

/// Measures how fast this machine does the work of training
///
///   cargo xtask bench mlp-step resnet18-step
///   cargo xtask bench 'optim/adam*' --peer --json
///   cargo xtask bench resnet18-step --isa avx2 --peer
///   cargo xtask bench resnet18-step --threads 2 --more-threads 64
///   cargo xtask bench densenet121-step --profile
///   cargo xtask bench --scaling
///   cargo xtask bench --ranks --json > ranks.jsonl && cargo xtask bench --show ranks.jsonl
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Suites or benchmarks; `*` stands for any characters [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Runs PyTorch on the same work in the same call; once more under bf16 autocast where the CPU multiplies in bf16
    #[arg(long)]
    peer: bool,
    /// Runs PyTorch under bf16 autocast also where the CPU has no bf16 and PyTorch emulates it
    #[arg(long, requires = "peer")]
    peer_bf16: bool,
    /// Runs our side once more with N threads: what more of them than cores cost
    #[arg(long, value_name = "N")]
    more_threads: Option<NonZeroUsize>,
    /// Shows where the time of our side goes instead, op by op, and writes a trace for chrome://tracing
    #[arg(long, value_name = "TRACE", num_args = 0..=1, require_equals = true, default_missing_value = "trace.json")]
    pub(super) profile: Option<PathBuf>,
    /// Measures how our steps grow with batch, width, length and threads instead, and fits exponents
    #[arg(long)]
    scaling: bool,
    /// Measures what it costs to share a run among processes instead, beside a model of many machines
    #[arg(long)]
    ranks: bool,
    /// Shows results that --json wrote instead: a table, and a picture beside the file
    #[arg(long, value_name = "RESULTS")]
    show: Option<PathBuf>,
    /// Where optimizers and training steps compute, ours and PyTorch's; only these are measured on a GPU
    #[arg(long, default_value = "cpu", value_parser = |text: &str| Device::try_from(text.to_owned()))]
    device: Device,
    /// Serves one benchmark to another process of this command
    #[arg(long, hide = true, value_name = "NAME")]
    serve: Option<String>,
}

impl From<BenchError> for Failure {
    fn from(e: BenchError) -> Self {
        match e {
            e @ BenchError::Unknown { .. } => Self::usage(format!("error: {e}")),
            e => Self::other(format!("error: {e}")),
        }
    }
}

pub fn run(args: &Args, common: &Common, isa: Isa) -> Result<(), Failure> {
    if args.device == Device::Auto {
        return Err(Failure::usage("error: --device: say which: cpu, cuda, cuda:1 or metal"));
    }
    if args.device != Device::Cpu {
        let device = open(args.device).map_err(|e| Failure::usage(format!("error: --device: {e}")))?.device;
        bench::compute_on(device);
    }
    if let Some(name) = &args.serve {
        return Ok(bench::serve(name, std::io::stdin().lock(), std::io::stdout().lock())?);
    }
    let on_cpu = args.device == Device::Cpu;
    let sides = Sides {
        threads: rayon::current_num_threads(),
        more_threads: args.more_threads.map(usize::from),
        isa,
        data: common.data.clone(),
        peer: args.peer,
        bf16: on_cpu && (args.peer_bf16 || bench::has_bf16(isa)),
        device: args.device,
    };
    match (&args.show, &args.profile) {
        (Some(results), _) => show(results),
        (_, Some(trace)) => profile(select(&args.names)?, trace, common),
        _ if args.scaling => growth(args, common, &sides),
        #[cfg(unix)]
        _ if args.ranks => ranks(args, common, &sides),
        _ => measure_all(select(&args.names)?, args, common, &sides),
    }
}

fn measure_all(cases: Vec<Case>, args: &Args, common: &Common, sides: &Sides) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    if let Some(load) = load().filter(|load| *load > 0.5) {
        eprintln!(
            "warning: load {load:.1} from other programs: trust only processor times, with --threads 1"
        );
    }
    let mut results = Vec::new();
    let on_cpu = sides.device == Device::Cpu;
    for case in cases.into_iter().filter(|case| on_cpu || case.runs_on_devices()) {
        if !common.quiet && !args.json {
            eprintln!("{}", case.name);
        }
        let result = measure(&case, sides)?.json();
        if args.json {
            writeln!(out, "{result}")?;
            out.flush()?;
        }
        results.push(result);
    }
    if !args.json {
        write!(out, "{}", table(&results))?;
    }
    Ok(())
}

/// Our side and no other.
fn alone(sides: &Sides) -> Sides {
    Sides { peer: false, more_threads: None, ..sides.clone() }
}

/// How many threads wanted to run in the last minute, where the system tells.
fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

fn profile(cases: Vec<Case>, trace: &Path, common: &Common) -> Result<(), Failure> {
    let profile =
        Profile::install(Some(trace), common.level()).map_err(|e| Failure::other(format!("error: {e}")))?;
    for case in cases {
        eprintln!("{}", case.name);
        bench::watch(case, &profile)?;
        let table = profile.table_beside(bench::peak)?;
        eprintln!("{table}");
    }
    eprintln!("trace: {}", trace.display());
    Ok(())
}

fn growth(args: &Args, common: &Common, sides: &Sides) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let mut results = Vec::new();
    for series in &SERIES {
        for threads in [1, 2] {
            if !common.quiet && !args.json {
                eprintln!("{}, {threads} threads", series.name);
            }
            let growth = Growth::measure(series, &Sides { threads, ..alone(sides) })?;
            if args.json {
                let line =
                    serde_json::to_string(&growth).map_err(|e| Failure::other(format!("error: {e}")))?;
                writeln!(out, "{line}")?;
                out.flush()?;
            }
            results.push(growth);
        }
    }
    if !args.json {
        write!(out, "{}", scaling::table(&results))?;
    }
    Ok(())
}

#[cfg(unix)]
fn ranks(args: &Args, common: &Common, sides: &Sides) -> Result<(), Failure> {
    let say = |what: &str| {
        if !common.quiet {
            eprintln!("{what}");
        }
    };
    let costs = ranks::measure_all(&args.names, &alone(sides), &say)?;
    if costs.is_empty() {
        return Err(Failure::usage(
            "error: --ranks measures nothing of that name: leave it out to see what there is",
        ));
    }
    let mut out = std::io::stdout().lock();
    if !args.json {
        write!(out, "{}", ranks::table(&costs))?;
        return Ok(());
    }
    for cost in &costs {
        let line = serde_json::to_string(cost).map_err(|e| Failure::other(format!("error: {e}")))?;
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// Results of --ranks, if these are such.
#[cfg(unix)]
fn shown_ranks(text: &str) -> Option<(String, String)> {
    let costs = lines::<ranks::Cost>(text).ok().filter(|costs| !costs.is_empty())?;
    Some((ranks::table(&costs), ranks::picture(&costs)))
}

#[cfg(not(unix))]
fn shown_ranks(_: &str) -> Option<(String, String)> {
    None
}

/// The table of results in a file, and their picture beside it.
fn show(path: &Path) -> Result<(), Failure> {
    let refuse = |e: String| Failure::usage(format!("error: {}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| refuse(e.to_string()))?;
    // Lines of --scaling have a series, those of --ranks say so, others have a name.
    let (table, svg) = match (lines::<Growth>(&text), shown_ranks(&text)) {
        (Ok(results), _) if !results.is_empty() => (scaling::table(&results), scaling::picture(&results)),
        (_, Some(shown)) => shown,
        _ => {
            let results = lines::<Value>(&text).map_err(refuse)?;
            (table(&results), bench::picture(&results).map_err(refuse)?)
        }
    };
    let place = path.with_extension("svg");
    std::fs::write(&place, svg).map_err(|e| Failure::other(format!("error: {}: {e}", place.display())))?;
    write!(std::io::stdout(), "{table}")?;
    eprintln!("picture: {}", place.display());
    Ok(())
}

/// Every line as a value; an error names the line.
fn lines<T: serde::de::DeserializeOwned>(text: &str) -> Result<Vec<T>, String> {
    let parse =
        |(i, line): (usize, &str)| serde_json::from_str(line).map_err(|e| format!("line {}: {e}", i + 1));
    text.lines().enumerate().map(parse).collect()
}

fn table(results: &[Value]) -> String {
    // Columns of what is measured only where the CPU has it or where it is asked for.
    const BF16: [&str; 3] = ["PyTorch bf16 ms", "bf16 / ours", "best against best"];
    const MORE: [&str; 3] = ["more threads", "their ms", "theirs / ours"];
    let titles = [
        "benchmark",
        "ms",
        "rate",
        "beside",
        "MB",
        "PyTorch ms",
        "PyTorch / ours",
        "half of rounds",
        "processor time",
        "PyTorch MB",
    ];
    let mut table = Table::new(titles.into_iter().chain(BF16).chain(MORE));
    results.iter().for_each(|result| table.row(row(result, results)));
    BF16.iter().chain(&MORE).fold(table, |table, title| table.without_empty(title)).markdown()
}

fn row(result: &Value, all: &[Value]) -> [String; 16] {
    let text = |key: &str| result[key].as_str().unwrap_or_default().to_owned();
    let number = |key: &str, show: &dyn Fn(f64) -> String| result[key].as_f64().map(show).unwrap_or_default();
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let whole = |value: f64| format!("{value:.0}");
    let ratio = |value: f64| format!("{value:.2}");
    let shares =
        result.as_object().into_iter().flatten().filter_map(|(key, share)| {
            Some(format!("{:.2} of {}", share.as_f64()?, key.strip_prefix("of_")?))
        });
    let spread = match result["ratio_low"].is_f64() {
        true => format!("{} to {}", number("ratio_low", &ratio), number("ratio_high", &ratio)),
        false => String::new(),
    };
    [
        text("name"),
        number("ours_s", &milliseconds),
        format!("{} {}", number("rate", &|rate| format!("{rate:.1}")), text("unit")),
        shares.collect::<Vec<_>>().join(", "),
        number("peak_mb", &whole),
        number("peer_s", &milliseconds),
        number("ratio", &ratio),
        spread,
        number("cpu_ratio", &ratio),
        number("peer_peak_mb", &whole),
        number("peer_bf16_s", &milliseconds),
        number("ratio_bf16", &ratio),
        bench::best_ratio(all, result).map(ratio).unwrap_or_default(),
        number("more_threads", &|count| {
            format!("{count:.0} for {:.0}", result["threads"].as_f64().unwrap_or(f64::NAN))
        }),
        number("more_threads_s", &milliseconds),
        number("more_threads_ratio", &ratio),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn made_up() -> Vec<Value> {
        vec![
            json!({"name": "lstm1-step/20", "threads": 2, "ours_s": 0.2, "unit": "GFLOP/s", "rate": 220.0, "peer_s": 0.3,
                   "ratio": 1.5, "ratio_low": 1.4, "ratio_high": 1.6, "of_candle": 4.5}),
            json!({"name": "optim/adam/one", "threads": 2, "ours_s": 0.012, "unit": "GB/s", "rate": 45.0}),
        ]
    }

    #[test]
    fn a_table_has_the_columns_that_were_measured() {
        let plain = table(&made_up());
        assert!(plain.contains("1.40 to 1.60") && plain.contains("4.50 of candle"), "{plain}");
        assert!(!plain.contains("bf16") && !plain.contains("more threads"), "{plain}");
        let mut results = made_up();
        results[0]["peer_bf16_s"] = 0.16.into();
        results[0]["ratio_bf16"] = 0.8.into();
        let second = table(&results);
        let cells = |row: &str| row.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
        let rows: Vec<_> = second.lines().map(cells).collect();
        assert_eq!(rows[0][11..14], ["PyTorch bf16 ms", "bf16 / ours", "best against best"]);
        assert_eq!(rows[2][11..14], ["160.00", "0.80", "0.80"]);
        assert_eq!(rows[3][11..14], ["", "", ""]);
    }

    #[test]
    fn more_threads_are_shown_beside_the_others() {
        let mut results = made_up();
        results[0]["more_threads"] = 64.into();
        results[0]["more_threads_s"] = 0.21.into();
        results[0]["more_threads_ratio"] = 1.05.into();
        let shown = table(&results);
        let cells =
            |line: usize| shown.lines().nth(line).unwrap().split('|').map(str::trim).collect::<Vec<_>>();
        assert_eq!(cells(0)[11..14], ["more threads", "their ms", "theirs / ours"], "{shown}");
        assert_eq!(cells(2)[11..14], ["64 for 2", "210.00", "1.05"], "{shown}");
    }
}
