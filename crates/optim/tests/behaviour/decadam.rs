//! DecAdam against its formulas taken literally, its limits and its invariance.
use crate::common::{bits, map, noise, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Var};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use taper_kernels::compare::largest_difference;
use taper_optim::{Domain, Group, Load, Optimizer, Registry, StepContext};

/// One step's share of a run.
#[derive(Clone)]
struct Step {
    gradient: Vec<f64>,
    loss: f64,
    lr: f64,
    momentum: f64,
}

fn steps(seed: u64, count: usize, size: usize) -> Vec<Step> {
    let wobble = |t: usize, i: usize| noise(seed, t, 1000 + i);
    (1..=count)
        .map(|t| Step {
            gradient: (0..size).map(|i| noise(seed, t, i)).collect(),
            loss: 1.0 + 0.9 * wobble(t, 0),
            lr: 0.05 * (1.0 + 0.9 * wobble(t, 1)),
            momentum: 0.5 + 0.4 * wobble(t, 2),
        })
        .collect()
}

fn start(seed: u64, size: usize) -> Vec<f64> {
    (0..size).map(|i| noise(seed, 0, i)).collect()
}

fn build(name: &str, x: &Var, config: &Map<String, Value>) -> Box<dyn Optimizer> {
    Registry::builtin().build(name, vec![("x".into(), x.clone())], config).unwrap()
}

fn take(optimizer: &mut dyn Optimizer, x: &Var, step: &Step) {
    let mut grads = GradStore::default();
    grads.insert(x, tensor(&step.gradient, x.dtype()));
    let context = StepContext::new().loss(step.loss).lr(step.lr).momentum(step.momentum);
    optimizer.step(&grads, &context).unwrap();
}

fn run(name: &str, start: &[f64], steps: &[Step], config: Value, dtype: DType) -> Vec<Vec<f64>> {
    let x = var(start, dtype);
    let mut optimizer = build(name, &x, &map(config));
    let iterates = steps.iter().map(|step| {
        take(&mut *optimizer, &x, step);
        values(&x)
    });
    iterates.collect()
}

/// The formulas as they are printed, with the previous iterate stored and v divided by its start.
fn literal(start: &[f64], steps: &[Step], config: &Map<String, Value>) -> Vec<Vec<f64>> {
    let is = |key: &str, value: &str| config.get(key).and_then(Value::as_str) == Some(value);
    let flag = |key: &str| config.get(key).and_then(Value::as_bool) == Some(true);
    let number = |key: &str| config.get(key).and_then(Value::as_f64);
    let (beta2, eps, c) = (0.99, 1e-3, number("c").unwrap_or(1.0));
    let lambda_if = |decays: &[&str]| match decays.iter().any(|d| is("decay", d)) {
        true => number("weight_decay").unwrap_or(0.0),
        false => 0.0,
    };
    let n = start.len();
    let mut x = start.to_vec();
    let v0 = (steps[0].loss + c).sqrt();
    let (mut m, mut v, mut u, mut least) = (vec![0.0; n], vec![v0; n], vec![0.0; n], vec![v0; n]);
    let mut previous = x.clone();
    let mut iterates = Vec::new();
    for (t, step) in (1..).zip(steps) {
        let root = (step.loss + c).sqrt();
        let before = x.clone();
        for i in 0..n {
            let g = step.gradient[i] + lambda_if(&["l2"]) * x[i];
            let q = g / (2.0 * root) + lambda_if(&["paper", "coupled_q"]) * x[i];
            m[i] = step.momentum * m[i] + q;
            if !flag("freeze_v") {
                v[i] += m[i] * (x[i] - previous[i]);
            }
            v[i] = v[i].max(number("v_floor").unwrap_or(f64::NEG_INFINITY));
            least[i] = if flag("ams") { f64::min(least[i], v[i]) } else { v[i] };
            u[i] = beta2 * u[i] + (1.0 - beta2) * q * q;
            let mean = (1.0 - step.momentum) * m[i] / (1.0 - step.momentum.powi(t));
            let root_of_mean = (u[i] / (1.0 - f64::powi(beta2, t))).sqrt();
            let decayed = lambda_if(&["paper", "decoupled"]) * x[i];
            x[i] -= step.lr * (least[i] / v0 * mean / (root_of_mean + eps) + decayed);
        }
        previous = before;
        iterates.push(x.clone());
    }
    iterates
}

prop_compose! {
    fn configs()(
        decay in prop::sample::select(vec!["none", "paper", "coupled_q", "decoupled", "l2"]),
        lambda in 0.0f64..0.5,
        c in 0.5f64..2.0,
        ams: bool,
        v_floor in prop::option::of(-0.5f64..1.0),
        freeze_v in prop::bool::weighted(0.2),
        previous in prop::option::weighted(0.3, Just("stored")),
    ) -> Map<String, Value> {
        let previous = previous.filter(|_| !ams);
        let weight_decay = if decay == "none" { 0.0 } else { lambda };
        map(json!({
            "decay": decay, "weight_decay": weight_decay, "c": c, "ams": ams, "v_floor": v_floor, "freeze_v": freeze_v,
            "previous": previous, "beta2": 0.99, "eps": 1e-3,
        }))
    }
}

proptest! {
    #[test]
    fn no_previous_iterate_and_no_previous_denominator_is_needed(seed: u64, config in configs()) {
        // Rates and momenta change at every step, so that the current instead of the previous ones in d_t show.
        let (start, steps) = (start(seed, 9), steps(seed, 30, 9));
        let expected = literal(&start, &steps, &config);
        let found = run("decadam", &start, &steps, Value::Object(config.clone()), DType::F64);
        for (t, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // As in DecGD the literal form rounds x_t - x_(t-1) to an ulp of x; the division by √u amplifies by up to 1/ε.
            let difference = largest_difference(found, expected);
            prop_assert!(difference < 1e-11, "{config:?}: step {}: {difference:e}", t + 1);
        }
    }

    #[test]
    fn without_the_second_moment_it_is_decgd_to_the_bit(seed: u64, single: bool, config in configs()) {
        let dtype = if single { DType::F32 } else { DType::F64 };
        let (start, steps) = (start(seed, 9), steps(seed, 20, 9));
        let mut decgd = config.clone();
        decgd.retain(|key, _| !["beta2", "eps"].contains(&key.as_str()));
        decgd.insert("x0".into(), "first_iterate".into());
        let mut off = config;
        off.insert("second_moment".into(), false.into());
        let found = run("decadam", &start, &steps, Value::Object(off), dtype);
        let expected = run("decgd", &start, &steps, Value::Object(decgd), dtype);
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn with_v_frozen_it_is_adam_on_the_root_of_the_loss(seed: u64) {
        let start = start(seed, 9);
        let mut steps = steps(seed, 40, 9);
        // Adam's m is a mean, ours a sum: the same while the momentum is.
        steps.iter_mut().for_each(|step| step.momentum = 0.9);
        let found = run("decadam", &start, &steps, json!({"freeze_v": true}), DType::F64);
        steps.iter_mut().for_each(|step| {
            let root = (step.loss + 1.0).sqrt();
            step.gradient.iter_mut().for_each(|g| *g /= 2.0 * root);
        });
        let expected = run("adam", &start, &steps, json!({}), DType::F64);
        for (found, expected) in found.iter().zip(&expected) {
            // Steps of at most a few rates of 0.1; a few roundings of each of forty.
            prop_assert!(largest_difference(found, expected) < 1e-13);
        }
    }

    #[test]
    fn four_times_the_loss_and_c_is_the_same_to_the_bit(seed: u64, single: bool, ams: bool) {
        let dtype = if single { DType::F32 } else { DType::F64 };
        let (start, steps) = (start(seed, 9), steps(seed, 20, 9));
        let mut scaled = steps.clone();
        for step in &mut scaled {
            step.loss *= 4.0;
            step.gradient.iter_mut().for_each(|g| *g *= 4.0);
        }
        // √4 = 2 is exact: q, m, v and √u double, and with them ε.
        let config = |c: f64, eps: f64| json!({"c": c, "eps": eps, "ams": ams});
        let found = run("decadam", &start, &scaled, config(4.0, 2e-8), dtype);
        prop_assert_eq!(&found, &run("decadam", &start, &steps, config(1.0, 1e-8), dtype));
        // With c as it was they differ.
        prop_assert_ne!(&found, &run("decadam", &start, &scaled, config(1.0, 2e-8), dtype));
    }

    #[test]
    fn a_shift_of_the_loss_is_a_shift_of_c(seed: u64) {
        let (start, steps) = (start(seed, 9), steps(seed, 20, 9));
        let mut shifted = steps.clone();
        // Multiples of 2⁻¹⁰: the shift is exact.
        let round = |x: f64| (x * 1024.0).round() / 1024.0;
        let mut steps = steps;
        for (step, shifted) in steps.iter_mut().zip(&mut shifted) {
            step.loss = round(step.loss);
            shifted.loss = step.loss - 8.0;
        }
        let found = run("decadam", &start, &shifted, json!({"c": 9.0}), DType::F64);
        prop_assert_eq!(found, run("decadam", &start, &steps, json!({"c": 1.0}), DType::F64));
    }
}

#[test]
fn a_group_has_its_own_numbers_and_saved_state_continues_to_the_bit() {
    let registry = Registry::builtin();
    let groups = [Group::new("b").set("lr", 0.002).set("c", 3.0).set("freeze_v", true)];
    let make = || {
        let params: Vec<(String, Var)> =
            ["a", "b"].map(|name| (name.to_owned(), var(&start(3, 5), DType::F32))).to_vec();
        let optimizer = registry.get("decadam").unwrap().build(params.clone(), &Map::new(), &groups).unwrap();
        (params, optimizer)
    };
    let step = |params: &[(String, Var)], optimizer: &mut dyn Optimizer, step: &Step| {
        let mut grads = GradStore::default();
        for (_, var) in params {
            grads.insert(var, tensor(&step.gradient, DType::F32));
        }
        optimizer.step(&grads, &StepContext::new().loss(step.loss)).unwrap();
    };
    let steps = steps(4, 12, 5);
    let (params, mut optimizer) = make();
    steps[..5].iter().for_each(|s| step(&params, &mut *optimizer, s));
    let (state, there): (_, Vec<_>) =
        (optimizer.state_dict().unwrap(), params.iter().map(|p| p.1.copy().unwrap()).collect());
    // f₁ + c of each group: 0.9 wobbles apart, √(f₁ + 1) and √(f₁ + 3).
    let first = |name: &str| state.header.params[name].memory["first_root"];
    assert_eq!(first("a"), (steps[0].loss + 1.0).sqrt());
    assert_eq!(first("b"), (steps[0].loss + 3.0).sqrt());
    steps[5..].iter().for_each(|s| step(&params, &mut *optimizer, s));
    let (again, mut other) = make();
    again.iter().zip(there).for_each(|((_, var), value): (_, candle_core::Tensor)| var.set(&value).unwrap());
    other.load_state_dict_with(&state, Load::strict()).unwrap();
    steps[5..].iter().for_each(|s| step(&again, &mut *other, s));
    for ((_, a), (_, b)) in params.iter().zip(&again) {
        assert_eq!(bits(a), bits(b));
    }
    assert_ne!(bits(&params[0].1), bits(&params[1].1));
}

#[test]
fn a_stored_iterate_sees_what_a_projection_did() {
    // A steady push against the wall: nothing moves, so that v stays; without the iterate v would follow the steps as taken.
    let v = |config: Value| {
        let x = var(&[1.0], DType::F64);
        let mut optimizer = build("decadam", &x, &map(config));
        for _ in 0..50 {
            take(&mut *optimizer, &x, &Step { gradient: vec![-1.0], loss: 0.0, lr: 0.1, momentum: 0.5 });
            Domain::Box { low: -1.0, high: 1.0 }.project([&x]).unwrap();
            assert_eq!(values(&x), [1.0]);
        }
        values(&optimizer.state_dict().unwrap().tensors["x.v"])[0]
    };
    assert_eq!(v(json!({"previous": "stored"})), 1.0);
    assert!(v(json!({})) < 0.5);
    // Both would take the fourth buffer.
    let x = vec![("x".to_owned(), var(&[1.0], DType::F64))];
    let both = map(json!({"previous": "stored", "ams": true}));
    let error = Registry::builtin().build("decadam", x, &both).err().unwrap().to_string();
    assert!(error.contains("previous") && error.contains("ams"), "{error}");
}

#[test]
fn a_coordinate_without_a_gradient_stays_where_it_is() {
    // Without an ε its denominator is 0.
    let x = var(&[1.0, 2.0], DType::F32);
    let mut optimizer = build("decadam", &x, &map(json!({"eps": 0.0})));
    for t in 1..=5 {
        take(&mut *optimizer, &x, &Step { gradient: vec![0.0, 1.0], loss: t as f64, lr: 0.1, momentum: 0.9 });
    }
    let found = values(&x);
    assert_eq!(found[0], 1.0);
    assert!(found[1] < 1.9 && found[1].is_finite());
}
