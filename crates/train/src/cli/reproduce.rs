use super::{Common, Failure, report, train};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use taper_train::report::Form;
use taper_train::reproduce::{self, Cell, Done, Published, Scale, Target};
use taper_train::run::{self, Options, RunError, Show};
use taper_train::{Recipe, Registries};

/// The paper's tables and claims beside ours, with a verdict on every number
///
/// Runs what is missing, uses what was run before, and prints our mean and interval beside the published number:
/// reproduced, differs, not run, or not comparable (reduced scale or data). How that is decided: docs/results/README.md.
///
///   cargo xtask reproduce numeric
///   cargo xtask reproduce mnist --out mnist.html
///   cargo xtask reproduce all --scale cpu --jobs 2 --out all.html --out all.md
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// What to reproduce
    #[arg(required = true, value_enum, value_name = "TARGET")]
    targets: Vec<TargetArg>,
    /// The experiments as they are, or reduced ones (listed below each table) for two cores and an hour
    #[arg(long, value_enum, default_value_t = ScaleArg::Paper)]
    scale: ScaleArg,
    /// The folder of all runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Runs at a time; threads are divided between them
    #[arg(long, short, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// The seeds, in place of the scale's own
    #[arg(long, value_name = "SEED,…", value_delimiter = ',')]
    seeds: Vec<u64>,
    /// Leaves out the second set of runs that choose by a validation set, where the paper's recipe has none
    #[arg(long)]
    no_val: bool,
    /// Writes a report too; the ending says what: .html, .md, .tex, .csv, .svg
    #[arg(long, value_name = "FILE")]
    out: Vec<PathBuf>,
    /// Prints one JSON object a cell in place of the tables
    #[arg(long)]
    json: bool,
    /// Says what would be run, and runs nothing
    #[arg(long)]
    dry_run: bool,
    /// The folder with published.yaml and the recipes it names
    #[arg(long, value_name = "DIR", default_value = "recipes")]
    recipes: PathBuf,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum TargetArg {
    /// The MLP on MNIST: every optimizer below 2 % error
    Mnist,
    /// Table 1
    Cifar10,
    /// Table 2
    Cifar100,
    /// Table 3
    Ptb,
    /// The figure on DecGD's c
    CRobustness,
    /// Powell's and Rosenbrock's functions
    Numeric,
    /// All of them
    All,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum ScaleArg {
    Paper,
    Cpu,
}

pub fn run(args: &Args, common: &Common) -> Result<(), Failure> {
    let forms: Vec<Form> = args
        .out
        .iter()
        .map(|path| Form::of(path))
        .collect::<Result<_, _>>()
        .map_err(|e| Failure::usage(format!("error: --out: {e}")))?;
    let registries = Registries::default();
    let scale = match args.scale {
        ScaleArg::Paper => Scale::Paper,
        ScaleArg::Cpu => Scale::Cpu,
    };
    let published = Published::load(&args.recipes)?;
    let seeds = Some(&args.seeds[..]).filter(|seeds| !seeds.is_empty());
    let (mut cells, mut numeric): (Vec<Cell>, Vec<Recipe>) = (Vec::new(), Vec::new());
    for target in targets(&args.targets) {
        match target {
            Target::Numeric => {
                numeric = reproduce::numeric_recipes(&published, scale, &args.recipes, &registries)?;
            }
            target => cells.extend(reproduce::cells(
                target,
                &published,
                scale,
                &args.recipes,
                seeds,
                !args.no_val,
                &registries,
            )?),
        }
    }
    // All recipes are read before the first is trained: a mistake in the last shows at once.
    let of_cells = cells.iter().flat_map(|cell| cell.runs.iter().chain(&cell.validated));
    let recipes: Vec<Recipe> = numeric.iter().chain(of_cells).cloned().collect();
    let options = Options {
        runs: args.runs.clone(),
        search: common.search(),
        show: if common.quiet { Show::Quiet } else { Show::Auto },
        stop: train::stop_on_interrupt(),
    };
    if !common.quiet {
        announce(&cells, &numeric, &recipes, &options, scale);
    }
    if args.dry_run {
        return Ok(());
    }
    let done = execute(&recipes, &registries, &options)?;
    let mut problems = Vec::new();
    let with_numeric = !numeric.is_empty();
    let numeric = with_numeric.then(|| reproduce::numeric(&published, &numeric, &done, &mut problems));
    let outcomes = reproduce::outcomes(cells, &done, &mut problems);
    problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    let document = reproduce::document(scale, &published, &outcomes, numeric.as_ref(), &problems);
    for (path, form) in args.out.iter().zip(forms) {
        report::write(&document, form, Some(path))?;
    }
    if !args.json {
        return report::write(&document, Form::Markdown, None);
    }
    let mut out = std::io::stdout().lock();
    for outcome in &outcomes {
        writeln!(out, "{}", outcome.json(scale))?;
    }
    let claims = reproduce::check(&published, &outcomes);
    for claim in claims.iter().chain(numeric.iter().flat_map(|numeric| &numeric.checked)) {
        writeln!(out, "{}", serde_json::json!(claim))?;
    }
    Ok(())
}

/// The targets in the order that they run in, each once.
fn targets(given: &[TargetArg]) -> BTreeSet<Target> {
    let all = given.contains(&TargetArg::All);
    let one = |arg: &TargetArg| match arg {
        TargetArg::Mnist => Some(Target::Mnist),
        TargetArg::Cifar10 => Some(Target::Cifar10),
        TargetArg::Cifar100 => Some(Target::Cifar100),
        TargetArg::Ptb => Some(Target::Ptb),
        TargetArg::CRobustness => Some(Target::CRobustness),
        TargetArg::Numeric => Some(Target::Numeric),
        TargetArg::All => None,
    };
    if all { Target::ALL.into() } else { given.iter().filter_map(one).collect() }
}

/// What will be done, before it is done.
fn announce(cells: &[Cell], numeric: &[Recipe], recipes: &[Recipe], options: &Options, scale: Scale) {
    for target in Target::ALL {
        let of: Vec<&Cell> = cells.iter().filter(|cell| cell.target == target).collect();
        let (what, runs) = match target {
            Target::Numeric if numeric.is_empty() => continue,
            Target::Numeric => ("functions and controls".to_owned(), numeric.len()),
            _ if of.is_empty() => continue,
            _ => {
                let seeds = of[0].runs.len();
                let runs = of.iter().map(|cell| cell.runs.len() + cell.validated.len()).sum();
                (format!("{} cells, {seeds} seeds each", of.len()), runs)
            }
        };
        eprintln!("{}: {what}, {runs} runs", target.name());
    }
    let ids: BTreeSet<&str> = recipes.iter().map(Recipe::id).collect();
    let is_done = |recipe: &&Recipe| options.runs.join(recipe.directory()).join("summary.json").is_file();
    let before: BTreeSet<&str> = recipes.iter().filter(is_done).map(Recipe::id).collect();
    eprintln!(
        "scale {}: {} runs in {}, {} of them begun or done before",
        scale.name(),
        ids.len(),
        options.runs.display(),
        before.len()
    );
}

/// Does what is missing; a run that fails or diverges stops no other.
fn execute(recipes: &[Recipe], registries: &Registries, options: &Options) -> Result<Vec<Done>, Failure> {
    let mut done = Vec::new();
    for recipe in recipes {
        let folder = options.runs.join(recipe.directory());
        let failure = match run::run(recipe, registries, options) {
            Ok(_) | Err(RunError::Diverged { .. }) => None,
            Err(e @ RunError::Interrupted { .. }) if options.stop.load(Ordering::Relaxed) => {
                return Err(e.into());
            }
            Err(e) => Some(e.to_string()),
        };
        if let Some(failure) = failure.as_ref().filter(|_| options.show != Show::Quiet) {
            eprintln!("{}: {failure}", recipe.name);
        }
        done.push(Done { id: recipe.id().to_owned(), folder, failure });
    }
    Ok(done)
}
