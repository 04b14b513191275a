//! Buffers that are given back and used again: a fresh allocation of megabytes costs a page fault per 4 KB.
use super::Real;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of a cache line, which is also the width of an AVX-512 register.
const ALIGN: usize = 64;

/// Whether memory that nobody has written reads as NaN, so that a kernel which relies on it fails: in all unit tests, and
/// elsewhere after [`poison`].
static POISONED: AtomicBool = AtomicBool::new(cfg!(test));

/// From now on, in this process.
pub fn poison() {
    POISONED.store(true, Ordering::Relaxed);
}

/// Whether [`poison`] was called.
pub fn poisoned() -> bool {
    POISONED.load(Ordering::Relaxed)
}

/// A slice from the pool of its type, aligned to a cache line. Dropping it gives it back.
#[derive(Debug)]
pub struct Buf<T: Real> {
    store: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Real> Buf<T> {
    /// `len` elements of arbitrary value: what the last user left, or NaN ([`poison`]).
    pub fn dirty(len: usize) -> Self {
        let store = T::pool().take(len + ALIGN / size_of::<T>());
        // `align_offset` may only fail in const evaluation, with usize::MAX; then any start is as good.
        let start = store.as_ptr().align_offset(ALIGN).min(store.len() - len);
        let mut buf = Self { store, start, len };
        if poisoned() {
            buf.fill(T::from_f64(f64::NAN));
        }
        buf
    }

    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut buf = Self::dirty(len);
        buf.fill(T::ZERO);
        buf
    }

    /// A copy of `values`.
    pub fn copy_of(values: &[T]) -> Self {
        let mut buf = Self::dirty(values.len());
        buf.copy_from_slice(values);
        buf
    }
}

impl<T: Real> Drop for Buf<T> {
    fn drop(&mut self) {
        T::pool().give(std::mem::take(&mut self.store));
    }
}

impl<T: Real> Deref for Buf<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.store[self.start..self.start + self.len]
    }
}

impl<T: Real> DerefMut for Buf<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.store[self.start..self.start + self.len]
    }
}

/// Buffers nobody uses at the moment.
///
/// A request takes the kept buffer that fits best, up to a quarter larger than it needs. Buffers in use and kept
/// together never exceed the most that was ever in use at once by more than a quarter: when nothing fits, the
/// longest-kept ones are freed until the new one fits below that mark. Training steps ask for the same sizes again
/// and again, so all but the first few allocate nothing.
#[derive(Debug)]
pub struct Pool<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    kept: VecDeque<Vec<T>>,
    kept_len: usize,
    used: usize,
    most_used: usize,
}

/// A quarter more.
fn with_slack(len: usize) -> usize {
    len + len / 4
}

/// Whether a buffer serves a request for `len` elements without much waste.
fn fits(buffer: usize, len: usize) -> bool {
    (len..=with_slack(len)).contains(&buffer)
}

impl<T> State<T> {
    fn take_into_use(&mut self, len: usize) {
        self.used += len;
        self.most_used = self.most_used.max(self.used);
    }
}

impl<T: Real> Pool<T> {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(State { kept: VecDeque::new(), kept_len: 0, used: 0, most_used: 0 }))
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // No call below can panic half-way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, len: usize) -> Vec<T> {
        let mut state = self.lock();
        // Of equal ones the newest: its lines may still be in the cache.
        let fitting = state.kept.iter().enumerate().rev().filter(|(_, b)| fits(b.len(), len));
        if let Some((i, _)) = fitting.min_by_key(|(_, b)| b.len())
            && let Some(found) = state.kept.remove(i)
        {
            state.kept_len -= found.len();
            state.take_into_use(found.len());
            return found;
        }
        state.take_into_use(len);
        while state.used + state.kept_len > with_slack(state.most_used)
            && let Some(oldest) = state.kept.pop_front()
        {
            state.kept_len -= oldest.len();
        }
        drop(state);
        vec![T::ZERO; len]
    }

    fn give(&self, store: Vec<T>) {
        let mut state = self.lock();
        state.used -= store.len();
        state.kept_len += store.len();
        state.kept.push_back(store);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uncleared_memory_reads_as_nan_in_tests() {
        for _ in 0..2 {
            let mut buf = Buf::<f32>::dirty(300);
            assert!(buf.iter().all(|v| v.is_nan()));
            buf.fill(1.0);
        }
    }

    #[test]
    fn buffers_are_aligned() {
        for len in [0, 1, 16, 12_345] {
            let buf = Buf::<f32>::zeros(len);
            assert_eq!((buf.len(), buf.as_ptr().addr() % ALIGN), (len, 0));
            assert!(buf.iter().all(|v| *v == 0.0));
        }
    }

    #[test]
    fn a_buffer_given_back_is_the_next_that_it_fits() {
        let pool = Pool::<f32>::new();
        let (a, b, c) = (pool.take(100), pool.take(120), pool.take(200));
        let (first, second) = (a.as_ptr(), b.as_ptr());
        [a, b, c].into_iter().for_each(|buffer| pool.give(buffer));
        let (small, larger, none) = (pool.take(99), pool.take(99), pool.take(99));
        assert_eq!([small.as_ptr(), larger.as_ptr()], [first, second]);
        assert_eq!(none.len(), 99);
    }

    #[test]
    fn the_same_requests_again_allocate_nothing() {
        let pool = Pool::<f32>::new();
        // Forward: everything is kept. Backward: each is freed after a scratch buffer as large as itself was used.
        let step = || {
            let mut addresses = Vec::new();
            let mut held: Vec<Vec<f32>> = (1..=20).map(|i| pool.take(1000 + 400 * i)).collect();
            while let Some(buffer) = held.pop() {
                let scratch = pool.take(buffer.len() + 7);
                addresses.extend([scratch.as_ptr().addr(), buffer.as_ptr().addr()]);
                pool.give(scratch);
                pool.give(buffer);
            }
            addresses.sort_unstable();
            addresses.dedup();
            addresses
        };
        (0..3).for_each(|_| drop(step()));
        assert_eq!(step(), step());
    }

    #[test]
    fn kept_and_used_stay_near_the_most_used() {
        let pool = Pool::<f64>::new();
        let held: Vec<_> = (1..=4).map(|i| pool.take(1000 * i)).collect();
        held.into_iter().for_each(|b| pool.give(b));
        for len in [10_000, 700, 9_300, 1000, 5000] {
            let b = pool.take(len);
            let state = pool.lock();
            let all = state.used + state.kept_len;
            assert!(all <= with_slack(state.most_used), "{all} {}", state.most_used);
            assert_eq!(state.kept_len, state.kept.iter().map(Vec::len).sum::<usize>());
            drop(state);
            pool.give(b);
        }
    }
}
