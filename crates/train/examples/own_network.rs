//! A convolutional network of your own on one page, from Taper's layers, trained from a recipe.
//!
//!   cargo run --release --workspace --example own_network
//!
//! A network is a serde configuration that builds it through a `VarBuilder`, a forward pass, and a name. What it costs is found
//! out by building it; a backward pass it has from its ops.
use candle_core::Tensor;
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};
use std::path::Path;
use taper_models::layers::{Conv, Head, Kernel, Norm, Style};
use taper_models::ops::{FeatureMap, Window, add, gelu, max_pool2d};
use taper_models::registry::Config;
use taper_models::{Mode, Model, Task};
use taper_train::run::{self, Options, Outcome, RunError};
use taper_train::{Recipe, Registries};

/// The keys of `model` in a recipe.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct TwoPaths {
    width: usize,
}

impl Default for TwoPaths {
    fn default() -> Self {
        Self { width: 16 }
    }
}

impl Config for TwoPaths {
    fn build(&self, task: Task, vb: VarBuilder) -> taper_models::Result<Box<dyn Model>> {
        let Task::Images { channels, classes, .. } = task else {
            let (model, message) = ("two-paths".into(), format!("expected images, found {task}"));
            return Err(taper_models::Error::Config { model, key: Some("name".into()), message });
        };
        let (width, style) = (self.width, Style::default());
        Ok(Box::new(Net {
            stem: Conv::with_bias(channels, width, Kernel::new(3, 1), style, vb.pp("stem"))?,
            narrow: Conv::new(width, width, Kernel::new(3, 1), style, vb.pp("narrow"))?,
            wide: Conv::identity(width, width, Kernel::new(5, 1), style, vb.pp("wide"))?,
            norm: Norm::new(width, style, vb.pp("norm"))?,
            head: Head::new(width, classes, vb.pp("head"))?,
        }))
    }
}

struct Net {
    stem: Conv,
    narrow: Conv,
    wide: Conv,
    norm: Norm,
    head: Head,
}

impl Model for Net {
    fn logits(&mut self, input: &Tensor, mode: Mode) -> taper_models::Result<Tensor> {
        let x = gelu(&self.stem.forward(&FeatureMap::enter(input)?, mode)?)?;
        let x = max_pool2d(&x, &Window::square(2, 2, 0))?;
        let x = add(&self.narrow.forward(&x, mode)?, &self.wide.forward(&x, mode)?)?;
        let x = max_pool2d(&self.norm.gelu(&x, mode)?, &Window::square(2, 2, 0))?;
        self.head.forward(&x, mode)
    }
}

/// Trains it on a third of MNIST for 60 steps.
pub fn train(runs: &Path) -> Result<Outcome, RunError> {
    let mut registries = Registries::default();
    registries.models.register("two-paths", "an example", TwoPaths::default())?;
    let text = "
data: {name: mnist, subset: {train: 20000, test: 1000}}
model: {name: two-paths, width: 24}
optimizer: {name: adam, lr: 0.01}
schedule: {kind: cosine, per: step}
train: {steps: 60}
";
    let recipe = Recipe::parse("own_network.yaml", text, &[], &registries)?;
    run::run(&recipe, &registries, &Options { runs: runs.into(), ..Default::default() })
}

#[allow(dead_code)] // a test includes this file and has a `main` of its own
fn main() -> Result<(), RunError> {
    let outcome = train(Path::new("runs"))?;
    println!("{:.2} % of the test images are right", 100.0 * outcome.summary.last["test.accuracy"]);
    Ok(())
}
