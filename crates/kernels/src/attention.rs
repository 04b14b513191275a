//! Softmax attention in blocks: no matrix of all scores is ever in memory.
//!
//! A task takes a block of queries of one head over all blocks of keys. It keeps the largest score of each query and the sum of
//! exponentials so far, and corrects what it has summed when a larger score comes. The backward pass computes the scores once more,
//! from the logarithm of that sum, which is all that is kept beside the result: memory grows with the length of a sequence, not
//! with its square.
//!
//! Where queries do not see what comes after them, blocks above the diagonal are left out, and within a block on the diagonal
//! most of what lies above it is.
use super::gemm::Kernel;
use super::simd::{Into, Simd, read, write};
use super::vmath::exp;
use super::{Buf, Isa, Real, Shared, as_f32, as_f32_mut, par, with_simd};
use std::ops::Range;

/// Keys, and at most queries, of a block: scores of a block, the keys and the values stay in the L2 cache.
const BLOCK: usize = 128;
/// Queries of a block, at least, where there are few heads.
const LEAST: usize = 32;
/// Tasks there should be, where there is enough to do.
const TASKS: usize = 64;
/// Rows of scores are multiples of it, and as much longer than a block: no vector is wider and no tile is higher.
const PAD: usize = 16;

/// The extents of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub queries: usize,
    /// Keys of a sequence, at least as many as queries if causal: the last query is at the place of the last key.
    pub keys: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; each serves as many neighbouring heads of queries.
    pub kv_heads: usize,
    /// Numbers of a head.
    pub size: usize,
    /// Whether a query sees no key that comes after it.
    pub causal: bool,
}

/// Where the rows of an operand lie: row t of sequence b at (b · rows of a sequence + t) · `stride` + `offset`, and in it one
/// head after another.
#[derive(Clone, Copy, Debug)]
pub struct Rows<D> {
    /// All of it.
    pub data: D,
    /// From row to row.
    pub stride: usize,
    /// Where the first head begins.
    pub offset: usize,
}

/// Which scores are dropped after the softmax.
#[derive(Clone, Copy)]
pub struct Dropout<'a> {
    /// The factor of those that are kept.
    pub scale: f64,
    /// Writes 1 for those that are kept and 0 for the others, from a number on: score (b, h, i, j) has number
    /// ((b · heads + h) · queries + i) · keys + j.
    pub keep: &'a (dyn Fn(usize, &mut [u8]) + Sync),
}

impl Shape {
    /// The factor of the scores.
    fn scale(&self) -> f64 {
        1.0 / (self.size as f64).sqrt()
    }

    /// Heads of queries for each of keys.
    fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// How many keys query `i` sees.
    fn visible(&self, i: usize) -> usize {
        if self.causal { self.keys - self.queries + i + 1 } else { self.keys }
    }

    /// The queries that a task takes.
    fn query_blocks(&self) -> Vec<Range<usize>> {
        let each = self.batch * self.heads * self.queries / TASKS;
        pieces(self.queries, each.clamp(LEAST, BLOCK))
    }

    fn key_blocks(&self) -> Vec<Range<usize>> {
        pieces(self.keys, BLOCK)
    }

    /// Elements that an operand has at least, of so many rows a sequence and heads.
    fn extent<D>(&self, rows: &Rows<D>, per_sequence: usize, heads: usize) -> usize {
        match self.batch * per_sequence {
            0 => 0,
            count => (count - 1) * rows.stride + rows.offset + heads * self.size,
        }
    }

    fn check<D>(&self, [q, k, v]: [(&Rows<D>, usize); 3], [out, lse]: [usize; 2]) {
        let row = self.heads * self.size;
        assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads), "heads in unequal groups");
        assert!(!self.causal || self.keys >= self.queries, "fewer keys than queries");
        assert!(self.size > 0 && self.keys > 0, "empty heads");
        assert!(q.1 >= self.extent(q.0, self.queries, self.heads), "queries beyond their slice");
        for (rows, length) in [k, v] {
            assert!(
                length >= self.extent(rows, self.keys, self.kv_heads),
                "keys or values beyond their slice"
            );
        }
        assert!(out == self.batch * self.queries * row && lse == self.batch * self.heads * self.queries);
    }
}

/// `total` in equal pieces of at most `most`.
fn pieces(total: usize, most: usize) -> Vec<Range<usize>> {
    let length = total.div_ceil(total.div_ceil(most).max(1)).max(1);
    (0..total).step_by(length).map(|first| first..total.min(first + length)).collect()
}

/// `out` = softmax(q kᵀ/√size) v, its rows without gaps, and `lse`, the logarithm of the sum of exponentials of each score, by
/// sequence, head and query.
///
/// # Panics
/// If the sizes do not fit.
pub fn forward<T: Real>(
    isa: Isa,
    shape: &Shape,
    [q, k, v]: [Rows<&[T]>; 3],
    dropout: Option<Dropout>,
    out: &mut [T],
    lse: &mut [T],
) {
    let lengths = [(&q, q.data.len()), (&k, k.data.len()), (&v, v.data.len())];
    shape.check(lengths, [out.len(), lse.len()]);
    let blocks = shape.query_blocks();
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    let job = Job { shape, q, k, v, dropout };
    par(shape.batch * shape.heads * blocks.len(), |task| {
        let (pair, block) = (task / blocks.len(), &blocks[task % blocks.len()]);
        let (b, h) = (pair / shape.heads, pair % shape.heads);
        // The last blocks have most to do where queries see what is before them: they come first.
        let block = if shape.causal { &blocks[blocks.len() - 1 - task % blocks.len()] } else { block };
        with_simd!(isa.of::<T>(), s => {
            // SAFETY: each task writes the rows of its own queries in its own head.
            unsafe { job.attend(s, T::kernel(s), (b, h), block.clone(), out, lse) }
        });
    });
}

/// The gradients of q, k and v from that of the result, `dout`: all their rows are written, and nothing between them.
///
/// # Panics
/// If the sizes do not fit.
#[allow(clippy::too_many_arguments)]
pub fn backward<T: Real>(
    isa: Isa,
    shape: &Shape,
    [q, k, v]: [Rows<&[T]>; 3],
    dropout: Option<Dropout>,
    (out, lse): (&[T], &[T]),
    dout: &[T],
    gradients: [Rows<Shared<T>>; 3],
    lengths: [usize; 3],
) {
    shape.check([(&q, q.data.len()), (&k, k.data.len()), (&v, v.data.len())], [out.len(), lse.len()]);
    let [dq, dk, dv] = &gradients;
    let of = [(dq, lengths[0]), (dk, lengths[1]), (dv, lengths[2])];
    shape.check(of, [dout.len(), lse.len()]);
    let mut along = Buf::dirty(lse.len());
    rows_along(isa, shape, out, dout, &mut along);
    let job = Job { shape, q, k, v, dropout };
    let back = Back { job, lse, dout, along: &along, gradients };
    let (keys, queries) = (shape.key_blocks(), shape.query_blocks());
    let pairs = shape.batch * shape.kv_heads;
    if pairs >= TASKS / 2 || keys.len() == 1 && queries.len() == 1 {
        // Scores are computed once for all three gradients.
        par(pairs, |pair| {
            let at = (pair / shape.kv_heads, pair % shape.kv_heads);
            with_simd!(isa.of::<T>(), s => {
                // SAFETY: each task has a head of keys of its own, and the heads of queries that belong to it.
                unsafe { back.all(s, T::kernel(s), at, &keys, &queries) }
            });
        });
        return;
    }
    // Few heads: more tasks, which compute scores twice. First those of keys, then those of queries.
    let of_keys = pairs * keys.len();
    par(of_keys + shape.batch * shape.heads * queries.len(), |task| {
        with_simd!(isa.of::<T>(), s => {
            match task.checked_sub(of_keys) {
                None => {
                    let (pair, block) = (task / keys.len(), &keys[task % keys.len()]);
                    let at = (pair / shape.kv_heads, pair % shape.kv_heads);
                    // SAFETY: each task has keys of its own.
                    unsafe { back.of_keys(s, T::kernel(s), at, block.clone(), &queries) }
                }
                Some(task) => {
                    let (pair, block) = (task / queries.len(), &queries[task % queries.len()]);
                    let at = (pair / shape.heads, pair % shape.heads);
                    // SAFETY: each task has queries of its own.
                    unsafe { back.of_queries(s, T::kernel(s), at, &keys, block.clone()) }
                }
            }
        });
    });
}

/// The sum of out · dout over each head of each row, in the order of `lse`.
fn rows_along<T: Real>(isa: Isa, shape: &Shape, out: &[T], dout: &[T], along: &mut [T]) {
    let (size, row) = (shape.size, shape.heads * shape.size);
    let along = Shared::new(along);
    let step = ((1 << 14) / row.max(1)).max(1);
    let rows = shape.batch * shape.queries;
    par(rows.div_ceil(step), |task| {
        super::vectorize(
            isa,
            #[inline(always)]
            || {
                for r in task * step..rows.min((task + 1) * step) {
                    let (b, i) = (r / shape.queries, r % shape.queries);
                    for h in 0..shape.heads {
                        let at = r * row + h * size;
                        let (o, d) = (&out[at..at + size], &dout[at..at + size]);
                        let mut sums = [T::ZERO; 8];
                        for (o, d) in o.chunks(8).zip(d.chunks(8)) {
                            sums.iter_mut().zip(o.iter().zip(d)).for_each(|(s, (o, d))| *s += *o * *d);
                        }
                        let sum = T::from_f64(sums.iter().map(|s| s.to_f64()).sum());
                        // SAFETY: each row has its own sums.
                        unsafe { *along.at((b * shape.heads + h) * shape.queries + i) = sum };
                    }
                }
            },
        );
    });
}

/// The operands of an attention.
#[derive(Clone, Copy)]
struct Job<'a, T> {
    shape: &'a Shape,
    q: Rows<&'a [T]>,
    k: Rows<&'a [T]>,
    v: Rows<&'a [T]>,
    dropout: Option<Dropout<'a>>,
}

impl<'a, T: Real> Job<'a, T> {
    /// The rows of a head of queries from `first` on, and their distance.
    fn queries(&self, (b, h): (usize, usize), first: usize) -> (*const T, usize) {
        let at = (b * self.shape.queries + first) * self.q.stride + self.q.offset + h * self.shape.size;
        (self.q.data.as_ptr().wrapping_add(at), self.q.stride)
    }

    /// The same of the keys or the values.
    fn keys(&self, of: &Rows<&'a [T]>, (b, g): (usize, usize), first: usize) -> (*const T, usize) {
        let at = (b * self.shape.keys + first) * of.stride + of.offset + g * self.shape.size;
        (of.data.as_ptr().wrapping_add(at), of.stride)
    }

    /// How many of a block of keys query `i` sees.
    fn seen(&self, i: usize, keys: &Range<usize>) -> usize {
        self.shape.visible(i).clamp(keys.start, keys.end) - keys.start
    }

    /// q kᵀ of a block, as far as it is seen: rows of scores that are not seen are not written.
    ///
    /// # Safety
    /// `turned` holds the transposed keys, and `scores` has room for the queries' rows of `ld`.
    unsafe fn scores<K: Kernel<E = T>>(
        &self,
        kernel: K,
        at: (usize, usize),
        (queries, keys): (&Range<usize>, &Range<usize>),
        turned: &Panels<T>,
        (scores, ld): (*mut T, usize),
    ) {
        let (q, stride) = self.queries(at, queries.start);
        let far = |i: usize, high: usize| self.seen(queries.start + i + high - 1, keys);
        // SAFETY: the caller's promise, and the operands' extents, which were checked.
        unsafe {
            let size = (queries.len(), whole(keys.len()), self.shape.size);
            product(kernel, size, (q, stride, 1), turned, (scores, ld), Into::Set, Bound::Columns(&far));
        }
    }

    /// Which scores of query `i` are kept, of a block of keys.
    fn keep(&self, dropout: &Dropout, (b, h): (usize, usize), i: usize, keys: Range<usize>, keep: &mut [u8]) {
        let first = ((b * self.shape.heads + h) * self.shape.queries + i) * self.shape.keys + keys.start;
        (dropout.keep)(first, &mut keep[..keys.len()]);
    }

    /// A block of queries of a head.
    ///
    /// # Safety
    /// Nobody else touches their rows of `out` and `lse`.
    unsafe fn attend<S: Simd, K: Kernel<E = T>>(
        &self,
        s: S,
        kernel: K,
        (b, h): (usize, usize),
        queries: Range<usize>,
        out: Shared<T>,
        lse: Shared<T>,
    ) {
        let shape = self.shape;
        let (size, kv, scale) = (shape.size, h / shape.group(), shape.scale());
        let (count, ld) = (queries.len(), padded(BLOCK.min(shape.keys)));
        let block = BLOCK.min(shape.keys);
        let (mut turned, mut values) = (Panels::new::<K>(block, size), Panels::new::<K>(size, block));
        let mut scores = Buf::dirty(count * ld);
        let mut sums = Buf::dirty(count * size);
        let mut state = vec![State { most: f64::NEG_INFINITY, sum: 0.0 }; count];
        let mut keep = vec![0; if self.dropout.is_some() { BLOCK } else { 0 }];
        let last = shape.visible(queries.end - 1);
        for keys in shape.key_blocks().into_iter().take_while(|keys| keys.start < last) {
            let first = keys.start == 0;
            // SAFETY: the buffers have room for a block, and operands were checked.
            unsafe {
                let (k, stride) = self.keys(&self.k, (b, kv), keys.start);
                turned.fill(kernel, (keys.len(), size), (k, stride, 1));
                self.scores(kernel, (b, h), (&queries, &keys), &turned, (scores.as_mut_ptr(), ld));
            }
            s.run(
                #[inline(always)]
                || {
                    for (i, (row, state)) in scores.chunks_exact_mut(ld).zip(&mut state).enumerate() {
                        let seen = self.seen(queries.start + i, &keys);
                        let (row, rest) = row.split_at_mut(seen);
                        if seen > 0 {
                            let shrink = soften(s, row, scale, state);
                            if !first && shrink != 1.0 {
                                let shrink = T::from_f64(shrink);
                                sums[i * size..(i + 1) * size].iter_mut().for_each(|v| *v = *v * shrink);
                            }
                        }
                        // Tiles reach a little further than this row sees.
                        rest[..PAD].fill(T::ZERO);
                    }
                },
            );
            if let Some(dropout) = &self.dropout {
                for (i, row) in scores.chunks_exact_mut(ld).take(count).enumerate() {
                    let seen = self.seen(queries.start + i, &keys);
                    self.keep(dropout, (b, h), queries.start + i, keys.start..keys.start + seen, &mut keep);
                    drop_scores(&mut row[..seen], &keep, dropout.scale);
                }
            }
            let into = if first { Into::Set } else { Into::Add };
            let far = |i: usize, high: usize| 0..self.seen(queries.start + i + high - 1, &keys);
            // SAFETY: as above.
            unsafe {
                let (v, stride) = self.keys(&self.v, (b, kv), keys.start);
                values.fill(kernel, (size, keys.len()), (v, 1, stride));
                let (scores, to) = ((scores.as_ptr(), ld, 1), (sums.as_mut_ptr(), size));
                product(kernel, (count, size, keys.len()), scores, &values, to, into, Bound::Terms(&far));
            }
        }
        s.run(
            #[inline(always)]
            || {
                for (i, State { most, sum }) in state.into_iter().enumerate() {
                    let row = ((b * shape.queries + queries.start + i) * shape.heads + h) * size;
                    let share = T::from_f64(1.0 / sum);
                    // SAFETY: the caller's promise.
                    unsafe {
                        let (out, sums) = (out.slice(row, size), &sums[i * size..(i + 1) * size]);
                        out.iter_mut().zip(sums).for_each(|(out, v)| *out = *v * share);
                        let at = (b * shape.heads + h) * shape.queries + queries.start + i;
                        *lse.at(at) = T::from_f64(most + libm::log(sum));
                    }
                }
            },
        );
    }
}

/// Scores that are dropped become zero.
fn drop_scores<T: Real>(row: &mut [T], keep: &[u8], scale: f64) {
    let scale = T::from_f64(scale);
    for (v, keep) in row.iter_mut().zip(keep) {
        *v = if *keep != 0 { *v * scale } else { T::ZERO };
    }
}

/// What the backward pass of an attention reads and writes.
struct Back<'a, T> {
    job: Job<'a, T>,
    lse: &'a [T],
    dout: &'a [T],
    along: &'a [T],
    gradients: [Rows<Shared<T>>; 3],
}

/// The buffers of a task.
struct Scratch<T: Real> {
    /// Transposed keys and values, and keys as they are.
    turned: [Panels<T>; 2],
    keys: Panels<T>,
    /// Queries and the result's gradient.
    queries: [Panels<T>; 2],
    /// Probabilities, as they meet the values, and the gradient of the scores.
    shares: Buf<T>,
    slopes: Buf<T>,
    keep: Vec<u8>,
    ld: usize,
}

impl<T: Real> Scratch<T> {
    fn new<K: Kernel<E = T>>(shape: &Shape, queries: &[Range<usize>]) -> Self {
        let (size, keys) = (shape.size, BLOCK.min(shape.keys));
        let rows = queries.iter().map(ExactSizeIterator::len).max().unwrap_or_default();
        let ld = padded(keys);
        Self {
            turned: [Panels::new::<K>(keys, size), Panels::new::<K>(keys, size)],
            keys: Panels::new::<K>(size, keys),
            queries: [Panels::new::<K>(size, rows), Panels::new::<K>(size, rows)],
            shares: Buf::dirty(rows * ld),
            slopes: Buf::dirty(rows * ld),
            keep: vec![0; BLOCK],
            ld,
        }
    }
}

impl<T: Real> Back<'_, T> {
    /// The rows of a gradient of queries (`of` 0) from `first` on.
    ///
    /// # Safety
    /// They are there.
    unsafe fn gradient(&self, of: usize, row: usize, head: usize) -> (*mut T, usize) {
        let Rows { data, stride, offset } = self.gradients[of];
        // SAFETY: the caller's promise.
        (unsafe { data.at(row * stride + offset + head * self.job.shape.size) }, stride)
    }

    /// Packs a block of keys and values.
    fn turn<K: Kernel<E = T>>(
        &self,
        kernel: K,
        at: (usize, usize),
        keys: &Range<usize>,
        to: &mut Scratch<T>,
    ) {
        let (job, size) = (&self.job, self.job.shape.size);
        // SAFETY: the buffers have room for a block, and operands were checked.
        unsafe {
            let (k, stride) = job.keys(&job.k, at, keys.start);
            to.turned[0].fill(kernel, (keys.len(), size), (k, stride, 1));
            to.keys.fill(kernel, (size, keys.len()), (k, 1, stride));
            let (v, stride) = job.keys(&job.v, at, keys.start);
            to.turned[1].fill(kernel, (keys.len(), size), (v, stride, 1));
        }
    }

    /// The probabilities of a block and the gradient of its scores, from keys and values that were packed.
    fn block<S: Simd, K: Kernel<E = T>>(
        &self,
        s: S,
        kernel: K,
        (b, h): (usize, usize),
        (queries, keys): (&Range<usize>, &Range<usize>),
        scratch: &mut Scratch<T>,
    ) {
        let (job, shape, ld) = (&self.job, self.job.shape, scratch.ld);
        let (size, scale) = (shape.size, shape.scale());
        let (dout, stride) = self.dout((b, h), queries.start);
        let far = |i: usize, high: usize| job.seen(queries.start + i + high - 1, keys);
        let extents = (queries.len(), whole(keys.len()), size);
        // SAFETY: the buffers have room for a block, and operands were checked.
        unsafe {
            let to = (scratch.shares.as_mut_ptr(), ld);
            job.scores(kernel, (b, h), (queries, keys), &scratch.turned[0], to);
            let (values, to) = (&scratch.turned[1], (scratch.slopes.as_mut_ptr(), ld));
            product(kernel, extents, (dout, stride, 1), values, to, Into::Set, Bound::Columns(&far));
        }
        let Scratch { shares, slopes, keep, .. } = scratch;
        let rows = || (0..queries.len()).map(|i| (i, job.seen(queries.start + i, keys)));
        let at = |i: usize| (b * shape.heads + h) * shape.queries + queries.start + i;
        let mut kept = |i: usize, seen: usize, row: &mut [T]| {
            if let Some(dropout) = &job.dropout {
                job.keep(dropout, (b, h), queries.start + i, keys.start..keys.start + seen, keep);
                drop_scores(row, keep, dropout.scale);
            }
        };
        rows().for_each(|(i, seen)| kept(i, seen, &mut slopes[i * ld..i * ld + seen]));
        s.run(
            #[inline(always)]
            || {
                for (i, seen) in rows() {
                    let (shares, rest) = shares[i * ld..(i + 1) * ld].split_at_mut(seen);
                    let (slopes, slopes_rest) = slopes[i * ld..(i + 1) * ld].split_at_mut(seen);
                    slope(s, shares, slopes, scale, [self.lse[at(i)], self.along[at(i)]]);
                    // Tiles reach a little further than this row sees.
                    rest[..PAD].fill(T::ZERO);
                    slopes_rest[..PAD].fill(T::ZERO);
                }
            },
        );
        rows().for_each(|(i, seen)| kept(i, seen, &mut shares[i * ld..i * ld + seen]));
    }

    /// The rows of the result's gradient in a head from a query on, and their distance.
    fn dout(&self, (b, h): (usize, usize), first: usize) -> (*const T, usize) {
        let (shape, row) = (self.job.shape, self.job.shape.heads * self.job.shape.size);
        (self.dout.as_ptr().wrapping_add((b * shape.queries + first) * row + h * shape.size), row)
    }

    /// Adds a block's part to the gradients of its keys and values, or sets them to it.
    ///
    /// # Safety
    /// The block was computed, and nobody else touches the gradients.
    unsafe fn give_keys<K: Kernel<E = T>>(
        &self,
        kernel: K,
        (b, h): (usize, usize),
        (queries, keys): (&Range<usize>, &Range<usize>),
        scratch: &mut Scratch<T>,
        into: Into,
    ) {
        let (job, shape, ld) = (&self.job, self.job.shape, scratch.ld);
        let (row, kv) = (b * shape.keys + keys.start, h / shape.group());
        // The first query that sees a key.
        let first = |j: usize| match shape.causal {
            true => (keys.start + j + shape.queries).saturating_sub(shape.keys),
            false => 0,
        };
        let near =
            |j: usize, _: usize| first(j).clamp(queries.start, queries.end) - queries.start..queries.len();
        let extents = (keys.len(), shape.size, queries.len());
        // SAFETY: the caller's promise.
        unsafe {
            let [q, dout] = &mut scratch.queries;
            let (from, stride) = self.dout((b, h), queries.start);
            dout.fill(kernel, (shape.size, queries.len()), (from, 1, stride));
            let (shares, to) = ((scratch.shares.as_ptr(), 1, ld), self.gradient(2, row, kv));
            product(kernel, extents, shares, dout, to, into, Bound::Terms(&near));
            let (from, stride) = job.queries((b, h), queries.start);
            q.fill(kernel, (shape.size, queries.len()), (from, 1, stride));
            let (slopes, to) = ((scratch.slopes.as_ptr(), 1, ld), self.gradient(1, row, kv));
            product(kernel, extents, slopes, q, to, into, Bound::Terms(&near));
        }
    }

    /// The same of its queries.
    ///
    /// # Safety
    /// As [`Back::give_keys`].
    unsafe fn give_queries<K: Kernel<E = T>>(
        &self,
        kernel: K,
        (b, h): (usize, usize),
        (queries, keys): (&Range<usize>, &Range<usize>),
        scratch: &Scratch<T>,
        into: Into,
    ) {
        let (job, shape) = (&self.job, self.job.shape);
        let far = |i: usize, high: usize| 0..job.seen(queries.start + i + high - 1, keys);
        let extents = (queries.len(), shape.size, keys.len());
        // SAFETY: the caller's promise.
        unsafe {
            let to = self.gradient(0, b * shape.queries + queries.start, h);
            let slopes = (scratch.slopes.as_ptr(), scratch.ld, 1);
            product(kernel, extents, slopes, &scratch.keys, to, into, Bound::Terms(&far));
        }
    }

    /// Whether queries see any of some keys.
    fn sees(&self, queries: &Range<usize>, keys: &Range<usize>) -> bool {
        keys.start < self.job.shape.visible(queries.end - 1)
    }

    /// All gradients of a head of keys and of the heads of queries that belong to it.
    ///
    /// # Safety
    /// Nobody else touches them.
    unsafe fn all<S: Simd, K: Kernel<E = T>>(
        &self,
        s: S,
        kernel: K,
        (b, kv): (usize, usize),
        keys: &[Range<usize>],
        queries: &[Range<usize>],
    ) {
        let mut scratch = Scratch::new::<K>(self.job.shape, queries);
        let group = self.job.shape.group();
        for keys in keys {
            self.turn(kernel, (b, kv), keys, &mut scratch);
            let mut into = Into::Set;
            for h in kv * group..(kv + 1) * group {
                for queries in queries.iter().filter(|queries| self.sees(queries, keys)) {
                    self.block(s, kernel, (b, h), (queries, keys), &mut scratch);
                    let first = if keys.start == 0 { Into::Set } else { Into::Add };
                    // SAFETY: the caller's promise.
                    unsafe {
                        self.give_keys(kernel, (b, h), (queries, keys), &mut scratch, into);
                        self.give_queries(kernel, (b, h), (queries, keys), &scratch, first);
                    }
                    into = Into::Add;
                }
            }
        }
    }

    /// The gradients of a block of keys and values.
    ///
    /// # Safety
    /// As [`Back::all`].
    unsafe fn of_keys<S: Simd, K: Kernel<E = T>>(
        &self,
        s: S,
        kernel: K,
        (b, kv): (usize, usize),
        keys: Range<usize>,
        queries: &[Range<usize>],
    ) {
        let mut scratch = Scratch::new::<K>(self.job.shape, queries);
        let group = self.job.shape.group();
        self.turn(kernel, (b, kv), &keys, &mut scratch);
        let mut into = Into::Set;
        for h in kv * group..(kv + 1) * group {
            for queries in queries.iter().filter(|queries| self.sees(queries, &keys)) {
                self.block(s, kernel, (b, h), (queries, &keys), &mut scratch);
                // SAFETY: the caller's promise.
                unsafe { self.give_keys(kernel, (b, h), (queries, &keys), &mut scratch, into) };
                into = Into::Add;
            }
        }
    }

    /// The gradient of a block of queries.
    ///
    /// # Safety
    /// As [`Back::all`].
    unsafe fn of_queries<S: Simd, K: Kernel<E = T>>(
        &self,
        s: S,
        kernel: K,
        (b, h): (usize, usize),
        keys: &[Range<usize>],
        queries: Range<usize>,
    ) {
        let mut scratch = Scratch::new::<K>(self.job.shape, std::slice::from_ref(&queries));
        let kv = h / self.job.shape.group();
        for keys in keys.iter().filter(|keys| self.sees(&queries, keys)) {
            self.turn(kernel, (b, kv), keys, &mut scratch);
            self.block(s, kernel, (b, h), (&queries, keys), &mut scratch);
            let into = if keys.start == 0 { Into::Set } else { Into::Add };
            // SAFETY: the caller's promise.
            unsafe { self.give_queries(kernel, (b, h), (&queries, keys), &scratch, into) };
        }
    }
}

/// Columns of a block of scores that are computed: whole vectors are faster, and what is beyond the keys nobody reads.
fn whole(keys: usize) -> usize {
    keys.next_multiple_of(8)
}

/// The length of a row of scores.
fn padded(keys: usize) -> usize {
    keys.next_multiple_of(PAD) + PAD
}

/// What of a product is asked for, given the first row of a tile and its height.
enum Bound<'a> {
    /// So many of the columns; others may be written.
    Columns(&'a dyn Fn(usize, usize) -> usize),
    /// All, from these terms: the others are zero.
    Terms(&'a dyn Fn(usize, usize) -> Range<usize>),
}

/// A right operand in the order in which tiles read it: panels of columns, row by row. Rows of heads lie too far apart for the
/// few ways of an L1 cache.
struct Panels<T: Real> {
    data: Buf<T>,
    /// Rows it has room for, and so the distance of panels.
    rows: usize,
}

impl<T: Real> Panels<T> {
    fn new<K: Kernel<E = T>>(columns: usize, rows: usize) -> Self {
        Self { data: Buf::dirty(columns.next_multiple_of(K::PANEL) * rows), rows }
    }

    /// Takes `size` columns and rows: element (i, p) of column i and row p at `from.0 + i from.1 + p from.2`, and one of the steps
    /// is 1.
    ///
    /// # Safety
    /// They are there, and no more than there is room for.
    unsafe fn fill<K: Kernel<E = T>>(
        &mut self,
        kernel: K,
        (columns, rows): (usize, usize),
        (from, across, along): (*const T, usize, usize),
    ) {
        for j in (0..columns).step_by(K::PANEL) {
            let size = (K::PANEL.min(columns - j), rows);
            let to = self.data[j * self.rows..].as_mut_ptr();
            // SAFETY: the caller's promise; the panel begins within the buffer.
            unsafe {
                kernel.pack(size, (from.wrapping_add(j * across), across, along, columns - j), (to, K::PANEL))
            };
        }
    }
}

/// C (+)= A B on one thread, `m` × `k` by `k` × `n`: `a(i, p)` at `a + i rsa + p csa`, rows of C as far apart as said.
///
/// # Safety
/// All of it is valid, and C overlaps neither A nor B.
unsafe fn product<K: Kernel>(
    kernel: K,
    (m, n, k): (usize, usize, usize),
    (a, rsa, csa): (*const K::E, usize, usize),
    b: &Panels<K::E>,
    (c, ldc): (*mut K::E, usize),
    into: Into,
    bound: Bound,
) {
    kernel.run(
        #[inline(always)]
        || {
            let mut i = 0;
            while i < m {
                let high = match m - i {
                    left if left <= K::ROWS => left,
                    left if left < 2 * K::ROWS => left.div_ceil(2),
                    _ => K::ROWS,
                };
                let (columns, terms) = match &bound {
                    Bound::Columns(f) => (f(i, high).min(n), 0..k),
                    Bound::Terms(f) => (n, f(i, high)),
                };
                for j in (0..columns).step_by(K::PANEL) {
                    let width = K::PANEL.min(n - j);
                    // SAFETY: the tile lies within the matrices of the caller's promise; of no terms nothing is read.
                    unsafe {
                        let a = (a.wrapping_add(i * rsa + terms.start * csa), rsa, csa);
                        let b = b.data.as_ptr().wrapping_add(j * b.rows + terms.start * K::PANEL);
                        kernel.tile(
                            (high, width),
                            terms.len(),
                            a,
                            (b, K::PANEL),
                            (c.add(i * ldc + j), ldc),
                            into,
                        );
                    }
                }
                i += high;
            }
        },
    );
}

/// What is known of a query so far.
#[derive(Clone, Copy)]
struct State {
    /// The largest score, times the scale.
    most: f64,
    /// The sum of exponentials, each divided by the largest.
    sum: f64,
}

/// All lanes as one, pairwise.
#[inline(always)]
fn fold(mut lanes: [f32; PAD], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = PAD / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] = f(lanes[i], lanes[i + width]);
        }
        width /= 2;
    }
    lanes[0]
}

/// Replaces a row of scores that is not empty by exponentials, as shares of the largest score so far, and adds them up; by what all
/// before must be multiplied, should the largest have become larger.
#[inline(always)]
fn soften<S: Simd, T: Real>(s: S, row: &mut [T], scale: f64, state: &mut State) -> f64 {
    let (highest, before) = (largest(s, row) * scale, state.most);
    // Of nothing but −∞ and NaN, those stay what they are.
    if highest > before {
        state.most = highest;
    }
    let total = exponentials(s, row, scale, state.most);
    let shrink = if state.sum == 0.0 || before == state.most { 1.0 } else { libm::exp(before - state.most) };
    state.sum = state.sum * shrink + total;
    shrink
}

/// The largest number of a row.
#[inline(always)]
fn largest<S: Simd, T: Real>(s: S, row: &[T]) -> f64 {
    if !T::IS_F32 {
        return row
            .iter()
            .fold(f64::NEG_INFINITY, |most, v| if v.to_f64() > most { v.to_f64() } else { most });
    }
    let row = as_f32(row);
    let mut most = [s.splat(f32::NEG_INFINITY); 2];
    let chunks = row.chunks_exact(S::LANES);
    let mut lanes = [f32::NEG_INFINITY; PAD];
    let rest = chunks.remainder();
    lanes[..rest.len()].copy_from_slice(rest);
    for (i, chunk) in chunks.enumerate() {
        // SAFETY: a whole vector.
        let v = unsafe { s.load(chunk.as_ptr()) };
        most[i % 2] = s.where_below(most[i % 2], v, v, most[i % 2]);
    }
    // SAFETY: no vector is wider.
    unsafe {
        let v = s.load(lanes.as_ptr());
        let v = s.where_below(v, most[0], most[0], v);
        s.store(lanes.as_mut_ptr(), s.where_below(v, most[1], most[1], v));
    }
    lanes[S::LANES..].fill(f32::NEG_INFINITY);
    f64::from(fold(lanes, |a, b| if a < b { b } else { a }))
}

/// Replaces a row v by exp(scale · v − shift) and returns the sum.
#[inline(always)]
fn exponentials<S: Simd, T: Real>(s: S, row: &mut [T], scale: f64, shift: f64) -> f64 {
    if !T::IS_F32 {
        row.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() * scale - shift).exponential());
        return row.iter().map(|v| v.to_f64()).sum();
    }
    let row = as_f32_mut(row);
    let (scale, shift) = (s.splat(scale as f32), s.splat(-shift as f32));
    // Two sums, so that additions need not wait for each other.
    let mut sums = [s.zero(); 2];
    let (whole, part) = row.split_at_mut(row.len() / S::LANES * S::LANES);
    for (i, chunk) in whole.chunks_exact_mut(S::LANES).enumerate() {
        // SAFETY: a whole vector.
        unsafe {
            let v = exp(s, s.fma(s.load(chunk.as_ptr()), scale, shift));
            s.store(chunk.as_mut_ptr(), v);
            sums[i % 2] = s.add(sums[i % 2], v);
        }
    }
    let mut lanes = [f32::NEG_INFINITY; PAD];
    // SAFETY: no vector is wider.
    unsafe {
        if !part.is_empty() {
            lanes[..part.len()].copy_from_slice(part);
            let v = exp(s, s.fma(s.load(lanes.as_ptr()), scale, shift));
            s.store(lanes.as_mut_ptr(), v);
            part.copy_from_slice(&lanes[..part.len()]);
            sums[0] = s.add(sums[0], v);
        }
        lanes = [0.0; PAD];
        s.store(lanes.as_mut_ptr(), s.add(sums[0], sums[1]));
    }
    f64::from(fold(lanes, |a, b| a + b))
}

/// Replaces scores by shares, exp(scale · score − lse), and the gradients of shares by those of scores,
/// share · (slope − along) · scale.
#[inline(always)]
fn slope<S: Simd, T: Real>(s: S, shares: &mut [T], slopes: &mut [T], scale: f64, [lse, along]: [T; 2]) {
    if !T::IS_F32 {
        exponentials(s, shares, scale, lse.to_f64());
        for (slope, share) in slopes.iter_mut().zip(shares) {
            *slope = *share * (*slope - along) * T::from_f64(scale);
        }
        return;
    }
    let (shares, slopes) = (as_f32_mut(shares), as_f32_mut(slopes));
    let (lse, along) = (s.splat(-lse.to_f64() as f32), s.splat(along.to_f64() as f32));
    let factor = s.splat(scale as f32);
    let whole = shares.len() / S::LANES * S::LANES;
    for at in (0..shares.len()).step_by(S::LANES) {
        let count = if at < whole { S::LANES } else { shares.len() - at };
        let (share, slope) = (shares[at..].as_mut_ptr(), slopes[at..].as_mut_ptr());
        // SAFETY: `count` numbers, the rest of the row if it is not whole.
        unsafe {
            let v = exp(s, s.fma(read(s, share, count), factor, lse));
            let g = s.mul(s.mul(v, s.sub(read(s, slope, count), along)), factor);
            write(s, share, count, v, Into::Set);
            write(s, slope, count, g, Into::Set);
        }
    }
}

#[cfg(test)]
mod tests;
