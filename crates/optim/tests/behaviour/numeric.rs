//! Closed-loop runs on the functions of the paper: the gradient is ours too.
use crate::common::{values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use serde_json::{Map, Value};
use taper_optim::{Registry, StepContext};

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Value and gradient at `x`.
fn evaluate(function: &str, x: &[f64]) -> (f64, Vec<f64>) {
    let mut f = 0.0;
    let mut gradient = Vec::with_capacity(x.len());
    match function {
        "powell" => {
            for x in x.as_chunks::<4>().0 {
                let (a, b, c, d) = (x[0] + 10.0 * x[1], x[2] - x[3], x[1] - 2.0 * x[2], x[0] - x[3]);
                f += a * a + 5.0 * b * b + c.powi(4) + 10.0 * d.powi(4);
                let (c3, d3) = (4.0 * c.powi(3), 40.0 * d.powi(3));
                gradient.extend([2.0 * a + d3, 20.0 * a + c3, 10.0 * b - 2.0 * c3, -10.0 * b - d3]);
            }
        }
        _ => {
            // As printed in the paper the second coordinate is drawn to 1, in the standard form the first.
            let standard = function == "rosenbrock_standard";
            for x in x.as_chunks::<2>().0 {
                let valley = x[0] * x[0] - x[1];
                let drawn = if standard { x[0] - 1.0 } else { x[1] - 1.0 };
                f += 100.0 * valley * valley + drawn * drawn;
                let pull = 2.0 * drawn;
                let (first, second) = if standard { (pull, 0.0) } else { (0.0, pull) };
                gradient.extend([400.0 * valley * x[0] + first, -200.0 * valley + second]);
            }
        }
    }
    (f, gradient)
}

struct Loop {
    x: Var,
    optimizer: Box<dyn taper_optim::Optimizer>,
}

impl Loop {
    fn new(optimizer: &str, start: &[f64], mut config: Map<String, Value>, lr: f64) -> Self {
        let x = var(start, DType::F64);
        config.insert("lr".into(), lr.into());
        let optimizer = Registry::builtin().build(optimizer, vec![("x".into(), x.clone())], &config).unwrap();
        Self { x, optimizer }
    }

    fn step(&mut self, gradient: Vec<f64>, loss: f64, lr: f64) {
        let mut grads = GradStore::default();
        let gradient = Tensor::from_vec(gradient, self.x.shape(), self.x.device()).unwrap();
        grads.insert(&self.x, gradient);
        self.optimizer.step(&grads, &StepContext::new().loss(loss).lr(lr)).unwrap();
    }
}

fn record() -> Value {
    serde_json::from_str(include_str!("../golden/numeric.json")).unwrap()
}

#[test]
fn powell_and_rosenbrock_follow_their_record_to_1e_11() {
    let record = record();
    let cases = record["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 18);
    for case in cases {
        let (function, n) = (case["function"].as_str().unwrap(), case["n"].as_u64().unwrap() as usize);
        let start = match &case["start"] {
            Value::Array(_) => numbers(&case["start"]),
            _ => numbers(&case["start_tile"]).into_iter().cycle().take(n).collect(),
        };
        let (name, lr) = (case["optimizer"].as_str().unwrap(), case["lr"].as_f64().unwrap());
        let config = case["hyperparameters"].as_object().unwrap().clone();
        let mut run = Loop::new(name, &start, config, lr);
        let iterations: Vec<usize> = numbers(&case["iterations"]).into_iter().map(|t| t as usize).collect();
        for t in 1..=iterations[iterations.len() - 1] {
            let x = values(&run.x);
            let (f, gradient) = evaluate(function, &x);
            if let Some(at) = iterations.iter().position(|i| *i == t) {
                let place = format!("{function} n={n} {name} x_{t}");
                // The record itself is within 6.1e-14 of a run in extended precision.
                let relative = |a: f64, b: f64| (a - b).abs() / b.abs().max(1e-3);
                assert!(relative(f, numbers(&case["f"])[at]) < 1e-11, "{place}: f = {f}");
                for (x, expected) in x.iter().zip(numbers(&case["x_first_four"][at])) {
                    assert!(relative(*x, expected) < 1e-11, "{place}: {x} instead of {expected}");
                }
            }
            run.step(gradient, f, lr);
        }
    }
}

#[test]
fn the_toy_table_holds() {
    let record = record();
    let cases = record["toy"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let (a, b) = (case["a"].as_f64().unwrap(), case["b"].as_f64().unwrap());
        let iterates: Vec<Vec<f64>> = case["x"].as_array().unwrap().iter().map(numbers).collect();
        let config = case["hyperparameters"].as_object().unwrap().clone();
        let lrs = numbers(&case["lrs"]);
        let mut run = Loop::new("decgd", &iterates[0], config, lrs[0]);
        // A handful of operations on numbers of the order of 1, five times.
        let close = |found: &[f64], expected: &[f64]| {
            found.iter().zip(expected).all(|(found, expected)| (found - expected).abs() < 1e-14)
        };
        for (t, (lr, loss)) in lrs.iter().zip(numbers(&case["losses"])).enumerate() {
            let x = values(&run.x);
            assert!(close(&x, &iterates[t]), "x_{}: {x:?} instead of {:?}", t + 1, iterates[t]);
            let f = (a * x[0] * x[0] + b * x[1] * x[1]) / 2.0;
            assert!(close(&[f], &[loss]));
            run.step(vec![a * x[0], b * x[1]], f, *lr);
        }
        assert!(close(&values(&run.x), &iterates[lrs.len()]));
        let state = run.optimizer.state_dict().unwrap().tensors;
        assert!(close(&values(&state["x.m"]), &numbers(&case["m_last"])));
        assert!(close(&values(&state["x.v"]), &numbers(&case["v_last"])));
        let v_min = state.get("x.v_min").unwrap_or(&state["x.v"]);
        assert!(close(&values(v_min), &numbers(&case["v_star_last"])));
    }
}
