//! Pooling: gradients by finite differences, ties and padding as PyTorch's, and refusals.
mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{check_gradients, values, var};
use taper_models::ops::{FeatureMap, Window, avg_pool2d, global_avg_pool, max_pool2d};

const WINDOWS: [([usize; 2], [usize; 2], [usize; 2]); 7] = [
    ([2, 2], [2, 2], [0, 0]),
    ([3, 3], [2, 2], [1, 1]),
    ([3, 2], [1, 2], [1, 1]),
    ([1, 1], [2, 3], [0, 0]),
    ([4, 5], [1, 1], [2, 0]),
    ([2, 2], [1, 1], [1, 1]),
    ([2, 3], [5, 1], [0, 1]),
];

fn windows() -> impl Iterator<Item = Window> {
    WINDOWS.into_iter().map(|(kernel, stride, padding)| Window { kernel, stride, padding })
}

fn enter(x: &Tensor) -> FeatureMap {
    FeatureMap::enter(x).unwrap()
}

#[test]
fn gradients_equal_finite_differences() {
    for window in windows() {
        for dims in [[2, 5, 5, 3], [1, 7, 6, 1]] {
            let x = var("x", &dims);
            let run = |f: fn(&FeatureMap, &Window) -> taper_models::Result<FeatureMap>| {
                check_gradients(&format!("{window:?}"), &[&x], || {
                    f(&enter(&x), &window).unwrap().leave().unwrap()
                });
            };
            run(max_pool2d);
            run(avg_pool2d);
        }
    }
    let x = var("x", &[2, 3, 4, 5]);
    check_gradients("global", &[&x], || global_avg_pool(&enter(&x)).unwrap());
    let composed = || global_avg_pool(&FeatureMap::Composed(x.as_tensor().clone())).unwrap();
    check_gradients("global, composed", &[&x], composed);
}

#[test]
fn values_equal_the_definition() {
    for window in windows() {
        let (h, w) = (7, 6);
        let x = var("x", &[1, h, w, 1]);
        let cells = values(&x);
        let ([kh, kw], [sh, sw], [ph, pw]) = (window.kernel, window.stride, window.padding);
        let (oh, ow) = ((h + 2 * ph - kh) / sh + 1, (w + 2 * pw - kw) / sw + 1);
        let (mut max, mut avg) = (Vec::new(), Vec::new());
        for (oy, ox) in (0..oh).flat_map(|y| (0..ow).map(move |x| (y, x))) {
            let inside = |o: usize, s: usize, k: usize, p: usize, size: usize| {
                (o * s..o * s + k).filter_map(move |i| i.checked_sub(p).filter(|i| *i < size))
            };
            let ys = inside(oy, sh, kh, ph, h);
            let seen: Vec<f64> = ys
                .flat_map(|y| inside(ox, sw, kw, pw, w).map(move |x| (y, x)))
                .map(|(y, x)| cells[y * w + x])
                .collect();
            max.push(seen.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            avg.push(seen.iter().sum::<f64>() / (kh * kw) as f64);
        }
        let found = max_pool2d(&enter(&x), &window).unwrap().leave().unwrap();
        assert_eq!((found.dims(), values(&found)), (&[1, oh, ow, 1][..], max), "{window:?}");
        let found = values(&avg_pool2d(&enter(&x), &window).unwrap().leave().unwrap());
        assert!(found.iter().zip(&avg).all(|(a, b)| (a - b).abs() < 1e-15), "{window:?}");
    }
}

#[test]
fn the_first_of_equal_maxima_gets_the_gradient() {
    let x = Var::new(&[[3.0f32, 1.0, 3.0], [3.0, 0.0, 2.0]], &Device::Cpu).unwrap();
    let map = enter(&x.reshape((1, 2, 3, 1)).unwrap());
    let y = max_pool2d(&map, &Window { kernel: [2, 3], stride: [1, 1], padding: [0, 0] }).unwrap();
    let grads = taper_models::backward(&y.leave().unwrap().sum_all().unwrap()).unwrap();
    assert_eq!(values(grads.get(&x).unwrap()), [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let nan = Tensor::new(&[1f32, f32::NAN, 2.0, 0.0], &Device::Cpu).unwrap().reshape((1, 2, 2, 1)).unwrap();
    let y = max_pool2d(&enter(&nan), &Window::square(2, 2, 0)).unwrap().leave().unwrap();
    assert!(values(&y)[0].is_nan());
}

/// The gradient of Σ y · weights, weights that differ.
fn gradient(x: &Var, y: &FeatureMap) -> Vec<f64> {
    let y = y.leave().unwrap();
    let weights: Vec<f64> = (0..y.elem_count()).map(|i| 1.0 + i as f64).collect();
    let weights = Tensor::from_vec(weights, y.shape(), y.device()).unwrap().to_dtype(y.dtype()).unwrap();
    let grads = taper_models::backward(&(y * weights).unwrap().sum_all().unwrap()).unwrap();
    values(grads.get(x).unwrap())
}

#[test]
fn other_devices_path_gives_the_same() {
    for window in windows() {
        // Many equal values, so that the choice among them shows.
        let dims = [2, 6, 5, 3];
        let noise = var("x", &dims).as_tensor().clone();
        let ties = (noise.affine(3.0, 0.0).unwrap().round().unwrap() / 3.0).unwrap();
        for x in [noise, ties].map(|x| Var::from_tensor(&x).unwrap()) {
            let composed = FeatureMap::Composed(x.as_tensor().clone());
            for f in [max_pool2d, avg_pool2d] {
                let (a, b) = (f(&enter(&x), &window).unwrap(), f(&composed, &window).unwrap());
                assert_eq!(a.dims().unwrap(), b.dims().unwrap());
                let close = |a: Vec<f64>, b: Vec<f64>| {
                    // Sums of at most twenty numbers below 200 in another order.
                    a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-11)
                };
                assert!(close(values(&a.leave().unwrap()), values(&b.leave().unwrap())), "{window:?}");
                assert!(close(gradient(&x, &a), gradient(&x, &b)), "{window:?}");
            }
        }
    }
    let nan = Tensor::new(&[1f32, f32::NAN, 2.0, 0.0], &Device::Cpu).unwrap().reshape((1, 2, 2, 1)).unwrap();
    let y = max_pool2d(&FeatureMap::Composed(nan), &Window::square(2, 2, 0)).unwrap().leave().unwrap();
    assert!(values(&y)[0].is_nan());
}

#[test]
fn impossible_windows_are_refused() {
    let x = enter(&Tensor::zeros((1, 3, 3, 2), DType::F32, &Device::Cpu).unwrap());
    for window in
        [Window::square(4, 1, 0), Window::square(0, 1, 0), Window::square(2, 0, 0), Window::square(3, 1, 2)]
    {
        for (op, result) in [("max_pool2d", max_pool2d(&x, &window)), ("avg_pool2d", avg_pool2d(&x, &window))]
        {
            let message = result.unwrap_err().to_string();
            assert!(message.starts_with(op) && message.contains("3 by 3"), "{message}");
        }
    }
}
