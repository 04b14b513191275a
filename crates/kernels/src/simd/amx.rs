//! AMX: registers of 16 rows of 64 bytes, and an instruction that multiplies two of them as matrices of bf16.
//!
//! Rust has no stable intrinsics for it, so that its instructions are written out here, and nowhere else.
//!
//! A product of tiles adds 16 pairs of terms: all first terms of the pairs in their order, all second ones, and the sum of both sums
//! to C. That order is AMX's own, so that its bits are not those of other instruction sets (which take the terms one after another).
use super::Into;
use super::avx512::{Avx512, turn};
use crate::gemm::Kernel;
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::sync::OnceLock;

/// Rows of a register, and pairs of bf16 in a row of it.
pub const SIDE: usize = 16;
/// Terms of a sum in a row.
pub const TERMS: usize = 2 * SIDE;
/// Rows and columns of the largest product: two registers each.
const MOST: usize = 2 * SIDE;

/// Proof that this CPU has AMX and AVX-512 with BF16, and that the system lets this process use them.
#[derive(Clone, Copy, Debug)]
pub struct Amx(Avx512<true>);

/// What registers hold, as `ldtilecfg` reads it.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

/// Rows and columns of a product: up to 32 of each, at least one.
pub type Size = (usize, usize);

thread_local! {
    /// The sizes that this thread's registers are set to, if they are.
    static SET: Cell<Size> = const { Cell::new((0, 0)) };
}

/// Whether the CPU has it and the system grants it, which it is asked for once.
pub fn is_there() -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    *THERE.get_or_init(|| {
        /// Bits of CPUID's leaf 7, register EDX.
        const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
        let vectors = is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512bw");
        // SAFETY: every CPU that has AVX-512 has the instruction (and newer compilers know that).
        #[allow(unused_unsafe)]
        let tiles =
            || unsafe { __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES };
        vectors && tiles() && permitted()
    })
}

/// Asks the system for the registers' state, which it keeps for threads that were granted it alone.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let granted: isize;
    // SAFETY: the call reads no memory of ours; the system's calls change rcx, r11 and rax alone.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => granted,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    granted == 0
}

/// Nobody has tried how other systems grant it.
#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// Loads register `REGISTER`, rows `stride` bytes apart.
///
/// # Safety
/// The registers are set to a size, and as many rows and bytes of each are valid.
#[inline(always)]
unsafe fn load<const REGISTER: u8>(from: *const u8, stride: usize) {
    // SAFETY: the caller's promise; the compiler uses none of these registers.
    unsafe {
        asm!("tileloadd tmm{t}, [{p} + {s}]", t = const REGISTER, p = in(reg) from, s = in(reg) stride,
            options(nostack, readonly, preserves_flags));
    }
}

/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn store<const REGISTER: u8>(to: *mut u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tilestored [{p} + {s}], tmm{t}", t = const REGISTER, p = in(reg) to, s = in(reg) stride,
            options(nostack, preserves_flags));
    }
}

/// Clears a register.
///
/// # Safety
/// The registers are set to a size.
#[inline(always)]
unsafe fn clear<const REGISTER: u8>() {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilezero tmm{t}", t = const REGISTER, options(nostack, nomem, preserves_flags)) }
}

/// Adds a product of two registers to a third.
///
/// # Safety
/// As [`clear`].
#[inline(always)]
unsafe fn multiply<const C: u8, const A: u8, const B: u8>() {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
            options(nostack, nomem, preserves_flags));
    }
}

/// An operand in memory, in bytes: rows (A: of C; B: pairs of terms) and the two registers of a step lie so far apart, and so do
/// the steps of 32 terms.
#[derive(Clone, Copy, Debug)]
pub struct Operand {
    /// The first element.
    pub at: *const u8,
    /// Between rows.
    pub row: usize,
    /// Between the two registers.
    pub second: usize,
    /// Between steps.
    pub step: usize,
}

impl Amx {
    /// # Safety
    /// [`is_there`].
    pub unsafe fn new() -> Self {
        // SAFETY: AMX is there only with AVX-512 and BF16.
        Self(unsafe { Avx512::new() })
    }

    /// The vectors of the same CPU.
    pub fn vectors(self) -> Avx512<true> {
        self.0
    }

    /// Calls `f`, which may multiply, and leaves no state in the registers that the system would have to keep.
    pub fn with_registers<R>(self, f: impl FnOnce() -> R) -> R {
        /// Also when `f` panics.
        struct Release;
        impl Drop for Release {
            fn drop(&mut self) {
                SET.set((0, 0));
                // SAFETY: `Amx` proves that there are such registers.
                unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
            }
        }
        let _release = Release;
        SET.set((0, 0));
        f()
    }

    /// Sets the registers for products of a size, which clears them if it was another one.
    ///
    /// # Safety
    /// Within [`Amx::with_registers`].
    #[inline(always)]
    unsafe fn set(self, size: Size) {
        if SET.get() == size {
            return;
        }
        let ((r0, c0), (r1, c1)) = (
            (size.0.min(SIDE), size.1.min(SIDE)),
            (size.0.saturating_sub(SIDE), size.1.saturating_sub(SIDE)),
        );
        // C in 0 to 3, A in 4 and 5, B in 6 and 7; a register that is not used has neither rows nor bytes.
        let mut config = Config { palette: 1, start: 0, reserved: [0; 14], bytes: [0; 16], rows: [0; 16] };
        let sizes = [(r0, c0), (r0, c1), (r1, c0), (r1, c1), (r0, SIDE), (r1, SIDE), (SIDE, c0), (SIDE, c1)];
        for (i, (rows, columns)) in sizes.into_iter().enumerate().filter(|(_, (r, c))| r * c > 0) {
            (config.rows[i], config.bytes[i]) = (rows as u8, 4 * columns as u16);
        }
        // SAFETY: `Amx` proves the instruction, and the configuration is one of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        SET.set(size);
    }

    /// C (+)= the sum of the products of `steps` times 32 terms of each pair of operands.
    ///
    /// # Safety
    /// Within [`Amx::with_registers`]; the operands are valid for these sizes, of A and C for as many rows, and rows of C are `ldc`
    /// apart.
    #[inline(always)]
    pub unsafe fn product(
        self,
        size: Size,
        steps: usize,
        operands: impl Iterator<Item = (Operand, Operand)>,
        c: (*mut f32, usize),
        into: Into,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            self.set(size);
            match (size.0 > SIDE, size.1 > SIDE) {
                (false, false) => self.sum::<false, false>(size.0, steps, operands, c, into),
                (false, true) => self.sum::<false, true>(size.0, steps, operands, c, into),
                (true, false) => self.sum::<true, false>(size.0, steps, operands, c, into),
                (true, true) => self.sum::<true, true>(size.0, steps, operands, c, into),
            }
        }
    }

    /// [`Amx::product`] with one or two registers of rows and of columns.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn sum<const DOWN: bool, const ACROSS: bool>(
        self,
        rows: usize,
        steps: usize,
        operands: impl Iterator<Item = (Operand, Operand)>,
        (c, ldc): (*mut f32, usize),
        into: Into,
    ) {
        let (c, stride) = (c.cast::<u8>(), 4 * ldc);
        let below = c.wrapping_add(SIDE * stride);
        // The lines of C arrive while the products are summed: rows are far apart, and no CPU guesses the next one.
        for row in 0..rows {
            for line in 0..=usize::from(ACROSS) {
                let line = c.wrapping_add(row * stride + line * 4 * SIDE).cast_const().cast();
                // SAFETY: a prefetch of what is not there does nothing.
                unsafe { _mm_prefetch::<_MM_HINT_ET0>(line) };
            }
        }
        // SAFETY: the caller's promise; only registers that the size has are used.
        unsafe {
            match into {
                Into::Set => {
                    clear::<0>();
                    if ACROSS {
                        clear::<1>();
                    }
                    if DOWN {
                        clear::<2>();
                    }
                    if DOWN && ACROSS {
                        clear::<3>();
                    }
                }
                Into::Add => {
                    load::<0>(c, stride);
                    if ACROSS {
                        load::<1>(c.add(4 * SIDE), stride);
                    }
                    if DOWN {
                        load::<2>(below, stride);
                    }
                    if DOWN && ACROSS {
                        load::<3>(below.add(4 * SIDE), stride);
                    }
                }
            }
            operands.for_each(|(a, b)| {
                let (mut pa, mut pb) = (a.at, b.at);
                for _ in 0..steps {
                    load::<6>(pb, b.row);
                    load::<4>(pa, a.row);
                    multiply::<0, 4, 6>();
                    if ACROSS {
                        load::<7>(pb.wrapping_add(b.second), b.row);
                        multiply::<1, 4, 7>();
                    }
                    if DOWN {
                        load::<5>(pa.wrapping_add(a.second), a.row);
                        multiply::<2, 5, 6>();
                    }
                    if DOWN && ACROSS {
                        multiply::<3, 5, 7>();
                    }
                    (pa, pb) = (pa.wrapping_add(a.step), pb.wrapping_add(b.step));
                }
            });
            store::<0>(c, stride);
            if ACROSS {
                store::<1>(c.add(4 * SIDE), stride);
            }
            if DOWN {
                store::<2>(below, stride);
            }
            if DOWN && ACROSS {
                store::<3>(below.add(4 * SIDE), stride);
            }
        }
    }
}

/// Writes a block of 16 × 32 terms as bf16, of which `(rows, terms)` are there and the others zero: line i has its pairs of terms, or, if
/// `pairs_down`, line q has the pair q of every row. Element (i, p) lies at `from.0 + i from.1 + p from.2`; the first `to.2` of 16 lines
/// are written, `to.1` apart.
///
/// # Safety
/// The elements that are there are valid, the lines may be written, and the CPU has these instructions: who has an [`Amx`] knows.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn block(
    (from, across, along): (*const f32, usize, usize),
    (rows, terms): (usize, usize),
    pairs_down: bool,
    (to, step, lines): (*mut f32, usize, usize),
) {
    let first = |n: usize| if n >= SIDE { 0xffff } else { (1u16 << n) - 1 };
    let read = |there: __mmask16, from: *const f32, stride: usize| {
        // SAFETY: the caller's promise; what the mask leaves out is not read.
        unsafe {
            if stride == 1 {
                return _mm512_maskz_loadu_ps(there, from);
            }
            let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let steps = _mm512_mullo_epi32(iota, _mm512_set1_epi32(stride as i32));
            _mm512_mask_i32gather_ps::<4>(_mm512_setzero_ps(), there, steps, from)
        }
    };
    let mut found = [_mm512_setzero_ps(); SIDE];
    let terms_lie_together = along <= across;
    if terms_lie_together {
        let (low, high) = (first(terms), first(terms.saturating_sub(SIDE)));
        for (i, to) in found.iter_mut().enumerate().take(rows) {
            let from = from.wrapping_add(i * across);
            let [a, b] = [read(low, from, along), read(high, from.wrapping_add(SIDE * along), along)];
            *to = as_floats(_mm512_cvtne2ps_pbh(b, a));
        }
    } else {
        // The lower half has the first terms, the upper one the second ones.
        let iota = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let second = _mm512_slli_epi32::<16>(_mm512_add_epi32(iota, _mm512_set1_epi32(16)));
        let (mix, there) = (_mm512_or_si512(iota, second), first(rows));
        for (q, to) in found.iter_mut().enumerate().take(terms.div_ceil(2)) {
            let from = from.wrapping_add(2 * q * along);
            let a = read(there, from, across);
            let b = read(if 2 * q + 1 < terms { there } else { 0 }, from.wrapping_add(along), across);
            let both = as_integers(_mm512_cvtne2ps_pbh(b, a));
            *to = _mm512_castsi512_ps(_mm512_permutexvar_epi16(mix, both));
        }
    }
    let found = if pairs_down == terms_lie_together { turn(found) } else { found };
    for (line, pairs) in found.into_iter().enumerate().take(lines) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to.add(line * step), pairs) };
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn as_floats(v: __m512bh) -> __m512 {
    // SAFETY: both are 512 bits, of which every pattern is one.
    unsafe { std::mem::transmute(v) }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn as_integers(v: __m512bh) -> __m512i {
    // SAFETY: as above.
    unsafe { std::mem::transmute(v) }
}

impl Kernel for Amx {
    type E = f32;
    const ROWS: usize = MOST;
    const PANEL: usize = MOST;
    const LANES: usize = SIDE;
    const TERMS: usize = 2;
    const STEP: usize = TERMS;
    const ROUND: usize = SIDE;
    // A panel of B is 32 KB.
    const DEPTH: usize = 512;

    #[inline(always)]
    fn run<R>(self, f: impl FnOnce() -> R) -> R {
        self.with_registers(f)
    }

    #[inline(always)]
    unsafe fn tile(
        self,
        size: (usize, usize),
        k: usize,
        (a, ..): (*const f32, usize, usize),
        (b, _): (*const f32, usize),
        c: (*mut f32, usize),
        into: Into,
    ) {
        const LINE: usize = 4 * SIDE;
        let a = Operand { at: a.cast(), row: LINE, second: SIDE * LINE, step: size.0 * LINE };
        let b = Operand { at: b.cast(), row: 2 * LINE, second: LINE, step: SIDE * 2 * LINE };
        // SAFETY: the caller's promise; the operands lie as they were packed.
        unsafe { self.product(size, k / SIDE, std::iter::once((a, b)), c, into) }
    }

    unsafe fn transpose(self, src: *const f32, lds: usize, dst: *mut f32, ldd: usize) {
        // SAFETY: the caller's promise.
        unsafe { super::Simd::transpose(self.0, src, lds, dst, ldd) }
    }

    unsafe fn pack(
        self,
        size: (usize, usize),
        from: (*const f32, usize, usize, usize),
        to: (*mut f32, usize),
    ) {
        // SAFETY: the caller's promise, and `Amx`'s proof.
        unsafe { pack(size, from, to.0, true) }
    }

    unsafe fn pack_rows(
        self,
        size: (usize, usize),
        from: (*const f32, usize, usize, usize),
        to: (*mut f32, usize),
    ) {
        // SAFETY: the caller's promise, and `Amx`'s proof.
        unsafe { pack(size, from, to.0, false) }
    }

    #[inline(always)]
    fn prefetch(self, line: *const f32) {
        super::Simd::prefetch_far(self.0, line);
    }
}

/// [`Kernel::pack`] of a panel of columns, or of a tile of rows, each in steps of 32 terms.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn pack(
    (width, terms): (usize, usize),
    (from, across, along, _): (*const f32, usize, usize, usize),
    to: *mut f32,
    columns: bool,
) {
    for p in (0..terms).step_by(TERMS) {
        for i in (0..width).step_by(SIDE) {
            let from = (from.wrapping_add(i * across + p * along), across, along);
            let size = ((width - i).min(SIDE), terms - p);
            // A step has 16 lines of every panel, and a line of every row of a tile.
            let (at, step, lines) = match columns {
                true => (p / 2 * MOST + i, MOST, SIDE),
                false => (p / 2 * width + i * SIDE, SIDE, size.0),
            };
            // SAFETY: the caller's promise.
            unsafe { block(from, size, columns, (to.wrapping_add(at), step, lines)) };
        }
    }
}
