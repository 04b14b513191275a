//! Runs in child processes of the `taper` binary, several at a time.
//!
//! A worker is `taper train RUN/recipe.yaml --worker --resolved`: it trains what the file says, whatever `TAPER__` variables
//! are set, writes a [`Tick`] as a line of JSON on standard output now and
//! then, what it has to say on standard error, and stops with a checkpoint when its standard input ends. The input ends
//! when the sweep asks it to stop, and also when the sweep itself is killed: no worker outlives it for long. One that finds
//! another process at work on its run ends with [`BUSY`]: the run is put off, and another takes the worker's place.
use super::queue::{Next, Queue};
use super::view::View;
use super::{Ended, State, Sweep};
use crate::Registries;
use crate::run::{RunError, Status, Tick, write_recipe};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

/// Child processes that do the runs.
#[derive(Clone, Debug)]
pub struct Processes {
    /// How many at a time.
    pub jobs: usize,
    /// Threads for all of them together, divided between them; at least one each.
    pub threads: usize,
    /// The `taper` binary.
    pub program: PathBuf,
    /// Arguments for every run: where data is (`--data DIR`, `--offline`).
    pub args: Vec<OsString>,
    /// The GPUs of each job, as `CUDA_VISIBLE_DEVICES` has them; jobs beyond these, and all if it is empty, see what the sweep
    /// does.
    pub devices: Vec<String>,
}

/// The exit code of a worker that found another process at work on its run.
pub const BUSY: u8 = 75;

/// What a worker reports.
enum Report {
    Tick(Tick),
    Ended { status: Result<ExitStatus, std::io::Error>, said: String },
}

/// How often the sweep looks whether it should stop.
const LOOK: Duration = Duration::from_millis(100);

pub(super) fn run(
    sweep: &mut Sweep,
    registries: &Registries,
    processes: &Processes,
    view: &mut View,
) -> Result<Ended, RunError> {
    let mut queue = Queue::new(sweep, registries);
    let mut running: BTreeMap<usize, Worker> = BTreeMap::new();
    let (reports, inbox) = mpsc::channel();
    let jobs = processes.jobs.clamp(1, queue.len().max(1));
    let threads = (processes.threads / jobs).max(1);
    loop {
        let stopping = sweep.options.stop.load(Ordering::Relaxed);
        if stopping {
            // The end of its input asks a worker to stop.
            running.values_mut().for_each(|worker| worker.input = None);
        }
        let mut nothing = stopping;
        while !stopping && running.len() < jobs {
            match queue.next(sweep) {
                Next::Start(index) => {
                    // There is one: fewer are running than there are places.
                    let free = |place: &usize| running.values().all(|worker| worker.place != *place);
                    let place = (0..jobs).find(free).unwrap_or_default();
                    match start(sweep, index, registries, processes, (threads, place), &reports) {
                        Ok(input) => {
                            running.insert(index, Worker { input, place });
                            view.started(&sweep.runs[index], index);
                        }
                        Err(message) => {
                            sweep.runs[index].state = State::Failed(message);
                            view.ended(sweep, index);
                        }
                    }
                }
                Next::Done(index) => view.ended(sweep, index),
                Next::Later(index, holder) => {
                    view.line(&format!("{}: {holder} is at work on it: later", sweep.runs[index].label()));
                }
                Next::Wait => break,
                Next::Nothing => {
                    nothing = true;
                    break;
                }
            }
        }
        if running.is_empty() && nothing {
            view.finish();
            return Ok(if stopping { Ended::Interrupted } else { Ended::All });
        }
        let (index, report) = match inbox.recv_timeout(LOOK) {
            Ok(report) => report,
            // `reports` is held here, so that the channel never closes.
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => continue,
        };
        match report {
            Report::Tick(tick) => view.tick(index, tick),
            Report::Ended { status: Ok(status), .. } if status.code() == Some(BUSY.into()) => {
                running.remove(&index);
                queue.put_off(index);
                view.put_off(&sweep.runs[index], index);
            }
            Report::Ended { status, said } => {
                running.remove(&index);
                let warnings = said.clone();
                let message = match status {
                    Ok(status) if said.is_empty() => {
                        format!("the process ended with {status} and said nothing")
                    }
                    Ok(_) => said,
                    Err(e) => format!("the process was lost: {e}"),
                };
                sweep.note(index, message);
                let stopped = sweep.options.stop.load(Ordering::Relaxed);
                if stopped && matches!(sweep.runs[index].state, State::Failed(_)) {
                    // It was asked to stop, or the same interrupt reached it: nothing failed.
                    sweep.runs[index].state = State::Missing;
                }
                let run = &sweep.runs[index];
                if run.summary().is_some_and(|summary| summary.status == Status::Finished) {
                    warnings.lines().for_each(|line| view.line(&format!("{}: {line}", run.label())));
                }
                view.ended(sweep, index);
            }
        }
    }
}

/// A worker that is running.
struct Worker {
    input: Option<ChildStdin>,
    /// Which of the jobs it is.
    place: usize,
}

/// Starts a worker and the threads that listen to it.
fn start(
    sweep: &Sweep,
    index: usize,
    registries: &Registries,
    processes: &Processes,
    (threads, place): (usize, usize),
    reports: &Sender<(usize, Report)>,
) -> Result<Option<ChildStdin>, String> {
    let run = &sweep.runs[index];
    write_recipe(&run.recipe, registries, &run.folder).map_err(|e| e.to_string())?;
    let mut command = Command::new(&processes.program);
    command.arg("train").arg(run.folder.join("recipe.yaml")).arg("--runs").arg(&sweep.options.runs);
    command.args(["--worker", "--resolved"]).args(["--threads", &threads.to_string()]).args(&processes.args);
    if let Some(devices) = processes.devices.get(place) {
        command.env("CUDA_VISIBLE_DEVICES", devices);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("{}: {e}", processes.program.display()))?;

    let (input, output, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let ticks = reports.clone();
    let listen = thread::spawn(move || {
        for line in output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(Result::ok)
        {
            if let Ok(tick) = serde_json::from_str(&line)
                && ticks.send((index, Report::Tick(tick))).is_err()
            {
                return;
            }
        }
    });
    let overhear = thread::spawn(move || {
        let mut said = Vec::new();
        // What a dead worker said is read as far as it goes.
        let _ = errors.map(|mut errors| errors.read_to_end(&mut said));
        String::from_utf8_lossy(&said).trim().to_owned()
    });
    let last = reports.clone();
    thread::spawn(move || {
        let _ = listen.join();
        let said = overhear.join().unwrap_or_default();
        // The sweep may be gone; then nobody needs to know.
        let _ = last.send((index, Report::Ended { status: child.wait(), said }));
    });
    Ok(input)
}
