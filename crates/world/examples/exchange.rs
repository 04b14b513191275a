//! What ranks that MPI started exchange is what one process has by itself: `mpirun -n 4 …/examples/exchange`.
//!
//! With `hang` as an argument the last rank says nothing, and the others are to name it after a second.
use std::time::Duration;
use taper_world::{Tree, World, add};

/// Numbers that are not exact, so that another order of additions shows.
fn leaf(number: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((number * 7919 + i * 104_729) % 10_007) as f32 / 3.0 - 1500.0).collect()
}

fn sum(world: &World, tree: &Tree, length: usize) -> Result<Vec<f32>, taper_world::Error> {
    let mut known = |node: &std::ops::Range<usize>| Ok((node.len() == 1).then(|| leaf(node.start, length)));
    let mut plus = |mut a: Vec<f32>, b: Vec<f32>| {
        add(&mut a, &b);
        a
    };
    let mut mine = Vec::new();
    for span in tree.spans(world.share(tree.leaves())) {
        mine.extend(tree.fold::<_, taper_world::Error>(span, &mut known, &mut plus)?);
    }
    world.sum(tree, mine, length)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let hangs = std::env::args().nth(1).is_some_and(|word| word == "hang");
    let world = taper_world::mpi::start(Duration::from_secs(if hangs { 1 } else { 60 }))?;
    if hangs && world.rank() + 1 == world.size() {
        std::thread::sleep(Duration::from_secs(3600));
    }
    let said = world.gather(&vec![world.rank() as u8; world.rank()]);
    let said = said.inspect_err(|e| world.pass_on(e))?;
    for (rank, word) in said.iter().enumerate() {
        assert_eq!(*word, vec![rank as u8; rank]);
    }
    for held in [12, 5] {
        let tree = Tree::new((0..12).map(|leaf| leaf < held).collect());
        for length in [1, 100_003] {
            assert!(
                sum(&world, &tree, length)? == sum(&World::alone(), &tree, length)?,
                "another order of additions"
            );
        }
    }
    if world.is_first() {
        println!("{} ranks add up what one does", world.size());
    }
    Ok(())
}
