//! What a look of the microscope costs: an update of all parameters of a ResNet-18 that is looked at, beside one that is not.
//!
//! The difference of the two is to be held against a step of that network (`resnet18-step`): passes over memory against
//! convolutions.
use super::step::Workload;
use super::{BenchError, Case, Make, Prepared, Work};
use candle_core::DType;
use candle_core::backprop::GradStore;
use serde_json::Map;
use taper_models::rng::Rng;
use taper_models::{Params, Registry};
use taper_optim::{Figures, Microscope, Shadow, Spread, StepContext};
use taper_train::run::{self, Sight};

/// How steps are looked at.
#[derive(Clone, Copy, PartialEq)]
enum Look {
    /// Not at all.
    None,
    /// Moments are kept, as between two looks.
    Passing,
    /// At all that is cheap.
    Cheap,
}

pub fn cases() -> Vec<Case> {
    let case = |(optimizer, decay, name, look): (&'static str, bool, &str, Look)| Case {
        name: format!("microscope/{name}-{optimizer}{}/resnet18", if decay { "-decay" } else { "" }),
        unit: "steps/s",
        amount: 1.0,
        repeat: 1,
        peer: None,
        prepare: Box::new(move || {
            let plain: Make = Box::new(move || work(optimizer, decay, Look::None));
            Ok(Prepared { ours: work(optimizer, decay, look)?, beside: vec![("plain", 1.0, plain)] })
        }),
    };
    let all = [
        ("decgd", false, "look", Look::Cheap),
        ("decgd", true, "look", Look::Cheap),
        ("adam", false, "look", Look::Cheap),
        ("decgd", false, "between", Look::Passing),
    ];
    all.map(case).into()
}

/// An update by one gradient again and again, and what `train.probe: {every: 1}` makes of it; with decay, that of the recipes of
/// CIFAR, beside which a look fits decay too.
fn work(optimizer: &str, decay: bool, look: Look) -> Result<Work, BenchError> {
    let (registry, params, network) =
        (Registry::builtin(), Params::new(1), Workload::conv("resnet18", "fast", 1));
    let vb = params.builder(DType::F32, &candle_core::Device::Cpu);
    registry.get(network.model)?.build(&network.config, network.task, vb)?;
    let mut config = Map::from_iter([("lr".to_owned(), 1e-6.into())]);
    if decay {
        config.extend([("weight_decay".to_owned(), 5e-4.into()), ("decay".to_owned(), "paper".into())]);
    }
    let mut optimizer = taper_optim::Registry::builtin().build(optimizer, params.trainable(), &config)?;
    let shadow = Shadow::of(&optimizer.config(), optimizer.needs_loss());
    let mut microscope = Microscope::new(params.trainable(), shadow)?;
    let mut grads = GradStore::default();
    for (name, var) in params.trainable() {
        let mut rng = Rng::new(1, "bench", &name, 0);
        let values: Vec<f32> = (0..var.elem_count()).map(|_| rng.normal() as f32).collect();
        grads.insert(&var, candle_core::Tensor::from_vec(values, var.shape(), var.device())?);
    }
    let mut step = 0;
    Ok(Box::new(move || {
        step += 1;
        let context = StepContext::new().loss(1.0 + 1.0 / step as f64).finite();
        if look == Look::Cheap {
            microscope.before()?;
        }
        optimizer.step(&grads, &context)?;
        match look {
            Look::None => return Ok(()),
            Look::Passing => return Ok(microscope.pass(&grads, &context)?),
            Look::Cheap => {}
        }
        let mut seen = microscope.after(&grads, &context)?;
        if let Some(c) = shadow.c {
            let values: Vec<_> = optimizer.followers().into_iter().map(|(_, values)| values).collect();
            let spread = Spread::of(&values, (context.loss.unwrap_or(0.0) + c).sqrt());
            seen.all.extend(spread.map(|spread| ("v_p50".to_owned(), spread.quantiles[2])));
        }
        let of = |(name, figures): (String, Figures)| (name, run::Figures(figures));
        let params = seen.params.into_iter().map(of).collect();
        let sight = Sight { step, epoch: 1, all: run::Figures(seen.all), params };
        std::hint::black_box(serde_json::to_vec(&sight).unwrap_or_default());
        Ok(())
    }))
}
