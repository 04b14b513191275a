//! The pictures of a page.
use super::rules::title;
use super::trace::Explained;
use crate::document::{Figure, Panel, View};
use taper_figures::plot::{Chart, Marks, Picture, Scale, Series, short};
use taper_figures::table::Table;
use taper_train::run::Sight;

/// More points than this are thinned to this many: the eye sees no more.
const MOST_POINTS: usize = 400;
/// More layers than this are not told apart.
const MOST_LAYERS: usize = 8;

/// The figures of one run.
pub fn figures(run: &Explained) -> Vec<Figure> {
    let all = [
        (
            "what its steps are close to, and at which rate",
            vec![closeness(run), rates(run), element_rates(run)],
        ),
        ("how much of every layer a step changes", vec![layers(run)]),
        ("its vector and √(f + c)", vec![vector(run), error(run)]),
        ("how steps land, and how near to unstable they are", vec![alpha(run), stability(run), noise(run)]),
    ];
    let figure = |(what, charts): (&str, Vec<Option<Chart>>)| {
        let panels: Vec<Panel> = charts.into_iter().flatten().map(panel).collect();
        let caption = format!("{}: {what}.", run.label);
        (!panels.is_empty()).then(|| Figure { caption, panels, data: Table::default() })
    };
    all.into_iter().filter_map(figure).collect()
}

fn panel(chart: Chart) -> Panel {
    Panel { views: vec![View { log: false, smooth: false, picture: Picture::Chart(chart) }] }
}

/// Points of what was seen, evenly thinned.
fn points(run: &Explained, of: impl Fn(&Sight) -> Option<f64>) -> Vec<(f64, f64)> {
    let all: Vec<(f64, f64)> =
        run.sights.iter().filter_map(|sight| Some((sight.step as f64, of(sight)?))).collect();
    let stride = all.len().div_ceil(MOST_POINTS).max(1);
    all.into_iter().step_by(stride).collect()
}

fn named(run: &Explained, name: &str) -> Vec<(f64, f64)> {
    points(run, |sight| sight.all.get(name).copied())
}

fn chart(title: &str, y_label: &str, series: Vec<Series>) -> Option<Chart> {
    let series: Vec<Series> = series.into_iter().filter(|series| !series.points.is_empty()).collect();
    let last = |series: &Series| {
        let (x, y) = series.points.last()?;
        Some(format!("{} ends at {} after step {}", series.label, short(*y), short(*x)))
    };
    let text = series.iter().filter_map(last).collect::<Vec<_>>().join("; ");
    (!series.is_empty())
        .then(|| Chart { series, ..Chart::new(title, &format!("{title}: {text}."), "step", y_label) })
}

/// R² of every reference.
fn closeness(run: &Explained) -> Option<Chart> {
    let series = taper_train::run::REFERENCES.iter().enumerate();
    let series =
        series.map(|(style, name)| Series::line(title(name), style, named(run, &format!("r2/{name}"))));
    let chart = chart("share of the step that a simple optimizer explains", "R²", series.collect())?;
    Some(Chart { y_range: Some((0.0, 1.0)), ..chart })
}

/// The rate of momentum descent that steps amount to, beside the learning rate.
fn rates(run: &Explained) -> Option<Chart> {
    let fitted = Series::line("fitted rate of SGDM", 0, named(run, "rate/sgdm"));
    let lr = Series { marks: Marks::Thin, ..Series::line("learning rate", 1, named(run, "lr")) };
    chart("rate of momentum descent that steps amount to", "rate", vec![fitted, lr])
}

/// The rates of single elements.
fn element_rates(run: &Explained) -> Option<Chart> {
    banded(run, "rates of single elements", "|u| / |b|", "rate_")
        .map(|chart| Chart { y_scale: Scale::Log, ..chart })
}

/// The quantiles of a quantity as bands around its middle.
fn banded(run: &Explained, title: &str, y_label: &str, prefix: &str) -> Option<Chart> {
    let stride = run.sights.len().div_ceil(MOST_POINTS).max(1);
    let of = |sight: &Sight, which: &str| sight.all.get(&format!("{prefix}{which}")).copied();
    let mut band = (Vec::new(), Vec::new(), Vec::new());
    for sight in run.sights.iter().step_by(stride) {
        let quantiles = ["p01", "p25", "p50", "p75", "p99"].map(|which| of(sight, which));
        let [Some(low), Some(lower), Some(middle), Some(upper), Some(high)] = quantiles else { continue };
        band.0.push((sight.step as f64, middle));
        band.1.push((low, high));
        band.2.push((lower, upper));
    }
    let base = Series { points: band.0, ..Series::line("1 % to 99 %, quarters, middle", 0, Vec::new()) };
    let outer = Series { range: band.1, marks: Marks::Band, ..base.clone() };
    chart(title, y_label, vec![outer, Series { range: band.2, ..base }])
}

/// Update-to-weight ratios.
fn layers(run: &Explained) -> Option<Chart> {
    let of = |layer: &str| points(run, |sight| sight.params.get(layer)?.get("update_ratio").copied());
    let mut all: Vec<(&str, Vec<(f64, f64)>)> = run
        .layers()
        .into_iter()
        .map(|layer| (layer, of(layer)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let last = |points: &[(f64, f64)]| points.last().map_or(f64::NEG_INFINITY, |(_, y)| *y);
    all.sort_by(|a, b| last(&b.1).total_cmp(&last(&a.1)));
    // The fastest and the slowest.
    if all.len() > MOST_LAYERS {
        let slow = all.split_off(all.len() - MOST_LAYERS / 2);
        all.truncate(MOST_LAYERS / 2);
        all.extend(slow);
    }
    let series = all.into_iter().enumerate().map(|(style, (layer, points))| {
        let positive = points.into_iter().filter(|(_, y)| *y > 0.0).collect();
        Series::line(layer, style, positive)
    });
    let chart = chart("update-to-weight ratio, fastest and slowest layers", "‖u‖ / ‖w‖", series.collect())?;
    Some(Chart { y_scale: Scale::Log, ..chart })
}

/// The distribution of v, and what it is to estimate.
fn vector(run: &Explained) -> Option<Chart> {
    let mut chart = banded(run, "v over all elements", "v", "v_")?;
    let root = Series::line("√(f + c)", 1, named(run, "root"));
    let edge =
        |name: &str| Series { marks: Marks::Thin, ..Series::line("least and largest", 2, named(run, name)) };
    chart.series.extend([root, edge("v_min"), edge("v_max")]);
    Some(chart)
}

fn error(run: &Explained) -> Option<Chart> {
    let rms = Series::line("root mean square", 0, named(run, "v_error_rms"));
    let most = Series { marks: Marks::Thin, ..Series::line("largest", 1, named(run, "v_error_max")) };
    chart("error of v as an estimate of √(f + c)", "", vec![rms, most])
}

fn alpha(run: &Explained) -> Option<Chart> {
    let series = vec![Series::line("α", 0, named(run, "alpha"))];
    let chart = chart("α: -1 the start, 0 the minimum along the step", "α", series)?;
    // A few steps along directions without curvature would hide all others.
    let mut values: Vec<f64> = chart.series[0].points.iter().map(|(_, y)| *y).collect();
    values.sort_by(f64::total_cmp);
    let high = values.get(values.len() * 19 / 20).copied().unwrap_or(1.0).max(1.0);
    Some(Chart { y_range: Some((-1.0, high)), ..chart })
}

fn stability(run: &Explained) -> Option<Chart> {
    let ratio = Series::line("rate × sharpness over its threshold", 0, named(run, "stability"));
    let edge = ratio.points.first().zip(ratio.points.last()).map(|(a, b)| vec![(a.0, 1.0), (b.0, 1.0)]);
    let edge =
        Series { marks: Marks::Thin, ..Series::line("edge of stability", 1, edge.unwrap_or_default()) };
    chart("stability ratio", "", vec![ratio, edge])
}

fn noise(run: &Explained) -> Option<Chart> {
    let series = Series::line("signal to noise", 0, named(run, "snr"));
    chart("signal to noise in the batch's gradient", "‖G‖² / (tr Σ / n)", vec![series])
}
