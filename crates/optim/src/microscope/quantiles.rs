//! True quantiles over all elements of many tensors: selection by the bits of numbers, without sorting them.
use crate::driver::cpu::vectorized;
use crate::rule::Real;
use rayon::prelude::*;

/// The values of one parameter's buffer.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Of a parameter in f32.
    F32(&'a [f32]),
    /// Of a parameter in f64.
    F64(&'a [f64]),
}

impl Values<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }
}

/// What the elements of one tensor reach.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reached {
    /// The smallest; NaN where one is no number.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// The largest; NaN where one is no number.
    pub max: f64,
}

/// A quantity over all elements of all parameters: each element counts once, so that large tensors weigh more.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// How many elements there are.
    pub elements: u64,
    /// The smallest; NaN where one is no number, as the largest, the mean and both errors are.
    pub min: f64,
    /// The 1 %, 25 %, 50 %, 75 % and 99 % quantiles (nearest rank), exact. Numbers that are none lie outside of all others.
    pub quantiles: [f64; 5],
    /// The largest.
    pub max: f64,
    /// The mean.
    pub mean: f64,
    /// The share of elements below zero.
    pub negative: f64,
    /// The root of the mean square of what they differ from the centre by.
    pub rms_error: f64,
    /// The largest such difference.
    pub max_error: f64,
    /// What each tensor's elements reach; `None` for one without any.
    pub each: Vec<Option<Reached>>,
}

/// The quantiles that are told.
const WANTED: [f64; 5] = [0.01, 0.25, 0.5, 0.75, 0.99];
/// Elements that are looked at in several ways while they are in the L1 cache.
const BLOCK: usize = 1024;
/// Elements summed at a time, whatever the threads.
const CHUNK: usize = 32 * 1024;

impl Spread {
    /// Of the elements of all tensors about a centre; `None` without any.
    pub fn of(tensors: &[Values<'_>], centre: f64) -> Option<Self> {
        let elements: u64 = tensors.iter().map(|values| values.len() as u64).sum();
        let moments: Vec<Option<Moments>> = tensors
            .iter()
            .map(|values| match values {
                Values::F32(values) => moments(values, centre),
                Values::F64(values) => moments(values, centre),
            })
            .collect();
        let all = moments.iter().flatten().copied().reduce(Moments::join).filter(|_| elements > 0)?;
        let reached = |(values, moments): (&Values, &Option<Moments>)| {
            moments.map(|m| Reached { min: m.min, mean: m.sum / values.len() as f64, max: m.max })
        };
        let each = tensors.iter().zip(&moments).map(reached).collect();
        let rank = |q: f64| ((q * elements as f64).ceil() as u64).clamp(1, elements) - 1;
        let singles: Option<Vec<&[f32]>> = tensors
            .iter()
            .map(|values| match values {
                Values::F32(values) => Some(*values),
                Values::F64(_) => None,
            })
            .collect();
        let quantiles = match singles {
            Some(singles) => {
                // Numbers that are none lie outside of all others.
                let (first, last) =
                    if all.sum.is_nan() { (0, u32::MAX) } else { (key(all.min as f32), key(all.max as f32)) };
                // The key of 0 is above that of -0, its equal.
                let span = Span { first: first.min(last), last: last.max(first) };
                select(&singles, &WANTED.map(rank), span).map(f64::from)
            }
            // Functions of a few variables.
            None => {
                let each = tensors.iter().flat_map(|values| match values {
                    Values::F32(values) => values.iter().map(|v| f64::from(*v)).collect::<Vec<f64>>(),
                    Values::F64(values) => values.to_vec(),
                });
                let mut each: Vec<f64> = each.collect();
                each.sort_by(f64::total_cmp);
                WANTED.map(|q| each[rank(q) as usize])
            }
        };
        let n = elements as f64;
        Some(Self {
            elements,
            min: all.min,
            quantiles,
            max: all.max,
            mean: all.sum / n,
            negative: all.negative as f64 / n,
            rms_error: (all.square / n).sqrt(),
            max_error: (all.max - centre).abs().max((all.min - centre).abs()),
            each,
        })
    }
}

#[derive(Clone, Copy)]
struct Moments {
    min: f64,
    max: f64,
    sum: f64,
    square: f64,
    negative: u64,
}

impl Moments {
    fn join(self, other: Self) -> Self {
        // Not `f64::min`, which forgets that one is no number.
        let first = |a: f64, b: f64, a_is_first: bool| if a.is_nan() || a_is_first { a } else { b };
        Self {
            min: first(self.min, other.min, self.min < other.min),
            max: first(self.max, other.max, self.max > other.max),
            sum: self.sum + other.sum,
            square: self.square + other.square,
            negative: self.negative + other.negative,
        }
    }
}

/// The least and the largest of a block, in its own precision: a loop of its own, so that it is one of vectors.
#[inline(always)]
fn reach<T: Real>(block: &[T], (least, most): (T, T)) -> (T, T) {
    const LANES: usize = 32;
    let (mut min, mut max) = ([least; LANES], [most; LANES]);
    let (groups, tail) = block.as_chunks::<LANES>();
    for group in groups {
        for (min, v) in min.iter_mut().zip(group) {
            *min = min.at_most(*v);
        }
        for (max, v) in max.iter_mut().zip(group) {
            *max = max.at_least(*v);
        }
    }
    let min = min.iter().chain(tail).fold(least, |min, v| min.at_most(*v));
    (min, max.iter().chain(tail).fold(most, |max, v| max.at_least(*v)))
}

fn moments<T: Real>(values: &[T], centre: f64) -> Option<Moments> {
    const LANES: usize = 8;
    let chunk = |chunk: &[T]| {
        vectorized(
            #[inline(always)]
            || {
                let mut reached = (T::from_f64(f64::INFINITY), T::from_f64(f64::NEG_INFINITY));
                let (mut sum, mut square) = ([0.0; LANES], [0.0; LANES]);
                for block in chunk.chunks(BLOCK) {
                    reached = reach(block, reached);
                    let (groups, tail) = block.as_chunks::<LANES>();
                    let mut add = |i: usize, v: T| {
                        let v = v.to_f64();
                        sum[i] += v;
                        square[i] += (v - centre) * (v - centre);
                    };
                    groups.iter().for_each(|group| (0..LANES).for_each(|i| add(i, group[i])));
                    tail.iter().enumerate().for_each(|(i, v)| add(i, *v));
                }
                let (min, max) = (reached.0.to_f64(), reached.1.to_f64());
                // Hardly ever are there any to count.
                let below = || chunk.iter().filter(|v| v.to_f64() < 0.0).count() as u64;
                let negative = if min < 0.0 { below() } else { 0 };
                let (sum, square): (f64, f64) = (sum.into_iter().sum(), square.into_iter().sum());
                // Comparisons pass over what is no number; the sum does not, and is none of infinities of both signs too.
                let none = sum.is_nan() && chunk.iter().any(|v| v.to_f64().is_nan());
                let (min, max) = if none { (f64::NAN, f64::NAN) } else { (min, max) };
                Moments { min, max, sum, square, negative }
            },
        )
    };
    let chunks: Vec<Moments> = values.par_chunks(CHUNK).map(chunk).collect();
    chunks.into_iter().reduce(Moments::join)
}

/// Numbers that are ordered as the values are.
fn key(value: f32) -> u32 {
    let bits = value.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

fn value(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & 0x7fff_ffff } else { !key })
}

/// Tables that neighbours are counted in by turns: elements that are alike would wait for each other's count.
const TURNS: usize = 4;
/// Elements counted at a time.
const COUNTED: usize = 1 << 16;

/// Where numbers lie in a range of keys; what lies outside counts as its ends.
#[derive(Clone, Copy)]
struct Span {
    first: u32,
    last: u32,
}

impl Span {
    fn offsets(self, values: &[f32], to: &mut [u32]) {
        vectorized(
            #[inline(always)]
            || {
                for (to, v) in to.iter_mut().zip(values) {
                    *to = key(*v).max(self.first).min(self.last) - self.first;
                }
            },
        );
    }
}

/// Adds up the tables that `table` makes of shares of the elements, a few for each thread: one for every piece would be new memory
/// again and again. Counts do not depend on who counts.
fn added(pieces: &[&[f32]], table: impl Fn(&[&[f32]]) -> Vec<u64> + Sync + Send) -> Vec<u64> {
    let share = pieces.len().div_ceil(2 * rayon::current_num_threads()).max(1);
    let join = |a: Vec<u64>, b: Vec<u64>| match (a.is_empty(), b.is_empty()) {
        (true, _) => b,
        (_, true) => a,
        _ => a.iter().zip(b).map(|(a, b)| a + b).collect(),
    };
    pieces.par_chunks(share).map(table).reduce(Vec::new, join)
}

/// How many of the elements lie in each part of a range, by the upper bits of their offsets.
fn count_parts(pieces: &[&[f32]], span: Span, parts: usize, low: u32) -> Vec<u64> {
    added(pieces, |pieces| {
        // Counts of 32 bits by turns, side by side (tables a power of two apart would look alike to the CPU's store buffer), and those
        // of 64 bits that they are added to before they overflow.
        let (mut turns, mut counted, mut all) = (vec![[0u32; TURNS]; parts], 0, vec![0u64; parts]);
        let flush = |turns: &mut [[u32; TURNS]], all: &mut [u64]| {
            for (all, turns) in all.iter_mut().zip(turns) {
                *all += std::mem::take(turns).into_iter().map(u64::from).sum::<u64>();
            }
        };
        let mut offsets = [0; BLOCK];
        for block in pieces.iter().flat_map(|piece| piece.chunks(BLOCK)) {
            if counted + block.len() > u32::MAX as usize {
                flush(&mut turns, &mut all);
                counted = 0;
            }
            counted += block.len();
            let offsets = &mut offsets[..block.len()];
            span.offsets(block, offsets);
            let (groups, rest) = offsets.as_chunks::<TURNS>();
            for group in groups {
                for (turn, offset) in group.iter().enumerate() {
                    turns[(offset >> low) as usize][turn] += 1;
                }
            }
            for offset in rest {
                turns[(offset >> low) as usize][0] += 1;
            }
        }
        flush(&mut turns, &mut all);
        all
    })
}

/// How many of the elements of the parts that `which` numbers have each of the lower bits, a table for each of `wanted` parts; `wanted`
/// is the number of the others. First come the elements that count, without a branch that nobody could foretell.
fn count_within(pieces: &[&[f32]], span: Span, which: &[u32], wanted: u32, low: u32) -> Vec<u64> {
    let mask = (1u32 << low) - 1;
    added(pieces, |pieces| {
        let mut all = vec![0u64; (wanted as usize) << low];
        let (mut offsets, mut places) = ([0; BLOCK], [0u32; BLOCK]);
        for block in pieces.iter().flat_map(|piece| piece.chunks(BLOCK)) {
            let offsets = &mut offsets[..block.len()];
            span.offsets(block, offsets);
            let mut found = 0;
            for offset in &*offsets {
                let part = which[(offset >> low) as usize];
                places[found] = part << low | (offset & mask);
                found += usize::from(part != wanted);
            }
            for place in &places[..found] {
                all[*place as usize] += 1;
            }
        }
        all
    })
}

/// The values of some ranks, from 0 in ascending order, all below the number of elements: first the upper half of the bits in which
/// keys of the range differ by counting, then the lower half.
fn select<const N: usize>(tensors: &[&[f32]], ranks: &[u64; N], span: Span) -> [f32; N] {
    /// Where a rank lies in counts, and its rank there.
    fn find(counts: &[u64], mut rank: u64) -> (usize, u64) {
        for (place, count) in counts.iter().enumerate() {
            match rank.checked_sub(*count) {
                Some(left) => rank = left,
                None => return (place, rank),
            }
        }
        (counts.len().saturating_sub(1), 0)
    }
    let pieces: Vec<&[f32]> = tensors.iter().flat_map(|values| values.chunks(COUNTED)).collect();
    let most = span.last - span.first;
    let low = (u32::BITS - most.leading_zeros()) / 2;
    let parts = (most >> low) as usize + 1;
    let upper = count_parts(&pieces, span, parts, low);
    let places = ranks.map(|rank| find(&upper, rank));
    let mut wanted = places.map(|(part, _)| part).to_vec();
    wanted.dedup();
    let nobody = wanted.len() as u32;
    let mut which = vec![nobody; parts];
    (0..).zip(&wanted).for_each(|(i, part)| which[*part] = i);
    let lower = count_within(&pieces, span, &which, nobody, low);
    places.map(|(part, rank)| {
        let from = (which[part] as usize) << low;
        let (rest, _) = find(&lower[from..from + (1 << low)], rank);
        value(span.first + ((part as u32) << low | rest as u32))
    })
}

/// Quantiles of a sample whose values stand for so many elements each; `None` without any.
pub(super) fn weighted<const N: usize>(sample: &mut [(f64, f64)], wanted: [f64; N]) -> Option<[f64; N]> {
    sample.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    let all: f64 = sample.iter().map(|(_, weight)| weight).sum();
    let last = sample.last()?.0;
    Some(wanted.map(|q| {
        let mut before = 0.0;
        let reached = sample.iter().find(|(_, weight)| {
            before += weight;
            before >= q * all
        });
        reached.map_or(last, |(value, _)| *value)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(tensors: &[Vec<f32>]) -> Vec<f64> {
        let mut all: Vec<f64> = tensors.iter().flatten().map(|v| f64::from(*v)).collect();
        all.sort_by(f64::total_cmp);
        all
    }

    #[test]
    fn quantiles_are_those_of_all_elements_sorted() {
        // Values that differ in their last bits only, negative ones, and tensors of very different sizes.
        let large: Vec<f32> = (0..60_000u32)
            .map(|i| f32::from_bits(1.82f32.to_bits() + i.wrapping_mul(2_654_435_761) % 9000))
            .collect();
        let cases: Vec<Vec<Vec<f32>>> = vec![
            vec![large.clone(), vec![-3.0, 0.0, -0.0, 1e-30, 5e8]],
            vec![vec![2.5]],
            vec![vec![], (0..1000).map(|i| (i * 7919 % 1000) as f32 - 500.0).collect()],
            vec![vec![-1.0; 10], vec![-2.0; 5]],
        ];
        for tensors in cases {
            let values: Vec<Values> = tensors.iter().map(|t| Values::F32(t)).collect();
            let found = Spread::of(&values, 1.0).unwrap();
            let all = sorted(&tensors);
            let rank = |q: f64| all[((q * all.len() as f64).ceil() as usize).max(1) - 1];
            assert_eq!(found.quantiles, WANTED.map(rank));
            assert_eq!((found.min, found.max), (all[0], all[all.len() - 1]));
            let negative = all.iter().filter(|v| **v < 0.0).count() as f64 / all.len() as f64;
            assert_eq!((found.negative, found.elements), (negative, all.len() as u64));
            let square = all.iter().map(|v| (v - 1.0) * (v - 1.0)).sum::<f64>() / all.len() as f64;
            assert!((found.rms_error - square.sqrt()).abs() <= 1e-12 * square.sqrt());
        }
    }

    #[test]
    fn a_large_tensor_outweighs_a_small_one() {
        let (large, small) = (vec![1f32; 999], vec![5f32; 1]);
        let spread = Spread::of(&[Values::F32(&small), Values::F32(&large)], 0.0).unwrap();
        assert_eq!(spread.quantiles, [1.0; 5]);
        assert_eq!(spread.max, 5.0);
        let doubles: Vec<f64> = (1..=100).map(f64::from).collect();
        let spread = Spread::of(&[Values::F64(&doubles)], 50.0).unwrap();
        assert_eq!((spread.quantiles, spread.max_error), ([1.0, 25.0, 50.0, 75.0, 99.0], 50.0));
        assert_eq!(Spread::of(&[], 0.0), None);
        assert_eq!(Spread::of(&[Values::F32(&[])], 0.0), None);
    }

    #[test]
    fn one_element_that_is_no_number_shows_in_every_extreme_and_every_mean() {
        // In the lanes, behind them, and in another chunk than the extremes.
        for (length, place) in [(16, 3), (9, 8), (3 * CHUNK, 2 * CHUNK + 5)] {
            let mut values = vec![-1.0f32; length];
            (values[0], values[place]) = (2.0, f32::NAN);
            let doubles: Vec<f64> = values.iter().map(|v| f64::from(*v)).collect();
            for all in
                [[Values::F32(&values), Values::F32(&[1.0])], [Values::F64(&doubles), Values::F64(&[1.0])]]
            {
                let spread = Spread::of(&all, 0.5).unwrap();
                let shown = [spread.min, spread.max, spread.mean, spread.rms_error, spread.max_error];
                assert!(shown.iter().all(|v| v.is_nan()), "{place}: {shown:?}");
                // A quarter is still what a quarter of the elements is below; another tensor is its own.
                assert_eq!(spread.quantiles[1], -1.0);
                assert!(spread.each[0].is_some_and(|r| r.min.is_nan() && r.max.is_nan() && r.mean.is_nan()));
                assert_eq!(spread.each[1], Some(Reached { min: 1.0, mean: 1.0, max: 1.0 }));
                assert!((spread.negative - (length - 2) as f64 / (length + 1) as f64).abs() < 1e-15);
            }
        }
        // Infinities are numbers.
        let spread = Spread::of(&[Values::F64(&[f64::INFINITY, f64::NEG_INFINITY])], 0.0).unwrap();
        assert_eq!(
            (spread.min, spread.max, spread.max_error),
            (f64::NEG_INFINITY, f64::INFINITY, f64::INFINITY)
        );
        let all = [f32::INFINITY, f32::NEG_INFINITY, 1.0];
        let spread = Spread::of(&[Values::F32(&all)], 0.0).unwrap();
        assert_eq!((spread.min, spread.max), (f64::NEG_INFINITY, f64::INFINITY));
    }

    #[test]
    fn keys_keep_the_order_and_come_back() {
        let values = [f32::NEG_INFINITY, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1e30, f32::INFINITY];
        assert!(values.windows(2).all(|pair| key(pair[0]) < key(pair[1])));
        assert!(values.iter().all(|v| value(key(*v)).to_bits() == v.to_bits()));
    }

    #[test]
    fn values_of_a_sample_count_as_often_as_they_stand_for() {
        assert_eq!(
            weighted(&mut [(3.0, 1.0), (1.0, 98.0), (2.0, 1.0)], [0.5, 0.985, 1.0]),
            Some([1.0, 2.0, 3.0])
        );
        assert_eq!(weighted(&mut [], [0.5]), None);
    }
}
