//! Sums over NCCL are those of one process: `cargo xtask gpu-check nccl` runs this on stand-ins for the driver and for NCCL.
use std::time::Duration;
use taper_world::{Tree, World, add, nccl, sockets};

/// Numbers that are not exact, so that another order of additions shows.
fn leaf(number: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((number * 7919 + i * 104_729) % 10_007) as f32 / 3.0 - 1500.0).collect()
}

fn sum(world: &World, tree: &Tree, length: usize) -> Vec<f32> {
    let mut known = |node: &std::ops::Range<usize>| {
        Ok::<_, taper_world::Error>((node.len() == 1).then(|| leaf(node.start, length)))
    };
    let mut plus = |mut a: Vec<f32>, b: Vec<f32>| {
        add(&mut a, &b);
        a
    };
    let spans = tree.spans(world.share(tree.leaves()));
    let mine = spans.into_iter().filter_map(|span| tree.fold(span, &mut known, &mut plus).unwrap()).collect();
    world.sum(tree, mine, length).unwrap()
}

#[test]
fn ranks_add_up_what_one_does() {
    for size in [2, 3, 4] {
        let worlds = sockets::within(size, Duration::from_secs(60)).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    let world = nccl::over(world, 0).unwrap();
                    // Of the first lengths some rank has no part; the last is long enough for the devices.
                    for length in [1, 3, 100_003] {
                        let tree = Tree::full(12);
                        assert!(
                            sum(&world, &tree, length) == sum(&World::alone(), &tree, length),
                            "{size} ranks"
                        );
                    }
                    let long = vec![world.rank() as u8; 100_000 + world.rank()];
                    let said = world.gather(&long).unwrap();
                    for (rank, word) in said.iter().enumerate() {
                        assert!(*word == vec![rank as u8; 100_000 + rank], "of rank {rank}");
                    }
                });
            }
        });
    }
}

#[test]
fn a_rank_that_is_gone_is_named() {
    let mut worlds = sockets::within(2, Duration::from_secs(60)).unwrap();
    let (second, first) = (worlds.pop().unwrap(), worlds.pop().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || drop(nccl::over(second, 0).unwrap()));
        let first = nccl::over(first, 0).unwrap();
        let error = first.sum(&Tree::full(2), vec![vec![1.0]], 1).unwrap_err();
        assert_eq!(error.rank, 1, "{error}");
    });
}
