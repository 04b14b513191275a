use super::{Common, Failure, report, signals, sweep};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use taper_report::Form;
use taper_report::reproduce::theory::Experiment;
use taper_report::reproduce::{self, Cell, Plan, Published, Scale, Target};
use taper_train::run::Options;
use taper_train::sweep::{Ended, Processes, Sweep, Workers};
use taper_train::{Recipe, Registries};

/// The paper's tables and claims beside ours, with a verdict on every number
///
/// Runs what is missing, uses what was run before, and prints our mean and interval beside the published number:
/// reproduced, differs, undecided, not run, or not comparable (reduced scale or data). How that is decided: docs/verdicts.md.
///
///   cargo xtask reproduce numeric
///   cargo xtask reproduce theory --out theory.html
///   cargo xtask reproduce mnist --out mnist.html
///   cargo xtask reproduce all --scale cpu --jobs 2 --out all.html --out all.md
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// What to reproduce
    #[arg(required = true, value_enum, value_name = "TARGET")]
    targets: Vec<TargetArg>,
    /// The experiments as they are, reduced ones (listed below each table) for two cores and an hour, or another network that two cores
    /// train in minutes, with fair tuning and fresh seeds (cifar10)
    #[arg(long, value_enum, default_value_t = ScaleArg::Paper)]
    scale: ScaleArg,
    /// The folder of all runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Runs at a time; threads are divided between them
    #[arg(long, short, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    jobs: u16,
    /// The seeds, in place of the scale's own: how many (10 is 1 to 10), or which (`4,5,6`, `4-6`, `4-4`)
    #[arg(long, value_name = "N|SEED,…", value_parser = seeds)]
    seeds: Option<Seeds>,
    /// Only the paper's own runs: no controls of DecGD, and no second set of runs to choose by a validation set where the
    /// paper's recipe has none
    #[arg(long)]
    bare: bool,
    /// Writes a report too; the ending says what: .html, .md, .tex, .csv, .svg, .png
    #[arg(long, value_name = "FILE")]
    out: Vec<PathBuf>,
    /// Prints one JSON object a cell in place of the tables
    #[arg(long)]
    json: bool,
    /// Says what would be run, and runs nothing
    #[arg(long)]
    dry_run: bool,
    /// Starts nothing: judges what there is, while others may be at work
    #[arg(long, conflicts_with = "dry_run")]
    collect: bool,
    /// The folder with published.yaml and the recipes it names [default: those inside this program]
    #[arg(long, value_name = "DIR", default_value = "taper:recipes", hide_default_value = true)]
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
    /// Regret and gradients beside the bounds of the theorems; by itself, in minutes
    Theory,
    /// All of them but theory
    All,
}

#[derive(Clone, Copy, PartialEq, clap::ValueEnum)]
enum ScaleArg {
    Paper,
    Cpu,
    Laptop,
}

/// A type of its own: clap takes a bare `Vec` for an option given several times.
#[derive(Clone, Debug, PartialEq)]
struct Seeds(Vec<u64>);

/// More than anybody runs; a typing error must not become a list that fills the memory.
const MOST_SEEDS: u64 = 10_000;

fn seeds(text: &str) -> Result<Seeds, String> {
    let number = |part: &str| {
        let part = part.trim();
        part.parse::<u64>().map_err(|_| {
            format!("`{part}` is no seed; expected how many (`10`), a list (`4,5,6`) or a range (`4-6`)")
        })
    };
    let few = |count: u64| {
        if count <= MOST_SEEDS {
            Ok(())
        } else {
            Err(format!("{count} seeds; expected at most {MOST_SEEDS}"))
        }
    };
    if let Ok(count) = text.trim().parse::<u64>() {
        if count == 0 {
            return Err(String::from("no seeds; expected at least 1 (the seed 0 alone is `0-0`)"));
        }
        few(count)?;
        return Ok(Seeds((1..=count).collect()));
    }
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if last < first {
            return Err(format!("`{part}` runs backwards"));
        }
        few((last - first).saturating_add(1))?;
        for seed in first..=last {
            if all.contains(&seed) {
                return Err(format!("the seed {seed} is named twice"));
            }
            all.push(seed);
        }
    }
    Ok(Seeds(all))
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let forms = args.out.iter().map(|path| report::form(path)).collect::<Result<Vec<Form>, _>>()?;
    let scale = match args.scale {
        ScaleArg::Paper => Scale::Paper,
        ScaleArg::Cpu | ScaleArg::Laptop => Scale::Cpu,
    };
    let published = Published::load(&args.recipes)?;
    let plan = Plan {
        published: &published,
        scale,
        recipes: &args.recipes,
        seeds: args.seeds.as_ref().map(|Seeds(seeds)| &seeds[..]),
        bare: args.bare,
        sections: registries,
    };
    if args.targets.contains(&TargetArg::Theory) {
        return theory(args, common, registries, &plan, forms);
    }
    if args.scale == ScaleArg::Laptop {
        return laptop(args, common, registries, &plan, forms);
    }
    // All recipes are read before the first is trained: a mistake in the last shows at once.
    let (mut cells, mut controls, mut numeric) = (Vec::new(), Vec::new(), Vec::new());
    for target in targets(&args.targets) {
        match target {
            Target::Numeric => numeric = plan.numeric()?,
            target => {
                cells.extend(plan.cells(target)?);
                controls.extend(plan.controls(target)?);
            }
        }
    }
    let of_cells = cells.iter().flat_map(|cell: &Cell| cell.runs.iter().chain(&cell.validated));
    let recipes: Vec<Recipe> = numeric.iter().chain(of_cells).chain(&controls).cloned().collect();
    let options = Options {
        runs: args.runs.clone(),
        search: common.search(),
        show: common.show(),
        stop: signals::stop_flag(),
        ..Options::default()
    };
    let mut sweep = Sweep::open(&recipes, registries, &options)?;
    if !common.quiet {
        announce(&cells, &numeric, &controls, &sweep, args, scale);
    }
    if args.dry_run {
        return Ok(());
    }
    go_on(&mut sweep, args, common, registries)?;
    let mut problems = Vec::new();
    let numeric = match numeric.is_empty() {
        true => None,
        false => Some(reproduce::numeric(&published, &numeric, &sweep, &mut problems)),
    };
    let outcomes = reproduce::outcomes(cells, &sweep, &mut problems);
    let controls = reproduce::controls(&controls, &sweep, &mut problems);
    problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    let document = reproduce::document(scale, &published, &outcomes, numeric.as_ref(), &controls, &problems);
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

/// Does what is missing of a sweep, unless only what there is is asked for.
fn go_on(sweep: &mut Sweep, args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let missing = |sweep: &Sweep| format!("{} of {} runs", sweep.missing().count(), sweep.runs().len());
    if args.collect {
        if sweep.missing().next().is_some() {
            eprintln!("{} have no result yet", missing(sweep));
        }
        return Ok(());
    }
    let processes = Processes {
        jobs: usize::from(args.jobs),
        threads: common.threads.unwrap_or_else(sweep::cores),
        program: sweep::program()?,
        args: sweep::run_args(common),
        devices: Vec::new(),
    };
    match sweep.run(registries, &Workers::Processes(processes))? {
        Ended::All => Ok(()),
        Ended::Interrupted => {
            let message = format!("stopped with {} to do; the same command goes on", missing(sweep));
            Err(Failure { message, code: 130 })
        }
    }
}

/// The theorems: every recipe is followed here and now, without a folder.
fn theory(
    args: &Args,
    common: &Common,
    registries: &Registries,
    plan: &Plan,
    forms: Vec<Form>,
) -> Result<(), Failure> {
    if args.targets.len() > 1 || args.scale != ScaleArg::Paper || args.seeds.is_some() || args.collect {
        let message = "error: theory goes by itself, with the seeds of its recipes and without run folders: leave other targets, --scale, --seeds and --collect out";
        return Err(Failure::other(message.to_owned()));
    }
    let files = reproduce::theory::RECIPES.iter();
    let recipes = files.map(|file| plan.recipe(file)).collect::<Result<Vec<Recipe>, _>>()?;
    let all: Vec<Recipe> = recipes.iter().flat_map(|recipe| recipe.runs().to_vec()).collect();
    if !common.quiet {
        let steps: u64 = all.iter().filter_map(|recipe| recipe.train.steps).sum();
        eprintln!("theory: {} runs of {} problems, {steps} steps in all", all.len(), recipes.len());
    }
    if args.dry_run {
        return Ok(());
    }
    let mut traces = taper_train::theory::traces(&all, registries).into_iter();
    let experiments: Vec<Experiment> = recipes
        .into_iter()
        .map(|recipe| Experiment { traces: traces.by_ref().take(recipe.runs().len()).collect(), recipe })
        .collect();
    let (document, judged) = reproduce::theory::theory(&experiments);
    for (path, form) in args.out.iter().zip(forms) {
        report::write(&document, form, Some(path))?;
    }
    if !args.json {
        return report::write(&document, Form::Markdown, None);
    }
    let mut out = std::io::stdout().lock();
    judged.iter().try_for_each(|judged| writeln!(out, "{}", serde_json::json!(judged)))?;
    Ok(())
}

/// The claims on a network for two cores: every optimizer's rates, then the best of each and what else the claims need.
fn laptop(
    args: &Args,
    common: &Common,
    registries: &Registries,
    plan: &Plan,
    forms: Vec<Form>,
) -> Result<(), Failure> {
    if args.seeds.is_some() {
        let message = "error: --scale laptop has the seeds of its recipes: leave --seeds out";
        return Err(Failure::other(message.to_owned()));
    }
    let targets = targets(&args.targets);
    let Some(target) = targets.first().copied().filter(|_| targets.len() == 1) else {
        return Err(Failure::other("error: --scale laptop takes one target: cifar10".to_owned()));
    };
    let Some(recipes) = plan.laptop(target)? else {
        let known: Vec<&str> = plan.published.laptop.0.iter().map(|(name, _)| name.as_str()).collect();
        let message = format!("error: --scale laptop is for {}, not for {}", known.join(", "), target.name());
        return Err(Failure::other(message));
    };
    let options = Options {
        runs: args.runs.clone(),
        search: common.search(),
        show: common.show(),
        stop: signals::stop_flag(),
        ..Options::default()
    };
    let go_on = |sweep: &mut Sweep, what: &str| -> Result<(), Failure> {
        if !common.quiet {
            let (left, all) = (sweep.missing().count(), sweep.runs().len());
            eprintln!("scale laptop, {what}: {left} of {all} runs to do in {}", args.runs.display());
        }
        if args.dry_run { Ok(()) } else { go_on(sweep, args, common, registries) }
    };
    let mut tuning = Sweep::open(std::slice::from_ref(&recipes.optimizers), registries, &options)?;
    go_on(&mut tuning, "rates")?;
    let chosen = tuning.confirmation(&recipes.optimizers);
    if chosen.is_none() && !args.dry_run {
        eprintln!("warning: runs of the sweep over rates have no result: no optimizer is compared");
    }
    let chosen = chosen.map(|chosen| chosen.recipes).unwrap_or_default();
    let all: Vec<Recipe> = chosen.iter().chain([&recipes.c, &recipes.default]).cloned().collect();
    let mut fresh = Sweep::open(&all, registries, &options)?;
    go_on(&mut fresh, "the best rates on fresh seeds, c and the default rate")?;
    if args.dry_run {
        return Ok(());
    }
    let mut problems = Vec::new();
    let (document, claims) =
        reproduce::laptop(plan.published, target, &recipes, &chosen, &fresh, &mut problems);
    problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    for (path, form) in args.out.iter().zip(forms) {
        report::write(&document, form, Some(path))?;
    }
    if !args.json {
        return report::write(&document, Form::Markdown, None);
    }
    let mut out = std::io::stdout().lock();
    claims.iter().try_for_each(|claim| writeln!(out, "{}", serde_json::json!(claim)))?;
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
        TargetArg::Theory | TargetArg::All => None,
    };
    if all { Target::ALL.into() } else { given.iter().filter_map(one).collect() }
}

/// What will be done, before it is done.
fn announce(
    cells: &[Cell],
    numeric: &[Recipe],
    controls: &[Recipe],
    sweep: &Sweep,
    args: &Args,
    scale: Scale,
) {
    if !numeric.is_empty() {
        eprintln!("numeric: {} runs of three functions", numeric.len());
    }
    for target in Target::ALL {
        let of: Vec<&Cell> = cells.iter().filter(|cell| cell.target == target).collect();
        let Some(first) = of.first() else { continue };
        let validated = if of.iter().any(|cell| !cell.validated.is_empty()) {
            ", and again with a validation set"
        } else {
            ""
        };
        eprintln!("{}: {} cells by {} seeds{validated}", target.name(), of.len(), first.runs.len());
    }
    if !controls.is_empty() {
        eprintln!("controls of DecGD: {} runs", controls.len());
    }
    let (left, all) = (sweep.missing().count(), sweep.runs().len());
    eprintln!("scale {}: {left} of {all} runs to do in {}", scale.name(), args.runs.display());
}

#[cfg(test)]
mod tests {
    use super::{Seeds, seeds};

    #[test]
    fn a_number_alone_is_how_many_and_a_list_or_range_names_them() {
        assert_eq!(seeds("3"), Ok(Seeds(vec![1, 2, 3])));
        assert_eq!(seeds("10"), Ok(Seeds((1..=10).collect())));
        assert_eq!(seeds("4,9, 2"), Ok(Seeds(vec![4, 9, 2])));
        assert_eq!(seeds("4-6,1"), Ok(Seeds(vec![4, 5, 6, 1])));
        assert_eq!(seeds("0-0"), Ok(Seeds(vec![0])));
    }

    #[test]
    fn what_names_no_seeds_is_refused_in_words() {
        for (text, expected) in [
            ("0", "at least 1"),
            ("", "is no seed"),
            ("1,x", "`x` is no seed"),
            ("6-4", "backwards"),
            ("1,2,1", "twice"),
            ("99999999999", "at most"),
            ("0-18446744073709551615", "at most"),
            ("-3", "is no seed"),
        ] {
            let refused = seeds(text).unwrap_err();
            assert!(refused.contains(expected), "{text}: {refused}");
        }
    }
}
