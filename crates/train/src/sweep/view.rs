//! What the user sees of a sweep: on a terminal a bar a running job and the grid as it fills, else a line a run.
use super::{Run, State, Sweep};
use crate::run::progress::{Clock, columns, cut, fitted, left_text, short};
use crate::run::{Show, Status, Tick};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::collections::{BTreeMap, HashMap};
use taper_figures::table::{amount, unit};

/// More rows than this leave no room for the bars; the others are counted.
const ROWS: usize = 16;

pub(super) struct View {
    quiet: bool,
    total: usize,
    done: usize,
    screen: Option<Screen>,
}

/// Bars and grid on a terminal.
struct Screen {
    all: MultiProgress,
    /// The bar of every run under way, with its time since the first step.
    jobs: BTreeMap<usize, (ProgressBar, Option<Clock>)>,
    overall: ProgressBar,
    /// Runs since this sweep began.
    clock: Clock,
    /// The row of each run, its place in the row, and the rows' bars.
    place: Vec<(usize, usize)>,
    rows: Vec<(ProgressBar, String, Vec<String>)>,
}

impl View {
    pub fn new(sweep: &Sweep) -> Self {
        let quiet = sweep.options.show == Show::Quiet;
        let total = sweep.runs.len();
        let done = total - sweep.missing().count();
        let screen = sweep.options.show.draws().then(|| Screen::new(sweep, done));
        let view = Self { quiet, total, done, screen };
        if done > 0 {
            view.line(&format!("{done} of {total} runs were done before"));
        }
        view
    }

    pub fn started(&mut self, run: &Run, index: usize) {
        let label = run.label();
        match &mut self.screen {
            Some(screen) => screen.started(&label, index),
            None => self.line(&format!("{label}: started")),
        }
    }

    pub fn tick(&mut self, index: usize, tick: Tick) {
        let Some((bar, clock)) = self.screen.as_mut().and_then(|screen| screen.jobs.get_mut(&index)) else {
            return;
        };
        // Its time starts with its first step, not with its process.
        let clock = clock.get_or_insert_with(|| {
            bar.set_style(style("{prefix} {wide_bar:.cyan/dim} {msg}"));
            Clock::new(tick.step)
        });
        let left = clock.rate(tick.step).map(|rate| tick.steps.saturating_sub(tick.step) as f64 / rate);
        let parts = [
            format!("{} %", tick.step.saturating_mul(100) / tick.steps.max(1)),
            format!("epoch {}/{}", tick.epoch, tick.epochs),
            format!("loss {}", short("loss", tick.loss)),
            left_text(left),
        ];
        bar.set_length(tick.steps);
        bar.set_position(tick.step);
        bar.set_message(fitted(&parts, &[0, 2, 3, 1], columns() / 2));
    }

    /// A run that was started belongs to another process.
    pub fn put_off(&mut self, run: &Run, index: usize) {
        match &mut self.screen {
            Some(screen) => screen.ended(run, index),
            None => self.line(&format!("{}: another process is at work on it: later", run.label())),
        }
    }

    /// A run has ended, with what its state says.
    pub fn ended(&mut self, sweep: &Sweep, index: usize) {
        let run = &sweep.runs[index];
        self.done += usize::from(run.state != State::Missing);
        if let Some(screen) = &mut self.screen {
            screen.ended(run, index);
            screen.done(self.done as u64, self.total as u64);
        }
        let (done, total, label) = (self.done, self.total, run.label());
        match &run.state {
            State::Missing => self.line(&format!("{label}: stopped; the same command goes on from there")),
            State::Failed(message) => {
                // The whole of it follows at the end.
                let first = message.lines().next().unwrap_or_default();
                self.line(&format!("[{done}/{total}] {label}: failed: {first}"));
            }
            State::Done(_) if self.screen.is_some() => {}
            State::Done(_) => self.line(&format!("[{done}/{total}] {label}: {}", outcome(run))),
        }
    }

    /// A line that stays.
    pub fn line(&self, text: &str) {
        match &self.screen {
            Some(screen) => {
                // A terminal that went away has nobody to tell.
                let _ = screen.all.println(text);
            }
            None if self.quiet => {}
            None => crate::run::print(text),
        }
    }

    pub fn finish(&self) {
        if let Some(screen) = &self.screen {
            let _ = screen.all.clear();
        }
    }
}

impl Screen {
    fn new(sweep: &Sweep, done: usize) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let mut labels: HashMap<String, usize> = HashMap::new();
        let mut rows: Vec<(String, Vec<String>)> = Vec::new();
        let mut place = Vec::new();
        for run in &sweep.runs {
            let label = row_label(run);
            let row = *labels.entry(run.recipe.configuration()).or_insert(rows.len());
            if row == rows.len() {
                rows.push((label, Vec::new()));
            }
            place.push((row, rows[row].1.len()));
            rows[row].1.push(mark(run));
        }
        let width = rows.iter().map(|(label, _)| label.chars().count()).max().unwrap_or(0).min(columns() / 2);
        let hidden = rows.len().saturating_sub(ROWS);
        let bar = |(label, marks): (String, Vec<String>)| {
            let bar = all.add(ProgressBar::new(0).with_style(style("{prefix}{msg}")));
            bar.set_prefix(format!("{:width$}", cut(&label, width)));
            bar.set_message(joined(&marks, columns().saturating_sub(width)));
            (bar, label, marks)
        };
        let rows = rows.into_iter().take(ROWS).map(bar).collect();
        if hidden > 0 {
            let more = all.add(ProgressBar::new(0).with_style(style("{msg}")));
            more.set_message(format!("… and {hidden} more configurations"));
        }
        let total = sweep.runs.len() as u64;
        let overall =
            ProgressBar::new(total).with_style(style("{wide_bar:.cyan/dim} {pos}/{len} runs  {msg}"));
        let overall = all.add(overall.with_position(done as u64));
        overall.set_message(left_text(None));
        Self { all, jobs: BTreeMap::new(), overall, clock: Clock::new(done as u64), place, rows }
    }

    fn done(&self, done: u64, total: u64) {
        let left = self.clock.rate(done).map(|rate| total.saturating_sub(done) as f64 / rate);
        self.overall.set_message(left_text(left));
        self.overall.set_position(done);
    }

    fn started(&mut self, label: &str, index: usize) {
        let bar = ProgressBar::new(0).with_style(style("{prefix} starting"));
        let bar = self.all.insert_before(&self.overall, bar);
        bar.set_prefix(cut(label, columns() / 3));
        bar.tick();
        self.jobs.insert(index, (bar, None));
        self.set(index, "▸".to_owned());
    }

    fn ended(&mut self, run: &Run, index: usize) {
        if let Some((bar, _)) = self.jobs.remove(&index) {
            bar.finish_and_clear();
            self.all.remove(&bar);
        }
        self.set(index, mark(run));
    }

    fn set(&mut self, index: usize, mark: String) {
        let (row, column) = self.place[index];
        if let Some((bar, _, marks)) = self.rows.get_mut(row) {
            marks[column] = mark;
            bar.set_message(joined(marks, columns().saturating_sub(bar.prefix().chars().count())));
        }
    }
}

/// A literal that indicatif accepts; were one wrong, the default style would do.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A row of the grid, as far as it fits; the last place then says that there are more.
fn joined(marks: &[String], room: usize) -> String {
    let most = (room / PLACE).max(1);
    let row = |marks: &[String]| marks.iter().map(|mark| format!("{mark:>PLACE$}")).collect::<String>();
    match marks.len() > most {
        true => row(&marks[..most - 1]) + &format!("{:>PLACE$}", "…"),
        false => row(marks),
    }
}

/// The columns of a place in the grid.
const PLACE: usize = 9;

/// A run's place in the grid: its value, or a sign.
fn mark(run: &Run) -> String {
    match &run.state {
        State::Missing => "·".to_owned(),
        State::Failed(_) => "failed".to_owned(),
        State::Done(_) => value(run).unwrap_or_else(|| "diverged".to_owned()),
    }
}

/// The selected value of a run that finished.
fn value(run: &Run) -> Option<String> {
    let summary = run.summary().filter(|summary| summary.status == Status::Finished)?;
    let keys = ["test", "val", "train"].map(|split| format!("{split}.{}", summary.metric));
    let found = |key: &String| summary.selected.get(key).or_else(|| summary.last.get(key)).copied();
    keys.iter().find_map(|key| Some(format!("{}{}", amount(key, found(key)?, None), unit(key))))
}

/// What a line says of a run that is done.
fn outcome(run: &Run) -> String {
    match (value(run), run.summary()) {
        (Some(value), Some(summary)) => format!("{} {value}", summary.metric),
        (_, Some(summary)) => {
            let reason = summary.reason.as_deref().unwrap_or("a value was not finite");
            format!("diverged after step {}: {reason}", summary.steps)
        }
        _ => "done".to_owned(),
    }
}

/// A run's label without its seed.
fn row_label(run: &Run) -> String {
    let label = run.label();
    let words: Vec<&str> = label.split(' ').filter(|word| !word.starts_with("seed=")).collect();
    if words.is_empty() { run.recipe.name.clone() } else { words.join(" ") }
}
