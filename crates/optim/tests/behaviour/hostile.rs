//! Bytes from anywhere: an error at worst, never a panic.
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use std::collections::HashMap;
use taper_optim::replay::{Options, replay};
use taper_optim::{Registry, StateDict};

const RECORD: &[u8] = include_bytes!("../golden/decgd_paper_zero_amsinf.safetensors");
/// Several tensors, second gradients and their points.
const SEVERAL: &[u8] = include_bytes!("../golden/modern/sam_wd.safetensors");

fn survives(registry: &Registry, bytes: &[u8]) {
    let _ = replay(registry, bytes, &Options::default());
    let _ = replay(registry, bytes, &Options { dtype: Some(DType::F32), ..Default::default() });
    let _ = StateDict::from_bytes(bytes);
}

fn state() -> Vec<u8> {
    let x = crate::common::var(&[1.0, 2.0], DType::F32);
    let optimizer = Registry::builtin().build("decgd", vec![("x".into(), x)], &Default::default()).unwrap();
    optimizer.state_dict().unwrap().to_bytes().unwrap()
}

/// Bytes of a safetensors file in the header, where all decisions are taken.
fn header(bytes: &[u8]) -> usize {
    8 + bytes[..8].iter().rev().fold(0, |n, b| n << 8 | usize::from(*b))
}

prop_compose! {
    /// A tensor of any small shape, zero dimensions included.
    fn tensors()(
        dims in prop::collection::vec(0usize..4, 0..4),
        dtype in prop::sample::select(vec![DType::F64, DType::F32, DType::F16, DType::BF16, DType::U8, DType::I64]),
        ones: bool,
    ) -> Tensor {
        let make = if ones { Tensor::ones } else { Tensor::zeros };
        make(dims, dtype, &Device::Cpu).unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        survives(&Registry::builtin(), &bytes);
    }

    #[test]
    fn mutated_records(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), keep in any::<prop::sample::Index>(), cut: bool) {
        for record in [RECORD, SEVERAL] {
            let mut bytes = record.to_vec();
            for (at, byte) in &edits {
                let at = at.index(header(record));
                bytes[at] = *byte;
            }
            if cut {
                bytes.truncate(keep.index(record.len()));
            }
            survives(&Registry::builtin(), &bytes);
        }
    }

    #[test]
    fn mutated_numbers(at in any::<prop::sample::Index>(), value: f64) {
        // Any number at all among parameters, gradients, losses and rates.
        for record in [RECORD, SEVERAL] {
            let start = header(record);
            let mut bytes = record.to_vec();
            let place = start + 8 * at.index((record.len() - start) / 8);
            bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
            survives(&Registry::builtin(), &bytes);
        }
    }

    #[test]
    fn mutated_state(edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), cut in any::<prop::sample::Index>()) {
        let whole = state();
        let mut bytes = whole.clone();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let mut bench = crate::common::Bench::new("decgd", &[2], DType::F32, 1);
        for bytes in [&bytes[..], &whole[..cut.index(whole.len())]] {
            if let Ok(state) = StateDict::from_bytes(bytes) {
                let _ = bench.optimizer.load_state_dict(&state);
            }
        }
    }

    #[test]
    fn records_of_any_shape_and_dtype(
        tensors in prop::collection::vec(tensors(), 6),
        d in 0usize..3,
        steps in 0usize..3,
        fits in prop::collection::vec(any::<bool>(), 5),
        name in prop::sample::select(crate::common::names()),
        lr in prop::sample::select(vec!["0.1", "-1", "NaN", "inf", "1e400", "x", ""]),
        hyperparameters in prop::sample::select(vec!["{}", "[]", "{\"lr\": null}", "{\"x\": 1}", "{"]),
    ) {
        let shapes: [(&str, Vec<usize>); 5] = [
            ("params", vec![d]), ("grads", vec![steps, d]), ("losses", vec![steps]), ("lrs", vec![steps]),
            ("expected", vec![steps, d]),
        ];
        let mut named = HashMap::from([("final.v".to_owned(), tensors[5].clone())]);
        for (((name, shape), other), fits) in shapes.into_iter().zip(&tensors).zip(fits) {
            let right = Tensor::ones(shape, DType::F64, &Device::Cpu).unwrap();
            named.insert(name.to_owned(), if fits { right } else { other.clone() });
        }
        let metadata = [("optimizer", name), ("hyperparameters", hyperparameters), ("lr", lr)];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let bytes = safetensors::serialize(&named, Some(HashMap::from(metadata))).unwrap();
        survives(&Registry::builtin(), &bytes);
    }
}

#[test]
fn what_is_wrong_with_a_record_is_said() {
    let registry = Registry::builtin();
    let message = |bytes: &[u8]| replay(&registry, bytes, &Options::default()).unwrap_err().to_string();
    assert!(message(b"").starts_with("not an optimizer record: "));
    assert_eq!(message(&state()), "not an optimizer record: no `hyperparameters` in the metadata");
    let other = Options { optimizer: Some("decgp".into()), ..Default::default() };
    let error = replay(&registry, RECORD, &other).unwrap_err().to_string();
    assert!(error.contains("unknown optimizer `decgp` (did you mean `decgd`?)"), "{error}");
}

#[test]
fn nan_is_no_agreement() {
    let (_, metadata) = safetensors::SafeTensors::read_metadata(RECORD).unwrap();
    let mut tensors = candle_core::safetensors::load_buffer(RECORD, &Device::Cpu).unwrap();
    let expected = (&tensors["expected"] * f64::NAN).unwrap();
    tensors.insert("expected".into(), expected);
    let bytes = safetensors::serialize(&tensors, metadata.metadata().clone()).unwrap();
    let replayed = replay(&Registry::builtin(), &bytes, &Options::default()).unwrap();
    assert_eq!((replayed.max_abs_error, replayed.tensor.as_str()), (f64::INFINITY, "expected"));
}
