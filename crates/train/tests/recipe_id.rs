//! The id of a run, and the resolved recipe that is kept beside it.

use proptest::prelude::*;
use taper_train::recipe::{Recipe, Unchecked};

fn parse(text: &str) -> Recipe {
    Recipe::parse("a.yaml", text, &[], &Unchecked).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

const BASE: &str = "name: first
data: {name: mnist, val: 0.1}
model: {name: mlp, hidden: [100]}
optimizer: {name: decgd, lr: 0.5, c: 1.0, groups: [{match: '*.bias', weight_decay: 0}]}
train: {epochs: 100, clip_norm: 1}
";

#[test]
fn equal_settings_have_equal_ids_however_they_are_written() {
    let id = parse(BASE).id().to_owned();
    assert_eq!(id.len(), 12);
    assert!(id.chars().all(|c| c.is_ascii_hexdigit() && !c.is_ascii_uppercase()), "{id}");
    let same = [
        BASE.replace("first", "second"),
        BASE.replace("c: 1.0", "c: 1"),
        BASE.replace("c: 1.0", "c: 1e0"),
        BASE.replace("lr: 0.5", "lr: 5.0e-1"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1.0}"),
        BASE.replace("lr: 0.5, c: 1.0", "c: 1.0, lr: 0.5"),
        BASE.lines().rev().collect::<Vec<_>>().join("\n"),
        format!("{BASE}seed: 1\nschedule: {{kind: constant}}\n"),
        BASE.replace("c: 1.0", "c: 1.0, eps: null"),
        // What cannot change a result.
        BASE.replace("mnist,", "mnist, verify: false,"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, log_every: 7, probe: true}"),
        BASE.replace(
            "clip_norm: 1}",
            "clip_norm: 1, checkpoint: {every_epochs: null, every_steps: 3, keep: 9}}",
        ),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, budget: {seconds: 60}, on_divergence: record}"),
        format!(
            "{BASE}cluster: {{partition: gpu, time: '1:00:00', memory: 4G, gpus: a100:2, extra: [--qos=low]}}\n"
        ),
        // Defaults that are spelled out.
        BASE.replace("clip_norm: 1}", "clip_norm: 1, shards: 1}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, eval_augment: null}"),
        BASE.replace("val: 0.1}", "val: 0.1, last_batch: keep, augment: {flip: false, crop_fill: zero}}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, eval_every: 1}"),
        format!("{BASE}schedule: {{kind: constant, per: epoch}}\n"),
    ];
    for text in same {
        assert_eq!(parse(&text).id(), id, "{text}");
    }
    let other = [
        BASE.replace("lr: 0.5", "lr: 0.50000000000000011"),
        BASE.replace("epochs: 100", "steps: 100"),
        BASE.replace("weight_decay: 0", "weight_decay: 0.1"),
        BASE.replace("[100]", "[100, 100]"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, budget: {steps: 60}}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, eval_every: 2}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, shards: 2}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, eval_augment: {kind: flip}}"),
        BASE.replace("clip_norm: 1}", "clip_norm: 1, freeze: [{match: '*.bias', after_steps: 3}]}"),
        BASE.replace("val: 0.1}", "val: 0.1, last_batch: drop}"),
        BASE.replace("val: 0.1}", "val: 0.1, augment: {flip: true}}"),
        BASE.replace("val: 0.1}", "val: 0.1, augment: {flip: alternate}}"),
        BASE.replace("val: 0.1}", "val: 0.1, augment: {crop_pad: 1, crop_fill: reflect}}"),
        BASE.replace("weight_decay: 0", "weight_decay: 0, lr_scale: 2"),
        format!("{BASE}seed: 2\n"),
    ];
    for text in other {
        assert_ne!(parse(&text).id(), id, "{text}");
    }
    let scheduled = |schedule: &str| parse(&format!("{BASE}schedule: {schedule}\n")).id().to_owned();
    let cosine = scheduled("{kind: cosine}");
    assert_eq!(scheduled("{kind: cosine, end: 0, length: null, per: epoch}"), cosine);
    for other in ["{kind: cosine, end: 0.1}", "{kind: cosine, per: step}", "{kind: cosine, length: 100}"] {
        assert_ne!(scheduled(other), cosine, "{other}");
    }
}

/// The id is part of run directories that exist: a change of this value orphans them, and must be meant.
#[test]
fn the_id_is_stable() {
    let recipe = parse("problem: {name: powell}\noptimizer: {name: adam, lr: 0.001}\ntrain: {steps: 10}\n");
    assert_eq!(recipe.id(), "aa44a7ca3ea1");
    assert_eq!(recipe.directory(), "a-aa44a7ca3ea1");
}

#[test]
fn the_resolved_recipe_reads_back_as_the_same_run() {
    let texts = [
        BASE.to_owned(),
        BASE.replace("epochs: 100", "epochs: 9, average: {kind: asgd, swap: false}, bptt: {length: 70}, early_stop: {patience: 3}, select: val"),
        BASE.replace("[100]", "[]").replace("c: 1.0", "c: 1e-300, note: 'a: b # c', on: \"yes\", empty: '', odd: \"\\u00e9\\n\", deep: {x: {y: [1, [2]]}}"),
        "problem: {name: quadratic, n: 3}\noptimizer: {name: adam, lr: 1e22}\ntrain: {steps: 10}\nseed: 18446744073709551615\n".to_owned(),
    ];
    for text in texts {
        let recipe = parse(&text);
        let yaml = recipe.to_yaml();
        let again = parse(&yaml);
        assert_eq!(again.resolved(), recipe.resolved(), "{yaml}");
        assert_eq!((again.id(), &again.name), (recipe.id(), &recipe.name), "{yaml}");
    }
}

#[test]
fn the_resolved_recipe_says_where_values_came_from() {
    let yaml = parse(BASE).to_yaml();
    let line = |start: &str| {
        yaml.lines().find(|line| line.trim_start().starts_with(start)).unwrap_or_else(|| panic!("{yaml}"))
    };
    assert!(line("lr: 0.5 ").ends_with("# a.yaml:4:30"), "{yaml}");
    assert!(line("batch_size: 128 ").ends_with("# built-in default"), "{yaml}");
    assert!(line("- {match: ").contains("weight_decay: 0"), "{yaml}");
}

proptest! {
    #[test]
    fn any_number_survives_the_resolved_recipe(x in proptest::num::f64::POSITIVE, n in any::<i64>()) {
        let text = format!("problem: {{name: p, n: {n}}}\noptimizer: {{name: adam, lr: {x:e}}}\ntrain: {{steps: 1}}\n");
        let recipe = parse(&text);
        prop_assert_eq!(recipe.optimizer.lr.to_bits(), x.to_bits());
        let again = parse(&recipe.to_yaml());
        prop_assert_eq!(again.optimizer.lr.to_bits(), x.to_bits());
        prop_assert_eq!(again.id(), recipe.id());
    }

    #[test]
    fn any_text_survives_the_resolved_recipe(text in "\\PC*") {
        let quoted = serde_json::to_string(&text).unwrap();
        let recipe = parse(&format!("problem: {{name: p, text: {quoted}}}\noptimizer: {{name: adam, lr: 1}}\ntrain: {{steps: 1}}\n"));
        prop_assert_eq!(recipe.problem.as_ref().unwrap().config["text"].as_str(), Some(text.as_str()));
        let again = parse(&recipe.to_yaml());
        prop_assert_eq!(again.resolved(), recipe.resolved());
    }
}
