//! Plain Rust in groups of four, which the compiler turns into whatever vectors the target's least CPU has.
use super::Simd;

/// What every CPU has.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

#[inline(always)]
fn map(f: impl Fn(usize) -> f32) -> [f32; 4] {
    [f(0), f(1), f(2), f(3)]
}

impl Simd for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    // SSE has 16 registers.
    const VECTORS: usize = 2;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
    #[inline(always)]
    fn zero(self) -> [f32; 4] {
        [0.0; 4]
    }
    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    fn add(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        map(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn halves(self, v: [f32; 4]) -> ([f32; 4], [f32; 4]) {
        let bits = v.map(f32::to_bits);
        (map(|i| f32::from_bits(bits[i] & 0xffff_0000)), map(|i| f32::from_bits(bits[i] << 16)))
    }
    #[inline(always)]
    fn div(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        map(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn where_below(self, a: [f32; 4], b: [f32; 4], yes: [f32; 4], no: [f32; 4]) -> [f32; 4] {
        map(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn power_of_two(self, sum: [f32; 4]) -> [f32; 4] {
        map(|i| f32::from_bits((sum[i].to_bits() << 23).wrapping_add(0x3f80_0000)))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<[f32; 4]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; 4]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, n: usize) -> [f32; 4] {
        // SAFETY: the caller's promise.
        unsafe { self.gather(from, 1, n) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, n: usize, v: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { self.scatter(to, 1, n, v) }
    }
}
