use crate::support::*;
use candle_core::{DType, Device, Tensor, Var};
use taper_models::ops::{CrossEntropy, cross_entropy};
use taper_models::{Error, Result};

fn targets(n: usize, classes: usize) -> Tensor {
    let values: Vec<i64> = (0..n).map(|i| (i * 7 % classes) as i64).collect();
    Tensor::from_vec(values, n, &Device::Cpu).unwrap()
}

#[test]
fn gradients_are_those_of_finite_differences() {
    for (n, classes) in [(1, 1), (1, 2), (3, 5), (4, 16), (5, 17), (9, 40)] {
        let (logits, targets) = (var("logits", &[n, classes]), targets(n, classes));
        for label_smoothing in [0.0, 0.1, 1.0] {
            for ignore_index in [None, Some(7)] {
                let options = CrossEntropy { ignore_index, label_smoothing };
                let what = format!("{n}x{classes} {options:?}");
                // The factor is what reaches the op from above.
                check_gradients(&what, &[&logits], || {
                    Ok((cross_entropy(&logits, &targets, &options)? * -2.5)?)
                });
            }
        }
    }
}

#[test]
fn f32_agrees_with_f64_and_both_index_types_agree() -> Result<()> {
    for (n, classes, spread) in [(128, 10, 1.0), (64, 1000, 5.0), (7, 10_000, 20.0)] {
        let targets = targets(n, classes);
        let run = |dtype, targets: &Tensor| -> Result<(f64, Tensor)> {
            let logits = (normal("logits", &[n, classes]) * spread)?.to_dtype(DType::F32)?.to_dtype(dtype)?;
            let logits = Var::from_tensor(&logits)?;
            let loss = cross_entropy(&logits, targets, &Default::default())?;
            let grad = loss.backward()?.get(&logits).unwrap().clone();
            Ok((loss.to_dtype(DType::F64)?.to_scalar()?, grad))
        };
        let ((loss, grad), (exact, exact_grad)) = (run(DType::F32, &targets)?, run(DType::F64, &targets)?);
        // The loss is rounded to f32 once; a softmax has two roundings and the error of one exponential.
        assert!((loss - exact).abs() < 2e-7 * exact, "{loss} {exact}");
        assert!(relative_error(&grad, &exact_grad) < 1e-6);
        assert!(values(&grad).iter().all(|v| *v == 0.0 || v.abs() > 1e-31), "tails are flushed");
        assert_eq!(values(&grad), values(&run(DType::F32, &targets.to_dtype(DType::U32)?)?.1));
    }
    Ok(())
}

#[test]
fn extreme_logits_stay_finite_and_nan_is_seen() -> Result<()> {
    let loss = |row: [f32; 3]| -> Result<f32> {
        let targets = Tensor::new(&[1u32], &Device::Cpu)?;
        Ok(cross_entropy(&Tensor::new(&[row], &Device::Cpu)?, &targets, &Default::default())?.to_scalar()?)
    };
    assert_eq!(loss([-3e38, 3e38, 0.0])?, 0.0);
    assert_eq!(loss([1e4, -1e4, 0.0])?, 2e4);
    assert!(loss([f32::NAN, 0.0, 0.0])?.is_nan());
    Ok(())
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let run = || {
        let logits = Var::from_tensor(&normal("logits", &[300, 501]).to_dtype(DType::F32).unwrap()).unwrap();
        let loss = cross_entropy(&logits, &targets(300, 501), &Default::default()).unwrap();
        (values(&loss), values(loss.backward().unwrap().get(&logits).unwrap()))
    };
    let one = on_threads(1, run);
    assert!([2, 3, 7, 64].into_iter().all(|threads| on_threads(threads, run) == one));
}

#[test]
fn misfits_are_named() {
    let logits = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
    let of = |logits: Tensor, targets: &[i64]| {
        cross_entropy(&logits, &Tensor::new(targets, &Device::Cpu).unwrap(), &Default::default()).unwrap_err()
    };
    let e = of(logits(&[3, 4]), &[0, 4, 1]);
    assert!(matches!(e, Error::Index { index: 4, position: 1, bound: 4, .. }), "{e}");
    let e = of(logits(&[3, 4]), &[0, 1, -100]);
    assert_eq!(e.to_string(), "cross_entropy: index -100 at position 2 is outside 0..4");
    for (dims, n) in [(&[3, 4][..], 2), (&[0, 4], 0), (&[3, 0], 3), (&[3, 4, 1], 3), (&[4], 4)] {
        let e = of(logits(dims), &vec![0; n]);
        assert!(matches!(e, Error::Shape { op: "cross_entropy", .. }), "{e}");
    }
    let (f16, targets) =
        (logits(&[1, 2]).to_dtype(DType::F16).unwrap(), Tensor::new(&[0u32], &Device::Cpu).unwrap());
    assert!(matches!(
        cross_entropy(&f16, &targets, &Default::default()),
        Err(Error::DType { found: DType::F16, .. })
    ));
    let floats = Tensor::new(&[0f32], &Device::Cpu).unwrap();
    assert!(matches!(
        cross_entropy(&logits(&[1, 2]), &floats, &Default::default()),
        Err(Error::DType { .. })
    ));
    let smoothed = CrossEntropy { label_smoothing: 1.5, ..Default::default() };
    assert!(matches!(cross_entropy(&logits(&[1, 2]), &targets, &smoothed), Err(Error::Argument { .. })));
}
