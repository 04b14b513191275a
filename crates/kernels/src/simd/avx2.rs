//! AVX2 with fused multiply-add: 8 lanes, 16 registers.
use super::Simd;
use std::arch::x86_64::*;

/// Proof that this CPU has AVX2 and FMA.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU has AVX2 and FMA.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// All bits set in the lanes below `n`, of 8.
#[inline]
#[target_feature(enable = "avx2")]
fn lanes(n: usize) -> __m256i {
    let iota = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), iota)
}

// SAFETY of all blocks: `self` proves AVX2 and FMA, and what else is needed is the caller's promise.
impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    // 6 × 2 accumulators, 2 vectors of B and a broadcast are 15 of 16 registers, and 8 loads serve 12 multiply-adds.
    const VECTORS: usize = 2;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx2,fma")]
        fn inner<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: as above.
        unsafe { inner(f) }
    }
    #[inline(always)]
    fn zero(self) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn halves(self, v: __m256) -> (__m256, __m256) {
        // SAFETY: as above.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let upper = _mm256_and_si256(bits, _mm256_set1_epi32(!0xffff));
            (_mm256_castsi256_ps(upper), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)))
        }
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    fn where_below(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }
    #[inline(always)]
    fn power_of_two(self, sum: __m256) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(sum));
            _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(0x3f80_0000)))
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
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        // SAFETY: as above.
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, n: usize) -> __m256 {
        // SAFETY: as above.
        unsafe { _mm256_maskload_ps(from, lanes(n)) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize, v: __m256) {
        // SAFETY: as above.
        unsafe { _mm256_maskstore_ps(to, lanes(n), v) }
    }
    #[inline(always)]
    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: as above.
        unsafe { transpose8(src, lds, dst, ldd) }
    }
}

/// Transposes an 8 × 8 block.
///
/// # Safety
/// AVX is there; 8 rows of 8 floats are valid at `src` (`lds` apart) and `dst` (`ldd` apart).
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transpose8(src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
    let mut r = [_mm256_setzero_ps(); 8];
    for (i, r) in r.iter_mut().enumerate() {
        // SAFETY: row `i` of the source.
        *r = unsafe { _mm256_loadu_ps(src.add(i * lds)) };
    }
    // Three stages that swap ever larger blocks: 1, 2 and 4 columns.
    let mut t = r;
    for i in 0..4 {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for i in 0..2 {
        let (a, b, c, d) = (t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
        r[4 * i] = _mm256_shuffle_ps::<0x44>(a, c);
        r[4 * i + 1] = _mm256_shuffle_ps::<0xee>(a, c);
        r[4 * i + 2] = _mm256_shuffle_ps::<0x44>(b, d);
        r[4 * i + 3] = _mm256_shuffle_ps::<0xee>(b, d);
    }
    for i in 0..4 {
        // SAFETY: row `i` of the destination.
        unsafe { _mm256_storeu_ps(dst.add(i * ldd), _mm256_permute2f128_ps::<0x20>(r[i], r[4 + i])) };
    }
    for i in 0..4 {
        // SAFETY: row `4 + i` of the destination.
        unsafe { _mm256_storeu_ps(dst.add((4 + i) * ldd), _mm256_permute2f128_ps::<0x31>(r[i], r[4 + i])) };
    }
}
