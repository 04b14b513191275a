//! The command `report`: what it prints, writes and refuses.
use std::fs;
use std::process::Command;

const RECIPE: &str = "
data: {name: synthetic-images, train: 64, test: 32, classes: 4, batch_size: 16}
model: {name: mlp, hidden: [8]}
optimizer: {name: decgd, lr: 0.01}
train: {epochs: 2}
";

#[test]
fn the_command_says_what_it_cannot_do() {
    let folder = tempfile::tempdir().unwrap();
    let taper = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().unwrap();
    let recipe = folder.path().join("tiny.yaml");
    fs::write(&recipe, RECIPE).unwrap();
    let runs = folder.path().join("runs");
    let runs = runs.to_str().unwrap();
    assert!(taper(&["train", "-q", recipe.to_str().unwrap(), "--runs", runs]).status.success());
    let run = |args: &[&str]| taper(&[&["report"], args].concat());
    for (args, part) in [
        (&["no-such-folder"][..], "no-such-folder"),
        (&[runs, "--out", "x.docx"], "expected a name that ends in .html"),
        (&[env!("CARGO_MANIFEST_DIR")], "a run is a folder with a recipe.yaml"),
    ] {
        let output = run(args);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(part), "{message}");
    }
    let picture = folder.path().join("figures.png");
    let output = run(&[runs, "--out", picture.to_str().unwrap()]);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    match (cfg!(feature = "png"), output.status.code()) {
        (true, Some(0)) => {
            let decoder = png::Decoder::new(std::io::BufReader::new(fs::File::open(picture).unwrap()));
            // As wide as two panels, three pixels a unit.
            let width = decoder.read_info().unwrap().info().width;
            assert_eq!(width, 3 * 2 * 560);
        }
        (true, code) => assert!(code == Some(2) && message.contains("or write .svg"), "{message}"),
        (false, code) => assert!(code == Some(2) && message.contains("--features png"), "{message}"),
    }
    let output = run(&[runs]);
    assert!(output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("| mlp     | decgd"));
    let page = folder.path().join("page.html");
    assert!(run(&[runs, "--out", page.to_str().unwrap()]).status.success());
    assert!(fs::metadata(page).unwrap().len() > 10_000);
}

#[test]
fn explain_reads_what_a_microscope_saw_and_says_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let taper = |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_taper")).args(args).output().unwrap();
    let recipe = folder.path().join("tiny.yaml");
    fs::write(&recipe, RECIPE).unwrap();
    let runs = folder.path().join("runs");
    let (recipe, at) = (recipe.to_str().unwrap(), runs.to_str().unwrap());
    assert!(taper(&["train", "-q", recipe, "--runs", at]).status.success());
    let run = || {
        let whole = |path: &std::path::PathBuf| !path.to_string_lossy().contains(".before-") && path.is_dir();
        let mut all = fs::read_dir(&runs).unwrap().map(|entry| entry.unwrap().path());
        all.find(whole).unwrap().to_str().unwrap().to_owned()
    };
    let unseen = taper(&["explain", &run()]);
    let message = String::from_utf8_lossy(&unseen.stderr).into_owned();
    assert_eq!(unseen.status.code(), Some(2), "{message}");
    // What it says to do does it.
    let advised = message.split('`').nth(1).unwrap().to_owned();
    let words: Vec<&str> = advised.split_whitespace().skip(1).collect();
    assert_eq!((words[0], words[2], words[3]), ("train", "--fresh", "--set"), "{advised}");
    let set = advised.split("--set ").nth(1).unwrap().replace('\'', "");
    let again = taper(&["train", "-q", words[1], "--fresh", "--set", &set, "--runs", at]);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let seen = taper(&["explain", &run()]);
    let text = String::from_utf8_lossy(&seen.stdout).into_owned();
    assert!(seen.status.success() && text.contains("# decgd 0.01, explained"), "{text}");
    assert!(text.contains("(rule: vector)") && text.contains("| 0.weight"), "{text}");
    let page = folder.path().join("page.html");
    assert!(taper(&["explain", &run(), &run(), "--out", page.to_str().unwrap()]).status.success());
    assert!(fs::read_to_string(page).unwrap().contains("What differed"));
    let lines = taper(&["explain", &run(), "--json"]);
    let first = String::from_utf8_lossy(&lines.stdout).lines().next().unwrap().to_owned();
    assert!(serde_json::from_str::<serde_json::Value>(&first).unwrap()["quantity"].is_string(), "{first}");
    assert_eq!(taper(&["explain", &run(), &run(), &run()]).status.code(), Some(2));
}
