//! The networks as graphs. Sizes come from the weights, strides and the order of layers from the configuration.
use super::graph::{Attribute, FLOAT, Graph, INT64, Size};
use super::proto::Message;
use super::transformers;
use crate::{Error, Network, Result};
use taper_models::airbench::AirbenchConfig;
use taper_models::densenet::DenseNetConfig;
use taper_models::lstm::LstmConfig;
use taper_models::mlp::MlpConfig;
use taper_models::registry::Architecture;
use taper_models::resnet::{BlockKind, ResNetConfig, Stem};

/// What normalisations add to the variance.
const EPSILON: f32 = 1e-5;

pub fn graph(network: &Network) -> Result<Message> {
    let mut graph = Graph::new(network);
    let name = match &network.architecture {
        Architecture::Mlp(config) => {
            let images = images(&mut graph, network)?;
            mlp(&mut graph, config, &images)?;
            "mlp"
        }
        Architecture::ResNet(config) => {
            let images = images(&mut graph, network)?;
            resnet(&mut graph, network, config, &images)?;
            "resnet"
        }
        Architecture::DenseNet(config) => {
            let images = images(&mut graph, network)?;
            densenet(&mut graph, network, config, &images)?;
            "densenet"
        }
        Architecture::Airbench(config) => {
            let images = images(&mut graph, network)?;
            airbench(&mut graph, network, config, &images)?;
            "airbench"
        }
        Architecture::Lstm(config) => {
            lstm(&mut graph, network, config)?;
            "lstm"
        }
        Architecture::Gpt(config) => {
            transformers::gpt(&mut graph, network, config)?;
            "gpt"
        }
        Architecture::Vit(config) => {
            let images = images(&mut graph, network)?;
            transformers::vit(&mut graph, network, config, &images)?;
            "vit"
        }
        _ => {
            let reason = "it is of a kind that is not written down here; safetensors has its weights".into();
            return Err(Error::Unsupported { form: "ONNX", reason });
        }
    };
    Ok(graph.finish(name))
}

/// The images that come in and the logits that go out.
fn images(graph: &mut Graph, network: &Network) -> Result<String> {
    let [channels, height, width, classes] = network.images()?;
    graph.output("logits", &[Size::Free("n"), Size::Fixed(classes)]);
    let sizes = [Size::Free("n"), Size::Fixed(channels), Size::Fixed(height), Size::Fixed(width)];
    Ok(graph.input("images", FLOAT, &sizes))
}

pub(super) fn linear(graph: &mut Graph, x: &str, layer: &str, name: &str) -> Result<String> {
    let (weight, bias) = (graph.weight(&format!("{layer}.weight"))?, graph.weight(&format!("{layer}.bias"))?);
    Ok(graph.node("Gemm", &[x, &weight, &bias], &[("transB", Attribute::Int(1))], name))
}

fn relu(graph: &mut Graph, x: &str) -> String {
    graph.node("Relu", &[x], &[], &format!("{x}.relu"))
}

fn flat(graph: &mut Graph, x: &str) -> String {
    graph.node("Flatten", &[x], &[("axis", Attribute::Int(1))], &format!("{x}.flat"))
}

fn mlp(graph: &mut Graph, config: &MlpConfig, images: &str) -> Result<()> {
    let mut x = flat(graph, images);
    for layer in 0..config.hidden.len() {
        // PyTorch counts the ReLUs between the layers.
        let name = (2 * layer).to_string();
        x = linear(graph, &x, &name, &format!("{name}.out"))?;
        x = relu(graph, &x);
    }
    linear(graph, &x, &(2 * config.hidden.len()).to_string(), "logits").map(drop)
}

/// A convolution without bias, whose padding keeps the size at stride 1.
fn conv(graph: &mut Graph, network: &Network, x: &str, layer: &str, stride: usize) -> Result<String> {
    let weight = graph.weight(&format!("{layer}.weight"))?;
    let size = network.shape(&weight)?.last().copied().unwrap_or(1);
    let attributes = [
        ("kernel_shape", Attribute::Ints(&[size, size])),
        ("strides", Attribute::Ints(&[stride, stride])),
        ("pads", Attribute::Ints(&[size / 2; 4])),
    ];
    Ok(graph.node("Conv", &[x, &weight], &attributes, &format!("{layer}.out")))
}

fn norm(graph: &mut Graph, x: &str, layer: &str) -> Result<String> {
    let weight = graph.weight(&format!("{layer}.weight"))?;
    norm_by(graph, x, layer, weight, EPSILON)
}

/// A normalisation with that scale.
fn norm_by(graph: &mut Graph, x: &str, layer: &str, scale: String, epsilon: f32) -> Result<String> {
    let mut inputs = vec![x.to_owned(), scale];
    for part in ["bias", "running_mean", "running_var"] {
        inputs.push(graph.weight(&format!("{layer}.{part}"))?);
    }
    let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
    let epsilon = [("epsilon", Attribute::Float(epsilon))];
    Ok(graph.node("BatchNormalization", &inputs, &epsilon, &format!("{layer}.out")))
}

fn pool(graph: &mut Graph, op: &str, x: &str, size: usize, padding: usize) -> String {
    let attributes = [
        ("kernel_shape", Attribute::Ints(&[size, size])),
        ("strides", Attribute::Ints(&[2, 2])),
        ("pads", Attribute::Ints(&[padding; 4])),
    ];
    graph.node(op, &[x], &attributes, &format!("{x}.pool"))
}

fn head(graph: &mut Graph, x: &str) -> Result<()> {
    let pooled = graph.node("GlobalAveragePool", &[x], &[], "pooled");
    let x = flat(graph, &pooled);
    linear(graph, &x, "linear", "logits").map(drop)
}

fn resnet(graph: &mut Graph, network: &Network, config: &ResNetConfig, images: &str) -> Result<()> {
    let stride = if config.stem == Stem::Imagenet { 2 } else { 1 };
    let x = conv(graph, network, images, "conv1", stride)?;
    let x = norm(graph, &x, "bn1")?;
    let mut x = relu(graph, &x);
    if config.stem == Stem::Imagenet {
        x = pool(graph, "MaxPool", &x, 3, 1);
    }
    for (stage, blocks) in config.num_blocks.iter().enumerate() {
        for number in 0..*blocks {
            let stride = if stage > 0 && number == 0 { 2 } else { 1 };
            x = block(graph, network, config.block, &format!("layer{}.{number}", stage + 1), &x, stride)?;
        }
    }
    head(graph, &x)
}

fn block(
    graph: &mut Graph,
    network: &Network,
    kind: BlockKind,
    name: &str,
    x: &str,
    stride: usize,
) -> Result<String> {
    // The convolution that strides, of all.
    let (strides, convs) = if kind == BlockKind::Basic { (1, 2) } else { (2, 3) };
    let mut y = x.to_owned();
    for i in 1..=convs {
        y = conv(graph, network, &y, &format!("{name}.conv{i}"), if i == strides { stride } else { 1 })?;
        y = norm(graph, &y, &format!("{name}.bn{i}"))?;
        if i < convs {
            y = relu(graph, &y);
        }
    }
    let shortcut = match network.has(&format!("{name}.shortcut.0.weight")) {
        true => {
            let x = conv(graph, network, x, &format!("{name}.shortcut.0"), stride)?;
            norm(graph, &x, &format!("{name}.shortcut.1"))?
        }
        false => x.to_owned(),
    };
    let sum = graph.node("Add", &[&y, &shortcut], &[], &format!("{name}.sum"));
    Ok(relu(graph, &sum))
}

fn densenet(graph: &mut Graph, network: &Network, config: &DenseNetConfig, images: &str) -> Result<()> {
    let mut x = conv(graph, network, images, "conv1", 1)?;
    for (stage, layers) in config.num_blocks.iter().enumerate() {
        for layer in 0..*layers {
            let name = format!("dense{}.{layer}", stage + 1);
            let mut y = norm(graph, &x, &format!("{name}.bn1"))?;
            y = relu(graph, &y);
            y = conv(graph, network, &y, &format!("{name}.conv1"), 1)?;
            y = norm(graph, &y, &format!("{name}.bn2"))?;
            y = relu(graph, &y);
            y = conv(graph, network, &y, &format!("{name}.conv2"), 1)?;
            x = graph.node("Concat", &[&y, &x], &[("axis", Attribute::Int(1))], &format!("{name}.all"));
        }
        if stage + 1 < config.num_blocks.len() {
            let name = format!("trans{}", stage + 1);
            x = norm(graph, &x, &format!("{name}.bn"))?;
            x = relu(graph, &x);
            x = conv(graph, network, &x, &format!("{name}.conv"), 1)?;
            x = pool(graph, "AveragePool", &x, 2, 0);
        }
    }
    x = norm(graph, &x, "bn")?;
    x = relu(graph, &x);
    head(graph, &x)
}

/// What [`gelu`] takes.
pub(super) fn gelu_constants(graph: &mut Graph) {
    for (name, value) in [("root_half", std::f32::consts::FRAC_1_SQRT_2), ("one", 1.0), ("half", 0.5)] {
        graph.constant(name, &[], &[value]);
    }
}

/// x Φ(x), of operators that every opset has.
pub(super) fn gelu(graph: &mut Graph, x: &str) -> String {
    let scaled = graph.node("Mul", &[x, "root_half"], &[], &format!("{x}.scaled"));
    let erf = graph.node("Erf", &[&scaled], &[], &format!("{x}.erf"));
    let twice = graph.node("Add", &[&erf, "one"], &[], &format!("{x}.twice"));
    let share = graph.node("Mul", &[&twice, "half"], &[], &format!("{x}.share"));
    graph.node("Mul", &[x, &share], &[], &format!("{x}.gelu"))
}

fn airbench(graph: &mut Graph, network: &Network, config: &AirbenchConfig, images: &str) -> Result<()> {
    gelu_constants(graph);
    let (weight, bias) = (graph.weight("whiten.weight")?, graph.weight("whiten.bias")?);
    let size = config.whiten_kernel;
    let attributes = [("kernel_shape", Attribute::Ints(&[size, size]))];
    let x = graph.node("Conv", &[images, &weight, &bias], &attributes, "whiten.out");
    let mut x = gelu(graph, &x);
    for (number, width) in config.widths.iter().enumerate() {
        let name = format!("group{}", number + 1);
        let ones = format!("{name}.ones");
        graph.constant(&ones, &[*width], &vec![1.0; *width]);
        for i in 1..=2 {
            x = conv(graph, network, &x, &format!("{name}.conv{i}"), 1)?;
            if i == 1 {
                x = pool(graph, "MaxPool", &x, 2, 0);
            }
            x = norm_by(graph, &x, &format!("{name}.norm{i}"), ones.clone(), config.bn_eps as f32)?;
            x = gelu(graph, &x);
        }
    }
    let pooled = graph.node("GlobalMaxPool", &[&x], &[], "pooled");
    let x = flat(graph, &pooled);
    let head = graph.weight("head.weight")?;
    let attributes = [("transB", Attribute::Int(1)), ("alpha", Attribute::Float(config.logit_scale as f32))];
    graph.node("Gemm", &[&x, &head], &attributes, "logits");
    Ok(())
}

fn lstm(graph: &mut Graph, network: &Network, config: &LstmConfig) -> Result<()> {
    let encoder = graph.weight("encoder.weight")?;
    let vocabulary = network.shape(&encoder)?.first().copied().unwrap_or_default();
    let (steps, batch) = (Size::Free("steps"), Size::Free("batch"));
    let tokens = graph.input("tokens", INT64, &[steps, batch]);
    graph.output("logits", &[steps, batch, Size::Fixed(vocabulary)]);
    let axis = graph.integers("axis", &[1]);
    let mut x = graph.node("Gather", &[&encoder, &tokens], &[], "embedded");
    for layer in 0..config.layers {
        x = lstm_layer(graph, network, layer, &x, &axis)?;
    }
    let decoder =
        graph.node("Transpose", &[&encoder], &[("perm", Attribute::Ints(&[1, 0]))], "decoder.weight");
    let scores = graph.node("MatMul", &[&x, &decoder], &[], "scores");
    let bias = graph.weight("decoder.bias")?;
    graph.node("Add", &[&scores, &bias], &[], "logits");
    Ok(())
}

/// One layer: ONNX has one matrix for each of both inputs and one vector of both biases, with a leading axis of directions.
fn lstm_layer(graph: &mut Graph, network: &Network, layer: usize, x: &str, axis: &str) -> Result<String> {
    let part = |name: &str| format!("rnns.{layer}.{name}_l0");
    let shape = network.shape(&part("weight_ih"))?;
    let [rows, inputs] = shape[..] else {
        return Err(Error::Weights(format!("`{}` is no matrix", part("weight_ih"))));
    };
    let units = rows / 4;
    let gates = |name: &str| Ok::<_, Error>(in_order_of_onnx(&network.numbers(&part(name))?));
    let (w, r, b) = (part("W"), part("R"), part("B"));
    graph.constant(&w, &[1, rows, inputs], &gates("weight_ih")?);
    graph.constant(&r, &[1, rows, units], &gates("weight_hh")?);
    graph.constant(&b, &[1, 2 * rows], &[gates("bias_ih")?, gates("bias_hh")?].concat());
    let state = [Size::Fixed(1), Size::Free("batch"), Size::Fixed(units)];
    let [h, c] = ["h", "c"].map(|name| graph.input(&format!("{name}.{layer}"), FLOAT, &state));
    let [after_h, after_c] = [&h, &c].map(|name| format!("{name}.after"));
    graph.output(&after_h, &state);
    graph.output(&after_c, &state);
    let all = format!("rnns.{layer}.all");
    let hidden_size = [("hidden_size", Attribute::Int(units as i64))];
    // No input for the lengths of sequences: all are whole.
    graph.nodes("LSTM", &[x, &w, &r, &b, "", &h, &c], &hidden_size, &[&all, &after_h, &after_c]);
    Ok(graph.node("Squeeze", &[&all, axis], &[], &format!("rnns.{layer}.out")))
}

/// PyTorch's gates are input, forget, cell, output; those of ONNX input, output, forget, cell.
fn in_order_of_onnx(rows: &[f32]) -> Vec<f32> {
    let gate = rows.len() / 4;
    [0, 3, 1, 2].iter().flat_map(|i| &rows[i * gate..][..gate]).copied().collect()
}
