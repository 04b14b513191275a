//! Pictures as SVG: line charts with bands and heat maps, alone in a file or inside a page.
//!
//! What a series looks like (colour, dashes, marks) is its style, a small number; the style sheet `style.css` gives it
//! colours that stay apart for colour-blind readers, on white, on black and in print. Equal pictures are equal bytes.
mod axis;
mod chart;
mod heat;
mod sheet;

pub use axis::Scale;
pub(crate) use axis::short;
pub use chart::{Chart, Hover, Marks, Series};
pub use heat::{Cell, Heat};
pub use sheet::{Sheet, swatch};

use crate::run::{Outcome, Split};
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

/// Text made safe inside an element or a quoted attribute. What no XML document may hold is replaced.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\t' | '\n' => out.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            // Marks that reorder the text around them could make a name look like another.
            '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

/// Draws training loss (log scale) and the test metric of several runs side by side, as SVG.
pub fn curves(runs: &[(String, &Outcome)], path: &Path) -> Result<(), String> {
    let classes = runs.iter().any(|(_, run)| run.summary.metric == "accuracy");
    let (name, metric, factor, scale) = match classes {
        true => ("test accuracy, %", "accuracy", 100.0, Scale::Linear),
        false => ("test perplexity", "perplexity", 1.0, Scale::Log),
    };
    let panel = |title: &str, split: Split, metric: &str, factor: f64, y_scale: Scale| {
        let line = |(style, (label, run)): (usize, &(String, &Outcome))| {
            let records = run.records.iter().filter(|r| r.split == split);
            let points = records.filter_map(|r| Some((r.epoch as f64, factor * r.values.get(metric)?)));
            Series::line(label, style, points.collect())
        };
        let series = runs.iter().enumerate().map(line).collect();
        let text = format!("{title} of {} runs by epoch", runs.len());
        Chart { y_scale, series, ..Chart::new(title, &text, "epoch", "") }
    };
    let charts = [
        panel("training loss", Split::Train, "loss", 1.0, Scale::Log),
        panel(name, Split::Test, metric, factor, scale),
    ];
    let sheet =
        Sheet { title: "Learning curves".into(), pictures: charts.map(Picture::Chart).into(), columns: 2 };
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
