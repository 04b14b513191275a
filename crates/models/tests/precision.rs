//! Products of operands rounded to bf16: in every op that multiplies, forwards and backwards, and nowhere else.
mod common;

use candle_core::{DType, Device, Tensor, Var};
use common::{near, values, var};
use serde_json::{Value, json};
use taper_kernels::Isa;
use taper_models::ops::{
    Activation, Conv2d, CrossEntropy, FeatureMap, Gelu, LstmWeights, Operands, conv2d, linear,
    linear_cross_entropy, linear_features, linear_residual, lstm, with_isa, with_operands,
};
use taper_models::replay::relative_difference;
use taper_models::{Mode, Params, Registry, Task, WithOperands};

/// In f32, of numbers that bf16 does not have.
fn single(name: &str, dims: &[usize]) -> Var {
    Var::from_tensor(&var(name, dims).to_dtype(DType::F32).unwrap()).unwrap()
}

/// The nearest bf16, as candle rounds, in f64.
fn rounded(t: &Tensor) -> Tensor {
    t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F64).unwrap()
}

fn double(t: &Tensor) -> Tensor {
    t.to_dtype(DType::F64).unwrap()
}

/// Sums of at most a hundred products in f32.
const LIMIT: f64 = 2e-6;

#[test]
fn linear_layers_multiply_rounded_operands_in_all_three_products() {
    let (x, w, b) = (single("x", &[7, 20]), single("w", &[5, 20]), single("b", &[5]));
    let y = with_operands(Operands::Bf16, || linear(&x, &w, Some(&b), Activation::None)).unwrap();
    let plain = linear(&x, &w, Some(&b), Activation::None).unwrap();
    let want = rounded(&x).matmul(&rounded(&w).t().unwrap()).unwrap().broadcast_add(&double(&b)).unwrap();
    near("y", &double(&y), &want, LIMIT);
    let apart = (double(&plain) - &want).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
    assert!(apart.to_scalar::<f64>().unwrap() > 1e-4, "outside it is f32");
    // The backward pass is made outside, and knows.
    let up = single("up", &[7, 5]);
    let grads = (&y * up.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    let (g, gt) = (rounded(&up), rounded(&up).t().unwrap().contiguous().unwrap());
    near("dx", &double(grads.get(&x).unwrap()), &g.matmul(&rounded(&w)).unwrap(), LIMIT);
    near("dw", &double(grads.get(&w).unwrap()), &gt.matmul(&rounded(&x)).unwrap(), LIMIT);
    near("db", &double(grads.get(&b).unwrap()), &double(&up).sum(0).unwrap(), LIMIT);
}

#[test]
fn convolutions_multiply_rounded_operands() {
    let (x, w) = (single("x", &[2, 5, 6, 17]), single("w", &[18, 17, 3, 3]));
    let options = Conv2d::square(2, 1, Default::default());
    let run = |x: &Tensor, w: &Tensor| {
        conv2d(&FeatureMap::enter(x).unwrap(), w, None, &options).unwrap().leave().unwrap()
    };
    let y = with_operands(Operands::Bf16, || run(&x, &w));
    let (xr, wr) = (Var::from_tensor(&rounded(&x)).unwrap(), Var::from_tensor(&rounded(&w)).unwrap());
    let want = run(&xr, &wr);
    near("y", &double(&y), &want, 3e-6);
    // An upstream gradient that bf16 has: its own rounding changes nothing.
    let up = Var::from_tensor(&rounded(&single("up", &[2, 3, 3, 18]))).unwrap();
    let ours = (&y * &up.to_dtype(DType::F32).unwrap()).unwrap().sum_all().unwrap().backward().unwrap();
    let theirs = (&want * up.as_tensor()).unwrap().sum_all().unwrap().backward().unwrap();
    near("dx", &double(ours.get(&x).unwrap()), theirs.get(&xr).unwrap(), 3e-6);
    near("dw", &double(ours.get(&w).unwrap()), theirs.get(&wr).unwrap(), 3e-6);
}

#[test]
fn decoders_and_recurrent_layers_follow_and_a_failure_leaves_no_trace() {
    let (x, w, b) = (single("x", &[6, 9]), single("w", &[11, 9]), single("b", &[11]));
    let targets = Tensor::new(&[0u32, 3, 10, 7, 1, 2], x.device()).unwrap();
    let loss = |x: &Tensor, w: &Tensor, b: &Tensor| {
        linear_cross_entropy(x, w, Some(b), &targets, &CrossEntropy::default()).unwrap()
    };
    let ours = with_operands(Operands::Bf16, || loss(&x, &w, &b));
    near("loss", &double(&ours), &loss(&rounded(&x), &rounded(&w), &double(&b)), LIMIT);

    let weights = LstmWeights {
        w_ih: single("ih", &[16, 9]).as_tensor().clone(),
        w_hh: single("hh", &[16, 4]).as_tensor().clone(),
        b_ih: single("bi", &[16]).as_tensor().clone(),
        b_hh: single("bh", &[16]).as_tensor().clone(),
    };
    let sequence = x.reshape((1, 6, 9)).unwrap();
    let (y, _) = with_operands(Operands::Bf16, || lstm(&sequence, &weights, None, None)).unwrap();
    let exact = LstmWeights {
        w_ih: rounded(&weights.w_ih),
        w_hh: rounded(&weights.w_hh),
        b_ih: double(&weights.b_ih),
        b_hh: double(&weights.b_hh),
    };
    // One step from a state of zeros: what is rounded is the input.
    near("y", &double(&y), &lstm(&rounded(&sequence), &exact, None, None).unwrap().0, LIMIT);

    let wrong = with_operands(Operands::Bf16, || linear(&x, &b, None, Activation::None));
    assert!(wrong.is_err());
    let panicked = std::panic::catch_unwind(|| with_operands(Operands::Bf16, || panic!("inside")));
    assert!(panicked.is_err());
    let after = linear(&x, &w, None, Activation::None).unwrap();
    near("after", &double(&after), &double(&x).matmul(&double(&w).t().unwrap()).unwrap(), LIMIT);
}

/// Values with the bits of f32.
fn bits(tensors: &[&Tensor]) -> Vec<u64> {
    tensors.iter().flat_map(|t| values(t)).map(f64::to_bits).collect()
}

#[test]
fn layers_between_features_multiply_rounded_operands_with_the_same_bits_everywhere() {
    // Long enough that no instruction set has one vector for all.
    let (x, w, b) = (single("x", &[2, 1, 9, 70]), single("w", &[70, 70]), single("b", &[70]));
    let up = single("up", &[2, 1, 9, 70]);
    let layer = |x: &Tensor, w: &Tensor, b: &Tensor, added: bool, gelu: Option<Gelu>| {
        let x = FeatureMap::enter(x).unwrap();
        let y = match added {
            true => linear_residual(&x, &x, w, Some(b), None),
            false => linear_features(&x, w, Some(b), gelu),
        };
        y.unwrap().leave().unwrap()
    };
    let run = |added: bool, gelu: Option<Gelu>| {
        let y = with_operands(Operands::Bf16, || layer(&x, &w, &b, added, gelu));
        let grads = taper_models::backward(&(&y * up.as_tensor()).unwrap().sum_all().unwrap()).unwrap();
        let grad = |var: &Var| grads.get(var).unwrap().clone();
        [y.clone(), grad(&x), grad(&w), grad(&b)]
    };
    for added in [false, true] {
        let [y, dx, dw, db] = run(added, None);
        let flat = |t: &Tensor| rounded(t).reshape((18, 70)).unwrap();
        let stream = |product: Tensor, of: &Var| match added {
            true => (product + double(of).reshape((18, 70)).unwrap()).unwrap(),
            false => product,
        };
        let near = |name: &str, found: &Tensor, want: &Tensor| {
            let found = double(found).reshape(want.shape()).unwrap();
            common::near(name, &found, want, LIMIT);
        };
        let want = flat(&x).matmul(&rounded(&w).t().unwrap()).unwrap().broadcast_add(&double(&b)).unwrap();
        near("y", &y, &stream(want, &x));
        near("dx", &dx, &stream(flat(&up).matmul(&rounded(&w)).unwrap(), &up));
        near("dw", &dw, &flat(&up).t().unwrap().contiguous().unwrap().matmul(&flat(&x)).unwrap());
        near("db", &db, &double(&up).reshape((18, 70)).unwrap().sum(0).unwrap());
        for gelu in [None, Some(Gelu::Exact), Some(Gelu::Tanh)] {
            let all = |isa: Isa| with_isa(isa, || bits(&run(added, gelu).each_ref()));
            let first = all(Isa::PORTABLE);
            for isa in Isa::available().into_iter().filter(|isa| !isa.multiplies_matrices()) {
                assert!(all(isa) == first, "{} {gelu:?} {added}", isa.name());
            }
        }
    }
}

/// Loss and gradients of a step.
fn step(name: &str, config: &Value, operands: Operands) -> Vec<Vec<f64>> {
    let task = match name {
        "vit" => Task::Images { height: 8, width: 12, channels: 3, classes: 5 },
        _ => Task::Tokens { vocab: 13 },
    };
    let params = Params::new(4);
    let vb = params.builder(DType::F32, &Device::Cpu);
    let model = Registry::builtin().get(name).unwrap().build(config, task, vb).unwrap();
    for (name, var) in params.vars() {
        // Larger than they start, so that no part of the network is close to nothing.
        if name.ends_with("weight") && !name.contains("norm") && !name.contains("ln_") {
            var.set(&(var.as_tensor() * 8.0).unwrap()).unwrap();
        }
    }
    let numbers = |name: &str, dims: &[usize], below: f64| {
        (var(name, dims).as_detached_tensor() + 0.5)
            .unwrap()
            .affine(below, 0.0)
            .unwrap()
            .to_dtype(DType::U32)
            .unwrap()
    };
    let (input, target) = match task {
        Task::Images { .. } => {
            (single("images", &[6, 8, 12, 3]).as_detached_tensor(), numbers("classes", &[6], 5.0))
        }
        Task::Tokens { .. } => (numbers("input", &[20, 4], 13.0), numbers("target", &[20, 4], 13.0)),
    };
    let mut model = WithOperands { model, operands };
    let loss = taper_models::Model::loss(&mut model, &input, &target, Mode::Train { seed: 1, step: 2 })
        .unwrap()
        .total;
    let grads = taper_models::backward(&loss).unwrap();
    let grads = params.trainable().into_iter().map(|(_, var)| values(grads.get(&var).unwrap()));
    [values(&loss)].into_iter().chain(grads).collect()
}

#[test]
fn transformers_in_bf16_are_near_those_in_f32_with_every_instruction_set_and_any_number_of_threads() {
    let classic =
        json!({"layers": 2, "heads": 3, "emb": 48, "block": 20, "bias": true, "dropout": {"resid": 0.1}});
    let modern = json!({"layers": 2, "heads": 4, "kv_heads": 2, "emb": 48, "block": 20});
    let vit = json!({"layers": 2, "heads": 2, "emb": 24, "attn_drop_rate": 0.1});
    for (name, config) in [("gpt", classic), ("llama", modern), ("vit", vit)] {
        let full = step(name, &config, Operands::Full);
        // Bits are compared within a set of instructions: what is f32 beside the products rounds otherwise with another.
        for isa in Isa::available() {
            let on = |threads: usize| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| with_isa(isa, || step(name, &config, Operands::Bf16)))
            };
            let found = on(1);
            for threads in [2, 3, 8] {
                assert!(on(threads) == found, "{name}, {threads} threads, {}", isa.name());
            }
            let worst = found
                .iter()
                .zip(&full)
                .map(|(found, full)| relative_difference(found, full))
                .fold(0.0, f64::max);
            assert!((1e-4..BF16).contains(&worst), "{name}, {}: {worst:e}", isa.name());
        }
    }
}

/// PyTorch's own gradients under bf16 autocast are up to 3.9e-2 from f64's, of a tensor's largest entry.
const BF16: f64 = 5e-2;
