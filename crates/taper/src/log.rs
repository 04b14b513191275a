//! Lines about what was decided and why: `tracing` events, one plain line each on standard error.
//!
//! A program that has a `tracing` subscriber of its own installs that instead.
use std::fmt::{self, Write};
use taper_train::run::print;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

/// Shows events up to `level` from here on, unless there is a subscriber already.
pub fn to_stderr(level: Level) {
    // It fails only where one is installed, which then shows the events.
    let _ = tracing::subscriber::set_global_default(tracing_subscriber::registry().with(Lines(level)));
}

/// Our events up to a level as lines, to be combined with other layers.
pub struct Lines(pub Level);

impl<S: Subscriber> Layer<S> for Lines {
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.0.into())
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        if *metadata.level() > self.0 || !metadata.target().starts_with("taper") {
            return;
        }
        let mut line = Line(String::new());
        match *metadata.level() {
            Level::ERROR => line.0.push_str("error: "),
            Level::WARN => line.0.push_str("warning: "),
            _ => {}
        }
        event.record(&mut line);
        print(&line.0);
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let written = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
        // Writing to a String does not fail.
        let _ = written;
    }
}
