//! Numeric kernels on plain slices: no tensors, no graph, no candle types.
//!
//! Every kernel cuts its work by shape, never by thread count, and sums in a fixed order: the bits of a result
//! do not depend on the number of threads. A kernel takes the instruction set as an argument ([`Isa`]); callers pass
//! [`Isa::detect`], tests pass each of [`Isa::available`]. There is no other way to come by one, so that to hold it proves
//! that the CPU has it.
pub mod attention;
pub mod batch_norm;
pub mod buffer;
pub mod compare;
pub mod conv;
mod conv_amx;
mod conv_depthwise;
mod conv_direct;
mod conv_wino;
pub mod gelu;
pub mod gemm;
pub mod lstm;
pub mod norm;
pub mod pool;
pub mod rotary;
pub mod simd;
pub mod softmax;
pub mod sums;
pub mod swiglu;
#[cfg(test)]
mod threads;
pub mod vmath;

pub use buffer::Buf;

use rayon::prelude::*;
use std::fmt::Debug;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Evaluates `$body` with `$s` bound to the vectors of an [`Isa`]: a value of another type in each case.
macro_rules! with_simd {
    ($isa:expr, $s:ident => $body:expr) => {
        match $isa.level() {
            // AMX has no vectors of its own.
            #[cfg(target_arch = "x86_64")]
            $crate::Level::Avx512 | $crate::Level::Amx => {
                // SAFETY: an `Isa` of this level exists only where its instructions were detected.
                let $s = unsafe { $crate::simd::avx512::Avx512::<false>::new() };
                $body
            }
            #[cfg(target_arch = "x86_64")]
            $crate::Level::Avx2 => {
                // SAFETY: an `Isa` of this level exists only where its instructions were detected.
                let $s = unsafe { $crate::simd::avx2::Avx2::new() };
                $body
            }
            #[cfg(target_arch = "aarch64")]
            $crate::Level::Neon => {
                // SAFETY: an `Isa` of this level exists only where its instructions were detected.
                let $s = unsafe { $crate::simd::neon::Neon::new() };
                $body
            }
            $crate::Level::Portable => {
                let $s = $crate::simd::portable::Portable;
                $body
            }
        }
    };
}
pub(crate) use with_simd;

/// As [`with_simd`], for products: of packed pairs where an [`Arithmetic`] asks for them.
macro_rules! with_products {
    ($by:expr, $s:ident => $body:expr) => {
        match ($by.operands, $by.isa.level()) {
            ($crate::Operands::Full, _) => $crate::with_simd!($by.isa, $s => $body),
            #[cfg(target_arch = "x86_64")]
            ($crate::Operands::Bf16, $crate::Level::Avx512 | $crate::Level::Amx) if $crate::has_bf16() => {
                // SAFETY: the level's instructions were detected, and so was BF16.
                let $s = $crate::simd::pairs::Pairs(unsafe { $crate::simd::avx512::Avx512::<true>::new() });
                $body
            }
            ($crate::Operands::Bf16, _) => $crate::with_simd!($by.isa, s => {
                let $s = $crate::simd::pairs::Pairs(s);
                $body
            }),
        }
    };
}
pub(crate) use with_products;

/// Somebody asked for an instruction set that this CPU has not, or that is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked}: expected one that this CPU has ({}), found `{found}`", .known.join(", "))]
pub struct UnknownIsa {
    /// The variable or the option that asked.
    pub asked: &'static str,
    /// The name.
    pub found: String,
    /// What the CPU has, poorest first.
    pub known: Vec<&'static str>,
}

/// What this process computes with.
static CHOSEN: OnceLock<Result<Isa, UnknownIsa>> = OnceLock::new();

/// An instruction set that this CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Isa(Level);

/// The instruction sets a kernel is compiled for, poorest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Plain Rust for the target's least CPU.
    Portable,
    /// Vectors of four with fused multiply-add.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Vectors of eight with fused multiply-add.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Vectors of sixteen, of integers of 64 bits and of fewer lanes too: all that x86-64-v4 has beyond AVX2 but bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same, and matrices of bf16.
    #[cfg(target_arch = "x86_64")]
    Amx,
}

impl Level {
    const ALL: &[Self] = &[
        Level::Portable,
        #[cfg(target_arch = "aarch64")]
        Level::Neon,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Amx,
    ];

    fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
        }
    }

    /// Whether this CPU has it.
    fn is_there(self) -> bool {
        match self {
            Level::Portable => true,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => {
                Level::Avx2.is_there()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Level::Avx512.is_there() && simd::amx::is_there(),
        }
    }
}

impl Isa {
    /// What every CPU has.
    pub const PORTABLE: Self = Self(Level::Portable);

    /// The best one this CPU has, or the one that was asked for: by [`Isa::ask_for`], or by the variable `TAPER_ISA`.
    pub fn detect() -> Result<Self, UnknownIsa> {
        let choose = || match std::env::var_os("TAPER_ISA") {
            None => Ok(Self::best()),
            Some(name) => Self::named("TAPER_ISA", &name.to_string_lossy()),
        };
        CHOSEN.get_or_init(choose).clone()
    }

    /// The one of that name, which `asked` (an option of the command line, say) wants [`Isa::detect`] to be from now on. To be
    /// called first: what a process has once found out stays.
    pub fn ask_for(asked: &'static str, name: &str) -> Result<Self, UnknownIsa> {
        CHOSEN.get_or_init(|| Self::named(asked, name)).clone()
    }

    /// The best one this CPU has.
    pub fn best() -> Self {
        let there = Level::ALL.iter().rev().find(|level| level.is_there());
        there.map_or(Self::PORTABLE, |level| Self(*level))
    }

    /// The one of that name, if this CPU has it.
    fn named(asked: &'static str, name: &str) -> Result<Self, UnknownIsa> {
        let known = Self::available();
        known.iter().find(|isa| isa.name() == name).copied().ok_or_else(|| UnknownIsa {
            asked,
            found: name.into(),
            known: known.into_iter().map(Self::name).collect(),
        })
    }

    /// All that this CPU has, poorest first.
    pub fn available() -> Vec<Self> {
        Level::ALL.iter().copied().filter(|level| level.is_there()).map(Self).collect()
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    /// The lanes of its vectors.
    pub fn lanes(self) -> usize {
        fn of<S: simd::Simd>(_: S) -> usize {
            S::LANES
        }
        with_simd!(self, s => of(s))
    }

    /// Whether products of bf16 are those of whole matrices here (AMX), which adds up terms in an order of its own: of all that is
    /// computed by an `Isa` only such products have other bits than they have by vectors.
    pub fn multiplies_matrices(self) -> bool {
        Arithmetic { isa: self, operands: Operands::Bf16 }.amx().is_some()
    }

    /// `self` where the element type has kernels for it: only f32 has any beyond the portable ones.
    pub fn of<T: Real>(self) -> Self {
        if T::IS_F32 { self } else { Isa::PORTABLE }
    }

    /// Which one it is.
    pub fn level(self) -> Level {
        self.0
    }
}

/// The precision of what products multiply. Their sums are f32's, and f64 is multiplied as it is: it is for checks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Operands {
    /// As it is.
    #[default]
    Full,
    /// Rounded to bf16: eight bits of precision, the range of f32.
    Bf16,
}

/// How products are computed: by which instructions, of which operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arithmetic {
    /// The instructions.
    pub isa: Isa,
    /// The operands.
    pub operands: Operands,
}

impl From<Isa> for Arithmetic {
    fn from(isa: Isa) -> Self {
        Self { isa, operands: Operands::Full }
    }
}

impl Arithmetic {
    /// The name of the instructions that decide its bits: AMX's products are of bf16 alone.
    pub fn name(self) -> &'static str {
        match self.isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Amx if self.operands == Operands::Full => Level::Avx512.name(),
            level => level.name(),
        }
    }

    /// What multiplies matrices of these operands whole, if there is such a thing.
    fn amx(self) -> Option<simd::amx::Amx> {
        #[cfg(target_arch = "x86_64")]
        if (self.operands, self.isa.level()) == (Operands::Bf16, Level::Amx) {
            // SAFETY: an `Isa` of this level exists only where AMX was detected and granted.
            return Some(unsafe { simd::amx::Amx::new() });
        }
        None
    }
}

/// Whether products of bf16 have an instruction of their own here, by which they are faster than those of f32. Elsewhere they are
/// made of f32's, with the same bits.
pub fn multiplies_bf16(isa: Isa) -> bool {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => has_bf16(),
        #[cfg(target_arch = "x86_64")]
        Level::Amx => true,
        _ => false,
    }
}

/// Whether the CPU has AVX512-BF16.
#[cfg(target_arch = "x86_64")]
fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// What follows an affine map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// max(0, x), with gradient 0 at 0 as in PyTorch.
    Relu,
    /// x Φ(x) with the normal distribution's Φ, PyTorch's default.
    Gelu,
}

/// The element types that kernels compute in: f32 to train, f64 to check gradients by finite differences.
pub trait Real:
    Copy
    + Default
    + Debug
    + PartialOrd
    + Send
    + Sync
    + 'static
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::AddAssign
    + std::iter::Sum
{
    /// Whether this is f32, the type that has vector kernels.
    const IS_F32: bool;
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// The nearest value.
    fn from_f64(value: f64) -> Self;
    /// The same value.
    fn to_f64(self) -> f64;
    /// The normal distribution's share below it, Φ, and its density there, φ.
    fn normal(self) -> [Self; 2];
    /// 1/(1 + e⁻ˣ); zero below −86, where products with it would be denormals.
    fn sigmoid(self) -> Self;
    /// eˣ.
    fn exponential(self) -> Self;
    /// The free list of [`Buf`]s of this type.
    fn pool() -> &'static buffer::Pool<Self>;
    /// What products of this type are computed by.
    type Kernel<S: simd::Simd>: gemm::Kernel<E = Self>;
    /// That of an instruction set.
    fn kernel<S: simd::Simd>(s: S) -> Self::Kernel<S>;
    /// C = A B and what it is added to; see [`gemm::gemm`]. A method, so that it is compiled once and not in every crate that
    /// multiplies.
    ///
    /// # Safety
    /// The inner sizes are equal, rows of `b`'s columns, `c.1` apart, are valid at `c.0` and overlap nothing else, and the start is of
    /// C's size.
    unsafe fn multiply(
        by: Arithmetic,
        a: gemm::Mat<Self>,
        b: gemm::Mat<Self>,
        c: (*mut Self, usize),
        start: gemm::Start<Self>,
        part: gemm::Part,
    );
}

macro_rules! real {
    ($t:ty, $is_f32:literal, $normal:path, $sigmoid:path, $s:ident => $kernel:ty, $make:expr, $multiply:expr) => {
        impl Real for $t {
            unsafe fn multiply(
                by: Arithmetic,
                a: gemm::Mat<Self>,
                b: gemm::Mat<Self>,
                c: (*mut Self, usize),
                start: gemm::Start<Self>,
                part: gemm::Part,
            ) {
                // SAFETY: the caller's promise.
                unsafe { $multiply(by, a, b, c, start, part) }
            }
            type Kernel<$s: simd::Simd> = $kernel;
            fn kernel<$s: simd::Simd>(s: $s) -> $kernel {
                $make(s)
            }
            const IS_F32: bool = $is_f32;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            fn from_f64(value: f64) -> Self {
                value as $t
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn normal(self) -> [Self; 2] {
                $normal(self)
            }
            #[inline(always)]
            fn sigmoid(self) -> Self {
                $sigmoid(self)
            }
            fn exponential(self) -> Self {
                libm::exp(f64::from(self)) as $t
            }
            fn pool() -> &'static buffer::Pool<Self> {
                static POOL: buffer::Pool<$t> = buffer::Pool::new();
                &POOL
            }
        }
    };
}
real!(f32, true, gelu::normal_f32, gelu::sigmoid_f32, S => S, std::convert::identity, gemm::multiply_f32);
real!(f64, false, gelu::normal_f64, gelu::sigmoid_f64, S => gemm::Doubles<S>, gemm::Doubles, gemm::multiply_f64);

/// The same slice as f32, for `T` = f32.
///
/// # Panics
/// For any other `T`; callers have asked [`Isa::of`].
pub fn as_f32<T: Real>(x: &[T]) -> &[f32] {
    assert!(T::IS_F32);
    // SAFETY: `IS_F32` is true for f32 alone, so this is a slice of f32.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

/// The mutable form of [`as_f32`].
pub fn as_f32_mut<T: Real>(x: &mut [T]) -> &mut [f32] {
    assert!(T::IS_F32);
    // SAFETY: `IS_F32` is true for f32 alone, so this is a slice of f32.
    unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), x.len()) }
}

/// Threads that work at a time, at most.
static MOST: OnceLock<usize> = OnceLock::new();

/// How many of so many threads work: one a core, for on two cores 64 of them that look for work cost more than the work.
/// Tests that compare numbers of threads want them all: unit tests here, what comes after [`oversubscribe`], and a process
/// with the variable `TAPER_OVERSUBSCRIBE`.
pub fn workers(threads: usize) -> usize {
    let most = || match cfg!(test) || std::env::var_os("TAPER_OVERSUBSCRIBE").is_some() {
        true => usize::MAX,
        false => cores(),
    };
    threads.min(*MOST.get_or_init(most))
}

/// The cores there are.
fn cores() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Keeps the other threads of the pool looking for work until some time after the last region: to wake one that sleeps takes
/// tens of microseconds, on a virtual machine more than many a region, and a step of training opens one after another.
fn stay_awake(threads: usize) {
    /// Longer than what lies between two regions of a step.
    const PATIENCE: u64 = 500_000;
    /// Threads that look, or are asked to.
    static WATCHING: AtomicUsize = AtomicUsize::new(0);
    /// When the last region was opened, in nanoseconds since the first.
    static LAST: AtomicU64 = AtomicU64::new(0);
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let now = || FIRST.get_or_init(Instant::now).elapsed().as_nanos() as u64;
    LAST.store(now(), Ordering::Relaxed);
    if WATCHING.load(Ordering::Relaxed) > 0 {
        return;
    }
    WATCHING.fetch_add(threads, Ordering::Relaxed);
    let caller = rayon::current_thread_index();
    rayon::spawn_broadcast(move |context| {
        let mut looks = 0u32;
        while caller != Some(context.index()) && now() < LAST.load(Ordering::Relaxed) + PATIENCE {
            if rayon::yield_now() != Some(rayon::Yield::Executed) {
                looks += 1;
                // Whoever waits for this core has it.
                if looks.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
            }
        }
        WATCHING.fetch_sub(1, Ordering::Relaxed);
    });
}

/// From now on [`workers`] are all threads, if nobody has asked before.
pub fn oversubscribe() {
    MOST.get_or_init(|| usize::MAX);
}

/// Runs `f` on `0..n` in parallel, one index a task: for tasks of unequal or large cost.
pub fn par(n: usize, f: impl Fn(usize) + Sync + Send) {
    par_after(0, |_| (), n, f);
}

/// As [`par`], but first runs `before` on `0..first`, all of it before any of `f`: one region instead of two. Neither may
/// wait for the pool.
pub fn par_after(
    first: usize,
    before: impl Fn(usize) + Sync + Send,
    n: usize,
    f: impl Fn(usize) + Sync + Send,
) {
    /// Counts a task as done, also when it panics: nobody may wait for it for ever.
    struct Done<'a>(&'a AtomicUsize);
    impl Drop for Done<'_> {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::Release);
        }
    }
    let threads = rayon::current_num_threads();
    let workers = workers(threads).min(n.max(first));
    if workers > 1 && threads <= cores() {
        stay_awake(threads);
    }
    let (begun, done, next) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let each = |next: &AtomicUsize, n: usize, f: &dyn Fn(usize)| {
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                task if task < n => f(task),
                _ => return,
            }
        }
    };
    let work = |_| {
        each(&begun, first, &|task| {
            let _done = Done(&done);
            before(task);
        });
        // Only for those that somebody is running.
        let mut looks = 0usize;
        while done.load(Ordering::Acquire) < first {
            looks += 1;
            if looks.is_multiple_of(256) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        each(&next, n, &f);
    };
    (0..workers).into_par_iter().with_max_len(1).for_each(work);
}

/// A pointer that crosses threads. Whoever writes through it promises that tasks write disjoint elements.
#[derive(Debug)]
pub struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}
// SAFETY: a pointer is only an address; the promise above makes the accesses through it sound.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Of a slice that outlives the parallel region.
    pub fn new(slice: &mut [T]) -> Self {
        Self(slice.as_mut_ptr())
    }

    /// Of memory that may not be initialised and outlives the parallel region.
    pub fn at_address(start: *mut T) -> Self {
        Self(start)
    }

    /// The address of element `i`. (A method, so that closures capture the wrapper and not its field.)
    ///
    /// # Safety
    /// `i` lies within the slice.
    #[inline(always)]
    pub unsafe fn at(self, i: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(i) }
    }

    /// The address of element `i`, which need not be there.
    #[inline(always)]
    pub fn address(self, i: usize) -> *const T {
        self.0.wrapping_add(i).cast_const()
    }

    /// Elements `start..start + len`, to be read.
    ///
    /// # Safety
    /// The range lies within the slice, and nobody writes it while the result lives.
    #[inline(always)]
    pub unsafe fn read<'a>(self, start: usize, len: usize) -> &'a [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.add(start), len) }
    }

    /// Elements `start..start + len`, to be written.
    ///
    /// # Safety
    /// The range lies within the slice, and nobody else touches it while the result lives.
    #[inline(always)]
    pub unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Calls `f`, compiled for the vectors of this CPU: `f` is plain Rust that the compiler vectorises, so every
/// instruction set gives the same bits. Mark the closure `#[inline(always)]`, or it is compiled on its own.
#[inline(always)]
pub fn vectorize<R>(isa: Isa, f: impl FnOnce() -> R) -> R {
    with_simd!(isa, s => simd::Simd::run(s, f))
}

/// `a += b`, in parallel.
pub fn add_assign<T: Real>(a: &mut [T], b: &[T]) {
    assert_eq!(a.len(), b.len());
    a.par_chunks_mut(1 << 15).zip(b.par_chunks(1 << 15)).for_each(|(a, b)| {
        for (a, b) in a.iter_mut().zip(b) {
            *a += *b;
        }
    });
}

/// Calls `f` with each element of `a` and its counterpart in `b`, in parallel.
pub fn map_pairs<T: Real>(a: &mut [T], b: &[T], f: impl Fn(&mut T, T) + Sync) {
    assert_eq!(a.len(), b.len());
    a.par_chunks_mut(1 << 15).zip(b.par_chunks(1 << 15)).for_each(|(a, b)| {
        for (a, b) in a.iter_mut().zip(b) {
            f(a, *b);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instruction_set_that_is_none_or_not_there_is_refused() {
        for isa in Isa::available() {
            assert_eq!(Isa::named("--isa", isa.name()), Ok(isa));
        }
        let missing = Level::ALL.iter().filter(|level| !level.is_there()).map(|level| level.name());
        for name in missing.chain(["foo", "", "AVX2"]) {
            let refused = Isa::named("--isa", name).unwrap_err().to_string();
            let known: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            let known = known.join(", ");
            assert_eq!(refused, format!("--isa: expected one that this CPU has ({known}), found `{name}`"));
        }
    }
}
