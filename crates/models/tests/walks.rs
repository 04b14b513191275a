//! Several walks back at once: nested in each other, and of models that share a thread pool.
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use rayon::prelude::*;
use serde_json::json;
use std::sync::{Arc, Mutex};
use taper_models::ops::{Activation, BatchNorm, FeatureMap, ScaleInit, Statistics, batch_norm, linear};
use taper_models::rng::Rng;
use taper_models::{Mode, Params, Registry, Result, Task};

fn numbers(name: &str, dims: &[usize]) -> Tensor {
    let mut rng = Rng::new(3, "test", name, 0);
    let values: Vec<f64> = (0..dims.iter().product()).map(|_| rng.uniform() - 0.5).collect();
    Tensor::from_vec(values, dims, &Device::Cpu).unwrap()
}

fn var(name: &str, dims: &[usize]) -> Var {
    Var::from_tensor(&numbers(name, dims)).unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.flatten_all().unwrap().to_dtype(DType::F64).unwrap().to_vec1().unwrap()
}

/// x·wᵀ that is computed again in the backward pass, by a walk of its own: activation checkpointing.
struct Again {
    w: Var,
    ours: bool,
    dw: Arc<Mutex<Option<Tensor>>>,
}

impl CustomOp1 for Again {
    fn name(&self) -> &'static str {
        "again"
    }
    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = Tensor::from_slice(x.as_slice::<f64>()?, layout.shape(), &Device::Cpu)?;
        let y = linear(&x, &self.w, None, Activation::None)?;
        Ok((CpuStorage::F64(values(&y)), y.shape().clone()))
    }
    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let x = Var::from_tensor(&x.copy()?)?;
        let y = (linear(&x, &self.w, None, Activation::None)? * dy)?.sum_all()?;
        let grads = if self.ours { taper_models::backward(&y)? } else { y.backward()? };
        *self.dw.lock().unwrap() = grads.get(&self.w).cloned();
        Ok(grads.get(&x).cloned())
    }
}

#[test]
fn a_walk_inside_an_ops_backward_pass_loses_no_gradient() -> Result<()> {
    let x = numbers("x", &[5, 4]);
    let (w, inner, last) = (var("w", &[6, 4]), var("inner", &[3, 6]), var("last", &[2, 3]));
    let first = || linear(&x, &w, None, Activation::Relu);
    let loss =
        |y: &Tensor| -> Result<Tensor> { Ok(linear(y, &last, None, Activation::None)?.sqr()?.sum_all()?) };
    let plain = taper_models::backward(&loss(&linear(&first()?, &inner, None, Activation::None)?)?)?;
    for (outer, ours) in [(true, true), (true, false), (false, true)] {
        let dw = Arc::default();
        let again = first()?.apply_op1(Again { w: inner.clone(), ours, dw: Arc::clone(&dw) })?;
        let loss = loss(&again)?;
        let grads = if outer { taper_models::backward(&loss)? } else { loss.backward()? };
        for v in [&w, &last] {
            let found = grads.get(v).expect("a gradient of the outer walk");
            assert_eq!(values(found), values(plain.get(v).unwrap()));
        }
        let found = dw.lock().unwrap().take().expect("a gradient of the inner walk");
        assert_eq!(values(&found), values(plain.get(&inner).unwrap()));
    }
    Ok(())
}

/// x itself; on the way back the thread looks for another task of the pool first, as it does while it waits for its own.
struct Pause;

impl CustomOp1 for Pause {
    fn name(&self) -> &'static str {
        "pause"
    }
    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F64(x.as_slice::<f64>()?.to_vec()), layout.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        rayon::yield_now();
        Ok(Some(dy.clone()))
    }
}

#[test]
fn a_walk_taken_from_the_pool_in_the_middle_of_another_loses_no_gradient() {
    let walk = |number: usize| -> Result<Vec<Vec<f64>>> {
        let x = numbers(&format!("x{number}"), &[5, 4]);
        let (w, last) = (var("w", &[6, 4]), var("last", &[2, 6]));
        let y = linear(&x, &w, None, Activation::None)?.apply_op1(Pause)?;
        let grads = taper_models::backward(&linear(&y, &last, None, Activation::None)?.sum_all()?)?;
        Ok([&w, &last].map(|v| values(grads.get(v).unwrap_or_else(|| panic!("walk {number}")))).into())
    };
    let alone: Vec<_> = (0..8).map(|number| walk(number).unwrap()).collect();
    let together = |threads| -> Result<Vec<_>> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| (0..8).into_par_iter().with_max_len(1).map(walk).collect())
    };
    for threads in [1, 2, 7] {
        assert!(together(threads).unwrap() == alone, "{threads} threads");
    }
}

#[test]
fn statistics_gathered_beside_a_training_are_not_mixed_with_its_own() {
    let gather = |number: usize| {
        let params = Params::new(1);
        let bn = BatchNorm::new(3, ScaleInit::Ones, params.builder(DType::F64, &Device::Cpu)).unwrap();
        let statistics = if number.is_multiple_of(2) { Statistics::Cumulative } else { Statistics::Batch };
        for batch in 0..3 {
            let x = numbers(&format!("batch{batch}"), &[4, 2, 2, 3]);
            batch_norm(&FeatureMap::enter(&x).unwrap(), &bn, None, Activation::None, statistics).unwrap();
            rayon::yield_now();
        }
        params.vars().iter().map(|(_, var)| values(var)).collect::<Vec<_>>()
    };
    let alone: Vec<_> = (0..8).map(gather).collect();
    assert!(alone[0] != alone[1]);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let together: Vec<_> = pool.install(|| (0..8).into_par_iter().with_max_len(1).map(gather).collect());
    assert!(together == alone);
}

/// A few steps of a small network, or only its statistics: every parameter and buffer afterwards.
fn work(number: u64) -> Vec<Vec<f64>> {
    let params = Params::new(number);
    let task = Task::Images { height: 8, width: 8, channels: 3, classes: 10 };
    let config = json!({"num_blocks": [1, 1], "widths": [24, 32]});
    let registry = Registry::builtin();
    let vb = params.builder(DType::F32, &Device::Cpu);
    let mut model = registry.get("resnet").unwrap().build(&config, task, vb).unwrap();
    let input = numbers("images", &[16, 8, 8, 3]).to_dtype(DType::F32).unwrap();
    let target = Tensor::from_iter((0..16u32).map(|i| i % 10), &Device::Cpu).unwrap();
    for step in 0..6 {
        if number.is_multiple_of(2) {
            model.logits(&input, Mode::Statistics { seed: 1, step }).unwrap();
            continue;
        }
        let loss = model.loss(&input, &target, Mode::Train { seed: 1, step }).unwrap();
        let grads = taper_models::backward(&loss.total).unwrap();
        for (name, var) in params.trainable() {
            let grad = grads.get(&var).unwrap_or_else(|| panic!("model {number}: no gradient of {name}"));
            var.set(&(var.as_tensor() - (grad * 0.05).unwrap()).unwrap()).unwrap();
        }
    }
    params.vars().iter().map(|(_, var)| values(var)).collect()
}

#[test]
fn models_that_share_a_pool_train_as_they_do_alone() {
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let alone: Vec<_> = (0..24).map(|number| pool(1).install(|| work(number))).collect();
    for threads in [2, 4] {
        let together: Vec<_> = pool(threads).install(|| (0..24).into_par_iter().map(work).collect());
        assert!(together == alone, "{threads} threads");
    }
}

#[test]
fn the_deepest_networks_that_are_accepted_train() {
    let most = taper_models::registry::MOST_LAYERS as usize;
    let step = move || {
        let task = Task::Images { height: 2, width: 2, channels: 1, classes: 2 };
        for (model, config) in [
            ("mlp", json!({"hidden": vec![1; most - 1]})),
            ("resnet", json!({"num_blocks": [most / 2 - 1], "widths": [1]})),
        ] {
            let params = Params::new(1);
            let registry = Registry::builtin();
            let vb = params.builder(DType::F32, &Device::Cpu);
            let mut model = registry.get(model).unwrap().build(&config, task, vb).unwrap();
            let input = numbers("images", &[2, 2, 2, 1]).to_dtype(DType::F32).unwrap();
            let target = Tensor::new(&[0u32, 1], &Device::Cpu).unwrap();
            let loss = model.loss(&input, &target, Mode::Train { seed: 1, step: 0 }).unwrap();
            let grads = taper_models::backward(&loss.total).unwrap();
            assert!(params.trainable().iter().all(|(_, var)| grads.get(var).is_some()));
        }
    };
    // candle walks and drops its graph by recursion: the trainer's thread has as large a stack.
    std::thread::Builder::new().stack_size(256 << 20).spawn(step).unwrap().join().unwrap();
}
