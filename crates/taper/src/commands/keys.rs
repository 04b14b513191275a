use super::Failure;
use std::io::Write;
use taper_train::keys::{self, Key};
use taper_train::{Registries, recipe};

/// Explains the keys of a recipe: type, default, range and what they do
///
/// A key is named by its path with the name or kind that has it (optimizer.decgd.c), as a recipe has it (optimizer.c), by a glob,
/// or by one word of it.
///
///   cargo xtask keys optimizer.decgd
///   cargo xtask keys optimizer.c
///   cargo xtask keys 'train.*'
///   cargo xtask keys warmup
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Which keys; all without one
    #[arg(value_name = "GLOB", default_value = "*", hide_default_value = true)]
    pattern: String,
    /// One JSON object a line
    #[arg(long, conflicts_with = "markdown")]
    json: bool,
    /// The whole reference of recipes with its cookbook, as docs/recipes.md has it
    #[arg(long, conflicts_with = "pattern")]
    markdown: bool,
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    let all = keys::list(registries);
    let mut out = std::io::stdout().lock();
    if args.markdown {
        return Ok(out.write_all(reference(&all).as_bytes())?);
    }
    let found = keys::find(&all, &args.pattern).map_err(|e| Failure::usage(format!("error: {e}")))?;
    for key in &found {
        match args.json {
            true => writeln!(out, "{}", serde_json::json!(key))?,
            false => write_key(&mut out, key, found.len())?,
        }
    }
    Ok(())
}

/// So many keys are explained down to their words; of more, the words are those of a line.
const FEW: usize = 12;

fn write_key(out: &mut dyn Write, key: &Key, of: usize) -> std::io::Result<()> {
    let default = key.default_text();
    let default = if default.is_empty() { default } else { format!(", default {default}") };
    writeln!(out, "{}  {}{default}", key.path, key.takes())?;
    if !key.about.is_empty() {
        writeln!(out, "    {}", key.about)?;
    }
    if of <= FEW {
        let width = key.choices.iter().map(|(word, _)| word.len()).max().unwrap_or(0);
        for (word, about) in &key.choices {
            writeln!(out, "      {}", format!("{word:width$}  {about}").trim_end())?;
        }
    }
    Ok(())
}

const HEAD: &str = "\
# Recipes

Recipes for what people ask, and every key that a recipe may have. This page is what `cargo xtask keys --markdown` prints; a test
keeps it so. In the terminal: `cargo xtask keys optimizer.decgd`. For editors: `docs/schema.json`, which is what `cargo xtask
schema` prints, named in the first line of a recipe: `# yaml-language-server: $schema=…`.

A recipe is layers, lowest first: the built-in defaults, what `extends` names, the file itself, the environment
(`TAPER__TRAIN__EPOCHS=5`), `--set train.epochs=5`. A layer that names another optimizer, model, data set or schedule begins that
section anew. `null` takes a setting of an open section back to its default. A relative path is looked for beside the file that
has it first.

## Cookbook

`cargo xtask recipes copy cookbook/ema` writes one of these to where you are.

";

/// The page `docs/recipes.md`.
fn reference(all: &[Key]) -> String {
    let mut page = HEAD.to_owned();
    for (name, text) in recipe::inside().filter(|(name, _)| name.starts_with("recipes/cookbook/")) {
        let name = name.trim_start_matches("recipes/").trim_end_matches(".yaml");
        page += &format!("### `{name}`\n\n```yaml\n{}```\n\n", without_modeline(text));
    }
    let mut section = "";
    for key in all {
        let mut parts = key.path.split('.');
        let first = parts.next().unwrap_or_default();
        if first != section && key.path.contains('.') {
            section = first;
            page += &format!("\n## `{section}`\n\n| key | takes | default | |\n| --- | --- | --- | --- |\n");
        } else if section.is_empty() {
            section = first;
            page += "## The root\n\n| key | takes | default | |\n| --- | --- | --- | --- |\n";
        }
        page += &row(key);
    }
    page
}

fn without_modeline(text: &str) -> &str {
    match text.split_once('\n') {
        Some((first, rest)) if first.starts_with("# yaml-language-server") => rest,
        _ => text,
    }
}

fn row(key: &Key) -> String {
    let cell = |text: &str| text.replace('|', "\\|");
    let words = key.choices.iter().filter(|(_, about)| !about.is_empty());
    let words: Vec<String> = words.map(|(word, about)| format!("`{word}`: {about}")).collect();
    let about = [vec![key.about.clone()], words].concat().join(" ");
    let (takes, default) = (cell(&key.takes()), cell(&key.default_text()));
    let default = if default.is_empty() { default } else { format!("`{default}`") };
    format!("| `{}` | {takes} | {default} | {} |\n", key.path, cell(about.trim()))
}
