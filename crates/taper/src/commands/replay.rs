use super::Failure;
use candle_core::DType;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use taper_models::replay::{self as models, Limits};
use taper_optim::replay::{Options, Replayed, replay};
use taper_train::Registries;
use taper_train::device::open;
use taper_train::recipe::Device;

/// Replays another implementation's record and prints how far ours is from it
///
/// A record of a network is held to the limits of its kind, which are printed; beyond them the exit code is 1.
///
///   cargo xtask replay crates/optim/tests/golden/*.safetensors
///   cargo xtask replay crates/optim/tests/golden/modern/*.safetensors --dtype f32
///   cargo xtask replay record.safetensors --optimizer adam --set eps=1e-6 --dtype f32
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// Records
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Another optimizer than the recorded one
    #[arg(long, value_name = "NAME")]
    optimizer: Option<String>,
    /// Another hyperparameter
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The precision to compute in [default: f64 for optimizers, f32 for models]
    #[arg(long, value_enum)]
    dtype: Option<Precision>,
    /// Where to compute: cpu, cuda, cuda:1, metal
    #[arg(long, default_value = "cpu", value_parser = |text: &str| Device::try_from(text.to_owned()))]
    device: Device,
    /// Writes our trajectory of one optimizer record as a safetensors file
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Precision {
    F32,
    F64,
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    let device = open(args.device).map_err(|e| Failure::usage(format!("error: --device: {e}")))?.device;
    let options = Options {
        device: Some(device.clone()),
        optimizer: args.optimizer.clone(),
        overrides: overrides(&args.set)?,
        dtype: args.dtype.map(|d| match d {
            Precision::F32 => DType::F32,
            Precision::F64 => DType::F64,
        }),
    };
    if args.out.is_some() && args.files.len() != 1 {
        return Err(Failure::usage(format!("error: --out takes one record, found {}", args.files.len())));
    }
    let mut out = std::io::stdout().lock();
    let mut beyond = Vec::new();
    for file in &args.files {
        let named = |e: String| Failure::usage(format!("error: {}: {e}", file.display()));
        let bytes = std::fs::read(file).map_err(|e| named(e.to_string()))?;
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let mut held = None;
        let (kind, name, abs, rel, tensor, compared) = if models::is_record(&bytes) {
            let dtype = options.dtype.unwrap_or(DType::F32);
            let r = models::replay_on(&bytes, &options.overrides, dtype, &device)
                .map_err(|e| named(e.to_string()))?;
            let off = |(tensor, off, limit): &(&str, f64, f64)| {
                format!("{stem}: {tensor}: {off:.1e}, at most {limit:.0e}")
            };
            let worst = r.beyond().into_iter().max_by(|a, b| (a.1 / a.2).total_cmp(&(b.1 / b.2)));
            beyond.extend(worst.iter().map(off));
            held = Some((r.limits, worst.is_none()));
            ("model", r.name, r.max_abs_error, r.max_rel_error, r.tensor, None)
        } else {
            let r = replay(&registries.optimizers, &bytes, &options).map_err(|e| named(e.to_string()))?;
            if let Some(path) = &args.out {
                save(path, &r).map_err(|e| Failure::other(format!("error: {}: {e}", path.display())))?;
            }
            ("optimizer", r.name, r.max_abs_error, r.max_rel_error, r.tensor, Some(r.compared))
        };
        if args.json {
            let mut line = json!({
                "file": file, "kind": kind, "name": name,
                "max_abs_error": abs, "max_rel_error": rel, "tensor": tensor,
            });
            if let Some(compared) = compared {
                line["compared"] = json!(compared);
            }
            if let Some((Limits { logits, loss, gradients, states }, within)) = held {
                line["limits"] =
                    json!({"logits": logits, "loss": loss, "gradients": gradients, "states": states});
                line["within"] = json!(within);
            }
            writeln!(out, "{line}")?;
        } else {
            let limits = held.map_or(String::new(), |(Limits { logits, loss, gradients, .. }, within)| {
                let verdict = if within { "within" } else { "BEYOND" };
                format!("  {verdict} logits {logits:.0e}, loss {loss:.0e}, gradients {gradients:.0e} of the largest")
            });
            writeln!(out, "{stem:<32} {name:<10} abs {abs:8.1e}  rel {rel:8.1e}  in {tensor}{limits}")?;
        }
    }
    match beyond.len() {
        0 => Ok(()),
        n => {
            let of = format!("{n} of {} records beyond their limits", args.files.len());
            Err(Failure::other(format!("error: {of}\n  {}", beyond.join("\n  "))))
        }
    }
}

fn overrides(set: &[String]) -> Result<Map<String, Value>, Failure> {
    let parse = |text: &String| {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| Failure::usage(format!("error: --set {text}: expected key=value")))?;
        // What is no JSON is a string: `--set decay=paper`.
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        Ok((key.to_owned(), value))
    };
    set.iter().map(parse).collect()
}

fn save(path: &Path, replayed: &Replayed) -> candle_core::Result<()> {
    let rows = replayed.trajectory.len();
    let flat: Vec<f64> = replayed.trajectory.concat();
    let columns = flat.len() / rows.max(1);
    let tensor = candle_core::Tensor::from_vec(flat, (rows, columns), &candle_core::Device::Cpu)?;
    candle_core::safetensors::save(&std::collections::HashMap::from([("trajectory", tensor)]), path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn replayed(more: &[&str]) -> Result<(), Failure> {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/golden");
        let [good, other] =
            ["gpt_nobias_exact", "vit_avg_p4"].map(|name| golden.join(format!("{name}.safetensors")));
        let files = [good.to_str().unwrap(), other.to_str().unwrap()];
        let line = Line::parse_from(["replay"].into_iter().chain(files).chain(more.iter().copied()));
        run(&line.args, &Registries::default())
    }

    #[test]
    fn a_network_beyond_the_limits_of_its_record_is_a_failure() {
        assert!(replayed(&[]).is_ok() && replayed(&["--dtype", "f64", "--json"]).is_ok());
        let failure = replayed(&["--set", "norm_eps=1e-3"]).err().unwrap();
        assert_eq!(failure.code, 1);
        for part in [
            "error: 2 of 2 records beyond their limits",
            "\n  gpt_nobias_exact: ",
            "\n  vit_avg_p4: ",
            ", at most ",
        ] {
            assert!(failure.message.contains(part), "{}", failure.message);
        }
    }
}
