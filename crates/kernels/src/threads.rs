//! What tests of every kernel ask: the same bits for any number of threads.
use std::sync::atomic::{AtomicUsize, Ordering};

/// Fails unless `f` gives the same bits with 1, 2, 3, 7 and 64 threads.
pub(crate) fn same_bits(f: impl Fn() -> Vec<f64> + Sync) {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| f().into_iter().map(f64::to_bits).collect::<Vec<_>>())
    };
    let one = on(1);
    assert!(!one.is_empty() && [2, 3, 7, 64].into_iter().all(|threads| on(threads) == one));
}

#[test]
fn nothing_begins_before_what_comes_first_is_done() {
    for threads in [1, 2, 3, 7, 64] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (done, ran) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let first = |_| {
            done.fetch_add(1, Ordering::Relaxed);
        };
        let then = |_| {
            assert_eq!(done.load(Ordering::Relaxed), 100);
            ran.fetch_add(1, Ordering::Relaxed);
        };
        pool.install(|| crate::par_after(100, first, 50, then));
        assert_eq!(ran.into_inner(), 50);
    }
}

#[test]
fn a_panic_of_what_comes_first_reaches_the_caller() {
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let work = || pool.install(|| crate::par_after(10, |i| assert_ne!(i, 3, "here"), 5, |_| ()));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err());
    }
}
