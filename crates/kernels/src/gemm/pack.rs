//! Operands in the order in which tiles read them: panels of a few rows of A or columns of B, term after term.
use super::Kernel;
use crate::simd::{MOST_LANES, Simd};

/// Terms between the one that is copied and the one that is asked for, as many as are packed of one tile before the next.
pub(super) const AHEAD: usize = 16;

/// Writes a panel: element (i, p) of `width` × `terms` goes from `from + i across + p along` to `to + p step + i`. One of the
/// two strides is 1.
///
/// # Safety
/// Those elements are valid, and at `from` also those with i below `reach` and p below `terms`; all `terms` rows of `step`,
/// at least `width`, may be written.
pub(super) unsafe fn pack<K: Kernel>(
    kernel: K,
    (width, terms): (usize, usize),
    (from, across, along, reach): (*const K::E, usize, usize, usize),
    (to, step): (*mut K::E, usize),
) {
    kernel.run(
        #[inline(always)]
        // SAFETY: the caller's promise; constant widths become a few moves.
        || unsafe {
            match width {
                _ if across != 1 => transposed(kernel, (width, terms), (from, across, reach), (to, step)),
                w if w == K::PANEL => rows(kernel, K::PANEL, terms, (from, along), (to, step)),
                w if w == K::ROWS => rows(kernel, K::ROWS, terms, (from, along), (to, step)),
                _ => rows(kernel, width, terms, (from, along), (to, step)),
            }
        },
    );
}

/// [`pack`] with two terms as bf16 in each element: pair q of row i goes to `to + q step + i`, an odd last term with zero.
///
/// # Safety
/// As [`pack`], for half as many rows at `to`, rounded up.
pub(super) unsafe fn pack_pairs<S: Simd>(
    s: S,
    (width, terms): (usize, usize),
    (from, across, along, _): (*const f32, usize, usize, usize),
    (to, step): (*mut f32, usize),
) {
    let pairs = terms.div_ceil(2);
    s.run(
        #[inline(always)]
        || {
            if across == 1 {
                for q in 0..pairs {
                    for p in [2 * q, 2 * q + 1] {
                        s.prefetch_far(from.wrapping_add((p + AHEAD) * along));
                    }
                    // SAFETY: the caller's promise.
                    unsafe {
                        let row = |p: usize| std::slice::from_raw_parts(from.add(p * along), width);
                        let to = std::slice::from_raw_parts_mut(to.add(q * step), width);
                        s.pair_rows(to, row(2 * q), (2 * q + 1 < terms).then(|| row(2 * q + 1)));
                    }
                }
                return;
            }
            let lanes = S::LANES;
            let mut block = [0.0; MOST_LANES * MOST_LANES];
            // The ragged rows first: what they write beyond the width is written again later.
            for i in (0..width).step_by(lanes).rev() {
                let height = lanes.min(width - i);
                for q in (0..pairs).step_by(lanes) {
                    let some = lanes.min(pairs - q);
                    let length = (2 * lanes).min(terms - 2 * q);
                    for (r, row) in block.chunks_exact_mut(lanes).take(height).enumerate() {
                        // SAFETY: the caller's promise.
                        let terms =
                            unsafe { std::slice::from_raw_parts(from.add((i + r) * across + 2 * q), length) };
                        s.pair_terms(&mut row[..some], terms);
                    }
                    // SAFETY: what is written lies below `pairs` rows of `step`.
                    unsafe {
                        if (q + lanes - 1) * step + i + lanes <= pairs * step {
                            Simd::transpose(s, block.as_ptr(), lanes, to.add(q * step + i), step);
                            continue;
                        }
                        for (p, r) in (0..some).flat_map(|p| (0..height).map(move |r| (p, r))) {
                            *to.add((q + p) * step + i + r) = block[r * lanes + p];
                        }
                    }
                }
            }
        },
    );
}

/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn rows<K: Kernel>(
    kernel: K,
    width: usize,
    terms: usize,
    (from, along): (*const K::E, usize),
    (to, step): (*mut K::E, usize),
) {
    for p in 0..terms {
        // Every term lies on another page, where the CPU does not look ahead by itself.
        kernel.prefetch(from.wrapping_add((p + AHEAD) * along));
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from.add(p * along), to.add(p * step), width) };
    }
}

/// A panel whose terms lie one after another.
///
/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn transposed<K: Kernel>(
    kernel: K,
    (width, terms): (usize, usize),
    (from, across, reach): (*const K::E, usize, usize),
    (to, step): (*mut K::E, usize),
) {
    let lanes = K::LANES;
    // Two blocks of terms at a time, so that the lines of both are read once.
    for pair in (0..terms).step_by(2 * lanes) {
        // The ragged block first: what it writes beyond the width is written again later.
        for i in (0..width).step_by(lanes).rev() {
            for p in (pair..terms.min(pair + 2 * lanes)).step_by(lanes) {
                let end = (p + lanes - 1) * step + i + lanes;
                // SAFETY: what is read lies below `width` and `terms`, or below `reach`; what is written, below `terms`.
                unsafe {
                    if p + lanes <= terms && i + lanes <= reach && end <= terms * step {
                        kernel.transpose(from.add(i * across + p), across, to.add(p * step + i), step);
                        continue;
                    }
                    for q in p..terms.min(p + lanes) {
                        (i..width.min(i + lanes))
                            .for_each(|r| *to.add(q * step + r) = *from.add(r * across + q));
                    }
                }
            }
        }
    }
}
