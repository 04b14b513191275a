//! Sweeps of several machines in one folder. A machine is a process with a name of its own (`TAPER_HOST`).
use super::support::{Place, SWEEP, said, sessions};
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command};
use std::time::{Duration, SystemTime};
use taper_train::sweep::{Processes, Sweep, Workers};
use taper_train::{Recipe, Registries, run};

/// Runs long enough to be met in the middle, with few checkpoints.
const LONG: [&str; 6] = [
    "--set",
    "train.epochs=400",
    "--set",
    "train.eval_every=100",
    "--set",
    "train.checkpoint.every_steps=50",
];

/// Lines of a sweep that is running.
type Lines = std::iter::MapWhile<
    std::io::Lines<BufReader<ChildStderr>>,
    fn(std::io::Result<String>) -> Option<String>,
>;

/// A sweep with its workers; none of them outlives its test.
struct Group(Child);

impl Group {
    fn signal(&self, signal: i32) {
        // SAFETY: the child leads a process group and has not been waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(-(self.0.id() as i32), signal) }, 0);
    }

    /// Kills all its processes, and waits until the worker's lock is given back.
    fn kill(mut self, run: &Path) {
        self.signal(libc::SIGKILL);
        assert_eq!(self.0.wait().unwrap().signal(), Some(libc::SIGKILL));
        File::open(run.join(".lock")).unwrap().lock().unwrap();
    }

    /// What it prints when it succeeds.
    fn table(mut self) -> String {
        let mut table = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut table).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}");
        table
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal(libc::SIGKILL);
            let _ = self.0.wait();
        }
    }
}

/// A sweep on a machine, and what it says about runs.
fn start(place: &Place, host: &str, args: &[&str]) -> (Group, Lines) {
    let mut child = place.taper("sweep", "runs", args).env("TAPER_HOST", host).spawn().unwrap();
    let errors = BufReader::new(child.stderr.take().unwrap());
    (Group(child), errors.lines().map_while(Result::ok as fn(std::io::Result<String>) -> Option<String>))
}

/// Makes a lock file's heartbeat three minutes old.
fn age(run: &Path) {
    let file = File::options().write(true).open(run.join(".lock")).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(180)).unwrap();
}

/// The run that somebody is at work on.
fn held(place: &Place) -> PathBuf {
    let named = |run: &PathBuf| std::fs::read_to_string(run.join(".lock")).is_ok_and(|name| !name.is_empty());
    let mut held: Vec<PathBuf> = place.runs("runs").into_iter().filter(named).collect();
    assert_eq!(held.len(), 1, "{held:?}");
    held.remove(0)
}

/// Starts a sweep and stops all its processes in the middle of its first run.
fn stopped(place: &Place, host: &str) -> Group {
    let (group, mut lines) = start(place, host, &[&LONG[..], &["--jobs", "1"]].concat());
    assert!(lines.any(|line| line.ends_with(": started")));
    let at_work = || {
        let begun = |run: &PathBuf| run.join("checkpoints").is_dir();
        place.runs("runs").iter().any(begun)
    };
    while !at_work() {
        std::thread::yield_now();
    }
    group.signal(libc::SIGSTOP);
    // Whoever reads its lines would wait for it.
    std::thread::spawn(move || lines.for_each(drop));
    group
}

#[test]
fn two_machines_share_a_sweep_and_neither_waits_while_a_run_is_free() {
    let place = Place::new(SWEEP);
    let args = [&LONG[..], &["--jobs", "1"]].concat();
    let alone = place.table("alone", &args);
    // The first stands still in a run: all others are the second's, which comes back to that one at the end.
    let first = stopped(&place, "first");
    let (second, mut lines) = start(&place, "second", &args);
    let later = lines.by_ref().find(|line| !line.starts_with("note:")).unwrap();
    assert!(later.contains("on first") && later.ends_with("is at work on it: later"), "{later}");
    assert!(lines.by_ref().any(|line| line.starts_with("[11/12]")), "eleven runs were free");
    first.signal(libc::SIGCONT);
    lines.for_each(drop);
    assert_eq!(first.table(), alone);
    assert_eq!(second.table(), alone);
    assert_eq!(place.runs("runs").len(), 12);
    for run in place.runs("runs") {
        assert_eq!(sessions(&run), 1, "{}: trained twice", run.display());
    }
}

#[test]
fn a_killed_holder_is_taken_over_at_once_by_its_machine_and_by_others_when_its_heartbeat_is_old() {
    for (host, old) in [("first", false), ("second", true)] {
        let place = Place::new(SWEEP);
        let first = stopped(&place, "first");
        let run = held(&place);
        first.kill(&run);
        let train = || {
            let mut taper = Command::new(env!("CARGO_BIN_EXE_taper"));
            taper.arg("train").arg(run.join("recipe.yaml")).args(["--resolved", "--runs"]);
            taper.arg(place.path("runs")).env("TAPER_OFFLINE", "1").env("TAPER_HOST", host).output().unwrap()
        };
        if old {
            // Its machine may be cut off from this one.
            let output = train();
            let message = said(&output);
            assert_eq!(output.status.code(), Some(1), "{message}");
            assert!(message.contains("on first") && message.contains("is at work on this run"), "{message}");
            assert!(message.contains("taken over after 120 s"), "{message}");
            age(&run);
        }
        let output = train();
        let message = said(&output);
        assert!(output.status.success(), "{message}");
        assert!(message.contains("on first is gone") && message.contains("taking its run over"), "{message}");
        assert_eq!(std::fs::read_to_string(run.join(".lock")).unwrap(), "", "it is free");
    }
}

#[test]
fn a_sweep_takes_over_the_run_of_a_machine_that_is_gone() {
    let place = Place::new(SWEEP);
    let args = [&LONG[..], &["--jobs", "2"]].concat();
    let alone = place.table("alone", &args);
    let first = stopped(&place, "first");
    let run = held(&place);
    first.kill(&run);
    let (second, mut lines) = start(&place, "second", &args);
    assert!(lines.by_ref().any(|line| line.ends_with("is at work on it: later")), "it may be alive");
    // When it has done all that is free it looks at what is left now and then.
    assert!(lines.by_ref().any(|line| line.starts_with("[11/12]")));
    age(&run);
    assert!(lines.by_ref().any(|line| line.contains("on first is gone")), "it is said aloud");
    lines.for_each(drop);
    assert_eq!(second.table(), alone);
}

#[test]
fn a_table_can_be_had_at_any_time() {
    let place = Place::new(SWEEP);
    let empty = place.sweep("runs", &["--collect"]);
    assert!(empty.status.success() && said(&empty).contains("12 of 12 runs have no result yet"));
    assert!(place.runs("runs").is_empty(), "nothing was started");
    let seeds = ["--set", "sweep.seeds=[2]"];
    let some = place.table("runs", &seeds);
    assert_eq!(place.table("runs", &[&seeds[..], &["--collect"]].concat()), some);
    let part = place.sweep("runs", &["--collect"]);
    assert!(said(&part).contains("8 of 12 runs have no result yet"), "{}", said(&part));
    assert_eq!(String::from_utf8(part.stdout).unwrap().matches(" 1/3 ").count(), 4);
    assert_eq!(place.runs("runs").len(), 4);
}

#[test]
fn every_job_has_its_own_devices() {
    let place = Place::new(SWEEP);
    let seen = place.path("seen");
    std::fs::create_dir(&seen).unwrap();
    // A worker that takes its devices, and says so if another has them.
    let worker = place.path("worker.sh");
    let text = format!(
        "#!/bin/sh\ncd '{}'\nmkdir \"at-$CUDA_VISIBLE_DEVICES\" || touch twice\ntouch \"$CUDA_VISIBLE_DEVICES\"\n\
         rmdir \"at-$CUDA_VISIBLE_DEVICES\"\nexit 1\n",
        seen.display()
    );
    std::fs::write(&worker, text).unwrap();
    std::fs::set_permissions(&worker, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let registries = Registries::default();
    let recipe = Recipe::load(&place.recipe, &[], &registries).unwrap();
    let options =
        run::Options { runs: place.path("runs"), show: run::Show::Quiet, ..run::Options::default() };
    let mut sweep = Sweep::open(&[recipe], &registries, &options).unwrap();
    let devices = vec!["4,5".to_owned(), "6,7".to_owned()];
    let processes = Processes { jobs: 2, threads: 2, program: worker, args: Vec::new(), devices };
    sweep.run(&registries, &Workers::Processes(processes)).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(&seen).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["4,5", "6,7"]);

    let few = |list: &str| {
        let mut sweep = place.taper("sweep", "few", &["--jobs", "2", "--gpus-per-job", "2", "--dry-run"]);
        sweep.env("CUDA_VISIBLE_DEVICES", list).output().unwrap()
    };
    assert_eq!(few("4,5,6,7").status.code(), Some(0));
    let output = few("4,5,6");
    assert_eq!(output.status.code(), Some(2));
    assert!(said(&output).contains("takes 4 GPUs, and CUDA_VISIBLE_DEVICES names 3"), "{}", said(&output));
}
