//! What a person meets in a candle loop of their own.
use crate::common::{map, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use rayon::prelude::*;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use taper_optim::{
    Accumulator, Adam, AdamConfig, DecGd, DecGdConfig, Error, Group, Optim, Registry, Sgd, SgdConfig,
    StepContext,
};

/// Steps of a network's training while a background thread evaluates the same variables on rayon's pool, in a process-wide
/// pool of its own: a deadlock is a thread that does not come back.
#[test]
fn somebody_may_read_the_parameters_on_the_pool_meanwhile() {
    let (done, finished) = mpsc::channel();
    std::thread::spawn(move || {
        let vars: Vec<Var> = (0..4).map(|_| var(&vec![1.0; 200_000], DType::F32)).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let reader = {
            let (vars, stop) = (vars.clone(), stop.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    (0..64).into_par_iter().for_each(|i| {
                        // Two parameters at once, in an order that changes.
                        let (a, b) = (&vars[i % 4], &vars[(i * 3 + 1) % 4]);
                        (a.as_tensor() * b.as_tensor()).unwrap().sum_all().unwrap();
                    });
                }
            })
        };
        let named = vars.iter().enumerate().map(|(i, v)| (format!("p{i}"), v.clone())).collect();
        for (name, steps) in [("adam", 60), ("adagd", 60), ("lamb", 3), ("lookahead", 6)] {
            let mut optimizer =
                Registry::builtin().build(name, Vec::clone(&named), &Default::default()).unwrap();
            let mut grads = GradStore::default();
            vars.iter().for_each(|v| drop(grads.insert(v, v.as_tensor().affine(0.0, 1e-3).unwrap())));
            for _ in 0..steps {
                optimizer.step(&grads, &StepContext::new()).unwrap();
            }
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        done.send(()).unwrap();
    });
    // Nothing is measured: a minute is for ever.
    finished.recv_timeout(Duration::from_secs(60)).expect("the step and the readers wait for each other");
}

#[test]
fn a_gradient_that_is_no_number_never_reaches_the_weights() {
    for bad in [f64::NAN, f64::INFINITY] {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let (x, y) = (var(&[1.0, 2.0], dtype), var(&[3.0; 5000], dtype));
            let mut optimizer = Registry::builtin()
                .build("adam", vec![("x".into(), x.clone()), ("y".into(), y.clone())], &Default::default())
                .unwrap();
            let mut grads = GradStore::default();
            grads.insert(&x, tensor(&[1.0, 1.0], dtype));
            let mut last = vec![1.0; 5000];
            last[4999] = bad;
            grads.insert(&y, tensor(&last, dtype));
            let error = optimizer.step(&grads, &StepContext::new()).unwrap_err();
            assert!(error.to_string().contains("`y`"), "{error}");
            assert_eq!((values(&x), values(&y)), (vec![1.0, 2.0], vec![3.0; 5000]));
        }
    }
}

#[test]
fn candles_loop_refuses_a_gradient_that_is_no_number() {
    let x = var(&[0.0, 1.0], DType::F32);
    let mut optimizer = Sgd::new(vec![x.clone()], SgdConfig::default()).unwrap();
    // The root of 0 has an infinite slope; the loss is finite.
    assert!(optimizer.backward_step(&x.sqrt().unwrap().sum_all().unwrap()).is_err());
    assert_eq!(values(&x), [0.0, 1.0]);
}

#[test]
fn a_loss_may_have_one_element_in_any_shape_and_no_more() {
    let x = var(&[1.0], DType::F32);
    let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig::default()).unwrap();
    optimizer.backward_step(&x.sqr().unwrap()).unwrap();
    optimizer.backward_step(&x.sqr().unwrap().reshape((1, 1)).unwrap()).unwrap();
    let y = var(&[1.0, 2.0], DType::F32);
    for error in [
        DecGd::new(vec![y.clone()], DecGdConfig::default())
            .unwrap()
            .backward_step(&y.sqr().unwrap())
            .unwrap_err(),
        Sgd::new(vec![y.clone()], SgdConfig::default())
            .unwrap()
            .backward_step(&y.sqr().unwrap())
            .unwrap_err(),
    ] {
        assert!(error.to_string().contains("expected a loss of one element, found shape [2]"), "{error}");
    }
    assert_eq!(values(&y), [1.0, 2.0]);
}

#[test]
fn a_loss_that_is_no_number_is_called_that() {
    let x = var(&[-1.0], DType::F32);
    let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig::default()).unwrap();
    let error = optimizer.backward_step(&x.log().unwrap().sum_all().unwrap()).unwrap_err().to_string();
    assert!(error.contains("loss is NaN") && !error.contains("larger c"), "{error}");
}

#[test]
fn groups_follow_the_schedule_when_the_default_rate_is_zero() {
    let (x, y) = (var(&[1.0], DType::F64), var(&[1.0], DType::F64));
    let registry = Registry::builtin();
    let params = vec![("x".into(), x.clone()), ("y".into(), y.clone())];
    let groups = [Group::new("y").set("lr", 0.5)];
    let mut optimizer =
        registry.get("sgd").unwrap().build(params, &map(json!({"lr": 0.0})), &groups).unwrap();
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[1.0], DType::F64));
    grads.insert(&y, tensor(&[1.0], DType::F64));
    optimizer.step(&grads, &StepContext::new().factor(0.5)).unwrap();
    assert_eq!((values(&x), values(&y)), (vec![1.0], vec![0.75]));
}

#[test]
fn a_group_with_a_momentum_of_its_own_keeps_it() {
    // One step from a momentum of 1 shows what it was multiplied by.
    let run = |context: StepContext| {
        let (x, y) = (var(&[0.0], DType::F64), var(&[0.0], DType::F64));
        let registry = Registry::builtin();
        let params = vec![("x".into(), x.clone()), ("y".into(), y.clone())];
        let groups = [Group::new("y").set("momentum", 0.25)];
        let config = map(json!({"lr": 1.0, "momentum": 0.5}));
        let mut optimizer = registry.get("sgdm").unwrap().build(params, &config, &groups).unwrap();
        for gradient in [-1.0, 0.0] {
            let mut grads = GradStore::default();
            grads.insert(&x, tensor(&[gradient], DType::F64));
            grads.insert(&y, tensor(&[gradient], DType::F64));
            optimizer.step(&grads, &context).unwrap();
        }
        (values(&x)[0] - 1.0, values(&y)[0] - 1.0)
    };
    assert_eq!(run(StepContext::new()), (0.5, 0.25));
    assert_eq!(run(StepContext::new().momentum(0.75)), (0.75, 0.25));
    assert_eq!(run(StepContext::new().momentum_factor(0.5)), (0.25, 0.125));
}

#[test]
fn an_optional_that_is_no_number_is_refused_and_not_forgotten() {
    let config = DecGdConfig { v_floor: Some(f64::NAN), ..Default::default() };
    let error = Optim::with_params(vec![("x".into(), var(&[1.0], DType::F32))], config)
        .map(|_: DecGd| ())
        .unwrap_err();
    assert!(matches!(&error, Error::Hyperparameter { key, .. } if key == "v_floor"), "{error}");
}

#[test]
fn halves_are_accumulated_without_overflow() {
    for dtype in [DType::F16, DType::BF16] {
        let x = var(&[1.0], dtype);
        let mut sum = Accumulator::new(vec![x.clone()]);
        for _ in 0..2 {
            let mut grads = GradStore::default();
            grads.insert(&x, tensor(&[1024.0], dtype));
            sum.add(&grads, 1.0, 128.0).unwrap();
        }
        let (grads, loss) = sum.take().unwrap().unwrap();
        assert_eq!((values(grads.get(&x).unwrap()), loss), (vec![1024.0], 1.0));
    }
}

#[test]
fn a_mean_of_gradients_is_never_larger_than_they_are() {
    let (x, y) = (var(&[1.0], DType::F32), var(&[1.0], DType::F32));
    let mut mean = Accumulator::new(vec![x.clone(), y.clone()]);
    for (batch, weight) in [(0, 128.0), (1, 64.0), (2, 64.0)] {
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(&[3e38], DType::F32));
        // Of a parameter that a batch does not reach, the gradient is zero.
        if batch == 1 {
            grads.insert(&y, tensor(&[8.0], DType::F32));
        }
        mean.add(&grads, 2f64.powi(1020), weight).unwrap();
    }
    let (grads, loss) = mean.take().unwrap().unwrap();
    let x_mean = values(grads.get(&x).unwrap())[0];
    assert!((x_mean / 3e38 - 1.0).abs() < 1e-6, "{x_mean}");
    assert_eq!((values(grads.get(&y).unwrap()), loss), (vec![2.0], 2f64.powi(1020)));
}

#[test]
fn a_weight_that_is_none_is_refused_and_changes_nothing() {
    let x = var(&[1.0], DType::F32);
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[2.0], DType::F32));
    let mut mean = Accumulator::new(vec![x.clone()]);
    mean.add(&grads, 1.0, 0.0).unwrap();
    assert!(mean.take().unwrap().is_none(), "nothing that counts was added");
    mean.add(&grads, 1.0, 1.0).unwrap();
    for weight in [-1.0, f64::NAN, f64::INFINITY] {
        let error = mean.add(&grads, 5.0, weight).unwrap_err().to_string();
        assert!(error.contains("weight") && error.contains("at least 0"), "{error}");
    }
    let (grads, loss) = mean.take().unwrap().unwrap();
    assert_eq!((values(grads.get(&x).unwrap()), loss), (vec![2.0], 1.0));
}

#[test]
fn the_first_gradient_that_is_not_finite_is_named_whatever_its_size_and_dtype() {
    let sizes = [3, 100_000, 1, 70_000, 5];
    for bad in 0..sizes.len() {
        let names = ["a", "b", "c", "d", "e"];
        let dtypes = [DType::F32, DType::F32, DType::F16, DType::BF16, DType::F64];
        let of = |i: usize| Var::zeros(sizes[i], dtypes[i], &Device::Cpu).unwrap();
        let params: Vec<(String, Var)> =
            names.iter().enumerate().map(|(i, n)| (n.to_string(), of(i))).collect();
        let mut grads = GradStore::default();
        for (i, (_, var)) in params.iter().enumerate() {
            // The last element of each from the bad one on.
            let last = if i >= bad { f64::NAN } else { 1.0 };
            let mut data = vec![1.0; sizes[i]];
            data[sizes[i] - 1] = last;
            grads.insert(var, tensor(&data, dtypes[i]));
        }
        let mut sgd = Sgd::with_params(params.clone(), SgdConfig::default()).unwrap();
        let error = sgd.step_with(&grads, &StepContext::new()).unwrap_err();
        assert!(matches!(&error, Error::GradientNotFinite(name) if name == names[bad]), "{error}");
        assert!(params.iter().all(|(_, var)| values(var).iter().all(|x| *x == 0.0)));
    }
}

#[test]
fn state_saved_by_position_is_not_loaded_in_silence() {
    let vars = [var(&[1.0], DType::F32), var(&[2.0], DType::F32)];
    let loss = |vars: &[Var]| -> Tensor {
        (vars[0].sqr().unwrap() + vars[1].affine(3.0, 0.0).unwrap()).unwrap().sum_all().unwrap()
    };
    let mut first = Adam::new(vars.to_vec(), AdamConfig::default()).unwrap();
    first.backward_step(&loss(&vars)).unwrap();
    let saved = first.state_dict().unwrap();
    // As `all_vars` may well give them the next time.
    let mut second = Adam::new(vec![vars[1].clone(), vars[0].clone()], AdamConfig::default()).unwrap();
    let error = second.load_state_dict(&saved).unwrap_err().to_string();
    assert!(error.contains("from_varmap"), "{error}");
}

#[test]
fn state_of_other_hyperparameters_is_refused_with_the_differences() {
    let build = |config| {
        Registry::builtin().build("adam", vec![("x".into(), var(&[1.0], DType::F32))], &map(config)).unwrap()
    };
    let saved = build(json!({"beta1": 0.8, "eps": 1e-6})).state_dict().unwrap();
    let error = build(json!({})).load_state_dict(&saved).unwrap_err().to_string();
    assert!(
        error.contains("beta1: expected 0.9, found 0.8") && error.contains("eps: expected 1e-8, found 1e-6"),
        "{error}"
    );
}

#[test]
fn a_rate_that_was_set_is_part_of_the_state() {
    let build = || {
        Registry::builtin()
            .build("adam", vec![("x".into(), var(&[1.0], DType::F32))], &Default::default())
            .unwrap()
    };
    let mut first = build();
    first.set_lr(0.0625);
    let mut second = build();
    second.load_state_dict(&first.state_dict().unwrap()).unwrap();
    assert_eq!(second.lr(), 0.0625);
}

#[test]
fn what_has_one_axis_does_not_decay() {
    let names = [
        ("h.0.ln_1.weight", 1),
        ("model.layers.0.input_layernorm.weight", 1),
        ("encoder.LayerNorm.weight", 1),
        ("rms_norm.weight", 1),
        ("attn.q_norm.weight", 1),
        ("layer1.0.downsample.1.weight", 1),
        ("fc.bias", 1),
        ("fc.weight", 2),
        ("conv.weight", 4),
    ];
    let params: Vec<(String, Var)> = names
        .iter()
        .map(|(name, rank)| {
            let shape = vec![2; *rank];
            (name.to_string(), Var::zeros(shape, DType::F32, &Device::Cpu).unwrap())
        })
        .collect();
    let registry = Registry::builtin();
    let optimizer =
        registry.get("adamw").unwrap().build(params, &Default::default(), &[Group::no_decay()]).unwrap();
    let decaying: Vec<_> =
        optimizer.params().into_iter().filter(|p| p.group.is_none()).map(|p| p.name).collect();
    assert_eq!(decaying, ["fc.weight", "conv.weight"]);
}
