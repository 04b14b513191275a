use crate::support::*;
use candle_core::{DType, Device, Tensor};
use taper_models::ops::{LstmState, LstmWeights, Mask, lstm, mean_square, mean_square_change};
use taper_models::rng::Rng;
use taper_models::{Error, Result};

/// Steps, batch, input, hidden.
const SHAPES: [(usize, usize, usize, usize); 7] =
    [(1, 1, 1, 1), (2, 1, 3, 2), (3, 2, 1, 4), (4, 3, 2, 3), (2, 7, 3, 5), (5, 1, 2, 17), (3, 2, 18, 2)];

#[test]
fn gradients_are_those_of_finite_differences() {
    for (steps, batch, input, hidden) in SHAPES {
        let (x, w_ih, w_hh) = (
            var("x", &[steps, batch, input]),
            var("w_ih", &[4 * hidden, input]),
            var("w_hh", &[4 * hidden, hidden]),
        );
        let (b_ih, b_hh) = (var("b_ih", &[4 * hidden]), var("b_hh", &[4 * hidden]));
        let [wi, wh, bi, bh] = [&w_ih, &w_hh, &b_ih, &b_hh].map(|v| v.as_tensor().clone());
        let weights = LstmWeights { w_ih: wi, w_hh: wh, b_ih: bi, b_hh: bh };
        let state = LstmState { h: normal("h", &[batch, hidden]), c: normal("c", &[batch, hidden]) };
        let drop = Mask::draw(Rng::new(1, "test", "w", 0), (4 * hidden, hidden), 0.4).unwrap();
        for (state, drop) in
            [(None, None), (Some(&state), None), (None, Some(&drop)), (Some(&state), Some(&drop))]
        {
            let what = format!("{steps} steps, {batch} rows, {input} -> {hidden}");
            let vars = [&x, &w_ih, &w_hh, &b_ih, &b_hh];
            check_gradients(&what, &vars, || project(&lstm(&x, &weights, state, drop)?.0));
        }
    }
}

#[test]
fn two_halves_with_the_state_carried_are_the_whole() -> Result<()> {
    let weights = LstmWeights {
        w_ih: normal("w_ih", &[20, 3]),
        w_hh: normal("w_hh", &[20, 5]),
        b_ih: normal("b_ih", &[20]),
        b_hh: normal("b_hh", &[20]),
    };
    let x = normal("x", &[6, 2, 3]);
    let (whole, end) = lstm(&x, &weights, None, None)?;
    let (first, middle) = lstm(&x.narrow(0, 0, 4)?, &weights, None, None)?;
    let (second, again) = lstm(&x.narrow(0, 4, 2)?, &weights, Some(&middle), None)?;
    assert_eq!(values(&whole), values(&Tensor::cat(&[first, second], 0)?));
    assert_eq!((values(&end.h), values(&end.c)), (values(&again.h), values(&again.c)));
    assert!(!end.h.track_op() && !end.c.track_op());
    Ok(())
}

#[test]
fn frozen_and_untracked_operands_get_no_gradient() -> Result<()> {
    let (x, w_ih, w_hh) = (normal("x", &[3, 2, 4]), var("w_ih", &[8, 4]), var("w_hh", &[8, 2]));
    let (b_ih, b_hh) = (var("b_ih", &[8]), normal("b_hh", &[8]));
    let frozen = w_hh.detach();
    let weights =
        LstmWeights { w_ih: w_ih.as_tensor().clone(), w_hh: frozen, b_ih: b_ih.as_tensor().clone(), b_hh };
    let loss = lstm(&x, &weights, None, None)?.0.sum_all()?;
    for grads in [loss.backward()?, taper_models::backward(&loss)?] {
        assert!(grads.get(&w_ih).is_some() && grads.get(&b_ih).is_some());
        assert!(grads.get(&w_hh).is_none() && grads.get(&weights.w_hh).is_none());
        assert!(grads.get(&x).is_none() && grads.get(&weights.b_hh).is_none());
    }
    Ok(())
}

#[test]
fn misfits_are_named() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    let run = |x: &[usize], w_ih: &[usize], w_hh: &[usize], b: &[usize], h: &[usize]| -> Result<()> {
        let weights =
            LstmWeights { w_ih: zeros(w_ih)?, w_hh: zeros(w_hh)?, b_ih: zeros(b)?, b_hh: zeros(b)? };
        lstm(&zeros(x)?, &weights, Some(&LstmState { h: zeros(h)?, c: zeros(h)? }), None).map(|_| ())
    };
    run(&[5, 2, 3], &[16, 3], &[16, 4], &[16], &[2, 4])?;
    let wrong = [
        (run(&[0, 2, 3], &[16, 3], &[16, 4], &[16], &[2, 4]), "x [0, 2, 3]"),
        (run(&[5, 0, 3], &[16, 3], &[16, 4], &[16], &[0, 4]), "x [5, 0, 3]"),
        (run(&[5, 2], &[16, 3], &[16, 4], &[16], &[2, 4]), "x [5, 2]"),
        (run(&[5, 2, 3], &[16, 2], &[16, 4], &[16], &[2, 4]), "w_ih [16, 2]"),
        (run(&[5, 2, 3], &[16, 3], &[12, 4], &[16], &[2, 4]), "w_hh [12, 4]"),
        (run(&[5, 2, 3], &[16, 3], &[16, 4], &[4], &[2, 4]), "b_ih [4]"),
        (run(&[5, 2, 3], &[16, 3], &[16, 4], &[16], &[1, 4]), "h [1, 4]"),
    ];
    for (result, part) in wrong {
        let e = result.unwrap_err();
        assert!(matches!(e, Error::Shape { op: "lstm", .. }) && e.to_string().contains(part), "{e}");
    }
    let mut weights =
        LstmWeights { w_ih: zeros(&[8, 3])?, w_hh: zeros(&[8, 2])?, b_ih: zeros(&[8])?, b_hh: zeros(&[8])? };
    let mask = Mask::draw(Rng::new(1, "test", "w", 0), (2, 8), 0.4)?;
    assert!(matches!(lstm(&zeros(&[1, 1, 3])?, &weights, None, Some(&mask)), Err(Error::Shape { .. })));
    weights.b_hh = weights.b_hh.to_dtype(DType::F64)?;
    assert!(matches!(lstm(&zeros(&[1, 1, 3])?, &weights, None, None), Err(Error::DType { .. })));
    Ok(())
}

#[test]
fn regularisers_of_activations_have_the_right_values_and_gradients() -> Result<()> {
    let x = Tensor::new(&[[1f64, 2.0], [4.0, 0.0], [4.0, 3.0]], &Device::Cpu)?;
    assert_eq!(mean_square(&x)?.to_scalar::<f64>()?, 46.0 / 6.0);
    assert_eq!(mean_square_change(&x)?.to_scalar::<f64>()?, (9.0 + 4.0 + 9.0) / 4.0);
    assert_eq!(mean_square_change(&x.narrow(0, 0, 1)?)?.to_scalar::<f64>()?, 0.0);
    for dims in [&[1, 1][..], &[2, 3], &[5, 2, 3], &[4, 1]] {
        let x = var("x", dims);
        check_gradients("mean square", &[&x], || Ok((mean_square(&x)? * 3.0)?));
        if dims[0] > 1 {
            check_gradients("mean square of changes", &[&x], || Ok((mean_square_change(&x)? * 3.0)?));
        }
    }
    let empty = Tensor::zeros((0, 2), DType::F32, &Device::Cpu)?;
    assert!(matches!(mean_square(&empty), Err(Error::Shape { .. })));
    Ok(())
}
