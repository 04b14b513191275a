use super::{Common, Failure};
use clap::Subcommand;
use std::path::PathBuf;
use taper_data::inventory;
use taper_train::Registries;

/// Lists, fetches and checks data sets
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
    /// One JSON object a line
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum What {
    /// What is known and where it is
    List,
    /// Downloads a data set into the cache and proves it
    Fetch {
        /// The data set
        name: String,
        /// The hub's revision [default: the pinned one]
        #[arg(long)]
        revision: Option<String>,
    },
    /// Reads data sets and proves their content
    Check {
        /// The data set; all that can be found without one
        name: Option<String>,
        /// Where to look
        #[arg(long)]
        dir: Option<PathBuf>,
    },
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let registry = &registries.data;
    let search = common.search();
    let mut out = std::io::stdout().lock();
    match &args.what {
        What::List => inventory::list(registry, &search, args.json, &mut out)?,
        What::Fetch { name, revision } => {
            inventory::fetch(registry, name, revision.as_deref(), &search, args.json, &mut out)?
        }
        What::Check { name, dir } => {
            if !inventory::check(registry, name.as_deref(), dir.clone(), &search, args.json, &mut out)? {
                return Err(Failure::other(""));
            }
        }
    }
    Ok(())
}
