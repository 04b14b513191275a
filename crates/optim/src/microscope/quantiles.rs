//! True quantiles over all elements of many tensors: selection by the bits of numbers, without sorting them.
use crate::driver::cpu::vectorized;
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
    /// The smallest.
    pub min: f64,
    /// The mean.
    pub mean: f64,
    /// The largest.
    pub max: f64,
}

/// A quantity over all elements of all parameters: each element counts once, so that large tensors weigh more.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    /// How many elements there are.
    pub elements: u64,
    /// The smallest.
    pub min: f64,
    /// The 1 %, 25 %, 50 %, 75 % and 99 % quantiles (nearest rank), exact.
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
            Some(singles) => select(&singles, &WANTED.map(rank)).map(f64::from),
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
        Self {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            sum: self.sum + other.sum,
            square: self.square + other.square,
            negative: self.negative + other.negative,
        }
    }
}

fn moments<T: Copy + Into<f64> + Sync>(values: &[T], centre: f64) -> Option<Moments> {
    const LANES: usize = 8;
    let chunk = |chunk: &[T]| {
        vectorized(
            #[inline(always)]
            || {
                let (mut min, mut max) = ([f64::INFINITY; LANES], [f64::NEG_INFINITY; LANES]);
                let (mut sum, mut square) = ([0.0; LANES], [0.0; LANES]);
                let mut take = |i: usize, v: T| {
                    let v: f64 = v.into();
                    min[i] = if v < min[i] { v } else { min[i] };
                    max[i] = if v > max[i] { v } else { max[i] };
                    sum[i] += v;
                    square[i] += (v - centre) * (v - centre);
                };
                let (groups, tail) = chunk.as_chunks::<LANES>();
                for group in groups {
                    for (i, v) in group.iter().enumerate() {
                        take(i, *v);
                    }
                }
                tail.iter().enumerate().for_each(|(i, v)| take(i, *v));
                let min = min.into_iter().fold(f64::INFINITY, f64::min);
                // Hardly ever are there any to count.
                let below = || chunk.iter().filter(|v| Into::<f64>::into(**v) < 0.0).count() as u64;
                Moments {
                    min,
                    max: max.into_iter().fold(f64::NEG_INFINITY, f64::max),
                    sum: sum.into_iter().sum(),
                    square: square.into_iter().sum(),
                    negative: if min < 0.0 { below() } else { 0 },
                }
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

/// The bits of keys that are counted at a time: how far they are shifted, and how many. Tables of that many counts stay in the L1
/// cache.
const LEVELS: [(u32, u32); 3] = [(21, 11), (10, 11), (0, 10)];
/// Tables that neighbours are counted in by turns: elements that are alike would wait for each other's count.
const TURNS: usize = 4;
/// Elements counted at a time.
const COUNTED: usize = 1 << 16;

/// The values of some ranks, from 0, all below the number of elements: by counting the first bits of all keys, then the next ones of
/// those keys that begin as the wanted ones do.
fn select<const N: usize>(tensors: &[&[f32]], ranks: &[u64; N]) -> [f32; N] {
    // One list of all pieces: then there are about as many tables as threads, not as tensors.
    let pieces: Vec<&[f32]> = tensors.iter().flat_map(|values| values.chunks(COUNTED)).collect();
    let (mut begins, mut left) = ([0u32; N], *ranks);
    for (shift, bits) in LEVELS {
        let mut wanted = begins.to_vec();
        wanted.dedup();
        let size = 1usize << bits;
        let count = |mut counts: Vec<u64>, piece: &&[f32]| {
            for (i, v) in piece.iter().enumerate() {
                let key = key(*v);
                // Before the first bits there is nothing to begin with.
                let begin = key.checked_shr(shift + bits).unwrap_or(0);
                if let Some(which) = wanted.iter().position(|wanted| *wanted == begin) {
                    let digit = (key >> shift) as usize & (size - 1);
                    counts[(which * TURNS + i % TURNS) * size + digit] += 1;
                }
            }
            counts
        };
        let join = |a: Vec<u64>, b: Vec<u64>| match (a.is_empty(), b.is_empty()) {
            (true, _) => b,
            (_, true) => a,
            _ => a.iter().zip(b).map(|(a, b)| a + b).collect(),
        };
        let zeros = || vec![0u64; wanted.len() * TURNS * size];
        let counts = pieces.par_iter().fold(zeros, count).reduce(Vec::new, join);
        for (begin, left) in begins.iter_mut().zip(&mut left) {
            let which = wanted.iter().position(|wanted| wanted == begin).unwrap_or(0);
            let of = |digit: usize| -> u64 {
                (0..TURNS).filter_map(|turn| counts.get((which * TURNS + turn) * size + digit)).sum()
            };
            let mut digit = 0;
            while digit + 1 < size && *left >= of(digit) {
                *left -= of(digit);
                digit += 1;
            }
            *begin = *begin << bits | digit as u32;
        }
    }
    begins.map(value)
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
