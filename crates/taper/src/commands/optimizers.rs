use super::Failure;
use serde_json::json;
use std::io::Write;
use taper_train::Registries;

/// Lists the optimizers: what they compute, their hyperparameters with defaults, their state
///
///   cargo xtask optimizers
///   cargo xtask optimizers 'ada*'
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Names to list; `*` stands for any characters
    #[arg(default_value = "*", value_name = "GLOB")]
    glob: String,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    let registry = &registries.optimizers;
    let entries: Vec<_> =
        registry.list(&args.glob).map_err(|e| Failure::usage(format!("error: {e}")))?.collect();
    if entries.is_empty() {
        let message = registry.get(&args.glob).err().map(|e| e.to_string()).unwrap_or_default();
        return Err(Failure::usage(format!("error: {message}")));
    }
    let mut out = std::io::stdout().lock();
    for entry in entries {
        let state = entry.buffers(&Default::default()).unwrap_or_default();
        let info = entry.info;
        if args.json {
            let line = json!({
                "name": info.name, "about": info.about, "paper": info.paper, "year": info.year,
                "formula": info.formula, "needs_loss": entry.needs_loss, "state": state,
                "state_bytes": entry.state_bytes(), "aliases": entry.aliases, "defaults": entry.defaults,
            });
            writeln!(out, "{line}")?;
            continue;
        }
        let defaults: Vec<_> = entry.defaults.iter().map(|(key, value)| format!("{key}: {value}")).collect();
        let state = if state.is_empty() { "none".to_owned() } else { state.join(", ") };
        let bytes = entry.state_bytes();
        let loss = if entry.needs_loss { ", needs the loss" } else { "" };
        writeln!(out, "{:<10} {}", info.name, info.about)?;
        writeln!(out, "{:10} {}", "", info.formula)?;
        writeln!(out, "{:10} {{{}}}", "", defaults.join(", "))?;
        writeln!(out, "{:10} state: {state} ({bytes} bytes a parameter){loss}", "")?;
        writeln!(out, "{:10} {} ({})\n", "", info.paper, info.year)?;
    }
    Ok(())
}
