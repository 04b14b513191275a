//! Optimizers on a CUDA device make the bits that they make on the CPU. On a real device this is the proof; on the
//! stand-in driver of `cargo xtask gpu-check` it proves the way from tensors to launches.
#![cfg(feature = "cuda")]
#[path = "../device/host.rs"]
#[allow(dead_code)]
mod host;
#[path = "../device/job.rs"]
#[allow(dead_code)]
mod job;
mod standin;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::{Map, Value, json};
use standin::Counter;
use taper_optim::{
    Deferred, Error, Group, Optimizer, Registry, StepContext, global_norm, global_norm_on_device,
};

const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];
const SIZES: &[usize] = &[1, 31, 32, 33, 1000, 100_003];

/// Those made of candle's ops on a GPU: sums there have another order, and the stand-in has none of candle's kernels.
const COMPOSED: [&str; 8] = ["adafactor", "lamb", "lbfgs", "lookahead", "muon", "prodigy", "sam", "soap"];
/// Those that read norms of every step on the host.
const READS: [&str; 2] = ["adagd", "lars"];

/// Every registered optimizer with a kernel of its own, and configurations with other numbers of buffers or other arithmetic.
fn cases() -> Vec<(&'static str, Map<String, Value>)> {
    let registry = Registry::builtin();
    let mut names: Vec<&'static str> = registry.list("*").unwrap().map(|entry| entry.info.name).collect();
    names.retain(|name| !COMPOSED.contains(name));
    let others = [
        ("lars", json!({"momentum": 0.9, "weight_decay": 0.1})),
        ("rmsprop", json!({"centered": true, "momentum": 0.9})),
        ("rmsprop", json!({"centered": true})),
        ("padam", json!({"p": 0.15, "amsgrad": false})),
        ("adabelief", json!({"amsgrad": true})),
        ("decgd", json!({"ams": true})),
        ("decgdw", json!({"ams": true, "x0": "first_iterate"})),
        ("decgd_now", json!({"ams": true})),
        ("decgd", json!({"previous": "stored"})),
        ("decadam", json!({"ams": true, "decay": "paper", "weight_decay": 0.1})),
        ("decadam", json!({"second_moment": false})),
    ];
    let others = others.map(|(name, config)| (name, config.as_object().unwrap().clone()));
    names.into_iter().map(|name| (name, Map::new())).chain(others).collect()
}

fn noise(step: usize, index: usize) -> f64 {
    let mut z = ((step as u64) << 40) ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// Parameters with an optimizer over them, and the same gradients wherever they are.
struct Twin {
    vars: Vec<Var>,
    optimizer: Box<dyn Optimizer>,
    device: Device,
    dtype: DType,
}

impl Twin {
    fn new(name: &str, config: &Map<String, Value>, sizes: &[usize], dtype: DType, device: &Device) -> Self {
        let values = |r: usize, n: usize| tensor(0, r, n, dtype, device);
        let vars: Vec<Var> =
            sizes.iter().enumerate().map(|(r, n)| Var::from_tensor(&values(r, *n)).unwrap()).collect();
        let params = vars.iter().enumerate().map(|(r, var)| (format!("p{r}"), var.clone())).collect();
        let registry = Registry::builtin();
        let entry = registry.get(name).unwrap();
        // Every other parameter with a rate of its own, where there is a rate: rows with different numbers.
        let lr = entry.defaults.get("lr").and_then(Value::as_f64).filter(|_| sizes.len() > 1);
        let groups: Vec<Group> =
            lr.map(|lr| Group::new("/[13579]$/").set("lr", 2.0 * lr)).into_iter().collect();
        let optimizer = entry.build(params, config, &groups).unwrap();
        Self { vars, optimizer, device: device.clone(), dtype }
    }

    fn grads(&self, t: usize) -> GradStore {
        let mut grads = GradStore::default();
        for (r, var) in self.vars.iter().enumerate() {
            grads.insert(var, tensor(t, r, var.elem_count(), self.dtype, &self.device));
        }
        grads
    }

    fn context(&self, t: usize) -> StepContext {
        StepContext::new().lr(0.05 / t as f64).clip_value(0.8)
    }

    fn loss(t: usize) -> f32 {
        2.0 + t as f32 / 8.0
    }

    fn step(&mut self, t: usize) {
        let context = self.context(t).loss(f64::from(Self::loss(t))).clip_norm(3.0, 2.5);
        self.optimizer.step(&self.grads(t), &context).unwrap();
    }

    /// The same step with loss and norm on the device.
    fn step_deferred(&mut self, t: usize, loss: f32) {
        let deferred = Deferred::default()
            .loss(&Tensor::from_vec(vec![loss], (), &self.device).unwrap())
            .clip_norm(&Tensor::from_vec(vec![3f64], (), &self.device).unwrap(), 2.5);
        self.optimizer.step_deferred(&self.grads(t), &self.context(t), &deferred).unwrap();
    }

    /// Parameters and state as bytes.
    fn bytes(&self) -> Vec<u8> {
        let mut state = self.optimizer.state_dict().unwrap();
        for (r, var) in self.vars.iter().enumerate() {
            state.tensors.insert(format!("p{r}"), var.to_device(&Device::Cpu).unwrap());
        }
        state.to_bytes().unwrap()
    }
}

fn tensor(t: usize, r: usize, n: usize, dtype: DType, device: &Device) -> Tensor {
    let values: Vec<f64> = (0..n).map(|i| noise(t, (r << 24) + i)).collect();
    let host = Tensor::from_vec(values, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    host.to_device(device).unwrap()
}

#[test]
fn every_optimizer_has_the_bits_of_the_cpu() {
    let Some(device) = standin::device(&cases(), &DTYPES) else { return };
    for ((name, config), dtype) in cases().iter().flat_map(|case| DTYPES.map(|dtype| (case.clone(), dtype))) {
        let [mut cpu, mut gpu, mut deferring] =
            [&Device::Cpu, &device, &device].map(|device| Twin::new(name, &config, SIZES, dtype, device));
        for t in 1..=3 {
            cpu.step(t);
            gpu.step(t);
            deferring.step_deferred(t, Twin::loss(t));
        }
        assert!(cpu.bytes() == gpu.bytes(), "{name} {config:?} {dtype:?}");
        deferring.optimizer.settle().unwrap();
        assert!(cpu.bytes() == deferring.bytes(), "{name} {config:?} {dtype:?}, deferred");
    }
}

#[test]
fn state_moves_between_devices() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    for (name, config) in cases() {
        let [mut cpu, mut gpu] =
            [&Device::Cpu, &device].map(|device| Twin::new(name, &config, &[1000, 33], DType::F32, device));
        (1..=2).for_each(|t| cpu.step(t));
        gpu.optimizer.load_state_dict(&cpu.optimizer.state_dict().unwrap()).unwrap();
        for (from, to) in cpu.vars.iter().zip(&gpu.vars) {
            to.set(&from.to_device(&device).unwrap()).unwrap();
        }
        (3..=4).for_each(|t| {
            cpu.step(t);
            gpu.step(t);
        });
        assert!(cpu.bytes() == gpu.bytes(), "{name}");
    }
}

#[test]
fn the_norm_of_all_gradients_has_the_bits_of_the_cpu() {
    let Some(device) = standin::device(&cases(), &DTYPES) else { return };
    for dtype in DTYPES {
        let [cpu, gpu] = [&Device::Cpu, &device].map(|device| {
            let twin = Twin::new("sgd", &Map::new(), SIZES, dtype, device);
            global_norm(&twin.grads(1), &twin.vars).unwrap()
        });
        assert_eq!(cpu.to_bits(), gpu.to_bits(), "{dtype:?}: {cpu} {gpu}");
    }
}

#[test]
fn a_refused_loss_changes_nothing_then_and_later() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    for name in ["decgd", "aegd"] {
        for bad in [f32::NAN, f32::INFINITY, -2.0] {
            let mut twin = Twin::new(name, &Map::new(), &[33, 5], DType::F32, &device);
            twin.step_deferred(1, 2.0);
            twin.optimizer.settle().unwrap();
            let values =
                |twin: &Twin| -> Vec<Vec<f32>> { twin.vars.iter().map(|v| v.to_vec1().unwrap()).collect() };
            let before = values(&twin);
            twin.step_deferred(2, bad);
            twin.step_deferred(3, 2.0);
            assert_eq!(values(&twin), before, "{name} {bad}");
            let error = twin.optimizer.settle().unwrap_err();
            assert!(matches!(error, Error::Refused { .. }), "{error}");
        }
    }
}

/// What a device refused is reported by the next call that may wait, has left no trace in the counters either, and is forgotten
/// when state is loaded.
#[test]
fn a_refused_step_is_reported_by_the_next_call_and_cleared_by_loading() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    for name in ["decgd", "adam"] {
        let mut twin = Twin::new(name, &Map::new(), &[33, 5], DType::F32, &device);
        twin.step_deferred(1, 2.0);
        twin.optimizer.settle().unwrap();
        let (before, saved) = (twin.bytes(), twin.optimizer.state_dict().unwrap());
        twin.step_deferred(2, f32::NAN);
        twin.step_deferred(3, 2.0);
        let error = twin.optimizer.step(&twin.grads(4), &twin.context(4).loss(2.0)).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert!(before == twin.bytes(), "{name}: a refused step left traces");
        twin.optimizer.load_state_dict(&saved).unwrap();
        twin.step(2);
        twin.optimizer.settle().unwrap();
        assert!(before != twin.bytes(), "{name}: no step after loading");
    }
}

#[test]
fn a_gradient_on_another_device_is_refused() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    let mut twin = Twin::new("adam", &Map::new(), &[33, 5], DType::F32, &device);
    let before = twin.bytes();
    let mut grads = twin.grads(1);
    grads.insert(&twin.vars[1], tensor(1, 1, 5, DType::F32, &Device::Cpu));
    let error = twin.optimizer.step(&grads, &twin.context(1)).unwrap_err();
    assert!(matches!(error, Error::Gradient { .. }), "{error}");
    assert!(before == twin.bytes());
}

/// A step of any number of parameters is an upload and a launch or two, and waits for nothing.
#[test]
fn a_step_is_a_handful_of_launches_and_waits_for_nothing() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    let sizes = vec![33; 100];
    for (name, config) in cases() {
        let mut twin = Twin::new(name, &config, &sizes, DType::F32, &device);
        twin.step_deferred(1, 2.0);
        let inputs: Vec<_> = (2..=4)
            .map(|t| {
                let loss = Tensor::from_vec(vec![2f32], (), &device).unwrap();
                (twin.grads(t), twin.context(t), loss)
            })
            .collect();
        let before = Counter::all();
        for (grads, context, loss) in &inputs {
            let norm = global_norm_on_device(grads, &twin.vars).unwrap();
            let deferred = Deferred::default().loss(loss).clip_norm(&norm, 2.5);
            twin.optimizer.step_deferred(grads, context, &deferred).unwrap();
        }
        let (Some(before), Some(after)) = (before, Counter::all()) else { return };
        let [launches, waits, events] = [Counter::Launches, Counter::Waits, Counter::Events]
            .map(|c| after[c as usize] - before[c as usize]);
        // Three for the norm, one that puts in norm and loss, one for the step; AdaGD also reads its own norms, and LARS those
        // of each parameter.
        let (most, may_wait) = match name {
            "adagd" => (3 * 7, 3 * 3),
            "lars" => (3 * (5 + 3 * 100), 3 * 3 * 100),
            _ => (3 * 5, 0),
        };
        assert!(launches <= most, "{name}: {launches} launches in three steps");
        assert!(waits <= may_wait, "{name}: waited {waits} times in three steps");
        assert_eq!(events, 0, "{name}: waited for an event");
    }
}

/// However many steps are taken, the host waits once: when it settles.
#[test]
fn nothing_is_waited_for_until_the_optimizer_settles() {
    const STEPS: usize = 20;
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    for (name, config) in cases().iter().filter(|(name, _)| !READS.contains(name)) {
        let mut twin = Twin::new(name, config, &[1000, 33], DType::F32, &device);
        // The first step compiles.
        twin.step_deferred(1, Twin::loss(1));
        twin.optimizer.settle().unwrap();
        let waits = || Counter::all().map(|all| all[Counter::Waits as usize] + all[Counter::Events as usize]);
        let before = waits();
        for t in 2..2 + STEPS {
            let (grads, context) = (twin.grads(t), twin.context(t));
            let loss = Tensor::from_vec(vec![Twin::loss(t)], (), &device).unwrap();
            let norm = global_norm_on_device(&grads, &twin.vars).unwrap();
            let deferred = Deferred::default().loss(&loss).clip_norm(&norm, f64::INFINITY);
            twin.optimizer.step_deferred(&grads, &context, &deferred).unwrap();
        }
        let (Some(before), Some(taken)) = (before, waits()) else { return };
        assert_eq!(taken - before, 0, "{name}: waited in {STEPS} steps");
        twin.optimizer.settle().unwrap();
        assert_eq!(waits().unwrap() - taken, 1, "{name}: settling reads two words");
    }
}

/// A bound that is no bound clips nothing, and still refuses a gradient that is not finite; a loss that is not finite stops
/// also the optimizers that do not follow it.
#[test]
fn without_clipping_a_step_has_the_same_bits_and_the_same_refusals() {
    let Some(device) = standin::device(&cases(), &[DType::F32]) else { return };
    for (name, config) in cases().iter().filter(|(name, _)| ["adam", "decgd"].contains(name)) {
        let step = |twin: &mut Twin, t: usize, loss: f32, grads: &GradStore| {
            let loss = Tensor::from_vec(vec![loss], (), &device).unwrap();
            let norm = global_norm_on_device(grads, &twin.vars).unwrap();
            let deferred = Deferred::default().loss(&loss).clip_norm(&norm, f64::INFINITY);
            twin.optimizer.step_deferred(grads, &twin.context(t), &deferred).unwrap();
        };
        let [mut cpu, mut gpu] =
            [&Device::Cpu, &device].map(|device| Twin::new(name, config, &[1000, 33], DType::F32, device));
        for t in 1..=3 {
            let context = cpu.context(t).loss(f64::from(Twin::loss(t)));
            cpu.optimizer.step(&cpu.grads(t), &context).unwrap();
            let grads = gpu.grads(t);
            step(&mut gpu, t, Twin::loss(t), &grads);
        }
        gpu.optimizer.settle().unwrap();
        assert!(cpu.bytes() == gpu.bytes(), "{name}");

        let values =
            |twin: &Twin| -> Vec<Vec<f32>> { twin.vars.iter().map(|v| v.to_vec1().unwrap()).collect() };
        let before = values(&gpu);
        let grads = gpu.grads(4);
        step(&mut gpu, 4, f32::NAN, &grads);
        assert_eq!(values(&gpu), before, "{name}: a step with a loss that is NaN");
        assert!(gpu.optimizer.settle().is_err());

        let mut other = Twin::new(name, config, &[1000, 33], DType::F32, &device);
        let before = values(&other);
        let mut grads = other.grads(1);
        let infinite = Tensor::from_vec(vec![f32::INFINITY; 33], 33, &device).unwrap();
        grads.insert(&other.vars[1], infinite);
        step(&mut other, 1, 2.0, &grads);
        assert_eq!(values(&other), before, "{name}: a step with an infinite gradient");
        assert!(other.optimizer.settle().is_err());
    }
}
