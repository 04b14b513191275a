//! Ranks that exchange over sockets, as threads of one process.
use std::sync::Mutex;
use std::thread;
use std::time::Duration;
use taper_world::sockets::{meet, within};
use taper_world::{Error, Tree, World};

const LIMIT: Duration = Duration::from_secs(20);

/// What each of `size` ranks answers, in their order.
fn each<T: Send>(size: usize, limit: Duration, work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let worlds = within(size, limit).unwrap();
    thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| work(world))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Numbers that are not exact, so that another order of additions shows.
fn leaf(number: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((number * 7919 + i * 104_729) % 10_007) as f32 / 3.0 - 1500.0).collect()
}

fn sum(world: &World, tree: &Tree, length: usize) -> Vec<f32> {
    let mut known =
        |node: &std::ops::Range<usize>| Ok::<_, Error>((node.len() == 1).then(|| leaf(node.start, length)));
    let mut add = |mut a: Vec<f32>, b: Vec<f32>| {
        a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        a
    };
    let spans = tree.spans(world.share(tree.leaves()));
    let mine = spans.into_iter().map(|span| tree.fold(span, &mut known, &mut add).unwrap().unwrap());
    world.sum(tree, mine.collect(), length).unwrap()
}

#[test]
fn a_sum_has_the_same_bits_for_any_number_of_ranks() {
    for held in [12, 11, 5, 1] {
        let tree = Tree::new((0..12).map(|leaf| leaf < held).collect());
        // Fewer numbers than ranks, and more than a socket holds.
        for length in [1, 5, 100_003] {
            let alone = sum(&World::alone(), &tree, length);
            for size in [1, 2, 3, 4, 6, 12] {
                for (rank, sum) in
                    each(size, LIMIT, |world| sum(&world, &tree, length)).into_iter().enumerate()
                {
                    assert!(sum == alone, "{held} leaves, {length} numbers: rank {rank} of {size}");
                }
            }
        }
    }
}

#[test]
fn a_sum_goes_over_several_buckets() {
    let tree = Tree::full(2);
    let length = 2 * taper_world::BUCKET + 17;
    let alone = sum(&World::alone(), &tree, length);
    assert!(each(2, LIMIT, |world| sum(&world, &tree, length)).into_iter().all(|sum| sum == alone));
}

#[test]
fn words_of_any_length_are_gathered_in_the_order_of_ranks() {
    let said = each(4, LIMIT, |world| {
        let word = vec![world.rank() as u8; world.rank() * 100_000];
        let all = world.gather(&word).unwrap();
        let first = world.broadcast(&[7, world.rank() as u8]).unwrap();
        (all, first, world.or(1 << world.rank()).unwrap(), world.or(0).unwrap())
    });
    for (all, first, bits, none) in said {
        assert_eq!(all.len(), 4);
        for (rank, word) in all.into_iter().enumerate() {
            assert!(word == vec![rank as u8; rank * 100_000]);
        }
        assert_eq!((first, bits, none), (vec![7, 0], 15, 0));
    }
}

#[test]
fn all_hear_why_a_rank_ends() {
    let ended = each(3, LIMIT, |world| {
        if world.rank() == 1 {
            world.abort("the disk is full");
            return None;
        }
        let error = world.gather(b"here").unwrap_err();
        world.pass_on(&error);
        Some(error.to_string())
    });
    assert_eq!(
        ended,
        [Some("rank 1: the disk is full".into()), None, Some("rank 1: the disk is full".into())]
    );
}

#[test]
fn all_name_the_rank_that_is_gone_also_in_the_middle_of_a_sum() {
    let ended = each(4, LIMIT, |world| {
        if world.rank() == 2 {
            return None;
        }
        let mine = vec![vec![1.0; 1 << 20]];
        let error = world.sum(&Tree::full(4), mine, 1 << 20).unwrap_err();
        world.pass_on(&error);
        Some(error.rank)
    });
    assert_eq!(ended, [Some(2), Some(2), None, Some(2)]);
}

#[test]
fn a_rank_that_says_nothing_is_named_after_the_limit() {
    let silent = Mutex::new(None);
    let ended = each(3, Duration::from_millis(200), |world| {
        if world.rank() == 1 {
            // Neither ends nor speaks until the others have.
            *silent.lock().unwrap() = Some(world);
            return None;
        }
        let error = world.gather(b"here").unwrap_err();
        world.pass_on(&error);
        Some(error)
    });
    let error = ended[0].as_ref().unwrap();
    assert_eq!(error.rank, 1);
    assert!(error.what.contains("said nothing for 0.2 s"), "{error}");
    assert_eq!(ended[2].as_ref().unwrap().rank, 1);
}

#[test]
fn ranks_that_are_out_of_step_notice() {
    let ended = each(2, LIMIT, |world| match world.rank() {
        0 => world.or(1).unwrap_err(),
        _ => world.gather(b"something else").unwrap_err(),
    });
    assert!(ended.iter().any(|error| error.what.contains("another place of the run")), "{ended:?}");
}

#[test]
fn ranks_meet_at_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let met = thread::scope(|scope| {
        let folder = folder.path();
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                scope.spawn(move || {
                    meet(folder, rank, 3, (LIMIT, LIMIT), &mut || Ok(()))
                        .unwrap()
                        .gather(&[rank as u8])
                        .unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(met.iter().all(|all| *all == [vec![0], vec![1], vec![2]]));
}

#[test]
fn a_rank_that_never_starts_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let error =
        meet(folder.path(), 0, 2, (Duration::from_millis(50), Duration::from_millis(100)), &mut || Ok(()))
            .unwrap_err();
    assert_eq!(error.to_string(), "rank 1: did not start within 0.1 s");
    let gone = Error::new(0, "is gone");
    let error = meet(folder.path(), 1, 3, (LIMIT, LIMIT), &mut || Err(gone.clone())).unwrap_err();
    assert_eq!(error, gone);
}
