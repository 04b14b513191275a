//! Parameter groups and hyperparameters by name.
use crate::common::{AROUND, Bench, apart, bits, map, var};
use candle_core::DType;
use serde_json::{Map, Value, json};
use taper_optim::{Group, Optimizer, Registry};

fn build(name: &str, config: Value, groups: &[Group]) -> Result<Box<dyn Optimizer>, String> {
    let params = ["conv1.weight", "bn1.weight", "bn1.bias", "linear.weight", "linear.bias"];
    let params = params.map(|name| (name.to_owned(), var(&[1.0], DType::F32))).to_vec();
    let registry = Registry::builtin();
    registry.get(name).unwrap().build(params, &map(config), groups).map_err(|e| e.to_string())
}

fn refusal(name: &str, config: Value, groups: &[Group]) -> String {
    build(name, config, groups).err().expect("a refusal")
}

#[test]
fn a_pattern_that_matches_nothing_is_an_error() {
    let message = refusal("sgd", json!({}), &[Group::new("*.wieght").set("lr", 1.0)]);
    assert_eq!(
        message,
        "parameter group `*.wieght`: matches none of the 5 parameters (conv1.weight, bn1.weight, bn1.bias, \
         linear.weight, linear.bias, …)"
    );
}

#[test]
fn two_patterns_that_claim_one_parameter_are_an_error() {
    let groups = [Group::new("*.bias"), Group::new("/^bn1/")];
    let message = refusal("sgd", json!({}), &groups);
    assert_eq!(message, "parameter group `/^bn1/`: parameter `bn1.bias` also belongs to group `*.bias`");
}

#[test]
fn a_malformed_pattern_is_an_error_that_shows_it() {
    let message = refusal("sgd", json!({}), &[Group::new("/(/")]);
    assert!(message.starts_with("parameter group `/(/`: "), "{message}");
}

#[test]
fn unknown_and_bad_hyperparameters_are_named() {
    let unknown = refusal("decgd", json!({"momentun": 0.9}), &[]);
    assert!(
        unknown.starts_with("decgd: unknown hyperparameter `momentun` (did you mean `momentum`?)"),
        "{unknown}"
    );
    let in_group = refusal("decgd", json!({}), &[Group::new("*.bias").set("cc", 1.0)]);
    assert!(in_group.starts_with("decgd: unknown hyperparameter `cc` (did you mean `c`?)"), "{in_group}");
    let wrong = refusal("adam", json!({"lr": "fast"}), &[]);
    assert!(wrong.starts_with("adam: lr: ") && wrong.contains("0.001"), "{wrong}");
    let range = refusal("adam", json!({"beta1": 1.0}), &[]);
    assert_eq!(range, "adam: beta1: expected a number in [0, 1), found 1");
    let useless = refusal("decgd", json!({"weight_decay": 0.1}), &[]);
    assert!(useless.contains("no effect with `decay: none`"), "{useless}");
}

#[test]
fn no_decay_by_name_takes_biases_and_norm_layers() {
    let group = Group::no_decay_by_name();
    let pattern = group.pattern().unwrap();
    let without = [
        "0.bias",
        "bias",
        "bn.weight",
        "bn1.weight",
        "layer1.0.bn2.bias",
        "layer2.0.shortcut.1.weight",
        "layer2.0.shortcut.1.bias",
        "dense1.3.bn1.weight",
        "trans1.bn.weight",
        "norm.weight",
        "decoder.bias",
        "rnns.0.bias_ih_l0",
        "rnns.1.bias_hh_l0",
        "h.0.ln_1.weight",
        "transformer.ln_f.bias",
        "model.layers.0.input_layernorm.weight",
        "bert.embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.gamma",
        "vit.layernorm_before.weight",
        "blocks.0.norm1.weight",
        "blocks.0.norm_2.weight",
        "rms_norm.weight",
        "attn.q_norm.scale",
        "layer1.0.downsample.1.weight",
    ];
    let with = [
        "0.weight",
        "conv1.weight",
        "layer2.0.shortcut.0.weight",
        "linear.weight",
        "encoder.weight",
        "rnns.0.weight_hh_l0",
        "dense1.3.conv1.weight",
        "bias.weight",
        "norm1.linear.weight",
        "normalizer_conv.weight",
        "layer1.0.downsample.0.weight",
        "aln.weight",
    ];
    without.iter().for_each(|name| assert!(pattern.is_match(name, 2), "{name} decays"));
    with.iter().for_each(|name| assert!(!pattern.is_match(name, 1), "{name} does not decay"));
    let params = build("sgdm", json!({"weight_decay": 0.1}), &[group]).unwrap().params();
    let grouped: Vec<_> = params.iter().filter(|p| p.group.is_some()).map(|p| p.name.as_str()).collect();
    assert_eq!(grouped, ["bn1.weight", "bn1.bias", "linear.bias"]);
}

#[test]
fn any_hyperparameter_may_differ_in_a_group() {
    // Every key of every optimizer, set in a group to a value that is not the default, acts on the group as it would
    // on an optimizer of its own, and on nothing else.
    let registry = Registry::builtin();
    for name in apart().filter(|name| !AROUND.contains(name)) {
        let defaults = &registry.get(name).unwrap().defaults;
        for key in defaults.keys() {
            let other: Value = match (key.as_str(), &defaults[key]) {
                ("lr", _) => continue, // the step's context sets the rate; groups keep their ratio
                ("decay", _) => json!("l2"),
                ("x0", _) => json!("first_iterate"),
                ("ams_init", _) => json!("inf"),
                ("bound", _) => json!("falling"),
                ("previous", _) => json!("stored"),
                ("variant", _) => json!("pytorch"),
                (_, Value::Bool(on)) => json!(!on),
                (_, Value::Null) => json!(0.5),
                (_, number) => json!(number.as_f64().unwrap() * 0.5 + 0.01),
            };
            let overrides = map(json!({key: other}));
            if registry.get(name).unwrap().check(&overrides).is_err() {
                continue; // has no effect without another key, and says so
            }
            let mut group = Group::new("q");
            group.overrides = overrides.clone();
            let places = [("p".into(), 0, 6), ("q".into(), 6, 6)];
            let mut grouped = Bench::placed(name, &Map::new(), &[group], &places, DType::F32, 21);
            let mut plain = Bench::placed(name, &Map::new(), &[], &places[..1], DType::F32, 21);
            let mut own = Bench::placed(name, &overrides, &[], &places[1..], DType::F32, 21);
            [&mut grouped, &mut plain, &mut own].into_iter().for_each(|bench| bench.steps(1, 8));
            assert_eq!(bits(&grouped.params[0].1), bits(&plain.params[0].1), "{name}.{key}");
            assert_eq!(bits(&grouped.params[1].1), bits(&own.params[0].1), "{name}.{key}");
        }
    }
}

#[test]
fn groups_are_read_from_recipes() {
    let text = r#"{"match": "*.bias", "weight_decay": 0, "lr": 0.5}"#;
    let group: Group = serde_json::from_str(text).unwrap();
    assert_eq!(group, Group::new("*.bias").set("weight_decay", 0).set("lr", 0.5));
    let params = build("sgdm", json!({}), &[group]).unwrap().params();
    assert_eq!(params[4].group.as_deref(), Some("*.bias"));
    assert_eq!(params[3].group, None);
}

#[test]
fn a_rank_that_nothing_has_is_no_mistake_and_a_malformed_one_is() {
    let params = vec![(
        "w".to_owned(),
        candle_core::Var::zeros((2, 2), DType::F32, &candle_core::Device::Cpu).unwrap(),
    )];
    let registry = Registry::builtin();
    let build =
        |group| registry.get("sgd").unwrap().build(params.clone(), &Map::new(), &[group]).map(|o| o.params());
    assert_eq!(build(Group::no_decay()).unwrap()[0].group, None);
    let error = build(Group::new("rank <= one")).unwrap_err().to_string();
    assert_eq!(error, "parameter group `rank <= one`: expected `rank <= N`, found `rank <= one`");
}
