//! The microscope: what a step is, beside those of simple optimizers.
//!
//! It keeps moments of its own (momentum, Adam's squares), fed with the gradients that the optimizer gets, and compares the change
//! of the parameters with what simple optimizers would do. It reads parameters and gradients and changes neither.
//!
//! ```
//! # fn main() -> candle_core::Result<()> {
//! use candle_core::{Device, Var};
//! use taper_optim::{Microscope, Shadow, Sgd, SgdConfig, StepContext};
//!
//! let x = Var::new(&[1f32, 2., -3.], &Device::Cpu)?;
//! let params = vec![("x".to_owned(), x.clone())];
//! let mut optimizer = Sgd::with_params(params.clone(), SgdConfig { lr: 0.25, momentum: 0.9, ..Default::default() })?;
//! let mut microscope = Microscope::new(params, Shadow { momentum: 0.9, ..Shadow::default() })?;
//! for _ in 0..3 {
//!     let grads = x.sqr()?.sum_all()?.backward()?;
//!     let context = StepContext::new();
//!     microscope.before()?;
//!     optimizer.step_with(&grads, &context)?;
//!     let seen = microscope.after(&grads, &context)?;
//!     let sgdm = (seen.all["r2/sgdm"], seen.all["rate/sgdm"]);
//!     assert!(sgdm.0 > 1.0 - 1e-6 && (sgdm.1 - 0.25).abs() < 1e-6);
//! }
//! # Ok(()) }
//! ```
mod curvature;
mod fit;
mod noise;
mod pass;
mod quantiles;

pub use curvature::{Along, Eigenvalue, Parabola};
pub use fit::{REFERENCES, nearest};
pub use noise::{Halves, Noise, early_stop};
pub use quantiles::{Reached, Spread, Values};

use crate::driver::cpu::slice;
use crate::matrix::newton_schulz;
use crate::rule::{Real, bias_correction};
use crate::sums::{dot, squares};
use crate::{Displaced, Error, MuonConfig, Result, StepContext};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var, WithDType};
use fit::Products;
use pass::{Moments, SUMS, Scalars, Step};
use serde_json::Value;
use std::collections::BTreeMap;

/// Numbers by name.
pub type Figures = BTreeMap<String, f64>;

/// How the moments of the microscope are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shadow {
    /// β of momentum b ← βb + g, which is Adam's β₁ too. With 0 b is the gradient.
    pub momentum: f64,
    /// Whether momentum descent looks ahead, as Nesterov's: its direction is g + βb in the place of b.
    pub nesterov: bool,
    /// Adam's β₂.
    pub beta2: f64,
    /// Adam's ε.
    pub eps: f64,
    /// The c of √(f + c), for an optimizer that follows the loss.
    pub c: Option<f64>,
    /// Whether decay is fitted beside each direction.
    pub decays: bool,
}

impl Default for Shadow {
    fn default() -> Self {
        Self { momentum: 0.9, nesterov: false, beta2: 0.999, eps: 1e-8, c: None, decays: false }
    }
}

impl Shadow {
    /// With an optimizer's own momenta, ε and c where it has such, or those of the optimizer inside it. One that has no momentum
    /// (SGD, AdaGrad, AEGD) gets none: with momentum of the microscope's own its steps would be held against a threshold of
    /// stability that is not theirs.
    ///
    /// ```
    /// use taper_optim::Shadow;
    ///
    /// let of = |config| Shadow::of(&config, false);
    /// assert_eq!(of(serde_json::json!({"lr": 0.1, "momentum": 0.8})).momentum, 0.8);
    /// assert_eq!(of(serde_json::json!({"lr": 0.1, "beta1": 0.0, "beta2": 0.99})).momentum, 0.0);
    /// assert_eq!(of(serde_json::json!({"lr": 0.1})).momentum, 0.0);
    /// ```
    pub fn of(mut config: &Value, needs_loss: bool) -> Self {
        while let Some(inner) = config.get("inner").filter(|inner| inner.is_object()) {
            config = inner;
        }
        let number = |keys: &[&str]| keys.iter().find_map(|key| config.get(*key)?.as_f64());
        let fraction = |keys: &[&str], default: f64| {
            number(keys).filter(|beta| (0.0..1.0).contains(beta)).unwrap_or(default)
        };
        let standard = Self::default();
        Self {
            momentum: fraction(&["momentum", "beta1"], 0.0),
            nesterov: config.get("nesterov") == Some(&Value::Bool(true)),
            beta2: fraction(&["beta2"], standard.beta2),
            eps: number(&["eps"]).filter(|eps| *eps >= 0.0).unwrap_or(standard.eps),
            c: number(&["c"]).filter(|_| needs_loss),
            decays: number(&["weight_decay"]).is_some_and(|decay| decay != 0.0),
        }
    }

    /// The rate times sharpness from which on momentum descent diverges on a quadratic: 2 (1 + β), and of Nesterov's momentum
    /// 2 (1 + β) / (1 + 2β). There -1 is a root of the characteristic polynomial of the iteration.
    ///
    /// ```
    /// use taper_optim::Shadow;
    ///
    /// let heavy_ball = Shadow { momentum: 0.5, ..Shadow::default() };
    /// assert_eq!(heavy_ball.threshold(), 3.0);
    /// assert_eq!(Shadow { nesterov: true, ..heavy_ball }.threshold(), 1.5);
    /// ```
    pub fn threshold(&self) -> f64 {
        let beta = self.momentum;
        2.0 * (1.0 + beta) / if self.nesterov { 1.0 + 2.0 * beta } else { 1.0 }
    }
}

/// What a look at a step shows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Of all parameters together.
    pub all: Figures,
    /// Of each parameter that had a gradient.
    pub params: BTreeMap<String, Figures>,
}

/// Moments of its own for every parameter.
#[derive(Debug)]
pub struct Microscope {
    shadow: Shadow,
    params: Vec<Param>,
}

#[derive(Debug)]
struct Param {
    name: String,
    var: Var,
    /// Gradients that it has seen.
    t: u64,
    buffers: Buffers,
}

#[derive(Debug)]
enum Buffers {
    F32(Kept<f32>),
    F64(Kept<f64>),
}

#[derive(Debug)]
struct Kept<T> {
    momentum: Vec<T>,
    square: Vec<T>,
    /// Momentum of ∇√(f + c); empty where the optimizer does not follow the loss.
    root: Vec<T>,
    /// The parameter before the step that is looked at.
    before: Vec<T>,
}

impl<T: Real> Kept<T> {
    fn new(elements: usize, root: bool) -> Self {
        let zeros = |n: usize| vec![T::from_f64(0.0); n];
        let root = zeros(if root { elements } else { 0 });
        Self { momentum: zeros(elements), square: zeros(elements), root, before: Vec::new() }
    }
}

/// Elements of a parameter whose rates are told; all of a small one.
const SAMPLE: usize = 1024;

/// The places of a sample of `n` elements: as many stretches of nearly equal length, and one place of each, by a hash of the
/// stretch's number. Evenly spaced places would see some columns or kernel positions of a tensor only.
fn places(n: usize) -> impl ExactSizeIterator<Item = usize> {
    let count = n.min(SAMPLE);
    let begins = move |k: usize| (k as u128 * n as u128 / count as u128) as usize;
    (0..count).map(move |k| {
        let length = begins(k + 1) - begins(k);
        begins(k) + (mixed(k as u64) % length as u64) as usize
    })
}

/// The bits of a number, mixed: the finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014).
fn mixed(number: u64) -> u64 {
    let mut z = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The quantiles of rates.
const RATES: [(&str, f64); 5] =
    [("rate_p01", 0.01), ("rate_p25", 0.25), ("rate_p50", 0.5), ("rate_p75", 0.75), ("rate_p99", 0.99)];

impl Microscope {
    /// Over named parameters, on the CPU, in f32 or f64.
    pub fn new(params: Vec<(String, Var)>, shadow: Shadow) -> Result<Self> {
        let mut all = Vec::with_capacity(params.len());
        for (name, var) in params {
            let refuse = |expected: &str, found: String| {
                Err(Error::Parameter { name: name.clone(), expected: expected.into(), found })
            };
            if !var.device().is_cpu() {
                return refuse("a parameter on the CPU", format!("one on {:?}", var.device().location()));
            }
            if !var.is_contiguous() {
                return refuse("contiguous memory", format!("strides {:?}", var.stride()));
            }
            let (n, root) = (var.elem_count(), shadow.c.is_some());
            let buffers = match var.dtype() {
                DType::F32 => Buffers::F32(Kept::new(n, root)),
                DType::F64 => Buffers::F64(Kept::new(n, root)),
                found => return refuse("dtype f32 or f64", format!("{found:?}")),
            };
            all.push(Param { name, var, t: 0, buffers });
        }
        Ok(Self { shadow, params: all })
    }

    /// How its moments are kept.
    pub fn shadow(&self) -> Shadow {
        self.shadow
    }

    /// The parameters, in their order.
    pub fn params(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.params.iter().map(|param| (param.name.as_str(), &param.var))
    }

    /// Remembers the parameters: what [`Microscope::after`] looks at comes next.
    pub fn before(&mut self) -> Result<()> {
        fn keep<T: Real + WithDType>(var: &Var, before: &mut Vec<T>) -> Result<()> {
            let (storage, layout) = var.storage_and_layout();
            let values = slice::<T>(&storage, layout)?;
            before.resize(values.len(), <T as Real>::from_f64(0.0));
            pass::copy(values, before);
            Ok(())
        }
        self.params.iter_mut().try_for_each(|param| match &mut param.buffers {
            Buffers::F32(kept) => keep(&param.var, &mut kept.before),
            Buffers::F64(kept) => keep(&param.var, &mut kept.before),
        })
    }

    /// Takes note of the gradients of a step that nobody looks at.
    pub fn pass(&mut self, grads: &GradStore, context: &StepContext) -> Result<()> {
        self.each(grads, context, false).map(drop)
    }

    /// What became of the parameters since [`Microscope::before`] by a step with these gradients.
    pub fn after(&mut self, grads: &GradStore, context: &StepContext) -> Result<Seen> {
        let sums = self.each(grads, context, true)?;
        let mut seen = Seen::default();
        let (mut all, mut rates) = ([0.0; SUMS], Vec::new());
        for (param, sums) in self.params.iter().zip(&sums) {
            let Some(sums) = sums else { continue };
            all.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
            let mut own = param.rates()?;
            let figures = seen.params.entry(param.name.clone()).or_default();
            self.tell(sums, figures);
            tell_rates(&mut own, figures);
            rates.append(&mut own);
        }
        self.tell(&all, &mut seen.all);
        tell_rates(&mut rates, &mut seen.all);
        Ok(seen)
    }

    /// Moves all moments, and sums where somebody looks.
    fn each(
        &mut self,
        grads: &GradStore,
        context: &StepContext,
        look: bool,
    ) -> Result<Vec<Option<[f64; SUMS]>>> {
        let shadow = self.shadow;
        let root = shadow.c.and_then(|c| Some((context.loss? + c).sqrt())).filter(|root| *root > 0.0);
        let step = |param: &mut Param| -> Result<Option<[f64; SUMS]>> {
            let Some(grad) = grads.get(&param.var) else { return Ok(None) };
            let t = param.t.saturating_add(1);
            let scalars = Scalars {
                scale: context.grad_scale,
                limit: context.grad_limit,
                beta: shadow.momentum,
                looks_ahead: shadow.nesterov,
                beta2: shadow.beta2,
                rest2: 1.0 - shadow.beta2,
                mean: (1.0 - shadow.momentum) / bias_correction(shadow.momentum, t),
                root: bias_correction(shadow.beta2, t).sqrt().recip(),
                eps: shadow.eps,
                half_inverse_root: root.map_or(0.0, |root| 0.5 / root),
                decays: shadow.decays,
            };
            let sums = match &mut param.buffers {
                Buffers::F32(kept) => kept.pass(&scalars, grad, &param.var, look)?,
                Buffers::F64(kept) => kept.pass(&scalars, grad, &param.var, look)?,
            };
            param.t = t;
            Ok(Some(sums))
        };
        self.params.iter_mut().map(step).collect()
    }

    /// Norms, cosines and fits.
    fn tell(&self, sums: &[f64; SUMS], figures: &mut Figures) {
        use pass::*;
        let (uu, ww, uw) = (sums[UU], sums[WW], sums[UW]);
        let mut put = |name: &str, value: f64| figures.extend([(name.to_owned(), value)]);
        put("grad_norm", sums[GG].sqrt());
        put("update_norm", uu.sqrt());
        put("weight_norm", ww.sqrt());
        put("update_ratio", if uu == 0.0 { 0.0 } else { (uu / ww).sqrt() });
        let directions =
            [("gd", GG, UG, GW), ("sgdm", BB, UB, BW), ("sign", SS, US, SW), ("adam", AA, UA, AW)];
        let root = self.shadow.c.map(|_| ("root", RR, UR, RW));
        for (name, dd, ud, dw) in directions.into_iter().chain(root) {
            let products = Products { uu, dd: sums[dd], ud: sums[ud], ww, uw, dw: sums[dw] };
            tell_fit(name, &products, self.shadow.decays, figures);
        }
    }

    /// The fit by the orthogonalised momentum of all parameters with two axes or more, as matrices: products of matrices, after
    /// [`Microscope::after`], which has counted this step's gradient.
    pub fn orthogonal(&self, grads: &GradStore, seen: &mut Seen) -> Result<()> {
        let mut all = Products::default();
        for param in self.params.iter().filter(|param| grads.get(&param.var).is_some()) {
            let (before, update) = (param.before()?, param.update()?);
            let (uu, ww, uw) = (squares(&update)?, squares(&before)?, dot(&update, &before)?);
            let mut products = Products { uu, ww, uw, ..Products::default() };
            if let Some(direction) = param.orthogonal()? {
                products.dd = squares(&direction)?;
                products.ud = dot(&update, &direction)?;
                products.dw = dot(&direction, &before)?;
                let figures = seen.params.entry(param.name.clone()).or_default();
                tell_fit("orthogonal", &products, self.shadow.decays, figures);
            }
            all.uu += products.uu;
            all.dd += products.dd;
            all.ud += products.ud;
            all.ww += products.ww;
            all.uw += products.uw;
            all.dw += products.dw;
        }
        tell_fit("orthogonal", &all, self.shadow.decays, &mut seen.all);
        Ok(())
    }

    /// The derivative of a loss along the last step, of its gradients anywhere.
    pub fn slope(&self, grads: &GradStore) -> Result<f64> {
        let with = self.params.iter().filter_map(|param| Some((param, grads.get(&param.var)?)));
        with.map(|(param, grad)| dot(&param.update()?, grad)).sum()
    }

    /// The largest eigenvalue of the Hessian where the last step began, from central differences of gradients. `start` fills the
    /// first vector, parameter by parameter; `gradient` is asked for the gradient with the parameters where they are then.
    /// Whatever happens, they are back when it returns. `None` where no eigenvalue can be told.
    pub fn sharpness(
        &self,
        start: &mut dyn FnMut(&str, &mut [f64]),
        gradient: &mut dyn FnMut() -> Result<GradStore>,
    ) -> Result<Option<Eigenvalue>> {
        let begun: Vec<Tensor> = self.params.iter().map(Param::before).collect::<Result<_>>()?;
        let norm = begun.iter().map(squares).sum::<Result<f64>>()?.sqrt();
        let double = self.params.iter().all(|param| param.var.dtype() == DType::F64);
        // Rounding of gradients against their third derivative: a balance of both, in the precision they have.
        let reach = (1.0 + norm) * if double { f64::EPSILON.cbrt() } else { f64::from(f32::EPSILON).sqrt() };
        let mut first = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let mut values = vec![0.0; param.var.elem_count()];
            start(&param.name, &mut values);
            first.push(
                Tensor::from_vec(values, param.var.shape(), &Device::Cpu)?.to_dtype(param.var.dtype())?,
            );
        }
        curvature::largest_eigenvalue(first, &mut |v| {
            let mut at = |along: f64| -> Result<Vec<Tensor>> {
                let places = self.params.iter().zip(&begun).zip(v);
                let places = places.map(|((param, begun), v)| {
                    Ok((param.var.clone(), (begun + v.affine(along * reach, 0.0)?)?))
                });
                let away = Displaced::put(places.collect::<Result<Vec<_>>>()?)?;
                let grads = gradient()?;
                away.restore()?;
                let of = |param: &Param| match grads.get(&param.var) {
                    Some(grad) => Ok(grad.contiguous()?),
                    None => Ok(param.var.zeros_like()?),
                };
                self.params.iter().map(of).collect()
            };
            let (ahead, behind) = (at(1.0)?, at(-1.0)?);
            let difference = ahead.iter().zip(&behind).map(|(a, b)| Ok((a - b)?.affine(0.5 / reach, 0.0)?));
            difference.collect()
        })
    }

    /// Its moments, by name; with them it goes on to the bit.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        fn tensors<T: WithDType>(
            param: &Param,
            kept: &Kept<T>,
            state: &mut BTreeMap<String, Tensor>,
        ) -> Result<()> {
            let shape = param.var.shape();
            for (what, values) in
                [("momentum", &kept.momentum), ("square", &kept.square), ("root", &kept.root)]
            {
                if values.len() == param.var.elem_count() {
                    let tensor = Tensor::from_slice(values, shape, &Device::Cpu)?;
                    state.insert(format!("{what}/{}", param.name), tensor);
                }
            }
            Ok(())
        }
        let mut state = BTreeMap::new();
        for param in &self.params {
            let steps = i64::try_from(param.t).unwrap_or(i64::MAX);
            state.insert(format!("steps/{}", param.name), Tensor::from_slice(&[steps], 1, &Device::Cpu)?);
            match &param.buffers {
                Buffers::F32(kept) => tensors(param, kept, &mut state)?,
                Buffers::F64(kept) => tensors(param, kept, &mut state)?,
            }
        }
        Ok(state)
    }

    /// Sets what [`Microscope::state`] returned. State of other parameters is refused, and then nothing has changed.
    pub fn load(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        fn read<T: Real + WithDType>(
            param: &Param,
            state: &BTreeMap<String, Tensor>,
            root: bool,
            differences: &mut Vec<String>,
        ) -> Result<Kept<T>> {
            let mut of = |what: &str| -> Result<Vec<T>> {
                let name = format!("{what}/{}", param.name);
                match state.get(&name) {
                    Some(t) if t.shape() == param.var.shape() && t.dtype() == T::DTYPE => {
                        Ok(t.flatten_all()?.to_vec1::<T>()?)
                    }
                    found => {
                        let found =
                            found.map_or("nothing".to_owned(), |t| format!("{:?} {:?}", t.dims(), t.dtype()));
                        differences.push(format!(
                            "`{name}`: expected {:?} {:?}, found {found}",
                            param.var.dims(),
                            T::DTYPE
                        ));
                        Ok(Vec::new())
                    }
                }
            };
            let root = if root { of("root")? } else { Vec::new() };
            Ok(Kept { momentum: of("momentum")?, square: of("square")?, root, before: Vec::new() })
        }
        let (mut loaded, mut differences) = (Vec::with_capacity(self.params.len()), Vec::new());
        let root = self.shadow.c.is_some();
        for param in &self.params {
            let steps = state
                .get(&format!("steps/{}", param.name))
                .and_then(|t| t.flatten_all().ok()?.to_vec1::<i64>().ok());
            let t = steps.and_then(|steps| u64::try_from(*steps.first()?).ok());
            if t.is_none() {
                differences.push(format!("`steps/{}`: expected a number of steps", param.name));
            }
            let buffers = match param.buffers {
                Buffers::F32(_) => Buffers::F32(read(param, state, root, &mut differences)?),
                Buffers::F64(_) => Buffers::F64(read(param, state, root, &mut differences)?),
            };
            loaded.push((t.unwrap_or(0), buffers));
        }
        if !differences.is_empty() {
            return Err(Error::State(differences));
        }
        for (param, (t, buffers)) in self.params.iter_mut().zip(loaded) {
            (param.t, param.buffers) = (t, buffers);
        }
        Ok(())
    }
}

impl<T: Real + WithDType> Kept<T> {
    fn pass(&mut self, scalars: &Scalars<f64>, grad: &Tensor, var: &Var, look: bool) -> Result<[f64; SUMS]> {
        let grad = grad.contiguous()?;
        let (grad_storage, grad_layout) = grad.storage_and_layout();
        let (storage, layout) = var.storage_and_layout();
        let (g, after) = (slice::<T>(&grad_storage, grad_layout)?, slice::<T>(&storage, layout)?);
        let step = look.then_some(Step { before: &self.before, after });
        let moments =
            Moments { momentum: &mut self.momentum, square: &mut self.square, root: &mut self.root };
        pass::pass(&scalars.round(), g, step, moments)
    }
}

impl Param {
    /// |u| / |b| of a sample of its elements, each with the number of elements that it stands for: the rate of momentum descent that
    /// the step of an element amounts to. Elements without momentum have none.
    fn rates(&self) -> Result<Vec<(f64, f64)>> {
        fn of<T: Real + WithDType>(kept: &Kept<T>, var: &Var) -> Result<Vec<(f64, f64)>> {
            let (storage, layout) = var.storage_and_layout();
            let after = slice::<T>(&storage, layout)?;
            let places = places(after.len());
            let weight = after.len() as f64 / places.len().max(1) as f64;
            let rate = |i: usize| {
                let momentum = Real::to_f64(kept.momentum[i]).abs();
                let update = Real::to_f64(after[i] - kept.before[i]).abs();
                (momentum > 0.0).then(|| (update / momentum, weight))
            };
            Ok(places.filter_map(rate).collect())
        }
        match &self.buffers {
            Buffers::F32(kept) => of(kept, &self.var),
            Buffers::F64(kept) => of(kept, &self.var),
        }
    }

    /// The parameter before the step that is looked at.
    fn before(&self) -> Result<Tensor> {
        Ok(match &self.buffers {
            Buffers::F32(kept) => Tensor::from_slice(&kept.before, self.var.shape(), &Device::Cpu)?,
            Buffers::F64(kept) => Tensor::from_slice(&kept.before, self.var.shape(), &Device::Cpu)?,
        })
    }

    /// What the step changed.
    fn update(&self) -> Result<Tensor> {
        Ok((self.var.as_tensor() - self.before()?)?)
    }

    /// Muon's direction of the momentum, for two axes or more.
    fn orthogonal(&self) -> Result<Option<Tensor>> {
        let (shape, n) = (self.var.shape(), self.var.elem_count());
        let Some(rows) = shape.dims().first().copied().filter(|_| shape.rank() > 1 && n > 0) else {
            return Ok(None);
        };
        let momentum = match &self.buffers {
            Buffers::F32(kept) => Tensor::from_slice(&kept.momentum, (rows, n / rows), &Device::Cpu)?,
            Buffers::F64(kept) => Tensor::from_slice(&kept.momentum, (rows, n / rows), &Device::Cpu)?,
        };
        let muon = MuonConfig::default();
        let norm = squares(&momentum)?.sqrt();
        if norm <= muon.eps {
            return Ok(None);
        }
        let direction = newton_schulz(&(momentum / norm)?, muon.ns_coefficients, muon.ns_steps)?;
        let scale = (rows as f64 / (n / rows) as f64).max(1.0).sqrt();
        Ok(Some((direction.reshape(shape)? * scale)?))
    }
}

/// The figures of a fit under the name of its direction.
fn tell_fit(name: &str, products: &Products, decays: bool, figures: &mut Figures) {
    let Some(fit) = products.fit(decays) else { return };
    let mut put = |what: &str, value: f64| figures.extend([(format!("{what}/{name}"), value)]);
    put("cos", fit.cosine);
    put("r2", fit.r2);
    put("rate", fit.rate);
    if decays {
        put("decay", fit.decay);
    }
}

fn tell_rates(sample: &mut [(f64, f64)], figures: &mut Figures) {
    if let Some(quantiles) = quantiles::weighted(sample, RATES.map(|(_, q)| q)) {
        for ((name, _), value) in RATES.iter().zip(quantiles) {
            figures.insert((*name).to_owned(), value);
        }
    }
}
