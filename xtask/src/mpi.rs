//! One run by processes that MPI starts: the exchange alone, and a training whose bytes are those of one process.
use super::{cargo, manifest, run, target};
use std::path::Path;
use std::process::{Command, ExitCode, Output, Stdio};

/// A run in shards: batch statistics, mixed pairs, a last batch smaller than the others.
const RECIPE: &str = "
data: {name: synthetic-images, train: 60, test: 16, classes: 4, batch_size: 13, augment: {mixup: 0.2}}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 2, shards: 12, log_every: 1, average: {kind: ema, decay: 0.5}}
";

/// All of it. A `taper` with MPI compiles candle once more: bindgen asks more of the crates they share.
pub fn check() -> ExitCode {
    if with_tools(|| exchange() && training()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The exchange alone, which compiles in a minute.
pub fn stage() -> bool {
    with_tools(exchange)
}

/// True where the work is, and where the tools are missing, which is said; `TAPER_REQUIRE_TOOLS` wants them.
fn with_tools(work: impl FnOnce() -> bool) -> bool {
    let there = |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).status().is_ok();
    if let Some(missing) = ["mpirun", "mpicc"].into_iter().find(|tool| !there(tool)) {
        let required = std::env::var_os("TAPER_REQUIRE_TOOLS").is_some();
        let word = if required { "error" } else { "skipped" };
        eprintln!(
            "{word}: MPI: no {missing}; on Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev"
        );
        return !required;
    }
    work()
}

/// `mpirun`, also as root and with more processes than cores.
fn mpirun(ranks: usize, program: &Path) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["-n", &ranks.to_string()]).arg(program);
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command.env("OMPI_MCA_rmaps_base_oversubscribe", "1");
    command.env("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe");
    command
}

fn build(args: &[&str]) -> bool {
    run(Command::new(cargo()).args(["build", "--release"]).args(args).args(manifest()))
}

fn exchange() -> bool {
    let program = target().join("release/examples/exchange");
    let built = build(&["--package", "taper-world", "--features", "mpi", "--example", "exchange"]);
    built
        && [1, 2, 3, 4, 6].into_iter().all(|ranks| run(&mut mpirun(ranks, &program)))
        && ends_with(mpirun(3, &program).arg("hang"), "rank 2: said nothing for 1 s")
}

/// Whether a command fails and says why.
fn ends_with(command: &mut Command, reason: &str) -> bool {
    let Ok(Output { status, stderr, .. }) = command.output() else { return false };
    let said = String::from_utf8_lossy(&stderr);
    let holds = !status.success() && said.contains(reason);
    if !holds {
        eprintln!("error: expected a failure that says `{reason}`, found {status}: {said}");
    }
    holds
}

/// A summary vouches for all that a run promises: where two are equal, so is all else.
fn training() -> bool {
    if !build(&["--workspace", "--bin", "taper", "--features", "taper/mpi"]) {
        return false;
    }
    let (folder, program) = (target().join("mpi-check"), target().join("release/taper"));
    let _ = std::fs::remove_dir_all(&folder);
    let recipe = folder.join("net.yaml");
    if let Err(e) = std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(&recipe, RECIPE)) {
        eprintln!("error: {}: {e}", folder.display());
        return false;
    }
    let summary = |ranks: usize| -> Option<Vec<u8>> {
        let runs = folder.join(ranks.to_string());
        let mut command = if ranks == 1 { Command::new(&program) } else { mpirun(ranks, &program) };
        let command = command.args(["train", "--quiet", "--offline", "--threads", "1"]);
        if !run(command.arg(&recipe).arg("--runs").arg(&runs).stdout(Stdio::null())) {
            return None;
        }
        let trained = std::fs::read_dir(runs).ok()?.flatten().find(|entry| entry.path().is_dir())?;
        std::fs::read(trained.path().join("summary.json")).ok()
    };
    let alone = summary(1);
    let same = alone.is_some() && [2, 3, 4].into_iter().all(|ranks| summary(ranks) == alone);
    match same {
        true => println!("MPI: 2, 3 and 4 processes trained the bytes of one"),
        false => eprintln!("error: processes of MPI trained other bytes than one; see {}", folder.display()),
    }
    same
}
