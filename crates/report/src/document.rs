//! What a report says, before it takes a form: Markdown, LaTeX, CSV, JSON, SVG, PNG or a page of HTML.
use super::{ReportError, html};
use std::path::Path;
use taper_figures::plot::{Chart, Marks, Picture, Scale, Series, Sheet, braille, short, visible};
use taper_figures::table::{Table, latex_text, markdown_text};

/// A report.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Its title.
    pub title: String,
    /// What it is about, above everything.
    pub lead: Vec<String>,
    /// Its parts.
    pub sections: Vec<Section>,
    /// Every number of its tables, one a row, for programs.
    pub data: Table,
}

/// A part of a report.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Its title.
    pub title: String,
    /// What it holds, in order.
    pub blocks: Vec<Block>,
}

/// A piece of a section.
#[derive(Clone, Debug)]
pub enum Block {
    /// A paragraph.
    Text(String),
    /// A table.
    Table(Table),
    /// A figure.
    Figure(Figure),
    /// Text to unfold, as it stands; pages only.
    Code {
        /// What it is.
        title: String,
        /// The text.
        text: String,
    },
}

/// One or more pictures with a caption; the same numbers as a table.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The caption.
    pub caption: String,
    /// Side by side.
    pub panels: Vec<Panel>,
    /// The numbers, for those who do not see the pictures.
    pub data: Table,
}

/// The views of one picture: one is shown at a time.
#[derive(Clone, Debug)]
pub struct Panel {
    /// At least one; the first is shown at first.
    pub views: Vec<View>,
}

/// A picture in one of its forms.
#[derive(Clone, Debug)]
pub struct View {
    /// Whether an axis was made logarithmic that is not so at first.
    pub log: bool,
    /// Whether lines were smoothed.
    pub smooth: bool,
    /// The picture.
    pub picture: Picture,
}

/// A form that a report can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One page, complete in itself.
    Html,
    /// Tables as Markdown.
    Markdown,
    /// Tables as LaTeX with booktabs.
    Latex,
    /// Every number of the tables.
    Csv,
    /// The same, one JSON object a line.
    Json,
    /// All pictures in one file.
    Svg,
    /// The same, drawn with the fonts of the system; with the feature `png`.
    Png,
}

impl Form {
    /// By the ending of a file's name.
    pub fn of(path: &Path) -> Result<Self, String> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("html" | "htm") => Ok(Self::Html),
            Some("md") => Ok(Self::Markdown),
            Some("tex") => Ok(Self::Latex),
            Some("csv") => Ok(Self::Csv),
            Some("jsonl") => Ok(Self::Json),
            Some("svg") => Ok(Self::Svg),
            Some("png") => Ok(Self::Png),
            _ => Err(format!(
                "{}: expected a name that ends in .html, .md, .tex, .csv, .jsonl, .svg or .png",
                path.display()
            )),
        }
    }

    /// Whether it can be written here, and why not: to be asked before hours of work that end in it.
    pub fn ready(self) -> Result<(), ReportError> {
        match self {
            Self::Png => png::ready().map_err(ReportError::Png),
            _ => Ok(()),
        }
    }
}

#[cfg(feature = "png")]
mod png {
    pub use taper_figures::plot::png::draw;

    pub fn ready() -> Result<(), String> {
        taper_figures::plot::png::fonts().map(drop)
    }
}

#[cfg(not(feature = "png"))]
mod png {
    pub fn ready() -> Result<(), String> {
        let how = taper_files::built_with("png");
        Err(format!("this taper was built without PNG: build it with {how}, or write .svg"))
    }

    pub fn draw(_: &str) -> Result<Vec<u8>, String> {
        ready().map(|()| Vec::new())
    }
}

impl Document {
    /// In a form; equal reports give equal bytes, a PNG on systems with the same fonts. Only a PNG can fail.
    pub fn render(&self, form: Form) -> Result<Vec<u8>, ReportError> {
        let text = match form {
            Form::Html => html::page(self),
            Form::Markdown => self.markdown(),
            Form::Latex => self.latex(),
            Form::Csv => self.data.csv(),
            Form::Json => self.data.json_lines(),
            Form::Svg => self.sheet().svg(),
            Form::Png => return png::draw(&self.sheet().svg()).map_err(ReportError::Png),
        };
        Ok(text.into_bytes())
    }

    /// All figures, in order.
    pub fn figures(&self) -> impl Iterator<Item = &Figure> {
        let blocks = self.sections.iter().flat_map(|section| &section.blocks);
        blocks.filter_map(|block| match block {
            Block::Figure(figure) => Some(figure),
            _ => None,
        })
    }

    fn markdown(&self) -> String {
        let mut out = format!("# {}\n", markdown_text(&self.title));
        self.lead.iter().for_each(|text| out += &format!("\n{}\n", markdown_text(text)));
        for section in self.sections.iter().filter(|s| s.prints()) {
            out += &format!("\n## {}\n", markdown_text(&section.title));
            for block in &section.blocks {
                match block {
                    Block::Text(text) => out += &format!("\n{}\n", markdown_text(text)),
                    Block::Table(table) => out += &format!("\n{}", table.markdown()),
                    Block::Figure(_) | Block::Code { .. } => {}
                }
            }
        }
        out
    }

    fn latex(&self) -> String {
        let mut out = format!("% {}\n% Needs \\usepackage{{booktabs}}.\n", latex_text(&self.title));
        for section in self.sections.iter().filter(|s| s.prints()) {
            for block in &section.blocks {
                match block {
                    Block::Text(text) => out += &format!("\n{}\n", latex_text(text)),
                    Block::Table(table) => out += &format!("\n{}", table.latex()),
                    Block::Figure(_) | Block::Code { .. } => {}
                }
            }
        }
        out
    }

    /// As text for a terminal: that of Markdown, with the lines of all charts below it.
    pub fn terminal(&self) -> String {
        let mut out = self.markdown();
        let pictures =
            self.figures().flat_map(|figure| &figure.panels).filter_map(|panel| panel.views.first());
        for view in pictures {
            let Picture::Chart(chart) = &view.picture else { continue };
            let lines: Vec<&Series> = chart.series.iter().filter(|one| one.marks == Marks::Line).collect();
            // Many lines in a chart are for the eye to compare, and do not share a grid of dots.
            if lines.len() <= 2 {
                lines.into_iter().for_each(|series| out += &curve(chart, series));
            }
        }
        out
    }

    /// The first view of every picture, in the paper's arrangement: the panels of a figure side by side, three at most.
    fn sheet(&self) -> Sheet {
        let first = |panel: &Panel| panel.views.first().map(|view| view.picture.clone());
        let of = |figure: &Figure| figure.panels.iter().filter_map(first).collect::<Vec<Picture>>();
        let rows =
            self.figures().flat_map(|figure| of(figure).chunks(3).map(<[_]>::to_vec).collect::<Vec<_>>());
        Sheet { title: self.title.clone(), rows: rows.collect() }
    }
}

/// A line of a chart in dots, with what its axes reach.
fn curve(chart: &Chart, series: &Series) -> String {
    const SIZE: (usize, usize) = (64, 5);
    const LABEL: usize = 10;
    let log = chart.y_scale == Scale::Log;
    let scaled: Vec<f64> = series.points.iter().map(|(_, y)| if log { y.ln() } else { *y }).collect();
    let finite = || scaled.iter().copied().filter(|y| y.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), y| (l.min(y), h.max(y)));
    let (Some(first), Some(last)) = (series.points.first(), series.points.last()) else {
        return String::new();
    };
    if low > high {
        return String::new();
    }
    // A flat line stands in the middle.
    let (bottom, top) = if high > low { (low, high) } else { (low - 1.0, high + 1.0) };
    let back = |y: f64| short(if log { y.exp() } else { y });
    let axis = if log { ", log axis" } else { "" };
    let mut out =
        format!("\n{}: {}{axis}; ends at {}\n", visible(&chart.title), visible(&series.label), short(last.1));
    for (i, row) in braille(&scaled, (bottom, top), SIZE.0, SIZE.1).into_iter().enumerate() {
        let label = match i {
            0 => back(high),
            i if i + 1 == SIZE.1 => back(low),
            _ => String::new(),
        };
        out += &format!("{label:>LABEL$} {}\n", row.trim_end());
    }
    out + &format!("{:LABEL$} {} from {} to {}\n", "", chart.x_label, short(first.0), short(last.0))
}

impl Section {
    /// A section with a title.
    pub fn new(title: impl Into<String>, blocks: Vec<Block>) -> Self {
        Self { title: title.into(), blocks }
    }

    /// Whether it has more than pictures and text to unfold.
    fn prints(&self) -> bool {
        self.blocks.iter().any(|block| matches!(block, Block::Text(_) | Block::Table(_)))
    }
}
