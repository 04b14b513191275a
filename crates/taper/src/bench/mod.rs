//! Benchmarks: what a piece of work costs here, beside a yardstick and beside PyTorch, all in one call.
//!
//! A busy or throttled machine changes its speed from one second to the next, so that times of different calls say
//! little. Everything that is compared runs in turn, round after round, and the best of each is kept; the ratios of
//! single rounds say how far to trust the ratio of the best. Each side of a case is a process of its own, so that the
//! most memory it ever held is that of this work alone.
mod best;
mod epoch;
#[cfg(unix)]
mod exchange;
mod gemm;
mod input;
mod measure;
mod microscope;
mod optim;
mod picture;
#[cfg(unix)]
pub mod ranks;
pub mod scaling;
mod serve;
mod side;
mod step;
mod stock;

pub use best::best_ratio;
pub use measure::{Sides, measure};
pub use picture::picture;
pub use serve::{peak, serve, watch};
pub use side::has_bf16;

use candle_core::Device;
use serde_json::Value;
use std::sync::OnceLock;
use taper_train::recipe::nearest;

static DEVICE: OnceLock<Device> = OnceLock::new();

/// Where optimizers and training steps of this process compute from now on, if nothing was said before; else on the CPU.
pub fn compute_on(device: Device) {
    let _ = DEVICE.set(device);
}

/// Where optimizers and training steps compute.
fn device() -> &'static Device {
    DEVICE.get().unwrap_or(&Device::Cpu)
}

/// What can go wrong in a benchmark.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// No benchmark of that name.
    #[error("unknown benchmark `{name}`; known: {}{}", .known.join(", "), did_you_mean(.name, .known))]
    Unknown {
        /// The name or glob asked for.
        name: String,
        /// The suites.
        known: Vec<&'static str>,
    },
    /// A side did not start or did not answer.
    #[error("{side}: {message}")]
    Side {
        /// Which one.
        side: &'static str,
        /// What happened.
        message: String,
    },
    /// The optimizer's work failed.
    #[error(transparent)]
    Optimizer(#[from] taper_optim::Error),
    /// The model's work failed.
    #[error(transparent)]
    Model(#[from] taper_models::Error),
    /// The data's work failed.
    #[error(transparent)]
    Data(#[from] taper_data::DataError),
    /// The run's work failed.
    #[error(transparent)]
    Run(#[from] taper_train::run::RunError),
    /// candle's work failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// Which one.
        path: String,
        /// Why.
        source: std::io::Error,
    },
}

/// Something that can be timed again and again.
pub type Work = Box<dyn FnMut() -> Result<(), BenchError>>;

/// One benchmark.
pub struct Case {
    /// Its name, `suite/what/how`.
    pub name: String,
    /// What its rate is counted in.
    pub unit: &'static str,
    /// How many of these one call of the work does.
    pub amount: f64,
    /// Calls of the work that are timed together: enough to last some milliseconds.
    pub repeat: u32,
    /// Makes the work and what it is measured beside; called when its turn comes, so that memory is used once.
    pub prepare: Box<dyn FnOnce() -> Result<Prepared, BenchError>>,
    /// What PyTorch is asked to do, if it can do the same.
    pub peer: Option<Value>,
}

impl Case {
    /// Whether it multiplies matrices, which autocast does in bf16.
    fn has_products(&self) -> bool {
        !self.name.starts_with("optim/")
    }

    /// Whether it can be measured on other devices than the CPU: optimizers and training steps can.
    pub fn runs_on_devices(&self) -> bool {
        self.name.starts_with("optim/") || self.name.contains("-step/")
    }
}

/// Makes a piece of work.
pub type Make = Box<dyn FnOnce() -> Result<Work, BenchError>>;

/// A benchmark ready to run.
pub struct Prepared {
    /// The work.
    pub ours: Work,
    /// Yardsticks: a name, the amount of one call in the case's unit, and how to make the work.
    pub beside: Vec<(&'static str, f64, Make)>,
}

impl Prepared {
    /// Work without a yardstick.
    pub fn alone(ours: Work) -> Self {
        Self { ours, beside: Vec::new() }
    }
}

/// A name and the benchmarks under it.
type Suite = (&'static str, fn() -> Vec<Case>);

/// A suite: its name and its cases. A new workload is a new file and a line here.
const SUITES: &[Suite] = &[
    ("gemm", gemm::cases),
    ("mlp-step", step::mlp),
    ("resnet18-step", step::resnet18),
    ("resnet34-step", step::resnet34),
    ("densenet121-step", step::densenet121),
    ("airbench-step", step::airbench),
    ("lstm1-step", step::lstm1),
    ("lstm3-step", step::lstm3),
    ("gpt-step", step::gpt),
    ("vit-step", step::vit),
    ("optim", optim::cases),
    ("microscope", microscope::cases),
    ("input", input::cases),
    ("mnist-epoch", epoch::cases),
    #[cfg(unix)]
    ("exchange", exchange::cases),
];

/// The cases that `names` ask for: a suite, a case, or a glob over cases; all without any.
pub fn select(names: &[String]) -> Result<Vec<Case>, BenchError> {
    let suites = SUITES.iter().flat_map(|(_, cases)| cases()).map(|case| (case, names.is_empty()));
    // Many and slow: only by name.
    let mut cases: Vec<(Case, bool)> =
        suites.chain(scaling::cases().into_iter().map(|case| (case, false))).collect();
    for name in names {
        let pattern = regex::escape(name).replace(r"\*", ".*");
        let pattern = regex::Regex::new(&format!("^(?:{pattern})(?:/.*)?$"));
        let mut found = false;
        for (case, wanted) in &mut cases {
            if pattern.as_ref().is_ok_and(|pattern| pattern.is_match(&case.name)) {
                (found, *wanted) = (true, true);
            }
        }
        if !found {
            let known = SUITES.iter().map(|(name, _)| *name).collect();
            return Err(BenchError::Unknown { name: name.clone(), known });
        }
    }
    Ok(cases.into_iter().filter(|(_, wanted)| *wanted).map(|(case, _)| case).collect())
}

fn did_you_mean(name: &str, known: &[&str]) -> String {
    nearest(name, known).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_select_suites_cases_and_globs() {
        let count = |names: &[&str]| {
            select(&names.iter().map(ToString::to_string).collect::<Vec<_>>()).map(|cases| cases.len())
        };
        let all = count(&["optim"]).unwrap();
        assert!(count(&[]).unwrap() > all);
        assert_eq!(count(&["optim/decgd"]).unwrap(), 2);
        // And Muon and SOAP on matrices.
        assert_eq!(count(&["optim/*/one"]).unwrap() * 2 + 5, all);
        assert_eq!(count(&["optim/adam", "optim/adam/one"]).unwrap(), 2);
        assert_eq!(count(&["resnet18-step/128"]).unwrap(), 3);
        let error = count(&["optm"]).unwrap_err().to_string();
        assert!(error.starts_with("unknown benchmark `optm`; known: gemm, mlp-step"), "{error}");
    }

    #[test]
    fn names_are_distinct() {
        let mut names: Vec<String> = select(&[]).unwrap().into_iter().map(|case| case.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
