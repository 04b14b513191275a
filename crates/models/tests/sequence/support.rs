//! Numbers to test with, finite differences, threads.
use candle_core::{DType, Device, Tensor, Var};
use taper_models::Result;
use taper_models::replay::{largest_difference, relative_difference};
use taper_models::rng::Rng;

/// Standard normal numbers in f64, different for every `name`.
pub fn normal(name: &str, shape: &[usize]) -> Tensor {
    taper_models::poison_uncleared_memory();
    let mut rng = Rng::new(1, "test", name, 0);
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// [`normal`] as a variable.
pub fn var(name: &str, shape: &[usize]) -> Var {
    Var::from_tensor(&normal(name, shape)).unwrap()
}

/// A scalar that depends on every element of `y` differently.
pub fn project(y: &Tensor) -> Result<Tensor> {
    Ok((y * normal("projection", y.dims()).to_dtype(y.dtype())?)?.sum_all()?)
}

/// All elements in f64.
pub fn values(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest absolute difference, over the largest magnitude of `b`; infinite where there is a NaN.
pub fn relative_error(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    relative_difference(&values(a), &values(b))
}

#[test]
fn a_nan_is_no_agreement() {
    let tensor = |values: [f64; 2]| Tensor::new(&values, &Device::Cpu).unwrap();
    assert!(relative_error(&tensor([f64::NAN, 1.0]), &tensor([1.0; 2])).is_infinite());
}

/// Compares every gradient of `loss` (f64) with a five-point difference quotient.
pub fn check_gradients(what: &str, vars: &[&Var], loss: impl Fn() -> Result<Tensor>) {
    // The quotient's error is of order H⁴ = 1e-12 times a fifth derivative, plus 1e-16/H of rounding.
    const H: f64 = 1e-3;
    let (grads, plain) =
        (taper_models::backward(&loss().unwrap()).unwrap(), loss().unwrap().backward().unwrap());
    for (which, var) in vars.iter().enumerate() {
        let grad = values(grads.get(var).unwrap_or_else(|| panic!("{what}: no gradient of operand {which}")));
        let (start, scale) = (values(var), grad.iter().fold(1f64, |m, g| m.max(g.abs())));
        // Our backward pass may add the parts of a gradient in another order than candle's.
        let plain = values(plain.get(var).unwrap());
        let apart = largest_difference(&grad, &plain);
        assert!(apart <= 1e-14 * scale, "{what}: candle's backward differs by {apart:e} at operand {which}");
        let at = |i: usize, d: f64| {
            let mut moved = start.clone();
            moved[i] += d;
            var.set(&Tensor::from_vec(moved, var.shape(), &Device::Cpu).unwrap()).unwrap();
            loss().unwrap().to_scalar::<f64>().unwrap()
        };
        for (i, found) in grad.iter().enumerate() {
            let want = (8.0 * (at(i, H) - at(i, -H)) - (at(i, 2.0 * H) - at(i, -2.0 * H))) / (12.0 * H);
            let error = (found - want).abs();
            assert!(error < 2e-9 * scale, "{what}: operand {which}, element {i}: {found} against {want}");
        }
        at(0, 0.0);
    }
}

/// Runs `f` on a pool of so many threads.
pub fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    taper_kernels::oversubscribe();
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}
