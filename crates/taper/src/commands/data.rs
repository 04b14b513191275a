use super::{Common, Failure};
use clap::Subcommand;
use serde_json::Value;
use std::path::PathBuf;
use taper_data::{Search, inventory};
use taper_train::Registries;
use taper_train::recipe::{Recipe, Task};

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
        /// The data set, or a recipe (.yaml) for its data with its options; all that can be found without one
        name: Option<String>,
        /// Where to look
        #[arg(long)]
        dir: Option<PathBuf>,
        /// A setting of the recipe: data.path=photos
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Writes the first test images of a data set as PNG files
    Pictures {
        /// The data set
        name: String,
        /// How many
        #[arg(long, default_value_t = 10)]
        count: usize,
        /// The folder to write them to
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
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
        What::Pictures { name, count, out: folder } => {
            inventory::pictures(registry, name, *count, folder, &search, &mut out)?
        }
        What::Check { name: Some(recipe), dir, set } if is_recipe(recipe) => {
            let recipe = Recipe::load(recipe, set, registries)?;
            let Task::Network { data, .. } = recipe.task() else {
                return Err(Failure::usage("error: the recipe has no data: it minimises a function"));
            };
            let (options, search) = (Value::Object(data.config.clone()), within(search, dir));
            inventory::check_one(registry, &data.name, &options, &search, args.json, &mut out)?;
        }
        What::Check { name, dir, set } => {
            if let Some(set) = set.first() {
                return Err(Failure::usage(format!("error: --set {set} needs a recipe to change")));
            }
            if !inventory::check(registry, name.as_deref(), dir.clone(), &search, args.json, &mut out)? {
                return Err(Failure::other(""));
            }
        }
    }
    Ok(())
}

/// Whether an argument names a file and not a data set.
fn is_recipe(name: &str) -> bool {
    [".yaml", ".yml"].iter().any(|ending| name.ends_with(ending))
}

fn within(search: Search, dir: &Option<PathBuf>) -> Search {
    match dir {
        Some(dir) => Search { dir: Some(dir.clone()), env_dir: None, ..search },
        None => search,
    }
}
