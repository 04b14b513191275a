//! Shared by the tests of the ops; no test uses all of it.
#![allow(dead_code)]
use candle_core::{DType, Device, Tensor, Var};
use taper_models::replay::relative_difference;
use taper_models::rng::Rng;

/// A variable of numbers from U(−½, ½).
pub fn var(name: &str, dims: &[usize]) -> Var {
    taper_models::poison_uncleared_memory();
    let mut rng = Rng::new(11, "test", name, 0);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| rng.uniform() - 0.5).collect();
    Var::from_vec(values, dims, &Device::Cpu).unwrap()
}

pub fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// A scalar that depends on every element of `y` with a weight of its own.
pub fn scalar(y: &Tensor) -> Tensor {
    let weights = var("weights", y.dims()).as_detached_tensor().to_dtype(y.dtype()).unwrap();
    (y * weights).unwrap().sum_all().unwrap()
}

/// Compares the gradients of `f` with central differences, for every element of every variable.
pub fn check_gradients(name: &str, vars: &[&Var], f: impl Fn() -> Tensor) {
    let loss = scalar(&f());
    let grads = taper_models::backward(&loss).unwrap();
    // The error of a central difference in f64 is about ε/h + h²: least near h = 6e-6, at some 1e-10.
    let h = 6e-6;
    for (which, var) in vars.iter().enumerate() {
        let found = values(grads.get(var).unwrap_or_else(|| panic!("{name}: no gradient {which}")));
        let start = values(var);
        let set = |v: &[f64]| var.set(&Tensor::from_slice(v, var.dims(), &Device::Cpu).unwrap()).unwrap();
        let top = found.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        for i in 0..start.len() {
            let at = |x: f64| {
                let mut moved = start.clone();
                moved[i] = x;
                set(&moved);
                values(&scalar(&f()))[0]
            };
            let expected = (at(start[i] + h) - at(start[i] - h)) / (2.0 * h);
            let error = (found[i] - expected).abs();
            assert!(error <= 1e-7 * top, "{name}: gradient {which} at {i}: {} against {expected}", found[i]);
        }
        set(&start);
    }
}

/// Asserts that two tensors differ by at most `limit` of the largest element.
pub fn near(name: &str, found: &Tensor, expected: &Tensor, limit: f64) {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let (found, expected) = (values(found), values(expected));
    let error = relative_difference(&found, &expected);
    assert!(error <= limit, "{name}: off by {error:e}");
}
