//! The progress of a transfer.
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Without a terminal, a transfer says where it is this often.
const EVERY: Duration = Duration::from_secs(5);

/// A bar on a terminal, lines elsewhere.
pub struct Meter {
    what: String,
    bytes: u64,
    bar: ProgressBar,
    lines: bool,
    /// When the transfer started, and what was there already.
    start: Cell<Option<(Instant, u64)>>,
    spoke: Cell<Instant>,
}

impl Meter {
    /// The meter of `bytes` bytes of `what`; silent unless it is to `show`.
    pub fn new(what: String, bytes: u64, show: bool) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let target =
            if show && terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(bytes), target).with_message(what.clone());
        let style =
            ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        // A literal that indicatif accepts; were it wrong, the default style would do.
        let bar = if let Ok(style) = style { bar.with_style(style) } else { bar };
        let (start, spoke) = (Cell::new(None), Cell::new(Instant::now()));
        Self { what, bytes, bar, lines: show && !terminal, start, spoke }
    }

    /// Tells that `have` bytes are there.
    pub fn set(&self, have: u64) {
        self.bar.set_position(have);
        let Some((since, first)) = self.start.get() else {
            self.start.set(Some((Instant::now(), have)));
            // What was there already is not part of the rate.
            self.bar.reset_eta();
            return self.say(&format!("{} of {}", HumanBytes(have), HumanBytes(self.bytes)));
        };
        if self.spoke.get().elapsed() >= EVERY {
            let rate = have.saturating_sub(first) as f64 / since.elapsed().as_secs_f64().max(1e-3);
            let left = self.bytes.saturating_sub(have) as f64 / rate.max(1.0);
            let left = HumanDuration(Duration::from_secs_f64(left.min(1e9)));
            let (have, rate) = (HumanBytes(have), HumanBytes(rate as u64));
            self.say(&format!("{have} of {}, {rate}/s, {left} left", HumanBytes(self.bytes)));
        }
    }

    /// The transfer is complete.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
        self.say(&format!("{} complete", HumanBytes(self.bytes)));
    }

    /// The transfer is given up.
    pub fn abandon(&self) {
        self.bar.abandon();
    }

    fn say(&self, text: &str) {
        self.spoke.set(Instant::now());
        if self.lines {
            eprintln!("{}: {text}", self.what);
        }
    }
}
