//! What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The bar on the terminal, if there is one: lines go above it.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Prints a line on standard error that no bar overwrites. One that cannot be printed, because nobody listens or the disk is
/// full, is no reason to end a training.
pub fn print(text: &str) {
    let line = || drop(writeln!(std::io::stderr(), "{text}"));
    match &*BAR.lock().unwrap_or_else(PoisonError::into_inner) {
        Some(bar) => bar.suspend(line),
        None => line(),
    }
}

/// A figure in as many digits as a reader takes in.
pub(crate) fn short(metric: &str, value: f64) -> String {
    match value.abs() {
        _ if metric == "accuracy" => format!("{:.2} %", 100.0 * value),
        size if size == 0.0 || (1e-3..1e5).contains(&size) => format!("{value:.4}"),
        _ => format!("{value:.3e}"),
    }
}

/// How much to show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Show {
    /// A bar when standard error is a terminal, else lines.
    #[default]
    Auto,
    /// Nothing.
    Quiet,
}

/// The progress of one run.
pub(crate) struct Progress {
    name: String,
    bar: Option<ProgressBar>,
    quiet: bool,
    spoke: Instant,
}

/// Without a terminal, a long epoch says where it is this often.
const EVERY: Duration = Duration::from_secs(30);

impl Progress {
    pub fn new(name: &str, total: u64, done: u64, show: Show) -> Self {
        let quiet = show == Show::Quiet;
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_position(done);
            // A literal that indicatif accepts; were it wrong, the default style would do.
            if let Ok(style) = ProgressStyle::with_template(
                "{prefix} {wide_bar:.cyan/dim} {pos}/{len} steps  {per_sec}  {msg}  {eta} left",
            ) {
                bar.set_style(style);
            }
            bar.set_prefix(name.to_owned());
            bar.reset_eta();
            bar
        });
        *BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar.clone();
        Self { name: name.to_owned(), bar, quiet, spoke: Instant::now() }
    }

    /// After a step.
    pub fn step(&mut self, step: u64, total: u64, message: impl FnOnce() -> String) {
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                // indicatif draws at most 20 times a second; the text need not be made more often.
                if self.spoke.elapsed() > Duration::from_millis(50) {
                    bar.set_message(message());
                    self.spoke = Instant::now();
                }
            }
            None if !self.quiet && self.spoke.elapsed() > EVERY => {
                print(&format!("{}: step {step}/{total}, {}", self.name, message()));
                self.spoke = Instant::now();
            }
            None => {}
        }
    }

    /// A line that stays.
    pub fn line(&mut self, text: &str) {
        if !self.quiet {
            print(&format!("{}: {text}", self.name));
        }
        self.spoke = Instant::now();
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            *BAR.lock().unwrap_or_else(PoisonError::into_inner) = None;
            bar.finish_and_clear();
        }
    }
}
