//! What a network costs, and how much is too much: known before anything is built.
use crate::init::{is_buffer, is_fixed};
use crate::{Error, Mode, Model, Params, Result, Task, trace};
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use serde::Serialize;
use std::collections::BTreeMap;
use std::ops::{Add, AddAssign, Mul};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Layers with weights that a network may have: candle walks its graph by recursion, and a parameter has a name.
pub const MOST_LAYERS: u64 = 10_000;
/// Parameters that a network may have, on whatever machine: 64 GiB of them.
pub const MOST_PARAMETERS: u64 = 1 << 34;

/// What a forward pass costs for one sample, for estimates before training starts. What does not fit into a number is the
/// largest one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// Trainable numbers.
    pub parameters: u64,
    /// Multiply-adds of a forward pass, counted as two operations each.
    pub flops: u64,
    /// Bytes of activations kept for the backward pass.
    pub activation_bytes: u64,
}

impl Cost {
    /// Bytes that a training step needs at least: the value and the gradient of every parameter, and the activations of one
    /// sample.
    pub fn bytes(&self) -> u64 {
        (Count(8) * Count(self.parameters) + Count(self.activation_bytes)).0
    }

    /// Refuses more than [`MOST_PARAMETERS`], and more than `memory` bytes where that is known; the message is about `key`.
    pub(crate) fn check(&self, model: &str, key: &str, memory: Option<u64>) -> Result<()> {
        let found = || format!("found one of {}", Count(self.parameters).text());
        let message = match memory {
            _ if self.parameters > MOST_PARAMETERS => {
                format!("expected a network of at most {}, {}", Count(MOST_PARAMETERS).text(), found())
            }
            Some(memory) if self.bytes() > memory => format!(
                "expected a network that this machine's memory of {} holds, {}, which takes {} with its gradients",
                gibibytes(memory),
                found(),
                gibibytes(self.bytes())
            ),
            _ => return Ok(()),
        };
        Err(Error::Config { model: model.into(), key: Some(key.into()), message })
    }
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// A count that stays at its largest value instead of wrapping: beyond every limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Count(pub u64);

impl Count {
    pub fn of(n: usize) -> Self {
        Self(u64::try_from(n).unwrap_or(u64::MAX))
    }

    /// As people write it.
    fn text(self) -> String {
        match self.0 {
            u64::MAX => "more than 10^19 parameters".into(),
            n if n >= 1_000_000_000 => format!("{:.2} billion parameters", n as f64 / 1e9),
            n => format!("{n} parameters"),
        }
    }
}

impl Add for Count {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign<Count> for u64 {
    fn add_assign(&mut self, other: Count) {
        *self = self.saturating_add(other.0);
    }
}

impl Mul for Count {
    type Output = Self;
    fn mul(self, other: Self) -> Self {
        Self(self.0.saturating_mul(other.0))
    }
}

/// The product of sizes.
pub(crate) fn product(sizes: &[usize]) -> Count {
    sizes.iter().fold(Count(1), |product, size| product * Count::of(*size))
}

/// Refuses more than [`MOST_LAYERS`]; the message is about `key`.
pub(crate) fn check_layers(model: &str, key: &str, layers: Count) -> Result<()> {
    if layers.0 <= MOST_LAYERS {
        return Ok(());
    }
    let message =
        format!("expected a network of at most {MOST_LAYERS} layers with weights, found {}", layers.0);
    Err(Error::Config { model: model.into(), key: Some(key.into()), message })
}

/// Where the largest of `sizes` stands in the list under `key`.
pub(crate) fn largest(key: &str, sizes: &[usize]) -> String {
    match sizes.iter().enumerate().max_by_key(|(_, size)| **size) {
        Some((i, _)) => format!("{key}[{i}]"),
        None => key.into(),
    }
}

/// Bytes that this machine has, or the container we are in; `None` where the system does not say.
pub(crate) fn memory() -> Option<u64> {
    static MEMORY: OnceLock<Option<u64>> = OnceLock::new();
    *MEMORY.get_or_init(|| {
        let read = |path| std::fs::read_to_string(path).ok();
        let machine = read("/proc/meminfo").and_then(|text| {
            let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        });
        let container = read("/sys/fs/cgroup/memory.max").and_then(|text| text.trim().parse().ok());
        machine.into_iter().chain(container).min()
    })
}

/// Parameters that are counted and take no memory: each is one zero, seen again and again.
#[derive(Clone, Default)]
struct Counted(Arc<Mutex<BTreeMap<String, Count>>>);

impl SimpleBackend for Counted {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let size = product(shape.dims());
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned(), size);
        Tensor::zeros((), dtype, device)?.broadcast_as(shape)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        candle_core::bail!("no parameter `{name}` and no shape to make it with")
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(name)
    }
}

/// What a network costs that only its code knows: see [`Config::cost`](crate::registry::Config::cost).
pub(crate) fn by_building(
    task: Task,
    build: impl Fn(Task, VarBuilder) -> Result<Box<dyn Model>>,
) -> Result<Cost> {
    let counted = Counted::default();
    build(task, VarBuilder::from_backend(Box::new(counted.clone()), DType::F32, Device::Cpu))?;
    let mut cost = Cost::default();
    for (name, size) in counted.0.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        if !is_buffer(name) && !is_fixed(name) {
            cost.parameters += *size;
        }
    }
    if cost.parameters > MOST_PARAMETERS || memory().is_some_and(|memory| cost.bytes() > memory) {
        return Ok(cost);
    }
    // Two samples: one alone has no variance.
    const SAMPLES: usize = 2;
    let input = match task {
        Task::Images { height, width, channels, .. } => {
            Tensor::zeros((SAMPLES, height, width, channels), DType::F32, &Device::Cpu)?
        }
        Task::Tokens { .. } => Tensor::zeros((1, SAMPLES), DType::U32, &Device::Cpu)?,
    };
    let mut model = build(task, Params::new(0).builder(DType::F32, &Device::Cpu))?;
    let (logits, tally) = trace::tally(|| model.logits(&input, Mode::Train { seed: 0, step: 0 }));
    let logits = logits?;
    // What candle's graph holds, in which our activations are a single number each.
    let nodes = logits.sorted_nodes().into_iter().filter(|node| !node.is_variable());
    let held =
        nodes.fold(Count(0), |sum, node| sum + product(&[node.dtype().size_in_bytes(), node.elem_count()]));
    cost.flops = tally.flops / SAMPLES as u64;
    cost.activation_bytes = (held + Count(tally.kept)).0 / SAMPLES as u64;
    Ok(cost)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_stop_at_the_top() {
        assert_eq!(product(&[usize::MAX, 3]), Count(u64::MAX));
        assert_eq!(Count(u64::MAX) + Count(1), Count(u64::MAX));
        assert_eq!(product(&[3, 4, 5]), Count(60));
        assert_eq!(product(&[]), Count(1));
    }

    #[test]
    fn a_network_that_is_built_to_find_out_costs_what_its_own_count_says() {
        let task = Task::Images { height: 16, width: 16, channels: 3, classes: 10 };
        let registry = crate::Registry::builtin();
        for (model, config) in [
            ("mlp", serde_json::json!({"hidden": [30, 20]})),
            ("resnet", serde_json::json!({"num_blocks": [1, 2], "widths": [8, 12], "block": "bottleneck"})),
            ("densenet", serde_json::json!({"num_blocks": [2, 2], "growth": 4})),
            ("airbench", serde_json::json!({"widths": [8, 12]})),
        ] {
            let entry = registry.get(model).unwrap();
            let expected = entry.cost(&config, task).unwrap();
            let found = by_building(task, |task, vb| entry.build(&config, task, vb)).unwrap();
            assert_eq!(found.parameters, expected.parameters, "{model}");
            assert_eq!(found.flops, expected.flops, "{model}");
            if model != "mlp" {
                // Normalised shortcuts, pooled features and logits are not in the networks' own count; images are in that of mlp.
                let share = found.activation_bytes as f64 / expected.activation_bytes as f64;
                assert!((1.0..1.3).contains(&share), "{model}: {found:?} and {expected:?}");
            }
        }
    }

    #[test]
    fn what_a_step_of_a_transformer_says_it_keeps_grows_with_the_length_of_a_sequence() {
        let kept = |name: &str, config: serde_json::Value, time: usize| {
            let (task, input) = match name {
                "vit" => {
                    let task = Task::Images { height: 4, width: 4 * (time - 1), channels: 1, classes: 2 };
                    (task, Tensor::zeros((1, 4, 4 * (time - 1), 1), DType::F32, &Device::Cpu).unwrap())
                }
                _ => (Task::Tokens { vocab: 7 }, Tensor::zeros((time, 1), DType::U32, &Device::Cpu).unwrap()),
            };
            let vb = Params::new(0).builder(DType::F32, &Device::Cpu);
            let mut model = crate::Registry::builtin().get(name).unwrap().build(&config, task, vb).unwrap();
            let target = match name {
                "vit" => Tensor::zeros(1, DType::U32, &Device::Cpu).unwrap(),
                _ => input.clone(),
            };
            let (loss, tally) =
                trace::tally(|| model.loss(&input, &target, Mode::Train { seed: 0, step: 0 }));
            let loss = loss.unwrap().total;
            let nodes = loss.sorted_nodes().into_iter().filter(|node| !node.is_variable());
            let held: usize = nodes.map(|node| node.dtype().size_in_bytes() * node.elem_count()).sum();
            held as f64 + tally.kept as f64
        };
        let text = |block: usize| serde_json::json!({"layers": 2, "heads": 2, "emb": 8, "block": block});
        let rotary = |block: usize| serde_json::json!({"layers": 2, "heads": 2, "kv_heads": 1, "emb": 8, "block": block});
        let images = serde_json::json!({"layers": 2, "heads": 2, "emb": 8});
        for (name, config) in [("gpt", text(512)), ("llama", rotary(512)), ("vit", images)] {
            let [short, long] = [128, 512].map(|time| kept(name, config.clone(), time));
            assert!(short > 128.0 * 8.0 * 4.0, "{name}: {short}");
            // A share of each token, and little else; one matrix of scores would make it 6 times and more.
            assert!(long <= 4.0 * short, "{name}: {short} and {long}");
        }
    }

    #[test]
    fn a_network_too_large_to_be_built_is_counted_without_being_built() {
        let build = |_: Task, vb: VarBuilder| -> Result<Box<dyn Model>> {
            for i in 0..3 {
                vb.pp(i).get_with_hints((usize::MAX / 2, 7), "weight", Init::Const(0.0))?;
            }
            Ok(Box::new(Nothing))
        };
        struct Nothing;
        impl Model for Nothing {
            fn logits(&mut self, input: &Tensor, _: Mode) -> Result<Tensor> {
                Ok(input.clone())
            }
        }
        assert_eq!(by_building(Task::LEAST_IMAGES, build).unwrap().parameters, u64::MAX);
    }

    #[test]
    fn what_the_memory_does_not_hold_is_refused_with_its_key() {
        let cost = Cost { parameters: 1 << 30, flops: 0, activation_bytes: 5 };
        assert_eq!(cost.bytes(), (8 << 30) + 5);
        assert!(cost.check("mlp", "hidden[0]", Some(cost.bytes())).is_ok());
        assert!(cost.check("mlp", "hidden[0]", None).is_ok());
        let Err(Error::Config { key, message, .. }) = cost.check("mlp", "hidden[0]", Some(4 << 30)) else {
            panic!("accepted")
        };
        assert_eq!(key.as_deref(), Some("hidden[0]"));
        let expected = "expected a network that this machine's memory of 4.0 GiB holds, found one of 1.07 billion \
                        parameters, which takes 8.0 GiB with its gradients";
        assert_eq!(message, expected);
    }
}
