use super::on_end::{self, Ended};
use super::{Common, Failure, report, signals};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use taper_report::{Form, document, load};
use taper_train::run::{Options, check_ranks};
use taper_train::sweep::slurm::{self, SlurmError};
use taper_train::sweep::{Cell, Ended as SweepEnded, Processes, State, Sweep, Workers, lint, table};
use taper_train::{Recipe, Registries};

/// Does what is missing of a recipe's runs and prints their table
///
/// A run is known by the hash of its settings: what is done already, in this or another sweep, is not done again, and
/// what was interrupted goes on. A run that fails or diverges stops no other.
///
///   cargo xtask sweep recipes/sweeps/c-robustness-mnist.yaml
///   cargo xtask sweep recipes/sweeps/lr-and-c.yaml --jobs 4 --set sweep.seeds=[1] --out lr-and-c.html
///   cargo xtask sweep recipes/sweeps/c-robustness.yaml --launcher slurm --jobs 8 --set cluster.partition=gpu --print
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// A recipe with a `sweep` section (any other is a sweep of one run)
    #[arg(value_name = "RECIPE")]
    recipe: PathBuf,
    /// Overrides a setting, also of the sweep itself
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Runs at a time; threads are divided between them [default: 1, on Slurm as many as there is room for]
    #[arg(long, short, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Where to run
    #[arg(long, value_enum, default_value_t = Launcher::Local)]
    launcher: Launcher,
    /// The folder of all runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Writes a report on the runs too, with curves and statistics; the ending says what: .html, .md, .tex, .csv, .svg, .png
    #[arg(long, value_name = "FILE")]
    out: Vec<PathBuf>,
    /// Starts nothing: lists the runs to do, or prints the Slurm script
    #[arg(long, visible_alias = "print")]
    dry_run: bool,
    /// Starts nothing: prints the table of what there is, while others may be at work
    #[arg(long, conflicts_with = "dry_run")]
    collect: bool,
    /// GPUs of each job: every one sees its own (CUDA_VISIBLE_DEVICES)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    gpus_per_job: Option<u16>,
    /// Goes on where the file system's locks do not reach other machines: no other sweep works in this folder
    #[arg(long)]
    alone: bool,
    /// Runs a command when the sweep has ended, however it did: TAPER_OUTCOME is finished, interrupted or failed, TAPER_DONE of
    /// TAPER_ALL runs have a result
    #[arg(long, value_name = "COMMAND")]
    on_end: Option<String>,
    /// One JSON object a configuration in place of the table
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Launcher {
    /// Processes on this machine
    Local,
    /// An array job of Slurm: submits what is missing and not in the queue
    Slurm,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let mut ended = Ended::default();
    let result = sweep(args, common, registries, &mut ended);
    if let Some(command) = &args.on_end {
        on_end::tell(command, "sweep", &result, &ended);
    }
    result
}

fn sweep(args: &Args, common: &Common, registries: &Registries, ended: &mut Ended) -> Result<(), Failure> {
    let forms = args.out.iter().map(|path| report::form(path)).collect::<Result<Vec<Form>, _>>()?;
    let recipe = Recipe::load(&args.recipe, &args.set, registries)?;
    let options = Options {
        runs: args.runs.clone(),
        search: common.search(),
        show: common.show(),
        stop: signals::stop_flag(),
        ..Options::default()
    };
    if !common.quiet {
        recipe.warnings().iter().for_each(|warning| eprintln!("{warning}"));
    }
    let devices = devices(args)?;
    let mut sweep = Sweep::open(std::slice::from_ref(&recipe), registries, &options)?;
    if !common.quiet {
        lint::recipes(std::slice::from_ref(&recipe)).iter().for_each(|finding| eprintln!("note: {finding}"));
    }
    let went = go_on(args, common, &mut sweep, &recipe, registries, &devices);
    ended.runs = Some(done(&sweep));
    if !went? {
        return Ok(());
    }
    let cells = sweep.cells();
    show(args, &cells)?;
    if !common.quiet {
        lint::results(&cells).iter().for_each(|finding| eprintln!("note: {finding}"));
    }
    if recipe.confirming().is_empty() {
        return finish(&recipe.name, &sweep, args, &forms);
    }
    // Then what was chosen, on seeds that had no say.
    let Some(chosen) = sweep.confirmation(&recipe) else {
        eprintln!("runs of the sweep have no result yet: nothing is chosen to be confirmed");
        return finish(&recipe.name, &sweep, args, &[]);
    };
    for name in &chosen.without {
        eprintln!("warning: every configuration of {name} diverged: there is nothing to confirm");
    }
    let mut fresh = Sweep::open(&chosen.recipes, registries, &options)?;
    let went = go_on(args, common, &mut fresh, &recipe, registries, &devices);
    ended.runs = Some(done(&fresh));
    if !went? {
        return Ok(());
    }
    if !args.json {
        writeln!(std::io::stdout(), "\nThe best of each optimizer by the validation set, on fresh seeds:\n")?;
    }
    show(args, &fresh.cells())?;
    finish(&recipe.name, &fresh, args, &forms)
}

/// The runs with a result, and all.
fn done(sweep: &Sweep) -> (usize, usize) {
    let all = sweep.runs().len();
    (all - sweep.missing().count(), all)
}

/// Does what is missing, or says what that is. True if there is a table to print.
fn go_on(
    args: &Args,
    common: &Common,
    sweep: &mut Sweep,
    recipe: &Recipe,
    registries: &Registries,
    devices: &[String],
) -> Result<bool, Failure> {
    let (missing, all) = (sweep.missing().count(), sweep.runs().len());
    match args.launcher {
        _ if args.collect => {}
        Launcher::Slurm if missing > 0 || recipe.confirming().is_empty() => {
            return submit(args, common, sweep, recipe, registries).map(|()| false);
        }
        Launcher::Local if args.dry_run && missing > 0 => {
            for run in sweep.missing() {
                writeln!(std::io::stdout(), "{}  {}", run.recipe.directory(), run.label())?;
            }
            return Ok(false);
        }
        Launcher::Local if args.dry_run && recipe.confirming().is_empty() => return Ok(false),
        _ => {}
    }
    if missing == 0 && !common.quiet {
        eprintln!("all {all} runs were done before, nothing to do");
    }
    if missing > 0 && args.collect {
        eprintln!("{missing} of {all} runs have no result yet");
    }
    if missing == 0 || args.collect {
        return Ok(true);
    }
    if !args.alone
        && let Some(why) = sweep.unshared()?
    {
        return Err(Failure::other(format!(
            "error: {}: {why}: a sweep on another machine could train the same run at the same time. Mount it with locks that all \
             machines share (NFS: version 4, or lockd; Lustre: -o flock), or say --alone if no other sweep works in this folder",
            args.runs.display()
        )));
    }
    let processes = Processes {
        jobs: args.jobs.map_or(1, usize::from),
        threads: common.threads.unwrap_or_else(cores),
        program: program()?,
        args: run_args(common),
        devices: devices.to_vec(),
    };
    if sweep.run(registries, &Workers::Processes(processes))? == SweepEnded::Interrupted {
        let missing = sweep.missing().count();
        let message = format!("stopped with {missing} of {all} runs to do; the same command goes on");
        return Err(Failure { message, code: 130 });
    }
    Ok(true)
}

fn show(args: &Args, cells: &[Cell]) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    match args.json {
        true => cells.iter().try_for_each(|cell| writeln!(out, "{}", serde_json::json!(cell)))?,
        false => write!(out, "{}", table(cells))?,
    }
    Ok(())
}

/// Writes the reports, and fails if a run has.
fn finish(name: &str, sweep: &Sweep, args: &Args, forms: &[Form]) -> Result<(), Failure> {
    if !forms.is_empty() {
        // A run that failed at its start has left nothing.
        let folders = sweep.runs().iter().map(|run| &run.folder);
        let folders: Vec<PathBuf> =
            folders.filter(|folder| folder.join("recipe.yaml").is_file()).cloned().collect();
        let runs = load(&folders).map_err(|e| Failure::other(format!("error: {e}")))?;
        runs.problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
        let document = document(name, &runs);
        for (path, form) in args.out.iter().zip(forms) {
            report::write(&document, *form, Some(path))?;
        }
    }
    let failed: Vec<String> = sweep
        .runs()
        .iter()
        .filter_map(|run| match &run.state {
            State::Failed(message) => Some(format!("{}: {message}", run.label())),
            _ => None,
        })
        .collect();
    match failed.len() {
        0 => Ok(()),
        n => Err(Failure::other(format!(
            "error: {n} of {} runs failed\n{}",
            sweep.runs().len(),
            failed.join("\n")
        ))),
    }
}

/// The array job: printed with `--print`, else submitted.
fn submit(
    args: &Args,
    common: &Common,
    sweep: &Sweep,
    recipe: &Recipe,
    registries: &Registries,
) -> Result<(), Failure> {
    let (missing, all) = (sweep.missing().count(), sweep.runs().len());
    if missing == 0 {
        eprintln!("all {all} runs were done before, nothing to submit");
        return Ok(());
    }
    let cluster = recipe.cluster.clone();
    let ranks = cluster.ranks.map_or(1, |ranks| usize::try_from(ranks).unwrap_or(usize::MAX));
    sweep.missing().try_for_each(|run| check_ranks(&run.recipe, ranks))?;
    if ranks > 1 && !cfg!(feature = "mpi") && !args.dry_run {
        let message = format!(
            "the processes of a run that srun starts talk over MPI, and this taper was built without it: build it with \
             {}, or submit with 1 in place of {ranks}",
            taper_files::built_with("mpi")
        );
        return Err(recipe.error_at("cluster.ranks", message).into());
    }
    let job = slurm::Job {
        name: recipe.name.clone(),
        program: program()?,
        cpus: common
            .threads
            .unwrap_or(cluster.cpus.map_or(4, |cpus| usize::try_from(cpus).unwrap_or(usize::MAX))),
        jobs: args.jobs.map(usize::from),
        args: run_args(common),
        cluster,
    };
    let failed = |e: SlurmError| match e {
        SlurmError::Run(e) => e.into(),
        // Shown at its key.
        SlurmError::Refused { program, said }
            if said.contains("partition") && recipe.cluster.partition.is_some() =>
        {
            recipe.error_at("cluster.partition", format!("{program} refused: {said}")).into()
        }
        e => Failure::other(format!("error: {e}")),
    };
    if args.dry_run {
        write!(std::io::stdout(), "{}", slurm::script(sweep, &job).map_err(failed)?)?;
        return Ok(());
    }
    let slurm::Submission { job, submitted, queued } =
        slurm::submit(sweep, &job, registries).map_err(failed)?;
    let before = format!("{} of {all} runs were done before, {queued} are in the queue", all - missing);
    match job {
        None => eprintln!("nothing to submit: {before}"),
        Some(job) => {
            writeln!(std::io::stdout(), "{job}")?;
            eprintln!(
                "job {job} has {submitted} tasks; {before}. The same sweep with --collect prints the table at any time"
            );
        }
    }
    Ok(())
}

/// The GPUs of each job: those that this process may see, in order.
fn devices(args: &Args) -> Result<Vec<String>, Failure> {
    let Some(each) = args.gpus_per_job.map(usize::from) else { return Ok(Vec::new()) };
    let jobs = args.jobs.map_or(1, usize::from);
    let seen = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let seen: Vec<String> = match &seen {
        Some(list) => list.split(',').map(str::trim).filter(|id| !id.is_empty()).map(str::to_owned).collect(),
        None => (0..jobs * each).map(|id| id.to_string()).collect(),
    };
    if seen.len() < jobs * each {
        return Err(Failure::usage(format!(
            "error: --jobs {jobs} with --gpus-per-job {each} takes {} GPUs, and CUDA_VISIBLE_DEVICES names {}",
            jobs * each,
            seen.len()
        )));
    }
    Ok(seen.chunks(each).take(jobs).map(|own| own.join(",")).collect())
}

pub(super) fn program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|e| Failure::other(format!("error: the path of this program: {e}")))
}

pub(super) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The common options as arguments of a run.
pub(super) fn run_args(common: &Common) -> Vec<OsString> {
    let mut args: Vec<OsString> = Vec::new();
    if let Some(data) = &common.data {
        args.extend(["--data".into(), std::path::absolute(data).unwrap_or_else(|_| data.clone()).into()]);
    }
    if common.offline {
        args.push("--offline".into());
    }
    if let Some(isa) = common.isa_asked() {
        args.extend(["--isa".into(), isa]);
    }
    args
}
