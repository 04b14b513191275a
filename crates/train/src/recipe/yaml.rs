//! YAML text into a tree whose every key and value knows its place.
//!
//! serde-saphyr does the reading (and refuses duplicate keys, alias bombs and deep nesting with a place); the tree
//! only keeps what it hands over.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};
use serde_saphyr::{Location, MessageFormatter, Spanned, UserMessageFormatter};

use super::error::{ErrorKind, RecipeError};
use super::path::Step;
use super::source::{Source, Span};

/// The schema needs a quarter of it; recursion over a tree stays shallow.
const MAX_DEPTH: usize = 32;

/// A value and where it stands.
#[derive(Debug, Clone)]
pub(super) struct Node {
    pub span: Span,
    pub kind: Kind,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// Null, a truth value, a finite number or a string.
    Leaf(Value),
    List(Vec<Node>),
    Map(Vec<Entry>),
}

/// A key of a map and its value.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub key: String,
    pub key_span: Span,
    pub node: Node,
}

impl Node {
    pub fn map(span: Span, entries: Vec<Entry>) -> Self {
        Self { span, kind: Kind::Map(entries) }
    }

    pub fn entries(&self) -> &[Entry] {
        match &self.kind {
            Kind::Map(entries) => entries,
            _ => &[],
        }
    }

    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.entries().iter().find(|entry| entry.key == key)
    }

    pub fn is_null(&self) -> bool {
        matches!(self.kind, Kind::Leaf(Value::Null))
    }

    pub fn as_str(&self) -> Option<&str> {
        match &self.kind {
            Kind::Leaf(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// The value at `path`, with its key's place if the last step is a key.
    pub fn get(&self, path: &[Step]) -> Option<(Option<&Span>, &Node)> {
        let (mut key, mut node) = (None, self);
        for step in path {
            (key, node) = match (step, &node.kind) {
                (Step::Key(name), Kind::Map(_)) => {
                    node.entry(name).map(|entry| (Some(&entry.key_span), &entry.node))?
                }
                (Step::Index(index), Kind::List(items)) => (None, items.get(*index)?),
                _ => return None,
            };
        }
        Some((key, node))
    }

    /// Takes the value at `path` out of the maps on the way to it.
    pub fn remove(&mut self, path: &[&str]) {
        let Kind::Map(entries) = &mut self.kind else { return };
        match path {
            [] => {}
            [key] => entries.retain(|entry| entry.key != *key),
            [key, rest @ ..] => {
                entries.iter_mut().filter(|entry| entry.key == *key).for_each(|entry| entry.node.remove(rest))
            }
        }
    }

    /// Adds a value, making the maps on the way; a later value for the same path wins.
    pub fn insert(&mut self, path: &[&str], key_span: &Span, node: Node) {
        let Kind::Map(entries) = &mut self.kind else { return };
        let Some((key, rest)) = path.split_first() else { return };
        let index = entries.iter().position(|entry| entry.key == *key).unwrap_or_else(|| {
            let node = Node::map(key_span.clone(), Vec::new());
            entries.push(Entry { key: (*key).to_owned(), key_span: key_span.clone(), node });
            entries.len() - 1
        });
        let entry = &mut entries[index];
        if rest.is_empty() {
            *entry = Entry { key: (*key).to_owned(), key_span: key_span.clone(), node };
        } else {
            if !matches!(entry.node.kind, Kind::Map(_)) {
                entry.node = Node::map(key_span.clone(), Vec::new());
            }
            entry.node.insert(rest, key_span, node);
        }
    }

    /// The plain value.
    pub fn value(&self) -> Value {
        match &self.kind {
            Kind::Leaf(value) => value.clone(),
            Kind::List(items) => items.iter().map(Node::value).collect(),
            Kind::Map(entries) => {
                entries.iter().map(|entry| (entry.key.clone(), entry.node.value())).collect()
            }
        }
    }
}

/// Parses the whole text.
pub(super) fn parse(source: &Arc<Source>) -> Result<Node, RecipeError> {
    parse_part(source, 0..source.text.len())
}

/// Parses a part of the text; places are those in the whole.
pub(super) fn parse_part(source: &Arc<Source>, part: Range<usize>) -> Result<Node, RecipeError> {
    let text = &source.text[part.clone()];
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            flow_nesting_limit: MAX_DEPTH,
            max_nodes: 100_000,
            max_events: 400_000,
            max_aliases: 1_000,
            max_anchors: 1_000,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 100_000 },
        // `no` and `on` are words; a truth value is `true` or `false`.
        strict_booleans: true,
        ignore_binary_tag_for_string: true,
        with_snippet: false,
    };
    match serde_saphyr::from_str_with_options::<Spanned<Tree>>(text, options) {
        Ok(tree) => Ok(tree.value.place(source, &part, tree.referenced)),
        Err(error) => Err(syntax_error(source, &part, &error)),
    }
}

fn syntax_error(source: &Arc<Source>, part: &Range<usize>, error: &serde_saphyr::Error) -> RecipeError {
    use serde_saphyr::Error as E;
    use serde_saphyr::budget::BudgetBreach as B;
    let mut cause = error;
    while let E::AliasError { error, .. } | E::WithSnippet { error, .. } = cause {
        cause = error;
    }
    let message = match cause {
        E::DuplicateMappingKey { key: Some(key), .. } => format!("key `{key}` is given twice"),
        E::MultipleDocuments { .. } => "expected one YAML document, found another one".to_owned(),
        E::Budget { breach: B::Depth { .. }, .. } => format!("nested deeper than {MAX_DEPTH} levels"),
        E::Budget { breach, .. } => format!("more than a recipe may hold: {}", too_many(breach)),
        E::UnknownAnchor { .. } => "expected an alias of an anchor above, found one of none".to_owned(),
        E::RecursiveReferencesRequireWeakTypes { .. } => "an anchor holds an alias of itself".to_owned(),
        E::AliasReplayLimitExceeded { .. } | E::AliasExpansionLimitExceeded { .. } => {
            "aliases stand for more than a recipe may hold".to_owned()
        }
        E::NonFiniteFloat { .. } => "expected a finite number".to_owned(),
        other => UserMessageFormatter.format_message(other).into_owned(),
    };
    let report = RecipeError::new(ErrorKind::Syntax, message);
    match error.location() {
        Some(location) => report.at(&span(source, part, location)),
        None => report.note(format!("in {}", source.label)),
    }
}

/// What there is too much of.
fn too_many(breach: &serde_saphyr::budget::BudgetBreach) -> &'static str {
    use serde_saphyr::budget::BudgetBreach as B;
    match breach {
        B::Aliases { .. } => "aliases",
        B::Anchors { .. } => "anchors",
        _ => "keys and values",
    }
}

/// A place as serde-saphyr gives it; parse errors count in characters only.
fn span(source: &Arc<Source>, part: &Range<usize>, location: Location) -> Span {
    let place = location.span();
    let text = &source.text[part.clone()];
    let nth = |n: u64| text.char_indices().nth(n as usize).map_or(text.len(), |(at, _)| at);
    let (start, len) = match (place.byte_offset(), place.byte_len()) {
        (Some(offset), Some(len)) => (offset as usize, len as usize),
        _ => {
            let start = nth(place.offset());
            (start, nth(place.offset().saturating_add(place.len())).saturating_sub(start))
        }
    };
    let start = part.start + start.min(text.len());
    // An empty place is drawn as the character after it; a block scalar only as its first line.
    let end = (start + len.max(1)).min(part.end);
    let newline = source.text.as_bytes()[start..end.max(start)].iter().position(|&byte| byte == b'\n');
    let line = newline.map_or(end, |newline| start + newline.max(1));
    Span::new(source.clone(), start..line)
}

/// What serde-saphyr hands over, before it is tied to its source.
enum Tree {
    Leaf(Value),
    List(Vec<Spanned<Tree>>),
    Map(Vec<(Spanned<String>, Spanned<Tree>)>),
}

impl Tree {
    fn place(self, source: &Arc<Source>, part: &Range<usize>, location: Location) -> Node {
        let kind = match self {
            Tree::Leaf(value) => Kind::Leaf(value),
            Tree::List(items) => Kind::List(
                items.into_iter().map(|item| item.value.place(source, part, item.referenced)).collect(),
            ),
            Tree::Map(entries) => Kind::Map(
                entries
                    .into_iter()
                    .map(|(key, item)| Entry {
                        key_span: span(source, part, key.referenced),
                        key: key.value,
                        node: item.value.place(source, part, item.referenced),
                    })
                    .collect(),
            ),
        };
        Node { span: span(source, part, location), kind }
    }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Tree, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("expected a finite number"))?;
        Ok(Tree::Leaf(Value::Number(number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = access.next_element()? {
            items.push(item);
        }
        Ok(Tree::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Tree, A::Error> {
        let mut entries: Vec<(Spanned<String>, Spanned<Tree>)> = Vec::new();
        while let Some(entry) = access.next_entry()? {
            entries.push(entry);
        }
        if entries.iter().any(|(key, _)| key.value.is_empty()) {
            return Err(A::Error::custom("a key is empty"));
        }
        Ok(Tree::Map(entries))
    }
}
