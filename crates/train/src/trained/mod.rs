//! A run's network with the weights of a checkpoint, to be used: [evaluated](Trained::evaluate), asked for the class of
//! pictures or for more text, taken elsewhere.
//!
//! ```no_run
//! # fn main() -> Result<(), taper_train::run::RunError> {
//! use taper_train::trained::{Choice, Trained};
//! use taper_train::{Registries, run::Split};
//! let mut trained = Trained::open("runs/mine-0123456789ab".as_ref(), Choice::default(), &Registries::default(), &Default::default())?;
//! println!("{}", trained.evaluate(Split::Test)?);
//! # Ok(()) }
//! ```
mod evaluate;
mod generate;

pub use evaluate::{Bin, Class, Classes, Evaluation};
pub use generate::{Continuation, Sampling};

use crate::recipe::{self, Average};
use crate::run::checkpoint::State;
use crate::run::folder::{self, Found};
use crate::run::inputs::Inputs;
use crate::run::manifest::Stretch;
use crate::run::network::Network;
use crate::run::open::{device, length, tensors};
use crate::run::summary::evaluations_at;
use crate::run::task::Task;
use crate::run::weights::MODEL;
use crate::run::{AVERAGE, EVALUATION_WEIGHTS, Record, RunError};
use crate::{Recipe, Registries};
use candle_core::Tensor;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use taper_data::{DataError, Images, Normalize, Provenance, Search, Shape, Unit};
use taper_world::World;

/// Which of a run's weights are meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Choice {
    /// Of a run's folder, the checkpoint of the best evaluation in place of the newest.
    pub best: bool,
    /// The weights as they are trained, also where evaluations use others.
    pub as_trained: bool,
}

/// What the weights are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    /// Those that the optimizer trains.
    Trained,
    /// Their average, of this kind.
    Average(String),
    /// Those that this optimizer has for evaluation.
    Evaluation(String),
}

impl std::fmt::Display for Weights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Trained => f.write_str("the weights as trained"),
            Self::Average(kind) => write!(f, "the average of the weights ({kind})"),
            Self::Evaluation(optimizer) => write!(f, "the weights that {optimizer} has for evaluation"),
        }
    }
}

impl Weights {
    /// Those that evaluations use at this point of a run; where, is the file.
    fn of(recipe: &Recipe, state: &State, as_trained: bool) -> (Self, &'static str) {
        let kind = match recipe.train.average {
            Average::None => "none",
            Average::Ema { .. } => "ema",
            Average::Swa { .. } => "swa",
            Average::Lookahead { .. } => "lookahead",
            Average::Asgd { .. } => "asgd",
        };
        if as_trained {
            (Self::Trained, MODEL)
        } else if state.average.in_use(&recipe.train.average) {
            (Self::Average(kind.into()), AVERAGE)
        } else if state.files.contains_key(EVALUATION_WEIGHTS) {
            (Self::Evaluation(recipe.optimizer.name.clone()), EVALUATION_WEIGHTS)
        } else {
            (Self::Trained, MODEL)
        }
    }
}

/// What a network says of a picture, by class.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// As the network says it.
    pub logits: Vec<f32>,
    /// The same as probabilities.
    pub probabilities: Vec<f64>,
}

/// A network with the weights of a checkpoint. See the [module](self).
pub struct Trained {
    run: PathBuf,
    recipe: Recipe,
    step: u64,
    weights: Weights,
    network: Network,
    records: Vec<Record>,
    notes: Vec<String>,
    /// Whether evaluations are on other data than the run's.
    elsewhere: bool,
}

const OTHER_DATA: &str = "the data is not what the run was trained with";

impl Trained {
    /// The network of a run's folder or of a checkpoint inside one. Changes nothing there.
    pub fn open(
        path: &Path,
        choice: Choice,
        registries: &Registries,
        search: &Search,
    ) -> Result<Self, RunError> {
        let Found { run, recipe, loaded } = folder::checkpoint(path, choice.best, registries)?;
        let recipe::Task::Network { data, model } = recipe.task() else {
            return Err(RunError::unusable(
                path,
                "is the run of a numeric function: there is no network to use",
            ));
        };
        let device = device(&recipe)?;
        let mut network = Network::new(&recipe, data, model, registries, search, &device, &World::alone())?;
        let (_, steps) = length(&recipe, |epoch| network.batches(epoch));
        network.set_last(loaded.state.step >= steps);
        let (weights, file) = Weights::of(&recipe, &loaded.state, choice.as_trained);
        network.params().set(&tensors(&loaded.files, file)?.into_iter().collect())?;
        let mut notes = Vec::new();
        if let Ok(manifest) = folder::manifest(&run) {
            let now =
                Inputs { data: network.provenance().content.clone(), init_from: manifest.init_from.clone() };
            if let Some(change) = now.differ_from(&Inputs::from(&manifest)) {
                notes.push(format!("{OTHER_DATA}: {change}"));
            }
            let now = Stretch::now(&device, recipe.train.precision)?.arithmetic();
            let then = manifest.stretches.iter().map(Stretch::arithmetic).find(|then| *then != now);
            notes
                .extend(then.map(|then| format!("trained on {then}, used on {now}: last digits may differ")));
        }
        let records = folder::records(&run)?;
        Ok(Self { run, step: loaded.state.step, recipe, weights, network, records, notes, elsewhere: false })
    }

    /// The run's folder.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// The run's recipe.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// The steps that were taken.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Which weights these are.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// What to know before the result is compared with the run's own.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What the network was built for.
    pub fn task(&self) -> taper_models::Task {
        self.network.shape()
    }

    /// How images are normalised before the network sees them; `None` for text.
    pub fn normalize(&self) -> Option<&Normalize> {
        self.network.normalize()
    }

    /// The words of a language model, in the order of their numbers.
    pub fn vocabulary(&self) -> Option<&[String]> {
        self.network.words().map(|words| &*words.vocab)
    }

    /// What the numbers of a text stand for.
    pub fn unit(&self) -> Option<Unit> {
        self.network.words().map(|words| words.unit)
    }

    /// Whether it takes images of bytes, as pictures are.
    pub fn takes_pictures(&self) -> bool {
        self.network.takes_pictures()
    }

    /// The data as it is now.
    pub fn data(&self) -> &Provenance {
        self.network.provenance()
    }

    /// The names of the classes, in the order of their numbers, where the data has names for them.
    pub fn classes(&self) -> &[String] {
        &self.data().classes
    }

    /// Evaluates on another data set from here on: of the same kind and size as the run's own, with the same classes, or text that
    /// the run's vocabulary can number. It is normalised as the run's own, and nothing of it is put aside for validation.
    pub fn evaluate_on(
        &mut self,
        name: &str,
        options: &Value,
        registries: &Registries,
        search: &Search,
    ) -> Result<(), RunError> {
        let loaded = registries.data.get(name)?.load(options, search)?;
        let refuse = |message| DataError::Option { dataset: name.to_owned(), key: None, message };
        self.network.evaluate_on(loaded).map_err(refuse)?;
        self.elsewhere = true;
        // What was said of the run's own data.
        self.notes.retain(|note| !note.starts_with(OTHER_DATA));
        Ok(())
    }

    /// What the run measured after the step of these weights, by `<split>.<metric>`.
    pub fn measured(&self) -> BTreeMap<String, f64> {
        evaluations_at(&self.records, self.step)
    }

    /// All parameters and buffers, by name.
    pub fn tensors(&self) -> Vec<(String, Tensor)> {
        let vars = self.network.params().vars().into_iter();
        vars.map(|(name, var)| (name, var.as_tensor().detach())).collect()
    }

    /// Size and classes of the images that the network takes; an error for one that reads text.
    pub fn images(&self) -> Result<Shape, RunError> {
        match self.task() {
            taper_models::Task::Images { height, width, channels, classes } => {
                Ok(Shape { height, width, channels, classes })
            }
            task => Err(RunError::unusable(
                &self.run,
                format!("expected a network for images, found one for {task}"),
            )),
        }
    }

    /// What the network says of each of some pictures, whose bytes stand one after another.
    pub fn classify(&mut self, pixels: Vec<u8>) -> Result<Vec<Answer>, RunError> {
        let shape = self.images()?;
        if !self.network.takes_pictures() {
            let message = "expected a network for images of bytes, found one for floats: a picture has none";
            return Err(RunError::unusable(&self.run, message));
        }
        let labels = vec![0; pixels.len() / shape.image_bytes().max(1)];
        let images = Images::new(shape, pixels, labels, Path::new("pictures"))?;
        let answer = |logits: Vec<f32>| Answer { probabilities: probabilities(&logits, 1.0), logits };
        Ok(self.network.classify(images)?.into_iter().map(answer).collect())
    }
}

/// Softmax in f64. Logits that are no numbers give no numbers.
fn probabilities(logits: &[f32], temperature: f64) -> Vec<f64> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> =
        logits.iter().map(|x| ((f64::from(*x) - f64::from(most)) / temperature).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}
