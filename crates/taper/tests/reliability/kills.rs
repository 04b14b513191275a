//! Killed at any moment, a run ends as if it had not been.
use crate::common::{Draw, GPT, LSTM, MLP, Net, RESNET, SHORT, VIT, assert_equal, files, message, scratch};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// What the executioner waits for before a drawn delay of its own.
#[derive(Clone, Copy, Debug)]
enum Sign {
    /// Nothing: any moment between the process's start and the time a whole run takes.
    Start,
    /// So many more bytes of metrics.
    Metrics(u64),
    /// A checkpoint that is being made.
    Workshop,
    /// So many more changes among the checkpoints.
    Checkpoints(u64),
}

/// Waits for a sign of progress and then a drawn time, and kills. A process that ends before is left alone.
fn stalk(child: &mut Child, net: &Net, runs: &Path, whole: Duration, draw: &mut Draw) {
    let sign = match draw.below(4) {
        0 => Sign::Start,
        1 => Sign::Metrics(1 + draw.below(2000)),
        2 => Sign::Workshop,
        _ => Sign::Checkpoints(1 + draw.below(3)),
    };
    let most = match sign {
        Sign::Start => whole,
        // About as long as a checkpoint takes in memory.
        Sign::Workshop => Duration::from_micros(400),
        // A few steps and a checkpoint or two.
        _ => whole / 10,
    };
    let delay = Duration::from_nanos(draw.below(most.as_nanos() as u64));
    let look = || {
        let folder = net.find(runs)?;
        let bytes = std::fs::metadata(folder.join("metrics.jsonl")).map_or(0, |file| file.len());
        let newest = std::fs::metadata(folder.join("checkpoints")).and_then(|found| found.modified()).ok();
        Some((bytes, newest, folder.join(".checkpoints.tmp").exists()))
    };
    let before = look();
    let mut last = before;
    let mut changes = 0;
    while child.try_wait().unwrap().is_none() {
        let now = look();
        let newest = |look: Option<(u64, _, bool)>| look.and_then(|(_, newest, _)| newest);
        changes += u64::from(newest(now) != newest(last));
        last = now;
        let bytes = |look: Option<(u64, _, bool)>| look.map_or(0, |(bytes, _, _)| bytes);
        let seen = match sign {
            Sign::Start => true,
            // A run that goes on cuts its metrics first.
            Sign::Metrics(more) => bytes(now) >= bytes(before).min(bytes(now)) + more,
            Sign::Workshop => now.is_some_and(|(_, _, workshop)| workshop),
            Sign::Checkpoints(n) => changes >= n,
        };
        if seen {
            let start = Instant::now();
            while start.elapsed() < delay {
                std::thread::yield_now();
            }
            child.kill().unwrap();
            return;
        }
        std::thread::yield_now();
    }
}

/// Kills processes that train `net` until so many have died of it, each time going on with the same run.
fn survives(net: &Net, epochs: u32, kills: usize, seed: u64) {
    /// Kills before a run is let go to its end: so that some come to it, whatever was drawn.
    const A_RUN: usize = 9;
    let folder = scratch();
    // Long enough that the executioner, who may have to wait for a processor, comes in time.
    let train = |runs: &Path| {
        let mut command = net.train(runs);
        command.args(["--set", &format!("train.epochs={epochs}")]);
        command
    };
    let started = Instant::now();
    let runs = folder.path().join("whole");
    assert!(train(&runs).status().unwrap().success());
    let whole = files(&net.folder(&runs));
    let duration = started.elapsed();
    let mut draw = Draw(seed);
    let (mut died, mut copies, mut in_workshop) = (0, 0, 0);
    while died < kills {
        let runs = folder.path().join(copies.to_string());
        copies += 1;
        let mut here = 0;
        loop {
            let mut child = train(&runs).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            if died < kills && here < A_RUN {
                stalk(&mut child, net, &runs, duration, &mut draw);
            }
            let output = child.wait_with_output().unwrap();
            if output.status.signal() == Some(libc::SIGKILL) {
                (died, here) = (died + 1, here + 1);
                let workshop = |folder: std::path::PathBuf| folder.join(".checkpoints.tmp").exists();
                in_workshop += usize::from(net.find(&runs).is_some_and(workshop));
                continue;
            }
            assert!(output.status.success(), "{}", message(&output));
            break;
        }
        assert_equal(&net.folder(&runs), &whole, &format!("{here} kills of {}, seed {seed}", net.name));
    }
    println!(
        "{}: {died} processes killed, {in_workshop} of them while they wrote a checkpoint, in {copies} runs",
        net.name
    );
    assert_eq!(died, kills);
}

#[test]
fn mlp_survives_18_kills() {
    survives(&MLP, 60, 18, 1);
}

#[test]
fn resnet_survives_16_kills() {
    survives(&RESNET, 8, 16, 2);
}

#[test]
fn a_short_run_survives_12_kills() {
    survives(&SHORT, 12, 12, 4);
}

#[test]
fn lstm_survives_16_kills() {
    survives(&LSTM, 40, 16, 3);
}

#[test]
fn transformers_survive_8_kills_each() {
    survives(&GPT, 20, 8, 5);
    survives(&VIT, 20, 8, 6);
}

/// The same where it hurts most. A number is the visit of the point, over all files, lines or checkpoints.
fn survives_at(net: &Net, points: &[&str]) {
    let folder = scratch();
    let whole = files(&net.finish(&folder.path().join("whole")));
    for point in points {
        let runs = folder.path().join(point.replace(':', "-"));
        net.crash(&runs, point);
        assert_equal(&net.finish(&runs), &whole, &format!("a kill of {} at {point}", net.name));
    }
}

#[test]
fn mlp_survives_kills_at_every_named_point() {
    let points = [
        // The first checkpoint brings its folder with it.
        "checkpoint-before-sync",
        "checkpoint-before-sync:3",
        "checkpoint-before-rename",
        "checkpoint-after-rename",
        "checkpoint-before-prune",
        "checkpoint-before-sync:8",
        "checkpoint-before-rename:4",
        "checkpoint-after-remove:4",
        "checkpoint-after-rename:4",
        "checkpoint-before-prune:4",
        "checkpoint-before-prune:9",
        "metrics-half-line",
        "metrics-half-line:20",
        "metrics-line:20",
        "metrics-half-line:118",
        // Recipe, manifest, summary.
        "file-before-sync:1",
        "file-before-rename:2",
        "file-before-sync:3",
        "file-before-rename:3",
        "file-after-rename:3",
    ];
    survives_at(&MLP, &points);
}

#[test]
fn resnet_and_lstm_survive_kills_inside_a_checkpoint() {
    for net in [&RESNET, &LSTM] {
        let points = [
            "checkpoint-before-sync:6",
            "checkpoint-before-rename:2",
            "checkpoint-after-rename:3",
            "checkpoint-before-prune:3",
        ];
        survives_at(net, &points);
    }
}

/// After each of its checkpoints, the last included: what comes after a step is not done twice and not left out.
#[test]
fn lstm_survives_a_kill_after_every_checkpoint() {
    let folder = scratch();
    let whole = files(&LSTM.finish(&folder.path().join("whole")));
    let mut killed = 0;
    loop {
        let runs = folder.path().join(killed.to_string());
        let point = format!("checkpoint-after-rename:{}", killed + 1);
        let output = LSTM.train(&runs).env("TAPER_KILL_AT", &point).output().unwrap();
        if output.status.success() {
            break;
        }
        assert_eq!(output.status.signal(), Some(libc::SIGABRT), "{}", message(&output));
        killed += 1;
        assert_equal(&LSTM.finish(&runs), &whole, &point);
    }
    let metrics = String::from_utf8(whole["metrics.jsonl"].clone()).unwrap();
    let lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let steps = lines.iter().filter(|line| line["grad_norm"].is_number()).count() as u64;
    let judged: Vec<(u64, f64)> = lines
        .iter()
        .filter(|line| line["split"] == "val")
        .map(|line| (line["step"].as_u64().unwrap(), line["perplexity"].as_f64().unwrap()))
        .collect();
    let best = (0..judged.len()).filter(|at| judged[..*at].iter().all(|earlier| judged[*at].1 < earlier.1));
    // One every four steps, one at every evaluation that is the best so far, one at the end: each step once.
    let expected: BTreeSet<u64> =
        (4..steps).step_by(4).chain(best.map(|at| judged[at].0)).chain([steps]).collect();
    assert_eq!(killed, expected.len());
}

/// A checkpoint that is written again at its own step: a run whose summary was lost after its end.
#[test]
fn the_only_checkpoint_is_never_lost() {
    let folder = scratch();
    let whole = files(&MLP.finish(&folder.path().join("whole")));
    let end = whole.keys().filter_map(|name| name.strip_prefix("checkpoints/")).next_back().unwrap();
    let end = end.split('/').next().unwrap().to_owned();
    for point in ["checkpoint-before-rename", "checkpoint-after-remove", "checkpoint-after-rename"] {
        let runs = folder.path().join(point);
        let run = MLP.finish(&runs);
        std::fs::remove_file(run.join("summary.json")).unwrap();
        for entry in std::fs::read_dir(run.join("checkpoints")).unwrap() {
            let path = entry.unwrap().path();
            if path.file_name().unwrap().to_str() != Some(&end) {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
        MLP.crash(&runs, point);
        let output = MLP.train(&runs).output().unwrap();
        assert!(output.status.success(), "{}", message(&output));
        assert!(!message(&output).contains("starting again"), "{}", message(&output));
        for file in ["model.safetensors", "optimizer.safetensors", "state.json"] {
            let name = format!("checkpoints/{end}/{file}");
            assert!(files(&run)[&name] == whole[&name], "{name} after {point}");
        }
        assert!(files(&run)["summary.json"] == whole["summary.json"], "{point}");
    }
}
