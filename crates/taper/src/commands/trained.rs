//! Which weights of which run a command is to use.
use super::{Common, Failure};
use std::path::PathBuf;
use taper_train::Registries;
use taper_train::trained::{Choice, Trained};

#[derive(clap::Args)]
pub struct Which {
    /// The folder of a run, whose newest checkpoint is used, or of a checkpoint (RUN/checkpoints/step-<n>)
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Uses the checkpoint of the run's best evaluation
    #[arg(long)]
    best: bool,
    /// Uses the weights as they are trained, also where evaluations use others: an average, or those of Schedule-Free
    #[arg(long)]
    as_trained: bool,
}

impl Which {
    pub fn open(&self, common: &Common, registries: &Registries) -> Result<Trained, Failure> {
        let choice = Choice { best: self.best, as_trained: self.as_trained };
        Ok(Trained::open(&self.run, choice, registries, &common.search())?)
    }
}
