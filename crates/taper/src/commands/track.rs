use super::{Common, Failure};
use std::path::PathBuf;
use std::time::Duration;
use taper_watch::track::{Mlflow, TrackError, Tracker};

/// Brings runs to where a team looks: MLflow, TensorBoard, Weights & Biases or files of comma-separated values
///
/// Reads run folders, while runs go on or afterwards; training knows nothing of it. What was brought before is not brought again,
/// so that the same command catches up after a server was away.
///
///   cargo xtask track runs --to mlflow --server http://127.0.0.1:5000
///   cargo xtask track runs/mnist-mlp-* --to tensorboard --out logs --follow
///   cargo xtask track runs --to wandb-offline, and then: wandb sync wandb/offline-run-*
///   cargo xtask track runs --to csv --out tables
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folders of runs, or runs
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Where to
    #[arg(long, value_enum)]
    to: To,
    /// The folder for files (csv, tensorboard; wandb-offline: `wandb` unless another is named)
    #[arg(long, value_name = "DIR", required_if_eq_any([("to", "csv"), ("to", "tensorboard")]))]
    out: Option<PathBuf>,
    /// The server's address (mlflow)
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:5000")]
    server: String,
    /// The experiment that runs belong to (mlflow)
    #[arg(long, value_name = "NAME", default_value = "taper")]
    experiment: String,
    /// Goes on until no run is under way, every few seconds; what fails is tried again
    #[arg(long)]
    follow: bool,
    /// How long an answer of the server may take
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum To {
    /// MLflow's server, by its REST interface
    Mlflow,
    /// TensorBoard's files with true times, histograms and hyperparameters
    Tensorboard,
    /// Folders that Weights & Biases' own `wandb sync` uploads
    WandbOffline,
    /// A file of comma-separated values a run
    Csv,
}

/// How often runs under way are looked at.
const EVERY: Duration = Duration::from_secs(5);

pub fn run(args: &Args, common: &Common) -> Result<(), Failure> {
    // Only one of them goes without: its own tool looks there.
    let out = args.out.clone().unwrap_or_else(|| "wandb".into());
    let usage = |e: TrackError| Failure::usage(format!("error: {e}"));
    let mut tracker = match args.to {
        To::Csv => Tracker::Csv(out),
        To::Tensorboard => Tracker::TensorBoard(out),
        To::WandbOffline => Tracker::Wandb(out),
        To::Mlflow => {
            let limit = Duration::from_secs(args.limit);
            Tracker::Mlflow(Mlflow::new(&args.server, &args.experiment, limit).map_err(usage)?)
        }
    };
    loop {
        let progress = match tracker.track(&args.folders) {
            Ok(progress) => progress,
            // A server that is away comes back; a folder that is none does not become one.
            Err(e @ TrackError::Server { .. }) if args.follow => {
                eprintln!("warning: {e}");
                std::thread::sleep(EVERY);
                continue;
            }
            Err(e @ (TrackError::Run { .. } | TrackError::Address(_))) => return Err(usage(e)),
            Err(e) => return Err(Failure::other(format!("error: {e}"))),
        };
        if !common.quiet && (progress.added > 0 || !args.follow) {
            let runs = if progress.runs == 1 { "run" } else { "runs" };
            let entries = if progress.added == 1 { "entry" } else { "entries" };
            eprintln!(
                "{} {runs}, {} new {entries}, {} under way",
                progress.runs, progress.added, progress.running
            );
        }
        if !args.follow || progress.running == 0 {
            return Ok(());
        }
        std::thread::sleep(EVERY);
    }
}
