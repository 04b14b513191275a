//! What `plan` prints.
use super::support::{Place, SWEEP, said};
use serde_json::Value;

fn plan(place: &Place, args: &[&str]) -> String {
    let output = place.taper("plan", "runs", args).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn runs_that_are_done_are_marked() {
    let place = Place::new(SWEEP);
    let before = plan(&place, &["--no-probe"]);
    assert!(before.contains("runs: 12\n") && !before.contains("done"), "{before}");
    assert!(before.contains("mlp by decgd: 12 runs of 3 epochs, 12 steps\n"), "{before}");
    place.table("runs", &["--set", "sweep.seeds=[2]"]);
    let after = plan(&place, &["--no-probe"]);
    assert_eq!(after.lines().filter(|line| line.ends_with("seed=2  done")).count(), 4, "{after}");
    assert!(after.contains("  4 done, 8 to do\n"), "{after}");
    assert!(!after.contains("estimate"), "nothing was measured: {after}");
}

#[test]
fn parameters_are_listed_by_group_as_they_matched() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 32, test: 16, classes: 4}
model: {name: mlp, hidden: [8, 8]}
optimizer:
  name: sgdm
  lr: 0.1
  weight_decay: 0.01
  groups:
    - {match: '0.*', lr: 0.5}
    - {match: '/^4/', name: adam, lr: 0.25}
  no_decay: [bias]
train: {epochs: 1, freeze: ['2.weight']}
",
    );
    let json: Value = serde_json::from_str(&plan(&place, &["--no-probe", "--json"])).unwrap();
    let groups: Vec<(&Value, &Value, String, u64)> = json["kinds"][0]["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| {
            (&g["optimizer"], &g["settings"]["lr"], g["names"].to_string(), g["elements"].as_u64().unwrap())
        })
        .collect();
    let expected: Vec<(Value, Value, &str, u64)> = vec![
        ("sgdm".into(), 0.5.into(), r#"["0.bias","0.weight"]"#, 8 * 3072 + 8),
        ("sgdm".into(), Value::Null, r#"["2.bias"]"#, 8),
        ("adam".into(), 0.25.into(), r#"["4.bias","4.weight"]"#, 4 * 8 + 4),
        (Value::Null, Value::Null, r#"["2.weight"]"#, 64),
    ];
    let expected: Vec<_> = expected.iter().map(|(a, b, c, d)| (a, b, (*c).to_owned(), *d)).collect();
    assert_eq!(groups, expected);
    let text = plan(&place, &["--no-probe"]);
    assert!(
        text.contains("  sgdm, 0.*: 24,584 in 2 tensors\n    {lr: 0.5}\n    0.bias, 0.weight\n"),
        "{text}"
    );
    assert!(text.contains("  frozen: 64 in 1 tensor\n"), "{text}");

    for (set, parts) in [
        (
            "optimizer.groups=[{match: 'conv*', lr: 1}]",
            ["--set:1:27", "`conv*`", "matches none of the 5 parameters"],
        ),
        (
            "optimizer.groups=[{match: '/^9/', name: adam, lr: 1}]",
            ["--set:1:27", "`/^9/`", "matches no parameter"],
        ),
        ("train.freeze=['*.wieght']", ["--set:1:15", "`*.wieght`", "matches no parameter"]),
    ] {
        let output = place.taper("plan", "runs", &["--no-probe", "--set", set]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        for part in parts {
            assert!(said(&output).contains(part), "{part} in {}", said(&output));
        }
    }
}

#[test]
fn a_probe_estimates_a_whole_sweep_and_leaves_nothing() {
    let place = Place::new(SWEEP);
    let json: Value = serde_json::from_str(&plan(&place, &["--json"])).unwrap();
    let (estimate, probe) = (&json["estimate"], &json["kinds"][0]["probe"]);
    // 12 steps in all: one interval less, two of them warm-up.
    assert_eq!(probe["steps"], 9);
    let number = |value: &Value| value.as_f64().unwrap();
    assert!(number(&probe["step_seconds"]) > 0.0);
    // 32 images in batches of 16, as in training: the first batch is warm-up.
    assert_eq!(probe["evaluation_batches"], 1);
    assert!(number(&probe["evaluation_seconds"]) > 0.0);
    // Twelve steps and three evaluations.
    let run = 12.0 * number(&probe["step_seconds"]) + 3.0 * number(&probe["evaluation_seconds"]);
    assert!((number(&probe["run_seconds"]) / run - 1.0).abs() < 1e-12, "{probe}");
    assert!((number(&estimate["seconds"]) / (12.0 * run) - 1.0).abs() < 1e-12);
    assert_eq!(estimate["seconds"], estimate["missing_seconds"]);
    // Weights and DecGD's two buffers of 24,612 f32 each, and a little beside them.
    let checkpoint = probe["checkpoint_bytes"].as_u64().unwrap();
    assert!((3 * 4 * 24_612..3 * 4 * 24_612 + 8192).contains(&checkpoint), "{checkpoint}");
    assert!(place.runs("runs").is_empty());
    let text = plan(&place, &["--set", "sweep=null"]);
    for part in ["estimate for this machine with 2 threads", "  time    ", "  memory  ", "  disk    "] {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn data_that_is_not_here_is_said_and_stood_in_for() {
    let recipe = SWEEP.replace("synthetic-images, train: 64, test: 32, classes: 4", "fashion-mnist");
    let place = Place::new(&recipe);
    let text = plan(&place, &["--no-probe"]);
    assert!(text.contains("the data is not here") && text.contains("mnist in its place"), "{text}");
    // 60,000 images in batches of 16, three times.
    assert!(text.contains("12 runs of 3 epochs, 11,250 steps"), "{text}");
    // 50,000 images but 5,000 for validation, in batches of 16; of the stand-in there are fewer.
    let cifar = recipe.replace("fashion-mnist", "cifar10, val: 5000");
    let text = plan(&Place::new(&cifar), &[]);
    assert!(text.contains("synthetic-images in its place"), "{text}");
    assert!(text.contains("12 runs of 3 epochs, 8,439 steps"), "{text}");
    assert!(text.contains("(20 steps measured)"), "{text}");
    let unknown = Place::new(&recipe.replace("fashion-mnist", "text"));
    let output = unknown.taper("plan", "runs", &["--no-probe"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn an_evaluation_is_estimated_for_the_samples_it_has() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 3000, test: 2000, batch_size: 4, subset: {train: 40, test: 30}, val: 10}
model: {name: mlp, hidden: [8]}
optimizer: {name: sgd, lr: 0.1}
train: {epochs: 1}
",
    );
    let json: Value = serde_json::from_str(&plan(&place, &["--json"])).unwrap();
    assert_eq!(json["kinds"][0]["probe"]["evaluation_samples"], 30 + 10, "{json}");
}

#[test]
fn what_the_recipe_says_to_no_effect_is_shown_where_it_says_so() {
    let place = Place::new(
        "
data: {name: synthetic-images, train: 64, test: 32, batch_size: 32}
model: {name: mlp, hidden: [8]}
optimizer: {name: sgd, lr: 0.1}
schedule: {kind: milestones, per: step, at: [3, 9]}
train: {epochs: 2}
",
    );
    // Two steps an epoch, which only the data tells.
    let json: Value = serde_json::from_str(&plan(&place, &["--no-probe", "--json"])).unwrap();
    let [warning] = json["warnings"].as_array().unwrap().as_slice() else { panic!("{json}") };
    let warning = warning.as_str().unwrap();
    assert!(
        warning.contains("the milestone at 9 is never reached: the schedule ends after 4 steps"),
        "{warning}"
    );
    assert!(warning.contains("5 | schedule: {kind: milestones, per: step, at: [3, 9]}"), "{warning}");
}
