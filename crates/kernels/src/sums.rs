//! Sums over the rows of a matrix.
use super::{Isa, Real, Shared, par, vectorize};
use rayon::prelude::*;

/// Sums of the columns of a matrix with rows of `n`: rows in blocks of 64, so that rounding grows with the number
/// of blocks, not of rows.
pub fn column_sums<T: Real>(g: &[T], n: usize) -> Vec<T> {
    // Columns that a task takes: about 32,000 numbers, and whole cache lines.
    let width = ((1 << 15) * n / g.len().max(1)).clamp(16, n.max(16)).next_multiple_of(16);
    let mut sums = vec![T::ZERO; n];
    sums.par_chunks_mut(width).enumerate().for_each(|(i, sums)| {
        let mut partial = vec![T::ZERO; sums.len()];
        for block in g.chunks(64 * n) {
            partial.fill(T::ZERO);
            for row in block.chunks_exact(n) {
                let row = &row[i * width..i * width + sums.len()];
                partial.iter_mut().zip(row).for_each(|(s, v)| *s += *v);
            }
            sums.iter_mut().zip(&partial).for_each(|(s, v)| *s += *v);
        }
    });
    sums
}

/// Sums of the columns of a matrix with many rows of a few numbers, `n`: rows in fixed chunks on every thread, the chunks'
/// sums in f64 in their order.
pub fn tall_column_sums<T: Real>(isa: Isa, g: &[T], n: usize) -> Vec<T> {
    /// Rows of a chunk, and of a block within it.
    const ROWS: usize = 4096;
    const BLOCK: usize = 64;
    let of_chunk = |chunk: &[T]| -> Vec<T> {
        let (mut sums, mut partial) = (vec![T::ZERO; n], vec![T::ZERO; n]);
        vectorize(
            isa,
            #[inline(always)]
            || {
                for block in chunk.chunks(BLOCK * n) {
                    partial.fill(T::ZERO);
                    for row in block.chunks_exact(n) {
                        partial.iter_mut().zip(row).for_each(|(s, v)| *s += *v);
                    }
                    sums.iter_mut().zip(&partial).for_each(|(s, v)| *s += *v);
                }
            },
        );
        sums
    };
    let chunks: Vec<Vec<T>> = g.par_chunks((ROWS * n).max(1)).map(of_chunk).collect();
    let column = |j: usize| T::from_f64(chunks.iter().map(|sums| sums[j].to_f64()).sum());
    (0..n).map(column).collect()
}

/// The same sums by whole rows: those of about 65,000 numbers are one task, and the tasks' sums are added in f64 in their order. Faster
/// than [`column_sums`] where rows are long, with other roundings.
pub fn row_sums<T: Real>(isa: Isa, g: &[T], n: usize) -> Vec<T> {
    const BLOCK: usize = 64;
    let rows = g.len() / n.max(1);
    let each = ((1 << 16) / n.max(1)).max(1).next_multiple_of(BLOCK);
    let tasks = rows.div_ceil(each);
    let mut sums = vec![T::ZERO; tasks * n];
    let to = Shared::new(&mut sums);
    par(tasks, |task| {
        let (first, last) = (task * each, rows.min((task + 1) * each));
        // SAFETY: each task has sums of its own.
        let sums = unsafe { to.slice(task * n, n) };
        let mut partial = vec![T::ZERO; n];
        vectorize(
            isa,
            #[inline(always)]
            || {
                for block in g[first * n..last * n].chunks(BLOCK * n) {
                    partial.fill(T::ZERO);
                    for row in block.chunks_exact(n) {
                        partial.iter_mut().zip(row).for_each(|(s, v)| *s += *v);
                    }
                    sums.iter_mut().zip(&partial).for_each(|(s, v)| *s += *v);
                }
            },
        );
    });
    (0..n).map(|j| T::from_f64((0..tasks).map(|task| sums[task * n + j].to_f64()).sum())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_sums_do_not_depend_on_how_they_are_cut() {
        for (m, n) in [(1, 1), (3, 17), (200, 33), (1000, 70), (9001, 3)] {
            let g: Vec<f64> = (0..m * n).map(|i| ((i * 31) % 97) as f64).collect();
            let want: Vec<f64> = (0..n).map(|j| (0..m).map(|i| g[i * n + j]).sum()).collect();
            assert_eq!(column_sums(&g, n), want);
            for isa in Isa::available() {
                assert_eq!(tall_column_sums(isa, &g, n), want);
                assert_eq!(row_sums(isa, &g, n), want);
            }
        }
    }
}
