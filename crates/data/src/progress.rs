//! The progress of reading many files.
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Without a terminal, it is said how far it is this often.
const EVERY: Duration = Duration::from_secs(5);

/// A bar on a terminal, lines elsewhere, nothing for what is quickly done.
pub struct Progress {
    what: &'static str,
    done: u64,
    total: u64,
    bar: ProgressBar,
    lines: bool,
    spoke: Instant,
}

impl Progress {
    /// The progress over `total` of `what`; silent unless it is to `show`.
    pub fn new(what: &'static str, total: u64, show: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if show && terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(total), target).with_message(what);
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {per_sec} {eta}");
        // A literal that indicatif accepts; were it wrong, the default style would do.
        let bar = if let Ok(style) = style { bar.with_style(style) } else { bar };
        Self { what, done: 0, total, bar, lines: show && !terminal, spoke: Instant::now() }
    }

    /// One more is done.
    pub fn one_more(&mut self) {
        self.done += 1;
        self.bar.inc(1);
        if self.lines && self.spoke.elapsed() >= EVERY {
            self.spoke = Instant::now();
            eprintln!("{}: {} of {}", self.what, self.done, self.total);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
