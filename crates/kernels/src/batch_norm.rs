//! Batch normalisation with an optional residual and an activation over `[pixels, channels]`.
//!
//! Forward reads x twice and writes y; backward reads (dy, x) twice and writes dx: the least a correct
//! implementation can do, at the speed of memory. Partial sums run over fixed chunks of rows in the element type
//! and are combined in f64 in the order of chunks, so the result does not depend on the number of threads; they
//! are sums of differences to the first pixel, so that |mean| ≫ σ loses nothing.
use super::{Activation, Buf, Isa, Real, Shared, gelu, vectorize};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of a chunk that is summed on its own.
const ROWS: usize = 256;

/// Rows of `c` numbers that a task of a pass without sums takes: about 32,000 numbers.
fn grain(c: usize) -> usize {
    ((1 << 15) / c).max(1)
}

/// `$body` for every `$j`, with `$v` and `$m` slices of one length: cut to it, they need no bounds checks and the
/// loop becomes vector code.
macro_rules! each {
    ([$first:ident $(, $v:ident)*], mut [$($m:ident),*], |$j:ident| $body:block) => {{
        let n = $first.len();
        $(let $v = &$v[..n];)*
        $(let $m = &mut $m[..n];)*
        for $j in 0..n $body
    }};
}

/// `[pixels, channels]` without gaps: one of the tensors whose channels are normalised side by side.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a, T> {
    data: &'a [T],
    channels: usize,
}

impl<'a, T> Rows<'a, T> {
    /// A matrix of `channels` columns.
    pub fn new(data: &'a [T], channels: usize) -> Self {
        Self { data, channels }
    }

    fn count(&self) -> usize {
        self.data.len() / self.channels
    }

    #[inline(always)]
    fn row(&self, r: usize) -> &'a [T] {
        &self.data[r * self.channels..][..self.channels]
    }
}

/// Each of the tensors with the number of its first channel in their concatenation.
#[inline(always)]
fn placed<'a, 'b, T: Copy>(
    xs: &'b [Rows<'a, T>],
) -> impl Iterator<Item = (usize, Rows<'a, T>)> + use<'a, 'b, T> {
    let mut first = 0;
    xs.iter().map(move |x| {
        first += x.channels;
        (first - x.channels, *x)
    })
}

/// The moments of each channel.
#[derive(Clone, Debug)]
pub struct Moments {
    /// Mean.
    pub mean: Vec<f64>,
    /// Mean squared deviation (biased).
    pub var: Vec<f64>,
}

/// Adds the sums and squares of four rows.
#[inline(always)]
fn four_rows<T: Real>([x0, x1, x2, x3]: [&[T]; 4], shift: &[T], sum: &mut [T], square: &mut [T]) {
    each!([x0, x1, x2, x3, shift], mut [sum, square], |j| {
        let (a, b) = (x0[j] - shift[j], x1[j] - shift[j]);
        let (c, d) = (x2[j] - shift[j], x3[j] - shift[j]);
        sum[j] += (a + b) + (c + d);
        square[j] += (a * a + b * b) + (c * c + d * d);
    });
}

/// Mean and variance of each channel.
pub fn moments<T: Real>(isa: Isa, x: Rows<T>) -> Moments {
    let (c, count) = (x.channels, x.count());
    let shift = x.row(0);
    let sums = chunk_sums::<T>(count, c, |r0, r1, sum, square| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                for r in (r0..r1).step_by(4) {
                    // Four rows a trip, so that the accumulators in L1 are loaded and stored a quarter as often.
                    if r + 4 <= r1 {
                        let rows = [x.row(r), x.row(r + 1), x.row(r + 2), x.row(r + 3)];
                        four_rows(rows, shift, sum, square);
                    } else {
                        for row in (r..r1).map(|r| x.row(r)) {
                            for (j, v) in row.iter().enumerate() {
                                let d = *v - shift[j];
                                sum[j] += d;
                                square[j] += d * d;
                            }
                        }
                    }
                }
            },
        );
    });
    let n = count as f64;
    let (sum, square) = sums.split_at(c);
    let mean = sum.iter().zip(shift).map(|(s, shift)| s / n + shift.to_f64()).collect();
    let var = sum.iter().zip(square).map(|(s, q)| (q / n - (s / n) * (s / n)).max(0.0)).collect();
    Moments { mean, var }
}

/// Two sums a channel over all rows: `f(first, end, a, b)` adds those of a chunk.
fn chunk_sums<T: Real>(
    count: usize,
    c: usize,
    f: impl Fn(usize, usize, &mut [T], &mut [T]) + Sync,
) -> Vec<f64> {
    let chunks = count.div_ceil(ROWS);
    let mut partial = Buf::<T>::zeros(chunks * 2 * c);
    partial.par_chunks_exact_mut(2 * c).with_min_len(grain(c).div_ceil(ROWS)).enumerate().for_each(
        |(i, out)| {
            let (a, b) = out.split_at_mut(c);
            f(i * ROWS, count.min((i + 1) * ROWS), a, b);
        },
    );
    let mut total = vec![0.0; 2 * c];
    for chunk in partial.chunks_exact(2 * c) {
        for (t, v) in total.iter_mut().zip(chunk) {
            *t += v.to_f64();
        }
    }
    total
}

/// Per channel y = x scale + shift.
#[derive(Clone, Debug)]
pub struct Affine<T> {
    /// γ / σ.
    pub scale: Vec<T>,
    /// β − mean γ / σ.
    pub shift: Vec<T>,
}

impl<T: Real> Affine<T> {
    /// The map that normalises with `moments` and applies `gamma` and `beta`.
    pub fn new(moments: &Moments, gamma: &[T], beta: &[T], eps: f64) -> Self {
        let scale = |j: usize| gamma[j].to_f64() / (moments.var[j] + eps).sqrt();
        let shift = |j: usize| beta[j].to_f64() - moments.mean[j] * scale(j);
        let channels = 0..gamma.len();
        Self {
            scale: channels.clone().map(|j| T::from_f64(scale(j))).collect(),
            shift: channels.map(|j| T::from_f64(shift(j))).collect(),
        }
    }
}

/// What becomes of the normalised value, as a constant that the inner loops are compiled for.
#[inline(always)]
fn activate<T: Real, const ACTIVATION: u8>(v: T) -> T {
    match ACTIVATION {
        // NaN fails the comparison and has to survive, as in PyTorch.
        RELU => {
            if v <= T::ZERO {
                T::ZERO
            } else {
                v
            }
        }
        GELU => gelu::gelu(v),
        _ => v,
    }
}

#[inline(always)]
fn apply_row<T: Real, const ACTIVATION: u8>(
    x: &[T],
    scale: &[T],
    shift: &[T],
    residual: Option<&[T]>,
    y: &mut [T],
) {
    match residual {
        Some(residual) => each!([x, scale, shift, residual], mut [y], |j| {
            y[j] = activate::<T, ACTIVATION>(x[j] * scale[j] + shift[j] + residual[j]);
        }),
        None => each!([x, scale, shift], mut [y], |j| {
            y[j] = activate::<T, ACTIVATION>(x[j] * scale[j] + shift[j]);
        }),
    }
}

/// y = x scale + shift (+ residual), then the activation, with the channels of `xs` side by side.
pub fn apply<T: Real>(
    isa: Isa,
    xs: &[Rows<T>],
    affine: &Affine<T>,
    residual: Option<&[T]>,
    activation: Activation,
    y: &mut [T],
) {
    let all = affine.scale.len();
    let rows = grain(all);
    y.par_chunks_mut(rows * all).enumerate().for_each(|(i, y)| {
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (first, x) in placed(xs) {
                    let c = x.channels;
                    let (scale, shift) = (&affine.scale[first..][..c], &affine.shift[first..][..c]);
                    for (r, y) in y.chunks_exact_mut(all).enumerate() {
                        let r = i * rows + r;
                        let (x, y) = (x.row(r), &mut y[first..][..c]);
                        let residual = residual.map(|residual| &residual[r * all + first..][..c]);
                        match activation {
                            Activation::None => apply_row::<T, NONE>(x, scale, shift, residual, y),
                            Activation::Relu => apply_row::<T, RELU>(x, scale, shift, residual, y),
                            Activation::Gelu => apply_row::<T, GELU>(x, scale, shift, residual, y),
                        }
                    }
                }
            },
        );
    });
}

/// How much of a gradient passes the activation after the normalisation.
#[derive(Clone, Copy, Debug)]
pub enum Gate<'a, T> {
    /// All: there was none.
    None,
    /// That of a ReLU: where x scale + shift > 0, which is computed again: cheaper than to read y.
    Affine(&'a Affine<T>),
    /// That of a ReLU: where the output is positive.
    Output(&'a [T]),
    /// The slope of a GELU at x scale + shift.
    Gelu(&'a Affine<T>),
    /// The slope of a GELU at x scale + shift + residual.
    GeluOfSum(&'a Affine<T>, &'a [T]),
}

/// What the normalisation was made with.
#[derive(Clone, Copy, Debug)]
pub struct Normalized<'a, T> {
    /// Mean and variance that were used.
    pub moments: &'a Moments,
    /// γ.
    pub gamma: &'a [T],
    /// ε.
    pub eps: f64,
    /// Whether the moments were those of x itself (training) or constants (evaluation).
    pub of_batch: bool,
}

/// The parameters' gradients, and dx = a g + b x + d with one (a, b, d) a channel.
#[derive(Clone, Debug)]
pub struct Gradient<T> {
    /// dγ.
    pub gamma: Vec<T>,
    /// dβ.
    pub beta: Vec<T>,
    a: Vec<T>,
    b: Vec<T>,
    d: Vec<T>,
}

impl<'a, T: Real> Gate<'a, T> {
    /// What the gate of row `r` needs, for the channels from `first` of `all`, whose inputs are `x`. What a gate
    /// does not need is `x` again, never read: all slices have one length.
    #[inline(always)]
    fn at(self, r: usize, (first, all): (usize, usize), x: &'a [T]) -> Row<'a, T> {
        let c = x.len();
        match self {
            Gate::None => Row { scale: x, shift: x, y: x },
            Gate::Affine(affine) | Gate::Gelu(affine) => {
                Row { scale: &affine.scale[first..][..c], shift: &affine.shift[first..][..c], y: x }
            }
            Gate::Output(y) => Row { scale: x, shift: x, y: &y[r * all + first..][..c] },
            Gate::GeluOfSum(affine, residual) => Row {
                scale: &affine.scale[first..][..c],
                shift: &affine.shift[first..][..c],
                y: &residual[r * all + first..][..c],
            },
        }
    }

    /// What the gate needs for the channels of a block from `first` on, whatever the row, and what it reads of each row; where it
    /// reads nothing that is `dy`, never looked at.
    #[inline(always)]
    fn block(self, first: usize, dy: &'a [T]) -> (Block<T>, Block<T>, &'a [T]) {
        let none = [T::ZERO; BLOCK];
        match self {
            Gate::None => (none, none, dy),
            Gate::Output(y) => (none, none, y),
            Gate::Affine(affine) | Gate::Gelu(affine) => {
                (block(&affine.scale, first), block(&affine.shift, first), dy)
            }
            Gate::GeluOfSum(affine, residual) => {
                (block(&affine.scale, first), block(&affine.shift, first), residual)
            }
        }
    }

    /// The gate's kind, as the constant that the inner loops are compiled for.
    fn kind(self) -> u8 {
        match self {
            Gate::None => NONE,
            Gate::Affine(_) => RELU,
            Gate::Output(_) => OUTPUT,
            Gate::Gelu(_) => GELU,
            Gate::GeluOfSum(..) => GELU_OF_SUM,
        }
    }
}

const NONE: u8 = 0;
const RELU: u8 = 1;
const OUTPUT: u8 = 2;
const GELU: u8 = 3;
const GELU_OF_SUM: u8 = 4;

/// A gate at one row; `y` is the output or the residual.
#[derive(Clone, Copy)]
struct Row<'a, T> {
    scale: &'a [T],
    shift: &'a [T],
    y: &'a [T],
}

/// `$f` with the gate's kind as its constant: the choice is made once a chunk and not once an element.
macro_rules! by_kind {
    ($gate:expr, $f:ident($($args:expr),*)) => {
        match $gate.kind() {
            RELU => $f::<T, RELU>($($args),*),
            OUTPUT => $f::<T, OUTPUT>($($args),*),
            GELU => $f::<T, GELU>($($args),*),
            GELU_OF_SUM => $f::<T, GELU_OF_SUM>($($args),*),
            _ => $f::<T, NONE>($($args),*),
        }
    };
}

/// The part of `g` that passes a gate.
#[inline(always)]
fn pass<T: Real, const KIND: u8>(g: T, x: T, scale: T, shift: T, y: T) -> T {
    let open = match KIND {
        RELU => x * scale + shift > T::ZERO,
        OUTPUT => y > T::ZERO,
        GELU => return g * gelu::slope(x * scale + shift),
        GELU_OF_SUM => return g * gelu::slope(x * scale + shift + y),
        _ => true,
    };
    if open { g } else { T::ZERO }
}

/// Channels of a block, whose sums and coefficients stay in registers while rows go by: what a loop over a short row costs beside
/// its numbers is most of it.
const BLOCK: usize = 16;
/// Rows of which one block after another is summed: few enough that their lines are still in the L1 cache for the next.
const NEAR: usize = 16;
type Block<T> = [T; BLOCK];

/// The numbers of a block from `at` on.
#[inline(always)]
fn block<T: Copy>(v: &[T], at: usize) -> Block<T> {
    let v = &v[at..at + BLOCK];
    std::array::from_fn(
        #[inline(always)]
        |i| v[i],
    )
}

// The inner loops are functions of their own so that the compiler knows that their slices do not overlap.

/// Adds the sums of a row.
#[inline(always)]
fn sum_row<T: Real, const KIND: u8>(
    x: &[T],
    dy: &[T],
    Row { scale, shift, y }: Row<T>,
    mean: &[T],
    sum: &mut [T],
    product: &mut [T],
) {
    each!([x, dy, scale, shift, y, mean], mut [sum, product], |j| {
        let g = pass::<T, KIND>(dy[j], x[j], scale[j], shift[j], y[j]);
        sum[j] += g;
        product[j] += g * (x[j] - mean[j]);
    });
}

/// Where numbers of a block lie: the tensor, the first channel in it and in all.
#[derive(Clone, Copy)]
struct Place<'a, T> {
    x: Rows<'a, T>,
    j: usize,
    first: usize,
    all: usize,
}

impl<T: Real> Place<'_, T> {
    /// x of row `r`, and what passes the gate.
    #[inline(always)]
    fn gated<const KIND: u8>(
        self,
        r: usize,
        dy: &[T],
        (scale, shift, y): &(Block<T>, Block<T>, &[T]),
    ) -> (Block<T>, Block<T>) {
        let x = block(self.x.data, r * self.x.channels + self.j);
        let (dy, y) = (block(dy, r * self.all + self.first), block(y, r * self.all + self.first));
        let mut g = [T::ZERO; BLOCK];
        for i in 0..BLOCK {
            g[i] = pass::<T, KIND>(dy[i], x[i], scale[i], shift[i], y[i]);
        }
        (x, g)
    }
}

/// Adds the sums of `rows` of a block: they stay in registers while the rows go by, two at a time.
#[inline(always)]
fn sum_block<T: Real, const KIND: u8>(
    rows: Range<usize>,
    at: Place<T>,
    (dy, gate): (&[T], Gate<T>),
    mean: &[T],
    sum: &mut [T],
    product: &mut [T],
) {
    let gate = gate.block(at.first, dy);
    let (mean, mut sums, mut products) = (block(mean, 0), block(sum, 0), block(product, 0));
    let mut r = rows.start;
    while r + 2 <= rows.end {
        let ((x, g), (v, h)) = (at.gated::<KIND>(r, dy, &gate), at.gated::<KIND>(r + 1, dy, &gate));
        for i in 0..BLOCK {
            sums[i] += g[i] + h[i];
        }
        for i in 0..BLOCK {
            products[i] += g[i] * (x[i] - mean[i]) + h[i] * (v[i] - mean[i]);
        }
        r += 2;
    }
    for r in r..rows.end {
        let (x, g) = at.gated::<KIND>(r, dy, &gate);
        for i in 0..BLOCK {
            sums[i] += g[i];
            products[i] += g[i] * (x[i] - mean[i]);
        }
    }
    sum[..BLOCK].copy_from_slice(&sums);
    product[..BLOCK].copy_from_slice(&products);
}

/// Adds the sums of `rows` of one tensor, the `first` of whose channels that is of `all`.
#[inline(always)]
fn sum_chunk<T: Real, const KIND: u8>(
    rows: Range<usize>,
    (x, first, all): (Rows<T>, usize, usize),
    (dy, gate): (&[T], Gate<T>),
    mean: &[T],
    sum: &mut [T],
    product: &mut [T],
) {
    // A GELU's slope needs the registers itself, and outweighs what blocks save.
    let (c, whole) = (x.channels, if KIND >= GELU { 0 } else { x.channels / BLOCK * BLOCK });
    for r in rows.clone().step_by(NEAR) {
        for j in (0..whole).step_by(BLOCK) {
            let at = Place { x, j, first: first + j, all };
            let rows = r..rows.end.min(r + NEAR);
            sum_block::<T, KIND>(rows, at, (dy, gate), &mean[j..], &mut sum[j..], &mut product[j..]);
        }
    }
    if whole == c {
        return;
    }
    for r in rows {
        let (x, first) = (&x.row(r)[whole..], first + whole);
        let (row, dy) = (gate.at(r, (first, all), x), &dy[r * all + first..]);
        sum_row::<T, KIND>(x, dy, row, &mean[whole..], &mut sum[whole..], &mut product[whole..]);
    }
}

/// dx = a g + b x + d in place of dy.
#[inline(always)]
fn replace_row<T: Real, const KIND: u8>(x: &[T], gate: Row<T>, [a, b, d]: [&[T]; 3], dy: &mut [T]) {
    let Row { scale, shift, y } = gate;
    each!([x, scale, shift, y, a, b, d], mut [dy], |j| {
        let g = pass::<T, KIND>(dy[j], x[j], scale[j], shift[j], y[j]);
        dy[j] = a[j] * g + (b[j] * x[j] + d[j]);
    });
}

/// The same into `dx`, while dy becomes g.
#[inline(always)]
fn split_row<T: Real, const KIND: u8>(
    x: &[T],
    gate: Row<T>,
    [a, b, d]: [&[T]; 3],
    dy: &mut [T],
    dx: &mut [T],
) {
    let Row { scale, shift, y } = gate;
    each!([x, scale, shift, y, a, b, d], mut [dy, dx], |j| {
        let g = pass::<T, KIND>(dy[j], x[j], scale[j], shift[j], y[j]);
        dx[j] = a[j] * g + (b[j] * x[j] + d[j]);
        dy[j] = g;
    });
}

/// The same to `dx`, added to it if `add`.
#[inline(always)]
fn add_row<T: Real, const KIND: u8>(
    x: &[T],
    gate: Row<T>,
    [a, b, d]: [&[T]; 3],
    dy: &[T],
    add: bool,
    dx: &mut [T],
) {
    let Row { scale, shift, y } = gate;
    each!([x, scale, shift, y, a, b, d, dy], mut [dx], |j| {
        let g = pass::<T, KIND>(dy[j], x[j], scale[j], shift[j], y[j]);
        let old = if add { dx[j] } else { T::ZERO };
        dx[j] = old + (a[j] * g + (b[j] * x[j] + d[j]));
    });
}

/// [`add_row`] for `rows` of a block; `dx` begins with the first of them.
#[inline(always)]
fn add_block<T: Real, const KIND: u8>(
    rows: Range<usize>,
    at: Place<T>,
    (dy, gate): (&[T], Gate<T>),
    abd: [&[T]; 3],
    add: bool,
    dx: &mut [T],
) {
    let (gate, [a, b, d]) = (gate.block(at.first, dy), abd.map(|v| block(v, at.j)));
    for (r, dx) in rows.zip(dx.chunks_exact_mut(at.x.channels)) {
        let (x, g) = at.gated::<KIND>(r, dy, &gate);
        let dx = &mut dx[at.j..at.j + BLOCK];
        for i in 0..BLOCK {
            let old = if add { dx[i] } else { T::ZERO };
            dx[i] = old + (a[i] * g[i] + (b[i] * x[i] + d[i]));
        }
    }
}

impl<T: Real> Gradient<T> {
    /// First pass over (dy, x): the sums.
    pub fn new(isa: Isa, xs: &[Rows<T>], dy: &[T], gate: Gate<T>, with: Normalized<T>) -> Self {
        let all = with.gamma.len();
        let count = dy.len() / all;
        let mean: Vec<T> = with.moments.mean.iter().map(|m| T::from_f64(*m)).collect();
        let sums = chunk_sums::<T>(count, all, |r0, r1, sum, product| {
            vectorize(
                isa,
                #[inline(always)]
                || {
                    for (first, x) in placed(xs) {
                        let c = x.channels;
                        let (sum, product) = (&mut sum[first..][..c], &mut product[first..][..c]);
                        let mean = &mean[first..][..c];
                        let at = (x, first, all);
                        by_kind!(gate, sum_chunk(r0..r1, at, (dy, gate), mean, sum, product));
                    }
                },
            );
        });
        let n = count as f64;
        let (sum, product) = sums.split_at(all);
        let istd = |j: usize| 1.0 / (with.moments.var[j] + with.eps).sqrt();
        let column = |f: &dyn Fn(usize) -> f64| (0..all).map(|j| T::from_f64(f(j))).collect::<Vec<T>>();
        let a = |j: usize| with.gamma[j].to_f64() * istd(j);
        // With the moments of x itself, x also acts through them.
        let through = if with.of_batch { 1.0 / n } else { 0.0 };
        let b = |j: usize| -a(j) * istd(j) * istd(j) * product[j] * through;
        Self {
            gamma: column(&|j| product[j] * istd(j)),
            beta: column(&|j| sum[j]),
            a: column(&a),
            b: column(&b),
            d: column(&|j| -a(j) * sum[j] * through - b(j) * mean[j].to_f64()),
        }
    }

    /// Coefficients of `c` channels from `first`.
    #[inline(always)]
    fn abd(&self, first: usize, c: usize) -> [&[T]; 3] {
        [&self.a[first..][..c], &self.b[first..][..c], &self.d[first..][..c]]
    }

    /// Second pass: turns `dy` into dx.
    pub fn input_in_place(&self, isa: Isa, x: Rows<T>, dy: &mut [T], gate: Gate<T>) {
        let c = x.channels;
        let (abd, rows) = (self.abd(0, c), grain(c));
        dy.par_chunks_mut(rows * c).enumerate().for_each(|(i, dy)| {
            vectorize(
                isa,
                #[inline(always)]
                || {
                    for (k, dy) in dy.chunks_exact_mut(c).enumerate() {
                        let r = i * rows + k;
                        by_kind!(gate, replace_row(x.row(r), gate.at(r, (0, c), x.row(r)), abd, dy));
                    }
                },
            );
        });
    }

    /// Second pass with a residual: turns `dy` into the residual's gradient and writes dx to `dx`.
    pub fn input_and_residual(&self, isa: Isa, x: Rows<T>, dy: &mut [T], gate: Gate<T>, dx: &mut [T]) {
        let c = x.channels;
        let (abd, rows) = (self.abd(0, c), grain(c));
        let dx = dx.par_chunks_mut(rows * c);
        dy.par_chunks_mut(rows * c).zip(dx).enumerate().for_each(|(i, (dy, dx))| {
            vectorize(
                isa,
                #[inline(always)]
                || {
                    for (k, (dy, dx)) in dy.chunks_exact_mut(c).zip(dx.chunks_exact_mut(c)).enumerate() {
                        let r = i * rows + k;
                        by_kind!(gate, split_row(x.row(r), gate.at(r, (0, c), x.row(r)), abd, dy, dx));
                    }
                },
            );
        });
    }

    /// Second pass for several tensors: writes the gradient of each to its element of `dxs`, or adds it.
    pub fn add_inputs(
        &self,
        isa: Isa,
        xs: &[Rows<T>],
        dy: &[T],
        gate: Gate<T>,
        dxs: &mut [(&mut [T], bool)],
    ) {
        assert!(xs.len() == dxs.len() && xs.iter().zip(&*dxs).all(|(x, dx)| x.data.len() == dx.0.len()));
        let all = self.a.len();
        let count = dy.len() / all;
        let outs: Vec<_> = dxs.iter_mut().map(|(dx, add)| (Shared::new(dx), *add)).collect();
        let rows = grain(all);
        (0..count.div_ceil(rows)).into_par_iter().for_each(|i| {
            vectorize(
                isa,
                #[inline(always)]
                || {
                    for ((first, x), (out, add)) in placed(xs).zip(&outs) {
                        let (c, whole) = (x.channels, x.channels / BLOCK * BLOCK);
                        let abd = self.abd(first, c);
                        let rows = i * rows..count.min((i + 1) * rows);
                        // SAFETY: dx has the length of x, and every row belongs to one task.
                        let out = unsafe { out.slice(rows.start * c, rows.len() * c) };
                        for j in (0..whole).step_by(BLOCK) {
                            let at = Place { x, j, first: first + j, all };
                            by_kind!(gate, add_block(rows.clone(), at, (dy, gate), abd, *add, out));
                        }
                        if whole == c {
                            continue;
                        }
                        let (first, abd) = (first + whole, abd.map(|v| &v[whole..]));
                        for (r, out) in rows.zip(out.chunks_exact_mut(c)) {
                            let (x, dy) = (&x.row(r)[whole..], &dy[r * all + first..]);
                            let row = gate.at(r, (first, all), x);
                            by_kind!(gate, add_row(x, row, abd, dy, *add, &mut out[whole..]));
                        }
                    }
                },
            );
        });
    }
}

#[cfg(test)]
mod tests;
