//! What a microscope saw of a run, by stages: thirds of its looks.
use crate::Run;
use taper_train::run::{Figures, Sight};

/// A run with what was seen of it.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The run.
    pub run: Run,
    /// The looks, in order; at least one.
    pub sights: Vec<Sight>,
    /// What it is called on a page.
    pub label: String,
}

impl Explained {
    /// Called by its optimizer and rate.
    pub fn new(run: Run, sights: Vec<Sight>) -> Self {
        let optimizer = &run.recipe.optimizer;
        let label = format!("{} {}", optimizer.name, taper_figures::plot::short(optimizer.lr));
        Self { run, sights, label }
    }

    /// Thirds of the looks, fewer where there are fewer than three.
    pub fn stages(&self) -> Vec<Stage<'_>> {
        let n = self.sights.len();
        let count = n.clamp(1, STAGES);
        let place = |i: usize| i * n / count;
        (0..count).map(|i| Stage(&self.sights[place(i)..place(i + 1)])).collect()
    }

    /// All looks as one stage.
    pub fn whole(&self) -> Stage<'_> {
        Stage(&self.sights)
    }

    /// Samples of a step; `None` for functions.
    pub fn samples(&self) -> Option<f64> {
        let recipe = &self.run.recipe;
        Some((recipe.data.as_ref()?.batch_size as u64 * recipe.train.accumulate) as f64)
    }

    /// The names of all parameters that were seen.
    pub fn layers(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.sights.iter().flat_map(|sight| sight.params.keys().map(String::as_str)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Into how many stages a run is cut.
const STAGES: usize = 3;

/// Some looks in a row.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a>(pub &'a [Sight]);

/// The simple optimizer that was nearest most often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nearest {
    /// Its name among the references.
    pub name: &'static str,
    /// The median of its R² over the stage.
    pub r2: f64,
    /// The median of its rate over the stage.
    pub rate: f64,
    /// In which share of the looks it was the nearest.
    pub share: f64,
}

impl<'a> Stage<'a> {
    /// The first and the last step.
    pub fn steps(&self) -> (u64, u64) {
        let step = |sight: Option<&Sight>| sight.map_or(0, |sight| sight.step);
        (step(self.0.first()), step(self.0.last()))
    }

    /// The values of a figure, with their steps.
    pub fn values(&self, name: &'a str) -> impl Iterator<Item = (u64, f64)> + 'a {
        self.0.iter().filter_map(move |sight| Some((sight.step, *sight.all.get(name)?)))
    }

    /// The median of a figure.
    pub fn median(&self, name: &str) -> Option<f64> {
        median(self.0.iter().filter_map(|sight| sight.all.get(name).copied()))
    }

    /// The median of a parameter's figure.
    pub fn of_layer(&self, layer: &str, name: &str) -> Option<f64> {
        median(self.0.iter().filter_map(|sight| sight.params.get(layer)?.get(name).copied()))
    }

    /// The largest of a figure, and its step.
    pub fn largest(&self, name: &'a str) -> Option<(u64, f64)> {
        self.values(name).filter(|(_, value)| !value.is_nan()).max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Which simple optimizer was nearest most often.
    pub fn nearest(&self) -> Option<Nearest> {
        nearest_of(self.0.iter().map(|sight| &sight.all))
    }

    /// The same of one parameter.
    pub fn nearest_of_layer(&self, layer: &str) -> Option<Nearest> {
        nearest_of(self.0.iter().filter_map(|sight| sight.params.get(layer)))
    }

    /// The mean noise and the mean signal over the stage: what is divided are means, since a mean or a median of ratios is biased.
    pub fn noise(&self) -> Option<Noise> {
        mean_noise(self.0.iter().map(|sight| &sight.all))
    }

    /// The same of one parameter.
    pub fn noise_of_layer(&self, layer: &str) -> Option<Noise> {
        mean_noise(self.0.iter().filter_map(|sight| sight.params.get(layer)))
    }

    /// Of the looks that measured how a step lands, the share without a minimum ahead: uphill or bent down.
    pub fn no_minimum(&self) -> Option<f64> {
        let measured = self.0.iter().filter(|sight| sight.all.contains_key("curvature"));
        let without = measured.clone().filter(|sight| !sight.all.contains_key("alpha")).count();
        let count = measured.count();
        (count > 0).then(|| without as f64 / count as f64)
    }
}

/// Gradient noise over some looks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Noise {
    /// The mean trace of the covariance of a sample's gradient.
    pub trace: f64,
    /// The mean squared norm of the true gradient. It can be negative.
    pub square: f64,
}

impl Noise {
    /// The simple noise scale, in samples. `None` where there is no signal.
    pub fn scale(&self) -> Option<f64> {
        (self.square > 0.0).then(|| self.trace / self.square)
    }

    /// Signal to noise in the mean gradient over `samples`. `None` where there is no noise.
    pub fn ratio(&self, samples: f64) -> Option<f64> {
        (self.trace > 0.0).then(|| self.square * samples / self.trace)
    }
}

/// The means over what is finite.
fn mean_noise<'a>(figures: impl Iterator<Item = &'a Figures>) -> Option<Noise> {
    let pair = |figures: &Figures| Some((*figures.get("noise_trace")?, *figures.get("grad_square")?));
    let pairs = figures.filter_map(pair).filter(|(trace, square)| trace.is_finite() && square.is_finite());
    let pairs: Vec<(f64, f64)> = pairs.collect();
    let n = pairs.len() as f64;
    let (trace, square) = pairs.iter().fold((0.0, 0.0), |(a, b), (trace, square)| (a + trace, b + square));
    (!pairs.is_empty()).then_some(Noise { trace: trace / n, square: square / n })
}

fn nearest_of<'a>(figures: impl Iterator<Item = &'a Figures> + Clone) -> Option<Nearest> {
    let each: Vec<&'static str> = figures.clone().filter_map(|f| Some(f.nearest()?.0)).collect();
    let count = |name: &str| each.iter().filter(|one| **one == name).count();
    let name = taper_train::run::REFERENCES.into_iter().rev().max_by_key(|name| count(name))?;
    if count(name) == 0 {
        return None;
    }
    let of = |what: &str| {
        let key = format!("{what}/{name}");
        median(figures.clone().filter_map(|figures| figures.get(&key).copied()))
    };
    Some(Nearest { name, r2: of("r2")?, rate: of("rate")?, share: count(name) as f64 / each.len() as f64 })
}

/// The median of what is finite; the lower of two in the middle.
pub fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}
