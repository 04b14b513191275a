//! Parameters of half precision: master weights, rounding, gradients of either type, loss scaling.
use crate::common::{Bench, bits, context, names, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Var};
use serde_json::Map;
use taper_optim::{
    Adam, AdamConfig, Error, LossScaler, Optimizer, Precision, Registry, Sgd, SgdConfig, StateDict,
    StepContext,
};

const HALVES: [DType; 2] = [DType::F16, DType::BF16];

/// Those that can keep master weights: rules of one element that do not look at the parameter before they step.
fn keepers() -> impl Iterator<Item = &'static str> {
    let none = ["adafactor", "adagd", "lamb", "lars", "lbfgs", "lookahead", "muon", "prodigy", "soap"];
    // SAM's inner optimizer keeps them, under a name of its own.
    names().into_iter().filter(move |name| !none.contains(name) && *name != "sam")
}

fn bench(name: &str, dtype: DType, precision: Precision) -> Bench {
    let mut bench = Bench::new(name, &[2500, 3], dtype, 31);
    bench.optimizer.set_precision(precision).unwrap();
    bench
}

#[test]
fn master_weights_are_the_f32_run_rounded() {
    for name in keepers() {
        for half in HALVES {
            let mut ours = bench(name, half, Precision::default().master_weights());
            // The same start, and the same gradients, in f32.
            let mut wide = Bench::new(name, &[2500, 3], half, 31);
            let widen = |v: &Var| Var::from_tensor(&v.to_dtype(DType::F32).unwrap()).unwrap();
            wide.params = wide.params.iter().map(|(name, var)| (name.clone(), widen(var))).collect();
            wide.optimizer = Registry::builtin().build(name, wide.params.clone(), &Map::new()).unwrap();
            for t in 1..=4 {
                ours.steps(t, t);
                let mut grads = GradStore::default();
                for (i, (_, var)) in wide.params.iter().enumerate() {
                    grads.insert(var, wide.gradient(i, t).to_dtype(DType::F32).unwrap());
                }
                wide.step(&grads, &context(31, t)).unwrap();
            }
            let state = ours.optimizer.state_dict().unwrap();
            for ((name, half), (_, wide)) in ours.params.iter().zip(&wide.params) {
                assert_eq!(bits(half), bits(&wide.to_dtype(half.dtype()).unwrap()), "{name}");
                assert_eq!(bits(&state.tensors[&format!("{name}.master")]), bits(wide), "{name}");
            }
        }
    }
}

#[test]
fn the_gradient_of_a_half_may_be_f32() {
    for name in names() {
        for half in HALVES {
            let mut same = bench(name, half, Precision::default());
            let mut wide = bench(name, half, Precision::default());
            for t in 1..=3 {
                same.steps(t, t);
                let mut grads = GradStore::default();
                for (i, (_, var)) in wide.params.iter().enumerate() {
                    grads.insert(var, wide.gradient(i, t).to_dtype(DType::F32).unwrap());
                }
                wide.step(&grads, &context(31, t)).unwrap();
            }
            assert_eq!(same.flat_bits(), wide.flat_bits(), "{name} {half:?}");
        }
    }
}

#[test]
fn stochastic_rounding_moves_by_less_than_a_unit_on_average() {
    let train = |precision: Precision| {
        let x = Var::ones(1 << 14, DType::BF16, &candle_core::Device::Cpu).unwrap();
        let mut sgd =
            Sgd::with_params(vec![("x".into(), x.clone())], SgdConfig { lr: 1e-4, ..Default::default() })
                .unwrap();
        sgd = sgd.precision(precision).unwrap();
        for _ in 0..50 {
            sgd.backward_step(&x.to_dtype(DType::F32).unwrap().sum_all().unwrap()).unwrap();
        }
        values(&x).iter().sum::<f64>() / (1 << 14) as f64
    };
    assert_eq!(train(Precision::default()), 1.0);
    // 50 steps of 1e-4; each rounds by at most 2⁻⁸: the mean of 16384 is within five standard deviations.
    let mean = train(Precision::default().stochastic(1));
    assert!((mean - 0.995).abs() < 5.0 * 50f64.sqrt() * 2f64.powi(-9) / 128.0, "{mean}");
    assert_ne!(mean, train(Precision::default().stochastic(2)));
    assert_eq!(mean, train(Precision::default().stochastic(1)));
}

#[test]
fn chance_depends_neither_on_threads_nor_on_interruptions() {
    for precision in [Precision::default().stochastic(3), Precision::default().stochastic(3).master_weights()]
    {
        let build = || {
            let mut bench = Bench::new("adam", &[100_003, 40], DType::F16, 7);
            bench.optimizer.set_precision(precision).unwrap();
            bench
        };
        let run = |threads: usize| {
            taper_kernels::oversubscribe();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut bench = build();
                bench.steps(1, 4);
                (bench.flat_bits(), bench.state_bytes())
            })
        };
        let straight = run(1);
        assert!(straight == run(2) && straight == run(3));
        let mut first = build();
        first.steps(1, 2);
        let mut second = build();
        second.params.iter().zip(&first.params).for_each(|((_, to), (_, from))| to.set(from).unwrap());
        let saved = StateDict::from_bytes(&first.state_bytes()).unwrap();
        second.optimizer.load_state_dict(&saved).unwrap();
        second.steps(3, 4);
        assert!(straight == (second.flat_bits(), second.state_bytes()));
        // Another precision is another optimizer.
        let error =
            Bench::new("adam", &[100_003, 40], DType::F16, 7).optimizer.load_state_dict(&saved).unwrap_err();
        assert!(error.to_string().contains("precision"), "{error}");
    }
}

#[test]
fn what_cannot_keep_master_weights_says_so() {
    let mut bench = Bench::new("adagd", &[3], DType::F16, 1);
    let error = bench.optimizer.set_precision(Precision::default().master_weights()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    for name in ["lars", "lamb", "muon", "lookahead"] {
        let mut bench = Bench::new(name, &[3], DType::F16, 1);
        let error = bench.optimizer.set_precision(Precision::default().master_weights()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
    let mut late = Bench::new("adam", &[3], DType::F16, 1);
    late.steps(1, 1);
    assert!(late.optimizer.set_precision(Precision::default().master_weights()).is_err());
}

#[test]
fn a_skipped_step_leaves_no_trace_and_halves_the_scale() {
    let x = var(&[1.0, 2.0], DType::F16);
    let mut adam = Adam::with_params(vec![("x".into(), x.clone())], AdamConfig::default()).unwrap();
    let mut scaler = LossScaler { interval: 2, ..Default::default() };
    let before = (bits(&x), adam.state_dict().unwrap().to_bytes().unwrap());
    let mut grads = GradStore::default();
    grads.insert(&x, tensor(&[1.0, f64::INFINITY], DType::F16));
    assert!(!scaler.step(&mut adam, &grads, &StepContext::new()).unwrap());
    assert!(before == (bits(&x), adam.state_dict().unwrap().to_bytes().unwrap()));
    assert_eq!((scaler.scale, scaler.skipped), (32768.0, 1));
    // With clipping by norm too, where the norm is what finds it.
    assert!(!scaler.step(&mut adam, &grads, &StepContext::new().max_norm(1.0)).unwrap());
    assert!(before == (bits(&x), adam.state_dict().unwrap().to_bytes().unwrap()));
    // Good steps are those of the loss itself, and let the scale grow.
    let scale = scaler.scale;
    for _ in 0..2 {
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(&[0.25 * scale, -0.5 * scale], DType::F16));
        assert!(scaler.step(&mut adam, &grads, &StepContext::new()).unwrap());
    }
    assert_eq!((scaler.scale, scaler.good, scaler.skipped), (2.0 * scale, 0, 2));
    let plain = var(&[1.0, 2.0], DType::F16);
    let mut straight = Adam::with_params(vec![("x".into(), plain.clone())], AdamConfig::default()).unwrap();
    for _ in 0..2 {
        let mut grads = GradStore::default();
        grads.insert(&plain, tensor(&[0.25, -0.5], DType::F16));
        straight.step(&grads).unwrap();
    }
    assert_eq!(bits(&x), bits(&plain));
    // It is saved like any configuration.
    let saved = serde_json::to_string(&scaler).unwrap();
    assert_eq!(serde_json::from_str::<LossScaler>(&saved).unwrap(), scaler);
    let dynamic: &mut dyn Optimizer = &mut adam;
    assert!(scaler.backward_step(dynamic, &x.sqr().unwrap().sum_all().unwrap(), &StepContext::new()).is_ok());
}
