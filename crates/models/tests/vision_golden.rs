//! ResNet, DenseNet and airbench94 against the records of PyTorch's float64 results.
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use taper_models::replay::{largest_difference, relative_difference};
use taper_models::{Error, Mode, Params, Registry, Task};

type Tensors = HashMap<String, Tensor>;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

struct Case {
    model: String,
    config: Value,
    task: Task,
    tensors: Tensors,
}

fn load(name: &str) -> Case {
    taper_models::poison_uncleared_memory();
    let path = golden(&format!("{name}.safetensors"));
    let bytes = std::fs::read(&path).unwrap();
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    let mut config: Value = serde_json::from_str(&metadata["config"]).unwrap();
    let object = config.as_object_mut().unwrap();
    object.remove("batch");
    let mut size = |key: &str| object.remove(key).unwrap().as_u64().unwrap() as usize;
    let (image, channels, classes) = (size("image"), size("in_channels"), size("num_classes"));
    Case {
        model: metadata["model"].clone(),
        task: Task::Images { height: image, width: image, channels, classes },
        config,
        tensors: candle_core::safetensors::load(path, &Device::Cpu).unwrap(),
    }
}

/// The tensors whose names start with `prefix.`, without it.
fn part(tensors: &Tensors, prefix: &str) -> Tensors {
    let strip = |(name, t): (&String, &Tensor)| Some((name.strip_prefix(prefix)?.to_owned(), t.clone()));
    tensors.iter().filter_map(strip).collect()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The largest difference, as such or as a share of the largest expected magnitude.
fn error(found: &Tensor, expected: &Tensor, relative: bool) -> f64 {
    assert_eq!(found.dims(), expected.dims());
    let (found, expected) = (values(found), values(expected));
    if relative { relative_difference(&found, &expected) } else { largest_difference(&found, &expected) }
}

/// `times` the limits of the golden files' own description: logits and statistics 1e-5, loss 5e-6, gradients 5e-5
/// of a tensor's largest entry.
fn check(name: &str, precision: &str, times: f64) {
    let case = load(name);
    let params = Params::new(0);
    let mut config = case.config.clone();
    config["conv"] = json!(precision);
    let registry = Registry::builtin();
    let entry = registry.get(&case.model).unwrap();
    let mut model = entry.build(&config, case.task, params.builder(DType::F32, &Device::Cpu)).unwrap();
    params.set(&part(&case.tensors, "state.")).unwrap();
    let input = case.tensors["input"].permute((0, 2, 3, 1)).unwrap().contiguous().unwrap();
    let target = &case.tensors["target"];

    let near = |what: &str, found: &Tensor, expected: &Tensor, relative: bool, limit: f64| {
        let e = error(found, expected, relative);
        assert!(e <= limit * times, "{name} {precision} {what}: {e:e} > {:e}", limit * times);
    };
    let loss = model.loss(&input, target, Mode::Train { seed: 0, step: 0 }).unwrap();
    near("logits", loss.logits.as_ref().unwrap(), &case.tensors["train.logits"], false, 1e-5);
    near("loss", &loss.total, &case.tensors["train.loss"], false, 5e-6);
    let grads = taper_models::backward(&loss.total).unwrap();
    let expected = part(&case.tensors, "grad.");
    assert_eq!(params.trainable().len(), expected.len());
    for (name, var) in params.trainable() {
        let grad = grads.get(&var).unwrap_or_else(|| panic!("no gradient of {name}"));
        near(&name, grad, &expected[&name], true, 5e-5);
    }
    let vars: HashMap<_, _> = params.vars().into_iter().collect();
    for (name, expected) in part(&case.tensors, "after.") {
        near(&name, &vars[&name], &expected, false, 1e-5);
    }
    let loss = model.loss(&input, target, Mode::Eval).unwrap();
    near("eval logits", loss.logits.as_ref().unwrap(), &case.tensors["eval.logits"], false, 1e-5);
    near("eval loss", &loss.total, &case.tensors["eval.loss"], false, 5e-6);
    assert!(!loss.total.track_op(), "evaluation records no graph");
    for (name, expected) in part(&case.tensors, "after.") {
        near(&name, &vars[&name], &expected, false, 1e-5);
    }
}

#[test]
fn exact_convolutions_reproduce_pytorch() {
    for name in ["resnet_1111", "resnet_2222", "densenet_2222_k4", "airbench_16_32_24"] {
        check(name, "exact", 1.0);
    }
}

#[test]
fn fast_convolutions_stay_within_ten_times_the_limits() {
    for name in ["resnet_1111", "resnet_2222", "densenet_2222_k4", "airbench_16_32_24"] {
        check(name, "fast", 10.0);
    }
}

#[test]
fn parameter_counts_and_costs_equal_pytorchs() {
    let text = std::fs::read_to_string(golden("param_counts.json")).unwrap();
    let counts: HashMap<String, u64> = serde_json::from_str(&text).unwrap();
    let registry = Registry::builtin();
    for (model, classes) in [("resnet18", 10), ("resnet18", 100), ("resnet34", 10), ("resnet34", 100)]
        .into_iter()
        .chain([("densenet121", 10), ("densenet121", 100)])
    {
        let task = Task::Images { height: 32, width: 32, channels: 3, classes };
        let params = Params::new(0);
        let entry = registry.get(model).unwrap();
        entry.build(&json!({}), task, params.builder(DType::F32, &Device::Cpu)).unwrap();
        let expected = counts[&format!("{model}_{classes}")];
        assert_eq!(params.count() as u64, expected, "{model}");
        assert_eq!(entry.cost(&json!({}), task).unwrap().parameters, expected, "{model}");
    }
}

#[test]
fn imagenet_networks_have_the_published_sizes() {
    // torchvision's parameter counts.
    let registry = Registry::builtin();
    let task = Task::Images { height: 224, width: 224, channels: 3, classes: 1000 };
    for (model, parameters) in
        [("resnet50", 25_557_032), ("resnet101", 44_549_160), ("resnet152", 60_192_808)]
    {
        let cost = registry.get(model).unwrap().cost(&json!({}), task).unwrap();
        assert_eq!(cost.parameters, parameters, "{model}");
    }
    // ResNet-50 needs 4.09 G multiply-adds a picture, with the stride in the 3×3 convolution.
    let flops = registry.get("resnet50").unwrap().cost(&json!({}), task).unwrap().flops as f64;
    assert!((flops / 2.0 - 4.09e9).abs() < 0.01e9, "{flops}");
}

/// Three training steps of plain gradient descent, with every parameter and the loss at the end.
fn train(threads: usize, model: &str, config: &Value) -> Vec<Vec<u8>> {
    taper_kernels::oversubscribe();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    pool.install(|| {
        let params = Params::new(4);
        let task = Task::Images { height: 11, width: 9, channels: 3, classes: 7 };
        let registry = Registry::builtin();
        let vb = params.builder(DType::F32, &Device::Cpu);
        let mut model = registry.get(model).unwrap().build(config, task, vb).unwrap();
        let pixels: Vec<f32> =
            (0..5 * 11 * 9 * 3).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5).collect();
        let input = Tensor::from_vec(pixels, (5, 11, 9, 3), &Device::Cpu).unwrap();
        let target = Tensor::new(&[0u32, 3, 6, 2, 2], &Device::Cpu).unwrap();
        for step in 0..20 {
            let loss = model.loss(&input, &target, Mode::Train { seed: 1, step }).unwrap();
            let grads = taper_models::backward(&loss.total).unwrap();
            for (_, var) in params.trainable() {
                var.set(&(var.as_tensor() - (grads.get(&var).unwrap() * 0.05).unwrap()).unwrap()).unwrap();
            }
        }
        let bytes = |t: &Tensor| values(t).into_iter().flat_map(f64::to_le_bytes).collect();
        params.vars().iter().map(|(_, var)| bytes(var)).collect()
    })
}

#[test]
fn twenty_steps_on_one_and_two_threads_give_equal_bits() {
    let cases = [
        ("resnet", json!({"num_blocks": [1, 1], "widths": [24, 70]})),
        ("resnet", json!({"num_blocks": [1, 1], "widths": [17, 20], "conv": "fast", "block": "bottleneck"})),
        (
            "resnet",
            json!({"num_blocks": [1], "widths": [16], "stem": "imagenet", "bn_scale_init": "uniform01"}),
        ),
        ("densenet", json!({"num_blocks": [2, 3], "growth": 18})),
        ("airbench", json!({"widths": [20, 17]})),
    ];
    for (model, config) in cases {
        assert!(train(1, model, &config) == train(2, model, &config), "{model} {config}");
    }
}

#[test]
fn bad_inputs_and_configurations_are_typed_errors() {
    let registry = Registry::builtin();
    let task = Task::Images { height: 8, width: 8, channels: 3, classes: 10 };
    let build = |model: &str, config: Value, task: Task| {
        let vb = Params::new(0).builder(DType::F32, &Device::Cpu);
        registry.get(model).unwrap().build(&config, task, vb)
    };
    let refused = [
        ("resnet", json!({"widths": [8]}), task, "num_blocks"),
        ("resnet", json!({"num_blocks": [], "widths": []}), task, "widths"),
        ("resnet", json!({"num_blocks": [1], "widths": [0]}), task, "widths[0]"),
        ("resnet", json!({"depth": 3}), task, "depth"),
        ("densenet", json!({"growth": 0}), task, "growth"),
        ("densenet", json!({"reduction": 1.5}), task, "reduction"),
        ("densenet", json!({"num_blocks": [0]}), task, "num_blocks[0]"),
    ];
    for (model, config, task, key) in refused {
        match build(model, config, task).err() {
            Some(Error::Config { key: Some(found), .. } | Error::UnknownKey { key: found, .. }) => {
                assert_eq!(found, key)
            }
            other => panic!("{model} {key}: {other:?}"),
        }
    }
    assert!(build("resnet", json!({}), Task::Tokens { vocab: 5 }).is_err());

    let config = json!({"num_blocks": [1], "widths": [4]});
    let mut model = build("resnet", config, task).unwrap();
    let mut message = |input: Tensor| model.logits(&input, Mode::Eval).unwrap_err().to_string();
    let zeros = |dims: &[usize], dtype: DType| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    assert!(message(zeros(&[0, 8, 8, 3], DType::F32)).contains("found [0, 8, 8, 3]"));
    assert!(message(zeros(&[2, 8, 8], DType::F32)).contains("[n, h, w, channels]"));
    assert!(message(zeros(&[2, 8, 8, 4], DType::F32)).contains("4 / 1"));
    assert!(message(zeros(&[2, 8, 8, 3], DType::U8)).contains("u8"));
    assert!(message(zeros(&[2, 8, 8, 3], DType::F64)).contains("f64"));
}
