use crate::support::*;
use candle_core::{DType, Device, Tensor};
use taper_models::ops::{Activation, Mask, embedding, linear};
use taper_models::rng::Rng;
use taper_models::{Error, Result};

#[test]
fn gradients_are_those_of_finite_differences() {
    for (vocabulary, features, shape) in
        [(1, 1, &[1][..]), (5, 3, &[7]), (100, 2, &[4, 3]), (70, 17, &[2, 1, 3])]
    {
        let weight = var("weight", &[vocabulary, features]);
        let ids: Vec<u32> =
            (0..shape.iter().product::<usize>()).map(|i| (i * i * 3 % vocabulary) as u32).collect();
        let tokens = Tensor::from_vec(ids, shape, &Device::Cpu).unwrap();
        let rows = Mask::draw(Rng::new(1, "test", "rows", 0), vocabulary, 0.3).unwrap();
        for rows in [None, Some(&rows)] {
            check_gradients("embedding", &[&weight], || project(&embedding(&weight, &tokens, rows)?));
        }
    }
}

#[test]
fn a_tied_decoder_adds_its_part() {
    let (weight, tokens) = (var("weight", &[6, 3]), Tensor::new(&[2i64, 0, 2], &Device::Cpu).unwrap());
    check_gradients("tied", &[&weight], || {
        let x = embedding(&weight, &tokens, None)?;
        project(&linear(&x, &weight, None, Activation::None)?)
    });
}

#[test]
fn dropped_rows_are_zero_in_output_and_gradient() -> Result<()> {
    let (weight, tokens) = (var("weight", &[3, 2]), Tensor::new(&[0u32, 1, 0], &Device::Cpu)?);
    let rows = Mask::from_tensor(&Tensor::new(&[[0f32], [4.0], [4.0]], &Device::Cpu)?)?;
    let y = embedding(&weight, &tokens, Some(&rows))?;
    let w = values(&weight);
    assert_eq!(values(&y), [0.0, 0.0, 4.0 * w[2], 4.0 * w[3], 0.0, 0.0]);
    assert_eq!(values(y.sum_all()?.backward()?.get(&weight).unwrap()), [0.0, 0.0, 4.0, 4.0, 0.0, 0.0]);
    Ok(())
}

#[test]
fn misfits_are_named() -> Result<()> {
    let weight = normal("weight", &[3, 2]);
    let of = |ids: &[i64]| embedding(&weight, &Tensor::new(ids, &Device::Cpu)?, None);
    assert!(matches!(of(&[0, 1, 3]), Err(Error::Index { op: "embedding", index: 3, position: 2, bound: 3 })));
    assert!(matches!(of(&[-1]), Err(Error::Index { index: -1, position: 0, .. })));
    assert!(matches!(of(&[]), Err(Error::Shape { .. })));
    let tokens = Tensor::new(&[0u32], &Device::Cpu)?;
    assert!(matches!(embedding(&weight.get(0)?, &tokens, None), Err(Error::Shape { .. })));
    let floats = tokens.to_dtype(DType::F32)?;
    assert!(matches!(embedding(&weight, &floats, None), Err(Error::DType { found: DType::F32, .. })));
    let mask = Mask::draw(Rng::new(1, "test", "rows", 0), 4, 0.3)?;
    assert!(matches!(embedding(&weight, &tokens, Some(&mask)), Err(Error::Shape { .. })));
    Ok(())
}
