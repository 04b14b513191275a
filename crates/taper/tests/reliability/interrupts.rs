//! Interrupts by the user, and two processes that want the same run.
use crate::common::{LSTM, Net, assert_equal, files, message, scratch};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};

fn interrupt(child: &Child) {
    signal(child, libc::SIGINT);
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: the process is a child that has not been waited for, so the number is its own.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

/// Waits for something a running process does; its own end is a failure.
fn wait_for(child: &mut Child, what: &str, mut there: impl FnMut() -> bool) {
    while !there() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before {what}");
        std::thread::yield_now();
    }
}

fn text(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Whether a process has taken its run and the run has so many lines of metrics.
fn at_work(net: &Net, runs: &Path, process: u32, lines: usize) -> bool {
    net.find(runs).is_some_and(|run| {
        text(&run.join(".lock")).starts_with(&format!("process {process} "))
            && text(&run.join("metrics.jsonl")).lines().count() >= lines
    })
}

/// One step of hundreds of thousands of batches: whoever waits for it to end waits for long.
const ENDLESS: [&str; 4] = [
    "--set",
    "data={name: synthetic-text, train: 300000, batch_size: 1}",
    "--set",
    "train={accumulate: 1000000, bptt: {length: 1, half: 0, std: 0, min: 1}}",
];

/// Starts a run of one long step and returns it once it is under way.
fn start_endless(runs: &Path) -> Child {
    let mut command = LSTM.train(runs);
    let mut child = command.args(ENDLESS).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let id = child.id();
    let opened = || LSTM.find(runs).is_some_and(|run| run.join("events.out.tfevents.0.taper").exists());
    wait_for(&mut child, "it took the run", || at_work(&LSTM, runs, id, 0) && opened());
    child
}

/// A person, a scheduler and a closed terminal mean the same.
#[test]
fn a_request_to_stop_is_a_checkpoint_and_the_same_command_goes_on() {
    let folder = scratch();
    // No other checkpoint than those that interrupts make and the last, and time enough to interrupt.
    let own = [
        "--set",
        "train.epochs=100",
        "--set",
        "train.checkpoint.every_steps=null",
        "--set",
        "train.checkpoint.keep=1",
    ];
    let finish = |runs: &Path| LSTM.train(runs).args(own).output().unwrap();
    let whole = folder.path().join("whole");
    assert!(finish(&whole).status.success());
    let whole = files(&LSTM.folder(&whole));

    let runs = folder.path().join("interrupted");
    let mut interrupted = 0;
    for (lines, asked) in [
        (1, libc::SIGTERM),
        (60, libc::SIGHUP),
        (120, libc::SIGINT),
        (240, libc::SIGUSR1),
        (400, libc::SIGTERM),
    ] {
        let mut child =
            LSTM.train(&runs).args(own).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        // On a busy machine it may come to its end unseen; a process that ended takes a signal in silence.
        while !at_work(&LSTM, &runs, child.id(), lines) && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        signal(&child, asked);
        let output = child.wait_with_output().unwrap();
        let said = message(&output);
        assert_eq!(output.status.signal(), None, "signal {asked} ended it without a checkpoint");
        if output.status.code() == Some(128 + asked) {
            interrupted += 1;
            assert!(
                said.contains("interrupted at step") && said.contains("the same command goes on"),
                "{said}"
            );
            let summary = text(&LSTM.folder(&runs).join("summary.json"));
            assert!(summary.contains("\"status\": \"interrupted\""), "{summary}");
        } else {
            assert!(output.status.success(), "{}: {said}", output.status);
        }
    }
    assert!(interrupted > 0, "no interrupt hit");
    let output = finish(&runs);
    assert!(output.status.success(), "{}", message(&output));
    assert_equal(&LSTM.folder(&runs), &whole, &format!("{interrupted} interrupts"));
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let folder = scratch();
    let mut child = start_endless(folder.path());
    interrupt(&child);
    let mut said = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut said).unwrap();
    assert!(said.contains("once more to stop at once"), "{said}");
    interrupt(&child);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let run = LSTM.folder(folder.path());
    assert!(!run.join("checkpoints").exists() && !run.join("summary.json").exists());
}

#[test]
fn a_run_belongs_to_one_process_at_a_time() {
    let folder = scratch();
    let mut first = start_endless(folder.path());
    let metrics = LSTM.folder(folder.path()).join("metrics.jsonl");
    fs::write(&metrics, "not the second's to cut").unwrap();
    let second = LSTM.train(folder.path()).args(ENDLESS).output().unwrap();
    let said = message(&second);
    assert_eq!(second.status.code(), Some(1), "{said}");
    assert!(
        said.contains(&format!("process {}", first.id())) && said.contains("at work on this run"),
        "{said}"
    );
    assert_eq!(text(&metrics), "not the second's to cut");
    fs::write(&metrics, "").unwrap();
    // A killed process leaves no lock behind.
    first.kill().unwrap();
    first.wait().unwrap();
    let mut third = start_endless(folder.path());
    third.kill().unwrap();
    third.wait().unwrap();
}
