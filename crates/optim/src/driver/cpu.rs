//! The CPU kernel: one pass over memory, all parameters of a step in one parallel region.
//!
//! A step moves (2 + 2·buffers + 1) numbers an element and computes a dozen operations on them, so it is bound by
//! memory bandwidth: AVX2 suffices, and the only gain left is to touch every number once. Work is cut into chunks
//! of a fixed size, so that results do not depend on the number of threads.
use super::{Buffers, Slot};
use crate::rule::{MAX_BUFFERS, Real, Rule, SUMS, Scalars};
use candle_core::{CpuStorage, Layout, Result, Storage, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;
use std::cell::Cell;

/// Elements a task works on: large enough to hide the cost of a task, small enough to share among many cores.
const CHUNK: usize = 32 * 1024;
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

impl<F: Real> ClipIn<F> {
    #[inline(always)]
    fn apply(self, g: F) -> F {
        (g * self.scale).at_most(self.limit).at_least(-self.limit)
    }
}

/// A dtype of parameters.
pub(super) trait Element: WithDType {
    /// What updates are computed and state is kept in.
    type Compute: Real;
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn buffers(buffers: &Buffers) -> &[Vec<Self::Compute>];
    fn buffers_mut(buffers: &mut Buffers) -> &mut [Vec<Self::Compute>];
    /// Applies `kernel` to elements in compute precision.
    fn convert(
        x: &mut [Self],
        g: &[Self],
        state: &mut [&mut [Self::Compute]],
        kernel: impl Fn(&mut [Self::Compute], &[Self::Compute], &mut [&mut [Self::Compute]]),
    );
    /// One element in compute precision.
    fn compute(self) -> Self::Compute;
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
            #[inline(always)]
            fn convert(
                x: &mut [$t],
                g: &[$t],
                state: &mut [&mut [$t]],
                kernel: impl Fn(&mut [$t], &[$t], &mut [&mut [$t]]),
            ) {
                kernel(x, g, state);
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
            fn convert(
                x: &mut [$t],
                g: &[$t],
                state: &mut [&mut [f32]],
                kernel: impl Fn(&mut [f32], &[f32], &mut [&mut [f32]]),
            ) {
                let (mut wide_x, mut wide_g) = ([0f32; BLOCK], [0f32; BLOCK]);
                for (block, (x, g)) in x.chunks_mut(BLOCK).zip(g.chunks(BLOCK)).enumerate() {
                    let (start, n) = (block * BLOCK, x.len());
                    x.convert_to_f32_slice(&mut wide_x[..n]);
                    g.convert_to_f32_slice(&mut wide_g[..n]);
                    let mut state: Vec<&mut [f32]> =
                        state.iter_mut().map(|s| &mut s[start..start + n]).collect();
                    kernel(&mut wide_x[..n], &wide_g[..n], &mut state);
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

/// A chunk of one parameter with all that its update touches.
struct Task<'a, E: Element, S> {
    x: &'a mut [E],
    g: &'a [E],
    state: Vec<&'a mut [E::Compute]>,
    scalars: S,
}

/// One parameter of a step: its index among the slots, its gradient and its scalars.
pub(super) struct Update<S> {
    pub slot: usize,
    pub grad: Tensor,
    pub scalars: S,
}

/// Updates all parameters of dtype `E`.
pub(super) fn step<E: Element, R: Rule>(
    slots: &mut [Slot],
    updates: &[&Update<R::Scalars>],
    clip: Clip,
) -> Result<()> {
    let clip = ClipIn { scale: E::Compute::from_f64(clip.scale), limit: E::Compute::from_f64(clip.limit) };
    for updates in updates.chunks(BORROWED) {
        let guards: Vec<_> = updates.iter().map(|u| u.grad.storage_and_layout()).collect();
        let grads = guards.iter().map(|(storage, layout)| match &**storage {
            Storage::Cpu(storage) => contiguous::<E>(storage.as_slice()?, layout),
            _ => candle_core::bail!("expected a gradient on the CPU"),
        });
        let grads = grads.collect::<Result<Vec<_>>>()?;
        let vars: Vec<Tensor> = updates.iter().map(|u| slots[u.slot].var.as_tensor().clone()).collect();
        // Slots in the order of the updates, each lent once: updates name ascending, distinct slots.
        let mut lent = slots.iter_mut().enumerate();
        let states: Vec<&mut [Vec<E::Compute>]> = updates
            .iter()
            .filter_map(|u| lent.find(|(index, _)| *index == u.slot))
            .map(|(_, slot)| E::buffers_mut(&mut slot.buffers))
            .collect();
        let mut states = Some(states);
        borrow_all(&vars, Vec::new(), &mut |params: Vec<&mut [E]>| {
            let states = states.take().unwrap_or_default();
            let mut tasks = Vec::new();
            for (((x, g), state), update) in params.into_iter().zip(&grads).zip(states).zip(updates) {
                let scalars = update.scalars.round::<E::Compute>();
                let mut state: Vec<_> = state.iter_mut().map(|s| s.chunks_mut(CHUNK)).collect();
                for (x, g) in x.chunks_mut(CHUNK).zip(g.chunks(CHUNK)) {
                    let state = state.iter_mut().filter_map(Iterator::next).collect();
                    tasks.push(Task { x, g, state, scalars });
                }
            }
            let run = |mut task: Task<E, _>| {
                E::convert(task.x, task.g, &mut task.state, |x, g, state| {
                    kernel::<R, E::Compute>(&task.scalars, clip, x, g, state)
                })
            };
            if tasks.iter().map(|t| t.x.len()).sum::<usize>() < SERIAL {
                tasks.into_iter().for_each(run);
            } else {
                tasks.into_par_iter().for_each(run);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// The sums of [`Rule::reduce`] over all parameters of dtype `E`, in the fixed order of chunks.
pub(super) fn reduce<E: Element, R: Rule>(
    slots: &[Slot],
    updates: &[&Update<()>],
    clip: Clip,
) -> Result<[f64; SUMS]> {
    let clip = ClipIn { scale: E::Compute::from_f64(clip.scale), limit: E::Compute::from_f64(clip.limit) };
    let grads: Vec<_> = updates.iter().map(|u| u.grad.storage_and_layout()).collect();
    let params: Vec<_> = updates.iter().map(|u| slots[u.slot].var.storage_and_layout()).collect();
    let mut tasks = Vec::new();
    for ((update, (grad, grad_layout)), (param, layout)) in updates.iter().zip(&grads).zip(&params) {
        let (Storage::Cpu(grad), Storage::Cpu(param)) = (&**grad, &**param) else {
            candle_core::bail!("expected parameter and gradient on the CPU")
        };
        let g = contiguous::<E>(grad.as_slice()?, grad_layout)?;
        let x = contiguous::<E>(param.as_slice()?, layout)?;
        let buffers = E::buffers(&slots[update.slot].buffers);
        for (chunk, (x, g)) in x.chunks(CHUNK).zip(g.chunks(CHUNK)).enumerate() {
            tasks.push((x, g, chunk * CHUNK, buffers));
        }
    }
    let partials: Vec<[f64; SUMS]> = tasks
        .into_par_iter()
        .map(|(x, g, start, buffers)| sums::<E, R>(clip, x, g, start, buffers))
        .collect();
    let mut total = [0.0; SUMS];
    for partial in partials {
        total.iter_mut().zip(partial).for_each(|(total, share)| *total += share);
    }
    Ok(total)
}

/// The sums over one chunk, whose elements' state begins at `start` of each buffer.
fn sums<E: Element, R: Rule>(
    clip: ClipIn<E::Compute>,
    x: &[E],
    g: &[E],
    start: usize,
    buffers: &[Vec<E::Compute>],
) -> [f64; SUMS] {
    #[inline(always)]
    fn body<E: Element, R: Rule>(
        clip: ClipIn<E::Compute>,
        x: &[E],
        g: &[E],
        start: usize,
        buffers: &[Vec<E::Compute>],
    ) -> [f64; SUMS] {
        /// Independent lanes, so that the additions of a chunk need not wait for each other.
        const LANES: usize = 16;
        let mut lanes = [[0.0f64; LANES]; SUMS];
        let mut state = [[0.0f64; LANES]; MAX_BUFFERS];
        for (block, (x, g)) in x.chunks(LANES).zip(g.chunks(LANES)).enumerate() {
            let start = start + block * LANES;
            for (state, buffer) in state.iter_mut().zip(buffers) {
                let buffer = &buffer[start..start + x.len()];
                state.iter_mut().zip(buffer).for_each(|(s, value)| *s = value.to_f64());
            }
            for (lane, (x, g)) in x.iter().zip(g).enumerate() {
                let state = state.map(|s| s[lane]);
                let shares = R::reduce(
                    x.compute().to_f64(),
                    clip.apply(g.compute()).to_f64(),
                    &state[..buffers.len()],
                );
                lanes.iter_mut().zip(shares).for_each(|(lanes, share)| lanes[lane] += share);
            }
        }
        lanes.map(|lane| lane.iter().sum())
    }
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2")]
        fn wide<E: Element, R: Rule>(
            clip: ClipIn<E::Compute>,
            x: &[E],
            g: &[E],
            start: usize,
            buffers: &[Vec<E::Compute>],
        ) -> [f64; SUMS] {
            body::<E, R>(clip, x, g, start, buffers)
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2, which is all that `wide` asks for.
            return unsafe { wide::<E, R>(clip, x, g, start, buffers) };
        }
    }
    body::<E, R>(clip, x, g, start, buffers)
}

/// The sum of squares of a gradient, in the fixed order of chunks.
pub(crate) fn sum_of_squares(grad: &Tensor) -> Result<f64> {
    fn typed<E: Element>(grad: &Tensor) -> Result<f64> {
        let (storage, layout) = grad.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { candle_core::bail!("expected a gradient on the CPU") };
        let data = contiguous::<E>(storage.as_slice()?, layout)?;
        let partial = |chunk: &[E]| {
            let mut lanes = [0.0f64; 8];
            let mut blocks = chunk.chunks_exact(8);
            for block in &mut blocks {
                for (lane, g) in lanes.iter_mut().zip(block) {
                    let g = g.compute().to_f64();
                    *lane += g * g;
                }
            }
            for (lane, g) in lanes.iter_mut().zip(blocks.remainder()) {
                let g = g.compute().to_f64();
                *lane += g * g;
            }
            lanes.iter().sum::<f64>()
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

fn contiguous<'a, E>(data: &'a [E], layout: &Layout) -> Result<&'a [E]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
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

/// Applies the rule to every element of a chunk.
#[inline(always)]
fn kernel<R: Rule, F: Real>(
    s: &<R::Scalars as Scalars>::In<F>,
    clip: ClipIn<F>,
    x: &mut [F],
    g: &[F],
    state: &mut [&mut [F]],
) {
    const fn has<R: Rule>(buffers: usize) -> bool {
        R::BUFFERS.0 <= buffers && buffers <= R::BUFFERS.1
    }
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
                #[target_feature(enable = "avx2")]
                #[allow(clippy::too_many_arguments)]
                fn wide<R: Rule, F: Real>(
                    s: &<R::Scalars as Scalars>::In<F>, clip: ClipIn<F>, x: &mut [F], g: &[F], $($buffer: &mut [F]),*
                ) {
                    body::<R, F>(s, clip, x, g, $($buffer),*);
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
