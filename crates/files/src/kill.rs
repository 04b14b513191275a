//! Points at which the tests end a process as a crash would: where it hurts most.
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ends the process at once, without unwinding, when `TAPER_KILL_AT` names this point: `name` at the first visit,
/// `name:3` at the third.
pub fn kill_point(name: &str) {
    kill_after(name, || ());
}

/// [`kill_point`], with something done halfway before the end.
pub fn kill_after(name: &str, halfway: impl FnOnce()) {
    static WANTED: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static VISITS: AtomicU64 = AtomicU64::new(0);
    let wanted = WANTED.get_or_init(|| {
        let wanted = std::env::var("TAPER_KILL_AT").ok()?;
        let (point, visit) = wanted.split_once(':').unwrap_or((&wanted, "1"));
        Some((point.to_owned(), visit.parse().unwrap_or(1)))
    });
    let Some((point, visit)) = wanted else { return };
    if point == name && VISITS.fetch_add(1, Ordering::Relaxed) + 1 == *visit {
        halfway();
        std::process::abort();
    }
}
