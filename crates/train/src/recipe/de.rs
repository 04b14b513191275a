//! Values into the typed schema, with faults that say where in the value they are.
//!
//! `serde_json`'s own deserializer would do but for one thing: its errors are sentences. These are data, so that a
//! fault can be shown at its place in the file and an unknown key beside the nearest known one.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, EnumAccess, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, VariantAccess, Visitor,
};
use serde_json::{Map, Value};

use super::error::{ErrorKind, RecipeError};
use super::layers::Layers;
use super::path::{Path, Step};
use super::source::Origin;

/// Reads `value`, which came from `layers` at `path`, as a `T`.
pub(super) fn read<T: DeserializeOwned>(
    value: &Value,
    path: &Path,
    layers: &Layers,
) -> Result<T, RecipeError> {
    T::deserialize(Input(value)).map_err(|fault| {
        let mut steps = path.0.clone();
        steps.extend(fault.steps.into_iter().rev());
        report(&Path(steps), fault.kind, layers)
    })
}

fn report(path: &Path, fault: FaultKind, layers: &Layers) -> RecipeError {
    match fault {
        FaultKind::Unknown { field, known } => {
            let section = if path.0.is_empty() { String::new() } else { format!(" in `{path}`") };
            RecipeError::new(ErrorKind::UnknownKey, format!("unknown key `{field}`{section}"))
                .at_opt(layers.key_place(&path.key(&field)))
                .known(&field, known)
        }
        FaultKind::Variant { given, known } => RecipeError::new(
            ErrorKind::Type,
            format!("{path}: expected one of {}, found `{given}`", known.join(", ")),
        )
        .at_opt(layers.place(path))
        .nearest(&given, known),
        FaultKind::Missing { field } => missing(&path.key(field), layers),
        FaultKind::Type { expected, found } => {
            RecipeError::new(ErrorKind::Type, format!("{path}: expected {expected}, found {found}"))
                .at_opt(layers.place(path))
        }
        FaultKind::Other { message } => {
            RecipeError::new(ErrorKind::Value, format!("{path}: {message}")).at_opt(layers.place(path))
        }
    }
}

/// The report of a key that must be there and is not, shown at the section it belongs in.
pub(super) fn missing(path: &Path, layers: &Layers) -> RecipeError {
    let report = RecipeError::new(ErrorKind::Missing, format!("`{path}` is missing"));
    // What only the built-in defaults have is nothing that a user wrote.
    let section = Path(path.0[..path.0.len().saturating_sub(1)].to_vec());
    match layers.place(&section).filter(|span| span.source.origin != Origin::Defaults) {
        Some(span) => report.at(span),
        None => report.note(format!("in {}", layers.recipe())),
    }
}

/// What did not fit, and the way to it, innermost step first.
#[derive(Debug)]
struct Fault {
    steps: Vec<Step>,
    kind: FaultKind,
}

#[derive(Debug)]
enum FaultKind {
    Unknown { field: String, known: &'static [&'static str] },
    Variant { given: String, known: &'static [&'static str] },
    Missing { field: &'static str },
    Type { expected: String, found: String },
    Other { message: String },
}

impl From<FaultKind> for Fault {
    fn from(kind: FaultKind) -> Self {
        Self { steps: Vec::new(), kind }
    }
}

impl Fault {
    fn inside(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        FaultKind::Other { message: message.to_string() }.into()
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        FaultKind::Type { expected: wanted(expected), found: given(found) }.into()
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        FaultKind::Type { expected: wanted(expected), found: given(found) }.into()
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        FaultKind::Unknown { field: field.to_owned(), known }.into()
    }

    fn unknown_variant(given: &str, known: &'static [&'static str]) -> Self {
        FaultKind::Variant { given: given.to_owned(), known }.into()
    }

    fn missing_field(field: &'static str) -> Self {
        FaultKind::Missing { field }.into()
    }
}

/// Rust's type names in a user's words.
fn wanted(expected: &dyn Expected) -> String {
    named(&expected.to_string())
}

fn named(expected: &str) -> String {
    match expected {
        "u32" | "u64" | "usize" => "a whole number of at least 0".to_owned(),
        "f64" => "a number".to_owned(),
        "a sequence" => "a list".to_owned(),
        "a map" => "a map of keys".to_owned(),
        "a string" | "path string" => "a text".to_owned(),
        "a boolean" => "true or false".to_owned(),
        _ if expected.starts_with("struct ") || expected.contains(" enum ") => "a map of keys".to_owned(),
        _ => expected.to_owned(),
    }
}

/// What serde_json says of a value that does not fit, in a user's words; anything else as it is.
pub(crate) fn in_words(message: &str) -> String {
    let (said, rest) = message.split_at(message.find(" (the default is ").unwrap_or(message.len()));
    if let Some((found, expected)) =
        said.strip_prefix("unknown variant `").and_then(|said| said.split_once("`, expected "))
    {
        return format!("expected {expected}, found `{found}`{rest}");
    }
    let misfit = said.strip_prefix("invalid type: ").or(said.strip_prefix("invalid value: "));
    let Some((found, expected)) = misfit.and_then(|said| said.rsplit_once(", expected ")) else {
        return message.to_owned();
    };
    let found = match (found, found.split_once([' ', '`'])) {
        ("sequence", _) => "a list".to_owned(),
        ("map", _) => "a map of keys".to_owned(),
        ("null", _) => "nothing".to_owned(),
        (_, Some(("string", text))) => format!("the text `{}`", text.trim_matches('"')),
        // A number or a truth value, in backquotes already.
        _ => found.find('`').map_or(found, |quote| &found[quote..]).to_owned(),
    };
    format!("expected {}, found {found}{rest}", named(expected))
}

fn given(found: Unexpected<'_>) -> String {
    match found {
        Unexpected::Bool(value) => format!("`{value}`"),
        Unexpected::Unsigned(value) => format!("`{value}`"),
        Unexpected::Signed(value) => format!("`{value}`"),
        Unexpected::Float(value) => format!("`{value}`"),
        Unexpected::Str(value) => format!("the text `{value}`"),
        Unexpected::Unit | Unexpected::Option => "nothing".to_owned(),
        Unexpected::Seq => "a list".to_owned(),
        Unexpected::Map => "a map of keys".to_owned(),
        other => other.to_string(),
    }
}

struct Input<'a>(&'a Value);

impl<'de> Deserializer<'de> for Input<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::String(value) => visitor.visit_str(value),
            Value::Number(number) => match (number.as_u64(), number.as_i64(), number.as_f64()) {
                (Some(value), _, _) => visitor.visit_u64(value),
                (_, Some(value), _) => visitor.visit_i64(value),
                (_, _, Some(value)) => visitor.visit_f64(value),
                _ => Err(de::Error::custom("a number out of range")),
            },
            Value::Array(items) => visitor.visit_seq(Items { items: items.iter().enumerate() }),
            Value::Object(entries) => {
                visitor.visit_map(Entries { entries: entries.iter(), value: None, skip: None })
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        if self.0.is_null() { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    /// serde would also take a list as a struct's fields in order; a recipe has no such form.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.0 {
            Value::Array(_) => Err(de::Error::invalid_type(Unexpected::Seq, &visitor)),
            _ => self.deserialize_any(visitor),
        }
    }

    /// A word, or a map whose `kind` is the word and whose other keys are the variant's fields.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.0 {
            Value::String(tag) => visitor.visit_enum(Variant { tag, fields: None }),
            Value::Object(fields) => match fields.get("kind") {
                Some(Value::String(tag)) => visitor.visit_enum(Variant { tag, fields: Some(fields) }),
                Some(other) => Err(Fault::from(FaultKind::Type {
                    expected: format!("one of {}", variants.join(", ")),
                    found: format!("`{other}`"),
                })
                .inside(Step::Key("kind".to_owned()))),
                None => Err(FaultKind::Missing { field: "kind" }.into()),
            },
            other => Err(FaultKind::Type {
                expected: format!("one of {}", variants.join(", ")),
                found: format!("`{other}`"),
            }
            .into()),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map identifier ignored_any
    }
}

struct Items<'a> {
    items: std::iter::Enumerate<std::slice::Iter<'a, Value>>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Fault> {
        let Some((index, item)) = self.items.next() else { return Ok(None) };
        seed.deserialize(Input(item)).map(Some).map_err(|fault| fault.inside(Step::Index(index)))
    }
}

struct Entries<'a> {
    entries: serde_json::map::Iter<'a>,
    value: Option<(&'a str, &'a Value)>,
    /// The tag of an enum, read already.
    skip: Option<&'static str>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        let Some((key, value)) = self.entries.find(|(key, _)| self.skip != Some(key.as_str())) else {
            return Ok(None);
        };
        self.value = Some((key, value));
        seed.deserialize(StrDeserializer::<Fault>::new(key)).map(Some)
    }

    fn next_value_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<T::Value, Fault> {
        let (key, value) = self
            .value
            .take()
            .ok_or_else(|| <Fault as de::Error>::custom("a value was read before its key"))?;
        seed.deserialize(Input(value)).map_err(|fault| fault.inside(Step::Key(key.to_owned())))
    }
}

struct Variant<'a> {
    tag: &'a str,
    fields: Option<&'a Map<String, Value>>,
}

impl<'de, 'a> EnumAccess<'de> for Variant<'a> {
    type Error = Fault;
    type Variant = Self;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Self), Fault> {
        let tag: StrDeserializer<'_, Fault> = self.tag.into_deserializer();
        let value = seed.deserialize(tag).map_err(|fault| match self.fields {
            Some(_) => fault.inside(Step::Key("kind".to_owned())),
            None => fault,
        })?;
        Ok((value, self))
    }
}

impl<'de> VariantAccess<'de> for Variant<'_> {
    type Error = Fault;

    fn unit_variant(self) -> Result<(), Fault> {
        match self.fields.into_iter().flatten().find(|(key, _)| *key != "kind") {
            Some((key, _)) => Err(FaultKind::Unknown { field: key.clone(), known: &["kind"] }.into()),
            None => Ok(()),
        }
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let empty = Map::new();
        let fields = self.fields.unwrap_or(&empty);
        visitor.visit_map(Entries { entries: fields.iter(), value: None, skip: Some("kind") })
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, _: T) -> Result<T::Value, Fault> {
        Err(de::Error::custom("a variant is a word or a map of keys"))
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, _: V) -> Result<V::Value, Fault> {
        Err(de::Error::custom("a variant is a word or a map of keys"))
    }
}
