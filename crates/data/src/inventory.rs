//! What is behind `taper data list|fetch|check|pictures`.
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::search::{find, find_in};
use super::{Data, DataError, DataRegistry, Dataset, Depth, Loaded, Provenance, Search, hub, photo};

/// Prints every data set: what it is, where it would be read from, its options. Never touches the network.
pub fn list(
    registry: &DataRegistry,
    search: &Search,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), DataError> {
    let search = Search { offline: true, ..search.clone() };
    for set in registry.list() {
        let description = set.describe();
        let place = match set.files() {
            Some(spec) => find(spec, &search, None).ok().map(|found| found.place),
            None => Some("generated".to_string()).filter(|_| set.paths().is_empty()),
        };
        if json {
            let hub = set.files().map(|spec| json!({"repo": spec.hub.id, "revision": spec.hub.revision}));
            let (summary, options, licence) = (description.summary, description.options, set.licence());
            line(
                out,
                &json!({
                    "name": set.name(),
                    "summary": summary,
                    "licence": licence,
                    "place": place,
                    "hub": hub,
                    "options": options
                }),
            )?;
            continue;
        }
        let place = match (place, set.files()) {
            (Some(place), _) => place,
            (None, Some(spec)) => {
                let program = taper_files::program();
                format!("not here; `{program} data fetch {}` gets it from {}", spec.name, spec.hub.id)
            }
            (None, None) => "your files".into(),
        };
        print(out, &format!("{:<17} {}\n{:17} {place}\n", set.name(), description.summary, ""))?;
        for option in description.options {
            print(out, &format!("{:17}   {}: {}  # {}\n", "", option.name, option.default, option.doc))?;
        }
    }
    Ok(())
}

/// Downloads a data set into the cache, unless it is there intact, and proves it. `revision` is the hub's; the pinned
/// one without it.
pub fn fetch(
    registry: &DataRegistry,
    name: &str,
    revision: Option<&str>,
    search: &Search,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), DataError> {
    let set = registry.get(name)?;
    let Some(spec) = set.files() else {
        let message = "there is nothing to fetch: it is generated, or read from your own files".into();
        return Err(DataError::Option { dataset: name.into(), key: None, message });
    };
    // Only the cache: what another directory holds is not what was asked for.
    let cached = Search { dir: None, env_dir: None, fresh: true, ..search.clone() };
    if let Some(root) = search.downloads().filter(|_| !search.offline) {
        hub::fetch(spec, &root, &search.hub, revision)?;
    }
    report(&set.load(&Value::Null, &cached)?.provenance, json, out)
}

/// Reads and proves data sets where they are, with no memory of earlier proofs: one by `name`, or all that are found.
/// `dir` restricts the search to one directory. `false` when one is not intact.
pub fn check(
    registry: &DataRegistry,
    name: Option<&str>,
    dir: Option<PathBuf>,
    search: &Search,
    json: bool,
    out: &mut dyn Write,
) -> Result<bool, DataError> {
    let search = Search { offline: true, fresh: true, ..search.clone() };
    let search = match dir {
        Some(dir) => Search { dir: Some(dir), env_dir: None, ..search },
        None => search,
    };
    if let Some(name) = name {
        let set = registry.get(name)?;
        let loaded = look(set.as_ref(), &search).unwrap_or_else(|| set.load(&Value::Null, &search))?;
        report(&loaded.provenance, json, out)?;
        return Ok(true);
    }
    let mut intact = true;
    for set in registry.list() {
        match look(set.as_ref(), &search) {
            None => {}
            Some(Ok(loaded)) => report(&loaded.provenance, json, out)?,
            Some(Err(DataError::Missing { .. })) if json => {
                line(out, &json!({"name": set.name(), "found": false}))?
            }
            Some(Err(DataError::Missing { .. })) => print(out, &format!("{:<14} not found\n", set.name()))?,
            Some(Err(error)) => {
                intact = false;
                let message = error.to_string();
                if json {
                    line(
                        out,
                        &json!({"name": set.name(), "found": true, "intact": false, "error": message}),
                    )?;
                } else {
                    print(out, &format!("{:<14} NOT INTACT: {message}\n", set.name()))?;
                }
            }
        }
    }
    Ok(intact)
}

/// Reads and proves one data set with options of its own, with no memory of earlier proofs and without the network.
pub fn check_one(
    registry: &DataRegistry,
    name: &str,
    options: &Value,
    search: &Search,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), DataError> {
    let search = Search { offline: true, fresh: true, ..search.clone() };
    report(&registry.get(name)?.load(options, &search)?.provenance, json, out)
}

/// Writes the first `count` test images of a data set as PNG files into a folder, named by their place and their class, and
/// prints their paths. A file that is there already and is another is an error.
pub fn pictures(
    registry: &DataRegistry,
    name: &str,
    count: usize,
    folder: &Path,
    search: &Search,
    out: &mut dyn Write,
) -> Result<(), DataError> {
    let Data::Images { test, .. } = registry.get(name)?.load(&Value::Null, search)?.data else {
        let message = "expected a data set of images, found text".into();
        return Err(DataError::Option { dataset: name.into(), key: None, message });
    };
    if test.depth != Depth::Byte {
        let message = "expected images of bytes, found floats: a picture cannot hold them".into();
        return Err(DataError::Option { dataset: name.into(), key: None, message });
    }
    for i in 0..count.min(test.len()) {
        let path = folder.join(format!("{i:05}-class-{}.png", test.label(i)));
        let bytes = photo::png(test.height, test.width, test.channels, test.image(i))
            .map_err(|message| DataError::format(&path, message))?;
        taper_files::create(&path, &bytes)?;
        print(out, &format!("{}\n", path.display()))?;
    }
    Ok(())
}

/// Loads a set that lives in files; `None` for any other. When the search names a directory, only that one counts, and
/// the set compiled in does not stand for a missing one.
fn look(set: &dyn Dataset, search: &Search) -> Option<Result<Loaded, DataError>> {
    let spec = set.files()?;
    if let Some(dir) = &search.dir
        && let Ok(Err(lacks)) = find_in(spec, dir)
    {
        let (name, looked) = (spec.name.into(), vec![format!("{}: {lacks}", dir.display())]);
        return Some(Err(DataError::Missing { name, looked, supply: String::new() }));
    }
    Some(set.load(&Value::Null, search))
}

fn report(provenance: &Provenance, json: bool, out: &mut dyn Write) -> Result<(), DataError> {
    if json {
        let mut value = serde_json::to_value(provenance).unwrap_or_default();
        value["found"] = json!(true);
        value["intact"] = json!(provenance.verified);
        return line(out, &value);
    }
    let kind = match (&provenance.subset, provenance.verified) {
        (Some(subset), _) => format!("a subset: {subset}"),
        (None, true) => "intact".into(),
        (None, false) => "not verified".into(),
    };
    print(out, &format!("{:<14} {kind}; from {}\n", provenance.name, provenance.source))?;
    for content in &provenance.content {
        print(
            out,
            &format!("  {:<6} {:>7} samples  content {}\n", content.split, content.samples, content.sha256),
        )?;
    }
    if !provenance.classes.is_empty() {
        print(out, &format!("  classes {}\n", provenance.classes.join(", ")))?;
    }
    for file in &provenance.files {
        print(out, &format!("  sha256 {}  {}\n", file.sha256, file.path))?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, value: &Value) -> Result<(), DataError> {
    print(out, &format!("{value}\n"))
}

fn print(out: &mut dyn Write, text: &str) -> Result<(), DataError> {
    out.write_all(text.as_bytes()).map_err(|e| DataError::io("output", e))
}
