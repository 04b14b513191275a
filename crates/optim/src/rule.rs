//! What an optimizer is: the arithmetic of one element, and scalars prepared once a step.
use crate::power::{of_step, power32, power64};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// The arithmetic an update is written in: f32 or f64.
///
/// No fused multiply-add on purpose: plain operations round alike on every CPU and GPU, so that one rule has one
/// result.
pub trait Real:
    Copy
    + Debug
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// Rounds a host scalar.
    fn from_f64(value: f64) -> Self;
    /// Widens.
    fn to_f64(self) -> f64;
    /// The square root.
    fn sqrt(self) -> Self;
    /// `self` to the power `exponent`, for `self` ≥ 0; the same bits on every system.
    fn pow(self, exponent: Self) -> Self;
    /// The magnitude.
    fn abs(self) -> Self;

    /// The larger; `self` when the two compare equal or not at all.
    #[inline(always)]
    fn at_least(self, other: Self) -> Self {
        if other > self { other } else { self }
    }
    /// The smaller; `self` when the two compare equal or not at all.
    #[inline(always)]
    fn at_most(self, other: Self) -> Self {
        if other < self { other } else { self }
    }
}

macro_rules! real {
    ($t:ty, $power:ident) => {
        impl Real for $t {
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                <$t>::sqrt(self)
            }
            #[inline(always)]
            fn pow(self, exponent: Self) -> Self {
                $power(self, exponent)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                <$t>::abs(self)
            }
        }
    };
}
real!(f32, power32);
real!(f64, power64);

/// The numbers a rule hands to its kernel, computed in f64 and rounded once. Made by [`scalars!`](crate::scalars).
pub trait Scalars: Copy + Debug + Send + Sync + 'static {
    /// The same numbers in the kernel's precision.
    type In<F: Real>: Copy + Debug + Send + Sync;
    /// Rounds every number.
    fn round<F: Real>(self) -> Self::In<F>;
    /// The names of the numbers, in the order of [`Scalars::values`].
    const NAMES: &'static [&'static str];
    /// The numbers, for devices that take them in a table.
    fn values(&self) -> Vec<f64>;
}

/// Declares the scalars of a rule: a struct generic over its precision, f64 on the host.
///
/// ```
/// taper_optim::scalars! {
///     /// What the kernel of plain gradient descent needs.
///     pub struct Step { lr }
/// }
/// let rounded: Step<f32> = taper_optim::rule::Scalars::round(Step { lr: 0.1 });
/// assert_eq!(rounded.lr, 0.1f32);
/// ```
#[macro_export]
macro_rules! scalars {
    ($(#[$doc:meta])* $vis:vis struct $name:ident { $($(#[$field_doc:meta])* $field:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug)]
        $vis struct $name<F = f64> { $($(#[$field_doc])* #[allow(missing_docs)] pub $field: F),* }
        impl $crate::rule::Scalars for $name {
            type In<F: $crate::rule::Real> = $name<F>;
            const NAMES: &'static [&'static str] = &[$(stringify!($field)),*];
            fn values(&self) -> Vec<f64> {
                vec![$(self.$field),*]
            }
            fn round<F: $crate::rule::Real>(self) -> $name<F> {
                $name { $($field: F::from_f64(self.$field)),* }
            }
        }
    };
}

/// What a registry knows about an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Info {
    /// The name in recipes.
    pub name: &'static str,
    /// One line about it.
    pub about: &'static str,
    /// The paper that introduced it.
    pub paper: &'static str,
    /// The year of that paper.
    pub year: u16,
    /// The update as a formula.
    pub formula: &'static str,
}

/// A hyperparameter outside its range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Invalid {
    /// The hyperparameter.
    pub key: &'static str,
    /// What was expected and found.
    pub message: String,
}

/// The hyperparameters of a rule: a struct with serde, documented fields and a `Default`.
pub trait Config:
    Serialize + DeserializeOwned + Default + Clone + Debug + PartialEq + Send + Sync + 'static
{
    /// The base learning rate.
    fn lr(&self) -> f64;
    /// What [`Input::momentum`] is before a schedule changes it: γ, or β₁ of the Adam family. Defaults to 0.
    fn momentum(&self) -> f64 {
        0.0
    }
    /// Refuses values outside their ranges.
    fn check(&self) -> Result<(), Invalid>;
}

/// Of a [`Rule`] or a [`TensorRule`](crate::TensorRule) with one name: `names` and `info`.
macro_rules! one_name {
    ($info:ident) => {
        fn names() -> Vec<(&'static crate::Info, Self::Config)> {
            vec![(&$info, Self::Config::default())]
        }

        fn info(_: &Self::Config) -> &'static crate::Info {
            &$info
        }
    };
}
pub(crate) use one_name;

/// Refuses `value` unless `ok`; for [`Config::check`].
pub fn require(ok: bool, key: &'static str, expected: &str, found: f64) -> Result<(), Invalid> {
    if ok { Ok(()) } else { Err(Invalid { key, message: format!("expected {expected}, found {found}") }) }
}

/// Checks that hold for every rule that has these hyperparameters.
pub mod ranges {
    use super::{Invalid, require};

    /// A finite rate of at least 0.
    pub fn lr(value: f64) -> Result<(), Invalid> {
        require(value >= 0.0 && value.is_finite(), "lr", "a finite number of at least 0", value)
    }
    /// A finite decay of at least 0.
    pub fn weight_decay(value: f64) -> Result<(), Invalid> {
        require(value >= 0.0 && value.is_finite(), "weight_decay", "a finite number of at least 0", value)
    }
    /// An averaging coefficient in [0, 1).
    pub fn fraction(key: &'static str, value: f64) -> Result<(), Invalid> {
        require((0.0..1.0).contains(&value), key, "a number in [0, 1)", value)
    }
    /// A finite number of at least 0.
    pub fn at_least_zero(key: &'static str, value: f64) -> Result<(), Invalid> {
        require(value >= 0.0 && value.is_finite(), key, "a finite number of at least 0", value)
    }
    /// What all that average gradients and their squares as Adam does have in common.
    pub fn moments(rate: f64, betas: [f64; 2], eps: f64, decay: f64) -> Result<(), Invalid> {
        lr(rate)?;
        fraction("beta1", betas[0])?;
        fraction("beta2", betas[1])?;
        at_least_zero("eps", eps)?;
        weight_decay(decay)
    }
}

/// What a rule may look at when it prepares a step of one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Input {
    /// The number of this step, from 1, counted for this parameter.
    pub t: u64,
    /// The learning rate of this step.
    pub lr: f64,
    /// The momentum of this step: [`Config::momentum`], unless a schedule has changed it.
    pub momentum: f64,
    /// The loss of the batch; always there for rules with a [`Rule::LOSS`].
    pub loss: Option<Loss>,
    /// The sums of [`Rule::REDUCE`].
    pub sums: [f64; SUMS],
}

/// The loss of a step, as far as the host knows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Loss {
    /// Its value.
    Known(f64),
    /// It is still on a device, whose kernel puts in what depends on it.
    OnDevice,
}

/// The most state buffers a rule may have.
pub const MAX_BUFFERS: usize = 4;
/// The number of sums a reduction makes.
pub const SUMS: usize = 2;

/// Why a step was refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// No loss was given.
    MissingLoss,
    /// f + c is not positive and finite.
    Loss {
        /// The loss f.
        loss: f64,
        /// The constant c.
        c: f64,
    },
    /// A rate with which decoupled decay leaves nothing of the parameter.
    Decay {
        /// The rate η.
        lr: f64,
        /// The decay λ.
        weight_decay: f64,
    },
}

/// One element's share of the sums in [`Input::sums`]: of the parameter, its gradient and its buffers.
pub type Share = fn(f64, f64, &[f64]) -> [f64; SUMS];

/// A pass over all elements before [`Rule::prepare`].
#[derive(Clone, Copy, Debug)]
pub enum Reduce {
    /// One pair of sums over all parameters together. A parameter at its first step has no past and is left out.
    Together(Share),
    /// A pair of sums for each parameter: its norms, for example.
    Each(Share),
}

/// How far an optimizer looks when it steps a parameter: what may be divided among processes that each keep a part of its
/// state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// At the element alone: a parameter can be cut anywhere.
    Element,
    /// At the whole parameter.
    Parameter,
    /// At sums over all parameters, which [`Optimizer::share_sums`](crate::Optimizer::share_sums) brings together.
    Sums,
    /// At all parameters.
    All,
}

impl Reduce {
    /// How far a rule with such a pass looks.
    pub const fn reach(of: Option<Self>) -> Reach {
        match of {
            None => Reach::Element,
            Some(Self::Each(_)) => Reach::Parameter,
            Some(Self::Together(_)) => Reach::Sums,
        }
    }

    /// What is summed.
    pub const fn share(self) -> Share {
        match self {
            Self::Together(share) | Self::Each(share) => share,
        }
    }
}

/// An element's weight for evaluation: of the hyperparameters, the parameter and its buffers.
pub type ElementEvaluation<C> = fn(&C, f64, &[f64]) -> f64;

/// A quantity of every element worth showing after a step.
#[derive(Clone, Copy, Debug)]
pub struct Observed<S> {
    /// What it is called.
    pub name: &'static str,
    /// Its value from the scalars of the step and the element's buffers.
    pub of: fn(&S, &[f64]) -> f64,
}

/// 1 - βᵗ, which an average that starts at 0 is divided by; the same bits on every system.
pub fn bias_correction(beta: f64, t: u64) -> f64 {
    1.0 - of_step(beta, t)
}

/// √(f + c) for the rules that follow the loss; NaN where the device will put it.
pub fn root_of_loss(loss: Option<Loss>, c: f64) -> Result<f64, Refusal> {
    match loss.ok_or(Refusal::MissingLoss)? {
        Loss::OnDevice => Ok(f64::NAN),
        Loss::Known(loss) if loss + c > 0.0 && (loss + c).is_finite() => Ok((loss + c).sqrt()),
        Loss::Known(loss) => Err(Refusal::Loss { loss, c }),
    }
}

/// An optimizer's arithmetic. Everything else (groups, state, clipping, threads, saving) is the
/// [driver](crate::Optim)'s.
pub trait Rule: Debug + Send + Sync + 'static {
    /// The hyperparameters.
    type Config: Config;
    /// What `prepare` hands to `update`.
    type Scalars: Scalars;

    /// The c of √(f + c), for rules that follow the loss f: they get it in [`Input::loss`].
    const LOSS: Option<fn(&Self::Config) -> f64> = None;
    /// Whether [`Rule::prepare`] must know the loss of a parameter's first step: where it is still on a device, that one is
    /// waited for.
    const KNOWS_FIRST_LOSS: bool = false;
    /// Names of the numbers kept for every parameter between steps, beside its buffers.
    const MEMORY: &'static [&'static str] = &[];
    /// What is to be summed before `prepare`.
    const REDUCE: Option<Reduce> = None;
    /// The fewest and the most state buffers that [`Rule::buffers`] may ask for: kernels are built for these only. More
    /// than [`MAX_BUFFERS`] do not compile:
    ///
    /// ```compile_fail,E0080
    /// # use taper_optim::rule::{Config, Input, Invalid, Real, Refusal, Rule, ranges};
    /// # use taper_optim::{Info, SgdConfig, Registry, scalars};
    /// # scalars! { struct None {} }
    /// # static INFO: Info = Info { name: "many", about: "", paper: "", year: 0, formula: "" };
    /// # #[derive(Debug)]
    /// # struct Many;
    /// impl Rule for Many {
    ///     const BUFFERS: (usize, usize) = (1, 5);
    ///     // …
    /// #   type Config = SgdConfig;
    /// #   type Scalars = None;
    /// #   fn names() -> Vec<(&'static Info, SgdConfig)> { Vec::new() }
    /// #   fn info(_: &SgdConfig) -> &'static Info { &INFO }
    /// #   fn buffers(_: &SgdConfig) -> &'static [&'static str] { &["m"] }
    /// #   fn prepare(_: &SgdConfig, _: &Input, _: &mut [f64]) -> Result<None, Refusal> { Ok(None {}) }
    /// #   fn update<F: Real>(_: &None<F>, x: F, _: F, _: &mut [F]) -> F { x }
    /// }
    /// Registry::builtin().register::<Many>();
    /// ```
    const BUFFERS: (usize, usize);
    /// The same arithmetic for GPUs: the text of an `update.h` (see [`device`](crate::device)), in which `Scalars` has the names
    /// of [`Scalars::NAMES`]. A rule without one runs on
    /// the CPU only.
    const UPDATE: Option<&'static str> = None;
    /// Where the weights for evaluation are, if they are not those that are trained: an element's, from the parameter and its
    /// buffers after a step.
    const EVALUATION: Option<ElementEvaluation<Self::Config>> = None;
    /// The name of the buffer whose elements follow √(f + c), for rules that keep one.
    const FOLLOWS: Option<&'static str> = None;
    /// What a probe shows of every element.
    const OBSERVE: Option<Observed<Self::Scalars>> = None;

    /// The names this rule is registered under, each with its defaults: SGD is `sgd`, `sgdm` and `nag`.
    fn names() -> Vec<(&'static Info, Self::Config)>;

    /// The record that fits a configuration.
    fn info(config: &Self::Config) -> &'static Info;

    /// The names of the state buffers, each as large as the parameter.
    fn buffers(config: &Self::Config) -> &'static [&'static str];

    /// What the buffers hold before the first step, in the order of [`Rule::buffers`].
    fn start(_config: &Self::Config, _input: &Input) -> Result<[f64; MAX_BUFFERS], Refusal> {
        Ok([0.0; MAX_BUFFERS])
    }

    /// The scalars of a step; `memory` has one number for each name in [`Rule::MEMORY`], 0 at first.
    fn prepare(config: &Self::Config, input: &Input, memory: &mut [f64]) -> Result<Self::Scalars, Refusal>;

    /// One element: takes the parameter, its gradient and its buffers, returns the new parameter.
    fn update<F: Real>(s: &<Self::Scalars as Scalars>::In<F>, x: F, g: F, state: &mut [F]) -> F;

    /// Numbers about the whole step worth showing; `means` has the mean of each buffer of the parameter.
    fn report(_s: &Self::Scalars, _means: &[f64]) -> Vec<(&'static str, f64)> {
        Vec::new()
    }
}
