//! One run by processes that MPI starts: the exchange alone, and trainings whose bytes are those of one process, whoever is
//! killed, hangs or differs.
use super::{cargo, manifest, run, target};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A run in shards: batch statistics, mixed pairs, a last batch smaller than the others.
const RECIPE: &str = "
data: {name: synthetic-images, train: 60, test: 16, classes: 4, batch_size: 13, augment: {mixup: 0.2}}
model: {name: resnet, num_blocks: [1], widths: [8]}
optimizer: {name: decgd, lr: 0.01}
train:
  epochs: 12
  shards: 12
  log_every: 1
  average: {kind: ema, decay: 0.5}
  checkpoint: {every_epochs: null, every_steps: 4}
";

/// A stage of the tests. True also where the tools are missing, which is said; `TAPER_REQUIRE_TOOLS` wants them.
pub fn check() -> bool {
    let _ = fs::remove_dir_all(folder());
    let Some(missing) = missing() else { return exchange() && training() };
    let required = std::env::var_os("TAPER_REQUIRE_TOOLS").is_some();
    let word = if required { "error" } else { "skipped" };
    eprintln!(
        "{word}: MPI: no {missing}; on Debian: apt-get install libopenmpi-dev openmpi-bin libclang-dev"
    );
    !required
}

/// The `taper` with MPI that was checked; not there without the tools.
pub fn program() -> PathBuf {
    folder().join("taper")
}

fn folder() -> PathBuf {
    target().join("mpi-check")
}

/// What cannot be done without.
fn missing() -> Option<&'static str> {
    let there = |tool: &&str| {
        let mut version = Command::new(tool);
        version
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|s| s.success())
    };
    // bindgen looks into more places than these; where it must, a variable says so.
    let libclang = || {
        let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
        let own = |entry: fs::DirEntry| entry.path().join("lib/libclang.so.1").exists();
        std::env::var_os("LIBCLANG_PATH").is_some() || there(&"llvm-config") || folders.into_iter().any(own)
    };
    let tool = ["mpirun", "mpicc"].into_iter().find(|tool| !there(tool));
    tool.or((!libclang()).then_some("libclang"))
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
    command.output().is_ok_and(|output| failed_with(&output, reason))
}

fn failed_with(Output { status, stderr, .. }: &Output, reason: &str) -> bool {
    let said = String::from_utf8_lossy(stderr);
    let holds = !status.success() && said.contains(reason);
    if !holds {
        eprintln!("error: expected a failure that says `{reason}`, found {status}: {said}");
    }
    holds
}

fn training() -> bool {
    if !build(&["--workspace", "--bin", "taper", "--features", "taper/mpi"]) {
        return false;
    }
    let trials = Trials { recipe: folder().join("net.yaml"), program: program(), folder: folder() };
    let made = fs::create_dir_all(&trials.folder)
        .and_then(|()| fs::write(&trials.recipe, RECIPE))
        // Another build takes its place there.
        .and_then(|()| fs::copy(target().join("release/taper"), &trials.program));
    match made {
        Ok(_) => trials.pass(),
        Err(e) => {
            eprintln!("error: {}: {e}", trials.folder.display());
            false
        }
    }
}

/// Trainings of one recipe, each in a folder of its own.
struct Trials {
    folder: PathBuf,
    recipe: PathBuf,
    program: PathBuf,
}

impl Trials {
    fn pass(&self) -> bool {
        let Some(alone) = self.summary("1", 1) else { return false };
        let same = |name: &str, ranks| self.summary(name, ranks).is_some_and(|found| found == alone);
        let checks: [(&str, &dyn Fn() -> bool); 5] = [
            ("2, 3 and 4 processes trained the bytes of one", &|| {
                [2, 3, 4].into_iter().all(|ranks| same(&ranks.to_string(), ranks))
            }),
            ("a rank with other kernels was named", &|| {
                let mut command = mpirun(1, &self.program);
                self.arguments(&mut command, "other");
                command.args([":", "-n", "1", "env", "TAPER_ISA=portable"]).arg(&self.program);
                self.arguments(&mut command, "other");
                ends_with(&mut command, "error: rank 1: has another arithmetic: cpu with portable kernels")
            }),
            ("after a rank of 4 was killed, 2 ended with the same bytes", &|| {
                // The launcher ends the others, and says whom it lost.
                self.signalled("killed", 4, "KILL", "process rank 2 with PID") && same("killed", 2)
            }),
            ("after the first of 2 was killed, 3 ended with the same bytes", &|| {
                let mut command = mpirun(2, &self.program);
                command.env("TAPER_KILL_AT", "metrics-half-line:20");
                self.arguments(&mut command, "first");
                ends_with(&mut command, "process rank 0 with PID") && same("first", 3)
            }),
            ("a rank of 3 that hung was named, and 1 ended with the same bytes", &|| {
                self.signalled("hung", 3, "STOP", "error: rank 2: said nothing for 3 s") && same("hung", 1)
            }),
        ];
        checks.iter().all(|(what, check)| {
            let holds = check();
            match holds {
                true => println!("MPI: {what}"),
                false => eprintln!("error: MPI: not so: {what}; see {}", self.folder.display()),
            }
            holds
        })
    }

    fn arguments(&self, command: &mut Command, name: &str) {
        command.args(["train", "--quiet", "--offline", "--threads", "1", "--rank-limit", "3"]);
        command.arg(&self.recipe).arg("--runs").arg(self.folder.join(name));
    }

    fn train(&self, name: &str, ranks: usize) -> Command {
        let mut command = if ranks == 1 { Command::new(&self.program) } else { mpirun(ranks, &self.program) };
        self.arguments(&mut command, name);
        command
    }

    /// A file of the run in a folder.
    fn file(&self, name: &str, file: &str) -> Option<Vec<u8>> {
        let runs = fs::read_dir(self.folder.join(name)).ok()?;
        let run = runs.flatten().find(|entry| entry.path().is_dir())?;
        fs::read(run.path().join(file)).ok()
    }

    /// A summary vouches for all that a run promises: where two are equal, so is all else.
    fn summary(&self, name: &str, ranks: usize) -> Option<Vec<u8>> {
        let ended = run(self.train(name, ranks).stdout(Stdio::null()));
        ended.then(|| self.file(name, "summary.json")).flatten()
    }

    /// Whether the processes end and say `reason` when their third one, in the midst of the run, is sent a signal.
    fn signalled(&self, name: &str, ranks: usize, signal: &str, reason: &str) -> bool {
        let mut command = self.train(name, ranks);
        let launched = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
        let Ok(mut launcher) = launched else { return false };
        let steps = || {
            let metrics = self.file(name, "metrics.jsonl").unwrap_or_default();
            metrics.iter().filter(|byte| **byte == b'\n').count()
        };
        while steps() < 6 && matches!(launcher.try_wait(), Ok(None)) {
            std::thread::yield_now();
        }
        let sent = third_of(launcher.id())
            .is_some_and(|pid| run(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()])));
        launcher.wait_with_output().is_ok_and(|output| sent && failed_with(&output, reason))
    }
}

/// The third of the processes that a launcher started on this machine.
fn third_of(launcher: u32) -> Option<u32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name in parentheses may hold anything; the parent is the second word after it.
        let parent = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()?;
        let variables = fs::read(entry.path().join("environ")).ok()?;
        let third = variables.split(|byte| *byte == 0).any(|one| one == b"OMPI_COMM_WORLD_RANK=2");
        (parent == launcher && third).then(|| entry.file_name().to_str()?.parse().ok()).flatten()
    })
}
