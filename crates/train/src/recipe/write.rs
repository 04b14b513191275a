//! The resolved recipe as text: YAML whose comments say where each value came from, and the listing of `plan`.

use std::fmt::Write;

use serde_json::Value;

use super::Recipe;
use super::path::Path;

/// YAML that reads back as the same run.
pub(super) fn yaml(recipe: &Recipe) -> String {
    let mut lines = Vec::new();
    if let Value::Object(entries) = &recipe.resolved {
        for (key, value) in entries {
            write_entry(recipe, &Path::default().key(key), key, value, 0, &mut lines);
        }
    }
    let width =
        lines.iter().filter(|(_, comment)| comment.is_some()).map(|(text, _)| text.chars().count()).max();
    // A very long value does not push the comments of all others out of sight.
    let width = width.unwrap_or(0).min(60);
    let mut out = String::new();
    for (text, comment) in &lines {
        // Writing to a String cannot fail.
        let _ = match comment {
            Some(comment) => writeln!(out, "{text:width$}  # {comment}"),
            None => writeln!(out, "{text}"),
        };
    }
    out
}

type Line = (String, Option<String>);

fn write_entry(recipe: &Recipe, path: &Path, key: &str, value: &Value, indent: usize, lines: &mut Vec<Line>) {
    let lead = format!("{:indent$}{}:", "", scalar(&Value::from(key)));
    match value {
        Value::Object(entries) if !entries.is_empty() => {
            lines.push((lead, None));
            for (key, value) in entries {
                write_entry(recipe, &path.key(key), key, value, indent + 2, lines);
            }
        }
        // One line a group; everything else fits on the key's line.
        Value::Array(items) if items.iter().any(Value::is_object) => {
            lines.push((lead, Some(recipe.provenance(path))));
            lines.extend(items.iter().map(|item| (format!("{:indent$}  - {}", "", flow(item)), None)));
        }
        value => lines.push((format!("{lead} {}", flow(value)), Some(recipe.provenance(path)))),
    }
}

/// A value on one line.
pub fn flow(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        Value::Object(entries) => {
            let entry = |(key, value): (&String, &Value)| {
                format!("{}: {}", scalar(&Value::from(key.as_str())), flow(value))
            };
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        other => scalar(other),
    }
}

/// A leaf; text that YAML could take for something else is quoted as JSON does, which YAML reads.
fn scalar(value: &Value) -> String {
    match value {
        Value::String(text) if plain(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Whether a text is certainly a plain word to YAML.
fn plain(text: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    text.starts_with(|c: char| c.is_ascii_alphabetic())
        && text.chars().all(word)
        && !matches!(
            text.to_ascii_lowercase().as_str(),
            "true" | "false" | "null" | "yes" | "no" | "on" | "off" | "y" | "n"
        )
}

/// The settings that all runs share, each as (path, value, where it came from).
pub(super) fn shared(recipe: &Recipe) -> Vec<(String, String, String)> {
    let runs = recipe.runs();
    let varied: Vec<&str> =
        runs.iter().flat_map(|run| run.varied.iter().map(|(key, _)| key.as_str())).collect();
    // With a sweep these are what all runs share, which is what the first one has besides what is varied.
    runs.first()
        .map(Recipe::settings)
        .unwrap_or_default()
        .into_iter()
        .filter(|(path, value, _)| {
            *path != "name"
                && !varied.contains(&path.as_str())
                && runs.iter().all(|run| run.text(path).as_ref() == Some(value))
        })
        .collect()
}

/// All settings with where they came from, then the runs, each with what `mark` says of it.
pub(super) fn plan(recipe: &Recipe, mark: &dyn Fn(&Recipe) -> &'static str) -> String {
    let (runs, shared) = (recipe.runs(), shared(recipe));
    let path_width = shared.iter().map(|(path, _, _)| path.chars().count()).max().unwrap_or(0);
    let value_width = shared.iter().map(|(_, value, _)| value.chars().count()).max().unwrap_or(0).min(40);
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(out, "settings");
    for (path, value, provenance) in &shared {
        let _ = writeln!(out, "  {path:path_width$}  {value:value_width$}  {provenance}");
    }
    let _ = writeln!(out, "\nruns: {}", runs.len());
    let names: Vec<String> = runs.iter().map(Recipe::directory).collect();
    let name_width = names.iter().map(String::len).max().unwrap_or(0);
    for (run, name) in runs.iter().zip(&names) {
        let settings: Vec<String> =
            run.varied.iter().map(|(key, value)| format!("{key}={}", flow(value))).collect();
        let line = format!("  {name:name_width$}  {}  {}", settings.join(" "), mark(run));
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}
