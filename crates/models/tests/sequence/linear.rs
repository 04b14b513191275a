use crate::support::*;
use candle_core::{DType, Device, Tensor, Var};
use taper_models::ops::{Activation, CrossEntropy, cross_entropy, linear, linear_cross_entropy};
use taper_models::{Error, Result};

/// Leading dimensions, inputs, outputs.
const SHAPES: [(&[usize], usize, usize); 6] =
    [(&[1], 1, 1), (&[3], 5, 2), (&[7], 16, 9), (&[2, 3], 4, 5), (&[1, 1, 2], 3, 17), (&[20], 2, 1)];

fn operands(name: &str, lead: &[usize], k: usize, n: usize) -> (Var, Var, Var) {
    let shape: Vec<usize> = lead.iter().copied().chain([k]).collect();
    (var(&format!("x{name}"), &shape), var(&format!("w{name}"), &[n, k]), var(&format!("b{name}"), &[n]))
}

#[test]
fn gradients_are_those_of_finite_differences() {
    for (lead, k, n) in SHAPES {
        for act in [Activation::None, Activation::Relu] {
            // Drawn until no pre-activation lies where a difference quotient would cross the kink.
            let far = |(x, w, b): &(Var, Var, Var)| {
                let y = linear(x, w, Some(b), Activation::None).unwrap();
                let plain = linear(x, w, None, Activation::None).unwrap();
                act == Activation::None || values(&y).iter().chain(&values(&plain)).all(|v| v.abs() > 0.02)
            };
            let (x, w, b) =
                (0..).map(|i| operands(&i.to_string(), lead, k, n)).find(far).expect("an endless iterator");
            check_gradients("biased", &[&x, &w, &b], || project(&linear(&x, &w, Some(&b), act)?));
            check_gradients("unbiased", &[&x, &w], || project(&linear(&x, &w, None, act)?));
        }
    }
}

#[test]
fn f32_agrees_with_f64_at_sizes_of_every_kernel() -> Result<()> {
    for (m, k, n) in [(1, 1, 1), (5, 33, 65), (128, 784, 100), (128, 100, 10), (300, 70, 700)] {
        let run = |dtype| -> Result<Vec<Tensor>> {
            let cast = |t: Tensor| Var::from_tensor(&t.to_dtype(DType::F32)?.to_dtype(dtype)?);
            let (x, w, b) =
                (cast(normal("x", &[m, k]))?, cast(normal("w", &[n, k]))?, cast(normal("b", &[n]))?);
            let y = linear(&x, &w, Some(&b), Activation::None)?;
            let grads = project(&y)?.backward()?;
            Ok([&x, &w, &b].iter().map(|v| grads.get(v).unwrap().clone()).chain([y.clone()]).collect())
        };
        for (got, want) in run(DType::F32)?.iter().zip(&run(DType::F64)?) {
            // Sums of up to 784 products, each rounded to f32.
            assert!(relative_error(got, want) < 2e-6, "{m} {k} {n}: {:e}", relative_error(got, want));
        }
    }
    Ok(())
}

#[test]
fn relu_has_gradient_zero_at_zero_and_keeps_nan() -> Result<()> {
    let x = Var::new(&[[0f32, 1.0, f32::NAN]], &Device::Cpu)?;
    let w = Tensor::new(&[[1f32, 0.0, 0.0]], &Device::Cpu)?;
    let y = linear(&x.narrow(1, 0, 2)?, &w.narrow(1, 0, 2)?, None, Activation::Relu)?;
    assert_eq!(values(y.sum_all()?.backward()?.get(&x).unwrap()), [0.0; 3]);
    assert!(values(&linear(&x, &w, None, Activation::Relu)?)[0].is_nan());
    Ok(())
}

#[test]
fn an_operand_that_needs_no_gradient_gets_none() -> Result<()> {
    let (x, w) = (normal("x", &[3, 4]), var("w", &[2, 4]));
    let grads = linear(&x, &w, None, Activation::None)?.sum_all()?.backward()?;
    assert!(grads.get(&x).is_none() && grads.get(&w).is_some());
    Ok(())
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let run = || {
        let cast = |t: Tensor| Var::from_tensor(&t.to_dtype(DType::F32).unwrap()).unwrap();
        let (x, w, b) =
            (cast(normal("x", &[130, 784])), cast(normal("w", &[100, 784])), cast(normal("b", &[100])));
        let y = linear(&x, &w, Some(&b), Activation::Relu).unwrap();
        let grads = project(&y).unwrap().backward().unwrap();
        [&x, &w, &b].map(|v| values(grads.get(v).unwrap()))
    };
    let one = on_threads(1, run);
    assert!([2, 3, 7, 64].into_iter().all(|threads| on_threads(threads, run) == one));
}

#[test]
fn misfits_are_named() {
    let t = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu).unwrap();
    let shapes: [(&[usize], &[usize], &[usize]); 6] = [
        (&[2, 3], &[4, 5], &[4]),
        (&[2, 3], &[4, 3], &[3]),
        (&[0, 3], &[4, 3], &[4]),
        (&[3], &[4, 3], &[4]),
        (&[2, 0], &[4, 0], &[4]),
        (&[2, 3], &[4, 3, 1], &[4]),
    ];
    for (x, w, b) in shapes {
        let f32 = DType::F32;
        let e = linear(&t(x, f32), &t(w, f32), Some(&t(b, f32)), Activation::None).unwrap_err();
        let found = format!("x {x:?}, w {w:?}, b {b:?}");
        assert!(matches!(&e, Error::Shape { op: "linear", .. }) && e.to_string().contains(&found), "{e}");
    }
    let (x, w) = (t(&[2, 3], DType::F32), t(&[4, 3], DType::F64));
    assert!(matches!(linear(&x, &w, None, Activation::None), Err(Error::DType { found: DType::F64, .. })));
    let (x, w) = (t(&[2, 3], DType::U32), t(&[4, 3], DType::F32));
    assert!(matches!(linear(&x, &w, None, Activation::None), Err(Error::DType { found: DType::U32, .. })));
}

#[test]
fn fused_with_cross_entropy_it_is_the_composition() -> Result<()> {
    let options = CrossEntropy { ignore_index: Some(-1), label_smoothing: 0.1 };
    for (lead, k, n) in SHAPES {
        let (x, w, b) = operands("fused", lead, k, n);
        let count: usize = lead.iter().product();
        let targets: Vec<i64> = (0..count).map(|i| if i == 1 { -1 } else { (i * 5 % n) as i64 }).collect();
        let targets = Tensor::from_vec(targets, lead, &Device::Cpu)?;
        let fused = || linear_cross_entropy(&x, &w, Some(&b), &targets, &options);
        let logits = linear(&x, &w, Some(&b), Activation::None)?.reshape((count, n))?;
        let apart = cross_entropy(&logits, &targets.flatten_all()?, &options)?;
        assert!((fused()?.to_scalar::<f64>()? - apart.to_scalar::<f64>()?).abs() < 1e-14);
        check_gradients("fused", &[&x, &w, &b], || Ok((fused()? * 3.0)?));
    }
    let (x, w, b) = operands("fused", &[2], 3, 4);
    let class =
        |c: i64| linear_cross_entropy(&x, &w, Some(&b), &Tensor::new(&[0, c], &Device::Cpu)?, &options);
    assert!(matches!(class(4), Err(Error::Index { index: 4, position: 1, bound: 4, .. })));
    let few = Tensor::new(&[0i64], &Device::Cpu)?;
    assert!(matches!(linear_cross_entropy(&x, &w, Some(&b), &few, &options), Err(Error::Shape { .. })));
    Ok(())
}
