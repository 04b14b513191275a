//! Pictures as SVG: line charts with bands and heat maps, alone in a file or inside a page; a line in a terminal.
//!
//! What a series looks like (colour, dashes, marks) is its style, a small number; the style sheet `style.css` gives it
//! colours that stay apart for colour-blind readers, on white, on black and in print. Equal pictures are equal bytes.
mod axis;
mod chart;
mod dots;
mod heat;
#[cfg(feature = "png")]
pub mod png;
mod sheet;
mod terminal;

pub use axis::Scale;
pub use axis::{exact, short, told_apart};
pub use chart::{Chart, Hover, Marks, Series};
pub use dots::Dots;
pub use heat::{Cell, Heat};
pub use sheet::{Sheet, swatch};
pub use terminal::braille;

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
pub fn visible(text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_stays_text() {
        assert_eq!(escape("<b a=\"x\" b='y'>&"), "&lt;b a=&quot;x&quot; b=&#39;y&#39;&gt;&amp;");
        assert_eq!(escape("a\u{0}b\u{202e}c\u{7f}"), "a\u{fffd}b\u{fffd}c\u{fffd}");
    }
}
