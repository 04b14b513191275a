//! Sweeps and runs on a real Slurm: its daemons on one node, in a folder of their own, for as long as a test runs.
//!
//! `cargo xtask test` runs it. Where something is missing it says what, and passes, unless `TAPER_REQUIRE_TOOLS=1`.
#![cfg(target_os = "linux")]
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Twelve runs of a few seconds.
const SWEEP: &str = "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16, eval_batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 2000, eval_every: 500, checkpoint: {every_epochs: null, every_steps: 500}}
sweep:
  grid: {optimizer.c: [10, 1, 1e-3, 1e-8]}
  seeds: [1, 2, 3]
cluster:
  partition: local
  cpus: 1
  memory: 100M
  time: 60
  extra: ['--comment=a b; $(touch inside) # c']
";

/// A run that several processes can share.
const SHARED: &str = "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 13, eval_batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 60, shards: 4, log_every: 1, checkpoint: {every_epochs: null, every_steps: 10}}
";

/// What never comes is not waited for.
const PATIENCE: Duration = Duration::from_secs(180);

/// What Slurm on one node needs, and how to get it.
fn missing() -> Option<String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> =
        std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    let there = |program: &&str| !folders.iter().any(|folder| folder.join(program).is_file());
    let programs = ["munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo"];
    let absent: Vec<&str> = programs.into_iter().filter(there).collect();
    // SAFETY: has no conditions.
    let root = unsafe { libc::geteuid() } == 0;
    match (absent.is_empty(), root) {
        (false, _) => Some(format!("{} (Debian: apt-get install slurm-wlm munge)", absent.join(", "))),
        (true, false) => Some("root, which Slurm's daemons run as".to_owned()),
        (true, true) => None,
    }
}

/// Whether a test cannot run here, which it says; `TAPER_REQUIRE_TOOLS` wants it to.
fn skipped(what: &str, missing: Option<String>) -> bool {
    let Some(missing) = missing else { return false };
    let required = std::env::var("TAPER_REQUIRE_TOOLS").is_ok_and(|value| value == "1");
    assert!(!required, "missing: {missing}");
    eprintln!("skipped: no {what} on a real Slurm: missing: {missing}");
    true
}

/// Slurm on one node of four processors, whatever the machine has.
struct Slurm {
    folder: TempDir,
    daemons: Vec<(&'static str, Child)>,
}

impl Slurm {
    fn start() -> Self {
        // The path of a socket must be short.
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let home = folder.path().display().to_string();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        let host = host.trim().split('.').next().unwrap();
        // Both are free when they are asked for.
        let ports = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [controller, node] = ports.map(|port| port.local_addr().unwrap().port());
        let conf = format!(
            "ClusterName=taper
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=local Nodes={host} Default=YES MaxTime=INFINITE State=UP
"
        );
        fs::write(folder.path().join("slurm.conf"), conf).unwrap();
        let key: Vec<u8> = (0..64).map(|i| i * 3 + 1).collect();
        fs::write(folder.path().join("key"), key).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(folder.path().join("key"), mode).unwrap();
        let mut slurm = Self { folder, daemons: Vec::new() };
        let own = |name: &str, file: &str| format!("--{name}={home}/{file}");
        let munge = [
            own("key-file", "key"),
            own("socket", "munge"),
            own("pid-file", "munge.pid"),
            own("log-file", "munge.log"),
            own("seed-file", "munge.seed"),
        ];
        slurm.daemon("munged", &[&["--foreground".into(), "--force".into()], &munge[..]].concat());
        slurm.wait("munged's socket", |slurm| slurm.folder.path().join("munge").exists());
        let conf = format!("{home}/slurm.conf");
        slurm.daemon("slurmctld", &["-D".into(), "-f".into(), conf.clone()]);
        slurm.daemon("slurmd", &["-D".into(), "-f".into(), conf]);
        slurm.wait("an idle node", |slurm| slurm.ask("sinfo", &["-h", "-o", "%T"]).contains("idle"));
        slurm
    }

    fn daemon(&mut self, name: &'static str, args: &[String]) {
        let log = fs::File::create(self.folder.path().join(format!("{name}.out"))).unwrap();
        let mut command = Command::new(name);
        command.args(args).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap()));
        // SAFETY: the one call between fork and exec may be made there.
        unsafe {
            command.pre_exec(|| {
                // However this test ends, no daemon outlives it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        self.daemons.push((name, command.spawn().unwrap()));
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.folder.path().join("slurm.conf")).stdin(Stdio::null());
        command
    }

    fn ask(&self, program: &str, args: &[&str]) -> String {
        let output = self.command(program).args(args).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Waits for something; each look is a process of Slurm's or a file, and what never comes ends the test with the logs.
    fn wait(&mut self, what: &str, mut there: impl FnMut(&Self) -> bool) {
        let begun = Instant::now();
        while !there(self) {
            let dead =
                self.daemons.iter_mut().find_map(|(name, child)| child.try_wait().unwrap().map(|_| *name));
            if dead.is_some() || begun.elapsed() > PATIENCE {
                let log = |(name, _): &(&str, Child)| {
                    let text = fs::read_to_string(self.folder.path().join(format!("{name}.out")));
                    format!("{name}: {}\n", text.unwrap_or_default())
                };
                let logs: String = self.daemons.iter().map(log).collect();
                panic!("{what} did not come ({dead:?} ended)\n{}\n{logs}", self.ask("squeue", &[]));
            }
            std::thread::yield_now();
        }
    }

    /// Waits for the end of all tasks of some jobs: for a job that comes after them.
    fn finish(&self, jobs: &[&str]) {
        let mut last = self.command("timeout");
        last.arg(PATIENCE.as_secs().to_string()).args([
            "sbatch",
            "--wait",
            "--wrap=true",
            "--output=/dev/null",
        ]);
        let status = last.arg(format!("--dependency=afterany:{}", jobs.join(":"))).status().unwrap();
        assert!(status.success(), "{}", self.ask("squeue", &[]));
    }

    /// The tasks in the queue with their states, `3 RUNNING`.
    fn tasks(&self, job: &str) -> Vec<String> {
        let tasks = self.ask("squeue", &["-h", "-r", "-o", "%F %K %T"]);
        let own = |line: &str| line.strip_prefix(job).map(|rest| rest.trim().to_owned());
        tasks.lines().filter_map(own).collect()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        // Tasks are no children of the daemons' and go first; then each daemon after those that need it.
        self.ask("scancel", &["--partition=local", "--full", "--signal=KILL"]);
        self.ask("scancel", &["--partition=local"]);
        let begun = Instant::now();
        while !self.ask("squeue", &["-h"]).is_empty() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        for (_, child) in self.daemons.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The program that is built without MPI.
const PLAIN: &str = env!("CARGO_BIN_EXE_taper");

fn sweep(slurm: &Slurm, home: &Path, runs: &str, args: &[&str]) -> Output {
    sweep_by(PLAIN, slurm, home, runs, args)
}

fn sweep_by(program: &str, slurm: &Slurm, home: &Path, runs: &str, args: &[&str]) -> Output {
    let mut taper = slurm.command(program);
    taper.current_dir(home).args(["sweep", "tiny.yaml", "--runs", runs]).args(args);
    taper.env("TAPER_OFFLINE", "1").output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
#[ignore = "starts Slurm's daemons: a stage of `cargo xtask test`"]
fn an_array_with_killed_and_requeued_tasks_ends_with_the_table_of_a_local_sweep() {
    if skipped("sweep", missing()) {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("tiny.yaml"), SWEEP).unwrap();
    let mut slurm = Slurm::start();

    let refused =
        sweep(&slurm, home.path(), "runs", &["--launcher", "slurm", "--set", "cluster.partition=nope"]);
    let message = said(&refused);
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("sbatch refused") && message.contains("nope"), "{message}");

    let submitted = sweep(&slurm, home.path(), "runs", &["--launcher", "slurm"]);
    assert!(submitted.status.success(), "{}", said(&submitted));
    let job = String::from_utf8(submitted.stdout).unwrap().trim().to_owned();
    assert!(
        slurm.ask("scontrol", &["show", "job", &format!("{job}_1")]).contains("a b; $(touch inside) # c")
    );
    // A second submission finds all of them in the queue.
    let again = sweep(&slurm, home.path(), "runs", &["--launcher", "slurm"]);
    assert!(said(&again).contains("nothing to submit: "), "{}", said(&again));

    // Four that have written a checkpoint: two are killed, one is cancelled, one is asked to make room.
    let script = fs::read_to_string(home.path().join("runs/tiny.sbatch")).unwrap();
    let list: Vec<&str> = script.lines().filter(|line| line.starts_with("tiny-")).collect();
    assert_eq!(list.len(), 12);
    let run = |task: &str| home.path().join("runs").join(list[task.parse::<usize>().unwrap() - 1]);
    let mut begun = Vec::new();
    slurm.wait("four tasks at work", |slurm| {
        let at_work = |task: &String| {
            let task = task.strip_suffix(" RUNNING").map(str::trim)?;
            let run = run(task);
            let name = fs::read_to_string(run.join(".lock")).ok()?;
            let process: i32 = name.split(' ').nth(1)?.parse().ok()?;
            run.join("checkpoints").is_dir().then(|| (task.to_owned(), process))
        };
        begun = slurm.tasks(&job).iter().filter_map(at_work).collect();
        begun.len() >= 4
    });
    let [first, second, (cancelled, _), (asked, _), ..] = &begun[..] else { panic!("{begun:?}") };
    // It would signal again and again a task that requeues itself while it looks.
    let mut signal = slurm.command("scancel");
    let mut signal = signal.args(["--batch", "--signal=USR1", &format!("{job}_{asked}")]).spawn().unwrap();
    for (_, process) in [first, second] {
        // SAFETY: the process held its run's lock a moment ago. Its script has not yet waited for it, or it ends so.
        unsafe { libc::kill(*process, libc::SIGKILL) };
    }
    slurm.ask("scancel", &[&format!("{job}_{cancelled}")]);
    let ended = [&first.0, &second.0, cancelled];
    let log = home.path().join(format!("runs/tiny-{job}_{asked}.log"));
    let log = || fs::read_to_string(&log).unwrap_or_default();
    slurm.wait("a task that requeues itself", |slurm| {
        let task = slurm.ask("scontrol", &["show", "job", &format!("{job}_{asked}")]);
        task.split_whitespace().any(|word| word.strip_prefix("Restarts=").is_some_and(|times| times != "0"))
    });
    signal.kill().unwrap();
    signal.wait().unwrap();
    slurm.wait("the end of three tasks", |slurm| {
        let tasks = slurm.tasks(&job);
        ended.iter().all(|ended| !tasks.iter().any(|task| task.starts_with(&format!("{ended} "))))
    });
    // Only these three are missing now.
    let more = sweep(&slurm, home.path(), "runs", &["--launcher", "slurm"]);
    assert!(said(&more).contains(" has 3 tasks; "), "{}", said(&more));
    slurm.finish(&[&job, String::from_utf8(more.stdout).unwrap().trim()]);
    assert!(log().contains("interrupted at step"), "{}", log());

    let table = sweep(&slurm, home.path(), "runs", &["--collect"]);
    let local = sweep(&slurm, home.path(), "local", &["--jobs", "2"]);
    assert!(local.status.success(), "{}", said(&local));
    assert_eq!(String::from_utf8(table.stdout).unwrap(), String::from_utf8(local.stdout).unwrap());
    assert!(!home.path().join("inside").exists() && !home.path().join("runs/inside").exists());
}

/// The process that is one rank of the run in a folder, once it is at work there.
fn rank_of(rank: &str, runs: &str) -> Option<i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.into_iter().find_map(|entry| {
        let holds = |file: &str, wanted: &str| {
            let words = fs::read(entry.path().join(file)).unwrap_or_default();
            words.split(|byte| *byte == 0).any(|word| word == wanted.as_bytes())
        };
        // Of these srun itself has no number.
        let found = holds("environ", &format!("SLURM_PROCID={rank}")) && holds("cmdline", runs);
        let program = fs::read_link(entry.path().join("exe")).ok()?;
        (found && program.ends_with("taper")).then(|| entry.file_name().to_str()?.parse().ok()).flatten()
    })
}

fn kill(process: i32) {
    // SAFETY: it was found at work a moment ago, and srun has not yet waited for it, or it ends so.
    unsafe { libc::kill(process, libc::SIGKILL) };
}

#[test]
#[ignore = "starts Slurm's daemons: a stage of `cargo xtask test`"]
fn processes_that_srun_starts_train_the_bytes_of_one() {
    let with_mpi = std::env::var("TAPER_WITH_MPI").ok();
    let absent = "a taper with MPI named by TAPER_WITH_MPI, as `cargo xtask test` builds it where MPI is";
    if skipped("run by srun", missing().or(with_mpi.is_none().then(|| absent.to_owned()))) {
        return;
    }
    let (with_mpi, home) = (with_mpi.unwrap(), tempfile::tempdir().unwrap());
    fs::write(home.path().join("shared.yaml"), SHARED).unwrap();
    fs::write(home.path().join("tiny.yaml"), SWEEP).unwrap();
    let mut slurm = Slurm::start();
    let place = |runs: &str| home.path().join(runs).to_str().unwrap().to_owned();
    let train = |command: &mut Command, runs: &str| -> Child {
        command.args(["train", "shared.yaml", "--quiet", "--runs", &place(runs)]).current_dir(home.path());
        command.env("TAPER_OFFLINE", "1").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let by_srun = |program: &str, runs: &str, mpi: &[&str]| {
        let mut srun = slurm.command("srun");
        train(srun.args(mpi).args(["--ntasks=2", "--kill-on-bad-exit=1", program]), runs)
    };
    let file = |runs: &str, name: &str| {
        let folder =
            fs::read_dir(home.path().join(runs)).ok()?.flatten().find(|entry| entry.path().is_dir())?;
        fs::read(folder.path().join(name)).ok()
    };
    // A summary vouches for all that a run promises.
    let ends_alike = |child: Child, runs: &str| {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", said(&output));
        assert!(file(runs, "summary.json") == file("alone", "summary.json"), "{runs} has other bytes");
    };
    ends_alike(train(&mut Command::new(PLAIN), "alone"), "alone");
    ends_alike(by_srun(&with_mpi, "two", &["--mpi=pmix"]), "two");

    // A launcher that this MPI does not know starts processes that know nothing of each other.
    for (program, reason) in [(PLAIN, "--features mpi"), (&with_mpi, "srun --mpi=pmix with Open MPI")] {
        let output = by_srun(program, "none", &["--mpi=none"]).wait_with_output().unwrap();
        assert!(!output.status.success() && said(&output).contains(reason), "{}", said(&output));
        assert!(file("none", "recipe.yaml").is_none(), "each trained by itself");
    }

    let killed = by_srun(&with_mpi, "killed", &["--mpi=pmix"]);
    slurm.wait("two processes at work", |_| {
        let lines = file("killed", "metrics.jsonl").unwrap_or_default();
        lines.iter().filter(|byte| **byte == b'\n').count() > 20
    });
    kill(rank_of("1", &place("killed")).expect("the second process"));
    let output = killed.wait_with_output().unwrap();
    assert!(!output.status.success() && said(&output).contains("task 1: Killed"), "{}", said(&output));
    ends_alike(train(&mut Command::new(PLAIN), "killed"), "killed");

    // An array whose tasks are of two processes each: one of one task is killed, another task is asked to make room.
    let runs = place("runs");
    let set = ["train.shards=4", "train.epochs=400", "train.eval_every=100", "sweep.seeds=[1]"];
    let set: Vec<&str> = set.iter().flat_map(|set| ["--set", set]).collect();
    let submit = |slurm: &Slurm| {
        let shared = ["--launcher", "slurm", "--set", "cluster.ranks=2", "--set", "cluster.mpi=pmix"];
        let output = sweep_by(&with_mpi, slurm, home.path(), "runs", &[&shared, &set[..]].concat());
        assert!(output.status.success(), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let job = submit(&slurm);
    let script = fs::read_to_string(home.path().join("runs/tiny.sbatch")).unwrap();
    let list: Vec<&str> = script.lines().filter(|line| line.starts_with("tiny-")).collect();
    let mut victims = Vec::new();
    slurm.wait("two tasks at work", |_| {
        let at_work = |(index, run): (usize, &&str)| {
            let folder = Path::new(&runs).join(run);
            folder.join("checkpoints").is_dir().then_some(())?;
            Some((index + 1, rank_of("1", &format!("{runs}/{run}/recipe.yaml"))?))
        };
        victims = list.iter().enumerate().filter_map(at_work).collect();
        victims.len() >= 2
    });
    let [(lost, process), (asked, _), ..] = victims[..] else { panic!("{victims:?}") };
    let mut signal = slurm.command("scancel");
    let mut signal = signal.args(["--batch", "--signal=USR1", &format!("{job}_{asked}")]).spawn().unwrap();
    kill(process);
    slurm.wait("a task that requeues itself and the end of another", |slurm| {
        let task = slurm.ask("scontrol", &["show", "job", &format!("{job}_{asked}")]);
        let restarts = task.split_whitespace().find_map(|word| word.strip_prefix("Restarts="));
        restarts.is_some_and(|times| times != "0")
            && !slurm.tasks(&job).iter().any(|task| task.starts_with(&format!("{lost} ")))
    });
    signal.kill().unwrap();
    signal.wait().unwrap();
    slurm.finish(&[&job, &submit(&slurm)]);
    let log = fs::read_to_string(home.path().join(format!("runs/tiny-{job}_{asked}.log"))).unwrap();
    assert!(log.contains("interrupted at step"), "{log}");
    let collected = [&["--collect"], &set[..]].concat();
    let table = sweep(&slurm, home.path(), "runs", &collected);
    let local = sweep(&slurm, home.path(), "local", &set);
    assert!(local.status.success(), "{}", said(&local));
    assert_eq!(String::from_utf8(table.stdout).unwrap(), String::from_utf8(local.stdout).unwrap());
}
