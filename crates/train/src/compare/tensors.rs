//! The first difference between two checkpoints of the same step.
use super::{Shown, json};
use crate::run::RunError;
use crate::run::checkpoint::Loaded;
use crate::run::microscope::MICROSCOPE;
use half::{bf16, f16};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde::Serialize;
use std::collections::BTreeSet;
use std::fmt;

/// What is not the same in the checkpoints of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CheckpointDifference {
    /// The step.
    pub step: u64,
    /// The file.
    pub file: String,
    /// The tensor by name, or the key of what is no tensor.
    pub name: String,
    /// The first element that differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<Vec<usize>>,
    /// The first run's value; `None` where it has none.
    pub a: Option<Shown>,
    /// The second run's value; `None` where it has none.
    pub b: Option<Shown>,
    /// How many floating-point numbers lie between the two, plus one; `None` for NaN and for integers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ulps: Option<u64>,
    /// How many elements of the tensor differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differing: Option<usize>,
    /// How many elements it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub elements: Option<usize>,
}

impl fmt::Display for CheckpointDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |side: &Option<Shown>| side.as_ref().map_or("nothing".to_owned(), Shown::to_string);
        write!(f, "step {}, {}, {}", self.step, self.file, self.name)?;
        if let Some(index) = &self.index {
            write!(f, "{index:?}")?;
        }
        write!(f, ": {} | {}", side(&self.a), side(&self.b))?;
        if let Some(ulps) = self.ulps {
            write!(f, ", {ulps} ulp apart")?;
        }
        match (self.differing, self.elements) {
            (Some(differing), Some(all)) => write!(f, "; {differing} of {all} elements differ"),
            _ => Ok(()),
        }
    }
}

/// The weights first, then the optimizers, then what is no tensor; tensors by name.
pub(super) fn first_difference(
    step: u64,
    a: &Loaded,
    b: &Loaded,
) -> Result<Option<CheckpointDifference>, RunError> {
    let empty = CheckpointDifference {
        step,
        file: String::new(),
        name: String::new(),
        index: None,
        a: None,
        b: None,
        ulps: None,
        differing: None,
        elements: None,
    };
    // A microscope that only one of them has changes nothing that is trained.
    let beside = a.files.contains_key(MICROSCOPE) != b.files.contains_key(MICROSCOPE);
    let counts = |name: &str| !(beside && (name.contains(MICROSCOPE) || name.starts_with("probe_")));
    let files: BTreeSet<&String> = a.files.keys().chain(b.files.keys()).filter(|file| counts(file)).collect();
    // The weights first: the rest follows from them.
    let (weights, others): (Vec<&String>, Vec<&String>) =
        files.into_iter().partition(|file| *file == "model.safetensors");
    let files = weights.into_iter().chain(others);
    for file in files {
        let found = match (a.files.get(file), b.files.get(file)) {
            (Some(a), Some(b)) if a == b => None,
            (Some(a), Some(b)) => file_difference(a, b, &empty)?,
            (a, b) => {
                let there =
                    |side: Option<&Vec<u8>>| side.map(|bytes| format!("{} bytes", bytes.len()).into());
                Some(CheckpointDifference {
                    name: "the file".into(),
                    a: there(a),
                    b: there(b),
                    ..empty.clone()
                })
            }
        };
        if let Some(found) = found {
            return Ok(Some(CheckpointDifference { file: file.clone(), ..found }));
        }
    }
    let state = |loaded: &Loaded| serde_json::to_value(&loaded.state).map_err(candle_core::Error::wrap);
    let of_recipe = ["recipe", "sha256"];
    let differences = json::differences(&state(a)?, &state(b)?);
    let counts = |key: &str| !of_recipe.contains(&key) && counts(key);
    let found = differences.into_iter().find(|difference| counts(&difference.key));
    Ok(found.map(|difference| CheckpointDifference {
        file: "state.json".into(),
        name: difference.key,
        a: difference.a.map(Shown::from),
        b: difference.b.map(Shown::from),
        ..empty
    }))
}

/// The first difference between two safetensors files that are not equal.
fn file_difference(
    a: &[u8],
    b: &[u8],
    empty: &CheckpointDifference,
) -> Result<Option<CheckpointDifference>, RunError> {
    let parse = |bytes| SafeTensors::deserialize(bytes).map_err(candle_core::Error::wrap);
    let (left, right) = (parse(a)?, parse(b)?);
    let names: BTreeSet<&str> = left.names().into_iter().chain(right.names()).collect();
    for name in names {
        let (a, b) = (left.tensor(name).ok(), right.tensor(name).ok());
        let kind = |view: &TensorView| format!("{:?} {:?}", view.dtype(), view.shape());
        let named = CheckpointDifference { name: name.to_owned(), ..empty.clone() };
        match (&a, &b) {
            (Some(a), Some(b)) if kind(a) == kind(b) => {
                if let Some(found) = element_difference(a, b, named) {
                    return Ok(Some(found));
                }
            }
            (a, b) => {
                let shown = |side: &Option<TensorView>| side.as_ref().map(|view| kind(view).into());
                return Ok(Some(CheckpointDifference { a: shown(a), b: shown(b), ..named }));
            }
        }
    }
    let metadata = |bytes| {
        let (_, metadata) = SafeTensors::read_metadata(bytes).map_err(candle_core::Error::wrap)?;
        let entries = metadata.metadata().clone().unwrap_or_default();
        // Entries that are JSON themselves, as an optimizer's scalars, are taken apart.
        let value = |text: String| serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text));
        Ok::<_, RunError>(entries.into_iter().map(|(key, text)| (key, value(text))).collect())
    };
    let differences = json::differences(&metadata(a)?, &metadata(b)?);
    Ok(differences.into_iter().next().map(|difference| CheckpointDifference {
        name: difference.key,
        a: difference.a.map(Shown::from),
        b: difference.b.map(Shown::from),
        ..empty.clone()
    }))
}

fn element_difference(
    a: &TensorView,
    b: &TensorView,
    named: CheckpointDifference,
) -> Option<CheckpointDifference> {
    let elements: usize = a.shape().iter().product();
    let width = a.data().len().checked_div(elements)?.max(1);
    let pairs = || a.data().chunks(width).zip(b.data().chunks(width)).enumerate();
    let (first, (x, y)) = pairs().find(|(_, (x, y))| x != y)?;
    let differing = pairs().filter(|(_, (x, y))| x != y).count();
    let mut rest = first;
    let mut index: Vec<usize> = Vec::new();
    for size in a.shape().iter().rev() {
        // A tensor with elements has no size of 0.
        index.insert(0, rest % size);
        rest /= size;
    }
    let (shown_a, shown_b) = (shown(a.dtype(), x), shown(a.dtype(), y));
    Some(CheckpointDifference {
        index: Some(index),
        ulps: ulps(a.dtype(), x, y),
        a: Some(shown_a),
        b: Some(shown_b),
        differing: Some(differing),
        elements: Some(elements),
        ..named
    })
}

/// The bits of a floating-point number of up to eight bytes.
fn bits(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}

fn float(dtype: Dtype, bytes: &[u8]) -> Option<f64> {
    let bits = bits(bytes);
    // The casts cut off zeros: the bits come from as many bytes.
    match dtype {
        Dtype::F64 => Some(f64::from_bits(bits)),
        Dtype::F32 => Some(f32::from_bits(bits as u32).into()),
        Dtype::F16 => Some(f16::from_bits(bits as u16).into()),
        Dtype::BF16 => Some(bf16::from_bits(bits as u16).into()),
        _ => None,
    }
}

fn shown(dtype: Dtype, bytes: &[u8]) -> Shown {
    let bits_text = format!("{:#0width$x}", bits(bytes), width = 2 + 2 * bytes.len());
    let value = match (dtype, float(dtype, bytes)) {
        (Dtype::F32, Some(value)) => format!("{:?}", value as f32),
        (_, Some(value)) => format!("{value:?}"),
        (_, None) => return bits_text.into(),
    };
    Shown { value, bits: Some(bits_text) }
}

/// The distance on the line of all floating-point numbers of the type.
fn ulps(dtype: Dtype, x: &[u8], y: &[u8]) -> Option<u64> {
    if float(dtype, x)?.is_nan() || float(dtype, y)?.is_nan() {
        return None;
    }
    let place = |bytes: &[u8]| {
        let sign = 1i128 << (8 * bytes.len() - 1);
        let bits = i128::from(bits(bytes));
        if bits & sign == 0 { bits } else { sign - bits }
    };
    u64::try_from((place(x) - place(y)).abs()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::checkpoint::State;
    use candle_core::{Device, Tensor};
    use std::collections::BTreeMap;

    fn checkpoint(weights: &[(&str, Vec<usize>, Vec<f32>)], step: u64) -> Loaded {
        let tensors = weights.iter().map(|(name, shape, values)| {
            let tensor = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu).unwrap();
            ((*name).to_owned(), tensor)
        });
        let tensors: BTreeMap<String, Tensor> = tensors.collect();
        let bytes = safetensors::serialize(&tensors, None).unwrap();
        let state = State { step, ..State::default() };
        Loaded { state, files: BTreeMap::from([("model.safetensors".to_owned(), bytes)]) }
    }

    #[test]
    fn the_first_tensor_and_element_are_named() {
        let one = || vec![1.0f32; 6];
        let two = |at: usize, value: f32| {
            let mut values = one();
            values[at] = value;
            values
        };
        let base = checkpoint(&[("a", vec![2, 3], one()), ("b", vec![6], one())], 3);
        assert_eq!(first_difference(3, &base, &base).unwrap(), None);

        let changed = vec![("b", vec![6], two(0, 2.0)), ("a", vec![2, 3], two(5, 1.0 + f32::EPSILON))];
        let found = first_difference(3, &base, &checkpoint(&changed, 3)).unwrap().unwrap();
        let said = "step 3, model.safetensors, a[1, 2]: 1.0 (0x3f800000) | 1.0000001 (0x3f800001), 1 ulp apart; \
                    1 of 6 elements differ";
        assert_eq!(found.to_string(), said);

        // Equal numbers that are not equal bits.
        let (plus, minus) = ([("a", vec![1], vec![0.0f32])], [("a", vec![1], vec![-0.0f32])]);
        let found = first_difference(3, &checkpoint(&plus, 3), &checkpoint(&minus, 3)).unwrap().unwrap();
        assert_eq!((found.ulps, found.differing), (Some(0), Some(1)));

        let reshaped = [("a", vec![3, 2], one()), ("b", vec![6], one())];
        let found = first_difference(3, &base, &checkpoint(&reshaped, 3)).unwrap().unwrap();
        assert_eq!(found.to_string(), "step 3, model.safetensors, a: F32 [2, 3] | F32 [3, 2]");
        let found = first_difference(3, &base, &checkpoint(&reshaped[1..], 3)).unwrap().unwrap();
        assert_eq!(found.to_string(), "step 3, model.safetensors, a: F32 [2, 3] | nothing");
        let weights = [("a", vec![2, 3], one()), ("b", vec![6], one())];
        let found = first_difference(3, &base, &checkpoint(&weights, 4)).unwrap().unwrap();
        assert_eq!(found.to_string(), "step 3, state.json, step: 3 | 4");
    }

    #[test]
    fn ulps_count_the_numbers_between() {
        let f32s = |x: f32, y: f32| ulps(Dtype::F32, &x.to_le_bytes(), &y.to_le_bytes());
        assert_eq!(f32s(1.0, 1.0 + f32::EPSILON), Some(1));
        assert_eq!(f32s(0.0, -0.0), Some(0));
        assert_eq!(f32s(f32::from_bits(1), -f32::from_bits(1)), Some(2));
        assert_eq!(f32s(f32::MAX, f32::INFINITY), Some(1));
        assert_eq!(f32s(f32::NAN, 1.0), None);
        let f64s = |x: f64, y: f64| ulps(Dtype::F64, &x.to_le_bytes(), &y.to_le_bytes());
        assert_eq!(f64s(-1.0, -1.0 - f64::EPSILON), Some(1));
        assert_eq!(ulps(Dtype::BF16, &[0x80, 0x3f], &[0x81, 0x3f]), Some(1));
        assert_eq!(shown(Dtype::BF16, &[0x80, 0x3f]).to_string(), "1.0 (0x3f80)");
        assert_eq!(shown(Dtype::F32, &0.1f32.to_le_bytes()).to_string(), "0.1 (0x3dcccccd)");
    }
}
