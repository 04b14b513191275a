use crate::support::*;
use candle_core::{DType, Device, Tensor};
use taper_models::lstm::{Dropout, LanguageModel, LstmConfig};
use taper_models::ops::Mask;
use taper_models::registry::Config;
use taper_models::{Error, Mode, Model, Params, Result, Task};

const VOCAB: usize = 40;

fn small() -> LstmConfig {
    LstmConfig { layers: 2, emb: 24, hidden: 37, ..Default::default() }
}

fn model(config: LstmConfig) -> Result<(LanguageModel, Params)> {
    let params = Params::new(7);
    Ok((LanguageModel::new(config, VOCAB, params.builder(DType::F32, &Device::Cpu))?, params))
}

fn tokens(steps: usize, batch: usize, salt: usize) -> Tensor {
    let ids: Vec<u32> = (0..steps * batch).map(|i| ((i * 17 + salt * 5) % VOCAB) as u32).collect();
    Tensor::from_vec(ids, (steps, batch), &Device::Cpu).unwrap()
}

/// Plain gradient descent; the losses and all weights afterwards.
fn train(config: LstmConfig, steps: u64, rate: f64) -> Result<(Vec<f64>, Vec<Vec<f64>>)> {
    let (mut model, params) = model(config)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let (x, y) = (tokens(9, 5, step as usize % 3), tokens(9, 5, step as usize % 3 + 1));
        let loss = model.loss(&x, &y, Mode::Train { seed: 3, step })?;
        let grads = taper_models::backward(&loss.total)?;
        for (_, var) in params.trainable() {
            if let Some(grad) = grads.get(&var) {
                var.set(&(var.as_tensor() - (grad * rate)?)?)?;
            }
        }
        losses.push(values(&loss.nll)[0]);
    }
    Ok((losses, params.vars().iter().map(|(_, v)| values(v)).collect()))
}

#[test]
fn twenty_steps_give_the_same_bits_on_any_number_of_threads_and_learn() {
    let run = || train(small(), 20, 0.5).unwrap();
    let one = on_threads(1, run);
    assert!([2, 3, 7, 64].into_iter().all(|threads| on_threads(threads, run) == one));
    let plain = LstmConfig { dropout: Dropout::default(), alpha: 0.0, beta: 0.0, ..small() };
    let losses = train(plain, 200, 10.0).unwrap().0;
    assert!(losses[199] < 0.5 * losses[0], "{losses:?}");
}

#[test]
fn masks_depend_on_seed_and_step_only() -> Result<()> {
    let (mut model, _) = model(small())?;
    let mut loss = |seed, step| -> Result<f64> {
        model.set_carry(&[])?;
        Ok(values(&model.loss(&tokens(4, 3, 0), &tokens(4, 3, 1), Mode::Train { seed, step })?.total)[0])
    };
    let first = loss(1, 1)?;
    assert!(loss(1, 2)? != first && loss(2, 1)? != first);
    assert_eq!(loss(1, 1)?, first);
    Ok(())
}

/// The columns of a batch are dropped alike, alone and together; rows of the vocabulary and weights are dropped for all.
#[test]
fn columns_are_masked_by_their_place_in_the_batch() -> Result<()> {
    let (mut model, _) = model(small())?;
    let whole = model.draw_masks(5, 3, 7)?;
    model.set_place(2);
    let part = model.draw_masks(3, 3, 7)?;
    let rows =
        |mask: &Option<Mask>| values(&mask.as_ref().unwrap().to_tensor(DType::F64, &Device::Cpu).unwrap());
    let pairs =
        [(&whole.input, &part.input), (&whole.output, &part.output), (&whole.hidden[0], &part.hidden[0])];
    for (whole, part) in pairs {
        let (whole, part) = (rows(whole), rows(part));
        assert_eq!(part, whole[whole.len() - part.len()..]);
        assert_ne!(part, whole[..part.len()]);
    }
    assert_eq!(
        (rows(&whole.embedding), rows(&whole.weight_hh[0])),
        (rows(&part.embedding), rows(&part.weight_hh[0]))
    );
    Ok(())
}

#[test]
fn the_carried_state_can_be_saved_and_moves_on() -> Result<()> {
    let (mut model, _) = model(small())?;
    let whole = model.logits(&tokens(6, 2, 0), Mode::Eval)?;
    model.set_carry(&[])?;
    let first = model.logits(&tokens(6, 2, 0).narrow(0, 0, 4)?, Mode::Eval)?;
    let saved = model.carry();
    assert_eq!(saved.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>(), ["h.0", "c.0", "h.1", "c.1"]);
    let last = tokens(6, 2, 0).narrow(0, 4, 2)?;
    let second = model.logits(&last, Mode::Eval)?;
    model.set_carry(&saved)?;
    assert_eq!(values(&model.logits(&last, Mode::Eval)?), values(&second));
    // The same numbers by products of other shapes, in f32.
    assert!(relative_error(&Tensor::cat(&[first, second], 0)?, &whole) < 1e-6);
    let e = model.set_carry(&saved[..3]).unwrap_err();
    assert!(e.to_string().contains("c.1"), "{e}");
    assert!(matches!(model.logits(&tokens(2, 3, 0), Mode::Eval), Err(Error::Shape { op: "lstm", .. })));
    Ok(())
}

#[test]
fn frozen_recurrent_weights_get_no_gradient_and_the_rest_does() -> Result<()> {
    let (mut model, params) = model(LstmConfig { freeze_recurrent: true, ..small() })?;
    let loss = model.loss(&tokens(4, 3, 0), &tokens(4, 3, 1), Mode::Train { seed: 1, step: 1 })?;
    let grads = taper_models::backward(&loss.total)?;
    for (name, var) in params.trainable() {
        assert_eq!(grads.get(&var).is_none(), name.contains("weight_hh"), "{name}");
    }
    Ok(())
}

#[test]
fn bad_input_and_bad_configurations_are_named() -> Result<()> {
    let (mut model, _) = model(small())?;
    let mut of = |t: Tensor| model.logits(&t, Mode::Train { seed: 1, step: 1 }).unwrap_err();
    let e = of(Tensor::new(&[[3u32, 40]], &Device::Cpu)?);
    assert!(matches!(e, Error::Index { index: 40, position: 1, bound: VOCAB, .. }), "{e}");
    for dims in [&[0, 3][..], &[4, 0], &[5]] {
        let e = of(Tensor::zeros(dims, DType::U32, &Device::Cpu)?);
        assert!(matches!(e, Error::Shape { .. }) && e.to_string().contains(&format!("{dims:?}")), "{e}");
    }
    assert!(matches!(of(Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?), Error::DType { .. }));

    let vb = || Params::new(1).builder(DType::F32, &Device::Cpu);
    let task = Task::Tokens { vocab: 5 };
    let bad = [
        LstmConfig { layers: 0, ..small() },
        LstmConfig { emb: 0, ..small() },
        LstmConfig { alpha: f64::NAN, ..small() },
        LstmConfig { dropout: Dropout { input: 1.0, ..Dropout::default() }, ..small() },
    ];
    for config in bad {
        assert!(matches!(config.build(task, vb()), Err(Error::Config { key: Some(_), .. })), "{config:?}");
        assert!(config.cost(task).is_err());
    }
    let images = Task::Images { height: 1, width: 1, channels: 1, classes: 2 };
    assert!(matches!(small().build(images, vb()), Err(Error::Config { .. })));
    assert!(serde_json::from_str::<LstmConfig>(r#"{"layer": 2}"#).unwrap_err().to_string().contains("layer"));
    Ok(())
}

/// A bigram model that has logits and leaves the loss to the trait.
struct Bigrams(Tensor);

impl Model for Bigrams {
    fn logits(&mut self, input: &Tensor, _: Mode) -> Result<Tensor> {
        Ok(self.0.index_select(&input.flatten_all()?, 0)?)
    }
}

#[test]
fn a_model_of_text_need_not_write_its_loss() -> Result<()> {
    let mut model = Bigrams(Tensor::zeros((VOCAB, VOCAB), DType::F64, &Device::Cpu)?);
    let loss = model.loss(&tokens(4, 3, 0), &tokens(4, 3, 1), Mode::Eval)?;
    assert!((values(&loss.nll)[0] - (VOCAB as f64).ln()).abs() < 1e-14); // twelve equal terms
    Ok(())
}

#[test]
fn gradients_end_at_candles_fused_layer_norm_as_the_documentation_says() -> Result<()> {
    let params = Params::new(1);
    let norm = candle_nn::layer_norm(4, 1e-5, params.builder(DType::F32, &Device::Cpu))?;
    let x = var("x", &[2, 4]).to_dtype(DType::F32)?;
    let found = taper_models::backward(&candle_nn::Module::forward(&norm, &x)?.sum_all()?)?;
    assert!(params.vars().iter().all(|(_, v)| found.get(v).is_none()));
    let (weight, bias) = (norm.weight(), norm.bias().expect("layer_norm has one"));
    let slow = candle_nn::ops::layer_norm_slow(&x, weight, bias, 1e-5)?.sum_all()?;
    assert!(params.vars().iter().all(|(_, v)| taper_models::backward(&slow).unwrap().get(v).is_some()));
    Ok(())
}
