//! How the cost of a step grows with the size of its parts.
use super::step::Workload;
use super::{Case, Sides, measure};
use serde_json::{Value, json};

/// One part of a workload, and the sizes it takes.
pub struct Series {
    /// The workload and the part that grows.
    pub name: &'static str,
    sizes: &'static [usize],
    workload: fn(usize) -> Workload,
}

/// What is measured.
pub const SERIES: [Series; 5] = [
    Series { name: "mlp batch", sizes: &BATCHES, workload: |n| Workload::mlp(&[100], n) },
    Series {
        name: "mlp width",
        sizes: &[50, 100, 200, 400, 800, 1600],
        workload: |n| Workload::mlp(&[n], 128),
    },
    Series { name: "resnet18 batch", sizes: &BATCHES, workload: |n| Workload::conv("resnet18", "fast", n) },
    Series {
        name: "lstm1 length",
        sizes: &[10, 20, 35, 70, 140],
        workload: |n| Workload::lstm(1, 1150, 20, n),
    },
    Series { name: "lstm2 width", sizes: &[200, 400, 800, 1600], workload: |n| Workload::lstm(2, n, 20, 70) },
];
const BATCHES: [usize; 6] = [8, 16, 32, 64, 128, 256];

/// The points of all series as benchmarks, `scaling/<series>/<size>`.
pub(super) fn cases() -> Vec<Case> {
    let points = SERIES.iter().flat_map(|series| series.sizes.iter().map(move |size| (series, *size)));
    points
        .map(|(series, size)| {
            let repeat = if series.name.starts_with("mlp") { 20 } else { 1 };
            (series.workload)(size).case(point(series, size), repeat, None)
        })
        .collect()
}

fn point(series: &Series, size: usize) -> String {
    format!("scaling/{}/{size}", series.name)
}

/// What a series showed.
#[derive(Clone, Debug)]
pub struct Growth {
    /// The series.
    pub name: &'static str,
    /// Threads it ran on.
    pub threads: usize,
    /// Size and seconds of each point.
    pub points: Vec<(usize, f64)>,
}

impl Growth {
    /// Measures a series.
    pub fn measure(series: &Series, sides: &Sides) -> Result<Self, super::BenchError> {
        let mut points = Vec::with_capacity(series.sizes.len());
        for size in series.sizes {
            let found = super::select(&[point(series, *size)])?;
            for case in &found {
                points.push((*size, measure(case, sides)?.seconds()));
            }
        }
        Ok(Self { name: series.name, threads: sides.threads, points })
    }

    /// The exponent p of the least-squares fit seconds = c sizeᵖ.
    pub fn exponent(&self) -> f64 {
        slope(&self.points)
    }

    /// The same over the upper half of the sizes, where fixed costs count less.
    pub fn exponent_above(&self) -> f64 {
        slope(&self.points[self.points.len() / 2..])
    }

    /// One object.
    pub fn json(&self) -> Value {
        json!({
            "series": self.name, "threads": self.threads, "points": self.points,
            "exponent": self.exponent(), "exponent_above": self.exponent_above(),
        })
    }
}

fn slope(points: &[(usize, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(size, s)| ((*size as f64).ln(), s.ln())).collect();
    let n = logs.len() as f64;
    let (x, y) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let covariance: f64 = logs.iter().map(|p| (p.0 - x) * (p.1 - y)).sum();
    covariance / logs.iter().map(|p| (p.0 - x).powi(2)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_law_is_found_again() {
        let points = [8, 16, 32, 64].map(|n| (n, 0.003 * (n as f64).powf(1.5))).to_vec();
        let growth = Growth { name: "x", threads: 1, points };
        // A few dozen roundings of logarithms below 10.
        assert!((growth.exponent() - 1.5).abs() < 1e-12 && (growth.exponent_above() - 1.5).abs() < 1e-12);
    }
}
