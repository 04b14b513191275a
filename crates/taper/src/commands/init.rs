use super::recipes::{MODELINE, SCHEMA, there_already, write_new, write_schema};
use super::{Failure, print_path};
use serde_json::{Map, Value, json};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use taper_data::Kind;
use taper_train::recipe::{self, Sections};
use taper_train::{Recipe, Registries};

/// Writes a recipe of your own
///
/// Asks for data, model and optimizer on a terminal; elsewhere, or where an option says it, it does not ask. Beside the recipe it
/// puts the schema by which editors complete and check it.
///
///   cargo xtask init
///   cargo xtask init mine.yaml --dataset mnist --model mlp --optimizer adamw
///   cargo xtask init mine.yaml --dataset text --set data.train=a.txt --set data.valid=b.txt --set data.test=c.txt
#[derive(clap::Args)]
#[command(verbatim_doc_comment)]
pub struct Args {
    /// The file to write
    #[arg(value_name = "FILE", default_value = "recipe.yaml")]
    file: PathBuf,
    /// The data set
    #[arg(long, value_name = "NAME")]
    dataset: Option<String>,
    /// The network
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// The optimizer
    #[arg(long, value_name = "NAME")]
    optimizer: Option<String>,
    /// More settings
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    if args.file.exists() {
        return Err(there_already(&args.file));
    }
    let asks = std::io::stdin().is_terminal();
    let choose = |given: &Option<String>, what: &str, all: &[(String, String)], default: &str| match given {
        Some(name) => Ok(name.clone()),
        None if asks => ask(what, all, default),
        None => Ok(default.to_owned()),
    };
    let sets: Vec<_> =
        registries.data.list().map(|set| (set.name().to_owned(), set.describe().summary)).collect();
    let data = choose(&args.dataset, "data set", &sets, "mnist")?;
    let kind = registries.data_kind(&data);
    let models: Vec<_> =
        registries.models.list().map(|model| (model.name.to_owned(), model.about.to_owned())).collect();
    let usual = if kind == Some(Kind::Text) { "lstm" } else { "mlp" };
    let model = choose(&args.model, "model", &models, usual)?;
    let entries = registries.optimizers.list("*").map_err(|e| Failure::other(format!("error: {e}")))?;
    let optimizers: Vec<_> =
        entries.map(|one| (one.info.name.to_owned(), one.info.about.to_owned())).collect();
    let optimizer = choose(&args.optimizer, "optimizer", &optimizers, "decgd")?;
    let text = text(&args.file, [&data, &model, &optimizer], kind, &args.set, registries)?;
    write_new(&args.file, &text)?;
    write_schema(args.file.parent().unwrap_or(Path::new("")), registries)?;
    print_path(&args.file)?;
    let program = taper_files::program();
    eprintln!("next: {program} plan {0}, then {program} train {0}", args.file.display());
    Ok(())
}

/// Asks on the terminal until the answer is one of `all`.
fn ask(what: &str, all: &[(String, String)], default: &str) -> Result<String, Failure> {
    let width = all.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    all.iter().for_each(|(name, about)| eprintln!("  {name:width$}  {about}"));
    loop {
        let mut err = std::io::stderr();
        write!(err, "{what} [{default}]: ")?;
        err.flush()?;
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Err(Failure::usage(format!("error: no {what} was chosen")));
        }
        let given = line.trim();
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        match given {
            "" => return Ok(default.to_owned()),
            given if names.contains(&given) => return Ok(given.to_owned()),
            given => {
                let near = recipe::nearest(given, &names).map(|near| format!("; did you mean `{near}`?"));
                eprintln!("no {what} is called `{given}`{}", near.unwrap_or_default());
            }
        }
    }
}

/// The recipe as a file has it, checked.
fn text(
    file: &Path,
    [data, model, optimizer]: [&String; 3],
    kind: Option<Kind>,
    set: &[String],
    registries: &Registries,
) -> Result<String, Failure> {
    let mut settings = json!({
        "data": { "name": data, "batch_size": 128 },
        "model": { "name": model },
        "optimizer": { "name": optimizer },
        "schedule": { "kind": "cosine", "per": "step" },
        "train": { "epochs": 5 },
    });
    if let Ok(entry) = registries.optimizers.get(optimizer)
        && let Some(lr) = entry.defaults.get("lr")
    {
        settings["optimizer"]["lr"] = lr.clone();
    }
    match kind {
        Some(Kind::Text) => {
            settings["data"]["batch_size"] = json!(20);
            settings["data"]["eval_batch_size"] = json!(10);
            // A network that sees a number of tokens reads windows of as many.
            let keys = registries.check_model(model, &Map::new()).unwrap_or_default();
            match keys.get("block").and_then(Value::as_u64) {
                Some(block) => settings["train"]["windows"] = json!({ "length": block }),
                None => settings["train"]["bptt"] = json!({ "length": 35 }),
            }
        }
        // What chooses is not what is reported.
        _ => {
            settings["data"]["val"] = json!(0.1);
            settings["train"]["select"] = json!("val");
        }
    }
    // With the settings of the command line on top, as they would be; what is wrong with them is said as `plan` says it.
    let label = file.display().to_string();
    let recipe = Recipe::parse(&label, &settings.to_string(), set, registries)?;
    let files = recipe::files(Some(data), registries);
    for path in set.iter().filter_map(|one| Some(one.split_once('=')?.0)) {
        match recipe.value(path) {
            Some(value) if path.split_once('.').is_some_and(|path| files.contains(&path)) => {
                insert(&mut settings, path, from_the_recipe(file, value.clone()));
            }
            Some(value) => insert(&mut settings, path, value.clone()),
            None if ["sweep", "cluster"].contains(&path.split('.').next().unwrap_or_default()) => {
                let message = format!("error: {path}: init writes one run; add this to the file");
                return Err(Failure::usage(message));
            }
            // A default that was spelled out needs no place.
            None => {}
        }
    }
    let program = taper_files::program();
    let mut out = format!(
        "{MODELINE}{SCHEMA}\n# {model} on {data} with {optimizer}. What the keys mean: `{program} keys`.\n\
         #   {program} plan {label}\n#   {program} train {label}\n"
    );
    for (section, keys) in settings.as_object().into_iter().flatten() {
        out += &format!("{section}: {}\n", recipe::on_one_line(keys));
    }
    Ok(out)
}

/// Paths of the command line as the file has them: they are then from the file.
fn from_the_recipe(file: &Path, mut value: Value) -> Value {
    let folder = file.parent().unwrap_or(Path::new(""));
    if folder.as_os_str().is_empty() {
        return value;
    }
    let whole = |text: &mut String| {
        if let Ok(path) = Path::new(&*text).canonicalize() {
            *text = path.display().to_string();
        }
    };
    match &mut value {
        Value::String(text) => whole(text),
        Value::Array(items) => items.iter_mut().for_each(|item| {
            if let Value::String(text) = item {
                whole(text);
            }
        }),
        _ => {}
    }
    value
}

fn insert(settings: &mut Value, path: &str, value: Value) {
    let mut place = settings;
    for key in path.split('.') {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        place = &mut place[key];
    }
    *place = value;
}
