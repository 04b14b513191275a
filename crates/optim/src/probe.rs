//! Statistics of a step: what an optimizer does to each parameter.
use serde::Serialize;

/// Minimum, mean, maximum and quantiles of a quantity over the elements of a parameter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// The smallest value.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// The largest value.
    pub max: f64,
    /// The 1 %, 25 %, 50 %, 75 % and 99 % quantiles (nearest rank).
    pub quantiles: [f64; 5],
    /// How many values are below zero.
    pub negative: usize,
}

impl Distribution {
    /// Of any values; `None` without any.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        let n = values.len();
        let mean = values.iter().sum::<f64>() / n as f64;
        values.sort_by(f64::total_cmp);
        let rank = |q: f64| values[((q * n as f64).ceil() as usize).clamp(1, n) - 1];
        let (min, max) = (*values.first()?, *values.last()?);
        let quantiles = [0.01, 0.25, 0.5, 0.75, 0.99].map(rank);
        Some(Self { min, mean, max, quantiles, negative: values.iter().filter(|v| **v < 0.0).count() })
    }
}

/// What a step did to one parameter.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParamProbe {
    /// The parameter.
    pub name: String,
    /// |change| / |parameter before|, Euclidean norms; 0 / 0 counts as 0.
    pub update_ratio: f64,
    /// The rule's own quantity (DecGD: `v`; the Adam family: the denominator), if it has one.
    pub observed: Option<(&'static str, Distribution)>,
    /// Numbers of the step (DecGD: √(f + c), the effective learning rate at the mean of v).
    pub numbers: Vec<(&'static str, f64)>,
}

/// The statistics of one step, in the order of the parameters.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Probe {
    /// One record for every parameter that had a gradient.
    pub params: Vec<ParamProbe>,
}
