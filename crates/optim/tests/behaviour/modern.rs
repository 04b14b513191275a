//! What the golden records of matrix, layer-wise, schedule-free and wrapping optimizers do not show.
use crate::common::{bits, map, noise, step, tensor, values, var};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Value, json};
use taper_optim::{
    Error, Evaluated, Family, Group, Load, Optimizer, Registry, Result, StateDict, StepContext,
};

/// A matrix, a convolution, a vector and a wide matrix with an optimizer over them, and noise for gradients.
struct Trial {
    params: Vec<(String, Var)>,
    optimizer: Box<dyn Optimizer>,
}

const SHAPES: [(&str, &[usize]); 4] =
    [("w", &[6, 5]), ("conv.weight", &[4, 3, 2, 2]), ("b", &[7]), ("wide", &[3, 11])];

fn noisy(seed: u64, t: usize, shape: &[usize], dtype: DType) -> Tensor {
    let n = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| noise(seed, t, i)).collect();
    tensor(&values, dtype).reshape(shape).unwrap()
}

impl Trial {
    fn new(name: &str, config: Value, dtype: DType) -> Self {
        Self::with_groups(name, config, dtype, &[]).unwrap()
    }

    fn with_groups(name: &str, config: Value, dtype: DType, groups: &[Group]) -> Result<Self> {
        let param = |(seed, (name, shape)): (usize, (&str, &[usize]))| {
            (name.to_owned(), Var::from_tensor(&noisy(seed as u64, 0, shape, dtype)).unwrap())
        };
        let params: Vec<_> = SHAPES.into_iter().enumerate().map(param).collect();
        let optimizer = Registry::builtin().get(name)?.build(params.clone(), &map(config), groups)?;
        Ok(Self { params, optimizer })
    }

    fn grads(&self, t: usize) -> GradStore {
        let mut grads = GradStore::default();
        for (seed, (_, var)) in self.params.iter().enumerate() {
            grads.insert(var, noisy(seed as u64, t, var.dims(), var.dtype()));
        }
        grads
    }

    fn step(&mut self, t: usize, context: &StepContext) -> Result<()> {
        let grads = self.grads(t);
        step(&mut *self.optimizer, &self.params, &grads, context)
    }

    fn steps(&mut self, from: usize, to: usize) {
        (from..=to).for_each(|t| {
            self.step(t, &StepContext::new().loss(1.0 + t as f64).factor(1.0 / t as f64)).unwrap()
        });
    }

    fn bits(&self) -> Vec<u64> {
        self.params.iter().flat_map(|(_, var)| bits(var)).collect()
    }

    fn state(&self) -> Vec<u8> {
        self.optimizer.state_dict().unwrap().to_bytes().unwrap()
    }
}

/// One of each kind, with settings that take every path in a few steps.
fn kinds() -> Vec<(&'static str, Value)> {
    vec![
        ("muon", json!({"rest": {"name": "decgd"}})),
        ("muon", json!({"nesterov": false, "adjust_lr": "match_rms_adamw", "except": ["wi*"]})),
        ("soap", json!({"precondition_frequency": 2})),
        ("adafactor", json!({"weight_decay": 0.1})),
        ("lamb", json!({})),
        ("lars", json!({"momentum": 0.9, "weight_decay": 0.1})),
        ("sf_adamw", json!({"warmup_steps": 3, "r": 1.0})),
        ("sf_sgd", json!({"lr": 0.1})),
        ("prodigy", json!({"d0": 1e-3, "use_bias_correction": true})),
        ("lbfgs", json!({"history_size": 2, "lr": 0.1})),
        ("lookahead", json!({"k": 2, "pullback_momentum": "reset"})),
        ("lookahead", json!({"k": 3, "inner": {"name": "decgd"}})),
        ("lookahead", json!({"k": 2, "inner": {"name": "lookahead", "k": 3, "inner": {"name": "muon"}}})),
        ("lookahead", json!({"k": 2, "inner": {"name": "sam", "inner": {"name": "soap"}}})),
        ("sam", json!({"adaptive": true, "inner": {"name": "decgd"}})),
        ("sam", json!({"inner": {"name": "lookahead", "inner": {"name": "sf_adamw"}}})),
    ]
}

#[test]
fn state_continues_to_the_bit_from_any_step() {
    for (name, config) in kinds() {
        for dtype in [DType::F32, DType::BF16, DType::F64, DType::F16] {
            let mut straight = Trial::new(name, config.clone(), dtype);
            straight.steps(1, 7);
            for stop in [0, 1, 4, 6] {
                let mut first = Trial::new(name, config.clone(), dtype);
                first.steps(1, stop);
                let mut second = Trial::new(name, config.clone(), dtype);
                for ((_, to), (_, from)) in second.params.iter().zip(&first.params) {
                    to.set(from).unwrap();
                }
                second.optimizer.load_state_dict(&StateDict::from_bytes(&first.state()).unwrap()).unwrap();
                second.steps(stop + 1, 7);
                assert_eq!(straight.bits(), second.bits(), "{name} {config} {dtype:?} from {stop}");
                assert!(straight.state() == second.state(), "{name} {config} {dtype:?} from {stop}");
            }
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for (name, config) in kinds() {
        let with = |threads: usize| {
            taper_kernels::oversubscribe();
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                // Large enough to be shared among threads.
                let w = Var::from_tensor(&noisy(1, 0, &[150, 170], DType::F32)).unwrap();
                let params = vec![("w".to_owned(), w.clone())];
                let mut optimizer =
                    Registry::builtin().build(name, params.clone(), &map(config.clone())).unwrap();
                for t in 1..=4 {
                    let mut grads = GradStore::default();
                    grads.insert(&w, noisy(2, t, &[150, 170], DType::F32));
                    step(&mut *optimizer, &params, &grads, &StepContext::new().loss(1.0)).unwrap();
                }
                (bits(&w), optimizer.state_dict().unwrap().to_bytes().unwrap())
            })
        };
        let one = with(1);
        assert!([2, 3, 7, 64].into_iter().all(|threads| with(threads) == one), "{name} {config}");
    }
}

#[test]
fn a_refused_step_leaves_no_trace_of_either_part() {
    for (name, config) in kinds() {
        let mut trial = Trial::new(name, config.clone(), DType::F32);
        trial.steps(1, 3);
        let before = (trial.bits(), trial.state());
        // In the vector, which is the rest's, and in a matrix.
        for bad in [2, 0] {
            let mut grads = trial.grads(4);
            let var = &trial.params[bad].1;
            grads.insert(var, (noisy(1, 4, var.dims(), DType::F32) * f64::INFINITY).unwrap());
            let context = StepContext::new().loss(1.0);
            for context in [context, context.max_norm(1.0)] {
                assert!(
                    step(&mut *trial.optimizer, &trial.params, &grads, &context).is_err(),
                    "{name} {config}"
                );
                assert!(before == (trial.bits(), trial.state()), "{name} {config}");
            }
        }
    }
}

#[test]
fn foreign_state_is_refused_without_a_trace() {
    for (name, config) in kinds() {
        let mut trial = Trial::new(name, config.clone(), DType::F32);
        trial.steps(1, 3);
        let before = trial.state();
        let good = trial.optimizer.state_dict().unwrap();
        let mut foreign = vec![StateDict::default()];
        for key in good.tensors.keys() {
            let mut more = good.clone();
            more.tensors.insert(format!("{key}.more"), good.tensors[key].clone());
            foreign.push(more);
        }
        for part in good.header.parts.keys() {
            let mut less = good.clone();
            less.header.parts.remove(part);
            foreign.push(less);
        }
        for state in foreign {
            assert!(trial.optimizer.load_state_dict(&state).is_err(), "{name} {config}");
            assert!(trial.state() == before, "{name} {config}");
        }
        trial.optimizer.load_state_dict_with(&good, Load::strict().keep_hyperparameters()).unwrap();
        assert!(trial.state() == before, "{name} {config}");
    }
}

#[test]
fn lookahead_that_goes_all_the_way_is_its_inner_optimizer() {
    for inner in ["adam", "sgdm", "decgd", "lion", "muon"] {
        let config = json!({"k": 1, "alpha": 1.0, "inner": {"name": inner}});
        let mut wrapped = Trial::new("lookahead", config, DType::F32);
        let mut plain = Trial::new(inner, json!({}), DType::F32);
        wrapped.steps(1, 6);
        plain.steps(1, 6);
        assert_eq!(wrapped.bits(), plain.bits(), "{inner}");
        assert!(wrapped.optimizer.eval_weights().unwrap());
        assert_eq!(wrapped.bits(), plain.bits(), "{inner}");
    }
}

/// Weights are often loaded after the optimizer was made.
#[test]
fn no_optimizer_remembers_weights_from_before_its_first_step() {
    let registry = Registry::builtin();
    let all = registry.list("*").unwrap().map(|entry| (entry.info.name, json!({})));
    for (name, config) in all.chain(kinds()) {
        let [mut early, mut late] = [(); 2].map(|()| Trial::new(name, config.clone(), DType::F32));
        let move_on = |trial: &Trial| {
            trial.params.iter().for_each(|(_, var)| var.set(&noisy(9, 1, var.dims(), var.dtype())).unwrap());
        };
        move_on(&early);
        move_on(&late);
        late.optimizer =
            registry.get(name).unwrap().build(late.params.clone(), &map(config.clone()), &[]).unwrap();
        early.optimizer.eval_weights().unwrap();
        assert_eq!(early.bits(), late.bits(), "{name}: evaluated before its first step");
        early.optimizer.train_weights().unwrap();
        early.steps(1, 7);
        late.steps(1, 7);
        assert_eq!(early.bits(), late.bits(), "{name} {config}");
        for trial in [&mut early, &mut late] {
            trial.optimizer.eval_weights().unwrap();
        }
        assert_eq!(early.bits(), late.bits(), "{name} {config}: evaluated");
    }
}

#[test]
fn lookahead_without_a_way_stays_where_it_started() {
    let mut trial =
        Trial::new("lookahead", json!({"k": 2, "alpha": 0.0, "inner": {"name": "adam"}}), DType::F64);
    let start = trial.bits();
    trial.steps(1, 3);
    assert_ne!(trial.bits(), start);
    trial.optimizer.eval_weights().unwrap();
    assert_eq!(trial.bits(), start);
    assert!(matches!(trial.step(4, &StepContext::new()), Err(Error::Evaluating(_))));
    assert!(matches!(trial.optimizer.state_dict(), Err(Error::Evaluating(_))));
    trial.optimizer.train_weights().unwrap();
    trial.steps(4, 4);
    assert_eq!(trial.bits(), start);
}

#[test]
fn sam_with_no_way_to_go_is_its_inner_optimizer() {
    for inner in ["adam", "decgd", "soap", "lookahead"] {
        let mut wrapped = Trial::new("sam", json!({"rho": 0.0, "inner": {"name": inner}}), DType::F32);
        let mut plain = Trial::new(inner, json!({}), DType::F32);
        wrapped.steps(1, 6);
        plain.steps(1, 6);
        assert_eq!(wrapped.bits(), plain.bits(), "{inner}");
    }
}

#[test]
fn sam_steps_with_gradient_and_loss_of_the_second_point() {
    let config = json!({"inner": {"name": "decgd", "lr": 0.1}});
    let run = |loss: Option<f64>| {
        let x = var(&[3.0, 4.0], DType::F64);
        let mut sam =
            Registry::builtin().build("sam", vec![("x".into(), x.clone())], &map(config.clone())).unwrap();
        let gradient = |v: &[f64]| {
            let mut grads = GradStore::default();
            grads.insert(&x, tensor(v, DType::F64));
            grads
        };
        let context = StepContext::new().loss(3.0);
        assert!(matches!(sam.step(&gradient(&[3.0, 4.0]), &context), Err(Error::SecondGradient(_))));
        let mut at = Vec::new();
        let mut again = || {
            at = values(&x);
            Ok(Evaluated { grads: gradient(&[1.0, 0.0]), loss })
        };
        sam.step_twice(&gradient(&[3.0, 4.0]), &context, &mut again).unwrap();
        assert!((at[0] - 3.03).abs() < 1e-12 && (at[1] - 4.04).abs() < 1e-12, "{at:?}");
        let mut fails = || Err(Error::MissingLoss("the closure".into()));
        let before = bits(&x);
        assert!(sam.step_twice(&gradient(&[3.0, 4.0]), &context, &mut fails).is_err());
        assert_eq!(bits(&x), before);
        before
    };
    let plain = |loss: f64| {
        let x = var(&[3.0, 4.0], DType::F64);
        let mut decgd = Registry::builtin()
            .build("decgd", vec![("x".into(), x.clone())], &map(json!({"lr": 0.1})))
            .unwrap();
        let mut grads = GradStore::default();
        grads.insert(&x, tensor(&[1.0, 0.0], DType::F64));
        decgd.step(&grads, &StepContext::new().loss(loss)).unwrap();
        bits(&x)
    };
    assert_eq!(run(Some(5.0)), plain(5.0));
    // Without a loss of its own, the one of the first point.
    assert_eq!(run(None), plain(3.0));
}

#[test]
fn lamb_and_lars_without_adaptation_are_adam_and_sgd() {
    let pairs = [
        ("lamb", json!({"weight_decay": 0.0, "max_grad_norm": null, "eps": 1e-8}), "adam", json!({})),
        ("lars", json!({"lr": 0.1, "momentum": 0.9}), "sgdm", json!({"lr": 0.1, "momentum": 0.9})),
    ];
    for (name, config, other, of_other) in pairs {
        let (mut ours, mut plain) =
            (Trial::new(name, config, DType::F64), Trial::new(other, of_other, DType::F64));
        ours.steps(1, 8);
        plain.steps(1, 8);
        for ((_, a), (_, b)) in ours.params.iter().zip(&plain.params) {
            // The same formulas in another order of a dozen operations on numbers below 2.
            assert!(values(a).iter().zip(values(b)).all(|(a, b)| (a - b).abs() < 1e-14), "{name}");
        }
    }
}

#[test]
fn muon_makes_momentum_nearly_orthogonal_whatever_its_scale() {
    let step_of = |scale: f64| {
        let x = Var::zeros((3, 8), DType::F64, &Device::Cpu).unwrap();
        let mut muon = Registry::builtin()
            .build("muon", vec![("x".into(), x.clone())], &map(json!({"lr": 1.0})))
            .unwrap();
        let mut grads = GradStore::default();
        grads.insert(&x, (noisy(4, 1, &[3, 8], DType::F64) * scale).unwrap());
        muon.step(&grads, &StepContext::new()).unwrap();
        x.as_tensor().clone()
    };
    let x = step_of(1.0);
    let gram: Vec<Vec<f64>> = x.matmul(&x.t().unwrap()).unwrap().to_vec2().unwrap();
    let trace: f64 = (0..3).map(|i| gram[i][i]).sum();
    assert!((1.5..4.0).contains(&trace), "{gram:?}");
    let other = step_of(1000.0);
    assert!(values(&x).iter().zip(values(&other)).all(|(a, b)| (a - b).abs() < 1e-12));
}

#[test]
fn muon_leaves_vectors_and_exceptions_to_the_rest() {
    let config = json!({"lr": 0.02, "except": ["wide"], "rest": {"name": "sgd", "lr": 0.5}});
    let mut trial = Trial::new("muon", config, DType::F64);
    let before: Vec<Vec<f64>> = trial.params.iter().map(|(_, var)| values(var)).collect();
    let grads = trial.grads(1);
    trial.step(1, &StepContext::new().lr(0.01).probe(true)).unwrap();
    for (i, (name, var)) in trial.params.iter().enumerate() {
        // The rest's rate keeps its ratio: half of 0.5.
        let plain = before[i].iter().zip(values(grads.get(var).unwrap())).map(|(x, g)| x - 0.25 * g);
        let is_plain = plain.zip(values(var)).all(|(a, b)| (a - b).abs() < 1e-15);
        assert_eq!(is_plain, ["b", "wide"].contains(&name.as_str()), "{name}");
    }
    let probed: Vec<_> = trial.optimizer.probe().unwrap().params.iter().map(|p| p.name.as_str()).collect();
    assert_eq!(probed, SHAPES.map(|(name, _)| name));
    let listed = trial.optimizer.params();
    assert_eq!(listed.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), SHAPES.map(|(name, _)| name));
    let before = trial.optimizer.lr();
    trial.optimizer.set_lr(2.0 * before);
    assert_eq!(trial.optimizer.state_dict().unwrap().header.parts["rest"].lr, Some(1.0));
}

#[test]
fn groups_reach_both_parts_of_muon_and_the_inside_of_wrappers() {
    let none = [Group::no_decay()];
    let params = |trial: &Trial| trial.optimizer.params().iter().map(|p| p.group.clone()).collect::<Vec<_>>();
    let config = json!({"rest": {"name": "adamw", "weight_decay": 0.5, "lr": 0.1}});
    let mut grouped = Trial::with_groups("muon", config.clone(), DType::F64, &none).unwrap();
    assert_eq!(params(&grouped), [None, None, Some("rank <= 1".to_owned()), None]);
    let without = json!({"rest": {"name": "adamw", "weight_decay": 0.0, "lr": 0.1}});
    let mut plain = Trial::new("muon", without, DType::F64);
    grouped.steps(1, 3);
    plain.steps(1, 3);
    assert_eq!(grouped.bits(), plain.bits());
    // A rate keeps its ratio to Muon's, and `rest` is for the rest alone.
    let rates = [Group::new("b").set("lr", 0.002), Group::new("w").set("rest", json!({"lr": 7.0}))];
    let saved = Trial::with_groups("muon", config.clone(), DType::F64, &rates)
        .unwrap()
        .optimizer
        .state_dict()
        .unwrap();
    assert_eq!(saved.header.parts["rest"].groups[1].config["lr"], 0.2);
    assert_eq!(saved.header.parts["matrices"].groups[1].config["lr"], 0.001);

    for (name, config) in [
        ("lookahead", json!({"inner": {"name": "adamw", "weight_decay": 0.5}})),
        ("sam", json!({"inner": {"name": "adamw", "weight_decay": 0.5}})),
    ] {
        let direct = Trial::with_groups(name, config.clone(), DType::F64, &none).unwrap();
        let nested = [Group::new("rank <= 1").set("inner", json!({"name": "adamw", "weight_decay": 0.0}))];
        let nested = Trial::with_groups(name, config.clone(), DType::F64, &nested).unwrap();
        let config_of = |trial: &Trial| {
            let inner = &trial.optimizer.state_dict().unwrap().header.parts["inner"];
            inner.groups[1].config["weight_decay"].clone()
        };
        assert_eq!((config_of(&direct), config_of(&nested)), (json!(0.0), json!(0.0)), "{name}");
    }
    let refusal = |name: &str, config: Value, group: Group| {
        Trial::with_groups(name, config, DType::F64, &[group]).err().unwrap().to_string()
    };
    let message = refusal("lookahead", json!({}), Group::new("w").set("k", 3));
    assert_eq!(message, "parameter group `w`: `k` of lookahead is one for all parameters");
    let message = refusal("sam", json!({}), Group::new("w").set("inner", json!({"name": "adam"})));
    assert!(message.contains("`inner.name`: expected sgdm as for all parameters"), "{message}");
    let message = refusal("muon", json!({}), Group::new("b").set("ns_steps", 3));
    assert!(message.contains("the rest has no `ns_steps`"), "{message}");
    let message = refusal("muon", json!({}), Group::new("ww").set("lr", 3));
    assert!(message.contains("matches none of the 4 parameters"), "{message}");
    let mut prodigy =
        Trial::with_groups("prodigy", json!({}), DType::F64, &[Group::new("b").set("d0", 0.5)]).unwrap();
    assert!(
        prodigy.step(1, &StepContext::new()).unwrap_err().to_string().contains("are one for all parameters")
    );
}

#[test]
fn what_is_wrong_with_an_inner_optimizer_is_said_with_its_place() {
    let registry = Registry::builtin();
    let refusal = |name: &str, config: Value| {
        registry.get(name).unwrap().check(&map(config)).expect_err("a refusal").to_string()
    };
    for (name, key) in [("lookahead", "inner"), ("sam", "inner"), ("muon", "rest")] {
        let message = refusal(name, json!({key: {}}));
        assert!(
            message.starts_with(&format!("{name}: {key}.name: expected the name of an optimizer")),
            "{message}"
        );
        let message = refusal(name, json!({key: {"name": 3}}));
        assert!(message.ends_with("found 3"), "{message}");
        let message = refusal(name, json!({key: "adam"}));
        assert!(message.starts_with(&format!("{name}: {key}: ")), "{message}");
        let message = refusal(name, json!({key: {"name": "adamm"}}));
        assert!(message.contains("did you mean `adam`?"), "{message}");
        let message = refusal(name, json!({key: {"name": "adam", "beta3": 1}}));
        assert!(message.starts_with(&format!("adam: unknown hyperparameter `{key}.beta3`")), "{message}");
        let message = refusal(name, json!({key: {"name": "adam", "beta1": 1.5}}));
        assert_eq!(message, format!("adam: {key}.beta1: expected a number in [0, 1), found 1.5"));
        // Inside an inside.
        let nested = json!({key: {"name": "lookahead", "inner": {"name": "adam", "beta1": 1.5}}});
        assert_eq!(
            refusal(name, nested),
            format!("adam: {key}.inner.beta1: expected a number in [0, 1), found 1.5")
        );
    }
    let two = json!({"name": "lookahead", "inner": {"name": "sam"}});
    for (name, key) in [("sam", "inner"), ("muon", "rest")] {
        let message = refusal(name, json!({key: two}));
        assert!(message.contains("takes one gradient a step"), "{message}");
    }
    // Complete: what a recipe's id is made of.
    let full =
        registry.get("lookahead").unwrap().check(&map(json!({"inner": {"name": "momentum"}}))).unwrap();
    assert_eq!(full["inner"]["name"], "sgdm");
    assert_eq!(full["inner"]["dampening"], 0.0);
    assert!(registry.get("sam").unwrap().needs_loss_with(&map(json!({"inner": {"name": "decgd"}}))).unwrap());
    assert_eq!(
        registry.get("lookahead").unwrap().gradients(&map(json!({"inner": {"name": "sam"}}))).unwrap(),
        2
    );
}

#[test]
fn numbers_that_are_none_are_refused_everywhere() {
    let registry = Registry::builtin();
    // Constants of the loss may be any number.
    let modern = registry.list("*").unwrap().filter(|entry| entry.family != Family::Paper);
    for entry in modern {
        for (key, value) in &entry.defaults {
            if value.is_f64() || value.is_null() {
                // JSON has no NaN: what is below every range, and what overflows to infinity.
                for bad in ["-1e308", "1e999"] {
                    let Ok(bad) = serde_json::from_str::<Value>(bad) else { continue };
                    let refused = entry.check(&map(json!({key: bad})));
                    assert!(refused.is_err() || key == "beta2_decay", "{}.{key}: {bad}", entry.info.name);
                }
            }
            for wrong in [json!("x"), json!([1]), json!({"a": 1})] {
                if value.is_object() || (value.is_string() || value.is_array()) {
                    continue;
                }
                assert!(
                    entry.check(&map(json!({key: wrong}))).is_err(),
                    "{}.{key}: {wrong}",
                    entry.info.name
                );
            }
        }
    }
    let refused = |name: &str, config: Value| {
        assert!(registry.get(name).unwrap().check(&map(config.clone())).is_err(), "{name} {config}")
    };
    refused("lookahead", json!({"k": 0}));
    refused("lookahead", json!({"alpha": 1.5}));
    refused("lookahead", json!({"pullback_momentum": "pullback"}));
    refused("muon", json!({"ns_steps": 1000}));
    refused("muon", json!({"ns_coefficients": [1.0, 2.0]}));
    refused("muon", json!({"adjust_lr": "rms"}));
    refused("muon", json!({"except": ["/(/"]}));
    refused("soap", json!({"precondition_frequency": 0}));
    refused("lbfgs", json!({"history_size": 0}));
    refused("ademamix", json!({"alpha_warmup": 0}));
    refused("adafactor", json!({"d": 0.5}));
    refused("prodigy", json!({"growth_rate": 0.5}));
    refused("sf_sgd", json!({"momentum": 0.0}));
    refused("lars", json!({"nesterov": true}));
}

#[test]
fn l_bfgs_minimises_a_quadratic_and_starts_anew_with_other_parameters() {
    let (x, y) = (var(&[4.0, -2.0], DType::F64), var(&[1.0], DType::F64));
    let params = vec![("x".to_owned(), x.clone()), ("y".to_owned(), y.clone())];
    let mut lbfgs = Registry::builtin().build("lbfgs", params, &map(json!({}))).unwrap();
    for _ in 0..25 {
        let loss = (x.sqr().unwrap().sum_all().unwrap()
            + (y.sqr().unwrap() * 30.0).unwrap().sum_all().unwrap())
        .unwrap();
        lbfgs.step(&loss.backward().unwrap(), &StepContext::new()).unwrap();
    }
    assert!(
        values(&x).into_iter().chain(values(&y)).all(|v| v.abs() < 1e-4),
        "{:?} {:?}",
        values(&x),
        values(&y)
    );
    y.set(&tensor(&[0.5], DType::F64)).unwrap();
    lbfgs.step(&y.sqr().unwrap().sum_all().unwrap().backward().unwrap(), &StepContext::new()).unwrap();
    let state = lbfgs.state_dict().unwrap();
    assert!(!state.tensors.contains_key("<shared>.s"));
    assert_eq!(state.tensors["<shared>.g"].dims(), [1]);
}

#[test]
fn while_all_gradients_are_zero_prodigy_does_nothing() {
    let mut trial = Trial::new("prodigy", json!({"use_bias_correction": true}), DType::F32);
    let before = trial.bits();
    let mut zeros = GradStore::default();
    for (_, var) in &trial.params {
        zeros.insert(var, var.zeros_like().unwrap());
    }
    for _ in 0..3 {
        trial.optimizer.step(&zeros, &StepContext::new()).unwrap();
    }
    assert_eq!(trial.bits(), before);
    assert_eq!(trial.optimizer.state_dict().unwrap().header.shared["steps"], 0.0);
    trial.steps(1, 2);
    assert_ne!(trial.bits(), before);
}

#[test]
fn schedule_free_weights_are_the_average_of_the_formula() {
    // Constant rate, weights 1: x is the plain mean of z.
    let config = json!({"lr": 0.5, "weight_lr_power": 0.0});
    let y = var(&[1.0, -2.0], DType::F64);
    let mut free = Registry::builtin().build("sf_sgd", vec![("y".into(), y.clone())], &map(config)).unwrap();
    // Before the first step there is nothing else.
    assert!(free.eval_weights().unwrap());
    assert_eq!(values(&y), [1.0, -2.0]);
    free.train_weights().unwrap();
    let (mut z, mut mean) = ([1.0, -2.0], [0.0, 0.0]);
    for t in 1..=6 {
        let g = [noise(1, t, 0), noise(1, t, 1)];
        let mut grads = GradStore::default();
        grads.insert(&y, tensor(&g, DType::F64));
        free.step(&grads, &StepContext::new()).unwrap();
        for i in 0..2 {
            z[i] -= 0.5 * g[i];
            mean[i] += (z[i] - mean[i]) / t as f64;
        }
        free.eval_weights().unwrap();
        assert!(values(&y).iter().zip(mean).all(|(a, b)| (a - b).abs() < 1e-14), "{:?} {mean:?}", values(&y));
        assert!(matches!(free.step(&grads, &StepContext::new()), Err(Error::Evaluating(_))));
        assert!(matches!(free.state_dict(), Err(Error::Evaluating(_))));
        free.train_weights().unwrap();
    }
}
