//! The example of a model and an optimizer from outside trains, and to the same bytes twice.
#[path = "../examples/own_model.rs"]
mod own_model;

#[test]
fn a_model_and_an_optimizer_of_ones_own_train_from_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let runs = ["a", "b"].map(|name| own_model::train(&folder.path().join(name)).unwrap());
    // 100 steps with this seed reach 90 %; chance is 10 %.
    assert!(runs[0].summary.last["test.accuracy"] > 0.85, "{:?}", runs[0].summary);
    let weights =
        |i: usize| std::fs::read(runs[i].folder.join("checkpoints/step-100/model.safetensors")).unwrap();
    assert_eq!(weights(0), weights(1));
}
