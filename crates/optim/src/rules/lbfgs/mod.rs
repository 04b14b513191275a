//! L-BFGS (Liu & Nocedal, 1989): a quasi-Newton step from the last few steps and gradient differences, without line search.
//!
//! All parameters are one vector.
//!
//! ```text
//! max|g| ≤ tolerance_grad: nothing
//! first:  p = -g,  step = η min(1, 1/Σ|g|) p
//! later:  y = g - g_prev,  s = the last step;  y·s > 1e-10: remember (s, y), forget the oldest,  H = y·s / y·y
//!         p = -(two-loop recursion over the pairs, from H g),  step = η p
//! x ← x + step                                        unless g·p > -tolerance_change
//! ```
//!
//! # Example
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Lbfgs, LbfgsConfig};
//!
//! let x = Var::new(&[4f64, -2.0], &Device::Cpu)?;
//! let scale = candle_core::Tensor::new(&[1f64, 25.0], &Device::Cpu)?;
//! let mut optimizer = Lbfgs::new(vec![x.clone()], LbfgsConfig::default())?;
//! for _ in 0..15 {
//!     optimizer.backward_step(&(x.sqr()? * &scale)?.sum_all()?)?;
//! }
//! assert!(x.to_vec1::<f64>()?.iter().all(|x| x.abs() < 1e-6));
//! # Ok(()) }
//! ```
//!
//! # Where this differs
//! - As PyTorch's LBFGS with `max_iter: 1` and no line search: one gradient a step, meant for full batches. PyTorch remembers
//!   100 pairs.
//! - The memory is one for all parameters. A step with gradients of other parameters than the last one starts it anew.
//! - Groups may have rates of their own, which multiply p in their parameters.
//! - Where the rate is scheduled, s is the step that was taken, with the rate of that time.
//!
//! Reference: *On the limited memory BFGS method for large scale optimization*, Mathematical Programming 45.
use crate::passes::{combined, moved};
use crate::rule::{Config, Info, Invalid, ranges, require};
use crate::sums::{dot, largest, magnitudes, squares};
use crate::{Result, TensorRule, TensorStep};
use candle_core::{DType, Tensor};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hyperparameters of L-BFGS.
#[derive(Clone, Debug, PartialEq, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LbfgsConfig {
    /// Learning rate η. Defaults to 1.
    pub lr: f64,
    /// Pairs remembered. Defaults to 10.
    pub history_size: usize,
    /// The largest gradient at which nothing is to be done. Defaults to 1e-7.
    pub tolerance_grad: f64,
    /// How little a direction may descend before it is not taken. Defaults to 1e-9.
    pub tolerance_change: f64,
}

impl Default for LbfgsConfig {
    fn default() -> Self {
        Self { lr: 1.0, history_size: 10, tolerance_grad: 1e-7, tolerance_change: 1e-9 }
    }
}

impl Config for LbfgsConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> Result<(), Invalid> {
        ranges::lr(self.lr)?;
        require(self.history_size > 0, "history_size", "at least 1 pair", 0.0)?;
        ranges::at_least_zero("tolerance_grad", self.tolerance_grad)?;
        ranges::at_least_zero("tolerance_change", self.tolerance_change)
    }
}

/// The arithmetic of L-BFGS.
#[derive(Debug)]
pub struct LbfgsRule;

const LBFGS: Info = Info {
    name: "lbfgs",
    about: "quasi-Newton steps from the last gradients",
    paper: "Liu & Nocedal, On the limited memory BFGS method for large scale optimization",
    year: 1989,
    formula: "s = Δx, y = Δg of the last steps; x ← x - η H g with H from the pairs (s, y)",
};

/// Sixteen digits of a step's parameters that f64 holds exactly (FNV-1a).
fn layout<'a>(names: impl Iterator<Item = (&'a str, usize)>) -> f64 {
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let all = names.flat_map(|(name, n)| [name.as_bytes(), &[0xff], &n.to_le_bytes()].concat());
    (all.fold(0xcbf2_9ce4_8422_2325, mix) >> 11) as f64
}

/// -H g from the pairs, the oldest first, and its product with g. Each pass over a pair takes the product that the next one needs.
fn two_loops(g: &Tensor, s: &[Tensor], y: &[Tensor], scale: f64) -> Result<(Tensor, f64)> {
    let pairs: Vec<(&Tensor, &Tensor)> = s.iter().zip(y).collect();
    let after = |i: usize| pairs.get(i).map_or(g, |(_, y)| y);
    let (mut direction, mut with_s) = combined((-1.0, g), (0.0, g), pairs.last().map_or(g, |(s, _)| s))?;
    let mut shares = Vec::with_capacity(pairs.len());
    for (i, (s, y)) in pairs.iter().enumerate().rev() {
        let rho = 1.0 / dot(y, s)?;
        let share = rho * with_s;
        shares.push((rho, share));
        // Behind the oldest pair the way turns.
        let (next, factor) = if i > 0 { (pairs[i - 1].0, 1.0) } else { (after(0), scale) };
        (direction, with_s) = moved(direction, (-share, y), factor, next)?;
    }
    let mut with_y = with_s;
    for (i, ((s, _), (rho, share))) in pairs.iter().zip(shares.into_iter().rev()).enumerate() {
        let back = rho * with_y;
        (direction, with_y) = moved(direction, (share - back, s), 1.0, after(i + 1))?;
    }
    match pairs.is_empty() {
        true => moved(direction, (0.0, g), scale, g),
        false => Ok((direction, with_y)),
    }
}

impl TensorRule for LbfgsRule {
    type Config = LbfgsConfig;
    const SHARED: &'static [&'static str] = &["s", "y", "g", "step", "scale", "layout"];
    const LISTS: &'static [&'static str] = &["s", "y"];

    crate::rule::one_name!(LBFGS);

    fn buffers(_: &LbfgsConfig) -> &'static [&'static str] {
        &[]
    }

    fn step(step: &mut TensorStep<LbfgsConfig>) -> Result<()> {
        let params = &step.params;
        let Some(c) = params.first().map(|p| p.config) else { return Ok(()) };
        // The widest of all, so that no parameter loses digits.
        let dtype = if params.iter().any(|p| p.g.dtype() == DType::F64) { DType::F64 } else { DType::F32 };
        let flat: Vec<Tensor> =
            params.iter().map(|p| p.g.flatten_all()?.to_dtype(dtype)).collect::<candle_core::Result<_>>()?;
        let g = Tensor::cat(&flat, 0)?;
        if largest(&g)? <= c.tolerance_grad {
            return Ok(());
        }
        let layout = layout(params.iter().map(|p| (p.name, p.g.elem_count())));
        let shared = &mut step.shared;
        if shared.number("layout") != layout {
            *shared = Default::default();
        }
        let (direction, descent, shrink) = match (shared.tensors.get("g"), shared.tensors.get("step")) {
            (Some(previous), Some(s)) => {
                let (y, curvature) = combined((1.0, &g), (-1.0, previous), s)?;
                if curvature > 1e-10 {
                    shared.numbers.insert("scale", curvature / squares(&y)?);
                    for (name, new) in [("s", s.clone()), ("y", y)] {
                        let list = shared.lists.entry(name).or_default();
                        list.push(new);
                        list.drain(..list.len().saturating_sub(c.history_size));
                    }
                }
                let scale = shared.numbers.get("scale").copied().unwrap_or(1.0);
                let of = |name| shared.lists.get(name).map_or(&[] as &[Tensor], Vec::as_slice);
                let (direction, descent) = two_loops(&g, of("s"), of("y"), scale)?;
                (direction, descent, 1.0)
            }
            _ => {
                let (direction, descent) = combined((-1.0, &g), (0.0, &g), &g)?;
                (direction, descent, (1.0 / magnitudes(&g)?).min(1.0))
            }
        };
        let descends = descent <= -c.tolerance_change;
        let (mut steps, mut from) = (Vec::with_capacity(step.params.len()), 0);
        for p in &mut step.params {
            let n = p.x.elem_count();
            let part = direction.narrow(0, from, n)?;
            let (part, _) = combined((p.lr * shrink, &part), (0.0, &part), &part)?;
            if descends {
                let (x, part) = (p.x.flatten_all()?, part.to_dtype(p.x.dtype())?);
                let (x, _) = combined((1.0, &x), (1.0, &part), &part)?;
                p.set(x.reshape(p.x.shape())?);
            }
            steps.push(part);
            from += n;
        }
        step.shared.tensors.extend([("g", g), ("step", Tensor::cat(&steps, 0)?)]);
        step.shared.numbers.insert("layout", layout);
        Ok(())
    }
}
