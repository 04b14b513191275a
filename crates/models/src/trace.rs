//! Spans around the work of ops, for a profiler to watch.
//!
//! While nobody watches, a span costs a load and a branch, and what it would say is not even put together.

/// The target of all spans of ops: what a subscriber filters by.
pub const TARGET: &str = "taper::op";

#[doc(hidden)]
pub use tracing;

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
        $crate::trace::tracing::trace_span!(
            target: $crate::trace::TARGET,
            "op",
            op = $op,
            pass = $pass,
            flops = $flops as u64,
            shape = %format_args!($($shape)+),
        )
        .entered()
    };
}
