use super::trained::Which;
use super::{Common, Failure, print_path};
use clap::ValueEnum;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use taper_export::{Network, Normalize, onnx, pytorch};
use taper_train::Registries;
use taper_train::recipe::Task;
use taper_train::trained::Trained;

/// Writes a run's network for other programs
///
/// safetensors: the weights, with recipe, metrics and the data's licence in the header. pytorch: a module file to read and import,
/// with those weights beside it. onnx: a graph that takes normalised images, or tokens and states. The weights are those that
/// evaluations use, unless --as-trained. The paths are printed.
///
///   cargo xtask export runs/mnist-mlp-decgd-0123456789ab --format onnx --out mnist.onnx
///   cargo xtask export runs/mnist-mlp-decgd-0123456789ab --format pytorch --out mnist.py
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    which: Which,
    /// What to write
    #[arg(long, value_enum)]
    format: Format,
    /// The file to write [default: RUN/export/step-<n>.<ending>]; one that is there already is not replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// The version of ONNX's operators, 13 to 21 [default: 17]
    #[arg(long, value_name = "N")]
    opset: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Safetensors,
    Pytorch,
    Onnx,
}

impl Format {
    /// The ending of the file that a user names.
    fn ending(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Pytorch => "py",
            Self::Onnx => "onnx",
        }
    }
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let refuse = |message: String| Err(Failure::usage(format!("error: {message}")));
    let ending = args.format.ending();
    if let Some(out) = args.out.as_deref().filter(|out| out.extension().is_none_or(|found| found != ending)) {
        return refuse(format!("--out: {}: expected a name that ends in .{ending}", out.display()));
    }
    let opset = args.opset.unwrap_or(onnx::DEFAULT_OPSET);
    if args.opset.is_some() && args.format != Format::Onnx {
        return refuse("--opset: only --format onnx has one".into());
    }
    if !onnx::OPSETS.contains(&opset) {
        let (least, most) = (onnx::OPSETS.start(), onnx::OPSETS.end());
        return refuse(format!("--opset: expected {least} to {most}, found {opset}"));
    }
    let trained = args.which.open(common, registries)?;
    let default = || trained.run().join("export").join(format!("step-{}.{ending}", trained.step()));
    let out = args.out.clone().unwrap_or_else(default);
    let files = files(args.format, opset, &out, &trained, registries)?;
    for (path, bytes) in &files {
        // All places are looked at before anything is written.
        taper_files::is_free(path, bytes).map_err(|e| Failure::usage(format!("error: {e}")))?;
    }
    for (path, bytes) in &files {
        taper_files::create(path, bytes).map_err(|e| Failure::other(format!("error: {e}")))?;
    }
    if !common.quiet {
        eprintln!("{} after step {}: {}", trained.recipe().name, trained.step(), trained.weights());
        trained.notes().iter().for_each(|note| eprintln!("note: {note}"));
    }
    Ok(files.iter().try_for_each(|(path, _)| print_path(path))?)
}

/// The files of a form, with their places.
fn files(
    format: Format,
    opset: u16,
    out: &Path,
    trained: &Trained,
    registries: &Registries,
) -> Result<Vec<(PathBuf, Vec<u8>)>, Failure> {
    let failure = |e: taper_export::Error| Failure::usage(format!("error: {}: {e}", trained.run().display()));
    let metadata = metadata(trained, registries);
    let tensors = || trained.tensors().into_iter().collect();
    let weights = || taper_export::weights(&tensors(), &metadata).map_err(failure);
    Ok(match format {
        Format::Safetensors => vec![(out.to_path_buf(), weights()?)],
        Format::Onnx => {
            let network = network(format, trained, registries)?;
            vec![(out.to_path_buf(), onnx::onnx(&network, opset, &metadata).map_err(failure)?)]
        }
        Format::Pytorch => {
            let network = network(format, trained, registries)?;
            let short = ["name", "id", "step", "weights"];
            let about: Vec<_> = metadata.iter().filter(|(key, _)| short.contains(&&**key)).cloned().collect();
            let module = pytorch::pytorch(&network, &about).map_err(failure)?;
            vec![(out.to_path_buf(), module.into_bytes()), (out.with_extension("safetensors"), weights()?)]
        }
    })
}

/// The network, if it is one whose make-up is known.
fn network(format: Format, trained: &Trained, registries: &Registries) -> Result<Network, Failure> {
    let Task::Network { model, .. } = trained.recipe().task() else {
        return Err(Failure::usage("error: a numeric function has no network"));
    };
    let entry = registries.models.get(&model.name);
    let known = entry.and_then(|entry| entry.architecture(&Value::Object(model.config.clone())));
    let Some(architecture) = known.map_err(|e| Failure::usage(format!("error: {e}")))? else {
        let form = format.ending();
        let message = format!(
            "error: only the code of model `{}` knows what it is made of, so that no .{form} can be written: --format safetensors has its weights",
            model.name
        );
        return Err(Failure::usage(message));
    };
    let normalize = trained.normalize();
    Ok(Network {
        architecture,
        task: trained.task(),
        normalize: normalize.map(|n| Normalize {
            scale: scale(trained),
            mean: n.mean.clone(),
            std: n.std.clone(),
        }),
        tensors: trained.tensors().into_iter().collect(),
    })
}

/// What numbers of images are divided by before they are normalised.
fn scale(trained: &Trained) -> f32 {
    if trained.takes_pictures() { 255.0 } else { 1.0 }
}

/// What a file says of itself.
fn metadata(trained: &Trained, registries: &Registries) -> Vec<(String, String)> {
    let (recipe, data) = (trained.recipe(), trained.data());
    let licence = registries.data.get(&data.name).ok().and_then(|set| set.licence());
    let mut about = vec![
        ("format", "pt".to_owned()),
        ("taper", env!("CARGO_PKG_VERSION").to_owned()),
        ("name", recipe.name.clone()),
        ("id", recipe.id().to_owned()),
        ("step", trained.step().to_string()),
        ("weights", trained.weights().to_string()),
        ("recipe", recipe.resolved().to_string()),
        ("metrics", json!(trained.measured()).to_string()),
        // Not where it was found: that is nobody's business but this machine's.
        ("data", json!({"name": data.name, "content": data.content, "subset": data.subset}).to_string()),
        ("data_licence", licence.unwrap_or("not known to Taper").to_owned()),
    ];
    if let Some(normalize) = trained.normalize() {
        let (mean, std) = (&normalize.mean, &normalize.std);
        about.push(("normalize", json!({"scale": scale(trained), "mean": mean, "std": std}).to_string()));
    }
    if !trained.classes().is_empty() {
        about.push(("classes", json!(trained.classes()).to_string()));
    }
    if let Some(vocabulary) = trained.vocabulary() {
        about.push(("vocabulary", json!(vocabulary).to_string()));
        about.push(("unit", json!(trained.unit()).as_str().unwrap_or_default().to_owned()));
    }
    about.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
