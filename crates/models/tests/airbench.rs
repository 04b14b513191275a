//! The network on whitened images: its filters, its start, what is trained, and refusals.
mod common;

use candle_core::{DType, Device, Tensor};
use common::{near, values};
use serde_json::{Value, json};
use std::collections::HashMap;
use taper_models::airbench::{Airbench, AirbenchConfig};
use taper_models::rng::Rng;
use taper_models::{Error, Mode, Model, Params, Registry, Task, backward};

const TASK: Task = Task::Images { height: 12, width: 12, channels: 3, classes: 5 };

fn small() -> AirbenchConfig {
    AirbenchConfig { widths: vec![30, 8], ..Default::default() }
}

fn build(config: &AirbenchConfig, dtype: DType) -> (Airbench, Params, HashMap<String, Tensor>) {
    let params = Params::new(7);
    let model = Airbench::new(config, TASK, params.builder(dtype, &Device::Cpu)).unwrap();
    let vars = params.vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
    (model, params, vars)
}

fn images(n: usize) -> Tensor {
    let mut rng = Rng::new(2, "test", "images", 0);
    let pixels: Vec<f64> = (0..n * 12 * 12 * 3).map(|_| rng.normal()).collect();
    Tensor::from_vec(pixels, (n, 12, 12, 3), &Device::Cpu).unwrap()
}

#[test]
fn filters_are_those_of_pytorch() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/whitening.safetensors");
    let record = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let (mut model, _, vars) = build(&small(), DType::F64);
    assert_eq!(model.wants_images(), 5000);
    model.see_images(&record["images"].permute((0, 2, 3, 1)).unwrap()).unwrap();
    // Eigenvectors of a matrix of 12 rows in f64, whose eigenvalues lie 1e-2 apart: 1e-16 over that, with a margin of a hundred.
    near("filters", &vars["whiten.weight"], &record["weight"], 1e-12);
}

#[test]
fn whitened_patches_have_unit_variance_whatever_the_threads() {
    taper_kernels::oversubscribe();
    let filters = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (mut model, _, vars) = build(&AirbenchConfig { whiten_eps: 1e-12, ..small() }, DType::F64);
            model.see_images(&images(150)).unwrap();
            vars["whiten.weight"].clone()
        })
    };
    let weight = filters(1);
    assert_eq!(values(&weight), values(&filters(3)));
    // The second moments of the outputs of the first twelve filters are the identity.
    let x = images(150).to_dtype(DType::F32).unwrap().to_dtype(DType::F64).unwrap();
    let y = x.permute((0, 3, 1, 2)).unwrap().contiguous().unwrap().conv2d(&weight, 0, 1, 1, 1).unwrap();
    let y =
        y.narrow(1, 0, 12).unwrap().transpose(0, 1).unwrap().contiguous().unwrap().flatten_from(1).unwrap();
    let moments = (y.matmul(&y.t().unwrap()).unwrap() / y.dim(1).unwrap() as f64).unwrap();
    near("moments", &moments, &Tensor::eye(12, DType::F64, &Device::Cpu).unwrap(), 1e-8);
    let negated = weight.narrow(0, 12, 12).unwrap().neg().unwrap();
    assert_eq!(values(&weight.narrow(0, 0, 12).unwrap()), values(&negated));
}

#[test]
fn convolutions_begin_as_the_identity_and_stay_what_they_are() {
    let (_, params, vars) = build(&small(), DType::F32);
    // 24 channels into 30: the first 24 are the input's; 30 into 8: all 8.
    for (name, ci, co) in [("group1.conv1", 24, 30), ("group1.conv2", 30, 30), ("group2.conv1", 30, 8)] {
        let weight = values(&vars[&format!("{name}.weight")]);
        for (i, kernel) in weight.chunks_exact(9).enumerate() {
            let (o, c) = (i / ci, i % ci);
            let dirac: Vec<f64> = (0..9).map(|tap| f64::from(u8::from(tap == 4 && o == c))).collect();
            assert_eq!(o < ci.min(co), kernel == dirac, "{name} {o} {c}");
        }
    }
    // Built again on parameters that are there, it changes none.
    let (_, var) = params.vars().into_iter().find(|(name, _)| name == "group1.conv1.weight").unwrap();
    var.set(&var.ones_like().unwrap()).unwrap();
    Airbench::new(&small(), TASK, params.builder(DType::F32, &Device::Cpu)).unwrap();
    assert!(values(&var).iter().all(|w| *w == 1.0));
}

#[test]
fn filters_are_saved_and_never_trained() {
    let (mut model, params, vars) = build(&small(), DType::F32);
    model.see_images(&images(10)).unwrap();
    assert!(values(&vars["whiten.bias"]).iter().all(|bias| *bias == 0.0));
    let before = values(&vars["whiten.weight"]);
    let x = images(4).to_dtype(DType::F32).unwrap();
    let target = Tensor::new(&[0u32, 1, 4, 4], &Device::Cpu).unwrap();
    let loss = model.loss(&x, &target, Mode::Train { seed: 1, step: 1 }).unwrap();
    let grads = backward(&loss.total).unwrap();
    assert!(grads.get(&vars["whiten.weight"]).is_none());
    let trained: Vec<String> = params.trainable().into_iter().map(|(name, _)| name).collect();
    let expected = [
        "group1.conv1.weight",
        "group1.conv2.weight",
        "group1.norm1.bias",
        "group1.norm2.bias",
        "group2.conv1.weight",
        "group2.conv2.weight",
        "group2.norm1.bias",
        "group2.norm2.bias",
        "head.weight",
        "whiten.bias",
    ];
    assert_eq!(trained, expected);
    for (name, var) in params.trainable() {
        assert!(values(grads.get(&var).unwrap()).iter().any(|g| *g != 0.0), "{name}");
    }
    assert_eq!(values(&vars["whiten.weight"]), before);
    // Statistics move by PyTorch's momentum of 0.4, and an evaluation records nothing.
    assert!(values(&vars["group1.norm1.running_var"]).iter().all(|v| *v > 0.6));
    assert!(!model.logits(&x, Mode::Eval).unwrap().track_op());
}

#[test]
fn the_papers_network_has_its_size() {
    let task = Task::Images { height: 32, width: 32, channels: 3, classes: 10 };
    let cost = Registry::builtin().get("airbench").unwrap().cost(&json!({}), task).unwrap();
    let convs = [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)];
    let weights: u64 = convs.iter().map(|(ci, co)| 9 * ci * co).sum();
    assert_eq!(cost.parameters, weights + 24 + 2 * (64 + 256 + 256) + 2560);
    assert_eq!(cost.parameters, 1_971_352);
}

#[test]
fn impossible_configurations_tasks_and_images_are_refused() {
    let registry = Registry::builtin();
    let entry = registry.get("airbench").unwrap();
    let build = |config: Value, task: Task| {
        entry.build(&config, task, Params::new(0).builder(DType::F32, &Device::Cpu))
    };
    let tiny = Task::Images { height: 8, width: 30, channels: 3, classes: 5 };
    let deep = Task::Images { height: 30, width: 30, channels: 600, classes: 5 };
    for (config, task, key) in [
        (json!({"widths": []}), TASK, "widths"),
        (json!({"widths": vec![1; 17]}), TASK, "widths"),
        (json!({"widths": [8, 0]}), TASK, "widths[1]"),
        (json!({"widths": [1_000_000_000_000u64]}), TASK, "widths[0]"),
        (json!({"whiten_kernel": 0}), TASK, "whiten_kernel"),
        (json!({"whiten_kernel": u64::MAX}), TASK, "whiten_kernel"),
        (json!({"whiten_eps": 0}), TASK, "whiten_eps"),
        (json!({"bn_eps": -1.0}), TASK, "bn_eps"),
        (json!({"bn_momentum": 1.5}), TASK, "bn_momentum"),
        (json!({"logit_scale": 0}), TASK, "logit_scale"),
        (json!({"depth": 3}), TASK, "depth"),
        (json!({}), tiny, "widths"),
        (json!({}), deep, "whiten_kernel"),
        (json!({}), Task::Tokens { vocab: 5 }, "name"),
    ] {
        match build(config.clone(), task).err() {
            Some(Error::Config { key: Some(found), .. } | Error::UnknownKey { key: found, .. }) => {
                assert_eq!(found, key, "{config}")
            }
            other => panic!("{config}: {other:?}"),
        }
    }
    let (mut model, _, vars) = self::build(&small(), DType::F32);
    let before = values(&vars["whiten.weight"]);
    let bad = (images(2) * f64::INFINITY).unwrap();
    for (images, part) in [
        (images(2).narrow(0, 0, 0).unwrap(), "at least one image"),
        (images(2).narrow(3, 0, 2).unwrap(), "3 channels"),
        (images(2).narrow(1, 0, 1).unwrap(), "2 by 2 or more"),
        (images(2).flatten_from(2).unwrap(), "[n, height, width, channels]"),
        (bad, "finite pixels"),
    ] {
        let message = model.see_images(&images).unwrap_err().to_string();
        assert!(message.starts_with("whiten: ") && message.contains(part), "{message}");
    }
    assert_eq!(values(&vars["whiten.weight"]), before);
}
