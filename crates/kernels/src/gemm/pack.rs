//! Operands in the order in which tiles read them: panels of a few rows of A or columns of B, term after term.
use super::Kernel;
use crate::Real;

/// Elements of the largest block that is transposed at once.
const BLOCK: usize = 256;

/// Writes a panel: element (i, p) of `width` × `terms` goes from `from + i across + p along` to `to + p step + i`. One of the
/// two strides is 1.
///
/// # Safety
/// Those elements are valid, and at `from` also those with i below `reach` and p below `terms`; all `terms` rows of `step`,
/// at least `width`, may be written.
#[inline(always)]
pub(super) unsafe fn pack<K: Kernel>(
    kernel: K,
    (width, terms): (usize, usize),
    (from, across, along, reach): (*const K::E, usize, usize, usize),
    (to, step): (*mut K::E, usize),
) {
    // SAFETY: the caller's promise; constant widths become a few moves.
    unsafe {
        if across != 1 {
            return transposed(kernel, (width, terms), (from, across, reach), (to, step));
        }
        match width {
            w if w == K::PANEL => rows(K::PANEL, terms, (from, along), (to, step)),
            w if w == K::ROWS => rows(K::ROWS, terms, (from, along), (to, step)),
            _ => rows(width, terms, (from, along), (to, step)),
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
    let (mut block, mut turned) = ([K::E::ZERO; BLOCK], [K::E::ZERO; BLOCK]);
    for p in (0..terms).step_by(lanes) {
        let length = lanes.min(terms - p);
        for i in (0..width).step_by(lanes) {
            let height = lanes.min(width - i);
            // SAFETY: what is read lies below `width` and `terms`, or below `reach`; what is written, below `terms`.
            unsafe {
                let start = from.add(i * across + p);
                if (height, length) == (lanes, lanes) {
                    kernel.transpose(start, across, to.add(p * step + i), step);
                    continue;
                }
                if i + lanes <= reach && length == lanes {
                    kernel.transpose(start, across, turned.as_mut_ptr(), lanes);
                } else {
                    for r in 0..height {
                        let row = block.as_mut_ptr().add(r * lanes);
                        std::ptr::copy_nonoverlapping(start.add(r * across), row, length);
                    }
                    kernel.transpose(block.as_ptr(), lanes, turned.as_mut_ptr(), lanes);
                }
                for q in 0..length {
                    let (row, at) = (turned.as_ptr().add(q * lanes), (p + q) * step + i);
                    // A whole vector where what it spoils is written later.
                    let whole = i == 0 && width <= lanes && at + lanes <= terms * step;
                    if whole {
                        std::ptr::copy_nonoverlapping(row, to.add(at), lanes);
                    } else {
                        std::ptr::copy_nonoverlapping(row, to.add(at), height);
                    }
                }
            }
        }
    }
}
