//! Every network of ours in every form, read by the programs that the forms are for: logits equal to a few roundings.
//!
//! `TAPER_PEER_PYTHON` names a Python with torch, onnx and onnxruntime; without them the tests say what is missing, and with
//! `TAPER_REQUIRE_TOOLS=1` they fail.
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use taper_export::{Error, Network, Normalize, onnx, pytorch, weights};
use taper_models::rng::Rng;
use taper_models::{Mode, Model, Params, Registry, Task};

const CIFAR: Task = Task::Images { height: 16, width: 16, channels: 3, classes: 5 };

/// A network with parameters and statistics that leave nothing at one or zero.
fn network(name: &str, config: Value, task: Task) -> (Network, Box<dyn Model>) {
    let (params, registry) = (Params::new(3), Registry::builtin());
    let entry = registry.get(name).unwrap();
    let model = entry.build(&config, task, params.builder(DType::F32, &Device::Cpu)).unwrap();
    for (name, var) in params.vars() {
        let last = name.rsplit('.').next().unwrap();
        let norm = ["bn", "shortcut.1", "norm", "ln_"].iter().any(|part| name.contains(part));
        let (low, high) = match last {
            "running_var" => (0.5, 1.5),
            "running_mean" => (-0.2, 0.2),
            "weight" if norm => (0.5, 1.5),
            "bias" => (-0.2, 0.2),
            _ => continue,
        };
        var.set(&uniform(&name, var.dims(), low, high)).unwrap();
    }
    let tensors = params.vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
    let architecture = entry.architecture(&config).unwrap().unwrap();
    let normalize = match task {
        Task::Images { channels, .. } => {
            Some(Normalize { scale: 255.0, mean: vec![0.5; channels], std: vec![0.25; channels] })
        }
        Task::Tokens { .. } => None,
    };
    (Network { architecture, task, normalize, tensors }, model)
}

fn uniform(name: &str, shape: &[usize], low: f64, high: f64) -> Tensor {
    let mut rng = Rng::new(5, "test", name, 0);
    let values: Vec<f32> =
        (0..shape.iter().product()).map(|_| (low + (high - low) * rng.uniform()) as f32).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// Writes a network in all forms beside what it said.
fn write(folder: &Path, network: &Network, opset: u16, record: &BTreeMap<String, Tensor>) {
    let about = [("name".to_owned(), "a \"quoted\" \\ name\n'''\"\"\"".to_owned())];
    let put = |name: &str, bytes: Vec<u8>| std::fs::write(folder.join(name), bytes).unwrap();
    put("net.py", pytorch::pytorch(network, &about).unwrap().into_bytes());
    put("net.safetensors", weights(&network.tensors, &about).unwrap());
    put("net.onnx", onnx::onnx(network, opset, &about).unwrap());
    put("record.safetensors", weights(record, &[]).unwrap());
}

/// Asks both programs for the logits. `tolerance` is in units of the largest logit.
fn check(what: &str, folder: &Path, tolerance: f64) {
    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check_export.py");
    let python = std::env::var_os("TAPER_PEER_PYTHON").map_or("python3".into(), PathBuf::from);
    let require = std::env::var_os("TAPER_REQUIRE_TOOLS").is_some();
    let output = match Command::new(&python).arg(tool).arg(folder).output() {
        Ok(output) => output,
        Err(e) if !require => return println!("skipped: {}: {e}", python.display()),
        Err(e) => panic!("{}: {e}", python.display()),
    };
    assert!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let told: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told.len(), 2, "{text}");
    for told in told {
        if let Some(missing) = told.get("missing") {
            assert!(!require, "{what}: {missing}");
            println!("skipped: {missing}: TAPER_PEER_PYTHON names a Python with torch, onnx and onnxruntime");
            continue;
        }
        let (difference, largest) = (told["difference"].as_f64().unwrap(), told["largest"].as_f64().unwrap());
        println!("{what}, {}: {difference:.1e} of {largest:.2}", told["program"]);
        // Not `>`: a difference that is no number is one.
        assert!(difference <= tolerance * largest, "{what}: {told}");
        assert!(largest > 0.0 && largest.is_finite(), "{what}: {told}");
    }
}

fn check_images(name: &str, config: Value, task: Task, opset: u16) {
    let (network, mut model) = network(name, config.clone(), task);
    let Task::Images { height, width, channels, .. } = task else { unreachable!() };
    // Ours are rows, columns, channels; theirs channels, rows, columns.
    let input = uniform("input", &[3, height, width, channels], -2.0, 2.0);
    let logits = model.logits(&input, Mode::Eval).unwrap().detach();
    let input = input.permute((0, 3, 1, 2)).unwrap();
    let record = BTreeMap::from([("input".to_owned(), input), ("logits".to_owned(), logits)]);
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &network, opset, &record);
    // Some hundred roundings of f32 on the way, most of which cancel.
    check(&format!("{name} {config} opset {opset}"), folder.path(), 1e-5);
}

#[test]
fn perceptrons_say_the_same_elsewhere() {
    check_images("mlp", json!({"hidden": [7, 6]}), CIFAR, 13);
    check_images(
        "mlp",
        json!({"hidden": []}),
        Task::Images { height: 5, width: 3, channels: 1, classes: 4 },
        21,
    );
}

#[test]
fn residual_networks_say_the_same_elsewhere() {
    check_images("resnet", json!({"num_blocks": [2, 1], "widths": [6, 8]}), CIFAR, 13);
    let config = json!({"num_blocks": [1, 2], "widths": [4, 6], "block": "bottleneck", "stem": "imagenet"});
    // Odd sizes: strides and pools drop what does not fill a window.
    check_images("resnet", config, Task::Images { height: 33, width: 29, channels: 3, classes: 5 }, 21);
    check_images("resnet18", json!({}), Task::Images { height: 32, width: 32, channels: 3, classes: 10 }, 17);
}

#[test]
fn dense_networks_say_the_same_elsewhere() {
    for opset in [13, 17, 21] {
        let config = json!({"num_blocks": [2, 3, 1], "growth": 5, "reduction": 0.4});
        check_images(
            "densenet",
            config,
            Task::Images { height: 15, width: 18, channels: 1, classes: 3 },
            opset,
        );
    }
}

#[test]
fn networks_on_whitened_images_say_the_same_elsewhere() {
    check_images("airbench", json!({"widths": [6, 8]}), CIFAR, 13);
    let config = json!({"widths": [5, 4, 3], "whiten_kernel": 3, "logit_scale": 0.5, "bn_eps": 1e-3});
    // Odd sizes: pools drop what does not fill a window.
    check_images("airbench", config, Task::Images { height: 21, width: 28, channels: 1, classes: 3 }, 21);
    check_images("airbench", json!({}), Task::Images { height: 32, width: 32, channels: 3, classes: 10 }, 17);
}

#[test]
fn language_models_say_the_same_elsewhere_and_go_on_from_their_states() {
    for (layers, opset) in [(1, 13), (3, 14), (2, 21)] {
        let config = json!({"layers": layers, "emb": 6, "hidden": 9});
        let (network, mut model) = network("lstm", config.clone(), Task::Tokens { vocab: 11 });
        let tokens = |name: &str, steps: usize| {
            let mut rng = Rng::new(5, "test", name, 0);
            let words: Vec<i64> = (0..2 * steps).map(|_| rng.below(11) as i64).collect();
            Tensor::from_vec(words, (steps, 2), &Device::Cpu).unwrap()
        };
        let mut record = BTreeMap::new();
        for (name, logits, steps) in [("tokens", "logits", 5), ("more", "more_logits", 3)] {
            let words = tokens(name, steps);
            let said = model.logits(&words, Mode::Eval).unwrap().detach().reshape((steps, 2, 11)).unwrap();
            record.extend([(name.to_owned(), words), (logits.to_owned(), said)]);
        }
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &network, opset, &record);
        check(&format!("lstm {config} opset {opset}"), folder.path(), 1e-5);
    }
}

#[test]
fn transformers_for_text_say_the_same_elsewhere() {
    let classic = json!({"layers": 2, "heads": 2, "emb": 12, "block": 9, "bias": true, "ignore_index": -1});
    let plain = json!({"layers": 1, "heads": 3, "emb": 12, "block": 9, "activation": "gelu_tanh", "tied": false,
        "hidden": 7, "ignore_index": 4});
    let modern = json!({"layers": 2, "heads": 4, "kv_heads": 2, "emb": 16, "block": 9, "ignore_index": -1});
    let mixed = json!({"names": "nanogpt", "layers": 1, "heads": 4, "kv_heads": 1, "emb": 16, "block": 9, "tied": true,
        "ignore_index": -1});
    let others = json!({"names": "llama", "layers": 1, "heads": 2, "emb": 8, "block": 9, "bias": true, "ignore_index": -1});
    for (name, config, opset) in [
        ("gpt", classic, 13),
        ("gpt", plain, 17),
        ("llama", modern, 21),
        ("llama", mixed, 18),
        ("gpt", others, 14),
    ] {
        let (network, mut model) = network(name, config.clone(), Task::Tokens { vocab: 11 });
        let mut rng = Rng::new(5, "test", "tokens", 0);
        let mut draw = || (0..2 * 7).map(|_| rng.below(11) as i64).collect::<Vec<_>>();
        let (tokens, mut targets) = (draw(), draw());
        let ignored = config["ignore_index"].as_i64().unwrap();
        targets[3] = ignored;
        let [tokens, targets] = [tokens, targets].map(|v| Tensor::from_vec(v, (2, 7), &Device::Cpu).unwrap());
        // Ours are [length, batch].
        let (input, wanted) = (tokens.t().unwrap(), targets.t().unwrap());
        let loss = model.loss(&input, &wanted, Mode::Eval).unwrap().total.detach();
        let logits = model.logits(&input, Mode::Eval).unwrap().detach().reshape((7, 2, 11)).unwrap();
        let logits = logits.transpose(0, 1).unwrap();
        let ignored = Tensor::new(ignored, &Device::Cpu).unwrap();
        let record = [
            ("tokens", tokens),
            ("targets", targets),
            ("ignored", ignored),
            ("logits", logits),
            ("loss", loss),
        ];
        let record = record.map(|(name, t)| (name.to_owned(), t.contiguous().unwrap())).into();
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &network, opset, &record);
        check(&format!("{name} {config} opset {opset}"), folder.path(), 1e-5);
    }
}

#[test]
fn exported_language_models_have_what_strict_loaders_ask_for_and_their_own_ignored_target() {
    for (name, tied, table, ignored) in [
        ("gpt", true, "transformer.wte.weight", Some(7)),
        ("gpt", false, "transformer.wte.weight", None),
        ("llama", true, "model.embed_tokens.weight", None),
    ] {
        let config =
            json!({"layers": 1, "heads": 1, "emb": 4, "block": 3, "tied": tied, "ignore_index": ignored});
        let (network, _) = network(name, config, Task::Tokens { vocab: 11 });
        assert_eq!(network.tensors.contains_key("lm_head.weight"), !tied);
        let bytes = weights(&network.tensors, &[]).unwrap();
        let back = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        assert_eq!(back.len(), network.tensors.len() + usize::from(tied));
        let rows = |name: &str| back[name].to_vec2::<f32>().unwrap();
        assert_eq!(rows("lm_head.weight") == rows(table), tied, "{name}");
        let module = pytorch::pytorch(&network, &[]).unwrap();
        assert!(module.contains(&format!("\nIGNORE_INDEX = {}\n", ignored.unwrap_or(-100))), "{module}");
        assert!(module.contains("ignore_index=IGNORE_INDEX"), "{module}");
    }
}

#[test]
fn transformers_for_images_say_the_same_elsewhere() {
    check_images("vit", json!({"layers": 2, "heads": 2, "emb": 8}), CIFAR, 13);
    let mean = json!({"layers": 1, "heads": 3, "emb": 12, "hidden": 10, "patch": 3, "qkv_bias": false, "class_token": false,
        "global_pool": "avg"});
    check_images("vit", mean, Task::Images { height: 6, width: 9, channels: 1, classes: 3 }, 18);
    let before = json!({"layers": 1, "heads": 1, "emb": 6, "patch": 8, "global_pool": "avg", "fc_norm": false,
        "activation": "gelu_tanh"});
    check_images("vit", before, CIFAR, 21);
}

#[test]
fn equal_networks_are_equal_bytes_and_opsets_that_are_not_there_are_refused() {
    let make = || network("mlp", json!({"hidden": [4]}), CIFAR).0;
    let about: Vec<_> = (0..9).map(|i| (format!("key {i}"), i.to_string())).collect();
    assert_eq!(onnx::onnx(&make(), 17, &about).unwrap(), onnx::onnx(&make(), 17, &about).unwrap());
    assert_eq!(weights(&make().tensors, &about).unwrap(), weights(&make().tensors, &about).unwrap());
    for opset in [0, 12, 22, u16::MAX] {
        let refused = onnx::onnx(&make(), opset, &[]).unwrap_err();
        assert!(matches!(refused, Error::Opset { least: 13, most: 21, .. }), "{refused}");
    }
}

#[test]
fn weights_of_another_network_are_refused() {
    let (mut network, _) = network("mlp", json!({"hidden": [4]}), CIFAR);
    network.tensors.remove("2.bias");
    let refused = onnx::onnx(&network, 17, &[]).unwrap_err().to_string();
    assert!(refused.contains("`2.bias`"), "{refused}");
}
