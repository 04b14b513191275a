use super::Failure;
use std::io::Write;
use std::path::{Path, PathBuf};
use taper_report::Form;

/// Tables and pictures of any runs
///
/// Means over seeds with their intervals, learning curves, sensitivity to what a sweep varied, and what went on inside
/// DecGD. The page is one file that needs no network. Without --out, the tables as Markdown on standard output.
///
///   cargo xtask report runs
///   cargo xtask report runs --out report.html
///   cargo xtask report runs/mnist-mlp-* --out tables.tex
///   cargo xtask report runs --out figures.svg
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Folders of runs, or runs
    #[arg(required = true, value_name = "DIR")]
    folders: Vec<PathBuf>,
    /// Where to write; the ending says what: .html (a page), .md, .tex (booktabs), .csv or .jsonl (every number), .svg
    /// or .png (pictures)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The title
    #[arg(long, default_value = "Report")]
    title: String,
    /// Every number of the tables on standard output, one JSON object a line, in place of the tables
    #[arg(long, conflicts_with = "out")]
    json: bool,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let alone = if args.json { Form::Json } else { Form::Markdown };
    let form = args.out.as_deref().map_or(Ok(alone), form)?;
    let runs = taper_report::load(&args.folders).map_err(|e| Failure::usage(format!("error: {e}")))?;
    runs.problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    write(&taper_report::document(&args.title, &runs), form, args.out.as_deref())
}

/// The form that a name asks for, if it can be had here.
pub fn form(out: &Path) -> Result<Form, Failure> {
    let usage = |e: String| Failure::usage(format!("error: --out: {e}"));
    let form = Form::of(out).map_err(usage)?;
    form.ready().map_err(|e| usage(format!("{}: {e}", out.display())))?;
    Ok(form)
}

/// Writes a report to a file, or to standard output.
pub fn write(document: &taper_report::Document, form: Form, out: Option<&Path>) -> Result<(), Failure> {
    let bytes = document.render(form).map_err(|e| Failure::other(format!("error: {e}")))?;
    match out {
        Some(path) => {
            std::fs::write(path, bytes).map_err(|e| Failure::other(format!("error: {}: {e}", path.display())))
        }
        None => Ok(std::io::stdout().write_all(&bytes)?),
    }
}
