//! Operands of less precision: lanes that hold two terms of a sum as bf16, the earlier one in the upper half.
//!
//! The sums are f32's and taken in the order of the terms, by AVX512-BF16's instruction where there is one, elsewhere by two
//! multiply-adds, with the same bits. (ARM's BFDOT and BFMMLA round their sums in another way, so that NEON has the two.)
use super::Simd;

/// The vectors of `S` for products of packed pairs: [`Simd::accumulate`] takes two terms at a time, all else is as in `S`.
#[derive(Clone, Copy, Debug)]
pub struct Pairs<S>(pub S);

impl<S: Simd> Simd for Pairs<S> {
    type V = S::V;
    const LANES: usize = S::LANES;
    const VECTORS: usize = S::VECTORS;
    const SQUARE: (usize, usize) = S::SQUARE;
    const TERMS: usize = 2;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.run(f)
    }
    #[inline(always)]
    fn zero(self) -> S::V {
        self.0.zero()
    }
    #[inline(always)]
    fn splat(self, x: f32) -> S::V {
        self.0.splat(x)
    }
    #[inline(always)]
    fn add(self, a: S::V, b: S::V) -> S::V {
        self.0.add(a, b)
    }
    #[inline(always)]
    fn sub(self, a: S::V, b: S::V) -> S::V {
        self.0.sub(a, b)
    }
    #[inline(always)]
    fn mul(self, a: S::V, b: S::V) -> S::V {
        self.0.mul(a, b)
    }
    #[inline(always)]
    fn fma(self, a: S::V, b: S::V, c: S::V) -> S::V {
        self.0.fma(a, b, c)
    }
    #[inline(always)]
    fn accumulate(self, a: S::V, b: S::V, c: S::V) -> S::V {
        self.0.dot(a, b, c)
    }
    #[inline(always)]
    fn halves(self, v: S::V) -> (S::V, S::V) {
        self.0.halves(v)
    }
    #[inline(always)]
    fn dot(self, a: S::V, b: S::V, c: S::V) -> S::V {
        self.0.dot(a, b, c)
    }
    #[inline(always)]
    fn pair_rows(self, to: &mut [f32], first: &[f32], second: Option<&[f32]>) {
        self.0.pair_rows(to, first, second);
    }
    #[inline(always)]
    fn pair_terms(self, to: &mut [f32], terms: &[f32]) {
        self.0.pair_terms(to, terms);
    }
    #[inline(always)]
    fn div(self, a: S::V, b: S::V) -> S::V {
        self.0.div(a, b)
    }
    #[inline(always)]
    fn where_below(self, a: S::V, b: S::V, yes: S::V, no: S::V) -> S::V {
        self.0.where_below(a, b, yes, no)
    }
    #[inline(always)]
    fn power_of_two(self, sum: S::V) -> S::V {
        self.0.power_of_two(sum)
    }
    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        self.0.prefetch(line);
    }
    #[inline(always)]
    fn prefetch_far(self, line: *const f32) {
        self.0.prefetch_far(line);
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { self.0.load(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: S::V) {
        // SAFETY: the caller's promise.
        unsafe { self.0.store(to, v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, n: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { self.0.load_part(from, n) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize, v: S::V) {
        // SAFETY: the caller's promise.
        unsafe { self.0.store_part(to, n, v) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.transpose(src, lds, dst, ldd) }
    }
}

/// The nearest bf16, of two equally near the even one, as an f32. What is too large is infinite, NaN stays NaN.
#[inline(always)]
pub fn to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    // Adding to the bits of a NaN could end in infinity.
    f32::from_bits(if x.is_nan() { bits | 0x0040_0000 } else { nearest } & 0xffff_0000)
}

/// Two terms, the earlier one first, as bf16 in one lane.
#[inline(always)]
pub fn pair(first: f32, second: f32) -> f32 {
    f32::from_bits(to_bf16(first).to_bits() | to_bf16(second).to_bits() >> 16)
}

/// Pairs of two rows of terms, column by column; of one row, each with zero.
#[inline(always)]
pub fn pair_rows(to: &mut [f32], first: &[f32], second: Option<&[f32]>) {
    match second {
        Some(second) => to.iter_mut().zip(first).zip(second).for_each(|((to, a), b)| *to = pair(*a, *b)),
        None => to.iter_mut().zip(first).for_each(|(to, a)| *to = pair(*a, 0.0)),
    }
}

/// Pairs of terms that lie one after another; an odd last one with zero.
#[inline(always)]
pub fn pair_terms(to: &mut [f32], terms: &[f32]) {
    let (whole, last) = terms.as_chunks::<2>();
    to.iter_mut().zip(whole).for_each(|(to, [a, b])| *to = pair(*a, *b));
    if let (Some(to), [last]) = (to.get_mut(whole.len()), last) {
        *to = pair(*last, 0.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arithmetic, Isa, Operands, with_products, with_simd};

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
    fn every_instruction_set_makes_the_same_pairs() {
        fn of<S: Simd>(s: S, x: &[f32], n: usize) -> Vec<u32> {
            let (mut rows, mut single, mut terms) = (vec![1.0; n], vec![1.0; n], vec![1.0; n.div_ceil(2)]);
            s.run(
                #[inline(always)]
                || {
                    s.pair_rows(&mut rows, &x[..n], Some(&x[n..2 * n]));
                    s.pair_rows(&mut single, &x[..n], None);
                    s.pair_terms(&mut terms, &x[..n]);
                },
            );
            [rows, single, terms].concat().iter().map(|v| v.to_bits()).collect()
        }
        let mut bits = 3u32;
        let numbers = || {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match bits % 7 {
                // Ties, zeros, infinities and what is none of these.
                0 => f32::from_bits(bits & 0xffff_0000 | 0x8000),
                1 => [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE]
                    [bits as usize % 6],
                2 => f32::from_bits(bits | 0x7f80_0000),
                _ => f32::from_bits(bits),
            }
        };
        // A number below the least normal one may count as zero.
        let numbers = std::iter::repeat_with(numbers).filter(|x| !x.is_subnormal());
        let x: Vec<f32> = numbers.take(4096).collect();
        for n in (0..130).chain([2047, 2048]) {
            let expected = of(crate::simd::portable::Portable, &x, n);
            for isa in Isa::available() {
                let by = Arithmetic { isa, operands: Operands::Bf16 };
                assert!(with_products!(by, s => of(s, &x, n)) == expected, "{} {n}", isa.name());
            }
        }
    }

    #[test]
    fn a_lane_multiplies_its_earlier_term_first() {
        // 1 − 1 + 2⁻³⁰ and 2⁻³⁰ − 1 + 1: only the order of the two tells them apart.
        let small = 2f32.powi(-30);
        fn of<S: Simd>(s: S, a: f32, b: f32, c: f32) -> f32 {
            let mut lanes = [0.0; 16];
            s.run(
                #[inline(always)]
                // SAFETY: the array holds every vector.
                || unsafe { s.store(lanes.as_mut_ptr(), s.dot(s.splat(a), s.splat(b), s.splat(c))) },
            );
            lanes[0]
        }
        for isa in Isa::available() {
            let dot = |a, c| with_simd!(isa, s => of(s, a, pair(1.0, 1.0), c));
            assert_eq!(dot(pair(-1.0, small), 1.0), small, "{}", isa.name());
            assert_eq!(dot(pair(small, -1.0), 1.0), 0.0, "{}", isa.name());
        }
    }
}
