//! GELU and sums of activations: gradients by finite differences, the same elsewhere, and refusals.
mod common;

use candle_core::{DType, Device, Tensor};
use common::{check_gradients, near, values, var};
use taper_models::ops::{Activation, FeatureMap, add, gelu, gelu_tensor, global_max_pool, linear, relu};

fn enter(x: &Tensor) -> FeatureMap {
    FeatureMap::enter(x).unwrap()
}

#[test]
fn gradients_equal_finite_differences() {
    let x = var("x", &[2, 3, 4, 5]);
    // Wider than a half, so that the curve shows.
    let wide = |x: &Tensor| (x * 6.0).unwrap();
    check_gradients("gelu", &[&x], || gelu(&enter(&wide(&x))).unwrap().leave().unwrap());
    check_gradients("gelu of a tensor", &[&x], || gelu_tensor(&wide(&x)).unwrap());
    let composed = || gelu(&FeatureMap::Composed(wide(&x))).unwrap().leave().unwrap();
    check_gradients("composed", &[&x], composed);
    near("composed", &composed(), &gelu_tensor(&wide(&x)).unwrap(), 1e-14);
    let (w, b) = (var("w", &[3, 5]), var("b", &[3]));
    check_gradients("linear", &[&x, &w, &b], || linear(&x, &w, Some(&b), Activation::Gelu).unwrap());
    check_gradients("largest", &[&x], || global_max_pool(&enter(&x)).unwrap());
}

#[test]
fn values_are_those_of_pytorch() {
    // torch.nn.functional.gelu in float64.
    let x = Tensor::new(&[-3.0f64, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], &Device::Cpu).unwrap();
    let y = [
        -0.004_049_694_094_890_31,
        -0.158_655_253_931_457_02,
        -0.154_268_769_362_993_44,
        0.0,
        0.345_731_230_637_006_56,
        0.841_344_746_068_543,
        2.995_950_305_905_11,
    ];
    near("f64", &gelu_tensor(&x).unwrap(), &Tensor::new(&y, &Device::Cpu).unwrap(), 1e-13);
    let single = gelu_tensor(&x.to_dtype(DType::F32).unwrap()).unwrap();
    near("f32", &single, &Tensor::new(&y, &Device::Cpu).unwrap(), 1e-7);
}

#[test]
fn two_paths_add_up() {
    let (a, b) = (var("a", &[2, 3, 2, 4]), var("b", &[2, 3, 2, 4]));
    let sum = |x: &FeatureMap, y: &FeatureMap| add(x, y).unwrap().leave().unwrap();
    check_gradients("two", &[&a, &b], || sum(&enter(&a), &enter(&b)));
    // Paths that part and meet, and one without a gradient.
    let meet = || {
        let x = enter(&a);
        sum(&add(&gelu(&x).unwrap(), &relu(&x).unwrap()).unwrap(), &enter(&b.as_detached_tensor()))
    };
    check_gradients("meet", &[&a], meet);
    check_gradients("twice the same", &[&a], || {
        let x = enter(&a);
        sum(&x, &x)
    });
    let composed =
        sum(&FeatureMap::Composed(a.as_tensor().clone()), &FeatureMap::Composed(b.as_tensor().clone()));
    assert_eq!(values(&composed), values(&sum(&enter(&a), &enter(&b))));
}

#[test]
fn what_does_not_fit_is_refused() {
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let (a, b) = (enter(&zeros(&[1, 2, 3, 4], DType::F32)), enter(&zeros(&[1, 2, 3, 5], DType::F32)));
    let message = add(&a, &b).unwrap_err().to_string();
    assert_eq!(message, "add: expected two of shape [1, 2, 3, 4], found [1, 2, 3, 5]");
    assert!(add(&a, &enter(&zeros(&[1, 2, 3, 4], DType::F64))).is_err());
    let message = gelu_tensor(&zeros(&[3], DType::U8)).unwrap_err().to_string();
    assert_eq!(message, "gelu: expected dtype f32 or f64, found u8");
}
