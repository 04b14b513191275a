//! A run's steps, for a program that watches it: the workers of a sweep, the probe of a plan.
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A step was taken.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tick {
    /// Optimizer steps taken.
    pub step: u64,
    /// Of how many.
    pub steps: u64,
    /// The epoch under way, from 1.
    pub epoch: u64,
    /// Of how many.
    pub epochs: u64,
    /// The loss of the step's batch; on a GPU, the last that was read.
    pub loss: f64,
}

/// Who is told of every step; nobody by default. Called on the run's own thread, which waits.
#[derive(Clone, Default)]
pub struct Watch(Option<Arc<dyn Fn(Tick) + Send + Sync>>);

impl Watch {
    /// Calls `watcher` after every step.
    pub fn new(watcher: impl Fn(Tick) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(watcher)))
    }

    pub(crate) fn tick(&self, tick: Tick) {
        if let Some(watcher) = &self.0 {
            watcher(tick);
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Watch(somebody)" } else { "Watch(nobody)" })
    }
}
