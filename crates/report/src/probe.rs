//! Inside the method under study: the distribution of its vector v, the rate that its steps amount to, and its controls beside it.
//!
//! A probe has quantiles of v for every parameter tensor, but not the tensors' sizes, without which there are no quantiles
//! over all elements. The least and the largest of a network are exact; the outer band, from the least of the tensors' 1 %
//! quantiles to the largest of their 99 %, holds at least 98 % of all elements; the quarters and the middle are medians
//! over the tensors.
use super::curves;
use super::document::{Figure, Panel, View};
use super::group::{Group, Task};
use super::load::Run;
use super::subject::SUBJECT;
use std::collections::BTreeMap;
use taper_figures::plot::{Chart, Marks, Picture, Scale, Series, short};
use taper_figures::table::Table;
use taper_train::run::{Record, Split};

/// More than this many distributions side by side are not read.
const MOST_PANELS: usize = 4;

/// One figure for every task with a probe of v.
pub(super) fn figures(tasks: &[Task]) -> Vec<Figure> {
    tasks.iter().filter_map(figure).collect()
}

fn figure(task: &Task) -> Option<Figure> {
    let probed: Vec<&Group> = task.groups.iter().filter(|group| probe_of(group).is_some()).collect();
    let moving = probed.iter().filter(|group| !SUBJECT.is_control(group));
    let mut panels: Vec<Panel> =
        moving.take(MOST_PANELS).filter_map(|group| Some(panel(distribution(task, group)?))).collect();
    if panels.is_empty() {
        return None;
    }
    let mut data = Table::new([
        "optimizer",
        task.clock(),
        "least v",
        "1 %",
        "middle",
        "99 %",
        "largest v",
        "effective rate",
    ]);
    let family: Vec<Group> =
        task.groups.iter().filter(|g| probe_of(g).is_some() || SUBJECT.is_neighbour(g)).cloned().collect();
    let rates: Vec<Series> = family
        .iter()
        .filter_map(|group| {
            let run = group.finished().next().or(group.runs.first())?;
            Some(Series::line(&group.label, group.style, rate(run)))
        })
        .collect();
    let text = curves::text(task, "learning rate of heavy-ball SGD that the steps amount to", &rates);
    panels.push(panel(Chart {
        series: rates,
        ..Chart::new("effective learning rate", &text, task.clock(), "lr · v / √(f + c)")
    }));
    let split = if task.is_problem() { Split::Train } else { Split::Test };
    let measure = curves::Measure { split, metric: &task.metric, factor: task.factor() };
    let series = curves::lines(&family, measure, false);
    let text = curves::text(task, &task.unit(), &series);
    let y_scale = if task.is_problem() { Scale::Log } else { Scale::Linear };
    panels.push(panel(Chart { y_scale, series, ..Chart::new(&task.unit(), &text, task.clock(), "") }));

    for group in &probed {
        let Some(run) = probe_of(group) else { continue };
        let probes: Vec<(&Record, Vector)> = vectors(run).collect();
        let stride = probes.len().div_ceil(10).max(1);
        for (index, (record, v)) in probes.iter().enumerate() {
            if (probes.len() - 1 - index).is_multiple_of(stride) {
                data.row([
                    group.label.clone(),
                    run.time(record).to_string(),
                    short(v.least),
                    short(v.low),
                    short(v.middle),
                    short(v.high),
                    short(v.largest),
                    effective(run, record).map_or("–".into(), short),
                ]);
            }
        }
    }
    let control = probed.iter().any(|g| SUBJECT.is_control(g));
    let control = control.then(|| format!("{} with {}", SUBJECT.title, SUBJECT.control_says));
    let neighbour =
        family.iter().any(|g| SUBJECT.is_neighbour(g)).then(|| SUBJECT.neighbour_title.to_owned());
    let beside: Vec<String> = control.into_iter().chain(neighbour).collect();
    let beside =
        if beside.is_empty() { String::new() } else { format!("; beside it {}", beside.join(" and ")) };
    let one = probed.iter().all(|group| probe_of(group).is_none_or(has_one_tensor));
    let bands = match one {
        true => "Light band: 1 % to 99 %; dark band: 25 % to 75 %; line: the middle.",
        false => {
            "Light band: from the least 1 % quantile to the largest 99 % quantile of any tensor, a bound over all tensors \
             that holds at least 98 % of the elements (probes record no sizes to weigh tensors by). Line and dark band: \
             medians over the tensors of their medians and quartiles."
        }
    };
    let seeds = match task.is_problem() {
        true => "",
        false => " One seed for v and the rate, all seeds for the last panel.",
    };
    let caption = format!(
        "{} on {}: its vector v, and the learning rate its steps amount to{beside}. Dotted: the least and largest \
         element of v. {bands}{seeds}",
        SUBJECT.title,
        task.title()
    );
    Some(Figure { caption, panels, data })
}

/// More layers than this are not told apart; those whose ratios are the largest are drawn.
const MOST_LAYERS: usize = 8;

/// How much of every parameter tensor a step changes: one figure for every task whose runs were probed, a panel a configuration.
pub(super) fn ratios(tasks: &[Task]) -> Vec<Figure> {
    let of = |task: &Task| {
        let panels: Vec<Panel> =
            task.groups.iter().filter_map(|group| ratio_panel(task, group)).take(MOST_PANELS).collect();
        let caption = format!(
            "{}: the norm of a step by the norm of the tensor that it changes, one seed a panel; of more than {MOST_LAYERS} \
             tensors those whose last ratios are the largest.",
            task.title()
        );
        (!panels.is_empty()).then(|| Figure { caption, panels, data: Table::default() })
    };
    tasks.iter().filter_map(of).collect()
}

fn ratio_panel(task: &Task, group: &Group) -> Option<Panel> {
    const PREFIX: &str = "update_ratio/";
    let probes = |run: &&Run| run.records.iter().any(|record| record.split == Split::Probe);
    let run = group.runs.iter().find(probes)?;
    let mut layers: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for record in run.records.iter().filter(|record| record.split == Split::Probe) {
        for (name, value) in &record.values {
            if let Some(layer) = name.strip_prefix(PREFIX) {
                layers.entry(layer).or_default().push((run.time(record) as f64, *value));
            }
        }
    }
    let mut layers: Vec<(&str, Vec<(f64, f64)>)> = layers.into_iter().collect();
    let last = |points: &[(f64, f64)]| points.last().map_or(f64::NEG_INFINITY, |(_, y)| *y);
    layers.sort_by(|(_, a), (_, b)| last(b).total_cmp(&last(a)));
    layers.truncate(MOST_LAYERS);
    let lines = layers.into_iter().enumerate();
    let series: Vec<Series> =
        lines.map(|(style, (layer, points))| Series::line(layer, style, points)).collect();
    if series.is_empty() {
        return None;
    }
    let text = curves::text(task, "update-to-weight ratio", &series);
    let chart =
        Chart {
            y_scale: Scale::Log, series, ..Chart::new(&group.label, &text, task.clock(), "‖Δw‖ / ‖w‖")
        };
    Some(panel(chart))
}

fn panel(chart: Chart) -> Panel {
    Panel { views: vec![View { log: false, smooth: false, picture: Picture::Chart(chart) }] }
}

fn probe_of(group: &Group) -> Option<&Run> {
    group.runs.iter().find(|run| vectors(run).next().is_some())
}

fn has_one_tensor(run: &Run) -> bool {
    let probes = run.records.iter().filter(|record| record.split == Split::Probe);
    probes.clone().all(|r| r.values.keys().filter(|name| name.starts_with("v_min/")).count() <= 1)
}

/// v over all parameters at one time.
struct Vector {
    least: f64,
    low: f64,
    lower: f64,
    middle: f64,
    upper: f64,
    high: f64,
    largest: f64,
}

/// The probes of a run that have v.
fn vectors(run: &Run) -> impl Iterator<Item = (&Record, Vector)> {
    run.records.iter().filter(|record| record.split == Split::Probe).filter_map(|record| {
        let of = |which: &str| -> Vec<f64> {
            let prefix = format!("v_{which}/");
            let mut values: Vec<f64> =
                record.values.iter().filter(|(name, _)| name.starts_with(&prefix)).map(|(_, v)| *v).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let middle = |which: &str| {
            let values = of(which);
            values.get(values.len() / 2).copied()
        };
        let vector = Vector {
            least: *of("min").first()?,
            low: *of("p01").first()?,
            lower: middle("p25")?,
            middle: middle("p50")?,
            upper: middle("p75")?,
            high: *of("p99").last()?,
            largest: *of("max").last()?,
        };
        Some((record, vector))
    })
}

fn distribution(task: &Task, group: &Group) -> Option<Chart> {
    let run = probe_of(group)?;
    let vectors: Vec<(f64, Vector)> = vectors(run).map(|(r, v)| (run.time(r) as f64, v)).collect();
    let line = |of: fn(&Vector) -> f64| vectors.iter().map(|(x, v)| (*x, of(v))).collect::<Vec<_>>();
    let band = |low: fn(&Vector) -> f64, high: fn(&Vector) -> f64| {
        vectors.iter().map(|(_, v)| (low(v), high(v))).collect::<Vec<_>>()
    };
    let base = Series::line(&group.label, group.style, line(|v| v.middle));
    let series = vec![
        Series { range: band(|v| v.low, |v| v.high), marks: Marks::Band, ..base.clone() },
        Series { range: band(|v| v.lower, |v| v.upper), marks: Marks::Line, ..base.clone() },
        Series { points: line(|v| v.least), marks: Marks::Thin, ..base.clone() },
        Series { points: line(|v| v.largest), marks: Marks::Thin, ..base.clone() },
    ];
    let (_, last) = vectors.last()?;
    let text = format!(
        "Distribution of v of {}: at the end from {} to {}, middle {}.",
        group.label,
        short(last.least),
        short(last.largest),
        short(last.middle)
    );
    Some(Chart { series, ..Chart::new(&format!("v of {}", group.label), &text, task.clock(), "v") })
}

/// The learning rate that a run's steps amount to over time: the schedule's, for a rule that does not scale it.
fn rate(run: &Run) -> Vec<(f64, f64)> {
    let probes: Vec<(f64, f64)> = run
        .records
        .iter()
        .filter(|record| record.split == Split::Probe)
        .filter_map(|record| Some((run.time(record) as f64, effective(run, record)?)))
        .collect();
    match probes.is_empty() {
        true => run.values(Split::Train, "lr").map(|(record, lr)| (run.time(record) as f64, lr)).collect(),
        false => probes,
    }
}

/// lr · v / √(f + c) with the middle of the parameters' means of v.
fn effective(run: &Run, record: &Record) -> Option<f64> {
    let root = record.values.get("sqrt_f_plus_c")?;
    // The rate of that step, or the last that was logged before it: an epoch may have many.
    let (_, lr) = run.values(Split::Train, "lr").rfind(|(train, _)| train.step <= record.step)?;
    let mut means: Vec<f64> =
        record.values.iter().filter(|(name, _)| name.starts_with("v_mean/")).map(|(_, v)| *v).collect();
    means.sort_by(f64::total_cmp);
    Some(lr * means.get(means.len() / 2)? / root)
}
