//! Records of PyTorch's float64 results, with the limits of their description: logits 3e-5, or 1e-6 where weights are as
//! published, loss 5e-6, gradients 5e-5 of a tensor's largest entry.
use candle_core::DType;
use serde_json::{Map, Value, json};
use std::path::Path;
use taper_models::replay::{Replayed, replay};

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

/// What lies beyond the limits of logits, losses and gradients.
fn beyond(found: &Replayed, [logits, loss, gradients]: [f64; 3]) -> Vec<String> {
    let limit = |name: &str| match name.rsplit('.').next().unwrap() {
        _ if name.starts_with("grad.") => (found.errors[name], gradients),
        "logits" => (found.differences[name], logits),
        _ => (found.differences[name], loss),
    };
    let names = found.errors.keys().map(|name| (name, limit(name)));
    // Not `>`: an error that is no number is one.
    names
        .filter(|(_, (off, limit))| off > limit || off.is_nan())
        .map(|(name, (off, _))| format!("{name}: {off:e}"))
        .collect()
}

#[test]
fn networks_agree_with_their_records() {
    for name in RECORDS {
        let logits = if name.ends_with("_init") { 1e-6 } else { 3e-5 };
        let found = run(name, json!({}), DType::F32);
        assert_eq!(beyond(&found, [logits, 5e-6, 5e-5]), Vec::<String>::new(), "{name}");
        assert!(found.errors.keys().any(|name| name.starts_with("grad.")));
        // The rounding of the record.
        let found = run(name, json!({}), DType::F64);
        assert_eq!(beyond(&found, [5e-7, 5e-7, 1e-7]), Vec::<String>::new(), "{name} in f64");
    }
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
        let limits = if name.ends_with("_init") { [1e-6, 5e-6, 5e-5] } else { [3e-5, 5e-6, 5e-5] };
        assert!(!beyond(&run(name, wrong.clone(), DType::F32), limits).is_empty(), "{name} with {wrong}");
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
