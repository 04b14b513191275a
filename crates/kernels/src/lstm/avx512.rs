//! The sequential part of an LSTM layer with AVX-512.
//!
//! A step multiplies `batch` rows by weights of 4·hidden² numbers: at hidden 1150 these are 21 MB, streamed from
//! the last-level cache in every step at about half a byte a multiply-add for a batch of 20, so the product stays
//! bound by arithmetic as long as the loads run ahead. Blocks of 96 rows of a panel (24 KB) are swept from L1 by
//! all groups of rows, while each group prefetches its share of the next block.
use super::super::simd::avx512::{Avx512, lanes, transpose16};
use super::super::{Buf, Real, Shared, as_f32, as_f32_mut, par};
use super::{Dims, Kept, Layer, Saved, activate_units, differentiate_units};
use rayon::prelude::*;
use std::arch::x86_64::*;

/// Lanes of a vector.
const LANES: usize = 16;
/// Rows of a panel that stay in L1 while every group of batch rows passes over them.
const BLOCK: usize = 96;

/// A panel of `NV` vectors a row, and where the tile it is summed into lies.
#[derive(Clone, Copy)]
struct Tile<const NV: usize> {
    c: *mut f32,
    /// Distance between rows.
    row: usize,
    /// Distance between the vectors of a row: the hidden size for four gates, 16 for neighbours.
    vector: usize,
    /// Lanes that exist, of each vector.
    mask: [__mmask16; NV],
}

/// `c += a·b` for `MR` rows of a tile over `k` rows of the panel `b`; `a(i, p)` lies at `a + i·rsa + p`. One line
/// at `ahead` is prefetched for every row of the panel.
///
/// # Safety
/// AVX-512F is there; `a`, `b` and the masked lanes of `c` are valid for these sizes.
// Never inlined: as a part of `panel`, the compiler kept one of the accumulators in memory.
#[inline(never)]
#[target_feature(enable = "avx512f")]
#[allow(clippy::needless_range_loop)]
unsafe fn multiply<const MR: usize, const NV: usize>(
    k: usize,
    a: *const f32,
    rsa: usize,
    b: *const f32,
    ahead: *const f32,
    tile: Tile<NV>,
) {
    let mut acc = [[_mm512_setzero_ps(); NV]; MR];
    // SAFETY: the caller's promise covers every address that is read or written; a prefetch reads nothing.
    unsafe {
        for i in 0..MR {
            for j in 0..NV {
                acc[i][j] = _mm512_maskz_loadu_ps(tile.mask[j], tile.c.add(i * tile.row + j * tile.vector));
            }
        }
        for p in 0..k {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(p * LANES).cast());
            let mut bv = [_mm512_setzero_ps(); NV];
            for j in 0..NV {
                bv[j] = _mm512_loadu_ps(b.add(p * NV * LANES + j * LANES));
            }
            for i in 0..MR {
                let av = _mm512_set1_ps(*a.add(i * rsa + p));
                for j in 0..NV {
                    acc[i][j] = _mm512_fmadd_ps(av, bv[j], acc[i][j]);
                }
            }
        }
        for i in 0..MR {
            for j in 0..NV {
                let c = tile.c.add(i * tile.row + j * tile.vector);
                _mm512_mask_storeu_ps(c, tile.mask[j], acc[i][j]);
            }
        }
    }
}

/// `c += a·panel` for `m` rows of a tile; the panel has `k` rows.
///
/// # Safety
/// As [`multiply`], for `m` rows.
#[target_feature(enable = "avx512f")]
unsafe fn panel<const NV: usize>(
    (m, k): (usize, usize),
    (a, rsa): (*const f32, usize),
    panel: *const f32,
    tile: Tile<NV>,
) {
    // As many rows as leave registers for a row of the panel and a broadcast: 6·4 or 10·2 accumulators.
    let most = if NV == 4 { 6 } else { 10 };
    let groups = m.div_ceil(most);
    for p in (0..k).step_by(BLOCK) {
        let kc = BLOCK.min(k - p);
        let (mut i, mut group) = (0, 0);
        while i < m {
            let rows = (m - i).div_ceil(groups - group);
            // Groups beyond the number of vectors repeat the last share.
            let ahead = panel.wrapping_add((p + kc) * NV * LANES + group.min(NV - 1) * kc * LANES);
            // SAFETY: rows `i..i + rows` of A and the tile, rows `p..p + kc` of the panel.
            unsafe {
                let (a, b) = (a.add(i * rsa + p), panel.add(p * NV * LANES));
                let tile = Tile { c: tile.c.add(i * tile.row), ..tile };
                match rows {
                    1 => multiply::<1, NV>(kc, a, rsa, b, ahead, tile),
                    2 => multiply::<2, NV>(kc, a, rsa, b, ahead, tile),
                    3 => multiply::<3, NV>(kc, a, rsa, b, ahead, tile),
                    4 => multiply::<4, NV>(kc, a, rsa, b, ahead, tile),
                    5 => multiply::<5, NV>(kc, a, rsa, b, ahead, tile),
                    6 => multiply::<6, NV>(kc, a, rsa, b, ahead, tile),
                    7 => multiply::<7, NV>(kc, a, rsa, b, ahead, tile),
                    8 => multiply::<8, NV>(kc, a, rsa, b, ahead, tile),
                    9 => multiply::<9, NV>(kc, a, rsa, b, ahead, tile),
                    _ => multiply::<10, NV>(kc, a, rsa, b, ahead, tile),
                }
            }
            i += rows;
            group += 1;
        }
    }
}

/// Row after row, `w` with its mask applied: `out[..n]` from element `from` on.
#[inline]
#[target_feature(enable = "avx512f")]
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

/// Forward panels: row `k` of panel `u` holds, gate by gate, column `k` of the weights of units `16u..16u + 16`.
fn pack_gates(_: Avx512, w: &[f32], kept: Option<Kept>, hidden: usize) -> Buf<f32> {
    let panels = hidden.div_ceil(LANES);
    let mut packed = Buf::dirty(panels * hidden * 4 * LANES);
    packed.par_chunks_mut(hidden * 4 * LANES).enumerate().for_each(|(u, panel)| {
        // SAFETY: AVX-512F is proved.
        unsafe { pack_units_of_gates(w, kept, hidden, u * LANES, panel) }
    });
    packed
}

/// One panel of [`pack_gates`].
#[target_feature(enable = "avx512f")]
fn pack_units_of_gates(w: &[f32], kept: Option<Kept>, hidden: usize, unit: usize, panel: &mut [f32]) {
    let units = LANES.min(hidden - unit);
    // Sixteen rows of weights, as long as they are; the rows and columns beyond the last stay zero.
    let stride = hidden.next_multiple_of(LANES);
    let mut rows = vec![0.0; LANES * stride];
    for gate in 0..4 {
        for (i, row) in rows.chunks_exact_mut(stride).take(units).enumerate() {
            copy_kept(&mut row[..hidden], w, kept, (gate * hidden + unit + i) * hidden);
        }
        for k in (0..hidden).step_by(LANES) {
            let mut turned = [0.0; LANES * LANES];
            // SAFETY: 16 rows of 16 columns, both inside.
            unsafe { transpose16(rows[k..].as_ptr(), stride, turned.as_mut_ptr(), LANES) };
            let lines = panel[k * 4 * LANES..].chunks_exact_mut(4 * LANES);
            for (line, turned) in lines.zip(turned.chunks_exact(LANES)) {
                line[gate * LANES..(gate + 1) * LANES].copy_from_slice(turned);
            }
        }
    }
}

/// Backward panels: row `j` of panel `p` holds columns `p·width..` of row `j` of the weights.
fn pack_units(_: Avx512, w: &[f32], kept: Option<Kept>, hidden: usize, width: usize) -> Buf<f32> {
    let mut packed = Buf::dirty(hidden.div_ceil(width) * 4 * hidden * width);
    packed.par_chunks_mut(4 * hidden * width).enumerate().for_each(|(p, panel)| {
        let cols = width.min(hidden - p * width);
        for (j, out) in panel.chunks_exact_mut(width).enumerate() {
            let (inside, beyond) = out.split_at_mut(cols);
            beyond.fill(0.0);
            // SAFETY: AVX-512F is proved.
            unsafe { copy_kept(inside, w, kept, j * hidden + p * width) };
        }
    });
    packed
}

/// The steps of [`super::forward`]; `saved.gates` already holds x·W_ihᵀ.
pub(super) fn forward<T: Real>(proof: Avx512, layer: &Layer<T>, saved: &mut Saved<T>, y: &mut [T]) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    let packed = pack_gates(proof, as_f32(layer.w_hh), layer.kept, hidden);
    let (bias, h0, c0) = (as_f32(layer.bias), as_f32(layer.h0), as_f32(layer.c0));
    let gates = Shared::new(as_f32_mut(&mut saved.gates));
    let (cells, y) = (Shared::new(as_f32_mut(&mut saved.cells)), Shared::new(as_f32_mut(y)));
    let state = batch * hidden;
    for step in 0..steps {
        let tasks = (0..hidden.div_ceil(LANES)).into_par_iter().with_min_len(3);
        tasks.for_each(|u| {
            let unit = u * LANES;
            let units = LANES.min(hidden - unit);
            // SAFETY: `super::forward` has checked all lengths. A task reads only states of the step before, which
            // is complete, and writes gates, cells and hidden states of its own units in this step.
            unsafe {
                let (h_before, c_before) = match step {
                    0 => (h0, c0),
                    _ => (y.read((step - 1) * state, state), cells.read((step - 1) * state, state)),
                };
                forward_units(Units {
                    hidden,
                    unit,
                    units,
                    batch,
                    h_before,
                    c_before,
                    bias,
                    panel: &packed[u * hidden * 4 * LANES..][..hidden * 4 * LANES],
                    gates: gates.at(step * 4 * state),
                    cells: cells.at(step * state),
                    y: y.at(step * state),
                });
            }
        });
    }
}

/// One step of up to 16 units.
struct Units<'a> {
    hidden: usize,
    unit: usize,
    units: usize,
    batch: usize,
    h_before: &'a [f32],
    c_before: &'a [f32],
    bias: &'a [f32],
    panel: &'a [f32],
    /// This step's gates, cells and hidden states, of which only these units are touched.
    gates: *mut f32,
    cells: *mut f32,
    y: *mut f32,
}

/// # Safety
/// AVX-512F is there; slices and pointers are valid for the sizes, and nobody else uses these units.
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn forward_units(s: Units) {
    let (h, unit, units) = (s.hidden, s.unit, s.units);
    // SAFETY: the caller's promise.
    unsafe {
        let tile = Tile::<4> { c: s.gates.add(unit), row: 4 * h, vector: h, mask: [lanes(units); 4] };
        panel((s.batch, h), (s.h_before.as_ptr(), h), s.panel.as_ptr(), tile);
        for row in 0..s.batch {
            let gate =
                |q: usize| std::slice::from_raw_parts_mut(s.gates.add(row * 4 * h + q * h + unit), units);
            let bias = |q: usize| &s.bias[q * h + unit..q * h + unit + units];
            let at = row * h + unit;
            activate_units::<true>(
                [gate(0), gate(1), gate(2), gate(3)],
                [bias(0), bias(1), bias(2), bias(3)],
                &s.c_before[at..at + units],
                std::slice::from_raw_parts_mut(s.cells.add(at), units),
                std::slice::from_raw_parts_mut(s.y.add(at), units),
            );
        }
    }
}

/// The steps of [`super::backward`]: gates become the gradients of their sums.
pub(super) fn backward<T: Real>(proof: Avx512, layer: &Layer<T>, saved: &mut Saved<T>, dy: &[T]) {
    // Below this there are too few panels of 64 units to keep threads equally busy.
    if layer.dims.hidden >= 768 {
        backward_panels::<T, 4>(proof, layer, saved, dy)
    } else {
        backward_panels::<T, 2>(proof, layer, saved, dy)
    }
}

fn backward_panels<T: Real, const NV: usize>(
    proof: Avx512,
    layer: &Layer<T>,
    saved: &mut Saved<T>,
    dy: &[T],
) {
    let Dims { steps, batch, hidden, .. } = layer.dims;
    let width = NV * LANES;
    let packed = pack_units(proof, as_f32(layer.w_hh), layer.kept, hidden, width);
    let (c0, dy, cells) = (as_f32(layer.c0), as_f32(dy), as_f32(&saved.cells));
    let gates = Shared::new(as_f32_mut(&mut saved.gates));
    let state = batch * hidden;
    let (mut dh, mut dc) = (Buf::<f32>::dirty(state), Buf::<f32>::zeros(state));
    let (dh, dc) = (Shared::new(&mut dh), Shared::new(&mut dc));
    for step in (0..steps).rev() {
        par(hidden.div_ceil(width), |p| {
            let unit = p * width;
            let now = step * state;
            // SAFETY: `super::backward` has checked all lengths. A task reads the gate gradients of the step after,
            // which is complete, and writes those of its own units in this step.
            unsafe {
                backward_units::<NV>(BackUnits {
                    hidden,
                    unit,
                    units: width.min(hidden - unit),
                    batch,
                    dy: &dy[now..now + state],
                    after: (step + 1 < steps).then(|| gates.read(4 * (now + state), 4 * state)),
                    c_before: if step == 0 { c0 } else { &cells[now - state..now] },
                    cells: &cells[now..now + state],
                    panel: &packed[p * 4 * hidden * width..][..4 * hidden * width],
                    gates: gates.at(4 * now),
                    dh: dh.at(0),
                    dc: dc.at(0),
                });
            }
        });
    }
}

/// One step of the units of one panel, backwards.
struct BackUnits<'a> {
    hidden: usize,
    unit: usize,
    units: usize,
    batch: usize,
    dy: &'a [f32],
    /// Gate gradients of the step after.
    after: Option<&'a [f32]>,
    c_before: &'a [f32],
    cells: &'a [f32],
    panel: &'a [f32],
    /// This step's gates and the running gradients of h and c, of which only these units are touched.
    gates: *mut f32,
    dh: *mut f32,
    dc: *mut f32,
}

/// # Safety
/// AVX-512F is there; slices and pointers are valid for the sizes, and nobody else uses these units.
#[target_feature(enable = "avx512f,avx2,fma")]
unsafe fn backward_units<const NV: usize>(s: BackUnits) {
    let (h, unit, units) = (s.hidden, s.unit, s.units);
    // SAFETY: the caller's promise.
    unsafe {
        for row in 0..s.batch {
            let at = row * h + unit;
            std::ptr::copy_nonoverlapping(s.dy[at..at + units].as_ptr(), s.dh.add(at), units);
        }
        if let Some(after) = s.after {
            let mut mask = [0; NV];
            for (j, mask) in mask.iter_mut().enumerate() {
                *mask = lanes(units.saturating_sub(j * LANES));
            }
            let tile = Tile::<NV> { c: s.dh.add(unit), row: h, vector: LANES, mask };
            panel((s.batch, 4 * h), (after.as_ptr(), 4 * h), s.panel.as_ptr(), tile);
        }
        for row in 0..s.batch {
            let gate =
                |q: usize| std::slice::from_raw_parts_mut(s.gates.add(row * 4 * h + q * h + unit), units);
            let at = row * h + unit;
            differentiate_units::<true>(
                [gate(0), gate(1), gate(2), gate(3)],
                &s.c_before[at..at + units],
                &s.cells[at..at + units],
                std::slice::from_raw_parts(s.dh.add(at), units),
                std::slice::from_raw_parts_mut(s.dc.add(at), units),
            );
        }
    }
}
