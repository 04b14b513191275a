//! Processes that compute one result together, to the bit the same for any number of them.
//!
//! A [`World`] is the processes, called ranks, that take part, seen by one of them. What they exchange they exchange all
//! together and in one order: [`World::gather`], [`World::broadcast`], [`World::sum`]. A sum is taken over the leaves of a
//! [`Tree`], pairwise and in an order that the number of leaves fixes; the ranks only share out who computes which of its parts.
//!
//! How bytes move is a [`Wire`]: sockets between processes of one machine ([`sockets`]), MPI (feature `mpi`), or nothing
//! at all. Numbers in the memory of GPUs go from device to device by NCCL (feature `nccl`).
//!
//! ```
//! use taper_world::{Tree, World};
//! let (world, tree) = (World::alone(), Tree::full(4));
//! // One process owns the whole tree: its one part is the sum already.
//! assert_eq!(tree.spans(0..4), [0..4]);
//! assert_eq!(world.sum(&tree, vec![vec![1.0, 2.0]], 2)?, [1.0, 2.0]);
//! # Ok::<(), taper_world::Error>(())
//! ```
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
mod nccl;
pub mod sockets;
mod sum;
mod tree;

pub use sum::{BUCKET, add};
pub use tree::Tree;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why ranks cannot go on together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}: {what}")]
pub struct Error {
    /// The rank at fault.
    pub rank: usize,
    /// What is the matter with it.
    pub what: String,
    /// Whether it told so itself, before it ended.
    pub told: bool,
}

impl Error {
    /// A rank with something the matter.
    pub fn new(rank: usize, what: impl Into<String>) -> Self {
        Self { rank, what: what.into(), told: false }
    }
}

/// How bytes move between ranks. All ranks make the same calls in the same order.
pub trait Wire: Send {
    /// The number of this process, from 0.
    fn rank(&self) -> usize;
    /// The number of processes.
    fn size(&self) -> usize;
    /// `out[r]` goes to rank `r`, and what rank `r` sent here comes into `into[r]`, whose length it has. The own part is moved
    /// like the others.
    fn all_to_all(&mut self, out: &[&[u8]], into: &mut [&mut [u8]]) -> Result<(), Error>;
    /// `mine` goes to all ranks, and that of rank `r` comes into `into[r]`, whose length it has. This rank's own place may be empty:
    /// then it is not moved.
    fn all_gather(&mut self, mine: &[u8], into: &mut [&mut [u8]]) -> Result<(), Error>;
    /// Tells the others, as far as they listen, why this rank ends. No call follows.
    fn abort(&mut self, why: &Error);
}

/// The processes that take part in a run, seen by one of them. Cheap to clone.
#[derive(Clone)]
pub struct World {
    rank: usize,
    size: usize,
    line: Option<Arc<Mutex<Line>>>,
}

/// A wire, with room for what a sum hears: asking the system for it every time would cost as much as an addition.
struct Line {
    wire: Box<dyn Wire>,
    room: Vec<f32>,
    #[cfg(feature = "nccl")]
    devices: Option<nccl::Devices>,
}

impl Default for World {
    fn default() -> Self {
        Self::alone()
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(rank {} of {})", self.rank, self.size)
    }
}

impl World {
    /// One process that does everything, at no cost.
    pub fn alone() -> Self {
        Self { rank: 0, size: 1, line: None }
    }

    /// The processes at the ends of a wire.
    pub fn new(wire: impl Wire + 'static) -> Self {
        let (rank, size) = (wire.rank(), wire.size());
        let line = Line {
            wire: Box::new(wire),
            room: Vec::new(),
            #[cfg(feature = "nccl")]
            devices: None,
        };
        Self { rank, size, line: Some(Arc::new(Mutex::new(line))) }
    }

    /// The number of this process, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this is the process that writes and decides.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Whether there is nobody else.
    pub fn is_alone(&self) -> bool {
        self.size == 1
    }

    /// The block of `n` things that a rank owns: contiguous, in the order of ranks, as equal as can be.
    pub fn share_of(&self, rank: usize, n: usize) -> Range<usize> {
        let start = |rank: usize| n / self.size * rank + (n % self.size).min(rank);
        start(rank)..start(rank + 1)
    }

    /// The block of `n` things that this rank owns.
    pub fn share(&self, n: usize) -> Range<usize> {
        self.share_of(self.rank, n)
    }

    /// What every rank says, of any length, in the order of ranks.
    pub fn gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let Some(mut line) = self.line() else { return Ok(vec![mine.to_vec()]) };
        let lengths = self.lengths(&mut *line.wire, mine)?;
        let mut all = lengths.iter().enumerate().map(room).collect::<Result<Vec<_>, _>>()?;
        if lengths.iter().any(|length| *length > 0) {
            line.wire.all_gather(mine, &mut places(&mut all))?;
        }
        Ok(all)
    }

    /// What every rank says, to the first one alone: the others hear nothing, and need no room for it.
    pub fn to_first(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        let Some(mut line) = self.line() else { return Ok(vec![mine.to_vec()]) };
        let mut lengths = self.lengths(&mut *line.wire, mine)?;
        if !self.is_first() {
            lengths.fill(0);
        }
        let mut all = lengths.iter().enumerate().map(room).collect::<Result<Vec<_>, _>>()?;
        let mut out: Vec<&[u8]> = vec![&[]; self.size];
        out[0] = mine;
        line.wire.all_to_all(&out, &mut places(&mut all))?;
        Ok(all)
    }

    /// How much every rank has to say.
    fn lengths(&self, wire: &mut dyn Wire, mine: &[u8]) -> Result<Vec<u64>, Error> {
        let mut lengths = vec![vec![0; 8]; self.size];
        wire.all_gather(&(mine.len() as u64).to_le_bytes(), &mut places(&mut lengths))?;
        Ok(lengths.iter().map(|bytes| bytes[..].try_into().map_or(0, u64::from_le_bytes)).collect())
    }

    /// What the first rank says; the others' `bytes` are not looked at.
    pub fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, Error> {
        let mut all = self.gather(if self.is_first() { bytes } else { &[] })?;
        Ok(all.swap_remove(0))
    }

    /// The bits that any rank has set.
    pub fn or(&self, mine: u8) -> Result<u8, Error> {
        let Some(mut line) = self.line() else { return Ok(mine) };
        let mut said = vec![[0]; self.size];
        let mut places: Vec<&mut [u8]> = said.iter_mut().map(|place| &mut place[..]).collect();
        line.wire.all_gather(&[mine], &mut places)?;
        Ok(said.iter().fold(0, |all, said| all | said[0]))
    }

    /// Tells the others why this rank ends.
    pub fn abort(&self, what: impl Into<String>) {
        self.pass_on(&Error::new(self.rank, what));
    }

    /// Tells the others that a rank, maybe not this one, is the reason why this one ends.
    pub fn pass_on(&self, why: &Error) {
        if let Some(mut line) = self.line() {
            line.wire.abort(why);
        }
    }

    fn line(&self) -> Option<MutexGuard<'_, Line>> {
        // A wire that panicked half way through a message fails at the next: its peers are out of step.
        Some(self.line.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Room for what a rank says. What no memory holds is no message: the rank is out of step.
fn room((rank, length): (usize, &u64)) -> Result<Vec<u8>, Error> {
    let mut room = Vec::new();
    match usize::try_from(*length).ok().filter(|length| room.try_reserve_exact(*length).is_ok()) {
        Some(length) => room.resize(length, 0),
        None => return Err(Error::new(rank, format!("sends {length} bytes, more than memory holds"))),
    }
    Ok(room)
}

fn places(rooms: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    rooms.iter_mut().map(|room| &mut room[..]).collect()
}
