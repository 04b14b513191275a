//! Batch normalisation: gradients by finite differences, running statistics as PyTorch's, and refusals.
mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{check_gradients, near, scalar, values, var};
use taper_models::Params;
use taper_models::ops::{
    Activation, BatchNorm, FeatureMap, Features, ScaleInit, Statistics, batch_norm, batch_norm_features, relu,
};

fn find(params: &Params, name: &str) -> Var {
    params.vars().into_iter().find(|(n, _)| n == name).unwrap().1
}

/// A normalisation with scales, shifts and statistics that hide nothing.
fn norm(channels: usize, dtype: DType) -> (BatchNorm, Params, Var, Var) {
    let params = Params::new(5);
    let bn = BatchNorm::new(channels, ScaleInit::Uniform01, params.builder(dtype, &Device::Cpu)).unwrap();
    let set = |name: &str, add: f64| {
        let new = (var(name, &[channels]).as_detached_tensor() + add).unwrap();
        find(&params, name).set(&new.to_dtype(dtype).unwrap()).unwrap();
    };
    set("bias", 0.0);
    set("weight", 1.0);
    set("running_mean", 0.2);
    set("running_var", 1.0);
    let (weight, bias) = (find(&params, "weight"), find(&params, "bias"));
    (bn, params, weight, bias)
}

#[test]
fn gradients_equal_finite_differences() {
    for dims in [[2, 3, 4, 5], [1, 2, 1, 1], [3, 1, 1, 7], [1, 33, 9, 2]] {
        for statistics in [Statistics::Batch, Statistics::Running] {
            use Activation::{Gelu, None as Plain, Relu};
            for (with_residual, activation) in
                [(false, Plain), (false, Relu), (false, Gelu), (true, Plain), (true, Relu), (true, Gelu)]
            {
                let (bn, _, weight, bias) = norm(dims[3], DType::F64);
                let (x, r) = (var("input", &dims), var("residual", &dims));
                let name = format!("{dims:?} {statistics:?} residual {with_residual} {activation:?}");
                let f = || {
                    let residual = with_residual.then(|| FeatureMap::enter(&r).unwrap());
                    let x = FeatureMap::enter(&x).unwrap();
                    batch_norm(&x, &bn, residual.as_ref(), activation, statistics).unwrap().leave().unwrap()
                };
                let mut vars = vec![&x, &weight, &bias];
                if with_residual {
                    vars.push(&r);
                }
                check_gradients(&name, &vars, f);
            }
        }
    }
}

#[test]
fn features_are_normalised_as_their_concatenation() {
    for statistics in [Statistics::Batch, Statistics::Running] {
        let (bn, _, weight, bias) = norm(9, DType::F64);
        let parts = [var("a", &[2, 3, 3, 4]), var("b", &[2, 3, 3, 2]), var("c", &[2, 3, 3, 3])];
        let joined = || {
            let map = |v: &Var| FeatureMap::enter(v).unwrap();
            let mut features = Features::new(map(&parts[0]));
            features.prepend(map(&parts[1])).unwrap();
            features.prepend(map(&parts[2])).unwrap();
            batch_norm_features(&features, &bn, statistics).unwrap().leave().unwrap()
        };
        let [a, b, c] = &parts;
        check_gradients("features", &[a, b, c, &weight, &bias], joined);
        let concatenated = Tensor::cat(&[c.as_tensor(), b.as_tensor(), a.as_tensor()], 3).unwrap();
        let x = FeatureMap::enter(&concatenated).unwrap();
        let expected = batch_norm(&x, &bn, None, Activation::Relu, statistics).unwrap().leave().unwrap();
        assert_eq!(values(&joined()), values(&expected));
        let composed = FeatureMap::Composed(concatenated);
        let composed =
            batch_norm(&composed, &bn, None, Activation::Relu, statistics).unwrap().leave().unwrap();
        near("composed", &composed, &expected, 1e-13);
    }
}

#[test]
fn composition_of_candles_ops_has_the_same_values_gradients_and_statistics() {
    let run = |composed: bool, statistics: Statistics, activation: Activation| {
        let (bn, params, weight, bias) = norm(4, DType::F64);
        let (x, r) = (var("input", &[2, 3, 2, 4]), var("residual", &[2, 3, 2, 4]));
        let map = |v: &Var| match composed {
            true => FeatureMap::Composed(v.as_tensor().clone()),
            false => FeatureMap::enter(v).unwrap(),
        };
        let y = batch_norm(&map(&x), &bn, Some(&map(&r)), activation, statistics).unwrap().leave().unwrap();
        let grads = taper_models::backward(&scalar(&y)).unwrap();
        let mut all: Vec<Tensor> =
            [&x, &r, &weight, &bias].iter().map(|v| grads.get(v).unwrap().clone()).collect();
        all.push(y);
        all.extend(params.vars().into_iter().map(|(_, v)| v.as_tensor().clone()));
        all
    };
    for statistics in [Statistics::Batch, Statistics::Running] {
        for activation in [Activation::Relu, Activation::Gelu] {
            let (ours, composed) = (run(false, statistics, activation), run(true, statistics, activation));
            for (i, (a, b)) in ours.iter().zip(&composed).enumerate() {
                near(&format!("{activation:?}, tensor {i}"), a, b, 1e-13);
            }
        }
    }
}

#[test]
fn running_statistics_move_in_training_only() {
    let (bn, params, _, _) = norm(1, DType::F64);
    let get = |name: &str| values(&find(&params, name))[0];
    let before = (get("running_mean"), get("running_var"), get("num_batches_tracked"));
    let x = Tensor::new(&[1.0f64, 2.0, 6.0], &Device::Cpu).unwrap().reshape((3, 1, 1, 1)).unwrap();
    let x = FeatureMap::enter(&x).unwrap();
    batch_norm(&x, &bn, None, Activation::None, Statistics::Running).unwrap();
    assert_eq!(before, (get("running_mean"), get("running_var"), get("num_batches_tracked")));
    batch_norm(&x, &bn, None, Activation::None, Statistics::Batch).unwrap();
    // Mean 3; unbiased variance (4 + 1 + 9) / 2 = 7.
    assert!((get("running_mean") - (0.9 * before.0 + 0.3)).abs() < 1e-15);
    assert!((get("running_var") - (0.9 * before.1 + 0.7)).abs() < 1e-15);
    assert_eq!(get("num_batches_tracked"), before.2 + 1.0);
}

#[test]
fn a_mean_far_from_zero_costs_no_accuracy() {
    let (bn, _, _, _) = norm(3, DType::F32);
    let x = var("input", &[4, 16, 16, 3]).as_detached_tensor();
    let shifted = ((&x + 1000.0).unwrap()).to_dtype(DType::F32).unwrap();
    let exact = batch_norm(
        &FeatureMap::enter(&shifted.to_dtype(DType::F64).unwrap()).unwrap(),
        &norm(3, DType::F64).0,
        None,
        Activation::None,
        Statistics::Batch,
    );
    let y = batch_norm(&FeatureMap::enter(&shifted).unwrap(), &bn, None, Activation::None, Statistics::Batch);
    // x scale and shift are each about 3500: their sum is exact to 2 ulp of that, 5e-4 of y's range of about 2.
    near("shifted", &y.unwrap().leave().unwrap(), &exact.unwrap().leave().unwrap(), 5e-4);
}

#[test]
fn relu_passes_no_gradient_at_zero() {
    let x = Var::new(&[-1.0f64, 0.0, 2.0], &Device::Cpu).unwrap();
    let shaped = x.reshape((1, 1, 3, 1)).unwrap();
    for map in [FeatureMap::enter(&shaped).unwrap(), FeatureMap::Composed(shaped.clone())] {
        let y = relu(&map).unwrap().leave().unwrap();
        assert_eq!(values(&y), [0.0, 0.0, 2.0]);
        let grads = taper_models::backward(&y.sum_all().unwrap()).unwrap();
        assert_eq!(values(grads.get(&x).unwrap()), [0.0, 0.0, 1.0]);
    }
    let nan = Tensor::new(&[f32::NAN, -1.0], &Device::Cpu).unwrap().reshape((1, 1, 2, 1)).unwrap();
    assert!(values(&relu(&FeatureMap::enter(&nan).unwrap()).unwrap().leave().unwrap())[0].is_nan());
}

#[test]
fn a_scale_that_is_no_parameter_is_one() {
    let params = Params::new(5);
    let bn = BatchNorm::without_scale(3, params.builder(DType::F64, &Device::Cpu)).unwrap();
    let names: Vec<String> = params.vars().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["bias", "num_batches_tracked", "running_mean", "running_var"]);
    let (x, bias) = (var("input", &[2, 3, 4, 3]), find(&params, "bias"));
    for statistics in [Statistics::Batch, Statistics::Running] {
        let run = || {
            let x = FeatureMap::enter(&x).unwrap();
            batch_norm(&x, &bn, None, Activation::Gelu, statistics).unwrap().leave().unwrap()
        };
        check_gradients("no scale", &[&x, &bias], run);
    }
    // With a scale of ones it is the same.
    let scaled =
        BatchNorm::new(3, ScaleInit::Ones, Params::new(5).builder(DType::F64, &Device::Cpu)).unwrap();
    let [a, b] = [&bn, &scaled].map(|bn| {
        let x = FeatureMap::enter(&x).unwrap();
        values(&batch_norm(&x, bn, None, Activation::None, Statistics::Batch).unwrap().leave().unwrap())
    });
    assert_eq!(a, b);
}

#[test]
fn bad_operands_are_refused_by_name() {
    let zeros = |dims: &[usize], dtype: DType| {
        FeatureMap::enter(&Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()).unwrap()
    };
    let (bn, params, _, _) = norm(3, DType::F32);
    let run = |x: FeatureMap, r: Option<FeatureMap>, statistics| {
        batch_norm(&x, &bn, r.as_ref(), Activation::None, statistics).unwrap_err().to_string()
    };
    let f32 = DType::F32;
    for (message, part) in [
        (run(zeros(&[1, 2, 2, 4], f32), None, Statistics::Batch), "a scale [4], found [3]"),
        (run(zeros(&[1, 1, 1, 3], f32), None, Statistics::Batch), "more than one value"),
        (run(zeros(&[1, 2, 2, 3], DType::F64), None, Statistics::Running), "f64"),
        (
            run(zeros(&[1, 2, 2, 3], f32), Some(zeros(&[1, 2, 1, 3], f32)), Statistics::Batch),
            "a residual [1, 2, 2, 3], found [1, 2, 1, 3]",
        ),
    ] {
        assert!(message.starts_with("batch_norm: ") && message.contains(part), "{message}");
    }
    // On other devices too, whose op is composed of candle's.
    let one = Tensor::zeros((1, 1, 1, 3), f32, &Device::Cpu).unwrap();
    let message = run(FeatureMap::Composed(one), None, Statistics::Batch);
    assert!(message.contains("more than one value"), "{message}");
    assert!(values(&find(&params, "running_var")).iter().all(|v| v.is_finite()));
    // One value a channel is enough when it is not its own statistics.
    assert!(batch_norm(&zeros(&[1, 1, 1, 3], f32), &bn, None, Activation::None, Statistics::Running).is_ok());
}
