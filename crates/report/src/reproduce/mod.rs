//! The paper's tables and claims beside ours: what to run for each, and what became of every published number.
//!
//! A target is a list of [cells](Cell), each a recipe under a scale with its seeds. Runs are known by the hash of their
//! settings, so that what was run before, here or elsewhere, is used again and what was interrupted goes on.
//! [`verdict`] defines when a number counts as reproduced.
mod cell;
mod claim;
mod laptop;
mod numeric;
mod outcome;
mod published;
pub mod theory;
pub mod verdict;

pub use cell::{Cell, Plan, Reduction, Scale};
pub use claim::{Checked, check};
pub use laptop::{LaptopRecipes, laptop};
pub use numeric::{Numeric, numeric};
pub use outcome::{Outcome, controls, document, outcomes};
pub use published::{
    Claim, Control, Laptop, LaptopClaim, Margin, Ordered, Published, PublishedTable, Shown, Tested,
};

use serde::{Deserialize, Serialize};

/// What can be reproduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// Powell's and Rosenbrock's functions.
    Numeric,
    /// The MLP on MNIST.
    Mnist,
    /// Table 1.
    Cifar10,
    /// Table 2.
    Cifar100,
    /// The figure on c.
    CRobustness,
    /// Table 3.
    Ptb,
}

impl Target {
    /// All, the quickest first.
    pub const ALL: [Self; 6] =
        [Self::Numeric, Self::Mnist, Self::Cifar10, Self::Cifar100, Self::CRobustness, Self::Ptb];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Numeric => "numeric",
            Self::Mnist => "mnist",
            Self::Cifar10 => "cifar10",
            Self::Cifar100 => "cifar100",
            Self::CRobustness => "c-robustness",
            Self::Ptb => "ptb",
        }
    }

    /// By its name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|target| target.name() == name)
    }
}
