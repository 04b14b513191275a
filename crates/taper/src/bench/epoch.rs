//! An epoch of MNIST end to end: a whole run with its batches, evaluation, metrics and checkpoint.
use super::{BenchError, Case, Prepared};
use serde_json::json;
use taper_data::Search;
use taper_train::run::{self, Options, Show};
use taper_train::{Recipe, Registries};

/// Epochs of one run, so that what happens once a run weighs as little as it does in practice.
const EPOCHS: usize = 5;

const RECIPE: &str = "
name: bench
seed: 1
data: {name: mnist, batch_size: 128, augment: {normalize: {mean: [0.1307], std: [0.3081]}}}
model: {name: mlp, hidden: [100]}
optimizer: {name: adam, lr: 0.001}
train: {epochs: 5, select: test}
";

/// PyTorch with the whole set in tensors, which is its fastest, and with the loader that its tutorials use.
pub fn cases() -> Vec<Case> {
    let case = |input: &'static str| Case {
        name: format!("mnist-epoch/{input}"),
        unit: "images/s",
        amount: 60_000.0 * EPOCHS as f64,
        repeat: 1,
        peer: Some(json!({"work": "mnist-epoch", "input": input, "epochs": EPOCHS})),
        prepare: Box::new(|| Ok(Prepared::alone(epochs()?))),
    };
    ["tensors", "loader"].into_iter().map(case).collect()
}

/// Whole runs, each in a new folder, which is gone at the end.
fn epochs() -> Result<super::Work, BenchError> {
    let registries = Registries::default();
    let recipe = Recipe::parse("bench.yaml", RECIPE, &[], &registries).map_err(run::RunError::from)?;
    let folder = taper_files::scratch().map_err(run::RunError::from)?;
    let options = Options {
        runs: folder.path().into(),
        search: Search::from_env(None, true),
        show: Show::Quiet,
        ..Options::default()
    };
    Ok(Box::new(move || {
        for old in std::fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            taper_files::remove_folder(&old.path()).map_err(run::RunError::from)?;
        }
        run::run(&recipe, &registries, &options)?;
        Ok(())
    }))
}
