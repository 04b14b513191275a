//! Numbers go from device to device over NCCL: `cargo xtask gpu-check nccl` runs this on stand-ins for the driver and for NCCL.
use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use std::sync::Arc;
use std::time::Duration;
use taper_world::{World, sockets};

fn connected(world: &World) -> Arc<CudaStream> {
    let stream = CudaContext::new(0).unwrap().default_stream();
    world.connect_devices(stream.clone()).unwrap();
    stream
}

/// What one rank has for another.
fn word(from: usize, to: usize, length: usize) -> Vec<f32> {
    (0..length).map(|i| ((from * 7919 + to * 31 + i * 104_729) % 10_007) as f32 / 3.0).collect()
}

#[test]
fn each_rank_has_what_the_others_sent_it() {
    for size in [2, 3, 4] {
        let worlds = sockets::within(size, Duration::from_secs(60)).unwrap();
        std::thread::scope(|scope| {
            for world in worlds {
                scope.spawn(move || {
                    assert!(!world.has_devices());
                    let (stream, me) = (connected(&world), world.rank());
                    assert!(world.has_devices());
                    // To each other rank another length, to one of them nothing, and from the middle of what there is.
                    let length = |from: usize, to: usize| (from + 2 * to) % 3 * 1000;
                    for _ in 0..3 {
                        let sent: Vec<CudaSlice<f32>> = (0..size)
                            .map(|to| [&[-1.0; 5][..], &word(me, to, length(me, to)), &[-1.0; 5]].concat())
                            .map(|numbers| stream.clone_htod(&numbers).unwrap())
                            .collect();
                        let out: Vec<_> = sent
                            .iter()
                            .enumerate()
                            .map(|(to, sent)| (length(me, to) > 0).then(|| sent.slice(5..5 + length(me, to))))
                            .collect();
                        let place = |from: usize| {
                            let length = length(from, me);
                            (from != me && length > 0).then(|| stream.alloc_zeros::<f32>(length).unwrap())
                        };
                        let mut into: Vec<_> = (0..size).map(place).collect();
                        world.between_devices(&out, &mut into).unwrap();
                        for (from, heard) in into.iter().enumerate().filter(|(from, _)| *from != me) {
                            let heard = heard.as_ref().map(|heard| stream.clone_dtoh(heard).unwrap());
                            assert!(
                                heard.unwrap_or_default() == word(from, me, length(from, me)),
                                "{from} to {me}"
                            );
                        }
                    }
                    // What is said beside it goes the way it went.
                    assert_eq!(
                        world.gather(&[me as u8]).unwrap().concat(),
                        (0..size as u8).collect::<Vec<_>>()
                    );
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
        scope.spawn(move || drop(connected(&second)));
        connected(&first);
        let error = first.between_devices(&[None, None], &mut [None, None]).unwrap_err();
        assert_eq!(error.rank, 1, "{error}");
    });
}

#[test]
fn without_devices_nothing_is_sent() {
    let worlds = sockets::within(2, Duration::from_secs(60)).unwrap();
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let error = world.between_devices(&[None, None], &mut [None, None]).unwrap_err();
                assert_eq!(error.rank, world.rank(), "{error}");
            });
        }
    });
}
