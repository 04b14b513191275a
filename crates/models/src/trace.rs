//! Spans around the work of ops, for a profiler to watch.
//!
//! While nobody watches, a span costs a load and a branch, and what it would say is not even put together.

use std::cell::Cell;

/// The target of all spans of ops: what a subscriber filters by.
pub const TARGET: &str = "taper::op";

#[doc(hidden)]
pub use tracing;

/// What a forward pass on this thread came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// Operations by the plain count.
    pub flops: u64,
    /// Bytes of activations that stay for a backward pass.
    pub kept: u64,
}

thread_local! {
    /// What is being counted on this thread, if anything.
    static TALLY: Cell<Option<Tally>> = const { Cell::new(None) };
}

/// What `f` returns and what the ops in it came to, which may not end in a backward pass.
pub(crate) fn tally<R>(f: impl FnOnce() -> R) -> (R, Tally) {
    /// Ends the count also when `f` panics.
    struct Stop(Option<Tally>);
    impl Drop for Stop {
        fn drop(&mut self) {
            TALLY.set(self.0);
        }
    }
    let stop = Stop(TALLY.replace(Some(Tally::default())));
    let result = f();
    let found = TALLY.get().unwrap_or_default();
    drop(stop);
    (result, found)
}

/// An op of so many operations begins.
#[doc(hidden)]
pub fn count(pass: &str, flops: u64) {
    if let Some(tally) = TALLY.get().filter(|_| pass == "forward") {
        TALLY.set(Some(Tally { flops: tally.flops.saturating_add(flops), ..tally }));
    }
}

/// An activation of so many bytes stays.
pub(crate) fn keep(bytes: usize) {
    if let Some(tally) = TALLY.get() {
        TALLY.set(Some(Tally { kept: tally.kept.saturating_add(bytes as u64), ..tally }));
    }
}

/// Enters a span: the op's name, `"forward"`, `"backward"` or `"update"`, its operations by the plain count, and what
/// tells this op from others of its name, as for `format!`. It ends with the scope of its guard.
///
/// ```
/// let _span = taper_models::op_span!("linear", "forward", 2 * 3 * 4 * 5, "{}x{}", 3, 4);
/// ```
#[macro_export]
macro_rules! op_span {
    ($op:expr, $pass:expr, $flops:expr) => {
        $crate::op_span!($op, $pass, $flops, "")
    };
    ($op:expr, $pass:expr, $flops:expr, $($shape:tt)+) => {
        {
            let flops = $flops as u64;
            $crate::trace::count($pass, flops);
            $crate::trace::tracing::trace_span!(
                target: $crate::trace::TARGET,
                "op",
                op = $op,
                pass = $pass,
                flops,
                shape = %format_args!($($shape)+),
            )
            .entered()
        }
    };
}
