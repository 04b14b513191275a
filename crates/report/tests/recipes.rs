//! The recipes of the repository: each resolves, and says what the paper's protocol says.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use taper_report::reproduce::{Plan, Published, Scale, Target};
use taper_train::Registries;
use taper_train::recipe::{Average, Map, Recipe, SectionError, Sections, Select, Task};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every recipe, by its path under `recipes/`.
fn recipes() -> Vec<String> {
    fn walk(folder: &Path, top: &Path, out: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, top, out);
            } else {
                out.push(path.strip_prefix(top).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    let mut out = Vec::new();
    walk(&root().join("recipes"), &root().join("recipes"), &mut out);
    out.retain(|path| path.ends_with(".yaml") && path != "published.yaml");
    out.sort();
    out
}

/// The names in the golden files: hyperparameters by optimizer, keys by model.
struct Names;

impl Names {
    const OPTIMIZERS: [(&str, &str); 8] = [
        ("decgd", "ams ams_init bound c decay freeze_v momentum previous v_floor weight_decay x0"),
        ("sgd", "dampening momentum nesterov weight_decay"),
        ("sgdm", "dampening momentum nesterov weight_decay"),
        ("adam", "beta1 beta2 eps weight_decay"),
        ("amsgrad", "beta1 beta2 eps weight_decay"),
        ("adabound", "base_lr beta1 beta2 eps final_lr gamma weight_decay"),
        ("adabelief", "amsgrad beta1 beta2 eps fixed_decay rectify weight_decay weight_decouple"),
        ("aegd", "c weight_decay"),
    ];
    const MODELS: [(&str, &str); 9] = [
        ("airbench", "widths"),
        ("gpt", "layers heads emb block dropout"),
        ("mlp", "hidden"),
        ("resnet", "num_blocks widths conv"),
        ("resnet18", "num_blocks widths conv"),
        ("resnet34", ""),
        ("densenet121", ""),
        ("lstm", "layers emb hidden alpha beta dropout freeze_recurrent"),
        ("vit", "layers heads emb patch global_pool"),
    ];

    fn check(table: &[(&str, &str)], name: &str, keys: &Map) -> Result<Map, SectionError> {
        let refuse = |key: &str| SectionError {
            key: Some(key.to_owned()),
            message: format!("unknown `{key}` of {name}"),
            ..Default::default()
        };
        let (_, known) = table.iter().find(|(known, _)| *known == name).ok_or_else(|| refuse("name"))?;
        match keys.keys().find(|key| *key != "lr" && !known.split(' ').any(|known| known == *key)) {
            Some(key) => Err(refuse(key)),
            None => Ok(keys.clone()),
        }
    }
}

impl Sections for Names {
    fn check_optimizer(&self, name: &str, hyper: &Map) -> Result<Map, SectionError> {
        // The paper's by the names of its records, all others by the registry's.
        if !Self::OPTIMIZERS.iter().any(|(known, _)| *known == name) {
            return taper_train::Registries::default().check_optimizer(name, hyper);
        }
        let mut full = Self::check(&Self::OPTIMIZERS, name, hyper)?;
        // Stands for the registry's default.
        full.entry("lr").or_insert(json!(0.01));
        Ok(full)
    }

    fn check_model(&self, name: &str, config: &Map) -> Result<Map, SectionError> {
        Self::check(&Self::MODELS, name, config)
    }
}

fn load(path: &str) -> Recipe {
    Recipe::load(root().join("recipes").join(path), &[], &Names).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn every_recipe_resolves_plans_and_reads_back() {
    let mut names = BTreeMap::new();
    for path in recipes() {
        let recipe = load(&path);
        assert!(recipe.plan().contains(&format!("runs: {}\n", recipe.runs().len())), "{path}");
        for run in recipe.runs() {
            let again = Recipe::parse("again.yaml", &run.to_yaml(), &[], &Names)
                .unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(again.id(), run.id(), "{path}");
        }
        // Two recipes of one name would write into directories that look alike.
        if let Some(other) = names.insert(recipe.name.clone(), path.clone()) {
            panic!("{path} and {other} are both called {}", recipe.name);
        }
    }
}

#[test]
fn every_recipe_begins_with_what_it_is_and_its_own_command() {
    for path in recipes() {
        let text = fs::read_to_string(root().join("recipes").join(&path)).unwrap();
        let header: Vec<&str> = text.lines().take_while(|line| line.starts_with('#')).collect();
        let commands: Vec<&str> =
            header.iter().filter_map(|line| line.strip_prefix("#   cargo xtask ")).collect();
        let verb = if path.contains("sweep") { "sweep" } else { "train" };
        let [plain, overridden] = commands.as_slice() else { panic!("{path}: a command and one with --set") };
        assert_eq!(*plain, format!("{verb} recipes/{path}"));
        let set = overridden
            .strip_prefix(&format!("{verb} recipes/{path} --set "))
            .unwrap_or_else(|| panic!("{path}"));
        let set: Vec<String> = set.split(" --set ").map(|one| one.trim_matches('\'').to_owned()).collect();
        // The example works.
        Recipe::load(root().join("recipes").join(&path), &set, &Names)
            .unwrap_or_else(|error| panic!("{error}"));
        // A list of all there is needs a line for each.
        let is_list = path.ends_with("-optimizers.yaml");
        assert!(text.lines().count() <= 26 || is_list, "{path} is longer than a recipe needs to be");
    }
}

/// Settings of one run as a flat map.
fn flat(recipe: &Recipe) -> BTreeMap<String, String> {
    recipe.settings().into_iter().map(|(path, value, _)| (path, value)).collect()
}

fn expect(path: &str, settings: &[(&str, &str)]) {
    let flat = flat(&load(path));
    for (key, value) in settings {
        assert_eq!(flat.get(*key).map(String::as_str), Some(*value), "{path}: {key}");
    }
}

#[test]
fn the_quickstart_compares_three_optimizers_for_five_epochs() {
    let recipe = load("quickstart.yaml");
    let runs: Vec<(&str, f64)> =
        recipe.runs().iter().map(|run| (run.optimizer.name.as_str(), run.optimizer.lr)).collect();
    assert_eq!(runs, [("decgd", 0.01), ("sgdm", 0.01), ("adam", 0.001)]);
    for run in recipe.runs() {
        assert_eq!((run.seed, run.train.epochs), (1, Some(5)));
        let Task::Network { data, model } = run.task() else { panic!("a network") };
        assert_eq!(
            (data.name.as_str(), data.batch_size, &model.config["hidden"]),
            ("mnist", 128, &json!([100]))
        );
    }
}

#[test]
fn mnist_is_the_papers_figure() {
    for optimizer in ["sgdm", "aegd", "adam", "amsgrad", "adabound", "adabelief", "decgd"] {
        let path = format!("mnist/mlp-{optimizer}.yaml");
        expect(
            &path,
            &[
                ("optimizer.name", optimizer),
                ("data.name", "mnist"),
                ("data.batch_size", "128"),
                ("data.augment.normalize.mean", "[0.1307]"),
                ("data.augment.normalize.std", "[0.3081]"),
                ("model.hidden", "[100]"),
                ("schedule.kind", "constant"),
                ("train.epochs", "100"),
                ("train.select", "test"),
            ],
        );
        assert_eq!(load(&path).optimizer.hyper.get("weight_decay"), None, "no decay on MNIST");
    }
}

#[test]
fn cifar_is_tables_1_and_2() {
    let rates = [
        ("sgdm", "0.1"),
        ("aegd", "0.1"),
        ("adam", "0.001"),
        ("amsgrad", "0.001"),
        ("adabound", "0.001"),
        ("adabelief", "0.001"),
        ("decgd", "0.01"),
    ];
    for set in ["cifar10", "cifar100"] {
        for network in ["resnet34", "densenet121"] {
            for (optimizer, lr) in rates {
                expect(
                    &format!("{set}/{network}-{optimizer}.yaml"),
                    &[
                        ("data.name", set),
                        ("data.batch_size", "128"),
                        ("data.augment.crop_pad", "4"),
                        ("data.augment.flip", "true"),
                        ("data.augment.normalize.mean", "[0.4914, 0.4822, 0.4465]"),
                        ("data.augment.normalize.std", "[0.2023, 0.1994, 0.201]"),
                        ("model.name", network),
                        ("optimizer.name", optimizer),
                        ("optimizer.lr", lr),
                        ("optimizer.weight_decay", "0.0005"),
                        ("optimizer.no_decay", "[]"),
                        ("schedule.kind", "milestones"),
                        ("schedule.at", "[150]"),
                        ("schedule.factor", "0.1"),
                        ("train.epochs", "200"),
                        ("train.select", "test"),
                    ],
                );
            }
            let beta1 = if network == "resnet34" { "0.99" } else { "0.9" };
            expect(&format!("{set}/{network}-amsgrad.yaml"), &[("optimizer.beta1", beta1)]);
            let decgd = [("optimizer.c", "1.0"), ("optimizer.momentum", "0.9"), ("optimizer.decay", "paper")];
            expect(&format!("{set}/{network}-decgd.yaml"), &decgd);
            expect(
                &format!("{set}/{network}-adabelief.yaml"),
                &[("optimizer.eps", "1e-8"), ("optimizer.rectify", "false")],
            );
        }
    }
}

#[test]
fn ptb_is_table_3() {
    // Rates for 1, 2 and 3 layers.
    let rates = [
        ("sgdm", "sgd", ["30.0", "30.0", "30.0"]),
        ("adam", "adam", ["0.001", "0.01", "0.01"]),
        ("adabound", "adabound", ["0.01", "0.01", "0.01"]),
        ("adabelief", "adabelief", ["0.001", "0.01", "0.01"]),
        ("decgd", "decgd", ["0.3", "0.3", "0.3"]),
    ];
    for (column, optimizer, rates) in rates {
        for (layers, lr) in (1..=3).zip(rates) {
            let path = format!("ptb/lstm{layers}-{column}.yaml");
            expect(
                &path,
                &[
                    ("seed", "141"),
                    ("data.batch_size", "20"),
                    ("data.eval_batch_size", "1"),
                    ("model.layers", &layers.to_string()),
                    ("model.emb", "400"),
                    ("model.hidden", "1150"),
                    ("model.freeze_recurrent", "true"),
                    ("model.dropout.weight", "0.5"),
                    ("optimizer.name", optimizer),
                    ("optimizer.lr", lr),
                    ("optimizer.weight_decay", "1.2e-6"),
                    ("schedule.at", "[100, 145]"),
                    ("train.epochs", "200"),
                    ("train.clip_norm", "0.25"),
                    ("train.bptt.length", "70"),
                    ("train.bptt.half", "0.05"),
                    ("train.bptt.std", "5.0"),
                    ("train.bptt.min", "5"),
                    ("train.scale_lr_by_length", "true"),
                    ("train.select", "test"),
                    ("train.metric", "perplexity"),
                ],
            );
            let recipe = load(&path);
            match &recipe.train.average {
                Average::Asgd { window: 5, lambd: 0.0, t0: 0, swap: false, .. } => assert_eq!(column, "sgdm"),
                average => assert_eq!((average, column == "sgdm"), (&Average::None, false)),
            }
        }
    }
    expect("ptb/lstm1-adabelief.yaml", &[("optimizer.eps", "1e-16")]);
    expect("ptb/lstm3-adabelief.yaml", &[("optimizer.eps", "1e-12")]);
}

#[test]
fn the_registries_accept_every_recipe() {
    let registries = Registries::default();
    for path in recipes() {
        let recipe = Recipe::load(root().join("recipes").join(&path), &[], &registries);
        recipe.unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

#[test]
fn the_grids_are_the_papers() {
    let values = |recipe: &Recipe, key: &str| -> BTreeSet<String> {
        recipe.runs().iter().map(|run| flat(run)[key].clone()).collect()
    };
    let set = |values: &[&str]| values.iter().map(|value| (*value).to_owned()).collect::<BTreeSet<_>>();
    for optimizer in ["sgdm", "aegd"] {
        let recipe = load(&format!("sweeps/mnist-{optimizer}.yaml"));
        assert_eq!(values(&recipe, "optimizer.lr"), set(&["1.0", "0.5", "0.3", "0.1", "0.01"]));
        assert_eq!((recipe.runs().len(), recipe.optimizer.name.as_str()), (5, optimizer));
    }
    for optimizer in ["adam", "amsgrad", "adabound", "adabelief"] {
        let recipe = load(&format!("sweeps/mnist-{optimizer}.yaml"));
        assert_eq!(values(&recipe, "optimizer.lr"), set(&["0.1", "0.05", "0.01", "0.005", "0.001"]));
        assert_eq!(values(&recipe, "optimizer.beta1"), set(&["0.9", "0.99"]));
        assert_eq!(values(&recipe, "optimizer.beta2"), set(&["0.99", "0.999"]));
        assert_eq!((recipe.runs().len(), recipe.optimizer.name.as_str()), (20, optimizer));
    }
    let map = load("sweeps/lr-and-c.yaml");
    assert_eq!(map.optimizer.name, "decgd");
    let size = |key| values(&map, key).len();
    assert_eq!(map.runs().len(), size("optimizer.lr") * size("optimizer.c") * size("seed"));
}

#[test]
fn the_c_sweep_is_the_papers_figure() {
    let recipe = load("sweeps/c-robustness.yaml");
    let cs: Vec<f64> = recipe.runs().iter().filter_map(|run| run.optimizer.hyper["c"].as_f64()).collect();
    assert_eq!(cs, [10.0, 1.0, 1e-3, 1e-8]);
    for run in recipe.runs() {
        assert_eq!(flat(run)["model.name"], "resnet18");
        assert_eq!((run.optimizer.lr, run.train.epochs, run.train.select), (0.01, Some(200), Select::Test));
    }
}

#[test]
fn the_numeric_recipes_are_the_papers_figure() {
    for (path, name, n) in
        [("numeric/powell.yaml", "powell", 100), ("numeric/rosenbrock.yaml", "rosenbrock", 1000)]
    {
        let recipe = load(path);
        let runs: Vec<(&str, f64)> =
            recipe.runs().iter().map(|run| (run.optimizer.name.as_str(), run.optimizer.lr)).collect();
        // The second and third are the two readings of x_0; one without a moving v and plain momentum are controls.
        let decgd = ("decgd", 1e-5);
        assert_eq!(runs, [("adam", 1e-3), decgd, decgd, decgd, ("sgdm", 1e-5)]);
        for run in recipe.runs() {
            let Task::Problem(problem) = run.task() else { panic!("a problem") };
            assert_eq!((problem.name.as_str(), &problem.config["n"]), (name, &json!(n)));
            assert_eq!(run.train.steps, Some(10_000));
        }
    }
}

#[test]
fn every_published_cell_has_its_recipe() {
    let text = fs::read_to_string(root().join("recipes/published.yaml")).unwrap();
    let published: Value = serde_saphyr::from_str(&text).unwrap();
    let mut cells = BTreeMap::new();
    for (table, content) in published["tables"].as_object().unwrap() {
        for (row, columns) in content["rows"].as_object().unwrap() {
            for (column, value) in columns.as_object().unwrap() {
                let recipe = load(&format!("{table}/{row}-{column}.yaml"));
                assert_eq!(recipe.name, format!("{table}-{row}-{column}"));
                assert_eq!(recipe.train.select, Select::Test);
                cells.insert((table.as_str(), row.as_str(), column.as_str()), value.as_f64().unwrap());
            }
        }
    }
    assert_eq!(cells.len(), 14 + 14 + 15);
    for margin in published["margins"].as_array().unwrap() {
        let cell = |column: &str| {
            let text = |key: &str| margin[key].as_str().unwrap();
            cells[&(text("table"), text("row"), text(column))]
        };
        let sign = if margin["table"] == "ptb" { -1.0 } else { 1.0 };
        let ours = sign * (cell("better") - cell("worse"));
        let theirs = margin["margin"].as_f64().unwrap();
        // Both are given to two decimals; the difference carries the rounding of f64 at 100.
        let agrees = (ours - theirs).abs() < 1e-9;
        assert_eq!(agrees, margin.get("contradicted").is_none(), "{margin}: {ours}");
    }
    for claim in published["claims"].as_array().unwrap() {
        for recipe in claim["recipes"].as_array().unwrap() {
            load(recipe.as_str().unwrap());
        }
    }
}

#[test]
fn every_layer_is_used() {
    fn layers(folder: &Path, out: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { layers(&path, out) } else { out.push(path.canonicalize().unwrap()) }
        }
    }
    let mut unused = Vec::new();
    layers(&root().join("configs"), &mut unused);
    for path in recipes() {
        for (_, _, origin) in load(&path).runs().iter().flat_map(Recipe::settings) {
            let file = origin.split(':').next().unwrap_or_default();
            unused.retain(|layer| Path::new(file).canonicalize().ok().as_ref() != Some(layer));
        }
    }
    // Those of the scales lie over recipes of the published tables.
    let (folder, sections) = (root().join("recipes"), Registries::default());
    let published = Published::load(&folder).unwrap();
    for scale in [Scale::Paper, Scale::Cpu] {
        let plan = Plan {
            published: &published,
            scale,
            recipes: &folder,
            seeds: None,
            bare: true,
            sections: &sections,
        };
        let cells = Target::ALL.into_iter().flat_map(|target| plan.cells(target).unwrap());
        let runs = cells.flat_map(|cell| cell.runs).chain(plan.numeric().unwrap());
        for (_, _, origin) in runs.flat_map(|run| run.settings()) {
            let file = origin.split(':').next().unwrap_or_default();
            unused.retain(|layer| Path::new(file).canonicalize().ok().as_ref() != Some(layer));
        }
    }
    assert_eq!(unused, Vec::<PathBuf>::new());
}
