//! A sweep that is killed or interrupted ends as if it had not been.
use super::support::{Place, SWEEP, said, sessions};
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus};
use taper_models::rng::Rng;

fn kill(signal: &str, target: &str) {
    let status = Command::new("kill").args([signal, "--", target]).status().unwrap();
    // The target may have ended by itself.
    let _ = status;
}

/// Starts a sweep and calls `at` after the given number of lines on standard error, if there are so many.
fn interrupted(place: &Place, args: &[&str], lines: usize, at: impl FnOnce(&Child)) -> ExitStatus {
    let mut child = place.taper("sweep", "runs", args).spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    if errors.by_ref().filter(|line| !line.starts_with("note:")).nth(lines).is_some() {
        at(&child);
    }
    errors.for_each(drop);
    child.wait().unwrap()
}

#[test]
fn sigkill_at_any_moment_loses_nothing() {
    let place = Place::new(SWEEP);
    let whole = place.table("whole", &["--jobs", "1"]);
    let mut rng = Rng::new(1, "test", "kills", 0);
    let (mut kills, mut attempts) = (0, 0);
    while kills < 10 && attempts < 40 {
        attempts += 1;
        // Lines come when a run starts and when one ends; the other two jobs are then anywhere in theirs.
        let lines = rng.below(5) as usize;
        let status =
            interrupted(&place, &["--jobs", "3"], lines, |sweep| kill("-KILL", &format!("-{}", sweep.id())));
        match status.signal() {
            Some(9) => kills += 1,
            _ => assert!(status.success(), "{status}"),
        }
        if status.success() {
            break;
        }
    }
    assert!(kills >= 4, "only {kills} of {attempts} hit");
    assert_eq!(place.table("runs", &["--jobs", "3"]), whole, "after {kills} kills");
    assert_eq!(place.runs("runs").len(), 12);
}

#[test]
fn ctrl_c_stops_with_checkpoints_and_the_same_command_goes_on() {
    let place = Place::new(SWEEP);
    let long = "train={epochs: 200, checkpoint: {every_steps: null}}";
    let args = ["--jobs", "1", "--set", long, "--set", "sweep.seeds=[1]"];
    let whole = place.table("whole", &args);
    // To the sweep alone, as a supervisor does, when its first run has been started.
    let status = interrupted(&place, &args, 0, |sweep| kill("-INT", &sweep.id().to_string()));
    assert_eq!(status.code(), Some(130), "{status}");
    let [begun] = &place.runs("runs")[..] else {
        panic!("one run was started, no other after the interrupt")
    };
    let summary = std::fs::read_to_string(begun.join("summary.json")).unwrap();
    assert!(summary.contains("interrupted") || summary.contains("finished"), "{summary}");
    assert!(std::fs::read_dir(begun.join("checkpoints")).unwrap().next().is_some());
    assert_eq!(sessions(begun), 1);
    // To all processes, as a terminal does.
    let status = interrupted(&place, &args, 1, |sweep| kill("-INT", &format!("-{}", sweep.id())));
    assert_eq!(status.code(), Some(130), "{status}");
    let output = place.sweep("runs", &args);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), whole);
}
