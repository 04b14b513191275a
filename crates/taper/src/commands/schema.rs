use super::Failure;
use std::io::Write;
use taper_train::{Registries, keys};

/// Prints a JSON Schema of recipes
///
/// Every section, and every optimizer's, model's, data set's and schedule's own keys with documentation, defaults and ranges. An
/// editor that knows YAML completes and checks a recipe whose first line names the file:
///
///   # yaml-language-server: $schema=schema.json
///
///   cargo xtask schema > schema.json
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {}

pub fn run(registries: &Registries) -> Result<(), Failure> {
    Ok(std::io::stdout().write_all(text(registries).as_bytes())?)
}

/// The schema as a file has it.
pub fn text(registries: &Registries) -> String {
    // Strings and numbers always print.
    let mut text = serde_json::to_string_pretty(&keys::schema(registries)).unwrap_or_default();
    text.push('\n');
    text
}
