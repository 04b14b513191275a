//! Every rule with every number of buffers and every branch of its arithmetic, as data.
use crate::job::{Job, Row, Step};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use half::{bf16, f16};
use serde_json::{Value, json};
use taper_optim::device::Source;
use taper_optim::rule::{Config, Input, Loss, MAX_BUFFERS, Reduce, Rule, SUMS, Scalars};
use taper_optim::rules::*;
use taper_optim::{Deferred, Group, Optim, Optimizer, StepContext};

/// A rule with a configuration, whatever its type.
pub trait Case {
    fn name(&self) -> String;
    fn source(&self, dtype: DType) -> Source;
    /// What the CPU makes of `steps` steps of parameters with `sizes` elements, and the job that asks a device for the same.
    /// `sums` asks the device for the sums of a reduction.
    fn run(&self, dtype: DType, sizes: &[usize], steps: usize, host: Host, sums: &Sums) -> (Job, Vec<u8>);
}

/// How much of a step the host has seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Host {
    /// Everything.
    Knows,
    /// Neither the loss, f32 on the device, nor the norm that gradients are clipped by.
    Defers32,
    /// The same with a loss in f64.
    Defers64,
}

pub type Sums<'a> = dyn Fn(&Job) -> [f64; SUMS] + 'a;

struct Of<R: Rule>(R::Config, String);

pub fn all() -> Vec<Box<dyn Case>> {
    fn of<R: Rule>(overrides: Value) -> Box<dyn Case> {
        let (_, base) = R::names().remove(0);
        let mut config = serde_json::to_value(&base).unwrap();
        config.as_object_mut().unwrap().extend(overrides.as_object().unwrap().clone());
        let config: R::Config = serde_json::from_value(config).unwrap();
        let name = format!("{} {overrides}", R::info(&config).name);
        Box::new(Of::<R>(config, name))
    }
    vec![
        of::<sgd::SgdRule>(json!({"weight_decay": 0.1})),
        of::<sgd::SgdRule>(json!({"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1})),
        of::<sgd::SgdRule>(json!({"momentum": 0.9, "nesterov": true})),
        of::<adagrad::AdaGradRule>(json!({"initial_accumulator": 0.1, "lr_decay": 0.1, "weight_decay": 0.1})),
        of::<adadelta::AdaDeltaRule>(json!({"weight_decay": 0.1})),
        of::<rmsprop::RmsPropRule>(json!({"weight_decay": 0.1})),
        of::<rmsprop::RmsPropRule>(json!({"momentum": 0.9})),
        of::<rmsprop::RmsPropRule>(json!({"centered": true})),
        of::<rmsprop::RmsPropRule>(json!({"centered": true, "momentum": 0.9})),
        of::<adam::AdamRule>(json!({"weight_decay": 0.1})),
        of::<adam::AdamRule>(json!({"weight_decay": 0.1, "decoupled": true})),
        of::<adam::AdamRule>(json!({"amsgrad": true})),
        of::<adam::AdamRule>(json!({"amsgrad": true, "max_after_bias_correction": true})),
        of::<padam::PAdamRule>(json!({"weight_decay": 0.1})),
        of::<padam::PAdamRule>(json!({"p": 0.15})),
        of::<padam::PAdamRule>(json!({"p": 0.25, "amsgrad": false})),
        of::<padam::PAdamRule>(json!({"p": 0.5, "amsgrad": false})),
        of::<radam::RAdamRule>(json!({"beta2": 0.9, "weight_decay": 0.1})),
        of::<radam::RAdamRule>(json!({"beta2": 0.9, "weight_decay": 0.1, "variant": "pytorch"})),
        of::<yogi::YogiRule>(json!({"weight_decay": 0.1})),
        of::<adabelief::AdaBeliefRule>(json!({"weight_decay": 0.1})),
        of::<adabelief::AdaBeliefRule>(json!({"amsgrad": true})),
        of::<adabelief::AdaBeliefRule>(
            json!({"beta2": 0.9, "rectify": true, "weight_decouple": true, "weight_decay": 0.1}),
        ),
        of::<adabound::AdaBoundRule>(json!({"weight_decay": 0.1})),
        of::<adabound::AdaBoundRule>(json!({"amsbound": true})),
        of::<aegd::AegdRule>(json!({"weight_decay": 0.1})),
        of::<aegd::AegdRule>(json!({"weight_decay": 0.1, "decoupled": true})),
        of::<adagd::AdaGdRule>(json!({})),
        of::<adamax::AdamaxRule>(json!({"weight_decay": 0.1})),
        of::<nadam::NAdamRule>(json!({"weight_decay": 0.1})),
        of::<nadam::NAdamRule>(json!({"weight_decay": 0.1, "decoupled_weight_decay": true})),
        of::<nadamw::NAdamWRule>(json!({"weight_decay": 0.1})),
        of::<lion::LionRule>(json!({"weight_decay": 0.1})),
        of::<adan::AdanRule>(json!({"weight_decay": 0.1})),
        of::<adan::AdanRule>(json!({"weight_decay": 0.1, "no_prox": true})),
        of::<adopt::AdoptRule>(json!({"weight_decay": 0.1})),
        of::<adopt::AdoptRule>(
            json!({"weight_decay": 0.1, "decoupled_weight_decay": true, "clip_exponent": null}),
        ),
        of::<ademamix::AdEmaMixRule>(json!({"weight_decay": 0.1, "alpha_warmup": 4, "beta3_warmup": 4})),
        of::<sf_adamw::SfAdamWRule>(json!({"weight_decay": 0.1, "warmup_steps": 4, "r": 1.0})),
        of::<sf_sgd::SfSgdRule>(json!({"weight_decay": 0.1})),
        of::<lars::LarsRule>(json!({"weight_decay": 0.1})),
        of::<lars::LarsRule>(json!({"always_adapt": true, "momentum": 0.9, "nesterov": true})),
        of::<decgd::DecGdRule>(json!({"c": 0.5})),
        of::<decgd::DecGdRule>(json!({"ams": true, "weight_decay": 0.1, "decay": "paper"})),
        of::<decgd::DecGdRule>(json!({"ams": true, "ams_init": "inf", "x0": "first_iterate"})),
        of::<decgd::DecGdRule>(json!({"weight_decay": 0.1, "decay": "l2", "v_floor": 1.1})),
        of::<decgd::DecGdRule>(json!({"bound": "now"})),
        of::<decgd::DecGdRule>(json!({"bound": "falling"})),
        of::<decgd::DecGdRule>(
            json!({"bound": "falling", "ams": true, "weight_decay": 0.1, "decay": "paper"}),
        ),
        of::<decgd::DecGdRule>(json!({"previous": "stored", "bound": "now"})),
        of::<decgd::DecGdRule>(json!({"previous": "stored", "ams": true, "x0": "first_iterate"})),
        of::<decadam::DecAdamRule>(json!({"weight_decay": 0.1, "decay": "decoupled"})),
        of::<decadam::DecAdamRule>(json!({"ams": true, "weight_decay": 0.1, "decay": "l2", "v_floor": 1.1})),
        of::<decadam::DecAdamRule>(json!({"second_moment": false, "eps": 0.0})),
        of::<decadam::DecAdamRule>(json!({"previous": "stored", "weight_decay": 0.1, "decay": "decoupled"})),
    ]
}

/// A number in [-1, 1) that depends on its arguments only (splitmix64), with zeros and tiny numbers among them.
fn noise(step: usize, index: usize) -> f64 {
    let mut z = ((step as u64) << 40) ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    let x = ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 52) as f64 - 1.0;
    match z % 37 {
        0 => 0.0,
        1 => x * 1e-6,
        _ => x,
    }
}

fn tensor(dtype: DType, step: usize, row: usize, n: usize) -> Tensor {
    let values: Vec<f64> = (0..n).map(|i| noise(step, (row << 24) + i)).collect();
    Tensor::from_vec(values, n, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The elements of a tensor as they lie in memory.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    match t.dtype() {
        DType::F64 => t.to_vec1::<f64>().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => t.to_vec1::<f16>().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::BF16 => t.to_vec1::<bf16>().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect(),
        _ => t.to_vec1::<f32>().unwrap().iter().flat_map(|v| v.to_le_bytes()).collect(),
    }
}

impl<R: Rule> Case for Of<R> {
    fn name(&self) -> String {
        self.1.clone()
    }

    fn source(&self, dtype: DType) -> Source {
        let buffers = R::buffers(&self.0).len();
        // By rule, not by optimizer: cases that differ in numbers only share a program.
        Source::of::<R>(R::names()[0].0.name, buffers, dtype).unwrap()
    }

    fn run(&self, dtype: DType, sizes: &[usize], steps: usize, host: Host, sums: &Sums) -> (Job, Vec<u8>) {
        let Of(config, _) = self;
        let buffers = R::buffers(config);
        let vars: Vec<Var> = sizes
            .iter()
            .enumerate()
            .map(|(r, n)| Var::from_tensor(&tensor(dtype, 0, r, *n)).unwrap())
            .collect();
        let params = vars.iter().enumerate().map(|(r, var)| (format!("p{r}"), var.clone())).collect();
        // Every other parameter in a group of its own: rows whose numbers differ. AdaGD has no rate to differ in.
        let apart = R::REDUCE.is_none() && sizes.len() > 1;
        let group = Group::new("/[13579]$/").set("lr", 2.0 * config.lr());
        let groups = if apart { std::slice::from_ref(&group) } else { &[] };
        let mut cpu = Optim::<R>::with_groups(params, config.clone(), groups).unwrap();
        let mut configs = [config.clone(), config.clone()];
        if apart {
            let mut other = serde_json::to_value(config).unwrap();
            other.as_object_mut().unwrap().extend(group.overrides.clone());
            configs[1] = serde_json::from_value(other).unwrap();
        }
        let state = |cpu: &Optim<R>, r: usize| -> Vec<u8> {
            let saved = cpu.state_dict().unwrap();
            buffers.iter().flat_map(|name| bytes(&saved.tensors[&format!("p{r}.{name}")])).collect()
        };
        let rows = |cpu: &Optim<R>| -> Vec<Row> {
            let row = |r: usize| Row { elements: sizes[r], x: bytes(&vars[r]), state: state(cpu, r) };
            (0..sizes.len()).map(row).collect()
        };

        let mut job = Job { rows: rows(&cpu), steps: Vec::new() };
        let mut memory = vec![vec![0.0; R::MEMORY.len()]; sizes.len()];
        for t in 1..=steps {
            let grads: Vec<Tensor> = sizes.iter().enumerate().map(|(r, n)| tensor(dtype, t, r, *n)).collect();
            // Exact in f32, so that a loss of either precision is the same number.
            let (loss, lr) = (2.0 + t as f64 / 8.0, 0.05 / t as f64);
            let (norm, max) = (3.0, 2.5);
            let context = StepContext::new().lr(lr).clip_value(0.8);
            // What a rule must know of the first step, the driver waits for.
            let host = if t == 1 && R::KNOWS_FIRST_LOSS { Host::Knows } else { host };
            let (known, given) = match host {
                Host::Knows => (context.loss(loss).clip_norm(norm, max), 0),
                Host::Defers32 => (context, 1 | 4),
                Host::Defers64 => (context, 2 | 4),
            };
            let mut step = Step {
                scale: known.grad_scale,
                limit: known.grad_limit,
                max_norm: max,
                given,
                loss,
                norm,
                offset: R::LOSS.map_or(0.0, |c| c(config)),
                start: [0.0; MAX_BUFFERS],
                starts: t == 1,
                scalars: vec![vec![0.0; R::Scalars::NAMES.len()]; sizes.len()],
                grads: grads.iter().map(bytes).collect(),
            };
            let sums: Vec<[f64; SUMS]> = match R::REDUCE {
                Some(Reduce::Together(_)) if t > 1 => {
                    vec![sums(&Job { rows: rows(&cpu), steps: vec![step.clone()] }); sizes.len()]
                }
                // A reduction for each parameter, of that one alone.
                Some(Reduce::Each(_)) => {
                    let alone = rows(&cpu).into_iter().zip(&step.scalars).zip(&step.grads);
                    alone
                        .map(|((row, scalars), grad)| {
                            let (scalars, grads) = (vec![scalars.clone()], vec![grad.clone()]);
                            let step = Step { scalars, grads, ..step.clone() };
                            sums(&Job { rows: vec![row], steps: vec![step] })
                        })
                        .collect()
                }
                _ => vec![[0.0; SUMS]; sizes.len()],
            };
            let seen = if host == Host::Knows { Loss::Known(loss) } else { Loss::OnDevice };
            for (r, memory) in memory.iter_mut().enumerate() {
                let config = &configs[r % 2];
                let lr = if r % 2 == 0 { lr } else { config.lr() * (lr / configs[0].lr()) };
                let (t, momentum, sums) = (t as u64, config.momentum(), sums[r]);
                let input = Input { t, lr, momentum, loss: Some(seen), sums };
                step.scalars[r] = R::prepare(config, &input, memory).unwrap().values();
                step.start = R::start(config, &input).unwrap();
            }
            job.steps.push(step);

            let mut store = GradStore::default();
            vars.iter().zip(&grads).for_each(|(var, grad)| store.insert(var, grad.clone()).map_or((), drop));
            let scalar = |v: f64| Tensor::new(v, &Device::Cpu).unwrap();
            let deferred = Deferred::default().loss(&scalar(loss)).clip_norm(&scalar(norm), max);
            match host {
                Host::Knows => Optimizer::step(&mut cpu, &store, &known).unwrap(),
                _ => cpu.step_deferred(&store, &known, &deferred).unwrap(),
            }
            // What the device's sums were made into is what the CPU kept.
            let saved = cpu.state_dict().unwrap();
            for (r, memory) in memory.iter().enumerate() {
                let kept = &saved.header.params[&format!("p{r}")].memory;
                for (name, value) in R::MEMORY.iter().zip(memory) {
                    assert_eq!(kept[*name].to_bits(), value.to_bits(), "{}: {name} at step {t}", self.1);
                }
            }
        }
        let expected = rows(&cpu).into_iter().flat_map(|row| [row.x, row.state].concat()).collect();
        (job, expected)
    }
}
