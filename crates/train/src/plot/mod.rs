//! Pictures as SVG: line charts with bands and heat maps, alone in a file or inside a page.
//!
//! What a series looks like (colour, dashes, marks) is its style, a small number; the style sheet `style.css` gives it
//! colours that stay apart for colour-blind readers, on white, on black and in print. Equal pictures are equal bytes.
mod axis;
mod chart;
mod dots;
mod heat;
#[cfg(feature = "png")]
pub(crate) mod png;
mod sheet;

pub use axis::Scale;
pub(crate) use axis::short;
pub use chart::{Chart, Hover, Marks, Series};
pub use dots::Dots;
pub use heat::{Cell, Heat};
pub use sheet::{Sheet, swatch};

use crate::run::{Outcome, Record, Split};
use std::path::Path;

/// The style sheet of all pictures; a page that holds some needs it once.
pub const STYLE: &str = include_str!("style.css");

/// How many styles there are; a series with a higher number looks like an earlier one with other marks.
pub const STYLES: usize = 8;

/// One picture of a figure.
#[derive(Clone, Debug)]
pub enum Picture {
    /// Lines over an axis.
    Chart(Chart),
    /// Values over two settings.
    Heat(Heat),
}

impl Picture {
    /// As an `<svg>` element of a page that has the [`STYLE`]; `id` must be unique on the page.
    pub fn svg(&self, id: &str) -> String {
        match self {
            Self::Chart(chart) => chart.svg(id),
            Self::Heat(heat) => heat.svg(id),
        }
    }
}

/// Text without what no document may hold, and without marks that reorder the text around them: those could make a name
/// look like another.
pub(crate) fn visible(text: &str) -> String {
    let shown = |c: char| match c {
        '\t' | '\n' => c,
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{fffe}' | '\u{ffff}' => '\u{fffd}',
        c if c.is_control() => '\u{fffd}',
        c => c,
    };
    text.chars().map(shown).collect()
}

/// Visible text made safe inside an element or a quoted attribute.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in visible(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Draws training loss (log scale) and the test metric of several runs side by side, as SVG. Runs of one epoch are drawn
/// by their steps, on log axes; where the loss is all there is to judge by, it is the only panel.
pub fn curves(runs: &[(String, &Outcome)], path: &Path) -> Result<(), String> {
    let metric = runs.first().map_or("loss", |(_, run)| run.summary.metric.as_str());
    let by_step = runs.iter().all(|(_, run)| run.summary.epochs <= 1);
    let clock = if by_step { "step" } else { "epoch" };
    let panel = |title: &str, split: Split, metric: &str, factor: f64, y_scale: Scale| {
        let line = |(style, (label, run)): (usize, &(String, &Outcome))| {
            let time = |record: &Record| if by_step { record.step } else { record.epoch } as f64;
            let records = run.records.iter().filter(|record| record.split == split);
            let points =
                records.filter_map(|record| Some((time(record), factor * record.values.get(metric)?)));
            Series::line(label, style, points.collect())
        };
        let series = runs.iter().enumerate().map(line).collect();
        let text = format!("{title} of {} runs by {clock}", runs.len());
        let x_scale = if by_step { Scale::Log } else { Scale::Linear };
        Picture::Chart(Chart { x_scale, y_scale, series, ..Chart::new(title, &text, clock, "") })
    };
    let mut pictures = vec![panel("training loss", Split::Train, "loss", 1.0, Scale::Log)];
    match metric {
        "loss" => {}
        "accuracy" => {
            pictures.push(panel("test accuracy, %", Split::Test, metric, 100.0, Scale::Linear));
        }
        other => pictures.push(panel(&format!("test {other}"), Split::Test, other, 1.0, Scale::Log)),
    }
    let sheet = Sheet { title: "Learning curves".into(), rows: vec![pictures] };
    std::fs::write(path, sheet.svg()).map_err(|e| format!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_stays_text() {
        assert_eq!(escape("<b a=\"x\" b='y'>&"), "&lt;b a=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
        assert_eq!(escape("a\u{0}b\u{202e}c\u{7f}"), "a\u{fffd}b\u{fffd}c\u{fffd}");
    }
}
