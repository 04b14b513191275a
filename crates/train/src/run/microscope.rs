//! The microscope of a run: what it looks at in a step, and with which gradients.
//!
//! It changes nothing that is trained: gradients are taken again as for optimizers that want a second one, with the same draws and
//! with running statistics put back, and parameters come back to the bit.
use super::looks::{Figures, Sight};
use super::optimizers::{Held, Optimizers};
use super::task::{Gradient, Task};
use super::{Run, RunError, gather};
use crate::recipe::{Look, Precision, Recipe, What};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use std::collections::{BTreeMap, HashSet};
use taper_models::rng::Rng;
use taper_optim::{Along, Halves, Seen, Shadow, Spread, StepContext, early_stop};

/// Its moments in a checkpoint.
pub(crate) const MICROSCOPE: &str = "microscope.safetensors";

/// The microscope.
pub(crate) struct Microscope {
    look: Look,
    /// Whether products are those of rounded numbers, of which differences of gradients tell no sharpness.
    rounded: bool,
    seed: u64,
    inner: taper_optim::Microscope,
}

/// What is seen before a step: gradients of the two halves of its batch, and their samples.
type Split = Option<([GradStore; 2], f64)>;

impl Microscope {
    /// That of a recipe, if it asks for one.
    pub fn new(
        recipe: &Recipe,
        task: &dyn Task,
        optimizers: &Optimizers,
        device: &Device,
    ) -> Result<Option<Self>, RunError> {
        let Some(look) = recipe.train.probe.microscope() else { return Ok(None) };
        if !device.is_cpu() {
            let message = "the microscope is the CPU's: give `device: cpu`, or `train.probe: true`, which any device has";
            return Err(recipe.error_at("train.probe", message).into());
        }
        let rounded = recipe.train.precision == Precision::Bf16;
        if rounded && look.names(What::Sharpness) {
            let message = "`sharpness` is had from small differences of weights, which bf16 rounds away: give `train.precision: f32`; \
                           `all` is all that the run can have";
            return Err(recipe.error_at("train.probe", message).into());
        }
        let trained: HashSet<_> = optimizers.vars.iter().map(|var| var.id()).collect();
        let params = task.params().trainable().into_iter().filter(|(_, var)| trained.contains(&var.id()));
        let main = optimizers.main();
        let shadow = Shadow::of(&main.config(), main.needs_loss());
        let inner = taper_optim::Microscope::new(params.collect(), shadow)?;
        Ok(Some(Self { look: look.clone(), rounded, seed: recipe.seed, inner }))
    }

    /// Whether it looks at something that the run can have.
    fn wants(&self, what: What) -> bool {
        self.look.wants(what) && !(self.rounded && what == What::Sharpness)
    }

    /// Whether it looks at a step.
    pub fn looks_at(&self, step: u64) -> bool {
        step == 1 || super::is_due(Some(self.look.every), step)
    }

    /// Whether it wants the batch of a step once more.
    pub fn wants_batch(&self, step: u64) -> bool {
        let wants = [What::Noise, What::Alpha, What::Sharpness].into_iter().any(|what| self.wants(what));
        self.looks_at(step) && wants
    }

    /// Before a step: remembers the parameters.
    pub fn before(
        &mut self,
        task: &mut dyn Task,
        vars: &[Var],
        batch: &Gradient,
        step: u64,
    ) -> Result<Split, RunError> {
        if !self.looks_at(step) {
            return Ok(None);
        }
        self.inner.before()?;
        if self.look.wants(What::Noise) { gather::halves(task, vars, batch) } else { Ok(None) }
    }

    pub fn state(&self) -> Result<BTreeMap<String, Tensor>, RunError> {
        Ok(self.inner.state()?)
    }

    pub fn load(&mut self, state: &BTreeMap<String, Tensor>) -> Result<(), RunError> {
        // A microscope that is new to the run begins where it is.
        if state.is_empty() { Ok(()) } else { Ok(self.inner.load(state)?) }
    }

    /// Leaves out what was not asked for.
    fn only_wanted(&self, seen: &mut Seen) {
        let wanted = |name: &String| match name.split_once('/').map_or(name.as_str(), |(what, _)| what) {
            "grad_norm" | "update_norm" | "weight_norm" | "update_ratio" => self.look.wants(What::Norms),
            "cos" | "r2" | "rate" | "decay" => self.look.wants(What::Nearest),
            name if name.starts_with("rate_") => self.look.wants(What::Rates),
            _ => true,
        };
        seen.all.retain(|name, _| wanted(name));
        seen.params.values_mut().for_each(|figures| figures.retain(|name, _| wanted(name)));
    }
}

/// A look at a step that was taken.
pub(super) struct Taken<'a> {
    pub batch: &'a Gradient,
    /// As the optimizers got it.
    pub context: &'a StepContext,
    /// The loss before the recipe's shift.
    pub loss: Option<f64>,
    pub halves: Split,
    pub lr: f64,
    pub step: u64,
    pub epoch: u64,
}

impl Run<'_> {
    /// Looks at a step that was taken, if it is one to look at.
    pub(super) fn look(&mut self, taken: &Taken<'_>) -> Result<(), RunError> {
        let Some(microscope) = &mut self.microscope else { return Ok(()) };
        let Taken { batch, context, step, .. } = *taken;
        if !microscope.looks_at(step) {
            return Ok(microscope.inner.pass(&batch.grads, context)?);
        }
        let mut seen = microscope.inner.after(&batch.grads, context)?;
        let momentum = ["rate/sgdm", "r2/sgdm"].map(|name| seen.all.get(name).copied());
        let shadow = microscope.inner.shadow();
        let microscope = &*microscope;
        let wants = |what: What| microscope.wants(what);
        if wants(What::Orthogonal) {
            microscope.inner.orthogonal(&batch.grads, &mut seen)?;
        }
        microscope.only_wanted(&mut seen);
        seen.all.extend([("lr".to_owned(), taken.lr), ("momentum".to_owned(), shadow.momentum)]);
        seen.all.extend(taken.loss.map(|loss| ("loss".to_owned(), loss)));
        if wants(What::Vector)
            && let Some(root) = shadow.c.and_then(|c| Some((context.loss? + c).sqrt()))
        {
            vector(&self.optimizers, root, &mut seen);
        }
        if let Some((halves, samples)) = &taken.halves {
            noise(microscope, batch, halves, *samples, &mut seen)?;
        }
        let vars = self.optimizers.vars.clone();
        let held = self.optimizers.held.clone();
        let mut again = Again { task: &mut *self.task, vars: &vars, held: &held, batch, taken: step - 1 };
        if wants(What::Alpha) {
            let after = again.gradient()?;
            let losses = [batch.total.read()?, after.total.read()?];
            let slopes = [microscope.inner.slope(&batch.grads)?, microscope.inner.slope(&after.grads)?];
            alpha(&Along { losses, slopes }, &mut seen);
        }
        if wants(What::Sharpness) {
            let mut failure = None;
            let mut start = |name: &str, values: &mut [f64]| {
                let mut rng = Rng::new(microscope.seed, "sharpness", name, step);
                values.iter_mut().for_each(|value| *value = rng.normal());
            };
            let found = microscope.inner.sharpness(&mut start, &mut || match again.gradient() {
                Ok(gradient) => Ok(gradient.grads),
                Err(e) => Err(candle_core::Error::msg(failure.insert(e).to_string()).into()),
            });
            if let Some(failure) = failure {
                return Err(failure);
            }
            if let Some(found) = found? {
                seen.all.insert("sharpness".into(), found.value);
                seen.all.insert("sharpness_error".into(), found.error);
                if let [Some(rate), Some(r2)] = momentum {
                    seen.all.insert("stability".into(), rate * found.value / shadow.threshold());
                    // Without the fit nobody can tell whether the ratio is the step's.
                    seen.all.insert("r2/sgdm".into(), r2);
                }
            }
        }
        let params = seen.params.into_iter().map(|(name, figures)| (name, Figures(figures))).collect();
        self.looks.add(&Sight { step, epoch: taken.epoch, all: Figures(seen.all), params })
    }
}

/// The step's batches once more.
struct Again<'a> {
    task: &'a mut dyn Task,
    vars: &'a [Var],
    held: &'a Held,
    batch: &'a Gradient,
    /// Steps taken before.
    taken: u64,
}

impl Again<'_> {
    fn gradient(&mut self) -> Result<Gradient, RunError> {
        let mut gradient = gather::once_more(self.task, self.vars, self.batch)?;
        self.held.remove_from(&mut gradient.grads, self.taken);
        Ok(gradient)
    }
}

/// What follows √(f + c), and how well.
fn vector(optimizers: &Optimizers, root: f64, seen: &mut Seen) {
    let followers: Vec<_> = optimizers.each().flat_map(|optimizer| optimizer.followers()).collect();
    let values: Vec<_> = followers.iter().map(|(_, values)| *values).collect();
    let Some(spread) = Spread::of(&values, root) else { return };
    let [p01, p25, p50, p75, p99] = spread.quantiles;
    let figures = [
        ("root", root),
        ("v_min", spread.min),
        ("v_p01", p01),
        ("v_p25", p25),
        ("v_p50", p50),
        ("v_p75", p75),
        ("v_p99", p99),
        ("v_max", spread.max),
        ("v_mean", spread.mean),
        ("v_negative", spread.negative),
        ("v_error_rms", spread.rms_error),
        ("v_error_max", spread.max_error),
    ];
    seen.all.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    for ((name, _), own) in followers.iter().zip(&spread.each) {
        let Some(own) = own else { continue };
        let figures = [("v_min", own.min), ("v_mean", own.mean), ("v_max", own.max)];
        let of = seen.params.entry((*name).to_owned()).or_default();
        of.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    }
}

/// What the halves of a batch tell of all parameters and of each.
fn noise(
    microscope: &Microscope,
    batch: &Gradient,
    [a, b]: &[GradStore; 2],
    samples: f64,
    seen: &mut Seen,
) -> Result<(), RunError> {
    let tell = |halves: &Halves, figures: &mut BTreeMap<String, f64>| {
        let noise = halves.noise();
        let mut put =
            |name: &str, value: Option<f64>| figures.extend(value.map(|value| (name.to_owned(), value)));
        put("noise_trace", Some(noise.trace));
        put("grad_square", Some(noise.square));
        put("noise_scale", noise.scale());
        put("snr", noise.ratio(samples));
    };
    let (mut all, mut each) = (Halves::default(), Vec::new());
    // What is no longer trained has no gradient in the step.
    for (name, var) in microscope.inner.params().filter(|(_, var)| batch.grads.get(var).is_some()) {
        let Some(halves) = Halves::of(a, b, var, samples)? else { continue };
        tell(&halves, seen.params.entry(name.to_owned()).or_default());
        all = all.plus(halves);
        each.push((var.elem_count(), halves));
    }
    tell(&all, &mut seen.all);
    seen.all.extend(early_stop(each).map(|value| ("early_stop".to_owned(), value)));
    Ok(())
}

/// Where the step lands in the parabola along it.
fn alpha(along: &Along, seen: &mut Seen) {
    let parabola = along.parabola();
    let figures =
        [("loss_after", along.losses[1]), ("slope", parabola.slope), ("curvature", parabola.curvature)];
    seen.all.extend(figures.map(|(name, value)| (name.to_owned(), value)));
    seen.all.extend(along.alpha().map(|value| ("alpha".to_owned(), value)));
}
