//! What a sweep does and prints when nobody interrupts it.
use super::support::{Place, SWEEP, said, sessions};
use serde_json::Value;

#[test]
fn the_number_of_jobs_changes_no_byte_and_a_second_sweep_starts_nothing() {
    let place = Place::new(SWEEP);
    let alone = place.table("one", &["--jobs", "1"]);
    assert_eq!(alone.lines().filter(|line| line.contains(" 3/3 ")).count(), 4, "{alone}");
    assert_eq!(place.table("three", &["--jobs", "3"]), alone);
    let json = place.table("three", &["--json"]);
    assert_eq!(place.table("one", &["--json"]), json);

    // All of these found every run done.
    for run in place.runs("one").iter().chain(&place.runs("three")) {
        assert_eq!(sessions(run), 1, "{}", run.display());
    }
    let again = place.sweep("one", &[]);
    assert!(said(&again).contains("all 12 runs were done before"), "{}", said(&again));
    assert_eq!(again.stdout, alone.as_bytes());
    // The name is no part of a run's content.
    let renamed = place.sweep("one", &["--set", "name=other"]);
    assert!(said(&renamed).contains("all 12 runs were done before"), "{}", said(&renamed));
    // A sweep that is extended runs what is new.
    let more = place.sweep("one", &["--set", "sweep.seeds=[1, 2, 3, 4]", "--jobs", "2"]);
    assert!(said(&more).contains("12 of 16 runs were done before"), "{}", said(&more));
    assert_eq!(place.runs("one").len(), 16);
}

#[test]
fn a_cell_has_what_its_runs_have() {
    let place = Place::new(SWEEP);
    let json = place.table("runs", &["--json", "--jobs", "2", "--out", "report.md"]);
    let report = std::fs::read_to_string(place.path("report.md")).unwrap();
    assert!(report.contains("12 runs (12 finished)"), "{report}");
    let cells: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cells.len(), 4);
    let cell = &cells[2];
    assert_eq!((&cell["optimizer"], &cell["settings"]["optimizer.c"]), (&"decgd".into(), &1e-3.into()));
    assert_eq!((&cell["metric"], &cell["finished"]), (&"test.accuracy".into(), &3.into()));
    let mut sum = 0.0;
    for (trial, seed) in cell["runs"].as_array().unwrap().iter().zip(1..) {
        assert_eq!(trial["seed"], seed);
        let folder = place.path("runs").join(format!("tiny-{}", trial["id"].as_str().unwrap()));
        let summary: Value =
            serde_json::from_slice(&std::fs::read(folder.join("summary.json")).unwrap()).unwrap();
        assert_eq!(trial["last"], summary["last"]["test.accuracy"]);
        assert_eq!(trial["best"], summary["best"]["test.accuracy"]["value"]);
        sum += trial["last"].as_f64().unwrap();
        // The worker was given the resolved recipe, but its comments still point to what the user wrote.
        let recipe = std::fs::read_to_string(folder.join("recipe.yaml")).unwrap();
        assert!(recipe.contains("tiny.yaml:7:"), "{recipe}");
    }
    assert_eq!(cell["last"]["mean"].as_f64().unwrap(), sum / 3.0);
}

#[test]
fn two_sweeps_at_once_share_the_work() {
    let place = Place::new(SWEEP);
    let first = place.taper("sweep", "runs", &["--jobs", "2"]).spawn().unwrap();
    let second = place.sweep("runs", &["--jobs", "2"]);
    let first = first.wait_with_output().unwrap();
    assert!(first.status.success() && second.status.success(), "{}{}", said(&first), said(&second));
    assert_eq!(first.stdout, second.stdout);
    for run in place.runs("runs") {
        assert_eq!(sessions(&run), 1, "{}: trained twice", run.display());
    }
}

#[test]
fn runs_that_fail_or_diverge_are_shown_and_stop_no_other() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16}
model: {name: mlp, hidden: [8]}
train: {epochs: 2}
sweep:
  list:
    - {optimizer: {name: sgd, lr: 1e30}}
    - {optimizer: {name: sgd, lr: 0.125}, train.init_from: nowhere.safetensors}
    - {optimizer: {name: sgd, lr: 0.25}}
  seeds: [1, 2]
",
    );
    let output = place.sweep("runs", &["--jobs", "3"]);
    let (printed, message) = (String::from_utf8(output.stdout.clone()).unwrap(), said(&output));
    assert_eq!(output.status.code(), Some(1), "{message}");
    let cells = |line: &str| line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let head = cells(printed.lines().next().unwrap());
    let counts = |lr: &str| {
        let row = printed.lines().map(cells).find(|row| row.get(1).is_some_and(|cell| cell == lr)).unwrap();
        let of = |name: &str| row[head.iter().position(|cell| cell == name).unwrap()].clone();
        [of("runs"), of("diverged"), of("failed")]
    };
    assert_eq!(counts("1e+30"), ["0/2", "2", "0"], "{printed}");
    assert_eq!(counts("0.125"), ["0/2", "0", "2"], "{printed}");
    assert_eq!(counts("0.25"), ["2/2", "0", "0"], "{printed}");
    assert!(message.contains("2 of 6 runs failed") && message.contains("nowhere.safetensors"), "{message}");

    // A failure is tried again, a divergence is a result.
    let again = place.sweep("runs", &["--jobs", "1"]);
    assert!(said(&again).contains("4 of 6 runs were done before"), "{}", said(&again));
    assert_eq!((again.status.code(), again.stdout), (Some(1), output.stdout));
}

#[test]
fn workers_train_what_was_resolved_whatever_the_environment_says() {
    // A program in the place of `taper`: the real one with another environment than the sweep had.
    let place = Place::new(SWEEP);
    let folder = place.path("runs").join("one");
    std::fs::create_dir_all(&folder).unwrap();
    let recipe = taper_train::Recipe::load(&place.recipe, &[], &taper_train::Registries::default()).unwrap();
    let run = &recipe.runs()[0];
    std::fs::write(folder.join("recipe.yaml"), run.to_yaml()).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_taper"))
        .arg("train")
        .arg(folder.join("recipe.yaml"))
        .args(["--resolved", "-q", "--runs"])
        .arg(place.path("runs"))
        .env("TAPER__TRAIN__EPOCHS", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        place.path("runs").join(run.directory()).join("summary.json").is_file(),
        "{:?}",
        place.runs("runs")
    );
}

#[test]
fn unequal_settings_of_optimizers_stand_below_the_table() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16}
model: {name: mlp, hidden: [8]}
train: {epochs: 1}
sweep:
  list:
    - {optimizer: {name: sgd, lr: 0.25}}
    - {optimizer: {name: adam, lr: 0.001}, train.epochs: 2}
",
    );
    let output = place.sweep("runs", &["--jobs", "2"]);
    let (printed, message) = (String::from_utf8(output.stdout.clone()).unwrap(), said(&output));
    let note = "Not equal between optimizers: train.epochs is 2 for adam, 1 for sgd.";
    assert!(printed.contains(note), "{printed}");
    // A cell that the sweep did not set has the value that it had.
    let row = printed.lines().find(|line| line.starts_with("| sgd ")).unwrap();
    let cells: Vec<&str> = row.split('|').map(str::trim).collect();
    let head: Vec<&str> = printed.lines().next().unwrap().split('|').map(str::trim).collect();
    let epochs = head.iter().position(|title| *title == "train.epochs").unwrap();
    assert_eq!(cells[epochs], "1", "{printed}");
    assert!(message.contains("note: train.epochs is 2 for adam, 1 for sgd"), "{message}");
}

#[test]
fn a_recipe_without_a_sweep_is_a_sweep_of_one() {
    let place = Place::new(&SWEEP[..SWEEP.find("sweep:").unwrap()]);
    let table = place.table("runs", &[]);
    assert!(table.starts_with("| recipe | runs | best test accuracy"), "{table}");
    assert!(table.contains("| tiny   |  1/1 |") && !table.contains('±'), "{table}");
}

#[test]
fn a_dry_run_lists_what_is_to_do() {
    let place = Place::new(SWEEP);
    let list = place.table("runs", &["--dry-run"]);
    assert_eq!(list.lines().count(), 12);
    assert!(list.lines().next().unwrap().ends_with("  c=10 seed=1"), "{list}");
    assert!(place.runs("runs").is_empty(), "nothing was started");
}

#[test]
fn completions_know_the_commands() {
    for (shell, part) in [("bash", "_taper()"), ("zsh", "#compdef taper"), ("fish", "complete -c taper")] {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_taper")).args(["completions", shell]).output();
        let script = String::from_utf8(output.unwrap().stdout).unwrap();
        for word in [part, "sweep", "launcher", "plan", "no-probe"] {
            assert!(script.contains(word), "{word} in the completions for {shell}");
        }
        // Options that are not the user's; a server of a tracker is.
        let script = script.replace("server", "");
        for word in ["worker", "serve"] {
            assert!(!script.contains(word), "{word} in the completions for {shell}");
        }
    }
}

#[test]
fn commands_explain_themselves_with_examples() {
    for command in ["plan", "sweep", "train", "optimizers", "completions"] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_taper"))
            .args([command, "--help"])
            .output()
            .unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        let example = [format!("  cargo xtask {command} "), format!("  taper {command} ")];
        assert!(example.iter().any(|example| help.contains(example)), "{help}");
    }
}
