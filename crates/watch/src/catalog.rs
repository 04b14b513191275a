//! The runs that there are, cheaply: thousands of folders are looked at in a moment, and those that have ended are looked at seldom.
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use taper_figures::table::{amount, unit};
use taper_train::run::{AtWork, Record, Status, Summary, at_work, folder};
use taper_train::sweep;

/// How often folders are listed, and runs looked at that have ended.
const SELDOM: Duration = Duration::from_secs(5);
/// How often runs are looked at that may go on.
const OFTEN: Duration = Duration::from_millis(900);
/// The last line of `metrics.jsonl` is looked for in so many bytes at its end.
const END: u64 = 4096;

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// A process is at work on it.
    Running,
    /// Nobody is, and it has not come to its end.
    Stopped,
    /// It has a recipe and nothing else.
    Waiting,
    /// It came to its end.
    Finished,
    /// A loss or gradient was not finite.
    Diverged,
    /// Its folder was here and is not any more.
    Gone,
}

impl State {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Stopped => "stopped",
            Self::Waiting => "waiting",
            Self::Finished => "finished",
            Self::Diverged => "diverged",
            Self::Gone => "gone",
        }
    }

    /// Whether nothing more is to come.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Finished | Self::Diverged | Self::Gone)
    }
}

/// What is known of a run without reading all of it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// By which it is asked for: the start of its path's digest.
    pub key: String,
    /// Its folder.
    pub path: PathBuf,
    /// Its folder's name.
    pub name: String,
    /// What it is doing.
    pub state: State,
    /// Who is at work on it.
    pub at_work: Option<AtWork>,
    /// Steps taken, as far as its files say.
    pub step: u64,
    /// The last value of its metric, for people.
    pub value: String,
    /// When its metrics or its summary last changed.
    pub changed: Option<SystemTime>,
    /// The catalog's version when this last changed.
    pub version: u64,
    /// What its files were at the last look: length and time.
    seen: [Option<(u64, SystemTime)>; 2],
}

impl Entry {
    fn new(path: PathBuf) -> Self {
        let name =
            path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
        let mut key = taper_files::sha256(path.as_os_str().as_encoded_bytes());
        key.truncate(12);
        let (at_work, step, value, changed, version) = (None, 0, String::new(), None, 0);
        Self {
            key,
            path,
            name,
            state: State::Waiting,
            at_work,
            step,
            value,
            changed,
            version,
            seen: [None, None],
        }
    }

    /// The name without the id: what the runs of a sweep share.
    pub fn set(&self) -> &str {
        self.name.rsplit_once('-').map_or(&self.name, |(name, _)| name)
    }

    /// Looks at its folder; true if something is new.
    fn look(&mut self) -> bool {
        let before = (self.state, self.step, self.value.clone(), self.at_work.as_ref().map(AtWork::process));
        let about = |name: &str| {
            let about = fs::metadata(self.path.join(name)).ok()?;
            Some((about.len(), about.modified().ok()?))
        };
        let seen = [about("metrics.jsonl"), about("summary.json")];
        self.at_work = at_work(&self.path);
        let changed = seen != self.seen;
        if changed {
            self.changed = seen.iter().flatten().map(|(_, time)| *time).max();
            let summary = seen[1].and_then(|_| folder::summary(&self.path).ok().flatten());
            self.state = match summary.as_ref().map(|summary| summary.status) {
                Some(Status::Finished) => State::Finished,
                Some(Status::Diverged) => State::Diverged,
                Some(Status::Interrupted) => State::Stopped,
                None if seen[0].is_some() => State::Stopped,
                None => State::Waiting,
            };
            match summary.filter(|_| self.state.is_final()) {
                Some(summary) => (self.step, self.value) = (summary.steps, of_summary(&summary)),
                None => {
                    if let Some(record) = last_record(&self.path.join("metrics.jsonl")) {
                        (self.step, self.value) = (record.step, of_record(&record));
                    }
                }
            }
            self.seen = seen;
        }
        self.state = match (self.at_work.is_some(), self.state) {
            (true, _) => State::Running,
            (false, State::Running | State::Gone) => {
                // Its files are as they were: what they say is read again.
                self.seen = [None, None];
                return self.look() || before.0 != self.state;
            }
            (false, state) => state,
        };
        before != (self.state, self.step, self.value.clone(), self.at_work.as_ref().map(AtWork::process))
    }
}

/// The value of a run that came to its end.
fn of_summary(summary: &Summary) -> String {
    let name = &summary.metric;
    let value = ["test", "val", "train"].into_iter().find_map(|split| {
        let key = format!("{split}.{name}");
        let value = summary.selected.get(&key).or_else(|| summary.last.get(&key))?;
        Some(format!("{split} {name} {}{}", amount(name, *value, None), unit(name)))
    });
    value.unwrap_or_default()
}

/// What a line says, for people.
pub(crate) fn of_record(record: &Record) -> String {
    let names = ["accuracy", "bits_per_char", "bits_per_byte", "perplexity", "loss"];
    let known = names.into_iter().find(|name| record.values.contains_key(*name));
    let Some((name, value)) = known.and_then(|name| Some((name, *record.values.get(name)?))) else {
        return String::new();
    };
    format!("{} {name} {}{}", record.split.name(), amount(name, value, None), unit(name))
}

/// The last whole line of a file that can be read and is no probe.
fn last_record(path: &Path) -> Option<Record> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(END))).ok()?;
    let mut end = Vec::new();
    file.take(END).read_to_end(&mut end).ok()?;
    let whole = end.iter().rposition(|byte| *byte == b'\n')?;
    end[..whole]
        .split(|byte| *byte == b'\n')
        .rev()
        .find_map(|line| serde_json::from_slice::<Record>(line).ok())
}

/// All runs in some folders.
#[derive(Debug)]
pub struct Catalog {
    roots: Vec<PathBuf>,
    entries: BTreeMap<PathBuf, Entry>,
    version: u64,
    listed: Option<Instant>,
    looked: Option<Instant>,
    problems: Vec<String>,
    /// The runs that sweeps have before them: their folders, and what tells them from the others.
    planned: Vec<(PathBuf, String)>,
}

impl Catalog {
    /// The runs in folders of runs, and single runs. Nothing is read yet.
    pub fn new(roots: &[PathBuf]) -> Self {
        let roots = roots.iter().map(|root| root.canonicalize().unwrap_or_else(|_| root.clone())).collect();
        let (entries, problems, planned) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { roots, entries, version: 0, listed: None, looked: None, problems, planned }
    }

    /// All runs, by path.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// A run by its key.
    pub fn get(&self, key: &str) -> Option<&Entry> {
        self.entries.values().find(|entry| entry.key == key)
    }

    /// Grows with every change.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Folders that cannot be listed.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// The runs that have not begun, of the sweeps that some runs are of: a set's name and what tells a run from the others.
    pub fn waiting(&self, of: &[&Entry]) -> Vec<(&str, &str)> {
        let sets: BTreeSet<(Option<&Path>, &str)> =
            of.iter().map(|entry| (entry.path.parent(), entry.set())).collect();
        // Two sweeps may have a run in common.
        let mut seen = BTreeSet::new();
        let planned = self.planned.iter();
        let planned = planned.filter(|(path, _)| !self.entries.contains_key(path) && seen.insert(path));
        let planned = planned.filter_map(|(path, label)| {
            let set = path.file_name()?.to_str()?.rsplit_once('-')?.0;
            sets.contains(&(path.parent(), set)).then_some((set, label.as_str()))
        });
        planned.collect()
    }

    /// Looks at the folders, unless that was done a moment ago.
    pub fn refresh(&mut self) {
        let now = Instant::now();
        let due = |last: Option<Instant>, after| last.is_none_or(|last| now.duration_since(last) >= after);
        if !due(self.looked, OFTEN) {
            return;
        }
        let all = due(self.listed, SELDOM);
        if all {
            self.list();
            self.listed = Some(now);
        }
        let version = self.version + 1;
        let mut changed = false;
        for entry in self.entries.values_mut().filter(|entry| all || !entry.state.is_final()) {
            let new = match entry.path.join("recipe.yaml").is_file() {
                true => entry.look() || entry.version == 0,
                false => std::mem::replace(&mut entry.state, State::Gone) != State::Gone,
            };
            if new {
                entry.version = version;
                changed = true;
            }
        }
        self.version += u64::from(changed);
        self.looked = Some(now);
    }

    fn list(&mut self) {
        self.problems.clear();
        self.planned.clear();
        for root in &self.roots {
            if root.join("recipe.yaml").is_file() {
                self.entries.entry(root.clone()).or_insert_with(|| Entry::new(root.clone()));
                continue;
            }
            match folder::runs_in(root) {
                Ok(runs) => {
                    for run in runs {
                        self.entries.entry(run.clone()).or_insert_with(|| Entry::new(run));
                    }
                    let planned = sweep::planned(root).into_iter();
                    self.planned.extend(planned.map(|(name, label)| (root.join(name), label)));
                }
                // A run that was watched and is gone is said where it stands.
                Err(_) if self.entries.contains_key(root) => {}
                Err(e) => self.problems.push(e.to_string()),
            }
        }
    }

    /// The runs to look at first: those under way with all of their name, else those of the name that changed last.
    pub fn suggestion(&self, most: usize) -> Vec<String> {
        let newest = |entry: &&Entry| (entry.state == State::Running, entry.changed);
        let Some(first) = self.entries.values().filter(|e| e.state != State::Gone).max_by_key(newest) else {
            return Vec::new();
        };
        let mut same: Vec<&Entry> =
            self.entries.values().filter(|entry| entry.set() == first.set()).collect();
        same.sort_by_key(|entry| std::cmp::Reverse(newest(entry)));
        same.iter().take(most).map(|entry| entry.key.clone()).collect()
    }
}
