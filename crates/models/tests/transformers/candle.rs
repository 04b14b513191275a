//! Which ops of candle-nn let gradients through: what the documentation of `Params` says of them.
use candle_core::{Device, Result, Tensor, Var};
use candle_nn::{LayerNorm, Module, RmsNorm, ops, rotary_emb};

fn passes(op: impl Fn(&Tensor) -> Result<Tensor>) -> bool {
    let x =
        Var::from_tensor(&Tensor::arange(1f32, 49f32, &Device::Cpu).unwrap().reshape((1, 2, 3, 8)).unwrap())
            .unwrap();
    let loss = op(x.as_tensor()).unwrap().sqr().unwrap().sum_all().unwrap();
    // Gradients that end on the way, and ops that say that they have none, come to the same.
    loss.backward().is_ok_and(|grads| grads.get(&x).is_some())
}

#[test]
fn layers_without_a_gradient_are_those_that_are_listed() {
    let ones = |n: usize| Tensor::ones(n, candle_core::DType::F32, &Device::Cpu).unwrap();
    let (weight, bias) = (ones(8), Tensor::zeros(8, candle_core::DType::F32, &Device::Cpu).unwrap());
    let angles = Tensor::arange(0f32, 12f32, &Device::Cpu).unwrap().reshape((3, 4)).unwrap();
    let (cos, sin) = (angles.cos().unwrap(), angles.sin().unwrap());

    let without: [(&str, bool); 6] = [
        ("LayerNorm", passes(|x| LayerNorm::new(weight.clone(), bias.clone(), 1e-5).forward(x))),
        ("RmsNorm", passes(|x| RmsNorm::new(weight.clone(), 1e-5).forward(x))),
        ("softmax_last_dim", passes(ops::softmax_last_dim)),
        ("rope", passes(|x| rotary_emb::rope(x, &cos, &sin))),
        ("rope_i", passes(|x| rotary_emb::rope_i(x, &cos, &sin))),
        ("rope_thd", passes(|x| rotary_emb::rope_thd(&x.transpose(1, 2)?.contiguous()?, &cos, &sin))),
    ];
    for (name, passed) in without {
        assert!(!passed, "{name} has a gradient by now: it need not be listed");
    }
    let with: [(&str, bool); 12] = [
        ("layer_norm_slow", passes(|x| ops::layer_norm_slow(x, &weight, &bias, 1e-5))),
        ("layer_norm_no_bias", passes(|x| LayerNorm::new_no_bias(weight.clone(), 1e-5).forward(x))),
        ("forward_diff", passes(|x| RmsNorm::new(weight.clone(), 1e-5).forward_diff(x))),
        ("rms_norm_slow", passes(|x| ops::rms_norm_slow(x, &weight, 1e-5))),
        ("softmax", passes(|x| ops::softmax(x, 3))),
        ("log_softmax", passes(|x| ops::log_softmax(x, 3))),
        ("rope_slow", passes(|x| rotary_emb::rope_slow(x, &cos, &sin))),
        ("rope_i_slow", passes(|x| rotary_emb::rope_i_slow(x, &cos, &sin))),
        ("silu", passes(ops::silu)),
        ("swiglu", passes(ops::swiglu)),
        ("dropout", passes(|x| ops::dropout(x, 0.1))),
        ("gelu", passes(Tensor::gelu)),
    ];
    for (name, passed) in with {
        assert!(passed, "{name} lets no gradient through");
    }
}
