//! Ranks that an MPI launcher started: `mpirun -n 4 taper train …`, `srun taper train …`.
//!
//! MPI's own all-to-all and all-gather move the bytes. They wait for ever for a rank that hangs, so every rank says first that
//! it is there: who does not within the time limit is named, and all end. Dead ranks the launcher notices itself.
use crate::{Error, Wire, World};
use mpi::Threading;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::traits::*;
use std::time::{Duration, Instant};

struct Mpi {
    universe: Universe,
    limit: Duration,
}

/// How often a rank that waits looks whether the others are there, at first and at most.
const LOOKS: [Duration; 2] = [Duration::from_micros(1), Duration::from_millis(1)];

/// The world that MPI was started with; this thread alone may use it. An error where MPI cannot be started, or was before.
pub fn start(limit: Duration) -> Result<World, Error> {
    let (universe, _) = mpi::initialize_with_threading(Threading::Funneled)
        .ok_or_else(|| Error::new(0, "MPI cannot be started twice"))?;
    if universe.world().size() == 1 {
        return Ok(World::alone());
    }
    Ok(World::new(Mpi { universe, limit }))
}

impl Mpi {
    /// Says to all others that this rank is there, and waits until all are.
    fn arrive(&self, kind: u8) -> Result<(), Error> {
        let world = self.universe.world();
        let others = || (0..world.size()).filter(|rank| *rank != world.rank());
        // One byte is taken at once, whatever the other does.
        others().for_each(|rank| world.process_at_rank(rank).send(&kind));
        let deadline = Instant::now() + self.limit;
        for rank in others() {
            let (other, number) = (world.process_at_rank(rank), usize::try_from(rank).unwrap_or_default());
            let mut pause = LOOKS[0];
            while other.immediate_probe().is_none() {
                if Instant::now() > deadline {
                    let seconds = self.limit.as_secs_f64();
                    let what = format!("said nothing for {seconds} s: it hangs, or computes for longer");
                    return Err(Error::new(number, what));
                }
                std::thread::sleep(pause);
                pause = (2 * pause).min(LOOKS[1]);
            }
            let (found, _) = other.receive::<u8>();
            if found != kind {
                return Err(Error::new(number, "is at another place of the run than this one"));
            }
        }
        Ok(())
    }

    fn counts(&self, parts: impl Iterator<Item = usize>) -> Result<(Vec<i32>, Vec<i32>), Error> {
        let (mut counts, mut places, mut place) = (Vec::new(), Vec::new(), 0i32);
        for length in parts {
            let more = i32::try_from(length).ok().and_then(|count| Some((count, place.checked_add(count)?)));
            let Some((count, next)) = more else {
                return Err(Error::new(
                    self.rank(),
                    "has more than 2 GiB to say at once, which MPI does not take",
                ));
            };
            counts.push(count);
            places.push(place);
            place = next;
        }
        Ok((counts, places))
    }
}

/// Room for what is to come, and a byte more: MPI takes the address of an empty vector for a word of its own.
fn room(into: &[&mut [u8]]) -> Vec<u8> {
    vec![0; into.iter().map(|part| part.len()).sum::<usize>() + 1]
}

/// Hands out what came in one piece.
fn deal(all: &[u8], into: &mut [&mut [u8]]) {
    let mut rest = all;
    for place in into {
        let (own, others) = rest.split_at(place.len());
        place.copy_from_slice(own);
        rest = others;
    }
}

impl Wire for Mpi {
    fn rank(&self) -> usize {
        usize::try_from(self.universe.world().rank()).unwrap_or_default()
    }

    fn size(&self) -> usize {
        usize::try_from(self.universe.world().size()).unwrap_or_default()
    }

    fn all_to_all(&mut self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.arrive(1)?;
        let (out_counts, out_places) = self.counts(out.iter().map(|part| part.len()))?;
        let (in_counts, in_places) = self.counts(into.iter().map(|part| part.len()))?;
        let (mut joined, mut all) = (out.concat(), room(into));
        joined.push(0);
        let sent = Partition::new(&joined[..], out_counts, out_places);
        let mut received = PartitionMut::new(&mut all[..], in_counts, in_places);
        self.universe.world().all_to_all_varcount_into(&sent, &mut received);
        deal(&all, into);
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u8], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.arrive(2)?;
        let (counts, places) = self.counts(into.iter().map(|part| part.len()))?;
        let mut all = room(into);
        let mut received = PartitionMut::new(&mut all[..], counts, places);
        let mine = if mine.is_empty() { &[0][..0] } else { mine };
        self.universe.world().all_gather_varcount_into(mine, &mut received);
        deal(&all, into);
        Ok(())
    }

    /// Ends this process and all others: MPI has no other way to tell them.
    fn abort(&mut self, why: &Error) {
        // What all of them know the first one says.
        if why.rank == self.rank() || self.rank() == 0 {
            eprintln!("error: {why}");
        }
        self.universe.world().abort(1)
    }
}
