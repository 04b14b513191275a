use super::Failure;
use serde_json::json;
use std::io::Write;
use taper_optim::{Family, Named};
use taper_train::Registries;

/// Lists the optimizers by family; with --long what they compute, their hyperparameters with defaults, their state
///
///   cargo xtask optimizers
///   cargo xtask optimizers --long 'ada*'
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Names to list; `*` stands for any characters
    #[arg(default_value = "*", value_name = "GLOB")]
    glob: String,
    /// Formulas, hyperparameters, state and papers
    #[arg(long)]
    long: bool,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

/// The families in the order of the list.
const FAMILIES: [(Family, &str); 8] = [
    (Family::Paper, "DecGD and what its paper compares it to"),
    (Family::SecondMoments, "second moments"),
    (Family::Sign, "sign and momentum"),
    (Family::Matrix, "matrices and curvature"),
    (Family::LayerWise, "layer-wise rates"),
    (Family::TuningFree, "free of schedules or of tuning"),
    (Family::Wrapper, "wrappers around another optimizer"),
    (Family::Other, "others"),
];

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    let registry = &registries.optimizers;
    let entries: Vec<_> =
        registry.list(&args.glob).map_err(|e| Failure::usage(format!("error: {e}")))?.collect();
    if entries.is_empty() {
        let message = registry.get(&args.glob).err().map(|e| e.to_string()).unwrap_or_default();
        return Err(Failure::usage(format!("error: {message}")));
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        for entry in entries {
            let info = entry.info;
            let line = json!({
                "name": info.name, "family": entry.family, "about": info.about, "paper": info.paper, "year": info.year,
                "formula": info.formula, "needs_loss": entry.needs_loss,
                "gradients": entry.gradients(&Default::default()).unwrap_or(1),
                "state": entry.buffers(&Default::default()).unwrap_or_default(),
                "state_bytes": entry.state_bytes(), "aliases": entry.aliases, "defaults": entry.defaults,
            });
            writeln!(out, "{line}")?;
        }
        return Ok(());
    }
    let mut between = "";
    for (family, title) in FAMILIES {
        let of_family: Vec<_> = entries.iter().filter(|entry| entry.family == family).collect();
        if of_family.is_empty() {
            continue;
        }
        writeln!(out, "{between}{title}")?;
        between = "\n";
        for entry in of_family {
            writeln!(out, "  {:<10} {}", entry.info.name, entry.info.about)?;
            if args.long {
                details(&mut out, entry)?;
            }
        }
    }
    Ok(())
}

/// What `--long` adds to a line.
fn details(out: &mut impl Write, entry: &Named<'_>) -> std::io::Result<()> {
    let state = entry.buffers(&Default::default()).unwrap_or_default();
    let defaults: Vec<_> = entry.defaults.iter().map(|(key, value)| format!("{key}: {value}")).collect();
    let (info, bytes) = (entry.info, entry.state_bytes());
    let state = if state.is_empty() { "none of its size".to_owned() } else { state.join(", ") };
    let loss = if entry.needs_loss { ", needs the loss" } else { "" };
    let twice =
        if entry.gradients(&Default::default()).unwrap_or(1) > 1 { ", two gradients a step" } else { "" };
    writeln!(out, "  {:10} {}", "", info.formula)?;
    writeln!(out, "  {:10} {{{}}}", "", defaults.join(", "))?;
    writeln!(out, "  {:10} state: {state} ({bytes} bytes a parameter){loss}{twice}", "")?;
    writeln!(out, "  {:10} {} ({})\n", "", info.paper, info.year)
}
