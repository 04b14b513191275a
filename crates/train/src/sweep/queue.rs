//! Which run is next, where other processes take from the same folder: free ones first, in order; those that somebody is at work
//! on are looked at again when nothing else is left, and a result that appears meanwhile is a result.
use super::{State, Sweep, found};
use crate::Registries;
use crate::run::{Look, lock};
use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

/// How often the runs of others are looked at.
pub(super) const LOOK: Duration = Duration::from_millis(500);

pub(super) struct Queue<'a> {
    free: VecDeque<usize>,
    busy: VecDeque<usize>,
    /// The runs whose holder was named.
    told: HashSet<usize>,
    looked: Option<Instant>,
    look: Look<'a>,
}

/// What there is to do.
#[derive(Debug, PartialEq)]
pub(super) enum Next {
    /// This run is free.
    Start(usize),
    /// Another process has ended this one; its state says how.
    Done(usize),
    /// Somebody is at work on this one: it comes later.
    Later(usize, String),
    /// All that is left is others' work for now.
    Wait,
    /// Nothing is left.
    Nothing,
}

impl<'a> Queue<'a> {
    /// All runs without a result.
    pub fn new(sweep: &Sweep, registries: &'a Registries) -> Self {
        let missing = |index: &usize| !matches!(sweep.runs[*index].state, State::Done(_));
        Self {
            free: (0..sweep.runs.len()).filter(missing).collect(),
            busy: VecDeque::new(),
            told: HashSet::new(),
            looked: None,
            look: Look::new(registries, &sweep.options.search),
        }
    }

    pub fn len(&self) -> usize {
        self.free.len() + self.busy.len()
    }

    /// Puts off a run that turned out to be another process's when it was begun.
    pub fn put_off(&mut self, index: usize) {
        self.busy.push_back(index);
    }

    /// The next run. What another process made of one is noted in `sweep`.
    pub fn next(&mut self, sweep: &mut Sweep) -> Next {
        if self.free.is_empty() && self.looked.is_none_or(|looked| looked.elapsed() >= LOOK) {
            self.free.append(&mut self.busy);
            self.looked = Some(Instant::now());
        }
        while let Some(index) = self.free.pop_front() {
            let run = &mut sweep.runs[index];
            if let Some(summary) = found(&run.folder, &run.recipe, &mut self.look) {
                run.state = State::Done(Box::new(summary));
                return Next::Done(index);
            }
            let Some(holder) = lock::holder(&run.folder) else { return Next::Start(index) };
            self.busy.push_back(index);
            if self.told.insert(index) {
                return Next::Later(index, holder);
            }
        }
        if self.busy.is_empty() { Next::Nothing } else { Next::Wait }
    }
}
