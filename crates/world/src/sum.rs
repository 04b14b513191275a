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
        let mut total = vec![0.0; length];
        for start in (0..length).step_by(BUCKET) {
            let bucket = start..(start + BUCKET).min(length);
            let slice = |rank| {
                let share = self.share_of(rank, bucket.len());
                start + share.start..start + share.end
            };
            let own = slice(self.rank());
            let joined = |rank| mine.iter().map(|part| &part[slice(rank)]).collect::<Vec<_>>().concat();
            let out: Vec<Vec<f32>> = (0..self.size()).map(joined).collect();
            let out: Vec<&[u8]> = out.iter().map(|part| bytes(part)).collect();
            let mut parts: Vec<Vec<f32>> =
                spans.iter().map(|spans| vec![0.0; spans.len() * own.len()]).collect();
            let mut into: Vec<&mut [u8]> = parts.iter_mut().map(|part| bytes_mut(part)).collect();
            wire.all_to_all(&out, &mut into)?;

            let slice_sum = add_up(tree, &spans, &parts, own.len());
            let (mut rest, mut into) = (&mut total[bucket.clone()], Vec::new());
            for rank in 0..self.size() {
                let (place, others) = rest.split_at_mut(slice(rank).len());
                into.push(bytes_mut(place));
                rest = others;
            }
            wire.all_gather(bytes(&slice_sum), &mut into)?;
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

/// The sum of one slice; `parts` has for each rank what it holds under its spans, one after the other.
fn add_up(tree: &Tree, spans: &[Vec<Range<usize>>], parts: &[Vec<f32>], length: usize) -> Vec<f32> {
    let find = |node: &Range<usize>| {
        spans.iter().zip(parts).find_map(|(spans, parts)| {
            let place = spans.iter().position(|span| span == node)?;
            Some(parts[place * length..][..length].to_vec())
        })
    };
    let sum = tree.fold(0..tree.leaves(), &mut |node| Ok::<_, Error>(find(node)), &mut |mut a, b| {
        add(&mut a, &b);
        a
    });
    // Nothing fails here, and a tree without anything sums to nothing.
    sum.ok().flatten().unwrap_or_else(|| vec![0.0; length])
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
