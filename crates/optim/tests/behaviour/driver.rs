//! The driver: where a parameter lies, in how many pieces and on how many threads changes nothing.
use crate::common::{
    BY_TENSOR, Bench, TOGETHER, apart, bits, context, names, noise, step, tensor, values, var,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use proptest::prelude::*;
use serde_json::Map;
use taper_optim::{Error, Optimizer, Registry, StepContext, global_norm};

/// Rates that come from sums over all parameters (AdaGD's, Prodigy's, norms): they run over chunks of each parameter in turn,
/// so that another order or another cut of the parameters rounds them differently, by a few ulp of f64, in the rate alone.
fn equal_up_to_reduction_order(name: &str, a: &[f64], b: &[f64]) -> bool {
    match TOGETHER.contains(&name) {
        true => a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-13 * a.abs().max(1.0)),
        false => a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn permuting_parameters_permutes_results(seed: u64, rotate in 1usize..4, single: bool) {
        let dtype = if single { DType::F32 } else { DType::F64 };
        let mut places = vec![("a".into(), 0, 3), ("b".into(), 3, 1), ("c".into(), 4, 17), ("d".into(), 21, 8)];
        // L-BFGS divides by differences of its sums, which magnify their rounding.
        for name in names().into_iter().filter(|name| *name != "lbfgs") {
            let mut straight = Bench::placed(name, &Map::new(), &[], &places, dtype, seed);
            places.rotate_left(rotate);
            places.swap(0, 1);
            let mut permuted = Bench::placed(name, &Map::new(), &[], &places, dtype, seed);
            straight.steps(1, 6);
            permuted.steps(1, 6);
            // In f32 AdaGD's first step of 1e-10 vanishes and the rate that follows is noise; others round the rate to f32.
            if !(single && TOGETHER.contains(&name)) {
                prop_assert!(equal_up_to_reduction_order(name, &straight.flat(), &permuted.flat()), "{name}");
            }
        }
    }

    #[test]
    fn splitting_a_tensor_changes_nothing(seed: u64, cut in 1usize..40, single: bool) {
        let dtype = if single { DType::F32 } else { DType::F64 };
        for name in names().into_iter().filter(|name| !BY_TENSOR.contains(name) && *name != "lbfgs") {
            let mut whole = Bench::new(name, &[41], dtype, seed);
            let mut split = Bench::new(name, &[cut, 41 - cut], dtype, seed);
            whole.steps(1, 6);
            split.steps(1, 6);
            if !(single && TOGETHER.contains(&name)) {
                prop_assert!(equal_up_to_reduction_order(name, &whole.flat(), &split.flat()), "{name}");
            }
        }
    }

    #[test]
    fn a_skipped_step_never_happened(seed: u64, taken in prop::collection::vec(any::<bool>(), 8)) {
        // A rate that is one for all parameters by definition lets a skipped one feel the others.
        for name in apart() {
            let mut pair = Bench::new(name, &[5, 7], DType::F32, seed);
            for t in 1..=taken.len() {
                let grads = pair.gradients(t, |p| p == 0 || taken[t - 1]);
                let before = bits(&pair.params[1].1);
                pair.step(&grads, &context(seed, t)).unwrap();
                prop_assert!(taken[t - 1] || before == bits(&pair.params[1].1));
            }
            // The same parameter alone, at the steps that it had: its state, its step count and its previous rate
            // are those of its own last step.
            let mut alone = Bench::placed(name, &Map::new(), &[], &[("p1".into(), 5, 7)], DType::F32, seed);
            for t in (1..=taken.len()).filter(|t| taken[t - 1]) {
                alone.steps(t, t);
            }
            prop_assert_eq!(bits(&pair.params[1].1), bits(&alone.params[0].1), "{}", name);
            let (pair, alone) = (pair.optimizer.state_dict().unwrap(), alone.optimizer.state_dict().unwrap());
            prop_assert_eq!(&pair.header.params["p1"], &alone.header.params["p1"], "{}", name);
            for (buffer, expected) in &alone.tensors {
                prop_assert_eq!(bits(&pair.tensors[buffer]), bits(expected), "{}: {}", name, buffer);
            }
        }
    }

    #[test]
    fn halves_are_f32_rounded_after_every_step(seed: u64, brain: bool) {
        let half = if brain { DType::BF16 } else { DType::F16 };
        for name in names() {
            let mut ours = Bench::new(name, &[2500, 3], half, seed);
            // The same numbers in f32, rounded to the half after each step.
            let mut wide = Bench::new(name, &[2500, 3], half, seed);
            wide.params = (wide.params.iter())
                .map(|(name, var)| (name.clone(), Var::from_tensor(&var.to_dtype(DType::F32).unwrap()).unwrap()))
                .collect();
            wide.optimizer = Registry::builtin().build(name, wide.params.clone(), &Map::new()).unwrap();
            for t in 1..=4 {
                ours.steps(t, t);
                let mut grads = GradStore::default();
                for (i, (_, var)) in wide.params.iter().enumerate() {
                    grads.insert(var, wide.gradient(i, t).to_dtype(DType::F32).unwrap());
                }
                wide.step(&grads, &context(seed, t)).unwrap();
                for (_, var) in &wide.params {
                    var.set(&var.to_dtype(half).unwrap().to_dtype(DType::F32).unwrap()).unwrap();
                }
            }
            prop_assert_eq!(ours.flat_bits(), wide.flat_bits(), "{}", name);
            let (ours, wide) = (ours.optimizer.state_dict().unwrap(), wide.optimizer.state_dict().unwrap());
            for (buffer, expected) in &wide.tensors {
                prop_assert_eq!(ours.tensors[buffer].dtype(), DType::F32);
                prop_assert_eq!(bits(&ours.tensors[buffer]), bits(expected), "{}: {}", name, buffer);
            }
        }
    }

    #[test]
    fn clipping_inside_the_kernel_is_clipping_before_it(seed: u64, max in 0.01f64..2.0, limit in 0.001f64..1.0) {
        for name in names() {
            let mut inside = Bench::new(name, &[33], DType::F32, seed);
            let mut before = Bench::new(name, &[33], DType::F32, seed);
            for t in 1..=3 {
                let grads = inside.gradients(t, |_| true);
                let norm = global_norm(&grads, [&inside.params[0].1]).unwrap();
                let clip = context(seed, t).clip_norm(norm, max).clip_value(limit);
                inside.step(&grads, &clip).unwrap();
                let (scale, limit) = (clip.grad_scale as f32, limit as f32);
                let clipped: Vec<f64> = values(&before.gradient(0, t))
                    .into_iter()
                    .map(|g| f64::from((g as f32 * scale).clamp(-limit, limit)))
                    .collect();
                let mut grads = GradStore::default();
                grads.insert(&before.params[0].1, tensor(&clipped, DType::F32));
                before.step(&grads, &context(seed, t)).unwrap();
            }
            prop_assert_eq!(inside.flat_bits(), before.flat_bits(), "{}", name);
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    // Several chunks, a ragged end, and tensors far smaller than a chunk.
    let lengths = [100_003, 5, 40_000];
    for name in names() {
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let bits_with = |threads| {
                taper_kernels::oversubscribe();
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| {
                    let mut bench = Bench::new(name, &lengths, dtype, 7);
                    bench.steps(1, 2);
                    (bench.flat_bits(), bench.state_bytes())
                })
            };
            let one = bits_with(1);
            assert!([2, 3, 7, 64].into_iter().all(|threads| one == bits_with(threads)), "{name} {dtype:?}");
        }
    }
}

#[test]
fn gradients_need_not_be_contiguous() {
    let registry = Registry::builtin();
    for name in names() {
        let bits_of = |transpose: bool| {
            let start: Vec<f64> = (0..6).map(|i| noise(3, 0, i)).collect();
            let x = Var::from_tensor(&tensor(&start, DType::F64).reshape((2, 3)).unwrap()).unwrap();
            let mut optimizer = registry.build(name, vec![("x".into(), x.clone())], &Map::new()).unwrap();
            // Rows of the transpose are columns of the gradient.
            let gradient: Vec<f64> = [0, 3, 1, 4, 2, 5].map(|i| noise(3, 1, i)).to_vec();
            let columns = tensor(&gradient, DType::F64).reshape((3, 2)).unwrap().t().unwrap();
            assert!(!columns.is_contiguous());
            let mut grads = GradStore::default();
            grads.insert(&x, if transpose { columns } else { columns.contiguous().unwrap() });
            step(&mut *optimizer, &[("x".into(), x.clone())], &grads, &context(3, 1)).unwrap();
            bits(&x)
        };
        assert_eq!(bits_of(true), bits_of(false), "{name}");
    }
}

#[test]
fn a_gradient_may_share_its_storage_with_a_parameter() {
    let registry = Registry::builtin();
    // The second gradient of SAM would be that of the point it is taken at.
    for name in names().into_iter().filter(|name| *name != "sam") {
        // The gradients of x² / 2 + y² / 2 with x and y exchanged: each is the other parameter's storage.
        let step = |alias: bool| {
            let (x, y) = (var(&[1.0, -2.0], DType::F32), var(&[0.5, 3.0], DType::F32));
            let params = vec![("x".into(), x.clone()), ("y".into(), y.clone())];
            let mut optimizer = registry.build(name, params, &Map::new()).unwrap();
            let mut grads = GradStore::default();
            let gradient = |var: &Var| if alias { var.as_tensor().clone() } else { var.copy().unwrap() };
            grads.insert(&x, gradient(&y));
            grads.insert(&y, gradient(&y));
            optimizer.step(&grads, &context(3, 1)).unwrap();
            [bits(&x), bits(&y)]
        };
        assert_eq!(step(true), step(false), "{name}");
    }
}

#[test]
fn a_parameter_given_twice_is_refused() {
    let (x, y) = (var(&[1.0], DType::F32), var(&[2.0], DType::F32));
    let build = |params: [(&str, &Var); 2]| {
        let params = params.map(|(name, var)| (name.to_owned(), var.clone())).to_vec();
        Registry::builtin().build("adam", params, &Map::new()).err()
    };
    assert!(matches!(build([("x", &x), ("y", &x)]), Some(Error::DuplicateParameter(name)) if name == "y"));
    assert!(matches!(build([("x", &x), ("x", &y)]), Some(Error::DuplicateParameter(name)) if name == "x"));
    assert!(build([("x", &x), ("y", &y)]).is_none());
}

#[test]
fn many_small_tensors_step_on_a_small_stack() {
    let work = || {
        let mut many = Bench::new("decgd", &[3; 400], DType::F32, 5);
        let mut one = Bench::new("decgd", &[1200], DType::F32, 5);
        many.steps(1, 3);
        one.steps(1, 3);
        assert_eq!(many.flat_bits(), one.flat_bits());
    };
    // The stack of a spawned thread and of rayon's workers.
    std::thread::Builder::new().stack_size(2 << 20).spawn(work).unwrap().join().unwrap();
}

#[test]
fn parameters_of_several_dtypes_share_a_step() {
    for name in apart() {
        let dtypes = [DType::F32, DType::BF16, DType::F64, DType::F16];
        let start = [0.5, -0.25, 1.0];
        let vars: Vec<Var> = dtypes.map(|dtype| var(&start, dtype)).to_vec();
        let build = |vars: &[Var]| {
            let params = vars.iter().enumerate().map(|(i, var)| (i.to_string(), var.clone())).collect();
            Registry::builtin().build(name, params, &Map::new()).unwrap()
        };
        let gradient = [0.125, 2.0, -0.5];
        let step = |optimizer: &mut Box<dyn Optimizer>, vars: &[Var]| {
            let mut grads = GradStore::default();
            vars.iter().for_each(|var| drop(grads.insert(var, tensor(&gradient, var.dtype()))));
            optimizer.step(&grads, &context(1, 1)).unwrap();
        };
        step(&mut build(&vars), &vars);
        for (together, dtype) in vars.iter().zip(dtypes) {
            let alone = [var(&start, dtype)];
            step(&mut build(&alone), &alone);
            assert_eq!(bits(together), bits(&alone[0]), "{name} {dtype:?}");
        }
    }
}

#[test]
fn an_empty_parameter_and_an_empty_step_are_no_errors() {
    for name in names() {
        let mut bench = Bench::new(name, &[0, 4], DType::F32, 1);
        bench.steps(1, 2);
        let before = (bench.flat_bits(), bench.state_bytes());
        bench.step(&GradStore::default(), &context(1, 3)).unwrap();
        assert!(before == (bench.flat_bits(), bench.state_bytes()), "{name}");
    }
}

#[test]
fn the_global_norm_sees_every_gradient_and_every_non_finite_one() {
    let bench = Bench::new("sgd", &[70_000, 3], DType::F32, 11);
    let vars: Vec<&Var> = bench.params.iter().map(|(_, var)| var).collect();
    let grads = bench.gradients(1, |_| true);
    let naive: f64 = (0..2).flat_map(|p| values(&bench.gradient(p, 1))).map(|g| g * g).sum::<f64>().sqrt();
    let norm = global_norm(&grads, vars.clone()).unwrap();
    // Two orders of 70 003 additions of positive numbers: far below 70 003 ulp.
    assert!((norm / naive - 1.0).abs() < 1e-13);
    for bad in [f64::NAN, f64::INFINITY] {
        let mut grads = bench.gradients(1, |p| p == 0);
        grads.insert(vars[1], tensor(&[1.0, bad, 2.0], DType::F32));
        assert!(!global_norm(&grads, vars.clone()).unwrap().is_finite());
    }
    let none = Tensor::zeros(2, DType::F32, &Device::Cpu).unwrap();
    assert_eq!(global_norm(&GradStore::default(), [&Var::from_tensor(&none).unwrap()]).unwrap(), 0.0);
}

#[test]
fn a_group_keeps_its_ratio_to_the_rate_of_the_step() {
    let (x, y) = (var(&[1.0], DType::F64), var(&[1.0], DType::F64));
    let groups = [taper_optim::Group::new("y").set("lr", 0.01)];
    let registry = Registry::builtin();
    let entry = registry.get("sgd").unwrap();
    let params = vec![("x".into(), x.clone()), ("y".into(), y.clone())];
    let config = crate::common::map(serde_json::json!({"lr": 0.1}));
    let mut optimizer = entry.build(params, &config, &groups).unwrap();
    let mut step = |context: StepContext| {
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(&[1.0], DType::F64));
        grads.insert(&y, tensor(&[1.0], DType::F64));
        let before = (values(&x)[0], values(&y)[0]);
        optimizer.step(&grads, &context).unwrap();
        (before.0 - values(&x)[0], before.1 - values(&y)[0])
    };
    let close = |(x, y): (f64, f64), lr: f64| (x - lr).abs() < 1e-15 && (y - lr / 10.0).abs() < 1e-15;
    assert!(close(step(StepContext::new()), 0.1));
    assert!(close(step(StepContext::new().lr(0.05)), 0.05));
}
