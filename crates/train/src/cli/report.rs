use super::Failure;
use std::io::Write;
use std::path::PathBuf;
use taper_train::report::{self, Form};

/// Tables and pictures of any runs
///
/// Means over seeds with their intervals, learning curves, sensitivity to what a sweep varied, and what went on inside
/// DecGD. The page is one file that needs no network. Without --out, the tables as Markdown on standard output.
///
///   cargo xtask report runs
///   cargo xtask report runs --out report.html
///   cargo xtask report runs/mnist-mlp-* --out tables.tex
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folders of runs, or runs
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Where to write; the ending says what: .html (a page), .md, .tex (booktabs), .csv (every number), .svg (pictures)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The title
    #[arg(long, default_value = "Report")]
    title: String,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let form = args.out.as_deref().map_or(Ok(Form::Markdown), Form::of);
    let form = form.map_err(|e| Failure::usage(format!("error: --out: {e}")))?;
    let runs = report::load(&args.folders).map_err(|e| Failure::usage(format!("error: {e}")))?;
    runs.problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    write(&report::document(&args.title, &runs), form, args.out.as_deref())
}

/// Writes a report to a file, or to standard output.
pub fn write(document: &report::Document, form: Form, out: Option<&std::path::Path>) -> Result<(), Failure> {
    let text = document.render(form);
    match out {
        Some(path) => {
            std::fs::write(path, text).map_err(|e| Failure::other(format!("error: {}: {e}", path.display())))
        }
        None => Ok(std::io::stdout().write_all(text.as_bytes())?),
    }
}
