//! The input pipeline on one core: CIFAR-10's augmentation at batch 128, images a second.
use super::{BenchError, Case, Prepared};
use serde_json::{Value, json};
use taper_data::{
    Augment, Data, DataError, DataRegistry, Flip, ImagePipeline, Normalize, PipelineConfig, Search,
};

/// Images of one call: an epoch.
const IMAGES: usize = 50_000;

pub fn cases() -> Vec<Case> {
    let case = |(label, augment): (&str, Augment)| Case {
        name: format!("input/{label}"),
        unit: "images/s",
        amount: IMAGES as f64,
        repeat: 1,
        peer: None,
        prepare: Box::new(move || {
            let pipeline = pipeline(augment)?;
            let mut epoch = 0;
            Ok(Prepared::alone(Box::new(move || {
                epoch += 1;
                // One thread makes the batches, and the one that takes them only waits.
                pipeline.epoch(epoch, 0).for_each(|batch| drop(std::hint::black_box(batch)));
                Ok(())
            })))
        }),
    };
    let plain = Augment::default();
    let usual = Augment { crop_pad: 4, flip: Flip::RANDOM, ..plain };
    let all = Augment { cutout: 16, mixup: 1.0, ..usual };
    [("plain", plain), ("crop-flip", usual), ("crop-flip-cutout-mixup", all)].into_iter().map(case).collect()
}

/// Over CIFAR-10, or random images of its size where that is not found.
fn pipeline(augment: Augment) -> Result<ImagePipeline, BenchError> {
    let (registry, search) = (DataRegistry::builtin(), Search::from_env(None, true));
    let loaded = match registry.get("cifar10")?.load(&Value::Null, &search) {
        Err(DataError::Missing { .. }) => {
            registry.get("synthetic-images")?.load(&json!({"train": IMAGES}), &search)?
        }
        other => other?,
    };
    let Data::Images { train, .. } = loaded.data else {
        return Err(DataError::option(&loaded.provenance.name, "name", "expected a set of images").into());
    };
    let config = PipelineConfig {
        batch_size: 128,
        shuffle: true,
        augment,
        normalize: loaded.normalize.unwrap_or_else(|| Normalize::unit(train.channels)),
        drop_last: false,
        indices: None,
    };
    Ok(ImagePipeline::new(train, config, 1)?)
}
