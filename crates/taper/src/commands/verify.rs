use super::{Common, Failure};
use std::path::PathBuf;
use taper_train::Registries;
use taper_train::run::Options;
use taper_train::verify::verify;

/// Checks a run's files and trains its first steps again, to the bit
///
/// Exit code 0 when all is as it was recorded, 1 when anything is not.
///
///   cargo xtask verify runs/mnist-mlp-decgd-0123456789ab
///   cargo xtask verify runs/mnist-mlp-decgd-0123456789ab --steps 2000
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The folder of a run
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Steps to train again [default: as far as the first line of metrics]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let options = Options {
        search: common.search(),
        show: common.show(),
        stop: super::signals::stop_flag(),
        ..Options::default()
    };
    let found = verify(&args.run, args.steps, registries, &options)?;
    super::print(&found, args.json)?;
    if found.verified { Ok(()) } else { Err(Failure::other("")) }
}
