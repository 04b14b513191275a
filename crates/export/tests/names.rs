//! Weights under the names of timm and of Hugging Face's transformers, with their own code: ours loads there strictly, theirs here, and
//! logits are equal to a few roundings.
//!
//! `TAPER_PEER_PYTHON` names a Python with torch, safetensors, timm and transformers; without them the test says what is missing, and
//! with `TAPER_REQUIRE_TOOLS=1` it fails.
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use taper_export::weights;
use taper_models::replay::relative_difference;
use taper_models::rng::Rng;
use taper_models::{Mode, Model, Params, Registry, Task};

fn uniform(name: &str, shape: &[usize]) -> Tensor {
    let mut rng = Rng::new(5, "test", name, 0);
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rng.uniform() as f32 - 0.5).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// The logits of an input as they lie there: channels before rows, sequences before tokens.
fn logits(model: &mut dyn Model, input: &Tensor) -> Tensor {
    if input.rank() == 4 {
        let images = input.permute((0, 2, 3, 1)).unwrap().contiguous().unwrap();
        return model.logits(&images, Mode::Eval).unwrap().detach();
    }
    let (batch, time) = input.dims2().unwrap();
    let said = model.logits(&input.t().unwrap().contiguous().unwrap(), Mode::Eval).unwrap().detach();
    said.reshape((time, batch, ())).unwrap().transpose(0, 1).unwrap().contiguous().unwrap()
}

#[test]
fn weights_move_both_ways_under_the_names_of_others() {
    let images = json!({"height": 8, "width": 12, "channels": 3, "classes": 5});
    let vit = |more: Value| {
        let mut config = json!({"patch": 4, "layers": 2, "heads": 2, "emb": 8, "hidden": 12, "qkv_bias": true,
            "class_token": true, "global_pool": "token", "fc_norm": null});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("vit", config, images.clone())
    };
    let llama = |kv_heads: usize, tied: bool| {
        let config = json!({"layers": 2, "heads": 4, "kv_heads": kv_heads, "emb": 16, "hidden": 20, "block": 9, "norm_eps": 1e-5,
            "rope_theta": 5000.0, "tied": tied});
        ("llama", config, json!({"vocab": 13}))
    };
    let cases = [
        ("vit_token", vit(json!({}))),
        ("vit_mean", vit(json!({"global_pool": "avg", "class_token": false, "qkv_bias": false}))),
        ("vit_mean_of_normed", vit(json!({"global_pool": "avg", "fc_norm": false}))),
        ("llama_grouped", llama(2, false)),
        ("llama_tied", llama(4, true)),
    ];
    let folder = tempfile::tempdir().unwrap();
    let put = |name: String, bytes: Vec<u8>| std::fs::write(folder.path().join(name), bytes).unwrap();
    let mut models = BTreeMap::new();
    for (case, (name, config, sizes)) in cases {
        let size = |key: &str| sizes[key].as_u64().unwrap() as usize;
        let (task, input) = match name {
            "vit" => {
                let [height, width, channels, classes] = ["height", "width", "channels", "classes"].map(size);
                (
                    Task::Images { height, width, channels, classes },
                    uniform("images", &[3, channels, height, width]),
                )
            }
            _ => {
                let mut rng = Rng::new(5, "test", "tokens", 0);
                let tokens: Vec<i64> = (0..2 * 7).map(|_| rng.below(13) as i64).collect();
                (
                    Task::Tokens { vocab: size("vocab") },
                    Tensor::from_vec(tokens, (2, 7), &Device::Cpu).unwrap(),
                )
            }
        };
        let params = Params::new(3);
        let vb = params.builder(DType::F32, &Device::Cpu);
        let mut model = Registry::builtin().get(name).unwrap().build(&config, task, vb).unwrap();
        // Nothing stays at one or zero.
        for (name, var) in params.vars() {
            var.set(&(var.as_tensor() + uniform(&name, var.dims())).unwrap()).unwrap();
        }
        let tensors = params.vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone())).collect();
        let said = logits(&mut *model, &input);
        let record = BTreeMap::from([("input".to_owned(), input), ("logits".to_owned(), said)]);
        put(
            format!("{case}.json"),
            json!({"network": name, "config": config, "sizes": sizes}).to_string().into_bytes(),
        );
        put(format!("{case}.safetensors"), weights(&tensors, &[]).unwrap());
        put(format!("{case}.record.safetensors"), weights(&record, &[]).unwrap());
        models.insert(case.to_owned(), (model, params));
    }

    let tool = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/check_names.py");
    let python = std::env::var_os("TAPER_PEER_PYTHON").map_or("python3".into(), PathBuf::from);
    let require = std::env::var_os("TAPER_REQUIRE_TOOLS").is_some();
    let output = match Command::new(&python).arg(tool).arg(folder.path()).output() {
        Ok(output) => output,
        Err(e) if !require => return println!("skipped: {}: {e}", python.display()),
        Err(e) => panic!("{}: {e}", python.display()),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let told: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told.len(), models.len(), "{text}");
    // Some hundred roundings of f32 on the way, most of which cancel.
    let limit = 1e-5;
    for told in told {
        if let Some(missing) = told.get("missing") {
            assert!(!require, "{missing}");
            println!(
                "skipped: {missing}: TAPER_PEER_PYTHON names a Python with torch, safetensors, timm and transformers"
            );
            continue;
        }
        let (difference, largest) = (told["difference"].as_f64().unwrap(), told["largest"].as_f64().unwrap());
        assert!(difference <= limit * largest && largest > 0.1, "{told}");
        let case = told["case"].as_str().unwrap();
        let (model, params) = models.get_mut(case).unwrap();
        params.load(&folder.path().join(format!("{case}.theirs.safetensors"))).unwrap();
        let file = folder.path().join(format!("{case}.theirs.record.safetensors"));
        let record = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
        let back =
            relative_difference(&values(&logits(&mut **model, &record["input"])), &values(&record["logits"]));
        assert!(back <= limit, "{case}: their weights here are off by {back:e}");
        println!("{case}: ours there {:.1e}, theirs here {back:.1e}", difference / largest);
    }
}
