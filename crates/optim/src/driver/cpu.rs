//! The CPU kernel: one pass over memory, all parameters of a step in one parallel region.
//!
//! A step moves (2 + 2·buffers + 1) numbers an element and computes a dozen operations on them, so it is bound by
//! memory bandwidth: AVX2 suffices (AVX-512 for a general power), and the only gain left is to touch every number once.
//! Work is cut into chunks of a fixed size, so that results do not depend on the number of threads; wider vectors round
//! as narrower ones do, so that they do not depend on the CPU either.
use super::slot::{Buffers, Slot};
use crate::device::{LANES, PART, PARTS};
use crate::rule::{Real, Rule, SUMS, Scalars};
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::Cell;

/// Elements a task works on: large enough to hide the cost of a task, small enough to share among many cores.
const CHUNK: usize = PARTS * PART;
/// Below this many elements a parallel region costs more than it saves.
const SERIAL: usize = 64 * 1024;
/// Parameters borrowed at once. Borrowing nests calls, so this bounds the stack (about 1 kB each).
const BORROWED: usize = 256;
/// Half-precision elements converted at a time; five such f32 blocks stay in the L1 cache.
const BLOCK: usize = 1024;

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

/// The gradient of one parameter: contiguous, and of its shape and dtype.
#[derive(Clone)]
pub(super) struct Gradient {
    pub slot: usize,
    pub tensor: Tensor,
}

/// A rule's arithmetic on a chunk of the parameter of the `usize`-th gradient. A call that the compiler cannot see
/// through costs nothing for a chunk, and leaves all around it to be compiled once instead of once a rule.
type Kernel<'k, F> = dyn Fn(usize, &mut [F], &[F], &mut [&mut [F]]) + Sync + 'k;

/// A dtype of parameters.
trait Element: WithDType {
    /// What updates are computed and state is kept in.
    type Compute: Real;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn buffers(buffers: &Buffers) -> &[Vec<Self::Compute>];
    fn buffers_mut(buffers: &mut Buffers) -> &mut [Vec<Self::Compute>];
    /// Applies `kernel` to the elements of a chunk in compute precision.
    fn apply(task: Task<Self>, kernel: &Kernel<Self::Compute>);
    /// One element in compute precision.
    fn compute(self) -> Self::Compute;
}

/// A chunk of one parameter with all that its update touches.
struct Task<'a, E: Element> {
    gradient: usize,
    x: &'a mut [E],
    g: &'a [E],
    state: Vec<&'a mut [E::Compute]>,
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
            fn apply(mut task: Task<Self>, kernel: &Kernel<$t>) {
                kernel(task.gradient, task.x, task.g, &mut task.state);
            }
            #[inline(always)]
            fn compute(self) -> $t {
                self
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
            fn apply(mut task: Task<Self>, kernel: &Kernel<f32>) {
                let (mut wide_x, mut wide_g) = ([0f32; BLOCK], [0f32; BLOCK]);
                for (block, (x, g)) in task.x.chunks_mut(BLOCK).zip(task.g.chunks(BLOCK)).enumerate() {
                    let (start, n) = (block * BLOCK, x.len());
                    x.convert_to_f32_slice(&mut wide_x[..n]);
                    g.convert_to_f32_slice(&mut wide_g[..n]);
                    let mut state: Vec<&mut [f32]> =
                        task.state.iter_mut().map(|s| &mut s[start..start + n]).collect();
                    kernel(task.gradient, &mut wide_x[..n], &wide_g[..n], &mut state);
                    x.convert_from_f32_slice(&wide_x[..n]);
                }
            }
            #[inline(always)]
            fn compute(self) -> f32 {
                f32::from(self)
            }
        }
    };
}
halves!(f16, F16);
halves!(bf16, BF16);

/// Updates all parameters that have a gradient, dtype by dtype; as a rule there is one dtype.
pub(super) fn step(
    slots: &mut [Slot],
    gradients: &[Gradient],
    single: &Kernel<f32>,
    double: &Kernel<f64>,
) -> Result<()> {
    step_dtype::<f32>(slots, gradients, single)?;
    step_dtype::<f64>(slots, gradients, double)?;
    step_dtype::<f16>(slots, gradients, single)?;
    step_dtype::<bf16>(slots, gradients, single)
}

/// The gradients of dtype `E`, each with its place among all.
fn of_dtype<E: Element>(gradients: &[Gradient]) -> Vec<(usize, &Gradient)> {
    gradients.iter().enumerate().filter(|(_, g)| g.tensor.dtype() == E::DTYPE).collect()
}

fn step_dtype<E: Element>(
    slots: &mut [Slot],
    gradients: &[Gradient],
    kernel: &Kernel<E::Compute>,
) -> Result<()> {
    for gradients in of_dtype::<E>(gradients).chunks(BORROWED) {
        let guards: Vec<_> = gradients.iter().map(|(_, g)| g.tensor.storage_and_layout()).collect();
        let grads = guards.iter().map(|(storage, layout)| slice::<E>(storage, layout));
        let grads = grads.collect::<Result<Vec<_>>>()?;
        let vars: Vec<Tensor> =
            gradients.iter().map(|(_, g)| slots[g.slot].var.as_tensor().clone()).collect();
        // Slots in the order of the gradients, each lent once: gradients name ascending, distinct slots.
        let mut lent = slots.iter_mut().enumerate();
        let states: Vec<&mut [Vec<E::Compute>]> = gradients
            .iter()
            .filter_map(|(_, g)| lent.find(|(index, _)| *index == g.slot))
            .map(|(_, slot)| E::buffers_mut(&mut slot.buffers))
            .collect();
        let mut states = Some(states);
        borrow_all(&vars, Vec::new(), &mut |params: Vec<&mut [E]>| {
            let states = states.take().unwrap_or_default();
            let mut tasks = Vec::new();
            for (((x, g), state), (gradient, _)) in params.into_iter().zip(&grads).zip(states).zip(gradients)
            {
                let mut state: Vec<_> = state.iter_mut().map(|s| s.chunks_mut(CHUNK)).collect();
                for (x, g) in x.chunks_mut(CHUNK).zip(g.chunks(CHUNK)) {
                    let state = state.iter_mut().filter_map(Iterator::next).collect();
                    tasks.push(Task { gradient: *gradient, x, g, state });
                }
            }
            if tasks.iter().map(|t| t.x.len()).sum::<usize>() < SERIAL {
                tasks.into_iter().for_each(|task| E::apply(task, kernel));
            } else {
                tasks.into_par_iter().for_each(|task| E::apply(task, kernel));
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The sums of [`Rule::reduce`] over all parameters, in the fixed order of dtypes, parameters and chunks. A parameter at
/// its first step has no past to compare with and is left out.
pub(super) fn reduce<R: Rule>(slots: &[Slot], gradients: &[Gradient], clip: Clip) -> Result<[f64; SUMS]> {
    Ok(total([
        reduce_dtype::<f32, R>(slots, gradients, clip)?,
        reduce_dtype::<f64, R>(slots, gradients, clip)?,
        reduce_dtype::<f16, R>(slots, gradients, clip)?,
        reduce_dtype::<bf16, R>(slots, gradients, clip)?,
    ]))
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

fn reduce_dtype<E: Element, R: Rule>(
    slots: &[Slot],
    gradients: &[Gradient],
    clip: Clip,
) -> Result<[f64; SUMS]> {
    let mut gradients = of_dtype::<E>(gradients);
    gradients.retain(|(_, g)| slots[g.slot].t > 0);
    let grads: Vec<_> = gradients.iter().map(|(_, g)| g.tensor.storage_and_layout()).collect();
    let params: Vec<_> = gradients.iter().map(|(_, g)| slots[g.slot].var.storage_and_layout()).collect();
    let mut tasks = Vec::new();
    for (((of, gradient), (grad, grad_layout)), (param, layout)) in gradients.iter().zip(&grads).zip(&params)
    {
        let (g, x) = (slice::<E>(grad, grad_layout)?, slice::<E>(param, layout)?);
        let buffers = E::buffers(&slots[gradient.slot].buffers);
        for (chunk, (x, g)) in x.chunks(CHUNK).zip(g.chunks(CHUNK)).enumerate() {
            tasks.push((of, x, g, chunk * CHUNK, buffers));
        }
    }
    let clip = clip.round();
    let sums = |(of, x, g, start, buffers)| (of, sums::<E, R>(clip, x, g, start, buffers));
    let chunks: Vec<(&usize, _)> = tasks.into_par_iter().map(sums).collect();
    let of_gradient = chunks.chunk_by(|a, b| a.0 == b.0).map(|chunks| total(chunks.iter().map(|c| c.1)));
    Ok(total(of_gradient))
}

/// The sums over one chunk, whose elements' state begins at `start` of each buffer.
fn sums<E: Element, R: Rule>(
    clip: ClipIn<E::Compute>,
    x: &[E],
    g: &[E],
    start: usize,
    buffers: &[Vec<E::Compute>],
) -> [f64; SUMS] {
    let state: Vec<&[E::Compute]> = buffers.iter().map(|b| &b[start..start + x.len()]).collect();
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
        let share = |x: E, g: E, state: [E::Compute; B]| {
            R::reduce(x.compute().to_f64(), clip.apply(g.compute()).to_f64(), &state.map(Real::to_f64))
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

/// Calls `f`, compiled for this CPU's vectors. Mark the closure `#[inline(always)]`, or it is compiled on its own.
#[inline(always)]
fn vectorized<T>(f: impl FnOnce() -> T) -> T {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide<T>(f: impl FnOnce() -> T) -> T {
            f()
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2, which is all that `wide` asks for.
            return unsafe { wide(f) };
        }
    }
    f()
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
                    let g = g.compute().to_f64();
                    *lane += g * g;
                }
            }
            for (lane, g) in lanes.iter_mut().zip(tail) {
                let g = g.compute().to_f64();
                *lane += g * g;
            }
            lanes.iter().sum::<f64>()
        }
        let partial = |chunk: &[E]| {
            vectorized(
                #[inline(always)]
                || chunk.chunks(PART).map(part).sum::<f64>(),
            )
        };
        Ok(if data.len() < SERIAL {
            data.chunks(CHUNK).map(partial).sum()
        } else {
            data.par_chunks(CHUNK).map(partial).collect::<Vec<_>>().into_iter().sum()
        })
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
fn slice<'a, E: Element>(storage: &'a Storage, layout: &Layout) -> Result<&'a [E]> {
    let Storage::Cpu(storage) = storage else { candle_core::bail!("expected a tensor on the CPU") };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice()?[start..end]),
        None => candle_core::bail!("expected contiguous data, found strides {:?}", layout.stride()),
    }
}

/// Holds the write locks of all `vars` at once and calls `f` with their elements.
///
/// candle lends a storage mutably only inside an in-place op, so the calls nest: each op borrows one parameter
/// and calls the next.
fn borrow_all<E: Element>(
    vars: &[Tensor],
    held: Vec<&mut [E]>,
    f: &mut dyn FnMut(Vec<&mut [E]>) -> Result<()>,
) -> Result<()> {
    let Some((var, rest)) = vars.split_first() else { return f(held) };
    let next = move |slice: &mut [E]| {
        let mut held: Vec<&mut [E]> = held;
        held.push(slice);
        borrow_all(rest, held, f)
    };
    var.inplace_op1(&Borrow(Cell::new(Some(Box::new(next)))))
}

type Borrower<'f, E> = Box<dyn FnOnce(&mut [E]) -> Result<()> + 'f>;

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
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
                #[allow(clippy::too_many_arguments)]
                fn wider<R: Rule, F: Real>(
                    s: &<R::Scalars as Scalars>::In<F>, clip: ClipIn<F>, x: &mut [F], g: &[F], $($buffer: &mut [F]),*
                ) {
                    body::<R, F>(s, clip, x, g, $($buffer),*);
                }
                #[target_feature(enable = "avx2")]
                #[allow(clippy::too_many_arguments)]
                fn wide<R: Rule, F: Real>(
                    s: &<R::Scalars as Scalars>::In<F>, clip: ClipIn<F>, x: &mut [F], g: &[F], $($buffer: &mut [F]),*
                ) {
                    body::<R, F>(s, clip, x, g, $($buffer),*);
                }
                let has_512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl");
                if has_512 {
                    // SAFETY: the CPU has the three sets of AVX-512 that `wider` asks for.
                    return unsafe { wider::<R, F>(s, clip, x, g, $($buffer),*) };
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the CPU has AVX2, which is all that `wide` asks for.
                    return unsafe { wide::<R, F>(s, clip, x, g, $($buffer),*) };
                }
            }
            body::<R, F>(s, clip, x, g, $($buffer),*);
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
