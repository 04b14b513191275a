//! Every file that is read, damaged at random: an answer or an error, no panic, no huge allocation.
//!
//! `TAPER_FUZZ_SECONDS=120 cargo xtask test fuzz` looks for longer than the second a target that tests take. What was
//! found is kept in `found/<target>/` and tried first.
mod files;
mod mutate;
mod recipes;
mod runs;

use mutate::Draw;
use std::alloc::{GlobalAlloc, Layout, System};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The system's allocator, with the largest request on record.
struct Watched;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// A folder in memory where the system has such a place.
fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// No input here is larger than a few hundred kilobytes; no answer to it needs more than this at once.
const LARGEST_ALLOWED: usize = 64 << 20;

/// Tries `case` on what was found before, then on mutations of `seeds` and on noise, until the time is over.
fn fuzz(target: &str, seeds: &[Vec<u8>], mut case: impl FnMut(&[u8])) {
    let seconds = std::env::var("TAPER_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut one = |input: &[u8], what: &str| {
        LARGEST.store(0, Ordering::Relaxed);
        let result = catch_unwind(AssertUnwindSafe(|| case(input)));
        let largest = LARGEST.load(Ordering::Relaxed);
        if result.is_err() || largest > LARGEST_ALLOWED {
            let path = std::env::temp_dir().join(format!("taper-fuzz-{target}"));
            std::fs::write(&path, input).unwrap();
            panic!(
                "{target}, {what}: panic {}, largest allocation {largest}; input in {}",
                result.is_err(),
                path.display()
            );
        }
    };
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/found").join(target);
    let kept: Vec<PathBuf> =
        std::fs::read_dir(&found).into_iter().flatten().map(|f| f.unwrap().path()).collect();
    kept.iter().for_each(|path| one(&std::fs::read(path).unwrap(), &path.display().to_string()));
    seeds.iter().enumerate().for_each(|(i, seed)| one(seed, &format!("seed {i}")));
    // Another part of the sequence on every long search, the same on every short one.
    let start = if seconds > 10.0 { std::process::id().into() } else { 1 };
    let mut draw = Draw(start);
    let mut cases = 0;
    while Instant::now() < end {
        let input = draw.input(seeds);
        one(&input, &format!("draw {start}, case {cases}"));
        cases += 1;
    }
    println!("{target}: {} kept, {cases} drawn", kept.len());
    assert!(cases > 0);
}
