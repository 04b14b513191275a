//! Time of the forward and backward pass of the MLP and the language models, best of several.
//!
//!     cargo run --release -p taper-models --example step_time_sequence [mlp lstm1 lstm2 lstm3]
use candle_core::{DType, Device, Tensor, Var};
use std::time::Instant;
use taper_models::lstm::{LanguageModel, LstmConfig};
use taper_models::ops::{Activation, cross_entropy, linear};
use taper_models::rng::Rng;
use taper_models::{Mode, Model, Params, Result};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let asked = |name: &str| names.is_empty() || names.iter().any(|n| n == name);
    if asked("mlp") {
        mlp()?;
    }
    for layers in 1..=3 {
        if asked(&format!("lstm{layers}")) {
            language_model(layers)?;
        }
    }
    Ok(())
}

/// Prints the shortest forward and forward + backward of `repeats` · `steps` calls after as many to warm up.
fn measure(name: &str, repeats: usize, steps: usize, mut loss: impl FnMut() -> Result<Tensor>) -> Result<()> {
    let (mut forward, mut whole) = (f64::MAX, f64::MAX);
    for _ in 0..=repeats {
        let (mut f, start) = (0.0, Instant::now());
        for _ in 0..steps {
            let start = Instant::now();
            let loss = loss()?;
            f += start.elapsed().as_secs_f64();
            taper_models::backward(&loss)?;
        }
        whole = whole.min(start.elapsed().as_secs_f64() / steps as f64);
        forward = forward.min(f / steps as f64);
    }
    println!("{name}: {:.3} ms forward, {:.3} ms forward + backward", forward * 1e3, whole * 1e3);
    Ok(())
}

/// 784-100-10, batch 128.
fn mlp() -> Result<()> {
    let mut rng = Rng::new(1, "example", "mlp", 0);
    let mut draw = |shape: &[usize], scale: f64| {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| (rng.normal() * scale) as f32).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)
    };
    let (w1, b1) = (Var::from_tensor(&draw(&[100, 784], 0.03)?)?, Var::from_tensor(&draw(&[100], 0.03)?)?);
    let (w2, b2) = (Var::from_tensor(&draw(&[10, 100], 0.1)?)?, Var::from_tensor(&draw(&[10], 0.1)?)?);
    let x = draw(&[128, 784], 1.0)?;
    let y = Tensor::from_vec((0..128u32).map(|i| i % 10).collect(), 128, &Device::Cpu)?;
    measure("mlp 784-100-10, batch 128", 20, 200, || {
        let h = linear(&x, &w1, Some(&b1), Activation::Relu)?;
        cross_entropy(&linear(&h, &w2, Some(&b2), Activation::None)?, &y, &Default::default())
    })
}

/// Batch 20, 70 tokens, vocabulary 10,000, all dropouts.
fn language_model(layers: usize) -> Result<()> {
    let (vocab, params) = (10_000, Params::new(1));
    let config = LstmConfig { layers, ..Default::default() };
    let mut model = LanguageModel::new(config, vocab, params.builder(DType::F32, &Device::Cpu))?;
    let mut rng = Rng::new(1, "example", "tokens", 0);
    let ids: Vec<u32> = (0..71 * 20).map(|_| rng.below(vocab as u64) as u32).collect();
    let ids = Tensor::from_vec(ids, (71, 20), &Device::Cpu)?;
    let (x, y) = (ids.narrow(0, 0, 70)?, ids.narrow(0, 1, 70)?);
    let mut step = 0;
    measure(&format!("lstm with {layers} layers, batch 20, 70 tokens"), 6, 1, || {
        step += 1;
        Ok(model.loss(&x, &y, Mode::Train { seed: 1, step })?.total)
    })
}
