//! NEON, which every 64-bit ARM has: 4 lanes, 32 registers.
use super::Simd;
use std::arch::aarch64::*;

/// Proof that this CPU has NEON.
#[derive(Clone, Copy, Debug)]
pub struct Neon(());

impl Neon {
    /// # Safety
    /// The CPU has NEON.
    pub unsafe fn new() -> Self {
        Self(())
    }
}

// SAFETY of all blocks: `self` proves NEON, and what else is needed is the caller's promise.
impl Simd for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    // 6 × 4 accumulators, 4 vectors of B and a broadcast are 29 of 32 registers.
    const VECTORS: usize = 4;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        // Part of the target.
        f()
    }
    #[inline(always)]
    fn zero(self) -> float32x4_t {
        self.splat(0.0)
    }
    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn halves(self, v: float32x4_t) -> (float32x4_t, float32x4_t) {
        // SAFETY: as above.
        unsafe {
            let bits = vreinterpretq_u32_f32(v);
            let upper = vandq_u32(bits, vdupq_n_u32(0xffff_0000));
            (vreinterpretq_f32_u32(upper), vreinterpretq_f32_u32(vshlq_n_u32::<16>(bits)))
        }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn where_below(self, a: float32x4_t, b: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vbslq_f32(vcltq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    fn power_of_two(self, sum: float32x4_t) -> float32x4_t {
        // SAFETY: as above.
        unsafe {
            let exponent = vshlq_n_u32::<23>(vreinterpretq_u32_f32(sum));
            vreinterpretq_f32_u32(vaddq_u32(exponent, vdupq_n_u32(0x3f80_0000)))
        }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        // SAFETY: as above.
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: float32x4_t) {
        // SAFETY: as above.
        unsafe { vst1q_f32(to, v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, n: usize) -> float32x4_t {
        // SAFETY: as above.
        unsafe { self.gather(from, 1, n) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize, v: float32x4_t) {
        // SAFETY: as above.
        unsafe { self.scatter(to, 1, n, v) }
    }
}
