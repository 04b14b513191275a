//! What tests of every kernel ask: the same bits for any number of threads.

/// Fails unless `f` gives the same bits with 1, 2, 3, 7 and 64 threads.
pub(crate) fn same_bits(f: impl Fn() -> Vec<f64> + Sync) {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| f().into_iter().map(f64::to_bits).collect::<Vec<_>>())
    };
    let one = on(1);
    assert!(!one.is_empty() && [2, 3, 7, 64].into_iter().all(|threads| on(threads) == one));
}
