//! How a result depends on the settings that a sweep varied: a line over one, a heat map over two.
use super::curves;
use super::document::{Figure, Panel, View};
use super::group::{Choice, Group, Task};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use taper_figures::plot::{Cell, Chart, Heat, Marks, Picture, STYLES, Scale, Series, short, told_apart};
use taper_figures::stats::Better;
use taper_figures::table::{Table, mean_text};
use taper_train::recipe::Recipe;
use taper_train::sweep::settings::settings;

/// The figures of all sweeps over one or two numbers of an optimizer.
pub(super) fn figures(tasks: &[Task]) -> Vec<Figure> {
    let mut figures = Vec::new();
    for task in tasks {
        for sweep in sweeps(task) {
            match &sweep.keys[..] {
                [key] => figures.push(over_one(task, &sweep, key)),
                [x, y] => figures.push(over_two(task, &sweep, x, y)),
                // A picture has two dimensions.
                _ => {}
            }
        }
    }
    figures
}

/// A group with the numbers of its optimizer.
type Point<'a> = (&'a Group, BTreeMap<String, f64>);

/// Groups of one optimizer that differ in some of its numbers and in nothing else.
struct Sweep<'a> {
    optimizer: &'a str,
    keys: Vec<String>,
    groups: Vec<Point<'a>>,
}

impl Sweep<'_> {
    /// The value of a key in every group, for people.
    fn texts(&self, key: &str) -> Vec<String> {
        let values: Vec<f64> =
            self.groups.iter().map(|(_, n)| n.get(key).copied().unwrap_or(f64::NAN)).collect();
        told_apart(&values)
    }
}

/// Fewer values than this are a comparison, not a sweep.
const LEAST: usize = 3;

fn sweeps(task: &Task) -> Vec<Sweep<'_>> {
    let mut sorted: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for group in &task.groups {
        let Some(recipe) = group.recipe() else { continue };
        let (numbers, rest) = hyper(recipe);
        sorted.entry(rest).or_default().push((group, numbers));
    }
    let mut out = Vec::new();
    for groups in sorted.into_values().filter(|groups| groups.len() >= LEAST) {
        let keys: BTreeSet<&String> = groups.iter().flat_map(|(_, numbers)| numbers.keys()).collect();
        let differs = |key: &&String| groups.iter().any(|(_, n)| n.get(*key) != groups[0].1.get(*key));
        let mut keys: Vec<String> = keys.into_iter().filter(differs).cloned().collect();
        // The rate goes along the bottom.
        keys.sort_by_key(|key| key != "lr");
        out.push(Sweep { optimizer: &groups[0].0.optimizer, keys, groups });
    }
    out
}

/// The optimizer's numbers, and all else as one text.
fn hyper(recipe: &Recipe) -> (BTreeMap<String, f64>, String) {
    let mut numbers = BTreeMap::from([("lr".to_owned(), recipe.optimizer.lr)]);
    for (key, value) in &recipe.optimizer.hyper {
        if let Value::Number(number) = value {
            numbers.insert(key.clone(), number.as_f64().unwrap_or(f64::NAN));
        }
    }
    let is_number = |path: &str| path.strip_prefix("optimizer.").is_some_and(|key| numbers.contains_key(key));
    let rest = settings(recipe).into_iter().filter(|(path, _)| !is_number(path));
    let rest = rest.map(|(path, value)| format!("{path}={value}\n")).collect();
    (numbers, rest)
}

/// Log where all are positive and spread over more than a decade.
fn scale(values: &[f64]) -> Scale {
    let (low, high) = values.iter().fold((f64::INFINITY, 0.0_f64), |(l, h), v| (l.min(*v), h.max(*v)));
    if low > 0.0 && high / low > 10.0 { Scale::Log } else { Scale::Linear }
}

fn over_one(task: &Task, sweep: &Sweep, key: &str) -> Figure {
    let mut data = Table::new([key, "best on test", "last", "remarks"]).text(&["remarks"]);
    let line = |(style, choice, label): (usize, Choice, &str)| {
        let (mut points, mut range) = (Vec::new(), Vec::new());
        for (group, numbers) in &sweep.groups {
            let (Some(x), Some(estimate)) = (numbers.get(key), group.estimate(choice)) else { continue };
            let f = task.factor();
            points.push((*x, f * estimate.mean));
            // One seed has no interval: its bar is the point.
            let ends = estimate
                .half_width()
                .map_or((estimate.mean, estimate.mean), |_| (estimate.low, estimate.high));
            range.push((f * ends.0, f * ends.1));
        }
        let mut order: Vec<usize> = (0..points.len()).collect();
        order.sort_by(|a, b| points[*a].0.total_cmp(&points[*b].0));
        let points: Vec<(f64, f64)> = order.iter().map(|i| points[*i]).collect();
        let range: Vec<(f64, f64)> = order.iter().map(|i| range[*i]).collect();
        Series { label: label.into(), style, points, range, marks: Marks::Points }
    };
    let [best, last] = free_styles(sweep);
    let at_end = format!("last {}", task.clock());
    let lines = [(best, Choice::BestOnTest, "best on test"), (last, Choice::Last, at_end.as_str())];
    let series: Vec<Series> = lines.into_iter().map(line).collect();
    let places = sweep.texts(key);
    for ((group, _), at) in sweep.groups.iter().zip(places) {
        let value = |choice| group.estimate(choice).map_or("–".into(), |e| mean_text(&task.metric, &e));
        data.row([at, value(Choice::BestOnTest), value(Choice::Last), group.losses()]);
    }
    let values: Vec<f64> = sweep.groups.iter().filter_map(|(_, numbers)| numbers.get(key).copied()).collect();
    let title = format!("{} on {}", sweep.optimizer, task.title());
    let text = curves::text(task, &format!("{} by {key} of {}", task.unit(), sweep.optimizer), &series);
    let chart = Chart { x_scale: scale(&values), series, ..Chart::new(&title, &text, key, &task.unit()) };
    let caption = format!(
        "Sensitivity of {} to {key} ({}): means over seeds with Student's 95 % intervals.",
        sweep.optimizer,
        task.title()
    );
    let views = vec![View { log: false, smooth: false, picture: Picture::Chart(chart) }];
    let mut panels = vec![Panel { views }];
    panels.push(by_time(task, sweep, key));
    Figure { caption, panels, data }
}

/// Two styles that no group of the sweep has, while there are any: a group looks the same in every figure.
fn free_styles(sweep: &Sweep) -> [usize; 2] {
    let taken: BTreeSet<usize> = sweep.groups.iter().map(|(group, _)| group.style % STYLES).collect();
    let mut free = (0..STYLES).filter(|style| !taken.contains(style));
    [free.next().unwrap_or(0), free.next().unwrap_or(1)]
}

/// The curves of a sweep over one number, as the paper's figure on c has them.
fn by_time(task: &Task, sweep: &Sweep, key: &str) -> Panel {
    let mut sorted: Vec<_> = sweep.groups.iter().zip(sweep.texts(key)).collect();
    let value = |point: &Point| point.1.get(key).copied().unwrap_or(f64::NAN);
    sorted.sort_by(|a, b| value(b.0).total_cmp(&value(a.0)));
    let named =
        |(point, text): &(&Point, String)| Group { label: format!("{key} = {text}"), ..point.0.clone() };
    let groups: Vec<Group> = sorted.iter().map(named).collect();
    let task = Task { groups, ..task.clone() };
    let split =
        if task.is_problem() { taper_train::run::Split::Train } else { taper_train::run::Split::Test };
    let measure = curves::Measure { split, metric: &task.metric, factor: task.factor() };
    let series = curves::lines(&task.groups, measure, false);
    let text = curves::text(&task, &task.unit(), &series);
    let x = task.clock();
    let chart =
        Chart { series, ..Chart::new(&format!("{} by {x}", sweep.optimizer), &text, x, &task.unit()) };
    Panel { views: vec![View { log: false, smooth: false, picture: Picture::Chart(chart) }] }
}

fn over_two(task: &Task, sweep: &Sweep, x_key: &str, y_key: &str) -> Figure {
    let values = |key: &str| {
        let mut values: Vec<f64> = sweep.groups.iter().filter_map(|(_, n)| n.get(key).copied()).collect();
        values.sort_by(f64::total_cmp);
        values.dedup();
        values
    };
    let (xs, ys) = (values(x_key), values(y_key));
    let (x_texts, y_texts) = (told_apart(&xs), told_apart(&ys));
    let mut data = Table::new([x_key, y_key, "best on test", "last", "remarks"]).text(&["remarks"]);
    let cell = |x: f64, y: f64| {
        let at = |n: &BTreeMap<String, f64>| n.get(x_key) == Some(&x) && n.get(y_key) == Some(&y);
        let Some((group, _)) = sweep.groups.iter().find(|(_, n)| at(n)) else {
            return (Cell { value: None, text: String::new() }, None);
        };
        let value = group.estimate(Choice::BestOnTest).map(|e| task.factor() * e.mean);
        let text = value.map_or_else(|| group.losses(), short);
        (Cell { value, text }, Some(*group))
    };
    let mut cells = Vec::new();
    for (y, y_text) in ys.iter().zip(&y_texts) {
        let row: Vec<(Cell, Option<&Group>)> = xs.iter().map(|x| cell(*x, *y)).collect();
        for (x_text, (_, group)) in x_texts.iter().zip(&row) {
            let Some(group) = group else { continue };
            let value = |choice| group.estimate(choice).map_or("–".into(), |e| mean_text(&task.metric, &e));
            let (x, y) = (x_text.clone(), y_text.clone());
            data.row([x, y, value(Choice::BestOnTest), value(Choice::Last), group.losses()]);
        }
        cells.push(row.into_iter().map(|(cell, _)| cell).collect());
    }
    let better = Better::of(&task.metric);
    let best = sweep.groups.iter().filter_map(|(g, n)| Some((g.estimate(Choice::BestOnTest)?.mean, n)));
    let best = best.reduce(|old, new| if better.than(new.0, old.0) { new } else { old });
    let place = best.map_or("no run finished".to_owned(), |(value, numbers)| {
        let at = |key: &str| numbers.get(key).map_or("–".into(), |v| short(*v));
        format!("best {} at {x_key} = {}, {y_key} = {}", short(task.factor() * value), at(x_key), at(y_key))
    });
    let heat = Heat {
        title: format!("{}: {}", sweep.optimizer, task.unit()),
        text: format!(
            "{}, {} of {} by {x_key} and {y_key}: {place}.",
            task.title(),
            task.unit(),
            sweep.optimizer
        ),
        x: (x_key.into(), x_texts),
        y: (y_key.into(), y_texts),
        cells,
        higher_is_better: better == Better::Higher,
    };
    let caption = format!(
        "Sensitivity of {} to {x_key} and {y_key} ({}), best on test, mean over seeds; crossed out: none finished.",
        sweep.optimizer,
        task.title()
    );
    let views = vec![View { log: false, smooth: false, picture: Picture::Heat(heat) }];
    Figure { caption, panels: vec![Panel { views }], data }
}
