//! Functions that are another at every step, whose sum over all steps has a minimum that is known: for regret.
use super::functions::{blocks, repeat};
use super::{Config, Function, Online};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use taper_random::Rng;

/// The draws of step `t`, from 0.
fn draws(seed: u64, name: &str, t: u64) -> Rng {
    Rng::new(seed, "problem", name, t)
}

fn demand(ok: bool, key: &'static str, expected: &str, found: f64) -> Result<(), (&'static str, String)> {
    if ok { Ok(()) } else { Err((key, format!("expected {expected}, found {found}"))) }
}

fn share(key: &'static str, value: f64) -> Result<(), (&'static str, String)> {
    demand((0.0..=1.0).contains(&value), key, "a number between 0 and 1", value)
}

fn finite(key: &'static str, value: f64) -> Result<(), (&'static str, String)> {
    demand(value.is_finite() && value >= 0.0, key, "a finite number of at least 0", value)
}

/// How the targets of a step are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draw {
    /// Each variable's by itself, evenly between `-spread` and `spread`.
    #[default]
    Even,
    /// All at `spread`, in a share of steps, else all at `-spread`.
    Together,
}

/// ½ ‖x - z‖² with another target z at every step: convex, its sum least at the mean of the targets, or at the point of the domain
/// next to it.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Targets {
    /// Number of variables. Defaults to 10.
    pub n: usize,
    /// How targets are drawn: `even` or `together`. Defaults to `even`.
    pub draw: Draw,
    /// How far targets are from 0. Defaults to 1.
    pub spread: f64,
    /// With `together`, the share of steps whose targets are at `spread`. Defaults to 0.5.
    pub share: f64,
    /// The starting point, repeated to `n`. Defaults to (0).
    pub start: Vec<f64>,
}

impl Default for Targets {
    fn default() -> Self {
        Self { n: 10, draw: Draw::Even, spread: 1.0, share: 0.5, start: vec![0.0] }
    }
}

impl Online for Targets {
    fn curvature(&self) -> f64 {
        1.0
    }

    fn slope(&self, seed: u64, t: u64, out: &mut [f64]) -> f64 {
        let mut draws = draws(seed, "targets", t);
        match self.draw {
            Draw::Even => out.iter_mut().for_each(|b| *b = -self.spread * (2.0 * draws.uniform() - 1.0)),
            Draw::Together => {
                let target = if draws.uniform() < self.share { self.spread } else { -self.spread };
                out.fill(-target);
            }
        }
        0.5 * out.iter().map(|b| b * b).sum::<f64>()
    }
}

impl Function for Targets {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    /// What is expected of a step.
    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        let (mean, square) = match self.draw {
            Draw::Even => (0.0, self.spread * self.spread / 3.0),
            Draw::Together => ((2.0 * self.share - 1.0) * self.spread, self.spread * self.spread),
        };
        let mut f = 0.0;
        for (x, out) in x.iter().zip(gradient) {
            *out = x - mean;
            f += 0.5 * (x * x - 2.0 * x * mean + square);
        }
        f
    }

    fn online(&self) -> Option<&dyn Online> {
        Some(self)
    }
}

impl Config for Targets {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 1, &self.start)?;
        finite("spread", self.spread)?;
        share("share", self.share)
    }
}

/// ⟨b, x⟩ with another b at every step: `drift` up and down by turns, and noise evenly between `-noise` and `noise`. Linear, so that it
/// is negative as often as not.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Linear {
    /// Number of variables. Defaults to 10.
    pub n: usize,
    /// What every b has in common. Defaults to 0.1.
    pub drift: f64,
    /// What is drawn anew. Defaults to 0.3.
    pub noise: f64,
    /// The starting point, repeated to `n`. Defaults to (0).
    pub start: Vec<f64>,
}

impl Default for Linear {
    fn default() -> Self {
        Self { n: 10, drift: 0.1, noise: 0.3, start: vec![0.0] }
    }
}

impl Linear {
    fn drift(&self, i: usize) -> f64 {
        if i.is_multiple_of(2) { self.drift } else { -self.drift }
    }
}

impl Online for Linear {
    fn curvature(&self) -> f64 {
        0.0
    }

    fn slope(&self, seed: u64, t: u64, out: &mut [f64]) -> f64 {
        let mut draws = draws(seed, "linear", t);
        for (i, b) in out.iter_mut().enumerate() {
            *b = self.drift(i) + self.noise * (2.0 * draws.uniform() - 1.0);
        }
        0.0
    }
}

impl Function for Linear {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        gradient.iter_mut().enumerate().for_each(|(i, out)| *out = self.drift(i));
        x.iter().zip(gradient).map(|(x, b)| x * *b).sum()
    }

    fn online(&self) -> Option<&dyn Online> {
        Some(self)
    }
}

impl Config for Linear {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 1, &self.start)?;
        demand(self.drift.is_finite(), "drift", "a finite number", self.drift)?;
        finite("noise", self.noise)
    }
}

/// The functions that Adam fails on (Reddi, Kale & Kumar, 2018): `steep` · x now and then, -x otherwise. On [-1, 1] the sum is least
/// at -1 while the steep one comes often enough.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reddi {
    /// The slope C of the steep function. Defaults to 3.
    pub steep: f64,
    /// It comes first and then every so many steps. Defaults to 3.
    pub period: u64,
    /// It comes at random, with this probability, instead. Defaults to none.
    pub probability: Option<f64>,
    /// Where the search starts. Defaults to 0.
    pub start: f64,
}

impl Default for Reddi {
    fn default() -> Self {
        Self { steep: 3.0, period: 3, probability: None, start: 0.0 }
    }
}

impl Online for Reddi {
    fn curvature(&self) -> f64 {
        0.0
    }

    fn slope(&self, seed: u64, t: u64, out: &mut [f64]) -> f64 {
        let steep = match self.probability {
            Some(probability) => draws(seed, "reddi", t).uniform() < probability,
            None => t.is_multiple_of(self.period),
        };
        out.fill(if steep { self.steep } else { -1.0 });
        0.0
    }
}

impl Function for Reddi {
    fn start(&self) -> Vec<f64> {
        vec![self.start]
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        let often = self.probability.unwrap_or(1.0 / self.period as f64);
        let slope = often * self.steep - (1.0 - often);
        gradient.fill(slope);
        x.iter().map(|x| slope * x).sum()
    }

    fn online(&self) -> Option<&dyn Online> {
        Some(self)
    }
}

impl Config for Reddi {
    fn check(&self) -> Result<(), (&'static str, String)> {
        finite("steep", self.steep)?;
        demand(self.period > 0, "period", "at least 1 step", self.period as f64)?;
        share("probability", self.probability.unwrap_or(0.0))?;
        demand(self.start.is_finite(), "start", "a finite number", self.start)
    }
}

/// Where the noise of [`Wells`] is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Noise {
    /// In the gradient alone; the value is exact.
    #[default]
    Gradient,
    /// In the function, as with samples of data: all wells are at `spread` in a share of steps, else at `-spread`.
    Sample,
}

/// Σ u²/(1 + u²) with u = x - z: smooth, not convex, with bounded gradients; noise in the gradient, or another z at every step.
#[derive(Clone, Debug, JsonSchema, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wells {
    /// Number of variables. Defaults to 10.
    pub n: usize,
    /// Where the noise is: `gradient` or `sample`. Defaults to `gradient`.
    pub noise: Noise,
    /// The deviation of the gradient's noise, or how far z is from 0. Defaults to 0.5.
    pub spread: f64,
    /// With `sample`, the share of steps with z at `spread`. Defaults to 0.5.
    pub share: f64,
    /// The starting point, repeated to `n`. Defaults to (2).
    pub start: Vec<f64>,
}

impl Default for Wells {
    fn default() -> Self {
        Self { n: 10, noise: Noise::Gradient, spread: 0.5, share: 0.5, start: vec![2.0] }
    }
}

/// A well's value and slope.
fn well(u: f64) -> (f64, f64) {
    let below = 1.0 + u * u;
    (u * u / below, 2.0 * u / (below * below))
}

impl Wells {
    fn around(&self, z: f64, x: &[f64], gradient: &mut [f64]) -> f64 {
        let mut f = 0.0;
        for (x, out) in x.iter().zip(gradient) {
            let (value, slope) = well(x - z);
            *out = slope;
            f += value;
        }
        f
    }
}

impl Function for Wells {
    fn start(&self) -> Vec<f64> {
        repeat(&self.start, self.n)
    }

    fn evaluate(&self, x: &[f64], gradient: &mut [f64]) -> f64 {
        if self.noise == Noise::Gradient {
            return self.around(0.0, x, gradient);
        }
        let mut f = 0.0;
        for (x, out) in x.iter().zip(gradient) {
            let (one, other) = (well(x - self.spread), well(x + self.spread));
            *out = self.share * one.1 + (1.0 - self.share) * other.1;
            f += self.share * one.0 + (1.0 - self.share) * other.0;
        }
        f
    }

    fn at(&self, seed: u64, t: u64, x: &[f64], gradient: &mut [f64]) -> f64 {
        let mut draws = draws(seed, "wells", t);
        match self.noise {
            Noise::Gradient => {
                let f = self.around(0.0, x, gradient);
                gradient.iter_mut().for_each(|out| *out += self.spread * draws.normal());
                f
            }
            Noise::Sample => {
                let z = if draws.uniform() < self.share { self.spread } else { -self.spread };
                self.around(z, x, gradient)
            }
        }
    }
}

impl Config for Wells {
    fn check(&self) -> Result<(), (&'static str, String)> {
        blocks(self.n, 1, &self.start)?;
        finite("spread", self.spread)?;
        share("share", self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numeric::Hindsight;
    use taper_optim::Domain;

    fn online() -> [Box<dyn Function>; 4] {
        [
            Box::new(Targets { n: 4, spread: 1.5, ..Default::default() }),
            Box::new(Targets { n: 4, draw: Draw::Together, share: 0.75, ..Default::default() }),
            Box::new(Linear { n: 4, ..Default::default() }),
            Box::new(Reddi { probability: Some(0.3), ..Default::default() }),
        ]
    }

    fn values(x: &[f64], functions: impl Fn(&[f64], &mut [f64]) -> f64) -> (f64, Vec<f64>) {
        let mut gradient = vec![0.0; x.len()];
        (functions(x, &mut gradient), gradient)
    }

    #[test]
    fn gradients_are_those_of_the_values() {
        let wells: [Box<dyn Function>; 2] = [
            Box::new(Wells { n: 3, noise: Noise::Sample, share: 0.7, ..Default::default() }),
            Box::new(Wells { n: 3, spread: 0.0, ..Default::default() }),
        ];
        for function in online().iter().chain(&wells) {
            let x: Vec<f64> =
                function.start().iter().enumerate().map(|(i, x)| x + 0.1 * (i as f64 + 1.0)).collect();
            for t in [0, 1, 2] {
                for expected in [true, false] {
                    let of = |x: &[f64], out: &mut [f64]| match expected {
                        true => function.evaluate(x, out),
                        false => function.at(5, t, x, out),
                    };
                    let gradient = values(&x, of).1;
                    for i in 0..x.len() {
                        let at = |h: f64| {
                            let mut x = x.clone();
                            x[i] += h;
                            values(&x, of).0
                        };
                        // h² of curvature and ε/h of rounding: below 1e-9 at h = 1e-5 for values near 1.
                        let slope = (at(1e-5) - at(-1e-5)) / 2e-5;
                        assert!((slope - gradient[i]).abs() < 1e-8, "{slope} {}", gradient[i]);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_expected_is_the_mean_over_many_steps() {
        let wells = Wells { n: 2, noise: Noise::Sample, share: 0.7, ..Default::default() };
        let noisy = Wells { n: 2, ..Default::default() };
        let online = online();
        let others: [&dyn Function; 2] = [&wells, &noisy];
        for function in online.iter().map(|function| &**function).chain(others) {
            let x: Vec<f64> = function.start().iter().map(|x| x + 0.25).collect();
            let (f, gradient) = values(&x, |x, out| function.evaluate(x, out));
            let (steps, mut sum, mut sums) = (40_000, 0.0, vec![0.0; x.len()]);
            for t in 0..steps {
                let (f, gradient) = values(&x, |x, out| function.at(3, t, x, out));
                sum += f / steps as f64;
                sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g / steps as f64);
            }
            // Five standard errors of values that differ by at most 4.
            let error = 5.0 * 2.0 / (steps as f64).sqrt();
            assert!((sum - f).abs() < error, "{sum} instead of {f}");
            assert!(
                sums.iter().zip(&gradient).all(|(sum, g)| (sum - g).abs() < error),
                "{sums:?} {gradient:?}"
            );
        }
    }

    #[test]
    fn hindsight_knows_the_best_fixed_point() {
        let domains = [Domain::Box { low: -1.0, high: 0.5 }, Domain::Ball { radius: 0.7 }];
        for function in online() {
            for domain in domains {
                let n = function.start().len();
                let mut hindsight = Hindsight::new(n);
                let steps = 50;
                for t in 0..steps {
                    hindsight.add(function.online().unwrap(), 9, t);
                }
                let (least, best) = hindsight.least(&domain);
                let sum = |x: &[f64]| {
                    (0..steps).map(|t| values(x, |x, out| function.at(9, t, x, out)).0).sum::<f64>()
                };
                // A sum of fifty numbers near 1.
                assert!((sum(&best) - least).abs() < 1e-11, "{} instead of {least}", sum(&best));
                // No point of the domain near it or far from it is better.
                let mut rng = Rng::new(1, "test", "points", 0);
                for k in 0..400 {
                    let far = if k % 2 == 0 { 1.0 } else { 1e-3 };
                    let mut x: Vec<f64> =
                        best.iter().map(|x| x + far * (2.0 * rng.uniform() - 1.0)).collect();
                    match domain {
                        Domain::Box { low, high } => x.iter_mut().for_each(|x| *x = x.clamp(low, high)),
                        Domain::Ball { radius } => {
                            let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt();
                            x.iter_mut().for_each(|x| *x *= (radius / norm).min(1.0));
                        }
                    }
                    assert!(sum(&x) >= least - 1e-9, "{x:?} is better than {best:?}");
                }
            }
        }
    }
}
