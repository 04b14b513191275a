//! The CPU kernel: one pass over memory, shared among the threads of the pool.
//!
//! A step moves (2 + 2·buffers + 1) numbers an element and computes a dozen operations on them, so it is bound by
//! memory bandwidth: AVX2 suffices (AVX-512 for a general power), and the only gain left is to touch every number once.
//! An element's update does not depend on the piece it is in, and sums are taken over chunks of a fixed size, so that
//! results do not depend on the number of threads; wider vectors round as narrower ones do, so that they do not depend on
//! the CPU either.
use super::slot::{Buffers, Slot};
use super::team::{Parts, Team};
use crate::Others;
use crate::device::{LANES, PART, PARTS};
use crate::precision::{Narrow, Rounding};
use crate::rule::{MAX_BUFFERS, Real, Rule, SUMS, Scalars, Share};
use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use taper_kernels::Isa;

/// Elements a sum is taken over at a time.
const CHUNK: usize = PARTS * PART;
/// Below this many elements sharing costs more than it saves.
const SERIAL: usize = 64 * 1024;
/// The fewest and the most elements of a piece: large enough to hide the cost of handing it over, small enough to share among
/// many cores.
const PIECE: (usize, usize) = (4096, 32 * 1024);
/// Half-precision elements converted at a time; five such f32 blocks stay in the L1 cache.
const BLOCK: usize = 1024;

/// Who works on that many elements.
pub(crate) fn team(elements: usize) -> Team {
    Team::new(elements >= SERIAL)
}

/// Scaling and clamping of gradients.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clip {
    pub scale: f64,
    pub limit: f64,
}

#[derive(Clone, Copy)]
struct ClipIn<F> {
    scale: F,
    limit: F,
}

impl Clip {
    fn round<F: Real>(self) -> ClipIn<F> {
        ClipIn { scale: F::from_f64(self.scale), limit: F::from_f64(self.limit) }
    }
}

impl<F: Real> ClipIn<F> {
    #[inline(always)]
    fn apply(self, g: F) -> F {
        (g * self.scale).at_most(self.limit).at_least(-self.limit)
    }
}

/// The gradient of one parameter: contiguous, and of its shape.
#[derive(Clone)]
pub(super) struct Gradient {
    pub slot: usize,
    pub tensor: Tensor,
}

/// A rule's arithmetic on a piece of the parameter of the `usize`-th gradient. A call that the compiler cannot see
/// through costs nothing for a piece, and leaves all around it to be compiled once instead of once a rule.
type Kernel<'k, F> = dyn Fn(usize, &mut [F], &[F], &mut [&mut [F]]) + Sync + 'k;

/// A gradient as it lies in memory: of the parameter's dtype, or in the precision that updates are computed in.
#[derive(Clone, Copy)]
enum Grad<'a, E: Element> {
    Same(&'a [E]),
    Wide(&'a [E::Compute]),
}

/// A dtype of parameters.
pub(crate) trait Element: WithDType {
    /// What updates are computed and state is kept in.
    type Compute: Real + WithDType;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn buffers(buffers: &Buffers) -> &[Vec<Self::Compute>];
    fn buffers_mut(buffers: &mut Buffers) -> &mut [Vec<Self::Compute>];
    /// Applies the kernel to a piece.
    fn apply(piece: Piece<Self>, kernel: &Kernel<Self::Compute>);
    /// One element in compute precision.
    fn compute(self) -> Self::Compute;
    /// Whether no element times `scale` is infinite or no number.
    fn all_finite(elements: &[Self], scale: f64) -> bool;
}

/// A piece of one parameter with all that its update touches.
pub(crate) struct Piece<'a, E: Element> {
    gradient: usize,
    /// The place of its first element in the parameter.
    start: usize,
    x: &'a mut [E],
    /// The parameter in compute precision, where one is kept.
    master: Option<&'a mut [E::Compute]>,
    g: Grad<'a, E>,
    state: &'a mut [&'a mut [E::Compute]],
    rounding: Rounding,
}

macro_rules! full {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            type Compute = $t;
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(data) = storage { Some(data) } else { None }
            }
            fn buffers(buffers: &Buffers) -> &[Vec<$t>] {
                if let Buffers::$variant(data) = buffers { data } else { &[] }
            }
            fn buffers_mut(buffers: &mut Buffers) -> &mut [Vec<$t>] {
                if let Buffers::$variant(data) = buffers { data } else { &mut [] }
            }
            fn apply(piece: Piece<Self>, kernel: &Kernel<$t>) {
                let (Grad::Same(g) | Grad::Wide(g)) = piece.g;
                kernel(piece.gradient, piece.x, g, piece.state);
            }
            #[inline(always)]
            fn compute(self) -> $t {
                self
            }
            fn all_finite(elements: &[Self], scale: f64) -> bool {
                let scale = scale as $t;
                // The bits of magnitudes order as the magnitudes do, with infinity and NaN above all numbers.
                const INFINITE: u64 = <$t>::INFINITY.to_bits() as u64;
                vectorized(
                    #[inline(always)]
                    || elements.iter().fold(0, |max, g| max.max((g * scale).abs().to_bits())) as u64,
                ) < INFINITE
            }
        }
    };
}
full!(f32, F32);
full!(f64, F64);

macro_rules! halves {
    ($t:ty, $variant:ident) => {
        impl Element for $t {
            type Compute = f32;
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                if let CpuStorage::$variant(data) = storage { Some(data) } else { None }
            }
            fn buffers(buffers: &Buffers) -> &[Vec<f32>] {
                if let Buffers::F32(data) = buffers { data } else { &[] }
            }
            fn buffers_mut(buffers: &mut Buffers) -> &mut [Vec<f32>] {
                if let Buffers::F32(data) = buffers { data } else { &mut [] }
            }
            fn apply(piece: Piece<Self>, kernel: &Kernel<f32>) {
                let Piece { gradient, start, x, mut master, g, state, rounding } = piece;
                let (mut wide_x, mut wide_g) = ([0f32; BLOCK], [0f32; BLOCK]);
                for (block, x) in x.chunks_mut(BLOCK).enumerate() {
                    let range = block * BLOCK..block * BLOCK + x.len();
                    let g = match g {
                        Grad::Wide(g) => &g[range.clone()],
                        Grad::Same(g) => {
                            let wide = &mut wide_g[..x.len()];
                            g[range.clone()].convert_to_f32_slice(wide);
                            wide
                        }
                    };
                    let wide = match &mut master {
                        Some(master) => &mut master[range.clone()],
                        None => {
                            let wide = &mut wide_x[..x.len()];
                            x.convert_to_f32_slice(wide);
                            wide
                        }
                    };
                    let mut block: [&mut [f32]; MAX_BUFFERS] = Default::default();
                    let block = &mut block[..state.len()];
                    block.iter_mut().zip(&mut *state).for_each(|(b, s)| *b = &mut s[range.clone()]);
                    kernel(gradient, wide, g, block);
                    match rounding {
                        Rounding::Nearest => x.convert_from_f32_slice(wide),
                        Rounding::Stochastic { seed } => {
                            <$t>::round_stochastically(wide, x, seed, (start + range.start) as u64)
                        }
                    }
                }
            }
            #[inline(always)]
            fn compute(self) -> f32 {
                f32::from(self)
            }
            fn all_finite(elements: &[Self], scale: f64) -> bool {
                const INFINITE: u16 = <$t>::INFINITY.to_bits();
                if scale.abs() <= 1.0 {
                    let largest = elements.iter().fold(0, |max, g| max.max(g.to_bits() & 0x7fff));
                    return largest < INFINITE;
                }
                let mut wide = [0f32; BLOCK];
                elements.chunks(BLOCK).all(|block| {
                    block.convert_to_f32_slice(&mut wide[..block.len()]);
                    f32::all_finite(&wide[..block.len()], scale)
                })
            }
        }
    };
}
halves!(f16, F16);
halves!(bf16, BF16);

/// Updates all parameters that have a gradient, one lock at a time. `rounding` is that of the `usize`-th gradient.
pub(super) fn step(
    slots: &mut [Slot],
    gradients: &[Gradient],
    rounding: &dyn Fn(usize) -> Rounding,
    single: &Kernel<f32>,
    double: &Kernel<f64>,
) -> Result<()> {
    let team = team(gradients.iter().map(|g| g.tensor.elem_count()).sum());
    for (i, gradient) in gradients.iter().enumerate() {
        let slot = &mut slots[gradient.slot];
        match slot.var.dtype() {
            DType::F64 => step_one::<f64>(&team, slot, (i, gradient), rounding(i), double)?,
            DType::F16 => step_one::<f16>(&team, slot, (i, gradient), rounding(i), single)?,
            DType::BF16 => step_one::<bf16>(&team, slot, (i, gradient), rounding(i), single)?,
            _ => step_one::<f32>(&team, slot, (i, gradient), rounding(i), single)?,
        }
    }
    Ok(())
}

fn step_one<E: Element>(
    team: &Team,
    slot: &mut Slot,
    (index, gradient): (usize, &Gradient),
    rounding: Rounding,
    kernel: &Kernel<E::Compute>,
) -> Result<()> {
    let (storage, layout) = gradient.tensor.storage_and_layout();
    let grad = match gradient.tensor.dtype() == E::DTYPE {
        true => Grad::<E>::Same(slice(&storage, layout)?),
        false => Grad::Wide(slice(&storage, layout)?),
    };
    let state: Vec<_> = E::buffers_mut(&mut slot.buffers).iter_mut().map(|b| Parts::new(b)).collect();
    // Master weights of f32 are themselves the parameter; those of halves are one more buffer.
    let master = slot.master.as_mut().and_then(|m| E::buffers_mut(m).first_mut()).map(|m| Parts::new(m));
    borrow::<E>(&slot.var, &mut |x| {
        let len = x.len();
        let x = Parts::new(x);
        team.run(len, PIECE, &|range| {
            let mut parts: [&mut [E::Compute]; MAX_BUFFERS] = Default::default();
            let parts = &mut parts[..state.len()];
            // SAFETY: the ranges of a run do not overlap, and parameter, master and state are borrowed until it ends.
            let (x, master) = unsafe {
                parts.iter_mut().zip(&state).for_each(|(part, s)| *part = s.part(range.clone()));
                (x.part(range.clone()), master.as_ref().map(|m| m.part(range.clone())))
            };
            let g = match grad {
                Grad::Same(g) => Grad::Same(&g[range.clone()]),
                Grad::Wide(g) => Grad::Wide(&g[range.clone()]),
            };
            E::apply(
                Piece { gradient: index, start: range.start, x, master, g, state: parts, rounding },
                kernel,
            );
        });
    })
}

/// The elements of a gradient, whatever their dtype.
enum Elements<'a> {
    F32(&'a [f32]),
    F64(&'a [f64]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    fn of(storage: &'a Storage, layout: &Layout, dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F64 => Self::F64(slice(storage, layout)?),
            DType::F16 => Self::F16(slice(storage, layout)?),
            DType::BF16 => Self::BF16(slice(storage, layout)?),
            _ => Self::F32(slice(storage, layout)?),
        })
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::F64(data) => data.len(),
            Self::F16(data) => data.len(),
            Self::BF16(data) => data.len(),
        }
    }

    fn all_finite(&self, range: Range<usize>, scale: f64) -> bool {
        match self {
            Self::F32(data) => f32::all_finite(&data[range], scale),
            Self::F64(data) => f64::all_finite(&data[range], scale),
            Self::F16(data) => f16::all_finite(&data[range], scale),
            Self::BF16(data) => bf16::all_finite(&data[range], scale),
        }
    }
}

/// The first of the gradients with an element that, times `scale`, is infinite or no number. All of them are one run of the
/// team, as if they lay one after the other: nobody waits at the end of each. It goes from the last to the first: a step that
/// follows finds the first ones in the cache.
pub(crate) fn not_finite<'a>(
    gradients: impl IntoIterator<Item = &'a Tensor>,
    scale: f64,
) -> Result<Option<usize>> {
    let gradients: Vec<&Tensor> = gradients.into_iter().collect();
    let guards: Vec<_> = gradients.iter().map(|g| g.storage_and_layout()).collect();
    let elements =
        gradients.iter().zip(&guards).map(|(g, (storage, layout))| Elements::of(storage, layout, g.dtype()));
    let elements = elements.collect::<Result<Vec<_>>>()?;
    // Where each ends in the row of all.
    let ends: Vec<usize> = elements
        .iter()
        .scan(0, |end, elements| {
            *end += elements.len();
            Some(*end)
        })
        .collect();
    let total = ends.last().copied().unwrap_or(0);
    let first = AtomicUsize::new(usize::MAX);
    team(total).run(total, PIECE, &|range| {
        let range = total - range.end..total - range.start;
        let begin = ends.partition_point(|end| *end <= range.start);
        for (i, elements) in elements.iter().enumerate().skip(begin) {
            let start = ends[i] - elements.len();
            if start >= range.end || i > first.load(Ordering::Relaxed) {
                break;
            }
            let own = range.start.max(start) - start..range.end.min(ends[i]) - start;
            if !elements.all_finite(own, scale) {
                first.fetch_min(i, Ordering::Relaxed);
            }
        }
    });
    let first = first.into_inner();
    Ok((first != usize::MAX).then_some(first))
}

/// The sums of a rule's reduction for each gradient; `None` for those left out.
pub(super) fn reduce<R: Rule>(
    slots: &[Slot],
    gradients: &[Gradient],
    clip: Clip,
    with: &dyn Fn(&Slot) -> bool,
) -> Result<Vec<Option<[f64; SUMS]>>> {
    let team = team(gradients.iter().map(|g| g.tensor.elem_count()).sum());
    let one = |gradient: &Gradient| {
        let slot = &slots[gradient.slot];
        Ok(match slot.var.dtype() {
            _ if !with(slot) => None,
            DType::F64 => Some(reduce_one::<f64, R>(&team, slot, &gradient.tensor, clip)?),
            DType::F16 => Some(reduce_one::<f16, R>(&team, slot, &gradient.tensor, clip)?),
            DType::BF16 => Some(reduce_one::<bf16, R>(&team, slot, &gradient.tensor, clip)?),
            _ => Some(reduce_one::<f32, R>(&team, slot, &gradient.tensor, clip)?),
        })
    };
    gradients.iter().map(one).collect()
}

/// What a parameter of a dtype adds to sums over all; `None` where it is left out.
pub(super) type Term = (DType, Option<[f64; SUMS]>);

const ORDER: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Sums over all parameters: in the order of dtypes, then of parameters.
pub(super) fn together(terms: &[Term]) -> [f64; SUMS] {
    total(ORDER.map(|dtype| total(terms.iter().filter(|(of, _)| *of == dtype).filter_map(|(_, sums)| *sums))))
}

/// The terms of all parts, in the order of the parameters: those left out add nothing and are not said.
pub(super) fn all_terms(others: &mut Others, mine: &[Term]) -> crate::Result<Vec<Term>> {
    const BYTES: usize = 1 + 8 * SUMS;
    let mut words = Vec::with_capacity(mine.len() * BYTES);
    for (dtype, sums) in mine {
        if let (Some(place), Some(sums)) = (ORDER.iter().position(|known| known == dtype), sums) {
            words.push(place as u8);
            words.extend(sums.iter().flat_map(|sum| sum.to_le_bytes()));
        }
    }
    let mut all = Vec::new();
    for said in others.ask(&words)? {
        for term in said.chunks(BYTES) {
            let dtype = term.first().and_then(|place| ORDER.get(usize::from(*place)));
            let (Some(dtype), BYTES) = (dtype, term.len()) else {
                return Err(
                    candle_core::Error::msg("another part of the parameters has no sums to share").into()
                );
            };
            let sum = |i: usize| term[1 + 8 * i..][..8].try_into().map_or(f64::NAN, f64::from_le_bytes);
            all.push((*dtype, Some(std::array::from_fn(sum))));
        }
    }
    Ok(all)
}

/// Adds sums up in their order.
#[inline(always)]
pub(super) fn total(sums: impl IntoIterator<Item = [f64; SUMS]>) -> [f64; SUMS] {
    let mut total = [0.0; SUMS];
    for sums in sums {
        total.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    total
}

fn reduce_one<E: Element, R: Rule>(
    team: &Team,
    slot: &Slot,
    grad: &Tensor,
    clip: Clip,
) -> Result<[f64; SUMS]> {
    let grad = grad.to_dtype(E::DTYPE)?;
    let (grad_storage, grad_layout) = grad.storage_and_layout();
    let (storage, layout) = slot.var.storage_and_layout();
    let (g, x) = (slice::<E>(&grad_storage, grad_layout)?, slice::<E>(&storage, layout)?);
    let buffers = E::buffers(&slot.buffers);
    let clip = clip.round();
    Ok(total(by_chunk(team, x.len(), |range| sums::<E, R>(clip, x, g, range, buffers))))
}

const fn share<R: Rule>() -> Option<Share> {
    match R::REDUCE {
        Some(reduce) => Some(reduce.share()),
        None => None,
    }
}

/// What `of` makes of each chunk, in their order.
fn by_chunk<T: Copy + Default + Send>(
    team: &Team,
    elements: usize,
    of: impl Fn(Range<usize>) -> T + Sync,
) -> Vec<T> {
    let mut results = vec![T::default(); elements.div_ceil(CHUNK)];
    let parts = Parts::new(&mut results);
    team.run(elements.div_ceil(CHUNK), (1, 8), &|chunks| {
        // SAFETY: the ranges of a run do not overlap, and `results` is borrowed until it ends.
        let results = unsafe { parts.part(chunks.clone()) };
        for (result, chunk) in results.iter_mut().zip(chunks) {
            *result = of(chunk * CHUNK..((chunk + 1) * CHUNK).min(elements));
        }
    });
    results
}

/// The sums over one chunk.
fn sums<E: Element, R: Rule>(
    clip: ClipIn<E::Compute>,
    x: &[E],
    g: &[E],
    range: Range<usize>,
    buffers: &[Vec<E::Compute>],
) -> [f64; SUMS] {
    let (x, g) = (&x[range.clone()], &g[range.clone()]);
    let state: Vec<&[E::Compute]> = buffers.iter().map(|b| &b[range.clone()]).collect();
    match state[..] {
        [] if const { has::<R>(0) } => sums_of::<E, R, 0>(clip, x, g, []),
        [a] if const { has::<R>(1) } => sums_of::<E, R, 1>(clip, x, g, [a]),
        [a, b] if const { has::<R>(2) } => sums_of::<E, R, 2>(clip, x, g, [a, b]),
        [a, b, c] if const { has::<R>(3) } => sums_of::<E, R, 3>(clip, x, g, [a, b, c]),
        [a, b, c, d] if const { has::<R>(4) } => sums_of::<E, R, 4>(clip, x, g, [a, b, c, d]),
        _ => unreachable!("`Optim::with_groups` refuses a rule whose buffers are outside its BUFFERS"),
    }
}

fn sums_of<E: Element, R: Rule, const B: usize>(
    clip: ClipIn<E::Compute>,
    x: &[E],
    g: &[E],
    state: [&[E::Compute]; B],
) -> [f64; SUMS] {
    /// Independent lanes, so that the additions of a part need not wait for each other.
    #[inline(always)]
    fn part<E: Element, R: Rule, const B: usize>(
        clip: ClipIn<E::Compute>,
        x: &[E],
        g: &[E],
        state: [&[E::Compute]; B],
    ) -> [f64; SUMS] {
        // A constant, so that it is inlined like the function it is.
        let of = const { share::<R>() };
        let share = |x: E, g: E, state: [E::Compute; B]| match of {
            Some(of) => of(widen(x.compute()), widen(clip.apply(g.compute())), &state.map(widen)),
            None => [0.0; SUMS],
        };
        let mut lanes = [[0.0f64; LANES]; SUMS];
        let ((blocks, tail), (g_blocks, g_tail)) = (x.as_chunks::<LANES>(), g.as_chunks::<LANES>());
        let n = blocks.len();
        let (g_blocks, states) = (&g_blocks[..n], state.map(|s| &s.as_chunks::<LANES>().0[..n]));
        for i in 0..n {
            let (x, g, state) = (&blocks[i], &g_blocks[i], states.map(|s| &s[i]));
            for lane in 0..LANES {
                let shares = share(x[lane], g[lane], state.map(|s| s[lane]));
                for (lanes, share) in lanes.iter_mut().zip(shares) {
                    lanes[lane] += share;
                }
            }
        }
        for (lane, (x, g)) in tail.iter().zip(g_tail).enumerate() {
            let shares = share(*x, *g, state.map(|s| s[n * LANES + lane]));
            lanes.iter_mut().zip(shares).for_each(|(lanes, share)| lanes[lane] += share);
        }
        lanes.map(|lane| lane.iter().sum())
    }
    vectorized(
        #[inline(always)]
        || {
            total(x.chunks(PART).zip(g.chunks(PART)).enumerate().map(|(i, (x, g))| {
                part::<E, R, B>(clip, x, g, state.map(|s| &s[i * PART..i * PART + x.len()]))
            }))
        },
    )
}

#[inline(always)]
fn widen<F: Real>(x: F) -> f64 {
    x.to_f64()
}

/// What passes are compiled for: all of them round alike, so that a name which is none, refused by whoever computes
/// otherwise, changes nothing here.
fn isa() -> Isa {
    Isa::detect().unwrap_or(Isa::PORTABLE)
}

/// Calls `f`, compiled for this CPU's vectors. Mark the closure `#[inline(always)]`, or it is compiled on its own.
#[inline(always)]
pub(crate) fn vectorized<T>(f: impl FnOnce() -> T) -> T {
    taper_kernels::vectorize(isa(), f)
}

/// The sum of squares of a gradient, in the fixed order of chunks.
pub(crate) fn sum_of_squares(grad: &Tensor) -> Result<f64> {
    fn typed<E: Element>(grad: &Tensor) -> Result<f64> {
        let (storage, layout) = grad.storage_and_layout();
        let data = slice::<E>(&storage, layout)?;
        #[inline(always)]
        fn part<E: Element>(part: &[E]) -> f64 {
            let mut lanes = [0.0f64; LANES];
            let (blocks, tail) = part.as_chunks::<LANES>();
            for block in blocks {
                for (lane, g) in lanes.iter_mut().zip(block) {
                    let g = widen(g.compute());
                    *lane += g * g;
                }
            }
            for (lane, g) in lanes.iter_mut().zip(tail) {
                let g = widen(g.compute());
                *lane += g * g;
            }
            lanes.iter().sum::<f64>()
        }
        let partial = |range: Range<usize>| {
            vectorized(
                #[inline(always)]
                || data[range].chunks(PART).map(part).sum::<f64>(),
            )
        };
        Ok(by_chunk(&team(data.len()), data.len(), partial).into_iter().sum())
    }
    let grad = grad.contiguous()?;
    match grad.dtype() {
        candle_core::DType::F32 => typed::<f32>(&grad),
        candle_core::DType::F64 => typed::<f64>(&grad),
        candle_core::DType::F16 => typed::<f16>(&grad),
        candle_core::DType::BF16 => typed::<bf16>(&grad),
        other => candle_core::bail!("expected a gradient of a float dtype, found {other:?}"),
    }
}

/// The elements of a contiguous tensor.
pub(crate) fn slice<'a, E: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [E]> {
    let Storage::Cpu(storage) = storage else { candle_core::bail!("expected a tensor on the CPU") };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice()?[start..end]),
        None => candle_core::bail!("expected contiguous data, found strides {:?}", layout.stride()),
    }
}

/// Holds the write lock of a parameter and calls `f` with its elements: candle lends a storage mutably only inside an
/// in-place op.
pub(crate) fn borrow<E: Element>(var: &Tensor, f: &mut dyn FnMut(&mut [E])) -> Result<()> {
    var.inplace_op1(&Borrow(Cell::new(Some(f))))
}

type Borrower<'f, E> = &'f mut dyn FnMut(&mut [E]);

struct Borrow<'f, E>(Cell<Option<Borrower<'f, E>>>);

impl<E: Element> candle_core::InplaceOp1 for Borrow<'_, E> {
    fn name(&self) -> &'static str {
        "borrow-parameter"
    }
    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let (Some((start, end)), Some(f)) = (layout.contiguous_offsets(), self.0.take()) else {
            candle_core::bail!("expected a contiguous parameter, found strides {:?}", layout.stride())
        };
        match E::slice_mut(storage) {
            Some(data) => f(&mut data[start..end]),
            None => candle_core::bail!("expected a parameter of dtype {:?}", E::DTYPE),
        }
        Ok(())
    }
}

/// Whether a rule may have that many buffers.
const fn has<R: Rule>(buffers: usize) -> bool {
    R::BUFFERS.0 <= buffers && buffers <= R::BUFFERS.1
}

/// Applies the rule to every element of a chunk.
pub(super) fn kernel<R: Rule, F: Real>(
    s: &<R::Scalars as Scalars>::In<F>,
    clip: Clip,
    x: &mut [F],
    g: &[F],
    state: &mut [&mut [F]],
) {
    let clip = clip.round();
    // The conditions are constants: a rule's kernels for other numbers of buffers are never compiled.
    match state {
        [] if const { has::<R>(0) } => pass0::<R, F>(s, clip, x, g),
        [a] if const { has::<R>(1) } => pass1::<R, F>(s, clip, x, g, a),
        [a, b] if const { has::<R>(2) } => pass2::<R, F>(s, clip, x, g, a, b),
        [a, b, c] if const { has::<R>(3) } => pass3::<R, F>(s, clip, x, g, a, b, c),
        [a, b, c, d] if const { has::<R>(4) } => pass4::<R, F>(s, clip, x, g, a, b, c, d),
        _ => unreachable!("`Optim::with_groups` refuses a rule whose buffers are outside its BUFFERS"),
    }
}

/// One function for each number of buffers: only slices that are arguments of their own are known not to
/// overlap, which the vectoriser needs.
macro_rules! passes {
    ($($pass:ident($($buffer:ident $new:ident),*);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        fn $pass<R: Rule, F: Real>(
            s: &<R::Scalars as Scalars>::In<F>, clip: ClipIn<F>, x: &mut [F], g: &[F], $($buffer: &mut [F]),*
        ) {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body<R: Rule, F: Real>(
                s: &<R::Scalars as Scalars>::In<F>, clip: ClipIn<F>, x: &mut [F], g: &[F], $($buffer: &mut [F]),*
            ) {
                let n = x.len();
                let g = &g[..n];
                $(let $buffer = &mut $buffer[..n];)*
                for i in 0..n {
                    let mut state = [$($buffer[i]),*];
                    x[i] = R::update(s, x[i], clip.apply(g[i]), &mut state);
                    let [$($new),*] = state;
                    $($buffer[i] = $new;)*
                }
            }
            vectorized(
                #[inline(always)]
                || body::<R, F>(s, clip, x, g, $($buffer),*),
            );
        }
    )*};
}
passes! {
    pass0();
    pass1(a a2);
    pass2(a a2, b b2);
    pass3(a a2, b b2, c c2);
    pass4(a a2, b b2, c c2, d d2);
}
