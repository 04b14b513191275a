use crate::common::{GPT, LSTM, MLP, RESNET, SHORT, VIT, files, scratch};
use crate::faults::reseal;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use taper_train::{Recipe, Registries};

/// The exit code, the JSON and what was said.
fn verify(run: &Path, steps: Option<u64>) -> (Option<i32>, Value, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_taper"));
    command.args(["verify", "--quiet", "--json"]).arg(run);
    if let Some(steps) = steps {
        command.args(["--steps", &steps.to_string()]);
    }
    // The recipe in the folder is complete: the environment has no say.
    let output = command.env("TAPER__OPTIMIZER__LR", "0.5").output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap_or_default(), said)
}

#[test]
fn a_run_can_be_verified_in_part_and_to_its_end() {
    for net in [&MLP, &RESNET, &SHORT, &LSTM, &GPT, &VIT] {
        let folder = scratch();
        let run = net.finish(folder.path());
        let before = files(&run);
        let recipe = Recipe::load(run.join("recipe.yaml"), &[], &Registries::default()).unwrap();
        assert_eq!(Some(recipe.directory().as_str()), run.file_name().unwrap().to_str());

        let (code, found, said) = verify(&run, None);
        assert_eq!(code, Some(0), "{}: {said}", net.name);
        assert_eq!((&found["steps"], &found["equal_lines"]), (&1.into(), &1.into()), "{said}");
        assert_eq!(found["equal_summary"], false, "{said}");
        // The last two, and the best where it is neither.
        assert!((2..=3).contains(&found["intact"].as_array().unwrap().len()), "{said}");

        let (code, found, said) = verify(&run, Some(1_000_000));
        assert_eq!(code, Some(0), "{}: {said}", net.name);
        assert_eq!(found["equal_checkpoints"], found["intact"], "{said}");
        assert_eq!(found["equal_summary"], true, "{said}");
        let lines = before["metrics.jsonl"].iter().filter(|byte| **byte == b'\n').count();
        assert_eq!(found["equal_lines"], lines, "{said}");
        assert_eq!(files(&run), before, "verifying changed the run");
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let folder = scratch();
    let run = MLP.finish(folder.path());
    let whole = files(&run);
    let alter = |file: &str, change: &dyn Fn(String) -> String| {
        let text = fs::read_to_string(run.join(file)).unwrap();
        let changed = change(text.clone());
        assert_ne!(text, changed, "{file}");
        fs::write(run.join(file), changed).unwrap();
        let result = verify(&run, Some(4));
        fs::write(run.join(file), text).unwrap();
        result
    };
    // A better loss in the third line.
    let third = String::from_utf8(whole["metrics.jsonl"].clone()).unwrap().lines().nth(2).unwrap().to_owned();
    let better = third.replacen("\"loss\":", "\"loss\":0.", 1).replacen("0.1.", "0.1", 1);
    let value: Result<Value, _> = serde_json::from_str(&better);
    let better = if value.is_ok() { better } else { third.replacen("\"loss\":1", "\"loss\":0", 1) };
    let (code, found, said) = alter("metrics.jsonl", &|text| text.replace(&third, &better));
    assert_eq!(code, Some(1), "{said}");
    assert_eq!((&found["metrics"]["line"], &found["metrics"]["key"]), (&3.into(), &"loss".into()), "{said}");
    assert!(said.contains("not those it was written with"), "{said}");

    let (code, _, said) = alter("recipe.yaml", &|text| text.replace("lr: 0.01", "lr: 0.02"));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("recipe.yaml has the id"), "{said}");

    let (code, _, said) = alter("summary.json", &|text| text.replacen("\"value\": 0.", "\"value\": 1.", 1));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("summary.json: sha256 was"), "{said}");

    let state = whole.keys().find(|name| name.ends_with("state.json")).unwrap();
    let (code, _, said) = alter(state, &|text| text.replacen("\"epoch\": ", "\"epoch\": 1", 1));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("state.json: sha256 was"), "{said}");

    // Other instructions are no fault; equal bits are then luck, and here they are equal.
    let (code, found, said) = alter("manifest.json", &|text| {
        let mut manifest: Value = serde_json::from_str(&text).unwrap();
        manifest["stretches"][0]["host"]["cpu_features"] = serde_json::json!(["neon"]);
        String::from_utf8(reseal(manifest)).unwrap()
    });
    assert_eq!(code, Some(0), "{said}");
    assert!(found["notes"][0].as_str().unwrap().contains("bits may differ"), "{said}");

    let (code, _, said) = verify(&run, Some(0));
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("records nothing before step 1"), "{said}");
}
