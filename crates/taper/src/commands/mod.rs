//! The command line: one file a command.
mod bench;
mod compare;
mod completions;
mod data;
mod eval;
mod explain;
mod export;
mod init;
mod keys;
mod on_end;
mod optimizers;
mod picture;
mod plan;
mod predict;
mod ranks;
mod recipes;
mod replay;
mod report;
mod reproduce;
mod schema;
mod signals;
mod sweep;
mod track;
mod train;
mod trained;
mod verify;
mod watch;

use crate::log;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use taper_data::{DataError, Search};
use taper_kernels::Isa;
use taper_train::Registries;
use taper_train::recipe::RecipeError;
use taper_train::run::{RunError, Show};

/// Trains networks from recipes, to the bit the same every time.
#[derive(Parser)]
#[command(name = "taper", version, arg_required_else_help = true, after_help = VARIABLES)]
struct Args {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    common: Common,
}

const VARIABLES: &str = "\
Variables:
  TAPER__A__B    a setting of a recipe: TAPER__OPTIMIZER__LR=0.1
  TAPER_DATA     where to look for data sets after --data
  TAPER_CACHE    the folder of downloads and digests
  TAPER_OFFLINE  1: never use the network
  TAPER_HOST     the name by which locks know this machine, in place of its own
  TAPER_ISA      what --isa says where it is not given";

/// Options of every command.
#[derive(clap::Args)]
struct Common {
    /// Where to look for data sets first
    #[arg(long, global = true, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Never use the network
    #[arg(long, global = true)]
    offline: bool,
    /// Threads to compute with, at most one a core; results do not depend on it [default: one a core]
    #[arg(long, global = true, value_name = "N")]
    threads: Option<usize>,
    /// Computes as a lesser processor would: amx, avx512, avx2, neon or portable; a run goes on only with the kernels it began
    /// with [default: the best that this one has]
    #[arg(long, global = true, value_name = "NAME")]
    isa: Option<String>,
    /// Show no progress
    #[arg(long, short, global = true)]
    quiet: bool,
    /// Progress as lines, as for a log, also on a terminal
    #[arg(long, global = true)]
    plain: bool,
    /// What to tell: debug says which data, kernels and checkpoints were chosen [default: info, with --quiet warn]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = ["error", "warn", "info", "debug"])]
    log: Option<String>,
}

impl Common {
    fn level(&self) -> tracing::Level {
        let default = if self.quiet { "warn" } else { "info" };
        // The names that clap lets pass are levels.
        self.log.as_deref().unwrap_or(default).parse().unwrap_or(tracing::Level::INFO)
    }

    /// What is shown of progress.
    fn show(&self) -> Show {
        match (self.quiet, self.plain) {
            (true, _) => Show::Quiet,
            (_, true) => Show::Plain,
            _ => Show::Auto,
        }
    }

    /// The instruction set that was asked for, if one was.
    fn isa_asked(&self) -> Option<OsString> {
        self.isa.as_ref().map(OsString::from).or_else(|| std::env::var_os("TAPER_ISA"))
    }

    fn search(&self) -> Search {
        Search::from_env(self.data.clone(), self.offline)
    }
}

#[derive(Subcommand)]
enum Command {
    Train(train::Args),
    Plan(plan::Args),
    Sweep(sweep::Args),
    Init(init::Args),
    Recipes(recipes::Args),
    Keys(keys::Args),
    Schema(schema::Args),
    Optimizers(optimizers::Args),
    Replay(replay::Args),
    Compare(compare::Args),
    Verify(verify::Args),
    Eval(eval::Args),
    Predict(predict::Args),
    Export(export::Args),
    Report(report::Args),
    Explain(explain::Args),
    Watch(watch::Args),
    Track(track::Args),
    Reproduce(reproduce::Args),
    Data(data::Args),
    Bench(bench::Args),
    Completions(completions::Args),
}

impl Command {
    /// Whether it installs a profiler, which then shows events too.
    fn profiles(&self) -> bool {
        match self {
            Self::Train(args) => args.profile.is_some(),
            Self::Bench(args) => args.profile.is_some(),
            _ => false,
        }
    }

    /// Whether another process of the same run says what all of them have to say.
    fn follows(&self) -> bool {
        matches!(self, Self::Train(args) if args.ranks.follow())
    }

    /// The threads that it takes where the user does not say; 0 is one a core.
    fn threads(&self) -> usize {
        match self {
            Self::Train(args) => args.ranks.threads(),
            _ => 0,
        }
    }
}

/// Why a command failed: what to print and the exit code.
struct Failure {
    message: String,
    code: u8,
}

impl Failure {
    /// A bad argument or a bad file.
    fn usage(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 2 }
    }
    fn other(message: impl Into<String>) -> Self {
        Self { message: message.into(), code: 1 }
    }
}

impl From<RunError> for Failure {
    fn from(e: RunError) -> Self {
        let code = e.exit_code();
        match e {
            RunError::Recipe(e) => e.into(),
            e => Self { message: format!("error: {e}"), code },
        }
    }
}

impl From<RecipeError> for Failure {
    fn from(e: RecipeError) -> Self {
        use std::io::IsTerminal;
        Self { message: e.render(std::io::stderr().is_terminal()), code: 2 }
    }
}

impl From<DataError> for Failure {
    fn from(e: DataError) -> Self {
        match e {
            DataError::Io { source, .. } if source.kind() == std::io::ErrorKind::BrokenPipe => source.into(),
            e => Self::usage(format!("error: {e}")),
        }
    }
}

/// Standard output that is closed early (`| head`) is no failure worth a message.
impl From<std::io::Error> for Failure {
    fn from(e: std::io::Error) -> Self {
        match e.kind() {
            std::io::ErrorKind::BrokenPipe => Self::other(""),
            _ => Self::other(format!("error: {e}")),
        }
    }
}

/// A path as the system has it, also where it is no UTF-8: whoever reads it must find it.
fn print_path(path: &std::path::Path) -> std::io::Result<()> {
    let line = [path.as_os_str().as_encoded_bytes(), b"\n"].concat();
    std::io::stdout().write_all(&line)
}

/// Prints a result as text or as one line of JSON.
fn print(result: &(impl std::fmt::Display + serde::Serialize), json: bool) -> Result<(), Failure> {
    let text = if json {
        serde_json::to_string(result).map_err(|e| Failure::other(format!("error: {e}")))? + "\n"
    } else {
        result.to_string()
    };
    Ok(std::io::stdout().write_all(text.as_bytes())?)
}

/// The command under the name that it was started by, in its help and in all examples.
fn named(command: clap::Command, program: &'static str) -> clap::Command {
    fn examples(mut command: clap::Command, program: &str) -> clap::Command {
        if let Some(about) = command.get_long_about().map(|about| about.to_string()) {
            command = command.long_about(about.replace("cargo xtask ", &format!("{program} ")));
        }
        let names: Vec<String> = command.get_subcommands().map(|one| one.get_name().to_owned()).collect();
        names.iter().fold(command, |command, name| command.mut_subcommand(name, |one| examples(one, program)))
    }
    examples(command.bin_name(program), program)
}

/// Does what the command line says, with the names of these registries.
pub fn main(registries: &Registries) -> ExitCode {
    taper_files::set_program(std::env::var("TAPER_STARTED_BY").unwrap_or_else(|_| "taper".into()));
    let matches = named(Args::command(), taper_files::program()).get_matches();
    // What was declared is what was matched.
    let args = Args::from_arg_matches(&matches).unwrap_or_else(|e| e.exit());
    if !args.command.profiles() {
        log::to_stderr(if args.command.follows() { tracing::Level::ERROR } else { args.common.level() });
    }
    // This thread is one of the pool's: a region that it opens costs no hand-over to another thread and back. Nobody else
    // may wait for the pool while this thread waits for them: with one thread there is no other worker.
    let threads = taper_kernels::workers(args.common.threads.unwrap_or(args.command.threads()));
    if let Err(e) = rayon::ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build_global() {
        eprintln!("error: {threads} threads: {e}");
        return ExitCode::FAILURE;
    }
    // A mistake shows before anything is read or written.
    let isa = args.common.isa.as_ref().map_or_else(Isa::detect, |name| Isa::ask_for("--isa", name));
    let isa = match isa {
        Ok(isa) => isa,
        Err(e) => {
            eprintln!("error: {e}");
            return ExitCode::from(2);
        }
    };
    let result = match args.command {
        Command::Train(command) => train::run(&command, &args.common, registries),
        Command::Plan(command) => plan::run(&command, &args.common, registries),
        Command::Sweep(command) => sweep::run(&command, &args.common, registries),
        Command::Init(command) => init::run(&command, registries),
        Command::Recipes(command) => recipes::run(&command, registries),
        Command::Keys(command) => keys::run(&command, registries),
        Command::Schema(_) => schema::run(registries),
        Command::Optimizers(command) => optimizers::run(&command, registries),
        Command::Replay(command) => replay::run(&command, registries),
        Command::Compare(command) => compare::run(&command, registries),
        Command::Verify(command) => verify::run(&command, &args.common, registries),
        Command::Eval(command) => eval::run(&command, &args.common, registries),
        Command::Predict(command) => predict::run(&command, &args.common, registries),
        Command::Export(command) => export::run(&command, &args.common, registries),
        Command::Report(command) => report::run(&command),
        Command::Explain(command) => explain::run(&command),
        Command::Watch(command) => watch::run(&command, &args.common),
        Command::Track(command) => track::run(&command, &args.common),
        Command::Reproduce(command) => reproduce::run(&command, &args.common, registries),
        Command::Data(command) => data::run(&command, &args.common, registries),
        Command::Bench(command) => bench::run(&command, &args.common, isa),
        Command::Completions(command) => completions::run(&command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { message, code }) => {
            if !message.is_empty() {
                eprintln!("{message}");
            }
            // 130 is what stopped at the user's wish; which wish it was is known here.
            ExitCode::from(if code == 130 { signals::exit_code(code) } else { code })
        }
    }
}
