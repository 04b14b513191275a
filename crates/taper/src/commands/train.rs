use super::on_end::{self, Ended};
use super::ranks::Ranks;
use super::{Common, Failure, picture, print_path, signals};
use crate::bench;
use crate::profile::Profile;
use std::collections::BTreeSet;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use taper_figures::table::Table;
use taper_train::run::{self, Options, Outcome, RunError, Show, Status, Watch};
use taper_train::sweep::BUSY;
use taper_train::{Recipe, Registries};
use taper_watch::tui;

/// Trains recipes; goes on by itself where a run was interrupted
///
/// The run's folder is printed last on standard output.
///
///   cargo xtask train recipes/quickstart.yaml
///   cargo xtask train recipes/mnist/mlp-decgd.yaml --set optimizer.lr=0.02 --set train.epochs=5
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Recipe files
    #[arg(required = true, value_name = "RECIPE")]
    recipes: Vec<PathBuf>,
    /// Overrides a setting, for example --set optimizer.lr=0.1
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The folder of all runs
    #[arg(long, value_name = "DIR", default_value = "runs")]
    runs: PathBuf,
    /// Shows where the time went, op by op, and writes a trace for chrome://tracing
    #[arg(long, value_name = "TRACE", num_args = 0..=1, require_equals = true, default_missing_value = "trace.json")]
    pub(super) profile: Option<PathBuf>,
    /// Begins anew where there is a run already; its folder is kept under another name
    #[arg(long)]
    fresh: bool,
    /// Goes on with other kernels or on another device than the run began with; the result then says that it is mixed
    #[arg(long)]
    allow_mixed: bool,
    /// Prints one JSON object a run in place of its folder: folder, id, seconds and summary
    #[arg(long)]
    json: bool,
    /// Waits where another process is at work on a run, rather than to fail
    #[arg(long)]
    wait: bool,
    /// Runs a command when training has ended, however it did: TAPER_OUTCOME is finished, diverged, interrupted or failed, TAPER_RUN
    /// the run's folder
    #[arg(long, value_name = "COMMAND")]
    on_end: Option<String>,
    /// Curves in this terminal meanwhile
    #[arg(long)]
    tui: bool,
    #[command(flatten)]
    pub(super) ranks: Ranks,
    /// Works for a sweep: steps as JSON on standard output, stops when standard input ends
    #[arg(long, hide = true)]
    worker: bool,
    /// The recipes are complete, as a sweep wrote them: the environment has no say
    #[arg(long, hide = true)]
    resolved: bool,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let mut ended = Ended::default();
    let result = train(args, common, registries, &mut ended);
    // Of processes that share a run, the first speaks.
    if let Some(command) = args.on_end.as_deref().filter(|_| !args.ranks.follow()) {
        on_end::tell(command, "train", &result, &ended);
    }
    result
}

fn train(args: &Args, common: &Common, registries: &Registries, last: &mut Ended) -> Result<(), Failure> {
    // All recipes are read before the first is trained: a mistake in the last shows at once.
    let load = |path: &PathBuf| match args.resolved {
        true => resolved(path, &args.set, registries),
        false => Ok(Recipe::load(path, &args.set, registries)?),
    };
    let recipes = args.recipes.iter().map(load).collect::<Result<Vec<_>, _>>()?;
    for run in recipes.iter().flat_map(Recipe::runs) {
        run::check_ranks(run, args.ranks.count())?;
    }
    if args.tui && common.show() != Show::Auto {
        return Err(Failure::usage("error: --tui shows curves: leave out --quiet and --plain"));
    }
    let team = args.ranks.start(args.worker)?;
    let speaks = team.world.is_first() && !common.quiet && !args.worker && !args.tui;
    let screen = match args.tui && team.world.is_first() {
        true => Some(Screen::open(
            recipes.iter().flat_map(Recipe::runs).map(|run| args.runs.join(run.directory())).collect(),
        )?),
        false => None,
    };
    let options = Options {
        runs: args.runs.clone(),
        search: common.search(),
        show: if speaks { common.show() } else { Show::Quiet },
        stop: signals::stop_flag(),
        wait: args.wait,
        fresh: args.fresh,
        allow_mixed: args.allow_mixed,
        watch: if args.worker { tell_steps() } else { Watch::default() },
        world: team.world.clone(),
    };
    if args.worker {
        stop_with_input(options.stop.clone());
    }
    let profile = args
        .profile
        .as_deref()
        .filter(|_| team.world.is_first())
        .map(|trace| Profile::install(Some(trace), common.level()));
    let profile = profile.transpose().map_err(|e| Failure::other(format!("error: {e}")))?;
    if speaks {
        recipes.iter().flat_map(Recipe::warnings).for_each(|warning| eprintln!("{warning}"));
    }
    // Who no longer reads the folders' names ends no training.
    let mut printed = Ok(());
    for (recipe, path) in recipes.iter().zip(&args.recipes) {
        let mut outcomes = Vec::new();
        for (one, label) in recipe.runs().iter().zip(labels(recipe.runs())) {
            last.run = Some((one.name.clone(), options.runs.join(one.directory())));
            let ended = run::run(one, registries, &options).map_err(|e| match &e {
                RunError::Busy { .. } if args.worker => Failure { message: e.to_string(), code: BUSY },
                _ => team.failure(e),
            });
            outcomes.push((label, ended?));
        }
        if !team.world.is_first() {
            continue;
        }
        if recipes.last().is_some_and(|last| std::ptr::eq(last, recipe))
            && let Some(screen) = &screen
        {
            screen.close();
        }
        report(path, &outcomes, args, speaks || args.tui)?;
        for (one, (_, outcome)) in recipe.runs().iter().zip(&outcomes) {
            printed = printed.and(match args.json {
                true => print_json(one, outcome),
                false => print_path(&outcome.folder),
            });
        }
    }
    if let (Some(profile), Some(trace)) = (profile, &args.profile) {
        eprintln!("\n{}trace: {}", profile.table_beside(bench::peak)?, trace.display());
    }
    match printed {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(()),
    }
}

/// The view of a training in its own terminal: it reads the runs' folders, as any other would.
struct Screen {
    end: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Screen {
    fn open(runs: Vec<PathBuf>) -> Result<Self, Failure> {
        if !std::io::stdout().is_terminal() {
            return Err(Failure::usage("error: --tui: standard output is no terminal: leave it out"));
        }
        let end: Arc<AtomicBool> = Arc::default();
        let ended = end.clone();
        let thread = std::thread::Builder::new().name("view".into()).spawn(move || {
            // A view that fails ends; the training does not.
            if let Err(e) = tui::show(&runs, &ended, true) {
                run::print(&format!("warning: --tui: {e}"));
            }
        });
        let thread = thread.map_err(|e| Failure::other(format!("error: --tui: {e}")))?;
        Ok(Self { end, thread: Mutex::new(Some(thread)) })
    }

    /// Gives the terminal back.
    fn close(&self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.close();
    }
}

/// What a run came to, as one line.
fn print_json(recipe: &Recipe, outcome: &Outcome) -> std::io::Result<()> {
    let line = serde_json::json!({
        "folder": outcome.folder.to_string_lossy(),
        "id": recipe.id(),
        "settings": recipe.varied().iter().cloned().collect::<serde_json::Map<_, _>>(),
        "seconds": outcome.seconds,
        "summary": outcome.summary,
    });
    writeln!(std::io::stdout(), "{line}")
}

/// A recipe that a sweep resolved: what the environment said then is in it, and what it says now is not asked.
fn resolved(path: &Path, set: &[String], registries: &Registries) -> Result<Recipe, Failure> {
    let label = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| Failure::usage(format!("error: {label}: {e}")))?;
    Ok(Recipe::parse(&label, &text, set, registries)?)
}

/// Steps as lines of JSON on standard output, as often as a person could follow.
fn tell_steps() -> Watch {
    const EVERY: Duration = Duration::from_millis(100);
    let told: Mutex<Option<Instant>> = Mutex::new(None);
    Watch::new(move |tick| {
        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
        if tick.step == tick.steps || told.is_none_or(|told| told.elapsed() >= EVERY) {
            *told = Some(Instant::now());
            // A sweep that no longer listens has closed the input too, which ends the run.
            let _ = writeln!(std::io::stdout(), "{}", serde_json::json!(tick));
        }
    })
}

/// Sets `stop` at the end of standard input: when the sweep says so, and when it dies.
fn stop_with_input(stop: Arc<AtomicBool>) {
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        stop.store(true, Ordering::Relaxed);
    });
}

/// What tells the runs of a sweep apart: the optimizer, and as much of what the sweep varied as it takes.
fn labels(runs: &[Recipe]) -> Vec<String> {
    let keys = runs.iter().flat_map(|run| run.varied().iter().map(|(key, _)| key)).collect::<BTreeSet<_>>();
    let value =
        |run: &Recipe, key: &str| run.varied().iter().find(|(k, _)| k == key).map(|(_, v)| v.to_string());
    let varies = |key: &str| runs.iter().any(|run| value(run, key) != value(&runs[0], key));
    let keys: Vec<_> =
        keys.into_iter().filter(|k| !["name", "optimizer.name"].contains(&k.as_str())).collect();
    let names: BTreeSet<_> = runs.iter().map(|run| &run.optimizer.name).collect();
    let label = |run: &Recipe| {
        let mut label = run.optimizer.name.clone();
        if names.len() < runs.len() {
            for key in keys.iter().filter(|key| varies(key)) {
                let short = key.strip_prefix("optimizer.").unwrap_or(key);
                label += &value(run, key).map_or(String::new(), |v| format!(" {short}={v}"));
            }
        }
        label
    };
    runs.iter().map(label).collect()
}

/// A table and a picture of several runs; one run alone gets its picture in its own folder.
fn report(recipe: &Path, outcomes: &[(String, Outcome)], args: &Args, speaks: bool) -> Result<(), Failure> {
    let picture = match outcomes {
        [(_, outcome)] => outcome.folder.join("curves.svg"),
        _ => {
            let stem = recipe.file_stem().unwrap_or_default().to_string_lossy();
            args.runs.join(format!("{stem}-curves.svg"))
        }
    };
    let runs: Vec<(String, &Outcome)> =
        outcomes.iter().map(|(label, outcome)| (label.clone(), outcome)).collect();
    // A picture can be drawn again; the runs are done.
    let drawn = picture::curves(&runs, &picture).map_err(|e| eprintln!("warning: no picture: {e}")).is_ok();
    if !speaks {
        return Ok(());
    }
    let metric = &outcomes.first().map_or("accuracy", |(_, o)| o.summary.metric.as_str()).to_owned();
    let unit = if picture::by_steps(outcomes.iter().map(|(_, o)| o)) { "step" } else { "epoch" };
    let mut table = Table::new([
        "optimizer".to_owned(),
        format!("best test {metric}"),
        format!("at {unit}"),
        format!("last test {metric}"),
        format!("{unit}s/s"),
    ]);
    let value = |v: f64| match metric.as_str() {
        "accuracy" => format!("{:.2} %", 100.0 * v),
        "loss" => format!("{v:.3e}"),
        _ => format!("{v:.4}"),
    };
    for (label, outcome) in outcomes {
        let summary = &outcome.summary;
        let key = format!("test.{metric}");
        let best = summary.best.get(&key);
        let seconds = outcome.seconds.max(1e-9);
        let label = match summary.status {
            Status::Diverged => format!("{label} (diverged)"),
            Status::Interrupted => format!("{label} (interrupted)"),
            Status::Finished => label.clone(),
        };
        table.row([
            label,
            best.map_or("-".into(), |b| value(b.value)),
            best.map_or("-".into(), |b| if unit == "step" { b.step } else { b.epoch }.to_string()),
            summary.last.get(&key).map_or("-".into(), |v| value(*v)),
            format!("{:.2}", if unit == "step" { summary.steps } else { summary.epochs } as f64 / seconds),
        ]);
    }
    eprintln!("\n{}", table.markdown().trim_end());
    if outcomes.iter().any(|(_, o)| o.summary.select == "test") {
        eprintln!("The best epoch was chosen on the test set, as in the paper: an optimistic figure.");
    }
    let mut remarks: Vec<String> = outcomes.iter().flat_map(|(_, o)| o.data.remarks()).collect();
    remarks.dedup();
    remarks.extend(outcomes.iter().filter(|(_, o)| !o.summary.mixed.is_empty()).map(|(label, o)| {
        format!(
            "{label} is mixed: trained on {}. Nobody can repeat it to the bit.",
            o.summary.mixed.join(", then ")
        )
    }));
    remarks.iter().for_each(|remark| eprintln!("{remark}"));
    if drawn {
        eprintln!("curves: {}", picture.display());
    }
    Ok(())
}
