use super::trained::Which;
use super::{Common, Failure};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};
use taper_data::Shape;
use taper_data::photo::{ENDINGS, Photo};
use taper_train::Registries;
use taper_train::trained::{Sampling, Trained};

/// Names the classes of pictures, or goes on with a text
///
/// Pictures are PNG or JPEG files, or folders of them; those of another size than the network was trained with are resized as the
/// data set `folder` does it. A file that cannot be used is named on standard error, the others are predicted, and the exit code
/// is 2.
///
///   cargo xtask predict runs/mnist-mlp-decgd-0123456789ab digit.png
///   cargo xtask predict runs/mnist-mlp-decgd-0123456789ab digits --top-k 3 --json
///   cargo xtask predict runs/ptb-lstm1-decgd-0123456789ab --prompt "the company said" --tokens 50 --seed 2
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    #[command(flatten)]
    which: Which,
    /// Pictures, or folders of pictures
    #[arg(value_name = "PICTURE", conflicts_with_all = ["prompt", "tokens", "temperature", "seed"])]
    pictures: Vec<PathBuf>,
    /// Classes to name of a picture; of text, the most probable words to draw from [default: 3; of text, all]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// The text to go on from [default: the end of a line]
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Words to add, or characters, bytes or pieces where the network was trained on those
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    tokens: u32,
    /// How freely words are drawn: 1 as the network says, 0 always the most probable
    #[arg(long, value_name = "T", default_value_t = 1.0, allow_negative_numbers = true)]
    temperature: f64,
    /// The same seed gives the same text
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// One JSON object a picture (with the logits), or one for the text
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, common: &Common, registries: &Registries) -> Result<(), Failure> {
    let mut trained = args.which.open(common, registries)?;
    if !common.quiet {
        trained.notes().iter().for_each(|note| eprintln!("note: {note}"));
    }
    match trained.images() {
        Ok(shape) => classify(args, common, &mut trained, shape),
        Err(_) => write(args, &mut trained),
    }
}

/// Goes on with a text.
fn write(args: &Args, trained: &mut Trained) -> Result<(), Failure> {
    if let Some(picture) = args.pictures.first() {
        let message = format!("error: {}: this is a language model: give it a --prompt", picture.display());
        return Err(Failure::usage(message));
    }
    let (prompt, top_k) = (args.prompt.as_deref().unwrap_or_default(), args.top_k.unwrap_or(0));
    let Args { temperature, seed, tokens, .. } = *args;
    let sampling = Sampling { tokens: tokens as usize, temperature, top_k: top_k as usize, seed };
    let text = trained.generate(prompt, &sampling)?;
    let mut out = std::io::stdout();
    match args.json {
        true => {
            // All that the continuation is a function of; no `top_k`: all words were drawn from.
            let told = json!({
                "prompt": prompt, "continuation": text.added, "tokens": tokens, "temperature": temperature, "top_k": args.top_k,
                "seed": seed,
            });
            writeln!(out, "{told}")?;
        }
        false => writeln!(out, "{}", text.whole)?,
    }
    Ok(())
}

/// Names the classes of pictures.
fn classify(args: &Args, common: &Common, trained: &mut Trained, shape: Shape) -> Result<(), Failure> {
    if args.prompt.is_some() {
        return Err(Failure::usage("error: --prompt: this is a network for images: give it pictures"));
    }
    if args.pictures.is_empty() {
        return Err(Failure::usage("error: expected pictures or folders of pictures, found none"));
    }
    let count = args.top_k.map_or(3.min(shape.classes), |k| k as usize);
    if count > shape.classes {
        let message = format!("error: --top-k: expected 1 to the {} classes, found {count}", shape.classes);
        return Err(Failure::usage(message));
    }
    let Shape { height, width, channels, .. } = shape;
    if ![1, 3].contains(&channels) {
        let message = format!("error: the network takes images of {channels} channels: pictures have 1 or 3");
        return Err(Failure::usage(message));
    }
    let (mut files, mut pixels, mut resized, mut refused) = (Vec::new(), Vec::new(), 0, 0);
    for file in list(&args.pictures)? {
        match Photo::read(&file) {
            Ok(photo) => {
                resized += usize::from((photo.height, photo.width) != (height, width));
                pixels.extend(photo.fitted(height, width, channels));
                files.push(file);
            }
            Err(e) => {
                eprintln!("error: {e}");
                refused += 1;
            }
        }
    }
    if resized > 0 && !common.quiet {
        eprintln!("note: {resized} of {} pictures resized to {width}x{height}", files.len());
    }
    let answers = trained.classify(pixels)?;
    let name = |class: usize| trained.classes().get(class);
    let mut out = std::io::stdout().lock();
    for (file, answer) in files.iter().zip(answers) {
        let mut order: Vec<usize> = (0..answer.probabilities.len()).collect();
        // Stable: of equals the first class stands first.
        order.sort_by(|a, b| answer.probabilities[*b].total_cmp(&answer.probabilities[*a]));
        let top = order.iter().take(count).map(|class| (*class, answer.probabilities[*class]));
        match args.json {
            true => {
                let told = |(class, p)| match name(class) {
                    Some(name) => json!({"class": class, "name": name, "probability": p}),
                    None => json!({"class": class, "probability": p}),
                };
                let top: Vec<_> = top.map(told).collect();
                let file = file.display().to_string();
                writeln!(out, "{}", json!({"file": file, "top": top, "logits": answer.logits}))?;
            }
            false => {
                let said = |(class, p)| match name(class) {
                    Some(name) => format!("{name} {:6.2} %", 100.0 * p),
                    None => format!("class {class} {:6.2} %", 100.0 * p),
                };
                let top = top.map(said);
                writeln!(out, "{}  {}", file.display(), top.collect::<Vec<_>>().join("  "))?;
            }
        }
    }
    match refused {
        0 => Ok(()),
        n => Err(Failure::usage(format!("error: {n} of {} pictures could not be used", n + files.len()))),
    }
}

/// The files that are meant: those named, and the pictures in the folders named, by their names.
fn list(named: &[PathBuf]) -> Result<Vec<PathBuf>, Failure> {
    let failure = |path: &Path, e: std::io::Error| Failure::usage(format!("error: {}: {e}", path.display()));
    let mut files = Vec::new();
    for path in named {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let mut inside = Vec::new();
        for entry in std::fs::read_dir(path).map_err(|e| failure(path, e))? {
            let file = entry.map_err(|e| failure(path, e))?.path();
            let ending = file.extension().map(|ending| ending.to_string_lossy().to_lowercase());
            if ending.is_some_and(|ending| ENDINGS.contains(&&*ending)) {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            let endings = ENDINGS.join(", ");
            let message = format!("error: {}: expected pictures ({endings}), found none", path.display());
            return Err(Failure::usage(message));
        }
        inside.sort();
        files.extend(inside);
    }
    Ok(files)
}
