//! A step that cannot be taken changes nothing and says why.
use crate::common::{Bench, names, tensor, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Var};
use taper_optim::{DecGd, DecGdConfig, Error, Registry, StepContext};

const LOSS_BASED: [&str; 7] = ["aegd", "aegdw", "decadam", "decgd", "decgd_falling", "decgd_now", "decgdw"];

/// The error of a step on an optimizer that has taken `steps`, after checking that it changed nothing.
fn refusal(name: &str, steps: usize, context: StepContext, edit: impl Fn(&mut GradStore, &Var)) -> Error {
    let mut bench = Bench::new(name, &[4, 3], DType::F32, 13);
    bench.steps(1, steps);
    let before = (bench.flat_bits(), bench.state_bytes());
    let mut grads = bench.gradients(steps + 1, |_| true);
    edit(&mut grads, &bench.params[1].1);
    let error = bench.step(&grads, &context).unwrap_err();
    assert!(before == (bench.flat_bits(), bench.state_bytes()), "{name}: a refused step left traces");
    // And the next good step is what it would have been without the refused one.
    bench.steps(steps + 1, steps + 1);
    let mut straight = Bench::new(name, &[4, 3], DType::F32, 13);
    straight.steps(1, steps + 1);
    assert_eq!(bench.flat_bits(), straight.flat_bits(), "{name}");
    error
}

#[test]
fn the_registry_says_who_needs_the_loss() {
    let registry = Registry::builtin();
    let needy: Vec<_> = names().into_iter().filter(|name| registry.get(name).unwrap().needs_loss).collect();
    assert_eq!(needy, LOSS_BASED);
}

#[test]
fn a_missing_loss_is_refused_and_the_remedy_named() {
    for name in LOSS_BASED {
        for steps in [0, 2] {
            let error = refusal(name, steps, StepContext::new(), |_, _| ());
            assert!(matches!(&error, Error::MissingLoss(n) if n == name), "{error}");
            assert!(error.to_string().contains("backward_step(&loss)"), "{error}");
        }
    }
    for name in names().into_iter().filter(|name| !LOSS_BASED.contains(name)) {
        let mut bench = Bench::new(name, &[4], DType::F32, 13);
        let grads = bench.gradients(1, |_| true);
        bench.step(&grads, &StepContext::new()).unwrap();
    }
}

#[test]
fn a_loss_without_a_root_is_refused() {
    for name in LOSS_BASED {
        // f + c = 0 and f + c < 0.
        for loss in [-1.0, -7.5] {
            for steps in [0, 2] {
                let error = refusal(name, steps, StepContext::new().loss(loss), |_, _| ());
                assert!(matches!(error, Error::Loss { c: 1.0, .. }), "{name}, f = {loss}: {error}");
            }
        }
    }
}

#[test]
fn a_loss_that_is_no_number_is_refused_by_all() {
    for name in names() {
        for loss in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let error = refusal(name, 2, StepContext::new().loss(loss), |_, _| ());
            assert!(matches!(error, Error::LossNotFinite { .. }), "{name}, f = {loss}: {error}");
        }
    }
}

#[test]
fn a_rate_or_a_scale_that_is_no_number_is_refused() {
    for name in names() {
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let context = StepContext::new().loss(1.0);
            let factors = [context.factor(bad), context.momentum_factor(bad)];
            let contexts = [context.lr(bad), context.momentum(bad), context.clip_norm(bad, 1.0)];
            for context in contexts.into_iter().chain(factors) {
                let error = refusal(name, 2, context, |_, _| ());
                assert!(matches!(error, Error::Context { .. }), "{name}: {error}");
            }
        }
    }
}

#[test]
fn a_gradient_that_does_not_fit_is_refused() {
    for name in names() {
        let context = StepContext::new().loss(1.0);
        let error = refusal(name, 2, context, |grads, x| {
            grads.insert(x, tensor(&[1.0, 2.0], DType::F32));
        });
        let expected = "gradient of `p1`: expected [3] F32, found [2] F32";
        assert_eq!(error.to_string(), expected, "{name}");
        let error = refusal(name, 2, context, |grads, x| {
            grads.insert(x, tensor(&[1.0, 2.0, 3.0], DType::F64));
        });
        assert_eq!(error.to_string(), "gradient of `p1`: expected [3] F32, found [3] F64", "{name}");
    }
}

#[test]
fn candles_bare_step_asks_for_the_loss() {
    let x = var(&[1.0], DType::F32);
    let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig::default()).unwrap();
    let loss = x.sqr().unwrap().sum_all().unwrap();
    let error = optimizer.step(&loss.backward().unwrap()).unwrap_err().to_string();
    assert!(error.contains("decgd needs the loss of the batch: call `backward_step(&loss)`"), "{error}");
    optimizer.backward_step(&loss).unwrap();
}

#[test]
fn integers_are_no_parameters() {
    let ids = Var::from_slice(&[1u32, 2], 2, &candle_core::Device::Cpu).unwrap();
    let error = Registry::builtin().build("sgd", vec![("ids".into(), ids)], &Default::default()).err();
    assert!(matches!(error, Some(Error::DType { found: DType::U32, .. })));
}

#[test]
fn a_decay_that_would_erase_the_parameter_is_refused() {
    // With η λ ≥ 1 nothing of x is left from which x_t - x_(t-1) could be had.
    let config = crate::common::map(serde_json::json!({"weight_decay": 2.0, "lr": 0.1}));
    let x = var(&[1.0, 2.0], DType::F64);
    let mut optimizer = Registry::builtin().build("decgdw", vec![("x".into(), x.clone())], &config).unwrap();
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[0.5, 0.5], DType::F64));
    let context = StepContext::new().loss(1.0);
    optimizer.step(&grads, &context).unwrap();
    let before = crate::common::bits(&x);
    let error = optimizer.step(&grads, &context.lr(0.5)).unwrap_err();
    assert!(matches!(error, Error::Decay { .. }), "{error}");
    assert_eq!(before, crate::common::bits(&x));
}
