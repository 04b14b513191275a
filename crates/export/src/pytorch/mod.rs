//! A PyTorch module file, for people to read: the configuration as constants, the network, and a loader that is strict.
//!
//! It needs PyTorch alone, and expects the [weights](crate::weights) beside it under its own name with the ending `.safetensors`.
use crate::{Error, Network, Result};
use serde_json::{Value, json};
use taper_models::Task;
use taper_models::gpt::Names;
use taper_models::registry::Architecture;

/// The text of the module; `about` are constants that say where the network came from.
pub fn pytorch(network: &Network, about: &[(String, String)]) -> Result<String> {
    let (net, own) = match &network.architecture {
        Architecture::Mlp(config) => (include_str!("mlp.py"), vec![("HIDDEN", json!(config.hidden))]),
        Architecture::ResNet(config) => (
            include_str!("resnet.py"),
            vec![
                ("NUM_BLOCKS", json!(config.num_blocks)),
                ("WIDTHS", json!(config.widths)),
                ("BLOCK", json!(config.block)),
                ("STEM", json!(config.stem)),
            ],
        ),
        Architecture::DenseNet(config) => (
            include_str!("densenet.py"),
            vec![
                ("NUM_BLOCKS", json!(config.num_blocks)),
                ("GROWTH", json!(config.growth)),
                ("REDUCTION", json!(config.reduction)),
            ],
        ),
        Architecture::Airbench(config) => (
            include_str!("airbench.py"),
            vec![
                ("WIDTHS", json!(config.widths)),
                ("WHITEN_KERNEL", json!(config.whiten_kernel)),
                ("NORM_EPS", json!(config.bn_eps)),
                ("LOGIT_SCALE", json!(config.logit_scale)),
            ],
        ),
        Architecture::Lstm(config) => (
            include_str!("lstm.py"),
            vec![
                ("LAYERS", json!(config.layers)),
                ("EMBEDDING", json!(config.emb)),
                ("HIDDEN", json!(config.hidden)),
            ],
        ),
        Architecture::Gpt(config) => (
            match config.names {
                Names::NanoGpt => concat!(include_str!("transformer.py"), include_str!("gpt.py")),
                Names::Llama => concat!(include_str!("transformer.py"), include_str!("llama.py")),
            },
            vec![
                ("LAYERS", json!(config.layers)),
                ("HEADS", json!(config.heads)),
                ("KV_HEADS", json!(config.kv_heads.unwrap_or(config.heads))),
                ("EMB", json!(config.emb)),
                ("HIDDEN", json!(config.width())),
                ("BLOCK", json!(config.block)),
                ("BIAS", json!(config.bias)),
                ("NORM", json!(config.norm)),
                ("NORM_EPS", json!(config.norm_eps)),
                ("POSITIONS", json!(config.positions)),
                ("ROPE_THETA", json!(config.rope_theta)),
                ("ACTIVATION", json!(config.activation)),
                ("TIED", json!(config.tied)),
                // Without one all targets count; PyTorch's default is no token.
                ("IGNORE_INDEX", json!(config.ignore_index.unwrap_or(-100))),
            ],
        ),
        Architecture::Vit(config) => (
            concat!(include_str!("transformer.py"), include_str!("vit.py")),
            vec![
                ("PATCH", json!(config.patch)),
                ("LAYERS", json!(config.layers)),
                ("HEADS", json!(config.heads)),
                ("KV_HEADS", json!(config.heads)),
                ("EMB", json!(config.emb)),
                ("HIDDEN", json!(config.width())),
                ("QKV_BIAS", json!(config.qkv_bias)),
                ("CLASS_TOKEN", json!(config.class_token)),
                ("GLOBAL_POOL", json!(config.global_pool)),
                ("FC_NORM", json!(config.norm_comes_last())),
                ("NORM", json!("layernorm")),
                ("NORM_EPS", json!(config.norm_eps)),
                ("POSITIONS", json!("learned")),
                ("ACTIVATION", json!(config.activation)),
            ],
        ),
        _ => {
            let reason = "it is of a kind that is not written down here; safetensors has its weights".into();
            return Err(Error::Unsupported { form: "a PyTorch module", reason });
        }
    };
    let (usage, task) = match network.task {
        Task::Images { height, width, channels, classes } => {
            let bytes = network.normalize.as_ref().is_none_or(|n| n.scale != 1.0);
            let kind = if bytes { "bytes" } else { "floats" };
            let usage =
                format!("logits = net(normalize(images))  # {kind} [n, {channels}, {height}, {width}]");
            let sizes = [("CHANNELS", channels), ("ROWS", height), ("COLUMNS", width), ("CLASSES", classes)];
            (usage, sizes.to_vec())
        }
        Task::Tokens { vocab } => {
            let usage = match &network.architecture {
                Architecture::Gpt(config) => {
                    format!(
                        "logits = net(tokens)  # integers [batch, tokens], at most {} tokens",
                        config.block
                    )
                }
                _ => "logits, states = net(tokens)  # integers [steps, batch]".to_owned(),
            };
            (usage, vec![("VOCABULARY", vocab)])
        }
    };
    let mut text = format!(
        "\"\"\"A network that Taper trained, for PyTorch, as it is evaluated.\n\n    net = load()  # strictly, from the file of \
         weights beside this one\n    {usage}\n\"\"\"\n\nimport json\nimport math\nimport struct\nfrom pathlib import Path\n\n\
         import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"
    );
    let about = about.iter().map(|(key, value)| (key.to_uppercase(), json!(value)));
    let task = task.into_iter().map(|(key, value)| (key.to_owned(), json!(value)));
    let normalize = network.normalize.iter();
    let normalize =
        normalize.flat_map(|n| [("SCALE", json!(n.scale)), ("MEAN", json!(n.mean)), ("STD", json!(n.std))]);
    let constants = normalize.chain(own).map(|(key, value)| (key.to_owned(), value));
    for (key, value) in about.chain(task).chain(constants) {
        text += &format!("{key} = {}\n", literal(&value));
    }
    text += net;
    text += if network.normalize.is_some() { include_str!("normalize.py") } else { "" };
    text += include_str!("load.py");
    Ok(text)
}

/// A Python literal. JSON's texts, numbers and lists are that as they stand.
fn literal(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(literal).collect::<Vec<_>>().join(", ")),
        Value::Bool(value) => if *value { "True" } else { "False" }.to_owned(),
        value => value.to_string(),
    }
}
