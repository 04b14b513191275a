//! One whole training step: forward pass, loss, backward pass, Adam or what the network is usually trained by.
use super::{BenchError, Case, Prepared, Work, device, stock};
use candle_core::{DType, Device, Tensor};
use serde_json::{Map, Value, json};
use taper_kernels::{Isa, Operands};
use taper_models::rng::Rng;
use taper_models::{Mode, Model, Params, Registry, Task, WithOperands, backward};
use taper_optim::StepContext;

/// A rate at which a batch that is seen again and again is not learnt by heart: with a loss near zero gradients turn
/// into denormals, and products with them are fifty times slower on either side.
const RATE: f64 = 1e-6;

/// What is trained on what.
#[derive(Clone, Debug)]
pub struct Workload {
    /// The model's name and configuration.
    pub model: &'static str,
    pub config: Value,
    /// Its task.
    pub task: Task,
    /// Samples, or sequences.
    pub batch: usize,
    /// Tokens of a sequence; 1 for images.
    pub length: usize,
    /// What trains it: `adam`, `adamw`, or `nag`, SGD with Nesterov momentum.
    pub optimizer: &'static str,
    /// What our products multiply.
    pub operands: Operands,
}

const CIFAR: Task = Task::Images { height: 32, width: 32, channels: 3, classes: 10 };
const MNIST: Task = Task::Images { height: 28, width: 28, channels: 1, classes: 10 };

impl Workload {
    pub fn mlp(hidden: &[usize], batch: usize) -> Self {
        Self {
            model: "mlp",
            config: json!({ "hidden": hidden }),
            task: MNIST,
            batch,
            length: 1,
            optimizer: "adam",
            operands: Operands::Full,
        }
    }

    pub fn conv(model: &'static str, precision: &str, batch: usize) -> Self {
        let optimizer = if model == "airbench" { "nag" } else { "adam" };
        let (config, operands) = (json!({ "conv": precision }), Operands::Full);
        Self { model, config, task: CIFAR, batch, length: 1, optimizer, operands }
    }

    /// The language model with all its dropouts.
    pub fn lstm(layers: usize, hidden: usize, batch: usize, length: usize) -> Self {
        let config = json!({ "layers": layers, "hidden": hidden, "emb": 400 });
        let task = Task::Tokens { vocab: 10_000 };
        Self { model: "lstm", config, task, batch, length, optimizer: "adam", operands: Operands::Full }
    }

    /// A transformer for text, without dropout and biases: layers, heads and features, tokens that it sees.
    pub fn gpt([layers, heads, emb]: [usize; 3], block: usize, batch: usize) -> Self {
        let config = json!({ "layers": layers, "heads": heads, "emb": emb, "block": block });
        let task = Task::Tokens { vocab: 65 };
        Self {
            model: "gpt",
            config,
            task,
            batch,
            length: block,
            optimizer: "adamw",
            operands: Operands::Full,
        }
    }

    /// A transformer for images, without dropout.
    pub fn vit([layers, heads, emb]: [usize; 3], patch: usize, batch: usize) -> Self {
        let config = json!({ "layers": layers, "heads": heads, "emb": emb, "patch": patch });
        Self {
            model: "vit",
            config,
            task: CIFAR,
            batch,
            length: 1,
            optimizer: "adamw",
            operands: Operands::Full,
        }
    }

    /// The same with products of bf16: where the CPU has an instruction for them a mode of ours that may be the best.
    fn bf16(self) -> Self {
        Self { operands: Operands::Bf16, ..self }
    }

    /// Operations of a step by the plain count: the backward pass does each product of the forward pass twice.
    pub fn gflop(&self) -> f64 {
        let registry = Registry::builtin();
        let cost = registry.get(self.model).and_then(|entry| entry.cost(&self.config, self.task));
        3e-9 * cost.map_or(0.0, |cost| cost.flops as f64) * (self.batch * self.length) as f64
    }

    /// What it trains, in words.
    pub fn name(&self) -> String {
        match self.config["layers"].as_u64() {
            Some(layers) => format!("{}{layers}", self.model),
            None => self.model.to_owned(),
        }
    }

    /// The numbers it trains.
    pub fn parameters(&self) -> usize {
        let registry = Registry::builtin();
        let cost = registry.get(self.model).and_then(|entry| entry.cost(&self.config, self.task));
        cost.map_or(0, |cost| usize::try_from(cost.parameters).unwrap_or(usize::MAX))
    }

    /// Input and target.
    pub fn batch(&self) -> Result<(Tensor, Tensor), BenchError> {
        let (mut rng, cpu) = (Rng::new(1, "bench", "batch", 0), &Device::Cpu);
        Ok(match self.task {
            Task::Images { height, width, channels, classes } => {
                let shape = (self.batch, height, width, channels);
                let pixels: Vec<f32> =
                    (0..self.batch * height * width * channels).map(|_| rng.normal() as f32).collect();
                let labels: Vec<u32> = (0..self.batch as u32).map(|i| i % classes as u32).collect();
                (Tensor::from_vec(pixels, shape, cpu)?, Tensor::from_vec(labels, self.batch, cpu)?)
            }
            Task::Tokens { vocab } => {
                let count = (self.length + 1) * self.batch;
                let tokens: Vec<u32> = (0..count).map(|_| rng.below(vocab as u64) as u32).collect();
                let tokens = Tensor::from_vec(tokens, (self.length + 1, self.batch), cpu)?;
                (tokens.narrow(0, 0, self.length)?, tokens.narrow(0, 1, self.length)?.contiguous()?)
            }
        })
    }

    /// A step of ours.
    pub fn ours(&self) -> Result<Work, BenchError> {
        let (registry, params) = (Registry::builtin(), Params::new(1));
        let vb = params.builder(DType::F32, device());
        let model = registry.get(self.model)?.build(&self.config, self.task, vb)?;
        let mut model = WithOperands { model, operands: self.operands };
        let config = Map::from_iter([("lr".to_owned(), RATE.into())]);
        let mut optimizer =
            taper_optim::Registry::builtin().build(self.optimizer, params.trainable(), &config)?;
        let (input, target) = self.batch()?;
        let (input, target) = (input.to_device(device())?, target.to_device(device())?);
        let mut step = 0;
        Ok(Box::new(move || {
            let _step = taper_models::op_span!("step", "forward", 0);
            step += 1;
            let loss = model.loss(&input, &target, Mode::Train { seed: 1, step })?.total;
            let grads = backward(&loss)?;
            let _span = taper_models::op_span!("optimizer", "update", 0);
            Ok(optimizer.step(&grads, &StepContext::new().lr(RATE))?)
        }))
    }

    /// The same for PyTorch.
    pub fn peer(&self) -> Value {
        json!({
            "work": "step", "model": self.model, "config": self.config,
            "batch": self.batch, "length": self.length, "lr": RATE, "optimizer": self.optimizer,
        })
    }

    pub(super) fn case(self, name: String, repeat: u32, stock: Option<stock::Make>) -> Case {
        let amount = self.gflop();
        Case {
            name,
            unit: "GFLOP/s",
            amount,
            repeat,
            peer: Some(self.peer()),
            prepare: Box::new(move || {
                let ours = self.ours()?;
                // candle's own step is the CPU's, and its products take the best instructions that there are.
                let alike = device().is_cpu() && Isa::detect().is_ok_and(|isa| isa == Isa::best());
                let candle = stock.filter(|_| alike).map(|make| {
                    let make: super::Make = Box::new(move || make(&self));
                    ("candle", amount, make)
                });
                Ok(Prepared { ours, beside: candle.into_iter().collect() })
            }),
        }
    }
}

pub fn mlp() -> Vec<Case> {
    let step = Workload::mlp(&[100], 128);
    vec![
        step.clone().case("mlp-step/128".into(), 100, Some(stock::mlp)),
        step.bf16().case("mlp-step/128/bf16".into(), 100, None),
    ]
}

/// Batches with both ways to convolve, and in bf16.
fn conv(model: &'static str, batches: &[usize], stock: Option<stock::Make>) -> Vec<Case> {
    let case = |(batch, precision): (usize, &str)| {
        let name = format!("{model}-step/{batch}/{precision}");
        let stock = stock.filter(|_| precision == "fast");
        match precision {
            "bf16" => Workload::conv(model, "exact", batch).bf16().case(name, 1, None),
            _ => Workload::conv(model, precision, batch).case(name, 1, stock),
        }
    };
    batches
        .iter()
        .flat_map(|batch| ["fast", "exact", "bf16"].map(|precision| (*batch, precision)))
        .map(case)
        .collect()
}

pub fn resnet18() -> Vec<Case> {
    conv("resnet18", &[32, 128], Some(stock::resnet18))
}

pub fn resnet34() -> Vec<Case> {
    conv("resnet34", &[32, 128], None)
}

pub fn densenet121() -> Vec<Case> {
    conv("densenet121", &[32], None)
}

pub fn airbench() -> Vec<Case> {
    conv("airbench", &[1024], None)
}

pub fn lstm1() -> Vec<Case> {
    lstm(1, "lstm1-step/20", Some(stock::lstm1))
}

pub fn lstm3() -> Vec<Case> {
    lstm(3, "lstm3-step/20", None)
}

fn lstm(layers: usize, name: &str, stock: Option<stock::Make>) -> Vec<Case> {
    let step = Workload::lstm(layers, 1150, 20, 70);
    vec![step.clone().case(name.into(), 1, stock), step.bf16().case(format!("{name}/bf16"), 1, None)]
}

pub fn gpt() -> Vec<Case> {
    let sizes = [
        ("4x4x128", Workload::gpt([4, 4, 128], 64, 12), 5),
        ("6x6x384", Workload::gpt([6, 6, 384], 256, 16), 1),
    ];
    sizes
        .into_iter()
        .flat_map(|(name, step, repeat)| both(&format!("gpt-step/{name}"), step, repeat))
        .collect()
}

pub fn vit() -> Vec<Case> {
    both("vit-step/6x3x192", Workload::vit([6, 3, 192], 4, 128), 1).into()
}

/// In f32 and in bf16.
fn both(name: &str, step: Workload, repeat: u32) -> [Case; 2] {
    [step.clone().case(name.into(), repeat, None), step.bf16().case(format!("{name}/bf16"), repeat, None)]
}
