use super::blocks::{LIMITS, Limits};
use super::*;
use crate::Operands;
use taper_random::Rng;

fn numbers<T: Real>(n: usize, salt: usize) -> Vec<T> {
    (0..n).map(|i| T::from_f64(((i * 7919 + salt * 104_729) % 1009) as f64 / 1009.0 - 0.5)).collect()
}

/// A product to check: its sizes, how A and B lie, and what it starts from.
#[derive(Clone, Copy, Debug)]
struct Case {
    sizes: (usize, usize, usize),
    transposed: [bool; 2],
    start: usize,
}

impl Case {
    /// All transposes and starts of a shape.
    fn all(sizes: (usize, usize, usize)) -> impl Iterator<Item = Self> {
        let transposed = |way: usize| [way & 1 > 0, way & 2 > 0];
        (0..20).map(move |way| Self { sizes, transposed: transposed(way), start: way / 4 })
    }

    /// Multiplies with those limits into a matrix with gaps, and hands over the result and what it was before.
    fn compute<T: Real>(self, isa: Isa, limits: &Limits) -> (Vec<T>, Vec<T>) {
        let (m, n, k) = self.sizes;
        let [ta, tb] = self.transposed;
        // Rows of the operands with gaps of NaN, which no sum may meet.
        let gaps = |rows: usize, columns: usize, salt: usize| {
            let mut all = vec![T::from_f64(f64::NAN); rows * (columns + 2)];
            for (row, values) in
                all.chunks_mut(columns + 2).zip(numbers(rows * columns, salt).chunks(columns.max(1)))
            {
                row[..columns].copy_from_slice(values);
            }
            all
        };
        let (a, b) = match (ta, tb) {
            (false, false) => (gaps(m, k, 1), gaps(k, n, 2)),
            (true, false) => (gaps(k, m, 1), gaps(k, n, 2)),
            (false, true) => (gaps(m, k, 1), gaps(n, k, 2)),
            (true, true) => (gaps(k, m, 1), gaps(n, k, 2)),
        };
        let a = if ta { Mat::strided(&a, k, m, m + 2).t() } else { Mat::strided(&a, m, k, k + 2) };
        let b = if tb { Mat::strided(&b, n, k, k + 2).t() } else { Mat::strided(&b, k, n, n + 2) };
        let (row, other) = (numbers(n, 4), numbers(m * n, 5));
        let start = match self.start {
            0 => Start::Zero,
            1 => Start::Old,
            2 => Start::Row(&row),
            3 => Start::Times(T::from_f64(0.5), Mat::new(&other, m, n)),
            _ => Start::Plus(Mat::new(&other, m, n), &row),
        };
        let old: Vec<T> = match self.start {
            1 => numbers(m * (n + 3), 3),
            // Not read.
            _ => vec![T::from_f64(f64::NAN); m * (n + 3)],
        };
        let mut c = old.clone();
        // SAFETY: C has rows of n + 3 elements.
        with_simd!(isa, s => unsafe {
            blocks::multiply(T::kernel(s), limits, a, b, (c.as_mut_ptr(), n + 3), start, Part::All);
        });
        (c, old)
    }

    fn check<T: Real>(self, isa: Isa, limits: &Limits) {
        let ((m, n, k), [ta, tb]) = (self.sizes, self.transposed);
        let (c, old) = self.compute::<T>(isa, limits);
        let (a, b): (Vec<T>, Vec<T>) = (numbers(m * k, 1), numbers(k * n, 2));
        let (row, other): (Vec<T>, Vec<T>) = (numbers(n, 4), numbers(m * n, 5));
        let eps = if T::IS_F32 { f32::EPSILON as f64 } else { f64::EPSILON };
        for i in 0..m {
            for j in 0..n + 3 {
                let (got, old) = (c[i * (n + 3) + j].to_f64(), old[i * (n + 3) + j].to_f64());
                if j >= n {
                    assert_eq!(got.to_bits(), old.to_bits(), "{self:?}: a gap was written");
                    continue;
                }
                let start = match self.start {
                    0 => 0.0,
                    1 => old,
                    2 => row[j].to_f64(),
                    3 => 0.5 * other[i * n + j].to_f64(),
                    _ => other[i * n + j].to_f64() + row[j].to_f64(),
                };
                let term = |p: usize| {
                    let x = if ta { a[p * m + i] } else { a[i * k + p] }.to_f64();
                    let y = if tb { b[j * k + p] } else { b[p * n + j] }.to_f64();
                    x * y
                };
                let want = (0..k).map(term).sum::<f64>() + start;
                // Every operation rounds a number below the sum of all magnitudes; the f64 sum here rounds too.
                let size = (0..k).map(|p| term(p).abs()).sum::<f64>() + start.abs();
                let limit = eps * (k as f64 + 3.0) * size;
                assert!((got - want).abs() <= limit, "{} {self:?} ({i}, {j}): {got} {want}", isa.name());
            }
        }
    }
}

#[test]
fn products_match_a_double_sum_for_every_shape_path_and_transpose() {
    let shapes = [
        (1, 1, 1),
        (5, 17, 3),
        (7, 64, 300),
        (13, 65, 64),
        (100, 100, 100),
        (193, 230, 70),
        (33, 90, 150),
        (3, 5, 0),
        (3, 20, 4100),
    ];
    for case in shapes.into_iter().flat_map(Case::all) {
        for isa in Isa::available() {
            case.check::<f32>(isa, &LIMITS);
            case.check::<f64>(isa, &LIMITS);
        }
    }
}

/// Limits so low that small matrices meet all of them.
fn low(stream: &mut Rng) -> Limits {
    let mut up_to = |most: u64| 1 + stream.below(most) as usize;
    Limits {
        serial: up_to(2000),
        task: up_to(1000),
        tasks: up_to(40),
        rows: up_to(30),
        panels: up_to(3),
        terms: up_to(20),
        chunk: up_to(40),
        pack: up_to(500),
        wide: up_to(50),
        packed: up_to(600),
        pack_a: up_to(60),
        pack_b: up_to(60),
        small: up_to(2000),
        part: up_to(15),
        parts: up_to(9000),
    }
}

fn drawn(number: u64) -> (Case, Limits) {
    let mut stream = Rng::new(7, "test", "products", number);
    let mut up_to = |most: u64| stream.below(most) as usize;
    let sizes = (1 + up_to(70), 1 + up_to(150), up_to(90));
    let case = Case { sizes, transposed: [up_to(2) > 0, up_to(2) > 0], start: up_to(4) };
    (case, low(&mut stream))
}

#[test]
fn every_cut_gives_the_product() {
    for number in 0..400 {
        let (case, limits) = drawn(number);
        for isa in Isa::available() {
            case.check::<f32>(isa, &limits);
        }
        case.check::<f64>(Isa::best(), &limits);
    }
}

/// The bits of a result, those of NaN included.
fn bits<T: Real>(values: &[T]) -> Vec<u64> {
    values.iter().map(|v| v.to_f64().to_bits()).collect()
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let mut cases: Vec<(Case, Limits)> = (0..40).map(drawn).collect();
    for sizes in [(128, 100, 784), (200, 300, 150), (20, 30, 9000)] {
        cases.extend(Case::all(sizes).step_by(5).map(|case| (case, LIMITS)));
    }
    let all = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let of = |(case, limits): &(Case, Limits)| {
            let singles = Isa::available().into_iter().map(|isa| bits(&case.compute::<f32>(isa, limits).0));
            let doubles = bits(&case.compute::<f64>(Isa::best(), limits).0);
            singles.chain([doubles]).collect::<Vec<_>>()
        };
        pool.install(|| cases.iter().map(of).collect::<Vec<_>>())
    };
    let one = all(1);
    for threads in [2, 3, 7, 64] {
        let many = all(threads);
        for ((case, one), many) in cases.iter().zip(&one).zip(&many) {
            assert!(one == many, "{threads} threads: {case:?}");
        }
    }
}

#[test]
fn a_new_matrix_holds_the_same() {
    for (m, n, k) in [(3, 5, 2), (700, 450, 3), (700, 450, 0)] {
        let (a, b): (Vec<f32>, Vec<f32>) = (numbers(m * k, 1), numbers(k * n, 2));
        let (a, b) = (Mat::new(&a, m, k), Mat::new(&b, n, k).t());
        let mut c = vec![1.0; m * n];
        gemm(Isa::best(), a, b, &mut c, n, false);
        assert_eq!(product(Isa::best(), a, b), c);
    }
}

#[test]
fn a_matrix_by_its_transpose_is_symmetric_to_the_bit() {
    for isa in Isa::available() {
        for (n, k) in [(1, 3), (70, 40), (230, 300), (5, 0)] {
            let x: Vec<f32> = numbers(n * k, 1);
            for x in [Mat::new(&x, n, k), Mat::new(&x, k, n).t()] {
                let (half, all) = (gram(isa, x), product(isa, x, x.t()));
                for i in 0..n {
                    assert_eq!(bits(&half[i * n..=i * n + i]), bits(&all[i * n..=i * n + i]), "{n} {k}");
                    assert!((0..n).all(|j| half[i * n + j].to_bits() == half[j * n + i].to_bits()));
                }
            }
        }
    }
}

#[test]
fn a_product_of_bf16_is_that_of_the_rounded_operands_with_the_same_bits_everywhere() {
    use crate::simd::pairs::to_bf16;
    for (m, n, k) in [(1, 1, 1), (3, 5, 0), (7, 33, 20), (60, 210, 301), (20, 30, 5001)] {
        let (a, b, row) = (numbers::<f32>(m * k, 1), numbers::<f32>(n * k, 2), numbers::<f32>(n, 3));
        // Every way in which the operands can lie.
        let turned = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..rows * cols).map(|i| x[i % rows * cols + i / rows]).collect()
        };
        let (at, bt) = (turned(&a, m, k), turned(&b, n, k));
        let ways = [
            (Mat::new(&a, m, k), Mat::new(&b, n, k).t()),
            (Mat::new(&at, k, m).t(), Mat::new(&b, n, k).t()),
            (Mat::new(&a, m, k), Mat::new(&bt, k, n)),
        ];
        let product =
            |isa, (a, b)| product_from(Arithmetic { isa, operands: Operands::Bf16 }, a, b, Start::Row(&row));
        let found = product(Isa::PORTABLE, ways[0]);
        for isa in Isa::available() {
            for (way, operands) in ways.into_iter().enumerate() {
                let same = match isa.multiplies_matrices() {
                    false => product(isa, operands) == found,
                    true => product(isa, operands) == by_matrices(&a, &b, &row, k),
                };
                assert!(same, "{} {way}: {m} {n} {k}", isa.name());
            }
        }
        for (at, found) in found.iter().enumerate() {
            let (i, j) = (at / n, at % n);
            let term = |p: usize| f64::from(to_bf16(a[i * k + p])) * f64::from(to_bf16(b[j * k + p]));
            let want = (0..k).map(term).sum::<f64>() + f64::from(row[j]);
            let size = (0..k).map(|p| term(p).abs()).sum::<f64>() + f64::from(row[j].abs());
            let limit = f64::from(f32::EPSILON) * (k as f64 + 3.0) * size;
            assert!((f64::from(*found) - want).abs() <= limit, "{m} {n} {k}: {found} {want}");
        }
    }
}

/// A Bᵀ and a row in the order of AMX: of 32 terms at a time all first ones of the pairs, all second ones, and both sums. (A small result of
/// many terms is summed in parts.)
fn by_matrices(a: &[f32], b: &[f32], row: &[f32], k: usize) -> Vec<f32> {
    use crate::simd::pairs::to_bf16;
    let parts = if k >= 4 * LIMITS.part { k / LIMITS.part } else { 1 };
    let sum = |start: f32, a: &[f32], b: &[f32]| {
        a.chunks(32).zip(b.chunks(32)).fold(start, |sum, (a, b)| {
            let every_second = |first: usize| {
                let terms = a.iter().zip(b).skip(first).step_by(2);
                terms.fold(0f32, |sum, (a, b)| to_bf16(*a).mul_add(to_bf16(*b), sum))
            };
            sum + (every_second(0) + every_second(1))
        })
    };
    let rows = |x: &[f32]| x.chunks(k.max(1)).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let element = |a: &Vec<f32>, (b, start): (&Vec<f32>, &f32)| {
        if parts == 1 {
            return sum(*start, a, b);
        }
        let length = k.div_ceil(parts);
        a.chunks(length).zip(b.chunks(length)).fold(*start, |all, (a, b)| all + sum(0.0, a, b))
    };
    if k == 0 {
        return row.repeat(3);
    }
    let b = rows(b);
    rows(a).iter().flat_map(|a| b.iter().zip(row).map(|b| element(a, b)).collect::<Vec<_>>()).collect()
}

#[cfg(target_arch = "x86_64")]
#[test]
fn matrices_are_multiplied_within_any_limits() {
    let Some(isa) = Isa::available().into_iter().find(|isa| isa.multiplies_matrices()) else { return };
    let amx = Arithmetic { isa, operands: Operands::Bf16 }.amx().unwrap();
    for number in 0..300 {
        let (case, limits) = drawn(number);
        // Products of whole numbers up to 8 are exact, whatever the order.
        let (m, n, k) = case.sizes;
        let whole = |n: usize, salt: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 7919 + salt * 104_729) % 17) as f32 - 8.0).collect()
        };
        let (a, b) = (whole(m * k, 1), whole(k * n, 2));
        let [ta, tb] = case.transposed;
        let a = if ta { Mat::new(&a, k, m).t() } else { Mat::new(&a, m, k) };
        let b = if tb { Mat::new(&b, n, k).t() } else { Mat::new(&b, k, n) };
        let mut c = vec![f32::NAN; m * (n + 3)];
        // SAFETY: C has rows of n + 3 elements.
        unsafe {
            blocks::multiply(amx, &limits, a, b, (c.as_mut_ptr(), n + 3), Start::Zero, Part::All);
        }
        let want = product(Isa::PORTABLE, a, b);
        for (i, row) in c.chunks(n + 3).enumerate() {
            assert_eq!(row[..n], want[i * n..][..n], "{case:?} {limits:?} {i}");
            assert!(row[n..].iter().all(|x| x.is_nan()), "{case:?} {limits:?} {i}: a gap was written");
        }
    }
}
