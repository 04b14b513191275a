//! The way to a value: `optimizer.groups[0].lr`.

use std::fmt;

/// One step of the way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Step {
    Key(String),
    Index(usize),
}

/// The way from the recipe's root to a value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Path(pub Vec<Step>);

impl Path {
    /// Reads `a.b[0].c`; whatever cannot be an index is part of a key.
    pub fn parse(text: &str) -> Self {
        let mut steps = Vec::new();
        for part in text.split('.').filter(|part| !part.is_empty()) {
            let (key, indices) = part.split_at(part.find('[').unwrap_or(part.len()));
            let parsed: Option<Vec<usize>> = indices
                .split_terminator(']')
                .map(|index| index.strip_prefix('[').and_then(|index| index.parse().ok()))
                .collect();
            match parsed {
                Some(parsed) => {
                    steps.extend((!key.is_empty()).then(|| Step::Key(key.to_owned())));
                    steps.extend(parsed.into_iter().map(Step::Index));
                }
                None => steps.push(Step::Key(part.to_owned())),
            }
        }
        Self(steps)
    }

    pub fn key(&self, key: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Key(key.to_owned()));
        Self(steps)
    }

    pub fn index(&self, index: usize) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Index(index));
        Self(steps)
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if position == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}
