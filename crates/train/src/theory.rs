//! What theorems on optimizers are about, measured: the regret of a recipe's optimizer on its problem, step by step, with what bounds
//! on it are made of.
//!
//! A recipe of a [numeric problem](crate::numeric) is followed without a folder, by the same optimizer, schedules and projection as
//! [`run`](crate::run) takes, and with the same iterates.
use crate::numeric::{Function, Hindsight};
use crate::recipe::Task;
use crate::run::RunError;
use crate::{Recipe, Registries, Schedules};
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use rayon::prelude::*;
use serde_json::Value;
use taper_optim::{Domain, Optimizer, Per, StepContext};

/// What was measured by the end of step `t`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// Steps taken.
    pub t: u64,
    /// R(t) = Σ f_s(x_s) - min_x Σ f_s(x), s up to t; `None` where the minimum is not known.
    pub regret: Option<f64>,
    /// The largest regret of the steps since the point before.
    pub worst: Option<f64>,
    /// Σ 1/v over all coordinates, of an optimizer that has v.
    pub inverse_v: Option<f64>,
    /// The least v.
    pub least_v: Option<f64>,
    /// G: the largest ‖∇√(f_s + c)‖ so far, of an optimizer that has c.
    pub slope: Option<f64>,
    /// L: the largest √(f_s + c) so far.
    pub root: Option<f64>,
    /// Σ γ_s²/η_s: rates and momenta as they were.
    pub momenta: f64,
    /// The least ‖∇F(x_s)‖² so far, where F is what is expected of a step.
    pub gradient: f64,
}

/// A recipe followed to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Twelve points for every factor of ten.
    pub points: Vec<Point>,
    /// The largest distance between two points of the problem's domain; `None` without one.
    pub diameter: Option<f64>,
    /// Where it ended.
    pub x: Vec<f64>,
}

/// Points for every factor of ten.
const A_DECADE: f64 = 12.0;

/// The steps at whose end there is a point: 1, the last, and between them evenly on a log scale.
fn grid(steps: u64) -> Vec<u64> {
    let decades = (steps.max(1) as f64).log10() * A_DECADE;
    let mut grid: Vec<u64> =
        (0..=decades as u64).map(|k| 10f64.powf(k as f64 / A_DECADE).round() as u64).collect();
    grid.push(steps);
    grid.dedup();
    grid
}

/// Follows recipes side by side, each by itself: the traces in their order.
pub fn traces(recipes: &[Recipe], registries: &Registries) -> Vec<Result<Trace, RunError>> {
    recipes.par_iter().map(|recipe| trace(recipe, registries)).collect()
}

/// Follows a recipe of a numeric problem without a sweep.
pub fn trace(recipe: &Recipe, registries: &Registries) -> Result<Trace, RunError> {
    let Task::Problem(problem) = recipe.task() else {
        return Err(recipe.error_at("problem", "only the regret of a problem is known".to_owned()).into());
    };
    let function = registries
        .problems
        .build(&problem.name, &problem.config)
        .map_err(|e| recipe.error_at("problem", e.message))?;
    let domain = match problem.domain {
        Some(domain) => Some(domain.set().map_err(|message| recipe.error_at("problem.domain", message))?),
        None => None,
    };
    let schedule = &recipe.schedule;
    let schedules = Schedules::new(&schedule.kind, &schedule.config)
        .map_err(|e| recipe.error_at("schedule", e.message))?;
    if schedules.per != Per::Step && schedule.kind != "constant" {
        let message = "a problem has no epochs: give `per: step`".to_owned();
        return Err(recipe.error_at("schedule.per", message).into());
    }
    let mut hyper = recipe.optimizer.hyper.clone();
    if registries.optimizers.get(&recipe.optimizer.name)?.defaults.contains_key("lr") {
        hyper.insert("lr".into(), recipe.optimizer.lr.into());
    }
    let start = problem.start(function.start(), recipe.seed);
    let x = Var::from_tensor(&Tensor::new(start.as_slice(), &Device::Cpu)?)?;
    let params = vec![("x".to_owned(), x.clone())];
    let optimizer = registries.optimizers.build(&recipe.optimizer.name, params, &hyper)?;
    if optimizer.gradients() > 1 {
        let message = format!("{} takes a second gradient, which has no regret", recipe.optimizer.name);
        return Err(recipe.error_at("optimizer.name", message).into());
    }
    let n = start.len();
    let mut way = Way {
        recipe,
        function: &*function,
        optimizer,
        schedules,
        domain,
        paid: 0.0,
        hindsight: Hindsight::new(n),
        gradient: vec![0.0; n],
        point: Point { gradient: f64::INFINITY, ..Point::default() },
        x,
    };
    way.follow()
}

/// A recipe on its way.
struct Way<'a> {
    recipe: &'a Recipe,
    function: &'a dyn Function,
    optimizer: Box<dyn Optimizer>,
    schedules: Schedules,
    domain: Option<Domain>,
    /// Σ f_s(x_s).
    paid: f64,
    hindsight: Hindsight,
    gradient: Vec<f64>,
    /// What is known now.
    point: Point,
    x: Var,
}

impl Way<'_> {
    fn follow(&mut self) -> Result<Trace, RunError> {
        let steps = self.recipe.train.steps.unwrap_or(0);
        let mut next = grid(steps).into_iter().peekable();
        let mut points = Vec::new();
        for t in 0..steps {
            self.step(t, steps)?;
            if next.next_if_eq(&(t + 1)).is_some() {
                self.look_at_v()?;
                points.push(Point { t: t + 1, ..self.point });
                self.point.worst = None;
            }
        }
        let x = self.x.to_vec1::<f64>()?;
        Ok(Trace { points, diameter: self.domain.map(|domain| domain.diameter(x.len())), x })
    }

    /// Step `t`, from 0, and what it pays.
    fn step(&mut self, t: u64, steps: u64) -> Result<(), RunError> {
        let seed = self.recipe.seed;
        let x = self.x.to_vec1::<f64>()?;
        self.function.evaluate(&x, &mut self.gradient);
        self.point.gradient = least(self.point.gradient, squared(&self.gradient));
        let f = self.function.at(seed, t, &x, &mut self.gradient);
        self.paid += f;
        if let (Some(online), Some(domain)) = (self.function.online(), &self.domain) {
            self.hindsight.add(online, seed, t);
            let regret = self.paid - self.hindsight.least(domain).0;
            self.point.regret = Some(regret);
            self.point.worst = Some(self.point.worst.map_or(regret, |worst| most(worst, regret)));
        }
        let seen = f - self.recipe.train.loss_shift;
        if let Some(c) = self.recipe.optimizer.hyper.get("c").and_then(Value::as_f64) {
            let root = (seen + c).sqrt();
            let slope = squared(&self.gradient).sqrt() / (2.0 * root);
            let largest =
                |so_far: Option<f64>, now: f64| Some(so_far.map_or(now, |so_far| most(so_far, now)));
            (self.point.root, self.point.slope) =
                (largest(self.point.root, root), largest(self.point.slope, slope));
        }
        let rate = self.schedules.rate.factor(t, steps);
        let momentum = self.schedules.momentum.as_ref().map_or(1.0, |schedule| schedule.factor(t, steps));
        let gamma =
            ["momentum", "beta1"].iter().find_map(|key| self.recipe.optimizer.hyper.get(*key)?.as_f64());
        let gamma = gamma.unwrap_or(0.0) * momentum;
        self.point.momenta += gamma * gamma / (self.recipe.optimizer.lr * rate);
        let mut grads = GradStore::default();
        grads.insert(&self.x, Tensor::from_slice(&self.gradient, x.len(), &Device::Cpu)?);
        let context = StepContext::new().loss(seen).factor(rate).momentum_factor(momentum);
        self.optimizer.step(&grads, &context)?;
        match &self.domain {
            Some(domain) => Ok(domain.project([&self.x])?),
            None => Ok(()),
        }
    }

    /// The factors of the last step, of an optimizer that has such.
    fn look_at_v(&mut self) -> Result<(), RunError> {
        if !self.optimizer.info().name.starts_with("decgd") {
            return Ok(());
        }
        let state = self.optimizer.state_dict()?;
        let v = ["x.v_min", "x.v_used", "x.v"].iter().find_map(|name| state.tensors.get(*name));
        let v = v.map(Tensor::to_vec1::<f64>).transpose()?;
        self.point.inverse_v = v.as_ref().map(|v| v.iter().map(|v| 1.0 / v).sum());
        self.point.least_v = v.map(|v| v.into_iter().fold(f64::INFINITY, least));
        Ok(())
    }
}

fn squared(gradient: &[f64]) -> f64 {
    gradient.iter().map(|g| g * g).sum()
}

/// The smaller of two numbers, and none where one of them is none: `f64::min` would forget it.
fn least(so_far: f64, now: f64) -> f64 {
    if so_far.is_nan() || so_far < now { so_far } else { now }
}

/// The larger of two numbers, and none where one of them is none.
pub fn most(so_far: f64, now: f64) -> f64 {
    if so_far.is_nan() || so_far > now { so_far } else { now }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_is_none_stays_in_what_was_least_or_largest() {
        let all = [2.0, 1.0, 3.0];
        assert_eq!(all.into_iter().fold(f64::INFINITY, least), 1.0);
        assert_eq!(all.into_iter().fold(f64::NEG_INFINITY, most), 3.0);
        for place in 0..3 {
            let mut all = all;
            all[place] = f64::NAN;
            assert!(all.into_iter().fold(f64::INFINITY, least).is_nan(), "{place}");
            assert!(all.into_iter().fold(f64::NEG_INFINITY, most).is_nan(), "{place}");
        }
    }

    #[test]
    fn points_are_even_on_a_log_scale_and_end_at_the_last_step() {
        let points = grid(1000);
        assert_eq!((points[0], points[points.len() - 1]), (1, 1000));
        assert!(points.windows(2).all(|pair| pair[0] < pair[1]), "{points:?}");
        assert_eq!(points.iter().filter(|t| **t > 100).count(), 12);
        assert_eq!((grid(1), grid(1234).pop()), (vec![1], Some(1234)));
    }
}
