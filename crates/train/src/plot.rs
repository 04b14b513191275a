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
struct Panel {
    title: String,
    split: Split,
    metric: String,
    factor: f64,
    log: bool,
    /// Drawn by steps, on a log axis, instead of by epochs.
    by_step: bool,
}

/// Draws training loss (log scale) and the test metric of several runs, as SVG. Runs of one epoch are drawn by their
/// steps; where the loss is all there is to judge by, it is the only panel.
pub fn curves(runs: &[(String, &Outcome)], path: &Path) -> Result<(), String> {
    let metric = runs.first().map_or("loss", |(_, run)| run.summary.metric.as_str()).to_owned();
    let by_step = runs.iter().all(|(_, run)| run.summary.epochs <= 1);
    let mut panels = vec![Panel {
        title: "training loss".to_owned(),
        split: Split::Train,
        metric: "loss".to_owned(),
        factor: 1.0,
        log: true,
        by_step,
    }];
    if metric != "loss" {
        let share = metric == "accuracy";
        panels.push(Panel {
            title: format!("test {metric}{}", if share { ", %" } else { "" }),
            split: Split::Test,
            metric,
            factor: if share { 100.0 } else { 1.0 },
            log: !share,
            by_step,
        });
    }
    let mut svg = String::new();
    {
        let width = 550 * panels.len() as u32;
        let area = SVGBackend::with_string(&mut svg, (width, 420)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| e.to_string())?;
        let parts = area.split_evenly((1, panels.len()));
        for (part, panel) in parts.iter().zip(&panels) {
            draw(part, panel, &of(runs, panel)).map_err(|e| e.to_string())?;
        }
        area.present().map_err(|e| e.to_string())?;
    }
    std::fs::write(path, svg).map_err(|e| format!("{}: {e}", path.display()))
}

/// Points of a curve by steps: as many as a panel can show apart, evenly spaced on its axis.
const POINTS: f64 = 400.0;

fn of(runs: &[(String, &Outcome)], panel: &Panel) -> Vec<Curve> {
    let curve = |(label, run): &(String, &Outcome)| {
        let mut shown = None;
        let records = run.records.iter().filter(|r| r.split == panel.split);
        let points = records.filter_map(|r| {
            let x = if panel.by_step { r.step } else { r.epoch } as f64;
            if panel.by_step {
                let place = (POINTS * x.ln() / (run.summary.steps.max(2) as f64).ln()) as i64;
                if shown.replace(place) == Some(place) {
                    return None;
                }
            }
            Some((x, panel.factor * r.values.get(&panel.metric)?))
        });
        let drawable = |y: f64| y.is_finite() && (!panel.log || y > 0.0);
        Curve { label: label.clone(), points: points.filter(|(_, y)| drawable(*y)).collect() }
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
    builder
        .caption(&panel.title, ("sans-serif", 18))
        .margin(12)
        .margin_right(24)
        .x_label_area_size(36)
        .y_label_area_size(58);
    // One epoch alone still needs an axis of some length.
    let x = if panel.by_step { 1.0..last.max(2.0) } else { (last - 1.0).min(1.0)..last };
    let dot = if values().count() > 50 * curves.len() { 0 } else { 3 };
    macro_rules! chart {
        ($x:expr, $y:expr) => {{
            let mut chart = builder.build_cartesian_2d($x, $y)?;
            chart
                .configure_mesh()
                .light_line_style(WHITE.mix(0.0))
                .bold_line_style(BLACK.mix(0.12))
                .x_desc(if panel.by_step { "step" } else { "epoch" })
                .x_labels(last.min(10.0) as usize)
                .x_label_formatter(&|x| format!("{x:.0}"))
                .y_label_formatter(&|y| label(*y))
                .label_style(("sans-serif", 13))
                .draw()?;
            for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
                let line =
                    LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2)).point_size(dot);
                let colour = *colour;
                chart
                    .draw_series(line)?
                    .label(&curve.label)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
            }
            chart
                .configure_series_labels()
                .position(match (panel.by_step, panel.log) {
                    (true, _) => SeriesLabelPosition::LowerLeft,
                    (false, true) => SeriesLabelPosition::UpperRight,
                    (false, false) => SeriesLabelPosition::LowerRight,
                })
                .background_style(WHITE.mix(0.85))
                .border_style(BLACK.mix(0.2))
                .label_font(("sans-serif", 13))
                .draw()?;
        }};
    }
    let (logarithmic, space) = (low * 0.8..high * 1.25, ((high - low) * 0.08).max(1e-3));
    match (panel.by_step, panel.log) {
        (true, true) => chart!(x.log_scale(), logarithmic.log_scale()),
        (true, false) => chart!(x.log_scale(), low - space..high + space),
        (false, true) => chart!(x, logarithmic.log_scale()),
        (false, false) => chart!(x, low - space..high + space),
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
