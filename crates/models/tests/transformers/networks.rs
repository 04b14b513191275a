//! The networks as a trainer and a reader use them.
use crate::common::{check_gradients, near, values};
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use std::collections::HashMap;
use taper_models::gpt::Masks;
use taper_models::ops::Mask;
use taper_models::registry::Cost;
use taper_models::rng::Rng;
use taper_models::vit::{Vit, VitConfig};
use taper_models::{Error, Mode, Model, Params, Registry, Result, Task};

const TEXT: Task = Task::Tokens { vocab: 13 };
const IMAGES: Task = Task::Images { height: 8, width: 12, channels: 3, classes: 5 };
const TRAIN: Mode = Mode::Train { seed: 1, step: 7 };

fn build(name: &str, config: Value, task: Task, dtype: DType) -> Result<(Box<dyn Model>, Params)> {
    taper_models::poison_uncleared_memory();
    let params = Params::new(4);
    let model = Registry::builtin().get(name)?.build(&config, task, params.builder(dtype, &Device::Cpu))?;
    // Larger than they start, so that no part of the network is close to nothing.
    for (name, var) in
        params.vars().iter().filter(|(name, _)| name.ends_with("weight") && !name.contains("norm"))
    {
        let _ = name;
        var.set(&(var.as_tensor() * 8.0)?)?;
    }
    Ok((model, params))
}

fn tokens(name: &str, length: usize, batch: usize) -> Tensor {
    let mut rng = Rng::new(2, "test", name, 0);
    let tokens: Vec<u32> = (0..length * batch).map(|_| rng.below(13) as u32).collect();
    Tensor::from_vec(tokens, (length, batch), &Device::Cpu).unwrap()
}

fn images(n: usize) -> Tensor {
    let mut rng = Rng::new(2, "test", "images", 0);
    let values: Vec<f32> = (0..n * 8 * 12 * 3).map(|_| rng.normal() as f32).collect();
    Tensor::from_vec(values, (n, 8, 12, 3), &Device::Cpu).unwrap()
}

fn classic() -> Value {
    json!({"layers": 2, "heads": 2, "emb": 12, "block": 9, "bias": true})
}

fn modern() -> Value {
    json!({"layers": 2, "heads": 4, "kv_heads": 2, "emb": 16, "hidden": 20, "block": 9})
}

/// Both, and what mixes them.
fn texts() -> [(&'static str, Value); 4] {
    let mixed = json!({"names": "nanogpt", "layers": 2, "heads": 4, "kv_heads": 1, "emb": 16, "block": 9, "bias": true});
    let other = json!({"names": "llama", "layers": 1, "heads": 2, "emb": 12, "block": 9, "tied": false, "bias": true});
    [("gpt", classic()), ("llama", modern()), ("llama", mixed), ("gpt", other)]
}

#[test]
fn continuations_from_kept_keys_equal_passes_over_all_tokens() {
    for (name, config) in texts() {
        let (mut model, _) = build(name, config, TEXT, DType::F64).unwrap();
        let all = tokens("text", 14, 2);
        let mut seen = 0;
        // Some at a time, one at a time, and beyond the block, where the oldest fall out.
        for count in [3, 1, 1, 2, 1, 1, 1, 1, 3] {
            let next = model.next_logits(&all.narrow(0, seen, count).unwrap()).unwrap();
            seen += count;
            let first = seen.saturating_sub(9);
            let window = all.narrow(0, first, seen - first).unwrap();
            let whole = model.logits(&window, Mode::Eval).unwrap();
            let last = whole.narrow(0, whole.dims()[0] - 2, 2).unwrap();
            near(name, &next, &last, 1e-13);
        }
        // Forgotten: the first token again; another batch size begins anew too.
        let first =
            |model: &mut dyn Model, batch| values(&model.next_logits(&tokens("text", 1, batch)).unwrap());
        let alone = first(&mut *model, 1);
        let pair = first(&mut *model, 2);
        model.set_carry(&[]).unwrap();
        assert_eq!(first(&mut *model, 1), alone);
        model.set_carry(&[]).unwrap();
        assert_eq!(first(&mut *model, 2), pair);
        assert!(model.carry().is_empty());
        assert!(model.next_logits(&tokens("text", 1, 1).flatten_all().unwrap()).is_err());
    }
}

#[test]
fn recurrent_networks_continue_from_their_state() {
    let (mut model, _) = build("lstm", json!({"emb": 6, "hidden": 8}), TEXT, DType::F64).unwrap();
    let all = tokens("text", 5, 3);
    let whole = model.logits(&all, Mode::Eval).unwrap();
    model.set_carry(&[]).unwrap();
    model.next_logits(&all.narrow(0, 0, 3).unwrap()).unwrap();
    let last = model.next_logits(&all.narrow(0, 3, 2).unwrap()).unwrap();
    near("lstm", &last, &whole.narrow(0, 12, 3).unwrap(), 1e-14);
    assert!(model.next_logits(&Tensor::zeros(3, DType::U32, &Device::Cpu).unwrap()).is_err());
}

/// Loss and gradients of a part of a batch.
fn step(model: &mut dyn Model, params: &Params, input: &Tensor, target: &Tensor) -> (f64, Vec<Vec<f64>>) {
    let loss = model.loss(input, target, TRAIN).unwrap().total;
    let grads = taper_models::backward(&loss).unwrap();
    (values(&loss)[0], params.trainable().iter().map(|(_, var)| values(grads.get(var).unwrap())).collect())
}

#[test]
fn parts_of_a_batch_add_up_to_the_whole_with_every_dropout() {
    let mut cases = texts().to_vec();
    for (_, config) in &mut cases {
        config["dropout"] = json!({"embedding": 0.3, "resid": 0.2, "attention": 0.4});
    }
    for (name, config) in cases {
        let (mut model, params) = build(name, config, TEXT, DType::F64).unwrap();
        let (input, target) = (tokens("input", 7, 6), tokens("target", 7, 6));
        let mut part = |first: usize, count: usize| {
            model.set_place(first);
            let cut = |t: &Tensor| t.narrow(1, first, count).unwrap().contiguous().unwrap();
            step(&mut *model, &params, &cut(&input), &cut(&target))
        };
        let (whole, a, b) = (part(0, 6), part(0, 2), part(2, 4));
        assert!((whole.0 - (a.0 * 2.0 + b.0 * 4.0) / 6.0).abs() < 1e-12, "{name}");
        for ((whole, a), b) in whole.1.iter().zip(&a.1).zip(&b.1) {
            let sum: Vec<f64> = a.iter().zip(b).map(|(a, b)| (a * 2.0 + b * 4.0) / 6.0).collect();
            assert!(taper_models::replay::largest_difference(whole, &sum) < 1e-12, "{name}");
        }
        // Another step draws others, the same step the same.
        assert_eq!(part(0, 6).0, whole.0);
        let other = model.loss(&input, &target, Mode::Train { seed: 1, step: 8 }).unwrap().total;
        assert_ne!(values(&other)[0], whole.0);
    }
    for shares in [
        json!({"dropout": 0.3}),
        json!({"pos_drop_rate": 0.3, "proj_drop_rate": 0.2, "attn_drop_rate": 0.4, "drop_rate": 0.3}),
    ] {
        let mut config = json!({"layers": 1, "heads": 2, "emb": 8});
        config.as_object_mut().unwrap().extend(shares.as_object().unwrap().clone());
        let (mut model, params) = build("vit", config, IMAGES, DType::F32).unwrap();
        let (input, target) = (images(4), Tensor::new(&[0u32, 1, 4, 2], &Device::Cpu).unwrap());
        let mut part = |first: usize, count: usize| {
            model.set_place(first);
            let cut = |t: &Tensor| t.narrow(0, first, count).unwrap().contiguous().unwrap();
            step(&mut *model, &params, &cut(&input), &cut(&target)).0
        };
        assert!((part(0, 4) - (part(0, 1) + 3.0 * part(1, 3)) / 4.0).abs() < 1e-6, "{shares}");
    }
}

#[test]
fn each_share_of_a_vision_transformer_drops_what_it_says_and_in_training_alone() {
    let logits = |shares: Value, mode: Mode| {
        let mut config = json!({"layers": 1, "heads": 2, "emb": 8});
        config.as_object_mut().unwrap().extend(shares.as_object().unwrap().clone());
        let (mut model, _) = build("vit", config, IMAGES, DType::F32).unwrap();
        values(&model.logits(&images(3), mode).unwrap())
    };
    let plain = logits(json!({}), TRAIN);
    let mut seen = vec![plain.clone()];
    for key in ["dropout", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_rate"] {
        let with = |mode| logits(json!({key: 0.4}), mode);
        assert_eq!(with(Mode::Eval), plain, "{key}");
        assert_eq!(logits(json!({key: 0.0}), TRAIN), plain, "{key}");
        let dropped = with(TRAIN);
        assert!(!seen.contains(&dropped), "{key} drops what another does");
        assert_ne!(with(Mode::Train { seed: 1, step: 8 }), dropped, "{key} at another step");
        seen.push(dropped);
    }
    // A key that is given is what counts, and `dropout` is for those that are not.
    let both = json!({"dropout": 0.4, "pos_drop_rate": 0.0, "proj_drop_rate": 0.0});
    assert_eq!(logits(both, TRAIN), plain);
    let none =
        json!({"pos_drop_rate": null, "proj_drop_rate": null, "attn_drop_rate": null, "drop_rate": null});
    assert_eq!(logits(none, TRAIN), plain);
}

#[test]
fn what_is_dropped_between_linear_layers_and_before_the_head_is_gone_from_values_and_gradients() {
    let config = VitConfig { layers: 2, heads: 2, emb: 4, hidden: Some(3), ..VitConfig::default() };
    let task = Task::Images { height: 4, width: 8, channels: 1, classes: 3 };
    let params = Params::new(4);
    let model = Vit::new(config, task, params.builder(DType::F64, &Device::Cpu)).unwrap();
    let vars: HashMap<String, Var> = params.vars().into_iter().collect();
    for (name, var) in &vars {
        var.set(&crate::common::var(name, var.dims())).unwrap();
    }
    let input = crate::common::var("images", &[2, 4, 8, 1]);
    let logits = |masks: &Masks| model.forward(&input, masks, TRAIN).unwrap();
    let mask = |shape: &[usize], keep: fn(usize) -> bool| {
        let count = shape.iter().product();
        let factors: Vec<f64> = (0..count).map(|i| if keep(i) { 2.0 } else { 0.0 }).collect();
        Some(Mask::from_tensor(&Tensor::from_vec(factors, shape, &Device::Cpu).unwrap()).unwrap())
    };
    // Two patches and the class token.
    let inner = |keep| mask(&[2, 3, 3], keep);
    let some = Masks {
        hidden: vec![inner(|i| i % 3 != 1), None],
        head: mask(&[2, 4], |i| i != 2),
        ..Masks::default()
    };
    let watched = [
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "blocks.1.mlp.fc1.bias",
        "head.weight",
        "cls_token",
    ];
    check_gradients("vit", &watched.map(|name| &vars[name]), || logits(&some));

    // Nothing comes through what is all dropped.
    let none = Masks { head: mask(&[2, 4], |_| false), ..Masks::default() };
    let bias = vars["head.bias"].as_tensor().broadcast_as((2, 3)).unwrap();
    near("head", &logits(&none), &bias, 0.0);
    let none = Masks { hidden: vec![None, inner(|_| false)], ..Masks::default() };
    let without = logits(&none);
    let fc2 = &vars["blocks.1.mlp.fc2.weight"];
    fc2.set(&fc2.zeros_like().unwrap()).unwrap();
    near("hidden", &without, &logits(&Masks::default()), 1e-14);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let vit = ("vit", json!({"layers": 2, "heads": 2, "emb": 24, "dropout": 0.1}), IMAGES);
    let gpt = json!({"layers": 2, "heads": 3, "emb": 48, "block": 150, "dropout": {"resid": 0.1, "attention": 0.1}});
    let llama = json!({"layers": 2, "heads": 4, "kv_heads": 2, "emb": 48, "block": 150});
    for (name, config, task) in [vit, ("gpt", gpt, TEXT), ("llama", llama, TEXT)] {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let (mut model, params) = build(name, config.clone(), task, DType::F32).unwrap();
                let (input, target) = match task {
                    Task::Images { .. } => {
                        (images(9), Tensor::new(&[0u32, 1, 4, 2, 3, 3, 0, 1, 1], &Device::Cpu).unwrap())
                    }
                    Task::Tokens { .. } => (tokens("input", 140, 3), tokens("target", 140, 3)),
                };
                let (loss, grads) = step(&mut *model, &params, &input, &target);
                [vec![loss], grads.concat()].concat().into_iter().map(f64::to_bits).collect::<Vec<_>>()
            })
        };
        let one = on(1);
        assert!([2, 3, 8].into_iter().all(|threads| on(threads) == one), "{name}");
    }
}

#[test]
fn the_loss_and_the_logits_are_of_one_network_and_targets_can_be_ignored() {
    for (name, mut config) in texts() {
        config["ignore_index"] = json!(-1);
        let (mut model, _) = build(name, config, TEXT, DType::F64).unwrap();
        let (input, target) = (tokens("input", 5, 2), tokens("target", 5, 2).to_dtype(DType::I64).unwrap());
        let ignored = Tensor::new(&[[0i64, 1], [0, 0], [1, 0], [0, 0], [0, 0]], &Device::Cpu).unwrap();
        let target = ignored
            .where_cond(&Tensor::full(-1i64, (5, 2), &Device::Cpu).unwrap(), &target)
            .unwrap_or_else(|_| {
                let mask = ignored.to_dtype(DType::U8).unwrap();
                mask.where_cond(&Tensor::full(-1i64, (5, 2), &Device::Cpu).unwrap(), &target).unwrap()
            });
        let loss = values(&model.loss(&input, &target, Mode::Eval).unwrap().total)[0];
        let logits = values(&model.logits(&input, Mode::Eval).unwrap());
        let (mut sum, mut count) = (0.0, 0);
        for (row, target) in logits.chunks(13).zip(target.flatten_all().unwrap().to_vec1::<i64>().unwrap()) {
            if target >= 0 {
                sum += row.iter().map(|z| z.exp()).sum::<f64>().ln() - row[target as usize];
                count += 1;
            }
        }
        assert_eq!(count, 8);
        assert!((loss - sum / 8.0).abs() < 1e-12, "{name}: {loss} {}", sum / 8.0);
        assert_eq!(model.logits(&input, Mode::Eval).unwrap().dims(), [10, 13]);
    }
}

#[test]
fn parameters_start_as_published_and_have_published_counts() {
    let count = |name: &str, config: Value, task: Task| {
        let registry = Registry::builtin();
        registry.get(name).unwrap().cost(&config, task).unwrap().parameters
    };
    let chars = Task::Tokens { vocab: 65 };
    let cifar = Task::Images { height: 32, width: 32, channels: 3, classes: 10 };
    let photos = Task::Images { height: 224, width: 224, channels: 3, classes: 1000 };
    let gpt = |layers: usize, emb: usize, block: usize, bias: bool| json!({"layers": layers, "heads": layers, "emb": emb, "block": block, "bias": bias});
    let vit = |heads: usize, emb: usize| json!({"layers": 12, "heads": heads, "emb": emb, "patch": 16});
    let llama = |layers: usize, kv: usize, emb: usize, hidden: usize| json!({"layers": layers, "heads": 32, "kv_heads": kv, "emb": emb, "hidden": hidden});
    for (name, config, task, expected) in [
        ("gpt", gpt(4, 128, 64, false), chars, 804_096),
        ("gpt", gpt(4, 128, 64, true), chars, 809_856),
        ("gpt", gpt(6, 384, 256, false), chars, 10_745_088),
        ("gpt", gpt(6, 384, 256, true), chars, 10_770_816),
        ("gpt", gpt(12, 768, 1024, true), Task::Tokens { vocab: 50_257 }, 124_439_808),
        ("llama", llama(22, 4, 2048, 5632), Task::Tokens { vocab: 32_000 }, 1_100_048_384),
        ("llama", llama(32, 32, 4096, 11_008), Task::Tokens { vocab: 32_000 }, 6_738_415_616),
        ("llama", llama(32, 8, 4096, 14_336), Task::Tokens { vocab: 128_256 }, 8_030_261_248),
        ("vit", json!({}), cifar, 2_693_578),
        ("vit", json!({"class_token": false, "global_pool": "avg"}), cifar, 2_693_194),
        ("vit", vit(3, 192), photos, 5_717_416),
        ("vit", vit(6, 384), photos, 22_050_664),
        ("vit", vit(12, 768), photos, 86_567_656),
    ] {
        assert_eq!(count(name, config.clone(), task), expected, "{name} {config}");
    }
    // What is counted is what is built.
    for (name, config) in texts() {
        let (_, params) = build(name, config.clone(), TEXT, DType::F32).unwrap();
        assert_eq!(params.count() as u64, count(name, config, TEXT), "{name}");
    }

    let spread = |params: &Params, name: &str| {
        let vars = params.vars();
        let (_, var) = vars.iter().find(|(n, _)| n == name).unwrap_or_else(|| panic!("no {name}"));
        let values = values(var);
        (values.iter().map(|v| v * v).sum::<f64>() / values.len() as f64).sqrt()
    };
    let make = |name: &str, config: Value, task: Task| {
        let params = Params::new(4);
        Registry::builtin()
            .get(name)
            .unwrap()
            .build(&config, task, params.builder(DType::F32, &Device::Cpu))
            .unwrap();
        params
    };
    // Five standard errors of an estimate from at least 12,288 draws.
    let near =
        |found: f64, expected: f64| assert!((found / expected - 1.0).abs() < 0.032, "{found} {expected}");
    let params = make("gpt", json!({"layers": 8, "bias": true}), TEXT);
    near(spread(&params, "transformer.h.3.attn.c_attn.weight"), 0.02);
    near(spread(&params, "transformer.h.3.attn.c_proj.weight"), 0.005);
    near(spread(&params, "transformer.h.7.mlp.c_proj.weight"), 0.005);
    assert_eq!(
        [spread(&params, "transformer.ln_f.weight"), spread(&params, "transformer.ln_f.bias")],
        [1.0, 0.0]
    );
    let params = make("llama", json!({"layers": 8}), TEXT);
    near(spread(&params, "model.layers.0.self_attn.o_proj.weight"), 0.02);
    near(spread(&params, "model.layers.0.mlp.down_proj.weight"), 0.02);
    let params = make("vit", json!({}), cifar);
    near(spread(&params, "blocks.0.attn.proj.weight"), 0.02);
    near(spread(&params, "pos_embed"), 0.02);
    assert!(spread(&params, "cls_token") < 2e-6);
    // U(±1/√48) has a standard deviation of 1/12.
    assert!((spread(&params, "patch_embed.proj.weight") * 12.0 - 1.0).abs() < 0.03);
}

#[test]
fn what_a_step_is_said_to_keep_grows_with_the_length_of_a_sequence_and_not_with_its_square() {
    let kept = |block: usize, causal: bool| -> Cost {
        let (name, config, task) = match causal {
            true => ("gpt", json!({"layers": 1, "heads": 1, "emb": 8, "block": block}), TEXT),
            false => {
                let task = Task::Images { height: 4, width: 4 * (block - 1), channels: 1, classes: 2 };
                ("vit", json!({"layers": 1, "heads": 1, "emb": 8}), task)
            }
        };
        Registry::builtin().get(name).unwrap().cost(&config, task).unwrap()
    };
    // A token's share does not depend on the others.
    assert_eq!(kept(64, true).activation_bytes, kept(1024, true).activation_bytes);
    let (a, b, c) = (kept(64, false), kept(128, false), kept(192, false));
    assert_eq!(c.activation_bytes - b.activation_bytes, b.activation_bytes - a.activation_bytes);
}

#[test]
fn sizes_that_make_no_sense_are_refused_with_their_key() {
    let registry = Registry::builtin();
    for (name, config, key) in [
        ("gpt", json!({"heads": 5}), "heads"),
        ("gpt", json!({"heads": 0}), "heads"),
        ("gpt", json!({"kv_heads": 3}), "kv_heads"),
        ("gpt", json!({"kv_heads": 0}), "kv_heads"),
        ("gpt", json!({"layers": 0}), "layers"),
        ("gpt", json!({"layers": 1_000_000}), "layers"),
        ("gpt", json!({"emb": 0}), "emb"),
        ("gpt", json!({"emb": u64::MAX - 3}), "emb"),
        ("gpt", json!({"hidden": 0}), "hidden"),
        ("gpt", json!({"hidden": u64::MAX}), "hidden"),
        ("gpt", json!({"block": 0}), "block"),
        ("gpt", json!({"block": u64::MAX}), "block"),
        ("gpt", json!({"block": 1 << 20, "emb": 1 << 14}), "block"),
        ("gpt", json!({"norm_eps": 0.0}), "norm_eps"),
        ("gpt", json!({"norm_eps": -1e-5}), "norm_eps"),
        ("gpt", json!({"rope_theta": 0.0}), "rope_theta"),
        ("gpt", json!({"dropout": {"resid": 1.0}}), "dropout.resid"),
        ("gpt", json!({"dropout": {"attention": -0.1}}), "dropout.attention"),
        ("gpt", json!({"norm": "batchnorm"}), "norm"),
        ("llama", json!({"emb": 12, "heads": 4}), "heads"),
        ("llama", json!({"block": 1u64 << 40}), "block"),
        ("vit", json!({"heads": 5}), "heads"),
        ("vit", json!({"patch": 0}), "patch"),
        ("vit", json!({"patch": u64::MAX}), "patch"),
        ("vit", json!({"class_token": false}), "global_pool"),
        ("vit", json!({"dropout": 1.5}), "dropout"),
        ("vit", json!({"pos_drop_rate": 1.0}), "pos_drop_rate"),
        ("vit", json!({"proj_drop_rate": -0.1}), "proj_drop_rate"),
        ("vit", json!({"attn_drop_rate": 2}), "attn_drop_rate"),
        ("vit", json!({"drop_rate": 1}), "drop_rate"),
        ("vit", json!({"layers": 0}), "layers"),
        ("vit", json!({"emb": 1u64 << 60, "heads": 1}), "emb"),
    ] {
        match registry.get(name).unwrap().check(&config) {
            Err(Error::Config { key: found, message, .. }) => {
                assert_eq!(found.as_deref(), Some(key), "{config}: {message}")
            }
            other => panic!("{name} {config}: {other:?}"),
        }
    }
    let refused = |name: &str, config: Value, task: Task| match build(name, config, task, DType::F32) {
        Err(Error::Config { key, message, .. }) => (key.unwrap_or_default(), message),
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("accepted"),
    };
    assert_eq!(refused("vit", json!({"patch": 5}), IMAGES).0, "patch");
    assert_eq!(refused("vit", json!({}), TEXT).0, "name");
    assert_eq!(refused("gpt", json!({}), IMAGES).0, "name");
    assert_eq!(refused("gpt", json!({"emb": 1 << 20, "heads": 1}), Task::Tokens { vocab: 1 << 20 }).0, "emb");
    // Longer than it sees.
    let (mut model, _) = build("gpt", classic(), TEXT, DType::F32).unwrap();
    let message = model.logits(&tokens("long", 10, 1), TRAIN).unwrap_err().to_string();
    assert!(message.contains("1 to 9 tokens (`model.block`)") && message.contains("[1, 10]"), "{message}");
    let message = model.loss(&tokens("a", 9, 1), &tokens("b", 8, 1), TRAIN).unwrap_err().to_string();
    assert!(message.contains("targets"), "{message}");
}
