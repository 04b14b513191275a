//! What a crate outside the repository relies on.
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use outside::Net;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use taper_optim::rule::{Config, Invalid, ranges};
use taper_optim::{
    Accumulator, Adam, AdamConfig, DecGd, DecGdConfig, Error, Group, Info, Load, LossScaler, Precision, Registry,
    Schedule, Setup, Sgd, SgdConfig, StateDict, StepContext, TensorRule, TensorStep,
};

#[test]
fn a_step_and_readers_on_the_pool_do_not_wait_for_each_other() {
    let (done, finished) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let vars: Vec<Var> = (0..3).map(|_| Var::ones(200_000, DType::F32, &Device::Cpu).unwrap()).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let (read, over) = (vars.clone(), stop.clone());
        let reader = std::thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                (0..32usize).into_par_iter().for_each(|i| {
                    let product = read[i % 3].as_tensor() * read[(i + 1) % 3].as_tensor();
                    product.unwrap().sum_all().unwrap();
                });
            }
        });
        let mut optimizer = Adam::in_order(vars.clone(), AdamConfig::default()).unwrap();
        for _ in 0..20 {
            let sums = vars.iter().map(|v| v.sqr().unwrap().sum_all().unwrap());
            let loss = sums.reduce(|a, b| (a + b).unwrap()).unwrap();
            optimizer.backward_step(&loss).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        done.send(()).unwrap();
    });
    finished.recv_timeout(std::time::Duration::from_secs(120)).expect("a deadlock");
}

#[test]
fn a_restored_run_continues_to_the_bit_however_the_map_is_ordered() -> Result<()> {
    // A new VarMap has another order every time.
    for stop in 0..20 {
        let groups = [Group::no_decay()];
        let build = |net: &Net| Adam::from_varmap_with_groups(&net.vars, AdamConfig::adamw(), &groups);
        let straight = Net::new(DType::F32)?;
        let mut optimizer = build(&straight)?;
        let run = |net: &Net, optimizer: &mut Adam, steps: std::ops::Range<usize>| -> Result<()> {
            for t in steps {
                if t == 3 {
                    optimizer.set_lr(0.01);
                }
                optimizer.backward_step(&net.loss(t)?)?;
            }
            Ok(())
        };
        run(&straight, &mut optimizer, 0..20)?;
        let first = Net::new(DType::F32)?;
        let mut optimizer = build(&first)?;
        run(&first, &mut optimizer, 0..stop)?;
        let bytes = optimizer.state_dict()?.to_bytes()?;
        let second = Net::new(DType::F32)?;
        second.copy_from(&first)?;
        let mut optimizer = build(&second)?;
        optimizer.load_state_dict(&StateDict::from_bytes(&bytes)?)?;
        run(&second, &mut optimizer, stop..20)?;
        assert_eq!(straight.bits()?, second.bits()?, "stopped at {stop}");
    }
    Ok(())
}

#[test]
fn positions_are_no_names() -> Result<()> {
    let net = Net::new(DType::F32)?;
    let build = || Adam::new(net.vars.all_vars(), AdamConfig::default());
    let mut optimizer = build()?;
    optimizer.backward_step(&net.loss(0)?)?;
    let state = optimizer.state_dict()?;
    let error = build()?.load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains("from_varmap"), "{error}");
    optimizer.load_state_dict_with(&state, Load::strict().same_order())?;
    // Into named parameters it does not fit either.
    assert!(Adam::from_varmap(&net.vars, AdamConfig::default())?.load_state_dict(&state).is_err());
    Ok(())
}

#[test]
fn candles_trait_still_works_and_errors_come_through_it() -> Result<()> {
    fn train<O: candle_nn::Optimizer>(optimizer: &mut O, loss: &Tensor) -> Result<()> {
        optimizer.set_learning_rate(0.5);
        optimizer.backward_step(loss)
    }
    let x = Var::new(&[-1f32], &Device::Cpu)?;
    let mut optimizer = DecGd::new(vec![x.clone()], DecGdConfig::default())?;
    let error = train(&mut optimizer, &x.log()?).unwrap_err();
    assert!(matches!(Error::in_candle(&error), Some(Error::LossNotFinite { .. })), "{error}");
    let error = train(&mut optimizer, &x.affine(3.0, 0.0)?).unwrap_err();
    assert!(matches!(Error::in_candle(&error), Some(Error::Loss { .. })), "{error}");
    train(&mut optimizer, &x.sqr()?)?;
    assert_eq!(optimizer.lr(), 0.5);
    Ok(())
}

#[test]
fn a_gradient_that_is_no_number_changes_nothing() -> Result<()> {
    let x = Var::new(&[0f32, 4.], &Device::Cpu)?;
    let mut optimizer = Sgd::in_order(vec![x.clone()], SgdConfig::default())?;
    let error = optimizer.backward_step(&x.sqrt()?.sum_all()?).unwrap_err();
    assert!(matches!(error, Error::GradientNotFinite(_)), "{error}");
    assert_eq!(x.to_vec1::<f32>()?, [0.0, 4.0]);
    let error = optimizer.backward_step(&x.sqr()?).unwrap_err();
    assert!(matches!(error, Error::LossShape(_)), "{error}");
    Ok(())
}

#[test]
fn schedules_groups_clipping_accumulation_and_probe() -> Result<()> {
    let net = Net::new(DType::F32)?;
    let groups = [Group::new("first.*").set("lr", 0.02), Group::new("second.bias").set("momentum", 0.5)];
    let config = SgdConfig { lr: 0.0, momentum: 0.9, ..Default::default() };
    let mut optimizer = Sgd::from_varmap_with_groups(&net.vars, config, &groups)?;
    let second = net.named()[3].1.flatten_all()?.to_vec1::<f32>()?;
    let schedule = Schedule::Cosine { length: None, end: 0.1 };
    let mut mean = Accumulator::with_params(net.named());
    let (mut before, mut after) = (None, 0.0);
    for t in 0..20 {
        for half in 0..2 {
            let loss = net.loss(half)?;
            mean.add(&loss.backward()?, loss.to_scalar::<f32>()?.into(), 8.0)?;
            // Between micro-batches, too, a run can be stopped.
            let saved = StateDict::from_bytes(&mean.state_dict()?.to_bytes()?)?;
            mean = Accumulator::with_params(net.named());
            mean.load_state_dict(&saved, Load::strict())?;
        }
        let (grads, loss) = mean.take()?.unwrap();
        before.get_or_insert(loss);
        after = loss;
        let context = StepContext::new().loss(loss).factor(schedule.factor(t as u64, 20)).max_norm(0.5).probe(true);
        optimizer.step_with(&grads, &context)?;
        assert_eq!(optimizer.probe().unwrap().params.len(), 4);
    }
    // The first layer learns at its own rate although the default is 0, and the second stays.
    assert!(after < before.unwrap(), "{before:?} → {after}");
    assert_eq!(net.named()[3].1.flatten_all()?.to_vec1::<f32>()?, second);
    Ok(())
}

#[test]
fn half_precision_with_master_weights_and_loss_scaling() -> Result<()> {
    for precision in [Precision::default().master_weights(), Precision::default().stochastic(7)] {
        let net = Net::new(DType::F16)?;
        let mut optimizer = Adam::from_varmap(&net.vars, AdamConfig::default())?.precision(precision)?;
        let mut scaler = LossScaler { scale: 2f64.powi(24), ..Default::default() };
        let before = net.loss(0)?.to_scalar::<f32>()?;
        for _ in 0..60 {
            let loss = net.loss(0)?;
            let was = net.bits()?;
            if !scaler.backward_step(&mut optimizer, &loss, &StepContext::new())? {
                assert_eq!(net.bits()?, was);
            }
        }
        assert!(scaler.skipped > 0 && net.loss(0)?.to_scalar::<f32>()? < before);
    }
    Ok(())
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct UnitConfig {
    lr: f64,
}

impl Default for UnitConfig {
    fn default() -> Self {
        Self { lr: 0.1 }
    }
}

impl Config for UnitConfig {
    fn lr(&self) -> f64 {
        self.lr
    }
    fn check(&self) -> std::result::Result<(), Invalid> {
        ranges::lr(self.lr)
    }
}

/// Steps of one length a tensor.
#[derive(Debug)]
struct Unit;

static UNIT: Info = Info { name: "unit", about: "steps of one length", paper: "", year: 2024, formula: "x ← x - ηg/‖g‖" };
static HALF: Info = Info { name: "half_sgd", about: "SGD at half the rate", paper: "", year: 2024, formula: "" };

impl TensorRule for Unit {
    type Config = UnitConfig;
    fn names() -> Vec<(&'static Info, UnitConfig)> {
        vec![(&UNIT, UnitConfig::default())]
    }
    fn info(_: &UnitConfig) -> &'static Info {
        &UNIT
    }
    fn buffers(_: &UnitConfig) -> &'static [&'static str] {
        &[]
    }
    fn step(step: &mut TensorStep<UnitConfig>) -> taper_optim::Result<()> {
        for p in &mut step.params {
            let direction = p.g.broadcast_div(&p.g.sqr()?.sum_all()?.sqrt()?)?;
            p.set((&p.x - (direction * p.lr)?)?);
        }
        Ok(())
    }
}

#[test]
fn optimizers_of_ones_own_by_name() -> Result<()> {
    let mut registry = Registry::builtin();
    registry.register_tensor::<Unit>()?;
    registry.register_with(&HALF, |setup: Setup<SgdConfig>| {
        let config = SgdConfig { lr: setup.config.lr / 2.0, ..setup.config };
        Ok(Box::new(Sgd::with_groups(setup.params, config, setup.groups)?))
    })?;
    for (name, moved) in [("unit", [0.06, 0.08]), ("half_sgd", [0.015, 0.02])] {
        let x = Var::new(&[3f64, 4.], &Device::Cpu)?;
        let mut optimizer = registry.build(name, vec![("x".into(), x.clone())], &Default::default())?;
        let mut grads = GradStore::default();
        grads.insert(&x, Tensor::new(&[3f64, 4.], &Device::Cpu)?);
        optimizer.step(&grads, &StepContext::new())?;
        for ((x, start), moved) in x.to_vec1::<f64>()?.into_iter().zip([3.0, 4.0]).zip(moved) {
            assert!((start - x - moved).abs() < 1e-12, "{name}: {}", start - x);
        }
        optimizer.load_state_dict(&optimizer.state_dict()?)?;
    }
    Ok(())
}

#[test]
fn an_empty_map_is_no_error() -> Result<()> {
    let mut optimizer = DecGd::from_varmap(&VarMap::new(), DecGdConfig::default())?;
    Ok(optimizer.backward_step(&Tensor::new(1f32, &Device::Cpu)?)?)
}
