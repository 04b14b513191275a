//! Learning curves as a picture.
use crate::run::{Outcome, Split};
use plotters::prelude::*;
use std::path::Path;

/// Colours that stay apart for colour-blind readers (Okabe & Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(90, 90, 90),
];

struct Curve {
    label: String,
    points: Vec<(f64, f64)>,
}

/// What one panel shows.
struct Panel<'a> {
    title: &'a str,
    split: Split,
    metric: &'a str,
    factor: f64,
    log: bool,
}

/// Draws training loss (log scale) and the test metric of several runs, as SVG.
pub fn curves(runs: &[(String, &Outcome)], path: &Path) -> Result<(), String> {
    let classes = runs.iter().any(|(_, run)| run.summary.metric == "accuracy");
    let loss = Panel { title: "training loss", split: Split::Train, metric: "loss", factor: 1.0, log: true };
    let test = match classes {
        true => Panel {
            title: "test accuracy, %",
            split: Split::Test,
            metric: "accuracy",
            factor: 100.0,
            log: false,
        },
        false => Panel {
            title: "test perplexity",
            split: Split::Test,
            metric: "perplexity",
            factor: 1.0,
            log: true,
        },
    };
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (1100, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| e.to_string())?;
        let halves = area.split_evenly((1, 2));
        for (half, panel) in halves.iter().zip([loss, test]) {
            draw(half, &panel, &of(runs, &panel)).map_err(|e| e.to_string())?;
        }
        area.present().map_err(|e| e.to_string())?;
    }
    std::fs::write(path, svg).map_err(|e| format!("{}: {e}", path.display()))
}

fn of(runs: &[(String, &Outcome)], panel: &Panel) -> Vec<Curve> {
    let curve = |(label, run): &(String, &Outcome)| {
        let records = run.records.iter().filter(|r| r.split == panel.split);
        let points =
            records.filter_map(|r| Some((r.epoch as f64, panel.factor * r.values.get(panel.metric)?)));
        Curve { label: label.clone(), points: points.filter(|(_, y)| y.is_finite()).collect() }
    };
    runs.iter().map(curve).collect()
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(area: &Area, panel: &Panel, curves: &[Curve]) -> Result<(), Box<dyn std::error::Error>> {
    let values = || curves.iter().flat_map(|c| &c.points);
    let last = values().map(|p| p.0).fold(1.0, f64::max);
    let (low, high) = values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), p| (l.min(p.1), h.max(p.1)));
    if !(low.is_finite() && high.is_finite()) {
        return Ok(());
    }
    let mut builder = ChartBuilder::on(area);
    builder.caption(panel.title, ("sans-serif", 18)).margin(12).x_label_area_size(36).y_label_area_size(58);
    // One epoch alone still needs an axis of some length.
    let x = (last - 1.0).min(1.0)..last.max(1.0);
    macro_rules! chart {
        ($y:expr) => {{
            let mut chart = builder.build_cartesian_2d(x, $y)?;
            chart
                .configure_mesh()
                .light_line_style(WHITE.mix(0.0))
                .bold_line_style(BLACK.mix(0.12))
                .x_desc("epoch")
                .x_labels(last.min(10.0) as usize)
                .x_label_formatter(&|x| format!("{x:.0}"))
                .y_label_formatter(&|y| label(*y))
                .label_style(("sans-serif", 13))
                .draw()?;
            for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
                let line =
                    LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)).point_size(3);
                let colour = *colour;
                chart
                    .draw_series(line)?
                    .label(&curve.label)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            }
            chart
                .configure_series_labels()
                .position(if panel.log {
                    SeriesLabelPosition::UpperRight
                } else {
                    SeriesLabelPosition::LowerRight
                })
                .background_style(WHITE.mix(0.85))
                .border_style(BLACK.mix(0.2))
                .label_font(("sans-serif", 13))
                .draw()?;
        }};
    }
    if panel.log && low > 0.0 {
        chart!((low * 0.8..high * 1.25).log_scale());
    } else {
        let space = ((high - low) * 0.08).max(1e-3);
        chart!(low - space..high + space);
    }
    Ok(())
}

/// As many digits as a tick needs.
fn label(y: f64) -> String {
    match y.abs() {
        size if size >= 1000.0 => format!("{y:.0}"),
        size if size >= 10.0 => format!("{y:.1}"),
        size if size >= 0.1 => format!("{y:.2}"),
        _ => format!("{y:.1e}"),
    }
}
