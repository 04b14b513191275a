//! Adafactor's arithmetic on the CPU: three passes over a parameter instead of fifteen ops.
use super::Scalars;
use crate::Result;
use crate::driver::cpu::{team, vectorized};
use crate::driver::team::{Parts, Team};
use crate::passes::{elements, pass};
use crate::rule::Real;
use crate::sums::LANES;
use candle_core::{Device, Tensor, WithDType};
use std::ops::Range;

/// Elements that a thread takes at a time: enough that sums of columns are few beside them.
const BLOCK: usize = 256 * 1024;
/// Denominators made before they are divided by, so that matrices of a few elements fill vectors too.
const STRIP: usize = 1024;

/// A step on a vector: its new value and its second moment.
pub(super) fn vector<F: Real + WithDType>(
    s: &Scalars,
    x: &Tensor,
    g: &Tensor,
    v: &Tensor,
) -> Result<[Tensor; 2]> {
    let [keep, w, eps1] = [1.0 - s.w, s.w, s.eps1].map(<F as Real>::from_f64);
    let divide = move |g: F, v: F| g / Real::sqrt(v).at_least(eps1);
    let n = x.elem_count();
    elements::<F, _, 3>([x, g, v], |[x, g, v]| {
        let (mut new_v, mut new_x) = (zeros::<F>(n), zeros::<F>(n));
        let [xx, uu] = pass([&mut new_v[..]], [x, g, v], |[new], [x, g, v]| {
            *new = v * keep + g * g * w;
            let (x, u) = (Real::to_f64(x), Real::to_f64(divide(g, *new)));
            [x * x, u * u]
        });
        let [decay, step] = [s.decay, s.step(xx, uu, n)].map(<F as Real>::from_f64);
        let [] = pass([&mut new_x[..]], [x, g, &new_v], |[new], [x, g, v]| {
            *new = x * decay - divide(g, v) * step;
            []
        });
        Ok([tensor(new_x)?, tensor(new_v)?])
    })?
}

/// A step on matrices of `rows` × `columns`, one after another: their new value, row and column means.
pub(super) fn matrices<F: Real + WithDType>(
    s: &Scalars,
    (rows, columns): (usize, usize),
    [x, g, row, column]: [&Tensor; 4],
) -> Result<[Tensor; 3]> {
    let n = x.elem_count();
    let xx = crate::sums::squares(x)?;
    elements::<F, _, 4>([x, g, row, column], |[x, g, row, column]| {
        let mut means = Means {
            row: row.to_vec(),
            column: column.to_vec(),
            root_row: zeros(row.len()),
            root_column: zeros(column.len()),
        };
        means.follow(s, (rows, columns), g);
        let eps1 = <F as Real>::from_f64(s.eps1);
        let (per, all) = ((BLOCK / columns).max(1), n / columns);
        let count = all.div_ceil(per);
        let block = |i: usize| i * per..((i + 1) * per).min(all);
        let mut squares = vec![0.0; count];
        let parts = Parts::new(&mut squares);
        team(n).run(count, (1, 1), &|range| {
            // SAFETY: the ranges of a run do not overlap, and `squares` is borrowed until it ends.
            let sums = unsafe { parts.part(range.clone()) };
            for (sum, i) in sums.iter_mut().zip(range) {
                means.divide((rows, columns), block(i), g, eps1, |_, u| *sum += sum_of_squares(u));
            }
        });
        let [decay, step] = [s.decay, s.step(xx, squares.iter().sum(), n)].map(<F as Real>::from_f64);
        let mut new = zeros::<F>(n);
        let parts = Parts::new(&mut new);
        team(n).run(count, (1, 1), &|range| {
            for i in range {
                means.divide(
                    (rows, columns),
                    block(i),
                    g,
                    eps1,
                    #[inline(always)]
                    |place, u| {
                        // SAFETY: neither blocks nor the strips of one overlap, and `new` is borrowed until the run ends.
                        let new = unsafe { parts.part(place.clone()) };
                        for ((new, x), u) in new.iter_mut().zip(&x[place]).zip(u) {
                            *new = *x * decay - *u * step;
                        }
                    },
                );
            }
        });
        Ok([tensor(new)?, tensor(means.row)?, tensor(means.column)?])
    })?
}

fn tensor<F: WithDType>(values: Vec<F>) -> Result<Tensor> {
    let n = values.len();
    Ok(Tensor::from_vec(values, n, &Device::Cpu)?)
}

fn zeros<F: Real>(n: usize) -> Vec<F> {
    vec![F::from_f64(0.0); n]
}

#[inline(always)]
fn sum_of_squares<F: Real>(u: &[F]) -> f64 {
    let mut lanes = [0f64; LANES];
    let (blocks, tail) = u.as_chunks::<LANES>();
    for block in blocks {
        lanes.iter_mut().zip(block).for_each(|(sum, u)| *sum += u.to_f64() * u.to_f64());
    }
    lanes.iter_mut().zip(tail).for_each(|(sum, u)| *sum += u.to_f64() * u.to_f64());
    lanes.iter().sum()
}

/// Means of squares by row and column, and roots whose products are the denominators.
struct Means<F> {
    row: Vec<F>,
    column: Vec<F>,
    root_row: Vec<F>,
    root_column: Vec<F>,
}

impl<F: Real> Means<F> {
    /// Follows the squares of a gradient.
    fn follow(&mut self, s: &Scalars, (rows, columns): (usize, usize), g: &[F]) {
        let size = rows * columns;
        let matrices = g.len() / size;
        let large = size > BLOCK;
        let (row, root_row) = (Parts::new(&mut self.row), Parts::new(&mut self.root_row));
        let (column, root_column) = (Parts::new(&mut self.column), Parts::new(&mut self.root_column));
        // Threads share the matrices, or each of them.
        let (outer, inner) = (Team::new(!large && g.len() > BLOCK), Team::new(large));
        outer.run(matrices, ((BLOCK / size).max(1), (BLOCK / size).max(1)), &|range| {
            let mut sums = Vec::new();
            for k in range {
                let (r, c) = (k * rows..(k + 1) * rows, k * columns..(k + 1) * columns);
                squares(&inner, (rows, columns), &g[k * size..(k + 1) * size], &mut sums);
                let (of_rows, of_columns) = sums.split_at(rows);
                // SAFETY: the ranges of a run do not overlap, so that nobody else has these parts, and `self` is borrowed.
                unsafe {
                    average(s, row.part(r.clone()), of_rows, columns);
                    average(s, column.part(c.clone()), of_columns, rows);
                    let row = row.part(r.clone());
                    let mean = row.iter().map(|x| x.to_f64()).sum::<f64>() / rows as f64;
                    let scale = F::from_f64(mean.max(s.eps1));
                    let roots = root_row.part(r).iter_mut().zip(row);
                    roots.for_each(|(root, row)| *root = (*row / scale).sqrt());
                    let roots = root_column.part(c.clone()).iter_mut().zip(column.part(c));
                    roots.for_each(|(root, column)| *root = column.sqrt());
                }
            }
        });
    }

    /// Calls `f` with strips of u = g/√v, and where they are, for some of all rows.
    #[inline(always)]
    fn divide(
        &self,
        (rows, columns): (usize, usize),
        some: Range<usize>,
        g: &[F],
        eps1: F,
        mut f: impl FnMut(Range<usize>, &[F]),
    ) {
        vectorized(
            #[inline(always)]
            || {
                let mut strip = [eps1; STRIP];
                let mut first = some.start;
                while first < some.end {
                    let last = (first + (STRIP / columns).max(1)).min(some.end);
                    for from in (0..columns).step_by(STRIP) {
                        // Several rows, or a part of one.
                        let width = STRIP.min(columns - from);
                        for (row, strip) in (first..last).zip(strip.chunks_mut(width)) {
                            let (root, k) = (self.root_row[row], row / rows * columns + from);
                            for (v, column) in strip.iter_mut().zip(&self.root_column[k..k + width]) {
                                *v = (root * *column).at_least(eps1);
                            }
                        }
                        let start = first * columns + from;
                        let place = start..start + (last - first) * width;
                        let u = &mut strip[..place.len()];
                        u.iter_mut().zip(&g[place.clone()]).for_each(|(u, g)| *u = *g / *u);
                        f(place, u);
                    }
                    first = last;
                }
            },
        );
    }
}

/// Sums of squares by row, then by column.
fn squares<F: Real>(team: &Team, (rows, columns): (usize, usize), g: &[F], sums: &mut Vec<f64>) {
    let per = (BLOCK / columns).max(1);
    let blocks = rows.div_ceil(per);
    sums.clear();
    sums.resize(rows + blocks * columns, 0.0);
    let (of_rows, of_blocks) = sums.split_at_mut(rows);
    let (row_parts, block_parts) = (Parts::new(of_rows), Parts::new(of_blocks));
    team.run(blocks, (1, 1), &|range| {
        for i in range {
            let some = i * per..((i + 1) * per).min(rows);
            // SAFETY: the ranges of a run do not overlap, and `sums` is borrowed until it ends.
            let (of_rows, of_columns) =
                unsafe { (row_parts.part(some.clone()), block_parts.part(i * columns..(i + 1) * columns)) };
            let g = &g[some.start * columns..some.end * columns];
            vectorized(
                #[inline(always)]
                || {
                    for (of_row, g) in of_rows.iter_mut().zip(g.chunks_exact(columns)) {
                        *of_row = sum_of_squares(g);
                        for (of_column, g) in of_columns.iter_mut().zip(g) {
                            *of_column += g.to_f64() * g.to_f64();
                        }
                    }
                },
            );
        }
    });
    let (total, others) = of_blocks.split_at_mut(columns);
    for other in others.chunks(columns) {
        total.iter_mut().zip(other).for_each(|(total, sum)| *total += sum);
    }
    sums.truncate(rows + columns);
}

/// Means that follow sums over `n` elements.
fn average<F: Real>(s: &Scalars, means: &mut [F], sums: &[f64], n: usize) {
    let (keep, w) = (F::from_f64(1.0 - s.w), F::from_f64(s.w));
    for (mean, sum) in means.iter_mut().zip(sums) {
        *mean = *mean * keep + F::from_f64(sum / n as f64) * w;
    }
}
