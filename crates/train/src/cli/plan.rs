use super::Failure;
use std::io::Write;
use std::path::PathBuf;
use taper_train::{Recipe, Registries};

/// Checks a recipe and prints what it comes to, with where each value came from
///
///   cargo xtask plan recipes/mnist/mlp-decgd.yaml --set optimizer.c=0.1
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The recipe
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides a setting
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let recipe = Recipe::load(&args.recipe, &args.set, &Registries::default())?;
    write!(std::io::stdout(), "{}", recipe.plan())?;
    Ok(())
}
