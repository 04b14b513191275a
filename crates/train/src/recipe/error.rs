//! What is wrong with a recipe, shown where it is.
//!
//! Rendered by annotate-snippets, the renderer of rustc and cargo: it draws the snippet and the caret, folds long
//! lines, and is in the dependency tree already through serde-saphyr. miette would add its own derive, a panic hook
//! and a graphical theme for the same four lines of output.

use std::fmt;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use super::source::Span;

/// What kind of mistake a [`RecipeError`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A file is missing or cannot be read.
    File,
    /// The text is not YAML, or more than a recipe may hold.
    Syntax,
    /// A layer in `extends` is missing, or layers extend each other in a circle.
    Extends,
    /// A key nobody reads.
    UnknownKey,
    /// A value of another type than the key takes.
    Type,
    /// A value out of its range, or at odds with another value.
    Value,
    /// A key that must be there is not.
    Missing,
    /// A name that no registry knows, or a value that a registry refuses.
    Section,
    /// A `--set` or `TAPER__` setting that cannot be applied.
    Override,
}

/// A recipe or an argument that cannot be used: the class of errors that ends the command with exit code 2.
///
/// Its `Display` is plain text of several lines without a final line break; [`RecipeError::render`] can colour it.
#[derive(Debug, Clone, thiserror::Error)]
pub struct RecipeError(Box<Report>);

#[derive(Debug, Clone)]
struct Report {
    kind: ErrorKind,
    warning: bool,
    message: String,
    cause: Vec<String>,
    place: Option<Span>,
    notes: Vec<String>,
    help: Vec<String>,
}

impl RecipeError {
    pub(super) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let (place, cause, notes, help) = Default::default();
        Self(Box::new(Report { kind, warning: false, message: message.into(), cause, place, notes, help }))
    }

    /// What something else said, in lines of its own: the first is the message, the others stand below the place.
    pub(super) fn said(kind: ErrorKind, text: &str) -> Self {
        let mut lines = text.lines();
        let mut report = Self::new(kind, lines.next().unwrap_or_default());
        let rest: Vec<&str> = lines.filter(|line| !line.trim().is_empty()).collect();
        let indent = rest.iter().map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
        report.0.cause = rest.iter().map(|line| line.get(indent..).unwrap_or(line).to_owned()).collect();
        report
    }

    /// The same, not as an error.
    pub(super) fn warning(mut self) -> Self {
        self.0.warning = true;
        self
    }

    /// Points at the place; the first place given stays.
    pub(super) fn at(mut self, span: &Span) -> Self {
        self.0.place.get_or_insert_with(|| span.clone());
        self
    }

    pub(super) fn at_opt(self, span: Option<&Span>) -> Self {
        match span {
            Some(span) => self.at(span),
            None => self,
        }
    }

    pub(super) fn note(mut self, text: impl Into<String>) -> Self {
        self.0.notes.push(text.into());
        self
    }

    pub(super) fn help(mut self, text: impl Into<String>) -> Self {
        self.0.help.push(text.into());
        self
    }

    /// Names the one of `known` that was probably meant.
    pub(super) fn nearest<S: AsRef<str>>(self, given: &str, known: &[S]) -> Self {
        match nearest(given, known) {
            Some(near) => self.help(format!("did you mean `{near}`?")),
            None => self,
        }
    }

    /// Names the one of `known` that was probably meant, and all of them.
    pub(super) fn known<S: AsRef<str>>(self, given: &str, known: &[S]) -> Self {
        let names: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
        let report = self.nearest(given, known);
        if names.is_empty() { report } else { report.help(format!("known here: {}", names.join(", "))) }
    }

    /// What kind of mistake it is.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The first line without the word `error`.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// File (or `--set`, `environment`, `built-in`), line and column, from 1, when the mistake is in a text.
    pub fn location(&self) -> Option<(&str, usize, usize)> {
        self.0.place.as_ref().map(|span| {
            let (line, column) = span.line_column();
            (span.source.label.as_str(), line, column)
        })
    }

    /// The report as text, with terminal colours if `color`.
    pub fn render(&self, color: bool) -> String {
        let report = &*self.0;
        let level = if report.warning { Level::WARNING } else { Level::ERROR };
        let mut group = Group::with_title(level.primary_title(shown(&report.message)));
        if let Some(span) = &report.place {
            let Excerpt { text, line, range } = excerpt(&span.source.text, span.range());
            group = group.element(
                Snippet::source(text)
                    .line_start(line)
                    .path(shown(&span.source.label))
                    .annotation(AnnotationKind::Primary.span(range)),
            );
        }
        let cause: Vec<String> = report.cause.iter().map(|line| shown(line)).collect();
        if !cause.is_empty() {
            group = group.element(Level::NOTE.no_name().message(cause.join("\n")));
        }
        let notes = report.notes.iter().map(|text| Level::NOTE.message(shown(text)));
        let help = report.help.iter().map(|text| Level::HELP.message(shown(text)));
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[group.elements(notes).elements(help)])
    }
}

impl fmt::Display for RecipeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

/// Whether a character shows as itself: control characters move the cursor, the others reorder the line.
fn printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A message, which may quote anything from a recipe, made safe for a terminal and bounded in length.
fn shown(text: &str) -> String {
    const LONGEST: usize = 1000;
    let mut out = String::new();
    for c in text.chars().take(LONGEST) {
        if printable(c) { out.push(c) } else { out.extend(c.escape_default()) }
    }
    if text.chars().nth(LONGEST).is_some() {
        out.push('…');
    }
    out
}

struct Excerpt {
    text: String,
    line: usize,
    range: Range<usize>,
}

/// The line of the place; the renderer shows as much of it as fits.
fn excerpt(text: &str, place: Range<usize>) -> Excerpt {
    let start = text[..place.start].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[place.start..].find('\n').map_or(text.len(), |offset| place.start + offset);
    let place_end = place.end.clamp(place.start, end);
    // One sign for each character keeps the caret under its place; tabs are the renderer's.
    let safe = |part: &str| -> String {
        part.chars().map(|c| if c == '\t' || printable(c) { c } else { '\u{fffd}' }).collect()
    };
    let before = safe(&text[start..place.start]);
    let inside = safe(&text[place.start..place_end]);
    let range = before.len()..before.len() + inside.len();
    let line = text[..start].bytes().filter(|&byte| byte == b'\n').count() + 1;
    Excerpt { text: before + &inside + &safe(&text[place_end..end]), line, range }
}

/// The known name that `given` is most likely a misspelling of.
pub fn nearest<'a, S: AsRef<str>>(given: &str, known: &'a [S]) -> Option<&'a str> {
    let budget = (given.chars().count() / 3).max(1);
    known
        .iter()
        .map(|name| (strsim::osa_distance(&given.to_lowercase(), name.as_ref()), name.as_ref()))
        .filter(|&(distance, _)| distance <= budget)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, name)| name)
}
