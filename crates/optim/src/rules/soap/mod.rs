//! SOAP (Vyas et al., 2024): Adam in the eigenbasis of Shampoo's preconditioner.
//!
//! Each axis k of at most `max_precond_dim` elements, of a tensor of two axes or more, has a matrix L_k and an orthonormal basis
//! Q_k; G_k is the gradient unfolded along it. rot(·) applies all Q_kᵀ, back(·) all Q_k.
//!
//! ```text
//! t = 1:  L_k = (1 - β_s) G_k G_kᵀ,  Q_k = eigenvectors of L_k; no step, no decay
//! t > 1:  j = t - 1
//!     m_j = β₁ m_{j-1} + (1 - β₁) g
//!     v_j = β₂ v_{j-1} + (1 - β₂) rot(g)²
//!     x   ← x_t - η √(1 - β₂ʲ)/(1 - β₁ʲ) · back(rot(m_j) / (√v_j + ε))
//!     x_{t+1} = x (1 - ηλ)
//!     L_k = β_s L_k + (1 - β_s) G_k G_kᵀ
//!     every precondition_frequency steps j: columns of Q_k by falling diagonal of Q_kᵀ L_k Q_k (v moves with them), then
//!     Q_k ← the orthonormal factor of L_k Q_k
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{DType, Device, Var};
//! use taper_optim::{Soap, SoapConfig};
//!
//! let x = Var::ones((3, 2), DType::F32, &Device::Cpu)?;
//! let mut optimizer = Soap::new(vec![x.clone()], SoapConfig { lr: 0.1, ..Default::default() })?;
//! for _ in 0..2 {
//!     optimizer.backward_step(&x.sqr()?.sum_all()?)?; // the first only starts the basis
//! }
//! assert!(x.to_vec2::<f32>()?[0][0] < 1.0);
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As the authors' algorithm, without `merge_dims`, `precondition_1d`, `normalize_grads` and `channels_last`. The moments do
//!   not see the first gradient, decay comes after the step, and ε stands beside the uncorrected √v.
//! - Eigenvectors and the orthonormal factor are computed in f64, by solvers of this crate: the same bits for any number of
//!   threads. (The authors' code and pytorch_optimizer round both to f32, which is 6e-7 away.)
//! - Where the first gradient lacks two ranks or more, eigenvectors of the null space are any: other solvers then end
//!   elsewhere, 10 to 20 % of the movement apart after 36 steps.
//! - Axes of one element need no basis. Only the first eight axes of a tensor have one.
//! - On a GPU products are candle's, and a basis is factored on the host.
//!
//! Reference: *SOAP: Improving and Stabilizing Shampoo using Adam*, arXiv:2409.11321.
use crate::matrix::{eigenvectors, orthonormal, product};
use crate::pairs::{Blend, Descend, Direction, Square, paired};
use crate::rule::{Config, Info, Invalid, Reach, bias_correction, ranges, require};
use crate::{Memory, Result, TensorRule, TensorStep};
use candle_core::{DType, Device, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of SOAP.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SoapConfig {
    /// Learning rate η. Defaults to 3e-3.
    pub lr: f64,
    /// Decay of the first moment. Defaults to 0.95.
    pub beta1: f64,
    /// Decay of the second moment. Defaults to 0.95.
    pub beta2: f64,
    /// Decay of the preconditioner, β_s; null for β₂. Defaults to null.
    pub shampoo_beta: Option<f64>,
    /// Added to the denominator. Defaults to 1e-8.
    pub eps: f64,
    /// Decoupled weight decay λ. Defaults to 0.01.
    pub weight_decay: f64,
    /// Steps between updates of the basis. Defaults to 10.
    pub precondition_frequency: u64,
    /// The longest axis that has a basis. Defaults to 10000.
    pub max_precond_dim: usize,
    /// Correct the averages for their start at 0. Defaults to true.
    pub correct_bias: bool,
}

impl Default for SoapConfig {
    fn default() -> Self {
        Self {
            lr: 3e-3,
            beta1: 0.95,
            beta2: 0.95,
            shampoo_beta: None,
            eps: 1e-8,
            weight_decay: 1e-2,
            precondition_frequency: 10,
            max_precond_dim: 10_000,
            correct_bias: true,
        }
    }
}

impl Config for SoapConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn momentum(&self) -> f64 {
        self.beta1
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        ranges::fraction("beta1", self.beta1)?;
        ranges::fraction("beta2", self.beta2)?;
        self.shampoo_beta.map_or(Ok(()), |beta| ranges::fraction("shampoo_beta", beta))?;
        ranges::at_least_zero("eps", self.eps)?;
        ranges::weight_decay(self.weight_decay)?;
        require(self.precondition_frequency > 0, "precondition_frequency", "at least 1 step", 0.0)
    }
}

/// The arithmetic of SOAP.
#[derive(Debug)]
pub struct SoapRule;

const SOAP: Info = Info {
    name: "soap",
    about: "Adam in the eigenbasis of Shampoo's preconditioner",
    paper: "Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv:2409.11321",
    year: 2024,
    formula: "L ← βL + (1-β)GGᵀ; Q ← its eigenbasis; x ← x - η Q(Adam of QᵀG)Qᵀ",
};

/// The names of L_k and Q_k.
const AXES: [(&str, &str); 8] = [
    ("l0", "q0"),
    ("l1", "q1"),
    ("l2", "q2"),
    ("l3", "q3"),
    ("l4", "q4"),
    ("l5", "q5"),
    ("l6", "q6"),
    ("l7", "q7"),
];

/// The axes with a basis, and what theirs are called.
fn axes(shape: &[usize], most: usize) -> Vec<(usize, (&'static str, &'static str))> {
    if shape.len() < 2 || shape.contains(&0) {
        return Vec::new();
    }
    let named = shape.iter().zip(AXES).enumerate();
    named.filter(|(_, (n, _))| (2..=most).contains(*n)).map(|(k, (_, names))| (k, names)).collect()
}

/// A tensor with axis `k` in front and all others behind it as one: and back.
fn unfold(t: &Tensor, k: usize) -> Result<Tensor> {
    let n = t.dim(k)?;
    Ok(t.transpose(0, k)?.contiguous()?.reshape((n, t.elem_count() / n))?)
}

/// Q or Qᵀ along every axis that has one.
fn rotated(t: &Tensor, memory: &Memory, most: usize, transposed: bool) -> Result<Tensor> {
    let mut t = t.clone();
    for (k, (_, q)) in axes(t.dims(), most) {
        let Some(q) = memory.tensors.get(q) else { continue };
        let mut front = t.dims().to_vec();
        front.swap(0, k);
        t = product((q, transposed), (&unfold(&t, k)?, false))?
            .reshape(front)?
            .transpose(0, k)?
            .contiguous()?;
    }
    Ok(t)
}

impl TensorRule for SoapRule {
    type Config = SoapConfig;
    const REACH: Reach = Reach::Parameter;

    crate::rule::one_name!(SOAP);

    fn buffers(_: &SoapConfig) -> &'static [&'static str] {
        &[
            "m", "v", "l0", "q0", "l1", "q1", "l2", "q2", "l3", "q3", "l4", "q4", "l5", "q5", "l6", "q6",
            "l7", "q7",
        ]
    }

    fn sized(_: &SoapConfig) -> &'static [&'static str] {
        &["m", "v"]
    }

    fn step(step: &mut TensorStep<SoapConfig>) -> Result<()> {
        for p in &mut step.params {
            let (c, beta1) = (p.config, p.momentum);
            let shampoo = c.shampoo_beta.unwrap_or(c.beta2);
            let axes = axes(p.x.dims(), c.max_precond_dim);
            let j = p.t - 1;
            if j > 0 {
                let average = Blend { keep: beta1, share: 1.0 - beta1 };
                let m = paired(average, &p.memory.tensor("m", &p.x)?, &p.g)?;
                let turned = rotated(&p.g, &p.memory, c.max_precond_dim, true)?;
                let squares = Square { keep: c.beta2, share: 1.0 - c.beta2 };
                let v = paired(squares, &p.memory.tensor("v", &p.x)?, &turned)?;
                let m_turned = rotated(&m, &p.memory, c.max_precond_dim, true)?;
                let u = paired(Direction { first: 1.0, second: 1.0, eps: c.eps }, &m_turned, &v)?;
                let u = rotated(&u, &p.memory, c.max_precond_dim, false)?;
                let rate = match c.correct_bias {
                    true => p.lr * bias_correction(c.beta2, j).sqrt() / bias_correction(beta1, j),
                    false => p.lr,
                };
                let decay = 1.0 - p.lr * c.weight_decay;
                p.set((paired(Descend { keep: 1.0, rate }, &p.x, &u)? * decay)?);
                p.memory.tensors.extend([("m", m), ("v", v)]);
            }
            for (k, (l, q)) in axes {
                let unfolded = unfold(&p.g, k)?;
                let gram = (product((&unfolded, false), (&unfolded, true))? * (1.0 - shampoo))?;
                let sum = ((p.memory.tensor(l, &gram)? * shampoo)? + gram)?;
                let basis = match p.memory.tensors.get(q) {
                    None => Some(eigenvectors(&sum)?),
                    Some(basis) if j % c.precondition_frequency == 0 => {
                        let moved = product((&sum, false), (basis, false))?;
                        // Stable: what is equal keeps its order.
                        let share = (basis * &moved)?.sum(0)?.to_device(&Device::Cpu)?;
                        let share: Vec<f64> = share.to_dtype(DType::F64)?.to_vec1()?;
                        let mut order: Vec<u32> = (0..share.len() as u32).collect();
                        order.sort_by(|a, b| share[*b as usize].total_cmp(&share[*a as usize]));
                        let order = Tensor::new(order, p.x.device())?;
                        if let Some(v) = p.memory.tensors.get_mut("v") {
                            *v = v.contiguous()?.index_select(&order, k)?;
                        }
                        Some(orthonormal(&moved.index_select(&order, 1)?)?)
                    }
                    Some(_) => None,
                };
                p.memory.tensors.insert(l, sum);
                if let Some(basis) = basis {
                    p.memory.tensors.insert(q, basis);
                }
            }
        }
        Ok(())
    }
}
