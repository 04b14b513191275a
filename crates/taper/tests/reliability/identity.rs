//! A run is a function of what can change its result: of settings and of inputs by content, not of names.
use crate::common::{LSTM, MLP, RESNET, assert_equal, files, message, scratch};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn folders(runs: &Path) -> Vec<String> {
    let entries = fs::read_dir(runs).into_iter().flatten().map(|entry| entry.unwrap());
    let folders = entries.filter(|entry| entry.path().is_dir());
    let mut names: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn taper(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    command.current_dir(home).args(args).env("TAPER_OFFLINE", "1").env("TAPER_CACHE", home.join("cache"));
    command.output().unwrap()
}

#[test]
fn what_cannot_change_a_result_goes_on_with_the_run() {
    let folder = scratch();
    let (run, _) = MLP.trained(folder.path(), &[]);
    let before = files(&run);
    let settings = "train={log_every: 3, probe: false, budget: {seconds: 9999}, checkpoint: {keep: 5}}";
    let (again, said) = MLP.trained(folder.path(), &["--set", settings, "--set", "name=mlp"]);
    assert!(said.contains("finished before, nothing to do"), "{said}");
    assert_eq!((again, folders(folder.path()).len()), (run.clone(), 1));
    let curves = |mut files: std::collections::BTreeMap<String, Vec<u8>>| {
        files.remove("curves.svg");
        files
    };
    assert_eq!(curves(files(&run)), curves(before));

    // In the middle of a run too.
    let other = folder.path().join("other");
    MLP.trained(&other, &["--set", "train.budget.seconds=1e-9"]);
    let (run, said) = MLP.trained(&other, &["--set", "train.checkpoint.keep=3"]);
    assert_eq!(folders(&other).len(), 1, "{said}");
    assert_eq!(json(&run.join("summary.json"))["status"], "finished");
}

#[test]
fn a_fresh_run_keeps_the_old_folder() {
    let folder = scratch();
    let (run, _) = MLP.trained(folder.path(), &[]);
    let before = files(&run);
    let (again, said) = MLP.trained(folder.path(), &["--fresh"]);
    assert_eq!(again, run);
    assert_equal(&again, &before, "a fresh start");
    let aside = format!("{}.before-1", run.display());
    assert!(said.contains(&aside), "{said}");
    assert_equal(Path::new(&aside), &before, "a fresh start elsewhere");
    // Neither a report nor a sweep counts it.
    let runs = folder.path().to_str().unwrap();
    let report = taper(folder.path(), &["report", runs, "--out", "report.csv"]);
    assert!(report.status.success(), "{}", message(&report));
    assert!(!fs::read_to_string(folder.path().join("report.csv")).unwrap().contains("before-1"));
}

#[test]
fn a_longer_run_goes_on_from_a_shorter_one() {
    for (net, few, many) in [(&MLP, 4, 10), (&RESNET, 2, 5), (&LSTM, 3, 6)] {
        let folder = scratch();
        let (few, many) = (format!("train.epochs={few}"), format!("train.epochs={many}"));
        let (whole, _) = net.trained(&folder.path().join("whole"), &["--set", &many]);
        let whole = files(&whole);
        let runs = folder.path().join("extended");
        let (short, _) = net.trained(&runs, &["--set", &few]);
        let before = files(&short);
        let (long, said) = net.trained(&runs, &["--set", &many]);
        assert_ne!(long, short);
        assert!(said.contains("the same run but shorter"), "{}: {said}", net.name);
        assert_equal(&long, &whole, &format!("an extension of {}", net.name));
        assert_equal(&short, &before, "being extended");
        let manifest = json(&long.join("manifest.json"));
        assert_eq!(manifest["extends"], short.file_name().unwrap().to_str().unwrap());
        assert_eq!(manifest["stretches"].as_array().unwrap().len(), 2, "{manifest:#}");
    }
}

#[test]
fn what_looks_ahead_is_not_extended() {
    let cases = [
        (["schedule={kind: cosine}", "train.log_every=1"], "cosine schedule is stretched over the length"),
        (
            ["train.eval_every=3", "train.checkpoint={every_steps: null, keep: 1}"],
            "no checkpoint from before its end",
        ),
        (["train.log_every=2", "schedule={kind: constant}"], "the same run but shorter"),
    ];
    for (settings, reason) in cases {
        let folder = scratch();
        let set = settings.map(|setting| format!("--set={setting}"));
        let args = |epochs: &'static str| vec![set[0].as_str(), set[1].as_str(), epochs];
        let (whole, _) = RESNET.trained(&folder.path().join("whole"), &args("--set=train.epochs=5"));
        let runs = folder.path().join("runs");
        RESNET.trained(&runs, &args("--set=train.epochs=2"));
        let (long, said) = RESNET.trained(&runs, &args("--set=train.epochs=5"));
        assert!(said.contains(reason), "{reason}: {said}");
        assert_equal(&long, &files(&whole), reason);
    }
}

/// A recipe of text, a vocabulary and first weights that lie in files.
fn on_files(home: &Path) -> PathBuf {
    fs::write(home.join("words.txt"), "the cat sat on the mat and the dog sat on the cat\n".repeat(9))
        .unwrap();
    fs::write(home.join("vocab.txt"), "<unk>\n<eos>\nthe\ncat\nsat\non\nmat\nand\ndog\n").unwrap();
    let recipe = "data: {name: text, train: words.txt, valid: words.txt, test: words.txt, vocab: vocab.txt, batch_size: 2, eval_batch_size: 2}
model: {name: lstm, layers: 1, emb: 4}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 2, bptt: {length: 5}}
";
    fs::write(home.join("mine.yaml"), recipe).unwrap();
    home.join("runs")
}

#[test]
fn a_finished_run_is_believed_only_with_its_inputs() {
    let folder = scratch();
    let home = folder.path();
    let runs = on_files(home);
    let first = taper(home, &["train", "mine.yaml", "--runs", "first", "--set", "train.epochs=1"]);
    assert!(first.status.success(), "{}", message(&first));
    let first = home.join(String::from_utf8(first.stdout).unwrap().trim());
    let weights = fs::read_dir(first.join("checkpoints")).unwrap().next().unwrap().unwrap().path();
    fs::copy(weights.join("model.safetensors"), home.join("first.safetensors")).unwrap();
    let train = ["train", "mine.yaml", "--set", "train.init_from=first.safetensors"];
    assert!(taper(home, &train).status.success());
    let [run] = &folders(&runs)[..] else { panic!("{:?}", folders(&runs)) };
    let summary = || fs::read(runs.join(run).join("summary.json")).unwrap();

    let replace = |file: &str, from: &str, to: &str| {
        let text = fs::read_to_string(home.join(file)).unwrap();
        fs::write(home.join(file), text.replacen(from, to, 1)).unwrap();
    };
    let other_weights = || {
        let mut bytes = fs::read(home.join("first.safetensors")).unwrap();
        let last = bytes.len() - 2;
        bytes[last] ^= 8;
        fs::write(home.join("first.safetensors"), bytes).unwrap();
    };
    let changes: [(&str, &dyn Fn()); 3] = [
        ("the data: `train`", &|| replace("words.txt", "cat", "dog")),
        ("the data: `vocab`", &|| replace("vocab.txt", "cat\nsat", "sat\ncat")),
        ("the first weights", &other_weights),
    ];
    for (number, (said, change)) in changes.into_iter().enumerate() {
        let before = summary();
        change();
        let plan = taper(home, &["plan", "--json", "--no-probe", train[1], train[2], train[3]]);
        let plan: Value = serde_json::from_slice(&plan.stdout).unwrap();
        assert_eq!(plan["runs"][0]["status"], "missing", "{said}");
        let listed = taper(home, &["sweep", "--dry-run", train[1], train[2], train[3]]);
        assert!(String::from_utf8_lossy(&listed.stdout).contains(run), "{said}: {}", message(&listed));
        let again = taper(home, &train);
        assert!(again.status.success(), "{}", message(&again));
        assert!(message(&again).contains(said), "no `{said}` in {}", message(&again));
        assert_ne!(summary(), before, "{said}");
        let aside = runs.join(format!("{run}.before-{}", number + 1));
        assert_eq!(fs::read(aside.join("summary.json")).unwrap(), before, "{said}");
        let third = taper(home, &train);
        assert!(message(&third).contains("nothing to do"), "{}", message(&third));
    }
}

/// Files of MNIST's form with a few images of their own, `from` the first.
fn few_images(home: &Path, from: u8) {
    for (name, count) in [("train", 24u8), ("t10k", 8)] {
        let order: Vec<u8> = (0..count).map(|i| (i + from) % count).collect();
        let size = [0, 0, 0, count, 0, 0, 0, 28, 0, 0, 0, 28];
        let pixels = order.iter().flat_map(|i| vec![*i * 9; 28 * 28]);
        let images: Vec<u8> = [0, 0, 8, 3].into_iter().chain(size).chain(pixels).collect();
        let labels = [0, 0, 8, 1, 0, 0, 0, count].into_iter().chain(order.iter().map(|i| i % 10));
        fs::write(home.join(format!("{name}-images-idx3-ubyte")), images).unwrap();
        fs::write(home.join(format!("{name}-labels-idx1-ubyte")), labels.collect::<Vec<u8>>()).unwrap();
    }
}

#[test]
fn the_same_images_in_another_order_are_other_data() {
    let folder = scratch();
    let home = folder.path();
    let recipe = "data: {name: mnist, verify: false, batch_size: 4, eval_batch_size: 8}
model: {name: mlp, hidden: [4]}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 3}
";
    fs::write(home.join("mine.yaml"), recipe).unwrap();
    few_images(home, 0);
    let train = ["train", "mine.yaml", "--data", "."];
    let interrupted = taper(home, &[&train[..], &["--set", "train.budget.seconds=1e-9"]].concat());
    assert!(interrupted.status.success(), "{}", message(&interrupted));
    few_images(home, 1);
    let refused = taper(home, &train);
    assert_eq!(refused.status.code(), Some(1), "{}", message(&refused));
    assert!(message(&refused).contains("in another order"), "{}", message(&refused));
    few_images(home, 0);
    assert!(taper(home, &train).status.success());
    let run = home.join("runs").join(&folders(&home.join("runs"))[0]);
    let before = fs::read(run.join("metrics.jsonl")).unwrap();
    few_images(home, 1);
    let anew = taper(home, &train);
    assert!(anew.status.success() && message(&anew).contains("in another order"), "{}", message(&anew));
    assert_ne!(fs::read(run.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn stretches_are_recorded_and_not_mixed_unasked() {
    let folder = scratch();
    let start = |isa: &str, args: &[&str]| {
        RESNET.train(folder.path()).env("TAPER_ISA", isa).args(args).output().unwrap()
    };
    let first = start("portable", &["--set", "train.budget.seconds=1e-9"]);
    assert!(first.status.success(), "{}", message(&first));
    let run = RESNET.folder(folder.path());
    let manifest = || json(&run.join("manifest.json"));
    let (steps, other) = (manifest()["stretches"][0]["to"].clone(), start("avx2", &[]));
    assert_eq!(manifest()["stretches"][0]["kernels"], "portable");
    if other.status.success() {
        assert!(!manifest()["kernels"].as_str().unwrap().contains("avx2"), "mixed unasked");
        println!("this processor has no AVX2: nothing to mix");
        return;
    }
    assert_eq!(other.status.code(), Some(1), "{}", message(&other));
    assert!(message(&other).contains("--allow-mixed"), "{}", message(&other));
    let mixed = start("avx2", &["--allow-mixed"]);
    assert!(mixed.status.success(), "{}", message(&mixed));
    assert_eq!(manifest()["kernels"], "portable, avx2");
    let stretches = manifest()["stretches"].clone();
    assert_eq!((&stretches[0]["to"], &stretches[1]["from"]), (&steps, &steps), "{stretches:#}");
    let summary = json(&run.join("summary.json"));
    assert_eq!(summary["mixed"].as_array().unwrap().len(), 2, "{summary:#}");
    assert_eq!(stretches[1]["to"], summary["steps"], "{stretches:#}");
    let verified = taper(folder.path(), &["verify", run.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&verified.stdout).into_owned();
    assert!(said.contains("the run is mixed"), "{said}{}", message(&verified));
}

#[test]
fn a_vocabulary_is_not_written_where_a_recipe_says() {
    let folder = scratch();
    on_files(folder.path());
    for command in ["plan", "train"] {
        let output = taper(folder.path(), &[command, "mine.yaml", "--set", "data.vocab=elsewhere/vocab.txt"]);
        assert_eq!(output.status.code(), Some(2), "{}", message(&output));
        assert!(message(&output).contains("elsewhere/vocab.txt"), "{}", message(&output));
        assert!(!folder.path().join("elsewhere").exists(), "{command}");
    }
}

#[test]
fn a_plan_leaves_nothing_behind() {
    let folder = scratch();
    on_files(folder.path());
    let listed = || {
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = listed();
    // With a vocabulary of its own making, and with the steps that it measures.
    for own in [
        &[][..],
        &["--set", "data={name: text, train: words.txt, valid: words.txt, test: words.txt, batch_size: 2}"],
    ] {
        let plan = taper(folder.path(), &[&["plan", "mine.yaml"], own].concat());
        assert!(plan.status.success(), "{}", message(&plan));
        assert_eq!(listed(), before, "{own:?}");
    }
}

#[test]
fn a_data_sets_default_that_is_spelled_out_is_the_same_run() {
    let folder = scratch();
    on_files(folder.path());
    let id = |own: &[&str]| {
        let plan = taper(folder.path(), &[&["plan", "--json", "--no-probe", "mine.yaml"], own].concat());
        let plan: Value =
            serde_json::from_slice(&plan.stdout).unwrap_or_else(|e| panic!("{e}: {}", message(&plan)));
        plan["runs"][0]["id"].as_str().unwrap().to_owned()
    };
    let plain = id(&[]);
    assert_eq!(id(&["--set", "data.min_count=1"]), plain);
    assert_ne!(id(&["--set", "data.min_count=2"]), plain);
}

#[test]
fn a_schedule_in_steps_that_the_run_does_not_reach_is_told_by_train_too() {
    let folder = scratch();
    on_files(folder.path());
    let beyond = ["--set", "schedule={kind: milestones, at: [100000], per: step}"];
    let output = taper(folder.path(), &[&["train", "mine.yaml"], &beyond[..]].concat());
    assert!(output.status.success(), "{}", message(&output));
    assert_eq!(message(&output).matches("at 100000 is never reached").count(), 1, "{}", message(&output));
}

#[test]
fn weights_come_from_a_file_a_checkpoint_or_a_run() {
    let folder = scratch();
    let (run, _) = LSTM.trained(&folder.path().join("first"), &[]);
    let steps = fs::read_dir(run.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let number = |path: &PathBuf| path.to_str().unwrap().rsplit('-').next().unwrap().parse::<u64>().unwrap();
    let last = steps.max_by_key(number).unwrap();
    let weights = safetensors::SafeTensors::deserialize(&fs::read(last.join("model.safetensors")).unwrap())
        .unwrap()
        .names()
        .into_iter()
        .map(str::to_owned)
        .collect::<Vec<_>>();
    assert!(weights.iter().all(|name| !name.contains("carry")), "{weights:?}");
    assert!(last.join("carry.safetensors").is_file());
    let mut ends = Vec::new();
    for (number, from) in [last.join("model.safetensors"), last.clone(), run].iter().enumerate() {
        let from = format!("train.init_from={}", from.display());
        let (begun, _) = LSTM.trained(&folder.path().join(number.to_string()), &["--set", &from]);
        ends.push(fs::read(begun.join("metrics.jsonl")).unwrap());
    }
    assert!(ends[0] == ends[1] && ends[1] == ends[2]);
}
