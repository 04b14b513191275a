//! A report as one page that needs nothing else: style, script and pictures are inside, and nothing is fetched.
//!
//! All pictures are drawn here; the script only shows and hides what is there and reads the values under the pointer.
//! Without it the page is complete but still.
use super::document::{Block, Document, Figure, Section};
use std::fmt::Write;
use taper_figures::plot::{self, Picture, escape, swatch};

const CSS: &str = include_str!("page.css");

/// The style sheet of a page of [sections](Section::html), with that of its pictures before it.
pub const STYLE: [&str; 2] = [plot::STYLE, CSS];

/// The script of such a page: what it says of all figures when it is loaded, `attach(figure)` says of one that came later.
pub const SCRIPT: &str = include_str!("page.js");

/// The page.
pub(super) fn page(document: &Document) -> String {
    let title = escape(&document.title);
    let mut out = String::new();
    // Writing to a String cannot fail, here and below.
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
         script-src 'unsafe-inline'; img-src data:\">\n\
         <link rel=\"icon\" href=\"data:,\">\n\
         <title>{title}</title>\n<style>\n{}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n",
        STYLE.concat()
    );
    for text in &document.lead {
        let _ = writeln!(out, "<p>{}</p>", escape(text));
    }
    out += "<nav aria-label=\"Contents\"><ol>";
    for (number, section) in document.sections.iter().enumerate() {
        let _ = write!(out, "<li><a href=\"#s{}\">{}</a></li>", number + 1, escape(&section.title));
    }
    out += "</ol></nav>\n</header>\n<main>\n";
    let mut figures = 0;
    for (number, section) in document.sections.iter().enumerate() {
        let _ = writeln!(out, "<section id=\"s{}\">\n<h2>{}</h2>", number + 1, escape(&section.title));
        write_blocks(&mut out, section, &mut figures);
        out += "</section>\n";
    }
    let _ = write!(out, "</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n");
    out
}

/// What a section holds, without its title; `figures` counts the figures of the page.
fn write_blocks(out: &mut String, section: &Section, figures: &mut usize) {
    for block in &section.blocks {
        match block {
            Block::Text(text) => {
                let _ = writeln!(out, "<p>{}</p>", escape(text));
            }
            Block::Table(table) => {
                let _ = writeln!(out, "{}", table.html());
            }
            Block::Figure(figure) => {
                *figures += 1;
                write_figure(out, figure, *figures);
            }
            Block::Code { title, text } => {
                let (title, text) = (escape(title), escape(text));
                let _ = writeln!(out, "<details><summary>{title}</summary><pre>{text}</pre></details>");
            }
        }
    }
}

impl Section {
    /// What it holds as a piece of a page that has the [style](STYLE) and the [script](SCRIPT); `figures` counts the figures of
    /// the page.
    pub fn html(&self, figures: &mut usize) -> String {
        let mut out = String::new();
        write_blocks(&mut out, self, figures);
        out
    }
}

fn write_figure(out: &mut String, figure: &Figure, number: usize) {
    let _ = write!(
        out,
        "<figure id=\"f{number}\">\n<figcaption><b>Figure {number}.</b> {}</figcaption>\n",
        escape(&figure.caption)
    );
    let views = || figure.panels.iter().flat_map(|panel| &panel.views);
    let switches =
        [(views().any(|v| v.log), "log", "log axis"), (views().any(|v| v.smooth), "smooth", "smoothed")];
    let names = legend(figure);
    if names.len() > 1 || switches.iter().any(|(there, ..)| *there) {
        out.push_str("<div class=\"controls\">");
        for (name, style) in &names {
            let name = escape(name);
            let _ = write!(
                out,
                "<label class=\"key\"><input type=\"checkbox\" checked data-series=\"{name}\">\
                 <svg class=\"plot\" width=\"28\" height=\"12\" aria-hidden=\"true\">{}</svg><span>{name}</span></label>",
                swatch(*style)
            );
        }
        for (_, kind, label) in switches.iter().filter(|(there, ..)| *there) {
            let _ = write!(
                out,
                "<label class=\"switch\"><input type=\"checkbox\" data-switch=\"{kind}\"><span>{label}</span></label>"
            );
        }
        out.push_str("</div>\n");
    }
    let _ = write!(out, "<div class=\"panels n{}\">", figure.panels.len().min(3));
    for (index, panel) in figure.panels.iter().enumerate() {
        out.push_str("<div class=\"panel\">");
        for (view_number, view) in panel.views.iter().enumerate() {
            let svg = view.picture.svg(&format!("f{number}p{index}v{view_number}"));
            let hidden = if view_number > 0 { " hidden" } else { "" };
            let (log, smooth) = (u8::from(view.log), u8::from(view.smooth));
            let _ = write!(
                out,
                "<div class=\"view\" data-log=\"{log}\" data-smooth=\"{smooth}\"{hidden}>{svg}{}</div>",
                hover(&view.picture)
            );
        }
        out.push_str("</div>");
    }
    out.push_str("</div>\n");
    if !figure.data.is_empty() {
        let _ = writeln!(
            out,
            "<details class=\"data\"><summary>The numbers of figure {number}</summary>{}</details>",
            figure.data.html()
        );
    }
    out.push_str("</figure>\n");
}

/// The names of a figure's series with their looks, each once.
fn legend(figure: &Figure) -> Vec<(String, usize)> {
    let mut names: Vec<(String, usize)> = Vec::new();
    for view in figure.panels.iter().filter_map(|panel| panel.views.first()) {
        let Picture::Chart(chart) = &view.picture else { continue };
        for series in &chart.series {
            if !names.iter().any(|(name, _)| *name == series.label) {
                names.push((series.label.clone(), series.style));
            }
        }
    }
    names
}

/// The values of a chart as data that no markup can break out of.
fn hover(picture: &Picture) -> String {
    let Picture::Chart(chart) = picture else { return String::new() };
    let json = chart.hover().0.to_string().replace('<', "\\u003c");
    format!("<script type=\"application/json\">{json}</script>")
}
