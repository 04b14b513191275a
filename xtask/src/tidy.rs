//! Dependencies between our crates point one way; this is where it is said which, and where a wrong one fails.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// What each crate may depend on. A crate comes after all that it depends on, so that a circle cannot be written down.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("files", &[]),
    ("random", &[]),
    ("world", &[]),
    ("kernels", &["random"]),
    ("optim", &["kernels"]),
    ("figures", &["random"]),
    ("models", &["kernels", "random"]),
    ("export", &["models"]),
    ("data", &["files", "random"]),
    ("train", &["data", "figures", "files", "models", "optim", "random", "world"]),
    ("report", &["figures", "files", "train"]),
    ("watch", &["figures", "files", "report", "train"]),
    (
        "taper",
        &[
            "data", "export", "figures", "files", "kernels", "models", "optim", "report", "train", "watch",
            "world",
        ],
    ),
];

/// Crates that work without tensors, unless a feature says otherwise.
const WITHOUT_CANDLE: &[&str] =
    &["files", "random", "kernels", "world", "figures", "data", "report", "watch"];

/// The lines of a manifest's own dependencies, those for tests included: tests keep to the rooms as well.
fn dependencies(krate: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates").join(krate).join("Cargo.toml");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut section = "";
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line;
        } else if section.ends_with("dependencies]") && line.contains('=') && !line.starts_with('#') {
            found.push(line.to_owned());
        }
    }
    found
}

/// The settings of release builds in a manifest.
fn release_profile(manifest: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(manifest);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let after = text.lines().skip_while(|line| *line != "[profile.release]").skip(1);
    after
        .take_while(|line| !line.starts_with('['))
        .filter(|line| line.contains('='))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_crate_outside_is_built_as_the_workspace_is() {
    let ours = release_profile("Cargo.toml");
    assert!(!ours.is_empty());
    // Another setting, and candle is compiled once more for it.
    assert_eq!(release_profile("crates/optim/tests/outside/Cargo.toml"), ours);
}

fn named(line: &str) -> &str {
    line.split(['.', ' ', '=']).next().unwrap_or_default()
}

#[test]
fn every_crate_has_its_place() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let there: BTreeSet<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    let known: BTreeSet<String> = MAY_KNOW.iter().map(|(krate, _)| (*krate).to_owned()).collect();
    assert_eq!(there, known, "a new crate says here what it may know");
    for (i, (krate, others)) in MAY_KNOW.iter().enumerate() {
        for other in *others {
            assert!(MAY_KNOW[..i].iter().any(|(before, _)| before == other), "{krate} → {other} is a circle");
        }
    }
}

#[test]
fn dependencies_point_one_way() {
    for (krate, may) in MAY_KNOW {
        for line in dependencies(krate) {
            if let Some(other) = named(&line).strip_prefix("taper-") {
                assert!(may.contains(&other), "crates/{krate} must not know taper-{other}: {line}");
            }
        }
    }
}

#[test]
fn crates_without_tensors_have_none() {
    for krate in WITHOUT_CANDLE {
        for line in dependencies(krate) {
            let optional = line.contains("optional = true");
            assert!(
                optional || !named(&line).starts_with("candle"),
                "crates/{krate} does without candle: {line}"
            );
        }
    }
}
