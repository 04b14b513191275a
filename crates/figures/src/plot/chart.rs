//! A line chart: lines with bands or bars, marks so that they stay apart without colour, a grid and two axes.
use super::axis::{Axis, Scale, short};
use super::{STYLES, escape, visible};
use serde_json::{Value, json};
use std::fmt::Write;

/// Width and height of a chart; pages scale it.
pub(super) const SIZE: (f64, f64) = (560.0, 340.0);
/// Left, top, right and bottom of the plot inside it.
const FRAME: (f64, f64, f64, f64) = (72.0, 30.0, 546.0, 292.0);

/// Pixels between bars at one place.
const BESIDE: f64 = 6.0;

/// What stands around the points of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// A few marks along a line, with a band if it has a low and high.
    Line,
    /// A mark at every point, with bars if it has a low and high.
    Points,
    /// A fine dotted line without marks, for what is said about another line.
    Thin,
    /// The band alone.
    Band,
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name; series of one name are switched on and off together.
    pub label: String,
    /// What it looks like.
    pub style: usize,
    /// Its points by x.
    pub points: Vec<(f64, f64)>,
    /// The low and high around every point, or nothing.
    pub range: Vec<(f64, f64)>,
    /// How it is drawn.
    pub marks: Marks,
}

impl Series {
    /// A line without a band. Points that are not finite are left out.
    pub fn line(label: &str, style: usize, mut points: Vec<(f64, f64)>) -> Self {
        points.retain(|(x, y)| x.is_finite() && y.is_finite());
        Self { label: label.to_owned(), style, points, range: Vec::new(), marks: Marks::Line }
    }
}

/// A line chart.
#[derive(Clone, Debug)]
pub struct Chart {
    /// What it shows, above it.
    pub title: String,
    /// The same for those who do not see it.
    pub text: String,
    /// The name of the x axis.
    pub x_label: String,
    /// The name of the y axis; may be empty when the title says it.
    pub y_label: String,
    /// How x is spread.
    pub x_scale: Scale,
    /// How y is spread.
    pub y_scale: Scale,
    /// Values of y that are in sight; what lies outside is cut off. `None`: all.
    pub y_range: Option<(f64, f64)>,
    /// The lines.
    pub series: Vec<Series>,
}

/// What a page needs to show the values under the pointer.
#[derive(Clone, Debug)]
pub struct Hover(pub Value);

impl Chart {
    /// An empty chart with linear axes.
    pub fn new(title: &str, text: &str, x_label: &str, y_label: &str) -> Self {
        Self {
            title: title.into(),
            text: text.into(),
            x_label: x_label.into(),
            y_label: y_label.into(),
            x_scale: Scale::Linear,
            y_scale: Scale::Linear,
            y_range: None,
            series: Vec::new(),
        }
    }

    fn axes(&self) -> (Axis, Axis) {
        let (left, top, right, bottom) = FRAME;
        let xs = self.series.iter().flat_map(|s| &s.points).map(|p| p.0);
        // A single mark needs some air around it.
        let room = if self.series.iter().any(|s| s.marks == Marks::Points) { 0.06 } else { 0.0 };
        let x = Axis::over(xs, self.x_scale, (left, right), room);
        let y = match self.y_range {
            Some((low, high)) => Axis::over([low, high].into_iter(), self.y_scale, (bottom, top), 0.03),
            None => {
                let points = self.series.iter().flat_map(|s| s.points.iter().map(|p| p.1));
                let ranges = self.series.iter().flat_map(|s| s.range.iter().flat_map(|r| [r.0, r.1]));
                Axis::over(points.chain(ranges), self.y_scale, (bottom, top), 0.05)
            }
        };
        (x, y)
    }

    /// As an `<svg>` element; `id` must be unique on the page.
    pub fn svg(&self, id: &str) -> String {
        let (x, y) = self.axes();
        let (left, top, right, bottom) = FRAME;
        let (width, height) = SIZE;
        let (title, text) = (escape(&self.title), escape(&self.text));
        let log = |axis: &Axis| u8::from(axis.scale == Scale::Log);
        let mut out = String::new();
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "<svg class=\"plot\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\" \
             data-x=\"{left} {right} {} {} {}\" data-y=\"{bottom} {top} {} {} {}\">\
             <title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{text}</desc>\
             <clipPath id=\"{id}-c\"><rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\"/></clipPath>",
            x.low,
            x.high,
            log(&x),
            y.low,
            y.high,
            log(&y),
            // Marks on the frame are seen whole.
            left - 5.0,
            top - 5.0,
            right - left + 10.0,
            bottom - top + 10.0
        );
        self.frame(&mut out, &x, &y);
        let _ = write!(out, "<g clip-path=\"url(#{id}-c)\">");
        let bars = self.series.iter().filter(|series| series.marks == Marks::Points).count();
        for (number, series) in self.series.iter().enumerate() {
            let shift = match series.marks {
                // Bars at one place stand beside each other.
                Marks::Points => BESIDE * (number as f64 - 0.5 * (bars as f64 - 1.0)),
                _ => 0.0,
            };
            let x = Axis { start: x.start + shift, end: x.end + shift, ..x };
            draw(&mut out, series, number, &x, &y);
        }
        let _ = write!(out, "</g></svg>");
        out
    }

    fn frame(&self, out: &mut String, x: &Axis, y: &Axis) {
        let (left, top, right, bottom) = FRAME;
        let mut grid = String::new();
        let mut labels = String::new();
        for tick in x.ticks() {
            let Some(at) = x.place(tick) else { continue };
            let _ = write!(grid, "M{at:.1} {top}V{bottom}");
            let _ = write!(
                labels,
                "<text class=\"tick\" x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
                bottom + 17.0,
                short(tick)
            );
        }
        for tick in y.ticks() {
            let Some(at) = y.place(tick) else { continue };
            let _ = write!(grid, "M{left} {at:.1}H{right}");
            let _ = write!(
                labels,
                "<text class=\"tick\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                left - 7.0,
                at + 4.0,
                short(tick)
            );
        }
        let _ = write!(
            out,
            "<path class=\"grid\" d=\"{grid}\"/><path class=\"frame\" d=\"M{left} {top}V{bottom}H{right}\"/>{labels}\
             <text class=\"name\" x=\"{left}\" y=\"17\">{}</text>\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            escape(&fitting(&self.title)),
            0.5 * (left + right),
            bottom + 37.0,
            escape(&self.x_label)
        );
        if !self.y_label.is_empty() {
            let middle = 0.5 * (top + bottom);
            let _ = write!(
                out,
                "<text x=\"14\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 14 {middle})\">{}</text>",
                escape(&self.y_label)
            );
        }
    }

    /// The points of all series, for the values under the pointer.
    pub fn hover(&self) -> Hover {
        let (x, _) = self.axes();
        let shown = self.series.iter().filter(|s| !matches!(s.marks, Marks::Thin | Marks::Band));
        let series = shown.map(|s| {
            let kept = thinned(s, &x);
            // A reader's hand is no finer than this.
            let kept: Vec<usize> = kept.iter().copied().step_by(kept.len().div_ceil(300).max(1)).collect();
            let column =
                |of: &dyn Fn(usize) -> f64| -> Vec<Value> { kept.iter().map(|i| rounded(of(*i))).collect() };
            let mut out = json!({
                "name": visible(&s.label),
                "style": s.style % STYLES,
                "x": column(&|i| s.points[i].0),
                "y": column(&|i| s.points[i].1),
            });
            if !s.range.is_empty() {
                out["low"] = column(&|i| s.range[i].0).into();
                out["high"] = column(&|i| s.range[i].1).into();
            }
            out
        });
        Hover(json!({ "x": visible(&self.x_label), "series": series.collect::<Vec<_>>() }))
    }
}

/// As much of a title as fits above a chart.
fn fitting(title: &str) -> String {
    const MOST: usize = 54;
    match title.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &title[..end]),
        None => title.to_owned(),
    }
}

/// Six digits are more than a picture shows.
fn rounded(value: f64) -> Value {
    let text = format!("{value:.5e}");
    text.parse::<f64>().map_or(Value::Null, Value::from)
}

/// At most two points for every two pixels, the lowest and the highest, so that a hundred thousand steps make a small
/// picture that looks the same.
fn thinned(series: &Series, x: &Axis) -> Vec<usize> {
    const FEW: usize = 600;
    let points = &series.points;
    if points.len() <= FEW {
        return (0..points.len()).collect();
    }
    let pixel = |i: usize| x.place(points[i].0).map(|at| (at / 2.0).round() as i64);
    let mut kept = Vec::new();
    let mut start = 0;
    while start < points.len() {
        let end = (start..points.len()).find(|&i| pixel(i) != pixel(start)).unwrap_or(points.len());
        let by = |a: &usize, b: &usize| points[*a].1.total_cmp(&points[*b].1);
        let (low, high) = ((start..end).min_by(by), (start..end).max_by(by));
        let (low, high) = (low.unwrap_or(start), high.unwrap_or(start));
        kept.push(low.min(high));
        if low != high {
            kept.push(low.max(high));
        }
        start = end;
    }
    kept
}

fn draw(out: &mut String, series: &Series, number: usize, x: &Axis, y: &Axis) {
    let kept = thinned(series, x);
    let at = |value: (f64, f64)| Some((x.place(value.0)?, y.place(value.1)?));
    let places: Vec<Option<(f64, f64)>> = kept.iter().map(|&i| at(series.points[i])).collect();
    let _ = write!(
        out,
        "<g class=\"series s{}\" data-name=\"{}\">",
        series.style % STYLES,
        escape(&series.label)
    );
    if !series.range.is_empty() {
        let ends = kept.iter().filter_map(|&i| {
            let (here, (low, high)) = (series.points[i].0, series.range[i]);
            // On a log axis a band that reaches zero ends at the axis.
            let low = y.place(low).unwrap_or(y.start);
            Some((x.place(here)?, low, y.place(high)?))
        });
        let ends: Vec<(f64, f64, f64)> = ends.collect();
        if series.marks == Marks::Points {
            let bars = ends.iter().fold(String::new(), |mut d, (x, low, high)| {
                let _ = write!(d, "M{x:.1} {low:.1}V{high:.1}");
                d
            });
            let _ = write!(out, "<path class=\"bars\" d=\"{bars}\"/>");
        } else {
            let upper = ends.iter().map(|(x, _, high)| (*x, *high));
            let lower = ends.iter().rev().map(|(x, low, _)| (*x, *low));
            let _ = write!(out, "<path class=\"band\" d=\"{}Z\"/>", path(upper.chain(lower).map(Some)));
        }
    }
    if series.marks != Marks::Band {
        let class = if series.marks == Marks::Thin { "thin" } else { "line" };
        let _ = write!(out, "<path class=\"{class}\" d=\"{}\"/>", path(places.iter().copied()));
    }
    if matches!(series.marks, Marks::Line | Marks::Points) {
        let few = places.len() <= 12 || series.marks == Marks::Points;
        let stride = if few { 1 } else { places.len().div_ceil(8) };
        // Lines that run together are marked at different places.
        let first = if few { 0 } else { (number * stride * 3 / 8) % stride };
        let marks = places.iter().skip(first).step_by(stride).flatten();
        let d = marks.fold(String::new(), |d, (x, y)| d + &mark(series.style, *x, *y));
        let _ = write!(out, "<path class=\"marks\" d=\"{d}\"/>");
    }
    out.push_str("</g>");
}

/// A line through the places; it breaks where one is missing.
fn path(places: impl Iterator<Item = Option<(f64, f64)>>) -> String {
    let mut d = String::new();
    let mut pen = 'M';
    for place in places {
        match place {
            Some((x, y)) => {
                let _ = write!(d, "{pen}{x:.1} {y:.1}");
                pen = 'L';
            }
            None => pen = 'M',
        }
    }
    d
}

/// The outline of a style's mark around a place; styles beyond the colours have other marks.
pub(super) fn mark(style: usize, x: f64, y: f64) -> String {
    const R: f64 = 3.2;
    match (style + style / STYLES) % 6 {
        0 => format!("M{:.1} {y:.1}a{R} {R} 0 1 0 {} 0a{R} {R} 0 1 0 {} 0", x - R, 2.0 * R, -2.0 * R),
        1 => format!("M{:.1} {:.1}h6v6h-6z", x - 3.0, y - 3.0),
        2 => format!("M{x:.1} {:.1}l3.6 6.4h-7.2z", y - 4.0),
        3 => format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0),
        4 => format!("M{x:.1} {:.1}l3.6 -6.4h-7.2z", y + 4.0),
        _ => format!("M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let series = vec![Series::line("<i>&", 0, points)];
        Chart { series, ..Chart::new("a < b", "text", "epoch", "loss") }
    }

    #[test]
    fn a_hundred_thousand_points_make_a_small_picture_that_keeps_the_extremes() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|i| (f64::from(i), f64::from(i % 7))).collect();
        points[54_321].1 = 40.0;
        let chart = chart(points);
        let svg = chart.svg("a");
        assert!(svg.len() < 40_000, "{}", svg.len());
        // The one high value, a twentieth of the range below the top of the frame: 292 - 262 · 42/44.
        assert!(svg.contains(" 41.9L"), "{svg}");
        let Hover(hover) = chart.hover();
        assert!(hover["series"][0]["y"].as_array().unwrap().len() <= 300);
    }

    #[test]
    fn names_are_escaped_and_pictures_need_no_points() {
        let svg = chart(vec![]).svg("a");
        assert!(svg.contains("a &lt; b") && svg.contains("data-name=\"&lt;i&gt;&amp;\""), "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let log =
            Chart { y_scale: Scale::Log, ..chart(vec![(0.0, 0.0), (1.0, 1.0), (2.0, -1.0), (3.0, 5.0)]) };
        let svg = log.svg("a");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
