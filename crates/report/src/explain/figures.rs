//! The pictures of a page.
use super::rules::title;
use super::trace::Explained;
use crate::document::{Figure, Panel, View};
use taper_figures::plot::{Chart, Marks, Picture, Scale, Series, short};
use taper_figures::table::Table;
use taper_train::run::Sight;

/// More points than this are thinned to about this many: the eye sees no more.
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

/// The places of the points that are drawn of many, each of which reaches from a low to a high value: of each bin of as many points
/// the lowest and the highest, so that no spike is lost, with the first and the last of all.
fn drawn(reach: &[(f64, f64)]) -> Vec<usize> {
    if reach.len() <= MOST_POINTS {
        return (0..reach.len()).collect();
    }
    let bin = reach.len().div_ceil(MOST_POINTS / 2);
    let mut places = vec![0, reach.len() - 1];
    for start in (0..reach.len()).step_by(bin) {
        let bin = || start..(start + bin).min(reach.len());
        // What is no number has no height.
        places.extend(
            bin().filter(|i| !reach[*i].0.is_nan()).min_by(|i, j| reach[*i].0.total_cmp(&reach[*j].0)),
        );
        places.extend(
            bin().filter(|i| !reach[*i].1.is_nan()).max_by(|i, j| reach[*i].1.total_cmp(&reach[*j].1)),
        );
    }
    places.sort_unstable();
    places.dedup();
    places
}

/// Points of what was seen, thinned.
fn points(run: &Explained, of: impl Fn(&Sight) -> Option<f64>) -> Vec<(f64, f64)> {
    let all: Vec<(f64, f64)> =
        run.sights.iter().filter_map(|sight| Some((sight.step as f64, of(sight)?))).collect();
    let reach: Vec<(f64, f64)> = all.iter().map(|(_, y)| (*y, *y)).collect();
    drawn(&reach).into_iter().map(|place| all[place]).collect()
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
    let of = |sight: &Sight, which: &str| sight.all.get(&format!("{prefix}{which}")).copied();
    let (mut all, mut reach) = (Vec::new(), Vec::new());
    for sight in &run.sights {
        let quantiles = ["p01", "p25", "p50", "p75", "p99"].map(|which| of(sight, which));
        let [Some(low), Some(lower), Some(middle), Some(upper), Some(high)] = quantiles else { continue };
        all.push(((sight.step as f64, middle), (lower, upper)));
        reach.push((low, high));
    }
    let mut band = (Vec::new(), Vec::new(), Vec::new());
    for place in drawn(&reach) {
        band.0.push(all[place].0);
        band.1.push(reach[place]);
        band.2.push(all[place].1);
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
    let mut values: Vec<f64> = run.whole().values("alpha").map(|(_, y)| y).collect();
    values.sort_by(f64::total_cmp);
    let high = values.get(values.len() * 19 / 20).copied().unwrap_or(1.0).max(1.0);
    Some(Chart { y_range: Some((-1.0, high)), ..chart })
}

fn stability(run: &Explained) -> Option<Chart> {
    let ratio = Series::line("rate × sharpness over its threshold", 0, named(run, "stability"));
    let edge = ratio.points.first().zip(ratio.points.last()).map(|(a, b)| vec![(a.0, 1.0), (b.0, 1.0)]);
    let edge =
        Series { marks: Marks::Thin, ..Series::line("edge of stability", 1, edge.unwrap_or_default()) };
    chart("stability ratio, of momentum descent", "", vec![ratio, edge])
}

fn noise(run: &Explained) -> Option<Chart> {
    let series = Series::line("signal to noise", 0, named(run, "snr"));
    chart("signal to noise in the batch's gradient", "‖G‖² / (tr Σ / n)", vec![series])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spike_of_one_look_in_ten_thousand_is_drawn() {
        let line = |n: usize| -> Vec<(f64, f64)> { (0..n).map(|i| (i as f64, i as f64)).collect() };
        assert_eq!(drawn(&line(400)).len(), 400);
        assert!(drawn(&[]).is_empty());
        for place in [1, 5003, 9998] {
            let mut flat = vec![(1.0, 1.0); 10_000];
            (flat[place], flat[7777]) = ((9.0, 9.0), (-9.0, 9.0));
            flat[42] = (f64::NAN, f64::NAN);
            let drawn = drawn(&flat);
            assert!([0, place, 7777, 9999].iter().all(|i| drawn.contains(i)), "{place}: {drawn:?}");
            assert!(drawn.len() <= MOST_POINTS + 2 && drawn.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }
}
