use super::{Common, Failure, signals};
use crate::plan::{Plan, picture};
use std::io::Write;
use std::path::PathBuf;
use taper_train::run::{self, Options, Show};
use taper_train::{Recipe, Registries};

/// Checks a recipe and prints what it comes to
///
/// Every setting with where its value came from, the parameters as the optimizer's groups match them, the runs and which
/// are done, the curves of rate and momentum, and an estimate of time, memory and disk from a few steps of training.
///
///   cargo xtask plan recipes/mnist/mlp-decgd.yaml --set optimizer.c=0.1
///   cargo xtask plan recipes/sweeps/c-robustness.yaml --no-probe
///   cargo xtask plan recipes/cookbook/warmup-cosine.yaml --no-probe --out schedule.svg
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The recipe
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides a setting
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The folder of all runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Trains nothing, and so estimates nothing
    #[arg(long)]
    no_probe: bool,
    /// Says how so many processes would share each run: shards, bytes and memory of each
    #[arg(long, value_name = "R", value_parser = clap::value_parser!(u16).range(1..))]
    ranks: Option<u16>,
    /// Draws how the rate and the momentum move, as SVG
    #[arg(long, value_name = "FILE.svg", value_parser = svg)]
    out: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let recipe = Recipe::load(&args.recipe, &args.set, registries)?;
    let options = Options {
        runs: args.runs.clone(),
        search: common.search().looking_only(),
        show: Show::Quiet,
        stop: signals::stop_flag(),
        ..Options::default()
    };
    for run in recipe.runs() {
        run::check_ranks(run, args.ranks.unwrap_or(1).into())?;
    }
    if !args.no_probe && !common.quiet {
        eprintln!("measuring a few steps; --no-probe leaves that out");
    }
    let plan = Plan::new(&recipe, registries, &options, !args.no_probe)?;
    let plan = match args.ranks {
        Some(ranks) => plan.shared_by(ranks.into())?,
        None => plan,
    };
    if let Some(out) = &args.out {
        let write = std::fs::write(out, picture(&plan.schedules));
        write.map_err(|e| Failure::other(format!("error: {}: {e}", out.display())))?;
    }
    match args.json {
        true => writeln!(std::io::stdout(), "{}", serde_json::json!(plan))?,
        false => write!(std::io::stdout(), "{plan}")?,
    }
    if !common.quiet {
        plan.warnings.iter().for_each(|warning| eprintln!("{warning}"));
        plan.findings.iter().for_each(|finding| eprintln!("note: {finding}"));
    }
    Ok(())
}

/// The name of a picture.
fn svg(path: &str) -> Result<PathBuf, String> {
    match path.ends_with(".svg") {
        true => Ok(path.into()),
        false => Err("expected a name that ends in .svg".into()),
    }
}
