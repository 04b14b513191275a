//! A row a thing, a mark a value: how several do at many things, over an axis of any length.
use super::axis::{Axis, Scale, short};
use super::chart::mark;
use super::sheet::swatch;
use super::{STYLE, STYLES, escape};
use std::fmt::Write;

/// Rows of marks over a logarithmic axis, as a file of its own.
#[derive(Clone, Debug)]
pub struct Dots {
    /// What the axis measures.
    pub title: String,
    /// Who is compared, in the order of each row's values.
    pub sides: Vec<String>,
    /// A name, a remark, and a value a side where there is one.
    pub rows: Vec<(String, String, Vec<Option<f64>>)>,
}

/// Pixels: the file's width, a row's height, where the axis starts and where the rows do.
const WIDTH: f64 = 900.0;
const ROW: f64 = 22.0;
const LEFT: f64 = 290.0;
const TOP: f64 = 64.0;

impl Dots {
    /// As SVG.
    pub fn svg(&self) -> String {
        let values = self.rows.iter().flat_map(|(_, _, values)| values.iter().flatten().copied());
        let axis = Axis::over(values, Scale::Log, (LEFT, WIDTH - 20.0), 0.06);
        let bottom = TOP + ROW * self.rows.len() as f64;
        let height = bottom + 28.0;
        let mut out = String::new();
        // Writing to a String cannot fail, here and below.
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
             height=\"{height}\" role=\"img\"><title>{0}</title>\n<style>\n{STYLE}</style>\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" style=\"fill: var(--paper)\"/>\n\
             <text class=\"name\" x=\"{LEFT}\" y=\"22\">{0}</text>\n",
            escape(&self.title)
        );
        for (style, side) in self.sides.iter().enumerate() {
            let x = LEFT + 130.0 * style as f64;
            let _ = writeln!(
                out,
                "<g transform=\"translate({x} 34)\">{}<text x=\"36\" y=\"10\">{}</text></g>",
                swatch(style),
                escape(side)
            );
        }
        for tick in axis.ticks() {
            let Some(x) = axis.place(tick) else { continue };
            let _ = writeln!(
                out,
                "<path class=\"grid\" d=\"M{x:.1} {TOP}V{bottom}\"/><text class=\"tick\" x=\"{x:.1}\" y=\"{}\" \
                 text-anchor=\"middle\">{}</text>",
                bottom + 18.0,
                short(tick)
            );
        }
        for (index, (name, remark, values)) in self.rows.iter().enumerate() {
            let y = TOP + ROW * (index as f64 + 0.5);
            let _ = writeln!(
                out,
                "<text x=\"{}\" y=\"{2}\" text-anchor=\"end\">{}</text><text class=\"tick\" x=\"{3}\" y=\"{2}\" \
                 text-anchor=\"end\">{4}</text>",
                LEFT - 70.0,
                escape(name),
                y + 4.0,
                LEFT - 12.0,
                escape(remark)
            );
            let places = values.iter().enumerate().filter_map(|(style, v)| Some((style, axis.place((*v)?)?)));
            for (style, x) in places {
                let (class, mark) = (style % STYLES, mark(style, x, y));
                let _ = writeln!(out, "<g class=\"s{class}\"><path class=\"marks\" d=\"{mark}\"/></g>");
            }
        }
        out.push_str("</svg>\n");
        out
    }
}
