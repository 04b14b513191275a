//! A fair comparison: what the validation set chose on some seeds is trained on others.
use std::path::Path;
use taper_train::run::{Options, Show};
use taper_train::sweep::{Confirmation, Sweep, Workers};
use taper_train::{Recipe, Registries};

/// Rates that learn nothing, something, and too much: of SGD the middle one is best, of Adam all diverge.
const RECIPE: &str = "
data: {name: synthetic-images, train: 200, test: 40, classes: 4, batch_size: 20, val: 0.25}
model: {name: mlp, hidden: [8]}
train: {epochs: 2, select: val, on_divergence: record}
sweep:
  list:
    - {optimizer: {name: sgd, lr: 1.0e-9}}
    - {optimizer: {name: sgd, lr: 0.02}}
    - {optimizer: {name: sgd, lr: 1.0e+30}}
    - {optimizer: {name: adam, lr: 1.0e+38}}
    - {optimizer: {name: decgd, lr: 0.01}}
  seeds: [1, 2]
  confirm: [5, 6, 7]
";

fn open(recipe: &Recipe, runs: &Path) -> Sweep {
    let options = Options { runs: runs.into(), show: Show::Quiet, ..Options::default() };
    Sweep::open(std::slice::from_ref(recipe), &Registries::default(), &options).unwrap()
}

#[test]
fn the_best_of_each_optimizer_is_confirmed_on_other_seeds() {
    let (folder, registries) = (tempfile::tempdir().unwrap(), Registries::default());
    let recipe = Recipe::parse("fair.yaml", RECIPE, &[], &registries).unwrap_or_else(|e| panic!("{e}"));
    let mut sweep = open(&recipe, folder.path());
    assert!(sweep.confirmation(&recipe).is_none(), "nothing was trained");
    sweep.run(&registries, &Workers::Here).unwrap();

    let Confirmation { recipes, without } = sweep.confirmation(&recipe).unwrap();
    assert_eq!(without, ["adam"]);
    let chosen: Vec<_> = recipes.iter().map(|r| (&*r.optimizer.name, r.optimizer.lr, r.seed)).collect();
    let expected = [("sgd", 0.02), ("decgd", 0.01)].map(|(name, lr)| [5, 6, 7].map(|seed| (name, lr, seed)));
    assert_eq!(chosen, expected.concat());

    // A run that is gone may have been the best.
    std::fs::remove_dir_all(&sweep.runs()[0].folder).unwrap();
    assert!(open(&recipe, folder.path()).confirmation(&recipe).is_none());
}

/// Nothing to object to: as many configurations and the same settings for each, a validation set, fresh seeds that could show a
/// difference.
#[test]
fn a_fair_sweep_leaves_the_lint_nothing_to_say() {
    let fair = RECIPE
        .replace(
            "    - {optimizer: {name: sgd, lr: 1.0e-9}}\n    - {optimizer: {name: sgd, lr: 1.0e+30}}\n",
            "",
        )
        .replace(
            "    - {optimizer: {name: sgd, lr: 1.0e+30}}\n",
            "    - {optimizer: {name: adam, lr: 0.001}}\n",
        )
        .replace("    - {optimizer: {name: decgd, lr: 0.01}}\n", "")
        .replace("[5, 6, 7]", "[5, 6, 7, 8, 9, 10]");
    let lint = |text: &str| {
        let recipe = Recipe::parse("fair.yaml", text, &[], &Registries::default()).unwrap();
        taper_train::sweep::lint::recipes(&[recipe]).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(lint(&fair), [""; 0]);
    let few = lint(&fair.replace("[5, 6, 7, 8, 9, 10]", "[5, 6, 7]"));
    assert!(matches!(&few[..], [one] if one.contains("3 paired seeds cannot show")), "{few:?}");
    let reused = lint(&fair.replace("  confirm: [5, 6, 7, 8, 9, 10]\n", ""));
    assert!(
        reused.iter().any(|finding| finding.contains("tuning and reporting on the same seeds")),
        "{reused:?}"
    );
}
