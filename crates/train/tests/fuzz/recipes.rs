use std::path::{Path, PathBuf};
use taper_train::{Recipe, Registries};

fn collect(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { collect(&path, out) } else { out.push(path) }
    }
}

/// The recipes and layers of the repository.
fn texts() -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut paths = Vec::new();
    collect(&root.join("recipes"), &mut paths);
    collect(&root.join("configs"), &mut paths);
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// The file, with the first lines of it as `--set` and as variables too.
#[test]
fn fuzz_recipes() {
    let registries = Registries::default();
    let folder = crate::scratch();
    let path = folder.path().join("recipe.yaml");
    crate::fuzz("recipes", &texts(), |bytes| {
        std::fs::write(&path, bytes).unwrap();
        let text = String::from_utf8_lossy(bytes);
        let set: Vec<String> = text.lines().take(2).map(|line| line.replacen(": ", "=", 1)).collect();
        let variables: Vec<(String, String)> = text
            .lines()
            .skip(2)
            .take(2)
            .filter_map(|line| line.split_once(": "))
            .map(|(key, value)| (format!("TAPER__{}", key.trim().to_uppercase()), value.to_owned()))
            .collect();
        let good = "data: {name: mnist}\nmodel: {name: mlp}\noptimizer: {name: decgd}\ntrain: {epochs: 1}";
        let results = [
            Recipe::load(&path, &[], &registries),
            Recipe::parse("text", &text, &set, &registries),
            Recipe::parse_with_env("good", good, &variables, &set, &registries),
        ];
        for result in results {
            match result {
                Ok(recipe) => {
                    let run = &recipe.runs()[0];
                    let again = Recipe::parse("again", &run.to_yaml(), &[], &registries);
                    let again = again.unwrap_or_else(|e| panic!("{e}\n{}", run.to_yaml()));
                    assert_eq!(again.id(), run.id(), "{}", run.to_yaml());
                }
                Err(error) => assert!(error.to_string().len() < 20_000),
            }
        }
    });
}
