use super::Failure;
use std::path::PathBuf;
use taper_train::Registries;
use taper_train::compare::compare;

/// Finds the first step, tensor and element at which two runs differ
///
/// Exit code 0 when they are equal, 1 when they differ. Settings that differ are listed, and do not count: what they
/// changed does.
///
///   cargo xtask compare runs/quickstart-0123456789ab elsewhere/quickstart-0123456789ab
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The folder of a run
    #[arg(value_name = "RUN_A")]
    a: PathBuf,
    /// The folder of another
    #[arg(value_name = "RUN_B")]
    b: PathBuf,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    let comparison = compare(&args.a, &args.b, registries)?;
    super::print(&comparison, args.json)?;
    if comparison.equal { Ok(()) } else { Err(Failure::other("")) }
}
