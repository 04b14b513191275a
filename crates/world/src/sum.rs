//! Sums over all ranks: each element is added up by one rank, in the tree's order.
//!
//! A rank sends each other rank a slice of what it has, adds up its own slice of what it is sent, and sends the result to all:
//! 2·(R-1)/R·N numbers a rank where each rank has one part, as many as a ring needs.
use crate::{Error, Tree, World};
use std::ops::Range;

/// Numbers that are exchanged at a time: what is in flight needs memory beside the sum. 25 MB.
pub const BUCKET: usize = 25 << 18;

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
        let Some(mut wire) = self.wire() else {
            return Ok(mine.pop().unwrap_or_else(|| vec![0.0; length]));
        };
        let held: Vec<&Range<usize>> = spans.iter().flatten().collect();
        // The sum comes into the place of a part: what is there has been sent by then.
        let mut total = if mine.is_empty() { vec![0.0; length] } else { mine.remove(0) };
        if held.is_empty() {
            return Ok(total);
        }
        let (mut joined, mut room) = (Vec::new(), Vec::new());
        for start in (0..length).step_by(BUCKET) {
            let bucket = start..(start + BUCKET).min(length);
            let slice = |rank| {
                let share = self.share_of(rank, bucket.len());
                start + share.start..start + share.end
            };
            let own = slice(self.rank());
            // What the others sent, and this one, span after span.
            room.resize(held.len() * own.len(), 0.0);
            let (mut rest, mut into) = (&mut room[..], Vec::with_capacity(self.size()));
            for spans in &spans {
                let (place, others) = rest.split_at_mut(spans.len() * own.len());
                into.push(bytes_mut(place));
                rest = others;
            }
            match spans[self.rank()].len() {
                0 => wire.all_to_all(&vec![&[][..]; self.size()], &mut into)?,
                1 => {
                    let out: Vec<&[u8]> = (0..self.size()).map(|rank| bytes(&total[slice(rank)])).collect();
                    wire.all_to_all(&out, &mut into)?;
                }
                parts => {
                    joined.clear();
                    for rank in 0..self.size() {
                        let parts = std::iter::once(&total).chain(&mine);
                        parts.for_each(|part| joined.extend_from_slice(&part[slice(rank)]));
                    }
                    let (mut rest, mut out) = (&joined[..], Vec::with_capacity(self.size()));
                    for rank in 0..self.size() {
                        let (place, others) = rest.split_at(parts * slice(rank).len());
                        out.push(bytes(place));
                        rest = others;
                    }
                    wire.all_to_all(&out, &mut into)?;
                }
            }
            let slice_sum = add_up(tree, &held, &mut room, own.len());
            let (mut rest, mut into) = (&mut total[bucket.clone()], Vec::with_capacity(self.size()));
            for rank in 0..self.size() {
                let (place, others) = rest.split_at_mut(slice(rank).len());
                into.push(bytes_mut(place));
                rest = others;
            }
            wire.all_gather(bytes(slice_sum), &mut into)?;
        }
        Ok(total)
    }
}

impl World {
    /// What all ranks have, one after the other; rank `r` has `lengths[r]` numbers.
    pub fn join(&self, mine: &[f32], lengths: &[usize]) -> Result<Vec<f32>, Error> {
        if lengths.len() != self.size() || mine.len() != lengths[self.rank()] {
            return Err(Error::new(self.rank(), "its numbers are not as many as were agreed on"));
        }
        let Some(mut wire) = self.wire() else { return Ok(mine.to_vec()) };
        let mut all = vec![0.0; lengths.iter().sum()];
        let (mut rest, mut into) = (&mut all[..], Vec::with_capacity(lengths.len()));
        for length in lengths {
            let (place, others) = rest.split_at_mut(*length);
            into.push(bytes_mut(place));
            rest = others;
        }
        wire.all_gather(bytes(mine), &mut into)?;
        Ok(all)
    }
}

/// The sum of one slice; `room` has what is held under each span, one after the other.
fn add_up<'r>(tree: &Tree, held: &[&Range<usize>], room: &'r mut [f32], length: usize) -> &'r [f32] {
    let mut find = |node: &Range<usize>| Ok::<_, Error>(held.iter().position(|span| *span == node));
    let sum = tree.fold(0..tree.leaves(), &mut find, &mut |a, b| {
        // Nodes are in order: what is on the left lies before what is on the right.
        let (left, right) = room.split_at_mut(b * length);
        add(&mut left[a * length..][..length], &right[..length]);
        a
    });
    // Nothing fails here, and a tree without anything sums to nothing.
    sum.ok().flatten().map_or(&[], |at| &room[at * length..][..length])
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
