//! Products of operands rounded to bf16, with sums in f32.
//!
//! A product of two such numbers has 16 bits and is exact in f32, so that it does not matter whether it is fused with its
//! addition: every instruction set gives the same bits (but for products below the least normal number).
use super::{Mat, Start, product_from};
use crate::{Buf, Isa, vectorize};
use rayon::prelude::*;

/// The nearest bf16, of two equally near the even one, as an f32. What is too large is infinite, NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Adding to the bits of a NaN could end in infinity.
    f32::from_bits(if x.is_nan() { bits | 0x0040_0000 } else { nearest } & 0xffff_0000)
}

/// A B and what it is added to, as a new row-major matrix, of the elements of A and B that [`to_bf16`] makes.
///
/// # Panics
/// As [`product_from`].
pub fn product_bf16(isa: Isa, a: Mat<f32>, b: Mat<f32>, start: Start<f32>) -> Vec<f32> {
    let (x, y) = (rounded(isa, a.data), rounded(isa, b.data));
    product_from(isa, Mat { data: &x, ..a }, Mat { data: &y, ..b }, start)
}

fn rounded(isa: Isa, x: &[f32]) -> Buf<f32> {
    const CHUNK: usize = 1 << 15;
    let mut to = Buf::dirty(x.len());
    to.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(to, x)| {
        vectorize(
            isa,
            #[inline(always)]
            || to.iter_mut().zip(x).for_each(|(to, x)| *to = to_bf16(*x)),
        );
    });
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_takes_the_nearest_and_of_two_the_even_one() {
        let step = |x: f32, by: i32| f32::from_bits(x.to_bits().wrapping_add_signed(by << 16));
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Ties too.
            let x = f32::from_bits(if bits.is_multiple_of(3) { bits & 0xffff_0000 | 0x8000 } else { bits });
            let found = to_bf16(x);
            assert_eq!(found.to_bits() & 0xffff, 0, "{x}");
            if x.is_nan() || found.is_infinite() {
                assert!(x.is_nan() == found.is_nan() && (x.is_nan() || x.abs() > 3.38e38), "{x} {found}");
                continue;
            }
            let distance = |y: f32| (f64::from(y) - f64::from(x)).abs();
            for other in [step(found, 1), step(found, -1)].into_iter().filter(|y| y.is_finite()) {
                let even = found.to_bits() >> 16 & 1 == 0;
                assert!(
                    distance(found) < distance(other) || distance(found) == distance(other) && even,
                    "{x}"
                );
            }
        }
        for nan in [0x7f80_0001, 0xff80_0001, 0x7fff_ffff].map(f32::from_bits) {
            assert!(to_bf16(nan).is_nan());
        }
        assert_eq!(to_bf16(f32::MAX), f32::INFINITY);
        assert_eq!(to_bf16(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert_eq!(to_bf16(-0.0).to_bits(), (-0f32).to_bits());
    }

    #[test]
    fn a_product_is_that_of_the_rounded_operands_with_the_same_bits_everywhere() {
        let numbers = |n: usize, salt: usize| -> Vec<f32> {
            (0..n).map(|i| ((i * 7919 + salt * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect()
        };
        for (m, n, k) in [(1, 1, 1), (7, 33, 20), (60, 210, 300), (20, 30, 5000)] {
            let (a, b, row) = (numbers(m * k, 1), numbers(n * k, 2), numbers(n, 3));
            let (am, bm) = (Mat::new(&a, m, k), Mat::new(&b, n, k).t());
            let found = product_bf16(Isa::PORTABLE, am, bm, Start::Row(&row));
            for isa in Isa::available() {
                assert_eq!(product_bf16(isa, am, bm, Start::Row(&row)), found, "{}", isa.name());
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
}
