//! Adafactor (Shazeer & Stern, 2018): a second moment kept as the product of its row and column means.
//!
//! ```text
//! w   = tᵇ,  a = max(ε₂, RMS(x)) min(η, 1/√t)
//! x   ← x_t (1 - ηλ)
//! R_t = (1 - w) R_{t-1} + w mean_columns(g²)
//! C_t = (1 - w) C_{t-1} + w mean_rows(g²)
//! v   = R_t C_t / max(mean(R_t), ε₁)                  of rank ≤ 1: v_t = (1 - w) v_{t-1} + w g²
//! u   = g / max(√v, ε₁)
//! x_{t+1} = x - a u / max(1, RMS(u)/d)
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Adafactor, AdafactorConfig, Optimizer};
//!
//! let x = Var::ones((64, 32), candle_core::DType::F32, &Device::Cpu)?;
//! let params = vec![("w".to_owned(), x.clone())];
//! let mut optimizer = Adafactor::with_params(params, AdafactorConfig::default())?;
//! optimizer.backward_step(&x.sqr()?.sum_all()?)?;
//! // 96 numbers for 2048 parameters.
//! let kept: usize = optimizer.state_dict()?.tensors.values().map(|t| t.elem_count()).sum();
//! assert_eq!(kept, 64 + 32);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch: every tensor of two axes or more is factored over its last two, whatever their sizes, with the others as a
//!   batch. Other versions want 16 or 128 elements a side; timm factors convolutions over the first two axes.
//! - ε₁ is by default the machine epsilon of the arithmetic: 2.2e-16 for parameters of f64, 1.2e-7 for all others, which are
//!   computed in f32. PyTorch takes that of the parameter, also of halves.
//! - No first moment.
//!
//! Reference: *Adafactor: Adaptive Learning Rates with Sublinear Memory Cost*, arXiv:1804.04235.
use crate::pairs::{Blend, Descend, paired};
use crate::rule::{Config, Info, Invalid, Reach, Real, ranges, require};
use crate::sums::squares;
use crate::{Result, TensorParam, TensorRule, TensorStep};
use candle_core::{D, DType, Tensor, WithDType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

mod cpu;

/// Hyperparameters of Adafactor.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdafactorConfig {
    /// Learning rate η, an upper bound of the relative step. Defaults to 1e-2.
    pub lr: f64,
    /// The power b of the step's number in a new square's weight, at most 0. Defaults to -0.8.
    pub beta2_decay: f64,
    /// The least denominator; null for the machine epsilon. Defaults to null.
    pub eps1: Option<f64>,
    /// The least scale of a parameter. Defaults to 1e-3.
    pub eps2: f64,
    /// What the root mean square of an update is limited to, at least 1. Defaults to 1.
    pub d: f64,
    /// Decoupled weight decay λ. Defaults to 0.
    pub weight_decay: f64,
}

impl Default for AdafactorConfig {
    fn default() -> Self {
        Self { lr: 1e-2, beta2_decay: -0.8, eps1: None, eps2: 1e-3, d: 1.0, weight_decay: 0.0 }
    }
}

impl Config for AdafactorConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        let falls = self.beta2_decay <= 0.0 && self.beta2_decay.is_finite();
        require(falls, "beta2_decay", "a finite number of at most 0", self.beta2_decay)?;
        self.eps1.map_or(Ok(()), |eps| ranges::at_least_zero("eps1", eps))?;
        ranges::at_least_zero("eps2", self.eps2)?;
        require(self.d >= 1.0 && self.d.is_finite(), "d", "a finite number of at least 1", self.d)?;
        ranges::weight_decay(self.weight_decay)
    }
}

/// The arithmetic of Adafactor.
#[derive(Debug)]
pub struct AdafactorRule;

const ADAFACTOR: Info = Info {
    name: "adafactor",
    about: "second moments as the product of row and column means",
    paper: "Shazeer & Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, arXiv:1804.04235",
    year: 2018,
    formula: "R, C ← means of g² by row and column; u = g/√(RC/R̄); x ← x - max(ε₂, RMS x) min(η, 1/√t) u/max(1, RMS(u)/d)",
};

impl TensorRule for AdafactorRule {
    type Config = AdafactorConfig;
    const REACH: Reach = Reach::Parameter;

    crate::rule::one_name!(ADAFACTOR);

    fn buffers(_: &AdafactorConfig) -> &'static [&'static str] {
        &["row", "column", "v"]
    }

    fn sized(_: &AdafactorConfig) -> &'static [&'static str] {
        &[]
    }

    fn step(step: &mut TensorStep<AdafactorConfig>) -> Result<()> {
        for p in &mut step.params {
            if p.x.elem_count() == 0 {
                continue;
            }
            let s = Scalars::new(p.config, p.t, p.lr, p.x.dtype());
            let shapes = match *p.x.dims() {
                [.., rows, columns] => Some((rows, columns)),
                _ => None,
            };
            let (x, means) = match (p.x.device().is_cpu() && p.x.is_contiguous(), p.x.dtype()) {
                (true, DType::F64) => fused::<f64>(&s, shapes, p)?,
                (true, DType::F32) => fused::<f32>(&s, shapes, p)?,
                _ => composed(&s, shapes, p)?,
            };
            p.set(x);
            p.memory.tensors.extend(means);
        }
        Ok(())
    }
}

/// The numbers of a step on one parameter.
struct Scalars {
    /// The weight of new squares.
    w: f64,
    /// What the parameter is multiplied by.
    decay: f64,
    eps1: f64,
    eps2: f64,
    d: f64,
    /// min(η, 1/√t).
    lr: f64,
}

impl Scalars {
    fn new(c: &AdafactorConfig, t: u64, lr: f64, dtype: DType) -> Self {
        let machine = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let t = t as f64;
        Self {
            w: libm::pow(t, c.beta2_decay),
            decay: 1.0 - lr * c.weight_decay,
            eps1: c.eps1.unwrap_or(machine),
            eps2: c.eps2,
            d: c.d,
            lr: lr.min(1.0 / t.sqrt()),
        }
    }

    /// What u is multiplied by, from Σ x² and Σ u² over n elements.
    fn step(&self, xx: f64, uu: f64, n: usize) -> f64 {
        let rms = |squares: f64| (squares / n as f64).sqrt();
        rms(xx).max(self.eps2) * self.lr / (rms(uu) / self.d).max(1.0)
    }
}

type Param<'a> = TensorParam<'a, AdafactorConfig>;
/// The new parameter, and what is kept.
type Stepped = (Tensor, Vec<(&'static str, Tensor)>);

/// In a few passes over memory.
fn fused<F: Real + WithDType>(s: &Scalars, shapes: Option<(usize, usize)>, p: &Param) -> Result<Stepped> {
    let kept = |name: &str, shape: &[usize]| -> Result<Tensor> {
        Ok(match p.memory.tensors.get(name) {
            Some(kept) => kept.contiguous()?,
            None => Tensor::zeros(shape, p.x.dtype(), p.x.device())?,
        })
    };
    let Some((rows, columns)) = shapes else {
        let [x, v] = cpu::vector::<F>(s, &p.x, &p.g, &kept("v", p.x.dims())?)?;
        return Ok((x.reshape(p.x.shape())?, vec![("v", v.reshape(p.x.shape())?)]));
    };
    let (mut of_rows, mut of_columns) = (p.x.dims().to_vec(), p.x.dims().to_vec());
    (of_rows[p.x.rank() - 1], of_columns[p.x.rank() - 2]) = (1, 1);
    let (row, column) = (kept("row", &of_rows)?, kept("column", &of_columns)?);
    let [x, row, column] = cpu::matrices::<F>(s, (rows, columns), [&p.x, &p.g, &row, &column])?;
    Ok((
        x.reshape(p.x.shape())?,
        vec![("row", row.reshape(of_rows)?), ("column", column.reshape(of_columns)?)],
    ))
}

/// In candle's ops, on any device.
fn composed(s: &Scalars, shapes: Option<(usize, usize)>, p: &Param) -> Result<Stepped> {
    let square = p.g.sqr()?;
    let average = |name, new: Tensor| -> Result<Tensor> {
        paired(Blend { keep: 1.0 - s.w, share: s.w }, &p.memory.tensor(name, &new)?, &new)
    };
    let (v, kept) = if shapes.is_none() {
        let v = average("v", square)?;
        (v.clone(), vec![("v", v)])
    } else {
        let row = average("row", square.mean_keepdim(D::Minus1)?)?;
        let column = average("column", square.mean_keepdim(D::Minus2)?)?;
        let scale = row.mean_keepdim(D::Minus2)?.maximum(s.eps1)?;
        let v = row.broadcast_mul(&column)?.broadcast_div(&scale)?;
        (v, vec![("row", row), ("column", column)])
    };
    let u = (&p.g / v.sqrt()?.maximum(s.eps1)?)?;
    let step = s.step(squares(&p.x)?, squares(&u)?, p.x.elem_count());
    Ok((paired(Descend { keep: s.decay, rate: step }, &p.x, &u)?, kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Memory;
    use candle_core::Device;

    fn wave(shape: &[usize], step: usize, dtype: DType) -> Tensor {
        let n: usize = shape.iter().product();
        let values = (0..n).map(|i| ((i * step % 1009) as f64 - 503.7) / 512.0).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    /// Two steps of each kind: vectors, small and large matrices, rows longer than a strip, batches.
    #[test]
    fn passes_agree_with_ops_and_do_not_depend_on_threads() {
        let config = AdafactorConfig { weight_decay: 0.1, ..Default::default() };
        let shapes: [&[usize]; 8] =
            [&[], &[70_001], &[1, 1], &[5, 3], &[700, 500], &[3, 2500], &[40, 50, 3, 3], &[2, 600, 513]];
        for (shape, dtype) in shapes.into_iter().flat_map(|s| [(s, DType::F32), (s, DType::F64)]) {
            let run = |fuse: bool, threads: usize| {
                taper_kernels::oversubscribe();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let (mut x, mut memory) = (wave(shape, 7919, dtype), Memory::default());
                for t in 1..=2 {
                    let g = wave(shape, 31 * t as usize, dtype);
                    let (lr, momentum, new) = (0.01, 0.0, None);
                    let p = TensorParam { name: "x", config: &config, t, lr, momentum, x, g, memory, new };
                    let s = Scalars::new(&config, t, lr, dtype);
                    let shapes = (shape.len() > 1).then(|| (shape[shape.len() - 2], shape[shape.len() - 1]));
                    let kept;
                    (x, kept) = match (fuse, dtype) {
                        (false, _) => composed(&s, shapes, &p).unwrap(),
                        (true, DType::F64) => pool.install(|| fused::<f64>(&s, shapes, &p).unwrap()),
                        (true, _) => pool.install(|| fused::<f32>(&s, shapes, &p).unwrap()),
                    };
                    memory = p.memory;
                    memory.tensors.extend(kept);
                }
                [x].into_iter().chain(memory.tensors.into_values()).collect::<Vec<_>>()
            };
            let values =
                |t: &Tensor| t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap();
            let (ops, one) = (run(false, 1), run(true, 1));
            // Sums of a few thousand roundings of numbers near 1.
            let near = if dtype == DType::F64 { 1e-12 } else { 2e-5 };
            for (ops, one) in ops.iter().zip(&one) {
                assert_eq!(ops.dims(), one.dims());
                for (a, b) in values(ops).into_iter().zip(values(one)) {
                    let apart: f64 = a - b;
                    assert!(apart.abs() < near, "{shape:?} {dtype:?}: {apart}");
                }
            }
            let bits =
                |all: &[Tensor]| -> Vec<u64> { all.iter().flat_map(&values).map(f64::to_bits).collect() };
            assert!([2, 3].into_iter().all(|threads| bits(&run(true, threads)) == bits(&one)), "{shape:?}");
        }
    }
}
