//! Several pictures in one SVG file, side by side, with one legend.
use super::chart::{SIZE, mark};
use super::{Picture, STYLE, STYLES, escape};
use std::fmt::Write;

/// Pictures in rows, as on the page of a paper: a row a figure.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// What it shows, for those who do not see it.
    pub title: String,
    /// The pictures that stand side by side, row by row.
    pub rows: Vec<Vec<Picture>>,
}

/// Pixels of a legend's line, and what a letter takes.
const LINE: f64 = 24.0;
const LETTER: f64 = 7.0;

/// A short piece of a style's line with its mark, for a legend.
pub fn swatch(style: usize) -> String {
    let (class, mark) = (style % STYLES, mark(style, 14.0, 6.0));
    format!(
        "<g class=\"s{class}\"><path class=\"line\" d=\"M0 6H28\"/><path class=\"marks\" d=\"{mark}\"/></g>"
    )
}

impl Sheet {
    /// As a file of its own.
    pub fn svg(&self) -> String {
        let (wide, high) = SIZE;
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let width = wide * columns as f64;
        let (legend, legend_height) = self.legend(width);
        let end = high * self.rows.len() as f64;
        let height = end + legend_height;
        let mut out = String::new();
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\"><title>{}</title>\n<style>\n{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" style=\"fill: var(--paper)\"/>\n",
            escape(&self.title)
        );
        for (row, pictures) in self.rows.iter().enumerate() {
            for (column, picture) in pictures.iter().enumerate() {
                let (x, y) = (wide * column as f64, high * row as f64);
                let svg = picture.svg(&format!("r{row}p{column}"));
                let place = format!("<svg x=\"{x}\" y=\"{y}\" width=\"{wide}\" height=\"{high}\" ");
                let _ = writeln!(out, "{}", svg.replacen("<svg ", &place, 1));
            }
        }
        let _ = writeln!(out, "<g transform=\"translate(0 {end})\">{legend}</g></svg>");
        out
    }

    fn legend(&self, width: f64) -> (String, f64) {
        let mut seen: Vec<(&str, usize)> = Vec::new();
        for picture in self.rows.iter().flatten() {
            let Picture::Chart(chart) = picture else { continue };
            for series in &chart.series {
                if !seen.iter().any(|(label, _)| *label == series.label) {
                    seen.push((&series.label, series.style));
                }
            }
        }
        let (mut x, mut y, mut out) = (72.0, 0.0, String::new());
        for (label, style) in &seen {
            let length = 36.0 + LETTER * label.chars().count() as f64 + 22.0;
            if x + length > width && x > 72.0 {
                (x, y) = (72.0, y + LINE);
            }
            let _ = write!(
                out,
                "<g transform=\"translate({x} {y})\">{}<text x=\"36\" y=\"10\">{}</text></g>",
                swatch(*style),
                escape(label)
            );
            x += length;
        }
        (out, if seen.is_empty() { 0.0 } else { y + LINE + 4.0 })
    }
}
