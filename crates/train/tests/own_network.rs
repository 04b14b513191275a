//! The example of a network from Taper's layers trains, to the same bytes twice, and what it costs is known.
#[path = "../examples/own_network.rs"]
mod own_network;

#[test]
fn a_network_of_ones_own_trains_from_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let runs = ["a", "b"].map(|name| own_network::train(&folder.path().join(name)).unwrap());
    // 60 steps with this seed reach 65 %; chance is 10 %.
    assert!(runs[0].summary.last["test.accuracy"] > 0.5, "{:?}", runs[0].summary);
    let weights =
        |i: usize| std::fs::read(runs[i].folder.join("checkpoints/step-60/model.safetensors")).unwrap();
    assert_eq!(weights(0), weights(1));
}
