//! Rotary positions: pairs of a head's numbers turned by angles that grow with the position.
//!
//! Number j of a head and number j + size/2 make a pair (the pairing of GPT-NeoX, and of Llama as Hugging Face stores it). Plain
//! Rust, with the same bits on every instruction set.
use super::{Isa, Real, Shared, par, vectorize};

/// Elements that a task turns, about.
const GRAIN: usize = 1 << 14;

/// Cosines and sines of positions 0, 1, …: for each position all cosines, then all sines.
#[derive(Clone, Debug)]
pub struct Table<T> {
    size: usize,
    values: Vec<T>,
}

impl<T: Real> Table<T> {
    /// For heads of `size` numbers, an even number, at `positions` positions: the angle of pair j at position p is
    /// p · theta^(−2j/size), computed in f64.
    pub fn new(size: usize, positions: usize, theta: f64) -> Self {
        let half = size / 2;
        let mut values = Vec::with_capacity(positions * 2 * half);
        let rates: Vec<f64> = (0..half).map(|j| libm::pow(theta, -2.0 * j as f64 / size as f64)).collect();
        for position in 0..positions {
            let angles = || rates.iter().map(|rate| position as f64 * rate);
            values.extend(angles().map(|angle| T::from_f64(libm::cos(angle))));
            values.extend(angles().map(|angle| T::from_f64(libm::sin(angle))));
        }
        Self { size, values }
    }

    /// Cosines and sines of some positions.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn rows(&self, first: usize, count: usize) -> &[T] {
        let each = 2 * (self.size / 2);
        &self.values[first * each..(first + count) * each]
    }

    /// The positions it has.
    pub fn positions(&self) -> usize {
        self.values.len() / (2 * (self.size / 2)).max(1)
    }
}

/// Turns the heads of sequences of `time` rows of `width` numbers, the first row of each at position `first`; back, if asked for,
/// which is what the gradient takes.
///
/// # Panics
/// If the sizes do not fit, or the table has too few positions.
pub fn turn<T: Real>(
    isa: Isa,
    table: &Table<T>,
    (time, width, first): (usize, usize, usize),
    x: &mut [T],
    back: bool,
) {
    let (size, half) = (table.size, table.size / 2);
    assert!(size > 0 && size.is_multiple_of(2) && width.is_multiple_of(size), "heads of {size} in {width}");
    assert!(x.len().is_multiple_of((time * width).max(1)) && first + time <= table.positions());
    let sign = if back { T::ZERO - T::ONE } else { T::ONE };
    let (rows, step) = (x.len() / width.max(1), (GRAIN / width.max(1)).max(1));
    let x = Shared::new(x);
    par(rows.div_ceil(step), |task| {
        let begin = task * step;
        let count = step.min(rows - begin);
        // SAFETY: each task has rows of its own.
        let x = unsafe { x.slice(begin * width, count * width) };
        vectorize(
            isa,
            #[inline(always)]
            || {
                for (i, row) in x.chunks_exact_mut(width).enumerate() {
                    let position = first + (begin + i) % time;
                    let (cos, sin) = table.values[position * 2 * half..][..2 * half].split_at(half);
                    for head in row.chunks_exact_mut(size) {
                        let (a, b) = head.split_at_mut(half);
                        for ((a, b), (cos, sin)) in a.iter_mut().zip(b).zip(cos.iter().zip(sin)) {
                            let sin = *sin * sign;
                            let (x, y) = (*a, *b);
                            *a = x * *cos - y * sin;
                            *b = y * *cos + x * sin;
                        }
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_turn_by_their_angles_and_back() {
        let (time, size, heads, batch, first, theta) = (3, 6, 2, 2, 2, 100.0);
        let table = Table::<f64>::new(size, first + time, theta);
        assert_eq!(table.positions(), first + time);
        let x: Vec<f64> = (0..batch * time * heads * size).map(|i| ((i * 7) % 11) as f64 - 5.0).collect();
        let mut turned = x.clone();
        turn(Isa::PORTABLE, &table, (time, heads * size, first), &mut turned, false);
        for (row, (x, y)) in x.chunks(heads * size).zip(turned.chunks(heads * size)).enumerate() {
            let position = (first + row % time) as f64;
            for (x, y) in x.chunks(size).zip(y.chunks(size)) {
                for j in 0..size / 2 {
                    let angle = position * theta.powf(-2.0 * j as f64 / size as f64);
                    let (a, b) = (x[j], x[j + size / 2]);
                    assert!((y[j] - (a * angle.cos() - b * angle.sin())).abs() < 1e-14);
                    assert!((y[j + size / 2] - (b * angle.cos() + a * angle.sin())).abs() < 1e-14);
                }
            }
        }
        turn(Isa::PORTABLE, &table, (time, heads * size, first), &mut turned, true);
        assert!(crate::compare::largest_difference(&turned, &x) < 1e-14);
    }

    #[test]
    fn any_instruction_set_and_number_of_threads_gives_the_same_bits() {
        let (time, size, heads) = (100, 14, 3);
        let table = Table::<f32>::new(size, time, 10_000.0);
        let x: Vec<f32> = (0..4 * time * heads * size).map(|i| ((i * 31) % 97) as f32 / 7.0).collect();
        let run = |isa: Isa| -> Vec<f64> {
            let mut x = x.clone();
            turn(isa, &table, (time, heads * size, 0), &mut x, false);
            x.into_iter().map(f64::from).collect()
        };
        let portable = run(Isa::PORTABLE);
        for isa in Isa::available() {
            assert!(run(isa) == portable, "{isa:?}");
            crate::threads::same_bits(|| run(isa));
        }
    }
}
