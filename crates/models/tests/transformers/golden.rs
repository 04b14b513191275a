//! Records of PyTorch's float64 results, with the limits of their description ([`Limits`]).
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use taper_kernels::Isa;
use taper_models::gpt::{Gpt, GptConfig, Masks};
use taper_models::ops::with_isa;
use taper_models::replay::{Limits, Replayed, replay};
use taper_models::{Mode, Params};

const RECORDS: [&str; 13] = [
    "gpt_bias_exact_dropout",
    "gpt_bias_exact_ignore",
    "gpt_bias_tanh",
    "gpt_nobias_exact",
    "gpt_nobias_tanh_init",
    "gpt_one_token",
    "llama_gqa2",
    "llama_gqa3_init",
    "llama_mqa_long",
    "vit_avg_cls_norm_p8",
    "vit_avg_p4",
    "vit_token_p8",
    "vit_token_p8_init",
];

fn record(name: &str) -> Vec<u8> {
    taper_models::poison_uncleared_memory();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    std::fs::read(folder.join(format!("{name}.safetensors"))).unwrap()
}

fn run(name: &str, overrides: Value, dtype: DType) -> Replayed {
    let overrides: Map<String, Value> = serde_json::from_value(overrides).unwrap();
    replay(&record(name), &overrides, dtype).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn beyond(found: &Replayed) -> Vec<String> {
    found.beyond().into_iter().map(|(name, off, limit)| format!("{name}: {off:e} > {limit:e}")).collect()
}

#[test]
fn networks_agree_with_their_records_with_every_instruction_set() {
    for (isa, name) in Isa::available().into_iter().flat_map(|isa| RECORDS.map(|name| (isa, name))) {
        let found = with_isa(isa, || run(name, json!({}), DType::F32));
        let logits = if name.ends_with("_init") { 1e-6 } else { 3e-5 };
        assert_eq!(found.limits, Limits { logits, loss: 5e-6, gradients: 5e-5, states: 1e-5 });
        assert_eq!(beyond(&found), Vec::<String>::new(), "{name} with {}", isa.name());
        assert!(found.errors.keys().any(|name| name.starts_with("grad.")));
        // The rounding of the record.
        let found = with_isa(isa, || run(name, json!({}), DType::F64));
        assert_eq!(found.limits, Limits { logits: 5e-7, loss: 5e-7, gradients: 1e-7, states: 5e-7 });
        assert_eq!(beyond(&found), Vec::<String>::new(), "{name} in f64 with {}", isa.name());
    }
}

#[test]
fn instruction_sets_that_are_tried_are_those_that_compute() {
    let errors = |isa| with_isa(isa, || run("gpt_bias_tanh", json!({}), DType::F32)).errors;
    let [poorest, .., best] = &Isa::available()[..] else { return };
    assert_ne!(errors(*poorest), errors(*best));
}

#[test]
fn a_wrong_setting_is_seen_in_the_records() {
    for (name, wrong) in [
        ("gpt_bias_tanh", json!({"activation": "gelu_exact"})),
        ("gpt_nobias_tanh_init", json!({"norm_eps": 1e-6})),
        ("gpt_nobias_exact", json!({"norm": "rmsnorm"})),
        ("llama_gqa3_init", json!({"norm_eps": 1e-5})),
        ("llama_mqa_long", json!({"rope_theta": 5000.0})),
        ("vit_avg_cls_norm_p8", json!({"global_pool": "token"})),
        ("vit_token_p8_init", json!({"norm_eps": 1e-5})),
    ] {
        assert!(!beyond(&run(name, wrong.clone(), DType::F32)).is_empty(), "{name} with {wrong}");
    }
}

/// A record of a Llama that sees one token, as f64 has it.
fn one_token() -> HashMap<String, Tensor> {
    let (params, config) = (Params::new(3), GptConfig { layers: 1, heads: 2, emb: 8, ..GptConfig::llama() });
    let mut model = Gpt::new(config, 11, params.builder(DType::F64, &Device::Cpu)).unwrap();
    for (name, var) in params.vars() {
        // Larger than they start, and as close to f32 as what is read from the record.
        let times = if name.contains("norm") { 1.0 } else { 20.0 };
        let rounded = (var.as_tensor() * times).unwrap().to_dtype(DType::F32).unwrap();
        var.set(&rounded.to_dtype(DType::F64).unwrap()).unwrap();
    }
    let tensor = |tokens: [i64; 3]| Tensor::new(&tokens, &Device::Cpu).unwrap().reshape((3, 1)).unwrap();
    let (input, target) = (tensor([3, 0, 7]), tensor([1, 10, 4]));
    let mut record = HashMap::new();
    for (name, mode) in [("train", Mode::Train { seed: 0, step: 0 }), ("eval", Mode::Eval)] {
        let hidden = model.hidden(&input, &Masks::default(), mode).unwrap();
        let loss = model.loss_of(&hidden, &target, mode).unwrap().total;
        record.insert(format!("{name}.logits"), model.decode(&hidden, mode).unwrap());
        record.insert(format!("{name}.loss"), loss.clone());
        if mode.is_train() {
            let grads = taper_models::backward(&loss).unwrap();
            let grad =
                |(name, var): (String, Var)| (format!("grad.{name}"), grads.get(&var).unwrap().clone());
            record.extend(params.trainable().into_iter().map(grad));
        }
    }
    record.extend(
        params.vars().into_iter().map(|(name, var)| (format!("state.{name}"), var.as_tensor().clone())),
    );
    let mut record: HashMap<_, _> =
        record.into_iter().map(|(name, t)| (name, t.detach().to_dtype(DType::F32).unwrap())).collect();
    record.extend([("input".to_owned(), input), ("target".to_owned(), target)]);
    record
}

fn file(record: &HashMap<String, Tensor>) -> Vec<u8> {
    let config = json!({"names": "llama", "layers": 1, "heads": 2, "emb": 8, "norm": "rmsnorm", "positions": "rotary",
        "activation": "swiglu", "tied": false, "vocab": 11, "init": "spread"});
    let metadata = [("model", "gpt".to_owned()), ("config", config.to_string())];
    let metadata = metadata.map(|(key, value)| (key.to_owned(), value)).into();
    let sorted: BTreeMap<_, _> = record.iter().collect();
    safetensors::serialize(sorted, Some(metadata)).unwrap()
}

#[test]
fn gradients_that_are_rounding_alone_are_measured_by_the_others() {
    let mut record = one_token();
    let noise = |shape: &[usize], size: f64| {
        let zeros = Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
        (zeros + size).unwrap()
    };
    // Zero in exact arithmetic: a softmax over one score does not depend on it.
    for part in ["q_proj", "k_proj"] {
        let name = format!("grad.model.layers.0.self_attn.{part}.weight");
        let shape = record[&name].dims().to_vec();
        record.insert(name, noise(&shape, 1e-17));
    }
    for dtype in [DType::F32, DType::F64] {
        let found = replay(&file(&record), &Map::new(), dtype).unwrap();
        assert_eq!(beyond(&found), Vec::<String>::new(), "{dtype:?}");
    }
    // What is no rounding is seen there too.
    for part in ["self_attn.q_proj", "input_layernorm"] {
        let mut wrong = record.clone();
        let name = format!("grad.model.layers.0.{part}.weight");
        let off = noise(record[&name].dims(), 1e-3);
        wrong.insert(name.clone(), (&record[&name] + off).unwrap());
        let found = replay(&file(&wrong), &Map::new(), DType::F32).unwrap();
        assert_eq!(found.beyond().iter().map(|(name, ..)| *name).collect::<Vec<_>>(), [&name[..]]);
    }
}

#[test]
fn records_that_say_what_is_not_meant_are_refused() {
    for (overrides, said) in [
        (json!({"heads": 5}), "divisor"),
        (json!({"emb": 1u64 << 40, "heads": 4}), "parameters"),
        (json!({"block": 3}), "expected [3, 20]"),
        (json!({"names": "timm"}), "unknown variant"),
        (json!({"layers": 1_000_000}), "layers"),
    ] {
        let overrides = serde_json::from_value(overrides).unwrap();
        let error =
            replay(&record("gpt_bias_exact_dropout"), &overrides, DType::F32).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
    }
}
