use super::{Common, Failure};
use std::io::Write;
use taper_train::bench::{BenchError, Measured, Peer, measure, select};
use taper_train::table::Table;

/// Measures how fast this machine does the work of training
///
///   cargo xtask bench optim
///   cargo xtask bench 'optim/adam*' --peer --json
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Suites or benchmarks; `*` stands for any characters [default: all]
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
    /// Runs PyTorch on the same work in the same call
    #[arg(long)]
    peer: bool,
}

impl From<BenchError> for Failure {
    fn from(e: BenchError) -> Self {
        match e {
            e @ BenchError::Unknown { .. } => Self::usage(format!("error: {e}")),
            e => Self::other(format!("error: {e}")),
        }
    }
}

pub fn run(args: &Args, common: &Common) -> Result<(), Failure> {
    let cases = select(&args.names)?;
    let mut peer = if args.peer { Some(Peer::start(rayon::current_num_threads())?) } else { None };
    let mut out = std::io::stdout().lock();
    let mut table = Table::new(["benchmark", "ms", "rate", "beside", "peer ms", "peer / ours"]);
    for case in cases {
        if !common.quiet && !args.json {
            eprintln!("{}", case.name);
        }
        let measured = measure(case, peer.as_mut())?;
        if args.json {
            writeln!(out, "{}", measured.json())?;
        } else {
            table.row(row(&measured));
        }
    }
    if !args.json {
        write!(out, "{}", table.markdown())?;
    }
    Ok(())
}

fn row(measured: &Measured) -> [String; 6] {
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    let beside: Vec<_> =
        measured.shares().map(|(name, share)| format!("{:.0} % of {name}", share * 100.0)).collect();
    [
        measured.name.clone(),
        milliseconds(measured.ours),
        format!("{:.1} {}", measured.rate(), measured.unit),
        beside.join(", "),
        measured.peer.map(milliseconds).unwrap_or_default(),
        measured.ratio().map(|ratio| format!("{ratio:.2}")).unwrap_or_default(),
    ]
}
