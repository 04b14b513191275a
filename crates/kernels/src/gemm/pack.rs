//! Operands in the order in which tiles read them: panels of a few rows of A or columns of B, term after term.
use super::Kernel;
use crate::Real;
use crate::simd::Simd;
use crate::simd::pairs::pair_rows;

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
                w if w == K::PANEL => rows(K::PANEL, terms, (from, along), (to, step)),
                w if w == K::ROWS => rows(K::ROWS, terms, (from, along), (to, step)),
                _ => rows(width, terms, (from, along), (to, step)),
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
    (from, across, along, reach): (*const f32, usize, usize, usize),
    (to, step): (*mut f32, usize),
) {
    /// Terms that are packed as f32 first, and the widest rows of them.
    const ROWS: usize = 32;
    const WIDEST: usize = 64;
    assert!(step <= WIDEST);
    let mut block = [0.0; ROWS * WIDEST];
    for first in (0..terms).step_by(ROWS) {
        let some = ROWS.min(terms - first);
        // SAFETY: these terms lie at `from`, and the block has room for them; the caller's promise for their pairs.
        unsafe {
            let from = (from.wrapping_add(first * along), across, along, reach);
            pack(s, (width, some), from, (block.as_mut_ptr(), step));
            s.run(
                #[inline(always)]
                || {
                    for (q, two) in block[..some * step].chunks(2 * step).enumerate() {
                        let to = std::slice::from_raw_parts_mut(to.add((first / 2 + q) * step), width);
                        pair_rows(to, &two[..width], two.get(step..step + width));
                    }
                },
            );
        }
    }
}

/// # Safety
/// As [`pack`].
#[inline(always)]
unsafe fn rows<E: Real>(
    width: usize,
    terms: usize,
    (from, along): (*const E, usize),
    (to, step): (*mut E, usize),
) {
    for p in 0..terms {
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
