//! What the microscope sees of optimizers whose steps are known.
use crate::common::{bits, map, noise, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use taper_optim::{Microscope, Optimizer, Registry, Seen, Shadow, Spread, StepContext, nearest};

fn params(dtype: DType) -> Vec<(String, Var)> {
    let start = |n: usize, offset: usize| (0..n).map(|i| noise(3, 0, offset + i)).collect::<Vec<f64>>();
    let matrix = tensor(&start(60, 0), dtype).reshape((6, 10)).unwrap();
    vec![("w".into(), Var::from_tensor(&matrix).unwrap()), ("b".into(), var(&start(7, 100), dtype))]
}

/// Gradients of a step, from noise.
fn grads(params: &[(String, Var)], step: usize) -> GradStore {
    let mut grads = GradStore::default();
    for (i, (_, var)) in params.iter().enumerate() {
        let of = |at: usize| noise(5, step, 1000 * i + at) + 0.5 * noise(5, 0, 1000 * i + at);
        let grad: Vec<f64> = (0..var.elem_count()).map(of).collect();
        grads.insert(var, tensor(&grad, var.dtype()).reshape(var.shape()).unwrap());
    }
    grads
}

/// An optimizer with a microscope over it.
struct Watched {
    params: Vec<(String, Var)>,
    optimizer: Box<dyn Optimizer>,
    microscope: Microscope,
}

impl Watched {
    fn new(name: &str, config: Value, dtype: DType) -> Self {
        let params = params(dtype);
        let optimizer = Registry::builtin().build(name, params.clone(), &map(config)).unwrap();
        let shadow = Shadow::of(&optimizer.config(), optimizer.needs_loss());
        Self { microscope: Microscope::new(params.clone(), shadow).unwrap(), params, optimizer }
    }

    fn step(&mut self, step: usize, context: &StepContext) -> Seen {
        let grads = grads(&self.params, step);
        self.microscope.before().unwrap();
        self.optimizer.step(&grads, context).unwrap();
        self.microscope.after(&grads, context).unwrap()
    }

    /// The last look after some steps.
    fn steps(&mut self, count: usize) -> Seen {
        let context = |step: usize| StepContext::new().loss(1.0 + 0.5 * noise(9, step, 0));
        (0..count).map(|step| self.step(step, &context(step))).last().unwrap()
    }
}

fn nearest_of(seen: &Seen) -> (&'static str, f64, f64) {
    let all =
        |name: &str| Some((*seen.all.get(&format!("r2/{name}"))?, *seen.all.get(&format!("rate/{name}"))?));
    nearest(all).unwrap()
}

#[test]
fn a_simple_optimizer_is_nearest_to_itself_at_its_own_rate() {
    let cases = [
        ("sgd", json!({"lr": 0.03}), "gd", 0.03),
        ("sgdm", json!({"lr": 0.02, "momentum": 0.8}), "sgdm", 0.02),
        ("adam", json!({"lr": 0.004, "beta1": 0.85, "beta2": 0.97, "eps": 1e-6}), "adam", 0.004),
    ];
    for (name, config, expected, rate) in cases {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let seen = Watched::new(name, config.clone(), dtype).steps(6);
            let (nearest, r2, fitted) = nearest_of(&seen);
            assert_eq!(nearest, expected, "{name}");
            assert!(1.0 - r2 < tolerance, "{name}: R² {r2}");
            assert!((fitted / rate - 1.0).abs() < tolerance, "{name}: {fitted}, not {rate}");
            // Every parameter says the same.
            for (param, figures) in &seen.params {
                let fitted = figures[&format!("rate/{expected}")];
                assert!((fitted / rate - 1.0).abs() < 2.0 * tolerance, "{param}: {fitted}");
            }
        }
    }
}

#[test]
fn decgd_with_v_frozen_is_momentum_on_the_root_of_the_loss() {
    let mut watched =
        Watched::new("decgd", json!({"lr": 0.05, "freeze_v": true, "x0": "first_iterate"}), DType::F64);
    let seen = watched.steps(8);
    let v = (1.0 + 0.5 * noise(9, 0, 0) + 1.0f64).sqrt();
    let (r2, rate) = (seen.all["r2/root"], seen.all["rate/root"]);
    assert!(1.0 - r2 < 1e-12 && (rate / (2.0 * 0.05 * v) - 1.0).abs() < 1e-12, "{r2} {rate}");
    // The loss changes from step to step: as plain momentum it is a good fit and not all of it.
    assert!(seen.all["r2/sgdm"] > 0.95 && seen.all["r2/sgdm"] < 1.0 - 1e-6, "{}", seen.all["r2/sgdm"]);
    let followers = watched.optimizer.followers();
    assert_eq!(followers.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["w", "b"]);
    let all: Vec<_> = followers.iter().map(|(_, values)| *values).collect();
    let spread = Spread::of(&all, v).unwrap();
    assert_eq!((spread.elements, spread.min, spread.max), (67, v, v));
    assert_eq!((spread.rms_error, spread.negative), (0.0, 0.0));
}

#[test]
fn an_optimizer_without_momentum_is_looked_at_without_momentum() {
    // Adam with β₁ = 0 and AEGD among them, and what stands inside another.
    let cases = [
        ("sgd", json!({"lr": 0.03})),
        ("sgdm", json!({"lr": 0.03, "momentum": 0.0})),
        ("adam", json!({"lr": 0.03, "beta1": 0.0})),
        ("adagrad", json!({"lr": 0.03})),
        ("aegd", json!({"lr": 0.03})),
        ("lookahead", json!({"k": 5, "inner": {"name": "sgd", "lr": 0.03}})),
    ];
    for (name, config) in cases {
        let mut watched = Watched::new(name, config, DType::F64);
        assert_eq!(watched.microscope.shadow().momentum, 0.0, "{name}");
        let seen = watched.steps(4);
        // Momentum without any is the gradient.
        assert_eq!(seen.all["r2/sgdm"], seen.all["r2/gd"], "{name}");
        assert_eq!(seen.all["rate/sgdm"], seen.all["rate/gd"], "{name}");
        assert_ne!(nearest_of(&seen).0, "sgdm");
    }
    let rates = Watched::new("sgd", json!({"lr": 0.03}), DType::F64).steps(4).all;
    assert!((rates["rate_p01"] / 0.03 - 1.0).abs() < 1e-12 && (rates["rate_p99"] / 0.03 - 1.0).abs() < 1e-12);
    let inside =
        Watched::new("lookahead", json!({"inner": {"name": "adam", "lr": 0.01, "beta1": 0.7}}), DType::F64);
    assert_eq!(inside.microscope.shadow().momentum, 0.7);
}

#[test]
fn nesterovs_momentum_is_momentum_descent_that_looks_ahead() {
    for (name, config) in [
        ("nag", json!({"lr": 0.03, "momentum": 0.8})),
        ("sgdm", json!({"lr": 0.03, "momentum": 0.8, "nesterov": true})),
        ("lookahead", json!({"k": 9, "inner": {"name": "nag", "lr": 0.03, "momentum": 0.8}})),
    ] {
        let mut watched = Watched::new(name, config, DType::F64);
        let seen = watched.steps(6);
        let (nearest, r2, rate) = nearest_of(&seen);
        assert_eq!(nearest, "sgdm", "{name}");
        assert!(1.0 - r2 < 1e-12 && (rate / 0.03 - 1.0).abs() < 1e-12, "{name}: {r2} {rate}");
        assert!((watched.microscope.shadow().threshold() - 3.6 / 2.6).abs() < 1e-15, "{name}");
    }
    // Without looking ahead a fit is what is left.
    let config = json!({"lr": 0.03, "momentum": 0.8});
    let heavy = Watched::new("sgdm", config, DType::F64);
    assert!((heavy.microscope.shadow().threshold() - 3.6).abs() < 1e-15);
}

/// A shape, and the rate of each of its elements.
type Pattern = (&'static [usize], fn(usize) -> f64);

#[test]
fn rates_of_a_sample_are_those_of_the_tensor_whatever_its_pattern() {
    // Rates by kernel position, column, row and both; the sizes are such that even strides would see few of them.
    let patterns: [Pattern; 5] = [
        (&[64, 32, 3, 3], |i| 1.0 + (i % 9) as f64),
        (&[100, 784], |i| 1.0 + (i % 784) as f64),
        (&[784, 100], |i| 1.0 + (i / 100) as f64),
        (&[512, 512], |i| if i % 512 < 5 { 50.0 } else { 1.0 + (i % 8) as f64 }),
        (&[37, 40], |i| 1.0 + (i % 2) as f64),
    ];
    let mut everything = Vec::new();
    let (mut params, mut grads) = (Vec::new(), GradStore::default());
    for (place, (shape, _)) in patterns.iter().enumerate() {
        let zeros = Tensor::zeros(*shape, DType::F64, &Device::Cpu).unwrap();
        let var = Var::from_tensor(&zeros).unwrap();
        grads.insert(&var, zeros.ones_like().unwrap());
        params.push((place.to_string(), var));
    }
    let shadow = Shadow { momentum: 0.0, ..Shadow::default() };
    let mut microscope = Microscope::new(params.clone(), shadow).unwrap();
    microscope.before().unwrap();
    let mut each = Vec::new();
    for ((shape, rate), (_, var)) in patterns.iter().zip(&params) {
        let rates: Vec<f64> = (0..var.elem_count()).map(rate).collect();
        let down: Vec<f64> = rates.iter().map(|rate| -rate).collect();
        var.set(&Tensor::from_vec(down, *shape, &Device::Cpu).unwrap()).unwrap();
        everything.extend(rates.iter().copied());
        each.push(rates);
    }
    let seen = microscope.after(&grads, &StepContext::new()).unwrap();
    let near = |mut rates: Vec<f64>, figures: &taper_optim::Figures, what: &str| {
        rates.sort_by(f64::total_cmp);
        let at = |q: f64| rates[((q.clamp(0.0, 1.0) * rates.len() as f64) as usize).min(rates.len() - 1)];
        for (name, q) in [
            ("rate_p01", 0.01),
            ("rate_p25", 0.25),
            ("rate_p50", 0.5),
            ("rate_p75", 0.75),
            ("rate_p99", 0.99),
        ] {
            // Three standard deviations of a quantile's rank in a sample of 1024.
            let off = 3.0 * (q * (1.0 - q) / 1024f64).sqrt();
            let (low, high) = (at(q - off), at(q + off));
            let found = figures[name];
            assert!((low..=high).contains(&found), "{what}, {name}: {found}, not {low} to {high}");
        }
    };
    for (place, rates) in each.into_iter().enumerate() {
        near(rates, &seen.params[&place.to_string()], &format!("pattern {place}"));
    }
    near(everything, &seen.all, "all");
}

#[test]
fn lion_whose_rates_are_one_goes_by_the_signs_of_momentum() {
    // With β₁ = β₂ the mean whose signs it takes is (1 - β) times the sum b.
    let config = json!({"lr": 0.004, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0});
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-4)] {
        let seen = Watched::new("lion", config.clone(), dtype).steps(6);
        let (name, r2, rate) = nearest_of(&seen);
        assert_eq!(name, "sign");
        assert!(1.0 - r2 < tolerance && (rate / 0.004 - 1.0).abs() < tolerance, "{dtype:?}: {r2} {rate}");
        assert!(seen.all["r2/sgdm"] < 0.9, "{}", seen.all["r2/sgdm"]);
    }
}

/// The vector of an optimizer that follows √(f + c), of all parameters in their order.
fn vector(watched: &Watched, buffer: &str) -> Vec<f64> {
    let state = watched.optimizer.state_dict().unwrap();
    watched.params.iter().flat_map(|(name, _)| values(&state.tensors[&format!("{name}.{buffer}")])).collect()
}

#[test]
fn what_follows_the_root_of_the_loss_is_seen_of_every_optimizer_that_has_it() {
    let cases = [
        ("aegd", json!({"lr": 0.1}), "r"),
        ("decgd", json!({"lr": 0.05}), "v"),
        ("decgd_now", json!({"lr": 0.05}), "v"),
        ("decgd_falling", json!({"lr": 0.05}), "v"),
        ("decadam", json!({"lr": 0.01}), "v"),
        ("decadam", json!({"lr": 0.01, "ams": true}), "v"),
    ];
    for (name, config, buffer) in cases {
        let mut watched = Watched::new(name, config, DType::F64);
        assert!(watched.microscope.shadow().c.is_some(), "{name}");
        watched.steps(5);
        let all = vector(&watched, buffer);
        let followers = watched.optimizer.followers();
        let seen: Vec<_> = followers.iter().map(|(_, values)| *values).collect();
        let spread = Spread::of(&seen, 1.4).unwrap();
        let (least, largest) =
            (all.iter().copied().fold(f64::MAX, f64::min), all.iter().copied().fold(f64::MIN, f64::max));
        assert_eq!((spread.elements, spread.min, spread.max), (67, least, largest), "{name}");
        assert!(least < largest, "{name}: it moves by elements");
        let square = all.iter().map(|v| (v - 1.4) * (v - 1.4)).sum::<f64>() / 67.0;
        assert!((spread.rms_error - square.sqrt()).abs() < 1e-12, "{name}");
    }
}

#[test]
fn aegds_r_falls_from_the_root_of_the_first_loss_as_its_formula_says() {
    let (lr, c) = (0.1f64, 2.0f64);
    let mut watched = Watched::new("aegd", json!({"lr": lr, "c": c}), DType::F64);
    let losses = [1.5, 0.7, 2.5, 0.1];
    let mut r = vec![(losses[0] + c).sqrt(); 67];
    for (step, loss) in losses.into_iter().enumerate() {
        let gradient: Vec<f64> = {
            let grads = grads(&watched.params, step);
            watched.params.iter().flat_map(|(_, var)| values(grads.get(var).unwrap())).collect()
        };
        let seen = watched.step(step, &StepContext::new().loss(loss));
        let root = (loss + c).sqrt();
        for (r, g) in r.iter_mut().zip(&gradient) {
            let q = g / (2.0 * root);
            *r /= 1.0 + 2.0 * lr * q * q;
        }
        let found = vector(&watched, "r");
        assert!(found.iter().zip(&r).all(|(a, b)| (a / b - 1.0).abs() < 1e-13), "step {step}");
        // A step is -2ηrq: along the gradient of the root but for what elements of r differ by.
        let (uu, ud, dd) = gradient.iter().zip(&r).fold((0.0, 0.0, 0.0), |(uu, ud, dd), (g, r)| {
            let (q, u) = (g / (2.0 * root), 2.0 * lr * r * g / (2.0 * root));
            (uu + u * u, ud + u * q, dd + q * q)
        });
        assert!((seen.all["rate/root"] / (ud / dd) - 1.0).abs() < 1e-10, "{}", seen.all["rate/root"]);
        assert!((seen.all["r2/root"] - ud * ud / (uu * dd)).abs() < 1e-10, "{}", seen.all["r2/root"]);
    }
}

#[test]
fn muon_is_nearest_to_orthogonalised_momentum_where_there_are_matrices() {
    let config = json!({"lr": 0.02, "momentum": 0.9, "nesterov": false, "weight_decay": 0.0, "rest": {"name": "sgdm", "lr": 0.01}});
    let mut watched = Watched::new("muon", config, DType::F64);
    let mut seen = watched.steps(4);
    watched.microscope.orthogonal(&grads(&watched.params, 3), &mut seen).unwrap();
    let figures = &seen.params["w"];
    // The iteration multiplies what rounding left of the momentum.
    assert!(figures["r2/orthogonal"] > 1.0 - 1e-9, "{}", figures["r2/orthogonal"]);
    assert!((figures["rate/orthogonal"] / 0.02 - 1.0).abs() < 1e-9, "{}", figures["rate/orthogonal"]);
    assert!(!seen.params["b"].contains_key("r2/orthogonal"));
    assert!(seen.params["b"]["r2/sgdm"] > 1.0 - 1e-12);
    let (all, part) = (seen.all["r2/orthogonal"], seen.all["update_norm"]);
    let own = figures["update_norm"];
    assert!((all - own * own / (part * part)).abs() < 1e-9, "what it does not explain is the step of `b`");
}

#[test]
fn decay_is_told_from_the_direction() {
    let config = json!({"lr": 0.02, "beta1": 0.9, "weight_decay": 0.3});
    let seen = Watched::new("adamw", config, DType::F64).steps(5);
    let (nearest, r2, rate) = nearest_of(&seen);
    assert_eq!(nearest, "adam");
    assert!(1.0 - r2 < 1e-12 && (rate / 0.02 - 1.0).abs() < 1e-12, "{r2} {rate}");
    assert!((seen.all["decay/adam"] / (0.02 * 0.3) - 1.0).abs() < 1e-12);
}

#[test]
fn clipping_is_seen_as_the_optimizer_sees_it() {
    let mut watched = Watched::new("sgdm", json!({"lr": 0.02}), DType::F64);
    for step in 0..4 {
        let context = StepContext::new().scale(0.25 + 0.1 * step as f64).clip_value(0.2);
        let seen = watched.step(step, &context);
        assert!(1.0 - seen.all["r2/sgdm"] < 1e-12 && (seen.all["rate/sgdm"] / 0.02 - 1.0).abs() < 1e-12);
    }
}

#[test]
fn norms_ratios_and_rates_are_those_of_the_step() {
    let mut watched = Watched::new("sgdm", json!({"lr": 0.5}), DType::F64);
    let before: Vec<f64> = watched.params.iter().flat_map(|(_, var)| values(var)).collect();
    let seen = watched.steps(1);
    let after: Vec<f64> = watched.params.iter().flat_map(|(_, var)| values(var)).collect();
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let update = norm(&mut after.iter().zip(&before).map(|(a, b)| a - b));
    assert!((seen.all["update_norm"] / update - 1.0).abs() < 1e-13);
    let weight = norm(&mut before.iter().copied());
    assert!((seen.all["update_ratio"] / (update / weight) - 1.0).abs() < 1e-13);
    for name in ["rate_p01", "rate_p50", "rate_p99"] {
        assert!((seen.all[name] - 0.5).abs() < 1e-12, "{name}: {}", seen.all[name]);
    }
    let cosine = |seen: &Seen| (seen.all["cos/gd"], seen.all["cos/sgdm"]);
    assert_eq!(cosine(&seen), (1.0, 1.0));
}

#[test]
fn moments_that_are_saved_and_loaded_go_on_to_the_bit() {
    for dtype in [DType::F32, DType::F64] {
        let config = || json!({"lr": 0.05});
        let mut whole = Watched::new("decgd", config(), dtype);
        let mut first = Watched::new("decgd", config(), dtype);
        whole.steps(5);
        first.steps(3);
        let state = first.microscope.state().unwrap();
        let mut second = Watched::new("decgd", config(), dtype);
        second.steps(2);
        second.microscope.load(&state).unwrap();
        let again = second.microscope.state().unwrap();
        assert_eq!(state.keys().collect::<Vec<_>>(), again.keys().collect::<Vec<_>>());
        assert!(state.iter().all(|(name, t)| bits(t) == bits(&again[name])));
        // Another optimizer's, or damaged.
        let mut other = Watched::new("adam", json!({}), dtype);
        let mut less = state.clone();
        less.remove("square/w");
        less.insert("momentum/b".into(), tensor(&[1.0], dtype));
        let error = other.microscope.load(&less).unwrap_err().to_string();
        assert!(error.contains("square/w") && error.contains("momentum/b"), "{error}");
        assert!(values(&other.microscope.state().unwrap()["momentum/w"]).iter().all(|v| *v == 0.0));
    }
}

#[test]
fn a_parameter_without_a_gradient_is_left_alone() {
    let mut watched = Watched::new("sgdm", json!({"lr": 0.1}), DType::F32);
    let mut part = grads(&watched.params, 0);
    part.remove(&watched.params[1].1);
    watched.microscope.before().unwrap();
    let seen = watched.microscope.after(&part, &StepContext::new()).unwrap();
    assert_eq!(seen.params.keys().collect::<Vec<_>>(), ["w"]);
    // Nothing was stepped: no update, and nothing to fit.
    assert_eq!(seen.all["update_norm"], 0.0);
    assert!(!seen.all.contains_key("r2/sgdm"));
}

#[test]
fn what_it_cannot_look_at_is_refused() {
    let half = var(&[1.0], DType::BF16);
    let error = Microscope::new(vec![("x".into(), half)], Shadow::default()).unwrap_err().to_string();
    assert!(error.contains("f32 or f64") && error.contains("`x`"), "{error}");
}

/// ½ Σ λ (x - 1)², whose Hessian has the eigenvalues λ.
fn quadratic(x: &Var, eigenvalues: &Tensor) -> GradStore {
    let away = (x.as_tensor() - 1.0).unwrap();
    let loss = ((away.sqr().unwrap() * eigenvalues).unwrap().sum_all().unwrap() * 0.5).unwrap();
    loss.backward().unwrap()
}

#[test]
fn sharpness_is_the_largest_eigenvalue_and_leaves_the_parameters_where_they_are() {
    for (dtype, tolerance) in [(DType::F64, 0.01), (DType::F32, 0.01)] {
        let spectrum: Vec<f64> = (0..30).map(|i| if i == 11 { 25.0 } else { 0.3 * f64::from(i) }).collect();
        let (x, eigenvalues) = (var(&[0.5; 30], dtype), tensor(&spectrum, dtype));
        let microscope = {
            let mut microscope = Microscope::new(vec![("x".into(), x.clone())], Shadow::default()).unwrap();
            microscope.before().unwrap();
            microscope
        };
        // Where the step led does not matter: the Hessian is taken where it began.
        x.set(&tensor(&[7.0; 30], dtype)).unwrap();
        let before = bits(&x);
        let mut start = |_: &str, values: &mut [f64]| {
            values.iter_mut().enumerate().for_each(|(i, value)| *value = noise(1, 1, i));
        };
        let found =
            microscope.sharpness(&mut start, &mut || Ok(quadratic(&x, &eigenvalues))).unwrap().unwrap();
        assert!((found.value / 25.0 - 1.0).abs() < tolerance, "{dtype:?}: {found:?}");
        assert_eq!(bits(&x), before);
        // Also when a gradient cannot be had.
        let mut calls = 0;
        let failed = microscope.sharpness(&mut start, &mut || {
            calls += 1;
            match calls {
                3 => Err(candle_core::Error::msg("no more").into()),
                _ => Ok(quadratic(&x, &eigenvalues)),
            }
        });
        assert!(failed.is_err());
        assert_eq!(bits(&x), before);
    }
}

#[test]
fn slopes_along_a_step_are_derivatives() {
    let (x, eigenvalues) = (var(&[0.0, 3.0], DType::F64), tensor(&[2.0, 4.0], DType::F64));
    let mut microscope = Microscope::new(vec![("x".into(), x.clone())], Shadow::default()).unwrap();
    microscope.before().unwrap();
    let at_start = quadratic(&x, &eigenvalues);
    x.set(&Tensor::new(&[0.5, 1.0], &Device::Cpu).unwrap()).unwrap();
    // g = (-2, 8) and (-1, 0), u = (0.5, -2).
    assert_eq!(microscope.slope(&at_start).unwrap(), -17.0);
    assert_eq!(microscope.slope(&quadratic(&x, &eigenvalues)).unwrap(), -0.5);
}
