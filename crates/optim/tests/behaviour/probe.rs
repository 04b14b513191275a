//! What the probe shows.
use crate::common::{Bench, context, names, tensor, values, var};
use candle_core::DType;
use candle_core::backprop::GradStore;
use proptest::prelude::*;
use serde_json::Map;
use taper_optim::{Distribution, Registry, StepContext};

#[test]
fn decgd_shows_v_the_root_of_the_loss_and_the_effective_rate() {
    let x = var(&[1.0, -1.0, 4.0, 0.0], DType::F64);
    let mut optimizer =
        Registry::builtin().build("decgd", vec![("x".into(), x.clone())], &Map::new()).unwrap();
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[4.0, 4.0, 2.0, 1.0], DType::F64));
    assert!(optimizer.probe().is_none());
    optimizer.step(&grads, &StepContext::new().loss(3.0).lr(0.5).probe(true)).unwrap();
    // √(3+1) = 2; q = g / 4 = (1, 1, 1/2, 1/4); from x_0 = 0: v = 2 + q x = (3, 1, 4, 2).
    let probe = &optimizer.probe().unwrap().params[0];
    let (name, v) = probe.observed.as_ref().unwrap();
    assert_eq!((probe.name.as_str(), *name), ("x", "v"));
    assert_eq!((v.min, v.mean, v.max, v.negative), (1.0, 2.5, 4.0, 0));
    assert_eq!(v.quantiles, [1.0, 1.0, 2.0, 3.0, 4.0]);
    // η v̄ / √(f + c) = 0.5 · 2.5 / 2.
    assert_eq!(probe.numbers, [("sqrt_f_plus_c", 2.0), ("effective_lr", 0.625)]);
    // x changes by 2 η v q = (3, 1, 2, 1/2).
    assert_eq!(values(&x), [-2.0, -2.0, 2.0, -0.5]);
    assert_eq!(probe.update_ratio, (9.0f64 + 1.0 + 4.0 + 0.25).sqrt() / 18f64.sqrt());
}

#[test]
fn decgd_counts_the_coordinates_that_ascend() {
    let x = var(&[-3.0, 1.0], DType::F64);
    let mut optimizer =
        Registry::builtin().build("decgd", vec![("x".into(), x.clone())], &Map::new()).unwrap();
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[4.0, 4.0], DType::F64));
    optimizer.step(&grads, &StepContext::new().loss(3.0).probe(true)).unwrap();
    // v = 2 + q x = (-1, 3).
    assert_eq!(optimizer.probe().unwrap().params[0].observed.as_ref().unwrap().1.negative, 1);
}

#[test]
fn the_adam_family_shows_its_denominator() {
    let x = var(&[1.0], DType::F64);
    let mut optimizer =
        Registry::builtin().build("adam", vec![("x".into(), x.clone())], &Map::new()).unwrap();
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[-3.0], DType::F64));
    optimizer.step(&grads, &StepContext::new().probe(true)).unwrap();
    let (name, denominator) = optimizer.probe().unwrap().params[0].observed.clone().unwrap();
    assert_eq!(name, "denominator");
    // √v̂ + ε = |g| + 1e-8 at the first step; a square, a mean and a root apart.
    assert!((denominator.mean - (3.0 + 1e-8)).abs() < 1e-14);
}

#[test]
fn a_probe_changes_no_step_and_shows_finite_numbers() {
    for name in names() {
        let mut with = Bench::new(name, &[6, 2], DType::F32, 17);
        let mut without = Bench::new(name, &[6, 2], DType::F32, 17);
        for t in 1..=4 {
            let grads = with.gradients(t, |p| p == 0 || t > 2);
            with.step(&grads, &context(17, t).probe(true)).unwrap();
            let grads = without.gradients(t, |p| p == 0 || t > 2);
            without.step(&grads, &context(17, t)).unwrap();
            let probe = with.optimizer.probe().unwrap();
            assert_eq!(probe.params.len(), if t > 2 { 2 } else { 1 }, "{name}");
            for param in &probe.params {
                assert!(param.update_ratio.is_finite());
                assert!(param.numbers.iter().all(|(_, number)| number.is_finite()), "{name}: {param:?}");
                assert!(param.observed.iter().all(|(_, d)| d.min.is_finite() && d.max.is_finite()), "{name}");
            }
        }
        assert!(without.optimizer.probe().is_none());
        assert_eq!(with.flat_bits(), without.flat_bits(), "{name}");
    }
}

proptest! {
    #[test]
    fn a_distribution_orders_its_numbers(values in prop::collection::vec(-1e9f64..1e9, 0..200)) {
        let Some(d) = Distribution::of(values.clone()) else {
            prop_assert!(values.is_empty());
            return Ok(());
        };
        let row = [&[d.min][..], &d.quantiles, &[d.max]].concat();
        prop_assert!(row.is_sorted(), "{row:?}");
        prop_assert!(row.iter().all(|q| values.contains(q)));
        // The mean of numbers lies among them, up to the rounding of their sum.
        prop_assert!(d.mean >= d.min - 1e-3 && d.mean <= d.max + 1e-3);
        prop_assert_eq!(d.negative, values.iter().filter(|v| **v < 0.0).count());
    }
}
