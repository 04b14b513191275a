//! The view in a terminal: a table of the runs, the curves of one of them, and the keys. Drawn with escapes that every terminal knows,
//! so that it works over ssh and in 80 columns by 24 lines.
use super::catalog::State;
use super::machine::Machine;
use super::stop::stop;
use super::view::{Glance, Watcher, digits, duration};
use console::{Key, Term};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;
use taper_figures::plot::{braille, short, visible};

/// How often the screen is drawn without a key.
const EVERY: Duration = Duration::from_millis(1000);

/// What a person has chosen.
#[derive(Clone, Debug, Default)]
struct Choice {
    /// The place of the chosen run in the list.
    row: usize,
    /// Whether curves are on logarithmic axes.
    log: bool,
    /// What the last key did.
    said: String,
}

/// Shows runs in the terminal until a key ends it, or until `end` is set. `follows` names what the view belongs to, if to a training:
/// leaving the view does not end that.
pub fn show(runs: &[PathBuf], end: &Arc<AtomicBool>, follows: bool) -> io::Result<()> {
    let term = Term::stdout();
    if !term.is_term() {
        return Err(io::Error::other(
            "standard output is no terminal: leave --tui out, or watch from a terminal",
        ));
    }
    let ((keys, inbox), (ask, asked)) = (mpsc::channel(), mpsc::channel::<()>());
    let input = term.clone();
    let before = Mode::now();
    // It reads a key whenever it is asked to, and not after the last: reading changes the terminal's mode.
    std::thread::Builder::new().name("keys".into()).spawn(move || {
        while asked.recv().is_ok() {
            if !input.read_key_raw().is_ok_and(|key| keys.send(key).is_ok()) {
                return;
            }
        }
    })?;
    // Whoever reads is there as long as the other end is.
    let _ = ask.send(());
    let mut watcher = Watcher::new(runs);
    let mut choice = Choice::default();
    // Another screen, so that what was there comes back.
    term.write_str("\x1b[?1049h")?;
    term.hide_cursor()?;
    let mut interrupted = false;
    let drawn = (|| -> io::Result<()> {
        while !end.load(Ordering::Relaxed) {
            let (height, width) = term.size();
            let (width, height) = (usize::from(width).max(20), usize::from(height).max(8));
            let glances = watcher.glance(height, choice.row);
            choice.row = choice.row.min(glances.len().saturating_sub(1));
            let lines = screen(&glances, &choice, follows, width, height);
            let text: Vec<String> = lines.iter().map(|line| format!("{line}\x1b[0m\x1b[K")).collect();
            term.write_str(&format!("\x1b[H{}\x1b[J", text.join("\r\n")))?;
            let key = inbox.recv_timeout(EVERY);
            match &key {
                Ok(Key::Char('q') | Key::Escape) => break,
                Ok(Key::Char('\x03') | Key::CtrlC) => {
                    interrupted = true;
                    break;
                }
                Ok(Key::ArrowDown | Key::Char('j')) => {
                    choice.row = (choice.row + 1).min(glances.len().saturating_sub(1))
                }
                Ok(Key::ArrowUp | Key::Char('k')) => choice.row = choice.row.saturating_sub(1),
                Ok(Key::Char('l')) => choice.log = !choice.log,
                Ok(Key::Char('s')) => {
                    choice.said = match glances.get(choice.row).map(|glance| stop(&glance.entry.path)) {
                        Some(Ok(said) | Err(said)) => said,
                        None => String::new(),
                    };
                }
                Ok(_) | Err(RecvTimeoutError::Timeout) => {}
                // Without keys it is still a view.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(EVERY),
            }
            if key.is_ok() {
                let _ = ask.send(());
            }
        }
        Ok(())
    })();
    term.show_cursor()?;
    term.write_str("\x1b[?1049l")?;
    before.restore();
    match follows && !end.load(Ordering::Relaxed) {
        true if interrupted => interrupt_itself(),
        true => eprintln!("training goes on; Ctrl-C stops it with a checkpoint"),
        false => {}
    }
    drawn
}

/// The mode of the terminal, to be given back as it was: a key may still be waited for.
#[cfg(unix)]
struct Mode(Option<libc::termios>);

#[cfg(unix)]
impl Mode {
    fn now() -> Self {
        let mut mode = std::mem::MaybeUninit::<libc::termios>::zeroed();
        // SAFETY: the structure is valid for writing, and is read only where the call has filled it.
        Self(unsafe { (libc::tcgetattr(1, mode.as_mut_ptr()) == 0).then(|| mode.assume_init()) })
    }

    fn restore(&self) {
        if let Some(mode) = &self.0 {
            // SAFETY: the structure was filled by the system; a terminal that is gone is no harm.
            unsafe { libc::tcsetattr(1, libc::TCSANOW, mode) };
        }
    }
}

/// What Ctrl-C would have done had no key been waited for.
#[cfg(unix)]
fn interrupt_itself() {
    // SAFETY: a signal to this process, whose handler asks the training to stop.
    unsafe { libc::kill(libc::getpid(), libc::SIGINT) };
}

#[cfg(not(unix))]
struct Mode;

#[cfg(not(unix))]
impl Mode {
    fn now() -> Self {
        Self
    }

    fn restore(&self) {}
}

#[cfg(not(unix))]
fn interrupt_itself() {}

/// Text in so many columns: cut, or filled up. Names from files have no say over the terminal.
fn fit(text: &str, width: usize) -> String {
    let text = visible(text).replace(['\n', '\t'], " ");
    let length = text.chars().count();
    match length > width {
        true => text.chars().take(width.saturating_sub(1)).chain(['…']).take(width).collect(),
        false => text + &" ".repeat(width - length),
    }
}

/// A run's name in so many columns, cut in the middle: runs of one recipe differ at the end.
fn fit_name(name: &str, width: usize) -> String {
    let (name, tail) = (visible(name), 6.min(width / 2));
    let length = name.chars().count();
    if length <= width || tail == 0 {
        return fit(&name, width);
    }
    name.chars().take(width - tail - 1).chain(['…']).chain(name.chars().skip(length - tail)).collect()
}

/// All lines of the screen, none wider than it.
fn screen(glances: &[Glance], choice: &Choice, follows: bool, width: usize, height: usize) -> Vec<String> {
    let mut out = Vec::new();
    let running = glances.iter().filter(|glance| glance.entry.state == State::Running).count();
    out.push(bold(&fit(
        &format!("{} runs, {running} under way   {}", glances.len(), Machine::now().text()),
        width,
    )));
    // The table takes up to a third, the curves the rest.
    let rows = glances.len().clamp(1, (height / 3).max(3));
    let first = choice.row.saturating_sub(rows - 1);
    let value = 24.min(width / 3);
    let name = width.saturating_sub(value + 9 + 7 + 8 + 12 + 5).max(8);
    let row = |cells: [&str; 6]| {
        let widths = [name, 9, 7, 8, 12, value];
        let cells: Vec<String> = cells.iter().zip(widths).map(|(cell, width)| fit(cell, width)).collect();
        fit(&cells.join(" "), width)
    };
    out.push(dim(&row(["run", "state", "done", "steps/s", "left", "last"])));
    for (place, glance) in glances.iter().enumerate().skip(first).take(rows) {
        let line = row([
            &fit_name(&glance.entry.name, name),
            glance.entry.state.name(),
            &glance
                .share()
                .map_or(format!("{}", glance.step), |share| format!("{:.0} %", (100.0 * share).floor())),
            &glance.rate.map_or("–".into(), digits),
            &glance.left().map_or("–".into(), duration),
            &glance.entry.value,
        ]);
        out.push(if place == choice.row { reversed(&line) } else { line });
    }
    if glances.is_empty() {
        out.push(fit("there is no run yet; it will appear here", width));
    }
    let keys = match follows {
        true => "↑↓ choose  l log axis  s stop (leaves a checkpoint)  q leave, training goes on",
        false => "↑↓ choose  l log axis  s stop the run (leaves a checkpoint)  q quit",
    };
    let left = height.saturating_sub(out.len() + 1);
    if let Some(glance) = glances.get(choice.row) {
        let curves: Vec<(&str, &[(f64, f64)])> =
            glance.curves.iter().map(|(name, points)| (name.as_str(), points.as_slice())).collect();
        let shown = match width >= 120 && curves.len() > 1 {
            true => beside(&curves, choice.log, width, left),
            false => below(&curves, choice.log, width, left),
        };
        out.extend(shown);
    }
    out.truncate(height - 1);
    out.resize(height - 1, String::new());
    out.push(dim(&fit(if choice.said.is_empty() { keys } else { &choice.said }, width)));
    out
}

/// Two curves beside each other.
fn beside(curves: &[(&str, &[(f64, f64)])], log: bool, width: usize, height: usize) -> Vec<String> {
    let half = (width - 2) / 2;
    let (a, b) = (picture(curves[0], log, half, height), picture(curves[1], log, half, height));
    a.into_iter().zip(b).map(|(a, b)| format!("{a}  {b}")).collect()
}

/// Curves below each other, as many as there is room for.
fn below(curves: &[(&str, &[(f64, f64)])], log: bool, width: usize, height: usize) -> Vec<String> {
    let many = (height / 6).clamp(1, curves.len().max(1));
    let each = height / many;
    curves.iter().take(many).flat_map(|curve| picture(*curve, log, width, each)).collect()
}

/// A curve with its name, its least and its largest.
fn picture((name, points): (&str, &[(f64, f64)]), log: bool, width: usize, height: usize) -> Vec<String> {
    const LABEL: usize = 10;
    let scaled = |y: f64| if log { y.ln() } else { y };
    let ys: Vec<f64> = points.iter().map(|(_, y)| scaled(*y)).collect();
    let finite = || ys.iter().copied().filter(|y| y.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), y| (l.min(y), h.max(y)));
    if height < 3 || low > high {
        return vec![fit(&format!("{name}: nothing to draw yet"), width); height.min(1)]
            .into_iter()
            .chain(std::iter::repeat_n(" ".repeat(width), height.saturating_sub(1)))
            .collect();
    }
    // A flat line stands in the middle.
    let (bottom, top) = if high > low { (low, high) } else { (low - 1.0, high + 1.0) };
    let rows = braille(&ys, (bottom, top), width.saturating_sub(LABEL + 1), height - 2);
    let back = |y: f64| short(if log { y.exp() } else { y });
    let last = points.last().map_or(String::new(), |(x, y)| format!("{} at {}", short(*y), short(*x)));
    let mut out = vec![bold(&fit(&format!("{name}{}   {last}", if log { ", log axis" } else { "" }), width))];
    let count = rows.len();
    for (i, row) in rows.into_iter().enumerate() {
        let label = match i {
            0 => back(high),
            i if i + 1 == count => back(low),
            _ => String::new(),
        };
        out.push(format!("{:>LABEL$} {row}", fit(&label, LABEL).trim_end()));
    }
    let ends = points.first().zip(points.last()).map_or(String::new(), |((a, _), (b, _))| {
        let (a, b) = (short(*a), short(*b));
        let room = width.saturating_sub(LABEL + 1 + a.chars().count() + b.chars().count());
        format!("{}{a}{}{b}", " ".repeat(LABEL + 1), " ".repeat(room))
    });
    out.push(dim(&fit(&ends, width)));
    out
}

fn bold(text: &str) -> String {
    format!("\x1b[1m{text}\x1b[0m")
}

fn dim(text: &str) -> String {
    format!("\x1b[2m{text}\x1b[0m")
}

fn reversed(text: &str) -> String {
    format!("\x1b[7m{text}\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Catalog;

    /// What a terminal would show of a line.
    fn columns(line: &str) -> usize {
        console::measure_text_width(line)
    }

    #[test]
    fn runs_of_one_recipe_are_told_apart() {
        assert_eq!(fit_name("mnist-mlp-decgd-336ad52e6150", 15), "mnist-ml…2e6150");
        assert_eq!(fit_name("mnist", 7), "mnist  ");
        assert_eq!([0, 1, 2, 3].map(|width| fit_name("mnist", width)), ["", "…", "…t", "m…t"]);
    }

    #[test]
    fn the_screen_fits_whatever_there_is() {
        let folder = tempfile::tempdir().unwrap();
        for (name, metrics) in [
            (
                "a-000000000001",
                "{\"step\":1,\"epoch\":1,\"split\":\"train\",\"loss\":1.0,\"grad_norm\":1.0}\n",
            ),
            ("a-very-long-name-with-\u{1b}[31mescapes-and-more-than-forty-letters-000000000002", ""),
        ] {
            let run = folder.path().join(name);
            std::fs::create_dir(&run).unwrap();
            std::fs::write(run.join("recipe.yaml"), "no: recipe\n").unwrap();
            std::fs::write(run.join("metrics.jsonl"), metrics).unwrap();
        }
        let mut catalog = Catalog::new(&[folder.path().to_path_buf()]);
        catalog.refresh();
        let curve = |n: u32| (0..n).map(|i| (f64::from(i), f64::from(i).sin().abs())).collect::<Vec<_>>();
        let mut glances: Vec<Glance> = catalog.entries().map(|entry| Glance::bare(entry.clone())).collect();
        for curves in [vec![], vec![("loss".to_owned(), curve(1)), ("accuracy".to_owned(), curve(5000))]] {
            glances.iter_mut().for_each(|glance| glance.curves = curves.clone());
            for (width, height) in [(20, 8), (80, 24), (200, 50), (400, 9)] {
                for (log, row, follows) in [(false, 0, true), (true, 1, false)] {
                    let choice = Choice { row, log, said: String::new() };
                    let lines = screen(&glances, &choice, follows, width, height);
                    assert_eq!(lines.len(), height);
                    for line in &lines {
                        assert!(columns(line) <= width, "{} columns of {width}: {line:?}", columns(line));
                        assert!(!line.contains("\u{1b}[31m"), "{line:?}");
                    }
                }
            }
        }
        assert_eq!(screen(&[], &Choice::default(), false, 80, 24).len(), 24);
    }
}
