//! DecGD against the paper's algorithm taken literally, and its invariants.
use crate::common::{bits, map, noise, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Var};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use taper_kernels::compare::largest_difference;
use taper_optim::{Domain, Optimizer, Registry, Schedule, StepContext};

/// One step's share of a run: gradient, loss, rate, momentum.
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

/// The algorithm as printed, with the previous iterate stored: the second copy of the arithmetic that the tests may
/// have. Returns the iterates and the last v.
fn literal(start: &[f64], steps: &[Step], config: &Map<String, Value>) -> (Vec<Vec<f64>>, Vec<f64>) {
    let number = |key: &str| config.get(key).and_then(Value::as_f64);
    let is = |key: &str, value: &str| config.get(key).and_then(Value::as_str) == Some(value);
    let flag = |key: &str| config.get(key).and_then(Value::as_bool) == Some(true);
    let lambda = number("weight_decay").unwrap_or(0.0);
    let lambda_if = |decays: &[&str]| if decays.iter().any(|d| is("decay", d)) { lambda } else { 0.0 };
    let mut iterates = Vec::new();
    let mut x = start.to_vec();
    let v0 = (steps[0].loss + 1.0).sqrt();
    let mut previous = if is("x0", "first_iterate") { x.clone() } else { vec![0.0; x.len()] };
    let (mut m, mut v) = (vec![0.0; x.len()], vec![v0; x.len()]);
    let mut v_min = vec![if is("ams_init", "inf") { f64::INFINITY } else { v0 }; x.len()];
    for step in steps {
        let root = (step.loss + 1.0).sqrt();
        let before = x.clone();
        for i in 0..x.len() {
            let g = step.gradient[i] + lambda_if(&["l2"]) * x[i];
            let q = g / (2.0 * root) + lambda_if(&["paper", "coupled_q"]) * x[i];
            m[i] = step.momentum * m[i] + q;
            if !flag("freeze_v") {
                v[i] += m[i] * (x[i] - previous[i]);
            }
            v[i] = v[i].max(number("v_floor").unwrap_or(f64::NEG_INFINITY));
            let used = match config.get("bound").and_then(Value::as_str) {
                Some("now") => v[i].min(root),
                Some("falling") if v[i] > root => root * root / v[i],
                _ => v[i],
            };
            v_min[i] = if flag("ams") { v_min[i].min(used) } else { used };
            x[i] -= step.lr * (2.0 * v_min[i] * m[i] + lambda_if(&["paper", "decoupled"]) * x[i]);
        }
        previous = before;
        iterates.push(x.clone());
    }
    (iterates, v)
}

fn build(x: &Var, config: &Map<String, Value>) -> Box<dyn Optimizer> {
    Registry::builtin().build("decgd", vec![("x".into(), x.clone())], config).unwrap()
}

fn take(optimizer: &mut dyn Optimizer, x: &Var, step: &Step) {
    let mut grads = GradStore::default();
    grads.insert(x, tensor(&step.gradient, x.dtype()));
    let context = StepContext::new().loss(step.loss).lr(step.lr).momentum(step.momentum);
    optimizer.step(&grads, &context).unwrap();
}

fn ours(start: &[f64], steps: &[Step], config: &Map<String, Value>) -> (Vec<Vec<f64>>, Box<dyn Optimizer>) {
    let x = var(start, DType::F64);
    let mut optimizer = build(&x, config);
    let iterates = steps.iter().map(|step| {
        take(&mut *optimizer, &x, step);
        values(&x)
    });
    (iterates.collect(), optimizer)
}

fn buffer(optimizer: &dyn Optimizer, name: &str) -> Vec<f64> {
    values(&optimizer.state_dict().unwrap().tensors[&format!("x.{name}")])
}

prop_compose! {
    fn configs()(
        decay in prop::sample::select(vec!["none", "paper", "coupled_q", "decoupled", "l2"]),
        lambda in 0.0f64..0.5,
        ams: bool,
        x0 in prop::sample::select(vec!["zero", "first_iterate"]),
        ams_init in prop::sample::select(vec!["v0", "inf"]),
        v_floor in prop::option::of(-0.5f64..1.0),
        freeze_v in prop::bool::weighted(0.2),
        bound in prop::option::of(prop::sample::select(vec!["now", "falling"])),
        previous in prop::option::weighted(0.3, Just("stored")),
    ) -> Map<String, Value> {
        let weight_decay = if decay == "none" { 0.0 } else { lambda };
        map(json!({
            "decay": decay, "weight_decay": weight_decay, "ams": ams, "x0": x0, "ams_init": ams_init,
            "v_floor": v_floor, "freeze_v": freeze_v, "bound": bound, "previous": previous,
        }))
    }
}

proptest! {
    #[test]
    fn no_previous_iterate_is_needed(seed: u64, config in configs()) {
        // Rates and momenta change at every step, so that the current instead of the previous rate in d_t shows.
        let steps = steps(seed, 30, 9);
        let start: Vec<f64> = (0..9).map(|i| noise(seed, 0, i)).collect();
        let (expected, v) = literal(&start, &steps, &config);
        let (found, optimizer) = ours(&start, &steps, &config);
        for (t, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // x_t - x_(t-1) rounds to an ulp of x in the literal form; thirty steps add up a few dozen.
            let difference = largest_difference(found, expected);
            prop_assert!(difference < 1e-12, "{config:?}: step {}: {difference:e}", t + 1);
        }
        prop_assert!(largest_difference(&buffer(&*optimizer, "v"), &v) < 1e-12);
    }

    #[test]
    fn the_first_step_is_gradient_descent_whatever_c(seed: u64, c in 0.01f64..100.0) {
        let config = map(json!({"x0": "first_iterate", "c": c}));
        let step = &steps(seed, 1, 9)[0];
        let start: Vec<f64> = (0..9).map(|i| noise(seed, 0, i)).collect();
        let (found, _) = ours(&start, std::slice::from_ref(step), &config);
        let descent: Vec<f64> = start.iter().zip(&step.gradient).map(|(x, g)| x - step.lr * g).collect();
        // 2 η √(f+c) · g/(2 √(f+c)): three roundings of numbers below 1.
        prop_assert!(largest_difference(&found[0], &descent) < 1e-15);
    }

    #[test]
    fn ams_changes_nothing_on_the_first_step_from_the_first_iterate(seed: u64, inf: bool) {
        let run = |ams: bool| {
            let init = if inf { "inf" } else { "v0" };
            let config = map(json!({"x0": "first_iterate", "ams": ams, "ams_init": init}));
            ours(&[0.5, -1.0, 2.0], &steps(seed, 1, 3), &config).0
        };
        prop_assert_eq!(run(true), run(false));
    }

    #[test]
    fn ams_is_monotone(seed: u64, single: bool) {
        let dtype = if single { DType::F32 } else { DType::F64 };
        let x = var(&(0..9).map(|i| noise(seed, 0, i)).collect::<Vec<_>>(), dtype);
        let mut optimizer = build(&x, &map(json!({"ams": true})));
        let mut last = vec![f64::INFINITY; 9];
        for step in steps(seed, 20, 9) {
            take(&mut *optimizer, &x, &step);
            let v_min = buffer(&*optimizer, "v_min");
            prop_assert!(v_min.iter().zip(&last).all(|(new, old)| new <= old));
            last = v_min;
        }
    }

    #[test]
    fn v_changes_sign_exactly_when_2_eta_m_m_exceeds_1(seed: u64, scale in 1.0f64..40.0) {
        let x = var(&[0.0; 9], DType::F64);
        let mut optimizer = build(&x, &map(json!({"x0": "first_iterate"})));
        let mut previous: Option<(Vec<f64>, Vec<f64>, f64)> = None;
        for mut step in steps(seed, 12, 9) {
            step.gradient.iter_mut().for_each(|g| *g *= scale);
            take(&mut *optimizer, &x, &step);
            let (m, v) = (buffer(&*optimizer, "m"), buffer(&*optimizer, "v"));
            if let Some((old_m, old_v, old_lr)) = previous {
                for i in 0..9 {
                    let factor = 1.0 - 2.0 * old_lr * m[i] * old_m[i];
                    prop_assert_eq!(v[i] * old_v[i] < 0.0, factor < 0.0, "factor {}", factor);
                    // The closed form v_t = v_(t-1) (1 - 2 η m_t m_(t-1)), two roundings of its terms apart.
                    let size = old_v[i].abs() * (1.0 + (1.0 - factor).abs());
                    prop_assert!((v[i] - old_v[i] * factor).abs() <= 1e-15 * size);
                }
            }
            previous = Some((m, v, step.lr));
        }
    }

    #[test]
    fn only_the_literal_x0_feels_where_the_origin_lies(seed: u64, shift in prop::sample::select(vec![-2.0, 4.0, 8.0])) {
        let run = |x0: &str, shift: f64| {
            // Multiples of 2⁻²⁰ near 1: the shift is exact.
            let start: Vec<f64> = (0..9).map(|i| (noise(seed, 0, i) * 1024.0).round() / 1024.0 + shift).collect();
            let (iterates, optimizer) = ours(&start, &steps(seed, 8, 9), &map(json!({"x0": x0})));
            let moved: Vec<f64> = iterates[7].iter().zip(&start).map(|(x, start)| x - start).collect();
            (moved, buffer(&*optimizer, "v"))
        };
        let ((here, v_here), (there, v_there)) = (run("first_iterate", 0.0), run("first_iterate", shift));
        // The state form never sees x, so that v has equal bits; moved is rounded to an ulp of the shifted x.
        prop_assert_eq!(v_here, v_there);
        prop_assert!(largest_difference(&here, &there) < 1e-13);
        prop_assert!(largest_difference(&run("zero", 0.0).1, &run("zero", shift).1) > 1e-3);
    }

    #[test]
    fn the_change_of_v_sums_to_the_product_of_m_and_the_move(seed: u64) {
        let x = var(&(0..9).map(|i| noise(seed, 0, i)).collect::<Vec<_>>(), DType::F64);
        let mut optimizer = build(&x, &Map::new());
        let mut before: Option<(Vec<f64>, Vec<f64>)> = None;
        for step in steps(seed, 10, 9) {
            let here = values(&x);
            take(&mut *optimizer, &x, &step);
            let (m, v) = (buffer(&*optimizer, "m"), buffer(&*optimizer, "v"));
            if let Some((there, old_v)) = before {
                let product: f64 = (0..9).map(|i| m[i] * (here[i] - there[i])).sum();
                let change: f64 = (0..9).map(|i| v[i] - old_v[i]).sum();
                // Differences of numbers near 1 and 2, nine of them.
                prop_assert!((product - change).abs() < 1e-14);
            }
            before = Some((here, v));
        }
    }
}

#[test]
fn without_momentum_and_with_v_at_the_root_it_is_gradient_descent() {
    // A constant loss keeps √(f+c) at v_0, and `freeze_v` keeps v there.
    let config = map(json!({"freeze_v": true, "x0": "first_iterate"}));
    let mut steps = steps(5, 20, 9);
    steps.iter_mut().for_each(|step| (step.loss, step.momentum) = (3.0, 0.0));
    let start = vec![0.25; 9];
    let (found, _) = ours(&start, &steps, &config);
    let mut x = start;
    for (step, found) in steps.iter().zip(found) {
        x.iter_mut().zip(&step.gradient).for_each(|(x, g)| *x -= step.lr * g);
        // √4 is exact, so that scaling by it and back is too.
        assert_eq!(found, x);
    }
}

#[test]
fn a_change_of_rate_reaches_v_one_step_later() {
    // Two runs that differ in the rate of step 3 only.
    let run = |third: f64| {
        let mut steps = steps(6, 4, 5);
        steps[2].lr = third;
        let x = var(&[0.5, -1.0, 2.0, 0.0, 1.0], DType::F64);
        let mut optimizer = build(&x, &Map::new());
        let mut v = Vec::new();
        for step in &steps {
            take(&mut *optimizer, &x, step);
            v.push(buffer(&*optimizer, "v").into_iter().map(f64::to_bits).collect::<Vec<_>>());
        }
        v
    };
    let (a, b) = (run(0.1), run(0.01));
    assert_eq!(a[..3], b[..3]);
    assert_ne!(a[3], b[3]);
}

#[test]
fn momentum_follows_its_schedule() {
    // γλ^(t-1) of the paper's corollary and γ/√t of its remark, through the context of each step.
    for (schedule, at_third) in
        [(Schedule::Geometric { ratio: 0.5 }, 0.25), (Schedule::InverseSqrt, 1.0 / 3f64.sqrt())]
    {
        assert!((schedule.factor(2, 100) - at_third).abs() < 1e-16);
        let x = var(&[1.0], DType::F64);
        let mut optimizer = build(&x, &map(json!({"x0": "first_iterate"})));
        let mut m = 0.0;
        for t in 0..6 {
            let momentum = 0.9 * schedule.factor(t, 6);
            take(&mut *optimizer, &x, &Step { gradient: vec![1.0], loss: 0.0, lr: 1e-3, momentum });
            m = momentum * m + 0.5;
            assert_eq!(buffer(&*optimizer, "m"), [m]);
        }
    }
}

#[test]
fn decgdw_is_decgd_with_the_papers_decay() {
    let registry = Registry::builtin();
    let run = |name: &str, config: Value| {
        let x = var(&[0.5, -1.0, 2.0], DType::F32);
        let mut optimizer = registry.build(name, vec![("x".into(), x.clone())], &map(config)).unwrap();
        steps(8, 10, 3).iter().for_each(|step| take(&mut *optimizer, &x, step));
        bits(&x)
    };
    let config = json!({"decay": "paper", "weight_decay": 1e-4});
    assert_eq!(run("decgdw", json!({})), run("decgd", config));
}

/// The rate on ∇f at every step of a descent of Σ x²/2 over many coordinates, each a share of η, with the values of f + 1.
fn rates(name: &str) -> Vec<(f64, f64)> {
    let x = var(&[0.5; 64], DType::F64);
    let config = map(json!({"x0": "first_iterate", "lr": 0.01}));
    let mut optimizer = Registry::builtin().build(name, vec![("x".into(), x.clone())], &config).unwrap();
    let mut rates = Vec::new();
    for _ in 0..200 {
        let here = values(&x);
        let loss = here.iter().map(|x| x * x / 2.0).sum::<f64>();
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(&here, DType::F64));
        optimizer.step(&grads, &StepContext::new().loss(loss).probe(true)).unwrap();
        let numbers = &optimizer.probe().unwrap().params[0].numbers;
        let rate = numbers.iter().find(|(name, _)| *name == "effective_lr").unwrap().1;
        rates.push((rate / 0.01, loss + 1.0));
    }
    rates
}

#[test]
fn a_bound_keeps_the_rate_from_rising_and_falling_lets_it_fall_with_the_loss() {
    let last = |rates: &[(f64, f64)]| *rates.last().unwrap();
    for name in ["decgd", "decgd_now", "decgd_falling"] {
        let rates = rates(name);
        // v_1 = √(f + c): the first rate is η, but for the rounding of a mean over 64 and a quotient.
        assert!((rates[0].0 - 1.0).abs() < 1e-14, "{name}: {rates:?}");
        // f falls from 8 to nothing, √(f + 1) from 3 to 1.
        let (rate, above) = last(&rates);
        assert!(above < 1.01, "{name}: {above}");
        match name {
            "decgd" => assert!(rate > 2.5, "{rate}"),
            "decgd_now" => assert!(rates.iter().all(|(rate, _)| *rate <= 1.0 + 1e-14), "{rates:?}"),
            _ => {
                // While v is where it started, the rate is √((f + c)/(f₁ + c)), and v moves by no more than a few percent here.
                assert!(
                    rates.iter().all(|(rate, above)| (rate / (above / 9.0).sqrt() - 1.0).abs() < 0.1),
                    "{rates:?}"
                );
                assert!(rate < 0.4, "{rate}");
            }
        }
    }
}

#[test]
fn names_with_a_bound_are_decgd_with_that_setting() {
    let registry = Registry::builtin();
    for (name, bound) in [("decgd_now", "now"), ("decgd_falling", "falling")] {
        let run = |name: &str, config: Value| {
            let x = var(&[0.5, -1.0, 2.0], DType::F32);
            let mut optimizer = registry.build(name, vec![("x".into(), x.clone())], &map(config)).unwrap();
            steps(8, 10, 3).iter().for_each(|step| take(&mut *optimizer, &x, step));
            (bits(&x), optimizer.info().name)
        };
        assert_eq!(run(name, json!({})), run("decgd", json!({"bound": bound})));
        assert_ne!(run(name, json!({})).0, run("decgd", json!({})).0);
    }
}

#[test]
fn a_stored_iterate_sees_what_a_projection_did() {
    // A steady push against the wall: nothing moves, so that v stays; without the iterate v would follow the steps as taken.
    let run = |config: Value| {
        let x = var(&[1.0], DType::F64);
        let mut optimizer = build(&x, &map(config));
        for _ in 0..50 {
            take(&mut *optimizer, &x, &Step { gradient: vec![-1.0], loss: 0.0, lr: 0.1, momentum: 0.5 });
            Domain::Box { low: -1.0, high: 1.0 }.project([&x]).unwrap();
            assert_eq!(values(&x), [1.0]);
        }
        buffer(&*optimizer, "v")[0]
    };
    assert_eq!(run(json!({"x0": "first_iterate", "previous": "stored"})), 1.0);
    assert!(run(json!({"x0": "first_iterate"})) < 0.5);
}
