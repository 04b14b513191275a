use crate::support::{ENDLESS, Place, Running, SMALL, said};
use std::collections::BTreeMap;

/// Writes down what it is told.
const NOTE: &str = "env > ended.txt; echo noted";

fn told(place: &Place) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(place.path("ended.txt")).unwrap();
    let pairs = text.lines().filter_map(|line| line.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[cfg(unix)]
#[test]
fn a_command_is_told_how_a_training_ended() {
    let place = Place::new(&[("small.yaml", SMALL), ("wrong.yaml", "no: recipe\n")]);
    let output = place.run(&["train", "small.yaml", "--quiet", "--on-end", NOTE]);
    assert!(output.status.success(), "{}", said(&output));
    let run = place.folder("small").canonicalize().unwrap();
    let told_now = told(&place);
    assert_eq!(told_now["TAPER_OUTCOME"], "finished");
    assert_eq!(std::path::Path::new(&told_now["TAPER_RUN"]).canonicalize().unwrap(), run);
    assert_eq!((told_now["TAPER_NAME"].as_str(), told_now["TAPER_EXIT_CODE"].as_str()), ("small", "0"));
    let printed = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(
        !printed.contains("noted") && said(&output).contains("noted"),
        "its words are not among the folders: {printed}"
    );

    let output = place.run(&["train", "wrong.yaml", "--on-end", NOTE]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(
        (told(&place)["TAPER_OUTCOME"].as_str(), told(&place)["TAPER_EXIT_CODE"].as_str()),
        ("failed", "2")
    );

    let diverging =
        ["train", "small.yaml", "--quiet", "--set", "optimizer={name: sgd, lr: 1e30}", "--on-end", NOTE];
    assert_eq!(place.run(&diverging).status.code(), Some(1));
    assert_eq!(told(&place)["TAPER_OUTCOME"], "diverged");
    assert!(told(&place)["TAPER_MESSAGE"].starts_with("error: "), "{:?}", told(&place));

    let output =
        place.run(&["sweep", "small.yaml", "--quiet", "--set", "sweep={seeds: [1, 2]}", "--on-end", NOTE]);
    assert!(output.status.success(), "{}", said(&output));
    let told = told(&place);
    assert_eq!(
        (told["TAPER_COMMAND"].as_str(), told["TAPER_DONE"].as_str(), told["TAPER_ALL"].as_str()),
        ("sweep", "2", "2")
    );
}

#[cfg(unix)]
#[test]
fn what_becomes_of_the_command_changes_nothing_but_is_said() {
    let place = Place::new(&[("small.yaml", SMALL)]);
    let output = place.run(&["train", "small.yaml", "--quiet", "--on-end", "exit 7"]);
    assert!(output.status.success());
    assert!(said(&output).contains("--on-end: `exit 7` ended with exit status: 7"), "{}", said(&output));
}

#[cfg(target_os = "linux")]
#[test]
fn an_interrupted_training_is_told_too() {
    let place = Place::new(&[("endless.yaml", ENDLESS)]);
    let mut training =
        Running(place.taper(&["train", "endless.yaml", "--quiet", "--on-end", NOTE]).spawn().unwrap());
    // It has a step behind it when its metrics have a line.
    while !place.path("runs").is_dir()
        || !place.path("runs").read_dir().unwrap().any(|run| {
            std::fs::metadata(run.unwrap().path().join("metrics.jsonl")).is_ok_and(|about| about.len() > 0)
        })
    {
        std::thread::yield_now();
    }
    let process = libc::pid_t::try_from(training.0.id()).unwrap();
    // SAFETY: a signal to a child that was not waited for.
    unsafe { libc::kill(process, libc::SIGINT) };
    assert_eq!(training.0.wait().unwrap().code(), Some(130));
    assert_eq!(told(&place)["TAPER_OUTCOME"], "interrupted");
}
