use super::{Failure, report};
use std::io::Write;
use std::path::PathBuf;
use taper_report::{Form, explain};

/// What an optimizer did in a run, or what differed between two
///
/// Of runs that were trained with a microscope (train.probe: {every: 10, what: [all]}): what their steps were close to and at which
/// rate, layer by layer and over time, when and where they became unstable, and what to try next. Sentences are chosen by
/// the rules of docs/microscope.md. A run may still go on. Without --out, as text with curves on standard output.
///
///   cargo xtask train recipes/mnist/mlp-decgd.yaml --set train.probe='{every: 10, what: [all]}'
///   cargo xtask explain runs/mnist-mlp-decgd-*
///   cargo xtask explain runs/mnist-mlp-decgd-* runs/mnist-mlp-sgdm-* --out explained.html
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// A run, or two to compare
    #[arg(required = true, num_args = 1..=2, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Where to write; the ending says what: .html (a page), .md, .tex, .csv or .jsonl (every number), .svg or .png (pictures)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Every number on standard output, one JSON object a line, in place of the text
    #[arg(long, conflicts_with = "out")]
    json: bool,
}

pub fn run(args: &Args) -> Result<(), Failure> {
    let form = args.out.as_deref().map(report::form).transpose()?;
    let mut problems = Vec::new();
    let runs = explain::load(&args.runs, &mut problems);
    problems.iter().for_each(|problem| eprintln!("warning: {problem}"));
    let document = explain::document(&runs.map_err(|e| Failure::usage(format!("error: {e}")))?);
    match form {
        None if args.json => report::write(&document, Form::Json, None),
        None => Ok(std::io::stdout().write_all(document.terminal().as_bytes())?),
        Some(form) => report::write(&document, form, args.out.as_deref()),
    }
}
