//! Transformers as graphs, of operators that mean the same in all opsets that are written: means are products with a column.
use super::MOST_BYTES;
use super::graph::{Attribute, Graph, INT64, Size};
use super::nets::{gelu, gelu_constants};
use crate::{Error, Network, Result};
use taper_models::gpt::{Curve, GptConfig, Names, NormKind, Positions};
use taper_models::vit::{Pool, VitConfig, VitCurve};

/// The extents of a network's blocks, and what they are called.
struct Blocks {
    emb: usize,
    heads: usize,
    kv_heads: usize,
    norm: NormKind,
    curve: Curve,
    causal: bool,
    rotary: bool,
    norms: [&'static str; 2],
    qkv: &'static [&'static str],
    out: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

impl Blocks {
    fn size(&self) -> usize {
        self.emb / self.heads.max(1)
    }

    /// Constants that all blocks share.
    fn constants(&self, graph: &mut Graph, eps: f64) {
        gelu_constants(graph);
        graph.constant("mean", &[self.emb, 1], &vec![1.0 / self.emb as f32; self.emb]);
        for (name, value) in [
            ("epsilon", eps as f32),
            ("scale", 1.0 / (self.size() as f32).sqrt()),
            ("never", f32::NEG_INFINITY),
            ("cubic", 0.044_715),
            ("root", (2.0 / std::f32::consts::PI).sqrt()),
        ] {
            graph.constant(name, &[], &[value]);
        }
        for (name, heads) in [("heads", self.heads), ("kv_heads", self.kv_heads)] {
            graph.integers(name, &[0, 0, heads as i64, self.size() as i64]);
        }
        graph.integers("flat", &[0, 0, self.emb as i64]);
        if self.heads != self.kv_heads {
            let group = self.heads / self.kv_heads.max(1);
            let served: Vec<i64> = (0..self.heads).map(|head| (head / group) as i64).collect();
            graph.integers("served", &served);
        }
    }

    fn norm(&self, graph: &mut Graph, network: &Network, x: &str, layer: &str) -> Result<String> {
        let at = |part: &str| format!("{layer}.{part}");
        let mut x = x.to_owned();
        if self.norm == NormKind::LayerNorm {
            let mean = graph.node("MatMul", &[&x, "mean"], &[], &at("mean"));
            x = graph.node("Sub", &[&x, &mean], &[], &at("centred"));
        }
        let square = graph.node("Mul", &[&x, &x], &[], &at("square"));
        let variance = graph.node("MatMul", &[&square, "mean"], &[], &at("variance"));
        let above = graph.node("Add", &[&variance, "epsilon"], &[], &at("above"));
        let root = graph.node("Sqrt", &[&above], &[], &at("root"));
        let unit = graph.node("Div", &[&x, &root], &[], &at("unit"));
        let weight = graph.weight(&at("weight"))?;
        let scaled = graph.node("Mul", &[&unit, &weight], &[], &at("scaled"));
        plus_bias(graph, network, &scaled, layer)
    }

    /// Queries, keys or values as `[batch, heads, tokens, size]`.
    fn split(&self, graph: &mut Graph, x: &str, heads: &str) -> String {
        let apart = graph.node("Reshape", &[x, heads], &[], &format!("{x}.heads"));
        graph.node(
            "Transpose",
            &[&apart],
            &[("perm", Attribute::Ints(&[0, 2, 1, 3]))],
            &format!("{x}.turned"),
        )
    }

    /// Turned by the angles of `cos` and `sin`, `[tokens, size / 2]`.
    fn rotated(&self, graph: &mut Graph, x: &str) -> String {
        let at = |part: &str| format!("{x}.{part}");
        let a = graph.node("Slice", &[x, "none", "middle", "last"], &[], &at("a"));
        let b = graph.node("Slice", &[x, "middle", "whole", "last"], &[], &at("b"));
        let mut product = |half: &str, by: &str, name: &str| graph.node("Mul", &[half, by], &[], &at(name));
        let [ac, bs, bc, as_] = [
            product(&a, "cos", "ac"),
            product(&b, "sin", "bs"),
            product(&b, "cos", "bc"),
            product(&a, "sin", "as"),
        ];
        let first = graph.node("Sub", &[&ac, &bs], &[], &at("first"));
        let second = graph.node("Add", &[&bc, &as_], &[], &at("second"));
        graph.node("Concat", &[&first, &second], &[("axis", Attribute::Int(-1))], &at("rotated"))
    }

    fn attend(&self, graph: &mut Graph, network: &Network, x: &str, name: &str) -> Result<String> {
        let at = |part: &str| format!("{name}.{part}");
        let [q, k, v] = match self.qkv {
            [q, k, v] => {
                let mut part = |part: &str| linear(graph, network, x, &at(part));
                [part(q)?, part(k)?, part(v)?]
            }
            all => {
                let layer = at(all.first().copied().unwrap_or_default());
                let all = linear(graph, network, x, &layer)?;
                let (size, emb) = (self.size() as i64, self.emb as i64);
                let kv = self.kv_heads as i64 * size;
                let mut start = 0;
                [("q", emb), ("k", kv), ("v", kv)].map(|(part, width)| {
                    let from = graph.integers(&format!("{layer}.{part}.from"), &[start]);
                    start += width;
                    let to = graph.integers(&format!("{layer}.{part}.to"), &[start]);
                    graph.node("Slice", &[&all, &from, &to, "last"], &[], &format!("{layer}.{part}"))
                })
            }
        };
        let mut q = self.split(graph, &q, "heads");
        let [mut k, mut v] = [k, v].map(|x| self.split(graph, &x, "kv_heads"));
        if self.rotary {
            (q, k) = (self.rotated(graph, &q), self.rotated(graph, &k));
        }
        if self.heads != self.kv_heads {
            let axis = [("axis", Attribute::Int(1))];
            k = graph.node("Gather", &[&k, "served"], &axis, &at("keys"));
            v = graph.node("Gather", &[&v, "served"], &axis, &at("values"));
        }
        let turned =
            graph.node("Transpose", &[&k], &[("perm", Attribute::Ints(&[0, 1, 3, 2]))], &at("turned"));
        let dots = graph.node("MatMul", &[&q, &turned], &[], &at("dots"));
        let mut scores = graph.node("Mul", &[&dots, "scale"], &[], &at("scores"));
        if self.causal {
            scores = graph.node("Where", &["later", "never", &scores], &[], &at("seen"));
        }
        let shares = graph.node("Softmax", &[&scores], &[("axis", Attribute::Int(-1))], &at("shares"));
        let mixed = graph.node("MatMul", &[&shares, &v], &[], &at("mixed"));
        let back =
            graph.node("Transpose", &[&mixed], &[("perm", Attribute::Ints(&[0, 2, 1, 3]))], &at("back"));
        let flat = graph.node("Reshape", &[&back, "flat"], &[], &at("attended"));
        linear(graph, network, &flat, &at(self.out))
    }

    fn block(&self, graph: &mut Graph, network: &Network, x: &str, name: &str) -> Result<String> {
        let at = |part: &str| format!("{name}.{part}");
        let y = self.norm(graph, network, x, &at(self.norms[0]))?;
        let y = self.attend(graph, network, &y, name)?;
        let x = graph.node("Add", &[x, &y], &[], &at("stream"));
        let y = self.norm(graph, network, &x, &at(self.norms[1]))?;
        let up = linear(graph, network, &y, &at(self.up))?;
        let y = match self.curve {
            Curve::GeluExact => gelu(graph, &up),
            Curve::GeluTanh => gelu_tanh(graph, &up),
            Curve::Swiglu => {
                let gate = linear(graph, network, &y, &at(self.gate))?;
                let share = graph.node("Sigmoid", &[&gate], &[], &at("share"));
                let silu = graph.node("Mul", &[&gate, &share], &[], &at("silu"));
                graph.node("Mul", &[&silu, &up], &[], &at("gated"))
            }
        };
        let y = linear(graph, network, &y, &at(self.down))?;
        Ok(graph.node("Add", &[&x, &y], &[], &at("out")))
    }
}

/// x (1 + tanh(√(2/π) (x + 0.044715 x³)))/2.
fn gelu_tanh(graph: &mut Graph, x: &str) -> String {
    let at = |part: &str| format!("{x}.{part}");
    let square = graph.node("Mul", &[x, x], &[], &at("square"));
    let cube = graph.node("Mul", &[&square, x], &[], &at("cube"));
    let bent = graph.node("Mul", &[&cube, "cubic"], &[], &at("bent"));
    let sum = graph.node("Add", &[x, &bent], &[], &at("sum"));
    let inner = graph.node("Mul", &[&sum, "root"], &[], &at("inner"));
    let tanh = graph.node("Tanh", &[&inner], &[], &at("tanh"));
    let twice = graph.node("Add", &[&tanh, "one"], &[], &at("twice"));
    let share = graph.node("Mul", &[&twice, "half"], &[], &at("share"));
    graph.node("Mul", &[x, &share], &[], &at("gelu"))
}

fn plus_bias(graph: &mut Graph, network: &Network, x: &str, layer: &str) -> Result<String> {
    let name = format!("{layer}.bias");
    if !network.has(&name) {
        return Ok(x.to_owned());
    }
    let bias = graph.weight(&name)?;
    Ok(graph.node("Add", &[x, &bias], &[], &format!("{layer}.out")))
}

/// Of `[…, inputs]`, with a bias if the network has one.
fn linear(graph: &mut Graph, network: &Network, x: &str, layer: &str) -> Result<String> {
    let weight = graph.weight(&format!("{layer}.weight"))?;
    let turned = graph.node(
        "Transpose",
        &[&weight],
        &[("perm", Attribute::Ints(&[1, 0]))],
        &format!("{layer}.turned"),
    );
    let product = graph.node("MatMul", &[x, &turned], &[], &format!("{layer}.product"));
    plus_bias(graph, network, &product, layer)
}

pub fn gpt(graph: &mut Graph, network: &Network, config: &GptConfig) -> Result<()> {
    let (prefix, [table, places, layers, last]) = match config.names {
        Names::NanoGpt => ("transformer", ["wte", "wpe", "h", "ln_f"]),
        Names::Llama => ("model", ["embed_tokens", "embed_positions", "layers", "norm"]),
    };
    let rotary = config.positions == Positions::Rotary;
    let blocks = Blocks {
        emb: config.emb,
        heads: config.heads,
        kv_heads: config.kv_heads.unwrap_or(config.heads),
        norm: config.norm,
        curve: config.activation,
        causal: true,
        rotary,
        norms: match config.names {
            Names::NanoGpt => ["ln_1", "ln_2"],
            Names::Llama => ["input_layernorm", "post_attention_layernorm"],
        },
        qkv: match config.names {
            Names::NanoGpt => &["attn.c_attn"],
            Names::Llama => &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        },
        out: if config.names == Names::NanoGpt { "attn.c_proj" } else { "self_attn.o_proj" },
        gate: if config.names == Names::NanoGpt { "mlp.c_gate" } else { "mlp.gate_proj" },
        up: if config.names == Names::NanoGpt { "mlp.c_fc" } else { "mlp.up_proj" },
        down: if config.names == Names::NanoGpt { "mlp.c_proj" } else { "mlp.down_proj" },
    };
    let words = graph.weight(&format!("{prefix}.{table}.weight"))?;
    let vocabulary = network.shape(&words)?.first().copied().unwrap_or_default();
    let (batch, free) = (Size::Free("batch"), Size::Free("tokens"));
    let tokens = graph.input("tokens", INT64, &[batch, free]);
    graph.output("logits", &[batch, free, Size::Fixed(vocabulary)]);
    blocks.constants(graph, config.norm_eps);

    // The places 0, 1, … of the tokens, and which of them come later than which.
    for (name, number) in [("zero", 0), ("step", 1), ("second", 1)] {
        graph.scalar(name, number);
    }
    let extents = graph.node("Shape", &[&tokens], &[], "extents");
    let length = graph.node("Gather", &[&extents, "second"], &[], "length");
    graph.node("Range", &["zero", &length, "step"], &[], "place");
    let [first, after] = [graph.integers("first_axis", &[0]), graph.integers("second_axis", &[1])];
    graph.node("Unsqueeze", &["place", &first], &[], "across");
    graph.node("Unsqueeze", &["place", &after], &[], "down");
    graph.node("Greater", &["across", "down"], &[], "later");
    graph.integers("last", &[-1]);

    let mut x = graph.node("Gather", &[&words, &tokens], &[], "embedded");
    if rotary {
        angles(graph, config, blocks.size())?;
    } else {
        let table = graph.weight(&format!("{prefix}.{places}.weight"))?;
        let rows = graph.node("Gather", &[&table, "place"], &[], "placed");
        x = graph.node("Add", &[&x, &rows], &[], "entered");
    }
    for i in 0..config.layers {
        x = blocks.block(graph, network, &x, &format!("{prefix}.{layers}.{i}"))?;
    }
    x = blocks.norm(graph, network, &x, &format!("{prefix}.{last}"))?;
    let head = if config.tied { words } else { graph.weight("lm_head.weight")? };
    let turned = graph.node("Transpose", &[&head], &[("perm", Attribute::Ints(&[1, 0]))], "decoder");
    graph.node("MatMul", &[&x, &turned], &[], "logits");
    Ok(())
}

/// Cosines and sines of the places, `[tokens, size / 2]`, from a table of all.
fn angles(graph: &mut Graph, config: &GptConfig, size: usize) -> Result<()> {
    let half = size / 2;
    if config.block.saturating_mul(size).saturating_mul(4) > MOST_BYTES / 2 {
        let reason = format!(
            "the angles of {} positions do not fit into one protobuf message of 2 GB; safetensors and pytorch have no limit",
            config.block
        );
        return Err(Error::Unsupported { form: "ONNX", reason });
    }
    let angle =
        |at: usize| (at / half) as f64 * config.rope_theta.powf(-2.0 * (at % half) as f64 / size as f64);
    let table =
        |f: fn(f64) -> f64| (0..config.block * half).map(|at| f(angle(at)) as f32).collect::<Vec<_>>();
    graph.constant("cosines", &[config.block, half], &table(f64::cos));
    graph.constant("sines", &[config.block, half], &table(f64::sin));
    graph.node("Gather", &["cosines", "place"], &[], "cos");
    graph.node("Gather", &["sines", "place"], &[], "sin");
    for (name, number) in [("none", 0), ("middle", half), ("whole", size)] {
        graph.integers(name, &[number as i64]);
    }
    Ok(())
}

pub fn vit(graph: &mut Graph, network: &Network, config: &VitConfig, images: &str) -> Result<()> {
    let blocks = Blocks {
        emb: config.emb,
        heads: config.heads,
        kv_heads: config.heads,
        norm: NormKind::LayerNorm,
        curve: match config.activation {
            VitCurve::GeluExact => Curve::GeluExact,
            VitCurve::GeluTanh => Curve::GeluTanh,
        },
        causal: false,
        rotary: false,
        norms: ["norm1", "norm2"],
        qkv: &["attn.qkv"],
        out: "attn.proj",
        gate: "mlp.gate",
        up: "mlp.fc1",
        down: "mlp.fc2",
    };
    blocks.constants(graph, config.norm_eps);
    graph.integers("last", &[-1]);
    let (weight, bias) = (graph.weight("patch_embed.proj.weight")?, graph.weight("patch_embed.proj.bias")?);
    let attributes = [
        ("kernel_shape", Attribute::Ints(&[config.patch; 2])),
        ("strides", Attribute::Ints(&[config.patch; 2])),
    ];
    let x = graph.node("Conv", &[images, &weight, &bias], &attributes, "patches");
    let rows = graph.integers("rows", &[0, config.emb as i64, -1]);
    let x = graph.node("Reshape", &[&x, &rows], &[], "columns");
    let mut x = graph.node("Transpose", &[&x], &[("perm", Attribute::Ints(&[0, 2, 1]))], "tokens");
    if config.class_token {
        let class = graph.weight("cls_token")?;
        let extents = graph.node("Shape", &[images], &[], "extents");
        let [none, first] = [graph.integers("none", &[0]), graph.integers("first", &[1])];
        let count = graph.node("Slice", &[&extents, &none, &first, &none], &[], "count");
        let rest = graph.integers("rest", &[1, config.emb as i64]);
        let shape = graph.node("Concat", &[&count, &rest], &[("axis", Attribute::Int(0))], "class_shape");
        let each = graph.node("Expand", &[&class, &shape], &[], "class");
        x = graph.node("Concat", &[&each, &x], &[("axis", Attribute::Int(1))], "all");
    }
    let places = graph.weight("pos_embed")?;
    let tokens = network.shape("pos_embed")?.get(1).copied().unwrap_or_default();
    x = graph.node("Add", &[&x, &places], &[], "entered");
    for i in 0..config.layers {
        x = blocks.block(graph, network, &x, &format!("blocks.{i}"))?;
    }
    let last = config.norm_comes_last();
    if !last {
        x = blocks.norm(graph, network, &x, "norm")?;
    }
    // The mean over some tokens: a product with a row.
    let own = usize::from(config.class_token);
    let row: Vec<f32> = match config.global_pool {
        Pool::Token => (0..tokens).map(|i| if i == 0 { 1.0 } else { 0.0 }).collect(),
        Pool::Avg => (0..tokens).map(|i| if i < own { 0.0 } else { 1.0 / (tokens - own) as f32 }).collect(),
    };
    graph.constant("seen", &[1, tokens], &row);
    x = graph.node("MatMul", &["seen", &x], &[], "pooled");
    if last {
        x = blocks.norm(graph, network, &x, "fc_norm")?;
    }
    let axis = graph.integers("tokens_axis", &[1]);
    let x = graph.node("Squeeze", &[&x, &axis], &[], "features");
    super::nets::linear(graph, &x, "head", "logits").map(drop)
}
