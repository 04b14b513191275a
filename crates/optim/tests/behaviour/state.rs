//! Saved state: continuing is not stopping, and what does not fit is refused as a whole.
use crate::common::{Bench, bits, map, names, var};
use candle_core::DType;
use proptest::prelude::*;
use serde_json::{Map, json};
use taper_optim::{Error, Group, Load, Registry, StateDict};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn saving_and_loading_at_any_step_changes_no_bit(seed: u64, stop in 0usize..7, half: bool) {
        let dtype = if half { DType::BF16 } else { DType::F32 };
        for name in names() {
            let mut straight = Bench::new(name, &[5, 9], dtype, seed);
            straight.steps(1, 7);
            let mut first = Bench::new(name, &[5, 9], dtype, seed);
            first.steps(1, stop);
            let mut second = Bench::new(name, &[5, 9], dtype, seed);
            for ((_, to), (_, from)) in second.params.iter().zip(&first.params) {
                to.set(from).unwrap();
            }
            let saved = StateDict::from_bytes(&first.state_bytes()).unwrap();
            second.optimizer.load_state_dict(&saved).unwrap();
            second.steps(stop + 1, 7);
            prop_assert_eq!(straight.flat_bits(), second.flat_bits(), "{}", name);
            prop_assert_eq!(straight.state_bytes(), second.state_bytes(), "{}", name);
        }
    }

    #[test]
    fn numbers_survive_the_file(t: u64, prev_lr in prop::num::f64::NORMAL | prop::num::f64::ZERO) {
        let mut bench = Bench::new("decgd", &[2], DType::F64, 1);
        let mut state = bench.optimizer.state_dict().unwrap();
        let scalars = state.header.params.get_mut("p0").unwrap();
        (scalars.t, *scalars.memory.get_mut("prev_lr").unwrap()) = (t, prev_lr);
        let read = StateDict::from_bytes(&state.to_bytes().unwrap()).unwrap();
        bench.optimizer.load_state_dict(&read).unwrap();
        prop_assert_eq!(bench.optimizer.state_dict().unwrap().header, state.header);
    }
}

#[test]
fn a_file_on_disk_is_the_same_state() {
    let path = std::env::temp_dir().join(format!("taper-optim-state-{}.safetensors", std::process::id()));
    let mut bench = Bench::new("amsgrad", &[4], DType::F32, 2);
    bench.steps(1, 3);
    let state = bench.optimizer.state_dict().unwrap();
    state.save(&path).unwrap();
    let read = StateDict::load(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read.to_bytes().unwrap(), state.to_bytes().unwrap());
    let error = StateDict::load(&path).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()), "{error}");
}

/// What loading `state` into an optimizer that has taken two steps says, after checking that it changed nothing.
fn refusal(name: &str, lengths: &[usize], dtype: DType, state: &StateDict) -> Vec<String> {
    let mut bench = Bench::new(name, lengths, dtype, 3);
    bench.steps(1, 2);
    let before = (bench.flat_bits(), bench.state_bytes());
    let Err(Error::State(differences)) = bench.optimizer.load_state_dict(state) else {
        panic!("{name}: foreign state was taken")
    };
    assert!(before == (bench.flat_bits(), bench.state_bytes()), "{name}: a refused state left traces");
    differences
}

#[test]
fn state_that_does_not_fit_is_refused_with_every_difference() {
    let saved = |name, lengths: &[usize], dtype| {
        let mut bench = Bench::new(name, lengths, dtype, 4);
        bench.steps(1, 2);
        bench.optimizer.state_dict().unwrap()
    };
    let decgd = saved("decgd", &[3, 2], DType::F32);
    assert_eq!(
        refusal("decgd", &[3, 4], DType::F32, &decgd),
        ["buffer `p1.m`: expected [4] F32, found [2] F32", "buffer `p1.v`: expected [4] F32, found [2] F32"]
    );
    assert_eq!(
        refusal("decgd", &[3], DType::F64, &decgd),
        [
            "buffer `p0.m`: expected [3] F64, found [3] F32",
            "buffer `p0.v`: expected [3] F64, found [3] F32",
            "parameter `p1` is not one of this optimizer's",
            "buffer `p1.m` is not one of this optimizer's",
            "buffer `p1.v` is not one of this optimizer's",
        ]
    );
    assert_eq!(refusal("decgd", &[3, 2, 1], DType::F32, &decgd), ["parameter `p2` is missing"]);
    assert_eq!(
        refusal("amsgrad", &[3, 2], DType::F32, &decgd),
        [
            "optimizer: expected amsgrad, found decgd",
            "buffer `p0.v_max` is missing",
            "buffer `p1.v_max` is missing",
        ]
    );
    let mut damaged = decgd;
    damaged.header.params.get_mut("p0").unwrap().memory.clear();
    damaged.tensors.remove("p1.v");
    assert_eq!(
        refusal("decgd", &[3, 2], DType::F32, &damaged),
        ["parameter `p0`: expected the scalars [\"prev_lr\"]", "buffer `p1.v` is missing"]
    );
}

#[test]
fn groups_with_buffers_of_their_own_are_saved_too() {
    let build = || {
        let groups = [Group::new("p1").set("ams", true)];
        let places = [("p0".into(), 0, 3), ("p1".into(), 3, 4)];
        Bench::placed("decgd", &map(json!({"momentum": 0.5})), &groups, &places, DType::F32, 9)
    };
    let (mut straight, mut first) = (build(), build());
    straight.steps(1, 5);
    first.steps(1, 2);
    let state = first.optimizer.state_dict().unwrap();
    assert_eq!(state.tensors.keys().collect::<Vec<_>>(), ["p0.m", "p0.v", "p1.m", "p1.v", "p1.v_min"]);
    let mut second = build();
    for ((_, to), (_, from)) in second.params.iter().zip(&first.params) {
        to.set(from).unwrap();
    }
    second.optimizer.load_state_dict(&state).unwrap();
    second.steps(3, 5);
    assert_eq!(straight.flat_bits(), second.flat_bits());
}

#[test]
fn state_moves_between_optimizers_of_one_kind_and_other_switches() {
    // Switches that shape no buffer may change between sessions, if that is meant: here the kind of decay of `decgd`.
    let build = |decay: &str| {
        let params = vec![("x".into(), var(&[1.0, 2.0], DType::F64))];
        let config = map(json!({"decay": decay, "weight_decay": 0.1}));
        Registry::builtin().build("decgd", params, &config).unwrap()
    };
    let state = build("l2").state_dict().unwrap();
    let error = build("coupled_q").load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains("decay: expected \"coupled_q\", found \"l2\" (of x)"), "{error}");
    assert!(build("coupled_q").load_state_dict_with(&state, Load::strict().keep_hyperparameters()).is_ok());
    // A state without tensors is no state of Adam's.
    let mut adam = Bench::new("adam", &[1], DType::F32, 1);
    assert!(adam.optimizer.load_state_dict(&StateDict::default()).is_err());
    let sgd =
        Registry::builtin().build("sgd", vec![("x".into(), var(&[1.0], DType::F32))], &Map::new()).unwrap();
    assert!(sgd.state_dict().unwrap().tensors.is_empty());
    assert_eq!(bits(&adam.params[0].1).len(), 1);
}

#[test]
fn a_file_is_replaced_as_a_whole() {
    let folder = std::env::temp_dir().join(format!("taper-optim-replace-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (path, link) = (folder.join("state"), folder.join("link"));
    let mut bench = Bench::new("adam", &[4], DType::F32, 2);
    bench.optimizer.state_dict().unwrap().save(&path).unwrap();
    // Another name of the same file: it sees what is written into the file, and not what takes its place.
    std::fs::hard_link(&path, &link).unwrap();
    let old = std::fs::read(&path).unwrap();
    bench.steps(1, 1);
    let state = bench.optimizer.state_dict().unwrap();
    state.save(&path).unwrap();
    assert_eq!(std::fs::read(&link).unwrap(), old);
    assert_eq!(std::fs::read(&path).unwrap(), state.to_bytes().unwrap());
    // One that cannot be put in its place leaves nothing behind.
    let taken = folder.join("folder");
    std::fs::create_dir_all(taken.join("full")).unwrap();
    assert!(state.save(&taken).is_err());
    let names = std::fs::read_dir(&folder).unwrap().count();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(names, 3);
}

#[test]
fn numbers_that_are_not_finite_are_saved_too() {
    let mut state = StateDict::default();
    for (i, value) in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -0.0, 1e-310].into_iter().enumerate() {
        state.header.shared.insert(i.to_string(), value);
    }
    let read = StateDict::from_bytes(&state.to_bytes().unwrap()).unwrap();
    let bits = |state: &StateDict| state.header.shared.values().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&read), bits(&state));
}

#[test]
fn state_of_before_is_still_read() {
    // A header without rate, hyperparameters and order, as it was written first.
    let mut bench = Bench::new("adam", &[2], DType::F32, 1);
    bench.steps(1, 2);
    let mut old = bench.optimizer.state_dict().unwrap();
    (old.header.lr, old.header.by_position) = (None, None);
    old.header.groups.clear();
    let text = serde_json::to_string(&old.header).unwrap();
    assert_eq!(text, r#"{"optimizer":"adam","params":{"p0":{"t":2,"memory":{}}}}"#);
    Bench::new("adam", &[2], DType::F32, 1).optimizer.load_state_dict(&old).unwrap();
}

#[test]
fn groups_that_differ_are_named_with_their_parameters() {
    let build = |groups: &[Group]| {
        let places = [("p0".into(), 0, 3), ("p1".into(), 3, 4)];
        Bench::placed("sgdm", &Map::new(), groups, &places, DType::F32, 9).optimizer
    };
    let saved = build(&[Group::new("p1").set("weight_decay", 0.5)]).state_dict().unwrap();
    let Err(Error::State(differences)) = build(&[]).load_state_dict(&saved) else { panic!("taken") };
    assert_eq!(differences, ["weight_decay: expected 0, found 0.5 (of p1)"]);
    // Another pattern for the same parameters is the same optimizer.
    build(&[Group::new("/1$/").set("weight_decay", 0.5)]).load_state_dict(&saved).unwrap();
}
