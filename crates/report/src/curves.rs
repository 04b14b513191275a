//! Learning curves: the mean over seeds with a band from the least to the largest.
use super::document::{Figure, Panel, View};
use super::group::{Choice, Group, Task};
use super::load::{Clock, Run};
use std::collections::BTreeMap;
use taper_figures::plot::{Chart, Marks, Picture, Scale, Series, short};
use taper_figures::stats::Better;
use taper_figures::table::Table;
use taper_train::run::{Record, Split, Status};

/// What a curve shows.
#[derive(Clone, Copy)]
pub(super) struct Measure<'a> {
    pub split: Split,
    pub metric: &'a str,
    pub factor: f64,
}

impl Measure<'_> {
    /// Means over epochs where there are any: a band around both them and the losses of single batches would be the batches'.
    /// By steps it is the batches, where they were logged: a run may have no more than one epoch.
    fn points(&self, run: &Run) -> Vec<(f64, f64)> {
        let values = run.values(self.split, self.metric);
        let (steps, means): (Vec<_>, Vec<_>) = values.partition(|(record, _)| is_of_step(record));
        let by_step = means.is_empty() || run.clock != Clock::Epoch && !steps.is_empty();
        let values = if by_step { steps } else { means };
        values.into_iter().map(|(record, value)| (run.time(record) as f64, self.factor * value)).collect()
    }
}

/// Whether it was logged at a step: it has the norm of its gradient then, and the mean over an epoch has not.
fn is_of_step(record: &Record) -> bool {
    record.split == Split::Train && record.values.contains_key("grad_norm")
}

/// The figures of all tasks: for a data set one figure of its test metric, a panel a network, and one of its training
/// loss; with one network both stand in one figure. All functions are one figure.
pub(super) fn figures(tasks: &[Task]) -> Vec<Figure> {
    let mut figures = Vec::new();
    let cut: Vec<String> =
        tasks.iter().filter(|task| task.groups.len() > MOST_LINES).map(Task::title).collect();
    let best_only = |shown: &[&Task]| match shown.iter().any(|task| cut.contains(&task.title())) {
        true => "; of more than twelve configurations the best twelve are drawn, the tables have all",
        false => "",
    };
    let tasks: Vec<Task> = tasks.iter().map(leading).collect();
    let (problems, networks): (Vec<&Task>, Vec<&Task>) = tasks.iter().partition(|task| task.is_problem());
    let mut rest = &networks[..];
    while let Some(first) = rest.first() {
        let same = rest.iter().take_while(|t| t.data == first.data && t.metric == first.metric).count();
        let (here, after) = rest.split_at(same);
        rest = after;
        let tests: Vec<Panel> = here.iter().map(|task| test_panel(task)).collect();
        let losses: Vec<Panel> = here.iter().map(|task| loss_panel(task)).collect();
        let mut band =
            "lines are means over seeds, bands reach from the least to the largest, dotted lines diverged"
                .to_owned();
        if tests.iter().chain(&losses).any(is_cut) {
            band += "; linear axes leave out the worst tenth of the values, log axes show all";
        }
        band += best_only(here);
        let mut clocks: Vec<Clock> = here.iter().map(|task| task.time()).collect();
        clocks.sort_unstable();
        clocks.dedup();
        let by = clocks.iter().map(|clock| clock.name()).collect::<Vec<_>>().join(" or ");
        if clocks.contains(&Clock::Step) {
            band += "; by step, training losses are those of the batches that were logged";
        }
        let what = format!("{} by {by} on {}", first.unit(), first.data);
        if let [task] = here {
            let caption = format!("{}: {} and training loss by {by}; {band}.", task.title(), task.unit());
            let panels = tests.into_iter().chain(losses).collect();
            figures.push(Figure { caption, panels, data: numbers(here, test_measure) });
        } else {
            let caption = format!("{what}; {band}.");
            figures.push(Figure { caption, panels: tests, data: numbers(here, test_measure) });
            let caption = format!("Training loss by {by} on {}; {band}.", first.data);
            figures.push(Figure { caption, panels: losses, data: numbers(here, |_| LOSS) });
        }
    }
    if !problems.is_empty() {
        let panels = problems.iter().map(|task| problem_panel(task)).collect();
        let best = best_only(&problems);
        let caption = format!("Value of the function by iteration, on a logarithmic axis{best}.");
        figures.push(Figure { caption, panels, data: numbers(&problems, |_| LOSS) });
    }
    figures
}

/// The training loss and the norm of the gradient as they were logged, step by step: one figure a task, a line a run.
pub(super) fn by_step(tasks: &[Task]) -> Vec<Figure> {
    let figure = |task: &Task| {
        let mut task = leading(task);
        for run in task.groups.iter_mut().flat_map(|group| &mut group.runs) {
            run.records.retain(is_of_step);
        }
        let panel = |metric: &str, name: &str| {
            let lines = |group: &Group| -> Vec<Series> {
                let line = |run: &Run| {
                    let points = run.values(Split::Train, metric).map(|(r, v)| (r.step as f64, v)).collect();
                    Series { marks: Marks::Thin, ..Series::line(&group.label, group.style, points) }
                };
                let mut lines: Vec<Series> = group.runs.iter().map(line).collect();
                if let [only] = &mut lines[..] {
                    only.marks = Marks::Line;
                }
                lines
            };
            let mut series: Vec<Series> = task.groups.iter().flat_map(lines).collect();
            series.retain(|line| !line.points.is_empty());
            if series.is_empty() {
                return None;
            }
            let text = text(&task, name, &series);
            let y_range = in_sight(&series, Better::Lower);
            let chart = Chart { y_range, series, ..Chart::new(&task.title(), &text, "step", name) };
            let log = Chart { y_range: None, y_scale: Scale::Log, ..chart.clone() };
            let view = |log, chart| View { log, smooth: false, picture: Picture::Chart(chart) };
            Some(Panel { views: vec![view(false, chart), view(true, log)] })
        };
        let panels = [("loss", "training loss"), ("grad_norm", "norm of the gradient")];
        let panels: Vec<Panel> =
            panels.into_iter().filter_map(|(metric, name)| panel(metric, name)).collect();
        let caption = format!("{}: what was logged at single steps, a line a run.", task.title());
        (!panels.is_empty()).then(|| Figure { caption, panels, data: Table::default() })
    };
    tasks.iter().filter(|task| !task.is_problem()).filter_map(figure).collect()
}

/// Whether its first view leaves out some of the values.
fn is_cut(panel: &Panel) -> bool {
    matches!(panel.views.first(), Some(View { picture: Picture::Chart(Chart { y_range: Some(_), .. }), .. }))
}

/// More lines than this are not told apart.
const MOST_LINES: usize = 12;

/// A task with its best groups only, if it has too many to draw; all are in the tables.
fn leading(task: &Task) -> Task {
    let better = Better::of(&task.metric);
    let value = |group: &Group| group.estimate(Choice::BestOnTest).map(|estimate| estimate.mean);
    let rank = |group: &Group| {
        let own = value(group);
        task.groups
            .iter()
            .filter(|other| value(other).is_some_and(|v| own.is_none_or(|own| better.than(v, own))))
            .count()
    };
    let mut kept = task.clone();
    kept.groups.retain(|group| rank(group) < MOST_LINES);
    kept.groups.truncate(MOST_LINES);
    kept
}

const LOSS: Measure = Measure { split: Split::Train, metric: "loss", factor: 1.0 };

fn test_measure(task: &Task) -> Measure<'_> {
    Measure { split: Split::Test, metric: &task.metric, factor: task.factor() }
}

fn test_panel(task: &Task) -> Panel {
    let measure = test_measure(task);
    let better = Better::of(&task.metric);
    let mut views = Vec::new();
    for smooth in [false, true] {
        let series = lines(&task.groups, measure, smooth);
        if smooth && !worth_smoothing(&series) {
            continue;
        }
        let text = text(task, &task.unit(), &series);
        let linear = Chart {
            y_range: in_sight(&series, better),
            series,
            ..Chart::new(&task.title(), &text, task.clock(), &task.unit())
        };
        // Accuracy is crowded near its end: on a log axis the error is what can be read.
        let log = match task.metric.as_str() {
            "accuracy" => {
                let flip = |(x, y): (f64, f64)| (x, 100.0 - y);
                let mut series = linear.series.clone();
                for line in &mut series {
                    line.points = line.points.iter().copied().map(flip).collect();
                    line.range = line.range.iter().map(|(low, high)| (100.0 - high, 100.0 - low)).collect();
                }
                Chart { series, y_range: None, y_label: "test error, %".into(), ..linear.clone() }
            }
            _ => Chart { y_range: None, ..linear.clone() },
        };
        views.push(View { log: false, smooth, picture: Picture::Chart(linear) });
        views.push(View { log: true, smooth, picture: Picture::Chart(Chart { y_scale: Scale::Log, ..log }) });
    }
    Panel { views }
}

fn loss_panel(task: &Task) -> Panel {
    let mut views = Vec::new();
    for smooth in [false, true] {
        let series = lines(&task.groups, LOSS, smooth);
        if smooth && !worth_smoothing(&series) {
            continue;
        }
        let text = text(task, "training loss", &series);
        let chart = Chart {
            y_range: in_sight(&series, Better::Lower),
            series,
            ..Chart::new(&task.title(), &text, task.clock(), "training loss")
        };
        let log = Chart { y_range: None, y_scale: Scale::Log, ..chart.clone() };
        views.push(View { log: false, smooth, picture: Picture::Chart(chart) });
        views.push(View { log: true, smooth, picture: Picture::Chart(log) });
    }
    Panel { views }
}

fn problem_panel(task: &Task) -> Panel {
    let series = lines(&task.groups, LOSS, false);
    let text = text(task, "value", &series);
    let chart = Chart { y_scale: Scale::Log, series, ..Chart::new(&task.title(), &text, "iteration", "f") };
    let log = Chart { x_scale: Scale::Log, ..chart.clone() };
    let view = |log, chart| View { log, smooth: false, picture: Picture::Chart(chart) };
    Panel { views: vec![view(false, chart), view(true, log)] }
}

/// One line a group with its band, and a dotted one for every run that diverged.
pub(super) fn lines(groups: &[Group], measure: Measure, smooth: bool) -> Vec<Series> {
    let mut out = Vec::new();
    for group in groups {
        let finished: Vec<&Run> = group.finished().collect();
        // Runs under way are drawn as long as there is nothing better.
        let drawn: Vec<&Run> = match finished.is_empty() {
            true => group.runs.iter().filter(|run| run.status == Status::Interrupted).collect(),
            false => finished,
        };
        if !drawn.is_empty() {
            let curves =
                drawn.iter().map(|run| measure.points(run)).map(|c| if smooth { smoothed(&c) } else { c });
            out.push(banded(group, &curves.collect::<Vec<_>>()));
        }
        for run in group.runs.iter().filter(|run| run.status == Status::Diverged) {
            let line = Series::line(&group.label, group.style, measure.points(run));
            out.push(Series { marks: Marks::Thin, ..line });
        }
    }
    out
}

/// The mean of curves at every x with its least and largest.
fn banded(group: &Group, curves: &[Vec<(f64, f64)>]) -> Series {
    // By the bits of a positive float, which are in its order.
    let mut at: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
    for (x, y) in curves.iter().flatten().filter(|(x, y)| *x >= 0.0 && y.is_finite()) {
        at.entry(x.to_bits()).or_default().push(*y);
    }
    let (mut points, mut range) = (Vec::new(), Vec::new());
    for (x, ys) in &at {
        let x = f64::from_bits(*x);
        points.push((x, ys.iter().sum::<f64>() / ys.len() as f64));
        range.push(ys.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), y| (l.min(*y), h.max(*y))));
    }
    if curves.len() < 2 {
        range.clear();
    }
    Series { label: group.label.clone(), style: group.style, points, range, marks: Marks::Line }
}

/// Fewer points than this are seen one by one.
const MANY: usize = 12;

fn worth_smoothing(series: &[Series]) -> bool {
    series.iter().any(|line| line.points.len() >= MANY)
}

/// The mean over a window of a tenth of the curve around every point.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let reach = (points.len() / 20).max(1);
    let mean = |i: usize| {
        // The window is as wide on both sides, so that the ends are not drawn towards the middle.
        let reach = reach.min(i).min(points.len() - 1 - i);
        let window = &points[i - reach..=i + reach];
        (points[i].0, window.iter().map(|p| p.1).sum::<f64>() / window.len() as f64)
    };
    (0..points.len()).map(mean).collect()
}

/// The values worth seeing on a linear axis: the first epochs, far from all others, are cut off.
fn in_sight(series: &[Series], better: Better) -> Option<(f64, f64)> {
    let ends = series.iter().flat_map(|s| s.range.iter().flat_map(|r| [r.0, r.1]));
    let mut all: Vec<f64> = series.iter().flat_map(|s| s.points.iter().map(|p| p.1)).chain(ends).collect();
    all.retain(|y| y.is_finite());
    all.sort_by(f64::total_cmp);
    let (low, high) = (*all.first()?, *all.last()?);
    let (tenth, last_tenth) = (all[all.len() / 10], all[all.len() - 1 - all.len() / 10]);
    match better {
        Better::Higher if high - tenth < 0.5 * (high - low) => Some((tenth, high)),
        Better::Lower if last_tenth - low < 0.5 * (high - low) => Some((low, last_tenth)),
        _ => None,
    }
}

/// A chart in words: where every line ends.
pub(super) fn text(task: &Task, what: &str, series: &[Series]) -> String {
    let lines = series.iter().filter(|s| s.marks != Marks::Thin).filter_map(|s| {
        let (x, y) = s.points.last()?;
        Some(format!("{} ends at {} after {}", s.label, short(*y), short(*x)))
    });
    format!("{}, {what}. {}.", task.title(), lines.collect::<Vec<_>>().join("; "))
}

/// The curves as numbers at about a dozen places.
fn numbers<'a>(tasks: &[&'a Task], measure: impl Fn(&'a Task) -> Measure<'a>) -> Table {
    let mut table = Table::new(["task", "optimizer", "at", "mean", "least", "largest"]).text(&["optimizer"]);
    for task in tasks {
        for line in lines(&task.groups, measure(task), false) {
            let stride = line.points.len().div_ceil(12).max(1);
            let last = line.points.len().saturating_sub(1);
            for i in (0..line.points.len()).filter(|i| (last - i).is_multiple_of(stride)) {
                let (x, y) = line.points[i];
                let (low, high) = line.range.get(i).copied().unwrap_or((y, y));
                let name = if line.marks == Marks::Thin {
                    format!("{} (diverged)", line.label)
                } else {
                    line.label.clone()
                };
                table.row([task.title(), name, short(x), short(y), short(low), short(high)]);
            }
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smoothing_keeps_a_straight_line_and_both_ends() {
        let line: Vec<(f64, f64)> = (0..40).map(|i| (f64::from(i), 2.0 * f64::from(i))).collect();
        assert_eq!(smoothed(&line), line);
        let zigzag: Vec<(f64, f64)> = (0..41).map(|i| (f64::from(i), f64::from(i % 2))).collect();
        let smooth = smoothed(&zigzag);
        assert_eq!((smooth[0].1, smooth[40].1), (0.0, 0.0));
        assert!(smooth[5..36].iter().all(|(_, y)| (0.3..0.7).contains(y)));
        assert!(smoothed(&[]).is_empty());
    }

    #[test]
    fn the_first_epochs_are_cut_off_only_when_they_are_far_away() {
        let series = |ys: &[f64]| vec![Series::line("a", 0, ys.iter().map(|y| (0.0, *y)).collect())];
        let far = [10.0, 90.0, 91.0, 91.5, 92.0, 92.5, 93.0, 93.5, 94.0, 94.5, 95.0];
        assert_eq!(in_sight(&series(&far), Better::Higher), Some((90.0, 95.0)));
        assert_eq!(in_sight(&series(&[1.0, 2.0, 3.0, 4.0]), Better::Higher), None);
        assert_eq!(in_sight(&[], Better::Lower), None);
    }
}
