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
