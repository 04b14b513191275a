//! `--profile`: where the time of training steps goes, op by op, and a trace for chrome://tracing, Perfetto or speedscope.
//!
//! A layer on `tracing` that listens to the spans of [`taper_models::trace`]. Time inside a span belongs to the innermost
//! one, so that all rows of the table add up to the time of the steps.
use crate::log::Lines;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use taper_figures::table::Table;
use taper_models::trace::TARGET;
use taper_train::run::EVALUATION;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// Ends the list; a further event would overwrite the end.
fn close(trace: &mut BufWriter<File>) -> std::io::Result<()> {
    const END: &str = "\n]\n";
    trace.write_all(END.as_bytes())?;
    trace.seek_relative(-(END.len() as i64))
}

/// A profiler of this process.
#[derive(Clone)]
pub struct Profile(Arc<Mutex<State>>);

struct State {
    started: Instant,
    steps: u64,
    /// Spans that end meanwhile are not counted.
    paused: bool,
    /// By op and what tells it from its namesakes.
    rows: BTreeMap<(String, String), Row>,
    trace: Option<BufWriter<File>>,
}

#[derive(Clone, Copy, Default)]
struct Row {
    forward: Duration,
    backward: Duration,
    calls: u64,
    flops: u64,
}

/// What is known of a span while it lasts.
#[derive(Default)]
struct Open {
    op: String,
    pass: String,
    shape: String,
    flops: u64,
    entered: Option<Instant>,
    /// Time of spans inside it.
    inside: Duration,
}

impl Visit for Open {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "flops" {
            self.flops = value;
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "op" => value.clone_into(&mut self.op),
            "pass" => value.clone_into(&mut self.pass),
            _ => {}
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "shape" {
            self.shape = format!("{value:?}");
        }
    }
}

impl Profile {
    /// Starts to listen, for the rest of the process; with `trace`, every span is also written there. Events up to `level`
    /// are shown as [`log`](crate::log) does.
    ///
    /// # Errors
    /// If the file cannot be made or somebody else listens already.
    pub fn install(trace: Option<&Path>, level: Level) -> Result<Self, String> {
        let open = |path: &Path| {
            let mut file = BufWriter::new(File::create(path)?);
            // Events follow, each after its comma; viewers accept a list without end, so that an interrupted run leaves
            // a trace too.
            let name =
                serde_json::json!({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "taper"}});
            write!(file, "[\n{name}")?;
            Ok(file)
        };
        let failed = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
        let trace = trace.map(|path| open(path).map_err(|e| failed(path, e))).transpose()?;
        let profile = Self(Arc::new(Mutex::new(State {
            started: Instant::now(),
            steps: 0,
            paused: false,
            rows: BTreeMap::new(),
            trace,
        })));
        let subscriber = tracing_subscriber::registry().with(profile.clone()).with(Lines(level));
        tracing::subscriber::set_global_default(subscriber).map_err(|e| e.to_string())?;
        Ok(profile)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was counted; the trace goes on.
    pub fn reset(&self) {
        let mut state = self.state();
        state.rows.clear();
        state.steps = 0;
    }

    /// [`Profile::table`] with the peak that `peak` measures, which is no part of the profile.
    pub fn table_beside<E>(&self, peak: impl FnOnce() -> Result<f64, E>) -> Result<String, E> {
        self.state().paused = true;
        let peak = peak();
        self.state().paused = false;
        Ok(self.table(peak?))
    }

    /// Time by op, largest first, with rates against the machine's `peak` in GFLOP/s. Empty if no step was seen.
    pub fn table(&self, peak: f64) -> String {
        let mut state = self.state();
        if let Some(trace) = &mut state.trace
            && let Err(e) = close(trace)
        {
            eprintln!("warning: the trace is not complete: {e}");
        }
        if state.steps == 0 {
            return String::new();
        }
        let per_step = 1e3 / state.steps as f64;
        let total: f64 = state.rows.values().map(|r| (r.forward + r.backward).as_secs_f64()).sum();
        let mut rows: Vec<_> = state.rows.iter().collect();
        rows.sort_by_key(|(_, row)| std::cmp::Reverse(row.forward + row.backward));
        let mut table =
            Table::new(["op", "calls", "forward ms", "backward ms", "share", "GFLOP/s", "of peak"]);
        let milliseconds = |time: Duration| match time.as_secs_f64() * per_step {
            0.0 => String::new(),
            ms => format!("{ms:.3}"),
        };
        for ((op, shape), row) in rows {
            let seconds = (row.forward + row.backward).as_secs_f64();
            let rate = (row.flops > 0).then(|| row.flops as f64 * 1e-9 / seconds);
            table.row([
                format!("{op} {shape}").trim_end().to_owned(),
                format!("{:.0}", row.calls as f64 / state.steps as f64),
                milliseconds(row.forward),
                milliseconds(row.backward),
                format!("{:.1} %", 100.0 * seconds / total),
                rate.map(|rate| format!("{rate:.0}")).unwrap_or_default(),
                rate.map(|rate| format!("{:.0} %", 100.0 * rate / peak)).unwrap_or_default(),
            ]);
        }
        format!(
            "{}{} steps of {:.3} ms; peak {peak:.0} GFLOP/s (a 2048-cubed product), operations by the plain count\n",
            table.markdown(),
            state.steps,
            total * per_step
        )
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> tracing_subscriber::Layer<S> for Profile {
    /// Spans of ops are traces, whatever level of events is shown.
    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id).filter(|span| span.metadata().target() == TARGET) else { return };
        let mut open = Open::default();
        attributes.record(&mut open);
        span.extensions_mut().insert(open);
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.entered = Some(Instant::now());
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let now = Instant::now();
        let Some(span) = context.span(id) else { return };
        let Some(open) = span.extensions_mut().remove::<Open>() else { return };
        let Some(entered) = open.entered else { return };
        let lasted = now - entered;
        let inside = |ancestor: &str| {
            let mut above = span.scope().skip(1);
            above.any(|above| above.extensions().get::<Open>().is_some_and(|open| open.op == ancestor))
        };
        // An evaluation is counted as one row.
        let evaluates = inside(EVALUATION);
        if let Some(parent) = span.parent().filter(|_| !evaluates)
            && let Some(parent) = parent.extensions_mut().get_mut::<Open>()
        {
            parent.inside += lasted;
        }
        let mut state = self.state();
        if state.paused {
            return;
        }
        state.steps += u64::from(open.op == "step");
        let start = entered.duration_since(state.started).as_secs_f64() * 1e6;
        if let Some(trace) = &mut state.trace {
            let event = serde_json::json!({
                "name": format!("{} {}", open.op, open.shape).trim_end(), "cat": open.pass, "ph": "X", "pid": 1,
                "tid": 1, "ts": start, "dur": lasted.as_secs_f64() * 1e6, "args": {"flops": open.flops},
            });
            // A full disk ends the trace and not the training; the table's reader is told.
            let _ = write!(trace, ",\n{event}");
        }
        if evaluates {
            return;
        }
        let own = lasted.saturating_sub(open.inside);
        let row = state.rows.entry((open.op, open.shape)).or_default();
        match open.pass.as_str() {
            "backward" => row.backward += own,
            _ => row.forward += own,
        }
        row.calls += 1;
        row.flops += open.flops;
    }
}
