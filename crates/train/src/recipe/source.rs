//! Texts that settings are read from, and places in them.

use std::fmt;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use super::error::{ErrorKind, RecipeError};
use super::inside;

/// No recipe comes near this; a file beyond it is a mistake (a checkpoint, a data set), refused before it is read.
const MAX_BYTES: u64 = 1 << 20;

/// What kind of text a [`Source`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// `defaults.yaml`, compiled in.
    Defaults,
    /// A recipe or a layer it extends.
    File,
    /// One `TAPER__A__B=value`.
    Environment,
    /// One `--set a.b=value`.
    Set,
}

/// One text, kept for as long as a value or an error points into it.
#[derive(Debug)]
pub(super) struct Source {
    pub origin: Origin,
    /// The file's path, or what the text is.
    pub label: String,
    pub text: String,
}

impl Source {
    pub fn new(origin: Origin, label: impl Into<String>, text: impl Into<String>) -> Arc<Self> {
        Arc::new(Self { origin, label: label.into(), text: text.into() })
    }

    /// Reads a file that must be a regular file of UTF-8 text of sensible size, or one inside the program.
    pub fn read(path: &Path) -> Result<Arc<Self>, RecipeError> {
        let label = tidy(path).display().to_string();
        let absent = || RecipeError::new(ErrorKind::File, format!("recipe `{label}` does not exist"));
        match inside::read(path) {
            Some(Some(text)) => return Ok(Self::new(Origin::File, label, text)),
            Some(None) => return Err(absent()),
            None => {}
        }
        let bytes = taper_files::read_regular(path, MAX_BYTES).map_err(|error| {
            let message = match error.source.kind() {
                std::io::ErrorKind::NotFound => {
                    return match inside::meant(path) {
                        Some(name) => absent().help(format!("one is inside this program: `{name}`")),
                        None => absent(),
                    };
                }
                std::io::ErrorKind::FileTooLarge => format!("`{label}` is no recipe: {}", error.source),
                _ => format!("cannot read `{label}`: {}", error.source),
            };
            RecipeError::new(ErrorKind::File, message)
        })?;
        match String::from_utf8(bytes) {
            Ok(text) => Ok(Self::new(Origin::File, label, text)),
            Err(error) => {
                let at = error.utf8_error().valid_up_to();
                let bytes = error.into_bytes();
                // What precedes `at` is valid UTF-8, so nothing is lost up to there and the offset stays right.
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let message = format!("expected UTF-8 text, found the byte 0x{:02x}", bytes[at]);
                Err(RecipeError::new(ErrorKind::Syntax, message)
                    .at(&Span::new(Self::new(Origin::File, label, text), at..at + 1)))
            }
        }
    }
}

/// `a/b/../c` as `a/c`: the same recipe names its layers the same way from wherever it is reached.
pub(super) fn tidy(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if matches!(out.components().next_back(), Some(Component::Normal(_))) => {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

/// The start of the character that byte `at` is in, or the end of the text.
fn char_start(text: &str, at: usize) -> usize {
    // Zero is a border in every text.
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// A stretch of bytes in a [`Source`].
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub source: Arc<Source>,
    range: Range<usize>,
}

impl Span {
    /// Moves the ends of `range` onto character borders inside the text, whatever they were.
    pub fn new(source: Arc<Source>, range: Range<usize>) -> Self {
        let start = char_start(&source.text, range.start);
        let end = char_start(&source.text, range.end).max(start);
        Self { source, range: start..end }
    }

    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Line and column, both from 1; columns count characters.
    pub fn line_column(&self) -> (usize, usize) {
        let before = &self.source.text[..self.range.start];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
        (line, before[line_start..].chars().filter(|&c| c != '\u{feff}').count() + 1)
    }
}

/// Where a value came from, in the words of `plan` and of the resolved recipe's comments.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = || self.source.text.split('=').next().unwrap_or_default();
        match self.source.origin {
            Origin::Defaults => f.write_str("built-in default"),
            Origin::Environment => write!(f, "environment {}", key()),
            Origin::Set => write!(f, "--set {}", key()),
            Origin::File => {
                let (line, column) = self.line_column();
                write!(f, "{}:{line}:{column}", self.source.label)
            }
        }
    }
}
