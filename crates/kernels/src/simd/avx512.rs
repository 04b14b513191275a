//! AVX-512: 16 lanes, 32 registers.
use super::Simd;
use super::pairs::{pair_rows, pair_terms};
use std::arch::x86_64::*;

/// Proof that this CPU has AVX-512F, DQ and VL, and AVX2 and FMA with them; if `BF16`, also AVX512-BF16.
#[derive(Clone, Copy, Debug)]
pub struct Avx512<const BF16: bool>(());

impl<const BF16: bool> Avx512<BF16> {
    /// # Safety
    /// The CPU has AVX-512F, DQ and VL, AVX2 and FMA, and, if `BF16`, AVX512-BF16.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// The lanes below `n`, of 16.
#[inline(always)]
fn lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1u16 << n) - 1 }
}

/// The lane numbers times `stride`, for gathers and scatters.
#[inline]
#[target_feature(enable = "avx512f")]
fn steps(stride: usize) -> __m512i {
    let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_mullo_epi32(iota, _mm512_set1_epi32(stride as i32))
}

/// The nearest bf16 of each lane, in its upper half; what is below the least normal number becomes zero, as which it would be
/// multiplied.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn upper(v: __m512) -> __m512i {
    // SAFETY: sixteen bf16 are sixteen integers of 16 bits.
    let bits = unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v)) };
    _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits))
}

/// [`pair_rows`] by the conversions of AVX512-BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_rows_bf16(to: &mut [f32], first: &[f32], second: Option<&[f32]>) {
    let n = to.len().min(first.len()).min(second.map_or(usize::MAX, <[f32]>::len));
    for i in (0..n).step_by(16) {
        let mask = lanes(n - i);
        // SAFETY: the lanes of the mask lie in all slices.
        unsafe {
            let load = |row: &[f32]| _mm512_maskz_loadu_ps(mask, row.as_ptr().add(i));
            let earlier = upper(load(first));
            let both = match second {
                Some(second) => _mm512_or_si512(earlier, _mm512_srli_epi32::<16>(upper(load(second)))),
                None => earlier,
            };
            _mm512_mask_storeu_ps(to.as_mut_ptr().add(i), mask, _mm512_castsi512_ps(both));
        }
    }
}

/// [`pair_terms`] by the conversions of AVX512-BF16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
fn pair_terms_bf16(to: &mut [f32], terms: &[f32]) {
    let (whole, _) = terms.as_chunks::<32>();
    let done = whole.len().min(to.len() / 16);
    // The earlier of two terms stands in the lower half.
    let turned = |low: __m512, high: __m512| {
        // SAFETY: thirty-two bf16 are sixteen integers of 32 bits.
        let bits = unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) };
        _mm512_castsi512_ps(_mm512_rol_epi32::<16>(bits))
    };
    for (to, terms) in to.chunks_exact_mut(16).zip(whole) {
        // SAFETY: 32 terms and 16 pairs.
        unsafe {
            let from = terms.as_ptr();
            let pairs = turned(_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
            _mm512_storeu_ps(to.as_mut_ptr(), pairs);
        }
    }
    pair_terms(&mut to[16 * done..], &terms[32 * done..]);
}

// SAFETY of all blocks: `self` proves AVX-512F (and BF16 where it is so), and what else is needed is the caller's promise.
impl<const BF16: bool> Simd for Avx512<BF16> {
    type V = __m512;
    const LANES: usize = 16;
    // 6 × 4 accumulators, 4 vectors of B and a broadcast are 29 of 32 registers, and 10 loads serve 24 multiply-adds.
    const VECTORS: usize = 4;
    // 24 accumulators, 2 vectors of B and a broadcast: 14 loads serve 24 multiply-adds.
    const SQUARE: (usize, usize) = (12, 2);

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma")]
        fn inner<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        #[target_feature(enable = "avx512bf16,avx512f,avx512dq,avx512vl,avx2,fma")]
        fn with_bf16<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: as above.
        unsafe { if BF16 { with_bf16(f) } else { inner(f) } }
    }
    #[inline(always)]
    fn zero(self) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn halves(self, v: __m512) -> (__m512, __m512) {
        // SAFETY: as above.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let upper = _mm512_and_si512(bits, _mm512_set1_epi32(!0xffff));
            (_mm512_castsi512_ps(upper), _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    fn dot(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        if !BF16 {
            let ((a0, a1), (b0, b1)) = (self.halves(a), self.halves(b));
            return self.fma(a1, b1, self.fma(a0, b0, c));
        }
        // SAFETY: as above; a vector of pairs is one of bf16, and every pattern of bits is one. The instruction adds the product of
        // the upper halves first.
        unsafe {
            let [a, b] = [a, b].map(|v| std::mem::transmute::<__m512, __m512bh>(v));
            _mm512_dpbf16_ps(c, a, b)
        }
    }
    #[inline(always)]
    fn pair_rows(self, to: &mut [f32], first: &[f32], second: Option<&[f32]>) {
        if !BF16 {
            return pair_rows(to, first, second);
        }
        // SAFETY: as above.
        unsafe { pair_rows_bf16(to, first, second) }
    }
    #[inline(always)]
    fn pair_terms(self, to: &mut [f32], terms: &[f32]) {
        if !BF16 {
            return pair_terms(to, terms);
        }
        // SAFETY: as above.
        unsafe { pair_terms_bf16(to, terms) }
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn where_below(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), no, yes) }
    }
    #[inline(always)]
    fn power_of_two(self, sum: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(sum));
            _mm512_castsi512_ps(_mm512_add_epi32(exponent, _mm512_set1_epi32(0x3f80_0000)))
        }
    }
    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        // SAFETY: as above; a prefetch of what is not there does nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
    }
    #[inline(always)]
    fn prefetch_far(self, line: *const f32) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.cast()) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, n: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_maskz_loadu_ps(lanes(n), from) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize, v: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_mask_storeu_ps(to, lanes(n), v) }
    }
    #[inline(always)]
    unsafe fn gather(self, from: *const f32, stride: usize, n: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), lanes(n), steps(stride), from) }
    }
    #[inline(always)]
    unsafe fn scatter(self, to: *mut f32, stride: usize, n: usize, v: __m512) {
        // SAFETY: as above.
        unsafe { _mm512_mask_i32scatter_ps::<4>(to, lanes(n), steps(stride), v) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: as above.
        unsafe { transpose16(src, lds, dst, ldd) }
    }
}

/// Transposes a 16 × 16 block.
///
/// # Safety
/// AVX-512F is there; 16 rows of 16 floats are valid at `src` (`lds` apart) and `dst` (`ldd` apart).
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose16(src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
    let mut r = [_mm512_setzero_ps(); 16];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: row `i` of the source.
        *r = unsafe { _mm512_loadu_ps(src.add(i * lds)) };
    }
    for (i, r) in turn(r).into_iter().enumerate() {
        // SAFETY: row `i` of the destination.
        unsafe { _mm512_storeu_ps(dst.add(i * ldd), r) };
    }
}

/// A 16 × 16 block transposed.
///
/// # Safety
/// AVX-512F is there.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn turn(mut r: [__m512; 16]) -> [__m512; 16] {
    let zero = _mm512_setzero_ps();
    // Four stages that swap ever larger blocks: 1, 2, 4 and 8 columns.
    let mut t = [zero; 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    let pd = |x| _mm512_castps_pd(x);
    for i in 0..4 {
        let (a, b, c, d) = (t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
        r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(a), pd(c)));
        r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(a), pd(c)));
        r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pd(b), pd(d)));
        r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pd(b), pd(d)));
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_f32x4::<0x88>(r[i], r[4 + i]);
        t[4 + i] = _mm512_shuffle_f32x4::<0xdd>(r[i], r[4 + i]);
        t[8 + i] = _mm512_shuffle_f32x4::<0x88>(r[8 + i], r[12 + i]);
        t[12 + i] = _mm512_shuffle_f32x4::<0xdd>(r[8 + i], r[12 + i]);
    }
    for i in 0..4 {
        let (a, b, c, d) = (t[i], t[4 + i], t[8 + i], t[12 + i]);
        r[i] = _mm512_shuffle_f32x4::<0x88>(a, c);
        r[4 + i] = _mm512_shuffle_f32x4::<0x88>(b, d);
        r[8 + i] = _mm512_shuffle_f32x4::<0xdd>(a, c);
        r[12 + i] = _mm512_shuffle_f32x4::<0xdd>(b, d);
    }
    r
}
