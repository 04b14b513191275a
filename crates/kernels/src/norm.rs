//! Layer norm and RMS norm of the rows of a matrix.
//!
//! Plain Rust in sums of sixteen lanes, which the compiler turns into vectors: every instruction set gives the same bits. A row is
//! in the L1 cache while it is visited, so that memory sees it once.
use super::{Isa, Real, Shared, par, vectorize};

/// Partial sums of a row.
const LANES: usize = 16;
/// Elements of a task's rows, about.
const GRAIN: usize = 1 << 14;
/// Rows whose contributions to the gradients of weight and bias are added up before they meet those of others.
const ROWS: usize = 64;

/// What is done with a row of `weight.len()` numbers: (x − mean)/√(variance + eps) · weight + bias, or without the mean
/// x/√(mean of squares + eps) · weight.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, T> {
    /// The factor of each column.
    pub weight: &'a [T],
    /// What is added to each column.
    pub bias: Option<&'a [T]>,
    /// What is added under the root.
    pub eps: f64,
    /// Whether the mean is subtracted first: layer norm, not RMS norm.
    pub centred: bool,
}

/// What a row was moved and multiplied by.
pub type Moments<T> = [T; 2];

/// The sum of `f` of all elements.
#[inline(always)]
fn sum<T: Real>(x: &[T], f: impl Fn(T) -> T) -> f64 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut sums = [T::ZERO; LANES];
    for chunk in chunks {
        for (sum, x) in sums.iter_mut().zip(chunk) {
            *sum += f(*x);
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += f(*x);
    }
    sums.iter().map(|sum| sum.to_f64()).sum()
}

impl<T: Real> Norm<'_, T> {
    /// The moments of a row.
    #[inline(always)]
    fn moments(&self, x: &[T]) -> Moments<T> {
        let n = x.len() as f64;
        let mean = T::from_f64(if self.centred { sum(x, |x| x) / n } else { 0.0 });
        let variance = sum(x, |x| (x - mean) * (x - mean)) / n;
        [mean, T::from_f64(1.0 / (variance + self.eps).sqrt())]
    }

    /// Rows that a task takes.
    fn rows(&self) -> usize {
        (GRAIN / self.weight.len().max(1)).max(1)
    }
}

/// y = norm of x, row by row; what each row was moved and multiplied by is kept for [`backward`].
///
/// # Panics
/// If the sizes do not fit.
pub fn forward<T: Real>(isa: Isa, norm: &Norm<T>, x: &[T], y: &mut [T], moments: &mut [Moments<T>]) {
    let n = norm.weight.len();
    assert!(x.len() == y.len() && x.len() == n * moments.len() && norm.bias.is_none_or(|b| b.len() == n));
    let (rows, step) = (moments.len(), norm.rows());
    let (y, moments) = (Shared::new(y), Shared::new(moments));
    par(rows.div_ceil(step), |task| {
        let first = task * step;
        let count = step.min(rows - first);
        // SAFETY: each task has rows of its own.
        let (y, moments) = unsafe { (y.slice(first * n, count * n), moments.slice(first, count)) };
        let x = &x[first * n..(first + count) * n];
        vectorize(
            isa,
            #[inline(always)]
            || {
                for ((x, y), moments) in x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(moments) {
                    *moments = norm.moments(x);
                    let [mean, scale] = *moments;
                    match norm.bias {
                        Some(bias) => {
                            for (((y, x), w), b) in y.iter_mut().zip(x).zip(norm.weight).zip(bias) {
                                *y = (*x - mean) * scale * *w + *b;
                            }
                        }
                        None => {
                            for ((y, x), w) in y.iter_mut().zip(x).zip(norm.weight) {
                                *y = (*x - mean) * scale * *w;
                            }
                        }
                    }
                }
            },
        );
    });
}

/// The gradients of x, which goes to `dx` (added to it if asked for), of the weight and of the bias, from that of y.
///
/// # Panics
/// If the sizes do not fit.
pub fn backward<T: Real>(
    isa: Isa,
    norm: &Norm<T>,
    (x, moments): (&[T], &[Moments<T>]),
    dy: &[T],
    dx: Option<(&mut [T], bool)>,
) -> [Vec<T>; 2] {
    let (n, rows) = (norm.weight.len(), moments.len());
    assert!(x.len() == n * rows && dy.len() == x.len() && dx.as_ref().is_none_or(|d| d.0.len() == x.len()));
    let tasks = rows.div_ceil(ROWS);
    let mut sums = vec![T::ZERO; tasks * 2 * n];
    let (parts, dx) = (Shared::new(&mut sums), dx.map(|(dx, add)| (Shared::new(dx), add)));
    par(tasks, |task| {
        let (first, count) = (task * ROWS, ROWS.min(rows - task * ROWS));
        // SAFETY: each task has rows, and sums, of its own.
        let (dw, db) = unsafe { parts.slice(task * 2 * n, 2 * n) }.split_at_mut(n);
        vectorize(
            isa,
            #[inline(always)]
            || {
                for row in first..first + count {
                    let (x, dy, [mean, scale]) = (&x[row * n..][..n], &dy[row * n..][..n], moments[row]);
                    for ((db, dw), (x, dy)) in db.iter_mut().zip(dw.iter_mut()).zip(x.iter().zip(dy)) {
                        *db += *dy;
                        *dw += *dy * ((*x - mean) * scale);
                    }
                    if let Some((dx, add)) = dx {
                        // SAFETY: as above.
                        let dx = unsafe { dx.slice(row * n, n) };
                        spread(norm, (x, [mean, scale]), dy, dx, add);
                    }
                }
            },
        );
    });
    let column = |j: usize| T::from_f64((0..tasks).map(|task| sums[task * 2 * n + j].to_f64()).sum());
    [(0..n).map(column).collect(), (n..2 * n).map(column).collect()]
}

/// The gradient of one row: scale · (g − mean of g − x̂ · mean of g x̂) with g = dy · weight; the first mean only if x was centred.
#[inline(always)]
fn spread<T: Real>(
    norm: &Norm<T>,
    (x, [mean, scale]): (&[T], Moments<T>),
    dy: &[T],
    dx: &mut [T],
    add: bool,
) {
    let n = x.len() as f64;
    let mut plain = [T::ZERO; LANES];
    let mut along = [T::ZERO; LANES];
    let mut take = |x: &[T], dy: &[T], w: &[T]| {
        for ((x, dy), (w, (plain, along))) in
            x.iter().zip(dy).zip(w.iter().zip(plain.iter_mut().zip(&mut along)))
        {
            let g = *dy * *w;
            *plain += g;
            *along += g * ((*x - mean) * scale);
        }
    };
    let ((xs, x_rest), (dys, dy_rest), (ws, w_rest)) =
        (x.as_chunks::<LANES>(), dy.as_chunks::<LANES>(), norm.weight.as_chunks::<LANES>());
    for ((x, dy), w) in xs.iter().zip(dys).zip(ws) {
        take(x, dy, w);
    }
    take(x_rest, dy_rest, w_rest);
    let mean_of = |sums: [T; LANES]| T::from_f64(sums.iter().map(|sum| sum.to_f64()).sum::<f64>() / n);
    let along = mean_of(along);
    let plain = if norm.centred { mean_of(plain) } else { T::ZERO };
    let one = |x: T, dy: T, w: T| scale * (dy * w - plain - (x - mean) * scale * along);
    let all = dx.iter_mut().zip(x.iter().zip(dy).zip(norm.weight));
    match add {
        true => all.for_each(|(dx, ((x, dy), w))| *dx += one(*x, *dy, *w)),
        false => all.for_each(|(dx, ((x, dy), w))| *dx = one(*x, *dy, *w)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use taper_random::Rng;

    fn draw(n: usize, name: &str) -> Vec<f64> {
        let mut rng = Rng::new(1, "test", name, 0);
        (0..n).map(|_| rng.normal()).collect()
    }

    /// By the definition, in f64.
    fn plainly(x: &[f64], w: &[f64], b: Option<&[f64]>, eps: f64, centred: bool) -> Vec<f64> {
        let n = w.len();
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = if centred { x.iter().sum::<f64>() / n as f64 } else { 0.0 };
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            let of =
                |(j, x): (usize, &f64)| (x - mean) / (variance + eps).sqrt() * w[j] + b.map_or(0.0, |b| b[j]);
            x.iter().enumerate().map(of).collect()
        };
        x.chunks(n).flat_map(row).collect()
    }

    #[test]
    fn values_are_those_of_the_definition() {
        for (rows, n) in [(1, 1), (3, 7), (5, 16), (130, 33), (2, 384)] {
            for (centred, with_bias) in [(true, true), (true, false), (false, false)] {
                let (x, w, b) = (draw(rows * n, "x"), draw(n, "w"), draw(n, "b"));
                let bias = with_bias.then_some(&b[..]);
                let norm = Norm { weight: &w, bias, eps: 1e-3, centred };
                let (mut y, mut moments) = (vec![f64::NAN; rows * n], vec![[f64::NAN; 2]; rows]);
                forward(Isa::PORTABLE, &norm, &x, &mut y, &mut moments);
                let off = crate::compare::largest_difference(&y, &plainly(&x, &w, bias, 1e-3, centred));
                // A few roundings of numbers below 30.
                assert!(off < 2e-14, "{rows}x{n}: {off:e}");
            }
        }
    }

    #[test]
    fn gradients_are_those_of_small_steps() {
        let (rows, n) = (3, 21);
        for (centred, with_bias) in [(true, true), (true, false), (false, false)] {
            let (x, w, b, dy) = (draw(rows * n, "x"), draw(n, "w"), draw(n, "b"), draw(rows * n, "dy"));
            let bias = with_bias.then_some(&b[..]);
            let norm = Norm { weight: &w, bias, eps: 1e-2, centred };
            let (mut y, mut moments) = (vec![0.0; rows * n], vec![[0.0; 2]; rows]);
            forward(Isa::PORTABLE, &norm, &x, &mut y, &mut moments);
            let (mut dx, mut twice) = (vec![f64::NAN; rows * n], vec![1.0; rows * n]);
            let [dw, db] = backward(Isa::PORTABLE, &norm, (&x, &moments), &dy, Some((&mut dx, false)));
            backward(Isa::PORTABLE, &norm, (&x, &moments), &dy, Some((&mut twice, true)));
            let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
                let y = plainly(x, w, with_bias.then_some(b), 1e-2, centred);
                y.iter().zip(&dy).map(|(y, dy)| y * dy).sum()
            };
            let h = 1e-5;
            let near = |found: f64, up: f64, down: f64| {
                let slope = (up - down) / (2.0 * h);
                // Central differences: h² of a third derivative of some hundreds.
                assert!((found - slope).abs() < 1e-7 * (1.0 + slope.abs()), "{found} {slope}");
            };
            let moved = |v: &[f64], i: usize, by: f64| {
                let mut v = v.to_vec();
                v[i] += by;
                v
            };
            for i in 0..rows * n {
                near(dx[i], loss(&moved(&x, i, h), &w, &b), loss(&moved(&x, i, -h), &w, &b));
                assert!((twice[i] - dx[i] - 1.0).abs() < 1e-12);
            }
            for i in 0..n {
                near(dw[i], loss(&x, &moved(&w, i, h), &b), loss(&x, &moved(&w, i, -h), &b));
                if with_bias {
                    near(db[i], loss(&x, &w, &moved(&b, i, h)), loss(&x, &w, &moved(&b, i, -h)));
                }
            }
        }
    }

    #[test]
    fn any_instruction_set_and_number_of_threads_gives_the_same_bits() {
        let (rows, n) = (300, 70);
        let as_f32 = |v: Vec<f64>| v.into_iter().map(|v| v as f32).collect::<Vec<_>>();
        let (x, w, b) = (as_f32(draw(rows * n, "x")), as_f32(draw(n, "w")), as_f32(draw(n, "b")));
        let run = |isa: Isa| -> Vec<f64> {
            let norm = Norm { weight: &w, bias: Some(&b), eps: 1e-5, centred: true };
            let (mut y, mut dx) = (vec![0.0; rows * n], vec![0.0; rows * n]);
            let mut moments = vec![[0.0; 2]; rows];
            forward(isa, &norm, &x, &mut y, &mut moments);
            let [dw, db] = backward(isa, &norm, (&x, &moments), &y, Some((&mut dx, false)));
            [y, dx, dw, db].concat().into_iter().map(f64::from).collect()
        };
        let bits = |v: Vec<f64>| v.into_iter().map(f64::to_bits).collect::<Vec<_>>();
        let portable = bits(run(Isa::PORTABLE));
        for isa in Isa::available() {
            assert!(bits(run(isa)) == portable, "{isa:?}");
            crate::threads::same_bits(|| run(isa));
        }
    }
}
