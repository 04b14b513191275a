use crate::common::{GPT, LSTM, MLP, Net, RESNET, SHORT, VIT, assert_equal, files, scratch};

fn does_not_depend_on_threads(net: &Net) {
    let folder = scratch();
    let train = |threads: &str| {
        let runs = folder.path().join(threads);
        let mut train = net.train(&runs);
        let status = train.args(["--threads", threads]).env("TAPER_OVERSUBSCRIBE", "1").status().unwrap();
        assert!(status.success());
        let manifest = std::fs::read_to_string(net.folder(&runs).join("manifest.json")).unwrap();
        assert!(manifest.contains(&format!("\"threads\": {threads}")), "{manifest}");
        net.folder(&runs)
    };
    let one = files(&train("1"));
    for threads in ["2", "3"] {
        assert_equal(&train(threads), &one, &format!("training {} with {threads} threads", net.name));
    }
}

#[test]
fn mlp_does_not_depend_on_threads() {
    does_not_depend_on_threads(&MLP);
}

#[test]
fn resnet_does_not_depend_on_threads() {
    does_not_depend_on_threads(&RESNET);
}

#[test]
fn a_short_run_does_not_depend_on_threads() {
    does_not_depend_on_threads(&SHORT);
}

#[test]
fn transformers_do_not_depend_on_threads() {
    does_not_depend_on_threads(&GPT);
    does_not_depend_on_threads(&VIT);
}

#[test]
fn lstm_does_not_depend_on_threads() {
    does_not_depend_on_threads(&LSTM);
}
