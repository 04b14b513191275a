//! What a network costs, and how much is too much: known before anything is built.
use crate::{Error, Result};
use serde::Serialize;
use std::ops::{Add, AddAssign, Mul};
use std::sync::OnceLock;

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
