use crate::support::*;
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;
use taper_models::ops::{Mask, dropout, locked_dropout, masked};
use taper_models::rng::Rng;
use taper_models::{Error, Result};

fn key(name: &str, step: u64) -> Rng {
    Rng::new(1, "dropout", name, step)
}

fn bits(mask: &Mask) -> Vec<f64> {
    values(&mask.to_tensor(DType::F64, &Device::Cpu).unwrap())
}

#[test]
fn the_share_that_is_kept_and_the_mean_are_right() -> Result<()> {
    let n = 400_000;
    for p in [0.0, 0.1, 0.4, 0.5, 0.9] {
        let mask = bits(&Mask::draw(key("a", 0), n, p)?);
        let kept = mask.iter().filter(|v| **v != 0.0).count() as f64 / n as f64;
        // Five standard errors.
        assert!((kept - (1.0 - p)).abs() <= 5.0 * (p * (1.0 - p) / n as f64).sqrt(), "p = {p}: {kept}");
        assert!(mask.iter().all(|v| *v == 0.0 || *v == 1.0 / (1.0 - p)));
    }
    Ok(())
}

#[test]
fn masks_of_different_keys_are_independent() -> Result<()> {
    let n = 100_000;
    let masks = [key("a", 0), key("b", 0), key("a", 1)].map(|k| bits(&Mask::draw(k, n, 0.5).unwrap()));
    for (i, a) in masks.iter().enumerate() {
        for b in &masks[..i] {
            let equal = a.iter().zip(b).filter(|(a, b)| a == b).count() as f64 / n as f64;
            assert!((equal - 0.5).abs() < 5.0 * 0.5 / (n as f64).sqrt(), "{equal}");
        }
    }
    Ok(())
}

#[test]
fn masks_are_pinned_so_that_old_runs_stay_reproducible() -> Result<()> {
    let kept: String =
        bits(&Mask::draw(key("a", 3), 32, 0.5)?).iter().map(|v| if *v > 0.0 { '1' } else { '0' }).collect();
    assert_eq!(kept, PINNED);
    Ok(())
}
const PINNED: &str = "00100100101001101010010100011001";

proptest! {
    /// An element depends on its index alone: not on the size of the mask, nor on threads.
    #[test]
    fn a_longer_mask_begins_with_the_shorter(short in 1usize..40_000, more in 0usize..40_000, p in 0.01f64..0.99) {
        let draw = |n| bits(&Mask::draw(key("a", 5), n, p).unwrap());
        let (short, long) = (on_threads(1, || draw(short)), on_threads(2, || draw(short + more)));
        prop_assert_eq!(&short[..], &long[..short.len()]);
    }

    /// A part of a mask is what the whole has there: shards of a batch drop what the batch would.
    #[test]
    fn a_part_of_a_mask_is_that_part_of_the_whole(first in 0usize..40_000, n in 1usize..40_000, p in 0.01f64..0.99) {
        let part = bits(&Mask::draw_from(key("a", 5), first, n, p).unwrap());
        let whole = bits(&Mask::draw(key("a", 5), first + n, p).unwrap());
        prop_assert_eq!(&part[..], &whole[first..]);
    }

    /// Any shape and any mask: the product, and the same for the gradient.
    #[test]
    fn masking_multiplies(steps in 1usize..5, batch in 1usize..70, features in 1usize..600, whole: bool) {
        let x = var("x", &[steps, batch, features]);
        let shape = if whole { vec![steps, batch, features] } else { vec![1, batch, features] };
        let mask = Mask::draw(key("a", 0), shape, 0.4).unwrap();
        let factors = mask.to_tensor(DType::F64, &Device::Cpu).unwrap();
        let y = masked(&x, &mask).unwrap();
        prop_assert_eq!(values(&y), values(&x.broadcast_mul(&factors).unwrap()));
        let grads = y.sum_all().unwrap().backward().unwrap();
        let ones = x.ones_like().unwrap().broadcast_mul(&factors).unwrap();
        prop_assert_eq!(values(grads.get(&x).unwrap()), values(&ones));
    }
}

#[test]
fn locked_dropout_drops_the_same_in_every_step_and_ordinary_does_not() -> Result<()> {
    let x = Tensor::ones((4, 5, 60), DType::F32, &Device::Cpu)?;
    let locked = locked_dropout(&x, 0.4, key("a", 0))?;
    for step in 1..4 {
        assert_eq!(values(&locked.get(step)?), values(&locked.get(0)?));
    }
    let ordinary = dropout(&x, 0.4, key("a", 0))?;
    assert_ne!(values(&ordinary.get(1)?), values(&ordinary.get(0)?));
    Ok(())
}

#[test]
fn misfits_are_named() -> Result<()> {
    for p in [-0.1, 1.0, f64::NAN] {
        assert!(matches!(Mask::draw(key("a", 0), 3, p), Err(Error::Argument { .. })));
    }
    let uneven = Tensor::new(&[0f32, 2.0, 3.0], &Device::Cpu)?;
    assert!(matches!(Mask::from_tensor(&uneven), Err(Error::Argument { .. })));
    let mask = Mask::draw(key("a", 0), (2, 3), 0.5)?;
    for dims in [&[3, 2][..], &[2, 3, 1], &[3], &[0, 2, 3]] {
        let x = Tensor::zeros(dims, DType::F32, &Device::Cpu)?;
        assert!(matches!(masked(&x, &mask), Err(Error::Shape { op: "dropout", .. })), "{dims:?}");
    }
    let x = Tensor::zeros((2, 3), DType::U32, &Device::Cpu)?;
    assert!(matches!(masked(&x, &mask), Err(Error::DType { .. })));
    assert!(matches!(locked_dropout(&x, 0.5, key("a", 0)), Err(Error::Shape { .. })));
    Ok(())
}
