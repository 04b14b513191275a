//! How the cost of a step grows with the size of its parts.
use super::step::Workload;
use super::{Case, Sides, measure};
use serde::{Deserialize, Serialize};
use taper_figures::plot::{Chart, Picture, Scale, Series as Line, Sheet};
use taper_figures::table::Table;

/// One part of a workload, and the sizes it takes.
pub struct Series {
    /// The workload and the part that grows.
    pub name: &'static str,
    sizes: &'static [usize],
    workload: fn(usize) -> Workload,
}

/// What is measured.
pub const SERIES: [Series; 6] = [
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
    Series {
        name: "gpt context",
        sizes: &[64, 128, 256, 512, 1024, 2048],
        workload: |n| Workload::gpt([4, 4, 128], n, 4),
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
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Growth {
    /// The series.
    pub series: String,
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
        Ok(Self { series: series.name.to_owned(), threads: sides.threads, points })
    }

    /// The exponent p of the least-squares fit seconds = c sizeᵖ.
    pub fn exponent(&self) -> f64 {
        slope(&self.points)
    }

    /// The same over the upper half of the sizes, where fixed costs count less.
    pub fn exponent_above(&self) -> f64 {
        slope(&self.points[self.points.len() / 2..])
    }
}

/// Times and exponents, a line for each.
pub fn table(results: &[Growth]) -> String {
    let mut table = Table::new(["series", "threads", "size: ms", "exponent", "upper half"]);
    for growth in results {
        let points: Vec<_> =
            growth.points.iter().map(|(size, s)| format!("{size}: {:.2}", s * 1e3)).collect();
        table.row([
            growth.series.clone(),
            growth.threads.to_string(),
            points.join(", "),
            format!("{:.2}", growth.exponent()),
            format!("{:.2}", growth.exponent_above()),
        ]);
    }
    table.markdown()
}

/// The time of a step over the size of what grows, on logarithmic axes, as SVG.
pub fn picture(results: &[Growth]) -> String {
    let mut charts: Vec<Chart> = Vec::new();
    for growth in results {
        let title = format!("{}: seconds a step", growth.series);
        let line = Line::line(
            &format!("{} thread{}", growth.threads, if growth.threads == 1 { "" } else { "s" }),
            growth.threads,
            growth.points.iter().map(|(size, seconds)| (*size as f64, *seconds)).collect(),
        );
        let fit = format!("{}: grows as size to the power {:.2}.", line.label, growth.exponent());
        match charts.iter_mut().find(|chart| chart.title == title) {
            Some(chart) => {
                chart.text = format!("{} {fit}", chart.text);
                chart.series.push(line);
            }
            None => {
                let size = growth.series.rsplit(' ').next().unwrap_or_default();
                let mut chart = Chart::new(&title, &fit, size, "");
                (chart.x_scale, chart.y_scale) = (Scale::Log, Scale::Log);
                chart.series.push(line);
                charts.push(chart);
            }
        }
    }
    let pictures: Vec<Picture> = charts.into_iter().map(Picture::Chart).collect();
    let rows = pictures.chunks(2).map(<[Picture]>::to_vec).collect();
    Sheet { title: "How the time of a step grows".into(), rows }.svg()
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
        let growth = Growth { series: "x".into(), threads: 1, points };
        // A few dozen roundings of logarithms below 10.
        assert!((growth.exponent() - 1.5).abs() < 1e-12 && (growth.exponent_above() - 1.5).abs() < 1e-12);
    }

    #[test]
    fn results_are_shown_with_their_exponents() {
        let line =
            r#"{"series": "mlp batch", "threads": 2, "points": [[8, 0.001], [16, 0.002], [32, 0.004]]}"#;
        let results: Vec<Growth> = vec![serde_json::from_str(line).unwrap()];
        assert!(table(&results).contains("| 8: 1.00, 16: 2.00, 32: 4.00 |"), "{}", table(&results));
        let svg = picture(&results);
        assert!(svg.contains("grows as size to the power 1.00") && svg.contains("2 threads"), "{svg}");
    }
}
