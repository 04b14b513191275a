//! What the page shows: the list of all runs, and tables and figures of those that were chosen. Every look reads what was added.
use super::catalog::{Catalog, Entry, State};
use super::follow::Follow;
use super::machine::Machine;
use super::pace::Pace;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use taper_figures::plot::escape;
use taper_figures::table::{amount, unit};
use taper_report::{Block, Choice, Run, Runs, Section, Task};
use taper_train::run::{Record, Split, Status};

/// More runs than this are not drawn at once.
pub(crate) const MOST_CHOSEN: usize = 256;
/// All pictures together are drawn from about so many records.
const MOST_RECORDS: usize = 64 << 10;
/// A look reads for no longer than this; what is left comes with the next.
const READING: Duration = Duration::from_millis(250);
/// What was chosen and is asked for no longer is forgotten after so long.
const FORGET: Duration = Duration::from_secs(300);
/// More rows than this are not read.
const MOST_ROWS: usize = 40;

/// Runs that are watched.
#[derive(Debug)]
pub struct Watcher {
    catalog: Catalog,
    chosen: HashMap<PathBuf, Chosen>,
    /// The last view, by the runs that were asked for and what was known of them.
    view: Option<(Vec<String>, String, Arc<View>)>,
}

/// A run that is shown whole.
#[derive(Debug)]
struct Chosen {
    run: Result<Run, String>,
    problems: Vec<String>,
    /// The state of the run's files that `run` was read from.
    read_at: (State, Option<SystemTime>),
    follow: Follow,
    pace: Pace,
    asked: Instant,
    /// Grows when something was read.
    version: u64,
}

impl Chosen {
    fn new(entry: &Entry) -> Self {
        let mut problems = Vec::new();
        Self {
            run: taper_report::about(&entry.path, &mut problems),
            problems,
            read_at: (entry.state, entry.changed.filter(|_| entry.state.is_final())),
            follow: Follow::new(entry.path.join("metrics.jsonl")),
            pace: Pace::default(),
            asked: Instant::now(),
            version: 0,
        }
    }

    /// Reads what is new of its files.
    fn look(&mut self, entry: &Entry, until: Instant) {
        self.asked = Instant::now();
        if entry.state == State::Gone {
            return;
        }
        let read_at = (entry.state, entry.changed.filter(|_| entry.state.is_final()));
        if read_at != self.read_at {
            self.problems.clear();
            self.run = taper_report::about(&entry.path, &mut self.problems);
            self.read_at = read_at;
            self.version += 1;
        }
        if self.follow.advance(until) {
            self.version += 1;
        }
        self.pace.look(&entry.path);
        if entry.state == State::Running {
            self.pace.observe(entry.step);
        }
    }
}

/// A view of some runs.
#[derive(Debug)]
pub struct View {
    /// Another one where something differs.
    pub tag: String,
    /// Its parts, as JSON.
    pub text: String,
}

impl Watcher {
    /// Watches runs and folders of runs.
    pub fn new(roots: &[PathBuf]) -> Self {
        Self { catalog: Catalog::new(roots), chosen: HashMap::new(), view: None }
    }

    /// The folder of a run by its key.
    pub fn folder(&mut self, key: &str) -> Option<PathBuf> {
        self.catalog.refresh();
        self.catalog.get(key).map(|entry| entry.path.clone())
    }

    /// All runs that changed since a version of the list.
    pub fn list(&mut self, since: u64) -> Value {
        self.catalog.refresh();
        let age = |entry: &Entry| {
            let age = entry.changed.and_then(|time| SystemTime::now().duration_since(time).ok());
            age.map(|age| age.as_secs())
        };
        let row =
            |entry: &Entry| json!([entry.key, entry.name, entry.state, entry.step, entry.value, age(entry)]);
        let rows: Vec<Value> =
            self.catalog.entries().filter(|entry| entry.version > since).map(row).collect();
        json!({
            "version": self.catalog.version(),
            "runs": rows,
            "first": if since == 0 { self.catalog.suggestion(MOST_CHOSEN) } else { Vec::new() },
            "most": MOST_CHOSEN,
            "machine": Machine::now().text(),
            "problems": self.catalog.problems(),
        })
    }

    /// The figures and tables of the runs with these keys; others are not there.
    pub fn view(&mut self, keys: &[&str]) -> Arc<View> {
        self.catalog.refresh();
        let wanted: BTreeSet<&str> = keys.iter().copied().take(MOST_CHOSEN).collect();
        let entries: Vec<&Entry> =
            self.catalog.entries().filter(|entry| wanted.contains(entry.key.as_str())).collect();
        let until = Instant::now() + READING;
        for entry in &entries {
            let chosen = self.chosen.entry(entry.path.clone()).or_insert_with(|| Chosen::new(entry));
            chosen.look(entry, until);
        }
        self.chosen.retain(|_, chosen| chosen.asked.elapsed() < FORGET);
        let names: Vec<String> = entries.iter().map(|entry| entry.key.clone()).collect();
        let shown: Vec<(&Entry, &Chosen)> =
            entries.iter().filter_map(|entry| Some((*entry, self.chosen.get(&entry.path)?))).collect();
        // Signs of life are told in steps of a quarter of a minute, so that a run that stands still is no news.
        let mut known = String::new();
        for (entry, chosen) in &shown {
            let silent = entry.at_work.as_ref().map_or(0, |at_work| at_work.silent.as_secs() / 15);
            let _ = write!(known, "{}:{}:{}:{silent};", entry.version, chosen.version, chosen.pace.version());
        }
        let waiting = self.catalog.waiting(&entries);
        let _ = write!(known, "{waiting:?}");
        if let Some((before, knew, view)) = &self.view
            && *before == names
            && *knew == known
        {
            return view.clone();
        }
        let sections = sections(&shown, &waiting);
        let sections: Vec<Value> = sections
            .iter()
            .map(|(id, title, html)| json!({ "id": id, "title": title, "html": html }))
            .collect();
        let text = json!({ "sections": sections }).to_string();
        let view = Arc::new(View { tag: taper_files::sha256(text.as_bytes()), text });
        self.view = Some((names, known, view.clone()));
        view
    }
}

/// What a line and a few curves say of a run.
#[derive(Debug)]
pub(crate) struct Glance {
    pub entry: Entry,
    pub step: u64,
    pub steps: Option<u64>,
    pub rate: Option<f64>,
    /// Curves by name, of a run that was asked for.
    pub curves: Vec<(String, Vec<(f64, f64)>)>,
}

impl Glance {
    pub(crate) fn bare(entry: Entry) -> Self {
        Self { step: entry.step, entry, steps: None, rate: None, curves: Vec::new() }
    }

    /// How much is done.
    pub(crate) fn share(&self) -> Option<f64> {
        if self.entry.state == State::Finished {
            return Some(1.0);
        }
        let steps = self.steps.filter(|steps| *steps > 0)?;
        Some((self.step as f64 / steps as f64).min(1.0))
    }

    /// The seconds that are left, of a run under way.
    pub(crate) fn left(&self) -> Option<f64> {
        Some(self.steps?.saturating_sub(self.step) as f64 / self.rate?)
    }
}

impl Watcher {
    /// The runs in the order of a list, those under way first; of the `rows` around the `chosen` one more is known, of that most.
    pub(crate) fn glance(&mut self, rows: usize, chosen: usize) -> Vec<Glance> {
        self.catalog.refresh();
        let mut entries: Vec<Entry> = self.catalog.entries().cloned().collect();
        entries.sort_by(|a, b| {
            a.state.cmp(&b.state).then_with(|| b.changed.cmp(&a.changed)).then_with(|| a.name.cmp(&b.name))
        });
        let until = Instant::now() + READING;
        let seen = chosen.saturating_sub(rows)..=chosen + rows;
        let mut out = Vec::new();
        for (place, entry) in entries.into_iter().enumerate() {
            if !seen.contains(&place) {
                out.push(Glance::bare(entry));
                continue;
            }
            let known = self.chosen.entry(entry.path.clone()).or_insert_with(|| Chosen::new(&entry));
            // A run that has ended needs no look to be listed.
            if place == chosen || !entry.state.is_final() {
                known.look(&entry, until);
            }
            let (step, steps) = progress(&entry, known);
            let rate = known.pace.rate().filter(|_| entry.state == State::Running);
            let curves = if place == chosen { curves(known) } else { Vec::new() };
            out.push(Glance { entry, step, steps, rate, curves });
        }
        out
    }
}

/// The training loss and the metric of a run.
fn curves(chosen: &Chosen) -> Vec<(String, Vec<(f64, f64)>)> {
    let Ok(run) = &chosen.run else { return Vec::new() };
    let mut run = Run { records: chosen.follow.records(1024), ..run.clone() };
    run.judge();
    let of = |split: Split, metric: &str, factor: f64| -> Vec<(f64, f64)> {
        run.values(split, metric).map(|(record, value)| (record.step as f64, factor * value)).collect()
    };
    let factor = if run.metric == "accuracy" { 100.0 } else { 1.0 };
    let percent = if run.metric == "accuracy" { ", %" } else { "" };
    let mut curves = vec![("training loss by step".to_owned(), of(Split::Train, "loss", 1.0))];
    for split in [Split::Test, Split::Val] {
        curves.push((
            format!("{} {}{percent} by step", split.name(), run.metric),
            of(split, &run.metric, factor),
        ));
    }
    curves.retain(|(_, points)| !points.is_empty());
    curves
}

/// The parts of the page: a name, a title and what is in it.
fn sections(shown: &[(&Entry, &Chosen)], waiting: &[(&str, &str)]) -> Vec<(String, String, String)> {
    let most = (MOST_RECORDS / shown.len().max(1)).clamp(64, 1024);
    let (mut runs, mut problems) = (Vec::new(), Vec::new());
    for (entry, chosen) in shown {
        problems.extend(chosen.problems.iter().cloned());
        problems.extend(chosen.follow.problem().map(|what| format!("{}: {what}", entry.name)));
        match entry.state {
            State::Gone => problems
                .push(format!("{}: the folder is gone; what was read of it is still shown", entry.name)),
            _ => {
                let (read, length) = chosen.follow.read();
                if length - read > 1 << 20 {
                    problems.push(format!(
                        "{}: {} of {} MB of metrics.jsonl are read so far",
                        entry.name,
                        read >> 20,
                        length >> 20
                    ));
                }
            }
        }
        match &chosen.run {
            Ok(run) => {
                let mut run = Run { records: chosen.follow.records(most), ..run.clone() };
                run.judge();
                runs.push(run);
            }
            Err(problem) => problems.push(problem.clone()),
        }
    }
    let runs = Runs { runs: taper_report::once(runs, &mut problems), problems: Vec::new() };
    let tasks = taper_report::tasks(&runs.runs);
    let states: HashMap<&str, (&Entry, &Chosen)> =
        shown.iter().map(|(entry, chosen)| (entry.name.as_str(), (*entry, *chosen))).collect();

    let mut out: Vec<(String, String, String)> = Vec::new();
    let mut add = |id: &str, title: &str, html: String| {
        if !html.is_empty() {
            out.push((id.to_owned(), title.to_owned(), html));
        }
    };
    if !problems.is_empty() {
        problems.sort();
        problems.dedup();
        let shown =
            problems.iter().take(MOST_ROWS).map(|what| format!("<p class=\"problem\">{}</p>", escape(what)));
        add("problems", "To know", shown.collect());
    }
    add("workers", "Runs and workers", workers(shown));
    add("grid", "Grid", grid(&tasks, &states) + &queue(waiting));
    let mut figures = 0;
    let ordered = taper_report::figures(&tasks).into_iter();
    let (mut curves, mut rest): (Vec<Section>, Vec<Section>) =
        ordered.partition(|section| section.title == "Learning curves");
    let mut live = taper_report::under_way(&tasks);
    curves.append(&mut live);
    curves.append(&mut rest);
    for (index, section) in curves.iter().enumerate() {
        add(&format!("figures{index}"), &section.title, section.html(&mut figures));
    }
    let results: Vec<Block> = taper_report::results(&tasks).into_iter().map(Block::Table).collect();
    add("results", "Results so far", Section::new("", results).html(&mut figures));
    add("log", "Last lines", log(shown));
    out
}

/// What every run is doing, those under way first.
fn workers(shown: &[(&Entry, &Chosen)]) -> String {
    if shown.is_empty() {
        return String::new();
    }
    let mut shown = shown.to_vec();
    shown.sort_by(|(a, _), (b, _)| a.state.cmp(&b.state).then_with(|| a.name.cmp(&b.name)));
    let mut out = String::from(
        "<div class=\"table\"><table class=\"workers\"><thead><tr><th>run</th><th>state</th><th class=\"n\">progress</th>\
         <th class=\"n\">steps/s</th><th class=\"n\">left</th><th class=\"n\">memory</th><th>last</th></tr></thead><tbody>",
    );
    for (entry, chosen) in shown.iter().take(MOST_ROWS) {
        let work = entry.at_work.as_ref().map_or(String::new(), |at_work| format!(" · {at_work}"));
        let (step, steps) = progress(entry, chosen);
        let share = steps.filter(|steps| *steps > 0).map(|steps| (step as f64 / steps as f64).min(1.0));
        let bar = match (share, entry.state) {
            (_, State::Finished) => "<progress max=\"1\" value=\"1\"></progress> 100 %".to_owned(),
            (Some(share), _) => format!(
                "<progress max=\"1\" value=\"{share:.3}\"></progress> {:.0} %",
                (100.0 * share).floor()
            ),
            (None, _) => format!("step {step}"),
        };
        let running = entry.state == State::Running;
        let rate = chosen.pace.rate().filter(|_| running);
        let left = rate.zip(steps).map(|(rate, steps)| steps.saturating_sub(step) as f64 / rate);
        let stop = match &entry.at_work {
            Some(at_work) if at_work.here => {
                format!(
                    "<button class=\"stop\" data-stop=\"{}\" title=\"As Ctrl-C does: it leaves a checkpoint, and the same command goes on from there\">Stop</button>",
                    entry.key
                )
            }
            _ => String::new(),
        };
        let _ = write!(
            out,
            "<tr data-run=\"{}\"><th>{}</th><td class=\"t\"><span class=\"state {state}\">{state}</span>{} {stop}</td><td>{bar}</td>\
             <td>{}</td><td>{}</td><td>{}</td><td class=\"t\">{}</td></tr>",
            entry.key,
            escape(&entry.name),
            escape(&work),
            rate.map_or("–".into(), digits),
            left.map_or("–".into(), duration),
            chosen.pace.megabytes().map_or("–".into(), |mb| format!("{mb} MB")),
            escape(&entry.value),
            state = entry.state.name(),
        );
    }
    out += "</tbody></table></div>";
    if shown.len() > MOST_ROWS {
        let _ = write!(out, "<p>… and {} more.</p>", shown.len() - MOST_ROWS);
    }
    out
}

/// Steps taken, and of how many, where the recipe and the metrics tell.
fn progress(entry: &Entry, chosen: &Chosen) -> (u64, Option<u64>) {
    let Ok(run) = &chosen.run else { return (entry.step, None) };
    let train = &run.recipe.train;
    let limits = [train.steps, train.budget.steps].into_iter().flatten().min();
    // An evaluation ends an epoch: it tells how many steps one has.
    let epoch = chosen.pace.steps_an_epoch();
    let epochs = train.epochs.zip(epoch).map(|(epochs, steps)| (epochs as f64 * steps).round() as u64);
    let all = limits.into_iter().chain(epochs).min();
    (entry.step.max(chosen.follow.records(1).last().map_or(0, |record| record.step)), all)
}

/// A number with as many digits as a reader takes in.
pub(crate) fn digits(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

/// Seconds for people.
pub(crate) fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() || s < 0.0 => "–".into(),
        s if s < 60.0 => format!("{s:.0} s"),
        s if s < 3600.0 => format!("{}:{:02} min", s as u64 / 60, s as u64 % 60),
        s if s < 172_800.0 => format!("{}:{:02} h", s as u64 / 3600, s as u64 / 60 % 60),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

/// Configurations by seeds as they fill: a value where there is one, else how far the run is.
fn grid(tasks: &[Task], states: &HashMap<&str, (&Entry, &Chosen)>) -> String {
    let mut out = String::new();
    for task in
        tasks.iter().filter(|task| task.groups.len() > 1 || task.groups.iter().any(|g| g.runs.len() > 1))
    {
        let seeds: BTreeSet<u64> =
            task.groups.iter().flat_map(|group| &group.runs).map(|run| run.recipe.seed).collect();
        let shown: Vec<u64> = seeds.iter().copied().take(MOST_ROWS).collect();
        let heads: String = shown.iter().map(|seed| format!("<th class=\"n\">seed {seed}</th>")).collect();
        let _ = write!(
            out,
            "<div class=\"table\"><table class=\"grid\"><caption>{}: {}</caption><thead><tr><th></th>{heads}</tr></thead><tbody>",
            escape(&task.title()),
            escape(&task.unit())
        );
        for group in task.groups.iter().take(MOST_CHOSEN) {
            let _ = write!(out, "<tr><th>{}</th>", escape(&group.label));
            for seed in &shown {
                let run = group.runs.iter().find(|run| run.recipe.seed == *seed);
                let (class, text) = run.map_or(("none", "·".to_owned()), |run| {
                    let state = states.get(run.folder.as_str());
                    cell(task, run, state.copied())
                });
                let _ = write!(out, "<td class=\"{class}\">{}</td>", escape(&text));
            }
            out += "</tr>";
        }
        out += "</tbody></table></div>";
    }
    out
}

/// The runs of sweeps that have not begun.
fn queue(waiting: &[(&str, &str)]) -> String {
    let mut out = String::new();
    let sets: BTreeSet<&str> = waiting.iter().map(|(set, _)| *set).collect();
    for set in sets {
        let labels: Vec<&str> =
            waiting.iter().filter(|(of, _)| *of == set).map(|(_, label)| *label).collect();
        let _ = write!(out, "<p class=\"queue\">{}: {} waiting: ", escape(set), labels.len());
        let shown: Vec<String> = labels.iter().take(MOST_ROWS).map(|label| escape(label)).collect();
        out += &shown.join(" · ");
        if labels.len() > MOST_ROWS {
            let _ = write!(out, " … and {} more", labels.len() - MOST_ROWS);
        }
        out += "</p>";
    }
    out
}

fn cell(task: &Task, run: &Run, state: Option<(&Entry, &Chosen)>) -> (&'static str, String) {
    let value = Choice::Last.of(run).map(|(value, _)| amount(&task.metric, value, None));
    match (run.status, state) {
        (Status::Finished, _) => ("finished", value.unwrap_or_else(|| "finished".into())),
        (Status::Diverged, _) => ("diverged", "diverged".into()),
        (Status::Interrupted, Some((entry, chosen))) => {
            let (step, steps) = progress(entry, chosen);
            let share = steps.filter(|steps| *steps > 0).map(|steps| step.saturating_mul(100) / steps);
            let share = share.map_or(format!("step {step}"), |share| format!("{share} %"));
            let value = value.map_or(String::new(), |value| format!(" {value}{}", unit(&task.metric)));
            (entry.state.name(), format!("{share}{value}"))
        }
        (Status::Interrupted, None) => ("stopped", value.unwrap_or_default()),
    }
}

/// The last measurements of the run that changed last, and its recipe.
fn log(shown: &[(&Entry, &Chosen)]) -> String {
    let Some((entry, chosen)) = shown.iter().max_by_key(|(entry, _)| entry.changed) else {
        return String::new();
    };
    let line = |text: &str| match serde_json::from_str::<Record>(text) {
        Ok(record) => {
            let values: BTreeMap<&String, &f64> = record.values.iter().collect();
            let values: Vec<String> = values
                .iter()
                .map(|(name, value)| format!("{name} {}{}", amount(name, **value, None), unit(name)))
                .collect();
            format!(
                "step {}  epoch {}  {}  {}",
                record.step,
                record.epoch,
                record.split.name(),
                values.join("  ")
            )
        }
        Err(_) => text.to_owned(),
    };
    let lines: Vec<String> = chosen.follow.last().map(|text| escape(&line(text))).collect();
    if lines.is_empty() {
        return String::new();
    }
    let mut out = format!("<p>{}</p><pre>{}</pre>", escape(&entry.name), lines.join("\n"));
    let (all, kept) = chosen.follow.lines();
    if all > kept as u64 + 1 {
        let _ = write!(out, "<p class=\"notes\">Of {all} lines {kept} are drawn.</p>");
    }
    for (name, tail) in job_logs(&entry.path) {
        let _ = write!(out, "<p>{}</p><pre>{}</pre>", escape(&name), escape(&tail));
    }
    if let Ok(run) = &chosen.run {
        let _ = write!(
            out,
            "<details><summary>Recipe of {}</summary><pre>{}</pre></details>",
            escape(&entry.name),
            escape(&run.recipe_text)
        );
    }
    out
}

/// What a run's own folder has of logs: the last lines of files that end in `.log`, which batch systems are told to leave there.
fn job_logs(folder: &Path) -> Vec<(String, String)> {
    use std::io::{Read, Seek, SeekFrom};
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let logs = entries
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|e| e == "log"));
    let tail = |path: PathBuf| {
        let mut file = std::fs::File::open(&path).ok()?;
        let length = file.metadata().ok().filter(|about| about.is_file())?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(4096))).ok()?;
        let mut end = Vec::new();
        file.take(4096).read_to_end(&mut end).ok()?;
        let text = String::from_utf8_lossy(&end).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        Some((
            path.file_name()?.to_string_lossy().into_owned(),
            lines[lines.len().saturating_sub(12)..].join("\n"),
        ))
    };
    logs.take(4).filter_map(tail).collect()
}
