//! The ops by finite differences, and beside their compositions of candle's.
use crate::common::{check_gradients, near, values, var};
use candle_core::{DType, Device, Tensor, Var};
use taper_models::ops::{
    Angles, Attention, FeatureMap, Gelu, Mask, Norm, Qkv, ShareDropout, assemble, attention, embed,
    linear_features, linear_residual, mean_of_tokens, norm, rotary, swiglu,
};
use taper_models::rng::Rng;
use taper_models::{Error, Result};

type Op<'a> = dyn Fn(&[FeatureMap]) -> Result<FeatureMap> + 'a;

/// Checks the gradients of `inputs` and `params` under `f`, and that f composed of candle's ops says the same.
fn check(name: &str, inputs: &[&Var], params: &[&Var], f: &Op) {
    let maps = |make: &dyn Fn(&Tensor) -> FeatureMap| -> Vec<FeatureMap> {
        inputs.iter().map(|x| make(x)).collect()
    };
    let ours = || f(&maps(&|x| FeatureMap::enter(x).unwrap())).unwrap().leave().unwrap();
    let composed = || f(&maps(&|x| FeatureMap::Composed(x.clone()))).unwrap().leave().unwrap();
    let vars = [inputs, params].concat();
    check_gradients(name, &vars, ours);
    near(name, &ours(), &composed(), 1e-13);
    let grads = |y: Tensor| taper_models::backward(&crate::common::scalar(&y)).unwrap();
    let (a, b) = (grads(ours()), grads(composed()));
    for (i, var) in vars.iter().enumerate() {
        near(&format!("{name}: composed gradient {i}"), a.get(var).unwrap(), b.get(var).unwrap(), 1e-12);
    }
    // In f32 as in f64, up to the rounding of f32.
    let single = maps(&|x| FeatureMap::enter(&x.to_dtype(DType::F32).unwrap()).unwrap());
    if params.is_empty() {
        near(name, &f(&single).unwrap().leave().unwrap().to_dtype(DType::F64).unwrap(), &ours(), 2e-6);
    }
}

#[test]
fn norms() {
    let (x, w, b) = (var("x", &[2, 1, 3, 5]), var("w", &[5]), var("b", &[5]));
    let of = |centred: bool, bias: Option<&'_ Var>| {
        let (w, bias) = (w.as_tensor().clone(), bias.map(|b| b.as_tensor().clone()));
        move |x: &[FeatureMap]| norm(&x[0], &Norm { weight: &w, bias: bias.as_ref(), eps: 1e-3, centred })
    };
    check("layer norm", &[&x], &[&w, &b], &of(true, Some(&b)));
    check("layer norm without bias", &[&x], &[&w], &of(true, None));
    check("rms norm", &[&x], &[&w], &of(false, None));
    let wrong = norm(
        &FeatureMap::enter(&x).unwrap(),
        &Norm { weight: &var("w", &[4]), bias: None, eps: 1e-3, centred: true },
    );
    assert!(matches!(wrong, Err(Error::Shape { .. })));
}

#[test]
fn linear_layers() {
    let (x, y) = (var("x", &[2, 1, 3, 4]), var("y", &[2, 1, 3, 5]));
    let (w, b) = (var("w", &[5, 4]), var("b", &[5]));
    for gelu in [None, Some(Gelu::Exact), Some(Gelu::Tanh)] {
        check("linear", &[&x], &[&w, &b], &|x| linear_features(&x[0], &w, Some(&b), gelu));
        check("linear without bias", &[&x], &[&w], &|x| linear_features(&x[0], &w, None, gelu));
    }
    let mask = Mask::draw(Rng::new(1, "test", "mask", 0), (2, 3, 5), 0.4).unwrap();
    for mask in [None, Some(&mask)] {
        check("residual", &[&y, &x], &[&w, &b], &|x| linear_residual(&x[0], &x[1], &w, Some(&b), mask));
        check("residual without bias", &[&y, &x], &[&w], &|x| linear_residual(&x[0], &x[1], &w, None, mask));
    }
    let enter = |x: &Var| FeatureMap::enter(x).unwrap();
    assert!(matches!(linear_residual(&enter(&x), &enter(&x), &w, None, None), Err(Error::Shape { .. })));
    assert!(matches!(linear_features(&enter(&y), &w, None, None), Err(Error::Shape { .. })));
}

#[test]
fn gates_and_rotary_positions() {
    let (gate, up) = (var("gate", &[2, 1, 3, 4]), var("up", &[2, 1, 3, 4]));
    check("swiglu", &[&gate, &up], &[], &|x| swiglu(&x[0], &x[1]));
    let x = var("x", &[2, 1, 3, 8]);
    let mut angles = Angles::new(4, 100.0);
    angles.cover(7);
    check("rotary", &[&x], &[], &|x| rotary(x[0].clone(), &angles, 4));
    assert!(matches!(rotary(FeatureMap::enter(&x).unwrap(), &angles, 5), Err(Error::Shape { .. })));
    // Position 0 stays; a table that grows turns as before.
    let mut turned = |cover: usize| {
        angles.cover(cover);
        values(&rotary(FeatureMap::enter(&x).unwrap(), &angles, 0).unwrap().leave().unwrap())
    };
    let (a, b) = (turned(7), turned(30));
    assert_eq!(a, b);
    assert_eq!(a[..8], values(&x)[..8]);
}

#[test]
fn a_gate_that_is_shut_has_a_gradient_of_zero_also_where_an_exponential_overflows() {
    // e¹⁰⁰ is no number of f32, nor e⁸⁰⁰ one of f64.
    let gates = [-800.0, -100.0, -89.0, -20.0, 0.0, 100.0];
    let enter = |x: &Tensor| FeatureMap::enter(x).unwrap();
    for dtype in [DType::F32, DType::F64] {
        let of = |values: &[f64]| {
            let x = Tensor::from_slice(values, (1, 1, 1, 6), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            Var::from_tensor(&x).unwrap()
        };
        let (gate, up) = (of(&gates), of(&[1.0, 2.0, -1.0, 0.5, 3.0, -2.0]));
        let grads = |make: &dyn Fn(&Tensor) -> FeatureMap| {
            let y = swiglu(&make(&gate), &make(&up)).unwrap().leave().unwrap();
            let grads = taper_models::backward(&y.sum_all().unwrap()).unwrap();
            [values(&y), values(grads.get(&gate).unwrap()), values(grads.get(&up).unwrap())]
        };
        let (ours, composed) = (grads(&enter), grads(&|x| FeatureMap::Composed(x.clone())));
        let limit = if dtype == DType::F32 { 1e-6 } else { 1e-14 };
        for (a, b) in ours.iter().flatten().zip(composed.iter().flatten()) {
            assert!((a - b).abs() <= limit * a.abs().max(1.0), "{dtype:?}: {ours:?} {composed:?}");
        }
    }
}

#[test]
fn a_bias_alone_has_the_gradient_that_it_has_among_others() {
    let (x, y) = (var("x", &[2, 1, 3, 4]), var("y", &[2, 1, 3, 5]));
    let (w, b) = (var("w", &[5, 4]), var("b", &[5]));
    let (scale, shift) = (var("scale", &[4]), var("shift", &[4]));
    let mask = Mask::draw(Rng::new(1, "test", "mask", 0), (2, 3, 5), 0.4).unwrap();
    // Each with whether all are variables, or the bias alone.
    type Layer<'a> = (&'a str, &'a Var, Box<dyn Fn(bool) -> FeatureMap + 'a>);
    let of = |x: &Var, all: bool| if all { x.as_tensor().clone() } else { x.as_detached_tensor() };
    let map = |x: &Var, all: bool| FeatureMap::enter(&of(x, all)).unwrap();
    let mut layers: Vec<Layer> = Vec::new();
    for gelu in [None, Some(Gelu::Exact)] {
        let (x, w, b) = (&x, &w, &b);
        let f = move |all: bool| linear_features(&map(x, all), &of(w, all), Some(b), gelu).unwrap();
        layers.push(("linear", b, Box::new(f)));
    }
    for mask in [None, Some(&mask)] {
        let (x, y, w, b) = (&x, &y, &w, &b);
        let f =
            move |all: bool| linear_residual(&map(y, all), &map(x, all), &of(w, all), Some(b), mask).unwrap();
        layers.push(("residual", b, Box::new(f)));
    }
    for centred in [true, false] {
        let (x, scale, shift) = (&x, &scale, &shift);
        let f = move |all: bool| {
            let weight = of(scale, all);
            norm(&map(x, all), &Norm { weight: &weight, bias: Some(shift), eps: 1e-3, centred }).unwrap()
        };
        layers.push(("norm", shift, Box::new(f)));
    }
    for (name, bias, layer) in layers {
        let grads = |all: bool| {
            let y = layer(all).leave().unwrap();
            taper_models::backward(&crate::common::scalar(&y)).unwrap()
        };
        let (all, alone) = (grads(true), grads(false));
        let found = alone.get(bias).unwrap_or_else(|| panic!("{name}: no gradient"));
        assert_eq!(values(found), values(all.get(bias).unwrap()), "{name}");
        assert!([&x, &w, &scale].iter().all(|frozen| alone.get(frozen).is_none()), "{name}");
    }
}

#[test]
fn attention_of_every_kind() {
    for (heads, kv_heads, causal) in [(2, 2, true), (2, 1, true), (4, 2, false)] {
        for p in [0.0, 0.3] {
            let rng = Rng::new(1, "dropout", "attention.0", 3);
            let dropout = (p > 0.0).then_some(ShareDropout { p, rng, first: 5 });
            let options = Attention { heads, kv_heads, causal, dropout };
            let qkv = var("qkv", &[2, 1, 5, 3 * (heads + 2 * kv_heads)]);
            check("together", &[&qkv], &[], &|x| attention(Qkv::Together(&x[0]), &options));
            let q = var("q", &[2, 1, 3, 3 * heads]);
            let (k, v) = (var("k", &[2, 1, 5, 3 * kv_heads]), var("v", &[2, 1, 5, 3 * kv_heads]));
            check("apart", &[&q, &k, &v], &[], &|x| attention(Qkv::Apart([&x[0], &x[1], &x[2]]), &options));
        }
    }
    let x = FeatureMap::enter(&var("x", &[1, 1, 2, 21])).unwrap();
    for (heads, kv_heads) in [(3, 2), (0, 0), (3, 0), (0, 3)] {
        let options = Attention { heads, kv_heads, causal: true, dropout: None };
        assert!(matches!(attention(Qkv::Together(&x), &options), Err(Error::Shape { .. })));
        assert!(matches!(attention(Qkv::Apart([&x, &x, &x]), &options), Err(Error::Shape { .. })));
    }
}

#[test]
fn parts_of_a_batch_drop_what_the_whole_drops() {
    let qkv = var("qkv", &[4, 1, 6, 12]);
    let options = |first| Attention {
        heads: 2,
        kv_heads: 2,
        causal: true,
        dropout: Some(ShareDropout { p: 0.5, rng: Rng::new(1, "dropout", "a", 1), first }),
    };
    let of = |first: usize, count: usize| {
        let part = qkv.narrow(0, first, count).unwrap().contiguous().unwrap();
        let y = attention(Qkv::Together(&FeatureMap::enter(&part).unwrap()), &options(first)).unwrap();
        values(&y.leave().unwrap())
    };
    assert_eq!(of(0, 4), [of(0, 1), of(1, 3)].concat());
}

#[test]
fn sequences_begin_and_end() {
    let (w, p) = (var("w", &[5, 3]), var("p", &[6, 3]));
    let tokens = Tensor::new(&[[1i64, 4, 1], [0, 0, 2]], &Device::Cpu).unwrap();
    let mask = Mask::draw(Rng::new(1, "test", "mask", 0), (2, 3, 3), 0.4).unwrap();
    for mask in [None, Some(&mask)] {
        for first in [0, 3] {
            check_gradients("embedding", &[&w, &p], || {
                embed(&w, Some(&p), &tokens, first, mask).unwrap().leave().unwrap()
            });
        }
        check_gradients("tokens alone", &[&w], || {
            embed(&w, None, &tokens, 0, mask).unwrap().leave().unwrap()
        });
    }
    assert!(matches!(embed(&w, Some(&p), &tokens, 4, None), Err(Error::Shape { .. })));
    let outside = Tensor::new(&[[5i64]], &Device::Cpu).unwrap();
    assert!(matches!(embed(&w, Some(&p), &outside, 0, None), Err(Error::Index { .. })));

    let (x, class) = (var("x", &[2, 2, 2, 3]), var("class", &[1, 1, 3]));
    let (with, without) = (var("five", &[1, 5, 3]), var("four", &[1, 4, 3]));
    let mask = Mask::draw(Rng::new(1, "test", "mask", 0), (2, 5, 3), 0.4).unwrap();
    for mask in [None, Some(&mask)] {
        check("class token", &[&x], &[&with, &class], &|x| assemble(&x[0], Some(&class), &with, mask));
    }
    check("no class token", &[&x], &[&without], &|x| assemble(&x[0], None, &without, None));
    let y = var("y", &[2, 1, 5, 3]);
    for tokens in [0..1, 1..5, 0..5] {
        check("mean", &[&y], &[], &|x| mean_of_tokens(&x[0], tokens.clone()));
    }
    assert!(mean_of_tokens(&FeatureMap::enter(&y).unwrap(), 3..6).is_err());
}
