//! How a product is cut into tasks: by shape alone, so that the bits of a result do not depend on the number of threads.
//!
//! The operands are packed first, all tasks together, so that tasks can be as small as it takes to occupy many threads and
//! none packs what another has packed. Within a task a panel of B stays in the L1 cache, or nearly, and a block of A in the L2 cache.
use super::pack::AHEAD;
use super::{Kernel, Mat, Part, Start};
use crate::simd::Into;
use crate::{Buf, Real, Shared, par, par_after};
use std::ops::Range;

/// Where a product is cut. All of these change the speed, and of them `terms`, `chunk`, `small`, `part` and `parts` also
/// the bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Products of fewer multiplications are not worth a second thread.
    pub serial: usize,
    /// Multiplications of a task, unless there would be more than `tasks`.
    pub task: usize,
    /// Tasks of a large product: two for each of many threads.
    pub tasks: usize,
    /// Rows of a task, at most: a block of A of so many rows and `terms` terms stays in the L2 cache.
    pub rows: usize,
    /// Panels of a task, at most.
    pub panels: usize,
    /// Terms summed in registers before they are added to C, unless the kernel's own [`Kernel::DEPTH`] is less.
    pub terms: usize,
    /// Terms that are packed at a time, so that the packed operands stay in the L3 cache.
    pub chunk: usize,
    /// Elements that one task packs.
    pub pack: usize,
    /// Elements of a row that one task packs at least, where rows lie across the terms.
    pub wide: usize,
    /// Elements of A, and of B, that are packed at a time.
    pub packed: usize,
    /// Columns of B from which on a packed A pays: a row of A is read once for every panel of them. Four times as many where
    /// rows of A lie as tiles read them.
    pub pack_a: usize,
    /// Rows of A from which on a packed B pays.
    pub pack_b: usize,
    /// Elements of a result that is small enough to be summed in parts, if it has many terms.
    pub small: usize,
    /// Terms of such a part.
    pub part: usize,
    /// Elements of all parts together.
    pub parts: usize,
}

/// Those in use.
pub(super) const LIMITS: Limits = Limits {
    serial: 200_000,
    task: 1 << 20,
    tasks: 128,
    rows: 96,
    panels: 32,
    terms: usize::MAX,
    chunk: 1024,
    pack: 1 << 14,
    wide: 192,
    packed: 3 << 19,
    pack_a: 96,
    pack_b: 48,
    small: 1 << 16,
    part: 1024,
    parts: 1 << 22,
};

/// [`LIMITS`] of vectors of so many lanes: CPUs with AVX-512 have twice the L2 cache.
pub(super) const fn limits(lanes: usize) -> Limits {
    Limits { rows: if lanes >= 16 { 192 } else { LIMITS.rows }, ..LIMITS }
}

/// Those of a kernel that multiplies ten times as fast: larger tasks, and blocks of A so high that panels of B arrive in time.
pub(super) const FAST: Limits = Limits { serial: 1 << 20, task: 1 << 22, rows: 384, ..LIMITS };

/// Elements that are asked for at a time.
const LINE: usize = 16;
/// Lines that a tile asks for, at most: a few tiles cannot hide the way of a whole panel.
const MOST_LINES: usize = 32;

/// The result: its first element and the distance of its rows.
#[derive(Clone, Copy)]
struct Out<E> {
    at: Shared<E>,
    ld: usize,
}

impl<E> Out<E> {
    /// The address of element (i, j).
    ///
    /// # Safety
    /// There is such an element.
    unsafe fn at(self, i: usize, j: usize) -> *mut E {
        // SAFETY: the caller's promise.
        unsafe { self.at.at(i * self.ld + j) }
    }
}

/// C = A B and what it is added to.
///
/// # Safety
/// The inner sizes are equal, C is valid and overlaps nothing else, the start is of C's size.
pub(super) unsafe fn multiply<K: Kernel>(
    kernel: K,
    limits: &Limits,
    a: Mat<K::E>,
    b: Mat<K::E>,
    (c, ld): (*mut K::E, usize),
    start: Start<K::E>,
    part: Part,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let c = Out { at: Shared::at_address(c), ld };
    let parts = (k / limits.part).min(limits.parts / (m * n));
    // SAFETY: the caller's promise.
    unsafe {
        if m * n <= limits.small && parts >= 4 {
            in_parts(kernel, limits, a, b, c, start, parts);
        } else {
            let parallel = (m * n).saturating_mul(k) >= limits.serial;
            whole(kernel, limits, a, b, c, start, part, parallel);
        }
    }
}

/// A small result of many terms: the terms in parts, each part by one task, and the sum of the parts in their order.
///
/// # Safety
/// As [`multiply`].
unsafe fn in_parts<K: Kernel>(
    kernel: K,
    limits: &Limits,
    a: Mat<K::E>,
    b: Mat<K::E>,
    c: Out<K::E>,
    start: Start<K::E>,
    parts: usize,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let mut sums = Buf::dirty(parts * m * n);
    let out = Shared::new(&mut sums);
    let length = k.div_ceil(parts);
    par(parts, |i| {
        let terms = (i * length).min(k)..((i + 1) * length).min(k);
        // SAFETY: a part of the sums for each task; the other promises are the caller's.
        unsafe {
            let c = Out { at: Shared::at_address(out.at(i * m * n)), ld: n };
            let (a, b) = (a.columns(&terms), b.t().columns(&terms).t());
            whole(kernel, limits, a, b, c, Start::Zero, Part::All, false);
        }
    });
    par(m, |i| {
        // SAFETY: a row for each task, within the caller's promise.
        unsafe {
            let row = |part: usize| &sums[(part * m + i) * n..][..n];
            let first = match begin(start, c, (i, 0), (1, n)) {
                Into::Add => 0,
                Into::Set => {
                    std::ptr::copy_nonoverlapping(row(0).as_ptr(), c.at(i, 0), n);
                    1
                }
            };
            for part in first..parts {
                row(part).iter().enumerate().for_each(|(j, sum)| *c.at(i, j) += *sum);
            }
        }
    });
}

/// Puts into a block of C what it starts from, and tells what to do with the first sums.
///
/// # Safety
/// The block is valid, and nobody else touches it.
#[inline(always)]
unsafe fn begin<E: Real>(
    start: Start<E>,
    c: Out<E>,
    (i0, j0): (usize, usize),
    (rows, columns): (usize, usize),
) -> Into {
    for i in i0..i0 + rows {
        // SAFETY: the caller's promise.
        unsafe {
            let to = c.at(i, j0);
            match start {
                Start::Zero => return Into::Set,
                Start::Old => return Into::Add,
                Start::Row(row) => std::ptr::copy_nonoverlapping(row[j0..].as_ptr(), to, columns),
                Start::Times(factor, d) => {
                    let from = d.at(i, j0);
                    // Two loops, for the compiler turns the first into vectors.
                    match d.cs {
                        1 => (0..columns).for_each(|j| *to.add(j) = factor * *from.add(j)),
                        step => (0..columns).for_each(|j| *to.add(j) = factor * *from.add(j * step)),
                    }
                }
                Start::Plus(d, row) => {
                    let (from, row) = (d.at(i, j0), &row[j0..j0 + columns]);
                    row.iter().enumerate().for_each(|(j, b)| *to.add(j) = *from.add(j * d.cs) + *b);
                }
            }
        }
    }
    Into::Add
}

/// `total` terms in equal pieces of at most `most`, each with its first; of nothing, one piece of nothing. Where packed terms are rounded
/// up to many, all pieces but the last have a multiple of them.
fn pieces<K: Kernel>(total: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let length = total.div_ceil(total.div_ceil(most).max(1)).max(1);
    let length = if K::STEP > K::TERMS { length.next_multiple_of(K::STEP) } else { length };
    (0..total.max(1)).step_by(length).map(move |first| (first, length.min(total - first)))
}

/// Elements that hold so many terms of a row.
#[inline(always)]
fn packed<K: Kernel>(terms: usize) -> usize {
    terms.next_multiple_of(K::STEP) / K::TERMS
}

/// The terms that are packed of one tile or panel before those of the next: a few if their lines hold many of them.
fn steps<K: Kernel>(terms: usize, across: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = if across == 1 { K::STEP.max(AHEAD) } else { terms };
    (0..terms).step_by(step.max(1)).map(move |first| (first, step.min(terms - first)))
}

/// The tiles of so many rows, the first row of each and how many: 32 go as 6 6 6 6 4 4 rather than 6 6 6 6 6 2.
#[inline(always)]
fn tiles<K: Kernel>(rows: usize) -> impl Iterator<Item = (usize, usize)> + Clone {
    let mut first = 0;
    std::iter::from_fn(move || {
        let high = match rows - first {
            0 => return None,
            left if left <= K::ROWS => left,
            left if left < 2 * K::ROWS => left.div_ceil(2).next_multiple_of(K::ROUND),
            _ => K::ROWS,
        };
        first += high;
        Some((first - high, high))
    })
}

/// How a product is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Rows of a task, a multiple of the tile's.
    rows: usize,
    /// Columns of a task, a multiple of the tile's.
    columns: usize,
}

impl Cut {
    fn of<K: Kernel>(limits: &Limits, (m, n, k): (usize, usize, usize)) -> Self {
        let tasks = ((m * n).saturating_mul(k) / limits.task).clamp(1, limits.tasks);
        let (tiles, panels) = (m.div_ceil(K::ROWS), n.div_ceil(K::PANEL));
        let high = tiles.div_ceil(m.div_ceil(limits.rows));
        let wide = (panels * tiles.div_ceil(high) / tasks).clamp(1, limits.panels);
        let wide = panels.div_ceil(panels.div_ceil(wide));
        let high = (tiles * panels.div_ceil(wide) / tasks).clamp(1, high);
        Self { rows: high * K::ROWS, columns: wide * K::PANEL }
    }
}

/// A product by blocks of C, of packed operands where that pays.
///
/// # Safety
/// As [`multiply`].
#[allow(clippy::too_many_arguments)]
unsafe fn whole<K: Kernel>(
    kernel: K,
    limits: &Limits,
    a: Mat<K::E>,
    b: Mat<K::E>,
    c: Out<K::E>,
    start: Start<K::E>,
    part: Part,
    parallel: bool,
) {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let cut = Cut::of::<K>(limits, (m, n, k));
    let (pack_a, pack_b) = match K::TERMS {
        1 => {
            (n >= if a.cs == 1 { 4 * limits.pack_a } else { limits.pack_a }, m >= limits.pack_b || b.cs != 1)
        }
        // They are made while they are packed.
        _ => (true, true),
    };
    let at_once = k.clamp(1, limits.chunk);
    // As many blocks as may be packed at a time, or all.
    let extent = |packs: bool, block: usize, all: usize| match packs {
        true => ((limits.packed / at_once / block).max(1) * block).min(all.next_multiple_of(block)),
        false => all,
    };
    let (high, wide) = (extent(pack_a, cut.rows, m), extent(pack_b, cut.columns, n));
    let row = at_once.next_multiple_of(K::STEP);
    let mut a_packed = Buf::dirty(if pack_a { high * row } else { 0 });
    let mut b_packed = Buf::dirty(if pack_b { wide * row } else { 0 });
    let a_to = pack_a.then(|| Shared::new(&mut a_packed));
    let b_to = pack_b.then(|| Shared::new(&mut b_packed));
    let job = Job { kernel, limits, a, b, c, start, cut, a_to, b_to };
    for terms in pieces::<K>(k, at_once) {
        for j in (0..n).step_by(wide) {
            for i in (0..m).step_by(high) {
                let chunk = Chunk { rows: (i, high.min(m - i)), columns: (j, wide.min(n - j)), terms };
                let (rows, columns) = (chunk.rows.1, chunk.columns.1);
                // Packed rows serve all columns if they are all rows there are; packed columns serve all rows.
                let tiles = if pack_a && (j == 0 || rows < m) { rows.div_ceil(K::ROWS) } else { 0 };
                let panels = if pack_b && i == 0 { columns.div_ceil(K::PANEL) } else { 0 };
                // What lies across the terms is packed in wide shares: every term is on another page.
                let shares = |count: usize, width: usize, across: usize| {
                    let least = if across == 1 { limits.wide / width } else { 1 };
                    (count * width * terms.1 / limits.pack).clamp(count.min(1), count.div_ceil(least.max(1)))
                };
                let (of_a, of_b) = (shares(tiles, K::ROWS, a.rs), shares(panels, K::PANEL, b.cs));
                let pack = |share: usize| {
                    let of = |all: usize, share: usize, shares: usize| {
                        share * all / shares..(share + 1) * all / shares
                    };
                    // SAFETY: each tile and panel of the chunk is in one share.
                    unsafe {
                        match share.checked_sub(of_a) {
                            None => job.pack_a(&chunk, of(tiles, share, of_a)),
                            Some(share) => job.pack_b(&chunk, of(panels, share, of_b)),
                        }
                    }
                };
                let blocks = rows.div_ceil(cut.rows);
                let compute = |task: usize| {
                    let (i, j) = (task % blocks * cut.rows, task / blocks * cut.columns);
                    let size = (cut.rows.min(rows - i), cut.columns.min(columns - j));
                    if part == Part::Lower && chunk.columns.0 + j >= chunk.rows.0 + i + size.0 {
                        return;
                    }
                    // SAFETY: a block of C for each task, and what it needs has been packed.
                    unsafe { job.block(&chunk, (i, j), size) };
                };
                let tasks = blocks * columns.div_ceil(cut.columns);
                match parallel {
                    true => par_after(of_a + of_b, pack, tasks, compute),
                    false => {
                        (0..of_a + of_b).for_each(pack);
                        (0..tasks).for_each(compute);
                    }
                }
            }
        }
    }
}

/// Rows of A, columns of B and terms of both that are packed together: the first of each and how many.
struct Chunk {
    rows: (usize, usize),
    columns: (usize, usize),
    terms: (usize, usize),
}

/// What all tasks of a product know.
struct Job<'a, K: Kernel> {
    kernel: K,
    limits: &'a Limits,
    a: Mat<'a, K::E>,
    b: Mat<'a, K::E>,
    c: Out<K::E>,
    start: Start<'a, K::E>,
    cut: Cut,
    /// Where a chunk of A is packed, if it is: as many terms as are summed at a time of all its tiles, one after another, then
    /// the next terms.
    a_to: Option<Shared<K::E>>,
    /// The same of B and its panels.
    b_to: Option<Shared<K::E>>,
}

impl<K: Kernel> Job<'_, K> {
    /// Packs some of a chunk's tiles of A.
    ///
    /// # Safety
    /// The chunk has them, and nobody else touches their packed places.
    unsafe fn pack_a(&self, chunk: &Chunk, which: Range<usize>) {
        let ((i0, rows), (p0, terms)) = (chunk.rows, chunk.terms);
        let Some(to) = self.a_to else { return };
        let blocks = (0..rows).step_by(self.cut.rows);
        let all = blocks.flat_map(|block| {
            tiles::<K>(self.cut.rows.min(rows - block)).map(move |(i, high)| (block + i, high))
        });
        let tiles = all.skip(which.start).take(which.len());
        for (p, length) in pieces::<K>(terms, self.limits.terms.min(K::DEPTH)) {
            for (q, some) in steps::<K>(length, self.a.rs) {
                for (i, high) in tiles.clone() {
                    let from = (self.a.at(i0 + i, p0 + p + q), self.a.rs, self.a.cs, rows - i);
                    // SAFETY: the tile lies in A, and its place in the buffer, by the caller's promise.
                    unsafe {
                        let to = (to.at(p * rows + i * packed::<K>(length) + packed::<K>(q) * high), high);
                        self.kernel.pack_rows((high, some), from, to);
                    }
                }
            }
        }
    }

    /// Packs some of a chunk's panels of B.
    ///
    /// # Safety
    /// As [`Job::pack_a`].
    unsafe fn pack_b(&self, chunk: &Chunk, which: Range<usize>) {
        let ((j0, columns), (p0, terms)) = (chunk.columns, chunk.terms);
        let wide = columns.next_multiple_of(K::PANEL);
        let Some(to) = self.b_to else { return };
        for (p, length) in pieces::<K>(terms, self.limits.terms.min(K::DEPTH)) {
            for (q, some) in steps::<K>(length, self.b.cs) {
                for j in which.clone().map(|panel| panel * K::PANEL) {
                    let left = columns - j;
                    let from = (self.b.at(p0 + p + q, j0 + j), self.b.cs, self.b.rs, left);
                    // SAFETY: the panel lies in B, and its place in the buffer, by the caller's promise.
                    unsafe {
                        let at = p * wide + j * packed::<K>(length) + packed::<K>(q) * K::PANEL;
                        self.kernel.pack((left.min(K::PANEL), some), from, (to.at(at), K::PANEL));
                    }
                }
            }
        }
    }

    /// Computes a block of C over the terms of a chunk, tile by tile.
    ///
    /// # Safety
    /// The block lies in the chunk, which is packed, and nobody else touches it.
    unsafe fn block(&self, chunk: &Chunk, (i0, j0): (usize, usize), (rows, columns): (usize, usize)) {
        let (first, terms) = chunk.terms;
        let (row, column) = (chunk.rows.0 + i0, chunk.columns.0 + j0);
        let wide = chunk.columns.1.next_multiple_of(K::PANEL);
        // SAFETY: the addresses of tiles lie in the operands or their packed places, by the caller's promise.
        let a = |i: usize, high: usize, (p, length): (usize, usize)| unsafe {
            match self.a_to {
                Some(a) => (a.at(p * chunk.rows.1 + (i0 + i) * packed::<K>(length)).cast_const(), 1, high),
                None => (self.a.at(row + i, first + p), self.a.rs, self.a.cs),
            }
        };
        let b = |j: usize, (p, length): (usize, usize)| match self.b_to {
            Some(b) => (b.address(p * wide + (j0 + j) * packed::<K>(length)), K::PANEL),
            None => (self.b.at(first + p, column + j), self.b.rs),
        };
        self.kernel.run(
            #[inline(always)]
            || {
                let mut into = match first {
                    // SAFETY: the block is this task's alone.
                    0 => unsafe { begin(self.start, self.c, (row, column), (rows, columns)) },
                    _ => Into::Add,
                };
                for piece in pieces::<K>(terms, self.limits.terms.min(K::DEPTH)) {
                    for j in (0..columns).step_by(K::PANEL) {
                        let width = K::PANEL.min(columns - j);
                        // The next panel arrives a few lines a tile.
                        let (next, lines) =
                            (b(j + K::PANEL, piece).0, packed::<K>(piece.1) * K::PANEL / LINE);
                        let lines =
                            if self.b_to.is_some() { lines.div_ceil(rows.div_ceil(K::ROWS)) } else { 0 };
                        for (tile, (i, high)) in tiles::<K>(rows).enumerate() {
                            if lines <= MOST_LINES {
                                (tile * lines..(tile + 1) * lines)
                                    .for_each(|line| self.kernel.prefetch(next.wrapping_add(line * LINE)));
                            }
                            // SAFETY: the tile lies within the block.
                            unsafe {
                                let c = (self.c.at(row + i, column + j), self.c.ld);
                                self.kernel.tile(
                                    (high, width),
                                    packed::<K>(piece.1),
                                    a(i, high, piece),
                                    b(j, piece),
                                    c,
                                    into,
                                );
                            }
                        }
                    }
                    into = Into::Add;
                }
            },
        );
    }
}
