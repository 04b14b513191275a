//! Sums over all ranks: each element is added up by one rank, in the tree's order.
//!
//! A rank sends each other rank a slice of what it has, adds up its own slice of what it is sent, and sends the result to all:
//! 2·(R-1)/R·N numbers a rank where each rank has one part, as many as a ring needs.
use crate::{Error, Line, Tree, World};
use std::ops::Range;

/// Numbers that are exchanged at a time: what is in flight needs memory beside the sum, and is added up before the
/// caches forget it. 8 MB.
pub const BUCKET: usize = 2 << 20;

impl World {
    /// The sum of `length` numbers over the leaves of a tree, which are shared out among the ranks in equal blocks. `mine` is what
    /// this rank has under each of the spans of its block, in order.
    pub fn sum(&self, tree: &Tree, mut mine: Vec<Vec<f32>>, length: usize) -> Result<Vec<f32>, Error> {
        let spans: Vec<Vec<Range<usize>>> =
            (0..self.size()).map(|rank| tree.spans(self.share_of(rank, tree.leaves()))).collect();
        let fits = mine.len() == spans[self.rank()].len() && mine.iter().all(|part| part.len() == length);
        if !fits {
            return Err(Error::new(self.rank(), "its parts of a sum do not fit the tree"));
        }
        let Some(mut line) = self.line() else {
            return Ok(mine.pop().unwrap_or_else(|| vec![0.0; length]));
        };
        let Line { wire, room, .. } = &mut *line;
        let (me, parts) = (self.rank(), mine.len());
        let held: Vec<(usize, &Range<usize>)> = spans
            .iter()
            .enumerate()
            .flat_map(|(rank, spans)| spans.iter().map(move |span| (rank, span)))
            .collect();
        // The sum comes into the place of the first part: what is there has been sent by then.
        if mine.is_empty() {
            mine.push(vec![0.0; length]);
        }
        let mut joined = Vec::new();
        for start in (0..length).step_by(BUCKET) {
            let bucket = start..(start + BUCKET).min(length);
            let slice = |rank| {
                let share = self.share_of(rank, bucket.len());
                start + share.start..start + share.end
            };
            let own = slice(me);
            // A slice of each part to each other rank. Where there is one part, it is sent from where it is.
            let lengths: Vec<usize> =
                (0..self.size()).map(|rank| if rank == me { 0 } else { parts * slice(rank).len() }).collect();
            joined.clear();
            for rank in (0..self.size()).filter(|rank| *rank != me && parts > 1) {
                mine.iter().for_each(|part| joined.extend_from_slice(&part[slice(rank)]));
            }
            let mut rest = &joined[..];
            let out = lengths.iter().enumerate().map(|(rank, length)| match (parts, length) {
                (1, 1..) => bytes(&mine[0][slice(rank)]),
                (0 | 1, _) => &[],
                _ => bytes(rest.split_off(..*length).unwrap_or_default()),
            });
            let out: Vec<&[u8]> = out.collect();
            room.resize((held.len() - parts) * own.len(), 0.0);
            let lengths = spans.iter().enumerate();
            let lengths = lengths.map(|(rank, spans)| if rank == me { 0 } else { spans.len() * own.len() });
            wire.all_to_all(&out, &mut places(room, lengths))?;

            let sum = add_up(tree, &held, (&mut mine, &own, me), room);
            let total = match sum {
                Some(Place::Room(at)) => {
                    mine[0][own.clone()].copy_from_slice(&room[at..][..own.len()]);
                    &mut mine[0]
                }
                Some(Place::Mine(part)) if part > 0 => {
                    let (first, others) = mine.split_at_mut(1);
                    first[0][own.clone()].copy_from_slice(&others[part - 1][own.clone()]);
                    &mut first[0]
                }
                _ => &mut mine[0],
            };
            // To all others from where it is: the own place takes nothing.
            let (before, rest) = total[bucket.clone()].split_at_mut(own.start - start);
            let (sum, after) = rest.split_at_mut(own.len());
            let mut into = places(before, (0..me).map(|rank| slice(rank).len()));
            into.push(&mut []);
            into.extend(places(after, (me + 1..self.size()).map(|rank| slice(rank).len())));
            wire.all_gather(bytes(sum), &mut into)?;
        }
        Ok(mine.swap_remove(0))
    }
}

/// Where a part of a sum is.
#[derive(Clone, Copy)]
enum Place {
    /// In a part of this rank's.
    Mine(usize),
    /// At such a number of what came from the others.
    Room(usize),
}

/// Pieces of such lengths, one after the other.
fn places(mut all: &mut [f32], lengths: impl Iterator<Item = usize>) -> Vec<&mut [u8]> {
    lengths.map(|length| bytes_mut(all.split_off_mut(..length).unwrap_or_default())).collect()
}

/// Adds up what is held of one slice, `own`, under each span, by this rank in `mine` and by the others in `room`. `a + b` is
/// `b + a` to the bit, so that a sum with a part of this rank's comes into that.
fn add_up(
    tree: &Tree,
    held: &[(usize, &Range<usize>)],
    (mine, own, me): (&mut [Vec<f32>], &Range<usize>, usize),
    room: &mut [f32],
) -> Option<Place> {
    let length = own.len();
    let mut find = |node: &Range<usize>| {
        let at = held.iter().position(|(_, span)| *span == node);
        Ok::<_, Error>(at.map(|at| {
            let before = held[..at].iter().filter(|(rank, _)| *rank == me).count();
            if held[at].0 == me { Place::Mine(before) } else { Place::Room((at - before) * length) }
        }))
    };
    let sum = tree.fold(0..tree.leaves(), &mut find, &mut |a, b| match (a, b) {
        (Place::Mine(to), Place::Room(from)) | (Place::Room(from), Place::Mine(to)) => {
            add(&mut mine[to][own.clone()], &room[from..][..length]);
            Place::Mine(to)
        }
        (Place::Mine(a), Place::Mine(b)) => {
            // Nodes are in order: what is on the left lies before what is on the right.
            let (left, right) = mine.split_at_mut(b);
            add(&mut left[a][own.clone()], &right[0][own.clone()]);
            Place::Mine(a)
        }
        (Place::Room(a), Place::Room(b)) => {
            let (left, right) = room.split_at_mut(b);
            add(&mut left[a..][..length], &right[..length]);
            Place::Room(a)
        }
    });
    // Nothing fails here, and a tree without anything sums to nothing.
    sum.ok().flatten()
}

impl World {
    /// What all ranks have, one after the other; rank `r` has `lengths[r]` numbers.
    pub fn join(&self, mine: &[f32], lengths: &[usize]) -> Result<Vec<f32>, Error> {
        if lengths.len() != self.size() || mine.len() != lengths[self.rank()] {
            return Err(Error::new(self.rank(), "its numbers are not as many as were agreed on"));
        }
        let Some(mut line) = self.line() else { return Ok(mine.to_vec()) };
        let mut all = vec![0.0; lengths.iter().sum()];
        let (mut rest, mut into) = (&mut all[..], Vec::with_capacity(lengths.len()));
        for length in lengths {
            let (place, others) = rest.split_at_mut(*length);
            into.push(bytes_mut(place));
            rest = others;
        }
        line.wire.all_gather(bytes(mine), &mut into)?;
        Ok(all)
    }
}

/// `a + b` in the place of `a`.
pub fn add(a: &mut [f32], b: &[f32]) {
    a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
}

fn bytes(numbers: &[f32]) -> &[u8] {
    // SAFETY: every f32 is four bytes, each of any value, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn bytes_mut(numbers: &mut [f32]) -> &mut [u8] {
    // SAFETY: as in `bytes`; any four bytes are an f32.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), size_of_val(numbers)) }
}
