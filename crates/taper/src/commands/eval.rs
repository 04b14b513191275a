use super::trained::Which;
use super::{Common, Failure, print};
use serde_json::Value;
use std::path::PathBuf;
use taper_train::Registries;
use taper_train::recipe;
use taper_train::run::Split;

/// Evaluates a run or a checkpoint
///
/// Loss, and accuracy with figures for each class, confusions and calibration, or the perplexity of text. The numbers are those that
/// the run itself measured after the same step, to the bit.
///
///   cargo xtask eval runs/mnist-mlp-decgd-0123456789ab
///   cargo xtask eval runs/mnist-mlp-decgd-0123456789ab --best --split val --json
///   cargo xtask eval runs/mnist-mlp-decgd-0123456789ab/checkpoints/step-938 --out confusion.svg
///   cargo xtask eval runs/mnist-mlp-decgd-0123456789ab --on '{name: folder, path: digits, size: 28, channels: 1, test: 0.5}'
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    which: Which,
    /// The part of the data; the training set is taken as it is, without augmentation
    #[arg(long, value_name = "SPLIT", default_value = "test", value_parser = ["train", "val", "test"])]
    split: String,
    /// Another data set than the run's: its name, or its section of a recipe ({name: folder, path: photos})
    #[arg(long, value_name = "DATA")]
    on: Option<String>,
    /// Draws confusions and calibration into a file (.svg)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    if let Some(out) = args.out.as_ref().filter(|out| out.extension().is_none_or(|ending| ending != "svg")) {
        return Err(Failure::usage(format!(
            "error: --out: {}: expected a name that ends in .svg",
            out.display()
        )));
    }
    let split = match args.split.as_str() {
        "train" => Split::Train,
        "val" => Split::Val,
        _ => Split::Test,
    };
    let mut trained = args.which.open(common, registries)?;
    if let Some(on) = &args.on {
        let (name, options) = section(on)?;
        trained.evaluate_on(&name, &options, registries, &common.search())?;
    }
    if args.out.is_some() {
        // Refused before the work is done.
        trained.images()?;
    }
    let found = trained.evaluate(split)?;
    if let (Some(out), Some(classes)) = (&args.out, &found.classes) {
        let picture = classes.svg(&format!("{}: {} set", found.name, split.name()));
        taper_files::create(out, picture.as_bytes())
            .map_err(|e| Failure::usage(format!("error: --out: {e}")))?;
    }
    print(&found, args.json)
}

/// A data set's name and options as a recipe has them.
fn section(given: &str) -> Result<(String, Value), Failure> {
    let refuse = |message: String| Failure::usage(format!("error: --on: {message}"));
    let mut options = match recipe::value("--on", given)? {
        Value::String(name) => return Ok((name, Value::Null)),
        Value::Object(options) => options,
        _ => return Err(refuse(format!("expected a data set's name or {{name: …}}, found {given}"))),
    };
    match options.remove("name") {
        Some(Value::String(name)) => Ok((name, Value::Object(options))),
        _ => Err(refuse(format!("expected a data set's name or {{name: …}}, found {given}"))),
    }
}
