//! The sequential part of an LSTM layer in f32, over the vectors of any instruction set.
//!
//! A step multiplies `batch` rows by weights of 4·hidden² numbers: at hidden 1150 these are 21 MB, streamed from
//! the last-level cache in every step at about half a byte a multiply-add for a batch of 20, so the product stays
//! bound by arithmetic as long as the loads run ahead. The weights are packed once a call into panels in the order in
//! which they are read: forward those of one vector of units × 4 gates, so that the task which has summed them
//! applies the nonlinearities at once; backward those of a few vectors of units. A block of a panel is swept from L1 by all
//! groups of batch rows, while each group prefetches its share of the next block.
//!
//! Sums lie in tiles as the panels do, padded to whole vectors: only what is read from and written to the sequence knows where
//! the units end.
use super::super::simd::amx::{Amx, Operand, SIDE};
use super::super::simd::pairs::pair;
use super::super::simd::{Into, Simd, read, tiles, write};
use super::super::{Buf, Shared, vmath};
use super::{Dims, Kept, Layer};
use rayon::prelude::*;

/// Rows of a panel that stay in L1 while every group of batch rows passes over them.
const BLOCK: usize = 96;
/// Multiply-adds of a task, at least: some 25 µs, below which waking a thread costs more than it does.
const GRAIN: usize = 2_000_000;

/// How many of so many multiply-adds make a task.
fn grain(of: usize) -> usize {
    GRAIN.div_ceil(of.max(1))
}

/// Vectors side by side in a wide tile: four gates, or two of them where there are few registers.
const fn wide<S: Simd>() -> usize {
    if S::VECTORS >= 4 { 4 } else { 2 }
}

/// `c += a·b` for `MR` rows of a tile of `NV` vectors over `k` rows of the panel `b`; `a(i, p)` lies at `a + i·rsa + p`.
/// For every row of the panel, what lies `stride` further on from `ahead` is prefetched.
///
/// # Safety
/// `a`, `b` and `c` are valid for these sizes; the rows of the tile lie without gaps.
// Never inlined: as a part of `panel`, the compiler kept one of the accumulators in memory.
#[inline(never)]
unsafe fn multiply<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    k: usize,
    (a, rsa): (*const f32, usize),
    b: *const f32,
    (ahead, stride): (*const f32, usize),
    c: *mut f32,
) {
    let width = NV * S::LANES;
    s.run(
        #[inline(always)]
        #[allow(clippy::needless_range_loop)]
        || {
            let mut acc = [[s.zero(); NV]; MR];
            // SAFETY: the caller's promise covers every address that is read or written; a prefetch reads nothing.
            unsafe {
                for i in 0..MR {
                    for j in 0..NV {
                        acc[i][j] = s.load(c.add(i * width + j * S::LANES));
                    }
                }
                for p in 0..k {
                    s.prefetch(ahead.wrapping_add(p * stride));
                    let mut bv = [s.zero(); NV];
                    for j in 0..NV {
                        bv[j] = s.load(b.add(p * width + j * S::LANES));
                    }
                    for i in 0..MR {
                        let av = s.splat(*a.add(i * rsa + p));
                        for j in 0..NV {
                            acc[i][j] = s.accumulate(av, bv[j], acc[i][j]);
                        }
                    }
                }
                for i in 0..MR {
                    for j in 0..NV {
                        s.store(c.add(i * width + j * S::LANES), acc[i][j]);
                    }
                }
            }
        },
    );
}

/// `c += a·panel` for `m` rows of a tile as wide as the panel, which has `k` rows of `vectors`; by AMX, `k` is a multiple of its rows.
///
/// # Safety
/// As [`multiply`], for `m` rows.
unsafe fn panel<S: Simd>(
    s: S,
    amx: Option<Amx>,
    (m, k, vectors): (usize, usize, usize),
    (a, rsa): (*const f32, usize),
    panel: *const f32,
    c: *mut f32,
) {
    let (width, groups) = (vectors * S::LANES, m.div_ceil(6));
    if let Some(amx) = amx {
        const F32: usize = size_of::<f32>();
        let wide = 2 * SIDE;
        return amx.with_registers(|| {
            for j in (0..width).step_by(wide) {
                for i in (0..m).step_by(wide) {
                    let a = Operand {
                        at: a.wrapping_add(i * rsa).cast(),
                        row: F32 * rsa,
                        second: F32 * SIDE * rsa,
                        step: F32 * SIDE,
                    };
                    let b = Operand {
                        at: panel.wrapping_add(j).cast(),
                        row: F32 * width,
                        second: F32 * SIDE,
                        step: F32 * SIDE * width,
                    };
                    let (size, operands) = ((wide.min(m - i), wide.min(width - j)), std::iter::once((a, b)));
                    // SAFETY: rows `i..` of A and the tile, columns `j..` of the tile and the panel.
                    unsafe {
                        let c = (c.add(i * width + j), width);
                        amx.product(size, k / SIDE, operands, c, Into::Add);
                    }
                }
            }
        });
    }
    for p in (0..k).step_by(BLOCK) {
        let kc = BLOCK.min(k - p);
        let stride = width.div_ceil(groups);
        let mut i = 0;
        for group in 0..groups {
            let rows = (m - i).div_ceil(groups - group);
            let ahead = (panel.wrapping_add((p + kc) * width + group * kc * stride), stride);
            // SAFETY: rows `i..i + rows` of A and the tile, rows `p..p + kc` of the panel.
            unsafe {
                let (a, b, c) = ((a.add(i * rsa + p), rsa), panel.add(p * width), c.add(i * width));
                tiles!(multiply::<S>(rows, vectors)(s, kc, a, b, ahead, c));
            }
            i += rows;
        }
    }
}

/// Weights from element `from` on with their mask applied.
#[inline(always)]
fn copy_kept(out: &mut [f32], w: &[f32], kept: Option<Kept>, from: usize) {
    let w = &w[from..from + out.len()];
    match kept {
        None => out.copy_from_slice(w),
        Some(kept) => {
            let (scale, keep) = (kept.scale as f32, &kept.keep[from..from + w.len()]);
            for ((out, w), keep) in out.iter_mut().zip(w).zip(keep) {
                // Multiplied rather than chosen, so that it becomes vector code; a weight times zero is zero
                // unless the weight is not finite, and then nothing that follows is either.
                *out = *w * (scale * f32::from(*keep));
            }
        }
    }
}

/// The rows of a panel as its tiles read them: as they are, or in pairs. (In place: a pair never lies behind the rows it is made of.)
#[inline(always)]
fn pair_panel<S: Simd>(_: S, round: usize, panel: &mut [f32], width: usize) {
    if S::TERMS == 1 {
        return;
    }
    let rows = panel.len() / width;
    let pairs = rows.div_ceil(2);
    for q in 0..pairs {
        for at in q * width..(q + 1) * width {
            let from = at + q * width;
            let second = if 2 * q + 1 < rows { panel[from + width] } else { 0.0 };
            panel[at] = pair(panel[from], second);
        }
    }
    panel[pairs * width..pairs.next_multiple_of(round) * width].fill(0.0);
}

/// AMX where a state has as many units as rows of pairs are rounded up to.
fn for_units(amx: Option<Amx>, hidden: usize) -> Option<Amx> {
    amx.filter(|_| hidden >= 2 * SIDE)
}

/// What the number of pairs of terms is rounded up to, with zeros.
fn rounding(amx: Option<Amx>) -> usize {
    if amx.is_some() { SIDE } else { 1 }
}

/// Rows of `k` terms as tiles read them, and how far apart they are: as they are, or in pairs in a buffer.
fn operand<'a, S: Simd>(
    s: S,
    round: usize,
    rows: &'a [f32],
    k: usize,
    pairs: &'a mut [f32],
) -> (&'a [f32], usize) {
    if S::TERMS == 1 {
        return (rows, k);
    }
    let length = k.div_ceil(S::TERMS).next_multiple_of(round);
    s.run(
        #[inline(always)]
        || {
            for (to, row) in pairs.chunks_exact_mut(length).zip(rows.chunks_exact(k)) {
                s.pair_terms(to, row);
                to[k.div_ceil(S::TERMS)..].fill(0.0);
            }
        },
    );
    (pairs, length)
}

/// Room for the pairs of `rows` rows of `k` terms, where there are any.
fn room<S: Simd>(_: S, round: usize, rows: usize, k: usize) -> Buf<f32> {
    Buf::dirty(if S::TERMS == 1 { 0 } else { rows * k.div_ceil(S::TERMS).next_multiple_of(round) })
}

/// Forward panels: for each vector of units its four gates, as many of them side by side as a tile has vectors. Row `k` of a
/// panel holds, gate by gate, column `k` of the weights.
fn pack_gates<S: Simd>(s: S, round: usize, layer: &Layer<f32>) -> Buf<f32> {
    let (hidden, lanes) = (layer.dims.hidden, S::LANES);
    let (wide, width) = (wide::<S>(), wide::<S>() * lanes);
    let mut packed = Buf::dirty(hidden.div_ceil(lanes) * hidden * 4 * lanes);
    packed.par_chunks_mut(hidden * 4 * lanes).enumerate().for_each(|(u, panels)| {
        s.run(
            #[inline(always)]
            || {
                let unit = u * lanes;
                // A vector of rows of weights; the rows and columns beyond the last stay zero.
                let stride = hidden.next_multiple_of(lanes);
                let mut rows = vec![0.0; lanes * stride];
                let mut turned = vec![0.0; lanes * lanes];
                for gate in 0..4 {
                    for (i, row) in rows.chunks_exact_mut(stride).take(hidden - unit).enumerate() {
                        let from = (gate * hidden + unit + i) * hidden;
                        copy_kept(&mut row[..hidden], layer.w_hh, layer.kept, from);
                    }
                    let panel = &mut panels[gate / wide * hidden * width..][..hidden * width];
                    let at = gate % wide * lanes;
                    for (k, lines) in panel.chunks_mut(lanes * width).enumerate() {
                        // SAFETY: a block of the rows, and one of its size.
                        unsafe {
                            s.transpose(rows[k * lanes..].as_ptr(), stride, turned.as_mut_ptr(), lanes)
                        };
                        for (line, turned) in lines.chunks_exact_mut(width).zip(turned.chunks_exact(lanes)) {
                            line[at..at + lanes].copy_from_slice(turned);
                        }
                    }
                }
                panels.chunks_exact_mut(hidden * width).for_each(|panel| pair_panel(s, round, panel, width));
            },
        );
    });
    packed
}

/// Backward panels: row `j` of panel `p` holds columns `p·width..` of row `j` of the weights.
fn pack_units<S: Simd>(s: S, round: usize, layer: &Layer<f32>, width: usize) -> Buf<f32> {
    let hidden = layer.dims.hidden;
    let mut packed = Buf::dirty(hidden.div_ceil(width) * 4 * hidden * width);
    packed.par_chunks_mut(4 * hidden * width).enumerate().for_each(|(p, panel)| {
        s.run(
            #[inline(always)]
            || {
                let units = width.min(hidden - p * width);
                for (j, out) in panel.chunks_exact_mut(width).enumerate() {
                    let (inside, beyond) = out.split_at_mut(units);
                    copy_kept(inside, layer.w_hh, layer.kept, j * hidden + p * width);
                    beyond.fill(0.0);
                }
                pair_panel(s, round, panel, width);
            },
        );
    });
    packed
}

/// The steps of [`super::forward`]; the gates already hold x·W_ihᵀ.
pub(super) fn forward<S: Simd>(
    s: S,
    amx: Option<Amx>,
    layer: &Layer<f32>,
    [gates, cells, y]: [&mut [f32]; 3],
) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    let (lanes, tile, state) = (S::LANES, 4 * S::LANES, batch * hidden);
    let amx = for_units(amx, hidden);
    let round = rounding(amx);
    let packed = pack_gates(s, round, layer);
    let mut sums = Buf::dirty(hidden.div_ceil(lanes) * batch * tile);
    let (gates, cells, y) = (Shared::new(gates), Shared::new(cells), Shared::new(y));
    let mut pairs = room(s, round, batch, hidden);
    for step in 0..steps {
        let before = step.saturating_sub(1) * state;
        let (h_before, c_before) = match step {
            0 => (layer.h0, layer.c0),
            // SAFETY: `super::forward` has checked all lengths, and the step before is complete.
            _ => unsafe { (y.read(before, state), cells.read(before, state)) },
        };
        let h_before = operand(s, round, h_before, hidden, &mut pairs);
        let least = grain(batch * hidden * tile);
        let tasks = sums.par_chunks_exact_mut(batch * tile).enumerate();
        tasks.with_min_len(least).with_max_len(2 * least).for_each(|(u, sums)| {
            let now = step * state;
            // SAFETY: `super::forward` has checked all lengths. A task reads only states of the step before, which
            // is complete, and writes gates, cells and hidden states of its own units in this step.
            unsafe {
                Units { hidden, unit: u * lanes, batch, amx }.forward(
                    s,
                    (h_before, c_before, layer.bias),
                    &packed[u * hidden * tile..][..hidden * tile],
                    sums,
                    [gates.at(4 * now), cells.at(now), y.at(now)],
                );
            }
        });
    }
}

/// The steps of [`super::backward`]: gates become the gradients of their sums.
pub(super) fn backward<S: Simd>(
    s: S,
    amx: Option<Amx>,
    layer: &Layer<f32>,
    gates: &mut [f32],
    cells: &[f32],
    dy: &[f32],
) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    // With panels of 64 units there are too few in a small layer to keep threads equally busy.
    let vectors = if hidden >= 768 { wide::<S>() } else { 2 };
    let (width, state) = (vectors * S::LANES, batch * hidden);
    let amx = for_units(amx, hidden);
    let round = rounding(amx);
    let packed = pack_units(s, round, layer, width);
    let tile = batch * width;
    let panels = hidden.div_ceil(width);
    // Running gradients of h and c, in tiles.
    let (mut dh, mut dc) = (Buf::<f32>::dirty(panels * tile), Buf::<f32>::zeros(panels * tile));
    let (dh, dc, gates) = (Shared::new(&mut dh), Shared::new(&mut dc), Shared::new(gates));
    let mut pairs = room(s, round, batch, 4 * hidden);
    for step in (0..steps).rev() {
        // SAFETY: `super::backward` has checked all lengths, and the step after is complete.
        let after = (step + 1 < steps).then(|| unsafe { gates.read(4 * (step + 1) * state, 4 * state) });
        let after = after.map(|after| operand(s, round, after, 4 * hidden, &mut pairs));
        let (tasks, least) = ((0..panels).into_par_iter(), grain(tile * 4 * hidden));
        tasks.with_min_len(least).with_max_len(2 * least).for_each(|p| {
            let now = step * state;
            // SAFETY: `super::backward` has checked all lengths. A task reads the gate gradients of the step after,
            // which is complete, and writes those of its own units in this step.
            unsafe {
                let c_before = if step == 0 { layer.c0 } else { &cells[now - state..now] };
                Units { hidden, unit: p * width, batch, amx }.backward(
                    s,
                    vectors,
                    (&dy[now..][..state], after, c_before, &cells[now..][..state]),
                    &packed[p * 4 * hidden * width..][..4 * hidden * width],
                    (dh.slice(p * tile, tile), dc.slice(p * tile, tile)),
                    gates.at(4 * now),
                );
            }
        });
    }
}

/// The units of a task.
struct Units {
    hidden: usize,
    /// The first.
    unit: usize,
    batch: usize,
    amx: Option<Amx>,
}

impl Units {
    /// One step of a vector of units, from the states before it. `sums` is where the task may sum.
    ///
    /// # Safety
    /// Slices and pointers (gates, cells and hidden states of this step) are valid for the sizes, and nobody else uses these
    /// units.
    unsafe fn forward<S: Simd>(
        &self,
        s: S,
        ((h_before, stride), c_before, bias): ((&[f32], usize), &[f32], &[f32]),
        packed: &[f32],
        sums: &mut [f32],
        [gates, cells, y]: [*mut f32; 3],
    ) {
        let (h, unit, lanes) = (self.hidden, self.unit, S::LANES);
        let n = lanes.min(h - unit);
        // Gates side by side are a tile; a set with narrow tiles has two of them.
        let (wide, width) = (wide::<S>(), wide::<S>() * lanes);
        let tile = self.batch * width;
        let place = |row: usize, q: usize| q / wide * tile + row * width + q % wide * lanes;
        s.run(
            #[inline(always)]
            || {
                for row in 0..self.batch {
                    for q in 0..4 {
                        // SAFETY: the caller's promise.
                        unsafe {
                            let x = read(s, gates.add(row * 4 * h + q * h + unit), n);
                            s.store(sums[place(row, q)..].as_mut_ptr(), x);
                        }
                    }
                }
            },
        );
        for (packed, sums) in packed.chunks_exact(h * width).zip(sums.chunks_exact_mut(tile)) {
            let sizes = (self.batch, stride, wide);
            // SAFETY: the caller's promise.
            unsafe {
                let h_before = (h_before.as_ptr(), stride);
                panel(s, self.amx, sizes, h_before, packed.as_ptr(), sums.as_mut_ptr());
            }
        }
        s.run(
            #[inline(always)]
            || {
                for row in 0..self.batch {
                    let mut sum = [s.zero(); 4];
                    for (q, sum) in sum.iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        *sum = unsafe {
                            let bias = read(s, bias.as_ptr().add(q * h + unit), n);
                            s.add(s.load(sums[place(row, q)..].as_ptr()), bias)
                        };
                    }
                    let at = row * h + unit;
                    let i = vmath::sigmoid(s, sum[0]);
                    let f = vmath::sigmoid(s, sum[1]);
                    let a = vmath::tanh(s, sum[2]);
                    let o = vmath::sigmoid(s, sum[3]);
                    // SAFETY: the caller's promise.
                    unsafe {
                        let before = read(s, c_before.as_ptr().add(at), n);
                        let cell = s.add(s.mul(f, before), s.mul(i, a));
                        let hidden = s.mul(o, vmath::tanh(s, cell));
                        write(s, cells.add(at), n, cell, Into::Set);
                        write(s, y.add(at), n, hidden, Into::Set);
                        for (q, gate) in [i, f, a, o].into_iter().enumerate() {
                            write(s, gates.add(row * 4 * h + q * h + unit), n, gate, Into::Set);
                        }
                    }
                }
            },
        );
    }

    /// One step of `vectors` of units backwards: from the gradient of the hidden states, the gate gradients of the step after
    /// and the cells before and after this step. The running gradients of h and c are the task's own.
    ///
    /// # Safety
    /// As [`Units::forward`].
    #[allow(clippy::type_complexity)]
    unsafe fn backward<S: Simd>(
        &self,
        s: S,
        vectors: usize,
        (dy, after, c_before, cells): (&[f32], Option<(&[f32], usize)>, &[f32], &[f32]),
        packed: &[f32],
        (dh, dc): (&mut [f32], &mut [f32]),
        gates: *mut f32,
    ) {
        let (h, width) = (self.hidden, vectors * S::LANES);
        let units = width.min(h - self.unit);
        for (row, dh) in dh.chunks_exact_mut(width).enumerate() {
            dh[..units].copy_from_slice(&dy[row * h + self.unit..][..units]);
            dh[units..].fill(0.0);
        }
        if let Some((after, stride)) = after {
            let sizes = (self.batch, stride, vectors);
            // SAFETY: the caller's promise.
            unsafe {
                panel(s, self.amx, sizes, (after.as_ptr(), stride), packed.as_ptr(), dh.as_mut_ptr());
            }
        }
        s.run(
            #[inline(always)]
            || {
                for (row, (dh, dc)) in dh.chunks_exact(width).zip(dc.chunks_exact_mut(width)).enumerate() {
                    for j in (0..units).step_by(S::LANES) {
                        let (n, unit) = (S::LANES.min(units - j), self.unit + j);
                        let (at, gates) = (row * h + unit, gates.wrapping_add(row * 4 * h + unit));
                        // SAFETY: the caller's promise; tiles are whole vectors.
                        unsafe {
                            let mut gate = [s.zero(); 4];
                            for (q, gate) in gate.iter_mut().enumerate() {
                                *gate = read(s, gates.add(q * h), n);
                            }
                            let c = read(s, cells.as_ptr().add(at), n);
                            let before = read(s, c_before.as_ptr().add(at), n);
                            let (dh, dc) = (s.load(dh[j..].as_ptr()), dc[j..].as_mut_ptr());
                            let (grads, earlier) = differentiate(s, gate, before, c, dh, s.load(dc));
                            s.store(dc, earlier);
                            for (q, grad) in grads.into_iter().enumerate() {
                                write(s, gates.add(q * h), n, grad, Into::Set);
                            }
                        }
                    }
                }
            },
        );
    }
}

/// From the gates, the cells before and after, and the gradients of the hidden and the cell state: the gradients of the sums
/// that the gates came from, and that of the cell state before.
#[inline(always)]
fn differentiate<S: Simd>(
    s: S,
    [i, f, a, o]: [S::V; 4],
    before: S::V,
    c: S::V,
    dh: S::V,
    dc: S::V,
) -> ([S::V; 4], S::V) {
    let one = s.splat(1.0);
    let (product, tanh_c) = (|x, y, z| s.mul(s.mul(x, y), z), vmath::tanh(s, c));
    // The slopes of sigmoid and tanh, from their values.
    let (sigmoid, tanh) = (|y| s.mul(y, s.sub(one, y)), |y| s.sub(one, s.mul(y, y)));
    let d = s.add(dc, product(dh, o, tanh(tanh_c)));
    let grads = [
        product(d, a, sigmoid(i)),
        product(d, before, sigmoid(f)),
        product(d, i, tanh(a)),
        product(dh, tanh_c, sigmoid(o)),
    ];
    (grads, s.mul(d, f))
}
