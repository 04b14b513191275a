//! Work under a lock, shared with whoever of rayon's pool is free.
//!
//! A thread that holds the lock of a variable and waits for the pool can wait for ever: the pool's threads may be
//! readers that wait for that lock, and a thread that waits in the pool may be handed such a reader's work. So the
//! holder never waits for the pool. It offers pieces of its work, takes pieces itself until none is left, and then waits only
//! for those that somebody is computing, which takes microseconds and no lock. Helpers that come late find nothing.
use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How often a helper looks for the next offer before it goes: some ten microseconds, longer than the way from one parameter
/// to the next.
const PATIENCE: usize = 1000;

/// The calling thread and, for work that is worth it, helpers from rayon's pool.
pub(crate) struct Team(Option<Arc<Board>>);

/// What helpers see.
struct Board {
    offer: Mutex<Option<Offer>>,
    /// Whether there is one, to look at without the lock.
    open: AtomicBool,
    /// Pieces that helpers are computing.
    running: AtomicUsize,
    /// Helpers that were asked for and have not gone.
    helpers: AtomicUsize,
    over: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    threads: usize,
}

#[derive(Clone, Copy)]
struct Work(*const (dyn Fn(Range<usize>) + Sync));

// SAFETY: what it points to is `Sync`, and called only while `Team::run` keeps it alive: see there.
unsafe impl Send for Work {}

struct Offer {
    work: Work,
    next: usize,
    len: usize,
    /// The fewest and the most of a piece.
    piece: (usize, usize),
}

impl Team {
    /// For work that is `shared` or is not worth it.
    pub fn new(shared: bool) -> Self {
        let threads = if shared { taper_kernels::workers(rayon::current_num_threads()) } else { 1 };
        let board = || Board {
            offer: Mutex::new(None),
            open: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            helpers: AtomicUsize::new(0),
            over: AtomicBool::new(false),
            panic: Mutex::new(None),
            threads,
        };
        Self((threads > 1).then(|| Arc::new(board())))
    }

    /// Calls `work` with pieces that make up 0..len, at least `piece.0` and at most `piece.1` long, here and on free threads.
    pub fn run(&self, len: usize, piece: (usize, usize), work: &(dyn Fn(Range<usize>) + Sync)) {
        /// Takes the offer back and waits for the pieces under way, also when a piece of our own panics.
        struct Withdraw<'a>(&'a Board);
        impl Drop for Withdraw<'_> {
            fn drop(&mut self) {
                self.0.open.store(false, Ordering::Relaxed);
                *lock(&self.0.offer) = None;
                let mut looks = 0usize;
                while self.0.running.load(Ordering::Acquire) > 0 {
                    looks += 1;
                    // A helper whose thread the system has put aside needs the core more than we do.
                    if looks.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
                }
            }
        }
        let Some(board) = self.0.as_ref().filter(|_| len > piece.0) else { return work(0..len) };
        // SAFETY: only the lifetime changes. A helper calls it between a claim, which raises `running` under the lock of the
        // offer, and the moment it lowers `running`; `Withdraw` ends the offer and then waits for `running` to be 0, before
        // this function returns or unwinds and `work` can end.
        let erased = Work(unsafe {
            std::mem::transmute::<&(dyn Fn(Range<usize>) + Sync), &'static (dyn Fn(Range<usize>) + Sync)>(
                work,
            )
        });
        *lock(&board.offer) = Some(Offer { work: erased, next: 0, len, piece });
        let withdraw = Withdraw(board);
        board.open.store(true, Ordering::Relaxed);
        Board::call(board, len.div_ceil(piece.0) - 1);
        while let Some((_, range)) = board.claim(false) {
            work(range);
        }
        drop(withdraw);
        if let Some(panic) = lock(&board.panic).take() {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if let Some(board) = &self.0 {
            board.over.store(true, Ordering::Relaxed);
        }
    }
}

impl Board {
    /// Asks the pool for helpers, up to a thread less than it has.
    fn call(board: &Arc<Self>, wanted: usize) {
        let wanted = wanted.min(board.threads - 1);
        while board.helpers.load(Ordering::Relaxed) < wanted {
            board.helpers.fetch_add(1, Ordering::Relaxed);
            let board = board.clone();
            rayon::spawn(move || {
                board.help();
                board.helpers.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    /// The next piece: large at first, so that claims are few, small in the end, so that all finish together.
    fn claim(&self, helper: bool) -> Option<(Work, Range<usize>)> {
        let mut offer = lock(&self.offer);
        let offer = offer.as_mut().filter(|offer| offer.next < offer.len)?;
        let left = offer.len - offer.next;
        let (least, most) = offer.piece;
        // Whole multiples, so that pieces begin where vectors do.
        let size = (left / (2 * self.threads) / least * least).clamp(least, most).min(left);
        let range = offer.next..offer.next + size;
        offer.next += size;
        if offer.next == offer.len {
            self.open.store(false, Ordering::Relaxed);
        }
        if helper {
            self.running.fetch_add(1, Ordering::Relaxed);
        }
        Some((offer.work, range))
    }

    fn help(&self) {
        let mut patience = PATIENCE;
        while patience > 0 && !self.over.load(Ordering::Relaxed) {
            let claimed = if self.open.load(Ordering::Relaxed) { self.claim(true) } else { None };
            let Some((work, range)) = claimed else {
                patience -= 1;
                std::hint::spin_loop();
                continue;
            };
            // SAFETY: between `claim(true)` and `fetch_sub` the work is alive: see `Team::run`.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*work.0)(range) }));
            if let Err(panic) = result {
                *lock(&self.panic) = Some(panic);
            }
            self.running.fetch_sub(1, Ordering::Release);
            patience = PATIENCE;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A slice of which pieces of work take parts that do not overlap.
pub(crate) struct Parts<T> {
    at: *mut T,
    len: usize,
}

// SAFETY: a part is lent to one thread at a time, as `Parts::part` demands.
unsafe impl<T: Send> Sync for Parts<T> {}

impl<T> Parts<T> {
    pub fn new(slice: &mut [T]) -> Self {
        Self { at: slice.as_mut_ptr(), len: slice.len() }
    }

    /// # Safety
    /// The slice is borrowed for as long as parts are used, and parts in use do not overlap.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_worked_on_once() {
        for (len, piece) in [(0, (1, 1)), (1, (1, 4)), (100_000, (64, 4096)), (5000, (4096, 32768))] {
            let mut counts = vec![0u32; len];
            let parts = Parts::new(&mut counts);
            // SAFETY: ranges of one run do not overlap, and `counts` outlives it.
            let work = |range| unsafe { parts.part(range) }.iter_mut().for_each(|count| *count += 1);
            let team = Team::new(true);
            (0..50).for_each(|_| team.run(len, piece, &work));
            assert!(counts.iter().all(|count| *count == 50));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_nobody_hangs() {
        for at in [0, 99_999] {
            let work = |range: Range<usize>| assert!(!range.contains(&at), "here");
            let result = catch_unwind(AssertUnwindSafe(|| Team::new(true).run(100_000, (16, 64), &work)));
            assert!(result.is_err());
        }
    }
}
