//! The repository's recipes and layers, compiled in: `taper:recipes/quickstart.yaml` names one wherever a file is named.

use std::path::{Path, PathBuf};

use super::source::tidy;

static FILES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/inside.rs"));

const PREFIX: &str = "taper:";

/// All of them, and text that recipes train on: their paths in the repository and their texts, by path.
pub fn inside() -> impl Iterator<Item = (&'static str, &'static str)> {
    FILES.iter().copied()
}

/// The text of `taper:recipes/…`: `None` for another path, `Some(None)` for one that is not there.
pub(super) fn read(path: &Path) -> Option<Option<&'static str>> {
    let name = tidy(Path::new(path.to_str()?.strip_prefix(PREFIX)?));
    Some(FILES.iter().find(|(known, _)| Path::new(known) == name).map(|(_, text)| *text))
}

/// `name` as a file in `folder` has it, either of which may be inside.
pub(super) fn join(folder: &Path, name: &str) -> PathBuf {
    let inside = |path: &Path| PathBuf::from(format!("{PREFIX}{}", tidy(path).display()));
    match (name.strip_prefix(PREFIX), folder.to_str().and_then(|folder| folder.strip_prefix(PREFIX))) {
        (Some(name), _) => inside(Path::new(name)),
        (_, Some(folder)) if Path::new(name).is_relative() => inside(&Path::new(folder).join(name)),
        _ => tidy(&folder.join(name)),
    }
}

/// The name of a file inside that a path which is not there may have meant.
pub(super) fn meant(path: &Path) -> Option<String> {
    let given = tidy(path);
    given.file_name()?;
    let same = |known: &&str| Path::new(known).ends_with(&given) || given.ends_with(known);
    let found = FILES.iter().map(|(known, _)| *known).find(same)?;
    Some(format!("{PREFIX}{found}"))
}

/// A line of `extends` in the file at `path` inside, with the names that it has for elsewhere.
pub fn named_inside(line: &str, path: &Path) -> String {
    let folder = format!("{PREFIX}{}", path.parent().unwrap_or(Path::new("")).display());
    let mut out = String::new();
    for piece in line.split_inclusive([' ', ',', '[', ']', '"', '\'']) {
        let name = piece.trim_end_matches([' ', ',', '[', ']', '"', '\'']);
        let there = join(Path::new(&folder), name);
        match read(&there).flatten() {
            Some(_) => out += &format!("{}{}", there.display(), &piece[name.len()..]),
            None => out += piece,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copied_line_names_what_stays_inside() {
        let path = Path::new("recipes/mnist/mlp-adam.yaml");
        let moved = |line| named_inside(line, path);
        assert_eq!(moved("extends: ../../configs/mnist-mlp.yaml"), "extends: taper:configs/mnist-mlp.yaml");
        assert_eq!(
            moved("extends: [../../configs/cifar.yaml, 'mlp-sgdm.yaml']"),
            "extends: [taper:configs/cifar.yaml, 'taper:recipes/mnist/mlp-sgdm.yaml']"
        );
        assert_eq!(moved("extends: other.yaml"), "extends: other.yaml");
    }
}
