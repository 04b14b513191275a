use super::{Failure, schema};
use std::io::Write;
use std::path::{Path, PathBuf};
use taper_train::{Registries, keys, recipe};

/// Lists the recipes inside this program, and copies one
///
/// They can be used where they are: taper:recipes/quickstart.yaml names one wherever a recipe is named, and in `extends`.
///
///   cargo xtask recipes
///   cargo xtask recipes 'cookbook/*'
///   cargo xtask recipes copy cookbook/ema
///   cargo xtask train taper:recipes/quickstart.yaml
#[derive(clap::Args)]
#[command(verbatim_doc_comment, args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    what: Option<What>,
    /// Which recipes; all without one
    #[arg(value_name = "GLOB")]
    pattern: Option<String>,
    /// One JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(clap::Subcommand)]
enum What {
    /// Writes a recipe to a folder, with the schema for editors beside it; what it extends stays inside the program
    Copy {
        /// Its name: cookbook/ema
        name: String,
        /// Where to
        #[arg(value_name = "DIR", default_value = ".")]
        folder: PathBuf,
    },
}

pub fn run(args: &Args, registries: &Registries) -> Result<(), Failure> {
    match &args.what {
        Some(What::Copy { name, folder }) => copy(name, folder, registries),
        None => list(args),
    }
}

/// The recipes by name, with their text.
fn all() -> impl Iterator<Item = (&'static str, &'static str)> {
    let recipes = recipe::inside().filter_map(|(path, text)| {
        let name = path.strip_prefix("recipes/")?.strip_suffix(".yaml")?;
        Some((name, text))
    });
    recipes.filter(|(name, _)| *name != "published")
}

fn list(args: &Args) -> Result<(), Failure> {
    let pattern = args.pattern.as_deref().unwrap_or("*");
    let glob = keys::glob(pattern).map_err(|e| Failure::usage(format!("error: {e}")))?;
    let found: Vec<_> = all().filter(|(name, _)| glob.is_match(name, 0)).collect();
    if found.is_empty() {
        return Err(absent(pattern, "no recipe inside this program matches"));
    }
    let width = found.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let mut out = std::io::stdout().lock();
    for (name, text) in found {
        let about =
            text.lines().find_map(|line| line.strip_prefix("# ").filter(|line| !line.contains("$schema=")));
        let about = about.unwrap_or_default();
        match args.json {
            true => writeln!(out, "{}", serde_json::json!({ "name": name, "about": about }))?,
            false => writeln!(out, "{}", format!("{name:width$}  {about}").trim_end())?,
        }
    }
    Ok(())
}

fn absent(given: &str, why: &str) -> Failure {
    let names: Vec<&str> = all().map(|(name, _)| name).collect();
    let near = recipe::nearest(given, &names).map(|near| format!("; did you mean `{near}`?"));
    let none = if names.is_empty() { ": it was built outside its repository" } else { "" };
    Failure::usage(format!("error: {why} `{given}`{none}{}", near.unwrap_or_default()))
}

fn copy(name: &str, folder: &Path, registries: &Registries) -> Result<(), Failure> {
    let plain = name.trim_start_matches("taper:").trim_start_matches("recipes/").trim_end_matches(".yaml");
    let Some((name, text)) = all().find(|(known, _)| *known == plain) else {
        return Err(absent(plain, "no recipe inside this program is called"));
    };
    let file = format!("{}.yaml", name.rsplit('/').next().unwrap_or(name));
    let folder = folder.strip_prefix(".").unwrap_or(folder);
    let path = folder.join(&file);
    let inside = format!("recipes/{name}.yaml");
    let text = moved(text, Path::new(&inside)).replace(&inside, &path.display().to_string());
    // Files of its own are in a folder of its name.
    let (beside, own) =
        (inside.trim_end_matches(".yaml"), inside.rsplit_once('/').map_or("", |(own, _)| own));
    let files = recipe::inside().filter_map(|(file, text)| {
        let below = file.strip_prefix(beside).is_some_and(|rest| rest.starts_with('/'));
        let name = file.strip_prefix(own)?.trim_start_matches('/');
        below.then(|| (folder.join(name), text.to_owned()))
    });
    let files: Vec<(PathBuf, String)> = std::iter::once((path.clone(), text)).chain(files).collect();
    if let Some((taken, _)) = files.iter().find(|(path, _)| path.exists()) {
        return Err(there_already(taken));
    }
    files.iter().try_for_each(|(path, text)| write_new(path, text))?;
    write_schema(folder, registries)?;
    super::print_path(&path)?;
    Ok(())
}

/// A recipe's text as it is elsewhere: what it extends by a relative path is inside the program, and its schema beside it.
fn moved(text: &str, path: &Path) -> String {
    let mut extends = false;
    let mut line = |line: &str| {
        extends = line.starts_with("extends:") || (extends && line.starts_with([' ', '-']));
        match line {
            line if line.starts_with(MODELINE) => format!("{MODELINE}{SCHEMA}\n"),
            line if line.starts_with('#') => {
                line.replace("cargo xtask ", &format!("{} ", taper_files::program())) + "\n"
            }
            line if extends => recipe::named_inside(line, path) + "\n",
            line => line.to_owned() + "\n",
        }
    };
    text.lines().map(&mut line).collect()
}

/// The line by which an editor knows the schema of a file.
pub(super) const MODELINE: &str = "# yaml-language-server: $schema=";
/// What the schema is called beside a recipe of the user's own.
pub(super) const SCHEMA: &str = "taper.schema.json";

pub(super) fn there_already(path: &Path) -> Failure {
    Failure::usage(format!("error: {} is there already: move it, or say another place", path.display()))
}

/// Writes a file where there is none.
pub(super) fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |e: std::io::Error| Failure::usage(format!("error: {}: {e}", path.display()));
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let mut file = std::fs::File::create_new(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => there_already(path),
        _ => failed(e),
    })?;
    file.write_all(text.as_bytes()).map_err(failed)
}

/// The schema beside a recipe, as this program has it.
pub(super) fn write_schema(folder: &Path, registries: &Registries) -> Result<(), Failure> {
    let path = folder.join(SCHEMA);
    std::fs::write(&path, schema::text(registries))
        .map_err(|e| Failure::other(format!("error: {}: {e}", path.display())))
}
