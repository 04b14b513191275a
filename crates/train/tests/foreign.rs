//! Runs that start from weights as other programs save them.
use candle_core::{DType, Device, Tensor};
use std::collections::HashMap;
use std::path::Path;
use taper_train::run::{self, Options, Outcome, RunError, Show, Split};
use taper_train::{Recipe, Registries};

const GPT: &str = "
data: {name: synthetic-text, vocab: 30, train: 600, valid: 100, test: 100, batch_size: 4, eval_batch_size: 2}
model: {name: gpt, layers: 2, heads: 2, emb: 8, block: 8, bias: true}
optimizer: {name: sgd, lr: 0.5}
train: {steps: 3, windows: {length: 8}}
";

const LLAMA: &str = "
data: {name: synthetic-text, vocab: 30, train: 600, valid: 100, test: 100, batch_size: 4, eval_batch_size: 2}
model: {name: llama, layers: 2, heads: 2, emb: 8, block: 8}
optimizer: {name: sgd, lr: 0.5}
train: {steps: 3, windows: {length: 8}}
";

const VIT: &str = "
data: {name: synthetic-images, batch_size: 16, train: 64, test: 32}
model: {name: vit, patch: 8, layers: 1, heads: 2, emb: 8}
optimizer: {name: sgd, lr: 0.5}
train: {steps: 3}
";

type Weights = HashMap<String, Tensor>;

fn attempt(text: &str, set: &[&str], runs: &Path) -> Result<Outcome, RunError> {
    let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
    let registries = Registries::default();
    let recipe = Recipe::parse("foreign.yaml", text, &set, &registries)?;
    run::run(&recipe, &registries, &Options { runs: runs.into(), show: Show::Quiet, ..Default::default() })
}

/// The last loss on the test set, to the bit.
fn loss(run: &Outcome) -> u64 {
    let tests = run.records.iter().rev().find(|record| record.split == Split::Test);
    tests.unwrap().values["loss"].to_bits()
}

/// A run's last loss, and that of one that starts from its weights as `save` leaves them and does not move.
fn both(text: &str, set: &[&str], save: impl Fn(&mut Weights)) -> Result<[u64; 2], String> {
    let folder = tempfile::tempdir().unwrap();
    let first = attempt(text, set, folder.path()).unwrap();
    let checkpoint = first.folder.join("checkpoints/step-3/model.safetensors");
    let mut weights = candle_core::safetensors::load(checkpoint, &Device::Cpu).unwrap();
    save(&mut weights);
    let file = folder.path().join("theirs.safetensors");
    candle_core::safetensors::save(&weights, &file).unwrap();
    let from = format!("train.init_from={}", file.display());
    let set = [set, &["train.steps=1", "optimizer.lr=1e-30", &from]].concat();
    let second = attempt(text, &set, folder.path()).map_err(|e| e.to_string())?;
    Ok([loss(&first), loss(&second)])
}

fn ones(shape: &[usize]) -> Tensor {
    Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap()
}

#[test]
fn a_run_starts_from_the_state_of_nanogpt() {
    let theirs = |weights: &mut Weights| {
        weights.insert("lm_head.weight".into(), weights["transformer.wte.weight"].clone());
        for layer in 0..2 {
            weights.insert(format!("transformer.h.{layer}.attn.bias"), ones(&[1, 1, 8, 8]));
        }
    };
    let [a, b] = both(GPT, &[], theirs).unwrap();
    assert_eq!(a, b);
    // As `safetensors.torch.save_model` has it, which keeps one of two names.
    let one_name = |weights: &mut Weights| {
        let table = weights.remove("transformer.wte.weight").unwrap();
        weights.insert("lm_head.weight".into(), table);
    };
    let [a, b] = both(GPT, &[], one_name).unwrap();
    assert_eq!(a, b);
    let own_head = |weights: &mut Weights| drop(weights.insert("lm_head.weight".into(), ones(&[30, 8])));
    let refused = both(GPT, &[], own_head).unwrap_err();
    for part in
        ["train.init_from", "lm_head.weight: expected the numbers of transformer.wte.weight", "`tied: false`"]
    {
        assert!(refused.contains(part), "{refused}");
    }
}

#[test]
fn a_run_starts_from_the_state_of_a_llama() {
    for tied in [false, true] {
        let theirs = |weights: &mut Weights| {
            if tied {
                weights.insert("lm_head.weight".into(), weights["model.embed_tokens.weight"].clone());
            }
            for layer in 0..2 {
                weights.insert(format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq"), ones(&[2]));
            }
        };
        let [a, b] = both(LLAMA, &[&format!("model.tied={tied}")], theirs).unwrap();
        assert_eq!(a, b);
    }
}

#[test]
fn a_run_starts_from_the_state_of_a_vision_transformer() {
    let [a, b] = both(VIT, &[], |_| ()).unwrap();
    assert_eq!(a, b);
    let refused = both(VIT, &[], |weights| drop(weights.insert("head_dist.weight".into(), ones(&[10, 8]))))
        .unwrap_err();
    assert!(refused.contains("not in the model: head_dist.weight"), "{refused}");
}

#[test]
fn a_mean_over_the_targets_that_count_is_not_taken_of_parts() {
    let folder = tempfile::tempdir().unwrap();
    for parts in ["train.accumulate=2", "train.shards=2"] {
        let refused = attempt(GPT, &["model.ignore_index=3", parts], folder.path()).unwrap_err().to_string();
        assert!(
            refused.contains("model.ignore_index: the loss is the mean over the targets that count"),
            "{refused}"
        );
        attempt(GPT, &["train.steps=1", parts], folder.path()).unwrap();
    }
    attempt(GPT, &["train.steps=1", "model.ignore_index=3"], folder.path()).unwrap();
}

/// Text by characters in files of its own.
fn letters(folder: &Path, texts: [(&str, String); 3]) -> String {
    let file = |(name, text): (&str, String)| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        format!("{name}: {}", path.display())
    };
    let files = texts.map(file).join(", ");
    format!(
        "
data: {{name: text, by: char, {files}, batch_size: 4, eval_batch_size: 2}}
model: {{name: gpt, layers: 1, heads: 2, emb: 8, block: 8, ignore_index: 1}}
optimizer: {{name: adam, lr: 0.1}}
train: {{steps: 3, windows: {{length: 8}}}}
"
    )
}

#[test]
fn evaluations_are_means_over_the_targets_that_count() {
    let folder = tempfile::tempdir().unwrap();
    // `a` is the most frequent letter, and has the number 1 after <unk>.
    let mixed = "aabcadaaebacad".repeat(9);
    let uneven =
        format!("bcdebcde{}{}bcdeaabe{}", "a".repeat(40), "eaaaaaaa".repeat(3), "bacaadae".repeat(3));
    let texts = [("train", mixed.clone()), ("valid", mixed.clone()), ("test", uneven)];
    let recipe = letters(folder.path(), texts);
    let values = |batch: usize| {
        let run = attempt(&recipe, &[&format!("data.eval_batch_size={batch}")], folder.path()).unwrap();
        run.records.iter().rev().find(|record| record.split == Split::Test).unwrap().values.clone()
    };
    // All windows at once: one mean. One at a time: some have no target that counts.
    let (together, apart) = (values(100), values(1));
    for (name, value) in &together {
        assert!((apart[name] / value - 1.0).abs() < 1e-6, "{name}: {value} {}", apart[name]);
    }
    assert!((together["bits_per_char"] * std::f64::consts::LN_2 / together["loss"] - 1.0).abs() < 1e-12);

    let only = "a".repeat(40);
    let texts = [("train", mixed.clone()), ("valid", mixed.clone()), ("test", only.clone())];
    let refused = attempt(&letters(folder.path(), texts), &[], folder.path()).unwrap_err().to_string();
    assert!(
        refused.contains("one target that is not ignored (`model.ignore_index`), found none in the test"),
        "{refused}"
    );
    let folder = tempfile::tempdir().unwrap();
    let texts = [("train", only + &"a".repeat(200) + "b"), ("valid", mixed.clone()), ("test", mixed)];
    let refused = attempt(&letters(folder.path(), texts), &[], folder.path()).unwrap_err().to_string();
    assert!(
        refused.contains("at least one target that is not ignored") && refused.contains("all ignored"),
        "{refused}"
    );
}

#[test]
fn training_lines_are_means_over_the_targets_that_count() {
    let folder = tempfile::tempdir().unwrap();
    // In order, one window a batch: the first has two targets that count, the others seven.
    let uneven = format!("{}bb{}", "a".repeat(7), "abcdebcd".repeat(5));
    let even = "abcdebcd".repeat(6);
    let recipe = letters(folder.path(), [("train", uneven), ("valid", even.clone()), ("test", even)]);
    let whole = |batch: usize| {
        let set = [
            "train.steps=null",
            "train.epochs=1",
            "train.windows.order=sequential",
            "optimizer.lr=1e-30",
            "data.max_vocab=5",
            &format!("data.batch_size={batch}"),
        ];
        let run = attempt(&recipe, &set, folder.path()).unwrap();
        run.records.iter().find(|record| record.split == Split::Train).unwrap().values["loss"]
    };
    let (one, three) = (whole(1), whole(3));
    assert!((one / three - 1.0).abs() < 1e-6, "{one} {three}");
}
