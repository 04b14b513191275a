//! What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere.
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The bar on the terminal, if there is one: lines go above it.
static BAR_SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Prints a line on standard error that no bar overwrites. One that cannot be printed, because nobody listens or the disk is
/// full, is no reason to end a training.
pub fn print(text: &str) {
    let line = || drop(writeln!(std::io::stderr(), "{text}"));
    match &*BAR_SHOWN.lock().unwrap_or_else(PoisonError::into_inner) {
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
    /// Lines, as for a log, also on a terminal.
    Plain,
    /// Nothing.
    Quiet,
}

impl Show {
    /// Whether there are bars to be drawn.
    pub(crate) fn draws(self) -> bool {
        self == Self::Auto && std::io::stderr().is_terminal()
    }
}

/// What is left to do, by what was done since it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    since: Instant,
    first: u64,
}

impl Clock {
    /// Begins now, after `first` steps.
    pub fn new(first: u64) -> Self {
        Self { since: Instant::now(), first }
    }

    /// Steps a second, once a second has passed.
    pub fn rate(&self, step: u64) -> Option<f64> {
        Self::rate_of(step.saturating_sub(self.first), self.since.elapsed())
    }

    fn rate_of(steps: u64, elapsed: Duration) -> Option<f64> {
        (steps > 0 && elapsed >= Duration::from_secs(1)).then(|| steps as f64 / elapsed.as_secs_f64())
    }
}

/// A rate in as many digits as a reader takes in.
fn rate_text(rate: f64, of: &str) -> String {
    match rate {
        rate if rate >= 100.0 => format!("{rate:.0}{of}/s"),
        rate if rate >= 10.0 => format!("{rate:.1}{of}/s"),
        rate if rate >= 0.1 => format!("{rate:.2}{of}/s"),
        rate => format!("{:.1} s{}", 1.0 / rate, if of.is_empty() { " each" } else { " a step" }),
    }
}

/// The time that is left; a dash while it is not known.
pub(crate) fn left_text(left: Option<f64>) -> String {
    match left {
        None => "– left".to_owned(),
        Some(s) if s < 59.5 => format!("{s:.0} s left"),
        Some(s) if s < 3600.0 => format!("{}:{:02} min left", s as u64 / 60, s as u64 % 60),
        Some(s) if s < 360_000.0 => format!("{}:{:02} h left", s as u64 / 3600, s as u64 / 60 % 60),
        Some(s) => format!("{:.0} days left", s / 86_400.0),
    }
}

/// What a line of progress says.
pub(crate) struct Now {
    pub epoch: u64,
    pub epochs: u64,
    pub loss: f64,
    pub lr: f64,
    /// The last evaluation: its split, the metric and its value.
    pub measured: Option<(&'static str, &'static str, f64)>,
}

/// The columns of the terminal.
pub(crate) fn columns() -> usize {
    usize::from(console::Term::stderr().size().1).max(20)
}

/// A name cut to so many columns, its end kept: that is what tells runs apart.
pub(crate) fn cut(name: &str, most: usize) -> String {
    let length = name.chars().count();
    match length > most {
        true => std::iter::once('…').chain(name.chars().skip(length + 1 - most.max(1))).collect(),
        false => name.to_owned(),
    }
}

/// As many of the parts as fit into `room` columns, in their order; those that come last in `least` go first.
pub(crate) fn fitted(parts: &[String], least: &[usize], room: usize) -> String {
    let mut kept: Vec<usize> = (0..parts.len()).filter(|i| !parts[*i].is_empty()).collect();
    let text = |kept: &[usize]| kept.iter().map(|i| parts[*i].as_str()).collect::<Vec<_>>().join("  ");
    for drop in least.iter().rev() {
        if text(&kept).chars().count() <= room {
            break;
        }
        kept.retain(|i| i != drop);
    }
    text(&kept).chars().take(room).collect()
}

/// A bar has at least so many columns.
const BAR: usize = 8;

impl Now {
    /// What stands after the bar, in `room` columns.
    fn after_bar(&self, step: u64, total: u64, clock: &Clock, room: usize) -> String {
        let rate = clock.rate(step);
        let left = rate.map(|rate| total.saturating_sub(step) as f64 / rate);
        let measured = self.measured.map(|(split, metric, value)| match metric {
            "accuracy" => format!("{split} {}", short(metric, value)),
            "perplexity" => format!("{split} ppl {}", short(metric, value)),
            "bits_per_char" | "bits_per_byte" => format!("{split} bits {}", short(metric, value)),
            metric => format!("{split} {metric} {}", short(metric, value)),
        });
        let parts = [
            format!("{} %", step.saturating_mul(100) / total.max(1)),
            format!("epoch {}/{}", self.epoch, self.epochs),
            format!("loss {}", short("loss", self.loss)),
            measured.unwrap_or_default(),
            rate.map_or("– /s".to_owned(), |rate| rate_text(rate, "")),
            left_text(left),
        ];
        fitted(&parts, &[2, 0, 3, 5, 4, 1], room)
    }

    /// The same as a line of a log.
    fn line(&self, step: u64, total: u64, clock: &Clock) -> String {
        let rate = clock.rate(step);
        let left = rate.map(|rate| total.saturating_sub(step) as f64 / rate);
        let measured =
            self.measured.map(|(split, metric, value)| format!("{split} {metric} {}", short(metric, value)));
        let parts = [
            format!("step {step}/{total}"),
            format!("epoch {}/{}", self.epoch, self.epochs),
            format!("loss {}", short("loss", self.loss)),
            format!("lr {:.3e}", self.lr),
            measured.unwrap_or_default(),
            rate.map(|rate| rate_text(rate, " steps")).unwrap_or_default(),
            left_text(left),
        ];
        parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("  ")
    }
}

/// The progress of one run.
pub(crate) struct Progress {
    name: String,
    bar: Option<ProgressBar>,
    quiet: bool,
    clock: Clock,
    /// Whether a step was seen: the clock begins with the first, not with what comes before it.
    begun: bool,
    spoke: Instant,
}

/// Without a terminal, a long epoch says where it is this often.
const EVERY: Duration = Duration::from_secs(30);

impl Progress {
    pub fn new(name: &str, total: u64, done: u64, show: Show) -> Self {
        let quiet = show == Show::Quiet;
        let bar = show.draws().then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_position(done);
            // A literal that indicatif accepts; were it wrong, the default style would do.
            if let Ok(style) = ProgressStyle::with_template("{prefix} {wide_bar:.cyan/dim} {msg}") {
                bar.set_style(style);
            }
            bar
        });
        *BAR_SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = bar.clone();
        let (name, clock, spoke) = (name.to_owned(), Clock::new(done), Instant::now());
        Self { name, bar, quiet, clock, begun: false, spoke }
    }

    /// After a step.
    pub fn step(&mut self, step: u64, total: u64, now: impl FnOnce() -> Now) {
        let first = !std::mem::replace(&mut self.begun, true);
        if first {
            self.clock = Clock::new(step);
        }
        match &self.bar {
            Some(bar) => {
                bar.set_position(step);
                // indicatif draws at most 20 times a second; the text need not be made more often.
                if first || self.spoke.elapsed() > Duration::from_millis(50) {
                    let columns = columns();
                    let name = cut(&self.name, columns / 5);
                    let room = columns.saturating_sub(name.chars().count() + 2 + BAR);
                    bar.set_message(now().after_bar(step, total, &self.clock, room));
                    bar.set_prefix(name);
                    self.spoke = Instant::now();
                }
            }
            None if !self.quiet && self.spoke.elapsed() > EVERY => {
                print(&format!("{}: {}", self.name, now().line(step, total, &self.clock)));
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
            *BAR_SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = None;
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(epochs: u64, loss: f64, measured: Option<(&'static str, &'static str, f64)>) -> Now {
        Now { epoch: epochs, epochs, loss, lr: 0.1, measured }
    }

    /// A clock that began so long ago, before the first step.
    fn since(seconds: u64) -> Clock {
        let now = Instant::now();
        Clock { since: now.checked_sub(Duration::from_secs(seconds)).unwrap_or(now), first: 0 }
    }

    #[test]
    fn a_line_fits_whatever_it_has_to_say() {
        let losses = [0.0, 1e-30, 0.123_456, 12.5, -8e12, f64::NAN, f64::INFINITY];
        let measured = [
            None,
            Some(("test", "accuracy", 1.0)),
            Some(("val", "perplexity", 1e300)),
            Some(("test", "loss", f64::NAN)),
        ];
        for (loss, measured) in losses.iter().flat_map(|loss| measured.map(|m| (*loss, m))) {
            for (step, total) in
                [(0, 0), (1, 1), (7, 100), (99_999_999, 100_000_000), (u64::MAX / 200, u64::MAX)]
            {
                for (room, seconds) in [(0, 0), (10, 3), (50, 100), (70, 1_000_000)] {
                    let text = now(100_000, loss, measured).after_bar(step, total, &since(seconds), room);
                    assert!(text.chars().count() <= room, "{text:?} in {room}");
                }
            }
        }
        // In 80 columns, with a name of 16 and a bar of 8, all that matters is there.
        let text =
            now(90, 0.1234, Some(("test", "accuracy", 0.9766))).after_bar(500, 1000, &since(100), 80 - 26);
        assert_eq!(text, "50 %  loss 0.1234  test 97.66 %  5.00/s  1:40 min left");
    }

    #[test]
    fn what_is_not_known_is_a_dash_and_not_nothing() {
        assert_eq!(
            now(1, 1.0, None).after_bar(1, 1000, &Clock::new(1), 60),
            "0 %  epoch 1/1  loss 1.0000  – /s  – left"
        );
        assert_eq!(Clock::rate_of(0, Duration::from_secs(9)), None);
        assert_eq!(Clock::rate_of(9, Duration::from_millis(999)), None);
        assert_eq!(Clock::rate_of(9, Duration::from_secs(3)), Some(3.0));
    }

    #[test]
    fn rates_times_and_names_are_as_short_as_they_can_be() {
        let rates = [1234.5, 12.34, 1.234, 0.01].map(|rate| rate_text(rate, ""));
        assert_eq!(rates, ["1234/s", "12.3/s", "1.23/s", "100.0 s each"]);
        let left = [Some(0.4), Some(59.4), Some(61.0), Some(7200.0), Some(1e7), None].map(left_text);
        assert_eq!(
            left,
            ["0 s left", "59 s left", "1:01 min left", "2:00 h left", "116 days left", "– left"]
        );
        assert_eq!(cut("mnist-mlp-decgd", 8), "…p-decgd");
        assert_eq!(cut("short", 8), "short");
    }
}
