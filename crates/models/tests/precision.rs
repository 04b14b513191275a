//! Products of operands rounded to bf16: in every op that multiplies, forwards and backwards, and nowhere else.
mod common;

use candle_core::{DType, Tensor, Var};
use common::{near, var};
use taper_models::ops::{
    Activation, Conv2d, CrossEntropy, FeatureMap, LstmWeights, Operands, conv2d, linear,
    linear_cross_entropy, lstm, with_operands,
};

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
    // A shape that Winograd would take.
    let (x, w) = (single("x", &[2, 5, 6, 17]), single("w", &[18, 17, 3, 3]));
    let options = Conv2d::square(1, 1, Default::default());
    let run = |x: &Tensor, w: &Tensor| {
        conv2d(&FeatureMap::enter(x).unwrap(), w, None, &options).unwrap().leave().unwrap()
    };
    let y = with_operands(Operands::Bf16, || run(&x, &w));
    let (xr, wr) = (Var::from_tensor(&rounded(&x)).unwrap(), Var::from_tensor(&rounded(&w)).unwrap());
    let want = run(&xr, &wr);
    near("y", &double(&y), &want, 3e-6);
    // An upstream gradient that bf16 has: its own rounding changes nothing.
    let up = Var::from_tensor(&rounded(&single("up", &[2, 5, 6, 18]))).unwrap();
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
