//! Convolution: gradients by finite differences, agreement with candle's own, and refusals.
mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{check_gradients, near, scalar, var};
use taper_models::ops::{Algorithm, Conv2d, FeatureMap, Precision, conv2d};

/// (image, channels in and out, kernel, stride, padding, groups)
type Case = ([usize; 3], [usize; 2], [usize; 2], [usize; 2], [usize; 2], usize);

const CASES: [Case; 9] = [
    ([2, 5, 4], [3, 4], [3, 3], [1, 1], [1, 1], 1),
    ([1, 6, 5], [2, 3], [3, 3], [2, 2], [1, 1], 1),
    ([2, 5, 5], [4, 2], [1, 1], [2, 2], [0, 0], 1),
    ([1, 9, 7], [1, 2], [7, 7], [2, 2], [3, 3], 1),
    ([1, 4, 5], [4, 6], [3, 2], [1, 2], [1, 0], 2),
    ([2, 3, 3], [3, 3], [3, 3], [1, 1], [1, 1], 3),
    ([1, 7, 3], [2, 2], [5, 1], [3, 1], [0, 2], 1),
    ([3, 1, 1], [2, 3], [3, 3], [1, 1], [1, 1], 1),
    ([1, 3, 4], [2, 2], [3, 3], [1, 1], [2, 2], 1),
];

fn setup((image, channels, kernel, stride, padding, groups): Case) -> (Var, Var, Var, Conv2d) {
    let x = var("x", &[image[0], image[1], image[2], channels[0]]);
    let w = var("w", &[channels[1], channels[0] / groups, kernel[0], kernel[1]]);
    (x, w, var("b", &[channels[1]]), Conv2d { stride, padding, groups, ..Conv2d::default() })
}

fn run(x: &Tensor, w: &Tensor, b: Option<&Tensor>, options: &Conv2d) -> Tensor {
    conv2d(&FeatureMap::enter(x).unwrap(), w, b, options).unwrap().leave().unwrap()
}

#[test]
fn gradients_equal_finite_differences() {
    for case in CASES {
        let (x, w, b, options) = setup(case);
        check_gradients(&format!("{case:?}"), &[&x, &w, &b], || run(&x, &w, Some(&b), &options));
        check_gradients(&format!("{case:?}"), &[&x, &w], || run(&x, &w, None, &options));
    }
}

/// candle's convolution is right, if slow, for equal strides and paddings of both axes.
#[test]
fn values_and_gradients_equal_candles() {
    for case in CASES {
        let (x, w, b, options) = setup(case);
        if options.stride[0] != options.stride[1] || options.padding[0] != options.padding[1] {
            continue;
        }
        let theirs = x.permute((0, 3, 1, 2)).unwrap().contiguous().unwrap();
        let theirs = theirs.conv2d(&w, options.padding[0], options.stride[0], 1, options.groups).unwrap();
        let theirs = theirs.permute((0, 2, 3, 1)).unwrap().contiguous().unwrap().broadcast_add(&b).unwrap();
        let ours = run(&x, &w, Some(&b), &options);
        near("y", &ours, &theirs, 1e-14);
        let composed = FeatureMap::Composed(x.as_tensor().clone());
        let composed = conv2d(&composed, &w, Some(&b), &options).unwrap().leave().unwrap();
        near("composed", &composed, &theirs, 1e-14);
        // Its input gradient has the wrong shape where a stride leaves unequal remainders on the two axes.
        let left = |axis: usize| {
            (case.0[axis + 1] + 2 * options.padding[axis] - case.2[axis]) % options.stride[axis]
        };
        if left(0) != left(1) {
            continue;
        }
        let (a, b_) = (taper_models::backward(&scalar(&ours)).unwrap(), scalar(&theirs).backward().unwrap());
        for v in [&x, &w, &b] {
            near(&format!("{case:?}"), a.get(v).unwrap(), b_.get(v).unwrap(), 1e-13);
        }
    }
}

#[test]
fn every_algorithm_gives_the_same_through_the_op() {
    let f32 = |v: &Var| Var::from_tensor(&v.to_dtype(DType::F32).unwrap()).unwrap();
    let (x, w) = (var("x", &[2, 9, 10, 24]), var("w", &[40, 24, 3, 3]));
    let reference = |x: &Var, w: &Var, options: &Conv2d| {
        let y = run(x, w, None, options);
        let grads = taper_models::backward(&scalar(&y)).unwrap();
        [y, grads.get(x).unwrap().clone(), grads.get(w).unwrap().clone()]
    };
    let padded = Conv2d { padding: [1, 1], ..Conv2d::default() };
    let expected = reference(&x, &w, &padded);
    let by = |algorithm| Conv2d { algorithm: Some(algorithm), ..padded };
    let ways = [
        (padded, 2e-6),
        (Conv2d { precision: Precision::Fast, ..padded }, 2e-5),
        (by(Algorithm::Direct), 2e-6),
        (by(Algorithm::Winograd2), 2e-6),
        (by(Algorithm::Winograd4), 2e-5),
    ];
    for (options, limit) in ways {
        for (found, expected) in reference(&f32(&x), &f32(&w), &options).iter().zip(&expected) {
            near(&format!("{options:?}"), found, expected, limit);
        }
    }
}

#[test]
fn an_input_that_needs_no_gradient_gets_none() {
    let (x, w, _, options) = setup(CASES[0]);
    let x = x.as_detached_tensor();
    let grads = taper_models::backward(&scalar(&run(&x, &w, None, &options))).unwrap();
    assert!(grads.get(&x).is_none() && grads.get(&w).is_some());
}

#[test]
fn gradients_of_shared_inputs_and_weights_add_up() {
    let (x, w) = (var("x", &[2, 4, 4, 3]), var("w", &[3, 3, 3, 3]));
    let options = Conv2d { padding: [1, 1], ..Conv2d::default() };
    let twice = || {
        let x = FeatureMap::enter(&x).unwrap();
        let once = conv2d(&x, &w, None, &options).unwrap();
        let twice = conv2d(&once, &w, None, &options).unwrap();
        (once.leave().unwrap() + twice.leave().unwrap()).unwrap()
    };
    check_gradients("shared", &[&x, &w], twice);
    // The plain backward pass of candle finds the same gradients, in another order of additions.
    let (a, b) = (taper_models::backward(&scalar(&twice())).unwrap(), scalar(&twice()).backward().unwrap());
    for v in [&x, &w] {
        near("candle's backward", a.get(v).unwrap(), b.get(v).unwrap(), 1e-14);
    }
}

#[test]
fn a_second_backward_pass_is_refused() {
    let (x, w, _, options) = setup(CASES[0]);
    let loss = scalar(&run(&x, &w, None, &options));
    loss.backward().unwrap();
    let message = loss.backward().unwrap_err().to_string();
    assert!(message.contains("already run"), "{message}");
}

#[test]
fn bad_shapes_and_dtypes_are_refused_by_name() {
    let zeros = |dims: &[usize], dtype: DType| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let x = FeatureMap::enter(&zeros(&[1, 4, 4, 6], DType::F32)).unwrap();
    let refuse = |w: Tensor, b: Option<Tensor>, options: Conv2d| {
        conv2d(&x, &w, b.as_ref(), &options).unwrap_err().to_string()
    };
    let plain = Conv2d::default();
    let w = |dims: &[usize]| zeros(dims, DType::F32);
    for (message, part) in [
        (refuse(w(&[2, 3, 3, 3]), None, plain), "found [2, 3, 3, 3]"),
        (refuse(w(&[2, 6, 3]), None, plain), "found [2, 6, 3]"),
        (refuse(w(&[2, 6, 5, 5]), None, plain), "at least 5 by 5"),
        (refuse(w(&[3, 3, 3, 3]), None, Conv2d { groups: 2, ..plain }), "divisible by 2"),
        (refuse(w(&[2, 6, 3, 3]), None, Conv2d { groups: 0, ..plain }), "at least 1"),
        (refuse(w(&[2, 6, 3, 3]), None, Conv2d { stride: [0, 1], ..plain }), "at least 1"),
        (refuse(w(&[0, 6, 3, 3]), None, plain), "at least 1"),
        (refuse(w(&[2, 6, 3, 3]), Some(w(&[3])), plain), "a bias [2]"),
        (refuse(zeros(&[2, 6, 3, 3], DType::F64), None, plain), "f64"),
        (
            refuse(w(&[2, 6, 2, 2]), None, Conv2d { algorithm: Some(Algorithm::Winograd2), ..plain }),
            "Winograd2",
        ),
    ] {
        assert!(message.starts_with("conv2d: ") && message.contains(part), "{message}");
    }
    for (x, part) in [
        (zeros(&[0, 4, 4, 6], DType::F32), "[0, 4, 4, 6]"),
        (zeros(&[4, 4, 6], DType::F32), "[4, 4, 6]"),
        (zeros(&[1, 4, 4, 6], DType::F16), "f16"),
    ] {
        let message = FeatureMap::enter(&x).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}
