use crate::common::{LSTM, MLP, scratch};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The exit code and what was printed.
fn compare(a: &Path, b: &Path, json: bool) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    let output = command.arg("compare").args([a, b]).args(json.then_some("--json")).output().unwrap();
    (
        output.status.code(),
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr),
    )
}

#[test]
fn runs_are_equal_or_part_at_a_named_place() {
    let folder = scratch();
    let train = |name: &str, set: &[&str]| {
        let runs = folder.path().join(name);
        let set = set.iter().flat_map(|set| ["--set", set]);
        assert!(LSTM.train(&runs).args(set).status().unwrap().success());
        LSTM.folder(&runs)
    };
    let one = train("one", &[]);
    let (code, said) = compare(&one, &train("same", &[]), false);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.ends_with("the runs are equal\n") && said.contains("bit for bit equal"), "{said}");

    // Another number of checkpoints changes no result.
    let (code, said) = compare(&one, &train("kept", &["train.checkpoint.keep=3"]), false);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("recipe: train.checkpoint.keep: 2 | 3"), "{said}");

    // The rate is in every line, and the first step already leaves other weights.
    let other = train("other", &["optimizer.lr=0.06"]);
    let (code, said) = compare(&one, &other, false);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("recipe: optimizer.lr: 0.05 | 0.06\n"), "{said}");
    assert!(said.contains("metrics: line 1, step 1, train lr: 0.0"), "{said}");
    assert!(said.contains("model.safetensors, "), "{said}");
    let (code, said) = compare(&one, &other, true);
    assert_eq!(code, Some(1), "{said}");
    let found: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&found["equal"], &found["equal_lines"]), (&false.into(), &0.into()));
    assert_eq!((&found["metrics"]["step"], &found["metrics"]["key"]), (&1.into(), &"lr".into()));
    let bits = u64::from_str_radix(&found["metrics"]["a"]["bits"].as_str().unwrap()[2..], 16).unwrap();
    assert_eq!(f64::from_bits(bits).to_string(), found["metrics"]["a"]["value"].as_str().unwrap());
    let difference = &found["checkpoint"];
    assert!(
        difference["ulps"].as_u64().unwrap() > 0 && difference["differing"].as_u64().unwrap() > 0,
        "{said}"
    );
    assert!(difference["differing"].as_u64() <= difference["elements"].as_u64(), "{said}");

    // A milestone in the second epoch: equal up to it.
    let late = ["schedule={kind: milestones, per: epoch, at: [1], factor: 0.5}"];
    let (code, said) = compare(&one, &train("late", &late), true);
    let found: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &found["metrics"]["key"]), (Some(1), &"lr".into()), "{said}");
    let lines = std::fs::read_to_string(one.join("metrics.jsonl")).unwrap();
    let second = lines.lines().position(|line| line.contains("\"epoch\":2")).unwrap();
    assert_eq!(found["equal_lines"].as_u64().unwrap() as usize, second, "{said}");
}

#[test]
fn a_shorter_run_is_no_equal_run() {
    let folder = scratch();
    let whole = MLP.finish(&folder.path().join("whole"));
    let half = MLP.crash(&folder.path().join("half"), "metrics-half-line:20");
    let (code, said) = compare(&whole, &half, false);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("metrics: line 20, ") && said.contains("only in the first run"), "{said}");
    let (code, said) = compare(&half, &whole, false);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("only in the second run"), "{said}");
    let (code, said) = compare(&whole, &folder.path().join("nowhere"), false);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("nowhere"), "{said}");
}
