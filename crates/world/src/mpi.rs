//! Ranks that an MPI launcher started: `mpirun -n 4 taper train …`, `srun taper train …`.
//!
//! MPI's own all-to-all and all-gather move the bytes. They cannot say who is missing, so every rank says first that it is there.
//! When that or what follows takes longer than the time limit, all that wait call the roll: who does not answer within the same
//! limit is named, and all end. Dead ranks the launcher notices itself.
use crate::{Error, Wire, World};
use mpi::Threading;
use mpi::datatype::{Partition, PartitionMut};
use mpi::environment::Universe;
use mpi::request::{Request, Scope, scope};
use mpi::traits::*;
use std::time::{Duration, Instant};

struct Mpi {
    universe: Universe,
    limit: Duration,
}

/// How often a rank that waits looks whether the others are there, at first and at most.
const LOOKS: [Duration; 2] = [Duration::from_micros(1), Duration::from_millis(1)];

/// What is said before an exchange, and when the roll is called.
const HERE: i32 = 0;
const ROLL: i32 = 1;
/// How long those that say nothing let the one that says why all end.
const FAREWELL: Duration = Duration::from_secs(2);

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
    fn others(&self) -> impl Iterator<Item = i32> + use<> {
        let (rank, size) = (self.universe.world().rank(), self.universe.world().size());
        (0..size).filter(move |other| *other != rank)
    }

    /// Says to all others that this rank is there, and waits until all are.
    fn arrive(&self, kind: u8) -> Result<(), Error> {
        let missing = self.hear(HERE, kind)?;
        if missing.is_some() { Err(self.call_the_roll()) } else { Ok(()) }
    }

    /// Says a word to all others and hears theirs; a rank that says nothing in time.
    fn hear(&self, tag: i32, word: u8) -> Result<Option<usize>, Error> {
        let world = self.universe.world();
        // One byte is taken at once, whatever the other does.
        self.others().for_each(|rank| world.process_at_rank(rank).send_with_tag(&word, tag));
        let deadline = Instant::now() + self.limit;
        for rank in self.others() {
            let (other, number) = (world.process_at_rank(rank), usize::try_from(rank).unwrap_or_default());
            let mut pause = LOOKS[0];
            while other.immediate_probe_with_tag(tag).is_none() {
                if Instant::now() > deadline {
                    return Ok(Some(number));
                }
                std::thread::sleep(pause);
                pause = (2 * pause).min(LOOKS[1]);
            }
            let (found, _) = other.receive_with_tag::<u8>(tag);
            if found != word {
                return Err(Error::new(number, "is at another place of the run than this one"));
            }
        }
        Ok(None)
    }

    /// Whose fault it is that an exchange does not end: who is at work on one answers, wherever in it that is.
    fn call_the_roll(&self) -> Error {
        let seconds = self.limit.as_secs_f64();
        match self.hear(ROLL, 0) {
            Ok(Some(rank)) => {
                Error::new(rank, format!("said nothing for {seconds} s: it hangs, or computes for longer"))
            }
            Ok(None) => {
                let what = format!("an exchange took longer than {seconds} s, with all ranks at work on it");
                Error::new(self.rank(), what)
            }
            Err(e) => e,
        }
    }

    /// Waits for an exchange that has begun. What has begun cannot be taken back: where it does not end, the process does.
    fn finish<'a, D: ?Sized, S: Scope<'a>>(&self, mut request: Request<'a, D, S>) {
        let deadline = Instant::now() + self.limit;
        while let Err(unfinished) = request.test() {
            if Instant::now() > deadline {
                self.end(&self.call_the_roll());
            }
            // All are there, so that it is a matter of moving bytes, which this process does itself.
            std::thread::yield_now();
            request = unfinished;
        }
    }

    /// Ends this process and all others: MPI has no other way to tell them. What all of them know one says.
    fn end(&self, why: &Error) -> ! {
        match self.rank() == why.rank || self.rank() == usize::from(why.rank == 0) {
            true => eprintln!("error: {why}"),
            false => std::thread::sleep(FAREWELL),
        }
        self.universe.world().abort(1)
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
        let world = self.universe.world();
        scope(|scope| self.finish(world.immediate_all_to_all_varcount_into(scope, &sent, &mut received)));
        deal(&all, into);
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u8], into: &mut [&mut [u8]]) -> Result<(), Error> {
        self.arrive(2)?;
        // This rank's own place may be empty, and MPI moves what it has in any case.
        let me = self.rank();
        let length = |(rank, part): (usize, &&mut [u8])| if rank == me { mine.len() } else { part.len() };
        let (counts, places) = self.counts(into.iter().enumerate().map(length))?;
        let mut all = vec![0; into.iter().enumerate().map(length).sum::<usize>() + 1];
        let starts: Vec<usize> =
            places.iter().map(|place| usize::try_from(*place).unwrap_or_default()).collect();
        let mut received = PartitionMut::new(&mut all[..], counts, places);
        let mine = if mine.is_empty() { &[0][..0] } else { mine };
        let world = self.universe.world();
        scope(|scope| self.finish(world.immediate_all_gather_varcount_into(scope, mine, &mut received)));
        for (place, start) in into.iter_mut().zip(starts) {
            place.copy_from_slice(&all[start..][..place.len()]);
        }
        Ok(())
    }

    fn abort(&mut self, why: &Error) {
        self.end(why)
    }
}
