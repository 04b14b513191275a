//! A heat map: a value for every pair of two settings.
use super::chart::SIZE;
use super::escape;
use std::fmt::Write;

/// One cell.
#[derive(Clone, Debug, PartialEq)]
pub struct Cell {
    /// Where it stands between the worst and the best; `None`: there is no value.
    pub value: Option<f64>,
    /// What is written in it.
    pub text: String,
}

/// A heat map.
#[derive(Clone, Debug)]
pub struct Heat {
    /// What it shows, above it.
    pub title: String,
    /// The same for those who do not see it.
    pub text: String,
    /// The setting from left to right, and its values.
    pub x: (String, Vec<String>),
    /// The setting from bottom to top, and its values.
    pub y: (String, Vec<String>),
    /// The cells, rows from bottom to top.
    pub cells: Vec<Vec<Cell>>,
    /// Whether more is better: the better end is the bright one.
    pub higher_is_better: bool,
}

/// Cividis, which looks alike to colour-blind and other readers, at even distances.
const RAMP: [(f64, f64, f64); 6] = [
    (0.0, 34.0, 78.0),
    (53.0, 69.0, 108.0),
    (102.0, 105.0, 112.0),
    (148.0, 142.0, 119.0),
    (200.0, 184.0, 102.0),
    (253.0, 231.0, 55.0),
];

/// The colour at a place between 0 and 1, and whether it is a light one.
fn colour(place: f64) -> (String, bool) {
    let place = place.clamp(0.0, 1.0) * (RAMP.len() - 1) as f64;
    let index = (place.floor() as usize).min(RAMP.len() - 2);
    let (from, to, part) = (RAMP[index], RAMP[index + 1], place - index as f64);
    let mix = |a: f64, b: f64| (a + part * (b - a)).round() as u8;
    let (r, g, b) = (mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2));
    (
        format!("#{r:02x}{g:02x}{b:02x}"),
        0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b) > 128.0,
    )
}

impl Heat {
    /// As an `<svg>` element; `id` must be unique on the page.
    pub fn svg(&self, id: &str) -> String {
        let (width, height) = SIZE;
        let (left, top, right, bottom) = (78.0, 30.0, width - 10.0, height - 48.0);
        let (columns, rows) = (self.x.1.len().max(1) as f64, self.y.1.len().max(1) as f64);
        let (wide, high) = ((right - left) / columns, (bottom - top) / rows);
        let values = || self.cells.iter().flatten().filter_map(|c| c.value).filter(|v| v.is_finite());
        let (least, most) =
            values().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
        let mut out = String::new();
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "<svg class=\"plot\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\
             <title id=\"{id}-t\">{title}</title><desc id=\"{id}-d\">{}</desc>\
             <text class=\"name\" x=\"{left}\" y=\"17\">{title}</text>",
            escape(&self.text),
            title = escape(&self.title),
        );
        for (row, cells) in self.cells.iter().enumerate() {
            for (column, cell) in cells.iter().enumerate() {
                let (x, y) = (left + wide * column as f64, bottom - high * (row + 1) as f64);
                let place = cell.value.filter(|v| v.is_finite()).map(|v| {
                    let part = if most > least { (v - least) / (most - least) } else { 1.0 };
                    if self.higher_is_better { part } else { 1.0 - part }
                });
                let class = match place.map(colour) {
                    Some((fill, light)) => {
                        let _ = write!(
                            out,
                            "<rect class=\"cell\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{high:.1}\" fill=\"{fill}\"/>"
                        );
                        if light { "on-light" } else { "on-dark" }
                    }
                    None => {
                        let _ = write!(
                            out,
                            "<path class=\"hatch\" d=\"M{:.1} {:.1}h{:.1}v{:.1}h-{:.1}zl{:.1} {:.1}\"/>",
                            x + 2.0,
                            y + 2.0,
                            wide - 4.0,
                            high - 4.0,
                            wide - 4.0,
                            wide - 4.0,
                            high - 4.0
                        );
                        "tick"
                    }
                };
                let _ = write!(
                    out,
                    "<text class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                    x + 0.5 * wide,
                    y + 0.5 * high + 4.0,
                    escape(&cell.text)
                );
            }
        }
        for (column, label) in self.x.1.iter().enumerate() {
            let x = left + wide * (column as f64 + 0.5);
            let y = bottom + 17.0;
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"{x:.1}\" y=\"{y}\" text-anchor=\"middle\">{}</text>",
                escape(label)
            );
        }
        for (row, label) in self.y.1.iter().enumerate() {
            let y = bottom - high * (row as f64 + 0.5) + 4.0;
            let x = left - 7.0;
            let _ = write!(
                out,
                "<text class=\"tick\" x=\"{x}\" y=\"{y:.1}\" text-anchor=\"end\">{}</text>",
                escape(label)
            );
        }
        let middle = 0.5 * (top + bottom);
        let _ = write!(
            out,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\
             <text x=\"16\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 16 {middle})\">{}</text></svg>",
            0.5 * (left + right),
            bottom + 37.0,
            escape(&self.x.0),
            escape(&self.y.0)
        );
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_end_is_bright_and_a_cell_without_a_value_is_crossed_out() {
        let cell =
            |value: Option<f64>| Cell { value, text: value.map_or("diverged".into(), |v| v.to_string()) };
        let heat = Heat {
            title: "t".into(),
            text: "d".into(),
            x: ("lr".into(), vec!["0.1".into(), "1".into()]),
            y: ("c".into(), vec!["1".into()]),
            cells: vec![vec![cell(Some(3.0)), cell(None)], vec![cell(Some(2.0)), cell(Some(f64::NAN))]],
            higher_is_better: false,
        };
        let svg = heat.svg("h");
        assert!(svg.contains("#fde737") && svg.contains("#00224e"));
        assert!(svg.find("#00224e") < svg.find("#fde737"), "3 is worse than 2");
        assert_eq!(svg.matches("class=\"hatch\"").count(), 2);
        assert!(svg.contains("diverged") && !svg.contains("\"NaN"));
    }
}
