//! Recipes whose settings follow the protocol of the published tables.
use std::path::Path;
use taper_train::{Recipe, Registries};

fn load(path: &str) -> Recipe {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    Recipe::load(root.join(path), &[], &Registries::default()).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn trained_recurrent_weights_have_the_rates_of_their_depth() {
    let sweep = load("recipes/sweeps/ptb-trained-recurrent.yaml");
    let mut cells = Vec::new();
    for run in sweep.runs() {
        let layers = run.model.as_ref().unwrap().config["layers"].as_u64().unwrap();
        let mut hyper = run.optimizer.hyper.clone();
        // The cell of the table with the same optimizer and depth: all but its name and what is frozen is the same.
        let column = if run.optimizer.name == "sgd" { "sgdm" } else { &run.optimizer.name };
        let cell = load(&format!("recipes/ptb/lstm{layers}-{column}.yaml"));
        assert_eq!(run.optimizer.lr, cell.optimizer.lr, "{column} with {layers} layers");
        let mut expected = cell.optimizer.hyper.clone();
        for hyper in [&mut hyper, &mut expected] {
            hyper.sort_keys();
        }
        assert_eq!(hyper, expected, "{column} with {layers} layers");
        assert_eq!(run.model.as_ref().unwrap().config["freeze_recurrent"], false);
        cells.push((column.to_owned(), layers));
    }
    cells.sort();
    cells.dedup();
    assert_eq!(cells.len(), 15, "five optimizers at three depths: {cells:?}");
}

#[test]
fn the_small_ptb_drops_the_rate_at_half_and_three_quarters_of_the_way() {
    let text = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/scale/cpu-ptb.yaml"),
    );
    let layer = format!("extends: ../../configs/ptb.yaml\n{}", text.unwrap());
    let adam = "model: {layers: 1, emb: 64, hidden: 192}\noptimizer: {name: adam, lr: 0.001}\n";
    let layer = layer.replace("model: {emb: 64, hidden: 192}\n", adam);
    let recipe = Recipe::parse("cpu-ptb.yaml", &layer, &[], &Registries::default());
    let run = recipe.unwrap_or_else(|error| panic!("{error}")).runs()[0].clone();
    let epochs = run.train.epochs.unwrap();
    let drops: Vec<u64> =
        run.schedule.config["at"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
    assert_eq!(drops, [epochs / 2, epochs * 3 / 4]);
}
