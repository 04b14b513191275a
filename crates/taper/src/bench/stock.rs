//! Stock candle on the same step, for reference: candle-nn's layers, candle's backward pass and candle's AdamW.
//!
//! It runs in this program, so with the allocator and the AVX-512 matrix products that this program gives it; without
//! them it is slower still.
use super::step::Workload;
use super::{BenchError, Work};
use candle_core::{D, DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::rnn::{LSTMConfig, RNN};
use candle_nn::{AdamW, Conv2dConfig, Optimizer, VarBuilder, VarMap};

/// How a reference is made for a workload.
pub type Make = fn(&Workload) -> std::result::Result<Work, BenchError>;

/// A step of the network that `build` makes.
fn step<N>(
    workload: &Workload,
    build: impl FnOnce(VarBuilder) -> Result<N>,
    forward: impl Fn(&N, &Tensor) -> Result<Tensor> + 'static,
) -> std::result::Result<Work, BenchError>
where
    N: 'static,
{
    let vars = VarMap::new();
    let net = build(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut adam = AdamW::new_lr(vars.all_vars(), 1e-6)?;
    let (input, target) = workload.batch()?;
    let target = target.flatten_all()?;
    Ok(Box::new(move || {
        let loss = candle_nn::loss::cross_entropy(&forward(&net, &input)?, &target)?;
        Ok(adam.backward_step(&loss)?)
    }))
}

pub fn mlp(workload: &Workload) -> std::result::Result<Work, BenchError> {
    let build = |vb: VarBuilder| {
        Ok((candle_nn::linear(784, 100, vb.pp("0"))?, candle_nn::linear(100, 10, vb.pp("2"))?))
    };
    step(workload, build, |(first, last), x| last.forward(&first.forward(&x.flatten_from(1)?)?.relu()?))
}

/// A convolution and its normalisation.
struct Conv(candle_nn::Conv2d, candle_nn::BatchNorm);

impl Conv {
    fn new(ci: usize, co: usize, size: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { stride, padding: size / 2, ..Default::default() };
        Ok(Self(
            candle_nn::conv2d_no_bias(ci, co, size, config, vb.pp("conv"))?,
            candle_nn::batch_norm(co, 1e-5, vb.pp("bn"))?,
        ))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.1.forward_t(&self.0.forward(x)?, true)
    }
}

struct Block {
    first: Conv,
    second: Conv,
    shortcut: Option<Conv>,
}

struct ResNet {
    stem: Conv,
    blocks: Vec<Block>,
    head: candle_nn::Linear,
}

impl ResNet {
    fn new(vb: VarBuilder) -> Result<Self> {
        let (mut blocks, mut ci) = (Vec::new(), 64);
        for (stage, co) in [64, 128, 256, 512].into_iter().enumerate() {
            for i in 0..2 {
                let vb = vb.pp(format!("{stage}.{i}"));
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let shortcut =
                    (ci != co).then(|| Conv::new(ci, co, 1, stride, vb.pp("shortcut"))).transpose()?;
                let first = Conv::new(ci, co, 3, stride, vb.pp("1"))?;
                blocks.push(Block { first, second: Conv::new(co, co, 3, 1, vb.pp("2"))?, shortcut });
                ci = co;
            }
        }
        let stem = Conv::new(3, 64, 3, 1, vb.pp("stem"))?;
        Ok(Self { stem, blocks, head: candle_nn::linear(512, 10, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // candle's convolution takes channels first.
        let mut x = self.stem.forward(&x.permute((0, 3, 1, 2))?.contiguous()?)?.relu()?;
        for Block { first, second, shortcut } in &self.blocks {
            let y = second.forward(&first.forward(&x)?.relu()?)?;
            let residual = match shortcut {
                Some(shortcut) => shortcut.forward(&x)?,
                None => x,
            };
            x = (y + residual)?.relu()?;
        }
        self.head.forward(&x.mean(D::Minus1)?.mean(D::Minus1)?)
    }
}

pub fn resnet18(workload: &Workload) -> std::result::Result<Work, BenchError> {
    step(workload, ResNet::new, ResNet::forward)
}

/// Without weight drop and regularisation, which candle-nn's layer cannot do: less work than the others do.
pub fn lstm1(workload: &Workload) -> std::result::Result<Work, BenchError> {
    let build = |vb: VarBuilder| {
        let lstm = candle_nn::lstm(400, 400, LSTMConfig::default(), vb.pp("lstm"))?;
        let bias = vb.get(10_000, "bias")?;
        Ok((candle_nn::embedding(10_000, 400, vb.pp("encoder"))?, lstm, bias))
    };
    step(workload, build, |(encoder, lstm, bias), tokens| {
        let x = candle_nn::ops::dropout(&encoder.forward(&tokens.t()?.contiguous()?)?, 0.4)?;
        let states = lstm.seq(&x)?;
        let h: Vec<Tensor> = states.into_iter().map(|state| state.h).collect();
        // [tokens, sequences, features], as the targets are laid out.
        let h = candle_nn::ops::dropout(&Tensor::stack(&h, 0)?.flatten_to(1)?, 0.4)?;
        h.matmul(&encoder.embeddings().t()?)?.broadcast_add(bias)
    })
}
